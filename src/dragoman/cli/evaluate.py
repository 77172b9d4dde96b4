"""Commands about parallel texts: evaluate, score and align.

`evaluate` computes metrics such as BLEU for each system, `score` prints the log-probability of each translation under a
model, and `align` links the words of a text with the words of its translation.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from dragoman.cli import options as opt
from dragoman.cli.line_io import WarningLog, log_warning_counts, open_output
from dragoman.config.settings import build, override
from dragoman.errors import UserError
from dragoman.io import fill_cache_folder, read_lines
from dragoman.metrics.alignment import GoldLinks, Link, check_links, format_links, parse_links, score_alignments
from dragoman.progress import DETAIL, ProgressBar, Report, is_shown, log, results_console
from dragoman.run_dir import RunFolder

if TYPE_CHECKING:
    from dragoman.smt.alignment import Aligner, AlignerSettings

MAX_DRAWN_PAIRS = 3  # pairs that `align` draws as matrices, if stdout is a terminal
FileList = list[Path] | None
SOURCE_HELP = "plain text file, one sentence per line"
References = Annotated[FileList, Option(help="one or more files of reference translations or labels, line by line")]
Hypotheses = Annotated[FileList, Option(help="files with outputs of other systems, in addition to or instead of runs")]
PhrasebookSplit = Annotated[
    str, Option(metavar="SPLIT", help="split of the built-in corpus, instead of files: dev, test or unseen")
]
BleuTokenize = Annotated[str, Option(help="tokenizer of BLEU: 13a, intl, zh, char, ...; default: chosen by the script")]
Breakdown = Annotated[bool, Option("--breakdown", help="also print scores by source length and by word frequency")]
PageFile = Annotated[
    Path | None,
    Option(help="write an HTML page with scores and the lines where systems differ most", **opt.OUTPUT_PATH),
]


def evaluate_command(
    runs: Annotated[FileList, Argument(metavar="RUN [RUN ...]", help="run folders")] = None,
    source: Annotated[Path | None, Option(help=SOURCE_HELP)] = None,
    reference: References = None,
    hypotheses: Hypotheses = None,
    phrasebook: PhrasebookSplit = "",
    count: Annotated[int, Option(min=1, help="number of phrasebook sentences")] = 1000,
    metric: Annotated[list[str] | None, Option(help="metric; may be repeated; default: the run's setting")] = None,
    bleu_tokenize: BleuTokenize = "",
    conllu: opt.Conllu = None,
    beam: opt.Beam = None,
    tag: opt.Tag = "",
    breakdown: Breakdown = False,
    page: PageFile = None,
    as_json: opt.Json = False,
    engine: opt.EngineName = "torch",
    device: opt.Device = "auto",
) -> None:
    """Score systems on files, the phrasebook or data.test of the runs; test if each differs from the first system.

    -v also prints the n-gram precisions and the brevity penalty of BLEU. --hypotheses needs no run and no --source.
    """
    inputs = [source, conllu, *(reference or []), *(hypotheses or [])]
    opt.check_arguments(engine=engine, runs=runs or [], inputs=inputs, output=page)
    from dragoman.evaluation.report import format_breakdowns, format_scores, render_evaluation
    from dragoman.evaluation.systems import EvaluationOptions, Scorer, collect_outputs
    from dragoman.metrics.metrics import explain_wer, looks_tokenized, make_sacrebleu, select_metrics

    make_sacrebleu(bleu_tokenize, [])  # raises a UserError for an unknown tokenizer now, not after translating
    names = [entry.name for entry in select_metrics(metric)] if metric else []
    options = EvaluationOptions(source, reference or [], conllu, phrasebook, count, names, beam, tag, device, engine)
    recipes = {str(run): RunFolder(run).recipe() for run in runs or []} if breakdown or page else None
    report = Report()
    scorer, results = Scorer(tokenize=bleu_tokenize, recipes=recipes, report=report), []
    hint_pending = bleu_tokenize != "none"  # the hint about outputs that look tokenised is logged once
    for name, output in collect_outputs(runs or [], hypotheses or [], options, report):
        result = scorer.score(name, output)
        results.append(result)
        if name in map(str, runs or []):
            folder, test = RunFolder(name), str(source or f"phrasebook {phrasebook}")
            record_scores(folder, result, test=test, beam=beam, engine=engine, tag=tag)
            if note := explain_wer(result, folder.recipe().tokenizer.for_target().kind):
                log(note)
        log_warning_counts(Counter(result["warnings"]))
        if hint_pending and "bleu" in result and looks_tokenized(output.texts):
            log(f"the outputs of {name} look tokenised; --metric bleu_tokens does not tokenise them again")
            hint_pending = False
        if as_json:
            print(json.dumps(result, ensure_ascii=False), flush=True)
    if not as_json:
        tables = [format_scores(results, parts=is_shown(DETAIL)), *([format_breakdowns(results)] if breakdown else [])]
        results_console().print(*tables, sep="\n")
    if page:
        html = render_evaluation(scorer.tests)
        with open_output(page) as file:
            file.write(html)


def record_scores(
    folder: RunFolder, result: dict[str, Any], *, test: str, beam: int | None, engine: str, tag: str
) -> None:
    """Append a result to the run's scores.jsonl, for the model card. `test` is the default name of the test set."""
    from dragoman.evaluation.report import select_scores

    recipe = folder.recipe()
    scores = select_scores(result).items()
    folder.add_scores({
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "test": result.get("test", test),
        "lines": result["lines"],
        "beam": (beam or recipe.search.beam) if recipe.model.task == "translate" else None,
        "engine": "torch" if engine == "auto" else engine,
        "tag": tag,
        "scores": {name: {"value": score["value"], "signature": score["signature"]} for name, score in scores},
    })  # fmt: skip


def score_command(
    run: opt.Run,
    source: Annotated[Path, Option(help=SOURCE_HELP)],
    target: Annotated[Path, Option(help="translations to score, one per line of the source")],
    output_file: opt.OutputFile = None,
    conllu: opt.Conllu = None,
    tag: opt.Tag = "",
    batch: opt.BatchSize = 256,
    as_json: opt.Json = False,
    device: opt.Device = "auto",
) -> None:
    """Print the log-probability of each target given its source, in nats; nan if the pair is too long for the model.

    Scores can differ from those of `translate`: its search may split the same text into other subwords.
    """
    opt.check_arguments(runs=[run], inputs=[source, target, conllu])
    from dragoman.evaluation.systems import read_parallel_files, read_trees
    from dragoman.inference.loading import load_as
    from dragoman.inference.translator import Translator

    translator = load_as(Translator, run, device=device)
    sources, targets = read_parallel_files([source, target])
    trees = read_trees(conllu, sources, source) if conllu else None
    warning_log = WarningLog()
    with open_output(output_file) as file, ProgressBar("scoring", total=len(sources)) as bar:
        for start in range(0, len(sources), batch):
            part = slice(start, start + batch)
            scores = translator.score(sources[part], targets[part], trees=trees[part] if trees else None, tag=tag)
            for number, score in enumerate(scores, start + 1):
                text = f"{score.logp:.6f}"
                if as_json:
                    record = {"source": sources[number - 1], "target": targets[number - 1], **asdict(score)}
                    record |= {"logp": None, "mean": None} if math.isnan(score.logp) else {}  # JSON has no nan
                    text = json.dumps(record, ensure_ascii=False)
                print(text, file=file)
                warning_log.log(number, score.warnings)
            file.flush()
            bar.update(start + len(scores))
    log_warning_counts(warning_log.line_counts)


def align_command(
    source: Annotated[Path, Argument(help="text, one sentence per line, words separated by spaces")],
    target: Annotated[Path, Argument(help="the translation of the text, line by line")],
    overrides: opt.Overrides = None,
    output_file: opt.OutputFile = None,
    train: Annotated[
        tuple[Path, Path] | None, Option(help="source and target file with more training pairs, which are not aligned")
    ] = None,
    model: Annotated[Path | None, Option(help="align with a model that --save wrote, without training")] = None,
    save: Annotated[Path | None, Option(help="a folder to save the model in")] = None,
    gold: Annotated[
        Path | None, Option(help="gold links, one line per pair, such as 0-0 1?2: print the alignment error rate")
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """Learn which words of two texts are translations of each other, and print the links of each pair (0-0 1-2).

    Settings are those of the alignment model, such as hmm=8 or symmetrize=grow-diag.
    """
    opt.check_arguments(inputs=[source, target, gold, *(train or [])], output=output_file)
    if model and (train or save):
        raise UserError("--model aligns with a trained model; leave --train and --save out")
    from dragoman.smt.alignment import Aligner, AlignerSettings, check_symmetrization

    lines = read_parallel_lines(source, target)
    gold_links = read_gold_links(gold, lines) if gold else []
    values: dict[str, Any] = {}
    for item in overrides or []:
        override(values, item)
    saved = Aligner.load(model) if model else None
    settings = build(AlignerSettings, {**(saved.settings.model_dump() if saved else {}), **values})
    check_symmetrization(settings)
    aligner = saved or train_on_lines(lines, train, settings)
    aligner.settings = settings  # the overrides may choose another symmetrization for a saved model
    if save:
        fill_cache_folder(save, "aligner.json", aligner.save)
    with ProgressBar("aligning", total=len(lines[0]), unit="pairs") as bar:
        alignments = list(bar.iterate(aligner.align(*lines)))
    with open_output(output_file) as file:
        if file is sys.stdout and file.isatty() and not as_json:
            print_alignments(lines, alignments)
        else:
            texts = (json.dumps({"links": links}) if as_json else format_links(links) for links in alignments)
            file.writelines(f"{text}\n" for text in texts)
    if gold:
        score = score_alignments(alignments, gold_links)
        log(f"AER {score.aer:.1f}, precision {score.precision:.1f}, recall {score.recall:.1f} ({score.links:,} links)")


def read_parallel_lines(source: Path, target: Path) -> tuple[list[str], list[str]]:
    """Return the lines of two files; raise a UserError if their numbers of lines differ."""
    sources, targets = list(read_lines(source)), list(read_lines(target))
    if len(sources) != len(targets):
        raise UserError(f"{source} has {len(sources):,} lines but {target} has {len(targets):,}; they must be pairs")
    return sources, targets


def train_on_lines(
    lines: tuple[list[str], list[str]], train: tuple[Path, Path] | None, settings: AlignerSettings
) -> Aligner:
    """Train an alignment model on the lines and on the pairs in the files `train`; log the likelihood as it grows."""
    from dragoman.smt.alignment import train_aligner

    more_sources, more_targets = read_parallel_lines(*train) if train else ([], [])
    texts = lines[0] + more_sources, lines[1] + more_targets
    usable = sum(
        all(0 < len(line.split()) <= settings.max_length for line in pair) for pair in zip(*texts, strict=True)
    )
    if unusable := len(texts[0]) - usable:
        reason = f"empty or longer than {settings.max_length} words"
        log(f"{unusable:,} of {len(texts[0]):,} pairs are {reason}: they are aligned, but not used for training")
    # With more than one pass, the bar shows a percentage and no count; its total is then total * passes = 1000.
    with ProgressBar("learning to align", total=100, passes=10) as bar:
        return train_aligner(
            *texts,
            settings,
            report=lambda step: log(f"{step.kind} {step.iteration}: log-likelihood {step.log_likelihood:.4f} per word"),
            show=lambda fraction: bar.update(1000 * fraction),
        )


def print_alignments(lines: tuple[list[str], list[str]], alignments: Sequence[Sequence[Link]]) -> None:
    """Draw the first MAX_DRAWN_PAIRS pairs as matrices, then print the links of all pairs."""
    import numpy as np

    from dragoman.inspection.attention_maps import render_matrix

    console = results_console()
    for source, target, links in list(zip(*lines, alignments, strict=True))[:MAX_DRAWN_PAIRS]:
        source_words, target_words = source.split(), target.split()
        weights = np.zeros((len(target_words), len(source_words)))
        for i, j in links:
            weights[j, i] = 1.0
        console.print(render_matrix(source_words, target_words, weights))
    for links in alignments:
        console.print(format_links(links), markup=False)


def read_gold_links(path: Path, lines: tuple[list[str], list[str]]) -> list[GoldLinks]:
    """Read gold links, one line per pair; raise a UserError for links to words that do not exist."""
    gold_links = [parse_links(line, f"{path}, line {number}") for number, line in enumerate(read_lines(path), 1)]
    if len(gold_links) != len(lines[0]):
        raise UserError(f"{path} has {len(gold_links):,} lines but there are {len(lines[0]):,} pairs; they must match")
    for number, (links, source, target) in enumerate(zip(gold_links, *lines, strict=True), 1):
        check_links(links.possible, source.split(), target.split(), f"{path}, line {number}")
    return gold_links

"""The commands that score: evaluate, score."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from dragoman.cli import options as opt
from dragoman.cli.line_io import LineWarnings, log_counts, output_to
from dragoman.progress import DETAIL, ProgressBar, Report, is_shown, log, results_console
from dragoman.run_dir import RunFolder

FileList = list[Path] | None
SOURCE_HELP = "plain text file, one sentence per line"


def evaluate_command(
    runs: Annotated[FileList, Argument(metavar="RUN [RUN ...]", help="run folders")] = None,
    source: Annotated[Path | None, Option(help=SOURCE_HELP)] = None,
    reference: Annotated[
        FileList, Option(help="one or more files of reference translations or labels, line by line")
    ] = None,
    hypotheses: Annotated[
        FileList, Option(help="files with outputs of other systems, in addition to or instead of runs")
    ] = None,
    phrasebook: Annotated[
        str, Option(metavar="SPLIT", help="split of the built-in corpus, instead of files: dev, test or unseen")
    ] = "",
    count: Annotated[int, Option(min=1, help="number of phrasebook sentences")] = 1000,
    metric: Annotated[list[str] | None, Option(help="metric; may be repeated; default: the run's setting")] = None,
    bleu_tokenize: Annotated[
        str, Option(help="tokenizer of BLEU: 13a, intl, zh, char, ...; default: chosen by the script")
    ] = "",
    conllu: opt.Conllu = None,
    beam: opt.Beam = None,
    tag: opt.Tag = "",
    breakdown: Annotated[
        bool, Option("--breakdown", help="also print scores by source length and by word frequency")
    ] = False,
    page: Annotated[
        Path | None,
        Option(help="write an HTML page with scores and the lines where systems differ most", **opt.WRITTEN_FILE),
    ] = None,
    as_json: opt.Json = False,
    engine: opt.EngineName = "torch",
    device: opt.Device = "auto",
) -> None:
    """Score systems on files, the phrasebook or data.test of the runs; test each for difference from the first.

    -v also prints the n-gram precisions and the brevity penalty of BLEU. --hypotheses needs no run and no --source.
    """
    inputs = [source, conllu, *(reference or []), *(hypotheses or [])]
    opt.check_arguments(engine=engine, runs=runs or [], inputs=inputs, output=page)
    from dragoman.evaluation.report import format_breakdowns, format_scores, render_evaluation
    from dragoman.evaluation.systems import EvaluationOptions, Scorer, collect_outputs
    from dragoman.metrics.metrics import looks_tokenized, make_sacrebleu, note_on_wer, select_metrics

    make_sacrebleu(bleu_tokenize, [])  # refuse an unknown tokenizer now, not after translating
    names = [entry.name for entry in select_metrics(metric)] if metric else []
    options = EvaluationOptions(source, reference or [], conllu, phrasebook, count, names, beam, tag, device, engine)
    recipes = {str(run): RunFolder(run).recipe() for run in runs or []} if breakdown or page else None
    report = Report()
    scorer, results = Scorer(tokenize=bleu_tokenize, recipes=recipes, report=report), []
    hint_pending = bleu_tokenize != "none"  # the hint about outputs that look tokenised is logged once
    for name, output in collect_outputs(runs or [], hypotheses or [], options, report):
        results.append(scorer.score(name, output))
        if name in map(str, runs or []):
            folder, test = RunFolder(name), str(source or f"phrasebook {phrasebook}")
            keep_scores(folder, results[-1], test=test, beam=beam, engine=engine, tag=tag)
            if note := note_on_wer(results[-1], folder.recipe().tokenizer):
                log(note)
        log_counts(Counter(results[-1]["warnings"]))
        if hint_pending and "bleu" in results[-1] and looks_tokenized(output.texts):
            log(f"the outputs of {name} look tokenised; --metric bleu_tokens does not tokenise them again")
            hint_pending = False
        if as_json:
            print(json.dumps(results[-1], ensure_ascii=False), flush=True)
    if not as_json:
        shown = [format_scores(results, parts=is_shown(DETAIL)), *([format_breakdowns(results)] if breakdown else [])]
        results_console().print(*shown, sep="\n")
    if page:
        html = render_evaluation(scorer.tests)
        with output_to(page) as sink:
            sink.write(html)


def keep_scores(
    folder: RunFolder, result: dict[str, Any], *, test: str, beam: int | None, engine: str, tag: str
) -> None:
    """Append a result to the run's scores.jsonl, for its model card."""
    from dragoman.evaluation.report import scores_of

    recipe = folder.recipe()
    scores = scores_of(result).items()
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

    Targets are tokenized again, so scores can differ from those of `translate`, whose search may use other subwords.
    """
    opt.check_arguments(runs=[run], inputs=[source, target, conllu])
    from dragoman.evaluation.systems import read_parallel_files, read_trees
    from dragoman.inference.loading import load_as
    from dragoman.inference.translator import Translator

    translator = load_as(Translator, run, device=device)
    sources, targets = read_parallel_files([source, target])
    trees = read_trees(conllu, sources, source) if conllu else None
    warned = LineWarnings()
    with output_to(output_file) as sink, ProgressBar("scoring", total=len(sources)) as bar:
        for begun in range(0, len(sources), batch):
            part = slice(begun, begun + batch)
            scores = translator.score(sources[part], targets[part], trees=trees[part] if trees else None, tag=tag)
            for number, score in enumerate(scores, begun + 1):
                text = f"{score.logp:.6f}"
                if as_json:
                    record = {"source": sources[number - 1], "target": targets[number - 1], **asdict(score)}
                    record |= {"logp": None, "mean": None} if math.isnan(score.logp) else {}  # JSON has no nan
                    text = json.dumps(record, ensure_ascii=False)
                print(text, file=sink)
                warned.log(number, score.warnings)
            sink.flush()
            bar.update(begun + len(scores))
    log_counts(warned.lines)

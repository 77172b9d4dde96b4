"""The commands that score: evaluate, score."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from dragoman.cli.lines import LineWarnings, log_counts, output_to
from dragoman.cli.options import (
    BatchSize,
    Beam,
    Conllu,
    Device,
    EngineName,
    Json,
    OutputFile,
    Run,
    SourceFile,
    Tag,
    check_arguments,
    parse_output_file,
)
from dragoman.progress import DETAIL, ProgressBar, Report, is_shown, log, results_console
from dragoman.run_dir import RunFolder

FileList = list[Path] | None
Runs = Annotated[FileList, typer.Argument(metavar="RUN [RUN ...]", help="run folders", show_default=False)]
References = Annotated[FileList, typer.Option(help="one or several, line by line", show_default=False)]
Hypotheses = Annotated[
    FileList, typer.Option(help="outputs of other systems, beside or instead of runs", show_default=False)
]
MetricNames = Annotated[
    list[str] | None,
    typer.Option(help="metric to score by, may be repeated; by default the run's own", show_default=False),
]
BleuTokenize = Annotated[
    str, typer.Option(help="how BLEU tokenises: 13a, intl, zh, char, ...; by default as fits the script")
]
Breakdown = Annotated[bool, typer.Option("--breakdown", help="also scores by source length and by word frequency")]
Page = Annotated[
    Path | None,
    typer.Option(
        parser=parse_output_file,
        metavar="<path>",
        help="write an HTML page: scores, and lines where systems differ most",
        show_default=False,
    ),
]


def evaluate_command(
    runs: Runs = None,
    source: SourceFile = None,
    reference: References = None,
    hypotheses: Hypotheses = None,
    phrasebook: Annotated[str, typer.Option(metavar="SPLIT", help="instead of files: dev, test or unseen")] = "",
    count: Annotated[int, typer.Option(min=1, help="sentences of the phrasebook")] = 1000,
    metric: MetricNames = None,
    bleu_tokenize: BleuTokenize = "",
    conllu: Conllu = None,
    beam: Beam = None,
    tag: Tag = "",
    breakdown: Breakdown = False,
    page: Page = None,
    as_json: Json = False,
    engine: EngineName = "torch",
    device: Device = "auto",
) -> None:
    """Score systems on files, on the phrasebook or on their own data.test, and test each against the first.

    -v also prints the n-gram precisions and the brevity penalty of BLEU. --hypotheses needs no run and no --source.
    """
    inputs = [source, conllu, *(reference or []), *(hypotheses or [])]
    check_arguments(engine=engine, runs=runs or [], inputs=inputs, output=page)
    from dragoman.evaluation.report import format_breakdowns, format_scores, render_evaluation
    from dragoman.evaluation.systems import EvaluationOptions, Scorer, collect_outputs
    from dragoman.metrics.metrics import looks_tokenized, make_sacrebleu, note_on_wer, select_metrics

    make_sacrebleu(bleu_tokenize, [])  # refuse an unknown tokenizer now, not after the work
    names = [one.name for one in select_metrics(metric)] if metric else []
    options = EvaluationOptions(source, reference or [], conllu, phrasebook, count, names, beam, tag, device, engine)
    recipes = {str(run): RunFolder(run).recipe() for run in runs or []} if breakdown or page else None
    report = Report()
    scorer, results = Scorer(tokenize=bleu_tokenize, recipes=recipes, report=report), []
    plain = bleu_tokenize != "none"  # no message yet about outputs that look tokenised
    for name, output in collect_outputs(runs or [], hypotheses or [], options, report):
        results.append(scorer.score(name, output))
        if name in map(str, runs or []):
            folder, test = RunFolder(name), str(source or f"phrasebook {phrasebook}")
            keep_scores(folder, results[-1], test=test, beam=beam, engine=engine, tag=tag)
            if note := note_on_wer(results[-1], folder.recipe().tokenizer):
                log(note)
        log_counts(Counter(results[-1]["warnings"]))
        if plain and "bleu" in results[-1] and looks_tokenized(output.texts):
            log(f"the outputs of {name} look tokenised; --metric bleu_tokens counts tokens as they are")
            plain = False
        if as_json:
            print(json.dumps(results[-1], ensure_ascii=False), flush=True)
    if not as_json:
        shown = [format_scores(results, parts=is_shown(DETAIL)), *([format_breakdowns(results)] if breakdown else [])]
        results_console().print(*shown, sep="\n")
    if page:
        whole = render_evaluation(scorer.tests)
        with output_to(page) as sink:
            sink.write(whole)


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
        "scores": {name: {"value": one["value"], "signature": one["signature"]} for name, one in scores},
    })  # fmt: skip


def score_command(
    run: Run,
    source: Annotated[Path, typer.Option(help="plain text, one sentence a line", show_default=False)],
    target: Annotated[Path, typer.Option(help="the translations to score, line by line", show_default=False)],
    output_file: OutputFile = None,
    conllu: Conllu = None,
    tag: Tag = "",
    batch: BatchSize = 256,
    as_json: Json = False,
    device: Device = "auto",
) -> None:
    """Print the log-probability of each target given its source, in nats; nan where the model cannot score it.

    Targets are tokenized again, so the score differs from that of the search where it used other subwords.
    """
    check_arguments(runs=[run], inputs=[source, target, conllu])
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
            found = translator.score(sources[part], targets[part], trees=trees[part] if trees else None, tag=tag)
            for number, one in enumerate(found, begun + 1):
                text = f"{one.logp:.6f}"
                if as_json:
                    whole = {"source": sources[number - 1], "target": targets[number - 1], **asdict(one)}
                    whole |= {"logp": None, "mean": None} if math.isnan(one.logp) else {}  # JSON has no nan
                    text = json.dumps(whole, ensure_ascii=False)
                print(text, file=sink)
                warned.log(number, one.warnings)
            sink.flush()
            bar.update(begun + len(found))
    log_counts(warned.lines)

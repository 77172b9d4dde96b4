"""The commands `evaluate`, which scores systems by metrics, and `score`, which prints log-probabilities of texts."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.text import Text
from typer import Argument, Option

from dragoman.cli import options as opt
from dragoman.cli.line_io import WarningLog, log_warning_counts, open_output
from dragoman.errors import UserError
from dragoman.io import read_lines
from dragoman.progress import DETAIL, ProgressBar, Report, is_shown, log, results_console
from dragoman.run_dir import RunFolder

if TYPE_CHECKING:
    from dragoman.evaluation.systems import EvaluationOptions

FileList = list[Path] | None
SOURCE_HELP = "plain text file, one sentence per line"
References = Annotated[FileList, Option(help="one or more files of reference translations or labels, line by line")]
Hypotheses = Annotated[FileList, Option(help="files with outputs of other systems, in addition to or instead of runs")]
PhrasebookSplit = Annotated[
    str, Option(metavar="SPLIT", help="split of the built-in corpus, instead of files: dev, test or unseen")
]
PhrasebookDocuments = Annotated[
    bool, Option("--documents", help="phrasebook: sentences whose pronouns refer to the sentence before")
]
BleuTokenize = Annotated[str, Option(help="tokenizer of BLEU: 13a, intl, zh, char, ...; default: chosen by the script")]
Breakdown = Annotated[bool, Option("--breakdown", help="also print scores by source length and by word frequency")]
RoundTripRun = Annotated[
    Path | None,
    Option(metavar="RUN", help="without references: translate back with this run, and compare with the sources"),
]
PageFile = Annotated[
    Path | None,
    Option(help="write an HTML page with scores and the lines where systems differ most", **opt.OUTPUT_PATH),
]


@dataclass(frozen=True)
class EvaluateOptions:
    """The arguments and options of `dragoman evaluate`, one per field (`adapt_for_typer`)."""

    runs: Annotated[FileList, Argument(metavar="RUN [RUN ...]", help="run folders")] = None
    source: Annotated[Path | None, Option(help=SOURCE_HELP)] = None
    reference: References = None
    hypotheses: Hypotheses = None
    phrasebook: PhrasebookSplit = ""
    count: Annotated[int, Option(min=1, help="number of phrasebook sentences")] = 1000
    documents: PhrasebookDocuments = False
    metric: Annotated[list[str] | None, Option(help="metric; may be repeated; default: the run's setting")] = None
    bleu_tokenize: BleuTokenize = ""
    conllu: opt.Conllu = None
    beam: opt.Beam = None
    tag: opt.Tag = ""
    context: opt.Context = None
    breakdown: Breakdown = False
    page: PageFile = None
    round_trip: RoundTripRun = None
    as_json: opt.Json = False
    engine: opt.EngineName = "auto"
    device: opt.Device = "auto"


def evaluate_command(options: EvaluateOptions) -> None:
    """Score systems on files, the phrasebook or data.test of the runs; test if each differs from the first system.

    -v also prints the n-gram precisions and the brevity penalty of BLEU. --hypotheses needs no run and no --source.
    """
    runs, references, hypotheses = options.runs or [], options.reference or [], options.hypotheses or []
    all_runs = [*runs, *([options.round_trip] if options.round_trip else [])]
    inputs = [options.source, options.conllu, *references, *hypotheses]
    opt.check_arguments(engine=options.engine, runs=all_runs, inputs=inputs, output=options.page)
    from dragoman.evaluation.systems import EvaluationOptions
    from dragoman.metrics.metrics import make_sacrebleu, select_metrics

    make_sacrebleu(options.bleu_tokenize, [])  # raises a UserError for an unknown tokenizer now, not after translating
    evaluation = EvaluationOptions(
        source=options.source,
        references=references,
        conllu=options.conllu,
        phrasebook=options.phrasebook,
        count=options.count,
        documents=options.documents,
        metrics=[entry.name for entry in select_metrics(options.metric)] if options.metric else [],
        beam=options.beam,
        tag=options.tag,
        device=options.device,
        engine=options.engine,
        context=options.context,
    )
    if not options.round_trip:
        score_systems(runs, hypotheses, options, evaluation)
        return
    check_round_trip_options(options)
    print_round_trips(runs, options.round_trip, evaluation, as_json=options.as_json)


def check_round_trip_options(options: EvaluateOptions) -> None:
    """Raise a UserError for options that round trips do not allow, and if there is no run."""
    others = {
        "--reference": options.reference,
        "--hypotheses": options.hypotheses,
        "--conllu": options.conllu,
        "--page": options.page,
        "--breakdown": options.breakdown,
    }
    if given := [name for name, value in others.items() if value]:
        raise UserError(f"--round-trip cannot be combined with {given[0]}; leave one of them out")
    if not options.runs:
        raise UserError("--round-trip needs RUN, the run that translates the sources first; name its folder")


def score_systems(
    runs: list[Path], hypotheses: list[Path], options: EvaluateOptions, evaluation: EvaluationOptions
) -> None:
    """Print the scores of all systems, write the page, and record the scores of runs in their folders."""
    from dragoman.evaluation.report import format_breakdowns, format_scores, render_evaluation
    from dragoman.evaluation.systems import Scorer, collect_outputs
    from dragoman.metrics.metrics import explain_wer, looks_tokenized

    shows_lines = options.breakdown or options.page
    recipes = {str(run): RunFolder(run).load_recipe() for run in runs} if shows_lines else None
    report = Report()
    scorer, results = Scorer(tokenize=options.bleu_tokenize, recipes=recipes, report=report), []
    hint_pending = options.bleu_tokenize != "none"  # the hint below, about tokenised outputs, is logged only once
    documents = " documents" if options.documents else ""
    test = str(options.source or f"phrasebook {options.phrasebook}{documents}")
    for name, output in collect_outputs(runs, hypotheses, evaluation, report):
        result = scorer.score(name, output)
        results.append(result)
        if name in map(str, runs):  # a run, not a file of --hypotheses
            folder = RunFolder(name)
            record_scores(folder, result, test=test, beam=options.beam, engine=options.engine, tag=options.tag)
            if note := explain_wer(result, folder.load_recipe().tokenizer.for_target().kind):
                log(note)
        log_warning_counts(Counter(result["warnings"]))
        if hint_pending and "bleu" in result and looks_tokenized(output.texts):
            log(f"the outputs of {name} look tokenised; --metric bleu_tokens does not tokenise them again")
            hint_pending = False
        if options.as_json:
            print(json.dumps(result, ensure_ascii=False), flush=True)
    if not options.as_json:
        scores = format_scores(results, parts=is_shown(DETAIL))
        results_console().print(scores, *([format_breakdowns(results)] if options.breakdown else []), sep="\n")
    if options.page:
        html = render_evaluation(scorer.systems_by_test)
        with open_output(options.page) as file:
            file.write(html)


def print_round_trips(runs: list[Path], back_run: Path, options: EvaluationOptions, *, as_json: bool) -> None:
    """Translate the sources and translate the results back, and print how much is left of the sources."""
    from dragoman.evaluation.round_trip import evaluate_round_trips, format_round_trips

    results = []
    for result in evaluate_round_trips(runs, back_run, options, Report()):
        results.append(result)
        if as_json:
            print(json.dumps(result, ensure_ascii=False), flush=True)
    if not as_json:
        results_console().print(Text(format_round_trips(results), no_wrap=True, overflow="ignore"))


def record_scores(
    folder: RunFolder, result: dict[str, Any], *, test: str, beam: int | None, engine: str, tag: str
) -> None:
    """Append a result to scores.jsonl, for the model card. `test` names the test set if the result does not."""
    from dragoman.evaluation.report import select_scores
    from dragoman.smt.settings import SmtSettings

    recipe = folder.load_recipe()
    default_beam = recipe.model.decoder.stack if isinstance(recipe.model, SmtSettings) else recipe.search.beam
    scores = select_scores(result).items()
    folder.add_scores({
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "test": result.get("test", test),
        "lines": result["lines"],
        "beam": (beam or default_beam) if recipe.model.task == "translate" else None,
        "engine": ("smt" if isinstance(recipe.model, SmtSettings) else "torch") if engine == "auto" else engine,
        "tag": tag,
        "scores": {name: {"value": score["value"], "signature": score["signature"]} for name, score in scores},
    })  # fmt: skip


def score_command(
    run: Annotated[Path, Argument(metavar="RUN|FILE.arpa", help="run folder, or an n-gram language model")],
    target: Annotated[Path, Option(help="translations to score, one per line of the source; or plain text")],
    source: Annotated[Path | None, Option(help=f"{SOURCE_HELP}; not for a language model")] = None,
    output_file: opt.OutputFile = None,
    conllu: opt.Conllu = None,
    tag: opt.Tag = "",
    context: opt.Context = None,
    batch: opt.BatchSize = 256,
    as_json: opt.Json = False,
    device: opt.Device = "auto",
) -> None:
    """Print the log-probability of each target given its source, in nats; nan if the pair is too long for the model.

    Scores can differ from those of `translate`: its search may split the same text into other subwords. For a
    phrase-based run they are weighted sums of features. With an n-gram model (ARPA), each line is scored by itself.
    """
    if run.is_file() or run.suffix == ".arpa":
        opt.check_arguments(inputs=[run, target])
        if source or conllu or tag or context:
            options = "--source, --conllu, --tag and --context"
            raise UserError(f"a language model scores --target by itself; leave {options} out")
        score_by_ngrams(run, target, output_file, as_json=as_json)
        return
    opt.check_arguments(runs=[run], inputs=[source, target, conllu])
    if source is None:
        raise UserError("score needs --source F with the sources of the targets")
    from dragoman.data.context import attach_to_lines
    from dragoman.evaluation.systems import read_parallel_files, read_trees
    from dragoman.inference.loading import load_as
    from dragoman.inference.translator import Translator

    translator = load_as(Translator, run, device=device)
    sources, targets = read_parallel_files([source, target])
    lines = attach_to_lines(sources, translator.choose_context(context))
    trees = read_trees(conllu, sources, source) if conllu else None
    warning_log = WarningLog()
    with open_output(output_file) as file, ProgressBar("scoring", total=len(sources)) as bar:
        for start in range(0, len(sources), batch):
            part = slice(start, start + batch)
            part_trees = trees[part] if trees else None
            scores = translator.score(lines[part], targets[part], trees=part_trees, tag=tag, context=context)
            for number, score in enumerate(scores, start + 1):
                text = f"{score.logp:.6f}"
                if as_json:
                    record = {"source": sources[number - 1], "target": targets[number - 1], **asdict(score)}
                    record |= {"logp": None, "mean": None} if math.isnan(score.logp) else {}  # JSON has no nan
                    text = json.dumps(record, ensure_ascii=False)
                print(text, file=file)
                warning_log.log(number, score.warnings)
            file.flush()
            bar.set_done(start + len(scores))
    log_warning_counts(warning_log.line_counts)


def score_by_ngrams(model: Path, target: Path, output_file: Path | None, *, as_json: bool) -> None:
    """Print the log-probability of each line, its end included, and log the perplexity of the file."""
    from dragoman.smt.perplexity import measure_perplexity, open_ngrams

    ngrams = open_ngrams(model)
    lines = [line.split() for line in read_lines(target)]
    with open_output(output_file) as file, ProgressBar("scoring", total=len(lines)) as bar:
        scores = [ngrams.score(words) for words in bar.iterate(lines)]
        for words, score in zip(lines, scores, strict=True):
            text = f"{score.log_prob:.6f}"
            if as_json:
                record = {"logp": score.log_prob, "tokens": [*words, "</s>"], "token_logps": score.log_probs}
                text = json.dumps({**record, "unknown_words": sum(score.unknown)}, ensure_ascii=False)
            print(text, file=file)
    total = measure_perplexity(scores)
    if not scores:
        log(f"{str(target)!r} is empty, so it has no perplexity")
        return
    log(
        f"perplexity {total.perplexity:.2f} ({total.tokens:,} tokens, ends of lines included); "
        f"{total.known_perplexity:.2f} without {total.unknown_words:,} unknown words"
    )

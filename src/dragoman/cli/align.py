"""The command `align`, which links the words of a text with the words of its translation."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from dragoman.cli import options as opt
from dragoman.cli.line_io import WarningLog, log_warning_counts, open_output
from dragoman.config.settings import apply_override, parse_settings, suggest_name
from dragoman.errors import UserError
from dragoman.io import create_folder_atomically, read_lines
from dragoman.metrics.alignment import (
    AlignmentCounts,
    AlignmentScore,
    GoldLinks,
    Link,
    check_links,
    format_links,
    parse_links,
)
from dragoman.progress import WARNING, ProgressBar, log, results_console
from dragoman.run_dir import RunFolder
from dragoman.smt.settings import ALIGNER_FILE, ALIGNMENT_METHODS, MAX_LENGTH, AlignerSettings, LinkSettings
from dragoman.types import ParallelTexts

if TYPE_CHECKING:
    from dragoman.smt.alignment import Aligner

MAX_DRAWN_PAIRS = 3  # pairs that are drawn as matrices if stdout is a terminal
ATTENTION_BATCH = 256  # pairs whose attention weights are in memory at a time


def align_command(
    method: Annotated[
        str,
        Argument(
            metavar="METHOD|FOLDER|FILE",
            help="a method to train (joint-hmm is the best; hmm, ibm1, ibm2, diagonal), a run folder (align by its "
            "attention), a folder that --save wrote, or a file of links",
        ),
    ],
    source: Annotated[Path, Option(help="text, one sentence per line, words separated by spaces")],
    target: Annotated[Path, Option(help="the translation of the text, line by line")],
    overrides: opt.Overrides = None,
    output_file: opt.OutputFile = None,
    gold: Annotated[
        Path | None, Option(help="gold links, one line per pair, such as 0-0 1?2: print the alignment error rate")
    ] = None,
    train: Annotated[
        tuple[Path, Path] | None, Option(help="source and target file with more training pairs, which are not aligned")
    ] = None,
    save: Annotated[Path | None, Option(help="a new folder to save the trained model in")] = None,
    reverse: Annotated[
        Path | None, Option(help="for a file of links: those of the opposite direction, as target-source positions")
    ] = None,
    layer: Annotated[
        int | None, Option(min=1, help="for a run: the decoder layer whose attention is used; default: the best one")
    ] = None,
    shift: Annotated[
        bool, Option("--shift", help="for a run: use the attention of the step after a word was generated")
    ] = False,
    tag: opt.Tag = "",
    as_json: opt.Json = False,
    device: opt.Device = "auto",
) -> None:
    """Link words that are translations of each other; print the links of each pair as positions: 0-0 1-2.

    Settings are those of the method, such as hmm=8 or symmetrize=grow-diag.
    """
    opt.check_arguments(inputs=[source, target, gold, reverse, *(train or [])], output=output_file)
    kind = find_argument_kind(method)
    given = {"train": train, "save": save, "reverse": reverse, "layer": layer, "shift": shift, "tag": tag}
    check_options(kind, {name for name, value in given.items() if value})
    if save and save.exists():
        raise UserError(f"--save {save}: this already exists; choose another name, or remove it first")
    lines = read_parallel_lines(source, target)
    gold_links = read_link_file(gold, lines) if gold else []
    values: dict[str, Any] = {}
    for item in overrides or []:
        apply_override(values, item)
    if kind == "run":
        alignments = align_by_attention(method, lines, values, layer=layer, shift=shift, tag=tag, device=device)
    elif kind == "file":
        alignments = read_links(Path(method), reverse, lines, values)
    else:
        aligner = open_aligner(method, lines, train, values)
        if save:
            create_folder_atomically(save, write=aligner.save, required_file=ALIGNER_FILE)
        alignments = aligner.align(*lines)
    score = write_alignments(lines, alignments, gold_links, output_file, as_json=as_json)
    if score:
        print_score(score, to_stdout=output_file is not None, as_json=as_json)


def find_argument_kind(method: str) -> str:
    """Return what the first argument of the command is: method, model (a saved aligner), run or file."""
    path = Path(method)
    if method in ALIGNMENT_METHODS:
        return "method"
    if path.is_file():
        return "file"
    if path.is_dir():
        if (path / ALIGNER_FILE).exists() or not RunFolder(path).format_file.exists():
            return "model"
        RunFolder(path).check_format()
        return "run"
    names = ", ".join(ALIGNMENT_METHODS)
    raise UserError(f"{method!r} is neither a method{suggest_name(method, ALIGNMENT_METHODS)} ({names}) nor a file or "
                    "folder that exists")  # fmt: skip


def check_options(kind: str, given: set[str]) -> None:
    """Refuse options that have no effect for this kind of first argument (see `find_argument_kind`)."""
    allowed = {"method": {"train", "save"}, "model": set[str](), "run": {"layer", "shift", "tag"}, "file": {"reverse"}}
    descriptions = {"method": "a method to train", "run": "a run folder", "file": "a file of links"}
    for name in sorted(given - allowed[kind]):
        suitable = next(text for other, text in descriptions.items() if name in allowed[other])
        raise UserError(f"--{name} is for {suitable} as the first argument; leave it out")


def read_parallel_lines(source: Path, target: Path) -> ParallelTexts:
    sources, targets = list(read_lines(source)), list(read_lines(target))
    if len(sources) != len(targets):
        raise UserError(f"{source} has {len(sources):,} lines but {target} has {len(targets):,}; they must be pairs")
    return sources, targets


def open_aligner(method: str, lines: ParallelTexts, train: tuple[Path, Path] | None, values: dict[str, Any]) -> Aligner:
    """Train an alignment model, or load a saved one; `values` override its settings."""
    from dragoman.smt.alignment import KINDS, Aligner

    # A line with so many words has at least twice as many characters; counting words of all lines would be slow.
    too_long = sum(
        any(len(line) > MAX_LENGTH * 2 and len(line.split()) > MAX_LENGTH for line in pair)
        for pair in zip(*lines, strict=True)
    )
    if too_long:
        message = f"{too_long:,} pairs have more than {MAX_LENGTH:,} words on a side and are aligned in parts"
        log(f"{message}; split them into sentences for better links", WARNING)
    if method in ALIGNMENT_METHODS:
        settings = parse_settings(AlignerSettings, {**ALIGNMENT_METHODS[method], **values})
        settings.check()
        return train_on_lines(lines, train, settings)
    aligner = Aligner.load(Path(method))
    # KINDS are the names of models, such as ibm1, and of the settings with their numbers of iterations.
    for name in values.keys() & {*KINDS, "agree", "null", "estimate_null", "lowercase", "max_length"}:
        raise UserError(f"{name} is a setting of training, but {method!r} is already trained; leave it out")
    aligner.settings = parse_settings(AlignerSettings, {**aligner.settings.model_dump(), **values})
    aligner.settings.check()
    return aligner


def train_on_lines(lines: ParallelTexts, train: tuple[Path, Path] | None, settings: AlignerSettings) -> Aligner:
    """Train an alignment model on the lines and on the pairs in the files `train`; log the likelihood."""
    from dragoman.smt.alignment import train_aligner

    more_sources, more_targets = read_parallel_lines(*train) if train else ([], [])
    texts = lines[0] + more_sources, lines[1] + more_targets
    # With several passes, the bar shows a percentage instead of a count. Its total is total * passes = 1000.
    with ProgressBar("training", total=100, passes=10) as bar:
        aligner = train_aligner(
            *texts,
            settings,
            report=lambda step: log(f"{step.kind} {step.iteration}: log-likelihood {step.log_likelihood:.4f} per word"),
            show=lambda fraction: bar.set_done(1000 * fraction),
        )
    if aligner.skipped_pairs:
        reason = f"empty or longer than {settings.max_length} words"
        log(f"{aligner.skipped_pairs:,} of {len(texts[0]):,} pairs were not used for training: they are {reason}")
    return aligner


def align_by_attention(
    run: str, lines: ParallelTexts, values: dict[str, Any], *, layer: int | None, shift: bool, tag: str, device: str
) -> Iterator[Sequence[Link]]:
    """Yield the links of each pair by the attention of a translation model."""
    from dragoman.inference.attention_alignment import AttentionAligner
    from dragoman.inference.loading import load_as
    from dragoman.inference.translator import Translator
    from dragoman.smt.symmetrization import link_by_attention

    settings = parse_settings(LinkSettings, values)
    settings.check(attention=True)
    if RunFolder(run).load_recipe().model.kind == "smt":
        raise UserError(f"{run!r} is a phrase-based system without attention; align with joint-hmm, which it uses")
    aligner = AttentionAligner(load_as(Translator, run, device=device), layer=layer, shift=shift, tag=tag)

    def iter_links() -> Iterator[Sequence[Link]]:
        warning_log = WarningLog()
        for start in range(0, len(lines[0]), ATTENTION_BATCH):
            part = slice(start, start + ATTENTION_BATCH)
            for number, attention in enumerate(aligner.compute(lines[0][part], lines[1][part]), start + 1):
                if attention.warning:
                    warning_log.log(number, [attention.warning])
                yield link_by_attention(attention.weight_JI, settings.symmetrize, settings.threshold)
        log_warning_counts(warning_log.line_counts)

    return iter_links()


def read_links(
    forward: Path, reverse: Path | None, lines: ParallelTexts, values: dict[str, Any]
) -> Iterator[Sequence[Link]]:
    """Yield the links in a file, symmetrised with those of the opposite direction if there is a second file."""
    from dragoman.smt.symmetrization import combine_links

    settings = parse_settings(LinkSettings, values)
    settings.check(attention=False)
    if values and not reverse:
        raise UserError(f"{next(iter(values))} symmetrises two directions; name the file of the other with --reverse")
    word_counts = [[len(line.split()) for line in side] for side in lines]
    forward_links = [links.possible for links in read_link_file(forward, lines)]
    if not reverse:
        return iter([sorted(links) for links in forward_links])
    reverse_links = [links.possible for links in read_link_file(reverse, (lines[1], lines[0]))]
    return (
        combine_links(links, ((i, j) for j, i in swapped), settings.symmetrize, (source_length, target_length))
        for links, swapped, source_length, target_length in zip(forward_links, reverse_links, *word_counts, strict=True)
    )


def write_alignments(
    lines: ParallelTexts,
    alignments: Iterable[Sequence[Link]],
    gold: Sequence[GoldLinks],
    output_file: Path | None,
    *,
    as_json: bool,
) -> AlignmentScore | None:
    """Write the links of all pairs as they are found; return their score if there are gold links.

    On a terminal, the first MAX_DRAWN_PAIRS pairs are also drawn as matrices.
    """
    counts = AlignmentCounts()
    with ExitStack() as stack:
        file = stack.enter_context(open_output(output_file))
        draws_matrices = file is sys.stdout and file.isatty() and not as_json
        if not draws_matrices:  # on a terminal, the links themselves show the progress
            bar = stack.enter_context(ProgressBar("aligning", total=len(lines[0]), unit="pairs"))
            alignments = bar.iterate(alignments)
        for number, links in enumerate(alignments):
            if draws_matrices and number < MAX_DRAWN_PAIRS:
                draw_alignment(lines[0][number], lines[1][number], links)
            print(json.dumps({"links": links}) if as_json else format_links(links), file=file)
            if gold:
                counts.add(links, gold[number])
    return counts.compute_score() if gold else None


def print_score(score: AlignmentScore, *, to_stdout: bool, as_json: bool) -> None:
    """Print alignment error rate, precision and recall; to stderr if stdout has the links."""
    text = f"AER {score.aer:.1f}, precision {score.precision:.1f}, recall {score.recall:.1f} ({score.links:,} links)"
    if to_stdout:
        print(json.dumps(score._asdict()) if as_json else text)
    else:
        log(text, WARNING)  # a result, which -q should not hide


def draw_alignment(source: str, target: str, links: Sequence[Link]) -> None:
    """Draw the links of a pair as a matrix, unless it is wider than the terminal."""
    import numpy as np

    from dragoman.inspection.attention_maps import render_matrix

    source_words, target_words = source.split(), target.split()
    weights = np.zeros((len(target_words), len(source_words)))
    for i, j in links:
        weights[j, i] = 1.0
    console, matrix = results_console(), render_matrix(source_words, target_words, weights)
    if max((line.cell_len for line in matrix.split()), default=0) <= console.width:
        console.print(matrix)


def read_link_file(path: Path, lines: ParallelTexts) -> list[GoldLinks]:
    """Read links, one line per pair; raise a UserError for links to words that do not exist."""
    all_links = [parse_links(line, f"{path}, line {number}") for number, line in enumerate(read_lines(path), 1)]
    if len(all_links) != len(lines[0]):
        raise UserError(f"{path} has {len(all_links):,} lines but there are {len(lines[0]):,} pairs; they must match")
    for number, (links, source, target) in enumerate(zip(all_links, *lines, strict=True), 1):
        check_links(links.possible, source.split(), target.split(), f"{path}, line {number}")
    return all_links

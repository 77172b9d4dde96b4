"""The command `align`, which links the words of a text with the words of its translation."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from dragoman.cli import options as opt
from dragoman.cli.line_io import open_output
from dragoman.config.settings import apply_override, parse_settings
from dragoman.errors import UserError
from dragoman.io import create_folder_atomically, read_lines
from dragoman.metrics.alignment import GoldLinks, Link, check_links, format_links, parse_links, score_alignments
from dragoman.progress import ProgressBar, log, results_console

if TYPE_CHECKING:
    from dragoman.smt.alignment import Aligner
    from dragoman.smt.settings import AlignerSettings

MAX_DRAWN_PAIRS = 3  # pairs that are drawn as matrices, if stdout is a terminal


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
    from dragoman.smt.alignment import Aligner
    from dragoman.smt.settings import AlignerSettings

    lines = read_parallel_lines(source, target)
    gold_links = read_gold_links(gold, lines) if gold else []
    values: dict[str, Any] = {}
    for item in overrides or []:
        apply_override(values, item)
    saved = Aligner.load(model) if model else None
    settings = parse_settings(AlignerSettings, {**(saved.settings.model_dump() if saved else {}), **values})
    settings.check()
    aligner = saved or train_on_lines(lines, train, settings)
    aligner.settings = settings  # the overrides may choose another symmetrization for a saved model
    if save:
        create_folder_atomically(save, write=aligner.save, required_file="aligner.json")
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
            show=lambda fraction: bar.set_done(1000 * fraction),
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

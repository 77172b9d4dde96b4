"""`dragoman align`: which words of two texts are translations of each other."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from dragoman.cli import options as opt
from dragoman.cli.line_io import output_to
from dragoman.config.settings import build, override
from dragoman.errors import UserError
from dragoman.io import keep_folder, read_lines
from dragoman.metrics.alignment import GoldLinks, Link, check_links, format_links, parse_links, score_alignments
from dragoman.progress import ProgressBar, log, results_console

if TYPE_CHECKING:
    from dragoman.smt.alignment import Aligner, AlignerSettings

PAIRS_TO_DRAW = 3  # on a terminal


def align_command(
    source: Annotated[Path, Argument(help="text, one sentence a line, words separated by spaces")],
    target: Annotated[Path, Argument(help="its translation, line by line")],
    overrides: opt.Overrides = None,
    output_file: opt.OutputFile = None,
    train: Annotated[
        tuple[Path, Path] | None, Option(help="two files with more pairs to learn from, which are not aligned")
    ] = None,
    model: Annotated[Path | None, Option(help="align with a model that --save wrote; nothing is learned")] = None,
    save: Annotated[Path | None, Option(help="a folder to keep the model in")] = None,
    gold: Annotated[
        Path | None, Option(help="links that people made, one line a pair, such as 0-0 1?2: print the error rate")
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """Learn which words of two texts are translations of each other, and print the links of each pair (0-0 1-2).

    Settings are those of the alignment model, such as hmm=8 or symmetrize=grow-diag.
    """
    opt.check_arguments(inputs=[source, target, gold, *(train or [])], output=output_file)
    if model and (train or save):
        raise UserError("--model aligns with what is learned; leave --train and --save out")
    from dragoman.smt.alignment import Aligner, AlignerSettings, check_symmetrization

    lines = read_parallel_lines(source, target)
    answers = read_gold(gold, lines) if gold else []
    values: dict[str, Any] = {}
    for item in overrides or []:
        override(values, item)
    saved = Aligner.load(model) if model else None
    settings = build(AlignerSettings, {**(saved.settings.model_dump() if saved else {}), **values})
    check_symmetrization(settings)
    aligner = saved or learn(lines, train, settings)
    aligner.settings = settings
    if save:
        keep_folder(save, "aligner.json", aligner.save)
    with ProgressBar("aligning", total=len(lines[0]), unit="pairs") as bar:
        found = list(bar.iterate(aligner.align(*lines)))
    with output_to(output_file) as out:
        if out is sys.stdout and out.isatty() and not as_json:
            draw(lines, found)
        elif not as_json:
            out.writelines(f"{format_links(links)}\n" for links in found)
        else:
            out.writelines(json.dumps({"links": links}) + "\n" for links in found)
    if gold:
        score = score_alignments(found, answers)
        log(f"AER {score.aer:.1f}, precision {score.precision:.1f}, recall {score.recall:.1f} ({score.links:,} links)")


def read_parallel_lines(source: Path, target: Path) -> tuple[list[str], list[str]]:
    """Read two files that belong together line by line."""
    lines = list(read_lines(source)), list(read_lines(target))
    if len(lines[0]) != len(lines[1]):
        raise UserError(f"{source} has {len(lines[0]):,} lines but {target} has {len(lines[1]):,}; they must be pairs")
    return lines


def learn(lines: tuple[list[str], list[str]], train: tuple[Path, Path] | None, settings: AlignerSettings) -> Aligner:
    """Train a model on the lines and on further pairs, and print how the likelihood grows."""
    from dragoman.smt.alignment import train_aligner

    more = read_parallel_lines(*train) if train else ([], [])
    texts = lines[0] + more[0], lines[1] + more[1]
    usable = sum(
        all(0 < len(line.split()) <= settings.max_length for line in pair) for pair in zip(*texts, strict=True)
    )
    if left := len(texts[0]) - usable:
        log(
            f"{left:,} of {len(texts[0]):,} pairs are empty or longer than {settings.max_length} words and only aligned"
        )
    with ProgressBar("learning to align", total=100, passes=10) as bar:
        return train_aligner(
            *texts,
            settings,
            report=lambda one: log(f"{one.kind} {one.iteration}: log-likelihood {one.log_likelihood:.4f} a word"),
            show=lambda share: bar.update(1000 * share),
        )


def draw(lines: tuple[list[str], list[str]], found: Sequence[Sequence[Link]]) -> None:
    """Draw the first pairs as matrices, with the links of all of them below."""
    import numpy as np

    from dragoman.inspection.attention_maps import render_matrix

    console = results_console()
    for source, target, links in list(zip(*lines, found, strict=True))[:PAIRS_TO_DRAW]:
        words = source.split(), target.split()
        weights = np.zeros((len(words[1]), len(words[0])))
        for i, j in links:
            weights[j, i] = 1.0
        console.print(render_matrix(*words, weights))
    for links in found:
        console.print(format_links(links), markup=False)


def read_gold(path: Path, lines: tuple[list[str], list[str]]) -> list[GoldLinks]:
    """Read gold links, one line a pair, and check that the words that they link are there."""
    found = [parse_links(line, f"{path}, line {number}") for number, line in enumerate(read_lines(path), 1)]
    if len(found) != len(lines[0]):
        raise UserError(f"{path} has {len(found):,} lines but there are {len(lines[0]):,} pairs; it needs one a pair")
    for number, (gold, source, target) in enumerate(zip(found, *lines, strict=True), 1):
        check_links(gold.possible, source.split(), target.split(), f"{path}, line {number}")
    return found

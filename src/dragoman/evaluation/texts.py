"""Read test sets: files that belong together line by line, or the corpora under `data.test`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dragoman.config import CorpusSettings, Recipe
from dragoman.score.metrics import refuse_subwords
from dragoman.text.corpus import all_references, read_lines, read_pairs
from dragoman.text.trees import Grove
from dragoman.types import Tree, UserError


def read_texts(source: Path, references: Sequence[Path]) -> tuple[list[str], list[list[str]]]:
    """Return the lines of the source and of each reference, which must belong together line by line."""
    sources = read_some(source)
    return sources, [read_beside(path, sources, source) for path in references]


def read_references(paths: Sequence[Path]) -> list[list[str]]:
    """Return the lines of each reference, for a test set whose source is not known."""
    first = read_some(paths[0])
    return [first, *(read_beside(path, first, paths[0]) for path in paths[1:])]


def read_some(path: Path) -> list[str]:
    """Return the lines of a file that must have some."""
    lines = list(read_lines(path))
    if not lines:
        raise UserError(f"{path} is empty")
    return lines


def read_beside(path: Path, others: Sequence[str], name: Path) -> list[str]:
    """Return the lines of a file, as many as `others`, which came from the file `name`."""
    lines = list(read_lines(path))
    if len(lines) != len(others):
        raise UserError(f"{name} has {len(others)} lines but {path} has {len(lines)}; they must belong together")
    return lines


def read_hypotheses(path: Path, others: Sequence[str], name: Path) -> list[str]:
    """Return the outputs of some system: plain text, not subwords."""
    lines = read_beside(path, others, name)
    try:
        refuse_subwords(lines)
    except UserError as fault:
        raise UserError(f"{path}: {fault}") from None
    return lines


def read_trees(conllu: Path, sources: Sequence[str], name: Path) -> list[Tree | None]:
    """The trees of these sources, which came from the file `name`."""
    grove = Grove(conllu, str(name))
    trees = [grove.tree_of(line) for line in sources]
    grove.end()
    return trees


def tests_of(recipe: Recipe) -> Sequence[CorpusSettings]:
    """The corpora that the recipe keeps to test on."""
    if not recipe.data.test:
        raise UserError("the run has no data.test; name what to score it on: --source F and --reference F")
    return recipe.data.test


def read_test(
    corpus: CorpusSettings, direction: str, *, trees: bool = False
) -> tuple[list[str], list[list[str]], list[Tree | None]]:
    """Return the sources of a corpus, its references, and, if they are wanted, the trees of the sources.

    References are the target, or the JSONL keys that `references` names; a list in JSONL is several of them.
    """
    source, target = corpus.keys
    reads = [corpus.model_copy(update={"keys": (source, key)}) for key in corpus.references or [target]]
    sides = [list(read_pairs(one, split="test", direction=direction, trees=trees)) for one in reads]
    references = [one for pairs in sides for one in all_references(pairs)]
    return [pair.source for pair in sides[0]], references, [pair.tree for pair in sides[0]]

"""The door to translation: lines in, answers out.

    translator = dragoman.load("runs/demo")
    translator.translate(["A man walks his dog."])

Shapes   B rows of a grid   S source width   T target width
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dragoman.config import SearchSettings
from dragoman.data.batch import Grid, Widths, lay
from dragoman.door import Door, evaluating, grouped, rung
from dragoman.models.base import Seq2Seq
from dragoman.models.build import asks_for_trees
from dragoman.search.beam import beam_search
from dragoman.search.sample import greedy
from dragoman.search.step import Found, StepModel
from dragoman.text.trees import fault, linked, rooted
from dragoman.types import Batch, Example, Hypothesis, Links, Mistake, Tree

TREELESS = "read without a tree"  # a warning
CELLS = 4_000_000  # of an alignment; a line of very many parts goes without
END = re.compile(r"[.!?…]+[\"'“”’«»‹›)\]]*(?=\s)|[。！？]+[”’」』)\]]*")
WORD = re.compile(r"\S+")
LETTER = re.compile(r"\S")


class Piece(NamedTuple):
    """A line, or one sentence of a line that is longer than what the model learnt from."""

    line: int
    text: str
    ids: list[int]
    links: Links | None = None  # for models that ask for trees
    warning: str = ""

    def example(self, target: Sequence[int] = ()) -> Example:
        return Example(np.array(self.ids, dtype=np.int64), np.array(target, dtype=np.int64), self.line, self.links)


@dataclass(frozen=True)
class WithTrees:
    """A model as search knows it, which is handed the trees of the sources beside them."""

    model: Any
    depth_BS: Tensor
    tree_BSS: Tensor

    def start(self, source_BS: Tensor, keep_BS: Tensor) -> Any:
        return self.model.start(source_BS, keep_BS, self.depth_BS, self.tree_BSS)

    def step(self, token_N: Tensor, state: Any) -> tuple[Tensor, Any]:
        logp_NV, state = self.model.step(token_N, state)
        return logp_NV, state


@dataclass(frozen=True, slots=True)
class Translator(Door[Seq2Seq]):
    """Sequence-to-sequence models of every kind."""

    def translate(
        self, lines: Sequence[str], *, beam: int | None = None, trees: Sequence[Tree | None] | None = None
    ) -> list[Hypothesis]:
        """The best answer to every line, in order. An empty line stays empty."""
        return [found[0] for found in self.nbest(lines, count=1, beam=beam, trees=trees)]

    def nbest(
        self,
        lines: Sequence[str],
        *,
        count: int,
        beam: int | None = None,
        trees: Sequence[Tree | None] | None = None,
    ) -> list[list[Hypothesis]]:
        """Up to `count` different answers to every line, best first. A line that had to be split has one.

        `trees` are for models with model.position=tree, one for each line, or None where there is none.
        """
        if isinstance(lines, str):
            raise Mistake("translate takes a list of lines; put a single line into a list of its own")
        if trees is not None:
            self.check_trees(trees, len(lines))
        width = self.recipe.search.beam if beam is None else beam
        if not 1 <= count <= width:
            raise Mistake(f"{count} answers cannot come from a beam of {width}; ask for --beam {max(count, 1)} or more")
        search = self.recipe.search.model_copy(update={"beam": width, "nbest": width if count > 1 else 1})
        pieces = [piece for number, line in enumerate(lines) for piece in self.cut(number, line, trees)]
        with evaluating(self.model):
            answers = self.answer(pieces, search)
        out: list[list[Hypothesis]] = [[] for _ in lines]
        for number, line in enumerate(lines):
            if not line.strip():
                out[number] = [Hypothesis("", 0.0, [], [], [], 0.0)]
        parts: dict[int, list[list[Hypothesis]]] = {}
        for piece, answer in zip(pieces, answers, strict=True):
            parts.setdefault(piece.line, []).append(answer)
        for number, some in parts.items():
            out[number] = different(some[0])[:count] if len(some) == 1 else [joined([answer[0] for answer in some])]
        return out

    @property
    def asks_for_trees(self) -> bool:
        return asks_for_trees(self.recipe.model)

    def check_trees(self, trees: Sequence[Tree | None], lines: int) -> None:
        if not self.asks_for_trees:
            raise Mistake("this model reads no trees (those with model.position=tree do); leave them out")
        if len(trees) != lines:
            raise Mistake(f"there are {lines} lines but {len(trees)} trees; give one for each, or None")
        for number, tree in enumerate(trees, 1):
            if tree and (wrong := fault(tree)):
                raise Mistake(f"the tree of line {number} is none: {wrong}")

    def cut(self, number: int, line: str, trees: Sequence[Tree | None] | None = None) -> Iterator[Piece]:
        """The line as it is, or, if it is longer than any the model learnt from, sentence by sentence.

        A sentence that is itself longer stays whole, up to a limit; beyond, it is cut between words, or anywhere.
        """
        if not line.strip():
            return
        encode = self.tokenizers.source.encode
        pieces = [line] if len(encode(line)) <= self.longest else sentences(line)
        for part in (WORD, LETTER):
            pieces = [run for piece in pieces for run in self.runs(piece, part)]
        whole = len(pieces) == 1
        for text in pieces:
            piece = Piece(number, text, encode(text))
            yield self.grown(piece, trees, whole=whole) if self.asks_for_trees else piece

    def grown(self, piece: Piece, trees: Sequence[Tree | None] | None, *, whole: bool) -> Piece:
        """The piece with the tree of its line. Where that cannot be, words are known by their places alone."""
        tree = trees[piece.line] if trees is not None else None
        roots = rooted(tree if whole else None, piece.text)
        links = linked(roots, piece.text, piece.ids, self.tokenizers.source)
        if len(links.head):
            return piece._replace(links=links)
        why = ": its words do not spell the line" if whole else ": the line was cut into parts"
        return piece._replace(links=links, warning=TREELESS + (why if tree else ""))

    def runs(self, text: str, part: re.Pattern[str]) -> list[str]:
        """The text, or, where it is too long for any memory, runs of its parts as long as the model learnt from."""
        encode = self.tokenizers.source.encode
        if len(encode(text)) <= self.whole:
            return [text]
        first, *rest = (match.span() for match in part.finditer(text))
        runs = [first]
        for start, end in rest:
            if len(encode(text[runs[-1][0] : end])) > self.longest:
                runs.append((start, end))
            else:
                runs[-1] = (runs[-1][0], end)
        return [text[start:end] for start, end in runs]

    def answer(self, pieces: Sequence[Piece], search: SearchSettings) -> list[list[Hypothesis]]:
        """Grids of pieces of one width, then the alignments of what was found."""
        found: dict[int, list[Found]] = {}
        for width, some in grouped(range(len(pieces)), lambda i: rung(len(pieces[i].ids) + 1), self.rows):
            rows = [[row] for row in range(len(some))] + [[]] * (self.rows - len(some))
            batch = lay(Grid(rows, Widths(width, 1)), [pieces[i].example() for i in some])
            limit_B = torch.zeros(self.rows, dtype=torch.long)
            for row, i in enumerate(some):
                limit = int(search.max_ratio * len(pieces[i].ids)) + search.max_extra + 1
                limit_B[row] = min(limit, self.places)
            found.update(zip(some, self.search(batch.to(self.device), limit_B.to(self.device), search)))
        flat = [(i, one) for i in range(len(pieces)) for one in found[i]]
        looks = self.alignments([pieces[i].example(one.tokens) for i, one in flat])
        answers: list[list[Hypothesis]] = [[] for _ in pieces]
        for (i, one), look in zip(flat, looks, strict=True):
            answers[i].append(self.hypothesis(pieces[i], one, look))
        return answers

    def search(self, batch: Batch, limit_B: Tensor, search: SearchSettings) -> list[list[Found]]:
        source_BS, keep_BS = batch.source_BS, batch.source_segment_BS > 0
        model: StepModel[Any] = self.model
        if batch.depth_BS is not None and batch.tree_BSS is not None:
            model = WithTrees(self.model, batch.depth_BS, batch.tree_BSS)
        if search.beam == 1:
            return greedy(model, source_BS, keep_BS, limit_B, alpha=search.length_penalty)
        return beam_search(
            model,
            source_BS,
            keep_BS,
            limit_B,
            width=search.beam,
            nbest=search.nbest,
            alpha=search.length_penalty,
        )

    @torch.inference_mode()
    def alignments(self, examples: Sequence[Example]) -> list[list[list[float]]]:
        """Where each target token looked, as shares of the source tokens; the whole answer is read in one pass."""
        looks: list[list[list[float]]] = [[] for _ in examples]

        def widths(i: int) -> Widths:
            return Widths(rung(len(examples[i].source) + 1), rung(len(examples[i].target) + 1))

        for wide, some in grouped(range(len(examples)), widths, self.rows):
            rows = [[i] for i in some] + [[]] * (self.rows - len(some))
            look_BTS = self.model.alignment(lay(Grid(rows, wide), examples).to(self.device)).cpu()
            for row, i in enumerate(some):
                look_TS = look_BTS[row, : len(examples[i].target), : len(examples[i].source)]
                looks[i] = (look_TS / look_TS.sum(-1, keepdim=True).clamp(min=1e-9)).tolist()
        return looks

    def hypothesis(self, piece: Piece, found: Found, look: list[list[float]]) -> Hypothesis:
        warnings = [piece.warning] if piece.warning else []
        if len(piece.ids) > self.longest:
            warnings.append(f"longer than any sentence of training ({len(piece.ids)} tokens against {self.longest})")
        if not found.finished:
            full = len(found.tokens) == self.places
            why = "model.max_length allows" if full else "search.max_ratio and max_extra allow"
            warnings.append(f"cut at {len(found.tokens)} tokens, the most that {why}")
        source, target = self.tokenizers.source, self.tokenizers.target
        return Hypothesis(
            text=target.decode(found.tokens),
            score=found.score,
            tokens=target.pieces(found.tokens),
            alignment=look,
            source_tokens=source.pieces(piece.ids),
            logp=found.logp,
            warnings=tuple(warnings),
        )


def sentences(line: str) -> list[str]:
    """A line cut after marks that end sentences. Nothing is lost but the space between them."""
    found, begun = [], 0
    cased = line != line.lower()
    for mark in END.finditer(line):
        if ends(line, mark, cased):
            found.append(line[begun : mark.end()])
            begun = mark.end()
    return [sentence.strip() for sentence in (*found, line[begun:]) if sentence.strip()]


def ends(line: str, mark: re.Match[str], cased: bool) -> bool:
    """Whether a mark ends a sentence: not after "Dr.", "z. B.", "e.g." or "3.", nor where small letters go on.

    In doubt it does not: two sentences together do less harm than half of one.
    """
    after = WORD.search(line, mark.end())
    if cased and after and after[0][0].islower():
        return False
    before = line[max(0, mark.start() - 20) : mark.start()].split(" ")[-1].lstrip("\"'“„«(")
    short = before.isdigit() or len(before) == 1 or "." in before or (len(before) <= 3 and before.istitle())
    return mark[0] != "." or not short


def different(answers: Sequence[Hypothesis]) -> list[Hypothesis]:
    """Without those whose text came before: one text can be spelt in several ways."""
    first: dict[str, Hypothesis] = {}
    for one in answers:
        first.setdefault(one.text, one)
    return list(first.values())


def joined(parts: Sequence[Hypothesis]) -> Hypothesis:
    """One answer from the answers to a line's sentences; alignments stand on the diagonal."""
    tokens = [token for part in parts for token in part.tokens]
    source_tokens = [token for part in parts for token in part.source_tokens]
    ends = sum(len(part.tokens) + 1 for part in parts)
    warnings = [f"longer than any sentence of training: translated in {len(parts)} parts"]
    warnings += dict.fromkeys(warning for part in parts for warning in part.warnings)
    small = len(tokens) * len(source_tokens) <= CELLS
    return Hypothesis(
        text=" ".join(part.text for part in parts),
        score=sum(part.score * (len(part.tokens) + 1) for part in parts) / ends,
        tokens=tokens,
        alignment=diagonal(parts, len(source_tokens)) if small else [],
        source_tokens=source_tokens,
        logp=sum(part.logp for part in parts),
        warnings=(*warnings, *([] if small else ["too long for an alignment"])),
    )


def diagonal(parts: Sequence[Hypothesis], width: int) -> list[list[float]]:
    alignment, before = [], 0
    for part in parts:
        after = width - before - len(part.source_tokens)
        alignment += [[0.0] * before + row + [0.0] * after for row in part.alignment]
        before += len(part.source_tokens)
    return alignment

"""The front door: text in, answers out.

    translator = load("runs/demo")
    translator.translate(["A man walks his dog."])

How floats round depends on the shapes they are computed in. So every grid here has a fixed number of rows, and a
width that a sentence's own length decides; rows with nothing to do run empty. The answer to a line is the same
alone, in a batch of any size and in any order.

Shapes   B rows of a grid   S source width   T target width
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from dragoman.config import Recipe, SearchSettings
from dragoman.data.batch import Grid, Widths, lay
from dragoman.models.base import Seq2Seq
from dragoman.models.build import build_model
from dragoman.search.beam import beam_search
from dragoman.search.sample import greedy
from dragoman.search.step import Found
from dragoman.store import RunFolder, load_tensors
from dragoman.text.tokenizer import Tokenizers
from dragoman.types import EOS, PAD, Example, Hypothesis, Mistake

T = TypeVar("T")
ROWS = {"cpu": 8, "cuda": 64}  # sentences of one grid
WHOLE = 512  # tokens up to which a sentence is kept whole, however short those of training were
CELLS = 4_000_000  # of an alignment; a line of very many parts goes without
END = re.compile(r"[.!?…]+[\"'“”’«»‹›)\]]*(?=\s)|[。！？]+[”’」』)\]]*")
WORD = re.compile(r"\S+")
LETTER = re.compile(r"\S")


class Piece(NamedTuple):
    """A line, or one sentence of a line that is longer than what the model learnt from."""

    line: int
    text: str
    ids: list[int]


@dataclass(frozen=True, slots=True)
class Translator:
    """A model with its tokenizers. `longest` is the longest source, in tokens, that it was trained on."""

    model: Seq2Seq
    tokenizers: Tokenizers
    recipe: Recipe
    longest: int
    device: torch.device

    def translate(self, lines: Sequence[str], *, beam: int | None = None) -> list[Hypothesis]:
        """The best answer to every line, in order. An empty line stays empty."""
        return [found[0] for found in self.nbest(lines, count=1, beam=beam)]

    def nbest(self, lines: Sequence[str], *, count: int, beam: int | None = None) -> list[list[Hypothesis]]:
        """Up to `count` different answers to every line, best first. A line that had to be split has one."""
        if isinstance(lines, str):
            raise Mistake("translate takes a list of lines; put a single line into a list of its own")
        width = self.recipe.search.beam if beam is None else beam
        if not 1 <= count <= width:
            raise Mistake(f"{count} answers cannot come from a beam of {width}; ask for --beam {max(count, 1)} or more")
        search = self.recipe.search.model_copy(update={"beam": width, "nbest": width if count > 1 else 1})
        pieces = [piece for number, line in enumerate(lines) for piece in self.cut(number, line)]
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

    def cut(self, number: int, line: str) -> Iterator[Piece]:
        """The line as it is, or, if it is longer than any the model learnt from, sentence by sentence.

        A sentence that is itself longer stays whole, up to a limit; beyond, it is cut between words, or anywhere.
        """
        if not line.strip():
            return
        encode = self.tokenizers.source.encode
        pieces = [line] if len(encode(line)) <= self.longest else sentences(line)
        for part in (WORD, LETTER):
            pieces = [run for piece in pieces for run in self.runs(piece, part)]
        yield from (Piece(number, piece, encode(piece)) for piece in pieces)

    def runs(self, text: str, part: re.Pattern[str]) -> list[str]:
        """The text, or, where it is too long for any memory, runs of its parts as long as the model learnt from."""
        encode = self.tokenizers.source.encode
        if len(encode(text)) <= max(self.longest, WHOLE):
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
            source_BS = torch.full((self.rows, width), PAD)
            limit_B = torch.zeros(self.rows, dtype=torch.long)
            for row, i in enumerate(some):
                ids = pieces[i].ids
                source_BS[row, : len(ids) + 1] = torch.tensor([*ids, EOS])
                limit_B[row] = int(search.max_ratio * len(ids)) + search.max_extra + 1
            found.update(zip(some, self.search(source_BS, limit_B, search)))
        flat = [(i, one) for i in range(len(pieces)) for one in found[i]]
        looks = self.alignments([(pieces[i].ids, one.tokens) for i, one in flat])
        answers: list[list[Hypothesis]] = [[] for _ in pieces]
        for (i, one), look in zip(flat, looks, strict=True):
            answers[i].append(self.hypothesis(pieces[i], one, look))
        return answers

    def search(self, source_BS: Tensor, limit_B: Tensor, search: SearchSettings) -> list[list[Found]]:
        source_BS, limit_B = source_BS.to(self.device), limit_B.to(self.device)
        if search.beam == 1:
            return greedy(self.model, source_BS, source_BS != PAD, limit_B, alpha=search.length_penalty)
        return beam_search(
            self.model,
            source_BS,
            source_BS != PAD,
            limit_B,
            width=search.beam,
            nbest=search.nbest,
            alpha=search.length_penalty,
        )

    @torch.inference_mode()
    def alignments(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[list[float]]]:
        """Where each target token looked, as shares of the source tokens; the whole answer is read in one pass."""
        examples = [Example(np.asarray(s, dtype=np.int64), np.asarray(t, dtype=np.int64), 0) for s, t in pairs]
        looks: list[list[list[float]]] = [[] for _ in pairs]

        def widths(i: int) -> Widths:
            return Widths(*(rung(len(side) + 1) for side in pairs[i]))

        for wide, some in grouped(range(len(pairs)), widths, self.rows):
            rows = [[i] for i in some] + [[]] * (self.rows - len(some))
            look_BTS = self.model.alignment(lay(Grid(rows, wide), examples).to(self.device)).cpu()
            for row, i in enumerate(some):
                look_TS = look_BTS[row, : len(pairs[i][1]), : len(pairs[i][0])]
                looks[i] = (look_TS / look_TS.sum(-1, keepdim=True).clamp(min=1e-9)).tolist()
        return looks

    def hypothesis(self, piece: Piece, found: Found, look: list[list[float]]) -> Hypothesis:
        warnings = []
        if len(piece.ids) > self.longest:
            warnings.append(f"longer than any sentence of training ({len(piece.ids)} tokens against {self.longest})")
        if not found.finished:
            warnings.append(f"cut at {len(found.tokens)} tokens, the most that search.max_ratio and max_extra allow")
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

    @property
    def rows(self) -> int:
        return ROWS[self.device.type]


class evaluating:
    """Dropout off inside, and back as it was after."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.was = model, model.training

    def __enter__(self) -> None:
        self.model.eval()

    def __exit__(self, *_: object) -> None:
        self.model.train(self.was)


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


def rung(length: int) -> int:
    """The next of 16, 32, 64, 128, ...: a width that depends on the sentence alone."""
    width = 16
    while width < length:
        width *= 2
    return width


def grouped(items: Iterable[int], key: Callable[[int], T], size: int) -> Iterator[tuple[T, list[int]]]:
    """Items of one key together, at most `size` at a time, in the order they came."""
    groups: dict[T, list[int]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    for value, some in groups.items():
        rest = iter(some)
        while chunk := list(islice(rest, size)):
            yield value, chunk


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


def kinds(warnings: Iterable[str]) -> list[str]:
    """Warnings without their numbers: what they are counted by."""
    return [re.split(r" at \d|:| \(", warning)[0] for warning in warnings]


def choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise Mistake(f"there is no device called {name!r}; write auto, cpu, cuda or cuda:1") from None
    if device.type not in ROWS:
        raise Mistake(f"device {name!r} is not one that Dragoman runs on; write auto, cpu, cuda or cuda:1")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise Mistake(f"device {name!r} is not there; this machine has {torch.cuda.device_count()} CUDA devices")
    return device


def load(run: str | Path, *, device: str = "auto") -> Translator:
    """Open a run folder. It needs nothing else, and nothing in it is run."""
    folder = RunFolder(run)
    recipe = folder.recipe()
    if not folder.model.exists():
        raise Mistake(f"{str(folder.path)!r} has no model yet: training has not come to its first validation")
    weights, about = load_tensors(folder.model)
    tokenizers = Tokenizers.load(folder.tokenizer)
    if about.get("tokenizer") != tokenizers.fingerprint():
        raise Mistake(f"{str(folder.tokenizer)!r} is damaged, or not the tokenizer that the model was trained with")
    model = build_model(recipe, source_size=tokenizers.source.size, target_size=tokenizers.target.size)
    put_weights(model, weights, repr(str(folder.model)), "its config.yaml")
    where = choose_device(device)
    return Translator(model.to(where).eval(), tokenizers, recipe, int(about["longest"]), where)


def put_weights(model: nn.Module, weights: dict[str, Tensor], name: str, place: str) -> None:
    own = dict(model.named_parameters())
    for one in sorted(set(own) ^ set(weights)):
        raise Mistake(f"{name} does not fit {place}: parameter {one!r} is only in one of them")
    for one, parameter in own.items():
        if parameter.shape != weights[one].shape:
            sizes = [" x ".join(map(str, held[one].shape)) for held in (weights, own)]
            raise Mistake(f"{name} does not fit {place}: parameter {one!r} is {sizes[0]} there and {sizes[1]} here")
    with torch.no_grad():
        for parameter_name, parameter in own.items():
            parameter.copy_(weights[parameter_name])

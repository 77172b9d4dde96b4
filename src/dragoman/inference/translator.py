"""Words of an answer as soon as they are certain: said once, they are never taken back.

A word is certain when all that can still become the answer begins with it: every prefix that lives, and the best of the
answers that are whole. Greedy search is certain of each word at once.

The door to translation: lines in, answers out.

    translator = dragoman.load("runs/demo")
    translator.translate(["A man walks his dog."])

Shapes   B rows of a grid   S source width   T target width
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, NamedTuple

import numpy as np
import torch

from dragoman.config.messages import near
from dragoman.config.settings import SearchSettings
from dragoman.data.batches import BatchPlan, collate_pairs, group_by_key, round_to_bucket
from dragoman.data.trees import find_tree_fault, link_tokens, locate_words
from dragoman.decoding.beam import BeamState
from dragoman.decoding.methods import METHODS, decode
from dragoman.decoding.protocol import NEVER, SearchResult
from dragoman.decoding.request import DecodingConstraints, Job
from dragoman.errors import UserError
from dragoman.inference.constraints import (
    limit_length,
    list_unmet,
    make_constraints,
    merge_search,
    to_line,
    widen_nbest,
)
from dragoman.inference.engines.base import Engine, in_order
from dragoman.inference.engines.torch import TorchEngine
from dragoman.inference.postprocess import (
    FLAG_UNKNOWN,
    NON_SPACE,
    NON_SPACES,
    AlignmentRows,
    ReplaceUnknown,
    check_alignment,
    check_placeholders,
    check_unknown,
    drop_duplicates,
    fill_unknowns,
    find_flags,
    join_hypotheses,
    rerank_by_coverage,
    source_words,
    split_sentences,
    unknown_replacer,
    warning_kinds,
)
from dragoman.inference.predictor import (
    Predictor,
    bucket_widths,
    check_lines,
    check_texts,
    eval_mode,
    pause_garbage_collection,
    score_pairs,
)
from dragoman.models.base import Seq2Seq
from dragoman.models.registry import asks_for_trees
from dragoman.types import UNK, Example, Hypothesis, Line, PairScore, TokenTree, Tree

BeamObserver = Callable[[BeamState], None]
COMPLETE_WORDS = re.compile(
    r".*(?:(?=\s)|(?<=[\u2e80-\ua4cf])(?=.))", re.DOTALL
)  # whole words; where none have spaces, letters


class StreamClosed(Exception):
    """Nobody listens any more."""


def find_certain_prefix(beams: BeamState) -> list[int]:
    """The tokens that the answer to the first sentence begins with, whatever happens."""
    live, whole = beams.live, beams.whole
    length = int(live.length_B[0])
    rows = zip(live.token_BWT[0].tolist(), live.logp_BW[0].tolist())
    ways = [tokens[:length] for tokens, logp in rows if logp > NEVER]
    if float(whole.score_BW[0, 0]) > NEVER:
        ways.append(whole.token_BWT[0, 0, : int(whole.length_BW[0, 0]) - 1].tolist())
    same = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*ways))
    return [tokens[0] for tokens in same]


def keep_complete_words(text: str) -> str:
    """The part of a text that more tokens will not change: a word may still grow, half a character become whole."""
    found = COMPLETE_WORDS.match(text)
    return found[0] if found else ""


def stream_text(
    work: Callable[[BeamObserver], Hypothesis], text_of: Callable[[list[int]], str]
) -> Generator[str, None, Hypothesis]:
    """Pieces of the text of an answer, which `work` makes under the eyes of someone who watches; then the answer.

    The work is done in a thread of its own, and given up when nobody takes the pieces any more.
    """
    heard: SimpleQueue[str | Hypothesis | BaseException] = SimpleQueue()
    over = Event()

    def watch(beams: BeamState) -> None:
        if over.is_set():
            raise StreamClosed
        heard.put(keep_complete_words(text_of(find_certain_prefix(beams))))

    busy = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    gpu = torch.cuda.current_device() if busy else None  # a new thread begins with the first

    def run() -> None:
        try:
            if gpu is not None:
                torch.cuda.set_device(gpu)
            heard.put(work(watch))
        except BaseException as fault:
            heard.put(fault)

    thread = Thread(target=run, daemon=True)
    thread.start()
    said = 0
    try:
        while True:
            news = heard.get()
            if isinstance(news, BaseException):
                raise news
            text = news if isinstance(news, str) else news.text
            if len(text) > said:
                yield text[said:]
                said = len(text)
            if isinstance(news, Hypothesis):
                return news
    finally:
        over.set()
        thread.join()


NO_TREE = "read without a tree"  # a warning
EMPTY_HYPOTHESIS = Hypothesis("", 0.0, [], [], [], 0.0)  # the answer to an empty line


class Segment(NamedTuple):
    """A line, or one sentence of a line that is longer than what the model learnt from."""

    line: int
    text: str
    ids: list[int]
    links: TokenTree | None = None  # for models that ask for trees
    warning: str = ""
    wish: DecodingConstraints = DecodingConstraints()
    before: Sequence[int] = ()  # ids of the line's tag, which stand before the others where the model reads them

    @property
    def read(self) -> list[int]:
        return [*self.before, *self.ids]

    def example(self, target: Sequence[int] = ()) -> Example:
        return Example(np.array(self.read, dtype=np.int64), np.array(target, dtype=np.int64), self.line, self.links)


@dataclass(frozen=True, slots=True, repr=False)
class Translator(Predictor[Seq2Seq]):
    """Sequence-to-sequence models of every kind. Without an `engine` of its own, the model is asked as it is."""

    engine: Engine | None = None

    def translate(
        self,
        lines: Sequence[str | Line],
        *,
        beam: int | None = None,
        trees: Sequence[Tree | None] | None = None,
        search: Mapping[str, Any] | None = None,
        dictionary: Mapping[str, str] | None = None,
        tag: str = "",
        align: bool = True,
    ) -> list[Hypothesis]:
        """The best answer to every line, in order. An empty line stays empty. Without `align` they come unaligned."""
        way: dict[str, Any] = {"beam": beam, "trees": trees, "search": search, "dictionary": dictionary, "tag": tag}
        return [answers[0] for answers in self.nbest(lines, count=1, align=align, **way)]

    def nbest(
        self,
        lines: Sequence[str | Line],
        *,
        count: int | None = None,
        beam: int | None = None,
        trees: Sequence[Tree | None] | None = None,
        search: Mapping[str, Any] | None = None,
        dictionary: Mapping[str, str] | None = None,
        tag: str = "",
        align: bool = True,
    ) -> list[list[Hypothesis]]:
        """Up to `count` different answers to every line, best first. A line that had to be split has one.

        A Line says what is asked of its answer. `search` are settings to be laid over those of the run, such as
        {"no_repeat": 3}; `dictionary` is for search.unknown=dictionary. `trees` are for models with
        model.position=tree, one for each line, or None where there is none. `tag` is that of lines without one of
        their own, for models that were trained with tags.
        """
        lines = check_lines(lines, "translate")
        if trees is not None:
            self.check_trees(trees, len(lines))
        settings = merge_search(self.recipe.search, search, beam=beam, count=count)
        check_unknown(settings.unknown, self.tokenizers.target, dictionary)
        check_alignment(settings, aligns=self.model.aligns)
        asked = [to_line(line, tag) for line in lines]
        with pause_garbage_collection():
            return self.answers(asked, trees, settings, dictionary or {}, align=align)

    def answers(
        self,
        asked: Sequence[Line],
        trees: Sequence[Tree | None] | None,
        settings: SearchSettings,
        dictionary: Mapping[str, str],
        *,
        align: bool,
    ) -> list[list[Hypothesis]]:
        encoded = enumerate(self.tokenizers.source.encode_all([line.text for line in asked]))
        pieces = [
            piece for number, ids in encoded for piece in self._wished(number, asked[number], trees, settings, ids)
        ]
        with eval_mode(self.model):
            answers = self.answer(pieces, asked, settings, dictionary, align=align)
        out: list[list[Hypothesis]] = [[EMPTY_HYPOTHESIS] for _ in asked]
        parts: dict[int, list[list[Hypothesis]]] = {}
        for piece, answer in zip(pieces, answers, strict=True):
            parts.setdefault(piece.line, []).append(answer)
        for number, some in parts.items():
            one = len(some) == 1
            out[number] = (
                drop_duplicates(some[0])[: settings.nbest] if one else [join_hypotheses([answer[0] for answer in some])]
            )
        return out

    def stream(
        self,
        line: str | Line,
        *,
        beam: int | None = None,
        search: Mapping[str, Any] | None = None,
        dictionary: Mapping[str, str] | None = None,
        tag: str = "",
    ) -> Generator[str, None, Hypothesis]:
        """The answer to a line in pieces, each said as soon as it is certain; the generator's own value is the answer.

        Together they are what translate gives. Where nothing is certain before the end (a method other than beam and
        greedy, terms that must appear, ranks by coverage, unknown words that are filled in, an engine that cannot be
        watched), it comes as one piece, or as one for each sentence of a line that had to be split.
        """
        settings = merge_search(self.recipe.search, search, beam=beam, count=1)
        check_unknown(settings.unknown, self.tokenizers.target, dictionary)
        check_alignment(settings, aligns=self.model.aligns)
        asked = to_line(line, tag)
        parts: list[Hypothesis] = []
        for piece in self._wished(0, asked, None, settings):
            if parts:
                yield " "
            work = partial(self._watched, piece, asked, settings, dictionary or {})
            parts.append((yield from stream_text(work, self.tokenizers.target.decode)))
        return EMPTY_HYPOTHESIS if not parts else parts[0] if len(parts) == 1 else join_hypotheses(parts)

    def _watched(
        self, piece: Segment, line: Line, search: SearchSettings, dictionary: Mapping[str, str], watch: BeamObserver
    ) -> Hypothesis:
        """The answer to a piece. Whoever watches sees how it comes about, where that tells anything."""
        clear = METHODS[search.method].is_beam_search and not (search.coverage or piece.wish.must)
        with eval_mode(self.model):
            engine = self.engine or TorchEngine(self.model, self.device, self.tokenizers.target.decode)
            if not clear or not isinstance(engine, TorchEngine) or search.unknown != "drop":
                return self.answer([piece], [line], search, dictionary)[0][0]
            request = engine.request([self._job(piece, search)], round_to_bucket(len(piece.ids) + 1), search)
            found = decode(replace(request, watch=watch))[0]
            return self._ranked([piece], [line], [(0, found)], search, dictionary)[0][0]

    def score(
        self,
        sources: Sequence[str],
        targets: Sequence[str],
        *,
        trees: Sequence[Tree | None] | None = None,
        tag: str = "",
    ) -> list[PairScore]:
        """How likely the model holds each target as the answer to its source. Long lines are not cut into sentences."""
        sources, targets = check_texts(sources, "score", "source"), check_texts(targets, "score", "target")
        if len(sources) != len(targets):
            raise UserError("score takes a list of sources and a list of as many targets")
        if trees is not None:
            self.check_trees(trees, len(sources))
        sources, targets = ([line if line.strip() else "" for line in side] for side in (sources, targets))
        encoded = zip(sources, self.tokenizers.source.encode_all(sources), strict=True)
        before = self.before(tag)
        pieces = [
            Segment(number, line, ids, before=before if ids else ()) for number, (line, ids) in enumerate(encoded)
        ]
        if self.asks_for_trees:
            pieces = [self._grown(piece, trees, whole=True) for piece in pieces]
        wanted = self.tokenizers.target.encode_all(targets)
        return score_pairs(self, [piece.example(ids) for piece, ids in zip(pieces, wanted, strict=True)])

    def before(self, tag: str) -> Sequence[int]:
        """The ids of a tag. Where there is only one that it can be, it need not be named."""
        if not (tag or self.tokenizers.tags):
            return ()
        known = self.recipe.data.tags
        named = [each for each in known if each]
        if not tag and named and "" not in known:
            if len(named) > 1:
                raise UserError(f"this model was trained with tags, and one has to be named: {', '.join(named)}")
            [tag] = named
        if tag and tag not in named:
            there = f"{near(tag, named)} (there are: {', '.join(named)})" if named else "; it was trained without"
            raise UserError(f"this model knows no tag {tag!r}{there}")
        return self.tokenizers.before(tag)

    @property
    def asks_for_trees(self) -> bool:
        return asks_for_trees(self.recipe.model)

    def check_trees(self, trees: Sequence[Tree | None], lines: int) -> None:
        if not self.asks_for_trees:
            raise UserError("this model reads no trees (those with model.position=tree do); leave them out")
        if len(trees) != lines:
            raise UserError(f"there are {lines} lines but {len(trees)} trees; give one for each, or None")
        for number, tree in enumerate(trees, 1):
            if tree and (wrong := find_tree_fault(tree)):
                raise UserError(f"the tree of line {number} is none: {wrong}")

    def cut(
        self, number: int, line: str, trees: Sequence[Tree | None] | None = None, ids: list[int] | None = None
    ) -> list[Segment]:
        """The line as it is, or, if it is longer than any the model learnt from, sentence by sentence.

        A sentence that is itself longer stays whole, up to a limit; beyond, it is cut between words, or anywhere.
        """
        if not line.strip():
            return []
        encode = self.tokenizers.source.encode
        ids = encode(line) if ids is None else ids
        if len(ids) <= min(self.longest, self.max_unsplit):
            pieces = [Segment(number, line, ids)]
        else:
            texts = split_sentences(line) if len(ids) > self.longest else [line]
            for part in (NON_SPACES, NON_SPACE):
                texts = [run for text in texts for run in self._runs(text, part)]
            pieces = [Segment(number, text, encode(text)) for text in texts]
        return (
            [self._grown(piece, trees, whole=len(pieces) == 1) for piece in pieces] if self.asks_for_trees else pieces
        )

    def _wished(
        self,
        number: int,
        line: Line,
        trees: Sequence[Tree | None] | None,
        search: SearchSettings,
        ids: list[int] | None = None,
    ) -> list[Segment]:
        """The pieces of a line, each with what is asked of its answer."""
        before = self.before(line.tag)
        pieces = enumerate(self.cut(number, line.text, trees, ids))
        wish = partial(make_constraints, line, tokenizers=self.tokenizers, search=search)
        return [p._replace(wish=wish(p.text, len(p.ids), first=place == 0), before=before) for place, p in pieces]

    def _grown(self, piece: Segment, trees: Sequence[Tree | None] | None, *, whole: bool) -> Segment:
        """The piece with the tree of its line. Where that cannot be, words are known by their places alone."""
        tree = trees[piece.line] if trees is not None else None
        roots = locate_words(tree if whole else None, piece.text)
        links = link_tokens(roots, piece.text, piece.ids, self.tokenizers.source)
        if len(links.head):
            return piece._replace(links=links)
        why = ": its words do not spell the line" if whole else ": the line was cut into parts"
        return piece._replace(links=links, warning=NO_TREE + (why if tree else ""))

    def _runs(self, text: str, part: re.Pattern[str]) -> list[str]:
        """The text, or, where it is too long for any memory, runs of its parts as long as the model learnt from."""
        encode = self.tokenizers.source.encode
        if len(encode(text)) <= self.max_unsplit:
            return [text]
        first, *rest = (match.span() for match in part.finditer(text))
        runs = [first]
        for start, end in rest:
            if len(encode(text[runs[-1][0] : end])) > self.longest:
                runs.append((start, end))
            else:
                runs[-1] = (runs[-1][0], end)
        return [text[start:end] for start, end in runs]

    def answer(
        self,
        pieces: Sequence[Segment],
        lines: Sequence[Line],
        search: SearchSettings,
        dictionary: Mapping[str, str],
        *,
        align: bool = True,
    ) -> list[list[Hypothesis]]:
        """What the engine finds for each piece, as answers."""
        engine = self.engine or TorchEngine(self.model, self.device, self.tokenizers.target.decode)
        found = engine.each([self._job(piece, search) for piece in pieces], widen_nbest(search))
        return self._ranked(pieces, lines, found, search, dictionary, align=align)

    def _ranked(
        self,
        pieces: Sequence[Segment],
        lines: Sequence[Line],
        found: Iterable[tuple[int, list[SearchResult]]],
        search: SearchSettings,
        dictionary: Mapping[str, str],
        *,
        align: bool = True,
    ) -> list[list[Hypothesis]]:
        """What was found for each piece, as answers for users; with alignments, if they are wanted here or there.

        Without them answers are made one by one, while the engine looks for others."""
        say = unknown_replacer(search.unknown, dictionary)

        def made(i: int, some: Iterable[tuple[SearchResult, AlignmentRows]]) -> list[Hypothesis]:
            return [self._hypothesis(pieces[i], lines[pieces[i].line], one, look, say) for one, look in some]

        if not (align or search.coverage or say):
            return in_order((i, made(i, ((one, []) for one in some))) for i, some in found)
        flat = [(i, one) for i, some in enumerate(in_order(found)) for one in some]
        looks = self._looks([(pieces[i], one.tokens) for i, one in flat])
        ranked: list[list[tuple[SearchResult, AlignmentRows]]] = [[] for _ in pieces]
        for (i, one), look in zip(flat, looks, strict=True):
            ranked[i].append((one, look))
        if search.coverage:
            ranked = [rerank_by_coverage(some, search.coverage) for some in ranked]
        return [made(i, some) for i, some in enumerate(ranked)]

    def _job(self, piece: Segment, search: SearchSettings) -> Job:
        limit = limit_length(piece.wish, len(piece.ids), search, self.max_tokens)
        return Job(piece.read, limit, piece.wish, piece.links)

    @torch.inference_mode()
    def _looks(self, answers: Sequence[tuple[Segment, Sequence[int]]]) -> list[AlignmentRows]:
        """Return how much each target token attends to each source token, from one pass over the whole hypothesis.

        Where the model's attention does not tell source tokens apart, there is nothing to return.
        """
        if not self.model.aligns:
            return [[] for _ in answers]
        examples = [piece.example(tokens) for piece, tokens in answers]
        looks: list[AlignmentRows] = [[] for _ in examples]
        for wide, some in group_by_key(range(len(examples)), lambda i: bucket_widths(examples[i]), self.rows):
            rows = [[i] for i in some] + [[]] * (self.rows - len(some))
            look_BTS = self.model.alignment(collate_pairs(BatchPlan(rows, wide), examples).to(self.device)).cpu()
            for row, i in enumerate(some):
                first, last = len(answers[i][0].before), len(examples[i].source)  # what looks at a tag is not counted
                look_TS = look_BTS[row, : len(examples[i].target), first:last]
                looks[i] = (look_TS / look_TS.sum(-1, keepdim=True).clamp(min=1e-9)).tolist()
        return looks

    def _hypothesis(
        self, piece: Segment, line: Line, found: SearchResult, look: AlignmentRows, say: ReplaceUnknown | None
    ) -> Hypothesis:
        text = self._text_of(piece, found.tokens, look, say)
        lost = UNK in found.tokens and say is None
        flags = find_flags(piece.text, text, (len(piece.ids), len(found.tokens)), self.statistics)
        changed = check_placeholders(piece.text, text, self.statistics)
        return Hypothesis(
            text=text,
            score=found.score,
            tokens=self.tokenizers.target.pieces(found.tokens),
            alignment=look,
            source_tokens=self.tokenizers.source.pieces(piece.ids),
            logp=found.logp,
            warnings=(*self._warnings(piece, found), *list_unmet(line, piece.wish, text), *changed),
            flags=(*flags, *([FLAG_UNKNOWN] if lost else []), *warning_kinds(changed)),
        )

    def _text_of(self, piece: Segment, tokens: list[int], look: AlignmentRows, say: ReplaceUnknown | None) -> str:
        """The text of an answer; unknown words in it become what is said for the source words that they looked at."""
        if UNK not in tokens or say is None:
            return self.tokenizers.target.decode(tokens)
        words = source_words(self.tokenizers.source, piece.text, piece.ids)
        return fill_unknowns(tokens, look or [[]] * len(tokens), self.tokenizers.target, words, say)

    def _warnings(self, piece: Segment, found: SearchResult) -> list[str]:
        warnings = [piece.warning] if piece.warning else []
        if len(piece.ids) > self.longest:
            warnings.append(f"longer than any sentence of training ({len(piece.ids)} tokens against {self.longest})")
        if not found.finished:
            full = len(found.tokens) == self.max_tokens
            why = "model.max_length allows" if full else "search.max_ratio and max_extra allow"
            warnings.append(f"cut at {len(found.tokens)} tokens, the most that {why}")
        return warnings

"""From a recipe to what training reads: tokenizers, token stores, streams. Done once; found again at the next start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dragoman.config import CorpusSettings, Recipe
from dragoman.data.stream import Weighted
from dragoman.data.tokens import TokenStore, open_store
from dragoman.store import RunFolder, write_whole
from dragoman.text.corpus import fingerprint, read_pairs
from dragoman.text.tokenizer import Tokenizers
from dragoman.train.report import Report
from dragoman.types import Mistake, Pair


@dataclass(frozen=True)
class Prepared:
    tokenizers: Tokenizers
    train: list[Weighted]
    dev: list[Weighted]
    dev_pairs: list[Pair]  # the first of dev, as text, to be translated
    names: list[str]  # of the corpora, train before dev

    @property
    def longest(self) -> int:
        return max(part.store.longest for part in self.train)

    @property
    def digests(self) -> dict[str, str]:
        """What each corpus holds, by its name."""
        parts = [*self.train, *self.dev]
        return {name: f"{part.store.digest}*{part.weight:g}" for name, part in zip(self.names, parts, strict=True)}

    def changed_since(self, digests: dict[str, str]) -> str:
        """The name of a corpus that is not what it was, or nothing."""
        now = self.digests
        return next((name for name in [*now, *digests] if now.get(name) != digests.get(name)), "")


def prepare(recipe: Recipe, folder: RunFolder, report: Report, *, tokenizers: Tokenizers | None = None) -> Prepared:
    if not recipe.data.train:
        raise Mistake("the recipe has no data.train; name a corpus there, such as {source: F, target: F}")
    for split in ("train", "dev"):
        for corpus in getattr(recipe.data, split):
            fingerprint(corpus, split=split, direction=recipe.data.direction)  # a file that is missing is said first
    found = tokenizers or _tokenizers(recipe, folder, report)
    if not folder.tokenizer.exists():
        write_whole(folder.tokenizer, found.save)
    train = [_store(recipe, c, "train", found, report) for c in recipe.data.train]
    dev = [_store(recipe, c, "dev", found, report) for c in recipe.data.dev]
    pairs = (pair for c in recipe.data.dev for pair in _reader(recipe, c, "dev")())
    lines = [pair for pair, _ in zip(pairs, range(recipe.train.validate_lines))]
    named = [(split, c) for split in ("train", "dev") for c in getattr(recipe.data, split)]
    return Prepared(found, train, dev, lines, [f"data.{split} ({files_of(c)})" for split, c in named])


def files_of(corpus: CorpusSettings) -> str:
    files = [name for name in (corpus.source, corpus.target, corpus.tsv, corpus.jsonl) if name]
    return " and ".join(files) or f"phrasebook: {corpus.phrasebook}, seed: {corpus.seed}"


def _tokenizers(recipe: Recipe, folder: RunFolder, report: Report) -> Tokenizers:
    if folder.tokenizer.exists():
        return Tokenizers.load(folder.tokenizer)

    def pairs() -> Iterator[Pair]:
        for corpus in recipe.data.train:
            yield from report.counted(_reader(recipe, corpus, "train")(), "reading for the tokenizer")

    report.say(f"learning a {recipe.tokenizer.kind} tokenizer")
    return Tokenizers.train(pairs, recipe.tokenizer, seed=recipe.train.seed, say=report.say)


def _reader(recipe: Recipe, corpus: CorpusSettings, split: str) -> Callable[[], Iterator[Pair]]:
    return lambda: read_pairs(corpus, split=split, direction=recipe.data.direction)


def _store(recipe: Recipe, corpus: CorpusSettings, split: str, tokenizers: Tokenizers, report: Report) -> Weighted:
    store: TokenStore = open_store(
        lambda: report.counted(_reader(recipe, corpus, split)(), f"encoding {split} pairs"),
        tokenizers,
        key=fingerprint(corpus, split=split, direction=recipe.data.direction),
        cache=Path(recipe.data.cache).expanduser(),
        max_length=recipe.data.max_length,
        text=split == "train" and recipe.tokenizer.sampling > 0,
    )
    left_out = ", ".join(f"{n} {why}" for why, n in store.dropped.items())
    report.say(f"{split}: {len(store):,} pairs" + (f" ({left_out}: left out)" if left_out else ""))
    return Weighted(store, corpus.weight)

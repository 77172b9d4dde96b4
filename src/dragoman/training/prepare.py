"""From a recipe to what training reads: tokenizers, token stores, streams. Done once; found again at the next start."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice, repeat, zip_longest
from pathlib import Path
from typing import Any

from dragoman.data.batches import EXAMPLE_FORMATS, RankShare
from dragoman.data.corpus import SPLITS, CorpusSettings, fingerprint_corpus, read_pairs
from dragoman.data.features import FEATURES
from dragoman.data.simple_tokenizers import LabelTokenizer
from dragoman.data.stream import BatchStream, TextWindowStream, WeightedStore
from dragoman.data.token_store import TokenStore, open_store
from dragoman.data.tokenizers import Tokenizers, train_tokenizer
from dragoman.errors import UserError
from dragoman.inference.postprocess import PairStatistics
from dragoman.io import LONGEST_LINE, cache_folder, digest_bytes, keep_folder, read_lines, write_atomically
from dragoman.models.settings import LmSettings
from dragoman.process_group import ProcessGroup
from dragoman.progress import WARNING, Report
from dragoman.recipe import Recipe
from dragoman.run_dir import RunFolder
from dragoman.types import Pair

FEW_SHAPES = {"packed": "level", "padded": "stepped"}  # layouts, and their like with few shapes of grids
FIRST_LINES = 1000  # of a corpus that are checked before anything is written
LENGTHS, COPIES = 100_000, 1000  # pairs of a corpus that are looked at to know what is usual


@dataclass(frozen=True)
class Prepared:
    tokenizers: Tokenizers
    train: list[WeightedStore]
    dev: list[WeightedStore]
    asked: dict[str, list[Pair]]  # the first pairs of each corpus of dev, as text, to be translated
    names: list[str]  # of the corpora, train before dev

    @property
    def longest(self) -> int:
        return max(part.store.longest for part in self.train)

    @cached_property
    def usual(self) -> PairStatistics:
        """What pairs look like: lengths from all over each corpus, and the texts of some pairs."""
        lengths, texts = [], []
        for part in self.train:
            lengths += list(zip(*(side.tolist() for side in part.store.lengths(LENGTHS)), strict=True))
            for line in range(0, len(part.store), max(len(part.store) // COPIES, 1)):
                pair = part.store.example(line)
                source = pair.source[len(self.tokenizers.before(part.store.tag)) :]
                texts.append((self.tokenizers.source.decode(source), self.tokenizers.target.decode(pair.target)))
        return PairStatistics.of(lengths, texts)

    @property
    def digests(self) -> dict[str, str]:
        """What each corpus holds, by its name."""
        parts = [*self.train, *self.dev]
        return {name: f"{part.store.digest}*{part.weight:g}" for name, part in zip(self.names, parts, strict=True)}

    def changed_since(self, digests: dict[str, str]) -> str:
        """The name of a corpus that is not what it was, or nothing."""
        return differing(self.digests, digests)


def differing(digests: dict[str, str], others: dict[str, str]) -> str:
    """The name of a corpus that is not the same in both, or nothing."""
    return next((name for name in [*digests, *others] if digests.get(name) != others.get(name)), "")


def check_alike(prepared: Prepared, group: ProcessGroup) -> None:
    """Processes that read different texts would train side by side, not together."""
    first, *others = group.gather(lambda: prepared.digests)
    for rank, digests in enumerate(others, 1):
        if name := differing(first, digests):
            raise group.user_error(
                f"{name} is not the same for process {rank} as for the first; give all machines the same files"
            )


def form_of(recipe: Recipe) -> str:
    """What the texts of this recipe look like to its model (data/batches.py)."""
    task = recipe.model.task
    forms = {"translate": "pairs", "classify": "labels", "generate": "windows"}
    return "lines" if task == "generate" and recipe.data.documents == "line" else forms[task]


def layout_for(recipe: Recipe) -> str:
    """How its grids are laid out. Windows fill their rows; the short one at the end of a text gets a row of its own."""
    return "padded" if form_of(recipe) == "windows" else recipe.model.layout


def comes_in_few_shapes(recipe: Recipe) -> bool:
    """Whether there is a layout that gives it grids of few shapes: else each is as wide as its longest text."""
    return recipe.model.layout == "packed" or form_of(recipe) == "pairs"


def check_data(recipe: Recipe) -> None:
    """Refuse what the model's task cannot make use of."""
    form = form_of(recipe)
    for split in SPLITS:
        if form in ("pairs", "labels") and any(not corpus.has_sources for corpus in getattr(recipe.data, split)):
            wanted = "sources and targets" if form == "pairs" else "texts and labels"
            raise UserError(
                f"data.{split} is plain text, which only a language model learns from; model.kind="
                f"{recipe.model.kind} needs {wanted}, such as {{tsv: F}}"
            )
    if form != "pairs" and (recipe.tokenizer.target_kind or recipe.tokenizer.target_size):
        raise UserError(f"model.kind={recipe.model.kind} has one tokenizer; leave target_kind and target_size out")
    check_ways(recipe, form)
    if form == "windows" and recipe.tokenizer.sampling:
        raise UserError("tokenizer.sampling cuts lines anew at every epoch, so it needs data.documents=line")


def check_ways(recipe: Recipe, form: str) -> None:
    """Refuse tags and directions that cannot be learned, or would not be known."""
    data, kind = recipe.data, recipe.model.kind
    trees = "reads trees of one side" if "tree" in recipe.model.features else ""
    why = trees or ("" if form == "pairs" else "does not translate")
    if why and any(data.tags):
        raise UserError(f"a tag is of no use to model.kind={kind}, which {why}; leave it out of data.train")
    if why and data.both_ways:
        raise UserError(f"data.both_ways is of no use to model.kind={kind}, which {why}; leave it out")
    if form == "labels" and any(corpus.reverse for corpus in data.learned):
        raise UserError("a classifier cannot say a text to a label; leave reverse out")
    ways = [corpus.model_copy(update={"tag": "", "weight": 1.0}) for corpus in data.learned]
    both = any(corpus.model_copy(update={"reverse": not corpus.reverse}) in ways for corpus in ways)
    if both and not recipe.tokenizer.joint and form == "pairs":
        raise UserError("both directions are learned, so both sides need one vocabulary; set tokenizer.joint to true")
    if data.both_ways and any(data.tags):
        raise UserError(
            "data.both_ways learns both directions without telling them apart; where there are tags, list each corpus "
            "again with reverse: true and a tag of its own"
        )
    for split in ("dev", "test"):
        for corpus in getattr(data, split):
            if corpus.tag not in data.tags:
                has = f"the tag {corpus.tag!r}" if corpus.tag else "no tag"
                known = ", ".join(tag or "none" for tag in data.tags)
                raise UserError(f"data.{split} ({corpus.shown}) has {has}, which nothing in data.train has ({known})")


def check_files(recipe: Recipe) -> None:
    """Refuse a file that is missing, or whose first pair cannot be read, before anything is written.

    One to test on is checked too, not only after hours of training.
    """
    for split in SPLITS:
        for corpus in getattr(recipe.data, split):
            fingerprint_corpus(corpus, split=split, direction=recipe.data.direction)
            if not corpus.phrasebook:
                check_first_pair(corpus)


class NoPairYet(Exception):
    """The first lines of a file hold no pair."""


def check_first_pair(corpus: CorpusSettings) -> None:
    """Refuse a corpus whose first pair cannot be read. At most `FIRST_LINES` of a file are read to find it."""

    def first_lines(path: Path) -> Iterator[str]:
        for number, line in enumerate(read_lines(path, longest=LONGEST_LINE if corpus.has_sources else math.inf)):
            if number == FIRST_LINES:
                raise NoPairYet
            yield line

    assert corpus.reader is not None
    whole = corpus.model_copy(update={"part": (0.0, 1.0)})  # where a part begins is known from the whole file alone
    with suppress(NoPairYet):
        next(corpus.reader.read(whole, first_lines), None)


def prepare(recipe: Recipe, folder: RunFolder, report: Report, *, tokenizers: Tokenizers | None = None) -> Prepared:
    found = tagged(tokenizers or _tokenizers(recipe, folder, report), recipe)
    if not folder.tokenizer.exists():
        write_atomically(folder.tokenizer, found.save)
    train = [_store(recipe, c, "train", found, report) for c in recipe.data.learned]
    dev = [_store(recipe, c, "dev", found, report) for c in recipe.data.dev]
    named = [*(("train", c) for c in recipe.data.learned), *(("dev", c) for c in recipe.data.dev)]
    asked = _asked(recipe) if form_of(recipe) == "pairs" else {}
    return Prepared(found, train, dev, asked, [f"data.{split} ({c.shown})" for split, c in named])


def _asked(recipe: Recipe) -> dict[str, list[Pair]]:
    """As many lines as validations translate, of every corpus of dev as many as of the others, while they last."""
    short = [corpus.tag or Path((corpus.files or [corpus.shown])[0]).name for corpus in recipe.data.dev]
    alike = len(set(short)) < len(short)
    names = [corpus.shown for corpus in recipe.data.dev] if alike else short
    features = recipe.model.features
    readers = (_reader(recipe, corpus, "dev", features=features)() for corpus in recipe.data.dev)
    rounds = zip_longest(*(zip(repeat(name), reader) for name, reader in zip(names, readers, strict=True)))
    asked: dict[str, list[Pair]] = {name: [] for name in names}
    for name, pair in islice(filter(None, chain.from_iterable(rounds)), recipe.train.validate_lines):
        asked[name].append(pair)
    return {name: pairs for name, pairs in asked.items() if pairs}


def tagged(tokenizers: Tokenizers, recipe: Recipe) -> Tokenizers:
    """The same with the tags that the recipe's corpora have."""
    return tokenizers.with_tags(word for tag in recipe.data.tags for word in tag.split())


def stream_of(
    recipe: Recipe, prepared: Prepared, *, few_shapes: bool = False, share: RankShare | None = None
) -> BatchStream:
    """Batches without end, as the model's task and kind want them; their grids, if it is asked for, of few shapes."""
    form, settings, layout = form_of(recipe), recipe.train, layout_for(recipe)
    common: dict[str, Any] = {"layout": layout, "tokens": settings.tokens, "seed": settings.seed}
    common |= {"share": share or RankShare(), "most": recipe.model.length_limit}
    if few_shapes and comes_in_few_shapes(recipe):
        common["layout"] = FEW_SHAPES[layout]
    if form == "windows":
        assert isinstance(recipe.model, LmSettings)
        return TextWindowStream(prepared.train, prepared.tokenizers, context=recipe.model.context, **common)
    return BatchStream(prepared.train, prepared.tokenizers, sampling=recipe.tokenizer.sampling, form=form, **common)


def _tokenizers(recipe: Recipe, folder: RunFolder, report: Report) -> Tokenizers:
    """The run's own, or those that an earlier run learned from the same corpora in the same way, or new ones."""
    if folder.tokenizer.exists():
        return Tokenizers.load(folder.tokenizer)
    corpora = [fingerprint_corpus(c, split="train", direction=recipe.data.direction) for c in recipe.data.train]
    way = [corpora, recipe.tokenizer.model_dump(), form_of(recipe), recipe.train.seed]
    name = digest_bytes(json.dumps(way).encode(), size=12)
    kept = cache_folder(recipe.data.cache) / f"{name}-tokenizer"
    with suppress(UserError):  # not there, or damaged
        return Tokenizers.load(kept)
    found = _learned(recipe, report)
    with suppress(OSError):  # a run can do without; if there is no room at all, the token store will say so
        keep_folder(kept, "tokenizer.json", found.save)
    return found


def _learned(recipe: Recipe, report: Report) -> Tokenizers:
    def pairs() -> Iterator[Pair]:
        for corpus in recipe.data.train:
            yield from report.progress("reading for the tokenizer").iterate(_reader(recipe, corpus, "train")())

    report.log(f"learning a {recipe.tokenizer.kind} tokenizer")
    settings, seed, form = recipe.tokenizer, recipe.train.seed, form_of(recipe)
    if form == "pairs":
        return Tokenizers.train(pairs, settings, seed=seed, log=report.log)
    if form == "labels":
        labels = LabelTokenizer.train(pair.target for pair in pairs())
        return Tokenizers(train_tokenizer((p.source for p in pairs()), settings, seed=seed, log=report.log), labels)
    one = train_tokenizer((pair.target for pair in pairs()), settings, seed=seed, log=report.log)
    return Tokenizers(one, one)


def _reader(
    recipe: Recipe, corpus: CorpusSettings, split: str, *, features: Sequence[str] = ()
) -> Callable[[], Iterator[Pair]]:
    """The pairs of a corpus; a language model reads the targets alone."""

    def read() -> Iterator[Pair]:
        pairs = read_pairs(corpus, split=split, direction=recipe.data.direction, trees="tree" in features)
        return (Pair("", pair.target) for pair in pairs) if recipe.model.task == "generate" else pairs

    return read


def _store(recipe: Recipe, corpus: CorpusSettings, split: str, tokenizers: Tokenizers, report: Report) -> WeightedStore:
    form, features = form_of(recipe), recipe.model.features
    noun = EXAMPLE_FORMATS[form].noun
    further = 0  # targets beside the first of a pair

    def pairs() -> Iterator[Pair]:
        nonlocal further
        bar = report.progress(f"encoding {split}", unit=noun)
        for pair in bar.iterate(_reader(recipe, corpus, split, features=features)()):
            further += len(pair.alternatives)
            yield pair

    store: TokenStore = open_store(
        pairs,
        tokenizers,
        key=fingerprint_corpus(corpus, split=split, direction=recipe.data.direction),
        cache=cache_folder(recipe.data.cache),
        max_length=recipe.data.max_length,
        text=split == "train" and recipe.tokenizer.sampling > 0,
        features=features,
        form=form,
        name=f"data.{split} ({corpus.shown})",
    )
    left_out = ", ".join(f"{n} {why}" for why, n in store.dropped.items())
    several = len(recipe.data.learned if split == "train" else recipe.data.dev) > 1
    which = f"{split}, {corpus.shown}" if several else split
    report.log(f"{which}: {len(store):,} {noun}" + (f" ({left_out}: left out)" if left_out else ""))
    if further and split == "train":
        report.log(f"{which}: {further:,} further targets are left out; of several, the first is learned", WARNING)
    for name, missing in store.missing.items():
        if missing:
            report.log(f"{which}: {missing:,} {FEATURES[name].missing_message}", WARNING)
    return WeightedStore(store, corpus.weight)

"""The data of a run: `prepare_data` returns tokenizers and token stores, `open_stream` a stream of their batches.

A token store is a tokenized corpus on disk. Tokenizers and token stores are kept in the cache folder, where later runs
on the same data find them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, islice, repeat, zip_longest
from pathlib import Path
from typing import Any

from dragoman.data.batches import EXAMPLE_FORMATS, RankShard
from dragoman.data.context import CONTEXT_SEPARATOR, extract_sentence
from dragoman.data.corpus import SPLITS, CorpusSettings, fingerprint_corpus, read_pairs
from dragoman.data.features import FEATURES
from dragoman.data.stream import BatchStream, TextWindowStream, WeightedStore
from dragoman.data.token_store import TokenStore, open_store
from dragoman.data.tokenizers import LabelTokenizer, Tokenizers, train_tokenizer
from dragoman.errors import UserError
from dragoman.inference.postprocess import PairStatistics
from dragoman.io import LONGEST_LINE, cache_folder, create_folder_atomically, digest_bytes, read_lines, write_atomically
from dragoman.models.single_sequence import LmSettings
from dragoman.process_group import ProcessGroup
from dragoman.progress import WARNING, Report
from dragoman.recipe import Recipe
from dragoman.run_dir import RunFolder
from dragoman.types import Pair

# Batch layout -> the same layout with a small set of shapes, for CUDA graphs.
BUCKETED_LAYOUTS = {"packed": "packed_bucketed", "padded": "padded_bucketed"}
FIRST_LINES = 1000  # of a file, which `check_files` searches for a pair before anything is written
STATISTICS_LENGTHS, STATISTICS_TEXTS = 100_000, 1000  # pairs of a corpus whose lengths, or whose texts, are measured


@dataclass(frozen=True)
class RunData:
    """The data and the tokenizers of a training run."""

    tokenizers: Tokenizers
    train: list[WeightedStore]  # token store and weight of each corpus
    dev: list[WeightedStore]
    dev_pairs: dict[str, list[Pair]]  # the first pairs of each dev corpus, as text, to be translated
    names: list[str]  # of the corpora, train before dev

    @property
    def longest(self) -> int:
        return max(part.store.longest_source for part in self.train)

    @cached_property
    def pair_statistics(self) -> PairStatistics:
        """Statistics of pairs in the training data, by which inference flags unusual translations.

        They are about the sentences themselves: neither tags nor contexts count in texts, nor contexts in lengths.
        """
        lengths, texts = [], []
        has_context = CONTEXT_SEPARATOR in self.tokenizers.tags
        for part in self.train:
            if not has_context:
                sides = (side.tolist() for side in part.store.sample_lengths(STATISTICS_LENGTHS))
                lengths += list(zip(*sides, strict=True))
            for line in range(0, len(part.store), max(len(part.store) // STATISTICS_TEXTS, 1)):
                pair = part.store.read_example(line)
                source = extract_sentence(self.tokenizers, pair.source.tolist())
                texts.append((self.tokenizers.source.decode(source), self.tokenizers.target.decode(pair.target)))
                if has_context:  # the lengths of stored sources include it
                    lengths.append((len(source), len(pair.target)))
        return PairStatistics.measure(lengths, texts)

    @property
    def digests(self) -> dict[str, str]:
        """Digest and weight of each corpus, by its name."""
        parts = [*self.train, *self.dev]
        return {name: f"{part.store.digest}*{part.weight:g}" for name, part in zip(self.names, parts, strict=True)}


def find_changed_corpus(digests: dict[str, str], other: dict[str, str]) -> str:
    return next((name for name in [*digests, *other] if digests.get(name) != other.get(name)), "")


def check_same_data(prepared: RunData, group: ProcessGroup) -> None:
    first, *others = group.gather_results(lambda: prepared.digests)
    for rank, digests in enumerate(others, 1):
        if name := find_changed_corpus(first, digests):
            raise group.user_error(
                f"{name} is not the same in process {rank} as in process 0; give all machines the same files"
            )


def check_data(recipe: Recipe) -> None:
    """Refuse data settings that the model's task cannot use: plain text, tags, directions, two tokenizers."""
    data, kind, example_format = recipe.data, recipe.model.kind, recipe.example_format
    for split in SPLITS:
        if example_format in ("pairs", "labels") and any(not corpus.has_sources for corpus in getattr(data, split)):
            required = "sources and targets" if example_format == "pairs" else "texts and labels"
            raise UserError(
                f"data.{split} is plain text, which only a language model learns from; model.kind={kind} needs "
                f"{required}, such as {{tsv: FILE}}"
            )
    if example_format != "pairs" and (recipe.tokenizer.target_kind or recipe.tokenizer.target_size):
        raise UserError(f"model.kind={kind} has one tokenizer; leave target_kind and target_size out")
    reason = "" if example_format == "pairs" else "does not translate"  # why tags and a second direction are refused
    if "tree" in recipe.model.source_features:
        reason = "reads trees of one side"  # only sources have dependency trees, in which a tag has no node
    settings = {"a tag in data.train": any(data.tags), "data.both_ways": data.both_ways, "data.context": data.context}
    for setting, is_used in settings.items():
        if reason and is_used:
            raise UserError(f"{setting} has no effect with model.kind={kind}, which {reason}; leave it out")
    if example_format == "labels" and any(corpus.reverse for corpus in data.train_and_reversed):
        raise UserError("a classifier cannot generate a text from a label; leave reverse out")
    # Both directions are learned with data.both_ways, which `train_and_reversed` applies, or if a corpus is listed
    # twice, once with `reverse`; tag and weight may differ.
    corpora = [corpus.model_copy(update={"tag": "", "weight": 1.0}) for corpus in data.train_and_reversed]
    both_directions = any(corpus.model_copy(update={"reverse": not corpus.reverse}) in corpora for corpus in corpora)
    if both_directions and not recipe.tokenizer.joint and example_format == "pairs":
        raise UserError("both directions are learned, so both sides need one vocabulary; set tokenizer.joint to true")
    if data.both_ways and any(data.tags):
        raise UserError(
            "data.both_ways learns both directions without tags; if corpora have tags, list each corpus again with "
            "reverse: true and another tag"
        )
    dialogues = [corpus.title for split in SPLITS for corpus in getattr(data, split) if corpus.dialogue]
    if data.context and dialogues:
        raise UserError(f"{dialogues[0]}: a source of a dialogue is the dialogue so far; leave data.context out")
    for split in ("dev", "test"):
        for corpus in getattr(data, split):
            if corpus.tag not in data.tags:
                found = f"the tag {corpus.tag!r}" if corpus.tag else "no tag"
                known = ", ".join(tag or "no tag" for tag in data.tags)
                raise UserError(f"data.{split} ({corpus.title}) has {found}, but in data.train there is only: {known}")
    if example_format == "windows" and recipe.tokenizer.sampling:
        raise UserError("tokenizer.sampling tokenizes lines anew in every epoch, so it needs data.documents=line")


class NoPairFound(Exception):
    """The first FIRST_LINES lines of a file contain no pair. This is allowed: they may be empty."""


def check_files(recipe: Recipe) -> None:
    """Refuse files of all splits that are missing or whose first pair cannot be read.

    At most `FIRST_LINES` lines of a file are read to find a pair.
    """
    for split in SPLITS:
        for corpus in getattr(recipe.data, split):
            fingerprint_corpus(corpus, split=split, direction=recipe.data.direction)  # refuses missing files
            if corpus.phrasebook:
                continue

            def read_first(path: Path, is_text: bool = not corpus.has_sources) -> Iterator[str]:
                for number, line in enumerate(read_lines(path, longest=math.inf if is_text else LONGEST_LINE)):
                    if number == FIRST_LINES:
                        raise NoPairFound
                    yield line

            assert corpus.reader is not None
            # `part` selects a fraction of the characters, and where it starts depends on the full file.
            full = corpus.model_copy(update={"part": (0.0, 1.0)})
            with suppress(NoPairFound):
                next(corpus.reader.read(full, read_first), None)


def prepare_data(recipe: Recipe, folder: RunFolder, report: Report, *, tokenizers: Tokenizers | None = None) -> RunData:
    """Return the data of a run. Without `tokenizers`, load them from the run folder or else train them."""
    if tokenizers is None:
        exists = folder.tokenizer_folder.exists()
        tokenizers = Tokenizers.load(folder.tokenizer_folder) if exists else learn_tokenizers(recipe, report)
    tokenizers = add_tags(tokenizers, recipe)
    if not folder.tokenizer_folder.exists():
        write_atomically(folder.tokenizer_folder, tokenizers.save)
    splits = {"train": recipe.data.train_and_reversed, "dev": recipe.data.dev}
    corpora = [(split, corpus) for split, settings in splits.items() for corpus in settings]
    stores = [encode_corpus(recipe, corpus, split, tokenizers, report) for split, corpus in corpora]
    train_count = len(recipe.data.train_and_reversed)
    names = [f"data.{split} ({corpus.title})" for split, corpus in corpora]
    return RunData(tokenizers, stores[:train_count], stores[train_count:], read_dev_pairs(recipe), names)


def add_tags(tokenizers: Tokenizers, recipe: Recipe) -> Tokenizers:
    """Return the tokenizers with the tags of the recipe and, if it has data.context, the separator of sentences."""
    tags = [word for tag in recipe.data.tags for word in tag.split()]
    return tokenizers.with_tags([*tags, *([CONTEXT_SEPARATOR] if recipe.data.context else [])])


def read_corpus(recipe: Recipe, corpus: CorpusSettings, split: str, features: Sequence[str] = ()) -> Iterator[Pair]:
    """Yield the pairs of a corpus, with context if the recipe has data.context. A language model has no sources."""
    options: dict[str, Any] = {"direction": recipe.data.direction, "context": recipe.data.context}
    pairs = read_pairs(corpus, split=split, trees="tree" in features, **options)
    return (Pair("", pair.target) for pair in pairs) if recipe.model.task == "generate" else pairs


def learn_tokenizers(recipe: Recipe, report: Report) -> Tokenizers:
    """Train tokenizers on the training corpora, or load them from the cache if an earlier run has trained them."""
    corpora = [fingerprint_corpus(c, split="train", direction=recipe.data.direction) for c in recipe.data.train]
    settings, seed, example_format = recipe.tokenizer, recipe.train.seed, recipe.example_format
    name = digest_bytes(json.dumps([corpora, settings.model_dump(), example_format, seed]).encode(), size=12)
    cached = cache_folder(recipe.data.cache) / f"{name}-tokenizer"
    with suppress(UserError):  # not cached yet, or damaged
        return Tokenizers.load(cached)

    def pairs() -> Iterator[Pair]:
        for corpus in recipe.data.train:
            yield from report.progress("reading for the tokenizer").iterate(read_corpus(recipe, corpus, "train"))

    report.log(f"learning a {settings.kind} tokenizer")
    learn = partial(train_tokenizer, settings=settings, seed=seed, log=report.log)
    if example_format == "pairs":
        tokenizers = Tokenizers.train(pairs, settings, seed=seed, log=report.log)
    elif example_format == "labels":
        labels = LabelTokenizer.train(pair.target for pair in pairs())
        tokenizers = Tokenizers(learn(pair.source for pair in pairs()), labels)
    else:
        tokenizer = learn(pair.target for pair in pairs())
        tokenizers = Tokenizers(tokenizer, tokenizer)
    with suppress(OSError):  # the cache is optional; if the disk is full, the token store reports it
        create_folder_atomically(cached, write=tokenizers.save, required_file="tokenizer.json")
    return tokenizers


def encode_corpus(
    recipe: Recipe, corpus: CorpusSettings, split: str, tokenizers: Tokenizers, report: Report
) -> WeightedStore:
    """Return the token store of a corpus; log how many examples it has and how many were left out."""
    features, noun = recipe.model.source_features, EXAMPLE_FORMATS[recipe.example_format].noun
    extra = 0  # number of targets besides the first of each pair

    def pairs() -> Iterator[Pair]:
        nonlocal extra
        bar = report.progress(f"encoding {split}", unit=noun)
        for pair in bar.iterate(read_corpus(recipe, corpus, split, features)):
            extra += len(pair.alternatives)
            yield pair

    store: TokenStore = open_store(
        pairs,
        tokenizers,
        key=fingerprint_corpus(corpus, split=split, direction=recipe.data.direction),
        cache=cache_folder(recipe.data.cache),
        max_length=recipe.data.max_length,
        text=split == "train" and recipe.tokenizer.sampling > 0,  # keep it, to tokenize it anew in every epoch
        features=features,
        context=recipe.data.context,
        example_format=recipe.example_format,
        name=f"data.{split} ({corpus.title})",
    )
    left_out = ", ".join(f"{count} {reason}" for reason, count in store.dropped_counts.items())
    corpus_count = len(recipe.data.train_and_reversed if split == "train" else recipe.data.dev)
    label = f"{split}, {corpus.title}" if corpus_count > 1 else split
    report.log(f"{label}: {len(store):,} {noun}" + (f" ({left_out}: left out)" if left_out else ""))
    if recipe.data.context:
        report.log(f"{label}: {store.documents:,} of them begin a document")
        if store.documents == 1:
            hint = "separate documents by empty lines, or name a column or key of their ids with `document_id`"
            report.log(f"{label}: all pairs are one document; {hint}", WARNING)
    if store.shortened_contexts:
        reason = f"longer than data.max_length={recipe.data.max_length} tokens"
        report.log(f"{label}: {store.shortened_contexts:,} have less context, because it was {reason}")
    if extra and split == "train":
        report.log(f"{label}: {extra:,} further targets are left out; only the first of a pair is learned", WARNING)
    for name, missing in store.missing_counts.items():
        if missing:
            report.log(f"{label}: {missing:,} {FEATURES[name].missing_message}", WARNING)
    return WeightedStore(store, corpus.weight)


def read_dev_pairs(recipe: Recipe) -> dict[str, list[Pair]]:
    """Return train.validate_lines pairs in total, by dev corpus: equally many of each, unless a corpus has fewer."""
    if recipe.example_format != "pairs":
        return {}
    names = [corpus.tag or Path((corpus.files or [corpus.title])[0]).name for corpus in recipe.data.dev]
    if len(set(names)) < len(names):
        names = [corpus.title for corpus in recipe.data.dev]
    readers = (read_corpus(recipe, corpus, "dev", recipe.model.source_features) for corpus in recipe.data.dev)
    # A round has one (name, pair) of each corpus, or None if the corpus has ended.
    rounds = zip_longest(*(zip(repeat(name), reader) for name, reader in zip(names, readers, strict=True)))
    by_corpus: dict[str, list[Pair]] = {name: [] for name in names}
    for name, pair in islice(filter(None, chain.from_iterable(rounds)), recipe.train.validate_lines):
        by_corpus[name].append(pair)
    return {name: pairs for name, pairs in by_corpus.items() if pairs}


def open_stream(
    recipe: Recipe, prepared: RunData, *, bucketed_shapes: bool = False, shard: RankShard | None = None
) -> BatchStream:
    """Return an endless stream of training batches, with bucketed shapes if requested and the model supports them."""
    settings, layout = recipe.train, recipe.batch_layout
    common: dict[str, Any] = {
        "layout": BUCKETED_LAYOUTS[layout] if bucketed_shapes and recipe.can_bucket_shapes else layout,
        "tokens": settings.tokens,
        "seed": settings.seed,
        "shard": shard or RankShard(),
        "max_positions": recipe.model.length_limit,
    }
    if isinstance(recipe.model, LmSettings) and recipe.example_format == "windows":
        return TextWindowStream(prepared.train, prepared.tokenizers, context=recipe.model.context, **common)
    common |= {"sampling": recipe.tokenizer.sampling, "example_format": recipe.example_format}
    return BatchStream(prepared.train, prepared.tokenizers, **common)

"""Context: the sentences before a sentence in its document, as input of the model, and what becomes of them."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dragoman.config.settings import parse_settings
from dragoman.data.context import (
    CONTEXT_SEPARATOR,
    STORED_SEPARATOR,
    ContextWindow,
    attach_to_lines,
    attach_to_pairs,
    encode_contexts,
    extract_sentence,
    find_separator,
    join_context,
)
from dragoman.data.corpus import CorpusSettings, fingerprint_corpus, read_pairs
from dragoman.data.sampling_workers import SamplingTask, sample_task
from dragoman.data.token_store import open_store
from dragoman.data.tokenizers import Tokenizers
from dragoman.errors import UserError
from dragoman.inference.loading import load_as
from dragoman.inference.translator import Translator
from dragoman.types import Line, Pair
from toy_run import RECIPE, SMALL, Call, assert_user_error, train_quietly, write_corpus, write_lines, write_recipe
from toy_text import ALL, TEXT

SENTENCES = st.lists(st.sampled_from(["", " ", "a", "b c", "d e f"]), max_size=12)


@given(SENTENCES, st.integers(0, 3))
def test_a_context_is_the_end_of_the_document_so_far(texts: list[str], count: int) -> None:
    window, document = ContextWindow(count), list[str]()
    for text in texts:
        document = document if text.strip() else []
        assert window.advance(text) == tuple(document[len(document) - min(count, len(document)) :])
        document += [text] if text.strip() else []


@given(SENTENCES, st.integers(1, 3))
def test_pairs_and_lines_have_the_same_contexts(texts: list[str], count: int) -> None:
    pairs = attach_to_pairs([Pair(text, "x") for text in texts], count)
    lines = attach_to_lines(texts, count)
    assert [pair.context for pair in pairs] == [line.context for line in lines if isinstance(line, Line)]
    assert attach_to_lines(texts, 0) == texts


def test_a_given_context_is_kept() -> None:
    assert attach_to_lines(["a", Line("b", context=("z",)), "c"], 1) == [
        Line("a", context=()),
        Line("b", context=("z",)),
        Line("c", context=("b",)),
    ]


@given(st.lists(st.lists(st.integers(4, 9), max_size=5), max_size=4), st.integers(-3, 25))
def test_the_oldest_sentences_are_left_out_first(sentences: list[list[int]], limit: int) -> None:
    joined = join_context(sentences, 99, limit)
    kept = joined.count(99)
    assert len(joined) <= max(limit, 0)
    assert joined == [token for ids in sentences[len(sentences) - kept :] for token in (*ids, 99)]
    if kept < len(sentences):
        assert len(joined) + len(sentences[-kept - 1]) + 1 > limit


@given(st.sampled_from(sorted(ALL)), TEXT | st.sampled_from([f"<{CONTEXT_SEPARATOR}>", CONTEXT_SEPARATOR]))
def test_no_text_and_no_tag_is_the_separator(kind: str, text: str) -> None:
    tokenizers = Tokenizers(ALL[kind], ALL[kind]).with_tags(["de", CONTEXT_SEPARATOR])
    separator = find_separator(tokenizers)
    assert separator not in tokenizers.source.encode(text)
    assert tokenizers.sizes["target_size"] <= separator < tokenizers.sizes["source_size"]
    with pytest.raises(ValueError, match="not in tuple"):
        tokenizers.tag_ids(CONTEXT_SEPARATOR)  # a tag of two words, neither of which is the separator
    ids = tokenizers.source.encode(text)
    [context] = encode_contexts(tokenizers, [[text]], [1000])
    assert context == [*ids, separator]
    assert extract_sentence(tokenizers, [*tokenizers.tag_ids("de"), *context, *ids]) == ids


def test_files_have_documents(tmp_path: Path) -> None:
    """Empty lines end documents; rows of tables and objects name theirs."""
    sources = ["a", "b", "", "c", "d", "e"]
    write_lines(tmp_path / "x.src", sources)
    write_lines(tmp_path / "x.trg", sources)
    write_lines(tmp_path / "x.tsv", ["a\ta\t1", "b\tb\t1", "c\tc\t2", "d\td\t2", "e\te\t2"])
    rows = [{"source": s, "target": s, "doc": number} for s, number in zip("abcde", "11222", strict=True)]
    write_lines(tmp_path / "x.jsonl", map(json.dumps, rows))
    expected = {"a": (), "b": ("a",), "c": (), "d": ("c",), "e": ("c", "d")}
    for values in (
        {"source": str(tmp_path / "x.src"), "target": str(tmp_path / "x.trg")},
        {"tsv": str(tmp_path / "x.tsv"), "document_id": 2},
        {"jsonl": str(tmp_path / "x.jsonl"), "document_id": "doc"},
    ):
        corpus = parse_settings(CorpusSettings, values)
        contexts = {pair.source: pair.context for pair in read_pairs(corpus, context=2)}
        assert {text: contexts[text] for text in expected} == expected
        assert [pair.context for pair in read_pairs(corpus)] == [()] * len(contexts)
    with pytest.raises(UserError, match="columns are numbered"):
        list(read_pairs(parse_settings(CorpusSettings, {"tsv": str(tmp_path / "x.tsv"), "document_id": "doc"})))


def test_new_settings_do_not_change_the_digest_of_old_corpora(tmp_path: Path) -> None:
    """A digest covers a document id only if there is one, so caches of earlier releases are still found."""
    write_lines(tmp_path / "x.tsv", ["a\ta\t1"])
    plain = CorpusSettings(tsv=str(tmp_path / "x.tsv"))
    assert fingerprint_corpus(plain) != fingerprint_corpus(plain.model_copy(update={"document_id": "2"}))
    book = CorpusSettings(phrasebook=10)
    assert fingerprint_corpus(book) != fingerprint_corpus(book.model_copy(update={"documents": True}))
    assert all(pair.context == () for pair in read_pairs(book, context=2))  # its sentences are unrelated


@pytest.mark.parametrize("text", [False, True])
def test_a_store_truncates_contexts_but_no_sentence(tmp_path: Path, text: bool) -> None:
    tokenizers = Tokenizers(ALL["byte"], ALL["byte"]).with_tags([CONTEXT_SEPARATOR])
    sources = ["aaaa", "bb", "cccc", "", "d" * 9, "e"]
    options: dict[str, Any] = {"key": "k", "cache": tmp_path, "text": text, "max_length": 9}

    def pairs(count: int) -> Any:
        return lambda: attach_to_pairs([Pair(source, "x") for source in sources], count)

    store = open_store(pairs(2), tokenizers, context=2, **options)
    separator = find_separator(tokenizers)
    found = [bytes(0 if i == separator else i - 4 for i in example.source) for example in
             store.read_examples(np.arange(len(store)))]  # fmt: skip
    assert found == [b"aaaa", b"aaaa\0bb", b"bb\0cccc", b"d" * 9, b"e"]
    assert (store.documents, store.shortened_contexts, store.longest_source) == (2, 2, 9)
    plain = open_store(pairs(0), tokenizers, **options)
    without = open_store(lambda: iter([Pair(source, "x") for source in sources]), tokenizers, **options)
    assert plain.digest == without.digest != store.digest
    if text:
        [stored, _] = store.read_texts(np.array([2]))
        assert stored == [STORED_SEPARATOR.join([b"aaaa", b"bb", b"cccc"])]
        task = SamplingTask(0.5, 1, 1, "", 9, [2], stored, [b"x"])
        assert sample_task(tokenizers, task)[0].ids.tolist() == store.read_example(2).source.tolist()


NOUNS = {"lamp": ("Lampe", "sie"), "bag": ("Tasche", "sie"), "table": ("Tisch", "er"), "hat": ("Hut", "er")}
VERBS = {"shines": "scheint", "falls": "fällt", "burns": "brennt", "stays": "bleibt"}


def write_documents(folder: Path, name: str, count: int, seed: int) -> None:
    """Write documents of two sentences: the pronoun of the second one has the gender of the noun of the first."""
    random, sources, targets = Random(seed), list[str](), list[str]()
    for _ in range(count):
        noun, (first, second) = random.choice(list(NOUNS)), random.choices(list(VERBS), k=2)
        sources += [f"{noun} {first} .", f"it {second} .", ""]
        targets += [f"{NOUNS[noun][0]} {VERBS[first]} .", f"{NOUNS[noun][1]} {VERBS[second]} .", ""]
    write_lines(folder / f"{name}.src", sources[:-1])
    write_lines(folder / f"{name}.trg", targets[:-1])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("documents")
    write_documents(folder, "train", 400, 1)
    write_documents(folder, "dev", 20, 2)
    recipe = write_recipe(
        folder / "recipe.yaml",
        data={**RECIPE["data"], "test": RECIPE["data"]["dev"], "context": 1, "max_length": 12, "metrics": ["chrf"]},
        tokenizer={"kind": "word", "size": 100},
        model={"width": 32, "heads": 2},
        train={"steps": 150, "lr": 1e-2, "warmup": 10, "validate_every": 150, "save_every": 150, "metric": "chrf"},
    )  # fmt: skip
    return train_quietly(recipe, folder / "run")


@pytest.fixture(scope="module")
def translator(run: Path) -> Translator:
    return load_as(Translator, run, device="cpu")


def test_context_decides_the_pronoun(run: Path, translator: Translator, call: Call) -> None:
    """With context, all pronouns are right; without it, the model can only guess one of two."""
    sources = (run.parent / "dev.src").read_text().split("\n")[:-1]
    targets = (run.parent / "dev.trg").read_text().split("\n")[:-1]
    pronouns = [index for index, source in enumerate(sources) if source.startswith("it")]

    def accuracy(context: int | None) -> float:
        texts = [hypothesis.text for hypothesis in translator.translate(sources, context=context)]
        assert [text == "" for text in texts] == [source == "" for source in sources]
        return sum(texts[i].split()[0] == targets[i].split()[0] for i in pronouns) / len(pronouns)

    assert accuracy(None) == accuracy(1) > 0.95
    assert accuracy(0) < 0.8
    files = ("--source", run.parent / "dev.src", "--reference", run.parent / "dev.trg")
    results = [json.loads(call("evaluate", run, *o, "--json").out) for o in ((), ("--context", 0), files)]
    values = [result["chrf"]["value"] for result in results]
    assert values[0] == values[2] > 95 > values[1]  # data.test, and the same files by name
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert next(event["chrf"] for event in reversed(events) if event["event"] == "validate") > 95


LINES = ["lamp shines .", "it falls .", "", "it burns .", "hat burns .", "it stays .", "it shines ."]


def test_the_result_depends_on_nothing_but_the_context(run: Path, translator: Translator, call: Call) -> None:
    """Whole lists, single lines with their context, batches of any size, streams and shards give the same text."""
    whole = [hypothesis.text for hypothesis in translator.translate(LINES)]
    lines = attach_to_lines(LINES, 1)
    assert [translator.translate([line])[0].text for line in lines] == whole
    stdin = "".join(line + "\n" for line in LINES).encode()
    for options in ((), ("--batch", 1), ("--batch", 2), ("--stream",), ("--context", 1)):
        assert call("translate", run, *options, stdin=stdin).out.split("\n")[:-1] == whole
    source, out = run.parent / "in.txt", run.parent / "out.txt"
    source.write_bytes(stdin)
    assert call("translate", run, "--resume", "-i", source, "-o", out, "--batch", 3).code == 0
    assert out.read_text().split("\n")[:-1] == whole
    none = call("translate", run, "--context", 0, stdin=stdin).out.split("\n")[:-1]
    assert none == [translator.translate([line])[0].text for line in LINES] != whole
    record = json.loads(call("translate", run, "--json", stdin=stdin).out.split("\n")[1])
    assert record["source"] == "it falls ."


def test_alignments_tokens_and_flags_are_of_the_sentence(translator: Translator) -> None:
    with_context, without = (translator.translate([Line("it falls .", context=c)])[0] for c in (("lamp shines .",), ()))
    assert with_context.source_tokens == without.source_tokens
    assert [len(row) for row in with_context.alignment] == [3] * len(with_context.tokens)
    assert all(abs(sum(row) - 1) < 1e-4 for row in with_context.alignment)
    assert (with_context.flags, with_context.warnings) == ((), ())
    [hypothesis] = translator.translate([Line("it falls .", context=("lamp {name} shines .",))])
    assert not any("placeholder" in warning for warning in hypothesis.warnings)


def test_the_sentence_itself_is_never_truncated(translator: Translator) -> None:
    """Context is left out, oldest sentence first, if the source would exceed data.max_length = 12 tokens."""
    options = translator.make_options()
    for words in range(1, 14):
        line = Line("it " * words, context=("lamp shines .",))
        for segment in translator.make_segments(line, options):
            assert len(segment.leading_ids) in (0, 4)
            assert not segment.leading_ids or len(segment.leading_ids) + len(segment.ids) <= 12
    whole = [segment for words in (8, 9) for segment in translator.make_segments(
        Line("it " * words, context=("lamp shines .",)), options)]  # fmt: skip
    assert " ".join(segment.text for segment in whole).split() == ["it"] * 17


def test_a_line_that_is_split_is_context_of_itself(translator: Translator) -> None:
    """The second sentence of a line that is too long is translated with the first as context."""
    first, second = "lamp shines .", "it falls ."
    assert translator.longest_source < 6
    [joined] = translator.translate([f"{first} {second}"])
    assert joined.text == " ".join(hypothesis.text for hypothesis in translator.translate([first, second]))


def test_scores_use_the_context(run: Path, translator: Translator, call: Call) -> None:
    sources, targets = ["lamp shines .", "it falls ."], ["Lampe scheint .", "sie fällt ."]
    scores = translator.score(sources, targets)
    assert scores[1].logp > translator.score(sources, targets, context=0)[1].logp + 0.3
    assert scores[1].warnings == ()
    write_lines(run.parent / "s", sources)
    write_lines(run.parent / "t", targets)
    for batch in (1, 2):
        out = call("score", run, "--source", run.parent / "s", "--target", run.parent / "t", "--batch", batch).out
        assert out == "".join(f"{score.logp:.6f}\n" for score in scores)


def test_inspect_reads_previous_sentences(run: Path, call: Call) -> None:
    out = json.loads(call("inspect", run, "it falls .", "--previous", "lamp shines .", "--json").out)
    assert f"<{CONTEXT_SEPARATOR}>" in out["tokens"]["source"]
    assert out["target"].startswith("sie")


def test_what_cannot_have_context_says_so(run: Path, tmp_path: Path, call: Call) -> None:
    assert_user_error(call("translate", run, "--context", 2, "x"), "data.context=1")
    write_corpus(tmp_path)
    recipe = write_recipe(tmp_path / "recipe.yaml", **SMALL)
    smt = ("model.kind=smt", "tokenizer.kind=word")
    for overrides in (smt, ("model.kind=classifier",), ("model.kind=lm",), ("model.position=tree",)):
        values = yaml.safe_load(recipe.read_text())
        values["model"] = {}
        (tmp_path / "other.yaml").write_text(yaml.safe_dump(values))
        result = call("train", tmp_path / "other.yaml", "--out", tmp_path / "x", "data.context=1", *overrides)
        assert_user_error(result, "data.context")
    plain = load_as(Translator, train_quietly(recipe, tmp_path / "plain", "train.steps=1"), device="cpu")
    with pytest.raises(UserError, match=r"without data\.context"):
        plain.translate(["ba."], context=1)
    with pytest.raises(UserError, match=r"without data\.context"):
        plain.translate([Line("ba.", context=("fo.",))])


def test_context_0_is_training_without_context(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    recipe = write_recipe(tmp_path / "recipe.yaml", **SMALL)
    runs = [
        train_quietly(recipe, tmp_path / name, "train.steps=4", *o)
        for name, o in (("a", ()), ("b", ("data.context=0",)))
    ]
    assert len({(run / "model.safetensors").read_bytes() for run in runs}) == 1


def test_subword_sampling_and_context_train_together(tmp_path: Path) -> None:
    """A run of a sentence-level model can go on with context, with sampled segmentations of both."""
    write_corpus(tmp_path)
    recipe = write_recipe(tmp_path / "recipe.yaml", **SMALL)
    parent = train_quietly(recipe, tmp_path / "parent", "train.steps=2")
    overrides = ("data.context=2", "tokenizer.sampling=0.1", "train.steps=2")
    run = train_quietly(recipe, tmp_path / "run", *overrides, init_from=parent)
    assert len(load_as(Translator, run, device="cpu").translate(["ba.", "fo.", "del."])) == 3

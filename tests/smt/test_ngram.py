"""N-gram models: probabilities sum to one, KenLM reads them and agrees, bad files are refused."""

from __future__ import annotations

import math
import re
from pathlib import Path

import kenlm
import numpy as np
import pytest

from dragoman.errors import UserError
from dragoman.smt.decoder import NgramScorer
from dragoman.smt.decoder_kernels import score_word
from dragoman.smt.ngram import BEGIN, UNKNOWN, NgramModel, read_arpa, train_ngrams, write_arpa

WORDS = ["the", "a", "dog", "cat", "house", "small", "big", "runs", "sleeps", "in", "on", "and"]
RNG = np.random.default_rng(0)
TEXT = [" ".join(RNG.choice(WORDS, RNG.integers(1, 12), p=np.arange(12, 0, -1) / 78)) for _ in range(300)]
CASES = [(1, ()), (2, ()), (3, ()), (5, ()), (3, (0, 0, 1)), (5, (0, 1))]


def save(model: NgramModel, path: Path) -> Path:
    with path.open("w", encoding="utf-8") as file:
        write_arpa(model, file)
    return path


@pytest.fixture(scope="module", params=CASES, ids=str)
def model(request: pytest.FixtureRequest) -> NgramModel:
    order, prune = request.param
    return train_ngrams(TEXT, order, prune=prune)


def test_probabilities_sum_to_one(model: NgramModel) -> None:
    """After any words, seen or not."""
    lm = NgramScorer(model)
    for context in ([], ["the"], ["the", "dog"], ["zzz", "dog"], ["cat", "house", "on", "the"]):
        state = lm.trie.begin
        for word in context:
            _, state = score_word(lm.trie, state, lm.ids.get(word, UNKNOWN))
        outcomes = [index for index in range(len(lm.words)) if index != BEGIN]
        total = sum(math.exp(score_word(lm.trie, state, index)[0]) for index in outcomes)
        assert total == pytest.approx(1.0, abs=1e-6)


def test_kenlm_agrees(model: NgramModel, tmp_path: Path) -> None:
    if len(model.orders) == 1:
        pytest.skip("KenLM needs two orders at least")
    reader = kenlm.Model(str(save(model, tmp_path / "model.arpa")))
    lm = NgramScorer(model)
    for line in [*TEXT[:50], "zzz the dog", "", "the the the the the the"]:
        assert lm.score(line.split()) / math.log(10) == pytest.approx(reader.score(line), abs=1e-5)


def test_written_is_read(model: NgramModel, tmp_path: Path) -> None:
    again = NgramScorer(read_arpa(save(model, tmp_path / "model.arpa")))
    lm = NgramScorer(model)
    assert all(again.score(line.split()) == pytest.approx(lm.score(line.split()), abs=1e-4) for line in TEXT[:20])


def test_unigrams_by_hand() -> None:
    """Continuation counts of the bigrams' suffixes: a follows <s> and b, b follows a, </s> follows both."""
    model = train_ngrams(["a b a", "a b"], 2)
    unigrams = dict(zip(model.words, 10 ** model.orders[0].log_prob, strict=True))
    discount = [0.5, 1.0, 1.5]  # the counts of counts are too few to estimate others
    mass = (2 * discount[1] + discount[0]) / 5
    assert unigrams["b"] == pytest.approx((1 - discount[0]) / 5 + mass / 4)
    assert unigrams["a"] == pytest.approx((2 - discount[1]) / 5 + mass / 4)


def test_pruning_drops_rare_ngrams_and_no_prefixes() -> None:
    whole, pruned = train_ngrams(TEXT, 4), train_ngrams(TEXT, 4, prune=(0, 1, 2))
    assert len(pruned.orders[0].word) == len(whole.orders[0].word)
    for n in range(1, 4):
        assert 0 < len(pruned.orders[n].word) < len(whole.orders[n].word)
        assert pruned.orders[n].prefix.max() < len(pruned.orders[n - 1].word)


OTHER_TOOLS = {
    "spaces for tabs": lambda text: text.replace("\t", " "),
    "Windows line ends": lambda text: text.replace("\n", "\r\n"),
    "upper-case <UNK>": lambda text: text.replace("<unk>", "<UNK>"),
    "zero weights left out": lambda text: re.sub(r"\t-?0\n", "\n", text),
    "a comment before, none after": lambda text: "written by a tool\n" + text.rstrip("\n"),
    "spaces in the head": lambda text: re.sub(r"ngram (\d)=", r"ngram \1 = ", text),
    "n-grams in another order": lambda text: shuffle_sections(text),
    "exponents": lambda text: re.sub(r"^-(\d)\.(\d+)", r"-0.\1\2E+01", text, flags=re.MULTILINE),
}


def shuffle_sections(text: str) -> str:
    sections = text.split("\n\n")
    for index, section in enumerate(sections[1:-1], 1):
        head, *lines = section.split("\n")
        sections[index] = "\n".join([head, *reversed(lines)])
    return "\n\n".join(sections)


@pytest.mark.parametrize("tool", OTHER_TOOLS)
def test_files_of_other_tools_are_read(tool: str, tmp_path: Path) -> None:
    model = train_ngrams([*TEXT, "straße e\u3000t"], 3)
    path = save(model, tmp_path / "model.arpa")
    text = OTHER_TOOLS[tool](path.read_bytes().decode())
    assert text != path.read_bytes().decode()
    path.write_bytes(text.encode())
    lm, again = NgramScorer(model), NgramScorer(read_arpa(path))
    for line in [*TEXT[:20], "zzz the straße", ""]:
        assert again.score(line.split()) == pytest.approx(lm.score(line.split()), abs=1e-4)


def test_a_file_without_unknown_words_is_read_as_by_kenlm(tmp_path: Path) -> None:
    path = save(train_ngrams(TEXT, 3), tmp_path / "model.arpa")
    lines = [line for line in path.read_text("utf-8").split("\n") if "<unk>" not in line]
    size = len(train_ngrams(TEXT, 3).words)
    path.write_text("\n".join(lines).replace(f"ngram 1={size}", f"ngram 1={size - 1}"), "utf-8")
    lm, reader = NgramScorer(read_arpa(path)), kenlm.Model(str(path))
    for line in ["zzz the dog", "the dog", "the zzz zzz"]:
        assert lm.score(line.split()) / math.log(10) == pytest.approx(reader.score(line), abs=1e-5)


def test_a_file_that_was_cut_is_refused(tmp_path: Path) -> None:
    path = save(train_ngrams(TEXT, 3), tmp_path / "model.arpa")
    whole = path.read_bytes()
    for length in range(0, len(whole) - 1, 997):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"model\.arpa"):
            read_arpa(path)
    path.write_bytes(whole[:-2])
    with pytest.raises(UserError, match="cut short: line"):
        read_arpa(path)
    with pytest.raises(UserError, match="cannot read"):
        read_arpa(tmp_path / "nothing.arpa")
    with pytest.raises(UserError, match="at least one line"):
        train_ngrams([], 3)


SMALL = (
    "\\data\\\nngram 1=4\nngram 2=1\n\n\\1-grams:\n-1\t<s>\n-1\t</s>\n-1\ta\t-0.5\n-1\tb\n"
    "\n\\2-grams:\n-1\ta b\n\n\\end\\\n"
)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("-1\ta b", "-1\ta c", "line 12: .* has a word that is no 1-gram"),
        ("-1\ta b", "-1\ta", "line 12: .* is no 2-gram"),
        ("-1\ta b", "-1\ta b\t0\t0", "line 12: .* is no 2-gram"),
        ("-1\ta b", "x\ta b", "line 12: .* is no 2-gram"),
        ("-1\ta\t-0.5", "-1\ta\t-0.5.5", "line 8: .* is no 1-gram"),
        ("-1\tb\n", "-1\ta\n", "line 9: .* is there twice"),
        ("-1\tb\n", "", "it has 3 1-grams up to line 9, not 4"),
        ("-1\t<s>", "-1\tc", "no 1-gram <s>"),
        ("\\2-grams:", "\\3-grams:", r"line 11 should be .2-grams:, not '.*3-grams:'"),
        ("\\data\\", "data", "no ARPA file"),
        ("ngram 2=1", "ngram 2=1000000000000", "line 3 says that it has 1,000,000,000,000 2-grams"),
        ("ngram 1=4\nngram 2=1\n", "", "does not say how many"),
    ],
)
def test_damaged_files_are_refused(old: str, new: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.arpa"
    path.write_text(SMALL, "utf-8")
    assert len(read_arpa(path).orders) == 2
    path.write_text(SMALL.replace(old, new, 1), "utf-8")
    with pytest.raises(UserError, match=message):
        read_arpa(path)


def test_contexts_must_be_there(tmp_path: Path) -> None:
    path = save(train_ngrams(["a b c", "a b d"], 3), tmp_path / "model.arpa")
    path.write_text(path.read_text("utf-8").replace("\ta b\t", "\ta a\t"), "utf-8")
    with pytest.raises(UserError, match="has a context that is no 2-gram"):
        read_arpa(path)

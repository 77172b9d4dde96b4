"""Trees from CoNLL-U files, and the word that each token belongs to."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.data.corpus import CorpusSettings, read_pairs
from dragoman.data.features import FEATURES
from dragoman.data.tokenizers import TOKENIZERS, Tokenizer, TokenizerSettings, train_tokenizer
from dragoman.data.trees import attach_trees, find_tree_error, format_conllu, read_conllu
from dragoman.errors import UserError
from dragoman.phrasebook.generate import generate_phrases
from dragoman.types import Pair, TokenFeature, Tree
from toy_run import write_lines
from toy_trees import heads, to_root

LETTERS = st.characters(exclude_categories=["Z", "C"], exclude_characters="▁▅")
WORDS = st.text(LETTERS, min_size=1, max_size=6).filter(lambda word: not word.startswith("#"))
TEXT = "Ein  Hündchen, 中文犬 läuft ❤."
TREE = Tree(("Ein", "Hündchen", ",", "中文", "犬", "läuft", "❤", "."), (2, 6, 2, 5, 2, 0, 6, 6))


def row(name: str, form: str, head: str) -> str:
    return "\t".join([name, form, "_", "_", "_", "_", head, "_", "_", "_"])


def write(folder: Path, *lines: str) -> Path:
    return write_lines(folder / "some.conllu", lines)


@st.composite
def sentences(draw: st.DrawFn) -> tuple[str, Tree]:
    """A text of words with spaces between some of them, and a tree over the words."""
    found = draw(heads(most=6))
    words = [draw(WORDS) for _ in found]
    return "".join(word + draw(st.sampled_from(["", " ", "  "])) for word in words), Tree(tuple(words), found)


@given(some=st.lists(sentences(), min_size=1, max_size=4), blank=st.integers(1, 3), packed=st.booleans())
def test_trees_are_read_as_they_were_written(
    some: list[tuple[str, Tree]], blank: int, packed: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = ("\n" * blank).join(format_conllu(*one) for one in some)
    path = tmp_path_factory.mktemp("trees") / ("a.conllu.gz" if packed else "a.conllu")
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    assert list(read_conllu(path)) == [tree for _, tree in some]


def test_the_format_is_conllu(tmp_path: Path) -> None:
    [tree] = read_conllu(
        write(
            tmp_path,
            "# sent_id = 1",
            row("1", "Wir", "2"),
            row("2", "gehen", "0"),
            row("2.1", "gehen", "_"),
            row("3-4", "zum", "_"),
            row("3", "zu", "5"),
            row("4", "dem", "5"),
            row("5", "See", "2"),
            row("6-7", "don't", "_"),
            row("6", "do", "7"),
            row("7", "n't", "2"),
        )
    )
    assert tree.words == ("Wir", "gehen", "zum", "", "See", "do", "n't")
    assert tree.heads == (2, 0, 5, 5, 2, 7, 2)


def test_a_multiword_token_belongs_to_the_word_nearest_the_root(tmp_path: Path) -> None:
    rows = [row("1-3", "ובבית", "_"), row("1", "ו", "3"), row("2", "ה", "3"), row("3", "בית", "4"), row("4", "x", "0")]
    [tree] = read_conllu(write(tmp_path, *rows))
    assert tree.words == ("", "", "ובבית", "x")
    ids = BYTE.encode("ובבית x")
    assert align(tree, "ובבית x", ids, BYTE).values.tolist() == [3] * 10 + [4] * 2


def align(tree: Tree, text: str, ids: list[int], tokenizer: Tokenizer) -> TokenFeature:
    feature = FEATURES["tree"]
    return feature.align_tokens(feature.make_annotation(Pair(text, "", tree)), text, ids, tokenizer)


BYTE = train_tokenizer(["a"], TokenizerSettings(kind="byte"))
BAD = {
    "columns": (["1 A 0"], r"line 1 has 1 column, but CoNLL-U has 10, separated by one tab"),
    "number": ([row("1", "A", "0"), row("b", "B", "1")], r"line 2 must begin with the number of a word.*'b'"),
    "range": ([row("1", "A", "0"), row("3-2", "B", "1")], r"line 2 must begin with the number of a word.*'3-2'"),
    "beyond": ([row("1-2", "AB", "_"), row("1", "A", "0")], r"from line 1 on has a token 1-2 but only 1 words"),
    "order": (["", row("2", "A", "0")], r"from line 2 on must have words numbered 1, 2, 3, \.\.\., not 2"),
    "no head": ([row("1", "A", "_")], r"line 1: the head, in column 7, must be .* not '_'"),
    "high head": ([row("1", "A", "0"), "", row("1", "B", "2")], r"from line 3 on has no tree: word 1 has the head 2"),
    "cycle": (["# a", row("1", "A", "2"), row("2", "B", "1")], r"from line 2 on has no tree: .* lead back to it"),
    "itself": ([row("1", "A", "1")], r"the heads of word 1 lead back to it"),
    "empty": ([], r"is empty"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_malformed_file_is_refused(name: str, tmp_path: Path) -> None:
    lines, sentence = BAD[name]
    with pytest.raises(UserError, match=rf"some\.conllu.*{sentence}"):
        list(read_conllu(write(tmp_path, *lines)))


@given(content=st.binary(max_size=80) | st.text("0123-.\t\n_#a", max_size=80).map(str.encode))
def test_any_file_is_trees_or_a_user_error(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("any") / "a.conllu"
    path.write_bytes(content)
    try:
        trees = list(read_conllu(path))
    except UserError:
        return
    assert not any(find_tree_error(tree) for tree in trees)


@given(st.lists(st.integers(0, 6), max_size=6))
def test_in_a_valid_tree_all_heads_lead_to_a_root(some: list[int]) -> None:
    def leads(word: int) -> bool:
        for _ in some:
            word = some[word - 1] if word else 0
        return word == 0

    good = all(head <= len(some) for head in some) and all(leads(word) for word in range(1, len(some) + 1))
    assert bool(find_tree_error(Tree(("x",) * len(some), tuple(some)))) != good


def test_words_and_heads_must_have_the_same_number() -> None:
    assert find_tree_error(Tree(("a", "b"), (0,))) == "there are 2 words but 1 heads"


def tokenizer_of(kind: str, byte_fallback: bool, lines: list[str]) -> Tokenizer:
    return train_tokenizer(lines, TokenizerSettings(kind=kind, size=340, byte_fallback=byte_fallback))


@pytest.fixture(scope="module")
def german() -> list[str]:
    return [phrase.source for phrase in generate_phrases("train", 300, direction="de-en")]


KINDS = pytest.mark.parametrize(
    ("kind", "fallback"), [(kind, fallback) for kind in TOKENIZERS for fallback in (True, False)]
)


@KINDS
def test_a_token_belongs_to_the_word_of_its_first_letter(kind: str, fallback: bool, german: list[str]) -> None:
    """No token crosses a space: the tokens of a word spell it, in every alphabet."""
    tokenizer = tokenizer_of(kind, fallback, german)

    @given(
        st.lists(st.text(LETTERS.filter(str.isalpha), min_size=1, max_size=5), min_size=1, max_size=5),
        st.integers(1, 3),
    )
    def law(words: list[str], spaces: int) -> None:
        text, tree = (" " * spaces).join(words), Tree(tuple(words), (0,) + (1,) * (len(words) - 1))
        for ids in (tokenizer.encode(text), tokenizer.sample(text, rate=0.5, key=(1, 2, 3))):
            aligned = align(tree, text, ids, tokenizer)
            numbers = aligned.values.tolist()
            assert numbers == sorted(numbers)
            assert aligned.annotation[1::2].tolist() == list(tree.heads)
            assert set(numbers) == set(range(1, len(words) + 1))
            if tokenizer.lossless:
                pieces = [[i for i, n in zip(ids, numbers, strict=True) if n == 1 + word] for word in range(len(words))]
                assert [tokenizer.decode(some).strip(" ") for some in pieces] == words

    law()


LETTER_WORDS = [1] * 3 + [2] * 10 + [3] + [4] * 3 + [5] + [6] * 6 + [7] * 2 + [8]  # of TEXT; a space is the next word's
EXPECTED = {
    "space": [1, 2, 4, 6, 7],  # pieces that begin in a word and end in another
    "word": [1, 2, 3, 4, 6, 7, 8],
    "char": LETTER_WORDS,
    "byte": [number for letter, number in zip(TEXT, LETTER_WORDS, strict=True) for _ in letter.encode()],
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_punctuation_and_multibyte_letters(kind: str) -> None:
    """Unknown words and letters have positions, too."""
    for lines in (["a b"], [TEXT]):
        tokenizer = tokenizer_of(kind, False, lines)
        assert align(TREE, TEXT, tokenizer.encode(TEXT), tokenizer).values.tolist() == EXPECTED[kind]


def test_the_trees_of_the_phrasebook_fit_its_sentences(german: list[str]) -> None:
    tokenizer = tokenizer_of("bpe", True, german)
    for direction in ("en-de", "de-en"):
        for pair in read_pairs(CorpusSettings(phrasebook=200), direction=direction, trees=True):
            assert pair.tree
            assert not find_tree_error(pair.tree)
            ids = tokenizer.encode(pair.source)
            words = align(pair.tree, pair.source, ids, tokenizer).values
            assert set(words) == set(range(1, len(pair.tree.words) + 1))
            assert all(to_root(word, pair.tree.heads)[-1] == 0 for word in range(1, len(pair.tree.heads) + 1))


@pytest.mark.parametrize("text", ["Ein Hund", "ein Hündchen, 中文犬 läuft ❤.", "", TEXT + "!"])
def test_a_tree_whose_words_do_not_spell_the_text_is_unusable(text: str) -> None:
    aligned = align(TREE, text, BYTE.encode(text), BYTE)
    assert not len(aligned.annotation)
    assert not aligned.values.any()
    assert len(aligned.values) == len(text.encode())


def test_whitespace_of_any_kind_is_ignored() -> None:
    text = "10\u00a0000\tDogs  "
    aligned = align(Tree(("10 000", "Dogs"), (2, 0)), text, BYTE.encode(text), BYTE)
    assert aligned.values.tolist() == [1] * 8 + [2] * 6


def test_an_empty_line_has_no_tree(tmp_path: Path) -> None:
    path = write(tmp_path, row("1", "A", "0"), "", row("1", "B", "0"))
    pairs = [Pair(source, "") for source in ("", "A", " ", "B", "")]
    assert [pair.tree and pair.tree.words for pair in attach_trees(pairs, path, "it")] == [
        None,
        ("A",),
        None,
        ("B",),
        None,
    ]


@pytest.mark.parametrize(
    ("lines", "sentence"), [(1, "2 sentences, but it has 1 lines"), (3, "2 sentences, but it has more")]
)
def test_there_must_be_as_many_trees_as_lines(lines: int, sentence: str, tmp_path: Path) -> None:
    path = write(tmp_path, row("1", "A", "0"), "", row("1", "B", "0"))
    with pytest.raises(UserError, match=re.escape(sentence)):
        list(attach_trees([Pair("A", "")] * lines, path, "it"))

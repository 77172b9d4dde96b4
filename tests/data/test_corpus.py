"""Corpus readers: files are read as they were written, and errors name the file and the line."""

from __future__ import annotations

import gzip
import json
import lzma
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from dragoman.data.corpus import CorpusSettings, DataSettings, collect_references, fingerprint_corpus, read_pairs
from dragoman.errors import UserError
from dragoman.io import OPENERS, read_lines
from dragoman.recipe import Recipe
from dragoman.training import prepare
from dragoman.types import Pair

PACK: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}
CODES = st.sampled_from(sorted(PACK))
ODD = st.sampled_from(
    ["\x85", "\u2028", "\u2029", "\f", "\v", "\x1c", "\r", "\0", "\ufeff", " ", "\t", "é", "日", "🎉"]
)
LINE = st.lists(ODD | st.characters(exclude_categories=["Cs"], exclude_characters="\n"), max_size=8).map("".join)


def test_every_compression_is_tested() -> None:
    assert set(PACK) == {"", *OPENERS}


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(
        PACK[path.suffix if path.suffix in PACK else ""](text if isinstance(text, bytes) else text.encode())
    )
    return path


def outcome(path: Path) -> tuple[list[str], str]:
    try:
        return list(read_lines(path)), ""
    except UserError as fault:
        return [], str(fault)


@given(st.lists(LINE, max_size=6), CODES, st.sampled_from(["\n", "\r\n"]), st.booleans(), st.booleans())
def test_lines_are_read_as_they_were_written(lines: list[str], code: str, end: str, mark: bool, ended: bool) -> None:
    lines = [line if end == "\r\n" else line.rstrip("\r") for line in lines]
    lines[:1] = [line.lstrip("\ufeff") for line in lines[:1]]
    if lines and not ended:
        lines[-1] += "."  # an empty last line needs its newline to be there at all
    text = "\ufeff" * mark + end.join(lines) + end * (ended and bool(lines))
    with TemporaryDirectory() as folder:
        assert list(read_lines(write(Path(folder) / f"text{code}", text))) == lines


@given(st.binary(max_size=60), CODES)
def test_any_bytes_are_lines_or_a_user_error(data: bytes, code: str) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"text{code}"
        path.write_bytes(data)
        lines, fault = outcome(path)
        assert str(path) in fault or code or "\n".join(lines).encode() in data.replace(b"\r\n", b"\n")


@given(st.sampled_from(sorted(OPENERS)), st.data())
def test_a_truncated_file_is_refused(code: str, data: st.DataObject) -> None:
    whole = PACK[code]("".join(f"line {n}\n" for n in range(200)).encode())
    cut = data.draw(st.integers(1, len(whole) - 1))
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"text{code}"
        path.write_bytes(whole[:cut])
        with pytest.raises(UserError, match="cut short or damaged after line"):
            list(read_lines(path))


@given(st.sampled_from(sorted(OPENERS)), st.data())
def test_a_damaged_file_is_refused_or_harmless(code: str, data: st.DataObject) -> None:
    lines = [f"line {n}" for n in range(50)]
    whole = bytearray(PACK[code](("\n".join(lines) + "\n").encode()))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"text{code}"
        path.write_bytes(whole)
        found, fault = outcome(path)
        assert str(path) in fault or found == lines


def test_concatenated_compressed_files_are_one_text(tmp_path: Path) -> None:
    for code in OPENERS:
        path = tmp_path / f"text{code}"
        path.write_bytes(PACK[code](b"one\ntw") + PACK[code](b"o\nthree"))
        assert list(read_lines(path)) == ["one", "two", "three"]


def test_reading_is_lazy_and_an_error_names_the_line(tmp_path: Path) -> None:
    lines = read_lines(write(tmp_path / "text", b"one\ntwo\nth\xffree\n"))
    assert [next(lines), next(lines)] == ["one", "two"]
    with pytest.raises(UserError, match=r"text line 3 is not UTF-8"):
        next(lines)


@given(st.integers(0, 5), st.integers(0, 5), CODES)
def test_unequal_files_are_refused_with_both_counts(left: int, right: int, code: str) -> None:
    with TemporaryDirectory() as folder:
        source = write(Path(folder) / f"a{code}", "x\n" * left)
        target = write(Path(folder) / f"b{code}", "y\n" * right)
        pairs = read_pairs(CorpusSettings(source=str(source), target=str(target)))
        if left == right > 0:
            assert list(pairs) == [Pair("x", "y")] * left
            return
        with pytest.raises(UserError) as fault:
            list(pairs)
        if min(left, right):
            assert f"{source} has {left} lines but {target} has {right}" in str(fault.value)
        else:
            assert str(source if left == 0 else target) in str(fault.value)
            assert "empty" in str(fault.value)


@pytest.mark.parametrize(("make", "words"), [("none", "no file"), ("folder", "is a folder"), ("empty", "is empty")])
@pytest.mark.parametrize("side", ["source", "target", "tsv", "jsonl"])
def test_unreadable_or_empty_files_are_refused_before_the_first_pair(
    tmp_path: Path, make: str, words: str, side: str
) -> None:
    good, bad = write(tmp_path / "good", "x\n"), tmp_path / "bad"
    if make == "folder":
        bad.mkdir()
    if make == "empty":
        bad.touch()
    names = {"source": str(good), "target": str(good)} if side in ("source", "target") else {}
    with pytest.raises(UserError, match=words) as fault:
        next(read_pairs(CorpusSettings.model_validate({**names, side: str(bad)})))
    assert str(bad) in str(fault.value)


FIELD = LINE.map(lambda text: text.replace("\t", " ").strip("\r\ufeff"))


@given(st.lists(st.tuples(FIELD, FIELD, FIELD), min_size=1, max_size=5), st.permutations(range(3)), CODES)
def test_tsv_columns_are_read_as_written(rows: list[tuple[str, str, str]], order: list[int], code: str) -> None:
    columns = (order[0], order[1])
    with TemporaryDirectory() as folder:
        path = write(Path(folder) / f"text.tsv{code}", "".join("\t".join(row) + "\n" for row in rows))
        found = list(read_pairs(CorpusSettings(tsv=str(path), columns=columns)))
    assert found == [Pair(row[columns[0]], row[columns[1]]) for row in rows]


def test_a_tsv_line_with_too_few_columns_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "text.tsv", "a\tb\nc\n")
    with pytest.raises(UserError, match=r"text.tsv line 2 has 1 column, .*columns 0 and 1"):
        list(read_pairs(CorpusSettings(tsv=str(path))))


@given(st.lists(st.tuples(st.text(), st.text()), min_size=1, max_size=5), CODES, st.booleans())
def test_jsonl_strings_are_read_as_written(rows: list[tuple[str, str]], code: str, plain: bool) -> None:
    text = "".join(json.dumps({"id": 1, "en": a, "de": b}, ensure_ascii=plain) + "\n" for a, b in rows)
    with TemporaryDirectory() as folder:
        path = write(Path(folder) / f"text.jsonl{code}", text)
        found = list(read_pairs(CorpusSettings(jsonl=str(path), keys=("en", "de"))))
    assert found == [Pair(a, b) for a, b in rows]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[1, 2]", "is not a JSON object"),
        ("{'source': 1}", "is not a JSON object"),
        ("", "is not a JSON object"),
        ("[" * 100_000, "is not a JSON object"),
        ('{"source": "a", "text": "b"}', r"has no key 'target' \(it has: source, text\)"),
        ('{"source": "a", "target": [["b"]]}', r"'target' must be a string, a number or a list of them, got \[\"b\"\]"),
        ('{"source": "a", "target": null}', "'target' must be a string, a number or a list of them, got null"),
        ('{"source": {"b": 1}, "target": "a"}', "'source' must be a string, a number or a list of them, got {"),
        ('{"source": "a", "target": []}', "'target' is an empty list"),
        (r'{"source": ["b", "\ud83c"], "target": "b"}', r"'source' contains \\ud83c, half of a surrogate pair"),
        (r'{"source": "\ud83c", "target": "b"}', r"'source' contains \\ud83c, half of a surrogate pair"),
    ],
)
def test_a_wrong_jsonl_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = write(tmp_path / "text.jsonl", '{"source": "a", "target": "b"}\n' + line + "\n")
    pairs = read_pairs(CorpusSettings(jsonl=str(path)))
    assert next(pairs) == Pair("a", "b")
    with pytest.raises(UserError, match=rf"text.jsonl line 2.*{words}"):
        next(pairs)


def test_lists_in_jsonl(tmp_path: Path) -> None:
    """A list of sources is joined to one text; a list of targets has several references."""
    rows = [
        {"source": ["One. ", "Two\nlines.\n", 3], "target": ["a", "b b"]},
        {"source": "One.", "target": "c"},
        {"source": [], "target": ["d"]},
    ]
    path = write(tmp_path / "text.jsonl", "\n".join(map(json.dumps, rows)))
    pairs = list(read_pairs(CorpusSettings(jsonl=str(path), tag="de")))
    assert pairs == [
        Pair("One. Two lines. 3", "a", tag="de", alternatives=("b b",)),
        Pair("One.", "c", tag="de"),
        Pair("", "d", tag="de"),
    ]
    assert collect_references(pairs) == [["a", "c", "d"], ["b b", "c", "d"]]
    assert collect_references(pairs[1:]) == [["c", "d"]]
    assert collect_references([]) == [[]]
    short = read_pairs(CorpusSettings(jsonl=str(path), source_words=2))
    assert next((pair.source, pair.alternatives) for pair in short) == ("One. Two", ("b b",))
    turned = read_pairs(CorpusSettings(jsonl=str(path), reverse=True))
    assert next(turned) == Pair("a", "One. Two lines. 3")
    with pytest.raises(UserError, match=r"no line with target: x .*; its lines have target: a \| b b"):
        list(read_pairs(CorpusSettings(jsonl=str(path), where={"target": "x"})))


def test_a_fingerprint_depends_on_files_and_settings(tmp_path: Path) -> None:
    path = write(tmp_path / "text.tsv", "a\tb\n")
    corpus = CorpusSettings(tsv=str(path))
    first = fingerprint_corpus(corpus)
    assert first == fingerprint_corpus(corpus) == fingerprint_corpus(corpus.model_copy(update={"weight": 2.0}))
    assert first == fingerprint_corpus(CorpusSettings(tsv=str(tmp_path / "." / "text.tsv")))
    prints = [
        first,
        fingerprint_corpus(CorpusSettings(tsv=str(path), columns=(1, 0))),
        fingerprint_corpus(CorpusSettings(tsv=str(path), source_words=3)),
        fingerprint_corpus(CorpusSettings(tsv=str(path), where={"0": "a"})),
        fingerprint_corpus(CorpusSettings(jsonl=str(path))),
    ]
    prints.append(fingerprint_corpus(CorpusSettings(source=str(path), target=str(path))))
    os.utime(path, ns=(1, 1))
    prints.append(fingerprint_corpus(corpus))
    write(path, "a\tbc\n")
    os.utime(path, ns=(1, 1))
    prints.append(fingerprint_corpus(corpus))
    phrasebook = CorpusSettings(phrasebook=10)
    prints += [
        fingerprint_corpus(phrasebook),
        fingerprint_corpus(phrasebook, direction="de-en"),
        fingerprint_corpus(phrasebook, split="dev"),
    ]
    prints += [
        fingerprint_corpus(CorpusSettings(phrasebook=11)),
        fingerprint_corpus(CorpusSettings(phrasebook=10, seed=2)),
    ]
    assert len(set(prints)) == len(prints)
    assert fingerprint_corpus(CorpusSettings(phrasebook=10, split="dev")) == fingerprint_corpus(phrasebook, split="dev")
    path.unlink()
    with pytest.raises(UserError, match=r"text\.tsv"):
        fingerprint_corpus(corpus)


ROWS = ["train\tone\tuno", "test\ttwo\tdos", "train\tthree\ttres"]
RECORDS = [{"fold": 1, "text": "one\ntwo", "label": True}, {"fold": 2, "text": "three", "label": 0.5}]


def test_where_keeps_the_rows_with_a_value(tmp_path: Path) -> None:
    tsv = str(write(tmp_path / "a.tsv", "\n".join(ROWS) + "\n"))
    kept = read_pairs(CorpusSettings(tsv=tsv, columns=(1, 2), where={0: "train"}))  # type: ignore[dict-item]
    assert list(kept) == [Pair("one", "uno"), Pair("three", "tres")]
    both = CorpusSettings(tsv=tsv, columns=(2, 0), where={"0": "train", "1": "three"})
    assert list(read_pairs(both)) == [Pair("tres", "train")]
    jsonl = str(write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, RECORDS))))
    kept = read_pairs(CorpusSettings(jsonl=jsonl, keys=("text", "label"), where={"fold": 1}))  # type: ignore[dict-item]
    assert list(kept) == [Pair("one\ntwo", "true")]  # line breaks stay, and labels become text


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ({"split": "train"}, r"where names the column 'split', but columns are numbered, from 0"),
        ({"3": "train"}, r"a\.tsv line 1 has 3 columns, but columns 1 and 2 and 3 .*are wanted"),
        ({"0": "dev"}, r"a\.tsv has no line with 0: dev .*; its lines have 0: train; 0: test"),
    ],
)
def test_where_without_a_match_is_an_error(tmp_path: Path, where: dict[str, str], words: str) -> None:
    path = write(tmp_path / "a.tsv", "\n".join(ROWS))
    with pytest.raises(UserError, match=words):
        list(read_pairs(CorpusSettings(tsv=str(path), columns=(1, 2), where=where)))


def test_a_jsonl_where_is_checked_too(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, RECORDS)))
    for where, words in (({"fould": "1"}, "no key 'fould'"), ({"fold": "3"}, "no line with fold: 3.*fold: 1; fold: 2")):
        with pytest.raises(UserError, match=words):
            list(read_pairs(CorpusSettings(jsonl=str(path), keys=("text", "label"), where=where)))


@given(LINE, st.integers(1, 4))
def test_source_words_truncates_sources(text: str, count: int) -> None:
    with TemporaryDirectory() as folder:
        path = write(Path(folder) / "a.jsonl", json.dumps({"source": text, "target": text}))
        [pair] = read_pairs(CorpusSettings(jsonl=str(path), source_words=count))
    assert pair.target == text
    assert text.startswith(pair.source)
    assert pair.source.split() == text.split()[:count]


DIALOGUES = """1 hello\tgood day
2 a table please\tfor how many
3 for two\tapi_call two
4 the_lamb phone 123
5 <SILENCE>\twhat about the_lamb

1 bye\t see you
"""


def test_the_source_of_an_answer_is_the_dialogue_so_far(tmp_path: Path) -> None:
    path = write(tmp_path / "d.txt", DIALOGUES)
    pairs = list(read_pairs(CorpusSettings(dialogue=str(path))))
    first = "hello | good day | a table please | for how many | for two"
    assert pairs == [
        Pair("hello", "good day"),
        Pair("hello | good day | a table please", "for how many"),
        Pair(first, "api_call two"),
        Pair(first + " | api_call two | the_lamb phone 123 | <SILENCE>", "what about the_lamb"),
        Pair("bye", "see you"),
    ]


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_dialogue_begins_where_the_numbers_restart(tmp_path: Path, first: int) -> None:
    turns = [f"{first} hello\thi", f"{first + 1} how\tfine", f"{first} bye\tsee you", f"{first} ho\tha"]
    path = write(tmp_path / "d.txt", "\n".join(turns))
    sources = [pair.source for pair in read_pairs(CorpusSettings(dialogue=str(path)))]
    assert sources == ["hello", "hello | hi | how", "bye", "ho"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no line with an answer"),
        ("1 hello\n2 there\n", "no line with an answer; an answer follows"),
        ("9" * 5000 + " hello\tyes\n", "must begin with the number of the turn"),
        ("1 hello\tyes\nhello\tno\n", r"d\.txt line 2 must begin with the number of the turn.*not 'hello\\tno'"),
    ],
)
def test_a_malformed_dialogue_is_an_error(tmp_path: Path, text: str, words: str) -> None:
    path = write(tmp_path / "d.txt", text)
    with pytest.raises(UserError, match=words):
        list(read_pairs(CorpusSettings(dialogue=str(path))))


@given(lines=st.lists(st.text("ab \u2028é", max_size=6), min_size=1, max_size=20), cut=st.floats(0.05, 0.95))
def test_adjacent_parts_of_a_text_share_no_line_and_skip_none(lines: list[str], cut: float) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "text"
        path.write_bytes("".join(line + "\n" for line in lines).encode())
        found = []
        for part in ((0.0, cut), (cut, 1.0)):
            with suppress(UserError):  # a part may be smaller than any line
                found += [pair.target for pair in read_pairs(CorpusSettings(text=str(path), part=part))]
            so_far = sum(len(line) + 1 for line in found)
            assert part[0] or abs(so_far - cut * sum(len(line) + 1 for line in lines)) <= max(map(len, lines)) + 1
        assert found == lines
        assert [pair.target for pair in read_pairs(CorpusSettings(text=str(path)))] == lines
        assert all(pair.source == "" for pair in read_pairs(CorpusSettings(text=str(path))))


def test_only_the_first_lines_are_checked_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A corpus may be huge, so neither the first match of `where` nor the beginning of a part is searched for."""
    monkeypatch.setattr(prepare, "FIRST_LINES", 3)
    path = tmp_path / "a.tsv"
    path.write_bytes(b"x\ta\n" * 4 + b"\xff\n" + b"y\ta\n")
    tsv, text = CorpusSettings(tsv=str(path), where={"0": "y"}), CorpusSettings(text=str(path), part=(0.5, 1.0))
    for corpus in (tsv, text):
        prepare.check_files(Recipe(data=DataSettings(train=(corpus,))))
    path.write_bytes(b"\xff\n" + b"y\ta\n" * 9)
    for corpus in (tsv, text):
        with pytest.raises(UserError, match="line 1 is not UTF-8"):
            prepare.check_files(Recipe(data=DataSettings(train=(corpus,))))

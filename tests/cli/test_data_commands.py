"""Tests of `dragoman data`: descriptions of corpora, early checks, progress, and no import of PyTorch."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from dragoman.data.cleaning import CleanSettings
from dragoman.data.corpus import CorpusSettings, read_pairs
from dragoman.data.overlap import COUNTED_WORD, OverlapCounter
from dragoman.data.preparation import parse_corpora
from dragoman.errors import UserError
from dragoman.io import OPENERS
from dragoman.progress import ITEMS_PER_UPDATE, ProgressBar, set_verbosity
from dragoman.types import Pair
from toy_run import Call, assert_user_error, environment, files, pairs, write_lines, write_recipe

PAIRS = [(pair.source, pair.target) for pair in pairs(12)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the same pairs, or halves of them, in every format, and make the folder the working directory."""
    write_lines(tmp_path / "swapped.tsv", [f"{i}\t{t}\t{s}" for i, (s, t) in enumerate(PAIRS)])
    for name, some in (("a", PAIRS[:5]), ("b", PAIRS[5:])):
        write_lines(tmp_path / f"{name}.src", [s for s, _ in some])
        write_lines(tmp_path / f"{name}.trg", [t for _, t in some])
        write_lines(tmp_path / f"{name}.tsv", [f"{s}\t{t}" for s, t in some])
    rows = [{"in": s.split(), "out": [t, "x"], "fold": i % 2} for i, (s, t) in enumerate(PAIRS)]
    write_lines(tmp_path / "rows.jsonl", map(json.dumps, rows))
    packed = gzip.compress("".join(f"{s}\t{t}\n" for s, t in PAIRS).encode())
    (tmp_path / "pairs.tsv.gz").write_bytes(packed)
    halves = [{"source": f"{name}.src", "target": f"{name}.trg"} for name in "ab"]
    write_recipe(tmp_path / "recipe.yaml", data={"train": halves, "dev": {"tsv": "a.tsv"}})
    monkeypatch.chdir(tmp_path)
    return tmp_path


WAYS = {
    "columns": ["--tsv", "swapped.tsv", "--columns", "2,1"],
    "keys": ["--jsonl", "rows.jsonl", "--keys", "in, out"],
    "compressed": ["--tsv", "pairs.tsv.gz"],
    "several tables": ["--tsv", "a.tsv", "--tsv", "b.tsv"],
    "several files": ["--source", "a.src", "--source", "b.src", "--target", "a.trg", "--target", "b.trg"],
    "as in a recipe": ["--corpus", "{tsv: swapped.tsv, columns: [2, 1]}"],
    "a list": ["--corpus", "[{tsv: a.tsv}, {source: b.src, target: b.trg}]"],
    "turned round": ["--corpus", "{tsv: swapped.tsv, columns: [1, 2], reverse: true}"],
    "two kinds": ["--tsv", "a.tsv", "--corpus", "{tsv: b.tsv}"],
    "of a recipe": ["--corpus", "recipe.yaml:train"],
    "train by default": ["--corpus", "recipe.yaml"],
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_corpus_option_is_as_in_a_recipe(folder: Path, call: Call, way: list[str]) -> None:
    answer = call("data", "clean", *way, "--out", "out", "--json")
    assert (answer.code, json.loads(answer.out)) == (0, {"kept": len(PAIRS)})
    assert (folder / "out.source").read_text().splitlines() == [source for source, _ in PAIRS]
    assert (folder / "out.target").read_text().splitlines() == [target for _, target in PAIRS]
    assert json.loads(call("data", "stats", *way, "--json").out)["pairs"] == len(PAIRS)
    cut = call("data", "split", *way, "--out", "part", "--dev", "2", "--test", "3", "--json")
    assert json.loads(cut.out) == {"train": len(PAIRS) - 5, "dev": 2, "test": 3}


def test_where_selects_rows_and_further_targets_are_counted(folder: Path, call: Call) -> None:
    way = ("--corpus", "{jsonl: rows.jsonl, keys: [in, out], where: {fold: 1}}", "--out", "out")
    answer = call("data", "clean", *way)
    assert "6 pairs have several targets; the first of each is written" in answer.err
    assert (folder / "out.target").read_text().splitlines() == [target for _, target in PAIRS[1::2]]


def test_phrasebook_of_a_recipe_has_its_direction(folder: Path) -> None:
    data: dict[str, object] = {"train": {"phrasebook": 5}, "test": {"phrasebook": 4}, "dev": [], "direction": "de-en"}
    write_recipe(folder / "book.yaml", data=data)
    [corpus] = parse_corpora("book.yaml:test", "--corpus").corpora
    wanted = list(read_pairs(CorpusSettings(phrasebook=4), split="test", direction="de-en"))
    assert list(read_pairs(corpus)) == wanted


@pytest.mark.usefixtures("folder")
def test_statistics_of_plain_text(call: Call) -> None:
    found = json.loads(call("data", "stats", "--corpus", "{text: a.src}", "--json").out)
    assert (found["pairs"], found["target"]["total_words"]) == (5, sum(len(s.split()) for s, _ in PAIRS[:5]))
    assert not any("empty sources" in note or "belong together" in note for note in found["notes"])
    assert "source words" not in call("data", "stats", "--corpus", "{text: a.src}").out
    for command in ("clean", "split"):
        assert_user_error(call("data", command, "--corpus", "{text: a.src}", "--out", "x"), command, "a.src", "pairs")


REFUSED = {
    "nothing": ([], ("--source", "--tsv", "--corpus")),
    "a source alone": (["--source", "a.src"], ("1 --source", "0 --target")),
    "columns of nothing": (["--source", "a.src", "--target", "a.trg", "--columns", "1,0"], ("--columns", "--tsv")),
    "keys of nothing": (["--tsv", "a.tsv", "--keys", "in,out"], ("--keys", "--jsonl")),
    "one column": (["--tsv", "a.tsv", "--columns", "1"], ("--columns", "'1'", "1,0")),
    "no number": (["--tsv", "a.tsv", "--columns", "a,b"], ("--columns", "'a,b'")),
    "below zero": (["--tsv", "a.tsv", "--columns", "-1,0"], ("--columns", "'-1,0'")),
    "one key": (["--jsonl", "rows.jsonl", "--keys", "in,"], ("--keys", "'in,'")),
    "a missing column": (["--tsv", "a.tsv", "--columns", "0,7"], ("a.tsv line 1", "columns 0 and 7")),
    "a file name": (["--corpus", "a.tsv"], ("--corpus", "'{tsv: pairs.tsv", "'a.tsv'")),
    "no setting": (["--corpus", "{tvs: a.tsv}"], ("'--corpus.tvs'", "did you mean 'tsv'")),
    "two corpora in one": (["--corpus", "{tsv: a.tsv, jsonl: rows.jsonl}"], ("--corpus", "one of")),
    "broken": (["--corpus", "{tsv: a.tsv"], ("--corpus", "YAML")),
    "no part": (["--corpus", "recipe.yaml:tset"], ("'tset'", "'test'")),
    "an empty part": (["--corpus", "recipe.yaml:test"], ("recipe.yaml", "data.test")),
    "no recipe": (["--corpus", "none.yaml:test"], ("none.yaml",)),
    "missing": (["--corpus", "{tsv: none.tsv}"], ("none.tsv",)),
}


@pytest.mark.parametrize("command", ["stats", "clean", "split"])
@pytest.mark.parametrize(("way", "culprits"), REFUSED.values(), ids=REFUSED)
def test_invalid_corpus_description_is_refused(
    folder: Path, call: Call, command: str, way: list[str], culprits: tuple[str, ...]
) -> None:
    before = files(folder)
    assert_user_error(call("data", command, *way, *(() if command == "stats" else ("--out", "out"))), *culprits)
    assert files(folder) == before


def test_overlap_of_a_test_set_with_training(folder: Path, call: Call) -> None:
    write_lines(folder / "train.tsv", ["the dog.\tder Hund.", "a cat\teine Katze", "a cat\tKatze"])
    write_lines(folder / "test.tsv", ["the dog.\tder Hund.", "a cat\tein Kater", "the yak\tder Yak"])
    way = ("data", "stats", "--tsv", "test.tsv", "--against", "{tsv: train.tsv}")
    found = json.loads(call(*way, "--json").out)
    assert found["against"] == {
        "name": "train.tsv",
        "other_pairs": 3,
        "shared_sources": 2,
        "shared_pairs": 1,
        "source": {"words": 6, "unknown": 1, "types": 5, "unknown_types": 1, "examples": ["yak"], "shift": None},
        "target": {
            **{"words": 6, "unknown": 3, "types": 5, "unknown_types": 3},
            **{"examples": ["ein", "Kater", "Yak"], "shift": None},
        },
    }
    assert any("2 of 3 sources are also in train.tsv" in note for note in found["notes"])
    output = call(*way).out
    assert "2 sources, 1 pairs" in output
    assert "1 of 6 (16.67%); different ones: 1 of 5 (20.00%), such as yak" in output
    alone = json.loads(call("data", "stats", "--tsv", "test.tsv", "--json").out)
    assert alone["against"] is None
    split = call("data", "split", "--corpus", "recipe.yaml", "--out", "part", "--dev", "2", "--test", "3")
    assert split.code == 0
    parts = [f"{{source: part.{name}.source, target: part.{name}.target}}" for name in ("test", "train")]
    after = json.loads(call("data", "stats", "--corpus", parts[0], "--against", parts[1], "--json").out)
    assert (after["against"]["shared_sources"], after["against"]["other_pairs"]) == (0, len(PAIRS) - 5)
    assert_user_error(call("data", "stats", "--tsv", "test.tsv", "--against", "train.tsv"), "--against", "'train.tsv'")


def test_perplexities_of_a_test_set_and_of_training_text_are_compared(call: Call) -> None:
    way = ("data", "stats", "--corpus", "{phrasebook: 200, split: test}", "--against", "{phrasebook: 2000}")
    found = json.loads(call(*way, "--json").out)["against"]
    for side in ("source", "target"):
        shift = found[side]["shift"]
        assert shift["ratio"] == pytest.approx(shift["perplexity"] / shift["held_out_perplexity"])
        assert 0.8 < shift["ratio"] < 1.25
    assert f"{found['source']['shift']['ratio']:.2f} times that of unseen lines of the other corpus" in call(*way).out


def test_statistics_against_a_corpus_do_not_need_the_extra(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    for name in [name for name in sys.modules if name.startswith("dragoman.smt.")]:
        monkeypatch.delitem(sys.modules, name)
    answer = call("data", "stats", "--corpus", "{phrasebook: 20, split: test}", "--against", "{phrasebook: 200}")
    assert answer.code == 0
    assert "perplexities are left out" in answer.err
    assert "dragoman[smt]" in answer.err
    assert "source words not shared" in answer.out


WORDS = st.lists(st.sampled_from(["a", "b", "日本", "c-d", "é.", "!"]), max_size=4).map(" ".join)
SOME = st.lists(st.builds(Pair, WORDS, WORDS), max_size=8)


@given(SOME, SOME)
def test_overlap_equals_that_of_lists(here: list[Pair], there: list[Pair]) -> None:
    counter = OverlapCounter(there, "there")
    for pair in here:
        counter.count(pair)
    found = counter.compute_overlap()
    assert found.other_pairs == len(there)
    assert found.shared_pairs == sum(pair in there for pair in here)
    known = {pair.source or pair.target for pair in there}
    assert found.shared_sources == sum((pair.source or pair.target) in known for pair in here)
    vocabulary = {word for pair in there for word in COUNTED_WORD.findall(pair.target)}
    words = [word for pair in here for word in COUNTED_WORD.findall(pair.target)]
    assert (found.target.words, found.target.unknown) == (len(words), sum(word not in vocabulary for word in words))
    assert not set(found.target.examples) & vocabulary


def test_pipe_is_read_once(folder: Path, call: Call) -> None:
    os.mkfifo(folder / "pipe")
    assert_user_error(call("data", "split", "--tsv", "pipe", "--out", "out"), "'pipe'", "not a plain file", "twice")


def test_help_lists_the_settings_of_clean(call: Call) -> None:
    output = " ".join(call("data", "clean", "--help").out.split())
    for name, field in CleanSettings.model_fields.items():
        assert field.description
        assert f"{name}={json.dumps(field.default)} {field.description}" in output


@pytest.mark.parametrize(
    ("setting", "culprits"), [("max_ration=3", ("'max_ration'", "'max_ratio'")), ("a.tsv", ("'a.tsv'", "--tsv"))]
)
@pytest.mark.usefixtures("folder")
def test_settings_are_checked_before_the_corpus_is_read(call: Call, setting: str, culprits: tuple[str, ...]) -> None:
    assert_user_error(call("data", "clean", "--tsv", "none.tsv", "--out", "out", setting), *culprits)


@pytest.mark.parametrize(
    "arguments",
    [
        ["stats", "--tsv", "a.tsv"],
        ["clean", "--tsv", "a.tsv", "--out", "out"],
        ["clean", "--tsv", "a.tsv", "--out", "out", "max_ration=3"],
        ["clean", "--help"],
        ["split", "--corpus", "recipe.yaml", "--out", "out", "--dev", "1", "--test", "1"],
        ["phrasebook", "--out", "out", "--count", "3"],
    ],
    ids=" ".join,
)
@pytest.mark.usefixtures("folder")
def test_pytorch_is_not_imported(arguments: list[str]) -> None:
    code = (
        f"import sys; sys.argv = ['dragoman', 'data', *{arguments!r}]\n"
        "from dragoman.cli import main as cli\n"
        "try:\n    cli.main()\nexcept SystemExit:\n    pass\n"
        "sys.stderr.write('\\nheavy: ' + ' '.join(sorted({'torch', 'sentencepiece', 'sacrebleu'} & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True)
    assert done.stderr.endswith("\nheavy: "), done.stderr


# progress


class Clock:
    """A clock that tests advance."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, terminal: bool) -> None:
        self.now = 100.0
        monkeypatch.setattr("dragoman.progress.time.monotonic", lambda: self.now)
        monkeypatch.setattr("sys.stderr.isatty", lambda: terminal, raising=False)


@pytest.mark.parametrize("terminal", [True, False])
def test_short_operation_shows_no_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool
) -> None:
    clock = Clock(monkeypatch, terminal=terminal)
    for _ in ProgressBar("reading", total=5000).iterate(range(5000)):
        clock.now += 0.0001
    assert capsys.readouterr().err == ""


def test_progress_bar_shows_the_time_left(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock(monkeypatch, terminal=True)
    for _ in ProgressBar("reading", total=8 * ITEMS_PER_UPDATE).iterate(range(8 * ITEMS_PER_UPDATE)):
        clock.now += 2 / ITEMS_PER_UPDATE
    first, *_, last = capsys.readouterr().err.split("\r")[1:]
    assert (
        first
        == f"reading ━━━{'─' * 21} 12%, {ITEMS_PER_UPDATE} of 2,048 pairs, {ITEMS_PER_UPDATE // 2}/s, 14 s left\x1b[K"
    )
    assert last == "\x1b[K"  # it is gone in the end


def test_progress_lines_without_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock(monkeypatch, terminal=False)
    for _ in ProgressBar("reading", total=8 * ITEMS_PER_UPDATE).iterate(range(8 * ITEMS_PER_UPDATE)):
        clock.now += 6 / ITEMS_PER_UPDATE
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "reading: 25%, 512 of 2,048 pairs, 43/s, 36 s left"
    assert len(lines) == 4
    set_verbosity(1)
    try:
        for _ in ProgressBar("reading").iterate(range(8 * ITEMS_PER_UPDATE)):
            clock.now += 6 / ITEMS_PER_UPDATE
    finally:
        set_verbosity(2)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("suffix", ["", *OPENERS])
def test_progress_is_computed_from_bytes_read(tmp_path: Path, suffix: str) -> None:
    packers = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.ZstdCompressor().compress}
    text = "".join(f"source {i * i}\ttarget {i * 7919}\n" for i in range(60_000)).encode()
    path = tmp_path / f"c.tsv{suffix}"
    path.write_bytes(packers.get(suffix, bytes)(text))
    progress = ProgressBar("reading", files=[str(path)], passes=2)
    shares = []
    for number, _ in enumerate(progress.iterate(read_pairs(CorpusSettings(tsv=str(path)), watch=progress.watch))):
        if number % 1000 == 0:
            shares.append(progress.fraction())
    assert shares == sorted(shares)
    assert shares[0] < 0.15 < shares[30] < 0.4
    assert progress.fraction() == 0.5  # of two passes
    assert ProgressBar("reading", files=[str(tmp_path / "none")]).fraction() == 0


def test_empty_list_is_no_corpus() -> None:
    with pytest.raises(UserError, match="--against takes a corpus"):
        parse_corpora("[]", "--against")

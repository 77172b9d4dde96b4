"""Shards: killed and started again, by one process or several, the answers are those of a work that never stopped."""

from __future__ import annotations

import gzip
import lzma
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.augmentation import jobs as room
from dragoman.augmentation.backtranslation import find_faults
from dragoman.augmentation.jobs import Record, ShardedJob, count_local_items, write_sharded
from dragoman.data.corpus import CorpusSettings, read_pairs
from dragoman.process_group import ProcessGroup
from dragoman.progress import ProgressBar, Report
from fork_server import fast_python
from toy_run import (
    SMALL,
    Call,
    Toy,
    assert_user_error,
    fast_environment,
    files,
    find_worker,
    make_sentences,
    torchrun,
    train_quietly,
    wait_until,
    write_corpus,
    write_lines,
    write_recipe,
)

HOSTILE = [
    "",
    "   ",
    "\t",
    "ba.",
    "x" * 10_000,
    "ba\u2028del.",
    "ba\u0085del!",
    "\rba.",
    "ba \r del.",
    "\x0c",
    "<s> ▁ </s>",
]
# Texts of a model that never ends one are cut short; on a CPU, where scores do not depend on the batch.
SHORT = ("--engine", "torch", "--device", "cpu", "search.max_ratio=0.2", "search.max_extra=3")
SCRIPT = Path(__file__).parents[1] / "support" / "small_shards.py"


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "SHARD_SIZE", 4)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has hardly learnt: what it says is odd, and always the same."""
    folder = tmp_path_factory.mktemp("small")
    write_corpus(folder)
    recipe = write_recipe(folder / "recipe.yaml", **SMALL)
    return train_quietly(recipe, folder / "run", "train.steps=2", "train.validate_lines=0")


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "lines", [*make_sentences(39, longest=3), *HOSTILE])


class Killed(BaseException):
    """What no code catches."""


class Answers:
    """Answers, which end with a death after some batches; all that was asked is remembered."""

    def __init__(self, until: int = 1 << 30) -> None:
        self.until, self.asked, self.shards = until, list[Any](), set[int]()

    def __call__(self, before: int, some: Sequence[Any]) -> list[Record]:
        if not self.until:
            raise Killed
        self.until -= 1
        self.asked += some
        self.shards.add(before // room.SHARD_SIZE)
        return [{"said": f"{before + place} {item!r}"} for place, item in enumerate(some)]


def pace() -> ProgressBar:
    return Report(quiet=True).progress("translating")


ITEMS = st.lists(st.text(max_size=3), max_size=30)


@given(
    ITEMS, st.integers(1, 4), st.integers(1, 5), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=4)
)
def test_any_processes_killed_anywhere_give_the_answers_of_one(
    items: list[str], world: int, batch: int, deaths: list[tuple[int, int]]
) -> None:
    """Processes come in any order and die at any batch; then all run once more. What was kept is not asked again."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        patch.setattr(room, "SHARD_SIZE", 4)
        for rank, until in deaths:
            answers = Answers(until)
            shards = ShardedJob(folder, lambda: iter(items), answers, batch)
            with suppress(Killed):
                shards.run(ProcessGroup(rank % world, world), pace())
        kept = sum(len(room.read_shard(file) or []) for file in folder.glob("*/answers.jsonl"))
        asked = 0
        for rank in range(world):
            shards = ShardedJob(folder, lambda: iter(items), answers := Answers(), batch)
            count = shards.run(ProcessGroup(rank, world), pace())
            asked += len(answers.asked)
            assert all(number % world == rank for number in answers.shards)
        found = list(shards.read_records(count))
        assert found == [{"said": f"{place} {item!r}"} for place, item in enumerate(items)]
        assert asked == len(items) - kept
        assert not list(folder.glob(".*.tmp"))


@given(st.integers(0, 100), st.integers(1, 5))
def test_shares_are_of_a_whole(total: int, world: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "SHARD_SIZE", 4)
        assert sum(count_local_items(total, ProcessGroup(rank, world)) for rank in range(world)) == total


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\n", b"[1]\n" * 4, "another", "a letter"])
def test_a_damaged_shard_is_made_again(tmp_path: Path, damage: bytes | str) -> None:
    def make(answers: Answers) -> list[Record]:
        shards = ShardedJob(tmp_path / "shards", lambda: iter("abcdefghij"), answers, 2)
        return list(shards.read_records(shards.run(ProcessGroup(), pace())))

    whole = make(Answers())
    first, second = (tmp_path / "shards" / name / "answers.jsonl" for name in ("000000", "000001"))
    others = {"another": first.read_bytes(), "a letter": second.read_bytes().replace(b"'e'", b"'x'")}
    second.write_bytes(damage if isinstance(damage, bytes) else others[damage])
    again = Answers()
    assert make(again) == whole
    assert again.asked == list("efgh")


def written(folder: Path, answers: Answers, **about: str) -> Path:
    def said(records: Iterator[Record]) -> Iterator[str]:
        return (record["said"] + "\n" for record in records)

    source, out = write_lines(folder / "in", "abcdefghij"), folder / "out"
    way: dict[str, Any] = {"batch": 3, "group": ProcessGroup(), "report": Report(quiet=True)}
    write_sharded(source, out, answers, said, depends_on=about, **way)
    return out


@pytest.mark.usefixtures("few")
def test_the_shards_of_another_work_are_in_the_way(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        written(tmp_path, Answers(3), model="a", beam="4")
    assert files(tmp_path) == ["in", "out.shards"]
    for name, about in {"model": {"model": "b", "beam": "4"}, "beam": {"model": "a"}}.items():
        with pytest.raises(ValueError, match=f"another {name}.*remove the folder"):
            written(tmp_path, Answers(), **about)
    rest = Answers()
    assert written(tmp_path, rest, model="a", beam="4").read_text().count("\n") == 10
    assert rest.asked == list("efghij")
    assert files(tmp_path) == ["in", "out"]


# dragoman translate --resume


def command(*arguments: object, processes: int = 1) -> list[str]:
    """A command with small shards, or torchrun with so many processes of it."""
    start = torchrun("--standalone", f"--nproc-per-node={processes}") if processes > 1 else [fast_python()]
    return [*start, str(SCRIPT), *map(str, arguments)]


@pytest.mark.usefixtures("few")
def test_lines_in_are_lines_out(run: Path, lines: Path, tmp_path: Path, call: Call) -> None:
    """Whatever they hold, and as they are without shards; what was odd is counted alike."""
    plain = call("translate", run, *SHORT, "--input", lines, "--output", tmp_path / "plain")
    (tmp_path / "lines.gz").write_bytes(gzip.compress(lines.read_bytes()))
    kept = call("translate", run, *SHORT, "--input", tmp_path / "lines.gz", "--output", tmp_path / "out", "--resume")
    assert (plain.code, kept.code) == (0, 0), kept.err
    assert (tmp_path / "out").read_bytes() == (tmp_path / "plain").read_bytes()
    assert (tmp_path / "out").read_bytes().count(b"\n") == lines.read_bytes().count(b"\n")
    assert kept.err.splitlines()[-1] == plain.err.splitlines()[-1]
    assert not (tmp_path / "out.shards").exists()


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("more", [("--nbest", 2), ("--json",)], ids=["nbest", "json"])
def test_other_outputs_are_the_same_too(run: Path, tmp_path: Path, call: Call, more: tuple[object, ...]) -> None:
    lines = write_lines(tmp_path / "lines", [*make_sentences(9, longest=2), "", "ba\u2028del."])
    for name, way in {"plain": (), "out": ("--resume", "--batch", 3)}.items():
        answer = call("translate", run, *SHORT, *more, "--input", lines, "--output", tmp_path / name, *way)
        assert answer.code == 0, answer.err
    assert (tmp_path / "out").read_bytes() == (tmp_path / "plain").read_bytes()


def test_killed_and_started_again_alone_and_in_company(run: Path, tmp_path: Path, call: Call) -> None:
    """Killed when it had made some shards; then one of two processes is killed, and both end; then they are let be. The
    bytes are those of a file that was done at one go, and no shard was made twice."""
    lines = write_lines(
        tmp_path / "lines", [*make_sentences(39, longest=3), *(line for line in HOSTILE if len(line) < 100)]
    )
    way = ("translate", run, *SHORT, "--input", lines)
    assert call(*way, "--output", tmp_path / "whole").code == 0
    out, shards = tmp_path / "out", tmp_path / "out.shards"

    def made(count: int) -> Callable[[], bool]:
        return lambda: len(list(shards.glob("*/answers.jsonl"))) >= count

    again = (*way, "--output", out, "--resume", "--batch", "1")
    with subprocess.Popen(command(*again), stderr=subprocess.PIPE, env=fast_environment()) as one:
        wait_until(made(2), one)
        one.kill()
        one.communicate()  # waits until nobody holds its streams
    before = {file: file.stat().st_mtime_ns for file in shards.glob("*/answers.jsonl")}
    together: dict[str, Any] = {"cwd": tmp_path, "env": fast_environment()}
    with subprocess.Popen(command(*again, processes=2), stderr=subprocess.PIPE, **together) as two:
        wait_until(made(len(before) + 2), two)
        os.kill(find_worker(tmp_path, rank=1), signal.SIGKILL)
        two.communicate()
        assert two.returncode != 0
    assert not out.exists()
    done = subprocess.run(command(*again, processes=2), capture_output=True, check=False, **together)
    assert done.returncode == 0, done.stderr.decode()
    assert out.read_bytes() == (tmp_path / "whole").read_bytes()
    assert not shards.exists()


@pytest.mark.usefixtures("few")
def test_what_does_not_go_together_is_refused(run: Path, lines: Path, tmp_path: Path, call: Call) -> None:
    out = tmp_path / "out"
    both = ("--input", lines, "--output", out, "--resume", *SHORT)
    assert_user_error(call("translate", run, "--resume", "--input", lines), "--output F")
    assert_user_error(call("translate", run, "--resume", "--output", out), "--input F")
    assert_user_error(call("translate", run, *both, "--stream"), "--stream")
    assert_user_error(call("translate", run, *both, "--conllu", lines), "--conllu")
    assert_user_error(call("translate", run, "--input", lines, "--output", tmp_path, "--resume"), "it is a folder")
    assert_user_error(call("translate", run, *SHORT, "--input", "nowhere", "--output", out, "--resume"), "'nowhere'")
    assert not (tmp_path / "out.shards").exists()
    (tmp_path / "out.shards").mkdir()
    (tmp_path / "out.shards" / "thesis").write_text("precious")
    assert_user_error(call("translate", run, *both), "out.shards", "'thesis'")
    (tmp_path / "out.shards" / "thesis").unlink()
    assert call("translate", run, *both, "--beam", "2").code == 0
    (tmp_path / "bad").write_bytes(b"ba.\n" * 5 + b"\xff\n")
    stopped = call("translate", run, "--input", tmp_path / "bad", "--output", out, "--resume", *SHORT)
    assert_user_error(stopped, "line 6 is not UTF-8", working=True)
    assert (tmp_path / "out.shards" / "000000").exists()
    assert_user_error(call("translate", run, *both), "out.shards", "another input")
    other = ("--input", tmp_path / "bad", "--output", out, "--resume", *SHORT)
    assert_user_error(call("translate", run, *other, "--beam", "2"), "another search.beam")
    with room.open_shards_beside(tmp_path / "busy", {}):
        busy = ("--input", lines, "--output", tmp_path / "busy", "--resume")
        assert_user_error(call("translate", run, *busy), "another command works in")


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("method", ["beam", "sample"])
def test_backtranslation_makes_pairs(toy: Toy, tmp_path: Path, call: Call, method: str) -> None:
    """Every line that has a good answer is a target, in order; what is left out is counted."""
    mono = ["ba del!", "", "  ", "ba\u2028ne.", *make_sentences(20, seed=7), "xyz " * 40]
    (tmp_path / "mono.xz").write_bytes(lzma.compress("".join(line + "\n" for line in mono).encode()))
    out = tmp_path / "pairs.jsonl"
    way = ("--input", tmp_path / "mono.xz", "--output", out, "--engine", "torch", f"search.method={method}")
    answer = call("backtranslate", toy.run, *way)
    assert answer.code == 0, answer.err
    found = toy.translator.translate(mono, search={"method": method})
    good = [(one.text, line) for one, line in zip(found, mono, strict=True) if one.text and not find_faults(one)]
    assert [(pair.source, pair.target) for pair in read_pairs(CorpusSettings(jsonl=str(out)))] == good
    assert 20 < len(good) < len(mono) - 2
    assert f"{len(good)} of {len(mono)} translations (2 empty" in answer.err.splitlines()[-1]
    assert not out.with_name("pairs.jsonl.shards").exists()
    assert "fewer than half" not in answer.err
    assert_user_error(call("backtranslate", toy.run, *way, "train.steps=3"), "train.steps=3", "search")


def test_answers_of_whom_half_is_left_out_are_doubted(toy: Toy, tmp_path: Path, call: Call) -> None:
    mono = write_lines(tmp_path / "mono", make_sentences(40, seed=7))
    way = ("--input", mono, "--output", tmp_path / "pairs", "search.max_ratio=0.01", "search.max_extra=3")
    answer = call("backtranslate", toy.run, *way)
    assert answer.code == 0, answer.err
    good = (tmp_path / "pairs").read_bytes().count(b"\n")
    assert 0 < good < 20
    count, doubt = answer.err.splitlines()[-2:]
    assert f"{good} of 40 translations" in count
    assert doubt.startswith(f"fewer than half of the translations by {toy.run} are good enough to learn from; train it")


@pytest.mark.parametrize("linked", [False, True])
def test_a_text_is_not_replaced_by_its_pairs(toy: Toy, tmp_path: Path, call: Call, linked: bool) -> None:
    mono = write_lines(tmp_path / "mono", before := make_sentences(4, seed=7))
    out = tmp_path / "pairs" if linked else mono
    if linked:
        out.symlink_to(mono)
    assert_user_error(call("backtranslate", toy.run, "--input", mono, "--output", out), str(out), "--output")
    assert mono.read_text().splitlines() == before


def test_where_nothing_is_good_an_earlier_file_stays(toy: Toy, tmp_path: Path, call: Call) -> None:
    mono, out = write_lines(tmp_path / "mono", make_sentences(4, seed=7)), write_lines(tmp_path / "pairs", ["earlier"])
    way = ("--input", mono, "--output", out, "search.max_ratio=0.01", "search.max_extra=0")
    answer = call("backtranslate", toy.run, *way)
    assert answer.code == 2, answer.err
    assert "0 of 4 translations (" in answer.err
    assert f"no translation by {toy.run} is good enough to learn from; train it longer" in answer.err
    assert out.read_text() == "earlier\n"
    assert call("backtranslate", toy.run, *way[:4]).code == 0  # nothing is in the way
    assert out.read_text() != "earlier\n"

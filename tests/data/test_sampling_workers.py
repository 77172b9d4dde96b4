"""Sampling workers: they produce the same tokens as the main process, and no worker outlives it."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dragoman.config.settings import parse_settings
from dragoman.data import sampling_workers as samplers
from dragoman.data import stream as stream_module
from dragoman.data.sampling_workers import SamplingPool, SamplingTask, sample_task
from dragoman.data.stream import BatchStream, StreamPosition, WeightedStore, prefetch
from dragoman.data.token_store import TokenStore, open_store
from dragoman.data.tokenizers import LabelTokenizer, Tokenizers
from dragoman.errors import UserError
from dragoman.recipe import Recipe, check_model
from dragoman.training.start import check_settings
from dragoman.types import Batch, Pair
from toy_run import SMALL, environment, read_last_step, read_tensor_files, train_quietly, write_corpus, write_recipe
from toy_text import ALL, LINES, ODD, PAIRS

Item = tuple[Batch, StreamPosition]
MANY = [*PAIRS, *(Pair(f"{odd}dog", f"{odd} {odd}") for odd in ODD if odd.strip(" "))]


@pytest.fixture(autouse=True)
def _two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use two workers with any number of cores, and several windows and tasks with few pairs."""
    monkeypatch.setattr(samplers, "count_workers", lambda: 2)
    monkeypatch.setattr(stream_module, "SHUFFLE_WINDOW", 100)
    monkeypatch.setattr(stream_module, "PAIRS_PER_TASK", 13)


def sampling(source: str, target: str) -> Tokenizers:
    return Tokenizers(ALL[source], ALL[target], ("there", "back"))


def store(cache: Path, pairs: list[Pair], tokenizers: Tokenizers, tag: str = "") -> TokenStore:
    tagged = [Pair(pair.source, pair.target, tag=tag) for pair in pairs]
    key = f"{len(pairs)} {tag}"
    return open_store(lambda: iter(tagged), tokenizers, key=key, cache=cache, max_length=500, text=True)


def make(cache: Path, source: str = "bpe", target: str = "bpe") -> BatchStream:
    tokenizers = sampling(source, target)
    parts = [
        WeightedStore(store(cache, MANY, tokenizers, "there back"), 1.0),
        WeightedStore(store(cache, PAIRS[:60], tokenizers), 1.5),
    ]
    return BatchStream(parts, tokenizers, layout="packed", tokens=512, seed=3, sampling=0.3)


def equal(one: Item, other: Item) -> bool:
    grids = [(getattr(one[0], name), getattr(other[0], name)) for name in Batch.__slots__]
    same = (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in grids)
    return one[1] == other[1] and all(same)


def tasks(count: int, size: int = 20) -> list[SamplingTask]:
    texts = [line.encode() for line in LINES[:size]]
    return [SamplingTask(0.3, 1, epoch, "back", sys.maxsize, range(size), texts, texts[::-1]) for epoch in range(count)]


def children(process: int) -> list[int]:
    """Return the ids of the child processes."""
    listed = subprocess.run(["ps", "-A", "-ww", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True)
    rows = (
        line.split(maxsplit=2) for line in listed.stdout.splitlines() if "sampling_workers import run_worker" in line
    )
    return [int(pid) for pid, parent, _ in rows if int(parent) == process]


def running(pid: int) -> bool:
    listed = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return bool(listed.stdout.strip()) and "Z" not in listed.stdout


def until(moment: Callable[[], bool], seconds: float = 30.0) -> None:
    late = time.monotonic() + seconds
    while not moment():
        assert time.monotonic() < late
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("source", "target"), [("bpe", "bpe"), ("unigram", "unigram"), ("bpe", "unigram"), ("char", "bpe")]
)
def test_workers_sample_the_same_batches_as_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, target: str
) -> None:
    """Tested on both sides, with and without tags and repeated pairs, over more than one epoch."""
    drawn = list(islice(make(tmp_path, source, target).batches(StreamPosition()), 60))
    monkeypatch.setattr(samplers, "count_workers", lambda: 0)
    here = list(islice(make(tmp_path, source, target).batches(StreamPosition()), 60))
    assert here[-1][1].epoch > 0
    assert all(map(equal, drawn, here))


@pytest.mark.parametrize("count", [0, 2])
def test_samples_are_not_longer_than_max_positions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """A text whose sample would be too long, with its tags and </s>, gets its deterministic segmentation."""
    monkeypatch.setattr(samplers, "count_workers", lambda: count)
    tokenizers = sampling("bpe", "bpe")
    kept = store(tmp_path, MANY, tokenizers, "there back")
    places = max(int(side.max()) for side in kept.get_lengths(np.arange(len(kept)))) + 1

    def widths(**places: Any) -> list[int]:
        parts = [WeightedStore(kept, 1.0)]
        stream = BatchStream(parts, tokenizers, layout="padded", tokens=512, seed=3, sampling=0.9, **places)
        batches = [batch for batch, _ in islice(stream.batches(StreamPosition()), 60)]
        return [max(batch.source_BS.size(1), batch.target_in_BT.size(1)) for batch in batches]

    assert max(widths()) > places
    assert max(widths(max_positions=places)) <= places


def test_a_stream_resumed_anywhere_yields_the_same_batches(tmp_path: Path) -> None:
    whole = list(islice(make(tmp_path).batches(StreamPosition()), 40))
    for at in (5, 16, 30):
        rest = islice(make(tmp_path).batches(whole[at][1]), 6)
        assert all(map(equal, rest, whole[at + 1 :]))


def test_workers_sample_what_the_stream_yields(tmp_path: Path) -> None:
    """Workers run while batches are read, and exit when the stream is closed."""
    with closing(prefetch(lambda: make(tmp_path).batches(StreamPosition()), 2)) as batches:
        next(batches)
        assert len(children(os.getpid())) == 2
    assert not children(os.getpid())


def test_a_small_corpus_is_sampled_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "PAIRS_PER_TASK", 10_000)
    batches = make(tmp_path).batches(StreamPosition())
    next(batches)
    assert not children(os.getpid())


@pytest.mark.parametrize("dying", [1, 2])
def test_tasks_of_a_dead_worker_run_in_this_process(dying: int) -> None:
    tokenizers, asked = sampling("bpe", "unigram"), tasks(40)
    with SamplingPool(tokenizers, 2) as crew:
        futures = [crew.submit(task) for task in asked]
        futures[0].result()
        for process in crew.processes[:dying]:
            process.kill()
        assert [future.result() for future in futures] == [sample_task(tokenizers, task) for task in asked]


@pytest.mark.parametrize("rubbish", [".", "N.", "Warning: something\n", "K\x01K\x02\x86."])
def test_other_output_of_a_worker_is_not_taken_as_a_result(rubbish: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        samplers, "WORKER_COMMAND", f"print({rubbish!r}, end='', flush=True); {samplers.WORKER_COMMAND}"
    )
    tokenizers, asked = sampling("bpe", "unigram"), tasks(6)
    with SamplingPool(tokenizers, 2) as crew:
        futures = [crew.submit(task) for task in asked]
        assert [future.result() for future in futures] == [sample_task(tokenizers, task) for task in asked]


def test_tasks_run_in_this_process_if_no_worker_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    tokenizers, [task] = sampling("bpe", "bpe"), tasks(1)
    with SamplingPool(tokenizers, 2) as crew:
        assert crew.submit(task).result() == sample_task(tokenizers, task)


def test_closing_the_pool_cancels_pending_tasks() -> None:
    tokenizers = sampling("unigram", "unigram")
    with SamplingPool(tokenizers, 2) as crew:
        futures = [crew.submit(task) for task in tasks(10_000)]
        futures[0].result()
        begun = time.monotonic()
    assert time.monotonic() - begun < 2
    assert all(process.returncode is not None for process in crew.processes)


@pytest.mark.parametrize("kind", [*ALL, "labels"])
def test_a_tokenizer_can_be_pickled(kind: str) -> None:
    """It is pickled by its content, without its cache; a joint tokenizer is one object after unpickling, too."""
    one = LabelTokenizer.train(["no", "yes"]) if kind == "labels" else ALL[kind]
    there = pickle.loads(pickle.dumps(Tokenizers(one, one, ("back",))))
    assert there.joint
    assert there.tags == ("back",)
    assert type(there.source) is type(one)
    assert there.source.content == one.content


@pytest.mark.parametrize(
    ("cores", "trainers", "count"), [(1, 1, 0), (3, 1, 0), (4, 1, 2), (8, 1, 6), (64, 1, 8), (64, 8, 6), (16, 8, 0)]
)
def test_cores_are_left_to_the_trainers(monkeypatch: pytest.MonkeyPatch, cores: int, trainers: int, count: int) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.setattr("dragoman.hardware.cpu_quota", lambda: float("inf"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(trainers))
    assert samplers.count_workers() == count


KILLED = """
from dragoman.data.sampling_workers import SamplingPool, SamplingTask
from dragoman.data.tokenizers import Tokenizers
from pathlib import Path
crew = SamplingPool(Tokenizers.load(Path("tokenizer")), 2)
texts = [b"The dog " * 50] * 1000
futures = [crew.submit(SamplingTask(0.3, 1, epoch, "", 10**9, range(1000), texts, texts)) for epoch in range(100_000)]
futures[0].result()
print("drawing", flush=True)
futures[-1].result()
"""


def test_workers_exit_if_the_trainer_is_killed(tmp_path: Path) -> None:
    sampling("bpe", "bpe").save(tmp_path / "tokenizer")
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", KILLED], cwd=tmp_path, **pipes) as parent:
        assert parent.stdout.readline() == b"drawing\n"
        drawing = children(parent.pid)
        parent.kill()
        assert len(drawing) == 2
        until(lambda: not any(map(running, drawing)))
        assert parent.stderr.read() == b""


def test_a_worker_exits_silently_if_its_output_pipe_is_closed() -> None:
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", samplers.WORKER_COMMAND, *sys.path], **pipes) as process:
        process.stdout.close()
        process.stdin.write(pickle.dumps(sampling("bpe", "bpe")) + pickle.dumps(tasks(1, size=2)[0]))
        process.stdin.close()
        assert process.stderr.read() == b""
    assert process.returncode == -signal.SIGPIPE


SCRIPT = """
import sys
import dragoman
from dragoman.data import sampling_workers as samplers, stream
from dragoman.errors import Stop

samplers.count_workers, stream.PAIRS_PER_TASK = lambda: 2, 50
print("once")
try:
    dragoman.train("recipe.yaml", out="run", overrides=sys.argv[1:])
except Stop as end:
    sys.exit(end.code)
"""


def script(folder: Path, *overrides: str) -> subprocess.Popen[bytes]:
    """Start a script that trains when it is imported, in a process group of its own, as in a terminal."""
    write_corpus(folder)
    write_recipe(folder / "recipe.yaml", **SMALL | {"tokenizer": {"kind": "bpe", "size": 310, "sampling": 0.3}})
    (folder / "script.py").write_text(SCRIPT)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment()}
    command = [sys.executable, "script.py", *overrides]
    return subprocess.Popen(command, cwd=folder, start_new_session=True, **pipes)


def test_a_script_runs_once_and_trains_as_without_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with script(tmp_path, "train.steps=6") as at_work:
        out, said = at_work.communicate(timeout=60)
    assert at_work.returncode == 0, said
    assert out == b"once\n"
    monkeypatch.setattr(samplers, "count_workers", lambda: 0)
    train_quietly(tmp_path / "recipe.yaml", tmp_path / "here", "train.steps=6")
    assert read_tensor_files(tmp_path / "run") == read_tensor_files(tmp_path / "here")


def test_ctrl_c_in_a_terminal_reaches_only_the_trainer(tmp_path: Path) -> None:
    with script(tmp_path, "train.steps=100000") as at_work:
        until(lambda: read_last_step(tmp_path / "run") > 3)
        drawing = children(at_work.pid)
        os.killpg(at_work.pid, signal.SIGINT)
        _, said = at_work.communicate(timeout=60)
    assert at_work.returncode == 130, said
    assert b"Traceback" not in said
    assert len(drawing) == 2
    assert not any(map(running, drawing))


@pytest.mark.parametrize(
    ("kind", "target", "fits"), [("char", "", False), ("word", "byte", False), ("char", "bpe", True)]
)
def test_sampling_is_refused_without_a_subword_tokenizer(kind: str, target: str, fits: bool) -> None:
    tokenizer = {"kind": kind, "target_kind": target, "joint": False, "sampling": 0.1}
    recipe = check_model(parse_settings(Recipe, {"data": {"train": {"phrasebook": 10}}, "tokenizer": tokenizer}))
    if fits:
        check_settings(recipe)
    else:
        with pytest.raises(UserError, match="has no use with tokenizer"):
            check_settings(recipe)

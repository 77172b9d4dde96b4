"""Several processes train like one: with the same batches, losses and checkpoints. If one of them is killed, hangs or
is stopped, the others stop too. The processes are started by torchrun, as docs/many-machines.md describes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import distributed as dist

from dragoman.config.settings import TrainSettings
from dragoman.data.batches import EXAMPLE_FORMATS, BatchPlan, Widths
from dragoman.errors import UserError
from dragoman.process_group import PeerWait, ProcessGroup, join_process_group
from dragoman.process_group import agree_on_name as meet_at
from dragoman.training.execution import PARALLEL
from dragoman.training.prepare import check_same_data
from dragoman.training.step import Learner
from toy_models import (
    FORM,
    SMALL_TRANSFORMER,
    Section,
    build_small_model,
    collate_rows,
    make_examples,
    make_model_sections,
)
from toy_run import (
    SMALL,
    CommandResult,
    command,
    environment,
    fast_environment,
    find_worker,
    read_last_step,
    read_run_events,
    read_tensor_files,
    torchrun,
    train_quietly,
    write_corpus,
    write_recipe,
)
from toy_sections import settings_of

pytestmark = pytest.mark.slow
PAGE = (Path(__file__).parents[2] / "docs/many-machines.md").read_text(encoding="utf-8")
FEW: dict[str, object] = {
    **SMALL["train"], "steps": 8, "tokens": 512, "save_every": 4, "validate_every": 4, "validate_lines": 2,
    "schedule": "constant", "ema": 0.8,
}  # fmt: skip
MODELS: dict[str, dict[str, object]] = {
    "transformer": {"kind": "transformer", "layers": 2, "width": 16, "heads": 2, "dropout": 0.2},
    "rnn": {"kind": "rnn", "layers": 1, "width": 16, "dropout": 0.2},
    "fed": {"kind": "rnn", "layers": 2, "width": 16, "dropout": 0.2, "input_feeding": True, "attention": "additive"},
    "tight": {"kind": "transformer", "layers": 1, "width": 16, "heads": 2, "dropout": 0.2, "shared": True},
}
FOUR_STEPS = ["train.steps=4"]
NO_DEV = "data.dev=[]"
TIGHT = [
    *FOUR_STEPS,
    "train.tokens=64",
    "train.accumulate=1",
]  # a row or two in a batch: of three processes, some have none
OVERRIDES: dict[str, list[str]] = {"rnn": FOUR_STEPS, "fed": FOUR_STEPS, "tight": TIGHT}
SHORT = ["train.steps=4", "train.save_every=2", "train.validate_every=2"]
FIRST_HALF = [*SHORT[1:], "train.steps=2"]


def write(folder: Path) -> None:
    write_corpus(folder)
    for name, model in MODELS.items():
        recipe = write_recipe(folder / f"{name}.yaml", train=FEW)
        recipe.write_text(yaml.safe_dump({**yaml.safe_load(recipe.read_text()), "model": model}))


def close(run: Path, other: Path) -> None:
    """Check that two runs have the same records: numbers within 1e-5, and equal counts."""
    assert len(read_run_events(run)) == len(read_run_events(other)) > 4
    for one, two in zip(read_run_events(run), read_run_events(other), strict=True):
        assert one.keys() == two.keys()
        for name, value in one.items():
            near = pytest.approx(value, abs=1e-5, rel=1e-5) if isinstance(value, float) else value
            assert two[name] == near, (name, one, two)


class Jobs:
    """Training runs in one process, which is this one, and in several processes, all at the same time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write(folder)

    def alone(self, recipe: str, run: str, *overrides: str, **options: Any) -> Path:
        return train_quietly(self.folder / f"{recipe}.yaml", self.folder / run, *overrides, **options)

    def together(self, world: int, *jobs: tuple[str, str, list[str], bool], real: bool = False) -> None:
        """Train in processes that are forked from one server, or in real ones, each with its own hash seed."""
        about = [
            {"recipe": str(self.folder / f"{recipe}.yaml"), "out": str(self.folder / run), "overrides": some,
             "resume": resume}
            for recipe, run, some, resume in jobs
        ]  # fmt: skip
        (self.folder / "jobs.json").write_text(json.dumps(about))
        script = Path(__file__).parents[1] / "support" / "toy_workers.py"
        command = torchrun("--standalone", "--nproc-per-node", world, script, self.folder / "jobs.json")
        done = run_to_the_end(command, cwd=self.folder, env=environment() if real else fast_environment())
        assert done.code == 0, done.err


def run_to_the_end(command: list[str], *, cwd: Path, env: dict[str, str] | None = None) -> CommandResult:
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env or fast_environment(), check=False)
    return CommandResult(done.returncode, done.stdout, done.stderr)


@contextmanager
def start_torchrun(*arguments: object, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """Start torchrun and its processes as forks of the server."""
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(torchrun(*arguments), cwd=cwd, env=fast_environment(), **pipes) as started:
        try:
            yield started
        finally:
            if started.poll() is None:
                started.terminate()
                started.wait(60)


def wait_until(moment: Callable[[], bool], *processes: subprocess.Popen[str]) -> None:
    late = time.monotonic() + 120
    while not moment():
        assert time.monotonic() < late
        assert all(each.poll() is None for each in processes), [each.communicate() for each in processes]
        time.sleep(0.01)


def list_messages(answer: str) -> list[str]:
    return [line for line in answer.splitlines() if line.startswith("dragoman: ")]


# The same losses.


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """Train the toy recipe with one, two and three processes."""
    made = Jobs(tmp_path_factory.mktemp("jobs"))
    fsdp, muon, sgd = "train.parallel=fsdp", "train.optimizer=muon", "train.optimizer=sgd"
    made.alone("transformer", "transformer-1")
    for recipe, some in OVERRIDES.items():
        made.alone(recipe, f"{recipe}-1", *some)
    made.alone("transformer", "short-1", *SHORT)
    made.alone("transformer", "1-then-3", *FIRST_HALF)
    made.alone("transformer", "muon-1", muon, *SHORT)
    made.alone("transformer", "sgd-1", sgd, *FOUR_STEPS)
    made.together(
        3,
        ("transformer", "short-3-ddp", SHORT, False),
        ("transformer", "short-3-fsdp", [fsdp, *SHORT], False),
        ("fed", "fed-3-fsdp", [fsdp, *FOUR_STEPS], False),
        ("tight", "tight-3", TIGHT, False),
        ("tight", "tight-3-fsdp", [*TIGHT, fsdp], False),
        ("transformer", "muon-3-fsdp", [muon, fsdp, *FIRST_HALF], False),
        ("transformer", "muon-3-fsdp", [muon, fsdp, *SHORT], True),
        ("transformer", "3-then-1", [fsdp, *FIRST_HALF], False),
        ("transformer", "full-disk", [fsdp, NO_DEV, *FIRST_HALF], False),
        ("transformer", "1-then-3", [fsdp, *SHORT], True),
        *(("transformer", f"3-then-3-{way}", [f"train.parallel={way}", *FIRST_HALF], False) for way in PARALLEL),
        *(("transformer", f"3-then-3-{way}", [f"train.parallel={way}", *SHORT], True) for way in PARALLEL),
    )
    made.together(
        2,
        ("transformer", "transformer-2", [], False),
        ("transformer", "sgd-2-fsdp", [sgd, fsdp, *FOUR_STEPS], False),
        ("rnn", "rnn-2-fsdp", [fsdp, *FOUR_STEPS], False),
        real=True,
    )
    made.alone("transformer", "3-then-1", *SHORT, resume=True)
    return made


@pytest.mark.parametrize(
    "run",
    ["transformer-2", "short-3-ddp", "short-3-fsdp", "rnn-2-fsdp", "fed-3-fsdp", "tight-3", "tight-3-fsdp",
     "muon-3-fsdp", "sgd-2-fsdp"],
)  # fmt: skip
def test_several_processes_train_like_one(jobs: Jobs, run: str) -> None:
    """All recorded numbers agree, with dropout, batches of few and of many rows, accumulation and EMA."""
    close(jobs.folder / f"{run.partition('-')[0]}-1", jobs.folder / run)


@pytest.mark.parametrize("run", ["3-then-1", "1-then-3"])
def test_checkpoint_is_resumed_by_any_number_of_processes(jobs: Jobs, run: str) -> None:
    """Full or sharded checkpoints are read by one and by three processes; after a full disk, by two."""
    close(jobs.folder / "short-1", jobs.folder / run)


@pytest.mark.parametrize("way", PARALLEL)
def test_resume_by_as_many_processes_is_bit_identical(jobs: Jobs, way: str) -> None:
    """For shards, compare the weights: which process writes replicated tensors can change from save to save."""
    whole, run = jobs.folder / f"short-3-{way}", jobs.folder / f"3-then-3-{way}"
    one, other = (read_tensor_files(each) for each in (run, whole))
    assert one.keys() == other.keys()
    assert all(one[name] == other[name] for name in one if "/shard-" not in name)
    assert read_run_events(run) == read_run_events(whole)


def test_published_model_is_unsharded(jobs: Jobs) -> None:
    """It is the same for every sharding. (The gradient of a key bias is zero up to rounding, so it is left out.)"""
    one, three = (load_file(jobs.folder / run / "model.safetensors") for run in ("short-1", "short-3-fsdp"))
    assert one.keys() == three.keys()
    for name in [name for name in one if "query_key_value.bias" not in name and "key_value.bias" not in name]:
        torch.testing.assert_close(one[name], three[name], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("part", ["model", "optimizer", "ema"])
def test_damaged_shard_is_refused(jobs: Jobs, tmp_path: Path, part: str) -> None:
    shutil.copytree(jobs.folder / "short-3-fsdp", tmp_path / "run")
    *_, shard = sorted((tmp_path / "run").glob(f"checkpoints/step-*/{part}/shard-*"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match=f"{part}.*damaged"):
        train_quietly(jobs.folder / "transformer.yaml", tmp_path / "run", *SHORT[1:], "train.steps=5", resume=True)
    shard.unlink()
    with pytest.raises(UserError, match=f"{part}.*damaged"):
        train_quietly(jobs.folder / "transformer.yaml", tmp_path / "run", *SHORT[1:], "train.steps=5", resume=True)


def test_unfinished_checkpoint_is_removed_from_a_full_disk(jobs: Jobs) -> None:
    """An incomplete checkpoint is removed; the previous one is kept, and the job is resumed from it."""
    run = jobs.folder / "full-disk"
    settings = ("train.parallel=fsdp", NO_DEV, *SHORT)
    train = ("-m", "dragoman", "train", "transformer.yaml", "--out", run, *settings, "--resume")
    command = torchrun("--standalone", "--nproc-per-node=2", *train)
    kept = {path.name: path.stat().st_size for path in run.rglob("*.safetensors")}
    little = max(kept.values()) // 2048  # in blocks of 1024 bytes: half of the largest part
    limited = ["bash", "-c", f'ulimit -f {little}; exec "$@"', "-", *command]
    [sentence] = list_messages(run_to_the_end(limited, cwd=jobs.folder).err)
    assert "File too large" in sentence
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-0000000002"]
    assert run_to_the_end(command, cwd=jobs.folder).code == 0
    assert read_last_step(run) == 4


def test_restarted_process_joins_the_current_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not meet processes of an earlier attempt, whose entries are still in the store."""
    monkeypatch.setenv("MASTER_ADDR", "here")
    monkeypatch.setenv("MASTER_PORT", "0")
    store, names = dist.HashStore(), dict[int, str]()  # type: ignore[attr-defined]

    def meet(rank: int) -> Thread:
        thread = Thread(target=lambda: names.update({rank: meet_at(store, rank, 2, PeerWait(rank, 2, 1.0))}))
        thread.start()
        return thread

    for thread in [meet(0), meet(1)]:
        thread.join(30)
    before = dict(names)
    early = meet(1)
    early.join(0.3)
    assert early.is_alive()
    for thread in (meet(0), early):
        thread.join(30)
    assert before[0] == before[1] != names[0] == names[1]


def single_rank_environment(rank: int) -> dict[str, str]:
    """Return the environment of one of two processes, the other of which was never started."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {
        "TORCHELASTIC_RUN_ID": "x", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


@pytest.mark.parametrize("rank", [0, 1])
def test_waiting_process_logs_and_can_be_stopped(rank: int, tmp_path: Path) -> None:
    about = single_rank_environment(rank)
    write_corpus(tmp_path)
    recipe = write_recipe(tmp_path / "recipe.yaml", **SMALL)
    train = command("train", recipe, "--out", tmp_path / "run")
    with subprocess.Popen(train, env=environment() | about, stderr=subprocess.PIPE, text=True) as waiting:
        assert waiting.stderr is not None
        missing = "process 0" if rank else "1 process"
        lines = iter(waiting.stderr.readline, "")
        assert any(f"waiting for {missing} at 127.0.0.1:{about['MASTER_PORT']}" in line for line in lines)
        waiting.terminate()
        assert list(lines)[-1] == "dragoman: stopped by SIGTERM\n"
    assert waiting.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize("rank", [0, 1])
def test_waiting_for_other_processes_times_out(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in single_rank_environment(rank).items():
        monkeypatch.setenv(name, value)
    sentence = rf"process {rank} of 2 waited 0 minutes for .* at 127.0.0.1:\d+; check their output"
    with pytest.raises(UserError, match=sentence), join_process_group(lambda: 0.0):
        pass


# What every model must do for it.

MODEL_SECTIONS = make_model_sections()


@pytest.mark.parametrize("section", MODEL_SECTIONS.values(), ids=MODEL_SECTIONS.keys())
def test_all_parameters_get_a_gradient(section: Section) -> None:
    """This also holds for a process without rows, for which the others wait; there, gradients are 0."""
    learner = Learner(build_small_model(section, dtype=torch.float32), TrainSettings())
    settings = settings_of(section)
    empty = EXAMPLE_FORMATS[FORM[settings.task]].collate(BatchPlan([[]], Widths(12, 12)), [], settings.source_features)
    batches = [
        collate_rows(section, [[0], [1]], make_examples(section)),
        *([empty] if section.get("norm") != "batch" else []),
    ]
    for batch in batches:
        learner.zero_grad()
        learner(batch)[0].backward()
        assert all(one.grad is not None and one.grad.isfinite().all() for one in learner.parameters())
    assert section.get("norm") == "batch" or not any(one.grad.any() for one in learner.parameters())


@pytest.mark.parametrize(
    ("way", "norm", "culprit"),
    [("ddp", "batch", "model.norm=batch"), ("fsdp", "batch", "model.norm=batch"), ("fsdp", "scale", "single number")],
)
def test_models_that_cannot_be_distributed_are_refused(way: str, norm: str, culprit: str) -> None:
    with pytest.raises(UserError, match=culprit):
        PARALLEL[way].check(build_small_model({**SMALL_TRANSFORMER, "norm": norm}))
    PARALLEL[way].check(build_small_model(SMALL_TRANSFORMER))


# What the page says.


def read_code_blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def parse_torchrun_command(command: str) -> list[str]:
    """Return the arguments of a command in docs/many-machines.md, without the word torchrun."""
    first, *rest = command.replace("\\\n", " ").split()
    assert first == "torchrun"
    return rest


@pytest.fixture
def small(tmp_path: Path) -> Path:
    write(tmp_path)
    (tmp_path / "transformer.yaml").rename(tmp_path / "recipe.yaml")
    return tmp_path


def test_dry_run_of_two_processes_equals_that_of_one(small: Path) -> None:
    """One process prints, and the number of processes does not change the size of batches."""
    command = ["-m", "dragoman", "train", "recipe.yaml", "--out", "new", "--dry-run"]
    one, two = (run_to_the_end(torchrun(f"--nproc-per-node={count}", *command), cwd=small) for count in (1, 2))
    assert (one.code, two.code) == (0, 0), one.err + two.err
    assert one.out == two.out
    assert "an epoch is about" in one.out
    assert not (small / "new").exists()


def test_stopped_by_two_resumed_by_one(small: Path, jobs: Jobs) -> None:
    """All processes stop after the same step and log it once; one process then resumes the run."""
    begin, go_on = map(parse_torchrun_command, read_code_blocks("sh"))
    with start_torchrun(*begin, "train.log_every=1", "train.save_every=100", cwd=small) as started:
        wait_until(lambda: read_last_step(small / "run") >= 2, started)
        started.send_signal(signal.SIGTERM)
        _, err = started.communicate(timeout=120)
    [sentence] = list_messages(err)
    assert "stopped by SIGTERM at step" in sentence
    [newest] = (small / "run/checkpoints").glob("step-*")
    assert int(newest.name.removeprefix("step-")) == read_last_step(small / "run") < 8
    done = run_to_the_end(torchrun(*("1" if word == "4" else word for word in go_on)), cwd=small)
    assert done.code == 0, done.err
    assert f"resuming from step {int(newest.name.removeprefix('step-'))}" in done.err
    close(jobs.folder / "transformer-1", small / "run")


def test_killed_on_one_of_two_machines(small: Path, jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job restarts by itself and ends with the same bytes as an uninterrupted job."""
    export, block = read_code_blocks("sh nodes")[0].split("\n", 1)
    monkeypatch.setenv(*export.removeprefix("export ").split("="))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        endpoint = f"localhost:{free.getsockname()[1]}"
    changes = {"node1:29400": endpoint, "8": "1"}
    node = [changes.get(word, word) for word in parse_torchrun_command(block)]
    with start_torchrun(*node, cwd=small) as one, start_torchrun(*node, cwd=small) as two:
        wait_until(lambda: read_last_step(small / "run") >= 2, one, two)
        os.kill(find_worker(small, rank=1), signal.SIGKILL)
        answers = [each.communicate(timeout=120) for each in (one, two)]
    assert [one.returncode, two.returncode] == [0, 0], answers
    same = jobs.folder / "transformer-2"
    assert (small / "run/model.safetensors").read_bytes() == (same / "model.safetensors").read_bytes()
    assert read_run_events(small / "run") == read_run_events(same)


def test_hanging_process_ends_the_job(small: Path) -> None:
    settings = ("--out", "run", "train.timeout=0.05", "train.steps=100000")
    begin = ("--standalone", "--nproc-per-node", 2, "-m", "dragoman", "train", "recipe.yaml", *settings)
    with start_torchrun(*begin, cwd=small) as started:
        wait_until(lambda: read_last_step(small / "run") >= 2, started)
        os.kill(stopped := find_worker(small, rank=1), signal.SIGTSTP)
        assert started.stderr
        sentence = next(line for line in started.stderr if line.startswith("dragoman: "))
        os.kill(stopped, signal.SIGKILL)  # as torchrun would, half a minute later
        _, err = started.communicate(timeout=120)
    assert started.returncode == 1
    assert list_messages(err) == []
    assert "waited 0.05 minutes" in sentence
    assert "train.timeout" in sentence
    assert "--resume" in sentence


@pytest.mark.parametrize(("rank", "local", "turn"), [(0, 0, 0), (1, 1, 2), (2, 0, 1), (3, 1, 2)])
def test_one_process_per_machine_goes_first(monkeypatch: pytest.MonkeyPatch, rank: int, local: int, turn: int) -> None:
    """Of two machines with two processes each, the first process of each machine does the work that is then cached."""
    turns: list[int] = []

    def fail_together(_self: ProcessGroup, work: Callable[[], Any]) -> Any:
        turns.append(len(turns))
        return work()

    monkeypatch.setattr(ProcessGroup, "fail_together", fail_together)
    assert ProcessGroup(rank=rank, world_size=4, local_rank=local).run_main_first(lambda: turns[-1]) == turn
    assert turns == [0, 1, 2]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_processes_with_different_data_are_refused(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    same = {"data.train (a)": "1", "data.dev (b)": "2"}
    others = [same, same, {**same, "data.dev (b)": "3"}]
    prepared: Any = SimpleNamespace(digests=others[rank])

    def gather_results(_self: ProcessGroup, work: Callable[[], Any]) -> list[Any]:
        return [*others[:rank], work(), *others[rank + 1 :]]

    monkeypatch.setattr(ProcessGroup, "gather_results", gather_results)
    with pytest.raises(UserError) as caught:
        check_same_data(prepared, ProcessGroup(rank=rank, world_size=3))
    sentence = "data.dev (b) is not the same in process 2 as in process 0; give all machines the same files"
    assert str(caught.value) == (sentence if rank == 0 else "")
    others[2] = prepared.digests = same
    check_same_data(prepared, ProcessGroup(rank=rank, world_size=3))


@pytest.mark.parametrize("fault", ["model.norm=batch"])
def test_user_error_is_printed_once(small: Path, fault: str) -> None:
    begin = ("--standalone", "--nproc-per-node", 2, "-m", "dragoman", "train", "recipe.yaml", "--out", "run", fault)
    answer = run_to_the_end(torchrun(*begin), cwd=small)
    [sentence] = list_messages(answer.err)
    assert fault in sentence
    codes = set(re.findall(r"exitcode +: (-?\d+)", answer.err))
    assert {"2"} <= codes <= {"2", "-15", "143"}  # torchrun sends SIGTERM to who is not quick enough
    assert not (small / "run").exists()


def options(command: list[str]) -> Any:
    """Parse a command line as torchrun does."""
    from torch.distributed.run import get_args_parser

    return get_args_parser().parse_args(command)


def test_slurm_job_of_the_docs(tmp_path: Path) -> None:
    [script] = read_code_blocks("sbatch")
    (tmp_path / "train.sbatch").write_text(script)
    subprocess.run(["bash", "-n", tmp_path / "train.sbatch"], check=True)
    command = script[script.index("torchrun") :]
    known = options(parse_torchrun_command(command))
    assert known.training_script == "dragoman"
    assert known.training_script_args[-1] == "--resume"


def test_kubernetes_job_of_the_docs() -> None:
    service, job = yaml.safe_load_all(read_code_blocks("yaml")[0])
    pod = job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    known = options(container["command"][1:])
    assert service["metadata"]["name"] == pod["subdomain"] == job["metadata"]["name"]
    assert known.rdzv_endpoint.startswith(f"{job['metadata']['name']}-0.{pod['subdomain']}:")
    assert known.nnodes == str(job["spec"]["completions"]) == str(job["spec"]["parallelism"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(known.nproc_per_node)
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_every_parallel_method_is_documented() -> None:
    assert all(f"| `{name}` |" in PAGE for name in PARALLEL)

"""A toy language, recipes for models of it, and helpers that run commands and compare run folders.

Every word has one translation, word order is reversed, and the final mark stays: "ba del fo!" is "ol ebi ak!".
The fixtures are in toy_fixtures.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import yaml

from dragoman.inference.loading import load_as
from dragoman.inference.translator import Translator
from dragoman.progress import Report
from dragoman.training.trainer import train
from dragoman.types import Pair
from fork_server import fast_python

WORDS = {"ba": "ak", "del": "ebi", "fo": "ol", "gri": "tun", "mun": "sa", "ne": "wex", "pol": "yim", "ra": "zu"}
RECIPE: dict[str, dict[str, object]] = {
    "data": {
        "train": {"source": "train.src", "target": "train.trg"},
        "dev": {"source": "dev.src", "target": "dev.trg"},
        "cache": "cache",
    },
    "tokenizer": {"kind": "bpe", "size": 310},
    "model": {"layers": 1, "width": 64, "heads": 4, "dropout": 0.0},
    "train": {
        "device": "cpu", "threads": 1, "precision": "float32", "tokens": 512, "steps": 330, "lr": 4e-3, "warmup": 50,
        "schedule": "cosine", "label_smoothing": 0.0, "validate_every": 165, "save_every": 110, "log_every": 10,
    },
}  # fmt: skip

SMALL: dict[str, dict[str, object]] = {
    "model": {"width": 16, "heads": 2, "dropout": 0.2},
    "train": {
        "steps": 24, "tokens": 128, "accumulate": 2, "warmup": 4, "validate_every": 6, "validate_lines": 8,
        "save_every": 4, "log_every": 1,
    },
}  # fmt: skip
TIMES = {
    "seconds", "tokens_per_second", "flops_per_second", "matrix_flops_per_second", "utilisation", "peak_memory",
}  # fmt: skip


def translate_toy(source: str) -> str:
    """Return the correct translation of a sentence of the toy language."""
    return " ".join(WORDS[word] for word in reversed(source[:-1].split())) + source[-1]


def make_sentences(count: int, seed: int = 1, longest: int = 5) -> list[str]:
    random, found = Random(seed), dict[str, None]()
    while len(found) < count:
        words = random.choices(list(WORDS), k=random.randint(1, longest))
        found[" ".join(words) + random.choice(".!?")] = None
    return list(found)


def pairs(count: int, seed: int = 1) -> list[Pair]:
    return [Pair(source, translate_toy(source)) for source in make_sentences(count, seed)]


def write_lines(path: Path, lines: Iterable[str]) -> Path:
    path.write_bytes("".join(line + "\n" for line in lines).encode())
    return path


def write_corpus(folder: Path, *, train: int = 200, dev: int = 20, seed: int = 1) -> None:
    many = pairs(train + dev, seed)
    for name, some in (("train", many[:train]), ("dev", many[train:])):
        write_lines(folder / f"{name}.src", (pair.source for pair in some))
        write_lines(folder / f"{name}.trg", (pair.target for pair in some))


def write_recipe(path: Path, **sections: dict[str, object]) -> Path:
    """Write RECIPE with other values in some sections. Its corpus and its cache are in the same folder."""
    whole = {name: {**section, **sections.get(name, {})} for name, section in RECIPE.items()}
    whole["data"]["cache"] = str(path.parent / "cache")
    path.write_text(yaml.safe_dump(whole))
    return path


def train_quietly(recipe: Path, run: Path, *overrides: str, **options: Any) -> Path:
    """Train a recipe in this process without output."""
    return train(recipe, out=run, overrides=overrides, report=Report(quiet=True), **options)


def read_run_events(run: Path) -> list[dict[str, Any]]:
    """Return the records in metrics.jsonl of a run, without values that depend on the clock."""
    lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def read_last_step(run: Path) -> int:
    """Return the step of the last complete line of metrics.jsonl; 0 if there is none."""
    text = (run / "metrics.jsonl").read_text() if (run / "metrics.jsonl").exists() else ""
    whole = text.split("\n")[:-1]
    return int(json.loads(whole[-1])["step"]) if whole else 0


def read_tensor_files(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in sorted(run.rglob("*.safetensors"))}


def files(folder: Path) -> list[str]:
    """Return the names of files in a test's folder, without `home`, in which libraries may write."""
    return sorted(path.name for path in folder.iterdir() if path.name != "home")


class CommandResult(NamedTuple):
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str


def command(*arguments: object) -> list[str]:
    return [fast_python(), "-m", "dragoman", *map(str, arguments)]


def torchrun(*arguments: object) -> list[str]:
    """Return a torchrun command; its processes start fast in `fast_environment`."""
    return [fast_python(), "-m", "torch.distributed.run", *map(str, arguments)]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def fast_environment() -> dict[str, str]:
    """Return an environment in which torchrun forks its processes from the server."""
    return {**environment(), "PYTHON_EXEC": fast_python()}


def find_worker(folder: Path, rank: int) -> int:
    """Return the id of the process with this rank that torchrun started in a folder."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # a process that has ended, or of another user
            variables = (process / "environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in variables and (process / "cwd").resolve() == folder.resolve():
                return int(process.name)
    raise AssertionError(f"no process has rank {rank}")


def run_process(*arguments: object, stdin: bytes = b"", python: str | None = None) -> CommandResult:
    """Run a command as a process and return its output."""
    start = [python or fast_python(), "-m", "dragoman", *map(str, arguments)]
    done = subprocess.run(start, input=stdin, capture_output=True, env=environment(), check=False)
    return CommandResult(done.returncode, done.stdout.decode(), done.stderr.decode())


@contextmanager
def start_process(*arguments: object, **streams: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command as a process, which is killed at the end of the context."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    with subprocess.Popen(command(*arguments), env=environment(), **pipes) as running:
        try:
            yield running
        finally:
            running.kill()
            for stream in (running.stdout, running.stderr):  # these streams are open until the forked process ends
                if stream and not stream.closed:
                    stream.read()


Call = Callable[..., CommandResult]


class Toy(NamedTuple):
    """A trained run of RECIPE, and the output of its training."""

    folder: Path  # has the corpus and the recipe
    recipe: Path
    run: Path
    output: CommandResult  # of the training command

    @property
    def translator(self) -> Translator:
        return load_as(Translator, self.run, device="cpu")


def assert_user_error(answer: CommandResult, *culprits: object, working: bool = False) -> None:
    """Assert that a command failed with one sentence on stderr that contains all `culprits`, and printed nothing else.

    With `working`, progress messages may come before the sentence.
    """
    assert answer.code == 2, answer
    assert answer.out == ""
    *before, sentence = answer.err.removesuffix("\n").split("\n")
    assert working or not before, answer.err
    assert not any(line.startswith(("dragoman: ", "Traceback")) for line in before), answer.err
    assert sentence.startswith("dragoman: "), answer.err
    for culprit in culprits:
        assert str(culprit) in sentence


def assert_same_runs(run: Path, whole: Path) -> None:
    """Assert that two runs have the same tensors and records, and that no temporary file is left."""
    assert (run / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert read_tensor_files(run) == read_tensor_files(whole)
    assert read_run_events(run) == read_run_events(whole)
    assert not list(run.rglob(".*.tmp"))


def wait_until(moment: Callable[[], bool], running: subprocess.Popen[bytes]) -> None:
    """Wait until `moment` returns true, at most two minutes; fail if the process ends before."""
    deadline = time.monotonic() + 120
    while not moment():
        assert time.monotonic() < deadline
        assert running.poll() is None, running.communicate()[1].decode()
        time.sleep(0.001)

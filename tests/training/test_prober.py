"""Probes during training: they change nothing, and an interrupted run has the same records as one that never was."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import toy_heads
from dragoman.inspection.probes import Probes
from dragoman.training.execution import PARALLEL
from dragoman.training.step import Stepper
from dragoman.training.trainer import ROLL_BACK_AFTER
from toy_run import (
    assert_same_runs,
    fast_environment,
    read_tensor_files,
    torchrun,
    train_quietly,
)

PROBED, STEPS = "train.probe_every=5", "train.steps=12"
EMA = "train.ema=0.8"
SHORT: dict[str, Any] = {"steps": 12, "validate_every": 6, "save_every": 4}


def read_probes(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "probes.jsonl").read_text().splitlines()]


RECIPES: dict[str, Callable[[Path], Path]] = {
    "classifier": lambda folder: toy_heads.classifier_recipe(folder, **SHORT),
    "windows of a text": lambda folder: toy_heads.lm_recipe(folder, **SHORT),
    "lines of a text": lambda folder: toy_heads.lm_recipe(folder, "rnn", documents="line", **SHORT),
}


def assert_probes_change_nothing(recipe: Path, folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """Train with and without probes; return the records of the probes."""
    train_quietly(recipe, folder / "plain", *overrides)
    train_quietly(recipe, folder / "probed", *overrides, PROBED)
    assert not (folder / "plain/probes.jsonl").exists()
    assert_same_runs(folder / "probed", folder / "plain")
    return read_probes(folder / "probed")


@pytest.mark.parametrize(
    "overrides",
    [
        (EMA,),
        ("data.dev=[]",),
        ("train.freeze=[encoder.*]", "model.norm=batch", "train.consistency=rdrop"),
        ("model={kind: rnn, width: 16, input_feeding: true, dropout: 0.3}",),
        ("model={kind: hybrid, width: 16, heads: 2, layers: 1, dropout: 0.3}",),
    ],
    ids=str,
)
def test_a_run_with_probes_is_bit_identical(small: Path, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    records = assert_probes_change_nothing(small, tmp_path, STEPS, *overrides)
    assert [record["step"] for record in records] == [5, 10]
    first, second = map(Probes.from_json, records)
    assert first.parameter_gradients != second.parameter_gradients
    assert [probe.layer for probe in first.layers] == [probe.layer for probe in second.layers]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what the compiler itself imports
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of a tensor that the compiler itself looks at
@pytest.mark.parametrize("compiled", ["true", "false"])
def test_cuda_graphs_are_not_disturbed(small: Path, tmp_path: Path, compiled: str) -> None:
    """Steps are captured after a few steps of the same shape, so steps before and after a probe are replayed."""
    model = "model={layers: 2, width: 64, heads: 2, dropout: 0.2}"
    settings = ("train.device=cuda", "train.precision=bf16", f"train.compile={compiled}", "train.accumulate=1")
    records = assert_probes_change_nothing(small, tmp_path, model, *settings, "train.steps=40", EMA)
    assert [record["step"] for record in records] == list(range(5, 41, 5))


@pytest.mark.parametrize("task", RECIPES)
def test_other_tasks_have_probes(tmp_path: Path, task: str) -> None:
    records = assert_probes_change_nothing(RECIPES[task](tmp_path), tmp_path)
    assert [record["step"] for record in records] == [5, 10]
    assert Probes.from_json(records[0]).layers


def test_a_resumed_run_continues_the_file(small: Path, tmp_path: Path) -> None:
    """The run was killed at step 10 after its checkpoint of step 6: the record of step 10 is written again, once."""
    run, whole, settings = tmp_path / "run", tmp_path / "whole", (PROBED, EMA, "train.schedule=constant")
    train_quietly(small, whole, *settings, STEPS)
    train_quietly(small, run, *settings, "train.steps=6")
    with (run / "probes.jsonl").open("a") as file:
        file.write(json.dumps({"event": "probe", "step": 10}) + '\n{"event": "pro')
    train_quietly(small, run, *settings, STEPS, resume=True)
    assert_same_runs(run, whole)
    assert (run / "probes.jsonl").read_bytes() == (whole / "probes.jsonl").read_bytes()


def test_probes_can_be_switched_on_and_off(small: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_quietly(small, run, "train.steps=4")
    train_quietly(small, run, "train.steps=6", "train.probe_every=2", resume=True)
    train_quietly(small, run, "train.steps=8", "train.probe_every=0", resume=True)
    assert [record["step"] for record in read_probes(run)] == [6]


def test_a_roll_back_removes_later_records(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update, tried = Stepper.update, iter(range(1, 100))

    def spoil(self: Stepper, *arguments: Any) -> Any:
        pending = update(self, *arguments)
        bad = 8 <= next(tried) < 8 + ROLL_BACK_AFTER
        return pending._replace(metrics_4=pending.metrics_4 * float("nan")) if bad else pending

    monkeypatch.setattr(Stepper, "update", spoil)
    settings = ("data.dev=[]", "train.validate_every=0", "train.save_every=5", "train.probe_every=1")
    train_quietly(small, tmp_path / "run", *settings, STEPS)
    assert [record["step"] for record in read_probes(tmp_path / "run")] == list(range(1, 13))


def test_only_one_of_several_processes_measures(small: Path, tmp_path: Path) -> None:
    """The weights are those of a run without probes, and the probes those of a single process, up to rounding."""
    train_quietly(small, tmp_path / "single", PROBED, STEPS, EMA)
    jobs = [
        {"recipe": str(small), "out": str(tmp_path / f"{name}-{way}"), "overrides": [STEPS, EMA, way_setting, *more]}
        for way, way_setting in ((way, f"train.parallel={way}") for way in PARALLEL)
        for name, more in (("plain", []), ("probed", [PROBED]))
    ]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    script = Path(__file__).parents[1] / "support" / "toy_workers.py"
    command = torchrun("--standalone", "--nproc-per-node", 2, script, tmp_path / "jobs.json")
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=fast_environment(), check=False)
    assert done.returncode == 0, done.stderr
    expected = read_probes(tmp_path / "single")
    for way in PARALLEL:
        plain, probed = (read_tensor_files(tmp_path / f"{name}-{way}") for name in ("plain", "probed"))
        assert plain["model.safetensors"] == probed["model.safetensors"]
        records = read_probes(tmp_path / f"probed-{way}")
        assert [record["step"] for record in records] == [5, 10]
        for record, single in zip(records, expected, strict=True):
            assert record["loss"] == pytest.approx(single["loss"], rel=1e-4)
            layers = [[(probe["variance"], probe["gradient"]) for probe in one["layers"]] for one in (record, single)]
            assert layers[0] == [pytest.approx(numbers, rel=1e-3) for numbers in layers[1]]

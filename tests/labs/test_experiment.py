"""Checks, verdicts and the runner: thresholds decide by intervals, and finished trials are never repeated."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.errors import Stop, UserError
from dragoman.labs import runner
from dragoman.labs.experiment import CONFIRMED, DEPENDS, NOT_CONFIRMED, Check, Experiment, Setup, Table, find_interval
from dragoman.labs.memory import RECURRENT_POWERS
from dragoman.labs.registry import EXPERIMENTS
from dragoman.labs.report import render_markdown, render_markdown_index, write_site
from dragoman.labs.runner import (
    LabResult,
    Trial,
    TrialsFailed,
    plan_trials,
    read_results,
    replace_infinite,
    restore_infinite,
    run_experiments,
)

KEPT = Path(__file__).parents[2] / "bench" / "results" / "labs"
NAME = RECURRENT_POWERS.name


def make_table(*values: float) -> Table:
    return {"model": {seed: {"x": value} for seed, value in enumerate(values, 1)}}


@pytest.mark.parametrize(
    ("values", "at_least", "verdict"),
    [
        ((5.0,), 5.0, CONFIRMED),
        ((4.9,), 5.0, NOT_CONFIRMED),
        ((9.0, 9.1, 9.2), 5.0, CONFIRMED),
        ((1.0, 1.1, 1.2), 5.0, NOT_CONFIRMED),
        ((4.0, 6.0, 8.0), 5.0, DEPENDS),  # the mean is right, but chance may have decided
    ],
)
def test_the_interval_decides(values: tuple[float, ...], at_least: float, verdict: str) -> None:
    check = Check("x", lambda trials: trials["model"]["x"], at_least=at_least)
    assert check.judge(make_table(*values)).verdict == verdict
    mirrored = Check("x", lambda trials: -trials["model"]["x"], at_most=-at_least)
    assert mirrored.judge(make_table(*values)).verdict == verdict


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=8))
def test_the_interval_is_that_of_the_t_distribution(values: list[float]) -> None:
    center, low, high = find_interval(values)
    assert center == pytest.approx(mean(values), abs=1e-9)
    assert (low + high) / 2 == pytest.approx(center, abs=1e-9)
    quantiles = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365}
    expected = 2 * quantiles[len(values) - 1] * stdev(values) / len(values) ** 0.5
    assert high - low == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("values", "verdict"), [((1e4, 1e5, 1e6), CONFIRMED), ((0.5, 1e9, 1e3), DEPENDS)])
def test_ratios_are_compared_on_a_logarithmic_scale(values: tuple[float, ...], verdict: str) -> None:
    check = Check("x", lambda trials: trials["model"]["x"], at_least=10, ratio=True)
    inverse = Check("x", lambda trials: 1 / trials["model"]["x"], at_most=0.1, ratio=True)
    result, mirrored = check.judge(make_table(*values)), inverse.judge(make_table(*values))
    assert result.verdict == mirrored.verdict == verdict
    assert result.mean == pytest.approx(1 / mirrored.mean)
    assert (result.low, result.high) == pytest.approx((1 / mirrored.high, 1 / mirrored.low))


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ((0.5, math.nan, 0.4), DEPENDS),
        ((0.5, -1.0, 0.4), DEPENDS),  # a ratio is positive
        ((50.0, 60.0, 0.0), DEPENDS),
        ((0.0, 0.0, 0.0), CONFIRMED),
        ((math.inf, math.inf, math.inf), NOT_CONFIRMED),
    ],
)
def test_a_ratio_that_is_not_a_number_decides_nothing(values: tuple[float, ...], verdict: str) -> None:
    check = Check("x", lambda trials: trials["model"]["x"], at_most=0.01, ratio=True)
    assert check.judge(make_table(*values)).verdict == verdict


@pytest.mark.parametrize("control", [True, False])
@pytest.mark.parametrize("claims", [(True, True), (True, False), (False, False)])
def test_controls_and_asides_are_no_evidence(control: bool, claims: tuple[bool, ...]) -> None:
    """The verdict is that of the claim alone if the control holds, and undecided if it fails."""
    checks = [Check("claim", lambda _, held=held: float(held), at_least=1) for held in claims]  # type: ignore[misc]
    checks.append(Check("control", lambda _: float(control), at_least=1, control=True))
    checks.append(Check("aside", lambda _: float(not claims[0]), at_least=1, aside=True))
    verdict, results = replace(RECURRENT_POWERS, checks=tuple(checks)).judge(make_table(1.0, 2.0))
    assert len(results) == 4
    expected = {(True, True): CONFIRMED, (True, False): DEPENDS, (False, False): NOT_CONFIRMED}[claims]
    assert verdict == (expected if control else DEPENDS)


NUMBER = st.sampled_from([0.5, -2.25, -0.0, 3, math.inf, -math.inf, math.nan])


@given(st.recursive(NUMBER, lambda inner: st.lists(inner) | st.dictionaries(st.text("abc", max_size=3), inner)))
def test_kept_numbers_are_read_back(value: Any) -> None:
    """Numbers that are not finite are read back too, although JSON has none."""
    kept = json.loads(json.dumps(replace_infinite(value), allow_nan=False))
    assert repr(restore_infinite(kept)) == repr(value)


def test_only_common_seeds_count() -> None:
    table = {"a": {1: {"x": 1.0}, 2: {"x": 2.0}}, "b": {2: {"x": 5.0}}}
    assert Check("x", lambda trials: trials["b"]["x"] - trials["a"]["x"], at_least=0).judge(table).values == (3.0,)


def test_finished_trials_are_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run_experiments([NAME], out=tmp_path, quick=True)
    monkeypatch.setattr(Trial, "run", lambda _: pytest.fail("a finished trial ran again"))
    again = run_experiments([NAME], out=tmp_path, quick=True)
    assert again[0].to_json() == first[0].to_json()


def test_an_interrupted_experiment_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, count = Trial.run, 0

    def run_two(trial: Trial) -> None:
        nonlocal count
        count += 1
        if count > 2:
            raise KeyboardInterrupt
        run(trial)

    monkeypatch.setattr(Trial, "run", run_two)
    with pytest.raises(Stop, match="resumes"):
        run_experiments([NAME], out=tmp_path, quick=True)
    monkeypatch.setattr(Trial, "run", run)
    [resumed], [whole] = (run_experiments([NAME], out=out, quick=True) for out in (tmp_path, tmp_path / "other"))
    assert resumed.table == whole.table


def test_a_failing_trial_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Trial.run
    conditions = EXPERIMENTS[NAME].conditions

    def fail_once(trial: Trial) -> None:
        if trial.condition == conditions[0]:
            raise ValueError("no memory")
        run(trial)

    monkeypatch.setattr(Trial, "run", fail_once)
    with pytest.raises(TrialsFailed, match=f"1 of .* trials failed, first {NAME}, .*: no memory") as failure:
        run_experiments([NAME, "four-terms"], out=tmp_path, quick=True)
    assert [result.experiment.name for result in failure.value.results] == ["four-terms"]
    assert len(list((tmp_path / NAME / "quick").glob("*.json"))) == len(conditions) - 1


def test_an_interrupt_stops_all_processes(tmp_path: Path) -> None:
    """Ctrl-C reaches every process of the group; trials that wait are not begun."""
    command = [sys.executable, "-m", "dragoman", "lab", "permutation", "--quick", "--seeds", "400", "--jobs", "2"]
    command += ["--out", str(tmp_path)]
    listen = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # jobs in the background of a shell ignore it
    with subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, preexec_fn=listen) as process:
        while process.poll() is None and not list(tmp_path.rglob("*.json")):
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        _, messages = process.communicate()
    assert process.returncode == 130
    assert b"the same command resumes" in messages
    assert len(list(tmp_path.rglob("*.json"))) < 400


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[:20], "is not a measurement; remove it"),
        (lambda text: text.replace('"last_norm"', '"norm"'), "another version of the experiment; remove the folder"),
    ],
)
def test_a_damaged_trial_is_named(damage: Callable[[str], str], message: str, tmp_path: Path) -> None:
    run_experiments([NAME], out=tmp_path, quick=True)
    for trial in (tmp_path / NAME / "quick").glob("*.json"):
        trial.write_text(damage(trial.read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.raises(UserError, match=message):
        run_experiments([NAME], out=tmp_path, quick=True)


def test_trials_of_other_code_or_machines_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_experiments([NAME], out=tmp_path, quick=True)
    condition = RECURRENT_POWERS.conditions[0]
    other, one, *_ = (trial.file for trial in plan_trials(RECURRENT_POWERS, Setup(True, tmp_path / NAME / "quick"), 1))
    one.write_text(json.dumps({**json.loads(one.read_text()), "code": "0"}))
    other.write_text(json.dumps({**json.loads(other.read_text()), "machine": "H200"}))
    capsys.readouterr()
    [result] = run_experiments([NAME], out=tmp_path, quick=True)
    assert list(result.machines[condition].values()) == ["H200"]
    assert LabResult.from_json(json.loads(json.dumps(result.to_json()))).machines == result.machines
    page = "\n".join(render_markdown(RECURRENT_POWERS, result))
    assert f"*On H200: {condition}.*" in page
    written = " ".join(capsys.readouterr().err.split())
    assert "trials measured by an earlier version of the experiment: 1; to repeat them, remove" in written
    assert "trials measured by H200: 1; to repeat them, remove" in written


def test_processes_give_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.os, "environ", dict(runner.os.environ))  # type: ignore[attr-defined]
    [one], [two] = (run_experiments([NAME], out=tmp_path / str(jobs), quick=True, jobs=jobs) for jobs in (1, 2))
    assert one.table == two.table


def test_the_site_has_all_results(tmp_path: Path) -> None:
    [result] = run_experiments([NAME], out=tmp_path, quick=True)
    write_site([result], tmp_path / "site")
    index = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert f'href="{NAME}.html"' in index
    assert result.verdict in index
    assert read_results(tmp_path / "site")[NAME].table == result.table
    [other] = run_experiments(["cell-keeps"], out=tmp_path, quick=True)
    write_site([other], tmp_path / "site")
    index = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert f'href="{NAME}.html"' in index
    assert 'href="cell-keeps.html"' in index
    (tmp_path / "site" / f"{NAME}.json").write_text("[]")
    with pytest.raises(UserError, match="is not the result of this version of the experiment; remove it"):
        read_results(tmp_path / "site")


def test_the_documentation_lists_every_experiment() -> None:
    page = "\n".join(render_markdown_index({}))
    assert all(f"[{name}]({name}.md)" in page for name in EXPERIMENTS)
    assert "no full run" in "\n".join(render_markdown(RECURRENT_POWERS, None))


def test_every_experiment_has_a_kept_result() -> None:
    results = read_results(KEPT)
    assert set(results) == set(EXPERIMENTS)
    assert [name for name, result in results.items() if result.quick or len(result.seeds) < 3] == []


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_kept_result_has_the_present_checks_and_verdicts(name: str) -> None:
    """Measured values may differ in the last digit on another CPU."""
    kept = json.loads((KEPT / f"{name}.json").read_text(encoding="utf-8"))
    judged = json.loads(json.dumps(LabResult.from_json(kept).to_json()))
    for record in (kept, judged):
        record["checks"] = [
            {key: value for key, value in check.items() if key not in ("values", "interval")}
            for check in record["checks"]
        ]
    assert kept == judged


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=EXPERIMENTS)
def test_an_experiment_is_described(experiment: Experiment) -> None:
    assert EXPERIMENTS[experiment.name] is experiment
    for text in ("title", "lecture", "claim", "method", "predict", "conclusion"):
        assert getattr(experiment, text).strip()
    checks = experiment.checks
    assert checks
    assert all((check.at_least is None) != (check.at_most is None) for check in checks)
    assert experiment.seeds >= 3

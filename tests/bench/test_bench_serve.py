"""bench/serve.py runs a real server with and without batching, and soaks one."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from fork_server import fast_python
from toy_run import Toy

BENCH = Path(__file__).resolve().parents[2] / "bench" / "serve.py"


def run_bench(toy: Toy, out: Path, *options: str) -> dict[str, object]:
    command = [fast_python(), str(BENCH), str(toy.run), "--quick", "--out", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(out.with_suffix(".json").read_text())
    return found


def test_the_server_is_compared_with_itself_without_batching(toy: Toy, tmp_path: Path) -> None:
    found = run_bench(toy, tmp_path / "serve")
    systems = found["systems"]
    assert isinstance(systems, dict)
    assert list(systems) == ["server, auto", "server without batching, auto"]
    assert all(one["sentences_per_second"] > 0 and one["errors"] == 0 for one in systems.values())
    assert (tmp_path / "serve.md").read_text().count("| server") == 2


def test_a_soak_has_no_errors_and_measures_memory(toy: Toy, tmp_path: Path) -> None:
    soak = run_bench(toy, tmp_path / "soak", "--soak", "0.02", "--replace", "1")["soak"]
    assert isinstance(soak, dict)
    assert soak["errors"] == 0
    assert soak["resident_mib"]
    assert len(soak["seconds_to_replace_the_model"]) == 1
    assert set(soak["at_the_end"].values()) == {0.0}

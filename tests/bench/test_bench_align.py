"""bench/align.py measures Dragoman's aligners on a few pairs, and leaves out peers that are not installed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from fork_server import fast_python

BENCH = Path(__file__).resolve().parents[2] / "bench" / "align.py"


def test_results_are_added_to_those_of_other_systems(tmp_path: Path) -> None:
    for system in ("dragoman ibm1", "dragoman joint-hmm"):
        options = ("--phrasebook", "200", "--quick", "--systems", system, "--out", str(tmp_path / "results"))
        done = subprocess.run([fast_python(), str(BENCH), *options], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "eflomal is left out" in done.stderr
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    assert [result["system"] for result in results] == ["dragoman ibm1", "dragoman joint-hmm"]
    assert all(result["pairs"] == 200 and result["cpu_seconds"] > 0 for result in results)
    assert results[1]["aer"]["default"] < results[0]["aer"]["default"]
    assert (tmp_path / "results.md").read_text().count("| phrasebook |") == 2

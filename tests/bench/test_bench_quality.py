"""bench/quality.py gives the scores of `evaluate`, seed by seed; bench/publish_results.py writes them into pages."""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fork_server import fast_python
from toy_run import SMALL, Call, CommandResult, fast_environment, read_run_events, write_corpus, write_recipe

ROOT = Path(__file__).parents[2]
TESTS = ("dev", "train")
DATA = {name: {"source": f"data/{name}.src", "target": f"data/{name}.trg"} for name in TESTS}
SECTIONS: dict[str, dict[str, object]] = {
    "data": {**DATA, "test": list(DATA.values()), "metrics": ["chrf", "bleu_tokens"]},
    "model": SMALL["model"],
    "train": {**SMALL["train"], "keep": 2, "average": 2, "ema": 0.5, "metric": "chrf"},
}
CHANGED = ["model.dropout=0.1", "search.beam=2"]


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "bench" / f"{name}.py")
    assert spec
    assert spec.loader
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def bench(recipe: Path, *arguments: object) -> CommandResult:
    """Run the benchmark in a fork of the server, and what it starts in others."""
    script = ROOT / "bench" / "quality.py"
    command = [fast_python(), str(script), str(recipe), *map(str, arguments)]
    options: Any = {"cwd": recipe.parent, "env": fast_environment(), "check": False}
    done = subprocess.run(command, capture_output=True, text=True, **options)
    return CommandResult(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text, and beside it a recipe that finds the text as data/..."""
    folder = tmp_path_factory.mktemp("quality")
    (folder / "text").mkdir()
    write_corpus(folder / "text")
    return folder


@pytest.fixture(scope="module")
def ran(corpus: Path) -> tuple[CommandResult, Path]:
    recipe = write_recipe(corpus / "recipe.yaml", **SECTIONS)
    out = corpus / "found.json"
    goals = ("--goals", 0, 1000)
    answer = bench(recipe, "--seeds", 3, 4, *CHANGED, "--data", "text", "--out", out, *goals)
    assert answer.code == 0, answer.err
    return answer, out


@pytest.fixture
def found(ran: tuple[CommandResult, Path]) -> dict[str, Any]:
    whole: dict[str, Any] = json.loads(ran[1].read_text(encoding="utf-8"))
    return whole


def test_a_seed_scores_what_evaluate_says(ran: tuple[CommandResult, Path], found: dict[str, Any], call: Call) -> None:
    run = ran[1].with_suffix("") / "seed-4"
    answer = call("evaluate", run, "--json")
    assert answer.code == 0, answer.err
    ours, theirs = found["seeds"]["4"]["tests"], [json.loads(line) for line in answer.out.splitlines()]
    assert [test["test"] for test in ours] == ["dev.src", "train.src"]
    for mine, other in zip(ours, theirs, strict=True):
        for name in ("chrf", "bleu_tokens"):
            assert mine[name]["value"] == other[name]["value"]
            assert mine[name]["signature"] == other[name]["signature"]


def test_mean_and_spread_are_those_of_the_seeds(ran: tuple[CommandResult, Path], found: dict[str, Any]) -> None:
    assert found["settings"] == CHANGED
    assert found["pairs"] == 200
    for place, test in enumerate(found["tests"]):
        values = [found["seeds"][seed]["tests"][place]["chrf"]["value"] for seed in ("3", "4")]
        assert test["chrf"]["values"] == values
        assert test["chrf"]["mean"] == pytest.approx(statistics.mean(values))
        assert (test["chrf"]["min"], test["chrf"]["max"]) == (min(values), max(values))
        assert test["chrf"]["sd"] == pytest.approx(statistics.stdev(values))
        assert f"| {test['test']} | chrf | {test['chrf']['mean']:.2f} |" in ran[0].out


def test_the_curve_ends_with_the_model_that_is_kept(ran: tuple[CommandResult, Path], found: dict[str, Any]) -> None:
    """The mean of the two best by dev here, as the recipe asks; and the clock is that of the run."""
    for seed in ("3", "4"):
        one = found["seeds"][seed]
        validated = [
            event["step"] for event in read_run_events(ran[1].with_suffix("") / f"seed-{seed}") if "chrf" in event
        ]
        assert [point["step"] for point in one["curve"]] == validated == [6, 12, 18, 24]
        assert one["curve"][-1]["test"] == pytest.approx(one["tests"][0]["chrf"]["value"])
        minutes = [point["minutes"] for point in one["curve"]]
        assert minutes == sorted(minutes)
        assert 0 < minutes[-1] <= one["train_seconds"] / 60 + 0.01
        assert one["other_seconds"] > 0
    firsts = [found["seeds"][seed]["curve"][0]["minutes"] for seed in ("3", "4")]
    assert found["reached"] == {"0": firsts, "1000": [None, None]}


def test_what_is_done_is_not_done_again(ran: tuple[CommandResult, Path], found: dict[str, Any], corpus: Path) -> None:
    """Seeds with other settings are no company."""
    out = ran[1]
    again = bench(corpus / "recipe.yaml", "--seeds", 3, *CHANGED, "--out", out)
    assert again.code == 0, again.err
    assert again.err == ""
    now = json.loads(out.read_text(encoding="utf-8"))
    assert {**now, "reached": found["reached"]} == found
    quality = module("quality")
    assert set(quality.Bench(corpus / "recipe.yaml", out, None, CHANGED, [1.0]).found) == {3, 4}
    assert quality.Bench(corpus / "recipe.yaml", out, None, CHANGED[:1], []).found == {}


def test_a_seed_that_fails_is_said(corpus: Path) -> None:
    answer = bench(corpus / "recipe.yaml", "--seeds", 1, "data.max_length=1", "--out", corpus / "bad.json")
    assert answer.code == 1
    assert "seed 1 failed" in answer.err
    assert "dragoman: " in answer.err
    assert not (corpus / "bad.json").exists()


def test_comments_are_no_other_version(tmp_path: Path) -> None:
    publish, recipe = module("publish_results"), tmp_path / "recipe.yaml"
    digests = []
    for text in ("train:\n  steps: 1\n", "# ours\ntrain:\n  # few\n  steps: 1\n", "train:\n  steps: 2\n"):
        recipe.write_text(text, encoding="utf-8")
        digests.append(publish.hash_recipe(recipe))
    assert digests[0] == digests[1] != digests[2]


def test_pages_say_what_was_found() -> None:
    """Who adds a result runs bench/publish_results.py."""
    publish = module("publish_results")
    for path, text in publish.update_files(publish.read_results(ROOT / "bench" / "results")):
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python bench/publish_results.py"


def test_every_figure_comes_from_a_file(found: dict[str, Any], tmp_path: Path) -> None:
    """Of two results of a recipe, one with settings changed: each in its table, the plain one in the recipe's head."""
    publish = module("publish_results")
    recipe = "recipes/translation/multi30k-tiny.yaml"
    plain = {**found, "recipe": recipe, "settings": [], "digest": publish.hash_recipe(ROOT / recipe)}
    old = {**plain, "recipe": recipe.replace("tiny", "larger")}  # of which another version was measured
    better = json.loads(json.dumps(plain))
    better["settings"] = ["train.ema=0.9"]
    better["tests"][0]["chrf"]["mean"] += 1.5
    for name, one in (("plain", plain), ("better", better), ("old", old)):
        (tmp_path / f"2026-01-01-quality-{name}-toy.json").write_text(json.dumps(one), encoding="utf-8")
    results = publish.read_results(tmp_path)
    mean = plain["tests"][0]["chrf"]["mean"]
    updated = {path.name: text for path, text in publish.update_files(results)}
    assert f"# measured: chrf {mean:.2f} / " in updated["multi30k-tiny.yaml"]
    assert "2026-01-01-quality-plain-toy.json" in updated["multi30k-tiny.yaml"]
    assert "# measured: not yet" in updated["multi30k-larger.yaml"]
    page = updated["recipes.md"]
    assert f"chrf {mean:.2f} (" in page
    assert "[`multi30k-larger`](../bench/results/2026-01-01-quality-old-toy.json) | an earlier version | " in page
    scores, methods = (page.split(f"<!-- end of {name} -->")[0] for name in ("scores", "methods"))
    assert "train.ema=0.9" not in scores
    assert f"| `train.ema=0.9` | {mean + 1.5:.2f} / " in methods
    assert " | +1.50 / +0.00 | " in methods
    assert "| never, never |" in page
    assert publish.update_page(page, results) == page

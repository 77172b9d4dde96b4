"""Every built-in recipe has valid settings and runs from end to end on a small generated corpus."""

from __future__ import annotations

import importlib.util
import json
import lzma
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dragoman.config.settings import parse_settings, parse_yaml
from dragoman.data.corpus import CorpusSettings, read_pairs
from dragoman.metrics.metrics import METRICS
from dragoman.recipe import Recipe, read_recipe
from dragoman.training.start import check_settings
from toy_run import Call, pairs, train_quietly

ROOT = Path(__file__).parents[2]
ALL = sorted(path for path in (ROOT / "recipes").rglob("*.yaml") if path.name != "questions.yaml")  # which is none
TASKS = sorted((ROOT / "recipes" / "tasks").glob("*.yaml"))
TRANSLATION = sorted((ROOT / "recipes" / "translation").glob("*.yaml"))
FEW = [
    "train.device=cpu", "train.precision=float32", "train.compile=false", "train.threads=1", "train.steps=2",
    "train.tokens=256", "train.warmup=1", "train.validate_lines=3", "data.cache=cache", "search.beam=1",
]  # fmt: skip
SMALL = {
    "transformer": ["model.layers=1", "model.width=16", "model.heads=2", "model.feedforward_width=16"],
    "rnn": ["model.layers=1", "model.width=16"],
    "smt": ["model.tuning_rounds=1", "model.n_best=10"],
}
EXTRA = {"lm": ["model.context=16"]}
SIZES = {"bpe": "tokenizer.size=300"}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT / "recipes")).removesuffix(".yaml")


def corpora(recipe: Recipe) -> Iterator[tuple[str, CorpusSettings]]:
    for split in ("train", "dev", "test"):
        yield from ((split, corpus) for corpus in getattr(recipe.data, split))


@pytest.mark.parametrize("path", ALL, ids=name)
def test_a_recipe_is_valid(path: Path) -> None:
    """Its names are in the registries, and its first comment says what it is, how to run it and what to expect."""
    recipe = read_recipe(path)
    check_settings(recipe)
    recipe.model.check()
    assert all(metric in METRICS for metric in recipe.data.metrics)
    head = path.read_text().split("\ndata:")[0]
    assert all(line.startswith("#") for line in head.splitlines())
    if path in TASKS + TRANSLATION:
        for wanted in ("Data: ", f"dragoman train {path.relative_to(ROOT)}", "Metric", "Published"):
            assert wanted in head
    if path in TRANSLATION:
        assert head.count("\n# measured: ") == 1  # bench/publish_results.py fills it in


@pytest.mark.parametrize("path", TASKS, ids=name)
def test_recipes_for_tokenized_text_use_bleu_tokens(path: Path) -> None:
    """The metric `bleu` would tokenize the text again."""
    recipe = read_recipe(path)
    if any("shakespeare-modern" in file for corpus in recipe.data.test for file in corpus.files):
        assert "bleu" not in recipe.data.metrics
        assert recipe.data.metrics[0] == "bleu_tokens_lc"
        assert recipe.train.metric in ("bleu_tokens_lc", "auto")


@pytest.mark.parametrize("path", [path for path in TASKS if path.stem.endswith(("-lstm", "-transformer"))], ids=name)
def test_the_recipes_of_a_task_differ_only_in_model_and_training(path: Path) -> None:
    """Otherwise the results of a Transformer and an LSTM could not be compared."""
    one, other = read_recipe(path), read_recipe(path.with_stem(path.stem.rsplit("-", 1)[0]))
    assert (one.data, one.search, one.train.metric) == (other.data, other.search, other.train.metric)
    assert one.tokenizer == other.tokenizer
    assert hasattr(one.model, "cell") == path.stem.endswith("-lstm") != hasattr(other.model, "cell")


def make_rows(corpus: CorpusSettings, split: str) -> Iterator[list[tuple[str, str]]]:
    """Yield rows of a table as names and values of its fields, for all splits if a column names the split."""
    for place, pair in enumerate(pairs(40, seed=len(split))):
        label = "01"[place % 2]  # where the target is a label, there must be few
        target = label if "classification" in corpus.tsv else pair.target
        left, right = map(str, corpus.columns) if corpus.tsv else corpus.keys
        fields = [(left, pair.source), (right, target)]
        for part in ("train", "dev", "test") if corpus.where else ("",):
            yield [*fields, *((column, part) for column in corpus.where)]


def make_file_text(corpus: CorpusSettings, setting: str, split: str) -> str:
    """Return the text of a small file for this setting of a corpus."""
    many = pairs(40, seed=len(split))
    if setting == "tsv":
        width = 1 + max(*corpus.columns, *map(int, corpus.where or {"0": ""}))
        tables = (dict(row) for row in make_rows(corpus, split))
        lines = ["\t".join(table.get(str(column), "x") for column in range(width)) for table in tables]
    elif setting == "jsonl":
        lines = [json.dumps({**dict(row), "other": 1}) for row in make_rows(corpus, split)]
    elif setting == "dialogue":
        turns = [(place % 4 + 1, pair) for place, pair in enumerate(many)]
        lines = [f"{n} {pair.source}" + (f"\t{pair.target}" if n != 3 else "") for n, pair in turns]
    else:
        lines = [pair.target if setting == "target" else pair.source for pair in many]
    return "\n".join(lines) + "\n"


def write_corpora(folder: Path, recipe: Recipe) -> None:
    """Write all files that the recipe names, small and generated."""
    for split, corpus in corpora(recipe):
        for setting in ("source", "target", "tsv", "jsonl", "dialogue", "text"):
            if named := getattr(corpus, setting):
                path = folder / named
                path.parent.mkdir(parents=True, exist_ok=True)
                data = make_file_text(corpus, setting, split).encode()
                path.write_bytes(lzma.compress(data) if path.suffix == ".xz" else data)


def overrides(recipe: Recipe) -> list[str]:
    kind = recipe.model.kind
    size = [SIZES[recipe.tokenizer.kind]] if recipe.tokenizer.kind in SIZES else []
    return [*FEW, *SMALL[getattr(recipe.model, "backbone", kind)], *EXTRA.get(kind, []), *size]


@pytest.mark.parametrize("path", TASKS + TRANSLATION, ids=name)
def test_a_task_runs_from_end_to_end(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = parse_settings(Recipe, parse_yaml(path.read_text(), path.name))
    assert all(not Path(file).is_absolute() for _, corpus in corpora(recipe) for file in corpus.files)
    write_corpora(tmp_path, recipe)
    run = train_quietly(path, tmp_path / "run", *overrides(recipe))
    answer = call("evaluate", run, "--json")
    assert answer.code == 0, answer.err
    results = [json.loads(line) for line in answer.out.splitlines()]
    assert len(results) == len(recipe.data.test)
    for result, corpus in zip(results, recipe.data.test, strict=True):
        counted = [key for key, held in result.items() if isinstance(held, dict) and "value" in held]
        assert counted
        assert set(recipe.data.metrics) <= set(counted)
        if recipe.model.task != "generate":
            assert result["lines"] == len(list(read_pairs(corpus)))


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tasks", ROOT / "bench" / "tasks.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_benchmark_has_every_task(bench: ModuleType) -> None:
    assert {task.recipe for task in bench.TASKS.values()} == {path.stem for path in TASKS}
    for task in bench.TASKS.values():
        recipe = read_recipe(ROOT / "recipes" / "tasks" / f"{task.recipe}.yaml", task.settings)
        assert len(task.published) == len(recipe.data.test)
        assert all(key in METRICS or key == "loss" for figures in task.published for key in figures)
    assert {key for key, metric in METRICS.items() if not metric.higher_is_better} <= bench.LOWER


def test_the_benchmark_reports_results(bench: ModuleType, tmp_path: Path) -> None:
    """It reports means over seeds beside published numbers, and does not repeat finished runs."""

    def result(value: float) -> dict[str, Any]:
        test = {"run": "r", "test": "/a/t.tsv", "lines": 3, "warnings": {}, "exact": {"value": value, "signature": "s"}}
        return {"seconds": 60.0, "parameters": 1000, "tests": [test]}

    one = bench.Bench(tmp_path / "out", tmp_path, [1, 2], [])
    for seed, value in ((1, 60.0), (2, 70.0)):
        one.result("geo", seed).write_text(json.dumps(result(value)))
        one.run("geo", seed)  # would fail: there is no data
    one.write_tables()
    [row] = json.loads((tmp_path / "out" / "tasks.json").read_text())
    assert (row["task"], row["metric"], row["reached"], row["values"]) == ("geo", "exact", 65.0, [60.0, 70.0])
    one.result("geo-transformer", 1).write_text(json.dumps(result(50.0)))
    one.write_tables()
    rows = json.loads((tmp_path / "out" / "tasks.json").read_text())
    assert [(row["task"], row["model"], row["reached"]) for row in rows] == [
        ("geo", "LSTM", 65.0),
        ("geo-transformer", "Transformer", 50.0),
    ]
    text = (tmp_path / "out" / "tasks.md").read_text()
    assert "| geo | LSTM | t.tsv | exact | 65.00 (60.00 to 70.00) | 2 | 63 (attention), 71 (copying) |" in text


def test_the_benchmark_stops_at_its_time_limit(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A running process gets a signal, and nothing is started that took longer before than the time that is left."""
    (tmp_path / "started").touch()
    program = "import sys, time; open('../started', 'a').write(' '.join(sys.argv[1:]) + '\\n'); time.sleep(60)"
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} -c "{program}" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(bench.sys, "executable", str(tmp_path / "python"))
    one = bench.Bench(tmp_path / "out", tmp_path, [1, 2], [], minutes=2 / 60)
    seconds = {"seconds": 60.0, "run_seconds": 70.0, "parameters": 1000, "tests": []}
    one.result("geo", 1).write_text(json.dumps(seconds))
    start = time.monotonic()
    one.run_all([("geo", 1), ("geo", 2), ("atis", 1), ("scan-simple", 1)], at_once=1)
    assert time.monotonic() - start < 30
    [line] = (tmp_path / "started").read_text().splitlines()
    assert "atis.yaml" in line
    assert not one.processes
    assert not one.result("atis", 1).exists()

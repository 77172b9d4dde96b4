"""Tests of `compare`: comparable recipes, one process per run, resuming, measurements and the report page."""

from __future__ import annotations

import json
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from dragoman.compare.measure import LENGTH_BINS, choose_metrics, measure_distances, measure_lengths, measure_run
from dragoman.compare.questions import answer_question, check_questions, read_questions
from dragoman.compare.report import render_comparison, run_comparison, summarise
from dragoman.compare.runs import find_recipes, plan_runs, read_measurements
from dragoman.errors import UserError
from dragoman.phrasebook.generate import generate_phrases
from dragoman.progress import Report
from dragoman.training.trainer import train
from dragoman.types import Pair
from fork_server import fast_python
from toy_heads import classifier_recipe, lm_recipe
from toy_report import measurements_of, report_of
from toy_run import SMALL, Call, assert_user_error, read_tensor_files, start_process, write_corpus, write_recipe

pytestmark = pytest.mark.slow
RECIPES = Path(__file__).parents[2] / "recipes"
FOLDERS = [RECIPES / name for name in ("lectures", "lengths")]
TIMING_KEYS = {"seconds", "tokens_per_second", "greedy", "beam", "peak_memory", "train_seconds"}
TIMING_KEYS |= {"greedy_per_second", "beam_per_second"}
MODELS = {
    "attention": {"layers": 1, "width": 16, "heads": 2},
    "bottleneck": {"kind": "rnn", "layers": 1, "width": 16, "attention": "none"},
}


def write_recipes(folder: Path, **train: object) -> list[Path]:
    """Write recipes of a Transformer and a recurrent model on the toy language, and a question about them."""
    folder.mkdir(exist_ok=True)
    write_corpus(folder)
    paths = []
    for name, model in MODELS.items():
        path = write_recipe(folder / f"{name}.yaml", train={**SMALL["train"], **train})
        whole = yaml.safe_load(path.read_text())
        whole["model"], whole["data"]["test"] = model, whole["data"]["dev"]
        path.write_text(yaml.safe_dump(whole))
        paths.append(path)
    questions = {"title": "Toys", "questions": [{"title": "Who?", "figure": "length"}]}
    (folder / "questions.yaml").write_text(yaml.safe_dump(questions))
    return paths


def remove_timings(value: Any) -> Any:
    """Return a report without the values that depend on time and memory."""
    if isinstance(value, dict):
        return {key: remove_timings(each) for key, each in value.items() if key not in TIMING_KEYS}
    return [remove_timings(each) for each in value] if isinstance(value, list) else value


def read_report(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "report.json").read_text())
    return found


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished comparison. The recipes are in the folder `recipes` beside it."""
    folder = tmp_path_factory.mktemp("compare")
    write_recipes(folder / "recipes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", fast_python())
        run_comparison([folder / "recipes"], out=folder / "out")
    return folder / "out"


def test_report_has_all_measurements(finished: Path) -> None:
    found = read_report(finished)
    assert found["title"] == "Toys"
    assert [model["name"] for model in found["models"]] == list(MODELS)
    assert found["about"]["budget"] == {"steps": 24}
    for model in found["models"]:
        numbers = model["numbers"]
        assert all(numbers[name]["mean"] > 0 for name in measured_columns(numbers))
        [run] = model["runs"]
        assert [point["step"] for point in run["training"]["curve"]] == [6, 12, 18, 24]
        assert sum(row["lines"] for row in run["tests"]["dev.src"]["lengths"]) == 20
        assert run["gradient"]["target"][0] == run["gradient"]["source"][0] == 1.0
    assert found["questions"][0]["answer"].startswith("At ")


def measured_columns(numbers: dict[str, Any]) -> list[str]:
    """Return the columns whose numbers are positive even if the toy models score 0."""
    wanted = {"parameters", "tokens_per_second", "greedy_per_second", "beam_per_second", "peak_memory", "flops"}
    assert wanted < numbers.keys()
    return sorted(wanted)


def test_runs_are_ordinary_run_folders(finished: Path, call: Call) -> None:
    answer = call("info", finished / "runs" / "bottleneck-seed1", "--json")
    assert answer.code == 0
    assert json.loads(answer.out)["model"]["attention"] == "none"


def test_finished_runs_are_not_repeated(finished: Path, call: Call) -> None:
    before, bytes_before = read_tensor_files(finished), (finished / "report.json").read_bytes()
    answer = call("compare", finished.parent / "recipes", "--out", finished)
    assert answer.code == 0, answer.err
    assert answer.out.splitlines()[0].split()[:3] == ["model", "BLEU", "dev.src"]
    assert "Who?" in answer.out
    answer = call("compare", finished.parent / "recipes", "--out", finished, "--json")
    assert "2 of 2 runs were finished before" in answer.err
    assert json.loads(answer.out) == json.loads(bytes_before)
    assert read_tensor_files(finished) == before
    assert (finished / "report.json").read_bytes() == bytes_before


@pytest.mark.usefixtures("fast_processes")
def test_killed_comparison_resumes(finished: Path, tmp_path: Path) -> None:
    """Killed at its first checkpoint, it leaves no process behind. The same command then gives the same report."""
    out, recipe = tmp_path / "out", finished.parent / "recipes" / "attention.yaml"
    arguments = ("compare", recipe, "--out", out)
    with start_process(*arguments) as running:
        wait_until(lambda: any(out.glob("runs/attention-seed1/checkpoints/step-*")))
        running.kill()
        running.communicate()  # wait until all its processes have closed their output
    assert not (out / "report.json").exists()
    kept = {file.name: file.read_bytes() for file in out.glob("runs/*.json")}
    run_comparison([recipe], out=out)
    assert remove_timings(read_report(out)["models"]) == remove_timings(read_report(finished)["models"][:1])
    assert all((out / "runs" / name).read_bytes() == held for name, held in kept.items())


def wait_until(ready: Any, most: float = 60.0) -> None:
    until = time.monotonic() + most
    while not ready():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.usefixtures("fast_processes")
def test_failed_run_does_not_stop_the_others(tmp_path: Path, call: Call) -> None:
    write_recipes(tmp_path / "recipes")
    spoilt = tmp_path / "recipes" / "attention.yaml"
    whole = yaml.safe_load(spoilt.read_text())
    whole["train"] |= {"lr": 1e30, "clip": 0.0, "save_every": 100, "validate_every": 0}
    spoilt.write_text(yaml.safe_dump(whole))
    answer = call("compare", tmp_path / "recipes", "--out", tmp_path / "out", "--jobs", 2)
    assert answer.code == 2
    assert answer.err.splitlines()[-1].startswith("dragoman: runs of attention failed")
    found = read_report(tmp_path / "out")
    assert "not finite" in found["models"][0]["failures"][0]["why"]
    assert found["models"][1]["numbers"]["parameters"]
    assert "not finite" in (tmp_path / "out" / "report.html").read_text()
    assert "shared the machine" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize(
    ("section", "key", "value", "culprits"),
    [
        ("data", "max_length", 5, ("data.max_length", "attention", "bottleneck")),
        ("data", "direction", "de-en", ("data.direction", "attention", "bottleneck")),
        ("train", "steps", 7, ("train.steps", "attention", "bottleneck", "train.steps=24")),
        ("train", "tokens", 256, ("train.tokens", "attention", "bottleneck")),
        ("train", "minutes", 1.0, ("train.minutes", "attention", "bottleneck")),
        ("train", "optimizer", "adamm", ("bottleneck.yaml", "did you mean")),
        ("model", "cell", "lsmt", ("bottleneck.yaml", "did you mean")),
        ("data", "test", {"tsv": "nowhere.tsv"}, ("bottleneck.yaml", "nowhere.tsv")),
    ],
)
def test_recipes_that_cannot_be_compared_are_refused(
    tmp_path: Path, call: Call, section: str, key: str, value: object, culprits: tuple[str, ...]
) -> None:
    paths = write_recipes(tmp_path / "recipes")
    whole = yaml.safe_load(paths[1].read_text())
    whole[section][key] = value
    paths[1].write_text(yaml.safe_dump(whole))
    assert_user_error(call("compare", *paths, "--out", tmp_path / "out"), *culprits)
    assert not (tmp_path / "out").exists()


def test_overrides_apply_to_all_recipes(tmp_path: Path) -> None:
    paths = write_recipes(tmp_path / "recipes")
    paths[1].write_text(paths[1].read_text().replace("steps: 24", "steps: 7"))
    runs = plan_runs(paths, tmp_path / "out", ["train.steps=9"], 2)
    assert {run.recipe.train.steps for run in runs} == {9}
    assert [(run.name, run.seed) for run in runs] == [(name, seed) for seed in (1, 2) for name in MODELS]


def test_runs_with_other_settings_are_refused(finished: Path, call: Call) -> None:
    answer = call("compare", finished.parent / "recipes", "--out", finished, "train.lr=0.1")
    assert_user_error(answer, "attention-seed1", "train.lr=0.004", "0.1", "--out")


def test_report_does_not_replace_one_of_more_recipes(finished: Path, call: Call) -> None:
    before, (first, *others) = (finished / "report.json").read_bytes(), MODELS
    answer = call("compare", finished.parent / "recipes" / f"{first}.yaml", "--out", finished)
    assert_user_error(answer, "contains runs of other recipes", *others, "choose another --out")
    assert (finished / "report.json").read_bytes() == before


def test_settings_without_effect_on_results_may_change(finished: Path, call: Call) -> None:
    assert (
        call("compare", finished.parent / "recipes", "--out", finished, "train.log_every=2", "train.threads=2").code
        == 0
    )


def test_measurements_of_another_version_are_ignored(finished: Path, tmp_path: Path) -> None:
    [run, *_] = plan_runs([finished.parent / "recipes"], finished, [], 1)
    assert read_measurements(run) is not None
    copy = run._replace(folder=tmp_path / "runs" / "x-seed1")
    copy.folder.parent.mkdir()
    for torn_or_old in ("{", json.dumps({"version": 0})):
        copy.file(".json").write_text(torn_or_old)
        assert read_measurements(copy) is None


@pytest.mark.parametrize(
    ("question", "culprits"),
    [
        ({"models": ["nobody"]}, ("'Who?'", "models")),
        ({"better": "attention"}, ("'Who?'", "better and worse")),
        ({"better": "attention", "worse": "botleneck"}, ("'Who?'", "'botleneck'", "'bottleneck'")),
        ({"figure": "setting", "x": "model.cell", "lines": "model.width"}, ("model.cell", "attention")),
        ({"figure": "setting", "x": "model.kind", "lines": "model.width"}, ("model.kind", "not a number")),
    ],
)
def test_invalid_questions_are_refused_before_the_runs(
    tmp_path: Path, call: Call, question: dict[str, object], culprits: tuple[str, ...]
) -> None:
    write_recipes(tmp_path / "recipes")
    asked = {"questions": [{"title": "Who?", "figure": "length", **question}]}
    (tmp_path / "recipes" / "questions.yaml").write_text(yaml.safe_dump(asked))
    assert_user_error(call("compare", tmp_path / "recipes", "--out", tmp_path / "out"), *culprits)
    assert not (tmp_path / "out").exists()


def test_models_of_different_tasks_are_refused(tmp_path: Path, call: Call) -> None:
    paths = write_recipes(tmp_path / "recipes")
    whole = yaml.safe_load(paths[1].read_text())
    paths[1].write_text(yaml.safe_dump({**whole, "model": {"kind": "lm", "layers": 1}}))
    assert_user_error(call("compare", *paths, "--out", tmp_path / "out"), "model.kind", "translate", "generate")


def test_recipes_without_test_data_are_refused(tmp_path: Path, call: Call) -> None:
    write_recipes(tmp_path / "recipes")
    nothing = ("data.test=[]", "data.dev=[]")
    assert_user_error(
        call("compare", tmp_path / "recipes", "--out", tmp_path / "out", *nothing), "data.test", "attention"
    )


def test_missing_and_duplicate_recipes_are_refused(tmp_path: Path, call: Call) -> None:
    (tmp_path / "empty").mkdir()
    assert_user_error(call("compare", tmp_path / "empty", "--out", tmp_path / "out"), "no recipe", "empty")
    assert_user_error(call("compare", tmp_path / "none.yaml", "--out", tmp_path / "out"), "none.yaml")
    assert_user_error(call("compare", "train.steps=3", "--out", tmp_path / "out"), "compare needs recipes")
    paths = write_recipes(tmp_path / "recipes")
    twins = write_recipes(tmp_path / "twins")
    assert_user_error(call("compare", paths[0], twins[0], "--out", tmp_path / "out"), "two recipes", "attention")


# The page


class TagChecker(HTMLParser):
    """Check that tags are closed in order, and collect references to other resources."""

    VOID = ("meta", "br", "input", "link", "img")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.references += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "srcset", "data")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("models", [1, 3, 20])
@pytest.mark.parametrize("seeds", [1, 3])
def test_page_is_valid_and_self_contained(models: int, seeds: int) -> None:
    text = render_comparison(report_of(models=models, seeds=seeds))
    parser = TagChecker()
    parser.feed(text)
    parser.close()
    assert parser.open == parser.references == []
    assert not any(mark in text for mark in ("http:", "https:", "url(", "@import", "fetch("))
    assert text.count("<svg") == (5 if models <= 6 else 10)  # five figures; for many models, one chart per family
    assert ("Grey: the models of the other families" in text) == (models > 6)
    assert ("bands reach from the lowest seed" in text) == (seeds > 1)
    for number in range(models):
        assert f"model-{number}</th>" in text


def test_page_shows_means_and_ranges() -> None:
    made = report_of(models=2, seeds=3)
    made["questions"] = [
        answer_question(question, made) for question in read_questions([RECIPES / "nowhere"]).questions
    ]
    text = render_comparison(made)
    assert "A &lt;comparison&gt;" in text
    assert "21.0<span" in text  # the mean of 20, 21 and 22
    assert "±1.0" in text
    assert "1,024 MiB" in text


def test_few_models_share_one_chart() -> None:
    made = report_of(models=3, seeds=1)
    for number, model in enumerate(made["models"]):
        model["family"] = f"family {number}"
    curves = render_comparison(made).split("<h2>Learning curves")[1].split("<h2>")[0]
    assert curves.count("<svg") == 1
    assert [f"stroke: var(--line{number})" in curves for number in range(4)] == [True] * 3 + [False]
    assert 'class="behind"' not in curves


def test_footer_describes_the_data_without_folders() -> None:
    made = report_of(models=1, seeds=1)
    corpus = {"source": "/home/someone/train.en", "target": "/home/someone/<train>.de"}
    made["about"]["data"] = {"train": [corpus], "dev": [{"phrasebook": 500}], "max_length": 14, "metrics": ["bleu"]}
    text = render_comparison(made)
    assert "Data: training: train.en and &lt;train&gt;.de; validation: phrasebook (500 pairs); max length 14;" in text
    assert "/home" not in text
    assert "{" not in text.split("</table>")[-1].split("<script>")[0]


def test_memory_heading_depends_on_the_device() -> None:
    made = report_of(models=1, seeds=1)
    assert ">peak memory of the process</th>" in render_comparison(made)
    made["about"]["devices"] = ["cuda"]
    assert ">peak GPU memory</th>" in render_comparison(made)


@pytest.mark.parametrize(
    ("model", "family", "missing"),
    [
        ({"position": "none"}, "Transformer, ablated", ["positions"]),
        ({"norm": "none", "residual": False}, "Transformer, ablated", ["normalisation", "residual connections"]),
        ({}, "Transformer", []),
        ({"attention": "local"}, "Transformer, efficient attention", []),
        ({"kind": "rnn", "attention": "none"}, "recurrent, one vector", []),
    ],
)
def test_family_and_missing_parts_of_a_model(
    tmp_path: Path, model: dict[str, object], family: str, missing: list[str]
) -> None:
    """An ablated Transformer lists the parts that it lacks."""
    [path, _] = write_recipes(tmp_path)
    whole = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**whole, "model": {"layers": 1, "width": 16} | model}))
    [run] = plan_runs([path], tmp_path / "out", [], 1)
    measured = measurements_of(20.0)
    found = summarise([run], {run.folder: measured}, {}, jobs=1) | {"title": "t", "questions": []}
    [told] = found["models"]
    assert (told["family"], told["missing"]) == (family, missing)
    assert (f"Transformer without {', '.join(missing)}</td>" in render_comparison(found)) == bool(missing)


@pytest.mark.parametrize(
    ("changes", "unfair"),
    [
        ({}, False),
        ({"tokens_per_second": 170.0, "steps": 25, "tokens": 2500, "flops": 2.5e10}, False),  # 18 % slower
        ({"tokens_per_second": 130.0, "steps": 20, "tokens": 2000, "flops": 2.02e10}, True),
        (
            {"tokens_per_second": 130.0, "steps": 20, "tokens": 2000, "flops": 4e10},
            False,
        ),  # costs twice as much per token
        ({"tokens_per_second": 130.0}, False),  # made as many steps nevertheless
        ({"tokens_per_second": None, "steps": 0, "tokens": 0, "flops": 0.0}, False),
        ({"tokens_per_second": None, "steps": 20}, False),  # logged no speed: the mean of 200 tokens/s is used
    ],
)
@pytest.mark.parametrize("budget", ["minutes", "steps"])
def test_unfair_budget_in_minutes_is_reported(
    tmp_path: Path, changes: dict[str, Any], unfair: bool, budget: str
) -> None:
    """Runs with equally many FLOPs per token are compared. A budget in steps is always fair."""
    runs = plan_runs(write_recipes(tmp_path), tmp_path / "out", [f"train.{budget}=1"], 1)
    measurements = {run.folder: measurements_of(20.0) for run in runs}
    measurements[runs[1].folder]["training"] |= changes
    whole = summarise(runs, measurements, {}, jobs=1) | {"title": "t", "questions": []}
    assert len(whole["warnings"]) == (unfair and budget == "minutes")
    for warning in whole["warnings"]:
        assert "bottleneck (seed 1) trained at 130 tokens/s (20 steps) and attention (seed 1) at 200 (30" in warning
        assert "train.minutes=0 train.steps=30" in warning
        assert warning in render_comparison(whole)


def test_warnings_go_to_stderr(finished: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "dragoman.compare.report.summarise", lambda *_, **__: {**read_report(finished), "warnings": ["Unfair!"]}
    )
    monkeypatch.setattr("dragoman.compare.report.write_text", lambda *_: None)  # other tests read the files
    answer = call("compare", finished.parent / "recipes", "--out", finished)
    assert "Unfair!" in answer.err
    assert "Unfair!" not in answer.out


def test_the_page_of_a_real_comparison(finished: Path) -> None:
    text = (finished / "report.html").read_text()
    TagChecker().feed(text)
    assert "Who?" in text
    assert read_report(finished)["questions"][0]["answer"].replace("&", "&amp;") in text
    for svg in text.split("<svg")[1:]:
        ElementTree.fromstring("<svg" + svg.split("</svg>")[0] + "</svg>")


# Measuring


def test_every_line_is_in_one_length_bin() -> None:
    pairs = [Pair("w " * count, "a b") for count in range(1, 100)]
    rows = measure_lengths(pairs, ["a b"] * 99, "exact")
    assert sum(row["lines"] for row in rows) == 99
    assert all(row["value"] == 100 for row in rows)
    assert [row["low"] for row in rows] == [low for low, _ in LENGTH_BINS]


def test_every_phenomenon_is_in_one_distance_bin() -> None:
    """The references have all phenomena right at every distance, empty translations none."""
    phrases = list(generate_phrases("test", 60))
    right = measure_distances(phrases, [phrase.target for phrase in phrases])
    wrong = measure_distances(phrases, [""] * 60)
    assert sum(row["lines"] for row in right) == sum(len(phrase.phenomena) for phrase in phrases)
    assert {row["value"] for row in right} == {100.0}
    assert {row["value"] for row in wrong} == {0.0}
    assert len(right) > 3


@pytest.mark.parametrize("write", [lm_recipe, classifier_recipe], ids=["lm", "classifier"])
def test_language_models_and_classifiers_are_measured(tmp_path: Path, write: Any) -> None:
    """Language models and classifiers have no lengths and no gradients in their reports, but all the rest."""
    [run] = plan_runs([write(tmp_path, steps=4, validate_every=2)], tmp_path / "out", [], 1)
    train(run.recipe, out=run.folder, report=Report(quiet=True))
    measured = measure_run(run.folder, device="cpu")
    [name] = measured["tests"]
    assert "/" not in name  # without folders, which mean nothing to readers
    metric = choose_metrics(run.recipe)[0]
    assert measured["tests"][name]["scores"][metric] >= 0
    whole = summarise([run], {run.folder: measured}, {}, jobs=1) | {"title": "t", "questions": []}
    assert whole["models"][0]["numbers"][f"{metric} {name}"] is not None
    text = render_comparison(whole)
    TagChecker().feed(text)
    assert "Learning curves" in text
    assert "Quality by length" not in text


# The recipes of this repository


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_recipes_of_a_folder_differ_only_in_the_model(folder: Path, tmp_path: Path) -> None:
    """`compare` checks data and budget; tokenizer, search and training must be equal too."""
    runs = plan_runs([folder], tmp_path, [], 1)
    assert len(runs) == len(find_recipes([folder]))
    check_questions(read_questions([folder]), runs)
    assert len({(run.recipe.tokenizer, run.recipe.search) for run in runs}) == 1
    own = {"lr", "warmup"}  # may depend on the model
    assert len({run.recipe.train.model_dump_json(exclude=own) for run in runs}) == 1


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_questions_are_about_existing_recipes(folder: Path) -> None:
    names = [path.stem for path in find_recipes([folder])]
    made = report_of(models=len(names), seeds=1)
    for model, name in zip(made["models"], names, strict=True):
        model["name"] = name
    for question in read_questions([folder]).questions:
        assert "No answer" not in answer_question(question, made)["answer"]


def test_folders_with_different_data_cannot_be_compared(tmp_path: Path) -> None:
    assert len(plan_runs([RECIPES / "lectures"], tmp_path, [], 1)) >= 20
    with pytest.raises(UserError, match=r"data\.max_length"):
        plan_runs([RECIPES / "lectures", RECIPES / "lengths"], tmp_path, [], 1)

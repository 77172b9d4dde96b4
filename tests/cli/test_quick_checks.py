"""Errors in a command line are reported before PyTorch is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dragoman import recipe as recipe_files
from dragoman.cli.options import ENGINE_NAMES, FORMAT_NAMES, check_arguments, check_recipe
from dragoman.errors import UserError
from dragoman.inference import export
from dragoman.inference import loading as choose
from toy_run import Call, assert_user_error, write_corpus, write_recipe

NOWHERE = Path("/nowhere/at/all")
PROGRAM = """
import json, sys
from dragoman.cli import main as cli
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["dragoman", *arguments]
    try:
        cli.main()
    except SystemExit as end:
        print("\\x00", end.code, sorted({"torch", "transformers", "ctranslate2"} & set(sys.modules)), arguments)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a recipe with its corpus, and a folder that passes as a run folder until it is loaded."""
    write_corpus(tmp_path, train=4, dev=2)
    write_recipe(tmp_path / "recipe.yaml")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "FORMAT").write_text("1\n")
    return tmp_path


def outcomes(folder: Path, commands: list[str]) -> list[str]:
    given = json.dumps([command.split() for command in commands])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, given], cwd=folder, capture_output=True, text=True, check=True
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("\x00")]
    assert len(found) == len(commands), done.stderr
    return found


def test_user_errors_are_reported_before_pytorch_is_imported(folder: Path) -> None:
    wrong = [
        "translate none",
        "translate run --engine ct2",
        "translate run --input none",
        "translate run --with none",
        "translate run --glossary none",
        "classify none",
        "classify run -i none",
        "generate none",
        "generate run --top-p 2",
        "evaluate run --source dev.src --reference none",
        "evaluate run --source none --reference dev.trg",
        "evaluate none --phrasebook test",
        "evaluate run --phrasebook test --engine ct2",
        "score run --source dev.src --target none",
        "train none.yaml --out new",
        "train recipe.yaml --out new train.stepps=3",
        "train recipe.yaml --out new train.learning_rate=3",
        "train recipe.yaml --out new --init-from none",
        "train recipe.yaml --out new data.train={tsv:none}",
        "train recipe.yaml --out new data.dev.source=none",
        "fit none.yaml",
        "distil none recipe.yaml --out new",
        "distil run none.yaml --out new",
        "backtranslate run -i none -o new",
        "compare none.yaml",
        "compare none",
        "export run new --to hf",
        "export none new --to onnx",
        "info none",
        "settings nonsense",
        "data clean --source train.src --target train.trg --out new max_ration=3",
        "data stats --source none --target train.trg",
    ]
    assert [line for line in outcomes(folder, wrong) if not line.startswith("\x00 2 [] ")] == []
    assert not (folder / "new").exists()


def test_commands_without_a_model_do_not_import_pytorch(folder: Path) -> None:
    right = [
        "--help",
        "settings",
        "settings model.kind=rnn",
        "settings beam --json",
        "recipes",
        "cache --folder none",
        "data stats --source train.src --target train.trg",
        "data clean --source train.src --target train.trg --out clean",
    ]
    assert [line for line in outcomes(folder, right) if not line.startswith("\x00 0 [] ")] == []


def test_copied_names_equal_the_registries() -> None:
    assert list(ENGINE_NAMES) == list(choose.ENGINES)
    assert list(FORMAT_NAMES) == list(export.EXPORT_FORMATS)


def test_names_of_other_toolkits_are_understood(folder: Path, call: Call) -> None:
    assert "did you mean 'ctranslate2'?" in call("translate", folder / "run", "--engine", "ct2").err
    assert "did you mean 'huggingface'?" in call("export", folder / "run", folder / "new", "--to", "hf").err


@pytest.mark.parametrize(
    "name", ["recipes/lectures", "lectures", "lectures/21-rotary", "recipes/lectures/21-rotary.yaml", "multi30k-en-de"]
)
def test_built_in_recipes_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    found = recipe_files.find_recipe(Path(name))
    assert found.is_absolute()
    assert found.exists()
    (tmp_path / name).mkdir(parents=True)
    assert recipe_files.find_recipe(Path(name)) == Path(name)


def test_wheel_contains_the_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = tmp_path / "site-packages" / "dragoman" / "recipes" / "lectures"
    inside.mkdir(parents=True)
    (inside / "one.yaml").write_text("# What it is.\ndata: {}\n")
    monkeypatch.setattr(recipe_files, "PACKAGE", tmp_path / "site-packages" / "dragoman")
    monkeypatch.chdir(tmp_path)
    assert recipe_files.find_recipe(Path("recipes/lectures")) == inside
    assert list(recipe_files.list_recipes()) == [("lectures/one", "What it is.")]
    assert recipe_files.find_recipe(Path("none.yaml")) == Path("none.yaml")


def test_every_recipe_is_listed(call: Call) -> None:
    names = [line.split()[0] for line in call("recipes").out.splitlines()]
    assert "lectures/21-rotary" in names
    assert all(recipe_files.find_recipe(Path(name)).is_file() for name in names)


def test_checks_are_skipped_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine of a rank may lack the recipe, and only rank 0 prints an error."""
    wrong: list[dict[str, Any]] = [{"runs": [NOWHERE]}, {"inputs": [NOWHERE]}, {"output": NOWHERE / "file"}]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    for check in [partial(check_recipe, NOWHERE), *(partial(check_arguments, **each) for each in wrong)]:
        monkeypatch.setenv("WORLD_SIZE", "1")
        with pytest.raises(UserError):
            check()
        monkeypatch.setenv("WORLD_SIZE", "2")
        check()


def test_null_character_in_a_name() -> None:
    with pytest.raises(UserError, match="cannot be read: embedded null"):
        check_arguments(inputs=[Path("a\0b")])


def test_misspelt_recipe_name_is_corrected(call: Call, tmp_path: Path) -> None:
    assert_user_error(call("train", "mutli30k-en-de", "--out", tmp_path / "run"), "did you mean 'multi30k-en-de'")

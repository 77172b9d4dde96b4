"""The documents speak of what is there: every name on a menu of models, tokenizers and metrics, every recipe."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_type_hints

import pytest
import typer

from dragoman.cli.main import app
from dragoman.cli.models import export_command
from dragoman.cli.translate import TranslateOptions
from dragoman.data.tokenizers import TOKENIZERS
from dragoman.decoding.methods import SEARCH_REGISTRIES, SearchSettings
from dragoman.inference.export import EXPORT_FORMATS
from dragoman.inference.loading import ENGINES
from dragoman.inference.postprocess import UNKNOWN_WORD_METHODS
from dragoman.metrics.metrics import METRICS
from dragoman.recipe import check_model, list_model_kinds, read_recipe
from dragoman.smt.settings import DecoderSettings, SmtSettings
from dragoman.training.start import check_settings
from test_architecture import BASE, MAY_IMPORT  # type: ignore[import-not-found]
from toy_models import HYBRID, RNN, TRANSFORMER

ROOT = Path(__file__).parents[1]
MODELS_PAGE = (ROOT / "docs/models.md").read_text(encoding="utf-8")
TASKS_PAGE = (ROOT / "docs/tasks.md").read_text(encoding="utf-8")
RECIPES_PAGE = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
SEARCH_PAGE = (ROOT / "docs/search.md").read_text(encoding="utf-8")
EXCHANGE_PAGE = (ROOT / "docs/exchange.md").read_text(encoding="utf-8")


def row(page: str, section: str, setting: str) -> str:
    """The line of a setting in the table of a section."""
    part = page.split(f"## `kind: {section}`")[1].split("\n## ")[0]
    return next(line for line in part.splitlines() if re.match(rf"\| .*`{setting}`", line))


OF_DECODER = {setting: menu for setting, menu in HYBRID.items() if setting not in TRANSFORMER}


@pytest.mark.parametrize(("kind", "menus"), [("rnn", RNN), ("transformer", TRANSFORMER), ("hybrid", OF_DECODER)])
def test_every_choice_of_a_model_is_told(kind: str, menus: dict[str, list[object]]) -> None:
    for setting, menu in menus.items():
        if setting in ("tied", "decoder_attention"):
            continue
        told = row(MODELS_PAGE, kind, setting)
        for choice in menu:
            if isinstance(choice, int | float) and not isinstance(choice, bool):
                continue  # one of many numbers
            name = str(choice).lower() if isinstance(choice, bool) else choice
            assert f"`{name}`" in told, f"{kind}: {setting} {name}"


def test_every_kind_of_model_is_told() -> None:
    assert [kind for kind in list_model_kinds() if f"## `kind: {kind}`" not in MODELS_PAGE] == []


def test_every_setting_of_statistical_models_is_told() -> None:
    settings = {*SmtSettings.model_fields, *(f"decoder.{name}" for name in DecoderSettings.model_fields)}
    assert [name for name in settings - {"kind", "decoder"} if not row(MODELS_PAGE, "smt", re.escape(name))] == []
    for setting, menu in SmtSettings.registries().items():
        assert [choice for choice in menu if f"`{choice}`" not in row(MODELS_PAGE, "smt", setting)] == []


def test_every_tokenizer_and_metric_is_told() -> None:
    assert all(f"`{name}`" in TASKS_PAGE for name in (*TOKENIZERS, *METRICS))


def test_every_way_to_search_is_told() -> None:
    menus = {**SEARCH_REGISTRIES, "unknown": UNKNOWN_WORD_METHODS}
    assert all(f"`{name}`" in SEARCH_PAGE for menu in menus.values() for name in menu)
    told = re.findall(r"`(?:search\.)?(\w+)", SEARCH_PAGE)
    assert set(SearchSettings.model_fields) <= set(told)


def test_every_engine_and_format_is_told() -> None:
    """On the page, and in the help of the command, which must not import them."""
    for menu, command, option in ((ENGINES, TranslateOptions, "engine"), (EXPORT_FORMATS, export_command, "to")):
        [told] = get_type_hints(command, include_extras=True)[option].__metadata__
        for name in menu:
            assert re.search(rf"\b{name}\b(?!-)", told.help), name
            assert re.search(rf"\b{name}\b(?!-)", EXCHANGE_PAGE), name


def test_every_package_is_on_the_map() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert [
        part for part in (*BASE, *MAY_IMPORT) if part != "__main__" and not re.search(rf"`{part}(\.py|/)`", text)
    ] == []


@pytest.mark.parametrize(("folder", "page"), [("tasks", TASKS_PAGE), ("translation", RECIPES_PAGE)])
def test_every_recipe_is_told(folder: str, page: str) -> None:
    recipes = [path.stem for path in (ROOT / "recipes" / folder).glob("*.yaml")]
    assert recipes
    assert all(f"`{name}`" in page for name in recipes)


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs").glob("*.md")))
def test_commands_of_a_page_are_there(page: str) -> None:
    """Every option that a page shows behind a command is one that the command has."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    for name, rest in re.findall(r"^    .*?dragoman (\w+) ([^\n#|]*)", text, re.MULTILINE):
        group = getattr(commands[name], "commands", None)  # of `dragoman data`, the subcommand has the options
        command = group[rest.split()[0]] if group else commands[name]
        known = {option for each in command.params for option in each.opts}
        assert set(re.findall(r"(?<!\S)--[\w-]+", rest)) <= known | {"--help"}, f"{page}: dragoman {name} {rest}"


@pytest.mark.parametrize(("page", "count"), [("more-data", 2), ("models", 2), ("context", 1)])
def test_recipes_of_a_page_are_recipes(page: str, count: int, tmp_path: Path) -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```", (ROOT / f"docs/{page}.md").read_text(encoding="utf-8"), re.M | re.S)
    assert len(blocks) == count
    for block in blocks:
        (tmp_path / "recipe.yaml").write_text(block)
        check_settings(check_model(read_recipe(tmp_path / "recipe.yaml")))


def numbers_in(text: str) -> list[str]:
    return [number.replace(",", "") for number in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]


def test_numbers_of_the_readme_are_measured() -> None:
    """Every number in the columns of measured values is in the file that its row links, up to rounding."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for title, columns in (("Quality", [1]), ("Speed", [1, 2])):
        rows = [line for line in text.split(f"## {title}\n")[1].split("\n## ")[0].splitlines() if "](" in line]
        rows = [row for row in rows if row.startswith("| ")]
        assert len(rows) >= 6
        for row in rows:
            cells = row.strip("| ").split(" | ")
            [file] = re.findall(r"\]\(([\w./-]+)", cells[-1])
            measured = [float(number) for number in numbers_in((ROOT / file).read_text(encoding="utf-8"))]
            for shown in numbers_in(" ".join(cells[column] for column in columns)):
                digits = len(shown.partition(".")[2])
                assert any(round(number, digits) == float(shown) for number in measured), f"{shown} is not in {file}"


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs").glob("*.md")))
def test_files_that_a_page_names_are_there(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    for name in re.findall(r"`((?:src|tests|bench|recipes|docs)/[\w./-]+\.\w+)`", text):
        assert (ROOT / name).exists(), f"{page} names {name}"

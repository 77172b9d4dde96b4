"""Hooks of MkDocs (see mkdocs.yml): generate the reference pages of settings and commands, and adapt links.

The pages are written from the same sources as `dragoman settings --json` and `dragoman COMMAND --help`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from mkdocs.structure.files import File, Files

from dragoman.cli.main import app
from dragoman.config.reference import Setting, load_settings_reference

SECTIONS = ["data", "corpus", "tokenizer", "train", "search"]  # the same for every kind of model


def on_config(config: Any) -> Any:
    """Add every design decision (docs/decisions/) to the navigation."""
    explanation = next(item["Explanation"] for item in config.nav if "Explanation" in item)
    decisions = next(item["Decisions"] for item in explanation if "Decisions" in item)
    decisions += [f"decisions/{path.name}" for path in sorted(Path(config.docs_dir, "decisions").glob("0*.md"))]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    files.append(File.generated(config, "reference/settings.md", content="\n".join(write_settings())))
    files.append(File.generated(config, "reference/commands.md", content="\n".join(write_commands())))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace links and images of files outside docs/, which are not part of the site, by the paths of the files."""
    markdown = re.sub(r"!\[([^\]]*)\]\((?:\.\./)+((?:bench|src|recipes|tests)/[^)\s]+)\)", r"\1: `\2`", markdown)
    return re.sub(r"\[([^\]]*)\]\((?:\.\./)+((?:bench|src|recipes|tests)/[^)\s]+)\)", r"\1 (`\2`)", markdown)


def write_settings() -> Iterator[str]:
    """Yield the lines of the settings reference."""
    reference = load_settings_reference()
    yield "# Settings"
    yield "\nEvery setting of a recipe, generated from the same table as `dragoman settings`."
    yield "A setting is set in the recipe, or by `a.b=c` on the command line.\n"
    common = next(iter(reference.values()))
    for section in SECTIONS:
        title = "data.train, data.dev, data.test: each corpus" if section == "corpus" else section
        yield from write_table(title, [setting for setting in common if setting.section == section])
    for kind, settings in reference.items():
        title = "model: kind: " + kind.replace("/", ", backbone: ")
        yield from write_table(title, [setting for setting in settings if setting.section == "model"])


def write_table(title: str, settings: list[Setting]) -> Iterator[str]:
    """Yield the lines of a section with a table of settings."""
    yield f"\n## {title}\n"
    yield "| setting | default | choices | description |\n|---|---|---|---|"
    for setting in settings:
        choices = ", ".join(f"`{choice}`" for choice in setting.choices)
        cells = [f"`{setting.name}`", f"`{json.dumps(setting.default)}`", choices, setting.description]
        yield "| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells) + " |"


def write_commands() -> Iterator[str]:
    """Yield the lines of the command reference."""
    yield "# Commands"
    yield "\nGenerated from the help of each command (`dragoman COMMAND --help`)."
    root = typer.main.get_command(app)
    for name, command in sorted(root.commands.items()):  # type: ignore[attr-defined]
        yield from write_command(f"dragoman {name}", command)


def write_command(name: str, command: Any) -> Iterator[str]:
    """Yield the help of a command and of its subcommands, with a table of options."""
    yield f"\n## {name}\n\n{command.help or ''}"
    for subname, subcommand in sorted(getattr(command, "commands", {}).items()):
        yield from write_command(f"{name} {subname}", subcommand)
    parameters = [option for option in command.params if not getattr(option, "hidden", False) and option.name != "help"]
    if parameters:
        yield "\n| argument or option | default | description |\n|---|---|---|"
    for parameter in parameters:
        names, default = ", ".join(f"`{option}`" for option in parameter.opts), parameter.default
        default_cell = "" if default in (None, False, "", (), []) or callable(default) else f"`{default}`"
        description = (getattr(parameter, "help", None) or "").replace("|", "\\|").replace("\n", " ")
        yield f"| {names} | {default_cell} | {description} |"

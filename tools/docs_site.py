"""Hooks of MkDocs (see mkdocs.yml): generate references, the pages of experiments, and pages of source files.

The references are written from the same sources as `dragoman settings --json` and `dragoman COMMAND --help`. The
pages of experiments show the results of their full versions, which are kept in bench/results/labs. Every file of src/
that a page links to gets a page of its own, because the site has no other copy of it.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from mkdocs.structure.files import File, Files

from dragoman.cli.main import app
from dragoman.config.reference import Setting, load_settings_reference
from dragoman.labs.registry import EXPERIMENTS
from dragoman.labs.report import render_markdown, render_markdown_index
from dragoman.labs.runner import read_results

ROOT = Path(__file__).parents[1]
LAB_RESULTS = ROOT / "bench" / "results" / "labs"
CHART_STYLE = ROOT / "src" / "dragoman" / "evaluation" / "templates" / "style.css"
SOURCE_LINK = re.compile(r"\]\((?:\.\./)+src/(dragoman/[\w/]+\.py)\)")
# Name ... file, in HTML
SOURCE_NAME = re.compile(r'<code>(\w+)</code>([^<]*<a href="(?:\.\./)+source/(dragoman/[\w/]+\.py)/)"')
# Without the first rule, a figure is as narrow as its caption. On narrow screens, wide charts scroll.
CHART_LAYOUT = """
.md-typeset figure:has(> svg) { width: 100%; overflow-x: auto; }
.md-typeset figure > svg { min-width: 620px; }
@media (max-width: 45em) { .md-typeset table:not([class]) :is(th, td) { min-width: 4rem; padding: .4em .5em; } }
"""
# A link to an experiment in the course. It may name one check of it, one figure, or both: reach.md#check-7-figure-2
LAB_LINK = re.compile(r"\[([\w-]+)\]\(\.\./labs/\1\.md(?:#(check-(\d+))?-?(figure(?:-\d+)?)?)?\)")
SECTIONS = ["data", "corpus", "tokenizer", "train", "search"]  # the same for every kind of model


def on_config(config: Any) -> Any:
    """Add every design decision (docs/decisions/) and every experiment to the navigation."""
    explanation = next(item["Explanation"] for item in config.nav if "Explanation" in item)
    decisions = next(item["Decisions"] for item in explanation if "Decisions" in item)
    decisions += [f"decisions/{path.name}" for path in sorted(Path(config.docs_dir, "decisions").glob("0*.md"))]
    course = next(item["Course"] for item in config.nav if "Course" in item)
    next(item["Experiments"] for item in course if "Experiments" in item).extend(
        {name: f"labs/{name}.md"} for name in EXPERIMENTS
    )
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    files.append(File.generated(config, "reference/settings.md", content="\n".join(write_settings())))
    files.append(File.generated(config, "reference/commands.md", content="\n".join(write_commands())))
    texts = [path.read_text(encoding="utf-8") for path in Path(config.docs_dir).rglob("*.md")]
    results = read_results(LAB_RESULTS)
    files.append(File.generated(config, "labs/index.md", content="\n".join(render_markdown_index(results))))
    for name, experiment in EXPERIMENTS.items():
        texts.append("\n".join(render_markdown(experiment, results.get(name))))
        files.append(File.generated(config, f"labs/{name}.md", content=texts[-1]))
    # The colours of charts are variables of the style sheet of pages, up to its rules for elements.
    variables = CHART_STYLE.read_text(encoding="utf-8").partition("\nbody ")[0]
    files.append(File.generated(config, "labs/charts.css", content=f"{variables}\n{CHART_LAYOUT}"))
    for path in sorted({path for text in texts for path in SOURCE_LINK.findall(text)}):
        files.append(File.generated(config, f"source/{path}.md", content=write_source(path)))
    return files


def write_source(path: str) -> str:
    """Return the page of a source file, as wide as the window. The search of the site does not find its text."""
    code = (ROOT / "src" / path).read_text(encoding="utf-8")
    front_matter = "---\nhide: [navigation, toc]\nsearch:\n  exclude: true\n---"
    return f'{front_matter}\n\n# {path}\n\n~~~{{.python linenums="1"}}\n{code}~~~\n'


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links to source files to their pages, and add verdicts and figures to those to experiments in the course.

    Other files outside docs/ are not part of the site: links and images of them become the paths of the files.
    """
    folder = posixpath.dirname(page.file.src_uri)
    markdown = SOURCE_LINK.sub(
        lambda match: f"]({posixpath.relpath(f'source/{match[1]}.md', folder or '.')})", markdown
    )
    if folder == "course":
        results = read_results(LAB_RESULTS)

        def add_result(match: re.Match[str]) -> str:
            name, anchor, number, figure = match.groups()
            if name not in results:
                return f"[{name}](../labs/{name}.md)"
            cell = markdown[: match.start()].rpartition("|")[2]  # what stands before the link
            verdict = results[name].verdict
            if number:
                verdict = f"check {number}: {results[name].checks[int(number) - 1].verdict}"
            # The verdict on another claim says nothing here.
            verdict = "" if "related: " in cell else f"{verdict}, "
            page = f"../labs/{name}.md"
            return f"[{name}]({page}{f'#{anchor}' if anchor else ''}) ({verdict}[figure]({page}#{figure or 'figure'}))"

        markdown = LAB_LINK.sub(add_result, markdown)
    markdown = re.sub(r"!\[([^\]]*)\]\((?:\.\./)+((?:bench|src|recipes|tests)/[^)\s]+)\)", r"\1: `\2`", markdown)
    return re.sub(r"\[([^\]]*)\]\((?:\.\./)+((?:bench|src|recipes|tests)/[^)\s]+)\)", r"\1 (`\2`)", markdown)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Let links after the name of a class or function lead to the line of its definition, in the course.

    MkDocs does not know the anchors of lines, so they are added to the links that it has checked.
    """
    return SOURCE_NAME.sub(add_line, html) if page.file.src_uri.startswith("course/") else html


def add_line(match: re.Match[str]) -> str:
    """Add the line of a definition to the link in a match of SOURCE_NAME, if the file defines the name."""
    name, link, path = match.groups()
    lines = (ROOT / "src" / path).read_text(encoding="utf-8").splitlines()
    defined = re.compile(rf"\s*(class|def) {name}\b")
    number = next((number for number, line in enumerate(lines, 1) if defined.match(line)), None)
    return f'<code>{name}</code>{link}{f"#__codelineno-0-{number}" if number else ""}"'


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

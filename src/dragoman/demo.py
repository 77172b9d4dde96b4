"""`dragoman demo`: the main job on the built-in corpus, from nothing to a scored translator, in a few minutes."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from dragoman.config import Recipe, build, override
from dragoman.evaluation.answers import on_phrasebook
from dragoman.evaluation.table import table
from dragoman.lens.maps import alignment_grid
from dragoman.loading import load_as
from dragoman.models.build import parameters
from dragoman.store import RunFolder, read_json, write_text
from dragoman.text import phrasebook
from dragoman.train.report import Report
from dragoman.train.trainer import train
from dragoman.translator import Translator
from dragoman.types import UserError
from dragoman.yaml_text import parse_yaml

RECIPE = Path("recipes/phrasebook-en-de.yaml")
TEST_LINES = 500
SHOWN = 6
SPLITS = {"test": "sentences not seen in training", "unseen": "words in constructions not seen with them"}


def demo(out: Path, overrides: list[str], console: Console) -> None:
    """Train, score, translate, draw. What is there already is not made again."""
    folder = RunFolder(out)
    report_file = out / "report.json"
    if report_file.exists():
        if overrides:
            raise UserError(f"{str(out)!r} holds a finished demo; remove it, or choose another --out to train anew")
        console.print(f"The demo was trained before; what follows is from {out}.", highlight=False)
    else:
        values = parse_yaml(recipe_text(), "the demo's recipe")
        for item in overrides:
            override(values, item)
        console.print("Training a Transformer, English to German, on sentences from the built-in phrasebook.")
        train(build(Recipe, values), out=out, resume=folder.format.exists(), report=Report())
        score(out, report_file, console)
    report = read_json(report_file)
    console.print(f"\nScores ({TEST_LINES} sentences each):")
    for split, meaning in SPLITS.items():
        console.print(f"\n[bold]{split}[/bold]: {meaning}")
        console.print(table([report["results"][split] | {"run": str(out)}]))  # type: ignore[index]
    translator = load_as(Translator, out)
    show(translator, console)
    if sys.stdin.isatty() and sys.stdout.isatty():
        ask(translator, console)
    command = "dragoman" if shutil.which("dragoman") else sys.argv[0]
    console.print(NEXT.format(dragoman=command, out=out), highlight=False)


def recipe_text() -> str:
    """The recipe that a wheel carries inside; in a checkout it lies in recipes/."""
    places = (Path(__file__).parent / RECIPE, Path(__file__).parents[2] / RECIPE)
    return next(place for place in places if place.exists()).read_text(encoding="utf-8")


def score(out: Path, report_file: Path, console: Console) -> None:
    console.print(f"Scoring it on two test sets, {TEST_LINES} sentences each: a minute or less.")
    translator = load_as(Translator, out)
    results: dict[str, Any] = {split: on_phrasebook(translator, split, TEST_LINES).result() for split in SPLITS}
    report = {
        "bleu": {split: result["bleu"]["value"] for split, result in results.items()},
        "chrf": {split: result["chrf"]["value"] for split, result in results.items()},
        "train_seconds": RunFolder(out).state()["seconds"],
        "parameters": parameters(translator.model),
        "results": results,
    }
    write_text(report_file, json.dumps(report, indent=1, ensure_ascii=False) + "\n")


def show(translator: Translator, console: Console) -> None:
    phrases = list(phrasebook.phrases("test", SHOWN, seed=2, direction=translator.recipe.data.direction))
    begun = time.monotonic()
    found = translator.translate([phrase.source for phrase in phrases])
    console.print(f"\nSome sentences it has never seen ({(time.monotonic() - begun) / SHOWN * 1000:.0f} ms each):\n")
    for phrase, one in zip(phrases, found, strict=True):
        mark = "[green]=[/green]" if one.text == phrase.target else "[yellow]~[/yellow]"
        console.print(f"   {phrase.source}\n {mark} {one.text}", highlight=False)
        if one.text != phrase.target:
            console.print(f"   [dim]reference: {phrase.target}[/dim]", highlight=False)
    longest = max(found, key=lambda one: len(one.tokens) if len(one.source_tokens) <= 24 else 0)
    console.print("\nWhere it looked while it wrote (source above, translation at the left, brighter is more):\n")
    console.print(alignment_grid(longest))


def ask(translator: Translator, console: Console) -> None:
    console.print("Type an English sentence of words like these (an empty line ends this):")
    while line := console.input("> ").strip():
        one = translator.translate([line])[0]
        console.print(f"  {one.text}", highlight=False, markup=False)


NEXT = """
What to type next:
  {dragoman} translate {out} --input FILE         # a file, line by line
  {dragoman} evaluate {out} --phrasebook unseen   # score it again, with signatures
  {dragoman} info {out}                           # what this model is
  {dragoman} train RECIPE.yaml --out runs/mine    # your own text (README.md shows a recipe)"""

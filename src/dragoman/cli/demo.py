"""The command `dragoman demo`: train and score a translator on the built-in corpus in a few minutes, then show it.

`run_demo` prints scores, example translations with the grammatical phenomena that they show, and attention weights.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from dragoman.errors import UserError
from dragoman.evaluation.report import format_scores
from dragoman.evaluation.systems import EvaluationOptions, predict_tests
from dragoman.inference.loading import load_as
from dragoman.inference.translator import Translator
from dragoman.inspection.attention_maps import render_alignment
from dragoman.io import write_text
from dragoman.phrasebook.generate import Phrase, generate_phrases
from dragoman.progress import Report
from dragoman.recipe import find_recipes_folder, read_recipe
from dragoman.run_dir import RunFolder, read_json
from dragoman.training.trainer import train

RECIPE = "phrasebook-en-de.yaml"
TEST_SENTENCES = 500  # in each test set
CANDIDATE_COUNT = 400  # test sentences among which `choose_phrases` finds one for each phenomenon
MIN_SHOWN_WORDS, MAX_SHOWN_WORDS = 7, 14  # of an example sentence
PHENOMENA = {  # what makes a sentence hard to translate, by the phrasebook's name of the phenomenon
    "verb-position": "the verb moves, or splits in two",
    "adjective": "endings follow gender, number and case",
    "agreement": "the verb agrees with a noun further away",
    "pronoun": "the pronoun takes the gender of its noun",
    "relative": "the relative pronoun takes the gender of its noun",
}
TEST_SPLITS = {"test": "sentences not seen in training", "unseen": "words in constructions not trained with them"}
NEXT_COMMANDS = """
What to type next:
  {dragoman} translate {out} --input FILE         # translate a file, line by line
  {dragoman} evaluate {out} --phrasebook unseen   # score it again, with the signatures of the metrics
  {dragoman} info {out}                           # describe this model
  {dragoman} train RECIPE.yaml --out runs/mine    # train on your own text (README.md shows a recipe)"""


def run_demo(out: Path, overrides: list[str], console: Console) -> None:
    """Train and score the demo unless `out` has a finished one; print scores, translations and attention weights."""
    report_file = out / "report.json"
    if not report_file.exists():
        train_and_score(out, overrides, report_file, console)
    elif overrides:
        raise UserError(f"{str(out)!r} has a finished demo; remove it, or choose another --out to train a new one")
    else:
        console.print(f"The demo was trained before; these are the results in {out}.")
    report = read_json(report_file)
    console.print(f"\nScores ({TEST_SENTENCES} sentences each):")
    for split, meaning in TEST_SPLITS.items():
        console.print(f"\n[bold]{split}[/bold]: {meaning}")
        console.print(format_scores([report["results"][split] | {"run": str(out)}]))  # type: ignore[index]
    translator = load_as(Translator, out)
    show_translations(translator, console)
    if sys.stdin.isatty() and sys.stdout.isatty():
        console.print("Type a sentence with words like these to translate it (an empty line ends the demo):")
        while line := console.input("> ").strip():
            console.print(f"  {translator.translate([line])[0].text}", markup=False)
    command = "dragoman" if shutil.which("dragoman") else sys.argv[0]
    console.print(NEXT_COMMANDS.format(dragoman=command, out=out))


def train_and_score(out: Path, overrides: list[str], report_file: Path, console: Console) -> None:
    """Train the demo's recipe, score the model on two test sets, and write the report."""
    folder = find_recipes_folder()
    assert folder
    recipe = read_recipe(folder / RECIPE, overrides)
    console.print(
        f"Training a Transformer on the built-in phrasebook, {recipe.data.direction}, for {recipe.train.limits_text} "
        "(800 steps take about three minutes on two CPU cores)."
    )
    train(recipe, out=out, resume=RunFolder(out).format_file.exists(), report=Report())
    console.print(f"Scoring it on two test sets, {TEST_SENTENCES} sentences each: a minute or less.")
    translator = load_as(Translator, out)
    results: dict[str, Any] = {}
    for split in TEST_SPLITS:
        [output] = predict_tests(translator, EvaluationOptions(phrasebook=split, count=TEST_SENTENCES))
        results[split] = output.result()
    report = {
        "bleu": {split: result["bleu"]["value"] for split, result in results.items()},
        "chrf": {split: result["chrf"]["value"] for split, result in results.items()},
        "train_seconds": RunFolder(out).load_state()["seconds"],
        "parameters": translator.parameter_count,
        "results": results,
    }
    write_text(report_file, json.dumps(report, indent=1, ensure_ascii=False) + "\n")


def show_translations(translator: Translator, console: Console) -> None:
    """Print a translation for each phenomenon, and the attention weights of the longest translation."""
    phrases = choose_phrases(translator.recipe.data.direction)
    start = time.monotonic()
    hypotheses = translator.translate([phrase.source for phrase in phrases.values()])
    milliseconds = (time.monotonic() - start) / len(phrases) * 1000
    console.print(f"\nSentences the model has never seen ({milliseconds:.0f} ms each):\n")
    for (phenomenon, phrase), hypothesis in zip(phrases.items(), hypotheses, strict=True):
        is_correct = hypothesis.text == phrase.target
        console.print(f"   {phrase.source}")
        console.print(f" {'[green]✓[/green]' if is_correct else '[yellow]~[/yellow]'} [bold]{hypothesis.text}[/bold]")
        if not is_correct:
            console.print(f"   [dim]reference: {phrase.target}[/dim]")
        console.print(f"   [dim]{PHENOMENA[phenomenon]}[/dim]\n")
    longest = max(hypotheses, key=lambda hypothesis: len(hypothesis.tokens))
    console.print("Attention (source words above, translation at the left; brighter cells have higher weights):\n")
    console.print(render_alignment(longest))


def choose_phrases(direction: str) -> dict[str, Phrase]:
    """Return a short test sentence for each grammatical phenomenon of the direction, by the phenomenon's name."""
    chosen: dict[str, Phrase] = {}
    for phrase in generate_phrases("test", CANDIDATE_COUNT, seed=3, direction=direction):
        if not MIN_SHOWN_WORDS <= len(phrase.source_words) <= MAX_SHOWN_WORDS:
            continue
        names = [phenomenon.name for phenomenon in phrase.phenomena if phenomenon.name not in chosen]
        if names:
            chosen[names[0]] = phrase
    return chosen

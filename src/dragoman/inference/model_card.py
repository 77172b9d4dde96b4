"""A run's model card: what it is, what it was trained on, where it comes from, what it scored and how to use it.

card("runs/demo") is a dict for programs; card_table() shows it in a terminal, card_markdown() writes it for people.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from rich.console import Group
from rich.table import Table
from rich.text import Text

from dragoman.config.settings import METRIC_ALIASES, CorpusSettings
from dragoman.errors import UserError
from dragoman.inference.loading import open_run
from dragoman.metrics.metrics import METRICS, Metric, select_best_metric
from dragoman.models.registry import parameters
from dragoman.recipe import Recipe
from dragoman.run_dir import RunFolder, load_tensors, read_digest

KEYS = {"train": {"tokens", "seconds"}, "validate": {"loss", "perplexity"}}  # what a record needs
RENAMED = {  # keys of records that earlier releases wrote
    "likelihood": "nll",
    "norm": "grad_norm",
    **METRIC_ALIASES,
    **{f"{old}_by_corpus": f"{new}_by_corpus" for old, new in METRIC_ALIASES.items()},
}
LANGUAGE = re.compile(r"\.([a-z]{2})(?:\.(?:gz|xz|zst))?$")  # such as train.en.gz
NOT_RECORDED = "unknown"
R = TypeVar("R", bound=BaseModel)
Sections = dict[str, dict[str, str]]  # by title: what the card says, by name


class CorpusRecord(BaseModel):
    """A corpus, as provenance.json has it."""

    split: str
    count: int | None
    left_out: dict[str, int]


class ParentRecord(BaseModel):
    """The run that another one began with, as provenance.json has it."""

    run: str
    digest: str | None = None
    steps: int | None = None
    teacher: str | None = None
    parent: ParentRecord | None = None


class Provenance(BaseModel):
    """What is read of provenance.json."""

    corpora: list[CorpusRecord] = []
    parent: ParentRecord | None = None
    unit: str = ""
    dragoman: str | None = None
    torch: str | None = None
    started: str | None = None
    ended: str | None = None


class TestScore(BaseModel):
    """The value of a metric, as scores.jsonl has it."""

    value: float
    signature: str | None = None


class TestRecord(BaseModel):
    """What `evaluate` found, as a line of scores.jsonl has it. Earlier releases wrote neither engine nor tag."""

    date: str = ""
    test: str
    lines: int | None = None
    beam: int | None = None
    engine: str = "torch"
    tag: str = ""
    scores: dict[str, TestScore]


def check_record(cls: type[R], record: dict[str, Any], path: Path) -> R:
    """Return a record of a run folder, whose values may be anything; refuse one that is not as it should be."""
    try:
        return cls.model_validate(record)
    except (ValidationError, RecursionError):
        raise UserError(f"{str(path)!r} is damaged; restore it, or remove it") from None


def card(run: str | Path) -> dict[str, Any]:
    """Return all that the folder says of the run, as JSON has it."""
    folder = RunFolder(run)
    opened = open_run(run, device="cpu")
    recipe, target = opened.recipe, opened.tokenizers.target
    events = list(read_events(folder.metrics))
    trained = [event for event in events if event["event"] == "train"]
    validated = [event for event in events if event["event"] == "validate"]
    task = recipe.model.task
    best = max(validated, key=lambda event: rank_validation(event, recipe), default=None)
    state, provenance = folder.state(), check_record(Provenance, folder.provenance(), folder.provenance_file)
    parent = provenance.parent.model_dump() if provenance.parent else None
    last = state or (trained[-1] if trained else {})  # a folder may come without its checkpoints
    tokens, seconds = last.get("tokens") or 0, last.get("seconds") or 0.0
    place = state.get("place")
    return {
        "run": str(folder.path),
        "format": int(folder.format.read_text()),
        "digest": read_digest(folder.model),
        "task": task,
        "parameters": parameters(opened.model),
        "model": recipe.model.model_dump(mode="json", exclude_unset=True),
        "settings": recipe.model.in_use(),
        "tokenizer": recipe.tokenizer.model_dump(),
        "vocabulary": {"source": opened.tokenizers.source.size, "target": target.size},
        "vocabulary_shared": opened.tokenizers.joint if task == "translate" else None,
        "languages": list_languages(recipe) if task == "translate" else [],
        "tags": [tag for tag in recipe.data.tags if tag],
        "direction": recipe.data.direction if any(c.phrasebook for c in recipe.data.train) else "",
        "data": {name: [corpus_name(c) for c in getattr(recipe.data, name)] for name in ("train", "dev")},
        "corpora": list_corpora(recipe, provenance),
        "unit": provenance.unit or ("pairs" if task == "translate" else "texts"),
        "labels": target.pieces(range(target.size)) if task == "classify" else [],
        "teacher": folder.teacher(),
        "parent": parent or ({"run": state["parent"]} if state.get("parent") else None),
        "versions": {"dragoman": provenance.dragoman, "torch": provenance.torch},
        "started": provenance.started,
        "ended": provenance.ended,
        "longest_source": opened.longest,
        "steps": int(load_tensors(folder.model)[1].get("step", 0)),  # none, where it was trained elsewhere
        "epochs": round(place["epoch"] + place.get("passed", 0.0), 4) if place else None,
        "tokens_read": tokens,
        "train_seconds": seconds,
        "tokens_per_second": round(tokens / seconds) if seconds else 0,
        "validation": best,
        "tests": read_scores(folder.scores),
    }


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The records of metrics.jsonl. A line that was torn when the machine went down is no record."""
    for event in read_records(path):
        if event.get("event") in KEYS and KEYS[event["event"]] <= set(event):
            yield {RENAMED.get(name, name): value for name, value in event.items()}


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file that holds one JSON object a line; a torn line is left out."""
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if path.is_file() else []:
        with suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict):
                yield record


def read_scores(path: Path) -> list[dict[str, Any]]:
    """Return what `evaluate` found: of each test, beam, engine and tag the newest value of each metric."""
    newest: dict[tuple[str, int | None, str, str], TestRecord] = {}
    for record in read_records(path):
        found = check_record(TestRecord, record, path)
        key = found.test, found.beam, found.engine, found.tag
        before = newest.pop(key, None)
        if before and before.lines == found.lines:  # else the test has changed
            found.scores = {**before.scores, **found.scores}
        newest[key] = found
    return [record.model_dump() for record in newest.values()]


def goodness(event: dict[str, Any], metric: Metric | None) -> tuple[float, float]:
    """What the run went by, as it did: higher is better, equal scores are settled by the loss."""
    loss = -event["loss"] if event["loss"] is not None else -math.inf
    score = event.get(metric.name) if metric else None
    return (metric.goodness(score) if metric and score is not None else loss), loss


def rank_validation(event: dict[str, Any], recipe: Recipe) -> tuple[float, float]:
    """Return the key by which a run ranked its validations, best last: with train.metric=auto, by the metric that the
    record holds, and by the loss alone while that is hardly above nothing."""
    auto = recipe.train.metric == "auto"
    held = next((metric for metric in METRICS.values() if event.get(metric.name) is not None), None)
    metric = held if auto else select_best_metric(recipe.train.metric, recipe.model.task)
    score, loss = goodness(event, metric)
    return max(score, metric.floor) if auto and metric else score, loss


def corpus_name(corpus: CorpusSettings) -> str:
    if corpus.phrasebook:
        return f"phrasebook, {corpus.phrasebook} pairs, seed {corpus.seed}"
    weight = f" (weight {corpus.weight:g})" if corpus.weight != 1 else ""
    return " + ".join(Path(name).name for name in corpus.files) + corpus.chosen + weight


def list_corpora(recipe: Recipe, provenance: Provenance) -> list[dict[str, Any]]:
    """Return the corpora of training and validation; counts are None where the run did not record them."""
    data = recipe.data
    named = [("train", corpus) for corpus in data.learned] + [("dev", corpus) for corpus in data.dev]
    counted = provenance.corpora
    if [one.split for one in counted] != [split for split, _ in named]:
        counted = [CorpusRecord(split=split, count=None, left_out={}) for split, _ in named]
    return [
        {"split": split, "name": corpus_name(corpus), "count": one.count, "left_out": one.left_out}
        for (split, corpus), one in zip(named, counted, strict=True)
    ]


def list_languages(recipe: Recipe) -> list[str]:
    """Return the directions that the corpora's file names tell, such as "en-de"; none where they do not."""
    found = []
    for corpus in recipe.data.learned:
        ends = [LANGUAGE.search(name) for name in (corpus.source, corpus.target)]
        pair = [end[1] for end in ends if end] if not corpus.phrasebook else recipe.data.direction.split("-")
        if len(pair) == 2:
            found.append("-".join(reversed(pair) if corpus.reverse else pair))
    return list(dict.fromkeys(found))


def list_ancestors(about: dict[str, Any]) -> list[str]:
    """Return the run's ancestors as sentences, nearest first. A card goes to others: names, not paths of a machine."""
    found, parent = [], about["parent"]
    while parent:
        digest = f", weights {parent['digest'][:12]}" if parent.get("digest") else ""
        steps = f" after {parent['steps']:,} steps" if parent.get("steps") else ""
        student = f", a student of {run_names(parent['teacher'])}" if parent.get("teacher") else ""
        found.append(f"{run_names(parent['run'])}{steps}{digest}{student}")
        parent = parent.get("parent")
    return found


def run_names(paths: str) -> str:
    """Return the names of run folders or files, such as "a and b" for "/x/a and /x/b"."""
    return " and ".join(Path(path).name or path for path in paths.split(" and "))


def describe_card_teacher(teacher: dict[str, Any]) -> dict[str, str]:
    """Whose student a run is, where it is one."""
    if not teacher:
        return {}
    good = sum(corpus["answers"] for corpus in teacher["corpora"])
    total = good + sum(sum(corpus["left_out"].values()) for corpus in teacher["corpora"])
    return {
        "student of": f"{run_names(teacher['teacher'])}, {good:,} of {total:,} answers of a beam of {teacher['beam']}"
    }


def card_sections(about: dict[str, Any]) -> Sections:
    """Return the card as text: sections of names and what there is to say under each."""
    settings, sizes = about["settings"], about["vocabulary"]
    size = f"{sizes['source']:,}"
    if about["task"] == "translate":
        shared = about["vocabulary_shared"]
        size = f"{size} shared" if shared else f"{size} source + {sizes['target']:,} target"
    longest, best = f"{about['longest_source']} tokens", about["validation"]
    reach = {
        "translate": {"longest source": f"{longest}; longer input is split into sentences"},
        "classify": {
            "labels": ", ".join(about["labels"]),
            "longest text": f"{longest}; longer input is read with a warning",
        },
        "generate": {"context": f"{about['model'].get('context')} tokens"},
    }
    backbone = f" ({settings['backbone']})" if "backbone" in settings else ""
    versions = ", ".join(f"{name} {said}" for name, said in about["versions"].items() if said)
    dates = " to ".join(date.replace("T", " ").replace("+00:00", " UTC") for date in list_dates(about))
    epochs = "" if about["epochs"] is None else f", {about['epochs']:.4g} epochs"
    parents = list_ancestors(about)
    validated = "; ".join(format_corpora(about, "dev"))
    return {
        "Model": {
            "run": f"{about['run']} (format {about['format']}, weights {about['digest'][:12]})",
            "model": f"{settings['kind']}{backbone}, {about['parameters']:,} parameters",
            "settings": ", ".join(
                f"{k} {format_card_value(v)}" for k, v in settings.items() if k not in ("kind", "backbone")
            ),
            "tokenizer": f"{about['tokenizer']['kind']}, {size} entries",
            **reach[about["task"]],
        },
        "Data": {
            **({"languages": ", ".join(about["languages"])} if about["languages"] else {}),
            **({"tags": ", ".join(about["tags"])} if about["tags"] else {}),
            "trained on": "; ".join(format_corpora(about, "train")),
            "validated on": validated or "nothing",
        },
        "Training": {
            "training": f"{about['steps']:,} steps{epochs}, {about['tokens_read']:,} tokens, "
            f"{timedelta(seconds=round(about['train_seconds']))}, {about['tokens_per_second']:,} tokens/s",
            "date": dates or NOT_RECORDED,
            "versions": versions or NOT_RECORDED,
            **({"fine-tuned from": "; before that ".join(parents)} if parents else {}),
            **describe_card_teacher(about["teacher"]),
        },
        "Scores": ({"best on dev": format_validation(best, about["task"])} if best and best["loss"] is not None else {})
        | format_tests(about["tests"]),
    }


def list_dates(about: dict[str, Any]) -> list[str]:
    return [date for date in (about["started"], about["ended"]) if date]


def format_card_value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def format_corpora(about: dict[str, Any], split: str) -> list[str]:
    found = []
    for one in about["corpora"]:
        if one["split"] == split:
            left_out = sum(one["left_out"].values())
            count = f"{NOT_RECORDED} number of" if one["count"] is None else f"{one['count']:,}"
            found.append(f"{one['name']} ({count} {about['unit']}{f', {left_out:,} left out' if left_out else ''})")
    return found


def format_validation(best: dict[str, Any], task: str) -> str:
    """Return the loss and scores of a validation with their signatures."""
    said = f"loss {best['loss']:.4f}"
    if task != "classify":  # a classifier predicts one label, so it has no perplexity
        said += f", perplexity {best['perplexity']:.2f}"
    for metric in METRICS.values():
        if best.get(metric.name) is not None:
            said += f", {metric.shown} {best[metric.name]:.2f} ({best['signature']})"
    return said + (f", {best['bits_per_character']:.4f} bits per character" if "bits_per_character" in best else "")


def format_tests(tests: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the scores of all tests by name; of several results of one test, the later ones are numbered."""
    rows: dict[str, str] = {}
    for one in tests:
        name = f"test {Path(one['test']).name or one['test']}"
        again = sum(other == name or other.startswith(f"{name} (") for other in rows)
        rows[f"{name} ({again + 1})" if again else name] = format_test_scores(one)
    return rows


def format_test_scores(one: dict[str, Any]) -> str:
    """Return the scores of one test with their signatures."""
    beam = f"; beam {one['beam']}" if one["beam"] else ""
    beam += f"; engine {one['engine']}" if one["engine"] != "torch" else ""
    beam += f"; tag {one['tag']}" if one["tag"] else ""
    names: Sequence[tuple[str, dict[str, Any]]] = list(one["scores"].items())
    said = ", ".join(
        f"{METRICS[name].shown if name in METRICS else name.replace('_', ' ')} {score['value']:.2f}"
        + (f" ({score['signature']})" if score.get("signature") else "")
        for name, score in names
    )
    return f"{said}{beam}; {one['lines']} lines" if one["lines"] else said + beam


def card_table(about: dict[str, Any]) -> Group:
    """Return the card for a terminal."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for rows in card_sections(about).values():
        for name, value in rows.items():
            table.add_row(name, Text(value, overflow="fold"))
    return Group(table)


VERBS = {"translate": "translates", "classify": "classifies texts", "generate": "writes text"}
CALLS = {
    "translate": 'translate(["A sentence."])',
    "classify": 'classify(["A text."])',
    "generate": 'generate(["Once upon a time"])',
}
INPUTS = {"translate": "< input.txt", "classify": "< input.txt", "generate": "-i prompts.txt"}


def card_markdown(run: str | Path, *, exported: str = "") -> str:
    """Return the model card of a run folder as Markdown, or of what it was `exported` to, a folder of this name."""
    about = card(run)
    task, name = about["task"], Path(about["run"]).resolve().name
    about["run"] = name  # a card goes to others, who have another path
    first = [f"dragoman import {shlex.quote(exported)} --out {shlex.quote(name)}"] if exported else []
    way = f" ({', '.join(about['languages'])})" if about["languages"] else ""
    lines = [f"# {name}", "", f"A {about['settings']['kind']} model that {VERBS[task]}{way}, made with Dragoman."]
    for title, rows in card_sections(about).items():
        if rows:
            lines += ["", f"## {title}", "", "| | |", "|---|---|"]
            lines += [f"| {escape_cell(key)} | {escape_cell(value)} |" for key, value in rows.items()]
    lines += [
        *("", "## Use", "", "```sh", *first, f"dragoman {task} {shlex.quote(name)} {INPUTS[task]}", "```"),
        *("", "```python", "import dragoman", "", f"model = dragoman.load({name!r})"),
        *(f"print(model.{CALLS[task]})", "```", ""),
    ]
    return "\n".join(lines)


def escape_cell(text: str) -> str:
    """Return a text that cannot break out of a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")

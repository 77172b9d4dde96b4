"""The model card of a run: the model, its training data and parent run, its scores, and how to use it.

`read_card("runs/demo")` returns a dict for programs. From this dict, `make_card_table` makes a table for a terminal and
`render_card` a Markdown file. The texts of both are in templates/.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from rich.table import Table
from rich.text import Text

from dragoman.config.settings import METRIC_ALIASES
from dragoman.data.corpus import CorpusSettings
from dragoman.errors import UserError
from dragoman.inference.directions import describe_directions, list_directions
from dragoman.inference.engines.base import render_template
from dragoman.inference.loading import open_run
from dragoman.metrics.metrics import METRICS, choose_checkpoint_metric
from dragoman.recipe import Recipe
from dragoman.run_dir import RunFolder, read_header

REQUIRED_KEYS = {"train": {"tokens", "seconds"}, "validate": {"loss", "perplexity"}}  # event -> keys of its records
RENAMED_KEYS = {  # key written by an earlier release -> current key
    "likelihood": "nll",
    "norm": "grad_norm",
    **METRIC_ALIASES,
    **{f"{old}_by_corpus": f"{new}_by_corpus" for old, new in METRIC_ALIASES.items()},
}
_R = TypeVar("_R", bound=BaseModel)
Sections = dict[str, dict[str, str]]  # section of the card -> name of a row -> text


class CorpusRecord(BaseModel):
    """A corpus in provenance.json."""

    split: str  # "train" or "dev"
    count: int | None
    left_out: dict[str, int]  # number of examples that were left out, by reason


class ParentRecord(BaseModel):
    """The run whose weights training started from, in provenance.json."""

    run: str
    digest: str | None = None  # of its weights
    steps: int | None = None
    teacher: str | None = None  # the run that it was distilled from
    parent: ParentRecord | None = None


class OriginRecord(BaseModel):
    """The published model that a run was imported from, in provenance.json."""

    name: str
    licence: str = ""  # as its authors name it, such as cc-by-4.0; "" if unknown
    architecture: str = ""


class Provenance(BaseModel):
    """The fields of provenance.json that the card uses."""

    origin: OriginRecord | None = None  # also of runs that were trained further

    corpora: list[CorpusRecord] = []
    parent: ParentRecord | None = None
    unit: str = ""  # what examples are called, such as "pairs"
    dragoman: str | None = None
    torch: str | None = None
    started: str | None = None
    ended: str | None = None
    training: dict[str, float] = {}  # seconds and tokens of a phrase-based system, which has no checkpoints with them


class TestScore(BaseModel):
    value: float
    signature: str | None = None


class TestRecord(BaseModel):
    """One line of scores.jsonl, written by `dragoman evaluate`. Earlier releases wrote neither engine nor tag."""

    date: str = ""
    test: str
    lines: int | None = None
    beam: int | None = None
    engine: str = "torch"
    tag: str = ""  # put before every source
    scores: dict[str, TestScore]


def parse_record(cls: type[_R], record: dict[str, Any], path: Path) -> _R:
    """Return a JSON object of the file `path` as an instance of `cls`; raise a UserError if it is damaged."""
    try:
        return cls.model_validate(record)
    except (ValidationError, RecursionError):
        raise UserError(f"{str(path)!r} is damaged; restore it, or remove it") from None


def read_card(run: str | Path) -> dict[str, Any]:
    """Return the contents of the card, read from the run folder, as a dict that can be written as JSON."""
    folder = RunFolder(run)
    predictor, header = open_run(run, device="cpu"), read_header(folder.model_file)
    recipe, tokenizers, target = predictor.recipe, predictor.tokenizers, predictor.tokenizers.target
    events = list(read_events(folder.metrics_file))
    train_events = [event for event in events if event["event"] == "train"]
    validations = [event for event in events if event["event"] == "validate"]
    task, directions = recipe.model.task, list_directions(recipe, tokenizers)
    best = max(validations, key=lambda event: rank_validation(event, recipe), default=None)
    state, provenance = folder.load_state(), parse_record(Provenance, folder.load_provenance(), folder.provenance_file)
    # Totals of training: in the last checkpoint or, if users have removed the checkpoints, in the last train event
    totals = state or (train_events[-1] if train_events else provenance.training)
    tokens, seconds = int(totals.get("tokens") or 0), totals.get("seconds") or 0.0
    position = state.get("place")  # position in the training data; state.json keeps the key of earlier releases
    return {
        "run": str(folder.path),
        "format": int(folder.format_file.read_text()),
        "digest": header["digest"],
        "task": task,
        "parameters": predictor.parameter_count,
        "model": recipe.model.model_dump(mode="json", exclude_unset=True),
        "settings": recipe.model.get_effective_settings(),
        "tokenizer": recipe.tokenizer.model_dump(),
        "vocabulary": {"source": tokenizers.source.size, "target": target.size},
        "vocabulary_shared": tokenizers.joint if task == "translate" else None,
        "origin": provenance.origin.model_dump() if provenance.origin else None,
        "languages": list(dict.fromkeys(str(direction) for direction in directions if direction.source)),
        "language_names": describe_directions(directions),
        "tags": [tag for tag in recipe.data.tags if tag],
        "direction": recipe.data.direction if any(corpus.phrasebook for corpus in recipe.data.train) else "",
        "data": {split: [name_corpus(corpus) for corpus in getattr(recipe.data, split)] for split in ("train", "dev")},
        "corpora": list_corpora(recipe, provenance),  # with counts, and with reversed corpora
        "unit": provenance.unit or ("pairs" if task == "translate" else "texts"),
        "labels": target.ids_to_tokens(range(target.size)) if task == "classify" else [],
        "teacher": folder.load_teacher_record(),
        "parent": provenance.model_dump()["parent"] or ({"run": state["parent"]} if state.get("parent") else None),
        "versions": {"dragoman": provenance.dragoman, "torch": provenance.torch},
        "started": provenance.started,
        "ended": provenance.ended,
        "longest_source": predictor.longest_source,
        "steps": int(header.get("step", 0)),  # 0 for a model that was imported
        "epochs": round(position["epoch"] + position.get("passed", 0.0), 4) if position else None,  # passed: a fraction
        "tokens_read": tokens,
        "train_seconds": seconds,
        "tokens_per_second": round(tokens / seconds) if seconds else 0,
        "validation": best,
        "tests": read_scores(folder.scores_file),
    }


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete train and validate records of metrics.jsonl, with keys of earlier releases renamed."""
    for event in read_records(path):
        required = REQUIRED_KEYS.get(event.get("event", ""))
        if required and required <= set(event):
            yield {RENAMED_KEYS.get(name, name): value for name, value in event.items()}


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects in a file with one JSON object per line; skip incomplete lines, as a crash leaves them."""
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if path.is_file() else []:
        with suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict):
                yield record


def read_scores(path: Path) -> list[dict[str, Any]]:
    """Return the results of `dragoman evaluate`: the newest value of each metric per test, beam, engine and tag."""
    newest: dict[tuple[str, int | None, str, str], TestRecord] = {}
    for record in read_records(path):
        result = parse_record(TestRecord, record, path)
        key = result.test, result.beam, result.engine, result.tag
        previous = newest.pop(key, None)
        if previous and previous.lines == result.lines:  # otherwise the test set has changed
            result.scores = {**previous.scores, **result.scores}
        newest[key] = result
    return [record.model_dump() for record in newest.values()]


def rank_validation(event: dict[str, Any], recipe: Recipe) -> tuple[float, float]:
    """Return the sort key by which training ranked its validations, best last; the loss decides between equal scores.

    With train.metric=auto, the metric is the one in `event`, and scores below `metric.floor` count as equal (early in
    training, BLEU is too low to rank models).
    """
    auto = recipe.train.metric == "auto"
    recorded = next((metric for metric in METRICS.values() if event.get(metric.name) is not None), None)
    metric = recorded if auto else choose_checkpoint_metric(recipe.train.metric, recipe.model.task)
    negative_loss = -event["loss"] if event["loss"] is not None else -math.inf
    score = event.get(metric.name) if metric else None
    if metric is None or score is None:
        return negative_loss, negative_loss
    goodness = metric.goodness(score)  # higher is better, also for error rates
    return max(goodness, metric.floor) if auto else goodness, negative_loss


def name_corpus(corpus: CorpusSettings) -> str:
    """Return a short description of a corpus: its files without folders, selection and weight."""
    if corpus.phrasebook:
        return f"phrasebook, {corpus.phrasebook} pairs, seed {corpus.seed}{corpus.selection_text}"
    weight = f" (weight {corpus.weight:g})" if corpus.weight != 1 else ""
    return " + ".join(Path(name).name for name in corpus.files) + corpus.selection_text + weight


def list_corpora(recipe: Recipe, provenance: Provenance) -> list[dict[str, Any]]:
    """Return the corpora of training and validation; counts are None where the run did not record them."""
    data = recipe.data
    corpora = [("train", corpus) for corpus in data.train_and_reversed] + [("dev", corpus) for corpus in data.dev]
    records = provenance.corpora
    if [record.split for record in records] != [split for split, _ in corpora]:
        records = [CorpusRecord(split=split, count=None, left_out={}) for split, _ in corpora]
    return [
        {"split": split, "name": name_corpus(corpus), "count": record.count, "left_out": record.left_out}
        for (split, corpus), record in zip(corpora, records, strict=True)
    ]


def format_card(card: dict[str, Any]) -> Sections:
    """Return the rows of the card as text, by section and name. Repeated names are numbered."""
    sections: Sections = {}

    def row(section: str, name: str, caller: Callable[[], str]) -> str:  # for {% call row(...) %} in the template
        rows = sections.setdefault(section, {})
        repeats = sum(other == name or other.startswith(f"{name} (") for other in rows)
        rows[f"{name} ({repeats + 1})" if repeats else name] = caller()
        return ""

    duration = timedelta(seconds=round(card["train_seconds"]))
    render_template("model_card_rows.jinja", {**card, "row": row, "duration": duration, "metrics": METRICS})
    return sections


def make_card_table(card: dict[str, Any]) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for rows in format_card(card).values():
        for name, value in rows.items():
            table.add_row(name, Text(value, overflow="fold"))
    return table


def render_card(run: str | Path, *, exported: str = "") -> str:
    """Return the model card as Markdown.

    `exported` is the name of the folder if the card is written for an exported model, else "".
    """
    card = read_card(run)
    card["run"] = Path(card["run"]).resolve().name  # the path means nothing to other readers of the card
    return render_template("model_card.md.jinja", {**card, "sections": format_card(card), "exported": exported})

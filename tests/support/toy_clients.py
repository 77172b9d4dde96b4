"""Requests of many clients to a shared engine, and what a translator alone gives for them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from random import Random

from dragoman.inference.translator import DecodeOptions, Translator
from dragoman.serving.batching import SharedEngine
from dragoman.types import Hypothesis, Line
from toy_run import make_sentences

REQUESTS = 500
Task = tuple[list[Line], DecodeOptions, bool]  # lines, options, and whether the translation of a line is streamed


def bind(translator: Translator, shared: SharedEngine, cancelled: threading.Event | None = None) -> Translator:
    """Return the translator of one request."""
    return replace(translator, engine=shared.bind(cancelled or threading.Event()))


def make_tasks(translator: Translator, *, constraints: bool) -> list[Task]:
    """Return requests with random texts and options; some lines are long enough for another width of batches."""
    random, sentences = Random(5), make_sentences(900, seed=3)
    options = [
        translator.make_options(beam=4, align=False),
        translator.make_options(beam=4, align=True),
        translator.make_options(beam=1, align=False),
        translator.make_options(beam=5, count=3, align=False),
    ]
    if constraints:
        options.append(translator.make_options(search={"method": "sample", "nbest": 2}, align=False))
    tasks: list[Task] = []
    for number in range(REQUESTS):
        streamed = number % 7 == 0
        texts = random.sample(sentences, 1 if streamed else random.choice((1, 1, 1, 2, 5)))
        texts = [" ".join([text] * random.choice((1, 1, 1, 6))) for text in texts]
        lines = [Line(text) for text in texts]
        if constraints and random.random() < 0.2:
            change = random.choice(({"prefix": "tun"}, {"terms": ("wex",)}, {"avoid": ("ak", "ol")}))
            lines = [replace(line, **change) for line in lines]
        tasks.append((lines, random.choice(options[:2] if streamed else options), streamed))
    return tasks


def finish(translator: Translator, task: Task) -> list[list[Hypothesis]]:
    """Return the n-best lists of a request; check that the parts of a stream are its text."""
    lines, options, streamed = task
    if not streamed:
        return translator.translate_nbest(lines, options)
    stream, text = translator.stream_line(lines[0], options), ""
    while True:
        try:
            text += next(stream)
        except StopIteration as end:
            hypothesis: Hypothesis = end.value
            assert text == hypothesis.text
            return [[hypothesis]]


def translate_together(translator: Translator, tasks: Sequence[Task]) -> list[list[list[Hypothesis]]]:
    """Return the n-best lists of each request; all lines with the same options are translated in one call."""
    found: dict[int, list[list[Hypothesis]]] = {}
    for options in {id(options): options for _, options, _ in tasks}.values():
        numbers = [number for number, task in enumerate(tasks) if task[1] is options]
        lists = iter(translator.translate_nbest([line for n in numbers for line in tasks[n][0]], options))
        found |= {number: [next(lists) for _ in tasks[number][0]] for number in numbers}
    return [found[number] for number in range(len(tasks))]

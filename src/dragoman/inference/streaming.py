"""Text of a hypothesis while the search is still running: each part as soon as the search cannot change it any more."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from itertools import takewhile
from queue import SimpleQueue
from threading import Event, Thread

import torch

from dragoman.decoding.beam import BeamState
from dragoman.decoding.protocol import NEG_INF
from dragoman.types import Hypothesis

BeamObserver = Callable[[BeamState], None]
# The text up to the end of its last complete word: before a space, or after a CJK character (a word by itself) that is
# not the last character.
COMPLETE_WORDS = re.compile(r".*(?:(?=\s)|(?<=[\u2e80-\ua4cf])(?=.))", re.DOTALL)


class StreamClosed(Exception):
    """Raised in the decoding thread of `stream_text` when the consumer has stopped reading."""


def find_certain_prefix(beams: BeamState) -> list[int]:
    """Return the common prefix of all active hypotheses and the best finished one, of the first sentence.

    Whatever the search finds later, its result starts with this prefix.
    """
    length = int(beams.length_B[0])
    rows = zip(beams.token_BWT[0].tolist(), beams.logp_BW[0].tolist())
    candidates = [tokens[:length] for tokens, logp in rows if logp > NEG_INF]
    if float(beams.end_score_BW[0, 0]) > NEG_INF:
        candidates.append(beams.end_token_BWT[0, 0, : int(beams.end_length_BW[0, 0]) - 1].tolist())
    common = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*candidates))
    return [tokens[0] for tokens in common]


def keep_complete_words(text: str) -> str:
    """Return the text without its last word, which further tokens may extend."""
    match = COMPLETE_WORDS.match(text)
    return match[0] if match else ""


def stream_text(
    work: Callable[[BeamObserver], list[list[Hypothesis]]], decode: Callable[[list[int]], str]
) -> Generator[str, None, Hypothesis]:
    """Yield the text of a hypothesis in parts, each as soon as it is final; return the hypothesis.

    `work` runs in a separate thread, calls its argument after each decoding step and returns the hypotheses of one
    segment. When the consumer closes the generator, the next such call raises StreamClosed, which ends the thread.
    """
    messages: SimpleQueue[list[int] | Hypothesis | BaseException] = SimpleQueue()  # a list: the certain tokens
    closed = Event()

    def observe(beams: BeamState) -> None:
        if closed.is_set():
            raise StreamClosed
        messages.put(find_certain_prefix(beams))

    has_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    gpu = torch.cuda.current_device() if has_gpu else None  # of this thread; a new thread starts with GPU 0

    def run() -> None:
        try:
            if gpu is not None:
                torch.cuda.set_device(gpu)
            messages.put(work(observe)[0][0])
        except BaseException as error:
            messages.put(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    sent = 0  # characters yielded so far
    try:
        while True:
            message = messages.get()
            if isinstance(message, BaseException):
                raise message
            text = keep_complete_words(decode(message)) if isinstance(message, list) else message.text
            if len(text) > sent:
                yield text[sent:]
                sent = len(text)
            if isinstance(message, Hypothesis):
                return message
    finally:
        closed.set()
        thread.join()

"""Words of an answer as soon as they are certain: said once, they are never taken back.

A word is certain when all that can still become the answer begins with it: every prefix that lives, and the best of the
answers that are whole. Greedy search is certain of each word at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from itertools import takewhile
from queue import SimpleQueue
from threading import Event, Thread

import torch

from dragoman.search.beam import Beams
from dragoman.search.step import NEVER
from dragoman.types import Hypothesis

Watch = Callable[[Beams], None]
RIPE = re.compile(r".*(?:(?=\s)|(?<=[\u2e80-\ua4cf])(?=.))", re.DOTALL)  # whole words; where none have spaces, letters


class GivenUp(Exception):
    """Nobody listens any more."""


def certain(beams: Beams) -> list[int]:
    """The tokens that the answer to the first sentence begins with, whatever happens."""
    live, whole = beams.live, beams.whole
    length = int(live.length_B[0])
    rows = zip(live.token_BWT[0].tolist(), live.logp_BW[0].tolist())
    ways = [tokens[:length] for tokens, logp in rows if logp > NEVER]
    if float(whole.score_BW[0, 0]) > NEVER:
        ways.append(whole.token_BWT[0, 0, : int(whole.length_BW[0, 0]) - 1].tolist())
    same = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*ways))
    return [tokens[0] for tokens in same]


def ripe(text: str) -> str:
    """The part of a text that more tokens will not change: a word may still grow, half a character become whole."""
    found = RIPE.match(text)
    return found[0] if found else ""


def told(work: Callable[[Watch], Hypothesis], text_of: Callable[[list[int]], str]) -> Generator[str, None, Hypothesis]:
    """Pieces of the text of an answer, which `work` makes under the eyes of someone who watches; then the answer.

    The work is done in a thread of its own, and given up when nobody takes the pieces any more.
    """
    heard: SimpleQueue[str | Hypothesis | BaseException] = SimpleQueue()
    over = Event()

    def watch(beams: Beams) -> None:
        if over.is_set():
            raise GivenUp
        heard.put(ripe(text_of(certain(beams))))

    busy = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    gpu = torch.cuda.current_device() if busy else None  # a new thread begins with the first

    def run() -> None:
        try:
            if gpu is not None:
                torch.cuda.set_device(gpu)
            heard.put(work(watch))
        except BaseException as fault:
            heard.put(fault)

    thread = Thread(target=run, daemon=True)
    thread.start()
    said = 0
    try:
        while True:
            news = heard.get()
            if isinstance(news, BaseException):
                raise news
            text = news if isinstance(news, str) else news.text
            if len(text) > said:
                yield text[said:]
                said = len(text)
            if isinstance(news, Hypothesis):
                return news
    finally:
        over.set()
        thread.join()

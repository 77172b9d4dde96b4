"""What one model answered, as pairs for another to learn from. From answers with a fault it would learn the fault."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator

from dragoman.door import kinds
from dragoman.shards import Record
from dragoman.translator import TREELESS
from dragoman.types import Hypothesis


def faults(answer: Hypothesis) -> list[str]:
    """Why nobody should learn from an answer. That a model of trees had none for it is no reason."""
    return [*(why for why in answer.warnings if why != TREELESS), *answer.flags]


class Lessons:
    """Counts the records that are good to learn from, and those that are left out, by their first fault.

    `asked` are those of lines with words in them, and `useful` the good ones among these.
    """

    def __init__(self) -> None:
        self.good = self.asked = self.useful = 0
        self.left_out: Counter[str] = Counter()

    def lines(self, records: Iterable[Record]) -> Iterator[str]:
        """The good ones as lines of JSON: source, target."""
        for record in records:
            worded = bool(record["source"].strip() or record["target"].strip())  # nothing answers nothing
            self.asked += worded
            if record["faults"]:
                self.left_out.update(kinds(record["faults"])[:1])
            else:
                self.good += 1
                self.useful += worded
                pair = {"source": record["source"], "target": record["target"]}
                yield json.dumps(pair, ensure_ascii=False) + "\n"

    @property
    def total(self) -> int:
        return self.good + self.left_out.total()

    def __str__(self) -> str:
        why = ", ".join(f"{count:,} {what}" for what, count in self.left_out.items())
        return f"{self.good:,} of {self.total:,} answers" + (f" ({why}: left out)" if why else "")


def remedy(model: str) -> str:
    """What may help a model, or several that answer as one: "seed-1 and seed-2"."""
    them, their = ("them", "their") if " and " in model else ("it", "its")
    return f"train {them} longer, or look at {their} answers with dragoman translate"


def doubt(model: str, useful: int, asked: int) -> str:
    """What there is to say where fewer than half of a model's answers are good to learn from, else nothing."""
    if 2 * useful >= asked:
        return ""
    return f"fewer than half of the answers of {model} are good enough to learn from; {remedy(model)}"

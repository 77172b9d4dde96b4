"""A set of sentences in little memory: whether one was given before, at four bytes a slot."""

from __future__ import annotations

import mmap
from hashlib import blake2b


class Fingerprints:
    """Open addressing on 32-bit fingerprints.

    A hash gives a sentence its first slot and its fingerprint. Two sentences meet by mistake about once in a billion;
    then one of them is taken for given and left out, which does no harm. Memory is only touched where slots are used.
    """

    def __init__(self, count: int) -> None:
        slots = 1 << max(10, (count + count // 2).bit_length())
        self.mask = slots - 1
        self.table = memoryview(mmap.mmap(-1, 4 * slots)).cast("I")

    def place(self, text: str) -> tuple[int, int]:
        """Where this text lies, or would lie; and its fingerprint."""
        number = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
        table, mask = self.table, self.mask
        mark, place = (number >> 32) or 1, number & mask
        while (found := table[place]) and found != mark:
            place = (place + 1) & mask
        return place, mark


def both_new(sources: Fingerprints, source: str, targets: Fingerprints, target: str) -> bool:
    """Whether neither text was met before; if so, both now were."""
    first, first_mark = sources.place(source)
    second, second_mark = targets.place(target)
    if sources.table[first] or targets.table[second]:
        return False
    sources.table[first], targets.table[second] = first_mark, second_mark
    return True

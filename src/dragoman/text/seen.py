"""Which texts were met before, for millions of them: a table of 64-bit hashes, about 20 bytes a text.

Two different texts share a hash once in some 10**19 tries: among ten million texts, with a chance of 3 in a million.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b


class Seen:
    """A set of texts that can only grow.

    seen = Seen()
    assert seen.add("a dog") and not seen.add("a dog")
    """

    def __init__(self) -> None:
        self.count = 0
        self.table = array("Q", bytes(8 << 10))  # open addressing; 0 is an empty place

    def add(self, *parts: str) -> bool:
        """Add a text of these parts; return True if it was not there yet."""
        key = _key(parts)
        table, mask = self.table, len(self.table) - 1
        slot = key & mask
        while (held := table[slot]) and held != key:
            slot = (slot + 1) & mask
        if held:
            return False
        table[slot] = key
        self.count += 1
        if self.count * 3 > len(table) * 2:
            self._grow()
        return True

    def holds(self, *parts: str) -> bool:
        """Return whether a text of these parts was added."""
        key = _key(parts)
        table, mask = self.table, len(self.table) - 1
        slot = key & mask
        while (held := table[slot]) and held != key:
            slot = (slot + 1) & mask
        return bool(held)

    def _grow(self) -> None:
        old, self.table = self.table, array("Q", bytes(16 * len(self.table)))
        table, mask = self.table, len(self.table) - 1
        for key in filter(None, old):
            slot = key & mask
            while table[slot]:
                slot = (slot + 1) & mask
            table[slot] = key


def _key(parts: tuple[str, ...]) -> int:
    text = b"\xff".join([part.encode() for part in parts])  # a byte of no UTF-8: ("ab", "c") is not ("a", "bc")
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") or 1

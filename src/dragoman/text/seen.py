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
        """True when these parts were not there yet."""
        digest = blake2b(digest_size=8)
        for part in parts:
            digest.update(part.encode())
            digest.update(b"\xff")  # in no UTF-8 text, so that ("ab", "c") and ("a", "bc") differ
        key = int.from_bytes(digest.digest(), "little") or 1
        place = self._place(key)
        if self.table[place]:
            return False
        self.table[place] = key
        self.count += 1
        if self.count * 3 > len(self.table) * 2:
            self._grow()
        return True

    def _place(self, key: int) -> int:
        """Where the key is, or would go."""
        table, mask = self.table, len(self.table) - 1
        place = key & mask
        while table[place] and table[place] != key:
            place = (place + 1) & mask
        return place

    def _grow(self) -> None:
        old, self.table = self.table, array("Q", bytes(16 * len(self.table)))
        for key in old:
            if key:
                self.table[self._place(key)] = key

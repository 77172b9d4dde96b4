"""One language's half of a pair: words with nodes and heads, and what is true of them once they stand in a row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from dragoman.text.plan import Nominal, Plan

PREVIOUS, NEXT = -1, -2  # in a note: the word before the next node named, the word after the last one
Token = tuple[str, int, int]  # word, node, node of its head (its own clause's head stands for itself)


class Side(ABC):
    """Words in order. Subclasses know one language's order and forms."""

    __slots__ = ("above", "fused", "notes", "nouns", "references", "subjects", "tokens", "words", "written")

    def __init__(self) -> None:
        self.tokens: list[Token] = []
        self.fused: dict[int, int] = {}  # node of a word -> another node that it says as well: im, cannot, kein
        self.above: dict[int, int] = {}  # head of a clause -> what the clause hangs on
        self.notes: list[tuple[str, tuple[int, ...]]] = []
        self.nouns: list[tuple[int, bool]] = []
        self.subjects: list[tuple[int, int, bool]] = []  # subject, finite verb, plural
        self.references: list[tuple[int, int]] = []
        self.words: list[str] = []
        self.written = ""

    def add(self, word: str, node: int, head: int) -> None:
        self.tokens.append((word, node, head))

    def fuse(self, word: str, node: int, other: int) -> None:
        """The last word of this node becomes `word` and says the other node as well."""
        place = next(n for n in range(len(self.tokens) - 1, -1, -1) if self.tokens[n][1] == node)
        self.tokens[place] = (word, node, self.tokens[place][2])
        self.fused[node] = other

    def noun(self, word: str, nominal: Nominal, head: int) -> None:
        self.tokens.append((word, nominal.node, head))
        self.nouns.append((nominal.node, nominal.plural))

    def phrasal(self, parts: tuple[str, ...], node: int, head: int) -> None:
        """Words of a fixed phrase; the last is its head."""
        last = node + 4 * (len(parts) - 1)
        for place, word in enumerate(parts):
            self.tokens.append((word, node + 4 * place, head if node + 4 * place == last else last))

    def note(self, name: str, *nodes: int) -> None:
        self.notes.append((name, nodes))

    def refers(self, nominal: Nominal) -> None:
        """A pronoun whose gender an earlier noun decides."""
        if nominal.antecedent is not None:
            self.references.append((nominal.node, nominal.antecedent.node))
            self.note("pronoun", PREVIOUS, nominal.node)

    def agrees(self, subject: Nominal, finite: int) -> None:
        if not subject.pronoun:
            self.subjects.append((subject.node, finite, subject.plural))

    # ---- what stands in the row

    def write(self, plan: Plan) -> None:
        self.sentence(plan)
        row = [token[0] for token in self.tokens]
        row[0] = row[0][0].upper() + row[0][1:]
        self.words = row
        self.written = " ".join(row).replace(" ,", ",").replace(" .", ".").replace(" ?", "?")

    @abstractmethod
    def sentence(self, plan: Plan) -> None:
        """Put the words of the plan in a row."""

    def places(self) -> dict[int, int]:
        return {token[1]: place for place, token in enumerate(self.tokens)}

    def heads(self, places: dict[int, int], root: int) -> tuple[int, ...]:
        """The place of each word's head, counted from 1; 0 for the root."""
        above, heads = self.above, []
        for _, node, head in self.tokens:
            heads.append(0 if node == root else places[above.get(node, head)] + 1)
        return tuple(heads)

    def concepts(self) -> dict[int, list[int]]:
        """Where each meaning (a node without its last two bits) is said."""
        table: dict[int, list[int]] = {}
        for place, (_, node, _) in enumerate(self.tokens):
            table.setdefault(node >> 2, []).append(place)
            if node in self.fused:
                table.setdefault(self.fused[node] >> 2, []).append(place)
        return table

    def phenomena(self, places: dict[int, int]) -> Iterable[tuple[str, tuple[int, ...]]]:
        nouns = [(places[node], plural) for node, plural in self.nouns]
        for subject, finite, plural in self.subjects:
            first, last = places.get(subject, -1), places.get(finite, -1)
            if 0 <= first < last and any(first < place < last and many != plural for place, many in nouns):
                yield "agreement", (first, last - 1, last) if last - 1 > first else (first, last)
        for name, nodes in self.notes:
            yield name, self.located(nodes, places)

    def located(self, nodes: tuple[int, ...], places: dict[int, int]) -> tuple[int, ...]:
        row = [places[node] for node in nodes if node >= 0]
        if nodes[0] == PREVIOUS:
            row.insert(0, row[0] - 1) if row[0] > 0 else row.append(row[-1] + 1)
        if nodes[-1] == NEXT:
            row.append(row[-1] + 1)
        return tuple(row)

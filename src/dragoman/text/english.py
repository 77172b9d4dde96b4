"""English: puts a plan into words, each with its node and the node it hangs on."""

from __future__ import annotations

from dragoman.text.plan import (
    ADJECTIVE,
    ASKED,
    COLOUR,
    COMMA,
    CONJUNCTION,
    DEGREE,
    DETERMINER,
    FINAL,
    HELPER,
    INFINITIVE,
    MAIN,
    MANNER,
    MORE,
    NOT,
    OF,
    OFTEN,
    OPINION,
    PREDICATE,
    PREPOSITION,
    QUESTION,
    RELATIVE,
    STOP,
    THAN,
    WHEN,
    Clause,
    Nominal,
    Plan,
)  # fmt: skip
from dragoman.text.side import NEXT, PREVIOUS, Side

PRONOUNS = {
    "I": ("I", "me"), "we": ("we", "us"), "he": ("he", "him"), "she": ("she", "her"), "it": ("it", "it"),
    "they": ("they", "them"), "who": ("who", "who"), "what": ("what", "what"),
}  # fmt: skip
PLURALS = {"this": "these"}
MODALS = {  # present, past; then whether "to" follows
    "can": ("can", "could", False),
    "must": ("must", "had", False),
    "want": ("want", "wanted", True),
    "may": ("may", "", False),
    "should": ("should", "", False),
}
VOWELS = frozenset("aeiou")
BE = {"present": ("am", "is", "are"), "past": ("was", "was", "were")}  # I, he, we
HAVE = ("have", "has", "have")


class English(Side):
    """The English half of a pair."""

    def sentence(self, plan: Plan) -> None:
        for clause in plan.clauses:
            self.joined(clause, plan)
        self.add("?" if plan.root.kind == QUESTION else ".", plan.root.node + STOP, plan.root.head)

    def joined(self, clause: Clause, plan: Plan) -> None:
        """A clause with what joins it to the one before; only a clause that comes first is followed by a comma."""
        root, place = plan.root, plan.clauses.index(clause)
        if clause is root:
            self.clause(clause, 0)
            return
        if place == 1 and clause.kind == MAIN:
            self.add(",", clause.node + COMMA, clause.head)
        self.conjunction(clause)
        self.clause(clause, root.head)
        if place == 0:
            self.add(",", clause.node + COMMA, clause.head)

    def conjunction(self, clause: Clause) -> None:
        for place, word in enumerate(clause.conjunction[0].split("_")):
            self.add(word, clause.node + CONJUNCTION + place, clause.head)

    # ---- clauses

    def clause(self, clause: Clause, above: int) -> None:
        head, subject = clause.head, clause.subject
        assert subject is not None
        self.above[head] = above
        self.front(clause)
        moved = clause.moved
        if moved:
            self.nominal(getattr(clause, moved), moved == "subject", head)
        if clause.asked:
            self.add(clause.asked, clause.node + ASKED, head)
        asks = clause.kind == QUESTION and moved != "subject"
        finite, rest = self.verbs(clause, asks or clause.negated)
        if asks:
            self.add(*finite)
        if moved != "subject" and clause.kind != INFINITIVE:
            self.nominal(subject, True, head)
        if clause.kind != INFINITIVE and not asks:
            if finite[1] == clause.node and clause.verb and clause.often:
                self.often(clause)
            self.add(*finite)
        if clause.kind != INFINITIVE:
            self.agrees(subject, finite[1])
        if clause.kind in (FINAL, RELATIVE) or clause.front or clause.inverted:
            self.note("verb-position", PREVIOUS, finite[1])
        elif clause.kind == QUESTION:
            self.note("verb-position", finite[1], NEXT)
        self.after_finite(clause, finite, rest)

    def after_finite(self, clause: Clause, finite: tuple[str, int, int], rest: list[tuple[str, int, int]]) -> None:
        node, head = clause.node, clause.head
        if clause.negated and finite[0] == "can":
            self.fuse("cannot", finite[1], node + NOT)
        elif clause.negated:
            self.add("not", node + NOT, head)
        if finite[1] != node or not clause.verb:
            self.often(clause)
        for token in rest:
            self.add(*token)
        self.objects(clause)
        if clause.verb is None or clause.predicate:
            self.predicate(clause)
        if clause.manner:
            self.add(clause.manner.adverb, node + MANNER, head)
        if clause.place:
            self.nominal(clause.place, False, head)
        if clause.setting and clause.front != "setting":
            self.nominal(clause.setting, False, head)
        if clause.when and clause.front != "when":
            self.when(clause)
        if clause.clause:
            if clause.clause.kind == FINAL:
                self.conjunction(clause.clause)
            self.clause(clause.clause, head)

    def front(self, clause: Clause) -> None:
        if clause.front == "when":
            self.when(clause)
        elif clause.front == "setting" and clause.setting:
            self.nominal(clause.setting, False, clause.head)
            self.add(",", clause.node + COMMA, clause.head)
        elif clause.front == "opinion" and clause.opinion:
            opinion = clause.opinion.english
            for place, word in enumerate(opinion):
                self.add(word, clause.node + OPINION + place, clause.head if place == 0 else clause.node + OPINION)
            if len(opinion) > 1 or opinion[0] == "unfortunately":
                self.add(",", clause.node + COMMA, clause.head)

    def verbs(self, clause: Clause, helped: bool) -> tuple[tuple[str, int, int], list[tuple[str, int, int]]]:
        """The finite verb and the verb forms after it."""
        node, verb, subject, tense = clause.node, clause.verb, clause.subject, clause.tense
        assert subject is not None
        person = 2 if subject.plural else 0 if subject.pronoun == "I" else 1
        head, helper, do = clause.head, node + HELPER, node + 1
        base = verb.english[0] if verb else "be"
        last = [(base, node, head)]
        if clause.kind == INFINITIVE:
            return ("", helper, head), [("to", helper, head), *last]
        if clause.modal:
            return self.modal(clause, person, helped, last)
        if tense == "future":
            return ("will", helper, head), last
        if tense == "perfect":
            return (HAVE[person], helper, head), [(verb.english[3] if verb else "been", node, head)]
        if verb is None:
            return (BE[tense][person], node, head), []
        if helped:
            word = "did" if tense == "past" else ("do", "does", "do")[person]
            return (word, do, head), last
        word = verb.english[2] if tense == "past" else verb.english[person == 1]
        return (word, node, head), []

    def modal(
        self, clause: Clause, person: int, helped: bool, last: list[tuple[str, int, int]]
    ) -> tuple[tuple[str, int, int], list[tuple[str, int, int]]]:
        """can, could, had to, wants to, does not want to."""
        past = clause.tense == "past"
        helper, head = clause.node + HELPER, clause.head
        present, before, to = MODALS[clause.modal]
        word = before if past else present
        to = to or word == "had"
        if not to:
            return (word, helper, head), last
        tail = [("to", helper + 1, head), *last]
        if helped:
            plain = "have" if clause.modal == "must" else clause.modal
            return ("did" if past else ("do", "does", "do")[person], helper + 2, head), [(plain, helper, head), *tail]
        return (word if past or person != 1 else word + "s", helper, head), tail

    def objects(self, clause: Clause) -> None:
        verb, head, thing = clause.verb, clause.head, clause.accusative
        late = False
        if verb and verb.particle:
            late = not verb.clings and thing is not None and bool(thing.pronoun) and clause.moved != "accusative"
            if not late:
                self.add(verb.particle, clause.node + 2, clause.node)
        for role in ("dative", "accusative", "prepositional"):
            nominal = getattr(clause, role)
            if nominal and clause.moved != role:
                self.nominal(nominal, False, head)
        if late and verb:
            self.add(verb.particle, clause.node + 2, clause.node)

    def predicate(self, clause: Clause) -> None:
        adjective, node = clause.predicate, clause.node
        assert adjective is not None
        if clause.degree:
            self.add(clause.degree.english[0], node + MORE, node + PREDICATE)
        if clause.comparison is None:
            self.add(adjective.english, node + PREDICATE, clause.node)
            return
        *more, last = adjective.comparative.split()
        for word in more:
            self.add(word, node + PREDICATE + 1, node + PREDICATE)
        self.add(last, node + PREDICATE, clause.node)
        self.add("than", node + THAN, clause.comparison.node)
        self.nominal(clause.comparison, True, node + PREDICATE)

    def often(self, clause: Clause) -> None:
        if clause.often:
            self.add(clause.often.english[0], clause.node + OFTEN, clause.head)

    def when(self, clause: Clause) -> None:
        if clause.when:
            self.phrasal(clause.when.english, clause.node + WHEN, clause.head)

    # ---- nominals

    def nominal(self, nominal: Nominal, subject: bool, head: int) -> None:
        node, noun = nominal.node, nominal.noun
        if nominal.preposition:
            for place, word in enumerate(nominal.preposition[0].split("_")):
                self.add(word, node + PREPOSITION + place, node)
        if nominal.pronoun:
            self.pronoun(nominal, subject, head)
            return
        assert noun is not None
        before: list[tuple[str, int, int]] = []
        if nominal.degree:
            before.append((nominal.degree.english[0], node + DEGREE, node + ADJECTIVE))
        if nominal.adjective:
            before.append((nominal.adjective.english, node + ADJECTIVE, node))
        if nominal.colour:
            before.append((nominal.colour.english, node + COLOUR, node))
        word = noun.english[nominal.plural]
        determiner = nominal.determiner
        if determiner:
            if nominal.plural:
                determiner = PLURALS.get(determiner, determiner)
            elif determiner == "a" and (before[0][0] if before else word)[0] in VOWELS:
                determiner = "an"
            self.add(determiner, node + DETERMINER, node)
        for token in before:
            self.add(*token)
        self.noun(word, nominal, head)
        if nominal.owner:
            self.add("of", nominal.owner.node + OF, nominal.owner.node)
            self.nominal(nominal.owner, False, node)
        if nominal.with_:
            self.nominal(nominal.with_, False, node)
        if nominal.relative:
            self.clause(nominal.relative, node)

    def pronoun(self, nominal: Nominal, subject: bool, head: int) -> None:
        if nominal.pronoun == "relative":
            person = nominal.noun is not None and "person" in nominal.noun.tags
            thing = "which" if nominal.preposition else "that"
            self.add(("who" if subject else "whom") if person else thing, nominal.node, head)
            self.note("relative", PREVIOUS, nominal.node)
            return
        self.add(PRONOUNS[nominal.pronoun][not subject], nominal.node, head)
        self.refers(nominal)

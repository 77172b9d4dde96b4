"""German: puts a plan into words, each with its node and the node it hangs on.

The order of a clause: what opens it, the finite verb (second in a main clause, last in a subordinate one), the subject
unless it opened, pronouns, when, how often, the dative, the accusative, "nicht", how, the rest, the infinite verb.
"""

from __future__ import annotations

from dragoman.text.plan import (
    ADJECTIVE,
    ASKED,
    COLOUR,
    COMMA,
    CONJUNCTION,
    DEGREE,
    DETERMINER,
    END,
    FINAL,
    HELPER,
    INFINITIVE,
    MAIN,
    MANNER,
    MORE,
    NOT,
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
from dragoman.text.side import NEXT, PREVIOUS, Side, Token
from dragoman.text.words import ACCUSATIVE, DATIVE, GENITIVE, NOMINATIVE, PLURAL

Forms = tuple[tuple[str, str, str, str], ...]  # [gender][case]
CASE = {"subject": NOMINATIVE, "accusative": ACCUSATIVE, "dative": DATIVE, "prepositional": DATIVE}

STRONG: Forms = (("er", "en", "em", "en"), ("e", "e", "er", "er"), ("es", "es", "em", "en"), ("e", "e", "en", "er"))
WEAK: Forms = (("e", "en", "en", "en"), ("e", "e", "en", "en"), ("e", "e", "en", "en"), ("en", "en", "en", "en"))
MIXED: Forms = (("er", "en", "en", "en"), ("e", "e", "en", "en"), ("es", "es", "en", "en"), ("en", "en", "en", "en"))
ARTICLE: Forms = (
    ("der", "den", "dem", "des"),
    ("die", "die", "der", "der"),
    ("das", "das", "dem", "des"),
    ("die", "die", "den", "der"),
)
LIKE_DIESER: Forms = (("er", "en", "em", "es"), STRONG[1], ("es", "es", "em", "es"), STRONG[3])
LIKE_EIN: Forms = (("", "en", "em", "es"), ("e", "e", "er", "er"), ("", "", "em", "es"), ("e", "e", "en", "er"))
RELATIVES: Forms = (
    ("der", "den", "dem", "dessen"),
    ("die", "die", "der", "deren"),
    ("das", "das", "dem", "dessen"),
    ("die", "die", "denen", "deren"),
)
THIRD: Forms = (
    ("er", "ihn", "ihm", ""),
    ("sie", "sie", "ihr", ""),
    ("es", "es", "ihm", ""),
    ("sie", "sie", "ihnen", ""),
)
PRONOUNS = {
    "I": ("ich", "mich", "mir"),
    "we": ("wir", "uns", "uns"),
    "he": THIRD[0],
    "she": THIRD[1],
    "they": THIRD[3],
    "who": ("wer", "wen", "wem"),
    "what": ("was", "was", ""),
}
VAGUE = frozenset(("", "a", "some", "several", "many", "two", "three", "four", "five", "six", "ten"))  # after manner
NOT_A = "not a"  # "kein" in the object, where English says "not ... a"


def stemmed(stem: str, endings: Forms) -> Forms:
    return tuple((stem + a, stem + b, stem + c, stem + d) for a, b, c, d in endings)


def fixed(word: str) -> Forms:
    return ((word, word, word, word),) * 4


DETERMINERS: dict[str, tuple[Forms, Forms]] = {  # name -> its forms, the endings of an adjective after it
    "": (fixed(""), STRONG),
    "the": (ARTICLE, WEAK),
    **{name: (stemmed(stem, LIKE_DIESER), WEAK) for name, stem in [("this", "dies"), ("every", "jed"), ("all", "all")]},
    "which": (stemmed("welch", LIKE_DIESER), WEAK),
    **{name: (stemmed(stem, LIKE_EIN), MIXED) for name, stem in [("a", "ein"), ("no", "kein"), (NOT_A, "kein")]},
    **{name: (stemmed(stem, LIKE_EIN), MIXED) for name, stem in [("my", "mein"), ("our", "unser")]},
    **{name: (stemmed(stem, LIKE_EIN), MIXED) for name, stem in [("his", "sein"), ("her", "ihr")]},
    **{name: (stemmed(stem, LIKE_DIESER), STRONG) for name, stem in [("many", "viel"), ("some", "einig")]},
    "several": (stemmed("mehrer", LIKE_DIESER), STRONG),
    "two": (fixed("zwei"), STRONG),
    "three": (fixed("drei"), STRONG),
    "four": (fixed("vier"), STRONG),
    "five": (fixed("fünf"), STRONG),
    "six": (fixed("sechs"), STRONG),
    "ten": (fixed("zehn"), STRONG),
}
CONTRACTIONS = {
    ("in", "dem"): "im",
    ("an", "dem"): "am",
    ("zu", "dem"): "zum",
    ("zu", "der"): "zur",
    ("von", "dem"): "vom",
}
BE = {"present": ("bin", "ist", "sind"), "past": ("war", "war", "waren")}  # ich, er, wir
HELPERS = {"haben": ("habe", "hat", "haben"), "sein": BE["present"], "werden": ("werde", "wird", "werden")}
MODALS = {
    "can": {"present": ("kann", "kann", "können"), "past": ("konnte", "konnte", "konnten")},
    "must": {"present": ("muss", "muss", "müssen"), "past": ("musste", "musste", "mussten")},
    "want": {"present": ("will", "will", "wollen"), "past": ("wollte", "wollte", "wollten")},
    "may": {"present": ("darf", "darf", "dürfen"), "past": ("durfte", "durfte", "durften")},
    "should": {"present": ("soll", "soll", "sollen"), "past": ("sollte", "sollte", "sollten")},
}


class German(Side):
    """The German half of a pair."""

    def sentence(self, plan: Plan) -> None:
        root = plan.root
        for clause in plan.clauses:
            if clause is root:
                self.clause(clause, 0)
            elif clause is plan.clauses[0]:
                self.add(clause.conjunction[1], clause.node + CONJUNCTION, clause.head)
                self.clause(clause, root.head)
                self.add(",", clause.node + COMMA, clause.head)
            else:
                if clause.conjunction[1] != "und":
                    self.add(",", clause.node + COMMA, clause.head)
                self.add(clause.conjunction[1], clause.node + CONJUNCTION, clause.head)
                self.clause(clause, root.head)
        self.add("?" if root.kind == QUESTION else ".", root.node + STOP, root.head)
        self.tokens = [
            token
            for token, after in zip(self.tokens, [*self.tokens[1:], self.tokens[-1]])
            if token[0] != "," or after[0] not in (",", ".", "?")
        ]

    # ---- clauses

    def clause(self, clause: Clause, above: int) -> None:
        self.above[clause.head] = above
        if clause.kind == INFINITIVE:
            self.middle(clause)
            self.to_infinitive(clause)
            return
        last = clause.kind in (FINAL, RELATIVE)
        finite, tail = self.verbs(clause, last)
        opens = self.opening(clause)
        if not last:
            self.add(*finite)
            if opens or clause.inverted:
                self.note("verb-position", PREVIOUS, finite[1])
        if (
            clause.subject
            and clause.moved != "subject"
            and (last or opens or clause.inverted or clause.kind == QUESTION)
        ):
            self.nominal(clause.subject, NOMINATIVE, clause.head)
        self.middle(clause)
        for token in tail:
            self.add(*token)
        if last:
            self.add(*finite)
            self.note("verb-position", self.opener(clause), finite[1], NEXT)
        elif tail and tail[-1][1] == clause.node + 2:
            self.note("verb-position", finite[1], clause.node + 2, NEXT)
        if clause.subject:
            self.agrees(clause.subject, finite[1])
        self.inner(clause)

    def opening(self, clause: Clause) -> bool:
        """What stands before the finite verb; whether that is something other than the subject."""
        head = clause.head
        if clause.moved:
            self.nominal(getattr(clause, clause.moved), CASE[clause.moved], head)
            return clause.moved != "subject"
        if clause.asked:
            self.add(ASKING[clause.asked], clause.node + ASKED, head)
        elif clause.front == "when":
            self.when(clause)
        elif clause.front == "setting" and clause.setting:
            self.nominal(clause.setting, DATIVE, head)
        elif clause.front == "opinion" and clause.opinion:
            self.add(clause.opinion.german[0], clause.node + OPINION, head)
        else:
            if clause.kind == MAIN and not clause.inverted and clause.subject:
                self.nominal(clause.subject, NOMINATIVE, head)
            return False
        return True

    def opener(self, clause: Clause) -> int:
        """The word that makes the verb go last."""
        if clause.kind == RELATIVE:
            moved: Nominal = getattr(clause, clause.moved)
            return moved.node
        return clause.node + CONJUNCTION

    def middle(self, clause: Clause) -> None:
        head, node = clause.head, clause.node
        dative, thing = clause.dative, clause.accusative
        if thing and thing.pronoun and clause.moved != "accusative":
            self.nominal(thing, ACCUSATIVE, head)
        if dative and dative.pronoun and clause.moved != "dative":
            self.nominal(dative, DATIVE, head)
        if clause.when and clause.front != "when":
            self.when(clause)
        if clause.setting and clause.front != "setting":
            self.nominal(clause.setting, DATIVE, head)
        if clause.often:
            self.add(clause.often.german[0], node + OFTEN, head)
        if dative and not dative.pronoun and clause.moved != "dative":
            self.nominal(dative, DATIVE, head)
        vague = thing is not None and thing.determiner in VAGUE
        if clause.manner and vague:
            self.add(clause.manner.german, node + MANNER, head)
        if thing and not thing.pronoun and clause.moved != "accusative":
            self.nominal(thing, ACCUSATIVE, head)
        if clause.negated and not clause.silent:
            self.add("nicht", node + NOT, head)
        if clause.manner and not vague:
            self.add(clause.manner.german, node + MANNER, head)
        if clause.place:
            self.nominal(clause.place, DATIVE, head)
        if clause.prepositional and clause.moved != "prepositional":
            self.nominal(clause.prepositional, DATIVE, head)
        if clause.predicate:
            self.predicate(clause)

    def inner(self, clause: Clause) -> None:
        inner = clause.clause
        if inner:
            self.add(",", inner.node + COMMA, inner.head)
            if inner.kind == FINAL:
                self.add(inner.conjunction[1], inner.node + CONJUNCTION, inner.head)
            self.clause(inner, clause.head)

    def verbs(self, clause: Clause, last: bool) -> tuple[Token, list[Token]]:
        """The finite verb, and the verb forms that close the clause."""
        node, verb, subject, tense = clause.node, clause.verb, clause.subject, clause.tense
        assert subject is not None
        person = 2 if subject.plural else 0 if subject.pronoun == "I" else 1
        head, helper = clause.head, node + HELPER
        infinitive = (verb.prefix + verb.infinitive if verb else "sein", node, head)
        if clause.modal:
            return (MODALS[clause.modal][tense][person], helper, head), [infinitive]
        if tense == "future":
            return (HELPERS["werden"][person], helper, head), [infinitive]
        if tense == "perfect":
            participle = (verb.participle if verb else "gewesen", node, head)
            return (HELPERS[verb.helper if verb else "sein"][person], helper, head), [participle]
        if verb is None:
            return (BE[tense][person], node, head), []
        word = verb.present[person] if tense == "present" else verb.past[person == 2]
        if not verb.prefix:
            return (word, node, head), []
        if last:
            return (verb.prefix + word, node, head), []
        return (word, node, head), [(verb.prefix, node + 2, node)]

    def to_infinitive(self, clause: Clause) -> None:
        node, verb, head = clause.node, clause.verb, clause.head
        assert verb is not None
        if verb.prefix:
            self.add(verb.prefix + "zu" + verb.infinitive, node, head)
            self.fused[node] = node + HELPER
        else:
            self.add("zu", node + HELPER, head)
            self.add(verb.infinitive, node, head)
        self.note("verb-position", node + COMMA, node, NEXT)

    def predicate(self, clause: Clause) -> None:
        adjective, node = clause.predicate, clause.node
        assert adjective is not None
        if clause.degree:
            self.add(clause.degree.german[0], node + MORE, node + PREDICATE)
        if clause.comparison is None:
            self.add(adjective.german, node + PREDICATE, node)
            return
        self.add(adjective.german_comparative, node + PREDICATE, node)
        self.add("als", node + THAN, clause.comparison.node)
        self.nominal(clause.comparison, NOMINATIVE, node + PREDICATE)

    def when(self, clause: Clause) -> None:
        if clause.when:
            self.phrasal(clause.when.german, clause.node + WHEN, clause.head)

    # ---- nominals

    def nominal(self, nominal: Nominal, case: int, head: int) -> None:
        node, noun = nominal.node, nominal.noun
        if nominal.preposition:
            case = nominal.preposition[2]
            self.add(nominal.preposition[1], node + PREPOSITION, node)
        if nominal.pronoun:
            self.pronoun(nominal, case, head)
            return
        assert noun is not None
        gender = PLURAL if nominal.plural else noun.gender
        opened = self.determiner(nominal, gender, case)
        if nominal.adjective or nominal.colour:
            self.adjectives(nominal, gender, case, opened)
        self.noun(noun.german[nominal.plural][case], nominal, head)
        if nominal.owner:
            self.nominal(nominal.owner, GENITIVE, node)
        if nominal.with_:
            self.nominal(nominal.with_, DATIVE, node)
        if nominal.relative:
            inner = nominal.relative
            self.add(",", inner.node + COMMA, inner.head)
            self.clause(inner, node)
            self.add(",", inner.node + END, inner.head)

    def determiner(self, nominal: Nominal, gender: int, case: int) -> int:
        """Adds it, or melts it into the preposition; the node of the word that now opens the phrase, -1 for none."""
        node = nominal.node
        name = NOT_A if nominal.negation >= 0 else nominal.determiner
        word = DETERMINERS[name][0][gender][case]
        if not word:
            return -1
        if nominal.preposition and name == "the" and (nominal.preposition[1], word) in CONTRACTIONS:
            self.tokens[-1] = (CONTRACTIONS[nominal.preposition[1], word], node + PREPOSITION, node)
            self.fused[node + PREPOSITION] = node + DETERMINER
            return node + PREPOSITION
        self.add(word, node + DETERMINER, node)
        if nominal.negation >= 0:
            self.fused[node + DETERMINER] = nominal.negation
        return node + DETERMINER

    def adjectives(self, nominal: Nominal, gender: int, case: int, opened: int) -> None:
        node = nominal.node
        name = NOT_A if nominal.negation >= 0 else nominal.determiner
        ending = DETERMINERS[name][1][gender][case]
        row = [opened] if opened >= 0 else []
        if nominal.degree:
            self.add(nominal.degree.german[0], node + DEGREE, node + ADJECTIVE)
        if nominal.adjective:
            self.add(nominal.adjective.endings[ending], node + ADJECTIVE, node)
            row.append(node + ADJECTIVE)
        if nominal.colour:
            self.add(nominal.colour.endings[ending], node + COLOUR, node)
            row.append(node + COLOUR)
        self.note("adjective", *row, node)

    def pronoun(self, nominal: Nominal, case: int, head: int) -> None:
        gender = PLURAL if nominal.plural or nominal.noun is None else nominal.noun.gender
        if nominal.pronoun == "relative":
            self.add(RELATIVES[gender][case], nominal.node, head)
            self.note("relative", PREVIOUS, nominal.node)
            return
        if nominal.noun is not None:
            self.add(THIRD[gender][case], nominal.node, head)
        else:
            self.add(PRONOUNS[nominal.pronoun][case], nominal.node, head)
        self.refers(nominal)


ASKING = {"where": "wo", "when": "wann", "why": "warum"}

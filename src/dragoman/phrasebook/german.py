"""German: declension, conjugation and word order.

The finite verb comes second in a main clause and last in a subordinate one. Infinitives, participles and separable
prefixes close the clause.
"""

from __future__ import annotations

from dragoman.phrasebook.lexicon import PLURAL, Noun
from dragoman.phrasebook.realization import (
    INFINITIVE,
    MAIN,
    NEXT_WORD,
    PREVIOUS_WORD,
    RELATIVE,
    VERB_FINAL,
    Clause,
    NounPhrase,
    Offset,
    Realizer,
    Token,
)

Paradigm = tuple[tuple[str, ...], ...]  # forms or endings: [gender][case]


def decline(endings: str, stem: str = "") -> Paradigm:
    """Return a paradigm: genders (masculine, feminine, neuter, plural) between bars, each with its four cases."""
    return tuple(tuple(stem + ending.strip("-") for ending in gender.split()) for gender in endings.split("|"))


# Endings of adjectives: without a determiner, after "der", after "ein".
STRONG = decline("er en em en | e e er er | es es em en | e e en er")
WEAK = decline("e en en en | e e en en | e e en en | en en en en")
MIXED = decline("er en en en | e e en en | es es en en | en en en en")
# Determiners and pronouns.
ARTICLE = decline("der den dem des | die die der der | das das dem des | die die den der")
RELATIVE_PRONOUN = decline("der den dem dessen | die die der deren | das das dem dessen | die die denen deren")
THIRD_PERSON = decline("er ihn ihm - | sie sie ihr - | es es ihm - | sie sie ihnen -")
LIKE_DIESER = "er en em es | e e er er | es es em es | e e en er"
LIKE_EIN = "- en em es | e e er er | - - em es | e e en er"
INVARIABLE = "- - - - | - - - - | - - - - | - - - -"
DETERMINERS: dict[str, tuple[Paradigm, Paradigm]] = {  # English -> its forms, the endings of an adjective after it
    "": (decline(INVARIABLE), STRONG),
    "the": (ARTICLE, WEAK),
} | {
    english: (decline(endings, stem), adjective_endings)
    for endings, adjective_endings, stems in (
        (LIKE_DIESER, WEAK, {"this": "dies", "every": "jed", "all": "all", "which": "welch"}),
        (LIKE_EIN, MIXED, {"a": "ein", "no": "kein", "my": "mein", "our": "unser", "his": "sein", "her": "ihr"}),
        (LIKE_DIESER, STRONG, {"many": "viel", "some": "einig", "several": "mehrer"}),
        (INVARIABLE, STRONG, {"two": "zwei", "three": "drei", "four": "vier"}),
        (INVARIABLE, STRONG, {"five": "fünf", "six": "sechs", "ten": "zehn"}),
    )
    for english, stem in stems.items()
}
PRONOUNS = {  # nominative, accusative, dative
    "I": ("ich", "mich", "mir"),
    "we": ("wir", "uns", "uns"),
    "he": THIRD_PERSON[0],
    "she": THIRD_PERSON[1],
    "they": THIRD_PERSON[3],
    "who": ("wer", "wen", "wem"),
    "what": ("was", "was", ""),
}
CONTRACTIONS = {
    ("in", "dem"): "im",
    ("an", "dem"): "am",
    ("zu", "dem"): "zum",
    ("zu", "der"): "zur",
    ("von", "dem"): "vom",
}
BE = {"present": ("bin", "ist", "sind"), "past": ("war", "war", "waren")}  # ich, er, wir
AUXILIARIES = {"haben": ("habe", "hat", "haben"), "sein": BE["present"], "werden": ("werde", "wird", "werden")}
MODAL_FORMS = {
    "can": {"present": ("kann", "kann", "können"), "past": ("konnte", "konnte", "konnten")},
    "must": {"present": ("muss", "muss", "müssen"), "past": ("musste", "musste", "mussten")},
    "want": {"present": ("will", "will", "wollen"), "past": ("wollte", "wollte", "wollten")},
    "may": {"present": ("darf", "darf", "dürfen"), "past": ("durfte", "durfte", "durften")},
    "should": {"present": ("soll", "soll", "sollen"), "past": ("sollte", "sollte", "sollten")},
}
INDEFINITE = frozenset(("", "a", "some", "several", "many", "two", "three", "four", "five", "six", "ten"))


class German(Realizer):
    """Writes the German sentence of a pair."""

    __slots__ = ()

    index = 1
    than = "als"
    genitive = ""
    encloses_clauses = True

    def is_comma_before(self, clause: Clause) -> bool:
        return clause.conjunction[1] != "und"

    def write_predication(self, clause: Clause) -> None:
        node, subject = clause.node, clause.subject
        assert subject is not None
        if clause.kind == INFINITIVE:
            verb, head = clause.verb, clause.head
            assert verb is not None
            self.write_middle_field(clause)
            if verb.prefix:  # anzurufen, in one word
                self.add(verb.prefix + "zu" + verb.infinitive, node, head)
                self.fused[node] = node + Offset.AUXILIARY
            else:
                self.add("zu", node + Offset.AUXILIARY, head)
                self.add(verb.infinitive, node, head)
            self.note("verb-position", node + Offset.COMMA, node, NEXT_WORD)
            return
        finite, others = self.conjugate(clause)
        verb_last = clause.kind in (VERB_FINAL, RELATIVE)
        opened = clause.fronted or clause.question_adverb or clause.moved not in ("", "subject")
        inverted = opened or clause.follows_clause
        subject_first = clause.kind == MAIN and not inverted
        if subject_first:
            self.write_constituent(clause, "subject")
        if not verb_last:
            self.add(*finite)
            if inverted:
                self.note("verb-position", PREVIOUS_WORD, finite[1])
        if not subject_first:
            self.write_rest(clause, "subject")
        self.write_middle_field(clause)
        self.tokens += others
        if verb_last:
            self.add(*finite)
            moved: NounPhrase | None = getattr(clause, clause.moved) if clause.moved else None
            subordinator = moved.node if moved else node + Offset.CONJUNCTION
            self.note("verb-position", subordinator, finite[1], NEXT_WORD)
        elif others and others[-1][1] == node + Offset.PARTICLE:
            self.note("verb-position", finite[1], node + Offset.PARTICLE, NEXT_WORD)
        self.note_agreement(subject, finite[1])

    def write_middle_field(self, clause: Clause) -> None:
        """Write what stands between the finite verb and the end: pronouns, time, objects, manner, place."""
        thing = clause.accusative
        order = [role for role in ("accusative", "dative") if (phrase := getattr(clause, role)) and phrase.pronoun]
        order += ["time", "circumstance", "frequency", "dative"]
        if thing is not None and thing.determiner in INDEFINITE:
            order.append("manner")
        self.write_rest(clause, *dict.fromkeys([*order, "accusative"]))
        if clause.negated and not clause.has_kein:
            self.add("nicht", clause.node + Offset.NOT, clause.head)
        if "manner" not in order:
            self.write_rest(clause, "manner")
        self.write_rest(clause, "place", "prepositional", "predicate")

    def conjugate(self, clause: Clause) -> tuple[Token, list[Token]]:
        """Return the finite verb and the verb forms that close the clause."""
        node, verb, subject, tense = clause.node, clause.verb, clause.subject, clause.tense
        assert subject is not None
        person = subject.person
        head, auxiliary = clause.head, node + Offset.AUXILIARY
        infinitive = (verb.prefix + verb.infinitive if verb else "sein", node, head)
        if clause.modal:
            return (MODAL_FORMS[clause.modal][tense][person], auxiliary, head), [infinitive]
        if tense == "future":
            return (AUXILIARIES["werden"][person], auxiliary, head), [infinitive]
        if tense == "perfect":
            participle = (verb.participle if verb else "gewesen", node, head)
            return (AUXILIARIES[verb.auxiliary if verb else "sein"][person], auxiliary, head), [participle]
        if verb is None:
            return (BE[tense][person], node, head), []
        word = verb.present[person] if tense == "present" else verb.past[person == 2]
        if verb.prefix and clause.kind not in (VERB_FINAL, RELATIVE):
            return (word, node, head), [(verb.prefix, node + Offset.PARTICLE, node)]
        return (verb.prefix + word, node, head), []

    # ---- noun phrases

    def write_premodifiers(self, phrase: NounPhrase, noun: Noun, case: int) -> None:
        """Write the determiner, which may fuse with the preposition, and the adjectives with the endings after it."""
        node = phrase.node
        gender = PLURAL if phrase.plural else noun.gender
        forms, endings = DETERMINERS["no" if phrase.negation >= 0 else phrase.determiner]
        word, ending = forms[gender][case], endings[gender][case]
        preposition = phrase.preposition.german if phrase.preposition else ""
        inflected = []  # nodes that show the declension
        if phrase.determiner == "the" and (preposition, word) in CONTRACTIONS:
            self.tokens[-1] = (CONTRACTIONS[preposition, word], node + Offset.PREPOSITION, node)
            self.fused[node + Offset.PREPOSITION] = node + Offset.DETERMINER
            inflected.append(node + Offset.PREPOSITION)
        elif word:
            self.add(word, node + Offset.DETERMINER, node)
            inflected.append(node + Offset.DETERMINER)
            if phrase.negation >= 0:
                self.fused[node + Offset.DETERMINER] = phrase.negation
        if phrase.degree:
            self.add(phrase.degree.german[0], node + Offset.DEGREE, node + Offset.ADJECTIVE)
        for adjective, offset in ((phrase.adjective, Offset.ADJECTIVE), (phrase.colour, Offset.COLOUR)):
            if adjective:
                self.add(adjective.stem + ending, node + offset, node)
                inflected.append(node + offset)
        if phrase.adjective or phrase.colour:
            self.note("adjective", *inflected, node)

    def inflect_pronoun(self, phrase: NounPhrase, case: int) -> str:
        if phrase.noun is None:
            return PRONOUNS[phrase.pronoun][case]
        gender = PLURAL if phrase.plural else phrase.noun.gender
        return (RELATIVE_PRONOUN if phrase.pronoun == "relative" else THIRD_PERSON)[gender][case]

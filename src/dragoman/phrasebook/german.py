"""German declension, conjugation and word order.

The finite verb comes second in a main clause and last in a subordinate clause. Infinitives, participles and separable
prefixes come at the end of the clause; what stands between them and the finite verb is called the middle field.

Tables of verb forms are indexed by `NounPhrase.person`: 0 for ich, 1 for er, 2 for wir. Paradigms are indexed by gender
(masculine, feminine, neuter, plural), then by case (nominative, accusative, dative, genitive).

A token is a word with two node ids, its own and that of its head. `node + Offset.NOT` identifies the word "nicht" of
the clause `node` (realization.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from dragoman.phrasebook.lexicon import PLURAL, Noun
from dragoman.phrasebook.realization import NEXT_WORD, PREVIOUS_WORD, Clause, NounPhrase, Offset, PlanToken, Realizer

Paradigm = tuple[tuple[str, ...], ...]  # forms or endings


def decline(endings: str, stem: str = "") -> Paradigm:
    """Return a paradigm from the endings of the four cases; bars separate the genders, "-" is no ending."""
    return tuple(tuple(stem + ending.strip("-") for ending in gender.split()) for gender in endings.split("|"))


# Endings of adjectives without a determiner, after a word like "der", and after a word like "ein".
STRONG = decline("er en em en | e e er er | es es em en | e e en er")
WEAK = decline("e en en en | e e en en | e e en en | en en en en")
MIXED = decline("er en en en | e e en en | es es en en | en en en en")
ARTICLE = decline("der den dem des | die die der der | das das dem des | die die den der")
RELATIVE_PRONOUN = decline("der den dem dessen | die die der deren | das das dem dessen | die die denen deren")
THIRD_PERSON = decline("er ihn ihm - | sie sie ihr - | es es ihm - | sie sie ihnen -")
LIKE_DIESER = "er en em es | e e er er | es es em es | e e en er"
LIKE_EIN = "- en em es | e e er er | - - em es | e e en er"
INVARIABLE = "- - - - | - - - - | - - - - | - - - -"
DETERMINERS: dict[str, tuple[Paradigm, Paradigm]] = {  # English -> German forms, endings of an adjective after them
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
PRONOUN_FORMS = {  # nominative, accusative, dative
    "I": ("ich", "mich", "mir"),
    "we": ("wir", "uns", "uns"),
    "who": ("wer", "wen", "wem"),
    "what": ("was", "was", ""),
} | dict(zip(("he", "she", "it", "they"), THIRD_PERSON))
CONTRACTIONS = {"in dem": "im", "an dem": "am", "zu dem": "zum", "zu der": "zur", "von dem": "vom"}
BE = {"present": ("bin", "ist", "sind"), "past": ("war", "war", "waren")}
AUXILIARIES = {"haben": ("habe", "hat", "haben"), "sein": BE["present"], "werden": ("werde", "wird", "werden")}
MODAL_FORMS = {
    "can": {"present": ("kann", "kann", "können"), "past": ("konnte", "konnte", "konnten")},
    "must": {"present": ("muss", "muss", "müssen"), "past": ("musste", "musste", "mussten")},
    "want": {"present": ("will", "will", "wollen"), "past": ("wollte", "wollte", "wollten")},
    "may": {"present": ("darf", "darf", "dürfen"), "past": ("durfte", "durfte", "durften")},
    "should": {"present": ("soll", "soll", "sollen"), "past": ("sollte", "sollte", "sollten")},
}
INDEFINITE = frozenset(("", "a", "some", "several", "many", "two", "three", "four", "five", "six", "ten"))
# The order of the middle field. An indefinite accusative object follows the adverb of manner.
MIDDLE_FIELD = ("time", "circumstance", "frequency", "dative", "accusative", "manner")
MIDDLE_FIELD_WITH_INDEFINITE = ("time", "circumstance", "frequency", "dative", "manner", "accusative")


class German(Realizer):
    """Writes the German sentence of a pair."""

    __slots__ = ()

    index = 1  # of German in (English, German) pairs
    than = "als"
    genitive = ""
    commas_enclose_clauses = True

    def is_comma_before(self, clause: Clause) -> bool:
        return clause.conjunction[1] != "und"

    def write_predication(self, clause: Clause, head: int) -> None:
        node, verb, opening, subject = clause.node, clause.verb, clause.opening, clause.phrases["subject"]
        if verb and clause.kind == "infinitive":
            self.write_middle_field(clause, head)
            if verb.prefix:  # anzurufen, in one word
                self.add(verb.prefix + "zu" + verb.infinitive, node, head)
                self.also_means[node] = node + Offset.AUXILIARY
            else:
                self.add("zu", node + Offset.AUXILIARY, head)
                self.add(verb.infinitive, node, head)
            self.record_phenomenon("verb-position", node + Offset.COMMA, node, NEXT_WORD)
            return
        finite, nonfinite = self.conjugate(clause, head)
        finite_node = finite[1]
        verb_last = clause.kind in ("subordinate", "relative")
        inverted = opening not in ("", "subject") or clause.follows_clause
        subject_first = clause.kind == "main" and not inverted
        if subject_first:
            self.write_noun_phrase(subject, "subject", head)
        if not verb_last:
            self.tokens.append(finite)
            if inverted:
                self.record_phenomenon("verb-position", PREVIOUS_WORD, finite_node)
        if not subject_first and opening != "subject":
            self.write_noun_phrase(subject, "subject", head)
        self.write_middle_field(clause, head)
        self.tokens += nonfinite
        if verb_last:
            self.tokens.append(finite)
            introducing_node = clause.phrases[opening].node if opening else node + Offset.CONJUNCTION
            self.record_phenomenon("verb-position", introducing_node, finite_node, NEXT_WORD)
        elif nonfinite and nonfinite[-1][1] == node + Offset.PARTICLE:
            self.record_phenomenon("verb-position", finite_node, node + Offset.PARTICLE, NEXT_WORD)
        if not subject.pronoun:
            self.agreements.append((subject.node, finite_node, subject.plural))

    def write_middle_field(self, clause: Clause, head: int) -> None:
        """Write pronouns, time, objects, manner and place, and then the predicate adjective."""
        direct_object, indirect_object = clause.phrases.get("accusative"), clause.phrases.get("dative")
        indefinite = direct_object and direct_object.determiner in INDEFINITE
        order: Iterable[str] = MIDDLE_FIELD_WITH_INDEFINITE if indefinite else MIDDLE_FIELD
        if indirect_object and indirect_object.pronoun:
            order = dict.fromkeys(("dative", *order))
        if direct_object and direct_object.pronoun:
            order = dict.fromkeys(("accusative", *order))
        self.write_constituents(clause, order, head)
        if clause.negated and not clause.has_kein:
            self.add("nicht", clause.node + Offset.NOT, head)
        self.write_constituents(clause, ("place", "prepositional"), head)
        if clause.predicate:
            self.write_predicate(clause, clause.predicate)

    def conjugate(self, clause: Clause, head: int) -> tuple[PlanToken, list[PlanToken]]:
        """Return the token of the finite verb, and the tokens of the verb forms at the end of the clause."""
        node, verb, tense, person = clause.node, clause.verb, clause.tense, clause.phrases["subject"].person
        auxiliary = node + Offset.AUXILIARY
        if clause.modal or tense == "future":
            forms = MODAL_FORMS[clause.modal][tense] if clause.modal else AUXILIARIES["werden"]
            infinitive = verb.prefix + verb.infinitive if verb else "sein"
            return (forms[person], auxiliary, head), [(infinitive, node, head)]
        if tense == "perfect":
            participle = (verb.participle if verb else "gewesen", node, head)
            return (AUXILIARIES[verb.auxiliary if verb else "sein"][person], auxiliary, head), [participle]
        if verb is None:
            return (BE[tense][person], node, head), []
        word = verb.present[person] if tense == "present" else verb.past[person]
        if verb.prefix and clause.kind not in ("subordinate", "relative"):
            return (word, node, head), [(verb.prefix, node + Offset.PARTICLE, node)]
        return (verb.prefix + word, node, head), []

    def write_premodifiers(self, phrase: NounPhrase, noun: Noun, case: int) -> None:
        """Write the determiner and the adjectives. A preposition and the article may contract: in dem -> im."""
        node = phrase.node
        gender = PLURAL if phrase.plural else noun.gender
        becomes_kein = phrase.negation >= 0  # "not ... a dog" is "keinen Hund"
        forms, endings = DETERMINERS["no" if becomes_kein else phrase.determiner]
        word, ending = forms[gender][case], endings[gender][case]
        inflected = []  # nodes of the words whose form shows the declension
        contraction = CONTRACTIONS.get(f"{phrase.preposition.german} {word}") if phrase.preposition else None
        if contraction:
            self.tokens[-1] = (contraction, node + Offset.PREPOSITION, node)
            self.also_means[node + Offset.PREPOSITION] = node + Offset.DETERMINER
            inflected.append(node + Offset.PREPOSITION)
        elif word:
            self.tokens.append((word, node + Offset.DETERMINER, node))
            inflected.append(node + Offset.DETERMINER)
            if becomes_kein:
                self.also_means[node + Offset.DETERMINER] = phrase.negation
        if phrase.degree:
            self.add(phrase.degree.german[0], node + Offset.DEGREE, node + Offset.ADJECTIVE)
        if phrase.adjective:
            self.add(phrase.adjective.stem + ending, node + Offset.ADJECTIVE, node)
            inflected.append(node + Offset.ADJECTIVE)
        if phrase.colour:
            self.add(phrase.colour.stem + ending, node + Offset.COLOUR, node)
            inflected.append(node + Offset.COLOUR)
        if phrase.adjective or phrase.colour:
            self.record_phenomenon("adjective", *inflected, node)

    def inflect_pronoun(self, phrase: NounPhrase, case: int) -> str:
        if phrase.noun is None:
            return PRONOUN_FORMS[phrase.pronoun][case]
        gender = PLURAL if phrase.plural else phrase.noun.gender
        return (RELATIVE_PRONOUN if phrase.pronoun == "relative" else THIRD_PERSON)[gender][case]

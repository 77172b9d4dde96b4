"""English: inflection and word order (subject, verb, objects, manner, place, time)."""

from __future__ import annotations

from dragoman.phrasebook.lexicon import NOMINATIVE, Noun
from dragoman.phrasebook.realization import (
    INFINITIVE,
    MAIN,
    NEXT_WORD,
    PREVIOUS_WORD,
    QUESTION,
    RELATIVE,
    VERB_FINAL,
    Clause,
    NounPhrase,
    Offset,
    Realizer,
    Token,
)

ENGLISH_PRONOUNS = {  # as a subject, as an object
    "I": ("I", "me"),
    "we": ("we", "us"),
    "he": ("he", "him"),
    "she": ("she", "her"),
    "it": ("it", "it"),
    "they": ("they", "them"),
    "who": ("who", "who"),
    "what": ("what", "what"),
}
ENGLISH_MODALS = {"can": "could", "must": "had", "want": "wanted", "may": "", "should": ""}  # present -> past
ENGLISH_BE = {"present": ("am", "is", "are"), "past": ("was", "was", "were")}  # I, he, we
HAVE = ("have", "has", "have")
DO = {"present": ("do", "does", "do"), "past": ("did", "did", "did")}


class English(Realizer):
    """Writes the English sentence of a pair."""

    __slots__ = ()

    index = 0
    than = "than"
    genitive = "of"
    encloses_clauses = False

    def is_comma_before(self, clause: Clause) -> bool:
        return clause.kind == MAIN

    def write_opening(self, clause: Clause) -> None:
        """Write what opens the clause; a circumstance and some sentence adverbs are followed by a comma."""
        super().write_opening(clause)
        adverb = clause.sentence_adverb
        if clause.fronted == "circumstance" or (adverb and adverb.english in (("of", "course"), ("unfortunately",))):
            self.add(",", clause.node + Offset.COMMA, clause.head)

    def write_predication(self, clause: Clause) -> None:
        node, head, subject = clause.node, clause.head, clause.subject
        assert subject is not None
        inverted = clause.kind == QUESTION and clause.moved != "subject"
        finite, others = self.conjugate(clause, needs_do=inverted or clause.negated)
        has_auxiliary = finite[1] != node or not clause.verb  # "to be" behaves like an auxiliary
        if clause.kind != INFINITIVE:
            if inverted:
                self.add(*finite)
            self.write_rest(clause, "subject")
            if not has_auxiliary:
                self.write_rest(clause, "frequency")
            if not inverted:
                self.add(*finite)
            self.note_agreement(subject, finite[1])
        if clause.kind in (VERB_FINAL, RELATIVE) or clause.fronted or clause.follows_clause:
            self.note("verb-position", PREVIOUS_WORD, finite[1])
        elif clause.kind == QUESTION:
            self.note("verb-position", finite[1], NEXT_WORD)
        if clause.negated and finite[0] == "can":
            self.fuse("cannot", finite[1], node + Offset.NOT)
        elif clause.negated:
            self.add("not", node + Offset.NOT, head)
        if has_auxiliary:
            self.write_rest(clause, "frequency")
        for token in others:
            self.add(*token)
        verb, thing = clause.verb, clause.accusative
        particle = (verb.particle if verb else "", node + Offset.PARTICLE, node)
        has_pronoun = thing is not None and bool(thing.pronoun) and clause.moved != "accusative"
        particle_last = has_pronoun and verb is not None and not verb.inseparable  # picks it up
        if not particle_last:
            self.add_words(*particle)
        self.write_rest(clause, "dative", "accusative", "prepositional")
        if particle_last:
            self.add_words(*particle)
        self.write_rest(clause, "predicate", "manner", "place", "circumstance", "time")

    def fuse(self, word: str, node: int, other: int) -> None:
        """Let the last word of `node` become `word`, which expresses the other node too."""
        position = next(n for n in range(len(self.tokens) - 1, -1, -1) if self.tokens[n][1] == node)
        self.tokens[position] = (word, node, self.tokens[position][2])
        self.fused[node] = other

    def conjugate(self, clause: Clause, *, needs_do: bool) -> tuple[Token, list[Token]]:
        """Return the finite verb and the verb forms after it."""
        node, verb, subject, tense, modal = clause.node, clause.verb, clause.subject, clause.tense, clause.modal
        assert subject is not None
        person = subject.person
        head, auxiliary = clause.head, node + Offset.AUXILIARY
        infinitive = (verb.english[0] if verb else "be", node, head)
        if clause.kind == INFINITIVE:
            return ("", auxiliary, head), [("to", auxiliary, head), infinitive]
        if modal:
            word = modal if tense == "present" else ENGLISH_MODALS[modal]
            if modal != "want" and word != "had":
                return (word, auxiliary, head), [infinitive]
            others = [("to", auxiliary + 1, head), infinitive]  # had to, wants to
            if needs_do:
                base = "have" if modal == "must" else modal
                return (DO[tense][person], auxiliary + 2, head), [(base, auxiliary, head), *others]
            return (word + "s" if tense == "present" and person == 1 else word, auxiliary, head), others
        if tense == "future":
            return ("will", auxiliary, head), [infinitive]
        if tense == "perfect":
            return (HAVE[person], auxiliary, head), [(verb.english[3] if verb else "been", node, head)]
        if verb is None:
            return (ENGLISH_BE[tense][person], node, head), []
        if needs_do:
            return (DO[tense][person], node + 1, head), [infinitive]
        return (verb.english[2] if tense == "past" else verb.english[person == 1], node, head), []

    # ---- noun phrases

    def write_premodifiers(self, phrase: NounPhrase, noun: Noun, case: int) -> None:
        node = phrase.node
        adjectives: list[Token] = []
        if phrase.degree:
            adjectives.append((phrase.degree.english[0], node + Offset.DEGREE, node + Offset.ADJECTIVE))
        if phrase.adjective:
            adjectives.append((phrase.adjective.lemma, node + Offset.ADJECTIVE, node))
        if phrase.colour:
            adjectives.append((phrase.colour.lemma, node + Offset.COLOUR, node))
        determiner = phrase.determiner
        if determiner == "this" and phrase.plural:
            determiner = "these"
        elif determiner == "a":
            next_word = adjectives[0][0] if adjectives else noun.forms[self.index][phrase.plural][case]
            determiner = "an" if next_word[0] in "aeiou" else "a"
        self.add_words(determiner, node + Offset.DETERMINER, node)
        self.tokens += adjectives

    def inflect_pronoun(self, phrase: NounPhrase, case: int) -> str:
        if phrase.pronoun != "relative":
            return ENGLISH_PRONOUNS[phrase.pronoun][case != NOMINATIVE]
        assert phrase.noun is not None
        if "person" in phrase.noun.tags:
            return "who" if case == NOMINATIVE else "whom"
        return "which" if phrase.preposition else "that"

"""English inflection and word order (subject, verb, objects, manner, place, time).

Tables of verb forms are indexed by `NounPhrase.person`: 0 for I, 1 for he, 2 for we. A token is a word with two node
ids, its own and that of its head. `node + Offset.NOT` identifies the word "not" of the clause `node`; ids that differ
by less than 4 express one meaning together (realization.py).
"""

from __future__ import annotations

from dragoman.phrasebook.lexicon import NOMINATIVE, Noun
from dragoman.phrasebook.realization import NEXT_WORD, PREVIOUS_WORD, Clause, NounPhrase, Offset, PlanToken, Realizer

OBJECT_PRONOUN_FORMS = {"I": "me", "we": "us", "he": "him", "she": "her", "they": "them"}
PAST_MODALS = {"can": "could", "must": "had", "want": "wanted"}  # "had" to; grammar.py samples no others in the past
ENGLISH_BE = {"present": ("am", "is", "are"), "past": ("was", "was", "were")}
HAVE = ("have", "has", "have")
FOLLOWED_BY_COMMA = (("of", "course"), ("unfortunately",))  # at the beginning of a clause
DO = {"present": ("do", "does", "do"), "past": ("did", "did", "did")}


class English(Realizer):
    """Writes the English sentence of a pair."""

    __slots__ = ()

    index = 0  # of English in (English, German) pairs
    than = "than"
    genitive = "of"
    commas_enclose_clauses = False

    def is_comma_before(self, clause: Clause) -> bool:
        return clause.kind == "main"

    def write_predication(self, clause: Clause, head: int) -> None:
        node, kind, opening, verb = clause.node, clause.kind, clause.opening, clause.verb
        subject, adverbials = clause.phrases["subject"], clause.adverbials
        has_frequency = "frequency" in adverbials
        if opening == "circumstance" or (
            opening == "sentence_adverb" and adverbials[opening].english in FOLLOWED_BY_COMMA
        ):
            self.add_punctuation(",", node + Offset.COMMA, head)
        inverted = kind == "question" and opening != "subject"
        finite, nonfinite = self.conjugate(clause, head, needs_do=inverted or clause.negated)
        finite_node = finite[1]
        verb_is_finite = verb and finite_node == node  # "to be" behaves like an auxiliary
        if kind != "infinitive":
            if inverted:
                self.tokens.append(finite)
            if opening != "subject":
                self.write_noun_phrase(subject, "subject", head)
            if has_frequency and verb_is_finite:
                self.write_adverbial(clause, "frequency", head)
            if not inverted:
                self.tokens.append(finite)
            if not subject.pronoun:
                self.agreements.append((subject.node, finite_node, subject.plural))
        if kind == "question":
            self.record_phenomenon("verb-position", finite_node, NEXT_WORD)
        elif kind in ("subordinate", "relative") or opening or clause.follows_clause:
            self.record_phenomenon("verb-position", PREVIOUS_WORD, finite_node)
        if clause.negated and finite[0] != "cannot":
            self.add("not", node + Offset.NOT, head)
        if has_frequency and not verb_is_finite:
            self.write_adverbial(clause, "frequency", head)
        self.tokens += nonfinite
        direct_object = clause.phrases.get("accusative")
        particle = (verb.particle, node + Offset.PARTICLE, node) if verb and verb.particle else None
        has_pronoun = direct_object and direct_object.pronoun and opening != "accusative"
        particle_last = has_pronoun and verb and not verb.inseparable  # "picks it up", but "picks up the book"
        if particle and not particle_last:
            self.tokens.append(particle)
        self.write_constituents(clause, ("dative", "accusative", "prepositional"), head)
        if particle and particle_last:
            self.tokens.append(particle)
        if clause.predicate:
            self.write_predicate(clause, clause.predicate)
        self.write_constituents(clause, ("manner", "place", "circumstance", "time"), head)

    def conjugate(self, clause: Clause, head: int, *, needs_do: bool) -> tuple[PlanToken, list[PlanToken]]:
        """Return the token of the finite verb, and the tokens of the verb forms after it (infinitives, participle)."""
        node, verb, tense, modal, person = clause.node, clause.verb, clause.tense, clause.modal, clause.subject.person
        auxiliary = node + Offset.AUXILIARY
        infinitive = (verb.english_base if verb else "be", node, head)
        if clause.kind == "infinitive":
            return ("", auxiliary, head), [("to", auxiliary, head), infinitive]  # no finite verb
        if modal:
            word = modal if tense == "present" else PAST_MODALS[modal]
            if word == "can" and clause.negated:
                word = "cannot"
                self.also_means[auxiliary] = node + Offset.NOT
            if modal != "want" and word != "had":
                return (word, auxiliary, head), [infinitive]
            to_infinitive = [("to", auxiliary + 1, head), infinitive]  # "had to go", "wants to go"
            if needs_do:
                base = "have" if modal == "must" else modal
                return (DO[tense][person], auxiliary + 2, head), [(base, auxiliary, head), *to_infinitive]
            return (word + "s" if tense == "present" and person == 1 else word, auxiliary, head), to_infinitive
        if tense == "future":
            return ("will", auxiliary, head), [infinitive]
        if tense == "perfect":
            return (HAVE[person], auxiliary, head), [(verb.english_participle if verb else "been", node, head)]
        if verb is None:
            return (ENGLISH_BE[tense][person], node, head), []
        if needs_do:
            return (DO[tense][person], node + 1, head), [infinitive]
        return (verb.english_past if tense == "past" else verb.english_present[person], node, head), []

    def write_premodifiers(self, phrase: NounPhrase, noun: Noun, case: int) -> None:
        node = phrase.node
        adjectives: list[PlanToken] = []
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
        if determiner:
            self.tokens.append((determiner, node + Offset.DETERMINER, node))
        self.tokens += adjectives

    def inflect_pronoun(self, phrase: NounPhrase, case: int) -> str:
        if phrase.pronoun != "relative":
            return phrase.pronoun if case == NOMINATIVE else OBJECT_PRONOUN_FORMS.get(phrase.pronoun, phrase.pronoun)
        assert phrase.noun is not None
        if "person" in phrase.noun.tags:
            return "who" if case == NOMINATIVE else "whom"
        return "which" if phrase.preposition else "that"

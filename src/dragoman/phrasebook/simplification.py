"""Simplify sentences of the phrasebook: from the plan of a sentence to the plans of shorter ones that follow from it.

    The old man who sleeps reads a book because he is very tired.
    The man reads a book. The man sleeps. He is tired.

Adjectives, degrees, adverbials and modifiers of nouns are left out, and clauses become sentences. Everything that is
left out makes the original more specific, so that the original implies the simpler sentences. Where this would not
be so, nothing changes: in clauses with "not", "no" or a frequency ("never in summer"), after "every" and "all", and in
clauses with "if", "before", "that" and others, which do not state a fact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from dragoman.phrasebook.grammar import ANTECEDENT_DETERMINERS
from dragoman.phrasebook.lexicon import Adverbial, load_lexicon
from dragoman.phrasebook.realization import Clause, NounPhrase, SentencePlan

FACTUAL_CONJUNCTIONS = frozenset(("", "and", "but", "because", "although"))  # both clauses state a fact
UNCERTAIN = frozenset((("perhaps",), ("probably",)))  # sentence adverbs without which a sentence would say more
ADJUNCT_PHRASES, ADJUNCT_ADVERBIALS = ("place", "circumstance"), ("time", "manner", "sentence_adverb")


class Simplifier:
    """Simplifies the plan of one sentence. `changes` has the names of the simplifications that were made."""

    def __init__(self, plan: SentencePlan) -> None:
        self.changes: dict[str, None] = {}  # an ordered set
        phrases = [phrase for clause in iterate_clauses(plan) for phrase in clause.phrases.values()]
        # Nodes of phrases to which a pronoun refers. They stay, so that the pronoun still has an antecedent.
        self.antecedents = {phrase.antecedent.node for phrase in phrases if phrase.antecedent}

    def simplify(self, plan: SentencePlan) -> list[SentencePlan]:
        """Return the plans of the simpler sentences, in order."""
        if any(clause.conjunction[0] not in FACTUAL_CONJUNCTIONS for clause in plan.clauses):
            root, *others = self.simplify_clause(plan.root)
            clauses = tuple(root if clause is plan.root else clause for clause in plan.clauses)
            return [SentencePlan(clauses, root), *(SentencePlan((clause,), clause) for clause in others)]
        sentences = []
        for clause in plan.clauses:
            if len(plan.clauses) > 1:
                self.changes["clause"] = None
                kind = "main" if clause.kind == "subordinate" else clause.kind
                clause = replace(clause, kind=kind, conjunction=("", ""), follows_clause=False)
            sentences += self.simplify_clause(clause)
        return [SentencePlan((clause,), clause) for clause in sentences]

    def simplify_clause(self, clause: Clause) -> list[Clause]:
        """Return the clause without adjuncts, and then its relative clauses as main clauses."""
        has_no = any(phrase.determiner == "no" for phrase in clause.phrases.values())
        if clause.negated or has_no or "frequency" in clause.adverbials:
            return [clause]
        phrases, adverbials, relatives = dict(clause.phrases), dict(clause.adverbials), []
        for name in ADJUNCT_PHRASES:
            if name in phrases and not self.has_antecedent(phrases[name]):
                self.record_change("adverbial", phrases.pop(name))
        for name in ADJUNCT_ADVERBIALS:
            if name in adverbials and adverbials[name].english not in UNCERTAIN:
                self.record_change("adverbial", adverbials.pop(name))
        for name, phrase in phrases.items():
            if phrase.relative and phrase.determiner in ANTECEDENT_DETERMINERS:
                relatives += self.simplify_clause(make_main_clause(phrase.relative, phrase))
                self.record_change("relative", phrase.relative)
                phrase = replace(phrase, relative=None)
            phrases[name] = self.simplify_noun_phrase(phrase)
        comparison = clause.comparison and self.simplify_noun_phrase(clause.comparison)
        self.record_change("degree", clause.degree)
        opening = clause.opening if clause.opening in phrases.keys() | adverbials.keys() else ""
        changed = replace(clause, phrases=phrases, adverbials=adverbials, opening=opening, degree=None)
        return [replace(changed, comparison=comparison), *relatives]

    def simplify_noun_phrase(self, phrase: NounPhrase) -> NounPhrase:
        """Return the phrase without adjectives and modifiers."""
        if phrase.pronoun or phrase.determiner not in ANTECEDENT_DETERMINERS:
            return phrase
        for name in ("adjective", "colour"):
            self.record_change("adjective", getattr(phrase, name))
        phrase = replace(phrase, adjective=None, colour=None, degree=None)
        modifier = phrase.possessor or phrase.postmodifier  # the grammar never has both
        if modifier is None or self.has_antecedent(modifier):
            return phrase
        self.record_change("modifier", modifier)
        return replace(phrase, possessor=None, postmodifier=None)

    def record_change(self, change: str, dropped: object) -> None:
        """Record that a part of the plan is left out, unless the plan does not have it."""
        if dropped is not None:
            self.changes[change] = None

    def has_antecedent(self, phrase: NounPhrase) -> bool:
        parts = (phrase, phrase.possessor, phrase.postmodifier)
        return any(part.node in self.antecedents for part in parts if part)


def make_main_clause(relative: Clause, phrase: NounPhrase) -> Clause:
    """Return a relative clause as a main clause, with the noun of `phrase` instead of the relative pronoun."""
    pronoun = relative.phrases[relative.opening]
    noun = NounPhrase(pronoun.node, phrase.noun, phrase.plural, preposition=pronoun.preposition, determiner="the")
    return replace(relative, kind="main", opening="", phrases={**relative.phrases, relative.opening: noun})


def iterate_clauses(plan: SentencePlan) -> Iterator[Clause]:
    """Yield all clauses of a sentence: its main and subordinate clauses, complements and relative clauses."""
    pending = list(plan.clauses)
    while pending:
        clause = pending.pop(0)
        yield clause
        relatives = [phrase.relative for phrase in clause.phrases.values()]
        pending += [other for other in (clause.complement, *relatives) if other]


def sum_content_hashes(plan: SentencePlan) -> int:
    """Return the sum of the hashes of the content words, as `Grammar.content_hash` would be for this plan."""
    total = 0
    for clause in iterate_clauses(plan):
        total += clause.verb.hash if clause.verb else 0
        total += clause.predicate.hash if clause.predicate else 0
        total += hash_manners()[clause.adverbials["manner"]] if "manner" in clause.adverbials else 0
        is_infinitive = clause.kind == "infinitive"  # which has the subject of another clause
        phrases = [phrase for role, phrase in clause.phrases.items() if not (is_infinitive and role == "subject")]
        phrases += [clause.comparison] if clause.comparison else []
        while phrases:
            phrase = phrases.pop()
            if phrase.noun and not phrase.pronoun:
                words = (phrase.noun, phrase.adjective, phrase.colour)
                total += sum(word.hash for word in words if word)
                phrases += [part for part in (phrase.possessor, phrase.postmodifier) if part]
    return total


@cache
def hash_manners() -> dict[Adverbial, int]:
    return {adjective.adverb: adjective.hash for adjective in load_lexicon().manners}

"""Other right translations of a sentence of the phrasebook: other word order, other tense, synonyms.

    Yesterday the man often read a book because he was tired.
    Gestern las der Mann oft ein Buch, weil er müde war.
    Der Mann hat gestern häufig ein Buch gelesen, da er müde war.

Every variation changes the plan of the sentence, from which one language is then written anew. A variation is one that
a translator may choose freely: both sentences mean what the sentence in the other language means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from dragoman.phrasebook.lexicon import Adverbial
from dragoman.phrasebook.realization import Clause, NounPhrase, Realizer, SentencePlan

ENGLISH, GERMAN = 0, 1  # Realizer.index
MAX_ALTERNATIVES = 15  # of a sentence; further combinations of variations are left out
SYNONYMS: tuple[dict[str, str], dict[str, str]] = (  # of English and German conjunctions and adverbs
    {
        **{"although": "though", "perhaps": "maybe", "quite": "rather"},
        **{"often": "frequently", "sometimes": "occasionally", "seldom": "rarely", "usually": "normally"},
    },
    {
        **{"weil": "da", "obwohl": "obgleich", "wenn": "falls", "bevor": "ehe", "aber": "doch"},
        **{"oft": "häufig", "immer": "stets", "nie": "niemals", "manchmal": "bisweilen", "meistens": "gewöhnlich"},
        **{"vielleicht": "möglicherweise", "wahrscheinlich": "vermutlich", "ziemlich": "recht"},
        **{"leider": "bedauerlicherweise", "natürlich": "selbstverständlich"},
    },
)
FRONTABLE = (("time", "circumstance"), ("time", "circumstance", "place"))  # adjuncts that may open a main clause
# The tense that may replace another one: "er hat gelesen" is "he read" or "he has read", and "he read" is "er las" or
# "er hat gelesen".
REPLACED_TENSES = (("perfect", "past"), ("past", "perfect"))


def list_paraphrases(plan: SentencePlan, target: Realizer) -> dict[str, str]:
    """Return sentences that mean the same as the target sentence of a plan, each with the names of its variations."""
    variants = [("", plan)]
    for name, vary in VARIATIONS.items():
        variants += [
            (f"{names}+{name}".strip("+"), other) for names, known in variants for other in vary(known, target.index)
        ]
    texts: dict[str, str] = {}
    for names, variant in variants[1:]:
        realizer = type(target)()
        realizer.write(variant)
        if realizer.text != target.text and len(texts) < MAX_ALTERNATIVES:
            texts.setdefault(realizer.text, names)
    return texts


def vary_tense(plan: SentencePlan, language: int) -> Iterator[SentencePlan]:
    """Replace a tense in all clauses. German keeps the past of "to be" and of modal verbs: "er war", "er konnte"."""
    old, new = REPLACED_TENSES[language]

    def change(clause: Clause) -> Clause:
        fits = clause.tense == old and not clause.modal and (clause.verb is not None or language == ENGLISH)
        return replace(clause, tense=new) if fits else clause

    changed = map_clauses(plan, change)
    if changed != plan:
        yield changed


def vary_word_order(plan: SentencePlan, language: int) -> Iterator[SentencePlan]:
    """Begin a main clause with one of its adjuncts, or with the subject instead of an adjunct."""
    for index, clause in enumerate(plan.clauses):
        if clause.kind != "main" or clause.follows_clause:
            continue
        names = [name for name in FRONTABLE[language] if name in clause.phrases or name in clause.adverbials]
        # English time after a relative clause would belong to that clause: "shoes that were small last week".
        relative_last = language == ENGLISH and any(p.relative for r, p in clause.phrases.items() if r != "subject")
        openings = names if not clause.opening else [""] if clause.opening in names and not relative_last else []
        for opening in openings:
            yield replace_clause(plan, index, replace(clause, opening=opening))


def vary_clause_order(plan: SentencePlan, _: int) -> Iterator[SentencePlan]:
    """Put a subordinate clause after the main clause instead of before it, or vice versa, unless a pronoun forbids."""
    if len(plan.clauses) == 1 or all(clause.kind == "main" for clause in plan.clauses):
        return
    first, second = plan.clauses
    has_reference = any(phrase.antecedent for phrase in second.phrases.values())  # to a noun of the first clause
    if not has_reference and not plan.root.opening:
        root = replace(plan.root, follows_clause=second is not plan.root)
        yield SentencePlan((second, root) if first is plan.root else (root, first), root)


def vary_words(plan: SentencePlan, language: int) -> Iterator[SentencePlan]:
    """Replace all conjunctions and adverbs that have a synonym."""

    def replace_word(words: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(SYNONYMS[language].get(word, word) for word in words)

    def replace_adverbial(adverbial: Adverbial) -> Adverbial:
        sides = [words if side != language else replace_word(words) for side, words in enumerate(adverbial)]
        return Adverbial(*sides)

    def change(clause: Clause) -> Clause:
        english, german = clause.conjunction
        conjunction = Adverbial((english,), (german,))
        adverbials = {name: replace_adverbial(words) for name, words in clause.adverbials.items()}
        (english,), (german,) = replace_adverbial(conjunction)
        degree = clause.degree and replace_adverbial(clause.degree)
        changed = replace(clause, conjunction=(english, german), adverbials=adverbials, degree=degree)
        unchanged = (clause.conjunction, clause.adverbials, clause.degree)
        return changed if (changed.conjunction, changed.adverbials, changed.degree) != unchanged else clause

    changed = map_clauses(plan, change)
    if changed != plan:
        yield changed


def replace_clause(plan: SentencePlan, index: int, clause: Clause) -> SentencePlan:
    clauses = (*plan.clauses[:index], clause, *plan.clauses[index + 1 :])
    return SentencePlan(clauses, clauses[plan.clauses.index(plan.root)])


def map_clauses(plan: SentencePlan, change: Callable[[Clause], Clause]) -> SentencePlan:
    """Return the plan with all clauses changed, complements and relative clauses too; equal if none changes."""

    def change_phrase(phrase: NounPhrase) -> NounPhrase:
        relative = phrase.relative and change_deeply(phrase.relative)
        return replace(phrase, relative=relative) if relative is not phrase.relative else phrase

    def change_deeply(clause: Clause) -> Clause:
        changed = change(clause)
        phrases = {role: change_phrase(phrase) for role, phrase in clause.phrases.items()}
        complement = clause.complement and change_deeply(clause.complement)
        if complement is clause.complement and phrases == clause.phrases:
            return changed
        return replace(changed, phrases=phrases, complement=complement)

    clauses = tuple(change_deeply(clause) for clause in plan.clauses)
    return SentencePlan(clauses, clauses[plan.clauses.index(plan.root)])


VARIATIONS = {
    "tense": vary_tense,
    "clause-order": vary_clause_order,
    "synonym": vary_words,
    "word-order": vary_word_order,
}

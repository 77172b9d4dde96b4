"""Views of the phrasebook: other tasks than translation, made of the same sentences and their gold analysis.

    for phrase in generate_views("tree", "test", 3):
        print(phrase.pair.source, "|", phrase.pair.target)

A view turns a sentence into the source and the target of a task, or skips it. As for translation pairs, no two splits
of a view share a source, and train shares no target with another split. To add a view, write a function like those
below and add it to VIEWS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from dragoman.config.settings import get_entry
from dragoman.phrasebook.generate import Phenomenon, check_request, convert_plans
from dragoman.phrasebook.german import German
from dragoman.phrasebook.grammar import SUBJECT_PRONOUNS
from dragoman.phrasebook.paraphrases import list_paraphrases
from dragoman.phrasebook.realization import Clause, NounPhrase, Offset, Realizer, SentencePlan
from dragoman.phrasebook.simplification import Simplifier, iterate_clauses, sum_content_hashes
from dragoman.types import Pair, Tree

DROPPED_PRONOUNS = frozenset((*SUBJECT_PRONOUNS, "it"))
VERB_NODES = (0, 1, Offset.AUXILIARY, Offset.AUXILIARY + 1, Offset.AUXILIARY + 2)  # of one clause, without particles


@dataclass(frozen=True, slots=True)
class ViewedPhrase:
    """A pair of a view with its gold: what was changed, and the words of the target that show whether it is right."""

    pair: Pair
    target_words: tuple[str, ...] = ()
    simplifications: tuple[str, ...] = ()  # those that were made
    variations: tuple[str, ...] = ()  # of each alternative target, joined by "+"
    phenomena: tuple[Phenomenon, ...] = ()  # positions in `target_words`, to be judged by `judge_phenomena`


class View(NamedTuple):
    """A view. `make` returns None for a plan that it skips."""

    make: Callable[[SentencePlan, Realizer, Realizer], ViewedPhrase | None]  # from source and target sentences
    hash_content: Callable[[SentencePlan], int] | None = None  # decides the split; None: as for translation pairs


def view_translation(_: SentencePlan, source: Realizer, target: Realizer) -> ViewedPhrase:
    """Translate the sentence."""
    return ViewedPhrase(Pair(source.text, target.text), tuple(target.words))


def view_tree(plan: SentencePlan, source: Realizer, _: Realizer) -> ViewedPhrase:
    """Parse the source sentence: write its dependency tree in brackets."""
    tree = Tree(tuple(source.words), source.list_heads(source.locate_nodes(), root=plan.root.head))
    brackets = tree.to_brackets()
    return ViewedPhrase(Pair(source.text, brackets), tuple(brackets.split()))


def view_simplification(plan: SentencePlan, source: Realizer, _: Realizer) -> ViewedPhrase | None:
    """Simplify the source sentence: write shorter sentences of the same language that follow from it."""
    simplifier = Simplifier(plan)
    texts, words = [], []
    for simple_plan in simplifier.simplify(plan):
        realizer = type(source)()
        realizer.write(simple_plan)
        texts.append(realizer.text)
        words += realizer.words
    pair = Pair(source.text, " ".join(texts))
    return ViewedPhrase(pair, tuple(words), simplifications=tuple(simplifier.changes)) if simplifier.changes else None


def hash_simplification(plan: SentencePlan) -> int:
    """Return a hash of the content words of the simplified sentences.

    The source determines these words, and so does the target. Therefore splits by this hash share neither.
    """
    return sum(map(sum_content_hashes, Simplifier(plan).simplify(plan)))


def view_paraphrases(plan: SentencePlan, source: Realizer, target: Realizer) -> ViewedPhrase | None:
    """Translate the sentence, with further right translations as alternatives."""
    paraphrases = list_paraphrases(plan, target)
    if not paraphrases:
        return None
    pair = Pair(source.text, target.text, alternatives=tuple(paraphrases))
    return ViewedPhrase(pair, tuple(target.words), variations=tuple(paraphrases.values()))


def view_dropped_pronouns(plan: SentencePlan, source: Realizer, target: Realizer) -> ViewedPhrase | None:
    """Translate the sentence, of which the source lacks all subject pronouns, as in Spanish or Japanese.

    The names of the phenomena say what determines a pronoun: the "verb" form alone; an "antecedent" in the sentence; or
    "nothing", if the same source is also what another pronoun leaves.
    """
    clauses = [clause for clause in iterate_clauses(plan) if has_pronoun_subject(clause)]
    if not clauses:
        return None
    text = write_without_pronouns(source, plan)
    positions = target.locate_nodes()
    phenomena = []
    for clause in clauses:
        subject = clause.subject
        if subject.antecedent:
            clue = "antecedent"
        else:
            # Other pronouns that leave the same source text; none of them refers to a noun of the sentence.
            others = (make_pronoun(subject, name) for name in set(SUBJECT_PRONOUNS) - {subject.pronoun})
            plans = (replace_subject(plan, subject, other) for other in others)
            same = any(write_without_pronouns(source, other) == text for other in plans)
            clue = "nothing" if same else "verb"
        words = sorted((positions[subject.node], locate_finite_verb(clause, target, positions)))
        phenomena.append(Phenomenon(clue, tuple(words)))
    return ViewedPhrase(Pair(text, target.text), tuple(target.words), phenomena=tuple(phenomena))


def has_pronoun_subject(clause: Clause) -> bool:
    return clause.kind != "infinitive" and clause.subject.pronoun in DROPPED_PRONOUNS


def write_without_pronouns(source: Realizer, plan: SentencePlan) -> str:
    """Return the text of a plan, in the language of `source`, without pronouns that are subjects."""
    realizer = type(source)()
    realizer.write(plan)
    dropped = {clause.subject.node for clause in iterate_clauses(plan) if has_pronoun_subject(clause)}
    realizer.tokens = [token for token in realizer.tokens if token[1] not in dropped]
    realizer.join_words()
    return realizer.text


def make_pronoun(subject: NounPhrase, pronoun: str) -> NounPhrase:
    return NounPhrase(subject.node, None, pronoun in ("we", "they"), pronoun)


def replace_subject(plan: SentencePlan, subject: NounPhrase, other: NounPhrase) -> SentencePlan:
    """Return the plan with another noun phrase as the subject of the clauses that have this subject."""

    def change(clause: Clause) -> Clause:
        complement = clause.complement and change(clause.complement)
        phrases = {role: other if phrase is subject else phrase for role, phrase in clause.phrases.items()}
        for role, phrase in phrases.items():
            if phrase.relative:
                phrases[role] = replace(phrase, relative=change(phrase.relative))
        return replace(clause, phrases=phrases, complement=complement)

    clauses = tuple(map(change, plan.clauses))
    return SentencePlan(clauses, clauses[plan.clauses.index(plan.root)])


def locate_finite_verb(clause: Clause, realizer: Realizer, positions: dict[int, int]) -> int:
    """Return the position of the finite verb: the last verb of a German clause that ends with it, else the first."""
    verbs = [positions[clause.node + offset] for offset in VERB_NODES if clause.node + offset in positions]
    ends_with_verb = isinstance(realizer, German) and clause.kind in ("subordinate", "relative")
    return max(verbs) if ends_with_verb else min(verbs)


def generate_views(
    view: str, split: str, count: int, *, seed: int = 1, direction: str = "en-de"
) -> Iterator[ViewedPhrase]:
    """Yield `count` phrases of a split, as the view of this name shows them."""
    check_request(split, count, direction)
    make, hash_content = get_entry(VIEWS, view, "view of the phrasebook")
    return convert_plans(make, split, count, seed, direction, hash_content)


VIEWS = {
    "translation": View(view_translation),
    "tree": View(view_tree),
    "simplify": View(view_simplification, hash_simplification),
    "paraphrases": View(view_paraphrases),
    "dropped-pronouns": View(view_dropped_pronouns),
}

"""Views of the phrasebook: their gold is right, and their splits are disjoint."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from dragoman.data.corpus import CorpusSettings, fingerprint_corpus, read_pairs
from dragoman.errors import UserError
from dragoman.metrics.metrics import METRICS
from dragoman.phrasebook.generate import (
    DIRECTIONS,
    PHRASEBOOK_SPLITS,
    generate_pairs,
    generate_phrases,
    judge_phenomena,
    realize_plans,
    split_words,
)
from dragoman.phrasebook.simplification import Simplifier, sum_content_hashes
from dragoman.phrasebook.views import VIEWS, ViewedPhrase, generate_views
from dragoman.types import Tree
from toy_run import Call, assert_user_error

OTHER_VIEWS = [name for name in VIEWS if name != "translation"]


def generate(view: str, count: int = 300, *, split: str = "train", direction: str = "en-de") -> list[ViewedPhrase]:
    return list(generate_views(view, split, count, direction=direction))


# ---- all views


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_view_translation_has_the_pairs_of_the_phrasebook(direction: str) -> None:
    pairs = [phrase.pair for phrase in generate("translation", 50, direction=direction)]
    assert pairs == list(generate_pairs("train", 50, direction=direction))
    corpus = CorpusSettings(phrasebook=50)
    assert list(read_pairs(corpus, direction=direction)) == pairs


@pytest.mark.parametrize("view", VIEWS)
def test_splits_share_no_source_and_train_shares_no_target(view: str) -> None:
    counts = {"train": 2000, "dev": 200, "test": 200, "unseen": 200}
    pairs = {
        split: [phrase.pair for phrase in generate(view, counts[split], split=split)] for split in PHRASEBOOK_SPLITS
    }
    for one in PHRASEBOOK_SPLITS:
        for other in PHRASEBOOK_SPLITS[PHRASEBOOK_SPLITS.index(one) + 1 :]:
            assert not {pair.source for pair in pairs[one]} & {pair.source for pair in pairs[other]}
            if {one, other} not in ({"dev", "unseen"}, {"test", "unseen"}):
                assert not {pair.target for pair in pairs[one]} & {pair.target for pair in pairs[other]}


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("view", VIEWS)
def test_a_smaller_count_gives_a_prefix_and_corpora_have_the_same_pairs(view: str, direction: str) -> None:
    phrases = generate(view, 20, split="dev", direction=direction)
    assert list(islice(generate_views(view, "dev", 60, direction=direction), 20)) == phrases
    corpus = CorpusSettings(phrasebook=20, view=view)
    corpus.check("data.dev")
    assert list(read_pairs(corpus, split="dev", direction=direction)) == [phrase.pair for phrase in phrases]
    for phrase in phrases:
        assert split_words(phrase.pair.target) == list(phrase.target_words)


def test_views_are_told_apart() -> None:
    corpora = [CorpusSettings(phrasebook=20, view=view) for view in VIEWS]
    assert len({fingerprint_corpus(corpus) for corpus in corpora}) == len({corpus.title for corpus in corpora})
    assert len({fingerprint_corpus(corpus) for corpus in corpora}) == len(VIEWS)


def test_wrong_views_are_refused(tmp_path: Path, call: Call) -> None:
    with pytest.raises(UserError, match=r"'trees'.*did you mean 'tree'"):
        generate_views("trees", "train", 3)
    with pytest.raises(UserError, match=r"data.train.view.*'trees'"):
        CorpusSettings(phrasebook=3, view="trees").check("data.train")
    with pytest.raises(UserError, match="view works with phrasebook, not with tsv"):
        CorpusSettings(tsv="a.tsv", view="tree").check("data.train")
    out = ("data", "phrasebook", "--out", tmp_path / "x", "--count", "3")
    assert_user_error(call(*out, "--view", "tree", "--links"), "--links", "--view")
    assert_user_error(call(*out, "--direction", "de-en"), "--direction", "--view")


@pytest.mark.parametrize("view", OTHER_VIEWS)
def test_files_of_a_view(tmp_path: Path, call: Call, view: str) -> None:
    options = ("--count", "5", "--split", "dev", "--direction", "de-en", "--gold")
    assert call("data", "phrasebook", "--out", tmp_path / "x", "--view", view, *options).code == 0
    phrases = generate(view, 5, split="dev", direction="de-en")
    for side in ("source", "target"):
        lines = (tmp_path / f"x.{side}").read_text(encoding="utf-8").splitlines()
        assert lines == [getattr(phrase.pair, side) for phrase in phrases]
    rows = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["pair"]["alternatives"] for row in rows] == [list(phrase.pair.alternatives) for phrase in phrases]


# ---- trees


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_trees_are_read_back_as_heads(direction: str) -> None:
    phrases = generate_phrases("train", 400, direction=direction)
    for phrase, viewed in zip(phrases, generate("tree", 400, direction=direction), strict=True):
        assert viewed.pair.source == phrase.source
        assert Tree.from_brackets(viewed.pair.target) == phrase.tree
        assert [word for word in viewed.target_words if word not in "()"] == list(phrase.source_words)


@pytest.mark.parametrize(
    ("text", "words", "heads"),
    [
        ("( ( The ) man ) sleeps ( . )", "The man sleeps .", (2, 3, 0, 3)),
        ("( ( The ) man sleeps ( .", "The man sleeps .", (2, 0, 2, 2)),
        ("( The ) ) man", "The man", (2, 0)),
        ("( ) ( ( The ) ) man (", "The man", (2, 0)),
        ("( The ) ( man )", "The man", (0, 0)),
        ("", "", ()),
    ],
)
def test_trees_with_errors_are_read_too(text: str, words: str, heads: tuple[int, ...]) -> None:
    assert Tree.from_brackets(text) == Tree(tuple(words.split()), heads)


def test_attachment_score_counts_right_heads() -> None:
    reference = "( ( The ) man ) sleeps ( . )"
    for hypothesis, percent in (
        (reference, 100),
        ("( ( The ) dog ) sleeps ( . )", 75),  # one wrong word, right heads
        ("( The ) ( man ) sleeps ( . )", 75),  # one wrong head
        ("( ( The ) man sleeps ( . ) )", 25),  # another root
        ("( man ) sleeps ( . )", 0),  # a word is missing
    ):
        assert METRICS["uas"]([hypothesis], [[reference]]).value == pytest.approx(percent)


# ---- simplification


SIMPLIFIED = {
    "During the concert, a bus that the witness needed stopped.": "A bus stopped. The witness needed the bus.",
    "Rich men feed the clever bird that the colleague does not help.": (
        "Rich men feed the bird. The colleague does not help the bird."
    ),
    "Because the man meets every king, the lawyer with the dogs carries these balls now.": (
        "The man meets every king. The lawyer carries these balls."
    ),
    "Although no lawyer arrives today, Sophie tells the king stories.": (
        "No lawyer arrives today. Sophie tells the king stories."
    ),
    "The soldier with the camera sends the judges our newspaper as soon as he closes the windows.": (
        "The soldier sends the judges our newspaper as soon as he closes the windows."
    ),
    "Perhaps the princess with the guitar buys the lamp that every brave doctor describes.": (
        "Perhaps the princess buys the lamp. Every brave doctor describes the lamp."
    ),
}


def test_simplified_sentences_follow_from_their_sources() -> None:
    """They were generated and proofread."""
    found = {p.pair.source: p.pair.target for p in generate_views("simplify", "train", 320, seed=3)}
    assert {source: found.get(source) for source in SIMPLIFIED} == SIMPLIFIED


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_simplification_keeps_words_and_drops_only_what_it_names(direction: str) -> None:
    seen: set[str] = set()
    for phrase in generate("simplify", 1000, direction=direction):
        source, target = split_words(phrase.pair.source.lower()), split_words(phrase.pair.target.lower())
        seen.update(phrase.simplifications)
        assert phrase.simplifications
        assert phrase.pair.source != phrase.pair.target
        if set(phrase.simplifications) <= {"adjective", "degree", "adverbial", "modifier"}:
            assert len(target) < len(source)
            assert phrase.pair.target.count(".") <= 1
        if "clause" in phrase.simplifications or "relative" in phrase.simplifications:
            assert sum(phrase.pair.target.count(mark) for mark in ".?") >= 2
    assert seen == {"adjective", "adverbial", "clause", "degree", "modifier", "relative"}


def test_a_simplified_sentence_cannot_be_simplified_further() -> None:
    """Except for antecedents of pronouns, which are now in another sentence."""
    for plan, _, _ in realize_plans("train", 1000, 1):
        for simple in Simplifier(plan).simplify(plan):
            again = Simplifier(simple)
            if {clause.conjunction[0] for clause in simple.clauses} == {""}:
                again.simplify(simple)
                assert not set(again.changes) - {"adverbial", "modifier"}, again.changes


def test_negated_clauses_and_antecedents_stay() -> None:
    kept = 0
    for plan, source, _ in realize_plans("train", 2000, 1):
        simple = Simplifier(plan).simplify(plan)
        nodes = {phrase.node for part in simple for c in part.clauses for phrase in c.phrases.values()}
        for clause in plan.clauses:
            if clause.negated and "frequency" not in clause.adverbials:
                [same] = [c for part in simple for c in part.clauses if c.node == clause.node]
                assert same.phrases == clause.phrases, source.text
                kept += 1
            for phrase in clause.phrases.values():
                if phrase.antecedent and phrase.antecedent.preposition:
                    owners = {p.node for c in plan.clauses for p in c.phrases.values()}
                    assert phrase.antecedent.node in nodes or phrase.antecedent.node not in owners
    assert kept > 100


def test_hash_of_content_words_equals_that_of_the_grammar() -> None:
    """The splits of the phrasebook are intervals of this hash, so equal hashes give equal splits."""
    for split, low, high in (("train", 0, 84), ("dev", 84, 92), ("test", 92, 100)):
        for plan, _, _ in realize_plans(split, 200, 5):
            assert low <= (sum_content_hashes(plan) & (2**64 - 1)) * 100 >> 64 < high


# ---- paraphrases


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_one_reference_punishes_right_translations(direction: str) -> None:
    """Every alternative is right by all references, but not by one."""
    phrases = generate("paraphrases", 200, direction=direction)
    pairs = [phrase.pair for phrase in phrases]
    others = [pair.alternatives[-1] for pair in pairs]
    targets = [pair.target for pair in pairs]
    assert 20 < METRICS["bleu"](others, [targets]).value < 90
    assert METRICS["bleu"](others, [targets, others]).value == pytest.approx(100)
    assert METRICS["exact"](others, [targets]).value == 0
    for phrase in phrases:
        texts = (phrase.pair.target, *phrase.pair.alternatives)
        assert len(set(texts)) == len(texts)
        assert len(phrase.variations) == len(phrase.pair.alternatives)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_word_order_changes_no_word(direction: str) -> None:
    seen = set()
    for phrase in generate("paraphrases", 500, direction=direction):
        for text, change in zip(phrase.pair.alternatives, phrase.variations, strict=True):
            seen.update(change.split("+"))
            words, others = (sorted(w.lower() for w in split_words(t) if w != ",") for t in (phrase.pair.target, text))
            if change in ("word-order", "clause-order"):
                assert words == others
            if change == "synonym":
                assert words != others
                assert len(words) == len(others)
    assert seen == {"tense", "clause-order", "synonym", "word-order"}


@pytest.mark.parametrize(
    ("source", "right"),
    [
        (
            "Our child laughed in the ugly theatre, but the gardener used the plane.",
            {
                "Unser Kind hat im hässlichen Theater gelacht, aber der Gärtner hat das Flugzeug benutzt.",
                "Im hässlichen Theater lachte unser Kind, doch der Gärtner benutzte das Flugzeug.",
            },
        ),
        (
            "Last week a witness bought three shoes that were small.",
            {
                "Letzte Woche hat ein Zeuge drei Schuhe, die klein waren, gekauft.",
                "Ein Zeuge kaufte letzte Woche drei Schuhe, die klein waren.",
            },
        ),
    ],
)
def test_proofread_paraphrases(source: str, right: set[str]) -> None:
    found = {p.pair.source: p.pair for p in generate_views("paraphrases", "train", 20, seed=3)}
    assert right <= set(found[source].alternatives)


# ---- dropped pronouns


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_only_subject_pronouns_are_dropped(direction: str) -> None:
    pronouns = {"i", "we", "he", "she", "it", "they", "ich", "wir", "er", "sie", "es"}
    full = {phrase.target: phrase.source for phrase in generate_phrases("train", 3000, direction=direction)}
    for phrase in generate("dropped-pronouns", 400, direction=direction):
        before = split_words(full[phrase.pair.target].lower())
        after = split_words(phrase.pair.source.lower())
        rest = iter(before)
        assert all(word in rest for word in after)  # in the same order
        assert len(before) - len(after) == len(phrase.phenomena)
        for word in after:
            before.remove(word)
        assert set(before) <= pronouns
        for phenomenon in phrase.phenomena:
            assert any(phrase.target_words[n].lower() in pronouns for n in phenomenon.words)


def test_clues_say_whether_a_source_is_ambiguous() -> None:
    """A source with several targets has no clue; a pronoun that its verb determines belongs to one target."""
    targets: dict[str, set[str]] = {}
    phrases = [phrase for seed in (1, 2) for phrase in generate_views("dropped-pronouns", "train", 2500, seed=seed)]
    for phrase in phrases:
        targets.setdefault(phrase.pair.source, set()).add(phrase.pair.target)
    names = [{p.name for p in phrase.phenomena} for phrase in phrases if len(targets[phrase.pair.source]) > 1]
    assert len(names) > 10
    assert all("nothing" in found for found in names)
    assert {p.name for phrase in phrases for p in phrase.phenomena} == {"verb", "antecedent", "nothing"}


def test_a_wrong_pronoun_is_found() -> None:
    phrase = next(p for p in generate("dropped-pronouns", 200) if " er " in p.pair.target and len(p.phenomena) == 1)
    assert [right for _, right in judge_phenomena(phrase, phrase.pair.target)] == [True]
    assert [right for _, right in judge_phenomena(phrase, phrase.pair.target.replace(" er ", " sie "))] == [False]

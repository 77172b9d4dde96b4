"""The inspection of a phrase-based system adds up: phrases cover the sentence, and features sum to the score."""

from __future__ import annotations

import numpy as np
import pytest

from dragoman.errors import UserError
from dragoman.inference.loading import load_as
from dragoman.inference.phrase_translator import PhraseTranslator
from dragoman.inference.translator import Translator
from dragoman.inspection.records import Inspection
from dragoman.inspection.sentence import inspect
from dragoman.smt.settings import FEATURE_NAMES
from shared_folders import make_once
from toy_run import make_sentences
from toy_smt import train_smt

LINES = [*make_sentences(2, seed=41), "ba del xyz fo gri mun!"]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> PhraseTranslator:
    translator = load_as(Translator, make_once(tmp_path_factory, "smt", train_smt)[0] / "run")
    assert isinstance(translator, PhraseTranslator)
    return translator


def check_derivation(found: Inspection, score: float) -> None:
    """Phrases cover all words of both sides once, and their features add up to those of the sentence and its score."""
    for spans, tokens in (
        (sorted(phrase.source_span for phrase in found.phrases), found.tokens["source"]),
        ([phrase.target_span for phrase in found.phrases], found.tokens["target"]),
    ):
        assert [position for span in spans for position in range(*span)] == list(range(len(tokens)))
    assert tuple(found.features) == FEATURE_NAMES
    for name, (value, _) in found.features.items():
        assert sum(phrase.features[name] for phrase in found.phrases) == pytest.approx(value)
    assert sum(value * weight for value, weight in found.features.values()) == pytest.approx(score)
    [links] = found.attentions
    assert links.weight_LHQK.shape == (1, 1, len(found.tokens[links.queries]), len(found.tokens[links.keys]))
    assert links.weight_LHQK.sum(-1) == pytest.approx(1)


@pytest.mark.parametrize("line", LINES)
def test_phrases_of_the_translation(system: PhraseTranslator, line: str) -> None:
    found, [hypothesis] = inspect(system, line), system.translate([line])
    assert (found.target, found.is_given) == (hypothesis.text, False)
    assert {name: value for name, (value, _) in found.features.items()} == hypothesis.features
    assert found.attentions[0].weight_LHQK[0, 0] == pytest.approx(np.array(hypothesis.alignment))
    check_derivation(found, hypothesis.score)


@pytest.mark.parametrize("beam", [2, 100])
def test_the_tree_of_the_stacks(system: PhraseTranslator, beam: int) -> None:
    line = LINES[-1]
    found, expected = (
        inspect(system, line, search={"beam": beam}),
        system.nbest([line], beam=beam, count=min(beam, 5))[0],
    )
    [trace] = found.searches
    assert [(r.text, r.score) for r in trace.results] == [(h.text, h.score) for h in expected]
    nodes, length = trace.nodes, len(found.tokens["source"])
    assert [(node.parent, node.step) for node in nodes if node.parent < 0] == [(-1, 0)]
    for index, node in enumerate(nodes[1:], 1):
        assert node.parent < index
        assert nodes[node.parent].step < node.step
        assert (node.step == length) <= (node.state in ("finished", "best"))
    for step in range(length + 1):
        assert sum(node.step == step for node in nodes) <= beam
    best = [node for node in nodes if node.state == "best"][1:]
    words = [" ".join(phrase.target.lower().split()) for phrase in found.phrases]
    assert [node.token.lower() for node in best] == words
    assert [node.detail.lower() for node in best] == [phrase.source.lower() for phrase in found.phrases]
    assert best[-1].score == pytest.approx(best[-1].logp) == pytest.approx(expected[0].score)
    assert any("kept/recombined/pruned" in note for note in trace.notes)


def test_a_given_target_is_decoded_by_force(system: PhraseTranslator) -> None:
    line = LINES[0]
    options = system.nbest([line], count=5)[0]
    for hypothesis in (options[0], options[-1]):
        found, [score] = inspect(system, line, target=hypothesis.text), system.score([line], [hypothesis.text])
        assert (found.target, found.is_given) == (hypothesis.text, True)
        check_derivation(found, score.logp)
        given = found.searches[-1]
        assert (given.title, given.results[0].score) == ("given target", score.logp)
        found_note = f"{found.searches[0].title} found this translation"
        assert given.notes[0].startswith(found_note if hypothesis is options[0] else "model error")
    with pytest.raises(UserError, match="cannot produce the target 'nonsense words'"):
        inspect(system, line, target="nonsense words")


def test_a_prefix_is_refused(system: PhraseTranslator) -> None:
    with pytest.raises(UserError, match="prefixes"):
        inspect(system, LINES[0], prefix="ak")

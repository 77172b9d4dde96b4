"""Tests of all decoding methods, on a trained model and on small models of every kind."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

from dragoman.data.batches import BatchPlan, Widths, collate_pairs
from dragoman.decoding.methods import (
    SEARCH_METHODS,
    SEARCH_REGISTRIES,
    SearchSettings,
    check_search_settings,
    decode,
    decode_samples,
    rank_by_agreement,
)
from dragoman.decoding.protocol import DecodingConstraints, SearchJob
from dragoman.decoding.sampling import make_uniforms
from dragoman.errors import UserError
from dragoman.inference.translator import Translator
from dragoman.types import EOS, Example, Hypothesis
from toy_requests import REAL, make_toy_request, real, real_request, real_sources
from toy_run import Call, Toy, make_sentences, translate_toy, write_lines
from toy_steps import Toy as Steps
from toy_steps import sources

QUICK: dict[str, Any] = {"samples": 4, "groups": 2, "max_expansions": 100}
ODD = ["", " ", "\t", "ba del.", "ba\0del.\x1b\x07", "🎉👩‍👩‍👧🎉", "\u2028", "ba " * 700, "del fo gri mun!", "</s>"]


@pytest.mark.parametrize("method", SEARCH_METHODS)
def test_results_do_not_depend_on_the_batch(translator: Translator, method: str) -> None:
    """Batch size, order and other sentences change nothing: text, scores and alignments are equal to the bit."""

    def answers(lines: list[str], size: int) -> list[Hypothesis]:
        search = {"method": method, **QUICK}
        starts = range(0, len(lines), size)
        return [one for at in starts for one in translator.translate(lines[at : at + size], search=search)]

    lines = make_sentences(24, seed=21, longest=6)
    expected = dict(zip(lines, answers(lines, 24), strict=True))
    shuffled = Random(5).sample(lines, len(lines))
    for size in (1, 5):
        assert answers(shuffled, size) == [expected[line] for line in shuffled], size


@pytest.mark.parametrize("method", SEARCH_METHODS)
def test_one_result_per_line_for_odd_inputs(translator: Translator, method: str) -> None:
    quick = {**QUICK, "beam": 2, "max_ratio": 1.0, "max_extra": 2}
    found = translator.translate(ODD, search={"method": method, **quick})
    assert len(found) == len(ODD)
    for line, one in zip(ODD, found, strict=True):
        assert (one == Hypothesis("", 0.0, [], [], [], 0.0)) == (not line.strip())
    assert "parts" in found[7].warnings[0]


@pytest.mark.parametrize("method", SEARCH_METHODS)
def test_a_trained_model_translates_correctly_with_every_method(translator: Translator, method: str) -> None:
    lines = make_sentences(30, seed=22)
    found = translator.translate(lines, search={"method": method, "temperature": 0.5, "max_expansions": 100})
    assert sum(one.text == translate_toy(line) for one, line in zip(found, lines, strict=True)) >= 27


@pytest.mark.parametrize("method", SEARCH_METHODS)
@pytest.mark.parametrize("name", REAL)
def test_scores_equal_those_of_a_forward_pass(name: str, method: str) -> None:
    """Log-probabilities computed step by step with caches equal those of one forward pass, to 1e-4 in float32."""
    count = SEARCH_METHODS[method].fixed.get("beam", 4)
    request = real_request(name, 5, 8, method=method, beam=4, nbest=count, samples=6, groups=2, max_expansions=50)
    _, _, examples = real_sources(5)
    for example, found in zip(examples, decode(request), strict=True):
        assert 1 <= len(found) <= count
        for one in found:
            assert one.logp == pytest.approx(compute_logp(real(name), example, one.tokens, one.finished), abs=1e-4)


def compute_logp(model: Any, example: Example, tokens: list[int], finished: bool) -> float:
    members = getattr(model, "models", [model])
    whole = example._replace(target=torch.tensor(tokens, dtype=torch.long).numpy())
    batch = collate_pairs(BatchPlan([[0]], Widths(16, 16)), [whole])
    with torch.no_grad():
        probabilities = [one.project(one(batch))[0].float().softmax(-1) for one in members]
    logp_TV = torch.stack(probabilities).mean(0).log()
    return sum(float(logp_TV[position, token]) for position, token in enumerate([*tokens, EOS] if finished else tokens))


@pytest.mark.parametrize("name", REAL)
def test_width_one_is_greedy(name: str) -> None:
    assert decode(real_request(name, 5, 9, beam=1, stop="best", length_penalty=0.0)) == decode(
        real_request(name, 5, 9, method="greedy", length_penalty=0.0)
    )
    assert decode(real_request(name, 5, 9, beam=1)) == decode(real_request(name, 5, 9, method="greedy"))


def test_samples_depend_only_on_seed_text_and_number(translator: Translator) -> None:
    lines = make_sentences(6, seed=23)
    hot: dict[str, Any] = {"method": "sample", "temperature": 2.0}
    one = [found.text for found in translator.translate(lines, search=hot)]
    assert one == [found.text for found in translator.translate(lines, search={**hot, "seed": 1})]
    assert one != [found.text for found in translator.translate(lines, search={**hot, "seed": 2})]
    twice = translator.translate([lines[0], lines[1], lines[0]], search=hot)
    assert twice[0] == twice[2] != twice[1]
    many = translator.nbest(lines, count=5, search=hot)
    assert [found[0].text for found in many] == one
    assert all(len({each.text for each in found}) == len(found) for found in many)
    assert len({each.text for found in many for each in found}) > 20


def test_random_numbers_depend_only_on_seed_text_and_number() -> None:
    def make(*texts: str, seed: int = 1) -> torch.Tensor:
        constraints = [DecodingConstraints(seed_text=text) for text in texts]
        return make_uniforms([SearchJob([], 5, constraint) for constraint in constraints], seed, range(2), 5)

    uniform_BWT = make("a", "b", "a")
    assert torch.equal(uniform_BWT[0], uniform_BWT[2])
    assert len(uniform_BWT[:2].unique()) == 2 * 2 * 5
    assert torch.equal(make("x", "b")[1], uniform_BWT[1])
    assert not torch.equal(make("a", seed=2)[0], uniform_BWT[0])


def test_samples_at_temperature_0_are_greedy() -> None:
    cold = decode(make_toy_request(Steps(seed=4), [4, 5, 6], [9, 0, 7], method="sample", temperature=0.0))
    assert cold == decode(make_toy_request(Steps(seed=4), [4, 5, 6], [9, 0, 7], method="greedy"))


def test_samples_follow_the_probabilities() -> None:
    """Count the first tokens of a thousand samples of one sentence."""
    request = make_toy_request(Steps(seed=3), [4], [1], method="sample", nbest=1000)
    found = decode(request)[0]
    probability_V = Steps(seed=3).step(torch.tensor([2]), Steps(seed=3).start(*sources(4)))[0][0].exp()
    probability_V[[0, 2]] = 0
    counts = torch.bincount(torch.tensor([one.tokens[0] if one.tokens else EOS for one in found]), minlength=6)
    assert torch.allclose(counts / 1000, probability_V / probability_V.sum(), atol=0.05)


def test_mbr_with_candidates_from_a_beam(translator: Translator) -> None:
    lines = make_sentences(10, seed=24)
    search = {"method": "mbr", "candidates": "beam", "metric": "bleu"}
    found = translator.nbest(lines, count=3, search=search, beam=6)
    for line, answers in zip(lines, found, strict=True):
        assert answers[0].text == translate_toy(line)
        assert [one.score for one in answers] == sorted((one.score for one in answers), reverse=True)


def test_mbr_gives_all_samples_the_same_weight() -> None:
    """Every sample has weight 1, so a text that was sampled several times counts several times."""
    request = make_toy_request(Steps(seed=6, sharp=2.0), [4, 5], [6, 6], method="mbr", samples=12, nbest=12)
    for found, answers in zip(decode_samples(request), decode(request), strict=True):
        texts = [request.decode(one.tokens) for one in found]
        assert answers == rank_by_agreement(found, texts, [1.0] * 12, "chrf")


def test_unknown_names_are_refused() -> None:
    for name, registry in SEARCH_REGISTRIES.items():
        for choice in registry:
            check_search_settings(SearchSettings.model_validate({name: choice}))
        with pytest.raises(UserError, match=f"there is no search.{name} called 'nonsense'"):
            check_search_settings(SearchSettings.model_validate({name: "nonsense"}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nbest": 5}, "from a beam of 4; ask for --beam 5"),
        ({"nbest": 5, "method": "diverse"}, "from a beam of 4; ask for --beam 5"),
        ({"nbest": 2, "method": "greedy"}, "cannot come from greedy search"),
        ({"nbest": 33, "method": "mbr"}, "from search.samples=32; set it to 33"),
        ({"nbest": 5, "method": "mbr", "candidates": "beam"}, "from a beam of 4"),
        ({"method": "exhaustive", "coverage": 0.2}, "set it to 0 for search.method=exhaustive"),
        ({"method": "diverse", "beam": 6}, "split into search.groups=4; ask for --beam 8"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_search_settings(SearchSettings(**settings))
    check_search_settings(SearchSettings(nbest=500, method="sample"))


def test_settings_on_the_command_line(toy: Toy, tmp_path: Any, call: Call) -> None:
    lines = make_sentences(12, seed=25)
    file = write_lines(tmp_path / "lines", lines)
    for settings in (["search.method=mbr", "search.samples=4"], ["search.length_norm=gnmt"], ["search.beam=2"]):
        values = dict(item.removeprefix("search.").split("=") for item in settings)
        search = {name: int(value) if value.isdigit() else value for name, value in values.items()}
        wanted = [one.text for one in toy.translator.translate(lines, search=search)]
        assert call("translate", toy.run, "--input", file, *settings).out.splitlines() == wanted
    refused = call("translate", toy.run, "--input", file, "search.metod=mbr")
    assert (refused.code, refused.out) == (2, "")
    assert "did you mean 'method'?" in refused.err
    refused = call("translate", toy.run, "--input", file, "train.seed=2")
    assert (refused.code, refused.out) == (2, "")
    assert "settings of search" in refused.err

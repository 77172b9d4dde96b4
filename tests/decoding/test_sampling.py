"""Tests of greedy search and of sampling."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.config.settings import SampleSettings
from dragoman.decoding.protocol import SearchResult, forbid_invalid_tokens
from dragoman.decoding.sampling import FILTERS, pick_sampled_tokens, sample_continuations
from dragoman.types import BOS, EOS
from toy_requests import beam_search
from toy_steps import Script, Toy, ToyState, rescore, sources


def search_greedily(model: Toy, first: int, limit: int) -> list[int]:
    """Return the result of greedy search with EOS, computed for one sentence in plain Python."""
    state, tokens = model.start(*sources(first)), [BOS]
    while len(tokens) <= limit and tokens[-1] != EOS:
        logp_NV, state = model.step(torch.tensor(tokens[-1:]), state)
        row = forbid_invalid_tokens(logp_NV)[0].tolist()
        tokens.append(row.index(max(row)))
    return tokens[1:]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), levels=st.sampled_from([2, 5, 1 << 20]), alpha=st.sampled_from([0.0, 0.6, 1.0]))
def test_greedy_search_takes_the_most_probable_tokens(seed: int, levels: int, alpha: float) -> None:
    model, firsts, limits = Toy(seed=seed, levels=levels), [4, 5, 6, 7], [8, 3, 0, 1]
    answers = beam_search(model, *sources(*firsts), torch.tensor(limits), width=1, alpha=alpha)
    assert answers[2] == []
    for b in (0, 1, 3):
        (found,) = answers[b]
        wanted = search_greedily(model, firsts[b], limits[b])
        assert [*found.tokens, EOS][: len(wanted)] == wanted
        assert found.finished == (wanted[-1] == EOS)
        assert found.logp == pytest.approx(rescore(model, firsts[b], wanted), rel=1e-5)
        assert found.score == pytest.approx(found.logp / len(wanted) ** alpha, rel=1e-5)


def test_greedy_search_stops_when_all_sentences_have_ended() -> None:
    never = -math.inf
    model = Script([never, never, never, -2.0, -0.1], [never, never, never, -0.1, -2.0])
    (found,) = beam_search(model, *sources(4), torch.tensor([50]), width=1)
    expected: Any = SearchResult([4], pytest.approx(-0.2), pytest.approx(-0.1), True)  # type: ignore[arg-type]
    assert found == [expected]
    assert model.steps == 2


def collate_prompts(*prompts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, prompts))
    padded = [[*prompt, *[0] * (width - len(prompt))] for prompt in prompts]
    return torch.tensor(padded), torch.tensor([len(prompt) for prompt in prompts])


def make_uniforms(rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(rows, tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def continue_greedily(model: Toy, prompt: list[int], limit: int) -> list[int]:
    """Return the greedy continuation of a prompt with EOS, computed in plain Python."""
    state, tokens = model.start(*sources(1)), list[int]()
    for token in prompt:
        logp_NV, state = model.step(torch.tensor([token]), state)
    while len(tokens) < limit and tokens[-1:] != [EOS]:
        row = forbid_invalid_tokens(logp_NV)[0].tolist()
        tokens.append(row.index(max(row)))
        logp_NV, state = model.step(torch.tensor(tokens[-1:]), state)
    return tokens


class ToyLm(Toy):
    """A language model: sources are ignored."""

    def start(self, source_BS: torch.Tensor, real_BS: torch.Tensor) -> ToyState:  # noqa: ARG002
        return super().start(*sources(*[1] * len(source_BS)))


class ScriptedLm(ToyLm, Script):
    """A language model with given log-probabilities."""


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), levels=st.sampled_from([2, 1 << 20]))
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-9}])
def test_sampling_with_the_strictest_settings_is_greedy(seed: int, levels: int, options: dict[str, float]) -> None:
    model, some = ToyLm(seed=seed, levels=levels), [[BOS, 4], [BOS], [BOS, 5, 4, 5]]
    limits = [7, 0, 3]
    found = sample_continuations(
        model,
        *collate_prompts(*some),
        make_uniforms(3, 7, seed),
        torch.tensor(limits),
        SampleSettings.model_validate(options),
        eos_ends=True,
    )
    for b in (0, 2):
        wanted = continue_greedily(model, some[b], limits[b])
        assert [*found[b].tokens, EOS][: len(wanted)] == wanted
        assert found[b].finished == (wanted[-1] == EOS)
    assert found[1] == SearchResult([], 0.0, 0.0, False)


def test_a_row_depends_only_on_its_random_numbers() -> None:
    model, some, uniform_BT = ToyLm(seed=3), [[BOS], [BOS, 4, 5], [BOS, 5]], make_uniforms(3, 12)
    limit_B = torch.tensor([12, 4, 9])
    together = sample_continuations(
        model, *collate_prompts(*some), uniform_BT, limit_B, SampleSettings(), eos_ends=False
    )
    assert [len(found.tokens) for found in together] == [12, 4, 9]
    for b in range(3):
        alone = sample_continuations(
            model,
            *collate_prompts(some[b]),
            uniform_BT[b : b + 1],
            limit_B[b : b + 1],
            SampleSettings(),
            eos_ends=False,
        )
        assert alone == [together[b]]


def test_eos_ends_a_row_only_with_ends() -> None:
    always = [-math.inf, -math.inf, -math.inf, 0.0, -math.inf]
    model = ScriptedLm(always)
    rows = (*collate_prompts([BOS]), make_uniforms(1, 5), torch.tensor([5]), SampleSettings())
    assert sample_continuations(model, *rows, eos_ends=True) == [SearchResult([], 0.0, 0.0, True)]
    assert sample_continuations(model, *rows, eos_ends=False) == [SearchResult([EOS] * 5, 0.0, 0.0, False)]


def test_a_broken_model_ends_the_row() -> None:
    model = ScriptedLm([math.nan] * 5)
    rows = (*collate_prompts([BOS, 4]), make_uniforms(1, 5), torch.tensor([5]), SampleSettings())
    assert sample_continuations(model, *rows, eos_ends=False) == [SearchResult([], 0.0, 0.0, False)]


def test_sampled_tokens_follow_the_probabilities() -> None:
    probability_V = torch.tensor([0.0, 0.1, 0.25, 0.05, 0.6])
    count = 20_000
    token_N = pick_sampled_tokens(probability_V.log().expand(count, 5), make_uniforms(1, count)[0])
    found_V = token_N.bincount(minlength=5) / count
    assert (found_V - probability_V).abs().max() < 4 * math.sqrt(0.25 / count)
    assert found_V[0] == 0
    edge_N = pick_sampled_tokens(
        probability_V.log().expand(3, 5), torch.tensor([0.0, 0.1, 1 - 2**-53], dtype=torch.float64)
    )
    assert edge_N.tolist() == [1, 2, 4]


@settings(max_examples=50, deadline=None)
@given(values=st.lists(st.integers(-8, 0), min_size=2, max_size=9), k=st.integers(1, 9), p=st.floats(0.01, 0.99))
def test_filters_keep_the_fewest_most_probable_tokens(values: list[int], k: int, p: float) -> None:
    logp_NV = torch.tensor([values], dtype=torch.float64).log_softmax(-1)
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    kept = [i for i in range(len(values)) if FILTERS["top_k"](logp_NV, k)[0, i] > -math.inf]
    assert kept == sorted(order[:k])
    nucleus = [i for i in range(len(values)) if FILTERS["top_p"](logp_NV, p)[0, i] > -math.inf]
    probability = logp_NV[0].exp()
    assert nucleus == sorted(order[: len(nucleus)])
    assert probability[order[: len(nucleus)]].sum() >= p - 1e-9
    assert probability[order[: len(nucleus) - 1]].sum() < p + 1e-9
    for name, rule in FILTERS.items():
        assert torch.equal(rule(logp_NV, SampleSettings.model_fields[name].default), logp_NV)


def test_low_temperature_favours_probable_tokens() -> None:
    logp_NV = torch.tensor([[0.7, 0.2, 0.1]]).log()
    probability = [FILTERS["temperature"](logp_NV, value).softmax(-1)[0] for value in (0.5, 1.0, 2.0)]
    assert probability[0][0] > probability[1][0] > probability[2][0]
    assert probability[0].tolist() == pytest.approx([0.49 / 0.54, 0.04 / 0.54, 0.01 / 0.54])


def test_every_filter_has_a_setting() -> None:
    assert list(FILTERS) == list(SampleSettings.model_fields)

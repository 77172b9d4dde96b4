"""Beam search holds to its laws on models small enough to know the truth about."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.decoding.beam import GROUP_SIZE, STOP_RULES, find_candidates
from dragoman.decoding.protocol import SearchResult, sanitize_logp
from dragoman.types import BOS, EOS, PAD
from toy_requests import beam_search
from toy_steps import Broken, Script, Toy, exhaustive, rescore, sources

NEVER = -math.inf
ALPHAS = (0.0, 0.6, 1.0, 2.0)
seeds = st.integers(0, 10_000)
few = settings(max_examples=25, deadline=None)


def search(model: Toy, firsts: list[int], limits: list[int], **options: Any) -> list[list[SearchResult]]:
    return beam_search(model, *sources(*firsts), torch.tensor(limits, dtype=torch.long), **options)


def one(model: Toy, limit: int, **options: Any) -> list[SearchResult]:
    return search(model, [4], [limit], **options)[0]


def same(found: list[SearchResult], wanted: list[SearchResult]) -> None:
    assert [(f.tokens, f.finished) for f in found] == [(f.tokens, f.finished) for f in wanted]
    assert [f.logp for f in found] == pytest.approx([f.logp for f in wanted], rel=1e-5, abs=1e-6)
    assert [f.score for f in found] == pytest.approx([f.score for f in wanted], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("stop", STOP_RULES)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_beam_wide_enough_for_everything_finds_everything(alpha: float, stop: str) -> None:
    for first, limit in ((4, 4), (5, 4), (6, 1)):
        truth = exhaustive(Toy(), first, limit, alpha)
        assert len(truth) == {4: 1 + 3 + 9 + 27 + 81, 1: 1 + 3}[limit]
        same(search(Toy(), [first], [limit], width=128, nbest=128, alpha=alpha, stop=stop)[0], truth)


@pytest.mark.parametrize("nbest", [1, 3])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_the_best_rule_stops_early_and_still_finds_the_best(alpha: float, nbest: int) -> None:
    saved = 0
    for seed in range(12):
        model = Toy(seed=seed, sharp=8.0)
        truth = exhaustive(model, 4, 4, alpha)
        model.steps = 0
        same(one(model, 4, width=128, nbest=nbest, alpha=alpha, stop="best"), truth[:nbest])
        saved += 4 - model.steps
    assert (saved > 0) == (nbest == 1 or alpha == 0)  # with a length norm three answers are not safe before the limit


@few
@given(
    seed=seeds,
    width=st.integers(1, 5),
    alpha=st.sampled_from(ALPHAS),
    limit=st.integers(1, 9),
    levels=st.integers(2, 99),
)
def test_the_best_rule_loses_nothing_against_never_stopping(
    seed: int, width: int, alpha: float, limit: int, levels: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(STOP_RULES, "never", lambda _score_BW, hope_B, _nbest: torch.zeros_like(hope_B, dtype=torch.bool))
        for nbest in {1, width}:
            model = Toy(seed=seed, levels=levels)
            early, late = (one(model, limit, width=width, nbest=nbest, alpha=alpha, stop=s) for s in ("best", "never"))
            assert early == late


@pytest.mark.parametrize("stop", STOP_RULES)
@few
@given(seed=seeds, width=st.integers(1, 4), alpha=st.sampled_from(ALPHAS), levels=st.sampled_from([3, 1 << 20]))
def test_neighbours_change_nothing(stop: str, seed: int, width: int, alpha: float, levels: int) -> None:
    model, firsts, limits = Toy(seed=seed, levels=levels), [4, 5, 6, 7, 8], [6, 0, 9, 1, 4]
    options: Any = {"width": width, "nbest": width, "alpha": alpha, "stop": stop}
    together = search(model, firsts, limits, **options)
    for b, (first, limit) in enumerate(zip(firsts, limits)):
        alone = search(model, [9, 9, first, 9, 9], [0, 0, limit, 0, 0], **options)
        assert alone == [[], [], together[b], [], []]
    order = [3, 0, 4, 1, 2]
    moved = search(model, [firsts[i] for i in order], [limits[i] for i in order], **options)
    assert moved == [together[i] for i in order]


@pytest.mark.parametrize("stop", STOP_RULES)
@few
@given(seed=seeds, width=st.integers(1, 6), alpha=st.sampled_from(ALPHAS))
def test_answers_are_sorted_distinct_within_the_limit_and_truly_scored(
    stop: str, seed: int, width: int, alpha: float
) -> None:
    model, firsts, limits = Toy(seed=seed, sharp=2.0), [4, 5, 6], [2, 5, 8]
    answers = search(model, firsts, limits, width=width, nbest=width, alpha=alpha, stop=stop)
    for first, limit, found in zip(firsts, limits, answers):
        assert found == sorted(found, key=lambda f: (not f.finished, -f.score))
        assert len({tuple(f.tokens) for f in found}) == len(found) > 0
        for f in found:
            assert not {PAD, BOS, EOS} & set(f.tokens)
            assert len(f.tokens) < limit if f.finished else len(f.tokens) == limit
            marked = [*f.tokens, EOS] if f.finished else f.tokens
            assert f.logp == pytest.approx(rescore(model, first, marked), rel=1e-5)
            assert f.score == pytest.approx(f.logp / len(marked) ** alpha, rel=1e-5)


@few
@given(seed=seeds, width=st.integers(2, 6))
def test_fewer_answers_are_the_first_of_more(seed: int, width: int) -> None:
    model = Toy(seed=seed)
    assert one(model, 6, width=width, nbest=1, stop="best") == one(model, 6, width=width, nbest=width, stop="best")[:1]


SHORT_OR_LONG = Script([NEVER, NEVER, NEVER, -0.5, -0.93], [NEVER, NEVER, NEVER, 0.0, -9.0])
# the end mark at once: -0.5; a word and then the end mark: -0.93 / 2


def test_enough_is_content_and_best_is_not() -> None:
    enough, longer = one(SHORT_OR_LONG, 9, width=1, stop="enough"), one(SHORT_OR_LONG, 9, width=1, stop="best")
    same(enough, [SearchResult([], -0.5, -0.5, True)])
    same(longer, [SearchResult([4], -0.93, -0.465, True)])


@pytest.mark.parametrize(("stop", "alpha", "steps"), [("enough", 1.0, 2), ("best", 1.0, 2), ("best", 0.0, 1)])
def test_a_search_takes_no_more_steps_than_its_rule_asks(stop: str, alpha: float, steps: int) -> None:
    """After two steps two answers are in, and -9.93 / 9 is no hope; without a length penalty one step settles it."""
    SHORT_OR_LONG.steps = 0
    one(SHORT_OR_LONG, 9, width=2, alpha=alpha, stop=stop)
    assert SHORT_OR_LONG.steps == steps


def test_the_search_stops_with_its_slowest_sentence() -> None:
    endless = Script([NEVER, NEVER, NEVER, NEVER, 0.0])
    found = search(endless, [4, 5], [3, 6])
    assert [len(f[0].tokens) for f in found] == [3, 6]
    assert endless.steps == 6


def test_an_answer_without_an_end_is_marked_and_stands_behind_a_whole_one() -> None:
    endless = Script([NEVER, NEVER, NEVER, NEVER, 0.0])
    same(one(endless, 3), [SearchResult([4, 4, 4], 0.0, 0.0, False)])
    babble = Script(*[[NEVER, NEVER, NEVER, NEVER, -0.02]] * 2, [NEVER, NEVER, NEVER, -4.0, -0.02])
    whole, *cut = one(babble, 3, width=2, nbest=2)
    same([whole], [SearchResult([4, 4], -4.04, -4.04 / 3, True)])
    same(cut, [SearchResult([4, 4, 4], -0.06, -0.02, False)])


def test_an_answer_that_must_end_is_found_once() -> None:
    only_road = Script([NEVER, NEVER, NEVER, NEVER, 0.0], [NEVER, NEVER, NEVER, 0.0, NEVER])
    same(one(only_road, 9, width=3, nbest=3), [SearchResult([4], 0.0, 0.0, True)])
    assert only_road.steps == 2


def test_end_marks_do_not_starve_the_beam() -> None:
    """The two best candidates of the second step are end marks; both beams must live on."""
    model = Script(
        [NEVER, NEVER, NEVER, NEVER, -0.6, -0.8],
        [NEVER, NEVER, NEVER, -0.1, -3.0, -4.0],
        [NEVER, NEVER, NEVER, 0.0, NEVER, NEVER],
    )
    answers = one(model, 9, width=2, nbest=2, alpha=9.0, stop="best")
    assert [f.tokens for f in answers] == [[4, 4], [5, 4]]


def test_equals_are_settled_by_place() -> None:
    """Eight tokens, all equally likely: UNK is the lowest id that may be said, the end mark the next."""
    answers = one(Script([math.log(1 / 8)] * 8), 3, width=2, nbest=2, alpha=0.0, stop="best")
    assert [(f.tokens, f.finished) for f in answers] == [([], True), ([1], True)]


@few
@given(
    scores=st.lists(
        st.lists(st.sampled_from([NEVER, -3.0, -2.0, -1.0]), min_size=7, max_size=7), min_size=6, max_size=6
    ),
    repeat=st.integers(1, 60),
    width=st.sampled_from([1, 2, 3, 6]),
    levels=st.sampled_from([1, 8]),
)
def test_candidates_are_a_stable_sort_of_all_there_is(
    scores: list[list[float]], repeat: int, width: int, levels: int
) -> None:
    logp_NV = torch.tensor(scores).repeat(1, repeat)
    logp_NV[:, -1] = -0.5  # beyond the first group of places, for most
    logp_BW = -(torch.arange(6).view(-1, width) % levels / 4.0)
    total_BC = (logp_BW.view(6, 1) + logp_NV).view(len(logp_BW), -1)
    values, places = (each[:, : 2 * width] for each in total_BC.sort(dim=1, descending=True, stable=True))
    found = find_candidates(logp_BW, logp_NV)
    assert found.logp_BK.equal(values)
    sure = values > NEVER  # where there is nothing, any place will do
    assert (found.parent_BK * 7 * repeat + found.token_BK)[sure].equal(places[sure])


def test_candidates_agree_with_topk_where_nothing_is_equal() -> None:
    count = 3 * 5 * GROUP_SIZE + 3
    logp_NV = -torch.randperm(count, generator=torch.Generator().manual_seed(1))[None].repeat(GROUP_SIZE, 1).float()
    logp_BW = -torch.arange(GROUP_SIZE)[None] / (2 * GROUP_SIZE)
    values, places = (logp_BW.view(-1, 1) + logp_NV).view(1, -1).topk(2 * GROUP_SIZE)
    found = find_candidates(logp_BW, logp_NV)
    assert found.logp_BK.equal(values)
    assert (found.parent_BK * count + found.token_BK).equal(places)


@pytest.mark.parametrize("value", [math.nan, NEVER, math.inf])
@pytest.mark.parametrize("width", [1, 3])
def test_a_broken_sentence_ends_there_and_the_others_do_not_notice(value: float, width: int) -> None:
    firsts, limits = [4, 5, 6], [7, 7, 7]
    options: Any = {"width": width, "nbest": width, "stop": "best"}
    healthy = search(Toy(seed=10), firsts, limits, **options)
    at_once = search(Broken(value, 0, 5, seed=10), firsts, limits, **options)
    assert at_once == [healthy[0], [SearchResult([], 0.0, 0.0, False)], healthy[2]]
    later = search(Broken(value, 2, 5, seed=10), firsts, limits, **options)
    assert [later[0], later[2]] == [healthy[0], healthy[2]]
    assert {len(f.tokens) for f in later[1] if not f.finished} == {2}
    assert all(math.isfinite(f.logp) and len(f.tokens) < 2 for f in later[1] if f.finished)


def test_what_may_be_said() -> None:
    logp_NV = torch.tensor([[-1.0, -2.0, -3.0, -4.0, math.nan, math.inf], [-1.0, NEVER, -1.0, -1.0, -5.0, 0.0]])
    wanted = [[NEVER, -2.0, NEVER, -4.0, NEVER, NEVER], [NEVER, NEVER, NEVER, -1.0, -5.0, 0.0]]
    assert sanitize_logp(logp_NV).tolist() == wanted
    assert logp_NV[1, PAD] == -1.0  # the model's own numbers are left alone


def test_dead_rows_ask_nothing_of_the_model() -> None:
    model = Toy()
    assert search(model, [4, 5], [0, 0]) == [[], []]
    assert search(model, [], []) == []
    assert model.steps == 0


@pytest.mark.gpu
def test_a_gpu_finds_the_same_and_is_asked_once_a_step() -> None:
    model, limit_B = Toy(seed=10, sharp=1.0), torch.tensor([9, 20, 0, 14])
    source_BS, real_BS = sources(4, 5, 6, 7)
    wanted = beam_search(model, source_BS, real_BS, limit_B, nbest=3, stop="best")
    placed = [each.cuda() for each in (source_BS, real_BS, limit_B)]
    model.steps = 0
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        found = beam_search(model, *placed, nbest=3, stop="best")
        torch.cuda.set_sync_debug_mode("default")
    for ours, theirs in zip(found, wanted):
        same(ours, theirs)
    assert len(waits) < model.steps + 15  # the rest: limits going in, answers coming out

"""Tests of beam search on models so small that all hypotheses can be enumerated."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.decoding.beam import GROUP_SIZE, STOP_RULES, find_candidates
from dragoman.decoding.methods import SearchSettings, check_search_settings
from dragoman.decoding.protocol import SearchResult, forbid_invalid_tokens
from dragoman.errors import UserError
from dragoman.types import BOS, EOS, PAD
from toy_requests import beam_search
from toy_steps import Broken, Script, Toy, exhaustive, rescore, sources

NEG_INF = -math.inf
ALPHAS = (0.0, 0.6, 1.0, 2.0)
seeds = st.integers(0, 10_000)
few = settings(max_examples=25, deadline=None)


def search_batch(model: Toy, firsts: list[int], limits: list[int], **options: Any) -> list[list[SearchResult]]:
    return beam_search(model, *sources(*firsts), torch.tensor(limits, dtype=torch.long), **options)


def search_one(model: Toy, limit: int, **options: Any) -> list[SearchResult]:
    return search_batch(model, [4], [limit], **options)[0]


def assert_same(found: list[SearchResult], wanted: list[SearchResult]) -> None:
    assert [(f.tokens, f.finished) for f in found] == [(f.tokens, f.finished) for f in wanted]
    assert [f.logp for f in found] == pytest.approx([f.logp for f in wanted], rel=1e-5, abs=1e-6)
    assert [f.score for f in found] == pytest.approx([f.score for f in wanted], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("stop", STOP_RULES)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_full_width_beam_finds_every_hypothesis(alpha: float, stop: str) -> None:
    for first, limit in ((4, 4), (5, 4), (6, 1)):
        expected = exhaustive(Toy(), first, limit, alpha)
        assert len(expected) == {4: 1 + 3 + 9 + 27 + 81, 1: 1 + 3}[limit]
        assert_same(search_batch(Toy(), [first], [limit], width=128, nbest=128, alpha=alpha, stop=stop)[0], expected)


@pytest.mark.parametrize("nbest", [1, 3])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_stop_rule_best_stops_early_and_finds_the_best(alpha: float, nbest: int) -> None:
    saved = 0
    for seed in range(12):
        model = Toy(seed=seed, sharp=8.0)
        expected = exhaustive(model, 4, 4, alpha)
        model.steps = 0
        assert_same(search_one(model, 4, width=128, nbest=nbest, alpha=alpha, stop="best"), expected[:nbest])
        saved += 4 - model.steps
    # With length normalization, three results are never certain before the limit.
    assert (saved > 0) == (nbest == 1 or alpha == 0)


@few
@given(
    seed=seeds,
    width=st.integers(1, 5),
    alpha=st.sampled_from(ALPHAS),
    limit=st.integers(1, 9),
    levels=st.integers(2, 99),
)
def test_stop_rule_best_finds_the_same_as_never_stopping(
    seed: int, width: int, alpha: float, limit: int, levels: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            STOP_RULES,
            "never",
            lambda score_BW, *_: torch.zeros_like(score_BW[:, 0], dtype=torch.bool),
        )
        for nbest in {1, width}:
            model = Toy(seed=seed, levels=levels)
            early, late = (
                search_one(model, limit, width=width, nbest=nbest, alpha=alpha, stop=s) for s in ("best", "never")
            )
            assert early == late


@pytest.mark.parametrize("stop", STOP_RULES)
@few
@given(seed=seeds, width=st.integers(1, 4), alpha=st.sampled_from(ALPHAS), levels=st.sampled_from([3, 1 << 20]))
def test_results_do_not_depend_on_other_sentences_of_the_batch(
    stop: str, seed: int, width: int, alpha: float, levels: int
) -> None:
    model, firsts, limits = Toy(seed=seed, levels=levels), [4, 5, 6, 7, 8], [6, 0, 9, 1, 4]
    options: Any = {"width": width, "nbest": width, "alpha": alpha, "stop": stop}
    together = search_batch(model, firsts, limits, **options)
    for b, (first, limit) in enumerate(zip(firsts, limits)):
        alone = search_batch(model, [9, 9, first, 9, 9], [0, 0, limit, 0, 0], **options)
        assert alone == [[], [], together[b], [], []]
    order = [3, 0, 4, 1, 2]
    moved = search_batch(model, [firsts[i] for i in order], [limits[i] for i in order], **options)
    assert moved == [together[i] for i in order]


@pytest.mark.parametrize("stop", STOP_RULES)
@few
@given(seed=seeds, width=st.integers(1, 6), alpha=st.sampled_from(ALPHAS))
def test_results_are_sorted_distinct_within_the_limit_and_correctly_scored(
    stop: str, seed: int, width: int, alpha: float
) -> None:
    model, firsts, limits = Toy(seed=seed, sharp=2.0), [4, 5, 6], [2, 5, 8]
    answers = search_batch(model, firsts, limits, width=width, nbest=width, alpha=alpha, stop=stop)
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
def test_nbest_1_is_the_first_of_more_results(seed: int, width: int) -> None:
    model = Toy(seed=seed)
    best, several = (search_one(model, 6, width=width, nbest=nbest, stop="best") for nbest in (1, width))
    assert best == several[:1]


SHORT_OR_LONG = Script([NEG_INF, NEG_INF, NEG_INF, -0.5, -0.93], [NEG_INF, NEG_INF, NEG_INF, 0.0, -9.0])
# scores: EOS at once -0.5; one token and EOS -0.93 / 2


def test_stop_rule_enough_takes_the_first_result_and_best_searches_on() -> None:
    enough, longer = (search_one(SHORT_OR_LONG, 9, width=1, stop=stop) for stop in ("enough", "best"))
    assert_same(enough, [SearchResult([], -0.5, -0.5, True)])
    assert_same(longer, [SearchResult([4], -0.93, -0.465, True)])


@pytest.mark.parametrize(("stop", "alpha", "steps"), [("enough", 1.0, 2), ("best", 1.0, 2), ("best", 0.0, 1)])
def test_number_of_steps_until_the_stop_rule_applies(stop: str, alpha: float, steps: int) -> None:
    """After two steps two hypotheses are finished, and the bound of the others, -9.93 / 9, is lower.

    Without a length penalty one step suffices.
    """
    SHORT_OR_LONG.steps = 0
    search_one(SHORT_OR_LONG, 9, width=2, alpha=alpha, stop=stop)
    assert SHORT_OR_LONG.steps == steps


@pytest.mark.parametrize(("finish", "steps"), [(0, 3), (1, 1), (2, 2), (3, 3)])
def test_finish_is_the_number_of_hypotheses_at_which_the_search_stops(finish: int, steps: int) -> None:
    """One hypothesis is finished at each step: EOS and one other token are the only possible ones."""
    model = Script([NEG_INF, NEG_INF, NEG_INF, -0.7, -0.7])
    model.steps = 0
    answers = search_one(model, 9, width=3, nbest=1 if finish else 3, finish=finish)
    assert model.steps == steps
    assert answers[0].finished
    many = search_one(model, 9, width=3, nbest=3, finish=finish)  # as reranking asks for, whatever the user's nbest
    assert len(many) == steps
    assert all(answer.finished for answer in many)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"finish": 5}, "search.finish=5 must be at least the number of answers and at most the beam, 1 to 4"),
        ({"finish": 1, "nbest": 2}, "search.finish=1 must be at least the number of answers"),
        ({"finish": 2, "stop": "best"}, "search.finish has no use with search.stop=best"),
        ({"finish": 2, "method": "diverse"}, "search.finish has no use with search.method=diverse"),
        (
            {"finish": 2, "method": "mbr", "candidates": "beam"},
            "search.finish=2 must be at least the number of answers",
        ),
    ],
)
def test_a_useless_finish_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_search_settings(SearchSettings(**given))


def test_the_search_stops_when_the_last_sentence_is_done() -> None:
    endless = Script([NEG_INF, NEG_INF, NEG_INF, NEG_INF, 0.0])
    found = search_batch(endless, [4, 5], [3, 6])
    assert [len(f[0].tokens) for f in found] == [3, 6]
    assert endless.steps == 6


def test_unfinished_results_are_marked_and_rank_below_finished_ones() -> None:
    endless = Script([NEG_INF, NEG_INF, NEG_INF, NEG_INF, 0.0])
    assert_same(search_one(endless, 3), [SearchResult([4, 4, 4], 0.0, 0.0, False)])
    babble = Script(*[[NEG_INF, NEG_INF, NEG_INF, NEG_INF, -0.02]] * 2, [NEG_INF, NEG_INF, NEG_INF, -4.0, -0.02])
    whole, *cut = search_one(babble, 3, width=2, nbest=2)
    assert_same([whole], [SearchResult([4, 4], -4.04, -4.04 / 3, True)])
    assert_same(cut, [SearchResult([4, 4, 4], -0.06, -0.02, False)])


def test_the_only_possible_hypothesis_is_found_once() -> None:
    only_path = Script([NEG_INF, NEG_INF, NEG_INF, NEG_INF, 0.0], [NEG_INF, NEG_INF, NEG_INF, 0.0, NEG_INF])
    assert_same(search_one(only_path, 9, width=3, nbest=3), [SearchResult([4], 0.0, 0.0, True)])
    assert only_path.steps == 2


def test_eos_among_the_best_candidates_leaves_all_beams_active() -> None:
    """The two best candidates of the second step are EOS; both beams must still be extended."""
    model = Script(
        [NEG_INF, NEG_INF, NEG_INF, NEG_INF, -0.6, -0.8],
        [NEG_INF, NEG_INF, NEG_INF, -0.1, -3.0, -4.0],
        [NEG_INF, NEG_INF, NEG_INF, 0.0, NEG_INF, NEG_INF],
    )
    answers = search_one(model, 9, width=2, nbest=2, alpha=9.0, stop="best")
    assert [f.tokens for f in answers] == [[4, 4], [5, 4]]


def test_ties_are_broken_by_token_id() -> None:
    """All eight tokens have the same probability: UNK is the lowest id that may be generated, EOS the next."""
    answers = search_one(Script([math.log(1 / 8)] * 8), 3, width=2, nbest=2, alpha=0.0, stop="best")
    assert [(f.tokens, f.finished) for f in answers] == [([], True), ([1], True)]


@few
@given(
    scores=st.lists(
        st.lists(st.sampled_from([NEG_INF, -3.0, -2.0, -1.0]), min_size=7, max_size=7), min_size=6, max_size=6
    ),
    repeat=st.integers(1, 60),
    width=st.sampled_from([1, 2, 3, 6]),
    levels=st.sampled_from([1, 8]),
)
def test_candidates_are_a_stable_sort_of_all_continuations(
    scores: list[list[float]], repeat: int, width: int, levels: int
) -> None:
    logp_NV = torch.tensor(scores).repeat(1, repeat)
    logp_NV[:, -1] = -0.5  # mostly beyond the first group of columns
    logp_BW = -(torch.arange(6).view(-1, width) % levels / 4.0)
    total_BC = (logp_BW.view(6, 1) + logp_NV).view(len(logp_BW), -1)
    values, indices = (each[:, : 2 * width] for each in total_BC.sort(dim=1, descending=True, stable=True))
    found = find_candidates(logp_BW, logp_NV)
    assert found.logp_BK.equal(values)
    possible = values > NEG_INF  # where there is no candidate, any index is right
    assert (found.parent_BK * 7 * repeat + found.token_BK)[possible].equal(indices[possible])


def test_candidates_equal_topk_if_there_are_no_ties() -> None:
    count = 3 * 5 * GROUP_SIZE + 3
    logp_NV = -torch.randperm(count, generator=torch.Generator().manual_seed(1))[None].repeat(GROUP_SIZE, 1).float()
    logp_BW = -torch.arange(GROUP_SIZE)[None] / (2 * GROUP_SIZE)
    values, indices = (logp_BW.view(-1, 1) + logp_NV).view(1, -1).topk(2 * GROUP_SIZE)
    found = find_candidates(logp_BW, logp_NV)
    assert found.logp_BK.equal(values)
    assert (found.parent_BK * count + found.token_BK).equal(indices)


@pytest.mark.parametrize("value", [math.nan, NEG_INF, math.inf])
@pytest.mark.parametrize("width", [1, 3])
def test_a_sentence_with_invalid_log_probabilities_ends_and_others_are_unaffected(value: float, width: int) -> None:
    firsts, limits = [4, 5, 6], [7, 7, 7]
    options: Any = {"width": width, "nbest": width, "stop": "best"}
    healthy = search_batch(Toy(seed=10), firsts, limits, **options)
    at_once = search_batch(Broken(value, 0, 5, seed=10), firsts, limits, **options)
    assert at_once == [healthy[0], [SearchResult([], 0.0, 0.0, False)], healthy[2]]
    later = search_batch(Broken(value, 2, 5, seed=10), firsts, limits, **options)
    assert [later[0], later[2]] == [healthy[0], healthy[2]]
    assert {len(f.tokens) for f in later[1] if not f.finished} == {2}
    assert all(math.isfinite(f.logp) and len(f.tokens) < 2 for f in later[1] if f.finished)


def test_sanitize_logp() -> None:
    logp_NV = torch.tensor([[-1.0, -2.0, -3.0, -4.0, math.nan, math.inf], [-1.0, NEG_INF, -1.0, -1.0, -5.0, 0.0]])
    wanted = [[NEG_INF, -2.0, NEG_INF, -4.0, NEG_INF, NEG_INF], [NEG_INF, NEG_INF, NEG_INF, -1.0, -5.0, 0.0]]
    assert forbid_invalid_tokens(logp_NV).tolist() == wanted
    assert logp_NV[1, PAD] == -1.0  # the input is not modified


def test_jobs_with_limit_0_do_not_run_the_model() -> None:
    model = Toy()
    assert search_batch(model, [4, 5], [0, 0]) == [[], []]
    assert search_batch(model, [], []) == []
    assert model.steps == 0


@pytest.mark.gpu
def test_a_gpu_finds_the_same_with_one_synchronization_per_step() -> None:
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
        assert_same(ours, theirs)
    assert len(waits) < model.steps + 15  # 15: copying limits to the GPU and results back

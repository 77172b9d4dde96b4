"""Scores of recurrent attention: as the equations have them, fast as plain, blind to padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dragoman.modules import attention_scores as scores
from dragoman.modules.attention_scores import (
    SCORES,
    AttentionScore,
    ScoreSettings,
    SourceAttention,
    score_additive_chunked,
    score_additive_reference,
    supports_fused_score,
)
from tolerance import DEVICES, differ, same

EVERY = pytest.mark.parametrize("name", SCORES)
B, T, S, C, A = 3, 4, 6, 5, 7
KEEP_BS = torch.tensor([[1] * 6, [1] * 4 + [0] * 2, [0] * 6]).bool()  # the last row is empty


def score_of(name: str, memory_width: int = C) -> AttentionScore:
    torch.manual_seed(0)
    return SCORES[name](ScoreSettings(), C, memory_width, A).double()


def drawn(*shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


# e_i of the lecture, for one decoder state s and one encoder state h
FORMULAS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "none": lambda *_: torch.zeros((), dtype=torch.float64),
    "mean": lambda *_: torch.zeros((), dtype=torch.float64),
    "dot": lambda _, s, h: s @ h,
    "multiplicative": lambda score, s, h: s @ score.key.weight @ h,
    "additive": lambda score, s, h: score.weight @ torch.tanh(score.key.weight @ h + score.query.weight @ s),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_scores_are_those_of_the_lecture(name: str) -> None:
    score, query_BTC, memory_BSC = score_of(name), drawn(B, T, C), drawn(B, S, C, seed=2)
    score_BTS = score(query_BTC, score.keys(memory_BSC))
    for b in range(B):
        for t in range(T):
            for s in range(S):
                same(score_BTS[b, t, s], FORMULAS[name](score, query_BTC[b, t], memory_BSC[b, s]))


@EVERY
def test_a_score_depends_on_its_query_and_its_key_alone(name: str) -> None:
    score, query_BTC, memory_BSC = score_of(name), drawn(B, T, C), drawn(B, S, C, seed=2)
    score_BTS = score(query_BTC, score.keys(memory_BSC))
    for t in range(T):
        for s in range(S):
            alone_B11 = score(query_BTC[:, t : t + 1], score.keys(memory_BSC[:, s : s + 1]))
            same(score_BTS[:, t, s], alone_B11[:, 0, 0])


@pytest.mark.parametrize("name", ["multiplicative", "additive"])
def test_learned_scores_take_a_source_of_another_width(name: str) -> None:
    score = score_of(name, memory_width=9)
    assert score(drawn(B, T, C), score.keys(drawn(B, S, 9))).shape == (B, T, S)


@EVERY
def test_shares_sum_to_one_over_what_is_there(name: str) -> None:
    attention = SourceAttention(score_of(name), C)
    source = attention.prepare(drawn(B, S, C, seed=2), KEEP_BS)
    share_BTS = attention.weights(drawn(B, T, C), source)
    same(share_BTS.sum(-1), torch.ones(B, T))
    assert (share_BTS[1, :, 4:] == 0).all()
    assert (share_BTS[1, :, :4] > 0).all()
    if not SCORES[name].aligns:
        mean_BS = KEEP_BS.double() / KEEP_BS.sum(-1, keepdim=True)
        same(share_BTS[:2], mean_BS[:2, None].expand(2, T, S))


@EVERY
def test_what_is_read_stands_before_the_state_that_asked(name: str) -> None:
    attention = SourceAttention(score_of(name), C)
    query_BTC, memory_BSC = drawn(B, T, C), drawn(B, S, C, seed=2)
    source = attention.prepare(memory_BSC, KEEP_BS)
    joined = attention(query_BTC, source)
    assert joined.size(-1) == attention.width + C
    same(joined[..., attention.width :], query_BTC)
    if attention.score.reads:
        expected = [sum(w * h for w, h in zip(row, memory_BSC[0])) for row in attention.weights(query_BTC, source)[0]]
        same(joined[0, :, :C], torch.stack(expected))


@EVERY
def test_padding_of_the_source_has_no_influence(name: str) -> None:
    attention = SourceAttention(score_of(name), C)
    memory_BSC = drawn(B, S, C, seed=2).requires_grad_()
    joined = attention(drawn(B, T, C), attention.prepare(memory_BSC, KEEP_BS))
    other = memory_BSC.detach().masked_fill(~KEEP_BS[..., None], 9.0)
    same(attention(drawn(B, T, C), attention.prepare(other, KEEP_BS))[:2], joined[:2])
    assert joined.isfinite().all()
    if attention.score.reads:
        joined[:2].square().sum().backward()
        assert memory_BSC.grad is not None
        assert (memory_BSC.grad[1, 4:] == 0).all()
        differ(memory_BSC.grad[1, :4], torch.zeros(4, C))


@pytest.mark.parametrize("block", [1, 2 * S * A, 12 * S * A, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_chunked_is_plain(block: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same scores and gradients, however few are taken at a time."""
    monkeypatch.setattr(scores, "BLOCK_ELEMENTS", dict.fromkeys(DEVICES, block))
    given = [t.to(device, dtype).requires_grad_() for t in (drawn(B, 5, A), drawn(B, S, A, seed=2), drawn(A, seed=3))]
    fast, slow = score_additive_chunked(*given), score_additive_reference(*given)
    same(fast, slow)
    weight = drawn(B, 5, S, seed=4).to(slow)
    for one, two in zip(
        torch.autograd.grad(fast, given, weight), torch.autograd.grad(slow, given, weight), strict=True
    ):
        same(one, two)


def on_gpu(T: int, S: int, A: int, dtype: torch.dtype = torch.float32, rows: int = B) -> list[Tensor]:
    """Queries, keys and weights; these stay wide, as under autocast."""
    query_BTA, key_BSA, weight_A = drawn(rows, T, A), drawn(rows, S, A, seed=2), drawn(A, seed=3)
    given = query_BTA.to("cuda", dtype), key_BSA.to("cuda", dtype), weight_A.float().cuda()
    return [x.requires_grad_() for x in given]


def score_additive_fused(*given: Tensor) -> Tensor:
    from dragoman.kernels.attention_triton import additive_score  # Triton is there with a GPU only

    score_BTS: Tensor = additive_score(*given)
    return score_BTS


def slopes(score_BTS: Tensor, given: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(score_BTS, given, drawn(*score_BTS.shape, seed=4).to(score_BTS))


@pytest.mark.gpu
@pytest.mark.parametrize("A", [1, 7, 16, 300, 512, 1000, scores.WIDEST_FUSED_SCORE])
@pytest.mark.parametrize(("T", "S"), [(1, 1), (1, 33), (3, 5), (20, 33), (128, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_is_plain(T: int, S: int, A: int, dtype: torch.dtype) -> None:
    """The same scores and gradients, up to what is lost where they are written down."""
    given = on_gpu(T, S, A, dtype)
    exact = [x.detach().double().requires_grad_() for x in given]
    assert supports_fused_score(*given)
    fast, slow = score_additive_fused(*given), score_additive_reference(*exact)
    same(fast, slow)
    for x, one, two in zip(given, slopes(fast, given), slopes(slow.to(fast), exact), strict=True):
        assert one.dtype == x.dtype
        same(one, two)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 20])
def test_fused_reads_what_lies_apart_and_repeats_itself(T: int) -> None:
    """Views give the bits of their copies; so does a second run, gradients included."""
    given = on_gpu(T, 33, 300)
    apart = [x.detach().repeat_interleave(2, -1)[..., ::2].requires_grad_() for x in given]
    found, again = score_additive_fused(*given), score_additive_fused(*apart)
    assert torch.equal(found, again)
    for one, two in zip(slopes(found, given), slopes(again, apart), strict=True):
        assert torch.equal(one, two)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "T", "S"), [(0, 1, 5), (0, 3, 5), (2, 0, 5), (2, 3, 0)])
def test_fused_of_nothing_has_no_slope(rows: int, T: int, S: int) -> None:
    given = on_gpu(T, S, A, rows=rows)
    found = score_additive_fused(*given)
    assert found.shape == (rows, T, S)
    assert not any(slope.any() for slope in slopes(found, given))


@pytest.mark.gpu
def test_a_graph_holds_the_fused_score() -> None:
    """Captured once, it scores what lies in its place later."""
    given = on_gpu(1, 30, 512, torch.bfloat16)
    with torch.no_grad():
        score_additive_fused(*given)  # compiled before
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = score_additive_fused(*given)
        given[0].copy_(drawn(B, 1, 512, seed=9))
        graph.replay()
        assert torch.equal(found, score_additive_fused(*given))


@pytest.mark.gpu
@pytest.mark.parametrize(("A", "dtype"), [(scores.WIDEST_FUSED_SCORE + 1, torch.float32), (8, torch.float64)], ids=str)
def test_the_kernel_leaves_what_it_cannot_hold(A: int, dtype: torch.dtype) -> None:
    assert not supports_fused_score(*on_gpu(2, 3, A, dtype))
    assert supports_fused_score(*on_gpu(2, 3, 8))


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_does_not_narrow_the_sums(device: str) -> None:
    given = [drawn(*shape).float().to(device) for shape in ((2, 3, 8), (2, 5, 8), (8,))]
    with torch.autocast(device, torch.bfloat16):
        found = score_additive_chunked(*given)
    assert torch.equal(found, score_additive_chunked(*given))


def test_the_gradient_of_chunked_is_its_slope() -> None:
    given = [t.requires_grad_() for t in (drawn(2, 3, 4), drawn(2, 2, 4, seed=2), drawn(4, seed=3))]
    assert torch.autograd.gradcheck(score_additive_chunked, given)

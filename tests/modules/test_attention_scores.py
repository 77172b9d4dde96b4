"""Attention scores of recurrent decoders agree with their formulas; fast implementations agree with the reference."""

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
from tolerance import DEVICES, assert_different, assert_same

ALL_SCORES = pytest.mark.parametrize("name", SCORES)
B, T, S, C, A = 3, 4, 6, 5, 7
REAL_BS = torch.tensor([[1] * 6, [1] * 4 + [0] * 2, [0] * 6]).bool()  # the last row is empty


def make_score(name: str, memory_width: int = C) -> AttentionScore:
    torch.manual_seed(0)
    return SCORES[name](ScoreSettings(), C, memory_width, A).double()


def sample_normal(*shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


# The score of one decoder state s and one encoder state h.
FORMULAS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "none": lambda *_: torch.zeros((), dtype=torch.float64),
    "mean": lambda *_: torch.zeros((), dtype=torch.float64),
    "dot": lambda _, s, h: s @ h,
    "multiplicative": lambda score, s, h: s @ score.key.weight @ h,
    "reduced_rank": lambda score, s, h: s @ score.query.weight.T @ score.key.weight @ h,
    "additive": lambda score, s, h: score.weight @ torch.tanh(score.key.weight @ h + score.query.weight @ s),
}


@ALL_SCORES
@pytest.mark.parametrize("memory_width", [C, 9])
def test_scores_equal_their_formulas(name: str, memory_width: int) -> None:
    """A score works with another width of the encoder states, unless it declares that it needs equal widths."""
    if SCORES[name].needs_equal_widths and memory_width != C:
        with pytest.raises(RuntimeError):
            make_score(name, memory_width)(sample_normal(B, T, C), sample_normal(B, S, memory_width))
        return
    score, query_BTC, memory_BSC = (
        make_score(name, memory_width),
        sample_normal(B, T, C),
        sample_normal(B, S, memory_width, seed=2),
    )
    score_BTS = score(query_BTC, score.compute_keys(memory_BSC))
    for b in range(B):
        for t in range(T):
            for s in range(S):
                assert_same(score_BTS[b, t, s], FORMULAS[name](score, query_BTC[b, t], memory_BSC[b, s]))


@ALL_SCORES
def test_a_score_depends_only_on_its_query_and_key(name: str) -> None:
    score, query_BTC, memory_BSC = make_score(name), sample_normal(B, T, C), sample_normal(B, S, C, seed=2)
    score_BTS = score(query_BTC, score.compute_keys(memory_BSC))
    for t in range(T):
        for s in range(S):
            single_B11 = score(query_BTC[:, t : t + 1], score.compute_keys(memory_BSC[:, s : s + 1]))
            assert_same(score_BTS[:, t, s], single_B11[:, 0, 0])


def test_the_rank_of_a_reduced_rank_score_is_the_attention_width() -> None:
    """The scores of more queries and keys than that form a matrix of this rank."""
    torch.manual_seed(0)
    score = SCORES["reduced_rank"](ScoreSettings(), C, 9, 2).double()
    score_TS = score(sample_normal(1, T, C), score.compute_keys(sample_normal(1, S, 9)))[0]
    assert torch.linalg.matrix_rank(score_TS) == 2


@ALL_SCORES
def test_weights_sum_to_one_over_real_tokens(name: str) -> None:
    attention = SourceAttention(make_score(name), C)
    source = attention.prepare(sample_normal(B, S, C, seed=2), REAL_BS)
    weight_BTS = attention.compute_weights(sample_normal(B, T, C), source)
    assert_same(weight_BTS.sum(-1), torch.ones(B, T))
    assert (weight_BTS[1, :, 4:] == 0).all()
    assert (weight_BTS[1, :, :4] > 0).all()
    if not SCORES[name].aligns:
        mean_BS = REAL_BS.double() / REAL_BS.sum(-1, keepdim=True)
        assert_same(weight_BTS[:2], mean_BS[:2, None].expand(2, T, S))


@ALL_SCORES
def test_context_vector_precedes_the_decoder_state(name: str) -> None:
    attention = SourceAttention(make_score(name), C)
    query_BTC, memory_BSC = sample_normal(B, T, C), sample_normal(B, S, C, seed=2)
    source = attention.prepare(memory_BSC, REAL_BS)
    joined, weight_BTS = attention(query_BTC, source)
    assert joined.size(-1) == attention.width + C
    assert_same(joined[..., attention.width :], query_BTC)
    if attention.score.has_context:
        assert torch.equal(weight_BTS, attention.compute_weights(query_BTC, source))
        expected = [sum(w * h for w, h in zip(weight_S, memory_BSC[0])) for weight_S in weight_BTS[0]]
        assert_same(joined[0, :, :C], torch.stack(expected))


@ALL_SCORES
def test_padding_of_the_source_has_no_influence(name: str) -> None:
    attention = SourceAttention(make_score(name), C)
    memory_BSC = sample_normal(B, S, C, seed=2).requires_grad_()
    joined, _ = attention(sample_normal(B, T, C), attention.prepare(memory_BSC, REAL_BS))
    other = memory_BSC.detach().masked_fill(~REAL_BS[..., None], 9.0)
    assert_same(attention(sample_normal(B, T, C), attention.prepare(other, REAL_BS))[0][:2], joined[:2])
    assert joined.isfinite().all()
    if attention.score.has_context:
        joined[:2].square().sum().backward()
        assert memory_BSC.grad is not None
        assert (memory_BSC.grad[1, 4:] == 0).all()
        assert_different(memory_BSC.grad[1, :4], torch.zeros(4, C))


@pytest.mark.parametrize("block", [1, 2 * S * A, 12 * S * A, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_chunked_score_matches_the_reference(
    block: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores and gradients do not depend on the size of the blocks."""
    monkeypatch.setattr(scores, "BLOCK_ELEMENTS", dict.fromkeys(DEVICES, block))
    inputs = [
        t.to(device, dtype).requires_grad_()
        for t in (sample_normal(B, 5, A), sample_normal(B, S, A, seed=2), sample_normal(A, seed=3))
    ]
    fast, slow = score_additive_chunked(*inputs), score_additive_reference(*inputs)
    assert_same(fast, slow)
    weight = sample_normal(B, 5, S, seed=4).to(slow)
    for actual, expected_grad in zip(
        torch.autograd.grad(fast, inputs, weight), torch.autograd.grad(slow, inputs, weight), strict=True
    ):
        assert_same(actual, expected_grad)


def make_gpu_inputs(T: int, S: int, A: int, dtype: torch.dtype = torch.float32, rows: int = B) -> list[Tensor]:
    """Return queries, keys and a weight on the GPU; the weight stays float32, as under autocast."""
    query_BTA, key_BSA, weight_A = (
        sample_normal(rows, T, A),
        sample_normal(rows, S, A, seed=2),
        sample_normal(A, seed=3),
    )
    inputs = query_BTA.to("cuda", dtype), key_BSA.to("cuda", dtype), weight_A.float().cuda()
    return [x.requires_grad_() for x in inputs]


def score_additive_fused(*inputs: Tensor) -> Tensor:
    from dragoman.kernels.attention_triton import additive_score  # Triton is installed only with a GPU

    score_BTS: Tensor = additive_score(*inputs)
    return score_BTS


def compute_gradients(score_BTS: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(score_BTS, inputs, sample_normal(*score_BTS.shape, seed=4).to(score_BTS))


@pytest.mark.gpu
@pytest.mark.parametrize("A", [1, 7, 16, 300, 512, 1000, scores.WIDEST_FUSED_SCORE])
@pytest.mark.parametrize(("T", "S"), [(1, 1), (1, 33), (3, 5), (20, 33), (128, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_triton_score_matches_the_reference(T: int, S: int, A: int, dtype: torch.dtype) -> None:
    """Scores and gradients are equal up to the rounding of the output."""
    inputs = make_gpu_inputs(T, S, A, dtype)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    assert supports_fused_score(*inputs)
    fast, slow = score_additive_fused(*inputs), score_additive_reference(*exact)
    assert_same(fast, slow)
    for x, actual, expected_grad in zip(
        inputs, compute_gradients(fast, inputs), compute_gradients(slow.to(fast), exact), strict=True
    ):
        assert actual.dtype == x.dtype
        assert_same(actual, expected_grad)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 20])
def test_triton_score_is_reproducible_and_supports_strides(T: int) -> None:
    """Strided views and repeated runs give bit-identical scores and gradients."""
    inputs = make_gpu_inputs(T, 33, 300)
    strided = [x.detach().repeat_interleave(2, -1)[..., ::2].requires_grad_() for x in inputs]
    score_BTS, again = score_additive_fused(*inputs), score_additive_fused(*strided)
    assert torch.equal(score_BTS, again)
    for actual, expected_grad in zip(
        compute_gradients(score_BTS, inputs), compute_gradients(again, strided), strict=True
    ):
        assert torch.equal(actual, expected_grad)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "T", "S"), [(0, 1, 5), (0, 3, 5), (2, 0, 5), (2, 3, 0)])
def test_triton_score_of_empty_inputs_has_zero_gradients(rows: int, T: int, S: int) -> None:
    inputs = make_gpu_inputs(T, S, A, rows=rows)
    score_BTS = score_additive_fused(*inputs)
    assert score_BTS.shape == (rows, T, S)
    assert not any(gradient.any() for gradient in compute_gradients(score_BTS, inputs))


@pytest.mark.gpu
def test_triton_score_works_in_a_cuda_graph() -> None:
    """A replayed CUDA graph computes the scores of new inputs."""
    inputs = make_gpu_inputs(1, 30, 512, torch.bfloat16)
    with torch.no_grad():
        score_additive_fused(*inputs)  # compiles the kernel before the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            score_BTS = score_additive_fused(*inputs)
        inputs[0].copy_(sample_normal(B, 1, 512, seed=9))
        graph.replay()
        assert torch.equal(score_BTS, score_additive_fused(*inputs))


@pytest.mark.gpu
@pytest.mark.parametrize(("A", "dtype"), [(scores.WIDEST_FUSED_SCORE + 1, torch.float32), (8, torch.float64)], ids=str)
def test_triton_score_is_not_used_for_wide_or_double_inputs(A: int, dtype: torch.dtype) -> None:
    assert not supports_fused_score(*make_gpu_inputs(2, 3, A, dtype))
    assert supports_fused_score(*make_gpu_inputs(2, 3, 8))


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_does_not_change_the_chunked_score(device: str) -> None:
    inputs = [sample_normal(*shape).float().to(device) for shape in ((2, 3, 8), (2, 5, 8), (8,))]
    with torch.autocast(device, torch.bfloat16):
        score_BTS = score_additive_chunked(*inputs)
    assert torch.equal(score_BTS, score_additive_chunked(*inputs))


def test_gradient_of_the_chunked_score_matches_finite_differences() -> None:
    inputs = [
        t.requires_grad_() for t in (sample_normal(2, 3, 4), sample_normal(2, 2, 4, seed=2), sample_normal(4, seed=3))
    ]
    assert torch.autograd.gradcheck(score_additive_chunked, inputs)

"""A KV cache read through a table of beam indices equals a cache that is reordered after every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dragoman.kernels import attention as attention_module
from dragoman.types import BOS
from tolerance import DEVICES, assert_same
from toy_engine import TRANSFORMERS, model_of, random_jobs


@torch.inference_mode()
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("settings", TRANSFORMERS, ids=str)
def test_indirect_cache_equals_reordered_cache(settings: dict[str, object], device: str) -> None:
    model: Any = model_of(**settings).to(device)
    if not model.supports_indirect_cache:
        pytest.skip("needs relative positions, or attends to some of the tokens only")
    B, W, T, V = 3, 4, 21, model.project.out_features
    source_BS = torch.randint(4, V, (B, 9), device=device)
    real_BS = torch.arange(9, device=device) < torch.tensor([[9], [4], [1]], device=device)
    rows_N = torch.arange(B, device=device).repeat_interleave(W)
    reordered = model.start(source_BS, real_BS).select(rows_N)
    indirect = reordered.make_indirect(T)
    token_N = torch.full((B * W,), BOS, device=device)
    for step in range(T):
        expected, reordered = model.step(token_N, reordered)
        logp_NV, indirect = model.step(token_N, indirect)
        assert_same(logp_NV, expected, torch.float32)
        parent_BW = torch.randint(W, (B, W), generator=torch.Generator().manual_seed(step)).to(device)
        rows_N = (parent_BW + W * torch.arange(B, device=device)[:, None]).flatten()
        reordered, indirect = reordered.select(rows_N), indirect.select(rows_N)
        token_N = torch.randint(4, V, (B * W,), device=device)
    assert indirect.caches[0][0].size(2) == T  # the capacity is unchanged


@pytest.mark.parametrize("copying", [False, True])
def test_a_new_sentence_ignores_the_previous_one_in_its_slot(copying: bool) -> None:
    """Slots are reused by later sentences, in caches of both kinds."""
    model: Any = model_of(copying=copying)
    jobs = random_jobs(6, model.project.out_features)
    for use_indirect in (False, True):
        with torch.inference_mode():
            sources = [torch.tensor([[*job.ids, 3]]) for job in jobs[:2]]
            width = max(source.size(1) for source in sources)
            source_BS = torch.cat([torch.nn.functional.pad(source, (0, width - source.size(1))) for source in sources])
            state = model.start(source_BS, source_BS > 0)
            state = state.make_indirect(9) if use_indirect else state
            for token in (BOS, 5, 6):
                expected, state = model.step(torch.full((2,), token), state)
            fresh = model.start(source_BS, source_BS > 0).keep_sentences(torch.tensor([1]))
            state = state.replace_sentences(torch.tensor([0]), fresh.make_indirect(0) if use_indirect else fresh)
            for token in (BOS, 5, 6):
                logp_NV, state = model.step(torch.full((2,), token), state)
            assert_same(logp_NV[:1], expected[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("widths", [(16, 16), (64, 32), (32, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_kernel_matches_the_reference(
    widths: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    N, H, K, W = 12, 3, 40, 3
    position_N = torch.tensor([0, 7, 16, 39], device="cuda").repeat_interleave(W)
    beam_indices_NK = torch.arange(N)[:, None] // W * W + torch.randint(W, (N, K))
    beam_indices_NK = beam_indices_NK.scatter(1, position_N.cpu()[:, None], torch.arange(N)[:, None]).int().cuda()
    query, key, value = (torch.randn(N, H, width, device="cuda", dtype=dtype) for width in (widths[0], *widths))
    cache = tuple(torch.randn(N, H, K, width, device="cuda", dtype=dtype) for width in widths)
    memory = tuple(torch.randn(4, H, 9, width, device="cuda", dtype=dtype) for width in widths)
    length_B = torch.tensor([9, 1, 4, 8], device="cuda")
    results = []
    for use_triton in (True, False):
        monkeypatch.setattr(attention_module, "supports_cached_kernel", lambda *_, use_triton=use_triton: use_triton)
        cache_copy = (cache[0].clone(), cache[1].clone())
        cache_out = attention_module.attend_to_cache(query, (key, value), cache_copy, position_N, beam_indices_NK)
        results.append((cache_out, *cache_copy, attention_module.attend_to_source(query, memory, length_B)))  # type: ignore[arg-type]
    for actual, expected in zip(*results, strict=True):
        assert_same(actual, expected, dtype)

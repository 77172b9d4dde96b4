"""A cache that stays where it is answers like one that is moved about; the kernel answers like its readable twin."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dragoman.kernels import attention as lookup
from dragoman.types import BOS
from tolerance import DEVICES, same
from toy_engine import TRANSFORMERS, model_of, random_jobs


@torch.inference_mode()
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("settings", TRANSFORMERS, ids=str)
def test_rows_that_stay_say_what_rows_that_move_say(settings: dict[str, object], device: str) -> None:
    model: Any = model_of(**settings).to(device)
    if not model.supports_indirect_cache:
        pytest.skip("it must know how far apart two tokens are, or does not see them all")
    B, W, T, V = 3, 4, 21, model.project.out_features
    source_BS = torch.randint(4, V, (B, 9), device=device)
    real_BS = torch.arange(9, device=device) < torch.tensor([[9], [4], [1]], device=device)
    rows_N = torch.arange(B, device=device).repeat_interleave(W)
    moved = model.start(source_BS, real_BS).select(rows_N)
    stays = moved.make_indirect(T)
    token_N = torch.full((B * W,), BOS, device=device)
    for step in range(T):
        expected, moved = model.step(token_N, moved)
        logp_NV, stays = model.step(token_N, stays)
        same(logp_NV, expected, torch.float32)
        parent_BW = torch.randint(W, (B, W), generator=torch.Generator().manual_seed(step)).to(device)
        rows_N = (parent_BW + W * torch.arange(B, device=device)[:, None]).flatten()
        moved, stays = moved.select(rows_N), stays.select(rows_N)
        token_N = torch.randint(4, V, (B * W,), device=device)
    assert stays.caches[0][0].size(2) == T  # it has not grown


def test_a_sentence_that_comes_later_is_not_the_wiser_for_it() -> None:
    """Slots that held other sentences before, in caches of either kind."""
    model: Any = model_of()
    jobs = random_jobs(6, model.project.out_features)
    for indexed in (False, True):
        with torch.inference_mode():
            sources = [torch.tensor([[*job.ids, 3]]) for job in jobs[:2]]
            width = max(source.size(1) for source in sources)
            grid_BS = torch.cat([torch.nn.functional.pad(each, (0, width - each.size(1))) for each in sources])
            state = model.start(grid_BS, grid_BS > 0)
            state = state.make_indirect(9) if indexed else state
            for token in (BOS, 5, 6):
                expected, state = model.step(torch.full((2,), token), state)
            fresh = model.start(grid_BS, grid_BS > 0).keep(torch.tensor([1]))
            state = state.put(torch.tensor([0]), fresh.make_indirect(0) if indexed else fresh)
            for token in (BOS, 5, 6):
                logp_NV, state = model.step(torch.full((2,), token), state)
            same(logp_NV[:1], expected[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("widths", [(16, 16), (64, 32), (32, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_is_its_readable_twin(
    widths: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    N, H, K, W = 12, 3, 40, 3
    place_N = torch.tensor([0, 7, 16, 39], device="cuda").repeat_interleave(W)
    beam_indices_NK = torch.arange(N)[:, None] // W * W + torch.randint(W, (N, K))
    beam_indices_NK = beam_indices_NK.scatter(1, place_N.cpu()[:, None], torch.arange(N)[:, None]).int().cuda()
    query, key, value = (torch.randn(N, H, width, device="cuda", dtype=dtype) for width in (widths[0], *widths))
    cache = tuple(torch.randn(N, H, K, width, device="cuda", dtype=dtype) for width in widths)
    memory = tuple(torch.randn(4, H, 9, width, device="cuda", dtype=dtype) for width in widths)
    stop_B = torch.tensor([9, 1, 4, 8], device="cuda")
    found = []
    for fast in (True, False):
        monkeypatch.setattr(lookup, "supports_cached_kernel", lambda *_, fast=fast: fast)
        held = (cache[0].clone(), cache[1].clone())
        attended = lookup.attend_to_cache(query, (key, value), held, place_N, beam_indices_NK)
        found.append((attended, *held, lookup.attend_to_source(query, memory, stop_B)))  # type: ignore[arg-type]
    for ours, theirs in zip(*found, strict=True):
        same(ours, theirs, dtype)

"""Attention straight from the products gives the numbers of the readable kernel. It needs a GPU."""

from __future__ import annotations

import pytest
import torch

from dragoman.kernels import attention as rows
from dragoman.kernels.attention import RowLayout, attend_reference, make_cross_attention_mask, make_self_attention_mask
from tolerance import same

pytestmark = pytest.mark.gpu
H = 2


def segments(B: int, T: int, length: int, padding: int) -> RowLayout:
    segment_BT = (torch.arange(T, device="cuda") // length + 1).expand(B, -1).clone()
    segment_BT[:, T - padding :] = 0
    return RowLayout(segment_BT, torch.arange(T, device="cuda").expand(B, -1) % length)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("T", "D"), [(5, 16), (20, 16), (64, 32), (100, 64), (128, 64), (128, 128), (130, 64), (300, 32)]
)
def test_within_rows(T: int, D: int, causal: bool) -> None:
    torch.manual_seed(T)
    where = segments(3, T, 9, min(3, T // 2))
    mask = make_self_attention_mask(where, bidirectional=not causal)
    made = torch.randn(3, T, 3 * H * D, device="cuda").bfloat16().requires_grad_()
    assert rows.supports_packed_kernel(made, mask, D)
    compare(rows.attend_packed(made, None, mask, H), made.double(), None, mask, [made], where.real_BT)


@pytest.mark.parametrize(
    ("Q", "K", "D"), [(20, 20, 16), (33, 17, 32), (128, 120, 64), (7, 128, 64), (7, 200, 64), (260, 129, 64)]
)
def test_across_rows(Q: int, K: int, D: int) -> None:
    torch.manual_seed(Q)
    target, source = segments(3, Q, 9, 2), segments(3, K, max(9 * K // Q, 1), 1)
    mask = make_cross_attention_mask(target, source)
    query = torch.randn(3, Q, H * D, device="cuda").bfloat16().requires_grad_()
    both = torch.randn(3, K, 2 * H * D, device="cuda").bfloat16().requires_grad_()
    met_BQ = (target.segment_BT[:, :, None] == source.segment_BT[:, None]).any(-1)
    compare(rows.attend_packed(query, both, mask, H), query.double(), both.double(), mask, [query, both], met_BQ)


def compare(found, query, both, mask, leaves, met_BQ) -> None:  # type: ignore[no-untyped-def]
    """Outputs and slopes, but for queries with nobody to mask at: they read nothing here, and anything there."""
    width = found.size(-1)
    parts = query.split(width, -1) if both is None else (query, *both.split(width, -1))
    q, k, v = (part.unflatten(2, (H, -1)).transpose(1, 2) for part in parts)
    expected = attend_reference(q, k, v, mask).transpose(1, 2).flatten(2) * met_BQ[..., None]
    slope = torch.linspace(-1, 1, found.numel(), device="cuda").view_as(found) * met_BQ[..., None]
    same(found * met_BQ[..., None], expected)
    ours, theirs = (torch.autograd.grad((out * slope).sum(), leaves) for out in (found.float(), expected))
    for one, other in zip(ours, theirs, strict=True):
        same(one, other)

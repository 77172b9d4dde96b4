"""The Triton kernel for packed rows agrees with the reference implementation (on a GPU)."""

from __future__ import annotations

import pytest
import torch

from dragoman.kernels import attention as attention_module
from dragoman.kernels.attention import RowLayout, attend_reference, make_cross_attention_mask, make_self_attention_mask
from tolerance import assert_same

pytestmark = pytest.mark.gpu
H = 2


def make_packed_rows(B: int, T: int, length: int, padding: int) -> RowLayout:
    """Return B rows of T tokens, with sentences of this length and padding at the end."""
    segment_BT = (torch.arange(T, device="cuda") // length + 1).expand(B, -1).clone()
    segment_BT[:, T - padding :] = 0
    return RowLayout(segment_BT, torch.arange(T, device="cuda").expand(B, -1) % length)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("T", "D"), [(5, 16), (20, 16), (64, 32), (100, 64), (128, 64), (128, 128), (130, 64), (300, 32)]
)
def test_self_attention_in_packed_rows(T: int, D: int, causal: bool) -> None:
    torch.manual_seed(T)
    rows = make_packed_rows(3, T, 9, min(3, T // 2))
    mask = make_self_attention_mask(rows, bidirectional=not causal)
    projection = torch.randn(3, T, 3 * H * D, device="cuda").bfloat16().requires_grad_()
    assert attention_module.supports_packed_kernel(projection, mask, D)
    compare_with_reference(
        attention_module.attend_packed(projection, mask, H),
        projection.double(),
        None,
        mask,
        [projection],
        rows.real_BT,
    )


@pytest.mark.parametrize(
    ("Q", "K", "D"), [(20, 20, 16), (33, 17, 32), (128, 120, 64), (7, 128, 64), (7, 200, 64), (260, 129, 64)]
)
def test_cross_attention_in_packed_rows(Q: int, K: int, D: int) -> None:
    torch.manual_seed(Q)
    target, source = make_packed_rows(3, Q, 9, 2), make_packed_rows(3, K, max(9 * K // Q, 1), 1)
    mask = make_cross_attention_mask(target, source)
    query = torch.randn(3, Q, H * D, device="cuda").bfloat16().requires_grad_()
    key_value = torch.randn(3, K, 2 * H * D, device="cuda").bfloat16().requires_grad_()
    has_key_BQ = (target.segment_BT[:, :, None] == source.segment_BT[:, None]).any(-1)
    compare_with_reference(
        attention_module.attend_packed(query, mask, H, key_value_BKF=key_value),
        query.double(),
        key_value.double(),
        mask,
        [query, key_value],
        has_key_BQ,
    )


def compare_with_reference(found, query, key_value, mask, leaves, has_key_BQ) -> None:  # type: ignore[no-untyped-def]
    """Compare outputs and gradients, except for queries without any allowed key, where the implementations differ."""
    width = found.size(-1)
    parts = query.split(width, -1) if key_value is None else (query, *key_value.split(width, -1))
    q, k, v = (part.unflatten(2, (H, -1)).transpose(1, 2) for part in parts)
    expected = attend_reference(q, k, v, mask).transpose(1, 2).flatten(2) * has_key_BQ[..., None]
    output_grad = torch.linspace(-1, 1, found.numel(), device="cuda").view_as(found) * has_key_BQ[..., None]
    assert_same(found * has_key_BQ[..., None], expected)
    actual_grads, expected_grads = (
        torch.autograd.grad((out * output_grad).sum(), leaves) for out in (found.float(), expected)
    )
    for actual, wanted in zip(actual_grads, expected_grads, strict=True):
        assert_same(actual, wanted)

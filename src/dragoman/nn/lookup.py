"""Attention of one new token to a cache that never moves: a table says which row holds each earlier token.

When beams change places, only the table does. `remember` is what a step does: the new key and value are written, then
every row looks at its own past. On a GPU both are one kernel (lookup_triton.py); the twin below is written to be read.

Shapes   N rows   H heads   D head width   K places of the cache   B sentences   S source width
"""

from __future__ import annotations

import torch
from torch import Tensor

from dragoman.nn.kernel import weights
from dragoman.nn.mask import Look

Cache = tuple[Tensor, Tensor]  # keys_NHKD and values_NHKD


def remember(q_NHD: Tensor, new: Cache, cache: Cache, place_N: Tensor, who_NK: Tensor) -> Tensor:
    """What each row reads of its past, out_NHD. `who_NK` is the row that holds what was said at each place; at the
    place of the new token, `place_N`, that is the row itself."""
    if fast(q_NHD, new[1]):
        from dragoman.nn.lookup_triton import attend

        return attend(q_NHD, cache, place_N, who_NK=who_NK, new=new)
    row_N, place_K = torch.arange(len(q_NHD), device=q_NHD.device), torch.arange(who_NK.size(1), device=q_NHD.device)
    for held_NHKD, new_NHD in zip(cache, new, strict=True):
        held_NHKD[row_N, :, place_N] = new_NHD
    k_NHKD, v_NHKD = (held_NHKD[who_NK.long(), :, place_K].transpose(1, 2) for held_NHKD in cache)
    keep_N11K = (place_K <= place_N[:, None])[:, None, None]
    out_NH1D: Tensor = weights(q_NHD[:, :, None], k_NHKD, Look(keep_N11K)) @ v_NHKD
    return out_NH1D[:, :, 0]


def consult(q_NHD: Tensor, memory: Cache, stop_B: Tensor) -> Tensor:
    """What each row reads of its sentence's source, whose first `stop_B` places count; N / B rows to a sentence."""
    if fast(q_NHD, memory[1]):
        from dragoman.nn.lookup_triton import attend

        return attend(q_NHD, memory, stop_B)
    k_BHSD, v_BHSD = memory
    q_BHWD = q_NHD.view(len(stop_B), -1, *q_NHD.shape[1:]).transpose(1, 2)
    keep_B11S = (torch.arange(k_BHSD.size(2), device=stop_B.device) < stop_B[:, None])[:, None, None]
    out_BHWD = weights(q_BHWD, k_BHSD, Look(keep_B11S)) @ v_BHSD
    return out_BHWD.transpose(1, 2).flatten(0, 1)


def fast(q_NHD: Tensor, v_NHD: Tensor) -> bool:
    """The kernel wants widths that are powers of two."""
    widths = (q_NHD.size(-1), v_NHD.size(-1))
    return q_NHD.is_cuda and all(width >= 16 and width & (width - 1) == 0 for width in widths)

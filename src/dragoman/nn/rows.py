"""Attention of packed rows, straight from the products that hold queries, keys and values: when it can be had.

The kernel (rows_triton.py) reads them where they lie and leaves their slopes there, so that nothing is split, put
together or masked. Everywhere else nn/kernel.py is asked, whose `reference` is the readable twin.

Shapes   B rows   Q queries   K keys   C all heads   E, F products of which these are parts
"""

from __future__ import annotations

import torch
from torch import Tensor

from dragoman.nn.mask import Look

HEADS = (16, 32, 64, 128)  # widths that it can multiply


def holds(query_BQE: Tensor, look: Look, head_width: int) -> bool:
    """Half precision, and nothing to be known of two tokens but whether they are of one sentence."""
    half = query_BQE.is_cuda and query_BQE.dtype in (torch.bfloat16, torch.float16)
    plain = look.segments is not None and look.bias is None
    return half and plain and head_width in HEADS


def read(query_BQE: Tensor, key_value_BKF: Tensor | None, look: Look, heads: int) -> Tensor:
    """What each query reads: out_BQC. Without `key_value_BKF` keys and values lie behind the queries in one product."""
    from dragoman.nn.rows_triton import attend_rows

    assert look.segments is not None
    query_BQ, key_BK, causal = look.segments
    out_BQC: Tensor = attend_rows(query_BQE, key_value_BKF, query_BQ, key_BK, heads, causal)[0]
    return out_BQC

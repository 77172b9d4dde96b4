"""Pools: from the states of a text's tokens to one state for the text. To add one: a function and a line in POOLS.

Shapes   B rows   S source width   T texts of a row   C model width
A pool takes states_BSC, where the tokens stand, and T; a row with fewer than T texts has zeros in the places left over.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dragoman.nn.mask import Rows


def members(rows: Rows, texts: int) -> Tensor:
    """Which token belongs to which text of its row: member_BTS."""
    number_T = torch.arange(1, texts + 1, device=rows.segment_BT.device)
    return rows.segment_BT[:, None] == number_T[:, None]


def mean(states_BSC: Tensor, rows: Rows, texts: int) -> Tensor:
    member_BTS = members(rows, texts).to(states_BSC.dtype)
    return member_BTS / member_BTS.sum(-1, keepdim=True).clamp(min=1) @ states_BSC


def largest(states_BSC: Tensor, rows: Rows, texts: int) -> Tensor:
    """The largest value of each feature. Padding is gathered in a place 0 of its own, which is then left out."""
    B, S, C = states_BSC.shape
    segment_BSC = rows.segment_BT[..., None].expand(B, S, C)
    lowest = states_BSC.new_full((B, texts + 1, C), float("-inf"))
    pooled_BTC = lowest.scatter_reduce(1, segment_BSC, states_BSC, "amax")[:, 1:]
    return torch.where(members(rows, texts).any(-1, keepdim=True), pooled_BTC, 0.0)


def first(states_BSC: Tensor, rows: Rows, texts: int) -> Tensor:
    chosen_BTS = members(rows, texts) & (rows.position_BT == 0)[:, None]
    return chosen_BTS.to(states_BSC.dtype) @ states_BSC


def final(states_BSC: Tensor, rows: Rows, texts: int) -> Tensor:
    """Return each direction's final state: the forward half at the last token, the backward half at the first."""
    forward_BSC, backward_BSC = states_BSC.chunk(2, -1)
    return torch.cat([last(forward_BSC, rows, texts), first(backward_BSC, rows, texts)], -1)


def last(states_BSC: Tensor, rows: Rows, texts: int) -> Tensor:
    """The state of the </s>, which stands at the end of every text."""
    member_BTS = members(rows, texts)
    chosen_BTS = member_BTS & (rows.position_BT[:, None] == member_BTS.sum(-1, keepdim=True) - 1)
    return chosen_BTS.to(states_BSC.dtype) @ states_BSC


Pool = Callable[[Tensor, Rows, int], Tensor]
POOLS: dict[str, Pool] = {"mean": mean, "max": largest, "first": first, "last": last, "last_token": last}

"""Masks: boolean, True = may look, built from segments and positions and joined with `&`.

Shapes   B batch   Q queries   K keys   (broadcast over heads by the kernel)
"""

from torch import Tensor


def same_segment(segment_BQ: Tensor, segment_BK: Tensor) -> Tensor:
    """Look only inside one's own sentence. Padding is segment 0, which no sentence is in.

    This one rule covers padding and packing: a padded batch is a packed batch with one sentence per row.
    """
    return segment_BQ[:, :, None] == segment_BK[:, None, :]


def causal(position_BQ: Tensor, position_BK: Tensor) -> Tensor:
    """Look at one's own position and before it. Positions restart in every packed sentence."""
    return position_BQ[:, :, None] >= position_BK[:, None, :]


def never_empty(keep_BQK: Tensor) -> Tensor:
    """Padding that would have no key at all may look everywhere: softmax over nothing is NaN.

    What such a query sees does not matter, since no loss and no sentence ever looks at it.
    """
    return keep_BQK | ~keep_BQK.any(-1, keepdim=True)

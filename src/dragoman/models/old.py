"""How earlier formats of a run folder called the tensors of a model."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

FIRST = (  # format 1: a Transformer's layers stood in the model itself
    (r"(encoder|decoder)\.(\d+)\.", r"\1.layers.\2."),
    (r"(encoder|decoder)_norm\.", r"\1.norm."),
    (r"source_embedding\.", r"encoder.embedding."),
    (r"target_embedding\.", r"decoder.embedding."),
)


def renamed(tensors: Mapping[str, Tensor], version: int) -> dict[str, Tensor]:
    """The same tensors under today's names."""
    found = dict(tensors)
    if version == 1:
        for old, new in FIRST:
            found = {re.sub(f"^{old}", new, name): tensor for name, tensor in found.items()}
    return found

"""Muon (Jordan 2024): matrices move by their momentum made orthogonal, everything else as AdamW moves it.

A step turns and stretches all directions of a matrix alike, so that rare ones are learned as fast as frequent ones.
Its size is brought to what AdamW's would be (Liu 2025), so that one rate and one decay serve both kinds. Where matrices
are shared out among processes, everyone fetches the momentum of all of them to turn it, and moves its own rows.

Shapes   K matrices of one size   R rows that lie here   C columns   A rows in all, split into blocks
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from dragoman.train.parallel import gathered, here, is_shared, own

MOMENTUM = 0.95
ROUNDS = 5  # of Newton and Schulz' iteration
FACTORS = (3.4445, -4.7750, 2.0315)  # of its quintic: all singular values come near 1, quickly rather than exactly
LIKE_ADAM = 0.2  # root mean square of AdamW's own steps
BLOCKS = {"query_key_value": 3, "key_value": 2}  # modules whose weights are several matrices in one
TABLES = ("embedding.weight", "table.weight", "project.weight", "_RD", "start")  # asked for by rows: those are AdamW's


class Muon(AdamW):
    def __init__(
        self, named: Mapping[str, Tensor], *, lr: float | Tensor, beta2: float, weight_decay: float, capturable: bool
    ) -> None:
        self.blocks = {id(one): blocks_of(name) for name, one in named.items() if is_matrix(name, one)}
        matrices = [one for one in named.values() if id(one) in self.blocks]
        rest = [one for one in named.values() if id(one) not in self.blocks]
        groups: list[dict[str, Any]] = [{"params": some} for some in (rest, matrices)]
        super().__init__(
            groups, lr=lr, betas=(0.9, beta2), eps=1e-9, weight_decay=weight_decay, fused=True, capturable=capturable
        )

    __setstate__ = Optimizer.__setstate__  # AdamW's own looks for counts of steps, which matrices do not have

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        rest, matrices = self.param_groups
        self.param_groups = [rest]
        try:
            super().step(closure)
        finally:
            self.param_groups = [rest, matrices]
        for some in self.alike([one for one in matrices["params"] if one.grad is not None]):
            self.move(some, matrices["lr"], matrices["weight_decay"])

    def move(self, some: list[Tensor], lr: float | Tensor, decay: float) -> None:
        """All matrices of one size at once."""
        for one in some:
            if "momentum_buffer" not in self.state[one]:
                self.state[one]["momentum_buffer"] = torch.zeros_like(one)
        bad, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        good = 1.0 if bad is None else 1 - bad
        parts, held = [here(one) for one in some], [here(self.state[one]["momentum_buffer"]) for one in some]
        grad_KRC = torch.stack([here(one.grad) for one in some])  # type: ignore[arg-type]
        if scale is not None:
            grad_KRC = grad_KRC / scale
        if bad is not None:
            grad_KRC = torch.where(bad > 0, 0.0, grad_KRC)
        momentum_KRC = torch.stack(held)
        momentum_KRC = momentum_KRC + (grad_KRC - momentum_KRC) * ((1 - MOMENTUM) * good)
        ahead_KRC = grad_KRC.lerp(momentum_KRC, MOMENTUM)
        turned_KRC = self.turned(ahead_KRC, some)
        torch._foreach_copy_(held, list(momentum_KRC))
        torch._foreach_mul_(parts, 1 - lr * decay * good)
        torch._foreach_sub_(parts, list(turned_KRC * (lr * good)))

    def turned(self, x_KRC: Tensor, some: list[Tensor]) -> Tensor:
        """What lies here of the orthogonal of all of them, in the size of AdamW's steps."""
        blocks, shared = self.blocks[id(some[0])], is_shared(some[0])
        x_KAC = torch.stack([gathered(part, like) for part, like in zip(x_KRC, some, strict=True)]) if shared else x_KRC
        K, A, C = x_KAC.shape
        out_KAC: Tensor = orthogonal(x_KAC.view(K * blocks, A // blocks, C)).view(K, A, C)
        out_KAC = out_KAC * (LIKE_ADAM * max(A // blocks, C) ** 0.5)
        if not shared:
            return out_KAC
        return torch.stack([here(own(one, like)) for one, like in zip(out_KAC, some, strict=True)])

    def alike(self, matrices: list[Tensor]) -> Iterator[list[Tensor]]:
        """Those of one size, cut into as many blocks, together."""
        kinds: dict[tuple[torch.Size, int], list[Tensor]] = {}
        for one in matrices:
            kinds.setdefault((one.shape, self.blocks[id(one)]), []).append(one)
        yield from kinds.values()


def is_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.dim() == 2 and not name.endswith(TABLES)


def blocks_of(name: str) -> int:
    module, _, parameter = name.rpartition(".")
    return BLOCKS.get(module.rpartition(".")[2], 1) if parameter == "weight" else 1


def orthogonal(x_KRC: Tensor) -> Tensor:
    """The nearest matrices whose singular values are all about 1, whatever those of x are."""
    a, b, c = FACTORS
    tall = x_KRC.size(1) > x_KRC.size(2)
    x = (x_KRC.mT if tall else x_KRC).to(torch.bfloat16 if x_KRC.is_cuda else x_KRC.dtype)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(ROUNDS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    out: Tensor = (x.mT if tall else x).to(x_KRC.dtype)
    return out

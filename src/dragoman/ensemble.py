"""Several runs that answer as one: their probabilities are averaged at every token.

Shapes   B rows   S source width   T target width   V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dragoman.door import Door
from dragoman.models.base import Model, Seq2Seq
from dragoman.models.build import asks_for_trees
from dragoman.search.ensemble import Ensemble, States, mean
from dragoman.types import Batch, UserError


class Together(Seq2Seq):
    """Models with one vocabulary, as one model. What it gives before the projection are log-probabilities already."""

    def __init__(self, models: Sequence[Seq2Seq]) -> None:
        super().__init__()
        self.members = list(models)
        self.held = nn.ModuleList(models)  # so that all of them move, train and evaluate with it
        self.search = Ensemble(models)
        self.project = nn.Identity()  # type: ignore[assignment]

    def forward(self, batch: Batch) -> Tensor:
        return mean([one.project(one(batch)).float().log_softmax(-1) for one in self.members])

    @property
    def aligns(self) -> bool:
        return any(one.aligns for one in self.members)

    def alignment(self, batch: Batch) -> Tensor:
        """Return the mean of the alignments of those members that have one: weight_BTS."""
        return torch.stack([one.alignment(batch) for one in self.members if one.aligns]).mean(0)

    def start(self, source_BS: Tensor, keep_BS: Tensor, *trees: Tensor) -> States:
        return self.search.start(source_BS, keep_BS, *trees)

    def step(self, token_N: Tensor, state: States) -> tuple[Tensor, States]:
        return self.search.step(token_N, state)


def together(doors: Sequence[Door[Model]], names: Sequence[str]) -> Door[Model]:
    """Opened runs as one, which searches as the first is set to. Refused where they do not speak the same tokens."""
    first, *others = doors
    for door, name in zip(others, names[1:], strict=True):
        if door.tokenizers.fingerprint() != first.tokenizers.fingerprint():
            raise UserError(
                f"{names[0]!r} and {name!r} have different vocabularies, so they cannot answer as one; train one of "
                f"them with the other's: dragoman train --init-from, or the same data, tokenizer settings and seed"
            )
        if asks_for_trees(door.recipe.model) != asks_for_trees(first.recipe.model):
            raise UserError(f"of {names[0]!r} and {name!r} only one reads trees, so they cannot answer as one")
    for door, name in zip(doors, names, strict=True):
        if not isinstance(door.model, Seq2Seq):
            raise UserError(f"{name!r} does not translate, so it cannot be one of several that do")
    tightest = min(doors, key=lambda door: door.places)  # an answer must have a place in every model
    recipe = tightest.recipe.model_copy(update={"search": first.recipe.search})
    model = Together([door.model for door in doors if isinstance(door.model, Seq2Seq)])
    longest = min(door.longest for door in doors)
    return Door(model.eval(), first.tokenizers, recipe, longest, first.device, usual=first.usual)

"""How likely a model holds given answers to be: every target is read in one pass, in grids as door.py has them.

Shapes   B rows of a grid   T target width   L tokens of one target, its end mark counted   C model width   V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dragoman.data.batch import Grid, Widths, lay
from dragoman.door import Door, evaluating, grouped, rung
from dragoman.models.base import Seq2Seq
from dragoman.types import EOS, UNK, Example, PairScore

MOST = 4096  # tokens of a side, its mark counted: beyond, one attention would fill the memory
CELLS = 4_000_000  # of an attention: wide grids have fewer rows
CHUNK = 512  # tokens whose logits are held at a time


def scored(door: Door[Seq2Seq], examples: Sequence[Example]) -> list[PairScore]:
    """The score of every pair. One that the model has no places for has none, and says so."""
    most = min(MOST - 1, door.places)
    fits = [i for i, one in enumerate(examples) if max(len(one.source), len(one.target)) <= most]
    with evaluating(door.model):
        found = dict(zip(fits, logps(door, [examples[i] for i in fits]), strict=True))
    return [pair_score(door, one, found.get(i), most) for i, one in enumerate(examples)]


@torch.inference_mode()
def logps(door: Door[Seq2Seq], examples: Sequence[Example]) -> list[list[float]]:
    """The log-probability of each target token, the end mark last, given the source and all that stands before it."""
    found: list[list[float]] = [[] for _ in examples]
    for wide, group in grouped(range(len(examples)), lambda i: widths(examples[i]), len(examples)):
        height = max(1, min(door.rows, CELLS // max(wide) ** 2))
        for _, some in grouped(group, lambda _: 0, height):
            rows = [[i] for i in some] + [[]] * (height - len(some))
            batch = lay(Grid(rows, wide), examples).to(door.device)
            states_BTC = door.model(batch)
            for row, i in enumerate(some):
                length = len(examples[i].target) + 1
                target_L = batch.target_out_BT[row, :length]
                found[i] = picked(door.model, states_BTC[row, :length], target_L).tolist()
    return found


def widths(example: Example) -> Widths:
    """Of the grid in which a pair is read."""
    return Widths(rung(len(example.source) + 1), rung(len(example.target) + 1))


def picked(model: Seq2Seq, states_LC: Tensor, target_L: Tensor) -> Tensor:
    """Of all log-probabilities, those of the targets. Shapes are those of one target, whoever its neighbours are."""
    parts = zip(torch.split(states_LC, CHUNK), torch.split(target_L, CHUNK), strict=True)
    return torch.cat(
        [model.project(states).float().log_softmax(-1).gather(1, target[:, None])[:, 0] for states, target in parts]
    )


def pair_score(door: Door[Seq2Seq], example: Example, found: list[float] | None, most: int) -> PairScore:
    longest, target = max(len(example.source), len(example.target)), example.target.tolist()
    warnings = []
    if found is None:
        warnings.append(f"without a score: {longest} tokens, and the most that can be scored are {most}")
    elif not len(example.source) and target:
        warnings.append("with an empty source")
    elif len(example.source) > door.longest:
        warnings.append(f"longer than any sentence of training ({len(example.source)} tokens against {door.longest})")
    if UNK in target:
        warnings.append(f"with what the tokenizer does not know: {target.count(UNK)} tokens of the target")
    blank = not len(example.source) and not target
    token_logps = [0.0] if blank else found or []
    logp = sum(token_logps) if token_logps else float("nan")
    tokens = [*door.tokenizers.target.pieces(target), *door.tokenizers.target.pieces([EOS])]
    return PairScore(logp, logp / len(tokens), tokens, token_logps, tuple(warnings))

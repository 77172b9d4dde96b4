"""Attribution: how much each predicted token depends on each token of the source and of the target prefix.

    attributions, notes = compute_attributions(sentence)
    attributions[0].value_TS[t, s]     # contribution of source token s to the prediction of target token t

Every method explains the log-probability of the predicted token, in nats; a logit would only be defined up to a
constant. Positive contributions make the token more probable. BOS and EOS are treated like all other tokens. To add a
method, write a function and a line in ATTRIBUTIONS.

Shapes   R rows of a batch   K points of a path   G copies of these points   N tokens of one side   S source tokens
         T target tokens   P predicted tokens that are explained together   C width   V vocabulary or labels
         F frequencies
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from dragoman.inspection.gradient_flow import capture_embeddings, find_embedders
from dragoman.inspection.records import Attribution
from dragoman.models.registry import Cost
from dragoman.types import Batch

if TYPE_CHECKING:
    from dragoman.inspection.sentence import SentenceBatch

BATCH_TOKENS = 2048  # tokens of both sides that are computed at once, a bound on memory
MAX_OPERATIONS = {"cpu": 6e11, "cuda": 6e13}  # floating-point operations of one method: a few seconds
POSITION_BLOCK = 8  # backward passes that share a forward pass, which leaves out the tokens after their positions
FIRST_INTERVALS, MAX_INTERVALS = 16, 2048  # of the path of integrated gradients
COMPLETENESS_TOLERANCE = 0.02  # relative error of the sum of a predicted token's integrated gradients
SMALL_CHANGE = 0.5  # the error is relative to the change of the log-probability, but at least to this many nats

Contributions = dict[str, Tensor]  # by side, "source" and "target": the contribution of each token


@dataclass(frozen=True, slots=True)
class AttributionMethod:
    """A method of attribution."""

    title: str
    count_passes: Callable[[int, int], int]  # of the sentence, forward or backward, at least; arguments: S and T
    compute: Callable[[SentenceBatch], tuple[Contributions, list[str]]]  # returns contribution_TN by side, and notes


def compute_attributions(sentence: SentenceBatch) -> tuple[list[Attribution], list[str]]:
    """Return the attributions by every method, and notes on what was left out or is not exact."""
    attributions, notes = [], []
    lengths, limit = count_tokens(sentence), find_limit(sentence)
    for name, method in ATTRIBUTIONS.items():
        passes = method.count_passes(lengths.get("source", 0), sentence.batch.target_out_BT.size(1))
        operations = passes * count_operations(sentence)
        if operations > limit:
            notes.append(
                f"the attribution {method.title!r} was left out: this model and a sentence of this length need "
                f"{operations:.1g} operations, more than the limit of {limit:.1g}; inspect a shorter sentence"
            )
            continue
        contributions, method_notes = method.compute(sentence)
        notes += method_notes
        value_TS, prefix_TT = (
            contributions[side].float().cpu().numpy() if side in contributions else None
            for side in ("source", "target")
        )
        attributions.append(Attribution(name, method.title, value_TS, prefix_TT))
    return attributions, notes


def multiply_gradients_by_inputs(sentence: SentenceBatch) -> tuple[Contributions, list[str]]:
    """Return the gradient with respect to each embedding times the embedding, summed over the width.

    It is the derivative of the log-probability when the embedding is multiplied by a factor near 1.
    """
    zero = {side: torch.zeros_like(mean_C) for side, mean_C in compute_average_embeddings(sentence).items()}
    products = compute_gradient_products(sentence, zero, [1.0], range(sentence.batch.target_out_BT.size(1)))
    return {side: product_1TN[0] for side, product_1TN in products.items()}, []


def integrate_gradients(sentence: SentenceBatch) -> tuple[Contributions, list[str]]:
    """Return integrated gradients (Sundararajan 2017) from a sentence of average tokens to the real one.

    In the baseline, the embedding of every token is the mean of the embedding table of its side. Source and target
    prefix change together, so the contributions to a predicted token sum to the difference of its log-probabilities
    with the input and with the baseline. The number of intervals on the path is doubled for those tokens whose sum is
    off by more than COMPLETENESS_TOLERANCE.

    A baseline of zeros would need several times as many points: where a norm follows the embeddings, the output of
    the model jumps near zero.
    """
    baseline = compute_average_embeddings(sentence)
    change_T = compute_change(sentence, baseline)
    T, operations, limit = len(change_T), count_operations(sentence), find_limit(sentence)
    totals = {side: change_T.new_zeros(T, length) for side, length in count_tokens(sentence).items()}
    intervals, pending = FIRST_INTERVALS, list(range(T))
    point_K, weight_K = make_quadrature(intervals)
    products = compute_gradient_products(sentence, baseline, point_K, pending)
    passes = len(point_K) * T
    while True:
        for side, product_KPN in products.items():
            totals[side][pending] = torch.einsum("k,kpn->pn", product_KPN.new_tensor(weight_K), product_KPN)
        sum_T = torch.stack([total_TN.sum(1) for total_TN in totals.values()]).sum(0)
        error_T = (sum_T - change_T).abs() / change_T.abs().clamp(min=SMALL_CHANGE)
        inexact = [index for index, position in enumerate(pending) if error_T[position] > COMPLETENESS_TOLERANCE]
        if not inexact:
            return totals, []
        pending = [pending[index] for index in inexact]
        passes += intervals * len(pending)
        if intervals == MAX_INTERVALS or passes * operations > limit:
            break
        intervals *= 2
        point_K, weight_K = make_quadrature(intervals)
        new = compute_gradient_products(sentence, baseline, point_K[1::2], pending)  # the others are known
        for side, old_KPN in products.items():
            products[side] = torch.cat([old_KPN[:, inexact], new[side]])[interleave(len(old_KPN))]
    note = (
        f"integrated gradients are not exact: for {len(pending)} of {T} predicted tokens, their sum differs from the "
        f"change of the log-probability by up to {float(error_T.max()):.0%} with {len(point_K)} points"
    )
    return totals, [note]


def make_quadrature(intervals: int) -> tuple[list[float], list[float]]:
    """Return points and weights of Clenshaw-Curtis quadrature on the interval from 0 to 1, for an even number.

    Every second point is one of the rule with half as many intervals, so nothing is computed twice.
    """
    angle_K = np.pi * np.arange(intervals + 1) / intervals
    frequency_F = np.arange(1, intervals // 2 + 1)
    factor_F = np.where(frequency_F < intervals // 2, 2, 1) / (4 * frequency_F**2 - 1)
    weight_K = (1 - np.cos(2 * angle_K[:, None] * frequency_F) @ factor_F) / intervals
    weight_K[[0, -1]] /= 2
    return ((1 - np.cos(angle_K)) / 2).tolist(), weight_K.tolist()


def interleave(count: int) -> Tensor:
    """Return the indices that put `count` old points and the new points after them into the order of the path."""
    index_K = torch.arange(2 * count - 1)
    return torch.where(index_K % 2 == 0, index_K // 2, count + index_K // 2)


def leave_one_out(sentence: SentenceBatch) -> tuple[Contributions, list[str]]:
    """Return how much the log-probability of each predicted token drops when one input token is hidden.

    A hidden token keeps its position, but its embedding is zero.
    """
    contributions: Contributions = {}
    with torch.no_grad():
        logp_T = select_target_logp(sentence, sentence.model(sentence.batch))[0]
        for side, length in count_tokens(sentence).items():
            visible_NN = ~torch.eye(length, dtype=torch.bool, device=logp_T.device)
            logp_NT = [
                select_target_logp(sentence, sentence.model(hide_tokens(sentence.batch, side, visible_RN)))
                for visible_RN in torch.split(visible_NN, count_rows(sentence.batch))
            ]
            contributions[side] = (logp_T - torch.cat(logp_NT)).T
    if "target" in contributions:
        contributions["target"] = contributions["target"].tril()  # later tokens are not read; removes rounding errors
    return contributions, []


def hide_tokens(batch: Batch, side: str, visible_RN: Tensor) -> Batch:
    """Return a batch with one row for each row of `visible_RN`, which is False at hidden tokens."""
    rows = repeat_row(batch, len(visible_RN))
    if side == "source":
        return replace(rows, source_visible_BS=visible_RN)
    return replace(rows, target_visible_BT=visible_RN)


def compute_gradient_products(
    sentence: SentenceBatch, baseline: Mapping[str, Tensor], fractions: Sequence[float], positions: Sequence[int]
) -> dict[str, Tensor]:
    """Return, by side, gradients times the difference between embeddings and baseline, summed over the width.

    The gradients are taken at K points on the way from the baseline to the embeddings, and for the predicted tokens at
    P positions, in ascending order: product_KPN.
    """
    rows = count_rows(sentence.batch)
    block = POSITION_BLOCK * max(1, rows // len(fractions))
    point_parts: dict[str, list[Tensor]] = {side: [] for side in baseline}
    for first_point in range(0, len(fractions), rows):
        parts: dict[str, list[Tensor]] = {side: [] for side in baseline}
        for first in range(0, len(positions), block):
            products = explain_block(
                sentence, baseline, fractions[first_point : first_point + rows], positions[first : first + block]
            )
            for side, product_KPN in products.items():
                parts[side].append(product_KPN)
        for side, length in count_tokens(sentence).items():
            padded = [functional.pad(product_KPN, (0, length - product_KPN.size(2))) for product_KPN in parts[side]]
            point_parts[side].append(torch.cat(padded, 1))
    return {side: torch.cat(chunks) for side, chunks in point_parts.items()}


def explain_block(
    sentence: SentenceBatch, baseline: Mapping[str, Tensor], fractions: Sequence[float], positions: Sequence[int]
) -> dict[str, Tensor]:
    """Return the products of `compute_gradient_products` without the target after the last position.

    The forward pass has a row for each point, and G copies of these rows. A backward pass explains G predicted tokens,
    one in each copy.
    """
    model, K = sentence.model, len(fractions)
    batch = truncate_target(sentence.batch, positions[-1] + 1)
    G = max(1, min(count_rows(batch) // K, len(positions)))
    fraction_R11 = model.project.weight.new_tensor(fractions).repeat(G)[:, None, None]
    differences: dict[str, Tensor] = {}
    products: dict[str, list[Tensor]] = {side: [] for side in baseline}

    def move_to_points(side: str, x_RNC: Tensor) -> Tensor:
        differences[side] = x_RNC - baseline[side]
        return baseline[side] + fraction_R11 * differences[side]

    with (
        torch.enable_grad(),
        torch.backends.cudnn.flags(enabled=False),  # cuDNN has no backward pass for recurrent models in eval mode
        capture_embeddings(model, move_to_points) as embeddings,
    ):
        states_RTC = model(repeat_row(batch, G * K))
        # A log-probability depends on the state of its position only, so one backward pass through the projection
        # returns the gradients of all of them.
        states_KTC = states_RTC[:K].detach().requires_grad_()
        [grad_KTC] = torch.autograd.grad(select_target_logp(sentence, states_KTC).sum(), states_KTC)
        for first in range(0, len(positions), G):
            chunk = positions[first : first + G]
            grad_GKTC = torch.zeros_like(states_RTC).view(G, *grad_KTC.shape)
            for copy, position in enumerate(chunk):
                grad_GKTC[copy, :, position] = grad_KTC[:, position]
            inputs = [embeddings[side] for side in products]
            grads = torch.autograd.grad(states_RTC, inputs, grad_GKTC.view_as(states_RTC), retain_graph=True)
            for side, grad_RNC in zip(products, grads, strict=True):
                product_GKN = (differences[side] * grad_RNC).sum(-1).view(G, K, -1)
                products[side].append(product_GKN[: len(chunk)])
    return {side: torch.cat(parts).transpose(0, 1) for side, parts in products.items()}


def truncate_target(batch: Batch, length: int) -> Batch:
    """Return a batch with the first `length` target tokens, on which later ones have no influence."""
    names = ("target_in_BT", "target_out_BT", "target_segment_BT", "target_position_BT")
    return replace(batch, **{name: getattr(batch, name)[:, :length] for name in names})


def compute_change(sentence: SentenceBatch, baseline: Mapping[str, Tensor]) -> Tensor:
    """Return the log-probability of each target token minus that with the baseline as input: change_T."""
    with torch.no_grad():
        logp_T = select_target_logp(sentence, sentence.model(sentence.batch))[0]
        with capture_embeddings(sentence.model, lambda side, x_RNC: baseline[side].expand_as(x_RNC).clone()):
            return logp_T - select_target_logp(sentence, sentence.model(sentence.batch))[0]


def compute_average_embeddings(sentence: SentenceBatch) -> dict[str, Tensor]:
    """Return the mean of all embeddings of a side, scaled like the embeddings of tokens: mean_C."""
    tables = {side: part.embedding for side, part in find_embedders(sentence.model).items()}
    return {side: table.weight.detach().mean(0) * math.sqrt(table.embedding_dim) for side, table in tables.items()}


def select_target_logp(sentence: SentenceBatch, states_RTC: Tensor) -> Tensor:
    """Return the log-probabilities of the sentence's target tokens, given the states of any number of rows: logp_RT."""
    logits_RTV: Tensor = sentence.model.compute_logits(states_RTC)[..., : sentence.output_size]
    token_RT1 = sentence.batch.target_out_BT[:, : states_RTC.size(1), None].expand(len(states_RTC), -1, -1)
    return logits_RTV.log_softmax(-1).gather(-1, token_RT1)[..., 0]


def count_tokens(sentence: SentenceBatch) -> dict[str, int]:
    """Return the number of input tokens of each side that the model has."""
    ids = {"source": sentence.batch.source_BS, "target": sentence.batch.target_in_BT}
    return {side: ids[side].size(1) for side in find_embedders(sentence.model)}


def count_operations(sentence: SentenceBatch) -> float:
    """Return the floating-point operations of a forward pass of the sentence; a backward pass takes about as many.

    Backward passes compute gradients of activations only, not of weights.
    """
    source_1, target_1 = (
        np.array([ids_BN.size(1)]) for ids_BN in (sentence.batch.source_BS, sentence.batch.target_out_BT)
    )
    return Cost.from_model(sentence.model).count_forward(source_1, target_1)


def find_limit(sentence: SentenceBatch) -> float:
    """Return the maximum number of operations of one method on the device of the model."""
    return MAX_OPERATIONS[sentence.batch.target_out_BT.device.type]


def repeat_row(batch: Batch, count: int) -> Batch:
    """Return a batch with copies of the row of a batch."""
    return batch.map_tensors(lambda tensor: tensor.repeat(count, *(1,) * (tensor.dim() - 1)))


def count_rows(batch: Batch) -> int:
    """Return the number of copies of a batch's row that are computed at once."""
    return max(1, BATCH_TOKENS // (batch.source_BS.size(1) + batch.target_in_BT.size(1)))


ATTRIBUTIONS = {
    "gradient x input": AttributionMethod("Gradient × input", lambda _S, T: T, multiply_gradients_by_inputs),
    "integrated gradients": AttributionMethod(
        "Integrated gradients", lambda _S, T: (FIRST_INTERVALS + 1) * T, integrate_gradients
    ),
    "leave-one-out": AttributionMethod("Leave-one-out", lambda S, T: S + T, leave_one_out),
}

"""Probes: numbers that show how well a model can be trained, measured on one batch.

    probes = measure_probes(model, batch)
    probes.layers[0].variance          # of the embeddings of the encoder
    probes.parameter_gradients         # {"encoder layer 1": 0.13, ...}

Gradients that vanish or grow with depth or distance, activations whose variance explodes, attention that has collapsed
onto one token, and recurrent matrices far from orthogonal are the usual reasons why a model does not learn. Measuring
changes nothing in the model: neither weights nor gradients, hooks, training mode or random numbers.

Shapes   B rows of a batch   T tokens of a row   C width   N tokens except padding   H heads   Q queries   K keys
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from dragoman.data.batches import EXAMPLE_FORMATS, BatchPlan, Widths
from dragoman.inference.predictor import eval_mode
from dragoman.inspection.attention import RecordedAttention, record_attention
from dragoman.inspection.gradient_flow import measure_gradient_flow
from dragoman.models.base import Model
from dragoman.modules.recurrent import Cell, RecurrentLayer, SentenceEnds
from dragoman.types import Batch, Example

SIDES = ("encoder", "decoder")
PROBE_TOKENS = 512  # slots of a batch of probes on its longer side; there is a backward pass for each target position
JSON_DIGITS = 6  # significant digits of numbers in JSON
LAYER_NAME = re.compile(r"(encoder|decoder)\.(?:layers|stack\.cells)\.(\d+)\b\.?")
OTHER_NAMES = {  # parts of parameter names
    "encoder.embedding.weight": "source embedding",
    "decoder.embedding.weight": "target embedding",
    "project.weight": "output projection",
}

Depth = tuple[str, int]  # "encoder" or "decoder", and the number of a layer, counted from 1; 0: the embeddings


@dataclass(frozen=True, slots=True)
class LayerProbe:
    """The output of a layer, or the embeddings, which are layer 0."""

    side: str  # "encoder" or "decoder"
    layer: int
    variance: float  # over all components of all tokens
    gradient: float  # norm of the gradient of the loss with respect to this output


@dataclass(frozen=True, slots=True)
class AttentionProbe:
    """The entropy of the attention weights of one layer, in bits, averaged over all queries."""

    part: str  # "encoder", "decoder" (self-attention) or "cross" (attention to the source)
    layer: int  # counted from 1
    entropy: list[float]  # of each head
    maximum: float  # if each query attended equally to all of its keys


@dataclass(frozen=True, slots=True)
class RecurrentProbe:
    """The matrix by which a recurrent cell multiplies its state, for one gate."""

    cell: str  # such as "encoder layer 1 ahead"
    gate: str
    singular_values: list[float]  # largest first
    spectral_radius: float  # largest absolute value of an eigenvalue


@dataclass(frozen=True, slots=True)
class Probes:
    """All measurements on one batch. The loss is the mean over all target tokens, without label smoothing."""

    loss: float
    parameter_gradients: dict[str, float]  # gradient norm of each group of parameters, from input to output
    layers: list[LayerProbe]
    gradient_flow: dict[str, list[float]]  # side -> gradient norm by distance, relative to distance 0
    attention: list[AttentionProbe]
    recurrent: list[RecurrentProbe]

    def to_json(self) -> dict[str, Any]:
        """Return dictionaries, lists and rounded numbers. Numbers that are not finite become null."""
        data: dict[str, Any] = round_numbers(asdict(self))
        return data

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Probes:
        """Return the probes in a record that `to_json` has made; null becomes NaN."""
        return TypeAdapter(cls).validate_python(replace_null(record))


def round_numbers(value: Any) -> Any:
    """Return nested data with floats rounded to JSON_DIGITS significant digits, and None for infinite ones and NaN."""
    if isinstance(value, float):
        return float(f"{value:.{JSON_DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: round_numbers(item) for key, item in value.items()}
    return [round_numbers(item) for item in value] if isinstance(value, list) else value


def replace_null(value: Any) -> Any:
    """Return nested data with NaN in place of None."""
    if isinstance(value, Mapping):
        return {key: replace_null(item) for key, item in value.items()}
    if isinstance(value, list):
        return [replace_null(item) for item in value]
    return math.nan if value is None else value


def make_probe_batch(examples: Sequence[Example], example_format: str) -> Batch:
    """Return a batch of at most PROBE_TOKENS slots per side, one example per row: the first examples that fit.

    If none fits, the batch has only the shortest example.
    """
    form = EXAMPLE_FORMATS[example_format]
    source_N, target_N = form.count_example_slots(examples)
    lengths = [max(pair) for pair in zip(source_N.tolist(), target_N.tolist(), strict=True)]
    chosen: list[int] = []
    width = 0
    for index, length in enumerate(lengths):
        if (len(chosen) + 1) * max(width, length) <= PROBE_TOKENS:
            chosen.append(index)
            width = max(width, length)
    chosen = chosen or [lengths.index(min(lengths))]
    widths = Widths(int(source_N[chosen].max()), int(target_N[chosen].max()))
    return form.collate(BatchPlan([[index] for index in chosen], widths), examples)


def measure_probes(model: Model, batch: Batch) -> Probes:
    """Return the probes of a model on a batch, which must be unpacked: with one sentence per row.

    Dropout is off. The gradients of frozen parameters are measured too.
    """
    assert batch.is_unpacked
    with (
        eval_mode(model),
        require_gradients(model),
        torch.enable_grad(),
        torch.backends.cudnn.flags(enabled=False),  # cuDNN has no backward pass for recurrent models in eval mode
    ):
        with record_outputs(model) as outputs, record_attention(model) as attention:
            loss = compute_mean_loss(model, batch)
        groups, parameters = group_parameters(model), list(model.parameters())
        tensors = [tensor for steps in outputs.values() for tensor in steps]
        gradients = torch.autograd.grad(loss, [*parameters, *tensors], allow_unused=True)
        gradient_of = {id(tensor): gradient for tensor, gradient in zip((*parameters, *tensors), gradients)}
        flow = measure_gradient_flow(model, batch)
    real = {"encoder": batch.source_segment_BS > 0, "decoder": batch.target_segment_BT > 0}
    layers = []
    for (side, layer), steps in sorted(outputs.items(), key=lambda item: (SIDES.index(item[0][0]), item[0][1])):
        output_NC = join_steps(steps).detach()[real[side]].double()
        gradient_BTC = join_steps([zeros_if_none(gradient_of[id(step)], step) for step in steps])
        gradient = float(gradient_BTC[real[side]].double().norm())
        layers.append(LayerProbe(side, layer, float(output_NC.var(correction=0)), gradient))
    norms = {
        group: math.hypot(*(float(zeros_if_none(gradient_of[id(one)], one).double().norm()) for one in some))
        for group, some in groups.items()
    }
    return Probes(
        loss=float(loss.detach()),
        parameter_gradients=norms,
        layers=layers,
        gradient_flow={side: sizes for side, sizes in flow._asdict().items() if sizes},
        attention=measure_attention(attention, real),
        recurrent=measure_recurrence(model),
    )


def compute_mean_loss(model: Model, batch: Batch) -> Tensor:
    """Return the mean negative log-likelihood of all target tokens, as in validation."""
    real_BT = batch.target_segment_BT > 0
    logits_NV = model.compute_logits(model(batch)[real_BT])
    return nn.functional.cross_entropy(logits_NV, batch.target_out_BT[real_BT])


@contextmanager
def require_gradients(model: nn.Module) -> Iterator[None]:
    """Let all parameters, including frozen ones, require gradients within the `with` block."""
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


@contextmanager
def record_outputs(model: Model) -> Iterator[dict[Depth, list[Tensor]]]:
    """Collect the outputs of all layers, and the scaled embeddings, of a forward pass within the `with` block.

    An output is one tensor, out_BTC. With input feeding or the context as input, a recurrent decoder is computed step
    by step, and the output is the list of its states, state_BC. Their gradients include the effect on later steps
    through the recurrence.
    """
    outputs: dict[Depth, list[Tensor]] = {}
    with ExitStack() as stack:
        for side in SIDES:
            part: Any = getattr(model, side, None)
            if part is None:
                continue
            record_calls(part.word_dropout, [(side, 0)], outputs, stack)  # the first module that reads embeddings
            layers: list[nn.Module] = list(part.layers if hasattr(part, "layers") else part.stack.cells)
            numbers: dict[nn.Module, list[Depth]] = {}  # several for a layer that shares its weights with others
            for number, layer in enumerate(layers, 1):
                numbers.setdefault(layer, []).append((side, number))
            for layer, depths in numbers.items():
                is_stepwise = getattr(part, "feed", None) or getattr(part, "feed_context", None)
                if isinstance(layer, Cell) and is_stepwise:
                    record_steps(layer, depths[0], outputs, stack)
                else:
                    record_calls(layer, depths, outputs, stack)
        yield outputs


def record_calls(
    module: nn.Module, depths: Sequence[Depth], outputs: dict[Depth, list[Tensor]], stack: ExitStack
) -> None:
    """Record the output of each call of a module. `depths` has the key of each call."""
    keys = iter(depths)

    def record(layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        if not isinstance(layer, RecurrentLayer):
            outputs[next(keys)] = [output]
            return output
        out_BTC, last = output
        outputs[next(keys)] = [out_BTC]
        return out_BTC, (select_final_states(layer, out_BTC, *inputs[1:]), *last[1:])

    stack.callback(module.register_forward_hook(record).remove)


def select_final_states(layer: RecurrentLayer, out_BTC: Tensor, ends: SentenceEnds) -> Tensor:
    """Return the final hidden state of a recurrent layer, last_BC, as a function of its outputs.

    It initializes the decoder, so the gradient with respect to the outputs then includes this use of them.
    """
    if layer.back is None:
        return ends.select_last(out_BTC)
    ahead_BTC, back_BTC = out_BTC.chunk(2, -1)
    return torch.cat([ends.select_last(ahead_BTC), back_BTC[:, 0]], -1)


def record_steps(cell: Cell, depth: Depth, outputs: dict[Depth, list[Tensor]], stack: ExitStack) -> None:
    """Record the state after each step of a cell whose `forward` is not called."""
    advance = cell.advance
    outputs[depth] = []

    def record(gates_NG: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        state = advance(gates_NG, state)
        outputs[depth].append(state[0])
        return state

    cell.advance = record  # type: ignore[method-assign]
    stack.callback(delattr, cell, "advance")  # the method of the class is visible again


def join_steps(steps: Sequence[Tensor]) -> Tensor:
    """Return an output that `record_outputs` has collected as one tensor: out_BTC."""
    return steps[0] if steps[0].dim() == 3 else torch.stack(list(steps), 1)


def zeros_if_none(gradient: Tensor | None, like: Tensor) -> Tensor:
    """Return the gradient; zeros if the loss does not depend on the tensor."""
    return torch.zeros_like(like) if gradient is None else gradient


def group_parameters(model: Model) -> dict[str, list[nn.Parameter]]:
    """Return all parameters by group: embeddings, each layer, each further part such as a bridge, output projection.

    A parameter with several uses, such as an embedding that is also the output projection, is in one group that is
    named after all of them.
    """
    names: dict[nn.Parameter, dict[str, None]] = {}  # the inner dict is an ordered set
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, {})[name_group(name)] = None
    groups: dict[str, list[nn.Parameter]] = {}
    for parameter, uses in names.items():
        sorted_uses = sorted(uses, key=rank_group)
        is_shared_layer = len(uses) > 1 and " layer " in sorted_uses[0]
        group = f"{sorted_uses[0]} to {len(uses)}" if is_shared_layer else " = ".join(sorted_uses)
        groups.setdefault(group, []).append(parameter)
    return dict(sorted(groups.items(), key=lambda item: rank_group(item[0])))


def name_group(parameter: str) -> str:
    """Return the group of a parameter: "decoder.layers.0.norm.weight" is in "decoder layer 1"."""
    if found := LAYER_NAME.match(parameter):
        return f"{found[1]} layer {int(found[2]) + 1}"
    return OTHER_NAMES.get(parameter, " ".join(parameter.split(".")[:2]))


def rank_group(group: str) -> tuple[int, int]:
    """Return a sort key that orders groups from the input of a model to its output."""
    order = ("source embedding", "target embedding", "encoder layer", "encoder", "decoder layer", "decoder", "output")
    rank = next(number for number, start in enumerate((*order, "")) if group.startswith(start))
    number = re.search(r" layer (\d+)", group)
    return rank, int(number[1]) if number else 0


def measure_attention(recorded: RecordedAttention, real: Mapping[str, Tensor]) -> list[AttentionProbe]:
    """Return the entropy of recorded attention weights. `real` is False at padding, by side of the model."""
    probes = []
    for part, weights in recorded.items():
        real_BQ = real["encoder" if part == "encoder" else "decoder"]
        for layer, weight_BHQK in enumerate(weights, 1):
            weight_HNK = weight_BHQK.transpose(0, 1)[:, real_BQ].double()
            entropy_H = -(weight_HNK * weight_HNK.clamp(min=1e-300).log2()).sum(-1).mean(-1)
            # Keys that are not masked; weights that underflow to 0 count as masked.
            maximum = (weight_HNK > 0).sum(-1).double().log2().mean()
            probes.append(AttentionProbe(part, layer, entropy_H.tolist(), float(maximum)))
    return probes


def measure_recurrence(model: Model) -> list[RecurrentProbe]:
    """Return singular values and spectral radius of all recurrent matrices, those of the encoder first."""
    probes = []
    for name, cell in model.named_modules():
        if not isinstance(cell, Cell):
            continue
        label = LAYER_NAME.sub(lambda found: f"{found[1]} layer {int(found[2]) + 1} ", name).strip()
        weights = cell.hidden_weight.detach().cpu().double().chunk(cell.gates)
        for gate, weight_CC in zip(cell.gate_names, weights, strict=True):
            radius = float(torch.linalg.eigvals(weight_CC).abs().max())
            probes.append(RecurrentProbe(label, gate, torch.linalg.svdvals(weight_CC).tolist(), radius))
    return sorted(probes, key=lambda probe: rank_group(probe.cell))

"""Base classes of models and their settings, and the KV cache of attention decoders.

Training, decoding and inspection rely on these classes.

Shapes   B rows of a batch, or sentences   S source width   T target width   C model width   H heads   D head width
         N hypotheses in a search   W hypotheses per sentence (N = B * W)   V vocabulary
         K positions of a cache (in `sentences_K`: selected sentences)   M copied cache positions
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.config.settings import Fraction, Layers, Registries, Settings, check_names, setting
from dragoman.errors import UserError
from dragoman.kernels.attention import AttentionMask, KeyValue
from dragoman.types import Batch


class BaseModelSettings(Settings):
    """Settings of every kind of model, and properties that training and inference read."""

    layers: Layers = setting(6, "number of layers of the encoder and of the decoder", ge=1)
    encoder_layers: Layers = setting(0, "number of encoder layers; 0: same as `layers`")
    decoder_layers: Layers = setting(0, "number of decoder layers; 0: same as `layers`")
    target_word_dropout: Fraction = setting(0.0, "probability of zeroing a target token's embedding in training")
    tied: bool = setting(True, "one matrix for target embeddings, output and, if tokenizer.joint, source embeddings")

    task: ClassVar[Literal["translate", "generate", "classify"]] = "translate"
    compiles: ClassVar[bool] = False  # whether torch.compile is of use
    absent: ClassVar[tuple[str, ...]] = ()  # settings of the half that this kind of model lacks
    absent_from: ClassVar[str] = ""  # this kind of model, for a message
    exclusive: ClassVar[tuple[str, ...]] = ()  # names of registries: settings of entries not chosen are refused

    @classmethod
    def registries(cls) -> Registries:
        """Return the registry of each setting that is a name."""
        raise NotImplementedError

    def check(self) -> None:
        """Refuse names that no registry has, and settings that do not go together or would have no effect."""
        check_names(self.registries(), self, "model")
        self.refuse(self.absent_from, *self.absent)
        for name in self.exclusive:
            self.refuse(f"model.{name}={getattr(self, name)}", *self.find_unread(name))

    def find_unread(self, *names: str) -> list[str]:
        """Return the settings that only entries of these registries read (`uses`), and none of the chosen ones."""
        registries = self.registries()
        chosen = [registries[name][getattr(self, name)] for name in names]
        every = [entry for name in names for entry in registries[name].values()]
        read, readable = ({use for entry in some for use in getattr(entry, "uses", ())} for some in (chosen, every))
        return [name for name in type(self).model_fields if name in readable - read]

    def unused(self) -> set[str]:
        """Return the names of settings that have no effect in this model."""
        return {*self.absent, *self.find_unread(*self.registries())}

    @property
    def layout(self) -> str:
        """How sentences are arranged in a batch (data/batches.py): "packed", or "padded" with one per row."""
        return "padded"

    @property
    def length_limit(self) -> int | None:
        """The maximum length of a sentence and its EOS or BOS; None where any length will do."""
        return None

    @property
    def aligns(self) -> bool:
        """Whether attention tells source tokens apart."""
        return True

    @property
    def features(self) -> tuple[str, ...]:
        """The features of source tokens that batches carry (data/features.py)."""
        return ()

    @property
    def encoder_depth(self) -> int:
        return self.encoder_layers or self.layers

    @property
    def decoder_depth(self) -> int:
        return self.decoder_layers or self.layers

    def in_use(self) -> dict[str, Any]:
        """Return the settings that have an effect, with both depths written out.

        The kernel, dropout that is off, and widths of 0, which mean "as the width", are left out.
        """
        values: dict[str, Any] = self.model_dump(mode="json")
        if self.encoder_layers or self.decoder_layers:
            values |= {"encoder_layers": self.encoder_depth, "decoder_layers": self.decoder_depth}
            values.pop("layers")
        if values.get("feedforward_width") == 0:
            values["feedforward_width"] = 4 * values["width"]
        off = {name for name, value in values.items() if not value and name.endswith(("_dropout", "_width", "_layers"))}
        return {name: value for name, value in values.items() if name not in {*off, *self.unused(), "kernel"}}

    def refuse(self, what: str, *names: str) -> None:
        """Refuse settings that would change nothing: a user who sets one expects an effect."""
        for name in names:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise UserError(f"model.{name} has no use in {what}; leave it out")


class Model(nn.Module, ABC):
    """A trainable model. The names of encoder parameters start with `encoder.`."""

    project: nn.Linear  # maps states to logits; not part of `forward`, so that the loss can compute logits in chunks

    def add_projection_and_initialize(self, width: int, size: int, table: nn.Embedding | None = None) -> None:
        """Add the projection to `size` logits and initialize all parameters. `table`, if given, is tied to it.

        Weights are Xavier-uniform and biases zero. Embeddings are drawn with std 1/sqrt(width), so each component has
        unit variance after the scaling by sqrt(width).
        """
        self.project = nn.Linear(width, size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
        if table is not None:
            self.project.weight = table.weight

    @abstractmethod
    def forward(self, batch: Batch) -> Tensor:
        """Return the state of every target position before the projection to the vocabulary: states_BTC."""


class AutoregressiveModel(Model):
    """A model that generates token by token (decoding/protocol.py)."""

    decoder: Any  # `decoder.step` returns the states before the projection
    output_size: int | None = None  # ids below this can be generated; those from it on are source-side tags

    @abstractmethod
    def start(self, source_BS: Tensor, real_BS: Tensor) -> Any:
        """Encode the sources, one per row, and return the state before the first target token.

        `real_BS` is False at padding.
        """

    def step(self, token_N: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Return the log-probabilities of the next token, logp_NV, given one more token per row, and the new state."""
        states_NC, state = self.decoder.step(token_N, state)
        logp_NV = self.project(states_NC).log_softmax(-1, dtype=torch.float32)
        return logp_NV[:, : self.output_size], state


class Seq2Seq(AutoregressiveModel):
    """A model that generates a target from a source."""

    aligns = True  # whether attention weights differ between source tokens; otherwise they are no alignment

    @abstractmethod
    def alignment(self, batch: Batch) -> Tensor:
        """Return the attention weights of target tokens on source tokens, weight_BTS. They sum to one over S."""


def expand_to_rows(sentences_K: Tensor, width: int) -> Tensor:
    """Return the rows that belong to these sentences in a search with `width` rows per sentence."""
    return (sentences_K[:, None] * width + torch.arange(width, device=sentences_K.device)).flatten()


def collect_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers by name. The only buffers are the running statistics of batch norm."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


CachePair = TypeVar("CachePair", KeyValue, KeyValue | None)


@dataclass(frozen=True)
class KVCache:
    """The decoder state that a search carries from step to step. `memory` and `caches` have one entry per layer.

    `memory`: cross-attention keys and values of the source, stored once per sentence, (B, H, S, D).
    `caches`: self-attention keys and values of the tokens decoded so far, stored per hypothesis, (N, H, K, D). The
    first `length_B` positions of each sentence are valid. The rows of a sentence are adjacent.

    `beam_indices_NK[n, k]` is the row that wrote position k of hypothesis n. When beams are reordered, `select` copies
    only the positions in which the old and the new hypothesis of a row differ (on a CPU, if the number of rows stays
    the same; otherwise whole rows). An `indirect` cache, as used on a GPU, is never copied: attention looks up the row
    in this table (kernels/attention.py).

    A state can be used for one step only: `step` and the methods below write into its tensors.
    """

    memory: list[KeyValue | None]
    mask: AttentionMask  # hides the padding of the sources
    caches: list[KeyValue]
    length_B: Tensor
    beam_indices_NK: Tensor
    indirect: bool = False

    @property
    def nbytes(self) -> int:
        """The size of all keys and values in bytes."""
        return sum(tensor.nbytes for pair in (*self.memory, *self.caches) for tensor in pair or ())

    def select(self, rows_N: Tensor) -> KVCache:
        """Return the state of these rows, in this order, N / B of them per sentence."""
        beam_indices_NK = self.beam_indices_NK.index_select(0, rows_N)
        if self.indirect:
            return replace(self, beam_indices_NK=beam_indices_NK)
        if len(rows_N) != len(self.beam_indices_NK) or beam_indices_NK.is_cuda:
            return replace(self, caches=select_rows(self.caches, rows_N), beam_indices_NK=beam_indices_NK)
        changed_M2 = (beam_indices_NK != self.beam_indices_NK).nonzero()
        row_M1, position_M1 = changed_M2[:, :1], changed_M2[:, 1:]
        if len(row_M1):  # copy these positions from the rows that the new hypotheses extend
            heads, capacity = self.caches[0][0].shape[1:3]
            head_H = torch.arange(heads, device=rows_N.device)
            to_M, from_M = (
                ((row * heads + head_H) * capacity + position_M1).flatten() for row in (row_M1, rows_N[row_M1])
            )
            for cached_NHKD in (cached_NHKD for pair in self.caches for cached_NHKD in pair):
                flat_MD = cached_NHKD.view(-1, cached_NHKD.size(3))
                flat_MD.index_copy_(0, to_M, flat_MD.index_select(0, from_M))
        return replace(self, beam_indices_NK=beam_indices_NK)

    def make_indirect(self, capacity: int) -> KVCache:
        """Return this state with an indirect cache of this capacity. No token may have been decoded yet."""
        bias = self.mask.bias
        mask = AttentionMask() if bias is None else AttentionMask(length_B=(bias[:, 0, 0] == 0).sum(-1))
        return replace(self.reserve(capacity), mask=mask, indirect=True)

    def reserve(self, positions: int) -> KVCache:
        """Extend the capacity by this number of positions."""
        caches = [(F.pad(k, (0, 0, 0, positions)), F.pad(v, (0, 0, 0, positions))) for k, v in self.caches]
        return replace(self, caches=caches, beam_indices_NK=F.pad(self.beam_indices_NK, (0, positions)))

    def reset_finished(self, done_B: Tensor) -> KVCache:
        """Set the length of finished sentences to 0, so that they do not make the cache grow."""
        return replace(self, length_B=self.length_B.masked_fill(done_B, 0))

    def keep(self, sentences_K: Tensor) -> KVCache:
        """Return only these sentences, with all of their rows."""
        bias, width = self.mask.bias, len(self.caches[0][0]) // len(self.length_B)
        rows_N = expand_to_rows(sentences_K, width)
        return KVCache(
            select_rows(self.memory, sentences_K),
            AttentionMask(bias=None if bias is None else bias.index_select(0, sentences_K)),
            select_rows(self.caches, rows_N),
            self.length_B.index_select(0, sentences_K),
            self.beam_indices_NK.index_select(0, rows_N),
        )

    def slice_sentences(self, first: int, count: int) -> KVCache:
        """Return views of `count` sentences, starting with `first`. No token may have been decoded yet."""
        selected = slice(first, first + count)
        length_B, bias = self.mask.length_B, self.mask.bias
        mask = AttentionMask(
            length_B=None if length_B is None else length_B[selected], bias=None if bias is None else bias[selected]
        )
        memory = [pair and (pair[0][selected], pair[1][selected]) for pair in self.memory]
        return replace(self, memory=memory, mask=mask, length_B=self.length_B[selected])

    def put(self, sentences_K: Tensor, fresh: KVCache) -> KVCache:
        """Replace these sentences by those of `fresh`, for which no token has been decoded.

        Stale entries remain at positions beyond the new sentence's length, where they are masked until overwritten.
        """
        for pair, new_pair in zip(self.memory, fresh.memory, strict=True):
            for old_BHSD, new_BHSD in zip(pair or (), new_pair or (), strict=True):
                old_BHSD.index_copy_(0, sentences_K, new_BHSD)
        for old_B, new_B in ((self.mask.bias, fresh.mask.bias), (self.mask.length_B, fresh.mask.length_B)):
            if old_B is not None and new_B is not None:
                old_B.index_copy_(0, sentences_K, new_B)
        width = len(self.caches[0][0]) // len(self.length_B)
        self.beam_indices_NK.index_fill_(0, expand_to_rows(sentences_K, width), 0)
        return replace(self, length_B=self.length_B.index_copy(0, sentences_K, fresh.length_B))


def select_rows(caches: list[CachePair], rows_N: Tensor) -> list[CachePair]:
    """Return these rows of the keys and values of each layer."""
    return [tuple(tensor.index_select(0, rows_N) for tensor in pair) if pair else pair for pair in caches]  # type: ignore[misc]

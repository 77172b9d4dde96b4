"""Base classes of models and their settings, and the KV cache of Transformer decoders.

Training, decoding and inspection use models only through these classes:

    Model                 maps a batch to states, from which `compute_logits` computes logits
    AutoregressiveModel   can also generate token by token (decoding/protocol.py)
    Seq2Seq               has a source, and attention from target to source tokens

Shapes   B rows of a batch, or sentences   S source length   T target length   C model width   H heads   D head width
         N hypotheses in a search   W hypotheses per sentence (N = B * W)   V vocabulary
         K positions of a cache (in `sentences_K`: selected sentences)   M copied positions, of all rows
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
from dragoman.modules.copying import CopyGate
from dragoman.types import Batch


class BaseModelSettings(Settings):
    """The settings that every kind of model has, and properties of the kind that training and inference read."""

    layers: Layers = setting(6, "number of layers of the encoder and of the decoder", ge=1)
    encoder_layers: Layers = setting(0, "number of encoder layers; 0: same as `layers`")
    decoder_layers: Layers = setting(0, "number of decoder layers; 0: same as `layers`")
    target_word_dropout: Fraction = setting(0.0, "probability of zeroing a target token's embedding in training")
    tied: bool = setting(True, "one matrix for target embeddings, output and, if tokenizer.joint, source embeddings")
    copying: bool = setting(
        False, "let every output token be copied from the source, at the position that attention chooses"
    )

    task: ClassVar[Literal["translate", "generate", "classify"]] = "translate"
    compiles: ClassVar[bool] = False  # whether torch.compile makes this kind of model faster
    inapplicable_settings: ClassVar[tuple[str, ...]] = ()  # inherited ones, of a part that this kind lacks
    kind_in_words: ClassVar[str] = ""  # for messages about inapplicable settings
    # Settings that choose a registry entry, such as `cell`. Giving settings that only other entries read is an error.
    checked_choices: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def registries(cls) -> Registries:
        """Return, for each setting whose value is the name of a registry entry, the registry."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise a UserError for unknown names, and for settings that contradict each other or have no effect."""
        check_names(self.registries(), self, "model")
        self.reject_unused(self.kind_in_words, *self.inapplicable_settings)
        for name in self.checked_choices:
            self.reject_unused(f"model.{name}={getattr(self, name)}", *self.find_unread(name))
        if self.copying and not self.aligns:
            raise UserError(
                "model.copying=true needs attention that distinguishes source tokens, unlike none and mean; choose "
                "another one, such as additive"
            )

    def find_unread(self, *names: str) -> list[str]:
        """Return the settings that entries of these registries read (their `uses`), but none of the chosen entries."""
        registries = self.registries()
        chosen = [registries[name][getattr(self, name)] for name in names]
        entries = [entry for name in names for entry in registries[name].values()]
        readable, read = ({use for entry in group for use in getattr(entry, "uses", ())} for group in (entries, chosen))
        return [name for name in type(self).model_fields if name in readable - read]

    def find_unused(self) -> set[str]:
        return {*self.inapplicable_settings, *self.find_unread(*self.registries())}

    @property
    def layout(self) -> str:
        """How sentences are arranged in a batch (data/batches.py): "packed", or "padded" with one sentence per row."""
        return "padded"

    @property
    def length_limit(self) -> int | None:
        """The maximum length of a sentence, including EOS or BOS; None if there is no maximum."""
        return None

    @property
    def aligns(self) -> bool:
        """Whether attention weights differ between source tokens, so that they can serve as a word alignment."""
        return True

    @property
    def source_features(self) -> tuple[str, ...]:
        """The names of the features of source tokens that the model needs in a batch (data/features.py)."""
        return ()

    @property
    def encoder_depth(self) -> int:
        return self.encoder_layers or self.layers

    @property
    def decoder_depth(self) -> int:
        return self.decoder_layers or self.layers

    def get_effective_settings(self) -> dict[str, Any]:
        """Return the settings that have an effect, for a model card.

        The kernel, dropout rates of 0, and numbers of 0 that stand for a default, such as widths, are left out.
        """
        values: dict[str, Any] = self.model_dump(mode="json")
        if self.encoder_layers or self.decoder_layers:
            values |= {"encoder_layers": self.encoder_depth, "decoder_layers": self.decoder_depth}
            values.pop("layers")
        if values.get("feedforward_width") == 0:
            values["feedforward_width"] = 4 * values["width"]
        suffixes = ("_dropout", "_width", "_layers", "_epsilon")
        off = {name for name, value in values.items() if not value and name.endswith(suffixes)}
        return {name: value for name, value in values.items() if name not in {*off, *self.find_unused(), "kernel"}}

    def reject_unused(self, context: str, *names: str) -> None:
        """Raise a UserError if one of these settings, which have no effect in `context`, differs from its default."""
        for name in names:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise UserError(f"model.{name} has no use in {context}; leave it out")


class Model(nn.Module, ABC):
    """A trainable model. The names of the encoder's parameters start with `encoder.`."""

    project: nn.Linear  # maps states to logits; not called in `forward`, so that the loss can compute logits in chunks
    copy_gate: CopyGate | None  # of a model that copies tokens of the source (modules/copying.py)

    def add_projection_and_initialize(
        self,
        width: int,
        size: int,
        table: nn.Embedding | None = None,
        *,
        copying: bool = False,
        output_bias: bool = False,
    ) -> None:
        """Add the projection from `width` to `size` logits and initialize all parameters.

        If an embedding table is given, the projection uses its weights. Weights are Xavier-uniform and biases zero.
        Embeddings have a standard deviation of 1/sqrt(width); models multiply them by sqrt(width), which gives each
        component unit variance.
        """
        self.project = nn.Linear(width, size, bias=output_bias)
        self.copy_gate = CopyGate(width) if copying else None
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
        """Return the state of every target position before the projection to the vocabulary: states_BTC.

        The states of a copying model also have its copy distribution (modules/copying.py).
        """

    def compute_logits(self, states: Tensor) -> Tensor:
        """Return the logits, of which the softmax is the distribution of the next token, given states of any positions.

        The logits of a copying model are log-probabilities already.
        """
        logits: Tensor = self.copy_gate(states, self.project) if self.copy_gate else self.project(states)
        return logits


class AutoregressiveModel(Model):
    """A model that generates token by token (decoding/protocol.py)."""

    decoder: Any  # `decoder.step` returns the states before the projection, and the new decoder state
    output_size: int | None = None  # only lower ids can be generated; the rest are tags of sources; None: all ids

    @abstractmethod
    def start(self, source_BS: Tensor, real_BS: Tensor) -> Any:
        """Encode the sources, one per row, and return the decoder state before the first target token.

        `real_BS` is False at padding.
        """

    def step(self, token_N: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Read one more token per row; return the log-probabilities of the next token, logp_NV, and the new state."""
        states_NC, state = self.decoder.step(token_N, state)
        logp_NV = self.compute_logits(states_NC).log_softmax(-1, dtype=torch.float32)
        return logp_NV[:, : self.output_size], state


class Seq2Seq(AutoregressiveModel):
    """A model that generates a target from a source."""

    aligns = True  # see BaseModelSettings.aligns
    attention_layers = 1  # number of decoder layers that attend to the source

    @abstractmethod
    def compute_alignment(self, batch: Batch, layer: int | None = None) -> Tensor:
        """Return the attention weights of target tokens on source tokens, weight_BTS. They sum to one over S.

        Row t has the weights with which the token `target_out` is predicted, when `target_in` is the input. `layer`,
        counted from 0, is one of `attention_layers`; by default, the one that is best as a word alignment.
        """


def expand_to_rows(sentences_K: Tensor, width: int) -> Tensor:
    """Return the rows that belong to these sentences in a search with `width` rows per sentence."""
    return (sentences_K[:, None] * width + torch.arange(width, device=sentences_K.device)).flatten()


def collect_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers by name. The only buffers are the running statistics of batch normalization."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


CachePair = TypeVar("CachePair", KeyValue, KeyValue | None)


@dataclass(frozen=True)
class KVCache:
    """The decoder state of a Transformer in a search.

    The hypotheses of a sentence are in adjacent rows. `beam_indices_NK[n, k]` is the row that wrote position k of
    hypothesis n. There are two kinds of cache, which differ in what happens when a search reorders its hypotheses:

    - By default, `select` copies keys and values, so that each row has all positions of its hypothesis. On a CPU, if
      the number of rows stays the same, it copies only the positions in which a row's old and new hypothesis differ.
    - An `indirect` cache, as used on a GPU, is never copied: attention reads position k of hypothesis n from the row
      `beam_indices_NK[n, k]` (kernels/attention.py).

    A state can be used for one step only: `step` and the methods below write into its tensors.
    """

    # Per layer: keys and values of each source, (B, H, S, D); None: no cross-attention. In a copying model, one more
    # pair: the keys of the copy attention, (B, 1, S, C), and the token ids, (B, 1, S, 1).
    memory: list[KeyValue | None]
    mask: AttentionMask  # hides the padding of the sources
    caches: list[KeyValue]  # per layer: self-attention keys and values of the hypotheses, (N, H, K, D)
    length_B: Tensor  # number of valid positions of `caches`, per sentence
    beam_indices_NK: Tensor
    indirect: bool = False

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for pair in (*self.memory, *self.caches) for tensor in pair or ())

    def select(self, rows_N: Tensor) -> KVCache:
        """Return the state of these rows, in this order. All sentences must have the same number of rows."""
        beam_indices_NK = self.beam_indices_NK.index_select(0, rows_N)
        if self.indirect:
            return replace(self, beam_indices_NK=beam_indices_NK)
        if len(rows_N) != len(self.beam_indices_NK) or beam_indices_NK.is_cuda:
            return replace(self, caches=select_rows(self.caches, rows_N), beam_indices_NK=beam_indices_NK)
        changed_M2 = (beam_indices_NK != self.beam_indices_NK).nonzero()
        row_M1, position_M1 = changed_M2[:, :1], changed_M2[:, 1:]
        if len(row_M1):  # copy these positions, in all heads, from the rows that the new hypotheses extend
            heads, capacity = self.caches[0][0].shape[1:3]
            head_H = torch.arange(heads, device=rows_N.device)
            to_slots, from_slots = (
                ((row * heads + head_H) * capacity + position_M1).flatten() for row in (row_M1, rows_N[row_M1])
            )
            for cached_NHKD in (cached_NHKD for pair in self.caches for cached_NHKD in pair):
                flat_cache = cached_NHKD.view(-1, cached_NHKD.size(3))
                flat_cache.index_copy_(0, to_slots, flat_cache.index_select(0, from_slots))
        return replace(self, beam_indices_NK=beam_indices_NK)

    def make_indirect(self, capacity: int) -> KVCache:
        """Return this state with an indirect cache of `capacity` positions. No token may have been decoded yet."""
        bias = self.mask.bias  # 0 at tokens; the kernel of an indirect cache reads the number of tokens instead
        mask = AttentionMask() if bias is None else AttentionMask(length_B=(bias[:, 0, 0] == 0).sum(-1))
        return replace(self.reserve(capacity), mask=mask, indirect=True)

    def reserve(self, positions: int) -> KVCache:
        """Return this state with a capacity for this number of additional positions."""
        caches = [(F.pad(k, (0, 0, 0, positions)), F.pad(v, (0, 0, 0, positions))) for k, v in self.caches]
        return replace(self, caches=caches, beam_indices_NK=F.pad(self.beam_indices_NK, (0, positions)))

    def reset_finished(self, done_B: Tensor) -> KVCache:
        """Set the length of finished sentences to 0, so that they do not make the cache grow."""
        return replace(self, length_B=self.length_B.masked_fill(done_B, 0))

    def keep_sentences(self, sentences_K: Tensor) -> KVCache:
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
        """Return the state of `count` sentences from `first` on, as views. No token may have been decoded yet."""
        selected = slice(first, first + count)
        length_B, bias = self.mask.length_B, self.mask.bias
        mask = AttentionMask(
            length_B=None if length_B is None else length_B[selected], bias=None if bias is None else bias[selected]
        )
        memory = [pair and (pair[0][selected], pair[1][selected]) for pair in self.memory]
        return replace(self, memory=memory, mask=mask, length_B=self.length_B[selected])

    def replace_sentences(self, sentences_K: Tensor, fresh: KVCache) -> KVCache:
        """Replace these sentences by those of `fresh`, for which no token has been decoded yet.

        All tensors except `length_B` are updated in place. The old keys and values stay in `caches`, but are masked
        until new tokens overwrite them.
        """
        for pair, new_pair in zip(self.memory, fresh.memory, strict=True):
            for old_BHSD, new_BHSD in zip(pair or (), new_pair or (), strict=True):
                old_BHSD.index_copy_(0, sentences_K, new_BHSD)
        for old_B, new_B in ((self.mask.bias, fresh.mask.bias), (self.mask.length_B, fresh.mask.length_B)):
            if old_B is not None and new_B is not None:
                old_B.index_copy_(0, sentences_K, new_B)
        width = len(self.caches[0][0]) // len(self.length_B)
        self.beam_indices_NK.index_fill_(0, expand_to_rows(sentences_K, width), 0)  # as in an empty cache
        return replace(self, length_B=self.length_B.index_copy(0, sentences_K, fresh.length_B))


def select_rows(caches: list[CachePair], rows_N: Tensor) -> list[CachePair]:
    return [tuple(tensor.index_select(0, rows_N) for tensor in pair) if pair else pair for pair in caches]  # type: ignore[misc]

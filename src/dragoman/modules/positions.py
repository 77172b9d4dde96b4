"""Position encodings. A scheme consists of two parts, and most schemes use only one of them:

    PositionEmbedding   is added to the token embeddings before the first layer
    AttentionPosition   changes self-attention: it adds positions to queries, keys and values, rotates queries and
                        keys, or adds a bias to the scores

Every layer has its own AttentionPosition. To add a scheme, write one or two classes and add them to POSITIONS. Settings
that only this scheme reads are fields of PositionSettings, and the classes list their names in `uses`.

Shapes   B rows of a batch   H heads   T tokens   Q queries   K keys   D head width   C model width
         E width of queries and keys, or of values, all heads together
         R buckets of relative positions
In block attention (patterns.py) there are further axes between H and Q, and the same ones between H and K.

Positions in dependency trees are those of Wang et al. 2019, "Self-Attention with Structural Position Representations".
They need the feature "tree" of source tokens, which becomes the tensors "tree_depth" and "tree_distance" of a batch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dragoman.config.settings import Count, Fraction, setting
from dragoman.errors import UserError
from dragoman.kernels.attention import AttentionMask, Kernel, RowLayout, compute_attention_weights
from dragoman.modules.norms import NormSettings
from dragoman.types import UNKNOWN_DISTANCE


class HeadSettings(NormSettings):
    """The settings that every attention layer reads."""

    heads: Count = setting(8, "number of heads of each attention")
    query_width: int = setting(0, "width of queries and keys, all heads together; 0: same as `width`", ge=0, le=65_536)
    value_width: int = setting(0, "width of values, all heads together; 0: same as `width`", ge=0, le=65_536)
    projections: bool = setting(True, "project queries, keys and values; false: use the token states themselves")
    output_projection: bool = setting(True, "project the joined heads; false: they are the output of attention")
    scaled: bool = setting(True, "divide attention scores by the square root of a head's query width")
    head_dropout: Fraction = setting(0.0, "probability of dropping a head's output for a row of a batch, in training")
    kernel: str = setting("auto", "implementation of attention")

    @property
    def head_key_width(self) -> int:
        return (self.query_width or self.width) // self.heads

    @property
    def head_value_width(self) -> int:
        return (self.value_width or self.width) // self.heads


class PositionSettings(HeadSettings):
    position: str = setting("sinusoidal", "position encoding")
    max_length: Count = setting(1024, "maximum number of positions for learned positions and Linformer")
    reach: int = setting(16, "relative, tree: distances are clipped to this maximum", ge=1, le=65_536)


class PositionPart(nn.Module):
    """The common part of PositionEmbedding and AttentionPosition."""

    features: tuple[str, ...] = ()  # names of the features of source tokens that this part needs (data/features.py)
    # Names of settings that this part reads and some other position encodings or attention patterns ignore.
    uses: tuple[str, ...] = ()

    def __init__(self, settings: PositionSettings) -> None:
        super().__init__()
        self.settings = settings

    @classmethod
    def check(cls, settings: PositionSettings) -> None:
        """Raise a UserError for settings that cannot work."""


class PositionEmbedding(PositionPart):
    """The base class of position embeddings. It adds nothing, for schemes that act in attention only."""

    has_max_length = False  # whether positions have to be below settings.max_length

    def forward(self, x_BTC: Tensor, rows: RowLayout) -> Tensor:  # noqa: ARG002 - the signature of all embeddings
        return x_BTC


class Sinusoidal(PositionEmbedding):
    """Sines and cosines of geometrically growing wavelength, interleaved (Vaswani 2017, section 3.5)."""

    @classmethod
    def check(cls, settings: PositionSettings) -> None:
        if settings.width % 2:
            raise UserError(f"model.position={settings.position} needs an even model.width, got {settings.width}")

    def forward(self, x_BTC: Tensor, rows: RowLayout) -> Tensor:
        T = rows.position_BT.size(1)
        if T == 1:  # in a decoding step the position may be greater than T
            sinusoid_BTC = self.compute_sinusoids(rows.position_BT)
        else:  # positions are below T: compute each only once
            position_T = torch.arange(T, device=rows.position_BT.device)
            sinusoid_BTC = self.compute_sinusoids(position_T)[rows.position_BT]
        return x_BTC + sinusoid_BTC.to(x_BTC.dtype)

    def compute_sinusoids(self, position_BT: Tensor) -> Tensor:
        """Return the vectors that are added at these positions, sinusoid_BTC."""
        return make_sinusoids(position_BT, self.settings.width)


class FairseqSinusoidal(Sinusoidal):
    """Sinusoids as in fairseq, which M2M100 and NLLB models have: positions from 2, and other wavelengths."""

    @classmethod
    def check(cls, settings: PositionSettings) -> None:
        super().check(settings)
        if settings.width < 4:
            raise UserError(f"model.position=fairseq needs a model.width of 4 at least, got {settings.width}")

    def compute_sinusoids(self, position_BT: Tensor) -> Tensor:
        half = self.settings.width // 2
        number = torch.arange(half, device=position_BT.device, dtype=torch.float32)
        frequency = torch.exp(number * -(math.log(10_000.0) / (half - 1)))
        angle = (position_BT + 2)[..., None].float() * frequency
        return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)


class Learned(PositionEmbedding):
    """Add a learned vector for each position below `max_length`."""

    has_max_length = True
    uses = ("max_length",)

    def __init__(self, settings: PositionSettings) -> None:
        super().__init__(settings)
        self.table = nn.Embedding(settings.max_length, settings.width)

    def forward(self, x_BTC: Tensor, rows: RowLayout) -> Tensor:
        position_BT, limit = rows.position_BT, len(self.table.weight)
        if position_BT.device.type == "cpu" and int(position_BT.max()) >= limit:  # on a GPU, this would wait
            raise UserError(
                f"a sentence of {int(position_BT.max()) + 1} tokens is too long for learned positions: "
                f"model.max_length is {limit}; split it, or train with a greater model.max_length"
            )
        # The table's initial standard deviation is 1/sqrt(width) (models/base.py).
        out: Tensor = x_BTC + self.table(position_BT) * self.settings.width**0.5
        return out


class TreeDepth(Sinusoidal):
    """Add sinusoids, and a learned vector for the depth of a token's word in its dependency tree.

    The root has depth 1. Depth 0 means that the tree is unknown; then only the sinusoids are added.
    """

    features = ("tree",)
    uses = ("reach",)

    def __init__(self, settings: PositionSettings) -> None:
        super().__init__(settings)
        self.table = nn.Embedding(settings.reach, settings.width)

    def forward(self, x_BTC: Tensor, rows: RowLayout) -> Tensor:
        x_BTC = super().forward(x_BTC, rows)
        depth_BT = rows.features.get("tree_depth")
        if depth_BT is None:
            return x_BTC
        depth_BTC = self.table(depth_BT.clamp(1, self.settings.reach) - 1) * self.settings.width**0.5
        out: Tensor = x_BTC + depth_BTC * (depth_BT > 0)[..., None]
        return out


class AttentionPosition(PositionPart):
    """The base class of schemes that act in attention; it changes nothing. Subclasses override some of its methods."""

    # Which distances between queries and keys `attend` needs: "none", "tokens", or "tree" for those in a dependency
    # tree. An attention pattern supports those in its `supported_distances` (modules/patterns.py).
    needed_distance = "none"

    def compute_relative(self, query_BQ: Tensor, key_BK: Tensor) -> Tensor | None:  # noqa: ARG002
        """Return the relative positions of queries and keys at these positions, relative_BQK; None if not needed."""
        return None

    def compute_relative_in_rows(self, rows: RowLayout) -> Tensor | None:
        """Return the relative positions of all pairs of tokens in these rows, relative_BTT; None if not needed."""
        position_BT = rows.shared_position_BT  # (1, T) if all rows have the same positions
        return self.compute_relative(position_BT, position_BT)

    def add_positions(self, x_BTE: Tensor, position_BT: Tensor) -> Tensor:  # noqa: ARG002
        """Return queries, keys or values, before they are split into heads, with their positions added."""
        return x_BTE

    def rotate(self, x_BHTD: Tensor, position_BT: Tensor) -> Tensor:  # noqa: ARG002
        """Return queries or keys with their positions encoded."""
        return x_BHTD

    def attend(self, kernel: Kernel, q_BHQD: Tensor, k_BHKD: Tensor, v_BHKD: Tensor, mask: AttentionMask) -> Tensor:
        """Compute attention by the kernel, using `mask.relative_position` if the scheme needs it."""
        return kernel(q_BHQD, k_BHKD, v_BHKD, mask)

    def compute_weights(self, q_BHQD: Tensor, k_BHKD: Tensor, mask: AttentionMask) -> Tensor:
        """Return the weights that `attend` gives to the keys: weight_BHQK."""
        return compute_attention_weights(q_BHQD, k_BHKD, mask)

    def apply_weights(self, weight_BHQK: Tensor, v_BHKD: Tensor, mask: AttentionMask) -> Tensor:  # noqa: ARG002
        """Return the output of attention with these weights, as `attend` computes it: out_BHQD."""
        return weight_BHQK @ v_BHKD


class SinusoidalQkv(AttentionPosition):
    """Add sinusoids to the queries, keys and values of every layer, instead of to the input of the first one.

    They are as wide as all heads together, so that each head gets other wavelengths.
    """

    def add_positions(self, x_BTE: Tensor, position_BT: Tensor) -> Tensor:
        return x_BTE + make_sinusoids(position_BT, x_BTE.size(-1)).to(x_BTE.dtype)


class Rotary(AttentionPosition):
    """Rotate queries and keys by angles that grow with the position, so scores depend on the distance (Su 2021)."""

    @classmethod
    def check(cls, settings: PositionSettings) -> None:
        if settings.head_key_width % 2:
            raise UserError(f"model.position=rotary needs an even query width per head, got {settings.head_key_width}")

    def rotate(self, x_BHTD: Tensor, position_BT: Tensor) -> Tensor:
        wave = make_sinusoids(position_BT, x_BHTD.size(-1)).to(x_BHTD.dtype)[:, None]
        sine, cosine = wave[..., 0::2], wave[..., 1::2]
        even, odd = x_BHTD[..., 0::2], x_BHTD[..., 1::2]
        return torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], -1).flatten(-2)


class DistancePosition(AttentionPosition):
    """The common part of schemes that depend on the distance between query and key."""

    needed_distance = "tokens"

    def compute_relative(self, query_BQ: Tensor, key_BK: Tensor) -> Tensor | None:
        return key_BK[..., None, :] - query_BQ[..., :, None]


class Alibi(DistancePosition):
    """Reduce scores in proportion to the distance, with a different slope in each head (Press 2022)."""

    def add_bias(self, q_BHQD: Tensor, mask: AttentionMask) -> AttentionMask:
        """Return the mask with the reduction of the scores as a bias."""
        assert mask.relative_position is not None
        heads = torch.arange(1, self.settings.heads + 1, device=q_BHQD.device, dtype=torch.float32)
        slope_H = 2.0 ** (-8.0 * heads / self.settings.heads)  # as in the paper: from 2 ** (-8 / H) to 2 ** -8
        bias = -slope_H.view(-1, *[1] * (q_BHQD.dim() - 2)) * mask.relative_position[:, None].abs()
        return replace(mask, bias=bias.to(q_BHQD.dtype))

    def attend(self, kernel: Kernel, q_BHQD: Tensor, k_BHKD: Tensor, v_BHKD: Tensor, mask: AttentionMask) -> Tensor:
        return kernel(q_BHQD, k_BHKD, v_BHKD, self.add_bias(q_BHQD, mask))

    def compute_weights(self, q_BHQD: Tensor, k_BHKD: Tensor, mask: AttentionMask) -> Tensor:
        return compute_attention_weights(q_BHQD, k_BHKD, self.add_bias(q_BHQD, mask))


class Relative(DistancePosition):
    """Add learned vectors, one for each relative position up to `reach`, to keys and values (Shaw 2018).

    To save memory, no vector is materialized for a pair of query and key: each query is multiplied with all R vectors,
    and each pair gathers its product. Likewise, attention weights are summed per bucket, then multiplied with vectors.
    """

    uses = ("reach",)

    def __init__(self, settings: PositionSettings) -> None:
        super().__init__(settings)
        self.bucket_count = 2 * settings.reach + 1  # one per relative position from -reach to reach
        self.key_RD = nn.Parameter(torch.empty(self.bucket_count, settings.head_key_width))
        self.value_RD = nn.Parameter(torch.empty(self.bucket_count, settings.head_value_width))
        nn.init.xavier_uniform_(self.key_RD)
        nn.init.xavier_uniform_(self.value_RD)

    def compute_bucket(self, relative_BQK: Tensor) -> Tensor:
        """Return the index of the vector for each relative position."""
        return relative_BQK.clamp(-self.settings.reach, self.settings.reach) + self.settings.reach

    def get_vectors(self) -> tuple[Tensor, Tensor]:
        return self.key_RD, self.value_RD

    def attend(self, kernel: Kernel, q_BHQD: Tensor, k_BHKD: Tensor, v_BHKD: Tensor, mask: AttentionMask) -> Tensor:  # noqa: ARG002
        return self.apply_weights(self.compute_weights(q_BHQD, k_BHKD, mask), v_BHKD, mask)

    def compute_weights(self, q_BHQD: Tensor, k_BHKD: Tensor, mask: AttentionMask) -> Tensor:
        key_RD, _ = self.get_vectors()
        product = (q_BHQD @ key_RD.to(q_BHQD.dtype).T).gather(-1, self.expand_buckets(q_BHQD, mask))
        return compute_attention_weights(q_BHQD, k_BHKD, replace(mask, bias=product * q_BHQD.size(-1) ** -0.5))

    def apply_weights(self, weight_BHQK: Tensor, v_BHKD: Tensor, mask: AttentionMask) -> Tensor:
        weight_BHQK, value_RD = weight_BHQK.to(v_BHKD.dtype), self.get_vectors()[1].to(v_BHKD.dtype)
        bucket_weight = weight_BHQK.new_zeros(*weight_BHQK.shape[:-1], len(value_RD))
        bucket_weight = bucket_weight.scatter_add(-1, self.expand_buckets(weight_BHQK, mask), weight_BHQK)
        return weight_BHQK @ v_BHKD + bucket_weight @ value_RD

    def expand_buckets(self, like: Tensor, mask: AttentionMask) -> Tensor:
        """Return the bucket of every query and key, in the shape (*L, K), where `like` has the shape (*L, any)."""
        assert mask.relative_position is not None
        return self.compute_bucket(mask.relative_position)[:, None].expand(*like.shape[:-1], -1)


class TreeRelative(Relative):
    """Relative positions in a dependency tree: the number of arcs between two words.

    It is negative if the key comes before the query. Unknown distances have a bucket of their own, with fixed zero
    vectors.
    """

    needed_distance = "tree"
    features = ("tree",)

    def compute_relative_in_rows(self, rows: RowLayout) -> Tensor:
        distance_BTT = rows.features.get("tree_distance")
        if distance_BTT is None:  # return a tensor that broadcasts to BTT
            return torch.full((1, 1, rows.segment_BT.size(1)), UNKNOWN_DISTANCE, device=rows.segment_BT.device)
        return distance_BTT

    def compute_bucket(self, relative_BQK: Tensor) -> Tensor:
        known_BQK = super().compute_bucket(relative_BQK.long())
        return torch.where(relative_BQK == UNKNOWN_DISTANCE, self.bucket_count, known_BQK)

    def get_vectors(self) -> tuple[Tensor, Tensor]:
        key_RD, value_RD = (nn.functional.pad(table_RD, (0, 0, 0, 1)) for table_RD in super().get_vectors())
        return key_RD, value_RD


def make_sinusoids(position_BT: Tensor, width: int) -> Tensor:
    """Return interleaved sines and cosines of these positions, sinusoid_BTC, where C is `width`."""
    even = torch.arange(0, width, 2, device=position_BT.device, dtype=torch.float32)
    angle = position_BT[..., None].float() * 10_000.0 ** (-even / width)
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)[..., :width]


class PositionScheme(NamedTuple):
    """The two parts of a position encoding: an entry of POSITIONS."""

    embedding: type[PositionEmbedding] = PositionEmbedding
    attention: type[AttentionPosition] = AttentionPosition

    @property
    def uses(self) -> tuple[str, ...]:
        return (*self.embedding.uses, *self.attention.uses)

    @property
    def source_features(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.embedding.features, *self.attention.features)))


POSITIONS = {
    "none": PositionScheme(),
    "sinusoidal": PositionScheme(embedding=Sinusoidal),
    "fairseq": PositionScheme(embedding=FairseqSinusoidal),
    "sinusoidal_qkv": PositionScheme(attention=SinusoidalQkv),
    "learned": PositionScheme(embedding=Learned),
    "relative": PositionScheme(attention=Relative),
    "rotary": PositionScheme(attention=Rotary),
    "alibi": PositionScheme(attention=Alibi),
    "tree": PositionScheme(embedding=TreeDepth, attention=TreeRelative),
}

"""Position encodings. A scheme has two parts, and most schemes use only one of them:

    PositionEmbedding   is added to the token embeddings below the first layer
    AttentionPosition   changes self-attention: it rotates queries and keys, or biases their scores

Every layer has its own AttentionPosition. To add a scheme, write one or two classes and a line in POSITIONS.

Shapes   B batch   H heads   T tokens   Q queries   K keys   D head width   C model width   R relative positions
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dragoman.errors import UserError
from dragoman.kernels.attention import Kernel, compute_attention_weights
from dragoman.kernels.masks import AttentionMask, RowLayout
from dragoman.modules.settings import AttentionSettings
from dragoman.types import UNKNOWN_DISTANCE


class PositionEmbedding(nn.Module):
    """Nothing is added."""

    limited = False  # knows no place beyond settings.max_length
    uses: tuple[str, ...] = ()  # settings that only some patterns and positions read

    def __init__(self, settings: AttentionSettings) -> None:
        super().__init__()
        self.settings = settings

    @classmethod
    def check(cls, settings: AttentionSettings) -> None:
        """Refuse settings that cannot work."""

    def forward(self, x_BTC: Tensor, rows: RowLayout) -> Tensor:  # noqa: ARG002 - the hook's shape
        return x_BTC


class Sinusoidal(PositionEmbedding):
    """Waves of growing length, sine and cosine interleaved, as in the paper (Vaswani 2017, section 3.5)."""

    @classmethod
    def check(cls, settings: AttentionSettings) -> None:
        if settings.width % 2:
            raise UserError(f"model.position={settings.position} needs an even model.width, got {settings.width}")

    def forward(self, x_BTC: Tensor, rows: RowLayout) -> Tensor:
        return x_BTC + self.waves(rows.position_BT).to(x_BTC.dtype)

    def waves(self, position_BT: Tensor) -> Tensor:
        """In a grid no place lies beyond its width, so each is computed once; a step of a search may stand anywhere."""
        T = position_BT.size(1)
        if T == 1:
            return make_sinusoids(position_BT, self.settings.width)
        return make_sinusoids(torch.arange(T, device=position_BT.device), self.settings.width)[position_BT]


class Learned(PositionEmbedding):
    """A vector for every place, learned like those of the words. It knows no place beyond its table."""

    limited = True
    uses = ("max_length",)

    def __init__(self, settings: AttentionSettings) -> None:
        super().__init__(settings)
        self.table = nn.Embedding(settings.max_length, settings.width)

    def forward(self, x_BTC: Tensor, rows: RowLayout) -> Tensor:
        position_BT = rows.position_BT
        if position_BT.device.type == "cpu" and int(position_BT.max()) >= len(self.table.weight):
            raise UserError(
                f"a sentence of {int(position_BT.max()) + 1} tokens is longer than learned positions reach; "
                f"model.max_length is {len(self.table.weight)}"
            )
        out: Tensor = x_BTC + self.table(position_BT) * self.settings.width**0.5
        return out


class TreeDepth(Sinusoidal):
    """Waves, and a learned vector for how far a token's word lies below the root of its tree (Wang 2019).

    The root is at depth 1. Depth 0 says that no tree is known, and adds nothing: then the waves are all there is.
    """

    uses = ("reach",)

    def __init__(self, settings: AttentionSettings) -> None:
        super().__init__(settings)
        self.table = nn.Embedding(settings.reach, settings.width)

    def forward(self, x_BTC: Tensor, rows: RowLayout) -> Tensor:
        x_BTC = super().forward(x_BTC, rows)
        if rows.depth_BT is None:
            return x_BTC
        deep_BTC = self.table(rows.depth_BT.clamp(1, self.settings.reach) - 1) * self.settings.width**0.5
        out: Tensor = x_BTC + deep_BTC * (rows.depth_BT > 0)[..., None]
        return out


class AttentionPosition(nn.Module):
    """Queries meet keys wherever both stand."""

    needs = "nothing"  # of what a pattern can tell: "nothing", "distance" or "tree" (modules/patterns.py)
    uses: tuple[str, ...] = ()

    def __init__(self, settings: AttentionSettings) -> None:
        super().__init__()
        self.settings = settings

    @classmethod
    def check(cls, settings: AttentionSettings) -> None:
        """Refuse settings that cannot work."""

    def gap(self, query_BQ: Tensor, key_BK: Tensor) -> Tensor | None:  # noqa: ARG002 - the hook's shape
        """What the scheme must know of queries and keys at these positions, if anything."""
        return None

    def between(self, rows: RowLayout) -> Tensor | None:
        """The same for all tokens of these rows."""
        return self.gap(rows.places_BT, rows.places_BT)

    def turn(self, x_BHTD: Tensor, position_BT: Tensor) -> Tensor:  # noqa: ARG002
        """What becomes of queries and keys when they are made."""
        return x_BHTD

    def attend(self, kernel: Kernel, q_BHQD: Tensor, k_BHKD: Tensor, v_BHKD: Tensor, look: AttentionMask) -> Tensor:
        """How they meet."""
        return kernel(q_BHQD, k_BHKD, v_BHKD, look)


class Rotary(AttentionPosition):
    """Queries and keys turned by angles that grow with their place: their products know the distance (Su 2021)."""

    @classmethod
    def check(cls, settings: AttentionSettings) -> None:
        if settings.key_width % 2:
            raise UserError(f"model.position=rotary needs an even width of a head's queries, got {settings.key_width}")

    def turn(self, x_BHTD: Tensor, position_BT: Tensor) -> Tensor:
        wave = make_sinusoids(position_BT, x_BHTD.size(-1)).to(x_BHTD.dtype)[:, None]
        sine, cosine = wave[..., 0::2], wave[..., 1::2]
        even, odd = x_BHTD[..., 0::2], x_BHTD[..., 1::2]
        return torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], -1).flatten(-2)


class DistancePosition(AttentionPosition):
    """The common part of schemes that ask how far a key is from a query."""

    needs = "distance"

    def gap(self, query_BQ: Tensor, key_BK: Tensor) -> Tensor | None:
        return key_BK[..., None, :] - query_BQ[..., :, None]


class Alibi(DistancePosition):
    """The further, the lower the score, in a line, steeper in some heads than in others (Press 2022)."""

    def attend(self, kernel: Kernel, q_BHQD: Tensor, k_BHKD: Tensor, v_BHKD: Tensor, look: AttentionMask) -> Tensor:
        if look.gap is None:
            raise TypeError("ALiBi needs distances")
        heads = torch.arange(1, self.settings.heads + 1, device=q_BHQD.device, dtype=torch.float32)
        slope_H = 2.0 ** (-8.0 * heads / self.settings.heads)
        bias = -slope_H.view(-1, *[1] * (q_BHQD.dim() - 2)) * look.gap[:, None].abs()
        return kernel(q_BHQD, k_BHKD, v_BHKD, replace(look, bias=bias.to(q_BHQD.dtype)))


class Relative(DistancePosition):
    """A learned vector for each distance up to `reach`, met by the query and handed on with the value (Shaw 2018).

    A query meets every distance's vector once, and each pair picks its own from those products: no vector is written
    out for every pair.
    """

    uses = ("reach",)

    def __init__(self, settings: AttentionSettings) -> None:
        super().__init__(settings)
        self.distances = 2 * settings.reach + 1
        self.key_RD = nn.Parameter(torch.empty(self.distances, settings.key_width))
        self.value_RD = nn.Parameter(torch.empty(self.distances, settings.head_width))
        nn.init.xavier_uniform_(self.key_RD)
        nn.init.xavier_uniform_(self.value_RD)

    def bucket(self, gap_BQK: Tensor) -> Tensor:
        """Which vector a distance has."""
        return gap_BQK.clamp(-self.settings.reach, self.settings.reach) + self.settings.reach

    def vectors(self) -> tuple[Tensor, Tensor]:
        """One for each bucket: what queries meet, and what is handed on."""
        return self.key_RD, self.value_RD

    def attend(self, kernel: Kernel, q_BHQD: Tensor, k_BHKD: Tensor, v_BHKD: Tensor, look: AttentionMask) -> Tensor:  # noqa: ARG002 - its own
        if look.gap is None:
            raise TypeError("relative positions need distances")
        key_RD, value_RD = self.vectors()
        bucket = self.bucket(look.gap)[:, None].expand(*q_BHQD.shape[:-1], -1)
        met = (q_BHQD @ key_RD.to(q_BHQD.dtype).T).gather(-1, bucket) * q_BHQD.size(-1) ** -0.5
        weight = compute_attention_weights(q_BHQD, k_BHKD, replace(look, bias=met)).to(v_BHKD.dtype)
        share = weight.new_zeros(*weight.shape[:-1], len(value_RD)).scatter_add(-1, bucket, weight)
        return weight @ v_BHKD + share @ value_RD.to(v_BHKD.dtype)


class TreeRelative(Relative):
    """The same over a dependency tree: how many arcs lie between two words, and which of them comes first (Wang 2019).

    Where no way is known, because there is no tree, the vector is zero and stays so.
    """

    needs = "tree"

    def between(self, rows: RowLayout) -> Tensor:
        if rows.tree_BTT is None:
            return torch.full((1, 1, rows.segment_BT.size(1)), UNKNOWN_DISTANCE, device=rows.segment_BT.device)
        return rows.tree_BTT

    def bucket(self, gap_BQK: Tensor) -> Tensor:
        return torch.where(gap_BQK == UNKNOWN_DISTANCE, self.distances, super().bucket(gap_BQK.long()))

    def vectors(self) -> tuple[Tensor, Tensor]:
        key_RD, value_RD = (nn.functional.pad(table_RD, (0, 0, 0, 1)) for table_RD in super().vectors())
        return key_RD, value_RD


def make_sinusoids(position_BT: Tensor, width: int) -> Tensor:
    even = torch.arange(0, width, 2, device=position_BT.device, dtype=torch.float32)
    angle = position_BT[..., None].float() * 10_000.0 ** (-even / width)
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)[..., :width]


class PositionScheme(NamedTuple):
    embed: type[PositionEmbedding] = PositionEmbedding
    relate: type[AttentionPosition] = AttentionPosition

    @property
    def uses(self) -> tuple[str, ...]:
        return (*self.embed.uses, *self.relate.uses)

    @property
    def of_trees(self) -> bool:
        """Whether it asks for the dependency trees of the sentences."""
        return self.relate.needs == "tree"


POSITIONS = {
    "none": PositionScheme(),
    "sinusoidal": PositionScheme(embed=Sinusoidal),
    "learned": PositionScheme(embed=Learned),
    "relative": PositionScheme(relate=Relative),
    "rotary": PositionScheme(relate=Rotary),
    "alibi": PositionScheme(relate=Alibi),
    "tree": PositionScheme(embed=TreeDepth, relate=TreeRelative),
}

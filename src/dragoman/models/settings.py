"""The settings of each kind of model: one frozen record per kind and backbone, joined as `ModelSettings`.

A recipe can be read and most faults in it reported without PyTorch, so registries are imported where a method needs
them: `registries` and `check` compare names with the registries, which stand beside the classes they list.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from dragoman.config.settings import (
    AttentionSettings,
    Count,
    Fraction,
    Layers,
    Registries,
    Settings,
    check_names,
    pick,
    setting,
)
from dragoman.errors import UserError

if TYPE_CHECKING:
    from dragoman.modules.positions import PositionScheme

Width = Annotated[int, Field(ge=0, le=65_536)]
SOURCE_SETTINGS = ("bridge", "attention", "attention_width", "input_feeding")  # how a recurrent decoder reads a source
TARGET_SETTINGS = ("tied", "target_word_dropout")  # only of models with a decoder


class BaseModelSettings(Settings):
    """Settings of every kind of model: depths, and properties that training and inference read."""

    layers: Layers = setting(6, "of encoder and decoder each", ge=1)
    encoder_layers: Layers = setting(0, "0: as many as `layers`")
    decoder_layers: Layers = setting(0, "0: as many as `layers`")

    task: ClassVar[Literal["translate", "generate", "classify"]] = "translate"
    compiles: ClassVar[bool] = False  # whether torch.compile is of use
    absent: ClassVar[tuple[str, ...]] = ()  # settings of the half that a model lacks

    @classmethod
    def registries(cls) -> Registries:
        """Return the registry of each setting that is a name."""
        raise NotImplementedError

    def check(self) -> None:
        """Refuse names that no registry has, and settings that do not go together."""
        check_names(self.registries(), self, "model")

    def unused(self) -> set[str]:
        """Return the names of settings that have no effect in this model."""
        return set(self.absent)

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


class TransformerSettings(AttentionSettings, BaseModelSettings):
    kind: Literal["transformer"] = "transformer"
    shared: bool = setting(False, "one layer's weights at every depth of a stack")
    feedforward_width: int = setting(0, "0: four times the width", ge=0, le=1_000_000)
    activation: str = setting("relu", "of the feed-forward net")
    dropout: Fraction = setting(0.1, "of embeddings and of each sublayer's output")
    activation_dropout: Fraction = setting(0.0, "between the two layers of the feed-forward net")
    source_word_dropout: Fraction = setting(0.0, "of whole source tokens, all but their positions")
    target_word_dropout: Fraction = setting(0.0, "of whole target tokens that the decoder reads")
    layer_dropout: Fraction = setting(0.0, "of whole layers, for each row of a batch by itself")
    norm: str = setting("layer", "normalization of states")
    norm_place: str = setting("pre", "normalization before or after each sublayer")
    residual: bool = setting(True, "add each sublayer's input to its output")
    tied: bool = setting(
        True, "one matrix for target embeddings and output; for source embeddings too, if they are joint"
    )
    compiles: ClassVar[bool] = True

    @classmethod
    def registries(cls) -> Registries:
        from dragoman.kernels.attention import KERNELS
        from dragoman.modules.feedforward import FEEDFORWARDS, NORM_PLACES
        from dragoman.modules.norms import NORMS
        from dragoman.modules.patterns import PATTERNS
        from dragoman.modules.positions import POSITIONS

        return {
            "norm": NORMS,
            "norm_place": NORM_PLACES,
            "activation": FEEDFORWARDS,
            "kernel": KERNELS,
            "position": POSITIONS,
            "attention": PATTERNS,
            "decoder_attention": {name: pattern for name, pattern in PATTERNS.items() if pattern.causal},
        }

    def check(self) -> None:
        from dragoman.modules.feedforward import FEEDFORWARDS
        from dragoman.modules.patterns import PATTERNS
        from dragoman.modules.positions import POSITIONS

        for name in ("width", "query_width", "value_width"):
            if getattr(self, name) % self.heads:
                raise UserError(
                    f"model.{name} must be a multiple of model.heads, got {getattr(self, name)} and {self.heads} heads"
                )
        causal = self.registries()["decoder_attention"]
        if self.decoder_attention in PATTERNS and self.decoder_attention not in causal:
            raise UserError(
                f"model.decoder_attention={self.decoder_attention} would look ahead, which a decoder may not; "
                f"choose one of: {', '.join(causal)}"
            )
        super().check()
        scheme = POSITIONS[self.position]
        scheme.embed.check(self)
        scheme.relate.check(self)
        for name, relate in (("attention", scheme.relate), ("decoder_attention", self.decoder_scheme.relate)):
            if relate.needs not in PATTERNS[getattr(self, name)].provides:
                raise UserError(
                    f"model.{name}={getattr(self, name)} does not know the {relate.needs} of two tokens, which "
                    f"model.position={self.position} asks for; choose another position, such as sinusoidal"
                )
        if FEEDFORWARDS[self.activation] is None:
            self.refuse(f"a model with model.activation={self.activation}", "activation_dropout")
        if not self.projections and (self.query_width or self.value_width):
            raise UserError("model.projections=false leaves queries, keys and values as they are: drop their widths")

    def unused(self) -> set[str]:
        from dragoman.modules.feedforward import FEEDFORWARDS
        from dragoman.modules.patterns import PATTERNS
        from dragoman.modules.positions import POSITIONS

        used = {
            *PATTERNS[self.attention].uses,
            *PATTERNS[self.decoder_attention].uses,
            *POSITIONS[self.position].uses,
        }
        of_patterns = {name for pattern in PATTERNS.values() for name in pattern.uses}
        of_positions = {name for scheme in POSITIONS.values() for name in scheme.uses}
        found = super().unused() | ((of_patterns | of_positions) - used)
        return found | ({"feedforward_width"} if FEEDFORWARDS[self.activation] is None else set())

    @property
    def decoder_scheme(self) -> PositionScheme:
        """The decoder's own position scheme: only sources have features, so without them positions are sinusoidal."""
        from dragoman.modules.positions import POSITIONS

        scheme = POSITIONS[self.position]
        return POSITIONS["sinusoidal"] if scheme.features else scheme

    @property
    def layout(self) -> str:
        """Several sentences per row, unless one of the patterns cannot tell them apart."""
        from dragoman.modules.patterns import PATTERNS

        patterns = (PATTERNS[self.attention], PATTERNS[self.decoder_attention])
        return "packed" if all(pattern.packable for pattern in patterns) else "padded"

    @property
    def alignment_layer(self) -> int:
        """Return the decoder layer, counted from 0, whose cross-attention serves as word alignment.

        It is the last but one of three or more layers, as in Garg et al. (2019), and the last of two: on the
        phrasebook the first of two finds 81 % of the words' links, the last 98 % (docs/LOG.md).
        """
        return self.decoder_depth - (1 if self.decoder_depth <= 2 else 2)

    @property
    def length_limit(self) -> int | None:
        from dragoman.modules.patterns import PATTERNS
        from dragoman.modules.positions import POSITIONS

        limited = POSITIONS[self.position].embed.limited or PATTERNS[self.attention].limited
        return self.max_length if limited else None

    @property
    def features(self) -> tuple[str, ...]:
        from dragoman.modules.positions import POSITIONS

        scheme = POSITIONS.get(self.position)
        return scheme.features if scheme else ()


class RnnSettings(BaseModelSettings):
    kind: Literal["rnn"] = "rnn"
    cell: str = setting("lstm", "of encoder and decoder")
    nonlinearity: str = setting("tanh", "of the vanilla cell; the others have their own")
    initial_state: Literal["zero", "learned"] = setting("zero", "of each cell at the start")
    layers: Layers = setting(1, "of encoder and decoder each", ge=1)
    width: int = setting(512, "of a state; both directions of an encoder together", ge=1, le=65_536)
    embedding_width: Width = setting(0, "0: the width")
    bidirectional: bool = setting(True, "the encoder's; a decoder cannot look ahead")
    bridge: str = setting("linear", "how the decoder's first state comes from the encoder's last")
    attention: str = setting("additive", "score of the decoder's attention to the source")
    attention_width: Width = setting(0, "of additive scores; 0: the width")
    input_feeding: bool = setting(False, "the output of a step is input to the next one too")
    dropout: Fraction = setting(0.2, "of embeddings, between layers, and of the output")
    source_word_dropout: Fraction = setting(0.0, "of whole source tokens")
    target_word_dropout: Fraction = setting(0.0, "of whole target tokens that the decoder reads")
    tied: bool = setting(
        True, "one matrix for target embeddings and output; for source embeddings too, if they are joint"
    )

    @classmethod
    def registries(cls) -> Registries:
        from dragoman.models.rnn import BRIDGES
        from dragoman.modules.attention_scores import SCORES
        from dragoman.modules.recurrent import CELLS, NONLINEARITIES

        return {"cell": CELLS, "nonlinearity": NONLINEARITIES, "bridge": BRIDGES, "attention": SCORES}

    def check(self) -> None:
        from dragoman.models.rnn import BRIDGES
        from dragoman.modules.attention_scores import SCORES
        from dragoman.modules.recurrent import CELLS

        super().check()
        if self.bidirectional and self.width % 2:
            raise UserError(
                f"model.bidirectional=true gives each direction half of model.width: make it even, got {self.width}"
            )
        if not CELLS[self.cell].takes_nonlinearity:
            self.refuse(f"model.cell={self.cell}, which has its own", "nonlinearity")
        if not SCORES[self.attention].uses_width:
            self.refuse(f"model.attention={self.attention}", "attention_width")
        if not SCORES[self.attention].reads and not BRIDGES[self.bridge].linked:
            raise UserError(
                f"with model.attention={self.attention} and model.bridge={self.bridge} the decoder never sees the "
                "source; change one of them"
            )

    def unused(self) -> set[str]:
        from dragoman.modules.attention_scores import SCORES
        from dragoman.modules.recurrent import CELLS

        found = super().unused() | (set() if CELLS[self.cell].takes_nonlinearity else {"nonlinearity"})
        return found | (set() if SCORES[self.attention].uses_width else {"attention_width"})

    @property
    def aligns(self) -> bool:
        from dragoman.modules.attention_scores import SCORES

        return SCORES[self.attention].aligns

    @property
    def embedded_width(self) -> int:
        return self.embedding_width or self.width

    @property
    def output_width(self) -> int:
        """The width of the projection's input: a tied one has the width of the embeddings."""
        return self.embedded_width if self.tied else self.width


class HybridSettings(TransformerSettings):
    """The settings of a Transformer, for the encoder, and those of the recurrent decoder."""

    kind: Literal["hybrid"] = "hybrid"  # type: ignore[assignment]
    decoder_layers: Count = setting(1, "of cells", le=1000)
    cell: str = setting("lstm", "of the decoder")
    score: str = setting("additive", "of the decoder's attention to the source")
    score_width: Width = setting(0, "of additive scores; 0: decoder_width")
    decoder_width: Width = setting(0, "of a cell's state; 0: the width")
    embedding_width: Width = setting(
        0, "of target embeddings and, if tied, output; 0: the width, and the source's are the same"
    )
    input_feeding: bool = setting(False, "the output of a step is input to the next one too")
    compiles: ClassVar[bool] = False
    absent: ClassVar[tuple[str, ...]] = ("decoder_attention",)

    @classmethod
    def registries(cls) -> Registries:
        from dragoman.modules.attention_scores import SCORES
        from dragoman.modules.recurrent import CELLS

        return {**super().registries(), "cell": CELLS, "score": SCORES}

    def check(self) -> None:
        from dragoman.modules.attention_scores import SCORES

        super().check()
        self.refuse("a hybrid, whose decoder is recurrent", *self.absent)
        if not SCORES[self.score].uses_width:
            self.refuse(f"model.score={self.score}", "score_width")

    @property
    def layout(self) -> str:
        return "padded"

    @property
    def aligns(self) -> bool:
        from dragoman.modules.attention_scores import SCORES

        return SCORES[self.score].aligns

    @property
    def state_width(self) -> int:
        return self.decoder_width or self.width

    @property
    def embedded_width(self) -> int:
        return self.embedding_width or self.width

    def of_decoder(self) -> RnnSettings:
        """Return the decoder's settings under the names that a recurrent model has for them."""
        return RnnSettings(
            cell=self.cell,
            decoder_layers=self.decoder_layers,
            width=self.state_width,
            embedding_width=self.embedded_width,
            attention=self.score,
            attention_width=self.score_width,
            input_feeding=self.input_feeding,
            dropout=self.dropout,
            target_word_dropout=self.target_word_dropout,
            tied=self.tied,
        )


class TransformerLmSettings(TransformerSettings):
    kind: Literal["lm"] = "lm"  # type: ignore[assignment]
    backbone: Literal["transformer"] = "transformer"
    context: Count = setting(256, "tokens of a window of the text, and the most that attention looks back")
    task: ClassVar[Literal["translate", "generate", "classify"]] = "generate"
    bounded: ClassVar[bool] = True  # it looks back no further than its context
    absent: ClassVar[tuple[str, ...]] = ("encoder_layers", "attention", "source_word_dropout")

    def check(self) -> None:
        super().check()
        self.refuse("a language model, which has no encoder", *self.absent)
        if self.features:
            raise UserError(
                f"model.position={self.position} needs whole sentences, which a language model has not read yet"
            )
        if self.length_limit is not None and self.length_limit < self.context:
            raise UserError(
                f"model.context={self.context} is more than model.position={self.position} reaches; "
                f"raise model.max_length, which is {self.max_length}"
            )

    @property
    def output_width(self) -> int:
        """The width of the projection's input."""
        return self.width


class TransformerClassifierSettings(TransformerSettings):
    kind: Literal["classifier"] = "classifier"  # type: ignore[assignment]
    backbone: Literal["transformer"] = "transformer"
    pool: str = setting("mean", "how the states of a text become one")
    task: ClassVar[Literal["translate", "generate", "classify"]] = "classify"
    absent: ClassVar[tuple[str, ...]] = ("decoder_layers", "decoder_attention", *TARGET_SETTINGS)

    @classmethod
    def registries(cls) -> Registries:
        from dragoman.models.single_sequence import POOLS

        return {**super().registries(), "pool": POOLS}

    def check(self) -> None:
        super().check()
        if self.features:
            raise UserError(
                f"model.position={self.position} needs trees beside texts, which only translation takes so far"
            )
        self.refuse("a classifier, which has no decoder", *self.absent)


class RnnLmSettings(RnnSettings):
    kind: Literal["lm"] = "lm"  # type: ignore[assignment]
    backbone: Literal["rnn"] = "rnn"
    context: Count = setting(256, "tokens of a window of the text at training; the state is carried on to the next one")
    bidirectional: bool = setting(False, "not for a language model")
    task: ClassVar[Literal["translate", "generate", "classify"]] = "generate"
    bounded: ClassVar[bool] = False
    absent: ClassVar[tuple[str, ...]] = ("encoder_layers", "bidirectional", "source_word_dropout", *SOURCE_SETTINGS)

    def check(self) -> None:
        super().check()
        self.refuse("a language model, which has no encoder", *self.absent)


class RnnClassifierSettings(RnnSettings):
    kind: Literal["classifier"] = "classifier"  # type: ignore[assignment]
    backbone: Literal["rnn"] = "rnn"
    pool: str = setting("mean", "how the states of a text become one")
    task: ClassVar[Literal["translate", "generate", "classify"]] = "classify"
    absent: ClassVar[tuple[str, ...]] = ("decoder_layers", *TARGET_SETTINGS, *SOURCE_SETTINGS)

    @classmethod
    def registries(cls) -> Registries:
        from dragoman.models.single_sequence import POOLS

        return {**super().registries(), "pool": POOLS}

    def check(self) -> None:
        super().check()
        self.refuse("a classifier, which has no decoder", *self.absent)


LmSettings = TransformerLmSettings | RnnLmSettings
ClassifierSettings = TransformerClassifierSettings | RnnClassifierSettings
MODEL_KINDS: dict[str, dict[str, type[BaseModelSettings]]] = {  # by kind, then by backbone, "" where there is one
    "transformer": {"": TransformerSettings},
    "rnn": {"": RnnSettings},
    "hybrid": {"": HybridSettings},
    "lm": {"transformer": TransformerLmSettings, "rnn": RnnLmSettings},
    "classifier": {"transformer": TransformerClassifierSettings, "rnn": RnnClassifierSettings},
}


def choose_record(section: Any) -> str | None:
    """Return the tag of the record that a model section belongs to, such as kind=lm/rnn; None if it is no section."""
    if not isinstance(section, dict | BaseModelSettings):
        return None
    values = section if isinstance(section, dict) else section.model_dump(include={"kind", "backbone"})
    kind = str(values.get("kind", "transformer"))
    backbones = pick(MODEL_KINDS, kind, "model.kind")
    if "" in backbones:
        return f"kind={kind}"
    backbone = str(values.get("backbone", "transformer"))
    pick(backbones, backbone, "model.backbone")
    return f"kind={kind}/{backbone}"


ModelSettings = Annotated[
    Annotated[TransformerSettings, Tag("kind=transformer")]
    | Annotated[RnnSettings, Tag("kind=rnn")]
    | Annotated[HybridSettings, Tag("kind=hybrid")]
    | Annotated[TransformerLmSettings, Tag("kind=lm/transformer")]
    | Annotated[RnnLmSettings, Tag("kind=lm/rnn")]
    | Annotated[TransformerClassifierSettings, Tag("kind=classifier/transformer")]
    | Annotated[RnnClassifierSettings, Tag("kind=classifier/rnn")],
    Discriminator(choose_record),
]

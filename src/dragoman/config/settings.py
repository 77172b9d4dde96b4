"""Settings: small frozen records in Python, YAML on disk, `a.b=c` on the command line.

Every setting has one default and one description, beside its field; those of the models stand in models/settings.py.
Names that a registry must have (`norm`, `optimizer`, ...) are plain strings here. `pick` checks them where the
registry is known, so that adding a variant touches one file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from dragoman.config.messages import describe_error, shorten_value, suggest_name
from dragoman.config.yaml import as_yaml, lines_of_keys, parse_yaml, read_text
from dragoman.errors import UserError

V = TypeVar("V")
S = TypeVar("S", bound="Settings")
BOOL_WORDS = {"yes": True, "on": True, "no": False, "off": False}


Registries = dict[str, Mapping[str, Any]]  # by the name of a setting: the registry of its values


def pick(registry: Mapping[str, V], name: str, what: str) -> V:
    """Return the entry called `name`, or raise a UserError that suggests the nearest name and lists all."""
    if name in registry:
        return registry[name]
    suggestion = suggest_name(name, registry)
    raise UserError(f"there is no {what} called {name!r}{suggestion} (there are: {', '.join(registry)})")


def check_names(registries: Registries, record: object, where: str) -> None:
    """Refuse every setting of a record whose value is not in its registry."""
    for name, registry in registries.items():
        pick(registry, getattr(record, name), f"{where}.{name}")


def setting(default: V, description: str, **limits: float) -> V:
    """Return a field of a record, with limits such as `ge` and `lt` if it is a number."""
    field: V = Field(default=default, description=description, **limits)  # type: ignore[call-overload]
    return field


class Settings(BaseModel):
    """A frozen record that knows its fields and refuses every other name."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _read_yes_and_no(cls, values: Any) -> Any:
        """Accept yes, no, on and off where true or false is meant; elsewhere, such as in a tag, they are text."""
        if not isinstance(values, dict):
            return values
        kinds = {name: field.annotation for name, field in cls.model_fields.items()}
        return {
            name: BOOL_WORDS.get(value.lower(), value)
            if isinstance(value, str) and bool in (kinds.get(name), *get_args(kinds.get(name)))
            else value
            for name, value in values.items()
        }


METRIC_ALIASES = {"wrong": "line_error_rate"}  # names of metrics in earlier releases


def metric_name(name: str) -> str:
    """Return today's name of a metric."""
    return METRIC_ALIASES.get(name, name)


# YAML has lists, frozen records hold tuples
Listed = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
MetricName = Annotated[str, AfterValidator(metric_name)]
Count = Annotated[int, Field(ge=1)]
Amount = Annotated[int, Field(ge=0, le=10**12)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Layers = Annotated[int, Field(ge=0, le=1000)]


class TokenizerSettings(Settings):
    kind: str = setting("bpe", "algorithm of the vocabulary")
    size: int = setting(8000, "of the vocabulary: subwords, or at most so many words or characters", ge=8, le=1_000_000)
    joint: bool = setting(True, "one vocabulary for both sides")
    target_kind: str = setting("", "of the target side, if there are two vocabularies; by default as the source side")
    target_size: int = setting(0, "likewise; 0: as the source side", ge=0, le=1_000_000)
    byte_fallback: bool = setting(True, "spell in bytes what no subword covers, so that nothing is lost")
    sampling: Fraction = setting(
        0.0, "bpe: probability of skipping a merge; unigram: spread of the samples; at training only"
    )


class SampleSettings(Settings):
    """How the next token is sampled; each setting is an entry of FILTERS in decoding/sampling.py."""

    temperature: float = setting(1.0, "below 1: likely tokens become likelier; 0: the likeliest", ge=0, le=100)
    top_k: Amount = setting(0, "sample from the so many likeliest tokens; 0: from all")
    top_p: float = setting(1.0, "sample from the likeliest tokens that together have this probability", gt=0, le=1)


class SearchSettings(SampleSettings):
    """How answers are looked for. What is drawn at random is for the methods sample and mbr."""

    method: str = setting("beam", "decoding method")
    beam: int = setting(4, "hypotheses kept at each step; 1 is greedy", ge=1, le=1000)
    nbest: int = setting(1, "hypotheses returned for each line", ge=1, le=1000)
    length_norm: str = setting("length", "score = logp / length ** length_penalty, and so on")
    length_penalty: float = setting(1.0, "exponent of the length normalization", ge=0, le=10)
    coverage: float = setting(0.0, "weight of the coverage penalty (Wu et al., 2016)", ge=0, le=100)
    stop: str = setting("enough", "when a beam is done")
    no_repeat: int = setting(0, "no n-gram of so many tokens is repeated; 0 is off", ge=0, le=1000)
    min_ratio: float = setting(0.0, "output tokens >= min_ratio * source tokens", ge=0, le=100)
    max_ratio: float = setting(2.0, "output tokens <= max_ratio * source tokens + max_extra", gt=0, le=100)
    max_extra: int = setting(16, "see max_ratio", ge=0, le=10_000)
    seed: Seed = setting(1, "of sampling, together with the text of the line")
    samples: int = setting(32, "mbr: hypotheses sampled; the one most similar to the others wins", ge=1, le=10_000)
    candidates: Literal["samples", "beam"] = setting("samples", "mbr: where the candidates come from")
    metric: str = setting("chrf", "mbr: measure of similarity")
    groups: int = setting(4, "diverse: parts of the beam that avoid each other's tokens", ge=1, le=1000)
    diversity: float = setting(0.5, "diverse: penalty of a token that another group has just chosen", ge=0, le=100)
    unknown: str = setting("drop", "of a word vocabulary: what becomes of <unk>")
    scores: bool = setting(True, "compute scores; if false, an engine may leave them out (nan) where that is faster")


LIMITS = ("steps", "epochs", "minutes", "flops")  # of a training run, in TrainSettings


class TrainSettings(Settings):
    seed: Seed = setting(1, "of all randomness in training")
    steps: Amount = setting(100_000, "limits: whichever comes first; 0 is no limit")
    epochs: Amount = setting(0, "limit; 0 is none")
    minutes: float = setting(0.0, "limit; 0 is none", ge=0)
    flops: float = setting(
        0.0, "limit, such as 1e15: floating-point operations, as models/flops.py counts them; 0 is none", ge=0
    )
    tokens: int = setting(8192, "of one batch, on the longer side, padding included", ge=64, le=10_000_000)
    accumulate: int = setting(1, "batches per optimizer step", ge=1, le=10_000)
    lr: Positive = setting(5e-4, "peak learning rate")
    warmup: Amount = setting(1000, "steps")
    optimizer: str = setting("adamw", "update rule")
    beta2: Fraction = setting(0.98, "decay of the running mean of squared gradients")
    weight_decay: float = setting(0.0, "of the optimizer", ge=0)
    schedule: str = setting("inverse_sqrt", "of the learning rate after warmup")
    label_smoothing: Fraction = setting(0.1, "probability mass spread over the vocabulary")
    loss: str = setting("chunked", "how it is computed: the fast way, or the reference implementation")
    consistency: str = setting("none", "run every batch twice and train both passes to agree")
    consistency_weight: Positive = setting(1.0, "of the divergence of the two passes, beside the loss")
    cut: Fraction = setting(0.05, "simcut: share of tokens hidden from the second pass")
    clip: float = setting(1.0, "maximum norm of the gradient; 0 is off", ge=0)
    precision: Literal["auto", "float32", "bf16"] = setting("auto", "of matrix products in training")
    device: str = setting("auto", "auto, cpu, cuda, cuda:1, ...")
    compile: Literal["auto"] | bool = setting("auto", "use torch.compile")
    threads: int = setting(0, "0: as PyTorch finds best", ge=0, le=1024)
    parallel: str = setting("ddp", "under torchrun, each process holds the full model or a shard of it")
    timeout: float = setting(30.0, "minutes that processes wait for each other", gt=0, le=100_000)
    ema: Fraction = setting(0.0, "decay of the exponential moving average of the weights; 0 is off")
    average: Amount = setting(0, "the model is the mean of this many best checkpoints; 0 or 1: the best one")
    keep: Count = setting(3, "best checkpoints kept, beside the last")
    validate_every: Amount = setting(1000, "steps; 0 is only at the end")
    validate_lines: Amount = setting(500, "dev pairs that are translated and scored; 0: only the loss")
    metric: MetricName = setting(
        "auto", "ranks checkpoints: loss, a metric, or auto: the first of data.metrics, else the task's own"
    )
    patience: Amount = setting(0, "validations without improvement before stopping; 0 is off")
    save_every: Count = setting(1000, "steps")
    log_every: Count = setting(50, "steps")
    tensorboard: bool = setting(False, "write curves to RUN/tensorboard, beside metrics.jsonl")
    freeze: Annotated[tuple[str, ...], Listed] = setting(
        (), "names of parameters that are not trained, such as encoder.*"
    )

    @property
    def limit(self) -> str:
        """When training ends, in words: '1 step', '10 minutes or 5 epochs'."""
        limits = [(getattr(self, name), name) for name in LIMITS if getattr(self, name)]
        return " or ".join(f"{value:g} {name.removesuffix('s') if value == 1 else name}" for value, name in limits)


def override(values: dict[str, Any], item: str) -> None:
    """Set `a.b=c` in nested dicts; the right side is YAML."""
    path, equals, value = item.partition("=")
    if not equals or not path:
        raise UserError(f"{item!r} is not a setting; write it as name.name=value, such as train.steps=1000")
    *parents, leaf = path.split(".")
    spot = values
    for name in parents:
        inner = spot[name] = {} if spot.get(name) is None else spot[name]
        if not isinstance(inner, dict):
            raise UserError(f"{item!r} sets something inside {name!r}, which is {shorten_value(inner)} in the recipe")
        spot = inner
    spot[leaf] = parse_yaml(value, item)


def build(cls: type[S], values: Any, where: str = "", line_of: Mapping[str, int] | None = None) -> S:
    """Fill a record from nested dicts. The first fault becomes a sentence with the key, the value and the remedy."""
    if not isinstance(values, dict):
        raise UserError(f"{where or 'the recipe'} must be settings written as name: value, got {shorten_value(values)}")
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        raise UserError(describe_error(cls, error.errors(), where, line_of or {})) from None


def read_values(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the values of a recipe file, and the line of each key."""
    text = read_text(path, "recipe")
    values = parse_yaml(text, str(path))
    if not isinstance(values, dict):
        raise UserError(f"{path} is not a recipe: it must hold sections such as data:, model: and train:")
    with prefix_errors(path):
        return values, lines_of_keys(text)


@contextmanager
def prefix_errors(source: object) -> Iterator[None]:
    """Name the file in what is wrong with the settings read from it."""
    try:
        yield
    except UserError as fault:
        raise UserError(f"{source}: {fault}") from None


def to_yaml(settings: Settings) -> str:
    return as_yaml(settings.model_dump(mode="json"))

"""Settings: frozen pydantic models, read from YAML files and `a.b=c` overrides, with helpful error messages.

A field of a subclass of `Settings` is a setting with its default and description. The classes of models, modules and
decoding methods are in the modules that use them. `TrainSettings` and `SampleSettings` are here, because reading them
must not import PyTorch.
Values that name a registry entry (`norm`, `optimizer`, ...) are strings; `get_entry` checks them where the registry is
defined, so that adding a variant changes one file.

YAML is read without the surprises of YAML 1.1: 1e-3 is a number; 1:30, no, on and 2026-01-01 are text. A repeated key
is an error, and errors name the line. For an unknown name, the message suggests the corresponding name in Dragoman if
other toolkits use the unknown one (synonyms.tsv), or else the name with the most similar spelling.
"""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from dragoman.errors import UserError


class _Loader(yaml.SafeLoader):
    """Read plain scalars by the core schema of YAML 1.2, with two exceptions.

    0b101 and 1_000 are numbers, as in YAML 1.1. Numbers with a leading zero, such as 010 and 0o17, are text: YAML 1.1
    and 1.2 read 010 as different numbers, and labels such as 007 are text.
    """

    yaml_implicit_resolvers = {}  # noqa: RUF012 - PyYAML copies the dict before adding to it


class _Dumper(yaml.SafeDumper):
    """Quote strings that YAML 1.1 or `_Loader` would not read as strings, and escape rare line separators."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style='"' if set(text) & set("\x85\u2028\u2029") else None
    ),
)
_EXPONENT = r"[eE][-+]?[0-9]+"
_SCALARS = {  # type of an unquoted scalar -> its pattern and its possible first characters
    "bool": (r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    "int": (r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0b[01_]+)", [*"-+0123456789"]),
    "float": (
        rf"[-+]?([0-9][0-9_]*\.[0-9_]*({_EXPONENT})?|[0-9][0-9_]*{_EXPONENT}|\.[0-9][0-9_]*({_EXPONENT})?)"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        [*"-+.0123456789"],
    ),
    "null": (r"~|null|Null|NULL|", [*"~nN", ""]),
    "merge": (r"<<", ["<"]),
}
for _name, (_pattern, _first) in _SCALARS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(rf"^({_pattern})$"), _first)


def parse_yaml(text: str, name: str) -> Any:
    """Return the value of a YAML text; `name` is the name of the text in error messages."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        character = repr(chr(error.character))
        raise UserError(f"{name} line {line} is not valid YAML: it contains the character {character}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        raise UserError(f"{name}{where} is not valid YAML: {getattr(error, 'problem', None) or error}") from None
    except RecursionError:
        raise UserError(f"{name} is not valid YAML: it is nested too deeply") from None
    except (ValueError, LookupError, AttributeError) as error:  # a value that does not match its tag, such as !!int x
        raise UserError(f"{name} is not valid YAML: it contains a value that cannot be read ({error})") from None


def find_key_lines(text: str) -> dict[str, int]:
    """Return the line number of each key, such as model.kind, for error messages; refuse repeated keys."""
    key_lines: dict[str, int] = {}
    visited: set[int] = set()  # an alias refers to an earlier node, which may even contain the alias

    def walk(node: yaml.Node | None, prefix: str) -> None:
        if not isinstance(node, yaml.CollectionNode) or id(node) in visited:
            return
        visited.add(id(node))
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                name, line = f"{prefix}{key.value}", key.start_mark.line + 1
                if name in key_lines:
                    raise UserError(f"{name!r} is set twice, on lines {key_lines[name]} and {line}; keep one of them")
                key_lines[name] = line
                walk(value, name + ".")
        else:
            for i, value in enumerate(node.value):
                walk(value, f"{prefix}{i}.")

    walk(yaml.compose(text, Loader=_Loader), "")
    return key_lines


def read_text(path: Path, what: str) -> str:
    """Return the text of a file; `what` is the kind of file in error messages."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"there is no {what} file {str(path)!r}") from None
    except IsADirectoryError:
        raise UserError(f"{str(path)!r} is a folder; name a {what} file") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UserError(f"{str(path)!r} is not UTF-8 text (line {line}), so it cannot be a {what} file") from None
    except OSError as error:
        raise UserError(f"the {what} file {str(path)!r} cannot be read: {error.strerror}") from None


def format_yaml(values: dict[str, Any]) -> str:
    """Return YAML that `parse_yaml` reads as the same values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


EXPECTED = {  # type of a pydantic error -> our text after "should be", where pydantic's is unclear
    "model_type": "settings written as name: value",
    "dict_type": "settings written as name: value",
    "missing": "set",
    "tuple_type": "a list",
    "too_long": "a list of {max_length}",
    "value_error": "{error}",
}
_SHORT = reprlib.Repr()  # shortens long values in messages
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 200, 200


def read_synonyms(kind: str) -> dict[str, str]:
    """Read synonyms.tsv; return a dict from names in other toolkits and papers to names in Dragoman.

    `kind` is "setting" or "value".
    """
    text = Path(__file__).with_name("synonyms.tsv").read_text(encoding="utf-8")
    rows = [line.split("\t") for line in text.splitlines() if line.startswith(kind)]
    return {theirs: ours for _, ours, names in rows for theirs in names.split()}


SETTING_SYNONYMS, VALUE_SYNONYMS = read_synonyms("setting"), read_synonyms("value")


def suggest_name(name: str, names: Iterable[str]) -> str:
    """Return '; did you mean ...?' with the one of `names` that is a synonym or has a similar spelling, or ""."""
    entries = [entry for entry in names if entry]
    synonym = VALUE_SYNONYMS.get(str(name).lower(), "")
    if name not in entries and synonym in entries:
        return f"; did you mean {synonym!r}?"
    similar = difflib.get_close_matches(str(name), entries, 1, cutoff=0.5)
    return f"; did you mean {similar[0]!r}?" if similar else ""


def describe_error(
    cls: type[BaseModel], errors: Any, where: str, key_lines: Mapping[str, int], root: type[BaseModel]
) -> str:
    """Return a message about the first of pydantic's errors: the key, the value and what was expected.

    `cls` is the settings class that was validated, `where` the name of its section in `root`, the whole recipe.
    """
    first = errors[0]
    if isinstance(error := first.get("ctx", {}).get("error"), UserError):
        return str(error)
    path = _path(first)
    key = ".".join([*([where] if where else []), *path])
    line = f" (line {key_lines[key]})" if key in key_lines else ""
    if first["type"] == "extra_forbidden":
        return _describe_unknown(cls, first["loc"], key, line, root)
    expected = []  # several if the type of the setting is a union: pydantic reports an error for each member
    for item in errors:
        if _path(item) == path:
            message = str(item["msg"]).removeprefix("Input should be ")
            template = EXPECTED.get(item["type"])
            expected.append(template.format(**item.get("ctx", {})) if template else message[:1].lower() + message[1:])
    return f"{key}{line}: should be {' or '.join(expected)}, got {shorten_value(first['input'])}"


def _describe_unknown(cls: type[BaseModel], location: Iterable[Any], key: str, line: str, root: type[BaseModel]) -> str:
    """Return a message about a setting that does not exist.

    It suggests the setting that has this name in other toolkits, or a setting of this name in another section, or one
    with a similar name.
    """
    from dragoman.config.reference import load_settings_reference  # here, because reference.py imports this module

    *parents, name = map(str, location)
    for parent in parents:  # find the class of the section that the setting is in; parents are keys and list indices
        if parent in cls.model_fields:
            cls = next(_find_classes(cls.model_fields[parent].annotation), cls)
    section, names = key.rpartition(".")[0], list(cls.model_fields)
    synonym = SETTING_SYNONYMS.get(name.lower().replace("-", "_"), "")
    synonym_section, _, setting = synonym.rpartition(".")
    if setting and (setting in names if synonym_section in ("", section) else synonym_section in root.model_fields):
        suggested = [synonym]
    else:
        known = load_settings_reference()["transformer"]  # the settings of the default kind of model
        elsewhere = [s for s in known if s.section in root.model_fields and s.section != section]
        suggested = [s.path for s in elsewhere if s.name == name]
    hint = f"; did you mean {' or '.join(map(repr, suggested))}?" if suggested else suggest_name(name, names)
    kind = cls.model_fields.get("kind")
    condition = f"with {section}.kind={kind.default} " if kind and get_origin(kind.annotation) is Literal else ""
    return f"{condition}there is no setting {key!r}{line}{hint} (there are: {', '.join(names)})"


def _path(error: Any) -> list[str]:
    """Return the keys that lead to the error, without the parts that pydantic adds for unions and validators."""
    *parents, last = map(str, error["loc"] or [""])
    added = ("literal[", "function-", "bool", "tuple[")  # prefixes of the parts that pydantic adds
    keys = [part for part in parents if not part.startswith(added)]
    return [*keys, last] if error["type"] == "extra_forbidden" or (last and not last.startswith(added)) else keys


def _find_classes(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the settings classes inside the type annotation of a field, such as CorpusSettings in a tuple of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    else:
        for inner in get_args(annotation):
            yield from _find_classes(inner)


def shorten_value(value: Any) -> str:
    return _SHORT.repr(value)


V = TypeVar("V")
S = TypeVar("S", bound="Settings")
BOOL_WORDS = {"yes": True, "on": True, "no": False, "off": False}


Registries = dict[str, Mapping[str, Any]]  # name of a setting -> registry of its values


def get_entry(registry: Mapping[str, V], name: str, what: str) -> V:
    """Return the entry called `name`, or raise a UserError that suggests a similar name and lists all."""
    if name in registry:
        return registry[name]
    suggestion = suggest_name(name, registry)
    raise UserError(f"there is no {what} called {name!r}{suggestion} (there are: {', '.join(registry)})")


def check_names(registries: Registries, settings: object, where: str) -> None:
    """Raise a UserError if one of these settings is not the name of an entry of its registry."""
    for name, registry in registries.items():
        get_entry(registry, getattr(settings, name), f"{where}.{name}")


def setting(default: V, description: str, **limits: float) -> V:
    """Return a pydantic field with a default, a description and, for a number, limits such as `ge` and `lt`."""
    field: V = Field(default=default, description=description, **limits)  # type: ignore[call-overload]
    return field


class Settings(BaseModel):
    """A section of a recipe, or a part of one. It is frozen, and unknown settings are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _read_yes_and_no(cls, values: Any) -> Any:
        """Accept yes, no, on and off where true or false is meant; elsewhere, such as in a tag, they are text."""
        if not isinstance(values, dict):
            return values
        types = {name: field.annotation for name, field in cls.model_fields.items()}
        return {
            name: BOOL_WORDS.get(value.lower(), value)
            if isinstance(value, str) and bool in (types.get(name), *get_args(types.get(name)))
            else value
            for name, value in values.items()
        }


METRIC_ALIASES = {"wrong": "line_error_rate"}  # name of a metric in earlier releases -> its current name


def update_metric_name(name: str) -> str:
    """Return the current name of a metric, given that name or one of an earlier release."""
    return METRIC_ALIASES.get(name, name)


# Converts a list in YAML to a tuple, so that settings are hashable.
AsTuple = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
MetricName = Annotated[str, AfterValidator(update_metric_name)]
Count = Annotated[int, Field(ge=1)]
Amount = Annotated[int, Field(ge=0, le=10**12)]  # a Count, or 0, which usually means "off" or "no limit"
Fraction = Annotated[float, Field(ge=0, lt=1)]
InclusiveFraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Layers = Annotated[int, Field(ge=0, le=1000)]


class SampleSettings(Settings):
    """The settings of sampling. Each of them is the name of a filter in FILTERS (decoding/sampling.py)."""

    temperature: float = setting(1.0, "sampling temperature; below 1 favours likely tokens, 0 is greedy", ge=0, le=100)
    top_k: Amount = setting(0, "sample from this number of likeliest tokens; 0: from all tokens")
    top_p: float = setting(1.0, "sample from the likeliest tokens that together have this probability", gt=0, le=1)


LIMITS = ("steps", "epochs", "minutes", "flops")  # the settings that limit training; the first limit reached stops it


class TrainSettings(Settings):
    """The `train` section of a recipe."""

    seed: Seed = setting(1, "seed of all randomness in training")
    steps: Amount = setting(100_000, "stop after this number of optimizer steps; 0: no limit")
    epochs: Amount = setting(0, "stop after this number of epochs; 0: no limit")
    minutes: float = setting(0.0, "stop after this number of minutes; 0: no limit", ge=0)
    flops: float = setting(0.0, "stop after this number of floating-point operations, such as 1e15; 0: no limit", ge=0)
    tokens: int = setting(8192, "tokens per batch on the longer side, including padding", ge=64, le=10_000_000)
    accumulate: int = setting(1, "batches per optimizer step (gradient accumulation)", ge=1, le=10_000)
    lr: Positive = setting(5e-4, "peak learning rate")
    warmup: Amount = setting(1000, "steps of learning-rate warmup")
    optimizer: str = setting("adamw", "optimizer")
    optimizer_options: dict[str, float] = setting({}, "options of the optimizer, such as {momentum: 0.9} for muon")
    beta2: Fraction = setting(0.98, "decay of the moving average of squared gradients in Adam")
    weight_decay: float = setting(0.0, "weight decay of the optimizer", ge=0)
    schedule: str = setting("inverse_sqrt", "learning-rate schedule after the warmup")
    label_smoothing: Fraction = setting(0.1, "label smoothing: probability mass spread over the vocabulary")
    loss: str = setting("chunked", "implementation of the loss: chunked is fast, plain is the reference implementation")
    consistency: str = setting("none", "train two passes over a batch to agree: rdrop (other dropout), simcut (`cut`)")
    consistency_weight: Positive = setting(1.0, "weight of the divergence between the two passes in the loss")
    cut: Fraction = setting(0.05, "consistency=simcut: fraction of tokens whose embeddings are 0 in the second pass")
    mask_copied: Fraction = setting(
        0.0, "probability that a word in both source and target is <unk> in both; teaches a copying model unknown words"
    )
    clip: float = setting(1.0, "maximum gradient norm; 0: no clipping", ge=0)
    precision: Literal["auto", "float32", "bf16"] = setting("auto", "precision of matrix products in training")
    device: str = setting("auto", "device to train on: auto, cpu, cuda, cuda:1, ...")
    compile: Literal["auto"] | bool = setting("auto", "use torch.compile")
    threads: int = setting(0, "number of CPU threads; 0: chosen by PyTorch", ge=0, le=1024)
    parallel: str = setting("ddp", "under torchrun, each process holds the full model (ddp) or a shard of it (fsdp)")
    timeout: float = setting(30.0, "minutes that processes wait for each other", gt=0, le=100_000)
    ema: Fraction = setting(0.0, "decay of the exponential moving average of the weights; 0: off")
    average: Amount = setting(0, "the final model is the mean of this many best checkpoints; 0 or 1: the best one")
    keep: Count = setting(3, "number of best checkpoints to keep, besides the last one")
    validate_every: Amount = setting(1000, "steps between validations; 0: only at the end")
    validate_lines: Amount = setting(500, "number of dev pairs to translate and score; 0: only the loss")
    metric: MetricName = setting(
        "auto", "metric that ranks checkpoints; auto: the first of data.metrics, or the task's default"
    )
    patience: Amount = setting(0, "stop after this number of validations without improvement; 0: off")
    save_every: Count = setting(1000, "steps between checkpoints")
    log_every: Count = setting(50, "steps between log entries")
    probe_every: Amount = setting(0, "steps between measurements of gradients and activations in probes.jsonl; 0: off")
    tensorboard: bool = setting(False, "write curves to RUN/tensorboard, in addition to metrics.jsonl")
    freeze: Annotated[tuple[str, ...], AsTuple] = setting(
        (), "names or patterns of parameters that are not trained, such as encoder.*"
    )

    @property
    def limits_text(self) -> str:
        """The limits of training in words, such as '1 step' or '10 minutes or 5 epochs'."""
        limits = [(getattr(self, name), name) for name in LIMITS if getattr(self, name)]
        return " or ".join(f"{value:g} {name.removesuffix('s') if value == 1 else name}" for value, name in limits)


def apply_override(values: dict[str, Any], item: str) -> None:
    """Apply the override `a.b=c` to nested dicts; `c` is parsed as YAML."""
    path, equals, value = item.partition("=")
    if not equals or not path:
        raise UserError(f"{item!r} is not a setting; write it as name.name=value, such as train.steps=1000")
    *parents, leaf = path.split(".")
    section = values
    for name in parents:
        inner = section[name] = {} if section.get(name) is None else section[name]
        if not isinstance(inner, dict):
            raise UserError(f"{item!r}: {name!r} is not a section; the recipe sets it to {shorten_value(inner)}")
        section = inner
    section[leaf] = parse_yaml(value, item)


def parse_settings(
    cls: type[S],
    values: Any,
    *,
    where: str = "",
    key_lines: Mapping[str, int] | None = None,
    root: type[BaseModel] | None = None,
) -> S:
    """Validate nested dicts and return them as settings of class `cls`; raise a UserError about the first error.

    `key_lines` has the line of each key, for the message. If `cls` is a section of a recipe, `where` is the name of the
    section and `root` the class of the recipe.
    """
    if not isinstance(values, dict) and not where:
        raise UserError(f"the recipe must be settings written as name: value, got {shorten_value(values)}")
    try:
        return cls.model_validate(values, context=key_lines)  # `Recipe` parses its sections with the lines
    except ValidationError as error:
        raise UserError(describe_error(cls, error.errors(), where, key_lines or {}, root or cls)) from None


def read_values(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the values of a recipe file, and the line of each key."""
    text = read_text(path, "recipe")
    values = parse_yaml(text, str(path))
    if not isinstance(values, dict):
        raise UserError(f"{path} is not a recipe: it must have sections such as data:, model: and train:")
    with prefix_errors(path):
        return values, find_key_lines(text)


@contextmanager
def prefix_errors(source: object) -> Iterator[None]:
    """Prefix the messages of UserErrors with the file, or other source, that the settings come from."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{source}: {error}") from None


def format_settings(settings: Settings) -> str:
    return format_yaml(settings.model_dump(mode="json"))

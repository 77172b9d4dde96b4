"""Settings: small frozen records in Python, YAML on disk, `a.b=c` on the command line.

Every setting has one default and one description, beside its field; those of the models stand in models/settings.py.
Names that a registry must have (`norm`, `optimizer`, ...) are plain strings here. `pick` checks them where the
registry is known, so that adding a variant touches one file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from dragoman.config.messages import describe_fault, near, short
from dragoman.config.yaml import as_yaml, lines_of_keys, parse_yaml, read_text
from dragoman.errors import UserError

V = TypeVar("V")
S = TypeVar("S", bound="Settings")
BOOL_WORDS = {"yes": True, "on": True, "no": False, "off": False}


def pick(menu: Mapping[str, V], name: str, what: str) -> V:
    """The entry called `name`, or a sentence with the nearest right name and the whole menu."""
    if name in menu:
        return menu[name]
    raise UserError(f"there is no {what} called {name!r}{near(name, menu)} (there are: {', '.join(menu)})")


Menus = dict[str, Mapping[str, Any]]  # by the name of a setting: what it chooses from


def pick_all(menus: Menus, record: object, where: str) -> None:
    """Refuse every setting of a record that is not on its menu."""
    for name, menu in menus.items():
        pick(menu, getattr(record, name), f"{where}.{name}")


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


def _as_list(value: Any) -> Any:
    """One corpus or several as a list. The name of a file alone does not say what is in it."""
    corpora = value if isinstance(value, list) else [value]
    for name in corpora:
        if isinstance(name, str):
            kind = "jsonl" if ".jsonl" in name else "tsv"
            raise ValueError(f"a corpus, such as {{{kind}: {name}}} or {{source: FILE, target: FILE}}")
    return [value] if isinstance(value, dict) else value


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _as_words(value: Any) -> Any:
    """{0: train} names a column by its number, and 1 or true may be a word to look for: here all of them are text."""

    def as_text(word: Any) -> Any:
        if isinstance(word, dict | list):
            return word
        return "" if word is None else str(word).lower() if isinstance(word, bool) else str(word)

    return {as_text(key): as_text(word) for key, word in value.items()} if isinstance(value, dict) else value


METRIC_ALIASES = {"wrong": "line_error_rate"}  # names of metrics in earlier releases


def metric_name(name: str) -> str:
    """Return today's name of a metric."""
    return METRIC_ALIASES.get(name, name)


Listed = BeforeValidator(_as_tuple)  # YAML knows lists, frozen records hold tuples
MetricName = Annotated[str, AfterValidator(metric_name)]
Count = Annotated[int, Field(ge=1)]
Amount = Annotated[int, Field(ge=0, le=10**12)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Layers = Annotated[int, Field(ge=0, le=1000)]


FILES = ("source", "target", "tsv", "jsonl", "dialogue", "text", "conllu")  # settings of a corpus that name a file


class CorpusSettings(Settings):
    """Where pairs come from: two plain files, one TSV or JSONL file, dialogues, or the built-in phrasebook.

    A language model takes plain text, or the targets of pairs.
    """

    source: str = Field(default="", description="plain text file of sources, one sentence a line")
    target: str = Field(default="", description="plain text file of targets, line by line with the source")
    tsv: str = Field(default="", description="file of tab-separated columns")
    jsonl: str = Field(default="", description="file with one JSON object a line")
    dialogue: str = Field(
        default="",
        description='file of numbered turns, "3 a question<tab>the answer"; the source is the dialogue so far',
    )
    text: str = Field(default="", description="plain text file for a language model")
    conllu: str = Field(
        default="", description="dependency trees of the sources that are not empty, in order; for model.position=tree"
    )
    part: Annotated[tuple[Share, Share], Listed] = Field(
        default=(0.0, 1.0), description="of a text, by its characters: from here to there"
    )
    columns: Annotated[tuple[Amount, Amount], Listed] = Field(
        default=(0, 1), description="of a TSV file: source, target"
    )
    keys: Annotated[tuple[str, str], Listed] = Field(
        default=("source", "target"), description="of a JSONL file: source, target"
    )
    references: Annotated[tuple[str, ...], Listed] = Field(
        default=(), description="of a JSONL file to test on: keys of all reference translations"
    )
    where: Annotated[dict[str, str], BeforeValidator(_as_words)] = Field(
        default={}, description="TSV column or JSONL key: the word it must hold"
    )
    source_words: Amount = Field(
        default=0, description="read only so many words of each source, such as a long document; 0: all"
    )
    phrasebook: Amount = Field(default=0, description="pairs to generate from the built-in phrasebook; 0: none")
    split: str = Field(default="", description="of the phrasebook; by default the one that the recipe puts it under")
    seed: Seed = Field(default=1, description="of the phrasebook")
    weight: Annotated[float, Field(gt=0, le=1000)] = Field(
        default=1.0, description="2.0: every pair twice an epoch; 0.5: every other pair"
    )
    reverse: bool = Field(default=False, description="swap source and target")
    tag: str = Field(
        default="", description="put before every source, such as de for the target language; a space between several"
    )

    @property
    def files(self) -> list[str]:
        return [path for name in FILES if (path := getattr(self, name))]

    @property
    def shown(self) -> str:
        """What it is called where people read of it."""
        return (" and ".join(self.files) or f"phrasebook: {self.phrasebook}, seed: {self.seed}") + self.chosen

    @property
    def chosen(self) -> str:
        """Which rows of its file it takes, which part of it, and which way; nothing, where it takes all as it is."""
        rows = [f"{name}: {word}" for name, word in self.where.items()]
        rows += [f"part {list(self.part)}"] if self.part != (0.0, 1.0) else []
        rows += ["reverse"] if self.reverse else []
        rows += [f"tag {self.tag}"] if self.tag else []
        return f" ({', '.join(rows)})" if rows else ""

    def check(self, key: str) -> None:
        given = [name for name in ("source", "tsv", "jsonl", "dialogue", "text", "phrasebook") if getattr(self, name)]
        if len(given) != 1 or bool(self.source) != bool(self.target):
            raise UserError(
                f"{key} needs one of {{source: F, target: F}}, {{tsv: F}}, {{jsonl: F}}, {{dialogue: F}}, {{text: F}} "
                f"or {{phrasebook: N}}, got {self.model_dump(exclude_defaults=True) or 'nothing'}"
            )
        pairs = ("source", "tsv", "jsonl", "dialogue")
        works = {"where": ("tsv", "jsonl"), "references": ("jsonl",), "conllu": pairs, "source_words": pairs}
        for name, kinds in works.items():
            if getattr(self, name) and given[0] not in kinds:
                raise UserError(f"{key}: {name} works with {' and '.join(kinds)}, not with {given[0]}")
        if self.part != (0.0, 1.0) and given[0] != "text":
            raise UserError(
                f"{key}: part works with text, not with {given[0]}; dragoman data split makes files of parts"
            )
        if self.part[0] >= self.part[1]:
            raise UserError(
                f"{key}: part goes from a lower share to a higher, such as [0.0, 0.9], got {list(self.part)}"
            )
        self.check_way(key, given[0])

    def check_way(self, key: str, kind: str) -> None:
        if self.reverse and (kind == "text" or self.references or self.conllu):
            other = "text" if kind == "text" else "references" if self.references else "conllu"
            raise UserError(f"{key}: reverse turns pairs round, which {other} does not allow; leave one of them out")
        if self.tag != " ".join(self.tag.split()):
            raise UserError(f"{key}: tag is a word, or words with one space between them, got {self.tag!r}")
        if self.tag and kind == "text":
            raise UserError(f"{key}: tag stands before a source, and text has none; leave it out")


SPLITS = ("train", "dev", "test")
Corpora = Annotated[tuple[CorpusSettings, ...], Listed, BeforeValidator(_as_list)]


class DataSettings(Settings):
    train: Corpora = Field(default=(), description="corpora to train on")
    dev: Corpora = Field(default=(), description="corpora to validate on")
    test: Corpora = Field(default=(), description="corpora that `dragoman evaluate RUN` scores, each by itself")
    metrics: Annotated[tuple[MetricName, ...], Listed] = Field(
        default=(), description="metrics of evaluation; by default those of the task"
    )
    direction: str = Field(default="en-de", description="of the phrasebook")
    both_ways: bool = Field(
        default=False, description="train on every pair in both directions, as a start for another run"
    )
    documents: Literal["file", "line"] = Field(
        default="file", description="of a language model: each file is one text, or each line"
    )
    max_length: Count = Field(
        default=512, description="tokens on either side; longer pairs are left out of training and counted"
    )
    cache: str = Field(
        default="~/.cache/dragoman", description="folder for token ids, kept once per corpus and tokenizer"
    )

    def check(self) -> None:
        """Refuse corpora that name no files, or files and options that do not go together."""
        for split in SPLITS:
            for corpus in getattr(self, split):
                corpus.check(f"data.{split}")

    def resolve_paths(self, folder: Path) -> DataSettings:
        """Return the same with absolute paths: a file is looked up in the working directory, then in `folder`."""

        def resolve(name: str) -> str:
            here = Path(os.path.expanduser(name))
            beside = folder / here
            return str((beside if not os.path.exists(here) and os.path.exists(beside) else here).absolute())

        def resolve_all(corpus: CorpusSettings) -> CorpusSettings:
            return corpus.model_copy(update={n: resolve(path) for n in FILES if (path := getattr(corpus, n))})

        return self.model_copy(update={split: tuple(map(resolve_all, getattr(self, split))) for split in SPLITS})

    @property
    def learned(self) -> tuple[CorpusSettings, ...]:
        """The corpora that a model is trained on."""
        turned = (c.model_copy(update={"reverse": not c.reverse}) for c in self.train if self.both_ways)
        return (*self.train, *turned)

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags that sources of training have; "" where a corpus has none."""
        return tuple(dict.fromkeys(corpus.tag for corpus in self.train))


class TokenizerSettings(Settings):
    kind: str = Field(default="bpe", description="algorithm of the vocabulary")
    size: Annotated[int, Field(ge=8, le=1_000_000)] = Field(
        default=8000, description="of the vocabulary: subwords, or at most so many words or characters"
    )
    joint: bool = Field(default=True, description="one vocabulary for both sides")
    target_kind: str = Field(
        default="", description="of the target side, if there are two vocabularies; by default as the source side"
    )
    target_size: Annotated[int, Field(ge=0, le=1_000_000)] = Field(
        default=0, description="likewise; 0: as the source side"
    )
    byte_fallback: bool = Field(
        default=True, description="spell in bytes what no subword covers, so that nothing is lost"
    )
    sampling: Fraction = Field(
        default=0.0,
        description="bpe: probability of skipping a merge; unigram: spread of the samples; at training only",
    )


class SampleSettings(Settings):
    """How the next token is drawn; each name stands on the menu FILTERS of decoding/sampling.py."""

    temperature: Annotated[float, Field(ge=0, le=100)] = Field(
        default=1.0, description="below 1: likely tokens become likelier; 0: the likeliest"
    )
    top_k: Amount = Field(default=0, description="sample from the so many likeliest tokens; 0: from all")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="sample from the likeliest tokens that together have this probability"
    )


class SearchSettings(SampleSettings):
    """How answers are looked for. What is drawn at random is for the methods sample and mbr."""

    method: str = Field(default="beam", description="decoding method")
    beam: Annotated[int, Field(ge=1, le=1000)] = Field(
        default=4, description="hypotheses kept at each step; 1 is greedy"
    )
    nbest: Annotated[int, Field(ge=1, le=1000)] = Field(default=1, description="hypotheses returned for each line")
    length_norm: str = Field(default="length", description="score = logp / length ** length_penalty, and so on")
    length_penalty: Annotated[float, Field(ge=0, le=10)] = Field(
        default=1.0, description="exponent of the length normalization"
    )
    coverage: Annotated[float, Field(ge=0, le=100)] = Field(
        default=0.0, description="weight of the coverage penalty (Wu et al., 2016)"
    )
    stop: str = Field(default="enough", description="when a beam is done")
    no_repeat: Annotated[int, Field(ge=0, le=1000)] = Field(
        default=0, description="no n-gram of so many tokens is repeated; 0 is off"
    )
    min_ratio: Annotated[float, Field(ge=0, le=100)] = Field(
        default=0.0, description="output tokens >= min_ratio * source tokens"
    )
    max_ratio: Annotated[float, Field(gt=0, le=100)] = Field(
        default=2.0, description="output tokens <= max_ratio * source tokens + max_extra"
    )
    max_extra: Annotated[int, Field(ge=0, le=10_000)] = Field(default=16, description="see max_ratio")
    seed: Seed = Field(default=1, description="of sampling, together with the text of the line")
    samples: Annotated[int, Field(ge=1, le=10_000)] = Field(
        default=32, description="mbr: hypotheses sampled; the one most similar to the others wins"
    )
    candidates: Literal["samples", "beam"] = Field(default="samples", description="mbr: where the candidates come from")
    metric: str = Field(default="chrf", description="mbr: measure of similarity")
    groups: Annotated[int, Field(ge=1, le=1000)] = Field(
        default=4, description="diverse: parts of the beam that avoid each other's tokens"
    )
    diversity: Annotated[float, Field(ge=0, le=100)] = Field(
        default=0.5, description="diverse: penalty of a token that another group has just chosen"
    )
    unknown: str = Field(default="drop", description="of a word vocabulary: what becomes of <unk>")
    scores: bool = Field(
        default=True, description="compute scores; if false, an engine may leave them out (nan) where that is faster"
    )


LIMITS = ("steps", "epochs", "minutes", "flops")  # of a training run, in TrainSettings


class TrainSettings(Settings):
    seed: Seed = Field(default=1, description="of all randomness in training")
    steps: Amount = Field(default=100_000, description="limits: whichever comes first; 0 is no limit")
    epochs: Amount = Field(default=0, description="limit; 0 is none")
    minutes: Annotated[float, Field(ge=0)] = Field(default=0.0, description="limit; 0 is none")
    flops: Annotated[float, Field(ge=0)] = Field(
        default=0.0,
        description="limit, such as 1e15: floating-point operations, as models/flops.py counts them; 0 is none",
    )
    tokens: Annotated[int, Field(ge=64, le=10_000_000)] = Field(
        default=8192, description="of one batch, on the longer side, padding included"
    )
    accumulate: Annotated[int, Field(ge=1, le=10_000)] = Field(default=1, description="batches per optimizer step")
    lr: Positive = Field(default=5e-4, description="peak learning rate")
    warmup: Amount = Field(default=1000, description="steps")
    optimizer: str = Field(default="adamw", description="update rule")
    beta2: Fraction = Field(default=0.98, description="decay of the running mean of squared gradients")
    weight_decay: Annotated[float, Field(ge=0)] = Field(default=0.0, description="of the optimizer")
    schedule: str = Field(default="inverse_sqrt", description="of the learning rate after warmup")
    label_smoothing: Fraction = Field(default=0.1, description="probability mass spread over the vocabulary")
    loss: str = Field(
        default="chunked", description="how it is computed: the fast way, or the reference implementation"
    )
    consistency: str = Field(default="none", description="run every batch twice and train both passes to agree")
    consistency_weight: Positive = Field(
        default=1.0, description="of the divergence of the two passes, beside the loss"
    )
    cut: Fraction = Field(default=0.05, description="simcut: share of tokens hidden from the second pass")
    clip: Annotated[float, Field(ge=0)] = Field(default=1.0, description="maximum norm of the gradient; 0 is off")
    precision: Literal["auto", "float32", "bf16"] = Field(default="auto", description="of matrix products in training")
    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:1, ...")
    compile: Literal["auto"] | bool = Field(default="auto", description="use torch.compile")
    threads: Annotated[int, Field(ge=0, le=1024)] = Field(default=0, description="0: as PyTorch finds best")
    parallel: str = Field(
        default="ddp", description="under torchrun, each process holds the full model or a shard of it"
    )
    timeout: Annotated[float, Field(gt=0, le=100_000)] = Field(
        default=30.0, description="minutes that processes wait for each other"
    )
    ema: Fraction = Field(default=0.0, description="decay of the exponential moving average of the weights; 0 is off")
    average: Amount = Field(
        default=0, description="the model is the mean of this many best checkpoints; 0 or 1: the best one"
    )
    keep: Count = Field(default=3, description="best checkpoints kept, beside the last")
    validate_every: Amount = Field(default=1000, description="steps; 0 is only at the end")
    validate_lines: Amount = Field(
        default=500, description="dev pairs that are translated and scored; 0: only the loss"
    )
    metric: MetricName = Field(
        default="auto",
        description="ranks checkpoints: loss, a metric, or auto: the first of data.metrics, else the task's own",
    )
    patience: Amount = Field(default=0, description="validations without improvement before stopping; 0 is off")
    save_every: Count = Field(default=1000, description="steps")
    log_every: Count = Field(default=50, description="steps")
    tensorboard: bool = Field(default=False, description="write curves to RUN/tensorboard, beside metrics.jsonl")
    freeze: Annotated[tuple[str, ...], Listed] = Field(
        default=(), description="names of parameters that are not trained, such as encoder.*"
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
            raise UserError(f"{item!r} sets something inside {name!r}, which is {short(inner)} in the recipe")
        spot = inner
    spot[leaf] = parse_yaml(value, item)


def build(cls: type[S], values: Any, where: str = "", line_of: Mapping[str, int] | None = None) -> S:
    """Fill a record from nested dicts. The first fault becomes a sentence with the key, the value and the remedy."""
    if not isinstance(values, dict):
        raise UserError(f"{where or 'the recipe'} must be settings written as name: value, got {short(values)}")
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        raise UserError(describe_fault(cls, error.errors(), where, line_of or {})) from None


def read_values(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the values of a recipe file, and the line of each key."""
    text = read_text(path, "recipe")
    values = parse_yaml(text, str(path))
    if not isinstance(values, dict):
        raise UserError(f"{path} is not a recipe: it must hold sections such as data:, model: and train:")
    with prefix_errors(path):
        return values, lines_of_keys(text)


def read_data_section(path: Path) -> DataSettings:
    """Return the data section of a recipe file, with the paths of its corpora resolved."""
    values, lines = read_values(path)
    with prefix_errors(path):
        data = build(DataSettings, values.get("data") or {}, where="data", line_of=lines)
        data.check()
    return data.resolve_paths(path.parent)


@contextmanager
def prefix_errors(source: object) -> Iterator[None]:
    """Name the file in what is wrong with the settings read from it."""
    try:
        yield
    except UserError as fault:
        raise UserError(f"{source}: {fault}") from None


def to_yaml(settings: Settings) -> str:
    return as_yaml(settings.model_dump(mode="json"))

"""Import of published models: MarianMT (opus-mt), M2M100 and NLLB folders that `transformers` has saved.

Their token ids differ from ours: our ids 0 to 3 are <pad>, <unk>, <s> and </s>. An `IdMap` has the order in which their
rows of embeddings and of the output bias become ours. They start decoding with <pad> (MarianMT) or </s> (the others).
Our <s> is a copy of that row, and its output bias forbids it as an output; every other token of theirs has one of ours,
so that probabilities are the same.

Languages are tokens of the vocabulary. MarianMT models with several target languages read a token such as `>>fra<<`
before the source. M2M100 and NLLB read the token of the source language before the source, and the target begins with
that of the target language. Both become the tag of a direction (inference/directions.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dragoman.config.settings import parse_settings, parse_yaml
from dragoman.data.corpus import DataSettings
from dragoman.data.sentencepiece_tokenizer import SentencePieceTokenizer
from dragoman.data.tokenizers import Tokenizers, TokenizerSettings
from dragoman.decoding.methods import SearchSettings
from dragoman.errors import UserError
from dragoman.inference.engines.base import TABLES, SupportedValues
from dragoman.io import read_bytes
from dragoman.language_codes import find_code
from dragoman.models.transformer import TransformerSettings
from dragoman.recipe import Recipe, check_model
from dragoman.types import BOS, SPECIALS

FORBIDDEN_LOGIT = -1e4  # output bias of a token that is never an output; finite, as label smoothing needs it
# Their name -> model.activation.
HUGGINGFACE_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "swish": "swish", "silu": "swish"}
MODEL_NAME = re.compile(r"opus-mt-(?:tc-big-)?([a-z]{2,3})-([a-z]{2,3})$", re.IGNORECASE)
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.\-]*/[\w.\-]+")  # owner/name
MARIAN_LANGUAGE, M2M_LANGUAGE = re.compile(r">>(.+)<<"), re.compile(r"__(.+)__")
# Of each model_type; transformers 5 saves tokenizer.json instead. NLLB has no vocab.json.
TOKENIZER_FILES = {
    "marian": ("source.spm", "target.spm", "vocab.json"),
    "m2m_100": ("sentencepiece.bpe.model", "vocab.json (if it has one)"),
}
UNUSED_TOKEN = "<unused-{}>"  # of a row without a token


@dataclass(frozen=True)
class IdMap:
    """Their token id for each of ours, on both sides."""

    source: tuple[int, ...]
    target: tuple[int, ...]


@dataclass(frozen=True)
class PublishedModel:
    """What a folder describes, apart from the weights."""

    recipe: Recipe
    tokenizers: Tokenizers
    id_map: IdMap
    origin: dict[str, str]  # name, licence and architecture, for the model card
    longest_source: int


def is_published(folder: Path) -> bool:
    """Return whether a folder has a published model, and not our own export, which has tokenizer/ or is a Pegasus."""
    if (folder / "tokenizer" / "tokenizer.json").exists():
        return False
    if any((folder / files[0]).exists() for files in TOKENIZER_FILES.values()):
        return True
    return read_json_file(folder / "config.json", required=True).get("model_type") in tuple(TOKENIZER_FILES)


def check_tokenizer_files(folder: Path, model_type: str) -> None:
    """Raise a UserError for a folder without SentencePiece files, as transformers 5 saves it."""
    needed = TOKENIZER_FILES[model_type]
    if not (folder / needed[0]).exists():
        raise UserError(
            f"{str(folder)!r} has neither {needed[0]} nor a folder tokenizer/ with Dragoman's tokenizer; copy "
            f"{', '.join(needed)} from the original model, or tokenizer/ from the run that the model was exported from"
        )


def read_published(
    folder: Path, *, licence: str = "", source_language: str = "", target_language: str = ""
) -> PublishedModel:
    """Read all files of a published model but its weights; raise a UserError for what is unsupported.

    The licence and the languages are read from the folder unless they are given.
    """
    config = read_json_file(folder / "config.json", required=True)
    check_config(config, folder)
    check_tokenizer_files(folder, config["model_type"])
    is_marian = config["model_type"] == "marian"
    tokenizer_config = read_json_file(folder / "tokenizer_config.json")
    if is_marian:
        tokenizers, id_map, is_joint = read_marian_tokenizers(folder, config, tokenizer_config)
    else:
        tokenizers, id_map, is_joint = read_m2m_tokenizers(folder, config, tokenizer_config)
    card = read_front_matter(folder / "README.md")
    written = str(config.get("_name_or_path") or "")
    name = written if HUB_NAME.fullmatch(written) else folder.resolve().name  # it may be a path of another machine
    given = (source_language, target_language)
    languages = guess_model_languages(given, [name, folder.resolve().name], tokenizer_config) if is_marian else ("", "")
    positions = int(get_number(config, "max_position_embeddings", folder / "config.json", 512, minimum=3))
    path = folder / "tokenizer_config.json"
    longest = int(min(get_number(tokenizer_config, "model_max_length", path, positions, minimum=3), positions)) - 2
    values = {ours: config[theirs] for ours, theirs in TABLES["huggingface_config"].items()}
    values |= {
        "kind": "transformer",
        "dropout": get_number(config, "dropout", folder / "config.json", 0.1),
        "activation": HUGGINGFACE_ACTIVATIONS[config["activation_function"]],
        "norm_place": "post" if is_marian else "pre",
        "position": "sinusoidal" if is_marian else "fairseq",
        "tied": config.get("tie_word_embeddings", True),
        "output_bias": True,
    }
    recipe = Recipe(
        data=DataSettings(
            source_language=languages[0],
            # With several target languages, each is named by its token.
            target_language="" if get_languages(tokenizers) else languages[1],
            max_length=longest,
        ),
        tokenizer=TokenizerSettings(kind="sentencepiece", size=max(8, tokenizers.source.size), joint=is_joint),
        model=parse_settings(TransformerSettings, values, where="model"),
        search=read_search(folder, config),
    )
    origin = {"name": name, "licence": licence or read_licence(card), "architecture": config["model_type"]}
    return PublishedModel(check_model(recipe), tokenizers, id_map, origin, longest)


def get_languages(tokenizers: Tokenizers) -> Mapping[str, str]:
    assert isinstance(tokenizers.source, SentencePieceTokenizer)
    return tokenizers.source.languages


def read_json_file(path: Path, *, required: bool = False) -> dict[str, Any]:
    """Return the object in a JSON file; empty if the file is missing and not required."""
    if not required and not path.exists():
        return {}
    values = None
    with suppress(OSError, ValueError, RecursionError):
        values = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise UserError(f"{str(path)!r} is missing or damaged; name a folder that transformers has saved")
    return values


def get_number(
    values: Mapping[str, Any], name: str, path: Path, default: float | None = None, *, minimum: int = 0
) -> float:
    """Return a number from the JSON file `path`; the default if it is missing or null.

    Without a default, the value must be an integer.
    """
    value = values.get(name)
    value = default if value is None else value
    kinds = int if default is None else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not minimum <= value < float("inf"):
        raise UserError(f"{str(path)!r} has {name}={value}, which is no number from {minimum} on; copy the file again")
    return value


def read_vocabulary(path: Path) -> dict[str, int]:
    """Return the ids of tokens; raise a UserError unless each has one of its own and there is <unk>."""
    vocabulary = read_json_file(path, required=True)
    tokens: dict[int, str] = {}
    for token, i in vocabulary.items():
        if type(i) is not int or i < 0 or i in tokens:
            problem = f"that of {tokens[i]!r} too" if type(i) is int and i in tokens else "no id"
            raise UserError(f"{str(path)!r} gives {token!r} the id {i!r}, which is {problem}; copy the file again")
        tokens[i] = token
    if "<unk>" not in vocabulary:
        raise UserError(f"{str(path)!r} has no <unk>; copy the file again")
    return vocabulary


def check_config(config: dict[str, Any], folder: Path) -> None:
    """Raise a UserError if our models do not support a value of config.json."""
    supported: SupportedValues = {
        "model_type": ("marian", "m2m_100"),
        "activation_function": tuple(HUGGINGFACE_ACTIVATIONS),
        "scale_embedding": (True,),
        "normalize_embedding": (False, None),
        "normalize_before": (False, None),
        "add_bias_logits": (False, None),
        # Models that normalize before their sublayers have a last norm in any case.
        "add_final_layer_norm": (False, None) if config.get("model_type") == "marian" else (False, True, None),
        "decoder_attention_heads": (config.get("encoder_attention_heads"),),
        "decoder_ffn_dim": (config.get("encoder_ffn_dim"),),
    }
    for name, choices in supported.items():
        if config.get(name) not in choices:
            choice = " or ".join(str(choice) for choice in choices if choice is not None)
            raise UserError(
                f"{str(folder / 'config.json')!r} has {name}={config.get(name)}, which Dragoman does not support; "
                f"it takes {choice}"
            )
    sizes = ("d_model", "encoder_layers", "decoder_layers", "encoder_attention_heads", "encoder_ffn_dim", "vocab_size")
    for name in (*sizes, "pad_token_id", "eos_token_id"):
        get_number(config, name, folder / "config.json", minimum=int(name in sizes))
    get_number(config, "decoder_start_token_id", folder / "config.json", 0)


def order_tokens(
    tokens: Mapping[int, str], rows: int, pad: int, unk: int, start: int, eos: int
) -> tuple[list[str], list[int]]:
    """Return the tokens in our order, and their id of each: SPECIALS, then all other rows of theirs."""
    first = [pad, unk, start, eos]
    rest = [i for i in range(rows) if i not in (pad, unk, eos)]
    taken = set(SPECIALS)
    symbols = list(SPECIALS)
    for i in rest:
        token = tokens.get(i, UNUSED_TOKEN.format(i))
        while token in taken:  # their <s>, which is not ours
            token = f"{token}'"
        taken.add(token)
        symbols.append(token)
    return symbols, [*first, *rest]


def build_tokenizer(
    spm: bytes, path: Path, tokens: Mapping[int, str], rows: int, ids: Mapping[str, int], **options: Any
) -> tuple[SentencePieceTokenizer, tuple[int, ...]]:
    """Return the tokenizer of one side and their id for each of ours."""
    if max(tokens, default=0) >= rows:
        raise UserError(f"the vocabulary in {str(path.parent)!r} has ids above the model's vocab_size {rows}")
    if outside := [f"{name} {i}" for name, i in ids.items() if type(i) is not int or i >= rows]:
        raise UserError(f"{str(path.parent / 'config.json')!r} has the id of {outside[0]}, above its vocab_size {rows}")
    symbols, order = order_tokens(tokens, rows, ids["pad"], ids["unk"], ids["start"], ids["eos"])
    no_text = {symbol for symbol in symbols if symbol.startswith("<unused-")} | {"<s>'", "<mask>"}
    specials = {*options.pop("specials", ()), *no_text} & set(symbols)
    try:
        return SentencePieceTokenizer.build(spm, symbols, specials=specials, **options), tuple(order)
    except RuntimeError:
        raise UserError(f"{str(path)!r} is not a SentencePiece model; copy it again") from None


def read_marian_tokenizers(
    folder: Path, config: dict[str, Any], tokenizer_config: dict[str, Any]
) -> tuple[Tokenizers, IdMap, bool]:
    """Return both tokenizers of a MarianMT model, the map of ids, and whether both sides have one table."""
    separate = bool(tokenizer_config.get("separate_vocabs", False))
    source_ids = read_vocabulary(folder / "vocab.json")
    target_ids = read_vocabulary(folder / "target_vocab.json") if separate else source_ids
    sides = []
    rows = (config["vocab_size"], config.get("decoder_vocab_size") or config["vocab_size"])
    found = {} if separate else find_languages(source_ids, MARIAN_LANGUAGE)
    for name, vocabulary, count in (("source", source_ids, rows[0]), ("target", target_ids, rows[1])):
        pad = config["pad_token_id"]
        start = config.get("decoder_start_token_id", pad)
        ids = {"pad": pad, "unk": vocabulary["<unk>"], "start": pad if start is None else start}
        ids["eos"] = config["eos_token_id"]
        path = folder / f"{name}.spm"
        tokens = {i: token for token, i in vocabulary.items()}
        specials = [token for token in vocabulary if MARIAN_LANGUAGE.fullmatch(token)]
        options = {"specials": specials, "languages": found if name == "source" else {}}
        sides.append(build_tokenizer(read_bytes(path), path, tokens, count, ids, **options))
    (source, source_order), (target, target_order) = sides
    is_joint = not separate and bool(config.get("share_encoder_decoder_embeddings", True))
    return Tokenizers(source, target), IdMap(source_order, target_order), is_joint


def find_languages(names: Iterable[str], pattern: re.Pattern[str]) -> dict[str, str]:
    """Return the tokens among `names` that stand for languages, by language code."""
    languages: dict[str, str] = {}
    for token in names:
        if (match := pattern.fullmatch(token)) and (code := find_code(match[1])):
            languages.setdefault(code, token)
    return languages


def read_m2m_tokenizers(
    folder: Path, config: dict[str, Any], tokenizer_config: dict[str, Any]
) -> tuple[Tokenizers, IdMap, bool]:
    """Return the tokenizer of an M2M100 or NLLB model (for both sides), the map of ids, and True: one table."""
    path = folder / "sentencepiece.bpe.model"
    spm = read_bytes(path)
    if tokenizer_config.get("legacy_behaviour"):
        raise UserError(
            f"{str(folder / 'tokenizer_config.json')!r} has legacy_behaviour=true, which puts the language after the "
            "source; Dragoman puts it before, as NLLB models are meant to be used: set it to false"
        )
    if (folder / "vocab.json").exists():  # M2M100; the language tokens follow its vocabulary
        vocabulary = read_vocabulary(folder / "vocab.json")
        known, named = TABLES["m2m100_languages"], str(tokenizer_config.get("language_codes") or "m2m100")
        if named not in known:
            path = folder / "tokenizer_config.json"
            raise UserError(f"{str(path)!r} has language_codes={named}; Dragoman knows {' and '.join(known)}")
        tokens = [f"__{code}__" for code in known[named].split()]
        vocabulary |= {token: len(vocabulary) + number for number, token in enumerate(tokens)}
        languages = find_languages(tokens, M2M_LANGUAGE)
    else:
        vocabulary, tokens = read_nllb_vocabulary(spm, path)
        languages = {code: token for token in tokens if (code := find_code(token))}
    ids = {"pad": config["pad_token_id"], "unk": vocabulary["<unk>"], "eos": config["eos_token_id"]}
    start = config.get("decoder_start_token_id")
    ids["start"] = ids["eos"] if start is None else start
    by_id = {i: token for token, i in vocabulary.items()}
    options = {"specials": tokens, "languages": languages, "begins_targets": True}
    tokenizer, order = build_tokenizer(spm, path, by_id, config["vocab_size"], ids, **options)
    return Tokenizers(tokenizer, tokenizer), IdMap(order, order), True


def read_nllb_vocabulary(spm: bytes, path: Path) -> tuple[dict[str, int], list[str]]:
    """Return NLLB's ids by token, and its language tokens.

    As in fairseq, four special tokens precede the pieces of SentencePiece, of which the first three are special too;
    the language tokens follow the pieces.
    """
    import sentencepiece

    try:
        processor: Any = sentencepiece.SentencePieceProcessor(model_proto=spm)
    except RuntimeError:
        raise UserError(f"{str(path)!r} is not a SentencePiece model; copy it again") from None
    size: int = processor.get_piece_size()
    pieces: list[str] = processor.id_to_piece(list(range(size)))
    vocabulary = {token: i for i, token in enumerate(("<s>", "<pad>", "</s>", "<unk>"))}
    vocabulary |= {piece: i + 1 for i, piece in enumerate(pieces) if i >= 3}
    tokens = TABLES["nllb_languages"].split()
    vocabulary |= {token: size + 1 + number for number, token in enumerate(tokens)}
    vocabulary["<mask>"] = size + 1 + len(tokens)
    return vocabulary, tokens


def reorder_rows(tensors: dict[str, Tensor], id_map: IdMap, *, joint: bool) -> dict[str, Tensor]:
    """Return the weights with the rows of embeddings and output in our order, and the bias that forbids <s>."""
    sides: dict[str, Sequence[int]] = dict.fromkeys(TABLES["huggingface_embeddings"], id_map.target)
    if not joint:
        sides["model.encoder.embed_tokens.weight"] = id_map.source
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("embed_positions.weights")}
    bias = tensors.get("final_logits_bias")
    rows = max(id_map.target) + 1
    try:
        bias_V = (torch.zeros(rows) if bias is None else bias.float().flatten())[list(id_map.target)]
        for name, order in sides.items():
            if name in tensors:
                tensors[name] = tensors[name][list(order)]
    except IndexError:
        raise UserError("the weights have fewer rows than config.json's vocab_size; copy the model again") from None
    bias_V[BOS] = FORBIDDEN_LOGIT
    return {**tensors, "final_logits_bias": bias_V[None]}


def read_search(folder: Path, config: dict[str, Any]) -> SearchSettings:
    """Return the search settings that transformers uses for the model, from generation_config.json or config.json."""
    path = folder / "generation_config.json"
    generation = {**config, **read_json_file(path)}

    def get(name: str, default: Any) -> Any:
        value = generation.get(name)
        return default if value is None else value

    early = get("early_stopping", False)
    values = {
        "beam": get("num_beams", 4),
        "length_penalty": get_number(generation, "length_penalty", path, 1.0, minimum=-100),
        "stop": "enough" if early is True else "best" if early == "never" else "ahead",
        "no_repeat": get("no_repeat_ngram_size", 0),
        "max_tokens": max(int(get_number(generation, "max_length", path, 512)) - 1, 1),
        "max_ratio": 3.0,
        "max_extra": 50,
    }
    return parse_settings(SearchSettings, values, where="search")


def read_front_matter(path: Path) -> dict[str, Any]:
    """Return the YAML between the first two lines `---` of a README; empty if there is none."""
    with suppress(OSError, UserError, UnicodeDecodeError):
        parts = re.split(r"^---\s*$", path.read_text(encoding="utf-8"), maxsplit=2, flags=re.MULTILINE)
        if len(parts) == 3 and not parts[0].strip():
            values = parse_yaml(parts[1], str(path))
            return values if isinstance(values, dict) else {}
    return {}


def read_licence(card: Mapping[str, Any]) -> str:
    licence = card.get("license", "")
    return ", ".join(map(str, licence)) if isinstance(licence, list) else str(licence or "")


def guess_model_languages(
    given: tuple[str, str], names: Sequence[str], tokenizer_config: Mapping[str, Any]
) -> tuple[str, str]:
    """Return the languages of a MarianMT model: those given, or those of its tokenizer or its name.

    "" stands for unknown languages and for groups, such as gem: they can be any language.
    """
    named = next((match.groups() for name in names if (match := MODEL_NAME.search(name))), ("", ""))
    configured = [str(tokenizer_config.get(f"{side}_lang") or "") for side in ("source", "target")]
    source, target = (
        one or find_language(other) or find_language(third)
        for one, other, third in zip(given, configured, named, strict=True)
    )
    return source, target


def find_language(text: str) -> str:
    """Return the usual notation of a language code; "" if it is none, or that of a group of languages."""
    return "" if text.lower() in TABLES["language_groups"].split() else find_code(text)

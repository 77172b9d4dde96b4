"""Exchange with Hugging Face `transformers`: export, import, and an engine that checks what was exported.

A post-norm Transformer is exported as MarianMT, a pre-norm one as Pegasus. Both keep the sines and the cosines of a
position in two halves, where ours alternate. So the features of the model are reordered in every weight that reads or
writes them; no number changes. Export and import read the same table, `list_weights`.

Subword tokenizers become a tokenizer.json, so that AutoTokenizer gives our ids: a unigram model as it is, BPE as the
list of merges that leads to the same pieces.

Shapes   C model width   P positions   V vocabulary   B sentences   S source width   N hypotheses   T hypothesis length
         R rows of a step: N, or the beams of all
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from dragoman.config.settings import SearchSettings, build
from dragoman.data.simple_tokenizers import SPACE_MARK
from dragoman.data.subword_tokenizers import ESCAPES, BpeTokenizer, SubwordTokenizer
from dragoman.data.tokenizers import Tokenizers
from dragoman.decoding.protocol import SearchResult
from dragoman.decoding.request import Job
from dragoman.errors import UserError
from dragoman.inference.engines.base import Engine
from dragoman.inference.engines.formats import Holds, check_holds, check_widths, write_json
from dragoman.models.base import collect_tensors
from dragoman.models.registry import build_model
from dragoman.models.settings import TransformerSettings
from dragoman.models.transformer import Transformer, TransformerLayer, TransformerStack
from dragoman.modules.positions import make_sinusoids
from dragoman.recipe import Recipe, check_model, read_recipe
from dragoman.run_dir import RunFolder
from dragoman.types import BOS, EOS, PAD, SPECIALS, UNK

HUGGING_FACE = "Hugging Face"
MIN_POSITIONS = 1024  # of the exported table of sinusoids
HUGGINGFACE_HOLDS: Holds = {
    "norm": ("layer",),
    "activation": ("relu", "gelu"),
    "position": ("sinusoidal",),
    "attention": ("full",),
    "decoder_attention": ("full",),
    "residual": (True,),
    "projections": (True,),
    "scaled": (True,),
}


class Weight(NamedTuple):
    """A tensor of our model, or a part of one, with its name in `transformers`; `axis` is the one of the features."""

    name: str
    tensor: Tensor
    axis: int | None


def half_order(width: int) -> Tensor:
    """Return our features in their order: first those that a sine is added to, then those of the cosines."""
    return torch.cat([torch.arange(0, width, 2), torch.arange(1, width, 2)])


def reorder_features(weight: Weight, order_C: Tensor) -> Tensor:
    """Return a weight in their order of features; with the inverse order, theirs in ours."""
    tensor = weight.tensor.detach().float().cpu()
    return tensor.clone() if weight.axis is None else tensor.index_select(weight.axis, order_C)


def list_weights(model: Transformer) -> Iterator[Weight]:
    """Yield every weight of the model with its name in `transformers`."""
    yield from list_stack_weights("model.encoder.", model.encoder)
    yield from list_stack_weights("model.decoder.", model.decoder)
    source, target = model.encoder.embedding.weight, model.decoder.embedding.weight
    if source is target:
        yield Weight("model.shared.weight", target, 1)
    else:
        yield Weight("model.encoder.embed_tokens.weight", source, 1)
        yield Weight("model.decoder.embed_tokens.weight", target, 1)
    if model.project.weight is not target:
        yield Weight("lm_head.weight", model.project.weight, 1)


def list_stack_weights(prefix: str, stack: TransformerStack) -> Iterator[Weight]:
    if stack.settings.norm_place == "pre":
        yield from output_weights(f"{prefix}layer_norm.", stack.norm)
    for number, layer in enumerate(stack.layers):
        yield from list_layer_weights(f"{prefix}layers.{number}.", layer)


def list_layer_weights(prefix: str, layer: TransformerLayer) -> Iterator[Weight]:
    own = layer.attention.sublayer
    yield from input_weights(f"{prefix}self_attn.", own.query_key_value, "q_proj.", "k_proj.", "v_proj.")
    yield from output_weights(f"{prefix}self_attn.out_proj.", own.out)
    yield from output_weights(f"{prefix}self_attn_layer_norm.", layer.attention.norm)
    if layer.cross:
        cross = layer.cross.sublayer
        yield from input_weights(f"{prefix}encoder_attn.", cross.query, "q_proj.")
        yield from input_weights(f"{prefix}encoder_attn.", cross.key_value, "k_proj.", "v_proj.")
        yield from output_weights(f"{prefix}encoder_attn.out_proj.", cross.out)
        yield from output_weights(f"{prefix}encoder_attn_layer_norm.", layer.cross.norm)
    assert layer.feedforward
    yield from input_weights(prefix, layer.feedforward.sublayer.wide, "fc1.")
    yield from output_weights(f"{prefix}fc2.", layer.feedforward.sublayer.narrow)
    yield from output_weights(f"{prefix}final_layer_norm.", layer.feedforward.norm)


def output_weights(prefix: str, module: Any) -> Iterator[Weight]:
    """Yield weight and bias of a module that writes features, along the first axis."""
    yield Weight(f"{prefix}weight", module.weight, 0)
    yield Weight(f"{prefix}bias", module.bias, 0)


def input_weights(prefix: str, product: Any, *names: str) -> Iterator[Weight]:
    """Yield weights and biases of a linear layer that reads features, split into as many layers as there are names."""
    for name, weight, bias in zip(names, product.weight.chunk(len(names)), product.bias.chunk(len(names)), strict=True):
        yield Weight(f"{prefix}{name}weight", weight, 1)
        yield Weight(f"{prefix}{name}bias", bias, None)


def check_huggingface(model: nn.Module) -> Transformer:
    transformer = check_holds(model, HUGGINGFACE_HOLDS, HUGGING_FACE)
    check_widths(transformer.settings, HUGGING_FACE)
    if transformer.settings.norm_place == "pre" and transformer.encoder.embedding is not transformer.decoder.embedding:
        raise UserError(
            "model.norm_place=pre with two tables of embeddings cannot be exported to Hugging Face: Pegasus has one; "
            "train with tokenizer.joint=true and model.tied=true, or with model.norm_place=post"
        )
    return transformer


def save_huggingface(model: nn.Module, tokenizers: Tokenizers, recipe: Recipe, folder: Path, longest: int) -> list[str]:
    """Write a folder that `transformers` opens. Return notes on what it cannot hold."""
    transformer = check_huggingface(model)
    if tokenizers.tags:
        raise UserError(
            f"Hugging Face's tokenizers have no place for tags ({', '.join(tokenizers.tags)}), which are no text; "
            "export to ctranslate2 or onnx"
        )
    order_C = half_order(transformer.settings.width)
    tensors = {weight.name: reorder_features(weight, order_C) for weight in list_weights(transformer)}
    places = max(MIN_POSITIONS, 1 + max_output_length(recipe, longest))
    if transformer.settings.norm_place == "pre":  # Pegasus reads them from the file, MarianMT computes them
        for side in ("encoder", "decoder"):
            waves_PC = make_sinusoids(torch.arange(places), transformer.settings.width)
            tensors[f"model.{side}.embed_positions.weight"] = waves_PC.index_select(1, order_C)
    tensors["final_logits_bias"] = torch.zeros(1, len(transformer.project.weight))
    save_file(tensors, str(folder / "model.safetensors"), {"format": "pt"})
    write_json(folder / "config.json", make_config(transformer, places, longest))
    write_json(folder / "generation_config.json", make_generation_config(recipe, longest))
    return save_tokenizer(tokenizers, folder, places)


def max_output_length(recipe: Recipe, longest: int) -> int:
    return int(recipe.search.max_ratio * longest) + recipe.search.max_extra + 1


def make_config(model: Transformer, places: int, longest: int) -> dict[str, Any]:
    settings = model.settings
    post = settings.norm_place == "post"
    shared = model.encoder.embedding is model.decoder.embedding
    inner = model.encoder.layers[0].feedforward.sublayer.wide.out_features  # type: ignore[union-attr]
    config = {
        "architectures": ["MarianMTModel" if post else "PegasusForConditionalGeneration"],
        "model_type": "marian" if post else "pegasus",
        "is_encoder_decoder": True,
        "vocab_size": len(model.encoder.embedding.weight),
        "d_model": settings.width,
        "encoder_layers": settings.encoder_depth,
        "decoder_layers": settings.decoder_depth,
        "encoder_attention_heads": settings.heads,
        "decoder_attention_heads": settings.heads,
        "encoder_ffn_dim": inner,
        "decoder_ffn_dim": inner,
        "activation_function": settings.activation,
        "dropout": settings.dropout,
        "scale_embedding": True,
        "max_position_embeddings": places,
        "tie_word_embeddings": settings.tied,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "decoder_start_token_id": BOS,
        "forced_eos_token_id": None,
        "longest_source": longest,  # in training; read by the import
        "dtype": "float32",
    }
    sides = {
        "share_encoder_decoder_embeddings": shared,
        "decoder_vocab_size": len(model.decoder.embedding.weight),
    }
    return {**config, **(sides if post else {})}


def make_generation_config(recipe: Recipe, longest: int) -> dict[str, Any]:
    """Return our search settings as far as `transformers` has them: one length limit instead of one per source."""
    search = recipe.search
    return {
        "num_beams": search.beam,
        "length_penalty": search.length_penalty,
        "early_stopping": search.beam > 1,
        "max_length": max_output_length(recipe, longest) + 1,  # BOS counts there
        "suppress_tokens": [PAD, BOS],
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "decoder_start_token_id": BOS,
    }


PAD_TOKEN, UNK_TOKEN, BOS_TOKEN, EOS_TOKEN = SPECIALS


def save_tokenizer(tokenizers: Tokenizers, folder: Path, places: int) -> list[str]:
    """Write tokenizer.json if Hugging Face can hold the tokenizer. Return notes on why not."""
    tokenizer = tokenizers.source
    if not isinstance(tokenizer, SubwordTokenizer):
        return ["the tokenizer is no bpe or unigram, which is all that Hugging Face reads: encode with tokenizer/"]
    if not tokenizers.joint:
        return ["there are two vocabularies, and Hugging Face reads one: encode and decode with tokenizer/"]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD_TOKEN,
        "unk_token": UNK_TOKEN,
        "bos_token": BOS_TOKEN,
        "eos_token": EOS_TOKEN,
        "model_max_length": places,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # "</s>" in a text is text
    }
    write_json(folder / "tokenizer.json", describe_tokenizer(tokenizer))
    write_json(folder / "tokenizer_config.json", config)
    return []


def describe_tokenizer(tokenizer: SubwordTokenizer) -> dict[str, Any]:
    """Describe tokenization step by step: escape, mark word beginnings, split into subwords, append EOS."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [describe_special(number, piece) for number, piece in enumerate(SPECIALS)],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                *({"type": "Replace", "pattern": {"String": each}, "content": code} for each, code in ESCAPES.items()),
                {"type": "Prepend", "prepend": SPACE_MARK},
                {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK},
            ],
        },
        "pre_tokenizer": None if isinstance(tokenizer, BpeTokenizer) else split_specials(),
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": EOS_TOKEN, "type_id": 0}}],
            "pair": [
                {"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 0}},
                {"SpecialToken": {"id": EOS_TOKEN, "type_id": 0}},
            ],
            "special_tokens": {EOS_TOKEN: {"id": EOS_TOKEN, "ids": [EOS], "tokens": [EOS_TOKEN]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
                *(
                    {"type": "Replace", "pattern": {"String": code}, "content": each}
                    for each, code in reversed(ESCAPES.items())
                ),
            ],
        },
        "model": describe_bpe(tokenizer) if isinstance(tokenizer, BpeTokenizer) else describe_unigram(tokenizer),
    }


def split_specials() -> dict[str, Any]:
    """Split after "<", so that their unigram model does not take "</s>" or "<0x41>" in a text for those pieces."""
    names = "|".join(name[1:] for name in SPECIALS)
    pattern = f"<(?={names}|0x[0-9A-F]{{2}}>)"
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def describe_special(number: int, piece: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": piece, "special": True, **flags}


def describe_unigram(tokenizer: SubwordTokenizer) -> dict[str, Any]:
    numbers = list(range(tokenizer.size))
    pieces, scores = tokenizer.processor.id_to_piece(numbers), tokenizer.processor.get_score(numbers)
    vocabulary = [list(pair) for pair in zip(pieces, scores, strict=True)]
    return {"type": "Unigram", "unk_id": UNK, "vocab": vocabulary, "byte_fallback": tokenizer.lossless}


def describe_bpe(tokenizer: SubwordTokenizer) -> dict[str, Any]:
    """Describe BPE by its merges in the order of the pieces they make: the earliest possible piece is joined first."""
    pieces = tokenizer.processor.id_to_piece(list(range(tokenizer.size)))
    ids = tokenizer.sampler.vocabulary.ids
    merges = [
        [piece[:split], piece[split:]]
        for piece in ids
        for split in range(1, len(piece))
        if piece[:split] in ids and piece[split:] in ids
    ]
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": UNK_TOKEN,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": tokenizer.lossless,
        "ignore_merges": False,
        "vocab": {piece: number for number, piece in enumerate(pieces)},
        "merges": merges,
    }


NORM_PLACE_BY_MODEL_TYPE = {"marian": "post", "pegasus": "pre"}  # by model_type
SPECIAL_TOKEN_IDS = {"pad_token_id": PAD, "eos_token_id": EOS, "decoder_start_token_id": BOS}
EMBEDDING_NAMES = {  # names of a shared embedding table
    "model.shared.weight",
    "model.encoder.embed_tokens.weight",
    "model.decoder.embed_tokens.weight",
    "lm_head.weight",
}
DEFAULT_LONGEST = 512  # tokens of a source, if config.json has no longest_source
SINUSOID_TOLERANCE = 1e-4  # of two tables of sinusoids


def import_huggingface(folder: Path, out: Path) -> None:
    """Write a run folder from a folder of `transformers`, or raise a UserError that names what we do not support."""
    config = read_config(folder)
    tokenizers = load_tokenizers(folder)
    recipe = make_recipe(config, folder, tokenizers)
    model = build_model(recipe.model, **tokenizers.sizes, joint=recipe.tokenizer.joint)
    assert isinstance(model, Transformer)
    fill_weights(model, read_weights(folder))
    run = RunFolder(out)
    run.begin(recipe)
    tokenizers.save(run.tokenizer)
    longest = config.get("longest_source", min(DEFAULT_LONGEST, config["max_position_embeddings"] - 1))
    run.save_model(collect_tensors(model), tokenizer=tokenizers.fingerprint(), longest=str(longest))


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(f"{str(path)!r} is missing or damaged; name a folder that transformers has saved") from None
    wanted: dict[str, tuple[Any, ...]] = {
        "model_type": tuple(NORM_PLACE_BY_MODEL_TYPE),
        "activation_function": ("relu", "gelu"),
        "scale_embedding": (True,),
        "decoder_attention_heads": (config.get("encoder_attention_heads"),),
        "decoder_ffn_dim": (config.get("encoder_ffn_dim"),),
        **{name: (number,) for name, number in SPECIAL_TOKEN_IDS.items()},
    }
    for name, choices in wanted.items():
        if config.get(name) not in choices or config.get(name) is None:
            raise UserError(
                f"{str(path)!r} has {name}={config.get(name)}, which Dragoman has nothing for; "
                f"it takes {' or '.join(map(str, choices))}"
            )
    return dict(config)


def load_tokenizers(folder: Path) -> Tokenizers:
    if not (folder / "tokenizer" / "tokenizer.json").exists():
        raise UserError(
            f"{str(folder)!r} has no folder tokenizer/ with Dragoman's own tokenizer, and others number their tokens "
            "otherwise; copy it from the run that the model was exported from"
        )
    return Tokenizers.load(folder / "tokenizer")


def make_recipe(config: dict[str, Any], folder: Path, tokenizers: Tokenizers) -> Recipe:
    """Return the recipe in the folder, or an empty one, with the model section that config.json describes."""
    path = folder / "config.yaml"
    recipe = read_recipe(path) if path.exists() else Recipe()
    sizes = config["vocab_size"], config.get("decoder_vocab_size", config["vocab_size"])
    if sizes != (tokenizers.source.size, tokenizers.target.size):
        raise UserError(
            f"{str(folder / 'tokenizer')!r} has {tokenizers.source.size} and {tokenizers.target.size} pieces, "
            f"but the model was made for {sizes[0]} and {sizes[1]}; copy the tokenizer that belongs to it"
        )
    model = {
        "kind": "transformer",
        "encoder_layers": config["encoder_layers"],
        "decoder_layers": config["decoder_layers"],
        "width": config["d_model"],
        "heads": config["encoder_attention_heads"],
        "feedforward_width": config["encoder_ffn_dim"],
        "activation": config["activation_function"],
        "dropout": float(config.get("dropout", 0.1)),
        "norm_place": NORM_PLACE_BY_MODEL_TYPE[config["model_type"]],
        "tied": config.get("tie_word_embeddings", True),
    }
    shared = config.get("share_encoder_decoder_embeddings", True) and model["tied"]
    if tokenizers.joint and model["tied"] and not shared:
        raise UserError(
            f"{str(folder / 'config.json')!r} has one vocabulary but two tables of embeddings and a tied output, "
            "which Dragoman has nothing for"
        )
    tokenizer = recipe.tokenizer.model_copy(update={"joint": tokenizers.joint})
    settings = build(TransformerSettings, model, where="model")
    return check_model(recipe.model_copy(update={"model": settings, "tokenizer": tokenizer}))


def read_weights(folder: Path) -> dict[str, Tensor]:
    for name in ("model.safetensors", "pytorch_model.bin"):
        path = folder / name
        try:
            if name.endswith(".bin"):
                return dict(torch.load(path, map_location="cpu", weights_only=True))
            if path.exists():
                return dict(load_file(path))
        except FileNotFoundError:
            break
        except UnpicklingError:
            raise UserError(f"{str(path)!r} is damaged or holds more than weights, which is not loaded") from None
        except (SafetensorError, OSError, RuntimeError, ValueError, EOFError) as error:
            raise UserError(f"{str(path)!r} is cut short or damaged ({error}); copy it again") from None
    raise UserError(f"{str(folder)!r} has neither model.safetensors nor pytorch_model.bin; name a whole model")


@torch.no_grad()
def fill_weights(model: Transformer, tensors: dict[str, Tensor]) -> None:
    """Copy their weights into the model. Those left over must have no effect, else the import is refused."""
    back_C = half_order(model.settings.width).argsort()
    used = {"final_logits_bias"}
    for weight in list_weights(model):
        name = (
            next(iter(sorted(EMBEDDING_NAMES & set(tensors))), "")
            if weight.name == "model.shared.weight"
            else weight.name
        )
        found = tensors.get(name)
        if found is None or found.shape != weight.tensor.shape:
            sizes = "missing" if found is None else " x ".join(map(str, found.shape))
            wanted = " x ".join(map(str, weight.tensor.shape))
            raise UserError(f"the weight {weight.name!r} is {sizes}, and config.json asks for {wanted}")
        weight.tensor.copy_(reorder_features(weight._replace(tensor=found), back_C))
        used |= EMBEDDING_NAMES if weight.name == "model.shared.weight" else {name}
    if model.settings.tied:
        used |= {"model.shared.weight", "lm_head.weight"}
    for name in sorted(set(tensors) - used):
        if not name.endswith("embed_positions.weight"):
            raise UserError(f"the weight {name!r} is one that Dragoman has nothing for")
        check_sinusoids(name, tensors[name])
    bias = tensors.get("final_logits_bias")
    if bias is not None and bool(bias.any()):
        raise UserError("'final_logits_bias' is not zero, and Dragoman's output has no bias")


def check_sinusoids(name: str, found_PC: Tensor) -> None:
    waves_PC = make_sinusoids(torch.arange(len(found_PC)), found_PC.size(1))
    if not torch.allclose(
        found_PC.float(), waves_PC.index_select(1, half_order(found_PC.size(1))), atol=SINUSOID_TOLERANCE
    ):
        raise UserError(f"the weight {name!r} does not hold the usual sinusoids, which are all that can be imported")


class HuggingFaceEngine(Engine):
    """The engine of a folder that `transformers` opens."""

    def __init__(self, folder: Path) -> None:
        try:
            import transformers
        except ImportError:
            raise UserError(
                "transformers is not installed, and without it nothing can be compared with it; "
                "pip install 'dragoman[huggingface]' brings it"
            ) from None
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self.model: Any = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()

    def search(self, jobs: Sequence[Job], search: SearchSettings) -> list[list[SearchResult]]:
        """Decode the jobs of each length limit in one call: a call has one limit for all."""
        found: list[list[SearchResult]] = [[] for _ in jobs]
        for limit in sorted({job.limit for job in jobs}):
            some = [i for i, job in enumerate(jobs) if job.limit == limit]
            for i, results in zip(some, self.generate([jobs[i].ids for i in some], limit, search), strict=True):
                found[i] = results
        return found

    @torch.inference_mode()
    def generate(self, sources: list[list[int]], limit: int, search: SearchSettings) -> list[list[SearchResult]]:
        source_BS = pad_sequence([torch.tensor([*ids, EOS]) for ids in sources], batch_first=True, padding_value=PAD)
        output = self.model.generate(
            source_BS,
            attention_mask=(source_BS != PAD).long(),
            num_beams=search.beam,
            num_return_sequences=search.nbest,
            length_penalty=search.length_penalty,
            early_stopping=search.beam > 1,
            max_new_tokens=limit,
            max_length=None,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        token_NT, logp_TRV = output.sequences[:, 1:], torch.stack(output.logits).float().log_softmax(-1)
        step_T = torch.arange(token_NT.size(1))  # the search may have gone on for longer hypotheses
        own_NT = torch.arange(len(token_NT))[:, None].expand_as(token_NT)
        row_NT = own_NT if search.beam == 1 else output.beam_indices[:, : len(step_T)].clamp(min=0)
        logps = logp_TRV[step_T, row_NT, token_NT].tolist()  # `sequences_scores` are wrong for truncated hypotheses
        rows = [to_result(*row, search) for row in zip(token_NT.tolist(), logps, strict=True)]
        return [rows[start : start + search.nbest] for start in range(0, len(rows), search.nbest)]


def to_result(tokens: list[int], logps: list[float], search: SearchSettings) -> SearchResult:
    """Return a search result from generated tokens: those up to EOS."""
    finished = EOS in tokens
    length = tokens.index(EOS) + 1 if finished else len(tokens)
    logp = sum(logps[:length])
    return SearchResult(tokens[: length - finished], logp, logp / length**search.length_penalty, finished)

"""A Transformer as `transformers` holds it: MarianMT where the norm comes after, Pegasus where it comes before.

Both lay sines and cosines in halves, where ours take turns. So the features of the model are put into their order,
through every weight that reads or writes them; no number changes.

Shapes   C model width   I inner width   V vocabulary   P places

The way back: a folder of `transformers` as a run folder, by the same table of weights as the way there.

`transformers` as an engine: not a fast one, but what people who load an exported model will run.

It is asked when a model is exported, so that what it answers is known to be what we answer.

Shapes   B sentences   S source width   N answers   T answer length   R rows of a step: N, or the beams of all
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
from dragoman.data.tokenizers import Tokenizers
from dragoman.decoding.protocol import SearchResult
from dragoman.decoding.request import Job
from dragoman.errors import UserError
from dragoman.inference.engines.base import Engine
from dragoman.inference.engines.formats import Holds, check_holds, check_widths, write_json
from dragoman.inference.engines.huggingface_tokenizer import save_tokenizer
from dragoman.models.base import collect_tensors
from dragoman.models.registry import build_model
from dragoman.models.settings import TransformerSettings
from dragoman.models.transformer import DecoderLayer, EncoderLayer, Transformer, TransformerStack
from dragoman.modules.positions import make_sinusoids
from dragoman.recipe import Recipe, check_model, read_recipe
from dragoman.run_dir import RunFolder
from dragoman.types import BOS, EOS, PAD

HUGGING_FACE = "Hugging Face"
MIN_POSITIONS = 1024  # that its table of sinusoids has at least
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
    """A tensor of ours, or a part of one, and what it is called there; `axis` is the one that counts features."""

    name: str
    tensor: Tensor
    axis: int | None


def half_order(width: int) -> Tensor:
    """Ours in their order: first the features that a sine is added to, then those of the cosines."""
    return torch.cat([torch.arange(0, width, 2), torch.arange(1, width, 2)])


def reorder_features(weight: Weight, order_C: Tensor) -> Tensor:
    """As they hold it. With the inverse order, what they hold as we do."""
    tensor = weight.tensor.detach().float().cpu()
    return tensor.clone() if weight.axis is None else tensor.index_select(weight.axis, order_C)


def list_weights(model: Transformer) -> Iterator[Weight]:
    """Every weight of the model with its name there: the table that export and import both read."""
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
        assert isinstance(layer, EncoderLayer | DecoderLayer)
        yield from list_layer_weights(f"{prefix}layers.{number}.", layer)


def list_layer_weights(prefix: str, layer: EncoderLayer | DecoderLayer) -> Iterator[Weight]:
    own = layer.attention.sublayer
    yield from input_weights(f"{prefix}self_attn.", own.query_key_value, "q_proj.", "k_proj.", "v_proj.")
    yield from output_weights(f"{prefix}self_attn.out_proj.", own.out)
    yield from output_weights(f"{prefix}self_attn_layer_norm.", layer.attention.norm)
    if isinstance(layer, DecoderLayer):
        assert layer.cross
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
    """Of what writes features: weight and bias count them along the first axis."""
    yield Weight(f"{prefix}weight", module.weight, 0)
    yield Weight(f"{prefix}bias", module.bias, 0)


def input_weights(prefix: str, product: Any, *names: str) -> Iterator[Weight]:
    """Of a product that reads features, cut into as many products as there are names."""
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
    """A folder that `transformers` opens; back comes what it cannot hold, for people to read."""
    transformer = check_huggingface(model)
    if tokenizers.tags:
        raise UserError(
            f"Hugging Face's tokenizers have no place for tags ({', '.join(tokenizers.tags)}), which are no text; "
            "export to ctranslate2 or onnx"
        )
    order_C = half_order(transformer.settings.width)
    tensors = {weight.name: reorder_features(weight, order_C) for weight in list_weights(transformer)}
    places = max(MIN_POSITIONS, 1 + max_output_length(recipe, longest))
    if transformer.settings.norm_place == "pre":  # Pegasus misses them where MarianMT makes them itself
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
        "longest_source": longest,  # that it was trained on: for the way back
        "dtype": "float32",
    }
    sides = {
        "share_encoder_decoder_embeddings": shared,
        "decoder_vocab_size": len(model.decoder.embedding.weight),
    }
    return {**config, **(sides if post else {})}


def make_generation_config(recipe: Recipe, longest: int) -> dict[str, Any]:
    """Our search, as far as they have it: one limit for all answers stands in for limits by the source's length."""
    search = recipe.search
    return {
        "num_beams": search.beam,
        "length_penalty": search.length_penalty,
        "early_stopping": search.beam > 1,
        "max_length": max_output_length(recipe, longest) + 1,  # the begin mark is counted there
        "suppress_tokens": [PAD, BOS],
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "decoder_start_token_id": BOS,
    }


NORM_PLACES = {"marian": "post", "pegasus": "pre"}  # by model_type
SPECIAL_TOKEN_IDS = {"pad_token_id": PAD, "eos_token_id": EOS, "decoder_start_token_id": BOS}
EMBEDDING_NAMES = {  # what may stand for the one table of embeddings
    "model.shared.weight",
    "model.encoder.embed_tokens.weight",
    "model.decoder.embed_tokens.weight",
    "lm_head.weight",
}
DEFAULT_LONGEST = 512  # tokens of a source, where the folder does not say what the model was trained on
SINUSOID_TOLERANCE = 1e-4  # of two tables of sinusoids


def import_huggingface(folder: Path, out: Path) -> None:
    """Make a run folder of it, or say by name what of it we do not have."""
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
        "model_type": tuple(NORM_PLACES),
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
    """The recipe that came with the folder, or an empty one, with the model that is there."""
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
        "norm_place": NORM_PLACES[config["model_type"]],
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
    """Every weight of ours from theirs; what is left over must change nothing."""
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
        """One call for all jobs of one limit, since a call has one."""
        found: list[list[SearchResult]] = [[] for _ in jobs]
        for limit in sorted({job.limit for job in jobs}):
            some = [i for i, job in enumerate(jobs) if job.limit == limit]
            for i, answers in zip(some, self.generate([jobs[i].ids for i in some], limit, search), strict=True):
                found[i] = answers
        return found

    @torch.inference_mode()
    def generate(self, sources: list[list[int]], limit: int, search: SearchSettings) -> list[list[SearchResult]]:
        source_BS = pad_sequence([torch.tensor([*ids, EOS]) for ids in sources], batch_first=True, padding_value=PAD)
        answer = self.model.generate(
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
        token_NT, logp_TRV = answer.sequences[:, 1:], torch.stack(answer.logits).float().log_softmax(-1)
        step_T = torch.arange(token_NT.size(1))  # the search may have gone on for longer answers
        alone_NT = torch.arange(len(token_NT))[:, None].expand_as(token_NT)
        row_NT = alone_NT if search.beam == 1 else answer.beam_indices[:, : len(step_T)].clamp(min=0)
        logps = logp_TRV[step_T, row_NT, token_NT].tolist()  # the ready scores of cut answers are those of others
        rows = [to_result(*row, search) for row in zip(token_NT.tolist(), logps, strict=True)]
        return [rows[start : start + search.nbest] for start in range(0, len(rows), search.nbest)]


def to_result(tokens: list[int], logps: list[float], search: SearchSettings) -> SearchResult:
    """What stands behind the end mark is no answer."""
    finished = EOS in tokens
    length = tokens.index(EOS) + 1 if finished else len(tokens)
    logp = sum(logps[:length])
    return SearchResult(tokens[: length - finished], logp, logp / length**search.length_penalty, finished)

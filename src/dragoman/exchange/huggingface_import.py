"""The way back: a folder of `transformers` as a run folder, by the same table of weights as the way there."""

from __future__ import annotations

import json
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dragoman.config import Recipe, read_recipe
from dragoman.exchange.huggingface import halves, theirs, weights
from dragoman.models.base import tensors_of
from dragoman.models.build import build_model, completed
from dragoman.models.transformer import Transformer
from dragoman.nn.position import sinusoids
from dragoman.store import RunFolder
from dragoman.text.tokenizer import Tokenizers
from dragoman.types import BOS, EOS, PAD, UserError

PLACE_OF_NORM = {"marian": "post", "pegasus": "pre"}  # by model_type
MARKS = {"pad_token_id": PAD, "eos_token_id": EOS, "decoder_start_token_id": BOS}
SAME = {  # what may stand for the one table of embeddings
    "model.shared.weight",
    "model.encoder.embed_tokens.weight",
    "model.decoder.embed_tokens.weight",
    "lm_head.weight",
}
LONGEST = 512  # tokens of a source, where the folder does not say what the model was trained on
CLOSE = 1e-4  # of two tables of sinusoids


def adopt(folder: Path, out: Path) -> None:
    """Make a run folder of it, or say by name what of it we do not have."""
    config = read_config(folder)
    tokenizers = own_tokenizers(folder)
    recipe = described(config, folder, tokenizers)
    model = build_model(recipe, **tokenizers.sizes)
    assert isinstance(model, Transformer)
    fill(model, read_weights(folder))
    run = RunFolder(out)
    run.begin(recipe)
    tokenizers.save(run.tokenizer)
    longest = config.get("longest_source", min(LONGEST, config["max_position_embeddings"] - 1))
    run.save_model(tensors_of(model), tokenizer=tokenizers.fingerprint(), longest=str(longest))


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(f"{str(path)!r} is missing or damaged; name a folder that transformers has saved") from None
    wanted: dict[str, tuple[Any, ...]] = {
        "model_type": tuple(PLACE_OF_NORM),
        "activation_function": ("relu", "gelu"),
        "scale_embedding": (True,),
        "decoder_attention_heads": (config.get("encoder_attention_heads"),),
        "decoder_ffn_dim": (config.get("encoder_ffn_dim"),),
        **{name: (number,) for name, number in MARKS.items()},
    }
    for name, choices in wanted.items():
        if config.get(name) not in choices or config.get(name) is None:
            raise UserError(
                f"{str(path)!r} has {name}={config.get(name)}, which Dragoman has nothing for; "
                f"it takes {' or '.join(map(str, choices))}"
            )
    return dict(config)


def own_tokenizers(folder: Path) -> Tokenizers:
    if not (folder / "tokenizer" / "tokenizer.json").exists():
        raise UserError(
            f"{str(folder)!r} has no folder tokenizer/ with Dragoman's own tokenizer, and others number their tokens "
            "otherwise; copy it from the run that the model was exported from"
        )
    return Tokenizers.load(folder / "tokenizer")


def described(config: dict[str, Any], folder: Path, tokenizers: Tokenizers) -> Recipe:
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
        "norm_place": PLACE_OF_NORM[config["model_type"]],
        "tied": config.get("tie_word_embeddings", True),
    }
    shared = config.get("share_encoder_decoder_embeddings", True) and model["tied"]
    if tokenizers.joint and model["tied"] and not shared:
        raise UserError(
            f"{str(folder / 'config.json')!r} has one vocabulary but two tables of embeddings and a tied output, "
            "which Dragoman has nothing for"
        )
    tokenizer = recipe.tokenizer.model_copy(update={"joint": tokenizers.joint})
    return completed(recipe.model_copy(update={"model": model, "tokenizer": tokenizer}))


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
def fill(model: Transformer, tensors: dict[str, Tensor]) -> None:
    """Every weight of ours from theirs; what is left over must change nothing."""
    back_C = halves(model.settings.width).argsort()
    used = {"final_logits_bias"}
    for weight in weights(model):
        name = next(iter(sorted(SAME & set(tensors))), "") if weight.name == "model.shared.weight" else weight.name
        found = tensors.get(name)
        if found is None or found.shape != weight.tensor.shape:
            sizes = "missing" if found is None else " x ".join(map(str, found.shape))
            wanted = " x ".join(map(str, weight.tensor.shape))
            raise UserError(f"the weight {weight.name!r} is {sizes}, and config.json asks for {wanted}")
        weight.tensor.copy_(theirs(weight._replace(tensor=found), back_C))
        used |= SAME if weight.name == "model.shared.weight" else {name}
    if model.settings.tied:
        used |= {"model.shared.weight", "lm_head.weight"}
    for name in sorted(set(tensors) - used):
        if not name.endswith("embed_positions.weight"):
            raise UserError(f"the weight {name!r} is one that Dragoman has nothing for")
        check_waves(name, tensors[name])
    bias = tensors.get("final_logits_bias")
    if bias is not None and bool(bias.any()):
        raise UserError("'final_logits_bias' is not zero, and Dragoman's output has no bias")


def check_waves(name: str, found_PC: Tensor) -> None:
    waves_PC = sinusoids(torch.arange(len(found_PC)), found_PC.size(1))
    if not torch.allclose(found_PC.float(), waves_PC.index_select(1, halves(found_PC.size(1))), atol=CLOSE):
        raise UserError(f"the weight {name!r} does not hold the usual sinusoids, which are all that can be imported")

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
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from dragoman.config.settings import build
from dragoman.data.subwords import ESCAPES, SPACE_MARK
from dragoman.data.tokenizers import BpeTokenizer, SubwordTokenizer, Tokenizers
from dragoman.decoding.methods import SearchSettings
from dragoman.decoding.protocol import Job, SearchResult
from dragoman.errors import UserError
from dragoman.inference.engines.base import (
    Engine,
    SupportedValues,
    list_layer_modules,
    render_template,
    require_exportable,
)
from dragoman.inference.predictor import Predictor
from dragoman.models.base import Model, collect_tensors
from dragoman.models.registry import build_model
from dragoman.models.transformer import Transformer, TransformerSettings
from dragoman.modules.positions import make_sinusoids
from dragoman.recipe import Recipe, check_model, read_recipe
from dragoman.run_dir import RunFolder, format_json
from dragoman.types import BOS, EOS, PAD, SPECIALS, UNK

MIN_POSITIONS = 1024  # of the exported table of sinusoids
HUGGINGFACE_SUPPORTS: SupportedValues = {
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
    for prefix, stack in (("model.encoder.", model.encoder), ("model.decoder.", model.decoder)):
        if stack.settings.norm_place == "pre":
            yield from split_module(f"{prefix}layer_norm", stack.norm, 0)
        for number, layer in enumerate(stack.layers):
            for names, module in list_layer_modules(layer):
                yield from split_module(names.huggingface, module, names.axis, f"{prefix}layers.{number}.")
    source, target = model.encoder.embedding.weight, model.decoder.embedding.weight
    if source is target:
        yield Weight("model.shared.weight", target, 1)
    else:
        yield Weight("model.encoder.embed_tokens.weight", source, 1)
        yield Weight("model.decoder.embed_tokens.weight", target, 1)
    if model.project.weight is not target:
        yield Weight("lm_head.weight", model.project.weight, 1)


def split_module(names: str, module: nn.Module, axis: int, prefix: str = "") -> Iterator[Weight]:
    """Yield weights and biases of a linear layer or norm, split into as many modules as there are names."""
    parts = names.split()
    weights, biases = (module.get_parameter(name).chunk(len(parts)) for name in ("weight", "bias"))
    for name, weight, bias in zip(parts, weights, biases, strict=True):
        yield Weight(f"{prefix}{name}.weight", weight, axis)
        yield Weight(f"{prefix}{name}.bias", bias, 0 if axis == 0 else None)


def check_huggingface(model: nn.Module) -> Transformer:
    """Return the model if `transformers` can hold it, or raise a UserError that says why not."""
    transformer = require_exportable(model, HUGGINGFACE_SUPPORTS, "Hugging Face", equal_head_widths=True)
    if transformer.settings.norm_place == "pre" and transformer.encoder.embedding is not transformer.decoder.embedding:
        raise UserError(
            "model.norm_place=pre with two tables of embeddings cannot be exported to Hugging Face: Pegasus has one; "
            "train with tokenizer.joint=true and model.tied=true, or with model.norm_place=post"
        )
    return transformer


def save_huggingface(run: Predictor[Model], folder: Path) -> list[str]:
    """Write a folder that `transformers` opens. Return notes on what it cannot hold."""
    model, tokenizers, search = check_huggingface(run.model), run.tokenizers, run.recipe.search
    settings, post_norm = model.settings, model.settings.norm_place == "post"
    if tokenizers.tags:
        raise UserError(
            f"Hugging Face's tokenizers have no place for tags ({', '.join(tokenizers.tags)}), which are no text; "
            "export to ctranslate2 or onnx"
        )
    order_C = half_order(settings.width)
    tensors = {weight.name: reorder_features(weight, order_C) for weight in list_weights(model)}
    max_output = int(search.max_ratio * run.longest) + search.max_extra + 1  # one limit instead of one per source
    positions = max(MIN_POSITIONS, 1 + max_output)
    if not post_norm:  # Pegasus reads sinusoids from the file, MarianMT computes them
        for side in ("encoder", "decoder"):
            waves_PC = make_sinusoids(torch.arange(positions), settings.width)
            tensors[f"model.{side}.embed_positions.weight"] = waves_PC.index_select(1, order_C)
    tensors["final_logits_bias"] = torch.zeros(1, len(model.project.weight))
    save_file(tensors, str(folder / "model.safetensors"), {"format": "pt"})
    context = {
        "model": model,
        "search": search,
        "post_norm": post_norm,
        "positions": positions,
        "max_output": max_output,
        "longest": run.longest,
    }
    files = {name: render_json(name, **context) for name in ("config.json", "generation_config.json")}
    notes = []
    if not isinstance(tokenizers.source, SubwordTokenizer):
        notes = ["the tokenizer is no bpe or unigram, which is all that Hugging Face reads: encode with tokenizer/"]
    elif not tokenizers.joint:
        notes = ["there are two vocabularies, and Hugging Face reads one: encode and decode with tokenizer/"]
    else:
        files["tokenizer.json"] = describe_tokenizer(tokenizers.source)
        files["tokenizer_config.json"] = render_json("tokenizer_config.json", **context)
    for name, content in files.items():
        (folder / name).write_text(format_json(content), encoding="utf-8")
    return notes


def render_json(name: str, **context: object) -> object:
    """Return the content of a JSON file, from its template in templates/huggingface/."""
    tokens = {"PAD": PAD, "UNK": UNK, "BOS": BOS, "EOS": EOS, "SPECIALS": SPECIALS}
    return json.loads(render_template(f"huggingface/{name}", {**tokens, **context}))


def describe_tokenizer(tokenizer: SubwordTokenizer) -> object:
    """Return the tokenizer as a tokenizer.json, which gives our ids."""
    ids = list(range(tokenizer.size))
    pieces, scores = tokenizer.processor.id_to_piece(ids), tokenizer.processor.get_score(ids)
    merges = None
    if isinstance(tokenizer, BpeTokenizer):
        known = tokenizer.sampler.vocabulary.ids
        splits = ((piece[:i], piece[i:]) for piece in known for i in range(1, len(piece)))
        merges = [(left, right) for left, right in splits if left in known and right in known]
    return render_json(
        "tokenizer.json",
        escapes=ESCAPES,
        space=SPACE_MARK,
        byte_fallback=tokenizer.lossless,
        scores=list(zip(pieces, scores, strict=True)),
        vocabulary={piece: number for number, piece in enumerate(pieces)},
        merges=merges,
    )


NORM_PLACE_BY_MODEL_TYPE = {"marian": "post", "pegasus": "pre"}  # by model_type
CONFIG_NAMES = {  # our model settings in config.json
    "encoder_layers": "encoder_layers",
    "decoder_layers": "decoder_layers",
    "width": "d_model",
    "heads": "encoder_attention_heads",
    "feedforward_width": "encoder_ffn_dim",
    "activation": "activation_function",
}
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
    if not (folder / "tokenizer" / "tokenizer.json").exists():
        raise UserError(
            f"{str(folder)!r} has no folder tokenizer/ with Dragoman's own tokenizer, and others number their tokens "
            "otherwise; copy it from the run that the model was exported from"
        )
    tokenizers = Tokenizers.load(folder / "tokenizer")
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
    """Return the content of config.json; refuse values that our models do not have."""
    path = folder / "config.json"
    try:
        config: dict[str, Any] = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        raise UserError(f"{str(path)!r} is missing or damaged; name a folder that transformers has saved") from None
    wanted: SupportedValues = {
        "model_type": tuple(NORM_PLACE_BY_MODEL_TYPE),
        "activation_function": HUGGINGFACE_SUPPORTS["activation"],
        "scale_embedding": (True,),
        "decoder_attention_heads": (config.get("encoder_attention_heads"),),
        "decoder_ffn_dim": (config.get("encoder_ffn_dim"),),
        "pad_token_id": (PAD,),
        "eos_token_id": (EOS,),
        "decoder_start_token_id": (BOS,),
    }
    for name, choices in wanted.items():
        if config.get(name) not in choices or config.get(name) is None:
            raise UserError(
                f"{str(path)!r} has {name}={config.get(name)}, which Dragoman has nothing for; "
                f"it takes {' or '.join(map(str, choices))}"
            )
    return config


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
    model = {ours: config[theirs] for ours, theirs in CONFIG_NAMES.items()}
    model |= {
        "kind": "transformer",
        "dropout": float(config.get("dropout", 0.1)),
        "norm_place": NORM_PLACE_BY_MODEL_TYPE[config["model_type"]],
        "tied": config.get("tie_word_embeddings", True),
    }
    if tokenizers.joint and model["tied"] and not config.get("share_encoder_decoder_embeddings", True):
        raise UserError(
            f"{str(folder / 'config.json')!r} has one vocabulary but two tables of embeddings and a tied output, "
            "which Dragoman has nothing for"
        )
    tokenizer = recipe.tokenizer.model_copy(update={"joint": tokenizers.joint})
    settings = build(TransformerSettings, model, where="model")
    return check_model(recipe.model_copy(update={"model": settings, "tokenizer": tokenizer}))


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights by name. Nothing else in the file is loaded."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        path = folder / name
        if not path.exists():
            continue
        try:
            if name.endswith(".bin"):
                return dict(torch.load(path, map_location="cpu", weights_only=True))
            return dict(load_file(path))
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
        names = EMBEDDING_NAMES if weight.name == "model.shared.weight" else {weight.name}
        found = next((tensors[name] for name in sorted(names) if name in tensors), None)
        if found is None or found.shape != weight.tensor.shape:
            sizes = "missing" if found is None else " x ".join(map(str, found.shape))
            wanted = " x ".join(map(str, weight.tensor.shape))
            raise UserError(f"the weight {weight.name!r} is {sizes}, and config.json asks for {wanted}")
        weight.tensor.copy_(reorder_features(weight._replace(tensor=found), back_C))
        used |= names
    if model.settings.tied:
        used |= {"model.shared.weight", "lm_head.weight"}
    for name in sorted(set(tensors) - used):
        if not name.endswith("embed_positions.weight"):
            raise UserError(f"the weight {name!r} is one that Dragoman has nothing for")
        found_PC = tensors[name].float()
        waves_PC = make_sinusoids(torch.arange(len(found_PC)), found_PC.size(1))
        if not torch.allclose(found_PC, waves_PC[:, half_order(found_PC.size(1))], atol=SINUSOID_TOLERANCE):
            raise UserError(
                f"the weight {name!r} does not hold the usual sinusoids, which are all that can be imported"
            )
    bias = tensors.get("final_logits_bias")
    if bias is not None and bool(bias.any()):
        raise UserError("'final_logits_bias' is not zero, and Dragoman's output has no bias")


class GenerationOutput(Protocol):
    """What `generate` returns: tokens, logits by step and, with a beam, the row that each token was found in."""

    sequences: Tensor
    logits: tuple[Tensor, ...]
    beam_indices: Tensor


class GenerationModel(Protocol):
    """The part of a model of `transformers` that the engine uses."""

    def generate(self, source_BS: Tensor, **options: object) -> GenerationOutput: ...


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
        self.model: GenerationModel = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()

    def iter_results(self, jobs: Sequence[Job], search: SearchSettings) -> Iterator[tuple[int, list[SearchResult]]]:
        """Decode the jobs of each length limit in one call: a call has one limit for all."""
        for limit in sorted({job.limit for job in jobs}):
            some = [i for i, job in enumerate(jobs) if job.limit == limit]
            yield from zip(some, self.generate([jobs[i].ids for i in some], limit, search), strict=True)

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
        logp_NT = logp_TRV[step_T, row_NT, token_NT]  # `sequences_scores` are wrong for truncated hypotheses
        results = []
        for tokens, logps in zip(token_NT.tolist(), logp_NT.tolist(), strict=True):
            finished = EOS in tokens
            length = tokens.index(EOS) + 1 if finished else len(tokens)
            logp = sum(logps[:length])
            score = logp / length**search.length_penalty
            results.append(SearchResult(tokens[: length - finished], logp, score, finished))
        return [results[start : start + search.nbest] for start in range(0, len(results), search.nbest)]

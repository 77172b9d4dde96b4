"""Exchange with Hugging Face `transformers`: export, import, and an engine that checks exported models.

A post-norm Transformer is exported as MarianMT, a pre-norm one as Pegasus. In their position encodings, all sines come
first, then all cosines; in Dragoman's, sines and cosines alternate. Export and import therefore reorder the features of
the model in every weight that has an axis for them. The values of the weights stay the same. `list_weights`
maps Dragoman's weights to the names in `transformers`, in both directions.

Subword tokenizers are exported as tokenizer.json, with which AutoTokenizer returns Dragoman's token ids.

Shapes   C model width   P positions   V vocabulary   B sentences   S source width   N hypotheses   T hypothesis length
         R rows of a decoding step: all hypotheses in the beams of all sentences
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from dragoman.config.settings import parse_settings
from dragoman.data.subwords import ESCAPES, SPACE_MARK
from dragoman.data.tokenizers import BpeTokenizer, SubwordTokenizer, Tokenizers
from dragoman.decoding.methods import SearchSettings
from dragoman.decoding.protocol import IndexedResults, SearchJob, SearchResult
from dragoman.errors import UserError
from dragoman.inference.engines.base import (
    SUPPORTED_BY_LIBRARY,
    TABLES,
    Engine,
    SupportedValues,
    list_layer_modules,
    render_template,
    require_exportable,
)
from dragoman.inference.engines.published import (
    IdMap,
    PublishedModel,
    is_published,
    read_json_file,
    read_published,
    reorder_rows,
)
from dragoman.inference.predictor import Predictor
from dragoman.io import format_json, write_text
from dragoman.models.base import Model, collect_weights
from dragoman.models.registry import build_model
from dragoman.models.transformer import Transformer, TransformerSettings
from dragoman.modules.positions import POSITIONS, PositionSettings, Sinusoidal
from dragoman.recipe import Recipe, check_model, read_recipe
from dragoman.run_dir import RunFolder
from dragoman.types import BOS, EOS, PAD, SPECIALS, UNK

MIN_POSITIONS = 1024  # minimum size of the exported table of sinusoids
DEFAULT_LONGEST = 512  # maximum source length of an imported model in tokens, if config.json has no longest_source
SINUSOID_TOLERANCE = 1e-4  # maximum difference between imported sinusoids and ours
NORM_PLACE_BY_MODEL_TYPE = {"marian": "post", "pegasus": "pre"}


class Weight(NamedTuple):
    """A parameter of our model, or a part of one, and its name in `transformers`."""

    name: str
    tensor: Tensor
    axis: int | None  # the axis whose size is the model width; None if there is none


def compute_feature_order(width: int) -> Tensor:
    """Return the indices of our features in the order of `transformers`: those with sines, then those with cosines."""
    return torch.cat([torch.arange(0, width, 2), torch.arange(1, width, 2)])


def reorder_features(weight: Weight, order_C: Tensor) -> Tensor:
    tensor = weight.tensor.detach().float().cpu()
    return tensor.clone() if weight.axis is None else tensor.index_select(weight.axis, order_C)


def list_weights(model: Transformer) -> Iterator[Weight]:
    """Yield every weight of the model with its name in `transformers`."""
    for prefix, stack in (("model.encoder.", model.encoder), ("model.decoder.", model.decoder)):
        if stack.settings.norm_place == "pre":
            yield from split_module(stack.norm, [f"{prefix}layer_norm"], 0)
        for number, layer in enumerate(stack.layers):
            for names, module in list_layer_modules(layer):
                full_names = [f"{prefix}layers.{number}.{name}" for name in names.huggingface]
                yield from split_module(module, full_names, names.axis)
    source, target = model.encoder.embedding.weight, model.decoder.embedding.weight
    if source is target:
        yield Weight("model.shared.weight", target, 1)
    else:
        yield Weight("model.encoder.embed_tokens.weight", source, 1)
        yield Weight("model.decoder.embed_tokens.weight", target, 1)
    if model.project.weight is not target:
        yield Weight("lm_head.weight", model.project.weight, 1)


def split_module(module: nn.Module, names: Sequence[str], axis: int) -> Iterator[Weight]:
    """Split weight and bias of a linear layer or norm into as many parts as there are names, and yield all parts."""
    weights, biases = (module.get_parameter(name).chunk(len(names)) for name in ("weight", "bias"))
    for name, weight, bias in zip(names, weights, biases, strict=True):
        yield Weight(f"{name}.weight", weight, axis)
        yield Weight(f"{name}.bias", bias, 0 if axis == 0 else None)


def save_huggingface(predictor: Predictor[Model], folder: Path) -> list[str]:
    """Write a folder that `transformers` opens. Return messages about what the format cannot represent."""
    model, tokenizers, search = predictor.model, predictor.tokenizers, predictor.recipe.search
    model = require_exportable(model, "Hugging Face", equal_head_widths=True)
    settings, pre_norm = model.settings, model.settings.norm_place == "pre"
    if not pre_norm and settings.position != "sinusoidal":
        raise UserError(
            f"model.position={settings.position} with model.norm_place=post cannot be exported to Hugging Face, whose "
            "MarianMT computes its positions; train with model.position=sinusoidal"
        )
    if pre_norm and model.encoder.embedding is not model.decoder.embedding:
        raise UserError(
            "model.norm_place=pre with two tables of embeddings cannot be exported to Hugging Face: Pegasus has one; "
            "train with tokenizer.joint=true and model.tied=true, or with model.norm_place=post"
        )
    if tokenizers.tags:
        raise UserError(
            f"Hugging Face's tokenizers do not support the tags and separators of this model "
            f"({', '.join(tokenizers.tags)}); "
            "export to ctranslate2 or onnx"
        )
    order_C = compute_feature_order(settings.width)
    tensors = {weight.name: reorder_features(weight, order_C) for weight in list_weights(model)}
    max_output = int(search.max_ratio * predictor.longest_source) + search.max_extra + 1  # tokens, with EOS
    positions = max(MIN_POSITIONS, 1 + max_output)
    if pre_norm:  # Pegasus reads sinusoids from the file, MarianMT computes them
        for side in ("encoder", "decoder"):
            sinusoid_PC = make_sinusoid_table(settings.position, positions, settings.width)
            tensors[f"model.{side}.embed_positions.weight"] = sinusoid_PC.index_select(1, order_C)
    bias_V = model.project.bias
    tensors["final_logits_bias"] = torch.zeros(1, len(model.project.weight)) if bias_V is None else bias_V.float()[None]
    save_file(tensors, str(folder / "model.safetensors"), {"format": "pt"})
    render = partial(render_json, predictor=predictor, positions=positions, max_output=max_output)
    files = {name: render(name) for name in ("config.json", "generation_config.json")}
    notes = []
    if not isinstance(tokenizers.source, SubwordTokenizer):
        notes = ["the tokenizer is not bpe or unigram, the only ones that Hugging Face reads: encode with tokenizer/"]
    elif not tokenizers.joint:
        notes = ["there are two vocabularies, and Hugging Face reads one: encode and decode with tokenizer/"]
    else:
        files["tokenizer.json"] = describe_tokenizer(tokenizers.source)
        files["tokenizer_config.json"] = render("tokenizer_config.json")
    for name, content in files.items():
        (folder / name).write_text(format_json(content), encoding="utf-8")
    return notes


def render_json(name: str, **context: object) -> object:
    """Return the parsed content of a JSON file, made from its template in templates/huggingface/."""
    special_tokens = {"PAD": PAD, "UNK": UNK, "BOS": BOS, "EOS": EOS, "SPECIALS": SPECIALS}
    return json.loads(render_template(f"huggingface/{name}", {**special_tokens, **context}))


def describe_tokenizer(tokenizer: SubwordTokenizer) -> object:
    """Return the content of tokenizer.json for a tokenizer.

    A unigram model is described by the scores of its tokens; BPE by all pairs of tokens whose concatenation is a token.
    """
    ids = list(range(tokenizer.size))
    pieces, scores = tokenizer.processor.id_to_piece(ids), tokenizer.processor.get_score(ids)
    merges = None
    if isinstance(tokenizer, BpeTokenizer):
        vocabulary = tokenizer.sampler.vocabulary.ids
        splits = ((piece[:i], piece[i:]) for piece in vocabulary for i in range(1, len(piece)))
        merges = [(left, right) for left, right in splits if left in vocabulary and right in vocabulary]
    return render_json(
        "tokenizer.json",
        escapes=ESCAPES,
        space=SPACE_MARK,
        byte_fallback=tokenizer.lossless,
        scores=list(zip(pieces, scores, strict=True)),
        vocabulary={piece: number for number, piece in enumerate(pieces)},
        merges=merges,
    )


def make_sinusoid_table(position: str, count: int, width: int) -> Tensor:
    """Return the vectors that a position encoding adds at the first `count` positions, sinusoid_PC."""
    embedding = POSITIONS[position].embedding(PositionSettings(width=width, heads=1))
    assert isinstance(embedding, Sinusoidal)
    return embedding.compute_sinusoids(torch.arange(count))


def import_huggingface(
    folder: Path, out: Path, *, licence: str = "", source_language: str = "", target_language: str = ""
) -> IdMap | None:
    """Write a run folder from a folder that `transformers` saved; raise a UserError that names what is unsupported.

    The licence and the languages are those of a published model (`read_published`). Return the id map of such a model,
    or None for a folder that was exported from a run, which has our ids.
    """
    if is_published(folder):
        published = read_published(
            folder, licence=licence, source_language=source_language, target_language=target_language
        )
        import_published(folder, out, published)
        return published.id_map
    config = read_config(folder / "config.json")
    if not (folder / "tokenizer" / "tokenizer.json").exists():
        raise UserError(
            f"{str(folder)!r} has no folder tokenizer/ with Dragoman's tokenizer, and other tokenizers have other "
            "ids; copy it from the run that the model was exported from"
        )
    given = {"--licence": licence, "--from": source_language, "--to": target_language}
    if options := [name for name, value in given.items() if value]:
        raise UserError(
            f"{options[0]} is for published models, and {str(folder)!r} was exported from a run; leave {options[0]} out"
        )
    tokenizers = Tokenizers.load(folder / "tokenizer")
    tensors = read_weights(folder)
    recipe = make_recipe(config, folder, tokenizers, tensors)
    model = build_model(recipe.neural_model, **tokenizers.sizes, joint=recipe.tokenizer.joint)
    assert isinstance(model, Transformer)
    fill_weights(model, tensors)
    longest_source = config.get("longest_source", min(DEFAULT_LONGEST, config["max_position_embeddings"] - 1))
    save_run(out, recipe, tokenizers, model, longest_source)
    return None


def import_published(folder: Path, out: Path, published: PublishedModel) -> None:
    """Write the run folder of a published model, with its origin and licence."""
    recipe, tokenizers = published.recipe, published.tokenizers
    model = build_model(recipe.neural_model, **tokenizers.sizes, joint=recipe.tokenizer.joint)
    assert isinstance(model, Transformer)
    fill_weights(model, reorder_rows(read_weights(folder), published.id_map, joint=recipe.tokenizer.joint))
    save_run(out, recipe, tokenizers, model, published.longest_source)
    provenance = {"dragoman": version("dragoman"), "torch": torch.__version__, "origin": published.origin}
    write_text(RunFolder(out).provenance_file, format_json(provenance))


def save_run(out: Path, recipe: Recipe, tokenizers: Tokenizers, model: Transformer, longest_source: int) -> None:
    run = RunFolder(out)
    run.create(recipe)
    tokenizers.save(run.tokenizer_folder)
    run.save_model(collect_weights(model), tokenizer=tokenizers.fingerprint(), longest=str(longest_source))


def read_config(path: Path) -> dict[str, Any]:
    """Return the content of config.json; raise a UserError if our models do not support one of its values."""
    try:
        config: dict[str, Any] = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        raise UserError(f"{str(path)!r} is missing or damaged; name a folder that transformers has saved") from None
    supported: SupportedValues = {
        "model_type": list(NORM_PLACE_BY_MODEL_TYPE),
        "activation_function": SUPPORTED_BY_LIBRARY["Hugging Face"]["activation"],
        "scale_embedding": (True,),
        "decoder_attention_heads": (config.get("encoder_attention_heads"),),
        "decoder_ffn_dim": (config.get("encoder_ffn_dim"),),
        "pad_token_id": (PAD,),
        "eos_token_id": (EOS,),
        "decoder_start_token_id": (BOS,),
    }
    for name, choices in supported.items():
        value = config.get(name)
        if value is None or value not in choices:
            choice = " or ".join(map(str, choices))
            raise UserError(f"{str(path)!r} has {name}={value}, which Dragoman does not support; it takes {choice}")
    return config


def make_recipe(config: dict[str, Any], folder: Path, tokenizers: Tokenizers, tensors: dict[str, Tensor]) -> Recipe:
    """Return the recipe in the folder, or the default one, with the model section that config.json describes."""
    path = folder / "config.yaml"
    recipe = read_recipe(path) if path.exists() else Recipe()
    sizes = config["vocab_size"], config.get("decoder_vocab_size", config["vocab_size"])
    if sizes != (tokenizers.source.size, tokenizers.target.size):
        raise UserError(
            f"{str(folder / 'tokenizer')!r} has {tokenizers.source.size} and {tokenizers.target.size} tokens, "
            f"but the model was made for {sizes[0]} and {sizes[1]}; copy the tokenizer that belongs to it"
        )
    values = {ours: config[theirs] for ours, theirs in TABLES["huggingface_config"].items()}
    values |= {
        "kind": "transformer",
        "dropout": float(config.get("dropout", 0.1)),
        "norm_place": NORM_PLACE_BY_MODEL_TYPE[config["model_type"]],
        "tied": config.get("tie_word_embeddings", True),
        "position": find_position(tensors, config["d_model"]),
        "output_bias": bool(tensors.get("final_logits_bias", torch.zeros(1)).any()),
    }
    if tokenizers.joint and values["tied"] and not config.get("share_encoder_decoder_embeddings", True):
        raise UserError(
            f"{str(folder / 'config.json')!r} has one vocabulary but two tables of embeddings and a tied output, "
            "which Dragoman does not support"
        )
    tokenizer = recipe.tokenizer.model_copy(update={"joint": tokenizers.joint})
    settings = parse_settings(TransformerSettings, values, where="model")
    return check_model(recipe.model_copy(update={"model": settings, "tokenizer": tokenizer}))


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights by name. Pickled files are loaded safely: no code in them is executed."""
    tensors: dict[str, Tensor] = {}
    for path in list_weight_files(folder):
        try:
            is_pickle = path.suffix == ".bin"
            tensors |= torch.load(path, map_location="cpu", weights_only=True) if is_pickle else load_file(path)
        except UnpicklingError:
            raise UserError(f"{str(path)!r} is damaged or contains more than weights, so it is not loaded") from None
        except (SafetensorError, OSError, RuntimeError, ValueError, EOFError, TypeError) as error:
            raise UserError(f"{str(path)!r} is incomplete or damaged ({error}); copy it again") from None
    return tensors


def list_weight_files(folder: Path) -> list[Path]:
    """Return the files with the weights of a model: one, or those that an index names."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).exists():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.exists():
            files = read_json_file(index, required=True).get("weight_map")
            # Only files of this folder: an index comes from elsewhere, and could name any file.
            if not isinstance(files, dict) or not all(isinstance(f, str) and Path(f).name == f for f in files.values()):
                raise UserError(f"{str(index)!r} does not name the files of the weights; copy it again")
            return [folder / file for file in sorted({*files.values()})]
    raise UserError(f"{str(folder)!r} has neither model.safetensors nor pytorch_model.bin; name a complete model")


@torch.no_grad()
def fill_weights(model: Transformer, tensors: dict[str, Tensor]) -> None:
    """Copy weights of `transformers` into the model; raise a UserError for others, unless they have no effect."""
    inverse_order_C = compute_feature_order(model.settings.width).argsort()
    # The shared table is that of encoder and decoder, unless these have tables of their own.
    shared = "model.shared.weight"
    used = {"final_logits_bias", shared, *(["lm_head.weight"] if model.settings.tied else [])}
    for weight in list_weights(model):
        names = [weight.name, *([shared] if weight.name.endswith("embed_tokens.weight") else [])]
        if weight.name == shared:
            names = TABLES["huggingface_embeddings"]
        tensor = next((tensors[name] for name in names if name in tensors), None)
        if tensor is None or tensor.shape != weight.tensor.shape:
            actual = "missing" if tensor is None else " x ".join(map(str, tensor.shape))
            expected = " x ".join(map(str, weight.tensor.shape))
            raise UserError(f"the weight {weight.name!r} is {actual}, and config.json requires {expected}")
        weight.tensor.copy_(reorder_features(weight._replace(tensor=tensor), inverse_order_C))
        used.update(names)
    for name in sorted(set(tensors) - used):
        if not name.endswith("embed_positions.weight"):
            raise UserError(f"Dragoman's models do not have the weight {name!r}")
        if not has_sinusoids(tensors[name], model.settings.position):
            raise UserError(f"the weight {name!r} does not contain sinusoids, the only positions that can be imported")
    bias = tensors.get("final_logits_bias")
    if bias is not None and model.project.bias is not None:
        model.project.bias.copy_(bias.flatten())


def find_position(tensors: dict[str, Tensor], width: int) -> str:
    """Return the value of model.position whose vectors are in the tables of positions; sinusoidal without a table."""
    tables = [tensor for name, tensor in tensors.items() if name.endswith("embed_positions.weight")]
    fitting = (name for name in ("sinusoidal", "fairseq") if width >= 4 and all(has_sinusoids(t, name) for t in tables))
    return next(fitting, "sinusoidal")


def has_sinusoids(position_PC: Tensor, position: str) -> bool:
    """Return whether a table contains the vectors of a position encoding, in the order of `transformers`."""
    sinusoid_PC = make_sinusoid_table(position, *position_PC.shape)[:, compute_feature_order(position_PC.size(1))]
    rounding = torch.finfo(position_PC.dtype).eps if position_PC.is_floating_point() else 0.0  # of half precision
    return torch.allclose(position_PC.float(), sinusoid_PC, atol=max(SINUSOID_TOLERANCE, rounding))


class HuggingFaceEngine(Engine):
    """The engine that runs an exported model in `transformers`."""

    def __init__(self, folder: Path, id_map: IdMap | None = None) -> None:
        """Load the model. `id_map` is for a published model, whose ids differ from ours."""
        try:
            import transformers
        except ImportError:
            raise UserError(
                "transformers is not installed, so translations cannot be compared; "
                "pip install 'dragoman[huggingface]' installs it"
            ) from None
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self.model: Any = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32).eval()
        rows = self.model.config.vocab_size, getattr(self.model.config, "decoder_vocab_size", None)
        self.source_ids = id_map.source if id_map else range(rows[0])  # their id of each of ours
        self.target_ids = id_map.target if id_map else range(rows[1] or rows[0])
        self.our_ids = {theirs: ours for ours, theirs in enumerate(self.target_ids) if ours != BOS}

    def iter_results(self, jobs: Sequence[SearchJob], search: SearchSettings) -> IndexedResults:
        """Yield the index and the results of each job. One call of `generate` decodes all jobs with the same limit."""
        groups = {(job.max_tokens, job.constraints.prefix) for job in jobs}
        for limit, prefix in sorted(groups):
            indices = [i for i, job in enumerate(jobs) if (job.max_tokens, job.constraints.prefix) == (limit, prefix)]
            sources = [jobs[i].ids for i in indices]
            yield from zip(indices, self.generate(sources, limit, search, *prefix), strict=True)

    @torch.inference_mode()
    def generate(
        self, sources: list[list[int]], limit: int, search: SearchSettings, language: int | None = None
    ) -> list[list[SearchResult]]:
        """Return the results for each source. Log-probabilities are computed from the logits of all steps.

        (`sequences_scores` of `transformers` are wrong for truncated hypotheses.) `language` is the first token of the
        results, if it is given.
        """
        rows = [torch.tensor([self.source_ids[i] for i in (*ids, EOS)]) for ids in sources]
        pad, eos = self.target_ids[PAD], self.target_ids[EOS]
        source_BS = pad_sequence(rows, batch_first=True, padding_value=pad)
        real_BS = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        output = self.model.generate(
            source_BS,
            attention_mask=real_BS,
            forced_bos_token_id=None if language is None else self.target_ids[language],
            forced_eos_token_id=None,
            bad_words_ids=None,
            suppress_tokens=sorted({pad, self.target_ids[BOS]} - {eos}),
            no_repeat_ngram_size=search.no_repeat or None,
            num_beams=search.beam,
            num_return_sequences=search.nbest,
            length_penalty=search.length_penalty,
            early_stopping={"enough": True, "best": "never"}.get(search.stop, False) if search.beam > 1 else False,
            max_new_tokens=limit,
            max_length=None,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        token_NT, logp_TRV = output.sequences[:, 1:], torch.stack(output.logits).float().log_softmax(-1)
        step_T = torch.arange(token_NT.size(1))  # fewer than the steps of the search if long hypotheses were discarded
        row_NT = torch.arange(len(token_NT))[:, None].expand_as(token_NT)  # the row of a step that predicted each token
        if search.beam > 1:  # beam search reorders rows
            row_NT = output.beam_indices[:, : len(step_T)].clamp(min=0)
        logp_NT = logp_TRV[step_T, row_NT, token_NT]
        if language is not None:
            logp_NT[:, 0] = 0.0  # given, not predicted
        results = []
        for tokens, logps in zip(token_NT.tolist(), logp_NT.tolist(), strict=True):
            finished = eos in tokens
            length = tokens.index(eos) + 1 if finished else len(tokens)
            logp = sum(logps[:length])
            score = logp / length**search.length_penalty
            ours = [self.our_ids[token] for token in tokens[: length - finished]]
            results.append(SearchResult(ours, logp, score, finished))
        return [results[start : start + search.nbest] for start in range(0, len(results), search.nbest)]

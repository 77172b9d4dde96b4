"""Load run folders: `load` returns the Translator, Generator or Classifier for the task of the run.

    dragoman.load("runs/demo").translate(["A man walks his dog."])

Several translators are loaded as an ensemble, which averages their probabilities at every token; several classifiers
as one that averages their probabilities of the labels.

Shapes   B rows of a batch   S source length   T target length (both with padding)   N hypotheses
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from dragoman.config.settings import get_entry
from dragoman.data.tokenizers import Tokenizers
from dragoman.decoding.protocol import Ensemble, EnsembleState, mean_logp
from dragoman.errors import UserError
from dragoman.hardware import choose_device
from dragoman.inference.engines.base import Engine
from dragoman.inference.engines.ctranslate2 import CTranslate2Engine
from dragoman.inference.engines.torch import TorchEngine, prepare_model
from dragoman.inference.predictor import Predictor, parse_header
from dragoman.inference.single_sequence import Classifier, ClassifierEnsemble, Generator
from dragoman.inference.translator import Translator
from dragoman.models.base import Model, Seq2Seq, collect_weights
from dragoman.models.registry import build_model, rename_format_1_tensors
from dragoman.run_dir import RunFolder, load_tensors
from dragoman.types import Batch, PairScore

RunPaths = str | Path | Sequence[str | Path]
PREDICTORS: dict[str, type[Translator] | type[Generator] | type[Classifier]] = {  # by task
    "translate": Translator,
    "generate": Generator,
    "classify": Classifier,
}
_P = TypeVar("_P", Translator, Generator, Classifier)


def load(run: RunPaths, *, device: str = "auto", engine: str = "auto") -> Translator | Generator | Classifier:
    """Load a run folder as a Translator, a Generator or a Classifier, depending on the task of the model.

    Several runs with the same vocabulary are loaded as one translator or classifier, which averages their
    probabilities. `engine` is the inference engine of a translator, as `--engine` on the command line
    (docs/exchange.md).

        translator = dragoman.load("runs/demo")
        [hypothesis] = translator.translate(["A man walks his dog."])
        print(hypothesis.text)
    """
    predictors = [open_run(path, device=device) for path in ([run] if isinstance(run, str | Path) else run)]
    if not predictors:
        raise UserError("there is no run to load; name one or more run folders")
    predictor = predictors[0] if len(predictors) == 1 else combine_predictors(predictors)
    if not isinstance(predictor, Translator):
        return predictor
    if predictor.supports_engines:
        return replace(predictor, engine=get_entry(ENGINES, engine, "engine")(predictor, None))
    if engine != "auto":
        kind = predictor.recipe.model.kind
        raise UserError(f"model.kind={kind} has a decoder of its own and does not run in {engine}; leave --engine out")
    return predictor


def load_as(predictor_class: type[_P], run: RunPaths, *, device: str = "auto", engine: str = "auto") -> _P:
    """Load a run as `load` does; raise a UserError if the result is not of the class `predictor_class`."""
    predictor = load(run, device=device, engine=engine)
    if isinstance(predictor, predictor_class):
        return predictor
    expected_task = next(task for task, cls in PREDICTORS.items() if issubclass(predictor_class, cls))
    task = predictor.recipe.model.task
    names = ", ".join(repr(str(path)) for path in ([run] if isinstance(run, str | Path) else run))
    raise UserError(f"the model in {names} does not {expected_task}: it was trained to {task}; use dragoman {task}")


def open_run(run: str | Path, *, device: str = "auto") -> Translator | Generator | Classifier:
    """Load the model in a run folder; a translator gets the default engine, PyTorch in float32.

    No files outside the folder are needed, and no code from the folder is executed.
    """
    folder = RunFolder(run)
    recipe = folder.load_recipe()
    if recipe.model.kind == "smt":
        from dragoman.inference.phrase_translator import open_phrase_translator  # imports Numba

        choose_device(device)  # raises a UserError for an unusable device; the decoder always runs on the CPU
        return open_phrase_translator(folder, recipe)
    if not folder.model_file.exists():
        if folder.load_state():  # there is a checkpoint, so the model was written and then removed
            raise UserError(
                f"{str(folder.model_file)!r} is missing; restore it, or write it again with dragoman train --resume"
            )
        raise UserError(f"{str(folder.path)!r} has no model yet: training has not reached its first checkpoint")
    weights, header = load_tensors(folder.model_file)
    for name, tensor in weights.items():
        if not tensor.isfinite().all():
            raise UserError(
                f"{str(folder.model_file)!r} has weights that are not finite, in {name!r}; restore it, or train again"
            )
    tokenizers = Tokenizers.load(folder.tokenizer_folder, fingerprint=header.get("tokenizer", ""))
    model = build_model(recipe.model, **tokenizers.sizes, joint=recipe.tokenizer.joint)
    if folder.check_format() == 1:  # format 1 has names of tensors from earlier releases
        weights = rename_format_1_tensors(weights)
    copy_weights(model, weights, repr(str(folder.model_file)), "its config.yaml")
    # The length of the longest source in training, and statistics of the training pairs, for warnings.
    longest_source, statistics = parse_header(header, folder.model_file)
    torch_device = choose_device(device)
    model_on_device: Any = model.to(torch_device).eval()
    arguments = (model_on_device, tokenizers, recipe, longest_source, torch_device)
    return PREDICTORS[recipe.model.task](*arguments, statistics=statistics, run=str(run))


def make_torch_engine(predictor: Predictor[Model], _cache: Path | None = None, *, precision: str = "float32") -> Engine:
    """Return an engine that runs the model in PyTorch. `_cache` is unused: other engines convert models into it."""
    model = prepare_model(cast(Seq2Seq, predictor.model), predictor.device, precision)
    return TorchEngine(model, predictor.device, predictor.tokenizers.target.decode)


# `auto` is PyTorch in float32: a line has the same translation at every batch size, in any order, and independent of
# earlier calls. In CTranslate2, rounding depends on the other sentences of the batch, and other precisions are less
# exact, so these engines are used only on request (docs/decisions/0014-auto-is-torch.md).
ENGINES: dict[str, Callable[[Predictor[Model], Path | None], Engine]] = {
    "auto": make_torch_engine,
    "torch": make_torch_engine,
    "torch-bf16": partial(make_torch_engine, precision="bf16"),
    "torch-int8": partial(make_torch_engine, precision="int8"),
    "ctranslate2": CTranslate2Engine.convert,
    "ctranslate2-int8": partial(CTranslate2Engine.convert, quantization="int8"),
}


def copy_weights(model: nn.Module, weights: dict[str, Tensor], source: str, target: str) -> None:
    """Copy weights into a model; raise a UserError if names or shapes of the tensors differ.

    `source` and `target` are what error messages call the origin of the weights and the definition of the model.
    """
    tensors = collect_weights(model)
    for name in sorted(set(tensors) ^ set(weights)):
        raise UserError(f"{source} does not fit {target}: tensor {name!r} is only in one of them")
    for name, tensor in tensors.items():
        if tensor.shape != weights[name].shape:
            sizes = [" x ".join(map(str, shape)) for shape in (weights[name].shape, tensor.shape)]
            raise UserError(f"{source} does not fit {target}: tensor {name!r} is {sizes[0]}, not {sizes[1]}")
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(weights[name])


class EnsembleModel(Seq2Seq):
    """Several models with the same vocabulary, whose probabilities are averaged.

    Other models return hidden states from `forward`, and logits from `compute_logits`. Here `forward` already returns
    log-probabilities, and `compute_logits` is the identity.
    """

    def __init__(self, models: Sequence[Seq2Seq]) -> None:
        super().__init__()
        self.members = list(models)
        # Whether a member's attention distinguishes source tokens, so that there are alignments.
        self.aligns = any(model.aligns for model in models)
        self.registered = nn.ModuleList(models)  # so that `to`, `train` and `eval` also apply to the members
        self.ensemble = Ensemble(models)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logarithm of the mean probabilities of the next tokens."""
        return mean_logp([model.compute_logits(model(batch)).float().log_softmax(-1) for model in self.members])

    def compute_logits(self, states: Tensor) -> Tensor:
        return states

    @property
    def attention_layers(self) -> int:  # type: ignore[override]
        # Number of decoder layers that attend to the source; `compute_alignment` takes the same layer of every member.
        return min((model.attention_layers for model in self.members if model.aligns), default=1)

    def compute_alignment(self, batch: Batch, layer: int | None = None) -> Tensor:
        """Return weight_BTS: the mean alignment of the members that have alignments."""
        return torch.stack([model.compute_alignment(batch, layer) for model in self.members if model.aligns]).mean(0)

    def start(self, source_BS: Tensor, real_BS: Tensor, *features: Mapping[str, Tensor]) -> EnsembleState:
        """Return the state before the first token. `real_BS` is False at padding.

        `features` is at most one mapping, from the name of a feature of the source tokens (data/features.py) to its
        values.
        """
        return self.ensemble.start(source_BS, real_BS, *features)

    def step(self, token_N: Tensor, state: EnsembleState) -> tuple[Tensor, EnsembleState]:
        return self.ensemble.step(token_N, state)


def combine_predictors(predictors: Sequence[Translator | Generator | Classifier]) -> Translator | Classifier:
    """Return the ensemble of several translators, or of several classifiers, with equal vocabularies.

    The first one's search settings are used.
    """
    first, names = predictors[0], [predictor.run for predictor in predictors]
    task = first.recipe.model.task
    for predictor, name in zip(predictors, names, strict=True):
        if predictor.recipe.model.task != task:
            raise UserError(
                f"{names[0]!r} was trained to {task} and {name!r} to {predictor.recipe.model.task}, "
                "so they cannot form an ensemble; leave one of them out"
            )
        if predictor.tokenizers.fingerprint() != first.tokenizers.fingerprint():
            raise UserError(
                f"{names[0]!r} and {name!r} have different vocabularies, so they cannot form an ensemble; train one of "
                f"them with the other's: dragoman train --init-from, or the same data, tokenizer settings and seed"
            )
        if predictor.recipe.model.source_features != first.recipe.model.source_features:
            features = [", ".join(member.recipe.model.source_features) or "none" for member in (first, predictor)]
            difference = f"different source features ({features[0]} and {features[1]})"
            raise UserError(f"{names[0]!r} and {name!r} use {difference}, so they cannot form an ensemble")
        if predictor.recipe.data.context != first.recipe.data.context:
            contexts = f"data.context={first.recipe.data.context} and {predictor.recipe.data.context}"
            raise UserError(f"{names[0]!r} and {name!r} have {contexts}, so they cannot form an ensemble")
        if isinstance(predictor, Generator) or (isinstance(predictor, Translator) and not predictor.supports_engines):
            raise UserError(
                f"{name!r} is no neural translation model and no classifier, so it cannot be part of an ensemble; "
                "leave it out"
            )
    # Every text must fit into all models, so the recipe is the one with the lowest limit on the length of a text.
    strictest = min(predictors, key=lambda predictor: predictor.max_tokens).recipe
    recipe = strictest.model_copy(update={"search": first.recipe.search})
    arguments = (first.tokenizers, recipe, min(predictor.longest_source for predictor in predictors), first.device)
    details: dict[str, Any] = {"statistics": first.statistics, "run": ", ".join(names)}
    models: list[Any] = [predictor.model for predictor in predictors]
    if isinstance(first, Classifier):
        return Classifier(ClassifierEnsemble(models).eval(), *arguments, **details)
    return Translator(EnsembleModel(models).eval(), *arguments, **details)


def score(
    run: RunPaths, *, sources: Sequence[str], targets: Sequence[str], tag: str = "", device: str = "auto"
) -> list[PairScore]:
    """Return the log-probability that a run gives each target as the translation of its source.

    `tag`, such as the target language, is put before every source; only for models trained with tags. A model trained
    with data.context reads the previous sources as context; an empty source starts a new document.

        scores = dragoman.score("runs/mine", sources=["A man walks."], targets=["Ein Mann geht."])
        for score in scores:
            print(score.logp, score.tokens, score.token_logps)
    """
    return load_as(Translator, run, device=device).score(sources, targets, tag=tag)

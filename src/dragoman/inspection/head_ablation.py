"""BLEU and loss of a translation model without one of its attention heads.

A head is removed by setting its columns of the output projection to zero, which has the same effect as setting its
output to zero before the projection. The weights are restored afterwards.

Shapes   L layers   H heads   D head width   C model width
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from dragoman.inference.engines.torch import TorchEngine, prepare_model
from dragoman.inference.translator import Translator
from dragoman.inspection.heads import Ablation, AnalysedPair, list_trees
from dragoman.inspection.records import Floats
from dragoman.metrics.metrics import compute_metrics
from dragoman.modules.attention import CrossAttention, MultiHeadAttention, SelfAttention
from dragoman.progress import ProgressBar
from dragoman.types import Score

ABLATION_SEARCH = {"method": "greedy", "coverage": 0.0}  # whatever the search section of the recipe says


def list_attention_modules(model: nn.Module) -> dict[str, list[MultiHeadAttention]]:
    """Return the multi-head attention of every layer with an output projection, by part of the model."""
    found: dict[str, list[MultiHeadAttention]] = {}
    for module in model.modules():
        if isinstance(module, SelfAttention | CrossAttention) and isinstance(module.out, nn.Linear):
            part = "cross"
            if isinstance(module, SelfAttention):
                part = "encoder" if module.pattern.bidirectional else "decoder"
            found.setdefault(part, []).append(module)
    return found


@contextmanager
def remove_head(attention: MultiHeadAttention, head: int) -> Iterator[None]:
    """Set the output of one head to zero within the `with` block."""
    weight_CE = attention.out.weight
    assert isinstance(weight_CE, torch.Tensor)
    width = attention.settings.head_value_width
    columns = slice(head * width, (head + 1) * width)
    with torch.no_grad():
        saved_CD = weight_CE[:, columns].clone()
        weight_CE[:, columns] = 0
    try:
        yield
    finally:
        with torch.no_grad():
            weight_CE[:, columns] = saved_CD


def ablate_heads(
    translator: Translator, corpus: Sequence[AnalysedPair], sizes: Mapping[str, tuple[int, int]], *, tag: str = ""
) -> tuple[Ablation, list[str]]:
    """Return loss and BLEU without each head, and notes on heads that cannot be removed.

    `sizes` has the number of layers and heads of every part. Layers that share their weights lose the head together.
    """
    modules = list_attention_modules(translator.model)
    notes = [
        f"attention without an output projection cannot be removed: {part}" for part in sizes if part not in modules
    ]
    loss_change = {part: np.zeros(size, dtype=np.float32) for part, size in sizes.items() if part in modules}
    bleu_change: dict[str, Floats] = {part: np.zeros_like(change) for part, change in loss_change.items()}
    loss, bleu = measure_quality(translator, corpus, tag)
    with ProgressBar("removing heads", total=sum(map(np.size, loss_change.values())), unit="heads") as bar:
        for part, change_LH in loss_change.items():
            for layer, head in np.ndindex(*change_LH.shape):
                with remove_head(modules[part][layer % len(modules[part])], head):
                    new_loss, new_bleu = measure_quality(translator, corpus, tag)
                change_LH[layer, head] = new_loss - loss
                bleu_change[part][layer, head] = new_bleu.value - bleu.value
                bar.advance(1)
    return Ablation(loss, bleu.value, bleu.signature, loss_change, bleu_change), notes


def measure_quality(translator: Translator, corpus: Sequence[AnalysedPair], tag: str) -> tuple[float, Score]:
    """Return the loss per target token, EOS included, and the BLEU of greedy search with the current weights."""
    sources, targets = [pair.source for pair in corpus], [pair.target for pair in corpus]
    pair_scores = translator.score(sources, targets, trees=list_trees(translator, corpus), tag=tag)
    token_logps = [logp for score in pair_scores for logp in score.token_logps]
    outputs = translate_greedily(translator, corpus, tag=tag)
    [bleu] = compute_metrics(outputs, [targets], ["bleu"])
    return -float(np.mean(token_logps)), bleu


def translate_greedily(translator: Translator, corpus: Sequence[AnalysedPair], *, tag: str = "") -> list[str]:
    """Return the translations of the sources by greedy search, with the current weights of the model."""
    prepared = prepare_model(translator.model, translator.device, "float32")  # packs a copy of the weights
    engine = TorchEngine(prepared, translator.device, translator.tokenizers.target.decode)
    sources, trees = [pair.source for pair in corpus], list_trees(translator, corpus)
    outputs = replace(translator, engine=engine).translate(
        sources, search=ABLATION_SEARCH, trees=trees, tag=tag, align=False
    )
    return [output.text for output in outputs]

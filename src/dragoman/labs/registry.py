"""The registry of experiments. To add one, add it to the dictionary at the end of its file."""

from __future__ import annotations

from collections.abc import Mapping

from dragoman.labs import (
    agreement,
    attention,
    bleu,
    bottleneck,
    context,
    cost,
    data_questions,
    depth,
    features,
    head_roles,
    history,
    memory,
    neurons,
    positions,
    search,
    transformer_parts,
)
from dragoman.labs.experiment import Experiment

GROUPS: dict[str, Mapping[str, Experiment]] = {
    "Memory and gradients": memory.EXPERIMENTS,
    "Agreement": agreement.EXPERIMENTS,
    "Bottleneck and attention": bottleneck.EXPERIMENTS,
    "Depth, residual connections and norms": depth.EXPERIMENTS,
    "Order and positions": positions.EXPERIMENTS,
    "Parts of attention": attention.EXPERIMENTS,
    "Parts of the Transformer": transformer_parts.EXPERIMENTS,
    "Cost": cost.EXPERIMENTS,
    "Search": search.EXPERIMENTS,
    "BLEU": bleu.EXPERIMENTS,
    "History of the field": history.EXPERIMENTS,
    "Data": data_questions.EXPERIMENTS,
    "What layers and heads learn": {**features.EXPERIMENTS, **head_roles.EXPERIMENTS, **neurons.EXPERIMENTS},
    "Context and meaning": context.EXPERIMENTS,
}
EXPERIMENTS: dict[str, Experiment] = {
    name: experiment for group in GROUPS.values() for name, experiment in group.items()
}

"""The registry of experiments: all that the files of this package define, in groups."""

from __future__ import annotations

from types import ModuleType

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


def collect_experiments(*modules: ModuleType) -> dict[str, Experiment]:
    """Return the experiments that modules define, by name."""
    values = (value for module in modules for value in vars(module).values())
    return {value.name: value for value in values if isinstance(value, Experiment)}


GROUPS: dict[str, dict[str, Experiment]] = {
    "Memory and gradients": collect_experiments(memory),
    "Agreement": collect_experiments(agreement),
    "Bottleneck and attention": collect_experiments(bottleneck),
    "Depth, residual connections and norms": collect_experiments(depth),
    "Order and positions": collect_experiments(positions),
    "Parts of attention": collect_experiments(attention),
    "Parts of the Transformer": collect_experiments(transformer_parts),
    "Cost": collect_experiments(cost),
    "Search": collect_experiments(search),
    "BLEU": collect_experiments(bleu),
    "History of the field": collect_experiments(history),
    "Data": collect_experiments(data_questions),
    "What layers and heads learn": collect_experiments(features, head_roles, neurons),
    "Context and meaning": collect_experiments(context),
}
EXPERIMENTS: dict[str, Experiment] = {
    name: experiment for group in GROUPS.values() for name, experiment in group.items()
}

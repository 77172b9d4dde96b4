"""Quick versions of the experiments in labs/attention.py, and the removal of the causal mask."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from dragoman.labs import attention
from dragoman.labs.attention import COPY_TASKS, LOWEST_LOSS, generate_greedily, remove_causal_mask
from dragoman.labs.experiment import Experiment
from dragoman.labs.registry import collect_experiments
from dragoman.labs.small_models import build_small_model, make_batch
from lab_runs import Facts, check_quick_run

EXPERIMENTS = collect_experiments(attention)
FACTS: dict[str, Facts] = {
    "scaled-training": lambda trials: {
        "the wide scaled model learns faster": trials["scaled 256"]["accuracy"]
        > trials["unscaled 256"]["accuracy"] + 0.1,
        "the narrow one has learned something": trials["scaled 32"]["losses"][-1]
        < trials["scaled 32"]["losses"][0] - 0.3,
    },
    "causal-mask": lambda trials: {
        "nothing is below the lowest loss with the mask": all(
            trials[f"{task}, mask"]["last_loss"] > 0.95 * LOWEST_LOSS for task in COPY_TASKS
        ),
        "the loss is below it without the mask": all(
            trials[f"{task}, no mask"]["last_loss"] < 0.3 * LOWEST_LOSS for task in COPY_TASKS
        ),
        "generation works with the mask": all(trials[f"{task}, mask"]["accuracy"] > 0.8 for task in COPY_TASKS),
    },
}


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=EXPERIMENTS)
def test_quick_version(experiment: Experiment, tmp_path: Path) -> None:
    check_quick_run(experiment, tmp_path, FACTS.get(experiment.name))


def test_only_laws_have_no_facts() -> None:
    assert set(FACTS) == {name for name, experiment in EXPERIMENTS.items() if not experiment.law}


@torch.no_grad()
@pytest.mark.parametrize("masked", [True, False])
def test_tokens_before_the_generated_one_attend_as_in_training(masked: bool) -> None:
    model = build_small_model({"kind": "lm", "width": 16, "heads": 2, "layers": 2, "dropout": 0.0}, vocabulary=10)
    prompt = [5, 6, 7]
    with nullcontext() if masked else remove_causal_mask(model):
        generated = generate_greedily(model, torch.tensor([prompt]), 4)[0].tolist()
        for count, token in enumerate(generated):
            batch = make_batch([()], [[*prompt, *generated[:count]]], example_format="lines")
            assert int(model.compute_logits(model(batch))[0, -1].argmax()) == token


@torch.no_grad()
def test_without_the_mask_first_states_depend_on_the_last_token() -> None:
    model = build_small_model({"kind": "lm", "width": 16, "heads": 2, "layers": 2, "dropout": 0.0}, vocabulary=10)
    batch, changed = (make_batch([()], [[5, 6, last, 9]], example_format="lines") for last in (7, 8))

    def differ() -> bool:
        return not torch.equal(model(batch)[:, 0], model(changed)[:, 0])

    assert not differ()
    with remove_causal_mask(model):
        assert differ()
    assert not differ()

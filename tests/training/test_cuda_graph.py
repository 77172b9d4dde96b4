"""Steps captured as CUDA graphs equal eager steps. These tests need a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dragoman.config.settings import TrainSettings
from dragoman.models.base import collect_weights
from dragoman.training.execution import ExecutionPlan
from dragoman.training.optim import OPTIMIZERS, OptimizerFactory
from dragoman.training.step import WARMUP_CALLS, Stepper, fetch_metrics
from dragoman.types import Batch
from tolerance import assert_same
from toy_batch import examples, in_rows
from toy_models import SMALL_RNN, SMALL_TRANSFORMER, Section, build_small_model

pytestmark = pytest.mark.gpu  # graphs are captured there only
PLAIN = ExecutionPlan("cuda", "bf16", False, 1)
SECTION = {**SMALL_TRANSFORMER, "width": 32, "dropout": 0.2}  # heads wide enough for the kernels of a GPU
STEPS = WARMUP_CALLS + 4


def batches(in_a_row: int = 4) -> list[Batch]:
    """Return batches with two numbers of rows, each with an empty row."""
    some, heights = examples(40), [3 + n % 2 for n in range(2 * STEPS)]
    full = [[[in_a_row * r + i for i in range(in_a_row)] for r in range(height)] for height in heights]
    return [in_rows([*rows, []], some) for rows in full]


def trained(choices: ExecutionPlan, section: Section = SECTION, **settings: Any) -> tuple[Stepper, list[float]]:
    torch.manual_seed(1)
    stepper = Stepper(build_small_model(section, dtype=torch.float32), TrainSettings(ema=0.9, **settings), choices)
    in_a_row = 1 if section.get("kind") == "rnn" else 4
    done = [stepper.update([batch], step, 1e-3) for step, batch in enumerate(batches(in_a_row), 1)]
    return stepper, [update.loss for update in fetch_metrics(done)]


@pytest.mark.parametrize(
    "settings", [{}, {"optimizer": "muon"}, {"optimizer": "stock nadam"}, {"consistency": "rdrop"}], ids=str
)
def test_captured_steps_equal_eager_steps(settings: dict[str, Any]) -> None:
    compare(SECTION, **settings)


@pytest.mark.parametrize("feeding", [False, True])
def test_captured_steps_of_a_recurrent_model_equal_eager_steps(feeding: bool) -> None:
    compare({**SMALL_RNN, "dropout": 0.2, "input_feeding": feeding})


def compare(section: Section, **settings: Any) -> None:
    one, losses = trained(replace(PLAIN, use_cuda_graphs=True), section, **settings)
    assert one.cuda_graphs is not None
    assert len(one.cuda_graphs.captured) == 2  # both shapes
    other, expected = trained(PLAIN, section, **settings)
    assert losses == pytest.approx(expected, rel=1e-3)
    for name, tensor in collect_weights(one.model).items():
        assert_same(tensor, collect_weights(other.model)[name], torch.bfloat16)
    for name, tensor in one.ema.items():
        assert_same(tensor, other.ema[name], torch.bfloat16)


@pytest.fixture(autouse=True)
def _stock_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIMIZERS, "stock nadam", OptimizerFactory(torch.optim.NAdam))


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, "stock nadam"])
def test_captured_step_that_is_not_finite_changes_nothing(optimizer: str) -> None:
    one, _ = trained(replace(PLAIN, use_cuda_graphs=True), optimizer=optimizer)
    before = {
        (kind, name): tensor.clone() for kind, some in one.checkpoint_tensors().items() for name, tensor in some.items()
    }
    assert one.cuda_graphs
    assert one.cuda_graphs.captured
    one.target_tokens.fill_(torch.nan)
    bad = one.cuda_graphs(batches()[0])
    assert not bad.isfinite().all()
    for kind, some in one.checkpoint_tensors().items():
        for name, tensor in some.items():
            assert tensor.equal(before[kind, name]), name


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, "stock nadam"])
def test_captured_steps_continue_after_a_restore(optimizer: str) -> None:
    """The optimizer's tensors keep their addresses, which graphs contain."""
    one, _ = trained(replace(PLAIN, use_cuda_graphs=True), optimizer=optimizer)
    assert one.cuda_graphs
    graphs = list(one.cuda_graphs.captured.values())
    all_of_it = (collect_weights(one.model), one.optimizer_tensors(), one.ema)
    saved = [{name: tensor.clone() for name, tensor in some.items()} for some in all_of_it]
    again = []
    for _ in range(2):
        one.restore(*({n: t.clone() for n, t in some.items()} for some in saved))
        some = [one.update([batch], 100 + step, 1e-3) for step, batch in enumerate(batches())]
        again.append([update.loss for update in fetch_metrics(some)])
    assert again[0] == pytest.approx(again[1], rel=1e-4)
    assert list(one.cuda_graphs.captured.values()) == graphs
    before = {name: tensor.clone() for name, tensor in collect_weights(one.model).items()}
    fetch_metrics([one.update([batch], 200 + step, 0.0) for step, batch in enumerate(batches())])
    assert all(tensor.equal(before[name]) for name, tensor in collect_weights(one.model).items())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what the compiler itself imports
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of a tensor that the compiler itself looks at
def test_layers_are_compiled_without_graph_breaks() -> None:
    """A graph break inside a layer would cost further kernels, for example to add gradients."""
    counters = torch._dynamo.utils.counters
    counters.clear()
    trained(replace(PLAIN, compile=True))
    assert counters["stats"]["unique_graphs"] > 0
    assert not counters["graph_break"]

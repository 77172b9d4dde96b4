"""Tests of schedules against formulas, and of the properties of optimizers."""

from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dragoman.config.settings import TrainSettings, check_names
from dragoman.errors import UserError
from dragoman.models.rnn import RnnSettings
from dragoman.models.transformer import TransformerSettings
from dragoman.training.optim import (
    OPTIMIZERS,
    SCHEDULES,
    OptimizerFactory,
    check_optimization,
    clip_gradients,
    compute_gradient_norm,
    compute_learning_rate,
    orthogonalize,
    step_if_finite,
)
from dragoman.training.start import TRAIN_REGISTRIES
from tolerance import assert_same

EVERY_OPTIMIZER = pytest.mark.parametrize("name", OPTIMIZERS)
EVERY_SCHEDULE = pytest.mark.parametrize("name", SCHEDULES)
GOALS = {"vector": torch.tensor([1.0, -2.0, 3.0]), "matrix": torch.tensor([[1.0, -2.0, 3.0], [-1.0, 2.0, 1.0]])}
EVERY_SHAPE = pytest.mark.parametrize("shape", GOALS)
STEP, WARMUP, SHARE = st.integers(1, 100_000), st.integers(0, 5000), st.floats(0, 1)


def learning_rate(
    schedule: str, step: int, warmup: int, done: float = 0.0, lr: float = 1.0, clock: float = 0.0
) -> float:
    return compute_learning_rate(
        step, TrainSettings(schedule=schedule, warmup=warmup, lr=lr), run_fraction=done, minutes_fraction=clock
    )


def linear_warmup(step: int, warmup: int, _: float) -> float:
    return min(1, step / warmup)


FORMULAS = {
    "inverse_sqrt": lambda step, warmup, done: linear_warmup(step, warmup, done) * min(1, (warmup / step) ** 0.5),
    "cosine": lambda step, warmup, done: linear_warmup(step, warmup, done) * math.cos(math.pi * done / 2) ** 2,
    "constant": linear_warmup,
}


@given(step=STEP, warmup=st.integers(1, 2000))
def test_inverse_sqrt_equals_the_formula_of_the_paper(step: int, warmup: int) -> None:
    """Vaswani 2017, section 5.3, scaled to a peak of one."""
    paper = min(step**-0.5, step * warmup**-1.5) * warmup**0.5
    assert learning_rate("inverse_sqrt", step, warmup) == pytest.approx(paper, rel=1e-9)


def test_warm_up_takes_at_most_a_tenth_of_train_minutes() -> None:
    assert learning_rate("constant", 5, 1000, clock=0.1) == 1.0
    assert learning_rate("constant", 5, 1000, clock=0.05) == 0.5


@EVERY_SCHEDULE
@given(step=STEP, warmup=WARMUP, done=SHARE)
def test_schedule_equals_its_formula(name: str, step: int, warmup: int, done: float) -> None:
    expected = FORMULAS[name](step, max(warmup, 1), done)
    assert learning_rate(name, step, warmup, done) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_every_schedule_has_its_formula() -> None:
    assert FORMULAS.keys() == SCHEDULES.keys()


@EVERY_SCHEDULE
@given(warmup=st.integers(2, 2000), done=st.floats(0, 0.9))
def test_rate_rises_during_warm_up_and_never_exceeds_the_peak(name: str, warmup: int, done: float) -> None:
    rates = [learning_rate(name, step, warmup) for step in (1, warmup // 2 + 1, warmup)]
    assert 0 < rates[0] < rates[-1] <= 1
    assert rates == sorted(rates)
    after = [learning_rate(name, step, warmup, done) for step in (warmup, 2 * warmup, 50 * warmup)]
    assert after == sorted(after, reverse=True)


@EVERY_SCHEDULE
@given(step=STEP, warmup=WARMUP, done=SHARE)
def test_rate_is_proportional_to_its_peak(name: str, step: int, warmup: int, done: float) -> None:
    assert learning_rate(name, step, warmup, done, lr=0.25) == 0.25 * learning_rate(name, step, warmup, done)


@EVERY_SCHEDULE
def test_without_warm_up_the_first_rate_is_the_peak(name: str) -> None:
    assert learning_rate(name, 1, 0) == 1.0


def test_peak_and_end_of_schedules() -> None:
    assert learning_rate("inverse_sqrt", 400, 400) == 1.0
    assert learning_rate("inverse_sqrt", 1600, 400) == pytest.approx(0.5)
    assert learning_rate("cosine", 1000, 10, 0.5) == pytest.approx(0.5)
    assert learning_rate("cosine", 1000, 10, 1.0) == pytest.approx(0.0, abs=1e-12)
    assert learning_rate("cosine", 1000, 10, 1.7) == pytest.approx(
        0.0, abs=1e-12
    )  # past the end it does not rise again


def minimize(name: str, steps: int, shape: str = "vector", **given: object) -> tuple[list[float], torch.Tensor]:
    """Minimize a quadratic function; return the losses and the final parameter."""
    settings = TrainSettings(**{"lr": 0.05} | given)  # type: ignore[arg-type]
    goal, scale = GOALS[shape], torch.tensor([1.0, 4.0, 0.5])
    x = torch.zeros_like(goal, requires_grad=True)
    optimizer = OPTIMIZERS[name]({"x": x}, settings)
    losses = []
    for _ in range(steps):
        loss = (scale * (x - goal) ** 2).sum()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses, x.detach()


@EVERY_OPTIMIZER
@EVERY_SHAPE
def test_optimizer_reduces_the_loss(name: str, shape: str) -> None:
    losses, x = minimize(name, 400, shape)
    assert losses[-1] < 1e-2 * losses[0]
    assert losses[50] < losses[0]
    assert_same(x, GOALS[shape], torch.bfloat16)


@EVERY_OPTIMIZER
def test_settings_reach_the_optimizer(name: str) -> None:
    settings = TrainSettings(lr=0.125, beta2=0.75, weight_decay=0.5)
    for group in OPTIMIZERS[name]({"x": torch.zeros(2, requires_grad=True)}, settings).param_groups:
        assert group["lr"] == 0.125
        assert group["weight_decay"] == 0.5
        if "betas" in group:
            assert group["betas"] == (0.9, 0.75)


def test_an_optimizer_with_settings_of_its_own_is_one_registry_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    nadam = OptimizerFactory(torch.optim.NAdam, options={"momentum_decay": 0.004})
    monkeypatch.setitem(OPTIMIZERS, "nadam", nadam)
    for options, expected in (({}, 0.004), ({"momentum_decay": 0.125}, 0.125)):
        settings = TrainSettings(optimizer="nadam", optimizer_options=options)
        check_optimization(settings, TransformerSettings())
        [group] = nadam({"x": torch.zeros(2, requires_grad=True)}, settings).param_groups
        assert group["momentum_decay"] == expected
        assert group["betas"] == (0.9, settings.beta2)
    settings = TrainSettings(optimizer="nadam", optimizer_options={"momentum_decay": -1})
    with pytest.raises(UserError, match=r"train.optimizer=nadam: Invalid momentum_decay value: -1"):
        check_optimization(settings, TransformerSettings())


@EVERY_OPTIMIZER
def test_an_option_that_an_optimizer_does_not_have_is_refused(name: str) -> None:
    settings = TrainSettings(optimizer=name, optimizer_options={"momentun": 0.5})
    with pytest.raises(UserError, match=f"train.optimizer={name} has no option 'momentun'"):
        check_optimization(settings, TransformerSettings())


def test_muon_uses_the_momentum_setting() -> None:
    assert OPTIMIZERS["muon"].options == {"momentum": 0.95}
    torch.manual_seed(1)
    found = []
    for momentum in (0.95, 0.5):
        x = torch.zeros(3, 4, requires_grad=True)
        optimizer = OPTIMIZERS["muon"]({"x.weight": x}, TrainSettings(optimizer_options={"momentum": momentum}))
        x.grad = torch.ones(3, 4)
        optimizer.step()
        found.append(optimizer.state[x]["momentum_buffer"])
    assert_same(found[0], torch.full((3, 4), 0.05))
    assert_same(found[1], torch.full((3, 4), 0.5))


@EVERY_OPTIMIZER
@EVERY_SHAPE
def test_weight_decay_pulls_to_zero(name: str, shape: str) -> None:
    free, held = (minimize(name, 400, shape, weight_decay=decay)[1] for decay in (0.0, 2.0))
    assert (held.abs() < free.abs()).all()


def test_sgd_is_its_formula() -> None:
    losses, x = minimize("sgd", 1)
    assert_same(x, 0.05 * 2 * torch.tensor([1.0, 4.0, 0.5]) * torch.tensor([1.0, -2.0, 3.0]))
    assert losses == [19.5 + 2.0]


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_first_step_of_adam_has_the_size_of_the_learning_rate(name: str) -> None:
    """The size of the gradient has no influence: both moments come from one gradient (Kingma 2015, section 2)."""
    _, x = minimize(name, 1, lr=0.1)
    assert_same(x, torch.tensor([0.1, -0.1, 0.1]))


@EVERY_OPTIMIZER
@EVERY_SHAPE
def test_frozen_and_unused_parameters_do_not_change(name: str, shape: str) -> None:
    used, unused = (torch.ones_like(GOALS[shape], requires_grad=True) for _ in range(2))
    optimizer = OPTIMIZERS[name]({"used": used, "unused": unused}, TrainSettings(lr=0.1))
    used.sum().backward()
    optimizer.step()
    assert torch.equal(unused.detach(), torch.ones_like(unused))
    assert not torch.equal(used.detach(), torch.ones_like(used))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"optimizer": "adan"}, "there is no train.optimizer called 'adan'; did you mean 'adam'?"),
        ({"schedule": "cosin"}, "there is no train.schedule called 'cosin'; did you mean 'cosine'?"),
    ],
)
def test_unknown_names_are_refused(given: dict[str, str], wanted: str) -> None:
    with pytest.raises(UserError, match=re.escape(wanted)):
        check_names(TRAIN_REGISTRIES, TrainSettings(**given), "train")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"steps": 0}, "training needs a limit"),
        ({"average": 4, "keep": 3}, "train.average=4 needs as many checkpoints, but train.keep=3"),
    ],
)
def test_settings_that_cannot_work_are_refused(given: dict[str, int], wanted: str) -> None:
    with pytest.raises(UserError, match=wanted):
        check_optimization(TrainSettings(**given), TransformerSettings())  # type: ignore[arg-type]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("limit", [{"steps": 5}, {"steps": 0, "epochs": 2}, {"steps": 0, "minutes": 0.5}])
def test_every_registered_optimizer_and_schedule_is_accepted(
    optimizer: str, schedule: str, limit: dict[str, float]
) -> None:
    for model in (TransformerSettings(), RnnSettings()):
        check_optimization(TrainSettings(optimizer=optimizer, schedule=schedule, **limit), model)  # type: ignore[arg-type]


def test_muon_requires_fused_projections_of_equal_widths() -> None:
    settings = TrainSettings(optimizer="muon")
    check_optimization(settings, TransformerSettings(width=64, query_width=32, value_width=32))
    with pytest.raises(UserError, match=r"model\.query_width and model\.value_width"):
        check_optimization(settings, TransformerSettings(width=64, query_width=32))


def test_norm_is_that_of_all_gradients_together() -> None:
    parameters = [torch.zeros(3, requires_grad=True) for _ in range(3)]
    for parameter, grad in zip(parameters, ([3.0, 0.0, 0.0], [0.0, 4.0, 12.0])):
        parameter.grad = torch.tensor(grad)
    assert compute_gradient_norm(parameters).item() == pytest.approx(13.0)
    assert compute_gradient_norm([]).item() == 0.0
    parameters[0].grad = torch.tensor([math.nan, 0.0, 0.0])
    assert math.isnan(compute_gradient_norm(parameters).item())


def take_steps(name: str, *, skipped: bool) -> list[torch.Tensor]:
    """Return weights and optimizer state after two steps, perhaps with a skipped one between them."""
    torch.manual_seed(1)
    named = {"layer.weight": torch.randn(4, 6), "layer.bias": torch.randn(4)}
    for one in named.values():
        one.requires_grad_()
    optimizer = OPTIMIZERS[name](named, TrainSettings(lr=0.1, weight_decay=0.1))
    for step, found_inf in enumerate([0.0, 1.0, 0.0]):
        if found_inf and not skipped:
            continue
        torch.manual_seed(step)
        for one in named.values():
            one.grad = torch.full_like(one, torch.nan) if found_inf else torch.randn_like(one)
        step_if_finite(optimizer, torch.tensor(found_inf))
    state = [value for state in optimizer.state.values() for value in state.values()]
    return [one.detach() for one in (*named.values(), *state)]


@EVERY_OPTIMIZER
def test_a_skipped_step_changes_nothing(name: str) -> None:
    for one, other in zip(take_steps(name, skipped=True), take_steps(name, skipped=False), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("clip", [0.1, 5.0, 13.0, 20.0])
def test_clipped_gradients_keep_their_direction(clip: float) -> None:
    parameters = [torch.zeros(3, requires_grad=True) for _ in range(3)]
    grads = torch.tensor([[3.0, 0.0, 0.0], [0.0, 4.0, 12.0]])
    for parameter, grad in zip(parameters, grads):
        parameter.grad = grad.clone()
    clip_gradients(parameters, compute_gradient_norm(parameters), clip)
    assert_same(torch.stack([parameter.grad for parameter in parameters[:2]]), grads * min(clip / 13.0, 1.0))  # type: ignore[misc]


@pytest.mark.parametrize("shape", [(3, 5, 9), (2, 9, 5), (4, 6, 6), (1, 1, 7)], ids=str)
def test_orthogonalized_matrices_have_singular_values_near_one(shape: tuple[int, ...]) -> None:
    """All singular values are near one, and the singular vectors do not change."""
    torch.manual_seed(3)
    x_KRC = torch.randn(shape)
    left, _, right = torch.linalg.svd(x_KRC, full_matrices=False)
    found = left.mT @ orthogonalize(x_KRC) @ right.mT
    values = found.diagonal(dim1=1, dim2=2)
    assert (values > 0.4).all()
    assert (values < 1.4).all()
    assert_same(found, torch.diag_embed(values), torch.bfloat16)


def reference_muon(x: torch.Tensor, grads: list[torch.Tensor], blocks: int, lr: float, decay: float) -> torch.Tensor:
    """Compute Muon (Jordan 2024) for each block, with updates as large as those of AdamW (Liu 2025, section 2.2)."""
    momentum = torch.zeros_like(x)
    for grad in grads:
        momentum = 0.95 * momentum + 0.05 * grad
        turned = []
        for block in (0.95 * momentum + 0.05 * grad).chunk(blocks):
            one = block / block.norm()
            for _ in range(5):
                square = one @ one.T
                one = 3.4445 * one - 4.7750 * square @ one + 2.0315 * square @ square @ one
            turned.append(0.2 * math.sqrt(max(block.shape)) * one)
        x = x - lr * decay * x - lr * torch.cat(turned)
    return x


@pytest.mark.parametrize(
    ("name", "shape", "blocks"),
    [("wide.weight", (3, 8), 1), ("tall.weight", (8, 3), 1), ("square.weight", (6, 6), 1),
     ("self.query_key_value.weight", (6, 5), 3), ("self.query_key_value.weight", (18, 4), 3),
     ("cross.key_value.weight", (6, 5), 2), ("cross.key_value.weight", (18, 4), 2)],
    ids=str,
)  # fmt: skip
def test_muon_is_its_formula(name: str, shape: tuple[int, int], blocks: int) -> None:
    torch.manual_seed(1)
    begin, *grads = torch.randn(6, *shape, dtype=torch.float64)
    x = begin.clone().requires_grad_()
    optimizer = OPTIMIZERS["muon"]({name: x}, TrainSettings(lr=0.1, weight_decay=0.1))
    for grad in grads:
        x.grad = grad.clone()
        optimizer.step()
    assert_same(x.detach(), reference_muon(begin, grads, blocks, 0.1, 0.1), torch.float32)


def test_muon_updates_blocks_of_fused_projections_separately() -> None:
    torch.manual_seed(1)
    grad, found = torch.randn(6, 4), []
    for names in (["a.query_key_value.weight"], ["q.weight", "k.weight", "v.weight"]):
        parts = grad.chunk(len(names))
        named = {name: torch.zeros_like(part, requires_grad=True) for name, part in zip(names, parts, strict=True)}
        optimizer = OPTIMIZERS["muon"](named, TrainSettings(lr=1.0))
        for one, part in zip(named.values(), parts, strict=True):
            one.grad = part
        optimizer.step()
        found.append(torch.cat([one.detach() for one in named.values()]))
    assert_same(found[0], found[1])


def test_muon_updates_stacked_matrices_independently() -> None:
    """Also if two parameters have the same shape, but only one of them is a fused projection."""
    torch.manual_seed(1)
    grads, found = {"a.query_key_value.weight": torch.randn(6, 4), "a.wide.weight": torch.randn(6, 4)}, []
    for company in (list(grads), *([name] for name in grads)):
        named = {name: torch.zeros(6, 4, requires_grad=True) for name in company}
        for name, one in named.items():
            one.grad = grads[name].clone()
        OPTIMIZERS["muon"](named, TrainSettings(lr=1.0)).step()
        found += [one.detach() for one in named.values()]
    assert_same(torch.stack(found[:2]), torch.stack(found[2:]))


@pytest.mark.parametrize(
    "name",
    ["decoder.embedding.weight", "project.weight", "layers.0.wide.bias", "encoder.position.table.weight",
     "layers.0.attention.sublayer.relate.key_RD", "encoder.layers.0.ahead.start"],
)  # fmt: skip
def test_muon_leaves_tables_and_vectors_to_adamw(name: str) -> None:
    shape = (5,) if name.endswith("bias") else (5, 3)
    torch.manual_seed(1)
    grad, found = torch.randn(shape), []
    for optimizer in ("muon", "adamw"):
        x = torch.ones(shape, requires_grad=True)
        x.grad = grad.clone()
        OPTIMIZERS[optimizer]({name: x}, TrainSettings(lr=0.1, weight_decay=0.1)).step()
        found.append(x.detach())
    assert_same(found[0], found[1])

"""Tests of R-Drop and SimCut: formulas, agreement of the two implementations, and training runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dragoman.config.settings import TrainSettings
from dragoman.modules import dropout
from dragoman.training import loss as loss_module
from dragoman.training.loss import (
    CONSISTENCY,
    LOSSES,
    LossTerms,
    compute_chunked_loss,
    compute_consistency_gradient,
    repeat_rows,
    sample_visibility_mask,
)
from dragoman.training.step import Learner, select_real_tokens, split_batch
from dragoman.types import BOS, EOS, Batch
from tolerance import DEVICES, assert_different, assert_same
from toy_models import KINDS, RATES, SMALL_TRANSFORMER, build_small_model, make_batch
from toy_run import Call, assert_same_runs, assert_user_error, read_run_events, train_quietly

METHODS = {name: terms for name, terms in CONSISTENCY.items() if terms.passes == 2}
EVERY = pytest.mark.parametrize("name", METHODS)
EVERYWHERE = pytest.mark.parametrize("device", DEVICES)
SMOOTHING = pytest.mark.parametrize("smoothing", [0.0, 0.1])
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "CHUNK", dict.fromkeys(loss_module.CHUNK, 16))


def inputs(N: int, *, device: str = "cpu", dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Return similar states of two passes, an output matrix, and targets, every fifth of which is ignored."""
    draw = torch.Generator().manual_seed(N)
    base_NC, apart_2NC = (torch.randn(*shape, 8, generator=draw, dtype=torch.float64) for shape in ((N,), (2, N)))
    states_2NC, weight_VC = base_NC + 0.3 * apart_2NC, torch.randn(23, 8, generator=draw, dtype=torch.float64)
    target_N = torch.randint(23, (N,), generator=draw)
    target_N[4::5] = -1
    states_2NC, weight_VC = (each.to(device, dtype).requires_grad_() for each in (states_2NC, weight_VC))
    return states_2NC, weight_VC, target_N.to(device)


def run(way: str, tensors: Sequence[Tensor], method: LossTerms, smoothing: float = 0.1, weight: float = 3.0) -> Any:
    """Return loss, nll, divergence, and the gradients of 0.7 times the loss."""
    states, table, target_N = tensors
    terms = method._replace(smoothing=smoothing, consistency_weight=weight)
    loss, nll, divergence = LOSSES[way](states, table, target_N, terms)
    (0.7 * loss).backward()
    assert states.grad is not None
    assert table.grad is not None
    found = [loss.detach(), nll, divergence, states.grad, table.grad]
    states.grad = table.grad = None
    return found


@pytest.mark.parametrize("way", LOSSES)
@SMOOTHING
def test_rdrop_is_its_formula(way: str, smoothing: float) -> None:
    """The mean of both losses, and the mean of both divergences (Liang 2021, equation 4, halved)."""
    p, q = predict(inputs(20))
    expected = between = 0.0
    for right, p_V, q_V in zip(inputs(20)[2].tolist(), p, q, strict=True):
        if right >= 0:
            expected += (
                smoothed_cross_entropy(p_V, right, smoothing) + smoothed_cross_entropy(q_V, right, smoothing)
            ) / 2
            between += float((p_V * (p_V / q_V).log()).sum() + (q_V * (q_V / p_V).log()).sum()) / 2
    terms = METHODS["rdrop"]._replace(smoothing=smoothing, consistency_weight=3.0)
    loss, nll, divergence = LOSSES[way](*inputs(20), terms)
    assert loss.item() == pytest.approx(expected + 3.0 * between, rel=1e-9)
    assert divergence.item() == pytest.approx(between, rel=1e-9)
    assert nll.item() == pytest.approx(sum_nll(p), rel=1e-9)


@pytest.mark.parametrize("way", LOSSES)
@SMOOTHING
def test_simcut_is_its_formula(way: str, smoothing: float) -> None:
    """The loss of the first pass, and KL(first || second) (Gao 2022, equation 3)."""
    p, q = predict(inputs(20))
    expected = between = 0.0
    for right, p_V, q_V in zip(inputs(20)[2].tolist(), p, q, strict=True):
        if right >= 0:
            expected += smoothed_cross_entropy(p_V, right, smoothing)
            between += float((p_V * (p_V / q_V).log()).sum())
    terms = METHODS["simcut"]._replace(smoothing=smoothing, consistency_weight=3.0)
    loss, nll, divergence = LOSSES[way](*inputs(20), terms)
    assert loss.item() == pytest.approx(expected + 3.0 * between, rel=1e-9)
    assert divergence.item() == pytest.approx(between, rel=1e-9)
    assert nll.item() == pytest.approx(sum_nll(p), rel=1e-9)


def predict(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the predicted distributions of both passes: p_NV and q_NV."""
    return (tensors[0] @ tensors[1].T).softmax(-1).detach().unbind()


def smoothed_cross_entropy(p_V: Tensor, right: int, smoothing: float) -> float:
    return -float((1 - smoothing) * p_V[right].log() + smoothing * p_V.log().mean())


def sum_nll(p_NV: Tensor) -> float:
    return sum(
        smoothed_cross_entropy(p_V, right, 0.0)
        for p_V, right in zip(p_NV, inputs(20)[2].tolist(), strict=True)
        if right >= 0
    )


@EVERY
@SMOOTHING
@EVERYWHERE
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N", [1, 7, 8, 50])
def test_chunked_loss_equals_plain_loss(name: str, smoothing: float, device: str, dtype: torch.dtype, N: int) -> None:
    exact = [each.detach().double().requires_grad_() for each in inputs(N, device=device, dtype=dtype)[:2]]
    expected = run("plain", [*exact, inputs(N, device=device)[2]], METHODS[name], smoothing)
    found = run("chunked", inputs(N, device=device, dtype=dtype), METHODS[name], smoothing)
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other, dtype)


@pytest.mark.parametrize("right", [(0.0, 1.0), (0.8, 0.3)])
@pytest.mark.parametrize("together", [(0.0, 1.0), (0.9, 0.4)])
def test_every_term_of_the_loss_has_its_gradient(right: tuple[float, float], together: tuple[float, float]) -> None:
    """Any combination of weights works, since a new registry entry may use it."""
    method = LossTerms(right, together)
    for one, other in zip(run("chunked", inputs(20), method), run("plain", inputs(20), method), strict=True):
        assert_same(one, other)


@EVERY
def test_gradient_of_a_chunk_compiles_without_graph_breaks(name: str) -> None:
    """`Learner.compile_layers` compiles it."""
    compiled = torch.compile(compute_consistency_gradient, backend="eager", fullgraph=True)
    given = (*inputs(20), METHODS[name]._replace(smoothing=0.1, consistency_weight=3.0))
    for one, other in zip(compute_chunked_loss(*given, compiled), compute_chunked_loss(*given), strict=True):
        assert_same(one, other)


@EVERY
@EVERYWHERE
def test_losses_agree_under_autocast(name: str, device: str) -> None:
    """Products in bf16, sums and gradients of the weights in float32."""
    expected = run("plain", inputs(50, device=device), METHODS[name])
    for way in LOSSES:
        with torch.autocast(device, torch.bfloat16):
            found = run(way, inputs(50, device=device, dtype=torch.float32), METHODS[name])
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == torch.float32
            assert_same(one, other, torch.bfloat16)


@EVERY
def test_equal_passes_have_the_loss_of_one_pass(name: str) -> None:
    """The divergence and its gradient are zero."""
    states, table, target_N = inputs(50, dtype=torch.float32)
    both = states.detach()[:1].expand(2, -1, -1).clone().requires_grad_()
    one = states.detach()[:1].clone().requires_grad_()
    found = run("chunked", [both, table, target_N], METHODS[name], weight=100.0)
    loss, nll, none = compute_chunked_loss(one, table, target_N, LossTerms(smoothing=0.1))
    (0.7 * loss).backward()
    assert one.grad is not None
    assert table.grad is not None
    for found_, expected in zip(found, (loss.detach(), nll, none, one.grad, table.grad), strict=True):
        assert_same(found_.sum(0, keepdim=True) if found_.dim() == 3 else found_, expected)


def test_tokens_are_hidden_from_the_second_pass_only() -> None:
    ids_BT = torch.randint(0, 40, (400, 50))
    visible_BT = sample_visibility_mask(ids_BT, 0.2)
    marks = (ids_BT == BOS) | (ids_BT == EOS)
    assert visible_BT[:200].all()
    assert visible_BT[marks].all()
    hidden = (~visible_BT[200:][~marks[200:]]).double()
    assert hidden.mean().item() == pytest.approx(0.2, abs=5 * (0.16 / len(hidden)) ** 0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_without_dropout_the_first_pass_equals_training_without_consistency(kind: str) -> None:
    """The second pass differs, since tokens are hidden from it."""
    model, batch = build_small_model(KINDS[kind]), make_batch(KINDS[kind])
    both = repeat_rows(batch, METHODS["simcut"], 0.5)
    first, second = select_real_tokens(model(both), both)[0].unflatten(0, (2, -1))
    alone, _ = select_real_tokens(model(batch), batch)
    assert_same(first, alone)
    assert_different(second, alone)


def make_learner(kind: str, name: str, **rates: float) -> tuple[Learner, Batch]:
    section = {**KINDS[kind], **rates}
    settings = TrainSettings(consistency=name, cut=0.3 if METHODS[name].hides_tokens else TrainSettings().cut)
    return Learner(build_small_model(section).train(), settings), make_batch(section)


def sums_and_gradients(learner: Learner, some: Sequence[Batch]) -> list[Tensor]:
    """Return the sums and gradients of all parts of a batch."""
    learner.zero_grad()
    sums = []
    for part in some:
        torch.manual_seed(3)
        sums.append(learner(part))
    torch.stack(sums).sum(0)[0].backward()
    return [torch.stack(sums).sum(0).detach(), *(p.grad for p in learner.parameters() if p.grad is not None)]


@EVERY
@pytest.mark.parametrize("kind", KINDS)
def test_batch_in_parts_has_the_same_loss(kind: str, name: str) -> None:
    learner, batch = make_learner(kind, name, dropout=0.3)
    whole = sums_and_gradients(learner, [batch])
    for count in (2, 3):
        for one, other in zip(sums_and_gradients(learner, split_batch(batch, count)), whole, strict=True):
            assert_same(one, other, torch.float64)


@EVERY
@pytest.mark.parametrize("kind", KINDS)
def test_passes_have_different_dropout_masks(kind: str, name: str) -> None:
    """The nll is that of the first pass; the divergence is positive and grows with the dropout rate."""
    found = []
    for rate in (0.0, 0.2, 0.5):
        learner, batch = make_learner(kind, name, dropout=rate)
        torch.manual_seed(3)
        loss, nll, divergence = learner(batch).tolist()
        learner.loss_terms = learner.loss_terms._replace(consistency_weight=1e-9)
        torch.manual_seed(3)
        without, *again = learner(batch).tolist()
        assert again == [nll, divergence]
        assert loss - without == pytest.approx(divergence, rel=1e-4, abs=1e-4)
        found.append(divergence)
    assert found[0] > 1e-3 if METHODS[name].hides_tokens else abs(found[0]) < 1e-6
    assert found[2] > found[1] > 1e-3


@pytest.mark.parametrize("loss", LOSSES)
@EVERY
def test_loss_implementation_is_a_setting(name: str, loss: str) -> None:
    section = {**SMALL_TRANSFORMER, "dropout": 0.3}
    learners = [
        Learner(build_small_model(section).train(), TrainSettings(consistency=name, loss=way))
        for way in (loss, "plain")
    ]
    found = [sums_and_gradients(learner, [make_batch(section)]) for learner in learners]
    for one, other in zip(*found, strict=True):
        assert_same(one, other, torch.float32)


@EVERY
def test_training_step_does_not_read_tensor_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward pass work with tensors without values, so a step can be captured as a CUDA graph."""
    monkeypatch.setitem(loss_module.CHUNK, "meta", 16)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _device: False)  # it does not know that device
    monkeypatch.setattr(dropout, "_sample_on_cpu", lambda shape, _rate, like: like.new_empty(shape))
    learner, batch = make_learner("transformer", name, **dict.fromkeys(RATES, 0.3))
    learner.to("meta")(batch.to(torch.device("meta")))[0].backward()
    assert all(parameter.grad is not None for parameter in learner.parameters())


# Runs.

EVERYTHING = [f"model.{rate}=0.1" for rate in RATES]


@EVERY
def test_resumed_run_with_consistency_is_bit_identical(small: Path, tmp_path: Path, name: str) -> None:
    settings = (*EVERYTHING, f"train.consistency={name}", "train.schedule=constant", "data.dev=[]")
    train_quietly(small, tmp_path / "run", *settings, "train.steps=6")
    train_quietly(small, tmp_path / "run", *settings, "train.steps=12", resume=True)
    train_quietly(small, tmp_path / "whole", *settings, "train.steps=12")
    assert_same_runs(tmp_path / "run", tmp_path / "whole")


@EVERY
def test_two_passes_cost_twice_the_flops(small: Path, tmp_path: Path, name: str) -> None:
    flops, has_divergence = [], []
    for method in ("none", name):
        run = train_quietly(small, tmp_path / method, f"train.consistency={method}", "train.steps=2", "data.dev=[]")
        flops.append([event["flops"] for event in read_run_events(run) if event["event"] == "train"])
        has_divergence.append(
            [event.get("divergence", 0) > 0 for event in read_run_events(run) if event["event"] == "train"]
        )
    assert flops[1] == [2 * each for each in flops[0]]
    assert has_divergence == [[False, False], [True, True]]


@pytest.mark.parametrize(
    ("settings", "culprits"),
    [
        (["train.consistency=rdop"], ["train.consistency", "'rdrop'"]),
        (["train.consistency_weight=3.0"], ["train.consistency_weight", "train.consistency;"]),
        (["train.consistency_weight=0.0"], ["train.consistency_weight", "greater than 0"]),
        (["train.cut=0.1"], ["train.cut", "train.consistency=none", "simcut"]),
        (["train.consistency=rdrop", "train.cut=0.1"], ["train.cut", "train.consistency=rdrop", "simcut"]),
        (["train.consistency=rdrop", "model.dropout=0.0"], ["train.consistency=rdrop", "model.dropout"]),
        (["train.consistency=simcut", "train.cut=0.0", "model.dropout=0.0"], ["train.consistency=simcut"]),
    ],
)
def test_settings_without_effect_are_refused(
    small: Path, tmp_path: Path, call: Call, settings: list[str], culprits: list[str]
) -> None:
    assert_user_error(call("train", small, "--out", tmp_path / "run", *settings), *culprits)
    assert not (tmp_path / "run").exists()


def test_any_kind_of_dropout_is_accepted(small: Path, tmp_path: Path) -> None:
    settings = ("train.consistency=rdrop", "model.dropout=0.0", "model.head_dropout=0.2", "data.dev=[]")
    train_quietly(small, tmp_path / "run", *settings, "train.steps=1")


def test_every_method_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs/regularisation.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in page for name in CONSISTENCY)
    assert all(f"`model.{rate}`" in page for rate in RATES)

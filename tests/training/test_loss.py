"""The chunked loss has the values and gradients of the plain loss, which equals its formula."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from dragoman.training import loss as loss_module
from dragoman.training.loss import CHUNK, LOSSES, LossTerms, compute_chunked_loss, mask_copied_words
from dragoman.types import BOS, SPECIALS, UNK
from tolerance import DEVICES, assert_same
from toy_batch import examples, in_rows

EVERY = pytest.mark.parametrize("name", LOSSES)
SMOOTHED = LossTerms(smoothing=0.1)
SMOOTHING = pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
EVERYWHERE = pytest.mark.parametrize("device", DEVICES)
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "CHUNK", dict.fromkeys(CHUNK, 16))


def inputs(
    N: int, *, C: int = 8, V: int = 23, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(N)
    states_1NC = torch.randn(1, N, C, device=device, dtype=torch.float64).to(dtype)
    weight_VC = torch.randn(V, C, device=device, dtype=torch.float64).to(dtype)
    return states_1NC.requires_grad_(), weight_VC.requires_grad_(), torch.randint(V, (N,), device=device)


def run(name: str, tensors: Sequence[Tensor], smoothing: float, factor: float = 1.0) -> list[Tensor]:
    """Return loss, nll, and the gradients of `factor` times the loss."""
    states_1NC, weight_VC, target_N = tensors
    loss, nll, divergence = LOSSES[name](states_1NC, weight_VC, target_N, LossTerms(smoothing=smoothing))
    assert not divergence
    (loss * factor).backward()
    assert states_1NC.grad is not None
    assert weight_VC.grad is not None
    found = [loss.detach(), nll, states_1NC.grad, weight_VC.grad]
    states_1NC.grad = weight_VC.grad = None
    return found


@EVERY
@SMOOTHING
def test_loss_equals_its_formula(name: str, smoothing: float) -> None:
    """-sum over tokens of (1 - s) log p(target) + s mean over the vocabulary of log p (Szegedy 2016)."""
    states_1NC, weight_VC, target_N = inputs(37)
    total = nll_total = 0.0
    for state, target in zip(states_1NC[0], target_N.tolist()):
        logp_V = torch.log_softmax((weight_VC @ state).double(), -1)
        nll_total -= logp_V[target].item()
        total -= (1 - smoothing) * logp_V[target].item() + smoothing * logp_V.mean().item()
    loss, nll, _ = LOSSES[name](states_1NC, weight_VC, target_N, LossTerms(smoothing=smoothing))
    assert loss.item() == pytest.approx(total, rel=1e-5)
    assert nll.item() == pytest.approx(nll_total, rel=1e-5)
    assert loss.shape == nll.shape == ()
    assert not nll.requires_grad


@SMOOTHING
@EVERYWHERE
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("N", "V"), [(1, 23), (15, 23), (16, 23), (17, 23), (50, 23), (50, 9000)])
def test_chunked_loss_equals_plain_loss(smoothing: float, device: str, dtype: torch.dtype, N: int, V: int) -> None:
    """Also for a large vocabulary, which the GPU kernel reads in blocks of 8,192 tokens."""
    tensors = inputs(N, V=V, device=device, dtype=dtype)
    tensors[2][::3] = V - 1
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors[:2]]
    expected = run("plain", [*exact, tensors[2]], smoothing, 0.7)
    found = run("chunked", tensors, smoothing, 0.7)
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other, dtype)
    sums_dtype = torch.promote_types(dtype, torch.float32)
    assert [tensor.dtype for tensor in found] == [sums_dtype, sums_dtype, dtype, dtype]


def test_chunks_of_the_real_size_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "CHUNK", CHUNK)
    N = 2 * CHUNK["cpu"] + 100
    for one, other in zip(run("chunked", inputs(N), 0.1), run("plain", inputs(N), 0.1), strict=True):
        assert_same(one, other)


@SMOOTHING
@EVERYWHERE
def test_losses_agree_under_autocast(smoothing: float, device: str) -> None:
    """Products in bf16, sums and gradients of the weights in float32."""
    expected = run("plain", inputs(50, device=device), smoothing)
    for name in LOSSES:
        with torch.autocast(device, torch.bfloat16):
            found = run(name, inputs(50, device=device), smoothing)
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == torch.float32
            assert_same(one, other, torch.bfloat16)
        assert torch.equal(found[2], found[2].bfloat16().float())
        assert not torch.equal(found[0], expected[0])


@EVERY
@pytest.mark.parametrize("without", ["no_grad", "inference_mode"])
def test_without_gradients_the_numbers_are_the_same(name: str, without: str) -> None:
    tensors = inputs(50)
    expected = run(name, tensors, 0.1)[:2]
    with getattr(torch, without)():
        found = LOSSES[name](*tensors, SMOOTHED)[:2]
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)
        assert not one.requires_grad


def test_no_gradients_are_computed_without_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation needs only a forward pass."""
    made: list[str] = []
    monkeypatch.setattr(torch, "empty_like", lambda *_: made.append("states") or torch.zeros(1, 50, 8))
    tensors = inputs(50)
    with torch.no_grad():
        compute_chunked_loss(*tensors, SMOOTHED)
    assert not made
    compute_chunked_loss(*tensors, SMOOTHED)
    assert made


@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_input_gets_no_gradient(frozen: int) -> None:
    tensors = inputs(50)
    expected = run("plain", inputs(50), 0.1)[3 - frozen]
    tensors[frozen].requires_grad_(False)
    compute_chunked_loss(*tensors, SMOOTHED)[0].backward()
    assert tensors[frozen].grad is None
    other = tensors[1 - frozen].grad
    assert other is not None
    assert_same(other, expected)


def test_accumulated_gradients_equal_those_of_one_batch() -> None:
    """The gradients of two halves add up to those of the batch."""
    tensors = inputs(50)
    whole = run("chunked", tensors, 0.1)
    states_1NC, weight_VC, target_N = tensors
    for part in (slice(0, 20), slice(20, 50)):
        compute_chunked_loss(states_1NC[:, part], weight_VC, target_N[part], SMOOTHED)[0].backward()
    assert states_1NC.grad is not None
    assert weight_VC.grad is not None
    assert_same(states_1NC.grad, whole[2])
    assert_same(weight_VC.grad, whole[3])


@EVERY
def test_loss_of_no_tokens_is_zero(name: str) -> None:
    tensors = inputs(0)
    loss, nll, *grads = run(name, tensors, 0.1)
    assert loss.item() == nll.item() == 0
    assert all((grad == 0).all() for grad in grads)


@EVERY
def test_large_logits_stay_finite(name: str) -> None:
    tensors = inputs(20)
    for tensor in tensors[:2]:
        tensor.data.mul_(1e3)
    assert all(tensor.isfinite().all() for tensor in run(name, tensors, 0.1))


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_copied_words_are_masked_on_both_sides_of_their_pair(rate: float) -> None:
    """A word of both sides is <unk> everywhere in its pair or nowhere; all other tokens stay."""
    some = examples(40, seed=1, size=14)  # few words, so that many are on both sides
    batch = in_rows([[3 * row, 3 * row + 1, 3 * row + 2] for row in range(13)], some)
    torch.manual_seed(1)
    found, masked, copied = mask_copied_words(batch, 14, rate), 0, 0
    for row in range(13):
        for segment in (1, 2, 3):
            source_S, target_T = batch.source_segment_BS[row] == segment, batch.target_segment_BT[row] == segment
            source, target = batch.source_BS[row][source_S].tolist(), batch.target_out_BT[row][target_T].tolist()
            both = {word for word in target if word in source and word >= len(SPECIALS)}
            new_source = found.source_BS[row][source_S].tolist()
            unknown = {word for word, new in zip(source, new_source, strict=True) if word != new}
            assert unknown <= both
            assert new_source == [UNK if word in unknown else word for word in source]
            new_target = [UNK if word in unknown else word for word in target]
            assert found.target_out_BT[row][target_T].tolist() == new_target
            assert found.target_in_BT[row][target_T].tolist() == [BOS, *new_target[:-1]]
            masked, copied = masked + len(unknown), copied + len(both)
    assert copied > 20
    assert abs(masked / copied - rate) < 0.2 if 0 < rate < 1 else masked == rate * copied


def test_second_backward_is_refused() -> None:
    loss, _, _ = compute_chunked_loss(*inputs(20), SMOOTHED)
    (loss * 2).backward(retain_graph=True)
    with pytest.raises(RuntimeError):
        (loss * 2).backward()


def test_inputs_are_not_modified() -> None:
    tensors = inputs(20)
    before = [tensor.detach().clone() for tensor in tensors]
    compute_chunked_loss(*tensors, SMOOTHED)[0].backward()
    assert all(torch.equal(one, other) for one, other in zip(tensors, before))


@EVERY
@SMOOTHING
@EVERYWHERE
def test_ignored_tokens_have_no_influence(name: str, smoothing: float, device: str) -> None:
    """The loss is as without them, at any position and for any target below 0."""
    states_1NC, weight_VC, target_N = inputs(40, device=device)
    counts_N = torch.arange(40, device=device) % 3 > 0
    target_N = torch.where(counts_N, target_N, -1 - torch.arange(40, device=device))
    found = run(name, [states_1NC, weight_VC, target_N], smoothing)
    some = states_1NC.detach()[:, counts_N].requires_grad_()
    expected = run(name, [some, weight_VC, target_N[counts_N]], smoothing)
    assert (found[2][:, ~counts_N] == 0).all()
    found[2] = found[2][:, counts_N]
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)

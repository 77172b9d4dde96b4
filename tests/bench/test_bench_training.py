"""The benches of training measure what they say: the same pairs for all, every update of the real trainer, curves."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dragoman.config.settings import LIMITS
from dragoman.training import trainer

BENCH = Path(__file__).resolve().parents[2] / "bench"
CORPUS: dict[str, Any] = {"pairs": 300, "mean": 10.0, "vocabulary": 60, "shortest": 3, "longest": 20}
TASK = {
    "size": {"kind": "transformer", "layers": 1, "width": 16, "inner": 32, "heads": 2},
    "vocabulary": CORPUS["vocabulary"],
    "tokens": 256,
    "precision": "float32",
    "device": "cpu",
    "threads": 1,
    "dropout": 0.1,
    "smoothing": 0.1,
    "clip": 1.0,
    "compiled": False,
    "overrides": ["train.loss=plain"],
}


@pytest.fixture(scope="module", autouse=True)
def on_the_path() -> Iterator[None]:
    """Scripts import one another by name; what they are called here is forgotten afterwards."""
    before, known = list(sys.path), set(sys.modules)
    sys.path[:0] = [str(BENCH), str(BENCH / "peers")]
    yield
    sys.path[:] = before
    for name in set(sys.modules) - known:
        if str(BENCH) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from contest import write_corpus

    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder, **CORPUS)
    return folder


def test_all_contestants_read_the_same_pairs(corpus: Path) -> None:
    from padded import read_pairs

    lines = [(corpus / f"train.{side}").read_text().splitlines() for side in ("source", "target")]
    pairs = read_pairs(str(corpus))
    assert len(pairs) == CORPUS["pairs"]
    for ids, words in zip(pairs, zip(*lines, strict=True), strict=True):
        assert [" ".join(f"w{i}" for i in side) for side in ids] == list(words)
        assert all(CORPUS["shortest"] <= len(side) <= CORPUS["longest"] for side in ids)


@pytest.mark.parametrize("multiple", [1, 8])
def test_padded_batches_keep_to_the_budget_and_count_what_is_real(corpus: Path, multiple: int) -> None:
    from padded import EOS, PAD, make_batches

    batches = make_batches(str(corpus), tokens=256, multiple=multiple)
    assert sum(len(batch.source_BS) for batch in batches) <= CORPUS["pairs"]
    for batch in batches:
        grids = (batch.source_BS, batch.target_out_BT)
        assert all(grid.numel() <= 256 and grid.size(1) % multiple == 0 for grid in grids)
        assert batch.tokens == sum(int((grid != PAD).sum()) for grid in grids)
        assert ((batch.source_BS != PAD).sum(1) == batch.source_length_B).all()
        assert all(((grid == EOS).sum(1) == 1).all() for grid in grids)


class Counter:
    """A gate that is shut after three updates."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.flops: list[float] = []
        self.facts: dict[str, Any] = {}

    def ready(self, **facts: Any) -> None:
        self.facts = facts

    def before(self) -> None:
        if len(self.tokens) == 3:
            raise StopIteration

    def after(self, tokens: int, flops: float) -> None:
        self.tokens.append(tokens)
        self.flops.append(flops)


def test_the_gate_stands_before_every_update_of_the_real_trainer(corpus: Path) -> None:
    from dragoman_train import train

    gate, usual = Counter(), trainer.Trainer
    with pytest.raises(StopIteration):
        train({**TASK, "folder": str(corpus)}, gate)
    assert trainer.Trainer is usual
    assert all(256 < tokens <= 512 for tokens in gate.tokens)  # on two sides, of at most 256 each
    assert all(flops > 0 for flops in gate.flops[1:])
    assert gate.facts["parameters"] > CORPUS["vocabulary"] * 16


@pytest.fixture
def curves() -> ModuleType:
    import curves

    return curves


def found(shift: float) -> dict[str, Any]:
    """Three seeds around a curve that falls, and the same again, a little off."""
    steps = np.arange(10, 2010, 10)
    noise = np.random.default_rng(1).normal(0, 0.05, (3, len(steps)))
    readable = 2 + 3 * np.exp(-steps / 300) + np.array([[-0.02], [0.0], [0.02]]) + noise
    return {"steps": steps.tolist(), "loss": {"readable": readable.tolist(), "fast": (readable + shift).tolist()}}


@pytest.mark.parametrize(("shift", "held"), [(0.0, True), (0.005, True), (0.2, False), (-0.2, False)])
def test_paths_may_differ_less_than_seeds_and_no_more(curves: ModuleType, shift: float, held: bool) -> None:
    made = curves.compare(found(shift), smooth=100)
    assert (made.max_ratio < 1) == held
    assert ("less" in str(made).split(":")[0]) == held
    assert made.pair == pytest.approx(abs(shift))


def test_other_seeds_of_the_readable_path_are_held_to_the_same_rule(curves: ModuleType) -> None:
    """Given the fast path's curves as the control, the first choice of seeds says what the two paths say."""
    both = found(0.2)
    made = curves.compare({**both, "control": {"seeds": [4, 5, 6], "loss": both["loss"]["fast"]}}, smooth=100)
    assert made.control_CK.shape == (20, len(both["steps"]))  # three of six
    assert made.control_CK[0] == pytest.approx(made.ratio_K)
    assert (
        f"of 20 choices of seeds of the readable path, against its others, {sum(made.control_CK.max(1) >= 1)} break"
        in str(made)
    )
    assert "control" not in str(curves.compare(both, smooth=100))


def test_runs_end_by_their_steps_alone(curves: ModuleType) -> None:
    asked = SimpleNamespace(steps=7, set=[])
    settings = dict(item.split("=") for item in curves.Run("fast", 1, Path("run")).settings(asked))
    ends = {name: float(settings[f"train.{name}"]) for name in (*LIMITS, "patience")}
    assert {name: end for name, end in ends.items() if end} == {"steps": 7}


@pytest.mark.parametrize("seeds", [["1"], ["2", "2"]])
def test_one_seed_has_no_spread(
    curves: ModuleType, seeds: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["curves.py", "--seeds", *seeds])
    with pytest.raises(SystemExit):
        curves.parse_options()
    assert "--seeds needs two at least" in capsys.readouterr().err


def test_a_quick_race_leaves_what_is_set_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import train_gpu

    monkeypatch.setattr(sys, "argv", ["train_gpu.py", "--quick", "--rounds", "7", "--variant", "a: b=c"])
    given = vars(train_gpu.parse_options())
    assert {name: given[name] for name in train_gpu.QUICK} == {**train_gpu.QUICK, "rounds": 7}
    assert given["variant"] == ["a: b=c"]


def test_smoothing_is_a_mean_of_what_is_there(curves: ModuleType) -> None:
    row = np.array([[1.0, 2.0, 6.0, 3.0]])
    assert curves.smooth_curves(row, 3).tolist() == [[1.5, 3.0, pytest.approx(11 / 3), 4.5]]
    assert curves.smooth_curves(np.full((2, 4), 7.0), 99).tolist() == [[7.0] * 4] * 2


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "matrix products"),
        ("fmha_cutlassB_bf16_aligned_64x64_k64_sm80(PyTorchMemEffAttention)", "attention"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "attention"),
        ("triton_per_fused__softmax_0", "loss"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer and norm of the gradient"),
        ("triton_red_fused__to_copy_add_native_dropout_native_layer_norm_3", "dropout, norms, elementwise"),
        ("void at::native::vectorized_elementwise_kernel<4, direct_copy>", "dropout, norms, elementwise"),
        ("Memcpy HtoD (Pinned -> Device)", "copies between host and device"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "exchange between GPUs"),
        ("some_kernel", "the rest"),
    ],
)
def test_kernels_are_known_by_their_names(name: str, kind: str) -> None:
    from kernels import classify_kernel

    assert classify_kernel(name) == kind

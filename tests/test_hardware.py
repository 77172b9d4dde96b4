"""CPU features: found by flags, limited by what oneDNN is told and by DRAGOMAN_CPU_FEATURES, asked by all choices."""

from __future__ import annotations

import pytest
import torch

from dragoman import hardware
from dragoman.errors import UserError
from dragoman.hardware import CpuFeatures, best_precision, cpu_features, detect_features

ZEN3 = frozenset(["fpu", "sse4_1", "sse4_2", "avx", "avx2", "fma"])
ZEN4 = ZEN3 | frozenset(["avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512_bf16", "avx512_vnni"])
ALDER_LAKE = ZEN3 | {"avx_vnni"}
SAPPHIRE_RAPIDS = ZEN4 | frozenset(["amx_bf16", "amx_tile", "amx_int8", "avx_vnni"])
GRAVITON3 = frozenset(["fp", "asimd", "asimddp", "i8mm", "bf16", "sve"])


@pytest.mark.parametrize(
    ("flags", "expected", "exact"),
    [
        (frozenset(), "none", False),
        (ZEN3, "avx2", False),
        (ZEN4, "avx2, avx512, vnni, bf16", True),
        (ALDER_LAKE, "avx2, vnni", False),
        (SAPPHIRE_RAPIDS, "avx2, avx512, vnni, bf16, amx", True),
        (GRAVITON3, "bf16, dotprod, i8mm", True),
    ],
)
def test_features_by_flags(flags: frozenset[str], expected: str, exact: bool) -> None:
    found = detect_features(flags)
    assert str(found) == expected
    assert found.exact_int8 is exact


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "avx2, avx512, vnni, bf16, amx"),
        ({"ONEDNN_MAX_CPU_ISA": "SSE41"}, "none"),
        ({"ONEDNN_MAX_CPU_ISA": "avx2"}, "avx2"),
        ({"DNNL_MAX_CPU_ISA": "AVX2_VNNI"}, "avx2, vnni"),
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, "avx2, avx512"),
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"}, "avx2, avx512, vnni"),
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, "avx2, avx512, vnni, bf16"),
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"}, "avx2, avx512, vnni, bf16, amx"),
        ({"ONEDNN_MAX_CPU_ISA": ""}, "avx2, avx512, vnni, bf16, amx"),
        ({"DRAGOMAN_CPU_FEATURES": "none"}, "none"),
        ({"DRAGOMAN_CPU_FEATURES": "avx2, vnni"}, "avx2, vnni"),
        ({"DRAGOMAN_CPU_FEATURES": "avx2,vnni", "ONEDNN_MAX_CPU_ISA": "AVX2"}, "avx2"),
        ({"DRAGOMAN_CPU_FEATURES": "dotprod"}, "none"),  # a mask adds nothing
    ],
)
def test_limits(environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "read_cpu_flags", lambda: SAPPHIRE_RAPIDS)
    assert str(cpu_features(environment)) == expected


def test_a_mask_that_names_no_feature_is_refused() -> None:
    with pytest.raises(UserError, match=r"names 'avx3', not a CPU feature; use none or avx2, avx512, "):
        cpu_features({"DRAGOMAN_CPU_FEATURES": "avx2,avx3"})


def test_this_cpu_has_features() -> None:
    assert isinstance(cpu_features({}), CpuFeatures)
    assert hardware.read_cpu_flags()


@pytest.mark.parametrize(
    ("flags", "precision"),
    [(ZEN3, "float32"), (ZEN4, "bf16"), (ZEN4 - {"avx512_bf16"}, "float32"), (GRAVITON3, "float32")],
)
def test_the_best_precision_is_one_with_instructions(
    flags: frozenset[str], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (hardware.FEATURES_VARIABLE, *hardware.ISA_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hardware, "read_cpu_flags", lambda: flags)
    assert best_precision(torch.device("cpu")) == precision

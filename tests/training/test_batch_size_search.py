"""Tests of `find_largest`: for any linear memory need, the result fits and is nearly the largest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dragoman.training.start import TOKEN_STEP, find_largest
from toy_run import Call, assert_user_error


@given(
    fixed=st.floats(0, 1e9),
    slope=st.floats(1e2, 1e6),
    room=st.floats(2e9, 2e11),
    hard=st.floats(0.9, 1.3),
)
def test_result_fits_and_is_nearly_the_largest(fixed: float, slope: float, room: float, hard: float) -> None:
    tried = []

    def needs(tokens: int) -> float | None:
        tried.append(tokens)
        need = fixed + slope * tokens
        return need if need <= hard * room else None  # beyond that the machine gives up

    found = find_largest(needs, room)
    assert found % TOKEN_STEP == 0
    limit = min(room, hard * room)
    if fixed + slope * TOKEN_STEP <= limit:
        assert fixed + slope * found <= room
        assert found >= 0.45 * (limit - fixed) / slope - TOKEN_STEP
    else:
        assert found == TOKEN_STEP
    assert len(tried) < 40


@pytest.mark.skipif(torch.cuda.is_available(), reason="here there is something to fit to")
def test_fit_without_a_gpu_is_refused(call: Call, small: Path) -> None:
    assert_user_error(call("fit", small), "memory of a GPU", "train.device=cpu")


@pytest.mark.gpu
def test_fit_on_a_gpu_prints_train_tokens(call: Call, small: Path) -> None:
    answer = call("fit", small, "train.device=cuda")
    assert answer.code == 0
    assert answer.out.startswith("train.tokens=")

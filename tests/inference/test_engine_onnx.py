"""ONNX graphs give our log-probabilities, at sizes other than those they were made with; our search finds the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from dragoman.decoding.methods import SearchSettings
from dragoman.errors import UserError
from dragoman.inference.engines import onnx
from dragoman.inference.engines.base import SUPPORTED_BY_LIBRARY
from toy_exchange import assert_same, list_unsupported, loaded_run, make_jobs, model_of, run_beam_search

REFUSED = list_unsupported(SUPPORTED_BY_LIBRARY["ONNX"])


def test_a_model_answers_as_ours(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="the extra onnx is not installed")
    pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
    from dragoman.inference.engines.onnx import OnnxEngine

    model = model_of(
        {"norm": "scale", "activation": "swiglu", "position": "relative", "decoder_attention": "local", "layers": 1}
    )
    onnx.save_onnx(loaded_run(model), tmp_path)
    engine = OnnxEngine(loaded_run(model), tmp_path)
    for count in (1, 5):
        for search in (SearchSettings(beam=1), SearchSettings(beam=3, nbest=3)):
            jobs = make_jobs(count)
            assert_same(run_beam_search(model, jobs, search), engine.search(jobs, search))


@pytest.mark.parametrize("setting", REFUSED)
def test_a_model_that_it_cannot_hold_is_refused_by_name(setting: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"^model\.{setting} cannot be exported to ONNX, which supports "):
        onnx.save_onnx(loaded_run(model_of(REFUSED[setting])), tmp_path)

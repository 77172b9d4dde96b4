"""export and import from the command line: a real run there and back, and nothing left behind that was not checked."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dragoman.data.tokenizers import Tokenizers
from dragoman.inference import export as trade
from dragoman.inference.engines import ctranslate2
from dragoman.inference.engines.base import SUPPORTED_BY_LIBRARY, SupportedValues, format_setting
from dragoman.inference.loading import load
from dragoman.inference.model_card import render_card
from dragoman.run_dir import RunFolder
from toy_run import Call, Toy

pytest.importorskip("ctranslate2", reason="CTranslate2 has no wheel for every platform")
pytest.importorskip("transformers", reason="the extra huggingface is not installed")


def agreeing(out: str) -> int:
    """Return for how many beams nearly all translations are the same: a near-tie may go either way."""
    shares = re.findall(r"beam \d+: (\d+) of 100 translations are the same(?: and (\d+) as good)?", out)
    return sum(int(same) + int(near or 0) >= 100 * trade.MIN_EQUAL_FRACTION for same, near in shares)


@pytest.mark.parametrize("to", [name for name in trade.EXPORT_FORMATS if name != "onnx"])  # which has a test of its own
def test_there(toy: Toy, call: Call, tmp_path: Path, to: str) -> None:
    out = tmp_path / "out"
    said = call("export", toy.run, "--to", to, out)
    assert (said.code, said.out.splitlines()[-1]) == (0, f"done: {out}"), said.err
    assert agreeing(said.out) == 2
    assert Tokenizers.load(out / "tokenizer").fingerprint() == Tokenizers.load(toy.run / "tokenizer").fingerprint()
    assert (out / "config.yaml").read_bytes() == RunFolder(toy.run).config_file.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    again = call("export", toy.run, "--to", to, out)
    assert again.code == 2
    assert "exists already; remove it or choose another folder" in again.err


def test_and_back(toy: Toy, call: Call, tmp_path: Path) -> None:
    assert call("export", toy.run, "--to", "huggingface", tmp_path / "there").code == 0
    assert (tmp_path / "there" / "README.md").read_text() == render_card(toy.run, exported="there")
    said = call("import", tmp_path / "there", "--out", tmp_path / "back")
    assert said.code == 0, said.err
    assert agreeing(said.out) == 2
    old, new = load(toy.run, device="cpu"), load(tmp_path / "back", device="cpu")
    assert all(torch.equal(a, b) for a, b in zip(old.model.parameters(), new.model.parameters(), strict=True))
    assert new.longest_source == old.longest_source
    assert (new.recipe.data, new.recipe.search) == (old.recipe.data, old.recipe.search)


def test_smaller_in_8_bits(toy: Toy, call: Call, tmp_path: Path) -> None:
    for quantization in ("float32", "int8"):
        said = call("export", toy.run, "--to", "ctranslate2", "--quantization", quantization, tmp_path / quantization)
        assert said.code == 0, said.err
        assert "CTranslate2 computes" not in said.err
    large, small = ((tmp_path / name / "model.bin").stat().st_size for name in ("float32", "int8"))
    assert small < large


def test_it_is_said_which_precision_was_compared(toy: Toy, call: Call, tmp_path: Path) -> None:
    """No CPU computes in float16: CTranslate2 takes the nearest that it has."""
    said = call("export", toy.run, "--to", "ctranslate2", "--quantization", "float16", tmp_path / "out")
    assert said.code == 0, said.err
    assert "on this cpu, CTranslate2 computes in float32 instead of float16" in said.err


def test_what_is_exported_needs_only_ctranslate2(toy: Toy, call: Call, tmp_path: Path) -> None:
    """The pieces that our tokenizer makes go in, and the pieces of our answer come out."""
    import ctranslate2

    assert call("export", toy.run, "--to", "ctranslate2", tmp_path / "out").code == 0
    translator, plain = load(toy.run, device="cpu"), ctranslate2.Translator(str(tmp_path / "out"), device="cpu")
    names = json.loads((tmp_path / "out" / "shared_vocabulary.json").read_text())
    line = (toy.folder / "dev.src").read_text().splitlines()[0]
    pieces = [names[token] for token in translator.tokenizers.source.encode(line)]
    answer = plain.translate_batch([pieces], beam_size=4)[0].hypotheses[0]
    assert (
        translator.tokenizers.target.decode([names.index(piece) for piece in answer])
        == translator.translate([line])[0].text
    )


def test_a_wrong_conversion_is_not_written(
    toy: Toy, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms that are left out: the folder opens, but does not answer as the run does."""
    right = ctranslate2.fill_parts

    def wrong(parts: list[Any], module: torch.nn.Module) -> None:
        right(parts, module)
        if hasattr(parts[0], "gamma"):
            parts[0].gamma = parts[0].gamma * 0 + 0.5

    monkeypatch.setattr(ctranslate2, "fill_parts", wrong)
    said = call("export", toy.run, "--to", "ctranslate2", tmp_path / "out")
    assert said.code == 2
    assert "nothing was written, since translations of the new model differ (beam 1: " in said.err
    assert "must be the same); a model that was trained for longer usually agrees" in said.err
    assert not list(tmp_path.iterdir())
    said = call("export", toy.run, "--to", "ctranslate2", "--force", tmp_path / "out")
    assert (said.code, said.out.splitlines()[-1]) == (0, f"done: {tmp_path / 'out'}"), said.err
    assert re.search(r"written because of --force: beam 1: .* BLEU \d+\.\d and chrF \d+\.\d against", said.err)
    assert (tmp_path / "out" / "model.bin").exists()


@pytest.mark.parametrize(("lines", "asked"), [(100, 99), (20, 20)])
def test_how_many_translations_must_be_the_same_is_said(lines: int, asked: int) -> None:
    """Those that are as good within rounding count."""
    for near in (0, 2):
        enough = trade.Agreement(4, lines, asked - near, near, 0.1)
        assert not enough.explain_failure(exact=True)
        said = enough._replace(same=enough.same - 1).explain_failure(exact=True)
        assert said.startswith(f"beam 4: {asked - near - 1} of {lines} translations are the same")
        assert said.endswith(f"; {asked} must be the same")
        assert ("2 as good within rounding" in said) is (near == 2)


def test_in_less_precision_texts_must_be_alike() -> None:
    """However few are equal: a model of middling quality has many hypotheses that are nearly as good."""
    few = trade.Agreement(4, 100, 18, 0, 0.1, 80.0, 90.0)
    assert not few.explain_failure(exact=False)
    said = few._replace(same=60, chrf=trade.MIN_CHRF - 0.1).explain_failure(exact=False)
    assert said.startswith(
        "beam 4: 60 of 100 translations are the same, BLEU 80.0 and chrF 69.9 against those of the run"
    )
    assert said.endswith("; chrF must be 70 at least")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--to", "ctranslate3"], "there is no format called 'ctranslate3'; did you mean 'ctranslate2'?"),
        (
            ["--to", "huggingface", "--quantization", "int8"],
            "huggingface does not support quantization 'int8'",
        ),
        (
            ["--to", "ctranslate2", "--quantization", "int4"],
            "ctranslate2 does not support quantization 'int4'",
        ),
    ],
)
def test_what_there_is_not_is_refused(
    toy: Toy, call: Call, tmp_path: Path, arguments: list[str], complaint: str
) -> None:
    said = call("export", toy.run, *arguments, tmp_path / "out")
    assert said.code == 2
    assert complaint in said.err
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there_is_named(toy: Toy, call: Call, tmp_path: Path) -> None:
    said = call("export", toy.run, "--to", "ctranslate2", tmp_path / "no" / "out")
    assert said.code == 2
    assert f"there is no folder {str(tmp_path / 'no')!r} to write into" in said.err
    said = call("import", tmp_path / "no", "--out", tmp_path / "run")
    assert said.code == 2
    assert "config.json' is missing or damaged" in said.err


def test_the_sample_is_the_runs_own_or_the_phrasebook(toy: Toy) -> None:
    translator = load(toy.run, device="cpu")
    own = (toy.folder / "dev.src").read_text().splitlines()
    assert [line.text for line in trade.sample_lines(translator.recipe.data, 100)] == own
    data = translator.recipe.data
    gone = data.model_copy(update={"dev": tuple(c.model_copy(update={"source": "gone"}) for c in data.dev)})
    assert len(trade.sample_lines(gone, 30)) == 30


PAGE = (Path(__file__).parents[2] / "docs/exchange.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("column", "holds"),
    [(column, SUPPORTED_BY_LIBRARY[name]) for column, name in ((2, "CTranslate2"), (3, "Hugging Face"), (4, "ONNX"))],
)
def test_what_a_format_holds_is_told(column: int, holds: SupportedValues) -> None:
    rows = [line.split("|") for line in PAGE.splitlines() if line.startswith("|")]
    for setting, choices in holds.items():
        (cell,) = (row[column] for row in rows if f"`{setting}`" in row[1])
        assert cell.strip() == ", ".join(f"`{format_setting(choice)}`" for choice in choices)

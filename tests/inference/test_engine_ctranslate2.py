"""CTranslate2 says what we say: every model that it can hold, every beam, and each sentence within its own limit."""

from __future__ import annotations

import json
import tempfile
from math import isnan
from pathlib import Path

import pytest
import torch

from dragoman.data.tokenizers import Tokenizers, TokenizerSettings, train_tokenizer
from dragoman.decoding.methods import SearchSettings
from dragoman.decoding.protocol import DecodingConstraints, SearchJob
from dragoman.errors import UserError
from dragoman.hardware import CpuFeatures, cpu_features
from dragoman.inference.engines import ctranslate2
from dragoman.inference.engines import ctranslate2 as engines_ctranslate2
from dragoman.inference.engines.base import SUPPORTED_BY_LIBRARY, list_vocabulary
from dragoman.inference.engines.ctranslate2 import CTranslate2Engine
from dragoman.models.transformer import Transformer
from dragoman.types import EOS, SPECIALS
from toy_exchange import (
    WithoutMarks,
    assert_same,
    combinations,
    list_unsupported,
    loaded_run,
    make_jobs,
    make_letter_tokenizers,
    model_of,
    run_beam_search,
)
from toy_models import build_small_model, describe_differences, make_model_sections
from toy_run import Call, Toy

HELD = combinations(**{name: SUPPORTED_BY_LIBRARY["CTranslate2"][name] for name in ("norm", "activation", "position")})
REFUSED = list_unsupported(SUPPORTED_BY_LIBRARY["CTranslate2"])


@pytest.fixture(scope="module")
def tokenizers() -> Tokenizers:
    return make_letter_tokenizers()


def engine(model: Transformer, tokenizers: Tokenizers, cache: Path, quantization: str = "float32") -> CTranslate2Engine:
    return CTranslate2Engine.convert(loaded_run(model, tokenizers), cache, quantization=quantization)


@pytest.mark.parametrize("section", HELD, ids=lambda section: describe_differences(section, {}))
def test_every_model_that_it_holds_answers_as_ours(
    section: dict[str, object], tokenizers: Tokenizers, tmp_path: Path
) -> None:
    model, jobs = model_of(section), make_jobs()
    other = engine(model, tokenizers, tmp_path)
    for search in (SearchSettings(beam=1), SearchSettings(beam=3, nbest=3)):
        assert_same(run_beam_search(WithoutMarks(model), jobs, search), other.search(jobs, search))


@pytest.mark.parametrize("setting", REFUSED)
def test_a_model_that_it_cannot_hold_is_refused_by_name(setting: str, tokenizers: Tokenizers, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"^model\.{setting} cannot be exported to CTranslate2, which supports "):
        engine(model_of(REFUSED[setting]), tokenizers, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["query_width", "value_width"])
def test_widths_apart_are_refused_by_name(name: str, tokenizers: Tokenizers, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"^model\.{name}=4 cannot be exported to CTranslate2"):
        engine(model_of({name: 4}), tokenizers, tmp_path)


@pytest.mark.parametrize("name", ["deep and shallow rnn", "lm transformer", "classifier transformer mean"])
def test_another_kind_of_model_is_refused_by_name(name: str, tokenizers: Tokenizers, tmp_path: Path) -> None:
    section = make_model_sections()[name]
    with pytest.raises(UserError, match=rf"^model\.kind={section['kind']} cannot be exported to CTranslate2"):
        ctranslate2.save_ctranslate2(loaded_run(build_small_model(section), tokenizers), tmp_path, "float32")


def test_two_vocabularies(tmp_path: Path) -> None:
    one, two = make_letter_tokenizers("abcdef"), make_letter_tokenizers("uvwxyz12")
    settings = model_of({}).settings
    torch.manual_seed(0)
    model = Transformer(settings, source_size=one.source.size, target_size=two.target.size, joint=False).eval()
    jobs = [SearchJob([4, 5, 9], 9), SearchJob([6], 9)]
    other = engine(model, Tokenizers(one.source, two.target), tmp_path)
    search = SearchSettings(beam=2)
    assert_same(run_beam_search(WithoutMarks(model), jobs, search), other.search(jobs, search))


@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("nbest", [1, 2, 4])
def test_each_sentence_keeps_to_its_own_limit(
    penalty: float, nbest: int, tokenizers: Tokenizers, tmp_path: Path
) -> None:
    """Whatever the others in its batch may have; whole answers come before cut ones."""
    model = model_of({"position": "none"})
    jobs = [job._replace(max_tokens=1 + number % 12) for number, job in enumerate(make_jobs(36, seed=1))]
    search = SearchSettings(beam=4, nbest=nbest, length_penalty=penalty)
    ours = run_beam_search(WithoutMarks(model), jobs, search)
    assert {len(some) for some in ours} == {nbest}
    assert {one.finished for some in ours for one in some} == {True, False}
    assert_same(ours, engine(model, tokenizers, tmp_path).search(jobs, search))


def test_without_a_penalty_it_looks_as_far(tokenizers: Tokenizers, tmp_path: Path) -> None:
    """Left to itself it stops when the best beam has ended, though the next best may end later."""
    model, search = model_of({"tied": False}), SearchSettings(beam=4, nbest=3, length_penalty=0.0)
    torch.manual_seed(152)
    with torch.no_grad():  # a model that ends soon, in several ways
        model.decoder.embedding.weight.normal_()
        model.project.weight.normal_(std=0.9)
        model.decoder.norm.bias.normal_(std=2)
        model.project.weight[EOS] = model.decoder.norm.bias * 0.4 + torch.randn(8) * 0.5
    jobs = [job._replace(max_tokens=30) for job in make_jobs(40)]
    assert_same(
        run_beam_search(WithoutMarks(model), jobs, search), engine(model, tokenizers, tmp_path).search(jobs, search)
    )


def test_greedy_is_a_method_and_a_width(tokenizers: Tokenizers, tmp_path: Path) -> None:
    other, jobs = engine(model_of({}), tokenizers, tmp_path), make_jobs()
    assert other.search(jobs, SearchSettings(method="greedy")) == other.search(jobs, SearchSettings(beam=1))


@pytest.mark.parametrize("beam", [1, 2])
def test_without_scores_it_says_the_same(beam: int, tokenizers: Tokenizers, tmp_path: Path) -> None:
    """Greedy search then saves itself the probabilities; a beam goes by them."""
    other, jobs = engine(model_of({}), tokenizers, tmp_path), make_jobs(20)
    full, bare = (other.search(jobs, SearchSettings(beam=beam, scores=scores)) for scores in (True, False))
    assert [(some[0].tokens, some[0].finished) for some in bare] == [
        (some[0].tokens, some[0].finished) for some in full
    ]
    assert all(isnan(some[0].score) and isnan(some[0].logp) for some in bare) if beam == 1 else bare == full


def test_scores_are_there_where_they_are_shown(toy: Toy, call: Call) -> None:
    asked = ["translate", toy.run, "--engine", "ctranslate2", "--device", "cpu", "search.scores=false", "--beam"]
    said = call(*asked, 1, "--json", stdin=b"ba del fo.\n")
    assert json.loads(said.out)["score"] < 0, said.err
    said = call(*asked, 2, "--nbest", 2, stdin=b"ba del fo.\n")
    assert [float(line.split("|||")[2]) < 0 for line in said.out.splitlines()] == [True, True], said.err
    assert call(*asked, 1, stdin=b"ba del fo.\n").out == "ol ebi ak.\n"


def test_no_limit_and_no_source(tokenizers: Tokenizers, tmp_path: Path) -> None:
    other = engine(model_of({}), tokenizers, tmp_path)
    assert other.search([], SearchSettings()) == []
    dead, empty = other.search([SearchJob([4], 0), SearchJob([], 5)], SearchSettings())
    assert dead == []
    assert [(one.tokens, one.finished) for one in empty] == [([], True)]


@pytest.mark.parametrize(
    "change", [{"method": "sample"}, {"stop": "best"}, {"length_norm": "gnmt"}, {"no_repeat": 2}, {"min_ratio": 0.5}]
)
def test_a_search_that_it_does_not_know_is_refused_by_name(
    change: dict[str, object], tokenizers: Tokenizers, tmp_path: Path
) -> None:
    ((name, value),) = change.items()
    with pytest.raises(UserError, match=f"does not support search.{name}={value}; use --engine torch$"):
        engine(model_of({}), tokenizers, tmp_path).search(make_jobs(), SearchSettings.model_validate(change))


def test_wishes_are_refused(tokenizers: Tokenizers, tmp_path: Path) -> None:
    job = SearchJob([4, 5], 6, constraints=DecodingConstraints(prefix=(6,)))
    with pytest.raises(UserError, match=r"forced prefixes.*; use --engine torch$"):
        engine(model_of({}), tokenizers, tmp_path).search([job], SearchSettings())


def test_more_positions_than_it_has_are_refused(tokenizers: Tokenizers, tmp_path: Path) -> None:
    other = engine(model_of({"position": "learned"}), tokenizers, tmp_path)
    assert other.max_tokens == 40
    other.search([SearchJob([4] * 39, 40)], SearchSettings())
    for job in (SearchJob([4] * 40, 5), SearchJob([4], 41)):
        with pytest.raises(UserError, match=r"positions for 40 tokens.* may need 41; use --engine torch$"):
            other.search([job], SearchSettings())


def test_the_cache_is_filled_once_and_by_weights(tokenizers: Tokenizers, tmp_path: Path) -> None:
    model = model_of({})
    before = [parameter.clone() for parameter in model.parameters()]
    for quantization in ("int8", "int8", "float32"):
        engine(model, tokenizers, tmp_path / "cache", quantization)
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    made = {folder: (folder / "model.bin").stat().st_mtime_ns for folder in (tmp_path / "cache").iterdir()}
    assert len(made) == 2
    with torch.no_grad():
        model.project.weight[5, 0] += 1e-3
    engine(model, tokenizers, tmp_path / "cache", "int8")
    after = {folder: (folder / "model.bin").stat().st_mtime_ns for folder in (tmp_path / "cache").iterdir()}
    assert len(after) == 3
    assert made.items() <= after.items()


def test_a_cache_that_cannot_be_written_changes_nothing(
    tokenizers: Tokenizers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is converted into a temporary folder, which is gone when the model is open."""
    (tmp_path / "file").touch()
    (tmp_path / "spare").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "spare"))
    model, jobs, search = model_of({}), make_jobs(), SearchSettings(beam=2)
    found = engine(model, tokenizers, tmp_path / "file").search(jobs, search)
    assert found == engine(model, tokenizers, tmp_path / "cache").search(jobs, search)
    assert not list((tmp_path / "spare").iterdir())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"can be written neither to .*file.*make room there, or use --engine torch"):
        engine(model, tokenizers, tmp_path / "file")


def test_a_library_of_cuda_that_is_missing_is_named(tokenizers: Tokenizers, tmp_path: Path) -> None:
    """CTranslate2 loads such libraries when it decodes, not when it opens a model."""

    class Future:
        def result(self) -> None:
            raise RuntimeError("Library libcublas.so.12 is not found or cannot be loaded")

    opened = engine(model_of({}), tokenizers, tmp_path)
    batch = engines_ctranslate2.PendingBatch([0], [Future()], False)
    with pytest.raises(UserError, match=r"libcublas\.so\.12.*--device cpu or --engine torch"):
        list(opened.collect(batch, SearchSettings()))


def test_threads_of_pytorch_stay_as_they_were(tokenizers: Tokenizers, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        engine(model_of({}), tokenizers, tmp_path)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


FEATURES = [cpu_features(), CpuFeatures(avx2=True), CpuFeatures()]


@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_int8_is_near(
    features: CpuFeatures, tokenizers: Tokenizers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what it says does not depend on what the CPU really has."""
    monkeypatch.setattr(engines_ctranslate2, "cpu_features", lambda: features)
    model, jobs, search = model_of({}), make_jobs(20), SearchSettings(beam=1)
    ours, theirs = (
        run_beam_search(WithoutMarks(model), jobs, search),
        engine(model, tokenizers, tmp_path, "int8").search(jobs, search),
    )
    gaps = [abs(a[0].score - b[0].score) for a, b in zip(ours, theirs, strict=True) if a[0].tokens == b[0].tokens]
    assert len(gaps) > 10
    assert 1e-6 < sum(gaps) / len(gaps) < 0.05


def test_without_vnni_weights_stay_within_64(tokenizers: Tokenizers) -> None:
    """And every row of them has the scale that gives it back."""
    exact, narrow = (ctranslate2.make_specification(loaded_run(model_of({}), tokenizers)) for _ in range(2))
    exact.validate()
    weights = {name: value.numpy() for name, value in exact.variables().items() if name.endswith("/weight")}
    ctranslate2.quantize_weights(narrow, "int8", narrow_int8=True)
    variables = narrow.variables()
    found = {name: variables[name] for name in weights if not isinstance(variables[name], str)}
    assert len(found) > 10
    for name, value in found.items():
        whole_OI, scale_O = value.numpy(), variables[f"{name}_scale"].numpy()
        assert whole_OI.dtype.name == "int8"
        assert (abs(whole_OI).max(1) == ctranslate2.NARROW_INT8).all()
        assert abs(whole_OI / scale_O[:, None] - weights[name]).max() <= 0.51 / scale_O.min()


def test_weights_for_cpus_with_and_without_vnni_are_kept_apart(
    tokenizers: Tokenizers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for features in (CpuFeatures(), CpuFeatures(avx512=True, vnni=True)):
        monkeypatch.setattr(engines_ctranslate2, "cpu_features", lambda features=features: features)
        for quantization in ("int8", "float32"):
            engine(model_of({}), tokenizers, tmp_path, quantization)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("kind", ["char", "word", "byte", "bpe", "space"])
def test_pieces_are_no_two_alike(kind: str) -> None:
    text = ["<s> </s> <pad> <unk> a b", "a ▁ ▁a <0x41> A , a , <0x0A> ▁, \n"] * 20
    tokenizer = train_tokenizer(text, TokenizerSettings(kind=kind, size=270))
    pieces = list_vocabulary(tokenizer)
    assert len(pieces) == len(set(pieces)) == tokenizer.size
    assert tuple(pieces[:4]) == SPECIALS

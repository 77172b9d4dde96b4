"""Several runs as one: their mean, with every kind of model, search and vocabulary that fits."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import yaml

from dragoman.decoding.methods import SEARCH_METHODS, decode
from dragoman.decoding.protocol import DecodingConstraints, Ensemble, mean_logp
from dragoman.errors import UserError
from dragoman.inference.loading import load, load_as
from dragoman.inference.translator import Translator
from toy_requests import make_request, real, real_sources
from toy_run import Call, Toy, make_sentences, train_quietly, translate_toy, write_recipe
from toy_steps import Toy as Steps
from toy_steps import sources


@pytest.fixture(scope="module")
def other(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of another kind with the same vocabulary, half taught."""
    folder = tmp_path_factory.mktemp("other")
    for file in toy.folder.glob("*.[st]r[cg]"):
        shutil.copy(file, folder)
    recipe = write_recipe(folder / "recipe.yaml", train={"steps": 60, "validate_every": 0})
    whole = yaml.safe_load(recipe.read_text())
    recipe.write_text(yaml.safe_dump(whole | {"model": {"kind": "rnn", "layers": 1, "width": 64, "dropout": 0.0}}))
    return train_quietly(recipe, folder / "run")


def test_the_mean_is_of_probabilities() -> None:
    model = Ensemble([Steps(seed=1), Steps(seed=2), Steps(seed=3)])
    state, token_N = model.start(*sources(4, 5)), torch.tensor([2, 2])
    logp_NV, state = model.step(token_N, state)
    each = [one.step(token_N, one.start(*sources(4, 5)))[0] for one in model.models]
    assert torch.allclose(logp_NV.exp(), torch.stack([one.exp() for one in each]).mean(0))
    assert torch.allclose(logp_NV.exp().sum(-1), torch.ones(2))
    assert len(state.select(torch.tensor([0])).states) == 3
    assert float(mean_logp([torch.zeros(1)] * 7)) == 0  # never above 0: the stop rules lean on it


@pytest.mark.parametrize("method", SEARCH_METHODS)
def test_one_model_twice_is_that_model(method: str) -> None:
    source_BS, real_BS, _ = real_sources(5)
    wishes = [DecodingConstraints(seed_text=str(row)) for row in range(5)]
    single, double = (
        decode(make_request(model, source_BS, real_BS, [8] * 5, wishes, method=method, samples=4))
        for model in (real("transformer"), Ensemble([real("transformer"), real("transformer")]))
    )
    for ours, theirs in zip(single, double, strict=True):
        assert [one.tokens for one in ours] == [one.tokens for one in theirs]
        assert [one.logp for one in ours] == pytest.approx([one.logp for one in theirs], abs=1e-4)


def test_two_runs_answer_as_one(toy: Toy, other: Path, call: Call) -> None:
    both, weak = load([toy.run, other], device="cpu"), load_as(Translator, other, device="cpu")
    assert isinstance(both, Translator)
    lines = make_sentences(60, seed=51)

    def right(translator: Translator) -> int:
        found = translator.translate(lines)
        return sum(one.text == translate_toy(line) for one, line in zip(found, lines, strict=True))

    assert right(both) > right(weak)
    found = both.translate(lines[:5])
    for line, one in zip(lines, found, strict=False):
        assert both.score([line], [one.text])[0].logp == pytest.approx(one.logp, abs=1e-4)
        assert all(sum(row) == pytest.approx(1, abs=1e-4) for row in one.alignment)
    raw = "\n".join(lines[:5]).encode()
    assert call("translate", toy.run, "--with", other, stdin=raw).out.splitlines() == [one.text for one in found]
    assert [both.translate([line])[0].text for line in lines[:5]] == [one.text for one in found]


def test_one_run_in_a_list_is_that_run(toy: Toy) -> None:
    assert load([toy.run], device="cpu").translate(["ba del."]) == toy.translator.translate(["ba del."])
    with pytest.raises(UserError, match="no run to load"):
        load([])


def test_other_vocabularies_are_refused(toy: Toy, tmp_path: Path, call: Call) -> None:
    for file in toy.folder.glob("*.[st]r[cg]"):
        shutil.copy(file, tmp_path)
    sections: dict[str, dict[str, object]] = {"tokenizer": {"kind": "char"}, "train": {"steps": 1, "validate_every": 0}}
    stranger = train_quietly(write_recipe(tmp_path / "recipe.yaml", **sections), tmp_path / "run")
    refused = call("translate", toy.run, "--with", stranger, stdin=b"ba.\n")
    assert (refused.code, refused.out) == (2, "")
    assert "different vocabularies" in refused.err

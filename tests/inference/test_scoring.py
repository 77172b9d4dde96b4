"""How likely a model holds given answers: what search says of its own, whoever the neighbours are."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
import yaml

from dragoman.errors import UserError
from dragoman.inference import predictor as scoring
from dragoman.inference.loading import load_as
from dragoman.inference.translator import Translator
from dragoman.phrasebook.generate import generate_phrases
from dragoman.types import EOS
from toy_run import (
    Call,
    Toy,
    assert_user_error,
    make_sentences,
    train_quietly,
    translate_toy,
    write_corpus,
    write_lines,
    write_recipe,
)

SOURCES = make_sentences(40, seed=71, longest=9)
KINDS: dict[str, dict[str, object]] = {
    "transformer": {"layers": 1, "width": 32, "heads": 2},
    "rnn": {"kind": "rnn", "layers": 1, "width": 32},
    "tree": {"layers": 1, "width": 32, "heads": 2, "position": "tree"},
}


@pytest.fixture(scope="module")
def train_kind(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """Return a function that trains a model a little, once for each kind and seed."""
    folder = tmp_path_factory.mktemp("kinds")
    write_corpus(folder)

    @functools.cache
    def train_once(kind: str, seed: int) -> Path:
        recipe = write_recipe(folder / f"{kind}.yaml", train={"steps": 110, "validate_every": 0, "save_every": 110})
        sections = yaml.safe_load(recipe.read_text())
        recipe.write_text(yaml.safe_dump({**sections, "model": {**KINDS[kind], "dropout": 0.1}}))
        return train_quietly(recipe, folder / f"{kind}-{seed}", f"train.seed={seed}")

    return train_once


@pytest.fixture(scope="module", params=[*KINDS, "ensemble"])
def translator(request: pytest.FixtureRequest, train_kind: Callable[[str, int], Path]) -> Translator:
    """Return a translator of each kind that has learnt a little."""
    ensemble = request.param == "ensemble"
    runs = [train_kind("transformer", seed) for seed in (1, 2)] if ensemble else [train_kind(request.param, 1)]
    return load_as(Translator, runs, device="cpu")


@pytest.mark.parametrize("beam", [1, 3])
def test_the_score_of_an_answer_is_what_search_said_of_it(translator: Translator, beam: int) -> None:
    """Where the answer is spelt as the tokenizer spells it; search may know other spellings."""
    found = translator.translate(SOURCES, beam=beam)
    scores = translator.score(SOURCES, [one.text for one in found])
    whole = [
        (answer, score)
        for answer, score in zip(found, scores, strict=True)
        if score.tokens == [*answer.tokens, "</s>"] and not any("cut" in warning for warning in answer.warnings)
    ]
    assert len(whole) > 5
    for answer, score in whole:
        assert score.logp == pytest.approx(answer.logp, abs=1e-4)
        assert score.mean == pytest.approx(answer.logp / len(score.tokens), abs=1e-4)
        assert score.logp == pytest.approx(sum(score.token_logps), abs=1e-9)


@pytest.mark.parametrize("translator", ["transformer", "rnn", "ensemble"], indirect=True)
def test_the_same_step_by_step(translator: Translator) -> None:
    """Read in one pass, or asked of the model token after token."""
    source, target = SOURCES[0], translate_toy(SOURCES[0])
    [found] = translator.score([source], [target])
    ids = [*translator.tokenizers.target.encode(target), EOS]
    source_BS = torch.tensor([[*translator.tokenizers.source.encode(source), EOS]])
    with torch.inference_mode():
        state, token, logps = translator.model.start(source_BS, source_BS > 0), 2, []
        for wanted in ids:
            logp_NV, state = translator.model.step(torch.tensor([token]), state)
            logps.append(float(logp_NV[0, wanted]))
            token = wanted
    assert found.token_logps == pytest.approx(logps, abs=1e-4)
    assert found.tokens == translator.tokenizers.target.ids_to_tokens(ids)


def test_neighbours_change_nothing(translator: Translator) -> None:
    """To the bit: alone, all at once, in another order."""
    targets = [translate_toy(line) for line in SOURCES]
    whole = translator.score(SOURCES, targets)
    order = Random(1).sample(range(len(SOURCES)), len(SOURCES))
    mixed = translator.score([SOURCES[i] for i in order], [targets[i] for i in order])
    assert [mixed[order.index(i)] for i in range(len(SOURCES))] == whole
    assert [translator.score([s], [t])[0] for s, t in zip(SOURCES[:9], targets, strict=False)] == whole[:9]


def test_right_answers_are_likelier(toy: Toy) -> None:
    right = [translate_toy(line) for line in SOURCES]
    good = toy.translator.score(SOURCES, right)
    bad = toy.translator.score(SOURCES, right[1:] + right[:1])
    assert sum(a.mean > b.mean for a, b in zip(good, bad, strict=True)) >= 38


def test_odd_pairs_have_a_score_each(translator: Translator) -> None:
    pairs = [
        ("", ""),
        (" \t", "  "),
        ("", "ak."),
        ("ba.", ""),
        ("☃ \x07", "ak ☃."),
        ("ba. " * 400, "ak."),
        ("ba.", "ak " * 400),
    ]
    found = translator.score(*zip(*pairs, strict=True))
    assert len(found) == len(pairs)
    assert [one.logp for one in found[:2]] == [0.0, 0.0]
    assert all(math.isfinite(one.logp) and one.logp < 0 for one in found[2:])
    assert all(len(one.tokens) == len(one.token_logps) for one in found)
    assert "with an empty source" in found[2].warnings
    assert found[3].tokens == ["</s>"]
    assert any("longer than any sentence of training" in warning for warning in found[5].warnings)


def test_what_the_model_has_no_places_for(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """No score, and a word about it; the others are not disturbed."""
    model = toy.translator.recipe.model.model_copy(update={"position": "learned", "max_length": 12})
    bounded = replace(toy.translator, recipe=toy.translator.recipe.model_copy(update={"model": model}))
    one, lost = bounded.score(["ba.", "ba."], ["ak.", "ak " * 20])
    assert one == toy.translator.score(["ba."], ["ak."])[0]
    assert math.isnan(lost.logp)
    assert math.isnan(lost.mean)
    assert lost.token_logps == []
    assert [warning.partition(":")[0] for warning in lost.warnings] == ["without a score"]
    monkeypatch.setattr(scoring, "MAX_TOKENS_WITH_EOS", 8)
    assert math.isnan(toy.translator.score(["ba " * 20], ["ak."])[0].logp)


def test_wide_grids_have_fewer_rows(translator: Translator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is how long lines fit into memory; the scores are the same but for rounding."""
    targets = [translate_toy(line) for line in SOURCES]
    whole = translator.score(SOURCES, targets)
    monkeypatch.setattr(scoring, "MAX_ATTENTION_CELLS", 1)
    monkeypatch.setattr(scoring, "LOGIT_CHUNK", 3)
    for one, other in zip(whole, translator.score(SOURCES, targets), strict=True):
        assert one.logp == pytest.approx(other.logp, abs=1e-4)


def test_unknown_words_are_said(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    recipe = write_recipe(tmp_path / "recipe.yaml", train={"steps": 2, "warmup": 1})
    run = train_quietly(recipe, tmp_path / "run", "tokenizer.kind=word", "tokenizer.byte_fallback=false")
    known, unknown = load_as(Translator, run, device="cpu").score(["ba.", "ba."], ["ak.", "qux ak qux."])
    assert known.warnings == ()
    assert unknown.warnings == ("with unknown tokens in the target: 2",)


def test_lists_must_belong_together(toy: Toy) -> None:
    with pytest.raises(UserError, match="give one for each source"):
        toy.translator.score(["ba."], [])
    for sources, targets in (("ba.", ["ak."]), (["ba."], "a")):
        with pytest.raises(UserError, match="takes a list of lines"):
            toy.translator.score(sources, targets)


@pytest.mark.parametrize("translator", ["tree"], indirect=True)
def test_trees_go_to_those_who_ask(translator: Translator, toy: Toy) -> None:
    phrases = list(generate_phrases("test", 4))
    pairs = [phrase.source for phrase in phrases], [phrase.target for phrase in phrases]
    trees = [phrase.tree for phrase in phrases]
    plain, grown = translator.score(*pairs), translator.score(*pairs, trees=trees)
    assert all(one.logp != other.logp for one, other in zip(plain, grown, strict=True))
    assert translator.score(*pairs, trees=[None] * 4) == plain
    with pytest.raises(UserError, match="does not use trees"):
        toy.translator.score(*pairs, trees=trees)


# the command


def test_one_number_for_every_pair(toy: Toy, tmp_path: Path, call: Call) -> None:
    targets = [translate_toy(line) for line in SOURCES[:5]]
    source = write_lines(tmp_path / "s", [*SOURCES[:5], "", "ba."])
    target = write_lines(tmp_path / "t", [*targets, "", "ak " * 5000])
    told = call("score", toy.run, "--source", source, "--target", target, "--batch", 2, "--device", "cpu")
    assert told.code == 0, told.err
    numbers = [float(line) for line in told.out.splitlines()]
    wanted = toy.translator.score([*SOURCES[:5], ""], [*targets, ""])
    assert numbers[:6] == pytest.approx([one.logp for one in wanted], abs=1e-5)
    assert math.isnan(numbers[6])
    assert "line 7: without a score" in told.err
    assert told.err.endswith("1 line without a score\n")
    told = call("score", toy.run, "--source", source, "--target", target, "--json")
    records = [json.loads(line) for line in told.out.splitlines()]
    assert [record["tokens"] for record in records[:6]] == [one.tokens for one in wanted]
    assert records[0]["token_logps"] == pytest.approx(wanted[0].token_logps, abs=1e-6)
    assert (records[6]["logp"], records[6]["mean"]) == (None, None)
    assert (records[0]["source"], records[0]["target"]) == (SOURCES[0], targets[0])


def test_files_must_belong_together(toy: Toy, tmp_path: Path, call: Call) -> None:
    source, target = write_lines(tmp_path / "s", ["a", "b"]), write_lines(tmp_path / "t", ["a"])
    assert_user_error(call("score", toy.run, "--source", source, "--target", target), "2 lines", "has 1")
    assert call("score", toy.run, "--source", source).code == 2

"""Neurons and the page of a training report, compared with separate forward passes and with planted neurons."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import toy_heads
from dragoman.inference.loading import load
from dragoman.inference.predictor import Predictor
from dragoman.inference.translator import Translator
from dragoman.inspection.neurons import encode_pairs, find_top_activations, record_hidden
from dragoman.inspection.probes import Probes, measure_probes
from dragoman.inspection.training_report import inspect_training, read_probes
from dragoman.modules.feedforward import FEEDFORWARDS
from dragoman.types import Example, Pair
from toy_exchange import loaded_run, make_letter_tokenizers
from toy_models import SMALL_TRANSFORMER, build_small_model, collate_rows, make_examples
from toy_run import Call, Toy, assert_user_error, make_sentences, pairs, train_quietly, write_lines

PLANTED, OTHER = 11, 17  # token ids


def make_translator(**settings: Any) -> Translator:
    model = build_small_model({**SMALL_TRANSFORMER, **settings}, dtype=torch.float32).eval()
    base: Predictor[Any] = loaded_run(model)
    return Translator(base.model, base.tokenizers, base.recipe, 9, torch.device("cpu"))


def plant_neuron(translator: Translator, side: str, number: int, token: int) -> None:
    """Let a neuron of the first layer fire on one token: orthogonal embeddings, and attention that adds nothing."""
    part: Any = getattr(translator.model, side)
    layer = part.layers[0]
    with torch.no_grad():
        part.embedding.weight.copy_(torch.eye(*part.embedding.weight.shape) * 10)
        for attention in (layer.attention, layer.cross):
            if attention is not None:
                attention.sublayer.out.weight.zero_()
                attention.sublayer.out.bias.zero_()
        layer.feedforward.norm.weight.fill_(1.0)
        layer.feedforward.norm.bias.zero_()
        wide = layer.feedforward.sublayer.wide
        wide.weight[number], wide.bias[number] = 0.0, 0.0
        wide.weight[number, token] = 1.0


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_a_planted_neuron_has_its_token_on_top(side: str) -> None:
    translator = make_translator(width=64, position="none")
    plant_neuron(translator, side, 5, PLANTED)
    examples = make_examples(SMALL_TRANSFORMER, 60)
    texts = [example.source if side == "encoder" else example.target for example in examples]
    count = sum(int((ids == PLANTED).sum()) for ids in texts)
    assert count > 4
    found = find_top_activations(translator, examples, neurons=1000, tokens=4)
    [planted] = [neuron for neuron in found if neuron.layer == f"{side} layer 1" and neuron.number == 5]
    tokenizer = translator.tokenizers.source
    assert [top.token for top in planted.top] == tokenizer.ids_to_tokens([PLANTED]) * 4


@pytest.mark.parametrize("activation", [name for name, kind in FEEDFORWARDS.items() if kind])
@pytest.mark.parametrize("shared", [False, True])
def test_activations_are_those_of_a_separate_forward_pass(activation: str, shared: bool) -> None:
    """The hidden activations of every sentence alone, computed by `compute_hidden`, sorted."""
    section = {**SMALL_TRANSFORMER, "activation": activation, "shared": shared}
    translator, examples = make_translator(activation=activation, shared=shared), make_examples(section, 7)
    inputs: dict[str, list[Tensor]] = {}
    for side in ("encoder", "decoder"):
        part: Any = getattr(translator.model, side)
        for layer in part.layers:
            hidden = layer.feedforward.sublayer.compute_hidden
            inputs[f"{side} {id(layer)}"] = []

            def keep(_module: Any, given: Any, key: str = f"{side} {id(layer)}", hidden: Any = hidden) -> None:
                inputs[key].append(hidden(given[0])[0].detach())

            layer.feedforward.sublayer.register_forward_pre_hook(keep)
            if shared:
                break
    for example in examples:
        translator.model(collate_rows(section, [[0]], [example]))
    expected = {key: torch.cat(some) for key, some in inputs.items()}
    for rows in inputs.values():
        rows.clear()
    neurons = find_top_activations(translator, examples, neurons=1000, tokens=3)
    if shared:  # both layers of a side are one module, called twice for each sentence
        assert len({neuron.layer for neuron in neurons}) == 4
        return
    names = dict(
        zip(("encoder layer 1", "encoder layer 2", "decoder layer 1", "decoder layer 2"), expected, strict=True)
    )
    assert len(neurons) == sum(hidden_NF.size(1) for hidden_NF in expected.values())
    for neuron in neurons:
        hidden_N = expected[names[neuron.layer]][:, neuron.number]
        values = hidden_N.sort(descending=True).values[:3].tolist()
        assert [top.value for top in neuron.top] == pytest.approx(values, abs=1e-5)
        assert neuron.mean == pytest.approx(float(hidden_N.mean()), abs=1e-5)
        if (deviation := float(hidden_N.std(correction=0))) > 1e-4:
            expected_selectivity = (np.mean(values) - neuron.mean) / deviation
            assert neuron.selectivity == pytest.approx(expected_selectivity, abs=1e-2)


def test_a_token_is_shown_in_its_context() -> None:
    translator = make_translator(width=64, position="none")
    plant_neuron(translator, "encoder", 0, PLANTED)
    ids = [OTHER] * 9 + [PLANTED] + [OTHER] * 2
    [neuron, *_] = find_top_activations(translator, [Example(np.array(ids), np.array([OTHER]), 0)], tokens=1)
    names = make_letter_tokenizers().source.ids_to_tokens([PLANTED, OTHER])
    [top] = neuron.top
    assert (top.token, top.before, top.after) == (names[0], f"… {names[1] * 6}", f"{names[1] * 2}</s>")


def test_no_hooks_stay() -> None:
    translator = make_translator()
    find_top_activations(translator, make_examples(SMALL_TRANSFORMER, 3))
    with record_hidden(translator.model):
        pass
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in translator.model.modules())


def test_command(toy: Toy, tmp_path: Path, call: Call) -> None:
    """The page is one file without links, has all sections, and its numbers are those of the function."""
    records = [{"event": "probe", "step": step, **measure(toy).to_json()} for step in (10, 20)]
    (toy.run / "probes.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    made = call("inspect", toy.run, "--training", "--out", tmp_path / "page.html", "--device", "cpu")
    assert made.code == 0, made.err
    assert "encoder layer 1, neuron" in made.out
    page = (tmp_path / "page.html").read_text()
    for title in ("against distance", "against depth", "Variance", "Over time", "Neurons"):
        assert re.search(f"<h2>[^<]*{title}", page), title
    assert page.count("<svg") == 9  # four of the finished run, which has one layer, and five over time
    assert not re.search(r"(?:src|href)=|https?://(?!www\.w3\.org)", page)
    printed = call("inspect", toy.run, "--training", "--json", "--device", "cpu")
    data = json.loads(printed.out)
    assert data["probes"] == measure(toy).to_json()
    assert [record["step"] for record in data["history"]] == [10, 20]
    assert len(read_probes(toy.run / "probes.jsonl")) == 2
    (toy.run / "probes.jsonl").unlink()


def measure(toy: Toy) -> Probes:
    """Return the probes of the toy run on its dev set, read by hand."""
    lines = [(toy.folder / f"dev.{side}").read_text().splitlines() for side in ("src", "trg")]
    report = inspect_training(toy.translator, [Pair(*both) for both in zip(*lines, strict=True)])
    return report.probes


def test_given_files(toy: Toy, tmp_path: Path, call: Call) -> None:
    some = pairs(30, seed=4)
    source = write_lines(tmp_path / "a", [pair.source for pair in some])
    target = write_lines(tmp_path / "b", [pair.target for pair in some])
    options = ("--training", "--json", "--device", "cpu")
    printed = call("inspect", toy.run, *options, "--source", source, "--target", target)
    assert json.loads(printed.out)["probes"] == inspect_training(toy.translator, some).probes.to_json()
    assert_user_error(call("inspect", toy.run, *options, "--source", source), "--target")
    assert_user_error(call("inspect", toy.run, *options, "--source", "absent", "--target", target), "absent")
    assert_user_error(call("inspect", toy.run, "A text", "--training"), "--training")
    assert_user_error(call("inspect", toy.run, "A text", "--source", source), "--training")


def test_a_dev_set_that_is_gone(small: Path, tmp_path: Path, call: Call) -> None:
    run = train_quietly(small, tmp_path / "run", "train.steps=2")
    (tmp_path / "dev.src").unlink()
    assert_user_error(call("inspect", run, "--training"), "dev.src", "--source", "--target")
    without = train_quietly(small, tmp_path / "without", "train.steps=2", "data.dev=[]")
    assert_user_error(call("inspect", without, "--training"), "data.dev", "--source")


@pytest.mark.parametrize("backbone", toy_heads.BACKBONES)
@pytest.mark.parametrize("task", ["classifier", "windows", "lines"])
def test_other_tasks(tmp_path: Path, call: Call, task: str, backbone: str) -> None:
    short = {"steps": 2, "validate_every": 0}
    if task == "classifier":
        recipe = toy_heads.classifier_recipe(tmp_path, backbone, **short)
    else:
        documents = "file" if task == "windows" else "line"
        recipe = toy_heads.lm_recipe(tmp_path, backbone, documents=documents, **short)
    run = train_quietly(recipe, tmp_path / "run")
    printed = call("inspect", run, "--training", "--json", "--device", "cpu")
    assert printed.code == 0, printed.err
    data = json.loads(printed.out)
    assert bool(data["neurons"]) == (backbone == "transformer")
    assert bool(data["probes"]["recurrent"]) == (backbone == "rnn")
    made = call("inspect", run, "--training", "-o", tmp_path / "page.html", "--device", "cpu")
    assert made.code == 0, made.err


def test_pairs_that_are_left_out_are_reported(toy: Toy) -> None:
    sentence = make_sentences(1)[0]
    examples, notes = encode_pairs(toy.translator, [Pair(sentence, "x"), Pair("", "x")])
    assert len(examples) == 1
    assert notes == ["1 pairs left out: one side empty"]


def test_probes_of_a_loaded_run_are_those_of_its_model(toy: Toy) -> None:
    predictor = load(toy.run, device="cpu")
    examples, _ = encode_pairs(predictor, pairs(3))
    batch = collate_rows({"kind": "transformer"}, [[0], [1], [2]], examples)
    assert measure_probes(predictor.model, batch) == inspect_training(predictor, pairs(3)).probes

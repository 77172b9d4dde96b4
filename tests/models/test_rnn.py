"""Tests of recurrent encoder-decoders. Those of all kinds of model are in test_model_contract.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from dragoman.data.batches import Widths
from dragoman.errors import UserError
from dragoman.inference.loading import load_as
from dragoman.inference.translator import Translator
from dragoman.kernels.attention import RowLayout
from dragoman.models.registry import MODEL_KINDS, build_model
from dragoman.models.rnn import BRIDGES, RecurrentLmDecoder, Rnn, RnnSettings
from dragoman.modules.attention_scores import SCORES
from dragoman.modules.recurrent import CELLS, NONLINEARITIES
from dragoman.recipe import Recipe, check_model
from dragoman.training.start import check_settings
from dragoman.types import PAD, Batch
from pairs import parametrize_pairwise
from tolerance import assert_different, assert_same
from toy_batch import VOCABULARY, examples, in_rows
from toy_requests import beam_search, take_likeliest
from toy_run import make_sentences, train_quietly, translate_toy, write_corpus, write_recipe
from toy_sections import settings_of

REGISTRIES: dict[str, Any] = {"cell": CELLS, "nonlinearity": NONLINEARITIES, "bridge": BRIDGES, "attention": SCORES}
SMALL = {"width": 8, "dropout": 0.0}
ALL_VARIANTS = parametrize_pairwise(
    {"cell": [*CELLS], "attention": [*SCORES], "input_feeding": [False, True], "layers": [1, 2]}
)


def build_rnn(*, joint: bool = True, dtype: torch.dtype = torch.float64, seed: int = 0, **given: Any) -> Rnn:
    """Return a small model whose biases and initial states are not zero, so that errors in them are found."""
    torch.manual_seed(seed)
    model = Rnn(RnnSettings(**SMALL | given), source_size=VOCABULARY, target_size=VOCABULARY, joint=joint)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.to(dtype)


def compute_grads(model: Rnn, *batches: Batch) -> dict[str, Tensor]:
    """Return the gradients of the summed loss of all batches."""
    model.zero_grad()
    for batch in batches:
        real_BT = batch.target_segment_BT > 0
        logits_NV = model.project(model(batch)[real_BT])
        nn.functional.cross_entropy(logits_NV, batch.target_out_BT[real_BT], reduction="sum").backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def collate_unpacked(count: int, widths: Widths | None = None, *, seed: int = 0) -> Batch:
    """Return a batch of `count` examples, one per row, and an empty row."""
    return in_rows([*([i] for i in range(count)), []], examples(count, seed=seed), widths)


@torch.no_grad()
@ALL_VARIANTS
def test_alignment_rows_sum_to_one_inside_their_sentence(
    cell: str, attention: str, input_feeding: bool, layers: int
) -> None:
    model = build_rnn(cell=cell, attention=attention, input_feeding=input_feeding, layers=layers)
    batch = collate_unpacked(3, Widths(12, 11))
    weight_BTS = model.compute_alignment(batch)
    assert weight_BTS.dtype == torch.float32
    assert_same(weight_BTS.sum(-1), torch.ones(weight_BTS.shape[:2]))
    real_BS = batch.source_segment_BS > 0
    assert (weight_BTS[:3] * ~real_BS[:3, None] == 0).all()
    if not SCORES[attention].aligns:
        assert_same(weight_BTS[:3], (real_BS / real_BS.sum(-1, keepdim=True))[:3, None].expand(3, 11, 12))
    else:
        assert ((weight_BTS[0, 0] - weight_BTS[0, 1])[real_BS[0]].abs() > 1e-9).all()


@ALL_VARIANTS
def test_gradients_in_bf16_are_close_to_float32(cell: str, attention: str, input_feeding: bool, layers: int) -> None:
    model = build_rnn(dtype=torch.float32, cell=cell, attention=attention, input_feeding=input_feeding, layers=layers)
    batch = collate_unpacked(3)
    exact = compute_grads(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = compute_grads(model, batch)
    assert all(grad.dtype == torch.float32 for grad in rounded.values())
    found, expected = (torch.cat([grad.flatten() for grad in grads.values()]) for grads in (rounded, exact))
    assert 0 < (found - expected).norm() <= 0.05 * expected.norm()


@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize("bridge", ["linear", "layers"])
def test_states_equal_those_of_pytorch_modules(cell: str, bridge: str) -> None:
    """The reference has a bidirectional PyTorch module, a bridge and a second module, without attention."""
    model = build_rnn(cell=cell, bridge=bridge, attention="none", encoder_layers=2, decoder_layers=2)
    batch = in_rows([[0], [1], [2]], examples(3))
    kind = {"gru": nn.GRU, "lstm": nn.LSTM}[cell]
    torch_encoder = kind(8, 4, 2, batch_first=True, bidirectional=True).double()
    torch_decoder = kind(8, 8, 2, batch_first=True).double()
    with torch.no_grad():
        for number, layer in enumerate(model.encoder.layers):
            for suffix, ours in ((f"l{number}", layer.ahead), (f"l{number}_reverse", layer.back)):
                copy_weights(ours, torch_encoder, suffix)
        for number, ours in enumerate(model.decoder.stack.cells):
            copy_weights(ours, torch_decoder, f"l{number}")
    x_BSC, x_BTC = (model.encoder.embedding(ids) * 8**0.5 for ids in (batch.source_BS, batch.target_in_BT))
    lengths = (batch.source_segment_BS > 0).sum(1)
    packed = nn.utils.rnn.pack_padded_sequence(x_BSC, lengths, batch_first=True, enforce_sorted=False)
    last = torch_encoder(packed)[1]
    parts = last if cell == "lstm" else [last]  # h and c, each with two directions of two layers
    if bridge == "linear":
        last_BC = torch.cat([*parts[0][-2:]], -1)
        first = torch.tanh(model.decoder.bridge.out(last_BC)).view(3, 2, -1, 8).permute(2, 1, 0, 3).contiguous()
    else:  # directions are in adjacent rows: (layer, direction, batch, width) becomes (layer, batch, both directions)
        first = torch.stack([part.view(2, 2, 3, 4).transpose(1, 2).flatten(2) for part in parts])
    out, _ = torch_decoder(x_BTC, (first[0], first[1]) if cell == "lstm" else first[0])
    real_BT = batch.target_segment_BT > 0
    assert_same(model(batch)[real_BT], torch.tanh(model.decoder.join(out))[real_BT])


def copy_weights(ours: Any, theirs: nn.Module, suffix: str) -> None:
    for name, weight in zip(
        ("weight_ih", "weight_hh", "bias_ih", "bias_hh"),
        (ours.input_weight, ours.hidden_weight, ours.bias, ours.make_hidden_bias()),
        strict=True,
    ):
        getattr(theirs, f"{name}_{suffix}").copy_(weight)


def test_input_feeding_equals_a_cell_with_concatenated_inputs() -> None:
    """The reference is a PyTorch cell that reads [embedding; previous output], with dot-product attention."""
    model = build_rnn(input_feeding=True, attention="dot", embedding_width=6)
    batch = in_rows([[0]], examples(1))
    decoder = model.decoder
    bottom = decoder.stack.cells[0]
    cell = nn.LSTMCell(12, 8).double()
    with torch.no_grad():
        cell.weight_ih.copy_(torch.cat([bottom.input_weight, decoder.feed.weight], 1))
        cell.weight_hh.copy_(bottom.hidden_weight)
        cell.bias_ih.copy_(bottom.bias)
        cell.bias_hh.zero_()
    (memory_SC,), [(last_BC,)] = model.encoder.encode(batch.source_BS, RowLayout.from_source(batch))
    h, c = torch.tanh(decoder.bridge.out(last_BC)).view(2, 1, 8)
    o, outputs = torch.zeros(1, 6, dtype=torch.float64), []
    for x in decoder.embedding(batch.target_in_BT[0]) * 6**0.5:
        h, c = cell(torch.cat([x[None], o], -1), (h, c))
        a = (h @ memory_SC.T).softmax(-1) @ memory_SC
        o = torch.tanh(decoder.join(torch.cat([a, h], -1)))
        outputs.append(o)
    assert_same(model(batch)[0], torch.cat(outputs))


def test_the_context_is_an_input_of_the_cell() -> None:
    """The reference is a PyTorch cell that reads [embedding; context] (Bahdanau 2015); the state before it attends."""
    model = build_rnn(context_place="input", attention="multiplicative", embedding_width=6, encoder_width=10)
    batch, decoder = in_rows([[0]], examples(1)), model.decoder
    bottom, cell = decoder.stack.cells[0], nn.LSTMCell(16, 8).double()
    with torch.no_grad():
        cell.weight_ih.copy_(torch.cat([bottom.input_weight, decoder.feed_context.weight], 1))
        cell.weight_hh.copy_(bottom.hidden_weight)
        cell.bias_ih.copy_(bottom.bias)
        cell.bias_hh.zero_()
    (memory_SM,), [(last_BM,)] = model.encoder.encode(batch.source_BS, RowLayout.from_source(batch))
    h, c = torch.tanh(decoder.bridge.out(last_BM)).view(2, 1, 8)
    outputs, weights = [], []
    for x in decoder.embedding(batch.target_in_BT[0]) * 6**0.5:
        weights.append((h @ decoder.attention.score.key.weight @ memory_SM.T).softmax(-1))
        a = weights[-1] @ memory_SM
        h, c = cell(torch.cat([x[None], a], -1), (h, c))
        outputs.append(torch.tanh(decoder.join(torch.cat([a, h], -1))))
    assert_same(model(batch)[0], torch.cat(outputs))
    assert_same(model.compute_alignment(batch)[0], torch.cat(weights))


@torch.no_grad()
def test_a_multiplicative_score_relates_states_of_different_widths() -> None:
    """The reference computes s^T W h with a rectangular W, token by token."""
    model, batch = build_rnn(attention="multiplicative", encoder_width=12), in_rows([[0]], examples(1))
    source, states = model.encode(batch.source_BS, RowLayout.from_source(batch))
    weight_CM, memory_SM = model.decoder.attention.score.key.weight, source.value_BSM[0]
    assert (weight_CM.shape, memory_SM.shape[1]) == ((8, 12), 12)
    (state_TC,) = model.decoder.stack(model.decoder.embed(batch.target_in_BT), states)
    (out_TO,), _ = model.decoder(batch.target_in_BT, source, states)
    for s_C, out_O in zip(state_TC, out_TO, strict=True):
        score_S = torch.stack([s_C @ weight_CM @ h_M for h_M in memory_SM])
        context_M = sum(weight * h_M for weight, h_M in zip(score_S.softmax(0), memory_SM, strict=True))
        assert_same(out_O, torch.tanh(model.decoder.join(torch.cat([context_M, s_C]))))


@torch.no_grad()
def test_without_attention_only_the_final_state_is_used() -> None:
    model, batch = build_rnn(attention="none", bidirectional=False), in_rows([[0]], examples(1, seed=3))
    source, states = model.encode(batch.source_BS, RowLayout.from_source(batch))
    other = source._replace(key_BSA=source.key_BSA + 1, value_BSM=source.value_BSM + 1)
    assert_same(model.decoder(batch.target_in_BT, other, states)[0], model(batch))
    other_source = replace(batch, source_BS=batch.source_BS.clone().fill_(9))
    assert_different(model(other_source), model(batch))


@torch.no_grad()
@pytest.mark.parametrize("feeding", [False, True])
def test_greedy_search_on_a_recurrent_model(feeding: bool) -> None:
    model = build_rnn(input_feeding=feeding, dtype=torch.float32)
    batch = collate_unpacked(3)
    real_BS = batch.source_BS != PAD
    limit_B = torch.full((4,), 6)
    greedy = beam_search(model, batch.source_BS, real_BS, limit_B, width=1, nbest=1, alpha=1.0)
    assert [found[0].tokens for found in greedy] == take_likeliest(model, batch.source_BS, real_BS, 6)
    beam = beam_search(model, batch.source_BS, real_BS, limit_B, width=5, nbest=5, alpha=1.0)
    assert all(best[0].score >= first[0].score - 1e-5 for best, first in zip(beam, greedy) if first[0].finished)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("given", [{}, {"embedding_width": 6}, {"initial_state": "learned", "layers": 3}], ids=str)
def test_language_model_decoder(cell: str, given: dict[str, Any]) -> None:
    """Steps equal the forward pass, padding has no influence, and every weight gets a gradient."""
    torch.manual_seed(0)
    settings = RnnSettings(**SMALL | {"cell": cell} | given)
    table = nn.Embedding(VOCABULARY, settings.embedded_width)
    decoder = RecurrentLmDecoder(settings, table).double()
    batch = collate_unpacked(3)
    out_BTO = decoder(batch.target_in_BT, RowLayout.from_target(batch))
    assert out_BTO.size(-1) == settings.output_width
    state = decoder.start(len(batch.target_in_BT))
    for t, token_B in enumerate(batch.target_in_BT.unbind(1)):
        out_BO, state = decoder.step(token_B, state)
        assert_same(out_BO, out_BTO[:, t])
    out_BTO.square().sum().backward()
    assert all(parameter.grad is not None for parameter in decoder.parameters())
    selected = decoder.start(2).select(torch.tensor([1, 0, 1]))
    assert [len(part) for part in selected.layers[0]] == [3] * CELLS[cell].state_tensors


@pytest.mark.parametrize("setting", REGISTRIES)
def test_an_unknown_name_is_refused_with_a_suggestion(setting: str) -> None:
    first = next(iter(REGISTRIES[setting]))
    with pytest.raises(UserError) as caught:
        settings_of({"kind": "rnn", setting: first + "x"})
    assert f"there is no model.{setting} called {first + 'x'!r}; did you mean {first!r}?" in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"width": 7}, "model.bidirectional=true needs an even model.width, half for each direction; got 7"),
        ({"nonlinearity": "relu"}, "model.nonlinearity has no use in model.cell=lstm"),
        ({"attention": "dot", "attention_width": 5}, "model.attention_width has no use in model.attention=dot"),
        ({"attention": "dot", "encoder_width": 8}, "model.attention=dot needs encoder and decoder states of the same"),
        ({"bridge": "copy", "encoder_width": 8}, "model.bridge=copy needs encoder and decoder states of the same"),
        ({"bridge": "layers", "encoder_width": 8}, "model.bridge=layers needs encoder and decoder states of the same"),
        ({"bridge": "layers", "encoder_layers": 2}, "model.bridge=layers needs as many encoder layers as decoder"),
        ({"attention": "none", "context_place": "input"}, "model.context_place=input needs attention to the source"),
        ({"encoder_width": 9}, "model.bidirectional=true needs an even model.encoder_width"),
        ({"attention": "none", "bridge": "none"}, "the decoder never sees the source"),
        ({"initial_state": "lerned"}, "model.initial_state: should be 'zero' or 'learned', got 'lerned'"),
        ({"heads": 8}, "there is no setting 'model.heads'"),
    ],
)
def test_invalid_settings_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        settings_of({"kind": "rnn", **given})
    assert settings_of({"kind": "rnn", "width": 7, "bidirectional": False}).width == 7


def test_recurrent_models_are_not_compiled() -> None:
    recipe = check_model(Recipe.model_validate({"model": {"kind": "rnn"}, "train": {"compile": True}}))
    with pytest.raises(UserError, match=r"train\.compile=true is of no use to recurrent models"):
        check_settings(recipe)


def test_build_model_makes_a_recurrent_model() -> None:
    assert type(settings_of({"kind": "rnn"})) is MODEL_KINDS["rnn"][""]
    assert settings_of({"kind": "rnn"}).layout == "padded"
    recipe = check_model(Recipe.model_validate({"model": {"kind": "rnn", **SMALL}, "tokenizer": {"joint": False}}))
    assert recipe.model.cell == "lstm"
    model = build_model(recipe.neural_model, source_size=VOCABULARY, target_size=99, joint=recipe.tokenizer.joint)
    assert model.project.out_features == 99
    assert model(collate_unpacked(2)).isfinite().all()


@pytest.mark.parametrize(
    ("tied", "joint", "tables"), [(True, True, 1), (True, False, 2), (False, True, 3), (False, False, 3)]
)
@pytest.mark.parametrize("embedding_width", [0, 6])
def test_embeddings_are_shared_as_the_settings_say(tied: bool, joint: bool, tables: int, embedding_width: int) -> None:
    model = build_rnn(tied=tied, joint=joint, embedding_width=embedding_width)
    matrices = (model.encoder.embedding.weight, model.decoder.embedding.weight, model.project.weight)
    assert len({id(matrix) for matrix in matrices}) == tables
    names = dict(model.named_parameters()).keys()
    assert compute_grads(model, collate_unpacked(2)).keys() == names
    assert {name.split(".")[0] for name in names} == {"encoder", "decoder"} | (set() if tied else {"project"})


@pytest.mark.parametrize(
    ("given", "settings"), [({}, ["train.tokens=256", "train.lr=6e-3"]), ({"input_feeding": True}, [])]
)
def test_a_recurrent_model_learns_a_toy_language(given: dict[str, object], settings: list[str], tmp_path: Path) -> None:
    """Train on files, load the run folder and search: most unseen sentences are translated correctly."""
    write_corpus(tmp_path, train=400)
    model = {"kind": "rnn", "width": 64, "dropout": 0.0, **given}
    recipe = write_rnn_recipe(tmp_path, model)
    run = train_quietly(recipe, tmp_path / "run", "train.steps=200", "train.validate_every=0", *settings)
    unseen = make_sentences(30, seed=77)
    found = load_as(Translator, run).translate(unseen)
    correct = sum(hypothesis.text == translate_toy(text) for hypothesis, text in zip(found, unseen, strict=True))
    assert correct >= 20
    assert all(abs(sum(row) - 1) < 1e-4 for hypothesis in found for row in hypothesis.alignment)


def write_rnn_recipe(folder: Path, model: dict[str, object]) -> Path:
    """Write a recipe with this model section instead of the Transformer of the toy recipe."""
    path = write_recipe(folder / "recipe.yaml")
    recipe = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**recipe, "model": model}))
    return path


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    """With dropout, the weights are equal to the bit."""
    write_corpus(tmp_path)
    recipe = write_rnn_recipe(tmp_path, {"kind": "rnn", "width": 16, "layers": 2, "input_feeding": True})
    small = ["train.save_every=3", "train.validate_every=6", "train.validate_lines=4", "train.schedule=constant"]
    train_quietly(recipe, tmp_path / "parts", "train.steps=3", *small)
    train_quietly(recipe, tmp_path / "once", "train.steps=6", *small)
    parts = train_quietly(recipe, tmp_path / "parts", "train.steps=6", *small, resume=True)
    assert (parts / "model.safetensors").read_bytes() == (tmp_path / "once" / "model.safetensors").read_bytes()

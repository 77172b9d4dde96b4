"""Tests of the Transformer: it equals that of PyTorch, packed and unpacked, step by step and in one pass."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dragoman.data.batches import Widths
from dragoman.errors import UserError
from dragoman.kernels.attention import KERNELS
from dragoman.models.registry import MODEL_KINDS, build_model, count_parameters
from dragoman.models.transformer import CAPACITY_STEP, Transformer, TransformerSettings
from dragoman.modules.feedforward import FEEDFORWARDS, NORM_PLACES
from dragoman.modules.norms import NORMS
from dragoman.modules.patterns import PATTERNS
from dragoman.modules.positions import POSITIONS, make_sinusoids
from dragoman.recipe import Recipe, check_model
from dragoman.types import BOS, EOS, PAD, Batch
from tolerance import DEVICES, assert_different, assert_same
from toy_batch import VOCABULARY, examples, in_rows
from toy_sections import settings_of

REGISTRIES: dict[str, Any] = {
    "norm": NORMS,
    "norm_place": NORM_PLACES,
    "activation": FEEDFORWARDS,
    "position": POSITIONS,
    "kernel": KERNELS,
    "attention": PATTERNS,
    "decoder_attention": PATTERNS,
}
SMALL: dict[str, Any] = {"layers": 2, "width": 8, "heads": 2, "dropout": 0.0}
ALL_PLACES = pytest.mark.parametrize("place", NORM_PLACES)
ALL_KERNELS = pytest.mark.parametrize("kernel", KERNELS)


def build_transformer(
    *, joint: bool = True, dtype: torch.dtype = torch.float64, seed: int = 0, **given: Any
) -> Transformer:
    """Return a small model whose biases and norms are not at their initial values, so that errors show."""
    torch.manual_seed(seed)
    model = Transformer(
        TransformerSettings(**SMALL | given), source_size=VOCABULARY, target_size=VOCABULARY, joint=joint
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.to(dtype)


def compute_loss(model: Transformer, batch: Batch) -> Tensor:
    real_BT = batch.target_segment_BT > 0
    logits_NV = model.project(model(batch)[real_BT])
    return nn.functional.cross_entropy(logits_NV, batch.target_out_BT[real_BT], label_smoothing=0.1, reduction="sum")


def compute_grads(model: Transformer, *batches: Batch) -> dict[str, Tensor]:
    """Return the gradients of the summed loss of all batches."""
    model.zero_grad()
    for batch in batches:
        compute_loss(model, batch).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def pair_parameters(
    ours: nn.Module, theirs: nn.Module, *, decoder: bool
) -> list[tuple[list[nn.Parameter], nn.Parameter]]:
    """Return pairs of our parameters of a layer and PyTorch's; several of ours are concatenated in one of PyTorch's."""
    attention, forward = ours.attention, ours.feedforward
    pairs: list[tuple[list[Any], Any]] = [
        ([attention.sublayer.query_key_value.weight], theirs.self_attn.in_proj_weight),
        ([attention.sublayer.query_key_value.bias], theirs.self_attn.in_proj_bias),
        ([attention.sublayer.out.weight], theirs.self_attn.out_proj.weight),
        ([attention.sublayer.out.bias], theirs.self_attn.out_proj.bias),
        ([attention.norm.weight], theirs.norm1.weight),
        ([attention.norm.bias], theirs.norm1.bias),
        ([forward.sublayer.wide.weight], theirs.linear1.weight),
        ([forward.sublayer.wide.bias], theirs.linear1.bias),
        ([forward.sublayer.narrow.weight], theirs.linear2.weight),
        ([forward.sublayer.narrow.bias], theirs.linear2.bias),
    ]
    last = theirs.norm3 if decoder else theirs.norm2
    pairs += [([forward.norm.weight], last.weight), ([forward.norm.bias], last.bias)]
    if decoder:
        cross, multihead = ours.cross, theirs.multihead_attn
        pairs += [
            ([cross.sublayer.query.weight, cross.sublayer.key_value.weight], multihead.in_proj_weight),
            ([cross.sublayer.query.bias, cross.sublayer.key_value.bias], multihead.in_proj_bias),
            ([cross.sublayer.out.weight], multihead.out_proj.weight),
            ([cross.sublayer.out.bias], multihead.out_proj.bias),
            ([cross.norm.weight], theirs.norm2.weight),
            ([cross.norm.bias], theirs.norm2.bias),
        ]
    return pairs


def build_pytorch_reference(model: Transformer) -> tuple[nn.Transformer, list[tuple[list[nn.Parameter], nn.Parameter]]]:
    """Return a `torch.nn.Transformer` with the weights of ours, and the pairs of corresponding parameters."""
    settings = model.settings
    given: dict[str, Any] = {
        "d_model": settings.width,
        "nhead": settings.heads,
        "dim_feedforward": 4 * settings.width,
        "dropout": 0.0,
        "activation": settings.activation,
        "norm_first": settings.norm_place == "pre",
        "batch_first": True,
        "dtype": model.project.weight.dtype,
    }

    def make_norm() -> nn.LayerNorm | None:
        return nn.LayerNorm(settings.width, dtype=given["dtype"]) if settings.norm_place == "pre" else None

    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(**given), len(model.encoder.layers), make_norm(), enable_nested_tensor=False
    )
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**given), len(model.decoder.layers), make_norm())
    reference = nn.Transformer(**given, custom_encoder=encoder, custom_decoder=decoder)
    pairs = [
        pair
        for layer, torch_layer in zip(model.encoder.layers, encoder.layers)
        for pair in pair_parameters(layer, torch_layer, decoder=False)
    ]
    pairs += [
        pair
        for layer, torch_layer in zip(model.decoder.layers, decoder.layers)
        for pair in pair_parameters(layer, torch_layer, decoder=True)
    ]
    for norm, torch_norm in ((model.encoder.norm, encoder.norm), (model.decoder.norm, decoder.norm)):
        if torch_norm is not None:
            pairs += [([norm.weight], torch_norm.weight), ([norm.bias], torch_norm.bias)]  # type: ignore[list-item]
    with torch.no_grad():
        for our_parameters, torch_parameter in pairs:
            torch_parameter.copy_(torch.cat([*our_parameters]))
    assert len(pairs) == len(list(reference.parameters()))
    return reference, pairs


def embed_reference(table: Tensor, ids_BT: Tensor) -> Tensor:
    """Return scaled embeddings plus sinusoidal positions (Vaswani 2017, sections 3.4 and 3.5)."""
    C = table.size(1)
    return table[ids_BT] * C**0.5 + make_sinusoids(torch.arange(ids_BT.size(1)), C)


@ALL_PLACES
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@ALL_KERNELS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_states_and_gradients_equal_those_of_pytorch(
    place: str, activation: str, kernel: str, dtype: torch.dtype
) -> None:
    """The batch has one sentence per row, of different lengths."""
    model = build_transformer(norm_place=place, activation=activation, kernel=kernel, encoder_layers=3, dtype=dtype)
    reference, pairs = build_pytorch_reference(model)
    sentences = examples(4)
    batch = in_rows([[i] for i in range(4)], sentences, Widths(12, 11))
    real_BT = batch.target_segment_BT > 0
    states = model(batch)[real_BT]

    padding_BS = batch.source_segment_BS == 0
    table = model.decoder.embedding.weight.detach().clone().requires_grad_()
    expected = reference(
        embed_reference(table, batch.source_BS),
        embed_reference(table, batch.target_in_BT),
        tgt_mask=torch.ones(11, 11, dtype=torch.bool).triu(1),
        src_key_padding_mask=padding_BS,
        memory_key_padding_mask=padding_BS,
        tgt_key_padding_mask=~real_BT,
    )[real_BT]
    assert_same(states, expected)
    weight = torch.randn_like(states)
    (states * weight).sum().backward()
    (expected * weight).sum().backward()
    for our_parameters, torch_parameter in pairs:
        grads = [parameter.grad for parameter in our_parameters if parameter.grad is not None]
        assert torch_parameter.grad is not None
        assert_same(torch.cat(grads), torch_parameter.grad)
    assert table.grad is not None
    assert model.decoder.embedding.weight.grad is not None
    assert_same(model.decoder.embedding.weight.grad, table.grad)


ROWS = [[0, 1, 2], [3], [4, 5], [], [6, 7, 8, 9]]


@ALL_PLACES
@ALL_KERNELS
@pytest.mark.parametrize("device", DEVICES)
def test_packed_equals_unpacked(place: str, kernel: str, device: str) -> None:
    """Sentences in packed rows with padding have the same states and gradients as each of them alone."""
    model, sentences = build_transformer(norm_place=place, kernel=kernel).to(device), examples(10)
    batch = in_rows(ROWS, sentences, Widths(44, 41)).to(torch.device(device))
    singles = [in_rows([[i]], sentences).to(torch.device(device)) for i in range(10)]
    states = model(batch)
    for r, row in enumerate(ROWS):
        for number, item in enumerate(row, 1):
            assert_same(states[r][batch.target_segment_BT[r] == number], model(singles[item])[0])
    separate_grads = compute_grads(model, *singles)
    for name, grad in compute_grads(model, batch).items():
        assert_same(grad, separate_grads[name])


@settings(max_examples=20)
@given(st.permutations(range(6)), st.lists(st.integers(0, 6), max_size=3), st.integers(0, 9))
def test_any_packing_equals_unpacked(items: list[int], splits: list[int], spare: int) -> None:
    model, sentences = build_transformer(layers=1), examples(6, seed=5)
    rows = [list(items[a:b]) for a, b in zip([0, *sorted(splits)], [*sorted(splits), 6])]
    widths = Widths(
        *(
            max(sum(len(getattr(sentences[i], side)) + 1 for i in row) for row in rows) + spare
            for side in ("source", "target")
        )
    )
    batch = in_rows(rows, sentences, widths)
    states = model(batch)
    for r, row in enumerate(rows):
        for number, item in enumerate(row, 1):
            assert_same(states[r][batch.target_segment_BT[r] == number], model(in_rows([[item]], sentences))[0])


def fill_ids(batch: Batch, name: str, where: Tensor, value: int) -> Batch:
    return replace(batch, **{name: getattr(batch, name).masked_fill(where, value)})


@ALL_KERNELS
def test_padding_has_no_influence(kernel: str) -> None:
    model = build_transformer(kernel=kernel)
    batch = in_rows(ROWS, examples(10), Widths(44, 41))
    other = fill_ids(batch, "source_BS", batch.source_segment_BS == 0, 17)
    other = fill_ids(other, "source_position_BS", batch.source_segment_BS == 0, 5)
    other = fill_ids(other, "target_in_BT", batch.target_segment_BT == 0, 18)
    real_BT = batch.target_segment_BT > 0
    assert_same(model(other)[real_BT], model(batch)[real_BT])
    before, after = compute_grads(model, batch), compute_grads(model, other)
    for name in before:
        assert_same(after[name], before[name])


@ALL_KERNELS
def test_the_decoder_does_not_look_ahead(kernel: str) -> None:
    model = build_transformer(kernel=kernel)
    batch = in_rows([[0, 1, 2]], examples(3, seed=2, longest=12))
    before = model(batch)
    for number in (1, 2, 3):
        length = int((batch.target_segment_BT == number).sum())
        for position in range(1, length):
            chosen = (batch.target_segment_BT == number) & (batch.target_position_BT == position)
            after = model(fill_ids(batch, "target_in_BT", chosen, 7 if batch.target_in_BT[chosen].item() != 7 else 8))
            may_change = (batch.target_segment_BT == number) & (batch.target_position_BT >= position)
            assert_same(after[~may_change], before[~may_change])
            assert_different(after[chosen], before[chosen])


def test_source_tokens_influence_only_the_targets_of_their_sentence() -> None:
    model = build_transformer()
    batch = in_rows([[0, 1]], examples(2, seed=2))
    before = model(batch)
    for number in (1, 2):
        own_target_BT = batch.target_segment_BT == number
        for position in range(int((batch.source_segment_BS == number).sum())):
            chosen = (batch.source_segment_BS == number) & (batch.source_position_BS == position)
            after = model(fill_ids(batch, "source_BS", chosen, 7 if batch.source_BS[chosen].item() != 7 else 8))
            assert ((after - before)[own_target_BT].abs().amax(-1) > 1e-6).all()
            assert_same(after[~own_target_BT], before[~own_target_BT])


@ALL_KERNELS
@ALL_PLACES
def test_target_padding_without_source_padding_gives_no_nan(kernel: str, place: str) -> None:
    """If the source row has no padding, padding of the target has no key to attend to: a softmax over nothing."""
    model = build_transformer(kernel=kernel, norm_place=place, dtype=torch.float32)
    sentences = examples(2, seed=4)
    full = sum(len(example.source) + 1 for example in sentences)
    batch = in_rows([[0, 1]], sentences, Widths(full, 60))
    assert (batch.source_segment_BS > 0).all()
    assert (batch.target_segment_BT == 0).any()
    assert model(batch).isfinite().all()
    assert all(grad.isfinite().all() for grad in compute_grads(model, batch).values())
    assert model.compute_alignment(batch).isfinite().all()


def sample_prefixes(B: int, W: int, T: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    token_BWT = torch.randint(4, VOCABULARY, (B, W, T), generator=generator)
    token_BWT[:, :, 0] = BOS
    return token_BWT


def make_batch(source_BS: Tensor, real_BS: Tensor, target_in_BT: Tensor) -> Batch:
    B, T = target_in_BT.shape
    return Batch(
        source_BS=source_BS,
        source_segment_BS=real_BS.long(),
        source_position_BS=torch.arange(source_BS.size(1)).expand_as(source_BS),
        target_in_BT=target_in_BT,
        target_out_BT=target_in_BT,
        target_segment_BT=torch.ones(B, T, dtype=torch.long),
        target_position_BT=torch.arange(T).expand(B, T),
        pairs=B,
        source_tokens=int(real_BS.sum()),
        target_tokens=B * T,
    )


def sample_sources(B: int, S: int = 9) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    source_BS = torch.randint(4, VOCABULARY, (B, S), generator=generator)
    for b in range(B):
        source_BS[b, S - 2 * b - 1] = EOS
        source_BS[b, S - 2 * b :] = PAD
    return source_BS, source_BS != PAD


@torch.no_grad()
@ALL_KERNELS
@ALL_PLACES
@pytest.mark.parametrize("beams", [1, 3])
def test_decoding_step_by_step_equals_the_forward_pass(kernel: str, place: str, beams: int) -> None:
    """The cache grows on the way, and the rows of a sentence are reordered, as in beam search."""
    B, W, T = 3, beams, CAPACITY_STEP + 5
    model = build_transformer(kernel=kernel, norm_place=place)
    source_BS, real_BS = sample_sources(B)
    token_BWT = sample_prefixes(B, W, T)
    state = model.start(source_BS, real_BS).select(torch.arange(B).repeat_interleave(W))
    generator = torch.Generator().manual_seed(2)
    for t in range(T):
        logp_NV, state = model.step(token_BWT[:, :, t].flatten(), state)
        if t % 7 in (0, 6) or abs(t - CAPACITY_STEP) < 3:
            for w in range(W):
                states_BTC = model(make_batch(source_BS, real_BS, token_BWT[:, w, : t + 1]))
                expected = model.project(states_BTC[:, -1]).log_softmax(-1)
                assert_same(logp_NV.view(B, W, -1)[:, w], expected, torch.float32)
        parent_BW = torch.randint(W, (B, W), generator=generator)  # rows may repeat, and others are lost
        state = state.select((parent_BW + W * torch.arange(B)[:, None]).flatten())
        token_BWT = token_BWT.gather(1, parent_BW[:, :, None].expand(-1, -1, T)).clone()
        token_BWT[:, :, t + 1 :] = sample_prefixes(B, W, T, seed=t)[:, :, t + 1 :]


@torch.no_grad()
def test_log_probabilities_are_probabilities() -> None:
    model = build_transformer(dtype=torch.bfloat16)
    logp_NV, _ = model.step(torch.tensor([BOS, BOS]), model.start(*sample_sources(2)))
    assert logp_NV.dtype == torch.float32
    assert_same(logp_NV.exp().sum(-1), torch.ones(2))


@torch.no_grad()
def test_an_empty_source_gives_no_nan() -> None:
    """Free slots of a search have empty sources."""
    model = build_transformer()
    source_BS, real_BS = sample_sources(2)
    with_empty = torch.cat([source_BS, torch.full_like(source_BS[:1], PAD)])
    state = model.start(with_empty, with_empty != PAD)
    nonempty_state = model.start(source_BS, real_BS)
    for t in range(3):
        logp_NV, state = model.step(torch.full((3,), BOS + t), state)
        expected, nonempty_state = model.step(torch.full((2,), BOS + t), nonempty_state)
        assert logp_NV.isfinite().all()
        assert_same(logp_NV[:2], expected)


@ALL_PLACES
@ALL_KERNELS
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_alignment_rows_sum_to_one_inside_their_sentence(place: str, kernel: str, layers: int) -> None:
    model = build_transformer(norm_place=place, kernel=kernel, decoder_layers=layers)
    batch = in_rows(ROWS, examples(10), Widths(44, 41))
    weight_BTS = model.compute_alignment(batch)
    assert_same(weight_BTS.sum(-1), torch.ones(weight_BTS.shape[:2]))
    real_BT = batch.target_segment_BT > 0
    outside = batch.target_segment_BT[:, :, None] != batch.source_segment_BS[:, None, :]
    assert (weight_BTS[real_BT] * outside[real_BT] == 0).all()
    assert_different(weight_BTS, torch.full_like(weight_BTS, 1 / 44))


@pytest.mark.parametrize(("depth", "layer"), [(1, 0), (2, 1), (3, 1), (6, 4)])
@ALL_PLACES
def test_alignment_is_the_cross_attention_of_one_layer(place: str, depth: int, layer: int) -> None:
    """The weights are those of the forward pass, averaged over heads: of the last of two layers, or the penultimate."""
    model = build_transformer(decoder_layers=depth, norm_place=place, kernel="reference")
    batch = in_rows([[0, 1]], examples(2))
    seen: list[Tensor] = []
    cross = model.decoder.layers[layer].cross.sublayer
    cross.register_forward_pre_hook(lambda module, args: seen.append(module.compute_weights(*args).mean(1)))
    model(batch)
    assert model.attention_layers == depth
    assert_same(model.compute_alignment(batch), seen[0], torch.float32)
    assert_same(model.compute_alignment(batch, layer), seen[0], torch.float32)
    if depth > 1:
        assert_different(model.compute_alignment(batch, 0 if layer else depth - 1), seen[0])


@pytest.mark.parametrize("setting", REGISTRIES)
def test_an_unknown_name_is_refused_with_a_suggestion(setting: str) -> None:
    first = next(iter(REGISTRIES[setting]))
    with pytest.raises(UserError) as caught:
        settings_of({setting: first + "x"})
    assert f"there is no model.{setting} called {first + 'x'!r}; did you mean {first!r}?" in str(caught.value)


def test_an_unknown_kind_is_refused_with_a_suggestion() -> None:
    with pytest.raises(UserError, match=r"there is no model\.kind called 'transfomer'; did you mean 'transformer'"):
        settings_of({"kind": "transfomer"})
    assert type(settings_of({})) is MODEL_KINDS["transformer"][""]


@pytest.mark.parametrize("name", ["width", "query_width", "value_width"])
@pytest.mark.parametrize(("width", "heads"), [(8, 3), (2, 4)])
def test_a_width_that_is_no_multiple_of_heads_is_refused(name: str, width: int, heads: int) -> None:
    with pytest.raises(
        UserError, match=f"model.{name} must be a multiple of model.heads, got {width} and {heads} heads"
    ):
        settings_of({"width": 60, "heads": heads, name: width})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"width": 7, "heads": 1}, "model.position=sinusoidal needs an even model.width, got 7"),
        ({"width": 6, "heads": 2, "position": "rotary"}, "model.position=rotary needs an even query width per head"),
        ({"projections": False, "query_width": 64}, "model.projections=false leaves queries, keys and values"),
    ],
)
def test_invalid_settings_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        settings_of(given)


@pytest.mark.parametrize(("width", "heads"), [(2, 1), (2, 2), (6, 3), (8, 8)])
def test_small_widths_work(width: int, heads: int) -> None:
    model = build_transformer(width=width, heads=heads, dtype=torch.float32)
    batch = in_rows([[0, 1]], examples(2))
    assert all(grad.isfinite().all() for grad in compute_grads(model, batch).values())


@pytest.mark.parametrize(
    ("tied", "joint", "tables"), [(True, True, 1), (True, False, 2), (False, True, 3), (False, False, 3)]
)
def test_embeddings_are_shared_as_the_settings_say(tied: bool, joint: bool, tables: int) -> None:
    """One matrix serves all three, or target and output, or there are three."""
    model = build_transformer(tied=tied, joint=joint)
    matrices = (model.encoder.embedding.weight, model.decoder.embedding.weight, model.project.weight)
    assert len({id(matrix) for matrix in matrices}) == tables
    assert (model.project.weight is model.decoder.embedding.weight) == tied
    inner = count_parameters(model) - tables * VOCABULARY * 8
    assert inner == count_parameters(build_transformer(tied=True, joint=True)) - VOCABULARY * 8
    batch = in_rows([[0, 1]], examples(2))
    assert compute_grads(model, batch).keys() == dict(model.named_parameters()).keys()


def test_vocabularies_may_differ_in_size() -> None:
    model = Transformer(TransformerSettings(**SMALL), source_size=VOCABULARY, target_size=99, joint=False)
    assert model.encoder.embedding.num_embeddings == VOCABULARY
    assert model.project.out_features == 99
    assert model(in_rows([[0]], examples(1))).isfinite().all()


@pytest.mark.parametrize(
    ("given", "depths"),
    [
        ({"layers": 2}, (2, 2)),
        ({"layers": 2, "encoder_layers": 3}, (3, 2)),
        ({"layers": 2, "decoder_layers": 1}, (2, 1)),
        ({"encoder_layers": 4, "decoder_layers": 1}, (4, 1)),
    ],
)
def test_encoder_and_decoder_may_differ_in_depth(given: dict[str, Any], depths: tuple[int, int]) -> None:
    model = build_transformer(**given)
    assert (len(model.encoder.layers), len(model.decoder.layers)) == depths


def test_the_feed_forward_width_is_four_times_the_width_by_default() -> None:
    assert build_transformer().encoder.layers[0].feedforward.sublayer.wide.out_features == 32
    assert build_transformer(feedforward_width=5).encoder.layers[0].feedforward.sublayer.wide.out_features == 5


@ALL_KERNELS
@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_is_close_to_float32(kernel: str, device: str) -> None:
    model = build_transformer(kernel=kernel, width=32, heads=4, dtype=torch.float32).to(device)
    batch = in_rows(ROWS, examples(10), Widths(44, 41)).to(torch.device(device))
    real_BT = batch.target_segment_BT > 0
    expected, exact = model(batch)[real_BT], compute_grads(model, batch)
    with torch.autocast(device, torch.bfloat16):
        found = model(batch)[real_BT]
        rounded = compute_grads(model, batch)
    assert_same(found, expected, torch.bfloat16)
    for name, grad in rounded.items():
        assert grad.dtype == torch.float32
        assert float((grad - exact[name]).norm() / (exact[name].norm() + 1e-6)) < 0.1


def test_dropout_depends_on_the_seed_and_is_off_in_evaluation() -> None:
    model = build_transformer(dropout=0.3)
    batch = in_rows(ROWS, examples(10), Widths(44, 41))

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        out: Tensor = model(batch)
        return out

    assert torch.equal(run(1), run(1))
    assert_different(run(1), run(2))
    model.eval()
    assert torch.equal(run(1), run(2))
    without_dropout = build_transformer(dropout=0.0)
    without_dropout.load_state_dict(model.state_dict())
    assert torch.equal(run(1), without_dropout(batch))


def test_the_same_seed_makes_the_same_model() -> None:
    model, same_seed, other_seed = build_transformer(seed=1), build_transformer(seed=1), build_transformer(seed=2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same_seed.parameters(), strict=True))
    assert_different(model.project.weight, other_seed.project.weight)


def test_initial_weights_and_loss_are_reasonable() -> None:
    """Scaled embeddings have unit variance, biases are zero, and the loss is near that of a uniform guess."""
    torch.manual_seed(0)
    model = Transformer(
        TransformerSettings(layers=3, width=64, heads=4, dropout=0.0),
        source_size=VOCABULARY,
        target_size=VOCABULARY,
        joint=True,
    )
    assert (model.decoder.embedding.weight * 8).std().item() == pytest.approx(1, rel=0.1)
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    assert all((bias == 0).all() for bias in biases)
    batch = in_rows(ROWS, examples(10), Widths(44, 41))
    assert compute_loss(model, batch).item() / batch.target_tokens < 2 * math.log(VOCABULARY)


def test_build_model_makes_a_transformer() -> None:
    recipe = Recipe.model_validate({"model": {"width": 8, "heads": 2, "layers": 1}, "tokenizer": {"joint": False}})
    model = build_model(recipe.neural_model, source_size=10, target_size=12, joint=recipe.tokenizer.joint)
    assert isinstance(model, Transformer)
    assert model.settings == TransformerSettings(width=8, heads=2, layers=1)
    assert model.encoder.embedding.num_embeddings == 10
    assert check_model(recipe).model == TransformerSettings(width=8, heads=2, layers=1)
    assert count_parameters(model) == sum(p.numel() for p in model.parameters())

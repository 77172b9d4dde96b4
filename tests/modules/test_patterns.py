"""Attention patterns: attention in blocks equals attention with the mask of the pattern, and needs less memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dragoman.errors import UserError
from dragoman.kernels.attention import (
    KERNELS,
    AttentionMask,
    RowLayout,
    attend_auto,
    attend_reference,
    make_causal_mask,
    make_segment_mask,
)
from dragoman.models.transformer import TransformerSettings
from dragoman.modules.attention import SelfAttention, StepContext
from dragoman.modules.patterns import PATTERNS, AttentionSettings, BigBird, BlockedAttention, BlockMask
from dragoman.modules.positions import POSITIONS, PositionEmbedding
from tolerance import DEVICES, assert_different, assert_same

SMALL: dict[str, Any] = {
    "width": 8, "heads": 2, "position": "none", "reach": 3, "window": 3, "block": 2, "random_blocks": 2, "rank": 4,
    "max_length": 64,
}  # fmt: skip
BLOCKED = [name for name, pattern in PATTERNS.items() if issubclass(pattern, BlockedAttention)]
PATTERNS_AND_DIRECTIONS = [
    (name, bidirectional)
    for name, pattern in PATTERNS.items()
    for bidirectional in (True, False)
    if bidirectional or pattern.causal
]
CAUSAL = [name for name, pattern in PATTERNS.items() if pattern.causal]
IN_ATTENTION = [  # position encodings that act in attention, except for trees
    name for name, scheme in POSITIONS.items() if scheme.embedding is PositionEmbedding and not scheme.source_features
]
COMPATIBLE = [
    (pattern, position)
    for pattern, kind in PATTERNS.items()
    for position in IN_ATTENTION
    if POSITIONS[position].attention.needed_distance in kind.supported_distances
]


def make_attention(name: str, *, bidirectional: bool = True, **given: Any) -> SelfAttention:
    """Return self-attention with this pattern and random parameters."""
    settings = AttentionSettings(**{**SMALL, "attention" if bidirectional else "decoder_attention": name, **given})
    module = SelfAttention(settings, POSITIONS[settings.position].attention, bidirectional=bidirectional)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module.double()


def make_unpacked_rows(*lengths: int, spare: int = 0, device: str = "cpu") -> RowLayout:
    """Return the layout of sentences of these lengths, one per row, with `spare` positions of padding."""
    position_T = torch.arange(max(lengths) + spare, device=device)
    return RowLayout.from_padding_mask(position_T < torch.tensor(lengths, device=device)[:, None])


def make_packed_row(*lengths: int, spare: int = 0) -> RowLayout:
    """Return the layout of sentences of these lengths packed into one row, with `spare` positions of padding."""
    segment = [number for number, length in enumerate(lengths, 1) for _ in range(length)]
    position = [t for length in lengths for t in range(length)]
    return RowLayout(torch.tensor([segment + [0] * spare]), torch.tensor([position + [0] * spare]))


def make_inputs(rows: RowLayout) -> Tensor:
    B, T = rows.segment_BT.shape
    return torch.randn(B, T, 8, dtype=torch.float64, device=rows.segment_BT.device)


def run_attention(module: SelfAttention, x_BTC: Tensor, rows: RowLayout) -> Tensor:
    out: Tensor = module(x_BTC, rows.position_BT, module.make_mask(rows))
    return out


def run_reference(module: SelfAttention, x_BTC: Tensor, rows: RowLayout) -> Tensor:
    """Compute attention to all keys with the mask of the pattern (reference implementation)."""
    allowed_BTT = make_segment_mask(rows.segment_BT, rows.segment_BT)
    allowed = module.pattern.make_pattern_mask(rows.position_BT, rows.position_BT)
    allowed_BTT = allowed_BTT if allowed is None else allowed_BTT & allowed
    if not module.pattern.bidirectional:
        allowed_BTT = allowed_BTT & make_causal_mask(rows.position_BT, rows.position_BT)
    mask = AttentionMask(
        allowed_BTT[:, None], relative_position=module.relate.compute_relative(rows.position_BT, rows.position_BT)
    )
    parts = module.split_qkv(module.query_key_value(x_BTC), rows.position_BT)
    out: Tensor = module.project_output(module.relate.attend(attend_reference, *parts, mask))
    return out


def compute_gradients(out_BTC: Tensor, rows: RowLayout, leaves: list[Tensor]) -> list[Tensor]:
    """Return the gradients of a weighted sum of the outputs, except for padding."""
    real = out_BTC[rows.real_BT]
    weight = torch.linspace(-1, 1, real.numel(), dtype=real.dtype, device=real.device).view_as(real)
    return list(torch.autograd.grad((real * weight).sum(), leaves))


def check_against_reference(module: SelfAttention, rows: RowLayout) -> None:
    x_BTC = make_inputs(rows).requires_grad_()
    leaves = [x_BTC, *module.parameters()]
    found, expected = run_attention(module, x_BTC, rows), run_reference(module, x_BTC, rows)
    assert_same(found[rows.real_BT], expected[rows.real_BT])
    for actual, wanted in zip(
        compute_gradients(found, rows, leaves), compute_gradients(expected, rows, leaves), strict=True
    ):
        assert_same(actual, wanted)


@hypothesis_settings(max_examples=60)
@given(
    st.sampled_from(BLOCKED), st.booleans(), st.lists(st.integers(1, 70), min_size=1, max_size=3), st.integers(0, 9),
    st.integers(1, 9), st.integers(1, 5), st.integers(1, 2), st.integers(0, 2), st.integers(0, 3), st.integers(0, 99),
    st.sampled_from(IN_ATTENTION),
)  # fmt: skip
def test_blocks_match_the_reference(
    name: str, bidirectional: bool, lengths: list[int], spare: int, window: int, block: int, window_blocks: int,
    global_blocks: int, random_blocks: int, seed: int, position: str,
) -> None:  # fmt: skip
    sizes = {"window": window, "block": block, "window_blocks": window_blocks, "global_blocks": global_blocks}
    random_settings = {"random_blocks": random_blocks, "random_seed": seed}
    module = make_attention(name, bidirectional=bidirectional, position=position, **sizes, **random_settings)
    check_against_reference(module, make_unpacked_rows(*lengths, spare=spare))


@hypothesis_settings(max_examples=30)
@given(
    st.booleans(), st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(0, 9), st.integers(1, 9),
    st.sampled_from(IN_ATTENTION),
)  # fmt: skip
def test_windows_do_not_cross_sentences(
    bidirectional: bool, lengths: list[int], spare: int, window: int, position: str
) -> None:
    """Packed and unpacked sentences have the same outputs."""
    module, rows = (
        make_attention("local", bidirectional=bidirectional, window=window, position=position),
        make_packed_row(*lengths, spare=spare),
    )
    check_against_reference(module, rows)
    x_BTC = make_inputs(rows)
    parts = run_attention(module, x_BTC, rows)[0].split([*lengths, spare])
    for part_TC, x_TC in zip(parts[: len(lengths)], x_BTC[0].split([*lengths, spare])):
        assert_same(part_TC, run_attention(module, x_TC[None], make_unpacked_rows(len(x_TC)))[0])


@pytest.mark.parametrize("name", BLOCKED)
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("device", DEVICES)
def test_blocks_work_with_every_kernel(name: str, bidirectional: bool, kernel: str, device: str) -> None:
    module, rows = (
        make_attention(name, bidirectional=bidirectional, kernel=kernel).to(device),
        make_unpacked_rows(50, 31, 1, spare=3, device=device),
    )
    assert isinstance(module.make_mask(rows), BlockMask)
    check_against_reference(module, rows)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_local_attention_has_a_window_on_either_side(bidirectional: bool) -> None:
    positions = torch.arange(20)
    allowed = PATTERNS["local"](AttentionSettings(window=4), bidirectional=bidirectional).make_pattern_mask(
        positions, positions
    )
    assert allowed is not None
    assert all(bool(allowed[i, j]) == (-4 <= i - j <= 4) for i in range(20) for j in range(20))


def make_bigbird(*, bidirectional: bool = True, **given: Any) -> BigBird:
    return BigBird(AttentionSettings(**{"block": 2, "random_blocks": 3, **given}), bidirectional=bidirectional)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_bigbird_has_window_global_and_random_blocks(bidirectional: bool) -> None:
    """Zaheer 2020, section 2, pair by pair."""
    pattern, positions = make_bigbird(bidirectional=bidirectional, global_blocks=2), torch.arange(60)
    allowed, random = pattern.make_pattern_mask(positions, positions), pattern.sample_links(torch.arange(30))
    for i in range(60):
        for j in range(60):
            query, key = i // 2, j // 2
            links = {query - 1, query, query + 1, 0, 1, *random[query].tolist()}
            assert bool(allowed[i, j]) == (key in links or query < 2)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_random_blocks_are_distinct_and_outside_the_window(bidirectional: bool, count: int) -> None:
    blocks, window, first = 400, 2, 1
    sampled = make_bigbird(bidirectional=bidirectional, random_blocks=count, window_blocks=window).sample_links(
        torch.arange(blocks)
    )
    for block in range(first + window + 2 * count, blocks):
        links = sampled[block].tolist()
        assert len(links) == len(set(links)) == count
        assert all(link >= first and abs(link - block) > window for link in links)
        assert bidirectional or all(link < block for link in links)
    if bidirectional and count:
        outside = (sampled >= blocks).double().mean().item()
        assert 0.1 < outside < 0.2
        assert 0.3 < (sampled > torch.arange(blocks)[:, None]).double().mean().item() < 0.7


def test_random_blocks_depend_only_on_seed_and_index() -> None:
    first_blocks, all_blocks = torch.arange(9), torch.arange(90)
    assert torch.equal(make_bigbird().sample_links(first_blocks), make_bigbird().sample_links(all_blocks)[:9])
    assert not torch.equal(
        make_bigbird().sample_links(all_blocks), make_bigbird(random_seed=2).sample_links(all_blocks)
    )
    links = make_bigbird(bidirectional=False).sample_links(all_blocks)
    relative_links = links * 90 // all_blocks[:, None].clamp(min=1)
    assert len({tuple(row) for row in relative_links.tolist()}) > 60


@pytest.mark.parametrize("position", ["none", "rotary"])
@pytest.mark.parametrize("lengths", [[1], [7, 3], [30, 12, 1]], ids=str)
def test_linformer_matches_the_paper(lengths: list[int], position: str) -> None:
    """Wang 2020, equation 7, sum by sum: k' = E' k and v' = F' v, over the tokens of the sentence, without padding."""
    module, rows = make_attention("linformer", position=position), make_unpacked_rows(*lengths, spare=4)
    x_BTC = make_inputs(rows)
    q, k, v = module.split_qkv(module.query_key_value(x_BTC), rows.position_BT)
    found = run_attention(module, x_BTC, rows)
    pattern: Any = module.pattern
    key_TR, value_TR = pattern.key_TR, pattern.value_TR
    for b, length in enumerate(lengths):
        for i in range(length):
            heads = []
            for h in range(2):
                keys = [sum(key_TR[t, r] * k[b, h, t] for t in range(length)) for r in range(4)]
                values = [sum(value_TR[t, r] * v[b, h, t] for t in range(length)) for r in range(4)]
                weight = torch.stack([(q[b, h, i] * key).sum() / 2 for key in keys]).softmax(-1)
                heads.append(sum(w * value for w, value in zip(weight, values)))
            assert_same(found[b, i], module.out(torch.cat(heads)))


def test_linformer_is_limited_to_max_length() -> None:
    module = make_attention("linformer", max_length=10)
    rows = make_unpacked_rows(10, 4, spare=6)
    assert run_attention(module, make_inputs(rows), rows).isfinite().all()
    with pytest.raises(UserError, match=r"11 tokens .* model.max_length is 10"):
        module.make_mask(make_unpacked_rows(11, 4, spare=6))


@pytest.mark.parametrize(("name", "position"), COMPATIBLE)
def test_other_sentences_and_padding_have_no_influence(name: str, position: str) -> None:
    """A sentence has the same output alone and in a batch with longer sentences and padding."""
    module, rows = make_attention(name, position=position), make_unpacked_rows(41, 5, 17, 1, spare=13)
    x_BTC = make_inputs(rows)
    found = run_attention(module, x_BTC, rows)
    for b, length in enumerate((41, 5, 17, 1)):
        assert_same(found[b, :length], run_attention(module, x_BTC[b : b + 1, :length], make_unpacked_rows(length))[0])


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("position", IN_ATTENTION)
def test_decoding_steps_equal_one_causal_forward_pass(name: str, position: str) -> None:
    module, rows = make_attention(name, bidirectional=False, position=position), make_unpacked_rows(45, 45)
    x_BTC = make_inputs(rows)
    full = run_attention(module, x_BTC, rows)
    unwritten = torch.full((2, 2, 50, 4), 7.0, dtype=torch.float64)  # arbitrary values at unused positions
    cache = (unwritten, unwritten.clone())
    for t in range(45):
        positions = torch.full((2, 1), t)
        context = StepContext(positions, module.make_step_mask(positions, cache[0].size(2), torch.float64))
        assert_same(module.step(x_BTC[:, t : t + 1], cache, context), full[:, t : t + 1])
        other_BTC = x_BTC.clone()
        other_BTC[:, t] += 1
        after = run_attention(module, other_BTC, rows)
        assert_same(after[:, :t], full[:, :t])
        assert_different(after[:, t], full[:, t])


@pytest.mark.parametrize("name", PATTERNS)
def test_a_token_influences_those_that_attend_to_it(name: str) -> None:
    """A change in the last token affects exactly the tokens that attend to it, according to the mask."""
    module, rows = make_attention(name, max_length=100), make_unpacked_rows(90)
    x_BTC, positions = make_inputs(rows), torch.arange(90)
    before = run_attention(module, x_BTC, rows)
    x_BTC[:, -1] += 1
    change_T = (run_attention(module, x_BTC, rows) - before).abs().amax((0, 2))
    allowed = module.pattern.make_pattern_mask(positions, positions)
    attends_T = torch.ones(90, dtype=torch.bool) if allowed is None else allowed[:, -1]
    assert (change_T[attends_T] > 1e-6).all()
    assert (change_T[~attends_T] < 1e-12).all()
    assert attends_T.sum() > 1


@pytest.mark.parametrize(("name", "position"), COMPATIBLE)
@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_is_close_to_float64(name: str, position: str, device: str) -> None:
    module, rows = make_attention(name, position=position).to(device), make_unpacked_rows(50, 31, device=device)
    q, k, v = (torch.randn(2, 2, 50, 4, device=device).bfloat16() for _ in range(3))
    mask = module.make_mask(rows)
    found = module.pattern(q, k, v, mask, partial(module.relate.attend, attend_auto))
    exact = partial(module.relate.attend, attend_reference)
    expected = module.pattern(q.double(), k.double(), v.double(), mask, exact)
    assert found.dtype == torch.bfloat16
    assert_same(found[1, :, :31], expected[1, :, :31])


def measure_largest_allocation(step: Any) -> int:
    """Return the size in bytes of the largest memory allocation while `step` runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as record:
        step()
    events = record.profiler.kineto_results.events()
    return max(event.nbytes() for event in events if event.name() == "[memory]")


@pytest.mark.parametrize(("name", "bidirectional"), PATTERNS_AND_DIRECTIONS)
@pytest.mark.parametrize("position", IN_ATTENTION)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_tensor_has_all_pairs(name: str, bidirectional: bool, position: str, dtype: torch.dtype) -> None:
    """Neither scores nor masks of all pairs are allocated, except by full attention with relative positions."""
    T = 2048
    sizes = {"heads": 1, "window": 16, "block": 8, "rank": 16, "max_length": T}
    module = make_attention(name, bidirectional=bidirectional, position=position, **sizes).to(dtype)
    x_BTC, rows = torch.randn(1, T, 8, dtype=dtype), make_unpacked_rows(T)
    needed = POSITIONS[position].attention.needed_distance
    if needed in module.pattern.supported_distances:
        allocated = measure_largest_allocation(lambda: run_attention(module, x_BTC, rows).sum().backward())
        is_full = module.pattern.count_keys(np.array([T]))[0] == T
        assert (allocated >= T * T) == (is_full and needed == "tokens")


@pytest.mark.parametrize(("query", "value"), [(8, 12), (8, 4)])
def test_no_tensor_has_all_pairs_with_different_widths(query: int, value: int) -> None:
    module = make_attention("full", heads=1, query_width=query, value_width=value).float()
    x_BTC, rows = torch.randn(1, 2048, 8), make_unpacked_rows(2048)
    assert measure_largest_allocation(lambda: run_attention(module, x_BTC, rows).sum().backward()) < 2048**2


@pytest.mark.parametrize(("name", "bidirectional"), PATTERNS_AND_DIRECTIONS)
def test_number_of_pairs_grows_linearly_except_in_full_attention(name: str, bidirectional: bool) -> None:
    """`count_keys`, which FLOP counts use, agrees with the number of pairs that the kernel gets."""
    module = make_attention(name, bidirectional=bidirectional, max_length=2048)
    pairs, keys = dict[int, int](), dict[int, int]()
    for length in (512, 1024, 2048):
        pairs[length] = 0

        def attend_and_count(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, length: int = length) -> Tensor:
            pairs[length] += q[..., 0].numel() * k.size(-2)
            return attend_reference(q, k, v, mask)

        module.kernel = attend_and_count
        rows = make_unpacked_rows(length)
        run_attention(module, make_inputs(rows), rows)
        keys[length] = module.pattern.count_keys(np.array([length]))[0]
        assert module.pattern.key_cost * pairs[length] / (module.heads * length) == pytest.approx(
            keys[length], rel=0.03
        )
    assert keys[2048] in (keys[512], 2048)
    assert pairs[2048] / pairs[512] == pytest.approx(4 * keys[2048] / keys[512], rel=0.03)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"decoder_attention": "linformer"}, f"linformer attends to later tokens.*{', '.join(CAUSAL)}"),
        ({"attention": "linformer", "position": "alibi"}, r"linformer does not support .*position=alibi"),
        ({"attention": "local", "position": "tree"}, r"attention=local does not support .*position=tree"),
        ({"attention": "bigbrid"}, "did you mean 'bigbird'"),
    ],
)  # fmt: skip
def test_impossible_settings_are_rejected(given: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TransformerSettings.model_validate(given).check()


@pytest.mark.parametrize("name", PATTERNS)
def test_rows_are_packed_if_the_patterns_support_it(name: str) -> None:
    assert TransformerSettings(attention=name).layout == ("packed" if PATTERNS[name].packable else "padded")
    if name in CAUSAL:
        assert TransformerSettings(decoder_attention=name).layout == TransformerSettings(attention=name).layout

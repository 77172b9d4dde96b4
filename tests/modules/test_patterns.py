"""Patterns: the blocks that are met give what the rule says, number by number, and never make all pairs."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as trying
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
from tolerance import DEVICES, differ, same

SMALL: dict[str, Any] = {
    "width": 8, "heads": 2, "position": "none", "reach": 3, "window": 3, "block": 2, "random_blocks": 2, "rank": 4,
    "max_length": 64,
}  # fmt: skip
BLOCKED = [name for name, pattern in PATTERNS.items() if issubclass(pattern, BlockedAttention)]
SIDES = [
    (name, bidirectional)
    for name, pattern in PATTERNS.items()
    for bidirectional in (True, False)
    if bidirectional or pattern.causal
]
CAUSAL = [name for name, pattern in PATTERNS.items() if pattern.causal]
IN_ATTENTION = [  # positions that act in attention, trees apart
    name for name, scheme in POSITIONS.items() if scheme.embed is PositionEmbedding and not scheme.features
]
FITTING = [
    (pattern, position)
    for pattern, kind in PATTERNS.items()
    for position in IN_ATTENTION
    if POSITIONS[position].relate.needs in kind.provides
]


def attention(name: str, *, bidirectional: bool = True, **given: Any) -> SelfAttention:
    """With weights that are not at rest."""
    settings = AttentionSettings(**{**SMALL, "attention" if bidirectional else "decoder_attention": name, **given})
    module = SelfAttention(settings, POSITIONS[settings.position].relate, bidirectional=bidirectional)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module.double()


def alone(*lengths: int, spare: int = 0, device: str = "cpu") -> RowLayout:
    """Sentences of these lengths, each in a row of its own."""
    place_T = torch.arange(max(lengths) + spare, device=device)
    return RowLayout.from_padding_mask(place_T < torch.tensor(lengths, device=device)[:, None])


def packed(*lengths: int, spare: int = 0) -> RowLayout:
    """Sentences of these lengths side by side in one row."""
    segment = [number for number, length in enumerate(lengths, 1) for _ in range(length)]
    position = [place for length in lengths for place in range(length)]
    return RowLayout(torch.tensor([segment + [0] * spare]), torch.tensor([position + [0] * spare]))


def inputs(rows: RowLayout) -> Tensor:
    B, T = rows.segment_BT.shape
    return torch.randn(B, T, 8, dtype=torch.float64, device=rows.segment_BT.device)


def answer(module: SelfAttention, x_BTC: Tensor, rows: RowLayout) -> Tensor:
    out: Tensor = module(x_BTC, rows.position_BT, module.make_mask(rows))
    return out


def by_the_rule(module: SelfAttention, x_BTC: Tensor, rows: RowLayout) -> Tensor:
    """The same from all pairs, under the mask that the rule makes."""
    keep_BTT = make_segment_mask(rows.segment_BT, rows.segment_BT)
    visible = module.pattern.make_pattern_mask(rows.position_BT, rows.position_BT)
    keep_BTT = keep_BTT if visible is None else keep_BTT & visible
    if not module.pattern.bidirectional:
        keep_BTT = keep_BTT & make_causal_mask(rows.position_BT, rows.position_BT)
    mask = AttentionMask(
        keep_BTT[:, None], relative_position=module.relate.compute_relative(rows.position_BT, rows.position_BT)
    )
    parts = module.split_qkv(module.query_key_value(x_BTC), rows.position_BT)
    out: Tensor = module.project_output(module.relate.attend(attend_reference, *parts, mask))
    return out


def slopes(out_BTC: Tensor, rows: RowLayout, leaves: list[Tensor]) -> list[Tensor]:
    """Gradients of a weighted sum of what the sentences say; what padding says is nobody's business."""
    real = out_BTC[rows.real_BT]
    weight = torch.linspace(-1, 1, real.numel(), dtype=real.dtype, device=real.device).view_as(real)
    return list(torch.autograd.grad((real * weight).sum(), leaves))


def equal_to_the_rule(module: SelfAttention, rows: RowLayout) -> None:
    x_BTC = inputs(rows).requires_grad_()
    leaves = [x_BTC, *module.parameters()]
    found, expected = answer(module, x_BTC, rows), by_the_rule(module, x_BTC, rows)
    same(found[rows.real_BT], expected[rows.real_BT])
    for one, other in zip(slopes(found, rows, leaves), slopes(expected, rows, leaves), strict=True):
        same(one, other)


@trying(max_examples=60)
@given(
    st.sampled_from(BLOCKED), st.booleans(), st.lists(st.integers(1, 70), min_size=1, max_size=3), st.integers(0, 9),
    st.integers(1, 9), st.integers(1, 5), st.integers(1, 2), st.integers(0, 2), st.integers(0, 3), st.integers(0, 99),
    st.sampled_from(IN_ATTENTION),
)  # fmt: skip
def test_blocks_give_what_the_rule_says(
    name: str, bidirectional: bool, lengths: list[int], spare: int, window: int, block: int, window_blocks: int,
    global_blocks: int, random_blocks: int, seed: int, position: str,
) -> None:  # fmt: skip
    sizes = {"window": window, "block": block, "window_blocks": window_blocks, "global_blocks": global_blocks}
    chances = {"random_blocks": random_blocks, "random_seed": seed}
    module = attention(name, bidirectional=bidirectional, position=position, **sizes, **chances)
    equal_to_the_rule(module, alone(*lengths, spare=spare))


@trying(max_examples=30)
@given(
    st.booleans(), st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(0, 9), st.integers(1, 9),
    st.sampled_from(IN_ATTENTION),
)  # fmt: skip
def test_windows_end_where_sentences_do(
    bidirectional: bool, lengths: list[int], spare: int, window: int, position: str
) -> None:
    """Packed equals alone, for the rule and for the blocks."""
    module, rows = (
        attention("local", bidirectional=bidirectional, window=window, position=position),
        packed(*lengths, spare=spare),
    )
    equal_to_the_rule(module, rows)
    x_BTC = inputs(rows)
    parts = answer(module, x_BTC, rows)[0].split([*lengths, spare])
    for part_TC, x_TC in zip(parts[: len(lengths)], x_BTC[0].split([*lengths, spare])):
        same(part_TC, answer(module, x_TC[None], alone(len(x_TC)))[0])


@pytest.mark.parametrize("name", BLOCKED)
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("device", DEVICES)
def test_blocks_do_with_every_kernel(name: str, bidirectional: bool, kernel: str, device: str) -> None:
    module, rows = (
        attention(name, bidirectional=bidirectional, kernel=kernel).to(device),
        alone(50, 31, 1, spare=3, device=device),
    )
    assert isinstance(module.make_mask(rows), BlockMask)
    equal_to_the_rule(module, rows)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_a_window_is_so_many_tokens_on_either_side(bidirectional: bool) -> None:
    place = torch.arange(20)
    visible = PATTERNS["local"](AttentionSettings(window=4), bidirectional=bidirectional).make_pattern_mask(
        place, place
    )
    assert visible is not None
    assert all(bool(visible[i, j]) == (-4 <= i - j <= 4) for i in range(20) for j in range(20))


def bigbird(*, bidirectional: bool = True, **given: Any) -> BigBird:
    return BigBird(AttentionSettings(**{"block": 2, "random_blocks": 3, **given}), bidirectional=bidirectional)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_bigbird_is_windows_first_blocks_and_random_ones(bidirectional: bool) -> None:
    """Zaheer 2020, section 2, pair by pair."""
    pattern, place = bigbird(bidirectional=bidirectional, global_blocks=2), torch.arange(60)
    visible, random = pattern.make_pattern_mask(place, place), pattern.sample_links(torch.arange(30))
    for i in range(60):
        for j in range(60):
            query, key = i // 2, j // 2
            links = {query - 1, query, query + 1, 0, 1, *random[query].tolist()}
            assert bool(visible[i, j]) == (key in links or query < 2)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_random_blocks_are_so_many_further_ones(bidirectional: bool, count: int) -> None:
    blocks, window, first = 400, 2, 1
    drawn = bigbird(bidirectional=bidirectional, random_blocks=count, window_blocks=window).sample_links(
        torch.arange(blocks)
    )
    for block in range(first + window + 2 * count, blocks):
        links = drawn[block].tolist()
        assert len(links) == len(set(links)) == count
        assert all(link >= first and abs(link - block) > window for link in links)
        assert bidirectional or all(link < block for link in links)
    if bidirectional and count:
        lost = (drawn >= blocks).double().mean().item()
        assert 0.1 < lost < 0.2
        assert 0.3 < (drawn > torch.arange(blocks)[:, None]).double().mean().item() < 0.7


def test_random_blocks_are_fixed_by_the_seed_and_their_number_alone() -> None:
    few, many = torch.arange(9), torch.arange(90)
    assert torch.equal(bigbird().sample_links(few), bigbird().sample_links(many)[:9])
    assert not torch.equal(bigbird().sample_links(many), bigbird(random_seed=2).sample_links(many))
    assert (
        len(
            {
                tuple(row)
                for row in (bigbird(bidirectional=False).sample_links(many) * 90 // many[:, None].clamp(min=1)).tolist()
            }
        )
        > 60
    )


@pytest.mark.parametrize("position", ["none", "rotary"])
@pytest.mark.parametrize("lengths", [[1], [7, 3], [30, 12, 1]], ids=str)
def test_linformer_squeezes_the_tokens_of_a_sentence(lengths: list[int], position: str) -> None:
    """Wang 2020, equation 7, sum by sum: k' = E' k and v' = F' v, over the tokens that are there."""
    module, rows = attention("linformer", position=position), alone(*lengths, spare=4)
    x_BTC = inputs(rows)
    q, k, v = module.split_qkv(module.query_key_value(x_BTC), rows.position_BT)
    found = answer(module, x_BTC, rows)
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
            same(found[b, i], module.out(torch.cat(heads)))


def test_linformer_knows_no_place_beyond_its_last() -> None:
    module = attention("linformer", max_length=10)
    rows = alone(10, 4, spare=6)
    assert answer(module, inputs(rows), rows).isfinite().all()
    with pytest.raises(UserError, match=r"11 tokens .* model.max_length is 10"):
        module.make_mask(alone(11, 4, spare=6))


@pytest.mark.parametrize(("name", "position"), FITTING)
def test_neighbours_and_padding_change_nothing(name: str, position: str) -> None:
    """In a batch of long ones, with room left over, a sentence is what it is alone."""
    module, rows = attention(name, position=position), alone(41, 5, 17, 1, spare=13)
    x_BTC = inputs(rows)
    found = answer(module, x_BTC, rows)
    for b, length in enumerate((41, 5, 17, 1)):
        same(found[b, :length], answer(module, x_BTC[b : b + 1, :length], alone(length))[0])


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("position", IN_ATTENTION)
def test_step_by_step_is_all_at_once_and_never_ahead(name: str, position: str) -> None:
    module, rows = attention(name, bidirectional=False, position=position), alone(45, 45)
    x_BTC = inputs(rows)
    whole = answer(module, x_BTC, rows)
    unwritten = torch.full((2, 2, 50, 4), 7.0, dtype=torch.float64)  # any number
    cache = (unwritten, unwritten.clone())
    for at in range(45):
        place = torch.full((2, 1), at)
        now = StepContext(place, module.make_step_mask(place, cache[0].size(2), torch.float64))
        same(module.step(x_BTC[:, at : at + 1], cache, now), whole[:, at : at + 1])
        other_BTC = x_BTC.clone()
        other_BTC[:, at] += 1
        after = answer(module, other_BTC, rows)
        same(after[:, :at], whole[:, :at])
        differ(after[:, at], whole[:, at])


@pytest.mark.parametrize("name", PATTERNS)
def test_a_token_is_heard_by_those_who_may_look_at_it(name: str) -> None:
    """By the rule of the pattern, a change in the last token reaches some of the others and no more."""
    module, rows = attention(name, max_length=100), alone(90)
    x_BTC, place = inputs(rows), torch.arange(90)
    before = answer(module, x_BTC, rows)
    x_BTC[:, -1] += 1
    moved_T = (answer(module, x_BTC, rows) - before).abs().amax((0, 2))
    visible = module.pattern.make_pattern_mask(place, place)
    hears_T = torch.ones(90, dtype=torch.bool) if visible is None else visible[:, -1]
    assert (moved_T[hears_T] > 1e-6).all()
    assert (moved_T[~hears_T] < 1e-12).all()
    assert hears_T.sum() > 1


@pytest.mark.parametrize(("name", "position"), FITTING)
@pytest.mark.parametrize("device", DEVICES)
def test_bf16_is_close(name: str, position: str, device: str) -> None:
    module, rows = attention(name, position=position).to(device), alone(50, 31, device=device)
    q, k, v = (torch.randn(2, 2, 50, 4, device=device).bfloat16() for _ in range(3))
    mask = module.make_mask(rows)
    found = module.pattern(q, k, v, mask, partial(module.relate.attend, attend_auto))
    exact = partial(module.relate.attend, attend_reference)
    expected = module.pattern(q.double(), k.double(), v.double(), mask, exact)
    assert found.dtype == torch.bfloat16
    same(found[1, :, :31], expected[1, :, :31])


def largest(step: Any) -> int:
    """Bytes of the largest piece of memory that is asked for on the way."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as record:
        step()
    events = record.profiler.kineto_results.events()
    return max(event.nbytes() for event in events if event.name() == "[memory]")


@pytest.mark.parametrize(("name", "bidirectional"), SIDES)
@pytest.mark.parametrize("position", IN_ATTENTION)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_ever_holds_all_pairs(name: str, bidirectional: bool, position: str, dtype: torch.dtype) -> None:
    """Not even as a mask, forward or backward; full attention does so for positions that ask for distances."""
    T = 2048
    sizes = {"heads": 1, "window": 16, "block": 8, "rank": 16, "max_length": T}
    module = attention(name, bidirectional=bidirectional, position=position, **sizes).to(dtype)
    x_BTC, rows = torch.randn(1, T, 8, dtype=dtype), alone(T)
    needs = POSITIONS[position].relate.needs
    if needs in module.pattern.provides:
        many = largest(lambda: answer(module, x_BTC, rows).sum().backward())
        everyone_meets = module.pattern.count_keys(np.array([T]))[0] == T
        assert (many >= T * T) == (everyone_meets and needs == "distance")


@pytest.mark.parametrize(("query", "value"), [(8, 12), (8, 4)])
def test_widths_apart_do_not_change_that(query: int, value: int) -> None:
    module = attention("full", heads=1, query_width=query, value_width=value).float()
    x_BTC, rows = torch.randn(1, 2048, 8), alone(2048)
    assert largest(lambda: answer(module, x_BTC, rows).sum().backward()) < 2048**2


@pytest.mark.parametrize(("name", "bidirectional"), SIDES)
def test_pairs_grow_in_a_line_unless_everyone_meets(name: str, bidirectional: bool) -> None:
    """And they are those that FLOPs are counted by, whatever a pattern says that a key costs."""
    module = attention(name, bidirectional=bidirectional, max_length=2048)
    met, keys = dict[int, int](), dict[int, int]()
    for length in (512, 1024, 2048):
        met[length] = 0

        def counting(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, length: int = length) -> Tensor:
            met[length] += q[..., 0].numel() * k.size(-2)
            return attend_reference(q, k, v, mask)

        module.kernel = counting
        rows = alone(length)
        answer(module, inputs(rows), rows)
        keys[length] = module.pattern.count_keys(np.array([length]))[0]
        assert module.pattern.key_cost * met[length] / (module.heads * length) == pytest.approx(keys[length], rel=0.03)
    assert keys[2048] in (keys[512], 2048)
    assert met[2048] / met[512] == pytest.approx(4 * keys[2048] / keys[512], rel=0.03)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"decoder_attention": "linformer"}, f"decoder_attention=linformer would look ahead.*{', '.join(CAUSAL)}"),
        ({"attention": "linformer", "position": "alibi"}, r"linformer does not provide the distance.*position=alibi"),
        ({"attention": "local", "position": "tree"}, r"attention=local does not provide the tree.*position=tree"),
        ({"attention": "bigbrid"}, "did you mean 'bigbird'"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(given: dict[str, str], why: str) -> None:
    with pytest.raises(UserError, match=why):
        TransformerSettings.model_validate(given).check()


@pytest.mark.parametrize("name", PATTERNS)
def test_rows_are_shared_where_that_can_be(name: str) -> None:
    assert TransformerSettings(attention=name).layout == ("packed" if PATTERNS[name].packable else "padded")
    if name in CAUSAL:
        assert TransformerSettings(decoder_attention=name).layout == TransformerSettings(attention=name).layout

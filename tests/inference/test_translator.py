"""The front door: one answer to every line, the same alone and in company, and nothing cut in silence."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dragoman.decoding.continuous_batching import round_to_bucket
from dragoman.decoding.methods import SearchSettings
from dragoman.decoding.protocol import IndexedResults, SearchJob
from dragoman.errors import UserError
from dragoman.inference.engines.base import Engine
from dragoman.inference.loading import load
from dragoman.inference.postprocess import drop_duplicates, get_warning_kind, join_hypotheses
from dragoman.inference.postprocess import split_sentences as sentences_of
from dragoman.inference.predictor import MIN_SEGMENT_LIMIT, bucket_widths
from dragoman.inference.translator import Translator
from dragoman.types import EOS, PAD, Example, Hypothesis, Line
from toy_requests import beam_search, take_likeliest
from toy_run import Call, Toy, make_sentences, run_process, translate_toy, write_lines

ODD = [
    "", " ", "\t", "ba del.", "ba\u0085del.", "ba\u2028del.", "ba\fdel.", "ba\rdel.", "ba del.\r", "\ufeffba del.",
    "ba\0del.", "🎉 ba 👩‍👩‍👧 del!", "\u2028", "ß", "日本語。", "▁ba", "ba" * 300, "</s>", "<pad> ba", "e\u0301",
]  # fmt: skip


# The same in any company.


@pytest.mark.parametrize("beam", [1, 4])
def test_the_same_at_every_batch_size_and_in_every_order(translator: Translator, beam: int) -> None:
    """Text, scores and alignments, to the bit."""

    def answers(lines: list[str], size: int) -> list[Hypothesis]:
        starts = range(0, len(lines), size)
        return [one for start in starts for one in translator.translate(lines[start : start + size], beam=beam)]

    lines = make_sentences(80, seed=11, longest=6)
    expected = dict(zip(lines, answers(lines, 64), strict=True))
    assert len({one.text for one in expected.values()}) > 64
    shuffled = Random(5).sample(lines, len(lines))
    for size, count in ((1, 12), (7, 42), (64, 80)):  # every call decodes full batches, so small sizes are slow
        assert answers(shuffled[:count], size) == [expected[line] for line in shuffled[:count]], size


def test_the_same_through_the_command_line(toy: Toy, tmp_path: Path, call: Call) -> None:
    lines = make_sentences(100, seed=11)
    file = write_lines(tmp_path / "lines", lines)
    whole = call("translate", toy.run, "--input", file)
    assert whole.out.splitlines() == [one.text for one in toy.translator.translate(lines)]
    shuffled = Random(5).sample(lines, len(lines))
    write_lines(tmp_path / "shuffled", shuffled)
    small = call("translate", toy.run, "--input", tmp_path / "shuffled", "--batch", 7)
    answers = dict(zip(lines, whole.out.splitlines(), strict=True))
    assert small.out.splitlines() == [answers[line] for line in shuffled]


def test_greedy_is_a_beam_of_one(translator: Translator) -> None:
    lines = make_sentences(8, seed=3)
    source_BS = torch.full((8, 16), PAD)
    for row, line in enumerate(lines):
        ids = translator.tokenizers.source.encode(line)
        source_BS[row, : len(ids) + 1] = torch.tensor([*ids, EOS])
    one_by_one = take_likeliest(translator.model, source_BS, source_BS != PAD, 24)
    beam = beam_search(translator.model, source_BS, source_BS != PAD, torch.full((8,), 24), width=1)
    assert one_by_one == [found[0].tokens for found in beam]
    texts = [translator.tokenizers.target.decode(tokens) for tokens in one_by_one]
    assert [one.text for one in translator.translate(lines, beam=1)] == texts


def test_dropout_is_off_while_it_translates(toy: Toy, translator: Translator) -> None:
    other = toy.translator
    other.model.train()
    assert other.translate(["ba del fo."]) == translator.translate(["ba del fo."])
    assert other.model.training


# As many out as in.


def test_odd_lines_have_an_answer_each(translator: Translator) -> None:
    found = translator.translate(ODD)
    assert len(found) == len(ODD)
    for line, one in zip(ODD, found, strict=True):
        if not line.strip():
            assert one == Hypothesis("", 0.0, [], [], [], 0.0)
        else:
            assert "".join(one.source_tokens)
    assert translator.translate([]) == []
    assert found[3].text == translate_toy("ba del.")


def test_odd_lines_through_the_command_line(toy: Toy, tmp_path: Path, call: Call) -> None:
    """Only line feeds end a line, from a file as from a pipe, with and without one at the very end."""
    file = tmp_path / "odd"
    raw = "\n".join(ODD).encode()
    texts = [one.text.replace("\r", " ").replace("\n", " ") for one in toy.translator.translate(ODD)]
    for ending in (b"\n", b""):
        file.write_bytes(raw + ending)
        for answer in (call("translate", toy.run, "--input", file), call("translate", toy.run, stdin=raw + ending)):
            assert answer.code == 0
            lines = answer.out.split("\n")
            assert lines.pop() == ""
            assert len(lines) == len(ODD)
            assert [a for a, line in zip(lines, ODD, strict=True) if not line.strip()] == [""] * 4
            assert lines[:8] == texts[:8]


def test_windows_line_ends_and_a_byte_order_mark(toy: Toy, tmp_path: Path, call: Call) -> None:
    raw = b"\xef\xbb\xbfba del.\r\n\r\nfo!\r\n"
    (tmp_path / "file").write_bytes(raw)
    expected = [one.text for one in toy.translator.translate(["ba del.", "", "fo!"])]
    assert call("translate", toy.run, "--input", tmp_path / "file").out.split("\n") == [*expected, ""]
    assert call("translate", toy.run, stdin=raw).out.split("\n") == [*expected, ""]


def test_a_string_is_no_list_of_lines(translator: Translator) -> None:
    with pytest.raises(UserError, match="list of lines"):
        translator.translate("ba del.")


# Nothing is cut in silence.


def test_a_long_line_is_translated_sentence_by_sentence(translator: Translator) -> None:
    parts = make_sentences(40, seed=4)
    [whole] = translator.translate([" ".join(parts)])
    assert [piece.text for piece in translator.split_line(Line(" ".join(parts)))] == parts
    alone = translator.translate(parts)
    assert whole.text == " ".join(one.text for one in alone)
    assert whole.logp == pytest.approx(sum(one.logp for one in alone))
    assert whole.tokens == [token for one in alone for token in one.tokens]
    assert get_warning_kind(whole.warnings[0]) == "longer than any sentence of training"
    assert "40 parts" in whole.warnings[0]
    assert [mark for mark in whole.text if mark in ".!?"] == [part[-1] for part in parts]


@pytest.mark.parametrize(
    "line",
    [
        'He said "ba del fo." Then "gri mun ne!" And more: pol ra (ba del.) End',
        "«ba del fo gri.» mun ne pol ra ba del fo gri mun… ne pol ra",
        "你好世界。「你好吗？」我很好！谢谢你们大家",
        "   ba del fo gri mun   ne pol. ra   ba del fo gri   ",
        "ba.del.fo.gri.mun.ne.pol.ra.ba.del.fo",
        "... !!! ??? " * 5,
    ],
)
def test_nothing_is_lost_where_a_line_is_cut(translator: Translator, line: str) -> None:
    pieces = [piece.text for piece in translator.split_line(Line(line))]
    assert "".join("".join(pieces).split()) == "".join(line.split())


@given(text=st.text(st.sampled_from("ab .!?…\"'”»)。！」\u2028\n🎉"), max_size=200))
def test_nothing_is_lost_wherever(translator: Translator, text: str) -> None:
    pieces = [piece.text for piece in translator.split_line(Line(text))]
    assert "".join("".join(pieces).split()) == "".join(text.split())
    assert all(piece.strip() for piece in pieces)


@pytest.mark.parametrize(
    "parts",
    [
        ["A man walks.", "His dog runs!", "Does it?", "Yes…", "So"],
        ['He said: "Come here."', '"Why?"', "(Nobody knew.)", "She left"],
        ["„Komm!“, sagte er.", "»Nein!«", "Sie ging."],
        ["Dr. Smith met Mr. B. Jones in the U.S. Army base.", "They talked."],
        ["Am 3. Oktober z. B. regnet es.", "Danach nicht."],
        ["He paid 3.50 for e.g. tea.", "It was good."],
        ["你好世界。", "「你好吗？」", "我很好！", "谢谢"],
        ["What?!", "No..."],
        ["ba del.", "fo gri?", "mun"],
    ],
)
def test_where_sentences_end(parts: list[str]) -> None:
    space = "" if "你" in parts[0] else " "
    assert sentences_of(space.join(parts)) == parts


def test_a_sentence_longer_than_training_stays_whole(translator: Translator) -> None:
    line = " ".join(["ba"] * (translator.longest_source + 3)) + "."
    [one] = translator.translate([line])
    assert len(one.source_tokens) == len(translator.tokenizers.source.encode(line)) > translator.longest_source
    assert "longer than any sentence of training" in one.warnings[0]
    assert str(translator.longest_source) in one.warnings[0]


@pytest.mark.parametrize("line", ["ba " * 1500, "ba" * 1500])
def test_an_endless_sentence_is_cut_but_not_short(translator: Translator, line: str) -> None:
    """No memory holds the attention of a book over itself."""
    pieces = list(translator.split_line(Line(line)))
    assert "".join("".join(piece.text for piece in pieces).split()) == "".join(line.split())
    assert max(len(piece.ids) for piece in pieces) <= MIN_SEGMENT_LIMIT
    assert len(pieces) > 100


def test_an_answer_at_its_limit_says_so(toy: Toy) -> None:
    held = toy.translator
    recipe = held.recipe.model_copy(
        update={"search": held.recipe.search.model_copy(update={"max_extra": 0, "max_ratio": 0.3})}
    )
    short = Translator(held.model, held.tokenizers, recipe, held.longest_source, held.device)
    [one] = short.translate(["ba del fo gri."])
    assert len(one.tokens) <= 3
    assert [*map(get_warning_kind, one.warnings)] == ["cut"]
    [one] = held.translate(["ba del fo gri."], search={"max_tokens": 3})
    assert (len(one.tokens), one.warnings) == (3, ("cut at 3 tokens, the most that search.max_tokens allows",))
    [one] = held.translate(["ba del fo gri."])
    assert one.warnings == ()


def test_warnings_are_said_and_counted(toy: Toy, call: Call) -> None:
    long = " ".join(make_sentences(40, seed=4))
    answer = call("translate", toy.run, stdin=f"ba.\n{long}\n{long}\n".encode())
    assert answer.out.count("\n") == 3
    assert "line 2: longer than any sentence of training: translated in" in answer.err
    assert "2 lines longer than any sentence of training" in answer.err.splitlines()[-1]


# What an answer carries.


def test_alignments_are_shares_of_the_source(translator: Translator) -> None:
    lines = [*make_sentences(20, seed=9), " ".join(make_sentences(40, seed=4))]
    for line, one in zip(lines, translator.translate(lines), strict=True):
        assert "".join(one.source_tokens).replace("▁", " ").split() == line.split()
        assert len(one.alignment) == len(one.tokens)
        for row in one.alignment:
            assert len(row) == len(one.source_tokens)
            assert min(row) >= 0
            assert sum(row) == pytest.approx(1, abs=1e-5)


def test_a_split_line_aligns_along_the_diagonal(translator: Translator) -> None:
    one, other = translator.translate(["ba del.", "fo gri mun!"])
    both = join_hypotheses([one, other])
    width = len(one.source_tokens)
    for row in both.alignment[: len(one.tokens)]:
        assert sum(row[:width]) == pytest.approx(1, abs=1e-5)
    for row in both.alignment[len(one.tokens) :]:
        assert sum(row[width:]) == pytest.approx(1, abs=1e-5)


def test_an_alignment_is_missed_only_where_there_was_one() -> None:
    tokens = ["a"] * 4000
    for alignment, said in (([], False), ([[1.0]], True)):
        part = Hypothesis("a", 0.0, tokens, alignment, tokens, 0.0)
        both = join_hypotheses([part, part])
        assert both.alignment == []
        assert ("too long for an alignment" in both.warnings) is said


def test_scores_are_what_the_model_says(translator: Translator) -> None:
    """logp is the sum over the tokens and the end mark; score is its mean, at a length penalty of 1."""
    for one in translator.translate(make_sentences(10, seed=2)):
        assert one.score == pytest.approx(one.logp / (len(one.tokens) + 1), rel=1e-5)
        assert -math.inf < one.logp <= 0


def test_nbest_is_sorted_and_without_repeats(translator: Translator) -> None:
    lines = make_sentences(30, seed=8, longest=7)
    best = translator.translate(lines)
    for line, one, answers in zip(lines, best, translator.nbest(lines, count=4), strict=True):
        assert answers[0] == one, line
        assert len({answer.text for answer in answers}) == len(answers) > 1
        ranks = [(bool(answer.warnings), -answer.score) for answer in answers]  # a cut one comes last
        assert ranks == sorted(ranks)
    assert all(len(answers) <= 2 for answers in translator.nbest(lines, count=2))
    many = translator.nbest(lines, count=32, beam=32)  # so many that some differ in their pieces alone
    assert all(len({answer.text for answer in answers}) == len(answers) for answers in many)
    assert any(len(answers) < 32 for answers in many)


def test_one_text_is_one_answer(translator: Translator) -> None:
    """Two ways to spell a text in pieces are not two answers."""
    one, other = translator.translate(["ba.", "fo."])
    assert drop_duplicates([one, other, one]) == [one, other]


@pytest.mark.parametrize(
    ("settings", "asked"),
    [({}, 1), ({"nbest": 2}, 6), ({"coverage": 0.1}, 6), ({"nbest": 2, "method": "sample"}, 2)],
)
def test_more_is_found_where_some_may_fall_away(translator: Translator, settings: dict[str, Any], asked: int) -> None:
    """One text spelt in two ways is one answer; coverage may put another first."""
    seen: list[int] = []

    class Recorder(Engine):
        def iter_results(self, jobs: Sequence[SearchJob], search: SearchSettings) -> IndexedResults:
            seen.append(search.nbest)
            return translator.engine.iter_results(jobs, search)

    replace(translator, engine=Recorder()).nbest(["ba."], beam=6, search=settings)
    assert seen == [asked]


@pytest.mark.parametrize(("count", "beam"), [(5, None), (3, 2), (2, 1), (0, 4), (1, 0), (1, -1)])
def test_more_answers_than_beams_are_refused(translator: Translator, count: int, beam: int | None) -> None:
    with pytest.raises(UserError, match=r"answers cannot come from a beam|should be greater than or equal to 1"):
        translator.nbest(["ba."], count=count, beam=beam)


# The folder.


def test_a_copied_folder_works_elsewhere(toy: Toy, tmp_path: Path) -> None:
    """With nothing but the files of the contract, in another place and another process."""
    names = ("config.yaml", "model.safetensors", "tokenizer", "metrics.jsonl", "FORMAT")
    copy = tmp_path / "with a space" / "run"
    copy.mkdir(parents=True)
    for name in names:
        source = toy.run / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, copy / name)
    answer = run_process("translate", copy, stdin=b"ba del fo!\n")
    assert answer.code == 0, answer.err
    assert answer.out == toy.translator.translate(["ba del fo!"])[0].text + "\n"


def test_devices_that_are_not_there(toy: Toy) -> None:
    for name in ("gpu", "mps", "cuda:99"):
        with pytest.raises(UserError, match=name):
            load(toy.run, device=name)


def test_rungs_depend_on_the_length_alone() -> None:
    assert [round_to_bucket(length) for length in (1, 16, 17, 32, 33, 1000)] == [16, 16, 32, 32, 64, 1024]


def test_batches_have_every_example_once_and_one_shape_per_width(translator: Translator) -> None:
    random, seen, cells = Random(1), list[int](), 5 * 64**2
    lengths = [random.randrange(60) for _ in range(40)]
    examples = [Example(np.full(length, 5), np.full(1, 5), i) for i, length in enumerate(lengths)]
    for indices, batch in translator.iter_batches(examples, bucket_widths, max_cells=cells):
        rows, width = batch.source_BS.shape
        assert rows == min(translator.batch_rows, cells // width**2) >= len(indices)
        assert {round_to_bucket(lengths[i] + 1) for i in indices} == {width}
        used = (batch.source_BS != PAD).sum(1).tolist()
        assert used == [lengths[i] + 1 for i in indices] + [0] * (rows - len(indices))
        seen += indices
    assert sorted(seen) == list(range(len(examples)))

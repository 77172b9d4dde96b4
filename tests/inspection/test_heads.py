"""Scores of attention heads: planted heads, uniform attention, gold by hand, removal of heads, and refused input."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from dragoman.data.trees import format_conllu
from dragoman.evaluation.figures import LINE_COLOURS
from dragoman.inference.loading import load_as
from dragoman.inference.translator import Translator
from dragoman.inspection.head_ablation import ablate_heads, list_attention_modules, measure_quality, remove_head
from dragoman.inspection.head_report import map_functions, render_heads_page, render_heads_table
from dragoman.inspection.heads import (
    HEAD_SCORES,
    AnalysedPair,
    HeadCounts,
    HeadReport,
    ScoredHeads,
    analyse_phrase,
    merge_all_parts,
    merge_token_weights,
    score_heads,
)
from dragoman.modules.attention import SelfAttention
from dragoman.phrasebook.generate import DIRECTIONS, generate_phrases, split_words
from dragoman.types import Tree
from toy_models import SMALL_RNN
from toy_run import Call, Toy, assert_user_error, pairs, train_quietly, write_corpus, write_lines, write_recipe

OFFSETS = {"previous": -1, "same": 0, "next": 1}  # the scores of HEAD_SCORES at a fixed offset


def analyse_toy(count: int, seed: int = 7) -> list[AnalysedPair]:
    """Return pairs of the toy language: word i is linked with the i-th word from the end, and the marks are linked."""
    found = []
    for pair in pairs(count, seed):
        source, target = tuple(split_words(pair.source)), tuple(split_words(pair.target))
        last = len(source) - 1
        links = (*((i, last - 1 - i) for i in range(last)), (last, last))
        found.append(AnalysedPair(pair.source, pair.target, source, target, links=links))
    return found


def get_table(report: HeadReport, name: str, part: str) -> ScoredHeads:
    return next(table for table in report.scores if (table.name, table.part) == (name, part))


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Translator:
    """Return a model with one token per word and relative positions, whose weights a test sets by hand."""
    folder = tmp_path_factory.mktemp("planted")
    write_corpus(folder)
    model = {"width": 16, "heads": 2, "position": "relative", "reach": 3}
    recipe = write_recipe(folder / "recipe.yaml", model=model, tokenizer={"kind": "word", "size": 100})
    return load_as(Translator, train_quietly(recipe, folder / "run", "train.steps=2", "train.warmup=1"), device="cpu")


def plant_offset(translator: Translator, offset: int | None) -> None:
    """Let all heads of self-attention attend to the key at a relative position; None: to all keys equally."""
    with torch.no_grad():
        for attention in (module for module in translator.model.modules() if isinstance(module, SelfAttention)):
            attention.query_key_value.weight.zero_()
            attention.query_key_value.bias.zero_()[: attention.query_width] = 1.0  # every query is the same
            attention.relate.key_RD.zero_()
            if offset is not None:
                attention.relate.key_RD[attention.settings.reach + offset] = 100.0


@pytest.mark.parametrize(("name", "offset"), OFFSETS.items())
def test_a_planted_head_has_its_function_and_no_other(planted: Translator, name: str, offset: int) -> None:
    plant_offset(planted, offset)
    report = score_heads(planted, analyse_toy(60))
    for table in (table for table in report.scores if table.name in OFFSETS):
        if table.name == name:
            assert table.percent_LH.min() > 99
            assert table.weight_LH.min() > 0.99
            functions = map_functions(report, table.part)
            assert {cell["table"].name for row in functions for cell in row if cell["table"]} == {name}
        elif offset < 1 or table.part == "encoder":  # a decoder cannot attend to the next word
            # The first word has no previous word, and the last none after it: the softmax falls back to others there.
            assert table.percent_LH.max() < 30
            assert table.weight_LH.max() < 0.3


def test_uniform_attention_has_the_weight_of_chance(planted: Translator) -> None:
    """Chance follows from the lengths alone: every word has one token, and EOS or BOS is one more key."""
    plant_offset(planted, None)
    corpus = analyse_toy(40)
    report = score_heads(planted, corpus)
    lengths = [len(pair.source_words) for pair in corpus]
    previous = [1 / (n + 1) for n in lengths for _ in range(1, n)]
    causal = [1 / (query + 2) for n in lengths for query in range(1, n)]  # BOS, the words before, the word itself
    for part, expected in (("encoder", previous), ("decoder", causal)):
        table = get_table(report, "previous", part)
        assert table.queries == len(expected)
        assert table.chance == pytest.approx(100 * np.mean(expected), rel=1e-5)
        assert table.weight_LH == pytest.approx(np.mean(expected), rel=1e-4)
    for table in (table for table in report.scores if table.part != "cross"):
        assert table.weight_LH == pytest.approx(table.chance / 100, rel=1e-4), table.name


def test_tokens_are_merged_into_words() -> None:
    """Weights are summed over the tokens of a key and averaged over those of a query; EOS is a key, not a query."""
    words = np.array([0, 0, 1, 2])  # the first word has two tokens; index 2 is EOS
    weight_QK = np.array([[0.1, 0.2, 0.3, 0.4], [0.5, 0.1, 0.2, 0.2], [0, 0.25, 0.25, 0.5], [1, 0, 0, 0]], np.float32)
    merged_JI = merge_token_weights(weight_QK, words, words, (2, 4))
    assert merged_JI == pytest.approx(np.array([[0.45, 0.25, 0.3, 0], [0.25, 0.25, 0.5, 0]]))


def test_a_key_without_tokens_or_out_of_sight_is_not_counted() -> None:
    """In a decoder, the head of a word counts only if it comes before the word; tags are keys that are never gold."""
    pair = AnalysedPair("a b c", "x y z", ("a", "b", "c"), ("x", "y", "z"), (2, 0, 2), (2, 0, 2))
    source, target = np.array([4, 0, 1, 2]), np.array([0, 1, 1])  # a tag; z has no token
    shapes = {"encoder": (5, 5), "decoder": (4, 4), "cross": (4, 5)}
    weights = {part: np.full((1, 1, *shape), 1 / shape[1], np.float32) for part, shape in shapes.items()}
    merged = merge_all_parts(weights, pair, source, target)
    assert merged["encoder", False][1] == pytest.approx(np.full((3, 5), 0.2))  # three words, EOS, the tag
    counts = {part: HeadCounts(HEAD_SCORES["syntax"], part) for part in ("encoder", "decoder")}
    for part, count in counts.items():
        count.add(pair, *merged[part, False])
    assert counts["encoder"].queries == 2  # b is the root
    assert counts["decoder"].queries == 0  # the head of x comes after it, y is the root, z has no token
    late = AnalysedPair("a", "x y z", ("a",), ("x", "y", "z"), target_heads=(0, 1, 1), target_coref=((2, 0),))
    views = merge_all_parts({"decoder": weights["decoder"]}, late, np.array([0]), np.array([0, 1, 2]))
    for name, chance in (("antecedent", 1 / 4), ("predicted", 1 / 3)):  # one key more once the pronoun is read
        count = HeadCounts(HEAD_SCORES[name], "decoder")
        count.add(late, *views[HEAD_SCORES[name].choose_view("decoder")])
        assert (count.queries, dict(count.offsets)) == (1, {-2: 1})
        assert count.chance == pytest.approx(chance)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_gold_of_the_phrasebook(direction: str) -> None:
    """Every gold key is a key of the part, relations are those of the phrase, and all scores have gold."""
    phrases = list(generate_phrases("test", 60, direction=direction))
    for name, score in HEAD_SCORES.items():
        for part in score.parts:
            found = 0
            for phrase in phrases:
                gold = score.find_gold(pair := analyse_phrase(phrase), part)
                keys = pair.target_words if part == "decoder" else pair.source_words
                assert all(0 <= query < len(pair.words_read_by(part)) for query in gold)
                assert all(0 <= key <= len(keys) for some in gold.values() for key in some), name
                found += sum(map(len, gold.values()))
            assert found
    phrase = next(phrase for phrase in phrases if phrase.target_coref)
    [(pronoun, antecedent), *_] = phrase.target_coref
    linked = {source for source, target in phrase.alignment if target == antecedent}
    assert HEAD_SCORES["antecedent"].find_gold(analyse_phrase(phrase), "cross")[pronoun] == linked


def test_the_baseline_is_the_best_fixed_offset() -> None:
    """Heads that are usually the next word make +1 the baseline, which no attention is needed for."""
    pair = AnalysedPair("a b c d", "x", ("a", "b", "c", "d"), ("x",), source_heads=(2, 3, 0, 2))
    uniform_JI = np.full((4, 6), 1 / 5, np.float32)
    uniform_JI[:, 5] = 0
    weight_LHJI = np.zeros((1, 2, 4, 6), np.float32)
    weight_LHJI[0, 0, [0, 1, 2, 3], [1, 2, 3, 4]] = 1  # the next word
    weight_LHJI[0, 1, [0, 1, 2, 3], [1, 2, 0, 1]] = 1  # the syntactic head
    counts = HeadCounts(HEAD_SCORES["syntax"], "encoder")
    counts.add(pair, weight_LHJI, uniform_JI)
    table = counts.compute_scores("syntax")
    assert (table.queries, table.baseline_kind) == (3, "offset +1")
    assert table.baselines == pytest.approx({"chance": 20, "offset +1": 200 / 3, "word 2": 200 / 3})
    assert table.chance == pytest.approx(20)
    assert table.baseline == pytest.approx(200 / 3)
    assert table.percent_LH[0] == pytest.approx([200 / 3, 100])
    assert table.compute_gains()[0] == pytest.approx([0, 1], abs=1e-6)
    assert table.rank_heads() == [(0, 1), (0, 0)]


def test_a_trained_model_aligns_words(translator: Translator) -> None:
    """The toy language is translated word by word, so some head attends to the linked word, far above chance."""
    report = score_heads(translator, analyse_toy(100))
    table = get_table(report, "alignment", "cross")
    assert table.percent_LH.max() > max(60, table.baseline + 15)
    assert {part for part, _ in report.sizes.items()} == {"encoder", "decoder", "cross"}
    assert any("syntactic head" in note for note in report.notes)  # the toy language has no trees


@contextmanager
def silence_head(attention: torch.nn.Module, head: int, width: int) -> Iterator[None]:
    """Set the output of a head to zero before the output projection, by a hook: the reference of `remove_head`."""

    def zero(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        silenced = inputs[0].clone()
        silenced[..., head * width : (head + 1) * width] = 0
        return (silenced,)

    hook = attention.out.register_forward_pre_hook(zero)
    yield
    hook.remove()


def test_removing_a_head_silences_its_output(translator: Translator) -> None:
    corpus = analyse_toy(8)
    texts = [pair.source for pair in corpus], [pair.target for pair in corpus]
    compute = partial(translator.score, *texts)
    before = [score.logp for score in compute()]
    for modules in list_attention_modules(translator.model).values():
        for attention, head in ((module, head) for module in modules for head in range(module.heads)):
            with silence_head(attention, head, attention.settings.head_value_width):
                expected = [score.logp for score in compute()]
            with remove_head(attention, head):
                assert [score.logp for score in compute()] == pytest.approx(expected, abs=1e-5)
            assert expected != pytest.approx(before, abs=1e-4)
    assert [score.logp for score in compute()] == before  # the weights are restored


def test_ablation_reports_changes(translator: Translator) -> None:
    """The changes are differences from the complete model, which decodes as before afterwards."""
    corpus = analyse_toy(12)
    loss, bleu = measure_quality(translator, corpus, "")
    modules = list_attention_modules(translator.model)
    sizes = {"cross": (len(modules["cross"]), modules["cross"][0].heads), "unknown": (1, 1)}
    ablation, notes = ablate_heads(translator, corpus, sizes)
    assert (ablation.loss, ablation.bleu) == (loss, bleu.value)
    assert measure_quality(translator, corpus, "") == (loss, bleu)
    with remove_head(modules["cross"][0], 1):
        changed = measure_quality(translator, corpus, "")
    assert ablation.loss_change_LH["cross"][0, 1] == pytest.approx(changed[0] - loss, abs=1e-6)
    assert ablation.bleu_change_LH["cross"][0, 1] == pytest.approx(changed[1].value - bleu.value, abs=1e-4)
    assert ablation.loss_change_LH["cross"].max() > 0.05
    assert "unknown" in notes[0]


def test_a_recurrent_model_has_one_head(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    recipe = write_recipe(tmp_path / "recipe.yaml")
    sections = yaml.safe_load(recipe.read_text())
    sections["model"] = {**SMALL_RNN, "attention": "additive"}  # without the settings of a Transformer
    recipe.write_text(yaml.safe_dump(sections))
    run = train_quietly(recipe, tmp_path / "run", "train.steps=2", "train.warmup=1")
    report = score_heads(load_as(Translator, run, device="cpu"), analyse_toy(5), ablate=True)
    assert report.sizes == {"cross": (1, 1)}
    assert any("output projection" in note for note in report.notes)


# ---- the command


@pytest.fixture
def files(toy: Toy, tmp_path: Path) -> list[object]:
    """Return the arguments of a command that scores the heads of the toy run on three pairs with trees."""
    some = analyse_toy(3)
    source = write_lines(tmp_path / "x.src", (pair.source for pair in some))
    target = write_lines(tmp_path / "x.trg", (pair.target for pair in some))
    trees = [Tree(pair.source_words, (0, *range(1, len(pair.source_words)))) for pair in some]
    text = "\n".join(format_conllu(pair.source, tree) for pair, tree in zip(some, trees, strict=True))
    (tmp_path / "x.conllu").write_text(text + "\n")
    return ["inspect", toy.run, "--heads", "--source", source, "--target", target, "--conllu", tmp_path / "x.conllu"]


def test_the_command_prints_and_writes(call: Call, files: list[object], tmp_path: Path) -> None:
    page = tmp_path / "heads.html"
    answer = call(*files, "--ablate", "--out", page)
    assert answer.code == 0, answer.err
    assert "syntactic head" in answer.out
    assert "BLEU change" in answer.out
    html = page.read_text("utf-8")
    assert "<script src" not in html
    assert "Map of heads" in html
    data = json.loads(call(*files, "--json").out)
    syntax = next(table for table in data["scores"] if table["name"] == "syntax")
    assert (syntax["baseline_kind"], syntax["baseline"]) == ("offset -1", 100)  # every word depends on the one before
    assert syntax["queries"] == sum(len(pair.source_words) - 1 for pair in analyse_toy(3))


def test_bad_input_gets_a_sentence(call: Call, toy: Toy, files: list[object], tmp_path: Path) -> None:
    conllu = tmp_path / "x.conllu"
    text = conllu.read_text()
    conllu.write_text("\n\n".join(text.split("\n\n")[:2]) + "\n")
    assert_user_error(call(*files), conllu, "2 sentences", "x.src")
    conllu.write_text(text.replace("\tba\t", "\tbo\t").replace("\tdel\t", "\tdul\t").replace("\tfo\t", "\tfu\t"))
    assert_user_error(call(*files), conllu, "differ", "x.src")
    assert_user_error(call("inspect", toy.run, "--heads"), "phrasebook", "--source")
    assert_user_error(call("inspect", toy.run, "--heads", "ba."), "--heads", "no sentence")
    assert_user_error(call("inspect", toy.run, "ba.", "--ablate"), "--heads")
    assert_user_error(call("inspect", toy.run, "--heads", "--conllu", conllu), "--source and --target")


def test_every_score_has_a_colour(translator: Translator) -> None:
    """The style sheet has as many colours as there are scores, and the table shows every score that has queries."""
    assert len(HEAD_SCORES) <= len(LINE_COLOURS)
    report = score_heads(translator, analyse_toy(5))
    page = render_heads_page(report)
    assert all(score.title in page for score in HEAD_SCORES.values())
    assert render_heads_table(report).row_count >= len(report.scores)

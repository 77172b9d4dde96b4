"""The tree of a search is that of the real search, and other searches are compared with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dragoman.decoding.beam import LENGTH_NORMS
from dragoman.decoding.methods import SEARCH_METHODS
from dragoman.inference.predictor import eval_mode
from dragoman.inference.source_segment import SourceSegment
from dragoman.inference.translator import Translator
from dragoman.inspection.records import SearchNode, SearchTrace
from dragoman.inspection.search_tree import compare_searches, trace_search
from dragoman.inspection.sentence import collate_sentence, inspect
from dragoman.types import EOS, SPECIALS, Line
from toy_run import make_sentences

LINES = ["ba del fo gri mun.", *make_sentences(2, seed=31), "gri gri gri gri"]
BEAM_METHODS = [name for name, method in SEARCH_METHODS.items() if method.is_beam_search]
SETTINGS: list[dict[str, Any]] = [
    {"beam": 5},
    {"beam": 3, "stop": "best", "length_norm": "gnmt"},
    {"beam": 2, "stop": "limit", "length_norm": "none"},
    {"beam": 4, "no_repeat": 2, "min_ratio": 1.0},
    {"beam": 4, "coverage": 0.3},
    {"beam": 3, "max_ratio": 0.5, "max_extra": 0},
    {"method": "greedy"},
]


def make_trace(
    translator: Translator, line: str, prefix: str = "", count: int = 1, **search: Any
) -> tuple[SourceSegment, SearchTrace]:
    options = translator.make_options(search=search, count=count)
    [segment] = translator.make_segments(Line(line, prefix=prefix), options)
    return segment, trace_search(translator, segment, options, "own")


def list_path(nodes: list[SearchNode], index: int) -> list[str]:
    tokens = []
    while nodes[index].parent >= 0:
        tokens.append(nodes[index].token)
        index = nodes[index].parent
    return tokens[::-1]


def compute_logp(translator: Translator, segment: SourceSegment, names: list[str]) -> float:
    """Return the log-probability of tokens by a forward pass."""
    target = translator.tokenizers.target
    ids_by_name = {target.ids_to_tokens([i])[0]: i for i in range(target.size)} | {SPECIALS[EOS]: EOS}
    ids = [ids_by_name[name] for name in names]
    batch = collate_sentence(segment.make_example(ids), "pairs")
    with eval_mode(translator.model), torch.no_grad():
        logp_TV = translator.model.project(translator.model(batch)[0])[:, : target.size].float().log_softmax(-1)
    return float(logp_TV[np.arange(len(ids)), ids].sum())


@pytest.mark.parametrize("search", SETTINGS, ids=str)
@pytest.mark.parametrize("line", LINES[1:])
def test_results_are_those_of_the_translator(translator: Translator, line: str, search: dict[str, Any]) -> None:
    for count in {1, search.get("beam", 1)}:
        _, trace = make_trace(translator, line, count=count, **search)
        [expected] = translator.nbest([line], count=count, search=search)
        found = [(result.text, result.logp, result.score) for result in trace.results]
        assert found[: len(expected)] == [(h.text, h.logp, h.score) for h in expected]
        assert count == 1 or len(found) == len(expected)


@pytest.mark.parametrize("search", SETTINGS, ids=str)
def test_nodes_are_those_of_the_search(translator: Translator, search: dict[str, Any]) -> None:
    segment, trace = make_trace(translator, LINES[0], **search)
    nodes, width = trace.nodes, search.get("beam", 1)
    norm_T = LENGTH_NORMS[search.get("length_norm", "length")](segment.max_tokens, 1.0)
    assert [nodes[0].parent, nodes[0].step] == [-1, 0]
    paths = [tuple(list_path(nodes, index)) for index in range(len(nodes))]
    assert len(set(paths)) == len(paths)
    for index, node in enumerate(nodes[1:], 1):
        parent = nodes[node.parent]
        assert node.parent < index
        assert parent.step == node.step - 1
        assert parent.state in ("kept", "best")
        assert parent.token != SPECIALS[EOS]
        assert node.score == pytest.approx(node.logp / float(norm_T[node.step]), rel=1e-5)
        if index % 5 == 1:
            assert node.logp == pytest.approx(compute_logp(translator, segment, list(paths[index])), abs=1e-4)
    assert width == 1 or any(node.state == "pruned" for node in nodes)
    for step in range(1, nodes[-1].step + 1):
        level = [node for node in nodes if node.step == step]
        extended = [node for node in level if node.state in ("kept", "best") and node.token != SPECIALS[EOS]]
        assert 1 <= len(level) <= 2 * width
        assert len(extended) <= width
        if not search.get("no_repeat") and width > 1:
            pruned = [node for node in level if node.state == "pruned" and node.token != SPECIALS[EOS]]
            assert min(node.logp for node in extended) >= max((node.logp for node in pruned), default=-1e9)


@pytest.mark.parametrize("search", SETTINGS, ids=str)
def test_the_best_path_spells_the_translation(translator: Translator, search: dict[str, Any]) -> None:
    _, trace = make_trace(translator, LINES[0], **search)
    [hypothesis] = translator.translate([LINES[0]], search=search)
    best = [node for node in trace.nodes if node.state == "best"]
    is_cut = any(warning.startswith("cut at") for warning in hypothesis.warnings)
    assert [node.token for node in best[1:]] == [*hypothesis.tokens, *([] if is_cut else [SPECIALS[EOS]])]
    assert is_cut == (search.get("max_ratio") == 0.5)


def test_a_forced_prefix_is_in_the_tree(translator: Translator) -> None:
    free = translator.translate([LINES[0]])[0]
    begin = translator.translate([LINES[1]])[0].text.split()[0]
    segment, trace = make_trace(translator, LINES[0], prefix=begin)
    forced = [node for node in trace.nodes if node.detail == "forced prefix"]
    assert [node.token for node in forced] == translator.tokenizers.target.ids_to_tokens(segment.constraints.prefix)
    assert {node.state for node in forced} == {"best"}
    assert trace.results[0].text.startswith(begin)
    assert trace.results[0].text != free.text
    inspection = inspect(translator, LINES[0], prefix=begin)
    assert inspection.target == trace.results[0].text
    assert inspection.searches[0] == replace(trace, title=inspection.searches[0].title)


@pytest.mark.parametrize("method", SEARCH_METHODS)
def test_other_searches_are_what_the_translator_finds(translator: Translator, method: str) -> None:
    search = {"method": method, "samples": 4, "max_expansions": 50}
    options = translator.make_options(search=search)
    [segment] = translator.make_segments(LINES[0], options)
    own, *others = compare_searches(translator, segment, options)
    assert own.results[0].text == translator.translate([LINES[0]], search=search)[0].text
    assert bool(own.nodes) == (method in BEAM_METHODS) == (not any("no tree" in note for note in own.notes))
    assert not any(trace.nodes for trace in others)
    for trace in others:
        name, _, suffix = trace.title.partition(" without")
        changes = {"method": name.split()[0], "length_norm": "none" if suffix else "length"}
        beam = {"beam": int(name.split()[1])} if " " in name else {"beam": options.search.beam}
        expected = translator.translate([LINES[0]], search={**search, **changes, **beam})[0]
        if name != "exhaustive":  # here with other limits
            assert (trace.results[0].text, trace.results[0].score) == (expected.text, expected.score)


def test_search_errors_are_named(translator: Translator) -> None:
    """On random input a greedy search is not the best; on the model's own language it is, and this can be proven."""
    notes = {}
    for line in ("gri gri mun mun mun del ba", LINES[0]):
        options = translator.make_options(search={"method": "greedy", "length_norm": "none"})
        [segment] = translator.make_segments(line, options)
        own, *_, exhaustive = compare_searches(translator, segment, options)
        notes[line] = exhaustive.notes
        gain = exhaustive.results[0].score - own.results[0].score
        assert exhaustive.notes[0].startswith(
            "search error of greedy" if gain > 1e-3 else ("no search error", "not proven")
        )
    assert notes[LINES[0]] == ["no search error: no translation has a higher score than that of greedy"]


def test_a_given_target_is_compared(translator: Translator) -> None:
    best = translator.translate([LINES[0]])[0].text
    [found] = [trace for trace in inspect(translator, LINES[0], target=best).searches if trace.title == "given target"]
    [expected] = translator.score([LINES[0]], [best])
    assert found.results[0].logp == pytest.approx(expected.logp, abs=1e-4)
    assert "found this translation" in found.notes[0]
    other = inspect(translator, LINES[0], target=best.split()[0]).searches[-1]
    assert other.notes[0].startswith("model error")

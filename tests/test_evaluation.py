"""Scores of a run, and of each phenomenon apart."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from dragoman.config import CorpusSettings
from dragoman.evaluation import against_references, on_own_tests, on_phrasebook, phenomena, read_texts, scored, table
from dragoman.score.metrics import evaluate
from dragoman.text import phrasebook
from dragoman.types import Hypothesis, Mistake
from toy_run import Toy, sentences, translated, write_lines

pytest_plugins = ["toy_fixtures"]


def test_scores_are_those_of_the_answers(toy: Toy) -> None:
    sources = sentences(30, seed=41)
    references = [[translated(line) for line in sources]]
    result = against_references(toy.translator, sources, references)
    texts = [one.text for one in toy.translator.translate(sources)]
    for score in evaluate(texts, references):
        assert result[score.name] == {"value": score.value, "signature": score.signature}
    assert result["lines"] == 30
    assert result["warnings"] == {}
    greedy = against_references(toy.translator, sources, references, beam=1)
    assert (
        greedy["bleu"]["value"]
        == evaluate([o.text for o in toy.translator.translate(sources, beam=1)], references)[0].value
    )


def test_a_run_is_scored_on_its_own_tests(toy: Toy, tmp_path: Path) -> None:
    """Each corpus of data.test by itself, with the metrics that the recipe names."""
    sources = sentences(12, seed=43)
    right = [translated(line) for line in sources]
    rows = [{"in": s, "out": t, "other": "x"} for s, t in zip(sources, right, strict=True)]
    jsonl = write_lines(tmp_path / "t.jsonl", map(json.dumps, rows))
    tsv = write_lines(tmp_path / "t.tsv", [f"{s}\t{t}" for s, t in zip(sources, right, strict=True)])
    tests = (
        CorpusSettings(tsv=str(tsv)),
        CorpusSettings(jsonl=str(jsonl), keys=("in", "other")),
        CorpusSettings(jsonl=str(jsonl), keys=("in", "other"), references=("other", "out")),
    )
    data = toy.translator.recipe.data.model_copy(update={"test": tests, "metrics": ("exact", "wer")})
    translator = replace(toy.translator, recipe=toy.translator.recipe.model_copy(update={"data": data}))
    plain, hopeless, both = on_own_tests(translator)
    texts = [one.text for one in translator.translate(sources)]
    assert (plain["test"], plain["lines"]) == (str(tsv), 12)
    assert plain["exact"]["value"] == evaluate(texts, [right], ["exact"])[0].value > 90
    assert set(plain) == {"test", "lines", "exact", "wer", "warnings"}
    assert hopeless["exact"]["value"] == 0
    assert both["exact"]["value"] == plain["exact"]["value"]
    assert both["exact"]["signature"].startswith("nrefs:2|")
    [asked, *_] = on_own_tests(translator, names=["chrf"])
    assert set(asked) == {"test", "lines", "chrf", "warnings"}
    header, *told = table([{"run": "one", **found} for found in (plain, hopeless)]).plain.split("\n")
    assert header.split()[:2] == ["test", "score"]
    assert [row.split()[0] for row in told] == [str(tsv)] * 2 + [str(jsonl)] * 2


def test_a_run_without_tests_of_its_own(toy: Toy) -> None:
    with pytest.raises(Mistake, match=r"no data\.test; .* --source F and --reference F"):
        list(on_own_tests(toy.translator))


def test_warnings_are_counted_by_kind() -> None:
    def answer(*warnings: str) -> Hypothesis:
        return Hypothesis("a b c d", 0.0, [], [], [], 0.0, warnings)

    cut = "cut at {} tokens, the most that search.max_ratio and max_extra allow"
    found = [answer(), answer(cut.format(5)), answer(cut.format(7), "longer than any sentence of training (9 tokens)")]
    counts = scored(found, [["a b c d"] * 3])["warnings"]
    assert counts == {"cut": 2, "longer than any sentence of training": 1}


@pytest.mark.parametrize("direction", ["en-de", "de-en"])
def test_the_right_answers_have_everything_right(direction: str) -> None:
    phrases = list(phrasebook.phrases("test", 60, direction=direction))
    right = phenomena(phrases, [phrase.target for phrase in phrases])
    assert set(right) == {phenomenon.name for phrase in phrases for phenomenon in phrase.phenomena}
    assert all(counts["percent"] == 100 for counts in right.values())
    totals = Counter(phenomenon.name for phrase in phrases for phenomenon in phrase.phenomena)
    assert {name: counts["total"] for name, counts in right.items()} == totals
    wrong = phenomena(phrases, [""] * 60)
    assert all(counts["right"] == 0 for counts in wrong.values())
    assert {name: counts["total"] for name, counts in wrong.items()} == totals


def test_each_phenomenon_is_counted_apart() -> None:
    """What is wrong in one sentence counts against that sentence's phenomena alone."""
    phrases = list(phrasebook.phrases("test", 60))
    spoilt = next(phrase for phrase in phrases if phrase.phenomena)
    texts = ["" if phrase is spoilt else phrase.target for phrase in phrases]
    lost = Counter(phenomenon.name for phenomenon in spoilt.phenomena)
    for name, counts in phenomena(phrases, texts).items():
        assert counts["total"] - counts["right"] == lost[name]


def test_the_phrasebook_in_the_direction_of_the_run(toy: Toy) -> None:
    result = on_phrasebook(toy.translator, "dev", 10, beam=1)
    assert result["lines"] == 10
    assert set(result["phenomena"]) == set(phenomena(list(phrasebook.phrases("dev", 10)), [""] * 10))


def test_files_must_belong_together(tmp_path: Path) -> None:
    three = write_lines(tmp_path / "three", "abc")
    two = write_lines(tmp_path / "two", "ab")
    none = write_lines(tmp_path / "none", [])
    assert read_texts(three, [three, three]) == (["a", "b", "c"], [["a", "b", "c"]] * 2)
    with pytest.raises(Mistake, match=r"three has 3 lines but .*two has 2"):
        read_texts(three, [three, two])
    with pytest.raises(Mistake, match="none is empty"):
        read_texts(none, [none])


def test_a_table_has_a_row_for_each_score(toy: Toy) -> None:
    sources = sentences(5, seed=41)
    one = {"run": "one", **against_references(toy.translator, sources, [sources])}
    header, *rows = table([one]).plain.split("\n")
    assert header.split("  ")[0] == "score"
    assert [row.split()[0] for row in rows] == ["BLEU", "chrF", "TER"]
    assert rows[0].endswith(one["bleu"]["signature"])  # whole, on one line
    several = table([one, {**one, "run": "two"}]).plain.split("\n")
    assert [row.split()[0] for row in several] == ["run", *["one"] * 3, *["two"] * 3]
    shown = {"right": 1, "total": 4, "percent": 25.0}
    both = table([one | {"phenomena": {"pronoun": shown, "order": shown}}]).plain.split("\n")
    assert both[-1].endswith("25.0 %  1 of 4 right")
    assert len(both) == 6

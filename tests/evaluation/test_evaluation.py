"""Tests of `evaluate`: scores, comparisons of systems, and breakdowns by phenomenon, length and word frequency."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sacrebleu.metrics.bleu import BLEU

from dragoman.data.corpus import CorpusSettings
from dragoman.errors import UserError
from dragoman.evaluation.report import format_breakdowns, format_scores
from dragoman.evaluation.systems import (
    FREQUENCY_BUCKETS,
    EvaluationOptions,
    EvaluationSet,
    Scorer,
    SystemOutput,
    WordCounts,
    count_warnings,
    count_words,
    make_equal_buckets,
    predict_lines,
    predict_tests,
    read_parallel_files,
    score_by_frequency,
    score_by_length,
    score_phenomena,
)
from dragoman.metrics.metrics import METRICS, compute_metrics
from dragoman.phrasebook.generate import generate_phrases
from dragoman.run_dir import RunFolder
from dragoman.types import Hypothesis
from toy_run import Call, Toy, assert_user_error, make_sentences, translate_toy, write_lines

SOURCES = make_sentences(60, seed=41, longest=9)
RIGHT = [translate_toy(line) for line in SOURCES]


def corrupt(fraction: float, seed: int = 1) -> list[str]:
    """Return the references with this fraction of the words replaced."""
    random = Random(seed)
    return [" ".join("ak" if random.random() < fraction else word for word in line.split()) for line in RIGHT]


def make_output(texts: list[str], *names: str) -> SystemOutput:
    return SystemOutput(EvaluationSet(SOURCES, [RIGHT]), texts, names, {"warnings": {}})


def test_result_has_the_scores_of_the_translations(toy: Toy) -> None:
    sources = make_sentences(30, seed=41)
    references = [[translate_toy(line) for line in sources]]
    result = predict_lines(toy.translator, EvaluationSet(sources, references)).result()
    texts = [one.text for one in toy.translator.translate(sources)]
    for score in compute_metrics(texts, references):
        assert result[score.name] == {"value": score.value, "signature": score.signature}
    assert result["lines"] == 30
    assert result["warnings"] == {}
    greedy = predict_lines(toy.translator, EvaluationSet(sources, references), EvaluationOptions(beam=1)).texts
    assert greedy == [one.text for one in toy.translator.translate(sources, beam=1)]


def test_run_is_evaluated_on_its_test_corpora(toy: Toy, tmp_path: Path) -> None:
    """Each corpus of data.test has its own result, with the metrics of data.metrics."""
    sources = make_sentences(12, seed=43)
    right = [translate_toy(line) for line in sources]
    rows = [{"in": s, "out": t, "other": "x", "all": ["x", t]} for s, t in zip(sources, right, strict=True)]
    jsonl = write_lines(tmp_path / "t.jsonl", map(json.dumps, rows))
    tsv = write_lines(tmp_path / "t.tsv", [f"{s}\t{t}" for s, t in zip(sources, right, strict=True)])
    tests = (
        CorpusSettings(tsv=str(tsv)),
        CorpusSettings(jsonl=str(jsonl), keys=("in", "other")),
        CorpusSettings(jsonl=str(jsonl), keys=("in", "other"), references=("other", "out")),
        CorpusSettings(jsonl=str(jsonl), keys=("in", "all")),
    )
    data = toy.translator.recipe.data.model_copy(update={"test": tests, "metrics": ("exact", "wer")})
    translator = replace(toy.translator, recipe=toy.translator.recipe.model_copy(update={"data": data}))
    plain, hopeless, both, listed = (found.result() for found in predict_tests(translator))
    texts = [one.text for one in translator.translate(sources)]
    assert (plain["test"], plain["lines"]) == (str(tsv), 12)
    assert plain["exact"]["value"] == compute_metrics(texts, [right], ["exact"])[0].value > 90
    assert set(plain) == {"test", "lines", "exact", "wer", "warnings"}
    assert hopeless["exact"]["value"] == 0
    assert both["exact"]["value"] == plain["exact"]["value"]
    assert both["exact"]["signature"].startswith("nrefs:2|")
    assert {**listed, "test": ""} == {**both, "test": ""}
    [asked, *_] = (found.result() for found in predict_tests(translator, EvaluationOptions(metrics=["chrf"])))
    assert set(asked) == {"test", "lines", "chrf", "warnings"}
    one, other = format_scores([{"run": "one", **found} for found in (plain, hopeless)]).plain.split("\n\n")
    assert one.splitlines()[0] == "test set t.tsv: 12 lines"
    assert one.splitlines()[1].split()[:2] == ["score", "value"]
    assert [row.split("  ")[0] for row in one.splitlines()[2:]] == ["exact match", "word errors"]
    assert other.startswith("test set t.jsonl: 12 lines\n")


def test_run_without_test_corpora_is_refused(toy: Toy) -> None:
    with pytest.raises(UserError, match=r"no data\.test; .* --source F and --reference F"):
        list(predict_tests(toy.translator))


def test_warnings_are_counted_by_kind() -> None:
    def answer(*warnings: str) -> Hypothesis:
        return Hypothesis("a b c d", 0.0, [], [], [], 0.0, warnings)

    cut = "cut at {} tokens, the most that search.max_ratio and max_extra allow"
    found = [answer(), answer(cut.format(5)), answer(cut.format(7), "longer than any sentence of training (9 tokens)")]
    assert count_warnings(found) == {"cut": 2, "longer than any sentence of training": 1}


@pytest.mark.parametrize("direction", ["en-de", "de-en"])
def test_references_have_all_phenomena_right(direction: str) -> None:
    phrases = list(generate_phrases("test", 60, direction=direction))
    right = score_phenomena(phrases, [phrase.target for phrase in phrases])
    assert set(right) == {phenomenon.name for phrase in phrases for phenomenon in phrase.phenomena}
    assert all(counts["percent"] == 100 for counts in right.values())
    totals = Counter(phenomenon.name for phrase in phrases for phenomenon in phrase.phenomena)
    assert {name: counts["total"] for name, counts in right.items()} == totals
    wrong = score_phenomena(phrases, [""] * 60)
    assert all(counts["right"] == 0 for counts in wrong.values())
    assert {name: counts["total"] for name, counts in wrong.items()} == totals


def test_phenomena_are_counted_by_sentence() -> None:
    """A wrong translation only counts against the phenomena of its sentence."""
    phrases = list(generate_phrases("test", 60))
    spoiled = next(phrase for phrase in phrases if phrase.phenomena)
    texts = ["" if phrase is spoiled else phrase.target for phrase in phrases]
    lost = Counter(phenomenon.name for phenomenon in spoiled.phenomena)
    for name, counts in score_phenomena(phrases, texts).items():
        assert counts["total"] - counts["right"] == lost[name]


def test_phrasebook_has_the_direction_of_the_run(toy: Toy) -> None:
    options = EvaluationOptions(phrasebook="dev", count=10, beam=1)
    [result] = (found.result() for found in predict_tests(toy.translator, options))
    assert result["lines"] == 10
    assert set(result["phenomena"]) == set(score_phenomena(list(generate_phrases("dev", 10)), [""] * 10))


def test_phrasebook_is_refused_in_other_languages(toy: Toy) -> None:
    data = toy.translator.recipe.data.model_copy(update={"source_language": "de", "target_language": "en"})
    german = replace(toy.translator, recipe=toy.translator.recipe.model_copy(update={"data": data}))
    with pytest.raises(UserError, match=r"sentences from en to de, but the model in .* has de instead of en"):
        next(predict_tests(german, EvaluationOptions(phrasebook="dev", count=10, beam=1)))


def test_parallel_files_have_equally_many_lines(tmp_path: Path) -> None:
    three = write_lines(tmp_path / "three", "abc")
    two = write_lines(tmp_path / "two", "ab")
    none = write_lines(tmp_path / "none", [])
    assert read_parallel_files([three, three]) == [["a", "b", "c"]] * 2
    with pytest.raises(UserError, match=r"three has 3 lines but .*two has 2"):
        read_parallel_files([three, three, two])
    with pytest.raises(UserError, match="none is empty"):
        read_parallel_files([none, none])


def test_table_has_a_row_for_each_score(toy: Toy) -> None:
    sources = make_sentences(5, seed=41)
    one = {"run": "one", **predict_lines(toy.translator, EvaluationSet(sources, [sources])).result()}
    title, header, *rows = format_scores([one]).plain.split("\n")
    assert title == "test set: 5 lines"
    assert header.split("  ")[0] == "score"
    assert [row.split()[0] for row in rows] == ["BLEU", "chrF", "TER"]
    assert rows[0].endswith(one["bleu"]["signature"])  # not wrapped


# Several systems


def test_every_system_is_compared_with_the_first() -> None:
    scorer = Scorer()
    first, same, worse = (scorer.score(name, make_output(texts)) for name, texts in (
        ("good", corrupt(0.1)), ("again", corrupt(0.1)), ("bad", corrupt(0.5, 2)),
    ))  # fmt: skip
    for score in ("bleu", "chrf", "ter"):
        low, high = first[score]["interval"]
        assert low < first[score]["value"] < high
        assert "against" not in first[score]
        assert same[score]["against"] == {
            "run": "good", "difference": 0, "p_bootstrap": 1, "p_randomisation": 1, "significant": False,
        }  # fmt: skip
        against = worse[score]["against"]
        assert against["difference"] == worse[score]["value"] - first[score]["value"]
        assert max(against["p_bootstrap"], against["p_randomisation"]) < 0.05
        assert against["significant"] is True
    assert worse["bleu"]["against"]["difference"] < 0 < worse["ter"]["against"]["difference"]
    json.dumps(worse, allow_nan=False)
    printed = format_scores([first, same, worse]).plain
    title, *rows = printed.split("\n\n")[0].splitlines()
    assert title == "test set: 60 lines"
    assert [row.split()[0] for row in rows[1:]] == ["good"] * 3 + ["again"] * 3 + ["bad"] * 3
    assert [" * " in row for row in rows[1:]] == [False] * 6 + [True] * 3
    assert "1,000 bootstrap resamples" in printed
    assert "10,000 trials" in printed
    assert "from good" in printed


def test_systems_are_compared_only_on_the_same_test_set() -> None:
    """Test sets are equal if their sources and references are. Each test set has its own first system."""
    scorer = Scorer()
    scorer.score("one", make_output(corrupt(0.1)))
    turned = SystemOutput(EvaluationSet(SOURCES[::-1], [RIGHT[::-1]]), corrupt(0.1), (), {"warnings": {}})
    assert "against" not in scorer.score("two", turned)["bleu"]
    assert scorer.score("three", turned)["bleu"]["against"]["run"] == "two"
    assert scorer.score("four", make_output(RIGHT, "chrf", "exact"))["chrf"]["against"]["run"] == "one"
    assert "against" not in scorer.score("five", make_output(RIGHT, "exact"))["exact"]
    assert [len(sheets) for sheets in scorer.systems_by_test] == [3, 2]


# Breakdowns


@given(st.lists(st.integers(0, 60), min_size=1, max_size=80), st.integers(1, 8))
def test_every_number_is_in_one_bucket(lengths: list[int], most: int) -> None:
    found = make_equal_buckets(lengths, most)
    assert 1 <= len(found) <= most
    held = [[n for n in lengths if low <= n <= high] for low, high in found]
    assert all(held)
    assert sorted(n for some in held for n in some) == sorted(lengths)
    assert (found[0][0], found[-1][1]) == (min(lengths), max(lengths))


def test_length_buckets_have_the_scores_of_their_lines() -> None:
    """The score of a bucket is that of a test set with only its lines."""
    texts = corrupt(0.3)
    counts = {name: METRICS[name].check_and_count(texts, [RIGHT]) for name in ("bleu", "exact")}
    found = score_by_length(make_output(texts), counts)
    assert found["unit"] == "words"
    assert sum(row["lines"] for row in found["buckets"]) == len(SOURCES)
    for row in found["buckets"]:
        some = [i for i, line in enumerate(SOURCES) if row["low"] <= len(line.split()) <= row["high"]]
        for score in compute_metrics([texts[i] for i in some], [[RIGHT[i] for i in some]], ["bleu", "exact"]):
            assert row[score.name] == pytest.approx(score.value)


def test_length_of_chinese_is_in_characters() -> None:
    chinese = SystemOutput(EvaluationSet(["他在跑步。", "她在这里看书。"], [["a", "b"]]), ["a", "b"])
    found = score_by_length(chinese, {"exact": METRICS["exact"].check_and_count(["a", "b"], [["a", "b"]])})
    assert (found["unit"], [row["high"] for row in found["buckets"]]) == ("characters", [5, 7])


def test_word_f1_by_frequency_of_a_small_example() -> None:
    """One of two "new" (frequency 0) is found; "old" (frequency 7) is output once too often."""
    seen = WordCounts({"old": 7, "common": 5000}, "somewhere")
    asked = SystemOutput(EvaluationSet(["-"] * 2, [["new old common.", "new!"]]), ["new, old old common", ""])
    found = score_by_frequency(asked, seen)
    assert found["counted_in"] == "somewhere"
    rows = {(row["low"], row["high"]): row for row in found["buckets"]}
    assert set(rows) == {(0, 0), (5, 9), (1000, None)}
    assert [rows[0, 0][key] for key in ("words", "precision", "recall")] == [2, 100, 50]
    assert rows[0, 0]["f1"] == pytest.approx(200 / 3)
    assert [rows[5, 9][key] for key in ("words", "precision", "recall")] == [1, 50, 100]
    assert rows[1000, None]["f1"] == 100


def test_frequency_buckets_leave_no_gap() -> None:
    highs = [high for _, high in FREQUENCY_BUCKETS]
    assert [low for low, _ in FREQUENCY_BUCKETS] == [0, *(high + 1 for high in highs[:-1] if high is not None)]
    assert highs[-1] is None


def test_words_are_counted_in_existing_training_data(toy: Toy) -> None:
    """Words are counted in the training data of the first run whose files exist."""
    recipe = toy.translator.recipe
    lost = recipe.data.model_copy(update={"train": (CorpusSettings(tsv="gone.tsv"),)})
    gone = recipe.model_copy(update={"data": lost})
    found = Scorer(recipes={"moved": gone, "here": recipe}).training_words
    assert found is not None
    assert found.counted_in == "the training data of here"
    lines = (toy.folder / "train.trg").read_text().splitlines()
    assert found.frequencies["ak"] == sum(line.rstrip(".!?").split().count("ak") for line in lines)
    assert Scorer(recipes={"moved": gone}).training_words is None
    assert count_words(["a b a.", "c", "a"]) == {"a": 3, "b": 1, "c": 1}


def test_breakdowns_are_optional() -> None:
    assert "lengths" not in Scorer().score("one", make_output(corrupt(0.1)))
    scorer = Scorer(recipes={})
    results = [scorer.score(name, make_output(corrupt(share))) for name, share in (("one", 0.1), ("two", 0.3))]
    printed = format_breakdowns(results).plain
    assert "BLEU by source length in words" in printed
    assert "word F1 by frequency in the references" in printed
    row = results[1]["rarity"]["buckets"][-1]
    assert any(line.endswith(f"{row['f1']:.2f}") for line in printed.splitlines())
    labels = replace(make_output(["yes"] * 60, "accuracy"), details={"warnings": {}, "confusion": {}})
    assert "rarity" not in Scorer(recipes={}).score("labels", labels)


# The command


def test_runs_and_hypothesis_files_are_compared(toy: Toy, tmp_path: Path, call: Call) -> None:
    source, reference = write_lines(tmp_path / "s", SOURCES), write_lines(tmp_path / "r", RIGHT)
    right, bad = write_lines(tmp_path / "right", RIGHT), write_lines(tmp_path / "bad", corrupt(0.6))
    files = ["--source", source, "--reference", reference]
    printed = call("evaluate", toy.run, *files, "--hypotheses", right, bad, "--breakdown", "--json", "--device", "cpu")
    assert printed.code == 0, printed.err
    run, perfect, poor = (json.loads(line) for line in printed.out.splitlines())
    assert [one["run"] for one in (run, perfect, poor)] == [str(toy.run), str(right), str(bad)]
    assert perfect["bleu"]["value"] == pytest.approx(100)
    assert poor["bleu"]["against"]["run"] == str(toy.run)
    assert poor["rarity"]["counted_in"] == f"the training data of {toy.run}"
    alone = call("evaluate", *files, "--hypotheses", bad, "--json")
    assert json.loads(alone.out)["bleu"]["value"] == poor["bleu"]["value"]
    text = call("evaluate", *files, "--hypotheses", right, "--hypotheses", bad, "--breakdown").out
    assert text.splitlines()[0] == "test set: 60 lines"
    assert text.splitlines()[1].split()[:3] == ["run", "score", "value"]
    assert "by source length in words" in text
    assert "by source length" not in call("evaluate", *files, "--hypotheses", bad).out


def test_hypotheses_need_no_source(tmp_path: Path, call: Call) -> None:
    """Results are the same as with a source, but lengths are those of the reference."""
    reference = write_lines(tmp_path / "r", RIGHT)
    some = [write_lines(tmp_path / name, corrupt(share)) for name, share in (("some", 0.2), ("many", 0.6))]
    alone = call("evaluate", "--reference", reference, "--hypotheses", *some, "--json", "--breakdown")
    assert alone.code == 0, alone.err
    source = write_lines(tmp_path / "s", SOURCES)
    beside = call("evaluate", "--source", source, "--reference", reference, "--hypotheses", *some, "--json")
    for one, other in zip(alone.out.splitlines(), beside.out.splitlines(), strict=True):
        found = json.loads(one)
        assert found.pop("lengths")["side"] == "reference"
        assert found.pop("rarity")["counted_in"] == "the references"
        assert found == json.loads(other)
    page = tmp_path / "page.html"
    printed = call("evaluate", "--reference", reference, "--hypotheses", *some, "--breakdown", "--page", page)
    assert "BLEU by reference length in words" in printed.out
    assert "BLEU by reference length" in page.read_text()
    assert "<dt>source" not in page.read_text()


def test_files_are_scored_without_pytorch(tmp_path: Path) -> None:
    """Importing PyTorch takes seconds, which scoring files and reporting a missing option do not need."""
    file = str(write_lines(tmp_path / "r", RIGHT))
    code = "import sys; from dragoman.cli.main import main; sys.argv[0] = 'dragoman'\ntry: main()\n"
    code += "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    for options, last in ((["--reference", file], "0 False"), ([], "2 False")):
        command = [sys.executable, "-c", code, "evaluate", "--hypotheses", file, *options]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        assert answer.stdout.splitlines()[-1] == last, answer.stderr


def test_components_of_bleu(tmp_path: Path, call: Call) -> None:
    """JSON always has them, text output only with --verbose. They equal those of sacreBLEU."""
    reference = write_lines(tmp_path / "r", RIGHT)
    texts = [" ".join(line.split()[:-1]) for line in corrupt(0.3)]
    short = write_lines(tmp_path / "short", texts)
    files = ("evaluate", "--reference", reference, "--hypotheses", short)
    found = json.loads(call(*files, "--json").out)
    wanted = BLEU().corpus_score(texts, [RIGHT])
    assert found["bleu"]["precisions"] == pytest.approx(wanted.precisions)
    assert found["bleu"]["brevity_penalty"] == pytest.approx(wanted.bp)
    assert found["bleu"]["brevity_penalty"] < 1
    assert [found["bleu"][f"{side}_length"] for side in ("hypothesis", "reference")] == [wanted.sys_len, wanted.ref_len]
    assert "precisions" not in found["chrf"]
    line = "short: BLEU {:.2f} = n-gram precisions {:.1f}/{:.1f}/{:.1f}/{:.1f}, brevity penalty {:.3f} ("
    line = line.format(wanted.score, *wanted.precisions, wanted.bp)
    assert line in call(*files, "--verbose").out
    assert "precisions" not in call(*files).out


def test_each_test_set_has_a_table(toy: Toy, tmp_path: Path, call: Call) -> None:
    """Runs with different test sets are in different tables, and names are shortened."""
    for number, name in enumerate(("one", "two")):
        run = shutil.copytree(toy.run, tmp_path / "long" / "way" / name)
        pairs = [f"{s}\t{t}" for s, t in zip(SOURCES[number:9], RIGHT[number:9], strict=True)]
        (tmp_path / name).mkdir()
        corpus = CorpusSettings(tsv=str(write_lines(tmp_path / name / "test.tsv", pairs)))
        recipe = RunFolder(run).load_recipe()
        data = recipe.data.model_copy(update={"test": (corpus,), "metrics": ("chrf",)})
        RunFolder(run).save_recipe(recipe.model_copy(update={"data": data}))
    runs = [tmp_path / "long" / "way" / name for name in ("one", "two")]
    answer = call("evaluate", *runs, "--page", tmp_path / "page.html", "--device", "cpu")
    first, second, note = answer.out.split("\n\n")
    for block, name, lines in ((first, "one", 9), (second, "two", 8)):
        title, head, row = block.splitlines()
        assert title == f"test set {name}/test.tsv: {lines} lines"
        assert head.split()[:3] == ["run", "score", "value"]
        assert row.split()[:2] == [name, "chrF"]
    assert str(tmp_path) not in answer.out
    assert "confidence interval" in note
    page = (tmp_path / "page.html").read_text()
    assert "<h1>one, two</h1>" in page
    assert re.findall(r"<h2[^>]*>([^<]*)", page) == ["Test set one/test.tsv: 9 lines", "Test set two/test.tsv: 8 lines"]


def test_invalid_options_and_files_are_refused(tmp_path: Path, call: Call) -> None:
    source, reference = write_lines(tmp_path / "s", SOURCES), write_lines(tmp_path / "r", RIGHT)
    files = ["--source", source, "--reference", reference]
    short = write_lines(tmp_path / "short", RIGHT[1:])
    cut = write_lines(tmp_path / "cut", [" ".join(f"▁{word}" for word in line.split()) for line in RIGHT])
    assert_user_error(call("evaluate", *files), "run folder", "--hypotheses")
    assert_user_error(call("evaluate", "--hypotheses", short), "--hypotheses F", "--reference F")
    assert_user_error(call("evaluate", "--hypotheses", short, "--source", source), "--hypotheses F", "--reference F")
    (tmp_path / "FORMAT").write_text("1\n")
    assert_user_error(call("evaluate", tmp_path, "--reference", reference), "--reference F", "--source F")
    assert_user_error(call("evaluate", *files, "--hypotheses", short), "60", "59", short)
    assert_user_error(call("evaluate", *files, "--hypotheses", cut), cut, "subword")
    assert_user_error(call("evaluate", *files, "--hypotheses", reference, "--bleu-tokenize", "13b"), "'13b'", "'13a'")
    page = tmp_path / "no" / "page.html"
    assert_user_error(call("evaluate", *files, "--hypotheses", reference, "--page", page), page)


def test_result_is_valid_json(toy: Toy) -> None:
    """A result has no numpy types and no NaN."""
    result = Scorer(recipes={"toy": toy.translator.recipe}).score("one", make_output([""] * 60))
    again = json.loads(json.dumps(result, allow_nan=False))
    assert again == result
    assert np.isfinite(again["bleu"]["interval"]).all()

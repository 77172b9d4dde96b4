"""Tests of metrics: equal to sacreBLEU, jiwer and rouge-score, with checks of the input."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import jiwer
import pytest
import sacrebleu
from hypothesis import given
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer

from dragoman.errors import UserError
from dragoman.inference.model_card import read_card
from dragoman.metrics.metrics import (
    BEST_METRIC,
    DEFAULT_METRICS,
    METRICS,
    choose_checkpoint_metric,
    compute_edit_distance,
    compute_metrics,
)
from dragoman.run_dir import RunFolder
from dragoman.training.trainer import train
from toy_run import Call, read_run_events, train_quietly

HYPOTHESES = ["The cat sat on the mat.", "Dogs bark at the moon, loudly!", "It is raining in Berlin today."]
REFERENCE = ["The cat is sitting on the mat.", "Dogs bark loudly at the moon.", "Today it is raining in Berlin."]
SECOND = ["A cat sat on a mat.", "The dogs bark at the moon, loudly!", "It rains in Berlin today."]
SACREBLEU_SCORES = {
    "bleu": lambda h, r: sacrebleu.corpus_bleu(h, r).score,
    "bleu_tokens_lc": lambda h, r: sacrebleu.corpus_bleu(h, r, tokenize="none", lowercase=True).score,
    "chrf": lambda h, r: sacrebleu.corpus_chrf(h, r).score,
    "ter": lambda h, r: sacrebleu.corpus_ter(h, r).score,
}
SIGNATURES = {
    "bleu": "nrefs:{n}|case:mixed|eff:no|tok:13a|smooth:exp|version:" + sacrebleu.__version__,
    "bleu_tokens_lc": "nrefs:{n}|case:lc|eff:no|tok:none|smooth:exp|version:" + sacrebleu.__version__,
    "chrf": "nrefs:{n}|case:mixed|eff:yes|nc:6|nw:0|space:no|version:" + sacrebleu.__version__,
    "ter": "nrefs:{n}|case:lc|tok:tercom|norm:no|punct:yes|asian:no|version:" + sacrebleu.__version__,
}


@pytest.mark.parametrize("references", [[REFERENCE], [REFERENCE, SECOND]], ids=["one", "two"])
@pytest.mark.parametrize("name", SACREBLEU_SCORES)
def test_score_and_signature_equal_sacrebleu(name: str, references: list[list[str]]) -> None:
    score = METRICS[name](HYPOTHESES, references)
    assert score.value == SACREBLEU_SCORES[name](HYPOTHESES, references)
    assert 0 < score.value < 100
    assert score.signature == SIGNATURES[name].format(n=len(references))
    assert score.name == name


@pytest.mark.parametrize("name", METRICS)
def test_perfect_and_worst_scores(name: str) -> None:
    """Lines that equal one of the references have the best score, lines without a common word the worst."""
    metric, mixed = METRICS[name], [REFERENCE[0], *SECOND[1:]]
    best, middling, worst = (metric(lines, [REFERENCE, SECOND]).value for lines in (mixed, HYPOTHESES, ["x"] * 3))
    assert best == pytest.approx(100 if metric.higher_is_better else 0)
    assert metric.goodness(best) > metric.goodness(middling) >= metric.goodness(worst)
    assert worst == pytest.approx(0 if metric.higher_is_better else 100, abs=10)


@pytest.mark.parametrize("name", METRICS)
def test_order_of_lines_and_references_does_not_matter(name: str) -> None:
    one = METRICS[name](HYPOTHESES, [REFERENCE, SECOND])
    assert METRICS[name](HYPOTHESES[::-1], [SECOND[::-1], REFERENCE[::-1]]).value == pytest.approx(one.value)


@pytest.mark.parametrize("name", [name for name, metric in METRICS.items() if metric.monotonic])
def test_further_reference_never_makes_a_score_worse(name: str) -> None:
    metric = METRICS[name]
    alone, both = (metric(HYPOTHESES, references).value for references in ([REFERENCE], [REFERENCE, SECOND]))
    assert metric.goodness(both) >= metric.goodness(alone)


WORDS = st.lists(st.sampled_from("abcd"), max_size=6)
TEXTS = st.lists(st.tuples(WORDS, WORDS.filter(bool)).map(lambda pair: tuple(map(" ".join, pair))), min_size=1)


@cache
def count_edits(one: str, other: str) -> int:
    """Return the edit distance by its recursive definition."""
    if not one or not other:
        return len(one) + len(other)
    return min(
        count_edits(one[1:], other[1:]) + (one[0] != other[0]),
        count_edits(one[1:], other) + 1,
        count_edits(one, other[1:]) + 1,
    )


@given(WORDS, WORDS)
def test_edit_distance_is_the_minimum(one: list[str], other: list[str]) -> None:
    assert (
        compute_edit_distance(one, other)
        == compute_edit_distance(other, one)
        == count_edits("".join(one), "".join(other))
    )


@given(TEXTS)
def test_error_rates_equal_those_of_jiwer(lines: list[tuple[str, str]]) -> None:
    found, wanted = [line for line, _ in lines], [line for _, line in lines]
    for name in ("wer", "per"):
        assert METRICS[name](found, [wanted]).value == pytest.approx(100 * jiwer.wer(wanted, found))


def test_error_rates_are_per_word_of_the_nearest_reference() -> None:
    found = ["a b c", "x"]
    assert METRICS["wer"](found, [["a b d e", "x y"]]).value == pytest.approx(100 * 3 / 6)
    assert METRICS["wer"](found, [["a b d e", "x y"], ["a b", "z z z"]]).value == pytest.approx(100 * 2 / 4)


@given(TEXTS)
def test_exact_and_line_error_rate_add_up_to_100(lines: list[tuple[str, str]]) -> None:
    found, wanted = [f" {line}  " for line, _ in lines], [line for _, line in lines]
    right = sum(line == reference for line, reference in lines)
    exact, accuracy, wrong = compute_metrics(found, [wanted], ["exact", "accuracy", "wrong"])
    assert exact.value == accuracy.value == pytest.approx(100 * right / len(lines))
    assert exact.value + wrong.value == pytest.approx(100)


@pytest.mark.parametrize("name", ["rouge1", "rouge2", "rougeL"])
def test_rouge_is_the_mean_of_the_best_f1_of_each_line(name: str) -> None:
    scorer = RougeScorer([name], use_stemmer=True)
    rows = zip(HYPOTHESES, REFERENCE, SECOND, strict=True)
    best = [max(scorer.score(reference, line)[name].fmeasure for reference in two) for line, *two in rows]
    assert METRICS[name](HYPOTHESES, [REFERENCE, SECOND]).value == pytest.approx(100 * sum(best) / 3)


def test_rouge_of_a_small_example() -> None:
    """The stemmed words "cat" and "sat" and the pair "cat sat" are common."""
    values = [s.value for s in compute_metrics(["cats sat on mats"], [["the cat sat"]], ["rouge1", "rouge2", "rougeL"])]
    assert values == pytest.approx([100 * 4 / 7, 100 * 2 / 5, 100 * 4 / 7])


def test_the_metric_of_the_best_checkpoint() -> None:
    assert choose_checkpoint_metric("auto", "translate") is METRICS["bleu"]
    assert choose_checkpoint_metric("auto", "classify") is METRICS["accuracy"]
    assert choose_checkpoint_metric("auto", "generate") is None
    assert choose_checkpoint_metric("loss", "translate") is None
    assert choose_checkpoint_metric("exact", "classify") is METRICS["exact"]
    assert all(name in METRICS for name in (*DEFAULT_METRICS, *BEST_METRIC.values()) if name != "loss")
    with pytest.raises(UserError, match=r"no metric of models that generate called 'bleu' \(there are: auto, loss\)"):
        choose_checkpoint_metric("bleu", "generate")
    with pytest.raises(UserError, match="called 'lossy'; did you mean 'loss'"):
        choose_checkpoint_metric("lossy", "translate")
    with pytest.raises(
        UserError, match=r"that classify called 'bleu' \(there are: auto, loss, exact, accuracy, line_error_rate\)"
    ):
        choose_checkpoint_metric("bleu", "classify")


def test_scores_are_in_the_order_of_the_names() -> None:
    assert [s.name for s in compute_metrics(HYPOTHESES, [REFERENCE])] == ["bleu", "chrf", "ter"]
    assert compute_metrics(HYPOTHESES, [REFERENCE], ["ter", "bleu"]) == [
        METRICS["ter"](HYPOTHESES, [REFERENCE]),
        METRICS["bleu"](HYPOTHESES, [REFERENCE]),
    ]
    with pytest.raises(UserError, match="no metric called 'blue'; did you mean 'bleu'"):
        compute_metrics(HYPOTHESES, [REFERENCE], ["blue"])


@pytest.mark.parametrize("name", METRICS)
def test_references_must_match_the_hypotheses(name: str) -> None:
    with pytest.raises(UserError, match="reference 2 of 2 has 1 line, but there are 3 hypotheses"):
        METRICS[name](HYPOTHESES, [REFERENCE, SECOND[:1]])
    with pytest.raises(UserError, match="reference 1 of 1 has 4 lines, but there are 3 hypotheses"):
        METRICS[name](HYPOTHESES, [[*REFERENCE, "One more."]])
    with pytest.raises(UserError, match="list of lists"):
        METRICS[name](HYPOTHESES, REFERENCE)
    with pytest.raises(UserError, match="no hypotheses"):
        METRICS[name]([], [[]])
    with pytest.raises(UserError, match="no reference"):
        METRICS[name](HYPOTHESES, [])


@pytest.mark.parametrize("line", ["▁The ▁cat ▁s at ▁on ▁the ▁mat .", "The c@@ at sat on the mat .", "▁The▁cat▁sat▁."])
@pytest.mark.parametrize("name", METRICS)
def test_subword_text_is_refused(name: str, line: str) -> None:
    with pytest.raises(UserError, match="detokenise"):
        METRICS[name]([line], [[line]])


def test_plain_text_with_a_subword_marker_is_scored() -> None:
    about = (
        "In subword text a mark such as ▁ or the older @@ says where one word ends and where the next begins, no more."
    )
    lines = [about, *["A line like all others stands here, and it says so."] * 5]
    assert METRICS["bleu"](lines, [lines]).value == pytest.approx(100)


def test_empty_lines_are_scored() -> None:
    bleu, ter = compute_metrics(["", ""], [REFERENCE[:2]], ["bleu", "ter"])
    assert (bleu.value, ter.value) == (0, 100)


def test_old_name_of_line_error_rate_works(small: Path, tmp_path: Path, call: Call) -> None:
    """It works in recipes, on the command line and in old files. New files have the new name."""
    assert METRICS["line_error_rate"].title == "line error rate"
    assert [score.name for score in compute_metrics(["a"], [["b"]], ["wrong"])] == ["line_error_rate"]
    assert choose_checkpoint_metric("wrong", "classify") is METRICS["line_error_rate"]
    run = train_quietly(small, tmp_path / "run", "train.steps=2", "train.metric=wrong", "data.metrics=[wrong, per]")
    assert RunFolder(run).load_recipe().data.metrics == ("line_error_rate", "per")
    assert "line_error_rate" in next(event for event in read_run_events(run) if event["event"] == "validate")
    files = ("--source", small.parent / "dev.src", "--reference", small.parent / "dev.trg")
    assert "line_error_rate" in json.loads(call("evaluate", run, *files, "--metric", "wrong", "--json").out)


def test_run_with_the_old_metric_name_resumes(small: Path, tmp_path: Path) -> None:
    given = ("train.metric=line_error_rate", "train.validate_every=2")
    run = train_quietly(small, tmp_path / "run", "train.steps=4", *given)
    [state] = run.glob("checkpoints/*/state.json")
    for path in (state, run / "metrics.jsonl"):
        path.write_text(path.read_text().replace("line_error_rate", "wrong"))
    best = read_card(run)["validation"]
    assert best["line_error_rate"] is not None
    train_quietly(small, run, "train.steps=6", *given, resume=True)
    assert read_card(run)["validation"] is not None


@pytest.mark.parametrize(("kind", "noted"), [("space", True), ("char", False)])
def test_wer_of_phones_is_explained(
    small: Path, tmp_path: Path, call: Call, kind: str, noted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """If a line is a word and its tokens are phones, the usual word error rate is `line_error_rate`, not `wer`."""
    settings = ["tokenizer.joint=false", f"tokenizer.target_kind={kind}", "data.metrics=[wer]", "train.steps=2"]
    train(small, out=tmp_path / "run", overrides=settings)
    assert ("the word error rate is line_error_rate" in capsys.readouterr().err) is noted
    files = ("--source", small.parent / "dev.src", "--reference", small.parent / "dev.trg")
    assert ("the word error rate is line_error_rate" in call("evaluate", tmp_path / "run", *files).err) is noted

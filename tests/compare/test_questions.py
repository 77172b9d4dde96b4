"""Tests of the questions of a comparison and their answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dragoman.compare.questions import (
    FIGURES,
    FigureOptions,
    Question,
    answer_question,
    describe_outcome,
    read_questions,
)
from dragoman.errors import UserError
from dragoman.evaluation.figures import Chart, Point, Series
from toy_report import report_of

ROOT = Path(__file__).parents[2]
QUESTION = Question(title="t", figure="length", better="new", worse="old")


def make_chart(new: list[tuple[float, ...]], old: list[tuple[float, ...]], **more: Any) -> Chart:
    lines = [
        Series(name, [Point(x, f"{x + 1} words", values) for x, values in enumerate(line)])
        for name, line in (("new", new), ("old", old))
    ]
    return Chart(lines, "words", "BLEU", "BLEU", **more)


@pytest.mark.parametrize(
    ("new", "old", "verdict", "count"),
    [
        ((30.0, 31.0, 32.0), (10.0, 11.0, 31.0), "As expected", "3 of 3 seeds"),
        ((10.0, 11.0, 12.0), (30.0, 31.0, 32.0), "Not as expected", "0 of 3 seeds"),
        ((10.0, 31.0, 32.0), (30.0, 11.0, 12.0), "Undecided", "2 of 3 seeds"),
        ((10.0,), (10.0,), "Not as expected", "0 of 1 seed."),
    ],
)
def test_verdict_depends_on_all_seeds_at_the_last_point(
    new: tuple[float, ...], old: tuple[float, ...], verdict: str, count: str
) -> None:
    same = tuple(5.0 for _ in new)
    answer = describe_outcome(QUESTION, make_chart([same, new], [same, old]))
    assert answer.startswith(f"{verdict}: at 2 words new has ")
    assert f"it is ahead in {count}" in answer
    spread = " (by seed +0.0 to +0.0)" if len(new) > 1 else ""
    assert answer.endswith(f". At 1 words: a difference of +0.0{spread}.")


def test_differences_are_seed_by_seed() -> None:
    answer = describe_outcome(QUESTION, make_chart([(12.0, 22.0)], [(10.0, 19.0)]))
    assert "new has 17.0 BLEU and old 14.5" in answer
    assert "a difference of +2.5 (by seed +2.0 to +3.0)" in answer


def test_lower_is_better_if_low_is_good() -> None:
    assert describe_outcome(QUESTION, make_chart([(1.0,)], [(2.0,)], low_is_good=True)).startswith("As expected")
    assert describe_outcome(QUESTION, make_chart([(1.0,)], [(2.0,)])).startswith("Not as expected")


def test_ratio_is_given_on_a_logarithmic_axis() -> None:
    answer = describe_outcome(QUESTION, make_chart([(100.0,), (20.0,)], [(100.0,), (0.05,)], logarithmic=True))
    assert "400.0 times as much" in answer
    assert "old 0.05" in answer


def test_all_lines_are_ranked_without_an_expectation() -> None:
    question = Question(title="t", figure="length")
    assert (
        describe_outcome(question, make_chart([(1.0,), (3.0,)], [(9.0,), (4.0,)]))
        == "At 2 words: old 4.0, new 3.0 (BLEU)."
    )
    low = make_chart([(1.0,), (3.0,)], [(9.0,), (4.0,)], low_is_good=True)
    assert describe_outcome(question, low) == "At 2 words: new 3.0, old 4.0 (BLEU)."


def test_no_answer_without_finished_runs() -> None:
    alone = Chart([Series("new", [Point(0, "1 words", (1.0,))])], "words", "BLEU", "BLEU")
    assert describe_outcome(QUESTION, alone) == "No answer: old has no finished run."
    assert "no run of these models" in describe_outcome(QUESTION, Chart([], "words", "BLEU", "BLEU"))


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_answers_questions(name: str) -> None:
    """Each has lines with one value per seed, and gives an answer."""
    report = report_of(models=3, seeds=2)
    question = Question(title="t", figure=name, x="model.layers", lines="model.residual")
    found = answer_question(question, report)
    assert found["models"] == ["model-0", "model-1", "model-2"]
    assert found["answer"].startswith("At ")
    options = FigureOptions("test", "bleu", "steps", "model.layers", "model.residual")
    lines = FIGURES[name](report["models"], options).series
    assert lines
    assert all(len(point.values) == 2 for line in lines for point in line.points)


def test_patterns_select_models() -> None:
    report = report_of(models=3, seeds=1)
    assert answer_question(Question(title="t", figure="length", models=("*-2", "model-0")), report)["models"] == [
        "model-2",
        "model-0",
    ]


@pytest.mark.parametrize(
    ("fields", "culprit"),
    [
        ({"test": "nothing"}, "test set 'nothing'"),
        ({"figure": "setting", "x": "model.depth", "lines": "model.residual"}, "model.depth"),
    ],
)
def test_unknown_test_set_and_setting_are_refused(fields: dict[str, object], culprit: str) -> None:
    question = Question.model_validate({"title": "t", "figure": "length", **fields})
    with pytest.raises(UserError, match=culprit):
        answer_question(question, report_of(models=2, seeds=1))


@pytest.mark.parametrize(
    ("text", "culprit"),
    [
        ("questions: [{title: t, figure: lenght}]", "did you mean 'length'"),
        ("questions: [{title: t}]", "figure"),
        ("questons: []", "did you mean 'questions'"),
    ],
)
def test_invalid_file_is_refused(tmp_path: Path, text: str, culprit: str) -> None:
    (tmp_path / "questions.yaml").write_text(text)
    with pytest.raises(UserError, match=culprit):
        read_questions([tmp_path])


def test_folder_without_questions(tmp_path: Path) -> None:
    assert read_questions([tmp_path]).questions == ()


def test_only_seeds_finished_by_all_models_are_compared() -> None:
    """The first seed of the second model failed, so both models are compared by their second seed."""
    report = report_of(models=2, seeds=2)
    del report["models"][1]["runs"][0]
    question = Question(title="t", figure="length", better="model-1", worse="model-0")
    assert "a difference of +1.0; it is ahead in 1 of 1 seed" in answer_question(question, report)["answer"]


def test_answer_for_the_published_report() -> None:
    """The LSTM is ahead, 85.2 to 67.3, so attention does not make up for the plain cell."""
    report = json.loads((ROOT / "bench" / "results" / "2026-11-15-lectures-h200.json").read_text())
    questions = read_questions([ROOT / "recipes" / "lectures"]).questions
    [question] = [question for question in questions if question.title == "Does attention make up for the plain cell?"]
    answer = answer_question(question, report)["answer"]
    assert answer.startswith("Not as expected: at 9 or more words apart 10-vanilla-additive has 67.3 % right")
    assert "08-lstm-additive 85.2" in answer

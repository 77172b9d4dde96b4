"""Questions are answered from the numbers alone."""

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
from dragoman.evaluation.figures import LineChart, Point, Series
from toy_report import report_of

ROOT = Path(__file__).parents[2]
QUESTION = Question(title="t", figure="length", better="new", worse="old")


def figure(new: list[tuple[float, ...]], old: list[tuple[float, ...]], **more: Any) -> LineChart:
    lines = [
        Series(name, [Point(x, f"{x + 1} words", values) for x, values in enumerate(line)])
        for name, line in (("new", new), ("old", old))
    ]
    return LineChart(lines, "words", "BLEU", "BLEU", **more)


@pytest.mark.parametrize(
    ("new", "old", "verdict", "count"),
    [
        ((30.0, 31.0, 32.0), (10.0, 11.0, 31.0), "As expected", "3 of 3 seeds"),
        ((10.0, 11.0, 12.0), (30.0, 31.0, 32.0), "Not as expected", "0 of 3 seeds"),
        ((10.0, 31.0, 32.0), (30.0, 11.0, 12.0), "Undecided", "2 of 3 seeds"),
        ((10.0,), (10.0,), "Not as expected", "0 of 1 seed."),
    ],
)
def test_a_verdict_is_what_all_seeds_say_at_the_far_end(
    new: tuple[float, ...], old: tuple[float, ...], verdict: str, count: str
) -> None:
    same = tuple(5.0 for _ in new)
    said = describe_outcome(QUESTION, figure([same, new], [same, old]))
    assert said.startswith(f"{verdict}: at 2 words new has ")
    assert f"it is ahead in {count}" in said
    spread = " (by seed +0.0 to +0.0)" if len(new) > 1 else ""
    assert said.endswith(f". At 1 words: a difference of +0.0{spread}.")


def test_differences_are_seed_by_seed() -> None:
    said = describe_outcome(QUESTION, figure([(12.0, 22.0)], [(10.0, 19.0)]))
    assert "new has 17.0 BLEU and old 14.5" in said
    assert "a difference of +2.5 (by seed +2.0 to +3.0)" in said


def test_where_low_is_good_the_lower_is_ahead() -> None:
    assert describe_outcome(QUESTION, figure([(1.0,)], [(2.0,)], low_is_good=True)).startswith("As expected")
    assert describe_outcome(QUESTION, figure([(1.0,)], [(2.0,)])).startswith("Not as expected")


def test_on_a_logarithmic_axis_one_says_how_many_times() -> None:
    said = describe_outcome(QUESTION, figure([(100.0,), (20.0,)], [(100.0,), (0.05,)], logarithmic=True))
    assert "400.0 times as much" in said
    assert "old 0.05" in said


def test_without_an_expectation_all_are_ranked() -> None:
    asked = Question(title="t", figure="length")
    assert describe_outcome(asked, figure([(1.0,), (3.0,)], [(9.0,), (4.0,)])) == "At 2 words: old 4.0, new 3.0 (BLEU)."
    low = figure([(1.0,), (3.0,)], [(9.0,), (4.0,)], low_is_good=True)
    assert describe_outcome(asked, low) == "At 2 words: new 3.0, old 4.0 (BLEU)."


def test_nothing_is_said_of_what_is_not_there() -> None:
    alone = LineChart([Series("new", [Point(0, "1 words", (1.0,))])], "words", "BLEU", "BLEU")
    assert describe_outcome(QUESTION, alone) == "No answer: old has no finished run."
    assert "no run of these models" in describe_outcome(QUESTION, LineChart([], "words", "BLEU", "BLEU"))


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_can_be_asked_for(name: str) -> None:
    """Each gives lines with as many values as there are seeds, and an answer."""
    report = report_of(models=3, seeds=2)
    question = Question(title="t", figure=name, x="model.layers", lines="model.residual")
    found = answer_question(question, report)
    assert found["models"] == ["model-0", "model-1", "model-2"]
    assert found["answer"].startswith("At ")
    options = FigureOptions("test", "bleu", "steps", "model.layers", "model.residual")
    lines = FIGURES[name](report["models"], options).series
    assert lines
    assert all(len(point.values) == 2 for line in lines for point in line.points)


def test_patterns_choose_models() -> None:
    report = report_of(models=3, seeds=1)
    assert answer_question(Question(title="t", figure="length", models=("*-2", "model-0")), report)["models"] == [
        "model-2",
        "model-0",
    ]


@pytest.mark.parametrize(
    ("question", "culprit"),
    [
        ({"test": "nothing"}, "test 'nothing'"),
        ({"figure": "setting", "x": "model.depth", "lines": "model.residual"}, "model.depth"),
    ],
)
def test_a_question_about_nothing_is_refused(question: dict[str, object], culprit: str) -> None:
    asked = Question.model_validate({"title": "t", "figure": "length", **question})
    with pytest.raises(UserError, match=culprit):
        answer_question(asked, report_of(models=2, seeds=1))


@pytest.mark.parametrize(
    ("text", "culprit"),
    [
        ("questions: [{title: t, figure: lenght}]", "did you mean 'length'"),
        ("questions: [{title: t}]", "figure"),
        ("questons: []", "did you mean 'questions'"),
    ],
)
def test_a_faulty_file_is_refused(tmp_path: Path, text: str, culprit: str) -> None:
    (tmp_path / "questions.yaml").write_text(text)
    with pytest.raises(UserError, match=culprit):
        read_questions([tmp_path])


def test_a_folder_without_questions_asks_none(tmp_path: Path) -> None:
    assert read_questions([tmp_path]).questions == ()


def test_only_seeds_that_all_finished_are_set_against_each_other() -> None:
    """The second model's first run failed: its second is compared with the first model's second."""
    report = report_of(models=2, seeds=2)
    del report["models"][1]["runs"][0]
    asked = Question(title="t", figure="length", better="model-1", worse="model-0")
    assert "a difference of +1.0; it is ahead in 1 of 1 seed" in answer_question(asked, report)["answer"]


def test_attention_that_leaves_the_plain_cell_behind_does_not_make_up_for_it() -> None:
    """The kept figures have the LSTM ahead, 85.2 to 67.3, so the answer to "does it make up for it" is no."""
    report = json.loads((ROOT / "bench" / "results" / "2026-11-15-lectures-h200.json").read_text())
    questions = read_questions([ROOT / "recipes" / "lectures"]).questions
    [asked] = [question for question in questions if question.title == "Does attention make up for the plain cell?"]
    said = answer_question(asked, report)["answer"]
    assert said.startswith("Not as expected: at 9 or more words apart 10-vanilla-additive has 67.3 % right")
    assert "08-lstm-additive 85.2" in said

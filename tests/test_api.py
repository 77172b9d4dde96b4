"""The public Python API: typed functions that tools can see, examples that run, objects that show what they are."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import dragoman
from dragoman.errors import UserError
from dragoman.inference.single_sequence import Classifier, Generator
from dragoman.inference.translator import Translator
from dragoman.metrics.metrics import compute_metrics
from dragoman.types import Line
from toy_run import Toy, make_sentences, translate_toy

FUNCTIONS = ["evaluate", "export", "load", "score", "train"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_tools_see_signature_docstring_and_types(name: str) -> None:
    function = getattr(dragoman, name)
    signature = inspect.signature(function)
    first, *rest = signature.parameters.values()
    assert first.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert {each.kind for each in rest} == {inspect.Parameter.KEYWORD_ONLY}
    assert all(each.annotation not in (inspect.Parameter.empty, Any, "Any") for each in signature.parameters.values())
    assert signature.return_annotation not in (inspect.Signature.empty, Any, "Any")
    assert f"dragoman.{name}(" in function.__doc__


def test_the_return_type_of_load_is_a_union() -> None:
    wanted = {each.__name__ for each in (Translator, Generator, Classifier)}
    assert set(str(inspect.signature(dragoman.load).return_annotation).split(" | ")) == wanted


@pytest.mark.parametrize("name", ["evaluate", "load", "score", "train"])
def test_the_example_runs(toy: Toy, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for run in ("demo", "mine") if name != "train" else ():
        (tmp_path / "runs" / run).symlink_to(toy.run)
    example = inspect.cleandoc(getattr(dragoman, name).__doc__).partition("\n\n    ")[2]
    example = re.sub(r"^    ", "", example, flags=re.MULTILINE)
    assert small.name in example or name != "train"
    exec(example, {"dragoman": dragoman})


def test_evaluate_and_score_are_those_of_the_model(toy: Toy) -> None:
    sources = make_sentences(20, seed=9)
    right = [translate_toy(line) for line in sources]
    texts = [one.text for one in toy.translator.translate(sources)]
    assert dragoman.evaluate(toy.run, sources=sources, references=right) == compute_metrics(texts, [right])
    several = dragoman.evaluate(toy.run, sources=sources, references=[right, texts], metrics=["chrf"])
    assert [(one.name, one.value) for one in several] == [("chrf", 100.0)]
    scores = dragoman.score(toy.run, sources=sources, targets=right, device="cpu")
    assert scores == toy.translator.score(sources, right)


def test_a_translator_shows_what_it_is(toy: Toy) -> None:
    assert re.fullmatch(rf"Translator\('{toy.run}', transformer, 0\.\d M parameters, cpu\)", repr(toy.translator))


def test_what_a_translator_does_inside_is_private(toy: Toy) -> None:
    public = {name for name in dir(toy.translator) if not name.startswith("_")}
    assert not public & {"wished", "grown", "watched", "asked", "ranked", "looks", "job", "hypothesis", "text_of"}


@pytest.mark.parametrize("wrong", [None, 3, b"ba!", ["ba!"]])
def test_what_is_no_text_is_named(toy: Toy, wrong: Any) -> None:
    translator = toy.translator
    for noun, call in (
        ("item", lambda: translator.translate(["ba!", wrong])),
        ("item", lambda: translator.nbest(["ba!", wrong])),
        ("source", lambda: translator.score(["ba!", wrong], ["ak!", "ak!"])),
        ("target", lambda: translator.score(["ba!", "ba!"], ["ak!", wrong])),
    ):
        with pytest.raises(UserError, match=re.escape(f"{noun} 1 of the list is {wrong!r}, not a str")):
            call()


def test_lines_may_come_from_a_generator(toy: Toy) -> None:
    lines = make_sentences(3, seed=1)
    translator = toy.translator
    assert translator.translate(line for line in lines) == translator.translate(lines)  # type: ignore[arg-type]
    assert translator.score(iter(lines), iter(lines)) == translator.score(lines, lines)  # type: ignore[arg-type]


def test_a_line_with_wishes_is_only_for_translating(toy: Toy) -> None:
    with pytest.raises(UserError, match="source 0 of the list is Line"):
        toy.translator.score([Line("ba!", terms=("ak",))], ["ak!"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"references": "ak!"}, "references=[...]"),
        ({"references": []}, "references=[...]"),
        ({"references": ["ak!", "ak!"]}, "1 sources but 2 references"),
        ({"references": [["ak!"], ["ak!", 3]]}, "reference 1 of the list is 3"),
    ],
)
def test_errors_of_evaluate_name_python_arguments(toy: Toy, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        dragoman.evaluate(toy.run, sources=["ba!"], **options)
    assert words in str(caught.value)
    assert "--" not in str(caught.value)

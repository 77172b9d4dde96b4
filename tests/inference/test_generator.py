"""Language models from the first line to the last: they learn all there is to learn, and draw as they hold likely."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch

from dragoman.config.settings import SampleSettings
from dragoman.data.corpus import CorpusSettings, read_pairs
from dragoman.errors import UserError
from dragoman.inference.loading import load
from dragoman.inference.single_sequence import Generator
from toy_heads import BACKBONES, NEXT, babble, lm_recipe
from toy_run import Call, assert_user_error, read_run_events, read_tensor_files, train_quietly, write_lines

COLD = SampleSettings(temperature=0.0)


@pytest.fixture(scope="module", params=BACKBONES)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return train_quietly(lm_recipe(folder, request.param), folder / "run")


@pytest.fixture(scope="module")
def lines_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lines")
    return train_quietly(lm_recipe(folder, documents="line"), folder / "run")


def opened(run: Path) -> Generator:
    found = load(run, device="cpu")
    assert isinstance(found, Generator)
    return found


def dev_lines(run: Path) -> list[str]:
    corpus = CorpusSettings(text=str(run.parent / "text"), part=(0.9, 1.0))
    return [pair.target for pair in read_pairs(corpus)]


def test_it_learns_all_there_is_to_learn(run: Path) -> None:
    """The next character is one of two, so that no model can do better than ln 2; nor does it do much worse."""
    loss = min(event["loss"] for event in read_run_events(run) if event["event"] == "validate")
    assert math.log(2) - 0.03 < loss < math.log(2) + 0.05


def test_it_writes_what_the_text_allows(run: Path) -> None:
    """Far beyond its context, and each of two followers about as often."""
    texts = opened(run).generate(["", "ab"], count=4, tokens=120, seed=5)
    followed: Counter[tuple[str, str]] = Counter()
    for one in (one for some in texts for one in some):
        assert one.tokens == 120
        assert not one.finished
        assert one.logp == pytest.approx(120 * math.log(0.5), rel=0.4)
        followed.update(zip("\n" + one.text, one.text))
    allowed = sum(count for (left, right), count in followed.items() if right in NEXT[left])
    assert allowed / followed.total() > 0.97
    for left, rights in NEXT.items():
        counts = [followed[left, right] for right in rights]
        assert min(counts) / sum(counts) > 0.25
    assert all(one.text.startswith("ab") for one in texts[1])


def test_a_text_depends_on_prompt_number_and_seed_alone(run: Path) -> None:
    generator = opened(run)
    prompts = ["", "a", "bd\na", "abcdef\n" * 9]
    whole = generator.generate(prompts, count=3, tokens=60, seed=2)
    for prompt, some in zip(prompts, whole, strict=True):
        assert len({one.text for one in some}) == 3
        assert generator.generate([prompt], count=3, tokens=60, seed=2)[0] == some
        assert generator.generate([prompt], tokens=60, seed=2)[0] == some[:1]
        assert generator.generate([prompt], tokens=60, seed=3)[0] != some[:1]
        assert all(one.text.startswith(prompt) and one.prompt == prompt for one in some)
    many = generator.generate([prompts[1]] * 20, tokens=60, seed=2)
    assert {some[0].text for some in many} == {whole[1][0].text}


def test_a_broken_model_ends_its_text_and_says_so(run: Path) -> None:
    generator = opened(run)
    with torch.no_grad():
        generator.model.project.weight.fill_(math.nan)
    (found,) = generator.generate(["ab"], tokens=90)[0]
    assert (found.text, found.tokens, found.finished) == ("ab", 0, False)


def test_the_coldest_draw_is_the_likeliest_text(run: Path) -> None:
    generator = opened(run)
    cold = generator.generate(["", "cd"], tokens=50, settings=COLD)
    assert generator.generate(["", "cd"], tokens=50, seed=9, settings=SampleSettings(top_k=1)) == cold
    assert generator.generate(["", "cd"], tokens=50, seed=7, settings=COLD) == cold


def test_validation_measures_as_the_door_does(run: Path) -> None:
    """The same loss, with every token counted once; and evaluation says so too."""
    found = opened(run).measure(dev_lines(run))
    best = min(
        (event for event in read_run_events(run) if event["event"] == "validate"), key=lambda event: event["loss"]
    )
    assert found.loss == pytest.approx(best["loss"], rel=1e-5)
    assert found.bits_per_character == pytest.approx(best["bits_per_character"], rel=1e-5)
    assert found.perplexity == pytest.approx(best["perplexity"], rel=1e-4)
    assert found.tokens == found.characters == sum(len(line) + 1 for line in dev_lines(run))
    with pytest.raises(UserError, match="no text"):
        opened(run).measure([])


def test_of_lines_each_is_a_text(lines_run: Path, tmp_path: Path, call: Call) -> None:
    generator = opened(lines_run)
    found = generator.generate(["", "ab", "e"], tokens=200, seed=1)
    assert all(some[0].finished and "\n" not in some[0].text for some in found)
    prompts = write_lines(tmp_path / "prompts", ["a", "", "b"])
    answer = call("generate", lines_run, "--input", prompts, "--device", "cpu")
    assert [line[:1] for line in answer.out.split("\n")[:-1]][::2] == ["a", "b"]
    assert len(answer.out.split("\n")) == 4
    measured = generator.measure(dev_lines(lines_run))
    best = min(
        (event for event in read_run_events(lines_run) if event["event"] == "validate"), key=lambda event: event["loss"]
    )
    assert measured.loss == pytest.approx(best["loss"], rel=0.02)  # validation leaves empty lines out


def test_a_line_ends_at_the_longest_that_training_allows(lines_run: Path) -> None:
    generator = opened(lines_run)
    (found,) = generator.generate(["abcdef" * 100], tokens=50)[0]
    assert found.tokens == 0
    assert not found.finished


def test_what_a_prompt_loses_is_said(run: Path, lines_run: Path, call: Call) -> None:
    answer = call("generate", run, "--prompt", "ab☃", "--tokens", 3, "--count", 2, "--device", "cpu")
    assert (answer.code, answer.err) == (0, "prompt 1: the prompt contains tokens that the tokenizer does not know\n")
    long = call("generate", lines_run, "--prompt", "a" * 600, "--tokens", 3, "--device", "cpu")
    assert long.out == "a" * 600 + "\n"
    assert "prompt 1: stopped at 512 tokens" in long.err
    assert call("generate", run, "--prompt", "ab", "--tokens", 3, "--device", "cpu").err == ""


def test_on_the_command_line(run: Path, tmp_path: Path, call: Call) -> None:
    first = call("generate", run, "--prompt", "ab", "--tokens", 30, "--count", 2, "--device", "cpu")
    assert first.code == 0, first.err
    one, other = first.out.split("---\n")
    assert one.startswith("ab")
    assert one != other
    again = call("generate", run, "--prompt", "ab", "--tokens", 30, "--count", 2, "--json", "--device", "cpu")
    records = [json.loads(line) for line in again.out.split("\n")[:-1]]
    assert [record["text"] + "\n" for record in records] == [one, other]
    source = write_lines(tmp_path / "text", dev_lines(run))
    measured = json.loads(call("evaluate", run, "--source", source, "--json", "--device", "cpu").out)
    own = json.loads(call("evaluate", run, "--json", "--device", "cpu").out)
    assert own["loss"] == measured["loss"]
    assert "bits per character" in call("evaluate", run, "--device", "cpu").out
    assert "context" in call("info", run).out
    assert_user_error(call("classify", run, "--device", "cpu"), "dragoman generate")
    assert_user_error(call("generate", run, "--top-p", "1.5"), "top_p", "1.5")
    assert_user_error(call("generate", run, "--prompt", "a", "--input", source), "not both")
    assert_user_error(call("evaluate", run, "--metric", "bleu", "--device", "cpu"), "bleu")


@pytest.mark.parametrize("documents", ["file", "line"])
def test_a_resumed_run_ends_as_one_that_never_stopped(tmp_path: Path, documents: str) -> None:
    recipe = lm_recipe(
        tmp_path, documents=documents, steps=8, validate_every=4, save_every=4, schedule="inverse_sqrt", tokens=4096
    )
    whole = train_quietly(recipe, tmp_path / "whole")
    train_quietly(recipe, tmp_path / "run", "train.steps=4")
    again = train_quietly(recipe, tmp_path / "run", resume=True)
    assert read_tensor_files(again) == read_tensor_files(whole)


@pytest.mark.parametrize(
    ("content", "overrides", "said"),
    [
        ("", [], "is empty"),
        ("ab\n", [], "has no line in part [0.9, 1.0]"),
        ("ab\n" * 9, ["data.train={text: text, part: [0.9, 0.1]}"], "part must go from a lower fraction"),
        ("ab\n" * 9, ["data.train={tsv: text, part: [0.0, 0.1]}"], "part works with text, not with tsv"),
        ("ab\n" * 9, ["tokenizer.kind=bpe", "tokenizer.sampling=0.1"], "needs data.documents=line"),
        ("ab\n" * 9, ["data.documents=page"], "'file' or 'line'"),
        ("ab\n" * 9, ["train.metric=bleu"], "no metric of models that generate called 'bleu'"),
    ],
)
def test_bad_input_is_answered_with_a_sentence(
    tmp_path: Path, call: Call, content: str, overrides: list[str], said: str
) -> None:
    recipe = lm_recipe(tmp_path)
    (tmp_path / "text").write_text(content)
    assert_user_error(call("train", recipe, "--out", tmp_path / "run", *overrides), said, working=True)


def test_a_language_model_may_read_the_targets_of_pairs(tmp_path: Path) -> None:
    recipe = lm_recipe(tmp_path, steps=2)
    rows = [f"{i}\t{line}" for i, line in enumerate(babble(3000).split("\n"))]
    write_lines(tmp_path / "pairs.tsv", rows)
    run = train_quietly(recipe, tmp_path / "run", "data.train={tsv: " + str(tmp_path / "pairs.tsv") + "}")
    assert set("".join(opened(run).tokenizers.target.ids_to_tokens(range(4, 10)))) == set("abcdef")

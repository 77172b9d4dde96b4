"""Tests of `dragoman align`: links of every pair, saved models, error rates, and messages for bad input."""

from __future__ import annotations

import json
import os
import pty
import re
from pathlib import Path
from random import Random

import pytest

from dragoman.smt.settings import ALIGNMENT_METHODS
from toy_run import (
    Call,
    Toy,
    assert_user_error,
    make_sentences,
    start_process,
    train_quietly,
    translate_toy,
    write_corpus,
    write_lines,
    write_recipe,
)

SOURCE = ["das haus", "das buch", "ein buch", "", "ein haus"]
TARGET = ["the house", "the book", "a book", "nothing", "a house"]
LINKS = ["0-0 1-1", "0-0 1-1", "0-0 1-1", "", "0-0 1-1"]
Files = tuple[object, ...]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """The options that name the two texts."""
    return "--source", write_lines(tmp_path / "source", SOURCE), "--target", write_lines(tmp_path / "target", TARGET)


def test_align_prints_one_line_per_pair(files: Files, call: Call) -> None:
    answer = call("align", "joint-hmm", *files)
    assert answer.code == 0
    assert answer.out.split("\n") == [*LINKS, ""]
    assert "1 of 5 pairs were not used for training: they are empty" in answer.err


@pytest.mark.parametrize("method", ALIGNMENT_METHODS)
def test_likelihood_of_textbook_models_never_falls(method: str, files: Files, call: Call) -> None:
    answer = call("align", method, *files)
    assert answer.code == 0
    assert len(answer.out.split("\n")) == len(LINKS) + 1
    found = re.findall(r"^(\w+) \d+: log-likelihood (-[\d.]+) per word$", answer.err, re.MULTILINE)
    assert len(found) == (5 if method == "ibm1" else 10)
    if method != "joint-hmm":
        for kind in {kind for kind, _ in found}:
            values = [float(value) for name, value in found if name == kind]
            assert values == sorted(values)


def test_aligner_is_saved_and_loaded(files: Files, tmp_path: Path, call: Call) -> None:
    folder = tmp_path / "aligner"
    first = call("align", "joint-hmm", *files, "--save", folder, "symmetrize=grow-diag")
    again = call("align", folder, *files)
    assert (again.code, again.out) == (0, first.out)
    assert call("align", folder, *files, "symmetrize=union").code == 0
    assert_user_error(call("align", folder, *files, "--save", tmp_path / "other"), "--save", "method")
    assert_user_error(call("align", folder, *files, "hmm=3"), "hmm", "already trained")
    assert_user_error(call("align", "hmm", *files, "--save", folder), "already exists")


@pytest.mark.parametrize("name", ["aligner.json", "aligner.safetensors", "source.words", "target.words"])
def test_damaged_aligner_is_refused(name: str, files: Files, tmp_path: Path, call: Call) -> None:
    folder = tmp_path / "aligner"
    assert call("align", "joint-hmm", *files, "--save", folder).code == 0
    content = (folder / name).read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"\xff" * 40):
        (folder / name).write_bytes(damaged)
        assert_user_error(call("align", folder, *files), folder, "no alignment model that can be read")
    (folder / name).unlink()
    assert_user_error(call("align", folder, *files), folder, "no alignment model that can be read")


def test_gold_links_give_error_rates(files: Files, tmp_path: Path, call: Call) -> None:
    """The score goes to stdout if the links go to a file, and to stderr otherwise, with -q too."""
    gold = write_lines(tmp_path / "gold", ["0-0 1-1", "0-0 1?1", "0-0 1-1", "", "0-0"])
    answer = call("align", "joint-hmm", *files, "--gold", gold, "--output", tmp_path / "links")
    assert answer.out == "AER 7.1, precision 87.5, recall 100.0 (8 links)\n"
    assert (tmp_path / "links").read_text().split("\n") == [*LINKS, ""]
    answer = call("align", "joint-hmm", *files, "--gold", gold, "-q", "--json")
    assert [json.loads(line)["links"] for line in answer.out.splitlines()][:1] == [[[0, 0], [1, 1]]]
    assert answer.err == "AER 7.1, precision 87.5, recall 100.0 (8 links)\n"


def test_links_of_other_systems_are_symmetrised_and_scored(files: Files, tmp_path: Path, call: Call) -> None:
    """The file of the reverse direction has target-source positions."""
    forward = write_lines(tmp_path / "forward", ["0-0 1-0", "0-0", "", "", "1-1"])
    reverse = write_lines(tmp_path / "reverse", ["0-0 1-1", "0-0 0-1", "", "", "0-0"])
    gold = write_lines(tmp_path / "gold", ["0-0", "0-0", "", "", ""])
    assert call("align", forward, *files).out == "0-0 1-0\n0-0\n\n\n1-1\n"
    options = ("--reverse", reverse, "--gold", gold)
    answer = call("align", forward, *files, *options, "symmetrize=intersection")
    assert answer.out == "0-0\n0-0\n\n\n\n"
    assert "AER 0.0, precision 100.0, recall 100.0 (2 links)" in answer.err
    assert call("align", forward, *files, *options, "symmetrize=union").out == "0-0 1-0 1-1\n0-0 1-0\n\n\n0-0 1-1\n"
    assert_user_error(call("align", forward, *files, "symmetrize=union"), "--reverse")
    assert_user_error(call("align", forward, *files, *options, "symmetrize=threshold"), "threshold")
    write_lines(reverse, ["0-0", "0-0", "2-0", "", ""])
    assert_user_error(call("align", forward, *files, *options), "line 3: the link 2-0 is out of range")


def test_links_are_drawn_on_a_terminal(files: Files) -> None:
    """The first three pairs appear as matrices, with the links of every pair below them."""
    terminal, child = pty.openpty()
    with start_process("align", "joint-hmm", *files, stdout=child):
        os.close(child)
        text = b""
        while True:
            try:
                text += os.read(terminal, 4096)
            except OSError:  # the process has ended, and everything has been read
                break
    os.close(terminal)
    lines = re.sub(r"\x1b\[[\d;]*m", "", text.decode()).replace("\r", "").split("\n")
    matrix = ["           h", "        d  a", "        a  u", "        s  s", "  the  ███   ", "house     ███"]
    assert lines[:8] == [*matrix, "", "0-0 1-1"]
    assert text.count("█".encode()) == 3 * 2 * 3  # three drawn pairs with two links each, and the links of all pairs:
    assert [line for line in lines if re.fullmatch(r"\d.*", line)] == ["0-0 1-1"] * 4


def test_attention_of_a_run_aligns(toy: Toy, tmp_path: Path, call: Call) -> None:
    """Words of the toy language are translated in reverse order, which the trained model's attention shows."""
    sources = [sentence[:-1] for sentence in make_sentences(60, seed=5)]
    targets = [translate_toy(sentence + ".")[:-1] for sentence in sources]
    lengths = [len(source.split()) for source in sources]
    sides = (
        "--source",
        write_lines(tmp_path / "s", [*sources, ""]),
        "--target",
        write_lines(tmp_path / "t", [*targets, "ak"]),
    )
    gold = [" ".join(f"{i}-{length - 1 - i}" for i in range(length)) for length in lengths]
    score = {}
    for option in ((), ("--shift",), ("--layer", 1), ("symmetrize=threshold", "threshold=0.5")):
        gold_file = write_lines(tmp_path / "gold", [*gold, ""])
        answer = call("align", toy.run, *sides, *option, "--gold", gold_file, "--output", tmp_path / "links", "--json")
        assert answer.code == 0, answer.err
        score[option] = json.loads(answer.out)["aer"]
        assert (tmp_path / "links").read_text().split("\n")[-2] == '{"links": []}'
    assert score[()] == score["--layer", 1]  # the model has one layer
    assert min(score.values()) < 30
    assert score[()] != score[("--shift",)]


def test_bad_options_of_attention(toy: Toy, files: Files, tmp_path: Path, call: Call) -> None:
    assert_user_error(call("align", toy.run, *files, "--layer", 2), "--layer 2", "1 layer")
    assert_user_error(call("align", toy.run, *files, "--save", tmp_path / "x"), "--save", "method")
    assert_user_error(call("align", "hmm", *files, "--layer", 1), "--layer", "run folder")
    assert_user_error(call("align", toy.run, *files, "symmetrize=agreement"), "agreement")
    assert_user_error(call("align", toy.run, *files, "hmm=2"), "hmm")
    write_corpus(tmp_path)
    recipe = write_recipe(tmp_path / "recipe.yaml", train={"steps": 2, "validate_every": 2})
    text = recipe.read_text()
    recipe.write_text(
        text[: text.index("model:")]
        + "model: {kind: rnn, width: 8, attention: none}\n"
        + text[text.index("tokenizer:") :]
    )
    recurrent = train_quietly(recipe, tmp_path / "run")
    assert_user_error(call("align", recurrent, *files), "no attention that distinguishes source words")


@pytest.mark.parametrize(
    ("gold", "culprit"),
    [
        (["0-0", "0-0", "0-5", "", ""], "line 3: the link 0-5 is out of range"),
        (["0-0", "0:0", "", "", ""], "line 2: '0:0' is not a link"),
        (["0-0"], "has 1 lines but there are 5 pairs"),
    ],
)
def test_bad_gold_links(files: Files, tmp_path: Path, call: Call, gold: list[str], culprit: str) -> None:
    assert_user_error(call("align", "hmm", *files, "--gold", write_lines(tmp_path / "gold", gold)), culprit)


def test_bad_input(files: Files, tmp_path: Path, call: Call) -> None:
    shorter = write_lines(tmp_path / "shorter", TARGET[:-1])
    assert_user_error(call("align", "hmm", *files[:2], "--target", shorter), "5 lines", "4")
    assert_user_error(call("align", "hm", *files), "'hm'", "did you mean 'hmm'")
    assert_user_error(call("align", tmp_path, *files), "no alignment model")
    assert_user_error(call("align", "hmm", *files, "hm=5"), "hm", "hmm")
    assert_user_error(call("align", "hmm", *files, "symmetrize=grow-dag"), "grow-diag")
    empty = write_lines(tmp_path / "empty", ["", " "])
    assert_user_error(call("align", "hmm", "--source", empty, "--target", empty), "no pair to train on", working=True)


def test_very_long_lines_are_aligned_in_parts(tmp_path: Path, call: Call) -> None:
    """A pair of 6,000 words has 36 million cells; parts of at most 1,000 words have 6 million in all."""
    words = [f"w{number % 50}" for number in range(6000)]
    random = Random(1)
    lines = [" ".join(words), *(" ".join(random.sample(words[:50], 8)) for _ in range(200))]
    text = write_lines(tmp_path / "text", lines)
    answer = call("align", "joint-hmm", "--source", text, "--target", text)
    assert answer.code == 0
    assert "1 pairs have more than 1,000 words on a side and are aligned in parts" in answer.err
    links = set(answer.out.split("\n")[0].split())
    assert sum(f"{number}-{number}" in links for number in range(0, 6000, 100)) > 50


def test_phrasebook_is_aligned_with_few_errors(tmp_path: Path, call: Call) -> None:
    corpus = tmp_path / "corpus"
    assert call("data", "phrasebook", "--count", 2000, "--links", "--out", corpus).code == 0
    texts = ("--source", f"{corpus}.words.en", "--target", f"{corpus}.words.de")
    answer = call("align", "joint-hmm", *texts, "--gold", f"{corpus}.align", "--output", tmp_path / "links", "--json")
    assert json.loads(answer.out)["aer"] < 8

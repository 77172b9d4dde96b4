"""Phrase-based systems (model.kind=smt) on the command line: each command works with them, or refuses them."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import yaml

from dragoman.smt.settings import FEATURE_NAMES
from shared_folders import make_once
from toy_run import (
    Call,
    CommandResult,
    assert_user_error,
    fast_environment,
    make_sentences,
    start_process,
    torchrun,
    translate_toy,
    wait_until,
    write_corpus,
    write_lines,
)
from toy_smt import train_smt, write_smt_recipe

MODEL_FILES = ("model.safetensors", "lm.arpa", "weights.json", "casing.json", "checkpoints/alignment.safetensors")
ODD_LINES = [
    "", " ", "ba del!", "\u0085", "ba\u0085del", "ba\u2028del fo.", "\u2029", "ba\x00del.", "e\u0301 \u0301", "\u00a0",
    "ba\u00a0del", "ba\u3000del fo!", "<s> ba </s>", "</s>", "<unk> ba", "ba ||| del", "|||", "\ufeffba", "￭ ￭! ▁ba ▁",
    "xyz", "XYZ xyz Xyz", "👩‍👩‍👧 ba", "\u200b", "\x0b ba \x0c", "<pad> <s>", "." * 50,
]  # fmt: skip


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a corpus, a recipe and a run, which tests do not change."""
    return make_once(tmp_path_factory, "smt", train_smt)[0]


@pytest.fixture(scope="module")
def run(original: Path) -> Path:
    return original / "run"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Return a recipe with its corpus in the folder of the test."""
    write_corpus(tmp_path)
    return write_smt_recipe(tmp_path / "recipe.yaml")


def read_files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in MODEL_FILES}


def read_output(answer: CommandResult) -> list[str]:
    assert answer.code == 0, answer.err
    return answer.out.removesuffix("\n").split("\n")


# train


MOMENTS: dict[str, Callable[[Path], bool]] = {
    "beginning": lambda run: (run / "FORMAT").exists(),
    "aligning": lambda run: (run / "checkpoints" / "inputs.json").exists(),
    "extracting": lambda run: (run / "checkpoints" / "alignment.safetensors").exists(),
    "counting n-grams": lambda run: (run / "model.safetensors").exists(),
    "tuning": lambda run: (run / "checkpoints" / "tuning.safetensors").exists(),
}


def test_killed_training_resumes_to_the_same_bytes(original: Path, tmp_path: Path, call: Call) -> None:
    run, arguments = tmp_path / "run", ("train", original / "recipe.yaml", "--out", tmp_path / "run", "--resume")
    for moment in MOMENTS.values():
        with start_process(*arguments) as running:
            wait_until(lambda moment=moment: moment(run) or (run / "weights.json").exists(), running)  # type: ignore[misc]
            running.kill()
            running.communicate()
        if not (run / "weights.json").exists():
            assert_user_error(call("translate", run, "ba del fo!"), run)
    (run / "weights.json").unlink(missing_ok=True)  # so that there is something to resume
    assert_user_error(call("translate", run, "ba del fo!"), run, "not finished", "--resume")
    ended = call(*arguments)
    assert ended.code == 0, ended.err
    assert read_files(run) == read_files(original / "run")
    events = [(run / "metrics.jsonl").read_text() for run in (run, original / "run")]
    assert events[0] == events[1]
    assert not list(run.rglob(".*.tmp"))
    assert "already finished" in call(*arguments).err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_training_without_a_traceback(recipe: Path, number: signal.Signals) -> None:
    run = recipe.parent / "run"
    with start_process("train", recipe, "--out", run, "model.align.hmm=100000") as running:
        wait_until(lambda: (run / "metrics.jsonl").exists(), running)
        running.send_signal(number)
        errors = running.communicate()[1].decode()
    assert running.returncode == 128 + number, errors
    assert "Traceback" not in errors


def test_what_training_refuses_in_a_folder_with_a_run(original: Path, tmp_path: Path, call: Call) -> None:
    run = tmp_path / "run"
    shutil.copytree(original / "run", run)
    train = ("train", original / "recipe.yaml", "--out", run)
    assert_user_error(call(*train), run, "--resume")
    assert_user_error(call(*train, "--dry-run"), run, "choose another --out")
    assert_user_error(call(*train, "--resume", "model.order=4"), "model.order=3", "another folder")
    assert_user_error(call(*train, "--resume", "train.seed=4"), "train.seed=1", "another folder")
    assert_user_error(call(*train, "--init-from", run), "--init-from")
    assert read_files(run) == read_files(original / "run")


@pytest.mark.parametrize("changed", ["train.src", "dev.trg", "more.txt"])
def test_training_with_changed_data_does_not_resume(recipe: Path, call: Call, changed: str) -> None:
    folder = recipe.parent
    write_lines(folder / "more.txt", ["ak ebi."])
    train = ("train", recipe, "--out", folder / "run", "--resume", "model.lm_text=more.txt")
    assert call(*train).code == 0
    (folder / "run" / "weights.json").unlink()
    (folder / changed).write_text((folder / changed).read_text().replace("ak", "ok").replace("ba", "bo"))
    assert_user_error(call(*train), folder / "run", "data", working=True)


def test_dry_run_writes_nothing(recipe: Path, call: Call) -> None:
    before = sorted(recipe.parent.iterdir())
    answer = call("train", recipe, "--out", recipe.parent / "run", "--dry-run")
    assert answer.code == 0, answer.err
    assert "200 examples" in answer.out
    assert "smt" in answer.out
    assert [path for path in sorted(recipe.parent.iterdir()) if path.name != "home"] == before
    assert_user_error(call("train", recipe, "--out", recipe.parent / "run", "--dry-run", "--init-from", "x"), "x")


@pytest.mark.parametrize(
    ("overrides", "culprits"),
    [
        (["tokenizer.kind=bpe"], ["tokenizer.kind=word", "bpe"]),
        (["tokenizer.kind=space", "tokenizer.joint=false", "tokenizer.target_kind=word"], ["tokenizer.kind=word"]),
        (["data.train={source: train.src, target: train.trg, tag: x}", "data.dev=[]"], ["tag", "leave it out"]),
        (["data.train={source: train.src, target: train.trg, weight: 2}"], ["weight 2", "leave it out"]),
        (["data.both_ways=true"], ["data.both_ways", "leave it out"]),
        (["data.train={source: train.src, target: dev.trg}"], ["train.src", "200", "dev.trg", "20"]),
        (["data.train={source: blank, target: blank}"], ["data.train", "empty"]),
        (["data.max_length=1"], ["data.train", "data.max_length"]),
        (["model.weights={nonsense: 1}"], ["model.weights", "'nonsense'", "language model"]),
        (["model.weights={words: .nan}"], ["model.weights.words", "finite"]),
        (["model.preset=nonsense"], ["model.preset", "noisy-channel"]),
        (["model.order=0"], ["model.order", "got 0"]),
        (["model.prune=[0, -1]"], ["model.prune", "negative"]),
        (["model.lm_text=nowhere"], ["model.lm_text", "nowhere"]),
        (["model.lm_text=."], ["model.lm_text", "folder"]),
        (["model.align={ibm1: 0, hmm: 0}"], ["model.align", "model.align.ibm1"]),
        (["model.align.symmetrize=nonsense"], ["model.align.symmetrize", "grow-diag"]),
        (["model.decoder.distortion_limit=-2"], ["model.decoder.distortion_limit", "got -2"]),
        (["model.layers=3"], ["model.layers", "model.kind=smt"]),
        (["search.no_repeat=3"], ["search.no_repeat", "leave it out"]),
        (["train.optimizer=nonsense"], ["train.optimizer", "nonsense"]),
        (["data.metrics=[nonsense]"], ["metric", "nonsense"]),
    ],
)
def test_recipes_that_cannot_be_trained_are_refused(
    recipe: Path, call: Call, overrides: list[str], culprits: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(recipe.parent)
    write_lines(recipe.parent / "blank", [""] * 5)
    assert_user_error(call("train", recipe, "--out", "run", *overrides), *culprits, working=True)
    assert not Path("run").exists()


PUNCTUATION = ["...", "!!", ".", ",;", "?"]


@pytest.mark.parametrize(
    ("overrides", "pairs"),
    [
        ([], [("ba del.", "ebi ak.")]),
        (["data.dev=[]"], [("ba del.", "ebi ak.")] * 5),
        ([], list(zip(["ba del", "fo", "ne", "ra pol", "gri"], PUNCTUATION, strict=True))),
        (["data.dev={source: one.src, target: one.trg}"], []),
        (["model.order=1"], []),
        (["model.order=8", "model.prune=[0, 0, 1]"], []),
        (["model.preset=noisy-channel", "model.tuning_rounds=0"], []),
        (["model.max_phrase=1", "model.decoder.distortion_limit=0"], []),
        (["model.decoder={distortion_limit: -1, stack: 1, options: 1}"], []),
        (["model.reordering=false", "model.phrase_options=1", "tokenizer.kind=space"], []),
    ],
)
def test_unusual_recipes_give_systems_that_translate_and_score(
    recipe: Path, call: Call, overrides: list[str], pairs: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(recipe.parent)
    write_lines(Path("one.src"), ["ba del."])
    write_lines(Path("one.trg"), ["ebi ak."])
    for name, side in zip(("train.src", "train.trg"), zip(*pairs, strict=True) if pairs else (), strict=False):
        write_lines(Path(name), side)
    trained = call("train", recipe, "--out", "run", "model.tuning_rounds=1", *overrides)
    assert trained.code == 0, trained.err
    assert len(read_output(call("translate", "run", stdin=b"ba del.\n\nxyz fo!\n"))) == 3
    scored = call("score", "run/lm.arpa", "--target", "one.trg")
    assert float(scored.out) < 0, scored.err
    assert ("no dev pairs" in trained.err) == ("data.dev=[]" in overrides)


def test_additional_text_is_found_beside_the_recipe(recipe: Path, call: Call, tmp_path: Path) -> None:
    write_lines(tmp_path / "more.txt", ["ak zebra."])
    answer = call("train", recipe, "--out", tmp_path / "run", "model.lm_text=more.txt", "model.tuning_rounds=0")
    assert answer.code == 0, answer.err
    assert "zebra" in (tmp_path / "run" / "lm.arpa").read_text()


def test_settings_without_effect_are_logged(recipe: Path, call: Call) -> None:
    settings = ("train.lr=0.1", "train.steps=7", "tokenizer.size=9")
    answer = call("train", recipe, "--out", recipe.parent / "run", "--dry-run", *settings)
    assert "does not use train.steps, train.lr, tokenizer.size" in answer.err


def test_torchrun_is_refused(recipe: Path) -> None:
    arguments = ("--nproc-per-node=2", "-m", "dragoman", "train", recipe, "--out", recipe.parent / "run")
    done = subprocess.run(torchrun(*arguments), capture_output=True, text=True, env=fast_environment(), check=False)
    assert done.returncode
    assert "dragoman: model.kind=smt trains in one process" in done.stderr
    assert not (recipe.parent / "run").exists()


# translate


def test_odd_lines_keep_their_places(run: Path, call: Call) -> None:
    """There is an output line for each input line, and it does not depend on the batch or the lines around it."""
    lines = ODD_LINES + make_sentences(10, seed=5)
    whole = read_output(call("translate", run, stdin="\n".join([*lines, ""]).encode()))
    assert len(whole) == len(lines)
    assert [line for line, source in zip(whole, lines, strict=True) if not source.strip()] == [""] * 5
    assert whole[-10:] == list(map(translate_toy, lines[-10:]))
    order = list(range(len(lines)))
    Random(1).shuffle(order)
    for batch in (1, 7):
        shuffled = "\n".join([*(lines[i] for i in order), ""]).encode()
        assert read_output(call("translate", run, "--batch", batch, stdin=shuffled)) == [whole[i] for i in order]
    assert read_output(call("translate", run, "--stream", stdin="\n".join([*lines, ""]).encode())) == whole


@pytest.mark.parametrize("words", [["ba", "del", "fo", "gri"] * 500, [f"x{i}" for i in range(2000)]])
def test_a_line_of_2000_words(run: Path, call: Call, words: list[str]) -> None:
    [line] = read_output(call("translate", run, stdin=" ".join([*words, "\n"]).encode()))
    assert len(line.split()) == 2000
    assert words[0] == "ba" or sorted(line.split()) == sorted(words)  # unknown words are copied


def test_json_explains_translations(run: Path, call: Call, tmp_path: Path) -> None:
    """Features give the score, alignments sum to one, and `score` gives the same scores as the search."""
    sources = make_sentences(20, seed=7)
    records = [json.loads(line) for line in read_output(call("translate", run, *sources, "--json"))]
    weights = json.loads((run / "weights.json").read_text())["weights"]
    for record in records:
        assert tuple(record["features"]) == FEATURE_NAMES
        assert sum(weights[name] * record["features"][name] for name in FEATURE_NAMES) == pytest.approx(record["score"])
        assert len(record["alignment"]) == len(record["tokens"])
        assert [sum(row) for row in record["alignment"]] == pytest.approx([1.0] * len(record["tokens"]))
    files = write_lines(tmp_path / "source", sources), write_lines(tmp_path / "target", (r["text"] for r in records))
    scores = read_output(call("score", run, "--source", files[0], "--target", files[1]))
    assert list(map(float, scores)) == pytest.approx([record["score"] for record in records], abs=1e-4)


def test_n_best_lists(run: Path, call: Call) -> None:
    """There may be as many translations as the stack is large, not the beam of neural models."""
    rows = [row.split(" ||| ") for row in read_output(call("translate", run, "ba del fo ne!", "--nbest", 12))]
    scores = [float(score) for _, _, score in rows]
    assert len({text for _, text, _ in rows}) == len(rows) == 12
    assert scores == sorted(scores, reverse=True)
    assert [read_output(call("translate", run, "ba del fo ne!"))[0]] == [rows[0][1]]
    assert_user_error(call("translate", run, "ba", "--nbest", 12, "--beam", 2), "12", "--beam")


def test_the_beam_is_the_size_of_stacks(run: Path, call: Call) -> None:
    scores = [
        json.loads(call("translate", run, "ba del fo ne gri!", "--json", "--beam", beam).out)["score"]
        for beam in (1, 3, 200)
    ]
    assert scores == sorted(scores)
    assert scores[0] < scores[-1]


@pytest.mark.parametrize(
    ("options", "culprits"),
    [
        (["--engine", "ctranslate2"], ["model.kind=smt", "ctranslate2", "--engine"]),
        (["--engine", "torch"], ["model.kind=smt", "--engine"]),
        (["--glossary", "terms"], ["--glossary", "leave it out"]),
        (["--prefix", "ak"], ["--prefix", "leave it out"]),
        (["--dictionary", "terms"], ["dictionary", "leave"]),
        (["--with", "run"], ["run", "ensemble", "leave it out"]),
        (["--tag", "x"], ["tag 'x'", "without tags"]),
        (["--device", "nonsense"], ["nonsense", "cpu"]),
        (["--beam", "0"], ["--beam"]),
        (["search.no_repeat=3"], ["search.no_repeat", "leave it out"]),
        (["search.method=sample"], ["search.method", "leave it out"]),
    ],
)
def test_options_of_other_models_are_refused(
    original: Path, call: Call, options: list[str], culprits: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run").symlink_to(original / "run")
    write_lines(Path("terms"), ["gri\tak"])
    assert_user_error(call("translate", "run", "ba del fo!", *options), *culprits)


@pytest.mark.parametrize(("typed", "drawn"), [(["ba del fo!"], True), ([], False), (["ba del fo!", "--json"], False)])
def test_alignments_are_drawn_for_sentences_typed_as_arguments(run: Path, typed: list[str], drawn: bool) -> None:
    ours, theirs = pty.openpty()
    streams = {"stdin": None if typed else theirs, "stdout": theirs}
    with start_process("translate", run, *typed, **streams) as running:
        if not typed:
            os.write(ours, b"ba del fo!\n\x04")
        assert running.wait() == 0
    os.close(theirs)
    output = os.read(ours, 100_000).decode()
    os.close(ours)
    assert "ol ebi ak!" in output
    assert ("█" in output) == drawn


def test_a_run_folder_can_be_copied_and_read_only(original: Path, tmp_path: Path, call: Call) -> None:
    run = tmp_path / "copy"
    shutil.copytree(original / "run", run)
    shutil.rmtree(run / "checkpoints")
    for path in (*run.rglob("*"), run):
        path.chmod(0o500 if path.is_dir() else 0o400)
    assert read_output(call("translate", run, "ba del fo!")) == ["ol ebi ak!"]
    run.chmod(0o700)


@pytest.mark.parametrize("damage", [None, lambda content: content[: len(content) // 2], lambda _: b"\xff\x00nonsense"])
@pytest.mark.parametrize(
    "name",
    ["FORMAT", "config.yaml", "casing.json", "lm.arpa", "model.safetensors", "weights.json", "tokenizer/source.json"],
)
def test_damaged_files_are_named(
    run: Path, tmp_path: Path, call: Call, name: str, damage: Callable[[bytes], bytes] | None
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    path = copy / name
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()[:-1]))
    answer = call("translate", copy, "ba del fo!")
    culprit = copy if name == "weights.json" and damage is None else name  # then training is not finished
    assert_user_error(answer, culprit)


# evaluate, score, info


def test_evaluation(original: Path, tmp_path: Path, call: Call) -> None:
    run = tmp_path / "run"
    shutil.copytree(original / "run", run)
    files = ("--source", original / "dev.src", "--reference", original / "dev.trg")
    page = tmp_path / "page.html"
    answer = call("evaluate", run, *files, "--breakdown", "--page", page)
    assert answer.code == 0, answer.err
    assert "BLEU by source length" in answer.out
    assert page.exists()
    [record] = map(json.loads, (run / "scores.jsonl").read_text().splitlines())
    assert (record["engine"], record["beam"]) == ("smt", 100)
    assert_user_error(call("evaluate", run, *files, "--engine", "torch"), "--engine", "model.kind=smt")
    assert_user_error(call("evaluate", run), "data.test", "--source")


def test_targets_that_cannot_be_produced_have_no_score(run: Path, tmp_path: Path, call: Call) -> None:
    source = write_lines(tmp_path / "source", ["ba del fo!", "", "ba del fo!", "ba"])
    target = write_lines(tmp_path / "target", ["ol ebi ak!", "", "something else", ""])
    answer = call("score", run, "--source", source, "--target", target)
    scores = read_output(answer)
    assert [score == "nan" for score in scores] == [False, False, True, True]
    assert "line 3: without a score" in answer.err
    records = [
        json.loads(line) for line in read_output(call("score", run, "--source", source, "--target", target, "--json"))
    ]
    assert [record["logp"] is None for record in records] == [False, False, True, True]
    assert_user_error(call("score", run, "--target", target), "--source")


def test_language_models_score_text(run: Path, tmp_path: Path, call: Call) -> None:
    model, target = run / "lm.arpa", write_lines(tmp_path / "text", ["ak ebi", "", "unheard of"])
    answer = call("score", model, "--target", target)
    assert [float(score) < 0 for score in read_output(answer)] == [True] * 3
    assert "perplexity" in answer.err
    assert "2 unknown words" in answer.err
    assert "no perplexity" in call("score", model, "--target", write_lines(tmp_path / "nothing", [])).err
    assert_user_error(call("score", model, "--target", tmp_path / "nowhere"), "nowhere")
    assert_user_error(call("score", model, "--target", target, "--source", target), "--source")
    assert_user_error(call("score", tmp_path / "no.arpa", "--target", target), "no.arpa")
    content, cut = model.read_bytes(), tmp_path / "cut.arpa"
    for size in (0, 10, 60, len(content) // 2, len(content) - 20):
        cut.write_bytes(content[:size])
        assert_user_error(call("score", cut, "--target", target), cut)


def test_model_card(run: Path, call: Call) -> None:
    for option in ((), ("--markdown",)):
        text = "\n".join(read_output(call("info", run, *option)))
        for part in ("smt", "align.hmm 3", "tuning_rounds 2", "200 pairs", "decoder.stack 100"):
            assert part in text
    card = json.loads(call("info", run, "--json").out)
    assert card["tokens_read"] == sum(len(line.split()) for name in ("src", "trg") for line in open_lines(run, name))


def open_lines(run: Path, side: str) -> list[str]:
    return (run.parent / f"train.{side}").read_text().splitlines()


# Other commands


def test_commands_for_neural_models_refuse(original: Path, tmp_path: Path, call: Call) -> None:
    run, recipe = original / "run", original / "recipe.yaml"
    for target in ("ctranslate2", "huggingface", "onnx"):
        assert_user_error(call("export", run, tmp_path / "out", "--to", target), "model.kind=smt")
    assert_user_error(call("fit", recipe), "model.kind=smt")
    assert_user_error(call("generate", run), "dragoman translate")
    assert_user_error(call("classify", run, "ba"), "dragoman translate")
    neural = ("model={layers: 1, width: 16, heads: 2}", "train.steps=2")
    assert_user_error(call("distil", run, recipe, *neural, "-o", tmp_path / "out"), run, "dragoman translate")
    train = ("train", recipe, "--out", tmp_path / "out", "--init-from", run)
    assert_user_error(call(*train, *neural), "phrase-based", "--init-from")
    assert not (tmp_path / "out").exists()


def test_backtranslation(original: Path, tmp_path: Path, call: Call) -> None:
    answer = call("backtranslate", original / "run", "-i", original / "dev.src", "-o", tmp_path / "pairs.jsonl")
    assert answer.code == 0, answer.err
    pairs = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    assert [pair["source"] for pair in pairs] == [translate_toy(pair["target"]) for pair in pairs]


@pytest.mark.usefixtures("fast_processes")
def test_comparison_with_a_neural_model(recipe: Path, tmp_path: Path, call: Call) -> None:
    """The report has both models; only the neural one has a budget."""
    neural = yaml.safe_load(recipe.read_text()) | {
        "model": {"layers": 1, "width": 16, "heads": 2},
        "train": {"steps": 4, "tokens": 128, "validate_every": 2, "device": "cpu", "precision": "float32"},
    }
    (tmp_path / "neural.yaml").write_text(yaml.safe_dump(neural))
    answer = call("compare", recipe, tmp_path / "neural.yaml", "--out", tmp_path / "out")
    assert answer.code == 0, answer.err
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [model["name"] for model in report["models"]] == ["recipe", "neural"]
    assert report["about"]["budget"] == {"steps": 4}
    assert (tmp_path / "out" / "report.html").exists()

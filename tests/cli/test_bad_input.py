"""Invalid input of every kind gives exit code 2 and one sentence that names the cause."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import yaml
from safetensors.torch import save_file

from dragoman import io as file_io
from dragoman.data import corpus
from dragoman.data.corpus import CorpusSettings
from dragoman.errors import UserError
from dragoman.inference.loading import load
from dragoman.io import HEADER_KEY
from dragoman.phrasebook.generate import generate_pairs
from dragoman.run_dir import CHANGED, DIGEST_LINE, load_tensors, save_tensors
from toy_run import Call, Toy, assert_user_error, files, run_process, write_corpus, write_lines, write_recipe


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a valid corpus and recipe, and files that are invalid in every way."""
    folder = tmp_path_factory.mktemp("bad input")
    write_corpus(folder, train=60, dev=10)
    write_recipe(folder / "recipe.yaml", tokenizer={"kind": "char"}, train={"steps": 1})
    write_lines(folder / "short", ["ba."] * 59)
    write_lines(folder / "empty", [])
    (folder / "directory").mkdir()
    (folder / "taken.dev.target").mkdir()
    (folder / "latin1").write_bytes(b"ba.\nba.\ngr\xfcn.\n" + b"ba.\n" * 57)
    whole = gzip.compress((folder / "train.src").read_bytes())
    (folder / "cut.gz").write_bytes(whole[:-9])
    (folder / "not.gz").write_bytes(b"ba.\n" * 60)
    (folder / "one.tsv").write_text("ba.\tak.\nba.\n")
    (folder / "one.jsonl").write_text('{"source": "ba.", "target": "ak."}\n{"source": "ba."}\n')
    (folder / "torn.jsonl").write_text('{"source": "ba.", "target": "ak."}\n{"sour\n')
    for name, text in RECIPES.items():
        (folder / name).write_text(text)
    (folder / "latin1.yaml").write_bytes(b"# gr\xfcn\ndata: {}\n")
    return folder


RECIPES = {
    "broken.yaml": "data:\n  train: {source: [a\n",
    "tabs.yaml": "data:\n\ttrain: x\n",
    "list.yaml": "- data\n- model\n",
    "empty.yaml": "",
    "prose.yaml": "once upon a time",
    "nothing.yaml": "train: {steps: 1}\n",
    "half.yaml": "data: {train: {source: train.src}}\n",
    "twice.yaml": "data: {train: {source: train.src, target: train.trg, tsv: x}}\n",
}

FILES = {  # what stands in the place of the source: whom the sentence must name
    "short": ("short", "59", "60"),
    "empty": ("empty",),
    "directory": ("directory", "folder"),
    "missing": ("missing",),
    "latin1": ("latin1", "line 3", "UTF-8"),
    "cut.gz": ("cut.gz", "cut short"),
    "not.gz": ("not.gz", "damaged"),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("split", ["train", "dev"])
def test_invalid_corpus_file_is_refused(folder: Path, tmp_path: Path, call: Call, split: str, name: str) -> None:
    swap = f"data.{split}={{source: {folder / name}, target: {folder / 'train.trg'}}}"
    answer = call("train", folder / "recipe.yaml", "--out", tmp_path / "run", f"data.cache={tmp_path}", swap)
    assert_user_error(answer, *FILES[name], working=True)
    assert not (tmp_path / "run").exists()


def test_failed_start_keeps_existing_files(folder: Path, tmp_path: Path, call: Call) -> None:
    """An empty folder is kept, and so is a run that cannot be resumed."""
    (run := tmp_path / "run").mkdir()
    wrong = f"data.train={{source: {folder / 'latin1'}, target: {folder / 'train.trg'}}}"
    assert call("train", folder / "recipe.yaml", "-o", run, f"data.cache={tmp_path}", wrong).code == 2
    assert run.exists()


@pytest.mark.parametrize("split", ["train", "dev", "test"])
def test_first_row_is_checked_before_training(folder: Path, tmp_path: Path, call: Call, split: str) -> None:
    (tmp_path / "wide.tsv").write_text("a\tb\n" * 20)
    corpus = f"data.{split}={{tsv: {tmp_path / 'wide.tsv'}, columns: [0, 2]}}"
    answer = call("train", folder / "recipe.yaml", "-o", tmp_path / "run", f"data.cache={tmp_path}", corpus)
    assert_user_error(answer, "wide.tsv line 1 has 2 columns")


@pytest.mark.parametrize(
    ("corpus", "culprits"),
    [
        ("{tsv: one.tsv}", ("one.tsv line 2", "1 column")),
        ("{jsonl: one.jsonl}", ("one.jsonl line 2", "'target'")),
        ("{jsonl: torn.jsonl}", ("torn.jsonl line 2", "JSON")),
        ("{tsv: missing.tsv}", ("missing.tsv",)),
    ],
)
def test_invalid_table_is_refused(
    folder: Path, tmp_path: Path, call: Call, corpus: str, culprits: tuple[str, ...]
) -> None:
    answer = call("train", folder / "recipe.yaml", "--out", tmp_path / "run", f"data.train={corpus}")
    assert_user_error(answer, *culprits, working=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["stats", "clean"])
@pytest.mark.parametrize("name", FILES)
def test_data_commands_refuse_invalid_files(folder: Path, tmp_path: Path, call: Call, command: str, name: str) -> None:
    out = ("--out", tmp_path / "clean") if command == "clean" else ()
    answer = call("data", command, "--source", folder / name, "--target", folder / "train.trg", *out)
    assert_user_error(answer, *FILES[name])
    assert files(tmp_path) == []


@pytest.mark.parametrize("name", [name for name in FILES if name not in ("short", "empty")])
def test_translate_refuses_invalid_files(toy: Toy, folder: Path, tmp_path: Path, call: Call, name: str) -> None:
    answer = call("translate", toy.run, "--input", folder / name, "--output", tmp_path / "out")
    assert_user_error(answer, *FILES[name])
    assert files(tmp_path) == []


def test_translate_refuses_invalid_stdin(toy: Toy, call: Call) -> None:
    answer = call("translate", toy.run, stdin=b"ba.\ngr\xfcn.\n")
    assert answer.code == 2
    assert "line 2" in answer.err


@pytest.mark.parametrize(
    ("name", "culprits"),
    [
        ("missing.yaml", ("missing.yaml",)),
        ("directory", ("directory", "folder")),
        ("broken.yaml", ("broken.yaml line 3", "YAML")),
        ("tabs.yaml", ("tabs.yaml line 2", "YAML")),
        ("list.yaml", ("list.yaml", "data:")),
        ("empty.yaml", ("empty.yaml", "data:")),
        ("prose.yaml", ("prose.yaml", "data:")),
        ("latin1.yaml", ("latin1.yaml", "line 1", "UTF-8")),
        ("nothing.yaml", ("data.train",)),
        ("half.yaml", ("half.yaml", "data.train", "target")),
        ("twice.yaml", ("twice.yaml", "data.train", "tsv")),
        ("short/recipe.yaml", ("short/recipe.yaml",)),
    ],
)
def test_invalid_recipe_file_is_refused(
    folder: Path, tmp_path: Path, call: Call, name: str, culprits: tuple[str]
) -> None:
    assert_user_error(call("train", folder / name, "--out", tmp_path / "run"), *culprits)


@pytest.mark.parametrize(
    ("setting", "culprits"),
    [
        ("train.stepps=5", ("'train.stepps'", "'steps'")),
        ("trian.steps=5", ("'trian'", "'train'")),
        ("model.heds=2", ("'model.heds'", "'heads'")),
        ("data.train.sorce=x", ("sorce", "'source'")),
        ("serach.beam=2", ("'serach'", "'search'")),
        ("train.steps", ("'train.steps'", "train.steps=1000")),
        ("=5", ("'=5'",)),
        ("train=5", ("train", "5")),
        ("train.steps.more=5", ("'train.steps.more=5'", "'steps'")),
        ("train.steps=many", ("train.steps", "'many'")),
        ("train.steps=1.5", ("train.steps", "1.5")),
        ("train.steps=-1", ("train.steps", "-1")),
        ("train.steps=true", ("train.steps", "True")),
        ("train.lr=fast", ("train.lr", "'fast'")),
        ("train.lr=0", ("train.lr", "0")),
        ("train.lr=.nan", ("train.lr", "nan")),
        ("train.label_smoothing=1.5", ("train.label_smoothing", "1.5")),
        ("train.ema=1", ("train.ema", "1")),
        ("train.tokens=3", ("train.tokens", "64")),
        ("train.seed=-1", ("train.seed", "-1")),
        ("train.freeze=encoder", ("train.freeze", "'encoder'")),
        ("model.width=33", ("model.width", "33")),
        ("model.heads=0", ("model.heads", "0")),
        ("model.dropout=1.0", ("model.dropout", "1.0")),
        ("tokenizer.joint=maybe", ("tokenizer.joint", "'maybe'")),
        ("tokenizer.size=1", ("tokenizer.size", "8")),
        ("train.steps=0", ("train.steps", "train.minutes")),
        ("train.average=9", ("train.average=9", "train.keep")),
        ("data.train={phrasebook: 5, split: tarin}", ("'tarin'", "'train'")),
        ("data.train=[]", ("data.train",)),
        ("data.train={source: a, target: b, weight: -1}", ("weight", "-1")),
        ("train.device=gpu", ("'gpu'", "cuda")),
        ("train.device=cuda:99", ("'cuda:99'",)),
        ("data.dev=[] & train.patience=3", ("train.patience", "data.dev")),
        ("data.dev=[] & train.average=2", ("train.average", "data.dev")),
        ("train.validate_every=0 & train.patience=1", ("train.patience", "train.validate_every")),
        ("train.validate_every=0 & train.average=2", ("train.average", "train.validate_every")),
        ("train.metric=chrf & train.validate_lines=0", ("train.metric=chrf", "train.validate_lines=0")),
        ("train.optimizer=muon & model.query_width=16", ("train.optimizer=muon", "model.query_width")),
        ("train.freeze=[nothing]", ("train.freeze", "'nothing'")),
        ("train.freeze=['*']", ("train.freeze", "nothing to train")),
        ("model.reach=100000000", ("model.reach", "65536")),
        ("tokenizer.target_size=50", ("target_size", "tokenizer.joint")),
        ("data.metrics=bleu", ("data.metrics", "a list", "'bleu'")),
        ("data.train={tsv: one.tsv, columns: [0]}", ("columns.1", "should be set")),
        ("data.train={tsv: one.tsv, columns: [0, 1, 2]}", ("columns", "a list of 2")),
        ("data.train={tsv: one.tsv, columns: [-1, 0]}", ("columns", "-1")),
        ("data.train={tsv: missing.tsv}", ("missing.tsv",)),
        ("data.dev={source: train.src, target: missing}", ("missing",)),
        ("data.test={tsv: missing.tsv}", ("missing.tsv",)),
        ("data.test={text: train.src}", ("data.test", "plain text")),
    ],
)
def test_invalid_setting_is_refused(
    folder: Path, tmp_path: Path, call: Call, setting: str, culprits: tuple[str, ...]
) -> None:
    """Errors that can be found without reading the corpora are reported before anything is written."""
    cache = f"data.cache={tmp_path / 'cache'}"
    answer = call("train", folder / "recipe.yaml", "--out", tmp_path / "run", cache, *setting.split(" & "))
    assert_user_error(answer, *culprits)
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("setting", "library", "extra"),
    [
        ("data.metrics=[bleu, bleu_moses_de]", "sacremoses", "moses"),
        ("data.metrics=[rougeL]", "rouge_score", "rouge"),
        ("train.metric=rougeL", "rouge_score", "rouge"),
    ],
)
def test_metric_without_its_library_is_refused(
    folder: Path,
    tmp_path: Path,
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    library: str,
    extra: str,
) -> None:
    """The error is reported before training, not when the scores are computed."""
    monkeypatch.setitem(sys.modules, library, None)
    name, _, metric = setting.strip("]").replace("[", "").replace("bleu, ", "").partition("=")
    answer = call("train", folder / "recipe.yaml", "--out", tmp_path / "run", setting)
    assert_user_error(answer, f"{name}: {metric} needs {library}", f"pip install 'dragoman[{extra}]'")
    assert files(tmp_path) == []


MENUS = {  # a misspelt name: the one that was meant
    "tokenizer.kind=bqe": "'bpe'",
    "model.kind=transfromer": "'transformer'",
    "model.norm=leyer": "'layer'",
    "model.norm_place=pro": "'pre'",
    "model.activation=rellu": "'relu'",
    "model.position=sinusodial": "'sinusoidal'",
    "model.kernel=fuzed": "'fused'",
    "train.optimizer=admaw": "'adamw'",
    "train.schedule=cosin": "'cosine'",
    "train.precision=bf61": "'bf16'",
    "train.metric=blue": "'bleu'",
    "train.compile=yess": "'auto'",
    "data.direction=en-ed": "'en-de'",
}


@pytest.mark.parametrize("setting", MENUS)
def test_misspelt_choice_is_corrected(folder: Path, tmp_path: Path, call: Call, setting: str) -> None:
    run = tmp_path / "run"
    answer = call("train", folder / "recipe.yaml", "--out", run, setting, f"data.cache={tmp_path}")
    assert_user_error(answer, repr(setting.partition("=")[2]), MENUS[setting])
    assert not run.exists()


def test_too_large_vocabulary_is_refused(folder: Path, tmp_path: Path, call: Call) -> None:
    """The message names the largest possible size, and training with this size works."""
    command = [
        "train",
        folder / "recipe.yaml",
        "--out",
        tmp_path / "run",
        f"data.cache={tmp_path}",
        "tokenizer.kind=bpe",
    ]
    answer = call(*command, "tokenizer.size=50000")
    assert_user_error(answer, "tokenizer.size 50000", "largest that works here is", working=True)
    largest = int(answer.err.split()[-1])
    assert_user_error(call(*command, f"tokenizer.size={largest + 1}"), largest + 1, working=True)
    assert call(*command, f"tokenizer.size={largest}").code == 0


def test_corpus_without_usable_pairs_is_named(folder: Path, tmp_path: Path, call: Call) -> None:
    cache = f"data.cache={tmp_path}"
    answer = call("train", folder / "recipe.yaml", "--out", tmp_path / "run", "data.max_length=1", cache)
    assert_user_error(answer, "data.train", folder / "train.src", "none of 60 pairs", "data.max_length", working=True)


# Run folders.


@pytest.fixture
def run(toy: Toy, tmp_path: Path) -> Path:
    """Return a copy of the toy run that a test may damage."""
    return shutil.copytree(toy.run, tmp_path / "run")


FOLDERS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "missing": (shutil.rmtree, ("there is no run folder",)),
    "empty": (lambda run: [shutil.rmtree(run), run.mkdir()], ("not a run folder",)),
    "a file": (lambda run: [shutil.rmtree(run), run.write_text("x")], ("no run folder",)),
    "from the future": (lambda run: (run / "FORMAT").write_text("99\n"), ("format 99", "update")),
    "from nowhere": (lambda run: (run / "FORMAT").write_text("two\n"), ("FORMAT", "damaged")),
    "without config": (lambda run: (run / "config.yaml").unlink(), ("config.yaml",)),
    "from nowhere near": (lambda run: (run / "FORMAT").write_text("9" * 5000), ("FORMAT", "damaged")),
    "without model": (lambda run: (run / "model.safetensors").unlink(), ("model.safetensors", "missing", "--resume")),
    "just begun": (
        lambda run: [(run / "model.safetensors").unlink(), shutil.rmtree(run / "checkpoints")],
        ("no model yet",),
    ),
    "changed model": (lambda run: change(run, "norm: layer", "norm: lyer"), ("config.yaml", "'layer'")),
    "changed settings": (lambda run: change(run, "seed: 1\n", "seed: one\n"), ("config.yaml", "seed", "'one'")),
    "without tokenizer": (lambda run: shutil.rmtree(run / "tokenizer"), ("tokenizer.json",)),
    "without pieces": (lambda run: (run / "tokenizer/joint.model").unlink(), ("joint.model",)),
    "half a model": (lambda run: halve(run / "model.safetensors"), ("model.safetensors",)),
    "half a config": (lambda run: halve(run / "config.yaml"), ("config.yaml",)),
    "half a tokenizer": (lambda run: halve(run / "tokenizer/joint.model"), ("joint.model",)),
    "half an index": (lambda run: halve(run / "tokenizer/tokenizer.json"), ("tokenizer.json",)),
    "empty model": (lambda run: (run / "model.safetensors").write_bytes(b""), ("model.safetensors",)),
    "flipped model": (lambda run: flip(run / "model.safetensors", 50_000), ("model.safetensors", "damaged")),
    "flipped config": (lambda run: flip(run / "config.yaml", 100), ("config.yaml",)),
    "flipped tokenizer": (lambda run: flip(run / "tokenizer/joint.model", 2000), ("joint.model", "damaged")),
}


def change(run: Path, old: str, new: str) -> None:
    """Edit the settings by hand, and say so."""
    text = (run / "config.yaml").read_text()
    assert old in text
    body = text.replace(old, new).rpartition(DIGEST_LINE)[0]
    (run / "config.yaml").write_text(f"{body}{DIGEST_LINE}{CHANGED}\n")


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("what", FOLDERS)
def test_damaged_run_folder_is_refused(run: Path, call: Call, what: str) -> None:
    spoil, culprits = FOLDERS[what]
    spoil(run)
    assert_user_error(call("translate", run, stdin=b"ba.\n"), run, *culprits)
    assert_user_error(call("info", run), run, *culprits)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.yaml", "tokenizer/joint.model", "tokenizer/tokenizer.json"]
)
def test_every_flipped_byte_is_detected(run: Path, name: str) -> None:
    """Flip bytes of header and content, including the first and the last."""
    whole = (run / name).read_bytes()
    random = Random(7)
    places = {0, 7, 8, 20, len(whole) - 2, *random.sample(range(min(len(whole), 4000)), 25)}
    for place in sorted(places | {random.randrange(len(whole)) for _ in range(10)}):
        flip(run / name, place)
        with pytest.raises(UserError, match=str(run)):
            load(run)
        (run / name).write_bytes(whole)
    assert load(run).translate(["ba."])


def test_incomplete_record_does_not_prevent_the_model_card(run: Path, call: Call) -> None:
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"event": "train", "st')
    assert call("info", run).code == 0


def test_damaged_checkpoint_is_not_resumed(toy: Toy, run: Path, call: Call) -> None:
    for name in ("model.safetensors", "optimizer.safetensors", "state.json"):
        [path] = (run / "checkpoints").glob(f"step-*/{name}")
        whole = path.read_bytes()
        halve(path)
        answer = call("train", toy.recipe, "--out", run, "--resume", "train.steps=331")
        assert_user_error(answer, path, working=True)
        path.write_bytes(whole)


# The command line itself.


@pytest.mark.parametrize(
    ("arguments", "culprits"),
    [
        (["trane"], ("'trane'", "dragoman --help")),
        (["train"], ("dragoman train --help",)),
        (["train", "r.yaml"], ("--out",)),
        (["train", "r.yaml", "--out", "x", "--resmue"], ("--resmue", "--resume")),
        (["translate"], ("dragoman translate --help",)),
        (["translate", "RUN", "--beam", "0"], ("--beam", "1")),
        (["translate", "RUN", "--beam", "wide"], ("--beam", "integer")),
        (["translate", "RUN", "--nbest", "0"], ("--nbest", "1")),
        (["translate", "RUN", "--engine", "steam"], ("'steam'", "torch")),
        (["translate", "RUN", "--device", "gpu"], ("'gpu'", "cuda")),
        (["translate", "RUN", "--device", "cuda:99"], ("'cuda:99'",)),
        (["translate", "RUN", "--nbest", "5"], ("5", "--beam 5")),
        (["evaluate", "RUN"], ("--source", "--reference")),
        (["evaluate", "RUN", "--source", "train.src"], ("--reference",)),
        (["evaluate", "RUN", "--phrasebook", "tset"], ("'tset'", "'test'")),
        (["evaluate", "RUN", "--source", "train.src", "--reference", "short"], ("train.src", "60", "short", "59")),
        (["evaluate", "RUN", "--source", "empty", "--reference", "empty"], ("empty",)),
        (["evaluate", "RUN", "--source", "train.src", "--reference", "missing"], ("missing",)),
        (["evaluate", "RUN", "--source", "train.src", "--reference", "latin1"], ("latin1", "line 3")),
        (["data", "stats"], ("source", "tsv")),
        (["data", "stats", "--source", "train.src"], ("target",)),
        (["data", "sats"], ("'sats'",)),
        (["data", "clean", "--tsv", "one.tsv", "--out", "x", "max_ration=3"], ("'max_ration'", "'max_ratio'")),
        (["data", "clean", "--tsv", "one.tsv", "--out", "short/where"], ("short/where", "Not a directory", "--out")),
        (["data", "split", "--tsv", "missing.tsv", "--out", "short/where"], ("short/where", "Not a directory")),
        (["data", "split", "--tsv", "missing.tsv", "--out", "taken"], ("taken.dev.target", "folder", "--out")),
        (["data", "split", "--tsv", "missing.tsv", "--out", "new/where"], ("missing.tsv",)),
        (["data", "phrasebook", "--out", "x", "--split", "tarin"], ("'tarin'", "'train'")),
        (["data", "phrasebook", "--out", "short/no/where", "--count", "2"], ("short/no/where", "Not a directory")),
        (["data", "phrasebook", "--out", "x", "--count", "0"], ("--count", "1")),
    ],
)
def test_invalid_command_is_refused(
    toy: Toy, folder: Path, monkeypatch: pytest.MonkeyPatch, call: Call, arguments: list[str], culprits: tuple[str]
) -> None:
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    assert_user_error(call(*(toy.run if word == "RUN" else word for word in arguments), stdin=b"ba.\n"), *culprits)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        (["trane"], "'trane'"),
        (["train", "list.yaml", "--out", "run"], "list.yaml"),
        (["train", "recipe.yaml", "--out", "run", "train.stepps=1"], "'train.stepps'"),
        (["train", "recipe.yaml", "--out", "run", "data.train={source: missing, target: train.trg}"], "missing"),
        (["translate", "directory"], "directory"),
        (["data", "stats", "--source", "cut.gz", "--target", "train.trg"], "cut.gz"),
    ],
)
def test_errors_in_separate_processes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], culprit: str
) -> None:
    monkeypatch.chdir(folder)
    assert_user_error(run_process(*arguments), culprit, working=True)
    shutil.rmtree(folder / "run", ignore_errors=True)


# Source and target the wrong way round.


def test_statistics_show_swapped_sides(tmp_path: Path, call: Call) -> None:
    pairs = list(generate_pairs("train", 200))
    english = write_lines(tmp_path / "train.en", (pair.source for pair in pairs))
    german = write_lines(tmp_path / "train.de", (pair.target for pair in pairs))
    right = call("data", "stats", "--source", english, "--target", german)
    assert "source looks like en" in right.out
    assert "target looks like de" in right.out
    wrong = call("data", "stats", "--source", german, "--target", english, "--json")
    assert "source looks like de" in json.loads(wrong.out)["notes"][0]
    assert "target looks like en" in json.loads(wrong.out)["notes"][0]


# Run folders that somebody has tampered with.


@pytest.fixture
def copied(toy: Toy, tmp_path: Path) -> Path:
    """Return a copy of the toy run without its checkpoints."""
    return Path(shutil.copytree(toy.run, tmp_path / "copy", ignore=shutil.ignore_patterns("checkpoints")))


NOTES: dict[str, dict[str, str]] = {
    "no longest": {},
    "longest a word": {"longest": "x"},
    "longest of 5000 digits": {"longest": "9" * 5000},
    "longest negative": {"longest": "-1"},
    "longest infinite": {"longest": float("inf")},  # type: ignore[dict-item]
    "usual too short": {"longest": "9", "usual": "[1]"},
    "usual of words": {"longest": "9", "usual": '["a", "b", "c"]'},
    "usual nested": {"longest": "9", "usual": "[" * 100_000},
}


@pytest.mark.parametrize("notes", NOTES.values(), ids=list(NOTES))
def test_damaged_metadata_of_weights(copied: Path, call: Call, notes: dict[str, str]) -> None:
    weights, about = load_tensors(copied / "model.safetensors")
    save_tensors(copied / "model.safetensors", weights, **{"tokenizer": about["tokenizer"]} | notes)
    assert_user_error(call("translate", copied, stdin=b"ba.\n"), "model.safetensors", "damaged")


def test_too_deeply_nested_metadata(copied: Path, call: Call) -> None:
    weights, _ = load_tensors(copied / "model.safetensors")
    save_file(weights, copied / "model.safetensors", {HEADER_KEY: "[" * 100_000})
    assert_user_error(call("translate", copied, stdin=b"ba.\n"), "model.safetensors", "damaged")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(copied: Path, call: Call, value: float) -> None:
    weights, about = load_tensors(copied / "model.safetensors")
    name = next(iter(weights))
    weights[name].view(-1)[0] = value
    save_tensors(copied / "model.safetensors", weights, **about)
    assert_user_error(call("translate", copied, stdin=b"ba.\n"), "not finite", name)


@pytest.mark.parametrize(
    "name", ["FORMAT", "config.yaml", "model.safetensors", "tokenizer/tokenizer.json", "metrics.jsonl"]
)
def test_pipe_in_a_run_folder_does_not_block(copied: Path, name: str) -> None:
    (copied / name).unlink()
    os.mkfifo(copied / name)
    with pytest.raises(UserError, match=f"{name}' is a pipe, socket or device"):
        load(copied)


@pytest.mark.parametrize("cache", ['"a\\0b"', "~nosuchuser/x"])
def test_unusable_cache_folder_is_refused(small: Path, tmp_path: Path, call: Call, cache: str) -> None:
    values = yaml.safe_load(small.read_text())
    values["data"]["cache"] = yaml.safe_load(cache)
    small.write_text(yaml.safe_dump(values))
    assert_user_error(call("train", small, "--out", tmp_path / "run"), "data.cache", working=True)


def test_too_long_line_is_refused(toy: Toy, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before tokenization, which needs a hundred times its size; training text may have such lines."""
    monkeypatch.setattr(file_io.read_lines, "__kwdefaults__", {"longest": 1 << 20})
    monkeypatch.setattr(file_io, "LONGEST_LINE", 1 << 20)
    monkeypatch.setattr(corpus, "LONGEST_LINE", 1 << 20)
    bomb = tmp_path / "bomb.gz"
    bomb.write_bytes(gzip.compress(b"ba.\n" + b"x" * (2 << 20)))
    assert_user_error(call("translate", toy.run, "--input", bomb), "bomb.gz line 2", "more than the 1 MiB allowed")
    assert_user_error(call("translate", toy.run, "--input", "/dev/zero"), "/dev/zero line 1")
    assert_user_error(call("data", "stats", "--source", bomb, "--target", bomb), "bomb.gz line 2")
    pairs = list(corpus.read_pairs(CorpusSettings(text=str(bomb))))
    assert [len(pair.target) for pair in pairs] == [3, 2 << 20]

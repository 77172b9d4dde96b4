"""Students learn what their teacher says and keep its tokenizer; killed and resumed they are the same to the bit."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dragoman.augmentation import distillation as room
from dragoman.augmentation import jobs as shards
from dragoman.augmentation.backtranslation import TranslationFilter, find_faults
from dragoman.augmentation.distillation import DistilSettings, distil
from dragoman.augmentation.jobs import ShardedJob
from dragoman.data.corpus import CorpusSettings, read_pairs
from dragoman.errors import UserError
from dragoman.inference.loading import load, load_as
from dragoman.inference.postprocess import FLAG_REPEATS, get_warning_kind
from dragoman.inference.translator import NO_TREE_WARNING, Translator
from dragoman.metrics.metrics import METRICS
from dragoman.models.registry import Cost, build_model
from dragoman.process_group import ProcessGroup
from dragoman.progress import INFO, ProgressBar, Report
from dragoman.recipe import read_recipe
from dragoman.run_dir import CHANGED, DIGEST_LINE, RunFolder
from dragoman.types import Hypothesis, Pair
from toy_run import (
    SMALL,
    Call,
    Toy,
    assert_same_runs,
    assert_user_error,
    fast_environment,
    make_sentences,
    read_last_step,
    run_process,
    start_process,
    torchrun,
    translate_toy,
    wait_until,
    write_lines,
    write_recipe,
)

STUDENT = {"kind": "hybrid", "encoder_layers": 2, "width": 16, "heads": 2, "cell": "gru"}
ROOT = Path(__file__).parents[2]
STUDENTS = sorted((ROOT / "recipes" / "students").glob("*.yaml"))
SHORT = ["train.steps=1", "train.validate_lines=0"]
LINES = 60


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A student of the toy language. Its references are wrong, so that whatever it learns comes from its teacher."""
    sources = make_sentences(LINES, seed=5)
    write_lines(tmp_path / "train.src", sources)
    write_lines(tmp_path / "train.trg", ["no such thing"] * LINES)
    write_lines(tmp_path / "dev.src", dev := make_sentences(8, seed=6))
    write_lines(tmp_path / "dev.trg", map(translate_toy, dev))
    path = write_recipe(tmp_path / "student.yaml", train=SMALL["train"])
    whole = {**yaml.safe_load(path.read_text()), "model": STUDENT}
    del whole["tokenizer"]
    path.write_text(yaml.safe_dump(whole))
    return path


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards so small that a corpus of a few lines has several."""
    monkeypatch.setattr(shards, "SHARD_SIZE", 16)
    monkeypatch.setattr(room, "SOURCES_PER_BATCH", 8)


class Ear(Report):
    """Hears what is said and how far the teacher is; may be interrupted after some batches."""

    def __init__(self, until: int = 1 << 30) -> None:
        super().__init__(quiet=True)
        self.until = until
        self.heard: list[str] = []
        self.batches: list[float] = []

    def log(self, message: str, level: int = INFO) -> None:  # noqa: ARG002
        self.heard.append(message)

    def progress(self, name: str, *, total: float = 0, unit: str = "lines") -> ProgressBar:
        bar = super().progress(name, total=total, unit=unit)
        if name == "translating":
            bar.set_done = partial(self.count, bar.set_done)  # type: ignore[method-assign]
        return bar

    def count(self, update: Callable[[float], None], done: float) -> None:
        update(done)
        self.batches.append(done)
        if len(self.batches) == self.until:
            raise KeyboardInterrupt


def taught(run: Path, number: int = 1) -> list[dict[str, Any]]:
    text = (run / "distilled" / f"{number}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_a_student_learns_what_its_teacher_says(toy: Toy, recipe: Path, tmp_path: Path, call: Call) -> None:
    student = tmp_path / "student"
    answer = call("distil", toy.run, recipe, "--out", student)
    assert answer.code == 0, answer.err
    assert answer.out == ""
    assert f"{toy.run} translates {LINES} sources with a beam of 4" in answer.err
    sources = make_sentences(LINES, seed=5)
    found = zip(sources, toy.translator.translate(sources), strict=True)
    wanted = [{"source": source, "target": one.text} for source, one in found if not find_faults(one)]
    assert taught(student) == wanted
    assert len(wanted) > LINES // 2
    [corpus] = RunFolder(student).load_recipe().data.train
    assert corpus.jsonl == str(student / "distilled" / "1.jsonl")
    for file in (toy.run / "tokenizer").iterdir():
        assert (student / "tokenizer" / file.name).read_bytes() == file.read_bytes()
    card = json.loads(call("info", student, "--json").out)
    assert card["vocabulary"] == {"source": 310, "target": 310}
    assert card["teacher"]["teacher"] == str(toy.run)
    [told] = [line for line in call("info", student).out.splitlines() if line.startswith("student of")]
    assert (
        told.split(maxsplit=2)[2].strip() == f"{toy.run.name}, {len(wanted)} of {LINES} translations with a beam of 4"
    )
    assert "fewer than half" not in answer.err
    assert call("translate", student, stdin=b"ba del!\n").code == 0


def test_several_teach_as_one(toy: Toy, recipe: Path, tmp_path: Path, call: Call) -> None:
    other, student = tmp_path / "other", tmp_path / "student"
    assert call("train", toy.recipe, "--out", other, "--init-from", toy.run, *SHORT, "train.lr=0.02").code == 0
    answer = call("distil", toy.run, recipe, "--with", other, "--out", student, *SHORT)
    assert answer.code == 0, answer.err
    sources = make_sentences(LINES, seed=5)
    found = zip(sources, load([toy.run, other]).translate(sources), strict=True)
    assert taught(student) == [{"source": source, "target": one.text} for source, one in found if not find_faults(one)]
    assert RunFolder(student).load_teacher_record()["teacher"] == f"{toy.run} and {other}"


@pytest.mark.usefixtures("few")
def test_who_began_to_teach_goes_on(toy: Toy, recipe: Path, tmp_path: Path) -> None:
    """Also if nothing was learned yet: another teacher, or other sources, are refused."""
    student, more = tmp_path / "student", tmp_path / "more.src"
    write_lines(more, make_sentences(4, seed=9))
    with pytest.raises(KeyboardInterrupt):
        distil(toy.run, recipe, out=student, overrides=SHORT, report=Ear(until=2))
    for settings in (DistilSettings(beam=1), DistilSettings(originals=True), DistilSettings(sources=(str(more),))):
        with pytest.raises(UserError, match="was started with the teacher"):
            distil(toy.run, recipe, out=student, overrides=SHORT, resume=True, settings=settings, report=Ear())
    distil(toy.run, recipe, out=student, overrides=SHORT, resume=True, report=Ear())


def test_killed_while_the_teacher_translates_and_while_the_student_learns(
    toy: Toy, recipe: Path, tmp_path: Path
) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    settings = (f"data.cache={tmp_path / 'other cache'}", "--resume")
    moments: list[Callable[[], bool]] = [
        lambda: (run / "FORMAT").exists(),
        lambda: read_last_step(run) >= 7,
    ]
    for moment in moments:
        with start_process("distil", toy.run, recipe, "--out", run, *settings) as running:
            wait_until(moment, running)
            running.kill()
            running.communicate()  # waits until nobody holds its streams
            assert running.returncode == -signal.SIGKILL
    ended = run_process("distil", toy.run, recipe, "--out", run, *settings)
    assert ended.code == 0, ended.err
    assert "resuming from step" in ended.err
    assert "translates" not in ended.err
    distil(toy.run, recipe, out=whole, report=Ear())
    assert_same_runs(run, whole)
    for file in ("1.jsonl", "teacher.json"):
        assert (run / "distilled" / file).read_bytes() == (whole / "distilled" / file).read_bytes()


def test_two_processes_teach_one_student(toy: Toy, recipe: Path, tmp_path: Path) -> None:
    """They share the translating, and then train; what is learned from is what one process would have written."""
    script = Path(__file__).parents[1] / "support" / "small_shards.py"
    way = ["distil", toy.run, recipe, "--out", tmp_path / "two", *SHORT, f"data.cache={tmp_path / 'other cache'}"]
    start = torchrun("--standalone", "--nproc-per-node=2", script, *way)
    done = subprocess.run(start, capture_output=True, env=fast_environment(), check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stderr.decode().count("translates 60 sources") == 1
    distil(toy.run, recipe, out=tmp_path / "one", overrides=SHORT, report=Ear())
    for file in ("1.jsonl", "teacher.json"):
        assert (tmp_path / "two/distilled" / file).read_bytes() == (tmp_path / "one/distilled" / file).read_bytes()
    assert load_as(Translator, tmp_path / "two", device="cpu").translate(["ba del!"])


def test_of_two_processes_one_says_what_is_wrong(toy: Toy, recipe: Path, tmp_path: Path) -> None:
    way = ["-m", "dragoman", "distil", toy.run, recipe, "--out", tmp_path / "run", "tokenizer.size=77"]
    start = torchrun("--standalone", "--nproc-per-node=2", *way)
    done = subprocess.run(start, capture_output=True, text=True, env=fast_environment(), check=False)
    assert done.returncode == 1
    assert done.stderr.count("tokenizer.size=77, but a student keeps") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("few")
def test_nothing_is_translated_twice(toy: Toy, recipe: Path, tmp_path: Path) -> None:
    """Not after a stop, nor for a second student: of 60 sources in shards of 16 the third is broken off."""
    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        distil(toy.run, recipe, out=run, overrides=SHORT, report=Ear(until=5))
    assert not (run / "distilled" / "1.jsonl").exists()
    assert not list((tmp_path / "cache").rglob(".*.tmp"))
    again = Ear()
    distil(toy.run, recipe, out=run, overrides=SHORT, report=again)
    assert again.batches == [40, 48, 56, 60]
    second = Ear()
    distil(toy.run, recipe, out=tmp_path / "second", overrides=[*SHORT, "model.cell=lstm"], report=second)
    assert second.batches == []
    assert taught(tmp_path / "second") == taught(run)
    wider = Ear()
    distil(toy.run, recipe, out=tmp_path / "wider", overrides=SHORT, settings=DistilSettings(beam=5), report=wider)
    assert wider.batches[0] == 8


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    "damage", [b"", b'{"source": "ba."', b"\xff\n", b"[1]\n" * 16], ids=["gone", "cut", "bad", "odd"]
)
def test_a_damaged_shard_is_made_again(toy: Toy, recipe: Path, tmp_path: Path, damage: bytes) -> None:
    distil(toy.run, recipe, out=tmp_path / "one", overrides=SHORT, report=Ear())
    [shard] = (tmp_path / "cache").rglob("000001/answers.jsonl")
    shard.write_bytes(damage)
    ear = Ear()
    distil(toy.run, recipe, out=tmp_path / "two", overrides=SHORT, report=ear)
    assert ear.batches == [24, 32]
    assert taught(tmp_path / "two") == taught(tmp_path / "one")


def test_the_answer_most_like_the_reference(toy: Toy, recipe: Path, tmp_path: Path) -> None:
    """Law: no other answer of the beam is more like it; and the likeliest is not always that one."""
    sources = make_sentences(LINES, seed=5)
    references = [translate_toy(other) for other in make_sentences(LINES, seed=9)]
    write_lines(tmp_path / "train.trg", references)
    run = distil(
        toy.run,
        recipe,
        out=tmp_path / "run",
        overrides=SHORT,
        settings=DistilSettings(closest=True),
        report=Ear(),
    )
    likeliest, learned = 0, {one["source"]: one["target"] for one in taught(run)}
    assert len(learned) > LINES // 2
    found = toy.translator.nbest(sources, count=4)
    for source, answers, reference in zip(sources, found, references, strict=True):
        if source not in learned:  # the chosen answer was left out
            continue
        scores = {answer.text: METRICS["chrf"].compute([answer.text], [[reference]]).value for answer in answers}
        assert scores[learned[source]] == max(scores.values())
        likeliest += learned[source] == answers[0].text
    assert likeliest < len(learned)


def test_originals_and_further_sources(toy: Toy, recipe: Path, tmp_path: Path) -> None:
    more = write_lines(tmp_path / "more.src", [*make_sentences(5, seed=8), ""])
    write_lines(tmp_path / "train.trg", map(translate_toy, make_sentences(LINES, seed=5)))
    settings = DistilSettings(originals=True, sources=(str(more),))
    overrides = [*SHORT, "data.train.weight=2.0"]
    ear = Ear()
    run = distil(toy.run, recipe, out=tmp_path / "run", overrides=overrides, settings=settings, report=ear)
    answers, further, originals = RunFolder(run).load_recipe().data.train
    assert (answers.weight, further.weight, originals.weight) == (2.0, 1.0, 2.0)
    assert originals.source == str(tmp_path / "train.src")
    assert {one["source"] for one in taught(run, 2)} <= {*make_sentences(5, seed=8), ""}
    assert any(line.startswith(f"{more}: {len(taught(run, 2))} of 6 translations") for line in ear.heard), ear.heard
    assert any("(1 one side empty: left out)" in line for line in ear.heard), ear.heard


def curt(toy: Toy, tokens: int, teacher: Path) -> Path:
    """A teacher that writes so few tokens at most, and stops in the midst of what is longer."""
    shutil.copytree(toy.run, teacher, ignore=shutil.ignore_patterns("checkpoints"))
    config = teacher / "config.yaml"
    short = yaml.safe_load(config.read_text())
    short["search"] |= {"max_ratio": 0.01, "max_extra": tokens - 1}
    config.write_text(yaml.safe_dump(short) + DIGEST_LINE + CHANGED + "\n")
    return teacher


def test_what_a_teacher_does_wrong_is_left_out_and_said(toy: Toy, recipe: Path, tmp_path: Path) -> None:
    teacher = curt(toy, 6, tmp_path / "teacher")
    ear = Ear()
    run = distil(teacher, recipe, out=tmp_path / "run", overrides=SHORT, report=ear)
    answers = load_as(Translator, teacher).translate(make_sentences(LINES, seed=5))
    wanted = Counter(get_warning_kind(find_faults(one)[0]) for one in answers if find_faults(one))
    kept = LINES - wanted.total()
    assert wanted["cut"] > 0
    assert len(taught(run)) == kept > 0
    [told] = RunFolder(run).load_teacher_record()["corpora"]
    assert (told["answers"], told["left_out"]) == (kept, wanted)
    [line] = [line for line in ear.heard if line.startswith(f"{tmp_path / 'train.src'} and {tmp_path / 'train.trg'}: ")]
    assert f": {kept} of {LINES} translations (" in line
    assert f"{wanted['cut']} cut" in line


def test_a_teacher_of_whom_half_is_left_out_is_doubted(toy: Toy, recipe: Path, tmp_path: Path, call: Call) -> None:
    teacher, student = curt(toy, 4, tmp_path / "teacher"), tmp_path / "student"
    answer = call("distil", teacher, recipe, "--out", student, *SHORT)
    assert answer.code == 0, answer.err
    doubted = (
        f"fewer than half of the translations by {teacher} are good enough to learn from; train it longer, or look at"
    )
    assert answer.err.count(doubted) == 1
    assert f"{len(taught(student))} of {LINES} translations" in call("info", student).out


def test_a_teacher_of_whom_next_to_nothing_is_left_is_refused(
    toy: Toy, recipe: Path, tmp_path: Path, call: Call
) -> None:
    """Also when it is asked again; but not where the student has the original pairs to learn from."""
    teacher, student = curt(toy, 2, tmp_path / "teacher"), tmp_path / "student"
    way = ("distil", teacher, recipe, "--out", student, *SHORT)
    for again in ((), ("--resume",), ()):
        refused = call(*way, *again)
        kept = len(taught(student))
        assert 0 < kept < LINES / 10
        assert_user_error(
            refused, f"only {kept} of {LINES} translations", teacher, "longer", "--with-originals", working=True
        )
        assert not (student / "model.safetensors").exists()
    with_originals = call(*way, "--with-originals")
    assert with_originals.code == 0, with_originals.err
    assert "fewer than half" in with_originals.err


def lessons(good: int, bad: int, blank: int = 0) -> TranslationFilter:
    found = TranslationFilter()
    records: list[tuple[str, list[str]]] = (
        [("ba.", [])] * good + [("ba.", ["cut at 2 tokens"])] * bad + [("", ["empty"])] * blank
    )
    assert (
        len(list(found.format_lines({"source": text, "target": text, "faults": why} for text, why in records))) == good
    )
    return found


@pytest.mark.parametrize(
    ("found", "originals", "said"),
    [
        ([lessons(50, 50)], 0, ""),
        ([lessons(49, 51)], 0, "fewer than half"),
        ([lessons(10, 90)], 0, "fewer than half"),
        ([lessons(9, 91)], 0, "only 9 of 100"),
        ([lessons(50, 0), lessons(0, 50)], 0, ""),
        ([lessons(1, 99)], 100, "fewer than half"),
        ([lessons(0, 100)], 100, "no translation"),
        ([lessons(0, 100), lessons(1, 10_000)], 100, "only 1 of 10,101"),
        ([lessons(9, 1, blank=990)], 0, ""),
    ],
)
def test_how_many_answers_are_enough(found: list[TranslationFilter], originals: int, said: str) -> None:
    """Blank lines, to which nothing can be said, are no fault of a teacher."""
    try:
        answer = room.check_enough_pairs("x", found, originals)
    except UserError as refused:
        answer = str(refused)
        assert ("--with-originals" in answer) is (not originals and "only" in answer)
    assert answer.startswith(said)
    assert bool(answer) is bool(said)


@pytest.mark.parametrize(("teacher", "whom"), [("a", "train it longer"), ("a and b", "train them longer")])
@pytest.mark.parametrize("good", [0, 1, 30])
def test_several_teachers_are_spoken_of_as_several(teacher: str, whom: str, good: int) -> None:
    try:
        said = room.check_enough_pairs(teacher, [lessons(good, 100 - good)], 0)
    except UserError as refused:
        said = str(refused)
    assert f"by {teacher} " in said
    assert whom in said


@given(st.lists(st.tuples(st.text(st.characters(codec="utf-8")), st.text(st.characters(codec="utf-8"))), min_size=1))
def test_answers_are_kept_as_they_were(tmp_path_factory: pytest.TempPathFactory, texts: list[tuple[str, str]]) -> None:
    """Whatever marks a text is full of: as a shard, and as a corpus."""
    folder = tmp_path_factory.mktemp("kept")
    answers = [{"source": source, "target": target, "faults": []} for source, target in texts]
    pairs = [Pair(*both) for both in texts]
    kept = ShardedJob(folder, lambda: iter(pairs), lambda before, some: answers[before : before + len(some)], 2)
    found = list(kept.read_records(kept.run(ProcessGroup(), ProgressBar("translating", visible=False))))
    assert found == answers
    (folder / "1.jsonl").write_bytes("".join(TranslationFilter().format_lines(found)).encode())
    assert list(read_pairs(CorpusSettings(jsonl=str(folder / "1.jsonl")))) == pairs


def test_what_looks_odd_is_a_fault_and_a_missing_tree_is_none() -> None:
    odd = Hypothesis("x", 0.0, [], [], [], 0.0, warnings=(NO_TREE_WARNING, "cut at 6 tokens"), flags=(FLAG_REPEATS,))
    assert find_faults(odd) == ["cut at 6 tokens", FLAG_REPEATS]
    assert find_faults(replace(odd, warnings=(NO_TREE_WARNING,), flags=())) == []


REFUSED = {
    "another tokenizer": (["tokenizer.size=500"], "tokenizer.size=500", "size=310"),
    "another kind of it": (["tokenizer.kind=char"], "tokenizer.kind=char", "kind=bpe"),
    "no translator": (["model={kind: lm}"], "model.kind=lm", "does not translate"),
    "trees": (["model.position=tree"], "model.position=tree"),
    "a name": (["model.cell=grue"], "'grue'", "'gru'"),
    "a missing file": (["--source", "nowhere.txt"], "nowhere.txt"),
    "a choice of one": (["--closest", "--beam", "1"], "--closest", "--beam 2"),
    "no corpus": (["data.train=[]"], "data.train"),
}


@pytest.mark.parametrize("said", REFUSED.values(), ids=REFUSED)
def test_what_cannot_work_is_refused_before_anything_is_written(
    toy: Toy, recipe: Path, tmp_path: Path, call: Call, said: tuple[Any, ...]
) -> None:
    arguments, *culprits = said
    assert_user_error(call("distil", toy.run, recipe, "--out", tmp_path / "run", *arguments), *culprits)
    assert not (tmp_path / "run").exists()


def test_what_agrees_with_the_teacher_may_be_said(toy: Toy, recipe: Path, tmp_path: Path) -> None:
    overrides = [*SHORT, "tokenizer.kind=bpe", "tokenizer.size=310", "tokenizer.sampling=0.1"]
    run = distil(toy.run, recipe, out=tmp_path / "run", overrides=overrides, report=Ear())
    assert RunFolder(run).load_recipe().tokenizer.sampling == 0.1


def test_another_teacher_is_refused(toy: Toy, recipe: Path, tmp_path: Path, call: Call) -> None:
    run = distil(toy.run, recipe, out=tmp_path / "run", overrides=["train.steps=4"], report=Ear())
    before = (run / "distilled" / "1.jsonl").read_bytes()
    resumed = ("distil", toy.run, recipe, "--out", run, "--resume")
    assert_user_error(call(*resumed, "--beam", "5"), run, "beam 4", "beam 5", toy.run)
    assert_user_error(call(*resumed, "--closest"), run, "closest")
    assert_user_error(call("distil", run, recipe, "--out", run, "--resume"), run, toy.run)
    assert_user_error(call("distil", toy.run, recipe, "--out", run), "--resume")
    assert (run / "distilled" / "1.jsonl").read_bytes() == before
    assert_user_error(call("distil", toy.run, recipe, "--out", toy.run, "--resume"), "no teacher at all")


def operations(recipe: Path) -> float:
    """Of a sentence of Multi30k, in millions: 16 source tokens are read, 17 target tokens written in a beam of 5."""
    whole = read_recipe(recipe)
    size = whole.tokenizer.size
    cost = Cost.from_model(
        build_model(whole.neural_model, source_size=size, target_size=size, joint=whole.tokenizer.joint)
    )
    read, both = (cost.count_forward(np.array([16]), np.array([target])) for target in (0, 17))
    return (read + 5 * (both - read)) / 1e6


@pytest.mark.parametrize("student", STUDENTS, ids=lambda path: path.stem)
def test_a_student_costs_a_quarter_of_its_teacher_at_most(student: Path) -> None:
    teacher = operations(ROOT / "recipes" / "multi30k-en-de.yaml")
    assert operations(student) * 4 <= teacher
    for page in (student, ROOT / "docs" / "students.md"):
        assert all(f"{count:,.0f}" in page.read_text() for count in (operations(student), teacher)), page
    assert read_recipe(student).tokenizer == read_recipe(ROOT / "recipes" / "multi30k-en-de.yaml").tokenizer

"""A small fast student of a large model: it learns what the teacher says, not what the references say.

    distil("runs/teacher", "student.yaml", out="runs/student")

What a search finds is plainer and more regular than what people write, so a small model can learn it (Kim and Rush,
2016). The student keeps the teacher's tokenizer; what it learns from lies in RUN/distilled. The teacher's answers are
kept in the data cache too, in shards, once per teacher, corpus and beam: a run that was killed goes on with the next
shard, and a second student of the same teacher finds them all.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import count, islice
from pathlib import Path
from typing import Annotated, Any

from dragoman.config import Amount, CorpusSettings, Listed, Recipe, Settings, read_recipe
from dragoman.data.tokens import keep_folder
from dragoman.door import kinds
from dragoman.loading import load_as
from dragoman.models.build import asks_for_trees, completed, kind_of
from dragoman.score.metrics import METRICS
from dragoman.store import RunFolder, write_text, write_whole
from dragoman.text.corpus import fingerprint, read_pairs
from dragoman.text.tokenizer import Tokenizers
from dragoman.train.prepare import check_files
from dragoman.train.report import Report
from dragoman.train.start import alone, check, opened
from dragoman.train.trainer import train
from dragoman.translator import TREELESS, Translator
from dragoman.types import Hypothesis, Mistake, Pair

SHARD = 2048  # sources whose answers are kept together
BATCH = 256  # sources that the teacher is handed at a time
LIKENESS = METRICS["chrf"]  # of an answer and a reference; unlike BLEU it says something of short sentences too

Answer = dict[str, Any]  # source, target, faults


class DistilSettings(Settings):
    beam: Amount = 0  # of the teacher; 0: its own
    closest: bool = False  # of the answers in a beam take the one most like the reference, not the likeliest
    originals: bool = False  # the student learns from the original pairs too
    sources: Annotated[tuple[str, ...], Listed] = ()  # further files for the teacher to translate, plain text


def distil(
    run: str | Path,
    recipe: str | Path,
    *,
    out: str | Path,
    overrides: Sequence[str] = (),
    resume: bool = False,
    settings: DistilSettings | None = None,
    report: Report | None = None,
) -> Path:
    """Train the student that a recipe describes on the answers of the model in `run`; the folder `out` is returned."""
    report = report or Report()
    whole = read_recipe(Path(recipe), overrides)
    student, tokenizers = taught(whole, run, RunFolder(out), settings or DistilSettings(), report, resume=resume)
    return train(student, out=out, resume=resume, tokenizers=tokenizers, report=report)


def taught(
    recipe: Recipe, run: str | Path, folder: RunFolder, settings: DistilSettings, report: Report, *, resume: bool
) -> tuple[Recipe, Tokenizers]:
    """The student's recipe, its corpora written, and its tokenizers. What is in the way is refused before."""
    newest = opened(folder, resume=resume)
    teacher = Teacher.load(run, recipe, settings)
    extra = [CorpusSettings(text=str(Path(name).absolute())) for name in settings.sources]
    lessons = [Lesson.of(corpus, recipe, teacher) for corpus in (*recipe.data.train, *extra)]
    files = [folder.distilled / f"{number}.jsonl" for number in range(1, len(lessons) + 1)]
    weights = [lesson.corpus.weight for lesson in lessons]
    answers = [CorpusSettings(jsonl=str(f.absolute()), weight=w) for f, w in zip(files, weights, strict=True)]
    originals = recipe.data.train if settings.originals else ()
    student = student_of(recipe, teacher.translator.recipe, (*answers, *originals))
    check(student)
    check_files(recipe)
    if newest:
        same_teacher(folder, teacher)
    with alone(folder):
        if not newest:
            folder.begin(student)
        if not newest or not all(file.exists() for file in files):
            corpora = write_corpora(lessons, files, report)
            about = {**teacher.about(), **settings.model_dump(mode="json"), "beam": teacher.beam, "corpora": corpora}
            write_text(folder.distilled / "teacher.json", json.dumps(about, indent=1, ensure_ascii=False) + "\n")
    return student, teacher.translator.tokenizers


def same_teacher(folder: RunFolder, teacher: Teacher) -> None:
    """A student that goes on does so with the teacher that it began with."""
    before, now = folder.teacher(), teacher.about()
    if any(before.get(name) != now[name] for name in ("digest", "beam", "closest")):
        raise Mistake(
            f"{str(folder.path)!r} was begun with {described(before)}, and cannot go on with {described(now)}; "
            "give the same teacher again, or choose another --out"
        )


def described(about: dict[str, Any]) -> str:
    if not about:
        return "no teacher at all"
    ways = f"beam {about['beam']}" + (", closest" if about["closest"] else "")
    return f"the teacher {about['teacher']} (digest {about['digest'][:8]}, {ways})"


def student_of(recipe: Recipe, teacher: Recipe, corpora: tuple[CorpusSettings, ...]) -> Recipe:
    """The recipe with the teacher's tokenizer, and with these corpora to learn from."""
    for name in sorted(recipe.tokenizer.model_fields_set - {"sampling"}):
        wanted, there = getattr(recipe.tokenizer, name), getattr(teacher.tokenizer, name)
        if wanted != there:
            raise Mistake(
                f"the recipe has tokenizer.{name}={wanted}, but a student keeps its teacher's tokenizer, which has "
                f"{name}={there}; leave it out"
            )
    if kind_of(recipe.model).task != "translate":
        raise Mistake(f"model.kind={recipe.model['kind']} cannot be a student's: it does not translate")
    if asks_for_trees(recipe.model):
        raise Mistake("model.position=tree cannot be a student's: a teacher's answers come without trees")
    tokenizer = teacher.tokenizer.model_copy(update={"sampling": recipe.tokenizer.sampling})
    data = recipe.data.model_copy(update={"train": corpora})
    return completed(recipe.model_copy(update={"data": data, "tokenizer": tokenizer}))


@dataclass(frozen=True)
class Teacher:
    translator: Translator
    name: str
    digest: str  # of all that its answers depend on
    beam: int
    closest: bool

    @classmethod
    def load(cls, run: str | Path, recipe: Recipe, settings: DistilSettings) -> Teacher:
        translator = load_as(Translator, run, device=recipe.train.device)
        own = translator.recipe
        beam = settings.beam or own.search.beam
        if settings.closest and beam == 1:
            raise Mistake("--closest chooses among the answers in a beam, so it needs --beam 2 or more")
        with RunFolder(run).model.open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
        way = [own.model, own.search.model_dump(mode="json", exclude_defaults=True, exclude={"beam"})]
        digest.update(json.dumps(way, sort_keys=True).encode())
        return cls(translator, str(run), digest.hexdigest(), beam, settings.closest)

    def about(self) -> dict[str, Any]:
        return {"teacher": self.name, "digest": self.digest, "beam": self.beam, "closest": self.closest}

    def answers(self, pairs: Sequence[Pair]) -> list[Answer]:
        sources = [pair.source for pair in pairs]
        trees = [pair.tree for pair in pairs] if self.translator.asks_for_trees else None
        most = self.beam if self.closest else 1
        found = self.translator.nbest(sources, count=most, beam=self.beam, trees=trees, align=False)
        chosen = [self.choose(some, pair.target) for some, pair in zip(found, pairs, strict=True)]
        return [
            {"source": source, "target": one.text, "faults": faults(one)}
            for source, one in zip(sources, chosen, strict=True)
        ]

    def choose(self, found: Sequence[Hypothesis], reference: str) -> Hypothesis:
        """The likeliest answer, or the one most like the reference, of equals the likelier."""
        if not self.closest or not reference.strip():
            return found[0]
        return max(found, key=lambda one: LIKENESS.of_answers([one.text], [[reference]]).value)


def faults(answer: Hypothesis) -> list[str]:
    """Why a student had better not learn from an answer. That a teacher of trees had none for it is no reason."""
    return [*(why for why in answer.warnings if why != TREELESS), *answer.flags]


@dataclass(frozen=True)
class Lesson:
    """A corpus that the teacher translates. Equal keys have equal answers."""

    corpus: CorpusSettings
    teacher: Teacher
    direction: str  # of the phrasebook
    key: str
    shards: Path

    @classmethod
    def of(cls, corpus: CorpusSettings, recipe: Recipe, teacher: Teacher) -> Lesson:
        direction = recipe.data.direction
        way = [teacher.digest, teacher.beam, teacher.closest, fingerprint(corpus, direction=direction), SHARD]
        key = hashlib.blake2b(json.dumps(way).encode(), digest_size=12).hexdigest()
        return cls(corpus, teacher, direction, key, Path(recipe.data.cache).expanduser() / f"{key}-answers")

    def pairs(self) -> Iterator[Pair]:
        """Plain text is all sources, and has no references."""
        if self.corpus.text:
            return (Pair(line.target, "") for line in read_pairs(self.corpus))
        return read_pairs(self.corpus, direction=self.direction, trees=self.teacher.translator.asks_for_trees)

    def answers(self, pace: Pace) -> Iterator[Answer]:
        """Those that are kept, and where there are none yet, new ones, which are kept from then on."""
        pairs = self.pairs()
        for number in count():
            if not (some := list(islice(pairs, SHARD))):
                return
            file = self.shards / f"{number:06}" / "answers.jsonl"
            if (kept := kept_answers(file, some)) is None:
                shutil.rmtree(file.parent, ignore_errors=True)  # damaged
                kept = self.translated(some, pace)
                keep(file, kept)
            else:
                pace.skip(len(some))
            yield from kept

    def translated(self, some: Sequence[Pair], pace: Pace) -> list[Answer]:
        found: list[Answer] = []
        for start in range(0, len(some), BATCH):
            found += self.teacher.answers(some[start : start + BATCH])
            pace.step(len(found) - start)
        return found


def kept_answers(file: Path, pairs: Sequence[Pair]) -> list[Answer] | None:
    """The answers to these sources, or nothing where there are none, or others."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        found: list[Answer] = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n")[:-1]]
        if [one["source"] for one in found] == [pair.source for pair in pairs]:
            return found
    return None


def keep(file: Path, answers: Iterable[Answer]) -> None:
    try:
        keep_folder(file.parent, file.name, lambda beside: write_answers(beside / file.name, answers))
    except OSError as error:
        raise Mistake(
            f"the teacher's answers cannot be kept in {str(file.parent)!r} ({error.strerror}); free some room there or "
            "name another folder with data.cache=FOLDER"
        ) from None


def write_answers(path: Path, answers: Iterable[Answer]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(one, ensure_ascii=False) + "\n" for one in answers)


def write_corpora(lessons: Sequence[Lesson], files: Sequence[Path], report: Report) -> list[dict[str, Any]]:
    """What the student learns from, each file whole or not there; and what is to be said of each."""
    teacher = lessons[0].teacher
    total = sum(1 for lesson in lessons for _ in report.counted(lesson.pairs(), "reading"))
    report.say(f"{teacher.name} translates {total:,} sources with a beam of {teacher.beam}")
    with Pace(total, report) as pace:
        told = [write_corpus(lesson, file, pace) for lesson, file in zip(lessons, files, strict=True)]
    for one in told:
        why = ", ".join(f"{number:,} {what}" for what, number in one["left_out"].items())
        report.say(f"{one['of']}: {one['answers']:,} answers" + (f" ({why}: left out)" if why else ""))
    return told


def write_corpus(lesson: Lesson, file: Path, pace: Pace) -> dict[str, Any]:
    left_out: Counter[str] = Counter()
    answers = 0

    def good() -> Iterator[Answer]:
        """Those without a fault: from the others a student would learn what its teacher does wrong."""
        nonlocal answers
        for one in lesson.answers(pace):
            if one["faults"]:
                left_out.update(kinds(one["faults"])[:1])
            else:
                answers += 1
                yield {"source": one["source"], "target": one["target"]}

    file.parent.mkdir(exist_ok=True)
    write_whole(file, lambda beside: write_answers(beside, good()))
    return {"file": file.name, "of": lesson.corpus.shown, "answers": answers, "left_out": dict(left_out)}


class Pace:
    """How far the teacher is, and how long it will take."""

    def __init__(self, total: int, report: Report) -> None:
        self.total, self.report = total, report
        self.done = self.fresh = 0
        self.begun = time.monotonic()

    def __enter__(self) -> Pace:
        self.report.begin(self.total, 0, "translating")
        return self

    def __exit__(self, *_: object) -> None:
        self.report.end()

    def skip(self, count: int) -> None:
        """So many were there already."""
        self.done += count

    def step(self, count: int) -> None:
        self.done, self.fresh = self.done + count, self.fresh + count
        speed = self.fresh / (time.monotonic() - self.begun)
        left = timedelta(seconds=round((self.total - self.done) / speed))
        self.report.step(self.done, f"{self.done:,} of {self.total:,} sources  {speed:,.1f}/s  {left} left")

"""A small fast student of a large model: it learns what the teacher says, not what the references say.

    distil("runs/teacher", "student.yaml", out="runs/student")

What a search finds is plainer and more regular than what people write, so a small model can learn it (Kim and Rush,
2016). The student keeps the teacher's tokenizer; what it learns from lies in RUN/distilled. The teacher's answers are
kept in the data cache too, in shards, once per teacher, corpus and beam: a run that was killed goes on with the next
shard, and a second student of the same teacher finds them all. Under torchrun the processes share the translating, and
then learn together.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from dragoman.augmentation import jobs as shards
from dragoman.augmentation.backtranslation import UsefulPairs, find_faults, suggest_remedy, warn_of_poor_answers
from dragoman.augmentation.jobs import Record, ShardedJob, choose_device_of_rank, count_own_items, digest_runs
from dragoman.config.settings import Amount, CorpusSettings, Listed, Settings
from dragoman.data.corpus import fingerprint_corpus, read_pairs
from dragoman.data.tokenizers import Tokenizers
from dragoman.errors import UserError
from dragoman.inference.loading import RunPaths, load_as
from dragoman.inference.translator import Translator
from dragoman.io import cache_folder, digest_bytes, share_folder
from dragoman.metrics.metrics import METRICS
from dragoman.process_group import ProcessGroup, join_process_group
from dragoman.progress import Report
from dragoman.recipe import Recipe, check_model, read_recipe
from dragoman.run_dir import RunFolder, write_text, write_whole
from dragoman.training.prepare import check_files
from dragoman.training.start import alone, check, opened
from dragoman.training.trainer import train
from dragoman.types import Hypothesis, Line, Pair

SOURCES_PER_BATCH = 256  # sources that the teacher is handed at a time
MIN_USEFUL_SHARE = (
    0.1  # of what a student is to learn from: with less, there would be another student than was asked for
)
SIMILARITY = METRICS["chrf"]  # of an answer and a reference; unlike BLEU it says something of short sentences too


class DistilSettings(Settings):
    beam: Amount = 0  # of the teacher; 0: its own
    closest: bool = False  # of the answers in a beam take the one most like the reference, not the likeliest
    originals: bool = False  # the student learns from the original pairs too
    sources: Annotated[tuple[str, ...], Listed] = ()  # further files for the teacher to translate, plain text
    tag: str = ""  # of those


def distil(
    run: RunPaths,
    recipe: str | Path,
    *,
    out: str | Path,
    overrides: Sequence[str] = (),
    resume: bool = False,
    settings: DistilSettings | None = None,
    report: Report | None = None,
) -> Path:
    """Train the student that a recipe describes on the answers of the model in `run`; the folder `out` is returned.

    Several runs with one vocabulary teach as one."""
    with join_process_group() as group:
        whole = group.run_on_all(lambda: read_recipe(Path(recipe), overrides))
        report = report or Report(quiet=not group.is_main)
        newest = group.broadcast(lambda: opened(RunFolder(out), resume=resume))
        teacher = group.in_rank_order(lambda: Teacher.load(run, whole, settings or DistilSettings(), group))
        goes_on = group.broadcast(lambda: resume and bool(RunFolder(out).teacher()))
        shared: dict[str, Any] = {"newest": newest, "goes_on": goes_on, "group": group, "report": report}
        student, tokenizers = prepare_student(whole, teacher, RunFolder(out), settings or DistilSettings(), **shared)
        return train(student, out=out, resume=resume, tokenizers=tokenizers, report=report)


def prepare_student(
    recipe: Recipe,
    teacher: Teacher,
    folder: RunFolder,
    settings: DistilSettings,
    *,
    newest: Path | None,
    goes_on: bool,
    group: ProcessGroup,
    report: Report,
) -> tuple[Recipe, Tokenizers]:
    """The student's recipe, its corpora written, and its tokenizers. What is in the way is refused before."""
    lessons = group.run_on_all(lambda: plan_teacher_corpora(recipe, teacher, settings))
    files = [folder.distilled / f"{number}.jsonl" for number in range(1, len(lessons) + 1)]
    answers = [lesson.answered(file) for lesson, file in zip(lessons, files, strict=True)]
    originals = recipe.data.train if settings.originals else ()
    student = group.run_on_all(lambda: make_student_recipe(recipe, teacher.translator.recipe, (*answers, *originals)))
    about = {**teacher.about(), **settings.model_dump(mode="json"), "beam": teacher.beam}
    if newest or goes_on:
        group.broadcast(lambda: check_same_teacher(folder, about))
    with ExitStack() as held:
        group.broadcast(lambda: held.enter_context(alone(folder)))
        if not newest:
            group.broadcast(lambda: begin_student(folder, student, about))
        if group.broadcast(lambda: not newest or not all(file.exists() for file in files)):
            for lesson in lessons:  # `dragoman cache --clear` leaves what is in use
                with suppress(OSError):  # a cache that cannot be written is refused below
                    held.enter_context(share_folder(lesson.shards.folder))
            counts = group.run_on_all(lambda: translate_corpora(lessons, group, report))
            group.broadcast(lambda: write_corpora(lessons, files, counts, about, report))
    return student, teacher.translator.tokenizers


def plan_teacher_corpora(recipe: Recipe, teacher: Teacher, settings: DistilSettings) -> list[TeacherCorpus]:
    """What the teacher translates. What it cannot is refused before it begins."""
    check_files(recipe)
    extra = [CorpusSettings(text=str(Path(name).absolute()), tag=settings.tag) for name in settings.sources]
    if settings.tag and not extra:
        raise UserError("--tag is that of the lines of --source, of which there are none; leave it out")
    for corpus in (*recipe.data.train, *extra):
        teacher.translator.encode_tag(corpus.tag)
    return [TeacherCorpus.of(corpus, recipe, teacher) for corpus in (*recipe.data.train, *extra)]


def begin_student(folder: RunFolder, student: Recipe, about: dict[str, Any]) -> None:
    """The run's folder, with a record of who will teach what."""
    folder.begin(student)
    folder.distilled.mkdir(exist_ok=True)
    write_teacher_record(folder.distilled, about, [])


def write_teacher_record(folder: Path, about: dict[str, Any], corpora: list[dict[str, Any]]) -> None:
    write_text(folder / "teacher.json", json.dumps({**about, "corpora": corpora}, indent=1, ensure_ascii=False) + "\n")


def check_same_teacher(folder: RunFolder, now: dict[str, Any]) -> None:
    """A student that goes on does so with the teacher that it began with, and with what that one translates."""
    before = folder.teacher()
    known = {**DistilSettings().model_dump(mode="json"), **before}
    if any(known.get(name) != now[name] for name in ("digest", *DistilSettings.model_fields)):
        raise UserError(
            f"{str(folder.path)!r} was begun with {describe_teacher(before)}, "
            f"and cannot go on with {describe_teacher(now)}; "
            "give the same teacher and options again, or choose another --out"
        )


def describe_teacher(about: dict[str, Any]) -> str:
    if not about:
        return "no teacher at all"
    ways = f"beam {about['beam']}" + (", closest" if about["closest"] else "")
    ways += (", with originals" if about.get("originals") else "") + "".join(f", {name}" for name in about["sources"])
    ways += f", tag {tag}" if (tag := about.get("tag")) else ""
    return f"the teacher {about['teacher']} (digest {about['digest'][:8]}, {ways})"


def make_student_recipe(recipe: Recipe, teacher: Recipe, corpora: tuple[CorpusSettings, ...]) -> Recipe:
    """The recipe with the teacher's tokenizer, and with these corpora to learn from."""
    for name in sorted(recipe.tokenizer.model_fields_set - {"sampling"}):
        wanted, there = getattr(recipe.tokenizer, name), getattr(teacher.tokenizer, name)
        if wanted != there:
            raise UserError(
                f"the recipe has tokenizer.{name}={wanted}, but a student keeps its teacher's tokenizer, which has "
                f"{name}={there}; leave it out"
            )
    if recipe.model.task != "translate":
        raise UserError(f"model.kind={recipe.model.kind} cannot be a student's: it does not translate")
    if recipe.model.features:
        raise UserError("model.position=tree cannot be a student's: a teacher's answers come without trees")
    tokenizer = teacher.tokenizer.model_copy(update={"sampling": recipe.tokenizer.sampling})
    data = recipe.data.model_copy(update={"train": corpora})
    student = check_model(recipe.model_copy(update={"data": data, "tokenizer": tokenizer}))
    check(student)
    return student


@dataclass(frozen=True)
class Teacher:
    translator: Translator
    name: str
    digest: str  # of all that its answers depend on
    beam: int
    closest: bool

    @classmethod
    def load(cls, run: RunPaths, recipe: Recipe, settings: DistilSettings, group: ProcessGroup) -> Teacher:
        translator = load_as(Translator, run, device=choose_device_of_rank(recipe.train.device, group))
        own = translator.recipe
        beam = settings.beam or own.search.beam
        if settings.closest and beam == 1:
            raise UserError("--closest chooses among the answers in a beam, so it needs --beam 2 or more")
        runs = [run] if isinstance(run, str | Path) else list(run)
        way = [digest_runs(runs), own.search.model_dump(mode="json", exclude_defaults=True, exclude={"beam"})]
        digest = digest_bytes(json.dumps(way, sort_keys=True).encode())
        return cls(translator, " and ".join(map(str, runs)), digest, beam, settings.closest)

    def about(self) -> dict[str, Any]:
        return {"teacher": self.name, "digest": self.digest, "beam": self.beam, "closest": self.closest}

    def answers(self, pairs: Sequence[Pair]) -> list[Record]:
        sources = [Line(pair.source, tag=pair.tag) for pair in pairs]
        trees = [pair.tree for pair in pairs] if self.translator.reads_trees else None
        most = self.beam if self.closest else 1
        found = self.translator.nbest(sources, count=most, beam=self.beam, trees=trees, align=False)
        chosen = [self.choose(some, pair.target) for some, pair in zip(found, pairs, strict=True)]
        return [
            {"source": pair.source, "target": one.text, "faults": find_faults(one)}
            for pair, one in zip(pairs, chosen, strict=True)
        ]

    def choose(self, found: Sequence[Hypothesis], reference: str) -> Hypothesis:
        """The likeliest answer, or the one most like the reference, of equals the likelier."""
        if not self.closest or not reference.strip():
            return found[0]
        return max(found, key=lambda one: SIMILARITY.compute([one.text], [[reference]]).value)


@dataclass(frozen=True)
class TeacherCorpus:
    """A corpus that the teacher translates. Equal keys have equal answers."""

    corpus: CorpusSettings
    teacher: Teacher
    shards: ShardedJob[Pair]

    @classmethod
    def of(cls, corpus: CorpusSettings, recipe: Recipe, teacher: Teacher) -> TeacherCorpus:
        direction = recipe.data.direction
        mark = fingerprint_corpus(corpus, direction=direction)
        way = [teacher.digest, teacher.beam, teacher.closest, mark, shards.SHARD_SIZE]
        key = digest_bytes(json.dumps(way).encode(), size=12)
        folder = cache_folder(recipe.data.cache) / f"{key}-answers"

        def pairs() -> Iterator[Pair]:
            """Plain text is all sources, and has no references."""
            if corpus.text:
                return (Pair(line.target, "", tag=corpus.tag) for line in read_pairs(corpus))
            return read_pairs(corpus, direction=direction, trees=teacher.translator.reads_trees)

        return cls(corpus, teacher, ShardedJob(folder, pairs, lambda _, some: teacher.answers(some), SOURCES_PER_BATCH))

    def answered(self, file: Path) -> CorpusSettings:
        """The corpus that its answers are, once they are written to this file."""
        return CorpusSettings(jsonl=str(file.absolute()), weight=self.corpus.weight, tag=self.corpus.tag)


def translate_corpora(lessons: Sequence[TeacherCorpus], group: ProcessGroup, report: Report) -> list[int]:
    """The share of this process. How many shards each lesson has comes back."""
    teacher = lessons[0].teacher
    sizes = [sum(1 for _ in report.progress("reading").iterate(lesson.shards.items())) for lesson in lessons]
    verb = "translate" if " and " in teacher.name else "translates"
    report.log(f"{teacher.name} {verb} {sum(sizes):,} sources with a beam of {teacher.beam}")
    total = sum(count_own_items(size, group) for size in sizes)
    with report.progress("translating", total=total, unit="sources") as bar:
        return [lesson.shards.make(group, bar) for lesson in lessons]


def write_corpora(
    lessons: Sequence[TeacherCorpus],
    files: Sequence[Path],
    counts: Sequence[int],
    about: dict[str, Any],
    report: Report,
) -> None:
    """What the student learns from, each file whole or not there; and a record of it."""
    found, told = [], []
    for lesson, file, count in zip(lessons, files, counts, strict=True):
        good, name = write_corpus(lesson, file, count), lesson.corpus.shown
        told.append({"file": file.name, "of": name, "answers": good.good, "left_out": dict(good.left_out)})
        found.append(good)
        report.log(f"{name}: {good}")
    originals = sum(good.asked for lesson, good in zip(lessons, found, strict=True) if not lesson.corpus.text)
    if said := check_useful(about["teacher"], found, originals if about["originals"] else 0):
        report.log(said)
    write_teacher_record(files[0].parent, about, told)


def check_useful(teacher: str, found: Sequence[UsefulPairs], originals: int) -> str:
    """What there is to say of a teacher's answers where many are left out. A student that would have next to nothing to
    learn from is refused; the original pairs count, where it has them too."""
    useful, asked = sum(good.useful for good in found), sum(good.asked for good in found)
    if not useful:
        raise UserError(f"no answer of {teacher} is good enough to learn from; {suggest_remedy(teacher)}")
    if useful + originals < MIN_USEFUL_SHARE * (asked + originals):
        more = "" if originals else "; --with-originals gives the student the original pairs too"
        raise UserError(
            f"only {useful:,} of {asked:,} answers of {teacher} are good enough to learn from; "
            f"{suggest_remedy(teacher)}{more}"
        )
    return warn_of_poor_answers(teacher, useful, asked)


def write_corpus(lesson: TeacherCorpus, file: Path, count: int) -> UsefulPairs:
    found = UsefulPairs()

    def write(made: Path) -> None:
        with made.open("w", encoding="utf-8", newline="\n") as sink:
            sink.writelines(found.lines(lesson.shards.records(count)))

    file.parent.mkdir(exist_ok=True)
    write_whole(file, write)
    return found

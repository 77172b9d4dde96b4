"""Sequence-level knowledge distillation: a small fast student learns a teacher's translations (Kim and Rush, 2016).

    distil("runs/teacher", "student.yaml", out="runs/student")

Translations by a model are simpler and more regular than translations by people, so a small model can learn them. The
student keeps the teacher's tokenizer; its training data is in RUN/distilled. The translations are also kept in the data
cache, in shards, in a folder for each teacher, corpus and beam width: a run that was killed resumes with the next
shard, and a second student of the same teacher reuses all of them. Under torchrun the processes divide the shards, then
train together.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from dragoman.augmentation import jobs
from dragoman.augmentation.backtranslation import (
    TranslationFilter,
    find_faults,
    suggest_remedy,
    warn_of_poor_translations,
)
from dragoman.augmentation.jobs import Record, ShardedJob
from dragoman.config.settings import Amount, AsTuple, Settings
from dragoman.data.context import attach_to_pairs
from dragoman.data.corpus import CorpusSettings, fingerprint_corpus, read_pairs
from dragoman.errors import UserError
from dragoman.inference.loading import RunPaths, load_as
from dragoman.inference.translator import Translator
from dragoman.io import cache_folder, digest_bytes, format_json, share_folder, write_text
from dragoman.metrics.metrics import METRICS
from dragoman.process_group import ProcessGroup, join_process_group
from dragoman.progress import Report
from dragoman.recipe import Recipe, read_recipe
from dragoman.run_dir import RunFolder
from dragoman.training.prepare import check_files
from dragoman.training.start import check_settings, find_checkpoint, lock_run
from dragoman.training.trainer import train
from dragoman.types import Line, Pair

SOURCES_PER_BATCH = 256
MIN_ACCEPTED_FRACTION = 0.1  # with fewer pairs, the student would learn another distribution of sentences
SIMILARITY = METRICS["chrf"]  # of a translation and its reference; unlike BLEU, chrF is meaningful for short sentences


class DistilSettings(Settings):
    """Options of `dragoman distil`."""

    beam: Amount = 0  # beam width of the teacher; 0: the setting of its run
    closest: bool = False  # use the hypothesis that is most similar to the reference, not the most likely one
    originals: bool = False  # train the student on the original pairs too
    sources: Annotated[tuple[str, ...], AsTuple] = ()  # plain text files with more lines for the teacher to translate
    tag: str = ""  # tag put before each line of `sources`, such as the target language


@dataclass(frozen=True)
class Teacher:
    """A translator, which may be an ensemble, and its decoding options."""

    translator: Translator
    name: str  # the run folder; "A and B" for an ensemble
    digest: str  # digest of the models and their search settings, without the beam width
    beam: int
    closest: bool  # choose the hypothesis most similar to the reference (see DistilSettings)

    @classmethod
    def load(cls, run: RunPaths, recipe: Recipe, settings: DistilSettings, group: ProcessGroup) -> Teacher:
        """Load the runs of a teacher; `recipe` is the student's."""
        translator = load_as(Translator, run, device=jobs.choose_device_of_rank(recipe.train.device, group))
        if translator.recipe.model.kind == "smt":
            raise UserError(
                f"{translator.run!r} is a phrase-based system, whose vocabulary a student cannot share; translate the "
                "sources with dragoman translate, and train on the result"
            )
        search = translator.recipe.search
        beam = settings.beam or search.beam
        if settings.closest and beam == 1:
            raise UserError("--closest chooses among the hypotheses of a beam, so it needs --beam 2 or more")
        runs = [run] if isinstance(run, str | Path) else list(run)
        key = [jobs.digest_runs(runs), search.model_dump(mode="json", exclude_defaults=True, exclude={"beam"})]
        digest = digest_bytes(json.dumps(key, sort_keys=True).encode())
        return cls(translator, " and ".join(map(str, runs)), digest, beam, settings.closest)

    def translate(self, _offset: int, pairs: Sequence[Pair]) -> list[Record]:
        """Return a record for each source, with the most likely hypothesis or the one most similar to the reference."""
        sources = [Line(pair.source, tag=pair.tag, context=pair.context) for pair in pairs]
        trees = [pair.tree for pair in pairs] if self.translator.reads_trees else None
        count = self.beam if self.closest else 1
        nbest_lists = self.translator.nbest(sources, count=count, beam=self.beam, trees=trees, align=False)
        records = []
        for pair, hypotheses in zip(pairs, nbest_lists, strict=True):
            best = hypotheses[0]
            if self.closest and pair.target.strip():
                best = max(hypotheses, key=lambda hyp: SIMILARITY.compute([hyp.text], [[pair.target]]).value)
            records.append({"source": pair.source, "target": best.text, "faults": find_faults(best)})
        return records

    def make_job(self, corpus: CorpusSettings, recipe: Recipe) -> ShardedJob[Pair]:
        """Return the job that translates a corpus. Its folder in the cache is named by a digest of all inputs."""
        phrasebook_direction = recipe.data.direction
        fingerprint = fingerprint_corpus(corpus, direction=phrasebook_direction)
        context = self.translator.recipe.data.context
        key = [self.digest, self.beam, self.closest, fingerprint, jobs.SHARD_SIZE, *([context] if context else [])]
        folder = cache_folder(recipe.data.cache) / f"{digest_bytes(json.dumps(key).encode(), size=12)}-answers"

        def read_sources() -> Iterator[Pair]:
            """Yield the pairs of the corpus. Lines of plain text are read as targets; here they are the sources."""
            if corpus.text:
                sources = (Pair(line.target, "", tag=corpus.tag) for line in read_pairs(corpus))
                return attach_to_pairs(sources, context)
            trees = self.translator.reads_trees
            return read_pairs(corpus, direction=phrasebook_direction, trees=trees, context=context)

        return ShardedJob(folder, read_sources, self.translate, SOURCES_PER_BATCH)


@dataclass(frozen=True)
class JobPlan:
    """A corpus, the job that translates it, and the file of the student's training data that gets the translations."""

    corpus: CorpusSettings
    job: ShardedJob[Pair]
    file: Path

    @property
    def translated_corpus(self) -> CorpusSettings:
        return CorpusSettings(jsonl=str(self.file.absolute()), weight=self.corpus.weight, tag=self.corpus.tag)


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
    """Train the student that a recipe describes on translations of the model in `run`. Return the folder `out`.

    Several runs with the same vocabulary teach as an ensemble.
    """
    settings, folder = settings or DistilSettings(), RunFolder(out)
    with join_process_group() as group:
        base_recipe = group.fail_together(lambda: read_recipe(Path(recipe), overrides))
        report = report or Report(quiet=not group.is_main)
        checkpoint = group.run_on_main(lambda: find_checkpoint(folder, resume=resume))
        teacher = group.run_main_first(lambda: Teacher.load(run, base_recipe, settings, group))
        plans = group.fail_together(lambda: plan_translations(base_recipe, teacher, settings, folder))
        originals = base_recipe.data.train if settings.originals else ()
        train_corpora = (*(plan.translated_corpus for plan in plans), *originals)
        teacher_recipe = teacher.translator.recipe
        student = group.fail_together(lambda: make_student_recipe(base_recipe, teacher_recipe, train_corpora))
        options = {**settings.model_dump(mode="json"), "beam": teacher.beam}
        teacher_record = {"teacher": teacher.name, "digest": teacher.digest, **options}
        if checkpoint or resume:
            group.run_on_main(lambda: check_same_teacher(folder, teacher_record, started=bool(checkpoint)))
        with ExitStack() as locks:
            group.run_on_main(lambda: locks.enter_context(lock_run(folder)))
            if not checkpoint:
                group.run_on_main(lambda: folder.create(student))
                group.run_on_main(lambda: write_teacher_record(folder, teacher_record, []))
            if group.run_on_main(lambda: not checkpoint or not all(plan.file.exists() for plan in plans)):
                for plan in plans:  # a shared lock, so that `dragoman cache --clear` does not remove the folder
                    with suppress(OSError):  # if the cache is not writable, translate_corpora raises a UserError
                        locks.enter_context(share_folder(plan.job.folder))
                shard_counts = group.fail_together(lambda: translate_corpora(teacher, plans, group, report))
                group.run_on_main(lambda: write_corpora(folder, plans, shard_counts, teacher_record, report))
        return train(student, out=out, resume=resume, tokenizers=teacher.translator.tokenizers, report=report)


def plan_translations(recipe: Recipe, teacher: Teacher, settings: DistilSettings, folder: RunFolder) -> list[JobPlan]:
    """Plan a job for each training corpus of the recipe and each file of further sources.

    Raise a UserError if a file is missing, or if the teacher does not have the tag of a corpus.
    """
    check_files(recipe)
    extra_corpora = [CorpusSettings(text=str(Path(name).absolute()), tag=settings.tag) for name in settings.sources]
    if settings.tag and not extra_corpora:
        raise UserError("--tag is put before the lines of --source, but there is no --source; leave it out")
    plans = []
    for number, corpus in enumerate([*recipe.data.train, *extra_corpora], 1):
        teacher.translator.encode_tag(corpus.tag)
        plans.append(JobPlan(corpus, teacher.make_job(corpus, recipe), folder.distilled_folder / f"{number}.jsonl"))
    return plans


def make_student_recipe(recipe: Recipe, teacher: Recipe, corpora: tuple[CorpusSettings, ...]) -> Recipe:
    """Return the recipe with the teacher's tokenizer, and with these corpora as training data.

    The student may set tokenizer.sampling (subword regularization) by itself, since it does not change the vocabulary.
    """
    for name in sorted(recipe.tokenizer.model_fields_set - {"sampling"}):
        student_value, teacher_value = getattr(recipe.tokenizer, name), getattr(teacher.tokenizer, name)
        if student_value != teacher_value:
            raise UserError(
                f"the recipe has tokenizer.{name}={student_value}, but a student keeps its teacher's tokenizer, "
                f"which has {name}={teacher_value}; leave it out"
            )
    if recipe.model.kind == "smt":
        raise UserError("a student cannot have model.kind=smt: it would not learn its teacher's vocabulary")
    if recipe.model.task != "translate":
        raise UserError(f"a student cannot have model.kind={recipe.model.kind}: it does not translate")
    if "tree" in recipe.model.source_features:
        raise UserError("a student cannot have model.position=tree: its training data has no syntax trees")
    if recipe.data.context:
        raise UserError("a student cannot have data.context: its training data has no documents; leave it out")
    data = recipe.data.model_copy(update={"train": corpora})
    tokenizer = teacher.tokenizer.model_copy(update={"sampling": recipe.tokenizer.sampling})
    student = recipe.model_copy(update={"data": data, "tokenizer": tokenizer})
    check_settings(student)
    return student


def check_same_teacher(folder: RunFolder, record: Mapping[str, Any], *, started: bool) -> None:
    """Raise a UserError if teacher.json of the run folder records another teacher or other options than `record`.

    `started` is whether the student has a checkpoint. A run without teacher.json was started without a teacher.
    """
    recorded = folder.load_teacher_record()
    with_defaults = {**DistilSettings().model_dump(mode="json"), **recorded}  # older records lack newer options
    is_same = all(with_defaults.get(name) == record[name] for name in ("digest", *DistilSettings.model_fields))
    if (started or recorded) and not is_same:
        raise UserError(
            f"{str(folder.path)!r} was started with {describe_teacher(recorded)}, and cannot continue with "
            f"{describe_teacher(record)}; give the same teacher and options again, or choose another --out"
        )


def describe_teacher(record: Mapping[str, Any]) -> str:
    if not record:
        return "no teacher at all"
    options = [f"beam {record['beam']}"]
    options += [text for name, text in (("closest", "closest"), ("originals", "with originals")) if record.get(name)]
    options += [*record["sources"], *([f"tag {tag}"] if (tag := record.get("tag")) else [])]
    return f"the teacher {record['teacher']} (digest {record['digest'][:8]}, {', '.join(options)})"


def write_teacher_record(folder: RunFolder, record: Mapping[str, Any], corpora: Sequence[Mapping[str, Any]]) -> None:
    """Write teacher.json: the teacher, its options, and the corpora that it has translated."""
    folder.distilled_folder.mkdir(exist_ok=True)
    write_text(folder.distilled_folder / "teacher.json", format_json({**record, "corpora": corpora}))


def translate_corpora(teacher: Teacher, plans: Sequence[JobPlan], group: ProcessGroup, report: Report) -> list[int]:
    """Translate the shards of this process. Return the number of shards of each corpus."""
    sizes = [sum(1 for _ in report.progress("reading").iterate(plan.job.read_items())) for plan in plans]
    verb = "translate" if " and " in teacher.name else "translates"  # an ensemble has several names
    report.log(f"{teacher.name} {verb} {sum(sizes):,} sources with a beam of {teacher.beam}")
    total = sum(jobs.count_local_items(size, group) for size in sizes)
    with report.progress("translating", total=total, unit="sources") as bar:
        return [plan.job.run(group, bar) for plan in plans]


def write_corpora(
    folder: RunFolder,
    plans: Sequence[JobPlan],
    shard_counts: Sequence[int],
    teacher_record: Mapping[str, Any],
    report: Report,
) -> None:
    """Write the student's training data and teacher.json; raise a UserError if too few translations are accepted."""
    pair_filters, corpora, original_pairs = [], [], 0
    for plan, count in zip(plans, shard_counts, strict=True):
        pair_filter = TranslationFilter()
        jobs.write_lines(plan.file, pair_filter.format_lines(plan.job.read_records(count)))
        name, left_out = plan.corpus.title, dict(pair_filter.left_out)
        corpora.append({"file": plan.file.name, "of": name, "answers": pair_filter.accepted, "left_out": left_out})
        pair_filters.append(pair_filter)
        # Files of further sources (corpus.text) have no original targets
        original_pairs += 0 if plan.corpus.text or not teacher_record["originals"] else pair_filter.nonblank
        report.log(f"{name}: {pair_filter}")
    if warning := check_enough_pairs(teacher_record["teacher"], pair_filters, original_pairs):
        report.log(warning)
    write_teacher_record(folder, teacher_record, corpora)


def check_enough_pairs(teacher: str, pair_filters: Sequence[TranslationFilter], originals: int) -> str:
    """Return a warning if many translations are left out, else "". Raise a UserError if too few are accepted.

    `originals` is the number of original pairs that the student also learns from.
    """
    accepted = sum(pair_filter.accepted_nonblank for pair_filter in pair_filters)
    total = sum(pair_filter.nonblank for pair_filter in pair_filters)
    if not accepted:
        raise UserError(f"no translation by {teacher} is good enough to learn from; {suggest_remedy(teacher)}")
    if accepted + originals < MIN_ACCEPTED_FRACTION * (total + originals):
        option = "" if originals else "; --with-originals gives the student the original pairs too"
        raise UserError(
            f"only {accepted:,} of {total:,} translations by {teacher} are good enough to learn from; "
            f"{suggest_remedy(teacher)}{option}"
        )
    return warn_of_poor_translations(teacher, accepted, total)

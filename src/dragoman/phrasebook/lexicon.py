"""The lexicon: nouns, adjectives, verbs and adverbials with their inflected forms, read from the .tsv tables.

The tables hold what no rule predicts; regular forms are derived here. Cases are numbered nominative 0, accusative 1,
dative 2, genitive 3; genders masculine 0, feminine 1, neuter 2. The plural counts as a fourth gender, 3, because German
articles and adjectives do not distinguish gender in the plural.

    nouns.tsv        genitive and german_plural are endings if they begin with a hyphen; a plural "." marks a mass noun.
                     tags say what the noun denotes, possessors the tags of what it may belong to ("the roof of ...").
    adjectives.tsv   stem is the irregular stem before an ending (teuer, teur-es). kind is "colour", or "state" for what
                     may change by tomorrow. tags say which nouns the adjective fits.
    verbs.tsv        a bar separates a separable prefix (an|rufen); "look-for" keeps its particle before the object, and
                     "pick_up" lets an object pronoun stand between. The last columns say which nouns (by tag) fill each
                     argument, which clauses may follow, and which adjuncts fit.
    adverbials.tsv   affirmative ones ("every day") fit neither a negated clause nor one with "to be".

Every English word translates exactly one German word and the other way round, and no form belongs to two words.
Therefore either sentence of a pair reveals its content words, and the splits are computed from those.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

NOMINATIVE, ACCUSATIVE, DATIVE, GENITIVE = range(4)
MASCULINE, FEMININE, NEUTER, PLURAL = range(4)

# The constructions a word may be held out from, and the fraction of words that are held out from one of them.
CONSTRUCTIONS = {
    "noun": ("subject", "accusative", "prepositional", "relative", "dative", "antecedent"),
    "verb": ("fronted", "final", "relative", "question", "negated", "auxiliary"),
    "adjective": ("subject", "accusative", "other", "plural"),
}
HELD_OUT_SHARE = {"noun": 0.55, "verb": 0.55, "adjective": 0.4}

Row = dict[str, str]  # a row of a table: column -> cell
NounForms = tuple[tuple[str, ...], tuple[str, ...]]  # [plural][case]


class Preposition(NamedTuple):
    english: str
    german: str
    case: int  # that German uses after it


class Adverbial(NamedTuple):
    """A fixed phrase. Phrases with as many words in both languages are aligned word by word, others all with all."""

    english: tuple[str, ...]
    german: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Noun:
    lemma: str
    forms: tuple[NounForms, NounForms]  # English, German
    gender: int
    tags: frozenset[str]  # what it denotes; the lemma is one of them
    possessors: tuple[str, ...]
    pronoun: str  # he, she, it; empty where natural and grammatical gender differ (das Mädchen ... she)
    proper: bool
    mass: bool  # without a plural, as names are
    hash: int
    held_out: str


@dataclass(frozen=True, slots=True, eq=False)
class Adjective:
    """An adjective; forms are pairs of English and German."""

    lemma: str
    positive: tuple[str, str]
    comparative: tuple[str, str]
    adverb: tuple[str, str]
    stem: str  # of German, before an ending
    kind: str
    opposites: tuple[str, ...]
    tags: frozenset[str]
    hash: int
    held_out: str


@dataclass(frozen=True, slots=True, eq=False)
class Verb:
    lemma: str
    english: tuple[str, str, str, str]  # base, third person, past, participle
    particle: str
    inseparable: bool  # the particle precedes even a pronoun: looks for it
    prefix: str  # of a separable German verb
    present: tuple[str, str, str]  # ich, er, wir
    past: tuple[str, str]  # er, wir
    infinitive: str
    participle: str
    auxiliary: str  # haben or sein
    hash: int
    held_out: str


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """A valency frame: one way to use a verb, with the nouns that fit each argument."""

    verb: Verb
    subjects: tuple[Noun, ...]
    accusative: tuple[Noun, ...]
    dative: tuple[Noun, ...]
    prepositional: tuple[Noun, ...]
    preposition: Preposition | None
    clause: str  # that, whether, to or nothing
    predicates: frozenset[str]  # adjectives that complete the verb: remains calm
    adjuncts: frozenset[str]  # of place, company, manner
    stative: bool
    animate: bool  # all subjects are people or animals
    personal: bool  # some subjects are people


def stable_hash(text: str) -> int:
    """Return a 64-bit hash that is the same on every machine."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def choose_held_out(part: str, lemma: str, constructions: tuple[str, ...]) -> str:
    """Return the construction that this word appears in only in the split `unseen`, or an empty string."""
    number = stable_hash(f"held {part} {lemma}")
    if number % 1000 >= 1000 * HELD_OUT_SHARE[part]:
        return ""
    return constructions[(number >> 20) % len(constructions)]


def add_s(word: str) -> str:
    """Form an English plural or third person: cats, boxes, cherries."""
    if word.endswith(("s", "x", "ch", "sh", "z")) or word in ("go", "echo"):
        return word + "es"
    if word.endswith("y") and word[-2] not in "aeou":
        return word[:-1] + "ies"
    return word + "s"


def read_table(name: str) -> list[Row]:
    text = Path(__file__).with_name(f"{name}.tsv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE))


def read_noun(row: Row) -> Noun:
    lemma, base = row["english"], row["german"]
    genitive, plural = (
        base + cell[1:] if cell.startswith("-") else cell for cell in (row["genitive"], row["german_plural"])
    )
    plural = "" if plural == "." else plural
    plural_dative = plural if not plural or plural[-1] in "ns" else plural + "n"
    gender = ("der", "die", "das").index(row["article"])
    weak = gender == MASCULINE and genitive.endswith("n")  # den Studenten, dem Studenten, des Studenten
    object_form = genitive if weak else base
    tags = frozenset([*row["tags"].split(), lemma])
    part = "name" if "name" in tags else "noun"
    pronoun = ("he", "she", "")[gender] if tags & {"person", "name"} else "it"
    constructions = tuple(
        name
        for name in CONSTRUCTIONS["noun"]
        if (name != "dative" or "person" in tags) and (name != "antecedent" or pronoun)
    )
    ordinary = plural and not tags & {"weather", "event"}
    return Noun(
        lemma=lemma,
        forms=(
            ((lemma,) * 4, (plural and (row["plural"] or add_s(lemma)),) * 4),
            ((base, object_form, object_form, genitive), (plural, plural, plural_dative, plural)),
        ),
        gender=gender,
        tags=tags,
        possessors=tuple(row["possessors"].split()),
        pronoun=pronoun,
        proper="name" in tags,
        mass=not plural,
        hash=stable_hash(f"{part} {lemma}"),
        held_out=choose_held_out("noun", lemma, constructions) if ordinary else "",
    )


def read_adjective(row: Row) -> Adjective:
    lemma, german = row["english"], row["german"]
    return Adjective(
        lemma=lemma,
        positive=(lemma, german),
        comparative=(row["comparative"] or f"more {lemma}", row["german_comparative"]),
        adverb=(row["adverb"], german),
        stem=row["stem"] or german.removesuffix("e"),
        kind=row["kind"],
        opposites=tuple(row["opposites"].split()),
        tags=frozenset(row["tags"].split()),
        hash=stable_hash(f"adjective {lemma}"),
        held_out=choose_held_out("adjective", lemma, CONSTRUCTIONS["adjective"]),
    )


def read_verb(row: Row) -> Verb:
    lemma = row["english"]
    base, *particle = re.split("[-_]", lemma)
    prefix, _, infinitive = row["german"].rpartition("|")
    stem = infinitive.removesuffix("n").removesuffix("e")
    first_person = stem[:-2] + "le" if infinitive.endswith("eln") else stem + "e"
    past = row["german_past"]
    return Verb(
        lemma=lemma,
        english=(base, add_s(base), row["past"] or base + "ed", row["participle"] or base + "ed"),
        particle="".join(particle),
        inseparable="-" in lemma,
        prefix=prefix,
        present=(first_person, row["third_person"], infinitive),
        past=(past, past + ("n" if past.endswith("e") else "en")),
        infinitive=infinitive,
        participle=row["german_participle"],
        auxiliary=row["auxiliary"],
        hash=stable_hash(f"verb {lemma}"),
        held_out=choose_held_out("verb", lemma, CONSTRUCTIONS["verb"]),
    )


def index_by_noun(entries: Iterable[tuple[Frame, tuple[Noun, ...]]]) -> dict[Noun, tuple[Frame, ...]]:
    """Map each noun to the frames in which it fits an argument."""
    frames: dict[Noun, list[Frame]] = {}
    for frame, nouns in entries:
        for noun in nouns:
            frames.setdefault(noun, []).append(frame)
    return {noun: tuple(some) for noun, some in frames.items()}


class BilingualLexicon:
    """All words, and for each position in a sentence the words that fit it."""

    def __init__(self) -> None:
        self.nouns = tuple(map(read_noun, read_table("nouns")))
        self.adjectives = tuple(map(read_adjective, read_table("adjectives")))
        verbs = [(row, read_verb(row)) for row in read_table("verbs")]
        self.verbs = tuple(verb for _, verb in verbs)
        self.all_frames = tuple(frame for row, verb in verbs for frame in self.read_frames(row, verb))
        self.index_frames()
        self.index_words()

    def select_nouns(self, *tags: str) -> tuple[Noun, ...]:
        """Return the nouns with any of these tags, in the order of the table."""
        return tuple(noun for noun in self.nouns if noun.tags.intersection(tags))

    def read_frames(self, row: Row, verb: Verb) -> list[Frame]:
        """Return the frame with noun phrases, unless the verb takes nothing but clauses, and one for each clause."""
        subjects = self.select_nouns(*row["subject"].split())
        preposition = None
        if row["preposition"]:
            english, german, case = re.split("[/+]", row["preposition"])
            preposition = Preposition(english, german, ("nom", "acc", "dat", "gen").index(case))
        full = Frame(
            verb=verb,
            subjects=subjects,
            accusative=self.select_nouns(*row["accusative"].split()),
            dative=self.select_nouns(*row["dative"].split()),
            prepositional=self.select_nouns(*row["prepositional"].split()),
            preposition=preposition,
            clause="",
            predicates=frozenset(row["predicates"].split()),
            adjuncts=frozenset(row["adjuncts"].split()),
            stative=bool(row["stative"]),
            animate=all(noun.tags & {"person", "animal"} for noun in subjects),
            personal=any("person" in noun.tags for noun in subjects),
        )
        bare = replace(full, accusative=(), dative=(), prepositional=(), preposition=None, adjuncts=frozenset())
        frames = [replace(bare, clause=clause) for clause in row["clauses"].split()]
        has_arguments = full.accusative or full.dative or full.prepositional
        return [full, *frames] if has_arguments or not frames else frames

    def index_frames(self) -> None:
        """Select the frames for each kind of clause, question and argument."""
        self.frames = tuple(frame for frame in self.all_frames if not frame.clause)
        self.reporting = tuple(frame for frame in self.all_frames if frame.clause in ("that", "whether"))
        self.controlling = tuple(frame for frame in self.all_frames if frame.clause == "to")
        personal = tuple(frame for frame in self.frames if frame.animate and frame.personal)
        self.voluntary = tuple(frame for frame in personal if not frame.stative)
        single = [frame for frame in self.frames if not (frame.accusative and frame.dative)]
        transitive = tuple(frame for frame in single if frame.accusative)
        self.question_frames = {
            "who": personal,
            "what": tuple(f for f in transitive if not any("person" in noun.tags for noun in f.accusative)),
            "whom": tuple(f for f in single if any("person" in noun.tags for noun in f.accusative or f.dative)),
            "which": transitive,
            "where": tuple(frame for frame in self.frames if "place" in frame.adjuncts),
        }
        self.frames_by_role = {
            "subject": index_by_noun((frame, frame.subjects) for frame in self.frames),
            "accusative": index_by_noun((frame, frame.accusative) for frame in single),
            "dative": index_by_noun((frame, frame.dative) for frame in single),
            "prepositional": index_by_noun((frame, frame.prepositional) for frame in single),
        }

    def index_words(self) -> None:
        """Select nouns, adjectives and adverbials by what they are used for."""
        fitting = {noun: [a for a in self.adjectives if a.tags & noun.tags] for noun in self.nouns}
        self.colours = {noun: tuple(a for a in some if a.kind == "colour") for noun, some in fitting.items()}
        self.qualities = {noun: tuple(a for a in some if a.kind != "colour") for noun, some in fitting.items()}
        self.described = tuple(noun for noun in self.nouns if self.qualities[noun])
        self.possessors = {noun: self.select_nouns(*noun.possessors) for noun in self.nouns if noun.possessors}
        self.people, self.names = self.select_nouns("person"), self.select_nouns("name")
        self.carried, self.furniture = self.select_nouns("carried"), self.select_nouns("furniture")
        self.places = self.select_nouns("in", "on", "at")
        self.weather, self.events = self.select_nouns("weather"), self.select_nouns("event")
        self.manners = tuple(adjective for adjective in self.adjectives if adjective.adverb[0])
        self.moods = tuple(adjective for adjective in self.adjectives if "person" in adjective.tags)
        rows = [
            (row, Adverbial(tuple(row["english"].split()), tuple(row["german"].split())))
            for row in read_table("adverbials")
        ]
        self.adverbials = {
            kind: tuple(adverbial for row, adverbial in rows if row["kind"] == kind)
            for kind in ("frequency", "sentence", "degree")
        }
        self.times, self.neutral_times = (
            {
                tense: tuple(a for row, a in rows if tense in row["tenses"].split() and row["affirmative"] in allowed)
                for tense in ("present", "past", "perfect", "future")
            }
            for allowed in (("", "yes"), ("",))
        )


@cache
def load_lexicon() -> BilingualLexicon:
    """Read the tables, once per process."""
    return BilingualLexicon()


@cache
def find_comparable(noun: Noun, adjective: Adjective) -> tuple[Noun, ...]:
    """Return nouns to compare `noun` with: they share a kind with it, and the adjective fits them too."""
    kinds = noun.tags - {noun.lemma, "goods", "small", "portable", "carried", "idea", "in", "on", "at"}
    fit = (other for other in load_lexicon().nouns if other.tags & kinds and other.tags & adjective.tags)
    return tuple(other for other in fit if not other.mass and other is not noun)

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
from functools import cache
from pathlib import Path
from typing import NamedTuple

from dragoman.io import hash_stably

NOMINATIVE, ACCUSATIVE, DATIVE, GENITIVE = range(4)
MASCULINE, FEMININE, NEUTER, PLURAL = range(4)
ROLES = ("subject", "dative", "accusative", "prepositional")  # of the arguments of a verb
CASES = {"subject": NOMINATIVE, "accusative": ACCUSATIVE, "dative": DATIVE, "possessor": GENITIVE}  # German, by role

# The constructions a word may be held out from, and the fraction of words that are held out from one of them.
CONSTRUCTIONS = {
    "noun": ("subject", "accusative", "prepositional", "relative", "dative", "antecedent"),
    "verb": ("fronted", "final", "relative", "question", "negated", "auxiliary"),
    "adjective": ("subject", "accusative", "other", "plural"),
}
HELD_OUT_SHARE = {"noun": 0.55, "verb": 0.55, "adjective": 0.4}

Row = dict[str, str]  # a row of a table: column -> cell


class Preposition(NamedTuple):
    """A preposition; `case` is the case that German uses after it."""

    english: str
    german: str
    case: int

    @classmethod
    def parse(cls, text: str) -> Preposition:
        """Parse a preposition such as "for/auf+acc"."""
        english, german, case = re.split("[/+]", text)
        return cls(english, german, ("nom", "acc", "dat", "gen").index(case))


class Adverbial(NamedTuple):
    """A fixed phrase. Phrases with as many words in both languages are aligned word by word, others all with all."""

    english: tuple[str, ...]
    german: tuple[str, ...]


class Noun:
    """A noun, or the name of a person."""

    def __init__(self, row: Row) -> None:
        self.lemma = row["english"]
        base = row["german"]
        genitive, plural = (
            base + cell[1:] if cell.startswith("-") else cell for cell in (row["genitive"], row["german_plural"])
        )
        plural = "" if plural == "." else plural
        plural_dative = plural if not plural or plural[-1] in "ns" else plural + "n"
        self.gender = ("der", "die", "das").index(row["article"])
        weak = self.gender == MASCULINE and genitive.endswith("n")  # den Studenten, dem Studenten, des Studenten
        object_form = genitive if weak else base
        self.forms = (  # [English or German][plural][case]
            ((self.lemma,) * 4, (plural and (row["plural"] or add_s(self.lemma)),) * 4),
            ((base, object_form, object_form, genitive), (plural, plural, plural_dative, plural)),
        )
        self.tags = frozenset([*row["tags"].split(), self.lemma])  # what the noun denotes
        self.possessors = row["possessors"].split()
        self.proper = "name" in self.tags
        self.mass = not plural  # names count as mass nouns
        # No pronoun replaces a noun whose natural and grammatical gender differ: das Mädchen ... she.
        self.pronoun = ("he", "she", "")[self.gender] if self.tags & {"person", "name"} else "it"
        self.hash = hash_stably(f"{'name' if self.proper else 'noun'} {self.lemma}".encode())
        self.held_out = ""
        if plural and not self.tags & {"weather", "event"}:
            possible = {"dative": "person" in self.tags, "antecedent": bool(self.pronoun)}
            self.held_out = choose_held_out("noun", self.lemma, **possible)


class Adjective:
    """An adjective; forms are pairs of English and German."""

    def __init__(self, row: Row) -> None:
        self.lemma, german = row["english"], row["german"]
        self.positive = (self.lemma, german)
        self.comparative = (row["comparative"] or f"more {self.lemma}", row["german_comparative"])
        self.adverb = Adverbial(tuple(row["adverb"].split()), (german,))  # without English words: there is none
        self.stem = row["stem"] or german.removesuffix("e")  # of German, before an ending
        self.kind = row["kind"]
        self.opposites = row["opposites"].split()
        self.tags = frozenset(row["tags"].split())
        self.hash = hash_stably(f"adjective {self.lemma}".encode())
        self.held_out = choose_held_out("adjective", self.lemma)


class Verb:
    """A verb."""

    def __init__(self, row: Row) -> None:
        self.lemma = row["english"]
        base, *particle = re.split("[-_]", self.lemma)
        self.particle = "".join(particle)
        self.inseparable = "-" in self.lemma  # the particle precedes even a pronoun: looks for it
        # base, third person, past, participle
        self.english = (base, add_s(base), row["past"] or base + "ed", row["participle"] or base + "ed")
        self.prefix, _, self.infinitive = row["german"].rpartition("|")  # prefix of a separable German verb
        stem = self.infinitive.removesuffix("n").removesuffix("e")
        first_person = stem[:-2] + "le" if self.infinitive.endswith("eln") else stem + "e"
        self.present = (first_person, row["third_person"], self.infinitive)  # ich, er, wir
        past = row["german_past"]
        self.past = (past, past + ("n" if past.endswith("e") else "en"))  # er, wir
        self.participle, self.auxiliary = row["german_participle"], row["auxiliary"]
        self.hash = hash_stably(f"verb {self.lemma}".encode())
        self.held_out = choose_held_out("verb", self.lemma)


class Frame:
    """A valency frame: one way to use a verb. `fillers` has the nouns that fit each argument, by role."""

    def __init__(self, row: Row, verb: Verb, nouns: tuple[Noun, ...], clause: str = "") -> None:
        self.verb = verb
        self.clause = clause  # that, whether, to or nothing
        self.fillers = {role: select_nouns(nouns, *row[role].split()) for role in ROLES}
        self.preposition = Preposition.parse(row["preposition"]) if row["preposition"] else None
        self.predicates = frozenset(row["predicates"].split())  # adjectives that complete the verb: remains calm
        self.adjuncts = frozenset(row["adjuncts"].split())  # place, company, manner
        self.stative = bool(row["stative"])
        self.animate = all(noun.tags & {"person", "animal"} for noun in self.fillers["subject"])
        self.personal = any("person" in noun.tags for noun in self.fillers["subject"])


def choose_held_out(part: str, lemma: str, **possible: bool) -> str:
    """Return the construction that this word appears in only in the split `unseen`, or an empty string.

    `possible` tells whether the word can appear in a construction at all; by default it can.
    """
    number = hash_stably(f"held {part} {lemma}".encode())
    if number % 1000 >= 1000 * HELD_OUT_SHARE[part]:
        return ""
    constructions = [name for name in CONSTRUCTIONS[part] if possible.get(name, True)]
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


def select_nouns(nouns: tuple[Noun, ...], *tags: str) -> tuple[Noun, ...]:
    """Return the nouns with any of these tags, in the order of the table."""
    return tuple(noun for noun in nouns if noun.tags.intersection(tags))


class BilingualLexicon:
    """All words, and for each position in a sentence the words that fit it."""

    def __init__(self) -> None:
        self.nouns = tuple(map(Noun, read_table("nouns")))
        self.adjectives = tuple(map(Adjective, read_table("adjectives")))
        self.verbs: list[Verb] = []
        self.all_frames: list[Frame] = []
        for row in read_table("verbs"):
            verb = Verb(row)
            self.verbs.append(verb)
            # One frame with noun phrases, unless the verb takes nothing but clauses, and one for each clause.
            bare = row | dict.fromkeys((*ROLES[1:], "preposition", "adjuncts"), "")
            clauses = row["clauses"].split()
            if any(row[role] for role in ROLES[1:]) or not clauses:
                self.all_frames.append(Frame(row, verb, self.nouns))
            self.all_frames += [Frame(bare, verb, self.nouns, clause) for clause in clauses]
        self.index_frames()
        self.index_words()

    def index_frames(self) -> None:
        """Select the frames for each kind of clause, question and argument."""
        self.frames = [frame for frame in self.all_frames if not frame.clause]
        self.reporting = [frame for frame in self.all_frames if frame.clause in ("that", "whether")]
        self.controlling = [frame for frame in self.all_frames if frame.clause == "to"]
        personal = [frame for frame in self.frames if frame.animate and frame.personal]
        self.voluntary = [frame for frame in personal if not frame.stative]
        single = [frame for frame in self.frames if not (frame.fillers["accusative"] and frame.fillers["dative"])]
        transitive = [frame for frame in single if frame.fillers["accusative"]]
        takes_person = {
            frame: any("person" in noun.tags for noun in frame.fillers["accusative"] or frame.fillers["dative"])
            for frame in single
        }
        self.question_frames = {
            "who": personal,
            "what": [frame for frame in transitive if not takes_person[frame]],
            "whom": [frame for frame in single if takes_person[frame]],
            "which": transitive,
            "where": [frame for frame in self.frames if "place" in frame.adjuncts],
        }
        self.frames_by_role: dict[str, dict[Noun, list[Frame]]] = {role: {} for role in ROLES}
        for role, by_noun in self.frames_by_role.items():
            for frame in self.frames if role == "subject" else single:
                for noun in frame.fillers[role]:
                    by_noun.setdefault(noun, []).append(frame)

    def index_words(self) -> None:
        """Select nouns, adjectives and adverbials by what they are used for."""
        nouns = self.nouns
        fitting = {noun: [a for a in self.adjectives if a.tags & noun.tags] for noun in nouns}
        self.colours = {noun: [a for a in some if a.kind == "colour"] for noun, some in fitting.items()}
        self.qualities = {noun: [a for a in some if a.kind != "colour"] for noun, some in fitting.items()}
        self.described = [noun for noun in nouns if self.qualities[noun]]
        self.possessors = {noun: select_nouns(nouns, *noun.possessors) for noun in nouns if noun.possessors}
        self.people, self.names = select_nouns(nouns, "person"), select_nouns(nouns, "name")
        self.carried, self.furniture = select_nouns(nouns, "carried"), select_nouns(nouns, "furniture")
        self.weather, self.events = select_nouns(nouns, "weather"), select_nouns(nouns, "event")
        self.places = select_nouns(nouns, "in", "on", "at")
        self.manners = [adjective for adjective in self.adjectives if adjective.adverb.english]
        self.moods = [adjective for adjective in self.adjectives if "person" in adjective.tags]
        self.adverbials: dict[str, list[Adverbial]] = {}  # by kind; times by tense
        self.neutral_times: dict[str, list[Adverbial]] = {}
        for row in read_table("adverbials"):
            adverbial = Adverbial(tuple(row["english"].split()), tuple(row["german"].split()))
            for key in row["tenses"].split() or [row["kind"]]:
                self.adverbials.setdefault(key, []).append(adverbial)
                if not row["affirmative"]:
                    self.neutral_times.setdefault(key, []).append(adverbial)


@cache
def load_lexicon() -> BilingualLexicon:
    """Read the tables, once per process."""
    return BilingualLexicon()


@cache
def find_similar(noun: Noun, adjective: Adjective) -> tuple[Noun, ...]:
    """Return nouns to compare `noun` with: they share a kind with it, and the adjective fits them too."""
    kinds = noun.tags - {noun.lemma, "goods", "small", "portable", "carried", "idea", "in", "on", "at"}
    fit = (other for other in load_lexicon().nouns if other.tags & kinds and other.tags & adjective.tags)
    return tuple(other for other in fit if not other.mass and other is not noun)

"""The lexicon: nouns, adjectives, verbs and adverbials with their inflected forms, read from the .tsv tables.

The tables list the irregular forms; this module derives the regular ones. Cases are numbered nominative 0, accusative
1, dative 2, genitive 3; genders masculine 0, feminine 1, neuter 2. The plural counts as a fourth gender, 3, because
German articles and adjectives do not distinguish gender in the plural.

    nouns.tsv        A genitive or german_plural that begins with a hyphen is an ending; a german_plural "." marks a
                     mass noun. tags classify what the noun denotes; in, on and at are its preposition as a place. A
                     person may have a belonging along ("the man with the dog"). possessors are the tags of the nouns
                     that may follow in the genitive ("the roof of the house").
    adjectives.tsv   stem is the irregular German stem before an ending (teuer, teur-es). kind is "colour", "state" for
                     a temporary condition (tired), or empty for a lasting quality. tags select the nouns that the
                     adjective may describe.
    verbs.tsv        A bar follows a separable German prefix (an|rufen). An English particle after a hyphen (look-for)
                     always precedes the object; after an underscore (pick_up) it follows an object pronoun. The columns
                     subject, dative, accusative and prepositional hold the tags of the nouns that may fill these
                     arguments; clauses and adjuncts list what else the verb may take.
    determiners.tsv  A row lists, with weights, the determiners that a noun phrase may have in some context. If mass is
                     empty, mass nouns have the determiners of the singular.
    adverbials.tsv   kind is time, frequency, degree or sentence_adverb; a question adverb is a kind of its own (where).
                     Affirmative adverbials ("every day") fit neither a negated clause nor one with "to be".

Each English word has exactly one German translation and vice versa, and no form belongs to two words. Therefore the
content words of a pair can be read off either sentence. `generate.py` computes the split of a pair from their hashes.
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
ARGUMENT_ROLES = ("subject", "dative", "accusative", "prepositional")
CASES = {"subject": NOMINATIVE, "accusative": ACCUSATIVE, "dative": DATIVE, "possessor": GENITIVE}  # of German, by role

# To test generalization, some words are held out from one construction: the training data contains the word and the
# construction, but never both together.
CONSTRUCTIONS = {
    # The noun's role, or its reference: by a relative pronoun (relative) or a personal pronoun (antecedent).
    "noun": ("subject", "accusative", "prepositional", "relative", "dative", "antecedent"),
    # Clauses by kind (subordinate: with a conjunction), with words before the subject (fronted), with a modal or will.
    "verb": ("fronted", "subordinate", "relative", "question", "negated", "auxiliary"),
    "adjective": ("subject", "accusative", "other", "plural"),  # the role or the number of its noun
}
HELD_OUT_FRACTION = {"noun": 0.55, "verb": 0.55, "adjective": 0.4}  # of the words

TableRow = dict[str, str]  # a row of a .tsv table: column -> cell


class Preposition(NamedTuple):
    """A preposition in both languages, and the case of the German noun phrase after it."""

    english: str
    german: str
    case: int

    @classmethod
    def parse(cls, text: str) -> Preposition:
        english, german, case = re.split("[/+]", text)
        return cls(english, german, ("nom", "acc", "dat", "gen").index(case))


class Adverbial(NamedTuple):
    """An adverb or a fixed adverbial phrase, such as "every day" / "jeden Tag", as words of both languages."""

    english: tuple[str, ...]
    german: tuple[str, ...]


class Noun:
    """A noun, or the name of a person."""

    def __init__(self, row: TableRow) -> None:
        self.lemma = row["english"]
        base = row["german"]
        genitive, plural = (
            base + cell[1:] if cell.startswith("-") else cell for cell in (row["genitive"], row["german_plural"])
        )
        plural = "" if plural == "." else plural
        plural_dative = plural if not plural or plural[-1] in "ns" else plural + "n"
        self.gender = ("der", "die", "das").index(row["article"])
        # Masculine nouns of the weak declension have the same ending in all cases but the nominative: den Studenten.
        weak = self.gender == MASCULINE and genitive.endswith("n")
        object_form = genitive if weak else base
        self.forms = (  # indices: 0 English, 1 German; 0 singular, 1 plural; case
            ((self.lemma,) * 4, (plural and (row["plural"] or add_s(self.lemma)),) * 4),
            ((base, object_form, object_form, genitive), (plural, plural, plural_dative, plural)),
        )
        self.tags = frozenset([*row["tags"].split(), self.lemma])  # the lemma is a tag, so that tables can name a noun
        self.possessors = row["possessors"].split()
        self.proper = "name" in self.tags
        self.mass = not plural  # names count as mass nouns
        # The English pronoun. Neuter persons (das Mädchen) have none: the languages would disagree about the gender.
        self.pronoun = ("he", "she", "")[self.gender] if self.tags & {"person", "name"} else "it"
        self.hash = hash_stably(f"{'name' if self.proper else 'noun'} {self.lemma}".encode())
        self.held_out = ""
        if plural and not self.tags & {"weather", "event"}:  # mass nouns, weather and events fit few constructions
            possible = {"dative": "person" in self.tags, "antecedent": bool(self.pronoun)}
            self.held_out = choose_held_out("noun", self.lemma, **possible)


class Adjective:
    """An adjective. `positive` and `comparative` are (English, German) pairs."""

    def __init__(self, row: TableRow) -> None:
        self.lemma, german = row["english"], row["german"]
        self.positive = (self.lemma, german)
        self.comparative = (row["comparative"] or f"more {self.lemma}", row["german_comparative"])
        self.adverb = Adverbial(tuple(row["adverb"].split()), (german,))  # unused if the English column is empty
        self.stem = row["stem"] or german.removesuffix("e")  # German stem before an ending
        self.kind = row["kind"]
        self.opposites = row["opposites"].split()
        self.tags = frozenset(row["tags"].split())
        self.hash = hash_stably(f"adjective {self.lemma}".encode())
        self.held_out = choose_held_out("adjective", self.lemma)


class Verb:
    """A verb with its English and German forms."""

    def __init__(self, row: TableRow) -> None:
        self.lemma = row["english"]
        base, *particle = re.split("[-_]", self.lemma)
        self.english_base, self.particle = base, "".join(particle)
        self.inseparable = "-" in self.lemma  # the English particle precedes even a pronoun: looks for it
        self.english_present = (base, add_s(base), base)  # I, he, we
        self.english_past, self.english_participle = row["past"] or base + "ed", row["participle"] or base + "ed"
        self.prefix, _, self.infinitive = row["german"].rpartition("|")  # only separable verbs have a prefix
        stem = self.infinitive.removesuffix("n").removesuffix("e")
        first_person = stem[:-2] + "le" if self.infinitive.endswith("eln") else stem + "e"
        self.present = (first_person, row["third_person"], self.infinitive)  # ich, er, wir
        past = row["german_past"]
        self.past = (past, past, past + ("n" if past.endswith("e") else "en"))  # ich, er, wir
        self.participle, self.auxiliary = row["german_participle"], row["auxiliary"]
        self.hash = hash_stably(f"verb {self.lemma}".encode())
        self.held_out = choose_held_out("verb", self.lemma)


class Frame:
    """A valency frame: one combination of arguments that a verb can take."""

    def __init__(self, row: TableRow, verb: Verb, nouns: tuple[Noun, ...], clause: str = "") -> None:
        self.verb = verb
        self.clause = clause  # introduces the clausal complement, if the frame has one: "that", "whether" or "to"
        # Empty: no such argument
        self.fillers = {role: select_nouns(nouns, *row[role].split()) for role in ARGUMENT_ROLES}
        self.preposition = Preposition.parse(row["preposition"]) if row["preposition"] else None
        self.predicates = frozenset(row["predicates"].split())  # adjectives that complete the verb: remains calm
        self.adjuncts = frozenset(row["adjuncts"].split())  # of place, company, manner
        self.stative = bool(row["stative"])  # describes a state or something involuntary: no modal verb fits
        # Whether all possible subjects are people or animals, and whether some are people.
        self.animate = all(noun.tags & {"person", "animal"} for noun in self.fillers["subject"])
        self.personal = any("person" in noun.tags for noun in self.fillers["subject"])


def choose_held_out(part_of_speech: str, lemma: str, **possible: bool) -> str:
    """Return the construction from which this word is held out, or an empty string.

    Only the split `unseen` has the word in that construction. The choice depends on a hash of the word alone. A keyword
    such as `dative=False` excludes a construction in which the word cannot appear at all.
    """
    number = hash_stably(f"held {part_of_speech} {lemma}".encode())
    if number % 1000 >= 1000 * HELD_OUT_FRACTION[part_of_speech]:
        return ""
    constructions = [name for name in CONSTRUCTIONS[part_of_speech] if possible.get(name, True)]
    return constructions[(number >> 20) % len(constructions)]  # higher bits, independent of the test above


def add_s(word: str) -> str:
    """Return the English plural of a noun or third person of a verb: cats, boxes, cherries, goes."""
    if word.endswith(("s", "x", "ch", "sh", "z")) or word in ("go", "echo"):
        return word + "es"
    if word.endswith("y") and word[-2] not in "aeou":
        return word[:-1] + "ies"
    return word + "s"


def read_table(name: str) -> list[TableRow]:
    """Read NAME.tsv from this package; its first line names the columns."""
    text = Path(__file__).with_name(f"{name}.tsv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE))


def expand_weights(text: str) -> tuple[str, ...]:
    """Return the words of a text such as "the*3 a -", each repeated as often as its weight; "-" is the empty string."""
    entries = [entry.partition("*") for entry in text.split()]
    return tuple("" if name == "-" else name for name, _, weight in entries for _ in range(int(weight or 1)))


def select_nouns(nouns: tuple[Noun, ...], *tags: str) -> tuple[Noun, ...]:
    return tuple(noun for noun in nouns if noun.tags.intersection(tags))


class BilingualLexicon:
    """All words and frames of the tables, and indexes of those that can be used for a given purpose."""

    def __init__(self) -> None:
        self.nouns = tuple(map(Noun, read_table("nouns")))
        self.adjectives = tuple(map(Adjective, read_table("adjectives")))
        self.verbs: list[Verb] = []
        self.all_frames: list[Frame] = []
        for row in read_table("verbs"):
            verb = Verb(row)
            self.verbs.append(verb)
            # A verb has one frame with noun phrases, unless it takes only clauses, and one frame for each clause type.
            without_objects = row | dict.fromkeys((*ARGUMENT_ROLES[1:], "preposition", "adjuncts"), "")
            clauses = row["clauses"].split()
            if any(row[role] for role in ARGUMENT_ROLES[1:]) or not clauses:
                self.all_frames.append(Frame(row, verb, self.nouns))
            self.all_frames += [Frame(without_objects, verb, self.nouns, clause) for clause in clauses]
        self.index_frames()
        self.index_words()

    def index_frames(self) -> None:
        """Group the frames by type of clause, by question word, and by the nouns that can fill each argument."""
        self.frames = [frame for frame in self.all_frames if not frame.clause]
        self.reporting = [frame for frame in self.all_frames if frame.clause in ("that", "whether")]  # hopes that
        self.controlling = [frame for frame in self.all_frames if frame.clause == "to"]  # tries to
        personal = [frame for frame in self.frames if frame.animate and frame.personal]
        self.voluntary = [frame for frame in personal if not frame.stative]  # may follow "tries to"
        not_ditransitive = [f for f in self.frames if not (f.fillers["accusative"] and f.fillers["dative"])]
        transitive = [frame for frame in not_ditransitive if frame.fillers["accusative"]]
        takes_person = {  # whether the object can be a person
            frame: any("person" in noun.tags for noun in frame.fillers["accusative"] or frame.fillers["dative"])
            for frame in not_ditransitive
        }
        self.question_frames = {
            "who": personal,
            "what": [frame for frame in transitive if not takes_person[frame]],
            "whom": [frame for frame in not_ditransitive if takes_person[frame]],
            "which": transitive,
            "where": [frame for frame in self.frames if "place" in frame.adjuncts],
        }
        self.frames_by_role: dict[str, dict[Noun, list[Frame]]] = {role: {} for role in ARGUMENT_ROLES}
        for role, by_noun in self.frames_by_role.items():
            # Pronouns as objects of ditransitive verbs would need an order that english.py lacks: gives it to the man.
            for frame in self.frames if role == "subject" else not_ditransitive:
                for noun in frame.fillers[role]:
                    by_noun.setdefault(noun, []).append(frame)

    def index_words(self) -> None:
        """Group nouns, adjectives and adverbials by use."""
        nouns = self.nouns
        fitting = {noun: [a for a in self.adjectives if a.tags & noun.tags] for noun in nouns}
        self.colours = {noun: [a for a in fitting[noun] if a.kind == "colour"] for noun in nouns}
        self.qualities = {noun: [a for a in fitting[noun] if a.kind != "colour"] for noun in nouns}
        self.describable = [noun for noun in nouns if self.qualities[noun]]
        self.possessors = {noun: select_nouns(nouns, *noun.possessors) for noun in nouns if noun.possessors}
        self.people, self.names = select_nouns(nouns, "person"), select_nouns(nouns, "name")
        self.belongings, self.furniture = select_nouns(nouns, "belonging"), select_nouns(nouns, "furniture")
        self.weather, self.events = select_nouns(nouns, "weather"), select_nouns(nouns, "event")
        self.places = select_nouns(nouns, "in", "on", "at")
        self.manners = [adjective for adjective in self.adjectives if adjective.adverb.english]
        self.personal_adjectives = [adjective for adjective in self.adjectives if "person" in adjective.tags]
        # By name of the row: the determiners of singular nouns, of plural nouns and of mass nouns.
        self.determiners = {
            row["name"]: [expand_weights(row[column] or row["singular"]) for column in ("singular", "plural", "mass")]
            for row in read_table("determiners")
        }
        self.adverbials: dict[str, list[Adverbial]] = {}  # by kind; adverbials of time by tense
        self.non_affirmative: dict[str, list[Adverbial]] = {}  # the same without affirmative adverbials
        for row in read_table("adverbials"):
            adverbial = Adverbial(tuple(row["english"].split()), tuple(row["german"].split()))
            for key in row["tenses"].split() or [row["kind"]]:
                self.adverbials.setdefault(key, []).append(adverbial)
                if not row["affirmative"]:
                    self.non_affirmative.setdefault(key, []).append(adverbial)


@cache
def load_lexicon() -> BilingualLexicon:
    """Read the tables, once per process."""
    return BilingualLexicon()


@cache
def find_similar(noun: Noun, adjective: Adjective) -> tuple[Noun, ...]:
    """Return nouns to compare `noun` with: things of the same kind that the adjective describes too."""
    too_broad = {"goods", "small", "portable", "belonging", "idea", "in", "on", "at"}
    kinds = noun.tags - too_broad - {noun.lemma}
    fit = (other for other in load_lexicon().nouns if other.tags & kinds and other.tags & adjective.tags)
    return tuple(other for other in fit if not other.mass and other is not noun)

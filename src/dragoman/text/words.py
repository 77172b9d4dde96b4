"""Words as records: the tables of the lexicon, read once, with every form that the grammar will ask for.

Cases are numbered nominative 0, accusative 1, dative 2, genitive 3; genders masculine 0, feminine 1, neuter 2, and
plural 3, which takes the place of a gender.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b

from dragoman.text import lexicon, lexicon_verbs

NOMINATIVE, ACCUSATIVE, DATIVE, GENITIVE = range(4)
MASCULINE, FEMININE, NEUTER, PLURAL = range(4)
CASES = {"acc": ACCUSATIVE, "dat": DATIVE, "gen": GENITIVE}
GENDERS = {"der": MASCULINE, "die": FEMININE, "das": NEUTER}

# Constructions that a word may be held back from (see `held`); one bit each, apart for each part of speech.
SUBJECT, OBJECT, RECIPIENT, PREPOSITIONAL, MODIFIED, ANTECEDENT = (1 << n for n in range(6))
FRONTED, FINAL, RELATIVE, QUESTIONED, NEGATED, HELPED = (1 << n for n in range(6))
ATTRIBUTE_SUBJECT, ATTRIBUTE_OBJECT, ATTRIBUTE_OTHER, ATTRIBUTE_PLURAL = (1 << n for n in range(4))

HELD_FROM = {
    "noun": (SUBJECT, OBJECT, RECIPIENT, PREPOSITIONAL, MODIFIED, ANTECEDENT),
    "verb": (FRONTED, FINAL, RELATIVE, QUESTIONED, NEGATED, HELPED),
    "adjective": (ATTRIBUTE_SUBJECT, ATTRIBUTE_OBJECT, ATTRIBUTE_OTHER, ATTRIBUTE_PLURAL),
}
HOLDERS = {"noun": 0.55, "verb": 0.55, "adjective": 0.4}  # this share of the words is held back from one construction


def digest(text: str) -> int:
    """64 bits that are the same on every machine."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def held(part: str, lemma: str, menu: tuple[int, ...]) -> int:
    """The construction that this word never meets outside the unseen split, as a bit; 0 for most words' most uses."""
    number = digest(f"held {part} {lemma}")
    holds = number % 1000 < 1000 * HOLDERS[part] and len(menu) > 1
    return menu[(number >> 20) % len(menu)] if holds else 0


@dataclass(frozen=True, slots=True, eq=False)
class Noun:
    lemma: str
    english: tuple[str, str]  # singular, plural
    german: tuple[tuple[str, str, str, str], tuple[str, str, str, str]]  # [plural][case]
    gender: int
    tags: frozenset[str]
    owners: tuple[str, ...]  # tags of what it may belong to
    pronoun: str  # he, she, it; nothing where the two languages would not agree ("das Mädchen ... she")
    number: int  # its share of the sentence's hash
    held: int
    proper: bool = False

    @property
    def mass(self) -> bool:
        return not self.english[1]


@dataclass(frozen=True, slots=True, eq=False)
class Adjective:
    lemma: str
    english: str
    comparative: str  # of English: "older", or "more beautiful"
    adverb: str
    german: str
    german_comparative: str
    endings: dict[str, str]  # "en" -> "alten"
    tags: frozenset[str]
    colour: bool
    passing: bool  # a state that comes and goes
    opposites: tuple[str, ...]
    number: int
    held: int


@dataclass(frozen=True, slots=True, eq=False)
class Verb:
    lemma: str
    english: tuple[str, str, str, str]  # read, reads, read, read: base, with he, past, participle
    particle: str
    clings: bool  # the particle stays before the object, even before a pronoun: looks for it
    present: tuple[str, str, str]  # ich, er, wir
    past: tuple[str, str]  # er, wir
    infinitive: str
    participle: str
    helper: str  # haben or sein
    prefix: str
    number: int
    held: int


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """One way to use a verb: who does it, and what it asks for."""

    verb: Verb
    subjects: tuple[Noun, ...]
    animate: bool  # nothing but people and animals do it
    personal: bool  # people do it
    accusative: tuple[Noun, ...]
    dative: tuple[Noun, ...]
    prepositional: tuple[Noun, ...]
    preposition: tuple[str, str, int]  # English, German, case
    clause: str  # that, whether, to or nothing
    predicate: frozenset[str]  # the adjectives that it takes
    place: bool
    company: bool
    manner: bool
    steady: bool  # a state, which nobody tries or has to be in


@dataclass(frozen=True, slots=True)
class Phrasal:
    """A fixed adverbial of one or more words; words of equal number are aligned one by one, others all with all."""

    english: tuple[str, ...]
    german: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lexicon:
    nouns: tuple[Noun, ...]
    adjectives: tuple[Adjective, ...]
    verbs: tuple[Verb, ...]
    frames: tuple[Frame, ...]
    tagged: dict[str, tuple[Noun, ...]]
    fitting: dict[Noun, tuple[Adjective, ...]] = field(default_factory=dict)  # adjectives for a noun, colours apart
    colours: dict[Noun, tuple[Adjective, ...]] = field(default_factory=dict)

    def pool(self, *tags: str) -> tuple[Noun, ...]:
        """The nouns with any of these tags, each once, in the lexicon's order; a noun's lemma is a tag of its own."""
        return tuple(noun for noun in self.nouns if noun.tags.intersection(tags))


def english_s(word: str) -> str:
    """The ending of plurals and of he-forms: cat-s, box-es, cherr-ies."""
    if word.endswith(("s", "x", "ch", "sh", "z")) or word in ("go", "echo"):
        return word + "es"
    if word.endswith("y") and word[-2] not in "aeou":
        return word[:-1] + "ies"
    return word + "s"


def ending(base: str, form: str) -> str:
    return base + form[1:] if form.startswith("-") else form


def read_noun(line: str) -> Noun:
    names, german, kinds = (part.split() for part in line.split("|"))
    article, base, genitive, plural = german
    of = next((place for place, kind in enumerate(kinds) if kind.startswith("of:")), len(kinds))
    tags, owners = frozenset([*kinds[:of], names[0]]), tuple(kind.removeprefix("of:") for kind in kinds[of:])
    gender = GENDERS[article]
    second = ending(base, genitive)
    weak = gender == MASCULINE and second.endswith("n")  # den Studenten, dem Studenten, des Studenten
    others = second if weak else base
    many = "" if plural == "." else ending(base, plural)
    many_dative = many if not many or many[-1] in "ns" else many + "n"
    english = (names[0], "" if plural == "." else names[1] if len(names) > 1 else english_s(names[0]))
    pronoun = ("he", "she", "")[gender] if "person" in tags else "it"
    menu = [SUBJECT, OBJECT, PREPOSITIONAL, MODIFIED]
    menu += [RECIPIENT] if "person" in tags else []
    menu += [ANTECEDENT] if pronoun and many else []
    cases = ((base, others, others, second), (many, many, many_dative, many))
    mark = held("noun", names[0], tuple(menu)) if many and not tags & {"weather", "event"} else 0
    return Noun(names[0], english, cases, gender, tags, owners, pronoun, digest(f"noun {names[0]}"), mark)


def read_name(name: str, gender: int) -> Noun:
    forms = (name, name, name, name)
    pronoun = ("he", "she")[gender]
    tags = frozenset(["name", pronoun])
    return Noun(name, (name, ""), (forms, forms), gender, tags, (), pronoun, digest(f"name {name}"), 0, True)


def read_adjective(line: str) -> Adjective:
    names, german, kinds = (part.split() for part in line.split("|"))
    lemma = names[0]
    stem = german[2].rstrip("-") if len(german) > 2 else german[0].removesuffix("e")
    endings = {end: stem + end for end in ("e", "en", "er", "es", "em")}
    adverb = next((name for name in names[1:] if name.endswith("ly")), "")
    comparative = next((name for name in names[1:] if name.endswith("er")), f"more {lemma}")
    mark = held("adjective", lemma, HELD_FROM["adjective"])
    colour = lemma in lexicon_verbs.COLOURS.split()
    passing = lemma in lexicon_verbs.PASSING.split()
    couples = (couple.split("/") for couple in lexicon_verbs.OPPOSITES.split())
    opposites = tuple(other for couple in couples if lemma in couple for other in couple if other != lemma)
    tags, number = frozenset(kinds), digest(f"adjective {lemma}")
    names_of = (lemma, lemma, comparative, adverb, german[0], german[1])
    return Adjective(*names_of, endings, tags, colour, passing, opposites, number, mark)


def read_verb(names: list[str], german: list[str]) -> Verb:
    base, mark, particle = names[0].partition("_") if "_" in names[0] else names[0].partition("-")
    past, participle = names[1:] if len(names) > 1 else [base + "ed"] * 2
    english = (base, english_s(base), past, participle)
    helper = "sein" if "ist" in german else "haben"
    prefix, _, infinitive = german[0].rpartition("|")
    third, simple, perfect = german[1], german[2], german[-1]
    stem = infinitive.removesuffix("n").removesuffix("e")
    first = stem[:-2] + "le" if infinitive.endswith("eln") else stem + "e"
    plural = simple + ("n" if simple.endswith("e") else "en")
    lemma = names[0]
    bit = held("verb", lemma, HELD_FROM["verb"])
    forms = ((first, third, infinitive), (simple, plural), infinitive, perfect)
    return Verb(lemma, english, particle, mark == "-", *forms, helper, prefix, digest(f"verb {lemma}"), bit)


def read_frames(line: str, pools: Lexicon) -> tuple[Verb, list[Frame]]:
    names, german, use = (part.split() for part in line.split(" | "))  # a separable verb has a bar without spaces
    verb = read_verb(names, german)
    subject, _, rest = " ".join(use).partition(">")
    slots: dict[str, tuple[Noun, ...]] = {"acc": (), "dat": (), "prep": ()}
    flags: set[str] = set()
    preposition, clauses, predicates = ("", "", 0), [], frozenset[str]()
    for part in (words for words in map(str.split, rest.split(";")) if words):
        kind, tags = part[0], part[1:]
        if "/" in kind:
            english, _, other = kind.partition("/")
            name, _, case = other.partition("+")
            preposition, kind = (english, name, CASES[case]), "prep"
        if kind == "adjective":
            predicates = frozenset(lexicon_verbs.PREDICATES[tags[0]].split())
        elif kind in slots:
            slots[kind] = pools.pool(*[tag for tag in tags if tag not in ("place", "company", "manner")])
            flags.update(tag for tag in tags if tag in ("place", "company", "manner"))
        else:
            flags.update(part)
            clauses += [word for word in part if word in ("that", "whether", "to")]
    subjects = pools.pool(*subject.split())
    animate = all(noun.tags & {"person", "animal"} for noun in subjects)
    steady = verb.lemma in lexicon_verbs.STATES.split()
    personal = any("person" in noun.tags for noun in subjects)
    plain = bool(any(slots.values()) or not clauses)

    def frame(clause: str) -> Frame:
        used = slots if not clause else {"acc": (), "dat": (), "prep": ()}
        extras = ("place" in flags, "company" in flags, "manner" in flags) if not clause else (False, False, False)
        filled = (used["acc"], used["dat"], used["prep"], preposition)
        return Frame(verb, subjects, animate, personal, *filled, clause, predicates, *extras, steady)

    return verb, [frame(clause) for clause in ([""] if plain else []) + clauses]


def lines(table: str) -> list[str]:
    return [line for line in table.splitlines() if line.strip()]


@cache
def lexicon_of() -> Lexicon:
    """Every word, read once."""
    tables = (lexicon.PEOPLE, lexicon.ANIMALS, lexicon.PLACES, lexicon.TEXTS, lexicon.VEHICLES, lexicon.THINGS)
    nouns = [read_noun(line) for table in (*tables, lexicon.FOODS, lexicon.IDEAS) for line in lines(table)]
    nouns += [read_name(name, MASCULINE) for name in lexicon.MEN.split()]
    nouns += [read_name(name, FEMININE) for name in lexicon.WOMEN.split()]
    adjectives = tuple(read_adjective(line) for line in lines(lexicon_verbs.ADJECTIVES))
    tags = {tag for noun in nouns for tag in noun.tags}
    tagged = {tag: tuple(noun for noun in nouns if tag in noun.tags) for tag in sorted(tags)}
    bare = Lexicon(tuple(nouns), adjectives, (), (), tagged)
    read = [read_frames(line, bare) for line in lines(lexicon_verbs.VERBS)]
    fitting = {noun: tuple(a for a in adjectives if a.tags & noun.tags and not a.colour) for noun in nouns}
    colours = {noun: tuple(a for a in adjectives if a.tags & noun.tags and a.colour) for noun in nouns}
    frames = tuple(frame for _, some in read for frame in some)
    return Lexicon(bare.nouns, adjectives, tuple(verb for verb, _ in read), frames, tagged, fitting, colours)


def phrasals(menu: str) -> tuple[Phrasal, ...]:
    """Adverbials from a menu such as "today/heute on_Monday/am_Montag"."""
    pairs = (entry.partition("/") for entry in menu.split())
    return tuple(Phrasal(tuple(a.split("_")), tuple(b.split("_"))) for a, _, b in pairs)

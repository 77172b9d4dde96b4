"""The synchronous grammar: samples sentence plans, which `english.py` and `german.py` turn into words.

The grammar makes every choice that both languages share. For instance, it replaces a noun by a pronoun only if the
pronoun could refer to no other noun of the sentence, neither in English nor in German.

The corpus has to be the same on every machine. Therefore the grammar calls nothing but `random()`, whose sequence is
stable across versions of Python. The probabilities were set by hand; changing one of them, or the order of the calls,
changes the corpus. A word that is held out from a construction is never sampled in it, except for the split `unseen`.
A frame (valency frame) is a verb with the nouns that may fill each of its arguments.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import TypeVar

from dragoman.phrasebook.lexicon import (
    Adjective,
    Frame,
    Noun,
    Preposition,
    Verb,
    expand_weights,
    find_similar,
    load_lexicon,
)
from dragoman.phrasebook.realization import BLOCK_SIZE, Clause, ClauseKind, NounPhrase, Offset, SentencePlan

Picked = TypeVar("Picked")


POSSESSIVES = ("my", "our", "his", "her")
POSSESSABLE_TAGS = frozenset(  # a noun with one of these tags may follow a possessive
    {"kin", "small", "pet", "vehicle", "furniture", "device", "instrument", "room", "house", "garden"}
    | {"text", "thought", "problem", "wedding"}
)

SUBJECT_PRONOUNS = expand_weights("I*3 we*2 he*2 she*2 they*2")
FIRST_PERSON = expand_weights("I*3 we*2")
RECIPIENT_PRONOUNS = ("I", "he", "she", "we", "they")
OBJECT_PRONOUNS = ("I", "he", "we")
GERMAN_PRONOUNS = {"he": "er", "she": "sie", "they": "sie", "I": "ich", "we": "wir"}
ANTECEDENT_DETERMINERS = frozenset(  # determiners of noun phrases to which a pronoun may refer
    ("the", "a", "this", *POSSESSIVES, "two", "three", "four", "five", "six", "ten", "many", "some", "several")
)
SIMPLE_TENSES = ("present", "past")
TENSES = expand_weights("present*9 past*6 perfect*3 future*3")
COORDINATED_TENSES = expand_weights("present*9 past*7 future*2")
SUBORDINATE_TENSES = expand_weights("present*9 past*7")
MODALS = {"present": expand_weights("can*3 must*2 want*2 may should*2"), "past": expand_weights("can must want")}
NEGATED_MODALS = {"present": expand_weights("can*3 want*2 may should*2"), "past": expand_weights("can want")}
COORDINATORS = expand_weights("but/aber*4 and/und*3")
SUBORDINATORS = expand_weights("because/weil*5 although/obwohl*3 if/wenn*2 before/bevor*2 until/bis as_soon_as/sobald")
TEMPORAL_CONJUNCTIONS = ("before", "until", "as soon as")  # join events, not descriptions
QUESTION_WORDS = expand_weights("-*4 who what whom which where when why")
QUESTION_ADVERBS = ("where", "when", "why")
RELATIVE_ROLES = expand_weights("subject*3 accusative*2 dative prepositional")
WITH, DESPITE = Preposition.parse("with/mit+dat"), Preposition.parse("despite/trotz+gen")
# The tag "in", "on" or "at" of a noun (the first two letters here) is the preposition with which it denotes a place.
PLACE_PREPOSITIONS = {text[:2]: Preposition.parse(text) for text in ("in/in+dat", "on/auf+dat", "at/an+dat")}
AROUND_FURNITURE = tuple(
    map(Preposition.parse, ("on/auf+dat", "under/unter+dat", "behind/hinter+dat", "beside/neben+dat"))
)
EVENT_PREPOSITIONS = tuple(map(Preposition.parse, ("during/während+gen", "after/nach+dat")))
MAX_ATTEMPTS = 12  # samples of a word; if none of them may be used, another plan is sampled


class NoFittingWord(Exception):
    """Raised if no allowed word was found for a position of the plan. The caller samples another plan."""


class Grammar:
    """Samples sentence plans by a random number generator.

    After each call of `sample_plan`, `content_hash` is the sum of the hashes of the content words. `found_held_out` is
    whether the plan has a word in the construction from which it is held out; this needs `allow_held_out`.
    """

    def __init__(self, random: Callable[[], float], *, allow_held_out: bool) -> None:
        self.random = random
        self.allow_held_out = allow_held_out
        self.lexicon = load_lexicon()

    def sample_plan(self) -> SentencePlan:
        """Sample a sentence, and set `content_hash` and `found_held_out`, which decide its split."""
        self.found_held_out = False
        self.content_hash = 0
        self.new_block = count(0, BLOCK_SIZE).__next__  # allocates a block of node ids and returns the first
        self.noun_phrases: list[NounPhrase] = []
        # Words that may not be sampled again: nouns, verbs, adjectives, and the lemmas of the adjectives' opposites.
        self.used: set[object] = set()
        return SENTENCE_TYPES[bisect(TYPE_LIMITS, self.random())](self)

    def sample_simple(self) -> SentencePlan:
        clause = self.sample_clause("main", self.pick(TENSES), front=self.random() < 0.3)
        return SentencePlan((clause,), clause)

    def sample_coordinated(self) -> SentencePlan:
        """Sample two main clauses joined by "and" or "but"."""
        tense = self.pick(COORDINATED_TENSES)
        first = self.sample_clause("main", tense, position="first")
        second = self.sample_second_clause("main", tense)
        second.conjunction = split_conjunction(self.pick(COORDINATORS))
        return SentencePlan((first, second), first)

    def sample_subordinated(self) -> SentencePlan:
        """Sample a main clause with a subordinate clause ("because ...") before or after it."""
        conjunction = split_conjunction(self.pick(SUBORDINATORS))
        tense = "present" if conjunction[0] == "if" else self.pick(SUBORDINATE_TENSES)
        fronted = self.random() < 0.4
        is_event = conjunction[0] in TEMPORAL_CONJUNCTIONS
        first = self.sample_clause("subordinate" if fronted else "main", tense, position="first", is_event=is_event)
        kind: ClauseKind = "main" if fronted else "subordinate"
        second = self.sample_second_clause(kind, tense, is_event=is_event, follows_clause=fronted)
        (first if fronted else second).conjunction = conjunction
        return SentencePlan((first, second), second if fronted else first)

    def sample_reported(self) -> SentencePlan:
        """Sample a verb of saying or thinking with a complement clause: she hopes that ..."""
        tense = self.pick(("present", "present", "past"))
        frame = self.sample_frame(self.lexicon.reporting)
        clause = self.sample_clause("main", tense, frame=frame, position="first")
        clause.complement = self.sample_second_clause("subordinate", tense)
        clause.complement.conjunction = ("that", "dass") if frame.clause == "that" else ("whether", "ob")
        return SentencePlan((clause,), clause)

    def sample_controlled(self) -> SentencePlan:
        """Sample a control verb with an infinitive that has the same subject: she tries to ..."""
        frame = self.sample_frame(self.lexicon.controlling)
        clause = self.sample_clause("main", self.pick(TENSES), frame=frame, position="first")
        frame = self.sample_frame(self.lexicon.voluntary)
        clause.complement = self.sample_clause(
            "infinitive", "present", frame=frame, position="second", role="subject", filler=clause.subject
        )
        return SentencePlan((clause,), clause)

    def sample_question(self) -> SentencePlan:
        """Sample a question, with a question word or to be answered by yes or no."""
        tense = self.pick(TENSES)
        clause = self.sample_clause("question", tense, question_word=self.pick(QUESTION_WORDS))
        return SentencePlan((clause,), clause)

    def sample_second_clause(
        self, kind: ClauseKind, tense: str, *, is_event: bool = False, follows_clause: bool = False
    ) -> Clause:
        """Sample a clause that often refers to a noun of the first clause by a pronoun, if that is unambiguous."""
        antecedent = self.sample_antecedent() if self.random() < 0.8 else None
        role, pronoun = "", None
        if antecedent is not None and antecedent.noun is not None:
            noun, plural = antecedent.noun, antecedent.plural
            pronoun = NounPhrase(self.new_block(), noun, plural, "they" if plural else noun.pronoun, antecedent)
            as_object = self.random() < 0.4 and noun in self.lexicon.frames_by_role["accusative"]
            role = "accusative" if as_object else "subject"
        return self.sample_clause(
            kind, tense, "second", is_event=is_event, follows_clause=follows_clause, role=role, filler=pronoun
        )

    def sample_antecedent(self) -> NounPhrase | None:
        """Sample a noun phrase that differs from all others by its pronoun, both in English and in German."""
        pronouns = [choose_pronouns(phrase) for phrase in self.noun_phrases]
        candidates = []
        for phrase, (english, german) in zip(self.noun_phrases, pronouns, strict=True):
            noun = phrase.noun
            if phrase.pronoun or noun is None or not noun.pronoun or noun.proper or noun.mass:
                continue
            if phrase.negation >= 0 or phrase.determiner not in ANTECEDENT_DETERMINERS:
                continue
            if sum(english == e or german == g for e, g in pronouns) == 1:  # only the phrase itself
                candidates.append((phrase, noun))
        if not candidates:
            return None
        phrase, noun = self.pick(candidates)
        return phrase if self.is_allowed(noun, ("antecedent",)) else None

    def sample_clause(
        self,
        kind: ClauseKind,
        tense: str,
        position: str = "only",
        frame: Frame | None = None,
        front: bool = False,
        follows_clause: bool = False,
        is_event: bool = False,
        question_word: str = "",
        role: str = "",
        filler: NounPhrase | None = None,
    ) -> Clause:
        """Sample a clause.

        `position` is "only", "first" or "second"; the only clause of a sentence may get more adjuncts and a relative
        clause. `filler` is a noun phrase that the caller chose for the argument `role`: a pronoun, a relative pronoun,
        or the subject of an infinitive. The rest is sampled, the verb too unless `frame` is given. `front` adds an
        adjunct before the subject. `is_event` excludes descriptions such as "the lamp is old".
        """
        phrases = {role: filler} if filler else {}
        clause = Clause(self.new_block(), kind, tense, phrases, {}, follows_clause, question_word)
        clause.negated = kind != "infinitive" and frame is None and not is_event and self.random() < 0.14
        if kind == "relative":
            clause.opening = role
        elif question_word in QUESTION_ADVERBS:
            clause.opening = "question_adverb"
            [clause.adverbials[clause.opening]] = self.lexicon.adverbials[question_word]
        noun, second = filler.noun if filler else None, position == "second"
        may_describe = not is_event and question_word in ("", "why")
        if frame is None and self.sample_is_description(role, noun, second, may_describe):
            self.add_description(clause, second)
        else:
            constructions = (
                kind,
                "negated" if clause.negated else "",
                "fronted" if front or follows_clause else "",
                "auxiliary" if tense == "future" else "",
            )
            if frame is None:
                frames = self.lexicon.question_frames.get(question_word, self.lexicon.frames)
                if noun is not None:
                    frames = self.lexicon.frames_by_role[role].get(noun) or self.lexicon.frames
                frame = self.sample_frame(frames, constructions)
            elif not self.is_allowed(frame.verb, constructions):
                raise NoFittingWord
            self.used.add(frame.verb)
            self.content_hash += frame.verb.hash
            clause.verb = frame.verb
            self.add_arguments(clause, frame, second)
            self.add_verb_adjuncts(clause, frame)
            if is_tense_ambiguous(clause, frame.verb):
                raise NoFittingWord
        if kind not in ("infinitive", "relative"):
            self.add_sentence_adjuncts(clause, elaborate=position == "only", front=front)
        if position == "only":
            self.add_relative_clause(clause)
        return clause

    def sample_is_description(self, role: str, noun: Noun | None, second: bool, allowed: bool) -> bool:
        """Sample whether the clause describes its subject with "to be" and an adjective."""
        if role == "subject" and noun is not None:
            return noun not in self.lexicon.frames_by_role["subject"] or (allowed and self.random() < 0.4)
        return not role and allowed and self.random() < (0.1 if second else 0.22)

    def add_description(self, clause: Clause, second: bool) -> None:
        """Add a subject and an adjective: the lamp is very old, the dog is older than the cat."""
        lexicon = self.lexicon
        if "subject" not in clause.phrases:
            personal = self.random() < 0.5
            self.add_subject(clause, lexicon.describable, personal=personal, second=second, extend=True)
        noun = clause.subject.noun
        common = None if noun is None or noun.proper else noun  # a common noun, not a name or pronoun
        adjectives = lexicon.qualities[common] + lexicon.colours[common] if common else lexicon.personal_adjectives
        adjective = clause.predicate = self.sample_adjective(adjectives)
        if adjective is None:
            raise NoFittingWord
        chance = self.random()
        if chance < 0.2 and not clause.negated:
            clause.degree = self.pick(lexicon.adverbials["degree"])
        elif chance < 0.3 and common and clause.kind != "relative" and adjective.kind != "colour":
            nouns = find_similar(common, adjective)
            if len(nouns) > 3:
                clause.comparison = self.sample_noun_phrase(nouns, "subject", "definite")

    def add_arguments(self, clause: Clause, frame: Frame, second: bool) -> None:
        """Sample the arguments of the verb that the clause does not have yet."""
        phrases, fillers = clause.phrases, frame.fillers
        if clause.question_word == "who":
            phrases["subject"], clause.opening = NounPhrase(self.new_block(), None, pronoun="who"), "subject"
        elif "subject" not in phrases:
            extend = clause.kind != "relative" and not fillers["prepositional"]
            self.add_subject(clause, fillers["subject"], personal=frame.personal, second=second, extend=extend)
        for role in ("dative", "accusative", "prepositional"):
            if fillers[role] and role not in phrases:
                phrases[role] = self.sample_object(clause, fillers, role)
        if "prepositional" in phrases:
            phrases["prepositional"].preposition = frame.preposition
        if frame.predicates:
            noun = clause.subject.noun
            adjectives = self.lexicon.qualities[noun] if noun and not noun.proper else self.lexicon.personal_adjectives
            clause.predicate = self.sample_adjective([a for a in adjectives if a.lemma in frame.predicates])
            if clause.predicate is None:
                raise NoFittingWord

    def add_subject(self, clause: Clause, nouns: Sequence[Noun], *, personal: bool, second: bool, extend: bool) -> None:
        """Add a pronoun, a name (if the subject may be `personal`) or a noun phrase.

        A second clause gets only "I" and "we", because "he" might be ambiguous.
        """
        chance = self.random()
        if personal and chance < 0.13:
            subject = self.sample_pronoun(FIRST_PERSON if second else SUBJECT_PRONOUNS)
        elif personal and chance < 0.24:
            noun = self.sample_noun(self.lexicon.names, "name")
            subject = NounPhrase(self.new_block(), noun)
            self.noun_phrases.append(subject)
        else:
            determiners = "definite" if clause.negated else "no" if chance > 0.97 else "any"
            subject = self.sample_noun_phrase(nouns, "subject", determiners, extend=extend)
        clause.phrases["subject"] = subject

    def sample_object(self, clause: Clause, fillers: Mapping[str, Sequence[Noun]], role: str) -> NounPhrase:
        """Sample an object: a question word, a pronoun, or a noun phrase with one of the `fillers` of its role."""
        nouns, subject, question_word = fillers[role], clause.subject, clause.question_word
        if question_word in ("what", "whom") and role != "prepositional":
            clause.opening = role
            return NounPhrase(self.new_block(), None, pronoun="what" if question_word == "what" else "who")
        if question_word == "which" and role == "accusative":
            clause.opening = role
            return self.sample_noun_phrase(nouns, role, "which")
        may_be_pronoun = not subject.pronoun and clause.kind != "infinitive" and role != "prepositional"
        if may_be_pronoun and "person" in nouns[0].tags and self.random() < 0.1:
            return self.sample_pronoun(OBJECT_PRONOUNS if role == "accusative" else RECIPIENT_PRONOUNS)
        if clause.negated:
            # German allows "kein" in one object only, so an indirect object beside a direct one is definite.
            definite = role == "prepositional" or (role == "dative" and fillers["accusative"])
            determiners = "definite" if definite else "negated"
        else:
            determiners = "recipient" if role == "dative" else "any"
        phrase = self.sample_noun_phrase(nouns, role, determiners)
        if clause.negated and phrase.determiner in ("", "a") and role != "prepositional":
            phrase.negation = clause.node + Offset.NOT
            clause.has_kein = True
        return phrase

    def add_verb_adjuncts(self, clause: Clause, frame: Frame) -> None:
        """Add perhaps a modal verb, and perhaps an adverb of manner, a place or a companion ("with my friend")."""
        modals = (NEGATED_MODALS if clause.negated else MODALS).get(clause.tense)
        may_have_modal = frame.animate and not frame.clause and not frame.stative and clause.kind != "infinitive"
        if modals and may_have_modal and self.random() < 0.16 and self.is_allowed(frame.verb, ("auxiliary",)):
            clause.modal = self.pick(modals)
        chance = self.random()
        if "manner" in frame.adjuncts and chance < 0.15 and not clause.negated:
            adjective = self.sample_adjective(self.lexicon.manners)
            if adjective:
                clause.adverbials["manner"] = adjective.adverb
        elif "place" in frame.adjuncts and 0.15 < chance < 0.4 and clause.question_word != "where":
            place = clause.phrases["place"] = self.sample_noun_phrase(self.lexicon.places, "prepositional", "definite")
            assert place.noun is not None
            tags = place.noun.tags
            place.preposition = next(p for tag, p in PLACE_PREPOSITIONS.items() if tag in tags)
        elif "company" in frame.adjuncts and 0.4 < chance < 0.5:
            place = clause.phrases["place"] = self.sample_noun_phrase(self.lexicon.people, "prepositional", "possessor")
            place.preposition = WITH

    def add_sentence_adjuncts(self, clause: Clause, *, elaborate: bool, front: bool) -> None:
        """Add perhaps a time, a frequency, a circumstance or a sentence adverb.

        With `front`, one of them is always added, as the opening of the clause. `elaborate` allows circumstances.
        """
        lexicon, chance, adjective = self.lexicon, self.random(), clause.predicate
        if adjective and (adjective.kind != "state" or clause.comparison):
            if not front:
                return
            chance = 0.55 + chance / 4  # excludes "time" below: a lasting quality is not limited to a time
        may_be_frequent = not (clause.question_word or clause.negated or clause.modal)
        if front:
            name = "time" if chance < 0.55 else "sentence_adverb" if chance < 0.8 else "circumstance"
            clause.opening = name
        elif chance < 0.12 and clause.question_word != "when":
            name = "time"
        elif chance < 0.2 and may_be_frequent and clause.tense in SIMPLE_TENSES:
            name = "frequency"
        elif chance < 0.23 and elaborate and clause.verb and clause.kind == "main":
            name = "circumstance"
        else:
            return
        if name == "time":
            times = lexicon.non_affirmative if clause.negated or not clause.verb else lexicon.adverbials
            clause.adverbials[name] = self.pick(times[clause.tense])
        elif name != "circumstance":
            clause.adverbials[name] = self.pick(lexicon.adverbials[name])
        elif self.random() < 0.4:
            phrase = clause.phrases[name] = self.sample_noun_phrase(lexicon.weather, name, "the")
            phrase.preposition = DESPITE
        else:
            phrase = clause.phrases[name] = self.sample_noun_phrase(lexicon.events, name, "definite")
            phrase.preposition = self.pick(EVENT_PREPOSITIONS)

    def add_relative_clause(self, clause: Clause) -> None:
        """Add perhaps a relative clause to the subject, or to a direct object at the end of the clause."""
        subject, direct_object, chance = clause.subject, clause.phrases.get("accusative"), self.random()
        if may_have_relative(subject) and chance < 0.26 and clause.opening != "subject":
            phrase = subject
        elif direct_object and chance > 0.72 and may_have_relative(direct_object) and ends_with_object(clause):
            phrase = direct_object
        else:
            return
        noun = phrase.noun
        assert noun is not None
        if not self.is_allowed(noun, ("relative",)):
            return
        roles = [role for role in RELATIVE_ROLES if noun in self.lexicon.frames_by_role[role]]
        role = self.pick(roles) if roles else "subject"
        pronoun = NounPhrase(self.new_block(), noun, phrase.plural, "relative", phrase)
        tense = clause.tense if clause.tense in SIMPLE_TENSES else "present"
        phrase.relative = self.sample_clause("relative", tense, position="second", role=role, filler=pronoun)

    def sample_noun_phrase(
        self, nouns: Sequence[Noun], role: str, determiners: str, extend: bool = False
    ) -> NounPhrase:
        """Sample a noun with a determiner and perhaps adjectives.

        `determiners` is the name of a row in determiners.tsv. `extend` allows a possessor or a prepositional phrase
        after the noun.
        """
        noun = self.sample_noun(nouns, role)
        phrase = NounPhrase(self.new_block(), noun, not noun.mass and self.random() < 0.36)
        self.noun_phrases.append(phrase)
        column = 2 if noun.mass else phrase.plural  # singular, plural, mass
        phrase.determiner = self.pick(self.lexicon.determiners[determiners][column])
        if phrase.determiner in POSSESSIVES and not noun.tags & POSSESSABLE_TAGS:
            phrase.determiner = "the"
        elif phrase.determiner == "a" and "family" in noun.tags:
            phrase.determiner = self.pick(POSSESSIVES)
        if self.random() < 0.34:
            self.add_adjectives(phrase, noun, role)
        if extend and self.random() < 0.3 and phrase.determiner in ("the", "this", "a"):
            self.add_postmodifier(phrase, noun)
        return phrase

    def add_adjectives(self, phrase: NounPhrase, noun: Noun, role: str) -> None:
        constructions = (role if role in ("subject", "accusative") else "other", "plural" if phrase.plural else "")
        colours = self.lexicon.colours[noun]
        if colours and self.random() < 0.3:
            phrase.colour = self.sample_adjective(colours, constructions)
        if phrase.colour is None or self.random() < 0.25:
            phrase.adjective = self.sample_adjective(self.lexicon.qualities[noun], constructions)
            if phrase.adjective and self.random() < 0.12 and phrase.determiner in ("the", "a", "this", ""):
                phrase.degree = self.pick(self.lexicon.adverbials["degree"])

    def add_postmodifier(self, phrase: NounPhrase, noun: Noun) -> None:
        """Add a genitive or a prepositional phrase: the writer of the books, the man with the dogs."""
        lexicon = self.lexicon
        if noun in lexicon.possessors and self.random() < 0.7:
            phrase.determiner = "the"
            phrase.possessor = self.sample_noun_phrase(lexicon.possessors[noun], "possessor", "possessor")
        elif "person" in noun.tags:
            phrase.postmodifier = self.sample_noun_phrase(lexicon.belongings, "prepositional", "belonging")
            phrase.postmodifier.preposition = WITH
        elif noun.tags & {"small", "text"} and "furniture" not in noun.tags:
            phrase.postmodifier = self.sample_noun_phrase(lexicon.furniture, "prepositional", "definite")
            phrase.postmodifier.preposition = self.pick(AROUND_FURNITURE)

    def sample_pronoun(self, pronouns: Sequence[str]) -> NounPhrase:
        """Sample a pronoun that refers to nobody in the sentence."""
        pronoun = self.pick(pronouns)
        phrase = NounPhrase(self.new_block(), None, pronoun in ("we", "they"), pronoun)
        self.noun_phrases.append(phrase)
        return phrase

    def pick(self, choices: Sequence[Picked]) -> Picked:
        return choices[int(self.random() * len(choices))]

    def is_allowed(self, word: Noun | Verb | Adjective, constructions: tuple[str, ...]) -> bool:
        """Return whether the word may appear in these constructions, and set `found_held_out` if it is held out."""
        if word.held_out and word.held_out in constructions:
            if not self.allow_held_out:
                return False
            self.found_held_out = True
        return True

    def sample_noun(self, nouns: Sequence[Noun], role: str) -> Noun:
        for _ in range(MAX_ATTEMPTS):
            noun = nouns[int(self.random() * len(nouns))]
            if noun not in self.used and (noun.held_out != role or self.is_allowed(noun, (role,))):
                self.used.add(noun)
                self.content_hash += noun.hash
                return noun
        raise NoFittingWord

    def sample_frame(self, frames: Sequence[Frame], constructions: tuple[str, ...] = ()) -> Frame:
        for _ in range(MAX_ATTEMPTS):
            frame = frames[int(self.random() * len(frames))]
            if frame.verb not in self.used and self.is_allowed(frame.verb, constructions):
                return frame
        raise NoFittingWord

    def sample_adjective(self, choices: Sequence[Adjective], constructions: tuple[str, ...] = ()) -> Adjective | None:
        """Sample one adjective; return None if it, or its opposite, was used before or if it may not be used here."""
        if not choices:
            return None
        adjective = choices[int(self.random() * len(choices))]
        if adjective in self.used or adjective.lemma in self.used or not self.is_allowed(adjective, constructions):
            return None
        self.used.add(adjective)
        self.used.update(adjective.opposites)
        self.content_hash += adjective.hash
        return adjective


def split_conjunction(entry: str) -> tuple[str, str]:
    """Return the English and the German conjunction of an entry such as "as_soon_as/sobald"."""
    english, _, german = entry.replace("_", " ").partition("/")
    return english, german


def choose_pronouns(phrase: NounPhrase) -> tuple[str, str]:
    noun = phrase.noun
    if noun is None:
        return phrase.pronoun, GERMAN_PRONOUNS.get(phrase.pronoun, "")
    return ("they", "sie") if phrase.plural else (noun.pronoun, ("er", "sie", "es")[noun.gender])


def is_tense_ambiguous(clause: Clause, verb: Verb) -> bool:
    """Return whether the English tense is ambiguous: "they read", but not "he reads" or "they did not read"."""
    same_form = clause.tense == "past" and verb.english_base == verb.english_past and not clause.modal
    has_do = clause.negated or (clause.kind == "question" and clause.opening != "subject")
    return same_form and not has_do and clause.subject.person != 1


def ends_with_object(clause: Clause) -> bool:
    """Return whether the object ends the clause, both in English and in German."""
    german_verb_follows = clause.tense not in SIMPLE_TENSES or clause.modal or (clause.verb and clause.verb.prefix)
    adjuncts = {"time", "circumstance", "place", "manner"} & (clause.phrases.keys() | clause.adverbials.keys())
    nicht_follows = clause.negated and not clause.has_kein
    following = german_verb_follows or adjuncts - {clause.opening} or nicht_follows
    return clause.opening != "accusative" and not following


def may_have_relative(phrase: NounPhrase) -> bool:
    """Return whether a relative clause may follow. After "the writer of the books" its referent would be ambiguous."""
    noun = phrase.noun
    if phrase.pronoun or noun is None or noun.proper or noun.mass:
        return False
    return not (phrase.possessor or phrase.postmodifier or phrase.determiner in POSSESSIVES)


SENTENCE_TYPES: tuple[Callable[[Grammar], SentencePlan], ...] = (
    Grammar.sample_simple,
    Grammar.sample_coordinated,
    Grammar.sample_subordinated,
    Grammar.sample_reported,
    Grammar.sample_controlled,
    Grammar.sample_question,
)
# Cumulative probabilities of these types; the last type has the remaining probability.
TYPE_LIMITS = (0.42, 0.57, 0.75, 0.84, 0.88)

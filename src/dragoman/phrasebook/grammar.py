"""The synchronous grammar: draws the plan of a sentence, which `english.py` and `german.py` realize.

Whatever must hold in both languages is decided here. For instance, a pronoun refers to a noun only if no other noun
of the sentence could be meant, neither in English nor in German.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dragoman.phrasebook.lexicon import DATIVE, GENITIVE, Frame, Noun, Preposition, find_comparable
from dragoman.phrasebook.noun_phrases import ON, POSSESSIVES, WITH, NoFittingWord, NounPhraseGrammar, expand_weights
from dragoman.phrasebook.realization import (
    INFINITIVE,
    MAIN,
    QUESTION,
    RELATIVE,
    VERB_FINAL,
    Clause,
    NounPhrase,
    Offset,
    SentencePlan,
)

SIMPLE_TENSES = ("present", "past")
TENSES = expand_weights("present*9 past*6 perfect*3 future*3")
PAIRED_TENSES = expand_weights("present*9 past*7 future*2")
SUBORDINATE_TENSES = expand_weights("present*9 past*7")
COORDINATORS = expand_weights("but/aber*4 and/und*3")
SUBORDINATORS = expand_weights("because/weil*5 although/obwohl*3 if/wenn*2 before/bevor*2 until/bis as_soon_as/sobald")
TEMPORAL = ("before", "until", "as soon as")  # they join events, not descriptions
QUESTION_WORDS = expand_weights("-*4 who what whom which where when why")
MODALS = {"present": expand_weights("can*3 must*2 want*2 may should*2"), "past": expand_weights("can must want")}
NEGATED_MODALS = {"present": expand_weights("can*3 want*2 may should*2"), "past": expand_weights("can want")}
OBJECT_PRONOUNS = ("I", "he", "we")
RECIPIENT_PRONOUNS = ("I", "he", "she", "we", "they")
GERMAN_PRONOUNS = {"he": "er", "she": "sie", "they": "sie", "I": "ich", "we": "wir"}
RELATIVE_ROLES = expand_weights("subject*3 accusative*2 dative prepositional")
ANTECEDENT_DETERMINERS = frozenset(
    ("the", "a", "this", *POSSESSIVES, "two", "three", "four", "five", "six", "ten", "many", "some", "several")
)
PLACE_PREPOSITIONS = {"in": Preposition("in", "in", DATIVE), "on": ON, "at": Preposition("at", "an", DATIVE)}
DESPITE = Preposition("despite", "trotz", GENITIVE)
EVENT_PREPOSITIONS = (Preposition("during", "während", GENITIVE), Preposition("after", "nach", DATIVE))


class Grammar(NounPhraseGrammar):
    """Samples complete sentences."""

    def draw_plan(self) -> SentencePlan:
        """Draw a sentence; `content_hash` and `found_held_out` then say which split it belongs to."""
        self.reset()
        chance = self.random()
        return next(draw for limit, draw in SENTENCE_TYPES if chance < limit)(self)

    def draw_simple(self) -> SentencePlan:
        clause = self.draw_clause(MAIN, self.pick(TENSES), front=self.random() < 0.3)
        return SentencePlan((clause,), clause)

    def draw_coordinated(self) -> SentencePlan:
        tense = self.pick(PAIRED_TENSES)
        first = self.draw_clause(MAIN, tense, elaborate=False)
        second = self.draw_second_clause(MAIN, tense)
        second.conjunction = split_conjunction(self.pick(COORDINATORS))
        return SentencePlan((first, second), first)

    def draw_subordinated(self) -> SentencePlan:
        conjunction = split_conjunction(self.pick(SUBORDINATORS))
        tense = "present" if conjunction[0] == "if" else self.pick(SUBORDINATE_TENSES)
        fronted = self.random() < 0.4
        event = conjunction[0] in TEMPORAL
        first = self.draw_clause(VERB_FINAL if fronted else MAIN, tense, elaborate=False, event=event)
        second = self.draw_second_clause(MAIN if fronted else VERB_FINAL, tense, event=event, follows_clause=fronted)
        (first if fronted else second).conjunction = conjunction
        return SentencePlan((first, second), second if fronted else first)

    def draw_reported(self) -> SentencePlan:
        """Draw a verb of saying or thinking with a clause: she hopes that ..."""
        tense = self.pick(("present", "present", "past"))
        frame = self.draw_frame(self.lexicon.reporting)
        clause = self.draw_clause(MAIN, tense, frame=frame, elaborate=False)
        clause.complement = self.draw_second_clause(VERB_FINAL, tense)
        clause.complement.conjunction = ("that", "dass") if frame.clause == "that" else ("whether", "ob")
        return SentencePlan((clause,), clause)

    def draw_controlled(self) -> SentencePlan:
        """Draw a verb with an infinitive, whose subject it controls: she tries to ..."""
        frame = self.draw_frame(self.lexicon.controlling)
        clause = self.draw_clause(MAIN, self.pick(TENSES), frame=frame, elaborate=False)
        frame = self.draw_frame(self.lexicon.voluntary)
        clause.complement = self.draw_clause(
            INFINITIVE, "present", frame=frame, elaborate=False, role="subject", filler=clause.subject
        )
        return SentencePlan((clause,), clause)

    def draw_question(self) -> SentencePlan:
        tense = self.pick(TENSES)
        clause = self.draw_clause(QUESTION, tense, question_word=self.pick(QUESTION_WORDS))
        return SentencePlan((clause,), clause)

    # ---- pronouns

    def draw_second_clause(self, kind: str, tense: str, *, event: bool = False, follows_clause: bool = False) -> Clause:
        """Draw a clause with a pronoun for a noun of the first, if there is an unambiguous one."""
        antecedent = self.draw_antecedent() if self.random() < 0.8 else None
        role, pronoun = "", None
        if antecedent is not None and antecedent.noun is not None:
            noun, plural = antecedent.noun, antecedent.plural
            pronoun = NounPhrase(self.new_block(), noun, plural, "they" if plural else noun.pronoun, antecedent)
            as_object = self.random() < 0.4 and noun in self.lexicon.frames_by_role["accusative"]
            role = "accusative" if as_object else "subject"
        return self.draw_clause(
            kind,
            tense,
            elaborate=False,
            second=True,
            event=event,
            follows_clause=follows_clause,
            role=role,
            filler=pronoun,
        )

    def draw_antecedent(self) -> NounPhrase | None:
        """Draw a noun phrase whose pronoun could refer to no other, in English or in German."""
        pronouns = [choose_pronouns(phrase) for phrase in self.noun_phrases]
        candidates = []
        for phrase, (english, german) in zip(self.noun_phrases, pronouns, strict=True):
            noun = phrase.noun
            if phrase.pronoun or noun is None or not noun.pronoun or noun.proper or noun.mass:
                continue
            if phrase.negation >= 0 or phrase.determiner not in ANTECEDENT_DETERMINERS:
                continue
            if sum(english == e or german == g for e, g in pronouns) == 1:  # itself
                candidates.append(phrase)
        if not candidates:
            return None
        chosen = self.pick(candidates)
        assert chosen.noun is not None
        return chosen if self.is_allowed(chosen.noun, "antecedent") else None

    # ---- clauses

    def draw_clause(
        self,
        kind: str,
        tense: str,
        *,
        frame: Frame | None = None,
        elaborate: bool = True,
        second: bool = False,
        front: bool = False,
        follows_clause: bool = False,
        event: bool = False,
        question_word: str = "",
        role: str = "",
        filler: NounPhrase | None = None,
    ) -> Clause:
        """Draw a clause.

        `filler` is given for the argument `role`: a pronoun, a relative pronoun, the subject of an infinitive.
        `elaborate` allows a relative clause, `front` moves an adjunct before the subject, `event` excludes
        descriptions, `second` marks a clause after another one.
        """
        clause = Clause(self.new_block(), kind, tense, follows_clause)
        clause.negated = kind != INFINITIVE and frame is None and not event and self.random() < 0.14
        if kind == RELATIVE:
            clause.moved = role
        if question_word in ("where", "when", "why"):
            clause.question_adverb = question_word
        if frame is None and self.draw_is_description(question_word, role, filler, second, event):
            self.add_description(clause, filler, second)
        else:
            constructions = [kind]
            constructions += ["negated"] if clause.negated else []
            constructions += ["fronted"] if front or follows_clause else []
            constructions += ["auxiliary"] if tense == "future" else []
            if frame is None:
                menu = self.lexicon.question_frames.get(question_word, self.lexicon.frames)
                if filler is not None and filler.noun is not None:
                    menu = self.lexicon.frames_by_role[role].get(filler.noun) or self.lexicon.frames
                frame = self.draw_frame(menu, *constructions)
            elif not self.is_allowed(frame.verb, *constructions):
                raise NoFittingWord
            self.used.add(frame.verb)
            self.content_hash += frame.verb.hash
            clause.verb = frame.verb
            self.add_arguments(clause, frame, question_word, role, filler, second)
            self.add_verb_adjuncts(clause, frame, question_word)
            if is_tense_ambiguous(clause):
                raise NoFittingWord
        if kind not in (INFINITIVE, RELATIVE):
            self.add_sentence_adjuncts(clause, elaborate, front, question_word)
        if elaborate:
            self.add_relative_clause(clause)
        return clause

    def draw_is_description(
        self, question_word: str, role: str, filler: NounPhrase | None, second: bool, event: bool
    ) -> bool:
        """Draw whether the clause describes its subject with "to be" and an adjective."""
        if role == "subject" and filler is not None and filler.noun is not None:
            has_frame = filler.noun in self.lexicon.frames_by_role["subject"]
            return not has_frame or (not event and self.random() < 0.4)
        if role or event or question_word not in ("", "why"):
            return False
        return self.random() < (0.1 if second else 0.22)

    def add_description(self, clause: Clause, filler: NounPhrase | None, second: bool) -> None:
        """Add a subject and an adjective: the lamp is very old, the dog is older than the cat."""
        lexicon = self.lexicon
        clause.subject = filler or self.draw_subject(
            lexicon.described,
            personal=self.random() < 0.5,
            second=second,
            negated=clause.negated,
            extend=True,
        )
        noun = clause.subject.noun
        common = None if noun is None or noun.proper else noun
        menu = lexicon.qualities[common] + lexicon.colours[common] if common else lexicon.moods
        adjective = clause.predicate = self.draw_adjective(menu)
        if adjective is None:
            raise NoFittingWord
        chance = self.random()
        if chance < 0.2 and not clause.negated:
            clause.degree = self.pick(lexicon.adverbials["degree"])
        elif chance < 0.3 and common and clause.kind != RELATIVE:
            nouns = find_comparable(common, adjective)
            if len(nouns) > 3 and adjective.kind != "colour":
                clause.comparison = self.draw_noun_phrase(nouns, "subject", "definite")

    def add_arguments(
        self, clause: Clause, frame: Frame, question_word: str, role: str, filler: NounPhrase | None, second: bool
    ) -> None:
        """Fill every argument of the verb."""
        if role == "subject":
            clause.subject = filler
        elif question_word == "who":
            clause.subject, clause.moved = NounPhrase(self.new_block(), None, pronoun="who"), "subject"
        else:
            clause.subject = self.draw_subject(
                frame.subjects,
                personal=frame.personal,
                second=second,
                negated=clause.negated,
                extend=clause.kind != RELATIVE and not frame.prepositional,
            )
        for slot in ("dative", "accusative", "prepositional"):
            menu = getattr(frame, slot)
            if menu:
                given = filler if slot == role else None
                setattr(clause, slot, given or self.draw_object(clause, frame, menu, slot, question_word))
        if clause.prepositional:
            clause.prepositional.preposition = frame.preposition
        if frame.predicates and clause.subject is not None:
            noun = clause.subject.noun
            adjectives = self.lexicon.qualities[noun] if noun and not noun.proper else self.lexicon.moods
            clause.predicate = self.draw_adjective([a for a in adjectives if a.lemma in frame.predicates])
            if clause.predicate is None:
                raise NoFittingWord

    def draw_object(
        self, clause: Clause, frame: Frame, menu: Sequence[Noun], role: str, question_word: str
    ) -> NounPhrase:
        if question_word in ("what", "whom") and role != "prepositional":
            clause.moved = role
            return NounPhrase(self.new_block(), None, pronoun="what" if question_word == "what" else "who")
        if question_word == "which" and role == "accusative":
            clause.moved = role
            return self.draw_noun_phrase(menu, role, "which")
        subject = clause.subject
        has_noun = subject is not None and not subject.pronoun and clause.kind != INFINITIVE
        if has_noun and role != "prepositional" and "person" in menu[0].tags and self.random() < 0.1:
            return self.add_pronoun(self.pick(OBJECT_PRONOUNS if role == "accusative" else RECIPIENT_PRONOUNS))
        if clause.negated:
            # German puts "kein" into one object only: beside a direct object, the indirect one is definite
            definite = role == "prepositional" or (role == "dative" and frame.accusative)
            determiners = "definite" if definite else "negated"
        else:
            determiners = "recipient" if role == "dative" else "any"
        phrase = self.draw_noun_phrase(menu, role, determiners)
        if clause.negated and phrase.determiner in ("", "a") and role != "prepositional":
            phrase.negation = clause.node + Offset.NOT
            clause.has_kein = True
        return phrase

    def add_verb_adjuncts(self, clause: Clause, frame: Frame, question_word: str) -> None:
        """Add perhaps a modal verb, and perhaps an adverb of manner, a place or a companion."""
        modals = (NEGATED_MODALS if clause.negated else MODALS).get(clause.tense)
        active = frame.animate and not frame.clause and not frame.stative and clause.kind != INFINITIVE
        if modals and active and self.random() < 0.16 and self.is_allowed(frame.verb, "auxiliary"):
            clause.modal = self.pick(modals)
        chance = self.random()
        if "manner" in frame.adjuncts and chance < 0.15 and not clause.negated:
            clause.manner = self.draw_adjective(self.lexicon.manners)
        elif "place" in frame.adjuncts and 0.15 < chance < 0.4 and question_word != "where":
            place = clause.place = self.draw_noun_phrase(self.lexicon.places, "prepositional", "definite")
            assert place.noun is not None
            tags = place.noun.tags
            place.preposition = next(p for tag, p in PLACE_PREPOSITIONS.items() if tag in tags)
        elif "company" in frame.adjuncts and 0.4 < chance < 0.5:
            clause.place = self.draw_noun_phrase(self.lexicon.people, "prepositional", "possessor")
            clause.place.preposition = WITH

    def add_sentence_adjuncts(self, clause: Clause, elaborate: bool, front: bool, question_word: str) -> None:
        """Add perhaps a time, a frequency, a circumstance or a sentence adverb, and with `front` move it forward."""
        lexicon, chance = self.lexicon, self.random()
        times = (lexicon.neutral_times if clause.negated or not clause.verb else lexicon.times)[clause.tense]
        adjective = clause.predicate
        if adjective and (adjective.kind != "state" or clause.comparison):
            if not front:
                return
            chance = 0.55 + chance / 4  # a lasting quality has no time
        if front:
            if chance < 0.55:
                clause.time, clause.fronted = self.pick(times), "time"
            elif chance < 0.8:
                clause.sentence_adverb = self.pick(lexicon.adverbials["sentence"])
                clause.fronted = "sentence_adverb"
            else:
                clause.circumstance, clause.fronted = self.draw_circumstance(), "circumstance"
        elif chance < 0.12 and question_word != "when":
            clause.time = self.pick(times)
        elif chance < 0.2 and not (question_word or clause.negated or clause.modal) and clause.tense in SIMPLE_TENSES:
            clause.frequency = self.pick(lexicon.adverbials["frequency"])
        elif chance < 0.23 and elaborate and clause.verb and clause.kind == MAIN:
            clause.circumstance = self.draw_circumstance()

    def draw_circumstance(self) -> NounPhrase:
        if self.random() < 0.4:
            phrase = self.draw_noun_phrase(self.lexicon.weather, "circumstance", "the")
            phrase.preposition = DESPITE
        else:
            phrase = self.draw_noun_phrase(self.lexicon.events, "circumstance", "definite")
            phrase.preposition = self.pick(EVENT_PREPOSITIONS)
        return phrase

    def add_relative_clause(self, clause: Clause) -> None:
        """Add perhaps a relative clause to the subject, or to an object that nothing follows in either language."""
        subject, thing, chance = clause.subject, clause.accusative, self.random()
        if subject is not None and may_have_relative(subject) and chance < 0.26 and clause.moved != "subject":
            phrase = subject
        elif thing is not None and may_have_relative(thing) and chance > 0.72 and ends_with_object(clause):
            phrase = thing
        else:
            return
        noun = phrase.noun
        assert noun is not None
        if not self.is_allowed(noun, "relative"):
            return
        roles = [role for role in RELATIVE_ROLES if noun in self.lexicon.frames_by_role[role]]
        role = self.pick(roles) if roles else "subject"
        pronoun = NounPhrase(self.new_block(), noun, phrase.plural, "relative", phrase)
        tense = clause.tense if clause.tense in SIMPLE_TENSES else "present"
        phrase.relative = self.draw_clause(RELATIVE, tense, elaborate=False, second=True, role=role, filler=pronoun)


def split_conjunction(entry: str) -> tuple[str, str]:
    english, _, german = entry.replace("_", " ").partition("/")
    return english, german


def choose_pronouns(phrase: NounPhrase) -> tuple[str, str]:
    """Return the English and the German pronoun for a noun phrase; "sie" is the same word for she, it and they."""
    noun = phrase.noun
    if noun is None:
        return phrase.pronoun, GERMAN_PRONOUNS.get(phrase.pronoun, "")
    if phrase.plural:
        return "they", "sie"
    return noun.pronoun, ("er", "sie", "es")[noun.gender]


def is_tense_ambiguous(clause: Clause) -> bool:
    """Return whether English leaves the tense open: "they read", but not "he reads" or "did they read"."""
    subject, verb = clause.subject, clause.verb
    assert subject is not None
    assert verb is not None
    same_form = clause.tense == "past" and verb.english[0] == verb.english[2] and not clause.modal
    has_do = clause.negated or (clause.kind == QUESTION and clause.moved != "subject")
    return same_form and not has_do and subject.person != 1


def ends_with_object(clause: Clause) -> bool:
    """Return whether the object ends the clause, both in English and in German."""
    if clause.moved == "accusative":
        return False
    verb_follows = clause.tense not in SIMPLE_TENSES or clause.modal or (clause.verb and clause.verb.prefix)
    time_follows = clause.time and clause.fronted != "time"
    circumstance_follows = clause.circumstance and clause.fronted != "circumstance"
    not_follows = clause.negated and not clause.has_kein
    return not (verb_follows or time_follows or circumstance_follows or not_follows or clause.place or clause.manner)


def may_have_relative(phrase: NounPhrase) -> bool:
    """Return whether a relative clause may follow: its pronoun must not seem to refer to a noun in between."""
    noun = phrase.noun
    if phrase.pronoun or noun is None or noun.proper or noun.mass:
        return False
    return not (phrase.possessor or phrase.postmodifier or phrase.determiner in POSSESSIVES)


SENTENCE_TYPES: tuple[tuple[float, Callable[[Grammar], SentencePlan]], ...] = (  # cumulative probabilities
    (0.42, Grammar.draw_simple),
    (0.57, Grammar.draw_coordinated),
    (0.75, Grammar.draw_subordinated),
    (0.84, Grammar.draw_reported),
    (0.88, Grammar.draw_controlled),
    (1.0, Grammar.draw_question),
)

"""The synchronous grammar: draws the plan of a sentence, which `english.py` and `german.py` each put into words.

What must be the same in both languages is decided here, once: for instance, a pronoun only
takes up a noun when no other noun nearby could be meant, in English or in German.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dragoman.text import stock, words
from dragoman.text.draws import Dropped, Nominals
from dragoman.text.plan import FINAL, INFINITIVE, MAIN, NOT, QUESTION, RELATIVE, Clause, Nominal, Plan
from dragoman.text.stock import Determiners, conjunction, pronouns
from dragoman.text.words import Adjective, Frame, Noun


class Grammar(Nominals):
    """Draws whole sentences."""

    def plan(self) -> Plan:
        """One sentence; `total` and `found` tell afterwards which split it belongs to."""
        self.start()
        drawn = self.random()
        for limit, draw in PATTERNS:
            if drawn < limit:
                return draw(self)
        raise AssertionError

    def simple(self) -> Plan:
        clause = self.clause(MAIN, self.pick(stock.TENSES), front=self.random() < 0.3)
        return Plan(clause, root=clause)

    def linked(self) -> Plan:
        tense = self.pick(stock.PAIRED_TENSES)
        first = self.clause(MAIN, tense, rich=False)
        second = self.follow(MAIN, tense)
        second.conjunction = conjunction(self.pick(stock.LINKS))
        return Plan(first, second, root=first)

    def subordinate(self) -> Plan:
        joined = conjunction(self.pick(stock.SUBORDINATORS))
        tense = "present" if joined[0] == "if" else self.pick(stock.PAIRED_TENSES[:-2])
        fronted = self.random() < 0.4
        event = joined[0] in stock.TEMPORAL
        first = self.clause(FINAL if fronted else MAIN, tense, rich=False, event=event)
        second = self.follow(MAIN if fronted else FINAL, tense, inverted=fronted, event=event)
        (first if fronted else second).conjunction = joined
        return Plan(first, second, root=second if fronted else first)

    def reported(self) -> Plan:
        tense = self.pick(("present", "present", "past"))
        frame = self.frame(self.stock.reporting, 0)
        clause = self.clause(MAIN, tense, frame=frame, rich=False)
        clause.clause = self.follow(FINAL, tense)
        clause.clause.conjunction = ("that", "dass") if frame.clause == "that" else ("whether", "ob")
        return Plan(clause, root=clause)

    def intended(self) -> Plan:
        frame = self.frame(self.stock.controlling, 0)
        clause = self.clause(MAIN, self.pick(stock.TENSES), frame=frame, rich=False)
        inner = self.frame(self.stock.chosen, 0)
        clause.clause = self.clause(
            INFINITIVE, "present", frame=inner, rich=False, role="subject", fixed=clause.subject
        )
        return Plan(clause, root=clause)

    def question(self) -> Plan:
        tense = self.pick(stock.TENSES)
        clause = self.clause(QUESTION, tense, asked=self.pick(stock.QUESTIONS))
        return Plan(clause, root=clause)

    def follow(self, kind: str, tense: str, inverted: bool = False, event: bool = False) -> Clause:
        """The second clause; it takes up a noun of the first as a pronoun, where one is clear in both languages."""
        antecedent = self.antecedent() if self.random() < 0.8 else None
        if antecedent is None or antecedent.noun is None:
            return self.clause(kind, tense, rich=False, far=True, inverted=inverted, event=event)
        noun = antecedent.noun
        pronoun = Nominal(self.block(), noun, antecedent.plural, "they" if antecedent.plural else noun.pronoun)
        pronoun.antecedent = antecedent
        role = "accusative" if self.random() < 0.4 and noun in self.stock.using["accusative"] else "subject"
        return self.clause(kind, tense, rich=False, far=True, inverted=inverted, event=event, role=role, fixed=pronoun)

    def antecedent(self) -> Nominal | None:
        """A noun of the first clause whose pronoun could mean no other, in English or in German."""
        fit = [nominal for nominal in self.nominals if self.clear(nominal)]
        if not fit:
            return None
        chosen = self.pick(fit)
        assert chosen.noun is not None
        return chosen if self.may(chosen.noun, words.ANTECEDENT) else None

    def clear(self, nominal: Nominal) -> bool:
        noun = nominal.noun
        if nominal.pronoun or noun is None or not noun.pronoun or noun.proper or nominal.negation >= 0:
            return False
        if nominal.determiner not in stock.TAKEN_UP or noun.mass:
            return False
        english, german = pronouns(nominal)
        others = [pronouns(other) for other in self.nominals if other is not nominal]
        return all(english != e and german != g for e, g in others)

    # ---- clauses

    def clause(
        self,
        kind: str,
        tense: str,
        *,
        frame: Frame | None = None,
        rich: bool = True,
        far: bool = False,
        front: bool = False,
        inverted: bool = False,
        event: bool = False,
        asked: str = "",
        role: str = "",
        fixed: Nominal | None = None,
    ) -> Clause:
        """A clause. `fixed` fills `role` already: a pronoun, a relative pronoun, the subject of an infinitive."""
        clause = Clause(self.block(), kind, tense)
        clause.inverted = inverted
        clause.negated = kind != INFINITIVE and frame is None and not event and self.random() < 0.14
        if kind == RELATIVE:
            clause.moved = role
        if asked in ("where", "when", "why"):
            clause.asked = asked
        if frame is None and self.describes(asked, role, fixed, far, event):
            self.describe(clause, fixed, far)
        else:
            bits = stock.KIND_BITS[kind] | (words.NEGATED if clause.negated else 0)
            bits |= words.FRONTED if front or inverted else 0
            bits |= words.HELPED if tense == "future" else 0
            if frame is None:
                frame = self.frame(self.menu(asked, role, fixed), bits)
            elif not self.may(frame.verb, bits):
                raise Dropped
            self.used.add(frame.verb)
            self.total += frame.verb.number
            clause.verb = frame.verb
            self.fill(clause, frame, asked, role, fixed, far)
            self.adorn(clause, frame, asked)
            if unclear(clause):
                raise Dropped
        if kind != INFINITIVE and kind != RELATIVE:
            self.place_in_time(clause, rich, front, asked)
        if rich:
            self.widen(clause)
        return clause

    def menu(self, asked: str, role: str, fixed: Nominal | None) -> Sequence[Frame]:
        if role and fixed is not None and fixed.noun is not None:
            return self.stock.using[role].get(fixed.noun) or self.stock.frames
        return self.stock.asking.get(asked, self.stock.frames)

    def describes(self, asked: str, role: str, fixed: Nominal | None, far: bool, event: bool) -> bool:
        """Whether the clause says how something is, rather than what it does."""
        if role == "subject" and fixed is not None and fixed.noun is not None:
            able = fixed.noun in self.stock.using["subject"]
            return not able or (not event and self.random() < 0.4)
        return not role and not event and asked in ("", "why") and self.random() < (0.1 if far else 0.22)

    def describe(self, clause: Clause, fixed: Nominal | None, far: bool) -> None:
        """The lamp is very old; the dog is older than the cat."""
        shop = self.stock
        subject = fixed or self.someone(shop.described, self.random() < 0.5, far, clause.negated, True)
        clause.subject = subject
        noun = subject.noun
        if noun is None or noun.proper:
            menu: Sequence[Adjective] = shop.moods
        else:
            menu = shop.book.fitting[noun] + shop.book.colours[noun]
        clause.predicate = self.adjective(menu, 0)
        if clause.predicate is None:
            raise Dropped
        drawn = self.random()
        if drawn < 0.2 and not clause.negated:
            clause.degree = self.pick(shop.degrees)
        elif drawn < 0.3 and noun is not None and not noun.proper and clause.kind != RELATIVE:
            self.compare(clause, noun, clause.predicate)

    def compare(self, clause: Clause, noun: Noun, adjective: Adjective) -> None:
        """Like with like: the other noun shares a kind with the first, and the adjective fits both."""
        menu = self.stock.alike[noun, adjective]
        if len(menu) > 3 and not adjective.colour:
            clause.comparison = self.nominal(menu, "subject", stock.KNOWN)

    def fill(self, clause: Clause, frame: Frame, asked: str, role: str, fixed: Nominal | None, far: bool) -> None:
        """Puts something into every place that the verb opens."""
        if role == "subject":
            clause.subject = fixed
        elif asked == "who":
            clause.subject, clause.moved = Nominal(self.block(), None, pronoun="who"), "subject"
        else:
            wide = clause.kind != RELATIVE and not frame.prepositional
            clause.subject = self.someone(frame.subjects, frame.personal, far, clause.negated, wide)
        for slot, menu in (
            ("dative", frame.dative),
            ("accusative", frame.accusative),
            ("prepositional", frame.prepositional),
        ):
            if menu:
                taken = fixed if slot == role else None
                setattr(clause, slot, taken or self.complement(clause, menu, slot, asked, bool(frame.accusative)))
        if clause.prepositional:
            clause.prepositional.preposition = frame.preposition
        if frame.predicate and clause.subject is not None:
            noun = clause.subject.noun
            fitting = self.stock.book.fitting[noun] if noun and not noun.proper else self.stock.moods
            moods = [adjective for adjective in fitting if adjective.lemma in frame.predicate]
            clause.predicate = self.adjective(moods, 0)
            if clause.predicate is None:
                raise Dropped

    def complement(self, clause: Clause, menu: Sequence[Noun], role: str, asked: str, double: bool) -> Nominal:
        """An object. Beside a direct object (`double`), a negated indirect one is a known person."""
        if asked in ("what", "whom") and role != "prepositional":
            clause.moved = role
            return Nominal(self.block(), None, pronoun="what" if asked == "what" else "who")
        if asked == "which" and role == "accusative":
            clause.moved = role
            return self.nominal(menu, role, stock.WHICH)
        subject = clause.subject
        near = subject is not None and not subject.pronoun and clause.kind != INFINITIVE
        if near and role != "prepositional" and "person" in menu[0].tags and self.random() < 0.1:
            return self.bare(self.pick(stock.OBJECT_PRONOUNS if role == "accusative" else stock.RECIPIENT_PRONOUNS))
        nominal = self.nominal(menu, role, self.determiners(clause, role, double))
        if clause.negated and nominal.determiner in ("", "a") and role != "prepositional":
            nominal.negation = clause.node + NOT
            clause.silent = True
        return nominal

    def determiners(self, clause: Clause, role: str, double: bool) -> Determiners:
        if clause.negated:
            return stock.KNOWN if role == "prepositional" or (role == "dative" and double) else stock.DENIED
        return stock.RECEIVING if role == "dative" else stock.ANY

    def adorn(self, clause: Clause, frame: Frame, asked: str) -> None:
        """A modal verb, an adverb of manner, a place or a companion."""
        verb = frame.verb
        modals = (stock.DENIED_MODALS if clause.negated else stock.MODALS).get(clause.tense)
        able = modals and frame.animate and clause.kind != INFINITIVE and not frame.clause and not frame.steady
        if modals and able and self.random() < 0.16 and self.may(verb, words.HELPED):
            clause.modal = self.pick(modals)
        drawn = self.random()
        if frame.manner and drawn < 0.15 and not clause.negated:
            clause.manner = self.adjective(self.stock.manners, 0)
        elif frame.place and 0.15 < drawn < 0.4 and asked != "where":
            clause.place = self.scene()
        elif frame.company and 0.4 < drawn < 0.5:
            clause.place = self.nominal(self.stock.people, "prepositional", stock.OWNING)
            clause.place.preposition = stock.WITH

    def scene(self) -> Nominal:
        place = self.nominal(self.stock.scenes, "prepositional", stock.KNOWN)
        assert place.noun is not None
        place.preposition = stock.SCENES[next(tag for tag in ("in", "on", "at") if tag in place.noun.tags)]
        return place

    def place_in_time(self, clause: Clause, rich: bool, front: bool, asked: str) -> None:
        """When, how often, in spite of what, in whose opinion; and which of these opens the clause."""
        shop, drawn = self.stock, self.random()
        times = (shop.once if clause.negated or not clause.verb else shop.times)[clause.tense]
        if clause.predicate and not (clause.predicate.passing and clause.comparison is None):
            if not front:
                return
            drawn = 0.55 + drawn / 4  # what lasts is not dated
        if front:
            if drawn < 0.55:
                clause.when, clause.front = self.pick(times), "when"
            elif drawn < 0.8:
                clause.opinion, clause.front = self.pick(shop.opinions), "opinion"
            else:
                clause.setting, clause.front = self.setting(), "setting"
        elif drawn < 0.12 and asked != "when":
            clause.when = self.pick(times)
        elif drawn < 0.2 and not asked and not clause.negated and not clause.modal and clause.tense in SIMPLE:
            clause.often = self.pick(shop.often)
        elif drawn < 0.23 and rich and clause.verb and clause.kind == MAIN:
            clause.setting = self.setting()

    def setting(self) -> Nominal:
        if self.random() < 0.4:
            nominal = self.nominal(self.stock.weather, "setting", stock.THE)
            nominal.preposition = stock.DESPITE
        else:
            nominal = self.nominal(self.stock.events, "setting", stock.KNOWN)
            nominal.preposition = self.pick(stock.EVENTS)
        return nominal

    def widen(self, clause: Clause) -> None:
        """A relative clause: at the subject, or at an object that nothing follows in either language."""
        subject, thing, drawn = clause.subject, clause.accusative, self.random()
        if subject is not None and describable(subject) and drawn < 0.26 and clause.moved != "subject":
            self.relate(subject, clause.tense)
        elif thing is not None and describable(thing) and drawn > 0.72 and ends_with_object(clause):
            self.relate(thing, clause.tense)

    def relate(self, nominal: Nominal, tense: str) -> None:
        noun = nominal.noun
        assert noun is not None
        if not self.may(noun, words.MODIFIED):
            return
        roles = [role for role in stock.RELATIVE_ROLES if noun in self.stock.using[role]]
        role = self.pick(roles) if roles else "subject"
        gap = Nominal(self.block(), noun, nominal.plural, "relative")
        gap.antecedent = nominal
        inner = tense if tense in SIMPLE else "present"
        nominal.relative = self.clause(RELATIVE, inner, rich=False, far=True, role=role, fixed=gap)


def unclear(clause: Clause) -> bool:
    """Whether English leaves the tense open: "they read", where only "he reads" and "did they read" would tell."""
    subject, verb = clause.subject, clause.verb
    assert subject is not None
    assert verb is not None
    open_form = clause.tense == "past" and verb.english[0] == verb.english[2] and not clause.modal
    helped = clause.negated or (clause.kind == QUESTION and clause.moved != "subject")
    return open_form and not helped and (subject.plural or subject.pronoun == "I")


def ends_with_object(clause: Clause) -> bool:
    """Whether the object closes the clause, in English and in German."""
    if clause.moved == "accusative":
        return False
    late_verb = clause.tense not in SIMPLE or clause.modal or (clause.verb and clause.verb.prefix)
    late_when = (clause.when and clause.front != "when") or (clause.setting and clause.front != "setting")
    return not (late_verb or late_when or clause.place or clause.manner or (clause.negated and not clause.silent))


def describable(nominal: Nominal) -> bool:
    """Whether a relative clause may follow: its "who" must not seem to mean a noun between."""
    noun = nominal.noun
    plain = not nominal.pronoun and noun is not None and not noun.proper and not noun.mass
    return plain and not nominal.owner and not nominal.with_ and nominal.determiner not in stock.POSSESSIVES


SIMPLE = ("present", "past")
PATTERNS: tuple[tuple[float, Callable[[Grammar], Plan]], ...] = (
    (0.42, Grammar.simple),
    (0.57, Grammar.linked),
    (0.75, Grammar.subordinate),
    (0.84, Grammar.reported),
    (0.88, Grammar.intended),
    (1.0, Grammar.question),
)

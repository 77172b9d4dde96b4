"""The built-in corpus: its sentences are right, its analyses hold together, its splits keep apart."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from dragoman.errors import UserError
from dragoman.phrasebook import generate
from dragoman.phrasebook.generate import (
    DIRECTIONS,
    SPLITS,
    Phenomenon,
    Phrase,
    count_correct_phenomena,
    generate_pairs,
    generate_phrases,
    split_words,
)
from dragoman.phrasebook.german import DETERMINERS, German
from dragoman.phrasebook.grammar import DETERMINER_CHOICES, Grammar
from dragoman.phrasebook.lexicon import CASES, CONSTRUCTIONS, Adjective, Noun, Verb, load_lexicon
from dragoman.phrasebook.realization import Clause, NounPhrase, SentencePlan
from dragoman.types import Pair

GOLDEN = Path(__file__).parents[1] / "golden" / "phrasebook.txt"
MARKS = {",", ".", "?"}


@pytest.fixture(scope="module")
def sample() -> dict[str, list[Phrase]]:
    return {split: list(generate_phrases(split, 1500, seed=7)) for split in SPLITS}


@pytest.fixture(scope="module")
def plans() -> dict[str, list[SentencePlan]]:
    counts = {"train": 9000, "dev": 300, "test": 300, "unseen": 900}
    return {split: [plan for plan, _, _ in generate.realize_plans(split, count, 3)] for split, count in counts.items()}


# ---- the same everywhere, and what was read by eye stays as it was


def test_golden_sentences() -> None:
    """The file was written by the code and read by eye; a change of the grammar has to be read again."""
    written = [f"{p.source}\t{p.target}" for split in SPLITS for p in generate_phrases(split, 12, seed=1)]
    assert written == GOLDEN.read_text(encoding="utf-8").splitlines()


def test_same_seed_same_phrases_and_another_seed_others() -> None:
    first, again, other = (list(generate_phrases("train", 50, seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_fewer_are_the_beginning_of_more() -> None:
    assert list(islice(generate_phrases("dev", 400), 30)) == list(generate_phrases("dev", 30))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_pairs_are_the_phrases_texts(direction: str) -> None:
    assert [p.pair for p in generate_phrases("test", 40, direction=direction)] == list(
        generate_pairs("test", 40, direction=direction)
    )


def test_directions_mirror_each_other() -> None:
    for there, back in zip(generate_phrases("train", 40), generate_phrases("train", 40, direction="de-en")):
        for part in ("", "_words", "_heads", "_coref"):
            assert getattr(back, f"source{part}") == getattr(there, f"target{part}")
            assert getattr(back, f"target{part}") == getattr(there, f"source{part}")
        assert set(back.alignment) == {(t, s) for s, t in there.alignment}
        assert (back.phenomena, back.source_phenomena) == (there.source_phenomena, there.phenomena)
        assert back.pair == Pair(there.target, there.source)


# ---- splits


@pytest.mark.parametrize("split", SPLITS)
def test_no_two_alike_on_either_side(sample: dict[str, list[Phrase]], split: str) -> None:
    for side in ("source", "target"):
        texts = [getattr(phrase, side) for phrase in sample[split]]
        assert len(set(texts)) == len(texts)


def test_splits_share_no_sentence_on_either_side() -> None:
    """Short sentences meet often, so thousands from several seeds would show a leak."""
    texts = {
        s: [p for seed in (1, 2) for p in generate_pairs(s, 4000 if s == "train" else 1200, seed=seed)] for s in SPLITS
    }
    for side in ("source", "target"):
        sets = {split: {getattr(pair, side) for pair in some} for split, some in texts.items()}
        assert all(not sets[a] & sets[b] for a in SPLITS for b in SPLITS if a < b)


def test_one_text_has_one_counterpart() -> None:
    """English decides German and German decides English; the few words that could mean two things are few."""
    for key, value in (("source", "target"), ("target", "source")):
        met: dict[str, set[str]] = defaultdict(set)
        for seed in range(4):
            for pair in generate_pairs("train", 4000, seed=seed):
                met[getattr(pair, key)].add(getattr(pair, value))
        assert [texts for texts in met.values() if len(texts) > 1] == []


def test_held_combinations_stay_unseen(plans: dict[str, list[SentencePlan]]) -> None:
    for split in ("train", "dev", "test"):
        assert not any(word.held_out == name for plan in plans[split] for word, _, name in uses(plan))
    for plan in plans["unseen"]:
        assert any(word.held_out == name for word, _, name in uses(plan))


def test_words_and_constructions_of_unseen_are_trained(plans: dict[str, list[SentencePlan]]) -> None:
    """Only their combination is new."""
    train = [use for plan in plans["train"] for use in uses(plan)]
    unseen = [use for plan in plans["unseen"] for use in uses(plan)]
    assert {word for word, _, _ in unseen} <= {word for word, _, _ in train}
    assert {(part, name) for _, part, name in unseen} <= {(part, name) for _, part, name in train}


def test_few_combinations_are_held() -> None:
    book = load_lexicon()
    menus: dict[str, Sequence[Any]] = {"noun": book.nouns, "verb": book.verbs, "adjective": book.adjectives}
    cells = sum(len(CONSTRUCTIONS[part]) * len(menu) for part, menu in menus.items())
    held = sum(bool(word.held_out) for menu in menus.values() for word in menu)
    assert 0.05 < held / cells < 0.1


def test_there_are_far_more_sentences_than_anyone_asks_for() -> None:
    """Counts only "DET ADJECTIVE NOUN verb DET ADJECTIVE NOUN" in the present; two such clauses make one sentence."""
    book = load_lexicon()
    determiners = len(set(DETERMINER_CHOICES["any"][0]))

    def phrases_of(menu: tuple[Noun, ...]) -> int:
        return sum(determiners * len(book.qualities[noun]) for noun in menu)

    fillers = [frame.fillers for frame in book.all_frames]
    clauses = sum(phrases_of(f["subject"]) * phrases_of(f["accusative"]) for f in fillers if not f["dative"])
    assert clauses**2 > generate.SENTENCE_COUNT


# ---- analyses


def test_words_join_to_the_text(sample: dict[str, list[Phrase]]) -> None:
    for phrase in sample["train"]:
        for text, row in ((phrase.source, phrase.source_words), (phrase.target, phrase.target_words)):
            assert tuple(split_words(text)) == row
            assert " ".join(row).replace(" ,", ",").replace(" .", ".").replace(" ?", "?") == text
            assert text[0].isupper()
            assert text[-1] in ".?"


def test_alignment_leaves_out_only_what_the_other_side_lacks(sample: dict[str, list[Phrase]]) -> None:
    """German commas that English does not write, English "of", and a "kein" that English spreads over two words."""
    for phrase in sample["train"] + sample["unseen"]:
        assert list(phrase.alignment) == sorted(set(phrase.alignment))
        assert all(s < len(phrase.source_words) and t < len(phrase.target_words) for s, t in phrase.alignment)
        lone_source = {
            phrase.source_words[s] for s in set(range(len(phrase.source_words))) - {s for s, _ in phrase.alignment}
        }
        lone_target = {
            phrase.target_words[t] for t in set(range(len(phrase.target_words))) - {t for _, t in phrase.alignment}
        }
        assert lone_source <= {",", "of"}
        assert lone_target <= {","}
        for s, t in phrase.alignment:
            assert (phrase.source_words[s] in MARKS) == (phrase.target_words[t] in MARKS)


def test_heads_form_a_tree(sample: dict[str, list[Phrase]]) -> None:
    for phrase in sample["train"] + sample["unseen"]:
        for row, heads in (
            (phrase.source_words, phrase.source_heads),
            (phrase.target_words, phrase.target_heads),
        ):
            assert len(row) == len(heads)
            assert heads.count(0) == 1
            for word in range(1, len(heads) + 1):
                path = [word]
                while path[-1]:
                    path.append(heads[path[-1] - 1])
                    assert len(path) <= len(heads) + 1


def test_coreference_agrees_with_the_alignment() -> None:
    phrase = next(
        p
        for p in generate_phrases("train", 5000)
        if p.source_coref and len(p.source_words) < 10 and "it" in p.source_words
    )
    (pronoun, noun), (german_pronoun, german_noun) = phrase.source_coref[0], phrase.target_coref[0]
    assert (noun, german_noun) in phrase.alignment
    assert (pronoun, german_pronoun) in phrase.alignment


def test_pronouns_refer_to_nouns_before_them(sample: dict[str, list[Phrase]]) -> None:
    book = load_lexicon()
    forms = {form: noun for noun in book.nouns for row in noun.forms[1] for form in row if form}
    pronouns = {("er", 0), ("ihn", 0), ("sie", 1), ("es", 2)}
    found = 0
    for phrase in sample["train"]:
        assert len(phrase.source_coref) == len(phrase.target_coref)
        for pronoun, noun in phrase.target_coref:
            word, gender = phrase.target_words[pronoun].lower(), forms[phrase.target_words[noun]].gender
            assert (word, gender) in pronouns or word == "sie"
            assert noun < pronoun
            found += 1
    assert found > 100


def test_every_phenomenon_is_common(sample: dict[str, list[Phrase]]) -> None:
    counts = Counter(name for p in sample["train"] for name in {ph.name for ph in p.phenomena})
    assert set(counts) == {"agreement", "pronoun", "verb-position", "adjective", "relative"}
    assert min(counts.values()) >= 0.05 * len(sample["train"])


def test_lengths(sample: dict[str, list[Phrase]]) -> None:
    lengths = [len(phrase.source_words) for phrase in sample["train"]]
    assert min(lengths) >= 3
    assert max(lengths) <= 40
    assert 9 <= sum(lengths) / len(lengths) <= 12


# ---- the judge


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_reference_is_right_and_a_spoilt_one_is_not(direction: str) -> None:
    for phrase in generate_phrases("test", 200, direction=direction):
        for right, total in count_correct_phenomena(phrase, phrase.target).values():
            assert right == total
        for phenomenon in phrase.phenomena:
            for place in phenomenon.words:
                row = list(phrase.target_words)
                row[place] = "falsch"
                right, total = count_correct_phenomena(phrase, " ".join(row))[phenomenon.name]
                assert right < total


def test_the_judge_looks_at_the_judged_words_only() -> None:
    phrase = Phrase(
        source="The lamp is old, but it is beautiful.",
        target="Die Lampe ist alt, aber sie ist schön.",
        source_words=tuple(split_words("The lamp is old, but it is beautiful.")),
        target_words=tuple(split_words("Die Lampe ist alt, aber sie ist schön.")),
        alignment=(),
        source_heads=(),
        target_heads=(),
        source_coref=(),
        target_coref=(),
        phenomena=(Phenomenon("pronoun", (5, 6)),),
        source_phenomena=(),
    )
    assert count_correct_phenomena(phrase, "Die Leuchte war neu, aber sie ist hübsch.") == {"pronoun": (1, 1)}
    assert count_correct_phenomena(phrase, "Die Lampe ist alt, aber es ist schön.") == {"pronoun": (0, 1)}
    assert count_correct_phenomena(phrase, "") == {"pronoun": (0, 1)}


# ---- German


def noun_phrase(lemma: str, determiner: str, adjective: str, case: int, plural: bool = False) -> str:
    book = load_lexicon()
    phrase = NounPhrase(0, next(noun for noun in book.nouns if noun.lemma == lemma), plural)
    phrase.determiner = determiner
    phrase.adjective = next((a for a in book.adjectives if a.lemma == adjective), None)
    realizer = German()
    realizer.write_noun_phrase(phrase, next(role for role in CASES if CASES[role] == case), 0)
    return " ".join(token[0] for token in realizer.tokens)


NOM, ACC, DAT, GEN = range(4)
NOUN_PHRASES = [
    ("dog", "the", "old", NOM, False, "der alte Hund"),
    ("dog", "the", "old", ACC, False, "den alten Hund"),
    ("dog", "a", "old", NOM, False, "ein alter Hund"),
    ("dog", "no", "old", ACC, False, "keinen alten Hund"),
    ("dog", "this", "old", DAT, False, "diesem alten Hund"),
    ("dog", "a", "old", GEN, False, "eines alten Hundes"),
    ("dog", "", "old", DAT, True, "alten Hunden"),
    ("dog", "many", "old", NOM, True, "viele alte Hunde"),
    ("dog", "all", "old", NOM, True, "alle alten Hunde"),
    ("dog", "my", "old", ACC, True, "meine alten Hunde"),
    ("dog", "two", "old", DAT, True, "zwei alten Hunden"),
    ("lamp", "a", "new", DAT, False, "einer neuen Lampe"),
    ("lamp", "the", "new", GEN, True, "der neuen Lampen"),
    ("house", "a", "high", ACC, False, "ein hohes Haus"),
    ("house", "our", "dark", NOM, False, "unser dunkles Haus"),
    ("house", "every", "expensive", GEN, False, "jedes teuren Hauses"),
    ("student", "the", "tired", ACC, False, "den müden Studenten"),
    ("student", "this", "", GEN, False, "dieses Studenten"),
    ("boy", "a", "young", NOM, False, "ein junger Junge"),
    ("neighbour", "her", "", DAT, False, "ihrem Nachbarn"),
    ("water", "", "cold", NOM, False, "kaltes Wasser"),
    ("wine", "", "cold", DAT, False, "kaltem Wein"),
    ("milk", "", "cold", DAT, False, "kalter Milch"),
    ("queen", "several", "rich", GEN, True, "mehrerer reicher Königinnen"),
    ("car", "the", "red", DAT, True, "den roten Autos"),
    ("secret", "the", "", GEN, False, "des Geheimnisses"),
    ("girl", "which", "happy", NOM, False, "welches glückliche Mädchen"),
]


@pytest.mark.parametrize(("lemma", "determiner", "adjective", "case", "plural", "right"), NOUN_PHRASES)
def test_noun_phrases(lemma: str, determiner: str, adjective: str, case: int, plural: bool, right: str) -> None:
    assert noun_phrase(lemma, determiner, adjective, case, plural) == right


VERB_FORMS = [  # ich, er, wir; er and wir in the past; participle and helper
    ("read", "lese liest lesen", "las lasen", "gelesen haben"),
    ("work", "arbeite arbeitet arbeiten", "arbeitete arbeiteten", "gearbeitet haben"),
    ("smile", "lächle lächelt lächeln", "lächelte lächelten", "gelächelt haben"),
    ("admire", "bewundere bewundert bewundern", "bewunderte bewunderten", "bewundert haben"),
    ("run", "laufe läuft laufen", "lief liefen", "gelaufen sein"),
    ("wake_up", "wache wacht wachen", "wachte wachten", "aufgewacht sein"),
    ("call", "rufe ruft rufen", "rief riefen", "angerufen haben"),
    ("forget", "vergesse vergisst vergessen", "vergaß vergaßen", "vergessen haben"),
]


@pytest.mark.parametrize(("lemma", "present", "past", "perfect"), VERB_FORMS)
def test_verb_forms(lemma: str, present: str, past: str, perfect: str) -> None:
    verb = next(verb for verb in load_lexicon().verbs if verb.lemma == lemma)
    assert (" ".join(verb.present), " ".join(verb.past)) == (present, past)
    assert f"{verb.participle} {verb.auxiliary}" == perfect


def test_every_determiner_has_forms() -> None:
    assert {name for menus in DETERMINER_CHOICES.values() for menu in menus for name in menu} <= set(DETERMINERS)


def test_lexicon_is_one_to_one_and_no_form_means_two_words() -> None:
    """What the splits rest on: either side of a pair tells its content words."""
    book = load_lexicon()
    english: dict[str, set[str]] = defaultdict(set)
    german: dict[str, set[str]] = defaultdict(set)
    for noun in book.nouns:
        for form in (form for row in noun.forms[0] for form in row):
            english[form].add(f"noun {noun.lemma}")
        for form in (form for row in noun.forms[1] for form in row):
            german[form].add(f"noun {noun.lemma}")
    for verb in book.verbs:
        for form in verb.english:
            english[form].add(f"verb {verb.lemma}")
        for form in (*verb.present, *verb.past, verb.infinitive, verb.participle):
            german[form].add(f"verb {verb.lemma}")
    for adjective in book.adjectives:
        for form in (adjective.positive[0], adjective.comparative[0], *adjective.adverb.english):
            english[form].add(f"adjective {adjective.lemma}")
        for form in (
            adjective.positive[1],
            adjective.comparative[1],
            *(adjective.stem + e for e in ("e", "en", "er", "es", "em")),
        ):
            german[form].add(f"adjective {adjective.lemma}")
    for table in (english, german):
        assert [(form, owners) for form, owners in table.items() if form and len(owners) > 1] == []


def test_every_tag_of_the_lexicon_means_something() -> None:
    book = load_lexicon()
    tags = {tag for noun in book.nouns for tag in noun.tags}
    assert all(adjective.tags <= tags for adjective in book.adjectives)
    assert all(set(noun.possessors) <= tags for noun in book.nouns)
    assert all(frame.fillers["subject"] for frame in book.all_frames)
    assert len(book.nouns) + len(book.verbs) + len(book.adjectives) > 400


# ---- the package


def test_importing_reads_no_table() -> None:
    code = (
        "from dragoman.phrasebook import generate, lexicon; print(lexicon.load_lexicon.cache_info().currsize);"
        "next(generate.generate_pairs('train', 1)); print(lexicon.load_lexicon.cache_info().currsize)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["0", "1"]


def test_cache_key_depends_on_the_files_of_the_package_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = Path(generate.__file__).parent
    original = generate.hash_package()
    copy = Path(shutil.copytree(package, tmp_path / "phrasebook"))
    monkeypatch.setattr(generate, "__file__", str(copy / "generate.py"))
    (tmp_path / "tokenizer.py").write_text("x = 1")
    assert generate.hash_package() == original
    keys = {original}
    for path in sorted(p for p in copy.iterdir() if p.suffix in (".py", ".tsv")):
        path.write_text(path.read_text(encoding="utf-8") + "\n", encoding="utf-8")
        keys.add(generate.hash_package())
    assert len(keys) == 1 + len([p for p in copy.iterdir() if p.is_file()])


# ---- what a user may get wrong


@pytest.mark.parametrize("give", [generate_phrases, generate_pairs])
def test_wrong_names_and_numbers_are_answered_at_once(give: object) -> None:
    assert callable(give)
    with pytest.raises(UserError, match=r"no split of the phrasebook called 'trian'; did you mean 'train'\?.*unseen"):
        give("trian", 3)
    with pytest.raises(UserError, match=r"no direction of the phrasebook called 'de-fr'.*en-de, de-en"):
        give("train", 3, direction="de-fr")
    with pytest.raises(UserError, match=r"one phrase or more, not 0"):
        give("train", 0)
    with pytest.raises(UserError, match=r"not 9,000,000,000,000 \(it has about 1e\+18"):
        give("train", 9_000_000_000_000)


def test_an_exhausted_grammar_says_how_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = next(plan for plan, _, _ in generate.realize_plans("train", 1, 1))
    monkeypatch.setattr(generate, "MAX_REPEATS", 20)
    monkeypatch.setattr(Grammar, "sample_plan", lambda _: plan)
    monkeypatch.setattr(Grammar, "content_hash", 0, raising=False)  # which is in train
    with pytest.raises(UserError, match=r"'train' of the phrasebook has about 1 phrases, not 5"):
        list(generate_pairs("train", 5))


# ---- the words of a plan with the constructions they stand in, read off the plan itself


Use = tuple[Noun | Verb | Adjective, str, str]  # word, part of speech, construction


def uses(plan: SentencePlan) -> Iterator[Use]:
    for clause in plan.clauses:
        yield from clause_uses(clause)


def clause_uses(clause: Clause) -> Iterator[Use]:
    if clause.verb:
        found = {
            clause.kind: True,
            "negated": clause.negated,
            "fronted": (clause.kind == "main" and clause.opening) or clause.follows_clause,
            "auxiliary": clause.modal or clause.tense == "future",
        }
        yield from ((clause.verb, "verb", name) for name in CONSTRUCTIONS["verb"] if found.get(name))
    for role, phrase in clause.phrases.items():
        if role != "subject" or clause.kind != "infinitive":
            yield from noun_phrase_uses(phrase, "prepositional" if role == "place" else role)
    if clause.comparison:
        yield from noun_phrase_uses(clause.comparison, "subject")
    if clause.complement:
        yield from clause_uses(clause.complement)


def noun_phrase_uses(phrase: NounPhrase, role: str) -> Iterator[Use]:
    if phrase.pronoun:
        if phrase.antecedent and phrase.antecedent.noun:
            yield phrase.antecedent.noun, "noun", "relative" if phrase.pronoun == "relative" else "antecedent"
        return
    assert phrase.noun is not None
    yield phrase.noun, "noun", role
    for adjective in (phrase.adjective, phrase.colour):
        if adjective:
            yield adjective, "adjective", role if role in ("subject", "accusative") else "other"
            if phrase.plural:
                yield adjective, "adjective", "plural"
    if phrase.possessor:
        yield from noun_phrase_uses(phrase.possessor, "possessor")
    if phrase.postmodifier:
        yield from noun_phrase_uses(phrase.postmodifier, "prepositional")
    if phrase.relative:
        yield from clause_uses(phrase.relative)

"""The built-in corpus: sentences are grammatical, analyses are consistent, and splits do not overlap."""

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
    PHRASEBOOK_SPLITS,
    Phenomenon,
    Phrase,
    count_correct_phenomena,
    generate_pairs,
    generate_phrases,
    split_words,
)
from dragoman.phrasebook.german import DETERMINERS, German
from dragoman.phrasebook.grammar import Grammar
from dragoman.phrasebook.lexicon import CASES, CONSTRUCTIONS, Adjective, Noun, Verb, load_lexicon
from dragoman.phrasebook.realization import Clause, NounPhrase, SentencePlan
from dragoman.types import Pair

GOLDEN = Path(__file__).parents[1] / "golden" / "phrasebook.txt"
PUNCTUATION = {",", ".", "?"}


@pytest.fixture(scope="module")
def sample() -> dict[str, list[Phrase]]:
    return {split: list(generate_phrases(split, 1500, seed=7)) for split in PHRASEBOOK_SPLITS}


@pytest.fixture(scope="module")
def plans() -> dict[str, list[SentencePlan]]:
    counts = {"train": 9000, "dev": 300, "test": 300, "unseen": 900}
    return {split: [plan for plan, _, _ in generate.realize_plans(split, count, 3)] for split, count in counts.items()}


# ---- reproducibility


def test_golden_sentences() -> None:
    """The sentences in the file were generated and proofread; after a change of the grammar, proofread them again."""
    written = [f"{p.source}\t{p.target}" for split in PHRASEBOOK_SPLITS for p in generate_phrases(split, 12, seed=1)]
    assert written == GOLDEN.read_text(encoding="utf-8").splitlines()


def test_phrases_depend_on_the_seed() -> None:
    first, again, other = (list(generate_phrases("train", 50, seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_smaller_count_gives_a_prefix() -> None:
    assert list(islice(generate_phrases("dev", 400), 30)) == list(generate_phrases("dev", 30))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_pairs_have_the_texts_of_phrases(direction: str) -> None:
    assert [p.pair for p in generate_phrases("test", 40, direction=direction)] == list(
        generate_pairs("test", 40, direction=direction)
    )


def test_directions_mirror_each_other() -> None:
    for forward, backward in zip(generate_phrases("train", 40), generate_phrases("train", 40, direction="de-en")):
        for part in ("", "_words", "_heads", "_coref"):
            assert getattr(backward, f"source{part}") == getattr(forward, f"target{part}")
            assert getattr(backward, f"target{part}") == getattr(forward, f"source{part}")
        assert set(backward.alignment) == {(t, s) for s, t in forward.alignment}
        assert (backward.phenomena, backward.source_phenomena) == (forward.source_phenomena, forward.phenomena)
        assert backward.pair == Pair(forward.target, forward.source)


# ---- splits


@pytest.mark.parametrize("split", PHRASEBOOK_SPLITS)
def test_no_sentence_is_repeated_on_either_side(sample: dict[str, list[Phrase]], split: str) -> None:
    for side in ("source", "target"):
        texts = [getattr(phrase, side) for phrase in sample[split]]
        assert len(set(texts)) == len(texts)


def test_splits_share_no_sentence_on_either_side() -> None:
    """Short sentences are often sampled again, so thousands from two seeds would show an overlap."""
    texts = {
        s: [p for seed in (1, 2) for p in generate_pairs(s, 4000 if s == "train" else 1200, seed=seed)]
        for s in PHRASEBOOK_SPLITS
    }
    for side in ("source", "target"):
        sets = {split: {getattr(pair, side) for pair in pairs} for split, pairs in texts.items()}
        assert all(not sets[a] & sets[b] for a in PHRASEBOOK_SPLITS for b in PHRASEBOOK_SPLITS if a < b)


def test_every_text_has_one_translation() -> None:
    """No sentence occurs with two different translations, in either direction."""
    for key, value in (("source", "target"), ("target", "source")):
        counterparts: dict[str, set[str]] = defaultdict(set)
        for seed in range(4):
            for pair in generate_pairs("train", 4000, seed=seed):
                counterparts[getattr(pair, key)].add(getattr(pair, value))
        assert [texts for texts in counterparts.values() if len(texts) > 1] == []


def test_held_out_combinations_occur_only_in_unseen(plans: dict[str, list[SentencePlan]]) -> None:
    for split in ("train", "dev", "test"):
        assert not any(word.held_out == name for plan in plans[split] for word, _, name in list_uses(plan))
    for plan in plans["unseen"]:
        assert any(word.held_out == name for word, _, name in list_uses(plan))


def test_words_and_constructions_of_unseen_occur_in_train(plans: dict[str, list[SentencePlan]]) -> None:
    """Training data contains all words and all constructions of `unseen`; only their combinations are new."""
    train = [use for plan in plans["train"] for use in list_uses(plan)]
    unseen = [use for plan in plans["unseen"] for use in list_uses(plan)]
    assert {word for word, _, _ in unseen} <= {word for word, _, _ in train}
    assert {(part, name) for _, part, name in unseen} <= {(part, name) for _, part, name in train}


def test_few_combinations_are_held_out() -> None:
    lexicon = load_lexicon()
    words_by_part: dict[str, Sequence[Any]] = {
        "noun": lexicon.nouns,
        "verb": lexicon.verbs,
        "adjective": lexicon.adjectives,
    }
    combinations = sum(len(CONSTRUCTIONS[part]) * len(words) for part, words in words_by_part.items())
    held_out = sum(bool(word.held_out) for words in words_by_part.values() for word in words)
    assert 0.05 < held_out / combinations < 0.1


def test_sentence_count_is_a_lower_bound() -> None:
    """Count only pairs of clauses "DET ADJECTIVE NOUN verb DET ADJECTIVE NOUN" in the present tense."""
    lexicon = load_lexicon()
    determiners = len(set(lexicon.determiners["any"][0]))

    def count_noun_phrases(nouns: tuple[Noun, ...]) -> int:
        return sum(determiners * len(lexicon.qualities[noun]) for noun in nouns)

    fillers = [frame.fillers for frame in lexicon.all_frames]
    clauses = sum(
        count_noun_phrases(f["subject"]) * count_noun_phrases(f["accusative"]) for f in fillers if not f["dative"]
    )
    assert clauses**2 > generate.SENTENCE_COUNT


# ---- analyses


def test_words_joined_give_the_text(sample: dict[str, list[Phrase]]) -> None:
    for phrase in sample["train"]:
        for text, words in ((phrase.source, phrase.source_words), (phrase.target, phrase.target_words)):
            assert tuple(split_words(text)) == words
            assert " ".join(words).replace(" ,", ",").replace(" .", ".").replace(" ?", "?") == text
            assert text[0].isupper()
            assert text[-1] in ".?"


def test_only_commas_and_of_are_unaligned(sample: dict[str, list[Phrase]]) -> None:
    """Unaligned are commas, which differ between the languages, and the English "of" of a genitive."""
    for phrase in sample["train"] + sample["unseen"]:
        assert list(phrase.alignment) == sorted(set(phrase.alignment))
        assert all(s < len(phrase.source_words) and t < len(phrase.target_words) for s, t in phrase.alignment)
        unaligned_source = {
            phrase.source_words[s] for s in set(range(len(phrase.source_words))) - {s for s, _ in phrase.alignment}
        }
        unaligned_target = {
            phrase.target_words[t] for t in set(range(len(phrase.target_words))) - {t for _, t in phrase.alignment}
        }
        assert unaligned_source <= {",", "of"}
        assert unaligned_target <= {","}
        for s, t in phrase.alignment:
            assert (phrase.source_words[s] in PUNCTUATION) == (phrase.target_words[t] in PUNCTUATION)


def test_heads_form_a_tree(sample: dict[str, list[Phrase]]) -> None:
    for phrase in sample["train"] + sample["unseen"]:
        for words, heads in (
            (phrase.source_words, phrase.source_heads),
            (phrase.target_words, phrase.target_heads),
        ):
            assert len(words) == len(heads)
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
    lexicon = load_lexicon()
    forms = {form: noun for noun in lexicon.nouns for by_case in noun.forms[1] for form in by_case if form}
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


def test_lengths_of_sentences(sample: dict[str, list[Phrase]]) -> None:
    lengths = [len(phrase.source_words) for phrase in sample["train"]]
    assert min(lengths) >= 3
    assert max(lengths) <= 40
    assert 9 <= sum(lengths) / len(lengths) <= 12


# ---- correctness of phenomena in a translation


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_reference_is_correct_and_changed_words_are_errors(direction: str) -> None:
    for phrase in generate_phrases("test", 200, direction=direction):
        for correct, total in count_correct_phenomena(phrase, phrase.target).values():
            assert correct == total
        for phenomenon in phrase.phenomena:
            for position in phenomenon.words:
                words = list(phrase.target_words)
                words[position] = "falsch"
                correct, total = count_correct_phenomena(phrase, " ".join(words))[phenomenon.name]
                assert correct < total


def test_other_words_do_not_matter_for_a_phenomenon() -> None:
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


def write_german_noun_phrase(lemma: str, determiner: str, adjective: str, case: int, plural: bool = False) -> str:
    """Return a German noun phrase."""
    lexicon = load_lexicon()
    phrase = NounPhrase(0, next(noun for noun in lexicon.nouns if noun.lemma == lemma), plural)
    phrase.determiner = determiner
    phrase.adjective = next((a for a in lexicon.adjectives if a.lemma == adjective), None)
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


@pytest.mark.parametrize(("lemma", "determiner", "adjective", "case", "plural", "correct"), NOUN_PHRASES)
def test_noun_phrases(lemma: str, determiner: str, adjective: str, case: int, plural: bool, correct: str) -> None:
    assert write_german_noun_phrase(lemma, determiner, adjective, case, plural) == correct


VERB_FORMS = [  # present and past (ich, er, wir); participle and auxiliary
    ("read", "lese liest lesen", "las las lasen", "gelesen haben"),
    ("work", "arbeite arbeitet arbeiten", "arbeitete arbeitete arbeiteten", "gearbeitet haben"),
    ("smile", "lächle lächelt lächeln", "lächelte lächelte lächelten", "gelächelt haben"),
    ("admire", "bewundere bewundert bewundern", "bewunderte bewunderte bewunderten", "bewundert haben"),
    ("run", "laufe läuft laufen", "lief lief liefen", "gelaufen sein"),
    ("wake_up", "wache wacht wachen", "wachte wachte wachten", "aufgewacht sein"),
    ("call", "rufe ruft rufen", "rief rief riefen", "angerufen haben"),
    ("forget", "vergesse vergisst vergessen", "vergaß vergaß vergaßen", "vergessen haben"),
]


@pytest.mark.parametrize(("lemma", "present", "past", "perfect"), VERB_FORMS)
def test_verb_forms(lemma: str, present: str, past: str, perfect: str) -> None:
    verb = next(verb for verb in load_lexicon().verbs if verb.lemma == lemma)
    assert (" ".join(verb.present), " ".join(verb.past)) == (present, past)
    assert f"{verb.participle} {verb.auxiliary}" == perfect


def test_every_determiner_has_german_forms() -> None:
    used = {name for by_number in load_lexicon().determiners.values() for choices in by_number for name in choices}
    assert used <= set(DETERMINERS)


def test_no_form_belongs_to_two_words() -> None:
    """Therefore the content words of a pair can be read off either sentence, which the splits require."""
    lexicon = load_lexicon()
    english: dict[str, set[str]] = defaultdict(set)
    german: dict[str, set[str]] = defaultdict(set)
    for noun in lexicon.nouns:
        for form in (form for by_case in noun.forms[0] for form in by_case):
            english[form].add(f"noun {noun.lemma}")
        for form in (form for by_case in noun.forms[1] for form in by_case):
            german[form].add(f"noun {noun.lemma}")
    for verb in lexicon.verbs:
        for form in (*verb.english_present, verb.english_past, verb.english_participle):
            english[form].add(f"verb {verb.lemma}")
        for form in (*verb.present, *verb.past, verb.infinitive, verb.participle):
            german[form].add(f"verb {verb.lemma}")
    for adjective in lexicon.adjectives:
        for form in (adjective.positive[0], adjective.comparative[0], *adjective.adverb.english):
            english[form].add(f"adjective {adjective.lemma}")
        for form in (
            adjective.positive[1],
            adjective.comparative[1],
            *(adjective.stem + e for e in ("e", "en", "er", "es", "em")),
        ):
            german[form].add(f"adjective {adjective.lemma}")
    for owners_by_form in (english, german):
        assert [(form, owners) for form, owners in owners_by_form.items() if form and len(owners) > 1] == []


def test_all_tags_belong_to_nouns() -> None:
    lexicon = load_lexicon()
    tags = {tag for noun in lexicon.nouns for tag in noun.tags}
    assert all(adjective.tags <= tags for adjective in lexicon.adjectives)
    assert all(set(noun.possessors) <= tags for noun in lexicon.nouns)
    assert all(frame.fillers["subject"] for frame in lexicon.all_frames)
    assert len(lexicon.nouns) + len(lexicon.verbs) + len(lexicon.adjectives) > 400


# ---- the package


def test_tables_are_read_at_first_use() -> None:
    code = (
        "from dragoman.phrasebook import generate, lexicon; print(lexicon.load_lexicon.cache_info().currsize);"
        "next(generate.generate_pairs('train', 1)); print(lexicon.load_lexicon.cache_info().currsize)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["0", "1"]


def test_digest_depends_only_on_the_files_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = Path(generate.__file__).parent
    original = generate.hash_package()
    copy = Path(shutil.copytree(package, tmp_path / "phrasebook"))
    monkeypatch.setattr(generate, "__file__", str(copy / "generate.py"))
    (tmp_path / "tokenizer.py").write_text("x = 1")
    assert generate.hash_package() == original
    digests = {original}
    for path in sorted(p for p in copy.iterdir() if p.suffix in (".py", ".tsv")):
        path.write_text(path.read_text(encoding="utf-8") + "\n", encoding="utf-8")
        digests.add(generate.hash_package())
    assert len(digests) == 1 + len([p for p in copy.iterdir() if p.is_file()])


# ---- errors of users


@pytest.mark.parametrize("generate_any", [generate_phrases, generate_pairs])
def test_wrong_arguments_raise_at_once(generate_any: object) -> None:
    assert callable(generate_any)
    with pytest.raises(UserError, match=r"no split of the phrasebook called 'trian'; did you mean 'train'\?.*unseen"):
        generate_any("trian", 3)
    with pytest.raises(UserError, match=r"no direction of the phrasebook called 'de-fr'.*en-de, de-en"):
        generate_any("train", 3, direction="de-fr")
    with pytest.raises(UserError, match=r"at least 1, not 0"):
        generate_any("train", 0)
    with pytest.raises(UserError, match=r"not 9,000,000,000,000 \(it has about 1e\+18"):
        generate_any("train", 9_000_000_000_000)


def test_an_exhausted_split_reports_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = next(plan for plan, _, _ in generate.realize_plans("train", 1, 1))
    monkeypatch.setattr(generate, "MAX_REPEATS", 20)
    monkeypatch.setattr(Grammar, "sample_plan", lambda _: plan)
    monkeypatch.setattr(Grammar, "content_hash", 0, raising=False)  # belongs to train
    with pytest.raises(UserError, match=r"'train' of the phrasebook has about 1 phrases, not 5"):
        list(generate_pairs("train", 5))


# ---- the words of a plan with the constructions in which they appear


Use = tuple[Noun | Verb | Adjective, str, str]  # word, part of speech, construction


def list_uses(plan: SentencePlan) -> Iterator[Use]:
    """Yield all words of a plan with their constructions, independently of the checks in the grammar."""
    for clause in plan.clauses:
        yield from list_clause_uses(clause)


def list_clause_uses(clause: Clause) -> Iterator[Use]:
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
            yield from list_noun_phrase_uses(phrase, "prepositional" if role == "place" else role)
    if clause.comparison:
        yield from list_noun_phrase_uses(clause.comparison, "subject")
    if clause.complement:
        yield from list_clause_uses(clause.complement)


def list_noun_phrase_uses(phrase: NounPhrase, role: str) -> Iterator[Use]:
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
        yield from list_noun_phrase_uses(phrase.possessor, "possessor")
    if phrase.postmodifier:
        yield from list_noun_phrase_uses(phrase.postmodifier, "prepositional")
    if phrase.relative:
        yield from list_clause_uses(phrase.relative)

"""The whole system: raw text in and out, the same bytes after any interruption, bad folders refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from dragoman.errors import UserError
from dragoman.smt.alignment import AlignerSettings
from dragoman.smt.casing import Truecaser
from dragoman.smt.decoder import FEATURE_NAMES
from dragoman.smt.system import PhraseSystem, SmtSettings, load_system, train_system
from dragoman.types import Pair
from toy_pairs import SOURCE, TARGET

PAIRS = [Pair(f"{s.capitalize()}.", f"{t.capitalize()}.") for s, t in zip(SOURCE, TARGET, strict=True)]
DEV = [Pair("Der kleine hund schläft.", "The small dog sleeps."), Pair("Eine katze läuft.", "A cat runs.")]
SETTINGS = SmtSettings(align=AlignerSettings(ibm1=3, hmm=2), max_phrase=3, order=3, tuning_rounds=1, n_best=5)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[PhraseSystem, Path]:
    folder = tmp_path_factory.mktemp("system")
    return train_system([*PAIRS, Pair("", "nothing")], DEV, SETTINGS, folder), folder


def read_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_raw_text_in_and_out(trained: tuple[PhraseSystem, Path]) -> None:
    [[best], [unknown], [empty]] = trained[0].translate(["Der kleine mann läuft.", "Der Zwerg schläft!", ""])
    assert best.text == "The small man runs."
    assert best.source_tokens == ["Der", "kleine", "mann", "läuft", "￭."]
    assert (2, best.tokens.index("man")) in best.links
    assert best.score == pytest.approx(sum(best.features[n] * w for n, w in weights_of(trained[0]).items()))
    assert "Zwerg" in unknown.text
    assert unknown.text.endswith("!")
    assert empty.text == ""
    rows = best.as_hypothesis().alignment
    assert [sum(row) for row in rows] == pytest.approx([1.0] * len(best.tokens))


def weights_of(trained: PhraseSystem) -> dict[str, float]:
    return dict(zip(FEATURE_NAMES, trained.decoder.weights.tolist(), strict=True))


def test_n_best_lists_have_different_texts(trained: tuple[PhraseSystem, Path]) -> None:
    [found] = trained[0].translate(["Eine kleine katze schläft."], n_best=4)
    assert len({each.text for each in found}) == len(found) == 4
    assert [each.score for each in found] == sorted((each.score for each in found), reverse=True)


class Killed(BaseException):
    """Stands for the end of the process at any moment."""


@pytest.mark.parametrize(
    "function",
    [
        "system.align_pairs",
        "system.extract_phrases",
        "system.train_language_model",
        "system.tune_decoder",
        "tuning.optimise_weights",
    ],
)
def test_stopped_anywhere_gives_the_same_bytes(
    trained: tuple[PhraseSystem, Path], function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(f"dragoman.smt.{function}", stop)
        with pytest.raises(Killed):
            train_system(PAIRS, DEV, SETTINGS, tmp_path)
    assert not (tmp_path / "weights.json").exists()
    train_system(PAIRS, DEV, SETTINGS, tmp_path)
    assert read_files(tmp_path) == read_files(trained[1])


def test_other_settings_or_broken_folders_are_refused(trained: tuple[PhraseSystem, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="other settings or data"):
        train_system(PAIRS, DEV, SmtSettings(), trained[1])
    with pytest.raises(UserError, match="not finished"):
        load_system(tmp_path)
    with pytest.raises(UserError, match="no feature 'lm'"):
        train_system(PAIRS, DEV, SmtSettings(weights={"lm": 1.0}), tmp_path)
    with pytest.raises(UserError, match="word or space, not bpe"):
        train_system(PAIRS, DEV, SETTINGS, tmp_path, tokenizer="bpe")


def test_truecasing_and_back() -> None:
    """A word gets its usual case at the beginning of a sentence, and a capital letter on the way back."""
    caser = Truecaser.train([["Der", "Hund", "￭.", "Er", "sah", "der", "Katze", "er"], ["Hund", "sah", "Er"]])
    tokens = ["Der", "Hund", "￭.", "Er", "Xyz"]
    assert caser.truecase(tokens) == ["der", "Hund", "￭.", "er", "Xyz"]
    assert caser.recase(caser.truecase(tokens)) == tokens
    lower = Truecaser.train([["der", "hund"]])
    assert lower.recase(["der", "hund"]) == ["der", "hund"]

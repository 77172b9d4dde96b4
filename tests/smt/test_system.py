"""The whole system: raw text in and out, the same bytes after any interruption, bad folders refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dragoman.data.tokenizers import Tokenizers, WordTokenizer
from dragoman.errors import UserError
from dragoman.smt.casing import Truecaser
from dragoman.smt.settings import FEATURE_NAMES, AlignerSettings, SmtSettings
from dragoman.smt.system import PhraseSystem, SystemTrainer, load_system
from toy_pairs import SOURCE, TARGET

PAIRS = [f"{line.capitalize()}." for line in SOURCE], [f"{line.capitalize()}." for line in TARGET]
DEV = ["Der kleine hund schläft.", "Eine katze läuft."], ["The small dog sleeps.", "A cat runs."]
SETTINGS = SmtSettings(align=AlignerSettings(ibm1=3, hmm=2), max_phrase=3, order=3, tuning_rounds=1, n_best=5)


def train(folder: Path, settings: SmtSettings = SETTINGS) -> None:
    SystemTrainer(folder, settings, WordTokenizer).train(PAIRS, DEV)


def load(folder: Path) -> PhraseSystem:
    return load_system(folder, SETTINGS, Tokenizers.load(folder / "tokenizer"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("system")
    train(folder)
    return folder


@pytest.fixture(scope="module")
def system(folder: Path) -> PhraseSystem:
    return load(folder)


def read_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_raw_text_in_and_out(system: PhraseSystem) -> None:
    [[best], [unknown], [empty]] = system.translate(["Der kleine mann läuft.", "Der Zwerg schläft!", ""])
    assert best.text == "The small man runs."
    assert best.source_tokens == ["▁Der", "▁kleine", "▁mann", "▁läuft", "."]
    assert (2, best.tokens.index("▁man")) in best.derivation.links
    weights = dict(zip(FEATURE_NAMES, system.decoder.weights.tolist(), strict=True))
    weighted = sum(best.features[name] * weight for name, weight in weights.items())
    assert best.derivation.score == pytest.approx(weighted, abs=1e-4)
    assert "Zwerg" in unknown.text
    assert unknown.text.endswith("!")
    assert empty.text == ""
    assert [sum(row) for row in best.alignment()] == pytest.approx([1.0] * len(best.tokens))


def test_n_best_lists_have_different_texts(system: PhraseSystem) -> None:
    [translations] = system.translate(["Eine kleine katze schläft."], n_best=4)
    assert len({translation.text for translation in translations}) == len(translations) == 4
    scores = [translation.derivation.score for translation in translations]
    assert scores == sorted(scores, reverse=True)


def test_forced_decoding_finds_the_best_translation(system: PhraseSystem) -> None:
    line = "Der kleine mann läuft."
    [[best]] = system.translate([line])
    [(tokens, forced), (_, impossible)] = system.force([(line, best.text), (line, "Something else entirely.")])
    assert tokens[0] == "▁the"  # truecased
    assert forced is not None
    assert forced.score >= best.derivation.score - 1e-6
    assert impossible is None


class Killed(BaseException):
    """Stands for the end of the process at any moment."""


@pytest.mark.parametrize(
    "function",
    [
        "system.SystemTrainer.align_pairs",
        "system.SystemTrainer.extract_phrases",
        "system.SystemTrainer.train_language_model",
        "system.SystemTrainer.tune_weights",
        "tuning.optimise_weights",
    ],
)
def test_interrupted_training_gives_the_same_bytes(
    folder: Path, function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(f"dragoman.smt.{function}", stop)
        with pytest.raises(Killed):
            train(tmp_path)
    assert not (tmp_path / "weights.json").exists()
    train(tmp_path)
    assert read_files(tmp_path) == read_files(folder)


def test_other_settings_are_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="other settings or data"):
        train(folder, SmtSettings())


@pytest.mark.parametrize("name", ["casing.json", "weights.json", "model.safetensors", "lm.arpa"])
@pytest.mark.parametrize("damage", ["missing", "cut short", "changed"])
def test_damaged_files_are_refused(folder: Path, tmp_path: Path, name: str, damage: str) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    path = tmp_path / "copy" / name
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "cut short":
        path.write_bytes(content[: len(content) // 2])
    elif name.endswith(".json"):
        path.write_text(json.dumps({"weights": {}}))
    else:
        middle = 2 * len(content) // 3
        path.write_bytes(content[:middle] + b"\xff\xff\xff\xff" + content[middle + 4 :])
    with pytest.raises(UserError, match=r"missing|damaged|cut short|not an n-gram|cannot read"):
        load(tmp_path / "copy")


def test_truecasing_and_back() -> None:
    """A word gets its usual case at the beginning of a sentence, and a capital letter on the way back."""
    caser = Truecaser.train([["Der", "Hund", "￭.", "Er", "sah", "der", "Katze", "er"], ["Hund", "sah", "Er"]])
    tokens = ["Der", "Hund", "￭.", "Er", "Xyz"]
    assert caser.truecase(tokens) == ["der", "Hund", "￭.", "er", "Xyz"]
    assert caser.recase(caser.truecase(tokens)) == tokens
    lower = Truecaser.train([["der", "hund"]])
    assert lower.recase(["der", "hund"]) == ["der", "hund"]

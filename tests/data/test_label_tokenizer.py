"""The label tokenizer: each label has one id, and an unknown label has none."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.data import tokenizers as labels_module
from dragoman.data.tokenizers import TOKENIZERS, LabelTokenizer, Tokenizers
from dragoman.errors import UserError
from toy_text import ALL

NAMES = st.lists(st.text(min_size=1).map(str.strip).filter(bool), min_size=2, max_size=9, unique=True)


@given(names=NAMES, other=st.text())
def test_labels_survive_encoding_and_decoding(names: list[str], other: str) -> None:
    found = LabelTokenizer.train(f" {name} " for name in names * 2)
    assert found.size == len(names)
    assert sorted(found.encode(name)[0] for name in names) == list(range(len(names)))
    assert all(found.decode(found.encode(name)) == name for name in names)
    assert (found.encode(other) == []) == (other.strip() not in names)
    assert found.content == LabelTokenizer.train(reversed(names)).content == LabelTokenizer(found.content).content


def test_labels_are_saved_and_loaded(tmp_path: Path) -> None:
    pair = Tokenizers(ALL["char"], LabelTokenizer.train(["no", "yes"]))
    pair.save(tmp_path)
    assert Tokenizers.load(tmp_path).fingerprint() == pair.fingerprint()
    assert LabelTokenizer not in TOKENIZERS.values()  # nobody should cut text with it


@pytest.mark.parametrize(
    ("given", "said"), [([], "no label"), (["", " "], "no label"), (["x", "x "], "only the label 'x'")]
)
def test_fewer_than_two_labels_are_refused(given: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        LabelTokenizer.train(given)


def test_too_many_labels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labels_module, "MAX_LABELS", 3)
    with pytest.raises(UserError, match="more than 3 different labels; check columns"):
        LabelTokenizer.train("abcd")

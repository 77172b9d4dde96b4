"""Labels as a tokenizer: each is one id, and an unknown one is none."""

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
def test_a_label_comes_back(names: list[str], other: str) -> None:
    found = LabelTokenizer.train(f" {name} " for name in names * 2)
    assert found.size == len(names)
    assert sorted(found.encode(name)[0] for name in names) == list(range(len(names)))
    assert all(found.decode(found.encode(name)) == name for name in names)
    assert (found.encode(other) == []) == (other.strip() not in names)
    assert found.content == LabelTokenizer.train(reversed(names)).content == LabelTokenizer(found.content).content


def test_a_run_keeps_them(tmp_path: Path) -> None:
    pair = Tokenizers(ALL["char"], LabelTokenizer.train(["no", "yes"]))
    pair.save(tmp_path)
    assert Tokenizers.load(tmp_path).fingerprint() == pair.fingerprint()
    assert LabelTokenizer not in TOKENIZERS.values()  # nobody should cut text with it


@pytest.mark.parametrize(
    ("given", "said"), [([], "no label"), (["", " "], "no label"), (["x", "x "], "only the label 'x'")]
)
def test_one_label_is_no_choice(given: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        LabelTokenizer.train(given)


def test_a_column_of_texts_is_not_one_of_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labels_module, "MAX_LABELS", 3)
    with pytest.raises(UserError, match="more than 3 different labels; check columns"):
        LabelTokenizer.train("abcd")

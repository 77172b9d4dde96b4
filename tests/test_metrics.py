"""The metrics are sacreBLEU's, to the last digit, and refuse what cannot be scored."""

from __future__ import annotations

import pytest
import sacrebleu

from dragoman.score.metrics import METRICS, evaluate
from dragoman.types import Mistake

HYPOTHESES = ["The cat sat on the mat.", "Dogs bark at the moon, loudly!", "It is raining in Berlin today."]
REFERENCE = ["The cat is sitting on the mat.", "Dogs bark loudly at the moon.", "Today it is raining in Berlin."]
SECOND = ["A cat sat on a mat.", "The dogs bark at the moon, loudly!", "It rains in Berlin today."]
DIRECT = {
    "bleu": lambda h, r: sacrebleu.corpus_bleu(h, r).score,
    "chrf": lambda h, r: sacrebleu.corpus_chrf(h, r).score,
    "ter": lambda h, r: sacrebleu.corpus_ter(h, r).score,
}
SIGNATURES = {
    "bleu": "nrefs:{n}|case:mixed|eff:no|tok:13a|smooth:exp|version:" + sacrebleu.__version__,
    "chrf": "nrefs:{n}|case:mixed|eff:yes|nc:6|nw:0|space:no|version:" + sacrebleu.__version__,
    "ter": "nrefs:{n}|case:lc|tok:tercom|norm:no|punct:yes|asian:no|version:" + sacrebleu.__version__,
}


@pytest.mark.parametrize("references", [[REFERENCE], [REFERENCE, SECOND]], ids=["one", "two"])
@pytest.mark.parametrize("name", METRICS)
def test_a_metric_equals_sacrebleu_and_carries_its_signature(name: str, references: list[list[str]]) -> None:
    score = METRICS[name](HYPOTHESES, references)
    assert score.value == DIRECT[name](HYPOTHESES, references)
    assert 0 < score.value < 100
    assert score.signature == SIGNATURES[name].format(n=len(references))
    assert score.name == name


@pytest.mark.parametrize(("name", "perfect"), [("bleu", 100), ("chrf", 100), ("ter", 0)])
def test_a_perfect_system(name: str, perfect: int) -> None:
    mixed = [REFERENCE[0], *SECOND[1:]]
    assert METRICS[name](mixed, [REFERENCE, SECOND]).value == pytest.approx(perfect)


def test_evaluate_gives_what_was_asked_for_in_that_order() -> None:
    assert [s.name for s in evaluate(HYPOTHESES, [REFERENCE])] == ["bleu", "chrf", "ter"]
    assert evaluate(HYPOTHESES, [REFERENCE], ["ter", "bleu"]) == [
        METRICS["ter"](HYPOTHESES, [REFERENCE]),
        METRICS["bleu"](HYPOTHESES, [REFERENCE]),
    ]
    with pytest.raises(Mistake, match="no metric called 'blue'; did you mean 'bleu'"):
        evaluate(HYPOTHESES, [REFERENCE], ["blue"])


@pytest.mark.parametrize("name", METRICS)
def test_lines_must_belong_together(name: str) -> None:
    with pytest.raises(Mistake, match="reference 2 of 2 has 1 line, but there are 3 hypotheses"):
        METRICS[name](HYPOTHESES, [REFERENCE, SECOND[:1]])
    with pytest.raises(Mistake, match="reference 1 of 1 has 4 lines, but there are 3 hypotheses"):
        METRICS[name](HYPOTHESES, [[*REFERENCE, "One more."]])
    with pytest.raises(Mistake, match="list of lists"):
        METRICS[name](HYPOTHESES, REFERENCE)
    with pytest.raises(Mistake, match="no hypotheses"):
        METRICS[name]([], [[]])
    with pytest.raises(Mistake, match="no reference"):
        METRICS[name](HYPOTHESES, [])


@pytest.mark.parametrize("line", ["▁The ▁cat ▁s at ▁on ▁the ▁mat .", "The c@@ at sat on the mat .", "▁The▁cat▁sat▁."])
@pytest.mark.parametrize("name", METRICS)
def test_subword_text_is_refused(name: str, line: str) -> None:
    with pytest.raises(Mistake, match="detokenise"):
        METRICS[name]([line], [[line]])


def test_plain_text_that_mentions_a_mark_is_scored() -> None:
    about = (
        "In subword text a mark such as ▁ or the older @@ says where one word ends and where the next begins, no more."
    )
    lines = [about, *["A line like all others stands here, and it says so."] * 5]
    assert evaluate(lines, [lines], ["bleu"])[0].value == pytest.approx(100)


def test_empty_lines_are_scored_as_such() -> None:
    bleu, ter = evaluate(["", ""], [REFERENCE[:2]], ["bleu", "ter"])
    assert (bleu.value, ter.value) == (0, 100)

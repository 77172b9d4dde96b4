"""Tests of alignment error rate and of the Pharaoh format."""

from __future__ import annotations

import pytest

from dragoman.errors import UserError
from dragoman.metrics.alignment import check_links, format_links, parse_links, score_alignments


def test_scores_of_a_small_example() -> None:
    """Of four predicted links, three are possible and two of these sure. There are three sure gold links."""
    gold = [parse_links("0-0 1-1 2?2", "gold"), parse_links("0-1", "gold")]
    score = score_alignments([[(0, 0), (1, 1), (2, 2)], [(0, 0)]], gold)
    assert score.precision == pytest.approx(75.0)
    assert score.recall == pytest.approx(100 * 2 / 3)
    assert score.aer == pytest.approx(100 * (1 - (2 + 3) / (4 + 3)))
    assert score.links == 4


def test_perfect_and_empty_alignments() -> None:
    gold = [parse_links("0-0 1?1", "gold")]
    assert score_alignments([[(0, 0)]], gold).aer == 0.0
    assert score_alignments([[]], gold).aer == 100.0
    assert score_alignments([], []).aer == 0.0


def test_pharaoh_format() -> None:
    gold = parse_links("0-0 1?2 3p1", "gold.txt, line 1")
    assert gold.sure == {(0, 0)}
    assert gold.possible == {(0, 0), (1, 2), (3, 1)}
    assert format_links([(0, 0), (1, 2)]) == "0-0 1-2"
    with pytest.raises(UserError, match=r"gold.txt, line 2: '1:2' is not a link"):
        parse_links("0-0 1:2", "gold.txt, line 2")


def test_links_out_of_range_are_refused() -> None:
    with pytest.raises(UserError, match=r"line 3: the link 2-0 is out of range; the source has 2 words"):
        check_links({(0, 0), (2, 0)}, ["a", "b"], ["c"], "gold, line 3")
    with pytest.raises(UserError, match=r"the link 1-1 .*the target has 1 words"):
        check_links({(1, 1)}, ["a", "b"], ["c"], "gold, line 3")

"""auto: a race when there is enough to translate, once; the fastest engine that answers nearly the same wins."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from dragoman.config import SearchSettings
from dragoman.engines import choose
from dragoman.engines.base import Engine, Job
from dragoman.engines.choose import ENOUGH, FULL, AutoEngine, Parts, Verdict, race, remembered, spread
from dragoman.engines.ctranslate2 import CTranslate2Engine
from dragoman.engines.torch_engine import TorchEngine
from dragoman.ensemble import Together
from dragoman.search.request import Wish
from dragoman.search.step import Found
from dragoman.types import UserError
from toy_exchange import letters, model_of, some_jobs
from toy_models import Section

SEARCH = SearchSettings(beam=2)


class Track:
    """A clock that stands still but for the engines that run."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now


class Runner(Engine):
    """An engine that takes its time and always says the same."""

    def __init__(self, track: Track, seconds: float, tokens: list[int]) -> None:
        self.track, self.seconds, self.tokens = track, seconds, tokens

    def search(self, jobs: Sequence[Job], search: SearchSettings) -> list[list[Found]]:
        if search.stop != "enough":
            raise UserError("not with me")
        self.track.now += self.seconds
        return [[Found(self.tokens, -1.0, -1.0, True)] for _ in jobs]


def parts(cache: Path, section: Section | None = None) -> Parts:
    return Parts(model_of(section or {}), letters(), torch.device("cpu"), cache)


def test_the_fastest_that_says_nearly_the_same_wins() -> None:
    track, right, odd = Track(), [5] * 40, [5] * 39 + [6]
    runs = {FULL: (6.0, right), "near": (2.0, odd), "far": (1.0, [6] * 40), "slow": (9.0, right)}
    engines: dict[str, Engine] = {name: Runner(track, *run) for name, run in runs.items()}
    verdict = race(engines, some_jobs(8), SEARCH, track.clock)
    assert verdict == Verdict(
        "near",
        {name: seconds for name, (seconds, _) in runs.items()},
        {FULL: 1.0, "near": 39 / 40, "far": 0.0, "slow": 1.0},
    )
    assert str(verdict) == (
        "engine: near, 3.0 times as fast; 97.5% of its tokens are those of full precision (--engine torch gives all)"
    )


@pytest.mark.parametrize(("seconds", "winner"), [(1.0, "other"), (5.5, FULL), (9.0, FULL)])
@pytest.mark.parametrize("tokens", [[], [5, 6]])
def test_full_precision_is_not_given_up_for_little(seconds: float, winner: str, tokens: list[int]) -> None:
    """Nor is there a race that nobody wins: answers without a token are alike."""
    track = Track()
    engines: dict[str, Engine] = {FULL: Runner(track, 6.0, tokens), "other": Runner(track, seconds, tokens)}
    assert race(engines, some_jobs(8), SEARCH, track.clock).winner == winner


@pytest.mark.parametrize(
    ("seconds", "alike", "why"),
    [
        ({"a": 7.0, "b": 6.0}, {"a": 1.0, "b": 0.5}, ", the fastest here"),
        ({"a": 5.5, "b": 9.0}, {"a": 1.0, "b": 1.0}, " (a is faster, but not 1.2 times as fast, which is asked for)"),
        ({"a": 5.1, "b": 5.9}, {"a": 0.5, "b": 1.0}, " (a is faster, but not 1.2 times as fast, which is asked for)"),
        (
            {"a": 5.5, "b": 3.5},
            {"a": 1.0, "b": 0.91},
            " (b is 1.7 times as fast, but only 91% of its tokens are the same; 95% are asked for)",
        ),
        (
            {"a": 4.0, "b": 3.0},
            {"a": 0.9, "b": 0.9499},
            " (b is 2.0 times as fast, but only 94% of its tokens are the same; 95% are asked for)",
        ),
    ],
)
def test_why_full_precision_won_is_said(seconds: dict[str, float], alike: dict[str, float], why: str) -> None:
    """It is the fastest, or else the fastest was not so by enough, or said too much that is not the same."""
    assert str(Verdict(FULL, {FULL: 6.0, **seconds}, {FULL: 1.0, **alike})) == f"engine: {FULL}{why}"


def test_who_cannot_do_what_is_asked_does_not_take_part(tmp_path: Path) -> None:
    engines: dict[str, Engine] = {FULL: choose.by_torch(parts(tmp_path))(), "other": Runner(Track(), 0.0, [5])}
    verdict = race(engines, some_jobs(8), SearchSettings(beam=2, stop="best"))
    assert verdict.winner == FULL
    assert str(verdict) == f"engine: {FULL}, the fastest here"


def test_few_sentences_pay_for_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    auto = AutoEngine(parts(tmp_path), said.append)
    jobs = some_jobs(ENOUGH - 1)
    assert len(auto.search(jobs, SEARCH)) == len(jobs)
    assert set(auto.opened) == {FULL}
    assert not said
    assert not list(tmp_path.iterdir())


def test_a_race_is_run_once_and_remembered(tmp_path: Path) -> None:
    said: list[str] = []
    given, jobs = parts(tmp_path), some_jobs(2 * ENOUGH)
    first = AutoEngine(given, said.append)
    answers = first.search(jobs, SEARCH)
    assert answers == first.search(jobs, SEARCH)
    assert len(said) == 2
    assert said[0].startswith("trying engines on ")
    (path,) = tmp_path.glob("engine-*.json")
    verdict = Verdict(**json.loads(path.read_text()))
    assert said[1] == str(verdict)
    assert set(verdict.seconds) == set(first.runners) >= {FULL, "ctranslate2", "ctranslate2-int8"}
    second = AutoEngine(given, said.append)
    assert second.search(jobs[:3], SEARCH)
    assert said[2:] == [str(verdict)]
    assert set(second.opened) == {verdict.winner}


def remember_winner(auto: AutoEngine, winner: str) -> None:
    kept = Verdict(winner, {FULL: 1.0, "ctranslate2": 1.0}, {FULL: 1.0, "ctranslate2": 1.0})
    (auto.parts.cache / f"engine-{auto.model_key}-beam-2.json").write_text(json.dumps(kept._asdict()))


@pytest.mark.parametrize("winner", ["torch", "ctranslate2"])
def test_what_is_remembered_is_followed_where_it_can_be(tmp_path: Path, winner: str) -> None:
    """Job by job: a sentence with a wish does not decide who answers its neighbours."""
    auto = AutoEngine(parts(tmp_path), lambda _: None)
    remember_winner(auto, winner)
    kind = {"torch": TorchEngine, "ctranslate2": CTranslate2Engine}[winner]
    jobs = [*some_jobs(2), Job([4], 5, wish=Wish(prefix=(5,))), *some_jobs(2)]
    assert [type(engine) for engine in auto.engines_for(jobs, SEARCH)] == [kind, kind, TorchEngine, kind, kind]
    tokens = [answers[0].tokens for answers in auto.search(jobs, SEARCH)]
    assert tokens == [auto.search([job], SEARCH)[0][0].tokens for job in jobs]
    assert tokens[2][0] == 5


@pytest.mark.parametrize("asked", ["setting", "wish"])
def test_a_race_without_ctranslate2_does_not_speak_for_one_with_it(tmp_path: Path, asked: str) -> None:
    auto = AutoEngine(parts(tmp_path), lambda _: None)
    wish = Wish(prefix=(5,)) if asked == "wish" else Wish()
    auto.search([job._replace(wish=wish) for job in some_jobs(2 * ENOUGH)], SearchSettings(beam=2, no_repeat=3))
    if asked == "wish":
        auto.search([job._replace(wish=wish) for job in some_jobs(2 * ENOUGH)], SEARCH)
    verdict = auto.verdict(some_jobs(2 * ENOUGH), SEARCH)
    assert verdict
    assert "ctranslate2" in verdict.seconds


def test_a_winner_whose_model_is_spoilt_leaves_it_to_pytorch(tmp_path: Path) -> None:
    """Asked for by name, it says what to do."""
    choose.engine_of("ctranslate2", parts(tmp_path), print)
    (spoilt,) = tmp_path.glob("ctranslate2-*/model.bin")
    spoilt.write_bytes(spoilt.read_bytes()[:1000])
    auto = AutoEngine(parts(tmp_path), lambda _: None)
    remember_winner(auto, "ctranslate2")
    assert len(auto.search(some_jobs(3), SEARCH)) == 3
    assert set(auto.opened) == {FULL}
    with pytest.raises(UserError, match="remove it, and it is made anew, or use --engine torch"):
        choose.engine_of("ctranslate2", parts(tmp_path), print)


@pytest.mark.parametrize("lack", ["model", "cache"])
def test_what_ctranslate2_cannot_do_goes_to_pytorch_without_a_word(tmp_path: Path, lack: str) -> None:
    """A model that it does not hold, and a cache that cannot hold its model."""
    said: list[str] = []
    (tmp_path / "file").touch()
    cache, section = (tmp_path / "file", {}) if lack == "cache" else (tmp_path, {"norm": "scale"})
    auto = AutoEngine(parts(cache, section), said.append)
    assert len(auto.search(some_jobs(2 * ENOUGH), SEARCH)) == 2 * ENOUGH
    assert not [name for name in auto.opened if "ctranslate2" in name]
    assert not [line for line in said if "ctranslate2" in line]


def test_asked_for_by_name(tmp_path: Path) -> None:
    for name, kind in {"auto": AutoEngine, "torch": TorchEngine, "ctranslate2": CTranslate2Engine}.items():
        assert type(choose.engine_of(name, parts(tmp_path), print)) is kind
    with pytest.raises(UserError, match="there is no engine called 'torhc'; did you mean 'torch'"):
        choose.engine_of("torhc", parts(tmp_path), print)
    with pytest.raises(UserError, match="norm=scale cannot be exported to CTranslate2"):
        choose.engine_of("ctranslate2", parts(tmp_path, {"norm": "scale"}), print)
    several = parts(tmp_path)._replace(model=Together([model_of({}), model_of({})]))
    with pytest.raises(UserError, match="what several runs say as one cannot be exported to CTranslate2"):
        choose.engine_of("ctranslate2", several, print)


DAMAGED = ["", "{", "[]", "{}", '{"winner": "x", "seconds": {}, "alike": {}}', '{"winner": 1}']
DAMAGED += [
    f'{{"winner": "torch", "seconds": {{"torch": 1, "torch-int8": {time}}}, "alike": {{"torch": 1, "torch-int8": 1}}}}'
    for time in (0, '"x"', "null")
]
DAMAGED += [
    f'{{"winner": "torch", "seconds": {{"torch": 1, "torch-int8": 1}}, "alike": {{"torch": 1{share}}}}}'
    for share in ("", ', "torch-int8": "x"', ', "torch-int8": null', ', "torch-int8": -1')
]


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_memory_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "verdict").write_text(text)
    assert remembered(tmp_path / "verdict") is None
    assert remembered(tmp_path / "none") is None


def test_the_sample_is_as_long_and_short_as_all() -> None:
    jobs = [Job([4] * (1 + number), 9) for number in range(300)]
    lengths = [len(job.ids) for job in spread(jobs)]
    assert len(set(lengths)) == len(lengths) == choose.SAMPLE
    assert min(lengths) < 10 < 290 < max(lengths)


def test_another_model_has_another_key(tmp_path: Path) -> None:
    one, other = AutoEngine(parts(tmp_path), print), AutoEngine(parts(tmp_path), print)
    assert one.model_key == other.model_key
    third = AutoEngine(parts(tmp_path), print)
    with torch.no_grad():
        next(third.parts.model.parameters()).view(-1)[0] += 1
    assert third.model_key != one.model_key

"""The functions of the public API that are more than a name: `dragoman.train`, `dragoman.evaluate`, `dragoman.score`.

PyTorch is imported when one is called, so that `import dragoman` is quick.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dragoman.types import PairScore, Score, UserError

if TYPE_CHECKING:
    from dragoman.config import Recipe
    from dragoman.text.tokenizer import Tokenizers
    from dragoman.train.report import Report


def train(
    recipe: str | Path | Recipe,
    *,
    out: str | Path,
    overrides: Sequence[str] = (),
    resume: bool = False,
    init_from: str | Path | None = None,
    tokenizers: Tokenizers | None = None,
    report: Report | None = None,
) -> Path:
    """Train a recipe into the run folder `out`, and return that folder.

    `overrides` are settings such as "train.steps=1000", laid over the recipe. `resume` goes on with the run in `out`;
    `init_from` begins with the weights of another run. Tokenizers are learned, unless they are given.

        run = dragoman.train("recipe.yaml", out="runs/mine", overrides=["train.steps=30"])
        translator = dragoman.load(run)
        print(translator.translate(["A man walks his dog."])[0].text)
    """
    from dragoman.train.trainer import train as run_training

    return run_training(
        recipe,
        out=out,
        overrides=overrides,
        resume=resume,
        init_from=init_from,
        tokenizers=tokenizers,
        report=report,
    )


def evaluate(
    run: str | Path | Sequence[str | Path],
    *,
    sources: Sequence[str],
    references: Sequence[str] | Sequence[Sequence[str]],
    metrics: Sequence[str] = (),
    beam: int | None = None,
    tag: str = "",
    device: str = "auto",
) -> list[Score]:
    """Return scores of what a run outputs for sources: BLEU, chrF and TER, or the run's own metrics, or those named.

    `references` are one list of lines, or several lists where each source has several references.

        scores = dragoman.evaluate("runs/mine", sources=["A man walks."], references=["Ein Mann geht."])
        for score in scores:
            print(score)
    """
    from dragoman.door import check_texts
    from dragoman.evaluation.predictions import predict_lines
    from dragoman.generator import Generator
    from dragoman.loading import load
    from dragoman.score.metrics import of_answers
    from dragoman.translator import Translator

    sources = check_texts(sources, "evaluate", "source")
    given = [] if isinstance(references, str) else list(references)
    if not given:
        raise UserError("evaluate takes references=[...], a list of lines, or of such lists; put a line into a list")
    predictor = load(run, device=device)
    if isinstance(predictor, Generator):
        raise UserError("a language model outputs nothing to score; use dragoman.load(run).measure(lines).perplexity")
    if tag and not isinstance(predictor, Translator):
        raise UserError(f"tag={tag!r} is for runs that translate; leave it out")
    single = isinstance(given[0], str)
    lists = [check_texts(each, "evaluate", "reference") for each in ([given] if single else given)]  # type: ignore[arg-type]
    for each in lists:
        if len(each) != len(sources):
            raise UserError(f"there are {len(sources)} sources but {len(each)} references; give one for each source")
    output = predict_lines(predictor, sources, lists, metrics=metrics, beam=beam, tag=tag)
    return of_answers(output.texts, output.references, output.metrics)


def score(
    run: str | Path | Sequence[str | Path],
    *,
    sources: Sequence[str],
    targets: Sequence[str],
    tag: str = "",
    device: str = "auto",
) -> list[PairScore]:
    """Return the log-probability that a run gives each target as the translation of its source.

    scores = dragoman.score("runs/mine", sources=["A man walks."], targets=["Ein Mann geht."])
    for score in scores:
        print(score.logp, score.tokens, score.token_logps)
    """
    from dragoman.loading import load_as
    from dragoman.translator import Translator

    return load_as(Translator, run, device=device).score(sources, targets, tag=tag)

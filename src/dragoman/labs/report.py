"""The results of experiments as text for the terminal, as HTML pages and as Markdown pages of the documentation."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from dragoman.evaluation.figures import render_chart
from dragoman.inspection.page import load_page_template
from dragoman.io import format_json, write_text
from dragoman.labs.experiment import CONFIRMED, Check, CheckResult, Experiment
from dragoman.labs.registry import EXPERIMENTS, GROUPS
from dragoman.labs.runner import LabResult, read_results

TEMPLATES = "dragoman.labs"
FIGURE_WIDTH = 760  # pixels
# Documents of the lectures -> pages of the course in the documentation
COURSE = {"000": "from-seq2seq", "001": "week-4", "002": "cs224n", "003": "lecture-9", "004": "transformers-1"}


def format_measurement(value: float) -> str:
    """Return a number with four significant digits, and thousands separated by commas."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def format_values(result: CheckResult) -> str:
    """Return the measured value of a check: its mean and, for several seeds, the confidence interval."""
    if len(result.values) == 1:
        return format_measurement(result.mean)
    return f"{format_measurement(result.mean)} ({format_measurement(result.low)} to {format_measurement(result.high)})"


def format_threshold(check: Check) -> str:
    threshold = check.at_least if check.at_least is not None else check.at_most
    assert threshold is not None
    return f"{'at least' if check.at_least is not None else 'at most'} {format_measurement(threshold)}"


def format_verdict(result: CheckResult) -> str:
    return result.verdict + " (control)" * result.check.control + " (aside)" * result.check.aside


def describe_trials(result: LabResult) -> str:
    """Return how the result was obtained: seeds, size, machine and time."""
    seeds = len(result.seeds)
    size = "quick version" if result.quick else "full version"
    return f"{size}, {seeds} seed{'s' * (seeds != 1)}, {result.machine}, {result.seconds:,.0f} s"


def list_machines(result: LabResult) -> Iterator[str]:
    """Yield which conditions were measured on which machine, if not all were measured on the same one."""
    for machine in sorted({machine for by_seed in result.machines.values() for machine in by_seed.values()}):
        names = [name for name, by_seed in result.machines.items() if machine in by_seed.values()]
        yield f"On {machine}: {'; '.join(names)}"


def explain_verdict(result: LabResult) -> str:
    """Return the verdict of an experiment, and that a control failed if one did."""
    failed = any(checked.check.control and checked.verdict != CONFIRMED for checked in result.checks)
    return result.verdict + ", because a control failed: the other checks decide nothing" * failed


def format_question(experiment: Experiment) -> str:
    """Return what readers should know before an experiment runs: its claim, its method, and what to predict."""
    lines = [f"{experiment.title}  ({experiment.name})", f"  claim: {experiment.claim} ({experiment.lecture})"]
    return "\n".join([*lines, f"  measured: {experiment.method}", f"  predict: {experiment.predict}"])


def format_result(result: LabResult) -> str:
    """Return checks and verdict of a result as text."""
    lines = [
        f"  - {checked.check.text}: {format_values(checked)}, threshold: {format_threshold(checked.check)}; "
        f"{format_verdict(checked)}"
        for checked in result.checks
    ]
    return "\n".join([*lines, f"  verdict: {explain_verdict(result)}  [{describe_trials(result)}]"])


def list_experiments() -> Iterator[str]:
    """Yield the lines of the list of experiments: groups, and name and question of each experiment."""
    width = max(map(len, EXPERIMENTS))
    for title, group in GROUPS.items():
        yield f"\n{title}"
        for name, experiment in group.items():
            yield f"  {name:{width}}  {experiment.title}{' (law)' * experiment.law}"


def render_result(result: LabResult) -> str:
    """Return the page of an experiment and its result."""
    figures = [(f.caption, render_chart(f.chart, width=FIGURE_WIDTH)) for f in result.experiment.plot(result.table)]
    rows = [(c.check.text, format_threshold(c.check), format_values(c), format_verdict(c)) for c in result.checks]
    return load_page_template("lab.html", TEMPLATES).render(
        title=result.experiment.title,
        experiment=result.experiment,
        result=result,
        run="; ".join([describe_trials(result), *list_machines(result)]),
        verdict=explain_verdict(result),
        figures=figures,
        rows=rows,
    )


def write_site(results: Sequence[LabResult], folder: Path) -> None:
    """Write a page and a JSON file for each result, and index.html with their verdicts and those already there."""
    folder.mkdir(parents=True, exist_ok=True)
    by_name = read_results(folder) | {result.experiment.name: result for result in results}
    for result in results:
        name = result.experiment.name
        write_text(folder / f"{name}.json", format_json(result.to_json()) + "\n")
        write_text(folder / f"{name}.html", render_result(result))
    groups = {
        title: [by_name[name] for name in group if name in by_name]
        for title, group in GROUPS.items()
        if any(name in by_name for name in group)
    }
    page = load_page_template("labs.html", TEMPLATES).render(
        title="Experiments", groups=groups, describe=describe_trials
    )
    write_text(folder / "index.html", page)


def render_markdown(experiment: Experiment, result: LabResult | None) -> Iterator[str]:
    """Yield the lines of an experiment's page in the documentation: read, predict, run, compare."""
    yield f"# {experiment.title}\n"
    lecture = re.sub(
        r"\b00[0-4]\b", lambda number: f"[{number[0]}](../course/{COURSE[number[0]]}.md)", experiment.lecture
    )
    yield f"**Read.** {experiment.claim}\n\n*Source: {lecture}.*\n"
    source = experiment.measure.__module__.replace(".", "/") + ".py"
    yield f"**How it is tested.** {experiment.method} The code is [{source}](../../src/{source}).\n"
    yield "The thresholds were fixed before the experiment ran, unless the last paragraph says otherwise:\n"
    for check in experiment.checks:
        yield f"- {'control: ' * check.control}{'aside: ' * check.aside}{check.text}: {format_threshold(check)}"
    yield f"\n**Predict.** {experiment.predict}\n"
    yield f"**Run.**\n\n```bash\ndragoman lab {experiment.name} --quick\n```\n"
    if result is None:
        yield "**Compare.** There is no full run of this experiment yet."
        return
    yield f"**Compare.** [Verdict](index.md) of the full version: **{explain_verdict(result)}**.\n"
    yield "| | check | threshold | measured (95 % interval) | verdict |\n|---|---|---|---|---|"
    for number, row in enumerate(result.checks, 1):
        cells = (row.check.text, format_threshold(row.check), format_values(row), format_verdict(row))
        yield f'| <span id="check-{number}">{number}</span> | {" | ".join(cells)} |'
    for number, (caption, chart) in enumerate(experiment.plot(result.table), 1):
        name = "figure" if number == 1 else f"figure-{number}"
        svg = render_chart(chart, width=FIGURE_WIDTH)
        yield f'\n<figure id="{name}">\n{svg}\n<figcaption>{caption}</figcaption>\n</figure>'
    yield f"\n{experiment.conclusion}\n\n*{describe_trials(result)}.*"
    for line in list_machines(result):
        yield f"\n*{line}.*"
    yield "\nTerms such as BLEU and nats are explained [in the course](../course/index.md#terms-of-the-field)."


def render_markdown_index(results: Mapping[str, LabResult]) -> Iterator[str]:
    """Yield the lines of the documentation's list of experiments, with the verdicts of their full versions."""
    yield "# Experiments\n"
    yield "Most claims of the lectures that can be measured are experiments; the [course](../course/index.md) marks the"
    yield "others. `dragoman lab` lists the experiments, and `dragoman lab NAME --quick` runs one in about 15 seconds."
    yield "Each page states the claim, and asks for a prediction before it shows the result. A law follows from the"
    yield "formulas; other claims are tendencies. The course explains [terms](../course/index.md#terms-of-the-field).\n"
    yield "A check compares the mean over seeds, with its 95 % confidence interval, with a threshold that was fixed"
    yield "before. It is *confirmed* if the whole interval is on the right side, *not confirmed* if all of it is on the"
    yield "wrong side, and it *depends* if the threshold is inside: more seeds would tell. The mean and the interval of"
    yield "a ratio are computed on a logarithmic scale. A *control* shows that the experiment can tell at all; an"
    yield "*aside* is a question of its own, about which the claim says nothing.\n"
    yield "A claim is confirmed if all of its checks are, and not confirmed if all of them are *not confirmed*."
    yield "Otherwise, or if a control fails, it depends: its page says which check differs.\n"
    for title, group in GROUPS.items():
        yield f"## {title}\n\n| experiment | question | verdict |\n|---|---|---|"
        for name, experiment in group.items():
            verdict = results[name].verdict if name in results else "not run yet"
            yield f"| [{name}]({name}.md) | {experiment.title} | {verdict}{' (law)' * experiment.law} |"
        yield ""

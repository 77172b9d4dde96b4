"""The command `lab`: run experiments that test the claims of the lectures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from dragoman.cli import options as opt
from dragoman.config.settings import get_entry
from dragoman.errors import UserError
from dragoman.progress import log


def lab_command(
    names: Annotated[list[str] | None, Argument(metavar="[NAME ...]", help="experiments; none: list them")] = None,
    quick: Annotated[bool, Option("--quick", help="a small version: one seed and about 15 seconds on a CPU")] = False,
    run_all: Annotated[bool, Option("--all", help="run all experiments")] = False,
    out_folder: Annotated[Path, Option("-o", "--out", help="folder for measurements and models")] = Path("runs/labs"),
    report: Annotated[
        Path | None, Option(help="folder for the pages, added to those already there; default: OUT/quick or OUT/full")
    ] = None,
    seeds: Annotated[int, Option(min=0, help="trials per condition; 0: 1 if quick, else 3 or more")] = 0,
    jobs: Annotated[int, Option(min=1, help="trials in parallel")] = 1,
    device: opt.Device = "auto",
    as_json: opt.Json = False,
) -> None:
    """Test claims of the lectures by experiments, each with a figure and a verdict.

    Thresholds are fixed before an experiment runs. Finished trials are kept, so the same command resumes.
    """
    if run_all and names:
        raise UserError("--all runs all experiments; give no names with it, or leave it out")
    if not run_all and not names and (quick or report or seeds or jobs > 1 or as_json or device != "auto"):
        raise UserError("no experiment is named; name some, or run all of them with --all")
    from dragoman.hardware import choose_device
    from dragoman.labs.registry import EXPERIMENTS
    from dragoman.labs.report import format_question, format_result, list_experiments, write_site
    from dragoman.labs.runner import TrialsFailed, read_results, run_experiments

    for name in names or []:
        get_entry(EXPERIMENTS, name, "experiment")
    chosen = list(dict.fromkeys(names or (EXPERIMENTS if run_all else ())))
    if not chosen:
        print("\n".join(list_experiments()).strip())
        return
    device_name = "cpu" if quick and device == "auto" else str(choose_device(device))
    if names and not as_json:  # the questions of all experiments would be too long a text before the run
        print("\n\n".join(format_question(EXPERIMENTS[name]) for name in chosen) + "\n", flush=True)
    folder = report or out_folder / ("quick" if quick else "full")
    read_results(folder)  # a file that cannot be read is reported before hours of measurements
    failure = None
    try:
        results = run_experiments(chosen, out=out_folder, quick=quick, seeds=seeds, jobs=jobs, device=device_name)
    except TrialsFailed as error:
        failure, results = error, error.results
    write_site(results, folder)
    for result in results:
        if as_json:
            print(json.dumps(result.to_json(), ensure_ascii=False))
            continue
        heading = f"{result.experiment.title}  ({result.experiment.name})\n" if len(results) > 1 else ""
        print(f"{heading}{format_result(result)}\n")
    log(f"figures are in {folder / 'index.html'}")
    if failure:
        raise failure

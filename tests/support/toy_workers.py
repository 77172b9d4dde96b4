"""Several trainings, one after the other, in every process that torchrun starts: `toy_workers.py JOBS.json`.

To start processes takes longer than to train a toy, so tests share a start where they can. A job is the arguments of
`train`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dragoman.process_group import join_process_group
from dragoman.progress import Report
from dragoman.training.trainer import train

if __name__ == "__main__":
    with join_process_group():
        for job in json.loads(Path(sys.argv[1]).read_text()):
            train(job.pop("recipe"), report=Report(quiet=True), **job)

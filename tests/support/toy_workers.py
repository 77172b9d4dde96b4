"""A script for torchrun that trains several runs one after the other: `toy_workers.py JOBS.json`.

Starting processes takes longer than training a toy model, so tests share processes where they can. A job has the
arguments of `train`.
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

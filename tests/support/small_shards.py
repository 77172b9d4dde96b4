"""The command line with shards of a few lines: what takes millions of lines otherwise happens with fifty."""

from __future__ import annotations

from dragoman.augmentation import jobs as shards
from dragoman.cli import main as cli

if __name__ == "__main__":
    shards.SHARD_SIZE = 4
    cli.main()

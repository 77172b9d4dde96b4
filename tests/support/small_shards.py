"""The command line with shards of four lines, so that fifty lines of input make many shards."""

from __future__ import annotations

from dragoman.augmentation import jobs as shards
from dragoman.cli import main as cli

if __name__ == "__main__":
    shards.SHARD_SIZE = 4
    cli.main()

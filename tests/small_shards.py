"""The command line with shards of a few lines: what takes millions of lines otherwise happens with fifty."""

from __future__ import annotations

from dragoman import cli, shards

if __name__ == "__main__":
    shards.SHARD = 4
    cli.main()

"""The commands `keys`: API keys for `dragoman serve`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from dragoman.cli import options as opt
from dragoman.serving.keys import add_key, read_keys, remove_key

KeysFileOption = Annotated[Path, Option("--keys-file", help="file of API keys")]

keys = opt.CommandGroup(help="Make, list and remove API keys for `dragoman serve --keys-file`.")


@keys.command("add")
def add_command(
    name: Annotated[str, Argument(help="name of the key, for logs and metrics")],
    keys_file: KeysFileOption = Path("keys.json"),
    admin: Annotated[bool, Option("--admin", help="the key may load and remove models")] = False,
    requests_per_minute: Annotated[int, Option(min=0, help="limit of requests; 0: none")] = 0,
    characters_per_month: Annotated[int, Option(min=0, help="limit of characters per calendar month; 0: none")] = 0,
) -> None:
    """Make a key and print it. The file has only its hash, so the key cannot be shown again."""
    key = add_key(
        keys_file,
        name,
        rights=("admin",) if admin else (),
        requests_per_minute=requests_per_minute,
        characters_per_month=characters_per_month,
    )
    print(key)


@keys.command("list")
def list_command(keys_file: KeysFileOption = Path("keys.json"), as_json: opt.Json = False) -> None:
    """List the keys of a file with their limits."""
    for key in read_keys(keys_file):
        record = key.model_dump(mode="json", exclude={"salt", "digest", "id"})
        if as_json:
            print(json.dumps(record, ensure_ascii=False))
        else:
            limits = [
                f"{value:,} {name.replace('_', ' ')}" for name, value in record.items() if "_per_" in name and value
            ]
            print(f"{key.name}  {key.created}  {', '.join([*key.rights, *limits]) or 'no limits'}")


@keys.command("remove")
def remove_command(
    name: Annotated[str, Argument(help="name of the key")], keys_file: KeysFileOption = Path("keys.json")
) -> None:
    """Remove a key; running servers refuse it after a few seconds."""
    remove_key(keys_file, name)

"""The command `serve`: run folders as a web service."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import asdict, field, make_dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic.fields import FieldInfo
from typer import Argument, Option

from dragoman import errors
from dragoman.cli import options as opt
from dragoman.config.settings import parse_settings, parse_yaml, read_text
from dragoman.errors import Stop, UserError
from dragoman.serving.settings import ServerSettings


def make_option(name: str, info: FieldInfo) -> tuple[str, Any, Any]:
    """Return a setting of the server as the field of a dataclass that becomes an option of the command."""
    flag = "--" + name.replace("_", "-")
    default = info.default
    kind: Any = list[str] if isinstance(default, tuple) else Path if default is None else type(default)
    shown = "none" if default in (None, ()) else str(default).lower() if isinstance(default, bool) else str(default)
    flags = (f"{flag}/--no-{flag[2:]}",) if isinstance(default, bool) else (flag,)
    limits = {key: getattr(limit, key) for limit in info.metadata for key in ("ge", "le") if hasattr(limit, key)}
    bounds = {"min": limits.get("ge"), "max": limits.get("le")} if kind in (int, float) else {}
    option: Any = Option(*flags, help=info.description, show_default=shown, **bounds)  # type: ignore[arg-type]
    return name, Annotated[kind | None, option], field(default=None)


# All settings of the server, each as an option. None: not given.
ServeOptions: Any = make_dataclass(
    "ServeOptions",
    [make_option(name, info) for name, info in ServerSettings.model_fields.items()],
    frozen=True,
)


def serve_command(
    runs: Annotated[list[str], Argument(metavar="RUN|NAME=RUN ...", help="run folders; NAME names a model")],
    settings_file: Annotated[
        Path | None, Option("--settings", help="YAML file of these options (port: 8000); the command line overrides it")
    ] = None,
    *,
    options: ServeOptions,
) -> None:
    """Serve models to browsers and programs: a web page, our own API, and the protocols of LibreTranslate and DeepL."""
    settings = read_server_settings(settings_file, asdict(options))
    opt.check_arguments(engine=settings.engine, runs=[find_run(run) for run in runs])
    try:
        from dragoman.serving.server import run_server
    except ModuleNotFoundError as error:
        raise UserError(f"serving needs {error.name}; pip install 'dragoman[serve]' installs it") from None
    server = run_server(runs, settings, announce=lambda text: print(text, flush=True))
    if server.signal == signal.SIGINT:
        code = errors.INTERRUPTED
    else:
        code = errors.TERMINATED if server.cancelled_requests else 0
    if server.cancelled_requests or server.force_exit:  # threads may still work for requests that nobody waits for
        sys.stdout.flush()
        os._exit(code)
    if code:
        raise Stop("stopped", code)


def find_run(argument: str) -> str:
    """Return the folder of an argument, which may be NAME=FOLDER."""
    return argument if Path(argument).exists() else argument.partition("=")[2] or argument


def read_server_settings(path: Path | None, options: dict[str, Any]) -> ServerSettings:
    """Return the settings of a YAML file, with the options that are not None in place of its values."""
    values: Any = {}
    if path:
        values = parse_yaml(read_text(path, "settings"), str(path))
        if not isinstance(values, dict):
            raise UserError(f"{path} is not a file of settings: it must have lines such as port: 8000")
    given = {name: value for name, value in options.items() if value is not None}
    return parse_settings(ServerSettings, {**values, **given}, where=str(path) if path else "serve")

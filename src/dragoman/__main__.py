"""The `dragoman` command, which is also `python -m dragoman`."""

from __future__ import annotations

from dragoman import errors


def main() -> None:
    """Run the command line; Ctrl-C is handled before its modules are imported, which takes half a second."""
    errors.handle_interrupts()

    from dragoman.cli.main import main as run_cli

    run_cli()


if __name__ == "__main__":
    main()

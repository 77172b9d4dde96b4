"""The `dragoman` command, which is also `python -m dragoman`."""

from dragoman import interrupts


def main() -> None:
    """Run the command line; Ctrl-C is handled before its modules are imported, which takes half a second."""
    interrupts.install()

    from dragoman import cli

    cli.main()


if __name__ == "__main__":
    main()

"""Program of the `mpigossip` command, and of `python -m mpigossip`."""

import sys

INTERRUPTED = 130
"""Exit code after an interrupt, by the convention of shells."""


def main() -> int:
    """Run the command line, and return its exit code.

    Its modules are imported here, so that Ctrl-C during the imports prints no traceback.
    """
    try:
        from mpigossip.cli import main as run_command

        return run_command()
    except KeyboardInterrupt:
        sys.stderr.write("mpigossip: interrupted\n")
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())

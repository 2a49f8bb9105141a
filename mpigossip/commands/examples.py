"""`mpigossip examples`: list the example jobs and programs, and copy one."""

from __future__ import annotations

from pathlib import Path

from mpigossip.commands.arguments import command, tell

EXAMPLES = """
mpigossip examples
mpigossip examples copy gpt
mpirun -n 4 mpigossip train digits
"""
COPY = "mpigossip examples copy classify --to programs"


def add(commands) -> None:
    """Add it to the parser."""
    listed = command(commands, "examples", _list, "list and copy examples", EXAMPLES)
    below = listed.add_subparsers(metavar="copy")
    copied = command(below, "copy", _copy, "copy an example, with the module that it needs", COPY)
    copied.add_argument("name", metavar="NAME", help="as `mpigossip examples` lists it")
    copied.add_argument("--to", type=Path, metavar="DIR", default=Path(), help="default: here")


def _list(options) -> None:
    from mpigossip.config.packaged import examples, summary

    group = None
    for name, path in examples().items():
        if group not in (None, path.parent):
            tell()
        group = path.parent
        tell(f"{name:18}{summary(path)}")
    tell("\n`mpigossip examples copy NAME` copies one of them. Commands take a job of the")
    tell("first group by its name: mpirun -n 4 mpigossip train digits")


def _copy(options) -> None:
    from mpigossip.config.packaged import copy

    for path in copy(options.name, options.to):
        tell(path)

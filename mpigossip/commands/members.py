"""`mpigossip join` and `replay`: a training that members join and leave, and its repetition."""

from __future__ import annotations

import argparse
from pathlib import Path

from mpigossip.commands.arguments import command, settings, tell, whole
from mpigossip.config.errors import FAILED, OK, STOPPED

JOIN = """
mpigossip join runs/big jobs/text-gpt.toml
mpigossip join runs/big
"""
REPLAY = """
mpigossip replay runs/big
mpigossip replay runs/big --place 3 --rounds 10:20
"""


def add(commands) -> None:
    """Add them to the parser."""
    made = command(
        commands, "join", _join, "train as one member, joining and leaving at will", JOIN
    )
    made.add_argument("folder", type=Path, metavar="RUN")
    made.add_argument("job", type=Path, nargs="?", metavar="JOB.toml",
                      help="needed to begin; later it has to be the same")  # fmt: skip
    about = "take models of other users, in a folder that they may write"
    made.add_argument("--shared", action="store_true", help=about)
    settings(made)
    made = command(commands, "replay", _replay, "repeat such a training, bit by bit", REPLAY)
    made.add_argument("folder", type=Path, metavar="RUN")
    made.add_argument("--place", type=int, metavar="P", help="of this member only")
    made.add_argument("--rounds", type=_rounds, metavar="A:B", help="these rounds only")


def _rounds(text: str) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    try:
        found = whole(first), whole(last if colon else first)
    except ValueError:
        raise argparse.ArgumentTypeError(f'"{text}": needs two numbers, such as 10:20') from None
    return found


def _join(options) -> int:
    from mpigossip.runs.members.join import join
    from mpigossip.training import assemble

    given = list(options.settings)
    if options.job is not None and "=" in str(options.job):  # a setting stands in its place
        given, options.job = [str(options.job), *given], None
    job = assemble.load(options.job, given) if options.job is not None else None
    summary = join(options.folder, job, shared=options.shared)
    if not summary["finished"]:
        if (options.folder / "STOP").exists():
            tell(f"{options.folder}: stopped, as the file STOP asks; remove it to go on")
            return OK
        return STOPPED
    lines = [f"{name:<12}{value}" for name, value in summary.items() if name != "digest"]
    tell("\n".join([*lines, f"{'digest':<12}{summary.get('digest', 'by another member')}"]))
    return OK


def _replay(options) -> int:
    from mpigossip.mixing.members.scripted import Differs
    from mpigossip.runs.members.replay import replay

    try:
        tell(replay(options.folder, options.place, options.rounds))
    except Differs as error:
        tell(f"{options.folder}: {error}")
        return FAILED
    return OK

"""`mpigossip doctor`: check a machine before the first training."""

from __future__ import annotations

from pathlib import Path

from mpigossip.commands.arguments import amount, command, many, number

EXAMPLES = """
mpigossip doctor
srun mpigossip doctor --json >runs/digits/doctor.json
srun --ntasks-per-node=8 mpigossip doctor --ranks-per-node host
"""


def add(commands) -> None:
    """Add it to the parser."""
    summary = "check MPI, GPUs, network, disk and a short training; ready or not"
    doctor = command(commands, "doctor", run, summary, EXAMPLES)
    doctor.add_argument("--graph", default="one-peer-exponential", help="whose neighbours to try")
    doctor.add_argument(
        "--devices", default="auto", help="slots of a node, as node.devices; default: %(default)s"
    )
    doctor.add_argument(
        "--ranks-per-node", type=_ranks, default="auto", metavar="K",
        help='as node.ranks_per_node: a number, "host" or "auto"; default: %(default)s',
    )  # fmt: skip
    doctor.add_argument("--workers", type=number(int, 0, 1024), default=2, help="as data.workers")
    doctor.add_argument(
        "--megabytes", type=many, default=16, help="size of a message and of the file written"
    )
    doctor.add_argument(
        "--folder", type=Path, default=Path(), metavar="DIR", help="where runs are to be written"
    )
    doctor.add_argument("--timeout", type=amount, default=60.0, help="seconds that a test may take")
    doctor.add_argument("--json", action="store_true", help="for programs")


def _ranks(text: str) -> int | str:
    """What node.ranks_per_node may be; argparse says which option a ValueError belongs to."""
    if text in ("host", "auto"):
        return text
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def run(options) -> int:
    """Print what was found; exit code 1 if the machine isn't ready."""
    from mpigossip.analysis.doctor import examine

    return examine(options)

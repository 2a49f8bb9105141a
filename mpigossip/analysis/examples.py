"""Examples for the help of every command: what stands under `mpigossip COMMAND --help`."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator

EXAMPLES: dict[str, tuple[str, ...]] = {
    "": (
        "mpirun -n 4 mpigossip train jobs/digits.toml node.devices=cpu:2",
        "mpigossip simulate jobs/digits.toml --nodes 16 graph.name=exponential",
        "mpigossip log plot runs/digits",
    ),
    "train": (
        "mpirun -n 4 mpigossip train jobs/digits.toml node.devices=cpu:2",
        "mpigossip train jobs/imagenet-resnet50.toml --dry-run --nodes 32",
    ),
    "resume": (
        "mpirun -n 4 mpigossip resume runs/digits run.epochs=40",
        "mpigossip resume runs/digits run.epochs=40 --simulate",
    ),
    "simulate": ("mpigossip simulate jobs/digits.toml --nodes 16 graph.name=exponential",),
    "data": ("mpigossip data pack imagenet imagenet.h5 --image-size 256",),
    "data pack": (
        "mpigossip data pack imagenet imagenet.h5 --image-size 256",
        "mpigossip data pack books books.h5 --text",
    ),
    "data show": ("mpigossip data show imagenet.h5",),
    "log": (
        "mpigossip log show runs/digits",
        "mpigossip log plot runs/ring runs/digits --out compare.png",
    ),
    "log show": ("mpigossip log show runs/digits",),
    "log export": (
        "mpigossip log export runs/digits --csv digits.csv",
        "mpigossip log export runs/digits --tensorboard events",
    ),
    "log plot": (
        "mpigossip log plot runs/digits",
        "mpigossip log plot runs/ring runs/digits --out compare.png",
    ),
    "report": ("mpigossip report runs/ring runs/digits --html report.html",),
    "checkpoint": (
        "mpigossip checkpoint verify runs/digits",
        "mpigossip checkpoint export runs/digits --out model.safetensors",
    ),
    "checkpoint show": ("mpigossip checkpoint show runs/digits",),
    "checkpoint verify": ("mpigossip checkpoint verify runs/digits",),
    "checkpoint export": (
        "mpigossip checkpoint export runs/digits --out model.safetensors",
        "mpigossip checkpoint export runs/digits --out node2.pt --node 2",
    ),
    "graph": (
        "mpigossip graph show one-peer-exponential --nodes 8",
        "mpigossip graph compare ring exponential base-2 --nodes 12",
    ),
    "graph show": (
        "mpigossip graph show one-peer-exponential --nodes 8",
        "mpigossip graph show file:searched.json --nodes 16 --json",
    ),
    "graph compare": (
        "mpigossip graph compare ring exponential base-2 --nodes 12",
        "mpigossip graph compare --nodes 64",
    ),
    "graph draw": ("mpigossip graph draw base-3 --nodes 9 --out base-3.png",),
    "graph search": (
        "mpigossip graph search --nodes 16 --degree 4 --seconds 5 --out searched.json",
        "mpigossip train jobs/digits.toml graph.name=file:searched.json",
    ),
    "bench": (
        "mpirun -n 2 mpigossip bench exchange --sizes 1MB 100MB",
        "srun mpigossip bench allreduce --json",
    ),
    "job": (
        "mpigossip job generic-slurm jobs/digits.toml --nodes 4 --time 10m",
        "mpigossip job perlmutter JOB.toml --nodes 32 --time 6h --account A >job.sh",
    ),
    "doctor": ("mpigossip doctor", "srun mpigossip doctor --json >runs/digits/doctor.json"),
}
"""Command lines by command; "" is the program itself."""


def attach(top: argparse.ArgumentParser) -> None:
    """Put the examples under the help of every command, and let descriptions keep to 80 columns."""
    for words, parser in commands(top):
        parser.description = textwrap.fill(parser.description or "", 78)
        found = EXAMPLES.get(words)
        if found:
            lines = "\n".join(f"  {line}" for line in found)
            parser.epilog = f"example{'s' * (len(found) > 1)}:\n{lines}"
            parser.formatter_class = argparse.RawDescriptionHelpFormatter


def commands(
    parser: argparse.ArgumentParser, words: str = ""
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command of a parser with its words, itself first."""
    yield words, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from commands(below, f"{words} {name}".strip())

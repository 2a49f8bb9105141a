"""Which ranks are near each other: the rack of each, from host names, the scheduler or a file."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from mpigossip.cluster.world import World
from mpigossip.config import JobError

VARIABLE = "SLURM_TOPOLOGY_ADDR"
"""Set by Slurm's topology plugin: switches from the root down and the node, joined by dots."""


def natural(host: str) -> tuple:
    """A key that sorts n2 before n10."""
    return tuple((0, int(p)) if p.isdigit() else (1, p) for p in re.findall(r"\d+|\D+", host))


def addresses(world: World) -> list[str]:
    """What the scheduler says of each rank's place, "" where it says nothing; collective."""
    return world.broadcast(world.gather(os.environ.get(VARIABLE, "")))


def racks(placement: str, hosts: Sequence[str], told: Sequence[str] = ()) -> list[str]:
    """The rack of each rank: by "hostnames", "scheduler", or "file:PATH" with lines HOST RACK.

    From a host name its last number is taken off: r12n03 stands in r12n. ``told``: what
    :func:`addresses` gave, for "scheduler". Raises JobError naming what is missing.
    """
    short = [host.split(".")[0] for host in hosts]
    if placement == "hostnames":
        return [re.sub(r"\d+\D*$", "", host) or host for host in short]
    if placement == "scheduler":
        return _from_scheduler(told)
    return _from_file(Path(placement.removeprefix("file:")), short)


def _from_scheduler(told: Sequence[str]) -> list[str]:
    missing = [rank for rank, address in enumerate(told) if not address]
    if missing:
        raise JobError(
            [f'graph.placement = "scheduler": {VARIABLE} is not set on rank {missing[0]}; Slurm '
             'sets it where its topology plugin is configured; use "hostnames" or "file:PATH"']
        )  # fmt: skip
    return [address.rpartition(".")[0] or address for address in told]


def _from_file(path: Path, hosts: Sequence[str]) -> list[str]:
    try:
        lines = [line.split() for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise JobError([f'graph.placement = "file:{path}": it can\'t be read: {error}']) from None
    wrong = [" ".join(line) for line in lines if len(line) != 2]
    if wrong:
        raise JobError(
            [f'graph.placement = "file:{path}": the line "{wrong[0]}" isn\'t a host and its rack']
        )
    found = dict(lines)
    absent = sorted({host for host in hosts if host not in found}, key=natural)
    if absent:
        raise JobError(
            [f'graph.placement = "file:{path}" names no rack of host {absent[0]} '
             f"({len(absent)} missing); add a line: {absent[0]} RACK"]
        )  # fmt: skip
    return [found[host] for host in hosts]

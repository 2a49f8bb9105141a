"""Machines that training is timed on: rates and latencies, of networks by name or measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from mpigossip.config import ClockSection, JobError
from mpigossip.config.toml import near
from mpigossip.store.hdf5 import replacing

SUM_RATE = 300e9
CODING_RATE = 50e9
"""Bytes/s of one term of the sum and of coding that are assumed of a GPU: a third of the memory's
rate of a V100, and a few operations a value."""
OFF = "none"
"""The network of a run without a virtual clock."""
NETWORKS = {
    "internet-100mbit": (20e-3, 12.5e6),
    "1gbit": (100e-6, 125e6),
    "10gbit": (50e-6, 1.25e9),
    "25gbit": (50e-6, 3.125e9),
    "100gbit": (10e-6, 12.5e9),
    "200gbit": (5e-6, 25e9),
    "400gbit": (5e-6, 50e9),
}
"""Latency of a small round in seconds and bandwidth in bytes/s of links that are usual: TCP up to
25 Gbit/s, RDMA above. Round figures, measured nowhere."""


@dataclass(frozen=True)
class Machine:
    """Seconds and rates of one node.

    k messages of B bytes at once take latency_s + k · B / bandwidth; a global average over n nodes
    2 ⌈log2 n⌉ global_latency_s + 2 (n−1)/n · B / global_bandwidth, as the best all-reduces do;
    the weighted sum of k + 1 messages k · B / combine_rate.
    """

    compute_s: float
    """forward and backward of a node"""
    node_s: float
    """averaging inside the node"""
    update_s: float
    """the algorithm's own arithmetic and bookkeeping"""
    latency_s: float
    bandwidth: float
    """bytes/s, in and out at once"""
    global_latency_s: float
    global_bandwidth: float
    combine_rate: float
    """bytes/s of one term of the sum"""
    sources: dict[str, str] = field(default_factory=dict)
    """name -> "measured", "given" or "assumed" """
    where: str = "this process alone"
    jitter: float = 0.0
    """standard deviation of a step's computing, as a share of it"""
    encode_rate: float = 0.0
    """bytes/s of float32 that a lossy wire encodes; 0: at once"""
    decode_rate: float = 0.0

    def given(self, said: Mapping[str, float | None]) -> Machine:
        """The same machine with the figures that the user gives; None leaves a figure as it is.

        Latency and bandwidth hold for global averages too, "coding_rate" for both directions.
        """
        both = {name: (name, f"global_{name}") for name in ("latency_s", "bandwidth")}
        both["coding_rate"] = ("encode_rate", "decode_rate")
        known = {name: value for name, value in said.items() if value is not None}
        fields = {key: v for name, v in known.items() for key in both.get(name, (name,))}
        return replace(self, **fields)  # type: ignore[arg-type]

    def save(self, path: Path) -> None:
        """As JSON, for :func:`named`."""
        with replacing(path) as new:
            new.write_text(json.dumps(asdict(self), indent=1) + "\n", "utf-8")


def named(section: ClockSection) -> Machine:
    """The machine that a job's `[clock]` names: a network, or a file of :meth:`Machine.save`.

    Raises JobError.
    """
    name = section.network
    compute_s = section.compute_s
    if name in NETWORKS:
        if compute_s is None:
            remedy = "say how long forward and backward of a step take on the device"
            raise JobError(f'clock.compute_s is not set for clock.network = "{name}": {remedy}')
        wire = NETWORKS[name]
        machine = Machine(compute_s, 0.0, 0.0, *wire, *wire, SUM_RATE, where=name)
        machine = machine.given({"coding_rate": CODING_RATE})
    else:
        machine = _read(name)
    figures = ("compute_s", "jitter", "latency_s", "bandwidth")
    return machine.given({name: getattr(section, name) for name in figures})


def _read(name: str) -> Machine:
    try:
        return Machine(**json.loads(Path(name).read_text("utf-8")))
    except FileNotFoundError:
        raise JobError(
            f'clock.network: "{name}" is no file that `mpigossip plan … --save FILE` wrote, and '
            f"no network by name; {near(name, {*NETWORKS, OFF})}"
        ) from None
    except (ValueError, TypeError, OSError) as error:
        told = f"clock.network: {name} is not what `mpigossip plan --save` writes: {error}"
        raise JobError(told) from None

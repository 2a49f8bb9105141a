"""Machines, for which the time of a training is estimated, as rates and latencies."""

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
"""Assumed rates of a GPU, in bytes/s, for adding a message (SUM_RATE), which is a third of the
memory bandwidth of a V100, and for encoding it (CODING_RATE), with a few operations per element.
"""
OFF = "none"
"""Value of `clock.network` in a job without a virtual clock."""
NETWORKS = {
    "internet-100mbit": (20e-3, 12.5e6),
    "1gbit": (100e-6, 125e6),
    "10gbit": (50e-6, 1.25e9),
    "25gbit": (50e-6, 3.125e9),
    "100gbit": (10e-6, 12.5e9),
    "200gbit": (5e-6, 25e9),
    "400gbit": (5e-6, 50e9),
}
"""Latency in seconds and bandwidth in bytes/s of common networks. Up to 25 Gbit/s, TCP is assumed,
and RDMA above. These are round values, not measurements.
"""


@dataclass(frozen=True)
class Machine:
    """Durations and rates of one node.

    k messages of B bytes that a node sends at the same time take latency_s + k · B / bandwidth. A
    global average of B bytes over n nodes takes 2 ⌈log2 n⌉ global_latency_s + 2 (n−1)/n · B /
    global_bandwidth, like the best all-reduce algorithms. The weighted sum of k + 1 messages takes
    k · B / combine_rate.
    """

    compute_s: float
    """Seconds of the forward and backward passes of a step on a node."""
    node_s: float
    """Seconds of averaging gradients over the slots of a node."""
    update_s: float
    """Seconds of the arithmetic and bookkeeping of the algorithm."""
    latency_s: float
    bandwidth: float
    """Bytes/s that a node sends, and at the same time receives."""
    global_latency_s: float
    global_bandwidth: float
    combine_rate: float
    """Bytes/s at which a received message is added to a weighted sum."""
    sources: dict[str, str] = field(default_factory=dict)
    """Origin of each value, by its name: "measured", "given" or "assumed"."""
    where: str = "this process alone"
    jitter: float = 0.0
    """Standard deviation of the computing time of a step, relative to its mean."""
    encode_rate: float = 0.0
    """Bytes/s of float32 values at which a lossy wire encodes; 0: encoding takes no time."""
    decode_rate: float = 0.0

    def with_values(self, values: Mapping[str, float | None]) -> Machine:
        """Return this machine with values that a user has given; None leaves a value unchanged.

        A given latency or bandwidth is also used for global averages. "coding_rate" replaces the
        rates of encoding and decoding.
        """
        both = {name: (name, f"global_{name}") for name in ("latency_s", "bandwidth")}
        both["coding_rate"] = ("encode_rate", "decode_rate")
        changes = {name: value for name, value in values.items() if value is not None}
        fields = {key: v for name, v in changes.items() for key in both.get(name, (name,))}
        return replace(self, **fields)  # type: ignore[arg-type]

    def save(self, path: Path) -> None:
        """Write this machine as JSON, which :func:`named` can read."""
        with replacing(path) as new:
            new.write_text(json.dumps(asdict(self), indent=1) + "\n", "utf-8")


def named(section: ClockSection) -> Machine:
    """Return the machine that `[clock]` names.

    `clock.network` is the name of a known network, or a file that :meth:`Machine.save` wrote.

    :raises JobError: if a required setting is missing or the file can't be read
    """
    name = section.network
    compute_s = section.compute_s
    if name in NETWORKS:
        if compute_s is None:
            remedy = "set it to the seconds that forward and backward of a step take on the device"
            raise JobError(f'clock.compute_s is not set for clock.network = "{name}": {remedy}')
        wire = NETWORKS[name]
        machine = Machine(compute_s, 0.0, 0.0, *wire, *wire, SUM_RATE, where=name)
        machine = machine.with_values({"coding_rate": CODING_RATE})
    else:
        machine = _read(name)
    names = ("compute_s", "jitter", "latency_s", "bandwidth")
    return machine.with_values({name: getattr(section, name) for name in names})


def _read(name: str) -> Machine:
    try:
        return Machine(**json.loads(Path(name).read_text("utf-8")))
    except FileNotFoundError:
        raise JobError(
            f'clock.network: "{name}" is neither a file that `mpigossip plan … --save FILE` '
            f"wrote nor the name of a network; {near(name, {*NETWORKS, OFF})}"
        ) from None
    except (ValueError, TypeError, OSError) as error:
        message = (
            f"clock.network: {name} is not a file that `mpigossip plan … --save FILE` wrote: "
            f"{error}"
        )
        raise JobError(message) from None

"""Machines, for which the time of a training is estimated, as rates and latencies."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from mpigossip.config import ClockSection, JobError
from mpigossip.config.structure import structure
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
class NetworkLibrary:
    """Library that sends messages over a network."""

    latency_s: float
    """Assumed seconds of a small message, a round value that was not measured."""
    sockets: int = 0
    """Number of TCP connections between two hosts, if the library uses TCP."""


TRANSPORTS = {
    "mpi-rdma": NetworkLibrary(5e-6),
    "mpi-tcp": NetworkLibrary(50e-6, 1),
    "nccl-rdma": NetworkLibrary(15e-6),
    "nccl-sockets": NetworkLibrary(100e-6, 16),
    "gloo": NetworkLibrary(100e-6, 1),
}
"""Transports by the names of `plan --transport`. On AWS, NCCL opens 2 threads with 8 sockets each,
elsewhere fewer (its documentation of NCCL_SOCKET_NTHREADS and NCCL_NSOCKS_PERTHREAD)."""
IN_FLIGHT = 131_072
"""Bytes that one TCP connection keeps in flight at least: Linux's default receive buffer
(net.ipv4.tcp_rmem)."""


def queue_warning(transport: str, bandwidth: float, queue_s: float) -> str:
    """Return a warning if the queue of a link is too short for a transport's data in flight.

    Such a queue overflows, and TCP loses packets: measured rounds took up to 40 % longer than
    bandwidth and latency explain (tools/bench/published/README.md).

    :param transport: name in `TRANSPORTS`
    :param bandwidth: bytes/s of the link
    :param queue_s: seconds for which a packet waits at most in the queue of the link
    :returns: the warning; "" if the queue is long enough or the transport does not use TCP
    """
    in_flight = TRANSPORTS[transport].sockets * IN_FLIGHT
    queue = bandwidth * queue_s
    if queue >= in_flight:
        return ""
    return (
        f"warning: the queue of the link holds {queue / 1e6:.2g} MB, but {transport} keeps "
        f"{in_flight / 1e6:.2g} MB in flight: TCP will lose packets, and exchanges will take "
        "longer than predicted"
    )


def fit_all_reduce(
    first: tuple[float, float], second: tuple[float, float], hops: int, share: float
) -> tuple[float, float]:
    """Return latency and bandwidth of global averages from two measured all-reduces.

    The time of B bytes is modelled as hops · latency + share · B / bandwidth.

    :param first: bytes and seconds of one all-reduce
    :param second: bytes and seconds of the other
    :param hops: number of consecutive latencies
    :param share: bytes that a node sends per byte of the vector, 2 (n−1)/n
    :raises JobError: if both have the same number of bytes, or the larger does not take longer
    """
    (small, small_s), (large, large_s) = sorted((first, second))
    if large <= small or large_s <= small_s:
        raise JobError(
            f"--allreduce: {large / 1e6:g} MB in {1e3 * large_s:g} ms and {small / 1e6:g} MB in "
            f"{1e3 * small_s:g} ms: the larger all-reduce must take longer; measure two different "
            "sizes"
        )
    seconds_per_byte = (large_s - small_s) / (large - small)
    latency_s = max(0.0, small_s - seconds_per_byte * small) / hops
    return latency_s, share / seconds_per_byte


POSITIVE = ("bandwidth", "global_bandwidth", "combine_rate")
"""Rates of a machine by which bytes are divided."""


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
    """Seconds of a small message to another node."""
    bandwidth: float
    """Bytes/s that a node sends, and at the same time receives."""
    global_latency_s: float
    """Latency, in seconds, in the formula of global averages."""
    global_bandwidth: float
    """Bandwidth, in bytes/s, in the formula of global averages."""
    combine_rate: float
    """Bytes/s at which a received message is added to a weighted sum."""
    sources: dict[str, str] = field(default_factory=dict)
    """Origin of each value, such as "measured", "given" or "assumed", by the names in
    `analysis.machine.WORDS`."""
    where: str = "this process alone"
    """Description of the machine for output."""
    jitter: float = 0.0
    """Standard deviation of the computing time of a step, relative to its mean."""
    encode_rate: float = 0.0
    """Bytes/s of float32 values at which a lossy wire encodes; 0: encoding takes no time."""
    decode_rate: float = 0.0
    """Bytes/s of float32 values at which a lossy wire decodes; 0: decoding takes no time."""
    gpu: str = ""
    """Name of the GPU whose data sheet gives the times of the update and of a node's averages."""

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
        """Write this machine to a file as JSON, which :func:`named` can read.

        :raises StoreError: if writing fails
        """
        with replacing(path) as new:
            new.write_text(json.dumps(asdict(self), indent=1) + "\n", "utf-8")


def named(section: ClockSection) -> Machine:
    """Return the machine that `[clock]` names.

    Other settings of the section replace values of this machine.

    :param section: section `[clock]`, whose ``network`` is the name of a known network, or a file
        that :meth:`Machine.save` wrote; `~` in its path is expanded
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
    """Return the machine in a file that :meth:`Machine.save` wrote.

    :param name: path of the file, the value of `clock.network`
    :raises JobError: if there is no such file, or it can't be read
    """
    path = Path(os.path.expanduser(name))  # noqa: PTH111  Path.expanduser raises if ~user is unknown
    try:
        values = json.loads(path.read_text("utf-8"))
        if not isinstance(values, dict):
            raise ValueError("it contains no JSON object")
        machine = structure(values, Machine)
        _check(machine)
        return machine
    except FileNotFoundError:
        raise JobError(
            f'clock.network: "{name}" is neither a file that `mpigossip plan … --save FILE` '
            f"wrote nor the name of a network; {near(name, {*NETWORKS, OFF})}"
        ) from None
    except (ValueError, TypeError, OSError) as error:
        message = (
            f"clock.network: {name} is not a file that `mpigossip plan … --save FILE` wrote: "
            f"{error}; write it again"
        )
        raise JobError(message) from None


def _check(machine: Machine) -> None:
    """Check that all numbers of a machine are finite and not negative, and that no rate is 0.

    :raises ValueError: if a number is not valid
    """
    for key, value in asdict(machine).items():
        if not isinstance(value, float):
            continue
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{key} = {value:g} must be a finite number of at least 0")
        if value == 0 and key in POSITIVE:
            raise ValueError(f"{key} = 0 must be greater than 0")

"""Choice of the fastest transport between GPUs that works.

If the choice is automatic, each transport is tested and timed. All ranks agree on the result of a
test: the transport works, or it does not, and why. After a failed test, the next transport is
tried.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from mpi4py import MPI

from mpigossip.cluster.communicator import with_timeout
from mpigossip.cluster.world import World
from mpigossip.config.errors import Failure
from mpigossip.mixing.base import ExchangeKind, MessageLayout
from mpigossip.mixing.device.buffers import DeviceBuffers
from mpigossip.mixing.device.memory import TransportUnavailable, agreed, empty_cache
from mpigossip.mixing.device.proof import gpu_mpi_works
from mpigossip.mixing.device.streams import Streams
from mpigossip.mixing.notifications import keep_alive
from mpigossip.mixing.pipeline import Pipeline
from mpigossip.mixing.plan import RoundPlan, RoundState
from mpigossip.mixing.progress_thread import ProgressThread
from mpigossip.mixing.transports import Transport
from mpigossip.mixing.transports.messages import Messages
from mpigossip.mixing.transports.nccl_between_nodes import Nccl
from mpigossip.mixing.transports.windows import Windows

TRANSPORTS = "windows", "messages", "nccl", "host"
"""Names of the transports, which are the values of `node.exchange` besides "auto". "host" means
that messages go through host memory, which is pinned if possible."""
AS_FAST = 1.1
"""Time of "windows", relative to the fastest transport, up to which "windows" is chosen."""
ROUNDS = 3
"""Rounds that are timed, after one round that opens connections."""
LIMIT_S = 60.0
"""Longest time, in seconds, of a wait or a test's subprocess; `mpigossip doctor` sets less."""
PROVEN: WeakKeyDictionary[World, dict[tuple, tuple[bool, str]]] = WeakKeyDictionary()
"""Results of the tests of a world: whether a transport works, and the reason. The key is the name
of the transport, the number of ranks and the devices. They are kept because each test starts a
process."""


@dataclass
class OpenedTransport:
    """Transport between GPUs, the buffers of its messages, and a text with its name.

    If there is a reason why the transport was chosen, the text contains it, too.
    """

    transport: Transport
    buffers: DeviceBuffers
    text: str


class Probe:
    """Object that opens, tests and times transports; all of its methods are collective."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        layout: MessageLayout,
        buffers: int,
        world: World,
        on_host: Callable[[int], Transport],
    ):
        """Prepare streams for the devices of the layout.

        :param comm: communicator of the nodes
        :param layout: layout of a node's message
        :param buffers: largest number of in-neighbours that send to this rank in one round
        :param world: world whose ranks are the nodes
        :param on_host: function that opens the transport "host" for a given number of in-neighbours
        """
        self._comm = comm
        self._layout = layout
        self._world = world
        self._on_host = on_host
        self._many = buffers
        self._limit_s = getattr(comm, "timeout_s", world.timeout_s)
        self._proven = PROVEN.setdefault(world, {})
        names = layout.devices or ("cpu",) * layout.slots
        self._devices = [torch.device(name) for name in names]
        self._streams = [Streams(device) for device in self._devices]
        self.on_gpus = self._devices[0].type == "cuda"

    def open(
        self, name: str, buffers_wanted: int, limit_s: float = float("inf")
    ) -> OpenedTransport:
        """Open a transport.

        :param name: name of the transport
        :param buffers_wanted: number of in-neighbours for which inbox buffers are allocated
        :param limit_s: time limit of each wait, in seconds
        :raises TransportUnavailable: on all ranks, if it can't be used on one
        """
        comm = self._comm
        layout = self._layout
        arguments: Any = comm, layout, buffers_wanted, min(self._limit_s, limit_s)
        reason = ""
        if name in ("windows", "messages"):
            key = name, comm.size, *self._devices  # after a rank failure, the size is smaller
            if not all(comm.allgather(key in self._proven)):
                self._proven[key] = gpu_mpi_works(comm, self._devices, name, LIMIT_S / 2)
            works, reason = self._proven[key]
            if not works:
                raise TransportUnavailable(f"{reason}; use a GPU-aware MPI")
        if name == "windows":
            transport: Transport = Windows(*arguments, devices=self._devices)
        elif name == "messages":
            transport = Messages(*arguments, devices=self._devices, hosts=self._world.hosts)
        elif name == "nccl":
            transport = Nccl(*arguments, world=self._world, streams=self._streams)
            reason = "NCCL has connected the nodes"
        else:
            transport = self._on_host(buffers_wanted)
        rank = comm.rank
        n = comm.size
        try:
            buffers = agreed(comm, lambda: DeviceBuffers(layout, rank, n, transport, self._streams))
        except TransportUnavailable:
            transport.close()
            empty_cache(self._devices)
            raise
        if name == "host" and n > 1:
            reason = buffers.pin(transport.memory)
        return OpenedTransport(transport, buffers, f"{name} ({reason})" if reason else name)

    def seconds(self, name: str) -> float:
        """Measure the seconds of a round along a ring, with messages of full size.

        Several rounds are timed. The result is the time of the fastest round on the slowest rank.
        After each round, all ranks agree whether it has failed on one of them, because otherwise
        some would start the next round.

        :param name: name of the transport
        :raises TransportUnavailable: on all ranks, if anything fails on one
        """
        # a rank that hangs reaches its time limit after the others
        comm = with_timeout(self._comm, 2 * self._limit_s)
        buffers = max(1, self._many)
        opened = agreed(comm, lambda: self.open(name, buffers, LIMIT_S), (RuntimeError,))
        rank = comm.rank
        n = comm.size
        left = (rank - 1) % n
        right = (rank + 1) % n
        plan = RoundPlan(
            ExchangeKind.GOSSIP, False, 0, (left,), (0.5, 0.5), (right,), (left,), ((right, 0),)
        )
        transport = opened.transport
        device = str(self._devices[0])
        thread = ProgressThread(transport.comm, timeout_s=transport.timeout_s, device=device)
        run_round = partial(self._round, Pipeline(transport, opened.buffers, thread), opened, plan)
        try:
            rounds = [partial(run_round, index) for index in range(1 + ROUNDS)]
            times = [agreed(comm, timed_round, (RuntimeError, Failure)) for timed_round in rounds]
        except TransportUnavailable as error:
            transport.abandon()
            keep_alive.append((opened, thread))  # closing them would wait for the failed round
            raise TransportUnavailable(f"a round of {name} failed: {error}") from error
        opened.buffers.close()
        thread.close()
        transport.close([(index, plan) for index in (1 + ROUNDS, 2 + ROUNDS)])
        del opened, run_round, rounds, transport  # which hold the buffers
        empty_cache(self._devices)  # the next transport may allocate by other calls than torch's
        return comm.allreduce(min(times[1:]), MPI.MAX)

    def _round(
        self, pipeline: Pipeline, opened: OpenedTransport, plan: RoundPlan, index: int
    ) -> float:
        r = RoundState(plan, index, index, index)
        began = time.perf_counter()
        opened.buffers.begin(index)
        pipeline.begin(r, inline=not pipeline.threaded)
        pipeline.wait(r)
        seconds = time.perf_counter() - began
        opened.transport.release(r, plan)
        return seconds


def open_transport(
    requested: str,
    comm: MPI.Intracomm,
    layout: MessageLayout,
    buffers: int,
    world: World,
    on_host: Callable[[int], Transport],
) -> OpenedTransport:
    """Open the requested transport, or for "auto" the fastest one that works; collective.

    :param requested: name of the transport, as in `node.exchange`
    :param comm: communicator of the nodes
    :param layout: layout of a node's message
    :param buffers: largest number of in-neighbours that send to this rank in one round
    :param world: world whose ranks are the nodes
    :param on_host: function that opens the transport "host" for a given number of in-neighbours
    :raises TransportUnavailable: on all ranks, if the transport requested by name, or for "auto"
        the last one, "host", can't be used
    """
    probe = Probe(comm, layout, buffers, world, on_host)
    if requested == "host" or comm.size == 1:
        return probe.open("host", buffers)
    if requested != "auto":
        try:
            return probe.open(requested, buffers)
        except TransportUnavailable as error:
            raise TransportUnavailable(
                f'node.exchange = "{requested}": {error}; "auto" chooses the fastest transport '
                "that works (`mpigossip doctor` prints the tests)"
            ) from error
    times: dict[str, float] = {}
    refused: dict[str, list[str]] = {}
    for name in TRANSPORTS:
        if (name == "nccl" and not probe.on_gpus) or (name == "host" and not times):
            continue  # without an alternative, "host" need not be timed
        try:
            times[name] = probe.seconds(name)
        except TransportUnavailable as error:
            refused.setdefault(str(error), []).append(name)
    opened = None
    while opened is None:
        name = fastest(times)
        try:
            opened = probe.open(name, buffers)
        except (
            TransportUnavailable
        ) as error:  # the buffers may not fit, although the timed rounds' did
            if name == "host":
                raise
            del times[name]
            refused.setdefault(str(error), []).append(name)
    measured = [f"{name} {seconds * 1e3:.3g} ms" for name, seconds in times.items()]
    failed = [f"no {', '.join(names)}: {reason}" for reason, names in refused.items()]
    reason = "; ".join([*measured, *failed])
    opened.text = f"{opened.text} ({reason})" if reason else opened.text
    return opened


def fastest(times: dict[str, float]) -> str:
    """Return the name of the fastest transport; prefer "windows" if it is at most 10 % slower.

    ``times`` holds the seconds of a round by the name of the transport. If it is empty, return
    "host".
    """
    if not times:
        return "host"
    best = min(times, key=lambda name: times[name])
    return "windows" if times.get("windows", float("inf")) <= AS_FAST * times[best] else best

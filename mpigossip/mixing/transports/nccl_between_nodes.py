"""Transport of GPU memory between nodes by NCCL, with a torch process group for each slot.

The graph determines both ends of each transfer. In a round, each slot can therefore send and
receive by one group of NCCL calls. The main thread starts these groups, like the collectives inside
a node: kernels that wait for other GPUs must be in the same order on all of them, otherwise two of
them could wait for each other. On CPUs, gloo runs the same code. The transport has not been tested
between GPUs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from mpi4py import MPI

from mpigossip.cluster.deadline import Deadline, world_ranks
from mpigossip.cluster.process_groups import (
    GroupRank,
    close_groups,
    launch_lock,
    open_groups,
    start_transfers,
)
from mpigossip.cluster.world import World
from mpigossip.config.errors import Failure, JobError
from mpigossip.mixing.base import MessageLayout
from mpigossip.mixing.device.memory import TransportUnavailable, device_context
from mpigossip.mixing.device.streams import Streams
from mpigossip.mixing.exact_average import ByRank
from mpigossip.mixing.notifications import BEGUN
from mpigossip.mixing.plan import MessageChunk, RoundPlan, RoundState
from mpigossip.mixing.transports import Transport, inboxes

REMEDY = (
    "set NCCL_DEBUG=INFO to see what NCCL tries, or NCCL_SOCKET_IFNAME to choose its network; "
    'node.exchange = "host" works without NCCL'
)


class NcclFailed(Failure):
    """Failure of NCCL between nodes; the message contains NCCL's message and a remedy."""


class Nccl(Transport):
    """Transport with one chunk per round; the order of calls on a stream frees the buffers."""

    on_device = in_main = True

    def __init__(
        self,
        comm: MPI.Intracomm,
        layout: MessageLayout,
        buffers: int,
        timeout_s: float,
        *,
        world: World,
        streams: Sequence[Streams],
    ):
        """Open the process groups; collective.

        :param comm: communicator of the nodes
        :param layout: layout of a node's message
        :param buffers: largest number of in-neighbours that send to this rank in one round
        :param timeout_s: time limit of each wait, in seconds
        :param world: world whose ranks are the nodes
        :param streams: streams of each slot
        :raises TransportUnavailable: on all ranks, if one of them can't allocate memory or use NCCL
        """
        self._streams = streams
        self._broken = False
        self._on_cpu = streams[0].device.type == "cpu"
        areas = inboxes(comm, layout, buffers, [slot_streams.device for slot_streams in streams])
        self._inbox = [[area[k] for area in areas] for k in range(buffers)]
        names = [str(slot_streams.device) for slot_streams in streams]
        group_ranks = [
            GroupRank(f"nodes-{k}", world.rank, world.size, d) for k, d in enumerate(names)
        ]
        if shared := _find_shared_gpu(comm, streams):
            raise TransportUnavailable(shared)
        try:
            self._groups = open_groups(world, group_ranks, timeout_s)
        except (Failure, JobError) as error:
            raise TransportUnavailable(f"NCCL could not connect the nodes: {error}") from error
        self._works: list[Any] = []
        super().__init__(comm, layout, buffers, timeout_s)

    def begin(self, r: RoundState, memory: Sequence[torch.Tensor]) -> None:
        """Begin to send every slot's message and to receive the messages of the in-neighbours."""
        slots = range(self.layout.slots)
        out = {(j, s): memory[s] for s in slots for j, _ in r.plan.targets}
        into = {
            (j, s): self._inbox[k][s] for s in slots for k, j in enumerate(r.plan.remote_sources)
        }
        self._begin(out, into)

    def _begin(self, out: ByRank, into: ByRank) -> None:
        """Begin one group of calls for each slot, on the slot's stream for incoming data.

        :param out: arrays to send, by rank and slot
        :param into: arrays for received data, by rank and slot
        :raises NcclFailed: if a call fails
        """
        self._works = []
        if not out and not into:
            return
        try:
            with launch_lock:
                for slot, (group, slot_streams) in enumerate(
                    zip(self._groups, self._streams, strict=True)
                ):
                    sent = [(j, memory) for (j, s), memory in out.items() if s == slot]
                    received = [(j, memory) for (j, s), memory in into.items() if s == slot]
                    with device_context(slot_streams.device), torch.cuda.stream(slot_streams.into):
                        self._works += start_transfers(group, slot_streams.device, sent, received)
            if not self._on_cpu:
                for work, slot_streams in zip(self._works, self._streams, strict=True):
                    with device_context(slot_streams.device), torch.cuda.stream(slot_streams.into):
                        work.wait()  # holds up the stream, not this thread
        except RuntimeError as error:
            raise self._mark_broken(error) from error

    def _mark_broken(self, error: Exception) -> NcclFailed:
        self._broken = True
        return NcclFailed(f"NCCL send and recv between nodes failed: {error}; {REMEDY}")

    def send(
        self, r: RoundState, chunk: MessageChunk, memory: Sequence[torch.Tensor]
    ) -> list[MPI.Request]:
        """Do nothing: the message was sent when the round began."""
        return []

    def notify(self, r: RoundState, chunk: MessageChunk) -> None:
        """Notify the out-neighbours that this rank has begun the round's group of NCCL calls."""
        self.notifications.send([rank for rank, _ in r.plan.targets], BEGUN, self.number(r, chunk))

    def arrived(self, r: RoundState, source: int, chunk: MessageChunk) -> bool:
        """Return whether in-neighbour ``source`` has begun its NCCL calls of this round.

        A wait for this notification has a time limit and an error that names the late rank; the
        NCCL calls themselves do not.
        """
        return self.notifications.arrived(source, BEGUN, self.number(r, chunk))

    def received(self, r: RoundState, buffer: int) -> Sequence[torch.Tensor]:
        """Wait until the whole round is done; return for each slot an inbox buffer."""
        self._wait_for_works(
            f"round {r.t}", [*r.plan.remote_sources, *(rank for rank, _ in r.plan.targets)]
        )
        return self._inbox[buffer]

    def _wait_for_works(self, what: str, ranks: Sequence[int]) -> float:
        """Wait until all work that was started is done; return the seconds waited.

        :param what: description of the transfer, which begins the error message
        :param ranks: the other ranks of the transfer; empty: all ranks are awaited
        :raises WaitTimeoutError: at the time limit; it names the ranks of the transfer
        :raises NcclFailed: if the transfer fails
        """

        def late() -> str:
            self._broken = True
            numbers = ", ".join(map(str, world_ranks(self.comm, sorted(set(ranks)))))
            return f"{what}: NCCL has not completed its transfer with rank {numbers}; {REMEDY}"

        return Deadline(self.timeout_s).wait(
            self._done, late, awaited_ranks=lambda: world_ranks(self.comm, ranks)
        )

    def _done(self) -> bool:
        try:
            for work in [*self._works]:
                if self._on_cpu:  # gloo completes a call only in wait()
                    work.wait()
                elif not work.is_completed():
                    return False
                self._works.remove(work)
        except RuntimeError as error:
            raise self._mark_broken(error) from error
        return True

    def swap(self, out: ByRank, into: ByRank) -> float:
        self._begin(out, into)
        return self._wait_for_works("an average", ()) if self._on_cpu else 0.0

    def wait_for_swaps(self, what: str) -> None:
        self._wait_for_works(what, range(self.comm.size))

    def release(self, r: RoundState, coming: RoundPlan) -> None:
        if self._works:
            self.notifications.waited += self._wait_for_works(
                f"round {r.t}", [j for j, _ in r.plan.targets]
            )

    def describe_late(self, r: RoundState, ranks: Sequence[int]) -> str:
        return self.notifications.describe_late(min(ranks), BEGUN, self.number(r))

    def close(self, coming: Sequence[tuple[int, RoundPlan]] = ()) -> None:
        """Close the groups; abort broken ones, because closing them would wait for other ranks."""
        self._end(self._broken)
        self._inbox = []
        super().close()

    def abandon(self) -> None:
        """Abort the groups: a device never becomes idle while it runs calls that never end."""
        self._end(broken=True)

    def _end(self, broken: bool) -> None:
        close_groups(
            self._groups, [str(slot_streams.device) for slot_streams in self._streams], broken
        )
        self._works = []
        self._groups = []


def _find_shared_gpu(comm: MPI.Intracomm, streams: Sequence[Streams]) -> str:
    """Return a message if two ranks have a slot on one GPU, where NCCL hangs; otherwise "".

    The call is collective.
    """
    on_gpus = [
        slot_streams.device for slot_streams in streams if slot_streams.device.type == "cuda"
    ]
    gpu_ids = [str(getattr(torch.cuda.get_device_properties(d), "uuid", "")) for d in on_gpus]
    seen: dict[str, int] = {}
    for rank, gpus in enumerate(comm.allgather(gpu_ids)):
        for gpu in filter(None, gpus):
            if (first := seen.setdefault(gpu, rank)) != rank:
                a, b = world_ranks(comm, [first, rank])
                return (
                    f"ranks {a} and {b} share a GPU, which NCCL does not support: give each rank "
                    "its own GPUs"
                )
    return ""

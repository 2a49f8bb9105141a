"""GPU memory to other nodes by NCCL, through torch's process groups: one for each slot number.

Both ends of a round know their partners from the graph, so all that a slot sends and receives is
one group of calls. Groups of calls are begun by the main thread, as the node's own collectives
are: kernels that wait for other GPUs must be in the same order on all of them, or two could wait
for each other. Gloo runs the same code on CPUs. Untested between GPUs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from mpi4py import MPI

from mpigossip.cluster.deadline import Deadline, world_ranks
from mpigossip.cluster.process_groups import GroupRank, close_groups, launch_lock, open_groups
from mpigossip.cluster.world import World
from mpigossip.config.errors import Failure, JobError
from mpigossip.mixing.averages import ByRank
from mpigossip.mixing.base import MessageLayout
from mpigossip.mixing.device.memory import TransportUnavailable, device_context
from mpigossip.mixing.device.streams import Streams
from mpigossip.mixing.notifications import BEGUN
from mpigossip.mixing.plan import MessageChunk, RoundPlan, RoundState
from mpigossip.mixing.transports import Transport, inboxes

REMEDY = (
    "NCCL_DEBUG=INFO says what NCCL tried, NCCL_SOCKET_IFNAME names its network; "
    'node.exchange = "host" does without it'
)


class NcclFailed(Failure):
    """NCCL between nodes went wrong: call, ranks and a remedy are named."""


class Nccl(Transport):
    """One chunk a round; the order of calls on a stream frees buffers."""

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
        """Open the groups; collective.

        :raises TransportUnavailable: on all ranks, if one has no memory or no NCCL
        """
        self._streams = streams
        self._broken = False
        self._on_cpu = streams[0].device.type == "cpu"
        areas = inboxes(comm, layout, buffers, [each.device for each in streams])
        self._inbox = [[area[k] for area in areas] for k in range(buffers)]
        names = [str(each.device) for each in streams]
        places = [GroupRank(f"nodes-{k}", world.rank, world.size, d) for k, d in enumerate(names)]
        if shared := _shared(comm, streams):
            raise TransportUnavailable(shared)
        try:
            self._groups = open_groups(world, places, timeout_s)
        except (Failure, JobError) as error:
            raise TransportUnavailable(f"NCCL didn't join the nodes: {error}") from error
        self._works: list[Any] = []
        super().__init__(comm, layout, buffers, timeout_s)

    def begin(self, r: RoundState, memory: Sequence[torch.Tensor]) -> None:
        """Begin to send every slot's message, and to receive those of the sources."""
        slots = range(self.layout.slots)
        out = {(j, s): memory[s] for s in slots for j, _ in r.plan.targets}
        into = {
            (j, s): self._inbox[k][s] for s in slots for k, j in enumerate(r.plan.remote_sources)
        }
        self._begin(out, into)

    def _begin(self, out: ByRank, into: ByRank) -> None:
        """Begin one group of calls a slot, on its stream of what comes in."""
        self._works = []
        if not out and not into:
            return
        try:
            with launch_lock:
                for slot, (group, each) in enumerate(zip(self._groups, self._streams, strict=True)):
                    sent = [(j, memory) for (j, s), memory in out.items() if s == slot]
                    received = [(j, memory) for (j, s), memory in into.items() if s == slot]
                    with device_context(each.device), torch.cuda.stream(each.into):
                        self._works += _calls(group, each.device, sent, received)
            if not self._on_cpu:
                for work, each in zip(self._works, self._streams, strict=True):
                    with device_context(each.device), torch.cuda.stream(each.into):
                        work.wait()  # holds the stream, not this thread
        except RuntimeError as error:
            raise self._failing(error) from error

    def _failing(self, error: Exception) -> NcclFailed:
        self._broken = True
        return NcclFailed(f"NCCL send and recv between nodes failed: {error}; {REMEDY}")

    def send(
        self, r: RoundState, chunk: MessageChunk, memory: Sequence[torch.Tensor]
    ) -> list[MPI.Request]:
        """Nothing: it was sent at the round's beginning."""
        return []

    def notify(self, r: RoundState, chunk: MessageChunk) -> None:
        """Notify the readers, which only says that this end may be waited for."""
        self.notifications.send([rank for rank, _ in r.plan.targets], BEGUN, self.number(r, chunk))

    def arrived(self, r: RoundState, source: int, chunk: MessageChunk) -> bool:
        """Return whether the source has begun; a late one is named by that."""
        return self.notifications.arrived(source, BEGUN, self.number(r, chunk))

    def received(self, r: RoundState, buffer: int) -> Sequence[torch.Tensor]:
        """Wait until all of the round is done; return for each slot an inbox buffer."""
        self._settle(
            f"round {r.t}", [*r.plan.remote_sources, *(rank for rank, _ in r.plan.targets)]
        )
        return self._inbox[buffer]

    def _settle(self, what: str, ranks: Sequence[int]) -> float:
        """Wait until all work that was started is done.

        :raises WaitTimeoutError: with the names of the ranks on which it is late
        """

        def late() -> str:
            self._broken = True
            named = ", ".join(map(str, world_ranks(self.comm, sorted(set(ranks)))))
            return f"{what}: NCCL isn't done with rank {named}; {REMEDY}"

        return Deadline(self.timeout_s).wait(
            self._done, late, awaited_ranks=lambda: world_ranks(self.comm, ranks)
        )

    def _done(self) -> bool:
        try:
            for work in [*self._works]:
                if self._on_cpu:  # gloo completes in wait() alone
                    work.wait()
                elif not work.is_completed():
                    return False
                self._works.remove(work)
        except RuntimeError as error:
            raise self._failing(error) from error
        return True

    def swap(self, out: ByRank, into: ByRank) -> float:
        self._begin(out, into)
        return self._settle("an average", ()) if self._on_cpu else 0.0

    def wait_for_swaps(self, what: str) -> None:
        self._settle(what, range(self.comm.size))

    def release(self, r: RoundState, coming: RoundPlan) -> None:
        if self._works:
            self.notifications.waited += self._settle(
                f"round {r.t}", [j for j, _ in r.plan.targets]
            )

    def describe_late(self, r: RoundState, ranks: Sequence[int]) -> str:
        return self.notifications.describe_late(min(ranks), BEGUN, self.number(r))

    def close(self, coming: Sequence[tuple[int, RoundPlan]] = ()) -> None:
        """End the groups; broken ones are cut off, as their end would wait for others."""
        self._end(self._broken)
        self._inbox = []
        super().close()

    def abandon(self) -> None:
        """Cut off the groups: a device with calls that never end is never done."""
        self._end(broken=True)

    def _end(self, broken: bool) -> None:
        close_groups(self._groups, [str(each.device) for each in self._streams], broken)
        self._works = []
        self._groups = []


def _calls(group: Any, device: torch.device, sent: list, received: list) -> list[Any]:
    """Begin a slot's sends and receives; what their completion is seen by."""
    if device.type == "cpu":  # gloo knows no groups of calls
        works = [group.recv([memory], j, 0) for j, memory in received]
        return works + [group.send([memory], j, 0) for j, memory in sent]
    group._start_coalescing(device)
    for j, memory in received:
        group.recv([memory], j, 0)
    for j, memory in sent:
        group.send([memory], j, 0)
    return [group._end_coalescing(device)]


def _shared(comm: MPI.Intracomm, streams: Sequence[Streams]) -> str:
    """Return which two ranks have a slot on one GPU, at which NCCL hangs; "" where none do."""
    on_gpus = [each.device for each in streams if each.device.type == "cuda"]
    found = [str(getattr(torch.cuda.get_device_properties(d), "uuid", "")) for d in on_gpus]
    seen: dict[str, int] = {}
    for rank, gpus in enumerate(comm.allgather(found)):
        for gpu in filter(None, gpus):
            if (first := seen.setdefault(gpu, rank)) != rank:
                a, b = world_ranks(comm, [first, rank])
                return (
                    f"ranks {a} and {b} share a GPU, which NCCL can't join with itself: give each "
                    "rank GPUs of its own"
                )
    return ""

"""GPU memory to other nodes by NCCL, where MPI can't reach it; MPI still carries the tokens.

Both ends of a round know their partners from the graph, so all that a node sends and receives is
one group of NCCL calls. Groups are begun by the thread that trains, as the node's own collectives
are: kernels that wait for other GPUs stand in the same order on all of them, or two could wait for
each other. What arrives is summed as by every other route, so the bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from mpi4py import MPI

from mpigossip.cluster.deadline import Deadline, LateError, numbers
from mpigossip.config.errors import Failure
from mpigossip.mixing.averages import Swap
from mpigossip.mixing.device.memory import MemoryRefused, current
from mpigossip.mixing.device.push import BySlot, Inboxes, Lane, on
from mpigossip.mixing.host.push import ARRIVED, CUT, FREE
from mpigossip.mixing.notifications import Signals, Tokens
from mpigossip.mixing.progress_thread import Courier

PROBE = 1 << 16
"""Bytes that the proof sends to the next rank."""
PROOF_S = 60.0
"""Seconds that NCCL has to join the nodes at start."""
REMEDY = (
    "NCCL_DEBUG=INFO says what NCCL tried, NCCL_SOCKET_IFNAME names its network; "
    'node.gpu_window = "host" does without it'
)
Moves = Mapping[tuple[int, int], torch.Tensor]
"""Contiguous memory on a slot's device, by slot and the other rank."""


class NcclFailed(Failure):
    """NCCL between nodes went wrong: call, ranks and a remedy are named."""


def _library(device: torch.device) -> Any:
    """CuPy's NCCL; MemoryRefused where there is none."""
    if device.type == "cpu":
        raise MemoryRefused(f"NCCL moves memory of GPUs, not of the {device}")
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise MemoryRefused(f"NCCL is called through CuPy, which isn't there ({error})") from error
    if not nccl.available:
        raise MemoryRefused("this CuPy finds no NCCL; pip install 'mpigossip[gpu]' brings it")
    return nccl


def _gpu(device: torch.device) -> str:
    """What a GPU is called on its host, by every process."""
    import cupy

    return cupy.cuda.runtime.deviceGetPCIBusId(device.index)


def _shared(comm: MPI.Comm, places: Sequence[tuple[str, list[str]]]) -> str:
    """Which two ranks have a slot on the same GPU, which NCCL refuses or hangs at; "" where none.

    ``places``: by rank the host and the GPU of each slot.
    """
    seen: dict[tuple[int, str, str], int] = {}
    for rank, (host, gpus) in enumerate(places):
        for slot, gpu in enumerate(gpus):
            first = seen.setdefault((slot, host, gpu), rank)
            if first != rank:
                pair = numbers(comm, [first, rank])
                return (
                    f"ranks {pair[0]} and {pair[1]} share GPU {gpu} of {host}, which NCCL can't "
                    "join with itself: give each rank GPUs of its own"
                )
    return ""


class Links:
    """A communicator a slot over the ranks; bytes to and from others in groups of calls."""

    def __init__(self, comm: MPI.Intracomm, lanes: Sequence[Lane], timeout_s: float):
        """Join the ranks and prove it by a message to the next one; collective.

        Raises MemoryRefused on all ranks where it isn't done on one, for whatever reason.
        """
        self._comm, self._lanes, self._timeout_s = comm, lanes, timeout_s
        self._comms: list[Any] = []
        self._behind: list[torch.cuda.Event] = []
        self._reached: set[tuple[str, int]] = set()
        self._broken = False
        self._agreed(self._look)
        tickets = [self._nccl.get_unique_id() for _ in lanes] if comm.rank == 0 else None
        tickets = comm.bcast(tickets)
        self._agreed(lambda: self._given_up(lambda: self._join(tickets), PROOF_S, "join the nodes"))

    def _agreed(self, work: Callable[[], object]) -> None:
        """Do it on all ranks, or raise MemoryRefused on all of them."""
        refused = ""
        try:
            work()
        except (RuntimeError, KeyError, LateError, NcclFailed) as error:  # KeyError: see `_failing`
            refused = str(error) or type(error).__name__
            self._broken = True
        reasons = [text for text in self._comm.allgather(refused) if text]
        if reasons:
            self._broken = True
            self.close()
            raise MemoryRefused("; ".join(dict.fromkeys(reasons)))

    def _look(self) -> None:
        refused, gpus = "", list[str]()
        try:
            self._nccl = _library(self._lanes[0].device)
            gpus = [_gpu(lane.device) for lane in self._lanes]
        except MemoryRefused as error:
            refused = str(error)
        places = self._comm.allgather((MPI.Get_processor_name(), gpus))
        if refused or (refused := _shared(self._comm, places)):
            raise MemoryRefused(refused)

    def _given_up(self, work: Callable[[], object], seconds: float, what: str) -> None:
        """Work in a thread that is left alone when it doesn't come back: NCCL has no deadline."""
        courier = Courier(self._comm, threaded=True, poll=False, timeout_s=seconds / 2.5)
        try:
            courier.wait(courier.submit(work), what)
        except LateError:
            self._broken = True
            raise NcclFailed(f"NCCL didn't {what} within {seconds:g} s; {REMEDY}") from None
        finally:
            courier.close()

    def _join(self, tickets: Sequence[tuple]) -> None:
        size, rank = self._comm.size, self._comm.rank
        for lane, ticket in zip(self._lanes, tickets, strict=True):
            with current(lane.device):
                self._comms.append(self._nccl.NcclCommunicator(size, ticket, rank))
        left, right = (rank - 1) % size, (rank + 1) % size
        rooms = []
        for lane in self._lanes:
            with current(lane.device), on(lane.into):
                room = torch.empty(2, PROBE, dtype=torch.uint8, device=lane.device)
                rooms.append(room.fill_(rank % 251 + 1))
        self._group(
            {(slot, right): room[0] for slot, room in enumerate(rooms)},
            {(slot, left): room[1] for slot, room in enumerate(rooms)},
        )
        self.settle("the proof of NCCL", [left, right])
        for lane, room in zip(self._lanes, rooms, strict=True):
            with current(lane.device), on(lane.into):
                right_bytes = bool((room[1] == left % 251 + 1).all())
            if not right_bytes:
                raise NcclFailed(f"NCCL brought wrong bytes to {room.device}; {REMEDY}")

    def _failing(self, call: str, error: Exception) -> NcclFailed:
        """CuPy raises NcclError, or KeyError of a code that it has no name for."""
        self._broken = True
        return NcclFailed(f"NCCL {call} between nodes failed: {error}; {REMEDY}")

    def swap(self, out: Moves, into: Moves) -> None:
        """Begin to send ``out`` and to fill ``into``, on the lanes' streams for what comes in.

        One group of calls, by the thread that trains. All ranks have to begin theirs.
        """
        ranks = {("to", rank) for _, rank in out} | {("from", rank) for _, rank in into}
        if ranks <= self._reached:
            self._group(out, into)
            return
        # the first message of a pair opens a connection, for which NCCL holds up who calls it
        what = f"reach rank {self._called([rank for _, rank in ranks])}"
        self._given_up(lambda: self._group(out, into), self._timeout_s, what)
        self._reached |= ranks

    def _called(self, ranks: Sequence[int]) -> str:
        return ", ".join(map(str, numbers(self._comm, sorted(set(ranks)))))

    def _group(self, out: Moves, into: Moves) -> None:
        nccl = self._nccl
        try:
            nccl.groupStart()
            try:
                for call, moves in (("send", out), ("recv", into)):
                    for (slot, rank), memory in moves.items():
                        self._call(call, slot, rank, memory)
            finally:
                nccl.groupEnd()
        except (RuntimeError, KeyError) as error:
            raise self._failing("send and recv", error) from error
        self._behind = [event for lane in self._lanes if (event := lane.summed())]

    def _call(self, call: str, slot: int, rank: int, memory: torch.Tensor) -> None:
        lane, begin, end = self._lanes[slot], memory.data_ptr(), memory.nbytes
        with current(lane.device):
            for at in range(0, end, CUT):
                count, stream = min(CUT, end - at), lane.into.cuda_stream
                act = getattr(self._comms[slot], call)
                act(begin + at, count, self._nccl.NCCL_UINT8, rank, stream)

    def settle(self, what: str, ranks: Sequence[int]) -> None:
        """Wait until what was begun is done; LateError names the ranks where it isn't in time."""

        def late() -> str:
            self._broken = True
            return f"{what}: NCCL isn't done with rank {self._called(ranks)}; {REMEDY}"

        Deadline(self._timeout_s).wait(self._done, late, whom=lambda: numbers(self._comm, ranks))

    def _done(self) -> bool:
        try:
            for comm in self._comms:
                comm.check_async_error()
            return all(event.query() for event in self._behind)
        except (RuntimeError, KeyError) as error:
            raise self._failing("send and recv", error) from error

    def close(self) -> None:
        """End the communicators; broken ones are cut off, as their end would wait for others."""
        self._behind = []
        while self._comms:
            comm = self._comms.pop()
            _ = comm.abort() if self._broken else comm.destroy()


class NcclPush:
    """Inboxes on every slot's device that NCCL fills, between the same tokens as MPI's puts.

    Contract: :class:`mpigossip.mixing.stream.Route`, and :meth:`swap`.
    """

    def __init__(
        self, comm: MPI.Intracomm, layout: BySlot, lanes: Sequence[Lane], places: int,
        timeout_s: float,
    ):  # fmt: skip
        """Collective. Raises MemoryRefused, on all ranks, where one has no room or no NCCL."""
        self._inboxes = Inboxes(comm, layout, lanes, places)
        self.links = Links(comm, lanes, timeout_s)
        self.signals = Signals(Tokens(comm, timeout_s), ARRIVED, FREE)
        self.inbox = self._inboxes.of
        self._partners: Sequence[int] = ()

    def swap(self, slot: int) -> Swap:
        """What begins to bring arrays of a slot's device to other ranks and theirs here."""

        def swap(out: dict[int, torch.Tensor], into: dict[int, torch.Tensor]) -> float:
            moves = [{(slot, j): memory for j, memory in by.items()} for by in (out, into)]
            self.links.swap(*moves)
            return 0.0

        return swap

    def begin(
        self, memory: Sequence[torch.Tensor], targets: Sequence[tuple[int, int]],
        sources: Sequence[int], count: int,
    ) -> None:  # fmt: skip
        """Begin to send every slot's message, and to take in those of the sources."""
        slots = range(len(memory))
        self._partners = [*sources, *(rank for rank, _ in targets)]
        self.links.swap(
            {(slot, rank): memory[slot] for slot in slots for rank, _ in targets},
            {(slot, rank): self.inbox(count, place, slot)
             for slot in slots for place, rank in enumerate(sources)},
        )  # fmt: skip

    def put(self, *_: object) -> Sequence[MPI.Request]:
        """Nothing: it was sent at the round's beginning."""
        return ()

    def sent(self, targets: Sequence[tuple[int, int]], number: int) -> None:
        """Tell the targets, which only says that this end may be waited for."""
        self.signals.tell([rank for rank, _ in targets], number)

    def sync(self, number: int) -> None:
        """Wait for the round's messages; a late rank was named by its token's absence."""
        self.links.settle(f"round {self.signals.round(number)}", self._partners)

    def close(self) -> None:
        """End the communicators, free the memory; collective."""
        self.links.close()
        self._inboxes.memory = []
        self.signals.close()

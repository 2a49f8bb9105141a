"""Transport by MPI_Isend and MPI_Irecv.

Their requests can be abandoned at any time, also after a rank failure. The alternative, MPI
windows, does not allow this: a flush to a failed rank may never return, and a window that was
opened with a failed rank can't be freed.
"""

from collections.abc import Callable, Sequence

import torch
from mpi4py import MPI

from mpigossip.mixing.base import MessageLayout
from mpigossip.mixing.device.memory import device_context, flush_rdma_writes, message_memory
from mpigossip.mixing.exact_average import CUT, raw
from mpigossip.mixing.notifications import called, wait_all
from mpigossip.mixing.plan import MessageChunk, RoundPlan, RoundState
from mpigossip.mixing.transports import Transport, inboxes

ROUNDS = 1 << 14
FIRST_TAG = 64
"""The tag of a message is `FIRST_TAG` plus its round modulo `ROUNDS`, so that messages of different
rounds never mix. MPI guarantees tags up to 32,767."""


class Messages(Transport):
    """Transport by messages into inbox buffers on the host or on GPUs.

    The receives are posted at the beginning of a round.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        layout: MessageLayout,
        buffers: int,
        timeout_s: float,
        *,
        devices: Sequence[torch.device] = (),
        hosts: Sequence[str] = (),
    ):
        """Allocate the inbox buffers; collective.

        :param comm: communicator of the nodes
        :param layout: layout of a node's message
        :param buffers: largest number of in-neighbours that send to this rank in one round
        :param timeout_s: time limit of each wait, in seconds
        :param devices: devices of the slots' buffers; empty: host memory
        :param hosts: names of the ranks' hosts, for error messages
        :raises TransportUnavailable: on all ranks, if the allocation fails on one
        """
        self._devices = devices or [torch.device("cpu")] * layout.slots
        self.on_device = bool(devices)
        self._hosts = hosts
        self.allocate = message_memory
        areas = inboxes(comm, layout, buffers, self._devices, message_memory)
        self._inbox = [[area[k] for area in areas] for k in range(buffers)]
        self.memory = () if devices else [area.view(-1) for area in areas]
        self._receives: dict[tuple[int, int], list[MPI.Request]] = {}
        self._sends: dict[tuple[int, int], MPI.Request] = {}
        self._reached: dict[int, int] = {}
        super().__init__(comm, layout, buffers, timeout_s)

    def begin(self, r: RoundState, memory: Sequence[torch.Tensor]) -> None:
        for rank, areas in zip(r.plan.remote_sources, self._inbox, strict=False):
            for chunk in self.chunks:
                requests = self._post(self.comm.Irecv, r, chunk, areas, rank)
                self._receives[rank, chunk.number] = requests

    def _post(
        self,
        call: Callable,
        r: RoundState,
        chunk: MessageChunk,
        areas: Sequence[torch.Tensor],
        rank: int,
    ) -> list[MPI.Request]:
        """Send or receive a chunk of each slot, in pieces of at most `CUT` bytes.

        The device of the slot is current during the call.

        :param call: ``Isend`` or ``Irecv`` of the communicator
        :param r: state of the round, which determines the tag
        :param chunk: chunk of the message
        :param areas: for each slot, the memory of its whole message
        :param rank: the other rank
        """
        tag = FIRST_TAG + r.t % ROUNDS
        span = chunk.span
        requests = []
        for area, device in zip(areas, self._devices, strict=True):
            with device_context(device):
                for begin in range(span.start, span.stop, CUT):
                    piece = raw(area[begin : min(begin + CUT, span.stop)])
                    requests.append(call([piece, MPI.BYTE], rank, tag))
        return requests

    def send(
        self, r: RoundState, chunk: MessageChunk, memory: Sequence[torch.Tensor]
    ) -> list[MPI.Request]:
        """Begin to send.

        :meth:`release` waits until it is complete, so that a slow out-neighbour can't delay this
        round. The list of requests is therefore empty.
        """
        for rank, _ in r.plan.targets:
            for request in self._post(self.comm.Isend, r, chunk, memory, rank):
                self._sends[rank, len(self._sends)] = request
        return []

    def arrived(self, r: RoundState, source: int, chunk: MessageChunk) -> bool:
        key = source, chunk.number
        # test them one by one, because Testall would hide a rank failure behind MPI_ERR_IN_STATUS
        if not all([request.Test() for request in self._receives[key]]):
            return False
        del self._receives[key]
        self._reached[source] = r.t
        return True

    def received(self, r: RoundState, buffer: int) -> Sequence[torch.Tensor]:
        for device in self._devices if self.on_device else ():
            flush_rdma_writes(device)
        return self._inbox[buffer]

    def release(self, r: RoundState, coming: RoundPlan) -> None:
        if self._sends:
            self.notifications.waited += wait_all(
                self._sends,
                self.timeout_s,
                lambda key: self._describe(key[0], "does not receive the model"),
                comm=self.comm,
            )

    def pending(self, r: RoundState) -> list[MPI.Request]:
        # without complete requests, which would end each sleep at once
        return [request for requests in self._receives.values() for request in requests if request]

    def describe_late(self, r: RoundState, ranks: Sequence[int]) -> str:
        return self._describe(min(ranks), f"has not sent its model of round {r.t}")

    def _describe(self, rank: int, fault: str) -> str:
        reached = self._reached.get(rank)
        last = "no message yet" if reached is None else f"last message in round {reached}"
        location = f" on {self._hosts[rank]}" if self._hosts else ""
        return f"{called(self.comm, rank)}{location} {fault} ({last})"

    def close(self, coming: Sequence[tuple[int, RoundPlan]] = ()) -> None:
        self._inbox = []
        super().close()

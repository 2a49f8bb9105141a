"""Collective operations with deadlines: gather, broadcast, barrier, agreement, user errors."""

import contextlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from mpigossip.cluster import deadline
from mpigossip.cluster.deadline import Deadline
from mpigossip.cluster.process import check_process
from mpigossip.cluster.world import Agreement, World
from mpigossip.config import JobError
from mpigossip.config.readable import abbreviate

if TYPE_CHECKING:
    from mpi4py import MPI


def with_timeout(comm: Any, timeout_s: float) -> Any:
    """The same communicator, whose blocking calls have a limit."""
    from mpigossip.cluster.collectives import TimeoutComm

    return TimeoutComm.of(comm, timeout_s)


class CollectiveError(JobError):
    """A mistake that every rank has learnt of: all raise it, so that closing together is safe."""


class Communicator(World):
    """The ranks of one communicator."""

    def __init__(self, comm: "MPI.Intracomm", hosts: tuple[str, ...], timeout_s: float):
        """`comm` belongs to this object from now on."""
        self.comm = comm
        self.rank = comm.rank
        self.size = comm.size
        self.hosts = hosts
        self.timeout_s = timeout_s
        self._agreement_comm = self._closing = (
            comm  # that agreements are begun on, and that `settle` uses
        )
        self._family = [comm]  # all are revoked when a rank is lost
        self._pending_agreements: list[Agreement] = []
        self._begun = 0  # agreements so far

    def gather(self, value: Any) -> list | None:
        """Return all ranks' values in rank order on rank 0, None elsewhere; collective.

        :param value: a small value that can be pickled
        """
        with deadline.calling_unless("gather()", self.whole):
            return with_timeout(self.comm, self.timeout_s).gather(value)

    def broadcast(self, value: Any) -> Any:
        with deadline.calling_unless("broadcast()", self.whole):
            return with_timeout(self.comm, self.timeout_s).bcast(value)

    def start_agree(self, flag: int) -> Agreement:
        from mpi4py import MPI

        check_process()
        value = np.array([flag], np.int64)
        request = self._agreement_comm.Iallreduce(MPI.IN_PLACE, value, MPI.MAX)
        agreement = Agreement(value, request, self.timeout_s)
        # one that is given up must keep its buffer, and `settle` waits for it
        self._pending_agreements = [one for one in self._pending_agreements if not one.ready()] + [
            agreement
        ]
        self._begun += 1
        return agreement

    def drain_agreements(self) -> None:
        """Bring every agreement to an end, also those that only some ranks began; collective.

        A communicator that is freed before leaves messages to the one that gets its number next.
        """
        from mpi4py import MPI

        check_process()
        most = np.array([self._begun], np.int64)
        # as at the end of a program: one may have work left, and who has none waits
        Agreement(most, self._closing.Iallreduce(MPI.IN_PLACE, most, MPI.MAX), math.inf).read()
        for _ in range(self._begun, int(most[0])):
            self.start_agree(0)
        for one in self._pending_agreements:
            one.read()

    @contextlib.contextmanager
    def raise_together(self, *mistakes: type[Exception]) -> Iterator[None]:
        """All ranks leave this block with the same mistake, or none.

        What a user got wrong may show on some ranks only (a file missing on one host): those
        exceptions become one JobError, raised on every rank, that says which ranks found what.
        No rank may meet another inside the block.
        """
        check_process()
        mine: list[str] = []
        try:
            yield
        except mistakes as error:
            mine = list(getattr(error, "messages", None) or [str(error)])
        found: dict[str, list[int]] = {}
        for rank, messages in enumerate(with_timeout(self.comm, self.timeout_s).allgather(mine)):
            for message in messages:
                found.setdefault(message, []).append(rank)
        if found:
            raise CollectiveError(
                [self._located(message, ranks) for message, ranks in found.items()]
            )

    def _located(self, message: str, ranks: list[int]) -> str:
        if len(ranks) == self.size:
            return message
        return (
            f"{abbreviate([f'rank {rank} on {self.hosts[rank]}' for rank in ranks], 1)}: {message}"
        )

    def barrier(self) -> None:
        check_process()
        request = self.comm.Ibarrier()
        with deadline.calling_unless("barrier()", self.whole):
            Deadline(self.timeout_s).wait(
                request.Test,
                lambda: f"not all of {self.size} ranks came to a barrier",
                awaited_ranks=tuple,
            )

    def duplicate(self) -> "MPI.Intracomm":
        self._family = [comm for comm in self._family if comm]
        self._family.append(with_timeout(self.comm, self.timeout_s).Dup())
        return self._family[-1]

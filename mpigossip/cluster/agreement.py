"""What the ranks of a communicator do together: reports, agreement, mistakes; all by a deadline."""

import contextlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from mpigossip.cluster.deadline import Deadline
from mpigossip.cluster.process import TIMEOUT_S
from mpigossip.config import JobError

if TYPE_CHECKING:
    from mpi4py import MPI


def limited(comm: Any, timeout_s: float) -> Any:
    """The same communicator, whose blocking calls have a limit."""
    from mpigossip.cluster.collectives import Comm

    return Comm.of(comm, timeout_s)


class AgreedError(JobError):
    """A mistake that every rank has learnt of: all raise it, so that closing together is safe."""


class Agreement:
    """A maximum over ranks on its way: asked for at one step, read some steps later."""

    def __init__(
        self, value: np.ndarray, request: "MPI.Request | None", timeout_s: float = TIMEOUT_S
    ):
        self._value, self._request, self._timeout_s = value, request, timeout_s

    def ready(self) -> bool:
        """Whether `read` returns at once."""
        return self._request is None or self._request.Test()

    def read(self) -> int:
        """The maximum, the same on every rank; waits for it, LateError at the time limit."""
        Deadline(self._timeout_s).wait(
            self.ready, lambda: "not all ranks came to an agreement", whom=tuple
        )
        return int(self._value[0])


class Meetings:
    """The ranks of one communicator: the collective part of `world.World`.

    Attributes: `comm`, `rank`, `size`, `hosts` (host name of each rank), `timeout_s`.
    """

    survives = False
    beside = (0, 1)

    def __init__(self, comm: "MPI.Intracomm", hosts: tuple[str, ...], timeout_s: float):
        """`comm` belongs to this object from now on."""
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.hosts, self.timeout_s = hosts, timeout_s
        self._votes = self._closing = comm  # that agreements are begun on, and that `settle` uses
        self._family = [comm]  # all are revoked when a rank is lost
        self._asked: list[Agreement] = []
        self._begun = 0  # agreements so far

    def gather(self, value: Any) -> list | None:
        """All ranks' values in rank order on rank 0, None elsewhere. Pickles: for small reports."""
        return limited(self.comm, self.timeout_s).gather(value)

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value on every rank. Pickles."""
        return limited(self.comm, self.timeout_s).bcast(value)

    def start_agree(self, flag: int) -> Agreement:
        """Begins the maximum of all ranks' flags without waiting; read it some steps later."""
        from mpi4py import MPI

        value = np.array([flag], np.int64)
        request = self._votes.Iallreduce(MPI.IN_PLACE, value, MPI.MAX)
        agreement = Agreement(value, request, self.timeout_s)
        # one that is given up must keep its buffer, and `settle` waits for it
        self._asked = [one for one in self._asked if not one.ready()] + [agreement]
        self._begun += 1
        return agreement

    def settle(self) -> None:
        """Bring every agreement to an end, also those that only some ranks began; collective.

        A communicator that is freed before leaves messages to the one that gets its number next.
        """
        from mpi4py import MPI

        most = np.array([self._begun], np.int64)
        # as at the end of a program: one may have work left, and who has none waits
        Agreement(most, self._closing.Iallreduce(MPI.IN_PLACE, most, MPI.MAX), math.inf).read()
        for _ in range(self._begun, int(most[0])):
            self.start_agree(0)
        for one in self._asked:
            one.read()

    def agree(self, flag: int) -> int:
        """The maximum of all ranks' flags; waits for all."""
        return self.start_agree(flag).read()

    @contextlib.contextmanager
    def together(self, *mistakes: type[Exception]) -> Iterator[None]:
        """All ranks leave this block with the same mistake, or none.

        What a user got wrong may show on some ranks only (a file missing on one host): those
        exceptions become one JobError, raised on every rank, that says which ranks found what.
        No rank may meet another inside the block.
        """
        mine: list[str] = []
        try:
            yield
        except mistakes as error:
            mine = list(getattr(error, "messages", None) or [str(error)])
        found: dict[str, list[int]] = {}
        for rank, messages in enumerate(limited(self.comm, self.timeout_s).allgather(mine)):
            for message in messages:
                found.setdefault(message, []).append(rank)
        if found:
            raise AgreedError([self._located(message, ranks) for message, ranks in found.items()])

    def _located(self, message: str, ranks: list[int]) -> str:
        if len(ranks) == self.size:
            return message
        more = f" and {len(ranks) - 1} more" if len(ranks) > 1 else ""
        return f"rank {ranks[0]} on {self.hosts[ranks[0]]}{more}: {message}"

    def barrier(self) -> None:
        """Returns when every rank has come; LateError at the time limit."""
        request = self.comm.Ibarrier()
        Deadline(self.timeout_s).wait(
            request.Test, lambda: f"not all of {self.size} ranks came to a barrier", whom=tuple
        )

    def duplicate(self) -> "MPI.Intracomm":
        """A communicator of the same ranks that is given up with this world's; collective."""
        self._family = [comm for comm in self._family if comm]
        self._family.append(limited(self.comm, self.timeout_s).Dup())
        return self._family[-1]

"""World of the ranks of one MPI communicator; its collective calls have a time limit."""

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
    """Return ``comm`` as a `TimeoutComm` with a time limit of ``timeout_s`` seconds."""
    from mpigossip.cluster.collectives import TimeoutComm

    return TimeoutComm.of(comm, timeout_s)


class CollectiveError(JobError):
    """User error that all ranks raise together, so that closing the world is safe."""


class Communicator(World):
    """A world of the ranks of one MPI communicator, or of this rank only while it is isolated."""

    def __init__(self, comm: "MPI.Intracomm", hosts: tuple[str, ...], timeout_s: float):
        """Create a world of the ranks of ``comm``.

        :param comm: communicator of the ranks, which only this object uses from now on; a subclass
            frees it
        :param hosts: host name of each rank
        :param timeout_s: time limit of a collective call, in seconds
        """
        self.comm = comm
        self.rank = comm.rank
        self.size = comm.size
        self.hosts = hosts
        self.timeout_s = timeout_s
        self._agreement_comm = comm
        """Communicator on which agreements are started."""
        self._closing = comm
        """Communicator on which :meth:`drain_agreements` compares the numbers of agreements."""
        self._family = [comm]
        """Communicators that are revoked after a rank failure."""
        self._pending_agreements: list[Agreement] = []
        self._begun = 0
        """Number of agreements that this rank has started so far."""

    def gather(self, value: Any) -> list | None:
        """Return the values of all ranks, in rank order, on rank 0, and None elsewhere; collective.

        :param value: a small object that can be pickled
        :raises WaitTimeoutError: if some rank does not call this in time (`bounded_call`)
        """
        if self.isolated:
            return super().gather(value)
        with deadline.calling_unless("gather()", self.whole):
            return with_timeout(self.comm, self.timeout_s).gather(value)

    def broadcast(self, value: Any) -> Any:
        if self.isolated:
            return super().broadcast(value)
        with deadline.calling_unless("broadcast()", self.whole):
            return with_timeout(self.comm, self.timeout_s).bcast(value)

    def start_agree(self, flag: int) -> Agreement:
        if self.isolated:
            return super().start_agree(flag)
        from mpi4py import MPI

        check_process()
        value = np.array([flag], np.int64)
        request = self._agreement_comm.Iallreduce(MPI.IN_PLACE, value, MPI.MAX)
        agreement = Agreement(value, request, self.timeout_s)
        # MPI may still write to an abandoned agreement: keep it until `drain_agreements` has waited
        # for it.
        self._pending_agreements = [
            pending for pending in self._pending_agreements if not pending.ready()
        ] + [agreement]
        self._begun += 1
        return agreement

    def drain_agreements(self) -> None:
        """Complete all agreements; collective.

        This rank first starts the agreements that only other ranks have started. If the
        communicator were freed earlier, its messages could reach the next communicator with the
        same context ID. The wait for the number of agreements has no time limit.

        :raises WaitTimeoutError: if an agreement is not complete at its time limit
        """
        from mpi4py import MPI

        check_process()
        highest_count = np.array([self._begun], np.int64)
        # Wait without a limit: another rank may still be working before it closes its world.
        Agreement(
            highest_count, self._closing.Iallreduce(MPI.IN_PLACE, highest_count, MPI.MAX), math.inf
        ).read()
        for _ in range(self._begun, int(highest_count[0])):
            self.start_agree(0)
        for agreement in self._pending_agreements:
            agreement.read()

    @contextlib.contextmanager
    def raise_together(self, *error_types: type[Exception]) -> Iterator[None]:
        """Return a context manager that raises any rank's user errors on all ranks; collective.

        A user error may occur on some ranks only, for example if a file is missing on one host. All
        ranks then raise one error, which contains each message once, with the ranks that it comes
        from. The block itself must not contain collective calls, and no other exception may leave
        it on some ranks only, because the others would wait for these ranks.

        :param error_types: types of the exceptions to combine; other exceptions are not caught
        :raises CollectiveError: on all ranks, if any rank has raised one of these exceptions
        :raises WaitTimeoutError: if some rank does not leave the block in time (`bounded_call`)
        """
        if self.isolated:
            with super().raise_together(*error_types):
                yield
            return
        check_process()
        local_messages: list[str] = []
        try:
            yield
        except error_types as error:
            local_messages = list(getattr(error, "messages", None) or [str(error)])
        ranks_by_message: dict[str, list[int]] = {}
        for rank, messages in enumerate(
            with_timeout(self.comm, self.timeout_s).allgather(local_messages)
        ):
            for message in messages:
                ranks_by_message.setdefault(message, []).append(rank)
        if ranks_by_message:
            raise CollectiveError(
                [self._located(message, ranks) for message, ranks in ranks_by_message.items()]
            )

    def _located(self, message: str, ranks: list[int]) -> str:
        """Return ``message``, preceded by the first of ``ranks`` and the number of the others.

        If ``ranks`` are all ranks, the message is returned unchanged.
        """
        if len(ranks) == self.size:
            return message
        return (
            f"{abbreviate([f'rank {rank} on {self.hosts[rank]}' for rank in ranks], 1)}: {message}"
        )

    def barrier(self) -> None:
        if self.isolated:
            return
        check_process()
        request = self.comm.Ibarrier()
        with deadline.calling_unless("barrier()", self.whole):
            Deadline(self.timeout_s).wait(
                request.Test,
                lambda: f"not all of {self.size} ranks have reached a barrier",
                awaited_ranks=tuple,
            )

    def duplicate(self) -> "MPI.Intracomm":
        self._family = [comm for comm in self._family if comm]
        self._family.append(with_timeout(self.comm, self.timeout_s).Dup())
        return self._family[-1]

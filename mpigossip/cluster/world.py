"""The interface of a world, which is a group of ranks, and a world of one process.

This module does not use MPI.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from mpigossip.cluster import deadline
from mpigossip.cluster.deadline import Deadline
from mpigossip.cluster.local_devices import check_other_accelerators, first_device
from mpigossip.cluster.process import TIMEOUT_S

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI


class Agreement:
    """Maximum over all ranks that is in flight, started at one step and read some steps later."""

    def __init__(
        self, value: np.ndarray, request: MPI.Request | None, timeout_s: float = TIMEOUT_S
    ):
        """Create an agreement from a reduction that has been started.

        :param value: array of one integer that the maximum is written to
        :param request: request of the reduction into ``value``; None: ``value`` is final
        :param timeout_s: seconds that :meth:`read` waits
        """
        self._value = value
        self._request = request
        self._timeout_s = timeout_s

    def ready(self) -> bool:
        """Return whether :meth:`read` would return without waiting."""
        return self._request is None or self._request.Test()

    def read(self) -> int:
        """Wait for the maximum and return it; all ranks get the same value.

        :raises WaitTimeoutError: if the maximum is not complete at the time limit
        """
        Deadline(self._timeout_s).wait(
            self.ready, lambda: "not all ranks have reached an agreement", awaited_ranks=tuple
        )
        return int(self._value[0])


class World:
    """All ranks of a job. This base class is a world of one process without MPI.

    `simulate` uses the base class, in which calls that need other ranks return at once. All methods
    are collective, unless their docstring says otherwise. In a world with MPI, a wait for other
    ranks raises WaitTimeoutError at its time limit, and a call that uses MPI in a fork raises
    JobError.
    """

    rank = 0
    size = 1
    comm: Any = None
    """The mpi4py communicator of these ranks; None without MPI."""
    hosts: tuple[str, ...]
    """Host name of each rank."""
    nodes: Nodes
    """Assignment of ranks to nodes."""
    node_position = (0, 1)
    """In an inter-node world: local rank of this rank, and number of ranks of its node. Otherwise
    (0, 1)."""
    original_ranks: tuple[int, ...] = (0,)
    """Rank of each rank in the world of all ranks, as it was numbered before any rank failure."""
    timeout_s = TIMEOUT_S
    """Seconds after which a wait for another rank fails."""
    whole = False
    """True for the world of all ranks of an MPI job, which all make its calls in the same order."""
    launched = False
    """True if a launcher started this process, even as the only rank."""
    fault_tolerant = False
    """True if this MPI can continue after a rank failure."""
    survives = False
    """True if this run continues after a rank failure."""
    shrunk = False
    """True after a rank failure that this world has survived."""
    isolated = False
    """True while this rank continues its loop after others have left theirs. Until it is reset, by
    `shrink` at the latest, collective calls act as in a world of one process."""
    resources: ExitStack
    """Resources that are closed before the communicators of the world."""
    after_close: ExitStack
    """Callbacks that restore the settings of the process that the world has changed; they are
    called when the world closes."""

    def __init__(self) -> None:
        self.hosts = (socket.gethostname(),)
        self.nodes = Nodes.of_ranks(self)
        self.resources = ExitStack()
        self.after_close = ExitStack()

    def gather(self, value: Any) -> list | None:
        """Return the values of all ranks, in rank order, on rank 0, and None on other ranks.

        :raises WaitTimeoutError: if some rank does not call this in time
        """
        return [value]

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's ``value``, an object that can be pickled, on every rank; collective.

        :raises WaitTimeoutError: if some rank does not call this in time
        """
        return value

    def start_agree(self, flag: int) -> Agreement:
        """Start to compute the maximum of all ranks' ``flag``, and return without waiting.

        :param flag: an integer or bool
        :return: the agreement, which is read some steps later
        """
        return Agreement(np.array([flag]), None)

    def agree(self, flag: int) -> int:
        """Wait for all ranks and return the maximum of their flags.

        :param flag: an integer or bool
        :raises WaitTimeoutError: if some rank has not called it at the time limit
        """
        with deadline.calling_unless("agree()", self.whole and not self.isolated):
            return self.start_agree(flag).read()

    @contextmanager
    def raise_together(self, *error_types: type[Exception]) -> Iterator[None]:
        """Return a context manager that raises the user errors of any rank on all ranks.

        In a world of one process, it has no effect.

        :param error_types: types of the exceptions to raise on all ranks
        :raises CollectiveError: on all ranks, if any rank has raised one of these exceptions
        """
        yield

    def barrier(self) -> None:
        """Wait until all ranks have called this method.

        :raises WaitTimeoutError: if some rank has not called it at the time limit
        """

    def duplicate(self) -> Any:
        """Return a new communicator of the same ranks, which the caller may free.

        Without MPI, return None.
        """

    def group_into_nodes(self, ranks_per_node: int | str) -> None:
        """Group the ranks of each host into nodes; collective.

        :param ranks_per_node: number of consecutive ranks of a host that form a node; "host": all
            ranks of a host
        :raises JobError: on all ranks, if the ranks cannot be grouped like this
        :raises RuntimeError: if this world is a part of another world
        """

    def shrink(self) -> None:
        """Turn this world into the world of the survivors of a rank failure.

        All survivors must call this. A world of one process does nothing.

        :raises WaitTimeoutError: if a survivor does not call this within the time limit
        :raises RuntimeError: if this world is a part of another world
        """

    def is_rank_failure(self, error: BaseException) -> bool:
        """Return whether ``error`` reports a rank failure that the other ranks can survive.

        This call is local.
        """
        return False

    def device(self) -> torch.device:
        """Return this rank's device, and make it current if it is a GPU; local call.

        The ranks of a host divide the GPUs that torch sees, unless the launcher assigns GPUs to
        each rank. If there are more ranks than GPUs, they share them. If torch sees no GPU, the
        device is the CPU. Use this method for loops with one device per rank::

            device = world.device()
            model = Model().to(device)

        :raises JobError: if torch sees Intel GPUs (XPU) only
        """
        import torch

        host = self.hosts[self.rank]
        index = self.hosts[: self.rank].count(host)
        name = first_device(index, self.hosts.count(host))
        if name == "cpu":
            check_other_accelerators()
        else:
            torch.cuda.set_device(name)
        return torch.device(name)

    def abort(self, code: int = 1) -> None:
        """End all ranks immediately with exit code ``code``; any rank may call this alone."""
        os._exit(code)

    def close(self) -> None:
        """Release the resources of the world; further calls have no effect."""
        self.resources.close()
        self.after_close.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


SingleProcess = World
"""Name of :class:`World` where it is constructed as a world of one process without MPI."""


@dataclass(frozen=True)
class Nodes:
    """The nodes that the ranks of a world form."""

    node_of_rank: tuple[int, ...]
    """Node of each rank; nodes are numbered by their first ranks."""
    inter_node: World
    """World of the ranks with this rank's local rank in all nodes: rank i is in node i."""
    intra_node: World | None = None
    """World of the ranks of this rank's node, by local rank; None if the node has one rank."""

    @classmethod
    def of_ranks(cls, world: World) -> Nodes:
        """Make every rank a node, so that the inter-node world is ``world`` itself."""
        return cls(tuple(range(world.size)), world)

    @property
    def count(self) -> int:
        return self.inter_node.size

    @property
    def per_node(self) -> int:
        """Number of ranks in each node."""
        return self.intra_node.size if self.intra_node else 1

    @property
    def local_rank(self) -> int:
        """Local rank of this rank in its node."""
        return self.intra_node.rank if self.intra_node else 0

    @property
    def is_leader(self) -> bool:
        """True if this rank has local rank 0."""
        return self.local_rank == 0

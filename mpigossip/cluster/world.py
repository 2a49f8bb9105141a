"""Contract of a world, the ranks that a run has; and the world of one process.

Nothing here knows MPI.
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
from mpigossip.cluster.process import TIMEOUT_S

if TYPE_CHECKING:
    from mpi4py import MPI


class Agreement:
    """A maximum over ranks on its way: asked for at one step, read some steps later."""

    def __init__(
        self, value: np.ndarray, request: MPI.Request | None, timeout_s: float = TIMEOUT_S
    ):
        """``request``: that of the reduction into ``value``; None: it is done."""
        self._value = value
        self._request = request
        self._timeout_s = timeout_s

    def ready(self) -> bool:
        """Return whether `read` returns at once."""
        return self._request is None or self._request.Test()

    def read(self) -> int:
        """Wait for the maximum and return it, the same on every rank.

        :raises WaitTimeoutError: at the time limit
        """
        Deadline(self._timeout_s).wait(
            self.ready, lambda: "not all ranks came to an agreement", awaited_ranks=tuple
        )
        return int(self._value[0])


class World:
    """All ranks of a job; of this class itself: one process without MPI, as `simulate` uses it.

    Methods are collective but where they say so.
    """

    rank = 0
    size = 1
    comm: Any = None
    """a communicator of mpi4py; None without MPI"""
    hosts: tuple[str, ...]
    """host name of each rank"""
    nodes: Nodes
    """which ranks are which node"""
    node_position = (0, 1)
    """of a column: this rank's place in its node, and how many have one; else (0, 1)"""
    original_ranks: tuple[int, ...] = (0,)
    """the numbers that the ranks began with: those that outlive a loss get new ones"""
    timeout_s = TIMEOUT_S
    """seconds after which a rank that doesn't come is given up"""
    whole = False
    """all ranks of the job take part, so that all make its calls in the same order"""
    launched = False
    """a launcher started this process, maybe alone"""
    fault_tolerant = False
    """MPI can go on after the loss of a rank"""
    survives = False
    """and this run wants to"""
    shrunk = False
    """and has had to"""
    resources: ExitStack
    """what is to be closed before the world"""
    after_close: ExitStack
    """settings of the process that the world has changed, and restores when it closes"""

    def __init__(self) -> None:
        self.hosts = (socket.gethostname(),)
        self.nodes = Nodes.of_ranks(self)
        self.resources = ExitStack()
        self.after_close = ExitStack()

    def gather(self, value: Any) -> list | None:
        """Return all ranks' values in rank order on rank 0, None elsewhere."""
        return [value]

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's ``value``, which is pickled, on every rank; collective."""
        return value

    def start_agree(self, flag: int) -> Agreement:
        """Begin the maximum of all ranks' flags without waiting; read it some steps later."""
        return Agreement(np.array([flag]), None)

    def agree(self, flag: int) -> int:
        """Return the maximum of all ranks' ``flag``, a whole number or bool; waits for all."""
        with deadline.calling_unless("agree()", self.whole):
            return self.start_agree(flag).read()

    @contextmanager
    def raise_together(self, *mistakes: type[Exception]) -> Iterator[None]:
        """Context manager that all ranks leave with the same mistake, or none."""
        yield

    def barrier(self) -> None:
        """Return when every rank has come; WaitTimeoutError at the time limit."""

    def duplicate(self) -> Any:
        """Return a communicator of the same ranks, given up with this world; None without MPI."""

    def group_into_nodes(self, ranks_per_node: int | str) -> None:
        """Make every so many ranks of a host a node, or all of it ("host"); JobError on all."""

    def shrink(self) -> None:
        """Go on with those who are left."""

    def is_rank_failure(self, error: BaseException) -> bool:
        """Return whether an exception says that a rank was lost and others can go on; local."""
        return False

    def abort(self, code: int = 1) -> None:
        """End all ranks at once; any rank may."""
        os._exit(code)

    def close(self) -> None:
        """Give back what it holds; can be called again."""
        self.resources.close()
        self.after_close.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


SingleProcess = World
"""What a world of one process without MPI is called where it is made."""


@dataclass(frozen=True)
class Nodes:
    """The ranks of a world as nodes."""

    node_of_rank: tuple[int, ...]
    """the node of each rank; nodes are numbered by their first ranks"""
    inter_node: World
    """the ranks of this one's place in all nodes: rank i is node i"""
    intra_node: World | None = None
    """the ranks of this one's node by place; None where it is the only one"""

    @classmethod
    def of_ranks(cls, world: World) -> Nodes:
        """Every rank is a node, and the only column is the world."""
        return cls(tuple(range(world.size)), world)

    @property
    def count(self) -> int:
        return self.inter_node.size

    @property
    def per_node(self) -> int:
        """Ranks in each of them."""
        return self.intra_node.size if self.intra_node else 1

    @property
    def local_rank(self) -> int:
        """Of this rank in its node."""
        return self.intra_node.rank if self.intra_node else 0

    @property
    def is_leader(self) -> bool:
        """Return whether this rank speaks for its node."""
        return self.local_rank == 0

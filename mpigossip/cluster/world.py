"""What a run knows of the ranks that it runs on: the contract of `ranks.World` and `ranks.Alone`.

Nothing here knows MPI.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, Protocol


class Agreement(Protocol):
    """A maximum over ranks on its way: asked for at one step, read some steps later."""

    def ready(self) -> bool:
        """Whether `read` returns at once."""

    def read(self) -> int:
        """The maximum, the same on every rank; waits for it, LateError at the time limit."""


class World(Protocol):
    """All ranks of a job, or this process alone. Methods are collective but where they say so."""

    rank: int
    size: int
    comm: Any
    """a communicator of mpi4py; None without MPI"""
    hosts: tuple[str, ...]
    """host name of each rank"""
    nodes: Nodes
    """which ranks are which node"""
    beside: tuple[int, int]
    """of a column: this rank's place in its node, and how many have one; else (0, 1)"""
    names: tuple[int, ...]
    """the numbers that the ranks began with: those that outlive a loss get new ones"""
    timeout_s: float
    """seconds after which a rank that doesn't come is given up"""
    launched: bool
    """a launcher started this process, maybe alone"""
    fault_tolerant: bool
    """MPI can go on after the loss of a rank"""
    survives: bool
    """and this run wants to"""
    diminished: bool
    """and has had to"""
    resources: ExitStack
    """what is to be closed before the world"""

    def gather(self, value: Any) -> list | None:
        """All ranks' values in rank order on rank 0, None elsewhere."""

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value on every rank."""

    def start_agree(self, flag: int) -> Agreement:
        """Begins the maximum of all ranks' flags without waiting."""

    def agree(self, flag: int) -> int:
        """The maximum of all ranks' flags; waits for all."""

    def together(self, *mistakes: type[Exception]) -> AbstractContextManager[None]:
        """A block that all ranks leave with the same mistake, or none.

        No rank may meet another inside.
        """

    def barrier(self) -> None:
        """Returns when every rank has come; LateError at the time limit."""

    def duplicate(self) -> Any:
        """A communicator of the same ranks that is given up with this world's; None without MPI."""

    def arrange(self, ranks_per_node: int | str) -> None:
        """Makes every so many ranks of a host a node, or all of it ("host"); JobError on all."""

    def shrink(self) -> None:
        """Goes on with those who are left."""

    def lost_by(self, error: BaseException) -> bool:
        """Whether an exception says that a rank was lost and others can go on; not collective."""

    def abort(self, code: int = 1) -> None:
        """Ends all ranks at once; any rank may."""

    def close(self) -> None:
        """Gives back what it holds; can be called again."""


@dataclass(frozen=True)
class Nodes:
    """The ranks of a world as nodes."""

    of: tuple[int, ...]
    """the node of each rank; nodes are numbered by their first ranks"""
    column: World
    """the ranks of this one's place in all nodes: rank i is node i"""
    inside: World | None = None
    """the ranks of this one's node by place; None where it is the only one"""

    @classmethod
    def of_ranks(cls, world: World) -> Nodes:
        """Every rank is a node, and the only column is the world."""
        return cls(tuple(range(world.size)), world)

    @property
    def count(self) -> int:
        """Nodes."""
        return self.column.size

    @property
    def per_node(self) -> int:
        """Ranks in each of them."""
        return self.inside.size if self.inside else 1

    @property
    def place(self) -> int:
        """Of this rank in its node."""
        return self.inside.rank if self.inside else 0

    @property
    def first(self) -> bool:
        """Whether this rank speaks for its node."""
        return self.place == 0

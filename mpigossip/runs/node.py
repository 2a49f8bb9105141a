"""Protocol of a node on which a run works, and waiting for all nodes."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from mpigossip.cluster.agreement import CollectiveError
from mpigossip.cluster.world import World
from mpigossip.config import Job
from mpigossip.engine.step import Engine
from mpigossip.groups.base import Group
from mpigossip.mixing.base import Mixer
from mpigossip.store.checkpoint import Manifest, NodeState, Number

IDLE_S = 1e-3
"""Seconds between two exchanges of a waiting node: an exchange takes processor time from other
processes."""
Arrays = Mapping[str, np.ndarray]
Numbers = Mapping[str, Number]


class Node(Protocol):
    """Protocol of the local nodes, of a job or of a custom training loop.

    A row is one of these nodes. ``engine.group`` is `Single` if each rank of a node has all
    parameters; ``group`` always has all slots of the node.
    """

    job: Job
    world: World
    engine: Engine
    facts: dict[str, Any]
    """Entries of the checkpoint's manifest for this kind of run."""
    counts_all: bool
    """True if each rank counts the samples of all nodes, and not only its own."""

    @property
    def mixer(self) -> Mixer:
        """The mixer between nodes."""

    @property
    def group(self) -> Group:
        """The slots of the node, in all of its ranks."""

    def average(self) -> None:
        """Exchange without a gradient."""

    @property
    def assembly(self) -> Any:
        """The parts of the job that hooks get at the start."""

    @property
    def shift(self) -> int:
        """Step from which epochs are counted."""

    # -- state ------------------------------------------------------------------------------------

    def buffers(self, row: int) -> Sequence[Mapping[str, torch.Tensor]]:
        """Return the buffers of the model by name, one dict for each local slot."""

    def extra_state(
        self, row: int, world: World
    ) -> tuple[dict[str, np.ndarray], dict[str, Number]]:
        """Return arrays and numbers that only this kind of node saves; collective.

        They are empty in all processes of a node but the first, unless each process writes its own
        file.

        :param row: index of the local node
        :param world: world of the run, on all ranks of which an error is raised
        """

    def restore_extra_state(self, row: int, saved: NodeState, mean: Arrays | None) -> list[str]:
        """Restore the result of :meth:`extra_state`; return messages to report.

        :param row: index of the local node
        :param saved: state from the checkpoint
        :param mean: averaged state to use instead; None: use ``saved``
        """

    def resumes_exactly(self, manifest: Manifest, first: NodeState) -> bool:
        """Return whether a checkpoint of the same number of nodes can be resumed exactly."""

    def check_saved(self, manifest: Manifest, path: Path) -> None:
        """Check that the run can continue from the checkpoint in ``path``; not collective.

        :raises StoreError: if it can't
        """

    def restore_counters(self, numbers: Numbers, facts: Mapping[str, Any]) -> None:
        """Restore the counters of a checkpoint, or of a step that was kept."""

    def publish(self) -> None:
        """Copy the restored parameters to all slots and to the model; collective over the node."""

    # -- other nodes ------------------------------------------------------------------------------

    def rebuild(self, world: World) -> None:
        """Build again everything that depends on the number of nodes; collective over ``world``.

        The state of the algorithm is reset. A node that an earlier failure left incomplete is
        discarded.
        """

    def copy_step_extras(self, spare: Any) -> Any:
        """Return a copy of what changes in each step besides the state.

        :param spare: an earlier copy, whose memory may be used again
        """

    def restore_step_extras(self, saved: Any, world: World) -> list[str]:
        """Restore a copy; return the names of restored values to report.

        Values are averaged over nodes if all nodes have a copy.
        """

    def close(self, together: bool) -> None:
        """Release all resources.

        :param together: all nodes make this call, so that the mixer can be closed, too
        """

    # -- what a run shows -------------------------------------------------------------------------

    def progress_fields(self) -> dict[str, Any]:
        """Return the fields of `Progress` that only the node has."""

    def overview_lines(self, progress: Any) -> Sequence[tuple[str, str]]:
        """Return the overview as pairs (word, text); not collective."""

    def summary(self, progress: Any) -> dict[str, Any]:
        """Return entries of the summary; not collective."""


def wait_for_nodes(node: Node, world: World) -> None:
    """Wait for all nodes; an asynchronous node that is ahead continues to exchange meanwhile."""
    if node.mixer.synchronous:
        return  # synchronous nodes wait in the next collective call
    all_here = world.start_agree(0)
    until = time.monotonic() + world.timeout_s
    while not _any_rank_ended(all_here.ready() or time.monotonic() >= until, node.group):
        node.average()
        time.sleep(IDLE_S)
    all_here.read()


def _any_rank_ended(ended: bool, group: Group) -> bool:
    """Return whether any rank of this node has ended its wait: its ranks continue together."""
    flags = [torch.full((1, 1), float(ended), dtype=torch.float64) for _ in group.local_slots]
    return bool(group.sum_scalars(flags) > 0)


@contextmanager
def closing(node: Node, world: World) -> Iterator[None]:
    """Return a context manager that closes the node at its end, with the others if all reach it."""
    try:
        yield
    except BaseException as error:
        # Closing is collective, so it would hang after an exception of this rank alone.
        node.close(together=world.comm is None or isinstance(error, CollectiveError))
        raise
    node.close(together=not world.shrunk)

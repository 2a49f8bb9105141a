"""Protocol of the local nodes of a run, and functions that wait for nodes and close them."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from mpigossip.cluster.communicator import CollectiveError
from mpigossip.cluster.world import World
from mpigossip.config import Job
from mpigossip.engine.step import Engine
from mpigossip.groups.base import Group
from mpigossip.mixing.base import Mixer
from mpigossip.store.checkpoint import Manifest, NodeState, Number

IDLE_S = 1e-3
"""Seconds between two exchanges of a node that waits for others. Without this pause, its exchanges
would take processor time from other processes."""
Arrays = Mapping[str, np.ndarray]
Numbers = Mapping[str, Number]


class Node(Protocol):
    """Protocol of the local nodes of a run, either of a job or of a custom training loop.

    A parameter ``row`` is the index of one of these nodes. If each rank of a node holds all
    parameters, ``engine.group`` is a `Single` for this rank alone, but ``group`` still contains
    all slots of the node.
    """

    job: Job
    world: World
    engine: Engine
    facts: dict[str, Any]
    """Entries of the checkpoint's manifest that only this kind of run has."""
    counts_all: bool
    """True if each rank counts the samples of all nodes, and not only the samples of its node."""

    @property
    def mixer(self) -> Mixer:
        """The mixer between nodes."""

    @property
    def group(self) -> Group:
        """The slots of the node, in all of its ranks."""

    def average(self) -> None:
        """Exchange and average the models of the nodes, without a gradient step."""

    @property
    def assembly(self) -> Any:
        """The parts of the job (model, data, graph), or a custom loop's node, for hooks."""

    @property
    def shift(self) -> int:
        """Number of the step from which epochs are counted."""

    # -- state ------------------------------------------------------------------------------------

    def buffers(self, row: int) -> Sequence[Mapping[str, torch.Tensor]]:
        """Return the buffers of the model by name, one dict for each local slot."""

    def extra_state(
        self, row: int, world: World
    ) -> tuple[dict[str, np.ndarray], dict[str, Number]]:
        """Return arrays and numbers that only this kind of node saves; collective.

        They are used only in the first process of a node, unless each process of the node writes
        its own file.

        :param row: index of the local node
        :param world: world of the run; if one of its ranks fails to collect values, all of its
            ranks raise the error
        """

    def restore_extra_state(self, row: int, saved: NodeState, mean: Arrays | None) -> list[str]:
        """Restore a result of :meth:`extra_state`; return messages for the user.

        :param row: index of the local node
        :param saved: state of a node from the checkpoint
        :param mean: average of the states of all saved nodes, to be used instead; None: use
            ``saved``
        """

    def resumes_exactly(self, manifest: Manifest, first: NodeState) -> bool:
        """Return whether a checkpoint of the same number of nodes can be resumed exactly.

        :param manifest: manifest of the checkpoint
        :param first: saved state of the first local node
        """

    def check_saved(self, manifest: Manifest, path: Path) -> None:
        """Check that the run can continue from a checkpoint; not collective.

        :param manifest: manifest of the checkpoint
        :param path: folder of the checkpoint
        :raises StoreError: if it can't
        """

    def restore_counters(self, numbers: Numbers, facts: Mapping[str, Any]) -> None:
        """Restore the counters of a checkpoint, or of a copy in memory of an earlier step.

        :param numbers: values of the counters by name
        :param facts: entries of the manifest that only this kind of run has
        """

    def publish(self) -> None:
        """Copy the restored parameters to all slots and to the model; collective over the node."""

    # -- other nodes ------------------------------------------------------------------------------

    def rebuild(self, world: World) -> None:
        """Rebuild everything that depends on the number of nodes; collective over ``world``.

        The state of the algorithm is reset. If another rank failure has interrupted this call, a
        second call discards what the first one has built.
        """

    def copy_step_extras(self, spare: Any) -> Any:
        """Return a copy of the values that change in each step but are not in checkpoints.

        :param spare: an earlier copy that is no longer needed, whose memory may be used again
        """

    def restore_step_extras(self, saved: Any, world: World) -> list[str]:
        """Restore a result of :meth:`copy_step_extras`; collective over ``world``.

        Values that all nodes have are averaged over the nodes. Return their names.
        """

    def close(self, together: bool) -> None:
        """Release all resources.

        :param together: whether all nodes make this call; only then can the mixer be closed, too
        """

    # -- what a run shows -------------------------------------------------------------------------

    def progress_fields(self) -> dict[str, Any]:
        """Return the fields of `Progress` whose values only the node knows, by name."""

    def overview_lines(self, progress: Any) -> Sequence[tuple[str, str]]:
        """Return the overview at the start as pairs (label, text); not collective."""

    def summary(self, progress: Any) -> dict[str, Any]:
        """Return the entries of the summary that only this kind of run has; not collective."""


def wait_for_nodes(node: Node, world: World) -> None:
    """Wait until all asynchronous nodes have made this call, and exchange while waiting.

    Synchronous nodes return at once, because they wait for each other in the next collective call.

    :param node: the local nodes
    :param world: ranks of the run
    :raises WaitTimeoutError: if some node has not made this call after twice the time limit
    """
    if node.mixer.synchronous:
        return
    all_here = world.start_agree(0)
    until = time.monotonic() + world.timeout_s
    while not _any_rank_ended(all_here.ready() or time.monotonic() >= until, node.group):
        node.average()
        time.sleep(IDLE_S)
    all_here.read()


def _any_rank_ended(ended: bool, group: Group) -> bool:
    """Return whether any rank of this node has ended its wait.

    The ranks of a node must leave the loop together, because each exchange is collective over them.
    """
    flags = [torch.full((1, 1), float(ended), dtype=torch.float64) for _ in group.local_slots]
    return bool(group.sum_scalars(flags) > 0)


@contextmanager
def closing(node: Node, world: World) -> Iterator[None]:
    """Return a context manager that closes the node when its block ends.

    If an exception that does not occur on all ranks ends the block, or if a rank has failed, only
    this rank's resources are released.
    """
    try:
        yield
    except BaseException as error:
        # Closing the mixer is collective, so it would hang after an exception of this rank alone.
        node.close(together=world.comm is None or isinstance(error, CollectiveError))
        raise
    node.close(together=not world.shrunk)

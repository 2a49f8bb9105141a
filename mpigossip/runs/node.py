"""The protocol of a node that a run works on, and waiting for all nodes."""

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
"""Seconds between two exchanges of a node that only waits: they take the core from the others."""
Arrays = Mapping[str, np.ndarray]
Numbers = Mapping[str, Number]


class Node(Protocol):
    """The nodes that live in this process: of a job, or of a custom training loop.

    A row is one of these nodes. ``engine.group`` is `Single` where each rank of a node has the
    full vector; ``group`` always has all of the node's slots.
    """

    job: Job
    world: World
    engine: Engine
    facts: dict[str, Any]
    """what a checkpoint's manifest keeps of this kind of run"""
    counts_all: bool
    """samples are counted over all nodes, not by rank"""

    @property
    def mixer(self) -> Mixer:
        """The communication backend between nodes."""

    @property
    def group(self) -> Group:
        """The slots of the node, in all of its ranks."""

    def average(self) -> None:
        """Exchange without a gradient."""

    @property
    def assembly(self) -> Any:
        """The parts that hooks are shown at the start."""

    @property
    def shift(self) -> int:
        """Step from which epochs are counted."""

    # -- state ------------------------------------------------------------------------------------

    def buffers(self, row: int) -> Sequence[Mapping[str, torch.Tensor]]:
        """Return the model's buffers by name, one dict for each slot here."""

    def extra_state(
        self, row: int, world: World
    ) -> tuple[dict[str, np.ndarray], dict[str, Number]]:
        """Return arrays and numbers that only this kind of node saves; collective.

        ``world``: the run's, whose ranks all learn of an error. Empty in all but a node's first
        process, unless all of them write.
        """

    def restore_extra_state(self, row: int, saved: NodeState, mean: Arrays | None) -> list[str]:
        """Restore what :meth:`own` has returned, from ``mean`` unless that is None; report."""

    def resumes_exactly(self, manifest: Manifest, first: NodeState) -> bool:
        """Return whether a checkpoint of as many nodes can be continued exactly."""

    def check_saved(self, manifest: Manifest, path: Path) -> None:
        """Raise StoreError if the checkpoint in ``path`` is not one to continue from; local."""

    def restore_counters(self, numbers: Numbers, facts: Mapping[str, Any]) -> None:
        """Take the counters of a checkpoint, or of a step that was kept."""

    def publish(self) -> None:
        """Let slots and parameters see what was written into x; collective over the node."""

    # -- other nodes ------------------------------------------------------------------------------

    def rebuild(self, world: World) -> None:
        """Make all that depends on the nodes anew, between those of ``world``; collective.

        The method's state begins anew. A node that another failure left half made is given up.
        """

    def copy_step_extras(self, spare: Any) -> Any:
        """Copy what changes with each step beside the state; ``spare``: an earlier copy."""

    def restore_step_extras(self, kept: Any, world: World) -> list[str]:
        """Restore a copy, as the mean over nodes where all have one; what to report."""

    def close(self, together: bool) -> None:
        """Release everything; with what lies between nodes only if all come ``together``."""

    # -- what a run shows -------------------------------------------------------------------------

    def progress_fields(self) -> dict[str, Any]:
        """Return fields of :class:`~mpigossip.runs.progress.Progress` that only the node knows."""

    def overview_lines(self, progress: Any) -> Sequence[tuple[str, str]]:
        """Return the first screen, as (word, text); local."""

    def summary(self, progress: Any) -> dict[str, Any]:
        """Return figures for the summary; local."""


def wait_for_nodes(node: Node, world: World) -> None:
    """Wait for all nodes; asynchronous ones that are ahead go on exchanging meanwhile."""
    if node.mixer.synchronous:
        return  # they wait in what follows
    all_here = world.start_agree(0)
    until = time.monotonic() + world.timeout_s
    while not _over(all_here.ready() or time.monotonic() >= until, node.group):
        node.average()
        time.sleep(IDLE_S)
    all_here.read()


def _over(here: bool, group: Group) -> bool:
    """Return whether any rank of a node has come to the end of a wait: they go on together."""
    flags = [torch.full((1, 1), float(here), dtype=torch.float64) for _ in group.local_slots]
    return bool(group.sum_scalars(flags) > 0)


@contextmanager
def closing(node: Node, world: World) -> Iterator[None]:
    """Close the node at the end of the block, with the others where all of them come to it."""
    try:
        yield
    except BaseException as error:
        # closing is collective: after an exception of this rank alone it would hang
        node.close(together=world.comm is None or isinstance(error, CollectiveError))
        raise
    node.close(together=not world.shrunk)

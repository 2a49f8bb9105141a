"""Going on without a rank that was lost: the survivors' world, graph, data split and log."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from mpigossip.cluster.world import World
from mpigossip.config import Job, JobError
from mpigossip.config.readable import note
from mpigossip.runs.elastic import go_on_together, shift
from mpigossip.runs.lock import lock
from mpigossip.runs.printer import Printer
from mpigossip.runs.run import Run
from mpigossip.store.checkpoint import NodeState
from mpigossip.training.assemble import Assembly, assemble

T = TypeVar("T")


def prepare(job: Job, world: World) -> None:
    """Let the world outlive losses where the job asks for it; say where MPI can't."""
    world.survives = job.run.survive and world.fault_tolerant
    if job.run.survive and world.comm is not None and not world.survives and world.rank == 0:
        note(
            "run.survive: this MPI was not started fault-tolerant, so a lost rank ends "
            "the job at once, and the next one goes on from the last checkpoint; with Open MPI 5 "
            "start it by `mpirun --with-ft ulfm` (srun can't: Slurm ends a step that lost a task)"
        )


def without_the_lost(run: Run, world: World) -> Run:
    """A run of the survivors from the last whole step that all of them have done. Collective.

    What the old world shared is left behind, never freed.
    """
    run.saver.abandon()
    run.assembly.abandon()
    return outlived(world, lambda: _rebuilt(run, world))


def outlived(world: World, rebuilt: Callable[[], T]) -> T:
    """``rebuilt()`` in the survivors' world; a further loss on the way begins anew. Collective."""
    while True:
        try:
            world.shrink()
            return rebuilt()
        except Exception as error:
            if not world.lost_by(error):
                raise


def _rebuilt(run: Run, world: World) -> Run:
    lock_anew(run.progress.folder, run.names, world)
    mine, (numbers, steps_per_epoch) = run.kept.agree(world, run.progress.steps_per_epoch)
    assembly = assemble(run.progress.job, world, world.size)
    try:
        return _taken_over(run, assembly, world, mine, numbers, steps_per_epoch)
    except BaseException:
        assembly.abandon()
        raise


def lock_anew(folder: Path, names: Sequence[int], world: World) -> None:
    """Take the folder's lock on rank 0 where the one of ``names``, the world before, is gone."""
    if world.rank == 0 and names[0] != world.names[0]:
        # a disk that doesn't know yet is no reason to stop
        with contextlib.suppress(JobError):
            world.resources.enter_context(lock(folder))


def _taken_over(
    run: Run, assembly: Assembly, world, mine: NodeState, numbers: dict, before: int
) -> Run:
    """The new run, where the old one stood."""
    hooks = [Printer(world) if isinstance(hook, Printer) else hook for hook in run.hooks]
    rebuilt = Run(assembly, world, hooks)
    trainer = assembly.trainer
    shift(trainer, numbers, before, assembly.steps_per_epoch)
    told = go_on_together(trainer.engine, trainer.replicas.buffers(0), mine, numbers)
    rebuilt.count_from(run.progress.seconds)
    rebuilt.tally, rebuilt.rejoined = run.tally, True
    gone = [place for place, name in enumerate(run.names) if name not in world.names]
    lost = [f"rank {run.names[place]} on {run.hosts[place]}" for place in gone]
    lines = tell(world, lost, numbers["index"], run.kept.whole_at, told)
    rebuilt.progress.lost = [*run.progress.lost, *lines]
    whole = run.progress.nodes == run.progress.asked
    rebuilt.progress.asked = run.progress.asked
    rebuilt.progress.lost_at = numbers["index"] if whole else run.progress.lost_at
    return rebuilt


def tell(
    world: World, lost: Sequence[str], index: int, whole_at: float, how: Sequence[str]
) -> list[str]:
    """Say on rank 0 who was lost, and how the others go on; a line for each. Collective.

    ``whole_at``: when this rank's last whole step was done.
    """
    seconds = world.agree(int(1000 * (time.perf_counter() - whole_at))) / 1000
    lines = [f"{rank} was lost after step {index} ({seconds:.2f} s lost)" for rank in lost]
    if world.rank == 0:
        told = "; ".join([*lines, _those_who_go_on(world.size)])
        told += f" ({'; '.join(how)})" if how else ""
        note(told)
    return lines


def _those_who_go_on(count: int) -> str:
    if count == 1:
        return "1 node goes on alone"
    return f"{count} nodes go on from their exact average"

"""Going on without a rank that was lost: the survivors' world, graph, data split and log."""

from __future__ import annotations

import contextlib
import sys
import time

from mpigossip.cluster.world import World
from mpigossip.config import Job, JobError
from mpigossip.runs.elastic import go_on_together
from mpigossip.runs.lock import lock
from mpigossip.runs.printer import Printer
from mpigossip.runs.run import Run
from mpigossip.store.checkpoint import NodeState
from mpigossip.training.assemble import Assembly, assemble


def prepare(job: Job, world: World) -> None:
    """Let the world outlive losses where the job asks for it; say where MPI can't."""
    world.survives = job.run.survive and world.fault_tolerant
    if job.run.survive and world.comm is not None and not world.survives and world.rank == 0:
        print(
            "mpigossip: run.survive: this MPI was not started fault-tolerant, so a lost rank ends "
            "the job at once, and the next one goes on from the last checkpoint; with Open MPI 5 "
            "start it by `mpirun --with-ft ulfm` (srun can't: Slurm ends a step that lost a task)",
            file=sys.stderr,
            flush=True,
        )


def without_the_lost(run: Run, world: World) -> Run:
    """A run of the survivors from the last whole step that all of them have done. Collective.

    A further loss on the way begins anew. What the old world shared is left behind, never freed.
    """
    run.saver.abandon()
    run.assembly.abandon()
    while True:
        try:
            return _rebuilt(run, world)
        except Exception as error:
            if not world.lost_by(error):
                raise


def _rebuilt(run: Run, world: World) -> Run:
    world.shrink()
    if world.rank == 0 and run.names[0] != world.names[0]:
        # rank 0 held it and is gone; a disk that doesn't know yet is no reason to stop
        with contextlib.suppress(JobError):
            world.resources.enter_context(lock(run.progress.folder))
    # counters and the steps of an epoch that they are in: a rank that saw the loss of another
    # later may have those of a world that others have left already
    stands = world.gather((run.kept[-1].numbers, run.progress.steps_per_epoch))
    least = stands and min(stands, key=lambda one: one[0]["index"])
    numbers, steps_per_epoch = world.broadcast(least)
    # who is further ahead than the steps that are kept goes on with the oldest of them
    mine = next((k for k in run.kept if k.numbers["index"] == numbers["index"]), run.kept[0])
    assembly = assemble(run.progress.job, world, world.size)
    try:
        return _taken_over(run, assembly, world, mine, numbers, steps_per_epoch)
    except BaseException:
        assembly.abandon()
        raise


def _taken_over(
    run: Run, assembly: Assembly, world, mine: NodeState, numbers: dict, before: int
) -> Run:
    """The new run, where the old one stood."""
    hooks = [Printer(world) if isinstance(hook, Printer) else hook for hook in run.hooks]
    rebuilt = Run(assembly, world, hooks)
    told = go_on_together(assembly.trainer, mine, numbers, before, assembly.steps_per_epoch)
    rebuilt.count_from(run.progress.seconds)
    rebuilt.tally, rebuilt.rejoined = run.tally, True
    milliseconds = world.agree(int(1000 * (time.perf_counter() - run.whole_at)))
    lines = _lines(run, world, numbers, milliseconds)
    rebuilt.progress.lost = [*run.progress.lost, *lines]
    whole = run.progress.nodes == run.progress.asked
    rebuilt.progress.asked = run.progress.asked
    rebuilt.progress.lost_at = numbers["index"] if whole else run.progress.lost_at
    if world.rank == 0:
        print(
            f"mpigossip: {'; '.join(lines)}; {_those_who_go_on(world.size)} ({'; '.join(told)})",
            file=sys.stderr,
            flush=True,
        )
    return rebuilt


def _those_who_go_on(count: int) -> str:
    if count == 1:
        return "1 node goes on alone"
    return f"{count} nodes go on from their exact average"


def _lines(run: Run, world: World, numbers: dict, milliseconds: int) -> list[str]:
    gone = [place for place, name in enumerate(run.names) if name not in world.names]
    return [
        f"rank {run.names[place]} on {run.hosts[place]} was lost after step {numbers['index']} "
        f"({milliseconds / 1000:.2f} s lost)"
        for place in gone
    ]

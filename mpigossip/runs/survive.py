"""Continuation of a run by the survivors of a rank failure, which form a smaller world.

Jobs and custom loops use the same class, :class:`Survival`. A job makes all of its steps, and the
end of its run, by :meth:`Survival.step`, and never calls :meth:`Survival.leave`: all nodes of a job
end at the same step. The nodes of a custom loop may leave it at different steps, so such a loop
ends by :meth:`Survival.leave`.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import numpy as np
import torch

from mpigossip.cluster.deadline import Deadline
from mpigossip.cluster.mpi_world import keep_alive
from mpigossip.cluster.world import SingleProcess, World
from mpigossip.config import Job, JobError
from mpigossip.config.readable import pluralize, print_note
from mpigossip.runs.lock import lock
from mpigossip.runs.node import Node
from mpigossip.runs.run import Run
from mpigossip.runs.snapshot_and_restore import from_mean, snapshot
from mpigossip.store.checkpoint import NodeState, Number
from mpigossip.store.node_state import is_floating, over_slots


class Stage(Enum):
    """Stage of the local node in its training loop.

    :meth:`Survival.catch_failure` changes the stage to FAILED if a rank failure is noticed, and
    :meth:`Survival.step` then changes it to TRAINING or ALONE. :meth:`Survival.leave` changes the
    stage to LEAVING. If the loop was left by `exit()`, the stage is TRAINING until the run has
    ended: all nodes have then left their loops at the same step, so that no node has to continue
    alone. After a failure, the survivors compare their stages: if any node is LEAVING, the other
    nodes become ALONE.
    """

    TRAINING = "in its loop, with all nodes of its world"
    FAILED = "a rank failure was noticed, and the next step handles it"
    ALONE = "in its loop, without the nodes that have left theirs"
    LEAVING = "the loop is over, and the run ends as soon as all nodes have left theirs"


def prepare(job: Job, world: World) -> None:
    """Let the world survive rank failures if `run.survive` is true and MPI is fault-tolerant.

    If `run.survive` is true but MPI is not fault-tolerant, print a note.
    """
    world.survives = job.run.survive and world.fault_tolerant
    if job.run.survive and world.comm is not None and not world.survives and world.rank == 0:
        print_note(
            "run.survive = true: MPI was not started with fault tolerance, so a rank failure ends "
            "the job at once, and the next job continues from the last checkpoint; with Open MPI "
            "5, use `mpirun --with-ft ulfm` (not srun: Slurm ends a step if a task fails)"
        )


class RecentSteps:
    """Copies of the local node after its last two complete steps."""

    def __init__(self) -> None:
        self.states: deque[tuple[NodeState, Any]] = deque(maxlen=2)
        self.facts: dict[str, Any] = {}
        self.done_at = time.perf_counter()
        """Time by `time.perf_counter` at which the last of these steps was done."""

    def keep(self, node: Node) -> None:
        """Copy the node after a step, into the memory of the oldest copy."""
        full = len(self.states) == self.states.maxlen
        state, extras = self.states.popleft() if full else (None, None)
        (copy,) = snapshot(node, {}, [state] if state else [])
        self.states.append((copy, node.copy_step_extras(extras)))
        self.facts = dict(node.facts)
        self.done_at = time.perf_counter()

    def agree(self, world: World) -> tuple[NodeState, Any, dict[str, Number], dict[str, Any]]:
        """Agree on the step from which all ranks continue; collective.

        This is the last step of the rank that has done the fewest steps. Other ranks may have done
        more before they noticed the failure.

        :param world: the survivors
        :return: this rank's state and further values after that step, and the counters and facts of
            that step, which are equal on all ranks. If this rank has no copy of that step, because
            it is more than one step ahead, its state is its oldest copy
        """
        stands = world.gather((self.states[-1][0].numbers, self.facts))
        numbers, facts = world.broadcast(stands and min(stands, key=lambda pair: pair[0]["index"]))
        same = (stand for stand in self.states if stand[0].numbers["index"] == numbers["index"])
        return *next(same, self.states[0]), numbers, facts


class Survival:
    """Continuation of a loop after rank failures, if MPI is fault-tolerant.

    Only :meth:`step` and :meth:`leave` handle failures. After :meth:`step` has handled one, all
    survivors are at the last step that all of them have done, and have the average of their states
    at that step; a rank without a copy of that step contributes its oldest copy, which is newer
    (see :meth:`RecentSteps.agree`). If some survivors have left their loops, each of the others
    continues alone instead, from its own last step. A failure that is noticed in another call is
    stored by :meth:`catch_failure`, and the next call of :meth:`step` handles it.
    """

    def __init__(self, node: Node, run: Run | None, on_change: Callable[[World], object]):
        """Prepare the continuation.

        :param node: the node of this rank
        :param run: the run; None: the loop has no run directory, and so no log and no checkpoints
        :param on_change: function that is called with the smaller world before the survivors
            continue
        """
        self._node = node
        self._run = run
        self._on_change = on_change
        self._world = node.world
        self._names = node.world.original_ranks
        self._hosts = node.world.hosts
        self._recent = RecentSteps()
        self.stage = Stage.TRAINING

    def keep(self, reset: bool = False) -> None:
        """Copy the node to host memory after a step, if the world survives rank failures.

        :param reset: whether to forget earlier copies
        """
        if not self._world.survives:
            return
        states = self._recent.states
        if reset or states and states[-1][0].names != self._node.engine.vector.flat.names:
            self._recent = RecentSteps()  # the parameter layout has changed
        self._recent.keep(self._node)

    def step(self, work: Callable[[], None]) -> None:
        """Call ``work()``, or handle a failure that was noticed in it or before."""
        if self.stage is not Stage.FAILED:
            with self.catch_failure():
                work()
        while self.stage is Stage.FAILED:
            self._outlive()
            with self.catch_failure():
                self._on_change(self._world)

    @contextmanager
    def catch_failure(self) -> Iterator[None]:
        """Return a context manager that ends its block without an error on a rank failure.

        The next call of :meth:`step` handles the failure. The error is raised if MPI is not
        fault-tolerant, or if :meth:`keep` has made no copy yet.
        """
        try:
            yield
        except Exception as error:
            # Before the first copy, there is no state from which the survivors could continue.
            if not self._world.is_rank_failure(error) or not self._recent.states:
                raise
            self.stage = Stage.FAILED

    def leave(self) -> None:
        """End the run, and wait until all nodes have left their loops.

        The nodes of a custom loop may leave their loops at different times. If a node fails
        meanwhile, each node that is still in its loop finishes it alone, and then calls this
        method, too. A loop that is left by `exit()` ends at the same step on all nodes.
        """
        run = self._run
        # After a failure that made this node train alone, its own world is a world of one process.
        # It need not wait then, because `run.finish` already waits for all nodes.
        waits = self._node.world is self._world
        while True:
            self._world.isolated = False
            self.stage = Stage.TRAINING if run is not None and run.stopped else Stage.LEAVING
            try:
                if run is not None:
                    run.finish()
                self.stage = Stage.LEAVING
                if waits:
                    everyone = self._world.start_agree(0)
                    Deadline(float("inf")).wait(everyone.ready, lambda: "")
            except Exception as error:
                if not self._world.is_rank_failure(error):
                    raise
            else:
                return
            self._outlive()
            if run is None or not run.is_open:
                return
            waits = False

    def _outlive(self) -> None:
        """Continue in a world of the survivors; collective over them.

        If another rank fails during this call, it starts again with the ranks that are left.
        """
        while True:
            try:
                self._world.shrink()
                self._rejoin()
            except Exception as error:
                if not self._world.is_rank_failure(error):
                    raise
            else:
                return

    def _rejoin(self) -> None:
        """Continue with the survivors, or alone if some of them are leaving the loop."""
        node = self._node
        run = self._run
        world = self._world
        if run is not None:
            self._lock_again(run)
        keep_alive.append(node.mixer)
        leaves = self.stage is Stage.LEAVING
        parted = bool(world.agree(leaves))
        gone = [index for index, name in enumerate(self._names) if name not in world.original_ranks]
        lost = [f"rank {self._names[index]} on {self._hosts[index]}" for index in gone]
        if leaves:
            lost = [f"{rank} failed after step {node.engine.index}" for rank in lost]
            if run is not None and world.rank == 0:
                text = f"{'; '.join(lost)}; {pluralize(world.size, 'node')} end the run"
                print_note(text)
        else:
            lost = self._continue_with(SingleProcess() if parted else world, parted, lost)
        self._names = world.original_ranks
        self._hosts = world.hosts
        if run is not None:
            run.rejoin(lost, parted)
        if not leaves:
            self.stage = Stage.ALONE if parted else Stage.TRAINING
            # Collective calls of this node's loop must not wait for nodes that have left theirs.
            world.isolated = parted

    def _lock_again(self, run: Run) -> None:
        """Lock the run directory on rank 0 if the rank that held the lock has failed."""
        world = self._world
        if world.rank == 0 and self._names[0] != world.original_ranks[0]:
            # On a network file system, the lock of a failed rank may still exist. Continue then.
            with contextlib.suppress(JobError):
                run.resources.enter_context(lock(run.folder))

    def _continue_with(self, world: World, parted: bool, lost: Sequence[str]) -> list[str]:
        """Continue from the last step that all ranks of ``world`` have done; collective.

        :param world: the survivors, or this rank alone
        :param parted: whether other survivors have left their loops
        :param lost: name and host of each failed rank
        :return: one line for each failed rank
        """
        node = self._node
        node.rebuild(world)
        state, extras, numbers, facts = self._recent.agree(world)
        node.restore_counters(numbers, facts)
        messages = from_mean(node, self._mean(state), numbers)
        means = node.restore_step_extras(extras, world)
        node.publish()
        messages += [f"averaged: {', '.join(means)}"] if means and not parted else []
        messages += ["the others have left their loops"] if parted else []
        lines = self._report(world, lost, numbers["index"], messages)
        self.keep(reset=True)
        return lines

    def _mean(self, state: NodeState) -> dict[str, Any]:
        """Return the arrays of a state, averaged over nodes, for `from_mean`; collective.

        Arrays of integers, and the number of bytes sent, are this node's own.
        """
        engine = self._node.engine
        mean = dict[str, Any]()
        for name, array in over_slots(state).items():
            mean[name] = array
            if is_floating(array):
                row = torch.from_numpy(array.astype(np.float64).reshape(1, -1))
                mean[name] = engine.mixer.mean(row).numpy().reshape(array.shape)
        count = torch.tensor([[float(state.numbers["local_steps"])]]).double()
        mean["bytes_sent"] = state.numbers["bytes_sent"]
        mean["local_steps"] = engine.mixer.mean_scalars(count)
        return mean

    def _report(
        self, world: World, lost: Sequence[str], index: Any, how: Sequence[str]
    ) -> list[str]:
        """Print on rank 0 which ranks have failed and how the survivors continue; collective.

        :param world: ranks that continue
        :param lost: name and host of each failed rank
        :param index: number of the step from which they continue
        :param how: remarks on the restored state
        :return: one line for each failed rank
        """
        seconds = world.agree(int(1000 * (time.perf_counter() - self._recent.done_at))) / 1000
        lines = [f"{rank} failed after step {index} ({seconds:.2f} s lost)" for rank in lost]
        if world.rank == 0:
            go_on = "1 node continues alone"
            if world.size > 1:
                go_on = f"{world.size} nodes continue from their exact average"
            message = "; ".join([*lines, go_on])
            message += f" ({'; '.join(how)})" if how else ""
            print_note(message)
        return lines

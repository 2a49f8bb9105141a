"""Ranks of a member: rank 0 decides by reading the folder, and the others follow.

Rank 0 broadcasts each decision (the chunk, the version of the peer, the inputs, whether to leave),
so that the other ranks never list the folder and need no records. If a rank does not answer within
the time limit of the world, the member ends; the other members treat it like a member that was
killed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from mpigossip.cluster.deadline import Deadline, paused
from mpigossip.cluster.launcher import launcher_ranks
from mpigossip.cluster.local_devices import slots_of
from mpigossip.cluster.world import SingleProcess, World
from mpigossip.config import Job, JobError
from mpigossip.members.live import OneRank
from mpigossip.members.parts import Part
from mpigossip.members.place import Place
from mpigossip.training import shape

T = TypeVar("T")

COUNTERS = ("number", "round", "age", "progress", "peer", "remaining", "chunks")
"""Attributes of `Place` that all ranks copy from rank 0 after each decision."""
TAG = 41


class Outcome(NamedTuple):
    """Message by which rank 0 ends a decision: the result, or an exception that all ranks raise."""

    result: Any
    error: Exception | None
    counters: dict[str, Any]
    """Values of `COUNTERS` by name; empty before the member has joined."""


class SeveralRanks(OneRank):
    """Collective decisions of the ranks of one member, which a launcher has started together."""

    def __init__(self, world: World, part: Part | None):
        """Duplicate the communicator of ``world`` for these decisions; collective.

        :param world: the ranks of the member
        :param part: part of the model that this rank reads and writes; None: each rank reads whole
            models, and rank 0 writes them
        """
        self.rank = world.rank
        self.part = part
        self._world = world
        # The thread that writes models calls MPI while the main thread does, so that it needs a
        # communicator of its own.
        self._comm = world.duplicate()
        self._pause = ExitStack()

    def decide(self, work: Callable[[], T], place: Place, read: Callable[[Any], Any]) -> T:
        if self.rank:
            return self._follow(place, read)
        result = error = None
        # Rank 0 may wait for the file system, or for other members, without a limit.
        with self._pause:
            self._pause.enter_context(paused())
            try:
                result = work()
            except Exception as raised:  # noqa: BLE001 - all ranks raise it
                error = raised
        counters = {k: getattr(place, k) for k in COUNTERS} if place.number >= 0 else {}
        self._world.broadcast(Outcome(result, error, counters))
        if error is not None:
            raise error
        return result

    def _follow(self, place: Place, read: Callable[[Any], Any]) -> Any:
        """Execute the commands that rank 0 sends by :meth:`ask`; return the decision of rank 0.

        :param place: place of the member; its counters are set to the counters of rank 0
        :param read: function that executes a command
        """
        while not isinstance(message := self._world.broadcast(None), Outcome):
            self._world.gather(read(message))
        for name, value in message.counters.items():
            setattr(place, name, value)
        if message.error is not None:
            raise message.error
        return message.result

    def ask(self, command: Any, read: Callable[[Any], T]) -> list[T]:
        self._pause.close()
        self._world.broadcast(command)
        answers = self._world.gather(read(command))
        self._pause.enter_context(paused())
        return answers or []

    def collect(self, value: T) -> list[T]:
        comm = self._comm
        if self.rank:
            request = comm.isend(value, 0, TAG)
            self._wait(
                request.Test, "rank 0 has not received the description of a file of the model"
            )
            return []
        values = [value]
        for source in range(1, self._world.size if self.part else 1):
            received: list[T] = []
            request = comm.irecv(source=source, tag=TAG)

            def arrived(request=request, received=received) -> bool:
                done, message = request.test()
                received += [message] * done
                return done

            self._wait(arrived, f"rank {source} of this member has not written its part of a model")
            values += received
        return values

    def _wait(self, condition: Callable[[], bool], text: str) -> None:
        # An outage of the folder, after which a rank goes on, must not end the wait.
        limit_s = self._world.timeout_s + self.outage_s
        Deadline(limit_s).wait(condition, lambda: text, awaited_ranks=tuple)

    def agree(self, flag: bool) -> bool:
        return bool(self._world.agree(flag))

    def waited_for(self) -> AbstractContextManager[None]:
        return paused()


def world_of(job: Job) -> World:
    """Return the world of this member: the ranks of the launcher, or this process alone.

    Under a launcher, each rank is a separate member if `node.ranks_per_node` is 1.

    :param job: job that this member trains
    """
    launched = launcher_ranks(os.environ)
    if job.node.ranks_per_node == 1 or not launched or launched[0][1] == 1:
        return SingleProcess()
    from mpigossip.cluster.mpi_world import open_world

    return open_world(job.node.timeout_s)


def for_ranks(job: Job, world: World) -> Job:
    """Return the job for the ranks that were started; collective.

    The number of slots of a member stays the same, because data and gradients depend on it: if the
    job has another number of ranks than the launcher has started, they divide the slots equally.

    :param job: job with `node.ranks_per_node` for all members
    :param world: ranks of this member
    :raises JobError: on all ranks, if they are on several hosts or can't divide the slots
    """
    if world.comm is None:
        return _divided(shape.with_ranks(job, 1), 1) if job.node.ranks_per_node != 1 else job
    world.timeout_s = job.node.timeout_s
    setting = job.node.ranks_per_node
    world.group_into_nodes("host")
    if world.nodes.count > 1:
        raise JobError(
            f"node.ranks_per_node = {setting!r}: all ranks of a member must be on one host, but "
            f"these {world.size} are on {world.nodes.count} hosts: start each member separately, "
            "by `srun --nodes=1 --ntasks=8 mpigossip join RUN JOB.toml` or by a job array"
        )
    return _divided(shape.with_ranks(job, world.size), world.size)


def _divided(job: Job, ranks: int) -> Job:
    """Return the job with its slots divided among ``ranks`` ranks.

    :raises JobError: if the number of slots is not a multiple of the number of ranks
    """
    if job.node.ranks_per_node == ranks:
        return job
    total = shape.slots(job)
    if total % ranks:
        raise JobError(
            f"node.ranks_per_node = {job.node.ranks_per_node}: each member of this training has "
            f"{total} slots (devices of all its ranks), which {ranks} ranks can't divide: start "
            f"this member on {total} ranks, or on a divisor of {total}"
        )
    kind = "gpu" if slots_of(job.node.devices)[0].startswith("cuda") else "cpu"
    node = replace(job.node, ranks_per_node=ranks, devices=f"{kind}:{total // ranks}")
    return replace(job, node=node)

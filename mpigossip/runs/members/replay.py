"""`mpigossip replay`: all members of a training once more in this process, bitwise."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from mpigossip.cluster.ranks import Alone
from mpigossip.config import JobError
from mpigossip.config.readable import note
from mpigossip.mixing.members.disk import Disk
from mpigossip.mixing.members.place import Place
from mpigossip.mixing.members.scripted import Script, Scripted
from mpigossip.runs.members.join import job_there, plan_of
from mpigossip.runs.members.member import Member
from mpigossip.training.assemble import Assembly, assemble


class Repeats(Protocol):
    """What makes a place's models from its exchange: a member."""

    def begin(self, states) -> None:
        """Stand at the average of these models."""

    def train(self, exchange) -> None:
        """Train until there are no more chunks."""


def replay(folder: Path, place: int | None = None, rounds: tuple[int, int] | None = None) -> str:
    """Repeat a training from its records; what was compared. Raises Differs, StoreError, JobError.

    ``place`` and ``rounds`` (first, last): only these, and what they depend on.
    """
    disk = Disk(folder, shared=True)
    if not disk.exists("job.toml"):
        raise JobError([f'"{folder}" holds no training that members join: it has no job.toml'])
    job, made = job_there(disk), list[Assembly]()
    with Alone() as world:

        def member() -> Member:
            made.append(assemble(job, world, 1))
            return Member(made[-1])

        try:
            first = member()
            script = Script(Place(disk, plan_of(made[0]), tell=note))
            low, high = rounds or (1, 1 << 60)
            wanted = [one for one in script.rounds
                      if place in (None, one.place) and low <= one.round <= high]  # fmt: skip
            if not wanted:
                raise JobError([f'"{folder}" has no such rounds'])
            script.choose(script.needed(wanted))
            repeat(script, member, [first])
        finally:
            for one in made:
                one.close()
    places = len({one.place for one in script.wanted})
    found = f"{len(script.wanted)} rounds of {places} places repeated: every digest is equal"
    if script.end and script.wanted.issuperset(script.end):
        sha = hashlib.sha256()
        for version in script.end:
            sha.update(script.models[version].parameters.tobytes())
        found += f"\ndigest {sha.hexdigest()}"
    return found


def repeat(script: Script, new: Callable[[], Repeats], spare: list | None = None) -> None:
    """Each place in a thread, one computing at a time; members of places that ended go on.

    Raises what the first of them raises.
    """
    spare, errors = spare or [], list[BaseException]()
    waiting, threads = {one.place for one in script.wanted}, list[threading.Thread]()

    def work(place: int, member: Repeats) -> None:
        with script.turn:
            try:
                exchange = Scripted(script, place)
                member.begin(exchange.begin())
                member.train(exchange)
            except BaseException as error:
                errors.append(error)
                script.failed = True
            spare.append(member)
            script.turn.notify_all()

    with script.turn:
        while waiting and not script.failed:
            for place in sorted(waiting):
                if all(one in script.models for one in script.starts[place].inputs):
                    waiting.discard(place)
                    member = spare.pop() if spare else new()
                    threads.append(threading.Thread(target=work, args=(place, member)))
                    threads[-1].start()
            if waiting:
                script.turn.wait()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]

"""A training in a folder by members with models of four numbers, on faulty disks."""

import contextlib
import errno
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mpigossip.members.live import FolderExchange, StopRequested
from mpigossip.members.outages import FolderUnreachable
from mpigossip.members.place import FOLDERS, Place, TrainingPlan
from mpigossip.members.records import RecordStore
from mpigossip.runs.members.replay import ReplayLog, repeat
from mpigossip.store import StoreError
from mpigossip.store.checkpoint import NodeState
from tests.members.faults import Faults, here, injected


class Killed(BaseException):
    """The member's process is killed."""


@dataclass
class Bad(RecordStore):
    """Faulty disk of one member: stale listings, lost replies, sometimes full.

    ``kill_at``: number of the operation at which the member is killed.
    """

    root: Path
    chance: random.Random
    kill_at: int = 1 << 60
    stale_s: float = 0.0
    lost: float = 0.0
    full: float = 0.0
    shared: bool = False
    operations: int = 0
    cache: dict = field(default_factory=dict)
    faults: Faults | None = None

    def __post_init__(self):
        super().__init__(self.root, self.shared)
        self.outages.report = lambda line: None

    def path(self, name):
        here.faults = self.faults
        if self.operations >= self.kill_at:
            raise Killed
        self.operations += 1
        return super().path(name)

    def names(self, folder):
        listed_at, names = self.cache.get(folder, (float("-inf"), []))
        if time.monotonic() - listed_at > self.stale_s * self.chance.random():
            names = super().names(folder)
            self.cache[folder] = time.monotonic(), names
        return names

    def link(self, temporary, path):
        if self.chance.random() < self.full:
            raise OSError(errno.ENOSPC, "full")
        super().link(temporary, path)
        if self.chance.random() < self.lost:
            raise FileExistsError(errno.EEXIST, "the reply was lost")


def begin(root: Path) -> None:
    for name in FOLDERS:
        (root / name).mkdir(parents=True)


def state(x: np.ndarray, index: int) -> NodeState:
    return NodeState(x, ("x",), ((len(x),),), {}, {"index": index})


class Tiny:
    """x ← x + sin(chunk + parameter), then the mean with a peer, in float32."""

    def __init__(self, sleep=lambda: None):
        self.x = np.zeros(4, np.float32)
        self.index = 0
        self.sleep = sleep

    def begin(self, states) -> None:
        self.x = np.zeros(4, np.float32)
        for state in states:
            self.x += state.parameters / np.float32(len(states))

    def resume(self, state, rounds, exchange) -> None:
        self.x = state.parameters
        self.index = rounds
        self.meet(exchange)

    def meet(self, exchange) -> None:
        peer = exchange.receive()
        if peer is not None:
            weight = np.float32(exchange.peer_weight)
            self.x = (1 - weight) * self.x + weight * peer.parameters

    def train(self, exchange) -> None:
        while (work := exchange.chunk()) is not None:
            for chunk in range(work[0], work[0] + exchange.chunks):
                self.sleep()
                step = np.sin(np.float32(chunk) + np.arange(4, dtype=np.float32))
                self.x = self.x + step.astype(np.float32) / np.float32(1 + work[1])
            self.index += 1
            exchange.send(state(self.x.copy(), self.index))
            self.meet(exchange)


def member(
    disk: RecordStore, plan: TrainingPlan, stop=lambda: False, sleep=lambda: None, clock=0.0
) -> str:
    """Run a member; return "end", "killed", "left", "queued", "failed" or "traceback"."""
    place = Place(
        disk,
        plan,
        now=lambda: time.monotonic() + clock,
        chance=disk.chance,
        report=lambda line: None,
    )
    live = FolderExchange(place, stop, 0.01)
    try:
        while not place.ended():
            tiny = Tiny(sleep)
            with live.stay():
                tiny.begin(live.begin({}))
                tiny.train(live)
        return "end"
    except StopRequested:
        return "left"
    except Killed:
        return "killed"
    except FolderUnreachable:
        return "queued"
    except StoreError:
        return "failed"
    except OSError:
        return "traceback"
    finally:
        here.faults = None
        live.close()


def chunks_of(root: Path, plan: TrainingPlan) -> Counter:
    """Count the published rounds of each chunk."""
    script = ReplayLog(Place(RecordStore(root, shared=True), plan, report=lambda line: None))
    return Counter(
        record.chunk + offset
        for record in script.rounds.values()
        for offset in range(record.chunks)
    )


def replay(root: Path, plan: TrainingPlan) -> int:
    """Repeat all rounds and return the number of chunks; raise ReplayMismatch if one differs."""
    script = ReplayLog(Place(RecordStore(root, shared=True), plan, report=lambda line: None))
    repeat(script, script.rounds, Tiny())
    return sum(record.chunks for record in script.rounds.values())


def storm(
    root: Path,
    seed: int,
    chunks=120,
    members=5,
    lease_s=0.3,
    slow=0.05,
    rate=0.0,
    longest=1,
    **ills,
):
    """Run members that join, leave, are killed and return, until the training has ended.

    ``slow``: fraction of rounds that take longer than the lease. ``rate``: fraction of operations
    that begin a fault, see `Faults`. ``longest``: largest number of chunks in a round; if it is
    greater than 1, members have different speeds. Return how the
    members ended, and how often each operation failed.
    """
    begin(root)
    chance = random.Random(seed)
    plan = TrainingPlan(chunks, 4, lease_s, longest)
    ends: Counter = Counter()
    done = threading.Event()

    def work(seed: int) -> None:
        draw = random.Random(seed)
        speed = draw.choice((1, 2, 4)) if longest > 1 else 1
        while not done.is_set():
            kill = draw.randint(5, 400) if draw.random() < 0.8 else 1 << 60
            faults = Faults(draw.random(), lease_s, rate) if rate else None
            disk = Bad(root, draw, kill_at=kill, faults=faults, **ills)
            how = member(
                disk,
                plan,
                stop=lambda: draw.random() < 0.02,
                sleep=lambda: time.sleep(draw.random() * 0.01 * speed + (draw.random() < slow)),
                clock=draw.uniform(-600, 600),
            )
            ends[how] += 1
            ends.update(faults.counts if faults else {})
            if how == "end" or ends["failed"] > 500:  # no model is left that can be read
                done.set()

    threads = [threading.Thread(target=work, args=(chance.random(),)) for _ in range(members)]
    with injected() if rate else contextlib.nullcontext():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    ends["alive"] = sum(thread.is_alive() for thread in threads)
    done.set()
    return dict(ends)

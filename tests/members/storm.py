"""A training in a folder by members with models of four numbers, on faulty disks."""

import contextlib
import errno
import queue
import random
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from mpigossip.members.live import FolderExchange, OneRank, StopRequested
from mpigossip.members.outages import FolderUnreachable
from mpigossip.members.parts import Part
from mpigossip.members.place import FOLDERS, Place, TrainingPlan
from mpigossip.members.records import RecordStore
from mpigossip.members.streamed import StreamedExchange
from mpigossip.runs.members.ranks import COUNTERS, Outcome
from mpigossip.runs.members.replay import ReplayLog, repeat
from mpigossip.store import StoreError
from mpigossip.store.checkpoint import NodeState
from mpigossip.store.piecewise import PartSource, StoredModel, Stream
from tests.members.faults import Faults, here, injected


class Killed(BaseException):
    """Exception that stands for the kill of a member's process."""


@dataclass
class Bad(RecordStore):
    """Faulty disk of one member: stale listings, lost replies, sometimes full.

    ``kill_at``: number of the operation at which the member is killed. ``dead``: event that is then
    set, because the operation may belong to the thread that writes models, whose exception nobody
    sees at once.
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
    dead: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self):
        super().__init__(self.root, self.shared)
        self.outages.report = lambda line: None

    def path(self, name):
        here.faults = self.faults
        if self.operations >= self.kill_at:
            self.dead.set()
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
    """Member with a model of four numbers: x ← x + sin(chunk + parameter), in float32.

    After each chunk, x is averaged with the model of a peer. The attribute ``part`` is the part of
    the model that this rank trains; None: the whole model.
    """

    def __init__(self, sleep=lambda: None, part: Part | None = None):
        self.index = 0
        self.sleep = sleep
        self.part = part
        self.own = slice(part.first, part.first + part.count) if part else slice(0, 4)
        self.x = np.zeros(4, np.float32)[self.own]

    def begin(self, states) -> None:
        self.x = np.zeros(4, np.float32)[self.own]
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
                self.x = self.x + step.astype(np.float32)[self.own] / np.float32(1 + work[1])
            self.index += 1
            exchange.send(self.saved())
            self.meet(exchange)

    def saved(self):
        """Return the present model, to be published."""
        saved = state(self.x.copy(), self.index)
        return replace(saved, shapes=((4,),), slot=self.part.rank) if self.part else saved


class ThreadRanks(OneRank):
    """Ranks of a member that are threads of this process; if one is killed, all are."""

    def __init__(self, part: Part, queues: dict, dead: threading.Event):
        self.rank = part.rank
        self.part = part
        self.queues = queues
        self.dead = dead

    def put(self, name: str, rank: int, value) -> None:
        self.queues[name, rank].put(value)

    def get(self, name: str, rank: int):
        while not self.dead.is_set():
            with contextlib.suppress(queue.Empty):
                return self.queues[name, rank].get(timeout=0.02)
        raise Killed

    def decide(self, work, place, read):
        if self.rank:
            while not isinstance(message := self.get("decision", self.rank), Outcome):
                self.put("answer", self.rank, read(message))
            for name, value in message.counters.items():
                setattr(place, name, value)
            if message.error is not None:
                raise message.error
            return message.result
        result = error = None
        try:
            result = work()
        except Exception as raised:  # noqa: BLE001
            error = raised
        counters = {k: getattr(place, k) for k in COUNTERS} if place.number >= 0 else {}
        for rank in range(1, self.part.ranks):
            self.put("decision", rank, Outcome(result, error, counters))
        if error is not None:
            raise error
        return result

    def ask(self, command, read):
        others = range(1, self.part.ranks)
        for rank in others:
            self.put("decision", rank, command)
        return [read(command), *(self.get("answer", rank) for rank in others)]

    def together(self, values: list) -> list:
        """Return the values of all ranks, in rank order; collective."""
        if self.rank:
            self.put("values", self.rank, values)
            return self.get("together", self.rank)
        others = range(1, self.part.ranks)
        values = [*values, *(value for rank in others for value in self.get("values", rank))]
        for rank in others:
            self.put("together", rank, values)
        return values

    def collect(self, value):
        if self.rank:
            self.put("shard", self.rank, value)
            return []
        return [value, *(self.get("shard", rank) for rank in range(1, self.part.ranks))]


class StreamedTiny(Tiny):
    """Member like `Tiny` whose ranks write and read their elements in files, as FSDP2 does."""

    def __init__(self, sleep, exchange: StreamedExchange):
        super().__init__(sleep, exchange.ranks.part)
        self.exchange = exchange

    def read(self, exchange, models: list[StoredModel]) -> list[np.ndarray]:
        """Return the elements of this rank; collective. All ranks raise the error of any rank."""
        results, errors = [], []
        try:
            for model in models:
                read = partial(model.parameters, self.own.start, self.own.stop)
                results.append(exchange.attempt(read))
        except (OSError, StoreError, FolderUnreachable) as error:
            errors.append(error)
        for error in exchange.ranks.together(errors):
            raise error
        return results

    def begin(self, models) -> None:
        with contextlib.ExitStack() as stack:
            for model in models:
                stack.callback(model.close)
            super().begin([state(x, 0) for x in self.read(self.exchange, models)])

    def meet(self, exchange) -> None:
        peer = exchange.receive()
        if peer is None:
            return
        try:
            models = [peer.peer] if peer.then is None else [peer.peer, peer.then]
            other, *then = self.read(exchange, models)
        finally:
            peer.close()
        if then:
            other = self.x + (other - then[0]) / np.float32(1 + peer.late)
        half = np.float32(0.5)
        self.x = half * self.x + half * other

    def saved(self):
        x = self.x.copy()
        pieces = Stream(x.dtype, lambda: iter([x[:1], x[1:]]))
        numbers = {"index": self.index, "local_steps": self.index}
        return PartSource(("x",), ((4,),), len(x), {}, numbers, {"parameters": pieces})


def member_of_ranks(disks: list[Bad], plan: TrainingPlan, **how) -> str:
    """Run a member with a rank, which is a thread, for each disk; return how it ended."""
    count = len(disks)
    each = 4 // count
    dead = threading.Event()
    for disk in disks:
        disk.dead = dead
    queues: dict = defaultdict(queue.SimpleQueue)
    for rank in range(1, count):  # not in several threads
        for name in ("decision", "answer", "shard", "values", "together"):
            queues[name, rank]
    ends: dict[int, str] = {}

    def work(rank: int) -> None:
        part = Part(rank, count, count, rank * each, each)
        ranks = ThreadRanks(part, queues, dead)
        ends[rank] = member(disks[rank], plan, **how, ranks=ranks)
        if ends[rank] == "killed":
            dead.set()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return "killed" if dead.is_set() else ends[0]


def member(
    disk: RecordStore,
    plan: TrainingPlan,
    stop=lambda: False,
    sleep=lambda: None,
    clock=0.0,
    ranks: OneRank | None = None,
    streamed: bool = False,
) -> str:
    """Run a member; return "end", "killed", "left", "queued", "failed" or "traceback"."""
    place = Place(
        disk,
        plan,
        now=lambda: time.monotonic() + clock,
        chance=disk.chance,
        report=lambda line: None,
    )
    live = (StreamedExchange if streamed else FolderExchange)(place, stop, 0.01, ranks)
    try:
        while not live.ended():
            tiny = StreamedTiny(sleep, live) if streamed else Tiny(sleep, live.ranks.part)
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


def member_of_one(disks: list[RecordStore], plan: TrainingPlan, **how) -> str:
    return member(disks[0], plan, **how)


def chunks_of(root: Path, plan: TrainingPlan) -> Counter:
    """Count the published rounds of each chunk."""
    script = ReplayLog(Place(RecordStore(root, shared=True), plan, report=lambda line: None))
    return Counter(
        record.chunk + offset
        for record in script.rounds.values()
        for offset in range(record.chunks)
    )


def replay(root: Path, plan: TrainingPlan, ranks: int = 1) -> int:
    """Repeat all rounds; return their number.

    :raises ReplayMismatch: if the model of a round differs from its record
    """
    reader = Place(RecordStore(root, shared=True), plan, report=lambda line: None)
    script = ReplayLog(reader, ranks)
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
    ranks=1,
    mounts=(),
    streamed=False,
    **ills,
):
    """Run members that join, leave, are killed and return, until the training has ended.

    ``slow``: fraction of rounds that take longer than the lease. ``rate``: fraction of operations
    that begin a fault, see `Faults`. ``longest``: largest number of chunks in a round; if it is
    greater than 1, members have different speeds. ``ranks``: number of ranks of each member.
    ``streamed``: whether each rank writes and reads its elements piece by piece. With ``rate``,
    faults then affect all ranks.
    ``mounts``: other paths of the same folder, which members use in turn; default: ``root``.

    Return how the members ended, and how often each operation failed.
    """
    begin(root)
    chance = random.Random(seed)
    plan = TrainingPlan(chunks, 4, lease_s, longest=longest)
    ends: Counter = Counter()
    done = threading.Event()

    def work(seed: int, root: Path) -> None:
        draw = random.Random(seed)
        speed = draw.choice((1, 2, 4)) if longest > 1 else 1
        while not done.is_set():
            kill = draw.randint(5, 400) if draw.random() < 0.8 else 1 << 60
            faults = Faults(draw.random(), lease_s, rate) if rate else None
            disks = [Bad(root, draw, kill_at=kill, faults=faults, **ills)]
            for _ in range(1, ranks):  # ranks that only read and write models
                kill = draw.randint(5, 60) if draw.random() < 0.3 else 1 << 60
                faults = Faults(draw.random(), lease_s, rate) if rate and streamed else None
                more = random.Random(draw.random())
                disks.append(Bad(root, more, kill_at=kill, faults=faults, **ills))
            how = (member_of_ranks if ranks > 1 else member_of_one)(
                disks,
                plan,
                stop=lambda: draw.random() < 0.02,
                sleep=lambda: time.sleep(draw.random() * 0.01 * speed + (draw.random() < slow)),
                clock=draw.uniform(-600, 600),
                streamed=streamed,
            )
            ends[how] += 1
            for disk in disks:
                ends.update(disk.faults.counts if disk.faults else {})
            if how == "end" or ends["failed"] > 500:  # no model is left that can be read
                done.set()

    roots = mounts or [root]
    threads = [
        threading.Thread(target=work, args=(chance.random(), roots[k % len(roots)]))
        for k in range(members)
    ]
    with injected() if rate else contextlib.nullcontext():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    ends["alive"] = sum(thread.is_alive() for thread in threads)
    done.set()
    return dict(ends)

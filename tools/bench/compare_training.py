"""Training by mpigossip and by others, stragglers, and the plan: for compare_peers.py."""

from __future__ import annotations

import json
import statistics
import time
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import peers
import torch
from peers import meet, say, timed

from mpigossip import config
from mpigossip.analysis import plan
from mpigossip.analysis.machine import Given, examine
from mpigossip.cluster.ranks import World
from mpigossip.training import assemble
from mpigossip.training.costs import subject
from mpigossip.training.evaluate import averaged_model, measure


class Gossip:
    """A job of mpigossip, whose mixer is open only in its turns: its thread would disturb."""

    def __init__(self, ranks: World, name: str, job: dict, batches: Callable | None = None):
        """``batches``: what gives batches in place of the job's own loader."""
        self.ranks, self.name = ranks, name
        self.job = assemble.load(job)
        self.assembly = assemble.assemble(self.job, ranks, ranks.size)
        if batches is not None:
            self.assembly.trainer.settings.batches = batches
        self._layout = self.assembly.trainer.mixer.layout
        self.close()

    def open(self) -> None:
        """A mixer."""
        made = assemble.make_mixer(self.job, self.assembly.graph, self._layout, self.ranks)
        self.assembly.trainer.mixer = made

    def close(self) -> None:
        """No mixer, no thread."""
        self.assembly.trainer.mixer.close()

    def step(self, index: int) -> None:
        """One step."""
        self.assembly.trainer.step()

    def averaged(self) -> torch.nn.Module:
        """The exact average over the nodes."""
        self.open()
        found = averaged_model(self.assembly.trainer.replicas, self.assembly.trainer.mixer)
        self.close()
        return found


def job_of(options, **changed: dict) -> dict:
    """The job that all contenders train: constant rate, momentum 0.9."""
    job: dict[str, dict] = {
        "data": {"source": options.data, "batch": options.batch, "workers": 0},
        "model": {"name": options.model},
        "schedule": {"name": "constant", "lr": options.lr, "scale": "none"},
        "log": {"consensus_every": 0},
        "node": {"same_host": options.same_host},
    }
    return job | {key: job.get(key, {}) | value for key, value in changed.items()}


AHEAD = {"name": "dsgd", "style": "awc", "local": "momentum", "beta": 0.9}
AFTER = {"name": "dmsgd-vanilla", "beta": 0.9}


def trained(ranks: World, options) -> tuple[list[Any], Any]:
    """All contenders, and the assembly whose data all share."""
    ours = [
        Gossip(ranks, "mpigossip dsgd awc (ahead)", job_of(options, algorithm=AHEAD)),
        Gossip(ranks, "mpigossip dmsgd-vanilla", job_of(options, algorithm=AFTER)),
        Gossip(ranks, "mpigossip parallel",
               job_of(options, algorithm={"name": "parallel", "beta": 0.9},
                      graph={"name": "complete"})),
    ]  # fmt: skip
    shared = ours[0].assembly
    batches = shared.loader.step

    def module() -> torch.nn.Module:
        return assemble.make_model(ours[0].job, shared.source)

    megabytes = 4 * sum(p.numel() for p in module().parameters()) / peers.MIB
    caps = [megabytes / 8, megabytes / 3, 25.0]
    tried = []
    for cap in caps:
        one = peers.Ddp(module(), options.lr, batches, cap)
        times = [timed(ranks, lambda k=k, one=one: one.step(k)) for k in range(25)][5:]
        tried.append((statistics.median(times), cap))
        say(ranks, f"  tried {one.name}: {1e3 * tried[-1][0]:.1f} ms a step")
    theirs = [
        peers.Ddp(module(), options.lr, batches, min(tried)[1]),
        peers.periodic(module(), options.lr, batches),
        peers.hierarchical(module(), options.lr, batches),
    ]
    if peers.decent_dp():
        theirs.append(peers.Decent(module(), options.lr, batches))
    return [*ours, *theirs], shared


def accuracy(ranks: World, one: Any, shared: Any) -> float:
    """Of the averaged model, every rank on its share of the test set."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = (
            one.averaged() if isinstance(one, Gossip) else peers.averaged(one.module, ranks.comm)
        )
    objective = shared.trainer.replicas.objective
    sums = measure(objective, model, shared.loader, ranks.rank, ranks.size)
    total = np.sum(ranks.comm.allgather(sums.numpy()), axis=0)
    return float(total[1, 0] / total[1, 1])


def turn(ranks: World, one: Any, steps: range) -> float:
    """Seconds of some steps."""
    one.open()
    seconds = timed(ranks, lambda: [one.step(index) for index in steps])
    one.close()
    return seconds


def train(ranks: World, options) -> None:
    """Epochs of all contenders in turn; seconds an epoch, accuracy, seconds to the target."""
    found, shared = trained(ranks, options)
    if options.only:
        found = [one for one in found if any(word in one.name for word in options.only)]
    per_epoch = options.steps or shared.steps_per_epoch
    for one in found:  # connections, caches, decent-dp's buckets: before anything is timed
        if options.warm_up:
            turn(ranks, one, range(options.warm_up))
    seconds: dict[str, list[float]] = {one.name: [] for one in found}
    reached: dict[str, float] = {}
    right: dict[str, list[float]] = {one.name: [] for one in found}
    for epoch in range(options.epochs):
        for one in found:
            first = options.warm_up + epoch * per_epoch
            steps = range(first, first + per_epoch)
            seconds[one.name].append(turn(ranks, one, steps))
            right[one.name].append(accuracy(ranks, one, shared))
            if right[one.name][-1] >= options.target and one.name not in reached:
                reached[one.name] = sum(seconds[one.name])
        say(ranks, f"epoch {epoch + 1}: " + ", ".join(
            f"{one.name} {seconds[one.name][-1]:.1f} s {right[one.name][-1]:.3f}" for one in found
        ))  # fmt: skip
    ours = statistics.median(seconds[found[0].name])
    say(ranks, f"\n{'':32}{'s an epoch':>11} {'ms a step':>10} {'/ ahead':>8} {'accuracy':>9} "
        f"{f's to {options.target:.0%}':>9}")  # fmt: skip
    for one in found:
        median = statistics.median(seconds[one.name])
        after = f"{reached[one.name]:9.1f}" if one.name in reached else f"{'-':>9}"
        say(ranks, f"{one.name:32}{median:11.2f} {1e3 * median / per_epoch:10.2f} "
            f"{median / ours:8.2f} {right[one.name][-1]:9.3f} {after}")  # fmt: skip
    if options.json and ranks.rank == 0:
        options.json.write_text(json.dumps({"seconds": seconds, "accuracy": right}))


# -- the plan -------------------------------------------------------------------------------------

PLANNED = (
    plan.Choice("one-peer-exponential"),
    plan.Choice("exponential"),
    plan.Choice("ring"),
    plan.Choice("one-peer-exponential", "every"),
    plan.Choice("one-peer-exponential", "always", "bf16"),
    plan.Choice(plan.ALL_REDUCE),
)


def planned(ranks: World, options) -> None:
    """Steps as `mpigossip plan` predicts them here, and as they are."""
    job = job_of(options, algorithm=AFTER)
    what, _ = subject(assemble.load(job))
    machine = examine(what, ranks, Given(), 4.0)
    say(ranks, f"compute {1e3 * machine.compute_s:.2f} ms, update {1e3 * machine.update_s:.2f} ms, "
        f"latency {1e3 * machine.latency_s:.2f} ms, bandwidth {machine.bandwidth / 1e6:.1f} MB/s, "
        f"{4 * what.flat.size / 1e3:.0f} kB, {machine.where}")  # fmt: skip
    say(ranks, f"{'':32}{'predicted ms':>13} {'measured ms':>12} {'ratio':>6}")
    for choice in PLANNED:
        row = plan.predict(what, machine, choice, ranks.size, 1)
        one = Gossip(ranks, plan.name(choice), config.as_dict(choice.job(what.job)))
        turn(ranks, one, range(10))
        times = [turn(ranks, one, range(30)) / 30 for _ in range(max(3, int(options.seconds)))]
        measured = statistics.median(times)
        say(ranks, f"{one.name:32}{1e3 * row.step_s:13.2f} {1e3 * measured:12.2f} "
            f"{row.step_s / measured:6.2f}")  # fmt: skip


# -- stragglers -------------------------------------------------------------------------------


class Slowed:
    """Batches that take as long as a device's compute would, and for a slowed node four times.

    Each step sleeps until ``step_s`` have passed since the last; in half of the windows of
    ``WINDOW_S`` seconds one node, drawn anew for each, takes ``times`` as long.
    """

    WINDOW_S = 0.5

    def __init__(self, ranks: World, batches: Callable, step_s: float, times: float):
        """``batches``: what is delayed."""
        self.ranks, self.batches, self.step_s, self.times = ranks, batches, step_s, times
        self.began = time.perf_counter()

    def __call__(self, index: int) -> Any:
        """The batch of a step, late."""
        window = int((time.perf_counter() - self.began) / self.WINDOW_S)
        drawn = zlib.crc32(f"window {window}".encode())
        slow = drawn % 2 == 0 and drawn // 2 % self.ranks.size == self.ranks.rank
        time.sleep(self.step_s * (self.times if slow else 1.0))
        return self.batches(index)


def straggle(ranks: World, options) -> None:
    """Fixed wall time for each contender: steps done over all nodes, and the accuracy."""
    options.batch, options.model = 8, "lenet"
    kinds: dict[str, dict[str, dict]] = {
        "synchronous gossip": {"algorithm": AFTER},
        "periodic average (8)": {"algorithm": AFTER, "cadence": {"name": "cpsgd"}},
        "asynchronous gossip": {"algorithm": AFTER, "node": {"mixer": "asynchronous"}},
        "parallel SGD": {"algorithm": {"name": "parallel", "beta": 0.9},
                         "graph": {"name": "complete"}},
    }  # fmt: skip
    say(ranks, f"{'':24}{'steps/s, none slow':>19} {'one slow x4':>12} {'kept':>6} {'accuracy':>9}")
    for name, changed in kinds.items():
        rates = []
        for times in (1.0, 4.0):
            one = Gossip(ranks, name, job_of(options, **changed))
            source = Slowed(ranks, one.assembly.loader.step, options.step_ms / 1e3, times)
            one.assembly.trainer.settings.batches = source
            rates.append(_for_a_while(ranks, one, source, options.seconds))
        found = accuracy(ranks, one, one.assembly)
        say(ranks, f"{name:24}{rates[0]:19.1f} {rates[1]:12.1f} {rates[1] / rates[0]:6.0%} "
            f"{found:9.3f}")  # fmt: skip


def _for_a_while(ranks: World, one: Gossip, source: Slowed, seconds: float) -> float:
    """Steps a second of an average node.

    The number of steps is fixed, as synchronous rounds need it; each node's rate is its own.
    """
    one.open()
    meet(ranks)
    source.began = time.perf_counter()
    began, done = time.perf_counter(), 0
    together = one.job.node.mixer == "synchronous"
    while True:
        one.step(done)
        done += 1
        late = time.perf_counter() - began > seconds
        # the rank that leaves first would leave the others waiting: they leave together
        if together and done % 8 == 0:
            late = bool(ranks.agree(int(late)))
        if late and (not together or done % 8 == 0):
            break
    mine = done / (time.perf_counter() - began)
    meet(ranks)
    one.close()
    return statistics.fmean(ranks.comm.allgather(mine))

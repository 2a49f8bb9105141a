r"""Compare averaging and training by mpigossip with gloo, torch's DDP and MPI_Allreduce.

    mpirun -n 4 python tools/bench/compare_peers.py average --megabytes 100
    tools/labs/net.sh run 4 python tools/bench/compare_peers.py train --interface eth0 \
        --data cifar10.h5 --epochs 6

All contenders run in the same launch, one after the other in each repeat. The tool prints medians,
ratios, and whether the averages are exact.
"""

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import peers
import torch
from peers import WAIT_S, say, timed

from mpigossip.analysis.bench import limit_memory
from mpigossip.cluster.ranks import World, world
from mpigossip.graphs import graph
from mpigossip.mixing import open_mixer
from mpigossip.mixing.base import ExchangeKind, MessageLayout
from mpigossip.training import assemble
from mpigossip.training.evaluate import averaged_model, measure

# -- averaging --------------------------------------------------------------------------------


class Ours:
    """Contender mpigossip: a mixer averages vectors in its outbox."""

    def __init__(self, ranks: World, count: int, name: str, kind=ExchangeKind.GOSSIP, copies=False):
        """Open a mixer for vectors of ``count`` elements.

        :param ranks: all ranks
        :param count: number of elements
        :param name: name of the graph
        :param kind: kind of the exchange
        :param copies: whether to copy a model into the outbox and the result back, as a program
            has to that averages its own array
        """
        self.name = f"mpigossip {name if kind is ExchangeKind.GOSSIP else 'global average'}"
        self.name += ", with copies in and out" if copies else ""
        self.mixer = open_mixer(
            graph(name, ranks.size), MessageLayout((count,)), ranks, timeout_s=WAIT_S
        )
        self.kind = kind
        self.copies = copies
        self.t = 0
        self.x = torch.zeros(1, count)

    def fill(self, value: float) -> None:
        """Set every element to the value."""
        self.x.fill_(value)
        self.prepare()

    def prepare(self) -> None:
        """Copy the model to the outbox; not timed, because an algorithm writes there itself."""
        if not self.copies:
            self.mixer.outbox(self.t)[0][0].copy_(self.x)

    def round(self) -> None:
        """Make one exchange."""
        if self.copies:
            self.mixer.outbox(self.t)[0][0].copy_(self.x)
        self.mixer.start(self.kind, self.t)
        _, mixed = self.mixer.finish()
        if self.copies:
            self.x.copy_(mixed[0][0])
        self.mixed = mixed[0][0]
        self.t += self.kind is ExchangeKind.GOSSIP

    def after(self) -> None:
        """Use the result as the next model; this is not timed."""
        if not self.copies:
            self.x.copy_(self.mixed)

    def ends(self) -> tuple[float, float]:
        """Return the smallest and the largest element."""
        return float(self.x.min()), float(self.x.max())


def contenders(ranks: World, count: int) -> list[Any]:
    """Return all contenders for vectors of ``count`` elements.

    DDP is included with the best of three bucket sizes, which is measured here.
    """
    limit = SimpleNamespace(name="limit: average of private arrays", round=limit_memory(count))
    all_contenders: list[Any] = [limit]
    for name in ("one-peer-hypercube", "one-peer-exponential"):
        all_contenders += [Ours(ranks, count, name), Ours(ranks, count, name, copies=True)]
    all_contenders.append(Ours(ranks, count, "complete", ExchangeKind.GLOBAL))
    theirs = (peers.Pairs, peers.Neighbour, peers.Periodic, peers.Allreduce)
    all_contenders += [make(ranks.comm, count) for make in theirs]
    caps = sorted({max(1, count * 4 // 10**6 // part) for part in (1, 4, 16)})
    all_contenders.append(
        best(ranks, [lambda c=c: peers.Gradients(ranks.comm, count, c) for c in caps])
    )
    return all_contenders


def best(ranks: World, makes: Sequence[Callable[[], Any]]) -> Any:
    """Return the fastest of several variants of one contender.

    :param ranks: all ranks
    :param makes: functions that create a variant each
    """
    tried = []
    for make in makes:
        contender = make()
        contender.fill(1.0)
        contender.round()
        times = [timed(ranks, contender.round) for _ in range(3)]
        tried.append((statistics.median(times), len(tried), contender))
        say(ranks, f"  tried {contender.name}: {1e3 * tried[-1][0]:.0f} ms")
    return min(tried)[2]


def exact(ranks: World, contender: Any) -> bool:
    """Return whether a contender averages exactly.

    Each of n ranks begins with x = rank + 1. After ⌈log2 n⌉ rounds, every element has to be
    (n + 1)/2.
    """
    contender.fill(float(ranks.rank + 1))
    for _ in range((ranks.size - 1).bit_length()):
        contender.round()
        getattr(contender, "after", lambda: None)()
        getattr(contender, "prepare", lambda: None)()
    wanted = (ranks.size + 1) / 2
    return all(ranks.comm.allgather(contender.ends() == (wanted, wanted)))


def average(ranks: World, options) -> None:
    """Measure rounds of one vector with all contenders, and print the table."""
    count = options.megabytes * 10**6 // 4 // 4096 * 4096
    all_contenders = contenders(ranks, count)
    right = {contender.name: exact(ranks, contender) for contender in all_contenders[1:]}
    times: dict[str, list[float]] = {contender.name: [] for contender in all_contenders}
    began = time.perf_counter()
    for repeat in range(100):
        for contender in all_contenders:
            getattr(contender, "prepare", lambda: None)()
            times[contender.name].append(timed(ranks, contender.round))
        late = time.perf_counter() - began > options.seconds and repeat >= 4
        if ranks.comm.bcast(late):
            break
    middle = {name: statistics.median(each) for name, each in times.items()}
    ours = [name for name in middle if name.startswith("mpigossip one-peer")]
    say(ranks, f"{ranks.size} ranks, {4 * count / 1e6:.0f} MB, {repeat + 1} repeats; medians")
    say(
        ranks,
        f"{'':46}{'ms':>8} {'spread':>7} {'x limit':>8} {'exact':>6} {'/ pairs':>8} "
        f"{'/ directed':>10}",
    )
    for name, each in times.items():
        quarters = statistics.quantiles(each, n=4)
        spread = (quarters[2] - quarters[0]) / middle[name]
        ratios = [middle[name] / middle[other] for other in (ours[0], ours[2])]
        say(
            ranks,
            f"{name:46}{1e3 * middle[name]:8.1f} {spread:7.0%} "
            f"{middle[name] / middle[all_contenders[0].name]:8.2f} {right.get(name, '-')!s:>6} "
            f"{ratios[0]:8.2f} {ratios[1]:10.2f}",
        )
    for contender in all_contenders:
        if isinstance(contender, Ours):
            contender.mixer.close()


# -- training -----------------------------------------------------------------------------------


class Gossip:
    """Contender mpigossip: a job of this package.

    Its mixer is open only during its own turns, because the progress thread would disturb others.
    """

    def __init__(self, ranks: World, name: str, job: dict):
        """Create a trainer without its mixer."""
        self.ranks = ranks
        self.name = name
        self.job = assemble.load(job)
        self.assembly = assemble.assemble(self.job, ranks, ranks.size)
        self.close()

    def open(self) -> None:
        """Open a mixer, at the beginning of a turn."""
        made = self.assembly.parts.open_mixer(self.ranks)
        self.assembly.trainer.engine.replace_mixer(made)

    def close(self) -> None:
        """Close the mixer and its thread."""
        self.assembly.trainer.mixer.close()

    def step(self, index: int) -> None:
        """Make one step."""
        self.assembly.trainer.step()

    def averaged(self) -> torch.nn.Module:
        """Return the exact average over the nodes."""
        self.open()
        model = averaged_model(self.assembly.trainer.replicas, self.assembly.trainer.mixer)
        self.close()
        return model


def job_of(options, algorithm: str, style: str = "atc", graph: str = "one-peer-exponential"):
    """Return the job that all contenders train, with a constant learning rate and momentum 0.9."""
    words = {"style": style} if algorithm == "dsgd" else {}
    return {
        "data": {"source": options.data, "batch": options.batch, "workers": 0},
        "model": {"name": options.model},
        "algorithm": {"name": algorithm} | words,
        "local": {"name": "momentum", "beta": 0.9},
        "graph": {"name": graph},
        "schedule": {"name": "constant", "lr": options.lr, "scale": "none"},
        "log": {"consensus_every": 0},
    }


def trained(ranks: World, options) -> tuple[list[Any], Any]:
    """Return all contenders, and the assembly whose data they share."""
    ours = [
        Gossip(ranks, "mpigossip dsgd awc (ahead)", job_of(options, "dsgd", "awc")),
        Gossip(ranks, "mpigossip dmsgd-vanilla", job_of(options, "dmsgd-vanilla")),
        Gossip(ranks, "mpigossip parallel", job_of(options, "parallel", graph="complete")),
    ]
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
        say(ranks, f"  tried {one.name}: {1e3 * tried[-1][0]:.1f} ms per step")
    return [*ours, peers.Ddp(module(), options.lr, batches, min(tried)[1])], shared


def accuracy(ranks: World, one: Any, shared: Any) -> float:
    """Return the accuracy of the averaged model; every rank tests its part of the test set."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = one.averaged()
    objective = shared.trainer.replicas.objective
    sums = measure(objective, model, shared.loader, ranks.rank, ranks.size)
    total = np.sum(ranks.comm.allgather(sums.numpy()), axis=0)
    return float(total[1, 0] / total[1, 1])


def turn(ranks: World, one: Any, steps: range) -> float:
    """Let a contender make some steps; return the seconds.

    :param ranks: all ranks; the time of the slowest is returned
    :param one: the contender
    :param steps: numbers of the steps
    """
    one.open()
    seconds = timed(ranks, lambda: [one.step(index) for index in steps])
    one.close()
    return seconds


def train(ranks: World, options) -> None:
    """Train epochs of all contenders in turn; print seconds per epoch, and accuracy."""
    all_contenders, shared = trained(ranks, options)
    if options.only:
        all_contenders = [
            contender
            for contender in all_contenders
            if any(word in contender.name for word in options.only)
        ]
    per_epoch = options.steps or shared.steps_per_epoch
    for contender in all_contenders:  # Create connections and caches before anything is timed.
        if options.warm_up:
            turn(ranks, contender, range(options.warm_up))
    seconds: dict[str, list[float]] = {contender.name: [] for contender in all_contenders}
    right: dict[str, list[float]] = {contender.name: [] for contender in all_contenders}
    for epoch in range(options.epochs):
        for contender in all_contenders:
            first = options.warm_up + epoch * per_epoch
            steps = range(first, first + per_epoch)
            seconds[contender.name].append(turn(ranks, contender, steps))
            right[contender.name].append(accuracy(ranks, contender, shared))
        say(
            ranks,
            f"epoch {epoch + 1}: "
            + ", ".join(
                f"{name} {seconds[name][-1]:.1f} s {right[name][-1]:.3f}" for name in seconds
            ),
        )
    ours = statistics.median(seconds[all_contenders[0].name])
    say(ranks, f"\n{'':32}{'s an epoch':>11} {'ms a step':>10} {'/ ahead':>8} {'accuracy':>9}")
    for contender in all_contenders:
        median = statistics.median(seconds[contender.name])
        say(
            ranks,
            f"{contender.name:32}{median:11.2f} {1e3 * median / per_epoch:10.2f} "
            f"{median / ours:8.2f} {right[contender.name][-1]:9.3f}",
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the arguments, and run on every rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["average", "train"])
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--interface", default="lo", help="for gloo")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, help="steps of an epoch; default: all")
    parser.add_argument("--warm-up", type=int, default=0, help="steps before anything is timed")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="contenders with a word in name")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with world() as ranks:
        if ranks.size < 2 or ranks.size & (ranks.size - 1):
            sys.exit(
                f"{ranks.size} ranks: averages of pairs are exact for a power of two only; start "
                "2, 4, 8 … ranks"
            )
        peers.join(ranks.comm, options.interface)
        (average if options.what == "average" else train)(ranks, options)
        peers.dist.destroy_process_group()


if __name__ == "__main__":
    main()

r"""Compare averaging and training by mpigossip with gloo, torch's DDP and MPI_Allreduce.

    mpirun -n 4 python tools/bench/compare_peers.py average --megabytes 100
    tools/labs/net.sh run 4 python tools/bench/compare_peers.py train --interface eth0 \
        --data cifar10.h5 --epochs 6

Each library with its settings is a contender. All contenders run in the same launch, one after the
other in each repeat. `average` prints the median time of a round, its ratio to the times of
mpigossip, and whether the averages are exact; `train` prints the median time of an epoch, and the
accuracy of the averaged model.
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
from mpigossip.cluster.mpi_world import MPIWorld, open_world
from mpigossip.graphs import graph
from mpigossip.mixing import open_mixer
from mpigossip.mixing.base import ExchangeKind, MessageLayout
from mpigossip.training import assemble
from mpigossip.training.evaluate import averaged_model, measure

# -- averaging --------------------------------------------------------------------------------


class MixerContender:
    """Contender mpigossip: a mixer averages one vector per rank."""

    def __init__(
        self, ranks: MPIWorld, count: int, name: str, kind=ExchangeKind.GOSSIP, copies=False
    ):
        """Open a mixer for vectors of ``count`` elements.

        :param ranks: all ranks, each of which is a node
        :param count: number of float32 elements
        :param name: name of the graph
        :param kind: kind of all exchanges
        :param copies: whether a round includes copies from the vector to the outbox and from the
            result to the vector; a program needs them if it averages an array of its own
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
        """Set every element of this rank's vector to ``value``, and prepare the next round."""
        self.x.fill_(value)
        self.prepare()

    def prepare(self) -> None:
        """Copy the vector to the outbox, unless a round does so.

        This copy is not timed, because an algorithm computes its message in the outbox.
        """
        if not self.copies:
            self.mixer.outbox(self.t)[0][0].copy_(self.x)

    def round(self) -> None:
        """Exchange and average once, with the copies if ``copies`` is true."""
        if self.copies:
            self.mixer.outbox(self.t)[0][0].copy_(self.x)
        self.mixer.start(self.kind, self.t)
        _, mixed = self.mixer.finish()
        if self.copies:
            self.x.copy_(mixed[0][0])
        self.mixed = mixed[0][0]
        self.t += self.kind is ExchangeKind.GOSSIP

    def after(self) -> None:
        """Copy the result of a round to the vector, unless the round did so; not timed."""
        if not self.copies:
            self.x.copy_(self.mixed)

    def ends(self) -> tuple[float, float]:
        """Return the smallest and the largest element of this rank's vector."""
        return float(self.x.min()), float(self.x.max())


def contenders(ranks: MPIWorld, count: int) -> list[Any]:
    """Return a limit, and all contenders that average a vector.

    The limit is the time of averaging two arrays in private memory, without communication. DDP is
    measured here with up to three bucket sizes, and is included with the fastest one.

    :param ranks: all ranks
    :param count: number of float32 elements of the vector
    """
    limit = SimpleNamespace(name="limit: average of private arrays", round=limit_memory(count))
    all_contenders: list[Any] = [limit]
    for name in ("one-peer-hypercube", "one-peer-exponential"):
        all_contenders += [
            MixerContender(ranks, count, name),
            MixerContender(ranks, count, name, copies=True),
        ]
    all_contenders.append(MixerContender(ranks, count, "complete", ExchangeKind.GLOBAL))
    others = (peers.Pairs, peers.Neighbour, peers.Periodic, peers.Allreduce)
    all_contenders += [make(ranks.comm, count) for make in others]
    caps = sorted({max(1, count * 4 // 10**6 // part) for part in (1, 4, 16)})
    all_contenders.append(
        fastest(ranks, [lambda c=c: peers.Gradients(ranks.comm, count, c) for c in caps])
    )
    return all_contenders


def fastest(ranks: MPIWorld, factories: Sequence[Callable[[], Any]]) -> Any:
    """Create and measure variants of one contender; return the variant with the shortest round.

    :param ranks: all ranks
    :param factories: functions, each of which creates one variant
    """
    results = []
    for make in factories:
        contender = make()
        contender.fill(1.0)
        contender.round()
        times = [timed(ranks, contender.round) for _ in range(3)]
        results.append((statistics.median(times), len(results), contender))
        say(ranks, f"  {contender.name}: {1e3 * results[-1][0]:.0f} ms per round")
    return min(results)[2]


def is_exact(ranks: MPIWorld, contender: Any) -> bool:
    """Return whether a contender computes the exact average over all ranks.

    At the start, all elements of a rank's vector are rank + 1. After ⌈log2 n⌉ rounds of n ranks,
    every element on every rank has to be (n + 1)/2.

    :param ranks: all ranks, which call this function together
    :param contender: contender that averages a vector
    """
    contender.fill(float(ranks.rank + 1))
    for _ in range((ranks.size - 1).bit_length()):
        contender.round()
        getattr(contender, "after", lambda: None)()
        getattr(contender, "prepare", lambda: None)()
    wanted = (ranks.size + 1) / 2
    return all(ranks.comm.allgather(contender.ends() == (wanted, wanted)))


def average(ranks: MPIWorld, options) -> None:
    """Measure rounds with all contenders, and print a table of their median times.

    :param ranks: all ranks
    :param options: options of the command line; the size of the vector is ``options.megabytes``
    """
    count = options.megabytes * 10**6 // 4 // 4096 * 4096
    all_contenders = contenders(ranks, count)
    exact = {contender.name: is_exact(ranks, contender) for contender in all_contenders[1:]}
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
            f"{middle[name] / middle[all_contenders[0].name]:8.2f} {exact.get(name, '-')!s:>6} "
            f"{ratios[0]:8.2f} {ratios[1]:10.2f}",
        )
    for contender in all_contenders:
        if isinstance(contender, MixerContender):
            contender.mixer.close()


# -- training -----------------------------------------------------------------------------------


class GossipTraining:
    """Contender mpigossip: a training by a job of this package.

    The mixer is open only during the turns of this contender, because its progress thread would
    otherwise slow down the other contenders.
    """

    def __init__(self, ranks: MPIWorld, name: str, job: dict):
        """Build the training of a job, and close its mixer.

        :param ranks: all ranks, each of which is a node
        :param name: name of the contender in the table
        :param job: settings by section and key
        """
        self.ranks = ranks
        self.name = name
        self.job = assemble.load(job)
        self.assembly = assemble.assemble(self.job, ranks, ranks.size)
        self.close()

    def open(self) -> None:
        """Open a new mixer at the beginning of a turn."""
        mixer = self.assembly.parts.open_mixer(self.ranks)
        self.assembly.trainer.engine.replace_mixer(mixer)

    def close(self) -> None:
        """Close the mixer, which ends its progress thread, at the end of a turn."""
        self.assembly.trainer.mixer.close()

    def step(self, index: int) -> None:
        """Make the next training step; the trainer counts steps itself and ignores ``index``."""
        self.assembly.trainer.step()

    def averaged(self) -> torch.nn.Module:
        """Return the model whose parameters are the exact average over the nodes."""
        self.open()
        model = averaged_model(self.assembly.trainer.replicas, self.assembly.trainer.mixer)
        self.close()
        return model


def job_of(options, algorithm: str, style: str = "atc", graph: str = "one-peer-exponential"):
    """Return the settings of a job with a constant learning rate and momentum 0.9, by section.

    :param options: options of the command line: data, model, batch and learning rate
    :param algorithm: name of the algorithm
    :param style: option "style" of the algorithm dsgd; other algorithms ignore it
    :param graph: name of the graph
    """
    dsgd_options = {"style": style} if algorithm == "dsgd" else {}
    return {
        "data": {"source": options.data, "batch": options.batch, "workers": 0},
        "model": {"name": options.model},
        "algorithm": {"name": algorithm} | dsgd_options,
        "local": {"name": "momentum", "beta": 0.9},
        "graph": {"name": graph},
        "schedule": {"name": "constant", "lr": options.lr, "scale": "none"},
        "log": {"consensus_every": 0},
    }


def make_trainings(ranks: MPIWorld, options) -> tuple[list[Any], Any]:
    """Create the contenders that train a model.

    DDP is measured here with three bucket sizes, and is included with the fastest one.

    :param ranks: all ranks
    :param options: options of the command line
    :return: the contenders, and the assembly whose data all of them use
    """
    ours = [
        GossipTraining(ranks, "mpigossip dsgd awc (ahead)", job_of(options, "dsgd", "awc")),
        GossipTraining(ranks, "mpigossip dmsgd-vanilla", job_of(options, "dmsgd-vanilla")),
        GossipTraining(ranks, "mpigossip parallel", job_of(options, "parallel", graph="complete")),
    ]
    shared = ours[0].assembly
    batches = shared.loader.step

    def module() -> torch.nn.Module:
        return assemble.make_model(ours[0].job, shared.source)

    megabytes = 4 * sum(p.numel() for p in module().parameters()) / peers.MIB
    caps = [megabytes / 8, megabytes / 3, 25.0]
    results = []
    for cap in caps:
        ddp = peers.Ddp(module(), options.lr, batches, cap)
        times = [timed(ranks, lambda k=k, ddp=ddp: ddp.step(k)) for k in range(25)][5:]
        results.append((statistics.median(times), cap))
        say(ranks, f"  {ddp.name}: {1e3 * results[-1][0]:.1f} ms per step")
    return [*ours, peers.Ddp(module(), options.lr, batches, min(results)[1])], shared


def accuracy(ranks: MPIWorld, contender: Any, shared: Any) -> float:
    """Return the accuracy of a contender's averaged model on the test set, from 0 to 1.

    :param ranks: all ranks, each of which tests the model on a part of the test set
    :param contender: the contender
    :param shared: assembly whose test set and loss are used
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = contender.averaged()
    objective = shared.trainer.replicas.objective
    sums = measure(objective, model, shared.loader, ranks.rank, ranks.size)
    total = np.sum(ranks.comm.allgather(sums.numpy()), axis=0)
    return float(total[1, 0] / total[1, 1])


def turn(ranks: MPIWorld, contender: Any, steps: range) -> float:
    """Let a contender make some steps; return the seconds that the slowest rank needs for them.

    :param ranks: all ranks
    :param contender: the contender
    :param steps: numbers of the steps, which select the batches
    """
    contender.open()
    seconds = timed(ranks, lambda: [contender.step(index) for index in steps])
    contender.close()
    return seconds


def train(ranks: MPIWorld, options) -> None:
    """Train with all contenders, which take turns; print seconds per epoch, and accuracies.

    :param ranks: all ranks
    :param options: options of the command line
    """
    all_contenders, shared = make_trainings(ranks, options)
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
    accuracies: dict[str, list[float]] = {contender.name: [] for contender in all_contenders}
    for epoch in range(options.epochs):
        for contender in all_contenders:
            first = options.warm_up + epoch * per_epoch
            steps = range(first, first + per_epoch)
            seconds[contender.name].append(turn(ranks, contender, steps))
            accuracies[contender.name].append(accuracy(ranks, contender, shared))
        say(
            ranks,
            f"epoch {epoch + 1}: "
            + ", ".join(
                f"{name} {seconds[name][-1]:.1f} s {accuracies[name][-1]:.3f}" for name in seconds
            ),
        )
    ours = statistics.median(seconds[all_contenders[0].name])
    say(ranks, f"\n{'':32}{'s/epoch':>11} {'ms/step':>10} {'/ ahead':>8} {'accuracy':>9}")
    for contender in all_contenders:
        median = statistics.median(seconds[contender.name])
        say(
            ranks,
            f"{contender.name:32}{median:11.2f} {1e3 * median / per_epoch:10.2f} "
            f"{median / ours:8.2f} {accuracies[contender.name][-1]:9.3f}",
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the arguments, and measure averages or trainings on all ranks.

    :param arguments: words of the command line; None: the words of ``sys.argv``
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["average", "train"])
    parser.add_argument("--megabytes", type=int, default=100, help="size of an averaged vector")
    parser.add_argument("--seconds", type=float, default=20.0, help="time for measuring averages")
    parser.add_argument("--interface", default="lo", help="network interface that gloo uses")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, help="steps per epoch; default: all of the data set")
    parser.add_argument("--warm-up", type=int, default=0, help="steps before anything is timed")
    parser.add_argument(
        "--only", nargs="+", metavar="WORD", help="train only contenders with such a word in a name"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with open_world() as ranks:
        if ranks.size < 2 or ranks.size & (ranks.size - 1):
            sys.exit(
                f"{ranks.size} ranks were started, but averages of pairs are exact only if the "
                "number of ranks is a power of two: start 2, 4 or 8 ranks, for example"
            )
        peers.join(ranks.comm, options.interface)
        (average if options.what == "average" else train)(ranks, options)
        peers.dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Measure steps over links of different rates, and compare them with predictions of `plan`.

    python tools/bench/atlas.py --out FILE.jsonl             measures missing cells; needs root
    python tools/bench/atlas.py --out FILE.jsonl --show      prints the table

Four ranks, each in a network namespace that acts as a host (tools/labs/net.sh), train 1.05 M
parameters. Instead of computing for 200 ms, a step sleeps. A cell is one method on one network;
cells that FILE already contains are not measured again.

For the predictions, the machine is measured with messages of other sizes on the first network, and
on each network with added latency. For all other networks, the nominal rate of the link replaces
the measured one. "Utilization" is the ratio of computation time to step time. Bytes are all bytes
that leave a host, including headers.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
LAB = ROOT / "tools" / "labs" / "net.sh"
HOSTS = 4
COMPUTE_S = 0.2
SLOW_TIMES = 3.0
SLOW_GBIT = 0.02
NOMINAL = 119e6
"""Bytes per second of payload that TCP transfers over a link of 1 Gbit/s."""
BASE = "1 Gbit/s"
"""Network on which the machine is measured, to predict links of other rates."""
WIDTH = 512
LAYERS = 4
"""Number of hidden layers, 512 x 512 each: 1.05 M parameters with the first and the last layer."""
SECONDS = 6.0
"""Approximate seconds for which a cell is measured. A cell has whole periods of its graph and
cadence, and at least two steps."""


class Network(NamedTuple):
    """Links between the hosts: rate in the form of `tc` and in Gbit/s, slow part, added latency.

    The slow part is "link" if one link is slow, "node" if one node computes slowly, or "". The
    latency is in milliseconds.
    """

    rate: str
    gbit: float
    slow: str = ""
    latency: str = "0"


NETWORKS = {
    "1 Gbit/s": Network("1gbit", 1.0),
    "100 Mbit/s": Network("100mbit", 0.1),
    "10 Mbit/s": Network("10mbit", 0.01),
    "100 Mbit/s, one link 20": Network("100mbit", 0.1, "link"),
    "100 Mbit/s, one node 3 x": Network("100mbit", 0.1, "node"),
    "100 Mbit/s, 5 ms": Network("100mbit", 0.1, latency="5"),
    "100 Mbit/s, 50 ms": Network("100mbit", 0.1, latency="50"),
}
PEER = "graph.name=one-peer-exponential"
EVERY = "algorithm.name=dsgd cadence.name=always"
METHODS = {
    "DDP (gloo)": "",
    "parallel": "algorithm.name=parallel graph.name=complete",
    "one-peer": f"{EVERY} {PEER}",
    **{f"DiLoCo {h}": f"algorithm.name=diloco graph.name=complete cadence.name=cpsgd "
       f"cadence.period={h}" for h in (8, 32, 128)},
    **{f"fragments {h}": f"algorithm.name=diloco graph.name=complete cadence.name=cpsgd "
       f"cadence.period={h} cadence.fragments=4 cadence.delay=1" for h in (8, 32, 128)},
    **{f"GASLoC {h}": f"algorithm.name=gasloc {PEER} cadence.name=every cadence.period={h}"
       for h in (8, 32, 128)},
}  # fmt: skip
CLOCK = {
    f"{graph}, {cadence}": f"algorithm.name=dsgd graph.name={graph} cadence.name={cadence}"
    for graph in ("one-peer-exponential", "ring", "complete")
    for cadence in ("always", "every")
}
"""Jobs that check the virtual clock, at 1 Gbit/s and 100 Mbit/s."""
SMALL = [
    "data.source=synthetic", "data.shape=[1,2,2]", "data.classes=2", "data.batch=1",
    "data.samples=65536", "data.test_samples=4", "data.workers=0", "run.epochs=1",
    "model.name=tools.bench.atlas:layers", f"model.seconds={COMPUTE_S}", "schedule.lr=0.001",
    "schedule.name=constant", "schedule.scale=none", "log.consensus_every=0", "data.cache=never",
]  # fmt: skip


def job_of(words: str, slow: str):
    """Return the job of a cell.

    :param words: settings of the method; "": those of parallel SGD
    :param slow: slow part of the network, as in `Network`
    """
    from mpigossip.training import assemble

    own = [f"model.times={SLOW_TIMES}", f"model.slow={HOSTS - 1}"] if slow == "node" else []
    given = words or "algorithm.name=parallel graph.name=complete"
    return assemble.load({}, [*SMALL, *own, *given.split()])


def sent_bytes() -> int:
    """Return the bytes that this host has sent so far."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("eth0:"):
            return int(line.split()[9])
    return 0


def at_rate(measured: float, gbit: float) -> float:
    """Return the bytes per second over a link of another rate.

    The time that the machine itself needs for a byte is assumed to stay the same.

    :param measured: bytes per second that were measured over 1 Gbit/s
    :param gbit: the other rate in Gbit/s
    """
    own = max(1 / measured - 1 / NOMINAL, 0.0)
    return 1 / (own + 1 / (gbit * NOMINAL))


def linked(machine, gbit: float):
    """Return the values of a machine, measured at 1 Gbit/s, for links of another rate.

    :param machine: measured values
    :param gbit: the other rate in Gbit/s
    """
    return replace(
        machine,
        bandwidth=at_rate(machine.bandwidth, gbit),
        global_bandwidth=at_rate(machine.global_bandwidth, gbit),
    )


def predicted(words: str, slow: str, machine, gbit: float | None) -> float:
    """Return the seconds of a step according to the virtual clock.

    :param words: settings of the method
    :param slow: slow part of the network, as in `Network`
    :param machine: measured values of the machine
    :param gbit: rate of the links in Gbit/s; None: the links with which the machine was measured
    """
    from mpigossip.training.costs import exchanges, subject
    from mpigossip.training.time_model import Clock, Timing

    job = job_of(words, slow)
    made = exchanges(subject(job)[0], HOSTS)
    here = linked(machine, gbit) if gbit else machine
    links = np.full(HOSTS, here.bandwidth)
    pace = np.ones((1, HOSTS))
    if slow == "link":
        links[-1] = at_rate(machine.bandwidth, SLOW_GBIT)
    pace[0, -1] = SLOW_TIMES if slow == "node" else 1
    clock = Clock(Timing(made, here, links, ddp=not words))
    for kind, t in made.rounds():
        clock.step(kind, t, here.compute_s * pace)
    return float(clock.now.max()) / made.steps


# -- a model that sleeps instead of computing, so that four ranks can share a few cores ------------


class _Sleep(torch.autograd.Function):
    """Identity function that sleeps: a third of the time in forward, two thirds in backward."""

    @staticmethod
    def forward(ctx, x, seconds):
        """Sleep, and return the input."""
        ctx.seconds = seconds
        time.sleep(seconds / 3)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        """Sleep twice as long, and return the gradient."""
        time.sleep(2 * ctx.seconds / 3)
        return grad, None


class Layer(nn.Linear):
    """Linear layer that sleeps, so that it takes a given number of seconds."""

    def __init__(self, seconds: float):
        super().__init__(WIDTH, WIDTH)
        self.seconds = seconds

    def forward(self, x):
        """Apply the layer after the sleep."""
        return torch.relu(super().forward(_Sleep.apply(x, self.seconds)))


def layers(shape, classes: int, *, seconds: float = 0.2, times: float = 1.0, slow: int = -1):
    """Build the model, whose layers sleep.

    :param shape: shape of an input
    :param classes: number of classes
    :param seconds: seconds of forward and backward
    :param times: factor by which one rank is slower
    :param slow: number of this rank; -1: none
    """
    first = nn.Linear(shape[0] * shape[1] * shape[2], WIDTH)
    own = seconds * (times if slow >= 0 and _rank() == slow else 1.0)
    body = [Layer(own / LAYERS) for _ in range(LAYERS)]
    return nn.Sequential(nn.Flatten(), first, *body, nn.Linear(WIDTH, classes))


def _rank() -> int:
    from mpi4py import MPI

    return MPI.COMM_WORLD.rank if MPI.Is_initialized() else 0


# -- on the hosts ---------------------------------------------------------------------------------


def ranks(cells: list[str], slow: str, calibrate: bool) -> None:
    """Measure cells one after the other; rank 0 prints a line of JSON for each.

    :param cells: names of methods
    :param slow: slow part of the network, as in `Network`
    :param calibrate: whether to measure the machine, too
    """
    import mpigossip

    torch.set_num_threads(1)
    with mpigossip.world() as world:
        if calibrate:
            machine = calibrated(world)
            if world.rank == 0:
                print(json.dumps({"machine": machine}), flush=True)
        for name in cells:
            words = (METHODS | CLOCK)[name]
            step, close, period = engine(world, words, slow) if words else ddp(world, slow)
            row = measured(world, step, period) | {"cell": name}
            close()
            if world.rank == 0:
                print(json.dumps(row), flush=True)


def calibrated(world) -> dict:
    """Measure the machine as `mpigossip plan` does: steps without exchange, and single rounds."""
    from mpigossip.analysis.machine import examine
    from mpigossip.training.costs import subject

    what = subject(job_of(f"{EVERY} {PEER}", ""))[0]
    machine = examine(what, world, {"jitter": 0.0}, 3.0)
    return asdict(machine)


def engine(world, words: str, slow: str):
    """Build a job; return a function that makes a step, a function that closes it, and its period.

    The period is the number of steps after which exchanges repeat.

    :param world: all ranks
    :param words: settings of the method
    :param slow: slow part of the network, as in `Network`
    """
    from mpigossip.training import assemble

    job = job_of(words, slow)
    made = assemble.assemble(job, world, world.size)
    return made.trainer.step, made.close, job.cadence.options.get("period", 4)


def ddp(world, slow: str):
    """Return the same kinds of values as :func:`engine`, for DistributedDataParallel on gloo."""
    from torch import distributed

    from tools.bench.peers import join

    join(world.comm, "eth0")
    own = {"times": SLOW_TIMES, "slow": HOSTS - 1} if slow == "node" else {}
    model = nn.parallel.DistributedDataParallel(layers((1, 2, 2), 2, seconds=COMPUTE_S, **own))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.ones(1, 1, 2, 2)

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step, distributed.destroy_process_group, 4


def measured(world, step, period: int) -> dict:
    """Measure whole periods; return the mean seconds per step on the slowest rank, and the bytes.

    :param world: all ranks
    :param step: function that makes a step
    :param period: number of steps after which exchanges repeat
    """
    begin = time.perf_counter()
    for _ in range(2):
        step()
    one = max(world.comm.allgather((time.perf_counter() - begin) / 2))
    count = period * max(1, min(160, round(SECONDS / one)) // period)
    # Two steps are done. Complete a short period, so that whole periods are measured. A long period
    # may begin anywhere.
    for _ in range(-2 % period if period <= 8 else 0):
        step()
    world.barrier()
    sent = sent_bytes()
    begin = time.perf_counter()
    for _ in range(count):
        step()
    seconds = time.perf_counter() - begin
    each = world.comm.allgather((seconds, sent_bytes() - sent))
    return {
        "steps": count,
        "step_s": max(s for s, _ in each) / count,
        "bytes": float(np.mean([b for _, b in each])) / count,
        "load": os.getloadavg()[0],
    }


# -- the table ---------------------------------------------------------------------


def fill(out: Path, networks: list[str], methods: dict[str, str]) -> None:
    """Measure the cells that the file does not contain, and append them to it.

    :param out: file with one JSON object per line
    :param networks: names of networks
    :param methods: settings of each method, by its name
    """
    there = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    have = {(row.get("network"), row.get("cell")) for row in there}
    measured_on = {row["network"] for row in there if "machine" in row}
    if BASE not in {*networks, *measured_on}:
        raise SystemExit(f"links of other rates are predicted from {BASE}: measure it, too")
    for network in networks:
        links = NETWORKS[network]
        missing = [name for name in methods if (network, name) not in have]
        unknown = network not in measured_on and (network == BASE or links.latency != "0")
        if not missing and not unknown:
            continue
        own = ["--ranks", ";".join(missing), "--slow", links.slow, *["--calibrate"] * unknown]
        for row in on_hosts(links, [__file__, *own]):
            if "machine" in row:
                measured_on.add(network)
            with out.open("a") as file:
                file.write(json.dumps(row | {"network": network}) + "\n")


def on_hosts(links: Network, words: list[str]) -> Iterator[dict]:
    """Start new hosts, run this program on each, and yield the lines of JSON that it prints.

    :param links: links between the hosts
    :param words: arguments of the program
    """
    subprocess.run([LAB, "up", str(HOSTS), links.rate, links.latency], check=True)
    try:
        if links.slow == "link":
            shape = f"root tbf rate {1000 * SLOW_GBIT:g}mbit burst 256kb latency 10ms"
            command = ["tc", "qdisc", "change", "dev", "eth0", *shape.split()]
            subprocess.run([LAB, "on", f"h{HOSTS}", *command], check=True)
        run = subprocess.Popen(
            [LAB, "run", str(HOSTS), sys.executable, *words],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        for line in run.stdout or ():
            if line.startswith("{"):
                print(line.strip(), flush=True)
                yield json.loads(line)
        if run.wait():
            raise SystemExit(f"{links}: the ranks ended with code {run.returncode}")
    finally:
        subprocess.run([LAB, "down"], check=True)


def rows_of(out: Path) -> list[dict]:
    """Return all cells with their predictions."""
    from mpigossip.training.machines import Machine

    lines = [json.loads(line) for line in out.read_text().splitlines()]
    machines = {line["network"]: Machine(**line["machine"]) for line in lines if "machine" in line}
    first = machines[BASE]
    rows = []
    for line in lines:
        if "cell" in line:
            links = NETWORKS[line["network"]]
            at = (first, links.gbit) if links.latency == "0" else (machines[line["network"]], None)
            expected = predicted((METHODS | CLOCK)[line["cell"]], links.slow, *at)
            rows.append(line | {"predicted_s": expected})
    return rows


def show(out: Path) -> None:
    """Print a table of measured and predicted utilization, by method and network.

    Below it, print how many predictions are within 20 % and other bounds.
    """
    rows = rows_of(out)
    cells = {(row["cell"], row["network"]): row for row in rows}
    names = list(dict.fromkeys(row["cell"] for row in rows))
    networks = [name for name in NETWORKS if any(row["network"] == name for row in rows)]
    print("utilization in %, measured (predicted); then MB per step")
    print("| | " + " | ".join(networks) + " |")
    print("|---" * (1 + len(networks)) + "|")
    for name in names:
        line = []
        for network in networks:
            row = cells.get((name, network))
            line.append(
                "-"
                if row is None
                else f"{100 * COMPUTE_S / row['step_s']:.0f} "
                f"({100 * COMPUTE_S / row['predicted_s']:.0f}) "
                f"{row['bytes'] / 1e6:.3g}"
            )
        print(f"| {name} | " + " | ".join(line) + " |")
    for bar in (0.15, 0.2):
        near = sum(abs(row["predicted_s"] / row["step_s"] - 1) <= bar for row in rows)
        print(f"predicted step within {bar:.0%}: {near} of {len(rows)} cells")
    loads = [row["load"] for row in rows]
    print(f"load of the machine: {min(loads):.1f} to {max(loads):.1f} on {os.cpu_count()} cores")


def main() -> None:
    """Measure, or show the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("atlas.jsonl"))
    parser.add_argument("--networks", default=";".join(NETWORKS), help="separated by ;")
    parser.add_argument("--methods", help="separated by ;")
    parser.add_argument("--clock", action="store_true", help="the cells of the virtual clock")
    parser.add_argument("--show", action="store_true")
    for name in ("--ranks", "--slow"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    parser.add_argument("--calibrate", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ranks:
        known = [*METHODS, *CLOCK]
        cells = [name for name in known if name in options.ranks.split(";")]
        ranks(cells, options.slow, options.calibrate)
    elif options.show:
        show(options.out)
    else:
        methods = CLOCK if options.clock else METHODS
        if options.methods:
            methods = {name: methods[name] for name in options.methods.split(";")}
        fill(options.out, options.networks.split(";"), methods)
        show(options.out)


if __name__ == "__main__":
    main()

"""Measure steps over links of different rates, and compare them with predictions of `plan`.

    python tools/bench/atlas.py --out FILE.jsonl            # as root: measure, then print the table
    python tools/bench/atlas.py --out FILE.jsonl --show     # print the table of a measured file

Four ranks, each in a network namespace that acts as a host (tools/labs/net.sh), train 1.05 M
parameters. A step sleeps for 200 ms instead of computing. A cell of the table is one method on one
network; the program measures only the cells that FILE does not contain yet.

For the predictions, the program measures single rounds on the network of 1 Gbit/s and on each
network with added latency. For all other networks, it converts the rate at 1 Gbit/s to the nominal
rate of the link. "Utilization" is the ratio of computation time to step time. The bytes of a cell
are the bytes, including headers, that a host sends per step, averaged over hosts.
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
"""Factor by which the slow node computes more slowly, and rate of the slow link in Gbit/s."""
NOMINAL = 119e6
"""Bytes per second of payload that TCP transfers over a link of 1 Gbit/s."""
BASE = "1 Gbit/s"
"""Network on which the machine is measured, to predict links of other rates."""
WIDTH = 512
LAYERS = 4
"""Number of hidden layers, 512 x 512 each: 1.05 M parameters with the first and the last layer."""
SECONDS = 6.0
"""Approximate seconds for which a cell is measured. The number of measured steps is a multiple of
the period that the cell's settings name, or of 4 if they name none."""


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
"""Settings of each method, by its name; "" stands for torch's DistributedDataParallel."""
CLOCK = {
    f"{graph}, {cadence}": f"algorithm.name=dsgd graph.name={graph} cadence.name={cadence}"
    for graph in ("one-peer-exponential", "ring", "complete")
    for cadence in ("always", "every")
}
"""Settings of the methods that `--clock` measures, to check the virtual clock."""
SMALL = [
    "data.source=synthetic", "data.shape=[1,2,2]", "data.classes=2", "data.batch=1",
    "data.samples=65536", "data.test_samples=4", "data.workers=0", "run.epochs=1",
    "model.name=tools.bench.atlas:layers", f"model.seconds={COMPUTE_S}", "schedule.lr=0.001",
    "schedule.name=constant", "schedule.scale=none", "log.consensus_every=0", "data.cache=never",
]  # fmt: skip


def job_of(words: str, slow: str):
    """Return the job of a cell.

    :param words: settings of the method, separated by spaces; "": settings of parallel SGD
    :param slow: slow part of the network, as in `Network`
    """
    from mpigossip.training import assemble

    slow_node = [f"model.times={SLOW_TIMES}", f"model.slow={HOSTS - 1}"] if slow == "node" else []
    method = words or "algorithm.name=parallel graph.name=complete"
    return assemble.load({}, [*SMALL, *slow_node, *method.split()])


def sent_bytes() -> int:
    """Return the bytes that the interface eth0 of this host has sent so far; 0 without eth0."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("eth0:"):
            return int(line.split()[9])
    return 0


def at_rate(measured: float, gbit: float) -> float:
    """Convert a rate measured at 1 Gbit/s to a link of another rate; return bytes per second.

    The hosts are assumed to need the same time for a byte at both rates.

    :param measured: bytes per second that were measured over 1 Gbit/s
    :param gbit: nominal rate of the other link in Gbit/s
    """
    host_seconds_per_byte = max(1 / measured - 1 / NOMINAL, 0.0)
    return 1 / (host_seconds_per_byte + 1 / (gbit * NOMINAL))


def with_link_rate(machine, gbit: float):
    """Return a copy of a `Machine` whose bandwidths are converted to links of another rate.

    :param machine: values that were measured at 1 Gbit/s
    :param gbit: nominal rate of the other links in Gbit/s
    """
    return replace(
        machine,
        bandwidth=at_rate(machine.bandwidth, gbit),
        global_bandwidth=at_rate(machine.global_bandwidth, gbit),
    )


def predict_seconds(words: str, slow: str, machine, gbit: float | None) -> float:
    """Return the mean seconds per step that the virtual clock predicts for the slowest node.

    :param words: settings of the method, separated by spaces; "": DistributedDataParallel
    :param slow: slow part of the network, as in `Network`
    :param machine: `Machine` with the measured values
    :param gbit: rate of the links in Gbit/s; None: the links with which ``machine`` was measured
    """
    from mpigossip.training.costs import exchanges, subject
    from mpigossip.training.time_model import Clock, Timing

    job = job_of(words, slow)
    plan = exchanges(subject(job)[0], HOSTS)
    on_links = with_link_rate(machine, gbit) if gbit else machine
    links = np.full(HOSTS, on_links.bandwidth)
    pace = np.ones((1, HOSTS))
    if slow == "link":
        links[-1] = at_rate(machine.bandwidth, SLOW_GBIT)
    pace[0, -1] = SLOW_TIMES if slow == "node" else 1
    clock = Clock(Timing(plan, on_links, links, ddp=not words))
    for kind, t in plan.rounds():
        clock.step(kind, t, on_links.compute_s * pace)
    return float(clock.now.max()) / plan.steps


# -- a model that sleeps instead of computing, so that four ranks can share a few cores ------------


class _Sleep(torch.autograd.Function):
    """Identity function that sleeps a third of its time in forward and two thirds in backward."""

    @staticmethod
    def forward(ctx, x, seconds):
        """Sleep for a third of ``seconds``, and return a copy of the input."""
        ctx.seconds = seconds
        time.sleep(seconds / 3)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        """Sleep for two thirds of ``seconds``, and return the gradient; ``seconds`` has none."""
        time.sleep(2 * ctx.seconds / 3)
        return grad, None


class Layer(nn.Linear):
    """Linear layer with ReLU that sleeps ``seconds`` in total in a forward and backward pass."""

    def __init__(self, seconds: float):
        super().__init__(WIDTH, WIDTH)
        self.seconds = seconds

    def forward(self, x):
        """Sleep for a third of the time, then apply the layer and ReLU."""
        return torch.relu(super().forward(_Sleep.apply(x, self.seconds)))


def layers(shape, classes: int, *, seconds: float = 0.2, times: float = 1.0, slow: int = -1):
    """Build the network, whose hidden layers sleep.

    :param shape: shape (channels, height, width) of an input
    :param classes: number of classes
    :param seconds: seconds that the hidden layers sleep in a forward and backward pass
    :param times: factor by which the sleep of the rank ``slow`` is longer
    :param slow: rank that sleeps longer; -1: no rank
    """
    first = nn.Linear(shape[0] * shape[1] * shape[2], WIDTH)
    sleep_s = seconds * (times if slow >= 0 and _rank() == slow else 1.0)
    body = [Layer(sleep_s / LAYERS) for _ in range(LAYERS)]
    return nn.Sequential(nn.Flatten(), first, *body, nn.Linear(WIDTH, classes))


def _rank() -> int:
    """Return the rank of this process; 0 without MPI."""
    from mpi4py import MPI

    return MPI.COMM_WORLD.rank if MPI.Is_initialized() else 0


# -- on the hosts ---------------------------------------------------------------------------------


def ranks(cells: list[str], slow: str, calibrate: bool) -> None:
    """Measure methods one after the other on this network; rank 0 prints a JSON line for each.

    :param cells: names of the methods
    :param slow: slow part of the network, as in `Network`
    :param calibrate: whether to measure the machine first and print it on a line of its own
    """
    import mpigossip

    torch.set_num_threads(1)
    with mpigossip.world() as world:
        if calibrate:
            machine = measure_machine(world)
            if world.rank == 0:
                print(json.dumps({"machine": machine}), flush=True)
        for name in cells:
            words = (METHODS | CLOCK)[name]
            step, close, period = engine(world, words, slow) if words else ddp(world, slow)
            row = measure(world, step, period) | {"cell": name}
            close()
            if world.rank == 0:
                print(json.dumps(row), flush=True)


def measure_machine(world) -> dict:
    """Measure steps without exchanges and single rounds as `mpigossip plan` does.

    :return: fields of the `Machine`
    """
    from mpigossip.analysis.machine import examine
    from mpigossip.training.costs import subject

    planned = subject(job_of(f"{EVERY} {PEER}", ""))[0]
    machine = examine(planned, world, {"jitter": 0.0}, 3.0)
    return asdict(machine)


def engine(world, words: str, slow: str):
    """Build the training of a method with this package.

    :param world: all ranks
    :param words: settings of the method, separated by spaces
    :param slow: slow part of the network, as in `Network`
    :return: function that makes a step; function that closes the training; number of steps after
        which exchanges repeat
    """
    from mpigossip.training import assemble

    job = job_of(words, slow)
    assembly = assemble.assemble(job, world, world.size)
    return assembly.trainer.step, assembly.close, job.cadence.options.get("period", 4)


def ddp(world, slow: str):
    """Build the training by DistributedDataParallel on gloo.

    :param world: all ranks
    :param slow: slow part of the network, as in `Network`
    :return: the same three values that `engine` returns
    """
    from torch import distributed

    from tools.bench.peers import join

    join(world.comm, "eth0")
    slow_node = {"times": SLOW_TIMES, "slow": HOSTS - 1} if slow == "node" else {}
    network = layers((1, 2, 2), 2, seconds=COMPUTE_S, **slow_node)
    model = nn.parallel.DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.ones(1, 1, 2, 2)

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step, distributed.destroy_process_group, 4


def measure(world, step, period: int) -> dict:
    """Measure the whole periods that fit into about SECONDS and into 160 steps, at least one.

    :param world: all ranks
    :param step: function that makes a step
    :param period: number of steps after which exchanges repeat
    :return: number of steps; mean seconds per step on the slowest rank; bytes that a host has sent
        per step, as a mean over hosts; and load average of the machine
    """
    begin = time.perf_counter()
    for _ in range(2):
        step()
    step_s = max(world.comm.allgather((time.perf_counter() - begin) / 2))
    count = period * max(1, min(160, round(SECONDS / step_s)) // period)
    # A short period has to be measured from its first step, so complete the one that the two steps
    # have begun. A long period may begin at any step.
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
    :param networks: names of networks, keys of NETWORKS
    :param methods: settings of each method, by its name
    :raises SystemExit: if the machine was not measured on the network BASE and will not be
    """
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    have = {(row.get("network"), row.get("cell")) for row in rows}
    measured_on = {row["network"] for row in rows if "machine" in row}
    if BASE not in {*networks, *measured_on}:
        raise SystemExit(
            f"--networks {';'.join(networks)} lacks {BASE!r}, from which steps on other links are "
            "predicted: add it"
        )
    for network in networks:
        links = NETWORKS[network]
        missing = [name for name in methods if (network, name) not in have]
        unknown = network not in measured_on and (network == BASE or links.latency != "0")
        if not missing and not unknown:
            continue
        words = ["--ranks", ";".join(missing), "--slow", links.slow, *["--calibrate"] * unknown]
        for row in on_hosts(links, [__file__, *words]):
            if "machine" in row:
                measured_on.add(network)
            with out.open("a") as file:
                file.write(json.dumps(row | {"network": network}) + "\n")


def on_hosts(links: Network, words: list[str]) -> Iterator[dict]:
    """Start new hosts, run a Python program on each, and yield the JSON objects that it prints.

    :param links: links between the hosts
    :param words: path of the program, and its arguments
    :raises SystemExit: if the program fails
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
            raise SystemExit(
                f"the ranks on {links} ended with code {run.returncode}: read their error above"
            )
    finally:
        subprocess.run([LAB, "down"], check=True)


def rows_of(out: Path) -> list[dict]:
    """Return the cells of a file, each with the predicted seconds per step as "predicted_s"."""
    from mpigossip.training.machines import Machine

    lines = [json.loads(line) for line in out.read_text().splitlines()]
    machines = {line["network"]: Machine(**line["machine"]) for line in lines if "machine" in line}
    first = machines[BASE]
    rows = []
    for line in lines:
        if "cell" in line:
            links = NETWORKS[line["network"]]
            at = (first, links.gbit) if links.latency == "0" else (machines[line["network"]], None)
            step_s = predict_seconds((METHODS | CLOCK)[line["cell"]], links.slow, *at)
            rows.append(line | {"predicted_s": step_s})
    return rows


def show(out: Path) -> None:
    """Print a table of measured and predicted utilization, by method and network.

    Two lines below it state how many predicted steps are within 15 % and 20 % of the measured ones.
    """
    rows = rows_of(out)
    cells = {(row["cell"], row["network"]): row for row in rows}
    names = list(dict.fromkeys(row["cell"] for row in rows))
    networks = [name for name in NETWORKS if any(row["network"] == name for row in rows)]
    print(
        "Each cell: measured utilization in % (predicted one in %), MB that a host sends per step"
    )
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
    parser.add_argument("--networks", default=";".join(NETWORKS), help="names, separated by ;")
    parser.add_argument("--methods", help="names, separated by ; (default: all)")
    parser.add_argument("--clock", action="store_true", help="methods that check the virtual clock")
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

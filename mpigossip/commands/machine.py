"""Commands that examine a machine: `mpigossip doctor`, `bench` and `plan`."""

import argparse
import json
from pathlib import Path
from typing import get_args

from mpigossip.commands.arguments import (
    BYTES_A_SECOND,
    SECONDS,
    amount,
    command,
    many,
    number,
    numbers_of_nodes,
    print_safe,
    quantity,
    settings,
    share,
    size_in_bytes,
    times,
)

DOCTOR = """
mpigossip doctor
srun mpigossip doctor --json >runs/digits/doctor.json
srun --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 mpigossip doctor
"""


def add(commands) -> None:
    """Add the commands of this module to the parser."""
    _add_plan(commands)
    _add_bench(commands)
    _add_doctor(commands)


def _add_doctor(commands) -> None:
    summary = "check whether MPI, GPUs, network, disk and training work"
    doctor = command(commands, "doctor", _doctor, summary, DOCTOR)
    doctor.add_argument(
        "--graph", default="one-peer-exponential", help="graph whose neighbours are tested"
    )
    doctor.add_argument(
        "--devices",
        type=_devices,
        default="auto",
        help="slots of a node, as node.devices; default: %(default)s",
    )
    doctor.add_argument(
        "--ranks-per-node",
        type=_ranks,
        default="auto",
        metavar="K",
        help='as node.ranks_per_node: a number, "host" or "auto"; default: %(default)s',
    )
    doctor.add_argument("--workers", type=number(int, 0, 1024), default=2, help="as data.workers")
    doctor.add_argument(
        "--megabytes", type=many, default=16, help="MB to put over a link, and to write to a file"
    )
    doctor.add_argument(
        "--sizes",
        nargs="+",
        type=size_in_bytes,
        metavar="BYTES",
        default=[25 * 10**6, 10**9],
        help="bytes of a slot in exchanges; default: 25MB 1GB, if memory and time suffice",
    )
    doctor.add_argument(
        "--folder",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="folder in which runs will be written",
    )
    doctor.add_argument(
        "--timeout", type=amount, default=60.0, help="time limit of a test, in seconds"
    )
    doctor.add_argument("--json", action="store_true", help="print JSON, for programs")


def _devices(text: str) -> str:
    """Parse a value of node.devices."""
    from mpigossip.config.limits import Devices

    limit = get_args(Devices)[1]
    if not limit.holds(text):
        raise argparse.ArgumentTypeError(f'"{text}": {limit.words}')
    return text


def _ranks(text: str) -> int | str:
    """Parse a value of node.ranks_per_node; a ValueError becomes a message of argparse."""
    if text in ("host", "auto"):
        return text
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def _doctor(options) -> int:
    from mpigossip.analysis.doctor import examine

    return examine(options)


BENCH = """
mpirun -n 2 mpigossip bench exchange --sizes 1MB 100MB
srun mpigossip bench allreduce --json
"""


def _add_bench(commands) -> None:
    summary = "measure under mpirun, in multiples of a limit that is measured in the same run"
    bench = command(commands, "bench", _bench, summary, BENCH)
    kinds = ["exchange", "allreduce", "overlap", "checkpoint"]
    bench.add_argument("what", choices=kinds, help="what to measure")
    bench.add_argument("--graphs", nargs="+", metavar="GRAPH", help="graphs, for exchange")
    bench.add_argument(
        "--sizes",
        nargs="+",
        type=size_in_bytes,
        metavar="BYTES",
        default=[10**k for k in range(3, 10)],
        help="bytes of a message, such as 100MB; default: 1KB 10KB … 1GB, if memory suffices",
    )
    bench.add_argument("--seconds", type=amount, default=1.0, help="approximate time per row")
    bench.add_argument(
        "--same-host", choices=["read", "put"], default="read", help="as node.same_host"
    )
    bench.add_argument(
        "--folder", type=Path, default=Path(), help="folder to write in, for checkpoint"
    )
    bench.add_argument(
        "--json", action="store_true", help="print rows with graph, bytes, seconds, times_limit, …"
    )
    bench.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="also write a file: JSON if named .json, otherwise HDF5",
    )


def _bench(options) -> None:
    """Measure, and print each row on rank 0.

    With ``--json``, print one list at the end instead. With ``--out``, also write a file.
    """
    import torch

    from mpigossip.analysis.bench import MEASURES, save
    from mpigossip.cluster.ranks import world
    from mpigossip.graphs import BUILDERS, graph

    torch.set_num_threads(1)
    for name in options.graphs or ():
        if name not in BUILDERS and not name.startswith("file:"):
            graph(name, 2)
    with world() as ranks:
        speaks = ranks.rank == 0
        rows = []
        if speaks and not options.json:
            hosts = len(set(ranks.hosts))
            print_safe(f"{ranks.size} ranks on {hosts} host{'s' * (hosts > 1)}; medians")
            print_safe(f"{'':24} {'bytes':>13} {'ms':>9} {'spread':>7} {'GB/s':>7} {'x limit':>8}")
        for line in MEASURES[options.what](ranks, options):
            rows.append(line)
            if speaks and not options.json:
                hidden = f"  {line['hidden']:.0%} hidden" if "hidden" in line else ""
                print_safe(
                    f"{line['graph']:24} {line['bytes']:13,} {1e3 * line['seconds']:9.3f} "
                    f"{line['spread']:7.0%} {line['gigabytes_per_second']:7.2f} "
                    f"{line['times_limit']:8.2f}{hidden}",
                    flush=True,
                )
        if speaks and options.json:
            print_safe(json.dumps(rows))
        if speaks and options.out:
            save(rows, options.out, ranks, options.what)


PLAN = """
mpigossip plan cifar10-resnet20 --nodes 4,8,…,1024 \\
    --bandwidth 25GB/s --latency 5us
srun -N 4 mpigossip plan imagenet-resnet50 --nodes 4,16 --out p.png

The second measures its nodes and network; one process assumes 10 µs for a
small round and 100 Gbit/s per node. An ellipsis continues by doubling.
"""


def _add_plan(commands) -> None:
    summary = "predict step time, traffic and training time on n nodes per graph, cadence and wire"
    plan = command(commands, "plan", _plan, summary, PLAN)
    plan.add_argument("job", type=Path, metavar="JOB.toml")
    settings(plan)
    plan.add_argument(
        "--nodes", required=True, type=numbers_of_nodes, metavar="N,N,…", help="numbers of nodes"
    )
    plan.add_argument("--epochs", type=amount, help="number of epochs; default: run.epochs")
    time = quantity(SECONDS)
    rate = quantity(BYTES_A_SECOND)
    plan.add_argument(
        "--compute",
        type=time,
        metavar="T",
        help="computing of a step, such as 80ms; default: measured",
    )
    plan.add_argument("--node", type=time, metavar="T", help="averaging within a node")
    plan.add_argument(
        "--latency", type=time, metavar="T", help="time of a small round, such as 5us"
    )
    plan.add_argument(
        "--bandwidth", type=rate, metavar="B", help="network of a node, such as 25GB/s or 200Gbit"
    )
    plan.add_argument(
        "--sum", type=rate, metavar="B", help="rate of adding vectors, such as 300GB/s"
    )
    plan.add_argument(
        "--coding", type=rate, metavar="B", help="rate of encoding wires, such as 50GB/s"
    )
    plan.add_argument(
        "--jitter", type=share, metavar="P", help="standard deviation of computing, such as 5%%"
    )
    plan.add_argument("--period", type=times, metavar="H", help="period of an adaptive cadence")
    plan.add_argument("--seconds", type=amount, default=8.0, help="approximate time of measuring")
    plan.add_argument("--best", action="store_true", help="propose graph, method, H and wire")
    plan.add_argument(
        "--members",
        action="store_true",
        help="advise on N members in a folder; needs --bandwidth",
    )
    plan.add_argument(
        "--save", type=Path, metavar="FILE", help="write the measurements, for clock.network"
    )
    plan.add_argument("--out", type=Path, metavar="OUT.png", help="plot to write")
    plan.add_argument(
        "--json", action="store_true", help="print all combinations as one JSON object"
    )


def _plan(options) -> None:
    from mpigossip.analysis.dryrun import launched
    from mpigossip.analysis.machine import examine
    from mpigossip.analysis.plan import as_json, coded, table
    from mpigossip.analysis.plan.report import picture, text
    from mpigossip.cluster.ranks import SingleProcess, world
    from mpigossip.config import JobError
    from mpigossip.training import assemble
    from mpigossip.training.costs import subject
    from mpigossip.training.shape import with_ranks

    if options.members and options.bandwidth is None:
        raise JobError(
            "--members needs --bandwidth B, the bytes per second of the folder's file system, "
            "such as 5GB/s"
        )
    if (options.members and options.json) or ((options.members or options.best) and options.out):
        raise JobError("--members excludes --json and --out, and --best excludes --out: omit them")
    with world() if (launched() or 1) > 1 else SingleProcess() as ranks:
        with ranks.raise_together(JobError):
            job = assemble.load(options.job, options.settings)
        ranks.group_into_nodes(job.node.ranks_per_node)
        if ranks.comm is not None:
            job = with_ranks(job, ranks.nodes.per_node)
        with ranks.raise_together(JobError):
            what, note = subject(job)
        measured = {
            "compute_s": options.compute,
            "node_s": options.node,
            "latency_s": options.latency,
            "bandwidth": options.bandwidth,
            "combine_rate": options.sum,
            "coding_rate": options.coding,
            "jitter": options.jitter,
        }
        machine = examine(what, ranks, measured, options.seconds)
        if ranks.rank != 0:
            return
        if options.save:
            coded(machine, what).save(options.save)
        epochs = what.job.run.epochs if options.epochs is None else options.epochs
        if options.best:
            _best(options, what, machine, epochs)
            return
        if options.members:
            _members(options, what, machine, epochs)
            return
        rows = table(what, machine, options.nodes, epochs, options.period)
        if options.out:
            picture(what, rows, options.nodes, epochs, options.out)
        if options.json:
            print_safe(json.dumps(as_json(what, machine, rows, epochs)))
            return
        print_safe(text(what, machine, rows, options.nodes, epochs, note))
        if options.out:
            print_safe(options.out)


def _members(options, what, machine, epochs) -> None:
    from mpigossip.analysis.plan.members import advise, text

    step_s = machine.compute_s
    rate = machine.bandwidth
    print_safe(text(what, [advise(what, n, step_s, rate, epochs) for n in options.nodes]))


def _best(options, what, machine, epochs) -> None:
    from mpigossip.analysis.plan.best import as_json, proposals, text

    arguments = options.job, options.settings, what, machine
    best = {n: proposals(*arguments, n, epochs) for n in options.nodes}
    if options.json:
        print_safe(json.dumps({n: as_json(*proposal) for n, proposal in best.items()}))
        return
    texts = [text(options.job, options.settings, *proposal, n) for n, proposal in best.items()]
    print_safe("\n\n".join(texts))

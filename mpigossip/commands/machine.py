"""Commands that examine a machine: `mpigossip doctor`, `bench` and `plan`."""

import argparse
import json
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import get_args

from mpigossip.commands.arguments import (
    BYTES_A_SECOND,
    SECONDS,
    amount,
    command,
    count_of_parameters,
    is_setting,
    many,
    number,
    numbers_of_nodes,
    print_safe,
    quantity,
    settings,
    share,
    size_in_bytes,
    sized_time,
    times,
)

DOCTOR = """
mpigossip doctor
srun mpigossip doctor --json >runs/digits/doctor.json
mpigossip job SITE --program 'mpigossip doctor' --nodes 2 --time 10m
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
    """Parse a value of node.ranks_per_node.

    :param text: word of the command line
    :raises ArgumentTypeError: if the text is neither "host" nor "auto" nor a whole number of at
        least 1
    """
    if text in ("host", "auto"):
        return text
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f'"{text}": must be "host", "auto" or a whole number of at least 1'
        )
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
    """Run the measurements of `bench`, and print each row on rank 0; collective.

    With ``--json``, print one list at the end instead. With ``--out``, also write a file.
    """
    import torch

    from mpigossip.analysis.bench import MEASURES, save
    from mpigossip.cluster.mpi_world import open_world
    from mpigossip.graphs import BUILDERS, graph

    torch.set_num_threads(1)
    for name in options.graphs or ():
        if name not in BUILDERS and not name.startswith("file:"):
            graph(name, 2)
    with open_world() as ranks:
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


ELEMENT_SIZES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of an element by the names of `plan --dtype`."""
SIZED = {
    "algorithm": {"name": "dsgd", "style": "awc"},
    "run": {"name": "model"},
    "node": {"devices": "cuda:0"},
}
"""Job of `plan --parameters`: gossip whose messages are sent during forward and backward."""
GPUS_OF_A_HOST = 8
"""Number of GPUs per node of which `plan` gives a hint if the job names fewer."""
PLAN = """
mpigossip plan --parameters 1.3B --nodes 8 --compute 250ms --bandwidth 50GB/s
srun -N 4 mpigossip plan imagenet-resnet50 --nodes 4,16 --out p.png
"""


def _add_plan(commands) -> None:
    summary = "predict step time, traffic and training time on n nodes"
    plan = command(commands, "plan", _plan, summary, PLAN)
    plan.usage = "mpigossip plan [JOB.toml] --nodes N,N,… [options] [section.key=value ...]"
    plan.add_argument("job", type=Path, nargs="?", metavar="JOB.toml")
    settings(plan)
    time = quantity(SECONDS)
    rate = quantity(BYTES_A_SECOND)

    def add(name: str, kind, metavar: str, text: str, **options) -> None:
        plan.add_argument(name, type=kind, metavar=metavar, help=text, **options)

    add("--parameters", count_of_parameters, "P", "plan a model of this size, without a job")
    plan.add_argument(
        "--dtype",
        choices=list(ELEMENT_SIZES),
        metavar="TYPE",
        help=f"type of its gradients: {', '.join(ELEMENT_SIZES)}",
    )
    add("--buffers", size_in_bytes, "B", "bytes of its buffers, such as 50MB")
    add("--nodes", numbers_of_nodes, "N,N,…", "numbers of nodes; … doubles", required=True)
    add("--epochs", amount, "EPOCHS", "number of epochs; default: run.epochs")
    add("--compute", time, "T", "computing of a step, such as 80ms; default: measured")
    add("--update", time, "T", "the optimizer's part of a step")
    add("--node", time, "T", "averaging within a node")
    add("--latency", time, "T", "message latency; default: 10us, measured with srun")
    add("--bandwidth", rate, "B", "a node's bandwidth; default: 100Gbit, or measured")
    add(
        "--allreduce",
        sized_time,
        "B:T",
        "two all-reduces on the first N: 25MB:3ms 1GB:.1s",
        nargs=2,
    )
    add("--transport", str, "NAME", "assumes its latency: nccl-sockets, mpi-rdma, gloo, …")
    add("--queue", time, "T", "longest wait in the link's queue; may warn about TCP")
    plan.add_argument(
        "--collectives",
        choices=("one", "tensors"),
        default="one",
        metavar="PER",
        help='of a periodic average: "one" or one per "tensors"',
    )
    add("--gpu", str, "NAME", "update and node averages from bytes: a100, h100, h200")
    add("--sum", rate, "B", "rate at which a slot adds vectors, such as 300GB/s")
    add("--coding", rate, "B", "rate at which a slot encodes, such as 50GB/s")
    add("--jitter", share, "P", "standard deviation of computing, such as 5%%")
    add("--period", times, "H", "period of an adaptive cadence")
    add("--seconds", amount, "SECONDS", "approximate time of measuring", default=8.0)
    plan.add_argument("--best", action="store_true", help="propose graph, method, H and wire")
    percent = number(float, 0, 100)
    plan.add_argument(
        "--accept",
        nargs=2,
        type=percent,
        default=(1.0, 0.5),
        metavar=("LOSS", "POINTS"),
        help="largest costs, %% and points; default: --accept 1 0.5",
    )
    plan.add_argument(
        "--members",
        action="store_true",
        help="advise on N members in a folder; needs --bandwidth",
    )
    add("--save", Path, "FILE", "write the measurements, for clock.network")
    add("--out", Path, "OUT.png", "plot to write")
    plan.add_argument("--json", action="store_true", help="print everything as one JSON object")


def _plan(options) -> None:
    from mpigossip.analysis.dryrun import launched
    from mpigossip.analysis.machine import examine
    from mpigossip.analysis.plan import coded
    from mpigossip.cluster.mpi_world import open_world
    from mpigossip.cluster.world import SingleProcess
    from mpigossip.config import JobError
    from mpigossip.training import assemble
    from mpigossip.training.shape import with_ranks

    _check_plan(options)
    with open_world() if (launched() or 1) > 1 else SingleProcess() as ranks:
        with ranks.raise_together(JobError):
            job = assemble.load(options.job or SIZED, options.settings)
            given = _given(options)
        ranks.group_into_nodes(job.node.ranks_per_node)
        if ranks.comm is not None:
            job = with_ranks(job, ranks.nodes.per_node)
        with ranks.raise_together(JobError):
            what, note = _subject(options, job)
        machine = replace(examine(what, ranks, given, options.seconds), gpu=options.gpu or "")
        machine = _with_gpu(machine, what)
        if options.transport and options.latency is None:
            assumed = f"assumed for {options.transport}"
            machine = replace(machine, sources=machine.sources | {"latency": assumed})
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
        _tables(options, what, machine, epochs, note)


def _with_gpu(machine, what):
    """Return the machine with the times of the job's own step on the GPU that the machine names.

    It is returned unchanged if it names no GPU, or if the job averages over all nodes in each step.
    """
    from mpigossip.analysis.plan import always_global
    from mpigossip.analysis.plan.gpu_costs import local_step, with_gpu

    if always_global(what.job):  # Each row of the tables gets the times of its algorithm.
        return machine
    return with_gpu(machine, what, local_step(what.job))


def _tables(options, what, machine, epochs, note) -> None:
    """Print the predictions, and write the plot.

    :param options: parsed options of `plan`
    :param what: subject of the plan, as :func:`_subject` returns it
    :param machine: measured or given properties of the machine
    :param epochs: number of epochs of the training
    :param note: note on the subject; "": none
    """
    from mpigossip.analysis.plan import as_json, table
    from mpigossip.analysis.plan.report import picture, text
    from mpigossip.training.machines import queue_warning

    per_tensor = options.collectives == "tensors"
    rows = table(what, machine, options.nodes, epochs, options.period, per_tensor)
    if options.out:
        picture(what, rows, options.nodes, epochs, options.out)
    if options.json:
        print_safe(json.dumps(as_json(what, machine, rows, epochs)))
        return
    hint = _device_hint(options, what, machine, rows)
    print_safe(text(what, machine, rows, options.nodes, epochs, note, hint))
    if options.queue is not None:
        warning = queue_warning(options.transport, machine.bandwidth, options.queue)
        if warning:
            print_safe("\n" + textwrap.fill(warning, 78))
    if options.out:
        print_safe(options.out)


def _device_hint(options, what, machine, rows) -> str:
    """Return a sentence on more GPUs per node; "" if they make no row of the text much faster.

    :param options: parsed options of `plan`
    :param what: subject of the plan, as :func:`_subject` returns it
    :param machine: measured or given properties of the machine
    :param rows: predictions
    """
    from mpigossip.analysis.plan.report import device_hint
    from mpigossip.cluster.local_devices import slots_of

    on_gpus = slots_of(what.job.node.devices)[0].startswith("cuda")
    if not on_gpus or what.slots >= GPUS_OF_A_HOST or what.job.node.ranks_per_node != 1:
        return ""
    devices = f"cuda:0-{GPUS_OF_A_HOST - 1}"
    job = replace(what.job, node=replace(what.job.node, devices=devices))
    more = _subject(options, job)[0]
    factor = more.slots / what.slots  # Each slot handles its own shard.
    machine = replace(
        machine,
        combine_rate=factor * machine.combine_rate,
        encode_rate=factor * machine.encode_rate,
        decode_rate=factor * machine.decode_rate,
    )
    machine = _with_gpu(machine, more)
    per_tensor = options.collectives == "tensors"
    n = options.nodes[-1]
    return device_hint(what, rows, n, more, machine, options.period, per_tensor)


def _check_plan(options) -> None:
    """Check which options are given together; a setting in place of the job becomes a setting.

    :param options: parsed options of `plan`, whose ``job`` and ``settings`` may be changed
    :raises JobError: if options contradict each other, or if an option requires another that is
        missing
    """
    from mpigossip.config import JobError

    if options.job is not None and is_setting(str(options.job)):
        options.settings.insert(0, str(options.job))
        options.job = None
    if options.job is None and options.parameters is None:
        raise JobError("name a job, such as cifar10-resnet20, or the size of a model: --parameters")
    if options.parameters is not None and options.members:
        raise JobError(
            "--members needs a job: omit --parameters, and name a job, such as cifar10-resnet20"
        )
    if options.members and options.bandwidth is None:
        raise JobError(
            "--members needs --bandwidth B, the bytes per second of the file system with the "
            "members' folder, such as 5GB/s"
        )
    if options.gpu is not None and (options.best or options.members):
        raise JobError(
            "--gpu excludes --best and --members, because it has no byte counts for some of their "
            "algorithms: omit --gpu, and pass --update and --node"
        )
    if (options.members and options.json) or ((options.members or options.best) and options.out):
        raise JobError("--members excludes --json and --out, and --best excludes --out: omit them")


def _given(options) -> dict[str, float | None]:
    """Return the properties of the machine that follow from the options.

    A property that follows from no option is None: it is then measured, or a default is used. If
    --latency is missing, --transport determines the latency.

    :param options: parsed options of `plan`
    :raises JobError: if a value is unknown, or if an option requires another that is missing
    """
    from mpigossip.analysis.plan.gpu_costs import GPUS
    from mpigossip.config import JobError
    from mpigossip.config.toml import near
    from mpigossip.training.machines import TRANSPORTS, fit_all_reduce
    from mpigossip.training.time_model import hops

    if options.transport is not None and options.transport not in TRANSPORTS:
        known = ", ".join(TRANSPORTS)
        raise JobError(
            f'--transport "{options.transport}" is unknown; {near(options.transport, TRANSPORTS)}; '
            f"all names: {known}"
        )
    if options.gpu is not None and options.gpu not in GPUS:
        known = ", ".join(GPUS)
        raise JobError(
            f'--gpu "{options.gpu}" is unknown; {near(options.gpu, GPUS)}; all names: {known}'
        )
    if options.gpu is not None and options.compute is None:
        raise JobError(
            "--gpu needs --compute T: forward and backward can't be timed on a GPU that is not here"
        )
    if options.queue is not None and (options.transport is None or options.bandwidth is None):
        raise JobError(
            "--queue needs --transport and --bandwidth, which determine the bytes in flight: pass "
            "both, or omit --queue"
        )
    latency_s = options.latency
    if latency_s is None and options.transport is not None:
        latency_s = TRANSPORTS[options.transport].latency_s
    given = {
        "compute_s": options.compute,
        "node_s": options.node,
        "update_s": options.update,
        "latency_s": latency_s,
        "bandwidth": options.bandwidth,
        "combine_rate": options.sum,
        "coding_rate": options.coding,
        "jitter": options.jitter,
    }
    if options.allreduce:
        n = options.nodes[0]
        if n == 1:
            raise JobError(
                "--allreduce gives times that were measured on several nodes, but --nodes begins "
                "with 1: begin it with their number, as in --nodes 8,16"
            )
        small, large = options.allreduce
        latency_s, bandwidth = fit_all_reduce(small, large, hops(n), 2 * (n - 1) / n)
        given |= {"global_latency_s": latency_s, "global_bandwidth": bandwidth}
    return given


def _subject(options, job):
    """Return the subject of the plan, which is a job or a model of a given size, and a note on it.

    The note is "" if there is nothing to tell the user.

    :param options: parsed options of `plan`
    :param job: the job; with ``--parameters``, its model and data are ignored
    :raises JobError: if the options contradict each other, or if the job has errors
    :raises StoreError: if the data of the job can't be read
    """
    from mpigossip.config import JobError
    from mpigossip.training.costs import sized_subject, subject

    element_size = ELEMENT_SIZES[options.dtype or "fp32"]
    if options.parameters is None:
        if options.buffers:
            raise JobError("--buffers is the size of the buffers of --parameters: pass both")
        return subject(job, element_size)
    if options.job is not None:
        raise JobError(f"--parameters replaces the job: omit {options.job}")
    if options.compute is None:
        raise JobError(
            "--parameters needs --compute T: a model of which only the size is known can't be timed"
        )
    return sized_subject(job, options.parameters, element_size, options.buffers or 0), ""


def _members(options, what, machine, epochs) -> None:
    from mpigossip.analysis.plan.members import advise, text

    step_s = machine.compute_s
    rate = machine.bandwidth
    print_safe(text(what, [advise(what, n, step_s, rate, epochs) for n in options.nodes]))


def _best(options, what, machine, epochs) -> None:
    from mpigossip.analysis.plan.best import as_json, proposals, text
    from mpigossip.analysis.plan.quality import Accept

    arguments = options.job or SIZED, options.settings, what, machine
    accept = Accept(*options.accept)
    best = {n: proposals(*arguments, n, epochs) for n in options.nodes}
    if options.json:
        print_safe(json.dumps({n: as_json(*proposed, accept) for n, proposed in best.items()}))
        return
    texts = [text(options.job, *proposed, n, accept) for n, proposed in best.items()]
    print_safe("\n\n".join(texts))

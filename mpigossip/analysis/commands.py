"""The commands that look at graphs, jobs and machines."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from mpigossip.analysis import graphs

SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
BYTES_A_SECOND = {
    prefix + unit: factor * size
    for prefix, factor in {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.items()
    for unit, size in {"B/s": 1.0, "bit": 0.125, "bit/s": 0.125}.items()
}
PLAN_EXAMPLES = """examples:
  mpigossip plan jobs/cifar10-resnet20.toml --nodes 4,8,…,1024 \\
      --bandwidth 25GB/s --latency 5us
  srun -N 4 mpigossip plan jobs/imagenet-resnet50.toml --nodes 4,16 --out p.png
The second measures compute on its nodes and the network between them. Latency
is that of a whole small round, bandwidth what a node sends and receives at
once; alone, 10 µs and 100 Gbit/s are assumed. An ellipsis doubles on."""


def add(commands) -> None:
    """Add them to the parser of the command line."""
    graphs.add(commands)
    _add_plan(commands)
    _add_bench(commands)
    _add_job(commands)
    _add_doctor(commands)


def _add_job(commands) -> None:
    summary = "print the batch script that trains a job on a site"
    job = commands.add_parser("job", help=summary, description=summary)
    job.set_defaults(run=_job)
    job.add_argument("site", metavar="SITE", help="a name in jobs/sites, or the path of a .toml")
    job.add_argument("job", type=Path, metavar="JOB.toml")
    job.add_argument("settings", nargs="*", metavar="section.key=value")
    job.add_argument("--nodes", type=int, required=True, metavar="N", help="nodes to ask for")
    job.add_argument("--time", required=True, metavar="T", help="30m, 2h, 4:00:00, 1-12:00:00")
    job.add_argument("--account", help="project that pays; some sites need it")
    job.add_argument("--partition", help="partition or queue")
    job.add_argument("--qos", help="quality of service")
    job.add_argument("--venv", type=Path, metavar="DIR", help="default: the one in use now, if any")
    job.add_argument("--launcher", metavar="'WORDS'", help="replaces the site's")


def _job(options) -> None:
    from mpigossip.cluster import batch
    from mpigossip.config import JobError
    from mpigossip.groups.devices import slots_of
    from mpigossip.training import assemble

    site = batch.read_site(options.site)
    found = []
    job = assemble.load(options.job, options.settings)
    if options.nodes > 0:
        found = [
            m
            for m in assemble.mistakes(job, options.nodes)
            if not m.startswith(("node.devices", "node.cuda_graphs"))
        ]
    devices = [d for d in slots_of(job.node.devices) if d.startswith("cuda")]
    if site.gpus and len(devices) > site.gpus:
        found.append(
            f'node.devices = "{job.node.devices}": {site.title} has {site.gpus} GPUs a node; '
            f"add node.devices=cuda:0-{site.gpus - 1}"
        )
    if found:
        raise JobError(found)
    if site.gpus and job.node.devices.startswith("cpu"):
        print(
            f'mpigossip: node.devices = "{job.node.devices}" leaves the {site.gpus} GPUs of a node '
            f"idle; node.devices=cuda:0-{site.gpus - 1} uses them",
            file=sys.stderr,
        )
    wish = batch.Wish(
        nodes=options.nodes,
        seconds=batch.seconds_of(options.time),
        name=job.run.name,
        account=options.account,
        partition=options.partition,
        qos=options.qos,
        venv=_venv(options.venv),
        launcher=options.launcher,
    )
    print(batch.script(site, str(options.job), options.settings, job.run.folder, wish), end="")


def _venv(given: Path | None) -> str | None:
    """The virtual environment that the job is to use: as given, or this process's own."""
    from mpigossip.config import JobError

    if given is None:
        return sys.prefix if sys.prefix != sys.base_prefix else None
    if not (given / "bin" / "activate").exists():
        raise JobError([f'--venv "{given}" is no virtual environment: it has no bin/activate'])
    return str(given.absolute())


def _add_doctor(commands) -> None:
    summary = "look at MPI, GPUs, network and disk, alone or under the launcher"
    doctor = commands.add_parser("doctor", help=summary, description=summary)
    doctor.set_defaults(run=_doctor)
    doctor.add_argument("--graph", default="one-peer-exponential", help="whose neighbours to try")
    doctor.add_argument(
        "--devices", default="auto", help="slots of a node, as node.devices; default: %(default)s"
    )
    doctor.add_argument("--workers", type=int, default=2, help="as data.workers")
    doctor.add_argument(
        "--megabytes", type=int, default=16, help="size of a message and of the file written"
    )
    doctor.add_argument(
        "--folder", type=Path, default=Path(), metavar="DIR", help="where runs are to be written"
    )
    doctor.add_argument("--timeout", type=float, default=60.0, help="seconds that a test may take")
    doctor.add_argument("--json", action="store_true", help="for programs")


def _doctor(options) -> int:
    from mpigossip.analysis.doctor import examine

    return examine(options)


def _add_plan(commands) -> None:
    text = "predict step time, traffic and training time on n nodes per graph, cadence and wire"
    plan = commands.add_parser(
        "plan", help=text, description=text, epilog=PLAN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    plan.set_defaults(run=_plan)
    plan.add_argument("job", type=Path, metavar="JOB.toml")
    plan.add_argument("settings", nargs="*", metavar="section.key=value")
    plan.add_argument(
        "--nodes", required=True, type=_nodes, metavar="N,N,…", help="numbers of nodes"
    )
    plan.add_argument("--epochs", type=float, help="default: the job's run.epochs")
    time, rate = _quantity(SECONDS), _quantity(BYTES_A_SECOND)
    plan.add_argument(
        "--compute", type=time, metavar="T",
        help="forward and backward of a step, such as 80ms; not given: measured here",
    )  # fmt: skip
    plan.add_argument("--node", type=time, metavar="T", help="averaging inside the node")
    plan.add_argument("--latency", type=time, metavar="T", help="of a small round, such as 5us")
    plan.add_argument("--bandwidth", type=rate, metavar="B", help="such as 25GB/s or 200Gbit")
    plan.add_argument("--seconds", type=float, default=8.0, help="spent on measuring, about")
    plan.add_argument("--out", type=Path, metavar="OUT.png", help="a picture")
    plan.add_argument("--json", action="store_true", help="every combination, as one object")


def _quantity(units: Mapping[str, float]) -> Callable[[str], float]:
    """A reader of numbers with a unit, such as 80ms."""

    def read(text: str) -> float:
        found = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*(\D+)", text)
        if not found or found[2] not in units or not float(found[1]) > 0:
            known = ", ".join(units)
            raise argparse.ArgumentTypeError(f'"{text}": needs a number > 0 and one of {known}')
        return float(found[1]) * units[found[2]]

    return read


def _nodes(text: str) -> list[int]:
    """4,8,…,64 as [4, 8, 16, 32, 64]: an ellipsis doubles from the number before it."""
    found: list[int] = []
    doubling = False
    for word in text.replace("...", "…").split(","):
        if word.strip() == "…" and found:
            doubling = True
            continue
        if not word.strip().isdigit() or not 1 <= int(word) <= 4096:
            raise argparse.ArgumentTypeError(f'"{word}": needs whole numbers from 1 to 4096')
        while doubling and 2 * found[-1] < int(word):
            found.append(2 * found[-1])
        doubling = False
        found.append(int(word))
    return sorted(set(found))


def _plan(options) -> None:
    from mpigossip.analysis.plan_report import run

    run(options)


def _add_bench(commands) -> None:
    text = "measure under mpirun, each figure as a multiple of the limit found in the same run"
    bench = commands.add_parser("bench", help=text, description=text)
    kinds = ["exchange", "allreduce", "overlap", "checkpoint"]
    bench.add_argument("what", choices=kinds, help="what to measure")
    bench.add_argument("--graphs", nargs="+", metavar="GRAPH", help="for exchange")
    bench.add_argument(
        "--sizes", nargs="+", type=_bytes, metavar="BYTES", default=[10**k for k in range(3, 10)],
        help="bytes of a message, such as 1KB or 100MB; default: 1KB 10KB … 1GB, as memory allows",
    )  # fmt: skip
    bench.add_argument("--seconds", type=float, default=1.0, help="spent on each row, about")
    bench.add_argument(
        "--same-host", choices=["read", "put"], default="read", help="as node.same_host"
    )
    bench.add_argument("--folder", type=Path, default=Path(), help="for checkpoint: where to write")
    bench.add_argument("--json", action="store_true", help="a list of rows")
    bench.add_argument(
        "--out", type=Path, metavar="FILE", help="also into a file: HDF5, or JSON if named .json"
    )
    bench.set_defaults(run=_bench)


def _bytes(text: str) -> int:
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
    number, factor = text.upper(), 1
    for unit, value in units.items():
        if number.endswith(unit):
            number, factor = number.removesuffix(unit), value
    return int(float(number) * factor)


def _bench(options) -> None:
    from mpigossip.analysis.bench import run

    run(options)

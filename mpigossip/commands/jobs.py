"""Commands `mpigossip job`, which prints a batch script, and `examples`, for example jobs."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mpigossip.commands.arguments import command, many, print_safe, settings

if TYPE_CHECKING:
    from mpigossip.cluster.batch import BatchRequest, Site
    from mpigossip.config import Job

JOB = """
mpigossip job generic-slurm digits --nodes 4 --gpus 4 --time 10m
mpigossip job perlmutter JOB.toml --nodes 32 --time 6h --account A >job.sh
mpigossip job SITE --program 'python loop.py' --run runs/x --nodes 8 --time 6h
"""


def add(commands) -> None:
    """Add the commands of this module to the parser."""
    _add_job(commands)
    _add_examples(commands)


def _add_job(commands) -> None:
    summary = "print the batch script of a job, or of a program, for a site"
    job = command(commands, "job", _job, summary, JOB)
    job.add_argument(
        "site",
        metavar="SITE",
        help="name of a site (also of a file in $MPIGOSSIP_SITES), or path of its .toml",
    )
    job.add_argument("job", type=Path, nargs="?", metavar="JOB.toml")
    settings(job)
    job.add_argument(
        "--program",
        metavar="'WORDS'",
        help="command of a custom loop, such as 'python train.py', in place of a job",
    )
    job.add_argument(
        "--run",
        type=Path,
        dest="folder",
        metavar="DIR",
        help="run directory of the program, Gossip(run=DIR): the job is queued again after "
        "a stop with a new checkpoint",
    )
    job.add_argument(
        "--nodes", type=many, required=True, metavar="N", help="number of hosts to request"
    )
    job.add_argument(
        "--ranks",
        type=many,
        metavar="R",
        help="ranks per host, if node.ranks_per_node is not 1; default: that setting, or for "
        '"auto" and "host" the number of GPUs of a host',
    )
    job.add_argument(
        "--gpus", type=many, metavar="G", help="GPUs per host; default: as in the site's file"
    )
    job.add_argument(
        "--time", required=True, metavar="T", help="time limit: 30m, 2h, 4:00:00, 1-12:00:00"
    )
    job.add_argument("--account", help="project to charge; some sites require it")
    job.add_argument("--partition", help="partition or queue")
    job.add_argument("--qos", help="quality of service")
    job.add_argument(
        "--venv",
        type=Path,
        metavar="DIR",
        help="virtual environment of the job; default: the environment of this command",
    )
    job.add_argument(
        "--mpi",
        metavar="X",
        help="srun's --mpi: pmix (Open MPI), pmi2, cray_shasta",
    )
    job.add_argument(
        "--launcher",
        metavar="'WORDS'",
        help="complete launch command, in place of the site's and all of its options",
    )


def _job(options) -> None:
    from mpigossip.cluster import batch

    site = batch.read_site(options.site)
    site = replace(site, gpus=options.gpus or site.gpus)
    _check_job(options)
    if options.program is None:
        _print_job(options, site)
        return
    if not batch.assigns_gpus(site):
        print_safe(
            f"mpigossip: the file of {site.title} has no number of GPUs per host, so Slurm assigns "
            "none; --gpus G requests them",
            file=sys.stderr,
        )
    scripts = [Path(word).stem for word in options.program.split() if word.endswith(".py")]
    ranks = options.ranks or site.gpus or 1
    handles_signals = options.folder is not None
    wish = _request(options, ranks, [*scripts, "program"][0], handles_signals)
    print_safe(batch.program_script(site, options.program, options.folder, wish), end="")


def _check_job(options) -> None:
    """Check that either a job or a program is named; a setting before options is no job.

    :param options: parsed options of `job`
    :raises JobError: if neither or both are named, or if an option needs the other of them
    """
    from mpigossip.config import JobError

    if options.program is None:
        if options.job is None:
            raise JobError("name a job, such as digits, or a program: --program 'python train.py'")
        if options.job.suffix == ".py":
            raise JobError(
                f'"{options.job}" is a program, not a job file: mpigossip job {options.site} '
                f"--program 'python {options.job}' --nodes N --time T prints its batch script, and "
                "`mpigossip examples copy loop` copies one for Slurm to edit"
            )
        if options.folder is not None:
            raise JobError(
                f"--run {options.folder}: only --program has this option; in a job, set "
                f"run.output={options.folder}"
            )
    elif words := [str(word) for word in (options.job, *options.settings) if word is not None]:
        raise JobError(
            f"{' '.join(words)}: --program takes no job and no settings; write arguments of the "
            f"program into its quotes: --program '{options.program} {' '.join(words)}'"
        )


def _request(options, ranks: int, name: str, handles_signals: bool = True) -> BatchRequest:
    """Return the request for a batch job.

    :param options: parsed options of `job`
    :param ranks: number of ranks per host
    :param name: name of the batch job
    :param handles_signals: whether the program stops with a checkpoint at SIGUSR2
    """
    from mpigossip.cluster import batch

    return batch.BatchRequest(
        nodes=options.nodes,
        seconds=batch.seconds_of(options.time),
        ranks=ranks,
        name=name,
        account=options.account,
        partition=options.partition,
        qos=options.qos,
        venv=_venv(options.venv),
        launcher=options.launcher,
        mpi=options.mpi,
        handles_signals=handles_signals,
    )


def _print_job(options, site: Site) -> None:
    """Check a job, and print its batch script.

    :param options: parsed options of `job`
    :param site: the site
    :raises JobError: if the job has errors
    """
    from mpigossip.cluster import batch
    from mpigossip.cluster.local_devices import slots_of
    from mpigossip.config import JobError
    from mpigossip.config.user_code import is_user_code
    from mpigossip.data.sources import SOURCES
    from mpigossip.training import assemble

    job = assemble.load(options.job, options.settings, resolve=False)
    if not (batch.assigns_gpus(site) or job.node.devices.startswith("cpu")):
        raise JobError(
            f'node.devices = "{job.node.devices}": the file of {site.title} has no number of GPUs '
            "per host, and Slurm would assign none; pass --gpus G, or add node.devices=cpu:1 to "
            "train on CPUs"
        )
    ranks = _ranks(job, site, options.ranks)
    ranks_per_node = job.node.ranks_per_node
    # A run resolves "auto" in the same way: if devices are named, each rank is a node.
    if ranks_per_node == "auto":
        ranks_per_node = ranks if job.node.devices == "auto" else 1
        job = replace(job, node=replace(job.node, ranks_per_node=ranks_per_node))
    per_node = ranks_per_node if isinstance(ranks_per_node, int) else ranks
    nodes = options.nodes * ranks // per_node
    elsewhere = ("node.devices", "node.cuda_graphs")
    problems = [m for m in assemble.mistakes(job, nodes) if not m.startswith(elsewhere)]
    devices = [d for d in slots_of(job.node.devices) if d.startswith("cuda")]
    if job.node.devices != "auto" and site.gpus and len(devices) > site.gpus:
        problems.append(
            f'node.devices = "{job.node.devices}": {site.title} has {site.gpus} GPUs per host; '
            f"add node.devices=cuda:0-{site.gpus - 1}"
        )
    if problems:
        raise JobError(problems)
    if site.gpus and job.node.devices.startswith("cpu"):
        print_safe(
            f'mpigossip: node.devices = "{job.node.devices}" leaves the {site.gpus} GPUs of a host '
            f"idle; node.devices={'auto' if ranks > 1 else f'cuda:0-{site.gpus - 1}'} uses them",
            file=sys.stderr,
        )
    data = job.data.source
    if not (data in SOURCES or is_user_code(data) or Path(data).expanduser().exists()):
        print_safe(
            f'mpigossip: data.source = "{data}": there is no such file on this host, and the job '
            "reads it on the compute hosts; make it with `mpigossip data pack`, or name it by "
            "data.source=PATH",
            file=sys.stderr,
        )
    if job.checkpoint.every_steps == 0:
        print_safe(
            "mpigossip: checkpoint.every_steps = 0: a checkpoint is written only at the end and "
            "when the run is stopped, so a run whose host fails begins again; add "
            "checkpoint.every_steps=N to write one every N steps",
            file=sys.stderr,
        )
    request = _request(options, ranks, job.run.name)
    wish = replace(request, ranks_per_node=per_node)
    print_safe(batch.script(site, str(options.job), options.settings, job.run.folder, wish), end="")


def _ranks(job: Job, site: Site, per_host: int | None) -> int:
    """Return the number of ranks that the batch job starts on each host.

    :param job: the job
    :param site: the site, with the number of GPUs per host
    :param per_host: value of --ranks; None: it follows from the job and the site
    :raises JobError: if the number is not known, or is no multiple of `node.ranks_per_node`
    """
    from mpigossip.config import JobError

    ranks_per_node = job.node.ranks_per_node
    if ranks_per_node == "auto":  # If no devices are named, there is one rank per GPU.
        return per_host or (site.gpus if job.node.devices == "auto" else 1) or 1
    ranks = per_host or (ranks_per_node if isinstance(ranks_per_node, int) else site.gpus)
    if ranks < 1:
        raise JobError(
            f'node.ranks_per_node = "host": the file of {site.title} has no number of GPUs per '
            "host; pass --ranks R, the number of ranks per host"
        )
    if isinstance(ranks_per_node, int) and ranks % ranks_per_node:
        raise JobError(
            f"--ranks {ranks}: must be a multiple of node.ranks_per_node = {ranks_per_node}, "
            "because a node "
            f"has {ranks_per_node} ranks"
        )
    return ranks


def _venv(folder: Path | None) -> str | None:
    """Return the virtual environment of the batch job.

    :param folder: value of --venv; None: use the virtual environment of this process, if any
    :raises JobError: if the folder exists, but is not a virtual environment
    """
    from mpigossip.config import JobError

    if folder is None:
        return sys.prefix if sys.prefix != sys.base_prefix else None
    if not folder.exists():
        print_safe(
            f'mpigossip: --venv "{folder}" does not exist here; the script activates it on the '
            "compute hosts, so check its path there. If Spack or EasyBuild installed mpigossip, "
            "there is no virtual environment: omit --venv, and name the module in `modules` of the "
            "site's file",
            file=sys.stderr,
        )
    elif not (folder / "bin" / "activate").exists():
        raise JobError(
            f'--venv "{folder}" is not a virtual environment: it has no bin/activate; create one '
            f"with `python3 -m venv {folder}`, or pass another --venv"
        )
    return str(folder.absolute())


EXAMPLES = """
mpigossip examples
mpigossip examples copy gpt
mpirun -n 4 mpigossip train digits
mpigossip examples --schema > mpigossip.schema.json
"""
COPY = "mpigossip examples copy classify --to programs"


def _add_examples(commands) -> None:
    listed = command(commands, "examples", _list, "list and copy examples", EXAMPLES)
    below = listed.add_subparsers(metavar="copy")
    copied = command(below, "copy", _copy, "copy an example, with the module that it needs", COPY)
    listed.usage = "mpigossip examples [-h] [--schema] [copy NAME [--to DIR]]"
    listed.add_argument(
        "--schema", action="store_true", help="print the JSON Schema of job files, for editors"
    )
    copied.add_argument("name", metavar="NAME", help="as `mpigossip examples` lists it")
    copied.add_argument(
        "--to", type=Path, metavar="DIR", default=Path(), help="default: the current folder"
    )


def _list(options) -> None:
    from mpigossip.config.packaged import examples, summary

    if options.schema:
        import json

        from mpigossip.config.schema import job_schema
        from mpigossip.training.assemble import tables_of_names

        print_safe(json.dumps(job_schema(tables_of_names()), indent=2))
        return
    group = None
    for name, path in examples().items():
        if group not in (None, path.parent):
            print_safe()
        group = path.parent
        print_safe(f"{name:18}{summary(path)}")
    print_safe("\n`mpigossip examples copy NAME` copies one of them. Commands accept a job of")
    print_safe("the first group by its name: mpirun -n 4 mpigossip train digits")


def _copy(options) -> None:
    from mpigossip.config.packaged import copy

    for path in copy(options.name, options.to):
        print_safe(path)

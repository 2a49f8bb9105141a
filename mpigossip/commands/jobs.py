"""`mpigossip job`: print a batch script. `mpigossip examples`: list and copy example jobs."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mpigossip.commands.arguments import command, many, print_safe, settings

if TYPE_CHECKING:
    from mpigossip.cluster.batch import Site
    from mpigossip.config import Job

JOB = """
mpigossip job generic-slurm digits --nodes 4 --time 10m
mpigossip job perlmutter JOB.toml --nodes 32 --time 6h --account A >job.sh
"""


def add(commands) -> None:
    """Add the commands of this module to the parser."""
    _add_job(commands)
    _add_examples(commands)


def _add_job(commands) -> None:
    summary = "print the batch script that trains a job on a site"
    job = command(commands, "job", _job, summary, JOB)
    job.add_argument("site", metavar="SITE", help="a site's name, or the path of its .toml")
    job.add_argument("job", type=Path, metavar="JOB.toml")
    settings(job)
    job.add_argument("--nodes", type=many, required=True, metavar="N", help="nodes to ask for")
    job.add_argument(
        "--ranks",
        type=many,
        metavar="R",
        help="ranks on each, where node.ranks_per_node asks for several; default: as many as it "
        'says, with "host" as the site has GPUs',
    )
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
    job = assemble.load(options.job, options.settings, resolve=False)
    ranks = _ranks(job, site, options.ranks)
    asked = job.node.ranks_per_node
    if asked == "auto":  # As on compute nodes: if devices are named, each rank is a node.
        asked = ranks if job.node.devices == "auto" else 1
        job = replace(job, node=replace(job.node, ranks_per_node=asked))
    nodes = options.nodes * ranks // (asked if isinstance(asked, int) else ranks)
    elsewhere = ("node.devices", "node.cuda_graphs")
    found = [m for m in assemble.mistakes(job, nodes) if not m.startswith(elsewhere)]
    devices = [d for d in slots_of(job.node.devices) if d.startswith("cuda")]
    if job.node.devices != "auto" and site.gpus and len(devices) > site.gpus:
        found.append(
            f'node.devices = "{job.node.devices}": {site.title} has {site.gpus} GPUs a node; '
            f"add node.devices=cuda:0-{site.gpus - 1}"
        )
    if found:
        raise JobError(found)
    if site.gpus and job.node.devices.startswith("cpu"):
        print_safe(
            f'mpigossip: node.devices = "{job.node.devices}" leaves the {site.gpus} GPUs of a node '
            f"idle; node.devices={'auto' if ranks > 1 else f'cuda:0-{site.gpus - 1}'} uses them",
            file=sys.stderr,
        )
    wish = batch.BatchRequest(
        nodes=options.nodes,
        seconds=batch.seconds_of(options.time),
        ranks=ranks,
        name=job.run.name,
        account=options.account,
        partition=options.partition,
        qos=options.qos,
        venv=_venv(options.venv),
        launcher=options.launcher,
    )
    print_safe(batch.script(site, str(options.job), options.settings, job.run.folder, wish), end="")


def _ranks(job: Job, site: Site, given: int | None) -> int:
    """Return the number of ranks on each host of the batch job."""
    from mpigossip.config import JobError

    asked = job.node.ranks_per_node
    if asked == "auto":  # one rank per GPU
        return given or (site.gpus if job.node.devices == "auto" else 1) or 1
    ranks = given or (asked if isinstance(asked, int) else site.gpus)
    if ranks < 1:
        raise JobError(
            f'node.ranks_per_node = "host": {site.title} doesn\'t say how many GPUs a node has; '
            "give --ranks R, how many ranks are to be started on each"
        )
    if isinstance(asked, int) and ranks % asked:
        raise JobError(
            f"--ranks {ranks}: node.ranks_per_node = {asked} makes nodes of {asked}; give a "
            "multiple of it"
        )
    return ranks


def _venv(given: Path | None) -> str | None:
    """Return the virtual environment of the job: ``given``, or that of this process."""
    from mpigossip.config import JobError

    if given is None:
        return sys.prefix if sys.prefix != sys.base_prefix else None
    if not (given / "bin" / "activate").exists():
        raise JobError(f'--venv "{given}" is no virtual environment: it has no bin/activate')
    return str(given.absolute())


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
    copied.add_argument("--to", type=Path, metavar="DIR", default=Path(), help="default: here")


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
    print_safe("\n`mpigossip examples copy NAME` copies one of them. Commands take a job of the")
    print_safe("first group by its name: mpirun -n 4 mpigossip train digits")


def _copy(options) -> None:
    from mpigossip.config.packaged import copy

    for path in copy(options.name, options.to):
        print_safe(path)

"""Commands that train: `mpigossip train`, `resume`, `simulate`, `study`, `join` and `replay`."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from mpigossip.commands.arguments import command, dry_run, many, print_safe, settings, whole
from mpigossip.config.errors import FAILED, OK, STOPPED, UserError
from mpigossip.config.readable import print_note

if TYPE_CHECKING:
    from mpigossip.cluster.world import World  # It imports NumPy, which no help needs.

TRAIN = """
mpirun -n 4 mpigossip train digits node.devices=cpu:2
mpigossip train imagenet-resnet50 --dry-run --nodes 32
"""
RESUME = """
mpirun -n 4 mpigossip resume runs/digits run.epochs=40
mpigossip resume runs/digits run.epochs=40 --simulate --nodes 6
"""
SIMULATE = "mpigossip simulate digits --nodes 16 run.name=sixteen"


def add(commands) -> None:
    """Add the commands of this module to the parser."""
    _add_train(commands)
    _add_members(commands)
    _add_study(commands)


def _add_train(commands) -> None:
    train = command(commands, "train", _train, "train a job on all ranks of the launcher", TRAIN)
    train.add_argument("job", type=Path, metavar="JOB.toml")
    dry_run(train)
    train.add_argument("--nodes", type=many, help="number of nodes, with --dry-run")
    settings(train)
    summary = "continue a run from its last checkpoint"
    resume = command(commands, "resume", _resume, summary, RESUME)
    resume.add_argument("folder", type=Path, metavar="RUN_DIR")
    resume.add_argument(
        "--simulate", action="store_true", help="run all nodes in this process, without MPI"
    )
    resume.add_argument(
        "--nodes",
        type=many,
        metavar="N",
        help="number of nodes, with --simulate; default: as before",
    )
    settings(resume)
    summary = "train a job with N nodes in this process, without MPI"
    simulate = command(commands, "simulate", _simulate, summary, SIMULATE)
    simulate.add_argument("job", type=Path, metavar="JOB.toml")
    simulate.add_argument("--nodes", type=many, required=True, metavar="N")
    dry_run(simulate)
    settings(simulate)


def _train(options) -> int:
    from mpigossip.config import JobError

    if options.nodes is not None and not options.dry_run:
        raise JobError(
            f"--nodes {options.nodes} needs --dry-run: to train on several nodes, use the launcher "
            f"(mpirun -n {options.nodes} mpigossip train …), or "
            f"`mpigossip simulate {options.job} --nodes {options.nodes}`"
        )
    if options.dry_run:
        from mpigossip.analysis.dryrun import describe
        from mpigossip.cluster import process
        from mpigossip.training import assemble

        text = describe(assemble.load(options.job, options.settings), options.nodes)
        if process.prints_shared_messages():
            print_safe(text)
        return OK
    limit = _begin(options.job, options.settings)
    from mpigossip.cluster.mpi_world import open_world
    from mpigossip.runs import start_and_resume
    from mpigossip.training import assemble

    with open_world(limit) as ranks:
        with ranks.raise_together(UserError):
            job = assemble.load(options.job, options.settings)
        return _exit_code(start_and_resume.train(job, ranks), ranks)


def _resume(options) -> int:
    from mpigossip.config import JobError

    if options.nodes is not None and not options.simulate:
        raise JobError(
            f"--nodes {options.nodes} needs --simulate: otherwise, the launcher's ranks determine "
            "the number of nodes"
        )
    if options.simulate:
        from mpigossip.cluster.world import SingleProcess
        from mpigossip.runs import start_and_resume

        with SingleProcess() as alone:
            summary = start_and_resume.resume(
                options.folder, options.settings, alone, options.nodes
            )
            return _exit_code(summary, alone)
    folder = options.folder if options.folder.is_dir() else None
    limit = _begin(_job_of(options.folder), options.settings, folder)
    from mpigossip.cluster.mpi_world import open_world
    from mpigossip.runs import start_and_resume

    with open_world(limit) as ranks:
        return _exit_code(
            start_and_resume.resume(options.folder, options.settings, ranks, None), ranks
        )


def _simulate(options) -> int:
    from mpigossip.analysis.dryrun import describe
    from mpigossip.cluster.world import SingleProcess
    from mpigossip.runs import start_and_resume
    from mpigossip.training import assemble

    job = assemble.load(options.job, options.settings)
    if not any(setting.strip().startswith("run.output") for setting in options.settings):
        # A real run of the job must be able to use the name of the run directory itself.
        job = assemble.with_output(job, f"{job.run.folder}-simulated")
    if options.dry_run:
        print_safe(describe(job, options.nodes))
        return OK
    with SingleProcess() as alone:
        return _exit_code(start_and_resume.train(job, alone, options.nodes), alone)


def _job_of(folder: Path) -> dict:
    """Return the job of the newest checkpoint, or {} if there is none or it can't be read.

    All ranks report this later.
    """
    from mpigossip.config import JobError
    from mpigossip.config.reading import read
    from mpigossip.store import StoreError, checkpoint

    try:
        newest = checkpoint.latest(folder)
        return read(checkpoint.read_manifest(newest).job) if newest else {}
    except (StoreError, JobError, OSError):
        return {}


def _begin(job: Path | dict, settings: list[str], folder: Path | None = None) -> float:
    """Prepare this process as a rank of a launcher, before torch and MPI are imported.

    :param job: path of the job file, or the job as a dict
    :param settings: settings "section.key=value" that override settings of the job
    :param folder: run directory; None: the job names it
    :return: seconds that MPI may take to start
    """
    from mpigossip import config
    from mpigossip.cluster import process

    try:
        loaded = config.load(job, settings)
    except config.JobError:  # reported when all ranks are running
        return process.before_mpi(folder)
    node = loaded.node
    return process.before_mpi(folder or loaded.run.folder, node.timeout_s, node.devices)


def _exit_code(summary: dict, world: World) -> int:
    """Return STOPPED if the run of any rank has stopped before its end, otherwise OK; collective.

    :param summary: summary of the run; {}: there was nothing to do
    :param world: all ranks
    """
    return STOPPED if world.agree(int(bool(summary) and not summary["finished"])) else OK


JOIN = """
mpigossip join runs/big digits algorithm.style=atc \\
      cadence.name=every cadence.period=4
mpigossip join runs/big
"""
REPLAY = """
mpigossip replay runs/big
mpigossip replay runs/big --place 3 --rounds 10:20
mpigossip replay runs/big --audit 0.1
mpigossip replay runs/big --fork 100 cadence.period=8 --to runs/big-8
mpigossip replay runs/big --blame
"""


def _add_members(commands) -> None:
    for name, run, about, examples, needed in (
        (
            "join",
            _join,
            "train as one member, which may join and leave at any time",
            JOIN,
            "needed to begin a training; later, the same job or none",
        ),
        (
            "replay",
            _replay,
            "repeat a training of members, and compare all models",
            REPLAY,
            "your copy of the job, needed if it names custom code",
        ),
    ):
        parser = command(commands, name, run, about, examples)
        parser.add_argument("folder", type=Path, metavar="RUN")
        parser.add_argument("job", type=Path, nargs="?", metavar="JOB.toml", help=needed)
        if name == "join":
            about = "accept files of other users, who may write to the folder"
            parser.add_argument("--shared", action="store_true", help=about)
        else:
            parser.add_argument(
                "--place", type=int, metavar="P", help="only the rounds of this place"
            )
            parser.add_argument(
                "--rounds", type=_rounds, metavar="A:B", help="only these rounds; the first is 1"
            )
            parser.add_argument(
                "--audit",
                type=_fraction,
                metavar="FRACTION",
                help="draw this fraction of the rounds and repeat each from stored models, which "
                "needs members.keep_every = 1",
            )
            _add_fork(parser)
        settings(parser)


def _add_fork(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--fork",
        type=_whole,
        metavar="ROUND",
        help="repeat the training up to this round and continue with the settings of this command; "
        "0: change them from the beginning",
    )
    parser.add_argument(
        "--without", type=int, metavar="P", help="leave out this place after the fork"
    )
    parser.add_argument("--to", type=Path, metavar="NEW", help="new folder for the fork")
    parser.add_argument(
        "--blame",
        action="store_true",
        help="rank the places by the change of the final loss if each is left out, after the round "
        "of --fork or from the beginning",
    )


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise argparse.ArgumentTypeError(f'"{text}": must be a number of rounds, such as 20, or 0')
    return int(text)


def _rounds(text: str) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    try:
        rounds = whole(first), whole(last if colon else first)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f'"{text}": must be one round, such as 10, or the first and the last round, such as '
            "10:20"
        ) from None
    if rounds[1] < rounds[0]:
        raise argparse.ArgumentTypeError(f'"{text}": the first round must come first, as in 10:20')
    return rounds


def _fraction(text: str) -> float:
    try:
        fraction = float(text)
    except ValueError:
        fraction = 0.0
    if not 0 < fraction <= 1:
        raise argparse.ArgumentTypeError(f'"{text}": must be greater than 0 and at most 1')
    return fraction


def _own_job(options):
    from mpigossip.training import assemble

    if options.job is None:
        return None
    if "=" in str(options.job) and not options.job.exists():
        raise UserError(
            f'"{options.job}" is a setting: name the job before it, as in RUN JOB.toml '
            f"{options.job}; the job of a training that has begun can't be changed"
        )
    return assemble.load(options.job, options.settings)


def _join(options) -> int:
    from mpigossip.runs.members.join import join
    from mpigossip.runs.summary import number

    summary = join(options.folder, _own_job(options), shared=options.shared)
    if summary.get("rank"):  # rank 0 of the member prints
        return OK if summary["finished"] or summary["stop_file"] else STOPPED
    if not summary["finished"]:
        if summary["stop_file"]:
            print_safe(
                f"{options.folder}: stopped because the file STOP exists; remove it to continue"
            )
            return OK
        print_safe(
            f"{options.folder}: this member has left; the others continue, and the same command "
            "joins again"
        )
        return STOPPED
    values = {
        name: number(value) if isinstance(value, float) else value
        for name, value in summary.items()
        if name not in ("finished", "places")
    }
    values.setdefault("checkpoint", "is still being written by another member")
    lines = [f"  {name:<12}{value}" for name, value in values.items()]
    print_safe("\n".join(["\nthe training has ended; the average of its last models:", *lines]))
    return OK


def _replay(options) -> int:
    from mpigossip.runs.members.replay import ReplayMismatch, replay

    _check_replay(options)
    try:
        if options.blame or options.fork is not None:
            print_safe(_forked(options))
            return OK
        job = _own_job(options)
        print_safe(replay(options.folder, options.place, options.rounds, job, options.audit))
    except ReplayMismatch as error:
        print_safe(f"{options.folder}: {error}")
        return FAILED
    return OK


def _check_replay(options) -> None:
    """Check that no options of `replay` exclude each other.

    :param options: parsed options
    :raises UserError: if two options exclude each other, or if an option requires another that is
        missing
    """
    is_fork = options.fork is not None
    if (is_fork or options.blame or options.audit) and (
        options.place is not None or options.rounds
    ):
        raise UserError("--fork, --blame and --audit choose the rounds: omit --place and --rounds")
    if options.audit and (is_fork or options.blame):
        raise UserError("--audit excludes --fork and --blame: give one of them")
    if options.blame and (options.without is not None or options.to):
        raise UserError("--blame leaves out each place and writes no folder: omit --without, --to")
    if is_fork and not options.blame and options.to is None:
        raise UserError("--fork needs --to NEW, the new folder of the fork")
    if not is_fork and (options.without is not None or (options.to and not options.blame)):
        raise UserError("--without and --to belong to a fork: give --fork ROUND, too")


def _forked(options) -> str:
    """Run `replay --fork` or `replay --blame`; return the text to print."""
    from mpigossip.runs.members.fork import blame, fork
    from mpigossip.training import assemble

    settings = [*options.settings]
    job = options.job
    if job is not None and "=" in str(job) and not job.exists():
        settings.insert(0, str(job))
        job = None
    own = None if job is None else assemble.load(job)
    if not options.blame:
        return fork(options.folder, options.fork, options.to, settings, options.without, own)
    if settings:
        raise UserError(f"--blame changes no setting: omit {settings[0]}")
    return blame(options.folder, options.fork or 0, own)


STUDY = "mpigossip study study --out runs/study"


def _add_study(commands) -> None:
    study = command(
        commands,
        "study",
        _study,
        "simulate a grid of settings, nodes and seeds, without those that are complete",
        STUDY,
    )
    study.add_argument(
        "file",
        type=Path,
        metavar="FILE.toml",
        help="file with the keys job, grid, nodes, seeds, settings, rates, judge, larger, output, "
        "processes and skip",
    )
    study.add_argument(
        "--out", type=Path, metavar="DIR", help="folder for logs, tables and plots; default: output"
    )
    study.add_argument("--dry-run", action="store_true", help="print the commands of missing runs")
    study.add_argument(
        "--partial",
        action="store_true",
        help="print the table of the complete runs, and start no run",
    )


def _study(options) -> None:
    """Train the missing runs of a study, print its results, and write its tables and plots.

    With ``--dry-run`` or ``--partial``, only print; no run is trained.
    """
    from mpigossip.studies import study
    from mpigossip.studies.grid import arguments
    from mpigossip.studies.running import Missing

    parameters = arguments(options.file, study)
    if options.out is not None:
        parameters["output"] = options.out
    if options.dry_run:
        try:
            print_safe(study(**parameters | {"processes": 0}))
        except Missing as missing:
            print_safe(missing)
        return
    if options.partial:
        print_safe(study(**parameters | {"partial": True}))
        return
    # A batch job that reaches its time limit gets SIGTERM: stop the runs as after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print_note(f"{options.file}: reading the logs of complete runs")
    results = study(**parameters)
    print_note("all runs are complete; drawing tables and figures")
    print_safe(results, flush=True)
    names = results.write()
    for name, why in results.left_out.items():
        print_safe(f"left out: {name}: {why}")
    ties = "; ".join(map(results.name_of, results.ties()))
    print_safe(
        f"best by {results.judge}: {results.name_of(results.best())}"
        + (f"; not significantly different from it: {ties}" if ties else "")
    )
    print_safe(f"{results.folder}: {', '.join(names)}")

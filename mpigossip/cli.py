"""The command line: parsing here, work in the rooms, nothing heavy imported before its use."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import mpigossip
from mpigossip.config.errors import FAILED, OK, STOPPED, WRONG, Failure, Mistake


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. Mistakes of the user become one paragraph and code 2."""
    code = _run(arguments)
    if ranks := sys.modules.get("mpigossip.cluster.ranks"):
        ranks.leave(code)
    return code


def _run(arguments: Sequence[str] | None) -> int:
    options = _parse(arguments)
    try:
        return options.run(options) or OK
    except BrokenPipeError:
        sys.stderr.close()
        return OK
    except Mistake as error:
        if _speaks(error):
            print(f"mpigossip: {error}", file=sys.stderr)
        return WRONG
    except Failure as error:
        print(f"mpigossip: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("mpigossip: interrupted", file=sys.stderr)
        return 130


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse; settings may stand anywhere behind the job file, also after options."""
    top = parser()
    given = list(sys.argv[1:] if arguments is None else arguments)
    _check_command(top, given)
    options, rest = top.parse_known_args(given)
    settings = getattr(options, "settings", None)
    if rest and (settings is None or any("=" not in word or word[0] == "-" for word in rest)):
        top.error(f"unrecognized arguments: {' '.join(rest)}")
    if settings is not None:
        options.settings = [*settings, *rest]
    return options


def _check_command(top: argparse.ArgumentParser, given: list[str]) -> None:
    """End with a hint where the first word is no command: `plot` means `log plot`."""
    from mpigossip.analysis.examples import commands
    from mpigossip.config.toml import near

    known = [words for words, _ in commands(top) if words]
    if given and not given[0].startswith("-") and given[0] not in known:
        meant = [words for words in known if words.endswith(f" {given[0]}")]
        hint = " or ".join(f"`mpigossip {words}`" for words in meant)
        hint = (
            f"did you mean {hint}?" if meant else near(given[0], [w for w in known if " " not in w])
        )
        top.error(f'"{given[0]}" is no command; {hint}')


def _speaks(error: Mistake) -> bool:
    """Whether this process prints the message that all ranks have."""
    if error.rank is not None:
        return error.rank == 0
    from mpigossip.cluster import ranks

    return ranks.speaks()


def parser() -> argparse.ArgumentParser:
    """All commands with their arguments."""
    top = argparse.ArgumentParser(
        prog="mpigossip",
        description="Train PyTorch models across nodes by averaging with neighbours.",
    )
    top.add_argument("--version", action="version", version=mpigossip.__version__)
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    _add_runs(commands)
    _add_data(commands)
    from mpigossip.analysis import commands as more
    from mpigossip.analysis import examples, results

    results.add(commands)
    more.add(commands)
    examples.attach(top)
    return top


def _command(commands, name: str, run, summary: str) -> argparse.ArgumentParser:
    made = commands.add_parser(name, help=summary, description=summary)
    made.set_defaults(run=run)
    return made


def _settings(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "settings", nargs="*", metavar="section.key=value", help="settings that replace the job's"
    )


# -- train, resume, simulate ------------------------------------------------------------------


def _add_runs(commands) -> None:
    train = _command(commands, "train", _train, "train a job on all ranks of the launcher")
    train.add_argument("job", type=Path, metavar="JOB.toml")
    train.add_argument("--dry-run", action="store_true", help="print the whole job and stop")
    train.add_argument("--nodes", type=int, help="with --dry-run: nodes to plan for")
    _settings(train)
    resume = _command(commands, "resume", _resume, "go on with a run from its last checkpoint")
    resume.add_argument("folder", type=Path, metavar="RUN_DIR")
    resume.add_argument("--simulate", action="store_true", help="nodes in this process, no MPI")
    _settings(resume)
    simulate = _command(
        commands, "simulate", _simulate, "the same job with n nodes in this process, without MPI"
    )
    simulate.add_argument("job", type=Path, metavar="JOB.toml")
    simulate.add_argument("--nodes", type=int, required=True, metavar="N")
    _settings(simulate)


def _train(options) -> int:
    from mpigossip.config import JobError

    if options.nodes is not None and not options.dry_run:
        raise JobError(
            [f"--nodes {options.nodes} goes with --dry-run: how many nodes train is said to the "
             f"launcher (mpirun -n {options.nodes} mpigossip train …), or to "
             f"`mpigossip simulate {options.job} --nodes {options.nodes}`"]
        )  # fmt: skip
    from mpigossip.runs import launch
    from mpigossip.training import assemble

    if options.dry_run:
        from mpigossip.analysis.dryrun import describe

        print(describe(assemble.load(options.job, options.settings), options.nodes))
        return OK
    from mpigossip.cluster.ranks import world

    with world() as ranks:
        with ranks.together(Mistake):
            job = assemble.load(options.job, options.settings)
        return _code(launch.train(job, ranks, ranks.size), ranks)


def _resume(options) -> int:
    from mpigossip.cluster.ranks import Alone, world
    from mpigossip.runs import launch

    if options.simulate:
        with Alone() as alone:
            return _code(launch.resume(options.folder, options.settings, alone, None), alone)
    with world() as ranks:
        return _code(launch.resume(options.folder, options.settings, ranks, ranks.size), ranks)


def _simulate(options) -> int:
    from mpigossip.cluster.ranks import Alone
    from mpigossip.config import JobError
    from mpigossip.runs import launch
    from mpigossip.training import assemble

    if options.nodes < 1:
        raise JobError([f"--nodes {options.nodes}: at least 1 node is needed"])
    job = assemble.load(options.job, options.settings)
    if not any(setting.strip().startswith("run.output") for setting in options.settings):
        # a real run of the same job has the folder's plain name
        job = assemble.with_output(job, f"{job.run.folder}-simulated")
    with Alone() as alone:
        return _code(launch.train(job, alone, options.nodes), alone)


def _code(summary: dict, world) -> int:
    """The exit code that a summary means, the same on every rank."""
    return STOPPED if world.agree(int(bool(summary) and not summary["finished"])) else OK


# -- data -------------------------------------------------------------------------------------


def _add_data(commands) -> None:
    data = commands.add_parser("data", help="image folders and text to HDF5").add_subparsers(
        metavar="pack|show", required=True
    )
    pack = _command(data, "pack", _pack, "pack train/CLASS/*.jpg and test/CLASS/*.jpg into HDF5")
    pack.add_argument("folder", type=Path, metavar="FOLDER")
    pack.add_argument("out", type=Path, metavar="OUT.h5")
    pack.add_argument("--image-size", type=int, help="shorter side in pixels to resize to")
    pack.add_argument("--text", action="store_true", help="pack text files for a language model")
    show = _command(data, "show", _show_data, "say what a packed file holds")
    show.add_argument("file", type=Path, metavar="FILE.h5")


def _pack(options) -> int:
    from mpigossip.store.dataset import pack, show

    pack(options.folder, options.out, image_size=options.image_size, text=options.text)
    print(show(options.out))
    return OK


def _show_data(options) -> int:
    from mpigossip.store.dataset import show

    print(show(options.file))
    return OK

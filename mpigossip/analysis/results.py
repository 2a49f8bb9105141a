"""The commands that look at what a run left behind: logs, reports, checkpoints."""

from __future__ import annotations

import argparse
from pathlib import Path

from mpigossip.config.errors import WRONG


def add(commands) -> None:
    """Add them to the parser of the command line."""
    _add_logs(commands)
    _add_report(commands)
    _add_checkpoints(commands)


def _command(commands, name: str, run, summary: str) -> argparse.ArgumentParser:
    made = commands.add_parser(name, help=summary, description=summary)
    made.set_defaults(run=run)
    return made


def _there(path: Path) -> Path:
    """A run that the user named; StoreError with what there is instead where it isn't."""
    from mpigossip.config.toml import near
    from mpigossip.store import StoreError

    if path.exists():
        return path
    runs = {log.parent.name for log in path.parent.glob("*/log.h5")}
    hint = near(path.name, runs) if runs else "`mpigossip train JOB.toml` makes one"
    raise StoreError(f'there is no run "{path}"; {hint}')


def _add_logs(commands) -> None:
    log = commands.add_parser("log", help="show, export and plot logs").add_subparsers(
        metavar="show|export|plot", required=True
    )
    show = _command(log, "show", _show_log, "a run's evaluations and summary as a table")
    show.add_argument("run_folder", type=Path, metavar="RUN", help="folder of a run, or a log")
    export = _command(log, "export", _export_log, "a run's log for other programs")
    export.add_argument("run_folder", type=Path, metavar="RUN", help="folder of a run, or a log")
    to = export.add_mutually_exclusive_group(required=True)
    to.add_argument("--csv", type=Path, metavar="FILE", help="run.csv, and run-evaluations.csv")
    to.add_argument("--netcdf", type=Path, metavar="FILE", help="netCDF-4, with units")
    to.add_argument("--tensorboard", type=Path, metavar="DIR", help="event files")
    plot = _command(log, "plot", _plot_log, "one picture (PNG) of one or several runs")
    plot.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of runs, or logs")
    plot.add_argument("--out", type=Path, metavar="OUT.png", help="default: RUN/log.png")


def _show_log(options) -> None:
    from mpigossip.analysis.compared import log_of
    from mpigossip.analysis.report import table
    from mpigossip.store.log import read

    print(table(read(log_of(_there(options.run_folder)))))


def _export_log(options) -> None:
    from mpigossip.analysis.compared import log_of
    from mpigossip.store import export
    from mpigossip.store.log import read

    file = log_of(_there(options.run_folder))
    if options.netcdf:
        export.to_netcdf(file, options.netcdf)
    elif options.csv:
        export.to_csv(read(file), options.csv)
    else:
        export.to_tensorboard(read(file), options.tensorboard)
    print(options.netcdf or options.csv or options.tensorboard)


def _plot_log(options) -> None:
    from mpigossip.analysis.plot import plot

    first = options.runs[0]
    out = options.out or (first if first.is_dir() else first.parent) / "log.png"
    plot([_there(run) for run in options.runs], out)
    print(out)


def _add_report(commands) -> None:
    report = _command(commands, "report", _report, "one page in HTML of one or several runs")
    report.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of runs")
    report.add_argument("--html", type=Path, required=True, metavar="OUT.html")


def _report(options) -> None:
    from mpigossip.analysis.page import write

    write([_there(run) for run in options.runs], options.html)
    print(options.html)


def _add_checkpoints(commands) -> None:
    checkpoint = commands.add_parser(
        "checkpoint", help="look into checkpoints, export models"
    ).add_subparsers(metavar="show|verify|export", required=True)
    show = _command(checkpoint, "show", _show_checkpoint, "what a checkpoint holds")
    verify = _command(checkpoint, "verify", _verify, "read all of it and compare checksums")
    export = _command(checkpoint, "export", _export_model, "the averaged model for plain torch")
    for each in (show, verify, export):
        each.add_argument("path", type=Path, metavar="RUN", help="run folder or checkpoint")
    export.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="model.safetensors or model.pt"
    )
    export.add_argument(
        "--node", type=int, metavar="K", help="node K's model; default: the average of all nodes"
    )
    export.add_argument(
        "--trust-model",
        action="store_true",
        help="import the module:factory that the checkpoint names, for frozen and tied parameters",
    )


def _checkpoint_of(path: Path) -> Path:
    """The checkpoint meant: itself, or a run's newest."""
    from mpigossip.store import StoreError, checkpoint

    if (_there(path) / "checkpoint.h5").exists():
        return path
    newest = checkpoint.latest(path)
    if newest is None:
        raise StoreError(f'"{path}" is no checkpoint, and no run directory that has a whole one')
    return newest


def _show_checkpoint(options) -> None:
    from mpigossip.store import checkpoint

    path = _checkpoint_of(options.path)
    manifest = checkpoint.read_manifest(path)
    print(f"{path}: step {manifest.step}, {manifest.n} nodes")
    for entry in manifest.entries:
        print(f"  {entry.file}  {entry.bytes:,} bytes")
    print(f"digest {checkpoint.digest(path)}\n\n{manifest.job}")


def _verify(options) -> int:
    from mpigossip.store import checkpoint

    path = _checkpoint_of(options.path)
    problems = checkpoint.verify(path)
    print("\n".join(problems) or f"{path}: whole")
    return WRONG if problems else 0


def _export_model(options) -> None:
    from mpigossip.runs.export import export

    path = _checkpoint_of(options.path)
    print(export(path, options.out, options.node, options.trust_model))

"""`mpigossip log` and `report`: show, export and plot logs; an HTML page of runs."""

from __future__ import annotations

from pathlib import Path

from mpigossip.commands.arguments import command, family, run_named, tell

PLOT = """
mpigossip log plot runs/digits
mpigossip log plot runs/ring runs/digits --out compare.png
"""
EXAMPLES = """
mpigossip log show runs/digits
mpigossip log plot runs/ring runs/digits --out compare.png
"""
EXPORT = """
mpigossip log export runs/digits --csv digits.csv
mpigossip log export runs/digits --tensorboard events
"""
REPORT = "mpigossip report runs/ring runs/digits --html report.html"


def add(commands) -> None:
    """Add them to the parser."""
    log = family(commands, "log", "show|export|plot", "show, export and plot logs", EXAMPLES)
    summary = "a run's evaluations and summary as a table"
    show = command(log, "show", _show, summary, "mpigossip log show runs/digits")
    show.add_argument("run_folder", type=Path, metavar="RUN", help="folder of a run, or a log")
    export = command(log, "export", _export, "a run's log for other programs", EXPORT)
    export.add_argument("run_folder", type=Path, metavar="RUN", help="folder of a run, or a log")
    to = export.add_mutually_exclusive_group(required=True)
    to.add_argument("--csv", type=Path, metavar="FILE", help="run.csv, and run-evaluations.csv")
    to.add_argument("--tensorboard", type=Path, metavar="DIR", help="event files")
    plot = command(log, "plot", _plot, "one picture (PNG) of one or several runs", PLOT)
    plot.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of runs, or logs")
    plot.add_argument("--out", type=Path, metavar="OUT.png", help="default: RUN/log.png")
    summary = "one page in HTML of one or several runs"
    report = command(commands, "report", _report, summary, REPORT)
    report.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of runs")
    report.add_argument("--html", type=Path, required=True, metavar="OUT.html")


def _show(options) -> None:
    from mpigossip.analysis.compared import log_of
    from mpigossip.analysis.report import table
    from mpigossip.store.log import read

    tell(table(read(log_of(run_named(options.run_folder)))))


def _export(options) -> None:
    from mpigossip.analysis.compared import log_of
    from mpigossip.store import log_export
    from mpigossip.store.log import read

    log = read(log_of(run_named(options.run_folder)))
    if options.csv:
        log_export.to_csv(log, options.csv)
    else:
        log_export.to_tensorboard(log, options.tensorboard)
    tell(options.csv or options.tensorboard)


def _plot(options) -> None:
    from mpigossip.analysis.plot import plot

    first = options.runs[0]
    out = options.out or (first if first.is_dir() else first.parent) / "log.png"
    plot([run_named(run) for run in options.runs], out)
    tell(out)


def _report(options) -> None:
    from mpigossip.analysis.report import write

    write([run_named(run) for run in options.runs], options.html)
    tell(options.html)

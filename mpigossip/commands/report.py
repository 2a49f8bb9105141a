"""`mpigossip report`: one page in HTML of one or several runs."""

from __future__ import annotations

from pathlib import Path

from mpigossip.commands.arguments import command, run_named, tell

EXAMPLES = "mpigossip report runs/ring runs/digits --html report.html"


def add(commands) -> None:
    """Add it to the parser."""
    report = command(commands, "report", run, "one page in HTML of one or several runs", EXAMPLES)
    report.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of runs")
    report.add_argument("--html", type=Path, required=True, metavar="OUT.html")


def run(options) -> None:
    """Write the page."""
    from mpigossip.analysis.page import write

    write([run_named(run) for run in options.runs], options.html)
    tell(options.html)

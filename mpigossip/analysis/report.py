"""Reports of runs: a text table of one log, or a self-contained HTML page of several runs."""

import base64
import difflib
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from mpigossip.analysis.logged_runs import (
    PARTS,
    LoggedRun,
    description,
    is_simulated,
    load,
    mean_ms,
    of_members,
    over_nodes,
    own_columns,
    shares,
    time_note,
    who,
)
from mpigossip.analysis.plot import figure
from mpigossip.config.readable import aligned, pluralize, three_digits
from mpigossip.config.toml import show
from mpigossip.members.place import Place, TrainingPlan
from mpigossip.members.records import RecordStore, Start
from mpigossip.runs.summary import describe, number
from mpigossip.store.hdf5 import reading, replacing
from mpigossip.store.log import Log
from mpigossip.store.log_reading import metrics_in
from mpigossip.studies.seeds import CURVES, settings

TEMPLATE = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
"""Loader of the page's template. It escapes all values, so that the content of a log or a job can't
inject markup into the page."""
FINDINGS = "doctor.json"
"""Name of a file in a run directory, to which the user may have saved the output of
`mpigossip doctor --json`."""


def table(log: Log) -> str:
    """Return a text about a run: a table of evaluations, the parts of a step, and the summary."""
    evaluations = log.evaluations
    unknown = np.full((len(evaluations["step"]), 1), np.nan)
    metrics = metrics_in(evaluations)
    first = (metrics or ["loss"])[0]
    local = evaluations.get(f"local_{first}", unknown)
    difference = local - evaluations.get(f"share_{first}", unknown)
    scale, form, unit = (100, "{:+.1f}", " %") if first == "accuracy" else (1, "{:+.2g}", "")
    columns = {
        "step": [f"{step}" for step in _tested_at(log)],
        "epoch": _cells(evaluations.get("epoch"), "{:.2f}"),
        "loss": _cells(evaluations.get("loss")),
        **{name: _cells(evaluations.get(name)) for name in metrics[:1]},
        "local*": _ranges(local, "{:.3f}".format if unit else number)
        if np.isfinite(local).any()
        else [],
        "− averaged*": _ranges(scale * difference, form.format, unit)
        if np.isfinite(difference).any()
        else [],
        **{name: _cells(evaluations.get(name)) for name in metrics[1:]},
        "consensus": []
        if of_members(log)
        else _cells(evaluations.get("consensus_distance"), "{:.2e}"),
        "time s": _cells(evaluations.get("seconds"), "{:.1f}"),
    }
    lines = [description(log), ""]
    columns = {name: cells for name, cells in columns.items() if cells}
    rows = [columns, *zip(*columns.values(), strict=True)]
    if not columns:
        lines += ["no evaluation; metrics of steps:", ""]
    lines += [aligned(rows if columns else _logged(log), left=())]
    # Members evaluate only at the end, so that the evaluation does not show the course of training.
    if columns and of_members(log) and (logged := _logged(log)):
        lines += ["", "metrics of steps:", "", aligned(logged, left=())]
    if log.nodes > 1 and np.isfinite(local).any():
        lines += [
            f"* {first} of each node on its own 1/{log.nodes} of the test samples, and the",
            "  difference from the averaged model on the same samples",
        ]
    means = {part: mean_ms(log, part) for part in PARTS}
    total = sum(means.values())
    begin = "the simulation of a step takes" if is_simulated(log) else "a step takes"
    spent = f"{begin} {three_digits(total)} ms: {', '.join(shares(means))}"
    without = "times of steps are not known" if len(log.steps["step"]) else "no steps yet"
    lines += ["", spent if total else without]
    if "finished" in log.summary:
        lines += ["", describe(log.summary, who(log))]
    elif log.summary:
        lines += ["", aligned(log.summary.items(), left=(0, 1))]
    return "\n".join(lines)


def _tested_at(log: Log) -> Sequence[int]:
    """Return the number of steps done at each evaluation.

    A training of members is evaluated only at its end, after all steps of its members.
    """
    if of_members(log) and "steps" in log.summary:
        return [log.summary["steps"]] * len(log.evaluations["step"])
    return log.evaluations["step"].tolist()


def _logged(log: Log) -> list[Sequence[str]]:
    """Return the rows of a table of the metrics that a program has logged, for at most 20 steps.

    Steps at which all metrics are known are preferred to steps at which only some are. The first
    row is the heading; without metrics, the result is [].
    """
    names = sorted(["loss", *own_columns(log)])
    values = {name: over_nodes(np.nanmean, log.steps[name]) for name in names}
    values = {name: of for name, of in values.items() if np.isfinite(of).any()}
    if not values:
        return []
    is_known = np.isfinite([*values.values()])
    all_known = is_known.all(axis=0)
    known_rows = np.flatnonzero(all_known if all_known.any() else is_known.any(axis=0))
    chosen_rows = known_rows[np.unique(np.linspace(0, len(known_rows) - 1, 20).astype(int))]
    step = log.steps["step"]
    rows = [
        [
            f"{int(step[k]) + 1}",
            *(number(of[k]) if np.isfinite(of[k]) else "–" for of in values.values()),
        ]
        for k in chosen_rows
    ]
    return [["step", *values], *rows]


def _ranges(values: np.ndarray, form: Callable[[float], str], unit: str = "") -> list[str]:
    """Return the range of each row of an array (evaluations, nodes), such as "0.91 to 0.93".

    :param values: the array; a row without numbers becomes "–"
    :param form: function that formats a number
    :param unit: unit, which follows the second number
    """
    pairs = zip(over_nodes(np.nanmin, values), over_nodes(np.nanmax, values), strict=True)
    return [f"{form(a)} to {form(b)}{unit}" if a == a else "–" for a, b in pairs]


def _cells(values: np.ndarray | None, form: str = "") -> list[str]:
    """Format each value for a cell of the table.

    :param values: the values; None: the log does not contain them
    :param form: format string; "": :func:`~mpigossip.runs.summary.number` formats the values
    """
    if values is None:
        return []
    return [(form.format(v) if form else number(v)) if v == v else "–" for v in values]


def write(runs: Sequence[Path], out: Path) -> None:
    """Write an HTML page about runs, which needs no other file and no network.

    If a run directory contains `doctor.json`, the page also shows the findings in that file.

    :param runs: run directories or logs
    :param out: file to write
    :raises StoreError: if there is no log, if a log or `doctor.json` can't be read, or if the page
        can't be written
    """
    drawn = load([Path(run) for run in runs])
    text = page(drawn, [_findings(run.path) for run in drawn])
    with replacing(out) as temporary:
        temporary.write_text(text, "utf-8")


def page(runs: Sequence[LoggedRun], findings: Sequence[list[dict]]) -> str:
    """Return the HTML page as text.

    :param runs: runs of the page, in this order
    :param findings: for each run, the findings of `mpigossip doctor`; empty: there are none
    """
    few = len(runs) <= CURVES
    title = ", ".join(run.name for run in runs) if few else f"{len(runs)} runs"
    about = dict.fromkeys(description(run.log) for run in runs)
    head, rows = _result(runs)
    text_of_page = TEMPLATE.get_template("report.html.jinja").render(
        title=title,
        about="; ".join(about),
        head=head,
        rows=rows,
        time_note=time_note(runs),
        picture=_picture(runs),
        findings=[
            (run.name, findings_of_run)
            for run, findings_of_run in zip(runs, findings, strict=True)
            if findings_of_run
        ],
        evaluations=[(run.name, table(run.log)) for run in runs],
        members=[(run.name, text) for run in runs if (text := stays(run.path))],
        alone=len(runs) == 1,
        jobs=_jobs(runs),
        environments=[
            (run.name, aligned(run.log.environment.items(), left=(0, 1))) for run in runs
        ],
    )
    return text_of_page + "\n"


COLUMNS = {
    "steps": ("steps", "{:,}"),
    "seconds": ("seconds", "{:,.1f}"),
    "samples_per_second": ("samples/s", "{:,.0f}"),
    "digest": ("digest", "{:.16}…"),
}
"""Entries of a summary that the table of results shows after the metrics, by key: name of the
column, and format."""


def _result(runs: Sequence[LoggedRun]) -> tuple[list[str], list[tuple[list[str], list[str]]]]:
    """Return the table of results: names of its columns, and two lists for each run.

    The first list has the name and the description of the run, the second the formatted entries of
    its summary.
    """
    tested = dict.fromkeys([*(name for run in runs for name in run.metrics), "loss"])
    columns = {n: (f"test {n}", "{:.4g}") for n in tested} | COLUMNS
    rows = []
    for run in runs:
        summary = run.log.summary
        cells = [
            _formatted(summary[key], form) if key in summary else "–"
            for key, (_, form) in columns.items()
        ]
        # The log of a training of members has no entry "finished".
        if not summary.get("finished", 0) and not of_members(run.log):
            cells[-1] = "not finished"
        rows.append(([run.name, description(run.log)], cells))
    return ["run", "description", *(c for c, _ in columns.values())], rows


def _formatted(value: Any, form: str) -> str:
    """Format a value of a summary by the format ``form``, or as plain text if it has another type.

    An unknown value (NaN) becomes "–".
    """
    if value != value:
        return "–"
    try:
        return form.format(value)
    except (ValueError, TypeError):
        return str(value)


def _picture(runs: Sequence[LoggedRun]) -> str:
    """Return the plot of the runs as a PNG in base64."""
    image = io.BytesIO()
    figure(runs).savefig(image, format="png", transparent=True)
    return base64.b64encode(image.getvalue()).decode()


def _jobs(runs: Sequence[LoggedRun]) -> list[tuple[str, str]]:
    """Return pairs (name, text): the first run's job, and the differences of the other jobs."""
    first, *others = runs
    parts = [(first.name, first.log.job)]
    for run in others:
        before, now = (
            [f"{key} = {show(value)}" for key, value in settings(compared.log.job).items()]
            for compared in (first, run)
        )
        lines = difflib.unified_diff(before, now, first.name, run.name, n=0, lineterm="")
        changed = [line for line in lines if not line.startswith("@@")]
        parts.append((run.name, "\n".join(changed) or "the same job"))
    return parts


def stays(run: Path) -> str:
    """Return a text on how each place of a training of members has ended, and on repeated claims.

    For other runs, return "".

    :param run: run directory
    """
    if not (run / "places").is_dir():
        return ""
    place = Place(RecordStore(run, shared=True), TrainingPlan(0, 1, 0.0), report=lambda line: None)
    rows = [("place", "host", "rounds", "end")]
    for index in place.numbers("places"):
        chain = place.refresh(index)
        start = place.record(index, 0)
        host = start.about.get("host", "–") if isinstance(start, Start) else "–"
        closed = chain.closed
        end = "open, or present at the end" if closed is None else closed.why
        if closed is not None and closed.by != index:
            end += f"; closed by place {closed.by}"
        rows.append((str(index), host, str(chain.rounds), end))
    names = place.disk.names
    parts = place.disk.names("ledger")
    claims = [name for part in parts for name in names(f"ledger/{part}")]
    repeated = sum(not name.endswith((".0", ".done")) for name in claims)
    repeated_claims = (
        f"{pluralize(repeated, 'claim')} of chunks that an earlier claim did not finish"
    )
    return f"{aligned(rows, left=(1, 3))}\n\n{repeated_claims}"


def _findings(run: Path) -> list[dict]:
    """Return the findings in `doctor.json` of a run directory; [] if there is no such file.

    :param run: run directory, or a log in it
    :raises StoreError: if the file can't be read
    """
    file = (run if run.is_dir() else run.parent) / FINDINGS
    if not file.is_file():
        return []
    with reading(file):
        findings = json.loads(file.read_text("utf-8"))["findings"]
        return [
            {key: str(finding[key]) for key in ("name", "text", "level", "remedy")}
            for finding in findings
        ]

"""Recompute every verdict on training in RESULTS.md from the stored runs and intervals.

    python jobs/claims/verdicts.py            # print the verdicts, and compare them with the page
    python jobs/claims/verdicts.py --write    # write the verdicts into the page

`runs.jsonl` has one line per run. For nine older studies, `intervals.jsonl` has the intervals of
differences, because their runs are not stored. A difference between two methods is judged by
Student's t-test over runs with equal seeds, and Holm's procedure limits the probability of any
wrong verdict in a table to 5 %.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import gap  # noqa: E402
import optimal  # noqa: E402
import optimizers  # noqa: E402
import parity  # noqa: E402
import seconds  # noqa: E402
from designs import SEEDS  # noqa: E402
from judging import LEVEL, Verdict, format_interval, holm, judge, of_interval, of_values  # noqa: E402
from stored import Line, faults, read  # noqa: E402

PAGE = HERE / "RESULTS.md"
RUNS = HERE / "runs.jsonl"
INTERVALS = HERE / "intervals.jsonl"
LINKS = HERE / "links.jsonl"
HEADINGS = {
    "own rates": "## Training, each method at its own rate",
    "common rate": "## Comparison at one common rate",
}
"""Headings of tables in RESULTS.md, by the name of the table in intervals.jsonl."""
MARKS = "<!-- {}: by verdicts.py -->\n", "<!-- {}: end -->\n"
"""Comments in RESULTS.md before and after a table that this program replaces; {} is its study."""


def published(table: str, lines: Iterable[Line]) -> list[Verdict]:
    """Return the verdicts of a table for which only intervals are stored.

    :param table: name of the table
    :param lines: lines of intervals.jsonl
    """
    claims: dict[str, list[Line]] = {}
    for line in lines:
        if line["table"] == table:
            claims.setdefault(line["claim"], []).append(line)
    return holm(
        [
            judge(claim, list(map(of_interval, rows)), rows[0].get("by", 0.0), rows[0].get("alike"))
            for claim, rows in claims.items()
        ]
    )


# -- the other studies -----------------------------------------------------------------------------


def slope_verdicts(slopes: Sequence[optimal.Slope]) -> list[Verdict]:
    """Judge for each method whether its iterations grow with the expected power of 1/(1 − λ)."""
    return holm(
        [
            judge(
                f"{slope.method}, ζ = {slope.zeta}: {slope.against}",
                [of_values([v - 1 for v in slope.values])],
                alike=optimal.BAR,
            )
            for slope in slopes
        ]
    )


def slope_page(slopes: Sequence[optimal.Slope]) -> str:
    """Return the table of iterations until the gradient is small, in Markdown."""
    head = " | ".join(f"n = {n}" for n in optimal.SIZES)
    lines = [f"| method | ζ | {head} | against | slope | 1 ± {optimal.BAR:g} |"]
    lines.append("|" + "---|" * (len(optimal.SIZES) + 5))
    for slope, verdict in zip(slopes, slope_verdicts(slopes), strict=True):
        counts = " | ".join(f"{t:,}" for t in slope.counts)
        interval = format_interval(of_values(slope.values))
        lines.append(
            f"| {slope.method} | {slope.zeta} | {counts} | {slope.against} | {interval} "
            f"| {verdict.words} |"
        )
    bound = " | ".join(f"x {growth:.2f}" for growth in optimal.bound())
    lines.append(f"| lower bound, from n = {optimal.SIZES[0]} on |  | {bound} | 1/√(1−λ) | 1 |  |")
    return "\n".join(lines) + "\n"


def gain_verdicts(rows: Sequence[Line]) -> list[Verdict]:
    """Judge whether each method is faster than parallel SGD.

    The differences are logarithms of the ratios of seconds. A method that did not reach the goal
    with all seeds is left out.
    """
    return holm(
        [
            judge(
                f"{x['gbit']} Gbit/s, {1e3 * x['latency']:g} ms: {x['method']} before parallel",
                [of_values(np.log(x["gains"]))],
            )
            for x in rows
            if x["method"] != "parallel" and len(x["gains"]) == len(SEEDS)
        ]
    )


def gain_page(rows: Sequence[Line]) -> str:
    """Return the table of seconds until the goal on the virtual clock, in Markdown."""
    if not rows:
        return "Not run yet.\n"
    verdicts = {verdict.claim: verdict for verdict in gain_verdicts(rows)}
    methods = [m for m in seconds.CELL.methods if m != "parallel"]
    lines = [
        "| link | parallel, s | " + " | ".join(methods) + " |",
        "|---|---" + "|---" * len(methods) + "|",
    ]
    for gbit, latency in seconds.LINKS:
        by_method = {x["method"]: x for x in rows if (x["gbit"], x["latency"]) == (gbit, latency)}
        link = f"{gbit} Gbit/s, {1e3 * latency:g} ms"
        cells = [link, f"{np.mean(by_method['parallel']['seconds']):.0f}"]
        for m in methods:
            verdict = verdicts.get(f"{link}: {m} before parallel")
            if verdict is None:
                cells.append(f"{len(by_method[m]['gains'])} of {len(SEEDS)} are there")
                continue
            word = {True: "faster", False: "slower", None: "?"}[verdict.holds]
            if verdict.holds is not None and verdict.adjusted > LEVEL:
                word += " alone"
            cells.append(f"{format_interval(of_values(by_method[m]['gains']))} {word}")
        lines.append("| " + " | ".join(cells) + " |")
    steps = {m: next(x for x in rows if x["method"] == m)["steps"] for m in seconds.CELL.methods}
    medians = ", ".join(f"{m} {np.median(s):g}" for m, s in steps.items())
    lines += ["", f"Steps to {100 * rows[0]['goal']:.1f} %, median of the seeds: {medians}."]
    return "\n".join(lines) + "\n"


def links_page(rows: Sequence[Line]) -> str:
    """Return the table of seconds until the goal on real links and on the virtual clock."""
    if not rows:
        return "Not run yet.\n"
    lines = [
        "| link | method | steps | measured, s | clock, s | longer than the clock says "
        "| times parallel's speed, measured | clock |",
        "|" + "---|" * 8,
    ]
    base = {(x["gbit"], x["latency"]): x for x in rows if x["method"] == "parallel"}
    for x in rows:
        parallel = base[x["gbit"], x["latency"]]
        longer = 100 * (x["measured_s"] / x["clock_s"] - 1)
        gains = [f"{parallel[key] / x[key]:.2f}" for key in ("measured_s", "clock_s")]
        lines.append(
            f"| {x['gbit']} Gbit/s, {1e3 * x['latency']:g} ms | {x['method']} | {x['steps']} "
            f"| {x['measured_s']:.1f} | {x['clock_s']:.1f} | {longer:.1f} % | {' | '.join(gains)} |"
        )
    return "\n".join(lines) + "\n"


def time_rows(runs: Sequence[Line]) -> list[Line]:
    """Return the rows of the table of seconds on the virtual clock.

    The result is empty unless the runs of all methods with all seeds are stored.
    """
    complete = all(len(by_seed) == len(SEEDS) for by_seed in seconds.finals(runs).values())
    return seconds.compare(runs) if complete else []


# -- the page ----------------------------------------------------------------------------------


class Evaluation(NamedTuple):
    """Results that follow from the stored runs and intervals."""

    verdicts: dict[str, list[Verdict]]
    """Verdicts by the name of their table."""
    pages: dict[str, str]
    """Texts in Markdown that replace tables in RESULTS.md, by the name of the table."""


def evaluate(runs: Sequence[Line]) -> Evaluation:
    """Return the verdicts of all tables, and the text of the tables that are replaced."""
    lines = read(INTERVALS)
    slopes = optimal.slopes_of([run for run in runs if run["study"] == "optimal"])
    gains = time_rows(runs)
    verdicts = {table: published(table, lines) for table in HEADINGS}
    verdicts |= {
        "gap": gap.verdicts(gap.gaps(runs)),
        "equal": gap.verdicts(gap.equals(runs)),
        "remedies": gap.remedy_verdicts(gap.remedies(runs)),
        "optimal": slope_verdicts(slopes),
        "time": gain_verdicts(gains),
        "searched": parity.searched_verdicts(runs),
        "diloco": parity.diloco_verdicts(runs),
        "optimizers": optimizers.verdicts(optimizers.claims(runs)),
    }
    pages = {
        "gap": gap.page(runs),
        "equal": gap.equal_page(runs),
        "remedies": gap.remedy_page(runs),
        "optimal": slope_page(slopes),
        "time": gain_page(gains),
        "links": links_page(read(LINKS)),
        "searched": parity.searched_page(runs),
        "diloco": parity.diloco_page(runs),
        "optimizers": optimizers.page(runs),
    }
    return Evaluation(verdicts, pages)


def rewritten(page: str, evaluation: Evaluation) -> str:
    """Return RESULTS.md with new verdicts in the last columns, and with replaced tables.

    :param page: text of the page
    :param evaluation: the verdicts and tables
    """
    for table, heading in HEADINGS.items():
        begin = page.index(heading)
        end = page.index("\n## ", begin + 1)
        lines = page[begin:end].split("\n")
        verdicts = {verdict.claim: verdict for verdict in evaluation.verdicts[table]}
        for index, line in enumerate(lines):
            cells = line.split(" | ")
            verdict = verdicts.get(cells[0].removeprefix("| "))
            if line.startswith("| ") and verdict is not None:
                before = cells[-1].removesuffix(" |").partition(" (before: ")
                words = verdict.words + "".join(before[1:])
                lines[index] = " | ".join([*cells[:-1], words]) + " |"
        page = page[:begin] + "\n".join(lines) + page[end:]
    for name, text in evaluation.pages.items():
        first, last = (mark.format(name) for mark in MARKS)
        begin = page.index(first) + len(first)
        end = page.index(last)
        page = page[:begin] + text + page[end:]
    return page


def main(arguments: list[str] | None = None) -> int:
    """Print the verdicts, and compare them with RESULTS.md or write them into it.

    :param arguments: words of the command line; None: the words of ``sys.argv``
    :return: exit code, which is 1 if stored runs contradict each other, or if the page differs
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the verdicts to RESULTS.md")
    options = parser.parse_args(arguments)
    runs = read(RUNS)
    page = PAGE.read_text("utf-8")
    evaluation = evaluate(runs)
    problems = faults(runs)
    print("\n".join(problems), end="\n" * bool(problems))
    for table, rows in evaluation.verdicts.items():
        lost = sum(row.holds is not None and row.adjusted > LEVEL for row in rows)
        print(f"{table}: {len(rows)} verdicts, {lost} of them lost by Holm's procedure")
        for row in rows:
            print(f"  {row.words:<42} p {row.p:<8.2g} Holm {row.adjusted:<8.2g} {row.claim}")
    text = rewritten(page, evaluation)
    if options.write:
        PAGE.write_text(text, encoding="utf-8")
    elif text != page:
        problems.append("page")
        print(f"{PAGE} differs from these verdicts: update it with --write")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())

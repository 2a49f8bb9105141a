"""Tables of two studies: searched graphs on CIFAR-10, and DiLoCo compared with parallel SGD.

python jobs/claims/verdicts.py --write    # puts both tables into RESULTS.md
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from designs import (
    ALONE,
    NO_MERGE,
    NO_MOMENTUM,
    SEEDS,
    SIZES,
    STUDIES,
    WITHIN,
    Cell,
    SearchResult,
    search_result,
    vectors,
)
from judging import Verdict, format_interval, holm, judge, of_values
from stored import Line, finals

FIRST = "searched, laplacian"
"""Label of the graph with which all others are compared."""


Accuracies = dict[str, tuple[float, list[float]]]
"""For each graph: its learning rate, and its accuracies in percent, one per seed."""


def accuracies(runs: Sequence[Line], cell: Cell) -> Accuracies:
    """Return the accuracies of those graphs for which the runs of all seeds are stored.

    Graphs of which a run has diverged are left out.
    """
    results = {}
    for method in cell.methods:
        by_seed = finals(runs, cell, method, "best")
        if all(seed in by_seed and by_seed[seed]["figures"] for seed in SEEDS):
            values = [100 * by_seed[seed]["figures"]["accuracy"] for seed in SEEDS]
            results[method] = by_seed[SEEDS[0]]["lr"], values
    return results


def lead_of_first(results: Accuracies) -> dict[str, list[float]]:
    """Return the percentage points by which the graph FIRST is better than each other graph.

    The keys are the other graphs; each value is a list with one number per seed.
    """
    if FIRST not in results:
        return {}
    first = results[FIRST][1]
    return {
        other: [a - b for a, b in zip(first, values, strict=True)]
        for other, (_, values) in results.items()
        if other != FIRST
    }


def searched_verdicts(runs: Sequence[Line]) -> list[Verdict]:
    """Judge whether the graph FIRST is better than each other graph of degree 4."""
    return holm(
        [
            judge(f"{cell.labels['model']}: {FIRST} ahead of {other}", [of_values(values)])
            for cell in STUDIES["searched"]()
            for other, values in lead_of_first(accuracies(runs, cell)).items()
        ]
    )


def searched_page(runs: Sequence[Line]) -> str:
    """Return the table of graphs in Markdown, with the models for which there are runs."""
    searched = [run for run in runs if run["study"] == "searched"]
    verdicts = {verdict.claim: verdict for verdict in searched_verdicts(runs)}
    lines = [
        f"| graph, weights | rate | accuracy, % | {FIRST} ahead by, points | ahead |",
        "|---|---|---|---|---|",
    ]
    for cell in STUDIES["searched"]():
        model = cell.labels["model"]
        results = accuracies(runs, cell)
        if not any(run["cell"] == cell.labels for run in searched):
            continue
        for method in cell.methods:
            name = f"| {model}: {method}"
            if method not in results:
                count = len(finals(runs, cell, method, "best"))
                lines.append(f"{name} |  | {count} of {len(SEEDS)} seeds are there |  |  |")
                continue
            (rate, values), more = results[method], "|  |  |"
            if verdict := verdicts.get(f"{model}: {FIRST} ahead of {method}"):
                by = format_interval(of_values(lead_of_first(results)[method]))
                more = f"| {by} | {verdict.words} |"
            lines.append(f"{name} | {rate:g} | {format_interval(of_values(values))} {more}")
    return "\n".join([*lines, "", f"{len(searched)} runs stored."]) + "\n"


# -- DiLoCo --------------------------------------------------------------------------------------


class Parity(NamedTuple):
    """Row of a method of which the runs of all seeds have ended without diverging.

    ``above`` has the percentages by which its losses exceed the losses of parallel SGD, one per
    seed.
    """

    method: str
    lr: float
    loss: float
    """Mean of the losses over the seeds, in nats."""
    above: list[float]
    vectors: float
    """Ratio of the numbers of averages of this method and of parallel SGD, and of their bytes."""
    since: float
    """Ratio of the numbers of averages in the steps after the warm start only."""


def losses(
    runs: Sequence[Line], model: str, method: str, lr: float, nodes: int = 4
) -> dict[int, float]:
    """Return the reported losses of a method in nats, by seed, without runs that have diverged.

    :param runs: all stored runs
    :param model: label of the model
    :param method: label of the method
    :param lr: learning rate
    :param nodes: number of nodes
    """
    return {
        r["seed"]: r["figures"]["loss"]
        for r in runs
        if (r["study"], r["nodes"], r["cell"], r["method"], r["level"], r["lr"])
        == ("diloco", nodes, {"model": model}, method, "best", lr)
        and r["figures"]
    }


def finalist_and_controls(
    runs: Sequence[Line], model: str, finalist: SearchResult
) -> list[tuple[str, float, dict[int, float], int]]:
    """Return the results of the finalist of the search for DiLoCo and of its controls.

    :param runs: all stored runs
    :param model: label of the model
    :param finalist: result of the search
    :return: for each method: its label, learning rate, losses in nats by seed, and steps between
        two averages (0: without averages)
    """
    tail = f"after {finalist.start} %"
    no_momentum = f"{NO_MOMENTUM} {tail}"
    matching = [r for r in runs if r["study"] == "diloco" and r["cell"]["model"] == model]
    rates = {r["lr"] for r in matching if r["method"] == no_momentum and r["level"] == "best"}
    rows = [
        (finalist.diloco, finalist.lr, 4, finalist.period),
        (f"{NO_MERGE} {tail}", finalist.lr, 4, SIZES[model][0]),
    ]
    rows += [(no_momentum, rate, 4, 32) for rate in rates]
    rows.append((ALONE, finalist.parallel, 1, 0))
    return [(m, lr, losses(runs, model, m, lr, nodes), h) for m, lr, nodes, h in rows]


def parities(runs: Sequence[Line], model: str) -> list[Parity]:
    """Return a row for the finalist of the search and for each control, if all seeds have ended.

    Methods of which a run is missing or has diverged are left out. The result is empty if the
    search is not finished, or if a run of parallel SGD is missing or has diverged.
    """
    finalist = search_result(model, runs)
    if finalist is None:
        return []
    base = losses(runs, model, "parallel", finalist.parallel)
    rows = []
    for method, lr, by_seed, period in finalist_and_controls(runs, model, finalist):
        if all(seed in by_seed and seed in base for seed in SEEDS):
            above = [100 * (by_seed[seed] / base[seed] - 1) for seed in SEEDS]
            sent = vectors(period, finalist.start, SIZES[model][0]) if period else 0.0
            since = 1 / period if period else 0.0
            loss = float(np.mean([by_seed[seed] for seed in SEEDS]))
            rows.append(Parity(method, lr, loss, above, sent, since))
    return rows


def diloco_verdicts(runs: Sequence[Line]) -> list[Verdict]:
    """Judge whether each method's loss is within 1 % of parallel SGD's.

    The losses of controls must not be within 1 %.
    """
    return holm(
        [
            judge(
                f"{model}, {row.method}: within {WITHIN:g} % of parallel",
                [of_values([WITHIN - v for v in row.above])],
            )
            for model in SIZES
            for row in parities(runs, model)
        ]
    )


def diloco_page(runs: Sequence[Line]) -> str:
    """Return two tables for each model, in Markdown: losses and bytes, and the search."""
    verdicts = {verdict.claim: verdict.words for verdict in diloco_verdicts(runs)}
    lines = list[str]()
    for model in SIZES:
        matching = [r for r in runs if r["study"] == "diloco" and r["cell"]["model"] == model]
        lines += [f"{model}, {SIZES[model][0]:,} steps: {len(matching)} runs stored.", ""]
        if finalist := search_result(model, runs):
            lines += [*_reported(runs, model, finalist, verdicts), ""]
        tried: dict[str, list[str]] = {}
        for run in matching:
            if run["level"] == "search":
                loss = f"{run['figures']['loss']:.4f}" if run["figures"] else "diverged"
                tried.setdefault(run["method"], []).append(f"{run['lr']:g}: {loss}")
        if tried:
            lines += ["| search, one seed | loss at each rate |", "|---|---|"]
            lines += [
                f"| {method} | {', '.join(losses_at)} |" for method, losses_at in tried.items()
            ]
            lines.append("")
    return "\n".join(lines[:-1]) + "\n"


def _reported(
    runs: Sequence[Line], model: str, finalist: SearchResult, verdicts: dict[str, str]
) -> list[str]:
    """Return the table of losses and bytes of one model, as lines of Markdown.

    :param runs: all stored runs
    :param model: label of the model
    :param finalist: result of the search
    :param verdicts: verdict on each claim, in the form of the page
    """
    base = losses(runs, model, "parallel", finalist.parallel)
    loss = f"{len(base)} of {len(SEEDS)} seeds"
    if len(base) == len(SEEDS):
        loss = f"{np.mean([*base.values()]):.4f}"
    lines = [
        "| method | rate | loss | above parallel, % | bytes, since the start | within 1 % |",
        "|---|---|---|---|---|---|",
        f"| parallel | {finalist.parallel:g} | {loss} |  | 1, 1 |  |",
    ]
    complete = {row.method: row for row in parities(runs, model)}
    for method, lr, by_seed, _ in finalist_and_controls(runs, model, finalist):
        if method not in complete:
            lines.append(f"| {method} | {lr:g} | {len(by_seed)} of {len(SEEDS)} seeds |  |  |  |")
            continue
        row = complete[method]
        claim = f"{model}, {method}: within {WITHIN:g} % of parallel"
        lines.append(
            f"| {method} | {lr:g} | {row.loss:.4f} | {format_interval(of_values(row.above))} | "
            f"{row.vectors:.3f}, {row.since:.3f} | {verdicts[claim]} |"
        )
    return lines

"""Tables on AdamW and Muon with several exchanges, QSR, γ, outer steps, and weights of nodes.

python jobs/claims/verdicts.py --write    # puts the tables into RESULTS.md
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from designs import (
    BY_STEPS,
    EQUAL_WEIGHTS,
    EXCHANGES,
    FEW_SEEDS,
    GAP_RATE,
    GIVEN,
    LARGER_GPT,
    MOMENTS,
    OUTER_PERIODS,
    SEEDS,
    SMALL_GPT,
    STUDIES,
    WITHIN,
    Cell,
    best_rate,
    few_vectors,
    method_label,
    reported_runs,
    search_runs,
    searched_rates,
)
from judging import PAIRS, Verdict, format_interval, holm, judge, of_values
from stored import Line, finals

from mpigossip.studies.search import FURTHER

NAMES = (
    *("optimizers", "moments", "qsr", "growing", "outer", "finalists", "more-nodes", "largest"),
    *("weights", "first-weights"),
)
"""Studies of these tables, in the order in which they are run."""
SENT = {exchange: vectors for exchange, (vectors, _) in (EXCHANGES | MOMENTS).items()}
"""Vectors that a node sends per step on 8 nodes, by the name of the exchange."""
CLOSE = 2.0
"""Largest percentage above all-reduce at which a method of few vectors counts as close."""
HALF_A_POINT = 0.5
"""Largest number of percentage points by which γ that changes may be behind parallel SGD."""

REFERENCES = {"moments": "optimizers", "growing": "optimizers"}
"""Study that contains the runs of all-reduce, by the study whose methods are compared with it.

A study that is not listed contains them itself."""

BySeed = dict[int, float]
"""One value for each seed."""


class Claim(NamedTuple):
    """Claim with the values that decide it, and with the methods whose runs it needs.

    Values are in percent of a loss, or in percentage points of an accuracy.
    """

    text: str
    values: BySeed
    needs: list[tuple[Cell, str]]
    alike: float | None = None
    """Largest absolute value that confirms the claim; None: values above 0 confirm it."""
    family: str = ""
    """Name of the claims that Holm's procedure judges together; "": the first studies' claims."""


def cell_of(study: str, nodes: int, model: str, method: str) -> Cell:
    """Return the cell of a study that contains a method.

    :param study: name of the study
    :param nodes: number of nodes
    :param model: label of the model
    :param method: label of the method
    """
    return next(
        cell
        for cell in STUDIES[study]()
        if (cell.nodes, cell.labels["model"]) == (nodes, model) and method in cell.methods
    )


def results(runs: Sequence[Line], cell: Cell, method: str) -> BySeed:
    """Return the results of a method's reported runs by seed, without runs that have diverged.

    A result is the metric of the cell: a loss in nats, or an accuracy from 0 to 1.

    :param runs: all stored runs
    :param cell: cell that contains the method
    :param method: label of the method
    """
    if GIVEN in cell.levels:
        by_seed = {r["seed"]: r for r in stored_of(runs, cell, method)}
    else:
        by_seed = finals(runs, cell, method, "best")
    return {s: r["figures"][cell.metric] for s, r in sorted(by_seed.items()) if r["figures"]}


def gap(runs: Sequence[Line], cell: Cell, method: str) -> BySeed:
    """Return by seed the percentage by which a loss exceeds the loss of all-reduce.

    All-reduce has the same optimizer, model and number of nodes.

    :param runs: all stored runs
    :param cell: cell that contains the method
    :param method: label of the method
    """
    optimizer = "AdamW" if cell.study == "growing" else method.partition(", ")[0]
    reference = method_label(optimizer, "all-reduce")
    study = REFERENCES.get(cell.study, cell.study)
    base = cell_of(study, cell.nodes, cell.labels["model"], reference)
    return excess(results(runs, cell, method), results(runs, base, reference))


def excess(values: BySeed, base: BySeed) -> BySeed:
    """Return by seed the percentage by which a value exceeds the value of ``base``."""
    return {s: 100 * (values[s] / base[s] - 1) for s in values if s in base}


def combined(a: float, x: BySeed, b: float, y: BySeed) -> BySeed:
    """Return a · x + b · y for each seed that is in both ``x`` and ``y``."""
    return {s: a * x[s] + b * y[s] for s in x if s in y}


def exchange_claims(runs: Sequence[Line], study: str, model: str) -> list[Claim]:
    """Return the claims on AdamW and Muon with one model.

    :param runs: all stored runs
    :param study: study of the model, "optimizers" or "finalists"
    :param model: label of the model
    """

    def needs(*methods: str) -> list[tuple[Cell, str]]:
        return [(cell_of(study, 8, model, method), method) for method in methods]

    def behind(optimizer: str, exchange: str) -> BySeed:
        return gap(runs, *needs(method_label(optimizer, exchange))[0])

    few = few_vectors(runs)
    method = few and method_label("Muon", few)
    all_reduce = {name: method_label(name, "all-reduce") for name in ("AdamW", "Muon")}
    one_peer = {name: method_label(name, "one-peer") for name in ("AdamW", "Muon")}
    exact = {name: method_label(name, "exact averages") for name in ("AdamW", "Muon")}
    ahead = [results(runs, *needs(m)[0]) for m in (all_reduce["AdamW"], one_peer["Muon"])]
    claims = [
        Claim(
            f"{model}, Muon: exact averages within {WITHIN:g} % of all-reduce",
            behind("Muon", "exact averages"),
            needs(all_reduce["Muon"], exact["Muon"]),
            WITHIN,
        ),
        Claim(
            f"{model}: one-peer's gap with Muon at most two thirds of that with AdamW",
            combined(2 / 3, behind("AdamW", "one-peer"), -1, behind("Muon", "one-peer")),
            needs(*all_reduce.values(), *one_peer.values()),
        ),
        Claim(
            f"{model}: Muon with one-peer ahead of AdamW with all-reduce",
            excess(*ahead),
            needs(all_reduce["AdamW"], one_peer["Muon"]),
        ),
        Claim(
            f"{model}, Muon: {few or 'a method of few vectors'} within {CLOSE:g} % of all-reduce",
            {s: CLOSE - v for s, v in behind("Muon", few).items()} if few else {},
            needs(all_reduce["Muon"], *([method] if method else [])),
        ),
    ]
    if study == "optimizers":
        exchanges = {
            "exact averages": "exact averages close",
            "one-peer, v every 16": "averaging v every 16 steps closes",
            "one-peer, m and v every step": "averaging m and v every step closes",
        }
        base = needs(all_reduce["AdamW"], one_peer["AdamW"])
        for exchange, words in exchanges.items():
            method = method_label("AdamW", exchange)
            own_study = "moments" if exchange in MOMENTS else study
            own = cell_of(own_study, 8, model, method), method
            half = combined(1 / 2, behind("AdamW", "one-peer"), -1, gap(runs, *own))
            title = f"{model}, AdamW: {words} at least half of one-peer's gap"
            claims.append(Claim(title, half, [*base, own]))
    return claims


def other_claims(runs: Sequence[Line]) -> list[Claim]:
    """Return the claims on QSR, on the weight of mixing, on outer steps, and on weights of nodes.

    A positive value speaks for the first method.
    """
    claims = []
    for cell in STUDIES["qsr"]():
        qsr, constant = (results(runs, cell, method) for method in ("QSR", "constant"))
        title = f"{cell.labels['model']}: QSR ahead of equally many exchanges at equal distances"
        if cell.metric == "loss":
            ahead = excess(constant, qsr)
        else:
            ahead = combined(100, qsr, -100, constant)
        claims.append(Claim(title, ahead, [(cell, method) for method in cell.methods]))
    for cell in STUDIES["growing"]():
        for method in ("growing γ", "falling γ"):
            claims.append(mixing_claim(runs, cell, method))
    for period in OUTER_PERIODS:
        method = f"H = {period}"
        both = [(cell_of("outer", nodes, SMALL_GPT, method), method) for nodes in (8, 1)]
        diloco, snoo = (results(runs, *one) for one in both)
        title = f"{SMALL_GPT}, {method}: DiLoCo on 8 nodes ahead of outer steps on one (SNOO)"
        claims.append(Claim(title, excess(snoo, diloco), both))
    for cell in STUDIES["weights"]():
        equal, by_steps = (results(runs, cell, method) for method in cell.methods)
        partners = cell.labels["average"]
        title = f"{SMALL_GPT}, averages with {partners}: {BY_STEPS} ahead of {EQUAL_WEIGHTS}"
        needs = [(cell, method) for method in cell.methods]
        claims.append(Claim(title, excess(equal, by_steps), needs, family="weights"))
    (first,) = STUDIES["first-weights"]()
    (method,) = first.methods
    title = f"{SMALL_GPT}, first formula with {first.labels['average']}: {BY_STEPS} ahead"
    ahead = excess(equal, results(runs, first, method))
    claims.append(Claim(title, ahead, [(first, method), needs[0]], family="weights"))
    return claims


def mixing_claim(runs: Sequence[Line], cell: Cell, method: str) -> Claim:
    """Return the claim on a weight of mixing γ that changes.

    LeNet is compared with parallel SGD, and the GPT with γ = 1.

    :param runs: all stored runs
    :param cell: cell of the study "growing"
    :param method: label of the method
    """
    model = f"{cell.labels['model']}, n = {cell.nodes}"
    changing = results(runs, cell, method)
    if cell.metric == "loss":
        constant = "constant γ"
        ahead = excess(results(runs, cell, constant), changing)
        needs = [(cell, method), (cell, constant)]
        return Claim(f"{model}, AdamW: {method} ahead of γ = 1", ahead, needs)
    parallel = {
        seed: run["figures"]["accuracy"]
        for seed, run in reported_runs(runs, cell.nodes, cell.labels, "parallel", GAP_RATE).items()
    }
    ahead = combined(100, changing, -100, parallel)
    near = {seed: HALF_A_POINT + value for seed, value in ahead.items()}
    title = f"{model}: {method} at most {HALF_A_POINT:g} points behind parallel"
    return Claim(title, near, [(cell, method)])


def claims(runs: Sequence[Line]) -> list[Claim]:
    """Return all claims of the studies in `NAMES`, even if their runs are missing."""
    small = exchange_claims(runs, "optimizers", SMALL_GPT)
    return [*small, *other_claims(runs), *exchange_claims(runs, "finalists", LARGER_GPT)]


def verdicts(rows: Sequence[Claim]) -> list[Verdict]:
    """Judge the claims of each family together by Holm's procedure.

    Claims without runs count, too, because they were planned before any run.
    """
    judged = [judge(c.text, [of_values([*c.values.values()])], alike=c.alike) for c in rows]
    by_text = dict[str, Verdict]()
    for family in dict.fromkeys(claim.family for claim in rows):
        members = [v for v, c in zip(judged, rows, strict=True) if c.family == family]
        by_text |= {verdict.claim: verdict for verdict in holm(members)}
    return [by_text[claim.text] for claim in rows]


# -- the page --------------------------------------------------------------------------------------


def stored_of(runs: Sequence[Line], cell: Cell, method: str) -> list[Line]:
    """Return all stored runs of a method of a cell, from its search and with reported seeds."""
    names = "study", "nodes", "cell", "method"
    key = cell.study, cell.nodes, cell.labels, method
    return [run for run in runs if tuple(run[name] for name in names) == key]


def seeds_of(cell: Cell) -> tuple[int, ...]:
    """Return the seeds with which each method of a cell is run, without the seed of the search."""
    return FEW_SEEDS if cell.study in ("more-nodes", "largest") else SEEDS


def begun(runs: Sequence[Line], claim: Claim) -> str:
    """Return a text on an unfinished claim: the number of its stored runs, and of all its runs."""
    wanted = sum(
        len(seeds_of(cell)) + (0 if GIVEN in cell.levels else len(searched_rates(cell, m, runs)))
        for cell, m in claim.needs
    )
    count = sum(len(stored_of(runs, *need)) for need in claim.needs)
    return f"begun: {count} of {wanted} runs" if count else f"not run: {wanted} runs"


def claim_lines(runs: Sequence[Line]) -> list[str]:
    """Return the table of claims in Markdown."""
    lines = ["| claim | holds if | difference | verdict |", "|---|---|---|---|"]
    rows = claims(runs)
    for claim, verdict in zip(rows, verdicts(rows), strict=True):
        bar = "above 0" if claim.alike is None else f"within ± {claim.alike:g}"
        values = [*claim.values.values()]
        shown, words = "", begun(runs, claim)
        if len(values) >= PAIRS:
            shown, words = format_interval(of_values(values)), verdict.words
        lines.append(f"| {claim.text} | {bar} | {shown} | {words} |")
    return lines


def searched_text(runs: Sequence[Line], cell: Cell, method: str) -> str:
    """Return the results of a method's search as text: a loss or accuracy at each learning rate.

    :param runs: all stored runs
    :param cell: cell that contains the method
    :param method: label of the method
    """
    trials = sorted(search_runs(cell, method, runs).items())
    values = [
        f"{lr:g}: {line['figures'][cell.metric]:.4f}" if line["figures"] else f"{lr:g}: diverged"
        for lr, line in trials
    ]
    rates = [lr for lr, _ in trials]
    text = ", ".join(values)
    if len(rates) == len(cell.rates) + FURTHER:
        best = best_rate([line for _, line in trials], cell.metric)
        text += " (the best is at an end)" * (best in (rates[0], rates[-1]))
    return text


def method_lines(runs: Sequence[Line]) -> list[str]:
    """Return the table of all methods with stored runs, in Markdown.

    Methods with fewer seeds than a verdict needs have the value of each seed in the last column.
    """
    lines = [
        "| method | vectors per step | search, one seed | seeds | loss or accuracy "
        "| above all-reduce, % |",
        "|---|---|---|---|---|---|",
    ]
    for cell in [cell for name in NAMES for cell in STUDIES[name]()]:
        for method in cell.methods:
            if not stored_of(runs, cell, method):
                continue
            by_seed = results(runs, cell, method)
            exchange = method.partition(", ")[2]
            on_eight = cell.nodes == 8 and exchange in SENT
            sent = f"{SENT[exchange]:.3g}" if on_eight else ""
            mean = above = ""
            if by_seed:
                mean = f"{np.mean([*by_seed.values()]):.4f}"
            of_text = cell.study == "growing" and cell.metric == "loss"
            if of_text or (exchange in SENT and exchange != "all-reduce"):
                values = [*gap(runs, cell, method).values()]
                if len(values) == len(SEEDS):
                    above = format_interval(of_values(values))
                elif len(values) == len(seeds_of(cell)):
                    above = ", ".join(f"{value:.2f}" for value in values)
            name = f"{cell.labels['model']}, n = {cell.nodes}, {'AdamW, ' * of_text}{method}"
            name += " (first formula)" * (cell.study == "first-weights")
            search = searched_text(runs, cell, method)
            count = f"{len(by_seed)} of {len(seeds_of(cell))}"
            lines.append(f"| {name} | {sent} | {search} | {count} | {mean} | {above} |")
    return lines


def page(runs: Sequence[Line]) -> str:
    """Return the tables of claims and methods, in Markdown."""
    count = sum(run["study"] in NAMES for run in runs)
    lines = [*claim_lines(runs), ""]
    if count:
        lines += [*method_lines(runs), ""]
    return "\n".join([*lines, f"Runs stored: {count}."]) + "\n"

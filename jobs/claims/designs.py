"""Designs of those claims that need training: cells in the order of their runs.

A cell consists of methods that are compared under equal conditions, with settings and seeds. The
order was written before any of the runs. If the time does not suffice for all cells, the last ones
are not run. A cell counts only if all of its seeds were run.

For each method of a cell, the best learning rate is searched by the rules of `mpigossip.study`,
with the seed `SEARCH`; these runs are never reported. Each method is then run at its best rate and
at fractions of it, with the seeds `SEEDS`, which are equal for all methods. Some cells have another
order (`Cell.order`). `run_queue.py` makes the runs, and `verdicts.py` judges them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from itertools import product
from math import inf, nan
from typing import Any, NamedTuple

from mpigossip.studies import search
from mpigossip.studies.search import SEED as SEARCH
from mpigossip.studies.search import Trial, further_rates

SEEDS = (1, 2, 3, 4, 5)
JOB = "jobs/claims/jobs/lenet.toml"
CIFAR = ("data.source={data}", "schedule.name=cosine", "log.consensus_every=20")


Turn = tuple[str, str, float, int]
"""Run of a cell: labels of its method and level, its learning rate and its seed."""


class Cell(NamedTuple):
    """Methods that are compared under equal conditions: nodes, settings and learning rates."""

    study: str
    nodes: int
    labels: dict[str, str]
    """Labels of the cell, except for method and level."""
    methods: dict[str, str]
    """Settings of each method, by its label."""
    settings: tuple[str, ...]
    rates: tuple[float, ...]
    """Learning rates that are tried with the seed of the search."""
    levels: dict[str, float]
    """Fractions of the best learning rate, by label."""
    order: Callable[[Sequence[dict[str, Any]]], Iterator[Turn]] | None = None
    """Function that maps the finished runs of all cells to the runs of this cell that are known.

    It is needed if the results of some runs decide which runs follow. None: the runs are the search
    over ``rates``, and then each level with each of `SEEDS`.
    """
    metric: str = "accuracy"
    """Metric by which learning rates are compared: "accuracy" or "loss"."""


def best_rate(tried: Sequence[dict[str, Any]], metric: str = "accuracy") -> float:
    """Return the best learning rate of a method by the rule of `mpigossip.study`.

    :param tried: runs of the method with different learning rates, in the form of `stored.Line`
    :param metric: metric by which they are compared: the largest "accuracy" is the best one, or the
        smallest "loss"
    """
    trials = [Trial(line["lr"], line["figures"].get(metric, nan), "late" in line) for line in tried]
    return search.best_rate(trials, larger=metric == "accuracy")


def search_runs(
    cell: Cell, method: str, runs: Sequence[dict[str, Any]]
) -> dict[float, dict[str, Any]]:
    """Return a method's runs with the seed `SEARCH`, by their learning rate.

    :param cell: cell that contains the method
    :param method: label of the method
    :param runs: all finished runs, in the form of `stored.Line`
    """
    key = cell.study, cell.nodes, cell.labels, method, "search"
    names = "study", "nodes", "cell", "method", "level"
    return {line["lr"]: line for line in runs if tuple(line[k] for k in names) == key}


def searched_rates(cell: Cell, method: str, runs: Sequence[dict[str, Any]]) -> list[float]:
    """Return the learning rates that the search of a method tries, as far as they are known.

    These are the rates of the cell. If all of them have been run and the best one is the smallest
    or the largest, further rates beyond it are added.

    :param cell: cell that contains the method
    :param method: label of the method
    :param runs: all finished runs, in the form of `stored.Line`
    """
    rates = list(cell.rates)
    results = search_runs(cell, method, runs)
    for _ in range(search.FURTHER):
        if not all(rate in results for rate in rates):
            break
        best = best_rate([results[rate] for rate in rates], cell.metric)
        rates += further_rates(best, rates)
    return rates


LEVELS = {"best": 1.0, "best / 3": 1 / 3, "best / 10": 0.1}
PERCEPTRON = ("model.name=mlp", "model.hidden=[32]", "run.epochs=3")
LENET = ("model.name=lenet", "run.epochs=5", "node.channels_last=always")
PAIR = {
    "parallel": "algorithm.name=parallel graph.name=complete",
    "one-peer": "algorithm.name=dmsgd graph.name=one-peer-exponential",
}
STEPS = 585
"""Number of steps of 3 epochs of the perceptron, with 16 nodes and batches of 16 samples."""
REMEDIES = {
    "exact every 16": f"{PAIR['one-peer']} cadence.name=gossip-pga cadence.period=16",
    "exact first tenth": f"{PAIR['one-peer']} cadence.name=exact-parts cadence.first=0.1",
    "exact last tenth": f"{PAIR['one-peer']} cadence.name=exact-parts cadence.last=0.1",
    "static first third": "algorithm.name=dmsgd graph.name=parts:static_first "
    f"graph.period={STEPS} graph.first={STEPS // 3}",
    "EMA": f"algorithm.name=parts:ema_dmsgd algorithm.total={STEPS} "
    "graph.name=one-peer-exponential",
}
"""Remedies for the gap in accuracy between the one-peer graph and parallel SGD, as settings of a
job. Algorithms and graphs that the package lacks are in `parts.py`."""
CONTROLS = {
    "no exchange": f"{PAIR['one-peer']} cadence.name=never",
    "parallel, EMA": f"algorithm.name=parts:ema_parallel algorithm.total={STEPS} "
    "local.name=momentum graph.name=complete cadence.name=global",
}
"""Controls of the remedies. Training without exchanges must not help. If an EMA (exponential moving
average) helps parallel SGD as much as the one-peer graph, it is no remedy for the gap."""
ORDER = sorted(REMEDIES | CONTROLS, key=["no exchange", "exact every 16"].count, reverse=True)
"""Order in which remedies and controls are run: an important control and remedy come first."""
REMEDIED = "remedies"
AT_PARALLELS = "remedies at parallel's rate"
EQUAL = "equal rates"
"""Labels "of" of further cells of the study "gap": remedies at their own best rates, remedies at
the best rate of parallel SGD, and both methods of `PAIR` at equal rates."""
GRID = (0.0125, 0.025, 0.05, 0.1, 0.2)


def reported_runs(
    runs: Sequence[dict[str, Any]], nodes: int, labels: dict[str, str], method: str, lr: float
) -> dict[int, dict[str, Any]]:
    """Return the runs of a method at a learning rate, by seed, from all cells of the study "gap".

    Runs of a search are left out.

    :param runs: all finished runs, in the form of `stored.Line`
    :param nodes: number of nodes
    :param labels: labels of a cell, of which only "model" and "batch" count
    :param method: label of the method
    :param lr: the learning rate
    """
    same = labels["model"], labels["batch"]
    return {
        r["seed"]: r
        for r in runs
        if (r["study"], r["nodes"], r["method"], r["lr"]) == ("gap", nodes, method, lr)
        and (r["cell"]["model"], r["cell"]["batch"]) == same
        and r["level"] != "search"
    }


def pair_rates(
    runs: Sequence[dict[str, Any]], nodes: int, labels: dict[str, str]
) -> dict[str, float]:
    """Return the best learning rate of parallel SGD and of the one-peer graph, by method.

    It is the best of those rates that have been run. A method without any run is missing.

    :param runs: all finished runs, in the form of `stored.Line`
    :param nodes: number of nodes
    :param labels: labels of a cell, of which only "model" and "batch" count
    """
    own = {"model": labels["model"], "batch": labels["batch"]}
    tried: dict[str, list[dict[str, Any]]] = {}
    for r in runs:
        if (r["study"], r["nodes"], r["cell"], r["level"]) == ("gap", nodes, own, "search"):
            tried.setdefault(r["method"], []).append(r)
    return {method: best_rate(results) for method, results in tried.items()}


def equal_rate_runs(
    nodes: int, labels: dict[str, str], most: int, runs: Sequence[dict[str, Any]]
) -> Iterator[Turn]:
    """Yield the runs that compare parallel SGD and the one-peer graph at equal learning rates.

    Candidates are the rates of `GRID` up to the larger of the two methods' best rates. Runs that
    other cells contain are left out. Nothing is yielded before both best rates are known.

    :param nodes: number of nodes
    :param labels: labels of the cell
    :param most: number of rates to compare, from the largest candidate downwards
    :param runs: all finished runs, in the form of `stored.Line`
    """
    best = pair_rates(runs, nodes, labels)
    if len(best) < len(PAIR):
        return
    rates = sorted((lr for lr in GRID if lr <= max(best.values())), reverse=True)
    for lr in rates[:most]:
        for seed, method in product(SEEDS, PAIR):
            there = reported_runs(runs, nodes, labels, method, lr).get(seed)
            if there is None or there["cell"].get("of") == EQUAL:
                yield method, f"lr {lr:g}", lr, seed


def remedies_at_parallels_rate(
    labels: dict[str, str], runs: Sequence[dict[str, Any]]
) -> Iterator[Turn]:
    """Yield the runs of each remedy and control at the best learning rate of parallel SGD.

    Nothing is yielded before that rate and the best rate of the one-peer graph are known.
    """
    best = pair_rates(runs, 16, labels)
    if len(best) == len(PAIR):
        for method, seed in product(ORDER, SEEDS):
            yield method, "parallel's", best["parallel"], seed


def remedy_runs(cell: Cell, runs: Sequence[dict[str, Any]]) -> Iterator[Turn]:
    """Yield the runs of the search of each remedy and control, and its runs at its own best rate.

    Runs at the best rate are left out if another cell contains them.
    """
    for method in cell.methods:
        rates = searched_rates(cell, method, runs)
        results = search_runs(cell, method, runs)
        yield from ((method, "search", lr, SEARCH) for lr in rates)
        if not all(lr in results for lr in rates):
            continue
        lr = best_rate([*results.values()])
        for seed in SEEDS:
            there = reported_runs(runs, cell.nodes, cell.labels, method, lr).get(seed)
            if there is None or there["cell"]["of"] == REMEDIED:
                yield method, "best", lr, seed


def gap() -> Iterator[Cell]:
    """Yield the cells on the gap in accuracy between the one-peer graph and parallel SGD.

    They include the cells that test remedies for this gap.
    """

    def pair(model: str, n: int, batch: int) -> Cell:
        labels = {"model": model, "batch": str(batch)}
        settings = (*CIFAR, *sizes[model], f"data.batch={batch}")
        return Cell("gap", n, labels, PAIR, settings, GRID, LEVELS)

    def equally(n: int, batch: int, most: int = len(GRID), model: str = "perceptron") -> Cell:
        cell = pair(model, n, batch)
        labels = {**cell.labels, "of": EQUAL}
        return cell._replace(
            labels=labels, levels={}, order=partial(equal_rate_runs, n, labels, most)
        )

    sizes = {"perceptron": PERCEPTRON, "lenet": LENET}
    yield from (pair("perceptron", *size) for size in ((4, 16), (16, 16), (4, 64), (16, 64)))
    yield equally(16, 16, 2)
    base = pair("perceptron", 16, 16)
    methods = REMEDIES | CONTROLS
    labels = {**base.labels, "of": AT_PARALLELS}
    yield base._replace(
        labels=labels, methods=methods, levels={}, order=partial(remedies_at_parallels_rate, labels)
    )
    own = base._replace(
        labels={**base.labels, "of": REMEDIED}, methods=methods, rates=(0.025, 0.05, 0.1)
    )
    yield own._replace(levels={"best": 1.0}, order=partial(remedy_runs, own))
    yield equally(16, 16)
    yield pair("perceptron", 4, 256)
    yield from (equally(*size) for size in ((4, 64), (16, 64)))
    yield from (pair("lenet", *size) for size in ((4, 16), (16, 16)))
    yield equally(16, 16, 2, "lenet")
    yield from (pair("lenet", *size) for size in ((4, 64), (16, 64), (4, 256)))
    yield from (equally(*size, 2, "lenet") for size in ((16, 64), (4, 64), (4, 256)))


def searched() -> Iterator[Cell]:
    """Yield the cells that compare searched graphs and Laplacian weights with other graphs.

    The data are CIFAR-10, and each graph is used at its own best learning rate. All graphs have
    degree 4. The hypercube of 16 nodes is also the torus, and both weighting rules give all its
    weights the value 1/5, so it occurs only once. The perceptron comes first, because its epoch
    takes a third of the time of LeNet's epoch.
    """
    graphs = {
        "lattice, metropolis": "ring-lattice graph.weights=metropolis-hastings",
        "lattice, laplacian": "ring-lattice graph.weights=laplacian",
        "searched, metropolis": "file:{searched} graph.weights=metropolis-hastings",
        "searched, laplacian": "file:{searched} graph.weights=laplacian",
        "hypercube": "hypercube",
    }
    methods = {name: f"algorithm.name=dsgd graph.name={graph}" for name, graph in graphs.items()}
    data = ("data.batch=16", "data.partition=dirichlet", "data.dirichlet_alpha=0.1")
    rates = (0.05, 0.1, 0.2)
    for model, size in (("perceptron", PERCEPTRON), ("lenet", LENET)):
        own = (*CIFAR, *size, "run.epochs=1", *data)
        yield Cell("searched", 16, {"model": model}, methods, own, rates, {"best": 1.0})


def steps_to_goal() -> Iterator[Cell]:
    """Yield the cell of the runs whose steps are counted up to the accuracy of parallel SGD.

    They train an MLP on digits with 16 nodes for 220 steps; DiLoCo begins after a fifth of them.
    `seconds.py` converts the steps into seconds of the virtual clock.
    """
    momentum = "local.name=momentum graph.name"
    warm = "algorithm.warm=44 cadence.name=warm-periodic cadence.warm=44 cadence.period=16"
    methods = {
        "parallel": f"algorithm.name=parallel {momentum}=complete",
        "dsgd ahead": f"algorithm.name=dsgd algorithm.style=awc {momentum}=one-peer-exponential",
        "dmsgd": "algorithm.name=dmsgd graph.name=one-peer-exponential",
        "ADPSGD": f"algorithm.name=adpsgd {momentum}=complete",
        "DiLoCo warm": f"algorithm.name=parts:warm_diloco {warm} {momentum}=complete",
    }
    own = (
        "data.source=digits",
        "data.batch=8",
        "data.partition=shuffled",
        "model.name=mlp",
        "node.vmap=true",
        "run.epochs=20",
        "run.evaluate_steps=5",
        "schedule.name=cosine",
        "log.consensus_every=20",
    )
    rates = (0.05, 0.1, 0.2, 0.4)
    yield Cell("time", 16, {"model": "mlp on digits"}, methods, own, rates, {"best": 1.0})


TEXT = (
    "task.name=language-model",
    "data.source={text}",
    "data.context=64",
    "data.batch=8",
    "model.name=gpt",
    "model.heads=4",
    "run.epochs=1",
    "run.evaluate_every=0",
    "algorithm.clip_norm=1.0",
    "algorithm.decay_all=false",
    "local.name=adamw",
    "local.decoupled_decay=0.01",
    "graph.name=complete",
    "schedule.name=cosine",
    "schedule.final_lr=0.0001",
)
"""Settings of a language model of characters; `inputs.py` makes the file that replaces {text}."""
SIZES = {
    "gpt of 0.07 M": (640, ("model.layers=2", "model.width=48")),
    "gpt of 0.36 M": (1920, ("model.layers=3", "model.width=96")),
}
"""Number of steps and settings of each model.

A tenth of the steps is a multiple of each period H that is tried.
"""
STARTS = (10, 20, 30)
OUTER = (0.4, 0.7)
"""STARTS: percentages of the steps after which DiLoCo begins. OUTER: its outer learning rates."""
WAYS = ((32, 20), (32, 10), (32, 30), (8, 20))
"""Variants of DiLoCo that the search compares, as pairs: steps between two averages, and the
percentage of the steps after which DiLoCo begins."""
SHORT = {"gpt of 0.07 M"}
"""Models for which only the outer learning rate is searched, with the first variant in WAYS and the
best learning rate of parallel SGD."""
RATES = (0.003, 0.006, 0.012)
WITHIN = 1.0
"""Largest difference from the loss of parallel SGD, in percent, that counts as equal."""
NO_MERGE = "H = ∞"
NO_MOMENTUM = "no outer momentum, H = 32"
ALONE = "one node alone"
"""Labels of the controls of DiLoCo: one average at the end of the training; averages without outer
momentum at every 32nd step; and a single node without averages."""


def label(period: int, start: int, outer: float) -> str:
    """Return the label of a variant of DiLoCo.

    :param period: steps between two averages
    :param start: percentage of the steps after which DiLoCo begins
    :param outer: outer learning rate
    """
    return f"H = {period} after {start} %, outer {outer}"


def methods_of(steps: int) -> dict[str, str]:
    """Return the settings of parallel SGD, of all variants of DiLoCo, and of controls, by label.

    :param steps: number of steps of the training
    """

    def after(start: int, period: int, outer: float, more: str) -> str:
        warm = steps * start // 100
        return (
            f"algorithm.name=parts:after_parallel algorithm.warm={warm} "
            f"algorithm.outer_lr={outer} {more} "
            f"cadence.name=warm-periodic cadence.warm={warm} cadence.period={period}"
        )

    results = {"parallel": "algorithm.name=parallel"}
    for (h, start), outer in product(WAYS, OUTER):
        results[label(h, start, outer)] = after(start, h, outer, "algorithm.drop=false")
    for (name, h), start in product(((NO_MERGE, steps), (NO_MOMENTUM, 32)), STARTS):
        results[f"{name} after {start} %"] = after(start, h, 1.0, "algorithm.outer_beta=0.0")
    return results


def vectors(period: int, start: int, steps: int) -> float:
    """Return the ratio of the numbers of averages in a run of DiLoCo and in one of parallel SGD.

    The bytes that both send have the same ratio.

    :param period: steps between two averages of DiLoCo
    :param start: percentage of the steps after which DiLoCo begins
    :param steps: number of steps of the training
    """
    warm = steps * start // 100
    return (warm + steps // period - warm // period) / steps


class SearchResult(NamedTuple):
    """Result of the search for the best DiLoCo with one model."""

    parallel: float
    """Best learning rate of parallel SGD."""
    diloco: str
    """Label of the finalist, the chosen variant of DiLoCo."""
    lr: float
    """Learning rate of the finalist."""
    period: int
    """Steps between two averages of the finalist."""
    start: int
    """Percentage of the steps after which the finalist changes from parallel SGD to DiLoCo."""


Search = Generator[Turn, None, tuple[str, float] | None]
"""Generator that yields runs, and returns the best (method, learning rate), None if not known."""


def losses(model: str, runs: Sequence[dict[str, Any]]) -> dict[tuple[str, float], float]:
    """Return the losses of the search for DiLoCo, in nats, by (method, learning rate).

    The loss of a run that has diverged is inf.

    :param model: label of the model
    :param runs: all finished runs, in the form of `stored.Line`
    """
    return {
        (r["method"], r["lr"]): inf if "late" in r else r["figures"].get("loss", inf)
        for r in runs
        if (r["study"], r["nodes"], r["level"]) == ("diloco", 4, "search")
        and r["cell"]["model"] == model
    }


def best_of(loss: dict[tuple[str, float], float], *tried: tuple[str, float]) -> Search:
    """Yield the runs of all candidates; return the candidate with the lowest loss.

    :param loss: losses of the finished runs, by (method, learning rate)
    :param tried: candidates as pairs (method, learning rate)
    :return: the best candidate; None if the run of a candidate is missing
    """
    for method, lr in tried:
        yield method, "search", lr, SEARCH
    return min(tried, key=loss.__getitem__) if all(one in loss for one in tried) else None


def diloco_runs(
    model: str, runs: Sequence[dict[str, Any]]
) -> Generator[Turn, None, SearchResult | None]:
    """Yield the runs of the search for the best DiLoCo, and then the runs that are reported.

    The search determines one setting after the other: the learning rates, the outer learning rate,
    the step at which DiLoCo replaces parallel SGD, and the period H. The finalist is the variant
    that sends the fewest bytes among those whose loss is within 1 % of parallel SGD's; if there is
    none, the variant with the lowest loss. Parallel SGD and the finalist are run with five seeds
    each.

    :param model: label of the model
    :param runs: all finished runs, in the form of `stored.Line`
    :return: result of the search; None if runs of the search are missing
    """
    loss = losses(model, runs)
    base = yield from best_of(loss, *(("parallel", lr) for lr in RATES))
    # If the best rate is at an end of the grid, search beyond it: parallel SGD must not look worse
    # than it is.
    if base and (further := further_rates(base[1], RATES)):
        base = yield from best_of(loss, base, *(("parallel", lr) for lr in further))
    if not base:
        return None
    first = yield from best_of(loss, *((label(32, 20, outer), base[1]) for outer in OUTER))
    if not first:
        return None
    others = [lr for lr in RATES if lr != base[1] and model not in SHORT]
    first = yield from best_of(loss, first, *((first[0], lr) for lr in others))
    if not first:
        return None
    lr = first[1]
    outer = float(first[0].rpartition(" ")[2])
    few = WAYS[:1] if model in SHORT else WAYS
    ways = {(label(h, start, outer), lr): (h, start) for h, start in few}
    nearest = yield from best_of(loss, *ways)
    if not nearest:
        return None
    near = [one for one in ways if loss[one] <= (1 + WITHIN / 100) * loss[base]]
    last = min(near, key=lambda one: vectors(*ways[one], SIZES[model][0]), default=nearest)
    for seed in SEEDS:
        yield "parallel", "best", base[1], seed
        yield last[0], "best", lr, seed
    return SearchResult(base[1], last[0], lr, *ways[last])


def control_runs(model: str, runs: Sequence[dict[str, Any]]) -> Iterator[Turn]:
    """Yield the runs of two controls that `SearchResult.diloco` is compared with.

    The first control averages only once, at the end. The second has no outer momentum, and its own
    best learning rate. Nothing is yielded before the search is finished.
    """
    finalist = search_result(model, runs)
    if not finalist:
        return
    tail = f"after {finalist.start} %"
    yield from ((f"{NO_MERGE} {tail}", "best", finalist.lr, seed) for seed in SEEDS)
    plain = yield from best_of(
        losses(model, runs), *((f"{NO_MOMENTUM} {tail}", rate) for rate in RATES)
    )
    if plain:
        yield from ((plain[0], "best", plain[1], seed) for seed in SEEDS)


def single_node_runs(model: str, runs: Sequence[dict[str, Any]]) -> Iterator[Turn]:
    """Yield the runs of a control with a single node.

    It makes the same number of steps as parallel SGD, with the same learning rate.
    """
    if finalist := search_result(model, runs):
        for seed in SEEDS:
            yield ALONE, "best", finalist.parallel, seed


def search_result(model: str, runs: Sequence[dict[str, Any]]) -> SearchResult | None:
    """Return the result of the search by `diloco_runs`; None if runs of the search are missing."""
    turns = diloco_runs(model, runs)
    while True:
        try:
            next(turns)
        except StopIteration as end:
            return end.value


def diloco() -> Iterator[Cell]:
    """Yield the cells that compare DiLoCo after a warm start with parallel SGD, at equal samples.

    A warm start is a number of steps of parallel SGD.
    """
    for model, (steps, size) in SIZES.items():
        methods = methods_of(steps)
        only = {ALONE: methods["parallel"]}
        turns = (4, methods, diloco_runs), (1, only, single_node_runs), (4, methods, control_runs)
        for nodes, these, order in turns:
            # An epoch has fewer steps on more nodes, so this is always the same number of steps.
            warmup = f"schedule.warmup_epochs={0.0125 * nodes}"
            own = (*TEXT, *size, f"run.steps={steps}", warmup)
            yield Cell(
                "diloco",
                nodes,
                {"model": model},
                these,
                own,
                RATES,
                {"best": 1.0},
                partial(order, model),
            )


# -- optimizers of language models, on eight nodes -------------------------------------------------

EIGHT = (*TEXT, "data.batch=4", "run.steps=640", "schedule.warmup_epochs=0.05")
"""Settings on 8 nodes: a step has the same number of sequences, 32, as in the study "diloco" on 4
nodes."""
ONE_PEER = "algorithm.name=dsgd graph.name=one-peer-exponential"
PGA = f"{ONE_PEER} cadence.name=gossip-pga cadence.period"
EXCHANGES = {
    "all-reduce": (1.75, "algorithm.name=parallel"),
    "one-peer": (1.0, ONE_PEER),
    "exact averages": (1.75, "algorithm.name=dsgd cadence.name=global"),
    "Gossip-PGA, H = 4": (1.1875, f"{PGA}=4"),
    "Gossip-PGA, H = 8": (1.09375, f"{PGA}=8"),
    "two rounds": (2.0, "algorithm.name=dsgd graph.name=parts:two_rounds graph.period=3"),
    "DiLoCo, H = 32": (1.75 / 32, "algorithm.name=diloco cadence.name=cpsgd cadence.period=32"),
}
"""Vectors that a node sends per step on 8 nodes, and settings, by the name of the exchange.

"exact averages" are averages of the models over all nodes, after the step of each node."""
FIRST_EXCHANGES = ("all-reduce", "one-peer", "exact averages", "Gossip-PGA, H = 4")
OPTIMIZERS = {"AdamW": "local.name=adamw", "Muon": "local.name=muon local.beta2=0.999"}
"""Settings of the optimizers. Muon updates other parameters by AdamW, with the β₂ of "AdamW"."""
FEW = 1.2
"""Largest number of vectors per step of a method that counts as one of few vectors."""
SMALL_GPT = "gpt of 0.07 M"
LARGER_GPT = "gpt of 0.36 M"
LARGEST_GPT = "gpt of 2.2 M"


MOMENTS = {
    "one-peer, v every 16": (1 + 1 / 16, f"{ONE_PEER} algorithm.average_state={{second=16}}"),
    "one-peer, m and v every step": (
        3.0,
        f"{ONE_PEER} algorithm.average_state={{first=1,second=1}}",
    ),
    "exact averages of x, and v every step": (
        3.5,
        f"{EXCHANGES['exact averages'][1]} algorithm.average_state={{second=1}}",
    ),
}
"""Exchanges that average AdamW's moments, too, in the form of `EXCHANGES`.

m is the running mean of the gradient ("first"), and v the running mean of its square ("second").
They are averaged along the same graph as the models, or over all nodes if the models are."""


def method_label(optimizer: str, exchange: str) -> str:
    """Return the label of a method: its optimizer and its exchange."""
    return f"{optimizer}, {exchange}"


def methods_by_label(exchanges: Sequence[str]) -> dict[str, str]:
    """Return the settings of all methods, by label: each exchange with each optimizer.

    The methods with AdamW come first.

    :param exchanges: names of exchanges, keys of `EXCHANGES`
    """
    return {
        method_label(optimizer, exchange): f"{EXCHANGES[exchange][1]} {local}"
        for (optimizer, local), exchange in product(OPTIMIZERS.items(), exchanges)
    }


def searched_losses(cell: Cell, runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the lowest loss, in nats, that the search of each method of a cell found.

    The result is empty if any run of these searches is missing.
    """
    lowest = dict[str, float]()
    for method in cell.methods:
        results = search_runs(cell, method, runs)
        if not all(rate in results for rate in searched_rates(cell, method, runs)):
            return {}
        best = best_rate([*results.values()], cell.metric)
        lowest[method] = results[best]["figures"].get(cell.metric, inf)
    return lowest


def few_vectors(runs: Sequence[dict[str, Any]]) -> str | None:
    """Return the exchange of few vectors with which Muon has the lowest loss in the search.

    The candidates send at most `FEW` vectors per step. "one-peer" is no candidate, because it is a
    finalist in any case.

    :param runs: all finished runs, in the form of `stored.Line`
    :return: key of `EXCHANGES`; None if runs of the search are missing
    """
    lowest = dict[str, float]()
    for cell in optimizers():
        lowest |= (losses := searched_losses(cell, runs))
        if not losses:
            return None
    few = [e for e, (sent, _) in EXCHANGES.items() if sent <= FEW and e != "one-peer"]
    return min(few, key=lambda exchange: lowest[method_label("Muon", exchange)])


def finalist_labels(few: str) -> list[str]:
    """Return the labels of the four finalists.

    :param few: result of `few_vectors`
    """
    chosen = [method_label(optimizer, "one-peer") for optimizer in OPTIMIZERS]
    return [*chosen, method_label("Muon", "exact averages"), method_label("Muon", few)]


def finalist_runs(cell: Cell, runs: Sequence[dict[str, Any]]) -> Iterator[Turn]:
    """Yield the runs of the larger model: two references and four finalists.

    The references are all-reduce with AdamW and with Muon. The finalists are one-peer with AdamW
    and with Muon, exact averages with Muon, and the exchange of `few_vectors` with Muon. Nothing is
    yielded before the search with the smaller model is finished.
    """
    few = few_vectors(runs)
    if few is None:
        return
    chosen = [method_label(optimizer, "all-reduce") for optimizer in OPTIMIZERS]
    chosen += finalist_labels(few)
    best = dict[str, float]()
    for method in chosen:
        rates = searched_rates(cell, method, runs)
        yield from ((method, "search", lr, SEARCH) for lr in rates)
        results = search_runs(cell, method, runs)
        if all(lr in results for lr in rates):
            best[method] = best_rate([*results.values()], cell.metric)
    if len(best) == len(chosen):
        for seed, method in product(SEEDS, chosen):
            yield method, "best", best[method], seed


def optimizers() -> Iterator[Cell]:
    """Yield the cells that compare AdamW and Muon with several exchanges, on 8 nodes."""
    own = (*EIGHT, *SIZES[SMALL_GPT][1])
    rates = (0.006, 0.012, 0.024)
    further = [exchange for exchange in EXCHANGES if exchange not in FIRST_EXCHANGES]
    for part, exchanges in (("first", FIRST_EXCHANGES), ("further", further)):
        labels = {"model": SMALL_GPT, "exchanges": part}
        methods = methods_by_label(exchanges)
        yield Cell("optimizers", 8, labels, methods, own, rates, {"best": 1.0}, metric="loss")


def moments() -> Iterator[Cell]:
    """Yield the cell that averages AdamW's moments, too, with the settings of `optimizers`.

    The methods without averaged moments are in the study "optimizers".
    """
    yield Cell(
        "moments",
        8,
        {"model": SMALL_GPT},
        {
            method_label("AdamW", exchange): f"{options} {OPTIMIZERS['AdamW']}"
            for exchange, (_, options) in MOMENTS.items()
        },
        (*EIGHT, *SIZES[SMALL_GPT][1]),
        (0.006, 0.012, 0.024),
        {"best": 1.0},
        metric="loss",
    )


def larger_model() -> Iterator[Cell]:
    """Yield the cell that compares the best methods of `optimizers` with a larger model."""
    cell = Cell(
        "finalists",
        8,
        {"model": LARGER_GPT},
        methods_by_label([*EXCHANGES]),
        (*EIGHT, *SIZES[LARGER_GPT][1]),
        (0.003, 0.006, 0.012),
        {"best": 1.0},
        metric="loss",
    )
    yield cell._replace(order=partial(finalist_runs, cell))


def ranked_finalists(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Return the labels of the finalists in the order of their mean loss, the lowest first.

    :param runs: all finished runs, in the form of `stored.Line`
    :return: labels of methods; empty if a run of a finalist with one of `SEEDS` is missing
    """
    few = few_vectors(runs)
    if few is None:
        return []
    means = dict[str, float]()
    for method in finalist_labels(few):
        losses_of_seeds = {
            r["seed"]: r["figures"].get("loss", inf)
            for r in runs
            if (r["study"], r["method"], r["level"]) == ("finalists", method, "best")
        }
        if {*losses_of_seeds} != {*SEEDS}:
            return []
        means[method] = sum(losses_of_seeds.values()) / len(SEEDS)
    return sorted(means, key=means.__getitem__)


GIVEN = "given"
"""Label of the level of runs whose learning rate is given, so that it is not searched."""
FEW_SEEDS = SEEDS[:2]
"""Seeds of the runs with more nodes and with the largest model, which have no verdict."""


def runs_at_found_rates(
    count: int,
    searched: Callable[[], Iterator[Cell]],
    later: Sequence[str],
    runs: Sequence[dict[str, Any]],
) -> Iterator[Turn]:
    """Yield the runs of the best finalists, and of all-reduce with the same optimizers.

    Each method has the learning rate that another study found. Nothing is yielded before all
    finalists are finished.

    :param count: number of finalists
    :param searched: study whose search gives the learning rates
    :param later: labels of further methods, whose runs follow the runs of the finalists
    """
    chosen = ranked_finalists(runs)[:count]
    references = [method_label(method.partition(", ")[0], "all-reduce") for method in chosen]
    methods = [*dict.fromkeys([*references, *chosen])]
    rates = dict[str, float]()
    for cell in searched():
        for method in {*methods, *later} & {*cell.methods}:
            trials = [*search_runs(cell, method, runs).values()]
            rates[method] = best_rate(trials, cell.metric)
    for labels in (methods, [label for label in later if methods and label not in methods]):
        for seed, method in product(FEW_SEEDS, labels):
            yield method, GIVEN, rates[method], seed


def largest_model() -> Iterator[Cell]:
    """Yield the cell that runs the best two finalists with the largest model.

    All-reduce and one-peer with AdamW follow.
    """
    with_adamw = [method_label("AdamW", exchange) for exchange in ("all-reduce", "one-peer")]
    yield Cell(
        "largest",
        8,
        {"model": LARGEST_GPT},
        methods_by_label([*EXCHANGES]),
        (*EIGHT, "model.layers=5", "model.width=192"),
        (),
        {GIVEN: 1.0},
        partial(runs_at_found_rates, 2, larger_model, with_adamw),
        metric="loss",
    )


def more_nodes() -> Iterator[Cell]:
    """Yield the cell that runs the best finalist on 32 nodes, with the same total batch as on 8.

    Two rounds per step are left out, because they are no finalist, and their period is another one
    on 32 nodes.
    """
    exchanges = [exchange for exchange in EXCHANGES if exchange != "two rounds"]
    yield Cell(
        "more-nodes",
        32,
        {"model": SMALL_GPT},
        methods_by_label(exchanges),
        (*EIGHT, *SIZES[SMALL_GPT][1], "data.batch=1"),
        (),
        {GIVEN: 1.0},
        partial(runs_at_found_rates, 1, optimizers, ()),
        metric="loss",
    )


QSR_EXCHANGES = {SMALL_GPT: 82, "lenet": 81}
"""Number of exchanges of QSR with α = 2 η and H₀ = 4, where η is the peak of the learning rate.

The number does not depend on η, because the learning rate falls from η to 0 in any case."""


def qsr() -> Iterator[Cell]:
    """Yield the cells that compare the quadratic synchronization rule (QSR) with a constant period.

    Both methods make equally many exchanges.
    """
    text = (*EIGHT, *SIZES[SMALL_GPT][1], "schedule.final_lr=0.0")
    image = (*CIFAR, "model.name=lenet", "node.channels_last=always", "run.steps=780")
    image = (*image, "data.batch=16", "local.name=momentum", "graph.name=complete")
    cells = (
        (SMALL_GPT, text, (0.006, 0.012, 0.024), "loss"),
        ("lenet", image, (0.025, 0.05, 0.1), "accuracy"),
    )
    for model, own, rates, metric in cells:
        count = QSR_EXCHANGES[model]
        methods = {
            "QSR": "algorithm.name=dsgd cadence.name=relative-qsr cadence.peak={lr}",
            "constant": f"algorithm.name=dsgd cadence.name=evenly cadence.count={count}",
        }
        yield Cell("qsr", 8, {"model": model}, methods, own, rates, {"best": 1.0}, metric=metric)


GAP_RATE = 0.05
"""Learning rate at which one-peer is less accurate than parallel SGD in the study "gap", with LeNet
on 16 nodes and batches of 16 samples."""
TEXT_RATE = 0.012
"""Best learning rate of all-reduce with AdamW in the search of the study "optimizers"."""
MIXING = {
    "constant γ": "",
    "growing γ": "algorithm.blend=0.5 algorithm.blend_end=1.0",
    "falling γ": "algorithm.blend=1.0 algorithm.blend_end=0.0 algorithm.blend_shape=cosine",
}
"""Settings of the weight of mixing γ: x ← (1 − γ) x + γ W x.

γ is 1, or grows from 0.5 to 1, or falls from 1 to 0 as the learning rate does."""


def mixing_runs(rate: float, runs: Sequence[dict[str, Any]]) -> Iterator[Turn]:
    """Yield the runs of each method of `MIXING`.

    :param rate: learning rate of all methods
    """
    for seed, method in product(SEEDS, MIXING):
        yield method, GIVEN, rate, seed


def growing() -> Iterator[Cell]:
    """Yield the cells that change the weight of mixing during the training.

    The settings of LeNet equal the settings of the study "gap", which contains the runs of parallel
    SGD, and the settings of the GPT equal the settings of "optimizers".
    """
    image = {"model": "lenet", "batch": "16"}
    text = {"model": SMALL_GPT}
    cells = (
        (16, image, (*CIFAR, *LENET, "data.batch=16"), "momentum", GAP_RATE, "accuracy"),
        (8, text, (*EIGHT, *SIZES[SMALL_GPT][1]), "adamw", TEXT_RATE, "loss"),
    )
    for nodes, labels, settings, local, rate, metric in cells:
        methods = {name: f"{ONE_PEER} local.name={local} {own}" for name, own in MIXING.items()}
        levels = {GIVEN: 1.0}
        order = partial(mixing_runs, rate)
        yield Cell(
            "growing", nodes, labels, methods, settings, (rate,), levels, order, metric=metric
        )


OUTER_PERIODS = (16, 64)
"""Steps between two outer steps. 32 is not among them, as it would repeat runs of `optimizers`."""


def outer_steps() -> Iterator[Cell]:
    """Yield the cells that compare DiLoCo on 8 nodes with outer steps on a single node (SNOO).

    The node has the total batch of the 8 nodes.
    """
    own = (*EIGHT, *SIZES[SMALL_GPT][1])
    methods = {
        f"H = {period}": f"algorithm.name=diloco cadence.name=cpsgd cadence.period={period}"
        for period in OUTER_PERIODS
    }
    for nodes, batch in ((8, 4), (1, 32)):
        batched = (*own, f"data.batch={batch}")
        yield Cell(
            "outer",
            nodes,
            {"model": SMALL_GPT},
            methods,
            batched,
            (0.003, 0.006, 0.012),
            {"best": 1.0},
            metric="loss",
        )


STEPS_BY_NODE = (16, 16, 16, 16, 16, 16, 4, 4)
"""Local steps of each of 8 nodes in a period, as if two nodes had a quarter of the speed."""
BY_NODE = f"local.name=adamw cadence.period=[{','.join(map(str, STEPS_BY_NODE))}]"
RARE_AVERAGES = {
    "all nodes": f"algorithm.name=dsgd cadence.name=cpsgd {BY_NODE}",
    "one-peer": f"{ONE_PEER} cadence.name=every {BY_NODE}",
}
"""Settings of averages at the end of each period of 16 steps, by the nodes that average."""
EQUAL_WEIGHTS = "equal weights"
BY_STEPS = "weights by steps"


def weights() -> Iterator[Cell]:
    """Yield the cells that compare equal weights of nodes with weights by their local steps."""
    for partners, options in RARE_AVERAGES.items():
        yield Cell(
            "weights",
            8,
            {"model": SMALL_GPT, "average": partners},
            {
                f"{partners}, {EQUAL_WEIGHTS}": options,
                f"{partners}, {BY_STEPS}": f"{options} algorithm.node_weights=steps",
            },
            (*EIGHT, *SIZES[SMALL_GPT][1]),
            (0.006, 0.012, 0.024),
            {"best": 1.0},
            metric="loss",
        )


def first_weights() -> Iterator[Cell]:
    """Yield the cell of the first formula of weights by steps with one-peer, I − D (I − W).

    Its runs with equal weights are in the study "weights".
    """
    cell = next(cell for cell in weights() if cell.labels["average"] == "one-peer")
    methods = {m: options for m, options in cell.methods.items() if BY_STEPS in m}
    yield cell._replace(study="first-weights", methods=methods)


STUDIES = {
    "gap": gap,
    "searched": searched,
    "time": steps_to_goal,
    "diloco": diloco,
    "optimizers": optimizers,
    "moments": moments,
    "qsr": qsr,
    "growing": growing,
    "outer": outer_steps,
    "finalists": larger_model,
    "more-nodes": more_nodes,
    "largest": largest_model,
    "weights": weights,
    "first-weights": first_weights,
}
REMOVED = {"growing": "4421d395", "first-weights": "6ed225f8"}
"""Studies of methods that were taken out of the package, each with the last commit that can repeat
its runs. Their stored runs are still judged."""

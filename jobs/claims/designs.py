"""Designs of the rows that train: cells in the order in which they are run, settings, seeds.

What isn't run by the end of the time is cut from the end of this order, which was written before
any of its runs; a cell counts once all its seeds are there. A cell's rates are searched for with
`SEARCH`, which is never reported; with `SEEDS`, which all methods share, each method runs at its
own best rate and at fractions of it. `run_queue.py` does the runs, `verdicts.py` judges them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

SEARCH = 1000
"""Seed of the runs that choose rates."""
SEEDS = (1, 2, 3, 4, 5)
JOB = "jobs/claims/jobs/lenet.toml"
CIFAR = ("data.source={data}", "schedule.name=cosine", "log.consensus_every=20")


class Cell(NamedTuple):
    """Methods that are compared on one footing: who runs, on how many nodes, at which rates."""

    study: str
    nodes: int
    labels: dict[str, str]
    """of the cell, apart from method and level"""
    methods: dict[str, str]
    """label -> settings"""
    settings: tuple[str, ...]
    rates: tuple[float, ...]
    """tried with the search's seed"""
    levels: dict[str, float]
    """label -> fraction of the best rate"""


LEVELS = {"best": 1.0, "best / 3": 1 / 3, "best / 10": 0.1}
PERCEPTRON = ("model.name=mlp", "model.hidden=[32]", "run.epochs=3")
LENET = ("model.name=lenet", "run.epochs=5", "node.channels_last=always")
PAIR = {
    "parallel": "algorithm.name=parallel graph.name=complete",
    "one-peer": "algorithm.name=dmsgd graph.name=one-peer-exponential",
}
REMEDIES = {
    "exact every 16": "cadence.name=gossip-pga cadence.period=16",
    "exact first tenth": "cadence.name=exact-parts cadence.first=0.1",
    "exact last tenth": "cadence.name=exact-parts cadence.last=0.1",
}
"""The gap's remedies; cadences of their own are in `parts.py`."""


def gap() -> Iterator[Cell]:
    """Where the one-peer gap comes from: nodes, samples a node, rate (row 1)."""
    rates = (0.0125, 0.025, 0.05, 0.1, 0.2)
    sizes = [(4, 16), (16, 16), (4, 64), (16, 64), (4, 256)]
    for model, own in (("perceptron", PERCEPTRON), ("lenet", LENET)):
        for n, batch in sizes:
            labels = {"model": model, "batch": str(batch)}
            settings = (*CIFAR, *own, f"data.batch={batch}")
            yield Cell("gap", n, labels, PAIR, settings, rates, LEVELS)
        remedied = {name: f"{PAIR['one-peer']} {more}" for name, more in REMEDIES.items()}
        labels = {"model": model, "batch": "16", "of": "remedies"}
        settings = (*CIFAR, *own, "data.batch=16")
        yield Cell("gap", 16, labels, remedied, settings, rates, {"best": 1.0})


def searched() -> Iterator[Cell]:
    """Searched graphs and Laplacian weights beyond digits, each at its own best rate (row 5)."""
    names = {"lattice": "ring-lattice", "searched": "file:{searched}", "hypercube": "hypercube",
             "torus": "torus"}  # fmt: skip
    rules = ("metropolis-hastings", "laplacian")
    methods = {
        f"{name}, {rule.partition('-')[0]}":
        f"algorithm.name=dsgd graph.name={graph} graph.weights={rule}"
        for (name, graph), rule in product(names.items(), rules)
    }  # fmt: skip
    own = (*CIFAR, *LENET, "data.batch=16", "data.partition=dirichlet", "data.dirichlet_alpha=0.1")
    rates = (0.0125, 0.025, 0.05, 0.1, 0.2)
    yield Cell("searched", 16, {"model": "lenet"}, methods, own, rates, {"best": 1.0})


def until() -> Iterator[Cell]:
    """Steps until parallel's accuracy, for seconds on the virtual clock (row 3): digits, 16 nodes.

    220 steps; DiLoCo begins after a fifth of them. `seconds.py` makes the table.
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
    own = ("data.source=digits", "data.batch=8", "data.partition=shuffled", "model.name=mlp",
           "node.vmap=true", "run.epochs=20", "run.evaluate_steps=5", "schedule.name=cosine",
           "log.consensus_every=20")  # fmt: skip
    rates = (0.05, 0.1, 0.2, 0.4)
    yield Cell("time", 16, {"model": "mlp on digits"}, methods, own, rates, {"best": 1.0})


STUDIES = {"gap": gap, "searched": searched, "time": until}

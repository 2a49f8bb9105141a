"""Measured costs in quality of methods, compared with all-reduce."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mpigossip.algorithms.cadence import period_of
from mpigossip.analysis.plan.gpu_costs import style_of
from mpigossip.config import Job

RESULTS = "jobs/claims/RESULTS.md"
BENCHMARKS = "tools/bench/BENCHMARKS.md"
TEXT = "jobs/text-gpt.toml"
LONGER = 4
"""A measurement with period H is used for periods from H / LONGER to H · LONGER."""


@dataclass(frozen=True)
class Accept:
    """Largest acceptable cost in quality compared with all-reduce."""

    loss: float = 1.0
    """In percent of the loss, for language models."""
    points: float = 0.5
    """In points of accuracy, for classification."""


@dataclass(frozen=True)
class Evidence:
    """One measured cost: a method compared with all-reduce at equal numbers of samples."""

    method: str
    graph: str
    model: str
    """Model, data, and number of runs."""
    parameters: int
    nodes: int
    cost: float
    """Points of accuracy lost, or percent of loss gained, depending on `unit`."""
    interval: tuple[float, float] | None
    """Interval of the cost that holds 95 % of repetitions; None: there were too few runs."""
    unit: str
    """"points" or "%"."""
    page: str
    """Page of the repository with the measurement."""
    shown: tuple[str, ...]
    """The numbers as the page shows them."""
    period: int = 1
    """Number of steps H between exchanges."""
    style: str = ""
    """Style of the method that was measured, "atc" or "awc"; "" if it has none."""
    seeds: int = 5
    """Number of seeds with which both methods were run."""
    with_muon: bool = False
    """True if both methods used Muon for hidden matrices; False: they used AdamW or SGD."""

    @property
    def text(self) -> str:
        """Sentence for a terminal: cost, interval, model and page."""
        what = "points less accuracy" if self.unit == "points" else "% more loss"
        low_high = f" [{self.interval[0]:g}, {self.interval[1]:g}]" if self.interval else ""
        period = f", H = {self.period}" if self.period > 1 else ""
        cost = f"{self.cost:g}{low_high} {what}{period}"
        return f"{cost}: {self.model}, {self.nodes} nodes ({self.page})"

    def fulfils(self, accept: Accept) -> bool:
        """Return whether the cost is acceptable, at the upper end of its interval if it has one.

        A cost from one seed is never acceptable, because other seeds may have a larger one.
        """
        if self.seeds == 1:
            return False
        limit = accept.points if self.unit == "points" else accept.loss
        return (self.interval[1] if self.interval else self.cost) <= limit


LENET = "LeNet, CIFAR-10, 5 paired seeds"
PERCEPTRON = "perceptron, CIFAR-10, 5 paired seeds"
GPT = "GPT of 2.2 M parameters, AdamW, 2 seeds"
SMALL_GPT = "GPT of 0.2 M parameters, AdamW at twice the rate of all-reduce, 1 seed"
TINY_GPT = "GPT of 0.07 M parameters, {}, 5 seeds"
LARGER_GPT = "GPT of 0.36 M parameters, {}, 5 seeds"
PEER = "one-peer-exponential"
EVIDENCE = (
    Evidence("dmsgd", PEER, LENET, 62_006, 16, 1.63, (1.31, 1.94), "points", RESULTS,
             ("1.63 [1.31, 1.94] points",)),
    Evidence("dmsgd", PEER, LENET, 62_006, 4, -0.14, (-1.20, 0.93), "points", RESULTS,
             ("-0.14 [-1.20, 0.93]",)),
    Evidence("dmsgd", PEER, PERCEPTRON, 98_666, 16, 0.13, (-0.14, 0.41), "points", RESULTS,
             ("0.13 [-0.14, 0.41]",)),
    Evidence("dmsgd", "ring", LENET, 62_006, 16, 3.19, (1.78, 4.59), "points", RESULTS,
             ("3.19 [1.78, 4.59] points",)),
    Evidence("dmsgd-vanilla", PEER, LENET, 62_006, 16, 3.55, (2.52, 4.58), "points", RESULTS,
             ("3.55 [2.52, 4.58] points",), style="atc"),
    Evidence("dsgd", PEER, GPT, 2_200_000, 4, 12.71, None, "%", BENCHMARKS, ("+12.71 %",),
             style="atc", seeds=2),
    Evidence("dsgd", PEER, TINY_GPT.format("AdamW at the rate of all-reduce"), 72_000, 8, 2.45,
             (1.98, 2.92), "%", RESULTS, ("2.45 [1.98, 2.92]",), style="atc"),
    Evidence("dsgd", PEER, LARGER_GPT.format("AdamW"), 366_432, 8, 1.98, (1.43, 2.53), "%", RESULTS,
             ("1.98 [1.43, 2.53]",), style="atc"),
    Evidence("dsgd", PEER, TINY_GPT.format("Muon"), 72_000, 8, 1.09, (0.21, 1.97), "%", RESULTS,
             ("1.09 [0.21, 1.97]",), style="atc", with_muon=True),
    Evidence("dsgd", PEER, LARGER_GPT.format("Muon"), 366_432, 8, 0.21, (-0.77, 1.18), "%", RESULTS,
             ("0.21 [-0.77, 1.18]",), style="atc", with_muon=True),
    Evidence("dsgd", PEER, SMALL_GPT, 174_656, 4, 3.4, None, "%", TEXT, ("3.4 %",), style="awc",
             seeds=1),
    Evidence("dsgd", PEER, SMALL_GPT, 174_656, 4, 0.8, None, "%", TEXT, ("0.8 %",), style="atc",
             seeds=1),
    Evidence("diloco", "complete", GPT, 2_200_000, 4, 20.80, None, "%", BENCHMARKS,
             ("+20.80 %",), 8, seeds=2),
    Evidence("diloco", "complete", GPT, 2_200_000, 4, 21.46, None, "%", BENCHMARKS,
             ("+21.46 %",), 32, seeds=2),
    Evidence("diloco", "complete", TINY_GPT.format("AdamW"), 72_000, 8, 22.95, (21.46, 24.44), "%",
             RESULTS, ("22.95 [21.46, 24.44]",), 32),
    Evidence("diloco", "complete", TINY_GPT.format("Muon"), 72_000, 8, 13.17, (12.04, 14.31), "%",
             RESULTS, ("13.17 [12.04, 14.31]",), 32, with_muon=True),
    Evidence("diloco", "complete", GPT, 2_200_000, 4, 25.60, None, "%", BENCHMARKS,
             ("+25.60 %",), 128, seeds=2),
    Evidence("gasloc", PEER, GPT, 2_200_000, 4, 27.43, None, "%", BENCHMARKS, ("+27.43 %",), 32,
             seeds=2),
)  # fmt: skip
"""All measurements with float32 messages and without fragments. A test compares them with their
pages."""


def nearest(job: Job, n: int, parameters: int, any_task: bool = False) -> Evidence | None:
    """Return the measurement of a job's method whose model and number of nodes are nearest.

    Method, graph and kind of task are the same; the period is similar; both use Muon, or neither
    does. If the method was measured with the job's style, only these measurements are used;
    otherwise, the style is another one. Distances are computed from logarithms of the numbers of
    parameters, nodes and steps between exchanges.

    :param job: the job of a proposal
    :param n: number of nodes of the job
    :param parameters: number of trained parameters of its model
    :param any_task: whether the task is unknown, so that measurements of all tasks are used
    :return: the measurement; None if there is none of this method, or if the job has a lossy wire,
        fragments or another kind of task
    """
    if job.node.wire != "fp32" or job.cadence.options.get("fragments", 1) != 1:
        return None
    task = job.task.name
    unit = "%" if task == "language-model" or job.model.name == "gpt" else "points"
    if unit == "points" and task != "classification" and not any_task:
        return None
    method = job.algorithm.name
    if method == "dsgd" and job.local.name == "momentum":
        method = "dmsgd-vanilla"  # the same formula: momentum that stays on its node
    period = 1
    if job.cadence.name != "always":
        period = period_of(job.cadence.options)
    similar = [
        evidence
        for evidence in EVIDENCE
        if (evidence.method, evidence.graph) == (method, job.graph.name)
        and (any_task or evidence.unit == unit)
        and evidence.with_muon == (job.local.name == "muon")
        and period <= LONGER * evidence.period
        and evidence.period <= LONGER * period
        and (evidence.period == 1) == (period == 1)
    ]

    def distance(evidence: Evidence) -> float:
        size = math.log(evidence.parameters / parameters)
        return (
            abs(math.log(evidence.period / period)) + abs(size) + abs(math.log(evidence.nodes / n))
        )

    style = style_of(job)
    same_style = [evidence for evidence in similar if evidence.style == style]
    return min(same_style or similar, key=distance, default=None)

"""Transient iterations that a study has measured, and theoretical curves in its plots."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np

from mpigossip.config import JobError
from mpigossip.data.problems import Problem
from mpigossip.data.sources import SOURCES
from mpigossip.graphs import Graph, theory
from mpigossip.store.log import Log
from mpigossip.studies.grid import Cell
from mpigossip.studies.results import Results
from mpigossip.training import assemble
from mpigossip.training.parts import make_graph

Figures = Sequence[float] | np.ndarray
"""Sequence of numbers."""


def meeting(steps: Figures, curve: Figures, reference: Figures, within: float = 2.0) -> float:
    """Return the first step from which a curve stays at most ``within`` times a reference.

    :param steps: steps of both curves, in ascending order
    :param curve: positive values of a metric for which smaller is better
    :param reference: values of the same metric
    :param within: largest ratio of the curve to the reference
    :return: the step; inf if the last value still exceeds the ratio
    """
    above = np.flatnonzero(~(np.asarray(curve, float) <= within * np.asarray(reference, float)))
    first = 0 if not len(above) else int(above[-1]) + 1
    return float(steps[first]) if first < len(steps) else float("inf")


def transients(study: Results, against: str, y: str, within: float) -> list[dict[str, Any]]:
    """Return the rows of `Study.transient`, one for each point that is not a reference.

    :param study: results of the study
    :param against: label of the reference
    :param y: metric for which smaller values are better
    :param within: largest ratio of the curve to the reference
    :raises JobError: as `Study.transient`
    """
    references = [cell for cell in study.cells if against in dict(cell.labels).values()]
    rows = []
    for cell in study.cells:
        if cell in references:
            continue
        same_nodes = [point for point in references if point.nodes == cell.nodes]
        if not same_nodes:
            raise JobError(
                f'against = "{against}": no point with {cell.nodes} nodes has this label; add one '
                f'to the grid, as in {{"method": {{"{against}": "algorithm.name=parallel", …}}}}'
            )
        nearest = max(same_nodes, key=lambda point: len(set(point.labels) & set(cell.labels)))
        row: dict[str, Any] = dict(cell.labels) | {"nodes": cell.nodes}
        rows.append(
            row | {"transient": _meet(study, cell, nearest, y, within)} | _orders(study, cell)
        )
    return rows


def _meet(study: Results, cell: Cell, reference: Cell, y: str, within: float) -> float:
    """Return the step from which the curves of two points, as means over seeds, stay close.

    The step is computed by :func:`meeting`. It is inf if all runs of a point diverged.

    :param study: results of the study
    :param cell: point whose curve is compared
    :param reference: point with the reference curve
    :param y: metric for which smaller values are better
    :param within: largest ratio of the curve to the reference
    :raises JobError: if the points were evaluated at different steps
    """
    both = [study.ended(point) for point in (cell, reference)]
    if not all(both):
        return float("inf")
    means = [np.mean([run.curve(y) for run in runs], axis=0) for runs in both]
    steps, others = (runs[0].curve("step") for runs in both)
    if not np.array_equal(steps, others):
        raise JobError(
            f"{cell.name} is evaluated at {len(steps)} steps up to {max(steps, default=0):g}, but "
            f"{reference.name} at {len(others)} other steps up to {max(others, default=0):g}: give "
            "both the same run.evaluate_every and the same number of steps"
        )
    return meeting(steps, means[0], means[1], within)


def _orders(study: Results, cell: Cell) -> dict[str, float]:
    """Return the theoretical transient iterations of a point; {} if all of its runs diverged."""
    runs = study.ended(cell)
    if not runs:
        return {}
    iid, non_iid = theory.transient_iterations(_known(runs[0].log)[0])
    return {"iid": iid, "non_iid": non_iid}


def _known(log: Log) -> tuple[Graph, Problem | None, float]:
    """Return the graph of a run, its theory problem, and the standard deviation of its noise.

    The problem is None, and the noise 0, if the run is not of a theory task.
    """
    job = assemble.load(log.job)
    graph = make_graph(job, log.nodes)
    noise = job.task.options.get("noise", 0.0)
    make = SOURCES.get(job.data.source) if "noise" in job.task.options else None
    return graph, make(log.nodes, **job.data.options) if make else None, noise


class Bounded(NamedTuple):
    """Quantities that determine a lower bound; points with equal quantities have the same bound."""

    diameter: int
    """Diameter of the graph in hops; 0 if the graph is not connected."""
    nodes: int
    noise: float
    """Standard deviation σ of the gradient noise of a node."""
    gap: float
    """Distance f(x₀) − f(x*) of the initial value to the optimum."""
    smoothness: float
    """Lipschitz constant L of the gradient."""

    def label(self, others: Iterable["Bounded"]) -> str:
        """Return the label of the bound: the graph's diameter, and quantities not equal in all."""
        texts = {
            "nodes": f"{self.nodes} nodes",
            "noise": f"noise {self.noise:g}",
            "gap": f"initial gap {self.gap:.6g}",
            "smoothness": f"smoothness {self.smoothness:.6g}",
        }
        bounds = [self, *others]
        differ = [text for key, text in texts.items() if len({getattr(k, key) for k in bounds}) > 1]
        return ", ".join(["lower bound", f"diameter {self.diameter}", *differ])


FLOOR_LINES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (9, 2)))
"""Line styles of lower bounds, in the order of their use."""


def draw_rates(axes: Any, study: Results, colours: Mapping[Cell, str]) -> None:
    """Draw the rate of D-PSGD on the graph of each point, and the lower bounds.

    :param axes: axes of matplotlib
    :param study: results of theory tasks
    :param colours: colour of each point, in which its rate is drawn as a dotted line; the lower
        bounds are grey
    :raises JobError: if the constants of a problem are not known, or if nodes have weights
    """
    floors: dict[Bounded, tuple[Figures, np.ndarray]] = {}
    low, high = axes.get_ylim()
    for cell, colour in colours.items():
        for run in study.ended(cell)[:1]:
            (graph, problem, noise), n = _known(run.log), cell.nodes
            if graph.node_weights:
                raise JobError(
                    f"theory = True: the nodes of {cell.name} have weights, but rates and bounds "
                    "hold for the plain mean of the nodes; use theory = False, or "
                    'algorithm.node_weights = "equal"'
                )
            if problem is None or not np.isfinite(problem.gap):
                raise JobError(
                    f"theory = True: the constants of {cell.name} are not known; use task.name = "
                    '"quadratics" or "logistic"'
                )
            steps = run.curve("step")
            constants = problem.gap, problem.smoothness, noise
            gap = float("inf") if graph.complete else theory.averaging_gap(graph)
            rate = theory.gossip_rate(steps, *constants, problem.heterogeneity, n, gap)
            axes.plot(steps, rate, color=colour, linestyle=":", lw=1.2)
            across = theory.diameter(graph)
            bounded = Bounded(across or 0, n, noise, problem.gap, problem.smoothness)
            floor = theory.gradient_floor(steps, *constants, n, 1, across)
            floors.setdefault(bounded, (steps, floor))
    drawn = sorted(floors.items(), key=lambda item: item[0])
    for (bounded, (steps_of_floor, floor)), line in zip(drawn, cycle(FLOOR_LINES), strict=False):
        label = bounded.label(floors)
        axes.plot(steps_of_floor, floor, color="#888888", linestyle=line, lw=0.8, label=label)
    axes.plot([], [], ":", color="#888888", label="rate of D-PSGD, no constants")
    # Rates and bounds have no constants, so they must not determine the range of the axis.
    axes.set_ylim(low, high)

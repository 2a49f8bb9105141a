"""Seconds of the virtual clock until a method reaches the accuracy of parallel SGD.

    python jobs/claims/seconds.py            # seconds; verdicts.py makes the table
    python jobs/claims/seconds.py --figure jobs/claims/figures/seconds.png

The number of steps comes from the study "time" of `designs.py`: an MLP on digits with 16 nodes,
each method at its own learning rate. Steps are counted until the first evaluation at which the
averaged model reaches the goal. The goal is the final accuracy of parallel SGD, as a mean over its
seeds, minus half a percentage point.

A step takes the time of a step of ResNet-50 in float32 (102 MB) with .335 s of computation, as
published for a node of 8 V100 (Ying et al. 2021; see `speed.py`). In 5 % of its steps, which are
drawn with the seed, a node takes 5 times longer. Parallel SGD and DiLoCo's warm start overlap an
all-reduce with the whole computation, which is the best case for them. "dsgd ahead" overlaps its
message with computation, and the other methods overlap nothing.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import parts  # noqa: E402
from designs import JOB, SEEDS, steps_to_goal  # noqa: E402
from speed import EXPONENTIAL  # noqa: E402
from speed import JOB as RESNET  # noqa: E402

from mpigossip.engine.vector import ParameterLayout  # noqa: E402
from mpigossip.mixing.base import ExchangeKind  # noqa: E402
from mpigossip.training import assemble  # noqa: E402
from mpigossip.training.costs import Exchanges, subject  # noqa: E402
from mpigossip.training.machines import Machine  # noqa: E402
from mpigossip.training.parts import make_graph, make_parts  # noqa: E402
from mpigossip.training.time_model import Clock, Timing  # noqa: E402

LINKS = [(gbit, latency) for latency in (50e-6, 5e-3) for gbit in (1, 10, 25, 100)]
SLOW = 0.05
TIMES = 5.0
BELOW = 0.005
"""Fraction of slow steps; factor by which they take longer; difference between the final accuracy
of parallel SGD and the goal."""
(CELL,) = steps_to_goal()
WARM = 44
"""Number of steps of the warm start of "DiLoCo warm"."""
Line = dict[str, Any]


class Hidden(Timing):
    """Timing in which an exchange overlaps with the whole computation of a step."""

    def hidden(self, send_s, sum_s):
        """Return the seconds of an exchange that overlap with the computation of its step.

        :param send_s: seconds in which messages are sent
        :param sum_s: seconds in which messages are summed
        """
        return np.minimum(send_s + sum_s, self.machine.compute_s)


def machine(gbit: float, latency: float) -> Machine:
    """Return the nodes of the paper, without jitter and with another link.

    :param gbit: bandwidth in Gbit/s
    :param latency: latency in seconds
    """
    rate = gbit * 1e9 / 8
    return replace(
        EXPONENTIAL,
        latency_s=latency,
        global_latency_s=latency,
        bandwidth=rate,
        global_bandwidth=rate,
        jitter=0.0,
    )


@functools.cache
def resnet() -> ParameterLayout:
    """Return the parameter layout of ResNet-50."""
    return subject(assemble.load(RESNET, ["node.devices=cpu:1"]))[0].flat


@functools.cache
def exchanges(method: str, n: int, total: int) -> Exchanges:
    """Return the exchanges that a method makes when it trains ResNet-50.

    :param method: label of the method
    :param n: number of nodes
    :param total: number of steps
    """
    job = assemble.load(Path(JOB), CELL.methods[method].split())
    return Exchanges(make_parts(job, make_graph(job, n), resnet(), total=total))


def end_times(
    method: str,
    exchange_steps: Sequence[int],
    steps: int,
    n: int,
    on: Machine,
    seed: int,
    last: float = math.inf,
    overlap: bool = True,
) -> list[float]:
    """Return the time, in seconds, at which the slowest node ends each step.

    :param method: label of the method
    :param exchange_steps: numbers of the steps with an exchange
    :param steps: number of steps of the training
    :param n: number of nodes
    :param on: the nodes and their link
    :param seed: seed of the slow steps
    :param last: number of steps whose times are returned; not more than ``steps`` are
    :param overlap: whether exchanges of parallel SGD and of DiLoCo's warm start overlap with
        computation; if false, only messages that are sent ahead do
    """
    costs = exchanges(method, n, steps)
    plain = Clock(Timing(costs, on, ddp=overlap))
    hidden = Clock(Hidden(costs, on))
    overlapped = steps if method == "parallel" else WARM if method == "DiLoCo warm" else 0
    overlapped = overlapped * overlap
    times = []
    exchanging = {*exchange_steps}
    t = 0
    gossip = ExchangeKind.GOSSIP in costs.parts.cadence.kinds
    draws = parts.paces(n, seed, SLOW, TIMES)
    for step, pace in zip(range(int(min(steps, last))), draws, strict=False):
        kind = (
            ExchangeKind.LOCAL
            if step not in exchanging
            else ExchangeKind.GOSSIP
            if gossip
            else ExchangeKind.GLOBAL
        )
        clock, other = (hidden, plain) if step < overlapped else (plain, hidden)
        now = clock.step(kind, t, on.compute_s * pace)
        other.now = now
        t += kind is ExchangeKind.GOSSIP
        times.append(float(now.max()))
    return times


def steps_to_accuracy(line: Line, goal: float) -> float:
    """Return the number of steps until a run reaches the accuracy ``goal``; inf if it does not."""
    return next((t for t, accuracy in line["curve"] if accuracy >= goal), math.inf)


def finals(lines: Sequence[Line]) -> dict[str, dict[int, Line]]:
    """Return the runs of the study that are not part of its search, by method and seed."""
    final_runs = [x for x in lines if x["study"] == "time" and x["level"] == "best"]
    return {m: {x["seed"]: x for x in final_runs if x["method"] == m} for m in CELL.methods}


def goal_of(runs: dict[str, dict[int, Line]]) -> float:
    """Return the goal: the mean final accuracy of parallel SGD minus half a percentage point."""
    return float(np.mean([x["figures"]["accuracy"] for x in runs["parallel"].values()])) - BELOW


def compare(lines: Sequence[Line], links=LINKS) -> list[dict[str, Any]]:
    """Return a row for each link and method: steps, seconds and speed-ups over parallel SGD.

    "steps" and "seconds" have one value per seed, inf if the run does not reach the goal. "gains",
    the speed-ups, has no values for such seeds.

    :param lines: all stored runs
    :param links: pairs of bandwidth in Gbit/s and latency in seconds
    """
    runs = finals(lines)
    goal = goal_of(runs)
    rows = []
    for gbit, latency in links:
        on = machine(gbit, latency)
        base = {}
        for method, by_seed in runs.items():
            seconds = {}
            steps = {}
            for seed in SEEDS:
                line = by_seed[seed]
                steps[seed] = steps_to_accuracy(line, goal)
                last = line["curve"][-1][0]
                times = end_times(
                    method, line["exchanges"], last, CELL.nodes, on, seed, steps[seed]
                )
                seconds[seed] = times[int(steps[seed]) - 1] if steps[seed] <= last else math.inf
            if method == "parallel":
                base = seconds
            gains = [base[s] / seconds[s] for s in SEEDS if math.isfinite(seconds[s] + base[s])]
            rows.append(
                {
                    "gbit": gbit,
                    "latency": latency,
                    "method": method,
                    "goal": goal,
                    "gains": gains,
                    "steps": [steps[s] for s in SEEDS],
                    "seconds": [seconds[s] for s in SEEDS],
                }
            )
    return rows


def paper_speed_ups(n: int = 32, steps: int = 300) -> str:
    """Return the speed-ups of a step over parallel SGD as text, for comparison with the paper.

    The link has 25 Gbit/s and a latency of 50 µs.

    :param n: number of nodes
    :param steps: number of steps over which the times of both are measured
    """
    on = machine(25, 50e-6)
    every = range(steps)
    last = {
        m: np.mean([end_times(m, every, steps, n, on, s)[-1] for s in SEEDS])
        for m in ("parallel", "dsgd ahead", "dmsgd")
    }
    return ", ".join(f"{m} {last['parallel'] / t:.2f} x" for m, t in last.items())


def draw(results: Sequence[dict[str, Any]], out: Path) -> None:
    """Draw the speed-up over parallel SGD against bandwidth, with a panel for each latency."""
    from matplotlib.figure import Figure

    from mpigossip.studies.drawing import COLOURS

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, latency in zip(panels, dict.fromkeys(x["latency"] for x in results), strict=True):
        for k, method in enumerate(CELL.methods):
            rows = [x for x in results if (x["method"], x["latency"]) == (method, latency)]
            complete = [x for x in rows if len(x["gains"]) == len(SEEDS)]
            mean = [np.mean(x["gains"]) for x in complete]
            half = [stats.t.ppf(0.975, len(SEEDS) - 1) * stats.sem(x["gains"]) for x in complete]
            count = min(len(x["gains"]) for x in rows)
            label = method + f" ({count} of {len(SEEDS)} reach it)" * (count < len(SEEDS))
            axes.errorbar(
                [x["gbit"] for x in complete],
                mean,
                half,
                fmt="o-",
                capsize=3,
                color=COLOURS[k],
                label=label,
            )
        axes.set(xscale="log", yscale="log", xlabel="Gbit/s", title=f"{1e3 * latency:g} ms")
        axes.set_xticks(ticks := sorted({x["gbit"] for x in results}), map(str, ticks))
        axes.minorticks_off()
        axes.set_yticks(ys := [0.5, 1, 2, 4], map(str, ys))
        axes.grid(alpha=0.25)
    panels[0].set_ylabel("times as fast as parallel, 95 %")
    panels[0].set_ylim(0.5, 5)
    panels[1].legend(frameon=False, fontsize=9)
    figure.savefig(out, dpi=100)


def main(arguments: list[str] | None = None) -> int:
    """Print the seconds of each method on each link, and draw them if --figure is given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=HERE / "runs.jsonl")
    parser.add_argument("--figure", type=Path, help="file of the figure")
    options = parser.parse_args(arguments)
    lines = list(map(json.loads, options.runs.read_text("utf-8").splitlines()))
    results = compare(lines)
    for row in results:
        print(
            f"{row['gbit']:4} Gbit/s {1e3 * row['latency']:g} ms {row['method']:12} "
            f"{np.mean(row['seconds']):8.0f} s {np.median(row['steps']):5g} steps"
        )
    print(
        f"A step at 32 nodes, 25 Gbit/s, 50 µs, equal steps: {paper_speed_ups()}. "
        "Published: 1.47 x."
    )
    if options.figure:
        draw(results, options.figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())

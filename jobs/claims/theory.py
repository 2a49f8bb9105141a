"""Theory and measurement: limits, rates and transient iterations on quadratics.

    python jobs/claims/theory.py --out jobs/claims/THEORY.md        # two minutes

Node i minimizes f_i(x) = ½ ‖x − b_i‖², in float64, by the package's methods in its simulator; only
the table of CHOCO is measured in float32. The gradient noise for T* has standard deviation σ = 1
per coordinate. The optimum x* is the mean of the b_i. With a doubly stochastic W, the mean model x̄
is exactly the model of parallel SGD, so that one run measures both. D-PSGD is the algorithm `dsgd`.
ATC is a local step, then averaging; AWC makes both at once.

T* is the number of *transient iterations*, as in the exponential-graph paper (Ying et al. 2021,
arXiv 2110.13363): for all T > T*, T steps at the learning rate √(n/T) end with at most twice the
mean square distance to the optimum that parallel SGD has. At a small rate γ, the error becomes
stationary after about 1/γ steps. Let γ* be the rate at which the error in excess of parallel SGD's
equals the error of parallel SGD. Then T* = n/γ*².

There are three kinds of data. "noise": all b_i are 0. "random": the b_i are drawn at random.
"smooth": b_i is proportional to cos(2π i/n). For the last two, the b_i have the mean 0 and the mean
square ζ² = 1 per coordinate over the nodes, and only the error of parallel SGD includes gradient
noise. J is the matrix whose entries are all 1/n, X has a row for each node, and X̄ = J X. The
"slope" is the power of n that fits the measured T* best; the column "paper" is the bound of the
exponential-graph paper. The column "theorem, at most" is the bound for CHOCO (Koloskova, Stich,
Jaggi 2019, theorem 2). A mode is an eigenvector of W, and λ is its eigenvalue; the slowest mode has
the largest |λ| below 1.
"none" in a table means that the error is at most twice the error of parallel SGD at every rate
up to 0.9.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from quadratics import model_after, steps
from scipy.linalg import solve_discrete_lyapunov
from table import origin

from mpigossip import algorithms
from mpigossip.graphs import Graph, graph
from mpigossip.graphs.spectral import spectral_gap
from mpigossip.graphs.theory import quadratic_limit
from mpigossip.mixing import lossy_wires

SIZES = (8, 16, 32, 64)
N = 16
GRAPHS = {
    "ring": ("n⁷", "n¹¹"),
    "grid": ("n⁵ log² n", "n⁷ log⁴ n"),
    "exponential": ("n³ log² n", "n³ log⁴ n"),
    "one-peer-exponential": ("n³ log² n", "n³ log⁴ n"),
}
"""Values of the table in the exponential-graph paper, for equal data and for different data."""
WIDTH = 256
SEED = 0
LARGEST = 0.9
"""Largest learning rate that is tried; γ < 2 is stable here."""
READING = """
The exponents of the exponential-graph paper are upper bounds: they use the slowest mode for all
modes. "Smooth" data differ along the slowest mode of the ring only, and T* reaches the bound n¹¹ on
the ring; for "random" data, T* grows as n⁹ on the ring for large n. For "noise", T* depends on the
mean of λ²/(1 − λ²) over the modes, which grows as n on a ring, and not as n²: T* grows as n⁵
instead of n⁷ for large n. The logarithmic factors of the grid are steep at these sizes. For
"noise", the grid still needs fewer iterations than the one-peer sequence, whose T* has a larger
constant and a smaller slope."""
DATA = ("noise", "random", "smooth")


def models(
    gossip_graph: Graph, name: str, options: dict, b: torch.Tensor, lr: float, noise: float = 0.0
) -> Iterator[torch.Tensor]:
    """Yield the models (n, d) after each step of a method whose models begin at the optimum.

    :param gossip_graph: graph of n nodes
    :param name: name of the algorithm
    :param options: its options
    :param b: minima (n, d)
    :param lr: learning rate
    :param noise: standard deviation of the gradient noise per coordinate
    """
    random = torch.Generator().manual_seed(SEED)

    def gradient(x: torch.Tensor) -> torch.Tensor:
        noisy = noise * torch.randn(b.shape, generator=random, dtype=b.dtype) if noise else 0
        return x - b + noisy

    method = algorithms.build(name, "sgd", options, 0, gossip_graph)
    return steps(method, gossip_graph, b.mean(0).expand_as(b).clone(), gradient, lr)


def minima(n: int, data: str, width: int = 1) -> torch.Tensor:
    """Return the minima b_i as an array (n, width), or (n, WIDTH) for the data "noise".

    For "noise", all values are 0. Otherwise, each column has the mean 0 and the mean square 1 over
    nodes.

    :param n: number of nodes
    :param data: "noise", "random" or "smooth"
    :param width: number of coordinates of each minimum
    """
    random = np.random.default_rng(SEED)
    if data == "noise":
        return torch.zeros(n, WIDTH, dtype=torch.float64)
    drawn = random.standard_normal((n, width))
    if data == "smooth":
        drawn = np.cos(2 * np.pi * np.arange(n) / n)[:, None].repeat(width, 1)
    drawn -= drawn.mean(0)
    return torch.from_numpy(drawn / np.sqrt((drawn**2).mean(0)))


# -- deviation of the nodes from the mean model: by formula, and measured -------------------------


def expected(gossip_graph: Graph, data: str, lr: float) -> float:
    """Return the stationary E (x_i − x̄)² of D-PSGD per coordinate, by a formula.

    It is a mean over nodes and over the rounds of a period.

    :param gossip_graph: the graph
    :param data: "noise", "random" or "smooth"
    :param lr: learning rate
    """
    n = gossip_graph.n
    period = gossip_graph.period or 1
    ws = [gossip_graph.matrix(t) - 1 / n for t in range(period)]
    if data != "noise":
        width = 64 if data == "random" else 1
        b = minima(n, data, width).numpy()
        x = quadratic_limit(gossip_graph, b, np.ones_like(b), lr)
        squares = []
        for w in ws:
            x = w @ (x - lr * (x - b))
            squares.append((x**2).mean())
        return float(np.mean(squares))
    map_ = np.eye(n)
    add = np.zeros((n, n))
    for w in ws:
        map_ = (1 - lr) * w @ map_
        add = w @ ((1 - lr) ** 2 * add + lr**2 * np.eye(n)) @ w.T
    spread = solve_discrete_lyapunov(map_, add)
    variances = []
    for w in ws:
        spread = w @ ((1 - lr) ** 2 * spread + lr**2 * np.eye(n)) @ w.T
        variances.append(np.trace(spread) / n)
    return float(np.mean(variances))


def measured(gossip_graph: Graph, data: str, lr: float) -> float:
    """Return the stationary E (x_i − x̄)² of D-PSGD per coordinate, measured with the package.

    The parameters are the parameters of :func:`expected`.
    """
    b = minima(gossip_graph.n, data, 64 if data == "random" else 1)
    period = gossip_graph.period or 1
    gap = spectral_gap(gossip_graph) if period == 1 else 1 / period
    settle = round((3 if data == "noise" else 16) / gap / period + 2) * period
    window = period * max(1, round((400 if data == "noise" else 1) / period))
    total = 0.0
    run = models(gossip_graph, "dsgd", {}, b, lr, float(data == "noise"))
    for t, x in zip(range(settle + window), run, strict=False):
        if t >= settle:
            total += float((x - x.mean(0)).square().mean())
    return total / window


def parallel_error(n: int, lr: float) -> float:
    """Return the stationary mean square error of parallel SGD per coordinate."""
    return lr / (2 - lr) / n


def rate_of_equal_errors(
    excess: Callable[[Graph, str, float], float], gossip_graph: Graph, data: str, lr: float
) -> float:
    """Return the learning rate γ* at which the excess error equals the error of parallel SGD.

    The excess error of D-PSGD is E (x_i − x̄)². The secant method on logarithms finds the rate. The
    result is NaN if the excess is below the error of parallel SGD even at the rate LARGEST: there
    are then no transient iterations.

    :param excess: function that returns the excess error, :func:`expected` or :func:`measured`
    :param gossip_graph: the graph
    :param data: "noise", "random" or "smooth"
    :param lr: learning rate at which the search begins
    """

    def above(rate: float) -> float:
        return float(
            np.log(excess(gossip_graph, data, rate) / parallel_error(gossip_graph.n, rate))
        )

    if above(LARGEST) < 0:
        return float("nan")
    points = [(np.log(lr), above(lr))]
    slope = 1.0
    for _ in range(6):
        x, y = points[-1]
        if abs(y) < 0.005:
            break
        if len(points) > 1 and abs(x - points[-2][0]) > 1e-3:
            slope = max((y - points[-2][1]) / (x - points[-2][0]), 0.2)
        lr = float(min(np.exp(x - y / slope), LARGEST))
        points.append((np.log(lr), above(lr)))
    return lr


def transients(out: Callable[[str], None]) -> None:
    """Write tables of T*, the number of transient iterations, for four graphs of four sizes.

    There is a table for each kind of data. It also contains the slope of log T* over log n, and the
    bound of the exponential-graph paper. The text `READING` follows the tables.

    :param out: function that writes a text
    """
    ranked = {}
    for data in DATA:
        longest = {}
        heads = " | ".join(f"n = {n}: measured, formula" for n in SIZES)
        out(f"\n| T*, {data} | {heads} | slope | paper |\n|{'---|' * (len(SIZES) + 3)}")
        for name, orders in GRAPHS.items():
            iterations = []
            cells = []
            for n in SIZES:
                gossip_graph = graph(name, n)
                by_formula = rate_of_equal_errors(expected, gossip_graph, data, 0.1 / n)
                start = by_formula if np.isfinite(by_formula) else 0.1 / n
                iterations.append(
                    n / rate_of_equal_errors(measured, gossip_graph, data, start) ** 2
                )
                cells.append(
                    f"{iterations[-1]:.3g}, {n / by_formula**2:.3g}".replace("nan", "none")
                )
            finite = np.isfinite(iterations)
            slope = np.polyfit(np.log(SIZES)[finite], np.log(iterations)[finite], 1)[0]
            longest[name] = iterations[-1]
            order = orders[0] if data == "noise" else orders[1]
            out(f"| {name} | {' | '.join(cells)} | {slope:.1f} | {order} |")
        ranked[data] = sorted(longest, key=longest.__getitem__, reverse=True)
    for data, names in ranked.items():
        out(f"\nOrder at n = {SIZES[-1]}, {data}: {' > '.join(names)}.")
    out(READING)


# -- limits and rates ------------------------------------------------------------------------------


def limits(out: Callable[[str], None]) -> None:
    """Write a table of the stationary errors of methods at n = 16, measured and by formula.

    Its last rows contain the distance of one-peer rounds from the exact average.

    :param out: function that writes a text
    """
    b = minima(N, "random", 4)
    out(f"\n| root mean square of x_i − x*, n = {N}, rate .05 | measured | formula | difference |")
    out("|---|---|---|---|")
    for name in GRAPHS:
        for style in ("atc", "awc"):
            gossip_graph = graph(name, N)
            limit = quadratic_limit(gossip_graph, b.numpy(), np.ones_like(b.numpy()), 0.05, style)
            x = model_after(models(gossip_graph, "dsgd", {"style": style}, b, 0.05), 1200)
            root, formula = (float(np.sqrt((a**2).mean())) for a in (x.numpy(), limit))
            difference = float(np.abs(x.numpy() - limit).max())
            out(
                f"| D-PSGD {style.upper()}, {name} | {root:.6f} | {formula:.6f} "
                f"| {difference:.0e} |"
            )
    for name, options in (("d2", {"lazy": True}), ("dsgt", {}), ("dsgt", {"style": "awc"})):
        x = model_after(models(graph("ring", N), name, options, b, 0.05), 3000)
        settings = "".join(f" {k} = {v}" for k, v in options.items())
        root = float(x.square().mean().sqrt())
        out(f"| {name}{settings}, ring | {root:.0e} | 0 | {root:.0e} |")
    for n in (4, 16, 64):
        gossip_graph = graph("one-peer-exponential", n)
        x = torch.eye(n, dtype=torch.float64)
        for t in range(gossip_graph.period or 1):
            x = torch.from_numpy(gossip_graph.matrix(t)) @ x
        difference = float((x - 1 / n).abs().max())
        out(
            f"| one-peer, {n} nodes: largest entry of Π W − J after {gossip_graph.period} rounds | "
            f"{difference:.0e} | 0 | {difference:.0e} |"
        )


def choco(out: Callable[[str], None]) -> None:
    """Write a table of the rate at which CHOCO reaches consensus, and the bound of its theorem.

    :param out: function that writes a text
    """
    out(f"\n| CHOCO, top-k, factor of ‖X − X̄‖² per round, n = {N} | measured | theorem, at most |")
    out("|---|---|---|")
    for name in ("ring", "exponential"):
        for share, size in ((0.05, 0.1), (0.25, 0.3)):
            gossip_graph = graph(name, N)
            draw = torch.Generator().manual_seed(0)
            method = algorithms.build("choco", "sgd", {"consensus_step": size}, 0, gossip_graph)
            wire = lossy_wires.wire("top-k", 127, share, 0)
            x = torch.randn(N, 512, generator=draw)
            run = steps(method, gossip_graph, x, torch.zeros_like, 1e-30, wire)
            distances = [float((x - x.mean(0)).double().square().sum()) for x in islice(run, 200)]
            # Use only distances that rounding does not affect.
            exact = [t for t in range(200) if distances[t] > 1e-6 * distances[0]]
            half = len(exact) // 2
            rate = (distances[exact[-1]] / distances[half]) ** (1 / (exact[-1] - half))
            # Koloskova, Stich, Jaggi, ICML 2019, theorem 2
            bound = 1 - spectral_gap(gossip_graph) ** 2 * share / 82
            out(f"| {name}, {share:.0%} kept, step {size} | {rate:.4f} | {bound:.6f} |")


def main(arguments: list[str] | None = None) -> int:
    """Measure all tables, print them, and write them to the file --out; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the tables there, in Markdown")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    lines: list[str] = []

    def out(text: str) -> None:
        lines.append(text)
        print(text, flush=True)

    begin = time.monotonic()
    for part in (limits, choco, transients):
        part(out)
    if options.out:
        about = (__doc__ or "").partition("\n\n")[2].partition("\n\n")[2]
        command = f"Measured: `python jobs/claims/theory.py`, {origin()}."
        head = f"# Theory and measurement\n\n{about}\n{command}\n"
        options.out.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")
    print(f"{time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Theory and measurement: limits, rates and transient iterations on quadratics.

    python tools/claims/theory.py --out jobs/claims/THEORY.md        # two minutes

Node i minimizes f_i(x) = ½ ‖x − b_i‖², in float64, by the package's methods in its simulator. The
gradient noise has standard deviation σ = 1 per coordinate; the b_i have mean square ζ² = 1 per
coordinate over the nodes. With a doubly stochastic W the mean model x̄ follows parallel SGD exactly,
so one run measures both.

T* is the number of *transient iterations*, as in the papers: T steps at the rate √(n/T) end within
twice parallel SGD's mean square distance to the optimum for all T > T*. At a small rate γ the error
becomes stationary after about 1/γ steps. So γ* is the rate at which the excess over parallel SGD
equals parallel SGD's own error, and T* = n/γ*².

Data: "noise": all b_i are equal. "random": b_i drawn at random; "smooth": b_i = cos(2π i/n); in
both, only parallel SGD's error includes gradient noise. "none": the error is within twice
parallel SGD's at every rate up to 0.9.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import toy
from scipy.linalg import solve_discrete_lyapunov
from table import origin

from mpigossip import algorithms
from mpigossip.graphs import Graph, graph
from mpigossip.graphs.spectral import spectral_gap
from mpigossip.graphs.theory import quadratic_limit
from mpigossip.mixing import compressors

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
The paper's exponents are upper bounds: they use the slowest of the n modes for all modes.
"Smooth" data differ along that mode only and reach the ring's n¹¹; "random" data grow as n⁹ on
the ring. Noise depends on the mean of λ²/(1 − λ²) over the modes, which grows as n on a ring, not
as n²: n⁵ instead of n⁷ for large n. The grid's logarithmic factors are steep at these sizes. With
noise alone the grid still needs fewer iterations than the one-peer sequence, which has a larger
constant and a smaller slope."""
DATA = ("noise", "random", "smooth")


def models(
    made: Graph, name: str, options: dict, b: torch.Tensor, lr: float, noise: float = 0.0
) -> Iterator[torch.Tensor]:
    """Yield the models (n, d) after each step of a method that begins at the optimum."""
    random = torch.Generator().manual_seed(SEED)

    def gradient(x: torch.Tensor) -> torch.Tensor:
        noisy = noise * torch.randn(b.shape, generator=random, dtype=b.dtype) if noise else 0
        return x - b + noisy

    method = algorithms.build(name, "sgd", options, 0, made)
    return toy.steps(method, made, b.mean(0).expand_as(b).clone(), gradient, lr)


def minima(n: int, data: str, width: int = 1) -> torch.Tensor:
    """Return the b_i (n, width): mean 0, mean square over nodes 1 in each column; 0 for "noise"."""
    random = np.random.default_rng(SEED)
    if data == "noise":
        return torch.zeros(n, WIDTH, dtype=torch.float64)
    drawn = random.standard_normal((n, width))
    if data == "smooth":
        drawn = np.cos(2 * np.pi * np.arange(n) / n)[:, None].repeat(width, 1)
    drawn -= drawn.mean(0)
    return torch.from_numpy(drawn / np.sqrt((drawn**2).mean(0)))


# -- what nodes are off by beyond the mean model: by formula, and measured -------------------------


def expected(made: Graph, data: str, lr: float) -> float:
    """Return the stationary E (x_i − x̄)² of D-PSGD per coordinate, over nodes and a period."""
    n = made.n
    period = made.period or 1
    ws = [made.matrix(t) - 1 / n for t in range(period)]
    if data != "noise":
        width = 64 if data == "random" else 1
        b = minima(n, data, width).numpy()
        x = quadratic_limit(made, b, np.ones_like(b), lr)
        found = []
        for w in ws:
            x = w @ (x - lr * (x - b))
            found.append((x**2).mean())
        return float(np.mean(found))
    map_ = np.eye(n)
    add = np.zeros((n, n))
    for w in ws:
        map_ = (1 - lr) * w @ map_
        add = w @ ((1 - lr) ** 2 * add + lr**2 * np.eye(n)) @ w.T
    spread = solve_discrete_lyapunov(map_, add)
    found = []
    for w in ws:
        spread = w @ ((1 - lr) ** 2 * spread + lr**2 * np.eye(n)) @ w.T
        found.append(np.trace(spread) / n)
    return float(np.mean(found))


def measured(made: Graph, data: str, lr: float) -> float:
    """Return the same quantity, measured in a run of the package."""
    b = minima(made.n, data, 64 if data == "random" else 1)
    period = made.period or 1
    gap = spectral_gap(made) if period == 1 else 1 / period
    settle = round((3 if data == "noise" else 16) / gap / period + 2) * period
    window = period * max(1, round((400 if data == "noise" else 1) / period))
    total = 0.0
    run = models(made, "dsgd", {}, b, lr, float(data == "noise"))
    for t, x in zip(range(settle + window), run, strict=False):
        if t >= settle:
            total += float((x - x.mean(0)).square().mean())
    return total / window


def parallels(n: int, lr: float) -> float:
    """Return the stationary mean square error of parallel SGD per coordinate."""
    return lr / (2 - lr) / n


def meets(excess: Callable[[Graph, str, float], float], made: Graph, data: str, lr: float) -> float:
    """Return the learning rate at which the excess equals the error of parallel SGD.

    The rate is found by the secant method on logarithms, beginning at ``lr``. It is NaN if the
    excess is smaller at every rate up to LARGEST: then there are no transient iterations.
    """

    def above(rate: float) -> float:
        return float(np.log(excess(made, data, rate) / parallels(made.n, rate)))

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
    """Print T* of four graphs at four sizes, its slopes, and the table of the paper."""
    ranked = {}
    for data in DATA:
        longest = {}
        heads = " | ".join(f"n = {n}: measured, formula" for n in SIZES)
        out(f"\n| T*, {data} | {heads} | slope | paper |\n|{'---|' * (len(SIZES) + 3)}")
        for name, orders in GRAPHS.items():
            steps = []
            said = []
            for n in SIZES:
                made = graph(name, n)
                by_hand = meets(expected, made, data, 0.1 / n)
                start = by_hand if np.isfinite(by_hand) else 0.1 / n
                steps.append(n / meets(measured, made, data, start) ** 2)
                said.append(f"{steps[-1]:.3g}, {n / by_hand**2:.3g}".replace("nan", "none"))
            known = np.isfinite(steps)
            slope = np.polyfit(np.log(SIZES)[known], np.log(steps)[known], 1)[0]
            longest[name] = steps[-1]
            order = orders[0] if data == "noise" else orders[1]
            out(f"| {name} | {' | '.join(said)} | {slope:.1f} | {order} |")
        ranked[data] = sorted(longest, key=longest.__getitem__, reverse=True)
    for data, names in ranked.items():
        out(f"\nOrder at n = {SIZES[-1]}, {data}: {' > '.join(names)}.")
    out(READING)


# -- limits and rates ------------------------------------------------------------------------------


def limits(out: Callable[[str], None]) -> None:
    """Print the stationary errors of methods at n = 16, measured and by formula."""
    b = minima(N, "random", 4)
    out(f"\n| root mean square of x_i − x*, n = {N}, rate .05 | measured | formula | difference |")
    out("|---|---|---|---|")
    for name in GRAPHS:
        for style in ("atc", "awc"):
            made = graph(name, N)
            limit = quadratic_limit(made, b.numpy(), np.ones_like(b.numpy()), 0.05, style)
            x = toy.last(models(made, "dsgd", {"style": style}, b, 0.05), 1200)
            found, formula = (float(np.sqrt((one**2).mean())) for one in (x.numpy(), limit))
            apart = float(np.abs(x.numpy() - limit).max())
            out(f"| D-PSGD {style.upper()}, {name} | {found:.6f} | {formula:.6f} | {apart:.0e} |")
    for name, options in (("d2", {"lazy": True}), ("dsgt", {}), ("dsgt", {"style": "awc"})):
        x = toy.last(models(graph("ring", N), name, options, b, 0.05), 3000)
        words = "".join(f" {k} = {v}" for k, v in options.items())
        off = float(x.square().mean().sqrt())
        out(f"| {name}{words}, ring | {off:.0e} | 0 | {off:.0e} |")
    for n in (4, 16, 64):
        made = graph("one-peer-exponential", n)
        x = torch.eye(n, dtype=torch.float64)
        for t in range(made.period or 1):
            x = torch.from_numpy(made.matrix(t)) @ x
        apart = float((x - 1 / n).abs().max())
        out(
            f"| one-peer, {n} nodes: largest entry of Π W − J after {made.period} rounds | "
            f"{apart:.0e} | 0 | {apart:.0e} |"
        )


def choco(out: Callable[[str], None]) -> None:
    """Print the linear rate of consensus of CHOCO, and the rate of its theorem."""
    out(f"\n| CHOCO, top-k, factor of ‖X − X̄‖² a round, n = {N} | measured | theorem, at most |")
    out("|---|---|---|")
    for name in ("ring", "exponential"):
        for kept, size in ((0.05, 0.1), (0.25, 0.3)):
            made = graph(name, N)
            draw = torch.Generator().manual_seed(0)
            method = algorithms.build("choco", "sgd", {"consensus_step": size}, 0, made)
            wire = compressors.wire("top-k", 127, kept, 0)
            x = torch.randn(N, 512, generator=draw)
            run = toy.steps(method, made, x, torch.zeros_like, 1e-30, wire)
            apart = [float((x - x.mean(0)).double().square().sum()) for x in islice(run, 200)]
            known = [t for t in range(200) if apart[t] > 1e-6 * apart[0]]
            half = len(known) // 2
            rate = (apart[known[-1]] / apart[half]) ** (1 / (known[-1] - half))
            # Koloskova, Stich, Jaggi, ICML 2019, theorem 2
            bound = 1 - spectral_gap(made) ** 2 * kept / 82
            out(f"| {name}, {kept:.0%} kept, step {size} | {rate:.4f} | {bound:.6f} |")


def main(given: list[str] | None = None) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the tables there, in Markdown")
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    lines: list[str] = []

    def out(text: str) -> None:
        lines.append(text)
        print(text, flush=True)

    began = time.monotonic()
    for part in (limits, choco, transients):
        part(out)
    if options.out:
        about = (__doc__ or "").partition("\n\n")[2].partition("\n\n")[2]
        command = f"Measured: `python tools/claims/theory.py`, {origin()}."
        head = f"# Theory and measurement\n\n{about}\n{command}\n"
        options.out.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")
    print(f"{time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Iterations of DeTAG, gradient tracking and D-PSGD until the gradient is small, by spectral gap.

    python jobs/claims/optimal.py            # adds missing results to a file; takes some minutes

Node i minimizes f_i(x) = ½ Σ_k a_k (x_k − b_ik)² without noise. All nodes have the same curvatures
0.1 … 1, so that L = 1 is exact; ‖x*‖ = 1 and x_0 = 0. The b_i differ from x* as cos(2π i/n), which
a ring averages slowest, with mean_i ‖∇f_i(x*)‖² = ζ². The graphs are rings with weights 1/3. An
iteration is one gradient and one exchange. Iterations are counted until
(1/n) Σ_i ‖∇f(x_i)‖² ≤ ε² = 10⁻⁶. Each method uses the learning rate of a geometric grid, and DeTAG
also the phase length, that needs the fewest iterations.

All models stay in two modes of the ring, x_i = x̄ + c cos(2π i/n), which belong to the eigenvalues
1 and λ of W. The program computes only these modes, and D-PSGD by a formula. A test compares the
modes with the package's methods on n nodes.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

HERE = Path(__file__).resolve().parent
RUNS = HERE / "runs.jsonl"
SIZES = (8, 16, 32, 64)
ZETAS = (0.3, 3.0)
DRAWS = 5
EPSILON = 1e-3
LIMIT = 60_000
RATES = 2.0 ** np.arange(-14, 1.3, 1 / 4)
SMALL_RATES = 2.0 ** np.arange(-30, 1.3, 1 / 8)
"""Learning rates of D-PSGD. They are smaller than the rates of other methods, because its models
keep a difference in proportion to the rate."""
CURVATURE = np.geomspace(0.1, 1, 5)
PHASES = (0.5, 1.0, 2.0, 4.0)
"""Phase lengths of DeTAG, in units of 1/√(1 − λ)."""
BAR = 0.25
"""A slope counts as 1 if its whole interval is within this distance of 1."""
Array = np.ndarray


def rho(n: int) -> float:
    """Return the eigenvalue λ of the mode cos(2π i/n) on a ring of n nodes."""
    return (1 + 2 * math.cos(2 * math.pi / n)) / 3


def weights(n: int) -> Array:
    """Return the factors 1 and λ by which a round multiplies the two modes, as an array (2, 1).

    Models in modes have the shape (…, 2, d), so that the factors broadcast over the coordinates.
    """
    return np.array([1.0, rho(n)])[:, None]


def minima(zeta: float, draw: int) -> Array:
    """Return the minima b_i as two modes (2, d): their mean x*, and the amplitude of the cosine.

    :param zeta: ζ, the root mean square over nodes of ‖∇f_i(x*)‖
    :param draw: seed of the random directions
    """
    random = np.random.default_rng((draw, 7))
    best = random.standard_normal(len(CURVATURE))
    wave = random.standard_normal(len(CURVATURE))
    # The gradients at x* shall have the mean square ζ². The mean of cos² over nodes is 1/2.
    wave *= zeta * math.sqrt(2) / np.linalg.norm(wave)
    return np.stack([best / np.linalg.norm(best), wave / CURVATURE])


def squares(x: Array, best: Array) -> Array:
    """Return the mean over nodes of ‖∇f(x_i)‖².

    :param x: models in modes, (…, 2, d)
    :param best: the minimum x*, (d,)
    :return: array (…)
    """
    with np.errstate(over="ignore", invalid="ignore"):
        mean = CURVATURE * (x[..., 0, :] - best)
        amplitude = CURVATURE * x[..., 1, :]
        return (mean**2).sum(-1) + (amplitude**2).sum(-1) / 2


def gossip(b: Array, rate: Array, x: Array, w: Array) -> Iterator[Array]:
    """Yield the models (in modes) of D-PSGD, adapt-then-combine, after each iteration.

    :param b: minima in modes (2, d)
    :param rate: learning rates (rates, 1, 1)
    :param x: initial models in modes (rates, 2, d)
    :param w: factors of a round, from :func:`weights`
    """
    while True:
        x = w * (x - rate * CURVATURE * (x - b))
        yield x


def dpsgd(b: Array, n: int, epsilon: float = EPSILON) -> tuple[int, float]:
    """Return the number of iterations of D-PSGD and the best learning rate, by a formula.

    :func:`gossip` would need too many iterations.

    :param b: minima in modes
    :param n: number of nodes
    :param epsilon: ε, the bound of the gradient's norm
    :return: the number and the rate; 2⁶² and 0 if no rate of `SMALL_RATES` reaches ε
    """
    lam = rho(n)
    best = (2**62, 0.0)
    for rate in SMALL_RATES:
        # The formula holds for rates up to 1/L. Clipping makes it finite for larger ones.
        keep = np.maximum(1 - rate * CURVATURE, 0.0)
        limit = lam * rate * CURVATURE * b[1] / (1 - lam * keep)

        def is_small(t: int, keep=keep, limit=limit) -> bool:
            x = np.stack([b[0] * (1 - keep**t), limit * (1 - (lam * keep) ** t)])
            return bool(squares(x, b[0]) <= epsilon**2)

        high = 1
        while not is_small(high) and high < best[0]:
            high *= 2
        if not is_small(high):
            continue
        low = high // 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if is_small(middle) else (middle, high)
        best = min(best, (high, float(rate)))
    return best


def tracking(b: Array, rate: Array, x: Array, w: Array) -> Iterator[Array]:
    """Yield the models (in modes) of gradient tracking, with one exchange per iteration.

    The parameters are the parameters of :func:`gossip`.
    """
    y = g = CURVATURE * (x - b)
    while True:
        x = w * (x - rate * y)
        after = CURVATURE * (x - b)
        y = w * y + after - g
        g = after
        yield x


def detag(b: Array, rate: Array, x: Array, w: Array, phase: int, eta: float) -> Iterator[Array]:
    """Yield the models (in modes) of DeTAG as in the package (Lu & De Sa, algorithm 2).

    The first four parameters are the parameters of :func:`gossip`.

    :param phase: number of accelerated exchanges for each gradient
    :param eta: momentum η of the accelerated exchanges; 0: plain exchanges
    """
    z = x
    y = np.zeros_like(x)
    g = old = y
    while True:
        # Accelerated gossip uses the previous model, which is reset when a phase begins.
        z_before = z
        y_before = y
        for r in range(phase):
            z, z_before = (1 + eta) * w * z - eta * z_before, z
            y, y_before = (1 + eta) * w * y - eta * y_before, y
            g = g + CURVATURE * (x - b) / phase
            if r < phase - 1:
                yield x
        z = z - rate * y
        y = y + g - old
        old = g
        g = np.zeros_like(g)
        x = z
        yield x


def iterations(models: Iterator[Array], best: Array, limit: int) -> tuple[int, int]:
    """Return the first iteration at which some learning rate reaches ε, and the rate's index.

    If no rate reaches ε before iteration ``limit``, the result is ``limit`` and 0.

    :param models: models in modes (rates, 2, d) after each iteration
    :param best: the minimum x*, (d,)
    :param limit: number of iterations
    """
    for t in range(1, limit):
        is_small = squares(next(models), best) <= EPSILON**2
        if is_small.any():
            return t, int(is_small.argmax())
    return limit, 0


def measure(n: int, zeta: float, draw: int) -> Iterator[dict[str, Any]]:
    """Yield the result of each method on a ring of n nodes, in the form of a line of runs.jsonl.

    :param n: number of nodes
    :param zeta: ζ, the root mean square over nodes of ‖∇f_i(x*)‖
    :param draw: seed of the minima
    """
    b = minima(zeta, draw)
    lam = rho(n)
    w = weights(n)
    rate = RATES[:, None, None]
    x = np.zeros((len(RATES), 2, len(CURVATURE)))
    eta = (1 - math.sqrt(1 - lam**2)) / (1 + math.sqrt(1 - lam**2))
    lengths = sorted({max(1, round(k / math.sqrt(1 - lam))) for k in PHASES})
    results = {"D-PSGD": (*dpsgd(b, n), 1)}
    t, index = iterations(tracking(b, rate, x, w), b[0], LIMIT)
    results["gradient tracking"] = (t, float(RATES[index]), 1)
    for name, fast in (("DeTAG", eta), ("DeTAG, η = 0", 0.0)):
        best = (LIMIT, 0.0, 0)
        for length in lengths:
            models = detag(b, rate, x, w, length, fast if length > 1 else 0.0)
            t, index = iterations(models, b[0], best[0])
            best = min(best, (t, float(RATES[index]), length))
        results[name] = best
    for name, (count, lr, length) in results.items():
        yield {
            "study": "optimal",
            "nodes": n,
            "cell": {"zeta": f"{zeta:g}"},
            "method": name,
            "level": "best",
            "lr": lr,
            "seed": draw,
            "settings": [f"phase={length}"],
            "figures": {"iterations": count},
            "digest": None,
        }


class Slope(NamedTuple):
    """Growth of a method's number of iterations as the spectral gap 1 − λ shrinks."""

    method: str
    zeta: str
    power: float
    """Power of 1/(1 − λ) with which the growth is compared."""
    counts: list[int]
    """Iterations at each size, medians over the draws."""
    values: list[float]
    """Slope of iterations against that power on logarithmic axes, for each draw; 1: as expected."""

    @property
    def against(self) -> str:
        """The power of 1/(1 − λ) with which the growth is compared, as text."""
        return "1/√(1−λ)" if self.power < 1 else "1/(1−λ)"


def slopes_of(lines: Sequence[dict[str, Any]]) -> list[Slope]:
    """Return the slopes of DeTAG against 1/√(1 − λ), and of other methods against 1/(1 − λ).

    DeTAG without acceleration is a control: it is compared with 1/√(1 − λ), too, and its slope must
    not be 1. Methods that need more iterations on the largest ring come first.

    :param lines: lines of runs.jsonl from the study "optimal"
    """
    slopes = []
    for name, zeta in dict.fromkeys((line["method"], line["cell"]["zeta"]) for line in lines):
        matching = [x for x in lines if (x["method"], x["cell"]["zeta"]) == (name, zeta)]
        power = 0.5 if name.startswith("DeTAG") else 1.0
        values = []
        counts = []
        for seed in sorted({x["seed"] for x in matching}):
            results = sorted(
                (x["nodes"], x["figures"]["iterations"]) for x in matching if x["seed"] == seed
            )
            gaps = [-power * math.log(1 - rho(n)) for n, _ in results]
            values.append(float(np.polyfit(gaps, [math.log(t) for _, t in results], 1)[0]))
            counts.append([t for _, t in results])
        middle = np.median(counts, axis=0).astype(int).tolist()
        slopes.append(Slope(name, zeta, power, middle, values))
    return sorted(slopes, key=lambda slope: -slope.counts[-1])


def bound() -> list[float]:
    """Return the theoretical lower bound of iterations on each ring of `SIZES`.

    Each value is a multiple of the bound on the smallest ring.
    """
    return [math.sqrt((1 - rho(SIZES[0])) / (1 - rho(n))) for n in SIZES]


def main(arguments: list[str] | None = None) -> int:
    """Measure the results that are not stored yet, and print the slopes of the iterations."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=RUNS, help="file of results, one JSON object per line"
    )
    options = parser.parse_args(arguments)
    text = options.out.read_text("utf-8") if options.out.exists() else ""
    lines = [x for x in map(json.loads, text.splitlines()) if x["study"] == "optimal"]
    stored = {(x["nodes"], x["cell"]["zeta"]) for x in lines}
    for n, zeta in product(SIZES, ZETAS):
        if (n, f"{zeta:g}") in stored:
            continue
        more = [line for draw in range(DRAWS) for line in measure(n, zeta, draw)]
        with options.out.open("a", encoding="utf-8") as out:
            out.writelines(json.dumps(x, ensure_ascii=False) + "\n" for x in more)
        lines += more
        print(f"n = {n}, ζ = {zeta:g}: measured", flush=True)
    for slope in slopes_of(lines):
        print(
            slope.method,
            slope.zeta,
            slope.counts,
            f"slope {np.mean(slope.values):.2f}",
            slope.against,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

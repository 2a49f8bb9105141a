"""What later methods claim: CECA, EquiTopo, push-sum, and asynchronous runs that were measured.

mpirun -n 8 python tools/bench/asynchronous.py --json >a.json, then measure.py --asynchronous
"""

from __future__ import annotations

import json
import math
from collections import ChainMap
from collections.abc import Iterator

import numpy as np
import torch
from table import Row
from toy import after

from mpigossip import algorithms
from mpigossip.graphs import Graph, graph
from mpigossip.graphs.base import static
from mpigossip.graphs.rounds import Sparse
from mpigossip.graphs.weights import rule


def values(n: int) -> torch.Tensor:
    """Numbers to be averaged, (n, 3) float64."""
    return torch.from_numpy(np.random.default_rng(n).standard_normal((n, 3)))


def ceca(options) -> Iterator[Row]:
    """Exact for any n in the least number of one-peer rounds."""
    worst = 0.0
    for n in range(2, 130):
        made, x = graph("ceca", n), values(n)
        method = algorithms.build("ceca", "sgd", {}, 0, made)
        rounds = math.ceil(math.log2(n))
        mean = after(method, made, x, rounds)
        worst = max(worst, float((mean - x.mean(0)).abs().max()))
    yield Row(
        "CECA exact in ⌈log2 n⌉ one-peer rounds, n = 2 … 129", "Ding et al. 2023",
        "≤ 1e-9", f"furthest from the mean: {worst:.1e}", worst <= 1e-9,
    )  # fmt: skip


def contraction(n: int, eta: float) -> float:
    """‖E WᵀW − J‖ of W = (1 − η) I + η A^(a), a uniform: E ‖Wx − x̄‖² falls by it at least."""
    total = np.zeros((n, n))
    for a in range(1, n):
        shift = np.roll(np.eye(n), a, axis=1)
        w = (1 - eta) * np.eye(n) + eta * (np.eye(n) / n + (n - 1) / n * shift)
        total += w.T @ w / (n - 1)
    return float(np.linalg.norm(total - 1 / n, 2))


def equitopo(options) -> Iterator[Row]:
    """The expected contraction, and what the package's own graph does in 200 drawn rounds."""
    for eta, wanted, holds in (
        (0.5, ".4375 (n = 8), .498 (n = 256)", lambda f: abs(f[8] - 0.4375) < 1e-3
         and abs(f[256] - 0.498) < 1e-3),
        (1.0, ".992 at n = 256", lambda f: abs(f[256] - 0.992) < 1e-3),
    ):  # fmt: skip
        found = {n: contraction(n, eta) for n in (8, 64, 256)}
        made, x = graph("od-equidyn", 64, eta=eta), values(64) - values(64).mean(0)
        first = float(x.norm())
        for t in range(40):
            x = torch.from_numpy(made.matrix(t)) @ x
        rate = (float(x.norm()) / first) ** (2 / 40)
        words = ", ".join(f"n = {n}: {value:.4f}" for n, value in found.items())
        yield Row(
            f"OD-EquiDyn, η = {eta:g}: factor of E ‖x − x̄‖² a round",
            "Song et al. 2022", wanted,
            f"{words}; 40 rounds drawn, n = 64: {rate:.3f} a round", holds(found),
        )  # fmt: skip


def irregular(n: int) -> Graph:
    """Directed and irregular: a directed ring, and node 0 sends to every third node too."""
    edges = {(i, (i + 1) % n) for i in range(n)} | {(0, j) for j in range(2, n, 3)}
    source, to = np.array(sorted(edges)).T
    return static(rule("push")(Sparse.from_edges(n, to, source, 1.0)), "irregular")


def push_sum(options) -> Iterator[Row]:
    """On a graph whose rows don't sum to one only push-sum finds the mean."""
    n, found = 11, {}
    x, made = values(11), irregular(11)
    rows = static(rule("uniform")(made.round(0)), "rows")
    for name, on in (("sgp", made), ("dsgd", rows)):
        method = algorithms.build(name, "sgd", {}, 0, on)
        mixed = after(method, on, x, 400)
        found[name] = (
            float((mixed - x.mean(0)).abs().max()), float((mixed - mixed.mean(0)).abs().max())
        )  # fmt: skip
    yield Row(
        f"directed irregular graph of {n} nodes, 400 rounds: distance from the true mean",
        "Assran et al. 2019", "sgp ≤ 1e-9, plain gossip > 1e-2",
        f"sgp {found['sgp'][0]:.1e}; dsgd (rows sum to one) {found['dsgd'][0]:.2g}, though its "
        f"nodes agree to {found['dsgd'][1]:.0e}",
        found["sgp"][0] <= 1e-9 and found["dsgd"][0] > 1e-2,
    )  # fmt: skip


def asynchronous(options) -> Iterator[Row]:
    """Rows from what tools/bench/asynchronous.py --json gave, in one file or several."""
    if not options.asynchronous:
        return
    rows = ChainMap(*(json.loads(path.read_text("utf-8")) for path in options.asynchronous))
    patterns = {
        "moving": "one at a time, drawn anew every 10 steps",
        "one": "rank 0 in a random half of its steps; who waits goes on averaging",
    }
    for pattern, said in patterns.items():
        waiting, free = (rows[f"{pattern}, {kind}"] for kind in ("synchronous", "asynchronous"))
        ratio = free["steps_per_second"] / waiting["steps_per_second"]
        lost = waiting["accuracy"] - free["accuracy"]
        yield Row(
            f"asynchronous, 8 ranks, 4 x: {said}", "Lian et al. 2018",
            "steps/s ≥ 2 x, accuracy within 1.5 points",
            f"{waiting['steps_per_second']:.0f} → {free['steps_per_second']:.0f} steps/s over all "
            f"ranks ({ratio:.2f} x; whole run {free['whole_run'] / waiting['whole_run']:.2f} x), "
            f"accuracy {waiting['accuracy']:.1%} → {free['accuracy']:.1%} in {free['steps']} "
            f"steps; copies at most {free['oldest']:.0f} rounds apart, {free['skipped']} exchanges "
            "left out",
            ratio >= 2 and lost <= 0.015,
        )  # fmt: skip
    torn = rows["torn"]
    yield Row(
        f"{torn['rounds']} rounds on each of 8 ranks under random delays", "own bar",
        "no torn copy used", f"{torn['used']} used; {torn['seen']} torn reads seen and left out",
        torn["used"] == 0,
    )  # fmt: skip


CLAIMS = (ceca, equitopo, push_sum, asynchronous)

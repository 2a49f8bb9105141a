"""Claims on graphs: spectral gaps, exact averages, weights, the topology search, and speed."""

import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from time import process_time
from timeit import timeit

import networkx
import numpy as np
import torch
from table import Row

from mpigossip.cluster.ranks import SingleProcess
from mpigossip.graphs import graph
from mpigossip.graphs.exponential import rounds_needed
from mpigossip.graphs.finite_time import factors
from mpigossip.graphs.search import search
from mpigossip.graphs.spectral import consensus_rate, residue, spectral_gap
from mpigossip.models import loss_and_correct
from mpigossip.training import assemble

RESIDUES = {3: 0.25, 5: 0.2023, 6: 0.2165, 7: 0.125, 12: 0.2091, 24: 0.2073, 25: 0.1921}
"""Residue of one period of the one-peer exponential graph, by number of nodes."""

BASE2_LENGTHS = {
    2: 1,
    3: 3,
    4: 2,
    5: 5,
    6: 4,
    7: 5,
    8: 3,
    9: 7,
    10: 6,
    12: 5,
    15: 7,
    16: 4,
    17: 9,
    20: 7,
    24: 6,
    25: 9,
    31: 9,
    32: 5,
    33: 11,
    40: 8,
    48: 7,
    63: 11,
    64: 6,
}
"""Number of rounds of the Base-2 graph, by number of nodes."""

MIXING = {
    "ring 16": ("ring", 16, 0.9267, 0.9493),
    "lattice 16": ("ring-lattice", 16, 0.7866, 0.8524),
    "4-regular 16": ("random-regular", 16, 0.6745, 0.7222),
    "hypercube 16": ("hypercube", 16, 0.6, 0.6),
    "G(16, 32)": ("G(n, 2n)", 16, 0.8046, 0.8623),
    "star 16": ("star", 16, 0.8824, 0.9375),
    "path 16": ("path", 16, 0.9808, 0.9872),
    "lattice 32": ("ring-lattice", 32, 0.9407, 0.9619),
    "4-regular 32": ("random-regular", 32, 0.8053, 0.8441),
}
"""Spectral radius ρ with the best Laplacian constant, and with Metropolis–Hastings weights."""


def exponential_gap(options) -> Iterator[Row]:
    """Compare the spectral gap of the static exponential graph with its formula."""
    gaps = ((n, spectral_gap(graph("exponential", n))) for n in range(2, 257))
    over = [gap - 2 / (1 + rounds_needed(n)) for n, gap in gaps]
    even = max(map(abs, over[::2]))
    odd = min(over[1::2])
    yield Row(
        "static exponential gap = 2/(1+⌈log2 n⌉) for even n, larger for odd n; n = 2 … 256",
        "Ying et al., NeurIPS 2021",
        "≤ 1e-12; > 0",
        f"even: differs by ≤ {even:.1e}; odd: larger by ≥ {odd:.3f}",
        even <= 1e-12 and odd > 0,
    )


def one_peer_exact(options) -> Iterator[Row]:
    """Check that one-peer graphs of 2^τ nodes average exactly, and that others leave a residue."""
    worst = 0.0
    for tau in range(1, 9):
        n = 2**tau
        cyclic = graph("one-peer-exponential", n)
        drawn = [graph("one-peer-exponential", n, seed=s, order="permuted") for s in range(3)]
        worst = max(worst, *(residue(cyclic, tau, start) for start in range(2 * tau)))
        worst = max(worst, *(residue(g, tau, k * tau) for g in drawn for k in range(4)))
    yield Row(
        "one-peer exponential exact in log2 n rounds, n = 2 … 256: cyclic from any round, permuted "
        "in each period",
        "Ying et al., NeurIPS 2021",
        "≤ 1e-12",
        f"‖ΠW − J‖ ≤ {worst:.1e}",
        worst <= 1e-12,
    )
    found = {n: residue(graph("one-peer-exponential", n)) for n in RESIDUES}
    yield Row(
        "what one period leaves for other n",
        "own arithmetic",
        ", ".join(f"{n}: {value:g}" for n, value in RESIDUES.items()),
        ", ".join(f"{n}: {value:.4f}" for n, value in found.items()),
        all(abs(found[n] - value) < 6e-5 for n, value in RESIDUES.items()),
    )


def finite_time(options) -> Iterator[Row]:
    """Check that Base-(k+1) and hyper-hypercube graphs are exact, short and of degree ≤ k."""
    for k in range(1, 5):
        base = f"base-{k + 1}"
        smooth = [n for n in range(2, 130) if factors(n, k + 1)]
        for name, which, graphs in (
            (base, "n = 2 … 129", [graph(base, n) for n in range(2, 130)]),
            (
                "hyper-hypercube",
                f"{len(smooth)} n ≤ 129",
                [graph("hyper-hypercube", n, p=k) for n in smooth],
            ),
        ):
            worst = max(residue(g) for g in graphs)
            degree = max(g.degree for g in graphs)
            used = max(g.period / (2 * math.log(g.n, k + 1) + 2) for g in graphs)
            lengths = {g.n: g.period for g in graphs}
            right = name != "base-2" or BASE2_LENGTHS.items() <= lengths.items()
            note = ", lengths of 6.2 reproduced" * (right and name == "base-2")
            yield Row(
                f"{name} with k = {k} exact for {which}",
                "Takezawa et al., NeurIPS 2023",
                f"≤ 1e-9, length ≤ 2 log n + 2 (base {k + 1}), degree ≤ {k}",
                f"residue {worst:.0e}, longest {used:.2f} of the bound, degree {degree}{note}",
                worst <= 1e-9 and used <= 1 and degree <= k and right,
            )


def laplacian_weights(options) -> Iterator[Row]:
    """Compare Laplacian weights with the best constant to Metropolis–Hastings weights."""
    for label, (name, n, *expected) in MIXING.items():
        drawn = name in ("random-regular", "G(n, 2n)")
        pairs = np.array([_rates(name, n, seed) for seed in range(20 if drawn else 1)])
        found = np.median(pairs, axis=0)
        near = 0.05 if drawn else 6e-5
        ahead = bool((pairs[:, 0] < pairs[:, 1] + 1e-12 * (name == "hypercube")).all())
        yield Row(
            f"ρ by Laplacian and Metropolis weights, {label}" + " (median of 20 draws)" * drawn,
            "own arithmetic" + ", one draw" * drawn,
            "{:.4f}, {:.4f}".format(*expected),
            "{:.4f}, {:.4f}".format(*found) + "; never slower" * ahead,
            ahead and bool((np.abs(found - expected) <= near).all()),
        )


def _rates(name: str, n: int, seed: int) -> list[float]:
    """Return ρ with both kinds of weights; G(n, 2n) is the first connected one from the seed on."""
    drawn = (networkx.gnm_random_graph(n, 2 * n, seed=s) for s in itertools.count(seed, 1000))
    network = next(filter(networkx.is_connected, drawn)) if name == "G(n, 2n)" else name
    rules = ("laplacian", "metropolis-hastings")
    return [consensus_rate(graph(network, n, weights=rule, seed=seed)) for rule in rules]


def topology_search(options) -> Iterator[Row]:
    """Check that the search reaches its limits, and stays connected and within its budget."""
    plans = [(16, 20.0, 0.37), (32, 60.0, 0.23), (64, 60.0, 0.17)]
    kind = "seconds"
    said = "{:g} s on one core"
    if options.quick:
        plans = [(16, 10_000, 0.31)]
        kind = "evaluations"
        said = "{} graphs judged"
    for n, limit, bar in plans:
        found = search(n, degree=4, seed=0, **{kind: limit})
        degrees = np.bincount(np.array(found.edges).ravel(), minlength=n)
        sound = found.spectrum[1] > 1e-9 and degrees.max() <= 4 and len(found.edges) <= 2 * n
        rho = consensus_rate(found.graph())
        agrees = abs(rho - (1 - found.score) / (1 + found.score)) < 1e-9
        yield Row(
            f"topology search, degree 4, n = {n}, {said.format(limit)}",
            "own bar, after Jameel et al. 2020",
            f"r ≥ {bar}, connected, within the budget",
            f"r = {found.score:.4f} after {found.seconds:.1f} s, {found.evaluations} graphs",
            bool(sound and agrees and found.score >= bar),
        )


def speed(options) -> Iterator[Row]:
    """Time `graph show` for 4,096 nodes, and a simulated step relative to its gradients alone."""
    took = {}
    for name in (
        "exponential",
        "ring",
        "ring-lattice",
        "one-peer-exponential",
        "one-peer-hypercube",
        "base-2",
    ):
        begin = sum(os.times()[2:4])  # processor time of finished child processes
        command = [sys.executable, "-m", "mpigossip", "graph", "show", name, "--nodes", "4096"]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        took[name] = sum(os.times()[2:4]) - begin
    yield Row(
        "`graph show`, n = 4,096: circulant and one-peer graphs, processor time of the command",
        "own bar",
        "< 2 s",
        ", ".join(f"{name} {seconds:.2f} s" for name, seconds in took.items()),
        max(took.values()) < 2,
    )
    data = {"source": "synthetic", "samples": 32 * 64, "workers": 0}
    assembly = _nodes(64, data=data, model={"name": "lenet"})
    module = assemble.make_model(assembly.parts.job, assembly.source)
    batches = list(assembly.loader.step(0))

    def gradients() -> None:
        for inputs, targets in batches:
            module.zero_grad()
            loss_and_correct(module(inputs), targets)[0].backward()

    whole, alone = _timed(4 if options.quick else 7, assembly.trainer.step, gradients)
    assembly.close()
    yield Row(
        "64 LeNet nodes (batch 32, CIFAR's shape) simulated: a step against 64 single gradients",
        "own bar",
        "≤ 1.3 times",
        f"{whole * 1e3:.0f} ms against {alone * 1e3:.0f} ms: {whole / alone:.2f} times",
        whole <= 1.3 * alone,
    )


def _nodes(n: int, **sections):
    """Return the assembled nodes of a job."""
    return assemble.assemble(
        assemble.load({"log": {"consensus_every": 0}, **sections}), SingleProcess(), n
    )


def _timed(turns: int, *works: Callable) -> list[float]:
    """Return the smallest processor seconds of each function over all turns."""
    laps = [[timeit(work, timer=process_time, number=1) for work in works] for _ in range(turns)]
    return np.min(laps, axis=0).tolist()


def vectorized(options) -> Iterator[Row]:
    """Compare `node.vmap` with the loop: small models gain, convolutions on a CPU lose."""
    data = {"source": "digits", "batch": 4, "workers": 0}
    for name, n in (("mlp", 256), ("lenet", 64)):
        both = [_nodes(n, data=data, model={"name": name}, node={"vmap": v}) for v in (False, True)]
        loop, vmap = (1e3 * lap for lap in _timed(3, *(one.trainer.step for one in both)))
        ends = [one.trainer.replicas.full[0].clone() for one in both]
        apart = float(torch.dist(*ends) / torch.linalg.norm(ends[0]))
        for one in both:
            one.close()
        yield Row(
            f"node.vmap, {n} {name} nodes on digits, a step",
            "own bar",
            "same numbers to rounding",
            f"loop {loop:.0f} ms, vmap {vmap:.0f} ms; apart {apart:.0e}",
            apart < 1e-5,
        )


CLAIMS = (
    exponential_gap,
    one_peer_exact,
    finite_time,
    laplacian_weights,
    topology_search,
    speed,
    vectorized,
)

"""A seeded search finds the same graph whatever the processor's last bits are."""

import ast
import os
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path

import networkx as nx
import numpy as np
import pytest

from mpigossip.graphs.annealing import CandidateGraph, Screen, SearchTask
from tests.cases import every, on_each

SEARCHES = """
import os, sys
import numpy as np
from mpigossip.graphs.search import search

TASKS = [  # regular, sparse (often in parts while it anneals), other weights
    dict(n=16, degree=4, evaluations=1500),
    dict(n=32, degree=4, evaluations=800, seed=1),
    dict(n=24, degree=3, edges=26, evaluations=800),
    dict(n=12, degree=3, weights="metropolis-hastings", evaluations=1000),
    dict(n=14, edges=17, weights="max-degree", evaluations=1000),
]
found = [search(**task) for task in TASKS]
graphs = [f.edges for f in found]
histories = [[row[1:] for row in f.history] for f in found]
matrix = np.random.default_rng(0).random((40, 40))
bits = np.linalg.eigvalsh(matrix + matrix.T).tobytes() + np.log(matrix).tobytes()
print((graphs, histories, bits))
"""

NEEDS = {
    "Prescott": "pni",
    "Nehalem": "sse4_2",
    "Sandybridge": "avx",
    "Haswell": "avx2 fma",
    "Zen": "avx2 fma",
    "SkylakeX": "avx512f avx512cd avx512bw avx512dq avx512vl",
}
"""Core types that OpenBLAS can be set to, and the flags of /proc/cpuinfo that each requires."""


def flags():
    """Return the flags of this processor in /proc/cpuinfo; an empty set without that file."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    return set(next((line.split() for line in lines if line.startswith("flags")), []))


@cache
def searched(core=None, **more):
    """Search in a child process whose BLAS has a core type; return graphs, histories and bits.

    :param core: core type of OpenBLAS; None: the type of this processor
    :param more: further environment variables
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OPENBLAS")}
    environment |= {"OPENBLAS_VERBOSE": "2", **more}
    if core:
        environment["OPENBLAS_CORETYPE"] = core
    child = subprocess.run(
        [sys.executable, "-c", SEARCHES],
        env=environment,
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    if core and "Core:" not in child.stderr:
        pytest.skip("numpy's BLAS is no OpenBLAS: it takes no core type")
    return ast.literal_eval(child.stdout)


@pytest.mark.parametrize("core", [*map(every, NEEDS)])
def test_search_finds_the_same_graph_on_every_processor(core):
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip(f"{core} is an x86 processor, and this one is {platform.machine()}")
    if missing := sorted(set(NEEDS[core].split()) - flags()):
        pytest.skip(f"this processor can't be {core}: it lacks {', '.join(missing)}")
    assert searched(core)[:2] == searched()[:2]


def test_search_finds_the_same_graph_without_vector_instructions():
    """Without them, logarithms, exponentials and cosines of NumPy and of the C library differ."""
    from numpy._core._multiarray_umath import __cpu_dispatch__

    plain = searched(
        NPY_DISABLE_CPU_FEATURES=" ".join(__cpu_dispatch__),
        GLIBC_TUNABLES="glibc.cpu.hwcaps=-AVX512F,-AVX2,-FMA,-FMA4",
    )
    assert plain[:2] == searched()[:2]


@pytest.mark.every
def test_core_types_have_bits_of_their_own():
    """If they had equal bits, the test by core types would compare results with themselves."""
    able = [core for core, needs in NEEDS.items() if set(needs.split()) <= flags()]
    if len(able) < 2:
        pytest.skip("no two core types that this processor can be")
    able.sort(key="Nehalem".__ne__)  # the test above has already used this type
    assert any(searched(core)[2] != searched()[2] for core in able)


@on_each("weights", ["laplacian", "max-degree"])
@pytest.mark.parametrize(
    "network",
    [
        nx.cycle_graph(12),
        nx.complete_bipartite_graph(6, 6),
        nx.disjoint_union_all([nx.path_graph(4)] * 3),
    ],
    ids=["cycle", "bipartite", "in parts"],
)
def test_screening_does_not_hang_on_the_basis_of_an_eigenspace(network, weights):
    """Other numbers of the nodes rotate the eigenvectors of multiple eigenvalues, not the gains."""

    def gain(places):
        plan = CandidateGraph(SearchTask(12, 11, 66, weights), 1)
        for i, j in network.edges:
            plan.add((min(places[i], places[j]), max(places[i], places[j]), 0))
        return Screen(plan).gain[np.ix_(places, places)]

    places = np.random.default_rng(0).permutation(12).tolist()
    np.testing.assert_allclose(gain(places), gain(list(range(12))), atol=1e-8)

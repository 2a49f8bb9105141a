"""`mpigossip graph search`: the best sparse graph for n nodes."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpigossip.commands.arguments import amount, command, many, seed, tell, whole
from mpigossip.graphs import GraphError

EXAMPLES = """
mpigossip graph search --nodes 16 --degree 4 --seconds 5 --out searched.json
mpigossip train jobs/digits.toml graph.name=file:searched.json
"""


def add(group) -> None:
    """Add it to the parsers of `graph`."""
    summary = "the best sparse graph for n nodes, by local search"
    search = command(group, "search", _search, summary, EXAMPLES)
    search.add_argument("--nodes", type=many, required=True, metavar="N")
    search.add_argument("--degree", type=whole, metavar="D", help="most neighbours of a node")
    search.add_argument("--edges", type=whole, metavar="E", help="most edges")
    search.add_argument("--weights", default="laplacian", help="rule whose gap is maximized")
    search.add_argument(
        "--seconds", type=amount, metavar="S", help="at most (60 unless --evaluations is given)"
    )
    search.add_argument(
        "--evaluations", type=whole, metavar="K",
        help="graphs judged at most; without --seconds a seed gives one graph on every machine",
    )  # fmt: skip
    search.add_argument("--seed", type=seed, default=0, help="of the search")
    search.add_argument(
        "--circulant", action="store_true", help="all circulant graphs, however long it takes"
    )
    search.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    search.add_argument("--json", action="store_true", help="for programs")


def _search(options) -> None:
    from mpigossip.graphs.files import check_target, save
    from mpigossip.graphs.search import search, search_circulants

    check_target(options.out)
    # a scheduler's end of time keeps the best so far, as Ctrl-C does
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if options.circulant:
        if options.degree is None:
            raise GraphError("--circulant needs --degree")
        found = search_circulants(
            options.nodes,
            options.degree,
            edges=options.edges,
            weights=options.weights,
            progress=_progress,
        )
    else:
        if options.degree is None and options.edges is None:
            raise GraphError("a search needs a budget: --degree D, or --edges E")
        found = search(
            options.nodes,
            degree=options.degree,
            edges=options.edges,
            weights=options.weights,
            seconds=options.seconds,
            evaluations=options.evaluations,
            seed=options.seed,
            progress=_progress,
        )
    if sys.stderr.isatty():
        tell(file=sys.stderr)
    save(found, options.out)
    _report(found, options)


def _progress(part: float, score: float, judged: int) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{part:4.0%}  best {score:.5f}  {judged:,} graphs judged")
        sys.stderr.flush()


def _report(found, options) -> None:
    facts: dict[str, Any] = {
        "n": found.n,
        "score": found.score,
        "edges": len(found.edges),
        "degree": max(_degrees(found.n, found.edges)),
        "evaluations": found.evaluations,
        "seconds": found.seconds,
        "interrupted": found.interrupted,
        "out": str(options.out),
    }
    if options.json:
        tell(json.dumps(facts))
        return
    measure = "r = λ_{n−1}/λ_1" if found.weights == "laplacian" else "1 − ρ(W − J)"
    if found.interrupted:
        tell("interrupted: the best graph so far", file=sys.stderr)
    tell(
        f"{measure} = {found.score:.5f}: {found.n} nodes, {facts['edges']} edges, degree "
        f"{facts['degree']}, {found.evaluations:,} graphs judged in {found.seconds:.1f} s\n"
        f'saved to {options.out}; use it as graph.name = "file:{options.out}"'
    )


def _degrees(n: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    counts = [0] * n
    for i, j in edges:
        counts[i] += 1
        counts[j] += 1
    return counts

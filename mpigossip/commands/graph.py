"""Command `mpigossip graph`, which shows, compares and draws graphs, and searches for them."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpigossip.commands.arguments import amount, command, family, many, print_safe, seed, whole
from mpigossip.config.readable import aligned

if TYPE_CHECKING:
    from mpigossip.graphs import Graph  # It imports NumPy, which no help needs.

FIGURES = (
    ("degree", "degree", "largest number of in-neighbours in a round"),
    ("period", "period", "rounds until a graph repeats; - if never"),
    ("spectral_gap", "gap", "1 - rho(W), for static graphs"),
    ("rounds_to_exact", "exact", "rounds to the exact average; - if never"),
    ("residue_after_period", "residue", "||product of W over a period - J||"),
    ("effective_neighbours", "n_eff", "neighbours in effect, gamma = 0.951"),
    ("vectors_per_round", "vectors", "vectors of model size that a node sends"),
    ("bytes_per_round", "bytes", "bytes that a node sends of --parameters"),
    ("transient_iid", "transient", "steps to linear speed-up, up to a factor"),
    ("transient_non_iid", "non-iid", "transient, if nodes have different data"),
)
"""Numbers that `show` and `compare` print, each as (key, heading of its column, meaning)."""


ONE_NODE = "warning: --nodes 1: a single node exchanges nothing; use --nodes 2 or more"
SHOW = """
mpigossip graph show one-peer-exponential --nodes 8
mpigossip graph show file:searched.json --nodes 16 --json
"""
COMPARE = """
mpigossip graph compare ring exponential base-2 --nodes 12
mpigossip graph compare --nodes 64
"""
SEARCH = """
mpigossip graph search --nodes 16 --degree 4 --seconds 5 --out searched.json
mpigossip train digits graph.name=file:searched.json
"""
DRAW = "mpigossip graph draw base-3 --nodes 9 --out base-3.png"


def add(commands) -> None:
    """Add the command `graph` with its subcommands show, compare, draw and search to the parser."""
    members = "show|compare|draw|search"
    group = family(
        commands, "graph", members, "show, compare, draw and search graphs", SHOW, COMPARE
    )
    summary = "print facts of a graph, and its matrices if they are small"
    show = command(group, "show", _show, summary, SHOW)
    show.add_argument(
        "name", help="name that `graph compare --nodes N` lists, file:PATH, module:function"
    )
    _common(show)
    _sized(show)
    compare = command(group, "compare", _compare, "compare several graphs in a table", COMPARE)
    compare.add_argument("names", nargs="*", help="graphs; default: all that exist for N nodes")
    _common(compare)
    _sized(compare)
    summary = "plot the rounds (up to 64 nodes) and ||product - J|| by round"
    draw = command(group, "draw", _draw, summary, DRAW)
    draw.add_argument("name", help="as for graph show")
    _common(draw)
    draw.add_argument("--out", type=Path, default=Path("graph.png"), metavar="OUT.png")
    _add_search(group)


def _add_search(group) -> None:
    summary = "search for the best sparse graph with N nodes"
    search = command(group, "search", _search, summary, SEARCH)
    search.add_argument("--nodes", type=many, required=True, metavar="N")
    search.add_argument(
        "--degree", type=whole, metavar="D", help="maximum number of neighbours of a node"
    )
    search.add_argument("--edges", type=whole, metavar="E", help="maximum number of edges")
    search.add_argument(
        "--weights", default="laplacian", help="weighting rule whose gap is maximized"
    )
    search.add_argument(
        "--seconds",
        type=amount,
        metavar="S",
        help="time limit; default: 60, or none if --evaluations is given",
    )
    search.add_argument(
        "--evaluations",
        type=whole,
        metavar="K",
        help="maximum number of graphs to evaluate; without --seconds, the result depends on "
        "the seed only",
    )
    search.add_argument("--seed", type=seed, default=0, help="seed of the search")
    search.add_argument(
        "--circulant", action="store_true", help="search all circulant graphs, without a time limit"
    )
    search.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    search.add_argument("--json", action="store_true", help="print JSON, for programs")


def _common(command: argparse.ArgumentParser) -> None:
    command.add_argument("--nodes", type=many, required=True, metavar="N", help="number of nodes")
    command.add_argument("--seed", type=seed, default=0, help="seed of a random graph")
    command.add_argument("--weights", help="weighting rule, in place of the graph's own")
    command.add_argument("--lazy", action="store_true", help="use (I + W)/2 in place of W")
    command.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option as in [graph] of a job",
    )
    command.add_argument("--json", action="store_true", help="print JSON, for programs")


def _sized(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--parameters", type=whole, metavar="P", help="size of a model: adds the bytes per round"
    )


def _make(name: str, options) -> Graph:
    from mpigossip.config.choices import check_options
    from mpigossip.config.toml import parse_value
    from mpigossip.graphs import BUILDERS, GraphError, graph

    arguments: dict[str, Any] = {}
    for text in options.option:
        key, equals, value = text.partition("=")
        if not equals:
            raise GraphError(
                f'--option "{text}": must have the form KEY=VALUE, such as order=permuted'
            )
        arguments[key] = parse_value(value)
    if name in BUILDERS:
        checked, problems = check_options("option", arguments, (), BUILDERS[name])
        if problems:
            raise GraphError(f'graph "{name}": {"; ".join(problems)}')
        arguments = {key: checked[key] for key in arguments}
    return graph(name, options.nodes, options.weights, options.seed, options.lazy, **arguments)


def _facts(topology: Graph, parameters: int | None) -> dict[str, Any]:
    from mpigossip.graphs.theory import describe

    facts: dict[str, Any] = dict(describe(topology))
    if parameters is not None:
        facts["bytes_per_round"] = round(4 * parameters * facts["vectors_per_round"])
    return facts


def _as_json(facts: Any) -> str:
    """Return the JSON of a dict, or of a list of dicts.

    A value that is infinite becomes null, because JSON has no infinity.
    """
    if isinstance(facts, list):
        return f"[{', '.join(map(_as_json, facts))}]"
    inf = float("inf")
    return json.dumps({key: None if value == inf else value for key, value in facts.items()})


def _show(options) -> None:
    topology = _make(options.name, options)
    facts = _facts(topology, options.parameters)
    if options.json:
        print_safe(_as_json(facts))
        return
    print_safe(topology)
    figures = [
        (f"  {key.replace('_', ' ')}", _number(facts[key]), meaning)
        for key, _, meaning in _figures(facts)
    ]
    print_safe(aligned(figures, left=(0, 2)))
    if facts["least_weight"] < 0:
        print_safe(f"  some weights are negative, down to {facts['least_weight']:.4g}")
    if topology.n == 1:
        print_safe(ONE_NODE)
    if topology.n <= 12 and topology.period is not None:
        for t in range(min(topology.period, 4)):
            print_safe(f"\nW({t}): row i has the weights that node i gives to its senders")
            print_safe(_matrix(topology.matrix(t)))


def _figures(facts: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [figure for figure in FIGURES if figure[0] in facts]


def _matrix(weights) -> str:
    def cell(value: float) -> str:
        return "." if value == 0 else f"{value:.3f}".rstrip("0").rstrip(".")

    return "\n".join("  " + " ".join(f"{cell(v):>6}" for v in row) for row in weights)


def _number(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return str(value)
    for unit, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if 0.995 * unit <= value < 1e15:
            return f"{float(f'{value / unit:.2g}'):g} {word}"
    return f"{value:.4g}"


def _compare(options) -> None:
    from mpigossip.graphs import BUILDERS, GraphError

    rows = []
    refused = None
    for name in options.names or BUILDERS:
        try:
            rows.append(_facts(_make(name, options), options.parameters))
        except GraphError as error:
            if options.names:
                raise
            refused = refused or error
    if refused and not rows:
        raise refused
    if options.json:
        print_safe(_as_json(rows))
        return
    figures = [(key, head) for key, head, _ in _figures(rows[0])]
    tables = []
    # One table would be wider than a terminal, so print two.
    for part in (figures[:5], figures[5:]):
        lines = [[row["name"], *(_number(row[key]) for key, _ in part)] for row in rows]
        tables.append(aligned([["graph", *(head for _, head in part)], *lines]))
    print_safe("\n\n".join(tables))
    if options.nodes == 1:
        print_safe(ONE_NODE)


def _draw(options) -> None:
    from mpigossip.analysis.graph_picture import picture

    topology = _make(options.name, options)
    picture(topology, options.out)
    print_safe(json.dumps({"out": str(options.out)}) if options.json else options.out)


def _search(options) -> None:
    from mpigossip.graphs import GraphError
    from mpigossip.graphs.search import check_target, save, search, search_circulants

    check_target(options.out)
    # The scheduler sends SIGTERM at the end of an allocation. Keep the best graph then, as after
    # Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    budget = {"edges": options.edges, "weights": options.weights, "progress": _progress}
    if options.circulant:
        if options.degree is None:
            raise GraphError("--circulant needs --degree D, the maximum number of neighbours")
        result = search_circulants(options.nodes, options.degree, **budget)
    else:
        if options.degree is None and options.edges is None:
            raise GraphError("a search needs a budget: --degree D, or --edges E")
        result = search(
            options.nodes,
            degree=options.degree,
            seconds=options.seconds,
            evaluations=options.evaluations,
            seed=options.seed,
            **budget,
        )
    if sys.stderr.isatty():
        print_safe(file=sys.stderr)
    save(result, options.out)
    _report(result, options)


def _progress(part: float, score: float, judged: int) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{part:4.0%}  best {score:.5f}  {judged:,} graphs evaluated")
        sys.stderr.flush()


def _report(result, options) -> None:
    facts: dict[str, Any] = {
        "n": result.n,
        "score": result.score,
        "edges": len(result.edges),
        "degree": max(Counter(chain.from_iterable(result.edges)).values(), default=0),
        "evaluations": result.evaluations,
        "seconds": result.seconds,
        "interrupted": result.interrupted,
        "out": str(options.out),
    }
    if options.json:
        print_safe(json.dumps(facts))
        return
    measure = "r = λ_{n−1}/λ_1" if result.weights == "laplacian" else "1 − ρ(W − J)"
    if result.interrupted:
        print_safe("interrupted: this is the best graph so far", file=sys.stderr)
    print_safe(
        f"{measure} = {result.score:.5f}: {result.n} nodes, {facts['edges']} edges, degree "
        f"{facts['degree']}, {result.evaluations:,} graphs evaluated in {result.seconds:.1f} s\n"
        f'saved to {options.out}; use it as graph.name = "file:{options.out}"'
    )

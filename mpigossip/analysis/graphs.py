"""`mpigossip graph …`: facts as text, tables and pictures of graphs, and the topology search."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from mpigossip.graphs import BUILDERS, Graph, GraphError, graph

FIGURES = (
    ("degree", "degree", "in-neighbours in a round, at most"),
    ("period", "period", "rounds after which it repeats; - when drawn anew"),
    ("spectral_gap", "gap", "1 - rho(W), for static graphs"),
    ("rounds_to_exact", "exact", "rounds to the exact average; - when never"),
    ("residue_after_period", "residue", "||product of W over a period - J||"),
    ("effective_neighbours", "n_eff", "effective number of neighbours at gamma = 0.951"),
    ("vectors_per_round", "vectors", "model-sized vectors that a node sends in a round"),
    ("bytes_per_round", "bytes", "float32, that a node sends in a round, for --parameters"),
    ("transient_iid", "transient", "iterations before the linear speed-up, up to a constant"),
    ("transient_non_iid", "non-iid", "the same where nodes have different data"),
)
"""(key, heading, meaning) of the figures of `show` and `compare`."""


def add(commands) -> None:
    """Add show, compare, draw and search to the parser."""
    group = commands.add_parser(
        "graph", help="show, compare, draw and search graphs"
    ).add_subparsers(metavar="show|compare|draw|search", required=True)
    show = _add(group, "show", _show, "facts of a graph, and its matrices where they are small")
    show.add_argument("name", help=f"one of {', '.join(BUILDERS)}, or file:PATH")
    _common(show)
    _sized(show)
    compare = _add(group, "compare", _compare, "a table of several graphs")
    compare.add_argument("names", nargs="*", help="graphs; none: all that n allows")
    _common(compare)
    _sized(compare)
    draw = _add(group, "draw", _draw, "a picture of the graph and of ||product - J|| by rounds")
    draw.add_argument("name", help="as for show")
    _common(draw)
    draw.add_argument("--out", type=Path, default=Path("graph.png"), metavar="OUT.png")
    search = _add(group, "search", _search, "the best sparse graph for n nodes, by local search")
    search.add_argument("--nodes", type=int, required=True, metavar="N")
    search.add_argument("--degree", type=int, metavar="D", help="most neighbours of a node")
    search.add_argument("--edges", type=int, metavar="E", help="most edges")
    search.add_argument("--weights", default="laplacian", help="rule whose gap is maximized")
    search.add_argument("--seconds", type=float, default=60.0, metavar="S")
    search.add_argument("--seed", type=int, default=0, help="of the search")
    search.add_argument(
        "--rounds", type=int, metavar="R", help="a sequence of R one-peer matchings instead"
    )
    search.add_argument(
        "--racks", type=_racks, metavar="4,4|a,b,a,…", help="sizes of racks, or each node's rack"
    )
    search.add_argument(
        "--between", type=float, default=4.0, metavar="COST", help="of an edge between racks (4)"
    )
    search.add_argument(
        "--circulant", action="store_true", help="all circulant graphs, however long it takes"
    )
    search.add_argument("--out", type=Path, required=True, metavar="FILE", help=".json or .h5")
    search.add_argument("--json", action="store_true", help="for programs")


def _add(group, name: str, run, summary: str) -> argparse.ArgumentParser:
    made = group.add_parser(name, help=summary, description=summary)
    made.set_defaults(run=run)
    return made


def _common(command: argparse.ArgumentParser) -> None:
    command.add_argument("--nodes", type=int, required=True, metavar="N", help="of the graph")
    command.add_argument("--seed", type=int, default=0, help="of a random graph")
    command.add_argument("--weights", help="a weighting rule in place of the graph's own")
    command.add_argument("--lazy", action="store_true", help="(I + W)/2")
    command.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="as in a job's [graph]"
    )
    command.add_argument("--json", action="store_true", help="for programs")


def _sized(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--parameters", type=_count, metavar="P", help="of a model: adds the bytes of a round"
    )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number of at least 1")
    return int(text)


def _make(name: str, options) -> Graph:
    from mpigossip.config.toml import check_options, parse_value

    given: dict[str, Any] = {}
    for text in options.option:
        key, equals, value = text.partition("=")
        if not equals:
            raise GraphError(f'--option "{text}": needs the form KEY=VALUE, as in order=permuted')
        given[key] = parse_value(value)
    if name in BUILDERS:
        checked = dict(given)
        if found := check_options("option", checked, (), BUILDERS[name]):
            raise GraphError(f'graph "{name}": {"; ".join(found)}')
        given = {key: checked[key] for key in given}
    return graph(name, options.nodes, options.weights, options.seed, options.lazy, **given)


def _facts(made: Graph, parameters: int | None) -> dict[str, Any]:
    from mpigossip.graphs.theory import describe

    facts: dict[str, Any] = dict(describe(made))
    if parameters is not None:
        facts["bytes_per_round"] = round(4 * parameters * facts["vectors_per_round"])
    return facts


def _show(options) -> None:
    made = _make(options.name, options)
    facts = _facts(made, options.parameters)
    if options.json:
        print(json.dumps(facts))
        return
    print(made)
    for key, _, meaning in _figures(facts):
        print(f"  {key.replace('_', ' '):22} {_number(facts[key]):>10}   {meaning}")
    if facts["least_weight"] < 0:
        print(f"  some weights are negative, down to {facts['least_weight']:.4g}")
    if made.n <= 12 and made.period is not None:
        for t in range(min(made.period, 4)):
            print(f"\nW({t}): row i is what node i gives to each sender")
            print(_matrix(made.matrix(t)))


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
    return f"{value:.4g}"


def _compare(options) -> None:
    rows, refused = [], None
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
        print(json.dumps(rows))
        return
    width = max(len(row["name"]) for row in rows)
    figures = _figures(rows[0])
    print(f"{'graph':{width}} " + " ".join(f"{heading:>9}" for _, heading, _ in figures))
    for row in rows:
        cells = " ".join(f"{_number(row[key]):>9}" for key, _, _ in figures)
        print(f"{row['name']:{width}} {cells}")


def _draw(options) -> None:
    made = _make(options.name, options)
    picture(made, options.out)
    print(json.dumps({"out": str(options.out)}) if options.json else options.out)


def picture(made: Graph, out: Path) -> None:
    """Draw who sends to whom in the first rounds, and ‖Π W − J‖ against rounds, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from mpigossip.graphs.spectral import residues

    shown = min(made.period or 4, 4)
    figure = Figure(figsize=(3.1 * shown + 4.6, 3.9), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, shown + 1, width_ratios=[1] * shown + [1.35])
    for t in range(shown):
        _draw_round(axes[t], made, t)
    count = min(max(2 * (made.period or 1), 12), 60)
    left = residues(made, count)
    axis = axes[-1]
    axis.semilogy(range(len(left)), [max(value, 1e-17) for value in left], marker="o", ms=4)
    axis.set(
        xlabel="rounds", ylabel=r"$\|W(t-1)\cdots W(0) - J\|_2$", title="Distance from the average"
    )
    axis.grid(alpha=0.4)
    figure.suptitle(fill(str(made), 26 * (shown + 1)), fontsize=10)
    try:
        figure.savefig(out, dpi=130)
    except (OSError, ValueError) as error:
        raise GraphError(f'can\'t write "{out}": {error}') from error


def _draw_round(axis, made: Graph, t: int) -> None:
    """Nodes on a circle, an arrow from each sender to who receives."""
    from math import cos, pi, sin

    n = made.n
    places = [(sin(2 * pi * i / n), cos(2 * pi * i / n)) for i in range(n)]
    for i in range(n):
        for j in made.neighbours(t, i)[0] if n <= 64 else ():
            axis.annotate(
                "", places[i], places[int(j)],
                arrowprops={"arrowstyle": "-|>", "color": "#0072b2", "alpha": 0.75, "lw": 1.1,
                            "shrinkA": 9, "shrinkB": 9},
            )  # fmt: skip
    size = 190 if n <= 16 else max(12, 2600 / n)
    axis.scatter(*zip(*places, strict=True), s=size, color="#e8eef4", edgecolor="#333333", zorder=3)
    if n <= 32:
        for i, (x, y) in enumerate(places):
            axis.text(
                x, y, str(i), ha="center", va="center", fontsize=8 if n <= 16 else 6, zorder=4
            )
    axis.set(aspect="equal", xlim=(-1.25, 1.25), ylim=(-1.25, 1.25))
    axis.set_axis_off()
    first = f" (of a period of {made.period})" if t == 0 and (made.period or 0) > 4 else ""
    left_out = "" if n <= 64 else " (arrows left out)"
    axis.set_title(f"round {t}{first}{left_out}", fontsize=10)


def _search(options) -> None:
    from mpigossip.graphs.files import check_target, save
    from mpigossip.graphs.search import search, search_circulants

    check_target(options.out, sequence=options.rounds is not None)
    # a scheduler's end of time keeps the best so far, as Ctrl-C does
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if options.rounds is not None:
        _search_matchings(options)
        return
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
            raise GraphError("a search needs a budget: --degree D, --edges E, or --rounds R")
        found = search(
            options.nodes,
            degree=options.degree,
            edges=options.edges,
            weights=options.weights,
            seconds=options.seconds,
            seed=options.seed,
            progress=_progress,
        )
    if sys.stderr.isatty():
        print(file=sys.stderr)
    save(found, options.out)
    _report(found, options)


def _racks(text: str) -> list[str]:
    """Racks of the nodes: "4,4" gives two racks of four, "a,b,a" names one for each node."""
    words = [word.strip() for word in text.split(",")]
    if all(word.isdigit() for word in words):
        return [str(k) for k, size in enumerate(words) for _ in range(int(size))]
    return words


def _search_matchings(options) -> None:
    from mpigossip.graphs.files import save
    from mpigossip.graphs.matchings import search_matchings

    if options.degree is not None or options.edges is not None or options.circulant:
        raise GraphError("--rounds searches one-peer matchings: leave --degree and --edges out")
    if options.weights != "laplacian":
        raise GraphError("--rounds searches matchings, pairs that average: leave --weights out")
    found = search_matchings(
        options.nodes, options.rounds, racks=options.racks, between=options.between,
        seconds=options.seconds, seed=options.seed, progress=_progress,
    )  # fmt: skip
    if sys.stderr.isatty():
        print(file=sys.stderr)
    save(found, options.out)
    facts = {key: getattr(found, key) for key in ("n", "score", "residue", "cost", "evaluations")}
    facts |= {"rounds": len(found.rounds), "seconds": found.seconds, "out": str(options.out)}
    if options.json:
        print(json.dumps(facts))
        return
    print(
        f"{found.n} nodes, {len(found.rounds)} rounds: a period leaves {found.residue:.3g} of the "
        f"distance at a cost of {found.cost:.3g} ({found.evaluations:,} sequences judged in "
        f"{found.seconds:.1f} s)\nsaved to {options.out}; use it as graph.name = "
        f'"file:{options.out}"'
    )


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
        print(json.dumps(facts))
        return
    measure = "r = λ_{n−1}/λ_1" if found.weights == "laplacian" else "1 − ρ(W − J)"
    if found.interrupted:
        print("interrupted: the best graph so far", file=sys.stderr)
    print(
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

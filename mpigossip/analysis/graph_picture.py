"""Plot of a graph: its edges in the first rounds, and the nodes' distance from their average."""

from pathlib import Path
from textwrap import fill

from mpigossip.graphs import Graph, GraphError
from mpigossip.store import StoreError
from mpigossip.store.hdf5 import replacing


def picture(graph: Graph, out: Path) -> None:
    """Draw the edges of at most four rounds, and ‖W(t−1) … W(0) − J‖ against the round t.

    The norm is the distance from the exact average J = 11ᵀ/n after t rounds.

    :param graph: the graph
    :param out: file to write, in the format of its suffix; without a suffix, as PNG
    :raises GraphError: if the format of the file is unknown
    :raises StoreError: if the file can't be written
    """
    from matplotlib.figure import Figure

    from mpigossip.graphs.spectral import residues

    shown = min(graph.period or 4, 4)
    columns = 2 if shown in (1, 3) else 3  # At most three panels per row are readable on a page.
    rows = -(-(shown + 1) // columns)
    wide = 3.4 if graph.n <= 16 or shown > 1 else 5.0
    figure = Figure(figsize=(wide * columns, 0.8 + wide * rows), dpi=130, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for t in range(shown):
        _draw_round(axes[t], graph, t)
    for axis in axes[shown + 1 :]:
        axis.set_axis_off()
    count = min(max(2 * (graph.period or 1), 12), 60)
    distances = residues(graph, count)
    axis = axes[shown]
    axis.plot(range(len(distances)), [max(value, 1e-17) for value in distances], marker="o", ms=4)
    axis.set_yscale("log" if min(distances) < 0.1 else "linear")
    axis.set(
        xlabel="rounds", ylabel=r"$\|W(t-1)\cdots W(0) - J\|_2$", title="Distance from the average"
    )
    axis.grid(alpha=0.4)
    title = str(graph).removeprefix("Graph(").removesuffix(")")
    figure.suptitle(fill(title, 36 * columns), fontsize=10)
    try:
        with replacing(Path(out)) as temporary:
            figure.savefig(temporary, dpi=130, format=temporary.suffix[1:] or "png")
    except StoreError:
        raise
    except ValueError as error:
        raise GraphError(f'can\'t write "{out}": {error}; give the path of a .png file') from error


def _draw_round(axis, graph: Graph, t: int) -> None:
    """Draw the nodes on a circle, with arrows to their out-neighbours in round ``t``.

    The colour of an arrow shows its length. More than 32 nodes get lines without heads, and more
    than 64 nodes no arrows.
    """
    from math import cos, pi, sin

    from matplotlib import colormaps

    n = graph.n
    colours = colormaps["viridis"]
    thin = n > 16
    positions = [(sin(2 * pi * i / n), cos(2 * pi * i / n)) for i in range(n)]
    for i in range(n):
        for j in graph.neighbours(t, i)[0] if n <= 64 else ():
            # A value of 1 is the distance between opposite nodes of the circle.
            far = min((i - j) % n, (j - i) % n) / max(1, n // 2)
            shrink = 2 if thin else 9
            axis.annotate(
                "",
                positions[i],
                positions[int(j)],
                arrowprops={
                    "arrowstyle": "-" if n > 32 else "-|>",
                    "color": colours(0.85 * far),
                    "alpha": 0.75,
                    "lw": 0.7 if thin else 1.1,
                    "shrinkA": shrink,
                    "shrinkB": shrink,
                },
            )
    size = 190 if n <= 16 else max(12, 2600 / n)
    axis.scatter(
        *zip(*positions, strict=True), s=size, color="#e8eef4", edgecolor="#333333", zorder=3
    )
    every, far, points = (1, 1.0, 8 if n <= 16 else 6) if n <= 32 else (-(-n // 8), 1.13, 8)
    # If there are many nodes, only some of them are labelled, outside the circle.
    for i, (x, y) in list(enumerate(positions))[::every]:
        axis.text(far * x, far * y, str(i), ha="center", va="center", fontsize=points, zorder=4)
    axis.set(aspect="equal", xlim=(-1.25, 1.25), ylim=(-1.25, 1.25))
    axis.set_axis_off()
    first = f" (of a period of {graph.period})" if t == 0 and (graph.period or 0) > 4 else ""
    left_out = "" if n <= 64 else " (no arrows for more than 64 nodes)"
    axis.set_title(f"round {t}{first}{left_out}", fontsize=10)

"""Draw tools/bench/atlas.png from the table of methods and links in BENCHMARKS.md.

python tools/docs/atlas.py
"""

import re
from pathlib import Path

from matplotlib.figure import Figure

BENCH = Path(__file__).resolve().parents[1] / "bench"


def table(page: str) -> tuple[list[str], list[str], list[list[int]]]:
    """Return the table of methods and links: names of links, names of methods, and percentages.

    A percentage is the part of a step's time that a method spends computing. There is one list of
    percentages per method, with a value for each link.

    :param page: text of BENCHMARKS.md
    """
    (head, body) = re.search(r"^\| (\| 1 Gbit/s.*)\n\|[-|]*\n((?:\|.*\n)*)", page, re.M).groups()
    links = [name.strip() for name in head.strip("| ").split("|")]
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in body.splitlines()]
    return links, [row[0] for row in rows], [[int(c.split()[0]) for c in row[1:]] for row in rows]


def main() -> None:
    """Draw the percentages as a map with a row per method and a column per link."""
    links, methods, values = table((BENCH / "BENCHMARKS.md").read_text("utf-8"))
    figure = Figure(figsize=(8, 5.6), layout="constrained")
    axes = figure.subplots()
    shown = axes.imshow(values, cmap="cividis", vmin=0, vmax=100, aspect="auto")
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            dark = "black" if value > 55 else "white"
            axes.text(x, y, value, ha="center", va="center", color=dark, fontsize=11)
    axes.set_xticks(range(len(links)), [name.replace(", ", ",\n") for name in links], fontsize=9)
    axes.set_yticks(range(len(methods)), methods, fontsize=10)
    axes.set_title("Percentage of a training step that is spent computing, by method and link")
    axes.set_xlabel("link of each of four hosts (one slow link; one node three times slower)")
    figure.colorbar(shown, label="% of a step (more is better)")
    figure.savefig(BENCH / "atlas.png", dpi=130)


if __name__ == "__main__":
    main()

"""Colours, lines and markers of plotted curves."""

from typing import Any

# Okabe and Ito's colours, which colour-blind people can tell apart, each with a line of its own for
# grey print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1.5, 1, 1.5)), (0, (9, 2)))
MARKERS = "os^DvPX"


def style(k: int) -> dict[str, Any]:
    """Colour, line and marker of the k-th run of a picture."""
    return {"color": COLOURS[k % 7], "linestyle": LINES[k % 5], "marker": MARKERS[k % 5]}

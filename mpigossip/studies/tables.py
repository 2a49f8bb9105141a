"""Formatting of the rows of a study as text and as LaTeX."""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from mpigossip.config.readable import aligned
from mpigossip.runs.summary import number

LOST = {"diverged": "diverged", "late": "diverged late"}
"""Keys of a row with numbers of diverged runs, and their names in notes."""
MARKS = {"†": r"\dagger", "‡": r"\ddagger", "§": r"\S", "¶": r"\P"}
"""Marks of notes below a table, in text and in LaTeX's math mode. Further notes have doubled marks,
then tripled marks, and so on.
"""
_NAMES = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau phi "
    "chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega"
)
GREEK = dict(zip("αβγδεζηθικλμνξπρστφχψωΓΔΘΛΞΠΣΦΨΩ", _NAMES.split(), strict=True))
"""LaTeX commands for Greek letters, which LaTeX's text fonts lack."""
SPECIAL = {"\\": "textbackslash{}", "~": "textasciitilde{}", "^": "textasciicircum{}"} | {
    c: c for c in "_%&#${}"
}
"""LaTeX commands, without their backslash, for characters that LaTeX interprets."""

MOST_DECIMALS = 12
"""Largest number of decimals in a column."""


class Row(NamedTuple):
    """Row of a table."""

    cells: Sequence[str]
    """Cells of the row, which begin with its labels."""
    marked: int
    """Index of the cell with the metric by which points are compared."""
    note: str
    """Note that is written below the table; "": there is no note."""
    strong: bool
    """True if the cell `marked` is bold in LaTeX."""


def lost(row: Mapping[str, Any]) -> list[str]:
    """Return texts on the numbers of runs of a row that diverged, and that diverged late."""
    return [f"{row[k]} of {row['seeds']} {word}" for k, word in LOST.items() if row[k]]


def column(rows: Sequence[Mapping[str, Any]], name: str) -> list[str]:
    """Return the cells of a metric, with its means ± half the width of their intervals.

    All means have the same number of decimals. It is chosen so that the median half width has two
    significant digits or, if there are no intervals, so that the smallest mean has four. If this
    takes more than `MOST_DECIMALS` decimals, or if there are no intervals and the smallest mean is
    below 0.01, the cells are formatted one by one. A mean that is not known becomes "--".
    If no mean of "MB" is below 1, it has two decimals at most.
    """
    halves = [row[f"{name}_high"] - row[name] for row in rows]
    # If the values of all seeds are equal, rounding can still give an interval.
    tiny = [1e-9 * abs(row[name]) for row in rows]
    halves = [half if half > smallest else 0.0 for half, smallest in zip(halves, tiny, strict=True)]
    positive = [half for half in halves if 0 < half < math.inf]
    smallest = min((abs(row[name]) for row in rows if 0 < abs(row[name]) < math.inf), default=1.0)
    size, shown = (median(positive), 2) if positive else (smallest, 4)
    most = 2 if name == "MB" and smallest >= 1 else MOST_DECIMALS
    needed = max(shown - 1 - math.floor(math.log10(size)), 0)
    digits = min(needed, most)
    one_by_one = needed > MOST_DECIMALS or (not positive and smallest < 0.01)

    def format_cell(mean: float, half: float) -> str:
        if math.isnan(mean):
            return "--"
        if one_by_one:
            return f"{number(mean)} ± {number(half)}" if half > 0 else number(mean)
        value = f"{mean:.{digits}f}"
        return f"{value} ± {half:.{digits}f}" if half > 0 else value

    return [format_cell(row[name], half) for row, half in zip(rows, halves, strict=True)]


def text(heads: Sequence[str], rows: Sequence[Row], left: int) -> str:
    """Return a table as text.

    :param heads: heads of the columns
    :param rows: rows of the table
    :param left: number of columns with labels, which are aligned on the left
    :return: lines of the table, with the marks of notes in the last column, and the notes
    """
    marks = _marks(rows)
    lines = [(*heads, ""), *((*row.cells, marks.get(row.note, "")) for row in rows)]
    table = aligned(lines, left=(*range(left), len(heads)))
    return "\n".join([table, *(f"{mark} {note}" for note, mark in marks.items())])


def latex(
    heads: Sequence[str], rows: Sequence[Row], left: int, comments: Sequence[str] = ()
) -> str:
    """Return a table as a LaTeX tabular, which requires the package booktabs.

    :param heads: heads of the columns
    :param rows: rows of the table
    :param left: number of columns with labels, which are aligned on the left
    :param comments: lines that are written as comments above the table
    :return: LaTeX source, in which the notes are the last lines of the tabular
    """
    marks = {
        note: "$^{" + "".join(MARKS[symbol] for symbol in mark) + "}$"
        for note, mark in _marks(rows).items()
    }

    def line(row: Row) -> str:
        cells = [escaped(word) for word in row.cells[:left]]
        for index, word in enumerate(row.cells[left:], left):
            value = word.replace("±", r"\pm")
            bold = row.strong and index == row.marked
            value = rf"$\mathbf{{{value}}}$" if bold else f"${value}$" if "±" in word else word
            mark = marks.get(row.note, "") if index == row.marked else ""
            # Give the mark a width of zero, so that it does not move the number.
            cells.append(value + (rf"\rlap{{{mark}}}" if mark else ""))
        return " & ".join(cells) + r" \\"

    notes = [
        rf"\multicolumn{{{len(heads)}}}{{l}}{{\footnotesize {mark} {escaped(note)}}} \\"
        for note, mark in marks.items()
    ]
    form = "l" * left + "r" * (len(heads) - left)
    lines = [*(f"% {comment}" for comment in comments), rf"\begin{{tabular}}{{{form}}}"]
    lines += [r"\toprule", " & ".join(map(escaped, heads)) + r" \\", r"\midrule"]
    lines += [*map(line, rows), r"\bottomrule", *notes, r"\end{tabular}"]
    return "\n".join(lines) + "\n"


def _marks(rows: Sequence[Row]) -> dict[str, str]:
    """Return a different mark for each different note of the rows, in the order of the rows."""
    notes = dict.fromkeys(row.note for row in rows if row.note)
    marks = [*MARKS]
    return {note: marks[k % len(marks)] * (k // len(marks) + 1) for k, note in enumerate(notes)}


def with_greek(words: str) -> str:
    """Replace Greek letters by LaTeX commands that work in text and in math mode."""
    return "".join(rf"\ensuremath{{\{GREEK[c]}}}" if c in GREEK else c for c in words)


def escaped(words: str) -> str:
    """Return a text in which LaTeX's special characters and Greek letters are escaped."""
    return with_greek("".join("\\" + SPECIAL[c] if c in SPECIAL else c for c in words))

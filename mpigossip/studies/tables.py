"""Format a study's rows as text and as LaTeX."""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from mpigossip.config.readable import aligned
from mpigossip.runs.summary import number

LOST = {"diverged": "diverged", "late": "diverged late"}
MARKS = {"†": r"\dagger", "‡": r"\ddagger", "§": r"\S", "¶": r"\P"}
"""Of notes below a table, in text and in LaTeX's mathematics; after those twice the first, …"""
_NAMES = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau phi "
    "chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega"
)
GREEK = dict(zip("αβγδεζηθικλμνξπρστφχψωΓΔΘΛΞΠΣΦΨΩ", _NAMES.split(), strict=True))
"""Letters that LaTeX's fonts of text lack, and its commands for them."""
SPECIAL = {"\\": "textbackslash{}", "~": "textasciitilde{}", "^": "textasciicircum{}"} | {
    c: c for c in "_%&#${}"
}


class Row(NamedTuple):
    """A line: the first cells are labels; `note` is said below, `strong` makes `marked` bold."""

    cells: Sequence[str]
    marked: int
    """which cell has the figure that is judged"""
    note: str
    strong: bool


def lost(row: Mapping[str, Any]) -> list[str]:
    """Numbers of a row's runs that diverged, at once and late, in words."""
    return [f"{row[k]} of {row['seeds']} {word}" for k, word in LOST.items() if row[k]]


def column(rows: Sequence[Mapping[str, Any]], name: str) -> list[str]:
    """Means ± half their intervals, all to two digits of those' median, else four of the least."""
    halves = [row[f"{name}_high"] - row[name] for row in rows]
    tiny = [1e-9 * abs(row[name]) for row in rows]  # what rounding leaves of equal values
    halves = [half if half > least else 0.0 for half, least in zip(halves, tiny, strict=True)]
    known = [half for half in halves if half > 0]
    least = min((abs(row[name]) for row in rows if abs(row[name]) > 0), default=1.0)
    size, shown = (median(known), 2) if known else (least, 4)
    digits = min(max(shown - 1 - math.floor(math.log10(size)), 0), 12)

    def said(mean: float, half: float) -> str:
        if math.isnan(mean):
            return "--"
        value = f"{mean:.{digits}f}" if known or least >= 0.01 else number(mean)
        return f"{value} ± {half:.{digits}f}" if half > 0 else value

    return [said(row[name], half) for row, half in zip(rows, halves, strict=True)]


def text(heads: Sequence[str], rows: Sequence[Row], left: int) -> str:
    """Columns below their heads, ``left`` of them labels; marks of notes behind the last."""
    marks = _marks(rows)
    lines = [(*heads, ""), *((*row.cells, marks.get(row.note, "")) for row in rows)]
    table = aligned(lines, left=(*range(left), len(heads)))
    return "\n".join([table, *(f"{mark} {note}" for note, mark in marks.items())])


def latex(
    heads: Sequence[str], rows: Sequence[Row], left: int, comments: Sequence[str] = ()
) -> str:
    """A tabular of booktabs, ``comments`` above it; notes are its last lines."""
    marks = {
        note: "$^{" + "".join(MARKS[one] for one in mark) + "}$"
        for note, mark in _marks(rows).items()
    }

    def line(row: Row) -> str:
        cells = [_escaped(word) for word in row.cells[:left]]
        for at, word in enumerate(row.cells[left:], left):
            value = word.replace("±", r"\pm")
            bold = row.strong and at == row.marked
            value = rf"$\mathbf{{{value}}}$" if bold else f"${value}$" if "±" in word else word
            mark = marks.get(row.note, "") if at == row.marked else ""
            cells.append(value + (rf"\rlap{{{mark}}}" if mark else ""))  # of no width: aligned
        return " & ".join(cells) + r" \\"

    notes = [
        rf"\multicolumn{{{len(heads)}}}{{l}}{{\footnotesize {mark} {_escaped(note)}}} \\"
        for note, mark in marks.items()
    ]
    form = "l" * left + "r" * (len(heads) - left)
    lines = [*(f"% {comment}" for comment in comments), rf"\begin{{tabular}}{{{form}}}"]
    lines += [r"\toprule", " & ".join(map(_escaped, heads)) + r" \\", r"\midrule"]
    lines += [*map(line, rows), r"\bottomrule", *notes, r"\end{tabular}"]
    return "\n".join(lines) + "\n"


def _marks(rows: Sequence[Row]) -> dict[str, str]:
    notes = dict.fromkeys(row.note for row in rows if row.note)
    marks = [*MARKS]
    return {note: marks[k % len(marks)] * (k // len(marks) + 1) for k, note in enumerate(notes)}


def with_greek(words: str) -> str:
    """Greek letters by their commands, in text or mathematics."""
    return "".join(rf"\ensuremath{{\{GREEK[c]}}}" if c in GREEK else c for c in words)


def _escaped(words: str) -> str:
    return with_greek("".join("\\" + SPECIAL[c] if c in SPECIAL else c for c in words))

"""Numbers and texts as people read them."""

import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Any


def format_bytes(count: float) -> str:
    """Bytes: 1.5 MB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        # 999.6 is rounded to 1000, which is one of the next unit
        if float(text := f"{count:.0f}" if unit == "B" else f"{count:.3g}") < 1000:
            return f"{text} {unit}"
        count /= 1000
    return f"{1000 * count:,.0f} TB"


def format_duration(seconds: float) -> str:
    """A time: 0:07, 12:00, 1:02:03."""
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def pluralize(count: int, word: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def abbreviate(names: Sequence[str], most: int = 4) -> str:
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def printable(text: object) -> str:
    r"""A text as a terminal may have it: escapes, marks of direction and their like as \x1b."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in str(text))


OF_STDOUT = "of_standard_output"
"""Attribute of an OSError that `print_safe` has raised for standard output."""


def print_safe(*texts: object, **options: Any) -> None:
    """Print texts as `printable`; all that this package prints goes through here.

    An OSError of it has the attribute `OF_STDOUT` if it is one of standard output.
    """
    try:
        print(*map(printable, texts), **options)
    except OSError as error:
        if options.get("file") in (None, sys.stdout):
            setattr(error, OF_STDOUT, True)
        raise


def print_note(text: object) -> None:
    """Tell something on standard error."""
    print_safe(f"mpigossip: {text}", file=sys.stderr, flush=True)


noted: set[str] = set()
"""What `print_note_once` has told."""


def print_note_once(text: str) -> None:
    """Tell something on standard error, unless this process has."""
    if text not in noted:
        noted.add(text)
        print_note(text)


def cells(row: Iterable[Any]) -> list[Any]:
    """A row of CSV whose texts no spreadsheet takes for formulas."""
    return [f"'{c}" if isinstance(c, str) and c[:1] in {*"=+-@"} else c for c in row]


def aligned(rows: Iterable[Iterable[object]], left: Collection[int] = (0,)) -> str:
    """Rows as lines: columns as wide as their longest cell, two spaces between.

    The columns ``left`` are aligned on the left, all others on the right.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    sides = [f"{{:{'<' if k in left else '>'}{width}}}" for k, width in enumerate(widths)]
    return "\n".join("  ".join(sides).format(*row).rstrip() for row in cells)

"""Formatting of numbers, texts and tables for people, and safe printing."""

import shutil
import sys
import textwrap
from collections.abc import Collection, Iterable, Sequence
from typing import Any


def format_bytes(count: float) -> str:
    """Format a number of bytes with at most three digits and a decimal unit: 1.5 MB.

    Numbers of 1000 TB and more are written in TB with all digits.
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        # Compare the rounded number: 999.6 kB is rounded to 1000 kB, which is 1 MB.
        if float(text := f"{count:.0f}" if unit == "B" else f"{count:.3g}") < 1000:
            return f"{text} {unit}"
        count /= 1000
    return f"{1000 * count:,.0f} TB"


def format_duration(seconds: float) -> str:
    """Format a number of seconds, rounded, as 0:07 or, from one hour on, as 1:02:03."""
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def three_digits(value: float) -> str:
    """Format a number with three significant digits or, from 1,000 on, as a whole number: 1,234."""
    # Compare the rounded number: 999.6 is rounded to 1,000.
    text = f"{value:.3g}"
    return text if float(text) < 1000 else f"{value:,.0f}"


def pluralize(count: int, word: str) -> str:
    """Return a number with a noun in singular or plural: `1 rank`, `2 ranks`."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def abbreviate(names: Sequence[str], limit: int = 4) -> str:
    """Join the first ``limit`` names by commas, and add the number of further names."""
    remaining = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + remaining


def printable(text: object) -> str:
    r"""Replace characters that could control a terminal, such as escapes, by codes such as \x1b.

    Newlines and tabs are kept.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in str(text))


OF_STDOUT = "of_standard_output"
"""Attribute of an OSError that `print_safe` has raised for standard output."""


def print_safe(*texts: object, **options: Any) -> None:
    """Print texts after :func:`printable`.

    :param texts: texts, which are separated as by `print`
    :param options: keyword arguments of `print`
    :raises OSError: if the file cannot be written; if it is standard output, the exception has the
        attribute `OF_STDOUT`
    """
    try:
        print(*map(printable, texts), **options)
    except OSError as error:
        if options.get("file") in (None, sys.stdout):
            setattr(error, OF_STDOUT, True)
        raise


def print_note(text: object) -> None:
    """Print a note on standard error, in one write, so that notes of two ranks do not mix.

    A list of messages, as of a `JobError`, begins on a new line.
    """
    if str(text).startswith("- "):
        text = f"several errors:\n{text}"
    print_safe(f"mpigossip: {text}\n", end="", file=sys.stderr, flush=True)


noted: set[str] = set()
"""Texts that `print_note_once` has printed."""


def print_note_once(text: str) -> None:
    """Print a note on standard error, unless this process has already printed it."""
    if text not in noted:
        noted.add(text)
        print_note(text)


def wrapped(text: str, indent: str = "") -> str:
    """Break a text between words into lines as wide as the terminal.

    If standard output is not a terminal, the text is returned unchanged.

    :param text: one line
    :param indent: beginning of each line after the first
    """
    if not sys.stdout.isatty():  # A program or `grep` finds a whole text in one line.
        return text
    width = max(shutil.get_terminal_size().columns, len(indent) + 20)
    return textwrap.fill(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def cells(row: Iterable[Any]) -> list[Any]:
    """Return the cells of a row for a CSV file, in which no spreadsheet sees a formula.

    Texts that begin with =, +, - or @ get an apostrophe in front.
    """
    return [f"'{c}" if isinstance(c, str) and c[:1] in {*"=+-@"} else c for c in row]


def aligned(rows: Iterable[Iterable[object]], left: Collection[int] = (0,)) -> str:
    """Format rows as lines with aligned columns, which are separated by two spaces.

    :param rows: cells of each row; all rows have the same length
    :param left: indices of the columns that are aligned on the left; all others are aligned on
        the right
    """
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    sides = [f"{{:{'<' if k in left else '>'}{width}}}" for k, width in enumerate(widths)]
    return "\n".join("  ".join(sides).format(*row).rstrip() for row in texts)

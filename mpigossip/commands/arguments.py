"""Helpers that several commands use: parsers with examples, settings, types of arguments."""

import argparse
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mpigossip.config.readable import print_safe as print_safe

SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
"""Seconds in each unit of time."""
BYTES_A_SECOND = {
    prefix + unit: factor * size
    for prefix, factor in {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.items()
    for unit, size in {"B/s": 1.0, "bit": 0.125, "bit/s": 0.125}.items()
}
"""Bytes per second in each unit of bandwidth, with decimal prefixes."""


def command(
    commands, name: str, run: Callable, summary: str, examples: str
) -> argparse.ArgumentParser:
    """Add a command to the parser of the command line, and return the parser of the command.

    :param commands: subparsers to which the command is added
    :param name: name of the command
    :param run: function that gets the parsed options, and returns an exit code or, for success,
        None
    :param summary: one line of help
    :param examples: example lines of a shell
    """
    parser = _parser(commands, name, summary, examples)
    parser.set_defaults(run=run)
    return parser


def family(commands, name: str, members: str, summary: str, *examples: str):
    """Add a command with subcommands, and return the subparsers to add them to.

    :param commands: subparsers to which the command is added
    :param name: name of the command
    :param members: names of its subcommands, separated by "|"
    :param summary: one line of help
    :param examples: examples of subcommands; the help shows the first line of each
    """
    firsts = "\n".join(example.strip().splitlines()[0] for example in examples)
    parser = _parser(commands, name, summary, firsts)
    return parser.add_subparsers(metavar=members, required=True)


def _parser(commands, name: str, summary: str, examples: str) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=summary, **help_text(summary, examples))


def help_text(summary: str, examples: str) -> dict:
    """Return the keyword arguments of a parser for its help: description, examples and format.

    The description is wrapped at 78 columns; examples keep their lines.

    :param summary: description of the command
    :param examples: example lines of a shell; lines that begin with a space continue an example
    """
    lines = textwrap.dedent(examples).strip().splitlines()
    plural = "s" * (sum(not line.startswith(" ") for line in lines) > 1)
    return {
        "description": textwrap.fill(summary, 78),
        "epilog": "\n".join([f"example{plural}:", *(f"  {line}" for line in lines)]),
        "formatter_class": argparse.RawDescriptionHelpFormatter,
    }


def every(
    parser: argparse.ArgumentParser, words: str = ""
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Iterate over a parser and the parsers of all its subcommands, as pairs (words, parser).

    :param parser: the parser
    :param words: words of the command line that lead to it
    """
    yield words, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from every(below, f"{words} {name}".strip())


def settings(parser: argparse.ArgumentParser) -> None:
    """Add the arguments `section.key=value`, which override settings of the job."""
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="section.key=value",
        help="settings that override settings of the job file",
    )


def dry_run(parser: argparse.ArgumentParser) -> None:
    """Add the option --dry-run, which prints the complete job (`analysis.dryrun`)."""
    parser.add_argument("--dry-run", action="store_true", help="print the complete job and exit")


def run_named(path: Path) -> Path:
    """Return ``path`` if it exists.

    :param path: run directory, log or checkpoint
    :raises StoreError: if ``path`` does not exist; the message names runs in the same folder
    """
    from mpigossip.config.toml import near
    from mpigossip.store import StoreError

    if path.exists():
        return path
    runs = {log.parent.name for log in path.parent.glob("*/log.h5")}
    hint = near(path.name, runs) if runs else "`mpigossip train JOB.toml` creates one"
    raise StoreError(f'there is no run "{path}"; {hint}')


def is_setting(word: str) -> bool:
    """Return whether a word of the command line is a setting "section.key=value", and not a file.

    The path of a file may contain "=", too, such as lr=0.1.toml or runs/lr=0.1/job.toml.
    """
    return "=" in word.partition("/")[0] and not Path(word).is_file()


# -- kinds of arguments -----------------------------------------------------------------------


def quantity(units: Mapping[str, float]) -> Callable[[str], float]:
    """Return a function that parses a number greater than 0 with a unit, such as 80ms.

    The function raises ArgumentTypeError for any other text.

    :param units: factor by which the number is multiplied, by the name of its unit
    """

    def read(text: str) -> float:
        match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*(\D+)", text)
        if not match or match[2] not in units or not 0 < float(match[1]) < 1e30:
            names = ", ".join(units)
            raise argparse.ArgumentTypeError(
                f'"{text}": must be a number > 0 with one of the units {names}'
            )
        return float(match[1]) * units[match[2]]

    return read


def share(text: str) -> float:
    """Parse a fraction from 0 to below 1, such as 5% or 0.05.

    :param text: word of the command line
    :raises ArgumentTypeError: if the text is no such fraction
    """
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*(%?)", text)
    value = float(match[1]) / (100 if match[2] else 1) if match else 1.0
    if value >= 1:
        raise argparse.ArgumentTypeError(
            f'"{text}": must be a fraction below 1, such as 5% or 0.05'
        )
    return value


def numbers_of_nodes(text: str) -> list[int]:
    """Parse 4,8,…,64 as [4, 8, 16, 32, 64]; an ellipsis continues by doubling.

    The numbers are returned in ascending order, each once.

    :param text: numbers and ellipses, "…" or "...", separated by commas
    :raises ArgumentTypeError: if a word is no whole number from 1 to 4096
    """
    counts: list[int] = []
    doubling = False
    for word in text.replace("...", "…").split(","):
        if word.strip() == "…" and counts:
            doubling = True
            continue
        if not word.strip().isdigit() or not 1 <= int(word) <= 4096:
            raise argparse.ArgumentTypeError(f'"{word}": must be a whole number from 1 to 4096')
        while doubling and 2 * counts[-1] < int(word):
            counts.append(2 * counts[-1])
        doubling = False
        counts.append(int(word))
    return sorted(set(counts))


def number(kind: type, minimum: float, maximum: float) -> Callable[[str], Any]:
    """Return a function that parses a number of type ``kind`` from ``minimum`` to ``maximum``.

    The function raises ArgumentTypeError if the number is outside, and ValueError if the text is no
    number.

    :param kind: int or float
    :param minimum: smallest allowed number
    :param maximum: largest allowed number
    """

    def read(text: str) -> Any:
        value = kind(text)
        if not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(
                f'"{text}": must be at least {minimum} and at most {maximum}'
            )
        return value

    read.__name__ = kind.__name__  # argparse shows this name in messages
    return read


many = number(int, 1, 65_536)
whole = number(int, 1, 10**15)
seed = number(int, 0, 2**63 - 1)
amount = number(float, 0, 10**7)
times = number(float, 1, 10**7)


def size_in_bytes(text: str) -> int:
    """Parse a number of bytes from 1 to 10^15, such as 512, 1KB (1000 bytes) or 100MB.

    :param text: word of the command line
    :raises ArgumentTypeError: if the text is no such number
    """
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
    figure = text.upper()
    factor = 1
    for unit, value in units.items():
        if figure.endswith(unit):
            figure = figure.removesuffix(unit)
            factor = value
    try:
        return whole(f"{float(figure) * factor:.0f}")
    except ValueError:
        raise argparse.ArgumentTypeError(
            f'"{text}": needs a number of bytes, such as 512, 1KB or 100MB'
        ) from None


def count_of_parameters(text: str) -> int:
    """Parse a number of parameters, such as 25600000, 25.6M or 1.3B (1.3 billion).

    :param text: word of the command line
    :raises ArgumentTypeError: if the text is no number from 1 to 10,000 billion
    """
    units = {"K": 10**3, "M": 10**6, "B": 10**9, "": 1}
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([KMB]?)", text.upper().replace(",", ""))
    value = float(match[1]) * units[match[2]] if match else 0
    if not 1 <= value <= 10**13:
        raise argparse.ArgumentTypeError(
            f'"{text}": must be a number of parameters from 1 to 10000B, such as 25.6M or 1.3B'
        )
    return round(value)


def sized_time(text: str) -> tuple[int, float]:
    """Parse a size and a time, such as 25MB:3.1ms, as bytes and seconds.

    :param text: word of the command line
    :raises ArgumentTypeError: if there is no colon, or if the size or the time is invalid
    :raises ValueError: if the size is no number
    """
    size, _, duration = text.partition(":")
    if not duration:
        raise argparse.ArgumentTypeError(f'"{text}": must be a size and a time, such as 25MB:3.1ms')
    return size_in_bytes(size), quantity(SECONDS)(duration)

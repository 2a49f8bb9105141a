"""Printer of a run: a live line on a terminal, plain lines in a batch log, the summary."""

import os
import sys
import textwrap
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from mpigossip.cluster.launcher import terminal_of_launcher
from mpigossip.cluster.world import World
from mpigossip.config.errors import output_error
from mpigossip.config.readable import format_duration, print_note, print_safe, printable
from mpigossip.engine.measurements import Record
from mpigossip.runs.hooks import Hook
from mpigossip.runs.summary import describe, mean, number
from mpigossip.store.log import COLUMNS, MEMBER_COLUMNS
from mpigossip.training.evaluate import Evaluation

LIVE_S = 0.2
PLAIN_S = 30.0
"""Seconds between two refreshes of the live line, and between two lines of a batch log."""
KNOWN = COLUMNS | MEMBER_COLUMNS
"""Columns that are not shown as metrics in the live line."""
WINDOW = 50
"""Number of steps over which speed and exchange time are averaged."""
HEADING_EVERY = 25
"""Number of rows of the table between two headings."""

WIDTHS = {
    "epoch": 7,
    "step": 8,
    "rate": 8,
    "train loss": 11,
    "test loss": 10,
    "local": 8,
    "consensus": 10,
    "time": 9,
}
"""Widths of the columns that every task has."""


class Printer(Hook):
    """Hook that prints for all nodes on rank 0, and nothing on other ranks.

    The training loss is the loss of the nodes in this process (of node 0 under a launcher).
    """

    def __init__(self, world: World, stream: TextIO | None = None, plain_s: float = PLAIN_S):
        """Find out whether the output is a terminal.

        Without a launcher, the output is live if ``stream`` is a terminal. Among ranks, it is live
        if the launcher passes it on to a terminal: Open MPI gives rank 0 a terminal of its own in
        any case.

        :param world: ranks of the run
        :param stream: file for the output; None: standard output
        :param plain_s: seconds between two lines of a batch log
        """
        self._world = world
        self._enabled = world.rank == 0
        self._stream = stream or sys.stdout
        self._plain_s = plain_s
        terminal = terminal_of_launcher() if stream is None and world.comm else None
        launched = stream is None and world.size > 1
        self._live = terminal is not None or (self._stream.isatty() and not launched)
        self._console = Console(
            file=self._stream,
            force_terminal=self._live,
            highlight=False,
            soft_wrap=True,
            width=_width(terminal),
            legacy_windows=False,
        )
        self._shown_at = time.monotonic()
        self._dirty = False
        self._rows = 0
        self._losses: list[float] = []
        self._lr = float("nan")
        self._consensus = float("nan")
        self._recent: deque[tuple[float, dict[str, float]]] = deque(maxlen=WINDOW)
        self._metrics: dict[str, Any] = {}
        self._engine: Any = None
        self._before = (0.0, 0.0)

    def start(self, progress, assembly) -> None:
        self._engine = assembly.engine
        if not self._enabled:
            return
        self._print(Text(progress.job.run.name, style="bold"))
        for label, text in progress.about():
            # in a batch log, a row stays on one line
            width = self._console.width - 11 if self._live else len(text)
            lines = textwrap.wrap(text, max(width, 20), break_long_words=False)
            for head, line in zip([label, *[""] * len(lines)], lines or [""], strict=False):
                self._print(Text.assemble((f"  {head:<9}", "cyan"), line))
        if progress.first_step:
            self._print(Text(f"  resuming at step {progress.first_step}"))
        self._print(Text())
        self._rows = 0

    def step(self, progress, record: Record) -> None:
        if not self._enabled:
            return
        now = time.monotonic()
        self._losses.append(float(record.loss.nanmean()))
        self._lr = record.lr
        self._recent.append((now, record.seconds))
        if len(record.idle_rows) < len(record.loss):  # idle nodes have no metrics
            self._metrics = {n: v for n, v in record.metrics.items() if n not in KNOWN}
        if record.consensus_distance == record.consensus_distance:
            self._consensus = record.consensus_distance
        if now - self._shown_at < (LIVE_S if self._live else self._plain_s):
            return
        self._shown_at = now
        text = printable(self._line(progress, record.index + 1))
        if self._live:
            with self._writing():
                self._stream.write(f"\r\x1b[2K{text[: self._console.width - 1]}")
            self._dirty = True
        else:
            self._print(Text(text))

    def _line(self, progress, done: int) -> str:
        """Return a line with progress, speed, remaining time, and the exchange time of a step.

        The exchange time is a fraction of the time of a step, averaged over the last steps.
        """
        first = self._recent[0][0]
        last = self._recent[-1][0]
        speed = (len(self._recent) - 1) / max(last - first, 1e-9)
        spent = {name: sum(s[name] for _, s in self._recent) for name in self._recent[-1][1]}
        share = (spent.get("exchange_s", 0.0) + spent.get("idle_s", 0.0)) / sum(spent.values())
        losses = [loss for loss in self._losses[-WINDOW:] if loss == loss]
        words = [f"step {done}" + (f"/{progress.total_steps}" if progress.total_steps else "")]
        words += [f"loss {number(sum(losses) / len(losses))}"] if losses else []
        optional = [f"{name} {number(mean(value))}" for name, value in self._metrics.items()]
        words += optional
        samples = progress.samples_per_step * self._engine.cadence.local_fraction
        words += [f"{speed * samples:,.0f} samples/s" if samples else f"{speed:,.1f} steps/s"]
        if progress.total_steps:
            rate = max(done - progress.first_step, 1) / max(
                time.perf_counter() - progress.began, 1e-9
            )
            words += [f"ETA {format_duration((progress.total_steps - done) / rate)}"]
        measured = self._consensus == self._consensus
        consensus = [f"consensus {self._consensus:.1e}"] if measured else []
        optional += consensus
        words += [*consensus, f"exchange+idle {share:.0%}{self._hidden()}"]
        while self._live and len("  ".join(words)) >= self._console.width and optional:
            words.remove(optional.pop())
        return "  ".join(words)

    def _hidden(self) -> str:
        """Return the hidden fraction of exchanges since the last line; "" if there were none."""
        mixer = self._engine.mixer
        now = (mixer.exchange_seconds, mixer.wait_seconds)
        flown, waited = (new - old for new, old in zip(now, self._before, strict=True))
        self._before = now
        return f"  hidden {max(0.0, 1 - waited / flown):.0%}" if flown > 0 else ""

    def evaluation(self, progress, step: int, result: Evaluation) -> None:
        if not self._enabled:
            return
        row = self._row(progress, step, result)
        widths = [WIDTHS.get(name, max(9, len(name) + 1)) for name, _ in row]
        if self._rows % HEADING_EVERY == 0:
            heading = "".join(n.rjust(width) for (n, _), width in zip(row, widths, strict=True))
            self._print(Text(heading, style="bold"))
        self._rows += 1
        self._print(Text("".join(c.rjust(w) for (_, c), w in zip(row, widths, strict=True))))

    def _row(self, progress, step: int, result: Evaluation) -> list[tuple[str, str]]:
        """Return pairs (column, text); "local" is the first metric of the nodes' own models."""
        losses = [loss for loss in self._losses if loss == loss]
        self._losses = []
        metrics = [(name, number(value)) for name, value in result.averaged.items()][1:]
        first = metrics[0][0] if metrics else "loss"
        return [
            ("epoch", f"{progress.epoch(step):.2f}"),
            ("step", f"{step}"),
            ("rate", f"{self._lr:.{'3g' if self._lr >= 1e-3 else '1e'}}".replace("e-0", "e-")),
            ("train loss", number(sum(losses) / len(losses)) if losses else "–"),
            ("test loss", number(result.loss)),
            *metrics[:1],
            ("local", number(result.mean_local[first])),
            *metrics[1:],
            ("consensus", f"{result.consensus_distance:.2e}"),
            ("time", format_duration(progress.seconds)),
        ]

    def stop(self, progress, summary: dict[str, Any]) -> None:
        if self._enabled:
            self._print(Text(f"\n{describe(summary)}"))

    def leave(self) -> None:
        """End the live line as it is."""
        if self._dirty:
            self._dirty = False
            with self._writing():
                self._stream.write("\n")

    def _print(self, text: Text) -> None:
        with self._writing():
            if self._dirty:
                self._stream.write("\r\x1b[2K")
                self._dirty = False
            text.plain = printable(text.plain)
            self._console.print(text)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Return a context manager for writing; after an error, the run prints nothing more."""
        try:
            yield
            self._stream.flush()
        except OSError as error:
            self._enabled = False
            silenced(error)


def print_line(text: str) -> None:
    """Print a line; an error of standard output, such as a full disk, does not end the run."""
    try:
        print_safe(text, flush=True)
    except OSError as error:
        silenced(error)


def silenced(error: OSError) -> None:
    """Print a note that says why standard output can't be written.

    :param error: the error; raised again if it is of an unknown kind
    """
    why = output_error(error)
    if not why:
        raise error
    print_note(f"standard output can't be written: {why}; the run continues without it")


def _width(terminal: str | None) -> int | None:
    """Return the width of the launcher's terminal; None if it is not known."""
    if terminal is None:
        return None
    try:
        descriptor = os.open(terminal, os.O_RDONLY | os.O_NOCTTY)
        try:
            return os.get_terminal_size(descriptor).columns
        finally:
            os.close(descriptor)
    except OSError:
        return None

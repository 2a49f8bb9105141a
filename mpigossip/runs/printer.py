"""Printer of a run: a line that is updated on a terminal, or lines in a batch log; the summary."""

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
from mpigossip.engine.measurements import StepMetrics
from mpigossip.runs.hooks import Hook
from mpigossip.runs.summary import describe, mean, number
from mpigossip.store.log import COLUMNS, MEMBER_COLUMNS
from mpigossip.training.evaluate import Evaluation

LIVE_S = 0.2
PLAIN_S = 30.0
"""Seconds between two updates of the line on a terminal, and between two lines in a batch log."""
KNOWN = COLUMNS | MEMBER_COLUMNS
"""Columns of the log that the line of a step does not show as metrics of the program."""
WINDOW = 50
"""Number of last steps over which loss, speed and exchange time are averaged."""
HEADING_EVERY = 25
"""Number of rows between two headings in the table of evaluations."""

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
"""Widths, in characters, of the columns that the table of evaluations has for every task."""


class Printer(Hook):
    """Hook that prints the progress of a run on rank 0, and nothing on other ranks.

    The training loss is the mean over the nodes in the process of rank 0: all nodes of a
    simulation, or node 0 under a launcher.
    """

    def __init__(self, world: World, stream: TextIO | None = None, plain_s: float = PLAIN_S):
        """Find out whether the output is a terminal.

        On a terminal, one line is updated in place. Without a launcher, ``stream`` itself is
        tested. Under a launcher, the output of the launcher's process is tested, because Open MPI
        always connects rank 0 to a pseudo-terminal.

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
            # In a batch log, a row is not wrapped.
            width = self._console.width - 11 if self._live else len(text)
            lines = textwrap.wrap(text, max(width, 20), break_long_words=False)
            for head, line in zip([label, *[""] * len(lines)], lines or [""], strict=False):
                self._print(Text.assemble((f"  {head:<9}", "cyan"), line))
        if progress.first_step:
            self._print(Text(f"  resuming at step {progress.first_step}"))
        self._print(Text())
        self._rows = 0

    def step(self, progress, record: StepMetrics) -> None:
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
        """Return the line about a step: progress, loss, speed, remaining time and exchange time.

        The exchange time is shown as a fraction of the time of a step. Loss, speed and this
        fraction are averaged over the last `WINDOW` steps. On a terminal, metrics that do not fit
        into the line are left out.
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
        """Return a text with the fraction of the exchange time since the last line that was hidden.

        An exchange is hidden while the main thread does not wait for it. The text is "" if no
        exchange was timed.
        """
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
        """Return a row of the table of evaluations as pairs (column, text).

        The column "local" is the task's first metric, or the loss if it has no metric, as a mean
        over the nodes' own models.
        """
        losses = [loss for loss in self._losses if loss == loss]
        self._losses = []
        metrics = [(name, number(value)) for name, value in result.averaged.items()][1:]
        first = metrics[0][0] if metrics else "loss"
        return [
            ("epoch", f"{progress.epoch(step):.2f}"),
            ("step", f"{step}"),
            ("rate", _format_rate(self._lr)),
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
        """End the line that is updated on a terminal, so that other output begins on a new line."""
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
        """Return a context manager for writing to the stream, which is flushed at its end.

        After an error of standard output, such as a full disk, this object prints nothing more, and
        the run continues. Other errors are raised.
        """
        try:
            yield
            self._stream.flush()
        except OSError as error:
            self._enabled = False
            silenced(error)


def _format_rate(rate: float) -> str:
    """Format a learning rate for the table of evaluations; before the first step, it is NaN."""
    if rate != rate:
        return "–"
    return f"{rate:.{'3g' if rate >= 1e-3 else '1e'}}".replace("e-0", "e-")


def print_line(text: str) -> None:
    """Print a line; an error of standard output, such as a full disk, does not end the run."""
    try:
        print_safe(text, flush=True)
    except OSError as error:
        silenced(error)


def silenced(error: OSError) -> None:
    """Print a note that says why standard output can't be written.

    :param error: error of a write. If it is not a known error of standard output, such as a full
        disk or a closed pipe, it is raised again
    """
    why = output_error(error)
    if not why:
        raise error
    print_note(f"standard output can't be written: {why}; the run continues without it")


def _width(terminal: str | None) -> int | None:
    """Return the width of the launcher's terminal in characters; None if it is not known."""
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

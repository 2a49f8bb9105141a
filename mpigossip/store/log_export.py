"""Export the log of a run: CSV, TensorBoard."""

from __future__ import annotations

import csv
import os
import socket
import time
from collections.abc import Collection, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from mpigossip.config.readable import cells as safe
from mpigossip.store import StoreError
from mpigossip.store.hdf5 import replacing, writing
from mpigossip.store.log_reading import Log, metrics_in, with_nan

TENSORBOARD = {
    "loss": "loss/training", "lr": "schedule/lr", "gradient_norm": "training/gradient_norm",
    "consensus_distance": "nodes/consensus_distance", "staleness": "nodes/staleness",
    "samples_per_second": "speed/samples_per_second", "bytes_sent": "speed/bytes_sent",
    "compute_s": "time/compute", "node_s": "time/node", "exchange_s": "time/exchange",
    "idle_s": "time/idle",
}  # fmt: skip
"""Columns that TensorBoard shows, as means over the nodes, with their tags; see :func:`tag`."""
HIDDEN = ("step", "kind", "mixed_distance")
"""Columns that it doesn't show."""


def tag(name: str) -> str:
    """The tag of a column of the steps; a task's own metric has a group of its name."""
    return TENSORBOARD.get(name, f"{name}/training")


def to_csv(log: Log, out: Path) -> tuple[Path, Path]:
    """Write the steps to `out` and the evaluations beside it, one line per step and node.

    `out` = run.csv gives run.csv and run-evaluations.csv; values of all nodes together are repeated
    for each node. Returns both paths.
    """
    out = Path(out)
    beside = out.with_name(f"{out.stem}-evaluations{out.suffix}")
    for path, table in ((out, log.steps), (beside, log.evaluations)):
        with replacing(path) as new, new.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(safe(["step", "node", *(name for name in table if name != "step")]))
            values = [value for name, value in table.items() if name != "step"]
            for row, step in enumerate(table["step"]):
                for node in range(log.nodes):
                    cells = (v[row, node] if v.ndim == 2 else v[row] for v in values)
                    writer.writerow([step, node, *cells])
    return out, beside


def to_tensorboard(log: Log, folder: Path) -> None:
    """Write event files that TensorBoard shows: the columns of `TENSORBOARD` and evaluations."""
    with writing(folder), closing(Events(folder)) as writer:
        for name in [name for name in log.steps if name not in HIDDEN]:
            values = with_nan(log.steps[name])
            there = np.isfinite(values).any(axis=1)
            for step, row in zip(log.steps["step"][there], values[there], strict=True):
                writer.add_scalar(tag(name), float(np.nanmean(row)), int(step))
        for row, step in enumerate(log.evaluations["step"]):
            found = {name: values[row] for name, values in log.evaluations.items()}
            add_evaluation(writer, int(step), found, metrics_in(found))


def add_evaluation(
    writer: Events, step: int, found: Mapping[str, Any], names: Collection[str]
) -> None:
    """One evaluation's loss and metrics: the averaged model's, and the nodes' own as their range.

    ``names``: of the metrics.
    """
    for name in ("loss", *names):
        if name in found:
            writer.add_scalar(f"{name}/test", float(found[name]), step)
        local = np.asarray(found.get(f"local_{name}", np.empty(0)), float)
        if np.isfinite(local).any():
            writer.add_scalar(f"{name}/test_least_of_nodes", float(np.nanmin(local)), step)
            writer.add_scalar(f"{name}/test_most_of_nodes", float(np.nanmax(local)), step)


class Events:
    """A file of TensorBoard's, by its own writer of records; OSError where writing fails.

    Torch's `SummaryWriter` has a thread that prints a traceback on a full disk.
    """

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        """Hide entries of the folder's other files from `first_step` on.

        Raises StoreError where TensorBoard isn't installed.
        """
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError:
            raise StoreError(
                "TensorBoard's files can't be written: tensorboard isn't installed; `pip install "
                "mpigossip[tensorboard]` brings it"
            ) from None
        self._event = event_pb2.Event
        self._summary = summary_pb2.Summary
        folder.mkdir(parents=True, exist_ok=True)
        host = socket.gethostname()
        now = time.time()
        name = f"events.out.tfevents.{now:.0f}.{host}.{os.getpid()}.{time.monotonic_ns()}"
        self._file = (folder / name).open("xb")
        self._records = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        # also at 0: an older file of the folder may be of a run that began again
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(step=first_step, session_log=start)

    def _write(self, **about: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **about).SerializeToString())

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """A figure of a step."""
        one = self._summary.Value(tag=tag, simple_value=value)
        self._write(step=step, summary=self._summary(value=[one]))

    def flush(self) -> None:
        """Put on disk what is in memory."""
        self._file.flush()

    def close(self) -> None:
        """Flush, and close the file."""
        self._file.close()

"""Export of logs as CSV and for TensorBoard."""

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
from mpigossip.store.hdf5 import check_replaceable, replacing, writing
from mpigossip.store.log_reading import Log, metrics_in, with_nan

TENSORBOARD = {
    "loss": "loss/training",
    "lr": "schedule/lr",
    "gradient_norm": "training/gradient_norm",
    "consensus_distance": "nodes/consensus_distance",
    "staleness": "nodes/staleness",
    "samples_per_second": "speed/samples_per_second",
    "bytes_sent": "speed/bytes_sent",
    "compute_s": "time/compute",
    "node_s": "time/node",
    "exchange_s": "time/exchange",
    "idle_s": "time/idle",
}
"""Tags by which TensorBoard shows columns of the steps, as means over the nodes."""
HIDDEN = ("step", "kind", "mixed_distance")
"""Columns that are not exported to TensorBoard."""


def tag(name: str) -> str:
    """Return the TensorBoard tag of a column of the steps: by `TENSORBOARD`, or "NAME/training"."""
    return TENSORBOARD.get(name, f"{name}/training")


def to_csv(log: Log, out: Path) -> tuple[Path, Path]:
    """Write a log as two CSV files, for the steps and for the evaluations.

    The files have a line for each step or evaluation and each node. Values that are common to all
    nodes are repeated for each node.

    :param log: log to export
    :param out: file for the steps; for run.csv, the evaluations are written to run-evaluations.csv
    :return: paths of both files
    :raises StoreError: if a file cannot be written
    """
    out = Path(out)
    check_replaceable(out)
    evaluations_path = out.with_name(f"{out.stem}-evaluations{out.suffix}")
    for path, table in ((out, log.steps), (evaluations_path, log.evaluations)):
        with replacing(path) as new, new.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(safe(["step", "node", *(name for name in table if name != "step")]))
            values = [value for name, value in table.items() if name != "step"]
            for row, step in enumerate(table["step"]):
                for node in range(log.nodes):
                    cells = (v[row, node] if v.ndim == 2 else v[row] for v in values)
                    writer.writerow([step, node, *cells])
    return out, evaluations_path


def to_tensorboard(log: Log, folder: Path) -> None:
    """Write an event file for TensorBoard with the steps and evaluations of a log.

    :param log: log to export; from each column, steps without a finite value are left out
    :param folder: folder of the event file
    :raises StoreError: if tensorboard is not installed, or the file cannot be written
    """
    with writing(folder), closing(Events(folder)) as writer:
        for name in [name for name in log.steps if name not in HIDDEN]:
            values = with_nan(log.steps[name])
            has_values = np.isfinite(values).any(axis=1)
            for step, row in zip(log.steps["step"][has_values], values[has_values], strict=True):
                writer.add_scalar(tag(name), float(np.nanmean(row)), int(step))
        for row, step in enumerate(log.evaluations["step"]):
            result = {name: values[row] for name, values in log.evaluations.items()}
            add_evaluation(writer, int(step), result, metrics_in(result))


def add_evaluation(
    writer: Events, step: int, result: Mapping[str, Any], names: Collection[str]
) -> None:
    """Write the loss and the metrics of an evaluation as TensorBoard scalars.

    :param writer: event file
    :param step: number of steps done
    :param result: values of the averaged model by name, and values of all nodes by "local_NAME", of
        which the smallest and the largest are written
    :param names: names of the metrics
    """
    for name in ("loss", *names):
        if name in result:
            writer.add_scalar(f"{name}/test", float(result[name]), step)
        local = np.asarray(result.get(f"local_{name}", np.empty(0)), float)
        if np.isfinite(local).any():
            writer.add_scalar(f"{name}/test_least_of_nodes", float(np.nanmin(local)), step)
            writer.add_scalar(f"{name}/test_most_of_nodes", float(np.nanmax(local)), step)


class Events:
    """Event file of TensorBoard; its methods raise OSError if writing fails.

    The class uses TensorBoard's writer of records and not torch's `SummaryWriter`, whose thread
    prints a traceback if the disk is full.
    """

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        """Create an event file.

        TensorBoard then ignores entries of older files from ``first_step`` on.

        :param folder: folder of the file, which is created if necessary
        :param first_step: first step of the run or of its continuation
        :raises StoreError: if tensorboard is not installed
        """
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError:
            raise StoreError(
                "TensorBoard's files can't be written: tensorboard isn't installed; run: "
                "pip install 'mpigossip[tensorboard]'"
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
        # Write this at step 0, too: the folder may contain event files of an earlier start.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(step=first_step, session_log=start)

    def _write(self, **fields: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Write ``value`` as the value of the tag ``tag`` at step ``step``."""
        scalar = self._summary.Value(tag=tag, simple_value=value)
        self._write(step=step, summary=self._summary(value=[scalar]))

    def flush(self) -> None:
        """Pass buffered records to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Flush, and close the file."""
        self._file.close()

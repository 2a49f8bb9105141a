"""Log of a run: records of steps and evaluations, which rank 0 gathers and writes."""

import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpigossip.cluster.communicator import CollectiveError
from mpigossip.cluster.world import World
from mpigossip.config import JobError
from mpigossip.config.readable import print_note
from mpigossip.engine.measurements import StepMetrics
from mpigossip.runs.alarms import watchers
from mpigossip.runs.hooks import Hook
from mpigossip.store import StoreError
from mpigossip.store.log import (
    COLUMNS,
    EVALUATION_COLUMNS,
    MEMBER_COLUMNS,
    SIMULATED,
    VIRTUAL,
    VIRTUAL_COLUMN,
    Column,
    LogGone,
    LogWriter,
    read,
)
from mpigossip.training.evaluate import Evaluation
from mpigossip.training.machines import OFF
from mpigossip.training.task import Objective
from mpigossip.training.time_model import VirtualClock

FIGURE = Column("", "logged by the program", "float64")


def evaluation_columns(objective: Objective) -> dict[str, Column]:
    """Return the log's columns for evaluations of the averaged model and of each node's model."""
    columns: dict[str, Column] = {}
    for name in ("loss", *objective.metrics):
        columns |= {
            name: Column(objective.unit(name), f"test {name} of the averaged model"),
            f"local_{name}": Column(objective.unit(name), f"test {name} of each node's model"),
            f"share_{name}": Column(
                objective.unit(name), f"{name} of the averaged model on the node's test samples"
            ),
        }
    return columns | EVALUATION_COLUMNS


class Recorder(Hook):
    """Hook that gathers the records of all nodes at each flush; rank 0 appends them to the log."""

    def __init__(self, world: World, parents: bool = True):
        """Prepare the log, which `start` opens.

        :param world: ranks of the run
        :param parents: whether to create missing parents of the run directory, too
        """
        self._world = world
        self._parents = parents
        self._pending: list[dict[str, Any]] = []
        self._evaluations: list[tuple[dict, dict[str, np.ndarray]]] = []
        self._writer: LogWriter | None = None
        self._names: tuple[int, ...] | None = None
        """Original ranks of the world in which the kept records were made. After a rank failure,
        the world has fewer."""

    def start(self, progress, assembly) -> None:
        self._progress = progress
        self._rows = len(assembly.engine.mixer.local_nodes)
        about = "{} of the node's training samples in the step"
        task = progress.objective
        self._columns = COLUMNS | {"loss": COLUMNS["loss"]._replace(unit=task.unit("loss"))}
        self._metrics = {name: Column(task.unit(name), about.format(name)) for name in task.metrics}
        self._metrics |= MEMBER_COLUMNS | {VIRTUAL: VIRTUAL_COLUMN}
        # The transports between GPUs are equal on all ranks, so rank 0 can log its own.
        routes = getattr(assembly.engine.mixer, "routes", {})
        self._routes = {"exchange": "; ".join(dict.fromkeys(routes.values()))} if routes else {}
        self._continues = progress.job.log.on_error == "continue"

        def warning() -> str:
            return assembly.engine.cadence.warning(assembly.engine.cadence_state)

        self._watchers = watchers(progress.job.log, self._world.nodes.inter_node.hosts, warning)
        self._gathered = progress.first_step
        # All ranks gather in any case: if a rank fails while the logs are opened, some ranks may
        # have kept records from before, and others none.
        rows = [row for row in self._pending if row["step"] < progress.first_step]
        rows_by_rank = self._world.gather((self._names, rows))
        with self._world.raise_together(StoreError, OSError):
            if self._world.rank == 0:
                progress.folder.mkdir(parents=self._parents, exist_ok=True)
                self._writer = self._open(progress, progress.nodes, progress.first_step)
                self._append_missing(progress, rows_by_rank)
        self._pending = []
        self._evaluations = []
        self._names = self._world.original_ranks
        self._clock = self._virtual(progress, assembly)

    def _virtual(self, progress, assembly) -> VirtualClock | None:
        """Return the virtual clock of the job, or None if `clock.network` is "none"; collective.

        If the run was resumed, the clock starts at the last virtual time in its log.

        :raises JobError: on all ranks, if the log can't be read or the clock can't be created
        """
        if progress.job.clock.network == OFF:
            return None
        seconds = None
        with self._world.raise_together(StoreError):
            if self._world.rank == 0 and progress.first_step:
                seconds = _clock_at(progress.folder / "log.h5", progress.first_step, progress.nodes)
        begun = self._world.broadcast(seconds)
        with self._world.raise_together(JobError):
            clock = VirtualClock(progress.job, assembly, begun)
        self._nodes = assembly.engine.mixer.local_nodes
        return clock

    def _open(self, progress, nodes: int, first_step: int) -> LogWriter:
        lost = {"lost": "; ".join(progress.lost)} if progress.lost else {}
        return LogWriter(
            progress.folder / "log.h5",
            nodes=nodes,
            job=progress.text,
            columns=self._columns,
            evaluation_columns=evaluation_columns(progress.objective),
            environment=environment() | self._routes | self._simulated(nodes) | lost,
            first_step=first_step,
        )

    def _simulated(self, nodes: int) -> dict[str, str]:
        """Return an entry of the environment if one process computes several nodes, otherwise {}.

        Its durations then say nothing about the time of a step on nodes.
        """
        is_simulated = self._world.comm is None and nodes > 1
        return {SIMULATED: f"{nodes} nodes in one process"} if is_simulated else {}

    def _append_missing(self, progress, rows_by_rank: list) -> None:
        """Append the rows before a rank failure that survivors have in memory, but not in the log.

        In these rows, the values of failed ranks are marked as unknown.

        :param progress: progress of the run
        :param rows_by_rank: for each survivor: the original ranks of the world before the failure,
            and the survivor's rows
        """
        # If the log is empty, `next_step` would exclude kept steps before the present one.
        first = 0 if self._writer.empty else self._writer.next_step
        missing = [(names, [r for r in rows if r["step"] >= first]) for names, rows in rows_by_rank]
        names, rows = missing[0]
        if not rows:
            return
        writer = self._open(progress, len(names), rows[0]["step"])
        block = {}
        writer.widen(self._others(rows[0]))
        for name, column in writer.columns.items():
            block[name] = np.full((len(rows), len(names)), column.unknown)
            for rank, (_, rows_of_one) in zip(self._world.original_ranks, missing, strict=True):
                for index, row in enumerate(rows_of_one):
                    block[name][index, names.index(rank)] = row.get(name, [np.nan])[0]
        writer.append(block)
        self._writer = self._open(progress, progress.nodes, progress.first_step)

    def _others(self, names: Iterable[str]) -> dict[str, Column]:
        """Return descriptions of the columns in ``names`` that not every log has.

        Examples are the metrics of a task, and metrics that a program logs.

        :param names: names of columns; names of columns that every log has are ignored
        """
        new = [name for name in names if name not in ("step", *COLUMNS)]
        return {name: self._metrics.get(name, FIGURE) for name in new}

    def copy(self, rows: dict[str, np.ndarray]) -> None:
        """Append rows of another log with one node; columns that they lack are unknown.

        :param rows: columns of consecutive steps, at least one, as `Log.steps` contains them
        :raises StoreError: if the log can't be written
        """
        self._write([(rows, [])], [])

    def step(self, progress, record: StepMetrics) -> None:
        ones = np.ones(self._rows)
        samples = ones * (progress.samples_per_step / progress.nodes or np.nan)
        samples[list(record.idle_rows)] = 0.0
        row = {
            "step": record.index,
            "loss": record.loss.numpy(),
            "lr": ones * record.lr,
            "kind": ones * record.kind.value,
            "gradient_norm": record.gradient_norm.numpy(),
            "mixed_distance": record.mixed_distance.numpy(),
            "consensus_distance": ones * record.consensus_distance,
            "samples_per_second": samples / sum(record.seconds.values()),
            "staleness": np.array(record.staleness),
            "bytes_sent": np.array(record.bytes_sent),
        }
        row |= {name: ones * value for name, value in record.seconds.items()}
        row |= {name: ones * np.asarray(value) for name, value in record.metrics.items()}
        if self._clock is not None:
            row[VIRTUAL] = self._clock.step(record.index, record.kind)[list(self._nodes)]
        self._pending.append(row)

    def evaluation(self, progress, step: int, result: Evaluation) -> None:
        row = {
            "step": step,
            "epoch": progress.epoch(step),
            **result.averaged,
            "consensus_distance": result.consensus_distance,
            "seconds": progress.seconds,
        }
        local = {f"local_{name}": values.numpy() for name, values in result.local.items()}
        local |= {
            f"share_{name}": values.numpy()
            for name, values in result.share.items()
            if name != "loss"
        }
        self._evaluations.append((row, local))
        self.flush()

    def flush(self) -> None:
        """Gather all ranks' records in memory on rank 0, which appends them to the log; collective.

        If the log can't be written, for example because the disk is full, the setting
        `log.on_error` decides whether the run ends with an error or continues with a note.
        """
        try:
            self._flush()
        except (CollectiveError, StoreError) as error:
            if not self._continues:
                raise
            if self._world.rank == 0:
                print_note(
                    f"{error}; training continues, and the rows of the log are kept in memory"
                )

    def _flush(self) -> None:
        block = {}
        if self._pending:
            names = dict.fromkeys(name for row in self._pending for name in row)
            unknown = np.full(self._rows, np.nan)
            block = {n: np.stack([row.get(n, unknown) for row in self._pending]) for n in names}
        gathered = self._of_nodes(self._world.gather((block, self._evaluations)))
        with self._world.raise_together(StoreError):
            if gathered is not None:
                self._write_or_begin(gathered, [row for row, _ in self._evaluations])
        # Rows are dropped only now: if rank 0 fails on the way, the other ranks still have them.
        self._pending = []
        self._evaluations = []

    def _of_nodes(self, gathered: list | None) -> list | None:
        """Merge the records of ranks into records of nodes.

        The number of bytes sent is summed over the ranks of a node. The loss and the metrics of the
        task or program are averaged over them. All other values are taken from its first rank.

        :param gathered: records of each rank, in rank order; None on ranks other than 0
        """
        if gathered is None or self._world.nodes.per_node == 1:
            return gathered
        records: dict[int, tuple[list[dict[str, Any]], list]] = {}
        for node, (block, evaluations) in zip(
            self._world.nodes.node_of_rank, gathered, strict=True
        ):
            records.setdefault(node, ([], evaluations))[0].append(block)
        return [
            (self._of_node(blocks), records[n][1]) for n, (blocks, _) in sorted(records.items())
        ]

    def _of_node(self, blocks: list[dict[str, Any]]) -> dict[str, Any]:
        merged = dict(blocks[0])
        if merged:
            merged["bytes_sent"] = sum(block["bytes_sent"] for block in blocks)
        names = dict.fromkeys(name for block in blocks for name in block)
        for name in names.keys() - COLUMNS.keys() | {"loss"}:
            if name != "step" and merged:
                merged[name] = _mean_of_known([block[name] for block in blocks if name in block])
        return merged

    def _write_or_begin(self, gathered: list, evaluations: list[dict]) -> None:
        """Append gathered records to the log on rank 0; begin a new log if it was removed.

        :param gathered: for each node, its columns of the log and its evaluations
        :param evaluations: rows of the evaluations, which are equal on all ranks
        """
        try:
            self._write(gathered, evaluations)
        except LogGone as gone:
            progress = self._progress
            first = self._writer.next_step
            progress.folder.mkdir(parents=self._parents, exist_ok=True)
            self._writer = self._open(progress, progress.nodes, first)
            progress.warn(f"{gone}: a new log begins at step {first}")
            self._write(gathered, evaluations)

    def _write(self, gathered: list, evaluations: list[dict]) -> None:
        blocks = [block for block, _ in gathered]
        steps = [block["step"] for block in blocks if block]
        if steps:  # asynchronous nodes may be at different steps
            first = min(step[0] for step in steps)
            shape = max(step[-1] for step in steps) + 1 - first, self._rows
            names = dict.fromkeys(name for block in blocks for name in block)
            self._writer.widen(self._others(names))
            # A previous attempt may have written these steps before it failed.
            written = max(0, self._writer.next_step - first)
            rows = {
                name: _join_nodes(blocks, name, first, shape, column)[written:]
                for name, column in self._writer.columns.items()
            }
            self._writer.append(rows)
            for line in [
                text for watcher in self._watchers for text in watcher.see(self._gathered, rows)
            ]:
                print_note(line)
            self._gathered += len(rows["loss"])
        for index, row in enumerate(evaluations):
            names = gathered[0][1][index][1]
            local = {n: np.concatenate([e[index][1][n] for _, e in gathered]) for n in names}
            self._writer.evaluation(row | local)

    def stop(self, progress, summary: dict[str, Any]) -> None:
        self._flush()
        with self._world.raise_together(StoreError):
            if self._writer:
                self._writer.summary(summary)


def _clock_at(log: Path, first_step: int, nodes: int) -> np.ndarray:
    """Return the virtual time of each node at the end of the step before ``first_step``.

    Times are in seconds, or NaN if the log does not contain them. If the log has another number of
    nodes, all nodes get the latest time of any node in the log.

    :param log: path of the log
    :param first_step: number of the step at which the run continues
    :param nodes: number of nodes now
    """
    steps = read(log, (VIRTUAL,)).steps
    rows = np.flatnonzero(steps["step"] == first_step - 1)
    if VIRTUAL not in steps or not len(rows):
        return np.full(nodes, np.nan)
    last = steps[VIRTUAL][rows[0]]
    return last if len(last) == nodes else np.full(nodes, np.nanmax(last))


def _join_nodes(
    blocks: Sequence[Mapping[str, np.ndarray]],
    name: str,
    first: int,
    shape: tuple[int, int],
    column: Column,
) -> np.ndarray:
    """Join the values of a column that all ranks have sent; return an array (steps, nodes).

    For steps that a rank has not sent, the array contains the column's value for "unknown".

    :param blocks: for each rank, arrays by name of the column; "step" has the numbers of its steps
    :param name: name of the column
    :param first: number of the first step
    :param shape: number of steps, and number of nodes per rank
    :param column: description of the column
    """
    parts = [np.full(shape, column.unknown) for _ in blocks]
    for part, block in zip(parts, blocks, strict=True):
        if name in block:
            part[block["step"] - first] = block[name]
    return np.concatenate(parts, axis=1)


def _mean_of_known(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the element-wise mean over arrays, in which NaN is ignored.

    An element that is NaN in all arrays stays NaN. If all arrays are equal, the first is returned,
    so that no rounding changes it.
    """
    values = np.stack(parts)
    if np.array_equal(values, np.broadcast_to(values[0], values.shape), equal_nan=True):
        return values[0]
    is_known = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        return np.where(is_known, values, 0).sum(0) / is_known.sum(0)


def environment() -> dict[str, str]:
    """Return the versions of software, the machine and the command of this run, as text by name."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "machine": platform.machine(),
        "host": platform.node(),
        "command": " ".join(sys.argv),
    }

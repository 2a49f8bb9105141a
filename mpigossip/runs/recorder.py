"""Log of a run: records of steps and evaluations, which rank 0 gathers and writes."""

import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpigossip.cluster.agreement import CollectiveError
from mpigossip.cluster.world import World
from mpigossip.config import JobError
from mpigossip.config.readable import print_note
from mpigossip.engine.measurements import Record
from mpigossip.runs.alarms import watchers
from mpigossip.runs.hooks import Hook
from mpigossip.store import StoreError
from mpigossip.store.log import (
    COLUMNS,
    EVALUATION_COLUMNS,
    MEMBER_COLUMNS,
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
    """Return the columns of evaluations: of the averaged model, and of each node's own model."""
    found: dict[str, Column] = {}
    for name in ("loss", *objective.metrics):
        found |= {
            name: Column(objective.unit(name), f"test {name} of the averaged model"),
            f"local_{name}": Column(objective.unit(name), f"test {name} of each node's model"),
            f"share_{name}": Column(
                objective.unit(name), f"{name} of the averaged model on the node's test samples"
            ),
        }
    return found | EVALUATION_COLUMNS


class Recorder(Hook):
    """Hook that gathers the records of all nodes at each flush; rank 0 appends them to the log."""

    def __init__(self, world: World, parents: bool = True):
        """``parents``: whether to create the folders above that of the log, too."""
        self._world = world
        self._parents = parents
        self._kept: list[dict[str, Any]] = []
        self._evaluations: list[tuple[dict, dict[str, np.ndarray]]] = []
        self._writer: LogWriter | None = None
        self._names: tuple[int, ...] | None = None
        """Original ranks of the nodes whose records are kept. They differ from the world's after a
        failure."""

    def start(self, progress, assembly) -> None:
        self._progress = progress
        self._rows = len(assembly.engine.mixer.local_nodes)
        about = "{} of the node's training samples in the step"
        task = progress.objective
        self._columns = COLUMNS | {"loss": COLUMNS["loss"]._replace(unit=task.unit("loss"))}
        self._metrics = {name: Column(task.unit(name), about.format(name)) for name in task.metrics}
        self._metrics |= MEMBER_COLUMNS | {VIRTUAL: VIRTUAL_COLUMN}
        # routes of vectors on GPUs, which are equal on all ranks
        routes = getattr(assembly.engine.mixer, "routes", {})
        self._ways = {"exchange": "; ".join(dict.fromkeys(routes.values()))} if routes else {}
        self._goes_on = progress.job.log.on_error == "continue"

        def warning() -> str:
            return assembly.engine.cadence.warning(assembly.engine.cadence_state)

        self._watchers = watchers(progress.job.log, self._world.nodes.inter_node.hosts, warning)
        self._gathered = progress.first_step
        # Ranks always gather, because a rank may fail when some ranks have begun and others have
        # not.
        kept = [row for row in self._kept if row["step"] < progress.first_step]
        left = self._world.gather((self._names, kept))
        with self._world.raise_together(StoreError, OSError):
            if self._world.rank == 0:
                progress.folder.mkdir(parents=self._parents, exist_ok=True)
                self._writer = self._open(progress, progress.nodes, progress.first_step)
                self._append_left(progress, left)
        self._kept = []
        self._evaluations = []
        self._names = self._world.original_ranks
        self._clock = self._virtual(progress, assembly)

    def _virtual(self, progress, assembly) -> VirtualClock | None:
        """Return the virtual clock of the job, set to the time at which its log ends.

        Return None if the job has no virtual clock.
        """
        if progress.job.clock.network == OFF:
            return None
        found = None
        with self._world.raise_together(StoreError):
            if self._world.rank == 0 and progress.first_step:
                found = _clock_at(progress.folder / "log.h5", progress.first_step, progress.nodes)
        begun = self._world.broadcast(found)
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
            environment=environment() | self._ways | lost,
            first_step=first_step,
        )

    def _append_left(self, progress, left: list) -> None:
        """Write steps before a failure that only survivors still keep.

        Values of failed ranks are unknown.
        """
        # An empty log lacks all kept steps, not only those after its last one.
        first = 0 if self._writer.empty else self._writer.next_step
        kept = [(names, [r for r in rows if r["step"] >= first]) for names, rows in left]
        names, rows = kept[0]
        if not rows:
            return
        writer = self._open(progress, len(names), rows[0]["step"])
        block = {}
        writer.widen(self._others(rows[0]))
        for name, column in writer.columns.items():
            block[name] = np.full((len(rows), len(names)), column.unknown)
            for place, (_, rows_of_one) in zip(self._world.original_ranks, kept, strict=True):
                for at, row in enumerate(rows_of_one):
                    block[name][at, names.index(place)] = row.get(name, [np.nan])[0]
        writer.append(block)
        self._writer = self._open(progress, progress.nodes, progress.first_step)

    def _others(self, names: Iterable[str]) -> dict[str, Column]:
        """Return the columns that not every log has, which belong to the task or the program."""
        new = [name for name in names if name not in ("step", *COLUMNS)]
        return {name: self._metrics.get(name, FIGURE) for name in new}

    def step(self, progress, record: Record) -> None:
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
        self._kept.append(row)

    def evaluation(self, progress, step: int, found: Evaluation) -> None:
        row = {
            "step": step,
            "epoch": progress.epoch(step),
            **found.averaged,
            "consensus_distance": found.consensus_distance,
            "seconds": progress.seconds,
        }
        local = {f"local_{name}": values.numpy() for name, values in found.local.items()}
        local |= {
            f"share_{name}": values.numpy()
            for name, values in found.share.items()
            if name != "loss"
        }
        self._evaluations.append((row, local))
        self.flush()

    def flush(self) -> None:
        """Gather the kept records and append them; collective.

        If the log can't be written, for example on a full disk, `log.on_error` decides between an
        error and a note.
        """
        try:
            self._flush()
        except (CollectiveError, StoreError) as error:
            if not self._goes_on:
                raise
            if self._world.rank == 0:
                print_note(
                    f"{error}; training continues, and the rows of the log are kept in memory"
                )

    def _flush(self) -> None:
        block = {}
        if self._kept:
            names = dict.fromkeys(name for row in self._kept for name in row)
            unknown = np.full(self._rows, np.nan)
            block = {n: np.stack([row.get(n, unknown) for row in self._kept]) for n in names}
        gathered = self._of_nodes(self._world.gather((block, self._evaluations)))
        with self._world.raise_together(StoreError):
            if gathered is not None:
                self._write_or_begin(gathered, [row for row, _ in self._evaluations])
        # Rows are dropped only now: if rank 0 fails on the way, the other ranks still have them.
        self._kept = []
        self._evaluations = []

    def _of_nodes(self, gathered: list | None) -> list | None:
        """Merge the records of ranks into records of nodes.

        Values are those of the first rank of a node. Bytes are summed over its ranks, and metrics
        that a program has logged are averaged over them.
        """
        if gathered is None or self._world.nodes.per_node == 1:
            return gathered
        found: dict[int, tuple[list[dict[str, Any]], list]] = {}
        for node, (block, evaluations) in zip(
            self._world.nodes.node_of_rank, gathered, strict=True
        ):
            found.setdefault(node, ([], evaluations))[0].append(block)
        return [(self._of_node(blocks), found[n][1]) for n, (blocks, _) in sorted(found.items())]

    def _of_node(self, blocks: list[dict[str, Any]]) -> dict[str, Any]:
        whole = dict(blocks[0])
        if whole:
            whole["bytes_sent"] = sum(block["bytes_sent"] for block in blocks)
        names = dict.fromkeys(name for block in blocks for name in block)
        for name in names.keys() - COLUMNS.keys() | {"loss"}:
            if name != "step" and whole:
                whole[name] = _mean_of_known([block[name] for block in blocks if name in block])
        return whole

    def _write_or_begin(self, gathered: list, evaluations: list[dict]) -> None:
        """Append on rank 0; begin a new log if the old one was removed."""
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
            there = max(0, self._writer.next_step - first)
            rows = {
                name: _beside(blocks, name, first, shape, column)[there:]
                for name, column in self._writer.columns.items()
            }
            self._writer.append(rows)
            for line in [text for one in self._watchers for text in one.see(self._gathered, rows)]:
                print_note(line)
            self._gathered += len(rows["loss"])
        for at, row in enumerate(evaluations):
            names = gathered[0][1][at][1]
            local = {n: np.concatenate([e[at][1][n] for _, e in gathered]) for n in names}
            self._writer.evaluation(row | local)

    def stop(self, progress, summary: dict[str, Any]) -> None:
        self._flush()
        with self._world.raise_together(StoreError):
            if self._writer:
                self._writer.summary(summary)


def _clock_at(log: Path, first_step: int, nodes: int) -> np.ndarray:
    """Return the virtual seconds at the end of the previous step, NaN if the log lacks them.

    If the number of nodes has changed, all nodes begin when the last node had ended that step.
    """
    found = read(log, (VIRTUAL,)).steps
    there = np.flatnonzero(found["step"] == first_step - 1)
    if VIRTUAL not in found or not len(there):
        return np.full(nodes, np.nan)
    last = found[VIRTUAL][there[0]]
    return last if len(last) == nodes else np.full(nodes, np.nanmax(last))


def _beside(
    blocks: Sequence[Mapping[str, np.ndarray]],
    name: str,
    first: int,
    shape: tuple[int, int],
    column: Column,
) -> np.ndarray:
    """Join a column of all ranks for the steps from ``first`` on; missing rows are unknown."""
    parts = [np.full(shape, column.unknown) for _ in blocks]
    for part, block in zip(parts, blocks, strict=True):
        if name in block:
            part[block["step"] - first] = block[name]
    return np.concatenate(parts, axis=1)


def _mean_of_known(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the element-wise mean of the values that are not NaN, or NaN if there are none.

    If all parts are equal, they are returned unchanged.
    """
    every = np.stack(parts)
    if np.array_equal(every, np.broadcast_to(every[0], every.shape), equal_nan=True):
        return every[0]
    known = ~np.isnan(every)
    with np.errstate(invalid="ignore"):
        return np.where(known, every, 0).sum(0) / known.sum(0)


def environment() -> dict[str, str]:
    """Return the versions and the machine, for the log."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "machine": platform.machine(),
        "host": platform.node(),
        "command": " ".join(sys.argv),
    }

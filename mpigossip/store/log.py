"""Writer of the log of a run, an HDF5 file with columns of shape (steps, nodes).

    /steps/step, /steps/node, /steps/COLUMN            (steps,), (nodes,), (steps, nodes)
    /evaluations/at_step, …/node, …/NAME               the same for evaluations, or (evaluations,)
    /summary                                           attributes, written at the end

Columns have dimension scales and the attributes `units` and `description`. The root group has the
attributes `job` (the complete job as TOML) and `environment` (JSON). Each append opens the file,
changes it in one transaction (see journal.py) and closes it. Between two appends, the file can be
read by `xarray.open_dataset(log, group="steps", engine="h5netcdf")`, h5py and h5dump. Hard links in
the root group point to the columns of the steps, so that
`xarray.open_dataset(log, engine="h5netcdf")` shows them, too.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from mpigossip.store import StoreError, guard
from mpigossip.store.hdf5 import attribute_text, create, fixed, replacing, writing
from mpigossip.store.journal import recover, transaction
from mpigossip.store.log_reading import FORMAT, Log, opened, read

__all__ = ["Column", "EVALUATION_COLUMNS", "Log", "LogWriter", "read"]

MESSAGES = logging.getLogger("mpigossip")
EMPTY = "contains no step"
SIGNATURE = b"\x89HDF\r\n\x1a\n"
"""First bytes of every HDF5 file."""
LARGE_TEXT = 24_000
"""Largest size, in bytes, of a text of fixed length in a group with few attributes."""
SMALL_TEXT = 3_000
"""Largest size, in bytes, of a text of fixed length in a group with many attributes."""
CHUNK_BYTES = 1 << 16
"""Intended size of an HDF5 chunk of a column, in bytes. A flush writes one or two complete chunks
of each column; HDF5 stores a checksum for each chunk.
"""


class Column(NamedTuple):
    """Unit, description and numpy type of a column of the log.

    Unknown entries of the column are NaN, or −1 if its type is an integer.
    """

    unit: str
    description: str
    dtype: str = "float64"

    @property
    def unknown(self) -> float:
        """Value of an unknown entry: NaN, or −1 for integers."""
        return np.nan if np.dtype(self.dtype).kind == "f" else -1


COLUMNS = {
    "loss": Column("nat", "mean training loss over the node's samples of this step"),
    "lr": Column("1", "learning rate"),
    "kind": Column("1", "kind of exchange: 0 none, 1 with neighbours, 2 with all nodes", "int8"),
    "gradient_norm": Column("1", "norm of the node's mean gradient, before clipping"),
    "mixed_distance": Column("1", "‖x_i − mixed_i‖, the change of the node's model by averaging"),
    "consensus_distance": Column("1", "mean over nodes of ‖x_i − x̄‖² / ‖x̄‖²"),
    "samples_per_second": Column("1/s", "training samples of the node per second"),
    "compute_s": Column("s", "time of forward and backward passes"),
    "node_s": Column("s", "time of averaging and gathering within the node"),
    "exchange_s": Column("s", "time of the local step and of the exchange between nodes"),
    "idle_s": Column("s", "time of waiting for other nodes"),
    "staleness": Column("1", "age, in rounds, of the models that the node received"),
    "bytes_sent": Column("B", "bytes sent by the node to other nodes since the start", "int64"),
}
"""Columns of the steps that each run measures; its log has metrics of the task in addition."""
SIMULATED = "simulated"
"""Entry of the environment in the log of a run in which one process computes all nodes."""
VIRTUAL = "virtual_s"
VIRTUAL_COLUMN = Column("s", "virtual time since the start, on the machine of the job's [clock]")
"""Additional column of the steps of runs with a virtual clock (`[clock]`)."""
MEMBER_COLUMNS = {
    "chunk": Column("1", "index of the chunk of data that was trained"),
    "round": Column("1", "number of the member's round"),
    "peer": Column("1", "index of the member whose model was averaged before the round"),
    "time": Column("s", "time since 1970-01-01 on the member's clock"),
    "history": Column("step", "number of steps in the longest history of the model"),
}
"""Additional columns of the steps of trainings that members join and leave (`mpigossip join`)."""
EVALUATION_COLUMNS = {
    "at_step": Column("step", "number of steps before the evaluation", "int64"),
    "epoch": Column("epoch", "number of passes over the training samples before the evaluation"),
    "consensus_distance": Column("1", "mean over nodes of ‖x_i − x̄‖² / ‖x̄‖²"),
    "seconds": Column("s", "time since the start of the run"),
}
"""Columns of evaluations that are not metrics of the task."""


NODE = Column("1", "index of the node", "int64")


class LogGone(StoreError):
    """Error of a log that was deleted or overwritten during its run.

    The run can begin a new log.
    """


class LogWriter:
    """Writer of the log of a run, used in a single process.

    No file is open between two calls.

    If ``first_step`` > 0, an existing log is continued: steps from ``first_step`` on are removed,
    and so are evaluations after more than ``first_step`` steps, and the summary. If the run resumes
    with more nodes, columns with an entry for each node get entries for the new nodes. If
    ``first_step`` is 0, or if there is no log that can be continued, a new log begins. It replaces
    a log without steps; any other file of this name is renamed to log.h5.1, log.h5.2 and so on.

    The attribute `next_step` is the step after the last one in the file, or ``first_step`` if the
    file has no steps.
    """

    def __init__(
        self,
        path: Path,
        *,
        nodes: int,
        job: str,
        columns: Mapping[str, Column],
        environment: Mapping[str, str],
        first_step: int = 0,
        evaluation_columns: Mapping[str, Column] = EVALUATION_COLUMNS,
    ) -> None:
        """Create the log or open an existing one.

        :param path: path of the log, log.h5
        :param nodes: number of nodes
        :param job: complete job, as TOML
        :param columns: columns of the steps, by name
        :param environment: facts about machine and software, by name
        :param first_step: first step that will be appended; 0: begin a new log
        :param evaluation_columns: columns of the evaluations, by name
        :raises StoreError: if the log cannot be written
        """
        self.path = Path(path)
        self.nodes = nodes
        self.columns = dict(columns)
        self.evaluation_columns = evaluation_columns
        self.next_step = first_step
        with writing(self.path):
            if recover(self.path):
                MESSAGES.warning("%s: completed the write of a run that was killed", self.path)
            problem = _rejection(self.path, first_step)
            if problem == EMPTY:
                self.path.unlink()
            elif problem:
                _move_aside(self.path, problem)
            if not self.path.exists():
                _create(self.path)
        with transaction(self.path) as file:
            file.attrs["job"] = attribute_text(job, LARGE_TEXT)
            file.attrs["environment"] = attribute_text(json.dumps(dict(environment)), LARGE_TEXT)
            guard.seal(file)
            file["summary"].attrs.clear()
            steps = file["steps/step"][()]
            steps = steps[steps < first_step]
            self.empty = not len(steps)
            _truncate(file["steps"], len(steps))
            if len(steps):
                self.next_step = int(steps[-1]) + 1
            evaluations = file["evaluations"]
            _truncate(evaluations, int(np.count_nonzero(evaluations["at_step"][()] <= first_step)))
            for group in (file["steps"], evaluations):
                _widen(group, nodes)
            for name, column in self.columns.items():
                _column(file["steps"], name, column, per_node=True)

    def widen(self, columns: Mapping[str, Column]) -> None:
        """Add the columns that the log lacks to the steps.

        In rows that exist already, they contain `Column.unknown`.

        :param columns: columns by name; columns that exist already are not changed
        :raises LogGone: if the log was deleted or overwritten
        :raises StoreError: if writing fails
        """
        new = {name: column for name, column in columns.items() if name not in self.columns}
        if new:
            with self._changing() as file:
                for name, column in new.items():
                    _column(file["steps"], name, column, per_node=True)
            self.columns |= new

    def append(self, columns: Mapping[str, np.ndarray]) -> None:
        """Append rows to the steps.

        :param columns: for each column of the log, an array of shape (rows, nodes). "step", of
            shape (rows,), holds the numbers of the steps in ascending order; without it, the steps
            are numbered from `next_step`
        :raises ValueError: if columns are missing or unknown, if an array has another shape, or if
            the steps do not ascend from `next_step`
        :raises LogGone: if the log was deleted or overwritten
        :raises StoreError: if writing fails
        """
        columns = dict(columns)
        rows = len(next(iter(columns.values())))
        step = columns.pop("step", np.arange(self.next_step, self.next_step + rows))
        if columns.keys() != self.columns.keys():
            raise ValueError(
                f"append needs the columns {sorted(self.columns)}, not {sorted(columns)}"
            )
        for name, values in columns.items():
            if np.shape(values) != (rows, self.nodes):
                raise ValueError(
                    f'the column "{name}" has the shape {np.shape(values)}, but must have '
                    f"{(rows, self.nodes)}: one value for each row and node"
                )
        if rows == 0:
            return
        if np.shape(step) != (rows,) or np.any(np.diff(step, prepend=self.next_step - 1) <= 0):
            raise ValueError(f"steps must ascend from {self.next_step}, but the rows have {step}")
        with self._changing() as file:
            group = file["steps"]
            # If an earlier append failed after its journal was complete, these rows exist already.
            start = len(group["step"]) - int(np.sum(group["step"][-rows:] >= step[0]))
            _resize(group, start + rows)
            group["step"][start:] = step
            for name, values in columns.items():
                group[name][start:, : self.nodes] = values
        self.next_step = int(step[-1]) + 1

    def evaluation(self, row: Mapping[str, float | np.ndarray]) -> None:
        """Write an evaluation, over the values of an existing evaluation of the same step.

        :param row: "step" and the values by column: a number, or an array of shape (nodes,)
        :raises ValueError: if the step lies before the last evaluation and has none to replace
        :raises LogGone: if the log was deleted or overwritten
        :raises StoreError: if writing fails
        """
        values = {name: np.asarray(value) for name, value in row.items()}
        step = int(values.pop("step"))
        with self._changing() as file:
            group = file["evaluations"]
            steps = group["at_step"][()]
            if len(steps) and step < steps[-1] and step not in steps:
                raise ValueError(
                    f"evaluations must ascend from step {steps[-1]}, but this one is at step {step}"
                )
            index = int(np.searchsorted(steps, step))
            _resize(group, max(len(steps), index + 1))
            group["at_step"][index] = step
            for name, value in values.items():
                kind = self.evaluation_columns.get(name, Column("", ""))
                _column(group, name, kind, per_node=value.ndim == 1)
                if value.ndim:
                    group[name][index, : self.nodes] = value
                else:
                    group[name][index] = value

    def summary(self, values: Mapping[str, Any]) -> None:
        """Write the summary of the run; values other than numbers and strings become JSON.

        :param values: entries of the summary by name; existing entries with other names stay
        :raises LogGone: if the log was deleted or overwritten
        :raises StoreError: if writing fails
        """
        with self._changing() as file:
            for name, value in values.items():
                number = isinstance(value, int | float | np.number)
                text = value if isinstance(value, str) else json.dumps(value)
                file["summary"].attrs[name] = value if number else attribute_text(text, SMALL_TEXT)
            guard.seal(file["summary"])

    @contextmanager
    def _changing(self) -> Iterator[h5py.File]:
        """Return a context manager in which the log is open for changes, in one transaction.

        :raises LogGone: if the file is missing or is not HDF5
        :raises StoreError: if writing fails
        """
        with writing(self.path):
            try:
                with self.path.open("rb") as file:
                    is_log = file.read(len(SIGNATURE)) == SIGNATURE
            except FileNotFoundError:
                is_log = False
        if not is_log:
            raise LogGone(
                f"{self.path} was deleted or overwritten while the run was writing to it; leave "
                "the files of a running job in place"
            )
        with transaction(self.path) as changed:
            yield changed


def _create(path: Path) -> None:
    """Create a log without rows; no other process sees it before it is complete."""
    with replacing(path) as temporary, create(temporary) as file:
        file.attrs["format"] = fixed(FORMAT)
        file.create_group("summary")
        for name, index, column in (
            ("steps", "step", Column("step", "index of the step", "int64")),
            ("evaluations", "at_step", EVALUATION_COLUMNS["at_step"]),
        ):
            group = file.create_group(name)
            for scale, description in ((index, column), ("node", NODE)):
                _dataset(group, scale, description, (0,), (1024,)).make_scale(scale)


def _rejection(path: Path, first_step: int) -> str:
    """Return the reason why a run can't continue a log at ``first_step``; "" if it can.

    The log is the file at ``path``.
    """
    if path.is_symlink():
        return "is a symbolic link"
    if not path.exists():
        return ""
    try:
        with opened(path) as (_, objects):
            if not len(objects["steps/step"]):
                return EMPTY
            return "" if first_step else "belongs to an earlier run"
    except StoreError as error:
        return f"can't be opened ({error})"


def _move_aside(path: Path, problem: str) -> None:
    number = 1
    while (target := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    path.rename(target)
    MESSAGES.warning("%s %s: renamed to %s, a new log begins", path, problem, target.name)


def _data(group: h5py.Group) -> list[h5py.Dataset]:
    return [data for name, data in group.items() if name != "node"]


def _resize(group: h5py.Group, rows: int) -> None:
    for data in _data(group):
        data.resize(rows, axis=0)


def _truncate(group: h5py.Group, rows: int) -> None:
    if any(len(data) > rows for data in _data(group)):
        _resize(group, rows)


def _widen(group: h5py.Group, nodes: int) -> None:
    """Widen all columns of a group to `nodes` nodes; leave wider columns unchanged."""
    count = len(group["node"])
    if nodes > count:
        group["node"].resize(nodes, axis=0)
        group["node"][count:] = np.arange(count, nodes)
        for data in _data(group):
            if data.ndim == 2:
                data.resize(nodes, axis=1)


def _column(group: h5py.Group, name: str, column: Column, per_node: bool) -> None:
    """Create a column, unless it exists; its entries are unknown in rows that exist already.

    :param group: group of the steps or of the evaluations
    :param name: name of the column
    :param column: its unit, description and type
    :param per_node: whether the column has an entry for each node, and not one for each row
    """
    if name in group:
        return
    index = group["step"] if "step" in group else group["at_step"]
    scales: Sequence[h5py.Dataset] = [index, group["node"]] if per_node else [index]
    shape = tuple(len(scale) for scale in scales)
    width = max(1, *shape[1:], 1) * np.dtype(column.dtype).itemsize
    rows = min(1024, max(16, CHUNK_BYTES // width))
    data = _dataset(group, name, column, shape, (rows, *(max(1, size) for size in shape[1:])))
    for axis, scale in enumerate(scales):
        data.dims[axis].attach_scale(scale)


def _dataset(
    group: h5py.Group, name: str, column: Column, shape: tuple[int, ...], chunks: tuple[int, ...]
) -> h5py.Dataset:
    data = group.create_dataset(
        name,
        shape,
        column.dtype,
        maxshape=(None,) * len(shape),
        chunks=chunks,
        fillvalue=column.unknown,
        fletcher32=True,
    )
    data.attrs["units"] = fixed(column.unit)
    data.attrs["description"] = fixed(column.description)
    # Programs for netCDF, such as xarray, show this attribute.
    data.attrs["long_name"] = fixed(column.description)
    if group.name == "/steps":
        # By default, xarray opens the root group, so link the column there.
        group.file[name] = data
    return data

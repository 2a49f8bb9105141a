"""State of a node in a checkpoint: its arrays, the table of its parameters, averages in float64."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import h5py
import numpy as np

from mpigossip.store import guard
from mpigossip.store.manifest import Number

DIMENSIONS = 32  # of a parameter
FINITE = ("parameters", "arrays/state/", "arrays/torch/", "pieces/state/")
"""Prefixes of the datasets that have to be finite, beside the statistics of norms: other buffers
may be masks with −∞, and a user's own state anything."""
NORMS = ("running_mean", "running_var")
LOOSE = ("torch/", "own/", "rng/")
"""Of a user's own loop: a node's optimizer has no state of parameters that it never used."""


@dataclass(frozen=True)
class NodeState:
    """All that a node needs to go on, or one of its slots.

    `parameters` (P,) float32 holds the named arrays of `shapes`, raveled and joined in order.
    `arrays` are further arrays by a path such as "state/momentum"; `numbers` are plain values.

    Of one `slot` (None: of a whole node): `parameters` are its part, the next after that of the
    slot before; `pieces` are parts of arrays, likewise; what is in `arrays` is in no other slot's.
    Names and shapes are those of the node.
    """

    parameters: np.ndarray
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    arrays: dict[str, np.ndarray]
    numbers: dict[str, Number]
    slot: int | None = None
    pieces: dict[str, np.ndarray] = field(default_factory=dict)

    def stored(self) -> dict[str, np.ndarray]:
        """All arrays by their paths in the node's file."""
        groups = {"arrays": self.arrays, "pieces": self.pieces}
        found = {f"{group}/{name}": a for group, of in groups.items() for name, a in of.items()}
        return {"parameters": self.parameters.astype("<f4", copy=False), **found}

    def not_finite(self) -> str:
        """Return which of the arrays is NaN or infinite, and where; "" for none."""
        for name, array in self.stored().items():
            if array.dtype.kind != "f" or not (name.startswith(FINITE) or name.endswith(NORMS)):
                continue
            with np.errstate(all="ignore"):
                if math.isfinite(array.sum()):  # one pass; large values may overflow: look at each
                    continue
            if len(wrong := np.flatnonzero(~np.isfinite(array))):
                first = self._parameter(wrong[0]) if array.shape == self.parameters.shape else ""
                return f"{len(wrong):,} NaN or infinite values in {name}{first}"
        return ""

    def _parameter(self, at: int) -> str:
        """Return which parameter has this element of an array shaped like all of them."""
        if self.slot is not None:  # its first element depends on the slots before
            return f" of slot {self.slot}"
        ends = np.cumsum([math.prod(shape) for shape in self.shapes])
        return f", the first in {self.names[np.searchsorted(ends, at, side='right')]}"


def table(names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> np.ndarray:
    """The table of parameters: name, offset, size, and the first `ndim` numbers of `shape`."""
    texts = [name.encode() for name in names]
    sizes = [math.prod(shape) for shape in shapes]
    widest = max(map(len, shapes), default=0) or 1
    text = h5py.string_dtype("utf-8", max(map(len, texts), default=1) or 1)
    kind = [("name", text), ("offset", "<i8"), ("size", "<i8"), ("ndim", "<i8")]
    padded = [(*shape, *[0] * (widest - len(shape))) for shape in shapes]
    columns = texts, [0, *accumulate(sizes)][:-1], sizes, map(len, shapes), padded
    return np.array(list(zip(*columns, strict=True)), [*kind, ("shape", "<i8", (widest,))])


def read_table(
    rows: Iterable[tuple], length: int
) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """Names and shapes of the table; ValueError unless they fill `length` one after the other."""
    names = []
    shapes = []
    offset = 0
    for name, at, size, ndim, numbers in rows:
        shape = tuple(map(int, numbers[:ndim]))
        fits = len(shape) == ndim <= DIMENSIONS and min(shape, default=0) >= 0
        if not fits or at != offset or size != math.prod(shape):
            raise ValueError(f"parameter {name!r} of {shape} at {at} doesn't follow {offset}")
        names.append(guard.printable(name, "name"))
        shapes.append(shape)
        offset += size
    if offset != length or len(set(names)) != len(names):
        raise ValueError(f"{len(set(names))} of {len(names)} parameters fill {offset} of {length}")
    return tuple(names), tuple(shapes)


def average(
    parts: Iterable[Mapping[str, np.ndarray]], loose: tuple[str, ...] = ()
) -> dict[str, np.ndarray]:
    """Σ_k parts[k] · 1/K of arrays of floats, in float64 and in the order given.

    Other arrays are as in the first part. One part at a time is in memory besides the sum. Raises
    ValueError where parts differ in names or shapes. Names that begin with one of ``loose`` are
    left out where a part lacks them, or has them in another shape.
    """
    rest = iter(parts)
    count = 1
    total = {k: a.astype(np.float64) if is_floating(a) else a for k, a in next(rest, {}).items()}
    for part in rest:
        count += 1
        mine, others = ({k: a.shape for k, a in one.items()} for one in (total, part))
        odd = sorted({name for name, _ in mine.items() ^ others.items()})
        if wrong := [name for name in odd if not name.startswith(loose)]:
            raise ValueError(f"they differ in {', '.join(wrong)}")
        for name in odd:
            total.pop(name, None)
        for name, array in total.items():
            if is_floating(array):
                array += part[name]
    for array in total.values():
        if is_floating(array):
            array *= 1 / count
    return total


def over_slots(state: NodeState) -> dict[str, np.ndarray]:
    """A node's "parameters" and arrays by name; "buffers/NAME" is the average of its slots'."""
    found = {"parameters": state.parameters}
    slots: dict[int, dict[str, np.ndarray]] = {}
    for key, array in state.arrays.items():
        kind, _, rest = key.partition("/")
        if kind == "buffers":
            slot, _, name = rest.partition("/")
            slots.setdefault(int(slot), {})[f"buffers/{name}"] = array
        else:
            found[key] = array
    return found | average(slots[slot] for slot in sorted(slots))


def over_nodes(states: Iterable[NodeState]) -> dict[str, np.ndarray]:
    """The same of nodes together, their mean "bytes_sent" and "local_steps"."""

    def arrays(state: NodeState) -> dict[str, np.ndarray]:
        counted = {"bytes_sent", "local_steps"} & state.numbers.keys()
        return over_slots(state) | {k: np.array(float(state.numbers[k])) for k in counted}

    return average(map(arrays, states), loose=LOOSE)


def is_floating(array: np.ndarray) -> bool:
    """Return whether an average of such arrays means something."""
    return bool(np.issubdtype(array.dtype, np.floating))

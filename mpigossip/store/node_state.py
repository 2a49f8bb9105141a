"""State of a node in a checkpoint, its table of parameters, and averages of states."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import h5py
import numpy as np

from mpigossip.store import guard
from mpigossip.store.manifest import Number

DIMENSIONS = 32
"""Largest number of dimensions of a parameter."""
FINITE = ("parameters", "arrays/state/", "arrays/torch/", "pieces/state/", "pieces/torch/")
"""Prefixes of the datasets that must be finite, in addition to `NORMS`. Other buffers can be masks
with −∞, and a user's own state can have any value.
"""
NORMS = ("running_mean", "running_var")
"""Suffixes of the running statistics of normalization layers, which must be finite, too."""
LOOSE = ("torch/", "own/", "rng/", "frozen/")
"""Prefixes of arrays of a custom loop that may be missing on some nodes, for example because an
optimizer has no state for parameters that its node never used.
"""
STATE_PIECES = "pieces/torch/"
"""Prefix of the arrays with one key of a torch optimizer's state for all parameters, one after the
other, of which each rank of a member writes a part.
"""


@dataclass(frozen=True)
class NodeState:
    """State from which a node, or one of its slots, can resume.

    `parameters`, (P,) float32, are the flat parameters of the node, which are the arrays with the
    given `names` and `shapes`, flattened and joined in order. `arrays` are further arrays, by a
    path such as "state/momentum". `numbers` are counters and other scalar values, by name.

    If `slot` is not None, this is the state of one slot: `parameters` are the shard of this slot,
    and `pieces` are its shards of further arrays, by path. Shards are joined in the order of the
    slots. An array in `arrays` then belongs to this slot only. `names` and `shapes` describe the
    complete node.
    """

    parameters: np.ndarray
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    arrays: dict[str, np.ndarray]
    numbers: dict[str, Number]
    slot: int | None = None
    pieces: dict[str, np.ndarray] = field(default_factory=dict)

    def stored(self) -> dict[str, np.ndarray]:
        """Return all arrays by their paths in the node's file."""
        groups = {"arrays": self.arrays, "pieces": self.pieces}
        paths = {f"{group}/{k}": a for group, arrays in groups.items() for k, a in arrays.items()}
        return {"parameters": self.parameters.astype("<f4", copy=False), **paths}

    def not_finite(self) -> str:
        """Return a text on the first array that must be finite, but is not; "" if there is none."""
        for name, array in self.stored().items():
            if not must_be_finite(name, array.dtype):
                continue
            with np.errstate(all="ignore"):
                # Test the sum first, which needs one pass. It may overflow, so look at the
                # elements only then.
                if math.isfinite(array.sum()):
                    continue
            if len(invalid := np.flatnonzero(~np.isfinite(array))):
                first = self._parameter(invalid[0]) if array.shape == self.parameters.shape else ""
                return f"{len(invalid):,} NaN or infinite values in {name}{first}"
        return ""

    def _parameter(self, index: int) -> str:
        """Return a text that names the parameter with element ``index`` of the flat parameters."""
        # The lengths of the shards of preceding slots are unknown, so name the slot only.
        if self.slot is not None:
            return f" of slot {self.slot}"
        ends = np.cumsum([math.prod(shape) for shape in self.shapes])
        return f", the first in {self.names[np.searchsorted(ends, index, side='right')]}"


def must_be_finite(name: str, dtype: np.dtype) -> bool:
    """Return whether an array must not have NaN or infinite values.

    :param name: path of the array in the file
    :param dtype: type of its elements
    """
    return dtype.kind == "f" and (name.startswith(FINITE) or name.endswith(NORMS))


def state_keys(numbers: Mapping[str, Number]) -> list[tuple[str, str]]:
    """Return the name of the parameter and the key of each tensor of a torch optimizer's state.

    :param numbers: numbers of a file; "torch" is the text that
        :func:`mpigossip.optim.state.write_optimizer` returns
    :raises ValueError: if that text is not as expected
    """
    states = json.loads(str(numbers.get("torch", "{}"))).get("state", {})
    paths = [
        (name, value["#tensor"])
        for name, values in states.items()
        for value in values.values()
        if isinstance(value, dict) and "#tensor" in value
    ]
    return [(name, path.removeprefix(f"torch/{name}/")) for name, path in paths]


def split_pieces(state: NodeState) -> dict[str, np.ndarray]:
    """Return the arrays of a whole model, with a separate optimizer state for each parameter.

    :param state: whole model, which was joined from the parts of several ranks
    """
    arrays = dict(state.arrays)
    groups = {name: array for name, array in arrays.items() if name.count("/") == 1}
    joined = {name: array for name, array in groups.items() if name.startswith("torch/")}
    if not joined:
        return arrays
    for name in joined:
        del arrays[name]
    ends = [0, *accumulate(map(math.prod, state.shapes))]
    ranges = {
        name: (begin, end, shape)
        for name, begin, end, shape in zip(state.names, ends, ends[1:], state.shapes, strict=False)
    }
    for name, key in state_keys(state.numbers):
        if f"torch/{key}" in joined and f"torch/{name}/{key}" not in arrays and name in ranges:
            begin, end, shape = ranges[name]
            arrays[f"torch/{name}/{key}"] = joined[f"torch/{key}"][begin:end].reshape(shape)
    return arrays


def join_pieces(state: NodeState) -> dict[str, np.ndarray]:
    """Return the arrays of a whole model, with one array for each key of the optimizer's state.

    This is the inverse of :func:`split_pieces`. Only tensors with the shape of their parameter are
    joined; the elements of parameters without such a tensor are 0.

    :param state: whole model, with a separate optimizer state for each parameter
    """
    arrays = dict(state.arrays)
    shapes = dict(zip(state.names, state.shapes, strict=True))
    tensors: dict[str, dict[str, np.ndarray]] = {}
    for name, key in state_keys(state.numbers):
        array = arrays.get(f"torch/{name}/{key}")
        if array is not None and "/" not in key and array.shape == shapes.get(name):
            tensors.setdefault(key, {})[name] = arrays.pop(f"torch/{name}/{key}")
    for key, of_parameters in tensors.items():
        dtype = np.result_type(*of_parameters.values())
        joined = [
            of_parameters.get(name, np.zeros(shape)).astype(dtype).ravel()
            for name, shape in shapes.items()
        ]
        arrays[f"torch/{key}"] = np.concatenate(joined)
    return arrays


def table(names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> np.ndarray:
    """Return the table of parameters, a structured array with one row for each parameter.

    Its fields are name, offset, size, ndim, and shape, of which the first ndim numbers are used.
    """
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
    """Return names and shapes from a table of parameters.

    :param rows: rows of the table
    :param length: number of elements of all parameters
    :raises ValueError: if a name occurs twice, if a name or shape is not valid, or if the
        parameters do not follow one another or do not fill ``length`` elements
    """
    names = []
    shapes = []
    offset = 0
    for name, start, size, ndim, numbers in rows:
        shape = tuple(map(int, numbers[:ndim]))
        fits = len(shape) == ndim <= DIMENSIONS and min(shape, default=0) >= 0
        if not fits or start != offset or size != math.prod(shape):
            raise ValueError(
                f"its table states that parameter {name!r} has the shape {shape}, {size} elements "
                f"and the first element {start}: a shape must have at most {DIMENSIONS} "
                "dimensions of 0 or more, whose product is the number of elements, and the first "
                f"element must be {offset}"
            )
        names.append(guard.printable(name, "name"))
        shapes.append(shape)
        offset += size
    if offset != length or len(set(names)) != len(names):
        raise ValueError(
            f"its table lists {len(names)} parameters with {len(set(names))} different names and "
            f"{offset} elements: each name must be different, and the file has {length} elements"
        )
    return tuple(names), tuple(shapes)


def average(
    parts: Iterable[Mapping[str, np.ndarray]], loose: tuple[str, ...] = ()
) -> dict[str, np.ndarray]:
    """Return the averages of K parts in float64: Σ_k parts[k] · 1/K, summed in the given order.

    Only the sum and a single part are in memory at a time.

    :param parts: dicts of arrays by name, for example one for each node; arrays that are not
        floating-point are taken from the first part
    :param loose: prefixes of names that are left out if a part lacks them or has another shape
    :return: averages by name
    :raises ValueError: if parts differ in other names or shapes
    """
    rest = iter(parts)
    count = 1
    total = {k: a.astype(np.float64) if is_floating(a) else a for k, a in next(rest, {}).items()}
    for part in rest:
        count += 1
        shapes, others = ({k: a.shape for k, a in arrays.items()} for arrays in (total, part))
        different = sorted({name for name, _ in shapes.items() ^ others.items()})
        if problems := [name for name in different if not name.startswith(loose)]:
            raise ValueError(
                f"nodes or slots have arrays of different shapes, or lack them: "
                f"{', '.join(problems)}"
            )
        for name in different:
            total.pop(name, None)
        for name, array in total.items():
            if is_floating(array):
                array += part[name]
    for array in total.values():
        if is_floating(array):
            array *= 1 / count
    return total


def over_slots(state: NodeState) -> dict[str, np.ndarray]:
    """Return the arrays of a node by name, with "parameters" and buffers averaged over slots.

    A buffer has the path "buffers/SLOT/NAME" in the state, and "buffers/NAME" in the result.

    :raises ValueError: if the slots have different buffers
    """
    arrays = {"parameters": state.parameters}
    slots: dict[int, dict[str, np.ndarray]] = {}
    for key, array in state.arrays.items():
        kind, _, rest = key.partition("/")
        if kind == "buffers":
            slot, _, name = rest.partition("/")
            slots.setdefault(int(slot), {})[f"buffers/{name}"] = array
        else:
            arrays[key] = array
    return arrays | average(slots[slot] for slot in sorted(slots))


def over_nodes(states: Iterable[NodeState]) -> dict[str, np.ndarray]:
    """Return arrays by name, averaged over the nodes.

    They are the arrays of :func:`over_slots`, "bytes_sent" and "local_steps".

    :raises ValueError: if nodes have different arrays, except the ones with prefixes in `LOOSE`
    """

    def arrays(state: NodeState) -> dict[str, np.ndarray]:
        counters = {"bytes_sent", "local_steps"} & state.numbers.keys()
        return over_slots(state) | {k: np.array(float(state.numbers[k])) for k in counters}

    return average(map(arrays, states), loose=LOOSE)


def is_floating(array: np.ndarray) -> bool:
    """Return whether an array has a floating-point type, so that it can be averaged."""
    return bool(np.issubdtype(array.dtype, np.floating))

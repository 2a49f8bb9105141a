"""Average checkpointed states in float64: over the slots of a node, then over nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from mpigossip.store.checkpoint import NodeState, read_node
from mpigossip.store.hdf5 import reading

LOOSE = ("torch/", "own/", "rng/")
"""Of a user's own loop: a node's optimizer has no state of parameters that it never used."""


def average(
    parts: Iterable[Mapping[str, np.ndarray]], loose: tuple[str, ...] = ()
) -> dict[str, np.ndarray]:
    """Σ_k parts[k] · 1/K of arrays of floats, in float64 and in the order given.

    Other arrays are as in the first part. One part at a time is in memory besides the sum. Raises
    ValueError where parts differ in names or shapes. Names that begin with one of ``loose`` are
    left out where a part lacks them, or has them in another shape.
    """
    total: dict[str, np.ndarray] = {}
    count = 0
    for count, part in enumerate(parts, 1):
        if loose and count > 1:
            part = {k: a for k, a in part.items() if k in total or not k.startswith(loose)}
            for name in [name for name in total if name.startswith(loose)]:
                if name not in part or part[name].shape != total[name].shape:
                    total.pop(name)
                    part.pop(name, None)
        if count > 1 and part.keys() != total.keys():
            raise ValueError(f"they differ in {', '.join(sorted(part.keys() ^ total.keys()))}")
        for name, array in part.items():
            if count > 1 and array.shape != total[name].shape:
                raise ValueError(f'"{name}" is {array.shape} and {total[name].shape}')
            if count == 1:
                total[name] = array.astype(np.float64) if is_floating(array) else array
            elif is_floating(array):
                total[name] += array
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


def over_nodes(path: Path, n: int) -> dict[str, np.ndarray]:
    """The same of a checkpoint's n nodes together, their mean "bytes_sent" and "local_steps"."""

    def arrays(node: int) -> dict[str, np.ndarray]:
        state = read_node(path, node)
        counted = {"bytes_sent", "local_steps"} & state.numbers.keys()
        return over_slots(state) | {k: np.array(float(state.numbers[k])) for k in counted}

    with reading(path):
        return average((arrays(node) for node in range(n)), loose=LOOSE)


def is_floating(array: np.ndarray) -> bool:
    """Return whether an average of such arrays means something."""
    return bool(np.issubdtype(array.dtype, np.floating))

"""The table of a model's parameters in a checkpoint: names, shapes and offsets."""

from __future__ import annotations

import math
from collections.abc import Sequence

import h5py
import numpy as np

from mpigossip.store import guard

DIMENSIONS = 32  # of a parameter


def table(names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> np.ndarray:
    """The table of parameters: name, offset, size, and the first `ndim` numbers of `shape`."""
    widest = max(map(len, shapes), default=0)
    text = h5py.string_dtype("utf-8", max((len(name.encode()) for name in names), default=1) or 1)
    kind = [("name", text), ("offset", "<i8"), ("size", "<i8"), ("ndim", "<i8")]
    rows = np.zeros(len(names), np.dtype([*kind, ("shape", "<i8", (max(widest, 1),))]))
    offset = 0
    for row, name, shape in zip(rows, names, shapes, strict=True):
        size = math.prod(shape)
        row["name"], row["ndim"] = name.encode(), len(shape)
        row["offset"], row["size"] = offset, size
        row["shape"][: len(shape)] = shape
        offset += size
    return rows


def read(rows: np.ndarray, length: int) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """Names and shapes of the table; ValueError unless they fill `length` one after the other."""
    if [rows.dtype[name].kind for name in rows.dtype.names or ()] != list("SiiiV"):
        raise ValueError(f"its table of parameters is {rows.dtype}")
    names, shapes, offset = [], [], 0
    for name, at, size, ndim, numbers in rows:
        shape = tuple(map(int, numbers[: max(0, ndim)]))
        fits = len(shape) == ndim <= DIMENSIONS and min(shape, default=0) >= 0
        if not fits or at != offset or size != math.prod(shape):
            raise ValueError(f"parameter {name!r} of {shape} at {at} doesn't follow {offset}")
        names.append(guard.printable(name.decode(), "name"))
        shapes.append(shape)
        offset += int(size)
    if offset != length or len(set(names)) != len(names):
        raise ValueError(f"{len(set(names))} of {len(names)} parameters fill {offset} of {length}")
    return tuple(names), tuple(shapes)

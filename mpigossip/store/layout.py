"""The table of a model's parameters in a checkpoint: names, shapes and offsets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate

import h5py
import numpy as np

from mpigossip.store import guard

DIMENSIONS = 32  # of a parameter


def table(names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> np.ndarray:
    """The table of parameters: name, offset, size, and the first `ndim` numbers of `shape`."""
    texts, sizes = [name.encode() for name in names], [math.prod(shape) for shape in shapes]
    widest = max(map(len, shapes), default=0) or 1
    text = h5py.string_dtype("utf-8", max(map(len, texts), default=1) or 1)
    kind = [("name", text), ("offset", "<i8"), ("size", "<i8"), ("ndim", "<i8")]
    padded = [(*shape, *[0] * (widest - len(shape))) for shape in shapes]
    columns = texts, [0, *accumulate(sizes)][:-1], sizes, map(len, shapes), padded
    return np.array(list(zip(*columns, strict=True)), [*kind, ("shape", "<i8", (widest,))])


def read(rows: Iterable[tuple], length: int) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """Names and shapes of the table; ValueError unless they fill `length` one after the other."""
    names, shapes, offset = [], [], 0
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

"""Models whose ranks hold rows of each parameter, as FSDP2 divides them.

Rank r of k ranks holds the rows r·⌈d/k⌉ to (r + 1)·⌈d/k⌉ − 1 of each parameter with d rows, along
its sharded dimension. Its file contains these rows of all parameters. ``pieces`` contains the same
rows of each tensor of the optimizer state that has the shape of its parameter.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from mpigossip.store import StoreError
from mpigossip.store.node_state import SHARDED_DIMS, NodeState, range_of_rows, shard_shapes


@dataclass(frozen=True)
class Rows:
    """Rows of all parameters that one rank of a node holds."""

    rank: int
    """Number of the rank within the node."""
    ranks: int
    """Number k of ranks of the node."""
    names: tuple[str, ...]
    """Names of the parameters."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the whole parameters."""
    dims: tuple[int, ...]
    """Sharded dimension of each parameter."""

    @property
    def local_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of this rank's shards."""
        return shard_shapes(self.shapes, self.dims, self.rank, self.ranks)

    @property
    def first(self) -> int:
        """Number of elements that the ranks before this one hold."""
        return sum(replace(self, rank=rank).count for rank in range(self.rank))

    @property
    def count(self) -> int:
        """Number of elements that this rank holds."""
        return sum(map(prod, self.local_shapes))

    def needs(self, file: int, files: int) -> bool:
        """Return whether this rank reads a file, because the file contains rows of this rank.

        A rank without any rows reads the first file, for buffers and counters.

        :param file: number of the file, which is the rank that has written it
        :param files: number of files of the model
        """
        if not self.count:
            return file == 0
        return any(
            low < high
            for k in range(len(self.shapes))
            for low, high in [self._common(k, file, files)]
        )

    def _common(self, k: int, file: int, files: int) -> tuple[int, int]:
        """Return the first row of parameter k that a file and this rank have, and the row after."""
        rows = self.shapes[k][self.dims[k]]
        begin, count = range_of_rows(rows, self.ranks, self.rank)
        other_begin, other_count = range_of_rows(rows, files, file)
        return max(begin, other_begin), min(begin + count, other_begin + other_count)

    def _copy(self, k: int, file: int, files: int, part: np.ndarray, out: np.ndarray) -> None:
        """Copy the rows of parameter k that a file and this rank have.

        :param part: rows in the file
        :param out: rows of this rank
        """
        low, high = self._common(k, file, files)
        if low >= high:
            return
        rows, dim = self.shapes[k][self.dims[k]], self.dims[k]
        begin, other_begin = (
            range_of_rows(rows, *who)[0] for who in ((self.ranks, self.rank), (files, file))
        )
        before = (slice(None),) * dim
        out[(*before, slice(low - begin, high - begin))] = part[
            (*before, slice(low - other_begin, high - other_begin))
        ]

    def collect(self, parts: Iterable[tuple[int, NodeState]], files: int) -> NodeState:
        """Return the state of this rank; only one of the files has to be in memory at a time.

        :param parts: numbers and states of the files that :meth:`needs` names
        :param files: number of files of the model; 1: the file contains the whole model
        :raises StoreError: if the files belong to another model
        """
        flat = np.empty(self.count, np.float32)
        views = split(flat, self.local_shapes)
        pieces: dict[str, np.ndarray] = {}
        first: NodeState | None = None
        for file, state in parts:
            if (state.names, state.shapes) != (self.names, self.shapes):
                raise StoreError(
                    "its parameters have other names or shapes than this program's model"
                )
            theirs = shard_shapes(self.shapes, self.dims, file, files)
            for k, part in enumerate(split(state.parameters, theirs)):
                self._copy(k, file, files, part, views[k])
            for name, array in (self._sharded(state) if files == 1 else state.pieces).items():
                k = self.names.index(name.split("/")[1])
                out = pieces.setdefault(name, np.empty(self.local_shapes[k], array.dtype))
                self._copy(k, file, files, array, out)
            first = first or replace(state, parameters=flat[:0], pieces={})
        if first is None:
            raise StoreError("no file contains rows of this rank")
        arrays = {name: array for name, array in first.arrays.items() if name not in pieces}
        numbers = {k: v for k, v in first.numbers.items() if k != SHARDED_DIMS}
        if self.ranks == 1:
            return NodeState(flat, self.names, self.shapes, arrays | pieces, numbers)
        numbers |= self.numbers
        return NodeState(flat, self.names, self.shapes, arrays, numbers, self.rank, pieces)

    def _sharded(self, state: NodeState) -> dict[str, np.ndarray]:
        """Return the tensors of the optimizer state of a whole model that have rows."""
        shapes = dict(zip(self.names, self.shapes, strict=True))
        return {
            name: array
            for name, array in state.arrays.items()
            if name.startswith("torch/") and array.shape == shapes.get(name.split("/")[1])
        }

    @property
    def numbers(self) -> Mapping[str, str]:
        """Counter that each file of a rank contains, see `SHARDED_DIMS`."""
        return {SHARDED_DIMS: json.dumps(self.dims)}


def split(flat: np.ndarray, shapes: Iterable[tuple[int, ...]]) -> list[np.ndarray]:
    """Return views of consecutive elements of a 1-D array, with the given shapes."""
    views = []
    begin = 0
    for shape in shapes:
        views.append(flat[begin : begin + prod(shape)].reshape(shape))
        begin += prod(shape)
    return views


def is_divided(state: NodeState) -> bool:
    """Return whether a state of one rank holds rows of each parameter."""
    return SHARDED_DIMS in state.numbers


def joined(parts: Iterable[NodeState]) -> NodeState:
    """Join the rows of all ranks to the whole model.

    :param parts: states of the ranks in order
    """
    parts = list(parts)
    first = parts[0]
    dims = tuple(json.loads(str(first.numbers[SHARDED_DIMS])))
    return Rows(0, 1, first.names, first.shapes, dims).collect(enumerate(parts), len(parts))

"""Streams between the shards of FSDP2 and consecutive ranges of the flat parameters.

A file of a rank holds consecutive elements of the flat parameters (see
:mod:`mpigossip.members.parts`), but FSDP2 gives each rank some rows of every parameter. The ranks
of a member therefore exchange elements when they write or read a model. They do so window by
window, so that a rank never holds more than its shards and a few windows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from mpigossip.cluster.deadline import Deadline
from mpigossip.cluster.world import World
from mpigossip.engine.sharded import row_range
from mpigossip.store.piecewise import PIECE

keep_alive: list[Any] = []
"""Buffers of abandoned messages, which MPI may still use."""


class Run(NamedTuple):
    """Consecutive elements of the flat parameters that lie in one shard of a rank."""

    parameter: int
    """Index of the parameter."""
    local: int
    """Index of the first element in the rank's shard of this parameter."""
    first: int
    """Index of the first element in the flat parameters."""
    length: int
    """Number of elements."""


class ShardStreams:
    """Map between the shards of all ranks of a member and the range of each rank's file."""

    def __init__(
        self, world: World, shapes: Sequence[tuple[int, ...]], dims: Sequence[int], rank: int
    ):
        """Divide the flat parameters equally among the ranks; collective.

        :param world: ranks of the member; rank k has the k-th shard of each parameter
        :param shapes: shape of each parameter
        :param dims: dimension along which each parameter is sharded
        :param rank: rank of this process
        """
        self._world = world
        self._comm = world.duplicate()
        self._shapes = shapes
        self._dims = dims
        self.rank = rank
        self.begins = [*accumulate(map(prod, shapes), initial=0)]
        """Index of the first element of each parameter, and the number of all elements."""
        self.ends = [self.begins[-1] * (k + 1) // world.size for k in range(world.size)]
        """Index after the last element of each rank's range."""

    def range_of(self, rank: int) -> tuple[int, int]:
        """Return the index of the first element of a rank's range, and the index after the last."""
        return (self.ends[rank - 1] if rank else 0), self.ends[rank]

    @property
    def own(self) -> tuple[int, int]:
        """Range of this rank, as :meth:`range_of` returns it."""
        return self.range_of(self.rank)

    def windows(self, size: int = PIECE) -> Iterator[list[tuple[int, int]]]:
        """Iterate over lists with one window (begin, end) of the flat parameters for each rank.

        A window is the next part of its rank's range; it is empty once the range has ended.

        :param size: largest number of elements of a window
        """
        ranges = [self.range_of(rank) for rank in range(self._world.size)]
        longest = max(end - begin for begin, end in ranges)
        for start in range(0, longest, size):
            yield [(min(b + start, e), min(b + start + size, e)) for b, e in ranges]

    def runs(self, rank: int, begin: int, end: int) -> Iterator[Run]:
        """Iterate over the elements of a range that lie in the shards of a rank, in their order.

        :param rank: rank that has the shards
        :param begin: index of the first element of the range
        :param end: index after the last element
        """
        index = max(0, bisect_right(self.begins, begin) - 1)
        while index < len(self._shapes) and self.begins[index] < end:
            yield from self._runs_in(index, rank, begin, end)
            index += 1

    def _runs_in(self, index: int, rank: int, begin: int, end: int) -> Iterator[Run]:
        """Iterate over the runs of a rank that lie in one parameter.

        The parameter is regarded as an array (blocks, rows, elements of a row), of which each rank
        has some rows of each block.

        :param index: index of the parameter
        :param rank: rank that has the shards
        :param begin: index of the first element of the range, in the flat parameters
        :param end: index after the last element
        """
        shape, dim = self._shapes[index], self._dims[index]
        row = prod(shape[dim + 1 :])
        first_row, rows = row_range(shape[dim], self._world.size, rank)
        block = shape[dim] * row
        if not block or not rows:
            return
        offset = self.begins[index]
        low, high = max(begin, offset) - offset, min(end, self.begins[index + 1]) - offset
        for number in range(low // block, -(-high // block)):
            start = number * block + first_row * row
            first, last = max(low, start), min(high, start + rows * row)
            if first < last:
                local = number * rows * row + first - start
                yield Run(index, local, offset + first, last - first)

    def gather(
        self, read: Callable[[int], torch.Tensor | None], dtype: np.dtype
    ) -> Iterator[np.ndarray]:
        """Iterate over the pieces of this rank's range, whose elements all ranks send; collective.

        All ranks get the same number of pieces; the last ones may be empty.

        :param read: function that is called with the index of a parameter and returns this rank's
            shard of the parameter as a 1-D tensor, or None for a shard of zeros
        :param dtype: type of the pieces
        :raises WaitTimeoutError: if a rank does not take part within the time limit
        """
        for window in self.windows():
            parts = []
            sent = [0] * len(window)
            for rank, limits in enumerate(window):
                for run in self.runs(self.rank, *limits):
                    shard = read(run.parameter)
                    part = np.zeros(run.length, dtype)
                    if shard is not None:
                        values = shard[run.local : run.local + run.length].detach().cpu()
                        part[:] = (values.float() if values.dtype in LOW else values).numpy()
                    parts.append(part)
                    sent[rank] += run.length
            limits = window[self.rank]
            incoming = [[*self.runs(rank, *limits)] for rank in range(len(window))]
            counts = [sum(run.length for run in runs) for runs in incoming]
            received = self._exchange(np.concatenate([np.zeros(0, dtype), *parts]), sent, counts)
            piece = np.empty(limits[1] - limits[0], dtype)
            position = 0
            for run in (run for runs in incoming for run in runs):
                begin = run.first - limits[0]
                piece[begin : begin + run.length] = received[position : position + run.length]
                position += run.length
            yield piece

    def scatter(
        self,
        read: Callable[[int, int], np.ndarray | None],
        write: Callable[[Run, torch.Tensor], None],
        dtype: np.dtype,
        size: int = PIECE,
    ) -> bool:
        """Send this rank's range to the ranks that have its elements in their shards; collective.

        If a rank can't read a window, no rank writes elements of this window or of later ones.

        :param read: function (begin, end) that returns these elements of this rank's range, of type
            ``dtype``; or None, if they can't be read
        :param write: function (run, elements) that receives elements of this rank's shards
        :param dtype: type of the elements
        :param size: largest number of elements that are read at a time
        :return: whether all windows were read and written; the same on all ranks
        :raises WaitTimeoutError: if a rank does not take part within the time limit
        """
        for window in self.windows(size):
            begin, end = window[self.rank]
            values = read(begin, end) if begin < end else np.zeros(0, dtype)
            # Each message begins with an element that is 1 if its rank could not read.
            flag = np.full(1, values is None, dtype)
            if values is None:
                values = np.zeros(end - begin, dtype)
            parts = []
            sent = []
            for rank in range(len(window)):
                runs = [*self.runs(rank, begin, end)]
                of_rank = [values[run.first - begin :][: run.length] for run in runs]
                parts += [flag, *of_rank]
                sent.append(1 + sum(map(len, of_rank)))
            incoming = [[*self.runs(self.rank, *limits)] for limits in window]
            counts = [1 + sum(run.length for run in runs) for runs in incoming]
            received = self._exchange(np.concatenate(parts), sent, counts)
            starts = [*accumulate(counts, initial=0)][:-1]
            if any(received[start] for start in starts):
                return False
            for start, runs in zip(starts, incoming, strict=True):
                position = start + 1
                for run in runs:
                    write(run, torch.from_numpy(received[position : position + run.length]))
                    position += run.length
        return True

    def _exchange(
        self, message: np.ndarray, sent: Sequence[int], counts: Sequence[int]
    ) -> np.ndarray:
        """Send consecutive parts of ``message`` to all ranks; return the received parts, joined.

        :param message: elements for all ranks, in the order of the ranks
        :param sent: number of elements for each rank
        :param counts: number of elements that each rank sends to this rank
        :raises WaitTimeoutError: if a rank does not take part within the time limit
        """
        if self._comm is None:
            return message
        size = message.itemsize
        received = np.empty(sum(counts), message.dtype)
        request = self._comm.Ialltoallv(
            (message.view(np.uint8), [count * size for count in sent]),
            (received.view(np.uint8), [count * size for count in counts]),
        )
        text = "not all ranks of this member have sent their elements of a model"
        try:
            Deadline(self._world.timeout_s).wait(request.Test, lambda: text, awaited_ranks=tuple)
        except BaseException:
            keep_alive.append((request, message, received))
            raise
        return received


LOW = (torch.float16, torch.bfloat16)
"""Types whose elements are converted to float32, which has all of their values."""


def flat_shard(tensor: Any) -> torch.Tensor:
    """Return this rank's shard of a DTensor as a 1-D view.

    :param tensor: the DTensor
    :raises RuntimeError: if the shard is not contiguous
    """
    with torch.no_grad():
        return tensor.to_local().detach().view(-1)


def stored_dtype(types: Sequence[torch.dtype]) -> np.dtype:
    """Return the NumPy type in which elements of all these types are stored.

    Types in `LOW` count as float32. An empty sequence gives float32.
    """
    plain = [torch.float32 if kind in LOW else kind for kind in types] or [torch.float32]
    return np.result_type(*[torch.empty(0, dtype=kind).numpy().dtype for kind in plain])

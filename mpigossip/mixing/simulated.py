"""Simulation of synchronous gossip of n nodes in this process.

A run under MPI computes bitwise identical models with every transport.
"""

from __future__ import annotations

from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from mpigossip.mixing.base import (
    ExchangeKind,
    MessageArrays,
    MessageLayout,
    Mixer,
    bytes_per_exchange,
    is_average,
)
from mpigossip.mixing.combine import weighted_sum
from mpigossip.mixing.wire import encode

CACHED_ROUNDS = 64
"""Number of rounds for which the groups of nodes with equal weights are cached, because computing
them takes a loop over all n nodes."""


class Rows(NamedTuple):
    """Group of nodes with equal weights, whose sums one call of :func:`weighted_sum` computes.

    Node i is row i of the arrays of a message.
    """

    weights: tuple[float, ...]
    """Weight of a node's own message, then the weights of its in-neighbours' messages."""
    rows: torch.Tensor | None
    """Numbers of the nodes; None: all nodes."""
    sources: list[torch.Tensor]
    """The k-th array holds the k-th in-neighbour of each node of the group."""
    ranges: list[tuple[slice, list[slice]]]
    """Contiguous ranges of nodes, each with the contiguous ranges of their in-neighbours. They
    allow sums without a copy; the list is empty unless the graph is circulant in this round."""

    @classmethod
    def of(cls, n: int, weights: tuple[float, ...], rows: np.ndarray, columns: np.ndarray) -> Rows:
        sources = [torch.from_numpy(column.copy()) for column in columns]
        if len(rows) < n:
            return cls(weights, torch.from_numpy(rows), sources, [])
        return cls(weights, None, sources, _find_ranges(n, columns))

    def sum(self, sent: torch.Tensor, mixed: torch.Tensor) -> None:
        """Write the weighted sums of this group to its rows of ``mixed``.

        :param sent: messages of all nodes, (n, p)
        :param mixed: results of all nodes, (n, p)
        """
        if self.ranges:
            for to, others in self.ranges:
                weighted_sum(
                    self.weights, [sent[to], *(sent[other] for other in others)], mixed[to]
                )
            return
        own = sent if self.rows is None else sent[self.rows]
        arrays = [own, *(sent[column] for column in self.sources)]
        if self.rows is None:
            weighted_sum(self.weights, arrays, mixed)
        else:
            mixed[self.rows] = weighted_sum(self.weights, arrays, torch.empty_like(own))


def _find_ranges(n: int, columns: np.ndarray) -> list[tuple[slice, list[slice]]]:
    """Return contiguous ranges of nodes whose k-th in-neighbours are contiguous, too, for each k.

    The list is empty unless the k-th in-neighbour of node i is node i + s_k modulo n for all i.
    ``columns`` holds for each k the k-th in-neighbours of all n nodes.
    """
    shifts = [int(column[0]) for column in columns]
    nodes = np.arange(n)
    if any((column != (nodes + s) % n).any() for column, s in zip(columns, shifts, strict=True)):
        return []
    ends = sorted({0, n, *(n - s for s in shifts if s)})
    return [
        (slice(a, b), [slice((a + s) % n, (a + s) % n + b - a) for s in shifts])
        for a, b in pairwise(ends)
    ]


class Simulated(Mixer):
    """Mixer of all n nodes as rows of the same arrays; a round is a few tensor operations.

    The sums of nodes with equal weights are computed at once, by the same function
    :func:`~mpigossip.mixing.combine.weighted_sum` that a rank uses for its single node.
    """

    def __init__(self, graph, layout: MessageLayout):
        """Allocate arrays of n rows on the devices of the layout."""
        super().__init__(graph, layout, range(graph.n))
        self._out = layout.empty(graph.n)
        self._mixed = layout.empty(graph.n)
        self._open: tuple[ExchangeKind, int] | None = None
        self._groups = lru_cache(CACHED_ROUNDS)(partial(_groups, graph))
        self._sends = lru_cache(CACHED_ROUNDS)(partial(_sends, graph, layout))

    def outbox(self, t: int) -> MessageArrays:
        return self._out

    def start(self, kind: ExchangeKind, t: int, exchange: int | None = None) -> None:
        """Quantize the messages if the wire is lossy; store kind and round for :meth:`finish`."""
        self._open = (kind, t)
        layout = self.layout
        if not layout.wire.exact and kind is not ExchangeKind.LOCAL:
            encode(layout, self._out, self.local_nodes, t if exchange is None else exchange, None)
        for node, nbytes in zip(self.local_nodes, self._sends(kind, self._clock(t)), strict=True):
            self.bytes_sent[node] += nbytes

    def finish(self, into: torch.Tensor | None = None) -> tuple[MessageArrays, MessageArrays]:
        kind, t = self._open
        self._open = None
        if kind is ExchangeKind.LOCAL:
            return self._out, self._out
        if kind is ExchangeKind.GLOBAL or is_average(self.graph, t):
            for sent, mixed in _pairs(self._out, self._mixed):
                average = weighted_sum(self.graph.average_weights, list(sent.split(1)), mixed[:1])
                mixed[1:] = average
            return self._out, self._mixed
        for group in self._groups(self._clock(t)):
            for sent, mixed in _pairs(self._out, self._mixed):
                group.sum(sent, mixed)
        return self._out, self._mixed

    def _clock(self, t: int) -> int:
        return t % self.graph.period if self.graph.period else t

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x[:1])
        return weighted_sum([1 / self.n] * self.n, list(x.split(1)), out)[0]


def _groups(graph, t: int) -> list[Rows]:
    """Return the nodes in groups with equal weights at round t."""
    groups: dict[tuple[float, ...], list[tuple[int, np.ndarray]]] = {}
    for i in range(graph.n):
        sources, weights, own = graph.neighbours(t, i)
        key = (float(own), *(float(w) for w in weights))
        groups.setdefault(key, []).append((i, sources))
    result = []
    for weights, members in groups.items():
        rows = np.array([i for i, _ in members])
        columns = np.array([sources for _, sources in members], dtype=np.int64).T
        result.append(Rows.of(graph.n, weights, rows, columns))
    return result


def _sends(graph, layout: MessageLayout, kind: ExchangeKind, t: int) -> list[int]:
    sizes = layout.sent_bytes, layout.raw_bytes
    return [bytes_per_exchange(graph, kind, t, node, *sizes) for node in range(graph.n)]


def _pairs(first: MessageArrays, second: MessageArrays):
    for first_slot, second_slot in zip(first, second, strict=True):
        yield from zip(first_slot, second_slot, strict=True)

"""Simulation of n nodes in this process: every transport equals it bitwise."""

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

KEPT = 64
"""Rounds of which it is kept who sums what: working it out takes n nodes' time."""


class Rows(NamedTuple):
    """Nodes whose neighbours carry the same weights: what :func:`combine` sums at once."""

    weights: tuple[float, ...]
    """the own one first"""
    rows: torch.Tensor | None
    """which they are; None: all"""
    sources: list[torch.Tensor]
    """for each neighbour, whose message is taken"""
    cuts: list[tuple[slice, list[slice]]]
    """where all sums are of stretches of rows, as a circulant's are: these, to copy nothing"""

    @classmethod
    def of(cls, n: int, weights: tuple[float, ...], rows: np.ndarray, columns: np.ndarray) -> Rows:
        sources = [torch.from_numpy(column.copy()) for column in columns]
        if len(rows) < n:
            return cls(weights, torch.from_numpy(rows), sources, [])
        return cls(weights, None, sources, _cuts(n, columns))

    def sum(self, sent: torch.Tensor, mixed: torch.Tensor) -> None:
        """Fill these rows of ``mixed`` (n, p)."""
        if self.cuts:
            for to, others in self.cuts:
                weighted_sum(self.weights, [sent[to], *(sent[one] for one in others)], mixed[to])
            return
        own = sent if self.rows is None else sent[self.rows]
        arrays = [own, *(sent[column] for column in self.sources)]
        if self.rows is None:
            weighted_sum(self.weights, arrays, mixed)
        else:
            mixed[self.rows] = weighted_sum(self.weights, arrays, torch.empty_like(own))


def _cuts(n: int, columns: np.ndarray) -> list[tuple[slice, list[slice]]]:
    """Stretches of rows whose neighbours are stretches, too; none where they would be short."""
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
    """All n nodes as rows of the same arrays; a round is a few tensor operations over all rows.

    Rows whose neighbours carry the same weights are combined together, by the same
    :func:`~mpigossip.mixing.combine.weighted_sum` that a rank uses for its single row.
    """

    def __init__(self, graph, layout: MessageLayout):
        """Arrays of n rows on the layout's devices; ``graph`` says who averages with whom."""
        super().__init__(graph, layout, range(graph.n))
        self._out = layout.empty(graph.n)
        self._mixed = layout.empty(graph.n)
        self._open: tuple[ExchangeKind, int] | None = None
        self._groups = lru_cache(KEPT)(partial(_groups, graph))
        self._sends = lru_cache(KEPT)(partial(_sends, graph, layout))

    def outbox(self, t: int) -> MessageArrays:
        return self._out

    def start(self, kind: ExchangeKind, t: int, exchange: int | None = None) -> None:
        """Quantize the messages, if the wire does, and remember what :meth:`finish` is to do."""
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
                average = weighted_sum([1 / self.n] * self.n, list(sent.split(1)), mixed[:1])
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
    """Return the rows of round t by their weights."""
    groups: dict[tuple[float, ...], list[tuple[int, np.ndarray]]] = {}
    for i in range(graph.n):
        sources, weights, own = graph.neighbours(t, i)
        key = (float(own), *(float(w) for w in weights))
        groups.setdefault(key, []).append((i, sources))
    found = []
    for weights, members in groups.items():
        rows = np.array([i for i, _ in members])
        columns = np.array([sources for _, sources in members], dtype=np.int64).T
        found.append(Rows.of(graph.n, weights, rows, columns))
    return found


def _sends(graph, layout: MessageLayout, kind: ExchangeKind, t: int) -> list[int]:
    sizes = layout.sent_bytes, layout.raw_bytes
    return [bytes_per_exchange(graph, kind, t, node, *sizes) for node in range(graph.n)]


def _pairs(left: MessageArrays, right: MessageArrays):
    for one, other in zip(left, right, strict=True):
        yield from zip(one, other, strict=True)

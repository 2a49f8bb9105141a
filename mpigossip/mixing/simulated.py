"""n nodes in this process: the reference that every transport must equal to the last bit."""

from __future__ import annotations

import numpy as np
import torch

from mpigossip.mixing.base import Common, Kind, Layout, Segments, is_average, traffic
from mpigossip.mixing.combine import combine
from mpigossip.mixing.wire import encode


class Simulated(Common):
    """All n nodes as rows of the same arrays; a round is a few tensor operations over all rows.

    Rows whose neighbours carry the same weights are combined together, by the same
    :func:`~mpigossip.mixing.combine.combine` that a rank uses for its single row.
    """

    def __init__(self, graph, layout: Layout):
        """Arrays of n rows on the layout's devices; ``graph`` says who averages with whom."""
        super().__init__(graph, layout, range(graph.n))
        self._out, self._mixed = layout.empty(graph.n), layout.empty(graph.n)
        self._open: tuple[Kind, int] | None = None

    def outbox(self, t: int) -> Segments:
        """Arrays (n, p) to fill whole."""
        return self._out

    def start(self, kind: Kind, t: int, exchange: int | None = None) -> None:
        """Quantize the messages, if the wire does, and remember what :meth:`finish` is to do."""
        self._open, layout = (kind, t), self.layout
        if not layout.wire.exact and kind is not Kind.LOCAL:
            encode(layout, self._out, self.rows, t if exchange is None else exchange, None)
        for node in self.rows:
            self.bytes_sent[node] += traffic(
                self.graph, kind, t, node, layout.sent_bytes, layout.raw_bytes
            )

    def finish(self) -> tuple[Segments, Segments]:
        """``sent`` and ``mixed``, each (n, p) a vector."""
        kind, t = self._open
        self._open = None
        if kind is Kind.LOCAL:
            return self._out, self._out
        if kind is Kind.GLOBAL or is_average(self.graph, t):
            for sent, mixed in _pairs(self._out, self._mixed):
                average = combine([1 / self.n] * self.n, list(sent.split(1)), mixed[:1])
                mixed[1:] = average
            return self._out, self._mixed
        for rows, weights, sources in self._groups(t):
            for sent, mixed in _pairs(self._out, self._mixed):
                whole = len(rows) == self.n
                arrays = [sent if whole else sent[rows], *(sent[column] for column in sources)]
                if whole:
                    combine(weights, arrays, mixed)
                else:
                    mixed[rows] = combine(weights, arrays, torch.empty_like(arrays[0]))
        return self._out, self._mixed

    def _groups(self, t: int):
        """Rows of round t by their weights: (rows, weights with the own one first, sources)."""
        groups: dict[tuple[float, ...], list[tuple[int, np.ndarray]]] = {}
        for i in self.rows:
            sources, weights, own = self.graph.neighbours(t, i)
            key = (float(own), *(float(w) for w in weights))
            groups.setdefault(key, []).append((i, sources))
        for weights, members in groups.items():
            rows = torch.tensor([i for i, _ in members])
            columns = np.array([sources for _, sources in members], dtype=np.int64).T
            yield rows, weights, [torch.from_numpy(column.copy()) for column in columns]

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        """Average of the rows of x (n, p), summed in node order: shape (p,)."""
        out = torch.empty_like(x[:1])
        return combine([1 / self.n] * self.n, list(x.split(1)), out)[0]

    def mean_scalars(self, values: torch.Tensor) -> torch.Tensor:
        """Average of the rows of small float64 values (n, k), summed in node order: (k,)."""
        return self.mean(values)

    def close(self) -> None:
        """Nothing to release: the arrays go with the object."""


def _pairs(left: Segments, right: Segments):
    for one, other in zip(left, right, strict=True):
        yield from zip(one, other, strict=True)

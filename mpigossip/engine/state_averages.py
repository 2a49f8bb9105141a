"""Averages of arrays of the local step's state, such as Adam's moments, at periods of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from mpigossip.engine.measurements import reject_non_finite
from mpigossip.engine.vector import named_arrays
from mpigossip.mixing.base import ExchangeKind


class StateArrays(Protocol):
    """Access to the arrays of the local step's state by name, as flat arrays shaped like x."""

    def read(self, engine: Any, name: str, segment: int, out: torch.Tensor) -> None:
        """Copy the array ``name`` of a segment to ``out`` (rows, elements of the segment)."""

    def write(self, engine: Any, name: str, segment: int, values: torch.Tensor) -> None:
        """Copy ``values``, shaped like ``out`` of :meth:`read`, to the array ``name``."""


class LocalState:
    """Arrays of a local step of this package, which are part of the state of the algorithm."""

    def read(self, engine: Any, name: str, segment: int, out: torch.Tensor) -> None:
        out.copy_(local_arrays(engine.states[segment])[name])

    def write(self, engine: Any, name: str, segment: int, values: torch.Tensor) -> None:
        local_arrays(engine.states[segment])[name].copy_(values)


def local_arrays(state: Any) -> dict[str, torch.Tensor]:
    """Return the arrays of the local step by name, such as "first" and "second" of AdamW.

    :param state: state of an algorithm, whose innermost field ``inner`` is the state of the local
        step; the state itself if it has no such field
    """
    while hasattr(state, "inner"):
        state = state.inner
    return dict(named_arrays(state))


class StateAverages:
    """Averages of arrays of the local step's state over the same graph as the model.

    After the exchange of x in step s, counted from the start of the run, each array v with the
    period p is averaged if s + 1 is a multiple of p:

    v_i ← Σ_j W_ij(r) v_j, with r = (s + 1)/p − 1.

    r counts the exchanges of this array. If the rounds of x were used instead, v would meet the
    same neighbour again and again whenever p is a multiple of the graph's period, such as n = 4,
    16 or 256 nodes of the one-peer exponential graph with p = 16. Since r follows from the number
    of the step, which is part of a checkpoint, nothing else has to be saved.

    If the cadence has global averages only, so has v: v_i ← (1/n) Σ_j v_j, or Σ_j w_j v_j if the
    nodes have weights w. DES-LOC (arXiv 2505.22549) does this with periods of 3K and 6K steps for
    Adam's m and v, where K is the period of the model. The counts that correct the bias of Adam's
    moments stay local, and so do all other parts of the state. Arrays are sent as float32, whatever
    the wire of the model is.
    """

    def __init__(self, periods: Mapping[str, int], kind: ExchangeKind, arrays: StateArrays):
        """Store the schedule and the arrays.

        :param periods: period of each array, in steps
        :param kind: GOSSIP or GLOBAL, the kind of all these exchanges
        :param arrays: access to the arrays
        """
        self.periods = periods
        self.kind = kind
        self.arrays = arrays

    def exchange(self, engine: Any) -> None:
        """Average the arrays that are due in the present step of the engine.

        The bytes that they send are added to the counters of the engine's mixer. Nothing is sent in
        a step in which no period ends; otherwise the call is collective over the nodes.

        :param engine: engine that makes the step
        :raises NonFiniteError: if an array contains NaN or infinite values
        """
        done = engine.index + 1
        for name, period in self.periods.items():
            if done % period == 0:
                # Rounds along the graph are consecutive; a global average belongs to none.
                t = done // period - 1 if self.kind is ExchangeKind.GOSSIP else 0
                self._average(engine, name, t)

    def _average(self, engine: Any, name: str, t: int) -> None:
        mixer = engine.mixer.state_mixers[name]
        out = mixer.outbox(t)
        engine.group.on_shards(lambda k: self.arrays.read(engine, name, k, out[k][0]))
        # The check of the model's message does not find these values: if g² overflows, the step of
        # Adam is 0.
        for k, arrays in enumerate(out):
            total = arrays[0].sum().view(1)
            columns = [slice(0, arrays[0].shape[1])]
            reject_non_finite(engine, engine.index, k, arrays[:1], columns, total, name)
        mixer.start(self.kind, t)
        _, mixed = mixer.finish()
        engine.group.on_shards(lambda k: self.arrays.write(engine, name, k, mixed[k][0]))
        for row, count in enumerate(mixer.bytes_sent):
            engine.mixer.bytes_sent[row] += count
            mixer.bytes_sent[row] = 0

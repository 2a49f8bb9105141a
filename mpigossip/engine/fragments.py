"""Exchanges of one fragment of the model at a time, which may stay in flight during later steps.

A fragment is a set of elements of the flat parameters, whose rows are local nodes. For the mixer, a
fragment is a whole message with fewer columns: they are gathered into a contiguous array before the
exchange and scattered afterwards. Mixers and wires therefore need no code for fragments. With P
fragments of equal size, messages need about 1/P of the memory; with fragments of named modules,
they need the memory of the largest fragment.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from mpigossip.algorithms.base import Algorithm, Step
from mpigossip.algorithms.cadence import FragmentSchedule
from mpigossip.engine.measurements import check_message
from mpigossip.engine.step import Engine
from mpigossip.mixing.base import ExchangeKind, MessageArrays

Columns = Sequence[slice]


class Fragments(NamedTuple):
    """Elements of each fragment, the schedule of the exchanges, and their algorithm."""

    schedule: FragmentSchedule
    cuts: Sequence[Sequence[Columns]]
    """For each segment and each fragment, its ranges of elements of x."""
    width: int
    """Number of elements of a message, which is the number of elements of the largest fragment."""
    exchanges: Sequence[Algorithm]
    """For each segment, the algorithm without its local step. Each segment has its own object,
    because an algorithm for a lossy wire may keep the vectors that it sent until it receives.
    """
    blend: float
    """Weight γ of x ← γ · received + (1 − γ) · x."""


class FragmentArrays(NamedTuple):
    """Gathered fragment of a segment: arrays (rows, width), with zeros after its last element."""

    x: torch.Tensor
    state: Any


class FragmentInFlight(NamedTuple):
    """Fragment whose exchange has begun: its step, and the gathered arrays of each segment."""

    fragment: int
    step: Step
    parts: list[FragmentArrays]


class FragmentExchange:
    """Exchange of one fragment at a time, while every step updates the whole model.

    The algorithm must have a ``local_update``. If the schedule has a delay of τ steps, an array of
    the shape of x holds received values that have not been applied yet. Writing a checkpoint
    receives a fragment in flight earlier than a step would. The results stay bitwise identical,
    because only exchanges change the arrays that the algorithm uses in exchanges.
    """

    outbox: MessageArrays | None
    _in_flight: FragmentInFlight | None

    def __init__(self, fragments: Fragments):
        self.fragments = fragments
        self._needs = fragments.exchanges[0].init(
            torch.empty(1, 2, dtype=torch.float32, device="meta")
        )
        self._received: list[torch.Tensor] = []
        self.discard()

    def adapt(self, engine: Engine, now: Step) -> None:
        """Make the local step, then apply the fragment that was sent τ steps before, if any."""
        engine.adapt(now._replace(kind=ExchangeKind.LOCAL))
        arriving = self.fragments.schedule.arriving(now.index)
        if arriving is not None:
            self.wait(engine)
            engine.group.on_shards(lambda k: self._apply(engine.vector.x[k], k, arriving))

    def send(self, engine: Engine, now: Step) -> None:
        """Make the step of :meth:`adapt`, then begin the exchange of the scheduled fragment."""
        self.adapt(engine, now)
        fragment = self.fragments.schedule.due(now.index)
        count = self.fragments.schedule.fragments
        assert fragment is not None, "all other steps are LOCAL"
        # For the algorithm, a round is an exchange of this fragment.
        step = now._replace(round=now.round // count)
        # This waits until the message before the last, in the same memory, has been read.
        out = engine.mixer.outbox(now.round)

        def send(k: int) -> FragmentArrays:
            columns = self.fragments.cuts[k][fragment]
            x = self._gather(engine.vector.x[k], columns)
            state = self._gather_state(self._needs, engine.states[k], columns)
            state = self.fragments.exchanges[k].send(x, None, state, out[k], step)
            check_message(engine, k, out[k], columns, now)
            if "keeps-x" in engine.method.needs:
                _scatter(x, engine.vector.x[k], columns)
            return FragmentArrays(x, state)

        self._in_flight = FragmentInFlight(fragment, step, engine.group.on_shards(send))
        engine.mixer.start(now.kind, now.round, engine.index)
        self.outbox = out

    def receive(self, engine: Engine, now: Step) -> None:
        """Receive the fragment; with a delay, :meth:`adapt` receives it in a later step."""
        if not self.fragments.schedule.delay:
            self.wait(engine)

    def wait(self, engine: Engine) -> None:
        """Wait for the neighbours of a fragment in flight, and receive their messages."""
        if self._in_flight is None:
            return
        fragment, now, parts = self._in_flight
        self.discard()
        sent, mixed = engine.mixer.finish()
        engine.measure(sent, mixed, now.kind)
        delayed = self.fragments.schedule.delay
        targets = self._received_arrays(engine) if delayed else engine.vector.x
        # The delayed fragment is blended into x when it is applied.
        weight = 1.0 if delayed else self.fragments.blend

        def receive(k: int) -> None:
            x, state = parts[k]
            columns = self.fragments.cuts[k][fragment]
            state = self.fragments.exchanges[k].receive(x, None, state, sent[k], mixed[k], now)
            _scatter_state(engine.states[k], state, columns)
            if "keeps-x" not in engine.method.needs:
                for span, c in _pair_columns(columns):
                    _blend(targets[k][:, c], x[:, span], weight)

        engine.group.on_shards(receive)

    def discard(self) -> None:
        self.outbox = None
        self._in_flight = None

    def restart(self, engine: Engine) -> None:
        self.wait(engine)  # the neighbours take part in an exchange that is in flight
        for received in self._received:
            received.zero_()

    def parts(self, engine: Engine) -> dict[str, list[torch.Tensor]]:
        """Receive a fragment in flight; with a delay, return the arrays of received values.

        An array is shaped like x. It also holds values that have been applied already.
        """
        self.wait(engine)
        if not self.fragments.schedule.delay:
            return {}
        return {"state/fragments/received": self._received_arrays(engine)}

    def _received_arrays(self, engine: Engine) -> list[torch.Tensor]:
        if not self._received:
            self._received = [torch.zeros_like(x) for x in engine.vector.x]
        return self._received

    def _gather(self, array: torch.Tensor, columns: Columns) -> torch.Tensor:
        gathered = array.new_zeros(len(array), self.fragments.width)
        for span, c in _pair_columns(columns):
            gathered[:, span] = array[:, c]
        return gathered

    def _gather_state(self, needs: Any, state: Any, columns: Columns) -> Any:
        """Gather the fields of a nested state that the exchange needs.

        :param needs: nested NamedTuple with these fields, whose tensors are not used
        :param state: state of the algorithm for a segment, which has these fields and others
        :param columns: ranges of elements of the fragment
        """
        if isinstance(needs, torch.Tensor):
            return self._gather(state, columns)
        pairs = ((getattr(needs, f), getattr(state, f)) for f in needs._fields)
        return type(needs)(*(self._gather_state(*pair, columns) for pair in pairs))

    def _apply(self, x: torch.Tensor, k: int, fragment: int) -> None:
        """Blend the received elements of a fragment into the parameters x of segment k.

        :param x: parameters of the segment, (rows, elements)
        :param k: index of the segment
        :param fragment: index of the fragment
        """
        for c in self.fragments.cuts[k][fragment]:
            _blend(x[:, c], self._received[k][:, c], self.fragments.blend)


def _blend(x: torch.Tensor, received: torch.Tensor, weight: float) -> None:
    """Set x to weight · received + (1 − weight) · x."""
    if weight == 1:
        x.copy_(received)
    elif weight:
        x.mul_(1 - weight).add_(received * weight)


def _pair_columns(columns: Columns) -> list[tuple[slice, slice]]:
    """Return pairs (range of the gathered fragment, range of x) that contain the same elements."""
    pairs = []
    begin = 0
    for c in columns:
        pairs.append((slice(begin, begin + c.stop - c.start), c))
        begin += c.stop - c.start
    return pairs


def _scatter(part: torch.Tensor, into: torch.Tensor, columns: Columns) -> None:
    for span, c in _pair_columns(columns):
        into[:, c] = part[:, span]


def _scatter_state(state: Any, part: Any, columns: Columns) -> None:
    if isinstance(part, torch.Tensor):
        _scatter(part, state, columns)
        return
    for field in part._fields:
        _scatter_state(getattr(state, field), getattr(part, field), columns)

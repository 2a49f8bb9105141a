"""Exchanges of one fragment of the model at a time, which may stay in flight during later steps.

For the mixer, a fragment is a whole message of a narrower layout: its columns are gathered before
the exchange and scattered afterwards. Every mixer and wire can therefore be used, in 1/P of the
memory for P fragments.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from mpigossip.algorithms.base import Algorithm, Step
from mpigossip.algorithms.cadence import FragmentSchedule
from mpigossip.engine.measurements import check_message
from mpigossip.engine.step import Engine
from mpigossip.mixing.base import ExchangeKind, Mixer

Columns = Sequence[slice]


class Fragments(NamedTuple):
    """Columns of each fragment, and when and how it is exchanged."""

    schedule: FragmentSchedule
    cuts: Sequence[Sequence[Columns]]
    """For each segment and each fragment, its columns."""
    width: int
    """Columns of a message, the largest width of a fragment."""
    exchanges: Sequence[Algorithm]
    """For each segment, the algorithm without its local step; it may keep x½ until it receives."""
    blend: float
    """Factor α of x ← α · received + (1 − α) · x, if there is a delay."""


class FragmentArrays(NamedTuple):
    """Gathered fragment of a segment: arrays (rows, width), with 0 after its columns."""

    x: torch.Tensor
    state: Any


class OpenExchange(NamedTuple):
    """Exchange that has begun: its fragment, its step, and the gathered arrays of each segment."""

    fragment: int
    step: Step
    parts: list[FragmentArrays]


class Fragmented(Engine):
    """Engine that makes local steps of the whole vector and exchanges one fragment at a time.

    It serves algorithms with a ``local_update``. The state between steps is the state of the
    algorithm and, if there is a delay, one array shaped like x with received values that have not
    been applied yet. Only exchanges change the arrays of the algorithm, so that receiving early, as
    a checkpoint does, changes no bit.
    """

    def __init__(self, *args: Any, fragments: Fragments, **kwargs: Any):
        self.fragments = fragments
        self._needs = fragments.exchanges[0].init(torch.empty(1, 2, device="meta"))
        self._open: OpenExchange | None = None
        self._received: list[torch.Tensor] = []
        super().__init__(*args, **kwargs)

    def adapt(self, now: Step) -> None:
        """Make the local step, then apply the fragment that was sent τ steps before."""
        super().adapt(now._replace(kind=ExchangeKind.LOCAL))
        arriving = self.fragments.schedule.arriving(now.index)
        if arriving is not None:
            self.wait_exchange()
            self.group.on_shards(lambda k: self._blend(k, arriving))

    def exchange(self, now: Step) -> tuple[Sequence, Sequence]:
        """Make the local step and begin the exchange of the due fragment.

        Without a delay, this also waits for the exchange and receives its messages.
        """
        self.adapt(now)
        fragment = self.fragments.schedule.due(now.index)
        count = self.fragments.schedule.fragments
        assert fragment is not None, "all other steps are LOCAL"
        # the round of the graph counts only the exchanges of this fragment
        step = now._replace(round=now.round // count)
        # waits until the message before the last, in the same memory, has been read
        out = self.mixer.outbox(now.round)

        def send(k: int) -> FragmentArrays:
            x, state = self._gathered(k, fragment)
            state = self.fragments.exchanges[k].send(x, None, state, out[k], step)
            check_message(self, k, out[k], self.fragments.cuts[k][fragment])
            if "keeps-x" in self.method.needs:
                _scatter(x, self.vector.x[k], self.fragments.cuts[k][fragment])
            return FragmentArrays(x, state)

        self._open = OpenExchange(fragment, step, self.group.on_shards(send))
        self.mixer.start(now.kind, now.round, self.index)
        if not self.fragments.schedule.delay:
            self.wait_exchange()
        return (), ()

    def receive(self, sent: Sequence, mixed: Sequence, now: Step) -> None:
        """Do nothing: :meth:`wait_exchange` receives."""

    def wait_exchange(self, into: torch.Tensor | None = None) -> None:
        """Wait for the neighbours of an open exchange, and receive its messages."""
        if self._open is None:
            return
        (fragment, now, parts), self._open = self._open, None
        sent, mixed = self.mixer.finish()
        self.measure(sent, mixed, now.kind)
        targets = self._received_arrays() if self.fragments.schedule.delay else self.vector.x

        def receive(k: int) -> None:
            x, state = parts[k]
            state = self.fragments.exchanges[k].receive(x, None, state, sent[k], mixed[k], now)
            self._scatter_state(self.states[k], state, self.fragments.cuts[k][fragment])
            if self.fragments.blend:
                _scatter(x, targets[k], self.fragments.cuts[k][fragment])

        self.group.on_shards(receive)

    def replace_mixer(self, mixer: Mixer) -> None:
        """Continue with another mixer; an open exchange is discarded."""
        super().replace_mixer(mixer)
        self._open = None

    def parts(self) -> dict[str, list[torch.Tensor]]:
        """Return the arrays of the algorithm and the received values; wait for an open exchange."""
        self.wait_exchange()
        parts = super().parts()
        if self.fragments.schedule.delay:
            parts["state/fragments/received"] = self._received_arrays()
        return parts

    def _received_arrays(self) -> list[torch.Tensor]:
        if not self._received:
            self._received = [torch.zeros_like(x) for x in self.vector.x]
        return self._received

    def _gathered(self, k: int, fragment: int) -> FragmentArrays:
        columns = self.fragments.cuts[k][fragment]
        x = self._gather(self.vector.x[k], columns)
        return FragmentArrays(x, self._gather_state(self._needs, self.states[k], columns))

    def _gather(self, array: torch.Tensor, columns: Columns) -> torch.Tensor:
        gathered = array.new_zeros(len(array), self.fragments.width)
        for span, c in _pair_columns(columns):
            gathered[:, span] = array[:, c]
        return gathered

    def _gather_state(self, needs: Any, state: Any, columns: Columns) -> Any:
        """Gather the fields of a nested state that the exchange needs."""
        if isinstance(needs, torch.Tensor):
            return self._gather(state, columns)
        pairs = ((getattr(needs, f), getattr(state, f)) for f in needs._fields)
        return type(needs)(*(self._gather_state(*pair, columns) for pair in pairs))

    def _scatter_state(self, state: Any, part: Any, columns: Columns) -> None:
        if isinstance(part, torch.Tensor):
            _scatter(part, state, columns)
            return
        for field in part._fields:
            self._scatter_state(getattr(state, field), getattr(part, field), columns)

    def _blend(self, k: int, fragment: int) -> None:
        blend = self.fragments.blend
        for c in self.fragments.cuts[k][fragment] if blend else ():
            x = self.vector.x[k][:, c]
            received = self._received[k][:, c]
            if blend == 1:
                x.copy_(received)
            else:
                x.mul_(1 - blend).add_(received * blend)


def _pair_columns(columns: Columns) -> list[tuple[slice, slice]]:
    pairs = []
    begin = 0
    for c in columns:
        pairs.append((slice(begin, begin + c.stop - c.start), c))
        begin += c.stop - c.start
    return pairs


def _scatter(part: torch.Tensor, into: torch.Tensor, columns: Columns) -> None:
    for span, c in _pair_columns(columns):
        into[:, c] = part[:, span]

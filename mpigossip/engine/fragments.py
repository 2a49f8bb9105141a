"""Exchanges of one fragment of the model at a time, which may stay open during later steps.

To the mixer a fragment is a whole message of a narrower layout: its columns are gathered before
the exchange and scattered afterwards. So any mixer and wire serves, in 1/P of its memory.
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
    """The columns of each fragment, when it is exchanged, and how."""

    schedule: FragmentSchedule
    cuts: Sequence[Sequence[Columns]]
    """of each segment, of each fragment"""
    width: int
    """columns of a message, which a fragment has at most"""
    exchanges: Sequence[Algorithm]
    """of each segment the method without its local step: it may keep x½ until it receives"""
    blend: float
    """α of x ← α · received + (1 − α) · x, where there is a delay"""


class FragmentArrays(NamedTuple):
    """A segment's fragment, gathered: arrays (rows, width), 0 behind its columns."""

    x: torch.Tensor
    state: Any


class OpenExchange(NamedTuple):
    """An exchange that has begun: of which fragment, at which step, of what."""

    fragment: int
    step: Step
    parts: list[FragmentArrays]


class Fragmented(Engine):
    """Local steps of the whole vector, and exchanges of a fragment of what they have left.

    For methods with a ``local_update``. All state between steps is the method's
    and, where there is a delay, one array shaped like x: what was received and is still to be
    applied. A method's own arrays are touched by exchanges alone, so that receiving early, as a
    checkpoint does, changes no bit.
    """

    def __init__(self, *given: Any, fragments: Fragments, **more: Any):
        self.fragments = fragments
        self._needs = fragments.exchanges[0].init(torch.empty(1, 2, device="meta"))
        self._open: OpenExchange | None = None
        self._received: list[torch.Tensor] = []
        super().__init__(*given, **more)

    def adapt(self, now: Step) -> None:
        """The local step; then apply the fragment that was sent τ steps ago."""
        super().adapt(now._replace(kind=ExchangeKind.LOCAL))
        arriving = self.fragments.schedule.arriving(now.index)
        if arriving is not None:
            self.wait_exchange()
            self.group.on_shards(lambda k: self._blend(k, arriving))

    def exchange(self, now: Step) -> tuple[Sequence, Sequence]:
        """The local step, and the exchange of the due fragment; without a delay, all of it."""
        self.adapt(now)
        fragment = self.fragments.schedule.due(now.index)
        count = self.fragments.schedule.fragments
        assert fragment is not None, "all other steps are LOCAL"
        # as if the fragment were alone: the graph's round is that of its own exchanges
        own = now._replace(round=now.round // count)
        # waits for those who read the exchange before the last out of this memory
        out = self.mixer.outbox(now.round)

        def send(k: int) -> FragmentArrays:
            x, state = self._gathered(k, fragment)
            state = self.fragments.exchanges[k].send(x, None, state, out[k], own)
            check_message(self, k, out[k], self.fragments.cuts[k][fragment])
            if "keeps-x" in self.method.needs:
                _scatter(x, self.vector.x[k], self.fragments.cuts[k][fragment])
            return FragmentArrays(x, state)

        self._open = OpenExchange(fragment, own, self.group.on_shards(send))
        self.mixer.start(now.kind, now.round, self.index)
        if not self.fragments.schedule.delay:
            self.wait_exchange()
        return (), ()

    def receive(self, sent: Sequence, mixed: Sequence, now: Step) -> None:
        """Nothing: :meth:`settle` has received, or is going to."""

    def wait_exchange(self, into: torch.Tensor | None = None) -> None:
        """Wait for the neighbours of an open exchange, and receive what it brings."""
        if self._open is None:
            return
        (fragment, now, parts), self._open = self._open, None
        sent, mixed = self.mixer.finish()
        self.measure(sent, mixed, now.kind)
        rooms = self._rooms() if self.fragments.schedule.delay else self.vector.x

        def receive(k: int) -> None:
            x, state = parts[k]
            state = self.fragments.exchanges[k].receive(x, None, state, sent[k], mixed[k], now)
            self._put(self.states[k], state, self.fragments.cuts[k][fragment])
            if self.fragments.blend:
                _scatter(x, rooms[k], self.fragments.cuts[k][fragment])

        self.group.on_shards(receive)

    def replace_mixer(self, mixer: Mixer) -> None:
        """Go on with another mixer; an exchange that is open is forgotten."""
        super().replace_mixer(mixer)
        self._open = None

    def parts(self) -> dict[str, list[torch.Tensor]]:
        """The method's arrays, and what was received; waits for an open exchange's neighbours."""
        self.wait_exchange()
        found = super().parts()
        if self.fragments.schedule.delay:
            found["state/fragments/received"] = self._rooms()
        return found

    def _rooms(self) -> list[torch.Tensor]:
        if not self._received:
            self._received = [torch.zeros_like(x) for x in self.vector.x]
        return self._received

    def _gathered(self, k: int, fragment: int) -> FragmentArrays:
        columns = self.fragments.cuts[k][fragment]
        x = self._gather(self.vector.x[k], columns)
        return FragmentArrays(x, self._taken(self._needs, self.states[k], columns))

    def _gather(self, array: torch.Tensor, columns: Columns) -> torch.Tensor:
        found = array.new_zeros(len(array), self.fragments.width)
        for at, c in _places(columns):
            found[:, at] = array[:, c]
        return found

    def _taken(self, needs: Any, state: Any, columns: Columns) -> Any:
        """Gather what the exchange needs of a nested state."""
        if isinstance(needs, torch.Tensor):
            return self._gather(state, columns)
        pairs = ((getattr(needs, f), getattr(state, f)) for f in needs._fields)
        return type(needs)(*(self._taken(*pair, columns) for pair in pairs))

    def _put(self, state: Any, part: Any, columns: Columns) -> None:
        if isinstance(part, torch.Tensor):
            _scatter(part, state, columns)
            return
        for field in part._fields:
            self._put(getattr(state, field), getattr(part, field), columns)

    def _blend(self, k: int, fragment: int) -> None:
        blend = self.fragments.blend
        for c in self.fragments.cuts[k][fragment] if blend else ():
            mine = self.vector.x[k][:, c]
            theirs = self._received[k][:, c]
            if blend == 1:
                mine.copy_(theirs)
            else:
                mine.mul_(1 - blend).add_(theirs * blend)


def _places(columns: Columns) -> list[tuple[slice, slice]]:
    found = []
    at = 0
    for c in columns:
        found.append((slice(at, at + c.stop - c.start), c))
        at += c.stop - c.start
    return found


def _scatter(part: torch.Tensor, into: torch.Tensor, columns: Columns) -> None:
    for at, c in _places(columns):
        into[:, c] = part[:, at]

"""Exchanges of a fragment of the model at a time, which may stay open while steps go on.

To the mixer a fragment is a whole message of a narrower layout: its columns are gathered before
the exchange and scattered afterwards. So any mixer and wire serves, in 1/P of its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from mpigossip.algorithms.base import Algorithm, Step
from mpigossip.algorithms.fragments import Turns
from mpigossip.engine.vector import Vector
from mpigossip.groups.base import Group
from mpigossip.mixing.base import Kind, Mixer

Columns = Sequence[slice]


class Part(NamedTuple):
    """A segment's fragment, gathered: arrays (rows, width), 0 behind its columns."""

    x: torch.Tensor
    g: torch.Tensor | None
    """None where the local step stands apart, or is still to come"""
    state: Any


class Open(NamedTuple):
    """An exchange that has begun: of which fragment, at which step, of what.

    One that was sent ahead of its gradient has a step without a learning rate.
    """

    fragment: int
    step: Step
    parts: list[Part]


class Engine(Protocol):
    """What is asked of the engine."""

    mixer: Mixer
    group: Group
    vector: Vector
    method: Algorithm
    states: list[Any]
    index: int
    round: int

    def adapt(self, now: Step) -> None:
        """A LOCAL step in place, of a method that has ``alone``."""

    def distance(self, sent: Sequence, mixed: Sequence, kind: Kind) -> torch.Tensor:
        """‖mixed − sent‖ where it is asked for, else NaN: (rows,)."""

    def look(self, out: Sequence, columns: slice | None = None) -> None:
        """Show what is about to be sent."""


class Fragments:
    """The columns of each fragment, the method on them, and the exchange that is open.

    Where the local step stands ``apart`` from the exchange, as in all methods with ``alone``, it
    is the whole vector's and the methods here have none: they exchange what it has left. Else
    each takes its fragment's gradient, in a step that is LOCAL for all fragments but the due one,
    and there is no delay. Where it is ``ahead``, the due one is sent before the gradient is there.

    All state between steps is one array shaped like x, where there is a delay: what was received
    and is still to be taken in. A method's own arrays are touched by exchanges alone, so that
    receiving early, as a checkpoint does, changes no bit. What a method keeps of a row, (rows, 1),
    it has here of each fragment: (rows, P).
    """

    def __init__(
        self,
        turns: Turns,
        cuts: Sequence[Sequence[Columns]],
        width: int,
        methods: Sequence[Sequence[Algorithm]],
        *,
        blend: float = 1.0,
        apart: bool = True,
    ):
        """``cuts``, ``methods``: of each segment, of each fragment, at most ``width`` wide.

        ``blend``: α of x ← α · received + (1 − α) · x.
        """
        self.turns, self.width = turns, width
        self._cuts, self._methods, self._blend, self._apart = cuts, methods, blend, apart
        self._needs = methods[0][0].init(torch.empty(1, 2, device="meta"))
        self._open: Open | None = None
        self._came: tuple | None = None
        self._received: list[torch.Tensor] = []
        self._scratch: list[tuple[torch.Tensor, ...]] = []
        self._apart_by: torch.Tensor | None = None

    def fresh(self, state: Any) -> Any:
        """A method's new state with what it keeps of a row once for each fragment."""
        if isinstance(state, torch.Tensor):
            return state.repeat(1, self.turns.fragments) if state.shape[1] == 1 else state
        return state if self._apart else type(state)(*map(self.fresh, state))

    @property
    def is_ahead(self) -> bool:
        """Whether what is open was sent before its step has a gradient."""
        return self._open is not None and self._open.step.lr is None

    def ahead(self, engine: Engine, now: Step) -> None:
        """Send the due fragment before there is a gradient."""
        due = self.turns.due(now.index)
        if due is not None:
            self._begin(engine, Open(due, self._own(now), self._gathered(engine, due)))

    def step(self, engine: Engine, now: Step) -> torch.Tensor | None:
        """The local step; then take in the fragment that was sent τ steps ago, send the due one.

        ‖mixed − sent‖ of a fragment that came, (rows,); None where none did.
        """
        due, arriving = self.turns.due(now.index), self.turns.arriving(now.index)
        self._apart_by = None
        self._local(engine, now._replace(kind=Kind.LOCAL), due)
        if arriving is not None:
            self.settle(engine)
            engine.group.on_shards(lambda k: self._blended(engine.vector.x[k], k, arriving))
        if due is not None:
            opened = self._open
            if opened is not None and opened.step.lr is None:  # sent ahead
                self._open = opened._replace(step=self._own(now))
            else:
                parts = self._gathered(engine, due, gradient=not self._apart)
                self._begin(engine, Open(due, self._own(now), parts))
            if not self.turns.delay:
                self.settle(engine)
        return self._apart_by

    def settle(self, engine: Engine) -> None:
        """Receive what an open exchange brings, waiting for its neighbours; x has it later."""
        if self._open is None:
            return
        opened, came = self._open, self._came
        self.drop()
        came = came or engine.mixer.finish()
        if opened.step.lr is None:  # the step takes it in
            self._open, self._came = opened, came
            return
        (fragment, now, parts), (sent, mixed) = opened, came
        self._apart_by = engine.distance(sent, mixed, now.kind)
        into = self._rooms(engine) if self.turns.delay else engine.vector.x

        def receive(k: int) -> None:
            (x, g, state), columns = parts[k], self._cuts[k][fragment]
            if g is None and not self._apart:
                g = self._gather(engine.vector.g[k], columns)
            state = self._methods[k][fragment].receive(x, g, state, sent[k], mixed[k], now)
            self._put(engine.states[k], state, k, fragment)
            if self._blend:
                _scatter(x, into[k], columns)

        engine.group.on_shards(receive)

    def parts(self, engine: Engine) -> dict[str, list[torch.Tensor]]:
        """What is kept between steps, by name; waits for the neighbours of an open exchange."""
        self.settle(engine)
        return {"state/fragments/received": self._rooms(engine)} if self.turns.delay else {}

    def _rooms(self, engine: Engine) -> list[torch.Tensor]:
        """For what is still to be taken in, shaped like x; other columns are of no meaning."""
        if not self._received:
            self._received = [torch.zeros_like(x) for x in engine.vector.x]
        return self._received

    def drop(self) -> None:
        """Forget an exchange that is open."""
        self._open, self._came = None, None

    def _own(self, now: Step) -> Step:
        """As if the fragment were alone: the graph's round is that of its own exchanges."""
        return now._replace(round=now.round // self.turns.fragments)

    def _local(self, engine: Engine, now: Step, due: int | None) -> None:
        """A LOCAL step: of all columns where it stands apart, else of all but the due fragment."""
        if self._apart:
            engine.adapt(now)
            return
        if not self._scratch:
            self._scratch = [self._room(x) for x in engine.vector.x]

        def work(k: int) -> None:
            out = self._scratch[k]
            for fragment, method in enumerate(self._methods[k]):
                if fragment == due:
                    continue
                x, g, state = self._part(engine, k, fragment, gradient=True)
                state = method.send(x, None if method.ahead else g, state, out, now)
                state = method.receive(x, g, state, out, out, now)
                self._put(engine.states[k], state, k, fragment)
                _scatter(x, engine.vector.x[k], self._cuts[k][fragment])

        engine.group.on_shards(work)

    def _room(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """An outbox of a fragment for steps that send nothing."""
        (method, *_), *_ = self._methods
        rows, one = len(x), torch.float64
        vectors = [x.new_empty(rows, self.width) for _ in range(method.vectors)]
        return *vectors, *(x.new_empty(rows, 1, dtype=one) for _ in range(method.scalars))

    def _begin(self, engine: Engine, opened: Open) -> None:
        """Send a fragment."""
        fragment, now, parts = opened
        # waits for those who read the exchange before the last out of this memory
        out = engine.mixer.outbox(engine.round)

        def send(k: int) -> Part:
            x, g, state = parts[k]
            return Part(x, g, self._methods[k][fragment].send(x, g, state, out[k], now))

        self._open = Open(fragment, now, engine.group.on_shards(send))
        for k, arrays in enumerate(out):
            if "keeps-x" in engine.method.needs:
                _scatter(self._open.parts[k].x, engine.vector.x[k], self._cuts[k][fragment])
            for at, c in _places(self._cuts[k][fragment]):
                engine.look([tuple(array[:, at] for array in arrays)], c)
        engine.mixer.start(now.kind, engine.round, engine.index)

    def _gathered(self, engine: Engine, fragment: int, gradient: bool = False) -> list[Part]:
        return engine.group.on_shards(lambda k: self._part(engine, k, fragment, gradient))

    def _part(self, engine: Engine, k: int, fragment: int, gradient: bool) -> Part:
        columns, vector = self._cuts[k][fragment], engine.vector
        g = self._gather(vector.g[k], columns) if gradient else None
        state = self._taken(self._needs, engine.states[k], k, fragment)
        return Part(self._gather(vector.x[k], columns), g, state)

    def _gather(self, array: torch.Tensor, columns: Columns) -> torch.Tensor:
        """A copy of some columns side by side."""
        found = array.new_zeros(len(array), self.width)
        for at, c in _places(columns):
            found[:, at] = array[:, c]
        return found

    def _taken(self, needs: Any, state: Any, k: int, fragment: int) -> Any:
        """Of a nested state what the methods here have of it, gathered."""
        if isinstance(needs, torch.Tensor):
            if needs.shape[1] == 1:
                return state[:, fragment : fragment + 1].clone()
            return self._gather(state, self._cuts[k][fragment])
        fields = needs._fields
        return type(needs)(
            *(self._taken(getattr(needs, f), getattr(state, f), k, fragment) for f in fields)
        )

    def _put(self, state: Any, part: Any, k: int, fragment: int) -> None:
        """What the methods here have of a nested state, back to its place."""
        if isinstance(part, torch.Tensor):
            if part.shape[1] == 1:
                state[:, fragment : fragment + 1] = part
            else:
                _scatter(part, state, self._cuts[k][fragment])
            return
        for field in part._fields:
            self._put(getattr(state, field), getattr(part, field), k, fragment)

    def _blended(self, x: torch.Tensor, k: int, fragment: int) -> None:
        for c in self._cuts[k][fragment] if self._blend else ():
            mine, theirs = x[:, c], self._received[k][:, c]
            if self._blend == 1:
                mine.copy_(theirs)
            else:
                mine.mul_(1 - self._blend).add_(theirs * self._blend)


def _places(columns: Columns) -> list[tuple[slice, slice]]:
    """Where columns lie in a fragment, and in the vector."""
    found, at = [], 0
    for c in columns:
        found.append((slice(at, at + c.stop - c.start), c))
        at += c.stop - c.start
    return found


def _scatter(part: torch.Tensor, into: torch.Tensor, columns: Columns) -> None:
    for at, c in _places(columns):
        into[:, c] = part[:, at]

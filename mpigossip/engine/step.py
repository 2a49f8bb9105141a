"""One step of decentralized training: the only place where group, mixer and algorithm meet."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mpigossip.algorithms.base import Algorithm, Step
from mpigossip.algorithms.cadence import Cadence
from mpigossip.engine.measurements import Clock, Record, check_message, make_record, mixed_distance
from mpigossip.engine.vector import FlatParameters, bits, named_arrays, packed, scatter_row
from mpigossip.groups.base import Group, local_shards, profiled
from mpigossip.mixing.base import ExchangeKind, Mixer


class Engine:
    """The nodes that live in this process: a step from a gradient, wherever that comes from.

    ``index`` counts steps, ``round`` is the graph's clock; ``state_start`` the step at which the
    method's state began, ``counts`` each row's local steps since. A checkpoint has these and the
    states of method and cadence; an exchange that is ``under_way`` is repeated bitwise.
    """

    counts: list[int]
    states: list[Any]
    cadence_state: Any
    mixed_distance: torch.Tensor | None  # ‖mixed − sent‖ of the present step
    _kind: ExchangeKind | None
    _exchanged: Any
    _outbox: Sequence | None

    def __init__(
        self,
        mixer: Mixer,
        group: Group,
        vector: FlatParameters,
        methods: Sequence[Algorithm],
        cadence: Cadence,
        *,
        measure_every: int = 0,
    ):
        """``methods``: one a segment; ``measure_every``: steps between two consensus distances."""
        self.group = group
        self.vector = vector
        self.cadence = cadence
        self.methods = methods
        self.method = methods[0]
        self.measure_every = measure_every
        self.index = 0
        self.state_start = 0
        self.round = 0
        self.replace_mixer(mixer)
        self.restart()

    def step(
        self,
        lr: float,
        skipped: tuple[int, ...] = (),
        *,
        loss: torch.Tensor | None = None,
        gradient_norm: torch.Tensor | None = None,
    ) -> Record:
        """x_i ← receive(x_i, g_i, Σ_j W[i, j](t) · send(x_j, g_j)); see :meth:`begin`."""
        now = self.begin(lr, skipped)  # the cadence decides: local, gossip or global
        if now.kind is ExchangeKind.LOCAL:
            self.adapt(now)
        else:
            sent, mixed = self.exchange(now)  # waits for in-neighbours
            self.receive(sent, mixed, now)
        self.clock.lap("exchange_s")
        self.group.all_gather(self.vector.x, self.vector.full)  # waits for the node's slots
        self.clock.lap("node_s")
        return self.record(now, loss, gradient_norm)

    def ahead(self) -> None:
        """Begin the next step; send, where the method can before there is a gradient."""
        self.clock.begin()
        self._kind = self.cadence.kind(self.cadence_state, self.index - self.state_start)
        if self.method.ahead:
            self.send(self._now(None))
        self.clock.lap("exchange_s")

    def begin(self, lr: float, skipped: tuple[int, ...] = ()) -> Step:
        """The step; rows in ``skipped`` take no local step, and join the round."""
        if self._kind is None:
            self.ahead()
        self.mixed_distance = None
        return self._now(lr)._replace(skipped=skipped)

    def _now(self, lr: float | None) -> Step:
        assert self._kind is not None, "a step begins with ahead()"
        counts = tuple(self.counts)
        return Step(self.index - self.state_start, self.round, self._kind, lr, counts=counts)

    def adapt(self, now: Step) -> None:
        """A LOCAL step."""
        # a method without a local update needs an outbox, and asynchronous nodes show theirs always
        if self.method.local_update is None or not self.mixer.synchronous:
            self.receive(*self.exchange(now), now)
            return

        def adapt(slot: int):
            update: Any = self.methods[slot].local_update
            return update(self.vector.x[slot], self._gradient(slot), self.states[slot], now)

        self.states = self.group.on_shards(adapt)

    def exchange(self, now: Step) -> tuple[Sequence, Sequence]:
        """Return what was sent and what was mixed; waits for in-neighbours."""
        if not self.in_flight:
            self.send(now)
        self.wait_exchange(self._reusable_x(now.kind))
        sent, mixed = self._exchanged
        self.measure(sent, mixed, now.kind)
        return sent, mixed

    @profiled("send")
    def send(self, now: Step) -> None:
        """Let the algorithm fill the outbox, shard by shard, and begin the exchange."""
        # waits for its last readers
        out = self.mixer.outbox(now.round)
        x = self.vector.x

        def send(slot: int):
            g = None if self.method.ahead else self._gradient(slot)
            state = self.methods[slot].send(x[slot], g, self.states[slot], out[slot], now)
            check_message(self, slot, out[slot], [slice(0, x[slot].shape[1])])
            return state

        self.states = self.group.on_shards(send)
        self.mixer.start(now.kind, now.round, self.index)
        self.in_flight = True
        self._outbox = out

    def sent_x(self) -> list[torch.Tensor]:
        """Return, for each segment, memory with the x of the exchange that has just begun.

        This is the outbox if the method sends x as it is, and a copy otherwise. With an exact wire,
        nothing is written to the outbox before the next exchange begins; for a lossy one, the
        progress thread may still have to quantize it. On a GPU the host waits for a comparison.
        """
        assert self._outbox is not None, "no exchange has begun"
        found = []
        for out, x in zip(self._outbox, self.vector.x, strict=True):
            stays = self.mixer.layout.wire.exact and torch.equal(bits(out[0]), bits(x))
            found.append(out[0] if stays else x.clone())
        return found

    @profiled("wait for neighbours")
    def wait_exchange(self, into: torch.Tensor | None = None) -> None:
        """Wait for the neighbours of an exchange that has begun; ``into``: where to sum it."""
        if self.in_flight and self._exchanged is None:
            self._exchanged = self.mixer.finish(into)

    def _reusable_x(self, kind: ExchangeKind) -> torch.Tensor | None:
        """The array x, where the method makes it what is mixed and nobody needs it any more."""
        layout = self.mixer.layout
        one = len(self.vector.x) == layout.vectors == 1 and not layout.scalars
        plain = one and layout.raw_bytes is None and kind is ExchangeKind.GOSSIP
        return self.vector.x[0] if plain and self.method.takes_mixed else None

    @profiled("receive")
    def receive(self, sent: Sequence, mixed: Sequence, now: Step) -> None:
        """Let the algorithm apply what was received, shard by shard."""

        def receive(slot: int):
            x = self.vector.x[slot]
            g = self._gradient(slot)
            state = self.states[slot]
            return self.methods[slot].receive(x, g, state, sent[slot], mixed[slot], now)

        self.states = self.group.on_shards(receive)

    def _gradient(self, slot: int) -> torch.Tensor | None:
        return None if self.method.raw else self.vector.g[slot]

    def replace_mixer(self, mixer: Mixer) -> None:
        """Go on with another mixer; a step that has begun begins again."""
        self.mixer = mixer
        self.clock = Clock(mixer)
        self._end()

    def _end(self) -> None:
        self._kind = None  # of the step that has begun
        self.in_flight = False  # whether its exchange has
        self._exchanged = None  # what it brought
        self._outbox = None  # what was sent, until the next exchange begins

    def average(self, lr: float) -> None:
        """An exchange without a step: if nodes that wait were silent, others would drift away."""
        self._kind = ExchangeKind.GOSSIP
        now = self._now(lr)._replace(skipped=tuple(range(len(self.mixer.local_nodes))), waits=True)
        for g in self.vector.g:
            g.zero_()
        self.send(now)
        self.receive(*self.mixer.finish(), now)
        self._end()
        self.round += 1
        self.group.all_gather(self.vector.x, self.vector.full)

    @property
    def measuring(self) -> bool:
        """Return whether the present step measures consensus distances, as every k-th one does."""
        return bool(self.measure_every) and self.index % self.measure_every == 0

    def measure(self, sent: Sequence, mixed: Sequence, kind: ExchangeKind) -> None:
        """Keep ‖mixed − sent‖ where the record or the cadence asks for it."""
        if self.measuring or kind is ExchangeKind.GLOBAL and "variance" in self.cadence.measures:
            self.mixed_distance = mixed_distance(sent, mixed, self.group)

    def record(self, now: Step, loss: Any, norm: Any) -> Record:
        """Count the step; what it showed. ``loss`` and gradient ``norm``: (rows,), if known."""
        found, averages = make_record(self, now, loss, norm)
        self.cadence_state = self.cadence.observe(self.cadence_state, now, averages)
        self.counts = [count + (row not in now.skipped) for row, count in enumerate(self.counts)]
        self.round += now.kind is ExchangeKind.GOSSIP
        self.index += 1
        self._end()
        return found

    # -- state by name --------------------------------------------------------------------------

    def restart(self) -> None:
        """Begin the method's and the cadence's state anew at the present step."""
        self.states = [m.init(x) for m, x in zip(self.methods, self.vector.x, strict=True)]
        self.cadence_state = self.cadence.init()
        self.state_start, self.counts = self.index, [0] * len(self.mixer.local_nodes)

    def parts(self) -> dict[str, list[torch.Tensor]]:
        """The method's arrays as they are: by name, one a segment."""
        named = [dict(named_arrays(state)) for state in self.states]
        return {f"state/{k}": [each[k] for each in named] for k in named[0]}

    def pack_state(self, row: int = 0, places: Mapping[str, np.ndarray] | None = None) -> dict:
        """A node's state, packed over ``places`` if given; in the first process of the node."""
        return packed(self.parts(), self.group, self.vector.flat, row, places or {})

    def numbers(self) -> dict[str, Any]:
        """The counters, and the cadence's state as ``cadence/…``; the same on all nodes."""
        counters = {"index": self.index, "born": self.state_start, "round": self.round}
        return counters | {f"cadence/{k}": v for k, v in self.cadence_state._asdict().items()}

    def restore(
        self, arrays: Mapping[str, np.ndarray], numbers: Mapping[str, Any], row: int = 0
    ) -> None:
        """Go on where :meth:`arrays` and :meth:`numbers` stood; x is the caller's."""
        for name, parts in self.parts().items():
            scatter_row(arrays[name], parts, row, self.vector.flat, local_shards(self.group))
        self.restore_counters(numbers, row)
        self.restore_cadence(numbers)

    def restore_counters(self, numbers: Mapping[str, Any], row: int | None = None) -> None:
        """Take the counters alone; "local_steps", if saved, of a row or all."""
        self.index = int(numbers["index"])
        self.round = int(numbers["round"])
        self.state_start = int(numbers["born"])
        count = int(numbers.get("local_steps", self.index - self.state_start))
        for place in range(len(self.counts)) if row is None else [row]:
            self.counts[place] = count

    def restore_cadence(self, numbers: Mapping[str, Any]) -> None:
        """Take the cadence's state alone."""
        kind = type(self.cadence_state)
        self.cadence_state = kind(*(numbers[f"cadence/{k}"] for k in kind._fields))

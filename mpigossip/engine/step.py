"""Step of decentralized training: the only module in which group, mixer and algorithm meet."""

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
    """Steps of the local nodes from a gradient, however it was computed.

    ``index`` counts steps, ``round`` is the graph's clock, ``state_start`` is the step at which the
    state of the algorithm was initialized, and ``counts`` holds the local steps of each row since
    then. A checkpoint contains these counters and the states of algorithm and cadence; an exchange
    that is ``in_flight`` is repeated, bitwise identically.
    """

    counts: list[int]
    states: list[Any]
    cadence_state: Any
    mixed_distance: torch.Tensor | None  # ‖mixed − sent‖ of the current step
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
        """Initialize the states of algorithm and cadence.

        :param mixer: mixer between the nodes
        :param group: slots of the node
        :param vector: parameters and gradients
        :param methods: algorithm of each segment
        :param cadence: rule that decides which steps exchange
        :param measure_every: steps between two measurements of the consensus distance; 0: none
        """
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
        """Execute x_i ← receive(x_i, g_i, Σ_j W[i, j](t) · send(x_j, g_j)); return its record.

        :param lr: learning rate
        :param skipped: rows that make no local step, see :meth:`begin`
        :param loss: loss of each row, (rows,); None: unknown
        :param gradient_norm: norm of the gradient of each row, (rows,); None: unknown
        """
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
        """Begin the next step; if the algorithm can send before the gradient exists, send."""
        self.clock.begin()
        self._kind = self.cadence.kind(self.cadence_state, self.index - self.state_start)
        if self.method.ahead:
            self.send(self._now(None))
        self.clock.lap("exchange_s")

    def begin(self, lr: float, skipped: tuple[int, ...] = ()) -> Step:
        """Begin a step; rows in ``skipped`` make no local step, but take part in the exchange."""
        if self._kind is None:
            self.ahead()
        self.mixed_distance = None
        return self._now(lr)._replace(skipped=skipped)

    def _now(self, lr: float | None) -> Step:
        assert self._kind is not None, "a step begins with ahead()"
        counts = tuple(self.counts)
        return Step(self.index - self.state_start, self.round, self._kind, lr, counts=counts)

    def adapt(self, now: Step) -> None:
        """Make a LOCAL step."""
        # An algorithm without a local update writes to the outbox, and an asynchronous node always
        # shows its model to the others.
        if self.method.local_update is None or not self.mixer.synchronous:
            self.receive(*self.exchange(now), now)
            return

        def adapt(slot: int):
            update: Any = self.methods[slot].local_update
            return update(self.vector.x[slot], self._gradient(slot), self.states[slot], now)

        self.states = self.group.on_shards(adapt)

    def exchange(self, now: Step) -> tuple[Sequence, Sequence]:
        """Return the sent and the mixed message; this waits for in-neighbours."""
        if not self.in_flight:
            self.send(now)
        self.wait_exchange(self._reusable_x(now.kind))
        sent, mixed = self._exchanged
        self.measure(sent, mixed, now.kind)
        return sent, mixed

    @profiled("send")
    def send(self, now: Step) -> None:
        """Let the algorithm fill the outbox, shard by shard, and begin the exchange."""
        # waits until the last message has been read
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

        This is the outbox if the algorithm sends x as it is, and a copy otherwise. With an exact
        wire, nothing is written to the outbox before the next exchange begins; for a lossy one, the
        progress thread may still have to quantize it. On a GPU the host waits for a comparison.
        """
        assert self._outbox is not None, "no exchange has begun"
        arrays = []
        for out, x in zip(self._outbox, self.vector.x, strict=True):
            is_unchanged = self.mixer.layout.wire.exact and torch.equal(bits(out[0]), bits(x))
            arrays.append(out[0] if is_unchanged else x.clone())
        return arrays

    @profiled("wait for neighbours")
    def wait_exchange(self, into: torch.Tensor | None = None) -> None:
        """Wait for the neighbours of an exchange that has begun; ``into``: array for the sum."""
        if self.in_flight and self._exchanged is None:
            self._exchanged = self.mixer.finish(into)

    def _reusable_x(self, kind: ExchangeKind) -> torch.Tensor | None:
        """Return x, if the mixed message may be written over it, otherwise None.

        This needs an algorithm that replaces x by the mixed message, which is a single exact
        vector.
        """
        layout = self.mixer.layout
        is_single_vector = len(self.vector.x) == layout.vectors == 1 and not layout.scalars
        can_reuse = is_single_vector and layout.raw_bytes is None and kind is ExchangeKind.GOSSIP
        return self.vector.x[0] if can_reuse and self.method.takes_mixed else None

    @profiled("receive")
    def receive(self, sent: Sequence, mixed: Sequence, now: Step) -> None:
        """Let the algorithm apply the received messages, shard by shard."""

        def receive(slot: int):
            x = self.vector.x[slot]
            g = self._gradient(slot)
            state = self.states[slot]
            return self.methods[slot].receive(x, g, state, sent[slot], mixed[slot], now)

        self.states = self.group.on_shards(receive)

    def _gradient(self, slot: int) -> torch.Tensor | None:
        return None if self.method.raw else self.vector.g[slot]

    def replace_mixer(self, mixer: Mixer) -> None:
        """Continue with another mixer; a step that has begun is begun again."""
        self.mixer = mixer
        self.clock = Clock(mixer)
        self._end()

    def _end(self) -> None:
        self._kind = None  # kind of the step that has begun
        self.in_flight = False  # whether its exchange has begun
        self._exchanged = None  # result of the exchange
        self._outbox = None  # the sent message, until the next exchange begins

    def average(self, lr: float) -> None:
        """Exchange without a local step, while this node waits for others (asynchronous mixers).

        If waiting nodes did not take part in exchanges, the other nodes would drift away from them.
        """
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
        """Whether this step measures the consensus distance.

        Every ``measure_every``-th step does.
        """
        return bool(self.measure_every) and self.index % self.measure_every == 0

    def measure(self, sent: Sequence, mixed: Sequence, kind: ExchangeKind) -> None:
        """Compute ‖mixed − sent‖ if the record or the cadence needs it."""
        if self.measuring or kind is ExchangeKind.GLOBAL and "variance" in self.cadence.measures:
            self.mixed_distance = mixed_distance(sent, mixed, self.group)

    def record(self, now: Step, loss: Any, norm: Any) -> Record:
        """Count the step and return its record.

        :param now: step that was made
        :param loss: loss of each row, (rows,); None: unknown
        :param norm: norm of the gradient of each row, (rows,); None: unknown
        """
        record, averages = make_record(self, now, loss, norm)
        self.cadence_state = self.cadence.observe(self.cadence_state, now, averages)
        self.counts = [count + (row not in now.skipped) for row, count in enumerate(self.counts)]
        self.round += now.kind is ExchangeKind.GOSSIP
        self.index += 1
        self._end()
        return record

    # -- state by name --------------------------------------------------------------------------

    def restart(self) -> None:
        """Initialize the states of algorithm and cadence again, at the current step."""
        self.states = [m.init(x) for m, x in zip(self.methods, self.vector.x, strict=True)]
        self.cadence_state = self.cadence.init()
        self.state_start, self.counts = self.index, [0] * len(self.mixer.local_nodes)

    def parts(self) -> dict[str, list[torch.Tensor]]:
        """Return the arrays of the algorithm's state by name, one per segment, without a copy."""
        named = [dict(named_arrays(state)) for state in self.states]
        return {f"state/{k}": [arrays[k] for arrays in named] for k in named[0]}

    def pack_state(self, row: int = 0, places: Mapping[str, np.ndarray] | None = None) -> dict:
        """Return the state of a node by name, in the first process of the node.

        :param row: row of the node
        :param places: arrays by name into which the state is packed; new ones for other names
        """
        return packed(self.parts(), self.group, self.vector.flat, row, places or {})

    def numbers(self) -> dict[str, Any]:
        """Return the counters and the state of the cadence as ``cadence/…``; equal on all nodes."""
        counters = {"index": self.index, "born": self.state_start, "round": self.round}
        return counters | {f"cadence/{k}": v for k, v in self.cadence_state._asdict().items()}

    def restore(
        self, arrays: Mapping[str, np.ndarray], numbers: Mapping[str, Any], row: int = 0
    ) -> None:
        """Restore the results of :meth:`pack_state` and :meth:`numbers`; the caller restores x."""
        for name, parts in self.parts().items():
            scatter_row(arrays[name], parts, row, self.vector.flat, local_shards(self.group))
        self.restore_counters(numbers, row)
        self.restore_cadence(numbers)

    def restore_counters(self, numbers: Mapping[str, Any], row: int | None = None) -> None:
        """Restore only the counters, and "local_steps", if saved, of one row or of all (None)."""
        self.index = int(numbers["index"])
        self.round = int(numbers["round"])
        self.state_start = int(numbers["born"])
        count = int(numbers.get("local_steps", self.index - self.state_start))
        for index in range(len(self.counts)) if row is None else [row]:
            self.counts[index] = count

    def restore_cadence(self, numbers: Mapping[str, Any]) -> None:
        """Restore only the state of the cadence."""
        kind = type(self.cadence_state)
        self.cadence_state = kind(*(numbers[f"cadence/{k}"] for k in kind._fields))

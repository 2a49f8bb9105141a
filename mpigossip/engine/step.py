"""Step of decentralized training: cadence, local step, exchange, and the counters of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from mpigossip.algorithms.base import Algorithm, Step
from mpigossip.algorithms.cadence import Cadence
from mpigossip.engine.measurements import StepMetrics, Stopwatch, make_record, mixed_distance
from mpigossip.engine.state_averages import StateAverages
from mpigossip.engine.vector import FlatParameters, bits, named_arrays, packed, scatter_row
from mpigossip.groups.base import Group, local_shards
from mpigossip.mixing.base import ExchangeKind, MessageArrays, Mixer


class ModelExchange(Protocol):
    """Exchange of models between the nodes of an engine: of whole models, or in fragments.

    In a LOCAL step, the engine calls ``adapt``. In any other step, it calls ``send`` and then
    ``receive``. If the algorithm is ahead, ``send`` is called before that in every step. An
    exchange is in flight from ``send`` until its message has been received: by ``receive`` or, if
    it has fragments, by ``wait`` or in a later step. The models after the following steps are
    bitwise identical in all of these cases.
    """

    outbox: MessageArrays | None
    """Message in flight; None: no exchange is in flight."""

    def adapt(self, engine: Engine, now: Step) -> None:
        """Make a LOCAL step."""

    def send(self, engine: Engine, now: Step) -> None:
        """Fill the outbox and begin the exchange, if none is in flight."""

    def receive(self, engine: Engine, now: Step) -> None:
        """Apply the received messages that are due at the end of this step."""

    def wait(self, engine: Engine) -> None:
        """Wait for the neighbours of an exchange in flight."""

    def discard(self) -> None:
        """Discard an exchange in flight without receiving its message."""

    def restart(self, engine: Engine) -> None:
        """Reset the values that earlier steps have stored for later steps."""

    def parts(self, engine: Engine) -> dict[str, list[torch.Tensor]]:
        """Return the arrays by name, one per segment, that a checkpoint has to contain.

        They hold values that a step stores for later steps, such as received values that have not
        been applied yet. The state of the algorithm is not among them.
        """


class Engine:
    """Engine that makes the steps of the local nodes, from gradients that its caller has computed.

    ``index`` counts steps, and ``round`` counts GOSSIP exchanges: it is the t of the mixing matrix
    W(t). ``state_start`` is the step at which the state of the algorithm was initialized. A
    checkpoint contains these counters, ``counts``, and the states of algorithm, cadence and
    exchange. It does not contain an exchange of the whole model in flight, which is repeated after
    a resume, with a bitwise identical result if the mixer is synchronous.
    """

    counts: list[int]
    """Number of local steps of each row since ``state_start``."""
    states: list[Any]
    """State of the algorithm for each segment."""
    cadence_state: Any
    """State of the cadence."""
    mixed_distance: torch.Tensor | None
    """‖mixed − sent‖ of the current step, (rows,); None: it was not computed."""
    _kind: ExchangeKind | None
    """Kind of the step that has begun; None: no step has begun."""

    def __init__(
        self,
        mixer: Mixer,
        group: Group,
        vector: FlatParameters,
        methods: Sequence[Algorithm],
        cadence: Cadence,
        exchange: ModelExchange,
        *,
        measure_every: int = 0,
        averages: StateAverages | None = None,
    ):
        """Initialize the states of algorithm and cadence.

        :param mixer: mixer between the nodes
        :param group: slots of the node
        :param vector: parameters and gradients
        :param methods: algorithm of each segment
        :param cadence: rule that decides which steps exchange
        :param exchange: exchange of the whole model, or of one fragment at a time
        :param measure_every: steps between two measurements of the consensus distance; 0: none
        :param averages: averages of the local step's state; None: it stays local
        """
        self.group = group
        self.vector = vector
        self.cadence = cadence
        self.exchange = exchange
        self.methods = methods
        self.method = methods[0]
        self.measure_every = measure_every
        self.averages = averages
        self.publish: Callable[[], None] = self.gather_shards
        """Function that ends a step; its owner may wait later for the flat parameters."""
        self.index = 0
        self.shift = 0
        """Number that is subtracted from ``index`` to find the place of a step in the run. Its
        owner sets it if the number of steps per epoch has changed when the run was resumed.
        """
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
    ) -> StepMetrics:
        """Make one step from the gradients at x, and return its record.

        :param lr: learning rate
        :param skipped: rows (indices of local nodes) that make no local step, because their
            gradients overflowed or the cadence lets them idle, but take part in the exchange
        :param loss: loss of each row, (rows,); None: unknown
        :param gradient_norm: norm of the gradient of each row, (rows,); None: unknown
        :raises NonFiniteError: if a message, or an array of the local step that is averaged,
            contains NaN or infinite values
        """
        now = self.begin(lr, skipped)  # the cadence decides: LOCAL, GOSSIP or GLOBAL
        if now.kind is ExchangeKind.LOCAL:
            self.exchange.adapt(self, now)  # x_i ← local_update(x_i, g_i)
        else:
            self.exchange.send(self, now)  # y_i ← send(x_i, g_i), unless it was sent ahead
            self.exchange.receive(self, now)  # x_i ← receive(x_i, g_i, Σ_j W[i, j](t) · y_j)
        if self.averages is not None:
            self.averages.exchange(self)  # v_i ← Σ_j W[i, j] · v_j, if a period of v ends
        self.clock.lap("exchange_s")
        self.publish()  # waits for the node's slots
        self.clock.lap("node_s")
        return self.record(now, loss, gradient_norm)

    def ahead(self) -> None:
        """Begin the next step; if the algorithm can send before the gradient exists, send.

        The cadence decides here whether the step is LOCAL, GOSSIP or GLOBAL.
        """
        self.clock.begin()
        start = self.shift if self.cadence.counts_from_run else self.state_start
        self._kind = self.cadence.kind(self.cadence_state, self.index - start)
        if self.method.ahead:
            self.exchange.send(self, self._now(None))
        self.clock.lap("exchange_s")

    def begin(self, lr: float, skipped: tuple[int, ...] = ()) -> Step:
        """Begin a step, unless :meth:`ahead` has begun it, and return its description.

        :param lr: learning rate
        :param skipped: rows that make no local step, but take part in the exchange
        """
        if self._kind is None:
            self.ahead()
        self.mixed_distance = None
        return self._now(lr)._replace(skipped=skipped)

    def _now(self, lr: float | None) -> Step:
        assert self._kind is not None, "a step begins with ahead()"
        counts = tuple(self.counts)
        return Step(self.index - self.state_start, self.round, self._kind, lr, counts=counts)

    def adapt(self, now: Step) -> None:
        """Let the algorithm make its local update, shard by shard."""

        def adapt(slot: int):
            update: Any = self.methods[slot].local_update
            return update(self.vector.x[slot], self.gradient(slot), self.states[slot], now)

        self.states = self.group.on_shards(adapt)

    def gradient(self, slot: int) -> torch.Tensor | None:
        """Return the flat gradients of a slot's shard, (rows, elements of the shard).

        The result is None if the algorithm is ``raw``: its local step reads the ``.grad`` of the
        parameters, and nothing else reads gradients.
        """
        return None if self.method.raw else self.vector.g[slot]

    @property
    def in_flight(self) -> bool:
        """True if an exchange has begun whose message has not been received."""
        return self.exchange.outbox is not None

    def wait_exchange(self) -> None:
        """Wait for the neighbours of an exchange in flight."""
        self.exchange.wait(self)

    def sent_x(self) -> list[torch.Tensor]:
        """Return, for each segment, an array with the x at which the present exchange began.

        The array is the outbox itself if the algorithm sends x unchanged and the wire is exact,
        because nothing is written to the outbox before the next exchange begins. Otherwise it is a
        copy of x: the progress thread may still have to quantize the outbox of a lossy wire. On a
        GPU, the host waits until outbox and x have been compared.
        """
        assert self.exchange.outbox is not None, "no exchange has begun"
        arrays = []
        for out, x in zip(self.exchange.outbox, self.vector.x, strict=True):
            is_unchanged = self.mixer.layout.wire.exact and torch.equal(bits(out[0]), bits(x))
            arrays.append(out[0] if is_unchanged else x.clone())
        return arrays

    def replace_mixer(self, mixer: Mixer) -> None:
        """Continue with another mixer.

        An exchange in flight is discarded, and a step that has begun is begun again.
        """
        self.mixer = mixer
        self.clock = Stopwatch(mixer)
        self.exchange.discard()
        self._kind = None

    def average(self, lr: float) -> None:
        """Exchange without a local step, while this node waits for others (asynchronous mixers).

        If waiting nodes did not take part in exchanges, the other nodes would drift away from them.
        The gradients are set to zero. The exchange counts as a round, but not as a step.

        :param lr: learning rate, which the algorithm may need
        """
        self._kind = ExchangeKind.GOSSIP
        now = self._now(lr)._replace(skipped=tuple(range(len(self.mixer.local_nodes))), waits=True)
        for g in self.vector.g:
            g.zero_()
        self.exchange.send(self, now)
        self.exchange.receive(self, now)
        self._kind = None
        self.round += 1
        self.gather_shards()

    def gather_shards(self) -> None:
        """Copy the shards of all slots to every slot's flat parameters."""
        self.group.all_gather(self.vector.x, self.vector.full)

    @property
    def measuring(self) -> bool:
        """True if the record of this step needs distances: every ``measure_every``-th step, from 0.

        If ``measure_every`` is 0, it is always False.
        """
        return bool(self.measure_every) and self.index % self.measure_every == 0

    def measure(self, sent: Sequence, mixed: Sequence, kind: ExchangeKind) -> None:
        """Set ``mixed_distance`` to ‖mixed − sent‖ if the record or the cadence needs it.

        :param sent: message of each segment, as it was sent
        :param mixed: weighted sum of the messages, for each segment
        :param kind: kind of the exchange
        """
        if self.measuring or kind is ExchangeKind.GLOBAL and "variance" in self.cadence.measures:
            self.mixed_distance = mixed_distance(sent, mixed, self.group)

    def record(self, now: Step, loss: Any, norm: Any) -> StepMetrics:
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
        self._kind = None
        return record

    # -- state by name --------------------------------------------------------------------------

    def restart(self) -> None:
        """Initialize the states of algorithm, cadence and exchange again, at the current step."""
        self.exchange.restart(self)
        self.states = [m.init(x) for m, x in zip(self.methods, self.vector.x, strict=True)]
        self.cadence_state = self.cadence.init()
        self.state_start, self.counts = self.index, [0] * len(self.mixer.local_nodes)

    def parts(self) -> dict[str, list[torch.Tensor]]:
        """Return the arrays of the state by name, one per segment, without a copy.

        If fragments are exchanged, this first receives a fragment in flight.
        """
        of_exchange = self.exchange.parts(self)  # this may receive, which changes the states
        named = [dict(named_arrays(state)) for state in self.states]
        return {f"state/{k}": [arrays[k] for arrays in named] for k in named[0]} | of_exchange

    def pack_state(self, row: int = 0, targets: Mapping[str, np.ndarray] | None = None) -> dict:
        """Return the state of a node as arrays by name; collective over the node.

        The result is empty in all processes of the node but the first.

        :param row: index of the node among the local nodes
        :param targets: arrays by name of an earlier call, which are overwritten. Arrays for other
            names are allocated; None: all arrays are allocated
        """
        return packed(self.parts(), self.group, self.vector.flat, row, targets or {})

    def numbers(self) -> dict[str, Any]:
        """Return the counters by name, and the fields of the cadence's state as ``cadence/…``.

        They are equal on all nodes if the mixer is synchronous.
        """
        counters = {"index": self.index, "born": self.state_start, "round": self.round}
        return counters | {f"cadence/{k}": v for k, v in self.cadence_state._asdict().items()}

    def restore(
        self, arrays: Mapping[str, np.ndarray], numbers: Mapping[str, Any], row: int = 0
    ) -> None:
        """Restore the state of a node, except x, which the caller restores.

        :param arrays: result of :meth:`pack_state` in the first process of the node
        :param numbers: result of :meth:`numbers`
        :param row: index of the node among the local nodes
        :raises ValueError: if an array has another number of elements than the model
        """
        for name, parts in self.parts().items():
            scatter_row(arrays[name], parts, row, self.vector.flat, local_shards(self.group))
        self.restore_counters(numbers, row)
        self.restore_cadence(numbers)

    def restore_counters(self, numbers: Mapping[str, Any], row: int | None = None) -> None:
        """Restore only the counters.

        :param numbers: result of :meth:`numbers`. If it also contains "local_steps", this is the
            number of local steps since ``state_start``; otherwise every step was a local step
        :param row: row whose number of local steps is restored; None: all rows
        """
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

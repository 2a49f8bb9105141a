"""Exchange of the whole model in a step: send, wait for the in-neighbours, receive."""

from collections.abc import Sequence

import torch

from mpigossip.algorithms.base import Step
from mpigossip.engine.measurements import check_message
from mpigossip.engine.step import Engine
from mpigossip.groups.base import profiled
from mpigossip.mixing.base import ExchangeKind, MessageArrays


class WholeExchange:
    """Exchange of the whole model, which begins and ends in the same step.

    If the message of the algorithm does not depend on the gradient, the exchange begins before the
    gradient of the step exists.
    """

    outbox: MessageArrays | None
    _received: tuple[MessageArrays, MessageArrays] | None

    def __init__(self) -> None:
        self.discard()

    def adapt(self, engine: Engine, now: Step) -> None:
        # An algorithm without a local update needs the outbox in a LOCAL step, too, and an
        # asynchronous node publishes its model in every step.
        if engine.method.local_update is None or not engine.mixer.synchronous:
            self.send(engine, now)
            self.receive(engine, now)
        else:
            engine.adapt(now)

    def send(self, engine: Engine, now: Step) -> None:
        if self.outbox is None:  # otherwise it was sent ahead of the gradient
            self._send(engine, now)

    @profiled("send")
    def _send(self, engine: Engine, now: Step) -> None:
        """Let the algorithm fill the outbox, shard by shard, and begin the exchange."""
        # This waits until the message that was in the same memory before has been read.
        out = engine.mixer.outbox(now.round)
        x = engine.vector.x

        def send(slot: int):
            g = None if engine.method.ahead else engine.gradient(slot)
            state = engine.methods[slot].send(x[slot], g, engine.states[slot], out[slot], now)
            check_message(engine, slot, out[slot], [slice(0, x[slot].shape[1])], now)
            return state

        engine.states = engine.group.on_shards(send)
        engine.mixer.start(now.kind, now.round, engine.index)
        self.outbox = out

    def receive(self, engine: Engine, now: Step) -> None:
        self.wait(engine, None if now.waits else _reusable_x(engine, now.kind))
        assert self._received is not None, "no exchange is in flight"
        sent, mixed = self._received
        if not now.waits:  # otherwise, Engine.average exchanges outside of steps, without a record
            engine.measure(sent, mixed, now.kind)
        self.apply(engine, sent, mixed, now)
        self.discard()

    @profiled("wait for neighbours")
    def wait(self, engine: Engine, into: torch.Tensor | None = None) -> None:
        """Wait for the neighbours of an exchange in flight.

        :param engine: engine of the exchange
        :param into: array for the mixed message; None: memory of the mixer
        """
        if self.outbox is not None and self._received is None:
            self._received = engine.mixer.finish(into)

    @profiled("receive")
    def apply(self, engine: Engine, sent: Sequence, mixed: Sequence, now: Step) -> None:
        """Let the algorithm apply the received messages, shard by shard."""

        def receive(slot: int):
            x = engine.vector.x[slot]
            g = engine.gradient(slot)
            state = engine.states[slot]
            return engine.methods[slot].receive(x, g, state, sent[slot], mixed[slot], now)

        engine.states = engine.group.on_shards(receive)

    def discard(self) -> None:
        self.outbox = None
        self._received = None

    def restart(self, engine: Engine) -> None:
        """Do nothing, because no value remains between two steps."""

    def parts(self, engine: Engine) -> dict[str, list[torch.Tensor]]:
        return {}


def _reusable_x(engine: Engine, kind: ExchangeKind) -> torch.Tensor | None:
    """Return x if the mixed message may be written over it, otherwise None.

    This is the case in a GOSSIP round if the algorithm replaces x by the mixed message, and if the
    message is one vector of one segment, with an exact wire.
    """
    layout = engine.mixer.layout
    is_single_vector = len(engine.vector.x) == layout.vectors == 1 and not layout.scalars
    can_reuse = is_single_vector and layout.raw_bytes is None and kind is ExchangeKind.GOSSIP
    return engine.vector.x[0] if can_reuse and engine.method.takes_mixed else None

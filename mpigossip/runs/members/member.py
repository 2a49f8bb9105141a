"""One member of a training that others join and leave: `mpigossip join`."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from mpigossip.algorithms.base import Step
from mpigossip.engine.measurements import Record
from mpigossip.engine.vector import join_row, scatter_row
from mpigossip.groups.base import local_shards
from mpigossip.mixing.base import ExchangeKind, MessageArrays, MessageLayout
from mpigossip.mixing.combine import weighted_sum
from mpigossip.mixing.simulated import Simulated
from mpigossip.runs.state import AVERAGED, plain, put_buffers
from mpigossip.store.checkpoint import NodeState, Number
from mpigossip.training.assemble import Assembly


class FolderMixer(Simulated):
    """x ← ½ (x + x_j), j the member that ``receive`` finds, late x_j as `moved` has it; else x."""

    def __init__(self, graph, layout: MessageLayout, member: Member):
        super().__init__(graph, layout)
        self._member = member

    def start(self, kind: ExchangeKind, t: int, exchange: int | None = None) -> None:
        """Publish the model in a gossip step; writing goes on in the background."""
        super().start(ExchangeKind.LOCAL, t, exchange)
        self._open = kind, t
        if kind is ExchangeKind.GOSSIP:
            self.bytes_sent[0] += self._member.send(self._out)

    def finish(self, into: torch.Tensor | None = None) -> tuple[MessageArrays, MessageArrays]:
        """``sent`` and ``mixed``; reads the model of one other member in a gossip step."""
        kind, _ = self._open
        if kind is not ExchangeKind.GOSSIP or not self._member.receive(self._mixed):
            return self._out, self._out
        for sent, mixed in zip(self._out, self._mixed, strict=True):
            weighted_sum((0.5, 0.5), [sent[0], mixed[0]], mixed[0])
        return self._out, self._mixed


class Member:
    """The training of a member: x ← H steps on a chunk, published, then ½ (x + x_j)."""

    def __init__(self, assembly: Assembly):
        self.trainer = assembly.trainer
        self.assembly = assembly
        self.engine = engine = assembly.engine
        rate = self.trainer.rate
        self.ahead = 0
        self.trainer.rate = lambda step: rate(step + self.ahead)
        self.steps = steps_of_round(assembly)
        self.done = 0
        """steps since the member began"""
        self.exchange: Any = None
        self.seed = self.capture([(x,) for x in engine.vector.x])
        engine.replace_mixer(FolderMixer(assembly.parts.graph, engine.mixer.layout, self))

    def begin(self, states: Sequence[NodeState]) -> None:
        """Stand at the average of these models (none: the seed's), with averaged moments."""
        states = states or [self.seed]
        self._stand(average(states), AVERAGED)
        self.engine.counts = [min(int(one.numbers["local_steps"]) for one in states)]

    def resume(self, state: NodeState, rounds: int, exchange: Any) -> None:
        """Stand where a model was sent after so many rounds, and average it with a peer's."""
        engine = self.engine
        self._stand(state)
        engine.counts = [int(state.numbers["local_steps"])]
        self.done = rounds * self.steps
        self.exchange = exchange
        for out, x in zip(engine.mixer.outbox(0), engine.vector.x, strict=True):
            out[0].copy_(x)
        engine.mixer.start(ExchangeKind.GOSSIP, rounds - 1)
        now = Step(
            self.done - 1, rounds - 1, ExchangeKind.GOSSIP, None, counts=tuple(engine.counts)
        )
        engine.receive(*engine.mixer.finish(), now)
        engine.round = rounds
        engine.group.all_gather(engine.vector.x, engine.vector.full)

    def _stand(self, state: NodeState, names: Container[str] | None = None) -> None:
        """Take a model, its buffers and arrays of these names (None: all) of its method's state."""
        engine = self.engine
        replicas = self.trainer.replicas
        flat = engine.vector.flat
        here = local_shards(engine.group)
        scatter_row(state.parameters, engine.vector.x, 0, flat, here)
        engine.group.all_gather(engine.vector.x, engine.vector.full)
        self.done = engine.index = engine.round = 0
        engine.replace_mixer(engine.mixer)
        engine.restart()
        for name, parts in engine.parts().items():
            if names is None or name.split("/")[-1] in names:
                scatter_row(state.arrays[name], parts, 0, flat, here)
        put_buffers(dict(zip(engine.group.local_slots, replicas.buffers(0), strict=True)), state)

    def train(
        self, exchange: Any, after: Callable[[Record, int], None] = lambda record, chunk: None
    ) -> None:
        """Train chunks until there are no more; ``after`` each step, with its chunk.

        ``exchange``: where chunks and peers come from, a `Live`, or a `Scripted` in a replay.
        """
        self.exchange = exchange
        while (found := exchange.chunk()) is not None:
            chunk, progress = found
            engine = self.engine
            trainer = self.trainer
            engine.index = chunk * self.steps
            engine.state_start = engine.index - self.done
            self.ahead = max(progress - chunk, 0) * self.steps
            for _ in range(self.steps):
                record = trainer.step()
                self.done += 1
                after(record, chunk)

    def capture(self, message: MessageArrays) -> NodeState:
        """The model in a message, with the state behind it."""
        engine = self.engine
        flat = self.engine.vector.flat
        arrays = engine.pack_state(0)
        for slot, buffers in enumerate(self.trainer.replicas.buffers(0)):
            for name, buffer in buffers.items():
                arrays[f"buffers/{slot}/{name}"] = plain(buffer).copy()
        x = engine.group.to_first([parts[0] for parts in message])
        steps = engine.counts[0] + (self.exchange is not None)  # a step counts when it is done
        # readers want no more local steps than steps; averaged members may have made more
        counts: dict[str, Number] = {"index": max(engine.index, steps), "local_steps": steps}
        return NodeState(join_row(x, 0, flat), flat.names, flat.shapes, arrays, counts)

    def send(self, message: MessageArrays) -> int:
        """Publish a message with the state behind it; its bytes."""
        return self.exchange.send(self.capture(message))

    def receive(self, into: MessageArrays) -> bool:
        """Read the model of another member, if there is one."""
        state = self.exchange.receive()
        if state is None:
            return False
        flat = self.engine.vector.flat
        here = local_shards(self.engine.group)
        scatter_row(state.parameters, [parts[0] for parts in into], 0, flat, here)
        return True


def steps_of_round(assembly: Assembly) -> int:
    """H: steps from one exchange to the next."""
    cadence = assembly.engine.cadence
    index = 0
    while cadence.kind(cadence.init(), index) is ExchangeKind.LOCAL:
        index += 1
    return index + 1


def average(states: Sequence[NodeState]) -> NodeState:
    """The mean of models, in their order; what has no mean is the first one's."""
    first = states[0]
    names = [n for n in first.arrays if all(n in one.arrays for one in states)]

    def mean(arrays: Sequence[np.ndarray]) -> np.ndarray:
        if not np.issubdtype(arrays[0].dtype, np.floating) or len(arrays) == 1:
            return arrays[0]
        rows = [torch.from_numpy(np.ascontiguousarray(one)).reshape(1, -1) for one in arrays]
        total = weighted_sum([1 / len(rows)] * len(rows), rows, torch.empty_like(rows[0]))
        return total.numpy().reshape(arrays[0].shape)

    return replace(
        first,
        parameters=mean([one.parameters for one in states]),
        arrays={name: mean([one.arrays[name] for one in states]) for name in names},
    )

"""One member of a training that others join and leave: `mpigossip join`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from mpigossip.engine.measurements import Record
from mpigossip.engine.state import joined, split
from mpigossip.groups.base import held
from mpigossip.mixing.base import Kind, Segments
from mpigossip.mixing.combine import combine
from mpigossip.mixing.members.mixer import Members
from mpigossip.runs.state import AVERAGED, plain, put_buffers
from mpigossip.store.checkpoint import NodeState, Number
from mpigossip.training.assemble import Assembly


class Exchange(Protocol):
    """Where a member's chunks and peers come from: the folder, or a script in a replay."""

    def chunk(self) -> tuple[int, int] | None:
        """The next chunk, and the chunks that the rate counts; None: no more."""

    def send(self, state: NodeState) -> int:
        """Publish a model; its bytes."""

    def receive(self) -> NodeState | None:
        """The model to average with."""


class Member:
    """The training of a member: x ← H steps on a chunk, published, then ½ (x + x_j)."""

    def __init__(self, assembly: Assembly):
        """``assembly``: of the job on one node."""
        self.trainer, self.assembly = assembly.trainer, assembly
        self.engine = engine = assembly.engine
        rate, self.ahead = self.trainer.settings.rate, 0
        self.trainer.settings.rate = lambda step: rate(step + self.ahead)
        self.steps = steps_of_round(assembly)
        self.done = 0
        """steps since the member began"""
        self.exchange: Exchange | None = None
        self.seed = self.capture([(x,) for x in engine.vector.x])
        engine.adopt(Members(assembly.graph, engine.mixer.layout, self._send, self._receive))

    def begin(self, states: Sequence[NodeState]) -> None:
        """Stand at the average of these models (none: the seed's), with averaged moments."""
        engine, replicas = self.engine, self.trainer.replicas
        states = states or [self.seed]
        mean = _average(states)
        split(mean.parameters, engine.vector.x, 0, engine.vector.flat, held(engine.group))
        engine.group.all_gather(engine.vector.x, engine.vector.full)
        self.done = engine.index = engine.round = 0
        engine.adopt(engine.mixer)
        engine.restart()
        for name, parts in engine.parts().items():
            if name.split("/")[-1] in AVERAGED:
                split(mean.arrays[name], parts, 0, engine.vector.flat, held(engine.group))
        engine.counts = [min(int(one.numbers["local_steps"]) for one in states)]
        put_buffers(dict(zip(engine.group.mine, replicas.buffers(0), strict=True)), mean)

    def train(
        self,
        exchange: Exchange,
        after: Callable[[Record, int], None] = lambda record, chunk: None,
    ) -> None:
        """Train chunks until there are no more; ``after`` each step, with its chunk."""
        self.exchange = exchange
        while (found := exchange.chunk()) is not None:
            chunk, progress = found
            engine, trainer = self.engine, self.trainer
            engine.index = chunk * self.steps
            engine.born = engine.index - self.done
            self.ahead = max(progress - chunk, 0) * self.steps
            for _ in range(self.steps):
                record = trainer.step()
                self.done += 1
                after(record, chunk)

    def capture(self, message: Segments) -> NodeState:
        """The model in a message, with the state behind it."""
        engine, flat = self.engine, self.engine.vector.flat
        arrays = engine.arrays(0)
        for slot, buffers in enumerate(self.trainer.replicas.buffers(0)):
            for name, buffer in buffers.items():
                arrays[f"buffers/{slot}/{name}"] = plain(buffer).copy()
        x = engine.group.to_first([parts[0] for parts in message])
        steps = engine.counts[0] + (self.exchange is not None)  # a step counts when it is done
        # readers want no more local steps than steps; averaged members may have made more
        counts: dict[str, Number] = {"index": max(engine.index, steps), "local_steps": steps}
        return NodeState(joined(x, 0, flat), flat.names, flat.shapes, arrays, counts)

    def _send(self, message: Segments) -> int:
        assert self.exchange is not None
        return self.exchange.send(self.capture(message))

    def _receive(self, into: Segments) -> bool:
        assert self.exchange is not None
        state = self.exchange.receive()
        if state is None:
            return False
        flat, here = self.engine.vector.flat, held(self.engine.group)
        split(state.parameters, [parts[0] for parts in into], 0, flat, here)
        return True


def steps_of_round(assembly: Assembly) -> int:
    """H: steps from one exchange to the next."""
    cadence, index = assembly.engine.cadence, 0
    while cadence.kind(cadence.init(), index) is Kind.LOCAL:
        index += 1
    return index + 1


def _average(states: Sequence[NodeState]) -> NodeState:
    """The mean of models, in their order; what has no mean is the first one's."""
    first = states[0]

    def mean(arrays: Sequence[np.ndarray]) -> np.ndarray:
        if not np.issubdtype(arrays[0].dtype, np.floating) or len(arrays) == 1:
            return arrays[0]
        rows = [torch.from_numpy(np.ascontiguousarray(one)).reshape(1, -1) for one in arrays]
        total = combine([1 / len(rows)] * len(rows), rows, torch.empty_like(rows[0]))
        return total.numpy().reshape(arrays[0].shape)

    return replace(
        first,
        parameters=mean([one.parameters for one in states]),
        arrays={name: mean([one.arrays[name] for one in states]) for name in first.arrays},
    )

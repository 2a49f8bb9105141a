"""Steps, messages and averages of one member of a training, for `mpigossip join`."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from mpigossip.algorithms.base import Step
from mpigossip.config import JobError
from mpigossip.engine.measurements import StepMetrics
from mpigossip.engine.vector import ParameterLayout, is_per_row, join_row, scatter_row
from mpigossip.engine.whole import WholeExchange
from mpigossip.groups.base import Group, local_shards
from mpigossip.members.parts import Part
from mpigossip.mixing.base import ExchangeKind, MessageArrays, MessageLayout
from mpigossip.mixing.combine import weighted_sum
from mpigossip.mixing.simulated import Simulated
from mpigossip.runs.snapshot_and_restore import AVERAGED, plain, put_buffers
from mpigossip.store.checkpoint import NodeState, Number
from mpigossip.training.assemble import Assembly


def part_of(group: Group, flat: Any, ranks: int) -> Part | None:
    """Return the part of the model that this process holds; None if it holds the whole model.

    :param group: slots of the member
    :param flat: layout of the parameters
    :param ranks: number of ranks of the member
    :raises JobError: if the layout permutes a parameter, so that a rank does not hold consecutive
        elements
    """
    if ranks == 1:
        return None
    if not (isinstance(flat, ParameterLayout) and flat.is_row_major):
        raise JobError(
            f"node.ranks_per_node = {ranks}: each rank of a member writes consecutive elements of "
            "the parameters, but node.channels_last changes the order of the elements in memory: "
            "remove node.channels_last"
        )
    row = torch.empty(flat.width, device="meta")
    counts = [sum(map(len, flat.inside(row, slot))) for slot in range(flat.slots)]
    first, last = group.local_slots[0], group.local_slots[-1]
    rank = first // len(group.local_slots)
    return Part(rank, ranks, group.slots, sum(counts[:first]), sum(counts[first : last + 1]))


class FolderMixer(Simulated):
    """Mixer of a member: x ← (1 − w) x + w x_j with the model x_j of another member.

    The weight w is ½ if both have trained equally many chunks in their last rounds (see
    :func:`~mpigossip.members.pace.peer_weight`). If x_j is older than x, it is corrected by
    :func:`~mpigossip.members.live.correct_for_age`. If no other member has a new model, x stays as
    it is.
    """

    def __init__(self, graph, layout: MessageLayout, member: Member):
        """Create the mixer of a member.

        :param graph: graph of the job
        :param layout: layout of a message
        :param member: member that sends and receives the models
        """
        super().__init__(graph, layout)
        self._member = member

    def start(self, kind: ExchangeKind, t: int, exchange: int | None = None) -> None:
        """Publish the model in a GOSSIP step; a thread writes it in the background."""
        self._open = kind, t
        if kind is ExchangeKind.GOSSIP:
            self.bytes_sent[0] += self._member.send(self._out)

    def finish(self, into: torch.Tensor | None = None) -> tuple[MessageArrays, MessageArrays]:
        """Return two messages: the sent one, and its average with another member's model.

        In steps other than GOSSIP steps, or if no other member has a new model, both are equal.
        """
        kind, _ = self._open
        self._open = None
        return self.average() if kind is ExchangeKind.GOSSIP else (self._out, self._out)

    def average(self) -> tuple[MessageArrays, MessageArrays]:
        """Return the outbox, and its average with another member's model.

        If there is no such model, both are equal.
        """
        if not self._member.receive(self._mixed):
            return self._out, self._out
        weight = self._member.exchange.peer_weight
        for sent, mixed in zip(self._out, self._mixed, strict=True):
            weighted_sum((1 - weight, weight), [sent[0], mixed[0]], mixed[0])
        return self._out, self._mixed


class Member:
    """Training of one member, with its model and engine.

    In each round, the member trains H steps on each of one or several chunks, publishes its model
    x, and averages it with the model x_j of one other member: see `FolderMixer`.
    """

    def __init__(self, assembly: Assembly):
        """Prepare the engine of a job for members.

        The mixer of the engine is replaced. The present model is kept for members that start
        without any other model.

        :param assembly: trainer and engine of a job with one node
        """
        self.trainer = assembly.trainer
        self.assembly = assembly
        self.engine = engine = assembly.engine
        # The ranks of a member divide the model; in a replay, one process holds all slots.
        ranks = engine.group.slots // len(engine.group.local_slots)
        self.part = part_of(engine.group, engine.vector.flat, ranks)
        """Part of the model that this rank holds; None: the whole model."""
        self.steps = steps_of_round(assembly)
        """Number H of steps in a chunk."""
        self.within = 0
        """Number of steps done in the present round; 0: it has not begun, or has just ended."""
        self._round_steps = self.steps
        self.exchange: Any = None
        """Source of chunks and of other members' models; None before the first round."""
        self.data_step = 0
        """Number of the step whose batches are trained, counted over the chunks of all members."""
        self.seed = self.capture([(x,) for x in engine.vector.x], 0)
        self.mixer = FolderMixer(assembly.parts.graph, engine.mixer.layout, self)
        engine.replace_mixer(self.mixer)
        if engine.cadence.longest_round > 1:
            kinds = ExchangeKind.LOCAL, ExchangeKind.GOSSIP
            engine.cadence = engine.cadence._replace(
                kind=lambda state, index: kinds[self.within + 1 == self._round_steps]
            )

    @property
    def done(self) -> int:
        """Number of steps since the member began."""
        return self.engine.index

    def begin(self, states: Sequence[NodeState]) -> None:
        """Start from the average of some models.

        Arrays of the state that are means of gradients or of their squares (`AVERAGED`) are
        averaged, too; all others are reset.

        :param states: models to average; empty: start from the model that the seed initializes
        """
        states = states or [self.seed]
        local_steps = min(int(state.numbers["local_steps"]) for state in states)
        self._load(average(states), local_steps, names=AVERAGED)

    def resume(self, state: NodeState, rounds: int, exchange: Any) -> None:
        """Continue from a model that was published, and average it with a peer's model.

        :param state: the model as it was published
        :param rounds: number of rounds that the member had completed when it published the model
        :param exchange: exchange that returns the peer's model
        """
        engine = self.engine
        self._load(state, int(state.numbers["local_steps"]), rounds, exchange.chunks_before)
        self.exchange = exchange
        for out, x in zip(self.mixer.outbox(0), engine.vector.x, strict=True):
            out[0].copy_(x)
        counts = tuple(engine.counts)
        last = Step(self.done - 1, rounds - 1, ExchangeKind.GOSSIP, None, counts=counts)
        assert isinstance(engine.exchange, WholeExchange)  # members reject fragments
        engine.exchange.apply(engine, *self.mixer.average(), last)
        engine.group.all_gather(engine.vector.x, engine.vector.full)

    def _load(
        self,
        state: NodeState,
        local_steps: int,
        rounds: int = 0,
        chunks: int = 0,
        names: Container[str] | None = None,
    ) -> None:
        """Load a model with its buffers and arrays of the algorithm's state.

        :param state: the model
        :param local_steps: number of local steps that the model has made
        :param rounds: number of rounds that the member had completed when it published the model
        :param chunks: number of chunks that it had trained in these rounds
        :param names: last parts of the names of the arrays to load, such as "momentum"; None: all
            arrays
        """
        engine = self.engine
        replicas = self.trainer.replicas
        replicas.wait_gathered()  # the shards are written
        self._put(state.parameters, engine.vector.x)
        engine.group.all_gather(engine.vector.x, engine.vector.full)
        engine.replace_mixer(self.mixer)
        engine.restart()
        counters = {"index": chunks * self.steps, "round": rounds, "born": 0}
        engine.restore_counters(counters | {"local_steps": local_steps})
        for name, parts in engine.parts().items():
            if names is None or name.split("/")[-1] in names:
                # A published state has all arrays of the model's size as pieces, or as arrays.
                self._put(state.pieces[name] if name in state.pieces else state.arrays[name], parts)
        put_buffers(dict(zip(engine.group.local_slots, replicas.buffers(0), strict=True)), state)

    def train(
        self, exchange: Any, after: Callable[[StepMetrics, int], None] = lambda record, chunk: None
    ) -> None:
        """Train chunks until there are no more.

        :param exchange: source of chunks and peers: a `FolderExchange`, or a `ReplayExchange` in a
            replay
        :param after: function that is called after each step, with the metrics and the chunk of the
            step
        """
        self.exchange = exchange
        while (chunk_and_progress := exchange.chunk()) is not None:
            chunk, progress = chunk_and_progress
            # The learning rate follows the progress of all members, and not the chunk.
            ahead = max(progress - chunk, 0) * self.steps
            first = chunk * self.steps
            self._round_steps = exchange.chunks * self.steps
            for within in range(self._round_steps):
                self.within = within
                self.data_step = first + within
                record = self.trainer.step(self.data_step, self.data_step + ahead)
                self.within = (within + 1) % self._round_steps
                after(record, self.data_step // self.steps)

    def capture(self, message: MessageArrays, local_steps: int) -> NodeState:
        """Return the state to publish: model, buffers, and the arrays of the algorithm.

        :param message: the message, which holds the parameters
        :param local_steps: number of local steps that the model has made
        """
        engine = self.engine
        flat = self.engine.vector.flat
        arrays = engine.pack_state(0) if self.part is None else {}
        buffers_by_slot = self.trainer.replicas.buffers(0)
        for slot, buffers in zip(engine.group.local_slots, buffers_by_slot, strict=True):
            for name, buffer in buffers.items():
                arrays[f"buffers/{slot}/{name}"] = plain(buffer).copy()
        # The average of several members' models may have made more local steps than the number of
        # the step, which a checkpoint would reject.
        index = max(self.data_step, local_steps)
        counts: dict[str, Number] = {"index": index, "local_steps": local_steps}
        x = [parts[0] for parts in message]
        if self.part is None:
            return NodeState(join_row(x, 0, flat), flat.names, flat.shapes, arrays, counts)
        pieces = {}
        for name, parts in engine.parts().items():
            if is_per_row(parts[0], flat):
                arrays[name] = parts[0][0].cpu().numpy().copy()
            else:
                pieces[name] = self._own(parts)
        rank = self.part.rank
        return NodeState(self._own(x), flat.names, flat.shapes, arrays, counts, rank, pieces)

    def _own(self, parts: Sequence[torch.Tensor]) -> np.ndarray:
        """Concatenate the shards of the local slots, without padding, as files contain them.

        :param parts: for each local slot, an array (1, P/L) with the shape of its shard of the P
            parameters
        """
        flat: Any = self.engine.vector.flat
        slots = self.engine.group.local_slots
        views = [
            view for slot, p in zip(slots, parts, strict=True) for view in flat.inside(p[0], slot)
        ]
        return torch.cat(views).cpu().numpy()

    def _put(self, values: np.ndarray, parts: Sequence[torch.Tensor]) -> None:
        """Copy a model's array, or the part of this rank, to the shards of the local slots.

        :param values: elements without padding, in the order of a file, or one value for the model
        :param parts: for each local shard, the array (1, P/L) to which the values are copied
        """
        flat: Any = self.engine.vector.flat
        if self.part is None or is_per_row(parts[0], flat):
            scatter_row(values, parts, 0, flat, local_shards(self.engine.group))
            return
        rest = torch.from_numpy(np.array(values))
        for slot, part in zip(self.engine.group.local_slots, parts, strict=True):
            part.zero_()
            for view in flat.inside(part[0], slot):
                view.copy_(rest[: len(view)])
                rest = rest[len(view) :]

    def send(self, message: MessageArrays) -> int:
        """Publish the model in ``message``, with buffers and state; return the number of bytes."""
        # The present local step is not counted yet.
        return self.exchange.send(self.capture(message, self.engine.counts[0] + 1))

    def receive(self, into: MessageArrays) -> bool:
        """Read another member's model into the message ``into``; return False if there was none."""
        state = self.exchange.receive()
        if state is None:
            return False
        self._put(state.parameters, [parts[0] for parts in into])
        return True


def steps_of_round(assembly: Assembly) -> int:
    """Return the number H of steps in a chunk, after which a member may exchange."""
    cadence = assembly.parts.cadence
    index = 0
    while cadence.kind(cadence.init(), index) is ExchangeKind.LOCAL:
        index += 1
    return index + 1


def average(states: Sequence[NodeState]) -> NodeState:
    """Return the mean of ``states``, which are summed in their order.

    Counters and arrays of integers are taken from the first model. Arrays that some model lacks are
    left out.

    :param states: models with equal parameter layouts, at least one
    """
    first = states[0]
    names = [n for n in first.arrays if all(n in state.arrays for state in states)]

    def mean(arrays: Sequence[np.ndarray]) -> np.ndarray:
        if not np.issubdtype(arrays[0].dtype, np.floating) or len(arrays) == 1:
            return arrays[0]
        rows = [torch.from_numpy(np.ascontiguousarray(array)).reshape(1, -1) for array in arrays]
        total = weighted_sum([1 / len(rows)] * len(rows), rows, torch.empty_like(rows[0]))
        return total.numpy().reshape(arrays[0].shape)

    return replace(
        first,
        parameters=mean([state.parameters for state in states]),
        pieces={name: mean([state.pieces[name] for state in states]) for name in first.pieces},
        arrays={name: mean([state.arrays[name] for state in states]) for name in names},
    )

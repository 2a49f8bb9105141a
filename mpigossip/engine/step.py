"""One step of decentralized training: the only place where group, mixer and algorithm meet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from mpigossip.algorithms.base import Algorithm, Step
from mpigossip.algorithms.cadence import Cadence
from mpigossip.engine.clock import Clock
from mpigossip.engine.consensus import consensus_distance, square_norms
from mpigossip.engine.fragments import Fragments
from mpigossip.engine.overlap import Blocks
from mpigossip.engine.state import joined, leaves, split
from mpigossip.engine.vector import Vector
from mpigossip.groups.base import Group, held
from mpigossip.mixing.base import ByBlocks, Into, Kind, Mixer
from mpigossip.mixing.kernels import onepass

NAN = float("nan")


@dataclass
class Record:
    """What one step showed; arrays are (rows,) float64."""

    index: int
    kind: Kind
    lr: float
    loss: torch.Tensor
    gradient_norm: torch.Tensor
    mixed_distance: torch.Tensor
    consensus_distance: float
    seconds: dict[str, float] = field(default_factory=dict)
    bytes_sent: list[int] = field(default_factory=list)
    staleness: list[float] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    """what else is known of the step, by name: a number of this process, or one a row. A job's
    task counts its metrics, a user's own loop says what it likes"""
    rested: tuple[int, ...] = ()
    """rows that made no local step, as the cadence wants it"""


class Engine:
    """The nodes that live in this process: a step from a gradient, wherever that comes from.

    ``index`` counts steps, ``born`` is the step at which the algorithm's state began and
    ``round`` the graph's clock. These, the cadence's state and the method's arrays are all that a
    checkpoint needs; an exchange that :meth:`ahead` has begun is none of it, since sending it
    again gives the same.
    """

    def __init__(
        self,
        mixer: Mixer,
        group: Group,
        vector: Vector,
        methods: Sequence[Algorithm],
        cadence: Cadence,
        *,
        cut: Callable[[ByBlocks], Blocks] | None = None,
        fragments: Fragments | None = None,
        measure_every: int = 0,
        inspect: Callable[[Sequence[torch.Tensor], slice, int], None] | None = None,
    ):
        """``methods``: one a segment (they differ in which columns take weight decay).

        ``cut``: the blocks of layers that a mixer may send during backward; None where the
        gradient is needed whole. ``fragments``: where not all of the vector travels at once, or
        it is not waited for; no ``cut`` then. ``measure_every``: steps between two consensus
        distances, 0: none.
        ``inspect``: is shown some columns of the vectors that are about to be sent, and the step.
        """
        self.mixer, self.group, self.vector = mixer, group, vector
        self._into = mixer if isinstance(mixer, Into) else None
        self.fragments = fragments
        self.methods, self.method, self.cadence = methods, methods[0], cadence
        self.measure_every = measure_every
        self.index, self.born, self.round = 0, 0, 0
        self.states: list[Any] = []
        self.rhythm: Any = None
        self.restart()
        self.clock, self.counting = Clock(mixer), False
        self._kind: Kind | None = None  # of the step that has begun
        self._sent = False  # whether its exchange has
        self._came: tuple | None = None  # what it brought
        self._cut, self._inspect = cut, inspect
        self._blocks: Blocks | None = None
        self._blocks_of: Mixer | None = None

    # -- a step, from beginning to end --------------------------------------------------------

    def ahead(self) -> None:
        """Begin the next step; send, where the method can before there is a gradient."""
        if not self.counting:
            self.count()
        self._kind = self.cadence.kind(self.rhythm, self.index - self.born)
        if self.method.ahead and self.fragments is not None:
            self.fragments.ahead(self, self._now(None))
        elif self.method.ahead:
            self._send(None, self._now(None))
        self.clock.lap("exchange_s")

    def count(self) -> None:
        """Time from now on is the next step's, also before it begins."""
        self.clock, self.counting = Clock(self.mixer), True

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """What is done inside is none of a step's time."""
        if self.counting:
            self.clock.lap("compute_s")
        yield
        self.clock.skip()

    def early(self, block: int, lr: float) -> None:
        """Send a block of layers that backward is through with; the rest of it goes on."""
        blocks, now = self._blocks, self._now(lr)
        assert blocks is not None, "sends_early says whether there are blocks"
        if not self._sent:
            (self._out,) = self.mixer.outbox(self.round)
            blocks.mixer.start_by_blocks(self.round, self.index, blocks.order)
            self._sent = True
        (x,), g = self.vector.x, None if self.method.raw else self.vector.g[0]
        blocks.send(block, x, g, self.states[0], self._out, now)
        self.look([self._out], blocks.columns[block])
        blocks.mixer.filled(block)

    def step(
        self,
        lr: float,
        skipped: tuple[int, ...] = (),
        *,
        loss: torch.Tensor | None = None,
        gradient_norm: torch.Tensor | None = None,
    ) -> Record:
        """One update from the gradients in the vector, and the exchange that the cadence asks for.

        Rows in ``skipped`` have no usable gradient: they take no local step, and join the round.
        ``loss`` and ``gradient_norm``, (rows,): for the record, and for a cadence that asks.
        """
        if self._kind is None:
            self.ahead()
        kind, now = self._kind, self._now(lr)._replace(skipped=skipped)
        if self.fragments is not None:
            came = self.fragments.step(self, now)
            nothing = self._unmeasured(0.0 if self.measuring else NAN)
            apart = nothing if came is None else came
        elif kind is Kind.LOCAL and self._alone():
            self.adapt(now)
            apart = self._unmeasured(0.0 if self.measuring else NAN)
        else:
            if not self._sent:
                self._send(self.vector.g, now)
            self.settle(self._direct())
            assert self._came is not None
            sent, mixed = self._came
            apart = self.distance(sent, mixed, kind)
            self._receive(sent, mixed, now)
        self.round += kind is Kind.GOSSIP
        self._kind, self._sent, self._came = None, False, None
        self.counting = False
        self.clock.lap("exchange_s")
        self.group.all_gather(self.vector.x, self.vector.full)
        self.clock.lap("node_s")
        loss = self._unmeasured() if loss is None else loss
        norm = self._unmeasured() if gradient_norm is None else gradient_norm
        self.rhythm = self.cadence.observe(self.rhythm, now, self._measured(kind, loss, apart))
        record = Record(self.index, kind, lr, loss, norm, apart, self._consensus())
        record.seconds = self.clock.seconds
        record.bytes_sent = list(self.mixer.bytes_sent)
        record.staleness = list(self.mixer.staleness)
        self.index += 1
        return record

    @property
    def under_way(self) -> bool:
        """Whether the exchange of a step that is still to come has begun."""
        return self._sent or self.fragments is not None and self.fragments.is_ahead

    def settle(self, into: torch.Tensor | None = None) -> None:
        """Wait for the neighbours of an exchange that has begun; the step takes it in later.

        ``into``: where what they sent may be summed, the old values being spent.
        """
        if self.fragments is not None:
            self.fragments.settle(self)
        if self._sent and self._came is None:
            direct = None if into is None else self._into
            self._came = direct.finish_into(into) if direct else self.mixer.finish()

    def _direct(self) -> torch.Tensor | None:
        """The array x, where the method makes it what is mixed and nobody needs it any more."""
        layout = self.mixer.layout
        one = len(self.vector.x) == layout.vectors == 1 and not layout.scalars
        if not (one and self.method.takes_mixed and self._kind is Kind.GOSSIP):
            return None
        return self.vector.x[0] if layout.raw_bytes is None else None

    def adopt(self, mixer: Mixer) -> None:
        """Go on with another mixer; a step that has begun begins again."""
        self.mixer, self.clock, self.counting = mixer, Clock(mixer), False
        self._into = mixer if isinstance(mixer, Into) else None
        self._kind, self._sent, self._came = None, False, None
        if self.fragments is not None:
            self.fragments.drop()

    def average(self, lr: float) -> None:
        """An exchange without a gradient: what a node that waits for others does asynchronously.

        Were it silent, whom it waits for would go on alone, and drift away on its own data.
        ``lr``: of the step at hand; no step is taken.
        """
        every = tuple(range(len(self.mixer.rows)))
        self._kind = Kind.GOSSIP
        now = self._now(lr)._replace(skipped=every)
        for g in self.vector.g:
            g.zero_()
        self._send(None if self.method.ahead else self.vector.g, now)
        self._receive(*self.mixer.finish(), now)
        self._kind, self._sent = None, False
        self.round += 1
        self.group.all_gather(self.vector.x, self.vector.full)

    def _now(self, lr: float | None) -> Step:
        assert self._kind is not None, "a step begins with ahead()"
        return Step(self.index - self.born, self.round, self._kind, lr)

    def _send(self, g: Sequence[Any] | None, now: Step) -> None:
        """Let the algorithm fill the outbox, shard by shard, and begin the exchange."""
        # waits for those who read the round before the last out of this memory
        out, x = self.mixer.outbox(now.round), self.vector.x
        blocks = self._present_blocks()

        def send(slot: int):
            gradient = None if g is None or self.method.raw else g[slot]
            if blocks is not None:
                for block in blocks.order:
                    blocks.send(block, x[slot], gradient, self.states[slot], out[slot], now)
                return self.states[slot]
            arguments = x[slot], gradient, self.states[slot], out[slot], now
            local = now.kind is Kind.LOCAL
            return onepass.send(self.methods[slot].send, *arguments, local=local)

        self.states = self.group.on_shards(send)
        self.look(out)
        self.mixer.start(now.kind, now.round, self.index)
        self._sent = True

    def look(self, out: Sequence, columns: slice | None = None) -> None:
        """Show what is about to be sent to who asked for it."""
        for parts in out if self._inspect else ():
            c = columns or slice(0, parts[0].shape[1])
            assert self._inspect is not None
            self._inspect([part[:, c] for part in parts[: self.method.vectors]], c, self.index)

    def _receive(self, sent: Sequence, mixed: Sequence, now: Step) -> None:
        """Let the algorithm take in what came, shard by shard."""
        x, blocks = self.vector.x, self._present_blocks()

        def receive(slot: int):
            gradient = None if self.method.raw else self.vector.g[slot]
            arguments = x[slot], gradient, self.states[slot], sent[slot], mixed[slot], now
            if blocks is not None:
                blocks.receive(*arguments)
                return self.states[slot]
            return onepass.receive(self.methods[slot].receive, *arguments)

        self.states = self.group.on_shards(receive)

    def _alone(self) -> bool:
        """Whether a LOCAL step needs no outbox; asynchronous nodes show theirs all the time."""
        return self.method.alone is not None and self.mixer.synchronous

    def adapt(self, now: Step) -> None:
        """A LOCAL step in place, of a method that has ``alone``."""

        def adapt(slot: int):
            gradient = None if self.method.raw else self.vector.g[slot]
            alone = self.methods[slot].alone
            assert alone is not None
            return alone(self.vector.x[slot], gradient, self.states[slot], now)

        self.states = self.group.on_shards(adapt)

    # -- by blocks, where all is elementwise and the mixer sends them one by one ----------------

    def sends_early(self) -> Blocks | None:
        """The blocks of the step that has begun, where they can be sent during backward."""
        return self._present_blocks() if self._kind is Kind.GOSSIP else None

    def _present_blocks(self) -> Blocks | None:
        """The blocks that the present mixer sends, if it, the method and the node can."""
        mixer = self.mixer
        if mixer is not self._blocks_of:
            if self._blocks is not None:
                self._blocks.close()
            self._blocks, self._blocks_of = None, mixer
            able = self._cut is not None and self.method.by_columns
            if able and isinstance(mixer, ByBlocks) and mixer.blocks:
                self._blocks = self._cut(mixer)
        return self._blocks

    # -- what is measured on the way ------------------------------------------------------------

    @property
    def measuring(self) -> bool:
        """Whether the present step measures what every k-th one does."""
        return bool(self.measure_every) and self.index % self.measure_every == 0

    def _unmeasured(self, value: float = NAN) -> torch.Tensor:
        return torch.full((len(self.mixer.rows),), value, dtype=torch.float64)

    def distance(self, sent: Sequence, mixed: Sequence, kind: Kind) -> torch.Tensor:
        """‖mixed − sent‖ of the first vector where it is asked for, else NaN: (rows,)."""
        wanted = "variance" in self.cadence.measures and kind is Kind.GLOBAL
        if not wanted and not self.measuring:
            return self._unmeasured()
        per_slot = self.group.on_shards(lambda s: square_norms(mixed[s][0], sent[s][0]))
        return self.group.sum_scalars(per_slot).sqrt()[:, 0]

    def _consensus(self) -> float:
        # asynchronous nodes don't meet for it: evaluations measure it too
        if not self.measuring or not self.mixer.synchronous:
            return NAN
        return consensus_distance(self.vector.x, self.mixer, self.group)

    def _measured(self, kind: Kind, loss: torch.Tensor, apart: torch.Tensor) -> dict[str, float]:
        """The node averages that the cadence asks for, equal on all nodes; of GLOBAL steps only.

        At any other step they would make all nodes wait for each other.
        """
        if kind is not Kind.GLOBAL:
            return {}
        wanted = {"loss": loss, "variance": apart**2}
        values = {name: wanted[name] for name in sorted(self.cadence.measures)}
        if not values:
            return {}
        means = self.mixer.mean_scalars(torch.stack(list(values.values()), dim=1))
        return dict(zip(values, means.tolist(), strict=True))

    # -- state by name --------------------------------------------------------------------------

    def restart(self) -> None:
        """Begin the method's and the cadence's state anew at the present step."""
        pairs = zip(self.methods, self.vector.x, strict=True)
        self.states, self.rhythm = [method.init(x) for method, x in pairs], self.cadence.init()
        if self.fragments is not None:
            self.states = [self.fragments.fresh(state) for state in self.states]
        self.born = self.index

    def parts(self) -> dict[str, list[torch.Tensor]]:
        """The method's arrays as they are, and what fragments brought: by name, one a segment.

        Waits for the neighbours of an open exchange of a fragment.
        """
        of_fragments = {} if self.fragments is None else self.fragments.parts(self)
        named = [dict(leaves(state)) for state in self.states]
        return {f"state/{k}": [each[k] for each in named] for k in named[0]} | of_fragments

    def arrays(self, row: int = 0, places: Mapping[str, np.ndarray] | None = None) -> dict:
        """The method's state of one node, packed: a copy, over that of ``places`` if given.

        Collective over the node; nothing but in its first process.
        """
        places, found = places or {}, {}
        for name, parts in self.parts().items():
            whole = self.group.to_first([part[row : row + 1] for part in parts])
            if whole is not None:
                found[name] = joined(whole, 0, self.vector.flat, places.get(name))
        return found

    def numbers(self) -> dict[str, Any]:
        """The counters, and the cadence's state as ``cadence/…``; the same on all nodes."""
        counters = {"index": self.index, "born": self.born, "round": self.round}
        return counters | {f"cadence/{k}": v for k, v in self.rhythm._asdict().items()}

    def restore(
        self, arrays: Mapping[str, np.ndarray], numbers: Mapping[str, Any], row: int = 0
    ) -> None:
        """Go on where :meth:`arrays` and :meth:`numbers` stood, to the bit; x is the caller's."""
        for name, parts in self.parts().items():
            split(arrays[name], parts, row, self.vector.flat, held(self.group))
        self.count_from(numbers)
        self.restore_rhythm(numbers)

    def count_from(self, numbers: Mapping[str, Any]) -> None:
        """Take the counters alone."""
        self.index, self.born, self.round = (int(numbers[k]) for k in ("index", "born", "round"))

    def restore_rhythm(self, numbers: Mapping[str, Any]) -> None:
        """Take the cadence's state alone."""
        fields = self.rhythm._fields
        self.rhythm = type(self.rhythm)(*(numbers[f"cadence/{name}"] for name in fields))

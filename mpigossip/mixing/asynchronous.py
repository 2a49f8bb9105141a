"""Asynchronous gossip over MPI windows: nobody waits for anybody; rank i is node i.

Each rank publishes its model in window memory, round after round, whether or not others are just
reading it. A reader takes the newest copy of its neighbour and proves by two version counters
that it is whole. Averaging is pairwise and keeps the mean (AD-PSGD, Lian et al., ICML 2018, with
a deposit in the place of its lock): node i, at its round t, takes f = ½ W_ij(t) (x_j − x_i) from
each in-neighbour's copy x_j, adds f to its own model and puts it into a place for it at node j,
which subtracts it before its next round. So Σ x, with what is under way, stays to rounding, and
where nobody is late the model is multiplied by (W + Wᵀ)/2. Node i takes from node j again only
when it sees a copy that includes its last deposit: nothing is counted twice, and one place for
each reader is enough.

MPI's guarantees. The version counters and the bells are written and read with accumulate calls
only (``REPLACE``, ``NO_OP``), which are atomic for each word and ordered by a flush after each
call. Deposits are read without a race: their reader puts no other one before it sees a copy that
includes this one. Only the bytes of a model, with its round and its list of deposits, can be
stored by their owner while an ``MPI_Get`` of another rank reads them. In MPI's unified memory
model, which is required, such a read returns undefined bytes and has no other effect. These bytes
are never used: the owner raises ``BEGUN`` before the first store and sets ``DONE`` after the last
one, a reader reads ``DONE`` before the model and ``BEGUN`` after it, and a store that overlaps the
read makes them differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from mpi4py import MPI

from mpigossip.cluster.collectives import close_window, open_window
from mpigossip.cluster.deadline import Deadline
from mpigossip.cluster.process import check_process
from mpigossip.cluster.world import World
from mpigossip.config import JobError
from mpigossip.mixing.averages import CUT, RankMixer, average_message
from mpigossip.mixing.base import ExchangeKind, MessageArrays, MessageLayout, bytes_per_exchange
from mpigossip.mixing.delayed import flow, readers
from mpigossip.mixing.progress_thread import ProgressThread

BEGUN = 0
DONE = 1
ROUND = 2
INCLUDED = 3
"""Words (int64) at the head of a rank's window: the counter that is raised before the model is
written, the one raised after it, the copy's round, and for each node the number of its last
deposit that the copy includes."""
TRIES = 3
"""Reads of a copy until it is given up for this round, when each was torn."""


class WindowMap(NamedTuple):
    """Where in a rank's window things begin: words and model, bells, then places of ``stride``.

    A bell is the number of a reader's deposit; ``copy``: bytes of a neighbour's model as read.
    """

    head: int
    sequence_numbers: int
    places: int
    stride: int
    copy: int

    @classmethod
    def of(cls, graph, layout: MessageLayout) -> WindowMap:
        head = 8 * (INCLUDED + graph.n)
        stride = -(-layout.nbytes // 8) * 8
        bells = head + stride
        return cls(head, bells, bells + 8 * graph.n, stride, bells - 8 * ROUND)


@dataclass
class ModelCopy:
    """A neighbour's model as it was read: uint8 memory of header and message."""

    memory: torch.Tensor
    whole: bool = False

    @property
    def head(self) -> np.ndarray:
        """The header's words from ROUND on."""
        return self.memory.numpy()[: self.memory.numel() // 8 * 8].view(np.int64)


class Asynchronous(RankMixer):
    """The mixer of one rank.

    ``outbox`` and ``finish`` wait for no other rank; GLOBAL rounds and the averages off the hot
    path do. ``torn`` counts reads that were not whole, ``skipped`` exchanges that were left out
    (torn, not seen yet, or the last deposit not taken in).
    """

    synchronous = False

    def __init__(self, graph, layout: MessageLayout, world: World, *, timeout_s=300.0):
        """Collective over ``world``; ``graph.n`` must be its size. The wire is exact."""
        super().__init__(graph, layout, world, timeout_s)
        self.torn = 0
        self.skipped = 0
        self._open_window()
        poll = len(set(world.hosts)) > 1
        self._thread = ProgressThread(self._comm, timeout_s=timeout_s, poll=poll)
        copy = self._map.copy
        self._copies = [
            ModelCopy(torch.zeros(copy, dtype=torch.uint8)) for _ in range(graph.degree)
        ]
        self._result = torch.empty(layout.nbytes, dtype=torch.uint8)
        # deposits made at each node so far, and taken in from each node
        self._made, self._included = np.zeros(self.n, np.int64), np.zeros(self.n, np.int64)
        self._round: tuple[ExchangeKind, int, Future | None] | None = None
        self._pushed: Future | None = None

    @property
    def threaded(self) -> bool:
        """Return whether any thread may make its rounds, one at a time."""
        return self._thread.threaded

    @staticmethod
    def estimate_memory(graph, layout, node: int, near: Sequence = (), averages: bool = True):
        """Memory: the published model, a result (two for averages), copies, places of deposits.

        A copy for each source of a round, a place for each reader of any round.
        """
        where = WindowMap.of(graph, layout)
        return {
            "outbox": where.places,
            "result": (2 if averages else 1) * layout.nbytes,
            "copies": graph.degree * where.copy,
            "inbox": len(readers(graph, node)) * where.stride,
        }

    def _open_window(self) -> None:
        self._readers = [readers(self.graph, node) for node in range(self.n)]
        where = self._map = WindowMap.of(self.graph, self.layout)
        room = where.places + where.stride * len(self._readers[self.rank])
        self._window = open_window(MPI.Win.Allocate, room, self._comm)
        memory = torch.frombuffer(self._window.tomemory(), dtype=torch.uint8)[:room].zero_()
        self._memory = memory
        self._words = memory[: where.head].numpy().view(np.int64)
        self._message = memory[where.head : where.head + self.layout.nbytes]
        self._out: MessageArrays | None = self.layout.views(self._message)
        self._version = 0
        if self._window.Get_attr(MPI.WIN_MODEL) != MPI.WIN_UNIFIED:
            raise JobError(
                'node.mixer = "asynchronous": the windows of this MPI have separate public and '
                'private copies, so that others can\'t read them meanwhile; set "synchronous"'
            )
        self._words[ROUND] = -1
        self._window.Sync()
        self._meet("opening the windows")  # nobody reads what isn't written yet

    def _meet(self, what: str) -> None:
        request = self._comm.Ibarrier()
        self._waited += Deadline(self._timeout_s).wait(
            request.Test, lambda: f"{what}: not all ranks have come", awaited_ranks=tuple
        )

    # -- a round ------------------------------------------------------------------------

    def outbox(self, t: int) -> MessageArrays:
        """Arrays (1, p) to fill whole; from now on the copy that others read is not whole."""
        check_process()
        if self._round is not None:
            self.finish()
        if self._pushed is not None:
            # The thread and the main thread would flush the same window at the same time. The next
            # round's reads come after the corrections in any case.
            self._waited += self._thread.wait(self._pushed, "the last deposits")
            self._pushed = None
        self._version += 1
        self._store(BEGUN, self._version)
        return self._out

    def start(self, kind: ExchangeKind, t: int, exchange: int | None = None) -> None:
        self._words[ROUND], self._words[INCLUDED:] = t, self._included
        self._store(DONE, self._version)
        future = None
        if kind is ExchangeKind.GOSSIP:
            nodes = self.graph.neighbours(t, self.rank)[0]
            future = self._thread.submit(lambda: self._read_all(nodes))
        self._round = kind, t, future

    def _store(self, word: int, value: int) -> None:
        """Store one of this rank's counters, after all earlier stores and before all later ones."""
        self._window.Sync()
        self._replace(self.rank, 8 * word, value)
        self._window.Sync()

    def _replace(self, j: int, at: int, value: int) -> None:
        """Set a word in rank j's window, atomically; returns when it is set there."""
        word = np.array([value], np.int64)
        self._window.Accumulate([word, MPI.INT64_T], j, [at, 1, MPI.INT64_T], MPI.REPLACE)
        self._window.Flush(j)

    def _load(self, j: int, at: int, count: int = 1) -> np.ndarray:
        """Load words from rank j's window, each atomically, before all later loads."""
        self._window.Sync()
        words = np.zeros(count, np.int64)
        nothing = np.zeros(1, np.int64)
        if count == 1:
            result = [words, MPI.INT64_T]
            self._window.Fetch_and_op([nothing, MPI.INT64_T], result, j, at, MPI.NO_OP)
        else:
            self._window.Get_accumulate(
                [nothing, 0, MPI.INT64_T],
                [words, MPI.INT64_T],
                j,
                [at, count, MPI.INT64_T],
                MPI.NO_OP,
            )
        self._window.Flush(j)
        self._window.Sync()
        return words

    def _read_all(self, nodes) -> None:
        """The newest copy of each node; runs in the progress thread."""
        for copy, j in zip(self._copies, map(int, nodes), strict=False):
            for _ in range(TRIES):
                self._read(copy, j)
                if copy.whole:
                    break
                self.torn += 1

    def _read(self, copy: ModelCopy, j: int) -> None:
        """One read of rank j's header and model between its two counters."""
        done = self._load(j, 8 * DONE)
        self._get(copy.memory.numpy()[: self._map.sequence_numbers - 8 * ROUND], j, 8 * ROUND)
        begun = self._load(j, 8 * BEGUN)
        copy.whole = self._is_whole(int(done[0]), int(begun[0]))

    @staticmethod
    def _is_whole(done: int, begun: int) -> bool:
        """``done`` was read before the model, ``begun`` after it: equal, nothing was written."""
        return done == begun

    def _get(self, into: np.ndarray, j: int, at: int) -> None:
        for begin in range(0, into.size, CUT):
            part = into[begin : begin + CUT]
            self._window.Get([part, MPI.BYTE], j, [at + begin, part.size, MPI.BYTE])
        self._window.Flush(j)

    def finish(self, into: torch.Tensor | None = None) -> tuple[MessageArrays, MessageArrays]:
        kind, t, future = self._round
        self._round = None
        if kind is ExchangeKind.LOCAL:
            return self._out, self._out
        self._result.copy_(self._message)
        if kind is ExchangeKind.GLOBAL:
            self._finish_global(t)
        else:
            self._thread.wait(future, f"round {t}")
            self._finish_gossip(t)
        return self._out, self.layout.views(self._result)

    def _finish_gossip(self, t: int) -> None:
        nodes, weights, _ = self.graph.neighbours(t, self.rank)
        seen = []
        deposits = []
        for copy, j, weight in zip(self._copies, map(int, nodes), weights, strict=False):
            if not self._may_take(copy, j):
                self.skipped += 1
                continue
            seen.append(t - int(copy.head[0]))
            model = copy.memory[self._map.head - 8 * ROUND :]
            for dtype, part in self.layout.parts:
                own = self._message[part].view(dtype)
                other = model[part].view(dtype)
                other.copy_(flow(float(weight) / 2, own, other))
                self._result[part].view(dtype).add_(other)
            self._made[j] += 1
            deposits.append((j, int(self._made[j]), model[: self.layout.nbytes]))
        self.staleness[0] = float(np.mean(seen)) if seen else float("nan")
        self._apply_corrections()
        self.bytes_sent[0] += 2 * len(seen) * self.layout.nbytes
        if deposits:
            self._pushed = self._thread.submit(lambda: self._send_corrections(deposits))

    def _may_take(self, copy: ModelCopy, j: int) -> bool:
        """Return whether there is a whole copy that includes this rank's last deposit."""
        published = copy.whole and copy.head[0] >= 0
        return published and copy.head[INCLUDED - ROUND + self.rank] == self._made[j]

    def _send_corrections(self, deposits: list[tuple[int, int, torch.Tensor]]) -> None:
        """Put what was taken into the places for it, then ring; runs in the progress thread."""
        for j, number, message in deposits:
            base = self._map.places + self._readers[j].index(self.rank) * self._map.stride
            for at in range(0, message.numel(), CUT):
                part = message[at : at + CUT].numpy()
                self._window.Put([part, MPI.BYTE], j, [base + at, part.size, MPI.BYTE])
            self._window.Flush(j)
            self._replace(j, self._map.sequence_numbers + 8 * self.rank, number)

    def _apply_corrections(self) -> None:
        """Subtract from the result the deposits that have arrived, in the order of nodes."""
        if not self._readers[self.rank]:
            return
        bells = self._load(self.rank, self._map.sequence_numbers, self.n)
        for place, j in enumerate(self._readers[self.rank]):
            number = int(bells[j])
            if number == self._included[j]:
                continue
            at = self._map.places + place * self._map.stride
            deposit = self._memory[at : at + self.layout.nbytes]
            for dtype, part in self.layout.parts:
                self._result[part].view(dtype).sub_(deposit[part].view(dtype))
            self._included[j] = number

    def _finish_global(self, t: int) -> None:
        self.bytes_sent[0] += bytes_per_exchange(
            self.graph, ExchangeKind.GLOBAL, t, self.rank, self.layout.nbytes
        )
        self._flush_corrections()
        self._apply_corrections()
        own, out = (m.split(self.layout.slot_bytes) for m in (self._result.clone(), self._result))
        self._waited += average_message(self.layout, self.rank, self.n, own, out, self._swap)

    def _flush_corrections(self) -> None:
        """Wait until every rank's deposits lie in their places."""
        if self._pushed is not None:
            self._thread.wait(self._pushed, "the last deposits")
        self._meet("a meeting of all ranks")

    def pending(self) -> MessageArrays:
        """Return deposits received and not applied yet, (1, p) a vector; collective."""
        if self._round is not None:
            self.finish()
        self._flush_corrections()
        before = self._result.clone()
        included = self._included.copy()
        self._result.zero_()
        self._apply_corrections()
        found = self._result
        self._result = before
        self._included = included
        return self.layout.views(found)

    def close(self) -> None:
        """Finish an open round, free the memory; collective. Deposits under way are lost."""
        if self._out is None:
            return
        check_process()
        if self._round is not None:
            self.finish()
        self._flush_corrections()
        self._thread.close()
        self._out = None
        self._copies = []
        del self._memory, self._message, self._words
        close_window(self._window, self._comm)
        self._comm.Free()

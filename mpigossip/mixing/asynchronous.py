"""Asynchronous gossip over MPI windows: no rank waits for another in a round; rank i is node i.

Each rank publishes its model in window memory in every round, whether or not other ranks are
reading it at that time. A reader copies the newest model of its in-neighbour and compares two
version counters to make sure that the copy is complete.

Averaging is pairwise and preserves the mean, as in AD-PSGD (Lian et al., ICML 2018), but with
corrections instead of its lock. In its round t, node i computes f = ½ W_ij(t) (x_j − x_i) from the
copy x_j of each in-neighbour and adds f to its own model. It sends f as a correction to node j,
which subtracts it before its next round. The sum Σ x, including corrections in flight, is therefore
constant up to rounding. If no model is late, a round multiplies the models by (W + Wᵀ)/2. Node i
uses a copy of node j again only if that copy includes its last correction. No correction is
therefore counted twice, and one buffer for each reader is enough.

Use of MPI's guarantees: The version counters and the sequence numbers are written and read only
with accumulate calls (``REPLACE``, ``NO_OP``), which are atomic for each word; a flush after each
call orders them. Corrections are read without a race, because their sender writes the next one
only after it has seen a copy that includes this one. Only the bytes of a model, with its round and
its list of included corrections, may be stored by their owner while an ``MPI_Get`` of another rank
reads them. In the unified memory model of MPI, which is required, such a read returns undefined
bytes and has no other effect. These bytes are never used: The owner increments ``BEGUN`` before
the first store and sets ``DONE`` after the last one. A reader reads ``DONE`` before the model and
``BEGUN`` after it. If a store overlaps the read, the two differ.
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
from mpigossip.mixing.base import ExchangeKind, MessageArrays, MessageLayout, bytes_per_exchange
from mpigossip.mixing.delayed import flow, readers
from mpigossip.mixing.exact_average import RankMixer, average_message
from mpigossip.mixing.progress_thread import ProgressThread
from mpigossip.mixing.window_access import HINTS, WindowAccess

BEGUN = 0
DONE = 1
ROUND = 2
INCLUDED = 3
"""Indices of the int64 words in the header of a rank's window: the counter that is incremented
before the model is written, the counter that is set after it, the round of the model, and for each
node the sequence number of its last correction that the model includes."""
TRIES = 3
"""Number of attempts to read a neighbour's model in a round, if it is overwritten each time."""


class WindowMap(NamedTuple):
    """Positions of the parts of a rank's window, in bytes.

    The parts are the header, the model, the sequence numbers of corrections, and the buffers for
    corrections. There is one sequence number for each node, and one buffer for each node that reads
    this rank's model in any round.
    """

    head: int
    """Size of the header, and offset of the model."""
    sequence_numbers: int
    """Offset of the sequence numbers of the corrections in the buffers."""
    buffers: int
    """Offset of the first buffer."""
    stride: int
    """Size of a buffer."""
    copy: int
    """Size of a neighbour's copy: the header from ``ROUND`` on, and the model."""

    @classmethod
    def of(cls, graph, layout: MessageLayout) -> WindowMap:
        """Return the map for messages of a layout between the nodes of a graph."""
        head = 8 * (INCLUDED + graph.n)
        stride = -(-layout.nbytes // 8) * 8
        sequence_numbers = head + stride
        return cls(
            head,
            sequence_numbers,
            sequence_numbers + 8 * graph.n,
            stride,
            sequence_numbers - 8 * ROUND,
        )


@dataclass
class ModelCopy:
    """Copy of a neighbour's model, or memory for such a copy."""

    memory: torch.Tensor
    """Header from ``ROUND`` on, followed by the message, as uint8."""
    complete: bool = False
    """True if the owner of the model did not write it while it was being copied."""

    @property
    def head(self) -> np.ndarray:
        """Words of the copy from ``ROUND`` on, as int64."""
        return self.memory.numpy()[: self.memory.numel() // 8 * 8].view(np.int64)


class Asynchronous(WindowAccess, RankMixer):
    """Asynchronous mixer of one rank; rank i is node i.

    ``outbox`` and ``finish`` wait for no other rank, except in GLOBAL rounds. The exact averages
    outside of rounds are collective, too.
    """

    synchronous = False

    def __init__(self, graph, layout: MessageLayout, world: World, *, timeout_s=300.0):
        """Open the window and start the progress thread; collective over ``world``.

        :param graph: graph of ``world.size`` nodes
        :param layout: layout of a node's message, without a lossy wire
        :param world: world whose rank i is node i
        :param timeout_s: seconds that each wait for other ranks may take
        :raises JobError: if the windows of this MPI do not have the unified memory model
        :raises ValueError: if the graph or the layout does not fit (:class:`RankMixer`)
        """
        super().__init__(graph, layout, world, timeout_s)
        self.torn = 0
        """Number of reads during which the model was overwritten."""
        self.skipped = 0
        """Number of exchanges with a neighbour that were left out: its model could not be read, was
        not published yet, or did not include the last correction."""
        self._open_window()
        poll = len(set(world.hosts)) > 1
        self._thread = ProgressThread(self._comm, timeout_s=timeout_s, poll=poll)
        copy = self._map.copy
        self._copies = [
            ModelCopy(torch.zeros(copy, dtype=torch.uint8)) for _ in range(graph.degree)
        ]
        self._result = torch.empty(layout.nbytes, dtype=torch.uint8)
        # Number of corrections sent to each node, and sequence number of the last correction from
        # each node that this rank's model includes.
        self._sent_counts, self._included = np.zeros(self.n, np.int64), np.zeros(self.n, np.int64)
        self._round: tuple[ExchangeKind, int, Future | None] | None = None
        self._sending: Future | None = None

    @property
    def threaded(self) -> bool:
        """True if the rounds may run in any thread, one at a time."""
        return self._thread.threaded

    @staticmethod
    def estimate_memory(graph, layout, node: int, near: Sequence = (), averages: bool = True):
        """Return the bytes that a node's messages will occupy, by purpose; no mixer is opened.

        The purposes are "outbox" (the published model), "result", "copies" (one for each
        in-neighbour of a round) and "inbox" (a buffer for corrections for each out-neighbour of any
        round).

        :param graph: graph over the nodes
        :param layout: layout of a node's message
        :param node: number of the node
        :param near: nodes on the same host; not used here
        :param averages: whether exact averages are computed, which need a second result
        """
        window_map = WindowMap.of(graph, layout)
        return {
            "outbox": window_map.buffers,
            "result": (2 if averages else 1) * layout.nbytes,
            "copies": graph.degree * window_map.copy,
            "inbox": len(readers(graph, node)) * window_map.stride,
        }

    def _open_window(self) -> None:
        """Open the window, whose memory holds the published model; collective."""
        self._readers = [readers(self.graph, node) for node in range(self.n)]
        window_map = self._map = WindowMap.of(self.graph, self.layout)
        nbytes = window_map.buffers + window_map.stride * len(self._readers[self.rank])
        self._window = open_window(MPI.Win.Allocate, nbytes, self._comm, HINTS)
        memory = torch.frombuffer(self._window.tomemory(), dtype=torch.uint8)[:nbytes].zero_()
        self._memory = memory
        self._words = memory[: window_map.head].numpy().view(np.int64)
        self._message = memory[window_map.head : window_map.head + self.layout.nbytes]
        self._out: MessageArrays | None = self.layout.views(self._message)
        self._version = 0
        if self._window.Get_attr(MPI.WIN_MODEL) != MPI.WIN_UNIFIED:
            raise JobError(
                'node.mixer = "asynchronous": the windows of this MPI have separate public and '
                "private copies, which other ranks can't read at any time; set "
                'node.mixer = "synchronous"'
            )
        self._words[ROUND] = -1
        self._window.Sync()
        # No rank may read a window before its owner has initialized it.
        self._barrier("opening the windows")

    def _barrier(self, what: str) -> None:
        """Wait until all ranks have made this call; collective.

        :param what: description of the call, which begins the error message
        """
        request = self._comm.Ibarrier()
        self._waited += Deadline(self._timeout_s).wait(
            request.Test,
            lambda: f"{what}: not all ranks have reached this call",
            awaited_ranks=tuple,
        )

    # -- a round ------------------------------------------------------------------------

    def outbox(self, t: int) -> MessageArrays:
        """Return the arrays for the next message, which the caller must fill completely.

        From this call to :meth:`start`, the published model is incomplete, and other ranks discard
        their copies of it.

        :param t: index of the round
        :return: for each slot, an array (1, p) for each vector, and its scalars
        """
        check_process()
        if self._round is not None:
            self.finish()
        if self._sending is not None:
            # Without this wait, the progress thread and the main thread would flush the same window
            # at the same time. The progress thread reads the models of the next round only after it
            # has sent these corrections in any case.
            self._waited += self._thread.wait(self._sending, "the last corrections")
            self._sending = None
        self._version += 1
        self._store(BEGUN, self._version)
        return self._out

    def start(self, kind: ExchangeKind, t: int, exchange: int | None = None) -> None:
        """Publish the outbox; in a GOSSIP round, begin to read the in-neighbours' models.

        :param kind: kind of the exchange
        :param t: index of the round
        :param exchange: not used here
        """
        self._words[ROUND], self._words[INCLUDED:] = t, self._included
        self._store(DONE, self._version)
        future = None
        if kind is ExchangeKind.GOSSIP:
            nodes = self.graph.neighbours(t, self.rank)[0]
            future = self._thread.submit(lambda: self._read_all(nodes))
        self._round = kind, t, future

    def _store(self, word: int, value: int) -> None:
        """Store one of this rank's counters, after all earlier stores and before all later ones.

        :param word: index of the counter in the header, ``BEGUN`` or ``DONE``
        :param value: new value
        """
        self._window.Sync()
        self._replace(self.rank, 8 * word, value)
        self._window.Sync()

    def _read_all(self, nodes) -> None:
        """Copy the newest model of each of ``nodes``; the progress thread calls this.

        If the owner writes to its model during a read, the model is read again. After `TRIES` such
        reads, the copy stays incomplete, and the round omits this neighbour. ``torn`` counts these
        reads.
        """
        for copy, j in zip(self._copies, map(int, nodes), strict=False):
            for _ in range(TRIES):
                self._read(copy, j)
                if copy.complete:
                    break
                self.torn += 1

    def _read(self, copy: ModelCopy, j: int) -> None:
        """Copy rank j's header and model once, and check by its counters that they are complete."""
        done = self._load(j, 8 * DONE)
        self._get(copy.memory.numpy()[: self._map.sequence_numbers - 8 * ROUND], j, 8 * ROUND)
        begun = self._load(j, 8 * BEGUN)
        copy.complete = self._is_complete(int(done[0]), int(begun[0]))

    @staticmethod
    def _is_complete(done: int, begun: int) -> bool:
        """Return whether nothing was written during a read.

        :param done: counter ``DONE``, read before the model
        :param begun: counter ``BEGUN``, read after the model
        """
        return done == begun

    def finish(self, into: torch.Tensor | None = None) -> tuple[MessageArrays, MessageArrays]:
        """Finish the round and return ``sent`` and ``mixed``, read-only until the next outbox.

        :param into: not used here
        """
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
        """Mix the copies of the in-neighbours into the result, and send the corrections."""
        nodes, weights, _ = self.graph.neighbours(t, self.rank)
        ages = []
        corrections = []
        for copy, j, weight in zip(self._copies, map(int, nodes), weights, strict=False):
            if not self._is_usable(copy, j):
                self.skipped += 1
                continue
            ages.append(t - int(copy.head[0]))
            model = copy.memory[self._map.head - 8 * ROUND :]
            for dtype, part in self.layout.parts:
                own = self._message[part].view(dtype)
                other = model[part].view(dtype)
                other.copy_(flow(float(weight) / 2, own, other))
                self._result[part].view(dtype).add_(other)
            self._sent_counts[j] += 1
            corrections.append((j, int(self._sent_counts[j]), model[: self.layout.nbytes]))
        self.staleness[0] = float(np.mean(ages)) if ages else float("nan")
        self._apply_corrections()
        self.bytes_sent[0] += 2 * len(ages) * self.layout.nbytes
        if corrections:
            self._sending = self._thread.submit(lambda: self._send_corrections(corrections))

    def _is_usable(self, copy: ModelCopy, j: int) -> bool:
        """Return whether a copy of rank j's model is published, complete and up to date.

        It is up to date if it includes this rank's last correction.
        """
        published = copy.complete and copy.head[0] >= 0
        return published and copy.head[INCLUDED - ROUND + self.rank] == self._sent_counts[j]

    def _send_corrections(self, corrections: list[tuple[int, int, torch.Tensor]]) -> None:
        """Write each correction into its buffer at the neighbour, then its sequence number.

        The progress thread calls this.

        :param corrections: rank, sequence number and bytes of each correction
        """
        for j, number, message in corrections:
            base = self._map.buffers + self._readers[j].index(self.rank) * self._map.stride
            self._put(message.numpy(), j, base)
            self._replace(j, self._map.sequence_numbers + 8 * self.rank, number)

    def _apply_corrections(self) -> None:
        """Subtract the corrections that have arrived from the result, by ascending sender."""
        if not self._readers[self.rank]:
            return
        offsets = [self._map.sequence_numbers + 8 * j for j in self._readers[self.rank]]
        numbers = self._load(self.rank, *offsets).tolist()
        for index, (j, number) in enumerate(zip(self._readers[self.rank], numbers, strict=True)):
            if number == self._included[j]:
                continue
            offset = self._map.buffers + index * self._map.stride
            correction = self._memory[offset : offset + self.layout.nbytes]
            for dtype, part in self.layout.parts:
                self._result[part].view(dtype).sub_(correction[part].view(dtype))
            self._included[j] = number

    def _finish_global(self, t: int) -> None:
        """Apply all corrections, then average the result over all ranks; collective."""
        self.bytes_sent[0] += bytes_per_exchange(
            self.graph, ExchangeKind.GLOBAL, t, self.rank, self.layout.nbytes
        )
        self._flush_corrections()
        self._apply_corrections()
        own, out = (m.split(self.layout.slot_bytes) for m in (self._result.clone(), self._result))
        self._waited += average_message(
            self.layout, self.rank, self._equal_weights, own, out, self._swap
        )

    def _flush_corrections(self) -> None:
        """Wait until the corrections of all ranks have arrived; collective."""
        if self._sending is not None:
            self._thread.wait(self._sending, "the last corrections")
        self._barrier("the corrections of all ranks")

    def pending(self) -> MessageArrays:
        """Return the change of the model by all corrections that are not applied yet; collective.

        The model plus the returned arrays is the model after these corrections. The corrections
        stay in their buffers, and the next round applies them. An open round is finished first.

        :return: for each slot, an array (1, p) for each vector, and its scalars
        """
        if self._round is not None:
            self.finish()
        self._flush_corrections()
        result = self._result.clone()
        included = self._included.copy()
        self._result.zero_()
        self._apply_corrections()
        effect = self._result
        self._result = result
        self._included = included
        return self.layout.views(effect)

    def close(self) -> None:
        """Finish an open round and free the memory; collective.

        Corrections that are not applied yet are lost.
        """
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

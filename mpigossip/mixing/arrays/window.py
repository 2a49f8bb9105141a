"""One-sided exchange of arrays between neighbours by MPI windows; rank i is node i.

Each rank has a *buffer* for each in-neighbour. `put` and `accumulate` send a value to the buffers
at the out-neighbours, `get` fetches what an in-neighbour has published, and `update` computes a
weighted sum over the buffers. No rank waits until another makes a call.

Each pair (sender i, receiver j) has two memory areas in the window of j, with the numbers k = 0 and
1, and one atomic word: 0 if there is no unread message, or 1 + k if area k holds one.

* The receiver swaps 0 into the word. If it gets 1 + k, it owns area k until its next swap, and
  applies the message to its buffer.
* The sender swaps 0 into the word, too. If it gets 1 + k, it has withdrawn its last message before
  it was read: it merges the new value into it, and writes to area k again. If it gets 0, the
  receiver has taken area k and may still be reading it, so the sender writes to the other area:
  the receiver finished reading that area before it took area k. Then the sender sets the word.

A swap gives a message either to the receiver or back to the sender. Each value is therefore
applied exactly once and as a whole, with its push-sum weight, and neither side waits for the other.
Since only one sender writes to an area, messages need no atomic operations on elements, and all
dtypes can be accumulated. Published values are read as in the asynchronous mixer
(`asynchronous`): a reader compares two counters to make sure that the owner did not write while it
was reading.
"""

from __future__ import annotations

import atexit
import math
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from numbers import Integral
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from mpigossip.cluster import deadline
from mpigossip.cluster.collectives import close_window, open_window
from mpigossip.cluster.deadline import Deadline, WaitTimeoutError
from mpigossip.cluster.process import check_process, report_unused
from mpigossip.cluster.world import World
from mpigossip.config import JobError
from mpigossip.config.errors import UserError
from mpigossip.graphs import graph as make_graph
from mpigossip.mixing.arrays.form import (
    ArrayForm,
    Weights,
    check_equal,
    check_weights,
    check_world,
    combine,
    scale,
)
from mpigossip.mixing.delayed import readers
from mpigossip.mixing.device.memory import check_default_device
from mpigossip.mixing.notifications import called
from mpigossip.mixing.progress_thread import ProgressThread
from mpigossip.mixing.window_access import HINTS, WindowAccess

BEGUN = 0
DONE = 1
STATES = 2
"""Indices of the int64 words at the beginning of a rank's window: BEGUN, the counter that is
incremented before the published value is written; DONE, the counter that is set after it; and
STATES, the word of the first in-neighbour, which the words of the others follow."""
EMPTY = 0
"""Word of a pair without an unread message."""
PUT = 0
ACCUMULATE = 1
"""Kinds of a message: its value replaces the receiver's buffer (PUT), or is added to it."""


class Message:
    """Value with its push-sum weight, kind and version, in one contiguous block of memory."""

    HEAD = 24
    """Size, in bytes, of the kind and the version (int64) and the push-sum weight (float64)."""

    def __init__(self, form: ArrayForm, memory: torch.Tensor | None = None):
        """Wrap the memory of a message.

        :param form: form of the value
        :param memory: uint8 array of :meth:`nbytes` bytes; None: new memory of zeros
        """
        if memory is None:
            memory = torch.zeros(self.nbytes(form), dtype=torch.uint8)
        self.bytes = memory.numpy()
        self.numbers = self.bytes[:16].view(np.int64)
        """Kind and version."""
        self.weight = self.bytes[16 : self.HEAD].view(np.float64)
        """Push-sum weight, an array (1,)."""
        end = self.HEAD + form.count * form.dtype.itemsize
        self.value = memory[self.HEAD : end].view(form.dtype)
        """Value, an array (p,)."""

    @classmethod
    def nbytes(cls, form: ArrayForm) -> int:
        """Return the size of a message in bytes, a multiple of 8."""
        return cls.HEAD + -(-form.count * form.dtype.itemsize // 8) * 8

    def apply(self, kind: int, value: torch.Tensor, weight: float) -> None:
        """Replace the value and the push-sum weight (PUT), or add to them (ACCUMULATE).

        :param kind: PUT or ACCUMULATE
        :param value: value to store or to add, (p,)
        :param weight: push-sum weight of ``value``
        """
        if kind == PUT:
            self.value.copy_(value)
            self.weight[0] = weight
        else:
            self.value.add_(value)
            self.weight[0] += weight


class Outgoing:
    """Sender's state of a pair: the message that was sent last, and its area at the receiver.

    ``index`` is the number of this area, 0 or 1, and ``areas`` holds the offsets of both areas in
    the receiver's window.
    """

    def __init__(self, form: ArrayForm, word: int, areas: tuple[int, int]):
        """Prepare the first message.

        :param form: form of the values
        :param word: offset of the pair's word in the receiver's window, in bytes
        :param areas: offsets of the pair's areas, in bytes
        """
        self.word = word
        self.areas = areas
        self.index = 1
        self.message = Message(form)

    def merge(self, withdrawn: bool, kind: int, value: torch.Tensor, weight: float) -> None:
        """Make the next message and choose its area.

        :param withdrawn: whether the last message was taken back before it was read; its value is
            then replaced or increased, and its area is used again
        :param kind: PUT or ACCUMULATE
        :param value: value to send, (p,)
        :param weight: push-sum weight of the value
        """
        if not withdrawn:
            self.index = 1 - self.index
        if not withdrawn or kind == PUT:
            self.message.numbers[0] = kind
            self.message.apply(PUT, value, weight)
        else:  # a value that is added to a message does not change the kind of that message
            self.message.apply(ACCUMULATE, value, weight)
        self.message.numbers[1] += 1


class Window(WindowAccess):
    """One-sided exchange of arrays with neighbours, in which no rank waits for calls of another.

    Each rank has a buffer b_j, of the shape of its array, for each in-neighbour j::

        with mpigossip.world() as world, mpigossip.Window(world, "ring", like=x) as window:
            window.put(x)         # at each out-neighbour: b_i ← x
            window.accumulate(x)  # at each out-neighbour: b_i ← b_i + x
            window.get()          # from each in-neighbour: b_j ← x_j, which it published last
            x = window.update(x)  # x ← W[i, i] x + Σ_j W[i, j] b_j, which this also publishes

    *Atomicity*: a call is atomic for each pair of ranks. An `update` sees a `put` or an
    `accumulate` to this rank either completely, with its push-sum weight, or not at all. No value
    is lost or applied twice, and the values of one sender are applied in the order of its calls. A
    `get` returns a published value completely. Two calls together are not atomic, and neither is
    one call that sends to two neighbours: other ranks may see the effect of the first one before
    the effect of the second one.

    *Visibility*: `put` and `accumulate` copy the array, wait until the last call of this window is
    complete, and may return before the value has arrived. The value has arrived at the neighbours
    when the next call of this window, or :meth:`flush`, returns; the first
    :meth:`update` of the neighbour that begins afterwards includes it. There is one exception:
    while this rank sends another value to that neighbour, it takes back an unread value to merge
    the two, and an update at this moment finds neither; a later one finds both.

    *Time limits and ends*: a call waits for MPI only. If a call of MPI does not return within 2.5
    times the world's ``timeout_s`` plus 5 seconds, the next call raises WaitTimeoutError. A
    neighbour that has closed its window, and waits for the others to close theirs, can still be
    sent to; its window keeps values that it will not read. A rank that ends by an exception or is
    killed ends the job, as in every world; the window cannot be used in a run that survives rank
    failures.

    *Graph*: for a graph whose rounds differ, a call reaches the neighbours of all rounds; with
    ``round=t``, it uses the neighbours and weights of round t only.
    """

    def __init__(
        self, world: World, graph: Any, like: Any, *, push_sum: bool = False, **options: Any
    ):
        """Allocate the buffers, which are zero, and publish the values of ``like``; collective.

        The window of a rank holds one array, and two for each in-neighbour; in addition, the rank
        keeps one array for each in-neighbour and one for each out-neighbour.

        :param world: world of :func:`mpigossip.world`
        :param graph: graph of ``world.size`` nodes, as :func:`mpigossip.graph` takes it
        :param like: numpy array, or torch tensor on the CPU, with the dtype and shape of all arrays
            of this window: float16, bfloat16, float32, float64, uint8 or a signed integer type
        :param push_sum: True: each value is sent with a push-sum weight, see :attr:`push_weight`
        :param options: ``weights``, ``seed``, ``lazy`` and the options of the graph, as in a job
        :raises JobError: on all ranks, if ``like`` cannot be exchanged, if an argument is
            invalid or differs between ranks, if the world survives rank failures, or if MPI's
            windows lack the unified memory model
        """
        check_world("Window", world)
        with world.raise_together(UserError):
            check_default_device("Window")
            if not isinstance(push_sum, bool):
                raise JobError(f"Window: push_sum = {push_sum!r}: must be True or False")
            if world.survives:
                raise JobError(
                    "Window: this world survives rank failures (survive=True), after which MPI "
                    "windows can't be used; use Averager"
                )
            form = self._form = ArrayForm(like, "Window")
            if form.device.type != "cpu":
                raise JobError(
                    f"Window: the argument like is on {form.device}: windows hold arrays in host "
                    "memory; pass like.cpu()"
                )
            self.graph = make_graph(graph, world.size, **options)
        rounds = f"{self.graph!r} with {options}, of first rounds {self.graph.fingerprint[:16]}"
        arguments = {"dtype": str(form.dtype), "shape": tuple(form.shape)}
        check_equal(world, arguments | {"graph": rounds, "push_sum": push_sum})
        n = self.graph.n
        all_readers = [readers(self.graph, node) for node in range(n)]
        senders: list[list[int]] = [[] for _ in range(n)]
        for sender, ranks in enumerate(all_readers):
            for rank in ranks:
                senders[rank].append(sender)
        self.rank = world.rank
        self.in_neighbours = senders[self.rank]
        """Ranks that this rank receives from in any round, ascending; all others, if the graph has
        no period."""
        self.out_neighbours = all_readers[self.rank]
        """Ranks that this rank sends to in any round, ascending; all others, if the graph has no
        period."""
        self.push_sum = push_sum
        """True if values have a push-sum weight."""
        self.torn = 0
        """Number of reads by :meth:`get` that were repeated, because the owner wrote meanwhile."""
        self._weight = 1.0
        self._buffers = {j: Message(form) for j in self.in_neighbours}
        self._outgoing = {}
        for j in self.out_neighbours:
            index = senders[j].index(self.rank)
            begin = self._published_at(len(senders[j])) + (1 + 2 * index) * Message.nbytes(form)
            areas = begin, begin + Message.nbytes(form)
            self._outgoing[j] = Outgoing(form, 8 * (STATES + index), areas)
        self._sender_counts = [len(ranks) for ranks in senders]
        self._timeout_s = world.timeout_s
        self._comm: Any = world.duplicate()
        self._thread: ProgressThread | None = None
        self._running: Future | None = None
        self._open = True
        if self._comm is not None:
            self._open_window(world)
        self._publish(form.flatten(like))
        self._barrier("opening the windows")
        atexit.unregister(report_unused)
        world.resources.callback(self.close)

    def __enter__(self) -> Window:
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        if kind is None:  # while an exception propagates, other ranks may never close
            self.close()

    @staticmethod
    def _published_at(count: int) -> int:
        """Return the offset, in bytes, of the published value of a rank with ``count`` senders."""
        return 8 * (STATES + count)

    def _open_window(self, world: World) -> None:
        """Open the window and start the progress thread; collective."""
        nbytes = Message.nbytes(self._form)
        begin = self._published_at(len(self.in_neighbours))
        total = begin + (1 + 2 * len(self.in_neighbours)) * nbytes
        self._comm.timeout_s = world.timeout_s
        self._window = open_window(MPI.Win.Allocate, total, self._comm, HINTS)
        memory = torch.frombuffer(self._window.tomemory(), dtype=torch.uint8)[:total].zero_()
        areas = [Message(self._form, part) for part in memory[begin:].split(nbytes)]
        self._published, self._areas = areas[0], areas[1:]
        self._version = 0
        separate = self._window.Get_attr(MPI.WIN_MODEL) != MPI.WIN_UNIFIED
        if world.agree(int(separate)):
            raise JobError(
                "Window: the windows of this MPI have separate public and private copies, which "
                "other ranks can't read at any time; use Averager"
            )
        self._window.Sync()
        self._barrier("opening the windows")
        poll = len(set(world.hosts)) > 1
        self._thread = ProgressThread(self._comm, timeout_s=world.timeout_s, poll=poll)

    def _barrier(self, what: str) -> None:
        """Wait until all ranks have made this call; collective.

        :param what: description of the call, which begins the error message
        """
        if self._comm is not None:
            Deadline(self._timeout_s).wait(
                self._comm.Ibarrier().Test,
                lambda: f"{what}: not all ranks have reached this call",
                awaited_ranks=tuple,
            )

    # -- calls ----------------------------------------------------------------------------------

    def put(self, x: Any, weights: Weights | None = None, *, round: int | None = None) -> None:
        """Replace this rank's buffer b_i at out-neighbours: b_i ← w_j x at rank j.

        This does not wait until the value has arrived (see *Visibility*). With ``push_sum``, the
        push-sum weight of the buffer becomes w_j p, for this rank's p.

        :param x: array with the dtype and shape of ``like``; it may be changed after the call
        :param weights: weight w_j of each rank j that is sent to; None: 1 for all out-neighbours
        :param round: round of the graph whose out-neighbours are meant; None: of any round
        :raises JobError: if ``x`` does not match ``like``, ``weights`` is no dictionary or contains
            a rank that is no out-neighbour, a weight is not finite or, for integers, not a whole
            number, or the window is closed
        :raises WaitTimeoutError: if MPI does not complete the last call in time
        """
        self._send("put", PUT, x, weights, round)

    def accumulate(
        self, x: Any, weights: Weights | None = None, *, round: int | None = None
    ) -> None:
        """Add to this rank's buffer b_i at out-neighbours: b_i ← b_i + w_j x at rank j.

        This does not wait until the value has arrived (see *Visibility*). With ``push_sum``, w_j p
        is added to the push-sum weight of the buffer. Sums of integers are exact; they wrap around
        if they do not fit the dtype. Floating-point sums are rounded to the dtype of the window.

        :param x: array with the dtype and shape of ``like``; it may be changed after the call
        :param weights: weight w_j of each rank j that is sent to; None: 1 for all out-neighbours
        :param round: round of the graph whose out-neighbours are meant; None: of any round
        :raises JobError: as :meth:`put`
        :raises WaitTimeoutError: if MPI does not complete the last call in time
        """
        self._send("accumulate", ACCUMULATE, x, weights, round)

    def get(self, ranks: Iterable[int] | None = None, *, round: int | None = None) -> dict:
        """Replace buffers by what in-neighbours have published: b_j ← x_j.

        Values are published by the constructor, :meth:`publish` and :meth:`update`. Values that
        rank j has sent before are applied first, and thereby replaced.

        :param ranks: in-neighbours j to read from; None: all in-neighbours
        :param round: round of the graph whose in-neighbours are meant; None: of any round
        :return: for each of these ranks, the number of values that it had published
        :raises JobError: if a rank is no in-neighbour, or the window is closed
        :raises WaitTimeoutError: if rank j is writing during all reads within the world's
            ``timeout_s``, or MPI does not complete a call in time
        """
        available = self._neighbours("get", round)[0]
        if ranks is not None and (isinstance(ranks, str) or not isinstance(ranks, Iterable)):
            raise JobError(f"get: ranks = {ranks!r}: pass a list of ranks, such as {available[:1]}")
        sources = available if ranks is None else list(ranks)
        check_weights("get", dict.fromkeys(sources, 1), available, self._form.dtype)
        versions: dict[int, int] = {}

        def read_all() -> None:
            self._collect()
            for j in sources:
                versions[int(j)] = self._read(int(j))

        self._run("get", read_all)
        self.flush()
        return versions

    def update(
        self,
        x: Any,
        weights: Weights | None = None,
        *,
        reset: bool = False,
        round: int | None = None,
        out: Any = None,
    ) -> Any:
        """Return x ← w_i x + Σ_j w_j b_j over the buffers of this rank i, and publish the result.

        An empty buffer, to which nothing was sent since the start or the last reset, is zero. With
        ``push_sum``, the push-sum weight becomes p ← w_i p + Σ_j w_j p_j with the weights p_j of
        the buffers. Ranks are summed in ascending order after this rank; float16 and bfloat16 are
        summed in float32 and rounded once.

        :param x: array with the dtype and shape of ``like``
        :param weights: weights by rank, w_i of this rank among them; a rank that is missing has
            the weight 0. None: row i of the mixing matrix, W[i, j]
        :param reset: True: the buffers with a weight become empty, so that each value is used once
        :param round: round of the graph whose matrix and neighbours are meant; None: of any round,
            and the matrix of a static graph
        :param out: array to write the result into, which may be ``x``; None: a new one
        :raises JobError: if an array does not match ``like``, ``weights`` is no dictionary or
            contains a rank that is no in-neighbour, ``weights`` and ``round`` are both missing for
            a graph whose rounds differ, a weight is not finite or, for integers, not a whole
            number, or the window is closed
        :raises WaitTimeoutError: if MPI does not complete a call in time
        """
        self._ready("update", x, out=out)
        available = [self.rank, *self._neighbours("update", round)[0]]
        if weights is None:
            weights = self._matrix_row(round)
        check_weights("update", weights, available, self._form.dtype)
        own_weight = weights.get(self.rank, 0)
        used = [j for j in sorted(weights) if j != self.rank]
        flat = self._form.flatten(x)
        result: list[torch.Tensor] = []

        def compute() -> None:
            self._collect()
            buffers = [self._buffers[j] for j in used]
            terms = [flat, *(buffer.value for buffer in buffers)]
            result.append(combine([own_weight, *(weights[j] for j in used)], terms))
            if self.push_sum:
                push_weights = [float(weights[j] * self._buffers[j].weight[0]) for j in used]
                self._weight = math.fsum([float(own_weight) * self._weight, *push_weights])
            for buffer in buffers if reset else ():
                buffer.apply(PUT, torch.zeros_like(flat), 0.0)
            self._publish(result[0])

        self._run("update", compute)
        self.flush()
        return self._form.restore(result[0], out)

    def publish(self, x: Any) -> None:
        """Publish ``x``, which neighbours read by :meth:`get`; return when they can read it.

        :param x: array with the dtype and shape of ``like``
        :raises JobError: if ``x`` does not match ``like``, or the window is closed
        :raises WaitTimeoutError: if MPI does not complete a call in time
        """
        self._ready("publish", x)
        flat = self._form.flatten(x)
        self._run("publish", lambda: self._publish(flat))
        self.flush()

    def received(self) -> dict:
        """Return a copy of the buffer b_j of each in-neighbour j, by rank, as arrays like ``like``.

        Values that have arrived are applied to the buffers first.

        :raises JobError: if the window is closed
        :raises WaitTimeoutError: if MPI does not complete a call in time
        """
        self._ready("received")
        self._run("received", self._collect)
        self.flush()
        return {j: self._form.restore(buffer.value) for j, buffer in self._buffers.items()}

    def flush(self) -> None:
        """Wait until the values of all calls of this rank have arrived at the neighbours.

        :raises JobError: if the window is closed
        :raises WaitTimeoutError: if MPI does not complete them in time
        """
        self._ready("flush")
        if self._running is not None:
            running, self._running = self._running, None
            self._thread.wait(running, "Window")

    @property
    def versions(self) -> dict[int, int]:
        """Number of `put` and `accumulate` calls of each in-neighbour that its buffer has received.

        The number of a rank grows until the window is closed; a reset does not change it. A call
        that has arrived is counted at the next :meth:`update`, :meth:`received` or :meth:`get`.
        """
        return {j: int(buffer.numbers[1]) for j, buffer in self._buffers.items()}

    @property
    def push_weight(self) -> float:
        """Push-sum weight p of this rank, 1 at first; x / p is the estimate of the average.

        :meth:`put` and :meth:`accumulate` send w_j p with w_j x, and :meth:`update` computes p as
        it computes x (Kempe, Dobra and Gehrke, FOCS 2003).

        :raises JobError: if the window was opened without ``push_sum=True``
        """
        if not self.push_sum:
            raise JobError(
                "push_weight: this Window has no push-sum weight; open it with push_sum=True"
            )
        return self._weight

    def close(self) -> None:
        """Free the memory; collective. The ``with`` block and the world call it at their ends.

        Values that were sent and not received by an `update` are dropped.
        """
        if not self._open:
            return
        check_process()
        self.flush()
        self._open = False
        if self._comm is None:
            return
        with deadline.announce_end(deadline.this_rank.steps, what="window"):
            self._thread.close()
            self._areas = []
            del self._published
            close_window(self._window, self._comm)
            self._comm.Free()

    # -- steps of a call ----------------------------------------------------------------------

    def _ready(self, call: str, *arrays: Any, out: Any = None) -> None:
        """Check that the window is open, and that arrays match ``like``.

        :param call: name of the public call, for messages
        :param arrays: arrays to send or to average
        :param out: array for the result; None: there is none
        :raises JobError: if the window is closed, or an array does not match ``like``
        """
        check_default_device(f"Window.{call}()")
        if not self._open:
            raise JobError(f"{call}: this Window is closed; create a new one")
        check_process()
        self._form.check(call, *arrays, out=out)

    def _neighbours(self, call: str, t: int | None) -> tuple[list[int], list[int]]:
        """Return the in-neighbours and the out-neighbours of this rank.

        :param call: name of the public call, for messages
        :param t: round of the graph; None: the neighbours of all rounds
        :raises JobError: if the window is closed, or ``t`` is no whole number
        """
        self._ready(call)
        if t is not None and (isinstance(t, bool) or not isinstance(t, Integral)):
            raise JobError(f"{call}: round = {t!r}: must be a whole number of at least 0, or None")
        if t is None:
            return self.in_neighbours, self.out_neighbours
        sources = self.graph.neighbours(t, self.rank)[0]
        return [int(j) for j in sources], [int(j) for j in self.graph.receivers(t, self.rank)]

    def _matrix_row(self, t: int | None) -> dict[int, float]:
        """Return row i of the mixing matrix for this rank i, as weights by rank.

        :param t: round of the graph; None: the only matrix of a static graph
        :raises JobError: if ``t`` is None and the rounds of the graph differ
        """
        if t is None and self.graph.period != 1:
            raise JobError(
                f"update: the rounds of {self.graph!r} differ; give weights={{rank: weight}}, or "
                "the round of the graph, round=t"
            )
        sources, weights, own = self.graph.neighbours(t or 0, self.rank)
        pairs = zip(map(int, sources), map(float, weights), strict=True)
        return {self.rank: float(own), **dict(pairs)}

    def _run(self, call: str, work: Callable[[], None]) -> None:
        """Run ``work`` in the progress thread, once the last call has ended there."""
        self.flush()
        if self._thread is None:
            work()
        else:
            self._running = self._thread.submit(work)

    def _send(self, call: str, kind: int, x: Any, weights: Weights | None, t: int | None) -> None:
        """Check the arguments of a call, and send its value in the progress thread.

        :param call: name of the call, for messages
        :param kind: PUT or ACCUMULATE
        :param x: array to send
        :param weights: factor of each rank that is sent to; None: 1 for all out-neighbours
        :param t: round of the graph whose out-neighbours are meant; None: of any round
        """
        self._ready(call, x)
        available = self._neighbours(call, t)[1]
        given = dict.fromkeys(available, 1.0) if weights is None else weights
        check_weights(call, given, available, self._form.dtype)
        factors = dict(given)  # the program may change its dictionary after the call
        flat = self._form.flatten(x)
        push_weight = self._weight

        def send_all() -> None:
            for j, weight in factors.items():
                value = scale(flat, weight)
                self._send_to(int(j), kind, value, float(weight) * push_weight)

        self._run(call, send_all)

    def _send_to(self, j: int, kind: int, value: torch.Tensor, weight: float) -> None:
        """Withdraw the last message to rank ``j`` if it is unread, and send the next one.

        :param j: out-neighbour
        :param kind: PUT or ACCUMULATE
        :param value: value to send, (p,)
        :param weight: push-sum weight of the value
        """
        out = self._outgoing[j]
        withdrawn = self._swap_word(j, out.word, EMPTY) != EMPTY
        out.merge(withdrawn, kind, value, weight)
        self._put(out.message.bytes, j, out.areas[out.index])
        self._replace(j, out.word, 1 + out.index)

    def _collect(self) -> None:
        """Take the unread messages of all in-neighbours, and apply each to its buffer."""
        for index, buffer in enumerate(self._buffers.values()):
            state = self._swap_word(self.rank, 8 * (STATES + index), EMPTY)
            if state != EMPTY:
                message = self._areas[2 * index + state - 1]
                kind, version = message.numbers
                buffer.apply(int(kind), message.value, float(message.weight[0]))
                buffer.numbers[1] = version

    def _publish(self, flat: torch.Tensor) -> None:
        """Write the value that neighbours read, between the increments of its two counters.

        :param flat: values to publish, (p,)
        """
        if self._comm is None:
            return
        self._version += 1
        self._replace(self.rank, 8 * BEGUN, self._version)
        self._window.Sync()
        self._published.apply(PUT, flat, self._weight)
        self._window.Sync()
        self._replace(self.rank, 8 * DONE, self._version)

    def _read(self, j: int) -> int:
        """Copy the published value of rank ``j`` to its buffer; return its version.

        :raises WaitTimeoutError: if the rank was writing during all reads until the time limit
        """
        copy = Message(self._form)
        begin = time.monotonic()
        attempts = 0
        while True:
            done = int(self._load(j, 8 * DONE)[0])
            self._get(copy.bytes, j, self._published_at(self._sender_counts[j]))
            if int(self._load(j, 8 * BEGUN)[0]) == done:
                break
            self.torn += 1
            attempts += 1
            waited = time.monotonic() - begin
            if waited >= self._timeout_s:
                raise WaitTimeoutError(
                    f"get: {called(self._comm, j)} was writing its value during each of {attempts} "
                    f"reads (waited {waited:.3g} s): publish less often there, or increase "
                    "timeout_s of mpigossip.world()"
                )
            time.sleep(min(1e-3, 1e-5 * attempts))
        self._buffers[j].apply(PUT, copy.value, float(copy.weight[0]))
        return done

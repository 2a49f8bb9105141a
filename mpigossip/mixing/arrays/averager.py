"""Gossip averages of arrays that a program owns: neighbours average their arrays in each round."""

import atexit
from functools import partial
from typing import Any, Self

import torch

from mpigossip.cluster import deadline
from mpigossip.cluster.process import check_process, report_unused
from mpigossip.cluster.world import World
from mpigossip.config import JobError
from mpigossip.config.errors import UserError
from mpigossip.graphs import graph as make_graph
from mpigossip.mixing import open_mixer
from mpigossip.mixing.arrays.form import (
    ArrayForm,
    Weights,
    check_equal,
    check_weights,
    check_world,
    combine,
    sum_dtype,
)
from mpigossip.mixing.base import ExchangeKind, MessageLayout
from mpigossip.mixing.device.memory import check_default_device


class Averager:
    """Gossip averaging of arrays: ``x_i ← Σ_j W(t)[i, j] x_j``; rank i is node i.

    Each average executes the next round of the graph::

        with mpigossip.world() as world:
            averager = mpigossip.Averager(world, "one-peer-exponential", like=x)
            x = averager.average(x)  # with the neighbours of this round
            averager.start(x)  # or in two halves, with work between them
            …
            x = averager.finish()

    For some graphs, the product of the matrices of consecutive rounds is the exact average:
    one-peer-exponential with n = 2^τ after τ rounds, base-2 … base-5 with any n, and complete after
    one round. All nodes then hold this average, except for rounding errors. Autograd does not
    differentiate through the averages. All nodes have to take part in every round, and have to call
    several Averagers in the same order. The attribute `round` counts the rounds.

    A call of :meth:`average` may be given other weights than W(t), and :meth:`exchange` returns the
    received arrays themselves. Integers have no average: their sums, which are exact, are computed
    with integral weights, or over all nodes by :meth:`sum`. The object is a context manager, which
    closes it at the end of the block. After that, and in a fork, each call raises JobError, except
    a second :meth:`close`.
    """

    def __init__(
        self, world: World, graph: Any, like: Any, *, same_host: str = "read", **options: Any
    ):
        """Allocate the memory of the exchange; collective.

        :param world: world of :func:`mpigossip.world`; its ``timeout_s`` limits each wait
        :param graph: graph of ``world.size`` nodes, as :func:`mpigossip.graph` takes it
        :param like: numpy array or torch tensor with the dtype, the shape and the device of all
            arrays that will be exchanged; its values are not used. The dtype is float32 or float64;
            float16 or bfloat16, which are averaged in float32 and rounded once; or uint8 or a
            signed integer type, for :meth:`exchange`, :meth:`sum` and given weights only
        :param same_host: "read": neighbours on the same host read each other's memory; "put": they
            exchange messages like neighbours on different hosts
        :param options: ``weights``, ``seed``, ``lazy`` and the options of the graph, as in a job
        :raises JobError: on all ranks, if ``like`` cannot be exchanged, or if an argument is
            invalid or differs between ranks
        """
        check_world("Averager", world)
        with world.raise_together(UserError):
            check_default_device("Averager")
            if same_host not in ("read", "put"):
                raise JobError(f'same_host = "{same_host}": must be "read" or "put"')
            form = self._form = ArrayForm(like, "Averager")
            self.graph = make_graph(graph, world.size, **options)
        rounds = f"{self.graph!r} with {options}, of first rounds {self.graph.fingerprint[:16]}"
        arguments = {"dtype": str(form.dtype), "shape": tuple(form.shape), "graph": rounds}
        check_equal(world, arguments)
        self._mixer: Any = None
        if not form.is_integer:
            layout = MessageLayout(
                (max(1, form.count),), devices=(str(form.device),), dtype=sum_dtype(form.dtype)
            )
            self._mixer = open_mixer(
                self.graph, layout, world, same_host=same_host, timeout_s=world.timeout_s
            )
        self._comm: Any = None
        self._closed = False
        self.round = 0
        """Number of the graph's round of the exchange in flight; if there is none, of the next
        exchange."""
        self._open = False
        self._world = world
        self._averagers = vars(world).setdefault("averagers", [])
        self._averagers.append(self)
        self._number = len(self._averagers)
        self._checked_count = 1
        self._finishing = deadline.user_call(f"finish() of Averager {self._number}", ordered=False)
        atexit.unregister(report_unused)
        world.resources.callback(self.close)

    def start(self, x: Any) -> None:
        """Begin the exchange of the round with the values of ``x``, without waiting for its end.

        The call waits only until the neighbours have read the message of the round before. The
        first round after the creation of another Averager is collective.

        :param x: array with the dtype, shape and device of ``like``; it may be changed before
            :meth:`finish`
        :raises JobError: if the last exchange has not been finished, if ``x`` does not match
            ``like``, if the arrays hold integers, or if ranks call different Averagers here
        :raises WaitTimeoutError: if a neighbour does not read within ``world.timeout_s`` seconds
        """
        mixer = self._ready("start", x)
        self._check_round("start")
        (out,) = mixer.outbox(self.round)
        self._copy(x, self._reshape(out[0]))
        mixer.start(ExchangeKind.GOSSIP, self.round)
        self._open = True

    def finish(self, out: Any = None) -> Any:
        """Wait for the neighbours and return the weighted average.

        :param out: array to write the average into; None: a new one
        :raises JobError: if no exchange has been started, if ``out`` does not match ``like``, or if
            the arrays hold integers
        :raises WaitTimeoutError: if a neighbour does not send within ``world.timeout_s`` seconds
        """
        mixer = self._ready("finish", out=out)
        if not self._open:
            raise JobError("finish: no exchange is in flight; call start(x) first")
        deadline.this_rank.steps = self.round
        with self._finishing:
            _, (mixed,) = mixer.finish()
        self._open = False
        self.round = self.round + 1
        return self._result(self._reshape(mixed[0]), out)

    def average(self, x: Any, out: Any = None, *, weights: Weights | None = None) -> Any:
        """Start the exchange of the round with ``x``, wait for it and return the weighted average.

        With ``weights``, return Σ_j w_j x_j, summed in the graph's order. Either all ranks or no
        rank must pass weights in a round; the values may differ between ranks.

        :param x: array with the dtype, shape and device of ``like``
        :param out: array to write the average into, which may be ``x``; None: a new one
        :param weights: for this call, weight w_j of this rank and of the in-neighbours of this
            round, by rank; a rank that is missing has the weight 0. None: row i of W(t)
        :raises JobError: if :meth:`start` or :meth:`finish` would raise it; if ``weights`` is no
            dictionary, or contains a rank that is neither this rank nor an in-neighbour, or a
            weight that is no finite number; if the arrays hold integers, and ``weights`` is None or
            contains a number that is not whole
        :raises WaitTimeoutError: if a neighbour does not send within ``world.timeout_s`` seconds
        """
        if weights is None:
            self._ready("average", x, out=out)
            self.start(x)
            return self.finish(out)
        self._form.check("average", x, out=out)
        sources = self.graph.neighbours(self.round, self._world.rank)[0]
        ranks = [self._world.rank, *map(int, sources)]
        check_weights("average", weights, ranks, self._form.dtype)
        arrays = self._swap_arrays("average", x)
        row = [weights.get(rank, 0) for rank in ranks]
        mixed = combine(row, [self._form.flatten(x), *(arrays[j] for j in ranks[1:])])
        return self._form.restore(mixed, out)

    def exchange(self, x: Any) -> dict[int, Any]:
        """Return the array that each in-neighbour of this round has sent, by rank.

        The call is a round: all nodes make it in place of :meth:`average`. Arrays are sent in
        their own dtype, and arrays of GPUs through host memory.

        :param x: array with the dtype, shape and device of ``like``
        :return: arrays like ``like``, in the graph's order
        :raises JobError: if ``x`` does not match ``like``, if an exchange is in flight, or if ranks
            call different Averagers here
        :raises WaitTimeoutError: if a neighbour does not send within ``world.timeout_s`` seconds
        """
        received = self._swap_arrays("exchange", x)
        return {j: self._form.restore(flat) for j, flat in received.items()}

    def sum(self, x: Any, out: Any = None) -> Any:
        """Return the exact sum of integers over all nodes; collective.

        The call does not count as a round of the graph. A sum that does not fit the dtype wraps
        around.

        :param x: array with the dtype, shape and device of ``like``
        :param out: array to write the sum into; None: a new one
        :raises JobError: if the arrays do not hold integers, or do not match ``like``
        :raises WaitTimeoutError: if a node does not send within ``world.timeout_s`` seconds
        """
        check_default_device("Averager.sum()")
        self._check_open("sum", x, out=out)
        if not self._form.is_integer:
            raise JobError(
                f"sum: adds integers, but the arrays of this Averager hold {self._form.dtype}; "
                "multiply mean(x) by the number of nodes"
            )
        total = self._form.flatten(x)
        if self._world.comm is not None:
            from mpi4py import MPI

            from mpigossip.mixing.notifications import all_ranks, wait_all

            request = self._own_comm().Iallreduce(MPI.IN_PLACE, total.numpy(), MPI.SUM)
            late = "sum: a rank is late"
            wait_all({0: request}, self._world.timeout_s, lambda _: late, all_ranks)
        return self._form.restore(total, out)

    def mean(self, x: Any, out: Any = None) -> Any:
        """Return the mean of ``x`` over nodes, bitwise identical on all of them; collective.

        The call does not count as a round of the graph.

        :param x: array with the dtype, shape and device of ``like``
        :param out: array to write the mean into; None: a new one
        :raises JobError: if the arrays hold integers, or do not match ``like``
        :raises WaitTimeoutError: if a node does not send within ``world.timeout_s`` seconds
        """
        check_default_device("Averager.mean()")
        mixer = self._ready("mean", x, out=out)
        form = self._form
        row = torch.zeros(1, *mixer.layout.widths, dtype=mixer.layout.dtype, device=form.device)
        self._copy(x, self._reshape(row))
        return self._result(self._reshape(mixer.mean(row)[None]), out)

    def close(self) -> None:
        """Free the memory; collective. The world calls this when it closes."""
        if self._closed:
            return
        check_process()
        self._closed = True
        mixer, comm = self._mixer, self._comm
        self._mixer = self._comm = None
        with deadline.announce_end(self.round):
            if mixer is not None:
                mixer.close()
            if comm is not None:
                comm.Free()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        if kind is None:  # while an exception propagates, other ranks may never close
            self.close()

    def _check_open(self, call: str, *arrays: Any, out: Any = None) -> None:
        """Check that this object is open, and that arrays match ``like``.

        :param call: name of the public call, for messages
        :param arrays: arrays to exchange
        :param out: array for the result; None: there is none
        :raises JobError: if this object is closed, or an array does not match ``like``
        """
        if self._closed:
            raise JobError(
                f"{call}: this Averager is closed, because close() was called, or its with block "
                "or its world has ended; create a new Averager"
            )
        check_process()
        self._form.check(call, *arrays, out=out)

    def _ready(self, call: str, *arrays: Any, out: Any = None) -> Any:
        """Return the mixer that averages; it exists only if the arrays hold no integers.

        The parameters are described in :meth:`_check_open`.

        :raises JobError: if :meth:`_check_open` raises it, or if the arrays hold integers
        """
        self._check_open(call, *arrays, out=out)
        if self._mixer is None:
            raise JobError(
                f"{call}: the arrays hold {self._form.dtype}, and integers have no average; give "
                "average() weights that are whole numbers, or call exchange() or sum()"
            )
        return self._mixer

    def _check_round(self, call: str) -> None:
        """Check that ``call`` may begin a round; collective after an Averager was created.

        :raises JobError: if an exchange is in flight; on all ranks, if ranks make the call on
            different Averagers
        """
        if self._open:
            raise JobError(
                f"{call}: the exchange of round {self.round} is in flight; call finish() first"
            )
        if self._checked_count < len(self._averagers):  # check once after another Averager was made
            last = self._world.agree(self._number)
            first = -self._world.agree(-self._number)
            if last != first:
                raise JobError(
                    f"{call}: some ranks call Averager {first} here and others Averager {last} "
                    "(in the order of creation); call them in the same order on all ranks"
                )
            self._checked_count = len(self._averagers)

    def _own_comm(self) -> Any:
        """Return the communicator of `exchange` and `sum`; the first call duplicates it."""
        if self._comm is None:
            self._comm = self._world.duplicate()
            self._comm.timeout_s = self._world.timeout_s
        return self._comm

    def _swap_arrays(self, call: str, x: Any) -> dict[int, torch.Tensor]:
        """Exchange ``x`` in a round by MPI messages; return the received arrays by rank.

        The received arrays are contiguous tensors (p,) in host memory. The next call is the next
        round.

        :param call: name of the public call, for messages
        :param x: array to send
        :raises JobError: as :meth:`exchange`
        """
        check_default_device(f"Averager.{call}()")
        self._check_open(call, x)
        self._check_round(call)
        rank = self._world.rank
        own = self._form.flatten(x)
        sources = [int(j) for j in self.graph.neighbours(self.round, rank)[0]]
        received = {j: torch.empty_like(own) for j in sources}
        if self._mixer is not None:
            self._mixer.skip(self.round)
        if self._world.comm is not None:
            from mpigossip.mixing.exact_average import swap_by_messages  # needs MPI

            deadline.this_rank.steps = self.round
            swap = partial(swap_by_messages, self._own_comm(), self._world.timeout_s)
            readers = [int(j) for j in self.graph.receivers(self.round, rank)]
            with deadline.user_call(f"{call}() of Averager {self._number}", ordered=False):
                sent, into = {(j, 0): own for j in readers}, {(j, 0): received[j] for j in sources}
                swap(sent, into, f"{call} of round {self.round}")
        self.round = self.round + 1
        return received

    def _reshape(self, row: torch.Tensor) -> Any:
        form = self._form
        row = row if form.count else row[:, :0]
        return row.view(form.shape) if form.is_tensor else row.numpy().reshape(form.shape)

    def _copy(self, source: Any, target: Any) -> None:
        if self._form.is_tensor:
            target.detach().copy_(source.detach())
        else:
            target[...] = source

    def _result(self, mixed: Any, out: Any) -> Any:
        if out is None:
            form = self._form
            if form.is_tensor:
                return mixed.to(form.dtype, copy=True)
            return mixed.astype(form.numpy_dtype)
        self._copy(mixed, out)
        return out

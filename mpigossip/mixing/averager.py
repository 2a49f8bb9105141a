"""Gossip averaging of arrays: each node's becomes a weighted average of its neighbours' arrays."""

import atexit
from typing import Any

import numpy as np
import torch

from mpigossip.cluster import deadline
from mpigossip.cluster.process import check_process, report_unused
from mpigossip.cluster.world import World
from mpigossip.config import JobError
from mpigossip.config.errors import UserError
from mpigossip.graphs import graph as make_graph
from mpigossip.mixing import open_mixer
from mpigossip.mixing.base import ExchangeKind, MessageLayout
from mpigossip.mixing.device.memory import check_default_device

TYPES = {
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}
"""Dtypes of NumPy and torch that can be averaged, with the torch dtype in which this is
computed."""


class Averager:
    """Gossip averaging of arrays: ``x_i ← Σ_j W(t)[i, j] x_j``; rank i is node i.

    Each call executes the next round of the graph::

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
    """

    def __init__(
        self, world: World, graph: Any, like: Any, *, same_host: str = "read", **options: Any
    ):
        """Allocate the memory of the exchange; collective.

        :param world: world of :func:`mpigossip.world`; its ``timeout_s`` limits each wait
        :param graph: graph of ``world.size`` nodes, as :func:`mpigossip.graph` takes it
        :param like: numpy array or torch tensor, float32 or float64, with the shape and the device
            of all arrays that will be averaged; its values are not used
        :param same_host: "read": neighbours on the same host read each other's memory; "put": they
            exchange messages like neighbours on different hosts
        :param options: ``weights``, ``seed``, ``lazy`` and the options of the graph, as in a job
        :raises JobError: on all ranks, if ``like`` cannot be averaged, or if an argument is invalid
            or differs between ranks
        """
        with world.raise_together(UserError):
            check_default_device("Averager")
            if same_host not in ("read", "put"):
                raise JobError(f'same_host = "{same_host}": give "read" or "put"')
            if (
                getattr(like, "dtype", None) not in TYPES
                or not isinstance(like, np.ndarray | torch.Tensor)
                or not _has_values(like)
            ):
                raise JobError(
                    f"like is {_describe(like)}: must be a dense numpy array or torch tensor of "
                    "float32 or float64, in the processor's byte order and without a mask; "
                    "convert it"
                )
            self.graph = make_graph(graph, world.size, **options)
        self._dtype = like.dtype
        self._shape = like.shape
        self._tensor = torch.is_tensor(like)
        self._count = int(np.prod(like.shape))
        dtype = TYPES[like.dtype]
        rounds = f"{self.graph!r} with {options}, of first rounds {self.graph.fingerprint[:16]}"
        arguments = {"dtype": str(dtype), "shape": tuple(like.shape), "graph": rounds}
        first = world.broadcast(arguments)
        with world.raise_together(JobError):
            for name in arguments:
                if arguments[name] != first[name]:
                    raise JobError(
                        f"{name} is {arguments[name]} here, but {first[name]} on rank 0: must be "
                        "equal on all ranks"
                    )
        self._device = like.device if self._tensor else torch.device("cpu")
        layout = MessageLayout((max(1, self._count),), devices=(str(self._device),), dtype=dtype)
        self._mixer: Any = open_mixer(
            self.graph, layout, world, same_host=same_host, timeout_s=world.timeout_s
        )
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
        """Begin the exchange of the round with the values of ``x``; return at once.

        :param x: array with the dtype, shape and device of ``like``; it may be changed before
            :meth:`finish`
        :raises JobError: if the last exchange has not been finished, or ``x`` does not match
            ``like``
        """
        mixer = self._ready("start", x)
        if self._open:
            raise JobError(
                f"start: the exchange of round {self.round} is in flight; call finish() first"
            )
        if self._checked_count < len(self._averagers):  # check once after another Averager was made
            last = self._world.agree(self._number)
            first = -self._world.agree(-self._number)
            if last != first:
                raise JobError(
                    f"start: some ranks call Averager {first} here and others Averager {last} "
                    "(in the order of creation); call them in the same order on all ranks"
                )
            self._checked_count = len(self._averagers)
        (out,) = mixer.outbox(self.round)
        self._copy(x, self._reshape(out[0]))
        mixer.start(ExchangeKind.GOSSIP, self.round)
        self._open = True

    def finish(self, out: Any = None) -> Any:
        """Wait for the neighbours and return the weighted average.

        :param out: array to write the average into; None: a new one
        :raises JobError: if no exchange has been started, or ``out`` does not match ``like``
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

    def average(self, x: Any, out: Any = None) -> Any:
        """Start the exchange of the round with ``x``, wait for it and return the weighted average.

        :param x: array with the dtype, shape and device of ``like``
        :param out: array to write the average into, which may be ``x``; None: a new one
        :raises JobError: as :meth:`start` and :meth:`finish`
        :raises WaitTimeoutError: if a neighbour does not send within ``world.timeout_s`` seconds
        """
        self._ready("average", x, out)
        self.start(x)
        return self.finish(out)

    def mean(self, x: Any, out: Any = None) -> Any:
        """Return the mean of ``x`` over nodes, bitwise identical on all of them; collective.

        It does not count as a round of the graph.

        :param x: array with the dtype, shape and device of ``like``
        :param out: array to write the mean into; None: a new one
        """
        mixer = self._ready("mean", x, out)
        row = torch.zeros(1, *mixer.layout.widths, dtype=TYPES[self._dtype], device=self._device)
        self._copy(x, self._reshape(row))
        return self._result(self._reshape(mixer.mean(row)[None]), out)

    def close(self) -> None:
        """Free the memory; collective. The world calls it when it ends."""
        if self._mixer is not None:
            check_process()
        mixer = self._mixer
        self._mixer = None
        if mixer is not None:
            with deadline.announce_end(self.round):
                mixer.close()

    def _ready(self, what: str, array: Any = None, out: Any = None) -> Any:
        """Return the mixer; raise JobError if it is closed or an array does not match ``like``."""
        check_default_device(f"Averager.{what}()")
        if self._mixer is None:
            raise JobError(
                f"{what}: this Averager is closed, because its world has ended; create a new one"
            )
        check_process()
        for argument in (array, out):
            if argument is not None and (
                torch.is_tensor(argument) is not self._tensor
                or getattr(argument, "dtype", None) != self._dtype
                or argument.shape != self._shape
                or not _has_values(argument)
            ):
                raise JobError(
                    f"{what}: an array is {_describe(argument)}; this Averager was made for "
                    f"{'torch' if self._tensor else 'numpy'} arrays of {self._dtype} and shape "
                    f"{tuple(self._shape)}"
                )
        if out is not None and (
            torch._debug_has_internal_overlap(out) == 1 if self._tensor else not out.flags.writeable
        ):
            raise JobError(f"{what}: out is read-only or expanded; give a copy of it")
        return self._mixer

    def _reshape(self, row: torch.Tensor) -> Any:
        row = row if self._count else row[:, :0]
        return row.view(self._shape) if self._tensor else row.numpy().reshape(self._shape)

    def _copy(self, source: Any, target: Any) -> None:
        if self._tensor:
            target.detach().copy_(source.detach())
        else:
            target[...] = source

    def _result(self, mixed: Any, out: Any) -> Any:
        if out is None:
            return mixed.clone() if self._tensor else mixed.copy()
        self._copy(mixed, out)
        return out


def _has_values(array: Any) -> bool:
    """Return whether the array holds all of its values in memory, without a mask."""
    if torch.is_tensor(array):
        return array.layout == torch.strided and not array.is_meta
    return not isinstance(array, np.ma.MaskedArray)


def _describe(array: Any) -> str:
    if not hasattr(array, "dtype"):
        return f"a {type(array).__name__}"
    location = f", {array.layout} on {array.device}" if torch.is_tensor(array) else ""
    shape = tuple(getattr(array, "shape", ()))
    return f"{array.dtype} of shape {shape} ({type(array).__name__}{location})"

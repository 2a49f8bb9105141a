"""Interface of an algorithm: functions on arrays, which are the same for every transport."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from mpigossip.config.limits import Chance
from mpigossip.mixing.base import ExchangeKind

Decay = Chance
"""Type of options that are momenta or decay rates of running means; checked when a job is read."""

NEEDS = (
    "static",
    "symmetric",
    "row-stochastic",
    "column-stochastic",
    "doubly",
    "above -1/3",
    "graph:ceca",
    "always-global",
    "unmixed",
    "never-global",
    "never-gossip",
    "phases",
    "exact-wire",
    "own-wire",
    "shared-wire",
    "keeps-x",
)
"""The words that `Algorithm.needs` may contain."""


class Step(NamedTuple):
    """Description of a step as plain values, which is passed to ``send`` and ``receive``."""

    index: int  # type: ignore[assignment]
    """Number of steps since ``init``, from 0; it restarts when the state is reset."""
    round: int
    """Number of GOSSIP rounds so far: the round t of the graph."""
    kind: ExchangeKind
    """GOSSIP or GLOBAL; LOCAL if nothing is exchanged."""
    lr: float | None
    """Learning rate, > 0; None if ``send`` is called ahead, before the gradient exists."""
    skipped: tuple[int, ...] = ()
    """Rows without a usable gradient, because float16 overflowed; their ``g`` is zero. These rows
    take no local step, keep everything that it would have changed, and take part in the round. Only
    this value and ``counts`` may differ between nodes.
    """
    counts: tuple[int, ...] = ()
    """Number of local steps of each row since ``init``; empty: ``index`` for every row."""
    waits: bool = False
    """True if this is an exchange of a node that waits between two of its steps: no outer step is
    taken and no phase ends.
    """


class Algorithm(NamedTuple):
    """Functions on float32 tensors of shape (rows, p): one row for each local node, p parameters.

    ``x`` is the point at which the gradient is taken. ``g`` is the gradient with weight decay
    added; functions may overwrite it. ``out`` is the message to send, ``sent`` the message as other
    nodes decode it, and ``mixed`` the weighted average of the messages of the node and its
    in-neighbours. Each of the three consists of ``vectors`` arrays of the shape of ``x``, followed
    by ``scalars`` arrays of shape (rows, 1) in float64. The state is a NamedTuple, possibly nested,
    of arrays of the shape of ``x`` or (rows, 1). Functions work in place and return the state.
    """

    init: Callable[..., Any]
    """(x) -> state; needs no gradient."""
    send: Callable[..., Any]
    """(x, g, state, out, step) -> state; fills ``out``: vectors first, then scalars."""
    receive: Callable[..., Any]
    """(x, g, state, sent, mixed, step) -> state; updates x in place."""
    local_update: Callable[..., Any] | None = None
    """(x, g, state, step) -> state: a LOCAL step in place, bitwise identical to ``send`` followed
    by ``receive``; None if the algorithm has no separate local step.
    """
    vectors: int = 1
    """Number of arrays of the size of the model that are sent in a round."""
    scalars: int = 0
    """Number of float64 values per row that are sent, too; they are never compressed."""
    ahead: bool = False
    """True if ``send`` is called with g = None and lr = None and changes nothing. The message can
    then be sent while the forward and backward passes run.
    """
    elementwise: bool = True
    """True if ``send`` and ``receive`` treat each element independently of the others. Fragments of
    a model may then be exchanged at different steps, each with its own scalars.
    """
    takes_mixed: bool = False
    """True if ``receive`` first of all sets x to mixed[0], without reading x: both may then be one
    array.
    """
    raw: bool = False
    """True if only the local step uses the gradient, and reads it from the parameters: g
    is None.
    """
    distinct_state: bool = False
    """True if the states of the nodes depend on each other, as trackers whose mean is the mean
    gradient do. If all nodes resumed from the state of one of them, results would stay wrong.
    """
    needs: frozenset = frozenset()
    """Conditions on the job; each is checked and, if it does not hold, named (`training/rules.py`).

    On the graph: any of its facts; "doubly" (rows and columns sum to one), "above -1/3" (all
    eigenvalues), "graph:ceca" (this graph only).

    On the cadence: "always-global" (gradients are averaged over all nodes at every step; a biased
    wire works by error feedback), "unmixed" (only one kind of exchange), "never-global",
    "never-gossip".

    On both: "phases" (the cadence "halves", and a graph that is exact after one period).

    On the wire: "exact-wire" (fp32), "own-wire" (the algorithm itself sends differences),
    "shared-wire" (all nodes omit the same elements).

    On a delay: "keeps-x" (x is complete as soon as a GLOBAL round is sent).
    """

    @property
    def always_global(self) -> bool:
        """Return whether each exchange is a global average, without graph, cadence and inbox."""
        return "always-global" in self.needs


def init_from(kind: Callable[..., Any], *parts: Callable[..., Any]) -> Callable[..., Any]:
    """Return an ``init`` that makes a state of class ``kind`` from x.

    Each of ``parts`` makes one field from x: ``torch.clone``, ``torch.zeros_like``, or the ``init``
    of a local step.
    """
    return lambda x: kind(*(part(x) for part in parts))


def inner_update(update: Callable[..., Any]) -> Callable[..., Any]:
    """Return a local update that applies ``update`` to the field ``inner`` of a state."""

    def local_update(x, g, state, step: Step):
        return state._replace(inner=update(x, g, state.inner, step))

    return local_update


@contextmanager
def preserved(step: Step, *arrays) -> Iterator[None]:
    """Restore the rows in ``step.skipped`` of ``arrays`` when the block ends."""
    rows = list(step.skipped)
    before = [array[rows] for array in arrays] if rows else []
    yield
    for array, values in zip(arrays, before, strict=bool(rows)):
        array[rows] = values


class NoState(NamedTuple):
    """State of an algorithm or cadence that keeps none."""


def no_state(x) -> NoState:
    """Return the state of an algorithm that keeps none."""
    return NoState()

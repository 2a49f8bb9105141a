"""Interface of an algorithm: functions on arrays, which are the same for every transport.

A transport is the mechanism that moves messages between nodes, such as MPI messages or NCCL.
"""

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
"""Names of the conditions that `Algorithm.needs` may contain."""


class Step(NamedTuple):
    """Description of a step as plain values, which is passed to the functions of an algorithm."""

    index: int  # type: ignore[assignment]
    """Number of steps since ``init``, counted from 0; it restarts after a reset."""
    round: int
    """Number of GOSSIP rounds so far, which is the number t of the graph's mixing matrix W(t)."""
    kind: ExchangeKind
    """GOSSIP or GLOBAL; LOCAL if nothing is exchanged."""
    lr: float | None
    """Learning rate; None if the message is sent ahead, before the gradient exists."""
    skipped: tuple[int, ...] = ()
    """Rows (local nodes) that take no local step: their gradient overflowed in float16, or they are
    idle by the cadence, or they wait. ``g`` is zero there. These rows keep the state of the local
    step unchanged, but take part in the round. With a synchronous mixer, only ``skipped`` and
    ``counts`` may differ between nodes.
    """
    counts: tuple[int, ...] = ()
    """Number of local steps that each row has taken since ``init``; empty: ``index``."""
    waits: bool = False
    """True if a node that waits between two of its steps takes part in this exchange. The algorithm
    then averages only: it takes no outer step and ends no phase.
    """


class Algorithm(NamedTuple):
    """Algorithm, as functions on float32 tensors of shape (rows, p).

    There is one row for each local node, with its p parameters.

    ``x`` is the point at which the gradient is taken. ``g`` is the gradient, to which weight decay
    has been added unless the local step adds it; functions may overwrite it. ``out`` is the message
    to send, ``sent`` the message as other nodes decode it, and ``mixed`` the weighted sum of the
    messages of the node and its in-neighbours. Each of these messages consists of ``vectors``
    arrays of the shape of ``x``, followed by ``scalars`` arrays of shape (rows, 1) in float64. The
    state is a NamedTuple, possibly nested, of arrays of the shape of ``x`` or (rows, 1). Functions
    work in place and return the state.
    """

    init: Callable[..., Any]
    """Function (x) -> state that makes the first state; it needs no gradient."""
    send: Callable[..., Any]
    """Function (x, g, state, out, step) -> state that writes the message to ``out``."""
    receive: Callable[..., Any]
    """Function (x, g, state, sent, mixed, step) -> state that updates x in place."""
    local_update: Callable[..., Any] | None = None
    """Function (x, g, state, step) -> state that takes a LOCAL step in place. Its result is bitwise
    identical to ``send`` followed by ``receive``; None: these two are called instead.
    """
    vectors: int = 1
    """Number of arrays of the size of the model that are sent in a round."""
    scalars: int = 0
    """Number of float64 values per row that are sent in addition to the vectors, uncompressed."""
    ahead: bool = False
    """True if the message does not depend on the new gradient. ``send`` is then called with g =
    None and lr = None and changes nothing but ``out``, so that the exchange can run during the
    forward and backward passes.
    """
    elementwise: bool = True
    """True if ``send`` and ``receive`` treat each element independently of the others. Fragments of
    a model may then be exchanged at different steps, each with its own scalars.
    """
    takes_mixed: bool = False
    """True if ``receive`` sets x to mixed[0] before it reads x. x and mixed[0] may then be the same
    array.
    """
    raw: bool = False
    """True if only the local step uses the gradient and reads it from the ``.grad`` of the
    parameters. All functions are then called with g = None.
    """
    distinct_state: bool = False
    """True if the states of the nodes are correct only together, for example because the mean of
    all trackers is the mean gradient. All nodes can then not resume from the state of a single
    node.
    """
    needs: frozenset = frozenset()
    """Conditions on the job; if one does not hold, an error names it (`training/rules.py`).

    On the graph: any of `Graph.facts`; "doubly" (rows and columns of W sum to one), "above -1/3"
    (all eigenvalues of W are larger), "graph:ceca" (only the graph "ceca" is possible).

    On the cadence: "always-global" (every step averages over all nodes), "unmixed" (all steps have
    the same kind), "never-global" and "never-gossip" (no step has this kind).

    On graph and cadence: "phases" (the cadence is "halves", and the graph is exact after one
    period).

    On the wire: "exact-wire" (only fp32 is possible), "own-wire" (a lossy wire needs no wrapper,
    because the algorithm itself takes its loss into account), "shared-wire" (all nodes omit the
    same elements).

    On `cadence.delay`: "keeps-x" (x is complete as soon as a GLOBAL round is sent).
    """

    @property
    def always_global(self) -> bool:
        """True if each exchange is an average over all nodes, so that no graph is used."""
        return "always-global" in self.needs


def init_from(kind: Callable[..., Any], *parts: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function ``init(x)`` that makes a state of class ``kind``.

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
    """Return a context manager that restores the rows ``step.skipped`` of ``arrays`` at its end."""
    rows = list(step.skipped)
    before = [array[rows] for array in arrays] if rows else []
    yield
    for array, values in zip(arrays, before, strict=bool(rows)):
        array[rows] = values


class NoState(NamedTuple):
    """Empty state of an algorithm or cadence that needs no state."""


def no_state(x) -> NoState:
    """Return the empty state; this is the ``init`` of an algorithm that needs no state."""
    return NoState()

"""Contract of an algorithm: plain functions on segments, the same for every transport."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from mpigossip.config.limits import Chance
from mpigossip.mixing.base import ExchangeKind

Decay = Chance
"""Type of options, checked when a job is read: momenta and running means."""

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
"""The words of `Algorithm.needs`."""


class Step(NamedTuple):
    """All that an algorithm knows besides arrays: plain values, given to send and receive."""

    index: int  # type: ignore[assignment]
    """steps since init, from 0; restarts where state was dropped"""
    round: int
    """the graph's clock: counts GOSSIP rounds only"""
    kind: ExchangeKind
    """GOSSIP or GLOBAL; LOCAL where nothing is exchanged"""
    lr: float | None
    """learning rate, > 0; None in an ahead send"""
    skipped: tuple[int, ...] = ()
    """rows without a usable gradient (float16 overflowed there; ``g`` is zero): they take no local
    step, keep what it would have changed, and join the round. This value and ``counts`` are the
    only ones that may differ between nodes."""
    counts: tuple[int, ...] = ()
    """local steps that each row has taken since init; empty: ``index`` of each"""
    waits: bool = False
    """an exchange of a node that waits, between its steps: no outer step, no end of a phase"""


class Algorithm(NamedTuple):
    """Three functions on float32 tensors of shape (rows, p): nodes in this process, parameters.

    ``x`` is the point where the gradient is taken, ``g`` the gradient with weight decay added,
    whose memory may be used up. ``out``, ``sent`` and ``mixed`` are each ``vectors`` arrays like
    ``x``, then ``scalars`` arrays (rows, 1) of float64: the message, what others decode of it, and
    its weighted average. The state is a NamedTuple (nestable) of arrays shaped like ``x`` or
    (rows, 1). Functions work in place and return the state.
    """

    init: Callable[..., Any]
    """(x) -> state; needs no gradient"""
    send: Callable[..., Any]
    """(x, g, state, out, step) -> state; fills out: vectors, then scalars"""
    receive: Callable[..., Any]
    """(x, g, state, sent, mixed, step) -> state; writes x in place"""
    local_update: Callable[..., Any] | None = None
    """(x, g, state, step) -> state: a LOCAL step in place, bitwise that of send and receive, of a
    method with a separate local step"""
    vectors: int = 1
    """arrays of model size that are sent in a round"""
    scalars: int = 0
    """float64 per row that are sent too, never compressed"""
    ahead: bool = False
    """send gets g = None and lr = None and changes nothing: it is sent during forward, backward"""
    elementwise: bool = True
    """send and receive treat every element by itself: fragments of a model may be exchanged at
    steps of their own, each with scalars of its own"""
    takes_mixed: bool = False
    """receive makes mixed[0] x, first of all and without reading x: the two may be one array"""
    raw: bool = False
    """only the local step uses the gradient, and takes the parameters' own: g is None"""
    distinct_state: bool = False
    """the nodes' states belong together, as trackers whose mean is the mean gradient: if nodes
    resumed from the state of one of them, the result would be wrong for good"""
    needs: frozenset = frozenset()
    """What the job must have; each is checked, and named where it is missing (training/fit.py).

    Of the graph: its facts; "doubly" (rows and columns sum to one), "above -1/3" (eigenvalues),
    "graph:ceca". Of the cadence: "always-global" (gradients are averaged over all nodes at every
    step; a biased wire by error feedback), "unmixed" (one kind only), "never-global",
    "never-gossip". Of both: "phases" (cadence "halves" and a graph that is exact in one period). Of
    the wire: "exact-wire" (fp32), "own-wire" (sends differences itself), "shared-wire" (all nodes
    leave out the same). Of a delay: "keeps-x" (x is done when a GLOBAL round is sent).
    """

    @property
    def always_global(self) -> bool:
        """Whether every exchange is an average over all nodes: no graph, no cadence, no inbox."""
        return "always-global" in self.needs


def init_from(kind: Callable[..., Any], *parts: Callable[..., Any]) -> Callable[..., Any]:
    """Init of a state of this kind, whose parts are made of x: copies, zeros, a local step's."""
    return lambda x: kind(*(part(x) for part in parts))


def inner_update(update: Callable[..., Any]) -> Callable[..., Any]:
    """A local update that steps along the part ``inner`` of a method's state."""

    def local_update(x, g, state, step: Step):
        return state._replace(inner=update(x, g, state.inner, step))

    return local_update


@contextmanager
def preserved(step: Step, *arrays) -> Iterator[None]:
    """Preserve the rows in ``step.skipped`` of these arrays."""
    rows = list(step.skipped)
    before = [array[rows] for array in arrays] if rows else []
    yield
    for array, values in zip(arrays, before, strict=bool(rows)):
        array[rows] = values


class NoState(NamedTuple):
    """The state of a method or cadence without one."""


def no_state(x) -> NoState:
    """Init of a method without state."""
    return NoState()

"""The contract of an algorithm: plain functions over segments, written once for all transports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NamedTuple

from mpigossip.config.toml import Limit
from mpigossip.mixing.base import Kind

Decay = Annotated[float, Limit(lambda v: 0 <= v < 1, "must be at least 0 and below 1")]
"""Type of options, checked when a job is read: momenta and running means."""


class Step(NamedTuple):
    """All that an algorithm knows besides arrays: plain values, equal on all nodes."""

    index: int  # type: ignore[assignment]
    """steps since init; restarts where state was dropped"""
    round: int
    """the graph's clock: counts GOSSIP rounds only"""
    kind: Kind
    lr: float | None
    """learning rate, > 0; None in an ahead send"""
    skipped: tuple[int, ...] = ()
    """rows without a usable gradient (float16 overflowed there; ``g`` is zero): they take no local
    step, keep what it would have changed, and join the round. This value and ``counts`` are the
    only ones that may differ between nodes."""
    counts: tuple[int, ...] = ()
    """local steps that each row has taken since init; empty: ``index`` of each"""


class Algorithm(NamedTuple):
    """Functions over one segment: arrays (rows, p), rows = nodes that live here.

    x is the point where the gradient is taken; everything else is state, a NamedTuple
    (nestable) of arrays shaped like x or (rows, 1). Functions work in place and return the
    state. ``g`` holds the gradient with weight decay added; its memory may be used up.
    """

    init: Callable[..., Any]
    """(x) -> state; needs no gradient"""
    send: Callable[..., Any]
    """(x, g, state, out, step) -> state; fills out: vectors, then scalars"""
    receive: Callable[..., Any]
    """(x, g, state, sent, mixed, step) -> state; writes x in place"""
    alone: Callable[..., Any] | None = None
    """(x, g, state, step) -> state: a LOCAL step in place, to the bits of send and receive, where
    it needs no outbox"""
    vectors: int = 1
    """arrays of model size that travel in a round"""
    scalars: int = 0
    """float64 per row that travel too, never compressed"""
    ahead: bool = False
    """send gets g = None, lr = None and changes nothing: it travels during forward/backward"""
    elementwise: bool = False
    """send and receive treat every column by itself: fragments of a model may be exchanged at
    steps of their own, each with scalars of its own"""
    takes_mixed: bool = False
    """receive makes mixed[0] x, first of all and without reading x: the two may be one array"""
    raw: bool = False
    """the gradient goes to the local step alone, which takes the parameters' own: g is None"""
    needs: frozenset = frozenset()
    """What the job must have; each is checked, and named in the refusal (training/fit.py).

    Of the graph: its facts; "doubly" (rows and columns sum to one), "unsigned" (no weight below
    zero), "exact" (one period is the exact average), "above -1/3" (eigenvalues), "graph:NAME". Of
    the cadence: "always-global", "unmixed" (one kind only), "never-global", "never-gossip",
    "cadence:NAME". Of the wire: "exact-wire" (fp32), "own-wire" (sends differences itself),
    "shared-wire" (all nodes leave out the same), "sends-gradients" (a biased wire by error
    feedback). Of a delay: "keeps-x" (x is done when a GLOBAL round is sent).
    """

    @property
    def always_global(self) -> bool:
        """Whether every exchange is an average over all nodes: no graph, no cadence, no inbox."""
        return "always-global" in self.needs


@contextmanager
def held(step: Step, *arrays) -> Iterator[None]:
    """Rows in ``step.skipped`` of these arrays are afterwards what they were before."""
    rows = list(step.skipped)
    before = [array[rows] for array in arrays] if rows else []
    yield
    for array, values in zip(arrays, before, strict=bool(rows)):
        array[rows] = values


class Empty(NamedTuple):
    """The state of a method that keeps none."""


def no_state(x) -> Empty:
    """Init of a method that keeps no state."""
    return Empty()

"""What a mixer of one rank knows of the round at hand."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from mpigossip.mixing.base import Kind
from mpigossip.mixing.messages import Job


@dataclass
class Round:
    """Who exchanges with this rank in the round at hand; ranks in the graph's order.

    ``partner``: the rank on this host that averages with this one alone, both by halves.
    ``targets``: rank and place in its inbox of the readers that are pushed to.
    """

    kind: Kind
    t: int
    exchange: int
    average: bool
    sources: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    readers: tuple[int, ...] = ()
    partner: int | None = None
    targets: tuple[tuple[int, int], ...] = ()
    nbytes: int = 0
    ticket: Job | None = None
    finished: bool = False
    order: tuple[int, ...] = ()
    """Blocks in the order in which they are sent, where they are filled after the start."""
    empty: set[int] = field(default_factory=set)
    """Those of them that aren't filled yet."""


def partner(graph, rank: int, now: Round, on_host: Container[int]) -> int | None:
    """The other of a pair on this host whose two averages are the same one."""
    if len(now.sources) != 1 or now.readers != now.sources:
        return None
    (other,), (own, weight) = now.sources, now.weights
    if other not in on_host or own != weight:
        return None
    sources, weights, theirs = graph.neighbours(now.t, other)
    same = len(sources) == 1 and sources[0] == rank and weights[0] == theirs == own
    return other if same else None

"""What a mixer of one rank knows of the round at hand."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field

from mpigossip.mixing.base import Kind
from mpigossip.mixing.courier import Job


@dataclass
class Round:
    """Who exchanges with this rank in the round at hand; ranks in the graph's order.

    ``partner``: the rank on this host that averages with this one alone, both by halves.
    ``far``: those of the sources that push to this rank. ``targets``: rank and place in its inbox
    of the readers that are pushed to.
    """

    kind: Kind
    t: int
    exchange: int
    average: bool
    sources: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    readers: tuple[int, ...] = ()
    far: tuple[int, ...] = ()
    partner: int | None = None
    targets: tuple[tuple[int, int], ...] = ()
    nbytes: int = 0
    ticket: Job | None = None
    rest: Callable[[], None] | None = None
    """What is left to do of an exchange without a ticket."""
    finished: bool = False
    order: tuple[int, ...] = ()
    """Blocks in the order in which they are sent, where they are filled after the start."""
    empty: set[int] = field(default_factory=set)
    """Those of them that aren't filled yet."""

    def at(self, t: int, exchange: int, order: tuple[int, ...] = ()) -> Round:
        """This plan for the exchange of another round, begun anew."""
        now = object.__new__(Round)  # dataclasses.replace takes as long as a small sum
        now.__dict__ |= self.__dict__
        now.t, now.exchange, now.order, now.empty = t, exchange, order, set(order)
        return now


def partner(graph, rank: int, now: Round, on_host: Container[int]) -> int | None:
    """The other of a pair on this host whose two averages are the same one."""
    if len(now.sources) != 1 or now.readers != now.sources:
        return None
    (other,), (own, weight) = now.sources, now.weights
    if other not in on_host or own != weight:
        return None
    sources, weights, theirs = graph.neighbours(now.t, other)
    same = len(sources) == 1 and sources[0] == rank and weights[0] == theirs == own
    alone = [int(j) for j in graph.receivers(now.t, other)] == [rank]
    return other if same and alone else None

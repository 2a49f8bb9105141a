"""Plan of the messages of a rank in a round, progress of the round, and chunks of a message.

The module does not need MPI.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from mpigossip.mixing.base import ExchangeKind, MessageLayout, bytes_per_exchange, is_average
from mpigossip.mixing.wire import CHUNK, Field

SMALLEST = 1 << 20
"""Smallest intended size of a message chunk, in bytes. Smaller chunks would take longer, because
each of them is completed by a flush of the MPI window, which takes a network round trip."""
CHUNK_S = 0.04
"""Intended transfer time of a message chunk, in seconds. It is much longer than the network round
trip of the flush that completes the chunk."""
Near = Sequence[frozenset[int]]
"""Sets of ranks, one for each rank: the ranks whose memory it reads in place, including itself. The
sequence is empty if no rank reads the memory of another."""


@dataclass(frozen=True)
class RoundPlan:
    """Messages that one rank sends and receives in a round, with their weights.

    The ranks of each tuple are in the order in which the graph lists them.
    """

    kind: ExchangeKind
    average: bool
    """True if the round is the average over all ranks, so that they average together."""
    nbytes: int
    """Number of bytes that the rank would send in the round if no message were read in place."""
    sources: tuple[int, ...] = ()
    """In-neighbours of the rank."""
    weights: tuple[float, ...] = ()
    """Weight of the rank's own message, then the weights of the messages of ``sources``. For an
    average over all ranks, these are the weights of the messages of all ranks in rank order."""
    readers: tuple[int, ...] = ()
    """Out-neighbours of the rank."""
    remote_sources: tuple[int, ...] = ()
    """In-neighbours that send their message to this rank, rather than have it read in place. The
    k-th of them sends to inbox buffer k."""
    targets: tuple[tuple[int, int], ...] = ()
    """Out-neighbours that this rank sends to, as pairs: the rank, and the index of the buffer in
    its inbox."""
    partner: int | None = None
    """Rank on this host, if the two average only with each other, so that each can compute one half
    of the result; otherwise None."""

    @classmethod
    def of(
        cls,
        graph,
        layout: MessageLayout,
        rank: int,
        kind: ExchangeKind,
        t: int,
        near: Near = (),
        *,
        halves: bool = False,
    ) -> RoundPlan:
        """Plan a round of a rank.

        :param graph: graph of the ranks
        :param layout: layout of a message
        :param rank: rank that exchanges
        :param kind: kind of the exchange
        :param t: number of the round
        :param near: for each rank, the set of ranks whose memory it reads in place; empty: no rank
            reads the memory of another
        :param halves: True: if two ranks of a host average only with each other, each of them
            computes one half of the result
        """
        nbytes = bytes_per_exchange(graph, kind, t, rank, layout.sent_bytes, layout.raw_bytes)
        if kind is ExchangeKind.LOCAL:
            return cls(kind, False, nbytes)
        if kind is ExchangeKind.GLOBAL or is_average(graph, t):
            return cls(kind, True, nbytes, weights=graph.average_weights)
        nodes, weights, own = graph.neighbours(t, rank)
        sources = tuple(map(int, nodes))
        readers = tuple(map(int, graph.receivers(t, rank)))
        # the buffers of a reader are numbered like the in-neighbours that send to it
        targets = tuple(
            (reader, _remote(near, reader, graph.neighbours(t, reader)[0]).index(rank))
            for reader in _remote(near, rank, readers)
        )
        remote_sources = tuple(_remote(near, rank, sources))
        pair = halves and sources == readers and len(sources) == 1 and not remote_sources
        partner = sources[0] if pair and _is_pair(graph, t, rank, sources[0]) else None
        all_weights = float(own), *map(float, weights)
        return cls(
            kind, False, nbytes, sources, all_weights, readers, remote_sources, targets, partner
        )


def ranks_by_host(first_ranks: Sequence[int]) -> Near:
    """Return for each rank the set of ranks whose memory it reads, including itself.

    Ranks of one host share a set. It is empty for a rank that reads none.

    :param first_ranks: for each rank, the lowest rank whose memory it reads; -1: it reads none
    """
    hosts: dict[int, list[int]] = {}
    for rank, first in enumerate(first_ranks):
        hosts.setdefault(first, []).append(rank)
    sets = {first: frozenset(ranks) for first, ranks in hosts.items()} | {-1: frozenset()}
    return [sets[first] for first in first_ranks]


def _remote(near: Near, rank: int, nodes: Iterable[Any]) -> list[int]:
    """Return the nodes of ``nodes`` whose memory ``rank`` does not read in place."""
    read = near[rank] if near else ()
    return [int(j) for j in nodes if int(j) not in read]


def _is_pair(graph, t: int, rank: int, other: int) -> bool:
    """Return whether two ranks, each the only in-neighbour of the other, get the same average."""
    _, (weight,), own = graph.neighbours(t, rank)
    sources, weights, other_own = graph.neighbours(t, other)
    same = [int(j) for j in sources] == [rank] and weights[0] == other_own == own == weight
    return same and [int(j) for j in graph.receivers(t, other)] == [rank]


def inbox_buffers(graph, rank: int, near: Near = ()) -> int:
    """Return the largest number of in-neighbours that send to ``rank`` in one round.

    In-neighbours whose memory the rank reads in place (``near``) are not counted, and neither are
    rounds that average over all nodes. For a graph without a period, the result is its degree.
    """
    if graph.period is None:
        return graph.degree
    rounds = [t for t in range(graph.period) if not is_average(graph, t)]
    return max((len(_remote(near, rank, graph.neighbours(t, rank)[0])) for t in rounds), default=0)


def sums_in_inbox(graph, rank: int) -> bool:
    """Return whether the weighted sum of every round can be written over a received message.

    This is so if the graph has a period, ``rank`` has in-neighbours in every round of it, and no
    round averages all nodes.
    """
    rounds = range(graph.period or 0)
    sums = [len(graph.neighbours(t, rank)[0]) and not is_average(graph, t) for t in rounds]
    return bool(sums) and all(sums)


@dataclass(eq=False, slots=True)
class RoundState:
    """Plan and numbers of an exchange, and its progress, which only the pipeline changes."""

    plan: RoundPlan
    t: int
    """Number of the graph's round."""
    number: int
    """Number of this exchange, counted over all kinds from the start of the run."""
    index: int
    """Number of rounds from the first GOSSIP round of the mixer to this one, from which the numbers
    of its notifications are computed."""
    future: Future | None = None
    """Future of the work that the progress thread does for this round; None: the thread that waits
    for the end of the round does the work."""
    sums: bool = True
    """True if the pipeline computes the weighted sum; False if the main thread computes it after
    all messages have arrived."""
    arrived: dict[int, int] = field(default_factory=dict)
    """For each in-neighbour that sends to this rank, the number of chunks that have arrived."""
    prepared: int = 0
    """Number of chunks that are ready to be sent: they were encoded, and copied to host memory if
    the transport sends them from there."""
    sent: int = 0
    """Number of chunks that were sent to all out-neighbours and announced by notifications."""
    added: int = 0
    """Number of chunks that were summed, or that can be summed by the main thread."""
    in_flight: Sequence[Any] = ()
    """Requests of the chunk that is being sent."""
    blocked_readers: Sequence[int] = ()
    """Out-neighbours that have not freed the inbox buffer of this round yet."""


@dataclass(frozen=True)
class MessageChunk:
    """Piece of every slot's message that is sent, notified and summed at once."""

    number: int
    """Index of the chunk in the message, from 0."""
    span: slice
    """Range of bytes in a slot's encoded message."""
    fields: tuple[Field, ...]
    """Contents of the chunk: elements of vectors, and scalars."""


def chunks(layout: MessageLayout, size: float) -> list[MessageChunk]:
    """Divide a slot's message into chunks of about ``size`` bytes; the last one has the scalars."""
    result: list[MessageChunk] = []
    fields: list[Field] = []
    begin = end = 0
    for index, all_columns in layout.fields:
        scalar = index >= layout.vectors
        for column in range(0, all_columns.stop, CHUNK):
            if end - begin >= size and not scalar:
                result.append(MessageChunk(len(result), slice(begin, end), tuple(fields)))
                fields = []
                begin = end
            columns = slice(column, min(column + CHUNK, all_columns.stop))
            end += 8 if scalar else layout.vector_bytes(columns.stop - column)
            if fields and fields[-1][0] == index:
                columns = slice(fields.pop()[1].start, columns.stop)
            fields.append((index, columns))
    return [*result, MessageChunk(len(result), slice(begin, end), tuple(fields))]


def chunk_size(nbytes: int, rate: float) -> int:
    """Return the chunk size for ``nbytes`` bytes over a network of ``rate`` bytes per second.

    A chunk takes about `CHUNK_S` seconds to send, or is about an eighth of the message if that is
    less, so that the sum of one chunk overlaps with the transfer of the next. Neither applies if
    the chunk would be smaller than `SMALLEST`. Chunks divide the message evenly, because a short
    last one would wait for the same number of round trips as a long one.
    """
    target = max(SMALLEST, min(nbytes / 8, rate * CHUNK_S))
    return max(1, -(-nbytes // max(1, round(nbytes / target))))

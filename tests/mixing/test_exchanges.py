"""Exchanges: the class that each plan leads to, and the order of the calls of each class."""

from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest

from mpigossip.mixing.base import ExchangeKind, MessageLayout
from mpigossip.mixing.exchanges import Mixed, Pair, ReadInPlace, Sent
from mpigossip.mixing.plan import RoundPlan, RoundState, ranks_by_host
from mpigossip.mixing.synchronous import Synchronous

GOSSIP = ExchangeKind.GOSSIP


def plan(sources=(), readers=(), remote=(), targets=(), partner=None):
    weights = (0.5,) * (1 + len(sources))
    return RoundPlan(GOSSIP, False, 0, sources, weights, readers, remote, targets, partner)


NONE = RoundPlan(ExchangeKind.LOCAL, False, 0)
AVERAGE = RoundPlan(ExchangeKind.GLOBAL, True, 0)
READ = plan((1, 2), (1, 2))
PAIR = plan((1,), (1,), partner=1)
SENT = plan((1,), (2,), (1,), ((2, 0),))
CASES = [
    # plan, shared memory, transport, class, whether the pipeline forms the sum
    (NONE, True, True, "Local", None),
    (NONE, False, True, "Local", None),
    (AVERAGE, True, False, "AverageInPlace", None),
    (AVERAGE, True, True, "AverageSent", None),
    (AVERAGE, False, True, "AverageSent", None),
    (READ, True, False, "ReadInPlace", None),
    (READ, True, True, "ReadInPlace", None),
    (PAIR, True, True, "Pair", None),
    (SENT, False, True, "Sent", True),
    (plan(), False, True, "Sent", True),
    (SENT, True, True, "Mixed", True),
    (plan((1, 4), (1, 4), (4,), ((4, 0),)), True, True, "Mixed", False),
    (plan((1,), (4,), (), ((4, 0),)), True, True, "Mixed", False),
]


@pytest.mark.parametrize("case, shared, transport, name, sums", CASES)
def test_the_plan_and_what_is_open_choose_the_exchange(case, shared, transport, name, sums):
    mixer = SimpleNamespace(
        _buffers=Mock(),
        _shared=Mock() if shared else None,
        _transport=Mock() if transport else None,
        _pipeline=Mock(),
        _inline=True,
        _full_message=None,
        layout=MessageLayout((8,)),
    )
    r = RoundState(case, 3, 3, 3)
    exchange = Synchronous._exchange_of(mixer, r)
    assert type(exchange).__name__ == name
    exchange.begin()
    begun = mixer._pipeline.begin.call_args_list
    assert begun == ([call(r, inline=True, sums=sums)] if sums is not None else [])
    if shared and case.kind is GOSSIP:
        mixer._shared.publish.assert_called_once_with(case.readers, 3)


def recorded(case):
    """Return an exchange of parts that record their calls: shared memory of ranks 0 and 1."""
    parts = Mock()
    parts.shared.local_index = {0: 0, 1: 1}
    parts.pipeline.wait.return_value = 0.5
    return parts, RoundState(case, 3, 3, 3)


def names(parts):
    return [name for name, _, _ in parts.mock_calls]


def test_a_mixed_round_sums_in_the_order_of_the_graph_when_all_messages_are_there():
    parts, r = recorded(plan((4, 1), (1, 4), (4,), ((4, 0),)))
    read = ReadInPlace(r, parts.buffers, parts.shared, parts.chunk)
    sent = Sent(r, parts.buffers, parts.pipeline, inline=True, sums=False)
    exchange = Mixed(read, sent, parts.transport)
    exchange.begin()
    exchange.finish()
    exchange.release()
    received = [parts.transport.received(), parts.buffers.segments()]
    parts.buffers.add.assert_called_once_with(r.plan.weights, received, parts.chunk, None)
    assert exchange.waited == 0.5
    assert names(parts)[:-2] == [
        "shared.publish",
        "pipeline.begin",
        "shared.wait_ready",
        "pipeline.wait",
        "transport.received",
        "shared.outbox",
        "buffers.segments",
        "buffers.add",
        "shared.release",
        "shared.wait_read",
    ]


@pytest.mark.parametrize("into", [None, [0.0]])
def test_a_pair_waits_for_the_result_that_both_read_only_if_they_share_one(into):
    parts, r = recorded(PAIR)
    exchange = Pair(r, parts.buffers, parts.shared, parts.chunk, MessageLayout((8,)))
    exchange.begin()
    exchange.finish(into)
    exchange.release()
    called = names(parts)
    assert ("shared.average_pair" in called) == ("shared.release_pair" in called) == (into is None)
    assert ("shared.release" in called) == ("shared.wait_read" in called) == (into is not None)


def test_ranks_of_a_host_share_one_set():
    near = ranks_by_host([0, 1, 0, -1, 1])
    assert near == [{0, 2}, {1, 4}, {0, 2}, frozenset(), {1, 4}]
    assert near[0] is near[2] and near[1] is near[4]

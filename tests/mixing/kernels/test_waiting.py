"""Waits in C: how they end; exchanges without them, or without a thread, are identical."""

import threading
import time

import pytest

from mpigossip.mixing.base import MessageLayout
from mpigossip.mixing.kernels import waiting
from tests.cases import on_each, some
from tests.mixing.rounds import LAYOUT, compare

GRAPHS = ["one-peer-exponential", "exponential", "base-3"]


def wait_times(comm):
    """Return the seconds of waits: answered, limited, woken, woken before, limited."""
    import numpy as np

    value = np.zeros(1, np.int64)
    seconds = []
    bell = waiting.Bell()
    never = comm.Irecv(np.zeros(1, np.int64), 1 - comm.rank, 77)

    def timed(*requests, began=None, **how):
        began = began or time.monotonic()
        assert waiting.wait_for_requests([*requests, never], need=1, **how)
        seconds.append(time.monotonic() - began)

    coming = comm.Irecv(value, 1 - comm.rank, 78)
    comm.Send(np.array([comm.rank]), 1 - comm.rank, 78)
    timed(coming, limit=20)
    assert coming.Test() and value[0] == 1 - comm.rank
    timed(limit=0.2)
    alarm = threading.Timer(0.2, bell.ring)
    began = time.monotonic()
    alarm.start()
    timed(wake=bell.wake, limit=20, began=began)
    alarm.join()
    timed(wake=bell.wake, limit=20)  # the pipe is not empty yet
    bell.clear()
    timed(wake=bell.wake, limit=0.2)
    comm.Send(np.zeros(1, np.int64), 1 - comm.rank, 77)
    waiting.wait_for_requests([never], limit=20)
    never.Wait()
    for _ in range(1 << 17):  # more rings than a pipe holds
        bell.ring()
    bell.close()
    bell.close()
    return seconds


def test_a_wait_ends_by_an_answer_a_ring_or_its_limit(ranks):
    if not waiting.available():
        pytest.skip("no compiler, or not Linux")
    for answered, limited, woken, rung, quiet in ranks(2)(wait_times):
        assert max(answered, woken, rung) < 10  # not their limit
        assert min(limited, woken, quiet) >= 0.1  # a signal may end them sooner than 0.2


def lost(comm):
    """Return the error of a wait for a message that is never sent."""
    import numpy as np

    from mpigossip.cluster.deadline import WaitTimeoutError
    from mpigossip.mixing.notifications import wait_all

    request = comm.Irecv(np.zeros(1), comm.rank, 79)
    try:
        wait_all({5: request}, 0.2, "nothing from {}".format)
    except WaitTimeoutError as error:
        request.Cancel()
        request.Wait()
        return str(error)


def test_a_wait_does_not_exceed_the_deadline(ranks):
    assert ranks(1)(lost) == ["nothing from 5 (waited 0.2 s)"]


def without_c(comm, size):
    layout = MessageLayout(widths=(size, size), vectors=2, scalars=1)
    before = waiting.available
    waiting.available = lambda: False
    try:
        return compare(comm, GRAPHS, "put", 12, layout=layout)
    finally:
        waiting.available = before


@on_each("size", [64, 1024])
def test_exchanges_without_the_native_library_are_equal(ranks, size):
    for differences in ranks(3)(without_c, size):
        assert differences == dict.fromkeys(GRAPHS, 0)


def short(comm):
    from mpigossip.mixing.synchronous import INLINE_BYTES

    layout = MessageLayout(widths=(64, 64), vectors=2, scalars=1)
    assert (
        layout.nbytes <= INLINE_BYTES < LAYOUT.nbytes
    )  # the messages of test_windows wake the thread
    return compare(comm, GRAPHS, "put", 40, layout=layout)


@pytest.mark.parametrize("n", some([2, 3, 6], [3]))
def test_short_messages_are_exchanged_without_the_thread(ranks, n):
    for differences in ranks(n)(short):
        assert differences == dict.fromkeys(GRAPHS, 0)

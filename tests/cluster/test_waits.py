"""cluster/waits.py: an interrupt at any point of a wait leaves what waits need in order."""

import dis
import sys
import threading
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from mpigossip.cluster import deadline, waits
from mpigossip.cluster.deadline import Deadline, WaitTimeoutError
from mpigossip.cluster.mpi_world import MPIWorld
from mpigossip.cluster.waits import Report, WaitMonitor
from mpigossip.config import JobError
from tests.cases import naming, on_each

pytestmark = pytest.mark.both

MODULES = {deadline.__file__, waits.__file__}
CHECKED = ("CALL", "RESUME", "JUMP_BACKWARD")
"""Instructions after which Python calls signals' handlers."""


class Interrupt:
    """Raise KeyboardInterrupt at the ``number``-th place where Ctrl-C can arrive in the modules."""

    def __init__(self, number):
        self.left = number
        self.before = {}

    def __enter__(self):
        sys.settrace(self.of_call)

    def __exit__(self, kind, *_):
        sys.settrace(None)
        return kind is KeyboardInterrupt

    def of_call(self, frame, event, _):
        if frame.f_code.co_filename not in MODULES:
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        self.before[frame] = ""
        return self.of_opcode

    def of_opcode(self, frame, event, _):
        if event == "return":
            self.before.pop(frame, None)
        elif event == "opcode":
            before = self.before[frame]
            name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            # Python 3.14 enters a `with` block by LOAD_SPECIAL and CALL
            entered = before == "LOAD_SPECIAL" and name == "CALL"
            self.before[frame] = "entered" if entered else name
            if before.startswith(CHECKED):
                self.left -= 1
                if self.left == 0:
                    raise KeyboardInterrupt
        return self.of_opcode


def steps_received(monitor):
    """Return the number of steps in the last message of rank 0."""
    report = monitor._reports.get(0)
    return report.steps if report else 0


def interrupted_everywhere(comm):
    """Interrupt waits in which this rank sends to itself and receives; return what was wrong."""
    from mpi4py import MPI

    before = (waits.RECEIVE_AFTER_S, waits.INFORM_S)
    wrong = []
    number = 0
    waits.RECEIVE_AFTER_S = waits.INFORM_S = 0.0
    deadline.this_rank.monitor = roll = WaitMonitor(MPI.COMM_SELF.Dup(), ["here"])
    try:
        interrupt = Interrupt(0)
        while interrupt.left <= 0 and len(wrong) < 4:
            number += 1
            roll.send_status([0], deadline.WAITING)  # the wait answers it
            polls = iter([False, False, True])
            interrupt = Interrupt(number)
            with interrupt, deadline.user_call("step()"):
                Deadline(5).wait(partial(next, polls), lambda: "", awaited_ranks=lambda: [0])
            deadline.this_rank.steps = number
            roll.send_status([0], deadline.WORKING)
            until = time.monotonic() + 2
            while steps_received(roll) < number and time.monotonic() < until:
                roll.receive_status()
            if steps_received(roll) < number:
                wrong.append(f"after point {number} nothing is received")
        began = time.monotonic()
        roll.close(timeout_s=5)
        if time.monotonic() - began > 4:
            wrong.append("the world closes slowly")
    except WaitTimeoutError as late:
        wrong.append(f"{late}")
    finally:
        waits.RECEIVE_AFTER_S, waits.INFORM_S = before
        deadline.this_rank.steps = 0
        deadline.this_rank.monitor = None
    return number, wrong


def test_an_interrupt_at_any_point_of_a_wait_does_no_harm(ranks):
    ((points, wrong),) = ranks(1)(interrupted_everywhere)
    assert not wrong and points > 50, (points, wrong)


def test_an_interrupt_as_a_pause_begins_ends_it(monkeypatch):
    """This is a rank whose threads may not call MPI, so that each pause is announced at once."""
    sent = []

    def interrupted(status):
        sent.append(status)
        if status == deadline.PAUSED:
            raise KeyboardInterrupt

    monitor = WaitMonitor(Network(2).comm(0), ["a", "b"], threaded=False)
    monkeypatch.setattr(monitor, "announce", interrupted)
    monkeypatch.setattr(deadline.this_rank, "monitor", monitor)
    with pytest.raises(KeyboardInterrupt), deadline.paused():
        pass
    assert deadline.this_rank.pause_depth == 0 and sent == [deadline.PAUSED, deadline.WORKING]
    assert deadline.this_rank.pause is None


def test_a_wait_that_is_interrupted_is_over_for_the_others(monkeypatch):
    """A rank that catches an interrupt continues; a late rank ends like a rank that waited."""
    said = []

    class Wait:
        def poll(self):
            return None

        def is_paused(self):
            return False

        def finish(self):
            said.append("over")

        def describe_fault(self, departed_code):
            return ""

    class Monitor:
        def start_wait(self, *_):
            return Wait()

        def poll_paused(self):
            return False

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(deadline.this_rank, "monitor", Monitor())
    with pytest.raises(KeyboardInterrupt):
        Deadline(1).wait(interrupted, lambda: "", awaited_ranks=list)
    assert said == ["over"]
    with pytest.raises(WaitTimeoutError):
        Deadline(0).wait(lambda: False, lambda: "", awaited_ranks=list)
    assert said == ["over"]


# -- repeated messages -----------------------------------------------------------------------------


class Network:
    """Messages between the monitors of several ranks in one process."""

    def __init__(self, size):
        self.queues = [[] for _ in range(size)]
        self.sent = 0

    def comm(self, rank):
        return FakeComm(self, rank)


class FakeComm:
    """The calls of a communicator that `WaitMonitor` makes."""

    def __init__(self, network, rank):
        self.network = network
        self.rank = rank
        self.size = len(network.queues)

    def Isend(self, value, rank, tag):  # noqa: N802 - MPI's name
        self.network.queues[rank].append(value.copy())
        self.network.sent += 1
        return self

    def Test(self):  # noqa: N802
        return True

    def Iprobe(self, source, tag):  # noqa: N802
        return bool(self.network.queues[self.rank])

    def Recv(self, into, source, tag):  # noqa: N802
        into[:] = self.network.queues[self.rank].pop(0)


def test_ranks_in_different_calls_end_after_the_grace_period(monkeypatch):
    """Each rank repeats its message after 1, 2, 4, 8 s …; the first one counts."""
    now = 0.0
    monkeypatch.setattr(waits.time, "monotonic", lambda: now)
    network = Network(2)
    calls = ["step()", "averaged()"]
    running = [
        WaitMonitor(network.comm(rank), ["a", "b"]).start_wait(300, lambda other=1 - rank: [other])
        for rank in range(2)
    ]
    monkeypatch.setattr(deadline.this_rank, "status", deadline.WAITING)
    monkeypatch.setattr(deadline.this_rank, "order", 7)
    ended = []
    while now < 60 and not ended:
        now += 0.25
        for rank, wait in enumerate(running):
            monkeypatch.setattr(deadline.this_rank, "call", calls[rank])
            if wait.poll() is not None:
                ended.append(rank)
    assert ended
    assert now == pytest.approx(waits.INFORM_S + waits.DEPARTURE_GRACE_S, abs=0.5)


def test_a_message_to_a_failed_rank_does_not_end_the_sender(monkeypatch):
    """With ULFM, the test of a request to a failed rank raises an error of MPI."""
    network = Network(2)
    monitor = WaitMonitor(network.comm(0), ["a", "b"])
    monitor.send_status([1], deadline.WORKING)

    def fail(comm):
        raise RuntimeError("MPI_ERR_PROC_FAILED")

    monkeypatch.setattr(FakeComm, "Test", fail)
    monitor.send_status([1], deadline.WORKING)
    assert network.sent == 2


# -- judging a wait --------------------------------------------------------------------------------


@on_each(
    "facts, verdict",
    [
        ((9.9, 10, 0, False, None), None),
        ((10, 10, 0, False, None), (True, False, None)),
        ((10, 10, 0, True, None), None),  # a pause suspends the limit,
        ((1, 10, 30, True, None), None),  # and the end after SIGTERM,
        ((1, 10, 0, True, 3), (False, False, 3)),  # but not the end after a departure
        ((1, 10, 30, False, None), (False, True, None)),
        ((10, 10, 30, False, 0), (True, True, 0)),
    ],
)
def test_a_wait_is_judged_by_its_facts(facts, verdict):
    assert deadline.judge_wait(*facts) == verdict


STEP = Report(deadline.WAITING, "step()", 5, 9)
END = Report(deadline.CLOSING, f"{deadline.END_PREFIX}loop", 5, 9)
EXIT = Report(deadline.EXITED - 3, f"{deadline.END_PREFIX}program", 5, 0)


@on_each(
    "own, other, code",
    [
        (STEP, STEP, None),
        (STEP, STEP._replace(status=deadline.WORKING), None),
        (STEP, STEP._replace(call="gather()"), 0),
        (STEP, STEP._replace(call="gather()", order=10), None),  # ahead of this rank
        (STEP._replace(order=0), STEP._replace(call="gather()", order=0), None),
        (STEP, STEP._replace(call="gather()", status=deadline.PAUSED), None),
        (STEP, END, 0),
        (STEP, END._replace(steps=6), None),  # it has taken part in this step
        (STEP._replace(call="averaged()"), END._replace(steps=6), 0),
        (END, END, None),
        (END, STEP, None),
        (END, EXIT, 3),
        (STEP, EXIT, 3),
        (STEP, EXIT._replace(status=deadline.EXITED), 0),
    ],
)
def test_a_rank_that_will_never_come_is_recognized(own, other, code):
    assert waits.departed_code(own, other, waits.DEPARTURE_GRACE_S) == code
    assert waits.departed_code(own, other, waits.DEPARTURE_GRACE_S - 0.1) is None


# -- number of messages ----------------------------------------------------------------------------


@on_each("n", [2, 4, 8, 16, 32])
def test_messages_of_an_end_grow_in_proportion_to_the_ranks(monkeypatch, n):
    """All ranks but the last exit with their world open; the last one waits for them for 20 s."""
    now = [0.0]
    monkeypatch.setattr(waits.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(deadline.this_rank, "status", deadline.WAITING)
    network = Network(n)
    monitors = [WaitMonitor(network.comm(rank), ["host"] * n) for rank in range(n)]
    wait = monitors[-1].start_wait(300, tuple)
    code = None
    while code is None:
        now[0] += 0.25
        code = wait.poll()
        for monitor in monitors[:-1]:
            monitor.answer(deadline.EXITED)
    asked = min(n - 1, waits.MAX_AWAITED)
    rounds = 4  # after 1, 2, 4 and 8 s; the grace period ends at 11 s
    assert code == 0 and network.sent == rounds * 2 * asked <= 8 * n
    assert now[0] == pytest.approx(waits.INFORM_S + waits.DEPARTURE_GRACE_S, abs=0.5)


@on_each("awaited", [(), range(1, 40), (7, 39, 3), range(20, 40)])
def test_a_wait_informs_the_awaited_ranks_that_follow(awaited):
    """At most MAX_AWAITED of them, also if this rank is not among those that are awaited."""
    own, n = 5, 40
    monitor = WaitMonitor(Network(n).comm(own), ["host"] * n)
    informed = monitor.next_awaited(awaited)
    others = [rank % n for rank in range(own + 1, own + n) if rank % n in (awaited or range(n))]
    assert informed == {*others[: waits.MAX_AWAITED]}


@on_each("n", [2, 4, 8, 16, 32])
def test_messages_of_long_waits_grow_in_proportion_to_the_ranks(monkeypatch, n):
    """The first rank computes for 100 s, and all others wait for it with a limit of 300 s."""
    now = [0.0]
    monkeypatch.setattr(waits.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(deadline.this_rank, "status", deadline.CLOSING)
    monkeypatch.setattr(deadline.this_rank, "call", f"{deadline.END_PREFIX}world")
    network = Network(n)
    running = [
        WaitMonitor(network.comm(rank), ["host"] * n).start_wait(300, tuple) for rank in range(1, n)
    ]
    while now[0] < 100:
        now[0] += 0.5
        assert all(wait.poll() is None for wait in running)
    rounds = 7  # after 1, 2, 4, … 64 s
    most = (n - 1) * min(n - 1, waits.MAX_AWAITED) * (rounds + 1)  # and one answer to each rank
    assert 0 < network.sent <= most


@on_each("threaded", [False, True])
def test_pauses_announce_their_end_to_all_ranks_that_know_of_them(monkeypatch, threaded):
    monkeypatch.setattr(waits, "ANNOUNCE_AFTER_S", 0.0)
    network = Network(4)
    monitors = [WaitMonitor(network.comm(rank), ["host"] * 4, threaded=threaded) for rank in (0, 1)]
    monkeypatch.setattr(deadline.this_rank, "monitor", monitors[0])
    with deadline.paused(), deadline.paused():
        until = time.monotonic() + 10
        while not monitors[1].poll_paused() and time.monotonic() < until:
            time.sleep(1e-3)
        assert monitors[1].has_paused() and network.sent == 3
    assert not monitors[1].poll_paused() and network.sent == 6


def test_a_pause_is_announced_only_if_no_other_pause_is_known(monkeypatch):
    """If two ranks are paused, the second one announces it after the first pause has ended."""
    monkeypatch.setattr(waits, "ANNOUNCE_AFTER_S", 0.0)
    network = Network(3)
    paused, other, waiting = (
        WaitMonitor(network.comm(rank), ["host"] * 3, threaded=True) for rank in range(3)
    )
    other.announce(deadline.PAUSED)
    pause = waits.Pause(paused)
    pause.begin()
    time.sleep(3 * waits.SPREAD_S)
    assert network.sent == 2 and waiting.poll_paused()
    other.announce(deadline.WORKING)
    until = time.monotonic() + 10
    while network.sent < 6 and time.monotonic() < until:
        time.sleep(1e-3)
    assert network.sent == 6 and waiting.poll_paused()
    pause.end()
    assert network.sent == 8 and not waiting.poll_paused()


def test_a_short_pause_is_not_announced(monkeypatch):
    monkeypatch.setattr(waits, "ANNOUNCE_AFTER_S", 60.0)
    network = Network(8)
    monitor = WaitMonitor(network.comm(3), ["host"] * 8, threaded=True)
    monkeypatch.setattr(deadline.this_rank, "monitor", monitor)
    before = threading.active_count()
    with deadline.paused():
        assert threading.active_count() == before + 1
        monitor.send_status([1], deadline.WAITING)
    assert threading.active_count() == before and network.sent == 1


@on_each("n", [2, 8, 64, 1024])
def test_a_few_of_n_paused_ranks_announce_it(n):
    """The number of ranks that find no announcement must not grow in proportion to n.

    Each rank looks for an announcement after its delay. An announcement arrives 20 ms after the
    first delay has passed.
    """
    counts = []
    for _ in range(200):
        delays = sorted(waits.spread_delay(n) for _ in range(n))
        counts.append(sum(delay <= delays[0] + 0.02 for delay in delays))
        assert 0 <= delays[0] <= delays[-1] <= waits.SPREAD_S
    assert np.mean(counts) < 6


def messages_of_pauses(comm, seconds, timeout_s):
    """Pause on all ranks, each for its own time, then meet; return the messages of all ranks.

    :param seconds: seconds that rank r pauses, as a function of r
    """
    with MPIWorld(comm, timeout_s) as world:
        monitor = world._monitor
        before = int(monitor._sent_numbers.sum())
        with deadline.paused():
            time.sleep(seconds[comm.rank])
        sent = int(monitor._sent_numbers.sum()) - before
        world.barrier()
        return sent


@on_each("n", [2, 4, 8])
def test_pauses_of_all_ranks_send_messages_in_proportion_to_the_ranks(ranks, n):
    assert sum(ranks(n)(messages_of_pauses, [0.0] * n, 60.0)) == 0
    announcing = sum(ranks(n)(messages_of_pauses, [1.5] * n, 60.0)) / (2 * (n - 1))
    assert 1 <= announcing <= {2: 2, 4: 3, 8: 4}[n]


def test_a_wait_outlasts_several_pauses_that_end_one_after_the_other(ranks):
    """Rank 3 waits for longer than its limit of 1.5 s; only one pause is announced at a time."""
    sent = ranks(4)(messages_of_pauses, [1.5, 3.0, 4.5, 0.0], 1.5)
    assert sent[3] == 0 and sum(sent) >= 2 * 3


def test_after_a_pause_a_sigterm_leaves_time_for_the_rank_that_was_paused(monkeypatch):
    """SIGTERM arrives at 1 s, and the pause ends at 50 s: the wait ends 20 s later."""
    now = [0.0]

    def tick(seconds=1e-3):
        now[0] += max(seconds, 0.01)
        return now[0]

    wait = SimpleNamespace(
        poll=lambda: None,
        is_paused=lambda: now[0] < 50,
        describe_fault=lambda code: "",
        finish=lambda: None,
    )
    monitor = SimpleNamespace(start_wait=lambda *_: wait, poll_paused=lambda: now[0] < 50)
    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=tick, sleep=tick))
    monkeypatch.setattr(deadline.this_rank, "monitor", monitor)
    monkeypatch.setattr(deadline.this_rank, "sigterm_time", 1.0)
    with pytest.raises(WaitTimeoutError, match=naming("SIGTERM")):
        Deadline(300).wait(lambda: False, lambda: "x", awaited_ranks=list)
    assert 69 <= now[0] < 72


def test_a_rank_that_asked_before_this_one_exits_is_answered_once(monkeypatch):
    """Its message was received in a wait of this rank, which has ended since."""
    now = [0.0]
    monkeypatch.setattr(waits.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(deadline.this_rank, "status", deadline.WAITING)
    network = Network(2)
    exiting, waiting = (WaitMonitor(network.comm(rank), ["a", "b"]) for rank in range(2))
    wait = waiting.start_wait(300, lambda: [0])
    for _ in range(6):
        now[0] += 0.25
        assert wait.poll() is None
    exiting.poll_paused()  # receives the message of the waiting rank without an answer
    sent = network.sent
    for _ in range(3):
        exiting.answer(deadline.EXITED)
    assert network.sent == sent + 1
    code = None
    while code is None and now[0] < 30:
        now[0] += 0.25
        code = wait.poll()
    assert code == 0 and now[0] < 15


# -- numbers of calls ------------------------------------------------------------------------------


def test_a_call_that_raises_gives_its_number_back(monkeypatch):
    """A rank that catches the error and calls again has the same number as the others."""
    monkeypatch.setattr(deadline.this_rank, "ordered_calls", 4)
    monkeypatch.setattr(deadline.this_rank, "call", "")
    call = deadline.user_call("averaged()")
    with pytest.raises(JobError), call, deadline.user_call("gather()"):
        assert deadline.this_rank.order == 0  # the outer call has the number
        raise JobError("wrong argument")
    assert deadline.this_rank.ordered_calls == 4
    with call:
        assert deadline.this_rank.order == 5
    with pytest.raises(JobError), deadline.user_call("finish()", ordered=False):
        raise JobError("wrong argument")
    assert deadline.this_rank.ordered_calls == 5

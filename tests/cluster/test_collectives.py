"""Blocking MPI calls: errors name a missing rank, or a call that does not return."""

import contextlib
import re
import threading
import time

import pytest

from mpigossip.cluster.deadline import WaitTimeoutError
from mpigossip.cluster.mpi_world import open_world
from mpigossip.graphs import graph
from mpigossip.mixing import open_mixer
from mpigossip.mixing.base import MessageLayout
from mpigossip.mixing.synchronous import Synchronous
from tests.cases import naming

pytestmark = pytest.mark.both


def opens_without_rank_1(comm, mixer):
    """Let rank 1 make the first collective call on the windows after rank 0's time limit."""
    from mpigossip.cluster import collectives
    from mpigossip.mixing.asynchronous import Asynchronous

    w = open_world()
    kind = Synchronous if mixer == "synchronous" else Asynchronous
    name = "_open_on_host" if mixer == "synchronous" else "_open_window"
    before = getattr(kind, name)
    message = None

    def late(*args):
        comm.recv(source=0)
        args[0]._comm.Ibarrier()
        raise InterruptedError

    def short(*args):
        collectives.MINIMUM_S = 0.5
        return before(*args)

    setattr(kind, name, late if w.rank == 1 else short)
    try:
        open_mixer(graph("ring", 2), MessageLayout((8,)), w, mixer, same_host="put", timeout_s=0.5)
    except WaitTimeoutError as error:
        message = str(error)
        comm.send(None, dest=1)
    except InterruptedError:
        pass
    finally:
        collectives.MINIMUM_S = 10.0
        setattr(kind, name, before)
    return message


def test_opening_a_mixer_names_the_missing_rank(ranks):
    for mixer in ("synchronous", "asynchronous"):
        message, _ = ranks(2)(opens_without_rank_1, mixer, timeout=60)
        named = naming("not all ranks", "MPI's", "rank 1")
        assert re.search(named, str(message)), (mixer, message)


def does_not_return(comm):
    from mpi4py import MPI

    from mpigossip.cluster import collectives
    from mpigossip.cluster.collectives import TimeoutComm, bounded_call

    said = []
    before = threading.excepthook
    threading.excepthook = lambda args: said.append(args.exc_value)
    collectives.MINIMUM_S = 0.1
    try:
        with bounded_call(MPI.COMM_SELF, "MPI's Win.Allocate", 0.1):
            while not said:
                time.sleep(0.02)
        made = TimeoutComm.of(comm, 30.0).Split(comm.rank % 2, 0).Dup()
    finally:
        threading.excepthook = before
        collectives.MINIMUM_S = 10.0
    return (
        str(said[0]),
        type(said[0]) is WaitTimeoutError,
        type(made) is TimeoutComm and made.timeout_s,
    )


def test_a_call_that_does_not_return_is_named(ranks):
    expected = "MPI's Win.Allocate doesn't return (waited 0.1 s)", True, 30.0
    assert ranks(2)(does_not_return) == [expected] * 2


def a_rank_stops_in_a_blocking_call(comm):
    """Let rank 2 pass the barrier before a blocking call, and then do nothing."""
    from mpigossip.cluster import collectives

    said = []
    before = threading.excepthook
    with open_world(timeout_s=3) as w:
        threading.excepthook = lambda args: said.append(str(args.exc_value))
        collectives.MINIMUM_S = 3.0
        try:
            if w.rank == 2:
                w.comm.Ibarrier().Wait()
                time.sleep(5)
                values = w.comm.allgather(None)  # so that the others return
            else:
                values = collectives.TimeoutComm.of(w.comm, 3.0).allgather(None)
        finally:
            threading.excepthook = before
            collectives.MINIMUM_S = 10.0
        assert values == [None] * 3
        return said


def test_a_rank_that_stops_in_a_blocking_call_is_named(ranks):
    first, second, third = ranks(3)(a_rank_stops_in_a_blocking_call, timeout=60)
    assert third == []
    for said in (first, second):
        assert len(said) == 1, said
        assert re.search(naming("MPI's allgather", "rank 2", "waited 3 s"), said[0])


def a_rank_leaves_after_its_part(comm):
    """Let rank 1 close its world while rank 0 still waits in a gather for rank 2."""
    from mpigossip.cluster import collectives, waits

    before = waits.DEPARTURE_GRACE_S
    waits.DEPARTURE_GRACE_S = 0.5
    try:
        with open_world(timeout_s=30) as w:
            if w.rank == 2:
                w.comm.Ibarrier().Wait()
                time.sleep(5)
                return w.comm.gather(None)
            return collectives.TimeoutComm.of(w.comm, 30.0).gather(w.rank)
    finally:
        waits.DEPARTURE_GRACE_S = before


def test_a_rank_that_leaves_after_its_part_of_a_blocking_call_ends_no_job(ranks):
    assert ranks(3)(a_rank_leaves_after_its_part, timeout=60) == [[0, 1, None], None, None]


def calls_while_mixers_open(comm):
    """Return the names of blocking calls without and with a limit while mixers open."""
    from mpi4py import MPI

    from mpigossip.cluster import collectives
    from mpigossip.cluster.mpi_world import MPIWorld

    inside = []
    plain = []
    limited = []
    joined = collectives.bounded_call

    @contextlib.contextmanager
    def entered(*args):
        with joined(*args):
            inside.append(args)
            yield
            inside.pop()

    def seen(name):
        def call(self, *args, **options):
            (limited if inside else plain).append(name)
            made = getattr(MPI.Intracomm, name)(self, *args, **options)
            return Seen(made) if isinstance(made, MPI.Intracomm) else made

        return call

    names = (*collectives.BLOCKING, "Split_type")
    Seen = type("Seen", (MPI.Intracomm,), {name: seen(name) for name in names})
    with MPIWorld(Seen(comm)) as world, pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "bounded_call", entered)
        plain.clear()
        for mixer, options in (
            ("synchronous", {"same_host": "read"}),
            ("synchronous", {"same_host": "put"}),
            ("synchronous", {"exchange": "messages"}),
            ("asynchronous", {}),
        ):
            open_mixer(graph("ring", 2), MessageLayout((8,)), world, mixer, **options).close()
    return plain, sorted(set(limited))


def test_no_call_blocks_without_a_limit_as_mixers_open(ranks):
    for plain, limited in ranks(2)(calls_while_mixers_open):
        assert not plain and {"Dup", "Split_type", "allgather"} <= set(limited), (plain, limited)


class FakeWindow:
    """A window that records the calls on it."""

    def __init__(self, calls):
        self.calls = calls

    def Unlock_all(self):  # noqa: N802 - a name of MPI
        self.calls.append(("unlock", self))

    def Free(self):  # noqa: N802 - a name of MPI
        self.calls.append(("free", self))


@pytest.mark.parametrize("other_rank", [2, 1])
def test_open_windows_are_freed_if_all_ranks_have_equally_many(monkeypatch, other_rank):
    from mpigossip.cluster import collectives

    calls = []
    windows = [FakeWindow(calls), FakeWindow(calls)]
    monkeypatch.setattr(collectives, "open_windows", [])
    collectives.register_windows(windows)
    collectives.register_windows(windows[:1])  # registered already

    class Comm:
        @staticmethod
        def Allreduce(_, counts, op):  # noqa: N802 - a name of MPI
            counts[:] = [min(counts[0], other_rank), min(counts[1], -other_rank)]

    collectives.free_open_windows(Comm)
    freed = [(name, window) for window in windows for name in ("unlock", "free")]
    assert calls == (freed if other_rank == 2 else [])
    assert len(collectives.open_windows) == (0 if other_rank == 2 else 2)

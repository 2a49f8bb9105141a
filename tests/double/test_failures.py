"""What goes wrong on demand: told in words, at once, and followed by the right way or the end."""

import contextlib
import os

import pytest
import torch

from tests.double import active
from tests.mixing.device.test_windows import compare

pytestmark = pytest.mark.skipif(not active(), reason="needs the double: python -m tests.double")
AWARE = "MPICH_GPU_SUPPORT_ENABLED"


@contextlib.contextmanager
def failing(what, aware=False):
    """These calls fail in this process; ``aware``: MPI says that it takes GPU memory."""
    from tests.double import failures

    failures.forget()
    given = {"MPIGOSSIP_DOUBLE_FAILS": what} | ({AWARE: "1"} if aware else {})
    os.environ.update(given)
    try:
        yield
    finally:
        for name in given:
            del os.environ[name]


def proven_on(comm, what, rank, devices):
    """The proof, where these calls fail on one rank; verdict, reason and seconds."""
    import time

    from mpigossip.mixing.device import aware

    began = time.perf_counter()
    with failing(what if comm.rank == rank else "", aware=True):
        found = aware.proven(comm, [torch.device(name) for name in devices], 20)
    return *found, time.perf_counter() - began


def test_every_slots_device_is_proven(ranks):
    for able, why, _ in ranks(2)(proven_on, "", 0, ["cuda:0", "cuda:1"]):
        assert able and "every slot" in why


@pytest.mark.parametrize(
    "what, named",
    [
        ("put:2", ["a put of GPU memory failed on cuda:1 (rank 1)", "MPI_ERR_RMA_RANGE"]),
        ("lost put:2", ["cuda:1 (rank 1)"]),
        ("put alone", ["in a process of its own it ended with code 1", "MPI_ERR_RMA_RANGE"]),
        ("crash alone:2", ["in a process of its own it ended with SIGSEGV"]),
        ("lost put alone", ["in a process of its own a put into memory of cuda:0", "wrong data"]),
        ("allocation:2", ["cudaMalloc of 2 MiB for windows on cuda:1", "out of memory"]),
    ],
)
def test_what_fails_on_one_rank_is_refused_on_all_at_once(ranks, what, named):
    if what.startswith("lost put:"):  # it is the left neighbour's inbox that stays empty
        named = ["cuda:1 (rank 0)", "a put brought wrong data"]
    found = ranks(2)(proven_on, what, 1, ["cuda:0", "cuda:1"])
    for able, why, seconds in found:
        assert not able and all(text in why for text in named), why
        assert seconds < 60
    assert found[0][1] == found[1][1]


def windows(comm, what, rank, ways, aware):
    with failing(what if comm.rank == rank else "", aware):
        return compare(comm, ["exponential", "complete"], *ways, 8, "fp32", 4096, 0, "cuda:0")


@pytest.mark.parametrize(
    "what, ways, aware, near, named",
    [
        ("put", ("put", "auto"), True, "host", "MPI_ERR_RMA_RANGE"),
        ("ipc", ("read", "auto"), False, "host", "cudaErrorNotSupported"),
        ("allocation", ("read", "auto"), False, "host", "out of memory"),
        ("peer", ("read", "auto"), False, "host", "other bytes than its owner has"),
        ("pin", ("put", "host"), False, "host", "cudaHostRegister"),
    ],
)
def test_an_exchange_goes_another_way_with_the_same_bits(ranks, what, ways, aware, near, named):
    results = ranks(2)(windows, what, 0, ways, aware, timeout=120)
    for found, routes in results:
        assert found and not any(found.values()), (found, routes)
        assert all(route.startswith(near) for route in routes.values()), routes
    assert named in str(results[0][1]), results[0][1]

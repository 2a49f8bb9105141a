"""Fixtures for all tests: `ranks` (functions on MPI ranks) and `mpirun` (command lines on them)."""

import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from tests import launch, rankpool


def pytest_configure() -> None:
    """SIGTERM (of `timeout`, of a scheduler) ends the session like Ctrl-C: fixtures clear up."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what needs an MPI launcher, so that `-m mpi` is that lane and nobody must remember."""
    for item in items:
        if {"ranks", "mpirun", "mpistart"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("mpi")


@pytest.fixture(scope="session")
def ranks() -> Iterator[rankpool.Ranks]:
    """`ranks(n)(function, *args, timeout=60)`: list of n results of `function(comm, *args)`.

    The function stands at a module's top level and imports MPI inside; arguments and results are
    pickled. A rank that raises, dies or stays silent fails the test with its traceback.
    """
    launch.launcher()  # skips where there is none
    pools = rankpool.Ranks()
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def mpirun() -> Callable:
    """`mpirun(n, args, timeout=60, cwd=None, env=None)`: a CompletedProcess with text output.

    n = 0 runs the command without a launcher. Processes that outlive it fail the test.
    """
    launch.launcher()
    return launch.mpirun


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums of this process as those of ranks, which have one thread of torch each."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def mpistart() -> Iterator[Callable[..., launch.Launch]]:
    """`mpistart(n, args, cwd=None, env=None)`: a running `Launch`, for tests that signal or kill.

    It has `.ranks()` (process ids), `.process`, `.output()` and `.finish(timeout)`.
    """
    launch.launcher()
    started: list[launch.Launch] = []

    def start(*args, **kwargs) -> launch.Launch:
        started.append(launch.Launch(*args, **kwargs))
        return started[-1]

    yield start
    for one in started:
        one.close()

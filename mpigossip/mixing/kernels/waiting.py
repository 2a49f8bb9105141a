"""Waits for MPI requests in C, without Python's interpreter lock, which the computing thread needs.

Each test of a request from Python takes that lock, and a thread that waits for a lock on a busy
host loses its core. If the native library is missing, Python tests the requests.
"""

import contextlib
import ctypes
import os
from collections.abc import Iterable
from functools import cache

from mpi4py import MPI

from mpigossip.cluster.deadline import SHORTEST_S, SPIN_S
from mpigossip.mixing.kernels import native

LONGEST_S = 0.003
"""Longest sleep between two tests, in seconds. Sleeps become longer during a wait, because each
test costs processor time; the longest one is reached after a wait of six times its length."""
SLICE_S = 0.05
"""Longest time in C, in seconds, after which Python handles signals and deadlines."""


@cache
def available() -> bool:
    """Return whether requests can be waited for in C."""
    return hasattr(native.library(), "mpigossip_wait") and _test() is not None


@cache
def _test() -> int | None:
    """Return the address of the function MPI_Test that mpi4py calls; None if it is not found.

    It is the global symbol of the process, which a profiling tool may have replaced. If there is
    none, it is the symbol of the MPI library that mpi4py has loaded.
    """
    for name in (None, MPI.__file__):
        with contextlib.suppress(AttributeError):
            return ctypes.cast(ctypes.CDLL(name).MPI_Test, ctypes.c_void_p).value
    return None


def wait_for_requests(
    requests: Iterable[MPI.Request],
    *,
    need: int | None = None,
    wake: int = -1,
    spin: float = SPIN_S,
    shortest: float = SHORTEST_S,
    longest: float = LONGEST_S,
    limit: float = SLICE_S,
) -> bool:
    """Wait until ``need`` requests are complete, but at most ``limit`` seconds.

    The wait also ends if the file ``wake`` can be read or a signal has arrived. Return True
    afterwards; if requests can't be waited for in C, return False at once.

    :param requests: requests of MPI
    :param need: number of requests that must be complete; None: all requests
    :param wake: file descriptor that ends the wait when it can be read; −1: none
    :param spin: seconds of testing without sleep
    :param shortest: shortest sleep between two tests after that, in seconds
    :param longest: longest sleep between two tests, in seconds
    :param limit: longest wait in seconds
    :raises MPI.Exception: if a request fails
    """
    if not available():
        return False
    addresses = [MPI._addressof(request) for request in requests]
    count = len(addresses)
    error = native.library().mpigossip_wait(
        _test(),
        (ctypes.c_void_p * count)(*addresses),
        count,
        count if need is None else need,
        wake,
        spin,
        shortest,
        longest,
        limit,
    )
    if error:
        raise MPI.Exception(error)
    return True


class Bell:
    """Pipe by which any thread can end the call of :func:`wait_for_requests` in another thread.

    The attribute ``wake`` is the file descriptor to pass to :func:`wait_for_requests`.
    """

    def __init__(self) -> None:
        self.wake, self._ring = os.pipe()
        for end in (self.wake, self._ring):
            os.set_blocking(end, False)

    def ring(self) -> None:
        """End the current wait, or the next one if no thread waits now."""
        if self.wake >= 0:
            with contextlib.suppress(BlockingIOError):  # the pipe is full of earlier rings
                os.write(self._ring, b"!")

    def clear(self) -> None:
        """Empty the pipe; called by the thread that waits."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake, 1 << 12)

    def close(self) -> None:
        if self.wake >= 0:
            os.close(self.wake)
            os.close(self._ring)
            self.wake = -1

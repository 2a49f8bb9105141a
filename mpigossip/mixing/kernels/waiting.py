"""Waiting for MPI requests in C: without the interpreter's lock, which the computing thread needs.

Each look at MPI from Python takes that lock, and whoever waits for a lock on a busy machine loses
its core. Without the native library Python looks.
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
"""Seconds of the longest sleep, reached after six times as long; each look costs a core time."""
SLICE_S = 0.05
"""Seconds after which Python looks at signals and deadlines."""


@cache
def available() -> bool:
    """Return whether waiting in C is to be had here."""
    return hasattr(native.library(), "mpigossip_wait") and _test() is not None


@cache
def _test() -> int | None:
    """Address of the MPI_Test that mpi4py calls: a global one, as of a tool, else its library's."""
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
    """Until ``need`` of the requests (unset: all) are complete, or something else is to be seen.

    That is: the file ``wake`` can be read, a signal came, or ``limit`` seconds are over. ``spin``
    seconds without sleep, then sleeps from ``shortest`` to ``longest``. Raises MPI.Exception.
    False, at once, where there is no native library.
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
    """What wakes a thread out of :func:`rest`: a pipe, rung by any thread."""

    def __init__(self) -> None:
        self.wake, self._ring = os.pipe()
        for end in (self.wake, self._ring):
            os.set_blocking(end, False)

    def ring(self) -> None:
        """Wake whoever rests on it now, or the next who does."""
        if self.wake >= 0:
            with contextlib.suppress(BlockingIOError):  # full of rings that nobody heard
                os.write(self._ring, b"!")

    def heard(self) -> None:
        """Quiet again; called by who rests on it."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake, 1 << 12)

    def close(self) -> None:
        if self.wake >= 0:
            os.close(self.wake)
            os.close(self._ring)
            self.wake = -1

"""Errors of the file system for single members: calls of `os` fail at random."""

import contextlib
import errno
import io
import os
import random
import threading
import time
from collections.abc import Iterator
from unittest import mock

from mpigossip.members import records

ERRORS = (
    errno.EACCES,
    errno.ENOTCONN,
    errno.ESHUTDOWN,
    errno.EKEYEXPIRED,
    errno.EINTR,
    errno.ENOMEM,
    errno.EIO,
    errno.ESTALE,
    errno.ENOENT,
)
OPERATIONS = ("open", "read", "list", "link", "unlink", "fsync", "write")
OUTAGE = (errno.ENOTCONN, errno.EIO, errno.ESTALE)
"""Errors of all operations at once."""
IN_LEASES = (0.0, 0.5, 3.0)
"""Durations of a fault: a single operation; shorter than a lease; longer than a lease."""


class Faults:
    """Faults of one member's disk: one at a time, with some hundred operations in between."""

    def __init__(self, seed: float, lease_s: float, rate: float = 0.01):
        """Prepare the faults of one member.

        :param seed: seed of the random numbers
        :param lease_s: lease in seconds, the unit of the durations of faults
        :param rate: probability with which an operation begins a fault
        """
        self.chance = random.Random(seed)
        self.lease_s = lease_s
        self.rate = rate
        self.operation = ""
        self.number = 0
        self.until = 0.0
        self.once = False
        self.path = ""
        """The only file that can't be opened; "": all files."""
        self.counts: dict[str, int] = {}

    def check(self, operation: str, path: str) -> None:
        """Raise OSError if this operation fails at present."""
        now = time.monotonic()
        if now >= self.until and not self.once and self.chance.random() < self.rate:
            self._begin(operation, path, now)
        if not (self.once or now < self.until) or self.operation not in (operation, "all"):
            return
        if self.path and self.path != path:
            return
        if self.number == errno.ENOENT and is_new(path):
            return
        self.once = False
        name = f"{operation} {errno.errorcode[self.number]}"
        self.counts[name] = self.counts.get(name, 0) + 1
        raise OSError(self.number, os.strerror(self.number), path)

    def _begin(self, operation: str, path: str, now: float) -> None:
        """Choose a fault: an outage of the folder, of an operation, or of the present file."""
        if self.chance.random() < 0.2:
            self.operation, self.number, self.path = "all", self.chance.choice(OUTAGE), ""
        else:
            self.operation = self.chance.choice([operation, *OPERATIONS])
            self.number = self.chance.choice(ERRORS)
            alone = self.operation == operation and self.chance.random() < 0.5
            self.path = path if alone else ""
            if self.number == errno.ENOENT and self.operation != "open":
                self.operation = "open"
                self.path = ""
        leases = self.chance.choice(IN_LEASES)
        self.once = not leases
        self.until = now + leases * self.lease_s


def is_new(path: str) -> bool:
    """Return whether this file is unpublished, so that only its member knows it."""
    return path.split("/")[-2:-1] == ["tmp"]


here = threading.local()
"""Thread-local storage: ``faults`` belong to the member whose disk the thread used last."""


def _wrap(function, operation):
    """Return a function of `os` that may fail if a member with faults calls it."""

    def wrapped(path, *more, **settings):
        faults = getattr(here, "faults", None)
        if faults is not None and (operation == "read") == isinstance(path, int):
            name = os.fspath(path) if not isinstance(path, int) else here.path
            if operation != "open" or os.path.lexists(name) or is_new(name):
                faults.check(operation, name)
        if operation == "open" and not isinstance(path, int):
            here.path = os.fspath(path)
        return function(path, *more, **settings)

    return wrapped


def _wrap_descriptor(function, operation):
    """Return a function of `os` for a descriptor that may fail, as :func:`_wrap` does."""

    def wrapped(descriptor, *more):
        faults = getattr(here, "faults", None)
        if faults is not None:
            faults.check(operation, getattr(here, "path", ""))
        return function(descriptor, *more)

    return wrapped


@contextlib.contextmanager
def injected() -> Iterator[None]:
    """Inject the faults of members' disks; other threads are not affected."""
    with contextlib.ExitStack() as stack:
        for name, operation in (
            ("open", "open"),
            ("link", "link"),
            ("unlink", "unlink"),
            ("listdir", "list"),
        ):
            stack.enter_context(mock.patch.object(os, name, _wrap(getattr(os, name), operation)))
        for name, operation in (("fsync", "fsync"), ("pwrite", "write"), ("preadv", "read")):
            wrapped = _wrap_descriptor(getattr(os, name), operation)
            stack.enter_context(mock.patch.object(os, name, wrapped))
        stack.enter_context(mock.patch.object(io, "open", _wrap(io.open, "open")))
        reads = _wrap(open, "read")
        stack.enter_context(mock.patch.object(records, "open", reads, create=True))
        yield

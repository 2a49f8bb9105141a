"""Counts of the host's waits for the streams of the double, and of copies from and to the host."""

import contextlib
import threading
import traceback
from collections import Counter
from collections.abc import Iterator

from tests.double import cuda, tensors


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count waits inside a block, by the innermost function of the package that waits."""
    waits: Counter[str] = Counter()
    synchronize = cuda.Stream.synchronize

    def counting(stream: cuda.Stream) -> None:
        frames = [f for f in traceback.extract_stack() if "/mpigossip/" in f.filename]
        waits[frames[-1].name if frames else ""] += 1
        synchronize(stream)

    cuda.Stream.synchronize = counting
    try:
        yield waits
    finally:
        cuda.Stream.synchronize = synchronize


@contextlib.contextmanager
def host_copies() -> Iterator[list[tuple[int, bool]]]:
    """List copies between host and devices by this thread: bytes, and if host memory is locked."""
    thread = threading.current_thread()
    copies: list[tuple[int, bool]] = []
    perform = tensors.perform

    def noting(func, args, kwargs):
        result = perform(func, args, kwargs)
        if func in tensors.COPIES and threading.current_thread() is thread:
            operands = tensors.tensors([*args, *kwargs.values(), result])
            on_host = [t for t in operands if not isinstance(t, tensors.OnDevice) and t.dim()]
            if on_host and len(on_host) < len(operands):
                locked = all(hasattr(t.untyped_storage(), "locked") for t in on_host)
                copies.append((on_host[0].nbytes, locked))
        return result

    tensors.perform = noting
    try:
        yield copies
    finally:
        tensors.perform = perform

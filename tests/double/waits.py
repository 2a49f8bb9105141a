"""Count of the host's waits for the streams of the double, by the function that waits."""

import contextlib
import traceback
from collections import Counter
from collections.abc import Iterator

from tests.double import cuda


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

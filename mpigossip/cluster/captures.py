"""Order between captures of CUDA graphs and the CUDA calls of this package's threads.

In torch's default mode, "global", many CUDA calls of other threads end a capture with an error. The
threads that exchange therefore finish their CUDA calls before such a capture begins. On AMD GPUs
with ROCm 7.0 to 7.2, the query of an event ends a capture in any mode, so the threads of this
package must not query events during a capture (:func:`between_captures`).
"""

import contextlib
import threading
from collections.abc import Iterator
from functools import wraps
from typing import Any, Protocol
from weakref import WeakSet

_lock = threading.Lock()
_capturing: WeakSet[Any] = WeakSet()
"""CUDA graphs that are being captured; a graph that the program deletes meanwhile is removed."""


class Exchanger(Protocol):
    """Object with exchanges in flight, such as a mixer."""

    def settle(self) -> None:
        """Wait until no other thread calls CUDA for an exchange that has begun."""


_exchanging: WeakSet[Exchanger] = WeakSet()


def settle_before_captures(mixer: Exchanger) -> None:
    """Call ``mixer.settle()`` before each capture in the mode "global", while ``mixer`` exists.

    :param mixer: object with exchanges in flight; this module does not keep it alive
    """
    observe_captures()
    _exchanging.add(mixer)


@contextlib.contextmanager
def between_captures() -> Iterator[bool]:
    """Return a context manager in which no capture begins.

    The value of ``with … as`` is True if no capture is in progress, and False otherwise.
    """
    with _lock:
        yield not _capturing


def observe_captures() -> None:
    """Let `torch.cuda.CUDAGraph` report the beginning and the end of captures to this module.

    This replaces two methods of the class; later calls have no effect.
    """
    import torch

    graph_class: Any = torch.cuda.CUDAGraph
    if hasattr(graph_class, "_mpigossip_observes"):
        return
    capture_begin = graph_class.capture_begin
    capture_end = graph_class.capture_end

    @wraps(capture_begin)
    def begin(graph: Any, *args: Any, **options: Any) -> Any:
        default = args[1] if len(args) > 1 else "global"
        if options.get("capture_error_mode", default) == "global":
            for mixer in [*_exchanging]:
                mixer.settle()
        with _lock:
            _capturing.add(graph)
        try:
            return capture_begin(graph, *args, **options)
        except BaseException:
            with _lock:
                _capturing.discard(graph)
            raise

    @wraps(capture_end)
    def end(graph: Any, *args: Any, **options: Any) -> Any:
        try:
            return capture_end(graph, *args, **options)
        finally:
            with _lock:
                _capturing.discard(graph)

    graph_class.capture_begin = begin
    graph_class.capture_end = end
    graph_class._mpigossip_observes = True

"""The names of torch.cuda over devices that aren't there; streams order only what is checked."""

from __future__ import annotations

import itertools
import os
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import torch

from tests.double import tensors
from tests.double.checker import HOST, Clock, checker, spans
from tests.double.failures import fails

COUNT = int(os.environ.get("MPIGOSSIP_DOUBLE", "8"))
_numbers = itertools.count(1)
_here = threading.local()


def _index(device=None) -> int:
    if device is None or (isinstance(device, torch.device) and device.index is None):
        return current_device()
    return device if isinstance(device, int) else torch.device(device).index or 0


class Stream:
    """A timeline; number 0 is a device's default stream."""

    def __init__(self, device=None, priority=0, *, number=None):
        """``number``: given only for default streams."""
        self.device = torch.device("cuda", _index(device))
        self.number = next(_numbers) if number is None else number
        self.cuda_stream = self.device.index << 32 | self.number
        self.name = f"cuda:{self.device.index} stream {self.number}"
        by_address[self.cuda_stream] = self

    def __eq__(self, other) -> bool:
        return isinstance(other, Stream) and self.cuda_stream == other.cuda_stream

    def __hash__(self) -> int:
        return self.cuda_stream

    def wait_event(self, event) -> None:
        """What is given to this stream from now on comes after the event."""
        if fails("wait_event"):
            return
        checker.know(self.name, event.clock)

    def wait_stream(self, stream) -> None:
        """What is given to this stream from now on comes after all in the other."""
        self.wait_event(stream.record_event())

    def record_event(self, event=None):
        """An event behind all in this stream."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """The host waits for all in this stream."""
        if tensors.recording.into is not None:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        checker.know(HOST, checker.clock(self.name))

    def query(self) -> bool:
        """Work is done at once."""
        return True


by_address: dict[int, Stream] = {}
_defaults: dict[int, Stream] = {}


class Event:
    """A point of a stream."""

    def __init__(self, enable_timing=False, blocking=False, interprocess=False):
        """Not recorded."""
        self.clock: Clock = {}

    def record(self, stream=None) -> None:
        """Take the stream's present place."""
        if not fails("record"):
            self.clock = checker.clock((stream or current_stream()).name)

    def synchronize(self) -> None:
        """The host waits."""
        if not fails("synchronize"):
            checker.know(HOST, self.clock)

    def wait(self, stream=None) -> None:
        """A stream waits."""
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        """Work is done at once, unless it is meant to hang."""
        if fails("lost"):
            raise RuntimeError("CUDA error: unspecified launch failure")
        return not fails("hang")

    def elapsed_time(self, other) -> float:
        """Milliseconds."""
        return 1.0


def current_device() -> int:
    return tensors.guard.current_device()


def set_device(device) -> None:
    if _index(device) >= COUNT:
        raise RuntimeError(f"CUDA error: invalid device ordinal {device}")
    tensors.guard.set_device(_index(device))


@contextmanager
def device(which):
    """A device is the current one of this thread."""
    before = current_device()
    set_device(which)
    try:
        yield
    finally:
        set_device(before)


def default_stream(device=None) -> Stream:
    index = _index(device)
    if index not in _defaults:
        _defaults[index] = Stream(index, number=0)
    return _defaults[index]


def current_stream(device=None) -> Stream:
    index = _index(device)
    return getattr(_here, "streams", {}).get(index) or default_stream(index)


def set_stream(stream) -> None:
    if stream is not None:
        _here.streams = {**getattr(_here, "streams", {}), stream.device.index: stream}
        set_device(stream.device)


@contextmanager
def on_stream(stream):
    """torch.cuda.stream: device and stream are current ones inside."""
    if stream is None:
        yield
        return
    at, before = current_device(), current_stream(stream.device)
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)
        set_device(at)


def synchronize(device=None) -> None:
    index = _index(device)
    for stream in [s for s in by_address.values() if s.device.index == index]:
        stream.synchronize()


class CUDAGraph:
    """Operations as they were recorded, done again in the same memory."""

    def __init__(self, keep_graph=False):
        """Empty."""
        self.recorded: list = []

    def replay(self) -> None:
        """All of them, on the current stream."""
        for again in self.recorded:
            again()


@contextmanager
def graph(cuda_graph, pool=None, stream=None, capture_error_mode="global"):
    """Operations of this thread are recorded."""
    stream = stream or Stream()
    at, before = current_device(), current_stream(stream.device)
    set_stream(stream)
    tensors.recording.into = cuda_graph.recorded
    try:
        if fails("capture"):
            raise RuntimeError("CUDA error: operation failed due to a previous error in capture")
        yield
    finally:
        tensors.recording.into = None
    # not after an error: torch's own context leaves its stream current where capture_end fails
    set_stream(before)
    set_device(at)


def told(operation, index, read, written, stream=None) -> None:
    """An operation was done on a device."""
    stream = stream or current_stream(index)
    checker.begin(stream.name)
    for writes, touched in ((False, read), (True, written)):
        for one in touched:
            key = checker.owned(one)
            checker.touch(stream.name, key, spans(one), writes, operation)


def between(source: int, target: int) -> None:
    """A copy from device to device stands in both current streams, as torch orders it."""
    if source != target:
        one, two = current_stream(source), current_stream(target)
        one.wait_stream(two)
        two.wait_stream(one)


def backward(original):
    def plain(*args, **kwargs):
        with torch.autograd.set_multithreading_enabled(False):
            return original(*args, **kwargs)

    return plain


def runtime():
    """torch.cuda.cudart()."""
    return SimpleNamespace(
        cudaHostRegister=lambda *_: 1 if fails("pin") else 0,
        cudaHostUnregister=lambda *_: 0,
    )


def install() -> None:
    """Put the names in torch's place."""
    tensors.install(told, between, checker.owned)
    torch.version.cuda = "13.0"
    torch.autograd.backward = backward(torch.autograd.backward)
    torch.autograd.grad = backward(torch.autograd.grad)
    torch.Tensor.record_stream = lambda self, stream: None
    generator = SimpleNamespace(
        graphsafe_set_state=lambda state: None, manual_seed=torch.default_generator.manual_seed
    )
    names = {
        "is_available": lambda: True, "is_initialized": lambda: True, "_lazy_init": lambda: None,
        "device_count": lambda: COUNT, "current_device": current_device, "set_device": set_device,
        "device": device, "Stream": Stream, "Event": Event, "stream": on_stream,
        "current_stream": current_stream, "default_stream": default_stream,
        "set_stream": set_stream, "synchronize": synchronize, "CUDAGraph": CUDAGraph,
        "graph": graph, "graph_pool_handle": lambda: (0, next(_numbers)), "cudart": runtime,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "default_generators": [generator] * COUNT, "manual_seed_all": lambda seed: None,
        "is_bf16_supported": lambda *_, **__: True, "get_device_name": lambda *_: "a double",
        "is_current_stream_capturing": lambda: tensors.recording.into is not None,
        "get_device_capability": lambda *_: (9, 0), "empty_cache": lambda: None,
        "mem_get_info": lambda *_: (8 << 30, 8 << 30), "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0, "reset_peak_memory_stats": lambda *_: None,
    }  # fmt: skip
    for name, value in names.items():
        setattr(torch.cuda, name, value)

"""The names of torch.cuda for devices that do not exist; streams order only checked accesses."""

import ctypes
import itertools
import os
import threading
from collections import defaultdict
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.cuda._utils import _get_device_index

from tests.double import fails
from tests.double.checker import HOST, Timeline
from tests.double.tensors import context, recording

COUNT = int(os.environ["MPIGOSSIP_DOUBLE"])
POOL = 32
"""Streams that torch has of a device, handed out in turns; number 0 is the default one."""
guard = ctypes.CDLL(str(Path(os.environ["MPIGOSSIP_DOUBLE_FOLDER"], "guard.so")))
_numbers: dict[int, itertools.count] = defaultdict(itertools.count)
_current = threading.local()
hanging: dict[object, torch.device] = {}
"""Groups of NCCL between nodes with calls that never end, and their devices: inside a node the job
ends."""


@cache
def line(address: int) -> Timeline:
    """Return the timeline of the stream with this address."""
    return Timeline(f"cuda:{address >> 32} stream {address & 0xFFFFFFFF}")


class Stream(torch.cuda.Stream):
    """Timeline of a device."""

    def __new__(cls, *_, **__):
        return object.__new__(cls)

    def __init__(self, device=None, priority=0, *, number: int | None = None):
        index = _get_device_index(device, optional=True)
        number = next(_numbers[index]) % POOL + 1 if number is None else number
        self.device = torch.device("cuda", index)
        self.cuda_stream = index << 32 | number
        self.line = line(self.cuda_stream)

    def __eq__(self, other) -> bool:
        return isinstance(other, Stream) and self.cuda_stream == other.cuda_stream

    __hash__ = torch.cuda.Stream.__hash__

    def synchronize(self) -> None:
        if recording.into is not None:
            recording.broken = True
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        HOST.follow(self.line.clock())


class Event:
    """Point of a stream; work is done at once, unless it has to hang."""

    def __init__(self, enable_timing=False, blocking=False):
        self.clock: dict[Timeline, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        self.clock = (stream or current_stream()).line.clock()

    def wait(self, stream: Stream) -> None:
        stream.line.follow(self.clock)

    def synchronize(self) -> None:
        HOST.follow(self.clock)

    def query(self) -> bool:
        if fails("lost"):
            raise RuntimeError("CUDA error: unspecified launch failure")
        return not fails("hang")

    def elapsed_time(self, other) -> float:
        return 1.0


class CUDAGraph:
    """Recorded operations, which are repeated in the same memory."""

    def capture_begin(self, *pool, **_) -> None:
        self.recorded: list = []
        recording.into = self.recorded
        recording.broken = fails("capture")

    def capture_end(self) -> None:
        recording.into = None
        if recording.broken:
            raise RuntimeError("CUDA error: operation failed due to a previous error in capture")

    def replay(self) -> None:
        for again in self.recorded:
            again()


def current_device() -> int:  # a function of ctypes has no hash, which torch._dynamo wants
    return guard.current_device()


def exchange_device(index: int) -> int:
    """Set the current device without a context in a new thread, as in torch before 2.8."""
    if index != current_device():
        context.made = True
    return guard.exchange_device(index)


def mem_get_info(device=None) -> tuple[int, int]:
    context.made = True
    return 8 << 30, 8 << 30


def current_stream(device=None) -> Stream:
    index = _get_device_index(device, optional=True)
    return vars(_current).get(str(index)) or Stream(index, number=0)


def set_stream(stream: Stream | None) -> None:
    if stream is not None:
        vars(_current)[str(stream.device.index)] = stream
        exchange_device(stream.device.index)


def synchronize(device=None) -> None:
    index = _get_device_index(device, optional=True)
    if any(each.index == index for each in hanging.values()):
        raise RuntimeError("a device on which an NCCL call hangs is never done")
    for number in range(POOL + 1):
        Stream(device, number=number).synchronize()


def install() -> None:
    """Replace the names of torch."""
    # else a thread a device, which would have streams of its own
    one_thread = torch.autograd.set_multithreading_enabled(False)
    torch.autograd._engine_run_backward = one_thread(torch.autograd._engine_run_backward)
    torch.Tensor.record_stream = lambda self, stream: None
    torch.version.cuda = "13.0"
    torch._C._host_emptyCache = lambda: None
    torch.cuda.streams.Event = Event
    torch.distributed.is_nccl_available = lambda: True
    generator = SimpleNamespace(
        graphsafe_set_state=lambda state: None, manual_seed=torch.default_generator.manual_seed
    )
    runtime = SimpleNamespace(
        cudaHostRegister=lambda *_: int(fails("pin")), cudaHostUnregister=lambda *_: 0
    )
    answers = {
        "is_available": True,
        "is_initialized": True,
        "device_count": COUNT,
        "cudart": runtime,
        "is_bf16_supported": True,
        "get_device_name": "a double",
        "memory_allocated": 0,
        "get_device_capability": (9, 0),
        "_lazy_init": None,
        "max_memory_allocated": 0,
        "reset_peak_memory_stats": None,
        "graph_pool_handle": (0, 1),
        "empty_cache": None,
        "manual_seed_all": None,
    }
    vars(torch.cuda).update(
        {name: lambda *_, value=value, **__: value for name, value in answers.items()},
        Stream=Stream, Event=Event, CUDAGraph=CUDAGraph, synchronize=synchronize,
        mem_get_info=mem_get_info,
        current_stream=current_stream, set_stream=set_stream, current_device=current_device,
        default_stream=lambda device=None: Stream(device, number=0),
        default_generators=[generator] * COUNT,
        get_device_properties=lambda device: SimpleNamespace(
            uuid=f"GPU-{os.environ.get('MPIGOSSIP_DOUBLE_HOST', '')}{_get_device_index(device)}"
        ),
        set_device=lambda device: exchange_device(_get_device_index(device)),
        _exchange_device=exchange_device, _maybe_exchange_device=exchange_device,
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda state, device=None: torch.set_rng_state(state),
        is_current_stream_capturing=lambda: recording.into is not None,
    )  # fmt: skip

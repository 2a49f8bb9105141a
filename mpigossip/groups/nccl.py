"""The GPUs of one node under one process, through CuPy's NCCL on torch's memory.

Untested where there is no second GPU: `mpigossip doctor` runs :func:`self_test` on the node at
hand before its first training. CuPy's ROCm build has the same names over RCCL (untested).
"""

from __future__ import annotations

import faulthandler
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mpigossip.cluster.process import libraries
from mpigossip.groups.base import GroupError
from mpigossip.groups.nccl_watchdog import Watchdog
from mpigossip.groups.threads import Threads

CUT = 1 << 30
"""Elements of one broadcast: older CuPys count them in 32 bits."""
REMEDY = (
    "run with NCCL_DEBUG=INFO to see the cause; `nvidia-smi` shows whether a GPU was lost, and "
    'node.devices = "cuda:0" trains on one GPU without NCCL'
)


def missing() -> str | None:
    """Why NCCL can't be used here; None where it can."""
    major = (torch.version.cuda or "13").split(".")[0]
    wheel = "a ROCm build of CuPy" if torch.version.hip else f"cupy-cuda{major}x"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy's of a missing library; said below
            from cupy.cuda import nccl
    except ImportError as error:
        return (
            f"several GPUs under one rank need CuPy with NCCL, which can't be imported ({error}); "
            f"pip install {wheel}, or name one GPU a rank"
        )
    if not nccl.available:
        return (
            "this CuPy finds no NCCL (RCCL); install it beside (pip install "
            f"nvidia-nccl-cu{major}), or name one GPU a rank"
        )
    return None


def clashes(libraries: Sequence[str], torch_cuda: str | None, cupy_cuda: int) -> list[str]:
    """What torch and CuPy can't share in one process, with the remedy.

    ``libraries``: paths of loaded libraries; ``torch_cuda``: such as "13.0"; ``cupy_cuda``: the
    runtime's number, such as 12080.
    """
    found = []
    copies = sorted({path for path in libraries if re.search(r"/lib[nr]ccl\.so", path)})
    if len(copies) > 1:
        found.append(
            f"{len(copies)} copies of NCCL are loaded in this process ({', '.join(copies)}): "
            "collectives hang or fail when they meet; keep one, torch's nvidia-nccl wheel, and "
            "take the other from LD_LIBRARY_PATH or the environment"
        )
    if torch_cuda and int(torch_cuda.split(".")[0]) != cupy_cuda // 1000:
        found.append(
            f"torch was built for CUDA {torch_cuda} and CuPy for CUDA {cupy_cuda // 1000}: two "
            f"CUDA runtimes don't share memory; pip install cupy-cuda{torch_cuda.split('.')[0]}x "
            "in place of this CuPy"
        )
    return found


class Nccl(Threads):
    """L slots on L GPUs: a thread each for eager models, NCCL calls of all slots from one thread.

    Each call is one NCCL group on communication streams that wait for the devices' default
    streams and are waited for by them; the host doesn't wait. Sums are in NCCL's order: equal to
    the CPU's within rounding.
    """

    _broken = False

    def __init__(self, devices: Sequence[str], threads: int = 1, timeout_s: float = 300.0):
        """``devices``: different GPUs, such as ("cuda:0", "cuda:1"). Raises GroupError.

        ``timeout_s``: after which a call that isn't done ends the job (:mod:`.watchdog`).
        """
        reason = missing()
        if reason:
            raise GroupError(f"node.devices {', '.join(devices)}: {reason}")
        import cupy

        self._nccl: Any = cupy.cuda.nccl
        self._numbers = [torch.device(device).index or 0 for device in devices]
        # before the first call: with two copies of NCCL it could hang
        version = cupy.cuda.runtime.runtimeGetVersion()
        if found := clashes(libraries(), torch.version.cuda, version):
            raise GroupError("; ".join(found))
        super().__init__(len(devices), threads, devices)
        try:
            with self._named("initAll"), given_up_after(timeout_s):
                self._comms = self._nccl.NcclCommunicator.initAll(self._numbers)
        except BaseException:
            super().close()
            raise
        # above the compute stream: a slot that waits for an average holds up the others
        self._streams = [torch.cuda.Stream(device, priority=-1) for device in devices]
        self._make_current(0)  # NCCL may have left another one
        self._watchdog = Watchdog(self._comms, self.devices, timeout_s, REMEDY)
        self._watchdog.start()

    @contextmanager
    def _named(self, call: str) -> Iterator[None]:
        """Errors of NCCL and CUDA with the call, the devices and a remedy."""
        try:
            yield
        except (RuntimeError, KeyError) as error:
            # NcclError (KeyError where CuPy has no name for the code), or torch's of a lost device
            self._broken = True
            if isinstance(error, GroupError):
                raise
            where = ", ".join(self.devices)
            raise GroupError(f"NCCL {call} over {where} failed: {error}; {REMEDY}") from error

    def _together(self, call: str, work: Callable[[int, Any, int], None]) -> None:
        """``work(slot, communicator, stream)`` for all slots in one NCCL group."""
        with self._named(call):
            self._watchdog.check()
            for device, stream, comm in zip(self.devices, self._streams, self._comms, strict=True):
                comm.check_async_error()
                stream.wait_stream(torch.cuda.default_stream(device))
            before = [stream.record_event() for stream in self._streams]
            self._nccl.groupStart()
            try:
                for slot, comm in enumerate(self._comms):
                    with torch.cuda.device(self._numbers[slot]):
                        work(slot, comm, self._streams[slot].cuda_stream)
            finally:
                self._nccl.groupEnd()
            behind = [stream.record_event() for stream in self._streams]
            self._watchdog.track(call, before, behind)

    def _rejoin(self) -> None:
        for device, stream in zip(self.devices, self._streams, strict=True):
            torch.cuda.default_stream(device).wait_stream(stream)

    def _scale(self, slot: int, array: torch.Tensor) -> None:
        with torch.cuda.stream(self._streams[slot]):
            array.mul_(1 / self.slots)

    def reduce_scatter_mean(self, full: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Shard l, in its place in slot l's array; P must be a multiple of L."""
        rows, size = full[0].shape
        width, nccl = size // self.slots, self._nccl
        if width * self.slots != size:
            raise GroupError(
                f"{size} columns can't be cut into {self.slots} equal shards; pad the vector"
            )
        parts = [array.chunk(self.slots, dim=1)[slot] for slot, array in enumerate(full)]

        def work(slot: int, comm, stream: int) -> None:
            for row in range(rows):
                source, target = full[slot][row].data_ptr(), parts[slot][row].data_ptr()
                comm.reduceScatter(source, target, width, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream)

        self._together("reduceScatter", work)
        for slot, part in enumerate(parts):
            self._scale(slot, part)
        self._rejoin()
        return parts

    def all_gather(self, shards: Sequence[torch.Tensor], full: Sequence[torch.Tensor]) -> None:
        """Every shard into all of ``full``; in place where a shard is a view of it."""
        rows, size = full[0].shape
        width, nccl = size // self.slots, self._nccl

        def work(slot: int, comm, stream: int) -> None:
            for row in range(rows):
                source, target = shards[slot][row].data_ptr(), full[slot][row].data_ptr()
                comm.allGather(source, target, width, nccl.NCCL_FLOAT32, stream)

        self._together("allGather", work)
        self._rejoin()

    def reduce_mean(self, full: Sequence[torch.Tensor]) -> torch.Tensor:
        """The mean in slot 0's array, any P; the other arrays keep their contents."""
        nccl = self._nccl

        def work(slot: int, comm, stream: int) -> None:
            array = full[slot]
            comm.reduce(
                array.data_ptr(), array.data_ptr(), array.numel(),
                nccl.NCCL_FLOAT32, nccl.NCCL_SUM, 0, stream,
            )  # fmt: skip

        self._together("reduce", work)
        self._scale(0, full[0])
        self._rejoin()
        return full[0]

    def broadcast(self, full: Sequence[torch.Tensor]) -> None:
        """Slot 0's array into all others."""
        nccl = self._nccl

        def work(slot: int, comm, stream: int) -> None:
            place, size = full[slot].data_ptr(), full[slot].numel()
            for at in range(0, size, CUT):
                here, count = place + 4 * at, min(CUT, size - at)
                comm.broadcast(here, here, count, nccl.NCCL_FLOAT32, 0, stream)

        self._together("broadcast", work)
        self._rejoin()

    def close(self) -> None:
        """Wait for the streams, then end threads and communicators; broken ones are cut off."""
        for stream in () if self._broken else self._streams:
            stream.synchronize()  # the watchdog looks on
        self._watchdog.close()
        for comm in self._comms:
            _ = comm.abort() if self._broken else comm.destroy()
        self._streams, self._comms = [], []
        super().close()


@contextmanager
def given_up_after(seconds: float) -> Iterator[None]:
    """Ends the process, and shows where it stood, when the block takes longer.

    CuPy makes communicators without leaving the interpreter's lock: no Python thread would run.
    """
    try:
        faulthandler.dump_traceback_later(seconds, exit=True)
    except (RuntimeError, ValueError, AttributeError, OSError):  # stderr is no file
        yield
        return
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def self_test(devices: Sequence[str], timeout_s: float = 60.0, width: int = 1 << 22) -> str:
    """Average known numbers over the GPUs, cut and whole; what was found, for `doctor`.

    Raises GroupError where NCCL fails or gives wrong numbers.
    """
    group, count = Nccl(devices, timeout_s=timeout_s), len(devices)
    try:
        full = [torch.empty(1, width * count, device=device) for device in devices]
        seconds = []
        for _ in range(3):  # the first also opens the connections
            _fill(devices, full)
            begin = time.perf_counter()
            group.all_gather(group.reduce_scatter_mean(full), full)
            _wait(devices)
            seconds.append(time.perf_counter() - begin)
        _check(devices, full)
        whole = [torch.empty(1, 1001, device=device) for device in devices]
        _fill(devices, whole)
        group.reduce_mean(whole)
        group.broadcast(whole)
        _check(devices, whole)
    finally:
        group.close()
    nbytes = 4 * width * count
    rate = 2 * (count - 1) / count * nbytes / min(seconds)
    return (
        f"{count} GPUs averaged {nbytes >> 20} MiB with the right result in "
        f"{min(seconds) * 1e3:.1f} ms, {rate / 1e9:.0f} GB/s out of each"
    )


def _fill(devices: Sequence[str], full: Sequence[torch.Tensor]) -> None:
    for slot, array in enumerate(full):
        array.fill_(float(slot))
    _wait(devices)


def _wait(devices: Sequence[str]) -> None:
    for device in devices:
        torch.cuda.synchronize(device)


def _check(devices: Sequence[str], full: Sequence[torch.Tensor]) -> None:
    for device, array in zip(devices, full, strict=True):
        if not bool((array == (len(devices) - 1) / 2).all()):
            raise GroupError(f"NCCL gave wrong numbers on {device}; {REMEDY}")

"""NCCL's process groups of torch: gloo moves the bytes; devices, streams and launches are checked.

A call has to come from the thread whose current device is the group's, and with several devices in
the process under the package's lock, as one that waits for a device would stop the others. Its
reads and writes are recorded on the device's NCCL stream, which waits for the current stream; in
`wait`, the current stream waits for it.
"""

import os
import threading
from collections import defaultdict
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.double import fails
from tests.double.cuda import Stream, current_device, current_stream, hanging
from tests.double.tensors import plain

SYSTEM = "NCCL error: unhandled system error"
torch_connected = launching = torch_world = None
"""The package's constructor, which makes gloo's groups here, its lock, and torch's constructor."""
devices: dict[int, set] = defaultdict(set)
"""Groups that were opened together, by their store."""


class Launching:
    """The package's lock, with the thread that holds it."""

    def __init__(self):
        self._lock = threading.Lock()
        self._holder = None

    def __enter__(self) -> None:
        self._lock.acquire()
        self._holder = threading.get_ident()

    def __exit__(self, *_) -> None:
        self._holder = None
        self._lock.release()

    def locked(self) -> bool:
        return self._lock.locked()

    def mine(self) -> bool:
        """Return whether the calling thread holds the lock; another thread's is not enough."""
        return self._holder == threading.get_ident()


def several() -> bool:
    """Return whether groups of several devices were opened together in this process."""
    return any(len(each) > 1 for each in devices.values())


class Work:
    """Calls that were launched, and the work that follows them on their stream."""

    def __init__(self, works, clock, group):
        self._clock = clock
        self._error = None
        # bytes arrive all the same
        self._hangs = fails("hang")
        self._done = threading.Event()
        if self._hangs and group.name.startswith("nodes-"):
            hanging[group] = group.device
        threading.Thread(target=self._finish, args=(works,), daemon=True).start()

    def _finish(self, works) -> None:
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            self._error = error
        self._done.set()

    def is_completed(self) -> bool:
        if fails("lost"):
            raise RuntimeError("CUDA error: unspecified launch failure")
        return self._done.is_set() and not self._hangs

    def wait(self, timeout=None) -> bool:
        """Let the stream wait. Here the host waits, because the numbers exist at once."""
        self._done.wait()
        if self._error is not None:
            raise RuntimeError(f"NCCL would wait for ever: {self._error}")
        current_stream().line.follow(self._clock)
        return True


class Group:
    """Rank of a process group on a device."""

    def __init__(self, inner: dist.ProcessGroup, device: torch.device, together: set, name: str):
        self.name = name
        self.inner = inner
        self.device = device
        self._together = together
        self.stream = Stream(device).line
        self._batch: list | None = None

    def rank(self) -> int:
        return self.inner.rank()

    def size(self) -> int:
        return self.inner.size()

    def _get_backend(self, device):
        return self

    def abort(self) -> None:
        """End the calls that hang."""
        hanging.pop(self, None)

    def shutdown(self) -> None:
        if self in hanging:
            raise RuntimeError("NCCL waits for its calls for ever")

    def _launch(self, name: str, read: list, written: list, call) -> Work:
        if fails("still"):
            threading.Event().wait()
        if fails("async"):
            raise RuntimeError("NCCL error: remote process exited or there was a network error")
        if current_device() != self.device.index:
            raise RuntimeError(f"NCCL {name}: cuda:{self.device.index} isn't current")
        if len(self._together) > 1 and os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
            raise RuntimeError(f"NCCL {name}: every launch waits for the launch of another slot")
        if len(self._together) > 1 and not launching.locked():
            raise RuntimeError(f"NCCL {name}: several devices, launched without the lock")
        for tensor in [*read, *written]:
            if tensor.device != self.device or not tensor.is_contiguous():
                raise RuntimeError(f"NCCL {name}: not whole on cuda:{self.device.index}")
        self.stream.follow(current_stream().line.clock())
        self.stream.given(f"NCCL {name}", [*map(plain, read)], [*map(plain, written)])
        return Work(call(), self.stream.clock(), self)

    def allreduce(self, tensors):
        arrays = [*map(plain, tensors)]
        return self._launch("allreduce", tensors, tensors, lambda: [self.inner.allreduce(arrays)])

    def alltoall_base(self, out, given, received, sent):
        return self._launch(
            "alltoall",
            [given],
            [out],
            lambda: [self.inner.alltoall_base(plain(out), plain(given), received, sent)],
        )

    def _reduce_scatter_base(self, out, given):
        return self._launch(
            "reduce-scatter",
            [given],
            [out],
            lambda: [self.inner._reduce_scatter_base(plain(out), plain(given))],
        )

    def _allgather_base(self, out, given):
        return self._launch(
            "all-gather",
            [given],
            [out],
            lambda: [self.inner._allgather_base(plain(out), plain(given))],
        )

    def reduce(self, tensor, root):
        return self._launch(
            "reduce", [tensor], [tensor], lambda: [self.inner.reduce(plain(tensor), root)]
        )

    def broadcast(self, tensor, root):
        read, written = ([tensor], []) if self.rank() == root else ([], [tensor])
        return self._launch(
            "broadcast", read, written, lambda: [self.inner.broadcast(plain(tensor), root)]
        )

    # -- sends and receives, which have to stand in one group of calls --------------------------

    def _start_coalescing(self, device) -> None:
        self._batch = []

    def recv(self, tensors, source, tag):
        self._point_to_point("recv", tensors, source, tag)

    def send(self, tensors, target, tag):
        self._point_to_point("send", tensors, target, tag)

    def _point_to_point(self, name, tensors, peer, tag):
        if self._batch is None:
            raise RuntimeError(f"NCCL {name}: outside of a group, a mismatch hangs unseen")
        self._batch.append((name, tensors, peer, tag))

    def _end_coalescing(self, device) -> Work:
        calls = self._batch
        self._batch = None
        read = [t for name, tensors, *_ in calls for t in tensors if name == "send"]
        written = [t for name, tensors, *_ in calls for t in tensors if name == "recv"]

        def begin() -> list:
            return [
                getattr(self.inner, name)([*map(plain, tensors)], peer, tag)
                for name, tensors, peer, tag in sorted(calls, key=lambda call: call[0] == "send")
            ]

        return self._launch("send and recv", read, written, begin)


def connected(store, place, limit: timedelta):
    """Replace the package's constructor: return gloo's group wrapped by the double's."""
    if not place.device.startswith("cuda"):
        return torch_connected(store, place, limit)
    if fails("initRank"):
        raise RuntimeError(SYSTEM)
    device = torch.device(place.device)
    torch.cuda.set_device(device)
    devices[id(store)].add(device)
    inner = torch_connected(store, place._replace(device="cpu"), limit)
    return Group(inner, device, devices[id(store)], place.group)


class Node(dist.ProcessGroup):
    """NCCL as the world of torch.distributed: the calls of FSDP2 and DTensor, on one device."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.inner = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.group = None
        kind = dist.ProcessGroup.BackendType.GLOO  # the key contains the group's name, too
        self._register_backend(torch.device("cpu"), kind, self.inner)
        self._set_default_backend(kind)

    def getBackendName(self) -> str:
        return "nccl"

    def _on(self, tensor):
        """Return the device's group, or the inner group for an operation on the CPU."""
        if tensor.device.type == "cpu":
            return self.inner
        self.group = self.group or Group(self.inner, tensor.device, {tensor.device}, "world")
        return self.group

    def _allgather_base(self, out, given, opts=None):
        return self._on(out)._allgather_base(out, given)

    def allgather(self, out, given, opts=None):
        return self.inner.allgather([[*map(plain, out[0])]], [*map(plain, given)])

    def _reduce_scatter_base(self, out, given, opts=None):
        if opts is None or opts.reduceOp == dist.ReduceOp.SUM:
            return self._on(out)._reduce_scatter_base(out, given)
        assert opts.reduceOp == dist.ReduceOp.AVG
        work = self._on(out)._reduce_scatter_base(out, given)
        work.wait()
        out.div_(self.size())
        return work

    # Missing methods go to gloo inside torch's trampoline, which holds Python's lock; gloo's
    # worker frees tensors, which needs that lock, while it holds its queue: both wait for ever.

    def allgather_into_tensor_coalesced(self, outs, givens, opts=None):
        (out,), (given,) = outs, givens  # DTensor's
        return self._allgather_base(out, given)

    def reduce_scatter_tensor_coalesced(self, outs, givens, opts=None):
        (out,), (given,) = outs, givens
        return self._reduce_scatter_base(out, given, opts)

    def allreduce(self, tensors, opts=None):
        return self._on(tensors[0]).allreduce(tensors)

    def broadcast(self, tensors, opts=None):
        root = opts.rootRank if opts else 0
        return self._on(tensors[0]).broadcast(tensors[0], root)

    def barrier(self, opts=None):
        return self.inner.barrier()


def as_world(backend, **settings):
    """Replace torch's init_process_group, with the double if NCCL is requested.

    To torch, the tensors of the double are on the CPU, so the device of the group is left out.
    """
    settings.pop("device_id", None)
    torch_world(DOUBLE if backend == "nccl" else backend, **settings)


DOUBLE = "doubled_nccl"


def install(module) -> None:
    """Let the package make these groups."""
    global torch_connected, launching, torch_world
    launching = module.launch_lock = Launching()
    torch_connected = module._connected
    module._connected = connected
    torch_world = dist.init_process_group
    dist.init_process_group = as_world
    get_backend = dist.get_backend
    dist.get_backend = lambda *group: get_backend(*group).replace(DOUBLE, "nccl")
    dist.Backend.register_backend(DOUBLE, Node, devices=["cuda"])

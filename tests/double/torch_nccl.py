"""NCCL's process groups of torch: gloo moves the bytes; devices, streams and launches are checked.

A call has to come from the thread whose current device is the group's, and with several devices in
the process under the package's lock, as one that waits for a device would stop the others. What it
reads and writes is known to the device's NCCL stream, which follows the current one, and is
followed by it in `wait`.
"""

import threading
from collections import defaultdict
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.double import fails
from tests.double.cuda import Stream, current_device, current_stream
from tests.double.tensors import plain

SYSTEM = "NCCL error: unhandled system error"
torch_connected = launching = None
"""The package's own constructor, which makes gloo's groups here, and its lock."""
devices: dict[int, set] = defaultdict(set)
"""Those of groups that were opened together, by their store."""


class Work:
    """Calls that were launched, and what comes after them on their stream."""

    def __init__(self, works, clock):
        self._clock, self._error = clock, None
        self._hangs, self._done = fails("hang"), threading.Event()  # bytes come all the same
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
        """The stream waits. Here the host does, as numbers are there at once."""
        self._done.wait()
        if self._error is not None:
            raise RuntimeError(f"NCCL would wait for ever: {self._error}")
        current_stream().line.follow(self._clock)
        return True


class Group:
    """A device's rank of a process group."""

    def __init__(self, inner: dist.ProcessGroup, device: torch.device, together: set):
        self.inner, self.device, self._together = inner, device, together
        self.stream = Stream(device).line
        self._batch: list | None = None

    def rank(self) -> int:
        return self.inner.rank()

    def size(self) -> int:
        return self.inner.size()

    def _get_backend(self, device):
        return self

    def abort(self) -> None:
        """Nothing is held."""

    shutdown = abort

    def _launch(self, name: str, read: list, written: list, call) -> Work:
        if fails("async"):
            raise RuntimeError("NCCL error: remote process exited or there was a network error")
        if current_device() != self.device.index:
            raise RuntimeError(f"NCCL {name}: cuda:{self.device.index} isn't current")
        if len(self._together) > 1 and not launching.locked():
            raise RuntimeError(f"NCCL {name}: several devices, launched without the lock")
        for tensor in [*read, *written]:
            if tensor.device != self.device or not tensor.is_contiguous():
                raise RuntimeError(f"NCCL {name}: not whole on cuda:{self.device.index}")
        self.stream.follow(current_stream().line.clock())
        self.stream.given(f"NCCL {name}", [*map(plain, read)], [*map(plain, written)])
        return Work(call(), self.stream.clock())

    def allreduce(self, tensors):
        mine = [*map(plain, tensors)]
        return self._launch("allreduce", tensors, tensors, lambda: [self.inner.allreduce(mine)])

    def alltoall_base(self, out, given, received, sent):
        return self._launch("alltoall", [given], [out], lambda: [
            self.inner.alltoall_base(plain(out), plain(given), received, sent)
        ])  # fmt: skip

    def _reduce_scatter_base(self, out, given):
        return self._launch("reduce-scatter", [given], [out], lambda: [
            self.inner._reduce_scatter_base(plain(out), plain(given))
        ])  # fmt: skip

    def _allgather_base(self, out, given):
        return self._launch("all-gather", [given], [out], lambda: [
            self.inner._allgather_base(plain(out), plain(given))
        ])  # fmt: skip

    def reduce(self, tensor, root):
        return self._launch("reduce", [tensor], [tensor], lambda: [
            self.inner.reduce(plain(tensor), root)
        ])  # fmt: skip

    def broadcast(self, tensor, root):
        return self._launch("broadcast", [tensor], [tensor], lambda: [
            self.inner.broadcast(plain(tensor), root)
        ])  # fmt: skip

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
        calls, self._batch = self._batch, None
        read = [t for name, tensors, *_ in calls for t in tensors if name == "send"]
        written = [t for name, tensors, *_ in calls for t in tensors if name == "recv"]

        def begin() -> list:
            return [
                getattr(self.inner, name)([*map(plain, tensors)], peer, tag)
                for name, tensors, peer, tag in sorted(calls, key=lambda call: call[0] == "send")
            ]

        return self._launch("send and recv", read, written, begin)


def connected(store, place, limit: timedelta):
    """In the place of the package's constructor: gloo's group with the double's around."""
    if not place.device.startswith("cuda"):
        return torch_connected(store, place, limit)
    if fails("initRank"):
        raise RuntimeError(SYSTEM)
    device = torch.device(place.device)
    torch.cuda.set_device(device)
    devices[id(store)].add(device)
    inner = torch_connected(store, place._replace(device="cpu"), limit)
    return Group(inner, device, devices[id(store)])


def install(module) -> None:
    """Let the package make these."""
    global torch_connected, launching
    launching = module.launching
    torch_connected, module._connected = module._connected, connected

"""Checks where the package passes memory to MPI: the work of streams must be complete.

The memory's device must be the current one, as MPI libraries require, and data that a network card
has written must be flushed before it is read.
"""

import contextlib
import os
import signal
import threading
from importlib.machinery import SourceFileLoader
from types import SimpleNamespace

import torch

from tests.double import fails, tensors, torch_nccl
from tests.double.checker import HOST, Unordered
from tests.double.cuda import context, current_device

flushed: set[int] = set()


def before(owner, name: str, look) -> None:
    """Call ``look`` with the arguments of a function before the function."""
    original = getattr(owner, name)

    def seen(*arguments):
        look(*arguments)
        return original(*arguments)

    setattr(owner, name, seen)


def refused(what: str) -> None:
    if fails(what):
        raise RuntimeError("MPI_ERR_RMA_RANGE: invalid RMA address range")


def in_context(*_) -> None:
    """Check the current device: MPI libraries find the device of memory by the thread's context."""
    if not hasattr(context, "made"):
        raise RuntimeError("MPI gets GPU memory in a thread without a device")


def averages(module) -> None:
    """Check averages, whose memory the host reads or writes from now on."""

    def taken(memory: torch.Tensor) -> None:
        if memory.device.type == "cuda" and memory.device.index != current_device():
            raise RuntimeError(f"{memory.device} isn't current where MPI gets its memory")
        _ = memory.device.type == "cuda" and in_context()
        HOST.given("MPI", [memory], [])  # host memory, too: copies may be on their way into it

    before(module, "raw", taken)


def flushing(what, devices, work, *arguments):
    """Run a function after which the data received on these devices has to be flushed."""
    flushed.clear()
    done = work(*arguments)
    if missing := {device.index for device in devices} - flushed:
        raise Unordered(f"what came by {what} isn't flushed on {missing}")
    return done


def of_transport(kind: str):
    """Check transports: copies out precede sends, and received data in GPU memory is flushed."""

    def watch(module) -> None:
        transport = getattr(module, kind)
        received = transport.received

        def sends(self, r, chunk, memory) -> None:
            if self.on_device:
                refused("exchange put")
                if fails("hanging exchange put"):
                    threading.Event().wait()
                in_context()
            else:
                HOST.given("a put", [message[chunk.span] for message in memory], [])

        def receiving(self, *arguments):
            devices = self._devices if self.on_device else []
            return flushing("the network", devices, received, self, *arguments)

        before(transport, "send", sends)
        transport.received = receiving
        if kind == "Windows":
            before(module, "create", lambda *_: refused("window"))

    return watch


def buffers(module) -> None:
    """Check that data received by messages of an average is flushed."""
    device = module.DeviceBuffers
    make = device._swap

    def swapping(self, transport):
        bring = make(self, transport)
        devices = [each.device for each in self._streams]
        if transport.in_main:
            return bring
        return lambda out, into: flushing("messages", devices if into else [], bring, out, into)

    device._swap = swapping


def memory(module) -> None:
    """Record the driver's flush of devices that need it."""

    def flush(target, scope) -> int:
        flushed.add(current_device())
        return 999 if fails("flush") else 0

    def attribute(answer, which, index) -> int:
        answer._obj.value = int(which == module.OPTIONS)  # writes aren't ordered
        return 0

    module.driver = lambda: SimpleNamespace(
        cuFlushGPUDirectRDMAWrites=flush, cuDeviceGetAttribute=attribute
    )


def proof(module) -> None:
    """Let puts of the proof fail, in a rank or ("alone") in a separate process."""
    original = module.put

    def put(*arguments) -> None:
        where = " alone" if module.MPI.COMM_WORLD.size == 1 else ""
        refused("put" + where)
        if fails("hanging put" + where):
            threading.Event().wait()
        if fails("crash" + where):
            os.kill(os.getpid(), signal.SIGSEGV)
        _ = None if fails("lost put" + where) else original(*arguments)

    module.put = put
    before(module, "create", lambda *_: refused("proof window"))


def streams(module) -> None:
    """Check that calls on streams of copies and sums hold NCCL's lock and don't wait for a copy."""

    def guarded(original):
        @contextlib.contextmanager
        def entered(self):
            with original(self):
                if torch_nccl.several() and not torch_nccl.launching.mine():
                    raise RuntimeError("a CUDA call may fall into another thread's NCCL group")
                tensors.copies.at_once = True
                try:
                    yield
                finally:
                    tensors.copies.at_once = False

        return entered

    for name in ("incoming", "outgoing"):
        setattr(module.Streams, name, guarded(getattr(module.Streams, name)))


def loader(module) -> None:
    """Check that batches are copied from locked memory, concurrently with the host."""
    bring = module.DeviceCopier.start_copy

    def bringing(self, batch, finish):
        def there(copied):
            tensors.copies.of_batches = False
            return finish(copied)

        tensors.copies.of_batches = self.stream is not None
        return bring(self, batch, there)

    module.DeviceCopier.start_copy = bringing


def gpu_sum(module) -> None:
    """Record what a kernel reads and writes when it is launched."""

    def launched(weights, arrays, out) -> None:
        torch.cuda.current_stream(out.device).line.given("a kernel", [*arrays], [out])

    before(module, "_launch", launched)


def gpu_random(module) -> None:
    """Record what the kernel of random words writes when it is launched."""

    def launched(seed, first, out) -> None:
        line = torch.cuda.current_stream(out.device).line
        line.given("a kernel of random words", [], [out])

    before(module, "_launch", launched)


def install() -> None:
    """Install these checks in their modules of `mpigossip` when they are loaded."""
    watched = {
        "data.loader": loader,
        "mixing.exact_average": averages,
        "mixing.device.buffers": buffers,
        "mixing.transports.windows": of_transport("Windows"),
        "mixing.transports.messages": of_transport("Messages"),
        "mixing.device.memory": memory,
        "mixing.device.streams": streams,
        "mixing.device.proof": proof,
        "mixing.kernels.gpu_random": gpu_random,
        "mixing.kernels.gpu_sum": gpu_sum,
        "cluster.process_groups": torch_nccl.install,
    }
    load = SourceFileLoader.exec_module

    def exec_module(self, module) -> None:
        load(self, module)
        if watch := watched.get(module.__name__.removeprefix("mpigossip.")):
            watch(module)

    SourceFileLoader.exec_module = exec_module

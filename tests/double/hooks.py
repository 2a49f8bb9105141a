"""Where the package hands memory to MPI or to other processes: what streams do must be over.

And the memory's device must be the current one, as MPI libraries want it; and what a network card
wrote into it is flushed before it is read.
"""

import os
import signal
from importlib.machinery import SourceFileLoader
from types import SimpleNamespace

import torch

from tests.double import cupy, fails
from tests.double.checker import HOST, Unordered
from tests.double.cuda import current_device

flushed: set[int] = set()


def before(owner, name: str, look) -> None:
    """Let ``look`` see what a function is given, first."""
    original = getattr(owner, name)

    def seen(*arguments):
        look(*arguments)
        return original(*arguments)

    setattr(owner, name, seen)


def refused(what: str) -> None:
    if fails(what):
        raise RuntimeError("MPI_ERR_RMA_RANGE: invalid RMA address range")


def averages(module) -> None:
    """Memory for MPI: read or written by the host from now on."""

    def taken(memory: torch.Tensor) -> None:
        if memory.device.type == "cuda" and memory.device.index != current_device():
            raise RuntimeError(f"{memory.device} isn't current where MPI gets its memory")
        HOST.given("MPI", [memory], [])  # host memory, too: copies may be on their way into it

    before(module, "raw", taken)


def shared(module) -> None:
    """Neighbours read this rank's memory when it says so, and write again when it lets go."""

    def whole(memory: list[torch.Tensor]) -> None:
        # all or none of a host's ranks map each other's memory
        mapped = [torch.empty(0, dtype=torch.uint8).set_(one) for one in cupy.private.values()]
        what = "saying that the outbox is whole"
        HOST.given(what, memory + mapped if cupy.mapped else memory, [])

    def piece(self, areas, span, *_) -> None:  # later ones are still on their way
        whole([area[span] for area in areas if area.device.type == "cpu"])

    def read(self, *_) -> None:
        memory = [*cupy.mapped.values(), *self.outboxes]
        HOST.given("saying that a neighbour's outbox is read", [], memory)

    before(module.SharedHost, "put", piece)
    before(module.SharedHost, "publish", lambda self, *_: whole([self.own]))
    before(module.SharedHost, "release", read)


def push(module) -> None:
    """A message in host memory is put: the copy out must be over."""

    def put(self, areas, span, *_) -> None:
        HOST.given("a put", [area[span] for area in areas], [])

    before(module.PushWindow, "put", put)


def device_push(module) -> None:
    """Puts from GPU memory may fail; what comes into it has to be flushed."""
    device = module.DevicePush
    sync, swap = device.sync, device.swap

    def flushing(what, devices, work, *arguments):
        flushed.clear()
        done = work(*arguments)
        if missing := {device.index for device in devices} - flushed:
            raise Unordered(f"what came by {what} isn't flushed on {missing}")
        return done

    def swapping(self, slot):
        bring, devices = swap(self, slot), [self._devices[slot]]
        return lambda out, into: flushing("messages", devices if into else [], bring, out, into)

    before(device, "put", lambda *_: refused("exchange put"))
    device.sync = lambda self, *_: flushing("the network", self._devices, sync, self, *_)
    device.swap = swapping


def ordering(module) -> None:
    """The driver's flush: these devices need it."""

    def flush(target, scope) -> int:
        flushed.add(current_device())
        return 999 if fails("flush") else 0

    module.driver = lambda: SimpleNamespace(cuFlushGPUDirectRDMAWrites=flush)


def proof(module) -> None:
    """Puts of the proof, in a rank or ("alone") in a process of its own, that go wrong."""
    original = module.put

    def put(*arguments) -> None:
        where = " alone" if module.MPI.COMM_WORLD.size == 1 else ""
        refused("put" + where)
        if fails("crash" + where):
            os.kill(os.getpid(), signal.SIGSEGV)
        _ = None if fails("lost put" + where) else original(*arguments)

    module.put = put


def elementwise(module) -> None:
    """What a kernel reads and writes is known where it is launched."""

    def launched(made) -> None:
        stream = torch.cuda.current_stream(made.arrays[-1][1].device)
        stream.line.given("a kernel", [*made.inputs.values()], [*made.outputs.values()])

    before(module, "launch", launched)


def install() -> None:
    """Let these see their modules of `mpigossip.mixing` once they are loaded."""
    watched = {
        "averages": averages, "host.shared": shared, "host.push": push, "device.push": device_push,
        "device.ordering": ordering, "device.proof": proof, "kernels.elementwise": elementwise,
    }  # fmt: skip
    load = SourceFileLoader.exec_module

    def exec_module(self, module) -> None:
        load(self, module)
        if watch := watched.get(module.__name__.removeprefix("mpigossip.mixing.")):
            watch(module)

    SourceFileLoader.exec_module = exec_module

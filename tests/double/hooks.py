"""Where the package hands memory to MPI or to other processes: what streams do must be over.

And the memory's device must be the current one, as MPI libraries want it; and what a network card
wrote into it is flushed before it is read.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from mpi4py import MPI

from tests.double import cuda, cupy, tensors
from tests.double.checker import HOST, Unordered, checker, spans
from tests.double.failures import fails


class _Patches(importlib.abc.MetaPathFinder):
    """Calls a function with a module once it is loaded."""

    def __init__(self, patches: dict):
        """By the modules' names."""
        self.patches = patches

    def find_spec(self, name, path, target=None):
        """Of the modules asked for, with what is to be done behind."""
        if name not in self.patches:
            return None
        patch = self.patches.pop(name)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            if isinstance(patch, tuple):  # a mutant: the module with a text in another's place
                source = Path(spec.origin).read_text()
                if source.count(patch[0]) != 1:
                    raise ValueError(f"{name}: {source.count(patch[0])} times {patch[0]!r}")
                source = source.replace(*patch)
                exec(compile(source, spec.origin, "exec"), module.__dict__)
            else:
                load(module)
            if name in WATCHED:
                WATCHED[name](module)

        spec.loader.exec_module = exec_module
        return spec


def _raw(module) -> None:
    """Memory for MPI: read or written by the host from now on."""
    original = module.raw

    def raw(memory: torch.Tensor):
        if memory.device.type == "cuda" and memory.device.index != cuda.current_device():
            raise RuntimeError(f"{memory.device} isn't current where MPI gets its memory")
        # host memory, too: copies may still be on their way into it
        checker.host_must_know(
            _allocations(memory), "MPI", reads=False, inside=spans(tensors.plain(memory))
        )
        return original(memory)

    module.raw = raw


def _shared(module) -> None:
    """Neighbours read this rank's memory when it says so, and write again when it lets go."""
    put, publish = module.SharedHost.put, module.SharedHost.publish
    release, what = module.SharedHost.release, "saying that the outbox is whole"

    def said(self, areas, span, *arguments):
        # all or none of a host's ranks map each other's memory
        checker.host_must_know(cupy.exported if cupy.mapped else (), what, reads=False)
        # of every slot's message in host memory: later pieces are still on their way
        pieces = [area[span] for area in areas if area.device.type == "cpu"]
        inside = [one for piece in pieces for one in spans(piece)]
        checker.host_must_know(_allocations(self.own), what, reads=False, inside=inside)
        return put(self, areas, span, *arguments)

    def published(self, *arguments):
        checker.host_must_know(cupy.exported if cupy.mapped else (), what, reads=False)
        checker.host_must_know(_allocations(self.own), what, reads=False)
        return publish(self, *arguments)

    def released(self, *arguments):
        keys = [*cupy.mapped, *_allocations(*self.outboxes)]
        checker.host_must_know(keys, "saying that a neighbour's outbox is read", reads=True)
        return release(self, *arguments)

    module.SharedHost.put, module.SharedHost.publish = said, published
    module.SharedHost.release = released


def _allocations(*memory: torch.Tensor) -> list[int]:
    return [checker.owned(one) for one in memory]


def _push(module) -> None:
    """A message in host memory is put: the copy out must be over."""
    put = module.PushWindow.put

    def checked(self, areas, span, *arguments):
        for area in areas:
            key = area.untyped_storage().data_ptr()
            checker.touch(HOST, key, spans(area[span]), False, "a put")
        return put(self, areas, span, *arguments)

    module.PushWindow.put = checked


def _device_push(module) -> None:
    """Puts from GPU memory may fail; what comes into it has to be flushed."""
    put, sync = module.DevicePush.put, module.DevicePush.sync

    def put_or_not(self, *arguments):
        if fails("exchange put"):
            raise RuntimeError("MPI_ERR_RMA_RANGE: invalid RMA address range")
        return put(self, *arguments)

    def synced(self, *arguments):
        with _flushing("the network", self._devices):
            sync(self, *arguments)

    module.DevicePush.put, module.DevicePush.sync = put_or_not, synced
    swap = module.DevicePush.swap

    def swapping(self, slot):
        by_messages = swap(self, slot)

        def swapped(out, into):
            with _flushing("messages", [self._devices[slot]] if into else []):
                return by_messages(out, into)

        return swapped

    module.DevicePush.swap = swapping


flushed: set[int] = set()


@contextlib.contextmanager
def _flushing(what: str, devices):
    """What comes from others meanwhile has to be flushed on these devices."""
    flushed.clear()
    yield
    if missing := {device.index for device in devices} - flushed:
        raise Unordered(f"what came by {what} isn't flushed on {missing}")


def _ordering(module) -> None:
    """The driver's flush: these devices need it."""

    def flush(target, scope):
        flushed.add(cuda.current_device())
        return 999 if fails("flush") else 0

    module.driver = lambda: SimpleNamespace(cuFlushGPUDirectRDMAWrites=flush)


def _proof(module) -> None:
    """Puts of the proof, in a rank or ("alone") in a process of its own, that go wrong."""
    original = module.put

    def put(*arguments):
        where = " alone" if MPI.COMM_WORLD.size == 1 else ""
        if fails("put" + where):
            raise RuntimeError("MPI_ERR_RMA_RANGE: invalid RMA address range")
        if fails("crash" + where):
            os.kill(os.getpid(), signal.SIGSEGV)
        _ = None if fails("lost put" + where) else original(*arguments)

    module.put = put


WATCHED = {
    "mpigossip.mixing.averages": _raw,
    "mpigossip.mixing.host.shared": _shared,
    "mpigossip.mixing.host.push": _push,
    "mpigossip.mixing.device.push": _device_push,
    "mpigossip.mixing.device.ordering": _ordering,
    "mpigossip.mixing.device.proof": _proof,
}


def install() -> None:
    """Watch the modules as they are imported; MPIGOSSIP_DOUBLE_MUTANT: JSON [module, old, new]."""
    patches: dict = dict(WATCHED)
    if mutant := os.environ.get("MPIGOSSIP_DOUBLE_MUTANT"):
        module, old, new = json.loads(mutant)
        patches[module] = (old, new)
    sys.meta_path.insert(0, _Patches(patches))

"""NCCL: collective calls of the GPUs of a process, sends and receives between processes.

What one sends another receives through a store that the process which made the ticket serves. A
receive waits for its message when the group ends, not on its stream: the numbers are there at
once, as with everything of the double.
"""

import itertools
import threading
from collections import Counter
from datetime import timedelta
from functools import cache, partialmethod

import torch

from tests.double import fails
from tests.double.cuda import current_device, line
from tests.double.tensors import at

available, NCCL_FLOAT32, NCCL_SUM, NCCL_UINT8 = True, 7, 0, 1
SYSTEM = "NCCL_ERROR_SYSTEM_ERROR: unhandled system error"
FOR_EVER = "NCCL would wait for ever"
LIMIT = timedelta(seconds=60)
_tickets = itertools.count()
_group = threading.local()


@cache
def store(port: int = 0):
    """Of messages: served by this process, or (``port``) by another."""
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", port, None, not port, LIMIT, wait_for_workers=False)


def get_unique_id() -> tuple[int, int]:
    return store().port, next(_tickets)


class NcclCommunicator:
    """A GPU's place among those of this process (``everyone``), or among processes."""

    def __init__(self, size: int, ticket: tuple[int, int], rank: int, everyone=()):
        if fails("initRank"):
            raise RuntimeError(SYSTEM)
        self.ticket, self.rank, self.everyone = ticket, rank, everyone
        self.device, self.calls = current_device(), Counter[tuple]()

    @classmethod
    def initAll(cls, devices: list[int]):
        if fails("initAll"):
            raise RuntimeError(SYSTEM)
        everyone: list = []
        for rank, device in enumerate(devices):
            with torch.cuda.device(device):
                everyone.append(cls(len(devices), (0, 0), rank, everyone))
        return everyone

    def check_async_error(self) -> None:
        if fails("async"):
            raise RuntimeError("NCCL_ERROR_REMOTE_ERROR: remote process exited")

    def _ask(self, name: str, *arguments) -> None:
        if not hasattr(_group, "calls"):
            raise RuntimeError(f"{FOR_EVER} in {name}: outside of a group")
        if current_device() != self.device:
            raise RuntimeError(f"NCCL {name}: cuda:{self.device} isn't current")
        _group.calls.append((name, self, arguments))

    def destroy(self) -> None:
        """Nothing is held."""

    abort = destroy


for _name in ("reduceScatter", "allGather", "reduce", "broadcast", "send", "recv"):
    setattr(NcclCommunicator, _name, partialmethod(NcclCommunicator._ask, _name))


def groupStart() -> None:
    _group.calls = []


def groupEnd() -> None:
    """Do what the group's calls ask for: of all ranks the same calls in the same order."""
    calls = vars(_group).pop("calls")
    for name, comm, arguments in sorted(calls, key=lambda call: call[0] == "recv"):
        if name in ("send", "recv"):
            _swap(name, comm, *arguments)
    calls = [call for call in calls if call[0] not in ("send", "recv")]
    everyone = calls[0][1].everyone if calls else []
    by_rank = [[call for call in calls if call[1] is comm] for comm in everyone]
    if len(set(map(len, by_rank))) > 1:
        raise RuntimeError(f"{FOR_EVER}: not all ranks of the communicator call")
    for together in zip(*by_rank, strict=True):
        if len(names := {name for name, _, _ in together}) > 1:
            raise RuntimeError(f"{FOR_EVER}: {names}")
        _collective(names.pop(), [arguments for _, _, arguments in together])


def _swap(name: str, comm: NcclCommunicator, address: int, count: int, _, peer, stream) -> None:
    memory, (port, ticket) = at(address, torch.uint8, count), comm.ticket
    comm.calls[name, peer] += 1
    source, target = (comm.rank, peer) if name == "send" else (peer, comm.rank)
    key = f"{ticket}: {source} to {target}, {comm.calls[name, peer]}"
    if name == "send":
        store(port).set(key, memory.numpy().tobytes())
        line(stream).given("NCCL send", [memory], [])
        return
    try:
        data = store(port).get(key)
    except RuntimeError as error:
        raise RuntimeError(f"{FOR_EVER}: for rank {peer}") from error
    store(port).delete_key(key)
    memory.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))  # as many bytes, or an error
    line(stream).given("NCCL recv", [], [memory])


def _collective(name: str, calls: list) -> None:
    many, count, root = len(calls), calls[0][2], calls[0][-2]
    streams = [line(arguments[-1]) for arguments in calls]
    for clock in [stream.clock() for stream in streams]:  # it begins when all are there
        for stream in streams:
            stream.follow(clock)
    sent, got = count * many ** (name == "reduceScatter"), count * many ** (name == "allGather")
    sources = [at(arguments[0], torch.float32, sent) for arguments in calls]
    if name == "allGather":
        results = [torch.cat(sources)] * many
    elif name == "broadcast":
        results = [sources[root]] * many
    else:
        total = sum(sources[1:], start=sources[0])
        results = total.chunk(many) if name == "reduceScatter" else [total] * many
    for rank, (stream, arguments) in enumerate(zip(streams, calls, strict=True)):
        written = [at(arguments[1], torch.float32, got)] if name != "reduce" or rank == root else []
        for target in written:
            target.copy_(results[rank])
        stream.given(f"NCCL {name}", [sources[rank]], written)

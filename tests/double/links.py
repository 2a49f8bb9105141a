"""NCCL between processes: what one sends and another receives, in files of shared memory.

A receive waits for its message when the group ends, not on its stream: the numbers are there at
once, as with everything of the double.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections import defaultdict
from pathlib import Path

import torch

from tests.double import cuda
from tests.double.failures import fails

LIMIT_S = 60.0
Call = tuple[str, "Place", tuple]


def ticket() -> tuple[int, ...]:
    """An id of 128 characters, as NCCL's."""
    return tuple(f"mpigossip-double-{uuid.uuid4()}".ljust(128).encode())


class Place:
    """One of the processes that share a ticket."""

    def __init__(self, size: int, ticket: tuple[int, ...], rank: int):
        """Waits for the others."""
        if fails("initRank"):
            raise RuntimeError("NCCL_ERROR_SYSTEM_ERROR: unhandled system error")
        self.size, self.rank, self.device = size, rank, cuda.current_device()
        self.stem = f"/dev/shm/{bytes(ticket).decode().strip()}"
        self.numbers: dict[tuple[str, int], itertools.count] = defaultdict(itertools.count)
        self._mark("here").touch()
        others = [self._mark("here", rank) for rank in range(size)]
        _until(lambda: all(mark.exists() for mark in others), "all ranks of a communicator")
        self._mark("seen").touch()
        if rank == 0:
            seen = [self._mark("seen", rank) for rank in range(size)]
            _until(lambda: all(mark.exists() for mark in seen), "all ranks of a communicator")
            for mark in [*others, *seen]:
                mark.unlink()

    def _mark(self, what: str, rank: int | None = None) -> Path:
        return Path(f"{self.stem}-{what}-{self.rank if rank is None else rank}")

    def message(self, name: str, peer: int) -> Path:
        """The file of the next message to or from another one, or itself."""
        number = next(self.numbers[name, peer])
        pair = (self.rank, peer) if name == "send" else (peer, self.rank)
        return Path(f"{self.stem}-{pair[0]}-{pair[1]}-{number}")


def _until(true, what: str) -> None:
    ends = time.monotonic() + LIMIT_S
    while not true():
        if time.monotonic() > ends:
            raise RuntimeError(f"NCCL would wait for ever: for {what}")
        time.sleep(0.0002)


def swap(calls: list[Call], view) -> None:
    """Do a group's sends, then its receives; ``view(address, count)``: the bytes there."""
    for wanted in ("send", "recv"):
        for name, comm, (address, count, _, peer, stream) in calls:
            if name != wanted:
                continue
            there, at = cuda.by_address[stream], view(address, count)
            path = comm.message(name, peer)
            if name == "send":
                beside = path.with_suffix(".new")
                beside.write_bytes(at.view.numpy().tobytes())
                beside.replace(path)
            else:
                _until(path.exists, f"rank {peer}")
                told = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
                path.unlink()
                if told.numel() != count:
                    raise RuntimeError(f"NCCL: {told.numel()} bytes sent, {count} received")
                at.view.copy_(told.view(1, -1))
            read, written = ([at], []) if name == "send" else ([], [at])
            cuda.told(f"NCCL {name}", there.device.index, read, written, stream=there)

"""Opponents of tools/bench/compare_peers.py: gloo, torch's averagers and DDP, MPI_Allreduce.

Each averages one vector, `round()`, or trains one model, `step(index)`, as its own documentation
says, at its best setting found here. All of them run over gloo but MPI_Allreduce.
"""

import fcntl
import logging
import os
import socket
import struct
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from mpigossip.cluster.deadline import Deadline
from mpigossip.cluster.ranks import World
from mpigossip.models import loss_and_correct

MIB = 1 << 20
WAIT_S = 120.0


def meet(ranks: World) -> None:
    """All ranks meet asleep: one that spins would take the core of those that still work."""
    request = ranks.comm.Ibarrier()
    Deadline(WAIT_S).wait(request.Test, lambda: "not all ranks came")


def timed(ranks: World, work: Callable[[], Any]) -> float:
    """Seconds of the slowest rank, all beginning together."""
    meet(ranks)
    began = time.perf_counter()
    work()
    mine = time.perf_counter() - began
    meet(ranks)
    return max(ranks.comm.allgather(mine))


def say(ranks: World, line: str) -> None:
    """On rank 0."""
    if ranks.rank == 0:
        print(line, flush=True)


def join(comm: MPI.Comm, interface: str) -> None:
    """Start gloo between the ranks of a communicator, over a network interface."""
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    logging.disable(logging.INFO)
    for known in ("When period is 1", "`broadcast_buffers` is deprecated"):
        warnings.filterwarnings("ignore", message=known)
    where = None
    if comm.rank == 0:
        with socket.socket() as free:
            free.bind((_address(interface), 0))
            where = f"tcp://{_address(interface)}:{free.getsockname()[1]}"
    where = comm.bcast(where)
    dist.init_process_group(
        "gloo",
        init_method=where,
        rank=comm.rank,
        world_size=comm.size,
        timeout=timedelta(seconds=120),
    )


def _address(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        words = struct.pack("256s", interface.encode()[:15])
        found = fcntl.ioctl(any_socket.fileno(), 0x8915, words)  # SIOCGIFADDR
    return socket.inet_ntoa(found[20:24])


# -- averaging --------------------------------------------------------------------------------


class Vectors(torch.nn.Module):
    """A model of one vector in a few parameters, so that bucket sizes mean something."""

    def __init__(self, count: int, parts: int = 8):
        """``count`` elements in ``parts`` parameters."""
        super().__init__()
        whole = torch.zeros(count)
        self.parts = torch.nn.ParameterList(
            torch.nn.Parameter(part.clone()) for part in whole.chunk(parts)
        )

    def fill(self, value: float) -> None:
        """Every element becomes the value."""
        with torch.no_grad():
            for part in self.parts:
                part.fill_(value)

    def forward(self) -> torch.Tensor:
        """A loss whose gradient is the parameters themselves: ½ Σ x²."""
        return sum(0.5 * torch.dot(part, part) for part in self.parts)


class Neighbour:
    """Plain gloo: isend to i + 2^k, irecv from i − 2^k, x ← ½ (x + theirs)."""

    name = "gloo isend/irecv, directed"
    pairs = False

    def __init__(self, comm: MPI.Comm, count: int):
        """A vector and a buffer."""
        self.rank = comm.rank
        self.n = comm.size
        self.t = 0
        self.x = torch.zeros(count)
        self.buffer = torch.zeros(count)

    def fill(self, value: float) -> None:
        """Every element becomes the value."""
        self.x.fill_(value)

    def round(self) -> None:
        """One round of the one-peer exponential graph."""
        hop = 1 << self.t % (self.n - 1).bit_length()
        to = (self.rank + hop) % self.n
        source = (self.rank - hop) % self.n
        if self.pairs:
            to = source = self.rank ^ hop
        works = [dist.isend(self.x, to), dist.irecv(self.buffer, source)]
        for work in works:
            work.wait()
        self.x.lerp_(self.buffer, 0.5)
        self.t += 1

    def ends(self) -> tuple[float, float]:
        """Least and largest element."""
        return float(self.x.min()), float(self.x.max())


class Pairs(Neighbour):
    """The same between i and i xor 2^k."""

    name = "gloo isend/irecv, pairs"
    pairs = True


class Allreduce(Neighbour):
    """MPI_Allreduce in place, then the division."""

    name = "MPI_Allreduce"

    def __init__(self, comm: MPI.Comm, count: int):
        """A vector."""
        super().__init__(comm, count)
        self.comm = comm

    def round(self) -> None:
        """One exact average."""
        self.comm.Allreduce(MPI.IN_PLACE, self.x.numpy())
        self.x.mul_(1 / self.n)


class Periodic:
    """torch's PeriodicModelAverager, every step."""

    name = "torch PeriodicModelAverager"

    def __init__(self, comm: MPI.Comm, count: int):
        """A model with gradients, which the averager asks for."""
        self.model = Vectors(count)
        for part in self.model.parts:
            part.grad = torch.zeros(()).expand_as(part)
        self.averager = PeriodicModelAverager(period=1)
        self.fill = self.model.fill

    def round(self) -> None:
        """One call."""
        self.averager.average_parameters(self.model.parameters())

    def ends(self) -> tuple[float, float]:
        """Least and largest element."""
        parts = [part.detach() for part in self.model.parts]
        return min(float(p.min()) for p in parts), max(float(p.max()) for p in parts)


class Gradients(Periodic):
    """torch DistributedDataParallel: the gradient of ½ Σ x² is averaged, x ← x − (x − mean)."""

    def __init__(self, comm: MPI.Comm, count: int, cap: float = 25.0):
        """``cap``: bucket_cap_mb."""
        self.model = Vectors(count)
        self.fill = self.model.fill
        self.name = f"torch DDP, bucket_cap_mb {cap:g}"
        self.ddp = DistributedDataParallel(
            self.model, bucket_cap_mb=cap, gradient_as_bucket_view=True, broadcast_buffers=False
        )

    def round(self) -> None:
        """Backward with its bucketed all-reduce: afterwards every gradient is the mean of x."""
        self.ddp.zero_grad(set_to_none=True)
        self.ddp().backward()

    def ends(self) -> tuple[float, float]:
        """Least and largest element of the gradient."""
        grads = [part.grad for part in self.model.parts]
        return min(float(g.min()) for g in grads), max(float(g.max()) for g in grads)


# -- training ---------------------------------------------------------------------------------


class Ddp:
    """A model of the job by torch's DistributedDataParallel and its momentum SGD."""

    def __init__(self, module: torch.nn.Module, lr: float, batches: Callable, cap: float):
        """``batches(index)`` gives this rank's batch; ``cap``: bucket_cap_mb."""
        self.name = f"DDP, bucket_cap_mb {cap:g}"
        self.module = module
        self.batches = batches
        self.run = DistributedDataParallel(
            module,
            bucket_cap_mb=cap,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
            static_graph=True,
        )
        self.optimizer = torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9)

    def step(self, index: int) -> None:
        """Forward, backward with its averages, update."""
        batch = self.batches(index)[0]
        self.optimizer.zero_grad()
        loss_and_correct(self.run(batch.inputs), batch.targets)[0].backward()
        self.optimizer.step()

    def open(self) -> None:
        """Nothing to open before a turn."""

    def close(self) -> None:
        """Nothing to close after a turn."""

    def averaged(self) -> torch.nn.Module:
        """The model, which all ranks have; its buffers are the rank's own."""
        return self.module

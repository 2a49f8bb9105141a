"""Other libraries in tools/bench/compare_peers.py: gloo, torch's averager and DDP, MPI_Allreduce.

Each contender averages one vector by `round()`, or trains one model by `step(index)`. Libraries are
used as their documentation recommends, with the setting that was fastest on this machine. All
contenders use gloo, except MPI_Allreduce.
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
    """Wait for all ranks. This rank sleeps, because a busy wait would take another rank's core."""
    request = ranks.comm.Ibarrier()
    Deadline(WAIT_S).wait(request.Test, lambda: "not all ranks have reached the barrier")


def timed(ranks: World, work: Callable[[], Any]) -> float:
    """Let all ranks call ``work`` at the same time; return the seconds of the slowest rank."""
    meet(ranks)
    begin = time.perf_counter()
    work()
    seconds = time.perf_counter() - begin
    meet(ranks)
    return max(ranks.comm.allgather(seconds))


def say(ranks: World, line: str) -> None:
    """Print a line on rank 0."""
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
        answer = fcntl.ioctl(any_socket.fileno(), 0x8915, words)  # SIOCGIFADDR
    return socket.inet_ntoa(answer[20:24])


# -- averaging --------------------------------------------------------------------------------


class Vectors(torch.nn.Module):
    """Model that consists of one vector, split into parameters so that bucket sizes matter."""

    def __init__(self, count: int, parts: int = 8):
        """Create ``count`` elements in ``parts`` parameters."""
        super().__init__()
        whole = torch.zeros(count)
        self.parts = torch.nn.ParameterList(
            torch.nn.Parameter(part.clone()) for part in whole.chunk(parts)
        )

    def fill(self, value: float) -> None:
        """Set every element to the value."""
        with torch.no_grad():
            for part in self.parts:
                part.fill_(value)

    def forward(self) -> torch.Tensor:
        """Return the loss ½ Σ x², whose gradient is the parameters themselves."""
        return sum(0.5 * torch.dot(part, part) for part in self.parts)


class Neighbour:
    """Averaging by plain gloo along the one-peer exponential graph.

    In round k, rank i sends to i + 2^k, receives from i − 2^k, and sets x ← ½ (x + received).
    """

    name = "gloo isend/irecv, directed"
    pairs = False

    def __init__(self, comm: MPI.Comm, count: int):
        """Allocate a vector and a buffer."""
        self.rank = comm.rank
        self.n = comm.size
        self.t = 0
        self.x = torch.zeros(count)
        self.buffer = torch.zeros(count)

    def fill(self, value: float) -> None:
        """Set every element to the value."""
        self.x.fill_(value)

    def round(self) -> None:
        """Make one round of the one-peer exponential graph."""
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
        """Return the smallest and the largest element of this rank's array."""
        return float(self.x.min()), float(self.x.max())


class Pairs(Neighbour):
    """Averaging by plain gloo in pairs: in round k, ranks i and i xor 2^k average."""

    name = "gloo isend/irecv, pairs"
    pairs = True


class Allreduce(Neighbour):
    """Averaging by MPI_Allreduce in place, followed by the division."""

    name = "MPI_Allreduce"

    def __init__(self, comm: MPI.Comm, count: int):
        """Allocate a vector."""
        super().__init__(comm, count)
        self.comm = comm

    def round(self) -> None:
        """Compute one exact average."""
        self.comm.Allreduce(MPI.IN_PLACE, self.x.numpy())
        self.x.mul_(1 / self.n)


class Periodic:
    """Averaging by torch's PeriodicModelAverager, at every step."""

    name = "torch PeriodicModelAverager"

    def __init__(self, comm: MPI.Comm, count: int):
        """Create a model with gradients, which the averager requires."""
        self.model = Vectors(count)
        for part in self.model.parts:
            part.grad = torch.zeros(()).expand_as(part)
        self.averager = PeriodicModelAverager(period=1)
        self.fill = self.model.fill

    def round(self) -> None:
        """Call the averager once."""
        self.averager.average_parameters(self.model.parameters())

    def ends(self) -> tuple[float, float]:
        """Return the smallest and the largest element."""
        parts = [part.detach() for part in self.model.parts]
        return min(float(p.min()) for p in parts), max(float(p.max()) for p in parts)


class Gradients(Periodic):
    """Averaging by DDP, whose all-reduce averages gradients: the gradient of ½ Σ x² is x itself."""

    def __init__(self, comm: MPI.Comm, count: int, cap: float = 25.0):
        """Create the model; ``cap`` is DDP's bucket_cap_mb."""
        self.model = Vectors(count)
        self.fill = self.model.fill
        self.name = f"torch DDP, bucket_cap_mb {cap:g}"
        self.ddp = DistributedDataParallel(
            self.model, bucket_cap_mb=cap, gradient_as_bucket_view=True, broadcast_buffers=False
        )

    def round(self) -> None:
        """Run forward and backward; afterwards, each gradient is the mean of x over ranks."""
        self.ddp.zero_grad(set_to_none=True)
        self.ddp().backward()

    def ends(self) -> tuple[float, float]:
        """Return the smallest and the largest element of the gradient."""
        grads = [part.grad for part in self.model.parts]
        return min(float(g.min()) for g in grads), max(float(g.max()) for g in grads)


# -- training ---------------------------------------------------------------------------------


class Ddp:
    """The job's model, trained by torch's DistributedDataParallel and momentum SGD."""

    def __init__(self, module: torch.nn.Module, lr: float, batches: Callable, cap: float):
        """Wrap the model into DistributedDataParallel.

        :param module: the model
        :param lr: learning rate
        :param batches: ``batches(index)`` returns this rank's batch
        :param cap: DDP's bucket_cap_mb
        """
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
        """Run forward, backward with its averages, and the update."""
        batch = self.batches(index)[0]
        self.optimizer.zero_grad()
        loss_and_correct(self.run(batch.inputs), batch.targets)[0].backward()
        self.optimizer.step()

    def open(self) -> None:
        """Do nothing, because this contender needs no preparation before its turn."""

    def close(self) -> None:
        """Do nothing, because this contender leaves nothing open after its turn."""

    def averaged(self) -> torch.nn.Module:
        """Return the model, which is equal on all ranks except for its buffers."""
        return self.module

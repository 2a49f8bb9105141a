"""Contenders of compare_peers.py: plain gloo, torch's model averager and DDP, and MPI_Allreduce.

Each contender averages one vector by `round()`, or trains one model by `step(index)`. Libraries are
used as their documentation recommends. All contenders communicate by gloo, except MPI_Allreduce.
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
from mpigossip.cluster.mpi_world import MPIWorld
from mpigossip.models import loss_and_correct

MIB = 1 << 20
WAIT_S = 120.0
"""Seconds that a rank waits for other ranks."""


def meet(ranks: MPIWorld) -> None:
    """Wait until all ranks call this function.

    A rank sleeps meanwhile, because a busy wait would take the core of another rank.

    :raises WaitTimeoutError: if a rank does not call it within WAIT_S seconds
    """
    request = ranks.comm.Ibarrier()
    Deadline(WAIT_S).wait(request.Test, lambda: "not all ranks have reached the barrier")


def timed(ranks: MPIWorld, work: Callable[[], Any]) -> float:
    """Call ``work`` on all ranks at the same time; return the seconds of the slowest rank.

    :param ranks: all ranks, which call this function together
    :param work: function to time
    """
    meet(ranks)
    begin = time.perf_counter()
    work()
    seconds = time.perf_counter() - begin
    meet(ranks)
    return max(ranks.comm.allgather(seconds))


def say(ranks: MPIWorld, line: str) -> None:
    """Print a line on rank 0."""
    if ranks.rank == 0:
        print(line, flush=True)


def join(comm: MPI.Comm, interface: str) -> None:
    """Initialize torch.distributed with gloo on the ranks of a communicator.

    :param comm: the ranks, which call this function together
    :param interface: name of the network interface that gloo uses
    """
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    logging.disable(logging.INFO)
    for known in ("When period is 1", "`broadcast_buffers` is deprecated"):
        warnings.filterwarnings("ignore", message=known)
    url = None
    if comm.rank == 0:
        with socket.socket() as any_free_port:
            any_free_port.bind((_address(interface), 0))
            url = f"tcp://{_address(interface)}:{any_free_port.getsockname()[1]}"
    url = comm.bcast(url)
    dist.init_process_group(
        "gloo",
        init_method=url,
        rank=comm.rank,
        world_size=comm.size,
        timeout=timedelta(seconds=120),
    )


def _address(interface: str) -> str:
    """Return the IPv4 address of a network interface of this host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        words = struct.pack("256s", interface.encode()[:15])
        answer = fcntl.ioctl(any_socket.fileno(), 0x8915, words)  # SIOCGIFADDR
    return socket.inet_ntoa(answer[20:24])


# -- averaging --------------------------------------------------------------------------------


class Vectors(torch.nn.Module):
    """Model whose parameters are the pieces of one vector.

    The vector is split because DDP puts whole parameters into a bucket, so that bucket sizes would
    not matter for a single parameter.
    """

    def __init__(self, count: int, parts: int = 8):
        """Create ``parts`` parameters with ``count`` elements in total, all of which are 0."""
        super().__init__()
        whole = torch.zeros(count)
        self.parts = torch.nn.ParameterList(
            torch.nn.Parameter(part.clone()) for part in whole.chunk(parts)
        )

    def fill(self, value: float) -> None:
        """Set every element of the parameters to ``value``."""
        with torch.no_grad():
            for part in self.parts:
                part.fill_(value)

    def forward(self) -> torch.Tensor:
        """Return the loss ½ Σ x², whose gradient equals the parameters."""
        return sum(0.5 * torch.dot(part, part) for part in self.parts)


class Neighbour:
    """Averaging by plain gloo along the one-peer exponential graph.

    In round t, with k = t mod ⌈log2 n⌉, rank i sends to i + 2^k (modulo n), receives from i − 2^k,
    and sets x ← ½ (x + received).
    """

    name = "gloo isend/irecv, directed"
    pairs = False

    def __init__(self, comm: MPI.Comm, count: int):
        """Allocate this rank's vector and a buffer for the received one.

        :param comm: all ranks
        :param count: number of float32 elements of a vector
        """
        self.rank = comm.rank
        self.n = comm.size
        self.t = 0
        self.x = torch.zeros(count)
        self.buffer = torch.zeros(count)

    def fill(self, value: float) -> None:
        """Set every element of this rank's vector to ``value``."""
        self.x.fill_(value)

    def round(self) -> None:
        """Make one round: send the vector, receive another one, and average both."""
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
        """Return the smallest and the largest element of this rank's vector."""
        return float(self.x.min()), float(self.x.max())


class Pairs(Neighbour):
    """Averaging by plain gloo in pairs: ranks i and i xor 2^k exchange, with the k of Neighbour."""

    name = "gloo isend/irecv, pairs"
    pairs = True


class Allreduce(Neighbour):
    """Averaging by MPI_Allreduce in place, followed by a division by the number of ranks."""

    name = "MPI_Allreduce"

    def __init__(self, comm: MPI.Comm, count: int):
        """Allocate this rank's vector.

        :param comm: all ranks
        :param count: number of float32 elements of the vector
        """
        super().__init__(comm, count)
        self.comm = comm

    def round(self) -> None:
        """Replace the vector by the exact average over all ranks."""
        self.comm.Allreduce(MPI.IN_PLACE, self.x.numpy())
        self.x.mul_(1 / self.n)


class Periodic:
    """Averaging by torch's PeriodicModelAverager with period 1, that is, in every call."""

    name = "torch PeriodicModelAverager"

    def __init__(self, comm: MPI.Comm, count: int):
        """Create a model whose parameters have gradients, because the averager skips others.

        :param comm: unused; the averager uses the default process group
        :param count: number of float32 elements of the model
        """
        self.model = Vectors(count)
        for part in self.model.parts:
            part.grad = torch.zeros(()).expand_as(part)
        self.averager = PeriodicModelAverager(period=1)
        self.fill = self.model.fill

    def round(self) -> None:
        """Replace the parameters by their average over all ranks."""
        self.averager.average_parameters(self.model.parameters())

    def ends(self) -> tuple[float, float]:
        """Return the smallest and the largest element of this rank's parameters."""
        parts = [part.detach() for part in self.model.parts]
        return min(float(p.min()) for p in parts), max(float(p.max()) for p in parts)


class Gradients(Periodic):
    """Averaging of gradients by DDP; the loss is ½ Σ x², so that the gradient of a rank is x."""

    def __init__(self, comm: MPI.Comm, count: int, cap: float = 25.0):
        """Create the model, and wrap it into DistributedDataParallel.

        :param comm: unused; DDP uses the default process group
        :param count: number of float32 elements of the model
        :param cap: size of DDP's buckets in MiB, its parameter bucket_cap_mb
        """
        self.model = Vectors(count)
        self.fill = self.model.fill
        self.name = f"torch DDP, bucket_cap_mb {cap:g}"
        self.ddp = DistributedDataParallel(
            self.model, bucket_cap_mb=cap, gradient_as_bucket_view=True, broadcast_buffers=False
        )

    def round(self) -> None:
        """Run forward and backward; the gradient then is the average of x over all ranks."""
        self.ddp.zero_grad(set_to_none=True)
        self.ddp().backward()

    def ends(self) -> tuple[float, float]:
        """Return the smallest and the largest element of this rank's gradient."""
        grads = [part.grad for part in self.model.parts]
        return min(float(g.min()) for g in grads), max(float(g.max()) for g in grads)


# -- training ---------------------------------------------------------------------------------


class Ddp:
    """Training of a model by torch's DistributedDataParallel and SGD with momentum 0.9."""

    def __init__(self, module: torch.nn.Module, lr: float, batches: Callable, cap: float):
        """Wrap the model into DistributedDataParallel.

        :param module: the model
        :param lr: learning rate
        :param batches: ``batches(index)[0]`` is this rank's batch in step ``index``
        :param cap: size of DDP's buckets in MiB, its parameter bucket_cap_mb
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
        """Make step number ``index``: forward, backward with averaged gradients, and update."""
        batch = self.batches(index)[0]
        self.optimizer.zero_grad()
        loss_and_correct(self.run(batch.inputs), batch.targets)[0].backward()
        self.optimizer.step()

    def open(self) -> None:
        """Do nothing, because this contender needs no preparation before its turn."""

    def close(self) -> None:
        """Do nothing, because this contender leaves nothing open after its turn."""

    def averaged(self) -> torch.nn.Module:
        """Return the model; its parameters, but not its buffers, are equal on all ranks."""
        return self.module

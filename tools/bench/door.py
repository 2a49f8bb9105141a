"""What a step through mpigossip.Gossip costs beside its optimizer's, and an exchange beside DDP.

    python tools/bench/door.py                         # cadence "never" against AdamW alone
    mpirun -n 4 python tools/bench/door.py --exchange  # an exchange with its copies, and all-reduce
    tools/labs/net.sh run 2 python tools/bench/door.py --layers  # sent during backward, and after

25 million parameters in 160 tensors; with --layers 12.6 million in 24, forward and backward of a
batch included. Contenders take turns, and medians are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

import mpigossip

TENSORS, SIZE = 160, 156_250
DEPTH, WIDTH = 12, 1024
COPIES = {
    "x -> outbox": "the model as it is, where AdamW then steps (dsgd, adapt-then-combine)",
}
"""Passes over model-sized memory beside AdamW's own and the sum, which is formed in x."""


class Sum(nn.Module):
    """Parameters and their sum."""

    def __init__(self):
        """With gradients, as after a backward pass."""
        super().__init__()
        self.all = nn.ParameterList(torch.randn(SIZE) for _ in range(TENSORS))
        for p in self.all:
            p.grad = torch.randn(SIZE)

    def forward(self):
        """A scalar."""
        return sum(p.sum() for p in self.all)


def turns(contenders: dict[str, Callable[[], None]], rounds: int, meet: Callable) -> dict:
    """Median seconds of each, taken in turns; on all ranks at once."""
    took: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 2):
        for name, work in contenders.items():
            meet()
            begun = time.perf_counter()
            work()
            if turn >= 2:
                took[name].append(time.perf_counter() - begun)
    return {name: statistics.median(each) for name, each in took.items()}


def bare(world, rounds: int) -> dict:
    """AdamW alone, and the same in Gossip with a cadence that never exchanges."""
    plain, wrapped = Sum(), Sum()
    alone = torch.optim.AdamW(plain.parameters())
    inner = torch.optim.AdamW(wrapped.parameters())
    gossip = mpigossip.Gossip(world, wrapped, inner, cadence="never")
    found = turns({"adamw": alone.step, "gossip": gossip.step}, rounds, world.barrier)
    return found | {"ratio": found["gossip"] / found["adamw"], "bar": 1.25}


def exchange(world, rounds: int) -> dict:
    """What an exchange adds to a step, and what DDP adds to backward for as many bytes, in turns.

    Both with all their copies. ``gloo``: one bare all-reduce of one array, as a yardstick.
    """
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29531")
    dist.init_process_group("gloo", rank=world.rank, world_size=world.size)
    made = Sum()
    inner = torch.optim.SGD(made.parameters(), lr=0.0)
    inner.step = lambda: None  # what is left of a step is the exchange and its copies
    gossip = mpigossip.Gossip(world, made, inner)
    ddp = nn.parallel.DistributedDataParallel(Sum())
    whole = torch.randn(TENSORS * SIZE)

    def backward(wrapped: bool) -> None:
        with contextlib.nullcontext() if wrapped else ddp.no_sync():
            ddp().backward()

    contenders = {
        "exchange": gossip.step,
        "backward with DDP": lambda: backward(True),
        "backward": lambda: backward(False),
        "gloo": lambda: dist.all_reduce(whole),
    }
    found = turns(contenders, rounds, world.barrier)
    dist.destroy_process_group()
    reduced = found["backward with DDP"] - found["backward"]
    ratios = {
        "times DDP": reduced / found["exchange"],
        "times gloo": found["gloo"] / found["exchange"],
    }
    return found | ratios | {"bar": 2.5} | COPIES


def layers(world, rounds: int, batch: int) -> dict:
    """A whole step, its exchange sent during backward, after it, or not at all; in turns.

    Nothing is gained but on ranks with hosts of their own, each with a core to spare for MPI.
    """

    def contender(**options) -> Callable[[], None]:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
        optimizer = torch.optim.AdamW(model.parameters())
        inputs = torch.randn(batch, WIDTH)
        if options:
            optimizer = mpigossip.Gossip(world, model, optimizer, **options)

        def step() -> None:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()

        return step

    contenders = {
        "alone": contender(),
        "after backward": contender(overlap="never"),
        "during backward": contender(overlap="layers"),
    }
    found = turns(contenders, rounds, world.barrier)
    exchange = found["after backward"] - found["alone"]
    hidden = found["after backward"] - found["during backward"]
    return found | {"exchange": exchange, "hidden": hidden / exchange}


def main() -> None:
    """Print one JSON line, on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--exchange", action="store_true")
    parser.add_argument("--layers", action="store_true")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with mpigossip.world() as world:
        if options.layers:
            found = layers(world, options.rounds, options.batch)
        else:
            found = (exchange if options.exchange else bare)(world, options.rounds)
        if world.rank == 0:
            print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

"""What a step through mpigossip.Gossip costs beside its optimizer's, and an exchange beside DDP's.

    python tools/bench/door.py                         # cadence "never" against AdamW alone
    mpirun -n 4 python tools/bench/door.py --exchange  # an exchange with its copies, and all-reduce

25 million parameters in 160 tensors. Contenders take turns, and medians are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import mpigossip

TENSORS, SIZE = 160, 156_250
COPIES = {
    "x -> outbox": "the model as it is, where AdamW then steps (dsgd, adapt-then-combine)",
    "mixed -> x": "the sum of own and received models, into the parameters",
}
"""Passes over model-sized memory beside AdamW's own and the exchange's sum."""


def model() -> torch.nn.Module:
    """Parameters and nothing else, with gradients."""
    made = torch.nn.Module()
    made.all = torch.nn.ParameterList(torch.randn(SIZE) for _ in range(TENSORS))
    for p in made.all:
        p.grad = torch.randn(SIZE)
    return made


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
    plain, wrapped = model(), model()
    alone = torch.optim.AdamW(plain.parameters())
    inner = torch.optim.AdamW(wrapped.parameters())
    gossip = mpigossip.Gossip(world, wrapped, inner, cadence="never")
    found = turns({"adamw": alone.step, "gossip": gossip.step}, rounds, world.barrier)
    return found | {"ratio": found["gossip"] / found["adamw"], "bar": 1.25}


def exchange(world, rounds: int) -> dict:
    """What an exchange adds to a step, and DDP's all-reduce of as many bytes, in turns."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29531")
    dist.init_process_group("gloo", rank=world.rank, world_size=world.size)
    made = model()
    inner = torch.optim.SGD(made.parameters(), lr=0.0)
    inner.step = lambda: None  # what is left of a step is the exchange and its copies
    gossip = mpigossip.Gossip(world, made, inner)
    # DDP's buckets of 25 MB, each reduced, divided, waited for in order
    whole = torch.randn(TENSORS * SIZE)
    buckets = whole.split(25 * 2**20 // 4)

    def all_reduce() -> None:
        work = [dist.all_reduce(bucket, async_op=True) for bucket in buckets]
        for one in work:
            one.wait()
        whole.div_(world.size)

    found = turns({"exchange": gossip.step, "all-reduce": all_reduce}, rounds, world.barrier)
    dist.destroy_process_group()
    return found | {"faster": found["all-reduce"] / found["exchange"], "bar": 2.5} | COPIES


def main() -> None:
    """Print one JSON line, on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--exchange", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with mpigossip.world() as world:
        found = (exchange if options.exchange else bare)(world, options.rounds)
        if world.rank == 0:
            print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

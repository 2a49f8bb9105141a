"""Program that is a member: of several ranks, with DDP or FSDP2, or of one process.

python -m tests.optim.in_member FOLDER ddp|fsdp|plain [replay]
"""

import sys
import time

import torch
from torch import nn

import mpigossip

CHUNKS = 60


def wrapped(model, kind, world):
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model, process_group=world.node_group())
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model[0], mesh=world.node_mesh())
        fully_shard(model, mesh=world.node_mesh())
    return model


def train(folder, kind, world, replay):
    torch.manual_seed(0)
    # The 7 rows of a matrix can't be divided equally among 2 ranks.
    model = wrapped(nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 1)), kind, world)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    more = {} if world is None else {"world": world}
    rank, size = (0, 1) if world is None else (world.rank, world.size)
    with mpigossip.join(
        folder, model, optimizer, chunks=CHUNKS, lease_s=20.0, poll_s=0.1, replay=replay, **more
    ) as member:
        for chunk in member:
            inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(chunk))[rank::size]
            for _ in range(2):
                optimizer.zero_grad()
                loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
                loss.backward()
                optimizer.step()
            member.log(loss=loss)
            time.sleep(0 if replay else 0.2)
    full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    total = torch.cat([p.detach().ravel() for p in full]).double().sum().item()
    # Write the line by one call, because several ranks write to the same output.
    sys.stdout.write(f"rank {rank}: finished {member.finished}, sum {total!r}\n")
    sys.stdout.flush()


def main(folder, kind, replay=""):
    if kind == "plain":
        train(folder, kind, None, bool(replay))
        return
    with mpigossip.world(ranks_per_node="host") as world:
        train(folder, kind, world, bool(replay))


if __name__ == "__main__":
    main(*sys.argv[1:])

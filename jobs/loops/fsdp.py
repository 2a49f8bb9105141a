"""A GPT sharded by FSDP2 within each node; only the lines marked <- decentralize it.

    mpirun -n 4 python fsdp.py --ranks-per-node 2
    mpirun -n 6 python fsdp.py --ranks-per-node 3 --steps 200    (resumes the first run)

With HSDP, replicas of the sharded model are kept equal by an all-reduce. Here, each node is such a
replica, and gossip replaces the all-reduce. The model, its optimizer and its batches are imported
from gpt.py. The run directory contains the log and the checkpoints.
"""

import argparse
from pathlib import Path

import torch
from gpt import CLIP, GPT, RATE, configure, get_batch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import mpigossip  # <-


def shard(model, mesh, bf16):
    """Shard the model over the ranks of a node.

    Each block is gathered only for its own forward and backward passes. All other parameters are
    gathered for the passes of the whole model.

    :param model: the model, which is changed in place
    :param mesh: device mesh of the ranks of the node
    :param bf16: whether to compute in bfloat16
    """
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def main():
    """Train from the first step, or from the newest checkpoint in the folder, to the last step."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--ranks-per-node",
        default="host",
        help='number of ranks, or "host" for all ranks of a host',
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--text", type=Path, default=Path(__file__))
    parser.add_argument("--out", type=Path, default=Path("runs/fsdp"))
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    parser.add_argument("--wire", default="fp32", help='messages; the loss with "bf16" is unknown')
    options = parser.parse_args()
    ranks_per_node = options.ranks_per_node
    if ranks_per_node != "host":
        ranks_per_node = int(ranks_per_node)
    torch.set_num_threads(1)
    torch.manual_seed(1337)
    world = mpigossip.world(ranks_per_node=ranks_per_node)  # <-
    device = world.device()
    model = shard(GPT().to(device), world.node_mesh(), options.bf16)  # <-
    optimizer = configure(model)
    # The style "awc" sends the shards during forward and backward, which do not change them.
    options_of_run = {"style": "awc", "wire": options.wire}
    options_of_run |= {"run": options.out, "steps": options.steps}
    optimizer = mpigossip.Gossip(world, model, optimizer, **options_of_run)  # <-
    data = torch.tensor(list(options.text.read_bytes()))
    draw = torch.Generator().manual_seed(1337 + world.rank)
    optimizer.keep(draw=draw)
    for step in range(optimizer.resume(), options.steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / 10)
        loss = model(*(tensor.to(device) for tensor in get_batch(data, draw)))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.log(loss=loss)
        if (step + 1) % options.save_every == 0:
            optimizer.save()
        if optimizer.stopping:
            optimizer.exit()
    # All ranks run this, because gathering the sharded model is collective.
    with optimizer.averaged(), torch.no_grad():
        draw = torch.Generator().manual_seed(0)
        error = model(*(tensor.to(device) for tensor in get_batch(data, draw)))
    if world.rank == 0:
        print(f"loss of the averaged model {float(error):.4f}", flush=True)
    world.close()  # <-


if __name__ == "__main__":
    main()

"""A loop over iterators of unequal length; all nodes leave it at the same step.

mpirun -n 2 python unequal.py
"""

import torch
from torch import nn

import mpigossip

torch.set_num_threads(1)
torch.manual_seed(0)
with mpigossip.world() as world:
    model = nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = mpigossip.Gossip(world, model, optimizer)
    torch.manual_seed(world.rank)  # other samples on each node
    batches = (torch.randn(16, 5) for _ in range(20 + 3 * world.rank))
    while True:
        inputs = next(batches, None)
        if world.agree(inputs is None):  # True on all nodes as soon as it is True on one of them
            break
        optimizer.zero_grad()
        (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    print(f"node {world.rank}: {optimizer.steps} steps", flush=True)

"""An embedding with sparse gradients; each node updates rows of its own samples.

mpirun -n 2 python sparse.py
"""

import torch
from torch import nn

import mpigossip

ROWS = 1000

torch.set_num_threads(1)
torch.manual_seed(0)
with mpigossip.world() as world:
    model = nn.EmbeddingBag(ROWS, 8, mode="mean", sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.05)
    optimizer = mpigossip.Gossip(world, model, optimizer)
    torch.manual_seed(world.rank)  # other samples on each node
    own_rows = torch.arange(ROWS)[world.rank :: world.size]  # each node sees other rows
    for _ in range(100):
        words = own_rows[torch.randint(len(own_rows), (64, 5))]
        optimizer.zero_grad()
        loss = (model(words) - 1).square().mean()
        loss.backward()
        optimizer.step()
    with optimizer.averaged() as averaged, torch.no_grad():
        error = (averaged(torch.arange(ROWS).view(-1, 5)) - 1).square().mean()
    if world.rank == 0:
        print(f"error of the average on the rows of all nodes {error:.3f}")

"""A loop that computes the update of the parameters itself; SGD only subtracts it.

mpirun -n 2 python by_hand.py
"""

import torch
from torch import nn

import mpigossip

torch.set_num_threads(1)
torch.manual_seed(0)
with mpigossip.world() as world:
    model = nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)  # subtracts .grad, which is the update
    optimizer = mpigossip.Gossip(world, model, optimizer)
    torch.manual_seed(world.rank)  # other samples on each node
    for _ in range(200):
        inputs = torch.randn(16, 5)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        gradients = torch.autograd.grad(loss, [*model.parameters()])
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = 0.02 * gradient.clamp(-1, 1)  # before: parameter -= 0.02 * …
        optimizer.step()
    if world.rank == 0:
        print(f"loss {loss.detach():.4f}")

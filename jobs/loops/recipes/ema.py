"""Averages over time (EMA and SWA) of a decentralized model.

EMA is the exponential moving average of the model, SWA the plain mean of the last models.

mpirun -n 2 python ema.py
"""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import mpigossip

STEPS = 100

torch.set_num_threads(1)
torch.manual_seed(0)
with mpigossip.world() as world:
    model = nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = mpigossip.Gossip(world, model, optimizer)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    swa = AveragedModel(model)  # the plain mean of the models of the second half
    torch.manual_seed(world.rank)  # other samples on each node
    for step in range(STEPS):
        inputs = torch.randn(16, 5)
        targets = inputs.sum(1, keepdim=True) + 0.5 * torch.randn(16, 1)
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
        ema.update_parameters(model)
        if step >= STEPS // 2:
            swa.update_parameters(model)
    test = torch.randn(1000, 5, generator=torch.Generator().manual_seed(1))
    for name, part in {"model": model, "EMA": ema, "SWA": swa}.items():
        with optimizer.averaged(part) as averaged, torch.no_grad():
            error = (averaged(test) - test.sum(1, keepdim=True)).square().mean()
        print(f"node {world.rank}: error of the averaged {name} {error:.5f}", flush=True)

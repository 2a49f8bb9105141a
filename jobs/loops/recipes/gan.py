"""A GAN; each of its two models has its own optimizer and exchange.

Its real points are a cloud in the plane.

mpirun -n 2 python gan.py
"""

import torch
from torch import nn
from torch.nn import functional as F

import mpigossip

CENTRE = torch.tensor([3.0, -2.0])
"""Mean of the real points."""


def network(inputs, outputs):
    """Return a network with one hidden layer."""
    return nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, outputs))


def score(logits, label):
    """Return the mean loss of a critic's answers, if all of these points have this label."""
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, label))


torch.set_num_threads(1)
torch.manual_seed(0)
with mpigossip.world() as world:
    generator, critic = network(4, 2), network(2, 1)
    rates = {"lr": 3e-3, "betas": (0.5, 0.9)}
    generator_optimizer = torch.optim.Adam(generator.parameters(), **rates)
    critic_optimizer = torch.optim.Adam(critic.parameters(), **rates)
    generator_optimizer = mpigossip.Gossip(world, generator, generator_optimizer)
    critic_optimizer = mpigossip.Gossip(world, critic, critic_optimizer)
    torch.manual_seed(world.rank)  # other points on each node
    for _ in range(200):
        real = CENTRE + torch.randn(64, 2)
        generated = generator(torch.randn(64, 4))
        critic_optimizer.zero_grad()
        (score(critic(real), 1.0) + score(critic(generated.detach()), 0.0)).backward()
        critic_optimizer.step()
        generator_optimizer.zero_grad()
        score(critic(generated), 1.0).backward()
        generator_optimizer.step()
    with generator_optimizer.averaged() as averaged, torch.no_grad():
        x, y = averaged(torch.randn(1000, 4)).mean(0).tolist()
    if world.rank == 0:
        print(f"mean of the generated points {x:.1f} {y:.1f}")

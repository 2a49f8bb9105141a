"""Sharpness-aware minimization (SAM) that wraps `Gossip`.

Run it with: mpirun -n 2 python sam.py
"""

import torch
from torch import nn

import mpigossip


class SAM(torch.optim.Optimizer):
    """Optimizer that uses the gradient at x + ρ g / ‖g‖ for a step from x (Foret et al. 2021)."""

    def __init__(self, parameters, base, rho):
        """Create the base optimizer, which makes the step, by ``base(groups)``."""
        super().__init__(parameters, {"rho": rho})
        self.base_optimizer = base(self.param_groups)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure):
        """Make a step from the gradient at x; the closure computes loss and gradient again."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        before = [p.clone() for p in parameters]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for parameter in parameters:
            parameter.add_(parameter.grad * self.defaults["rho"] / (norm + 1e-12))
        with torch.enable_grad():
            loss = closure()
        for parameter, value in zip(parameters, before, strict=True):
            parameter.copy_(value)
        self.base_optimizer.step()
        return loss


torch.set_num_threads(1)
torch.manual_seed(0)
with mpigossip.world() as world:
    model = nn.Linear(5, 1)

    def base(groups):
        """Return the optimizer that makes SAM's steps and exchanges their result."""
        sgd = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
        return mpigossip.Gossip(world, model, sgd, overlap="never")

    optimizer = SAM(model.parameters(), base, rho=0.05)
    torch.manual_seed(world.rank)  # other samples on each node
    for _ in range(60):
        inputs = torch.randn(16, 5)

        def compute_loss(inputs=inputs):
            """Return the loss, with its gradient in the parameters."""
            optimizer.zero_grad()
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            loss.backward()
            return loss

        compute_loss()
        loss = optimizer.step(compute_loss).detach()
    if world.rank == 0:
        print(f"loss {loss:.4f}")

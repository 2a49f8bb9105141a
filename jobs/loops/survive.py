"""A loop that continues after a rank failure, with Open MPI 5.

    mpirun --with-ft ulfm -n 4 python survive.py

The lines marked `# <-` are necessary for this. The loop counts by `optimizer.steps`, because the
survivors continue after the last step that all of them have completed, so that some of them repeat
a few steps. With another MPI, the program runs like any other loop, and a rank failure ends it.
"""

import argparse
import hashlib

import torch
from torch import nn

import mpigossip


def net():
    """Build a small network, with the same initial parameters on all nodes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))


class Loader:
    """Batches of node `rank` of `size` nodes, by step; each node has its own part of the data."""

    def __init__(self, rank, size):
        self.rank = rank
        self.size = size

    def batch(self, step):
        """Return the inputs (32, 32) and targets (32, 1) of a step."""
        draw = torch.Generator().manual_seed(self.size * step + self.rank)
        inputs = torch.randn(32, 32, generator=draw)
        return inputs, inputs.sum(1, keepdim=True) / 4


def main():
    """Train, then print the loss of the last batch and the digest of each node's parameters."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--evaluate-every", type=int, default=50)
    parser.add_argument("--out", help="run directory for the log and checkpoints")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with mpigossip.world() as world:
        model = net()
        loader = Loader(world.rank, world.size)

        def changed(world):  # <- The survivors call this with their new world.
            nonlocal loader
            loader = Loader(world.rank, world.size)

        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        optimizer = mpigossip.Gossip(
            world,
            model,
            optimizer,
            run=options.out,
            survive=True,  # <-
            on_change=changed,  # <-
        )
        if options.out:
            optimizer.resume()
        loss = torch.tensor(float("nan"))  # This is printed if no step is left.
        while optimizer.steps < options.steps:  # <-
            inputs, targets = loader.batch(optimizer.steps)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            if options.out:
                optimizer.log(loss=loss, samples=len(inputs))
            if optimizer.steps % options.evaluate_every == 0:
                with optimizer.averaged() as averaged, torch.no_grad():
                    inputs, targets = loader.batch(0)
                    error = nn.functional.mse_loss(averaged(inputs), targets)
                with optimizer.surviving():  # <- needed around collective calls of the program
                    worst = world.agree(int(1e6 * error))
                    if world.rank == 0:
                        print(f"step {optimizer.steps}: {worst / 1e6:.4f}", flush=True)
                if options.out:
                    optimizer.save()
        flat = nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
        print(
            f"node {world.original_ranks[world.rank]} of {world.size}: loss "
            f"{float(loss.detach()):.4f}, "
            f"{hashlib.sha256(flat.tobytes()).hexdigest()}",
            flush=True,
        )


if __name__ == "__main__":
    main()

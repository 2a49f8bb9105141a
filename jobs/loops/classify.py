"""A classifier with a log, checkpoints and stopping; only the lines marked <- decentralize it.

    mpirun -n 4 python classify.py --out runs/clouds

Like a job, it writes a log, a progress line, checkpoints and a summary. If it is started again, it
resumes from its last checkpoint, and the result is bitwise identical. SIGTERM, SIGUSR1,
``touch runs/clouds/STOP`` and the end of the allocation stop it with a checkpoint, and with the
exit code after which batch scripts queue it again.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

import mpigossip  # <-


def clouds(count, draw):
    """Return points (count, 64) of ten overlapping clouds, and the index of each point's cloud."""
    centres = torch.randn(10, 64, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(10, (count,), generator=draw)
    return centres[labels] + 3 * torch.randn(count, 64, generator=draw), labels


def accuracy(model, points, labels):
    """Return the fraction of the points that the model classifies correctly."""
    model.eval()
    with torch.no_grad():
        right = (model(points).argmax(1) == labels).float().mean()
    model.train()
    return float(right)


def main():
    """Train from the last checkpoint in the folder, or from the first step, to the last step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--out", default="runs/clouds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    test = clouds(1000, torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10)
    )
    with mpigossip.world() as world:  # <-
        draw = torch.Generator().manual_seed(10 + world.rank)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        # With style="awc", the algorithm "dsgd" sends its message while the model computes, and the
        # message is one vector. The algorithm of the papers, algorithm="dmsgd" with plain SGD, can
        # send only after the gradient is known, and sends two vectors.
        optimizer = mpigossip.Gossip(  # <-
            world, model, optimizer, style="awc", run=options.out, steps=options.steps
        )
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, options.steps)
        optimizer.keep(schedule=schedule, draw=draw)  # <-
        torch.manual_seed(world.rank)  # makes dropout differ between nodes
        for step in range(optimizer.resume(), options.steps):  # <-
            points, labels = clouds(32, draw)
            loss = F.cross_entropy(model(points), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            optimizer.log(loss=loss, samples=len(points))  # <-
            if (step + 1) % options.save_every == 0:
                with optimizer.averaged():  # <-
                    right = accuracy(model, *test)
                optimizer.log(test_accuracy=right)  # <-
                optimizer.save()  # <-
            if optimizer.stopping:  # <-
                optimizer.exit()  # <-


if __name__ == "__main__":
    main()

"""A network trained with Accelerate; only the lines marked <- make the training decentralized.

    mpirun -n 3 python accelerate_loop.py --out runs/accelerate
    mpirun -n 3 python accelerate_loop.py --out runs/accelerate --resume 20

The program accumulates gradients, clips them, uses a schedule and writes Accelerate's own
checkpoints, in one folder per node. SIGTERM, ``touch runs/accelerate/run/STOP`` and the end of the
allocation stop it after any step, with a checkpoint and exit code 75; the last line of the output
says which step to resume.
"""

import argparse
import hashlib
import math
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mpigossip  # <-

BATCH = 4
ACCUMULATE = 2
CLIP = 1.0
RATE = 3e-3


def points(count=240):
    """Return a data set of points (2,) of the plane; the label is the spiral arm, 0 to 2."""
    draw = torch.Generator().manual_seed(1)
    arm = torch.randint(3, (count,), generator=draw)
    far = torch.rand(count, generator=draw)
    angle = 2.1 * arm + 4 * far + 0.2 * torch.randn(count, generator=draw)
    return TensorDataset(torch.stack([far * angle.cos(), far * angle.sin()], 1), arm)


def train(world, options):
    """Train from the first step, or from a checkpoint, to the last step."""
    data = points()
    out = options.out
    sampler = DistributedSampler(data, world.size, world.rank)  # <-
    out = out / f"{world.rank}"  # <-
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    optimizer = gossip = mpigossip.Gossip(world, model, optimizer, run=options.out / "run")  # <-
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    accelerator = Accelerator(cpu=options.cpu, gradient_accumulation_steps=ACCUMULATE)
    model, optimizer, scheduler, loader = accelerator.prepare(
        model,
        optimizer,
        scheduler,
        DataLoader(data, BATCH, sampler=sampler, generator=torch.Generator()),
    )
    if options.resume:
        accelerator.load_state(out / str(options.resume))
    loss = torch.tensor(math.nan)
    step = options.resume
    # If the number of batches is odd, the last step has only one batch.
    steps_per_pass = math.ceil(len(loader) / ACCUMULATE)
    while step < options.steps:
        loader.set_epoch(step // steps_per_pass)
        for inputs, targets in accelerator.skip_first_batches(
            loader, step % steps_per_pass * ACCUMULATE
        ):
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            step += 1
            if step % options.save_every == 0:
                accelerator.save_state(out / str(step))
            gossip.exit_if_stopping(accelerator.save_state, out / str(step))  # <-
            if step == options.steps:
                break
    parameters = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
    print(f"rank {world.rank}: loss {loss:.4f}, {hashlib.sha256(parameters).hexdigest()}")


def main():
    """Read the options and train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--resume", type=int, default=0, help="step of the checkpoint to resume")
    parser.add_argument("--cpu", action="store_true", help="use the CPU even if there is a GPU")
    parser.add_argument("--out", type=Path, default=Path("runs/accelerate"))
    options = parser.parse_args()
    torch.manual_seed(1337)
    with mpigossip.world() as world:  # <-
        train(world, options)


if __name__ == "__main__":
    main()

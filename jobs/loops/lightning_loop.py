"""A network trained by Lightning's Trainer; only the lines marked <- decentralize the training.

    mpirun -n 3 python lightning_loop.py --out runs/lightning
    mpirun -n 3 python lightning_loop.py --out runs/lightning --resume 2

The program uses automatic optimization (Lightning's closures), accumulates gradients, clips them,
uses a schedule and writes Lightning's own checkpoints, in one folder per node. A run that resumes
from a checkpoint inside an epoch would start that epoch again, because Lightning does so. SIGTERM,
``touch runs/lightning/run/STOP`` and the end of the allocation therefore stop the program only at
the end of an epoch, with exit code 75.
"""

import argparse
import hashlib
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
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


class Arms(lightning.LightningModule):
    """Classifier that predicts the arm on which a point lies."""

    def __init__(self, world, options):
        """Create the layers.

        :param world: the ranks that train
        :param options: options of the command line; the learning rate falls to 0 within
            ``options.passes`` epochs
        """
        super().__init__()
        self.world = world
        self.passes = options.passes
        self.run = options.out / "run"
        self.layers = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 3))

    def training_step(self, batch, index):
        """Return the loss of a batch."""
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self.layers(inputs), targets)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        """Return AdamW with gossip, and a cosine schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=RATE)
        optimizer = mpigossip.Gossip(self.world, self, optimizer, run=self.run)  # <-
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.passes)
        return [optimizer], [scheduler]


def train(world, options):
    """Train from the first epoch, or from a checkpoint, to the last epoch."""
    data = points()
    out = options.out
    sampler = DistributedSampler(data, world.size, world.rank)  # <-
    out = out / f"{world.rank}"  # <-
    model = Arms(world, options)
    loader = DataLoader(data, BATCH, sampler=sampler)
    callbacks = [ModelCheckpoint(out, save_top_k=-1)]
    callbacks.append(mpigossip.Gossip.callback(lightning))  # <-
    trainer = lightning.Trainer(
        accelerator=options.device,
        devices=1,
        max_epochs=options.passes,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=CLIP,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    resumed = out.glob(f"epoch={options.resume - 1}-*.ckpt") if options.resume else [None]
    trainer.fit(model, loader, ckpt_path=next(iter(resumed)))
    loss = trainer.callback_metrics["loss"]
    parameters = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
    print(f"rank {world.rank}: loss {loss:.4f}, {hashlib.sha256(parameters).hexdigest()}")


def main():
    """Read the options and train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--passes", type=int, default=6)
    parser.add_argument(
        "--resume", type=int, default=0, help="number of epochs of the checkpoint to resume"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or gpu")
    parser.add_argument("--out", type=Path, default=Path("runs/lightning"))
    options = parser.parse_args()
    torch.manual_seed(1337)
    with mpigossip.world() as world:  # <-
        train(world, options)


if __name__ == "__main__":
    main()

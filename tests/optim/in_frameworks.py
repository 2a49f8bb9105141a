"""Program for MPI ranks that compares steps made by Accelerate and Lightning with steps of torch.

It prints one line for each check and rank: the name of the check, and whether the parameters are
bitwise identical.
"""

import warnings

import lightning
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader

import mpigossip
from mpigossip.config import JobError

STEPS = 6
CLIP = 0.05
QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "max_epochs": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


def made(world):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    inner = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return model, mpigossip.Gossip(world, model, inner)


def scaler():
    return torch.amp.GradScaler("cpu", init_scale=16.0)


def batches(rank):
    """Return a rank's inputs; with the third input of rank 1, the scaled loss overflows float16."""
    draw = torch.Generator().manual_seed(rank)
    samples = [torch.randn(8, 4, generator=draw) for _ in range(STEPS)]
    if rank == 1:
        samples[2] *= 3e4
    return samples


def plain(world, clip=None, scaling=None, dtype=None):
    """Train without a framework."""
    model, optimizer = made(world)
    for batch in batches(world.rank):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = model(batch).square().mean()
        (scaling.scale(loss) if scaling else loss).backward()
        if scaling:
            scaling.unscale_(optimizer)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if scaling:
            scaling.step(optimizer)
            scaling.update()
        else:
            optimizer.step()
    return model, optimizer


def accelerated(world, scaling):
    model, optimizer = made(world)
    Accelerator(cpu=True)
    wrapped = AcceleratedOptimizer(optimizer, scaler=scaling)
    for batch in batches(world.rank):
        wrapped.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(batch).square().mean()
        scaling.scale(loss).backward()
        wrapped.step()
    return model, optimizer


class Module(lightning.LightningModule):
    """Module that makes the same step in Lightning's loop."""

    def __init__(self, world, manual):
        super().__init__()
        self.model, self.optimizer = made(world)
        self.automatic_optimization = not manual

    def training_step(self, batch, index):
        loss = self.model(batch).square().mean()
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self):
        return self.optimizer


def lit(world, manual=False, **options):
    module = Module(world, manual)
    lightning.Trainer(**QUIET, **options).fit(
        module, DataLoader(batches(world.rank), batch_size=None)
    )
    return module.model, module.optimizer


def half(scaling):
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaling)]}


def same(one, two):
    parameters = [[p for p in model.parameters()] for model, _ in (one, two)]
    return all(map(torch.equal, *parameters)) and one[1].engine.index == two[1].engine.index


def finite(one):
    return all(p.isfinite().all() for p in one[0].parameters())


def refused(world, optimizer):
    try:
        mpigossip.Gossip(world, made(world)[0], optimizer)
    except JobError as error:
        return "has been wrapped by" in str(error)
    return False


def main(world):
    fp16 = torch.float16
    scaling = scaler()
    scaled = plain(world, scaling=scaling, dtype=fp16)
    clipped = plain(world, clip=CLIP, scaling=scaler(), dtype=fp16)
    low = plain(world, clip=CLIP, dtype=torch.bfloat16)
    sgd = torch.optim.SGD(nn.Linear(1, 1).parameters())
    checks = {
        "accelerate, scaler": same(accelerated(world, scaler()), scaled),
        "lightning": same(lit(world), plain(world)),
        "lightning, by hand": same(lit(world, manual=True), plain(world)),
        "lightning, bf16, clipped": same(
            lit(world, precision="bf16-mixed", gradient_clip_val=CLIP), low
        ),
        "lightning, scaler": same(lit(world, **half(scaler())), scaled),
        "lightning, scaler, clipped": same(
            lit(world, gradient_clip_val=CLIP, **half(scaler())), clipped
        ),
        "accelerate's optimizer refused": refused(world, AcceleratedOptimizer(sgd)),
        "lightning's optimizer refused": refused(world, LightningOptimizer(sgd)),
        "all steps taken": all(x[1].engine.index == STEPS for x in (scaled, clipped, low)),
        "an overflow is left out": finite(scaled) and finite(clipped),
        "there was one, on rank 1": scaling.get_scale() == (8.0 if world.rank == 1 else 16.0),
    }
    for name, good in checks.items():
        print(f"rank {world.rank}: {name}: {good}", flush=True)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    with mpigossip.world() as every:
        main(every)

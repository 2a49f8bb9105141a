"""A small GPT, trained as in nanoGPT; only the lines marked <- make the training decentralized.

    mpirun -n 4 python gpt.py --out runs/gpt
    mpirun -n 4 python gpt.py --out runs/gpt --resume 50

The program accumulates gradients, clips them, writes a cosine schedule into ``param_groups``, uses
bfloat16 autocast and writes the checkpoints of each rank. It predicts the bytes of a text, by
default of this file.
"""

import argparse
import hashlib
import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import mpigossip  # <-

VOCABULARY = 256
CONTEXT = 64
WIDTH = 64
HEADS = 4
LAYERS = 2
BATCH = 8
ACCUMULATE = 2
CLIP = 1.0
RATE = 3e-3
WARMUP = 10


class Block(nn.Module):
    """Causal attention and a network of two layers, both with a residual connection."""

    def __init__(self):
        """Create the layers with the widths WIDTH and 4 · WIDTH."""
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.between = nn.LayerNorm(WIDTH)
        self.attend = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        """Return the outputs of the block, of the same shape (batch, time, WIDTH) as ``x``."""
        b, t, _ = x.shape
        parts = self.attend(self.before(x)).split(WIDTH, dim=2)
        q, k, v = (part.view(b, t, HEADS, -1).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.narrow(F.gelu(self.wide(self.between(x))))


class GPT(nn.Module):
    """Model that maps tokens (batch, time) and their successors to the mean loss.

    The output layer shares its weights with the embedding.
    """

    def __init__(self):
        """Create the embeddings, LAYERS blocks and the output layer."""
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, inputs, targets):
        """Return the mean cross-entropy in nats.

        :param inputs: tokens (batch, time)
        :param targets: the next token at each position, (batch, time)
        """
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.tokens(inputs) + self.positions(positions)
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_batch(data, draw):
    """Return inputs and targets (BATCH, CONTEXT) from random positions of the text.

    :param data: tokens of the text, (length,)
    :param draw: generator of the positions
    """
    starts = torch.randint(len(data) - CONTEXT - 1, (BATCH,), generator=draw).tolist()
    rows = torch.stack([data[i : i + CONTEXT + 1] for i in starts])
    return rows[:, :-1], rows[:, 1:]


def get_lr(step, steps):
    """Return the learning rate of a step: it rises linearly to RATE, then falls to a tenth of it.

    :param step: number of the step, from 0
    :param steps: number of steps of the training
    """
    if step < WARMUP:
        return RATE * (step + 1) / WARMUP
    fraction = (step - WARMUP) / max(steps - WARMUP, 1)
    return RATE * (0.55 + 0.45 * math.cos(math.pi * min(fraction, 1)))


def configure(model):
    """Return AdamW for the model, without weight decay on biases and norms."""
    wide = [p for p in model.parameters() if p.dim() >= 2]
    narrow = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": wide, "weight_decay": 0.1}, {"params": narrow, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))


def train_step(model, optimizer, data, draw, lr):
    """Update the model by the gradients of ACCUMULATE batches; return the mean of their losses.

    :param model: the model, which returns a loss
    :param optimizer: optimizer of the model
    :param data: tokens of the text, (length,)
    :param draw: generator of the positions of the batches
    :param lr: learning rate of this step
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    total = 0.0
    for _ in range(ACCUMULATE):
        inputs, targets = get_batch(data, draw)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(inputs, targets) / ACCUMULATE
        loss.backward()
        total += float(loss.detach())
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total


def main():
    """Train from the first step, or from a checkpoint, to the last step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--resume", type=int, default=0, help="step of the checkpoint to resume")
    parser.add_argument("--text", default=__file__)
    parser.add_argument("--out", type=Path, default=Path("runs/gpt"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1337)
    world = mpigossip.world()  # <-
    rank = world.rank  # <-
    options.out.mkdir(parents=True, exist_ok=True)
    data = torch.tensor(list(Path(options.text).read_bytes()))
    model = GPT()
    draw = torch.Generator().manual_seed(1337 + rank)
    optimizer = configure(model)
    optimizer = mpigossip.Gossip(world, model, optimizer, graph="one-peer-exponential")  # <-
    if options.resume:
        saved = torch.load(options.out / f"{options.resume}-{rank}.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        draw.set_state(saved["draw"])
    loss = float("nan")  # This is printed if no step is left.
    for step in range(options.resume, options.steps):
        loss = train_step(model, optimizer, data, draw, get_lr(step, options.steps))
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss:.4f}, {len(optimizer.state_dict()['state'])} states")
        if (step + 1) % options.save_every == 0:
            path = options.out / f"{step + 1}-{rank}.pt"
            kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(kept | {"draw": draw.get_state()}, path.with_suffix(".part"))
            path.with_suffix(".part").replace(path)
    parameters = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print(f"rank {rank}: loss {loss:.4f}, {hashlib.sha256(parameters).hexdigest()}", flush=True)
    world.close()  # <-


if __name__ == "__main__":
    main()

"""Memory of a rank whose node has cut the model by fully_shard, against the whole model in a rank.

    python tools/bench/fsdp_memory.py [--nodes 2] [--slots 4] [--layers 32] [--width 512] [--json]

A GPT is trained by dsgd with AdamW on nodes of so many ranks, and on as many nodes of one rank with
the whole model. Each rank's growth of PSS (/proc/self/smaps_rollup) since before the model was made
is looked at every few milliseconds: its most during the steps after the second, when everything
that a step keeps is there, and its value between two steps. Before that a tiny model was trained,
for what is loaded once. All exchanges are pushed (same_host = "put"), as on a cluster.

The bar: 1.15 x (parameters, gradient and AdamW's two moments) / slots + the two largest gathered
groups + activations (those of one batch, that autograd keeps) + what the mixer says that its
messages take. Exit code 1 where a rank is above it, or not below half of the whole model's.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, CONTEXT, BATCH, STEPS = 2048, 64, 1, 6
MB = 1e6


class Block(nn.Module):
    """Attention to what came before, and a network of two layers, both residual."""

    def __init__(self, width: int):
        """Of this width."""
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        """(batch, time, width) -> the same."""
        b, t, width = x.shape
        parts = self.attend(self.before(x)).split(width, dim=2)
        q, k, v = (part.view(b, t, -1, 64).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).reshape(b, t, width))
        return x + self.narrow(F.gelu(self.wide(self.between(x))))


class GPT(nn.Module):
    """Tokens (batch, time + 1) -> the mean loss of each by those before it."""

    def __init__(self, width: int, layers: int):
        """Of these sizes."""
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, rows):
        """The loss."""
        x = self.tokens(rows[:, :-1]) + self.places(torch.arange(CONTEXT))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), rows[:, 1:].flatten())


def pss() -> int:
    """Bytes of this process; shared pages by its part of them."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * int(re.search(r"^Pss:\s+(\d+)", text, re.M)[1])


class Watch:
    """The most PSS while it looks."""

    def __init__(self):
        """Looks from now on, in a thread."""
        self.most, self.looks, self._on = 0, True, False
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self):
        while self.looks:
            if self._on:
                self.most = max(self.most, pss())
            time.sleep(0.003)

    def begin(self):
        """What comes counts."""
        self._on = True

    def end(self) -> int:
        """The most; no more looks."""
        self.looks = False
        self._thread.join()
        return self.most


def made(world, width: int, layers: int, cut: bool) -> nn.Module:
    """The model, never whole in a rank where it is to be cut."""
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        model = GPT(width, layers)
    if cut:
        mesh = world.node_mesh()
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            part = p.to_local() if cut else p
            part.normal_(0, 0.02)
    return model


def activations(model: nn.Module, rows: torch.Tensor) -> int:
    """Bytes that autograd keeps of a forward pass, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(rows)
    return sum(kept.values())


def trained(world, model: nn.Module, rows: torch.Tensor, watch: Watch | None = None):
    """What has trained the model for some steps, looked at after the second."""
    import mpigossip

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    optimizer = mpigossip.Gossip(world, model, optimizer, same_host="put")
    for step in range(STEPS):
        optimizer.zero_grad()
        model(rows).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if watch and step == 1:
            watch.begin()
    return optimizer


def work(per: int, width: int, layers: int) -> None:
    """Train as a rank; rank 0 prints what all of them measured."""
    import mpigossip
    from mpigossip.mixing.base import Kind

    torch.set_num_threads(1)
    with mpigossip.world(300, ranks_per_node=per) as world:
        draw = torch.Generator().manual_seed(world.rank)
        rows = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1), generator=draw)
        small = made(world, 64, 1, per > 1)
        trained(world, small, rows).close()
        del small
        gc.collect()
        before = pss()
        model, watch = made(world, width, layers, per > 1), Watch()
        kept = activations(model, rows) if per == 1 else 0
        optimizer = trained(world, model, rows, watch)
        between, most = pss() - before, watch.end() - before
        averages = Kind.GLOBAL in optimizer.engine.cadence.kinds
        found = {
            "most": most, "between": between, "activations": kept,
            "exchange": optimizer.mixer.memory(averages),
            "parameters": sum(p.numel() for p in model.parameters()),
            "gathered": sorted((sum(p.numel() for p in one.parameters()) * 4
                                for one in model.blocks), reverse=True)[:2],
        }  # fmt: skip
        every = world.gather(found)
        if world.rank == 0:
            print(json.dumps(every))


def measured(nodes: int, per: int, width: int, layers: int) -> list[dict]:
    """What each rank found."""
    mpiexec = os.environ.get("MPIGOSSIP_MPIEXEC") or Path(sys.executable).parent / "mpiexec"
    words = [mpiexec, "-n", nodes * per, sys.executable, __file__, "--work", per, width, layers]
    # blocks that are freed go back at once, so that what is measured is what is held
    env = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "262144"}
    done = subprocess.run(list(map(str, words)), env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--work", type=int, nargs=3)
    options = parser.parse_args()
    if options.work:
        work(*options.work)
        return 0
    sizes = options.width, options.layers
    (whole, *_), parts = (measured(options.nodes, per, *sizes) for per in (1, options.slots))
    kept = 1.15 * 16 * parts[0]["parameters"] / options.slots
    gathered, exchange = sum(parts[0]["gathered"]), sum(parts[0]["exchange"].values())
    bar = kept + gathered + whole["activations"] + exchange
    most, between = (max(one[name] for one in parts) for name in ("most", "between"))
    found = {
        "parameters": parts[0]["parameters"], "bar": bar, "kept": kept, "gathered": gathered,
        "activations": whole["activations"], "exchange": exchange, "most": most,
        "between": between, "whole_most": whole["most"], "whole_between": whole["between"],
    }  # fmt: skip
    if options.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:14} {value / MB:9.1f} {'million' if name == 'parameters' else 'MB'}")
    return int(most > bar or most > whole["most"] / 2)


if __name__ == "__main__":
    sys.exit(main())

"""How nodes begin alike: one average of what is trained, rank 0's of what isn't."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from mpigossip.algorithms.base import no_state
from mpigossip.algorithms.local import Local
from mpigossip.cluster.world import World
from mpigossip.config import JobError
from mpigossip.engine.module import LOW
from mpigossip.engine.vector import Flat, flatten
from mpigossip.mixing.base import Mixer

CUT = 1 << 27
"""Bytes of rank 0's that are pickled at once."""
SIGNATURE = Local(no_state, no_state, raw=True)
"""A local step that is only looked at."""


def begin(world: World, mixer: Mixer, model: nn.Module) -> None:
    """Trained parameters and float buffers become the exact average, all else rank 0's.

    Collective. JobError, on all ranks, where models differ by more than values.
    """
    trained = [(n, p.data) for n, p in model.named_parameters() if p.requires_grad]
    frozen = [(n, p.data) for n, p in model.named_parameters() if not p.requires_grad]
    buffers = list(model.named_buffers())
    floats = [(n, b) for n, b in buffers if b.is_floating_point()]
    rest = frozen + [(n, b) for n, b in buffers if not b.is_floating_point()]
    mine = [(n, tuple(t.shape), str(t.dtype), t.stride()) for n, t in trained + floats + rest]
    first = world.broadcast(mine)
    with world.together(JobError):
        _same(first, mine)
    with torch.no_grad():
        for some in (trained, floats):
            if some:
                _average(mixer, [t for _, t in some])
        for _, tensor in rest:
            _from_rank_0(world, tensor)


def _same(first: list, mine: list) -> None:
    if first == mine:
        return
    wrong = next((b for a, b in zip(first, mine, strict=False) if a != b), None)
    name = wrong[0] if wrong else "its length"
    raise JobError(
        [f"the model is not that of rank 0, as {name} shows: all ranks need the same shapes, types "
         "and memory formats"]
    )  # fmt: skip


def _average(mixer: Mixer, tensors: list[torch.Tensor]) -> None:
    row = torch.cat([t.reshape(-1).float() for t in tensors]).unsqueeze(0)
    mean, at = mixer.mean(row), 0
    for t in tensors:
        t.copy_(mean[at : at + t.numel()].view(t.shape))
        at += t.numel()


def _from_rank_0(world: World, tensor: torch.Tensor) -> None:
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().copy()
    for at in range(0, flat.size, CUT):
        flat[at : at + CUT] = world.broadcast(flat[at : at + CUT])
    tensor.copy_(torch.from_numpy(np.array(flat)).view(tensor.dtype).view(tensor.shape))


def place(model: nn.Module, flat: Flat, packed: torch.Tensor) -> None:
    """Write a packed vector (count,) into the model's parameters."""
    assert flat == flatten(model, types=(torch.float32, *LOW)), "the model was changed"
    row = torch.zeros(flat.size)
    flat.unpack(packed, row)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, view in zip(flat.names, flat.views(row), strict=True):
            p = parameters[name]
            p.data.as_strided((p.numel(),), (1,)).copy_(view.reshape(-1))

"""A node's training state as named arrays and numbers, and back: what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from mpigossip.engine.state import joined, split
from mpigossip.engine.step import Engine
from mpigossip.groups.base import held
from mpigossip.store.checkpoint import NodeState


def snapshot(
    engine: Engine,
    buffers: Sequence[Mapping[str, torch.Tensor]],
    row: int,
    numbers: dict,
    spare: NodeState | None = None,
) -> NodeState | None:
    """Everything of one node: parameters, algorithm state, buffers (slot by slot) and counters.

    Collective over the node; None but in its first process.
    ``spare``: an earlier snapshot that nobody needs any more. Its memory is used again: fresh
    pages cost more time than the copy.
    """
    arrays = engine.arrays(row, spare.arrays if spare else None)
    group = engine.group
    for name in buffers[0] if buffers else ():
        each = group.to_first([of_slot[name] for of_slot in buffers])
        for slot, buffer in enumerate(each or ()):
            arrays[f"buffers/{slot}/{name}"] = plain(buffer).copy()
    flat = engine.vector.flat
    x = group.to_first([shard[row : row + 1] for shard in engine.vector.x])
    if x is None:
        return None
    return NodeState(
        parameters=joined(x, 0, flat, spare.parameters if spare else None),
        names=flat.names,
        shapes=flat.shapes,
        arrays=arrays,
        numbers=numbers,
    )


def plain(tensor: torch.Tensor) -> np.ndarray:
    """The values as an array of NumPy's, which knows no bfloat16: that is widened."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def restore(
    engine: Engine, buffers: Sequence[Mapping[str, torch.Tensor]], row: int, saved: NodeState
) -> None:
    """Put a node back, to the bit; the layout must be the one that was saved."""
    group = engine.group
    split(saved.parameters, engine.vector.x, row, engine.vector.flat, held(group))
    engine.restore(saved.arrays, saved.numbers, row)
    for slot, of_slot in zip(group.mine, buffers, strict=True):
        for name, buffer in of_slot.items():
            value = saved.arrays[f"buffers/{slot}/{name}"]
            buffer.copy_(torch.from_numpy(np.array(value)).view(buffer.shape))

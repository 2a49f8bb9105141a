"""A node's training state as named arrays and numbers, and back: what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from mpigossip.engine.state import joined, split
from mpigossip.engine.step import Engine
from mpigossip.store.checkpoint import NodeState


def snapshot(
    engine: Engine,
    buffers: Sequence[Mapping[str, torch.Tensor]],
    row: int,
    numbers: dict,
    spare: NodeState | None = None,
) -> NodeState:
    """Everything of one node: parameters, algorithm state, buffers (slot by slot) and counters.

    ``spare``: an earlier snapshot that nobody needs any more. Its memory is used again: fresh
    pages cost more time than the copy.
    """
    arrays = engine.arrays(row, spare.arrays if spare else None)
    for slot, of_slot in enumerate(buffers):
        for name, buffer in of_slot.items():
            arrays[f"buffers/{slot}/{name}"] = plain(buffer).copy()
    x, flat = engine.vector.x, engine.vector.flat
    return NodeState(
        parameters=joined(x, row, flat, spare.parameters if spare else None),
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
    split(saved.parameters, engine.vector.x, row, engine.vector.flat)
    engine.restore(saved.arrays, saved.numbers, row)
    for slot, of_slot in enumerate(buffers):
        for name, buffer in of_slot.items():
            value = saved.arrays[f"buffers/{slot}/{name}"]
            buffer.copy_(torch.from_numpy(np.array(value)).view(buffer.shape))

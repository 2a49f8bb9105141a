"""A node's training state as named arrays and numbers, and back: what a checkpoint holds."""

from __future__ import annotations

import numpy as np
import torch

from mpigossip.engine.state import joined, split
from mpigossip.engine.step import Engine
from mpigossip.store.checkpoint import NodeState
from mpigossip.training.replicas import Replicas


def snapshot(
    replicas: Replicas,
    engine: Engine,
    row: int,
    numbers: dict,
    spare: NodeState | None = None,
) -> NodeState:
    """Everything of one node: parameters, algorithm state, buffers and counters.

    ``spare``: an earlier snapshot that nobody needs any more. Its memory is used again: fresh
    pages cost more time than the copy.
    """
    arrays = engine.arrays(row, spare.arrays if spare else None)
    for slot, buffers in enumerate(replicas.buffers(row)):
        for name, buffer in buffers.items():
            arrays[f"buffers/{slot}/{name}"] = buffer.detach().cpu().numpy().copy()
    flat = replicas.flat
    return NodeState(
        parameters=joined(replicas.x, row, flat, spare.parameters if spare else None),
        names=flat.names,
        shapes=flat.shapes,
        arrays=arrays,
        numbers=numbers,
    )


def restore(replicas: Replicas, engine: Engine, row: int, saved: NodeState) -> None:
    """Put a node back, to the bit; the layout must be the one that was saved."""
    split(saved.parameters, replicas.x, row, replicas.flat)
    engine.restore(saved.arrays, saved.numbers, row)
    for slot, buffers in enumerate(replicas.buffers(row)):
        for name, buffer in buffers.items():
            value = saved.arrays[f"buffers/{slot}/{name}"]
            buffer.copy_(torch.from_numpy(np.array(value)).view(buffer.shape))

"""A node's training state as named arrays and numbers, and back: what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from mpigossip.store import direct
from mpigossip.store.checkpoint import NodeState
from mpigossip.training.replicas import Replicas


def leaves(state: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The arrays of a nested NamedTuple by name: ``("base/momentum", array)``."""
    if isinstance(state, torch.Tensor):
        yield prefix, state
        return
    for field in getattr(state, "_fields", ()):
        yield from leaves(getattr(state, field), f"{prefix}/{field}" if prefix else field)


def joined(
    parts: Sequence[torch.Tensor], row: int, replicas: Replicas, place: np.ndarray | None = None
) -> np.ndarray:
    """One row over all slots: shaped like x, cut to the parameters; (rows, 1) as it is.

    ``place``: an array of an earlier call that is overwritten; without one, whole pages are taken.
    """
    if parts[0].shape[1] == 1:
        return parts[0][row].cpu().numpy().copy()
    # a single slot's shard is the whole: packing it is the only copy
    whole = parts[0][row] if len(parts) == 1 else torch.cat([part[row].cpu() for part in parts])
    if place is None:
        size = replicas.flat.count * whole.element_size()
        place = torch.from_numpy(direct.pages(size)).view(whole.dtype).numpy()
    replicas.flat.pack(whole, torch.from_numpy(place))
    return place


def split(packed: np.ndarray, parts: Sequence[torch.Tensor], row: int, replicas: Replicas) -> None:
    """Inverse of :func:`joined`."""
    values = torch.from_numpy(np.array(packed))
    if parts[0].shape[1] == 1:
        for part in parts:
            part[row].copy_(values)
        return
    whole = torch.empty(replicas.flat.size)
    replicas.flat.unpack(values, whole)
    for part, piece in zip(parts, whole.chunk(len(parts)), strict=True):
        part[row].copy_(piece)


def snapshot(
    replicas: Replicas,
    states: Sequence[Any],
    row: int,
    numbers: dict,
    spare: NodeState | None = None,
) -> NodeState:
    """Everything of one node: parameters, algorithm state, buffers and counters.

    ``spare``: an earlier snapshot that nobody needs any more. Its memory is used again: fresh
    pages cost more time than the copy.
    """
    named = [dict(leaves(state)) for state in states]
    places = spare.arrays if spare else {}
    arrays = {
        f"state/{name}": joined(
            [slot[name] for slot in named], row, replicas, places.get(f"state/{name}")
        )
        for name in named[0]
    }
    for slot, buffers in enumerate(replicas.buffers(row)):
        for name, buffer in buffers.items():
            arrays[f"buffers/{slot}/{name}"] = buffer.detach().cpu().numpy().copy()
    flat = replicas.flat
    return NodeState(
        parameters=joined(replicas.x, row, replicas, spare.parameters if spare else None),
        names=flat.names,
        shapes=flat.shapes,
        arrays=arrays,
        numbers=numbers,
    )


def restore(replicas: Replicas, states: Sequence[Any], row: int, saved: NodeState) -> None:
    """Put a node back, to the bit; the layout must be the one that was saved."""
    split(saved.parameters, replicas.x, row, replicas)
    named = [dict(leaves(state)) for state in states]
    for name in named[0]:
        split(saved.arrays[f"state/{name}"], [slot[name] for slot in named], row, replicas)
    for slot, buffers in enumerate(replicas.buffers(row)):
        for name, buffer in buffers.items():
            value = saved.arrays[f"buffers/{slot}/{name}"]
            buffer.copy_(torch.from_numpy(np.array(value)).view(buffer.shape))

"""A node's training state as named arrays and numbers, and back: what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from mpigossip.engine.state import joined, of_rows, split
from mpigossip.engine.step import Engine
from mpigossip.groups.base import held
from mpigossip.store import direct
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


def by_slot(
    engine: Engine,
    buffers: Sequence[Mapping[str, torch.Tensor]],
    numbers: dict,
    spare: Sequence[NodeState] = (),
) -> list[NodeState]:
    """The same of the slots that live here, each its own part: nothing goes to another process.

    For the one node of a process.
    """
    flat, state, found = engine.vector.flat, engine.parts(), []
    for place, slot in enumerate(engine.group.mine):
        before = spare[place] if spare else None
        of_slot = buffers[place] if buffers else {}
        arrays = {f"buffers/{slot}/{name}": plain(one).copy() for name, one in of_slot.items()}
        pieces: dict[str, np.ndarray] = {}
        for name, parts in state.items():
            values = parts[place][0]
            if not of_rows(parts[place]):
                again = before.pieces[name] if before else None
                pieces[name] = _packed(flat.inside(values, slot), again)
            elif slot == 0:  # figures, the same in all of them
                arrays[name] = values.cpu().numpy().copy()
        x = flat.inside(engine.vector.x[place][0], slot)
        own = _packed(x, before.parameters if before else None)
        found.append(NodeState(own, flat.names, flat.shapes, arrays, numbers, slot, pieces))
    return found


def _packed(parts: Sequence[torch.Tensor], place: np.ndarray | None) -> np.ndarray:
    """The parts one after the other, in ``place`` if that is given, else in pages of their own."""
    count = sum(part.numel() for part in parts)
    if place is None and count:
        pages = torch.from_numpy(direct.pages(count * parts[0].element_size()))
        place = pages.view(parts[0].dtype).numpy()
    if place is None:  # columns of padding alone
        return torch.cat(parts).numpy()
    torch.from_numpy(place).copy_(torch.cat(parts))
    return place


def plain(tensor: torch.Tensor) -> np.ndarray:
    """The values as an array of NumPy's, which knows no bfloat16: that is widened."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def restore(
    engine: Engine, buffers: Sequence[Mapping[str, torch.Tensor]], row: int, saved: NodeState
) -> None:
    """Put a node back, to the bit; the layout must be the one that was saved.

    ``buffers``: of the group's slots here.
    """
    group = engine.group
    split(saved.parameters, engine.vector.x, row, engine.vector.flat, held(group))
    engine.restore(saved.arrays, saved.numbers, row)
    put_buffers(dict(zip(group.mine, buffers, strict=True)), saved)


def put_buffers(buffers: Mapping[int, Mapping[str, torch.Tensor]], saved: NodeState) -> None:
    """The buffers of slots, by their numbers, as they were saved."""
    for slot, of_slot in buffers.items():
        for name, buffer in of_slot.items():
            value = saved.arrays[f"buffers/{slot}/{name}"]
            buffer.copy_(torch.from_numpy(np.array(value)).view(buffer.shape))

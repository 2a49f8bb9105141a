"""State by name: an algorithm's nested arrays as packed rows of a node, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mpigossip.engine.vector import Flat
from mpigossip.groups.base import Group
from mpigossip.store import direct


def leaves(state: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The arrays of a nested NamedTuple by name: ``("base/momentum", array)``."""
    if isinstance(state, torch.Tensor):
        yield prefix, state
        return
    for field in getattr(state, "_fields", ()):
        yield from leaves(getattr(state, field), f"{prefix}/{field}" if prefix else field)


def joined(
    parts: Sequence[torch.Tensor], row: int, flat: Flat, place: np.ndarray | None = None
) -> np.ndarray:
    """One row over all slots: shaped like x, cut to the parameters; figures of a row as they are.

    ``place``: an array of an earlier call that is overwritten; without one, whole pages are taken.
    """
    if of_rows(parts[0]):
        return parts[0][row].cpu().numpy().copy()
    # a single slot's shard is the whole: packing it is the only copy
    whole = parts[0][row] if len(parts) == 1 else torch.cat([part[row].cpu() for part in parts])
    if place is None:
        size = flat.count * whole.element_size()
        place = torch.from_numpy(direct.pages(size)).view(whole.dtype).numpy()
    flat.pack(whole, torch.from_numpy(place))
    return place


def packed(
    parts: Mapping[str, Sequence[torch.Tensor]],
    group: Group,
    flat: Flat,
    row: int,
    places: Mapping[str, np.ndarray],
) -> dict[str, np.ndarray]:
    """A row of arrays by name, :func:`joined`; collective over the node, of its first process."""
    found = {}
    for name, shards in parts.items():
        whole = group.to_first([shard[row : row + 1] for shard in shards])
        if whole is not None:
            found[name] = joined(whole, 0, flat, places.get(name))
    return found


def split(
    packed: np.ndarray,
    parts: Sequence[torch.Tensor],
    row: int,
    flat: Flat,
    here: range | None = None,
) -> None:
    """Inverse of :func:`joined`; ``here``: the shards that ``parts`` are, None: all."""
    values = torch.from_numpy(np.array(packed))
    if of_rows(parts[0]):
        for part in parts:
            part[row].copy_(values)
        return
    whole = torch.empty(flat.size)
    flat.unpack(values, whole)
    pieces = whole.chunk(flat.slots)
    for part, shard in zip(parts, range(flat.slots) if here is None else here, strict=True):
        part[row].copy_(pieces[shard])


def of_rows(part: torch.Tensor) -> bool:
    """Whether an array has figures of a row, one or one a fragment, and isn't shaped like x."""
    return part.shape[1] == 1 or part.dtype == torch.float64

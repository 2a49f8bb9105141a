"""Parts of a model: each rank of a member holds and writes some consecutive elements of it.

A member has L slots, which its k ranks hold in equal numbers, in order. The part of a rank consists
of the elements of its slots, of equal parts of all arrays of the model's size (optimizer state),
and of the buffers of its slots. In a :class:`~mpigossip.store.checkpoint.NodeState` of a part,
``slot`` is the rank, and ``pieces`` has the parts of the arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mpigossip.members.records import Shard
from mpigossip.store import StoreError
from mpigossip.store.checkpoint import NodeState


@dataclass(frozen=True)
class Part:
    """Part of the model that one rank of a member holds."""

    rank: int
    """Number of the rank within the member."""
    ranks: int
    """Number k of ranks of the member."""
    slots: int
    """Number L of slots of the member, a multiple of the number of ranks."""
    first: int
    """Index of the first element in the flat parameters of the model."""
    count: int
    """Number of elements."""

    def has_slot(self, slot: int) -> bool:
        """Return whether a slot belongs to this rank."""
        return slot * self.ranks // self.slots == self.rank

    def needs(self, shard: int, shards: int) -> bool:
        """Return whether a shard of a model with ``shards`` shards has slots of this part."""
        begin, end = shard * self.slots // shards, (shard + 1) * self.slots // shards
        return any(self.has_slot(slot) for slot in range(begin, end))


def cut(state: NodeState, part: Part, first: int = 0) -> NodeState:
    """Return a part of a model.

    :param state: the model, or consecutive parts of it that were joined
    :param part: part to return
    :param first: index of the first element of ``state`` in the model
    :raises StoreError: if ``state`` does not contain the part
    """
    begin = part.first - first
    inside = slice(begin, begin + part.count)
    length = len(state.parameters)
    if begin < 0 or inside.stop > length:
        raise StoreError(
            f"its elements {first} to {first + length - 1} do not contain {part.first} to "
            f"{part.first + part.count - 1}, which rank {part.rank} of this member holds"
        )
    shaped = {k for k, a in state.arrays.items() if k.startswith("state/") and a.shape == (length,)}
    return replace(
        state,
        parameters=state.parameters[inside],
        arrays={
            name: array
            for name, array in state.arrays.items()
            if name not in shaped and (_slot(name) is None or part.has_slot(_slot(name) or 0))
        },
        pieces={name: state.arrays[name][inside] for name in sorted(shaped)},
        slot=part.rank,
    )


def _slot(name: str) -> int | None:
    """Return the slot in the name of a buffer, such as "buffers/3/mean"; None for other arrays."""
    kind, _, rest = name.partition("/")
    return int(rest.partition("/")[0]) if kind == "buffers" else None


def joined(parts: Sequence[NodeState]) -> NodeState:
    """Return the state that consecutive parts of a model contain, as a state without pieces.

    :raises StoreError: if the parts do not belong to the same model
    """
    first = parts[0]
    arrays: dict[str, np.ndarray] = {}
    for part in parts:
        if (part.names, part.shapes, part.pieces.keys()) != (
            first.names,
            first.shapes,
            first.pieces.keys(),
        ):
            raise StoreError("its shards belong to different models")
        arrays |= part.arrays
    for name in first.pieces:
        arrays[name] = np.concatenate([part.pieces[name] for part in parts])
    parameters = np.concatenate([part.parameters for part in parts])
    return replace(first, parameters=parameters, arrays=arrays, pieces={}, slot=None)


def parts_of(state: NodeState, shards: Sequence[Shard], slots: int) -> list[NodeState]:
    """Return the parts of a model that the ranks of another member have written as shards.

    :param state: the whole model
    :param shards: shards in the record of that member
    :param slots: number of slots of the member
    """
    count = len(shards)
    return [
        cut(state, Part(rank, count, slots, shard.first, shard.parameters))
        for rank, shard in enumerate(shards)
    ]

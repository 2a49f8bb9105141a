"""Parts of a model: each rank of a member holds a part and writes it to a file, its shard.

A member has L slots, and each of its k ranks holds L/k consecutive slots. The part of a rank
consists of the elements of the flat parameters that belong to its slots, which are consecutive; of
the elements with the same indices in all arrays of the model's size, such as momenta; and of the
buffers of its slots. In a :class:`~mpigossip.store.checkpoint.NodeState` of a part, ``slot`` is the
number of the rank, and ``pieces`` maps the name of each such array to its elements in the part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mpigossip.members.records import Shard
from mpigossip.store import StoreError
from mpigossip.store.checkpoint import NodeState
from mpigossip.store.node_state import join_pieces, split_pieces


@dataclass(frozen=True)
class Part:
    """Position of the part of the model that one rank of a member holds."""

    rank: int
    """Number of the rank within the member."""
    ranks: int
    """Number k of ranks of the member."""
    slots: int
    """Number L of slots of the member, a multiple of the number of ranks."""
    first: int
    """Index of the first element of the part in the flat parameters of the model."""
    count: int
    """Number of elements of the part."""

    def has_slot(self, slot: int) -> bool:
        """Return whether the slot with the number ``slot`` belongs to this rank."""
        return slot * self.ranks // self.slots == self.rank

    def needs(self, shard: int, shards: int) -> bool:
        """Return whether the file with the number ``shard`` contains slots of this part.

        :param shard: number of the file, which is the rank that has written it
        :param shards: number of files of the model
        """
        begin, end = shard * self.slots // shards, (shard + 1) * self.slots // shards
        return any(self.has_slot(slot) for slot in range(begin, end))


def cut(state: NodeState, part: Part, first: int = 0) -> NodeState:
    """Return a part of a model.

    :param state: the model, or consecutive parts of it, as :func:`joined` returns them
    :param part: position of the part to return
    :param first: index of the first element of ``state`` in the model
    :raises StoreError: if ``state`` does not contain the part
    """
    begin = part.first - first
    inside = slice(begin, begin + part.count)
    length = len(state.parameters)
    if begin < 0 or inside.stop > length:
        raise StoreError(
            f"its elements {first} to {first + length - 1} do not contain {part.first} to "
            f"{part.first + part.count - 1}, which rank {part.rank} of this member holds; copy "
            "all files of the model back, or remove them"
        )
    shaped = {k for k, a in state.arrays.items() if _is_joined(k) and a.shape == (length,)}
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


def _is_joined(name: str) -> bool:
    """Return whether an array may hold the state of all parameters, one after the other."""
    return name.startswith("state/") or (name.startswith("torch/") and name.count("/") == 1)


def _slot(name: str) -> int | None:
    """Return the slot in the name of a buffer, such as "buffers/3/mean"; None for other arrays."""
    kind, _, rest = name.partition("/")
    return int(rest.partition("/")[0]) if kind == "buffers" else None


def joined(parts: Sequence[NodeState]) -> NodeState:
    """Join consecutive parts of a model, and return one state, as of a member with one rank.

    :param parts: parts in the order of their elements, at least one
    :raises StoreError: if the parts differ in the names or shapes of the model's parameters, or in
        the names of its optimizer state
    """
    first = parts[0]
    arrays: dict[str, np.ndarray] = {}
    for part in parts:
        if (part.names, part.shapes, part.pieces.keys()) != (
            first.names,
            first.shapes,
            first.pieces.keys(),
        ):
            raise StoreError(
                "the files of this model hold parts with different parameters or optimizer "
                "states; copy all of them back, or remove them"
            )
        arrays |= part.arrays
    for name in first.pieces:
        arrays[name] = np.concatenate([part.pieces[name] for part in parts])
    parameters = np.concatenate([part.parameters for part in parts])
    state = replace(first, parameters=parameters, arrays=arrays, pieces={}, slot=None)
    return replace(state, arrays=split_pieces(state))


def parts_of(state: NodeState, shards: Sequence[Shard], slots: int) -> list[NodeState]:
    """Divide a model into parts, in the same way as the ranks of another member did.

    :param state: the whole model
    :param shards: entries of the parts' files in the record of that member
    :param slots: number of slots of that member
    """
    count = len(shards)
    is_program = "torch" in state.numbers
    whole = replace(state, arrays=join_pieces(state)) if is_program else state
    parts = [
        cut(whole, Part(rank, count, slots, shard.first, shard.parameters))
        for rank, shard in enumerate(shards)
    ]
    # Only the first rank of a program writes buffers and other small arrays.
    return [replace(part, arrays={}) if is_program and part.slot else part for part in parts]

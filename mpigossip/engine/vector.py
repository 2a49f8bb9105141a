"""Layouts of a model's trained parameters: of a whole node, and of an array in one process.

One object is both layouts unless FSDP2 shards the model. Each process then holds a part of each
parameter, and :mod:`mpigossip.engine.sharded` describes how the parts of a node belong together.
State of an algorithm that has the size of the model, such as momentum, has the same layout as the
parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from mpigossip.config import JobError
from mpigossip.groups.base import Group
from mpigossip.mixing.wire import ALIGN, WIRE_BUCKET
from mpigossip.store import direct


class FlatParameters(Protocol):
    """Trained parameters and gradients of the local nodes in flat memory.

    Each array has the shape (local nodes, elements). ``x`` and ``g`` have one array for each
    segment of a message, ``full`` has one for each slot.
    """

    x: list[torch.Tensor]
    """The slots' shards, which are updated and exchanged."""
    g: list[torch.Tensor]
    """Gradients at x, which a step may overwrite. They include weight decay, unless the local step
    adds it.
    """

    @property
    def full(self) -> list[torch.Tensor]:
        """Flat parameters that the forward pass of each slot reads; with FSDP2, its shard."""

    @property
    def flat(self) -> NodeLayout:
        """Layout of the parameters of one node."""

    @property
    def first(self) -> tuple[int, ...]:
        """Index of each segment's first element in the flat parameters.

        Wires that round at random derive their random numbers from it.
        """

    def gather(self) -> None:
        """Copy the parameters' gradients to ``g``."""


class NodeLayout(Protocol):
    """Layout of the trained parameters of a node, which its slots hold together.

    The row (P,) of a node consists of the shards of its slots, in slot order, and contains padding.
    Files contain packed rows instead: all parameters, one after the other, each in row-major order,
    without padding. :class:`ParameterLayout` and
    :class:`~mpigossip.engine.sharded.ShardedLayout` implement this protocol.
    """

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters, in the order of packed rows."""

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of each parameter."""

    @property
    def slots(self) -> int:
        """Number of slots, whose shards have equal lengths."""

    @property
    def size(self) -> int:
        """Number P of elements, padding included."""

    @property
    def width(self) -> int:
        """Number of elements of each slot's shard, P / slots."""

    @property
    def count(self) -> int:
        """Number of elements without padding."""

    def decayed_in(self, slot: int) -> int:
        """Return the number of leading elements of a slot's shard that have weight decay."""

    def ranges_in(self, slot: int) -> list[slice]:
        """Return the range of elements of each parameter in a slot's shard, with its padding.

        The range counts from the first element of the shard. It is empty if no element of the
        parameter lies in the shard.
        """

    def pack(self, row: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return a row (P,) in the order of files, as an array (count,).

        :param row: row to pack
        :param out: array (count,) to write to; None: return a new array on the CPU
        """

    def unpack(self, packed: torch.Tensor, row: torch.Tensor) -> None:
        """Copy a packed array (count,) to a row (P,), with zero padding; the inverse of `pack`."""


@dataclass(frozen=True)
class ParameterLayout:
    """Layout of parameters in a flat array in memory, in which each parameter is one view.

    It is also the layout of a node, unless FSDP2 shards the model. Parameters with weight decay
    come first. Zeros are added after each parameter and at the end, so that parameters begin at
    multiples of `ALIGN` elements and shards at multiples of `WIRE_BUCKET`.
    """

    names: tuple[str, ...]
    """Names of the parameters, in the order of the array."""
    shapes: tuple[tuple[int, ...], ...]
    """Shape of each parameter."""
    strides: tuple[tuple[int, ...], ...]
    """Strides of each parameter, in elements, which preserve formats such as channels_last."""
    offsets: tuple[int, ...]
    """Index of each parameter's first element."""
    size: int
    """Number P of elements, padding included."""
    decayed: int
    """Number of leading elements with weight decay."""
    slots: int
    """Number of slots, whose shards have equal lengths."""
    embeddings: frozenset[str] = field(default=frozenset(), kw_only=True)
    """Names of the weights of `torch.nn.Embedding` modules, with one row for each token."""

    @property
    def width(self) -> int:
        return self.size // self.slots

    @property
    def count(self) -> int:
        return sum(map(prod, self.shapes))

    def decayed_in(self, slot: int) -> int:
        return min(max(self.decayed - slot * self.width, 0), self.width)

    def ranges_in(self, slot: int) -> list[slice]:
        first = slot * self.width

        def inside(index: int) -> int:
            return min(max(index - first, 0), self.width)

        return [slice(inside(r.start), inside(r.stop)) for r in self.column_ranges]

    @property
    def column_ranges(self) -> list[slice]:
        """Range of elements of each parameter, including the padding after it."""
        ends = [*self.offsets[1:], self.size]
        return [slice(begin, end) for begin, end in zip(self.offsets, ends, strict=True)]

    def views(self, row: torch.Tensor) -> list[torch.Tensor]:
        """Return the parameters as views of one row (P,)."""
        return [view[0] for view in self.stacked(row[None])]

    def stacked(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return the parameters of all nodes as views (nodes, …) of an array (nodes, P)."""
        triples = zip(self.offsets, self.shapes, self.strides, strict=True)
        return [
            rows[:, begin : begin + prod(shape)].as_strided(
                (len(rows), *shape), (rows.stride(0), *strides)
            )
            for begin, shape, strides in triples
        ]

    def pack(self, row: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        # Files do not store strides, so write each parameter in row-major order.
        views = [view.reshape(-1) for view in self.views(row)]
        if out is None:
            return torch.cat(views).cpu()
        return (
            torch.cat(views, out=out) if row.device == out.device else out.copy_(torch.cat(views))
        )

    @property
    def is_row_major(self) -> bool:
        """True if all parameters are in row-major order, as in files."""
        pairs = zip(self.shapes, self.strides, strict=True)
        return all(torch.empty_strided(*pair, device="meta").is_contiguous() for pair in pairs)

    def inside(self, shard: torch.Tensor, slot: int) -> list[torch.Tensor]:
        """Return the elements of each parameter that lie in a slot's shard, as 1-D views.

        A view is empty if no element of its parameter lies in the shard. If the layout is
        `is_row_major`, the views of a parameter in all slots, joined, are its elements in the order
        of :meth:`pack`.

        :param shard: shard (P / slots,) of the slot
        :param slot: index of the slot
        """
        begin = slot * shard.numel()
        ends = (
            offset + prod(shape) for offset, shape in zip(self.offsets, self.shapes, strict=True)
        )
        return [
            shard[max(offset - begin, 0) : max(end - begin, 0)]
            for offset, end in zip(self.offsets, ends, strict=True)
        ]

    def unpack(self, packed: torch.Tensor, row: torch.Tensor) -> None:
        row.zero_()
        begin = 0
        for view in self.views(row):
            view.copy_(packed[begin : begin + view.numel()].view(view.shape))
            begin += view.numel()

    def attach(self, module: nn.Module, row: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Make the module's parameters and their gradients views of rows (P,).

        :param module: module with the parameters of this layout
        :param row: new memory of the parameters, which take its values
        :param gradient: new memory of the gradients; None: the gradients stay as they are
        """
        parameters = dict(module.named_parameters())
        with torch.no_grad():
            for name, view in zip(self.names, self.views(row), strict=True):
                parameters[name].data = view
            if gradient is not None:
                for name, view in zip(self.names, self.views(gradient), strict=True):
                    parameters[name].grad = view


def dense_strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return strides without gaps for a parameter: its own strides if they have no gaps."""
    like = torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format)
    return like.stride()


def check_type(name: str, parameter: torch.Tensor, types: Collection[torch.dtype]) -> None:
    """Raise JobError if the parameter ``name`` has a type other than ``types``."""
    if parameter.dtype not in types:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in types)
        remedy = (
            "call model.float(); to train in float64, step with torch's optimizer and average the "
            "parameters by mpigossip.Averager (mpigossip/optim/README.md)"
        )
        if parameter.is_complex():
            remedy = (
                "store torch.view_as_real(…) of it as the parameter, and call "
                "torch.view_as_complex(…) in the forward pass"
            )
        raise JobError(
            f"parameter {name} has unsupported dtype {parameter.dtype} (need {names}): {remedy}"
        )


def flatten(
    module: nn.Module,
    slots: int = 1,
    decayed: Collection[str] | None = None,
    types: Collection[torch.dtype] = (torch.float32,),
) -> ParameterLayout:
    """Lay out the module's trained parameters for a node of ``slots`` slots.

    Frozen parameters are not part of the layout.

    :param module: module with the parameters
    :param slots: number of slots of the node
    :param decayed: names of the parameters with weight decay; None: all parameters
    :param types: types that a parameter may have
    :raises JobError: if no parameter requires gradients, or if one that does has another type
    """
    trained = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    if not trained:
        raise JobError(
            "the model has no parameter to train: none has requires_grad = True; call "
            "requires_grad_() on the parameters to train"
        )
    for name, parameter in trained:
        check_type(name, parameter, types)
    tables = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    decayed_names = {name for name, _ in trained} if decayed is None else set(decayed)
    ordered = [pair for pair in trained if pair[0] in decayed_names]
    first_undecayed = len(ordered)
    ordered += [pair for pair in trained if pair[0] not in decayed_names]
    offsets = []
    offset = 0
    boundary = 0
    for index, (_, parameter) in enumerate(ordered):
        boundary = offset if index == first_undecayed else boundary
        offsets.append(offset)
        offset += -(-parameter.numel() // ALIGN) * ALIGN
    # Each shard consists of whole buckets of the wire, because lossy wires encode these.
    unit = slots * WIRE_BUCKET
    return ParameterLayout(
        names=tuple(name for name, _ in ordered),
        shapes=tuple(tuple(parameter.shape) for _, parameter in ordered),
        strides=tuple(dense_strides(parameter) for _, parameter in ordered),
        offsets=tuple(offsets),
        size=-(-offset // unit) * unit,
        decayed=boundary if first_undecayed < len(ordered) else offset,
        slots=slots,
        embeddings=frozenset(name for name, p in trained if id(p) in tables),
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the bits of all elements as integers, for comparisons.

    As floating-point numbers, -0.0 equals 0.0, and NaN does not equal NaN.

    :param tensor: tensor of elements of 4 or 2 bytes
    """
    return tensor.view(torch.int32 if tensor.dtype.itemsize == 4 else torch.int16)


# -- state by name: conversion of an algorithm's nested arrays to packed rows, and back ------------


def named_arrays(state: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a nested NamedTuple with their names, such as "base/momentum".

    :param state: tensor, NamedTuple, or any other value, which is left out
    :param prefix: name of ``state`` itself
    """
    if isinstance(state, torch.Tensor):
        yield prefix, state
        return
    for name in getattr(state, "_fields", ()):
        yield from named_arrays(getattr(state, name), f"{prefix}/{name}" if prefix else name)


def join_row(
    parts: Sequence[torch.Tensor], row: int, flat: NodeLayout, out: np.ndarray | None = None
) -> np.ndarray:
    """Join the shards of one node's array to a packed row; values per row are copied unchanged.

    :param parts: array (local nodes, …) of each slot, shaped like x or with values per row
        (:func:`is_per_row`)
    :param row: index of the local node
    :param flat: layout of the parameters
    :param out: array of an earlier call to overwrite; None: new memory of whole pages
    :return: array (count,) with one value for each element of the flat parameters; if the arrays
        have values per row, the values of the node
    """
    if is_per_row(parts[0], flat):
        return parts[0][row].cpu().numpy().copy()
    # The shard of a single slot is the whole row, which `pack` copies. Do not copy it twice.
    full = parts[0][row] if len(parts) == 1 else torch.cat([part[row].cpu() for part in parts])
    if out is None:
        size = flat.count * full.element_size()
        out = torch.from_numpy(direct.pages(size)).view(full.dtype).numpy()
    flat.pack(full, torch.from_numpy(out))
    return out


def packed(
    parts: Mapping[str, Sequence[torch.Tensor]],
    group: Group,
    flat: NodeLayout,
    row: int,
    targets: Mapping[str, np.ndarray],
) -> dict[str, np.ndarray]:
    """Join one node's row of several arrays by :func:`join_row`; collective over the node.

    :param parts: by name, the array (local nodes, …) of each shard of this process
    :param group: processes of the node
    :param flat: layout of the parameters
    :param row: index of the local node
    :param targets: by name, an array of an earlier call to overwrite; other arrays are allocated
    :return: packed rows by name on the first process of the node; empty on the others
    """
    rows = {}
    for name, shards in parts.items():
        arrays = group.to_first([shard[row : row + 1] for shard in shards])
        if arrays is not None:
            rows[name] = join_row(arrays, 0, flat, targets.get(name))
    return rows


def scatter_row(
    packed: np.ndarray,
    parts: Sequence[torch.Tensor],
    row: int,
    flat: NodeLayout,
    shard_indices: range | None = None,
) -> None:
    """Copy a packed row into its shards; the inverse of :func:`join_row`.

    :param packed: array (count,) with one value for each element of the flat parameters, or, if the
        arrays in ``parts`` have values per row (:func:`is_per_row`), these values of the node
    :param parts: array (local nodes, …) of each shard, to which the values are copied
    :param row: index of the local node
    :param flat: layout of the parameters
    :param shard_indices: indices of the shards in ``parts``; None: all shards of the node
    :raises ValueError: if ``parts`` are shaped like x, and ``packed`` does not have one value for
        each element of the flat parameters
    """
    values = torch.from_numpy(np.array(packed))
    if is_per_row(parts[0], flat):
        for part in parts:
            part[row].copy_(values)
        return
    values = without_padding(values, flat)
    if values.shape != (flat.count,):
        raise ValueError(
            f"an array of the algorithm's state has {values.numel()} elements, but the model has "
            f"{flat.count} trained parameters. An earlier version saved only a part of float64 "
            "state if a node had several slots: export the model by `mpigossip checkpoint export`, "
            "and begin a new run from it"
        )
    full = torch.empty(flat.size, dtype=parts[0].dtype)
    flat.unpack(values, full)
    pieces = full.chunk(flat.slots)
    for part, shard in zip(
        parts, range(flat.slots) if shard_indices is None else shard_indices, strict=True
    ):
        part[row].copy_(pieces[shard])


def without_padding(values: torch.Tensor, flat: NodeLayout) -> torch.Tensor:
    """Return a packed row without padding, with which earlier versions saved float64 state.

    :param values: array (count,), which is returned unchanged, or (size,)
    :param flat: layout of the parameters
    """
    padded = values.shape == (flat.size,) and flat.size != flat.count
    return flat.pack(values) if padded else values


def is_per_row(part: torch.Tensor, flat: NodeLayout) -> bool:
    """Return whether an array holds a few values per row: one, or one for each fragment.

    Any other array has the shape of a shard of x, whatever its type. The second dimension tells the
    two apart: a shard has at least `WIRE_BUCKET` elements per row, and values per row are fewer.

    :param part: array (local nodes, …)
    :param flat: layout of the parameters
    """
    return part.shape[1] != flat.width

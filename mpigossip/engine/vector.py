"""A model's trained parameters as named views of one flat vector, and state shaped like it."""

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
from mpigossip.mixing.wire import ALIGN, BUCKET
from mpigossip.store import direct


class FlatParameters(Protocol):
    """The trained parameters of the nodes that live here, in flat memory, and their gradients.

    Arrays are (rows, columns): ``x`` and ``g`` one a segment, ``full`` one a slot.
    """

    flat: ParameterLayout
    x: list[torch.Tensor]
    """what is updated and exchanged: the slots' shards"""
    g: list[torch.Tensor]
    """gradients at x, decay included; their memory may be used up by a step"""
    full: list[torch.Tensor]
    """every slot's whole vector, which its forward pass reads"""

    @property
    def first(self) -> tuple[int, ...]:
        """The first column of each segment in the node's vector: it keys random wires."""

    def gather(self) -> None:
        """Bring the parameters' gradients into ``g``: asked for only where a method reads them."""


@dataclass(frozen=True)
class ParameterLayout:
    """Layout of the trained parameters in a vector of ``size`` elements.

    Parameters that take weight decay come first: they are the columns below ``decayed``.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...], ...]
    """of each parameter in its place: as the model has it, channels_last for instance"""
    offsets: tuple[int, ...]
    size: int
    decayed: int
    slots: int
    embeddings: frozenset[str] = field(default=frozenset(), kw_only=True)
    """names of the parameters that are tables, of which each row is for a token"""

    @property
    def widths(self) -> tuple[int, ...]:
        """Shard lengths in elements, one a slot."""
        return (self.size // self.slots,) * self.slots

    @property
    def local_layout(self) -> ParameterLayout:
        """Return this process's part as a vector of its own."""
        return self

    @property
    def count(self) -> int:
        """Trained parameters, padding left out."""
        return sum(map(prod, self.shapes))

    def decayed_in(self, slot: int) -> int:
        """Leading columns of a slot's shard that take weight decay."""
        width = self.size // self.slots
        return min(max(self.decayed - slot * width, 0), width)

    @property
    def column_ranges(self) -> list[slice]:
        """The columns of each parameter, the padding behind it included."""
        ends = [*self.offsets[1:], self.size]
        return [slice(begin, end) for begin, end in zip(self.offsets, ends, strict=True)]

    def views(self, row: torch.Tensor) -> list[torch.Tensor]:
        """The parameters as views of one row (P,)."""
        return [view[0] for view in self.stacked(row[None])]

    def stacked(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """The parameters as views (rows, …) of all rows (rows, P)."""
        places = zip(self.offsets, self.shapes, self.strides, strict=True)
        return [
            rows[:, at : at + prod(shape)].as_strided(
                (len(rows), *shape), (rows.stride(0), *strides)
            )
            for at, shape, strides in places
        ]

    def pack(self, row: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The row (P,) without its padding, on the CPU: (count,), in ``out`` if that is given.

        Each parameter in the order of its indexes, whatever its strides: files know none.
        """
        views = [view.reshape(-1) for view in self.views(row)]
        if out is None:
            return torch.cat(views).cpu()
        return (
            torch.cat(views, out=out) if row.device == out.device else out.copy_(torch.cat(views))
        )

    @property
    def by_index(self) -> bool:
        """Return whether every parameter lies in the order of its indexes, as files have it."""
        both = zip(self.shapes, self.strides, strict=True)
        return all(torch.empty_strided(*one, device="meta").is_contiguous() for one in both)

    def inside(self, shard: torch.Tensor, slot: int) -> list[torch.Tensor]:
        """Return a slot's part (P / slots,) of each parameter: views, some of them empty.

        Those of all slots, joined, are what `pack` makes of the whole, if it is `by_index`.
        """
        begin = slot * shard.numel()
        ends = (at + prod(shape) for at, shape in zip(self.offsets, self.shapes, strict=True))
        return [
            shard[max(at - begin, 0) : max(end - begin, 0)]
            for at, end in zip(self.offsets, ends, strict=True)
        ]

    def unpack(self, packed: torch.Tensor, row: torch.Tensor) -> None:
        """Fill the row (P,) from (count,); the padding becomes zero."""
        row.zero_()
        at = 0
        for view in self.views(row):
            view.copy_(packed[at : at + view.numel()].view(view.shape))
            at += view.numel()

    def attach(self, module: nn.Module, row: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Make the module's parameters and their gradients views of the given rows (P,)."""
        parameters = dict(module.named_parameters())
        with torch.no_grad():
            for name, view in zip(self.names, self.views(row), strict=True):
                parameters[name].data = view
            if gradient is not None:
                for name, view in zip(self.names, self.views(gradient), strict=True):
                    parameters[name].grad = view


def dense(parameter: torch.Tensor) -> tuple[int, ...]:
    """Strides that fill a stretch of memory without gaps: its own where they do."""
    like = torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format)
    return like.stride()


def check_type(name: str, parameter: torch.Tensor, types: Collection[torch.dtype]) -> None:
    """JobError for a parameter that is none of ``types``."""
    if parameter.dtype not in types:
        need = " or ".join(str(one).removeprefix("torch.") for one in types)
        raise JobError(
            f"parameter {name} has unsupported dtype {parameter.dtype} (need {need}): call "
            "model.float(); to train in float64, step with torch's optimizer and average the "
            "parameters by mpigossip.Averager (mpigossip/optim/README.md)"
        )


def flatten(
    module: nn.Module,
    slots: int = 1,
    decayed: Collection[str] | None = None,
    types: Collection[torch.dtype] = (torch.float32,),
) -> ParameterLayout:
    """Lay out the module's trained parameters for a node of ``slots`` slots.

    ``decayed``: names that take weight decay (None: all). Frozen parameters stay outside.
    ValueError for a parameter that is none of ``types``.
    """
    trained = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    if not trained:
        raise JobError(
            "the model has no parameter to train: requires_grad is False for all; set it for some"
        )
    for name, parameter in trained:
        check_type(name, parameter, types)
    tables = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    chosen = {name for name, _ in trained} if decayed is None else set(decayed)
    ordered = [pair for pair in trained if pair[0] in chosen]
    first_undecayed = len(ordered)
    ordered += [pair for pair in trained if pair[0] not in chosen]
    offsets = []
    at = 0
    boundary = 0
    for index, (_, parameter) in enumerate(ordered):
        boundary = at if index == first_undecayed else boundary
        offsets.append(at)
        at += -(-parameter.numel() // ALIGN) * ALIGN
    whole = slots * BUCKET  # every shard is a multiple of it, so that wires see whole buckets
    return ParameterLayout(
        names=tuple(name for name, _ in ordered),
        shapes=tuple(tuple(parameter.shape) for _, parameter in ordered),
        strides=tuple(dense(parameter) for _, parameter in ordered),
        offsets=tuple(offsets),
        size=-(-at // whole) * whole,
        decayed=boundary if first_undecayed < len(ordered) else at,
        slots=slots,
        embeddings=frozenset(name for name, p in trained if id(p) in tables),
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as integers, as -0.0 equals 0.0 and NaN nothing."""
    return tensor.view(torch.int32 if tensor.dtype.itemsize == 4 else torch.int16)


# -- state by name: an algorithm's nested arrays as packed rows of a node, and back ----------------


def named_arrays(state: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The arrays of a nested NamedTuple by name: ``("base/momentum", array)``."""
    if isinstance(state, torch.Tensor):
        yield prefix, state
        return
    for name in getattr(state, "_fields", ()):
        yield from named_arrays(getattr(state, name), f"{prefix}/{name}" if prefix else name)


def join_row(
    parts: Sequence[torch.Tensor], row: int, flat: ParameterLayout, place: np.ndarray | None = None
) -> np.ndarray:
    """One row over all slots: shaped like x, cut to the parameters; figures of a row as they are.

    ``place``: an array of an earlier call that is overwritten; without one, whole pages are taken.
    """
    if is_per_row(parts[0], flat):
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
    flat: ParameterLayout,
    row: int,
    places: Mapping[str, np.ndarray],
) -> dict[str, np.ndarray]:
    """A row of arrays by name, :func:`joined`; collective over the node, of its first process."""
    found = {}
    for name, shards in parts.items():
        whole = group.to_first([shard[row : row + 1] for shard in shards])
        if whole is not None:
            found[name] = join_row(whole, 0, flat, places.get(name))
    return found


def scatter_row(
    packed: np.ndarray,
    parts: Sequence[torch.Tensor],
    row: int,
    flat: ParameterLayout,
    here: range | None = None,
) -> None:
    """Copy a packed row into its shards; the inverse of :func:`join_row`.

    :param here: the shards that ``parts`` are; None: all
    :raises ValueError: if the packed row has another number of elements than the model
    """
    values = torch.from_numpy(np.array(packed))
    if is_per_row(parts[0], flat):
        for part in parts:
            part[row].copy_(values)
        return
    values = without_padding(values, flat)
    if values.shape != (flat.count,):
        raise ValueError(
            f"an array of the method's state has {values.numel()} elements, and the model has "
            f"{flat.count} trained parameters. An earlier version saved only a part of float64 "
            "state if a node had several slots: export the model by `mpigossip checkpoint export`, "
            "and begin a new run from it"
        )
    whole = torch.empty(flat.size, dtype=parts[0].dtype)
    flat.unpack(values, whole)
    pieces = whole.chunk(flat.slots)
    for part, shard in zip(parts, range(flat.slots) if here is None else here, strict=True):
        part[row].copy_(pieces[shard])


def without_padding(values: torch.Tensor, flat: ParameterLayout) -> torch.Tensor:
    """Return a packed row; earlier versions saved float64 state with the padding."""
    padded = values.shape == (flat.size,) and flat.size != flat.count
    return flat.pack(values) if padded else values


def is_per_row(part: torch.Tensor, flat: ParameterLayout) -> bool:
    """Return whether an array holds values per row, one or one for each fragment.

    Any other array is shaped like the shard x, whatever its type. A shard has at least `BUCKET`
    columns, more than there are values per row.
    """
    return part.shape[1] not in flat.widths

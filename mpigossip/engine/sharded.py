"""Trained parameters of an FSDP2 module: the shards of this rank in flat memory.

FSDP2 has two private attributes for each parameter: its local tensor, and the padded memory from
which the parameter is gathered. If both have the expected types and shapes, their memory is placed
in the flat parameters. Otherwise the flat parameters are a copy.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

from mpigossip.config import JobError
from mpigossip.engine.module import (
    LOW,
    ModuleParameters,
    changed_message,
    own_storage,
    report_shared,
)
from mpigossip.engine.vector import NodeLayout, ParameterLayout, flatten
from mpigossip.mixing.wire import ALIGN, WIRE_BUCKET


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor, by its class name.

    Importing the class would load many modules.
    """
    return type(tensor).__name__ == "DTensor"


def local_shard(tensor: Any) -> torch.Tensor:
    """Return this rank's shard of a DTensor; any other tensor is returned as it is."""
    with torch.no_grad():  # with autograd, to_local() returns another tensor object at each call
        return tensor.to_local() if is_sharded(tensor) else tensor


def gather_full(tensor: Any) -> Any:
    """Return the full tensor of a DTensor, which is collective; return anything else as it is."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def part_like(parameter: Any, full: Any) -> Any:
    """Return ``full`` as a DTensor that is sharded like ``parameter``.

    Its local shard is a copy of this rank's part of ``full`` along the sharded dimension, on the
    parameter's device. ``full`` is returned as it is if it is no tensor or is sharded already, or
    if ``parameter`` is not sharded or has another shape.
    """
    if not is_sharded(parameter) or not torch.is_tensor(full) or is_sharded(full):
        return full
    if full.shape != parameter.shape:
        return full
    mesh = parameter.device_mesh
    (placement,) = parameter.placements
    begin, rows = row_range(parameter.shape[placement.dim], mesh.size(), mesh.get_local_rank())
    part = full.narrow(placement.dim, begin, rows).to(local_shard(parameter).device, copy=True)
    return type(parameter).from_local(
        part, mesh, (placement,), run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def empty_shard(parameter: Any, dtype: torch.dtype) -> Any:
    """Return a new DTensor that is sharded like ``parameter``; its elements are not initialized."""
    return type(parameter).from_local(
        torch.empty_like(local_shard(parameter), dtype=dtype),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def row_range(count: int, slots: int, slot: int) -> tuple[int, int]:
    """Return the index of the first row in a slot's shard, and the number of its rows.

    :param count: number of rows of the parameter
    :param slots: number of shards
    :param slot: index of the shard
    """
    rows_per_slot = -(-count // slots)
    begin = min(rows_per_slot * slot, count)
    return begin, min(rows_per_slot, count - begin)


def fully_sharded(model: nn.Module) -> list[nn.Module]:
    """Return the modules to which `fully_shard` was applied."""
    return [m for m in model.modules() if any(c.__name__ == "FSDPModule" for c in type(m).__mro__)]


def reshard(modules: Sequence[Any]) -> None:
    """Free the gathered parameters of modules.

    After a forward pass without a backward pass, FSDP2 may keep them, and would use them in the
    next forward pass, although the shards have changed since.
    """
    for module in modules:
        module.reshard()


@dataclass(frozen=True)
class ShardedLayout:
    """Layout of a node in which each slot holds one shard of every parameter, as FSDP2 splits it.

    It implements the protocol :class:`~mpigossip.engine.vector.NodeLayout`. A parameter with d
    rows, along its sharded dimension, has ⌈d/L⌉ rows in each of L slots. The last slots may have
    fewer rows or none, but their shards have space for ⌈d/L⌉ rows, too. A parameter therefore
    begins at the same offset in the shards of all slots.
    """

    shapes: tuple[tuple[int, ...], ...]
    """Shape of each parameter of the model."""
    dims: tuple[int, ...]
    """Sharded dimension of each parameter."""
    by_slot: tuple[ParameterLayout, ...]
    """Layout of each slot's shard of the row."""

    @property
    def names(self) -> tuple[str, ...]:
        return self.by_slot[0].names

    @property
    def slots(self) -> int:
        return len(self.by_slot)

    @property
    def width(self) -> int:
        return self.by_slot[0].size

    @property
    def size(self) -> int:
        return self.slots * self.width

    @property
    def count(self) -> int:
        return sum(map(prod, self.shapes))

    def decayed_in(self, slot: int) -> int:
        return self.by_slot[slot].decayed

    def ranges_in(self, slot: int) -> list[slice]:
        return self.by_slot[slot].column_ranges

    def _parameters(self, array: torch.Tensor) -> Iterator[tuple[int, tuple[torch.Tensor, ...]]]:
        """Yield, for each parameter, its sharded dimension and a view of each of its shards.

        :param array: all parameters of a node, with the shards of one slot after the other
        """
        shards = array.chunk(self.slots)
        views = [layout.views(shard) for layout, shard in zip(self.by_slot, shards, strict=True)]
        yield from zip(self.dims, zip(*views, strict=True), strict=True)

    def pack(self, row: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        out = torch.empty(self.count, dtype=row.dtype) if out is None else out
        begin = 0
        for shape, (dim, shards) in zip(self.shapes, self._parameters(row), strict=True):
            target = out[begin : begin + prod(shape)].view(shape)
            target.copy_(torch.cat(shards, dim))
            begin += prod(shape)
        return out

    def unpack(self, packed: torch.Tensor, row: torch.Tensor) -> None:
        row.zero_()
        begin = 0
        for shape, (dim, shards) in zip(self.shapes, self._parameters(row), strict=True):
            full = packed[begin : begin + prod(shape)].view(shape)
            pieces = full.split([shard.shape[dim] for shard in shards], dim)
            for shard, piece in zip(shards, pieces, strict=True):
                shard.copy_(piece)
            begin += prod(shape)


class Layouts(NamedTuple):
    """Layouts of a model's parameters for a process that has all of them or one slot's shard."""

    node: NodeLayout
    """Layout of the node, with all of its slots."""
    local: ParameterLayout
    """Layout of the array that this process holds in memory."""
    slot: int = 0
    """Slot whose shard this process holds; 0 if it holds all parameters."""


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor; `fully_shard` accepts no other strides."""
    return torch.empty(shape, device="meta").stride()


def plan_layouts(model: nn.Module) -> Layouts:
    """Return the layouts of a model; the node's layout is a `ShardedLayout` if FSDP2 shards it.

    Parameters that FSDP2 has gathered are freed first.

    :param model: module of which either all trained parameters are sharded or none
    :raises JobError: if a sharded, trained parameter is not float32; or, if none is sharded, if no
        parameter requires gradients or one that does is neither float32, bfloat16 nor float16
    """
    modules = fully_sharded(model)
    reshard(modules)
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if not any(is_sharded(p) for _, p in trained):
        layout = flatten(model, types=(torch.float32, *LOW))
        return Layouts(layout, layout)
    mesh: Any = next(p for _, p in trained if is_sharded(p)).device_mesh
    slots = mesh.size()
    offsets = []
    offset = 0
    dims = []
    for name, parameter in trained:
        if parameter.dtype != torch.float32:
            raise JobError(
                f"parameter {name} is {parameter.dtype}, but sharded parameters must be float32: "
                "shard it as float32, with fully_shard(mp_policy="
                "MixedPrecisionPolicy(param_dtype=torch.bfloat16)) for 16-bit arithmetic"
            )
        (placement,) = parameter.placements
        offsets.append(offset)
        dims.append(placement.dim)
        padded = prod(_shard_shape(parameter.shape, placement.dim, slots, 0))
        offset += -(-padded // ALIGN) * ALIGN
    width = -(-offset // WIRE_BUCKET) * WIRE_BUCKET
    names = tuple(name for name, _ in trained)
    full_shapes = tuple(tuple(p.shape) for _, p in trained)
    by_slot = []
    for slot in range(slots):
        pairs = zip(full_shapes, dims, strict=True)
        shapes = tuple(_shard_shape(shape, dim, slots, slot) for shape, dim in pairs)
        strides = tuple(map(contiguous_strides, shapes))
        by_slot.append(ParameterLayout(names, shapes, strides, tuple(offsets), width, width, 1))
    node = ShardedLayout(full_shapes, tuple(dims), tuple(by_slot))
    slot = mesh.get_local_rank()
    return Layouts(node, by_slot[slot], slot)


def _shard_shape(shape: Sequence[int], dim: int, slots: int, slot: int) -> tuple[int, ...]:
    """Return the shape of a slot's shard of a parameter that is sharded along ``dim``."""
    return (*shape[:dim], row_range(shape[dim], slots, slot)[1], *shape[dim + 1 :])


def fsdp_records(model: nn.Module) -> dict[int, Any]:
    """Return FSDP2's private record (FSDPParam) of each sharded parameter, by the parameter's id.

    The result is empty if this version of torch has no such records.
    """
    params_by_id: dict[int, Any] = {}
    modules: list[Any] = fully_sharded(model)
    try:
        for state in (module._get_fsdp_state() for module in modules):
            groups = getattr(state, "_fsdp_param_groups", None)
            for group in [state._fsdp_param_group] if groups is None else groups:
                params_by_id |= {
                    id(param.sharded_param): param for param in (group.fsdp_params if group else ())
                }
    except AttributeError:
        return {}
    return params_by_id


def _is_as_expected(private: Any, parameter: Any, padded: int) -> bool:
    """Return whether both private attributes of a parameter exist and are as expected.

    :param private: FSDP2's record of the parameter; None: there is none
    :param parameter: parameter, a DTensor
    :param padded: number of elements of its shard with torch's padding
    """
    data: Any = getattr(private, "_sharded_param_data", None)
    local: Any = getattr(parameter, "_local_tensor", None)
    if type(data) is not torch.Tensor or type(local) is not torch.Tensor:
        return False
    return data.shape == (padded,) and (not local.numel() or local.data_ptr() == data.data_ptr())


class ShardedParameters(ModuleParameters):
    """Shards of this rank of a module's trained parameters and of their gradients, in float32.

    If the private attributes of FSDP2 are as expected, the shards are placed in the flat
    parameters. Otherwise :meth:`publish` copies the flat parameters to the shards after every step,
    and :meth:`take_edits` copies the shards back, because the program may have changed them.
    """

    def __init__(self, model: nn.Module, flat: ShardedLayout, local: ParameterLayout, slot: int):
        """Move the shards of this rank to flat memory; their values stay the same.

        :param model: module whose parameters are sharded
        :param flat: layout of the node
        :param local: layout of this rank's shard of the row
        :param slot: slot of this rank
        """
        self._lay_out([model], flat, local)
        self.low = [False] * len(self.rows[0])
        self._modules = fully_sharded(model)
        self._first = (flat.width * slot,)
        self._padded = [prod(shape) for shape in flat.by_slot[0].shapes]
        """Elements of each parameter's shard with torch's padding, which is equal in all slots."""
        self._gradients: dict[int, list[torch.Tensor]] = {}
        self._memory: list[torch.Tensor | None] = []
        self._private: list[Any] = []
        params_by_id = fsdp_records(model)
        views = self.cut(self.x[0][0])
        for k, p in enumerate(self.rows[0]):
            private = params_by_id.get(id(p))
            views[k].copy_(local_shard(p))
            self._private.append(private)
            if _is_as_expected(private, p, self._padded[k]):
                self._memory.append(self._memory_of(k))
                self._lay(k, self._memory[k])
            else:
                self._memory.append(None)

    @property
    def first(self) -> tuple[int, ...]:  # type: ignore[override]
        return self._first

    @property
    def copies(self) -> bool:
        """True if some shards are copies, because private attributes are not as expected."""
        return any(memory is None for memory in self._memory)

    def _memory_of(self, k: int) -> torch.Tensor:
        """Return the memory of parameter k in the row, with padding, as a separate storage."""
        begin = self.local_layout.offsets[k]
        return own_storage(self.x[0][0][begin : begin + self._padded[k]])

    def _address(self, k: int) -> int:
        x = self.x[0]
        return x.data_ptr() + x.element_size() * self.local_layout.offsets[k]

    def _lay(self, k: int, memory: torch.Tensor | None) -> None:
        """Place torch's shard of parameter k, including its padding, in this memory.

        :param k: index of the parameter
        :param memory: new memory; None: the shard is a copy, and stays where it is
        """
        if memory is not None:
            shape = self.local_layout.shapes[k]
            self._private[k]._sharded_param_data = memory
            self.rows[0][k]._local_tensor = memory[: prod(shape)].view(shape)

    def _dense(self, grad: torch.Tensor) -> torch.Tensor:
        return local_shard(grad)

    def _as_gradients(self, row: torch.Tensor) -> list[torch.Tensor]:
        """Return the shards of a row of gradients as DTensors."""
        gradients = self._gradients.get(row.data_ptr())
        if gradients is None:
            self._gradients.clear()
            pairs: Any = zip(self.rows[0], self.cut(row), strict=True)
            gradients = self._gradients[row.data_ptr()] = [
                type(p).from_local(
                    view,
                    p.device_mesh,
                    p.placements,
                    run_check=False,
                    shape=p.shape,
                    stride=p.stride(),
                )
                for p, view in pairs
            ]
        return gradients

    @contextmanager
    def bind_to(self, row: int, array: torch.Tensor, g: torch.Tensor | None) -> Iterator[None]:
        """Return a context in which the shards are placed in ``array`` (1, P), or are copies of it.

        At the end of the context, copies are written back to ``array``, and keep their values until
        :meth:`publish`.

        :param row: 0, the only row
        :param array: array (1, P) for the shards of this rank
        :param g: array (1, P) that becomes their gradients; None: they keep their own gradients
        """
        parameters: list[Any] = self.rows[0]
        grads = [p.grad for p in parameters]
        new_grads = grads if g is None else self._as_gradients(g[0])
        new_grads = [
            v if p.requires_grad else None for p, v in zip(parameters, new_grads, strict=True)
        ]
        views = self.cut(array[0])
        try:
            for p, view, gradient, memory in zip(
                parameters, views, new_grads, self._memory, strict=True
            ):
                p.grad = gradient
                if memory is None:
                    local_shard(p).copy_(view)
                else:
                    p._local_tensor = view
            yield
        finally:
            for k, (p, view, gradient) in enumerate(zip(parameters, views, grads, strict=True)):
                p.grad = gradient
                if self._memory[k] is None:
                    view.copy_(local_shard(p))
                else:
                    self._lay(k, self._memory[k])

    @contextmanager
    def in_separate_memory(self) -> Iterator[None]:
        for k, memory in enumerate(self._memory):
            self._lay(k, None if memory is None else memory.clone())
        try:
            yield
        finally:
            for k, memory in enumerate(self._memory):
                self._lay(k, memory)

    def publish(self) -> None:
        reshard(self._modules)
        for k, view in enumerate(self.cut(self.x[0][0])):
            if self._memory[k] is None:
                local_shard(self.rows[0][k]).copy_(view)

    def check(self) -> bool:
        """Place shards that were moved to other memory in the flat parameters again.

        They keep their values. Return whether this changed any value of the flat parameters.

        :raises JobError: if a parameter has another type, shape or device than before, or if
            another Parameter, or a module without it, is now in its place
        """
        reshard(self._modules)
        self._check_modules(0)
        changed = False
        for k, (p, view) in enumerate(zip(self.rows[0], self.cut(self.x[0][0]), strict=True)):
            self._check_owner(0, k)
            shard = local_shard(p)
            if (shard.dtype, shard.shape, shard.device) != (view.dtype, view.shape, view.device):
                raise JobError(changed_message(self.flat.names[k], view, shard))
            memory = self._memory[k]
            if memory is None:
                continue
            # Compare with the address in the row, whose storage never moves. The storage of
            # `memory` moves when torch.multiprocessing sends the parameter to another process.
            begin = self._address(k)
            data = self._private[k]._sharded_param_data
            if data.data_ptr() == begin and (not shard.numel() or shard.data_ptr() == begin):
                continue
            if memory.data_ptr() != begin:
                report_shared(shard)
                memory = self._memory[k] = self._memory_of(k)
            changed |= not torch.equal(shard, view)
            view.copy_(shard)
            self._lay(k, memory)
        return changed

    def take_edits(self) -> None:
        """Copy the shards that are copies, edited or not, to the flat parameters."""
        for k, (p, view) in enumerate(zip(self.rows[0], self.cut(self.x[0][0]), strict=True)):
            if self._memory[k] is None:
                view.copy_(local_shard(p))

    def differ(self, sent: Sequence[torch.Tensor]) -> bool:
        pairs = zip(self.rows[0], self.cut(self.x[0][0]), strict=True)
        copies = [
            (local_shard(p), view) for k, (p, view) in enumerate(pairs) if self._memory[k] is None
        ]
        return super().differ(sent) or not all(torch.equal(*pair) for pair in copies)

    def versions(self) -> list[int]:
        return [local_shard(p)._version + p._version for p in self.rows[0]]

"""Tensors of "cuda:k" on the CPU's memory: each operation is done at once and told to a listener.

A tensor is a subclass whose storage is the CPU's and whose keys are CUDA's, so that torch's own
Python, autograd and modules treat it as one of a GPU. Operations are done on plain views of the
same memory. Operands of two devices are refused as CUDA refuses them, except for copies.
"""

from __future__ import annotations

import bisect
import ctypes
import os
import threading
from collections.abc import Callable

import torch
from torch.utils._pytree import tree_flatten, tree_map

DEVICES = 8
aten = torch.ops.aten
COPIES = {aten.copy_.default, aten._to_copy.default, aten._foreach_copy_.default}
"""Operations whose operands may lie on two devices."""
HOST_INDEX = {aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default}
"""Operations whose indexes may lie on the CPU."""

HOST_TYPES = (torch.Tensor, torch.nn.Parameter)
guard = ctypes.CDLL(os.environ["MPIGOSSIP_DOUBLE_GUARD"])


class _Recording(threading.local):
    into: list | None = None


recording = _Recording()
"""``recording.into``: where a capture's operations go"""
_library = torch.library.Library("aten", "IMPL", "CUDA")
_where: dict[int, int] = {}  # storage's address -> device; addresses are used again
_bases: list[int] = []  # the addresses, ascending
_registering = threading.Lock()
listener: Callable
"""``(operation, device, read, written)``; the tensors are plain views of the memory."""
between: Callable[[int, int], None]
born: Callable[[torch.Tensor], object]
"""``(memory)``: this may be new memory at an address that was another's"""


class OnDevice(torch.Tensor):
    """A tensor of a device that isn't there."""

    @staticmethod
    def __new__(cls, memory: torch.Tensor, index: int) -> OnDevice:
        """``memory``: on the CPU; its storage belongs to the device from now on."""
        _register(memory, index)
        device = torch.device("cuda", index)
        made = torch.Tensor._make_subclass(
            cls, memory.detach(), False, dispatch_device=True, device_for_backend_keys=device
        )
        made.double_index = index
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        """Do it on the CPU's memory."""
        return perform(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents=None) -> str:
        """Contents and device."""
        return f"{plain(self.detach())!r} on {self.device}"

    def __deepcopy__(self, memo) -> torch.Tensor:
        """A copy on the same device; of a leaf."""
        if id(self) not in memo:
            copied = self.detach().clone()
            if isinstance(self, torch.nn.Parameter):
                copied = torch.nn.Parameter(copied, self.requires_grad)
            else:
                copied.requires_grad_(self.requires_grad)
            memo[id(self)] = copied
        return memo[id(self)]


def _register(memory: torch.Tensor, index: int) -> None:
    """This storage belongs to a device; what was inside of its addresses before is gone."""
    storage = memory.untyped_storage()
    base = storage.data_ptr()
    with _registering:
        if base not in _where:
            bisect.insort(_bases, base)
        _where[base] = index
        first = bisect.bisect_right(_bases, base)
        last = bisect.bisect_left(_bases, base + storage.nbytes())
        for gone in _bases[first:last]:
            del _where[gone]
        del _bases[first:last]
    born(memory)


def base_of(address: int) -> int:
    """The allocation that an address belongs to."""
    with _registering:
        return _bases[bisect.bisect_right(_bases, address) - 1]


def device_at(address: int) -> int:
    """The number of the device that has this memory."""
    return _where[base_of(address)]


def index_of(tensor: torch.Tensor) -> int:
    """The number of a tensor's device."""
    address = tensor.untyped_storage().data_ptr()
    return _where[address] if address else tensor.double_index  # empty ones share address 0


def plain(value):
    """The same memory as the CPU's tensor; anything else as it is."""
    if not isinstance(value, OnDevice):
        return value
    memory = torch.empty(0, dtype=value.dtype)
    with torch.no_grad():
        place = value.untyped_storage(), value.storage_offset(), value.size(), value.stride()
        return memory.set_(*place)


def perform(func, args, kwargs):
    """One operation, on whatever device its operands or its ``device`` say."""
    if func is torch.ops.prim.device.default:
        return torch.device("cuda", index_of(args[0]))
    operands = tree_flatten((args, kwargs))[0]
    there = sorted({index_of(t) for t in operands if isinstance(t, OnDevice)})
    asked = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
    if func not in COPIES | HOST_INDEX:
        on_host = [t for t in operands if type(t) in HOST_TYPES and t.dim()]
        if len(there) > 1 or (there and on_host and asked is None):
            names = [f"cuda:{k}" for k in there] + ["cpu"] * bool(on_host)
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{' and '.join(names)}, in {func}"
            )
    waits = not kwargs.get("non_blocking", len(args) > 2 and func is aten.copy_.default and args[2])
    index = _target(func, args, asked, there)
    changed = {k: v for k, v in kwargs.items() if k not in ("pin_memory",)}
    if asked is not None:
        changed["device"] = torch.device("cpu")
    given, named = tree_map(plain, (args, changed))
    with torch.no_grad():
        found = func(*given, **named)
        if func is aten._to_copy.default and _same(found, given[0]):
            found = found.clone()
    done = tree_flatten((given, named))[0]
    for tensor, place in zip(operands, done, strict=False):  # an `out` may have been resized
        if isinstance(tensor, OnDevice) and tensor.shape != place.shape:
            tensor.data = OnDevice(place, tensor.double_index)
    for one, two in zip(there, there[1:], strict=False):
        between(one, two)
    if index is not None and there and index not in there:
        between(there[0], index)
    at = index if index is not None else (there[0] if there else None)
    if at is not None:
        read, written = _touched(func, given, named, found)
        listener(str(func), at, read, written)
        if recording.into is not None:
            recording.into.append(_again(func, given, named, found, at, (read, written)))
        # what the host gets, or gives from memory that it may change at once, is waited for
        if waits and (index is None or (func in COPIES and not all(map(_gpu, operands)))):
            torch.cuda.current_stream(at).synchronize()
    return _wrapped(func, args, kwargs, found, index)


def _gpu(value) -> bool:
    return isinstance(value, OnDevice) or not isinstance(value, torch.Tensor)


def _same(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.numel() > 0 and one.data_ptr() == two.data_ptr()


def _target(func, args, asked, there) -> int | None:
    """The device of what comes out; None: the CPU."""
    if asked is not None:
        if asked.type != "cuda":
            return None
        return torch.cuda.current_device() if asked.index is None else asked.index
    if func in (aten.copy_.default, aten._foreach_copy_.default):
        first = tree_flatten(args[0])[0][0]
        return index_of(first) if isinstance(first, OnDevice) else None
    if func is aten._local_scalar_dense.default:
        return None
    return there[0] if there else torch.cuda.current_device()


def _arguments(func, args, kwargs):
    for position, argument in enumerate(func._schema.arguments):
        if position < len(args) and not argument.kwarg_only:
            yield argument, args[position]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _tensors(tree) -> list[torch.Tensor]:
    return [t for t in tree_flatten(tree)[0] if isinstance(t, torch.Tensor)]


def _touched(func, given, named, found):
    """Plain views of what an operation reads and writes."""
    returns = func._schema.returns
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    if views or str(func).startswith("aten.empty"):
        return [], []  # no memory is touched
    read, written = [], []
    for argument, value in _arguments(func, given, named):
        changes = argument.alias_info is not None and argument.alias_info.is_write
        (written if changes else read).extend(_tensors(value))
    for returned, output in zip(returns, found if len(returns) > 1 else [found], strict=True):
        written += _tensors(output) if returned.alias_info is None else []
    return read, written


def _again(func, given, named, found, at, touched):
    """The operation once more, its new outputs into the memory of the first time."""

    def again() -> None:
        with torch.no_grad():
            results = func(*given, **named)
            for old, new in zip(_tensors(found), _tensors(results), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)
        listener(str(func), at, *touched)

    return again


def _wrapped(func, args, kwargs, found, index):
    """The result as tensors of the device; what was written in place is the argument itself."""
    owners = {
        frozenset(argument.alias_info.before_set): original
        for argument, original in _arguments(func, args, kwargs)
        if argument.alias_info is not None and argument.alias_info.is_write
    }

    def wrapped(value):
        return (
            OnDevice(value, index) if type(value) is torch.Tensor and index is not None else value
        )

    many = len(func._schema.returns) > 1
    results = list(found) if many else [found]
    for k, returned in enumerate(func._schema.returns):
        alias = returned.alias_info
        if alias is not None and alias.is_write:
            results[k] = owners[frozenset(alias.before_set)]
        else:
            results[k] = tree_map(wrapped, results[k])
    return tuple(results) if many else (results[0] if func._schema.returns else None)


def install(told: Callable, crossing: Callable, new: Callable) -> None:
    """Let torch make tensors of the devices, in every thread; before torch is asked for them."""
    global listener, between, born
    listener, between, born = told, crossing, new
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    for name in ("empty.memory_format", "empty_strided", "copy_", "_local_scalar_dense"):
        operation, _, overload = name.partition(".")
        func = getattr(getattr(aten, operation), overload or "default")
        _library.impl(name, lambda *args, func=func, **kwargs: perform(func, args, kwargs))

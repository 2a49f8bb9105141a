"""Tensors of "cuda:k" on the CPU's memory: each operation is done at once and told to the checker.

A tensor is a subclass with the storage of the CPU and the keys of CUDA, so that torch's own
Python, autograd and modules treat it as a GPU tensor. Operations are done on plain views of the
same memory. Operands of two devices are refused as CUDA refuses them, except for copies.
"""

import threading
from functools import cache, partial
from itertools import pairwise
from weakref import WeakValueDictionary

import torch
from torch.cuda._utils import _get_device_index

aten = torch.ops.aten
COPIES = {aten.copy_.default, aten._to_copy.default, aten._foreach_copy_.default}
MIXED = COPIES | {aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default}
"""Operations whose operands, or indexes, may lie on the CPU or on another device."""
pointers: WeakValueDictionary[int, torch.UntypedStorage] = WeakValueDictionary()
"""Addresses that were passed on, with the storage that they point into."""
_library = torch.library.Library("aten", "IMPL", "CUDA")


class _Recording(threading.local):
    into: list | None = None
    broken = False


class _Copies(threading.local):
    at_once = False
    of_batches = False


copies = _Copies()
"""State of this thread: it must not wait for a copy between host and device."""
context = threading.local()
"""Has the attribute ``made`` if this thread has used a device, or made another one current.
Otherwise libraries find no context in the thread."""
recording = _Recording()
"""The capture to which this thread's operations are added, and whether it has failed."""


class OnDevice(torch.Tensor):
    """Tensor of a device that does not exist; its storage holds the number of the device."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, memory: torch.Tensor, index: int):
        """``memory``: on the CPU; its storage belongs to the device from now on."""
        memory.untyped_storage().double = index
        device = torch.device("cuda", index)
        return torch.Tensor._make_subclass(
            cls, memory.detach(), False, dispatch_device=True, device_for_backend_keys=device
        )

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return perform(func, args, kwargs or {})

    def data_ptr(self) -> int:
        address = super().data_ptr()
        pointers[address] = self.untyped_storage()
        return address

    def __deepcopy__(self, memo) -> torch.Tensor:
        copied = self.detach().clone().requires_grad_(self.requires_grad)
        copied._is_param = isinstance(self, torch.nn.Parameter)
        return copied


def index_of(tensor: torch.Tensor) -> int:
    """Return the number of a tensor's device."""
    return tensor.untyped_storage().double


def at(address: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    """Return the elements at an address that was passed on, as a CPU tensor."""
    storage = pointers[address]
    offset = (address - storage.data_ptr()) // dtype.itemsize
    return torch.empty(0, dtype=dtype).set_(storage, offset, (count,))


def plain(value):
    """Return the same memory as a CPU tensor; return anything else unchanged."""
    if not isinstance(value, OnDevice):
        return value
    place = value.untyped_storage(), value.storage_offset(), value.size(), value.stride()
    return torch.empty(0, dtype=value.dtype).set_(*place)


def mapped(change, tree):  # torch's pytree takes three times as long as all the rest
    """Apply a function to every leaf of the arguments or results of an operation."""
    if isinstance(tree, (list, tuple)):
        return type(tree)([mapped(change, one) for one in tree])
    return change(tree)


def tensors(tree) -> list[torch.Tensor]:
    """Return all tensors in the arguments or results of an operation."""
    if isinstance(tree, (list, tuple)):
        return [tensor for one in tree for tensor in tensors(one)]
    return [tree] if isinstance(tree, torch.Tensor) else []


@cache
def schema(func) -> tuple[list[str], list[str], list[bool], bool]:
    """Return argument names, written arguments, results that alias them, and if memory is used."""
    given, returned = (
        [
            (one.name, one.alias_info, one.alias_info is not None and one.alias_info.is_write)
            for one in ones
        ]
        for ones in (func._schema.arguments, func._schema.returns)
    )
    views = any(alias is not None and not writes for _, alias, writes in returned)
    touches = not views and not func._schema.name.startswith("aten::empty")
    written = [name for name, _, writes in given if writes]
    return [name for name, *_ in given], written, [writes for *_, writes in returned], touches


def perform(func, args, kwargs):
    """Perform one operation on the device of its operands or of its ``device``."""
    if func is torch.ops.prim.device.default:
        return torch.device("cuda", index_of(args[0]))
    names, writes, same, touches = schema(func)
    named = dict(zip(names, args, strict=False)) | kwargs
    if named.get("device") is not None and torch.device(named["device"]).type == "meta":
        return func(**{name: mapped(plain, value) for name, value in named.items()})
    devices, on_host = _operands(func, named)
    target = _target(func, named, devices)
    given = {name: mapped(plain, value) for name, value in named.items() if name != "pin_memory"}
    if given.get("device") is not None:
        given["device"] = torch.device("cpu")

    def work() -> list:
        result = func(**given)
        return list(result) if len(same) > 1 else [result] * len(same)

    results = work()
    fresh = [one for one, known in zip(results, same, strict=True) if not known]
    read = tensors([value for name, value in given.items() if name not in writes])
    written = tensors([given[name] for name in writes if name in given] + fresh)
    at = devices[0] if target is None and devices else target

    def tell() -> None:
        for one, two in pairwise(sorted({*devices, at})):  # torch has such a copy in both streams
            first = torch.cuda.current_stream(one)
            second = torch.cuda.current_stream(two)
            first.wait_stream(second)
            second.wait_stream(first)
        torch.cuda.current_stream(at).line.given(str(func), read, written)

    def again() -> None:  # into the memory of the first time
        for old, new in zip(tensors(results), tensors(work()), strict=True):
            if old.data_ptr() != new.data_ptr():
                old.copy_(new)
        tell()

    if at is not None and touches:
        context.made = True
        tell()
        if recording.into is not None:
            recording.into.append(again)
        _wait_for_host(func, named, on_host, written, target, at)
    changed = [named[name] for name in writes if name in named]
    for tensor, memory in zip(tensors(changed), written, strict=False):
        if tensor.shape != memory.shape:  # an `out` that had no elements
            tensor.data = OnDevice(memory, target)
    remaining = iter(changed)
    done = [
        next(remaining) if known else mapped(partial(_wrapped, target), one)
        for one, known in zip(results, same, strict=True)
    ]
    return tuple(done) if len(same) > 1 else done[0] if done else None


def _operands(func, named: dict) -> tuple[list[int], list[torch.Tensor]]:
    """Return the devices of an operation's operands, and its operands on the host.

    :raises RuntimeError: if operands lie on two devices and the operation does not allow it
    """
    operands = tensors([*named.values()])
    devices = sorted({index_of(t) for t in operands if isinstance(t, OnDevice)})
    on_host = [t for t in operands if not isinstance(t, OnDevice)]
    if func not in MIXED and len(devices) + any(t.dim() for t in on_host) > 1:
        where = ", ".join(sorted({str(t.device) for t in operands}))
        raise RuntimeError(f"Expected all tensors to be on the same device: {func} got {where}")
    return devices, on_host


def _wait_for_host(func, named: dict, on_host: list, written: list, target, at: int) -> None:
    """Let the host wait for the stream of device ``at`` if it would wait for this operation.

    It waits for what it gets, and for what it gives from memory that it may change at once.

    :raises RuntimeError: if the caller has stated that the host must not wait
    """
    is_copy = func in COPIES
    if copies.of_batches and is_copy and not all(hasattr(t, "locked") for t in on_host):
        raise RuntimeError("a batch that isn't in locked memory keeps the host waiting")
    if not named.get("non_blocking") and (target is None or (is_copy and on_host)):
        message = any(one.dtype == torch.uint8 for one in written)
        if copies.at_once and message and func is aten.copy_.default:
            raise RuntimeError("a copy on a stream of its own keeps the host waiting")
        torch.cuda.current_stream(at).synchronize()


def _wrapped(target: int | None, value):
    return OnDevice(value, target) if type(value) is torch.Tensor and target is not None else value


def _target(func, named: dict, there: list[int]) -> int | None:
    """Return the device of the results; None: the CPU."""
    if named.get("device") is not None:
        device = torch.device(named["device"])
        return None if device.type == "cpu" else _get_device_index(device, optional=True)
    if func in (aten.copy_.default, aten._foreach_copy_.default):
        first = tensors([named["self"]])[0]
        return index_of(first) if isinstance(first, OnDevice) else None
    return None if func is aten._local_scalar_dense.default else there[0]


def install() -> None:
    """Let torch make tensors of the devices in every thread; call it before torch makes any."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    pin = torch.Tensor.pin_memory

    def pin_memory(tensor, *arguments):
        result = pin(tensor, *arguments)
        result.locked = True
        result.untyped_storage().locked = True
        return result

    torch.Tensor.pin_memory = pin_memory
    made = (aten.empty.memory_format, aten.empty_strided.default)
    for func in (*made, aten.copy_.default, aten._local_scalar_dense.default):
        _library.impl(func, lambda *args, func=func, **kwargs: perform(func, args, kwargs))

"""An elementwise function noted in place of being done: what becomes one kernel's text in C."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mpigossip.mixing.kernels.elementwise import Pass


class CannotNote(Exception):
    """An operation that isn't elementwise, or on other arrays than float32 of one shape."""


def identity(array: torch.Tensor) -> tuple:
    """The same for all tensor objects of one array in memory."""
    if array.is_meta:
        return (id(array),)
    return array.data_ptr(), tuple(array.shape), array.stride()


def _mapped(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same nest of tuples with each tensor changed."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, tuple):
        parts = [_mapped(part, change) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    return tree


BINARY = {"add": "add", "sub": "sub", "mul": "mul", "div": "over"}
BINARY |= {"truediv": "over", "iadd": "add", "isub": "sub"}
ASKS = {"__get__", "__len__", "size", "dim", "numel", "is_floating_point", "data_ptr", "stride"}


class Noted(TorchFunctionMode):
    """Notes elementwise operations on arrays of x's shape; others are done, or CannotNote."""

    def __init__(self, x: torch.Tensor):
        """``x``: an array of the shape that is noted."""
        super().__init__()
        self.shape, self.device = tuple(x.shape), x.device
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._kept: dict[tuple, torch.Tensor] = {}
        self._value: dict[tuple, str] = {}
        self._changed: dict[tuple, torch.Tensor] = {}
        self._cut: dict[tuple, tuple[torch.Tensor, str]] = {}
        self._inputs: dict[str, torch.Tensor] = {}
        self._numbers: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._lines: list[str] = []

    # -- arrays that come in and go out ----------------------------------------------------

    def copied(self, tree: Any) -> Any:
        """The same with copies of small arrays, which are put back when all is well."""

        def copy(array: torch.Tensor) -> torch.Tensor:
            if tuple(array.shape) == self.shape:
                return array
            self.copies.append((array, array.clone()))
            return self.copies[-1][1]

        return _mapped(tree, copy)

    def given_back(self, tree: Any) -> Any:
        """The same with the originals of copies."""
        originals = {id(copy): original for original, copy in self.copies}

        def original(array: torch.Tensor) -> torch.Tensor:
            if array.is_meta:
                raise CannotNote("a new array in the state")
            return originals.get(id(array), array)

        return _mapped(tree, original)

    def kernel(self, codes: dict[tuple, torch.Tensor], spent: Sequence) -> Pass | None:
        """What was noted, ``codes`` by outbox array beside; None where nothing changes."""
        outputs: dict[str, torch.Tensor] = {}
        lines, unneeded = [], set(map(identity, spent))
        for k, (key, array) in enumerate(self._changed.items()):
            if key in unneeded:
                continue
            if key in codes:
                outputs |= {f"c{k}": codes.pop(key), f"y{k}": array}
                lines += [f"c{k} = narrow({self._value[key]})", f"y{k} = wide(c{k})"]
            else:
                outputs[f"y{k}"] = array
                lines.append(f"y{k} = {self._value[key]}")
        if codes:
            raise CannotNote("a part of the outbox is not written")
        if not outputs:
            return None
        if not any(tuple(array.shape) == self.shape for array in self._inputs.values()):
            raise CannotNote("nothing is read")
        text = "; ".join([*self._lines, *lines])
        return Pass(self._inputs, self._numbers, self._counts, outputs, text)

    # -- operations ------------------------------------------------------------------------

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Note it, or do it where only small arrays are concerned."""
        kwargs = kwargs or {}
        name = func.__name__
        plain = name.strip("_")
        if name in ASKS or plain == "empty_like":
            return func(*args, **kwargs)
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        if not any(self._large(tensor) for tensor in tensors):
            return func(*args, **kwargs)
        if plain == "getitem":
            return self._part(func, *args)
        if name == "to" and args[1:] == (torch.float32,):
            return args[0]
        try:
            return self._note(name, plain, args, dict(kwargs))
        except (IndexError, TypeError, ValueError) as error:  # other arguments than expected
            raise CannotNote(f"{name}: {error}") from error

    def _large(self, array: torch.Tensor) -> bool:
        return tuple(array.shape) == self.shape or identity(array) in self._cut

    def _note(self, name: str, plain: str, args: Sequence, options: dict) -> torch.Tensor:
        inside = name.endswith("_") and not name.endswith("__")
        target = args[0] if inside or plain in ("iadd", "isub") else options.pop("out", None)
        cut = None if target is None else self._cut.get(identity(target))
        exprs = self._expression(plain, args, options, cut)
        if options:
            raise CannotNote(f"{name} with {', '.join(options)}")
        line = f"v{len(self._lines)}"
        if cut is not None:
            parent, stop = cut
            exprs = f"pick(j < {stop}, {exprs}, {self._of(parent)})"
            self._write(parent, line)
        elif target is None:
            target = torch.empty(self.shape, device="meta")
            self._kept[identity(target)] = target
            self._value[identity(target)] = line
        else:
            if tuple(target.shape) != self.shape:
                raise CannotNote(f"{name} into an array of another shape")
            self._write(target, line)
        self._lines.append(f"float {line} = {exprs}")
        return target

    def _expression(self, plain: str, args: Sequence, options: dict, cut) -> str:
        """The operation in C."""
        if plain in ("zero", "zeros_like"):
            return "0.0f"
        if plain in BINARY:
            a, b = self._operand(args[0], cut), self._operand(args[1], cut)
            scale = options.pop("alpha", 1)
            return f"{BINARY[plain]}({a}, {b if scale == 1 else self._scaled(scale, b)})"
        if plain in ("copy", "clone", "sqrt", "neg"):
            form = {"sqrt": "root({})", "neg": "minus({})"}.get(plain, "{}")
            return form.format(self._operand(args[-1], cut))
        if plain in ("addcmul", "addcdiv"):
            a, b, c = (self._operand(value, cut) for value in args)
            last = "mul" if plain == "addcmul" else "over"
            return f"add({a}, {last}({self._scaled(options.pop('value', 1), b)}, {c}))"
        if plain == "lerp" and not isinstance(args[2], torch.Tensor):
            a, b = self._operand(args[0], cut), self._operand(args[1], cut)
            if args[2] < 0.5:  # as torch does it
                return f"add({a}, {self._scaled(args[2], f'sub({b}, {a})')})"
            return f"sub({b}, {self._scaled(1 - args[2], f'sub({b}, {a})')})"
        raise CannotNote(f"{plain} isn't one of the operations of a pass")

    def _part(self, func, array: torch.Tensor, index: Any) -> torch.Tensor:
        """Leading columns of an array: a view that is known to be one."""
        whole, columns = index if isinstance(index, tuple) and len(index) == 2 else (0, 0)
        if whole != slice(None) or not isinstance(columns, slice) or columns.step is not None:
            raise CannotNote(f"index {index}")
        begin, stop, _ = columns.indices(self.shape[1])
        if begin == 0 and stop == self.shape[1]:
            return array
        if begin or identity(array) in self._cut:
            raise CannotNote(f"index {index}")
        view, key = func(array, index), f"e{stop}"
        self._counts[key] = stop
        self._kept[identity(view)] = view
        self._cut[identity(view)] = array, key
        return view

    # -- values ----------------------------------------------------------------------------

    def _operand(self, value: Any, cut) -> str:
        if isinstance(value, (int, float)):
            return self._number(value)
        if not isinstance(value, torch.Tensor):
            raise CannotNote(f"an operand {type(value).__name__}")
        if identity(value) in self._cut:
            parent, stop = self._cut[identity(value)]
            if cut is None or cut[1] != stop:
                raise CannotNote("columns of different arrays")
            return self._of(parent)
        if cut is not None and tuple(value.shape) == self.shape:
            raise CannotNote("a part and a whole")
        return self._of(value)

    def _scaled(self, factor: float, name: str) -> str:
        return f"mul({self._number(factor)}, {name})"

    def _number(self, value: float) -> str:
        name = f"s{len(self._numbers)}"
        self._numbers[name] = float(value)
        return name

    def _of(self, array: torch.Tensor) -> str:
        """The name of an array's present value, read from memory if need be."""
        key = identity(array)
        if key not in self._value:
            small = tuple(array.shape) == (self.shape[0], 1)
            if array.dtype != torch.float32 or not (small or tuple(array.shape) == self.shape):
                raise CannotNote(f"{array.dtype} of shape {tuple(array.shape)}")
            if array.is_meta or array.device != self.device or array.stride(1) != 1:
                raise CannotNote(f"an array on {array.device}, strides {array.stride()}")
            name = f"a{len(self._inputs)}"
            # a small one may change before the kernel runs
            self._inputs[name] = array.clone() if small and self.shape[1] != 1 else array
            if small:
                return name
            self._kept[key], self._value[key] = array, f"v{len(self._lines)}"
            self._lines.append(f"float v{len(self._lines)} = {name}")
        return self._value[key]

    def _write(self, array: torch.Tensor, name: str) -> None:
        key = identity(array)
        self._kept[key], self._value[key] = array, name
        if not array.is_meta:
            if array.dtype != torch.float32 or array.device != self.device or array.stride(1) != 1:
                raise CannotNote(f"{array.dtype} on {array.device}, strides {array.stride()}")
            self._changed[key] = array

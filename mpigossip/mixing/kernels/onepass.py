"""An algorithm's ``send`` or ``receive`` as one pass over a GPU's shard.

The function runs as it is written, but under a mode in which torch's elementwise operations are
noted in place of being done. What was noted becomes one CuPy kernel: each array is read at most
once and written at most once, with the wire's bfloat16 codes where there are some. Noting is done
anew in every step, so that a step's numbers and branches are those of the step; kernels are kept
by their text. What can't be noted is left to torch, nothing having been done by then.

Untested where there is no GPU; the texts are run on the CPU in the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch.overrides import TorchFunctionMode

from mpigossip.mixing.kernels import fused

SMALLEST = 1 << 20
"""Elements of a shard from which a pass over memory takes longer than noting and launching."""

HELPERS = (
    fused.HELPERS
    + "__device__ float pick(bool which, float a, float b) { return which ? a : b; }\n"
)


class CannotNote(Exception):
    """An operation that isn't elementwise, or on other arrays than float32 of one shape."""


class Coded(tuple):
    """An outbox of vectors, then scalars, with room beside it for the vectors' bfloat16 codes."""

    codes: tuple[torch.Tensor, ...] = ()
    """one (1, p) a vector; the vectors become what the codes say"""
    written = False
    """whether a pass has filled them"""


class Pass(NamedTuple):
    """A kernel's text and what it is called with; outputs may be the memory of inputs."""

    inputs: dict[str, torch.Tensor]
    """float32 (rows, p), or (rows, 1)"""
    numbers: dict[str, float]
    counts: dict[str, int]
    outputs: dict[str, torch.Tensor]
    """float32, or bfloat16 for codes"""
    text: str


def send(method: Callable, x, g, state, out, step, *, local: bool) -> Any:
    """``method(x, g, state, out, step)``, in one pass where that can be; the state.

    ``local``: nothing will travel, so that nothing is to be encoded.
    """
    codes = () if local else getattr(out, "codes", ())
    done = _once(method, x, (x, g, state, out, step), 3, codes)
    if done is None:
        return method(x, g, state, out, step)
    if codes:
        out.written = True
    return done[0]


def receive(method: Callable, x, g, state, sent, mixed, step) -> Any:
    """``method(x, g, state, sent, mixed, step)``, in one pass where that can be; the state.

    The gradient isn't needed afterwards, and its memory not written.
    """
    done = _once(method, x, (x, g, state, sent, mixed, step), None, (), (g,))
    return method(x, g, state, sent, mixed, step) if done is None else done[0]


_plain: WeakSet[Callable] = WeakSet()
"""Functions that turned out to be none for a pass."""


def _once(
    method: Callable,
    x: torch.Tensor,
    arguments: Sequence[Any],
    out: int | None,
    codes: Sequence[torch.Tensor],
    spent: Sequence[torch.Tensor] = (),
) -> tuple[Any] | None:
    """The state that the function returns, its arrays written; None where it wasn't done.

    ``out``: which of the arguments is the outbox.
    """
    if not _worth(x) or arguments[-1].skipped or method in _plain:
        return None
    noted = Noted(x)
    # small arrays are computed at once, in copies until it is sure that all can be noted
    own = {2, out}
    given = [noted.copied(value) if k in own else value for k, value in enumerate(arguments)]
    try:
        with noted:
            state = method(*given)
        outbox = arguments[out] if out is not None else ()
        made = noted.kernel(dict(zip(map(_key, outbox), codes, strict=False)), spent)
        state = noted.given_back(state)
    except CannotNote:
        _plain.add(method)
        return None
    if made is not None:
        _launch(made)
    for original, copy in noted.copies:
        original.copy_(copy)
    return (state,)


def _worth(x: torch.Tensor) -> bool:
    """Whether a pass is possible and gains something."""
    return (
        x.is_cuda
        and x.dtype == torch.float32
        and x.numel() >= SMALLEST
        and fused._cupy() is not None
    )


def _key(array: torch.Tensor) -> tuple:
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


BINARY = {"add": "+", "sub": "-", "mul": "*", "div": "/", "truediv": "/", "iadd": "+", "isub": "-"}
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
        lines, unneeded = [], set(map(_key, spent))
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
        return tuple(array.shape) == self.shape or _key(array) in self._cut

    def _note(self, name: str, plain: str, args: Sequence, options: dict) -> torch.Tensor:
        inside = name.endswith("_") and not name.endswith("__")
        target = args[0] if inside or plain in ("iadd", "isub") else options.pop("out", None)
        cut = None if target is None else self._cut.get(_key(target))
        exprs = self._expression(plain, args, options, cut)
        if options:
            raise CannotNote(f"{name} with {', '.join(options)}")
        line = f"v{len(self._lines)}"
        if cut is not None:
            parent, stop = cut
            exprs = f"pick(i % width < {stop}, {exprs}, {self._of(parent)})"
            self._write(parent, line)
        elif target is None:
            target = torch.empty(self.shape, device="meta")
            self._kept[_key(target)] = target
            self._value[_key(target)] = line
        else:
            if tuple(target.shape) != self.shape:
                raise CannotNote(f"{name} into an array of another shape")
            self._write(target, line)
        self._lines.append(f"float {line} = {exprs}")
        return target

    def _expression(self, plain: str, args: Sequence, options: dict, cut) -> str:
        """The operation in C."""
        if plain in ("zero", "zeros_like"):
            return "0.0"
        if plain in BINARY:
            a, b = self._operand(args[0], cut), self._operand(args[1], cut)
            scale = options.pop("alpha", 1)
            return f"{a} {BINARY[plain]} {b if scale == 1 else self._number(scale) + ' * ' + b}"
        if plain in ("copy", "clone", "sqrt", "neg"):
            form = {"sqrt": "sqrtf({})", "neg": "-{}"}.get(plain, "{}")
            return form.format(self._operand(args[-1], cut))
        if plain in ("addcmul", "addcdiv"):
            a, b, c = (self._operand(value, cut) for value in args)
            sign = "*" if plain == "addcmul" else "/"
            return f"{a} + {self._number(options.pop('value', 1))} * {b} {sign} {c}"
        if plain == "lerp" and not isinstance(args[2], torch.Tensor):
            a, b = self._operand(args[0], cut), self._operand(args[1], cut)
            return f"{a} + {self._number(args[2])} * ({b} - {a})"
        raise CannotNote(f"{plain} isn't one of the operations of a pass")

    def _part(self, func, array: torch.Tensor, index: Any) -> torch.Tensor:
        """Leading columns of an array: a view that is known to be one."""
        whole, columns = index if isinstance(index, tuple) and len(index) == 2 else (0, 0)
        if whole != slice(None) or not isinstance(columns, slice) or columns.step is not None:
            raise CannotNote(f"index {index}")
        begin, stop, _ = columns.indices(self.shape[1])
        if begin == 0 and stop == self.shape[1]:
            return array
        if begin or _key(array) in self._cut:
            raise CannotNote(f"index {index}")
        view, key = func(array, index), f"e{stop}"
        self._counts |= {key: stop, "width": self.shape[1]}
        self._kept[_key(view)] = view
        self._cut[_key(view)] = array, key
        return view

    # -- values ----------------------------------------------------------------------------

    def _operand(self, value: Any, cut) -> str:
        if isinstance(value, (int, float)):
            return self._number(value)
        if not isinstance(value, torch.Tensor):
            raise CannotNote(f"an operand {type(value).__name__}")
        if _key(value) in self._cut:
            parent, stop = self._cut[_key(value)]
            if cut is None or cut[1] != stop:
                raise CannotNote("columns of different arrays")
            return self._of(parent)
        if cut is not None and tuple(value.shape) == self.shape:
            raise CannotNote("a part and a whole")
        return self._of(value)

    def _number(self, value: float) -> str:
        name = f"s{len(self._numbers)}"
        self._numbers[name] = float(value)
        return name

    def _of(self, array: torch.Tensor) -> str:
        """The name of an array's present value, read from memory if need be."""
        key = _key(array)
        if key not in self._value:
            small = tuple(array.shape) == (self.shape[0], 1)
            if array.dtype != torch.float32 or not (small or tuple(array.shape) == self.shape):
                raise CannotNote(f"{array.dtype} of shape {tuple(array.shape)}")
            if array.is_meta or array.device != self.device:
                raise CannotNote(f"an array on {array.device}")
            name = f"a{len(self._inputs)}"
            # a small one may change before the kernel runs
            self._inputs[name] = array.clone() if small and self.shape[1] != 1 else array
            if small:
                return name
            self._kept[key], self._value[key] = array, f"v{len(self._lines)}"
            self._lines.append(f"float v{len(self._lines)} = {name}")
        return self._value[key]

    def _write(self, array: torch.Tensor, name: str) -> None:
        key = _key(array)
        self._kept[key], self._value[key] = array, name
        if not array.is_meta:
            if array.dtype != torch.float32 or array.device != self.device:
                raise CannotNote(f"{array.dtype} on {array.device}")
            self._changed[key] = array


def _launch(made: Pass) -> None:
    """Run the kernel on torch's current stream of its device."""
    cupy = fused._cupy()
    device = next(iter(made.outputs.values())).device
    types = {torch.float32: "float32", torch.bfloat16: "uint16"}
    inputs = [f"float32 {name}" for name in (*made.inputs, *made.numbers)]
    inputs += [f"int64 {name}" for name in made.counts]
    outputs = [f"{types[array.dtype]} {name}" for name, array in made.outputs.items()]
    with fused._on(device, cupy):
        kernel = _kernel(", ".join(inputs), ", ".join(outputs), made.text)
        kernel(
            *(fused._view(array, cupy) for array in made.inputs.values()),
            *map(cupy.float32, made.numbers.values()),
            *map(cupy.int64, made.counts.values()),
            *(fused._view(array, cupy) for array in made.outputs.values()),
        )


@cache
def _kernel(inputs: str, outputs: str, text: str) -> Any:
    make = fused._cupy().ElementwiseKernel
    return make(inputs, outputs, text, "mpigossip_pass", preamble=HELPERS)

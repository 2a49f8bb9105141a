"""The weighted sum on GPUs as one pass, bfloat16 of the wire decoded in it; and its encoding.

CuPy kernels with the roundings of the CPU's sum and of torch's conversion. Untested where there
is no GPU; the kernels' texts are compiled and tested for the CPU everywhere. Without CuPy torch's
operations do the same in several passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch

HELPERS = """
__device__ float wide(unsigned short c) { return __uint_as_float((unsigned int)c << 16); }
__device__ unsigned short narrow(float x) {
    unsigned int u = __float_as_uint(x);
    if (x != x) return 0x7fc0;
    return (unsigned short)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
"""
"""bfloat16 to float and back, rounded to nearest even."""
ENCODE = "c = narrow(x); y = wide(c)"


def combine(weights: Sequence[float], arrays: Sequence[torch.Tensor], out: torch.Tensor) -> bool:
    """:func:`mpigossip.mixing.combine.combine` on one GPU, float32; False where it can't be done.

    The arrays may also be bfloat16. ``out`` may be the memory of any of the float32 ones.
    """
    cupy = _cupy()
    one_gpu = all(array.device == out.device for array in arrays)
    if cupy is None or not one_gpu or out.dtype != torch.float32:
        return False
    uniform = all(weight == weights[0] for weight in weights)
    kinds = "".join("b" if array.dtype == torch.bfloat16 else "f" for array in arrays)
    scales = weights[:1] if uniform else weights
    with _on(out.device, cupy):
        values = [_view(array, cupy) for array in arrays]
        _sum(kinds, uniform)(*values, *map(cupy.float32, scales), _view(out, cupy))
    return True


def encode(values: torch.Tensor, codes: torch.Tensor) -> bool:
    """``codes`` (p,) = float32 ``values`` (p,) as bfloat16, which they become; False: not done."""
    cupy = _cupy()
    if cupy is None or not values.is_cuda:
        return False
    with _on(values.device, cupy):
        array = _view(values, cupy)
        _encoding()(array, _view(codes, cupy), array)
    return True


def operation(kinds: str, uniform: bool) -> str:
    """The sum's statements in C: arrays x0, x1, …, of ``kinds`` "f" or "b", and weights w0, ….

    ``__fmul_rn`` and ``__fadd_rn`` round each by itself: no compiler makes one of the two.
    """
    terms = [f"x{k}" if kind == "f" else f"wide(x{k})" for k, kind in enumerate(kinds)]
    if uniform:
        lines = [f"float s = {terms[0]}"]
        lines += [f"s = __fadd_rn(s, {term})" for term in terms[1:]]
        return "; ".join([*lines, "y = __fmul_rn(s, w0)"])
    lines = [f"float s = __fmul_rn({terms[0]}, w0)"]
    lines += [f"s = __fadd_rn(s, __fmul_rn({term}, w{k}))" for k, term in enumerate(terms) if k]
    return "; ".join([*lines, "y = s"])


@cache
def _sum(kinds: str, uniform: bool) -> Any:
    types = {"f": "float32", "b": "uint16"}
    inputs = [f"{types[kind]} x{k}" for k, kind in enumerate(kinds)]
    inputs += [f"float32 w{k}" for k in range(1 if uniform else len(kinds))]
    name = f"mpigossip_sum_{kinds}_{'equal' if uniform else 'weighted'}"
    return _cupy().ElementwiseKernel(
        ", ".join(inputs), "float32 y", operation(kinds, uniform), name, preamble=HELPERS
    )


@cache
def _encoding() -> Any:
    return _cupy().ElementwiseKernel(
        "float32 x", "uint16 c, float32 y", ENCODE, "mpigossip_bf16", preamble=HELPERS
    )


def _on(device: torch.device, cupy: Any) -> ExitStack:
    """The context in which CuPy works on torch's current stream of the device."""
    stack, stream = ExitStack(), torch.cuda.current_stream(device)
    stack.enter_context(torch.cuda.device(device))
    stack.enter_context(cupy.cuda.Device(device.index))
    made = getattr(cupy.cuda.Stream, "from_external", None)  # since CuPy 14
    external = made(Pointer(stream)) if made else cupy.cuda.ExternalStream(stream.cuda_stream)
    stack.enter_context(external)
    return stack


class Pointer:
    """A torch stream under the protocol by which CuPy takes over others' streams."""

    def __init__(self, stream: torch.cuda.Stream):
        """Keeps the stream alive."""
        self.stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        """Version and address."""
        return 0, self.stream.cuda_stream


def _view(array: torch.Tensor, cupy: Any) -> Any:
    """The same memory for CuPy, as the torch array's device's, also where a peer maps it."""
    kind = cupy.float32 if array.dtype == torch.float32 else cupy.uint16
    size = array.element_size()
    span = 1 + sum((n - 1) * step for n, step in zip(array.shape, array.stride(), strict=True))
    memory = cupy.cuda.UnownedMemory(array.data_ptr(), span * size, array, array.device.index)
    place = cupy.cuda.MemoryPointer(memory, 0)
    return cupy.ndarray(array.shape, kind, place, [step * size for step in array.stride()])


@cache
def _cupy() -> Any:
    try:
        import cupy
    except ImportError:
        return None
    return cupy

"""The weighted sum on GPUs as one pass: a CuPy kernel with the roundings of the CPU's sum.

Untested where there is no GPU; the arithmetic of the kernel's text is tested everywhere. Without
CuPy torch's operations do the same in several passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch


def combine(weights: Sequence[float], arrays: Sequence[torch.Tensor], out: torch.Tensor) -> bool:
    """:func:`mpigossip.mixing.base.combine` on one GPU, float32; False where it can't be done.

    ``out`` may be the memory of any of the arrays.
    """
    cupy = _cupy()
    one_gpu = all(array.device == out.device for array in arrays)
    if cupy is None or not one_gpu or out.dtype != torch.float32:
        return False
    uniform = all(weight == weights[0] for weight in weights)
    kernel = _kernel(len(arrays), uniform)
    stream = cupy.cuda.ExternalStream(torch.cuda.current_stream(out.device).cuda_stream)
    with cupy.cuda.Device(out.device.index), stream:
        views = [cupy.asarray(array) for array in arrays]
        scales = weights[:1] if uniform else weights
        kernel(*views, *map(cupy.float32, scales), cupy.asarray(out))
    return True


def operation(count: int, uniform: bool) -> str:
    """The kernel's statements for ``count`` arrays x0, x1, … and weights w0, …, in C.

    ``__fmul_rn`` and ``__fadd_rn`` round each by itself: no compiler makes one of the two.
    """
    if uniform:
        lines = ["float s = x0"]
        lines += [f"s = __fadd_rn(s, x{k})" for k in range(1, count)]
        return "; ".join([*lines, "y = __fmul_rn(s, w0)"])
    lines = ["float s = __fmul_rn(x0, w0)"]
    lines += [f"s = __fadd_rn(s, __fmul_rn(x{k}, w{k}))" for k in range(1, count)]
    return "; ".join([*lines, "y = s"])


@cache
def _kernel(count: int, uniform: bool) -> Any:
    scales = 1 if uniform else count
    inputs = [f"float32 x{k}" for k in range(count)] + [f"float32 w{k}" for k in range(scales)]
    name = f"mpigossip_sum_{count}_{'equal' if uniform else 'weighted'}"
    return _cupy().ElementwiseKernel(
        ", ".join(inputs), "float32 y", operation(count, uniform), name
    )


@cache
def _cupy() -> Any:
    try:
        import cupy
    except ImportError:
        return None
    return cupy

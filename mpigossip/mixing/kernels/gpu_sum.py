"""Weighted sum on GPUs by one kernel in one pass over memory, which also decodes bfloat16 messages.

It is optional: without CuPy, torch's operations compute the same bits in several passes. CuPy
compiles with denormals flushed to zero and with fused multiply-add. The kernel therefore uses
single PTX instructions, which round each operation and keep denormals, so that the bits are those
of the CPU. Without a GPU, the tests inspect its machine code, and compile it for the CPU and run
it.
"""

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

THREADS = 256
"""Threads of a block; each sums four consecutive elements, which are loaded and stored together."""
TERMS = 64
"""Largest number of arrays in one kernel, limited by its arguments and its registers."""
TYPES = {torch.float32: "float", torch.bfloat16: "unsigned short"}
NAME = "mpigossip_sum"
HELPERS = r"""
#if defined(__CUDA_ARCH__)
#define ROUNDED(name, instruction, sign) \
__device__ __forceinline__ float name(float a, float b) { \
    float c; asm(instruction ".rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b)); return c; }
#else
#pragma STDC FP_CONTRACT OFF
#define ROUNDED(name, instruction, sign) \
__device__ __forceinline__ float name(float a, float b) { return a sign b; }
#endif
ROUNDED(add, "add", +)
ROUNDED(mul, "mul", *)
__device__ __forceinline__ float wide(float x) { return x; }
__device__ __forceinline__ float wide(unsigned short x) {
    return __uint_as_float((unsigned int)x << 16); }
template <typename T> struct alignas(4 * sizeof(T)) Four { T at[4]; };
"""


def combine(weights: Sequence[float], arrays: Sequence[torch.Tensor], out: torch.Tensor) -> bool:
    """Compute :func:`mpigossip.mixing.combine.weighted_sum` on one GPU, in float32.

    Return False if this kernel can't do it. The arrays may also be bfloat16. ``out`` may be the
    memory of any of the float32 arrays.
    """
    for array in (*arrays, out):
        if array.device != out.device or array.dtype not in TYPES or not array.is_contiguous():
            return False
        if array.data_ptr() % (4 * array.element_size()):
            return False
    if out.dtype != torch.float32 or len(arrays) > TERMS or not usable(out.device):
        return False
    if out.numel():
        _launch(weights, arrays, out)
    return True


def source(types: Sequence[torch.dtype], uniform: bool) -> str:
    """Return the source of the kernel for arrays of these dtypes in this order.

    :param types: dtype of each array
    :param uniform: whether one weight applies to all arrays
    """
    kinds = [TYPES[dtype] for dtype in types]
    names = [f"x{k}" for k in range(len(types))]
    weights = [f"w{k}" for k in range(1 if uniform else len(types))]
    terms = [f"wide({x})" if uniform else f"mul(wide({x}), w{k})" for k, x in enumerate(names)]
    total = terms[0]
    for term in terms[1:]:
        total = f"add({total}, {term})"
    scales = [f"float {w}" for w in weights]
    arrays = list(zip(kinds, names, strict=True))
    values = [f"{kind} {x}" for kind, x in arrays]
    pointers = [f"const {kind}* {x}" for kind, x in arrays]
    loads = [f"Four<{kind}> f{x} = *(const Four<{kind}>*)({x} + j);" for kind, x in arrays]
    four = ", ".join([f"f{x}.at[i]" for x in names] + weights)
    tail = ", ".join([f"{x}[i]" for x in names] + weights)
    return f"""{HELPERS}
__device__ __forceinline__ float sum({", ".join(values + scales)}) {{
    return {f"mul({total}, w0)" if uniform else total};
}}
extern "C" __global__ void {NAME}({", ".join(["long count", "float* y", *pointers, *scales])}) {{
    const long j = 4 * ((long)blockIdx.x * blockDim.x + threadIdx.x);
    if (j + 4 <= count) {{
        {" ".join(loads)}
        Four<float> s;
        #pragma unroll
        for (int i = 0; i < 4; ++i) s.at[i] = sum({four});
        *(Four<float>*)(y + j) = s;
    }} else for (long i = j; i < count; ++i) y[i] = sum({tail});
}}
"""


def _launch(weights: Sequence[float], arrays: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Launch the sum on torch's current stream of the device."""
    import cupy

    uniform = all(weight == weights[0] for weight in weights)
    kernel = _compiled(tuple(array.dtype for array in arrays), uniform)
    pointers = [np.uint64(array.data_ptr()) for array in (out, *arrays)]
    scales = map(np.float32, weights[:1] if uniform else weights)
    blocks = -(-out.numel() // (4 * THREADS))
    stream = Stream(torch.cuda.current_stream(out.device))
    with torch.cuda.device(out.device), cupy.cuda.Stream.from_external(stream):
        kernel((blocks,), (THREADS,), (np.int64(out.numel()), *pointers, *scales))


@cache
def _compiled(types: tuple[torch.dtype, ...], uniform: bool) -> Any:
    import cupy

    return cupy.RawKernel(source(types, uniform), NAME)


class Stream:
    """Torch stream with the method by which CuPy accepts streams of other libraries."""

    def __init__(self, stream: torch.cuda.Stream):
        self.stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.stream.cuda_stream


@cache
def usable(device: torch.device) -> bool:
    """Return whether the kernel works on this device: try one sum and compare its bits.

    If it does not work, warn with the reason and a remedy.
    """
    if device.type != "cuda":
        return False
    # a denormal whose half is denormal, too, and a length that is not a multiple of four
    x = torch.tensor([[1.0, 3e-39, -2.5, 7.0, 0.1]], device=device)
    y = torch.empty_like(x)
    remedy = "pip install mpigossip[gpu] or mpigossip[gpu-cuda12]"
    try:
        _launch([0.5], [x], y)
        problem = (
            "" if torch.equal(y.cpu(), x.cpu() * 0.5) else "it computes other bits than the CPU"
        )
    except Exception as error:  # noqa: BLE001 - after any error, torch's operations are used
        if isinstance(error, OSError):  # CuPy caches compiled kernels in files
            remedy = "set CUPY_CACHE_DIR to a folder that you can write to"
        problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if problem:
        warnings.warn(
            f"the kernel that sums models is not used on {device}: {problem}; torch's operations "
            f"replace it, in several passes over memory ({remedy})",
            stacklevel=2,
        )
    return not problem

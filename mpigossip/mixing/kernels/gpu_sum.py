"""The weighted sum on GPUs: one kernel, one pass over memory, bfloat16 of the wire decoded in it.

An accelerator only: without CuPy torch's operations give the same bits in several passes. CuPy
compiles with denormals flushed to zero and products fused into sums; the kernel's arithmetic is
single PTX instructions instead, each rounded by itself with denormals kept: the CPU's bits.
Without a GPU the tests read its machine code, and compile it for the CPU and run it.
"""

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

THREADS = 256
"""Of a block; each has four neighbouring elements, loaded and stored by one instruction."""
TERMS = 64
"""Arrays that one kernel sums at most: its arguments and a thread's registers are limited."""
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

    Return whether it was done.

    The arrays may also be bfloat16. ``out`` may be the memory of any of the float32 ones.
    """
    for one in (*arrays, out):
        if one.device != out.device or one.dtype not in TYPES or not one.is_contiguous():
            return False
        if one.data_ptr() % (4 * one.element_size()):
            return False
    if out.dtype != torch.float32 or len(arrays) > TERMS or not usable(out.device):
        return False
    if out.numel():
        _launch(weights, arrays, out)
    return True


def source(types: Sequence[torch.dtype], uniform: bool) -> str:
    """The kernel for arrays of these types in this order; ``uniform``: with one weight for all."""
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
    rest = ", ".join([f"{x}[i]" for x in names] + weights)
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
    }} else for (long i = j; i < count; ++i) y[i] = sum({rest});
}}
"""


def _launch(weights: Sequence[float], arrays: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Begin the sum on torch's current stream of the arrays' device."""
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
    """A torch stream under the protocol by which CuPy takes over others' streams."""

    def __init__(self, stream: torch.cuda.Stream):
        self.stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.stream.cuda_stream


@cache
def usable(device: torch.device) -> bool:
    """Whether the kernel runs on this device: one sum is tried, and its bits are looked at."""
    if device.type != "cuda":
        return False
    # a denormal, whose half is one too, and a length with a rest after fours
    x = torch.tensor([[1.0, 3e-39, -2.5, 7.0, 0.1]], device=device)
    y = torch.empty_like(x)
    remedy = "pip install mpigossip[gpu], or [gpu-cuda12], mends it"
    try:
        _launch([0.5], [x], y)
        said = "" if torch.equal(y.cpu(), x.cpu() * 0.5) else "it gave other bits than the CPU"
    except Exception as error:  # noqa: BLE001 - whatever it is, torch's own operations go on
        if isinstance(error, OSError):  # CuPy keeps kernels in files
            remedy = "let CUPY_CACHE_DIR name a folder that you can write to"
        said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if said:
        warnings.warn(
            f"the kernel that sums models is off on {device}: {said}; torch's operations take its "
            f"place, in several passes over memory ({remedy})",
            stacklevel=2,
        )
    return not said

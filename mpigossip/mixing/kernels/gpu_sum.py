"""Weighted sum on GPUs by one kernel in one pass over memory, which also decodes bfloat16 messages.

The kernel is optional: without CuPy, torch's operations compute the same bits in several passes.
CuPy compiles with denormals flushed to zero and with fused multiply-add. The kernel therefore uses
single PTX instructions, which round each operation and keep denormals, so that its sums are bitwise
identical to sums on the CPU. Without a GPU, the tests inspect the machine code of the kernel; they
also compile the kernel for the CPU and run it.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

THREADS = 256
"""Number of threads of a CUDA block. Each thread sums four consecutive elements, which are loaded
and stored together."""
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

    :param weights: one weight for each array
    :param arrays: arrays of equal shape, float32 or bfloat16
    :param out: float32 array for the sum; it may be one of ``arrays``
    :return: whether the sum was computed. This requires that the kernel works on this device and
        supports the number, dtypes and memory of the arrays
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
    """Return the CUDA source code of the kernel for arrays of the given dtypes, in their order.

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
    stream = CupyStream(torch.cuda.current_stream(out.device))
    with torch.cuda.device(out.device), cupy.cuda.Stream.from_external(stream):
        kernel((blocks,), (THREADS,), (np.int64(out.numel()), *pointers, *scales))


@cache
def _compiled(types: tuple[torch.dtype, ...], uniform: bool) -> Any:
    import cupy

    return cupy.RawKernel(source(types, uniform), NAME)


class CupyStream:
    """Torch stream with the method by which CuPy accepts streams of other libraries."""

    def __init__(self, stream: torch.cuda.Stream):
        self.stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.stream.cuda_stream


@cache
def usable(device: torch.device) -> bool:
    """Return whether the kernel works on this device.

    Some of its sums are compared with the CPU's. If it does not work, a warning is issued with the
    reason and a remedy.
    """
    return kernel_works(
        computes_bits_of_cpu, device, "sums models", "in several passes over memory"
    )


def kernel_works(
    check: Callable[[torch.device], bool], device: torch.device, purpose: str, replaced: str
) -> bool:
    """Return whether a kernel of CuPy works on a GPU; if not, warn. On CPUs, return False.

    :param check: function that tries the kernel, as for :func:`reason_against`
    :param device: device on which it is tried
    :param purpose: what the kernel does, for the warning
    :param replaced: how torch's operations do the same, for the warning
    """
    if device.type != "cuda":
        return False
    problem, remedy = reason_against(check, device)
    if problem:
        warnings.warn(
            f"the kernel that {purpose} is not used on {device}: {problem}; torch's operations "
            f"replace it, {replaced} ({remedy})",
            stacklevel=3,
        )
    return not problem


def reason_against(check: Callable[[torch.device], bool], device: torch.device) -> tuple[str, str]:
    """Return the reason why a kernel can't be used, "" if it can, and a remedy.

    :param check: function that tries the kernel on a device, and returns whether its results are
        bitwise identical to the CPU's
    :param device: device on which it is tried
    """
    remedy = "pip install mpigossip[gpu] or mpigossip[gpu-cuda12]"
    try:
        return "" if check(device) else "it computes other bits than the CPU", remedy
    except Exception as error:  # noqa: BLE001 - after any error, torch's operations are used
        if isinstance(error, OSError):  # CuPy caches compiled kernels in files
            remedy = "set CUPY_CACHE_DIR to a folder that you can write to"
        reason = str(error).splitlines()[0] if str(error) else ""
        return f"{type(error).__name__}: {reason}", remedy


TRIAL_WEIGHTS = ((0.5,), (0.25, 0.25), (0.2, 0.5, 0.3), (1 / 3, 0.1, 0.4, 1 / 6))
"""Weights of the sums that are tried. If they are equal, the sum is scaled once; otherwise, each
product is rounded before the addition."""
TRIAL_LENGTH = 1021
"""Length of the arrays that are tried, which is not a multiple of four."""


def computes_bits_of_cpu(device: torch.device) -> bool:
    """Return whether the kernel's sums on ``device`` are bitwise identical to the CPU's.

    The test detects fused multiply-add, which would change about half of the sums, and denormals
    that are flushed to zero, because the values lie between denormal and large numbers.
    """
    draw = torch.Generator().manual_seed(0)
    for weights in TRIAL_WEIGHTS:
        arrays = []
        for _ in weights:
            # The program may have set another default type of torch.
            exponents = torch.randint(-44, 30, (1, TRIAL_LENGTH), generator=draw).float()
            values = torch.randn(1, TRIAL_LENGTH, generator=draw, dtype=torch.float32)
            arrays.append(values * 10.0**exponents)
            half = arrays[-1][0, ::2]
            half.copy_(torch.randn(half.shape, generator=draw, dtype=torch.float32))
        expected = _sum_on_cpu(weights, arrays)
        result = torch.empty(1, TRIAL_LENGTH, dtype=torch.float32, device=device)
        _launch(weights, [array.to(device) for array in arrays], result)
        if not torch.equal(result.cpu(), expected):
            return False
    return True


def _sum_on_cpu(weights: Sequence[float], arrays: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the weighted sum by separate operations of torch, each of which rounds its result."""
    if all(weight == weights[0] for weight in weights):
        total = arrays[0].clone()
        for array in arrays[1:]:
            total = total + array
        return total * weights[0]
    total = arrays[0] * weights[0]
    for weight, array in zip(weights[1:], arrays[1:], strict=True):
        total = total + array * weight
    return total

"""Elementwise passes over a GPU's arrays: a text in C made into a kernel, 128 bits a load.

CuPy compiles with denormals flushed to zero and products fused into sums; the texts call functions
that are single PTX instructions instead, each rounded by itself to the nearest with denormals
kept: the CPU's bits. Untested on a GPU; the texts are compiled for three architectures and for the
CPU, where they are run, in the tests.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

THREADS = 256
"""Of a block; each has four neighbouring columns."""
HELPERS = """
#if defined(__CUDA_ARCH__)
#define ROUNDED(name, instruction) \\
__device__ __forceinline__ float name(float a, float b) { \\
    float c; asm(instruction ".rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b)); return c; }
ROUNDED(add, "add")
ROUNDED(sub, "sub")
ROUNDED(mul, "mul")
ROUNDED(over, "div")
__device__ __forceinline__ float root(float a) {
    float c; asm("sqrt.rn.f32 %0, %1;" : "=f"(c) : "f"(a)); return c; }
#else
#pragma STDC FP_CONTRACT OFF
__device__ __forceinline__ float add(float a, float b) { return a + b; }
__device__ __forceinline__ float sub(float a, float b) { return a - b; }
__device__ __forceinline__ float mul(float a, float b) { return a * b; }
__device__ __forceinline__ float over(float a, float b) { return a / b; }
__device__ __forceinline__ float root(float a) { return sqrtf(a); }
#endif
__device__ __forceinline__ float minus(float a) {
    return __uint_as_float(__float_as_uint(a) ^ 0x80000000u); }
__device__ __forceinline__ float pick(bool which, float a, float b) { return which ? a : b; }
__device__ __forceinline__ float wide(unsigned short c) {
    return __uint_as_float((unsigned int)c << 16); }
__device__ __forceinline__ unsigned short narrow(float x) {
    unsigned int u = __float_as_uint(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
    return (unsigned short)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
__device__ __forceinline__ void load(const float* from, float* to) {
    float4 q = *(const float4*)from; to[0] = q.x; to[1] = q.y; to[2] = q.z; to[3] = q.w; }
__device__ __forceinline__ void load(const unsigned short* from, unsigned short* to) {
    ushort4 q = *(const ushort4*)from; to[0] = q.x; to[1] = q.y; to[2] = q.z; to[3] = q.w; }
__device__ __forceinline__ void store(float* to, const float* v) {
    *(float4*)to = make_float4(v[0], v[1], v[2], v[3]); }
__device__ __forceinline__ void store(unsigned short* to, const unsigned short* v) {
    *(ushort4*)to = make_ushort4(v[0], v[1], v[2], v[3]); }
"""
"""What a text may call: arithmetic, a choice, bfloat16 to float and back (to nearest even)."""
NAME = "mpigossip_pass"


class Pass(NamedTuple):
    """A text in C over the elements (row, j) of arrays; outputs may be the memory of inputs."""

    inputs: Mapping[str, torch.Tensor]
    """float32, or bfloat16 codes, (rows, p), neighbouring columns side by side; float32 (rows, 1)
    where every row has one value"""
    numbers: Mapping[str, float]
    counts: Mapping[str, int]
    outputs: Mapping[str, torch.Tensor]
    """float32, or bfloat16 for codes, (rows, p)"""
    text: str

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, p)."""
        rows, width = next(iter(self.outputs.values())).shape
        return rows, width

    @property
    def arrays(self) -> list[tuple[str, torch.Tensor]]:
        """Inputs, then outputs."""
        return [*self.inputs.items(), *self.outputs.items()]


class Form(NamedTuple):
    """All that a kernel's source depends on."""

    inputs: tuple[tuple[str, torch.dtype, bool], ...]
    """name, type, and whether every row has one value"""
    numbers: tuple[str, ...]
    counts: tuple[str, ...]
    outputs: tuple[tuple[str, torch.dtype], ...]
    text: str
    fours: bool
    """whether four neighbouring elements of every array are loaded at once"""


def form(made: Pass) -> Form:
    """Fours where all addresses bear it."""
    rows, _ = made.shape
    return Form(
        tuple((name, a.dtype, a.shape != made.shape) for name, a in made.inputs.items()),
        tuple(made.numbers), tuple(made.counts),
        tuple((name, a.dtype) for name, a in made.outputs.items()),
        made.text,
        all(
            a.data_ptr() % (4 * a.element_size()) == 0 and (rows == 1 or a.stride(0) % 4 == 0)
            for _, a in made.arrays
            if a.shape == made.shape
        ),
    )  # fmt: skip


def source(form: Form) -> str:
    """The kernel: a thread has four neighbouring columns of a row (block index y)."""
    types = {torch.float32: "float", torch.bfloat16: "unsigned short"}
    small = [name for name, _, small in form.inputs if small]
    inputs = [(types[dtype], name) for name, dtype, _ in form.inputs]
    outputs = [(types[dtype], name) for name, dtype in form.outputs]
    large = [name for _, name in inputs if name not in small]
    values = [f"float {s}" for s in form.numbers] + [f"long {e}" for e in form.counts]
    element = [f"{kind} {name}" for kind, name in inputs] + values
    element += [f"{kind}& {name}" for kind, name in outputs]
    taken = [f"const {kind}* {name}, long {name}_row" for kind, name in inputs]
    taken += [f"{kind}* {name}, long {name}_row" for kind, name in outputs] + values
    handed = [f"{name}[0]" if name in small else f"{name}_4[k]" for _, name in inputs]
    handed += [*form.numbers, *form.counts, *(f"{name}_4[k]" for _, name in outputs)]
    rows = " ".join(f"{name} += row * {name}_row;" for _, name in (*inputs, *outputs))
    fours = " ".join(f"{t} {n}_4[4];" for t, n in (*inputs, *outputs) if n not in small)
    call = f"element({', '.join(['j + k', *handed])});"
    return f"""{HELPERS}
__device__ __forceinline__ void element({", ".join(["long j", *element])}) {{ {form.text}; }}
extern "C" __global__ void {NAME}({", ".join(["long width", *taken])}) {{
    const long j = 4 * ((long)blockIdx.x * blockDim.x + threadIdx.x), row = blockIdx.y;
    if (j >= width) return;
    {rows}
    {fours}
    if ({"j + 4 <= width" if form.fours else "false"}) {{
        {" ".join(f"load({name} + j, {name}_4);" for name in large)}
        #pragma unroll
        for (int k = 0; k < 4; ++k) {call}
        {" ".join(f"store({name} + j, {name}_4);" for _, name in outputs)}
    }} else for (int k = 0; k < 4 && j + k < width; ++k) {{
        {" ".join(f"{name}_4[k] = {name}[j + k];" for name in large)}
        {call}
        {" ".join(f"{name}[j + k] = {name}_4[k];" for _, name in outputs)}
    }}
}}
"""


def launch(made: Pass) -> None:
    """Begin it on torch's current stream of the arrays' device."""
    rows, width = made.shape
    values: list[Any] = [np.int64(width)]
    for _, array in made.arrays:
        values += [np.uint64(array.data_ptr()), np.int64(array.stride(0) if rows > 1 else 0)]
    values += [*map(np.float32, made.numbers.values()), *map(np.int64, made.counts.values())]
    blocks = -(-width // (4 * THREADS))
    with _on(made.arrays[-1][1].device):
        _compiled(form(made))((blocks, rows), (THREADS,), tuple(values))


@cache
def _compiled(form: Form) -> Any:
    return _cupy().RawKernel(source(form), NAME)


@cache
def usable(device: torch.device) -> bool:
    """Whether passes can be launched on this device: one is, and its bits are looked at."""
    if device.type != "cuda":
        return False
    try:
        said = _tried(device)
    except Exception as error:  # noqa: BLE001 - whatever it is, torch's own operations go on
        said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if said:
        warnings.warn(
            f"fused kernels are off on {device}: {said}; torch's operations take their place, in "
            "several passes over memory (pip install mpigossip[cuda], or [cuda12], mends it)",
            stacklevel=2,
        )
    return not said


def _tried(device: torch.device) -> str:
    # a denormal, whose half is one too, and a length with a rest after fours
    x = torch.tensor([[1.0, 3e-39, -2.5, 7.0, 0.1]], device=device)
    y = torch.empty_like(x)
    launch(Pass({"x": x}, {"s": 0.5}, {}, {"y": y}, "y = mul(x, s)"))
    expected = x.cpu() * 0.5
    return "" if torch.equal(y.cpu(), expected) else "a kernel gave other bits than the CPU"


def _on(device: torch.device) -> ExitStack:
    """The context in which CuPy works on torch's current stream of the device."""
    cupy, stack, stream = _cupy(), ExitStack(), torch.cuda.current_stream(device)
    stack.enter_context(torch.cuda.device(device))
    stack.enter_context(cupy.cuda.Device(device.index))
    stack.enter_context(cupy.cuda.Stream.from_external(Pointer(stream)))
    return stack


class Pointer:
    """A torch stream under the protocol by which CuPy takes over others' streams."""

    def __init__(self, stream: torch.cuda.Stream):
        """Keeps the stream alive."""
        self.stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        """Version and address."""
        return 0, self.stream.cuda_stream


def _cupy() -> Any:
    import cupy

    return cupy

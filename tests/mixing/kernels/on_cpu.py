"""GPU kernels that run on this processor, one thread after the other."""

import ctypes
import hashlib
import os
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

HEAD = """
#define __device__
#define __global__
#define __forceinline__ inline
static float __uint_as_float(unsigned u) { return __builtin_bit_cast(float, u); }
static thread_local struct { long x; } blockIdx, threadIdx, blockDim;
"""
FLAGS = ["-O1", "-w", "-ffp-contract=off", "-fno-strict-aliasing", "-shared", "-fPIC"]


def parameters(source: str) -> list[tuple[str, str]]:
    """Return the parameters of a kernel as pairs (type, name)."""
    listed = source.partition("__global__ void ")[2].partition("(")[2].partition(")")[0]
    return [
        (kind, name)
        for kind, _, name in (parameter.rpartition(" ") for parameter in listed.split(", "))
    ]


def as_cpp(number: int, source: str) -> str:
    """Return the source of the kernel and of a function that calls it for every thread.

    The function takes one array, in which each argument takes 8 bytes.
    """
    kinds = [kind.removeprefix("const ") for kind, _ in parameters(source)]
    arguments = ", ".join(f"*({kind}*)(a + {k})" for k, kind in enumerate(kinds))
    name = source.partition("__global__ void ")[2].partition("(")[0]
    return f"""
namespace of{number} {{ {source.replace('extern "C"', "")} }}
extern "C" void run{number}(long blocks, long threads, const long* a) {{
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x)
            of{number}::{name}({arguments});
}}
"""


def compiled(sources: Sequence[str], folder: Path) -> list[Callable]:
    """Compile kernels into functions that are called like CuPy's; the folder caches them."""
    text = HEAD + "".join(map(as_cpp, range(len(sources)), sources))
    library = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.so"
    if not library.exists():
        temporary = library.with_suffix(f".{os.getpid()}")
        command = ["c++", *FLAGS, "-x", "c++", "-", "-o", temporary]
        subprocess.run(command, input=text, text=True, check=True, timeout=120)
        temporary.rename(library)
    loaded = ctypes.CDLL(str(library))

    def call(number: int, grid, block, values) -> None:
        sizes = [ctypes.c_long(size) for size in (*grid, *block)]
        raw = b"".join(value.tobytes().ljust(8, b"\0") for value in values)
        getattr(loaded, f"run{number}")(*sizes, raw)

    return [partial(call, number) for number in range(len(sources))]

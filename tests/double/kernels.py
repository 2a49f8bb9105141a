"""GPU kernels compiled for this processor, each thread after the other; kept by their source."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

HEAD = """
#include <cmath>
#include <cstring>
#define __device__
#define __global__
#define __forceinline__ inline
struct float4 { float x, y, z, w; };
struct ushort4 { unsigned short x, y, z, w; };
typedef unsigned short code;
static float4 make_float4(float a, float b, float c, float d) { return {a, b, c, d}; }
static ushort4 make_ushort4(code a, code b, code c, code d) { return {a, b, c, d}; }
static float __uint_as_float(unsigned u) { float f; memcpy(&f, &u, 4); return f; }
static unsigned __float_as_uint(float f) { unsigned u; memcpy(&u, &f, 4); return u; }
static thread_local struct { long x, y; } blockIdx, threadIdx, blockDim;
"""
FLAGS = ["-O1", "-w", "-ffp-contract=off", "-fno-strict-aliasing", "-shared", "-fPIC"]
_folder = Path(tempfile.gettempdir()) / "mpigossip-kernels"


def parameters(source: str, name: str) -> list[tuple[str, str]]:
    """A kernel's parameters as (type, name)."""
    listed = source.partition(f"{name}(")[2].partition(")")[0].split(", ")
    return [tuple(one.rsplit(" ", 1)) for one in listed]


def compiled(source: str, name: str):
    """A function that takes what a kernel of CuPy takes: grid, block, values of 8 bytes at most."""
    kinds = [kind.removeprefix("const ") for kind, _ in parameters(source, name)]
    given = ", ".join(f"*({kind}*)(a + {k})" for k, kind in enumerate(kinds))
    text = f"""{HEAD}{source}
extern "C" void run(long blocks, long rows, long threads, const long* a) {{
    blockDim.x = threads;
    for (blockIdx.y = 0; blockIdx.y < rows; ++blockIdx.y)
        for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
            for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) {name}({given});
}}
"""
    path = _folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.so"
    if not path.exists():
        compiler = shutil.which("c++")
        if compiler is None:
            raise FileNotFoundError("no C++ compiler to run kernels with: install g++")
        _folder.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_folder) as folder:
            code, made = Path(folder, "kernel.cpp"), Path(folder, "kernel.so")
            code.write_text(text)
            subprocess.run([compiler, *FLAGS, code, "-o", made], check=True, timeout=120)
            made.rename(path)
    function = ctypes.CDLL(str(path)).run

    def run(grid, block, values) -> None:
        raw = np.zeros(len(values), np.int64)
        for place, value in enumerate(values):
            raw[place : place + 1].view(value.dtype)[0] = value
        sizes = [ctypes.c_long(v) for v in (*grid, *block)]
        function(*sizes, ctypes.c_void_p(raw.ctypes.data))

    run.source = source
    return run

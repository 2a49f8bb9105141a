"""The kernels for GPUs: their text, run or compiled for the CPU, has the bits of the reference."""

import ctypes
import shutil
import subprocess

import numpy as np
import pytest
import torch

from mpigossip.mixing.base import combine
from mpigossip.mixing.fused import ENCODE, HELPERS, operation


def run_text(text, values):
    """The statements of a kernel in float32, each operation rounded by itself."""
    names = {"__fmul_rn": np.multiply, "__fadd_rn": np.add, **values}
    for statement in text.split(";"):
        exec(statement.strip().removeprefix("float "), names)
    return names["y"]


@pytest.mark.parametrize(
    "weights", [[1.0], [0.5, 0.5], [1 / 3] * 3, [0.2, 0.5, 0.3], [0.1, 0.2, 0.3, 0.4], [1 / 8] * 8]
)
def test_the_kernels_arithmetic_has_the_bits_of_the_sum(weights):
    arrays = [torch.randn(1, 10_000) for _ in weights]
    kinds, uniform = "f" * len(weights), len(set(weights)) == 1
    values = {f"x{k}": array.numpy() for k, array in enumerate(arrays)}
    values |= {f"w{k}": np.float32(weight) for k, weight in enumerate(weights)}
    expected = combine(weights, arrays, torch.empty(1, 10_000)).numpy()
    assert (run_text(operation(kinds, uniform), values) == expected).all()


AS_C = """
#include <cstddef>
#include <cstring>
#define __device__ static
static float __uint_as_float(unsigned u) { float f; memcpy(&f, &u, 4); return f; }
static unsigned __float_as_uint(float f) { unsigned u; memcpy(&u, &f, 4); return u; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fadd_rn(float a, float b) { return a + b; }
%s
extern "C" void encode(const float* xs, unsigned short* cs, float* ys, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        float x = xs[i]; unsigned short& c = cs[i]; float& y = ys[i]; %s;
    }
}
extern "C" void sum(const float* a, const unsigned short* b, const float* w, float* ys, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        float x0 = a[i], w0 = w[0], w1 = w[1]; unsigned short x1 = b[i]; float& y = ys[i]; %s;
    }
}
"""


def test_the_kernels_of_bf16_have_torchs_bits(tmp_path):
    """Their text compiled for the CPU: encoding, and a sum whose second term is encoded."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler to try the kernel's text with")
    source, library = tmp_path / "kernel.cpp", tmp_path / "kernel.so"
    source.write_text(AS_C % (HELPERS, ENCODE, operation("fb", False)))
    flags = ["-O2", "-ffp-contract=off", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True, timeout=60)
    kernel = ctypes.CDLL(str(library))
    edges = torch.tensor([0.0, -0.0, 1.0, 3.4e38, -3.4e38, 1e-40, float("inf"), 1.00390625])
    values = torch.cat([torch.randn(10_000) * 10.0 ** torch.randint(-30, 30, (10_000,)), edges])
    codes, decoded = torch.zeros(len(values), dtype=torch.bfloat16), torch.zeros_like(values)

    def call(function, *arrays):
        function(*(ctypes.c_void_p(a.data_ptr()) for a in arrays), ctypes.c_size_t(len(values)))

    call(kernel.encode, values, codes, decoded)
    expected = values.to(torch.bfloat16)
    assert torch.equal(codes.view(torch.int16), expected.view(torch.int16))
    assert torch.equal(decoded, expected.float())
    out, other = torch.zeros_like(values), torch.randn(len(values))
    call(kernel.sum, other, codes, torch.tensor([0.3, 0.7]), out)
    rows = [other.unsqueeze(0), expected.float().unsqueeze(0)]
    assert torch.equal(out, combine([0.3, 0.7], rows, torch.empty(1, len(values)))[0])

"""The sum on GPUs, tested without a GPU: run on this processor, and disassembled.

Disassembling needs the extra "nvrtc" (NVIDIA's compiler and disassembler).
"""

import ctypes
import importlib.util
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mpigossip.mixing.combine import weighted_sum
from mpigossip.mixing.kernels import gpu_sum
from tests.cases import naming, on_each
from tests.mixing.kernels import on_cpu

FLOAT = torch.float32
CODE = torch.bfloat16


@pytest.fixture
def on_the_cpu(monkeypatch, tmp_path):
    """Let launches compile the kernel for this processor and run it; yield the compiled sources."""
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler for the kernel")
    seen = []

    def kernel(source, name):
        seen.append(source)
        return on_cpu.compiled([source], tmp_path)[0]

    stream = SimpleNamespace(from_external=lambda stream: nullcontext())
    fake = SimpleNamespace(RawKernel=kernel, cuda=SimpleNamespace(Stream=stream))
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(gpu_sum, "usable", lambda device: True)
    gpu_sum._compiled.cache_clear()
    yield seen
    gpu_sum._compiled.cache_clear()


@pytest.mark.parametrize(
    "weights", [[1.0], [0.5, 0.5], [1 / 3] * 3, [0.2, 0.5, 0.3], [0.1, 0.2, 0.3, 0.4], [1 / 8] * 8]
)
@pytest.mark.parametrize("coded", [(), (1, 2)])
def test_the_kernel_has_the_bits_of_the_sum(on_the_cpu, weights, coded):
    """The sum may be written in place; 333 is not a multiple of four; some values are denormal."""
    sizes = 10.0 ** torch.randint(-44, 30, (3, 333))
    arrays = [torch.randn(3, 333) * sizes for _ in weights]
    messages = [array.to(CODE) if k in coded else array for k, array in enumerate(arrays)]
    expected = weighted_sum(weights, [array.float() for array in messages], torch.empty(3, 333))
    assert ((expected != 0) & (expected.abs() < 1e-38)).any(), "no sum is denormal"
    for out in (torch.zeros(3, 333), messages[0]):
        assert gpu_sum.combine(weights, messages, out)
        assert torch.equal(out.nan_to_num(7), expected.nan_to_num(7))
    assert len(on_the_cpu) == 1, "the kernel was compiled again"


def test_unsupported_arrays_are_left_to_torch(on_the_cpu):
    first = torch.ones(2, 64)
    second = torch.ones(2, 64)
    assert gpu_sum.combine([0.5, 0.5], [first, second], first)
    assert not gpu_sum.combine([0.5, 0.5], [first.double(), second], first)
    assert not gpu_sum.combine([0.5, 0.5], [first, second], first.to(CODE))
    assert not gpu_sum.combine([0.5, 0.5], [first[:, 4:], second[:, 4:]], torch.ones(2, 60))
    assert not gpu_sum.combine([0.5, 0.5], [first[:1, 1:61], second[:1, :60]], torch.ones(1, 60))
    assert not gpu_sum.combine([1 / 65] * 65, [first] * 65, second)


@on_each(
    ("error", "said"),
    [
        (
            RuntimeError("CuPy failed to load libnvrtc.so.12\nand a long story"),
            ("RuntimeError", "libnvrtc.so.12", "pip install"),
        ),
        (
            PermissionError(13, "Permission denied", "/home/me/.cupy"),
            ("PermissionError", "CUPY_CACHE_DIR"),
        ),
    ],
)
def test_a_device_whose_kernels_fail_is_left_to_torch_with_a_warning(monkeypatch, error, said):
    def fails(*_):
        raise error

    monkeypatch.setattr(gpu_sum, "computes_bits_of_cpu", fails)
    gpu_sum.usable.cache_clear()
    with pytest.warns(UserWarning, match=naming("cuda:0", said)):
        assert not gpu_sum.usable(torch.device("cuda:0"))
    assert not gpu_sum.usable(torch.device("cuda:0")), "the warning is given once"
    gpu_sum.usable.cache_clear()


# -- for GPUs --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def toolkit():
    """Return the folder of NVIDIA's wheels that contains lib/ and bin/."""
    spec = importlib.util.find_spec("nvidia")
    for path in spec.submodule_search_locations if spec else ():
        for folder in sorted(Path(path).glob("cu1*"), reverse=True):
            if list(folder.glob("lib/libnvrtc.so.*")) and (folder / "bin" / "nvdisasm").exists():
                return folder
    pytest.skip('no NVRTC and nvdisasm here; the extra "nvrtc" installs them')


def compiled(toolkit, source, flush="true"):
    """Return the machine code (ELF) of a kernel."""
    nvrtc = ctypes.CDLL(str(max(toolkit.glob("lib/libnvrtc.so.*"))))
    program = ctypes.c_void_p()
    size = ctypes.c_size_t()

    def call(name, *arguments):
        code = getattr(nvrtc, f"nvrtc{name}")(*arguments)
        if code:
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise AssertionError(f"nvrtc{name}: {code}\n{log.value.decode()}\n{source}")

    call("CreateProgram", ctypes.byref(program), source.encode(), b"sum.cu", 0, None, None)
    # CuPy's last option flushes denormals, which must not affect this kernel.
    requested = "--gpu-architecture=sm_90", f"-ftz={flush}"
    options = (ctypes.c_char_p * 2)(*map(str.encode, requested))
    call("CompileProgram", program, 2, options)
    call("GetCUBINSize", program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    call("GetCUBIN", program, code)
    return code.raw


def read(toolkit, source, folder):
    """Return the instructions of a kernel and their attributes, as text."""
    (folder / "kernel.cubin").write_bytes(compiled(toolkit, source))
    tool = [toolkit / "bin" / "nvdisasm", folder / "kernel.cubin"]
    return subprocess.run(tool, check=True, capture_output=True, text=True).stdout


def fact(text, name):
    pattern = rf"EIATTR_{name}\b.*?index@\(\w+\)\s+\S+\s+\.word\s+(0x[0-9a-f]+)"
    return int(re.search(pattern, text, re.DOTALL)[1], 16)


@pytest.mark.parametrize(
    "floats, codes, uniform",
    [(2, 0, True), (1, 1, False), (8, 0, False), (gpu_sum.TERMS, 0, False)],
)
def test_the_kernel_compiles_to_the_expected_instructions(
    toolkit, floats, codes, uniform, tmp_path
):
    source = gpu_sum.source([FLOAT] * floats + [CODE] * codes, uniform)
    text = read(toolkit, source, tmp_path)
    seen = [
        len(re.findall(rf"\b{op}\.E\.{bits}\b", text))
        for op, bits in (("LDG", 128), ("LDG", 64), ("STG", 128))
    ]
    assert seen == [floats, codes, 1]
    assert not re.search(r"\bFFMA\b", text), "a product and a sum are fused"
    assert not re.search(r"\.FTZ\b", text), "denormals become zero"
    assert not re.search(r"\b(LDL|STL)\b", text) and not fact(text, "MIN_STACK_SIZE"), "spills"
    assert not re.search(r"\b(DADD|DMUL|DFMA|F2F\.F64)", text), "float64"
    # 2048 threads of a multiprocessor share 65,536: half of them at once hide memory's latency
    assert fact(text, "REGCOUNT") <= 64 or floats == gpu_sum.TERMS


def test_flushing_denormals_changes_nothing(toolkit):
    source = gpu_sum.source([FLOAT, CODE, FLOAT], False)
    assert compiled(toolkit, source) == compiled(toolkit, source, "false")


def test_fused_arithmetic_would_be_detected(toolkit, tmp_path):
    """A kernel with C's operators contains the instructions that the checks above reject."""
    source = gpu_sum.source([FLOAT] * 2, False)
    plain = source.replace("add(mul(wide(x0), w0), mul(wide(x1), w1))", "x0 * w0 + x1 * w1")
    assert plain != source and re.search(r"\bFFMA\.FTZ\b", read(toolkit, plain, tmp_path))


def fused(weights, arrays, out):
    """Compute a weighted sum as fused multiply-adds do: products are not rounded."""
    total = arrays[0] * weights[0]
    for weight, array in zip(weights[1:], arrays[1:], strict=True):
        product = array.double() * torch.tensor(weight).double()  # exact
        total = (total.double() + product).float()
    out.copy_(total)


def without_denormals(weights, arrays, out):
    total = weighted_sum(weights, arrays, torch.empty_like(out))
    out.copy_(torch.where(total.abs() < 1.2e-38, torch.zeros(()), total))


@pytest.mark.parametrize("wrong", [fused, without_denormals])
def test_a_kernel_with_other_bits_is_noticed(monkeypatch, wrong):
    monkeypatch.setattr(gpu_sum, "_launch", wrong)
    assert not gpu_sum.computes_bits_of_cpu(torch.device("cpu"))
    monkeypatch.setattr(gpu_sum, "_launch", weighted_sum)
    assert gpu_sum.computes_bits_of_cpu(torch.device("cpu"))


def test_the_kernel_passes_its_trial(on_the_cpu):
    assert gpu_sum.computes_bits_of_cpu(torch.device("cpu"))

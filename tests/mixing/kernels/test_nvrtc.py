"""Every kernel compiled for three generations of GPUs as CuPy does it; no device is needed.

Needs the extra "nvrtc" (NVIDIA's compiler and disassembler).
"""

import ctypes
import importlib.util
import re
import subprocess
from pathlib import Path

import pytest
import torch

from mpigossip import algorithms
from mpigossip.mixing.kernels import elementwise, fused, onepass
from mpigossip.mixing.kernels.elementwise import Form
from tests.mixing.kernels.test_fused import VARIANTS, steps

GENERATIONS = ("sm_80", "sm_90", "sm_100")
FLOAT, CODE = torch.float32, torch.bfloat16


@pytest.fixture(scope="module")
def toolkit():
    """The folder of NVIDIA's wheels, with lib/ and bin/."""
    found = importlib.util.find_spec("nvidia")
    for place in found.submodule_search_locations if found else ():
        for folder in sorted(Path(place).glob("cu1*"), reverse=True):
            if list(folder.glob("lib/libnvrtc.so.*")) and (folder / "bin" / "nvdisasm").exists():
                return folder
    pytest.skip('no NVRTC and nvdisasm here; the extra "nvrtc" installs them')


def compiled(toolkit, source, generation, flush="true"):
    """The machine code (ELF) of a kernel."""
    nvrtc = ctypes.CDLL(str(max(toolkit.glob("lib/libnvrtc.so.*"))))
    program, size = ctypes.c_void_p(), ctypes.c_size_t()

    def call(name, *arguments):
        code = getattr(nvrtc, f"nvrtc{name}")(*arguments)
        if code:
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise AssertionError(f"nvrtc{name}: {code}\n{log.value.decode()}\n{source}")

    call("CreateProgram", ctypes.byref(program), source.encode(), b"pass.cu", 0, None, None)
    # CuPy's own last option flushes denormals: the texts must withstand it
    asked = f"--gpu-architecture={generation}", f"-ftz={flush}"
    options = (ctypes.c_char_p * 2)(*map(str.encode, asked))
    call("CompileProgram", program, 2, options)
    call("GetCUBINSize", program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    call("GetCUBIN", program, code)
    return code.raw


class Assembled:
    """A kernel's instructions, and the registers and bytes of stack that it takes."""

    def __init__(self, toolkit, form, generation, folder):
        """Compile and read back."""
        path = folder / "kernel.cubin"
        path.write_bytes(compiled(toolkit, elementwise.source(form), generation))
        tool = [toolkit / "bin" / "nvdisasm", path]
        self.text = subprocess.run(tool, check=True, capture_output=True, text=True).stdout
        self.registers, self.stack = self._fact("REGCOUNT"), self._fact("MIN_STACK_SIZE")

    def _fact(self, name):
        pattern = rf"EIATTR_{name}\b.*?index@\(\w+\)\s+\S+\s+\.word\s+(0x[0-9a-f]+)"
        return int(re.search(pattern, self.text, re.DOTALL)[1], 16)

    def count(self, pattern):
        """Instructions that match."""
        return len(re.findall(pattern, self.text))


def sum_of(kinds, uniform):
    """The sum's kernel over arrays "f" (float32) and "b" (bfloat16 codes)."""
    types = {"f": FLOAT, "b": CODE}
    weights = tuple(f"w{k}" for k in range(1 if uniform else len(kinds)))
    arrays = tuple((f"x{k}", types[kind], False) for k, kind in enumerate(kinds))
    return Form(arrays, weights, (), (("y", FLOAT),), fused.operation(kinds, uniform), True)


def forms(monkeypatch):
    """All kernels: sums, the encoding, a pass of every algorithm with codes and without."""
    found = [
        sum_of(kinds, uniform) for kinds in ("ff", "fb", "ffffffff") for uniform in (True, False)
    ]
    coded = (("c", CODE), ("y", FLOAT))
    found.append(Form((("x", FLOAT, False),), (), (), coded, fused.ENCODE, True))
    monkeypatch.setattr(onepass, "_worth", lambda x: True)
    monkeypatch.setattr(
        onepass, "launch", lambda made: found.append(elementwise.form(made)._replace(fours=True))
    )
    for name, local, options in VARIANTS:
        for coded in (False, True):
            method = algorithms.build(name, local, options, decayed=130)
            steps(method, True, count=3, coded=coded)
    return list(dict.fromkeys(found))


def needed(form):
    """Names on which the outputs depend: no compiler loads others."""
    names = {name for name, _ in form.outputs}
    for statement in reversed(form.text.split(";")):
        written, _, expression = statement.strip().removeprefix("float ").partition(" = ")
        if written in names:
            names |= set(re.findall(r"\w+", expression))
    return names


@pytest.mark.parametrize("generation", GENERATIONS)
def test_kernels_compile_to_what_they_are_meant_to_be(toolkit, generation, monkeypatch, tmp_path):
    every = forms(monkeypatch)
    assert len(every) > 40
    for form in every:
        made = Assembled(toolkit, form, generation, tmp_path)
        names = needed(form)
        large = [dtype for name, dtype, small in form.inputs if not small and name in names]
        fours = (large.count(FLOAT), sum(t == FLOAT for _, t in form.outputs))
        codes = (large.count(CODE), sum(t == CODE for _, t in form.outputs))
        seen = [made.count(rf"\b{op}\.E\.{bits}\b") for bits in (128, 64) for op in ("LDG", "STG")]
        assert seen == [*fours, *codes], form.text
        if not re.search(r"\b(over|root)\(", form.text):  # NVIDIA's routines scale, then flush
            assert not made.count(r"\.FTZ\b"), f"denormals become zero: {form.text}"
        assert not made.count(r"\b(LDL|STL)\b") and not made.stack, f"spills: {form.text}"
        assert not made.count(r"\b(DADD|DMUL|DFMA|F2F\.F64)"), f"float64: {form.text}"
        # 2048 threads of a multiprocessor share 65,536: half of them at once hide memory's latency
        assert made.registers <= 64, (made.registers, form.text)


def test_flushing_denormals_changes_no_kernel(toolkit, monkeypatch):
    for form in forms(monkeypatch):
        source = elementwise.source(form)
        with_it, without = (compiled(toolkit, source, "sm_90", f) for f in ("true", "false"))
        assert with_it == without, form.text


def test_the_compilers_own_arithmetic_would_be_seen(toolkit, tmp_path):
    """What the checks above look for is there where a text uses C's operators."""
    arrays = (("x", FLOAT, False), ("z", FLOAT, False))
    form = Form(arrays, ("s",), (), (("y", FLOAT),), "y = x * s + z", True)
    made = Assembled(toolkit, form, "sm_90", tmp_path)
    assert made.count(r"\bFFMA\.FTZ\b")

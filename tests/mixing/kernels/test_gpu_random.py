"""Random words for GPUs, tested without a GPU: torch's operations and the kernel run on the CPU."""

import shutil
import sys
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mpigossip.mixing import lossy_wires, wire
from mpigossip.mixing.kernels import gpu_random
from tests.cases import naming, on_each
from tests.mixing.kernels import on_cpu
from tests.mixing.kernels.test_gpu_sum import compiled, fact, read, toolkit  # noqa: F401

KEYS = [(0, 0, 0, 0), (1, 2, 3, 4), (2**63 - 1, 2**40, 1023, 7), (5, 1, 0, 1)]
CPU = torch.device("cpu")


@pytest.fixture
def kernel_on_the_cpu(monkeypatch, tmp_path):
    """Let launches compile the kernel for this processor and run it; yield the number of words."""
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler for the kernel")
    launched = []

    def kernel(source, name):
        run = on_cpu.compiled([source], tmp_path)[0]
        return lambda *arguments: launched.append(arguments[0]) or run(*arguments)

    stream = SimpleNamespace(from_external=lambda stream: nullcontext())
    fake = SimpleNamespace(RawKernel=kernel, cuda=SimpleNamespace(Stream=stream))
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(gpu_random, "usable", lambda device: True)
    gpu_random._kernel.cache_clear()
    yield launched
    gpu_random._kernel.cache_clear()


def check_words():
    """Compare words with NumPy's generator, for many keys, offsets, sizes and counts per bucket."""
    random = np.random.default_rng(0)
    offsets = [0, 1, 511, 2**20 + 3, 2**32 - 1, 2**40]
    for key in KEYS:
        for bucket in offsets:
            for count in (8, 512):
                buckets = int(random.integers(1, 70))
                expected = wire.draw(key, bucket * wire.WIRE_BUCKET, buckets, count).view(np.int32)
                words = gpu_random.words(key, bucket * count // 8, buckets * count, CPU)
                assert words.dtype == torch.int32
                assert np.array_equal(words.view(buckets, count).numpy(), expected)


def test_torch_operations_draw_the_words_of_numpy():
    check_words()


def test_the_kernel_draws_the_words_of_numpy(kernel_on_the_cpu):
    check_words()
    assert len(kernel_on_the_cpu) == 2 * 6 * len(KEYS)


def test_a_kernel_with_other_words_is_noticed(kernel_on_the_cpu, monkeypatch):
    assert gpu_random.draws_words_of_cpu(CPU)
    monkeypatch.setattr(gpu_random, "ROUNDS", 9)
    gpu_random._kernel.cache_clear()
    assert not gpu_random.draws_words_of_cpu(CPU)


def test_an_unusable_kernel_is_reported_once(monkeypatch):
    monkeypatch.setattr(gpu_random, "draws_words_of_cpu", lambda device: False)
    gpu_random.usable.cache_clear()
    device = torch.device("cuda:0")
    with pytest.warns(UserWarning, match=naming("random numbers", "cuda:0")):
        assert not gpu_random.usable(device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not gpu_random.usable(device) and not gpu_random.usable(CPU)
    gpu_random.usable.cache_clear()


@on_each("name", ["qsgd", "fp4", "random-k", "shared-k"])
def test_a_wire_has_equal_codes_with_words_of_the_device(name, monkeypatch):
    """``BucketRandom`` draws on a GPU by ``gpu_random``; let it do so on the CPU."""
    one = lossy_wires.wire(name, density=0.1, seed=3)
    x = torch.randn(wire.CHUNK + 3 * wire.WIRE_BUCKET, generator=torch.Generator().manual_seed(0))
    results = []
    for on_device in (False, True):
        monkeypatch.setattr(wire.BucketRandom, "on_device", on_device)
        codes = torch.zeros(one.nbytes(x.numel()), dtype=torch.uint8)
        one.write(values := x.clone(), (5, 2, 0), 7 * wire.WIRE_BUCKET, codes)
        results.append((values, codes))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_the_kernel_compiles_without_spills(toolkit, tmp_path):  # noqa: F811
    text = read(toolkit, gpu_random.source(), tmp_path)
    assert "IMAD" in text and fact(text, "REGCOUNT") <= 64
    assert not fact(text, "MIN_STACK_SIZE"), "spills"
    assert compiled(toolkit, gpu_random.source())

"""Limits on the waits of the host for GPUs within a step: for the loss and before a message."""

import contextlib
from collections import Counter

import pytest
import torch

from mpigossip.cluster.world import SingleProcess
from mpigossip.training import assemble
from tests.double import active
from tests.double.devices import job, trained

if active():
    from tests.double.waits import counted

pytestmark = pytest.mark.skipif(not active(), reason="needs the double: python -m tests.double")


@contextlib.contextmanager
def trainer(devices, *settings):
    """Yield the trainer of two simulated nodes, after the steps that capture and allocate."""
    assembly = assemble.assemble(job("mlp", devices, *settings), SingleProcess(), 2)
    try:
        assembly.trainer.step()
        yield assembly.trainer
    finally:
        assembly.close()


@pytest.mark.parametrize(("devices", "slots"), [("cuda:0", 1), ("cuda:0,1", 2)])
@pytest.mark.parametrize("name", ["dsgd", "dsgt"])  # they send one and two vectors
def test_a_step_waits_for_the_loss_and_before_a_message(devices, slots, name):
    settings = [f"algorithm.name={name}", "node.cuda_graphs=never"]
    with trainer(devices, *settings) as made, counted() as waits:
        made.step()
    assert waits == Counter(work=slots, check_message=slots)  # `work` computes a gradient


@pytest.mark.parametrize("clip", [1e-4, 1e4])
def test_clipping_waits_once_for_each_device(clip, monkeypatch):
    settings = ["node.cuda_graphs=never", f"algorithm.clip_norm={clip}"]
    with trainer("cuda:0,1", *settings) as made, counted() as waits:
        made.step()
    assert waits == Counter(work=2, check_message=2, _sum_blocks=2)


def test_the_norm_of_many_blocks_waits_once():
    from mpigossip.engine.measurements import square_norms

    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, (1 << 24) + 5, generator=draw)
    on_gpu = x.to("cuda:0")
    with counted() as waits:
        norms = square_norms(on_gpu, on_gpu[0])
    assert waits == Counter(_sum_blocks=1) and norms[0] == 0
    blocks = (x[1] - x[0].double()).split(1 << 24)
    assert norms[1] == sum(float((block * block).sum()) for block in blocks)


def test_bf16_encodes_a_vector_by_two_operations(monkeypatch):
    from mpigossip.mixing.lossy_wires import bf16
    from mpigossip.mixing.wire import CHUNK
    from tests.double.checker import Timeline

    width = 3 * CHUNK + 512
    values = torch.randn(width, generator=torch.Generator().manual_seed(0))
    values[:4] = torch.tensor([float("inf"), -0.0, 1e-40, 3.4e38])
    expected, codes = values.clone(), torch.zeros(2 * width, dtype=torch.uint8)
    bf16().write(expected, (0, 0, 0), 0, codes)
    on_gpu, codes_on_gpu = values.to("cuda:0"), torch.zeros_like(codes).to("cuda:0")
    operations = []
    given = Timeline.given

    def noting(line, what, read, written):
        operations.append(what)
        given(line, what, read, written)

    monkeypatch.setattr(Timeline, "given", noting)
    bf16().write(on_gpu, (0, 0, 0), 0, codes_on_gpu)
    monkeypatch.undo()
    assert len(operations) == 2
    assert torch.equal(codes_on_gpu.cpu(), codes)
    assert torch.equal(on_gpu.cpu().view(torch.int32), expected.view(torch.int32))


def test_a_large_gradient_is_written_once_and_read_never(monkeypatch):
    """The second backward pass of a step adds to it."""
    from mpigossip.engine.vector import flatten
    from mpigossip.training.gradients import LARGE, FlatGradients
    from tests.double.checker import Timeline

    model = torch.nn.Linear(LARGE, 1, bias=False, device="cuda:0")
    layout = flatten(model)
    x, row = (torch.ones(layout.size, device="cuda:0") for _ in range(2))
    layout.attach(model, x, row)
    gradients = FlatGradients(model, layout, row)
    accesses = []
    given = Timeline.given

    def noting(line, what, read, written):
        if any(t.data_ptr() == row.data_ptr() for t in [*read, *written]):
            reads = any(t.data_ptr() == row.data_ptr() for t in read)
            accesses.append("read and write" if reads else "write")
        given(line, what, read, written)

    batch = torch.ones(1, LARGE, device="cuda:0")
    monkeypatch.setattr(Timeline, "given", noting)
    gradients.begin()
    model(batch).sum().backward()
    gradients.complete()
    first = len(accesses)
    model(batch).sum().backward()
    monkeypatch.undo()
    assert accesses[:first] == ["write"] and len(accesses) == 2
    assert row.cpu().eq(2).all()


@pytest.mark.parametrize("graphs", ["always", "never"])
def test_written_gradients_have_the_cpus_bits(graphs, monkeypatch):
    from mpigossip.training import gradients

    settings = ["algorithm.name=dmsgd", "algorithm.accumulate=2"]
    expected = trained(SingleProcess(), 2, "mlp", "cpu:2", settings)
    monkeypatch.setattr(gradients, "LARGE", 1)
    settings += [f"node.cuda_graphs={graphs}"]
    assert torch.equal(trained(SingleProcess(), 2, "mlp", "cuda:0,1", settings), expected)


def noted_operations(monkeypatch):
    """Return a list to which the double adds the name of each operation on a device."""
    from tests.double.checker import Timeline

    operations = []
    given = Timeline.given

    def noting(line, what, read, written):
        operations.append(what)
        given(line, what, read, written)

    monkeypatch.setattr(Timeline, "given", noting)
    return operations


def encoded_on_both(name, width, monkeypatch):
    """Encode a vector on the CPU and on a device; return operations and waits on the device.

    Values, codes and decoded values are compared.
    """
    from mpigossip.mixing.lossy_wires import wire
    from mpigossip.mixing.wire import WIRE_BUCKET

    one = wire(name, density=0.1, seed=4)
    key = (9, 3, 1)
    first = 5 * WIRE_BUCKET
    values = torch.randn(width, generator=torch.Generator().manual_seed(0))
    values[:WIRE_BUCKET] = 0
    expected, codes = values.clone(), torch.zeros(one.nbytes(width), dtype=torch.uint8)
    one.write(expected, key, first, codes)
    on_gpu, codes_on_gpu = values.to("cuda:0"), torch.zeros_like(codes).to("cuda:0")
    one.write(values.to("cuda:0"), key, first, codes_on_gpu)  # the kernel is compiled and tried
    with monkeypatch.context() as patch, counted() as waits:
        operations = noted_operations(patch)
        one.write(on_gpu, key, first, codes_on_gpu)
    assert torch.equal(on_gpu.cpu(), expected) and torch.equal(codes_on_gpu.cpu(), codes)
    part = slice(2 * WIRE_BUCKET, width - WIRE_BUCKET)
    decoded = torch.empty(part.stop - part.start, device="cuda:0")
    one.unpack(codes_on_gpu, width, part, decoded)
    assert torch.equal(decoded.cpu(), expected[part])
    return operations, waits


RANDOM = ["qsgd", "fp4", "random-k"]


@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.parametrize("cupy", [True, False])
def test_random_numbers_are_drawn_on_the_device(name, cupy, monkeypatch):
    """Nothing is copied from the host, and the host waits for nothing."""
    from mpigossip.mixing.kernels import gpu_random
    from mpigossip.mixing.wire import CHUNK, WIRE_BUCKET

    if not cupy:
        monkeypatch.setattr(gpu_random, "usable", lambda device: False)
    operations, waits = encoded_on_both(name, 2 * CHUNK + 3 * WIRE_BUCKET, monkeypatch)
    assert not waits
    assert operations.count("a kernel of random words") == (2 if cupy else 0)
    assert not any("_to_copy" in one and "cpu" in one for one in operations)


@pytest.mark.parametrize("name", ["qsgd", "fp4", "sign", "top-k", "top-k-int2", "random-k"])
def test_a_long_vector_is_encoded_by_few_operations(name, monkeypatch):
    from mpigossip.mixing import wire

    monkeypatch.setattr(wire, "CHUNK", 4096)
    one_chunk, _ = encoded_on_both(name, 4096, monkeypatch)
    several, _ = encoded_on_both(name, wire.CHUNKS_ON_GPU * 4096, monkeypatch)
    assert len(several) == len(one_chunk)

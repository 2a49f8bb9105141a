"""Tests that need a GPU: `bash tools/gpu_check.sh` runs them. They are skipped without one."""

import numpy as np
import pytest
import torch

from mpigossip import algorithms
from mpigossip.analysis import trials
from mpigossip.cluster.world import SingleProcess
from mpigossip.mixing.combine import weighted_sum
from mpigossip.mixing.kernels import gpu_sum
from mpigossip.training import assemble
from mpigossip.training.capture import Captured
from tests.cases import every, naming, on_each
from tests.double import active
from tests.double.devices import job, on_ranks, settings_of, trained
from tests.mixing.device.rounds import compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason=f"torch {torch.__version__} sees no GPU"
    ),
]
BAR = 1e-5
OTHERS = {"sparseloco": 0.01}
"""Share of entries that may be others: this method sends the largest ones, and a rounding of 1e-7
decides between some (on CPUs, too)."""


def needs_cupy():
    return pytest.importorskip("cupy", reason="CuPy isn't installed: pip install mpigossip[gpu]")


def difference(values, reference, others=0.0):
    """Return the relative difference, without a fraction of the entries that differ most."""
    distances = (values - reference).double().abs().flatten().sort()[0]
    kept = distances[: len(distances) - int(others * len(distances))]
    return float(kept.norm() / reference.double().norm())


def worst(ranks, n, model, slots, names, *more):
    """Return the largest relative difference between GPU and CPU, and its algorithm."""
    devices = "cuda:" + ",".join(["0"] * slots)
    got = ranks(n)(on_ranks, model, names, devices, more, timeout=240)
    differences = {}
    for index, name in enumerate(names):
        full = torch.from_numpy(np.concatenate([rank[index] for rank in got]))
        reference = trained(SingleProcess(), n, model, f"cpu:{slots}", settings_of(name))
        differences[name] = difference(full, reference)
    name = max(differences, key=differences.get)
    return differences[name], name


@pytest.mark.parametrize(
    ("slots", "memory"), [(1, "host"), (2, "auto"), every(1, "auto"), every(2, "host")]
)
def test_training_on_a_shared_gpu_is_the_cpus_within_rounding(ranks, slots, memory):
    names = ["dmsgd", "dsgt", "sgp", "parallel"]
    value, name = worst(ranks, 2, "lenet", slots, names, f"node.exchange={memory}")
    assert value <= BAR, name


# of the double's one arithmetic a third of them shows what there is to see
@on_each("name", sorted(algorithms.BUILDERS)[:: 3 if active() else 1])
def test_simulated_nodes_on_a_gpu_are_the_cpus_within_rounding(name):
    result = trained(SingleProcess(), 4, "mlp", "cuda:0", settings_of(name), 8)
    reference = trained(SingleProcess(), 4, "mlp", "cpu:1", settings_of(name), 8)
    assert difference(result, reference, OTHERS.get(name, 0.0)) <= BAR


@pytest.mark.parametrize("memory", ["auto", "host"])
@pytest.mark.parametrize("n", [2, 3])
def test_windows_of_gpu_memory_equal_the_simulator(ranks, n, memory):
    graphs = ["one-peer-exponential", "exponential", "star"]
    for differences, routes in ranks(n)(compare, graphs, memory, 12, "fp32", 4096, 0, "cuda:0"):
        assert not any(differences.values()), (differences, routes)


def test_lossy_wires_on_a_gpu(ranks):
    for wire in ("bf16", "top-k"):
        args = (["ring", "complete"], "auto", 8, wire, 4096, 0, "cuda:0")
        for differences, routes in ranks(3)(compare, *args):
            assert not any(differences.values()), (differences, routes)


@on_each("weights", [[0.5, 0.5], [1 / 3] * 3, [0.2, 0.5, 0.3], [0.125] * 8])
@on_each("width", [1, 512, 70_001])
def test_the_kernels_sum_has_the_cpus_bits(weights, width):
    needs_cupy()
    arrays = [torch.randn(2, width) for _ in weights]
    expected = weighted_sum(weights, arrays, torch.empty(2, width))
    there = [array.cuda() for array in arrays]
    out = torch.empty(2, width, device="cuda")
    assert gpu_sum.combine(weights, there, out)
    assert torch.equal(out.cpu(), expected)
    weighted_sum(weights, there, there[1])  # in place
    assert torch.equal(there[1].cpu(), expected)


@on_each("weights", [[0.5, 0.5], [0.2, 0.5, 0.3]])
def test_bf16_of_the_wire_is_summed_with_the_cpus_bits(weights):
    needs_cupy()
    values = [torch.randn(1, 70_001) * 10.0 ** torch.randint(-20, 20, (1, 70_001)) for _ in weights]
    values[1] = values[1].to(torch.bfloat16)
    out = torch.empty(1, 70_001, device="cuda")
    assert gpu_sum.combine(weights, [value.cuda() for value in values], out)
    expected = weighted_sum(weights, [value.float() for value in values], torch.empty(1, 70_001))
    assert torch.equal(out.cpu(), expected)


@on_each(
    ("model", "precision"),
    [("lenet", "fp32"), ("resnet20", "bf16"), ("lenet", "fp16")],
    few=[("lenet", "fp32")],
)
def test_captured_replicas_train_as_eager_ones(model, precision):
    def run(graphs):
        settings = [f"node.cuda_graphs={graphs}", f"node.precision={precision}"]
        assembly = assemble.assemble(job(model, "cuda:0,0", *settings), SingleProcess(), 2)
        losses = [float(assembly.trainer.step().loss.mean()) for _ in range(6)]
        captured = assembly.trainer.replicas._captured
        assembly.close()
        return losses, captured

    eager, none = run("never")
    replayed, captured = run("always")
    assert none is None and isinstance(captured, Captured)
    assert replayed == pytest.approx(eager, rel=1e-3 if precision == "fp32" else 2e-2)


class Waits(torch.nn.Module):
    """Model that reads its values on the host, which a CUDA graph can't repeat."""

    def __init__(self, shape, classes):
        super().__init__()
        self.last = torch.nn.Linear(int(np.prod(shape)), classes)

    def forward(self, x):
        y = self.last(x.flatten(1))
        return y * 2 if float(y.detach().sum()) > 0 else y


def test_a_model_that_waits_for_the_gpu_trains_eagerly():
    settings = ["model.name=tests.test_gpu:Waits"]
    assembly = assemble.assemble(job("mlp", "cuda:0", *settings), SingleProcess(), 1)
    with pytest.warns(UserWarning, match=naming("can't be captured")):
        assembly.trainer.step()
    for _ in range(4):  # on batches, too, whose copies were begun after the capture
        assert np.isfinite(float(assembly.trainer.step().loss))
    assembly.close()


def test_auto_precision_and_tf32():
    from mpigossip.training.precision import Precision, agreed

    supported = torch.cuda.is_bf16_supported(False)
    assert agreed("auto", SingleProcess(), ["cuda:0"]) == ("bf16" if supported else "fp32")
    Precision("fp32", ["cuda:0"], 1)
    assert torch.backends.cudnn.conv.fp32_precision == "ieee"


def test_gpus_average_by_nccl():
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip(f"NCCL joins two GPUs or more, torch sees {count}")
    devices = [f"cuda:{k}" for k in range(count)]
    elements = 1 << (16 if active() else 22)
    seconds = trials.averaged_in_node(devices, 60, elements=elements)
    assert [*seconds] == ["slots", "nccl"]

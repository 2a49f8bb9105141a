"""Training on the double: several devices a rank joined by NCCL, between ranks every route."""

import numpy as np
import pytest
import torch

from mpigossip.cluster.ranks import Alone
from tests.double import active
from tests.test_gpu import on_ranks, settings_of, trained

pytestmark = pytest.mark.skipif(not active(), reason="needs the double: tests/test_double.py")
METHODS = ["dmsgd", "dsgt", "sgp", "parallel", "diloco"]


def same(ranks, n, devices, slots, names, *more):
    """Whether the ranks' parameters have the bits of slots on the CPU."""
    settings = list(more)
    got = ranks(n)(on_ranks, "mlp", names, devices, settings, timeout=240)
    for index, name in enumerate(names):
        full = torch.from_numpy(np.concatenate([rank[index] for rank in got]))
        cpu = [s for s in settings if not s.startswith("node.gpu")]
        reference = trained(Alone(), n, "mlp", f"cpu:{slots}", [*settings_of(name), *cpu], 20)
        assert torch.equal(full, reference), (name, settings)


@pytest.mark.parametrize("window", ["auto", "host"])
@pytest.mark.parametrize("same_host", ["read", "put"])
def test_two_ranks_of_two_devices_have_the_cpus_bits(ranks, window, same_host):
    more = [f"node.gpu_window={window}", f"node.same_host={same_host}"]
    same(ranks, 2, "cuda:0,1", 2, METHODS, *more)


def test_a_rank_of_eight_devices_has_the_cpus_bits(ranks):
    same(ranks, 1, "cuda:0-7", 8, METHODS)


@pytest.mark.parametrize("wire", ["bf16", "top-k", "sign", "random-k", "qsgd"])
def test_every_wire_has_the_cpus_bits(ranks, wire):
    same(ranks, 2, "cuda:0,1", 2, ["choco"], f"node.wire={wire}")

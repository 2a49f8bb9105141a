"""Training on the double: several devices a rank joined by NCCL, between ranks every route."""

import os

import numpy as np
import pytest
import torch

from mpigossip.cluster.ranks import Alone
from tests.double import active
from tests.test_gpu import on_ranks, settings_of, trained

pytestmark = pytest.mark.skipif(not active(), reason="needs the double: tests/test_double.py")
METHODS = ["dmsgd", "dsgt", "sgp", "parallel", "diloco"]


def on_aware_ranks(comm, *arguments):
    """The same where MPI says that it takes GPU memory, as the CPU's does."""
    os.environ["MPICH_GPU_SUPPORT_ENABLED"] = "1"
    try:
        return on_ranks(comm, *arguments)
    finally:
        del os.environ["MPICH_GPU_SUPPORT_ENABLED"]


def same(ranks, n, devices, slots, names, *more):
    """Whether the ranks' parameters have the bits of slots on the CPU."""
    settings = list(more)
    train = on_aware_ranks if "node.gpu_window=device" in more else on_ranks
    got = ranks(n)(train, "mlp", names, devices, settings, timeout=240)
    for index, name in enumerate(names):
        full = torch.from_numpy(np.concatenate([rank[index] for rank in got]))
        cpu = [s for s in settings if not s.startswith("node.gpu")]
        reference = trained(Alone(), n, "mlp", f"cpu:{slots}", [*settings_of(name), *cpu], 20)
        assert torch.equal(full, reference), (name, settings)


WAYS = [("read", "auto"), ("read", "host"), ("put", "host"), ("put", "device")]


@pytest.mark.parametrize("same_host, window", WAYS)
def test_two_ranks_of_two_devices_have_the_cpus_bits(ranks, window, same_host):
    more = [f"node.gpu_window={window}", f"node.same_host={same_host}", "log.consensus_every=7"]
    same(ranks, 2, "cuda:0,1", 2, METHODS, *more)


def test_a_rank_of_eight_devices_has_the_cpus_bits(ranks):
    same(ranks, 1, "cuda:0-7", 8, METHODS)


@pytest.mark.parametrize("same_host, window", WAYS[:1] + WAYS[3:])
@pytest.mark.parametrize("wire", ["bf16", "top-k", "sign", "random-k", "qsgd"])
def test_every_wire_has_the_cpus_bits(ranks, wire, same_host, window):
    more = [f"node.gpu_window={window}", f"node.same_host={same_host}"]
    same(ranks, 2, "cuda:0,1", 2, ["choco"], f"node.wire={wire}", *more)

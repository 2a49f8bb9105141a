"""Whether MPI's word about GPUs is taken: versions, and a put in a process of its own."""

import os

import pytest
import torch

from mpigossip.mixing.device import trial
from tests.cases import on_each


def proven(comm, version, devices):
    from mpigossip.mixing.device import aware

    kept, aware.ucx_version = aware.ucx_version, lambda: version
    os.environ["MPICH_GPU_SUPPORT_ENABLED"] = "1"
    try:
        return aware.proven(comm, [torch.device("cpu", k) for k in range(devices)], timeout_s=20)
    finally:
        aware.ucx_version = kept
        del os.environ["MPICH_GPU_SUPPORT_ENABLED"]


@pytest.mark.parametrize(
    "version, devices, able, named",
    [
        ((1, 18, 1), 2, False, "over UCX 1.18.1, but that serves one GPU a process, here are 2"),
        ((1, 18, 1), 1, True, "over UCX 1.18.1, and puts into the memory of every slot arrived"),
        ((1, 19, 0), 2, True, "over UCX 1.19.0"),
        ((), 2, True, "says GPU-aware, and puts"),
    ],
)
def test_ucx_before_1_19_serves_one_gpu_a_process(ranks, version, devices, able, named):
    for found, why in ranks(2)(proven, version, devices):
        assert found == able and named in why, why


def test_a_process_of_its_own_is_no_rank_but_has_what_sets_mpi_up():
    launched = {"PMI_RANK": "1", "PMIX_ID": "2", "OMPI_COMM_WORLD_SIZE": "2", "SLURM_PROCID": "0",
                "OMPI_MCA_ess_base": "x", "PALS_RANKID": "0", "FLUX_TASK_RANK": "1"}  # fmt: skip
    kept = {"MPICH_GPU_SUPPORT_ENABLED": "1", "OMPI_MCA_pml": "ucx", "UCX_TLS": "all", "PATH": "/"}
    assert trial.environment(launched | kept) == kept


@on_each(
    "said, able, named",
    [
        ("begun\narrived\n", True, ""),
        ("begun\n", False, "in a process of its own it ended"),
        ("begun\nwrong: bytes\n", False, "in a process of its own bytes"),
        ("", True, "not tried in a process of its own: MPI in it ended"),
    ],
)
def test_only_what_begins_and_then_fails_speaks_against_it(said, able, named):
    found, why = trial._judged(said, "ended with SIGSEGV")
    assert found == able and why.startswith(named)

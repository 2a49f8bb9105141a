"""Whether MPI's word about GPUs is taken: versions, and a put in a process of its own."""

import os

import torch

from tests.cases import on_each


def proven(comm, version, devices):
    from mpigossip.mixing.device import proof

    kept, tried, proof.ucx_version = proof.ucx_version, proof.tried, lambda: version
    if devices > 1:  # in one case a process is started
        proof.tried = lambda *_: (True, "")
    os.environ["MPICH_GPU_SUPPORT_ENABLED"] = "1"
    try:
        return proof.proven(comm, [torch.device("cpu", k) for k in range(devices)], timeout_s=20)
    finally:
        proof.ucx_version, proof.tried = kept, tried
        del os.environ["MPICH_GPU_SUPPORT_ENABLED"]


@on_each(
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


def environment(comm, given):
    from mpigossip.mixing.device import proof

    return proof.environment(given)


def test_a_process_of_its_own_is_no_rank_but_has_what_sets_mpi_up(ranks):
    launched = {"PMI_RANK": "1", "PMIX_ID": "2", "OMPI_COMM_WORLD_SIZE": "2", "SLURM_PROCID": "0",
                "OMPI_MCA_ess_base": "x", "PALS_RANKID": "0", "FLUX_TASK_RANK": "1"}  # fmt: skip
    kept = {"MPICH_GPU_SUPPORT_ENABLED": "1", "OMPI_MCA_pml": "ucx", "UCX_TLS": "all", "PATH": "/"}
    assert ranks(1)(environment, launched | kept) == [kept]


def judged(comm, said):
    from mpigossip.mixing.device import proof

    return proof._judged(said, "ended with SIGSEGV")


@on_each(
    "said, able, named",
    [
        ("begun\narrived\n", True, ""),
        ("begun\n", False, "in a process of its own it ended"),
        ("begun\nwrong: bytes\n", False, "in a process of its own bytes"),
        ("", True, "not tried in a process of its own: MPI in it ended"),
    ],
)
def test_only_what_begins_and_then_fails_speaks_against_it(ranks, said, able, named):
    ((found, why),) = ranks(1)(judged, said)
    assert found == able and why.startswith(named)

"""The test of MPI with GPU memory: its own statement, versions, and a put in a subprocess."""

import os
import re

import pytest
import torch

from tests.cases import every, on_each
from tests.rankpool import Ranks


def proven(comm, version, devices):
    from mpigossip.mixing.device import proof

    ucx_version = proof.ucx_version
    tried = proof.try_in_subprocess
    proof.ucx_version = lambda: version
    if devices > 1:  # one case starts a real subprocess
        proof.try_in_subprocess = lambda *_: (True, "")
    os.environ["MPICH_GPU_SUPPORT_ENABLED"] = "1"
    try:
        return proof.gpu_mpi_works(
            comm, [torch.device("cpu", k) for k in range(devices)], timeout_s=20
        )
    finally:
        proof.ucx_version = ucx_version
        proof.try_in_subprocess = tried
        del os.environ["MPICH_GPU_SUPPORT_ENABLED"]


@on_each(
    "version, devices, able, named",
    [
        ((1, 18, 1), 2, False, "UCX 1.18.1, but it supports one GPU"),
        ((1, 18, 1), 1, True, "UCX 1.18.1, and puts"),
        ((1, 19, 0), 2, True, "over UCX 1.19.0"),
        ((), 2, True, "MPICH_GPU_SUPPORT_ENABLED, and puts"),
    ],
)
def test_ucx_before_1_19_supports_one_gpu_per_process(ranks, version, devices, able, named):
    for works, why in ranks(2)(proven, version, devices):
        assert works == able and named in why, why


def hung(comm, way):
    """Let a call hang on rank 1; return the messages of two tests, ranks and seconds."""
    import threading
    import time

    from mpigossip.mixing.device import proof

    slots = [torch.device("cpu")] * 2
    began = time.monotonic()
    originals = proof.put, proof.Proof._post
    if comm.rank == 1:
        proof.put = proof.Proof._post = lambda *_: threading.Event().wait()
    try:
        problem = proof.try_between_ranks(comm, slots, 1, way)
    finally:
        proof.put, proof.Proof._post = originals
    seconds = time.monotonic() - began
    return (
        problem,
        proof.try_between_ranks(comm, slots, 20, "messages"),
        comm.allgather(comm.rank),
        seconds,
    )


@pytest.mark.parametrize("way, what", [("windows", "a put"), every("messages", "a message")])
def test_a_call_that_hangs_is_reported_on_all_ranks(way, what):
    pools = Ranks()  # separate, because a thread of a rank never ends
    try:
        for problem, second, all_ranks, seconds in pools(3)(hung, way, timeout=60):
            # a put into a rank that hangs may hang, too
            assert re.search(rf"{what} .* on cpu \(rank [01]\) .*waited 7.5 s", problem)
            assert second == "" and all_ranks == [0, 1, 2] and seconds < 30
    finally:
        pools.close()


def answers(comm, what):
    """Run the test with rank 0 without GPU support, with another UCX, or a crashing subprocess."""
    from mpigossip.mixing.device import proof

    originals = (proof.reported_gpu_support, proof.try_in_subprocess, proof.ucx_version)
    other = comm.rank == 0
    proof.reported_gpu_support = lambda _: {"asking": not (other and what == "no")}
    proof.try_in_subprocess = lambda *_: (
        not (other and what == "crash"),
        "it crashed" if other else "",
    )
    proof.ucx_version = lambda: (1, 18, 0) if other and what == "old" else (1, 20, 0)
    try:
        return proof.gpu_mpi_works(comm, [torch.device("cpu", k) for k in range(2)], timeout_s=20)
    finally:
        proof.reported_gpu_support, proof.try_in_subprocess, proof.ucx_version = originals


@on_each(
    "what, named", [("no", "no support for GPU memory"), ("crash", "it crashed"), ("old", "not 2")]
)
def test_ranks_with_different_answers_agree(ranks, what, named):
    for able, why in ranks(2)(answers, what):
        assert not able and named in why


def environment(comm, given):
    from mpigossip.mixing.device import proof

    return proof.environment(given)


def test_a_subprocess_is_no_rank_but_keeps_settings_of_mpi(ranks):
    launched = {
        "PMI_RANK": "1",
        "PMIX_ID": "2",
        "OMPI_COMM_WORLD_SIZE": "2",
        "SLURM_PROCID": "0",
        "OMPI_MCA_ess_base": "x",
        "PALS_RANKID": "0",
        "FLUX_TASK_RANK": "1",
    }
    kept = {"MPICH_GPU_SUPPORT_ENABLED": "1", "OMPI_MCA_pml": "ucx", "UCX_TLS": "all", "PATH": "/"}
    assert ranks(1)(environment, launched | kept) == [kept]


def judged(comm, said):
    from mpigossip.mixing.device import proof

    return proof._judge(said, "ended with SIGSEGV")


@on_each(
    "said, able, named",
    [
        ("begun\narrived\n", True, ""),
        ("begun\n", False, "in a subprocess it ended"),
        ("begun\nwrong: bytes\n", False, "in a subprocess bytes"),
        ("", True, "not tested"),
    ],
)
def test_only_a_subprocess_that_begins_and_fails_is_a_failure(ranks, said, able, named):
    ((works, why),) = ranks(1)(judged, said)
    assert works == able and why.startswith(named)

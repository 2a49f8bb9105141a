"""Whether MPI's word about GPUs is taken: versions, and a put in a process of its own."""

import os
import re

import pytest
import torch

from tests.cases import every, on_each
from tests.rankpool import Ranks


def proven(comm, version, devices):
    from mpigossip.mixing.device import proof

    kept = proof.ucx_version
    tried = proof.try_in_subprocess
    proof.ucx_version = lambda: version
    if devices > 1:  # in one case a process is started
        proof.try_in_subprocess = lambda *_: (True, "")
    os.environ["MPICH_GPU_SUPPORT_ENABLED"] = "1"
    try:
        return proof.gpu_mpi_works(
            comm, [torch.device("cpu", k) for k in range(devices)], timeout_s=20
        )
    finally:
        proof.ucx_version = kept
        proof.try_in_subprocess = tried
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


def hung(comm, way):
    """What each rank is told where a call hangs on rank 1; if they can go on; seconds."""
    import threading
    import time

    from mpigossip.mixing.device import proof

    slots = [torch.device("cpu")] * 2
    began = time.monotonic()
    given = proof.put, proof.Proof._post
    if comm.rank == 1:
        proof.put = proof.Proof._post = lambda *_: threading.Event().wait()
    try:
        wrong = proof.try_between_ranks(comm, slots, 1, way)
    finally:
        proof.put, proof.Proof._post = given
    spent = time.monotonic() - began
    return (
        wrong,
        proof.try_between_ranks(comm, slots, 20, "messages"),
        comm.allgather(comm.rank),
        spent,
    )


@pytest.mark.parametrize("way, what", [("windows", "a put"), every("messages", "a message")])
def test_a_call_that_hangs_is_an_answer_of_all_ranks(way, what):
    pools = Ranks()  # of its own, as a thread of a rank never ends
    try:
        for wrong, then, everyone, spent in pools(3)(hung, way, timeout=60):
            # a put into a rank that hangs may hang, too
            assert re.fullmatch(
                rf"{what} of GPU memory on cpu \(rank [01]\) doesn't return \(waited 7.5 s\)", wrong
            )
            assert then == "" and everyone == [0, 1, 2] and spent < 30
    finally:
        pools.close()


def answers(comm, what):
    """The proof where rank 0's library says no, has another UCX, or its own process crashes."""
    from mpigossip.mixing.device import proof

    kept = (proof.reported_gpu_support, proof.try_in_subprocess, proof.ucx_version)
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
        proof.reported_gpu_support, proof.try_in_subprocess, proof.ucx_version = kept


@on_each(
    "what, named", [("no", "moves no GPU memory"), ("crash", "it crashed"), ("old", "here are 2")]
)
def test_ranks_with_different_answers_agree(ranks, what, named):
    for able, why in ranks(2)(answers, what):
        assert not able and named in why


def environment(comm, given):
    from mpigossip.mixing.device import proof

    return proof.environment(given)


def test_a_process_of_its_own_is_no_rank_but_has_what_sets_mpi_up(ranks):
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

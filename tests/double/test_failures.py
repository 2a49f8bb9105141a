"""Failures on demand: each is reported at once, and another route or the end of the job follows."""

import os
import re

import pytest
import torch

from tests.cases import every
from tests.double import active
from tests.double.failures import AWARE, failing
from tests.mixing.device.rounds import compare

pytestmark = pytest.mark.skipif(not active(), reason="needs the double: python -m tests.double")


def proven_on(comm, what, rank, devices):
    """Return verdict, reason and seconds of a proof in which these calls fail on one rank."""
    import time

    from mpigossip.mixing.device import proof

    began = time.perf_counter()
    given = proof.try_in_subprocess
    if what and "alone" not in what:  # the test does not reach other processes
        proof.try_in_subprocess = lambda *_: (True, "")
    try:
        with failing(what if comm.rank == rank else "", aware=True):
            slots = [torch.device(name) for name in devices]
            result = proof.gpu_mpi_works(comm, slots, "windows", 5 if "hanging" in what else 20)
    finally:
        proof.try_in_subprocess = given
    return *result, time.perf_counter() - began


def test_every_slots_device_is_proven(ranks):
    for able, why, _ in ranks(2)(proven_on, "", 0, ["cuda:0", "cuda:1"]):
        assert able and "every slot" in why


@pytest.mark.parametrize(
    "what, named",
    [
        every("put:2", ["a put of GPU memory failed on cuda:1 (rank 1)", "MPI_ERR_RMA_RANGE"]),
        ("lost put:2", ["cuda:1 (rank 1)"]),
        every("put alone", ["in a subprocess a put of GPU memory failed", "MPI_ERR_RMA_RANGE"]),
        every("hanging put alone", ["in a subprocess it didn't end within 10 s"]),
        ("crash alone:2", ["subprocess it ended with SIGSEGV"]),
        every("lost put alone", ["in a subprocess a put of GPU memory", "cuda:0: wrong data"]),
        ("flush", ["cuFlushGPUDirectRDMAWrites on cuda:0 failed with code 999"]),
        every("allocation:2", ["cudaMalloc of 2 MiB on cuda:1", "out of memory"]),
    ],
)
def test_what_fails_on_one_rank_is_refused_on_all_at_once(ranks, what, named):
    if what.startswith("lost put:"):  # the inbox of the left neighbour stays empty
        named = ["cuda:1 (rank 0)", "a put of GPU memory", "wrong data"]
    results = ranks(2)(proven_on, what, 1, ["cuda:0", "cuda:1"], timeout=150)
    for able, why, seconds in results:
        assert not able and all(text in why for text in named), why
        assert seconds < 100
    assert results[0][1] == results[1][1]


def windows(comm, what, rank, way, aware):
    from mpigossip.mixing.device import proof

    given = proof.try_in_subprocess
    if "alone" not in what:
        proof.try_in_subprocess = lambda *_: (True, "")
    try:
        with failing(what if rank in (comm.rank, None) else "", aware):
            return compare(comm, ["exponential"], way, 8, "fp32", 4096, 0, "cuda:0")
    finally:
        proof.try_in_subprocess = given


@pytest.mark.parametrize(
    "what, way, aware, named",
    [
        ("put", "auto", True, "MPI_ERR_RMA_RANGE"),
        every("allocation", "auto", True, "out of memory"),
        every("crash alone", "auto", True, "in a subprocess it ended with SIGSEGV"),
        every("window", "auto", True, "no windows: MPI_ERR_RMA_RANGE"),
        ("pin", "host", False, "cudaHostRegister"),
    ],
)
def test_an_exchange_goes_another_way_with_the_same_bits(ranks, what, way, aware, named):
    rank = None if what == "window" else 0  # one failure would block the others
    results = ranks(2)(windows, what, rank, way, aware, timeout=120)
    for differences, routes in results:
        assert differences and not any(differences.values()), (differences, routes)
        assert not any(route.startswith("windows") for route in routes.values()), routes
    assert named in str(results[0][1]), results[0][1]


def emptied(comm):
    """Return how often torch's cache is emptied while transports are timed and one is opened."""
    calls = []
    given = torch.cuda.empty_cache
    torch.cuda.empty_cache = lambda: calls.append(comm.rank)
    try:
        with failing("", aware=True):
            compare(comm, ["exponential"], "auto", 8, "fp32", 4096, 0, "cuda:0")
    finally:
        torch.cuda.empty_cache = given
    return len(calls)


def test_timed_transports_leave_no_memory_in_torchs_cache(ranks):
    """The memory of the messages would otherwise be missing when the fastest one is opened."""
    assert all(count >= 2 for count in ranks(2)(emptied, timeout=120))


def inbox_without_memory(comm):
    """Return the error if the inboxes of rank 1, which "host" allocates, do not fit."""
    from mpigossip.mixing.device import buffers
    from mpigossip.mixing.device.memory import TransportUnavailable

    def full(nbytes, device):
        raise TransportUnavailable(f"allocating {nbytes} bytes for messages on {device} failed")

    given = buffers.ordinary
    try:
        if comm.rank == 1:
            buffers.ordinary = full
        compare(comm, ["exponential"], "host", 8, "fp32", 4096, 0, "cuda:0")
    except TransportUnavailable as error:
        return str(error)
    finally:
        buffers.ordinary = given
    return ""


def test_inboxes_that_do_not_fit_on_one_rank_are_named_on_all(ranks):
    for text in ranks(2)(inbox_without_memory, timeout=60):
        assert "for messages on cuda:0 failed" in text


def timed(comm, what):
    """Return `windows`, and seconds, if calls fail on rank 0 while routes are proven and timed."""
    import time

    from mpigossip.mixing.transports import probe

    given = probe.LIMIT_S
    began = time.monotonic()
    probe.LIMIT_S = 10 if what == "hanging put" else 3
    try:
        return *windows(comm, what, 0, "auto", True), time.monotonic() - began
    finally:
        probe.LIMIT_S = given


@pytest.mark.parametrize(
    "what, named",
    [
        every("hanging put", ", but a put of GPU memory on cuda:0 (rank 0) doesn't return"),
        # the other ranks wait inside MPI_Win_create and are abandoned there
        ("proof window", "failed on cuda:0 (rank 0): MPI_ERR"),
        every("window", "no windows: MPI_ERR_RMA_RANGE"),
        ("exchange put:1", "round of windows failed: MPI_ERR_RMA_RANGE"),
        every("hanging exchange put:1", "no windows: a round of windows failed: "),
    ],
)
def test_a_probe_that_fails_or_hangs_on_one_of_three_ranks_leaves_the_next_way(ranks, what, named):
    from tests.rankpool import Ranks

    own = Ranks()  # threads that hang stay
    pools = own if "hanging" in what or "window" in what else ranks
    try:
        for differences, routes, seconds in pools(3)(timed, what, timeout=150):
            assert differences and not any(differences.values()), (differences, routes)
            for route in routes.values():
                assert route.startswith(("messages", "host")) and named in route, route
            assert seconds < 100
    finally:
        own.close()


def unflushed(comm, kind):
    """Return the error that ends a round from GPU to GPU if a flush fails."""
    from mpigossip.cluster.mpi_world import MPIWorld
    from mpigossip.graphs import graph
    from mpigossip.mixing.base import ExchangeKind, MessageLayout
    from mpigossip.mixing.device.memory import TransportUnavailable
    from mpigossip.mixing.synchronous import Synchronous

    world = MPIWorld(comm)
    layout = MessageLayout((512,), devices=("cuda:0",))
    with failing("", aware=True):
        ways = {"exchange": "windows", "timeout_s": 5}
        mixer = Synchronous(graph("ring", comm.size), layout, world, **ways)
    with failing("flush:1"), pytest.raises(TransportUnavailable) as refused:
        mixer.outbox(0)[0][0].fill_(1.0)
        mixer.start(ExchangeKind[kind], 0)
        mixer.finish()
    return str(refused.value)


@pytest.mark.parametrize("kind", ["GOSSIP", every("GLOBAL")])
def test_a_failed_flush_in_training_ends_the_round_with_an_error(kind):
    """A flush follows both puts (of a gossip round) and messages (of an average)."""
    from tests.rankpool import Ranks

    pools = Ranks()  # a separate pool: the mixer can't be closed
    try:
        results = pools(2)(unflushed, kind, timeout=60)
    finally:
        pools.close()
    failure = "cuFlushGPUDirectRDMAWrites on cuda:0 failed with code 999"
    assert results == 2 * [f'{failure}: set node.exchange = "host"']


def ended(comm, what, timeout_s):
    """Train on two GPUs with NCCL until an exception is raised; return it, and the seconds."""
    import time

    from mpigossip.cluster.world import SingleProcess
    from mpigossip.config.errors import Failure
    from mpigossip.groups.base import GroupError
    from mpigossip.training import assemble
    from tests.double.devices import job

    settings = [f"node.timeout_s={timeout_s}", "node.cuda_graphs=never"]
    began = time.perf_counter()
    assembly = None
    try:
        with failing(what):
            assembly = assemble.assemble(job("mlp", "cuda:0,1", *settings), SingleProcess(), 1)
            while time.perf_counter() - began < 40:
                assembly.trainer.step()
    except (GroupError, Failure) as error:
        return str(error), time.perf_counter() - began
    finally:
        _ = assembly and assembly.close()
    return "nothing", 40


@pytest.mark.parametrize(
    "what, named",
    [
        ("initRank:2", "process group inside"),
        ("async", "failed on cuda:0, cuda:1: NCCL error"),
        ("lost:3", "was lost during"),
        ("hang", "on cuda:0, cuda:1 after 2 s (node.timeout_s)"),
    ],
)
def test_nccl_that_fails_or_hangs_is_named_within_the_deadline(ranks, what, named):
    ((said, seconds),) = ranks(1)(ended, what, 2, timeout=60)
    assert named in said and "NCCL_DEBUG" in said, said
    assert seconds < 2 + 10


def blocking(comm):
    """Return the error of a job on two GPUs if every launch waits for its end."""
    from mpigossip.cluster.world import SingleProcess
    from mpigossip.config import JobError
    from tests.double.devices import trained

    os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    try:
        with pytest.raises(JobError) as said:
            trained(SingleProcess(), 1, "mlp", "cuda:0,1", [], 1)
    finally:
        del os.environ["CUDA_LAUNCH_BLOCKING"]
    return str(said.value)


def test_launch_blocking_is_refused_with_its_remedy(ranks):
    assert "unset CUDA_LAUNCH_BLOCKING" in ranks(1)(blocking)[0]


def graphs(comm, what):
    """Return the parameters after some steps on a GPU, and the warnings."""
    import warnings

    from mpigossip.cluster.world import SingleProcess
    from tests.double.devices import trained

    with failing(what), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        result = trained(SingleProcess(), 2, "mlp", "cuda:0,1", ["algorithm.name=dmsgd"], 4)
    return result.numpy(), [str(one.message) for one in seen]


@pytest.mark.parametrize("what", ["capture:1", "capture:2"])
def test_a_failed_capture_is_reported_and_training_is_identical(ranks, what):
    ((captured, quiet),) = ranks(1)(graphs, "")
    ((eager, said),) = ranks(1)(graphs, what)
    assert (captured == eager).all() and not any("captured" in text for text in quiet)
    assert any("CUDA graph: CUDA error" in text for text in said)


def train(mpirun, folder, fails, exchange="windows", steps=6, timeout_s=20, warm=True):
    import sys
    import time

    words = ["-m", "mpigossip", "train", "jobs/digits.toml", "model.name=mlp", "data.batch=4"]
    words += ["node.devices=cuda:0,1", f"node.timeout_s={timeout_s}", f"node.exchange={exchange}"]
    words += [f"run.steps={steps}", f"run.output={folder}", "run.epochs=1"]
    began = time.perf_counter()
    env = {"MPIGOSSIP_DOUBLE_FAILS": fails, AWARE: "1"}
    done = mpirun(2, [sys.executable, *words], timeout=120, env=env, warm=warm)
    return done, time.perf_counter() - began


@pytest.mark.every
def test_train_prints_the_route_and_the_reason(mpirun, tmp_path):
    good, _ = train(mpirun, tmp_path / "good", "")
    assert good.returncode == 0, good.stderr
    assert "from 1: put from GPU" in good.stdout
    staged, _ = train(mpirun, tmp_path / "staged", "put:2@1", "auto")
    assert staged.returncode == 0, staged.stderr
    message = "no windows: GPU support is reported by MPICH_GPU_SUPPORT_ENABLED"
    assert message in staged.stdout and "failed on cuda:1 (rank 1): MPI_ERR_RMA" in staged.stdout
    digests = [one.stdout.partition("digest")[2].split()[0] for one in (good, staged)]
    assert digests[0] == digests[1]


@pytest.mark.every  # a minute of waiting
def test_a_job_ends_though_a_rank_waits_in_a_call_of_the_proof(mpirun, tmp_path):
    """Rank 0 waits for rank 1 in MPI_Win_create until its process ends."""
    done, _ = train(mpirun, tmp_path, "proof window@1", "auto", warm=False)
    assert done.returncode == 0 and "digest" in done.stdout, done.stdout + done.stderr
    assert "failed on cuda:0 (rank 1): MPI_ERR" in done.stdout


def test_a_rank_that_is_killed_in_the_proof_is_named_with_the_remedy(mpirun, tmp_path):
    done, seconds = train(mpirun, tmp_path, "crash@1", "auto")
    assert done.returncode != 0 and seconds < 60
    assert "mpigossip: rank 1 ended" in done.stderr
    assert "node.exchange=host" in done.stderr


def test_a_failed_put_on_one_rank_ends_the_job_with_an_error(mpirun, tmp_path):
    done, seconds = train(mpirun, tmp_path, "exchange put:3@1")
    assert done.returncode != 0 and seconds < 60
    assert "rank 1" in done.stderr and "MPI_ERR_RMA_RANGE" in done.stderr
    assert "by windows of GPU memory" in done.stderr
    assert 'node.exchange = "host"' in done.stderr


def test_a_hanging_slot_is_named_and_ends_the_job(mpirun, tmp_path):
    done, seconds = train(mpirun, tmp_path, "still:9@1", "host", timeout_s=4, warm=False)
    assert done.returncode != 0 and seconds < 90
    late = r"is not done on cuda:(\d) \(slot \1 did not arrive\) after 4 s"
    late += r"|slot (\d) of this node, on cuda:\2, has not finished \(waited 3.2 s after the others"
    assert re.search(late, done.stderr), done.stderr


@pytest.mark.every
@pytest.mark.parametrize(
    "fails, limit_s, named",
    [
        ("put:3@1", 110, "MPI_ERR_RMA_RANGE"),
        ("hanging put alone", 90, "didn't end within 30 s"),
        ("", 90, "need CuPy"),
    ],
)
def test_doctor_measures_each_way_that_is_proven(mpirun, tmp_path, fails, limit_s, named):
    import sys

    words = ["-m", "mpigossip", "doctor", "--workers", "0", "--timeout", str(limit_s)]
    words += ["--megabytes", "1", "--sizes", "1MB", "--folder", str(tmp_path)]
    devices = 'exec "$@" --devices "cuda:$((2 * R)),$((2 * R + 1))"'
    own = ["sh", "-c", f"R=${{PMI_RANK:-$OMPI_COMM_WORLD_RANK}}; {devices}", "sh"]
    env = {AWARE: "1", "MPIGOSSIP_DOUBLE_FAILS": fails}
    env |= {} if fails else {"MPIGOSSIP_DOUBLE_NO_CUPY": "1"}
    done = mpirun(2, [*own, sys.executable, *words], timeout=240, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    for way in ("messages", "nccl", "host"):
        rates = rf"{way}: 1 MB x 2 [\d.]+ GB/s, 1 MB x 1 [\d.]+ GB/s"
        assert re.search(rates, done.stdout), done.stdout + done.stderr
    assert "windows: not proven" in done.stdout and named in done.stdout
    assert "main thread and another" in done.stdout

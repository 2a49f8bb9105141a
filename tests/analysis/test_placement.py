"""What nodes of several ranks need of a host: on ranks here, and on machines that aren't here."""

import json
import re
from dataclasses import replace

import pytest

from mpigossip.analysis import placement
from mpigossip.analysis.placement import Place, judged
from mpigossip.commands import machine as command
from tests.cases import every, on_each

DOCTOR = ["doctor", "--devices", "cpu:1", "--workers", "0", "--megabytes", "1", "--sizes", "1MB"]


@pytest.mark.parametrize(
    ("per", "says"), [("2", "2 nodes: 2 ranks each"), every("host", "1 node: 4 ranks each")]
)
def test_the_doctor_makes_the_nodes_that_a_job_would(pooled, per, says):
    """In a folder that isn't there, which is wrong on all ranks and said once."""
    done = pooled(4, *DOCTOR, "--ranks-per-node", per, "--folder", "none", timeout=120)
    assert done.returncode == 1, done.stdout + done.stderr
    wrong = re.findall(r"wrong: (\w+)", done.stdout)
    assert "WRONG  disk" in done.stdout and {*wrong} == {"disk", "hdf5"}
    assert wrong.count("disk") == 1
    assert "No such file" in done.stdout and "run.output" in done.stdout
    assert says in done.stdout and "shares memory between 4 ranks" in done.stdout
    assert "none on these hosts" in done.stdout


@pytest.mark.every
def test_ranks_that_make_no_nodes_are_wrong_and_the_rest_is_looked_at(pooled):
    done = pooled(4, *DOCTOR, "--ranks-per-node", "3", "--json", timeout=120)
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert [one["name"] for one in found["findings"] if one["level"] == "wrong"] == ["nodes"]
    assert "start 3 or 6 there" in done.stdout and "routes" in done.stdout


@on_each("text", ["0", "-1", "two", ""])
def test_a_number_of_ranks_is_one_or_more(text):
    with pytest.raises(ValueError):
        command._ranks(text)


def host(name="a", ranks=4, gpus=4):
    """A host as it should be: each rank sees all GPUs and has one, near its cores."""

    def place(k):
        cores = (2 * k, 2 * k + 1)
        memory = (k // 2,)
        return Place(name, (f"GPU-{name}{k}",), gpus, gpus, "", cores, memory, memory, ranks)

    return [place(k) for k in range(ranks)]


def named(places, name, per_node=4):
    (found,) = [one for one in judged(places, per_node) if one.name == name]
    return found


def test_hosts_as_they_should_be_are_good():
    found = judged(host("a") + host("b"), 4)
    assert {one.level for one in found} == {"good"}
    assert named(host(), "gpus").text == "a: 4 ranks on 4 of 4 GPUs"
    assert named(host(), "numa").text == "cores on 2 memory nodes"
    alone = [replace(place, sharing=1) for place in host()]
    assert named(alone, "shared", per_node=1).level == "good"  # each rank is a node


@on_each(
    ("changed", "name", "level", "words"),
    [
        (
            lambda p, k: replace(p, sharing=1),
            "shared",
            "wrong",
            "4 ranks on a, of which rank 0 shares memory with 1 only",
        ),
        (
            lambda p, k: replace(p, visible=1, hidden="CUDA_VISIBLE_DEVICES = 0"),
            "gpus",
            "note",
            "rank 0 on a sees 1 of 4 GPUs (CUDA_VISIBLE_DEVICES = 0): MPI and NCCL may not",
        ),
        (
            lambda p, k: replace(p, mine=(f"GPU-{k % 2}",)),
            "gpus",
            "wrong",
            "4 ranks on a share 2 GPUs, which NCCL can't join: start a rank for each",
        ),
        (lambda p, k: replace(p, there=8, visible=8), "gpus", "note", "GPUs of a are idle"),
        (
            lambda p, k: replace(p, near=(3,)) if k == 2 else p,
            "numa",
            "note",
            "rank 2 on a has its cores on memory node 1 and its GPU on 3 (1 rank so)",
        ),
    ],
)
def test_what_a_host_lacks_is_named_with_its_remedy(changed, name, level, words):
    places = [changed(place, k) for k, place in enumerate(host())]
    found = named(places, name)
    assert (found.level, words in found.remedy) == (level, True), found
    others = [one.level for one in judged(places, 4) if one.name != name]
    assert others == ["good", "good"]


def test_a_torch_that_does_not_tell_gpus_apart_accuses_nobody():
    assert named([replace(place, mine=("",)) for place in host()], "gpus").level == "good"


@on_each(
    ("visible", "shown", "says"),
    [
        (4, {}, ""),
        (4, {"CUDA_VISIBLE_DEVICES": "3,2,1,0"}, ""),
        (1, {"CUDA_VISIBLE_DEVICES": "2"}, "CUDA_VISIBLE_DEVICES = 2"),
        (1, {}, "a cgroup of its task"),
    ],
)
def test_what_hides_gpus_is_told_apart(visible, shown, says):
    assert placement._hidden(visible, 4, shown) == says


def test_memory_nodes_are_read_from_the_system(tmp_path):
    for core, node in ((0, 0), (1, 0), (2, 1)):
        (tmp_path / f"sys/devices/system/cpu/cpu{core}/node{node}").mkdir(parents=True)
    assert placement.memory_of([0, 1], tmp_path) == (0,)
    assert placement.memory_of([1, 2], tmp_path) == (0, 1)
    assert placement.memory_of([7], tmp_path) == ()
    for bus, node in (("0000:17:00.0", "1"), ("0000:18:00.0", "-1")):
        (tmp_path / f"sys/bus/pci/devices/{bus}").mkdir(parents=True)
        (tmp_path / f"sys/bus/pci/devices/{bus}/numa_node").write_text(f"{node}\n")
    assert placement.nodes_of(["0000:17:00.0", "0000:18:00.0", "0000:19:00.0"], tmp_path) == (1,)

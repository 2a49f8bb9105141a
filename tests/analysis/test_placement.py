"""Requirements of nodes of several ranks, tested on ranks and for descriptions of other hosts."""

import argparse
import json
import re
from dataclasses import replace

import pytest

from mpigossip.analysis import placement
from mpigossip.analysis.placement import HostReport, judged
from mpigossip.commands import machine as command
from tests.cases import every, naming, on_each

DOCTOR = ["doctor", "--devices", "cpu:1", "--workers", "0", "--megabytes", "1", "--sizes", "1MB"]


@pytest.mark.parametrize(
    ("per", "says"), [("2", "2 nodes: 2 ranks each"), every("host", "1 node: 4 ranks each")]
)
def test_the_doctor_groups_ranks_into_nodes_as_a_job_does(pooled, per, says):
    """The folder does not exist, which is wrong on all ranks and reported once."""
    done = pooled(4, *DOCTOR, "--ranks-per-node", per, "--folder", "none", timeout=120)
    assert done.returncode == 1, done.stdout + done.stderr
    problems = re.findall(r"wrong: (\w+)", done.stdout)
    assert "WRONG  disk" in done.stdout and {*problems} == {"disk", "hdf5"}
    assert problems.count("disk") == 1
    assert "No such file" in done.stdout and "run.output" in done.stdout
    assert says in done.stdout and "at most 4 ranks" in done.stdout
    assert "none on these hosts" in done.stdout


@pytest.mark.every
def test_ranks_that_form_no_nodes_are_wrong_and_the_rest_is_tested(pooled):
    done = pooled(4, *DOCTOR, "--ranks-per-node", "3", "--json", timeout=120)
    assert done.returncode == 1, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert [f["name"] for f in result["findings"] if f["level"] == "wrong"] == ["nodes"]
    assert "start 3 or 6 there" in done.stdout and "routes" in done.stdout


@on_each("text", ["0", "-1", "two", ""])
def test_a_number_of_ranks_is_at_least_one(text):
    with pytest.raises(argparse.ArgumentTypeError, match=naming("whole number", "1")):
        command._ranks(text)


def host(name="a", ranks=4, gpus=4):
    """Return reports of a good host: each rank sees all GPUs and has one, near its cores."""

    def report(k):
        cores = (2 * k, 2 * k + 1)
        memory = (k // 2,)
        return HostReport(name, (f"GPU-{name}{k}",), gpus, gpus, "", cores, memory, memory, ranks)

    return [report(k) for k in range(ranks)]


def named(reports, name, per_node=4):
    (finding,) = [f for f in judged(reports, per_node) if f.name == name]
    return finding


def test_good_hosts_are_good():
    result = judged(host("a") + host("b"), 4)
    assert {finding.level for finding in result} == {"good"}
    assert named(host(), "gpus").text == "a: 4 ranks on 4 of 4 GPUs"
    assert named(host(), "numa").text == "cores on 2 memory nodes"
    separate = [replace(report, sharing=1) for report in host()]
    assert named(separate, "shared", per_node=1).level == "good"  # each rank is a node


@on_each(
    ("changed", "name", "level", "words"),
    [
        (
            lambda p, k: replace(p, sharing=1),
            "shared",
            "wrong",
            "rank 0 shares memory with 1",
        ),
        (
            lambda p, k: replace(p, visible=1, hidden="CUDA_VISIBLE_DEVICES = 0"),
            "gpus",
            "note",
            "1 of 4 GPUs (CUDA_VISIBLE_DEVICES = 0)",
        ),
        (
            lambda p, k: replace(p, own_gpus=(f"GPU-{k % 2}",)),
            "gpus",
            "wrong",
            "4 ranks on a share 2 GPUs",
        ),
        (lambda p, k: replace(p, gpu_count=8, visible=8), "gpus", "note", "GPUs of a are idle"),
        (
            lambda p, k: replace(p, near=(3,)) if k == 2 else p,
            "numa",
            "note",
            "memory node 1, its GPU on 3",
        ),
    ],
)
def test_a_problem_of_a_host_is_reported_with_its_remedy(changed, name, level, words):
    reports = [changed(report, k) for k, report in enumerate(host())]
    result = named(reports, name)
    assert (result.level, words in result.remedy) == (level, True), result
    others = [f.level for f in judged(reports, 4) if f.name != name]
    assert others == ["good", "good"]


def test_without_identifiers_of_gpus_there_is_no_problem():
    assert named([replace(report, own_gpus=("",)) for report in host()], "gpus").level == "good"


@on_each(
    ("visible", "shown", "says"),
    [
        (4, {}, ""),
        (4, {"CUDA_VISIBLE_DEVICES": "3,2,1,0"}, ""),
        (1, {"CUDA_VISIBLE_DEVICES": "2"}, "CUDA_VISIBLE_DEVICES = 2"),
        (1, {}, "a cgroup of its task"),
    ],
)
def test_the_reason_for_hidden_gpus_is_named(visible, shown, says):
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

"""Ranks on hosts of their own (tools/labs/net.sh): windows over TCP, the simulator's bits.

Skipped unless MPIGOSSIP_NET_LAB=1 allows to start it (root, iproute2).
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import launch

REPO = Path(__file__).parents[2]
LAB = str(REPO / "tools" / "labs" / "net.sh")
pytestmark = pytest.mark.launcher
TRAIN = ["jobs/digits.toml", "run.steps=8", "run.evaluate_every=0", "data.workers=0"]


def run(*words, check=True):
    """Run a command and return its output."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=REPO,
        timeout=120,
        text=True,
        env=launch.environment("net-lab"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0 or not check, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def lab(request):
    """Return a function that runs a command on three hosts; a test may set the links' latency."""
    launch.launcher()
    if os.environ.get("MPIGOSSIP_NET_LAB") != "1":
        pytest.skip("MPIGOSSIP_NET_LAB=1 lets the lab of network namespaces start")
    if os.getuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("the lab of network namespaces needs root, ip and tc (Debian: iproute2)")
    done = run(LAB, "up", 3, "1gbit", getattr(request, "param", "0"), check=False)
    if "up: 3 hosts" not in done:
        if "is up already" not in done:
            run(LAB, "down")  # what was made of it
        pytest.skip(f"the lab of network namespaces can't start: {done.strip()}")
    yield lambda *words: run(LAB, "run", 3, sys.executable, "-m", "mpigossip", *words)
    run(LAB, "down")


@pytest.mark.parametrize(
    "settings",
    [
        ["model.name=lenet"],  # a message that the communication thread sends
        ["model.name=mlp", "model.hidden=[8]", "graph.name=exponential"],  # a short one
        ["model.name=mlp", "model.hidden=[2000,2000]", "algorithm.name=dsgd"],  # in pieces
    ],
)
def test_training_between_hosts_has_the_bits_of_the_simulator(lab, settings, tmp_path):
    digests = []
    for start, place in ((lab, "real"), (run, "simulated")):
        words = [*TRAIN, *settings, f"run.output={tmp_path / place}"]
        if start is run:
            words = [sys.executable, "-m", "mpigossip", "simulate", *words, "--nodes", 3]
        else:
            words = ["train", *words]
        digests += re.findall(r"digest +([0-9a-f]{64})", start(*words))
    assert len(digests) == 2 and digests[0] == digests[1]


def test_the_bench_measures_a_network(lab):
    shown = lab("bench", "exchange", "--sizes", "1MB", "--seconds", "0.2")
    assert "3 ranks on 3 hosts" in shown


@pytest.mark.parametrize("lab", ["20"], indirect=True)
def test_links_with_latency(lab):
    """A round trip takes at least twice the latency of a link, and windows work."""
    asked = (
        "import socket, time; began = time.perf_counter(); "
        "socket.socket().connect_ex(('10.77.0.2', 9)); print(time.perf_counter() - began)"
    )
    assert float(run(LAB, "on", "h1", sys.executable, "-c", asked)) >= 0.04
    assert "3 ranks on 3 hosts" in lab("bench", "exchange", "--sizes", "100KB", "--seconds", "0.2")


ERROR = """
import torch, mpigossip

with mpigossip.world() as world:
    model = torch.nn.Linear(2000, 2000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = mpigossip.Gossip(world, model, optimizer, algorithm="dsgd")
    model(torch.ones(1, 2000)).mean().backward()
    optimizer.step()
    raise ValueError("3 is not enough")
"""


def test_an_error_of_all_ranks_is_the_last_output_between_hosts(lab, tmp_path):
    """MPICH's MPI_Finalize failed while a window was open, and changed the exit code to 15."""
    program = tmp_path / "program.py"
    program.write_text(ERROR)
    done = subprocess.run(
        [LAB, "run", "3", sys.executable, str(program)],
        cwd=REPO,
        timeout=120,
        text=True,
        env=launch.environment("net-lab"),
        capture_output=True,
    )
    assert done.returncode == 1, done.stderr
    assert "MPI_Finalize" not in done.stderr
    assert done.stderr.partition("-" * 74)[0].rstrip().endswith("ValueError: 3 is not enough")

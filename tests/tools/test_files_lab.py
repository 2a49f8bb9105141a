"""Members on a network file system that fails for a while (tools/labs/files.sh).

Skipped unless MPIGOSSIP_FILES_LAB names a file system ("moosefs", "sshfs", "glusterfs") to start.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests import launch

REPO = Path(__file__).parents[2]
LAB = str(REPO / "tools" / "labs" / "files.sh")
FOLDER = Path(os.environ.get("MPIGOSSIP_FILES_LAB_DIR", "/tmp/mpigossip-files-lab"))
KIND = os.environ.get("MPIGOSSIP_FILES_LAB", "")
pytestmark = pytest.mark.launcher
LEASE_S = 5.0
AWAY_S = [int(s) for s in os.environ.get("MPIGOSSIP_FILES_LAB_AWAY", "1 5").split()]
"""Seconds for which the server is away; "1 5 20" before a release."""
JOB = [
    *("digits", "algorithm.style=atc", "algorithm.name=dsgd", "cadence.name=every"),
    *("cadence.period=4", "run.epochs=6", "data.batch=16", "model.name=mlp", "model.hidden=[8]"),
]
# `mpigossip` with a shorter lease than the setting allows, and with slow steps.
COMMAND = f"""
import sys, time
from mpigossip import cli
from mpigossip.runs.members import join as joining

join = joining.join
slowly = {{"lease_s": {LEASE_S}, "poll_s": 0.2, "stop": lambda: bool(time.sleep(0.015))}}
joining.join = lambda *given, **named: join(*given, **(named | slowly))
sys.exit(cli.main(sys.argv[1:]))
"""


def run(*words, timeout=120):
    """Return the exit code and the output of a command."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=REPO,
        timeout=timeout,
        text=True,
        env=launch.environment("files-lab"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return done.returncode, done.stdout


def python(client, *words):
    """Return the command that runs Python on a client."""
    return [LAB, "on", client, sys.executable, *words]


@pytest.fixture(scope="module")
def mounts():
    """Start the file system; return the paths at which its three clients have mounted it."""
    if not KIND:
        pytest.skip("MPIGOSSIP_FILES_LAB=moosefs lets the lab of file systems start")
    code, output = run(LAB, "up", KIND)
    if code:
        if "is up already" not in output:
            run(LAB, "down")  # what was made of it
        pytest.skip(f"the lab of file systems can't start: {output.strip()[-400:]}")
    yield [FOLDER / client for client in ("c1", "c2", "c3")]
    run(LAB, "down")


def test_links_are_atomic(mounts):
    script = str(REPO / "tools/labs/link_races.py")
    commands = [[*python(m.name, script), str(m / "races")] for m in mounts[:2]]
    for _ in range(3):  # until no process is always first
        started = [subprocess.Popen(c, stdout=subprocess.PIPE, text=True) for c in commands]
        output = [process.communicate(timeout=150)[0] for process in started]
        if [process.returncode for process in started] != [2, 2]:
            break
        commands = [[*command[:-1], command[-1] + "-"] for command in commands]
    assert [process.returncode for process in started] == [0, 0], output


def test_storms_train_each_chunk_once(mounts):
    code, output = run(
        *(sys.executable, "tools/labs/storms.py", "--runs", 1, "--chunks", 60, "--lease", 0.5),
        *("--mounts", *mounts),
        timeout=200,
    )
    assert code == 0, output


class Job:
    """Member on a client, which is started again when its exit code is 75 or it was killed."""

    def __init__(self, client, folder):
        self.command = [*python(client, "-c", COMMAND), "join", str(folder), *JOB]
        self.codes = []
        self.output = ""
        self.thread = threading.Thread(target=self._work)
        self.thread.start()

    def _work(self):
        while not self.codes or self.codes[-1] in (75, -signal.SIGKILL):
            self.process = subprocess.Popen(
                self.command,
                env=launch.environment("files-lab"),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            self.output += self.process.communicate()[0]
            self.codes.append(self.process.returncode)


@contextlib.contextmanager
def without_network(host):
    assert run(LAB, "cut", host) == (0, "")
    try:
        yield
    finally:
        assert run(LAB, "back", host) == (0, "")


def rounds(folder):
    """Return the number of records in a folder."""
    return sum(1 for _ in folder.glob("chain/*/*"))


def wait_for_rounds(folder, count, jobs):
    """Wait until a number of records has been published; return it."""
    until = time.monotonic() + 120
    while (published := rounds(folder)) < count:
        assert time.monotonic() < until, [published, *(job.output[-2000:] for job in jobs)]
        assert all(job.thread.is_alive() for job in jobs), [job.output[-2000:] for job in jobs]
        time.sleep(0.2)
    return published


def test_jobs_survive_a_server_and_a_client_that_are_away(mounts):
    """A kill, a server that is away, and a client that is cut off for three leases."""
    first, second, third = (mount / "run" for mount in mounts)
    jobs = [Job("c1", first)]
    seen = wait_for_rounds(third, 3, jobs)
    jobs.append(Job("c2", second))
    seen = wait_for_rounds(third, seen + 20, jobs)
    jobs[1].process.kill()
    seen = wait_for_rounds(third, seen + 20, jobs)
    for seconds in AWAY_S:
        with without_network("server"):
            time.sleep(seconds)
        seen = wait_for_rounds(third, seen + 5, jobs)
    with without_network("c2"):
        time.sleep(3 * LEASE_S)
    for job in jobs:
        job.thread.join(150)
        assert not job.thread.is_alive(), job.output[-2000:]
        assert "Traceback" not in job.output, job.output[-3000:]
        assert job.codes[-1] == 0, job.output[-3000:]
    code, output = run(*python("c3", "-m", "mpigossip", "replay"), third)
    assert code == 0, output
    assert "every digest is equal" in output

"""The native library is compiled once, however many processes start at the same time."""

import shlex
import subprocess
import sys
import time

import pytest

from mpigossip.mixing.kernels import build_lock, native

PROGRAM = """
import os, pathlib, sys
import mpigossip.mixing.kernels.build_lock as build_lock
build_lock.LEASE_S, build_lock.TOUCH_S = 2.0, 0.1
from mpigossip.mixing.kernels import native
acquire = build_lock.BuildLock.acquire
def observed(self):
    holds = acquire(self)
    if not holds and self._tokens - {''}:
        pathlib.Path(sys.argv[1], f"waits.{os.getpid()}").touch()
    return holds
build_lock.BuildLock.acquire = observed
print("ready", flush=True)
sys.stdin.readline()
try:
    native._load()
    print("loaded", flush=True)
except native.NoKernel as error:
    print(error, flush=True)
"""


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Return `compiler(waiting, …)`: set a compiler that ends when ``waiting`` processes wait.

    It adds a line to the file "calls", and runs a line of shell before it compiles.
    """
    real = native._compiler()
    script = tmp_path / "cc"
    monkeypatch.setenv("CC", shlex.quote(str(script)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def write(waiting, line=":"):
        script.write_text(
            f"""#!/bin/sh
            cd {tmp_path}
            echo call >> calls
            for look in $(seq 400); do
                if [ $(ls | grep -c "^waits") -ge {waiting} ]; then break; fi
                sleep 0.05
            done
            {line}
            exec {real} "$@"
            """
        )
        script.chmod(0o755)

    return write


def calls(tmp_path):
    return len((tmp_path / "calls").read_text().split())


@pytest.fixture
def together(warm, tmp_path):
    """Return `together(n)`: let n new processes load the library at once; return their output."""
    started = []

    def run(n):
        for _ in range(n):
            process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(tmp_path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            started.append(process)
        for process in started[-n:]:
            assert process.stdout.readline() == "ready\n"
        for process in started[-n:]:
            process.stdin.write("\n")
            process.stdin.flush()
        return [process.communicate(timeout=60)[0].strip() for process in started[-n:]]

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()


def test_one_of_several_processes_compiles(compiler, together, tmp_path):
    compiler(waiting=5)
    assert together(6) == ["loaded"] * 6
    assert calls(tmp_path) == 1
    assert [file.suffix for file in (tmp_path / "cache" / "mpigossip").iterdir()] == [".so"]


def test_a_killed_process_is_replaced_by_a_waiting_one(compiler, together, tmp_path):
    """The first call of the compiler kills the process that holds the lock."""
    compiler(waiting=3, line="if mkdir killed 2>&-; then kill -9 $PPID; exit 1; fi")
    outputs = together(4)
    assert sorted(outputs) == ["", "loaded", "loaded", "loaded"]
    assert calls(tmp_path) == 2


def test_waiting_processes_do_not_repeat_a_failure(compiler, together, tmp_path):
    compiler(waiting=3, line="echo no licence >&2; exit 1")
    outputs = together(4)
    assert all("no licence" in line for line in outputs), outputs
    assert calls(tmp_path) == 1
    # a process that starts later tries again
    assert "no licence" in native.status() and calls(tmp_path) == 2
    compiler(waiting=3)
    assert together(2) == ["loaded"] * 2
    assert [file.suffix for file in (tmp_path / "cache" / "mpigossip").iterdir()] == [".so"]


def test_a_lock_that_is_touched_stays_valid_and_waits_for_it_end(compiler, tmp_path, monkeypatch):
    monkeypatch.setattr(build_lock, "LEASE_S", 0.2)
    monkeypatch.setattr(native, "WAIT_S", 0.5)
    compiler(waiting=0)
    path = native._library_path()
    path.parent.mkdir(parents=True, mode=0o700)
    lock = build_lock.BuildLock(path)
    assert lock.acquire() and not build_lock.BuildLock(path).acquire()
    sleep = time.sleep

    def touching(seconds):
        lock.touch()
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", touching)
    assert f"{path.name}.lock" in native.status()
    monkeypatch.undo()
    lock.release()
    assert not list(path.parent.iterdir())


def test_waiting_processes_check_less_and_less_often(compiler, tmp_path, monkeypatch):
    """Each check lists a folder that thousands of ranks may share."""
    monkeypatch.setattr(build_lock, "LEASE_S", 1000.0)
    compiler(waiting=0)
    path = native._library_path()
    path.parent.mkdir(parents=True, mode=0o700)
    lock = build_lock.BuildLock(path)
    assert lock.acquire()
    now = 0.0
    pauses = []

    def sleep(seconds):
        nonlocal now
        pauses.append(seconds)
        now += seconds

    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(time, "sleep", sleep)
    status = native.status()
    monkeypatch.undo()
    lock.release()
    assert f"{path.name}.lock" in status
    assert now == pytest.approx(native.WAIT_S)
    assert pauses[0] <= 0.05 and 1.0 <= max(pauses) <= 2.0
    assert len(pauses) <= 2 * native.WAIT_S
    assert sum(pauses[:5]) < 1.0  # a library that is built soon is found soon

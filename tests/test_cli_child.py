"""Commands that read files of other users: a crash of the HDF5 library becomes a message."""

import signal
import subprocess
import sys
from pathlib import Path

from tests import launch
from tests.cases import on_each

DIES = """
import os, sys, time
from mpigossip import cli
cli._run = lambda _: {}
sys.argv = ["mpigossip", "log", "show", "x"]
sys.exit(cli.main())
"""


def ended(does: str) -> subprocess.CompletedProcess:
    words = [sys.executable, "-c", DIES.format(does)]
    return subprocess.run(words, capture_output=True, text=True, timeout=60)


@on_each("number", [signal.SIGSEGV, signal.SIGFPE])
def test_a_crash_is_reported_in_one_line(number):
    left = ended(f"os.kill(os.getpid(), {int(number)})")
    assert left.returncode == 1 and "Traceback" not in left.stderr
    assert f"`log show x` crashed ({number.name})" in left.stderr


def test_exit_codes_and_other_signals_are_passed_on():
    assert ended("75").returncode == 75
    assert ended("os.kill(os.getpid(), 15)").returncode == -15
    killed = ended("os.kill(os.getpid(), 9)")
    assert killed.returncode == -9 and killed.stderr.endswith("memory ran out\n")


def test_signals_reach_the_command_and_its_end_ends_both():
    does = "print(os.getpid(), flush=True) or time.sleep(30)"
    for number, code in ((signal.SIGTERM, -15), (signal.SIGKILL, -9)):
        words = [sys.executable, "-c", DIES.format(does)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            inner = int(process.stdout.readline())
            assert inner != process.pid
            process.send_signal(number)
            assert process.wait(20) == code
        there = Path(f"/proc/{inner}/cwd")
        launch.until(lambda there=there: not there.exists(), 10, "the command's end")

"""tools/gpu_check.sh without a GPU: its message, exit code 3, and its table of results."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import launch
from tests.cases import naming

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def check(*args, **env):
    return subprocess.run(
        ["bash", str(TOOLS / "gpu_check.sh"), *args],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHON": sys.executable} | env,
    )


def test_without_a_gpu_it_says_so_and_ends_with_3(warm):
    done = check(CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")
    assert done.returncode == 3, done.stdout + done.stderr
    assert "no GPU was found" in done.stdout and "nothing was tested" in done.stdout
    assert "|" not in done.stdout, "no table without figures"


@pytest.mark.every
def test_a_row_is_rehearsed_on_the_double_and_stands_in_a_file(tmp_path):
    done = check("--double", "--only", "denormal", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "out/GPU_RESULTS.json").read_text())
    (row,) = result["rows"]
    assert "emulated GPU" in result["device"]
    assert row["good"] and "bitwise identical" in row["measured"], row


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS / "gpu"))
    import check

    return check


def replaced(tool, monkeypatch, **ways):
    """Replace the table of checks: each check returns or raises the given value.

    :param ways: value or exception of each check, by its name
    """

    def run_check(check, place, seconds):
        result = ways[check.title]
        if isinstance(result, BaseException):
            raise result
        return result

    checks = [tool.Check(name, "a limit", 9, name) for name in ways]
    monkeypatch.setattr(tool, "run_check", run_check)
    monkeypatch.setattr(tool, "CHECKS", checks)
    return checks


def test_each_row_stands_beside_its_limit_and_what_did_not_run_says_why(tool, monkeypatch):
    late = tool.NotRun("2 s were not enough")
    broken = ValueError("a wrong | shape\nand a story")
    checks = replaced(tool, monkeypatch, one=("93%", True), two=late, three=broken, four=("", True))
    checks[3] = checks[3]._replace(gpus=2)
    rows = []
    tool.run_checks(tool.Place("cpu", False), rows, time.monotonic() + 100, checks)
    assert [row.good for row in rows] == [True, None, False, None]
    text = tool.table(rows, "a device")
    assert text.splitlines()[0].endswith(", a device")
    assert "| one | 93% | a limit | yes |" in text
    assert "| two | not run: 2 s " in text
    assert "| three | failed: ValueError: a wrong / shape |" in text
    assert "not run: needs 2 GPUs" in text
    late = []
    tool.run_checks(tool.Place("cpu", True), late, time.monotonic() + 5, checks)
    assert all("time limit" in row.measured for row in late)


LEAVES = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], process_group=0)
print(child.pid, flush=True)
time.sleep(60)
"""


def test_a_measurement_that_hangs_is_ended_with_its_children(tool, capsys):
    with pytest.raises(tool.NotRun, match=naming("2 s", "not enough")):
        tool.run_command([sys.executable, "-c", LEAVES], 2)
    child = int(capsys.readouterr().out.split()[0])  # what it said so far is shown
    launch.until(lambda: not _lives(child), 20, "the end of a child that was left running")


def _lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_from_goes_on_with_a_row_whose_number_the_table_has(tool, monkeypatch, tmp_path, capsys):
    well = "93%", True
    replaced(tool, monkeypatch, one=well, two=well, three=well)
    monkeypatch.setattr(tool, "result_of", lambda *_: (1, "a device"))
    monkeypatch.setattr(tool.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--from", "2", "--out", str(tmp_path)])
    assert tool.main() == 0
    table = capsys.readouterr().out
    assert "| 3 | three | 93% | a limit | yes |" in table and "| one |" not in table
    assert "| 2 | two | 93% |" in (tmp_path / "GPU_RESULTS.md").read_text()

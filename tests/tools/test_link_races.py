"""tools/labs/link_races.py: whether a folder is fit for members that join and leave."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "tools" / "labs" / "link_races.py"


def test_two_processes_find_a_local_folder_good_and_a_used_one_is_refused(tmp_path):
    command = [sys.executable, SCRIPT, tmp_path / "new"]
    both = [subprocess.Popen(command, text=True, stdout=subprocess.PIPE) for _ in range(2)]
    told = [one.communicate(timeout=60)[0] for one in both]
    assert [one.returncode for one in both] == [0, 0] and all("1 view(s): good" in t for t in told)
    assert sum(int(t.split(" names, ")[1].split()[0]) for t in told) == 200
    again = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert again.returncode == 2 and "was used before: name a new folder" in again.stdout


def test_a_file_system_without_hard_links_is_found_broken(tmp_path):
    # to link is refused there, as on exFAT
    code = (
        "import os, runpy, sys\n"
        "def link(*_): raise OSError(1, 'Operation not permitted')\n"
        "os.link = link\n"
        "runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    )
    command = [sys.executable, "-c", code, SCRIPT, tmp_path]
    both = [subprocess.Popen(command, text=True, stdout=subprocess.PIPE) for _ in range(2)]
    for one in both:
        assert "BROKEN: [Errno 1]" in one.communicate(timeout=60)[0] and one.returncode == 1

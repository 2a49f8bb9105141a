"""tools/labs/link_races.py: whether a folder is fit for members that join and leave."""

import runpy
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "tools" / "labs" / "link_races.py"
LAB = runpy.run_path(str(SCRIPT))
GOOD = 0
BROKEN = 1
UNKNOWN = 2


def reports(*winners, users=(1, 1), seen=None):
    """Return reports of the processes a and b, in which the given process has won each name.

    :param winners: for each name, the process that has won it
    :param users: user of each process
    :param seen: content that both processes have read, by name; None: the winner's
    """
    return [
        LAB["Report"](
            name,
            user,
            [k for k, one in enumerate(winners) if one == name],
            list(seen or winners),
            [],
        )
        for name, user in zip("ab", users, strict=True)
    ]


def test_a_verdict_needs_names_that_both_have_won():
    assert LAB["judge"](reports(*"abba"))[0] == GOOD
    code, why = LAB["judge"](reports(*"aaaa"))
    assert code == UNKNOWN and "(4 : 0 names)" in why
    assert LAB["judge"](reports(*"ab"), shared=True)[0] == UNKNOWN
    assert LAB["judge"](reports(*"ab", users=(1, 2)), shared=True)[0] == GOOD


def test_what_breaks_the_promises():
    one, other = reports(*"abba")
    twice = other._replace(won=[0, *other.won])
    assert LAB["judge"]([one, twice])[0] == BROKEN
    stale = other._replace(seen=["a", "b", "b", ""])
    assert LAB["judge"]([one, stale])[0] == BROKEN
    refused = other._replace(errors=["read: Permission denied"])
    assert LAB["judge"]([one, refused]) == (BROKEN, "read: Permission denied")
    assert LAB["judge"](reports(*"abba", seen="abbc"))[0] == BROKEN


def both(command) -> list[tuple[int, str]]:
    """Run a command in two processes at once; return exit codes and output."""
    started = [subprocess.Popen(command, text=True, stdout=subprocess.PIPE) for _ in range(2)]
    messages = [one.communicate(timeout=60)[0] for one in started]
    return [(one.returncode, text) for one, text in zip(started, messages, strict=True)]


def test_two_processes_race_in_a_local_folder_and_a_used_one_is_refused(tmp_path):
    command = [sys.executable, SCRIPT, tmp_path / "new"]
    one, other = both(command)
    assert one == other
    assert one[0] == GOOD and "2 processes won" in one[1] or "did not compete" in one[1]
    assert max(path.stat().st_nlink for path in (tmp_path / "new/race").iterdir()) == 2
    again = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert again.returncode == UNKNOWN and f"{tmp_path / 'new'} was used before" in again.stdout


def test_a_file_system_without_hard_links_is_found_broken(tmp_path):
    # Such a file system, for example exFAT, refuses link(2) with EPERM.
    code = (
        "import os, runpy, sys\n"
        "def link(*_): raise OSError(1, 'Operation not permitted')\n"
        "os.link = link\n"
        "runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    )
    for status, text in both([sys.executable, "-c", code, SCRIPT, tmp_path]):
        assert status == BROKEN and "link: [Errno 1]" in text

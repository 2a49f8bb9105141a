import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def test_forged_files_are_refused_in_words_fast_and_open_nothing_else():
    """A sample of the lab's thousand; what it counts as wrong is told in its first lines."""
    forge = [sys.executable, REPO / "tools/labs/forge.py", "--count", "60", "--seed", "3"]
    done = subprocess.run(forge, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "60 forged, 0 wrong" in done.stdout and "structure: refused" in done.stdout

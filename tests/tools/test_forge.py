"""tools/labs/forge.py, and a forged log that it has found."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mpigossip.store.log import Column, LogWriter
from tests.launch import warmed
from tools.labs.forge import lookup3

REPO = Path(__file__).resolve().parents[2]


def test_forged_files_are_refused_in_words_fast_and_open_nothing_else():
    """Run a sample of the lab's cases; the docstring of the program lists the wrong results."""
    forge = [sys.executable, REPO / "tools/labs/forge.py", "--count", "60", "--seed", "3"]
    done = subprocess.run(forge, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "60 forged, 0 wrong" in done.stdout and "structure: refused" in done.stdout


@pytest.mark.every
def test_mutated_jobs_and_forged_folders_of_members_end_in_a_sentence():
    """Run a sample of the lab's 10,000 jobs; times and memory are judged on idle machines."""
    few = ["--count", "20", "--steps", "1", "--files", "3", "--seed", "3"]
    forge = [sys.executable, REPO / "tools/labs/forge_jobs.py", *few]
    done = subprocess.run(forge, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "seed 3: 0 wrong" in done.stdout and "dry run: exit code 2" in done.stdout


def test_a_log_whose_index_counts_wrongly_is_refused_in_words(tmp_path):
    """A B-tree claims more entries than it has, for which HDF5 2.0 reads beyond its memory."""
    names = ("loss", *(f"column_{k}" for k in range(90)))
    path = tmp_path / "log.h5"
    columns = {name: Column("1", "") for name in names}
    out = LogWriter(path, nodes=2, job="", columns=columns, environment={})
    out.append({name: np.zeros((3, 2)) for name in columns})
    data = bytearray(path.read_bytes())
    at = -1
    while (at := data.find(b"BTHD", at + 1)) >= 0:
        if data[at + 12]:  # its depth
            data[at + 27] = 4
            data[at + 34 : at + 38] = lookup3(bytes(data[at : at + 34])).to_bytes(4, "little")
    path.write_bytes(data)
    words = [sys.executable, "-m", "mpigossip", "log", "show", str(path)]
    left = subprocess.run(warmed(words, {}), capture_output=True, text=True, timeout=120)
    assert left.returncode in (1, 2) and left.stderr.startswith("mpigossip: "), left

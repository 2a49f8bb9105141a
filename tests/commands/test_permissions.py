"""Missing permissions are reported; a run never treats an unreadable file as a missing one."""

import ctypes
import json
import os
import re
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest

from mpigossip import cli
from mpigossip.store import checkpoint
from mpigossip.store.dataset import pack
from tests.jobs import TINY
from tests.store.examples import folder_of_images

ANY = 1 << 1 | 1 << 2  # Linux capabilities to write, read and search regardless of permissions


@contextmanager
def plain_user():
    """If the user is root, drop the capabilities that ignore permissions of files."""
    if os.geteuid():
        yield
        return
    library = ctypes.CDLL(None, use_errno=True)
    head = (ctypes.c_uint32 * 2)(0x20080522, 0)
    have = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable, twice
    if library.capget(head, have):
        pytest.skip(f"rights don't count here: {os.strerror(ctypes.get_errno())}")
    less = (ctypes.c_uint32 * 6)(*have)
    less[0] &= ~ANY
    library.capset(head, less)
    try:
        yield
    finally:
        library.capset(head, have)


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Create a job, a run with two checkpoints, images, a data set and a graph."""
    top = tmp_path_factory.mktemp("rights")
    (top / "job.toml").write_text('[run]\nname = "x"\n')
    folder_of_images(top / "images", sides=(9, 9), count=4)
    (top / "text" / "deep").mkdir(parents=True)
    (top / "text" / "a.txt").write_text("some text " * 40)
    pack(top / "images", top / "data.h5")
    (top / "graph.json").write_text(json.dumps({"n": 2, "edges": [[0, 1]]}))
    (top / "mine.py").write_text("def model(classes): raise OSError\n")
    settings = [*TINY, "run.steps=4", "checkpoint.every_steps=2", f"run.output={top / 'run'}"]
    assert cli.main(["simulate", str(top / "job.toml"), "--nodes", "2", *settings]) == 0
    (top / "ro").mkdir()
    (top / "run" / "tensorboard").mkdir()
    return top


SIMULATE = "simulate job.toml --nodes 2 run.steps=6 " + " ".join(TINY)
RESUME = "resume run --simulate run.steps=6"
NEWEST = "run/checkpoints/step-00000004"
CASES = [
    ("job.toml", SIMULATE, "job.toml.*Permission denied"),
    ("data.h5", f"{SIMULATE} data.source=data.h5", "data.h5 can't be read: Perm"),
    ("data.h5", "data show data.h5", "data.h5 can't be read: Permission denied; ask its owner"),
    ("images/train/ape", "data pack images o.h5", "images/train/ape can't be read: Permission"),
    ("images/test/bee/1.png", "data pack images o.h5", "1 of 18 .*bee/1.png .*Permission denied"),
    ("text/deep", "data pack text o.h5 --text", "text/deep can't be read: Permission denied"),
    ("text/a.txt", "data pack text o.h5 --text", "a.txt can't be read: Permission denied"),
    ("ro", "data pack images ro/o.h5", "ro/o.h5 can't be written: Permission denied; ask its"),
    ("run/checkpoints", RESUME, "run/checkpoints can't be read: Permission denied"),
    ("run/checkpoints", f"{SIMULATE} run.output=run", "checkpoints can't be read: Permission de"),
    ("run/checkpoints", "checkpoint show run", "run/checkpoints can't be read: Permission denied"),
    (NEWEST, RESUME, "step-00000004/checkpoint.h5 can't be read .Permission denied"),
    (NEWEST, f"checkpoint verify {NEWEST}", "checkpoint.h5: Permission denied; ask its owner"),
    (f"{NEWEST}/checkpoint.h5", RESUME, "4/checkpoint.h5 can't be read .Permission denied"),
    (f"{NEWEST}/node-0001.h5", RESUME, "node-0001.h5 can't be read: Permission denied"),
    (f"{NEWEST}/node-0001.h5", "checkpoint verify run", "node-0001.h5 can't be read: Permission"),
    ("ro", "checkpoint export run --out ro/m.safetensors", "ro/m.safetensors can't be written: P"),
    ("run/log.h5", "log show run", "run/log.h5 can't be read: Permission denied"),
    ("run/lock", RESUME, "can't write into .*run.: Permission denied"),
    ("run", RESUME, "can't write into .*run.: Permission denied"),
    ("run", "log show run", "run/log.h5: Permission denied; ask its owner"),
    ("run", "log plot run", "run/log.h5: Permission denied|can't be written: Permission denied"),
    ("run", "checkpoint show run", "Permission denied; ask its owner"),
    ("run", "report run --html o.html", "run/log.h5: Permission denied; ask its owner"),
    ("ro", "log plot run --out ro/o.png", "ro/o.png can't be written: Permission denied"),
    ("ro", "log export run --csv ro/o.csv", "ro/o.csv can't be written: Permission denied"),
    ("ro", "log export run --tensorboard ro/o", "ro/o can't be written: Permission denied"),
    ("ro", "report run --html ro/o.html", "ro/o.html can't be written: Permission denied"),
    ("ro", "graph draw ring --nodes 4 --out ro/o.png", "ro/o.png can't be written: Permission"),
    (
        "ro",
        "graph search --nodes 6 --degree 2 --evaluations 9 --out ro/o.json",
        "ro/o.json can't be written: Permission",
    ),
    ("ro", f"{SIMULATE} run.output=ro/run", "can't write into .*ro/run.: Permission denied"),
    ("run/tensorboard", f'{RESUME} log.hooks=["tensorboard"]', "tensorboard can't be written: P"),
    ("graph.json", "graph show file:graph.json --nodes 2", "graph.json. can't be read: Permission"),
    ("graph.json", f"{SIMULATE} graph.name=file:graph.json", "graph.json. can't be read: Permissi"),
    ("mine.py", f"{SIMULATE} model.name=mine:model", "mine.py.*Permission denied"),
]


@pytest.mark.parametrize(
    "words",
    [
        "job generic-slurm job.toml --gpus 4 --nodes 2 --time 10m --venv LONG",
        "data show LONG",
        "checkpoint show LONG",
        "log plot LONG",
        "simulate LONG --nodes 2",
        "graph show file:LONG.json --nodes 2",
        "resume LONG --simulate",
        f"{SIMULATE} run.output=LONG",
        f"{SIMULATE} data.source=LONG",
    ],
)
def test_a_name_that_is_too_long_is_reported(originals, monkeypatch, capsys, words):
    monkeypatch.chdir(originals)
    assert cli.main(words.replace("LONG", "a" * 500).split()) == 2
    assert "aaa" in capsys.readouterr().err


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[1].split()[0]}-{case[0]}")
def test_missing_permissions_are_reported(originals, tmp_path, monkeypatch, capsys, case):
    what, words, says = case
    shutil.copytree(originals, tmp_path / "top")
    monkeypatch.chdir(tmp_path / "top")
    monkeypatch.syspath_prepend(".")
    place = Path(what)
    rights = place.stat().st_mode
    place.chmod(0o555 if what in ("ro", "run/tensorboard") else 0)
    try:
        with plain_user():
            code = cli.main(words.split())
    finally:
        place.chmod(rights)
    printed = capsys.readouterr()
    assert code in (1, 2), printed
    assert re.search(says, printed.err + printed.out), printed
    assert checkpoint.steps("run") == [
        2,
        4,
    ]  # the run neither started again nor continued from an earlier step

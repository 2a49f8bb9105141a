"""Full disks, removed files, and names that could be executed."""

import ast
import os
import re
import stat
import subprocess
import time
from pathlib import Path

import pytest

import mpigossip
from mpigossip.cluster.world import SingleProcess
from mpigossip.graphs import GraphError, graph
from mpigossip.graphs.search import save, search
from mpigossip.runs import hooks, start_and_resume
from mpigossip.runs import run as runs
from mpigossip.store import checkpoint
from mpigossip.store.log import read
from mpigossip.training import assemble
from tests.cases import every, naming

pytestmark = pytest.mark.usefixtures("warm")

PACKAGE = Path(mpigossip.__file__).parent
TINY = ["model.name=mlp", "data.batch=8", "data.workers=0"]
LARGE = ["model.hidden=[4096]", "checkpoint.keep=1"]  # 2.4 MB per node


def train(folder, *settings, nodes=2):
    job = assemble.load({}, [*TINY, f"run.output={folder}", *settings])
    with SingleProcess() as alone:
        return start_and_resume.train(job, alone, nodes)


def resume(folder, *settings):
    return start_and_resume.resume(folder, settings, SingleProcess(), None)


# -- a full disk ----------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """Mount a file system of 16 MiB, with space for the log and three checkpoints of `LARGE`."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(place)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def fill(disk, leave):
    """Fill the disk up to the given number of bytes."""
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    (disk / "ballast").write_bytes(bytes(max(free - leave, 0)))


@pytest.mark.parametrize("leave, where", [(3_000_000, "the checkpoint"), (0, "log.h5")])
def test_a_full_disk_stops_a_run_that_can_be_resumed(small_disk, leave, where):
    """First, there is space for the log but not for a checkpoint; then, for neither."""
    run = small_disk / "run"
    train(run, "run.steps=4", *LARGE)
    before = checkpoint.digest(checkpoint.latest(run))
    fill(small_disk, leave)
    with pytest.raises(ValueError, match=naming("No space left on device")) as error:
        resume(run, "run.steps=8")
    assert where in str(error.value) and re.search(
        "make room|free space|free disk space", str(error.value)
    )
    newest = checkpoint.latest(run)
    assert newest == checkpoint.folder(run, 4) and not checkpoint.verify(newest)
    assert checkpoint.digest(newest) == before
    assert len(read(run / "log.h5").steps["loss"]) >= 4
    (small_disk / "ballast").unlink()
    assert resume(run, "run.steps=8")["finished"]
    assert len(read(run / "log.h5").steps["loss"]) == 8


def test_a_run_continues_without_checkpoints_if_the_job_says_so(small_disk, capsys):
    run = small_disk / "run"
    settings = ["checkpoint.on_error=continue", "checkpoint.every_steps=4", "run.steps=12"]
    fill(small_disk, 4_500_000)
    # a checkpoint that fails can use the space of the log for a moment
    summary = train(run, *settings, *LARGE, "log.on_error=continue", "log.flush_steps=1")
    assert summary["finished"] and "digest" not in summary
    printed = capsys.readouterr().err
    assert printed.count("No space left on device") >= 3 and "training continues" in printed
    assert len(read(run / "log.h5").steps["loss"]) == 12


def test_rows_of_a_log_on_a_full_disk_are_written_later(small_disk, capsys):
    """The disk is full from the first step to the last but one, when a user frees space."""
    run = small_disk / "run"
    filled = []

    class Filler(hooks.Hook):
        def step(self, progress, record):
            if record.index == 0:
                fill(small_disk, 0)
                filled.append(True)
            if record.index == 10:
                (small_disk / "ballast").unlink()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "named_hooks", lambda *_: [Filler()])
        train(run, "run.steps=12", "log.flush_steps=2", "log.on_error=continue")
    assert filled and capsys.readouterr().err.count("rows of the log") >= 4
    assert read(run / "log.h5").steps["step"].tolist() == list(range(12))


def test_a_searched_graph_on_a_full_disk_is_a_user_error(small_disk):
    name = "six.json"
    searched = search(6, degree=2, evaluations=20)
    save(searched, small_disk / name)
    fill(small_disk, 0)
    with pytest.raises(GraphError, match=naming(name, "No space left on device")):
        save(searched, small_disk / name)
    kept = graph(f"file:{small_disk / name}")
    assert kept == searched.graph()  # the previous file, and no temporary one
    assert {path.name for path in small_disk.iterdir()} == {name, "ballast"}


def test_a_lock_on_a_full_disk_is_a_user_error(small_disk):
    fill(small_disk, 0)
    with pytest.raises(ValueError, match=naming("No space left on device")):
        train(small_disk / "run", "run.steps=1")


# -- files that are removed during a run ---------------------------------------------------------


def empty(path):
    path.write_bytes(b"")


def shred(path):
    path.write_bytes(bytes(10_000))


@pytest.mark.parametrize(
    "name, take, says",
    [
        ("log.h5", empty, "log.h5 was deleted .* new log .*step 20"),
        every(
            "log.h5",
            shred,
            "log.h5 was deleted .* new log .*step 20",
        ),
        ("log.h5", Path.unlink, "log.h5 was deleted .*step 20"),
    ],
)
def test_files_removed_during_a_run_are_reported_at_once_and_at_the_end(
    tmp_path, monkeypatch, capsys, name, take, says
):
    messages = []

    class Taker(hooks.Hook):
        taken = False

        def step(self, progress, record):
            time.sleep(0.03)  # writing in the background takes time
            if not self.taken and record.index > 20:
                self.taken = True
                take(tmp_path / name)
            if record.index == 39:
                messages.append(capsys.readouterr().err)

    monkeypatch.setattr(runs, "named_hooks", lambda *_: [Taker()])
    settings = ["run.steps=40", "log.flush_steps=10", "checkpoint.every_steps=18"]
    summary = train(tmp_path, *settings)
    assert summary["finished"] and re.search(says, summary["warnings"])
    assert re.search(says, messages[0])
    log = read(tmp_path / "log.h5")
    assert log.steps["step"].tolist() == list(range(20, 40))
    assert log.summary["digest"] == summary["digest"]


# -- names that could be executed -----------------------------------------------------------------


def calls(tree):
    """Yield all names that are called or imported, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((f"import {alias.name}", node) for alias in node.names)


def test_no_code_evaluates_or_unpickles_its_input():
    """torch pickles data for its own loading processes; no code of this package does."""
    results = set()
    for path in PACKAGE.rglob("*.py"):
        for name, node in calls(ast.parse(path.read_text())):
            shell = any(k.arg == "shell" for k in getattr(node, "keywords", ()))
            bad = name in ("eval", "exec", "os.system", "os.popen", "torch.load", "marshal.loads")
            if bad or shell or "pickle" in name or "shelve" in name or name == "numpy.load":
                results.add((path.relative_to(PACKAGE).as_posix(), name))
    assert {name for name, _ in results} == set(), results


def test_files_get_the_permissions_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        train(tmp_path / "run", "run.steps=2")
    finally:
        os.umask(before)
    for path in (tmp_path / "run").rglob("*"):
        wanted = 0o750 if path.is_dir() else 0o640
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path

"""Checkpoints in the background: they do not delay training; errors of the disk are handled."""

import errno
import shutil
import threading
from pathlib import Path

import pytest

from mpigossip.cluster.world import SingleProcess
from mpigossip.runs import start_and_resume
from mpigossip.store import StoreError, checkpoint
from mpigossip.store.log import read
from mpigossip.training import assemble
from tests.cases import naming, with_world


def job(folder, *settings):
    base = ["data.batch=8", "run.steps=24", "checkpoint.every_steps=6", f"run.output={folder}"]
    return assemble.load({"model": {"name": "mlp"}}, [*base, *settings])


def test_training_continues_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    """The writer is blocked until later steps have run; it writes the step of its snapshot."""
    later = threading.Event()
    seen = []
    write = checkpoint.write_node
    from mpigossip.training.loop import Trainer

    step = Trainer.step

    def stepping(self):
        if self.engine.index >= 9:
            later.set()
        return step(self)

    def held(folder, node, state):
        assert later.wait(30), "training waited for the disk"
        seen.append(int(state.numbers["index"]))
        return write(folder, node, state)

    monkeypatch.setattr(Trainer, "step", stepping)
    monkeypatch.setattr(checkpoint, "write_node", held)
    start_and_resume.train(job(tmp_path / "a", "checkpoint.keep=9"), SingleProcess(), 2)
    assert seen[:2] == [6, 6] and checkpoint.steps(tmp_path / "a") == [6, 12, 18, 24]
    monkeypatch.undo()
    start_and_resume.train(job(tmp_path / "b", "run.steps=6"), SingleProcess(), 2)
    early, late = (checkpoint.folder(tmp_path / name, 6) for name in "ab")
    assert checkpoint.digest(early) == checkpoint.digest(late)


def test_snapshots_reuse_memory(tmp_path, monkeypatch):
    places = set()
    write = checkpoint.write_node

    def noting(folder, node, state):
        places.add((node, state.parameters.ctypes.data, state.parameters.ctypes.data % 4096))
        return write(folder, node, state)

    monkeypatch.setattr(checkpoint, "write_node", noting)
    start_and_resume.train(job(tmp_path, "checkpoint.keep=9"), SingleProcess(), 2)
    assert len(places) == 2 and {rest for *_, rest in places} == {0}
    assert len({checkpoint.digest(checkpoint.folder(tmp_path, at)) for at in (6, 12, 18)}) == 3


def stale(path, is_dir=Path.is_dir):
    if path.suffix == ".writing":
        raise OSError(errno.ESTALE, "Stale file handle")
    return is_dir(path)


def failing(at):
    write = checkpoint.write_node

    def fail(folder, node, state):
        if state.numbers["index"] >= at and node == 1:
            raise StoreError("node-0001.h5: No space left on device")
        return write(folder, node, state)

    return fail


def test_a_full_disk_stops_the_run_and_earlier_checkpoints_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "write_node", failing(12))
    with pytest.raises(ValueError, match=naming("step 12", "No space left", "checkpoint.on_error")):
        start_and_resume.train(job(tmp_path), SingleProcess(), 2)
    newest = checkpoint.latest(tmp_path)
    assert newest == checkpoint.folder(tmp_path, 6) and not checkpoint.verify(newest)
    monkeypatch.undo()
    assert start_and_resume.train(job(tmp_path), SingleProcess(), 2)["finished"]


def test_a_full_disk_is_reported_and_survived_if_the_job_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(checkpoint, "write_node", failing(12))
    summary = start_and_resume.train(
        job(tmp_path, "checkpoint.on_error=continue"), SingleProcess(), 2
    )
    assert summary["finished"] and "digest" not in summary
    assert capsys.readouterr().err.count("training continues") == 3
    assert checkpoint.steps(tmp_path) == [6]
    assert len(read(tmp_path / "log.h5").steps["loss"]) == 24


def test_a_short_failure_of_the_file_system_costs_one_checkpoint(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Path, "is_dir", stale)
    assert start_and_resume.train(
        job(tmp_path, "checkpoint.on_error=continue"), SingleProcess(), 2
    )["finished"]
    assert "Stale file handle; training continues" in capsys.readouterr().err
    with pytest.raises(ValueError, match=naming("Stale file handle", "checkpoint.on_error")):
        start_and_resume.train(job(tmp_path / "stops"), SingleProcess(), 2)


@pytest.mark.parametrize("at", ["write_node", "commit"])
def test_deleting_checkpoints_during_a_write_does_not_end_the_run(
    tmp_path, monkeypatch, capsys, at
):
    write = getattr(checkpoint, at)
    taken = []

    def take(*args):
        if not taken and len(checkpoint.steps(tmp_path)) == 1:
            taken.append(shutil.rmtree(tmp_path / "checkpoints"))
        return write(*args)

    monkeypatch.setattr(checkpoint, at, take)
    assert start_and_resume.train(job(tmp_path), SingleProcess(), 2)["finished"]
    printed = capsys.readouterr().err
    assert "the checkpoint of step 12" in printed
    assert "training continues" in printed
    assert checkpoint.steps(tmp_path) == [18, 24]


@with_world
def under_mpi(world, folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "write_node", failing(12))
        with pytest.raises(ValueError) as raised:
            start_and_resume.train(job(folder), world, world.size)
        return str(raised.value)


def test_all_ranks_stop_if_one_disk_is_full(ranks, tmp_path):
    first, *others = ranks(3)(under_mpi, str(tmp_path))
    assert "No space left" in first and all(other == first for other in others)
    assert checkpoint.steps(tmp_path) == [6]

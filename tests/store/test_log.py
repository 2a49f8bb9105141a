"""The log of a run: columns, evaluations, resuming, damage, and interrupted writes."""

import contextlib
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest

from mpigossip.analysis.report import table
from mpigossip.store import StoreError, journal, log
from mpigossip.store.log import Column, read
from tests.cases import naming, on_each
from tests.launch import warmed
from tests.store.examples import COLUMNS, evaluation, log_values, log_writer, write_log


def same(a, b):
    for ours, theirs in ((a.steps, b.steps), (a.evaluations, b.evaluations)):
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert ours[name].dtype == theirs[name].dtype
            np.testing.assert_array_equal(ours[name], theirs[name])


def test_round_trip(tmp_path):
    path = tmp_path / "log.h5"
    long = {str(k): "x" * 1000 * k for k in range(1, 12)}
    out = log_writer(path, job="# é\n" * 40_000)
    for start in (0, 5, 10):
        out.append(log_values(range(start, start + 5), 3))
    out.append({"step": np.array([20, 30])} | log_values([20, 30], 3))
    out.evaluation({"step": 10, "accuracy": 0.5, "local_accuracy": [0.1, 0.2, 0.3], "own": 3})
    out.evaluation({"step": 31, "accuracy": 0.75, "seconds": 2})
    out.summary({"digest": "ab", "accuracy": 0.75, "steps": 31, "gaps": [1, 2]} | long)
    got = read(path)
    steps = [*range(15), 20, 30]
    assert got.steps["step"].tolist() == steps and got.nodes == 3
    for name, want in log_values(steps, 3).items():
        np.testing.assert_array_equal(got.steps[name], want)
        assert got.steps[name].dtype == want.dtype
    assert got.evaluations["step"].tolist() == [10, 31]
    assert got.evaluations["accuracy"].tolist() == [0.5, 0.75]
    np.testing.assert_array_equal(got.evaluations["own"], [3, np.nan])
    np.testing.assert_array_equal(
        got.evaluations["local_accuracy"], [[0.1, 0.2, 0.3], [np.nan] * 3]
    )
    assert got.job == "# é\n" * 40_000 and got.environment == {"a": "é"}
    facts = {"digest": "ab", "accuracy": 0.75, "steps": 31, "gaps": "[1, 2]"}
    assert got.summary == facts | long
    units = {"step": "step", "loss": "nat", "bytes_sent": "B", "kind": "1"}
    units |= {"accuracy": "", "local_accuracy": "", "own": "", "seconds": "s"}
    assert got.units == units
    assert {p.name for p in tmp_path.iterdir()} == {"log.h5"}


def test_h5py_reads_it_between_appends(tmp_path):
    path = tmp_path / "log.h5"
    out = log_writer(path)
    out.append(log_values(range(5), 3))
    out.evaluation(evaluation(5, 3))
    with h5py.File(path) as file:
        loss = file["steps/loss"]
        assert loss.shape == (5, 3) and loss.attrs["units"] == b"nat"
        assert loss.attrs["description"] == b"mean training loss"
        assert loss.dims[0][0] == file["steps/step"] and loss.dims[1][0] == file["steps/node"]
        assert file["evaluations/accuracy"].dims[0][0].name == "/evaluations/at_step"
        # A reader that keeps the file open doesn't stop the run.
        out.append(log_values(range(5, 10), 3))
    assert len(read(path).steps["loss"]) == 10


@pytest.mark.parametrize("stop", [0, 3, 10, 17, 20])
def test_a_resumed_log_equals_one_never_stopped(tmp_path, stop):
    expected = write_log(tmp_path / "expected.h5")
    path = tmp_path / "log.h5"
    write_log(path)
    out = log_writer(path, first_step=stop)
    out.append(log_values(range(stop, 20), 3))
    for step in (10, 20):
        if step > stop:
            out.evaluation(evaluation(step, 3))
    same(read(path), expected)


def test_resuming_removes_the_summary_and_stores_the_new_job(tmp_path):
    path = tmp_path / "log.h5"
    write_log(path)
    out = log_writer(path, first_step=20)
    out.summary({"accuracy": 1.0})
    log_writer(path, first_step=20, job="new")
    got = read(path)
    assert got.summary == {} and got.job == "new" and len(got.steps["loss"]) == 20


def test_the_same_evaluation_again_replaces_it(tmp_path):
    out = log_writer(tmp_path / "log.h5")
    out.evaluation(evaluation(10, 3))
    out.evaluation(evaluation(10, 3) | {"accuracy": 0.9})
    with pytest.raises(ValueError, match=naming("step 10", "step 9")):
        out.evaluation(evaluation(9, 3))
    got = read(tmp_path / "log.h5").evaluations
    assert got["step"].tolist() == [10] and got["accuracy"].tolist() == [0.9]
    for step in (20, 10, 20):  # This is the state after a write that failed.
        out.evaluation(evaluation(step, 3))
    got = read(tmp_path / "log.h5").evaluations
    assert got["step"].tolist() == [10, 20] and got["accuracy"].tolist() == [0.01, 0.02]


def test_rows_of_a_write_that_failed_after_its_journal_are_stored_once(tmp_path, monkeypatch):
    path = tmp_path / "log.h5"
    out = log_writer(path)
    out.append(log_values(range(5), 3))
    with monkeypatch.context() as patch, pytest.raises(StoreError):
        patch.setattr(journal, "_apply", lambda *_: (tmp_path / "gone").stat())
        out.append(log_values(range(5, 8), 3))
    out.append(log_values(range(5, 10), 3))
    assert read(path).steps["step"].tolist() == list(range(10))
    np.testing.assert_array_equal(read(path).steps["loss"], log_values(range(10), 3)["loss"])


def test_resuming_with_other_nodes_and_columns(tmp_path):
    path = tmp_path / "log.h5"
    write_log(path, steps=10)
    more = COLUMNS | {"extra": Column("s", "")}
    out = log_writer(path, nodes=5, first_step=10, columns=more)
    out.append(log_values(range(10, 12), 5) | {"extra": np.ones((2, 5))})
    out.evaluation(evaluation(12, 5))
    out = log_writer(path, nodes=2, first_step=12)
    out.append(log_values(range(12, 13), 2))
    got = read(path)
    assert got.nodes == 5
    np.testing.assert_array_equal(got.steps["loss"][9], [9000.5, 9001.5, 9002.5, np.nan, np.nan])
    np.testing.assert_array_equal(got.steps["loss"][11], 11000.5 + np.arange(5))
    np.testing.assert_array_equal(got.steps["bytes_sent"][12], [12000, 12001, -1, -1, -1])
    assert np.isnan(got.steps["extra"][[0, 12]]).all() and (got.steps["extra"][10:12] == 1).all()
    assert np.isnan(got.evaluations["local_accuracy"][0, 3:]).all()


def test_invalid_calls_are_rejected_and_change_nothing(tmp_path):
    path = tmp_path / "log.h5"
    out = log_writer(path)
    out.append(log_values(range(5), 3))
    before = path.read_bytes()
    good = log_values(range(5, 7), 3)
    for invalid, named in (
        ({"loss": good["loss"]}, "append needs"),
        (good | {"more": good["loss"]}, "append needs"),
        (log_values(range(5, 7), 4), ("(2, 4)", "(2, 3)")),
        (good | {"step": np.array([4, 5])}, ("ascend", "5")),
        (good | {"step": np.array([6, 6])}, ("ascend", "5")),
    ):
        with pytest.raises(ValueError, match=naming(named)):
            out.append(invalid)
    assert path.read_bytes() == before
    out.append(log_values([], 3))
    assert path.read_bytes() == before


def test_earlier_and_damaged_logs_are_renamed(tmp_path, caplog):
    path = tmp_path / "log.h5"
    write_log(path)
    write_log(path, steps=5)
    assert len(read(path).steps["loss"]) == 5
    assert len(read(tmp_path / "log.h5.1").steps["loss"]) == 20
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(StoreError, match=naming("log.h5", "can't be used")):
        read(path)
    caplog.clear()
    got = write_log(path, steps=15, first_step=10)
    assert got.steps["step"].tolist() == list(range(10, 15))
    assert "can't be opened" in caplog.text and "log.h5.2" in caplog.text
    path.unlink()
    with h5py.File(path, "w") as other:
        other["x"] = 1
    with pytest.raises(StoreError, match=naming("not the log")):
        read(path)
    write_log(path, steps=15, first_step=10)
    assert (tmp_path / "log.h5.3").exists()


def append_to(path):
    out = log_writer(path.with_name("log.h5"))
    out.path = path
    out.append(log_values(range(5), 3))


@on_each(
    ("call", "name", "message"),
    [
        (read, "no.h5", ("no.h5", "doesn't exist")),
        (read, "text", "can't be used"),
        (log_writer, "text/log.h5", "can't be written"),
        (append_to, "long" * 100, "can't be written"),  # an error other than FileNotFoundError
    ],
)
def test_files_that_are_not_logs(tmp_path, call, name, message):
    """The only file before is a text."""
    (tmp_path / "text").write_text("text")
    with pytest.raises(StoreError, match=naming(message)):
        call(tmp_path / name)


def test_columns_and_points(tmp_path):
    path = tmp_path / "log.h5"
    out = log_writer(path)
    loss = log_values(range(95), 3)
    loss["loss"][:, 1] = np.nan
    loss["loss"][np.arange(95) % 10 != 0, 2] = np.nan
    out.append(loss)
    got = read(path, columns=["loss"], points=10)
    assert set(got.steps) == {"step", "loss"}
    assert got.steps["step"].tolist() == list(range(0, 95, 10))
    np.testing.assert_allclose(got.steps["loss"][:9, 0], np.arange(0, 90, 10) * 1000 + 4500.5)
    assert got.steps["loss"][9, 0] == 92000.5
    assert np.isnan(got.steps["loss"][:, 1]).all()
    np.testing.assert_array_equal(got.steps["loss"][:, 2], np.arange(0, 95, 10) * 1000 + 2.5)
    same(read(path, points=1000), read(path))


class Dead(BaseException):
    """Exception that simulates the end of the process."""


@pytest.mark.parametrize("function", ["pwrite", "fsync"])
def test_death_at_each_single_write(tmp_path, monkeypatch, function):
    path = tmp_path / "log.h5"
    write_log(path, steps=20)
    content = path.read_bytes()
    old = read(path)
    real = getattr(os, function)
    seen = set()
    for survive in range(1000):
        path.write_bytes(content)
        out = log_writer(path, first_step=20)
        remaining = survive

        def dying(*args):
            nonlocal remaining
            if remaining == 0:
                raise Dead
            remaining -= 1
            return real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(os, function, dying)
            try:
                out.append(log_values(range(20, 25), 3))
                finished = True
            except Dead:
                finished = False
        rows = len(read(path).steps["step"])
        seen.add(rows)
        journal.recover(path)
        with h5py.File(path) as file:  # h5py reads the same values.
            assert len(file["steps/step"]) == rows
        got = read(path)
        same(got, old) if rows == 20 else np.testing.assert_array_equal(
            got.steps["loss"], log_values(range(25), 3)["loss"]
        )
        assert not journal.pending(path).exists()
        out = log_writer(path, first_step=rows)
        out.append(log_values(range(rows, rows + 5), 3))
        if finished:
            break
    assert (
        finished and survive >= 3 and seen == {25}
    )  # The journal was complete, so its changes were applied.


def test_an_incomplete_journal_changes_nothing(tmp_path):
    path = tmp_path / "log.h5"
    write_log(path)
    content = path.read_bytes()
    journal._write_journal(journal.pending(path), 10, {0: bytes(journal.PAGE)})
    data = journal.pending(path).read_bytes()
    for part in (b"", data[:5], data[:40], data[:-1], data[:-1] + b"x"):
        journal.pending(path).write_bytes(part)
        assert len(read(path).steps["loss"]) == 20
        assert journal.recover(path) is False and not journal.pending(path).exists()
        assert path.read_bytes() == content


@pytest.mark.parametrize("small", [0, journal.SMALL])
def test_a_log_is_read_with_the_pending_changes_of_a_killed_writer(tmp_path, monkeypatch, small):
    path = tmp_path / "log.h5"
    before = write_log(path)
    monkeypatch.setattr(journal, "_apply", lambda *_: None)
    out = log_writer(path, first_step=20)
    out.append(log_values(range(20, 25), 3))
    assert journal.pending(path).exists()
    monkeypatch.setattr(journal, "SMALL", small)
    got = read(path)
    assert len(got.steps["step"]) == 25 and got.job == before.job


class Counted(bytes):
    """Bytes that count how many of them are copied by slicing, also by slicing slices."""

    copied = 0

    def __getitem__(self, key):
        part = super().__getitem__(key)
        Counted.copied += len(part)
        return Counted(part)


def test_the_bytes_that_reading_a_journal_copies_are_linear_in_its_size(tmp_path, monkeypatch):
    pages = {number: bytes([number]) * journal.PAGE for number in range(200)}
    journal._write_journal(tmp_path / "a.pending", len(pages) * journal.PAGE, pages)
    data = Counted((tmp_path / "a.pending").read_bytes())
    file = contextlib.nullcontext(SimpleNamespace(readall=lambda: data))
    monkeypatch.setattr(journal.guard, "regular", lambda *_, **__: file)
    assert journal._read_journal(tmp_path / "a") == (len(pages) * journal.PAGE, pages)
    assert Counted.copied < 3 * len(data)  # for the checksum and for the pages


def test_overlay_behaves_like_a_file(tmp_path):
    draw = random.Random(3)
    path = tmp_path / "a"
    model = tmp_path / "b"
    content = draw.randbytes(20_000)
    path.write_bytes(content)
    model.write_bytes(content)
    with model.open("r+b", buffering=0) as twin:
        overlay = journal.Overlay(path)
        for _ in range(3000):
            action = draw.random()
            offset = draw.randrange(40_000)
            length = draw.choice([1, 100, 4096, 10_000])
            assert overlay.seek(offset) == twin.seek(offset)
            if action < 0.45:
                data = draw.randbytes(length)
                assert overlay.write(memoryview(data)) == twin.write(data)
            elif action < 0.95:
                one = bytearray(length)
                two = bytearray(length)
                assert overlay.readinto(memoryview(one)) == twin.readinto(two) and one == two
            else:
                overlay.truncate(offset)
                twin.truncate(offset)
            assert overlay.seek(0, os.SEEK_END) == twin.seek(0, os.SEEK_END)
        overlay.file.close()
    journal._write_journal(journal.pending(path), overlay.size, overlay.pages)
    assert path.read_bytes() == content and journal.recover(path)
    assert path.read_bytes() == model.read_bytes()


WRITER = """
import sys, pathlib
sys.path[:0] = sys.argv[2:]
from mpigossip.store.log import read
from tests.store.examples import evaluation, log_values, log_writer
path = pathlib.Path(sys.argv[1])
step = 0
if path.exists():
    step = int(read(path, ["loss"]).steps["step"][-1:].sum()) // 2
out = log_writer(path, nodes=64, first_step=step)
print("go", flush=True)
while True:
    out.append(log_values(range(step, step + 10), 64))
    step += 10
    out.evaluation(evaluation(step, 64))
    print(step, flush=True)
"""


def start(path):
    root = Path(__file__).parents[2]
    command = warmed([sys.executable, "-c", WRITER, str(path), str(root), str(root.parent)], {})
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_read_while_a_run_writes(tmp_path):
    path = tmp_path / "log.h5"
    with start(path) as process:
        try:
            assert process.stdout.readline() == "go\n", process.stderr.read()
            began = time.monotonic()
            lengths = set()
            while (spent := time.monotonic() - began) < 1.5 or len(lengths) < 4:
                assert spent < 60, lengths
                got = read(path)
                lengths.add(len(got.steps["step"]))
                want = log_values(range(len(got.steps["step"])), 64)["loss"]
                np.testing.assert_array_equal(got.steps["loss"], want)
        finally:
            process.kill()


def test_a_full_disk_loses_no_written_rows(tmp_path):
    path = tmp_path / "log.h5"
    out = log_writer(path)
    out.append(log_values(range(5), 3))
    code = (
        "import resource, sys, pathlib; sys.path[:0] = sys.argv[2:]\n"
        "from mpigossip.store import StoreError\n"
        "from tests.store.examples import *\n"
        "out = log_writer(pathlib.Path(sys.argv[1]), first_step=5)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "try: out.append(log_values(range(5, 6000), 3))\n"
        "except StoreError as error: print(error)\n"
    )
    root = Path(__file__).parents[2]
    got = subprocess.run(
        warmed([sys.executable, "-c", code, str(path), str(root), str(root.parent)], {}),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "can't be written" in got.stdout and "free space" in got.stdout, got.stderr
    assert len(read(path).steps["loss"]) == 5
    assert len(write_log(path, steps=10, first_step=5).steps["loss"]) == 10


def test_a_flush_costs_the_same_however_long_the_log(tmp_path):
    path = tmp_path / "log.h5"
    out = log_writer(path)
    sizes = []
    for start_ in range(0, 200_000, 50_000):
        out.append(log_values(range(start_, start_ + 49_950), 3))
        overlay = {}
        real = journal._apply
        try:
            journal._apply = lambda *a, real=real, pages=overlay: (pages.update(a[2]), real(*a))
            out.append(
                {"step": np.arange(start_ + 49_950, start_ + 50_000)}
                | log_values(range(start_ + 49_950, start_ + 50_000), 3)
            )
        finally:
            journal._apply = real
        sizes.append(len(overlay) * journal.PAGE)
    assert max(sizes) < 300_000 and max(sizes) < 2 * min(sizes)
    assert log.read(path, points=10).steps["loss"].shape == (10, 3)


def test_a_log_without_losses_is_rejected(tmp_path):
    path = tmp_path / "log.h5"
    log_writer(path, columns={"kind": COLUMNS["kind"]}).append({"kind": np.zeros((2, 3), np.int8)})
    with pytest.raises(StoreError, match=naming('"steps/loss"', "missing")):
        read(path)


def test_entries_of_another_type_are_rejected(tmp_path):
    complete = {
        "finished": True,
        "steps": 3,
        "nodes": 2,
        "slots": 1,
        "seconds": 1.0,
        "bytes_sent": 5,
        "metrics": "accuracy",
        "accuracy": 0.5,
        "digest": "ab",
    }
    path = tmp_path / "log.h5"
    invalid = [{**complete, name: "text"} for name in ("steps", "seconds", "accuracy", "compute_s")]
    invalid += [{**complete, "digest": 3}, {"finished": True}]
    for summary in (complete, *invalid):
        path.unlink(missing_ok=True)
        out = log_writer(path)
        out.append(log_values(range(5), 3))
        out.summary(summary)
        if summary is complete:
            assert table(read(path))
            continue
        with pytest.raises(StoreError, match=naming("can't be used")):
            read(path)
    for environment in ("[]", '{"host": 3}', "3"):
        write_log(path := tmp_path / f"{len(environment)}.h5")
        with h5py.File(path, "r+") as file:
            file.attrs["environment"] = np.bytes_(environment)
            del file.attrs["checksum"]
        with pytest.raises(StoreError, match=naming("can't be used")):
            read(path)

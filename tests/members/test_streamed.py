"""Members whose ranks write and read only their elements, on file systems that fail."""

import errno
import os
import random
import threading
import time
from types import SimpleNamespace

import pytest

from mpigossip.members.live import OneRank
from mpigossip.members.parts import Part
from mpigossip.members.place import Place, TrainingPlan
from mpigossip.members.records import RecordStore
from mpigossip.members.streamed import StreamedExchange
from mpigossip.runs.members.ranks import SeveralRanks
from mpigossip.store import piecewise
from tests.cases import every
from tests.members.faults import Faults, injected
from tests.members.storm import Bad, begin, chunks_of, member_of_ranks, replay, storm
from tests.members.test_outages import fails

PLAN = TrainingPlan(8, 2, 60.0)


def right(root, plan) -> bool:
    """Return whether each chunk is in exactly one published round, and replay repeats them all."""
    counts = chunks_of(root, plan)
    once = all(counts[chunk] == 1 for chunk in range(plan.chunks))
    return once and replay(root, plan) == plan.chunks


def two_disks(root) -> list[Bad]:
    begin(root)
    return [Bad(root, random.Random(rank)) for rank in range(2)]


@pytest.mark.parametrize("seed", [1, every(2), every(3)])
def test_storms_of_members_that_write_by_pieces(tmp_path, seed):
    root = tmp_path / "run"
    ills = {"rate": 0.01, "stale_s": 0.6, "lost": 0.2, "full": 0.02}
    ends = storm(root, seed, chunks=40, members=3, ranks=2, streamed=True, **ills)
    assert ends["alive"] == 0 and ends["end"] and not ends.get("traceback"), ends
    assert right(root, TrainingPlan(40, 4, 0.3))


def fault(operation, seconds, number=errno.EIO) -> Faults:
    """Return a fault of one operation; 0 seconds: of its next call only."""
    faults = Faults(0, 1.0, rate=0.0)
    faults.operation, faults.number = operation, number
    faults.once, faults.until = not seconds, time.monotonic() + seconds
    return faults


@pytest.mark.parametrize("seconds", [0.0, 0.3])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("operation", ["open", "write", "fsync", "read", "all"])
def test_an_error_of_one_rank_ends_no_member(tmp_path, operation, rank, seconds):
    disks = two_disks(root := tmp_path / "run")
    rounds = []

    def fail_once():
        rounds.append(0)
        if len(rounds) == 3:
            disks[rank].faults = fault(operation, seconds)

    with injected():
        assert member_of_ranks(disks, PLAN, sleep=fail_once, streamed=True) == "end"
    assert sum(disks[rank].faults.counts.values())
    assert right(root, PLAN)


@pytest.mark.parametrize("by_pieces", [True, False])
def test_other_ranks_wait_for_a_lease_too(tmp_path, monkeypatch, by_pieces):
    """Rank 1 can't write for longer than a file system may fail before the lease is known."""
    monkeypatch.setattr("mpigossip.members.outages.START_S", 0.1)
    disks = two_disks(tmp_path / "run")
    for disk in disks:
        disk.outages.limit_s = 0.1
    rounds = []

    def fail():
        rounds.append(0)
        if len(rounds) == 3:
            disks[1].faults = fault("all", 0.5)

    with injected():
        assert member_of_ranks(disks, PLAN, sleep=fail, streamed=by_pieces) == "end"
    assert disks[1].outages.limit_s == 60.0 and disks[1].faults.counts


def test_rank_0_waits_for_files_as_long_as_the_file_system_may_fail(tmp_path, monkeypatch):
    world = SimpleNamespace(rank=0, size=2, timeout_s=30.0, duplicate=lambda: None)
    ranks = SeveralRanks(world, Part(0, 2, 2, 0, 2))
    live = StreamedExchange(Place(RecordStore(tmp_path), PLAN), lambda: False, 0.01, ranks)
    live.limit_outages()
    limits = []
    monkeypatch.setattr(
        "mpigossip.runs.members.ranks.Deadline",
        lambda seconds: SimpleNamespace(wait=lambda *_, **__: limits.append(seconds)),
    )
    ranks._wait(lambda: True, "")
    live.close()
    assert limits == [PLAN.lease_s + 30.0]


def lose_bytes(monkeypatch, rank: int, times: int) -> list[str]:
    """Let fsync of a file of a rank fail, and lose bytes of the file; return the files."""
    sync = piecewise.sync
    files: list[str] = []

    def replaced(path):
        if path.name.endswith(f"-{rank:04d}.h5") and len(files) < times:
            files.append(path.name)
            with path.open("r+b") as file:
                file.seek(-4, os.SEEK_END)
                file.write(b"lost")
            raise OSError(errno.EIO, "lost", str(path))
        sync(path)

    monkeypatch.setattr(piecewise, "sync", replaced)
    return files


@pytest.mark.parametrize("rank", [0, 1])
def test_no_record_names_a_file_whose_bytes_were_lost(tmp_path, monkeypatch, rank):
    """The second fsync of such a file succeeds, and its bytes are wrong."""
    disks = two_disks(root := tmp_path / "run")
    files = lose_bytes(monkeypatch, rank, 1)
    assert member_of_ranks(disks, PLAN, streamed=True) == "queued"
    assert len(files) == 1 and not chunks_of(root, PLAN)
    assert not [*(root / "models").glob(f"*-{rank:04d}.h5")]
    disks = [Bad(root, random.Random(rank)) for rank in range(2)]
    assert member_of_ranks(disks, PLAN, streamed=True) == "end"
    assert right(root, PLAN)


class WholeModel(OneRank):
    """Rank that reads all elements of a model."""

    part = Part(0, 1, 1, 0, 4)


@pytest.mark.parametrize("damaged", [0, 1])
def test_a_damaged_file_is_reported_by_its_name(tmp_path, damaged):
    disks = two_disks(root := tmp_path / "run")
    assert member_of_ranks(disks, PLAN, streamed=True) == "end"
    lines = []
    place = Place(RecordStore(root), PLAN, report=lines.append)
    version = place.refresh(0).last
    path = root / "models" / version.files[damaged].file
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    live = StreamedExchange(place, lambda: False, 0.01, WholeModel())
    assert live.open_model(version, None) is None
    (line,) = lines
    assert line.startswith(f"models/{path.name}: {path} is damaged")
    live.close()


@pytest.mark.parametrize("is_damaged", [False, True])
def test_an_error_of_reading_the_own_model_is_no_damage(tmp_path, monkeypatch, is_damaged):
    """A late peer is compared with this member's own model of the same age, read from its file."""
    disks = two_disks(root := tmp_path / "run")
    assert member_of_ranks(disks, PLAN, streamed=True) == "end"
    lines = []
    disk = RecordStore(root)
    disk.outages.report = lambda line: None
    place = Place(disk, PLAN, report=lines.append)
    peer, own, last = (place.record(0, number) for number in (6, 7, 8))
    live = StreamedExchange(place, lambda: False, 0.01, WholeModel())
    live._last_models = [(own.began, 7), (last.began, 8)]
    place.number, place.averaged, place.peers = 0, {}, lambda: iter([peer])
    if is_damaged:
        (root / "models" / own.files[0].file).write_bytes(b"")
    failed = fails(monkeypatch, own.files[1].file, errno.EIO)
    chosen = live.receive()
    if is_damaged:
        assert chosen is None and "has 0 bytes" in lines[0]
    else:
        assert failed and not lines and chosen.then is not None and chosen.late == 1
        chosen.close()
    live.close()


def test_a_missing_folder_of_models_is_created_again_by_rank_0(tmp_path):
    disks = two_disks(root := tmp_path / "run")
    (root / "models").rmdir()
    made = []
    disks[1].make = disks[1]._make = made.append
    assert member_of_ranks(disks, PLAN, streamed=True) == "end"
    assert not made and right(root, PLAN)


@pytest.mark.parametrize("by_pieces", [True, False])
def test_no_rank_fills_the_mount_point_of_an_unmounted_folder(tmp_path, by_pieces):
    """The folder is a mount point, which is empty while the file system is not mounted."""
    disks = two_disks(root := tmp_path / "run")
    rounds = []

    def unmount():
        rounds.append(threading.get_ident())
        is_last = rounds.count(threading.get_ident()) == 3 and threading.get_ident() != rounds[0]
        time.sleep(0.1)  # until the model of the previous round is published
        if not is_last:
            return
        root.rename(tmp_path / "elsewhere")
        root.mkdir()

        def mount_again():
            time.sleep(0.5)
            filled.extend(root.iterdir())
            while not done.is_set():
                try:
                    root.rmdir()
                    (tmp_path / "elsewhere").rename(root)
                except OSError:
                    time.sleep(0.01)
                else:
                    return

        thread = threading.Thread(target=mount_again)
        thread.start()
        threads.append(thread)

    filled: list = []
    threads: list = []
    done = threading.Event()
    try:
        assert member_of_ranks(disks, PLAN, sleep=unmount, streamed=by_pieces) == "end"
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not filled and right(root, PLAN)


def test_a_member_whose_unfinished_files_were_removed_joins_again(tmp_path, monkeypatch):
    """Other members have closed its place, and removed its files long after."""
    disks = two_disks(root := tmp_path / "run")
    entry = piecewise.WrittenPart.entry
    removed = []

    def slow(self):
        if self.path.name.endswith("-0001.h5") and not removed:
            removed.append(self.path)
            other = Place(RecordStore(root), TrainingPlan(8, 2, 0.0), report=lambda line: None)
            other.number = 7
            other.refresh(0)
            other.fence(0)
            self.path.unlink()
        return entry(self)

    monkeypatch.setattr(piecewise.WrittenPart, "entry", slow)
    assert member_of_ranks(disks, PLAN, streamed=True) == "end"
    assert Place(RecordStore(root), PLAN).refresh(0).closed.by == 7
    assert not any(disk.outages.given_up for disk in disks)
    assert right(root, PLAN)

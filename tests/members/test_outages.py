"""Members whose file system fails: errors say nothing about files, no chunk is trained twice."""

import errno
import os
import random
import re
import shutil
import tempfile
import time
import traceback
from pathlib import Path

import pytest

import mpigossip.members as package
from mpigossip.members import outages
from mpigossip.members.live import FolderExchange, StopRequested
from mpigossip.members.outages import FolderUnreachable, Outages, cause
from mpigossip.members.place import Place, TrainingPlan
from mpigossip.members.records import Closed, RecordStore, Round, Unusable, Version
from mpigossip.runs.members.replay import ReplayLog, wanted_of
from mpigossip.store import StoreError, checkpoint
from tests.cases import every, naming
from tests.members.faults import ERRORS, Faults, injected
from tests.members.storm import (
    Bad,
    Tiny,
    begin,
    chunks_of,
    member,
    replay,
    state,
    storm,
)

PLAN = TrainingPlan(8, 2, 60.0)
LASTING = [errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.ENOTDIR, errno.EMFILE]


def disk(root, limit_s=60.0, **ills) -> Bad:
    store = Bad(root, random.Random(0), **ills)
    store.outages.limit_s = limit_s
    return store


def place_of(store: Bad, plan=PLAN) -> Place:
    return Place(store, plan, report=lambda line: None)


def fails(monkeypatch, name, number, times=1, function="open") -> list[str]:
    """Let a function of `os` fail for paths that end with ``name``; return the failed paths."""
    real = getattr(os, function)
    failed = []

    def replaced(path, *more, **settings):
        if str(path).endswith(name) and len(failed) < times:
            failed.append(str(path))
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *more, **settings)

    monkeypatch.setattr(os, function, replaced)
    return failed


def trained(root, rounds, plan=PLAN) -> None:
    """Let one member publish rounds of its first claim, and stay."""
    live = FolderExchange(place_of(disk(root), plan), lambda: False)
    live.begin({})
    for count in range(rounds):
        live.chunk()
        live.send(state(Tiny().x, count + 1))
        live.written()
    live.close()


def right(root, plan) -> bool:
    counts = chunks_of(root, plan)
    once = all(counts[chunk] == 1 for chunk in range(plan.chunks))
    return once and replay(root, plan) == plan.chunks


# -- one operation ---------------------------------------------------------------------------------


def test_an_operation_is_repeated_after_an_error_of_the_file_system(tmp_path, monkeypatch):
    """A listed name is read after any error; one that was never listed may not exist."""
    begin(root := tmp_path / "run")
    store = disk(root)
    assert store.publish("END", b"content")
    for number in {*ERRORS, *LASTING, errno.ENOENT}:
        with monkeypatch.context() as patched:
            failed = fails(patched, "/END", number)
            assert store.read("END", listed=True) == b"content", errno.errorcode[number]
            assert failed
    assert store.read("other") is None


def test_an_error_that_lasts_ends_the_member_by_its_kind(tmp_path, monkeypatch):
    """Only the user can correct a missing permission; another host may reach the folder."""
    begin(root := tmp_path / "run")
    disk(root).publish("END", b"content")
    for number in {*ERRORS, *LASTING}:
        with monkeypatch.context() as patched:
            fails(patched, "/END", number, times=1 << 30)
            expected = StoreError if number in LASTING else FolderUnreachable
            with pytest.raises(
                expected, match=naming(f"{root}/END", " ".join(os.strerror(number).split()[:4]))
            ):
                disk(root, limit_s=0.0).read("END", listed=True)


def test_an_outage_is_reported_once_and_is_not_silence_of_others(tmp_path):
    lines: list[str] = []
    retries = Outages(lines.append, limit_s=60.0)
    calls = []

    def operation():
        calls.append(1)
        if len(calls) < 4:
            raise OSError(errno.EIO, "input/output error", "f")
        return len(calls)

    began = time.monotonic()
    assert retries.retry(operation, tmp_path) == 4
    assert lines == ["f: input/output error; trying again for 60 s"]
    assert 0.1 < retries.seconds() <= time.monotonic() - began
    place = Place(disk(tmp_path), PLAN, now=lambda: 100.0)
    place.disk.outages = retries
    assert place.now() == 100.0 - retries.seconds()


def test_a_member_that_was_asked_to_leave_does_not_wait_for_a_lease(tmp_path, monkeypatch):
    monkeypatch.setattr(outages, "START_S", 0.05)
    retries = Outages(lambda line: None, limit_s=600.0)
    retries.stopping = lambda: True

    def operation():
        raise OSError(errno.EIO, "input/output error")

    with pytest.raises(FolderUnreachable, match=naming("0.05 s")):
        retries.retry(operation, tmp_path)


def test_errors_of_content_have_no_cause():
    assert cause(OSError("Unable to open file (file signature not found)")) is None
    assert cause(StoreError("damaged")) is None
    error = StoreError("can't be written")
    error.__cause__ = OSError(errno.EIO, "input/output error")
    assert cause(error).errno == errno.EIO


def test_a_name_that_was_removed_is_no_outage(tmp_path):
    begin(root := tmp_path / "run")
    with pytest.raises(StoreError, match=naming("removed", "copy it back")):
        disk(root, limit_s=0.0).read("ledger/0000/000000.0", listed=True)


def test_a_folder_that_vanishes_is_not_empty(tmp_path):
    """An unmounted file system leaves an empty folder, or none."""
    begin(root := tmp_path / "run")
    store = disk(root, limit_s=0.0)
    assert store.publish("places/000000", b"") and store.names("places") == ["000000"]
    root.rename(tmp_path / "away")
    for ask in (
        lambda: store.names("places"),
        lambda: store.names("ledger/0000"),
        lambda: store.read("END"),
        lambda: store.publish("END", b""),
    ):
        with pytest.raises(FolderUnreachable):
            ask()
    assert not root.exists()


@pytest.mark.parametrize("gone", ["tmp", "closed"])
def test_empty_folders_that_a_copy_omitted_are_created_again(tmp_path, gone):
    begin(root := tmp_path / "run")
    (root / gone).rmdir()
    store = disk(root)
    assert store.publish("closed/000000.000000", b"") and not store.outages.seconds()


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path):
    begin(root := tmp_path / "run")
    (root / "tmp").rmdir()
    (root / "tmp").touch()
    with pytest.raises(StoreError, match=naming("run/tmp/", "Not a directory", "remove")):
        disk(root, limit_s=0.0).publish("END", b"")


def test_a_full_folder_is_named_with_a_remedy(tmp_path, monkeypatch):
    begin(root := tmp_path / "run")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match=naming("run/END", "No space left", "free space")):
        disk(root, limit_s=0.0).publish("END", b"")
    assert not [*(root / "tmp").iterdir()]


def test_files_that_could_not_be_removed_are_removed_later(tmp_path, monkeypatch):
    begin(root := tmp_path / "run")
    (root / "models/old.h5").touch()
    fails(monkeypatch, "old.h5", errno.EIO, function="unlink")
    store = disk(root)
    store.remove("models/old.h5")
    assert (root / "models/old.h5").exists()
    store.remove("models/other.h5")
    assert not (root / "models/old.h5").exists()


def test_a_file_that_can_not_be_removed_does_not_prevent_other_removals(tmp_path, monkeypatch):
    begin(root := tmp_path / "run")
    names = ["models/old.h5", "models/next.h5", "models/last.h5"]
    fails(monkeypatch, "old.h5", errno.EIO, times=1 << 30, function="unlink")
    store = disk(root)
    for name in names:
        (root / name).touch()
        store.remove(name)
    assert [(root / name).exists() for name in names] == [True, False, False]


def test_a_mount_point_without_its_folder_is_not_filled(tmp_path):
    begin(root := tmp_path / "run")
    store = disk(root, limit_s=0.0)
    assert store.publish("places/000000", b"") and store.names("places")
    root.rename(tmp_path / "away")
    root.mkdir()
    with pytest.raises(FolderUnreachable, match=naming("mount it again")):
        store.make("logs")
    store.outages.given_up = False
    with pytest.raises(FolderUnreachable):
        store.publish("END", b"")
    assert not [*root.iterdir()]
    root.rmdir()
    shutil.copytree(
        tmp_path / "away", root
    )  # another inode, like a file system that is mounted again
    store.outages.given_up = False
    store.make("logs")
    assert (root / "logs").is_dir()


def test_a_folder_whose_look_up_fails_once_is_still_a_folder(tmp_path, monkeypatch):
    begin(root := tmp_path / "run")
    store = disk(root)
    for function in ("stat", "lstat"):
        with monkeypatch.context() as patch:
            fails(patch, "run/chain", errno.ENOENT, function=function)
            store.make("chain/000000")
    (root / "file").touch()
    with pytest.raises(StoreError, match=naming("run/file", "not a folder")):
        store.make("file/000000")


def test_names_that_may_appear_later_are_listed_and_not_looked_up(tmp_path, monkeypatch):
    """NFS remembers for half a minute that a name wasn't there."""
    begin(root := tmp_path / "run")
    paths: list[str] = []
    for function in ("open", "stat", "lstat", "access"):
        real = getattr(os, function)

        def watched(path, *more, real=real, **settings):
            paths.append(str(path))
            return real(path, *more, **settings)

        monkeypatch.setattr(os, function, watched)
    place = place_of(disk(root))
    live = FolderExchange(place, lambda: False, poll_s=0.0)
    assert place.ended() is None and not live.stopping()
    assert not [path for path in paths if Path(path).name in ("END", "STOP")]
    (root / "STOP").touch()
    place.number = 0
    place.end([])
    assert place.ended().versions == () and live.stopping()
    live.close()


# -- what follows from a record --------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOENT, every(errno.EACCES), errno.ENOTCONN])
def test_a_newest_record_that_can_not_be_read_advances_nothing(tmp_path, monkeypatch, number):
    begin(root := tmp_path / "run")
    trained(root, 2)
    other = place_of(disk(root, limit_s=0.0))
    with monkeypatch.context() as patched:
        fails(patched, "chain/000000/000002", number)
        with pytest.raises((StoreError, FolderUnreachable)):
            other.refresh(0)
    assert other.chains[0].next == 0
    assert other.refresh(0).rounds == 2


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, every(errno.ENOTCONN)])
@pytest.mark.parametrize("name", ["ledger/0000/00000?.0", "chain/000000/000001"])
def test_no_claim_is_void_because_a_name_can_not_be_read(tmp_path, monkeypatch, number, name):
    """A claim or a first round that can't be read does not make the claim void."""
    begin(root := tmp_path / "run")
    trained(root, 2, TrainingPlan(9, 3, 60.0))
    (claim,) = (root / "ledger/0000").glob("*.0")
    other = place_of(disk(root), plan=TrainingPlan(3 * (1 + int(claim.stem)), 3, 60.0))
    other.join()
    failed = fails(monkeypatch, name.replace("00000?", claim.stem), number)
    other.ledger._first = int(claim.stem)  # the other blocks are not claimed yet
    assert other.ledger.claim(other) is None
    assert failed
    assert sorted(path.name for path in (root / "ledger/0000").iterdir()) == [claim.name]


def test_a_link_whose_name_can_not_be_read_is_decided_later(tmp_path, monkeypatch):
    """The reply to the link was lost, but the file is this member's."""
    begin(root := tmp_path / "run")
    store = disk(root, lost=1.0)
    failed = fails(monkeypatch, "/END", errno.EACCES)
    assert store.publish("END", b"content") and failed


@pytest.mark.parametrize(
    ("number", "function"),
    [(errno.EIO, "open"), (errno.ENOENT, "lstat"), every(errno.ESTALE, "open")],
)
def test_an_error_of_the_file_system_omits_no_model_from_the_final_average(
    tmp_path, monkeypatch, number, function
):
    begin(root := tmp_path / "run")
    trained(root, 2)
    place = place_of(disk(root))
    versions = [place.record(0, number) for number in (1, 2)]
    live = FolderExchange(place, lambda: False)
    with monkeypatch.context() as patch:
        failed = fails(patch, versions[1].file, number, function=function)
        assert live.readable(versions, 2)[0] == versions and failed
    place.disk.outages.limit_s = 0.0
    with monkeypatch.context() as patch:
        fails(patch, versions[1].file, number, times=1 << 30, function=function)
        with pytest.raises(FolderUnreachable):
            live.readable(versions, 2)
    place.disk.outages.given_up = False
    (root / "models" / versions[1].file).unlink()
    assert live.readable(versions, 2)[0] == versions[:1]
    live.close()


def test_invalid_content_is_unusable(tmp_path):
    begin(root := tmp_path / "run")
    (root / "link").symlink_to("/etc/passwd")
    (root / "folder").mkdir()
    for name in ("link", "folder"):
        with pytest.raises(Unusable):
            disk(root, limit_s=0.0).read(name, listed=True)


def test_a_file_of_another_user_does_not_void_a_claim(tmp_path, monkeypatch):
    begin(root := tmp_path / "run")
    disk(root).publish("END", b"content")
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    with pytest.raises(StoreError, match=naming("user", "--shared")):
        disk(root, limit_s=0.0).read("END", listed=True)
    assert disk(root, limit_s=0.0, shared=True).read("END") == b"content"


# -- members ---------------------------------------------------------------------------------------


def outage(seconds, number=errno.ENOTCONN) -> Faults:
    faults = Faults(0, 1.0, rate=0.0)
    faults.operation = "all"
    faults.number = number
    faults.until = time.monotonic() + seconds
    return faults


@pytest.mark.parametrize("number", [errno.ENOTCONN, every(errno.EIO)])
def test_a_member_outlasts_an_outage_that_is_shorter_than_a_lease(tmp_path, number):
    begin(root := tmp_path / "run")
    lines: list[str] = []
    store = Bad(root, random.Random(1), faults=outage(0.3, number))
    store.outages.report = lines.append
    with injected():
        assert member(store, PLAN) == "end"
    assert len(lines) == 1 and os.strerror(number) in lines[0]
    assert right(root, PLAN)


@pytest.mark.parametrize(
    ("number", "ended"), [(errno.ENOTCONN, "queued"), (errno.EACCES, "failed")]
)
def test_a_longer_outage_ends_the_member_by_the_error(tmp_path, number, ended):
    """A member that is "queued" ends with the code on which batch scripts queue it again."""
    begin(root := tmp_path / "run")
    chance = random.Random(1)
    plan = TrainingPlan(8, 2, 0.1)
    store = Bad(root, chance)
    with injected():
        how = member(store, plan, sleep=lambda: setattr(store, "faults", outage(60.0, number)))
    assert how == ended and FolderUnreachable.code == 75
    assert member(Bad(root, chance), plan) == "end"
    assert right(root, plan)


def test_a_member_whose_unfinished_model_was_removed_joins_again(tmp_path, monkeypatch):
    """Others have closed its place, and removed its files long after."""
    begin(root := tmp_path / "run")
    write = checkpoint.write_state

    def slow(path, node, state):
        if node == 0:
            other = place_of(disk(root), TrainingPlan(8, 2, 0.0))
            other.number = 7
            other.refresh(0)
            other.fence(0)
            raise StoreError(f"{path} can't be written") from FileNotFoundError(2, "No such file")
        return write(path, node, state)

    monkeypatch.setattr(checkpoint, "write_state", slow)
    assert member(Bad(root, random.Random(1)), PLAN) == "end"
    assert Place(RecordStore(root), PLAN).refresh(0).closed.by == 7
    assert right(root, PLAN)


def test_a_missing_folder_of_models_is_created_again(tmp_path):
    begin(root := tmp_path / "run")
    (root / "models").rmdir()
    assert member(Bad(root, random.Random(1)), PLAN) == "end"


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become two other users")
@pytest.mark.parametrize("made", [(), ("ledger/0000", "chain/000000")])
def test_two_users_with_any_umask_train_each_chunk_once(made):
    """The first user leaves after three chunks; its umask hides its files from all others.

    ``made``: folders that exist already, so that the umask hides files only.
    """
    plan = TrainingPlan(8, 2, 0.5)
    folder = Path(tempfile.mkdtemp())

    def first():
        rounds = iter(range(3))

        def leave():
            if next(rounds, None) is None:
                raise StopRequested

        store = Bad(root, random.Random(1), shared=True)
        assert member(store, plan, sleep=leave) == "left"

    def second():
        store = Bad(root, random.Random(2), shared=True)
        assert member(store, plan) == "end"

    try:
        begin(root := folder / "run")
        for name in made:
            (root / name).mkdir()
        for path in (folder, root, *root.iterdir(), *root.glob("*/*")):
            path.chmod(0o777)
        assert as_user(1001, 0o077, first) == 0
        assert as_user(1002, 0o022, second) == 0
        assert right(root, plan)
        modes = {oct(path.stat().st_mode & 0o777) for path in root.rglob("*/*") if path.is_dir()}
        assert modes == {"0o777"}
    finally:
        shutil.rmtree(folder)


def as_user(user, umask, work) -> int:
    """Run a function in a process of another user; return its exit code."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 1
    try:
        os.setgid(user)
        os.setuid(user)
        os.umask(umask)
        work()
        code = 0
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        os._exit(code)


@pytest.mark.parametrize("seed", [2, every(4)])
def test_storms_with_errors_of_the_file_system(tmp_path, seed):
    """Each operation sometimes fails: once, for half a lease, or for three leases."""
    ends = storm(tmp_path / "run", seed, chunks=60, rate=0.01, stale_s=0.6, lost=0.2, full=0.02)
    assert ends["alive"] == 0 and ends["end"] and not ends.get("traceback")
    assert right(tmp_path / "run", TrainingPlan(60, 4, 0.3))


# -- replay, and the page --------------------------------------------------------------------------


def test_replay_rejects_a_listing_that_lacks_rounds(tmp_path, monkeypatch):
    begin(root := tmp_path / "run")
    trained(root, 1, TrainingPlan(8, 2, 0.02))
    lines: list[str] = []
    wanted_of(ReplayLog(Place(RecordStore(root), PLAN, report=lines.append)), None, None)
    assert lines == ["the training has not ended: 1 of 8 chunks are trained"]
    assert member(Bad(root, random.Random(1)), TrainingPlan(8, 2, 0.02)) == "end"
    assert len(wanted_of(ReplayLog(place_of(disk(root))), None, None)) == 8
    names = RecordStore.names
    monkeypatch.setattr(
        RecordStore, "names", lambda *of: names(*of)[: 2 if "chain/" in of[1] else None]
    )
    script = ReplayLog(place_of(disk(root)))
    with pytest.raises(StoreError, match=naming("8 chunks", "missing")):
        wanted_of(script, None, None)
    assert wanted_of(script, 0, None)  # these rounds exist


def test_replay_needs_no_record_of_a_place_that_trained_nothing(tmp_path):
    begin(root := tmp_path / "run")
    assert member(Bad(root, random.Random(1)), PLAN) == "end"
    dead = place_of(disk(root))
    dead.join()
    (root / "chain/000001/000000").touch()
    closed = Closed(place=1, round=1, why="silent", by=0)
    (root / "chain/000001/000001").write_bytes(closed.encode())
    script = ReplayLog(place_of(disk(root)))
    assert Version(1, 0) in script.rounds
    assert len(wanted_of(script, None, None)) == PLAN.chunks


def test_replay_rejects_a_damaged_round(tmp_path):
    begin(root := tmp_path / "run")
    assert member(Bad(root, random.Random(1)), PLAN) == "end"
    (root / "chain/000000/000003").chmod(0o644)
    (root / "chain/000000/000003").write_bytes(b"")
    with pytest.raises(StoreError, match=naming("chain/000000/000003", "damaged")):
        wanted_of(ReplayLog(place_of(disk(root))), None, None)


def test_replay_rejects_a_chunk_that_was_trained_twice(tmp_path):
    begin(root := tmp_path / "run")
    assert member(Bad(root, random.Random(1)), PLAN) == "end"
    place = place_of(disk(root))
    last = place.refresh(0).last
    twice = Round(**vars(last) | {"round": last.round + 1, "chunk": place.record(0, 1).chunk})
    (root / f"chain/000000/{twice.round:06d}").write_bytes(twice.encode())
    with pytest.raises(StoreError, match=naming("more than once", "chain/000000/000001")):
        wanted_of(ReplayLog(place_of(disk(root))), None, None)


def test_the_documented_tree_has_the_names_of_the_files(tmp_path):
    begin(root := tmp_path / "run")
    rounds = iter(range(3))

    def leave():
        if next(rounds, None) is None:
            raise StopRequested

    assert member(Bad(root, random.Random(1)), PLAN, sleep=leave) == "left"
    assert member(Bad(root, random.Random(1)), PLAN) == "end"
    files = [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]
    tree = re.findall(r"^    (\S+)(?: or \S+)?  ", package.__doc__, re.M)
    assert len(tree) == 7
    for name in tree[1:]:  # the job is written by a command
        pattern = re.sub(r"\d", r"\\d", re.escape(name)).replace("…", r"[0-9a-f]{16}")
        assert any(re.fullmatch(pattern, file) for file in files), name

"""The protocol of members that join and leave, with models of four numbers on faulty disks."""

import contextlib
import json
import os
import random
import re
import threading
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpigossip.members import live as live_models
from mpigossip.members import place as places
from mpigossip.members.live import (
    FolderExchange,
    StopRequested,
    correct_for_age,
    layout,
    rounds_late,
)
from mpigossip.members.pace import chunks_of_round, peer_weight
from mpigossip.members.place import Place, TrainingPlan, record_name
from mpigossip.members.records import RecordStore, Round, Unusable, parse
from mpigossip.store import StoreError, checkpoint, node_file
from tests.cases import every, naming
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

ILLS = {"stale_s": 0.6, "lost": 0.2, "full": 0.02}
STORM = TrainingPlan(120, 4, 0.3)


def right(root, plan) -> bool:
    """Return whether each chunk is in exactly one published round, and replay repeats them all."""
    counts = chunks_of(root, plan)
    once = all(counts[chunk] == 1 for chunk in range(plan.chunks))
    return once and replay(root, plan) == plan.chunks


@pytest.mark.parametrize("seed", [1, every(2), every(3)])
def test_storms(tmp_path, seed):
    """Members are killed; listings are stale, replies lost, disks full, clocks wrong."""
    ends = storm(tmp_path / "run", seed, **ILLS)
    assert ends["alive"] == 0 and ends["end"]
    assert right(tmp_path / "run", STORM)


@pytest.mark.parametrize("step", [7, every(1)])
def test_a_kill_at_every_operation(tmp_path, step):
    """Another member finishes the work of a member that was killed at any operation."""
    plan = TrainingPlan(6, 2, 0.02)
    kills = 0
    while True:
        root = tmp_path / str(kills)
        begin(root)
        how = member(Bad(root, random.Random(1), kill_at=kills), plan)
        assert member(Bad(root, random.Random(2)), plan) == "end", kills
        assert right(root, plan), kills
        if how == "end":
            break
        kills += step
    assert kills > 50


@pytest.mark.parametrize("seed", [1, every(2)])
def test_storms_of_unequal_members(tmp_path, seed):
    """Rounds have one to four chunks; a claim may end in the middle of a block."""
    plan = STORM._replace(longest=4)
    ends = storm(tmp_path / "run", seed, longest=4, **ILLS)
    assert ends["alive"] == 0 and ends["end"]
    assert right(tmp_path / "run", plan)


def test_the_length_of_a_round_follows_speed():
    assert chunks_of_round(0.0, [4.0], 8) == 1  # the own speed is unknown
    assert chunks_of_round(1.0, [], 8) == 1
    assert chunks_of_round(1.0, [1.4, 0.0], 8) == 1
    assert chunks_of_round(1.0, [4.1, 2.0], 8) == 4
    assert chunks_of_round(4.1, [1.0, 2.0], 8) == 1
    assert chunks_of_round(1.0, [100.0], 8) == 8


def test_averages_tend_to_the_mean_that_is_weighted_by_chunks():
    chunks = [1, 4, 4, 4]
    x = np.array([1.0, 0.0, 0.0, 0.0])
    for turn in range(200):
        peers = [(i + (1 << turn % 2)) % 4 for i in range(4)]
        weights = [peer_weight(chunks[i], chunks[j]) for i, j in enumerate(peers)]
        x = np.array(
            [(1 - w) * x[i] + w * x[j] for i, j, w in zip(range(4), peers, weights, strict=True)]
        )
    assert np.ptp(x) < 1e-12
    assert peer_weight(3, 3) == 0.5


def renamed(disk, temporary, path):
    """Rename instead of linking: an existing file of this name is overwritten."""
    Path(temporary).replace(path)


def torn(root, stop):
    """Change a byte in one of four models, like a faulty disk."""
    chance = random.Random(0)
    seen = set()
    while not stop.wait(0.005):
        for path in set((root / "models").glob("*.h5")) - seen:
            seen.add(path)
            with contextlib.suppress(Exception):  # a file that is written or removed meanwhile
                with h5py.File(path) as file:
                    offset = file["parameters"].id.get_offset()
                if chance.random() < 0.25:
                    with path.open("r+b") as raw:
                        raw.seek(offset + 2)
                        raw.write(b"\x11")


def damaged_storm(root, seed) -> bool:
    stop = threading.Event()
    thread = threading.Thread(target=torn, args=(root, stop))
    thread.start()
    try:
        storm(root, seed, **ILLS)
    finally:
        stop.set()
        thread.join()
    with contextlib.suppress(Exception):
        return right(root, STORM)
    return False


def test_damaged_models_are_ignored(tmp_path):
    assert damaged_storm(tmp_path / "run", 1)


def held_back(self, place):
    """Close a silent place without a record, so that it does not notice."""
    chain = self.chains[place]
    chain.closed = places.Closed(place=place, round=chain.next, why="silent", by=self.number)


@pytest.mark.parametrize("control", ["checksum", every("rename"), every("fence")])
def test_controls_fail(tmp_path, monkeypatch, control):
    """Without link, checksum or fence, most storms fail."""
    if control == "rename":
        monkeypatch.setattr(RecordStore, "link", renamed)
    elif control == "checksum":
        monkeypatch.setattr(node_file, "_check_bytes", lambda *_: None)
        monkeypatch.setattr(live_models, "digest", lambda _: "0" * 64)
    else:
        monkeypatch.setattr(Place, "fence", held_back)
    failures = 0
    for seed in range(4):
        if failures == 2:
            break
        root = tmp_path / str(seed)
        if control == "checksum":
            failures += not damaged_storm(root, seed)
            continue
        with contextlib.suppress(Exception):
            ends = storm(root, seed, chunks=60, **ILLS)
            failures -= not ends["alive"] and right(root, TrainingPlan(60, 4, 0.3))
        failures += 1
    assert failures >= 2


def operations_a_round(root, members: int) -> float:
    """Return the number of file operations per round and member."""
    begin(root)
    plan = TrainingPlan(members * 64, 16, 60.0)
    joined = []
    for seed in range(members):
        disk = Bad(root, random.Random(seed))
        place = Place(disk, plan, chance=disk.chance)
        live = FolderExchange(place, lambda: False)
        live.begin({})
        joined.append((place, live))
    for count in range(32):
        for _, live in joined:
            live.chunk()
            live.send(state(Tiny().x, count + 1))
            live.receive()
            live.written()
        if count == 15:  # the claims of 16 rounds
            first = sum(place.disk.operations for place, _ in joined)
    for _, live in joined:
        live.close()
    return (sum(place.disk.operations for place, _ in joined) - first) / 16 / members


def test_operations_do_not_grow_with_members(tmp_path):
    few, many = (operations_a_round(tmp_path / str(m), m) for m in (2, 12))
    assert many < 1.1 * few and few < 40, (few, many)


def test_only_records_claims_and_models_are_flushed(tmp_path, monkeypatch):
    """A record or a claim needs two calls of fsync: for its content and its folder; a model, one.

    In each round, a temporary file and the oldest of three models are removed.
    """
    counts = Counter()
    fsync, unlink = os.fsync, Path.unlink

    def counted(name, call, *given):
        counts[name] += 1
        return call(*given)

    monkeypatch.setattr(os, "fsync", partial(counted, "fsync", fsync))
    monkeypatch.setattr(Path, "unlink", lambda *given: counted("unlink", unlink, *given))
    begin(root := tmp_path / "run")
    place = Place(RecordStore(root), TrainingPlan(64, 16, 60.0))
    live = FolderExchange(place, lambda: False)
    live.begin({})
    for count in range(32):
        if count == 16:
            counts.clear()  # a claim of 16 rounds follows
        live.chunk()
        live.send(state(Tiny().x, count + 1))
        live.receive()
        live.written()
    live.close()
    assert counts == {"fsync": 16 * 3 + 2, "unlink": 16 * 2 + 1}


def test_late_models_do_not_slow_training(tmp_path):
    """Two members add 1 per round; the first one always reads the model of the previous round."""
    begin(root := tmp_path / "run")
    plan = TrainingPlan(64, 32, 60.0)
    x = [np.zeros(4, np.float32) for _ in range(2)]
    lives = []
    for _ in x:
        lives.append(FolderExchange(Place(RecordStore(root), plan), lambda: False))
        lives[-1].begin({})
    for count in range(1, 21):
        for i, live in enumerate(lives):
            live.chunk()
            x[i] = x[i] + 1
            live.send(state(x[i], count))
            live.written()
            peer = live.receive()
            assert (peer is None) == (count == 1 and i == 0)
            x[i] = x[i] if peer is None else (x[i] + peer.parameters) / 2
    for live in lives:
        live.close()
    assert [model.tolist() for model in x] == [[20.0] * 4] * 2


def test_late_differences_are_corrected_once():
    new, now, then = (state(np.float32(x), 1) for x in ([7, 8], [4, 9], [2, 3]))
    ages = [3, 4, 7]
    assert [rounds_late(ages, age) for age in (9, 7, 5, 3, 1)] == [0, 0, 1, 2, 2]
    assert rounds_late([3], 1) == rounds_late([], 1) == 0  # earlier rounds are unknown
    assert correct_for_age(new, now, then, 0) is new
    assert correct_for_age(new, now, then, 1).parameters.tolist() == [4 + 5 / 2, 9 + 5 / 2]
    assert correct_for_age(new, now, then, 2).parameters.tolist() == pytest.approx(
        [4 + 5 / 3, 9 + 5 / 3]
    )


def test_models_of_places_that_closed_long_ago_are_removed(tmp_path):
    """Members that leave again and again leave no more than a bounded number of models."""
    begin(root := tmp_path / "run")
    plan = TrainingPlan(200, 2, 60.0)
    maximum = 0
    for seed in range(60):

        def leave(rounds=iter(range(5))):  # noqa: B008
            if next(rounds, None) is None:
                raise StopRequested

        how = member(Bad(root, random.Random(seed)), plan, sleep=leave)
        maximum = max(maximum, len(list((root / "models").iterdir())))
        if how == "end":
            break
    assert how == "end" and len(list((root / "places").iterdir())) > 15
    assert maximum < 40
    assert right(root, plan)


def test_a_round_whose_model_could_not_be_written_is_closed_by_its_own_name(tmp_path, monkeypatch):
    begin(root := tmp_path / "run")
    plan = TrainingPlan(8, 2, 60.0)
    write = checkpoint.write_state

    def full(path, node, state):
        if state.numbers["index"] == 3:
            raise StoreError("no space left")
        return write(path, node, state)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "write_state", full)
        assert member(Bad(root, random.Random(1)), plan) == "failed"
    assert Place(RecordStore(root), plan).refresh(0).closed.round == 3
    assert member(Bad(root, random.Random(2)), plan) == "end"
    assert right(root, plan)


def test_a_wait_for_the_chunks_of_a_killed_member_is_reported_once(tmp_path):
    """The clock runs 30 times as fast, so that the lease ends after two seconds."""
    begin(root := tmp_path / "run")
    plan = TrainingPlan(8, 2, 60.0)
    lines = []
    assert member(Bad(root, random.Random(1), kill_at=60), plan) == "killed"
    disk = RecordStore(root)
    place = Place(disk, plan, now=lambda: 30 * time.monotonic(), report=lines.append)
    live = FolderExchange(place, lambda: False, 0.01)
    tiny = Tiny()
    tiny.begin(live.begin({}))
    tiny.train(live)
    live.close()
    assert place.ended() and right(root, plan)
    wait, closing = lines
    silent_s, limit_s = re.findall(r"(\d+) s", wait)
    assert re.search(naming("all chunks", "place 0"), wait)
    assert 5 <= int(silent_s) < 60 == int(limit_s)
    assert re.search(naming("place 0", "lease", "closed"), closing)


def test_short_waits_for_chunks_are_not_reported(tmp_path):
    begin(root := tmp_path / "run")
    plan = TrainingPlan(8, 2, 60.0)
    assert member(Bad(root, random.Random(1), kill_at=60), plan) == "killed"
    clock = [0.0]
    lines = []
    place = Place(RecordStore(root), plan, now=lambda: clock[0], report=lines.append)
    place.join()
    place.start([], {})
    while place.chunk() is not None:  # claim all blocks
        place.remaining = 0
    place.report_wait()
    clock[0] = 4.9
    assert place.chunk() is None
    place.report_wait()
    assert lines == []
    clock[0] = 55.0
    assert place.chunk() is None
    place.report_wait()
    place.report_wait()
    assert len(lines) == 1 and re.search(naming("place 0", "silent", "55 s"), lines[0])


def test_a_member_without_a_readable_model_leaves_a_complete_chain(tmp_path):
    """The member has a place but no first record, so its chain is only the closing record."""
    begin(root := tmp_path / "run")
    plan = TrainingPlan(8, 2, 60.0)
    assert member(Bad(root, random.Random(1), kill_at=60), plan) == "killed"
    for path in (root / "models").iterdir():
        path.write_bytes(b"")
    assert member(Bad(root, random.Random(2)), plan) == "failed"
    chain = Place(RecordStore(root), plan).refresh(1)
    assert chain.next == 1 and chain.closed.why == "left"
    assert sum(chunks_of(root, plan).values()) > 0


def test_earlier_models_are_used_if_the_newest_are_damaged(tmp_path):
    begin(root := tmp_path / "run")
    plan = TrainingPlan(8, 2, 60.0)
    assert member(Bad(root, random.Random(1), kill_at=90), plan) == "killed"
    place = Place(RecordStore(root), plan, report=lambda line: None)
    last = place.refresh(0).last
    (root / "models" / last.file).write_bytes(b"")
    live = FolderExchange(place, lambda: False, 0.01)
    live.begin({})
    live.close()
    assert place.record(1, 0).inputs == ((0, last.round - 1),)


def test_an_end_without_models_is_never_written(tmp_path):
    """If chain/ was purged, an END without models could not be undone."""
    begin(root := tmp_path / "run")
    with pytest.raises(StoreError, match=naming("chain/", "no record")):
        Place(RecordStore(root), TrainingPlan(8, 2, 60.0)).endings()


def test_models_with_other_parameters_are_ignored(tmp_path):
    """The models and their records are valid, but have other parameters."""
    begin(root := tmp_path / "run")
    plan = TrainingPlan(8, 2, 60.0)
    lines = []
    assert member(Bad(root, random.Random(1), kill_at=90), plan) == "killed"
    place = Place(RecordStore(root), plan, report=lines.append)
    live = FolderExchange(place, lambda: False, 0.01)
    with pytest.raises(StoreError, match=naming("none of 1 models")):
        live.begin({"layout": layout(["y"], [[4]])})
    assert "other names or shapes" in lines[0]
    assert len(live.begin({"layout": layout(["x"], [[4]])})) == 1
    live.close()


@pytest.mark.parametrize("bad", ["cut", "huge", "link", "folder", "foreign"])
def test_invalid_records_are_reported_once_and_ignored(tmp_path, bad):
    begin(root := tmp_path / "run")
    plan = TrainingPlan(8, 2, 0.02)
    lines = []
    assert member(Bad(root, random.Random(1), kill_at=60), plan) == "killed"
    chain = root / "chain/000000"
    newest = sorted(chain.iterdir())[-1]
    content = newest.read_bytes()
    newest.unlink()
    if bad == "cut":
        newest.write_bytes(content[:-5])
    elif bad == "huge":
        newest.write_bytes(b"[" * (2 << 20))
    elif bad == "link":
        newest.symlink_to("/etc/passwd")
    elif bad == "folder":
        newest.mkdir()
    else:
        newest.write_bytes(content.replace(b'"place": 0', b'"place": 7'))
    place = Place(RecordStore(root), plan, chance=random.Random(2), report=lines.append)
    live = FolderExchange(place, lambda: False, 0.01)
    tiny = Tiny()
    tiny.begin(live.begin({}))
    tiny.train(live)
    live.close()
    assert place.ended()
    assert sum(newest.name in line for line in lines) == 1 and "is ignored" in lines[0]
    counts = chunks_of_readable(root, plan)
    assert all(counts.get(chunk, 0) <= 1 for chunk in range(plan.chunks))


def chunks_of_readable(root, plan):
    place = Place(RecordStore(root), plan, report=lambda line: None)
    counts = {}
    for number in place.numbers("places"):
        for index in range(place.refresh(number).next):
            record = place.record(number, index)
            if isinstance(record, Round):
                counts[record.chunk] = counts.get(record.chunk, 0) + 1
    return counts


def test_a_member_with_a_stale_listing_waits_for_the_models_that_replaced_those_it_sees(tmp_path):
    """The models that a client listed before it was cut off have been removed meanwhile."""
    begin(root := tmp_path / "run")
    plan = TrainingPlan(400, 4, 20.0)
    disk = Bad(root, random.Random(1))
    assert member(Bad(root, random.Random(1), kill_at=60), plan) == "killed"
    place = Place(disk, plan, report=lambda line: None)
    live = FolderExchange(place, lambda: False, 0.01)
    newest = place.beginnings()
    stale = place.before(newest)
    for path in (root / "models").iterdir():
        if path.name != newest[0].file:
            path.unlink()
    began = time.monotonic()
    late = 0.2
    assert (
        live._current(lambda: stale if time.monotonic() < began + late else newest, 8)[0] == newest
    )
    assert time.monotonic() > began + late
    live.close()


def test_records_of_members_with_equal_rounds_have_no_new_fields():
    """Earlier versions reject fields that they do not know; their own records can be read."""
    text = (
        '{"kind": "round", "place": 3, "nonce": "0", "round": 2, "chunk": 1, '
        '"claim": "ledger/0000/000000.0", "peer": [[1, 2]], "age": 2, "progress": 2, '
        '"promise": 60.0, "step": 8, '
        '"file": "000003-0123456789abcdef.h5", "bytes": 10, "checksum": "0", "parameters": 4, '
        '"digest": "0"}'
    )
    record = parse(text.encode(), "r", Round)
    assert (record.chunks, record.chunk_s, record.began) == (1, 0.0, 1)
    assert json.loads(record.encode()) == json.loads(text)
    longer = replace(record, chunks=3, chunk_s=0.5)
    assert parse(longer.encode(), "r", Round) == longer
    with pytest.raises(Unusable, match=naming("no chunk")):
        parse(replace(record, chunks=0).encode(), "r", Round)


def test_a_round_longer_than_the_plan_allows_is_unusable(tmp_path):
    """Its model would replace those with which it is averaged."""
    begin(tmp_path / "run")
    plan = TrainingPlan(8, 2, 60.0)
    assert member(Bad(tmp_path / "run", random.Random(0)), plan) == "end"
    path = tmp_path / "run" / record_name(0, 1)
    content = parse(path.read_bytes(), "r", Round)
    path.chmod(0o600)
    path.write_bytes(replace(content, chunks=1 << 40).encode())
    lines = []
    place = Place(RecordStore(tmp_path / "run"), plan, report=lines.append)
    assert not isinstance(place.record(0, 1), Round)
    assert "more than 1 chunk" in lines[0]

"""Checkpoints: contents, digests, damage, pruning, and errors of the disk."""

import argparse
import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpigossip.commands import files as commands
from mpigossip.store import StoreError, checkpoint, direct
from mpigossip.store import manifest as manifests
from mpigossip.store.checkpoint import NodeState
from mpigossip.store.hdf5 import reading
from tests.cases import naming, on_each
from tests.launch import warmed
from tests.store.examples import JOB, flip_bit, node_state, write_checkpoint

pytestmark = pytest.mark.usefixtures("warm")


def same(a, b):
    assert (a.names, a.shapes, a.numbers) == (b.names, b.shapes, b.numbers)
    assert a.arrays.keys() == b.arrays.keys()
    for one, two in [(a.parameters, b.parameters), *((a.arrays[k], b.arrays[k]) for k in a.arrays)]:
        assert one.dtype == two.dtype and one.shape == two.shape and (one == two).all()


def expected_digest(step, n=3, size=1000):
    return hashlib.sha256(
        b"".join(node_state(i, step, size).parameters.tobytes() for i in range(n))
    ).hexdigest()


def test_round_trip(tmp_path):
    path = write_checkpoint(tmp_path, 1200)
    assert path == tmp_path / "checkpoints/step-00001200" == checkpoint.folder(tmp_path, 1200)
    assert {p.name for p in path.iterdir()} == {
        "checkpoint.h5",
        *(f"node-000{i}.h5" for i in range(3)),
    }
    for node in range(3):
        same(checkpoint.read_node(path, node), node_state(node, 1200))
    manifest = checkpoint.read_manifest(path)
    assert (manifest.step, manifest.n, manifest.job) == (1200, 3, JOB)
    assert manifest.meta == {"graph": "ring", "loss": 0.5}
    assert [e.file for e in manifest.entries] == [f"node-000{i}.h5" for i in range(3)]
    assert checkpoint.verify(path) == []
    assert checkpoint.latest(tmp_path) == path and checkpoint.steps(tmp_path) == [1200]


def test_the_manifest_is_read_once_for_all_nodes(tmp_path, monkeypatch):
    """Reading the manifest, whose length grows with n, for each node would take n² time."""
    path = write_checkpoint(tmp_path, 3)
    reads = []
    read = checkpoint.read_manifest

    def counting(path):
        reads.append(path)
        return read(path)

    monkeypatch.setattr(checkpoint, "read_manifest", counting)
    assert checkpoint.verify(path) == [] and len(reads) == 1
    manifest = checkpoint.read_manifest(path)
    checkpoint.average(path, manifest)
    same(checkpoint.read_node(path, 2, manifest), node_state(2, 3))
    assert len(reads) == 2


def by_slot(node, step=0):
    """Yield the state of a node in three slots; the shard of the last slot is padding only."""
    full = node_state(node, step)
    ends = (0, 600, 1006, 1006)
    for slot, (begin, end) in enumerate(zip(ends, ends[1:], strict=False)):
        pieces = {"state/momentum": full.arrays["state/momentum"][begin:end]}
        rest = {k: v for k, v in full.arrays.items() if k not in pieces}
        arrays = {k: v for index, (k, v) in enumerate(rest.items()) if index % 3 == slot}
        parameters = full.parameters[begin:end]
        yield NodeState(parameters, full.names, full.shapes, arrays, full.numbers, slot, pieces)


def write_by_slot(run, step, n=2):
    temporary = checkpoint.begin(run, step)
    entries = [
        checkpoint.write_node(temporary, node, part)
        for node in reversed(range(n))
        for part in by_slot(node, step)
    ]
    return checkpoint.commit(temporary, run, step, entries, JOB, {"slots": 3})


def test_files_of_slots_are_joined_to_nodes(tmp_path):
    path = write_by_slot(tmp_path, 7)
    assert sorted(p.name for p in path.iterdir())[1:] == [
        f"node-000{node}-000{slot}.h5" for node in range(2) for slot in range(3)
    ]
    for node in range(2):
        same(checkpoint.read_node(path, node), node_state(node, 7))
    assert checkpoint.verify(path) == []
    assert checkpoint.latest(tmp_path) == path
    assert checkpoint.digest(path) == expected_digest(7, n=2)
    with h5py.File(path / "checkpoint.h5") as file:
        assert (
            file["parameters"][()] == np.stack([node_state(i, 7).parameters for i in range(2)])
        ).all()
    entries = checkpoint.read_manifest(path).entries
    for forged in ((*entries[:2], entries[3], entries[2], *entries[4:]), entries[:5]):
        with pytest.raises(ValueError, match=naming("its table")):
            manifests.check_table(forged, 2)
    (path / "node-0001-0001.h5").unlink()
    assert "node-0001-0001.h5 is missing" in " ".join(checkpoint.verify(path))
    assert checkpoint.latest(tmp_path) is None


def test_swapped_files_of_two_slots_are_detected(tmp_path, capsys):
    path = write_by_slot(tmp_path, 7)
    commands._show_checkpoint(argparse.Namespace(path=path))
    shown = capsys.readouterr().out
    assert "step 7, 2 nodes" in shown and shown.count("node-000") == 6
    one = path / "node-0000-0000.h5"
    other = path / "node-0000-0001.h5"
    data = one.read_bytes(), other.read_bytes()
    one.write_bytes(data[1])
    other.write_bytes(data[0])
    manifest = checkpoint.read_manifest(path)
    entries = [
        entry._replace(bytes=len(content), checksum=f"{zlib.crc32(content):08x}")
        for entry, content in zip(manifest.entries, data[::-1], strict=False)
    ]
    entries += manifest.entries[2:]
    manifests.write(path / "checkpoint.h5", dataclasses.replace(manifest, entries=tuple(entries)))
    problems = checkpoint.verify(path)
    assert len(problems) == 1 and "'slot': 1" in problems[0] and "not node 0, slot 0" in problems[0]


def test_slots_of_a_node_with_different_contents_are_rejected(tmp_path):
    temporary = checkpoint.begin(tmp_path, 1)
    first, second, third = by_slot(0, 1)
    second.arrays["flags"] = second.pieces[
        "state/momentum"
    ]  # This array has the same path as in the first slot.
    first.arrays["flags"] = first.pieces["state/momentum"]
    entries = [checkpoint.write_node(temporary, 0, part) for part in (first, second, third)]
    path = checkpoint.commit(temporary, tmp_path, 1, entries, JOB, {})
    with pytest.raises(StoreError, match=naming("slots 0 and 1")):
        checkpoint.read_node(path, 0)
    temporary = checkpoint.begin(tmp_path, 2)
    entries = [checkpoint.write_node(temporary, 0, part) for part in by_slot(0, 2)]
    for invalid in (entries[1:], [*entries, checkpoint.write_node(temporary, 1, node_state(1, 2))]):
        with pytest.raises(ValueError, match=naming("its table")):
            checkpoint.commit(temporary, tmp_path, 2, invalid, JOB, {})


def test_other_programs_can_read_it_and_recompute_the_digest(tmp_path):
    path = write_checkpoint(tmp_path, 5)
    sha = hashlib.sha256()
    for node in range(3):
        with h5py.File(path / f"node-000{node}.h5") as file:
            assert file["parameters"].chunks is None and file["parameters"].dtype == "<f4"
            sha.update(file["parameters"][()].tobytes())
            row = file["layout"][1]
            assert (row["name"].decode(), row["offset"], row["size"]) == ("größe", 1000, 5)
            assert json.loads(file["numbers"][()])["seed"] == 2**127 + 1
    assert sha.hexdigest() == checkpoint.digest(path) == expected_digest(5)
    with h5py.File(path / "checkpoint.h5") as file:
        joined = file["parameters"]
        assert joined.is_virtual and joined.shape == (3, 1006)
        assert (joined[()] == np.stack([node_state(i, 5).parameters for i in range(3)])).all()
        assert file["job"][()].decode() == JOB


@pytest.mark.parametrize("case", ["default", "no O_DIRECT", "unsupported", "partial writes"])
def test_large_arrays_bypass_the_page_cache_if_possible(tmp_path, monkeypatch, case):
    """The file and its checksum do not depend on how the disk accepts the writes."""
    monkeypatch.setattr(direct, "BLOCK", 1 << 18)
    size = direct.LARGE // 4 + 100_003
    aligned = direct.pages(4 * size).view(np.float32)
    aligned[:] = np.random.default_rng(0).standard_normal(size, dtype=np.float32)
    arrays = {"off a page": np.arange(size // 2)[1:], "flags": np.arange(direct.LARGE) % 3 == 0}
    node = NodeState(aligned, ("x",), ((size,),), arrays, {"index": 1})
    expected = checkpoint.write_node(checkpoint.begin(tmp_path / "a", 1), 0, node)
    writes = []
    write_bytes = os.pwrite

    def pwrite(descriptor, data, offset):
        is_direct = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
        writes.append((is_direct, len(data)))
        if is_direct and case == "unsupported":
            raise OSError(errno.EINVAL, "O_DIRECT is not supported")
        return write_bytes(
            descriptor,
            data[:99_999] if case == "partial writes" and not is_direct else data,
            offset,
        )

    monkeypatch.setattr(os, "pwrite", pwrite)
    if case in ("no O_DIRECT", "partial writes"):
        monkeypatch.setattr(direct, "_open_direct", lambda path: None)
    temporary = checkpoint.begin(tmp_path / "b", 1)
    entry = checkpoint.write_node(temporary, 0, node)
    files = [next(tmp_path.glob(f"{name}/checkpoints/*/node-0000.h5")) for name in "ab"]
    content = files[1].read_bytes()
    assert entry == expected and content == files[0].read_bytes()
    assert int(entry.checksum, 16) == zlib.crc32(content) and len(writes) >= 4
    path = checkpoint.commit(temporary, tmp_path / "b", 1, [entry], JOB, {})
    assert checkpoint.verify(path) == []
    same(checkpoint.read_node(path, 0), node)


GOOD = node_state(0)
NOT_IN_HDF5 = "HDF5"
INVALID_STATES = {
    "too few parameters": ({"parameters": GOOD.parameters[1:]}, {}, ("parameters", "float32")),
    "array of objects": ({"arrays": {"a": np.array([{}], object)}}, {}, NOT_IN_HDF5),
    "name without a part": ({"arrays": {"a//b": np.zeros(1)}}, {}, NOT_IN_HDF5),
    "name with two dots": ({"arrays": {"../x": np.zeros(1)}}, {}, NOT_IN_HDF5),
    "too many groups": ({}, {"OBJECTS": 15}, "16 groups"),
    "too much text": ({}, {"TEXT": 60}, "109 bytes"),
}
"""For each case: fields of a state, limits of store/guard.py, and a part of the message."""


@pytest.mark.parametrize("name", INVALID_STATES)
def test_states_that_no_file_can_hold_are_rejected(tmp_path, monkeypatch, name):
    fields, limits, message = INVALID_STATES[name]
    for limit, value in limits.items():
        monkeypatch.setattr(checkpoint.guard, limit, value)
    state = dataclasses.replace(GOOD, **fields)
    with pytest.raises((ValueError, StoreError), match=naming(message)):
        checkpoint.write_node(checkpoint.begin(tmp_path, 1), 0, state)
    assert checkpoint.latest(tmp_path) is None


@on_each("choose", [lambda entries: [], lambda entries: entries, lambda entries: entries[:1] * 2])
def test_a_checkpoint_with_other_nodes_than_0_to_n_is_rejected(tmp_path, choose):
    """The files of nodes 0 and 2 exist; no, both or two equal entries are committed."""
    temporary = checkpoint.begin(tmp_path, 1)
    entries = [checkpoint.write_node(temporary, node, GOOD) for node in (0, 2)]
    with pytest.raises(ValueError, match=naming("its table")):
        checkpoint.commit(temporary, tmp_path, 1, choose(entries), "", {})
    assert checkpoint.latest(tmp_path) is None


def test_a_checkpoint_without_a_node_s_file_is_rejected(tmp_path):
    temporary = checkpoint.begin(tmp_path, 1)
    entry = checkpoint.write_node(temporary, 0, GOOD)
    (temporary / "node-0000.h5").unlink()
    with pytest.raises(StoreError, match=naming("file system", "share")):
        checkpoint.commit(temporary, tmp_path, 1, [entry], "", {})
    assert checkpoint.latest(tmp_path) is None


@pytest.mark.parametrize("name", ["node-0001.h5", "checkpoint.h5"])
def test_any_flipped_byte_is_detected(tmp_path, name):
    path = write_checkpoint(tmp_path, 3, size=100)
    file = path / name
    data = file.read_bytes()
    draw = random.Random(4)
    for offset in [0, 511, 512, len(data) - 1, *(draw.randrange(len(data)) for _ in range(40))]:
        bad = bytearray(data)
        bad[offset] ^= 1 << draw.randrange(8)
        file.write_bytes(bad)
        (problem, *rest) = checkpoint.verify(path)
        assert name in problem and "damaged" in problem and not rest
        with pytest.raises(StoreError, match=naming("damaged")):
            checkpoint.read_node(path, 1)
    file.write_bytes(data)
    assert checkpoint.verify(path) == []


@pytest.mark.parametrize("name", ["node-0001.h5", "checkpoint.h5"])
def test_truncated_foreign_and_missing_files(tmp_path, name):
    path = write_checkpoint(tmp_path, 3)
    older = write_checkpoint(tmp_path, 2)
    file = path / name
    data = file.read_bytes()
    for content in (
        data[:-1],
        data[:700],
        b"",
        b"\x89HDF\r\n\x1a\n" + bytes(2000),
        b"no HDF5 " * 99,
    ):
        file.write_bytes(content)
        (problem,) = checkpoint.verify(path)
        assert str(file) in problem and "\n" not in problem and ";" in problem + ";"
        with pytest.raises(StoreError):
            checkpoint.read_node(path, 1)
        assert checkpoint.latest(tmp_path) == older and checkpoint.steps(tmp_path) == [2]
    file.unlink()
    assert str(file) in checkpoint.verify(path)[0]
    with pytest.raises(StoreError):
        checkpoint.read_node(path, 1)
    assert checkpoint.latest(tmp_path) == older
    for nothing in (tmp_path, tmp_path / "no"):
        with pytest.raises(StoreError, match=naming("checkpoint.h5", "can't be read")):
            checkpoint.read_manifest(nothing)
    assert checkpoint.latest(tmp_path / "no") is None


def test_wrong_manifest_swapped_and_extra_files(tmp_path):
    one = write_checkpoint(tmp_path, 1)
    two = write_checkpoint(tmp_path, 2, n=4)
    shutil.copy(two / "checkpoint.h5", one / "checkpoint.h5")
    problems = checkpoint.verify(one)
    assert "belongs to another step, 2" in problems[0]
    assert sum("damaged" in p for p in problems) == 3 and "is missing" in problems[-1]
    three = write_checkpoint(tmp_path, 3)
    (three / "node-0000.h5").rename(three / "x")
    (three / "node-0001.h5").rename(three / "node-0000.h5")
    (three / "x").rename(three / "node-0001.h5")
    assert len(checkpoint.verify(three)) == 2
    four = write_checkpoint(tmp_path, 4)
    shutil.copy(four / "node-0000.h5", four / "node-0003.h5")
    assert checkpoint.verify(four) == [f"{four / 'node-0003.h5'} isn't in the manifest"]


def test_node_out_of_range(tmp_path):
    path = write_checkpoint(tmp_path, 3)
    for node in (3, -1):
        with pytest.raises(StoreError, match=naming("nodes 0 to 2", f"node {node}")):
            checkpoint.read_node(path, node)


def test_the_same_step_again_and_files_of_killed_writers(tmp_path):
    path = write_checkpoint(tmp_path, 1, n=2)
    assert write_checkpoint(tmp_path, 1, n=3) == path
    assert checkpoint.read_manifest(path).n == 3
    # If the writer is killed between the two renames, the old checkpoint is used and renamed back.
    path.rename(path.with_suffix(".old"))
    assert checkpoint.latest(tmp_path) == path.with_suffix(".old")
    assert checkpoint.verify(path.with_suffix(".old")) == []
    temporary = checkpoint.begin(tmp_path, 2)
    (temporary / "node-0000.h5").write_bytes(b"x")
    assert checkpoint.latest(tmp_path) == path
    (tmp_path / "checkpoints/step-00000000.removing").mkdir()
    checkpoint.begin(tmp_path, 7)
    assert {p.name for p in path.parent.iterdir()} == {path.name, "step-00000007.writing"}
    (path.parent / "notes").write_text("a file of the user")
    (path.parent / "step-00000009").mkdir()
    assert checkpoint.steps(tmp_path) == [1]
    assert "can't be read" in checkpoint.verify(path.parent / "step-00000009")[0]


def test_a_damaged_checkpoint_is_kept_if_its_step_is_written_again(tmp_path):
    for count in (1, 2):
        path = write_checkpoint(tmp_path, 3)
        flip_bit(path / "checkpoint.h5")
        write_checkpoint(tmp_path, 3)
        assert checkpoint.verify(path) == []
        assert len([*path.parent.glob("step-00000003.damaged*")]) == count
    # If the writer is killed after the second rename, the folder with the final name is newer.
    shutil.copytree(path, path.with_suffix(".old"))
    assert checkpoint.latest(tmp_path) == path
    flip_bit(path / "checkpoint.h5")
    assert checkpoint.newest(tmp_path)[0] == path.with_suffix(".old")


def test_an_error_of_the_disk_is_not_damage(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, 1)

    def fails(path):
        with reading(path), Path("/proc/self/mem").open("rb", 0) as file:
            file.read(1)  # EIO

    monkeypatch.setattr(checkpoint, "read_manifest", fails)
    with pytest.raises(StoreError, match=naming("Input/output error")):
        checkpoint.latest(tmp_path)


def test_prune_keeps_the_newest_complete_ones(tmp_path):
    paths = [write_checkpoint(tmp_path, step, n=1) for step in (1, 2, 3, 4, 100_000_000)]
    (paths[3] / "node-0000.h5").unlink()
    assert checkpoint.prune(tmp_path, 2) == paths[:2]
    assert checkpoint.steps(tmp_path) == [3, 100_000_000] and paths[3].exists()
    assert checkpoint.prune(tmp_path, 2) == []
    with pytest.raises(ValueError, match=naming("keep = 0")):
        checkpoint.prune(tmp_path, 0)


LIMITED = """
import resource, sys, pathlib
sys.path[:0] = sys.argv[2:]
from mpigossip.store import StoreError, checkpoint, direct
from tests.store.examples import write_checkpoint
run = pathlib.Path(sys.argv[1])
write_checkpoint(run, 1, size=1000)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
try:
    write_checkpoint(run, 2, size=100_000)
except StoreError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (7_000, 7_000))
try:
    write_checkpoint(run, 3, size=1000)
except StoreError as error:
    print(error)
print(checkpoint.verify(checkpoint.latest(run)))
"""


def test_a_full_disk_raises_store_error_and_damages_nothing(tmp_path):
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", LIMITED, str(tmp_path), str(root), str(root.parent)]
    done = subprocess.run(warmed(command, {}), capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and lines[2] == "[]", (lines, done.stderr)
    assert all("can't be written" in line and "free space" in line for line in lines[:2]), lines
    assert checkpoint.steps(tmp_path) == [1]
    write_checkpoint(tmp_path, 2)
    assert checkpoint.steps(tmp_path) == [1, 2]


def test_an_unwritable_folder_raises_store_error(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(StoreError, match=naming("can't be written", "run.output")):
        checkpoint.begin(tmp_path, 1)

"""Files of unknown origin: links to other files, false sizes, and unknown structures."""

import os
import random
import shutil

import h5py
import numpy as np
import pytest

from mpigossip.store import StoreError, checkpoint, guard
from mpigossip.store import manifest as manifests
from mpigossip.store.checkpoint import NodeState
from mpigossip.store.dataset import open_dataset, pack
from mpigossip.store.log import read
from mpigossip.store.packing import checksum_of
from tests.cases import naming
from tests.store.examples import (
    change_node_file,
    folder_of_images,
    node_state,
    set_dataset,
    set_numbers,
    write_checkpoint,
    write_log,
)


def virtual(file):
    del file["parameters"]
    layout = h5py.VirtualLayout((1006,), "<f4")
    layout[:] = h5py.VirtualSource("node-0001.h5", "parameters", (1006,), "<f4")
    file.create_virtual_dataset("parameters", layout)


def raw(file):
    del file["parameters"]
    file.create_dataset("parameters", (1006,), "<f4", external=[("node-0001.h5", 0, 4024)])


def squeezed(file):
    file.create_dataset("arrays/bomb", data=np.zeros(1 << 24), compression="gzip")


def endless(file):
    del file["parameters"]
    file.create_dataset("parameters", (1 << 40,), "<f4")


def long_text(file):
    del file["numbers"]
    file.create_dataset("numbers", (), h5py.string_dtype("utf-8", (1 << 31) - 1))


def another(file):
    file.attrs["node"] = 1


def layout(**fields):
    def change(file):
        rows = file["layout"][()]
        for name, (row, value) in fields.items():
            rows[name][row] = value
        file["layout"][...] = rows

    return change


FORGED = {
    "index": (set_numbers(index=-5), ("index = -5", "0 to 3")),
    "later": (set_numbers(index=2), ("index = 2", "step 3")),
    "round": (set_numbers(round=1 << 60), "round = 1152921504606846976"),
    "seconds": (set_numbers(seconds=float("nan")), "seconds = nan"),
    "external link": (
        set_dataset("parameters", h5py.ExternalLink("node-0001.h5", "/parameters")),
        ('"parameters"', "link"),
    ),
    "soft link": (
        set_dataset("arrays/again", h5py.SoftLink("/parameters")),
        ('"arrays/again"', "link"),
    ),
    "hard link twice": (
        lambda f: set_dataset("arrays/again", f["parameters"])(f),
        ('"arrays/again"', "same object"),
    ),
    "cycle": (
        lambda f: set_dataset("arrays/arrays", f["arrays"])(f),
        ('"arrays/arrays"', "same object"),
    ),
    "virtual": (virtual, "in other files"),
    "external data": (raw, "in other files"),
    "committed type": (set_dataset("arrays/type", np.dtype("<f8")), ('"arrays/type"', "group")),
    "reference": (
        lambda f: set_dataset("arrays/reference", np.array([f.ref], h5py.ref_dtype))(f),
        ('"arrays/reference"', "type"),
    ),
    "compressed": (squeezed, ('"arrays/bomb"', "contiguously")),
    "2^40 parameters": (endless, ('"parameters"', "4398046511104 bytes")),
    "text of 2 GB": (long_text, ('"numbers"', "type")),
    "nested": (set_dataset("numbers", np.bytes_(b"[" * 100_000)), "recursion"),
    "node": (another, ("'node': 1", "node 0")),
    "stranger": (set_dataset("further", np.zeros(3)), "unknown: further"),
    "names": (layout(name=(1, b"conv.weight")), ("3 parameters", "2 different names")),
    "negative shape": (layout(shape=(1, (-5, 0))), ("'größe'", "(-5,)")),
    "negative offset": (layout(offset=(1, -1)), ("'größe'", "-1")),
    "no parameters": (lambda file: file.__delitem__("parameters"), "unknown: parameters"),
    "no group": (lambda file: file.__delitem__("arrays"), "unknown: arrays"),
    "float64": (set_dataset("parameters", np.zeros(1006)), ("parameters", "float64")),
    "dimensions": (layout(ndim=(1, 1 << 40)), ("'größe'", "(5, 0)")),
}


@pytest.mark.parametrize("forged", FORGED)
def test_a_forged_checkpoint_with_right_checksums_is_rejected(tmp_path, forged):
    change, message = FORGED[forged]
    path = write_checkpoint(tmp_path, 3)
    change_node_file(path, change)
    with pytest.raises(StoreError, match=naming(message)):
        checkpoint.read_node(path, 0)
    (problem,) = checkpoint.verify(path)
    assert "node-0000.h5" in problem and "\n" not in problem


MANIFESTS = {
    "n": (lambda m: {"n": 1 << 40}, ("n = 1099511627776", "3 files")),
    "step": (lambda m: {"step": -5}, "step = -5"),
    "no files": (lambda m: {"n": 0}, ("n = 0", "3 files")),
    "twice": (lambda m: {"entries": (m.entries[0], *m.entries[:2])}, ("row 1", "node 0")),
    "outside": (
        lambda m: {"entries": (m.entries[0]._replace(file="../x.h5"), *m.entries[1:])},
        '"../x.h5"',
    ),
    "lengths": (
        lambda m: {"entries": (*m.entries[:2], m.entries[2]._replace(parameters=1 << 40))},
        ("nodes 1 and 0", "parameters"),
    ),
    "job": (lambda m: {"job": "\x1b]0;x\x07"}, ('"job"', "control character")),
    "facts": (lambda m: {"meta": {"slots": [1, 2]}}, ('"meta"', "'slots'")),
}


@pytest.mark.parametrize("forged", MANIFESTS)
def test_a_forged_manifest_with_a_right_checksum_is_rejected(tmp_path, forged):
    change, message = MANIFESTS[forged]
    path = write_checkpoint(tmp_path, 3)
    manifest = checkpoint.read_manifest(path)
    facts = {name: getattr(manifest, name) for name in ("step", "n", "job", "meta", "entries")}
    invalid = checkpoint.Manifest(**facts | change(manifest))
    view = invalid.n == manifest.n and forged not in ("lengths", "outside", "twice")
    if not view:  # HDF5 cannot create the view for other programs
        first = invalid.entries[0]._replace(parameters=0)
        entries = (first, *invalid.entries[1:])
        invalid = checkpoint.Manifest(**facts | change(manifest) | {"entries": entries})
    manifests.write(path / "checkpoint.h5", invalid)
    with pytest.raises(StoreError, match=naming(message)):
        checkpoint.read_manifest(path)
    assert len(checkpoint.verify(path)) == 1 and checkpoint.latest(tmp_path) is None


def test_a_view_of_other_files_is_rejected(tmp_path):
    path = write_checkpoint(tmp_path, 3)
    file = path / "checkpoint.h5"
    with h5py.File(file, "r+", libver=("v110", "v110")) as opened:
        del opened["parameters"]
        view = h5py.VirtualLayout((3, 1006), "<f4")
        for node in range(3):
            view[node] = h5py.VirtualSource("node-0001.h5", "parameters", (1006,), "<f4")
        opened.create_virtual_dataset("parameters", view)
    data = file.read_bytes()
    file.write_bytes(manifests._header(data[manifests.HEADER :]) + data[manifests.HEADER :])
    with pytest.raises(StoreError, match=naming("'node-0001.h5'", "node 0")):
        checkpoint.read_manifest(path)


@pytest.mark.parametrize("name", ["checkpoint.h5", "node-0000.h5"])
def test_pipes_devices_and_links_in_place_of_files_are_not_opened(tmp_path, name):
    path = write_checkpoint(tmp_path, 3)
    file = path / name
    copy = tmp_path / name
    shutil.move(file, copy)
    os.mkfifo(file)
    (problem, *_) = checkpoint.verify(path)
    assert "not a regular file" in problem
    file.unlink()
    file.symlink_to(copy)
    (problem, *_) = checkpoint.verify(path)
    assert "symbolic link" in problem
    file.unlink()
    file.symlink_to("/dev/zero")
    assert checkpoint.verify(path) != []
    with pytest.raises(StoreError, match=naming("regular file")):
        guard.regular(file)


def test_any_flipped_byte_of_a_log_is_detected_or_harmless(tmp_path):
    path = tmp_path / "log.h5"
    intact = write_log(path)
    data = path.read_bytes()
    draw = random.Random(3)
    rejected = 0
    for _ in range(150):
        bad = bytearray(data)
        bad[draw.randrange(len(bad))] ^= 1 << draw.randrange(8)
        path.write_bytes(bad)
        try:
            log = read(path)
        except StoreError:
            rejected += 1
            continue
        assert (log.job, log.units, log.summary) == (intact.job, intact.units, intact.summary)
        for columns, expected in ((log.steps, intact.steps), (log.evaluations, intact.evaluations)):
            for name in expected:
                np.testing.assert_array_equal(columns[name], expected[name])
    assert rejected > 50


def rows(file):
    for name in file["steps"]:
        if name != "node":
            file["steps"][name].resize(1 << 27, axis=0)


def scattered(file):
    for name in ("step", "node"):
        file["steps"][name].resize(4000, axis=0)
        file["steps"][name][...] = np.arange(4000)
    for name, data in file["steps"].items():
        if name not in ("step", "node"):
            data.resize((4000, 4000))


def packed_column(file):
    del file["steps/loss"], file["loss"]
    file.create_dataset("steps/loss", (20, 3), "f8", chunks=(20, 3), compression="gzip")


def forged_chunk(values, filter_mask):
    """Return a function that writes a column whose chunk has other bytes than its filter makes."""

    def change(file):
        del file["steps/loss"], file["loss"]
        data = file.create_dataset("steps/loss", (20, 3), "f8", chunks=(20, 3), fletcher32=True)
        data.id.write_direct_chunk((0, 0), np.zeros(values).tobytes(), filter_mask)

    return change


def unnumbered(file):
    file["steps/step"][3] = 2


LOGS = {
    "2^27 rows": (rows, ("tables declare", "7918846080 bytes")),
    "scattered": (scattered, ("tables declare", "272064104 bytes")),
    "compressed": (packed_column, ('"steps/loss"', "filters")),
    "without its checksum": (forged_chunk(60, 1), ('"steps/loss"', "without its checksum")),
    "long chunk": (forged_chunk(61, 0), ("steps/loss", "488 bytes", "484 bytes")),
    "short chunk": (forged_chunk(59, 0), ("steps/loss", "472 bytes", "484 bytes")),
    "external": (
        set_dataset("steps/other", h5py.ExternalLink("/etc/passwd", "/x")),
        ('"steps/other"', "link"),
    ),
    "order": (unnumbered, ('"steps/step"', "ascend")),
    "shape": (set_dataset("steps/one", np.zeros(20)), ("steps/one", "(20, 3)")),
    "group": (lambda file: file.__delitem__("evaluations"), "evaluations/at_step"),
}


@pytest.mark.parametrize("forged", LOGS)
def test_a_forged_log_is_rejected(tmp_path, forged):
    change, message = LOGS[forged]
    path = tmp_path / "log.h5"
    write_log(path)
    with h5py.File(path, "r+", libver=("v110", "v110")) as file:
        change(file)
    with pytest.raises(StoreError, match=naming(message)):
        read(path)


def sized(file):
    sizes = file["train/sizes"][()]
    sizes[0] = 1 << 40
    file["train/sizes"][...] = sizes
    file["train"].attrs["checksum"] = checksum_of(file["train"])


SETS = {
    "external": (set_dataset("classes", h5py.ExternalLink("x.h5", "/x")), ('"classes"', "link")),
    "labels": (
        lambda f: (f["train"].pop("labels"), f.create_dataset("train/labels", (1 << 36,), "i8")),
        ('"train/labels"', "549755813888 bytes"),
    ),
    "sizes": (sized, ("height and width", "1 to 65536")),
    "channels": (lambda f: f.attrs.__setitem__("channels", -1), "channels = -1"),
    "scale": (lambda f: f.attrs.__setitem__("scale", np.nan), ("scale", "0 to 255", "mean")),
    "attribute": (
        lambda f: f.attrs.__setitem__("mean", np.zeros(1 << 15)),
        "attribute",
    ),
}


@pytest.mark.parametrize("forged", SETS)
def test_a_forged_data_set_is_rejected(tmp_path, forged):
    change, message = SETS[forged]
    path = pack(folder_of_images(tmp_path / "images"), tmp_path / "set.h5")
    with h5py.File(path, "r+", libver=("v110", "v110")) as file:
        change(file)
    with pytest.raises(StoreError, match=naming(message)):
        open_dataset(path)


def crowded(file):
    for k in range(2000):
        file.create_group(f"arrays/{k}")


def test_a_small_file_with_many_groups_is_rejected_before_it_is_searched(tmp_path, monkeypatch):
    path = write_checkpoint(tmp_path, 3)
    change_node_file(path, crowded)
    monkeypatch.setattr(guard, "FEW_OBJECTS", 1000)
    opened = []
    real = guard.h5o.open
    monkeypatch.setattr(guard.h5o, "open", lambda *a, **k: opened.append(a) or real(*a, **k))
    with pytest.raises(StoreError, match=naming("groups and arrays")):
        checkpoint.read_node(path, 0)
    assert len(opened) < 100


def test_a_model_of_many_tiny_tensors_is_written_and_read_with_the_same_limit(
    tmp_path, monkeypatch
):
    """The limits of writer and reader depend on the size of the file."""
    monkeypatch.setattr(guard, "FEW_OBJECTS", 300)
    good = node_state(0)
    arrays = {f"tiny/{k}": np.zeros(1, np.float32) for k in range(400)}
    path = checkpoint.begin(tmp_path, 1) / "node-0000.h5"
    entry = checkpoint.write_state(
        path, 0, NodeState(good.parameters, good.names, good.shapes, arrays, good.numbers)
    )
    assert len(checkpoint.read_state(path.parent, entry, entry.parameters, 0).arrays) == 400


def test_a_large_file_may_have_many_groups_and_arrays():
    many = guard.FEW_OBJECTS + 1000
    assert guard.max_objects(guard.BYTES_OF_OBJECT - 1) == guard.FEW_OBJECTS < many
    assert guard.max_objects(1000 * guard.BYTES_OF_OBJECT) == many
    assert guard.max_objects(1 << 60) == guard.OBJECTS

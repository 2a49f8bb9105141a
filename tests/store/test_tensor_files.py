"""Models as safetensors files: other libraries read them, and no model is ever whole in memory."""

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch.distributed import checkpoint as dcp

from mpigossip.store import StoreError
from mpigossip.store.checkpoint import write_state
from mpigossip.store.manifest import Entry
from mpigossip.store.node_reader import open_node
from mpigossip.store.node_state import NodeState
from mpigossip.store.tensor_files import BFLOAT16, Tensor, divide, of_array, write
from tests.cases import naming

KINDS = ("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?", ">f4")
ABOUT = {"job": "", "step": "1"}
"""Metadata by which a file is recognized as an export of this package."""


def arrays():
    rng = np.random.default_rng(0)
    values = {f"of.{kind}": rng.integers(0, 2, (3, 5)).astype(kind) for kind in KINDS}
    return values | {"scalar": np.array(2.5), "empty": np.empty((0, 3), np.float32)}


def read_all(folder):
    """Read all tensors of a folder by the index, if there is one."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        with safe_open(folder / "model.safetensors", "np") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    stored = {}
    for name, path in json.loads(index.read_text())["weight_map"].items():
        with safe_open(folder / path, "np") as file:
            stored[name] = file.get_tensor(name)
    return stored


@pytest.mark.parametrize("most", [None, 1, 200, 10**9])
def test_safetensors_reads_equal_tensors(tmp_path, most):
    tensors = [of_array(name, array) for name, array in arrays().items()]
    paths = write(tmp_path / "model.safetensors", tensors, {"job": "ü"}, most)
    assert sorted(paths) == sorted(tmp_path.iterdir())
    assert (len(paths) == 1) == (most in (None, 10**9))
    stored = read_all(tmp_path)
    assert stored.keys() == arrays().keys()
    for name, array in arrays().items():
        np.testing.assert_array_equal(stored[name], array)
        assert stored[name].dtype == array.dtype.newbyteorder("<")
    with safe_open(paths[0], "np") as file:
        assert file.metadata() == {"job": "ü"}


def test_the_index_is_as_hugging_face_writes_it(tmp_path):
    tensors = [of_array(name, np.ones(10, np.float32)) for name in "cab"]
    paths = write(tmp_path / "model.safetensors", tensors, {}, 80)
    assert [path.name for path in paths] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    assert json.loads(paths[-1].read_text()) == {
        "metadata": {"total_size": 120},
        "weight_map": {"a": paths[0].name, "b": paths[1].name, "c": paths[0].name},
    }


def test_files_of_an_earlier_export_are_removed_but_no_others(tmp_path):
    out = tmp_path / "model.safetensors"
    tensors = [of_array(name, np.ones(10, np.float32)) for name in "abc"]
    other = tmp_path / "model-2.safetensors"
    other.write_bytes(b"")
    for most in (40, 80, None, 40):
        assert {*write(out, tensors, ABOUT, most), other} == {*tmp_path.iterdir()}


def test_files_of_other_programs_are_not_removed(tmp_path):
    """A downloaded model of four files with the same name must not be mixed with an export."""
    out = tmp_path / "model.safetensors"
    tensors = [of_array(name, np.ones(10, np.float32)) for name in "abc"]
    write(out, tensors, {"format": "pt"}, 40)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for most in (None, 80):
        with pytest.raises(StoreError, match=naming("another program", "--out")):
            write(out, tensors, ABOUT, most)
    assert before == {path: path.read_bytes() for path in tmp_path.iterdir()}


def test_a_failure_changes_no_file(tmp_path):
    def fail():
        raise StoreError("damaged")

    out = tmp_path / "model.safetensors"
    good = of_array("a", np.ones(10, np.float32))
    write(out, [good], ABOUT)
    before = out.read_bytes()
    with pytest.raises(StoreError, match=naming("damaged")):
        write(out, [good, Tensor("b", "F32", (10,), fail)], ABOUT, 40)
    assert [*tmp_path.iterdir()] == [out] and out.read_bytes() == before


@pytest.mark.parametrize("most", [16, 32])
def test_an_interrupted_export_leaves_no_files_of_two_exports(tmp_path, monkeypatch, most):
    out = tmp_path / "model.safetensors"
    old = [of_array(f"t{k}", np.full(4, k, "f4")) for k in range(3)]
    assert len(write(out, old, {"job": "", "step": "1"}, 16)) == 4
    renamed = []
    rename = Path.replace

    def fails_later(path, target):
        if len(renamed) == 1:
            raise OSError("the process is interrupted here")
        renamed.append(target)
        return rename(path, target)

    monkeypatch.setattr(Path, "replace", fails_later)
    new = [of_array(f"t{k}", np.full(4, 10 + k, "f4")) for k in range(3)]
    with pytest.raises(StoreError):
        write(out, new, {"job": "", "step": "2"}, most)
    assert len(renamed) == 1
    assert [path.name for path in tmp_path.iterdir()] == [renamed[0].name]  # new, without an index


def test_an_interrupted_export_to_one_file_leaves_no_files_of_two_exports(tmp_path, monkeypatch):
    out = tmp_path / "model.safetensors"
    old = [of_array(f"t{k}", np.full(4, k, "f4")) for k in range(3)]
    assert len(write(out, old, {"job": "", "step": "1"}, 16)) == 4
    rename = Path.replace

    def interrupted(path, target):
        rename(path, target)
        raise OSError("the process is interrupted here")

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(StoreError):
        write(out, old[:2], {"job": "", "step": "2"})
    assert [*tmp_path.iterdir()] == [out]
    with safe_open(out, "np") as file:
        assert file.metadata()["step"] == "2"


def test_an_error_of_fsync_removes_no_earlier_export(tmp_path, monkeypatch):
    out = tmp_path / "model.safetensors"
    old = [of_array(f"t{k}", np.full(4, k, "f4")) for k in range(3)]
    before = {path: path.read_bytes() for path in write(out, old, ABOUT, 16)}

    def fail(descriptor):
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    for most in (None, 16):
        with pytest.raises(StoreError):
            write(out, old[:2], ABOUT, most)
        assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_dtype_that_the_format_lacks_is_rejected(tmp_path):
    tensor = of_array("x", np.zeros(2, np.complex128))
    with pytest.raises(StoreError, match=naming('"x"', "complex128")):
        write(tmp_path / "model.safetensors", [tensor], ABOUT)
    assert not [*tmp_path.iterdir()] and (tensor.read() == 0).all()


def test_a_file_has_whole_tensors_in_their_order():
    tensors = [of_array(str(size), np.zeros(size, np.int8)) for size in (3, 9, 2, 2, 5)]
    sizes = [[tensor.bytes for tensor in group] for group in divide(tensors, 5)]
    assert sizes == [[3], [9], [2, 2], [5]]


def test_bfloat16(tmp_path):
    value = torch.arange(6).bfloat16().view(2, 3)
    raw = value.view(torch.int16).numpy()
    write(tmp_path / "model.safetensors", [Tensor("w", BFLOAT16, (2, 3), lambda: [raw])], {})
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("w"), value)


# Without a process group, torch warns that it loads in a single process.
@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("most", [None, 100])
def test_the_reader_of_torch_reads_equal_tensors(tmp_path, most):
    values = {name: array for name, array in arrays().items() if name in ("of.f4", "of.i8")}
    values["w"] = np.arange(12, dtype=np.float32).reshape(4, 3)
    write(tmp_path / "model.safetensors", [of_array(*item) for item in values.items()], {}, most)
    state = {
        name: torch.zeros(a.shape, dtype=torch.from_numpy(a).dtype) for name, a in values.items()
    }
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)))
    for name, array in values.items():
        np.testing.assert_array_equal(state[name].numpy(), array)


SHAPES = ((7, 3), (5,), (2, 6, 3))


def node_files(folder, count):
    """Write the files of a node of ``count`` ranks; return their entries and the parameters."""
    values = [np.random.default_rng(k).standard_normal(s, "f4") for k, s in enumerate(SHAPES)]
    flat = np.concatenate([value.ravel() for value in values])
    names = tuple(f"w{k}" for k in range(len(SHAPES)))
    entries = []
    for rank in range(count):
        part = np.array_split(flat, count)[rank]
        arrays = {f"buffers/{rank}/mean": np.full(2, rank, "f4")}
        state = NodeState(part, names, SHAPES, arrays, {"index": 1}, rank)
        entries.append(write_state(folder / f"node-0000-{rank:04d}.h5", 0, state))
    return entries, values


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_parameters_of_several_files_are_read_piece_by_piece(tmp_path, count):
    entries, values = node_files(tmp_path, count)
    with open_node(tmp_path, entries, 1) as reader:
        assert reader.shapes == SHAPES
        for k, value in enumerate(values):
            for begin in range(0, value.size, 4):
                end = min(begin + 4, value.size)
                assert (reader.read(k, begin, end) == value.ravel()[begin:end]).all()
        np.testing.assert_array_equal(reader.buffers()["mean"], np.full(2, (count - 1) / 2))


def test_an_error_of_the_caller_is_not_attributed_to_the_checkpoint(tmp_path):
    entries, _ = node_files(tmp_path, 1)
    with pytest.raises(OSError, match=naming("No space left")), open_node(tmp_path, entries, 1):
        raise OSError(errno.ENOSPC, "No space left on device", "model.safetensors")
    (tmp_path / entries[0].file).write_bytes(b"")
    with pytest.raises(StoreError, match=naming("0 bytes")), open_node(tmp_path, entries, 1):
        pass


@pytest.mark.parametrize(
    ("file", "slot"),
    [
        ("node-0003-0002.h5", 2),
        ("node-0003.h5", None),
        ("000004-0123456789abcdef-0001.h5", 1),
        ("000004-0123456789abcdef-0001.kept.h5", 1),
        ("000004-0123456789abcdef.h5", None),
        ("000004-0123456789abcdef.kept.h5", None),
    ],
)
def test_the_name_of_a_file_contains_the_slot_or_rank(file, slot):
    assert Entry(0, file, 0, "", 0).slot == slot

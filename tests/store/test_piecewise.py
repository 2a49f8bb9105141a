"""Files of a model that are written and read piece by piece."""

import json
import os
import resource
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest

from mpigossip.members.live import digest
from mpigossip.members.parts import joined, parts_of
from mpigossip.members.records import Shard
from mpigossip.store import StoreError, checkpoint, guard, piecewise
from mpigossip.store.checkpoint import NodeState
from mpigossip.store.piecewise import PartSource, StoredModel, Stream
from tests.cases import naming

NAMES = ("a.weight", "b", "c")
SHAPES = ((7, 5), (4,), (3, 2, 2))
COUNT = 35 + 4 + 12


def whole_model():
    """Return a model with Adam's state for two of its three parameters, as one process has it."""
    chance = np.random.default_rng(0)
    arrays = {"buffers/0/mean": chance.normal(size=3)}
    states = {}
    for name, shape in zip(NAMES[:2], SHAPES, strict=False):
        states[name] = {}
        for key, array in (
            ("step", np.float32(3)),
            ("exp_avg", chance.normal(size=shape).astype("f4")),
        ):
            path = f"torch/{name}/{key}"
            arrays[path] = np.array(array)
            states[name][key] = {"#tensor": path, "type": "torch.float32"}
    numbers = {"index": 2, "local_steps": 2, "torch": json.dumps({"groups": [], "state": states})}
    return NodeState(chance.normal(size=COUNT).astype("f4"), NAMES, SHAPES, arrays, numbers)


def momentum(state):
    """Return the optimizer's state of all parameters, one after the other."""
    arrays = [state.arrays.get(f"torch/{name}/exp_avg") for name in NAMES]
    pairs = zip(arrays, SHAPES, strict=True)
    return np.concatenate([np.zeros(s, "f4").ravel() if a is None else a.ravel() for a, s in pairs])


def written_parts(folder, state, ends, size=8):
    """Write parts of a model that end at ``ends``; return the files for `StoredModel`."""
    flat = {"parameters": state.parameters, "pieces/torch/exp_avg": momentum(state)}
    large = {f"torch/{name}/exp_avg" for name in NAMES}
    small = {name: array for name, array in state.arrays.items() if name not in large}
    files, digests = [], []
    for rank, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):

        def stream(name, begin=begin, end=end):
            values = flat[name][begin:end]
            return Stream(
                values.dtype, lambda: (values[k : k + size] for k in range(0, len(values), size))
            )

        source = PartSource(
            NAMES,
            SHAPES,
            end - begin,
            {} if rank else small,
            state.numbers,
            {name: stream(name) for name in flat},
        )
        path = folder / f"node-0000-{rank:04d}.h5"
        written = piecewise.write(path, 0, rank, source)
        files.append((written.entry(), begin))
        digests.append(written.digest)
    return files, digests


def check(model, digests):
    for index, expected in enumerate(digests):
        model.check(index, expected)


@pytest.mark.parametrize("ends", [(COUNT,), (20, COUNT), (0, 37, 38, COUNT)])
def test_parts_contain_the_same_elements_as_a_whole_file(tmp_path, ends):
    state = whole_model()
    files, digests = written_parts(tmp_path, state, ends)
    model = StoredModel(tmp_path, files, COUNT, 2)
    check(model, digests)
    assert np.array_equal(model.parameters(3, 40), state.parameters[3:40])
    assert np.array_equal(model.state("exp_avg", 30, 51), momentum(state)[30:51])
    assert model.state_names() == {"exp_avg": {"a.weight", "b"}}
    assert sorted(model.small) == ["buffers/0/mean", "torch/a.weight/step", "torch/b/step"]
    assert model.digest_as_whole() == digest(state)
    model.close()
    # Readers of whole states, such as members of one process, get the arrays of each parameter.
    parts = [checkpoint.read_state(tmp_path, entry, COUNT, 2) for entry, _ in files]
    assert [digest(part) for part in parts] == digests
    again = joined(parts)
    assert again.arrays.keys() == state.arrays.keys()
    assert digest(again) == digest(state)
    # A replay with another number of ranks divides its whole model in the same way.
    shards = [Shard(e.file, e.bytes, e.checksum, first, e.parameters, "") for e, first in files]
    assert [digest(part) for part in parts_of(state, shards, 1)] == digests


def test_a_whole_file_is_read_in_the_same_way(tmp_path):
    state = whole_model()
    entry = checkpoint.write_state(tmp_path / "node-0000.h5", 0, state)
    model = StoredModel(tmp_path, [(entry, 0)], COUNT, 2)
    model.check(0, digest(state))
    for begin, end in ((0, COUNT), (3, 4), (33, 41), (50, 51)):
        assert np.array_equal(model.parameters(begin, end), state.parameters[begin:end])
        assert np.array_equal(model.state("exp_avg", begin, end), momentum(state)[begin:end])
    assert model.state_names() == {"exp_avg": {"a.weight", "b"}}
    assert sorted(model.small) == ["buffers/0/mean", "torch/a.weight/step", "torch/b/step"]
    assert model.digest_as_whole() == digest(state)
    # A part that is copied from the file is equal to the part that a rank writes.
    _, digests = written_parts(tmp_path, state, (20, COUNT))
    source = piecewise.source_of(model, 20, COUNT, model.numbers)
    copied = piecewise.write(tmp_path / "node-0000-0009.h5", 0, 9, source)
    assert copied.digest == digests[1]
    model.close()


def test_wrong_digests_missing_files_and_nan_are_found(tmp_path):
    state = whole_model()
    files, digests = written_parts(tmp_path, state, (20, COUNT))
    model = StoredModel(tmp_path, files[:1], COUNT, 2)
    with pytest.raises(StoreError, match=naming("digest")):
        model.check(0, digests[1])
    with pytest.raises(StoreError, match=naming("20 to 24")):
        model.parameters(15, 25)
    model.close()
    broken = replace(state, parameters=np.where(np.arange(COUNT) == 30, np.nan, state.parameters))
    broken = replace(broken, parameters=broken.parameters.astype("f4"))
    files, digests = written_parts(tmp_path, broken, (20, COUNT))
    model = StoredModel(tmp_path, files, COUNT, 2)
    with pytest.raises(StoreError, match=naming("NaN", "parameters")):
        check(model, digests)
    model.close()
    (tmp_path / files[1][0].file).unlink()
    with pytest.raises(StoreError, match=naming("missing")):
        StoredModel(tmp_path, files, COUNT, 2)


def test_all_pieces_are_read_if_writing_fails(tmp_path):
    state = whole_model()
    read = []

    def pieces():
        for start in range(0, COUNT, 10):
            read.append(start)
            yield state.parameters[start : start + 10]

    streams = {"parameters": Stream(np.dtype("<f4"), pieces)}
    source = PartSource(NAMES, SHAPES, COUNT, {}, state.numbers, streams)
    with pytest.raises(StoreError, match=naming("can't be written")):
        piecewise.write(tmp_path / "missing" / "node-0000-0000.h5", 0, 0, source)
    assert read == [*range(0, COUNT, 10)]


def test_the_largest_piece_is_small(tmp_path, monkeypatch):
    monkeypatch.setattr(piecewise, "PIECE", 6)
    state = whole_model()
    entry = checkpoint.write_state(tmp_path / "node-0000.h5", 0, state)
    model = StoredModel(tmp_path, [(entry, 0)], COUNT, 2)
    model.check(0, digest(state))
    source = piecewise.source_of(model, 0, COUNT, model.numbers)
    for stream in source.streams.values():
        sizes = [len(piece) for piece in stream.pieces()]
        assert sizes == [6] * (COUNT // 6) + [COUNT % 6]
        assert [*accumulate(sizes)][-1] == COUNT
    model.close()


def test_a_part_whose_bytes_were_lost_has_no_entry(tmp_path):
    """Linux reports only once that it has lost the written bytes of a file."""
    state = whole_model()
    streams = {"parameters": Stream(np.dtype("<f4"), lambda: iter([state.parameters]))}
    source = PartSource(NAMES, SHAPES, COUNT, {}, state.numbers, streams)
    written = piecewise.write(tmp_path / "node-0000-0000.h5", 0, 0, source)
    assert written.is_intact
    copy = written.copy(tmp_path / "node-0000-0001.h5")
    assert copy.entry()._replace(file="") == written.entry()._replace(file="")
    for span in written.spans:
        with written.path.open("r+b") as file:
            before = written.path.read_bytes()
            file.seek(span.begin + 3)
            file.write(bytes([before[span.begin + 3] ^ 1]))
        for operation in (written.entry, lambda: written.copy(tmp_path / "node-0000-0002.h5")):
            with pytest.raises(piecewise.DamagedPart, match=naming("that were written")):
                operation()
        written.path.write_bytes(before)
    written.path.write_bytes(before + b" ")
    with pytest.raises(piecewise.DamagedPart, match=naming("were written to it")):
        written.entry()
    written.path.write_bytes(before)
    assert written.entry()


@pytest.mark.parametrize("failed", ["open", "pwrite"])
def test_a_part_is_not_intact_after_an_operation_was_repeated(tmp_path, failed):
    state = whole_model()
    streams = {"parameters": Stream(np.dtype("<f4"), lambda: iter([state.parameters]))}
    source = PartSource(NAMES, SHAPES, COUNT, {}, state.numbers, streams)
    path = tmp_path / "node-0000-0000.h5"

    def attempt(operation):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, failed, lambda *_, **__: (_ for _ in ()).throw(OSError(5, "EIO")))
            with suppress(StoreError):
                operation(path)
        return operation(path)

    written = piecewise.write(path, 0, 0, source, attempt)
    assert not written.is_intact
    assert written.entry()


def descriptors_of(path):
    """Return the descriptors of this process that belong to a file."""
    files = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            files.append(descriptor.readlink())
    return files.count(path)


@pytest.mark.parametrize("end", ["entry", "copy", "dropped", "failed"])
def test_a_file_stays_open_until_it_is_flushed(tmp_path, end):
    """Network file systems flush a file when it is closed, which the training must not wait for."""
    state = whole_model()
    path = tmp_path / "node-0000-0000.h5"
    counts = []

    def pieces():
        for start in range(0, COUNT, 17):
            if end == "failed" and start:
                raise TimeoutError("a rank is missing")
            yield state.parameters[start : start + 17]
            counts.append(descriptors_of(path))

    streams = {"parameters": Stream(np.dtype("<f4"), pieces)}
    source = PartSource(NAMES, SHAPES, COUNT, {}, state.numbers, streams)
    if end == "failed":
        with pytest.raises(TimeoutError):
            piecewise.write(path, 0, 0, source)
        assert counts == [1] and not descriptors_of(path)
        return
    written = piecewise.write(path, 0, 0, source)
    assert counts == [1, 1, 1] and descriptors_of(path) == 1
    if end == "entry":
        written.entry()
    elif end == "copy":
        written.copy(tmp_path / "node-0000-0001.h5")
    del written
    assert not descriptors_of(path)


def test_a_part_without_elements_can_be_written_and_read(tmp_path):
    state = whole_model()
    files, digests = written_parts(tmp_path, state, (20, 20, COUNT))
    model = StoredModel(tmp_path, files[1:2], COUNT, 2)
    check(model, digests[1:2])
    assert model.parameters(20, 20).shape == (0,)
    model.close()


@pytest.mark.parametrize("hard", [None, 20])
def test_the_limit_of_open_files_is_raised_if_it_can_be(tmp_path, monkeypatch, hard):
    """A member averages up to 64 models, each of which has the files of several ranks."""
    state = whole_model()
    files, digests = written_parts(tmp_path, state, (10, 20, 30, 40, COUNT))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_files = [int(path.name) for path in Path("/proc/self/fd").iterdir()]
    soft = min(set(range(max(open_files) + 2)) - {*open_files}) + 2  # two more files
    if hard is not None:
        monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, soft))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, limits[1]))
    try:
        if hard is None:
            model = StoredModel(tmp_path, files, COUNT, 2)
            check(model, digests)
            model.close()
            monkeypatch.undo()
            assert soft < resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= limits[1]
        else:
            with pytest.raises(StoreError, match=naming("Too many open files")):
                StoredModel(tmp_path, files, COUNT, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_state_that_is_not_sharded_is_small(tmp_path):
    """Only the first file has it, which not all ranks open."""
    state = whole_model()
    key = {"#tensor": "torch/c/mean", "type": "torch.float32"}
    numbers = json.loads(str(state.numbers["torch"]))
    numbers["state"]["c"] = {"mean": key}
    mean = np.arange(12, dtype="f4").reshape(SHAPES[2])
    state = replace(
        state,
        arrays=state.arrays | {"torch/c/mean": mean},
        numbers=state.numbers | {"torch": json.dumps(numbers)},
    )
    files, digests = written_parts(tmp_path, state, (20, COUNT))
    model = StoredModel(tmp_path, files[:1], COUNT, 2)
    check(model, digests[:1])
    assert model.state_names() == {"exp_avg": {"a.weight", "b"}}
    assert np.array_equal(model.small["torch/c/mean"], mean)
    model.close()
    model = StoredModel(tmp_path, files, COUNT, 2)
    assert model.digest_as_whole() == digest(state)
    model.close()


def test_the_state_of_a_frozen_parameter_is_small(tmp_path):
    """Its parameter has no elements in the files, but the optimizer still has it."""
    state = whole_model()
    numbers = json.loads(str(state.numbers["torch"]))
    path = "torch/frozen/exp_avg"
    numbers["state"]["frozen"] = {"exp_avg": {"#tensor": path, "type": "torch.float32"}}
    state = replace(
        state,
        arrays=state.arrays | {path: np.arange(3, dtype="f4")},
        numbers=state.numbers | {"torch": json.dumps(numbers)},
    )
    files, digests = written_parts(tmp_path, state, (20, COUNT))
    model = StoredModel(tmp_path, files, COUNT, 2)
    check(model, digests)
    assert path in model.small and model.digest_as_whole() == digest(state)
    model.close()
    model = StoredModel(tmp_path, files[1:], COUNT, 2)
    assert model.state_names() == {"exp_avg": {"a.weight", "b"}}
    model.close()


def test_a_state_of_another_type_keeps_it_where_parameters_lack_it(tmp_path):
    state = whole_model()
    wide = state.arrays["torch/b/exp_avg"].astype("f8")
    arrays = {k: a for k, a in state.arrays.items() if k != "torch/a.weight/exp_avg"}
    state = replace(state, arrays=arrays | {"torch/b/exp_avg": wide})
    entry = checkpoint.write_state(tmp_path / "node-0000.h5", 0, state)
    model = StoredModel(tmp_path, [(entry, 0)], COUNT, 2)
    assert model.state_dtype("exp_avg") == np.dtype("f8")
    source = piecewise.source_of(model, 0, COUNT, model.numbers)
    assert source.streams["pieces/torch/exp_avg"].dtype == np.dtype("f8")
    model.close()


def test_a_part_that_no_reader_accepts_is_not_written(tmp_path, monkeypatch):
    state = whole_model()
    streams = {"parameters": Stream(np.dtype("<f4"), lambda: iter([state.parameters]))}
    source = PartSource(NAMES, SHAPES, COUNT, {}, state.numbers, streams)
    monkeypatch.setattr(guard, "TEXT", 10)
    with pytest.raises(StoreError, match=naming("counters and texts")):
        piecewise.write(tmp_path / "node-0000-0000.h5", 0, 0, source)
    monkeypatch.undo()
    monkeypatch.setattr(guard, "OBJECTS", 2)
    with pytest.raises(StoreError, match=naming("groups and arrays")):
        piecewise.write(tmp_path / "node-0000-0000.h5", 0, 0, source)


def test_only_the_elements_of_a_range_are_read():
    """A row of an array with several dimensions may be larger than memory."""
    values = np.arange(3 * 4 * 5 * 2).reshape(3, 4, 5, 2)
    read = []

    class Watched:
        shape = values.shape

        def __getitem__(self, index):
            read.append(values[index].size)
            return values[index]

    for begin in range(values.size):
        for end in range(begin + 1, values.size + 1):
            read.clear()
            elements = piecewise._elements(Watched(), begin, end)
            assert np.array_equal(elements, values.reshape(-1)[begin:end])
            assert sum(read) == end - begin

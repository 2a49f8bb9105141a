"""Checkpoints: one HDF5 file per node, a manifest that names them, a rename that makes it count.

    RUN/checkpoints/step-00001200/node-0000.h5 … node-0003.h5   each written by its node
    RUN/checkpoints/step-00001200/checkpoint.h5                 the manifest, written last

Where nodes are large, each slot writes its part: node-0000-0000.h5 … node-0003-0007.h5; readers
join them.

Everything is written into `step-00001200.writing` and renamed when whole, so a directory under its
final name is whole. Nodes call `write_node`; one process calls `begin` before and `commit` after.
A checkpoint is read without pickle, and no byte reaches the HDF5 library unless its checksum is
right: a damaged file gives StoreError, never a crash or wrong numbers.
"""

import errno
import hashlib
import io
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from shlex import quote
from typing import Any

import h5py
import numpy as np

from mpigossip.store import StoreError, direct, guard, node_state
from mpigossip.store import manifest as manifests
from mpigossip.store.hdf5 import create, reading, sync, write_text, writing
from mpigossip.store.manifest import FORMAT, MANIFEST, Entry, Manifest, Number
from mpigossip.store.manifest import read as read_manifest
from mpigossip.store.node_state import NodeState

PIECE = 1 << 22  # parameters read at a time


def folder(run: Path, step: int) -> Path:
    """The final place of the checkpoint of `step`."""
    return Path(run) / "checkpoints" / f"step-{step:08d}"


def begin(run: Path, step: int) -> Path:
    """A new temporary folder for `step`; what killed writers left behind is cleared away.

    One checkpoint of a run is written at a time.
    """
    temporary = folder(run, step).with_suffix(".writing")
    with writing(temporary):
        temporary.parent.mkdir(parents=True, exist_ok=True)
        for path in temporary.parent.glob("step-*.*"):
            if path.suffix == ".old" and not path.with_suffix("").exists():
                path.rename(path.with_suffix(""))
            elif path.suffix in (".old", ".writing", ".removing"):
                shutil.rmtree(path, ignore_errors=path.suffix != ".writing")
        temporary.mkdir()
    return temporary


def write_node(folder: Path, node: int, state: NodeState) -> Entry:
    """Write and fsync `node-0003.h5` in the temporary folder; returns its manifest entry."""
    return write_state(Path(folder) / manifests.name(node, state.slot), node, state)


def write_state(path: Path, node: int, state: NodeState) -> Entry:
    """Write and fsync a node's file; returns the entry by which it is read."""
    length = sum(map(math.prod, state.shapes))
    flat = state.parameters
    slot = state.slot
    fits = flat.shape == (length,) if slot is None else flat.ndim == 1 and flat.size <= length
    if flat.dtype != np.float32 or not fits or len(state.names) != len(state.shapes):
        raise ValueError(f"parameters {flat.dtype} {flat.shape} don't fit {length} in the layout")
    stored = state.stored()
    numbers = json.dumps(state.numbers, default=lambda v: v.item())
    names = [*stored, "arrays", "layout", "numbers"]
    objects = {path for name in names for path in accumulate(name.split("/"), "{}/{}".format)}
    _check_count(path, len(objects), "groups and arrays", guard.OBJECTS)
    _check_count(path, len(numbers), "bytes of counters and texts", guard.TEXT)
    with writing(path):
        large = []
        with create(path, **direct.LAYOUT) as file:
            file.attrs["format"] = np.bytes_(FORMAT)
            file.attrs["node"] = node
            file.create_group("arrays")
            if slot is not None:
                file.attrs["slot"] = slot
                file.create_group("pieces")
            for name, array in stored.items():
                if np.asarray(array).dtype.hasobject or {"", ".", ".."} & set(name.split("/")):
                    raise ValueError(f'array "{name}" of {array.dtype} has no place in HDF5')
                if array.nbytes >= direct.LARGE:
                    large.append(direct.reserve(file, name, array))
                else:
                    file.create_dataset(name, data=array)
            file.create_dataset("layout", data=node_state.table(state.names, state.shapes))
            write_text(file, "numbers", numbers)
        checksum = direct.fill(path, large)
    size = path.stat().st_size
    # Readers go by the size of the file, which is not known before.
    _check_count(path, len(objects), "groups and arrays", guard.max_objects(size))
    return Entry(node, path.name, size, checksum, flat.size)


def _check_count(path: Path, count: int, what: str, most: int) -> None:
    """Raise StoreError if a file has more of something than readers accept."""
    if count > most:
        raise StoreError(
            f"{path} would have {count:,} {what}, of which {most:,} can be read again; save "
            "fewer parameters or kept objects"
        )


def commit(
    temporary: Path,
    run: Path,
    step: int,
    entries: Sequence[Entry],
    job: str,
    meta: Mapping[str, Number],
) -> Path:
    """Write the manifest over all nodes' `entries` and give the checkpoint its final name."""
    entries = sorted(entries)
    n = len({entry.node for entry in entries})
    manifests.check_table(entries, n)
    if not temporary.is_dir():
        raise StoreError(f"{temporary} was deleted while it was being written")
    for entry in entries:
        path = temporary / entry.file
        if not path.is_file() or path.stat().st_size != entry.bytes:
            raise StoreError(
                f"{path} was written by node {entry.node} but isn't seen by node 0: checkpoints "
                "need a file system that all nodes share; set run.output to a folder on one"
            )
    final = folder(run, step)
    old = final.with_suffix(".old")
    with writing(final):
        whole = Manifest(step, n, job, dict(meta), tuple(entries))
        manifests.write(temporary / MANIFEST, whole)
        sync(temporary)
        if final.exists() and _problem(final):
            set_aside(final)
        elif final.exists():
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)  # found by latest() should we be killed before the next line
        temporary.rename(final)
        sync(final.parent)
        shutil.rmtree(old, ignore_errors=True)
    return final


def steps(run: Path) -> list[int]:
    """Steps of all whole checkpoints, ascending."""
    return sorted({step for step, path in _found(run) if not _problem(path)})


def latest(run: Path) -> Path | None:
    """The newest whole checkpoint: manifest sound, every file there with its size."""
    return newest(run)[0]


def newest(run: Path) -> tuple[Path | None, dict[Path, str]]:
    """The newest whole checkpoint, and the damaged ones that are newer, each with the reason."""
    damaged: dict[Path, str] = {}
    for _, path in reversed(_found(run)):
        problem = _problem(path)
        if not problem:
            return path, damaged
        damaged[path] = problem
    return None, damaged


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint to `step-….damaged`, which nothing overwrites; its new name."""
    aside = path.with_suffix(".damaged")
    while aside.exists():
        aside = aside.with_name(f"{aside.name}.damaged")
    with writing(path):
        return path.rename(aside)


def prune(run: Path, keep: int, every: int = 0) -> list[Path]:
    """Remove all but the newest `keep` (at least 1) whole checkpoints; returns those removed.

    Those of a multiple of `every` steps stay, too (0: none).
    """
    if keep < 1:
        raise ValueError(f"keep = {keep}: at least one checkpoint stays")
    whole = [(step, path) for step, path in _found(run) if not _problem(path)]
    removed = [path for step, path in whole[:-keep] if not every or step % every]
    for path in removed:
        with writing(path):
            doomed = path.with_suffix(".removing")  # a half-removed one must not keep its name
            path.rename(doomed)
            shutil.rmtree(doomed)
    return removed


def read_node(path: Path, node: int, manifest: Manifest | None = None) -> NodeState:
    """Return the state of one node, joined over its slots.

    Its files are checked against the ``manifest``, which is read if it is None: that takes a time
    proportional to the number of nodes, so read it once for many of them.
    """
    manifest = read_manifest(path) if manifest is None else manifest
    if not 0 <= node < manifest.n:
        raise StoreError(
            f"{path} holds nodes 0 to {manifest.n - 1}, node {node} was asked for; "
            "start with as many nodes, or resume from the average"
        )
    length = sum(entry.parameters for entry in manifest.of(node))
    parts = [read_state(path, entry, length, manifest.step) for entry in manifest.of(node)]
    if manifest.each == 1:
        return parts[0]
    with reading(Path(path) / manifest.of(node)[0].file):
        return _joined(parts)


def read_state(path: Path, entry: Entry, length: int, step: int) -> NodeState:
    """Read a file: the state of a node of ``length`` parameters after ``step`` steps."""
    with _node_file(path, entry) as found:
        names, shapes = node_state.read_table(guard.rows(found, "layout", "SiiiV"), length)
        arrays, pieces = (
            {
                name.removeprefix(group): guard.array(found, name)
                for name, item in sorted(found.items(), key=lambda one: one[0].split("/"))
                if name.startswith(group) and isinstance(item, h5py.Dataset)
            }
            for group in ("arrays/", "pieces/")
        )
        numbers = manifests.plain(guard.text(found, "numbers"), "numbers")
        manifests.counted(numbers, step)
        parameters = guard.array(found, "parameters")
        state = NodeState(parameters, names, shapes, arrays, numbers, entry.slot, pieces)
        if wrong := state.not_finite():
            raise StoreError(
                f"{Path(path) / entry.file} has {wrong}, which older versions didn't look for; to "
                f"go on from the checkpoint before: mv {path} {path}.damaged"
            )
        return state


def average(path: Path, manifest: Manifest) -> dict[str, np.ndarray]:
    """Return the mean over a checkpoint's nodes, as `node_state.over_nodes` has it."""
    with reading(path):
        return node_state.over_nodes(read_node(path, i, manifest) for i in range(manifest.n))


def _joined(parts: Sequence[NodeState]) -> NodeState:
    """A node from its slots; ValueError where they are of different ones."""
    first = parts[0]
    arrays = dict[str, np.ndarray]()
    for part in parts:
        same = (part.names, part.shapes, part.pieces.keys())
        twice = arrays.keys() & (part.arrays.keys() | first.pieces.keys())
        if same != (first.names, first.shapes, first.pieces.keys()) or twice:
            raise ValueError(f"slots 0 and {part.slot} of a node hold different things")
        arrays |= part.arrays
    for name in first.pieces:
        arrays[name] = np.concatenate([part.pieces[name] for part in parts])
    parameters = np.concatenate([part.parameters for part in parts])
    return NodeState(parameters, first.names, first.shapes, arrays, first.numbers)


def digest(path: Path) -> str:
    """SHA-256 over the parameters of all nodes in node order, as float32 little endian."""
    sha = hashlib.sha256()
    for entry in read_manifest(path).entries:
        with _node_file(path, entry) as found:
            data = guard.dataset(found, "parameters")
            for start in range(0, len(data), PIECE):
                sha.update(data[start : start + PIECE].tobytes())
    return sha.hexdigest()


def verify(path: Path) -> list[str]:
    """All problems of a checkpoint, none if it is sound: every byte is read."""
    path = Path(path)
    try:
        manifest = read_manifest(path)
    except StoreError as error:
        return [str(error)]
    problems = []
    named = re.fullmatch(r"step-(\d+)(\.old)?", path.resolve().name)
    if named and int(named[1]) != manifest.step:
        problems.append(f"{path / MANIFEST} is of step {manifest.step}: another one's manifest")
    extra = {p.name for p in path.glob("node-*.h5")} - {entry.file for entry in manifest.entries}
    problems += [f"{path / name} isn't in the manifest" for name in sorted(extra)]
    layouts = set()
    for node in range(manifest.n):
        try:
            state = read_node(path, node, manifest)
        except StoreError as error:
            problems.append(str(error))
        else:
            layouts.add((state.names, state.shapes))
    if len(layouts) > 1:
        problems.append(f"{path}: nodes hold different models")
    return problems


def _found(run: Path) -> list[tuple[int, Path]]:
    """Directories that may be checkpoints, by step; `.old` before its successor."""
    place = Path(run) / "checkpoints"
    with reading(place):
        try:
            names = [path.name for path in place.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
    found = [re.fullmatch(r"step-(\d+)(\.old)?", name) for name in names]
    paths = [(int(one[1]), place / one[0]) for one in found if one]
    return sorted(paths, key=lambda one: (one[0], not one[1].suffix))


def _problem(path: Path) -> str:
    """Return why a checkpoint isn't whole, "" where it is; StoreError where that can't be read."""
    try:
        for entry in read_manifest(path).entries:
            with reading(place := path / entry.file):
                if place.stat().st_size != entry.bytes:
                    raise ValueError(f"it should have {entry.bytes} bytes, as the manifest says")
    except StoreError as error:
        if getattr(error.__cause__, "errno", None) not in (None, errno.ENOENT, errno.ENOTDIR):
            raise
        return str(error)
    return ""


@contextmanager
def _node_file(path: Path, entry: Entry) -> Iterator[dict[str, Any]]:
    """Arrays and groups of a node's file, after its size, checksum and structure were checked."""
    place = Path(path) / entry.file
    with reading(place):
        try:
            file = guard.regular(place, follow=False)
        except FileNotFoundError:
            raise StoreError(
                f"{place} is missing; copy it there or use another checkpoint"
            ) from None
        with file:
            _check_bytes(place, file, entry)
            with guard.opened(file) as (content, found):
                facts = guard.attributes(content)
                of = {"node": entry.node} | ({} if entry.slot is None else {"slot": entry.slot})
                if facts != {"format": FORMAT, **of}:
                    told = ", ".join(f"{kind} {number}" for kind, number in of.items())
                    raise ValueError(f"it says {str(facts)[:100]}, not {told}")
                names = {"parameters", "arrays", "layout", "numbers"}
                manifests.only(found, names | ({"pieces"} if "slot" in of else set()))
                parameters = guard.dataset(found, "parameters")
                if parameters.dtype.str != "<f4" or parameters.shape != (entry.parameters,):
                    raise ValueError(f"parameters are {parameters.dtype} {parameters.shape}")
                yield found


def _check_bytes(place: Path, file: io.FileIO, entry: Entry) -> None:
    """StoreError unless the open file has the size and the checksum that the manifest says."""
    size = os.fstat(file.fileno()).st_size
    if size != entry.bytes:
        raise StoreError(
            f"{place} has {size} bytes, the manifest says {entry.bytes}: truncated or of "
            "another checkpoint; copy it again or use another checkpoint"
        )
    checksum = f"{direct.crc(file.fileno(), 0, size):08x}"
    if checksum != entry.checksum:
        raise StoreError(
            f"{place} is damaged: its CRC-32 is {checksum}, the manifest says "
            f"{entry.checksum}; copy it again, or use an older checkpoint: `mv "
            f"{quote(str(place.parent))} {quote(str(place.parent.with_suffix('.damaged')))}`"
        )

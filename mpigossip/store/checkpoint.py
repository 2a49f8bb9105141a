"""Checkpoints: folders with one HDF5 file per node and a manifest that names these files.

    RUN/checkpoints/step-00001200/node-0000.h5 … node-0003.h5   each written by its node
    RUN/checkpoints/step-00001200/checkpoint.h5                 the manifest, written last

If nodes are large, each slot (device) of a node writes its own file, node-0000-0000.h5 …
node-0003-0007.h5, and readers join these files.

All files are written into the folder `step-00001200.writing`, which is renamed when it is complete.
A folder with the final name is therefore complete. Each node calls `write_node`; one process calls
`begin` before and `commit` after that. Checkpoints are read without pickle. The checksum of a file
is compared before the HDF5 library reads the file, so that a damaged file raises StoreError and
causes neither a crash nor wrong numbers.
"""

import errno
import hashlib
import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import h5py
import numpy as np

from mpigossip.store import StoreError, direct, guard, node_state
from mpigossip.store import manifest as manifests
from mpigossip.store.hdf5 import create, reading, sync, write_text, writing
from mpigossip.store.manifest import FORMAT, MANIFEST, Entry, Manifest, Number
from mpigossip.store.manifest import read as read_manifest
from mpigossip.store.node_file import PIECE, node_file
from mpigossip.store.node_state import NodeState


def folder(run: Path, step: int) -> Path:
    """Return the final path of the checkpoint of `step`."""
    return Path(run) / "checkpoints" / f"step-{step:08d}"


def begin(run: Path, step: int) -> Path:
    """Create the temporary folder for the checkpoint of `step`, and return its path.

    Temporary folders of processes that were killed while writing are removed first, and an old
    checkpoint that such a process was about to replace gets its name back. Only one checkpoint of a
    run may be written at a time.

    :param run: run directory
    :param step: number of steps done
    :return: path of the temporary folder
    :raises StoreError: if the folder cannot be written
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
    """Write and fsync the file of a node or slot, such as `node-0003.h5`.

    :param folder: temporary folder of the checkpoint
    :param node: index of the node
    :param state: state of the node or of one of its slots
    :return: entry of the file for the manifest
    :raises ValueError: as :func:`write_state`
    :raises StoreError: as :func:`write_state`
    """
    return write_state(Path(folder) / manifests.name(node, state.slot), node, state)


def write_state(path: Path, node: int, state: NodeState) -> Entry:
    """Write and fsync a file with the state of a node or of one of its slots.

    :param path: file to write
    :param node: index of the node
    :param state: state to write
    :return: entry by which :func:`read_state` reads the file
    :raises ValueError: if the parameters do not match the shapes, or HDF5 cannot store an array
    :raises StoreError: if the file cannot be written, or has more objects or text than readers
        accept
    """
    length = sum(map(math.prod, state.shapes))
    flat = state.parameters
    slot = state.slot
    fits = flat.shape == (length,) if slot is None else flat.ndim == 1 and flat.size <= length
    if flat.dtype != np.float32 or not fits or len(state.names) != len(state.shapes):
        raise ValueError(
            f"the state has parameters of type {flat.dtype} and shape {flat.shape}, but its names "
            f"and shapes describe {length} elements of type float32"
        )
    stored = state.stored()
    numbers = json.dumps(state.numbers, default=lambda v: v.item())
    names = [*stored, "arrays", "layout", "numbers"]
    objects = {path for name in names for path in accumulate(name.split("/"), "{}/{}".format)}
    check_count(path, len(objects), "groups and arrays", guard.OBJECTS)
    check_count(path, len(numbers), "bytes of counters and texts", guard.TEXT)
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
                    raise ValueError(f'array "{name}" of {array.dtype} cannot be stored in HDF5')
                if array.nbytes >= direct.LARGE:
                    large.append(direct.reserve(file, name, array))
                else:
                    file.create_dataset(name, data=array)
            file.create_dataset("layout", data=node_state.table(state.names, state.shapes))
            write_text(file, "numbers", numbers)
        checksum = direct.fill(path, large)
    size = path.stat().st_size
    # The limit of readers depends on the size of the file, which is known only now.
    check_count(path, len(objects), "groups and arrays", guard.max_objects(size))
    return Entry(node, path.name, size, checksum, flat.size)


def check_count(path: Path, count: int, what: str, limit: int) -> None:
    """Check that readers accept the number of objects or bytes of text in a file.

    :param path: path of the file
    :param count: number of objects or bytes
    :param what: name of what is counted, for the message
    :param limit: largest number that readers accept
    :raises StoreError: if ``count`` is larger than ``limit``
    """
    if count > limit:
        raise StoreError(
            f"{path} would have {count:,} {what}, but only {limit:,} can be read back; save "
            "fewer parameters, or fewer further objects with the checkpoint"
        )


def commit(
    temporary: Path,
    run: Path,
    step: int,
    entries: Sequence[Entry],
    job: str,
    meta: Mapping[str, Number],
) -> Path:
    """Write the manifest and rename the checkpoint to its final name.

    If a checkpoint of the same step exists, it is replaced; if it is damaged, it is kept under
    another name.

    :param temporary: folder from :func:`begin` in which all nodes have written their files
    :param run: run directory
    :param step: number of steps done
    :param entries: results of :func:`write_node` of all nodes and slots
    :param job: complete job, as TOML
    :param meta: further facts about the checkpoint
    :return: final path of the checkpoint
    :raises ValueError: if ``entries`` are not the files of all nodes
    :raises StoreError: if ``temporary`` was deleted, if a file is missing on this host or has
        another size, or if writing fails
    """
    entries = sorted(entries)
    n = len({entry.node for entry in entries})
    manifests.check_table(entries, n)
    if not temporary.is_dir():
        raise StoreError(
            f"{temporary} was deleted while the checkpoint was written to it; do not delete files "
            "of a running job"
        )
    for entry in entries:
        path = temporary / entry.file
        if not path.is_file() or path.stat().st_size != entry.bytes:
            raise StoreError(
                f"{path} was written by node {entry.node}, but on the host of node 0 it is missing "
                f"or does not have {entry.bytes:,} bytes: checkpoints need a file system that all "
                "nodes share; set run.output to a folder on such a file system"
            )
    final = folder(run, step)
    old = final.with_suffix(".old")
    with writing(final):
        manifest = Manifest(step, n, job, dict(meta), tuple(entries))
        manifests.write(temporary / MANIFEST, manifest)
        sync(temporary)
        if final.exists() and _problem(final):
            rename_damaged(final)
        elif final.exists():
            shutil.rmtree(old, ignore_errors=True)
            # If this process is killed before the next rename, latest() finds the old folder.
            final.rename(old)
        temporary.rename(final)
        sync(final.parent)
        shutil.rmtree(old, ignore_errors=True)
    return final


def steps(run: Path) -> list[int]:
    """Return the steps of all complete checkpoints in ascending order.

    :raises StoreError: if the folder of the checkpoints, or a file, cannot be read
    """
    return sorted({step for step, path in _find(run) if not _problem(path)})


def latest(run: Path) -> Path | None:
    """Return the path of the newest complete checkpoint; None if there is no complete checkpoint.

    A checkpoint is complete if its manifest is sound and all files exist with the right sizes.

    :raises StoreError: if the folder of the checkpoints, or a file, cannot be read
    """
    return newest(run)[0]


def newest(run: Path) -> tuple[Path | None, dict[Path, str]]:
    """Return the newest complete checkpoint, and the damaged checkpoints that are newer.

    :param run: run directory
    :return: path of the newest complete checkpoint, or None if no checkpoint is complete; and a
        dict from the path of each newer checkpoint to the reason why it is not complete
    :raises StoreError: if the folder of the checkpoints, or a file, cannot be read
    """
    damaged: dict[Path, str] = {}
    for _, path in reversed(_find(run)):
        problem = _problem(path)
        if not problem:
            return path, damaged
        damaged[path] = problem
    return None, damaged


def rename_damaged(path: Path) -> Path:
    """Rename a damaged checkpoint to an unused name `step-….damaged`; return the new path.

    :raises StoreError: if renaming fails
    """
    target = path.with_suffix(".damaged")
    while target.exists():
        target = target.with_name(f"{target.name}.damaged")
    with writing(path):
        return path.rename(target)


def prune(run: Path, keep: int, every: int = 0) -> list[Path]:
    """Remove all complete checkpoints except the newest ones.

    :param run: run directory
    :param keep: number of newest checkpoints that are kept, at least 1
    :param every: number of steps; checkpoints at multiples of it are kept, too. 0: only the newest
        checkpoints are kept
    :return: former paths of the removed checkpoints
    :raises ValueError: if ``keep`` is less than 1
    :raises StoreError: if a checkpoint cannot be read or removed
    """
    if keep < 1:
        raise ValueError(f"keep = {keep}: must be at least 1")
    complete = [(step, path) for step, path in _find(run) if not _problem(path)]
    removed = [path for step, path in complete[:-keep] if not every or step % every]
    for path in removed:
        with writing(path):
            # While files are removed, the folder must not have the name of a complete checkpoint.
            removing = path.with_suffix(".removing")
            path.rename(removing)
            shutil.rmtree(removing)
    return removed


def read_node(path: Path, node: int, manifest: Manifest | None = None) -> NodeState:
    """Return the state of one node, joined from the files of its slots.

    :param path: folder of the checkpoint
    :param node: index of the node
    :param manifest: manifest of the checkpoint, with which the files are compared. None: the
        manifest is read, which takes a time proportional to the number of nodes, so pass it to read
        many nodes
    :raises StoreError: if the checkpoint has no such node, or if a file is missing or damaged
    """
    manifest = read_manifest(path) if manifest is None else manifest
    if not 0 <= node < manifest.n:
        raise StoreError(
            f"{path} has nodes 0 to {manifest.n - 1}, but not node {node}; "
            "start with the same number of nodes, or resume from the average"
        )
    length = sum(entry.parameters for entry in manifest.of(node))
    parts = [read_state(path, entry, length, manifest.step) for entry in manifest.of(node)]
    if manifest.each == 1:
        return parts[0]
    with reading(Path(path) / manifest.of(node)[0].file):
        return _joined(parts)


def read_state(path: Path, entry: Entry, length: int, step: int) -> NodeState:
    """Read and check the file of a node or slot.

    :param path: folder of the checkpoint
    :param entry: entry of the file
    :param length: number of parameters of the complete node
    :param step: step of the checkpoint, which the counters of the file must match
    :raises StoreError: if the file is missing or damaged, or if an array that has to be finite has
        NaN or infinite values
    """
    with node_file(path, entry) as objects, reading(Path(path) / entry.file):
        names, shapes = node_state.read_table(guard.rows(objects, "layout", "SiiiV"), length)
        arrays, pieces = (
            {
                name.removeprefix(group): guard.array(objects, name)
                for name, item in sorted(objects.items(), key=lambda pair: pair[0].split("/"))
                if name.startswith(group) and isinstance(item, h5py.Dataset)
            }
            for group in ("arrays/", "pieces/")
        )
        numbers = manifests.parse_facts(guard.text(objects, "numbers"), "numbers")
        manifests.check_counters(numbers, step)
        parameters = guard.array(objects, "parameters")
        state = NodeState(parameters, names, shapes, arrays, numbers, entry.slot, pieces)
        if problem := state.not_finite():
            raise StoreError(
                f"{Path(path) / entry.file} has {problem}, which older versions did not reject; to "
                f"resume from the previous checkpoint, run: mv {path} {path}.damaged"
            )
        return state


def average(path: Path, manifest: Manifest) -> dict[str, np.ndarray]:
    """Return the arrays of a checkpoint, averaged over its nodes by `node_state.over_nodes`.

    :param path: folder of the checkpoint
    :param manifest: manifest of this checkpoint
    :raises StoreError: if a file is missing or damaged, or if nodes have different arrays
    """
    with reading(path):
        return node_state.over_nodes(read_node(path, i, manifest) for i in range(manifest.n))


def _joined(parts: Sequence[NodeState]) -> NodeState:
    """Join the states of a node's slots to the state of the node.

    :raises ValueError: if the states differ in names, in shapes or in the paths of their pieces, or
        if two of them contain the same array
    """
    first = parts[0]
    arrays = dict[str, np.ndarray]()
    for part in parts:
        same = (part.names, part.shapes, part.pieces.keys())
        twice = arrays.keys() & (part.arrays.keys() | first.pieces.keys())
        if same != (first.names, first.shapes, first.pieces.keys()) or twice:
            raise ValueError(
                f"the files of slots 0 and {part.slot} of a node have different contents"
            )
        arrays |= part.arrays
    for name in first.pieces:
        arrays[name] = np.concatenate([part.pieces[name] for part in parts])
    parameters = np.concatenate([part.parameters for part in parts])
    state = NodeState(parameters, first.names, first.shapes, arrays, first.numbers)
    return replace(state, arrays=node_state.split_pieces(state))


def digest(path: Path) -> str:
    """Return the digest of a checkpoint.

    This is the SHA-256 of the parameters of all nodes in node order, as little-endian float32.

    :raises StoreError: if a file is missing or damaged
    """
    sha = hashlib.sha256()
    for entry in read_manifest(path).entries:
        with node_file(path, entry) as objects, reading(Path(path) / entry.file):
            data = guard.dataset(objects, "parameters")
            for start in range(0, len(data), PIECE):
                sha.update(data[start : start + PIECE].tobytes())
    return sha.hexdigest()


def verify(path: Path) -> list[str]:
    """Read every byte of a checkpoint and return all problems; an empty list if it is sound."""
    path = Path(path)
    try:
        manifest = read_manifest(path)
    except StoreError as error:
        return [str(error)]
    problems = []
    match = re.fullmatch(r"step-(\d+)(\.old)?", path.resolve().name)
    if match and int(match[1]) != manifest.step:
        problems.append(f"{path / MANIFEST} belongs to another step, {manifest.step}")
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
        problems.append(f"{path}: nodes have different models")
    return problems


def _find(run: Path) -> list[tuple[int, Path]]:
    """Return steps and paths of all folders that may be checkpoints, sorted by step.

    A folder `step-….old` precedes the folder that replaces it.
    """
    parent = Path(run) / "checkpoints"
    with reading(parent):
        try:
            names = [path.name for path in parent.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
    matches = [re.fullmatch(r"step-(\d+)(\.old)?", name) for name in names]
    paths = [(int(match[1]), parent / match[0]) for match in matches if match]
    return sorted(paths, key=lambda pair: (pair[0], not pair[1].suffix))


def _problem(path: Path) -> str:
    """Return the reason why a checkpoint is not complete, or "" if it is complete.

    :raises StoreError: if this cannot be decided because a file cannot be read
    """
    try:
        for entry in read_manifest(path).entries:
            with reading(file := path / entry.file):
                size = file.stat().st_size
                if size != entry.bytes:
                    raise ValueError(f"it has {size} bytes, but the manifest lists {entry.bytes}")
    except StoreError as error:
        if getattr(error.__cause__, "errno", None) not in (None, errno.ENOENT, errno.ENOTDIR):
            raise
        return str(error)
    return ""

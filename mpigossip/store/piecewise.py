"""Files of a model that are written and read without a whole large array in memory.

The format is the format of :mod:`mpigossip.store.checkpoint`. A file holds consecutive elements of
the flat parameters, and of each array that has an element for each of them, such as a momentum of
the optimizer: the array ``pieces/torch/KEY`` holds the optimizer's state KEY of all parameters, one
after the other. A file of a whole model holds an array ``arrays/torch/PARAMETER/KEY`` for each
parameter instead; :class:`StoredModel` reads both.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import h5py
import numpy as np

from mpigossip.store import StoreError, direct, guard, node_state
from mpigossip.store import manifest as manifests
from mpigossip.store.checkpoint import check_count
from mpigossip.store.hdf5 import create, new, reading, sync, write_text, writing
from mpigossip.store.manifest import FORMAT, Entry, Number
from mpigossip.store.node_file import node_file
from mpigossip.store.node_state import STATE_PIECES, state_keys

T = TypeVar("T")

PIECE = 1 << 19
"""Number of elements that are written or read at a time."""


class Stream(NamedTuple):
    """Large array that is written piece by piece."""

    dtype: np.dtype
    """Type of the elements."""
    pieces: Callable[[], Iterator[np.ndarray]]
    """Function that iterates over consecutive pieces of the elements, as 1-D arrays. If several
    ranks write parts of a model, the iteration is collective."""


class PartSource(NamedTuple):
    """Part of a model to write: consecutive elements, and small arrays."""

    names: tuple[str, ...]
    """Names of all parameters of the model."""
    shapes: tuple[tuple[int, ...], ...]
    """Shape of each parameter."""
    length: int
    """Number of elements in the part."""
    arrays: dict[str, np.ndarray]
    """Small arrays by path, such as buffers; empty unless this is the first part."""
    numbers: dict[str, Number]
    """Counters and other scalar values by name."""
    streams: dict[str, Stream]
    """Large arrays by their paths in the file: "parameters" and "pieces/torch/KEY"."""

    @property
    def nbytes(self) -> int:
        """Number of bytes of all arrays."""
        large = sum(self.length * stream.dtype.itemsize for stream in self.streams.values())
        return large + sum(array.nbytes for array in self.arrays.values())


class Span(NamedTuple):
    """Consecutive bytes of a file, as they were written."""

    begin: int
    """Offset of the first byte."""
    end: int
    """Offset after the last byte."""
    checksum: int
    """CRC-32 of the bytes."""


class DamagedPart(StoreError):
    """Error of a file whose bytes are not the bytes that were written to it."""


class OpenFile:
    """Descriptor of an existing file whose bytes are written; it is opened when it is needed.

    The file stays open between two pieces, because a network file system flushes a file when it is
    closed.
    """

    def __init__(self) -> None:
        self._descriptor: int | None = None

    def put(self, path: Path, offset: int, data: memoryview) -> None:
        """Write bytes. After an error, the next call opens the file again.

        :param path: path of the file
        :param offset: offset of the first byte in the file
        :param data: bytes to write
        :raises StoreError: if the file can't be opened or written
        """
        with writing(path):
            try:
                if self._descriptor is None:
                    flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
                    self._descriptor = os.open(path, flags)
                _write_all(self._descriptor, data, offset)
            except BaseException:
                with suppress(OSError):
                    self.close()
                raise

    def close(self) -> None:
        """Close the file, if it is open.

        :raises OSError: if bytes could not be written
        """
        descriptor = self._descriptor
        self._descriptor = None
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self) -> None:
        with suppress(OSError):
            self.close()


class WrittenPart(NamedTuple):
    """File that was written, but is not on stable storage yet."""

    path: Path
    node: int
    """Index of the node, or number of the place."""
    parameters: int
    """Number of elements of the part."""
    digest: str
    """SHA-256 of the arrays and their names, as `mpigossip.members.live.digest` computes it."""
    spans: tuple[Span, ...]
    """All bytes of the file, in the order of their offsets."""
    is_intact: bool
    """True if no operation has failed. Otherwise, the file system may have lost bytes, and reports
    this only once: only a :meth:`copy` may be used, because a second fsync would succeed."""
    file: OpenFile
    """Descriptor of the file, which :meth:`entry` and :meth:`copy` close."""

    def entry(self) -> Entry:
        """Flush the file to stable storage, and compare its bytes; return its entry.

        If this fails, only a :meth:`copy` may be flushed again.

        :raises OSError: if the file can't be flushed or read
        :raises DamagedPart: if its bytes are not the bytes that were written
        """
        self.file.close()
        sync(self.path)
        with self.path.open("rb") as file:
            descriptor = file.fileno()
            size = os.fstat(descriptor).st_size
            if size != self.spans[-1].end:
                raise DamagedPart(
                    f"{self.path} has {size} bytes, but {self.spans[-1].end} were written to it: "
                    "check the file system"
                )
            value = 0
            for span in self.spans:
                if direct.crc(descriptor, span.begin, span.end) != span.checksum:
                    raise self._damaged(span)
                value = direct.crc(descriptor, span.begin, span.end, value)
        return Entry(self.node, self.path.name, size, f"{value:08x}", self.parameters)

    def copy(self, path: Path) -> WrittenPart:
        """Copy the file to a new one, and compare all bytes; return the new file.

        :param path: file to write
        :raises OSError: if reading or writing fails
        :raises DamagedPart: if the bytes of this file are not the bytes that were written
        """
        with suppress(OSError):  # All bytes are compared below.
            self.file.close()
        block = memoryview(bytearray(1 << 22))
        with self.path.open("rb") as source, os.fdopen(new(path), "wb") as target:
            for span in self.spans:
                value = 0
                position = span.begin
                while position < span.end:
                    room = block[: span.end - position]
                    count = os.preadv(source.fileno(), [room], position)
                    if not count:
                        raise self._damaged(span)
                    value = zlib.crc32(room[:count], value)
                    _write_all(target.fileno(), room[:count], position)
                    position += count
                if value != span.checksum:
                    raise self._damaged(span)
        return self._replace(path=path, is_intact=True)

    def _damaged(self, span: Span) -> DamagedPart:
        return DamagedPart(
            f"{self.path} is damaged: its bytes {span.begin} to {span.end - 1} are not the bytes "
            "that were written: check the file system"
        )


def write(
    path: Path,
    node: int,
    slot: int,
    source: PartSource,
    attempt: Callable[[Callable[[Path], Any]], Any] | None = None,
) -> WrittenPart:
    """Write a part of a model.

    All pieces are iterated over even if writing fails, because the iteration may be collective. An
    error of the iteration itself is raised at once.

    :param path: file to write
    :param node: index of the node, or number of the place
    :param slot: index of the slot or rank
    :param source: part to write
    :param attempt: function that calls an operation of the file system with the path, and may
        repeat it; None: each operation is called once
    :raises StoreError: if writing fails
    :raises ValueError: if an array has another number of elements than the part
    """
    file = OpenFile()
    try:
        return _write(path, node, slot, source, attempt, file)
    except BaseException:
        with suppress(OSError):
            file.close()
        raise


def _write(
    path: Path,
    node: int,
    slot: int,
    source: PartSource,
    attempt: Callable[[Callable[[Path], Any]], Any] | None,
    file: OpenFile,
) -> WrittenPart:
    """Write a part of a model like :func:`write`, with a descriptor that stays open."""
    problem: Exception | None = None
    is_intact = True

    def run(operation: Callable[[Path], T]) -> T:
        def watched(path: Path) -> T:
            nonlocal is_intact
            try:
                return operation(path)
            except Exception:
                is_intact = False
                raise

        return watched(path) if attempt is None else attempt(watched)

    offsets: dict[str, int | None] = {}
    spans: list[Span] = []
    try:
        offsets, spans = run(partial(_create, node=node, slot=slot, source=source))
    except Exception as error:  # noqa: BLE001 - raised when all pieces were iterated over
        problem = error
    sha = hashlib.sha256()
    small = {f"arrays/{name}": array for name, array in source.arrays.items()}
    for name in sorted((*small, *source.streams)):
        sha.update(name.encode())
        if name in small:
            sha.update(np.ascontiguousarray(small[name]).data)
            continue
        stream = source.streams[name]
        position = 0
        checksum = 0
        for piece in stream.pieces():
            if problem is not None or not len(piece):
                continue
            data = np.ascontiguousarray(piece, stream.dtype)
            sha.update(data.data)
            content = data.reshape(-1).view(np.uint8).data
            checksum = zlib.crc32(content, checksum)
            offset = offsets[name]
            try:
                if offset is None:
                    raise ValueError(f"{path} has no space for {name}")
                run(partial(file.put, offset=offset + position, data=content))
            except Exception as error:  # noqa: BLE001
                problem = error
            position += data.nbytes
        expected = source.length * stream.dtype.itemsize
        if problem is None and position != expected:
            problem = ValueError(f"{name} has {position} bytes, but the part needs {expected}")
        if position and problem is None:
            begin = offsets[name] or 0
            spans.append(Span(begin, begin + position, checksum))
    if problem is not None:
        raise problem
    return WrittenPart(
        path, node, source.length, sha.hexdigest(), tuple(sorted(spans)), is_intact, file
    )


def _create(
    path: Path, node: int, slot: int, source: PartSource
) -> tuple[dict[str, int | None], list[Span]]:
    """Create a file with all small arrays.

    :return: the offset of each large array, None if it is empty; and the bytes between the large
        arrays
    :raises StoreError: if the file cannot be written, or has more objects or text than readers
        accept
    """
    datasets: dict[str, h5py.Dataset] = {}
    numbers = json.dumps(source.numbers, default=lambda value: value.item())
    arrays = [f"arrays/{name}" for name in source.arrays]
    names = [*arrays, *source.streams, "arrays", "pieces", "layout", "numbers"]
    objects = {path for name in names for path in accumulate(name.split("/"), "{}/{}".format)}
    limit = guard.max_objects(source.nbytes)
    check_count(path, len(objects), "groups and arrays", limit)
    check_count(path, len(numbers), "bytes of counters and texts", guard.TEXT)
    with writing(path), create(path, **direct.LAYOUT) as file:
        file.attrs["format"] = np.bytes_(FORMAT)
        file.attrs["node"] = node
        file.create_group("arrays")
        file.attrs["slot"] = slot
        file.create_group("pieces")
        for name, array in source.arrays.items():
            file.create_dataset(f"arrays/{name}", data=array)
        for name, stream in sorted(source.streams.items()):
            datasets[name] = direct.allocate(file, name, (source.length,), stream.dtype)
        table = node_state.table(source.names, source.shapes)
        file.create_dataset("layout", data=table)
        write_text(file, "numbers", numbers)
        offsets = {name: dataset.id.get_offset() for name, dataset in datasets.items()}
        sizes = {name: dataset.nbytes for name, dataset in datasets.items()}
    spans = []
    position = 0
    with writing(path), path.open("rb") as written:
        large = sorted((offsets[name] or 0, size) for name, size in sizes.items() if size)
        end = max([os.fstat(written.fileno()).st_size, *(sum(span) for span in large)])
        for offset, size in (*large, (end, 0)):
            checksum = direct.crc(written.fileno(), position, offset)
            spans.append(Span(position, offset, checksum))
            position = offset + size
    return offsets, spans


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)


class StoredModel:
    """Model in open files, from which ranges of elements are read: it need not fit into memory.

    Each file holds consecutive elements of the flat parameters. Only the files that contain the
    elements of a range need to be open. If a file cannot be read, StoreError is raised.
    """

    def __init__(
        self,
        folder: Path,
        files: Sequence[tuple[Entry, int]],
        length: int,
        step: int,
        before_opening: Callable[[str], None] = lambda name: None,
    ):
        """Open the files, and compare their sizes, checksums and structure.

        :param folder: folder of the files
        :param files: entries of the files to open, in the order of their elements, each with the
            index of its first element
        :param length: number of elements of the whole model
        :param step: step to which the files belong
        :param before_opening: function that is called with the name of each file before it is
            opened
        :raises StoreError: if a file is missing or damaged
        """
        self._folder = folder
        self._is_whole = [entry.parameters for entry, _ in files] == [length]
        self.names: tuple[str, ...] = ()
        """Names of the parameters of the model."""
        self.shapes: tuple[tuple[int, ...], ...] = ()
        """Shape of each parameter."""
        self.numbers: dict[str, Number] = {}
        """Counters and other scalar values by name."""
        self._files: list[dict[str, Any]] = []
        self._firsts = [first for _, first in files]
        self._counts = [entry.parameters for entry, _ in files]
        self._paths = [folder / entry.file for entry, _ in files]
        self._stack = ExitStack()
        try:
            for entry, _ in files:
                before_opening(entry.file)
                self._open(entry, length, step)
        except BaseException:
            self.close()
            raise

    def _open(self, entry: Entry, length: int, step: int) -> None:
        objects = self._objects(entry)
        with reading(self._folder / entry.file):
            rows = guard.rows(objects, "layout", "SiiiV")
            names, shapes = node_state.read_table(rows, length)
            numbers = manifests.parse_facts(guard.text(objects, "numbers"), "numbers")
            manifests.check_counters(numbers, step)
            if self._files and (names, shapes) != (self.names, self.shapes):
                raise ValueError("it belongs to a model with other parameters")
        if not self._files:
            self.names, self.shapes, self.numbers = names, shapes, numbers
            self._begins = [*accumulate(map(prod, shapes), initial=0)]
        self._files.append(objects)

    def _objects(self, entry: Entry) -> dict[str, Any]:
        """Open a file, and return its objects; allow this process more open files if necessary."""
        while True:
            try:
                return self._stack.enter_context(node_file(self._folder, entry))
            except StoreError as error:
                number = getattr(error.__cause__, "errno", None)
                if number != errno.EMFILE or not raise_file_limit():
                    raise

    @property
    def count(self) -> int:
        """Number of open files."""
        return len(self._files)

    def close(self) -> None:
        """Close the files."""
        self._stack.close()

    def check(self, index: int, digest: str) -> None:
        """Read an open file, and compare the digest of its arrays.

        :param index: index of the file among the open ones
        :param digest: SHA-256 of the arrays of the file
        :raises StoreError: if the digest differs, or if an array that has to be finite has NaN or
            infinite values
        """
        if self.digest(index) != digest:
            raise StoreError("its digest differs from the digest in the record of its round")

    def digest(self, index: int) -> str:
        """Return the SHA-256 of the arrays of a file, read piece by piece.

        :param index: index of the file among the open ones
        :raises StoreError: if an array that has to be finite has NaN or infinite values
        """
        sha = hashlib.sha256()
        groups = ("arrays/", "pieces/", "parameters")
        datasets = {
            name: item
            for name, item in self._files[index].items()
            if name.startswith(groups) and isinstance(item, h5py.Dataset)
        }
        for name in sorted(datasets):
            sha.update(name.encode())
            for piece in self._read(index, datasets[name]):
                if node_state.must_be_finite(name, piece.dtype) and not np.isfinite(piece).all():
                    raise StoreError(f"it has NaN or infinite values in {name}")
                sha.update(np.ascontiguousarray(piece).data)
        return sha.hexdigest()

    def _read(self, index: int, dataset: h5py.Dataset) -> Iterator[np.ndarray]:
        """Iterate over consecutive pieces of a dataset in row-major order."""
        with reading(self._paths[index]):
            if not dataset.shape:
                yield dataset[()]
                return
            for start in range(0, dataset.size, PIECE):
                yield _elements(dataset, start, min(start + PIECE, dataset.size))

    @property
    def small(self) -> dict[str, np.ndarray]:
        """Small arrays of the first open file by path, such as buffers."""
        arrays = {}
        large = {path for paths in self._large().values() for path in paths.values()}
        with reading(self._paths[0]):
            for name, item in self._files[0].items():
                path = name.removeprefix("arrays/")
                if path != name and path not in large and isinstance(item, h5py.Dataset):
                    arrays[path] = item[()]
        return arrays

    def _large(self) -> dict[str, dict[str, str]]:
        """Return the paths of the optimizer's arrays of the parameters' shapes.

        :return: for each key of the optimizer's state, the path of each parameter's array
        """
        shapes = dict(zip(self.names, self.shapes, strict=True))
        keys: dict[str, dict[str, str]] = {}
        for name, key in state_keys(self.numbers):
            path = f"torch/{name}/{key}"
            item = self._files[0].get(f"arrays/{path}")
            # Other arrays, such as the number of steps, are small. So is an array of a part's file:
            # its tensor was not sharded like its parameter, and only the first file has it.
            is_whole = (
                self._is_whole and isinstance(item, h5py.Dataset) and item.shape == shapes.get(name)
            )
            has_pieces = f"{STATE_PIECES}{key}" in self._files[0]
            is_piece = has_pieces and item is None and name in shapes
            if is_whole or is_piece:
                keys.setdefault(key, {})[name] = path
        return keys

    def state_names(self) -> dict[str, set[str]]:
        """Return, for each key of the optimizer's state, the parameters that have such an array."""
        return {key: set(paths) for key, paths in self._large().items()}

    def state_dtype(self, key: str) -> np.dtype:
        """Return the type of the elements of the optimizer's state of all parameters.

        :param key: key of the state, such as "exp_avg", of :meth:`state_names`
        """
        objects = self._files[0]
        if (pieces := f"{STATE_PIECES}{key}") in objects:
            return objects[pieces].dtype
        return np.result_type(
            *(objects[f"arrays/{path}"].dtype for path in self._large()[key].values())
        )

    def parameters(self, begin: int, end: int) -> np.ndarray:
        """Return a range of elements of the flat parameters.

        :param begin: index of the first element
        :param end: index after the last element
        :raises StoreError: if the open files do not contain the range, or cannot be read
        """
        return self._range("parameters", begin, end)

    def state(self, key: str, begin: int, end: int) -> np.ndarray:
        """Return a range of the optimizer's state of all parameters; 0 where a parameter has none.

        :param key: key of the state, such as "exp_avg"
        :param begin: index of the first element in the flat parameters
        :param end: index after the last element
        :raises StoreError: if the open files do not contain the range, or cannot be read
        """
        if f"{STATE_PIECES}{key}" in self._files[0]:
            return self._range(f"{STATE_PIECES}{key}", begin, end)
        parts = []
        index = max(0, bisect_right(self._begins, begin) - 1)
        while index < len(self.names) and self._begins[index] < end:
            first, last = self._begins[index], self._begins[index + 1]
            low, high = max(begin, first) - first, min(end, last) - first
            item = self._files[0].get(f"arrays/torch/{self.names[index]}/{key}")
            if high > low:
                shape = self.shapes[index]
                has = isinstance(item, h5py.Dataset) and item.shape == shape
                with reading(self._paths[0]):
                    parts.append(_elements(item, low, high) if has else np.zeros(high - low, "f4"))
            index += 1
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    def _range(self, name: str, begin: int, end: int) -> np.ndarray:
        parts = []
        position = begin
        for objects, path, first, count in zip(
            self._files, self._paths, self._firsts, self._counts, strict=True
        ):
            low, high = max(position, first), min(end, first + count)
            if low < high and low == position:
                with reading(path):
                    data = guard.dataset(objects, name)
                    if data.shape != (count,):
                        raise ValueError(f"{name} has the shape {data.shape}, not {(count,)}")
                    parts.append(data[low - first : high - first])
                position = high
        if position < end:
            raise StoreError(
                f"{self._folder}: the files of a model do not contain its elements {position} to "
                f"{end - 1}; copy all files of the model back, or remove them"
            )
        if not parts:
            return np.zeros(0, guard.dataset(self._files[0], name).dtype)
        return np.concatenate(parts) if len(parts) != 1 else parts[0]

    def digest_as_whole(self) -> str:
        """Return the digest that the same model has in one file; all files have to be open.

        :raises StoreError: if the open files do not contain the whole model, or cannot be read
        """
        large = {
            f"arrays/{path}": (key, name)
            for key, paths in self._large().items()
            for name, path in paths.items()
        }
        small = {f"arrays/{name}": array for name, array in self.small.items()}
        sha = hashlib.sha256()
        for path in sorted((*small, *large, "parameters")):
            sha.update(path.encode())
            if path in small:
                sha.update(np.ascontiguousarray(small[path]).data)
                continue
            key, name = large.get(path, ("", ""))
            index = self.names.index(name) if name else 0
            first = self._begins[index]
            last = self._begins[index + 1] if name else self._begins[-1]
            for begin in range(first, last, PIECE):
                end = min(begin + PIECE, last)
                piece = self.state(key, begin, end) if name else self.parameters(begin, end)
                sha.update(np.ascontiguousarray(piece).data)
        return sha.hexdigest()


def _elements(
    dataset: h5py.Dataset, begin: int, end: int, prefix: tuple[int, ...] = ()
) -> np.ndarray:
    """Return a range of the elements of a dataset in row-major order, reading only these.

    :param dataset: dataset with at least one dimension
    :param begin: index of the first element
    :param end: index after the last element
    :param prefix: first indices of the part of the dataset in which elements are counted
    """
    shape = dataset.shape[len(prefix) :]
    if len(shape) == 1 or begin >= end:
        return dataset[(*prefix, slice(begin, end))].reshape(-1)
    width = prod(shape[1:])
    low, high = -(-begin // width), end // width
    if low > high:
        return _elements(dataset, begin - high * width, end - high * width, (*prefix, high))
    parts = []
    if begin < low * width:
        first = begin - (low - 1) * width
        parts.append(_elements(dataset, first, width, (*prefix, low - 1)))
    if low < high:
        parts.append(dataset[(*prefix, slice(low, high))].reshape(-1))
    if high * width < end:
        parts.append(_elements(dataset, 0, end - high * width, (*prefix, high)))
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


def raise_file_limit() -> bool:
    """Raise the soft limit of this process's open files; return False if it is the hard limit.

    The new limit is twice the old one, or the hard limit if that is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * soft if hard == resource.RLIM_INFINITY else min(2 * soft, hard)
    if wanted <= soft:
        return False
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return True


def source_of(
    model: StoredModel, begin: int, end: int, numbers: Mapping[str, Number]
) -> PartSource:
    """Return a range of a stored model as a part to write.

    :param model: model whose open files contain the range
    :param begin: index of the first element
    :param end: index after the last element
    :param numbers: counters and other scalar values to write
    """

    def pieces(read: Callable[[int, int], np.ndarray]) -> Iterator[np.ndarray]:
        for start in range(begin, end, PIECE):
            yield read(start, min(start + PIECE, end))

    streams = {"parameters": Stream(np.dtype("<f4"), lambda: pieces(model.parameters))}
    for key in model.state_names():
        read = partial(model.state, key)
        stream = Stream(model.state_dtype(key), partial(pieces, read))
        streams[f"{STATE_PIECES}{key}"] = stream
    arrays = {} if begin else model.small
    return PartSource(model.names, model.shapes, end - begin, arrays, {**numbers}, streams)

"""Validate HDF5 files of unknown origin before reading them.

An HDF5 file can refer to other files (external links, external storage, virtual datasets), declare
arrays far larger than itself, give one array many names, and crash the library. Such files are
rejected, with two exceptions, which this package writes itself: the virtual dataset of a manifest,
whose elements it never reads, and second names of the columns of a log. A file may contain groups
and datasets behind hard links, with numbers and strings of fixed length, and each byte of a dataset
must be in the file. Reading its arrays then takes no more memory than the file has bytes. Tables
with rows that were never written are an exception: they may take 64 times this memory, and always
64 MiB. If a file is rejected, ValueError is raised, which `hdf5.reading` converts to StoreError.

The functions at the top of the module check, in this order, the kind of the file, headers that
crash HDF5, links, names and cycles, sizes and compression, and types. The functions from `array` on
read the values.
"""

import io
import math
import os
import re
import stat
import struct
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5a, h5d, h5g, h5l, h5o, h5s, h5t, h5z

from mpigossip.store import StoreError

OBJECTS = 1 << 17
"""Largest number of groups and datasets in a file; checking each takes 11 kB and up to 0.3 ms."""
ATTRIBUTES = 1 << 10
"""Largest number of attributes of one object."""
FEW_OBJECTS = 1 << 14
"""Number of groups and datasets that a file of any size may have."""
BYTES_OF_OBJECT = 1 << 9
"""Number of bytes that a file must have for each group or dataset above `FEW_OBJECTS` of them."""
NAME = 1 << 10
"""Largest number of bytes of a name."""
ATTRIBUTE_BYTES = 1 << 16
"""Largest number of bytes of an attribute."""
TEXT = 1 << 24
"""Largest number of bytes of a long text: a job, an environment or the counters."""
SPARSE = 64
"""Largest ratio of the size of tables in memory to the size of their file.

Tables can be larger than their file, because HDF5 does not store rows that were never written, such
as the rows before the first value of a column.
"""
SMALL_TABLES = 1 << 26
"""Number of bytes that tables may have in memory, however small their file is."""
METADATA = 1 << 16
"""Largest number of bytes that HDF5 reads at once when it reads headers."""
HEADER = 68
"""Number of bytes of the longest header that `_Checked` checks, without its checksum."""
CHUNKS = 1 << 20
"""Largest number of chunks of a table, and largest number of bytes of the index of its chunks."""
SEAL = "checksum"
"""Name of the attribute with the checksum of all other attributes."""


def regular(path: Path, follow: bool = True) -> io.FileIO:
    """Open a file for reading if it is a regular file, because reading a pipe might never end.

    :param path: path of the file
    :param follow: whether ``path`` may be a symbolic link. The files of a checkpoint may not,
        because they must be in the folder of the checkpoint
    :raises OSError: if the file cannot be opened
    :raises StoreError: if it is not a regular file
    """
    kind = path.stat(follow_symlinks=follow).st_mode
    if stat.S_ISREG(kind):
        more = os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
        file = io.FileIO(path, opener=lambda name, flags: os.open(name, flags | more))
        # Another process may have replaced the file since the check above.
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return file
        file.close()
    if stat.S_ISLNK(kind):
        raise StoreError(f"{path} is a symbolic link: replace it by the file that it points to")
    kind_name = "folder" if stat.S_ISDIR(kind) else "pipe, socket or device"
    raise StoreError(
        f"{path} is a {kind_name}, not a regular file: replace it by a copy of the file that "
        "should be there"
    )


LIST = struct.Struct("<4sBBBBBBBB6Q")
"""Header of an HDF5 extensible array (EAHD)."""
GROWTH = (32, 4, 16, 4, 10)
"""Growth parameters of an extensible array; HDF5 always uses these values."""
TREE = struct.Struct("<4sBBIHHBBQHQ")
"""Header of an HDF5 B-tree of version 2 (BTHD)."""
TREES = (5, 6, 8, 9, 10, 11)
"""Types of B-trees in files of this package: for links, attributes and chunks."""


class _Checked:
    """File object for h5py's driver "fileobj", which hides headers that would crash HDF5.

    HDF5 2.0 does not check the sizes in the header of a B-tree if the checksum of the header is
    right. With invalid sizes or types, it divides by 0, allocates 4 GB, or jumps to an invalid
    address. This object replaces such a header by zeros, which HDF5 rejects.
    """

    def __init__(self, file: Any) -> None:
        self.file = file
        self.seek = file.seek
        self.tell = file.tell

    def readinto(self, data: memoryview) -> int:
        position = self.file.tell()
        count = self.file.readinto(data)
        if len(data) > METADATA:
            return count
        # A header may begin before the data that is read, and end after it.
        before = min(position, HEADER)
        self.file.seek(position - before)
        around = self.file.read(before + count + HEADER)
        for name, sound in ((b"BTHD", _sound_tree), (b"EAHD", _sound_list)):
            for offset in (match.start() for match in re.finditer(name, around)):
                if not sound(around[offset : offset + HEADER]):
                    start, stop = (min(max(0, offset + k - before), count) for k in (0, HEADER))
                    data[start:stop] = bytes(stop - start)
        self.file.seek(position + count)
        return count


def _sound_tree(header: bytes) -> bool:
    """Return whether the header of a B-tree may be in a file of this package.

    An incomplete header is accepted.
    """
    if len(header) < TREE.size:
        return True
    _, _, kind, node, row, depth, split, merge, _, top, total = TREE.unpack_from(header)
    capacity = (node - 10) // max(row, 1)
    sizes = row > 0 and node <= METADATA and capacity >= 2 and depth <= 32
    counts = top <= capacity and (top < total <= CHUNKS if depth else top == total)
    return kind in TREES and sizes and counts and 0 < merge < split <= 100


def _sound_list(header: bytes) -> bool:
    """Return whether a file with this header of an extensible array can be accepted.

    Such an array is the index of the chunks of a table. An incomplete header is accepted.
    """
    if len(header) < LIST.size:
        return True
    _, _, kind, width, *rest = LIST.unpack_from(header)
    counts = rest[5:]
    return kind <= 1 and 8 <= width <= 24 and tuple(rest[:5]) == GROWTH and max(counts) <= CHUNKS


def hdf5(file: Any) -> h5py.File:
    """Return the HDF5 content of an open binary file, for reading; its objects are not checked."""
    return h5py.File("file", "r", "fileobj", fileobj=_Checked(file))


@contextmanager
def opened(file: Any, **allowed: Any) -> Iterator[tuple[h5py.File, dict[str, Any]]]:
    """Open the HDF5 content of an open file, check it, and yield it with its objects by path.

    HDF5 gets only this file object, and opens no file by its name.

    :param file: binary file
    :param allowed: keyword arguments of :func:`check_objects`
    :raises ValueError: if an object is rejected
    """
    size = file.seek(0, os.SEEK_END)
    with hdf5(file) as content:
        yield content, check_objects(content, size, **allowed)


def check_objects(
    content: h5py.File,
    size: int,
    *,
    tables: bool = False,
    again: str = "",
    views: Collection[str] = (),
) -> dict[str, Any]:
    """Check all groups and datasets of a file, and return them by path.

    :param content: open HDF5 file
    :param size: number of bytes of the file
    :param tables: whether datasets may consist of chunks, with or without checksums, of which some
        were never written
    :param again: path of a group whose objects may have a second hard link in the root group; "":
        no group
    :param views: paths of virtual datasets, whose type and storage are not checked
    :raises ValueError: if an object is rejected
    """
    items = _objects(content, size, again)
    stored = 0
    spread = 0
    for path, thing in items.items():
        if isinstance(thing, h5py.Dataset) and path not in views and f"{again}/{path}" not in items:
            in_file, in_memory = _bytes(path, thing.id, size, tables)
            stored = stored + in_file
            spread = spread + in_memory
    if stored > size:
        raise ValueError(f"its arrays declare {stored} bytes, but the file has {size}")
    if spread > max(SMALL_TABLES, SPARSE * size):
        raise ValueError(f"its tables declare {spread} bytes, too many for a file of {size} bytes")
    return items


def max_objects(size: int) -> int:
    """Return the largest number of groups and arrays that a file of ``size`` bytes may have.

    Checking an object takes time and memory. Only large models need many objects, and their files
    are large. A small file with many objects was not written by this package.
    """
    return min(OBJECTS, FEW_OBJECTS + size // BYTES_OF_OBJECT)


def _objects(content: h5py.File, size: int, again: str) -> dict[str, Any]:
    """Return all groups and datasets of a file by path, after checking their names and links.

    :param content: open HDF5 file
    :param size: number of bytes of the file
    :param again: path of a group whose objects may have a second hard link in the root group
    :raises ValueError: if there are too many objects, a link that is not hard, an invalid name, a
        second path to an object (as in a cycle), or an object of another kind
    """
    limit = max_objects(size)
    objects: dict[str, Any] = {}
    # h5o.get_info is not used, because HDF5 2.0 crashes in it if the index of a dataset is damaged.
    paths: dict[int, str] = {h5g.get_objinfo(content.id).objno[0]: "/"}
    groups = [("", content.id)]
    while groups:
        above, group = groups.pop()
        if len(objects) + group.get_num_objs() > limit:
            raise ValueError(
                f"it has more than {limit} groups and arrays, too many for a file of {size} bytes"
            )
        for link in group:
            name = link.decode()
            info = group.links.get_info(link)
            if not name.isprintable() or not 0 < len(link) <= NAME or name in (".", ".."):
                raise ValueError(f"{name[:40]!r} is not a valid name of an array")
            path = above + name
            if info.type != h5l.TYPE_HARD:
                raise ValueError(f'"{path}" is a soft or external link, which is not allowed')
            thing = h5o.open(group, link)
            first = paths.setdefault(info.u, path)
            if first != path and {first, path} != {name, f"{again}/{name}"}:
                raise ValueError(
                    f'"{path}" and "{first}" name the same object, which is not allowed here'
                )
            if isinstance(thing, h5g.GroupID):
                objects[path] = h5py.Group(thing)
                groups += [(path + "/", thing)] if first == path else []
            elif isinstance(thing, h5d.DatasetID):
                objects[path] = h5py.Dataset(thing)
            else:
                raise ValueError(f'"{path}" is neither a group nor an array')
    return objects


def _bytes(path: str, data: h5d.DatasetID, size: int, tables: bool) -> tuple[int, int]:
    """Check the type and the storage of a dataset, and return its size.

    :param path: path of the dataset, for error messages
    :param data: dataset
    :param size: number of bytes of the file
    :param tables: whether the dataset may consist of chunks
    :return: number of bytes in the file; and number of bytes in memory if the dataset consists of
        chunks, otherwise 0
    :raises ValueError: if this package does not write such datasets
    """
    kind = data.get_type()
    creation = data.get_create_plist()
    if not _plain(kind):
        raise ValueError(f'"{path}" has a type other than numbers or texts of fixed length')
    if data.get_space().get_simple_extent_type() not in (h5s.SCALAR, h5s.SIMPLE):
        raise ValueError(f'"{path}" is a dataset without a shape')
    layout = creation.get_layout()
    if layout == h5d.VIRTUAL or creation.get_external_count():
        raise ValueError(f'"{path}" is stored in other files, which is not allowed')
    width = kind.get_size()
    claimed = math.prod(data.shape) * width
    stored = data.get_storage_size()
    filters = [creation.get_filter(k)[0] for k in range(creation.get_nfilters())]
    if tables and layout == h5d.CHUNKED:
        if filters not in ([], [h5z.FILTER_FLETCHER32]):
            raise ValueError(f'"{path}" uses filters of HDF5 other than the checksum fletcher32')
        return _chunks(path, data, size, width, bool(filters)), claimed
    if layout not in (h5d.CONTIGUOUS, h5d.COMPACT) or filters:
        raise ValueError(f'"{path}" is not stored contiguously')
    end = data.get_offset() + stored if stored and layout == h5d.CONTIGUOUS else 0
    if stored != claimed or end > size:
        raise ValueError(f'"{path}" needs {claimed} bytes, but a file of {size} bytes lacks some')
    return stored, 0


def _chunks(path: str, data: h5d.DatasetID, size: int, width: int, checked: bool) -> int:
    """Return the number of bytes of a table's chunks in the file.

    :param path: path of the table, for error messages
    :param data: dataset
    :param size: number of bytes of the file
    :param width: number of bytes of an element
    :param checked: whether each chunk has a checksum of 4 bytes
    :raises ValueError: if a chunk has another size, does not lie in the file, or was stored without
        its checksum, or if the chunks are larger than the file
    """
    chunk_bytes = math.prod(data.get_create_plist().get_chunk()) * width + 4 * checked
    count = 0

    def check(chunk: Any) -> None:
        nonlocal count
        count += 1
        name = f'the chunk of "{path}" at {chunk.chunk_offset}'
        if chunk.filter_mask:
            raise ValueError(f"{name} was stored without its checksum")
        if chunk.size != chunk_bytes or chunk.byte_offset + chunk_bytes > size:
            raise ValueError(
                f"{name} has {chunk.size} bytes at position {chunk.byte_offset} of a file of "
                f"{size} bytes: it must have {chunk_bytes} bytes, and lie in the file"
            )
        if count * chunk_bytes > size:
            raise ValueError(f'"{path}" has more chunks than fit into the file')

    if data.get_storage_size():
        data.chunk_iter(check)
    return count * chunk_bytes


def _plain(kind: h5t.TypeID, within: int = 0) -> bool:
    """Return whether a type consists of numbers, Booleans and strings of fixed length only.

    The result is true for complex numbers, too, and for compound types of at most 8 members that
    are such types or 1-D arrays of them.

    :param kind: type to check
    :param within: number of compound types and arrays that contain this type
    """
    if kind.committed() or not 0 < kind.get_size() <= TEXT:
        return False
    if isinstance(kind, h5t.TypeStringID):
        return not kind.is_variable_str()
    if isinstance(kind, h5t.TypeArrayID):
        return within == 1 and len(kind.get_array_dims()) == 1 and _plain(kind.get_super(), 2)
    if isinstance(kind, h5t.TypeEnumID):
        return kind.get_nmembers() == 2 and kind.get_size() == 1
    if isinstance(kind, h5t.TypeCompoundID):
        members = range(min(kind.get_nmembers(), 9))
        small = not within and len(members) < 9
        return small and all(_plain(kind.get_member_type(k), 1) for k in members)
    return kind.get_class() in (h5t.INTEGER, h5t.FLOAT) and kind.get_size() <= 16


def array(
    objects: dict[str, Any], path: str, kind: str | None = None, ndim: int | None = None
) -> Any:
    """Return the dataset at a path as a NumPy array, after a check of its dtype and dimensions.

    :param objects: objects by path, as :func:`check_objects` returns them
    :param path: path of the dataset
    :param kind: required dtype such as "<f4", or accepted values of `dtype.kind` such as "iu";
        None: any dtype
    :param ndim: number of dimensions; None: any number
    :raises ValueError: if there is no such dataset, or if it has another dtype or number of
        dimensions
    """
    data = dataset(objects, path)
    fits = kind is None or data.dtype.kind in kind or data.dtype.str == kind
    if not fits or (ndim is not None and data.ndim != ndim):
        raise ValueError(f'"{path}" has an unexpected type or shape: {data.dtype}, {data.shape}')
    return data[()]


def rows(objects: dict[str, Any], path: str, kinds: str) -> list[tuple]:
    """Read the rows of a 1-D dataset with a compound type, as tuples of Python objects.

    :param objects: objects by path, as :func:`check_objects` returns them
    :param path: path of the dataset
    :param kinds: value of `dtype.kind` for each member, such as "Si"
    :raises ValueError: if there is no such dataset, or if its members are of other kinds
    """
    table = array(objects, path, "V", 1)
    if "".join(table.dtype[name].kind for name in table.dtype.names or ()) != kinds:
        raise ValueError(f'"{path}" is a table with other columns than expected: {table.dtype}')
    return [tuple(v.decode() if isinstance(v, bytes) else v for v in row) for row in table.tolist()]


def dataset(objects: dict[str, Any], path: str) -> h5py.Dataset:
    """Return the dataset at a path without reading its elements.

    :raises ValueError: if there is no dataset at this path
    """
    data = objects.get(path)
    if not isinstance(data, h5py.Dataset):
        raise ValueError(f'"{path}" is missing')
    return data


def text(objects: dict[str, Any], path: str) -> str:
    """Read a dataset of one string, as `hdf5.write_text` writes it.

    :param objects: objects by path, as :func:`check_objects` returns them
    :param path: path of the dataset
    :raises ValueError: if there is no such string, or if it contains control characters
    """
    return printable(array(objects, path, "S", 0).decode(), path)


def printable(value: str, name: str) -> str:
    """Check that a text cannot control a terminal, and return the text.

    :param value: text to check
    :param name: name of the text, for the error message
    :raises ValueError: if it contains control characters other than tab, newline and return
    """
    control = next((c for c in value if c < " " and c not in "\t\n\r" or c == "\x7f"), None)
    if control is not None:
        raise ValueError(f'"{name}" contains the control character {control!r}')
    return value


def attribute(thing: Any, name: str, long: bool = False) -> Any:
    """Read an attribute, which is a string, a number or an array of numbers.

    :param thing: file, group or dataset
    :param name: name of the attribute
    :param long: whether the attribute may have up to `TEXT` bytes instead of
        `ATTRIBUTE_BYTES`, and may be a string of variable length in HDF5's heap
    :return: Python object, or array
    :raises ValueError: if there is no such attribute, or if it is of another type or too long
    """
    if not h5a.exists(thing.id, name.encode()):
        raise ValueError(f'it has no attribute "{name}"')
    info = h5a.open(thing.id, name.encode())
    limit = TEXT if long else ATTRIBUTE_BYTES
    kind = info.get_type()
    shape = info.shape
    is_text = isinstance(kind, h5t.TypeStringID)
    free = long and is_text and kind.is_variable_str() and not kind.committed()
    small = _plain(kind) and math.prod(shape) * kind.get_size() <= limit
    fits = (small or free) and (shape == () or not is_text)
    value = thing.attrs[name] if fits else h5py.Empty("f4")
    if isinstance(value, bytes):
        value = value.decode(errors="surrogateescape")
    if isinstance(value, h5py.Empty) or (isinstance(value, str) and len(value) > limit):
        raise ValueError(f'the attribute "{name}" is not a number, text or array of {limit} bytes')
    if isinstance(value, str):
        return printable(value, name)
    return value.item() if np.shape(value) == () else value


def attributes(thing: Any, long: bool = False) -> dict[str, Any]:
    """Return all attributes by name; the parameters are as in :func:`attribute`.

    :raises ValueError: if there are more than `ATTRIBUTES`, or if one of them is not accepted
    """
    count = h5a.get_num_attrs(thing.id)
    if count > ATTRIBUTES:
        raise ValueError(f"it has {count} attributes, but at most {ATTRIBUTES} are allowed")
    names = [h5a.open(thing.id, index=k).name.decode() for k in range(count)]
    return {name: attribute(thing, name, long) for name in names}


def seal(thing: Any) -> None:
    """Store a checksum of all attributes as an attribute, as HDF5 does not check long texts."""
    facts = attributes(thing, long=True)
    facts.pop(SEAL, None)
    thing.attrs[SEAL] = _sum(facts)


def sealed(thing: Any) -> dict[str, Any]:
    """Return all attributes except the checksum that :func:`seal` has stored.

    :raises ValueError: if there is such a checksum, but it differs
    """
    facts = attributes(thing, long=True)
    if SEAL in facts and facts.pop(SEAL) != _sum(facts):
        raise ValueError("its attributes are damaged: their checksum differs")
    return facts


def _sum(facts: dict[str, Any]) -> int:
    return zlib.crc32(repr(sorted(facts.items())).encode(errors="surrogateescape"))

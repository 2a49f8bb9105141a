"""Validate untrusted HDF5 files before reading them.

HDF5 files can name other files (external links, raw data, virtual datasets), claim arrays far
larger than themselves, reach one array by many names, and crash the library. Ours do nothing of
that, so all of it is rejected: groups and arrays behind hard links, numbers and texts of fixed
length, each byte of an array in the file. What is then read takes no more memory than the file has
bytes (a table with rows left open: 64 times that). Rejections are ValueErrors, from which
`hdf5.reading` makes messages. Below: kinds of files, headers that crash HDF5, links and names and
cycles, sizes and compression, types; then what reads the values.
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
ATTRIBUTES = 1 << 10
"""Most groups and arrays in a file (11 kB and 0.1 to 0.3 ms each), most attributes of one."""
FEW_OBJECTS = 1 << 14
BYTES_OF_OBJECT = 1 << 9
"""Groups and arrays that a file of any size may have, and bytes of a file for each further one."""
NAME = 1 << 10
WORDS = 1 << 16
TEXT = 1 << 24
"""Most bytes of a name, of an attribute, and of a job, an environment or the counters."""
SPARSE = 64
LEAST = 1 << 26
"""Bytes of tables for a byte of their file, as rows of later columns are open; and in any file."""
METADATA = 1 << 16
HEADER = 68
"""Most bytes that HDF5 reads of its headers at once, and of the longest that is checked."""
CHUNKS = 1 << 20
"""Most chunks of a table, and bytes of their index."""
SEAL = "checksum"


def regular(path: Path, follow: bool = True) -> io.FileIO:
    """Open a regular file for reading; reading from a pipe or a device might never end.

    Without `follow` it is no symbolic link either: a name inside a checkpoint means a file there.
    Raises OSError where it can't be opened, StoreError where it is something else.
    """
    kind = path.stat(follow_symlinks=follow).st_mode
    if stat.S_ISREG(kind):
        more = os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
        file = io.FileIO(path, opener=lambda name, flags: os.open(name, flags | more))
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # nothing else was put there meanwhile
            return file
        file.close()
    link = "is a symbolic link; put the file itself there"
    raise StoreError(
        f"{path} {link if stat.S_ISLNK(kind) else 'is no regular file; put a copy of it there'}"
    )


LIST = struct.Struct("<4sBBBBBBBB6Q")
GROWTH = (32, 4, 16, 4, 10)  # HDF5's own numbers for such an array; nobody sets others
TREE = struct.Struct("<4sBBIHHBBQHQ")
TREES = (5, 6, 8, 9, 10, 11)
"""HDF5's kinds of B-trees that our files have: of links, of attributes, of chunks."""


class _Checked:
    """A file as h5py's "fileobj" driver wants one, which spares HDF5 headers it would die of.

    HDF5 2.0 takes a B-tree's sizes for granted where its checksum is right: 0 is divided by, 4 GB
    are allocated, a foreign kind is a jump to nowhere. Such a header reads as zeros here, which
    HDF5 rejects.
    """

    def __init__(self, file: Any) -> None:
        self.file = file
        self.seek = file.seek
        self.tell = file.tell

    def readinto(self, data: memoryview) -> int:
        at = self.file.tell()
        count = self.file.readinto(data)
        if len(data) > METADATA:
            return count
        before = min(at, HEADER)  # a header may begin before what is read, and end behind it
        self.file.seek(at - before)
        around = self.file.read(before + count + HEADER)
        for name, sound in ((b"BTHD", _sound_tree), (b"EAHD", _sound_list)):
            for offset in (one.start() for one in re.finditer(name, around)):
                if not sound(around[offset : offset + HEADER]):
                    start, stop = (min(max(0, offset + k - before), count) for k in (0, HEADER))
                    data[start:stop] = bytes(stop - start)
        self.file.seek(at + count)
        return count


def _sound_tree(header: bytes) -> bool:
    """Return whether a B-tree's header, as far as it was read, is one that our files have."""
    if len(header) < TREE.size:
        return True
    _, _, kind, node, row, depth, split, merge, _, top, every = TREE.unpack_from(header)
    most = (node - 10) // max(row, 1)
    sizes = row > 0 and node <= METADATA and most >= 2 and depth <= 32
    counts = top <= most and (top < every <= CHUNKS if depth else top == every)
    return kind in TREES and sizes and counts and 0 < merge < split <= 100


def _sound_list(header: bytes) -> bool:
    """Return the same of an extensible array, which numbers a table's chunks."""
    if len(header) < LIST.size:
        return True
    _, _, kind, width, *rest = LIST.unpack_from(header)
    counts = rest[5:]
    return kind <= 1 and 8 <= width <= 24 and tuple(rest[:5]) == GROWTH and max(counts) <= CHUNKS


def hdf5(file: Any) -> h5py.File:
    """The HDF5 content of an open file, for reading."""
    return h5py.File("file", "r", "fileobj", fileobj=_Checked(file))


@contextmanager
def opened(file: Any, **allowed: Any) -> Iterator[tuple[h5py.File, dict[str, Any]]]:
    """The HDF5 content of an open file, and its arrays and groups by path.

    HDF5 gets this one file and opens nothing by a name. `allowed`: as of `look`.
    """
    size = file.seek(0, os.SEEK_END)
    with hdf5(file) as content:
        yield content, look(content, size, **allowed)


def look(
    content: h5py.File,
    size: int,
    *,
    tables: bool = False,
    again: str = "",
    views: Collection[str] = (),
) -> dict[str, Any]:
    """All groups and arrays of a file of `size` bytes by path, each found sound.

    `tables`: arrays may be cut into checksummed chunks, with rows that were never written. Objects
    of the group `again` may stand at the top, too. `views`: paths of virtual datasets, which aren't
    looked at.
    """
    found = _objects(content, size, again)
    stored = 0
    spread = 0
    for path, thing in found.items():
        if isinstance(thing, h5py.Dataset) and path not in views and f"{again}/{path}" not in found:
            in_file, in_memory = _bytes(path, thing.id, size, tables)
            stored = stored + in_file
            spread = spread + in_memory
    if stored > size:
        raise ValueError(f"its arrays claim {stored} bytes, the file has {size}")
    if spread > max(LEAST, SPARSE * size):
        raise ValueError(f"its tables claim {spread} bytes, too many for a file of {size}")
    return found


def max_objects(size: int) -> int:
    """Return how many groups and arrays a file of ``size`` bytes may have.

    Each of them takes time and memory to look at. The large files that have many are those of large
    models; a small file with as many is forged.
    """
    return min(OBJECTS, FEW_OBJECTS + size // BYTES_OF_OBJECT)


def _objects(content: h5py.File, size: int, again: str) -> dict[str, Any]:
    """Groups and arrays by path; ValueError for other links, names, cycles and second paths."""
    most = max_objects(size)
    found: dict[str, Any] = {}
    # not by h5o.get_info: where an array's index is damaged, HDF5 2.0 crashes in it
    places: dict[int, str] = {h5g.get_objinfo(content.id).objno[0]: "/"}
    groups = [("", content.id)]
    while groups:
        above, group = groups.pop()
        if len(found) + group.get_num_objs() > most:
            raise ValueError(
                f"more than {most} groups and arrays in {size} bytes; a file of ours has fewer"
            )
        for link in group:
            name = link.decode()
            about = group.links.get_info(link)
            if not name.isprintable() or not 0 < len(link) <= NAME or name in (".", ".."):
                raise ValueError(f"{name[:40]!r} is no name of an array")
            path = above + name
            if about.type != h5l.TYPE_HARD:
                raise ValueError(f'"{path}" is a link to another place; only its own arrays count')
            thing = h5o.open(group, link)
            first = places.setdefault(about.u, path)
            if first != path and {first, path} != {name, f"{again}/{name}"}:
                raise ValueError(f'"{path}" and "{first}" are one and the same')
            if isinstance(thing, h5g.GroupID):
                found[path] = h5py.Group(thing)
                groups += [(path + "/", thing)] if first == path else []
            elif isinstance(thing, h5d.DatasetID):
                found[path] = h5py.Dataset(thing)
            else:
                raise ValueError(f'"{path}" is neither a group nor an array')
    return found


def _bytes(path: str, data: h5d.DatasetID, size: int, tables: bool) -> tuple[int, int]:
    """Bytes of an array in the file and in memory; ValueError where it isn't as ours are."""
    kind = data.get_type()
    creation = data.get_create_plist()
    if not _plain(kind):
        raise ValueError(f'"{path}" holds no numbers or texts of fixed length')
    if data.get_space().get_simple_extent_type() not in (h5s.SCALAR, h5s.SIMPLE):
        raise ValueError(f'"{path}" holds nothing')
    layout = creation.get_layout()
    if layout == h5d.VIRTUAL or creation.get_external_count():
        raise ValueError(f'"{path}" lies in other files')
    width = kind.get_size()
    claimed = math.prod(data.shape) * width
    stored = data.get_storage_size()
    filters = [creation.get_filter(k)[0] for k in range(creation.get_nfilters())]
    if tables and layout == h5d.CHUNKED:
        if filters not in ([], [h5z.FILTER_FLETCHER32]):
            raise ValueError(f'"{path}" is packed by filters that this program doesn\'t use')
        return _chunks(path, data, size, width, bool(filters)), claimed
    if layout not in (h5d.CONTIGUOUS, h5d.COMPACT) or filters:
        raise ValueError(f'"{path}" is not stored in one piece')
    end = data.get_offset() + stored if stored and layout == h5d.CONTIGUOUS else 0
    if stored != claimed or end > size:
        raise ValueError(f'"{path}" of {claimed} bytes isn\'t whole in a file of {size}')
    return stored, 0


def _chunks(path: str, data: h5d.DatasetID, size: int, width: int, checked: bool) -> int:
    """Bytes of a table's chunks, each of which is whole, in the file and as its filters say."""
    whole = math.prod(data.get_create_plist().get_chunk()) * width + 4 * checked
    count = 0

    def one(chunk: Any) -> None:
        nonlocal count
        count += 1
        if chunk.size != whole or chunk.filter_mask or chunk.byte_offset + whole > size:
            raise ValueError(f'a piece of "{path}" at {chunk.chunk_offset} is cut short')
        if count * whole > size:
            raise ValueError(f'"{path}" has more pieces than the file has room for')

    if data.get_storage_size():
        data.chunk_iter(one)
    return count * whole


def _plain(kind: h5t.TypeID, within: int = 0) -> bool:
    """Numbers, texts of fixed length, truth values, complex numbers, rows of a table of those."""
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
    found: dict[str, Any], path: str, kind: str | None = None, ndim: int | None = None
) -> Any:
    """The array at a path that `look` found, in memory; of numpy's `kind` and `ndim` where asked.

    `kind` is a type such as "<f4", or the letters of kinds of types such as "iu".
    """
    data = dataset(found, path)
    fits = kind is None or data.dtype.kind in kind or data.dtype.str == kind
    if not fits or (ndim is not None and data.ndim != ndim):
        raise ValueError(f'"{path}" is {data.dtype} {data.shape}: another kind of array')
    return data[()]


def rows(found: dict[str, Any], path: str, kinds: str) -> list[tuple]:
    """The rows of a table at a path, as Python's own values; `kinds`: of numpy's, its columns'."""
    table = array(found, path, "V", 1)
    if "".join(table.dtype[name].kind for name in table.dtype.names or ()) != kinds:
        raise ValueError(f'"{path}" is a table of {table.dtype}')
    return [tuple(v.decode() if isinstance(v, bytes) else v for v in row) for row in table.tolist()]


def dataset(found: dict[str, Any], path: str) -> h5py.Dataset:
    """The array at a path, not yet read."""
    data = found.get(path)
    if not isinstance(data, h5py.Dataset):
        raise ValueError(f'"{path}" is missing')
    return data


def text(found: dict[str, Any], path: str) -> str:
    """A dataset of one text, as `hdf5.write_text` writes it."""
    return printable(array(found, path, "S", 0).decode(), path)


def printable(value: str, name: str) -> str:
    """The text, unless it holds what a terminal takes for commands."""
    wrong = next((c for c in value if c < " " and c not in "\t\n\r" or c == "\x7f"), None)
    if wrong is not None:
        raise ValueError(f'"{name}" holds the control character {wrong!r}')
    return value


def attribute(thing: Any, name: str, long: bool = False) -> Any:
    """An attribute: a text, a number (Python's own), an array of numbers.

    `long`: also texts of more than `WORDS` bytes, which are in HDF5's heap.
    """
    if not h5a.exists(thing.id, name.encode()):
        raise ValueError(f'it has no attribute "{name}"')
    about = h5a.open(thing.id, name.encode())
    most = TEXT if long else WORDS
    kind = about.get_type()
    shape = about.shape
    is_text = isinstance(kind, h5t.TypeStringID)
    free = long and is_text and kind.is_variable_str() and not kind.committed()
    small = _plain(kind) and math.prod(shape) * kind.get_size() <= most
    fits = (small or free) and (shape == () or not is_text)
    value = thing.attrs[name] if fits else h5py.Empty("f4")
    if isinstance(value, bytes):
        value = value.decode(errors="surrogateescape")
    if isinstance(value, h5py.Empty) or (isinstance(value, str) and len(value) > most):
        raise ValueError(f'the attribute "{name}" is no number, text or array of {most} bytes')
    if isinstance(value, str):
        return printable(value, name)
    return value.item() if np.shape(value) == () else value


def attributes(thing: Any, long: bool = False) -> dict[str, Any]:
    """All attributes by name, each as of `attribute`."""
    count = h5a.get_num_attrs(thing.id)
    if count > ATTRIBUTES:
        raise ValueError(f"{count} attributes are too many: at most {ATTRIBUTES}")
    names = [h5a.open(thing.id, index=k).name.decode() for k in range(count)]
    return {name: attribute(thing, name, long) for name in names}


def seal(thing: Any) -> None:
    """Add a checksum over all other attributes: HDF5 has none for long texts."""
    facts = attributes(thing, long=True)
    facts.pop(SEAL, None)
    thing.attrs[SEAL] = _sum(facts)


def sealed(thing: Any) -> dict[str, Any]:
    """All attributes but the checksum, which is right, or not there as nothing was sealed yet."""
    facts = attributes(thing, long=True)
    if SEAL in facts and facts.pop(SEAL) != _sum(facts):
        raise ValueError("its attributes are damaged: their checksum differs")
    return facts


def _sum(facts: dict[str, Any]) -> int:
    return zlib.crc32(repr(sorted(facts.items())).encode(errors="surrogateescape"))

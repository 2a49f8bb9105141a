"""Opening of the file of a node or slot, after its size, checksum and structure were checked."""

import io
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from shlex import quote
from typing import Any

from mpigossip.store import StoreError, direct, guard
from mpigossip.store import manifest as manifests
from mpigossip.store.hdf5 import reading
from mpigossip.store.manifest import FORMAT, Entry

PIECE = 1 << 22
"""Number of parameters that are read at a time."""


@contextmanager
def node_file(path: Path, entry: Entry) -> Iterator[dict[str, Any]]:
    """Open the file of a node or slot, check it, and yield its arrays and groups by path.

    Its size, checksum and structure are checked. Errors inside the ``with`` statement are not
    converted: a caller that reads arrays has to use :func:`~mpigossip.store.hdf5.reading`, too.

    :param path: folder of the file
    :param entry: entry of the file in the manifest
    :raises StoreError: if the file is missing or damaged
    """
    file_path = Path(path) / entry.file
    with ExitStack() as stack:
        with reading(file_path):
            objects = stack.enter_context(_checked(file_path, entry))
        yield objects


@contextmanager
def _checked(file_path: Path, entry: Entry) -> Iterator[dict[str, Any]]:
    """Do what :func:`node_file` does, with errors as h5py and the operating system raise them."""
    try:
        file = guard.regular(file_path, follow=False)
    except FileNotFoundError:
        raise StoreError(
            f"{file_path} is missing; copy this file there, or use another checkpoint"
        ) from None
    with file:
        _check_bytes(file_path, file, entry)
        with guard.opened(file) as (content, objects):
            facts = guard.attributes(content)
            owner = {"node": entry.node} | ({} if entry.slot is None else {"slot": entry.slot})
            if facts != {"format": FORMAT, **owner}:
                expected = ", ".join(f"{kind} {number}" for kind, number in owner.items())
                raise ValueError(f"its attributes are {str(facts)[:100]}, not {expected}")
            names = {"parameters", "arrays", "layout", "numbers"}
            manifests.only(objects, names | ({"pieces"} if "slot" in owner else set()))
            parameters = guard.dataset(objects, "parameters")
            if parameters.dtype.str != "<f4" or parameters.shape != (entry.parameters,):
                raise ValueError(
                    f"its parameters have the type {parameters.dtype} and the shape "
                    f"{parameters.shape}, not float32 and {(entry.parameters,)}"
                )
            yield objects


def _check_bytes(path: Path, file: io.FileIO, entry: Entry) -> None:
    """Raise StoreError unless an open file has the size and the checksum of its entry."""
    size = os.fstat(file.fileno()).st_size
    if size != entry.bytes:
        raise StoreError(
            f"{path} has {size} bytes, but the manifest lists {entry.bytes}: it is truncated or "
            "belongs to another checkpoint; copy this file again, or use another checkpoint"
        )
    checksum = f"{direct.crc(file.fileno(), 0, size):08x}"
    if checksum != entry.checksum:
        raise StoreError(
            f"{path} is damaged: its CRC-32 is {checksum}, but the manifest lists "
            f"{entry.checksum}; copy this file again, or use an older checkpoint: `mv "
            f"{quote(str(path.parent))} {quote(str(path.parent.with_suffix('.damaged')))}`"
        )

"""Writer of models as safetensors files, tensor by tensor and piece by piece.

A safetensors file consists of 8 bytes with the length n of its header (little-endian), n bytes of
JSON with the dtype, the shape and the range of bytes of each tensor, and these bytes. If a model is
larger than the largest size of a file, it is written as Hugging Face libraries write it: whole
tensors in several files, and an index with the name of the file of each tensor.

    model-00001-of-00002.safetensors, model-00002-of-00002.safetensors
    model.safetensors.index.json

The library `safetensors` writes only tensors that are all in memory; this module writes them piece
by piece. Format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mpigossip.store import StoreError
from mpigossip.store.hdf5 import replacing, sync, writing

SUFFIX = ".safetensors"
DTYPES = {
    "<f8": "F64",
    "<f4": "F32",
    "<f2": "F16",
    "<i8": "I64",
    "<i4": "I32",
    "<i2": "I16",
    "|i1": "I8",
    "<u8": "U64",
    "<u4": "U32",
    "<u2": "U16",
    "|u1": "U8",
    "|b1": "BOOL",
}
"""Name in the header for each dtype of NumPy."""
BFLOAT16 = "BF16"
"""Name in the header for bfloat16, which NumPy lacks; its pieces have any type of two bytes."""
SIZES = {"F64": 8, "F32": 4, "F16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
SIZES |= {BFLOAT16: 2, "U64": 8, "U32": 4, "U16": 2}


EXPORTED = {"job", "step"}
"""Entries of the metadata by which a file is recognized as an export of this package."""
LONGEST_HEADER = 1 << 26
"""Largest number of bytes of a header that is read."""


class Tensor(NamedTuple):
    """Description of a tensor, whose elements are read when they are needed."""

    name: str
    dtype: str
    """Dtype by its name in the header, a key of `SIZES`."""
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[np.ndarray]]
    """Function that returns consecutive pieces of the elements in row-major order."""

    @property
    def bytes(self) -> int:
        """Number of bytes of the elements."""
        return SIZES[self.dtype] * prod(self.shape)

    def read(self) -> np.ndarray:
        """Return the whole tensor as an array."""
        pieces = [piece.ravel() for piece in self.pieces()] or [np.empty(0, np.float32)]
        return np.concatenate(pieces).reshape(self.shape)


def of_array(name: str, array: np.ndarray) -> Tensor:
    """Return the description of an array that is in memory.

    Its dtype is the name in NumPy if a safetensors file can't contain it; :func:`write` then raises
    an error.
    """
    little = np.ascontiguousarray(array).reshape(array.shape)
    little = little.astype(array.dtype.newbyteorder("<"), copy=False)
    dtype = DTYPES.get(little.dtype.str, str(little.dtype))
    return Tensor(name, dtype, array.shape, lambda: [little])


def write(
    out: Path, tensors: Sequence[Tensor], metadata: Mapping[str, str], most: int | None = None
) -> list[Path]:
    """Write a model as one file or, if it is larger than ``most``, as several files with an index.

    Each file is written and flushed under a temporary name first. Then the index and all other
    files of an earlier export of the same name are removed, the new files get their names, and the
    index is the last. A reader of the index therefore never finds files of two exports, even if the
    export is interrupted. A single file replaces an earlier single file at once.

    :param out: path that ends in ".safetensors". The names of several files are made from it
    :param tensors: tensors to write
    :param metadata: texts for the header of each file
    :param most: largest number of bytes of the tensors in a file. A larger tensor gets a file of
        its own; None: one file
    :return: paths of the files, and of the index if there are several
    :raises StoreError: if a safetensors file can't contain the dtype of a tensor, or if a file of
        another program would have to be removed; or if reading or writing a tensor fails. No file
        is changed then. If a file can't be renamed in the end, those that were renamed before stay,
        without an index
    """
    for tensor in tensors:
        if tensor.dtype not in SIZES:
            raise StoreError(
                f'"{tensor.name}" has the dtype {tensor.dtype}, which a safetensors file can\'t '
                f"contain: use one of {', '.join(sorted(SIZES))} in the model, or choose an --out "
                "that ends in .pt"
            )
    # Readers map the file into memory, where elements must be aligned to their size.
    tensors = sorted(tensors, key=lambda tensor: -SIZES[tensor.dtype])
    groups = divide(tensors, most)
    single = len(groups) == 1
    name = f"{out.stem}-{{:05d}}-of-{len(groups):05d}{SUFFIX}"
    paths = [out if single else out.with_name(name.format(k + 1)) for k in range(len(groups))]
    index = out.with_name(f"{out.name}.index.json")
    with writing(out):
        outdated = [path for path in _earlier(out) if path not in (*paths, index)]
    if foreign := [path for path in outdated if not _is_export(path)]:
        raise StoreError(
            f"{foreign[0]} was written by another program, and programs that read {out.name} would "
            f"read this file, too: choose another --out, or move {foreign[0].name} to another "
            "folder"
        )
    with ExitStack() as stack:
        # Exiting this context renames all files, or none if an error occurs.
        if not single:
            file = stack.enter_context(replacing(index))
            file.write_text(_index(paths, groups), encoding="utf-8")
            sync(file)
        for path, group in zip(paths, groups, strict=True):
            temporary = stack.enter_context(replacing(path))
            write_file(temporary, group, metadata)
            sync(temporary)
        for path in (index, *outdated, *([] if single else paths)):
            path.unlink(missing_ok=True)
    return paths if single else [*paths, index]


def divide(tensors: Sequence[Tensor], most: int | None) -> list[list[Tensor]]:
    """Divide tensors among files, in their order.

    :param tensors: tensors to divide
    :param most: largest number of bytes of the tensors in a file. A larger tensor gets a file of
        its own; None: one file
    """
    groups: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if most is not None and groups[-1] and size + tensor.bytes > most:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.bytes
    return groups


def _index(paths: Sequence[Path], groups: Sequence[Sequence[Tensor]]) -> str:
    """Return the index as JSON, which names the file of each tensor."""
    files = {t.name: path.name for path, group in zip(paths, groups, strict=True) for t in group}
    total = sum(tensor.bytes for group in groups for tensor in group)
    content = {"metadata": {"total_size": total}, "weight_map": files}
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def _earlier(out: Path) -> Iterator[Path]:
    """Iterate over the existing files of tensors whose names an export to ``out`` may use."""
    pattern = rf"{re.escape(out.stem)}(-\d{{5}}-of-\d{{5}})?{re.escape(SUFFIX)}"
    yield from (path for path in out.parent.iterdir() if re.fullmatch(pattern, path.name))


def _is_export(path: Path) -> bool:
    """Return whether the header of a file contains the metadata of an export by this package."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, LONGEST_HEADER)))
        return header["__metadata__"].keys() >= EXPORTED
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return False


def write_file(path: Path, tensors: Sequence[Tensor], metadata: Mapping[str, str]) -> None:
    """Write one safetensors file.

    :param path: file to write
    :param tensors: tensors to write, in descending order of the sizes of their elements
    :param metadata: texts for the header
    :raises OSError: if writing fails
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    begin = 0
    for tensor in tensors:
        end = begin + tensor.bytes
        offsets = [begin, end]
        shape = [*tensor.shape]
        header[tensor.name] = {"dtype": tensor.dtype, "shape": shape, "data_offsets": offsets}
        begin = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors:
            before = file.tell()
            for piece in tensor.pieces():
                file.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
            assert file.tell() - before == tensor.bytes, tensor.name

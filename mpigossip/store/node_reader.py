"""Reader of the model in a node's files, piece by piece, so that it need not fit into memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from mpigossip.store import StoreError, guard, node_state
from mpigossip.store import manifest as manifests
from mpigossip.store.hdf5 import reading
from mpigossip.store.manifest import Entry
from mpigossip.store.node_file import node_file


class NodeReader:
    """Parameters and buffers of one node, which are read from its open files.

    Each file holds consecutive elements of the flat parameters.
    """

    def __init__(self, path: Path, files: Sequence[dict[str, Any]], step: int):
        """Read the names and shapes of the parameters.

        :param path: path of the first file, for messages
        :param files: objects of the files, which :func:`~mpigossip.store.node_file.node_file`
            yields, in the order of their elements
        :param step: step to which the files belong
        :raises ValueError: if the content of a file is not as expected
        """
        self._path = path
        self._files = files
        self._flat = [guard.dataset(file, "parameters") for file in files]
        length = sum(map(len, self._flat))
        first = files[0]
        table = guard.rows(first, "layout", "SiiiV")
        self.names, self.shapes = node_state.read_table(table, length)
        """Names of the parameters, and their shapes."""
        facts = manifests.parse_facts(guard.text(first, "numbers"), "numbers")
        manifests.check_counters(facts, step)
        self._ends = [*accumulate(map(len, self._flat), initial=0)]
        self._begins = [*accumulate(map(prod, self.shapes), initial=0)]

    def read(self, index: int, begin: int, end: int) -> np.ndarray:
        """Return elements of a parameter as a 1-D float32 array.

        :param index: index of the parameter
        :param begin: index of the first element within the parameter, in row-major order
        :param end: index after the last element
        :raises StoreError: if the elements cannot be read, or one of them is NaN or infinite
        """
        first = self._begins[index]
        with reading(self._path):
            values = self._elements(first + begin, first + end)
        if not np.isfinite(values).all():
            raise StoreError(
                f"{self._path} has NaN or infinite values in {self.names[index]}; export another "
                "checkpoint or round"
            )
        return values

    def _elements(self, begin: int, end: int) -> np.ndarray:
        """Return a range of the flat parameters, which may extend over several files."""
        parts = [np.empty(0, np.float32)]
        for data, first, last in zip(self._flat, self._ends, self._ends[1:], strict=False):
            if first < end and begin < last:
                parts.append(data[max(begin - first, 0) : min(end, last) - first])
        return np.concatenate(parts)

    def _buffers(self) -> Iterator[tuple[int, str, h5py.Dataset]]:
        """Iterate over the buffers in the files: slot, name and dataset."""
        for file in self._files:
            for path, item in file.items():
                group, kind, slot, name = (*path.split("/", 3), "", "", "")[:4]
                if (group, kind) == ("arrays", "buffers") and isinstance(item, h5py.Dataset):
                    yield int(slot), name, item

    def buffers(self) -> dict[str, np.ndarray]:
        """Return the buffers of the model by name, averaged over the node's slots in float64.

        Buffers that are not floating-point are taken from the first slot.

        :raises StoreError: if the buffers cannot be read, differ in name or shape between slots, or
            if running statistics are NaN or infinite
        """
        slots: dict[int, dict[str, np.ndarray]] = {}
        with reading(self._path):
            for slot, name, item in self._buffers():
                slots.setdefault(slot, {})[name] = item[()]
            averaged = node_state.average(slots[slot] for slot in sorted(slots))
        for name, array in averaged.items():
            if name.endswith(node_state.NORMS) and not np.isfinite(array).all():
                raise StoreError(
                    f"{self._path} has NaN or infinite values in {name}; export another checkpoint "
                    "or round"
                )
        return averaged

    def buffer_dtypes(self) -> dict[str, np.dtype]:
        """Return the dtypes of the buffers by name."""
        return {name: item.dtype for _, name, item in self._buffers()}


@contextmanager
def open_node(path: Path, entries: Sequence[Entry], step: int) -> Iterator[NodeReader]:
    """Return a context manager that opens the files of a node, and compares their checksums.

    :param path: folder of the files
    :param entries: entries of the files, in the order of their elements. The record of a round of
        members is rejected if it lists its files in another order (`members.records.parse`)
    :param step: step to which the files belong
    :raises StoreError: if a file is missing or damaged
    """
    with ExitStack() as stack:
        files = [stack.enter_context(node_file(path, entry)) for entry in entries]
        first = path / entries[0].file
        with reading(first):
            reader = NodeReader(first, files, step)
        yield reader

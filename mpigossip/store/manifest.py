"""Manifest of a checkpoint, which is the file `checkpoint.h5` that lists the files of the nodes.

The manifest begins with 512 bytes that contain a SHA-256 of the rest of the file. The rest is HDF5:
the step, the complete job, further facts, a table of the files with their sizes and checksums, and
a virtual dataset with the parameters of all nodes, for other programs.
"""

import hashlib
import io
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from mpigossip.store import StoreError, guard
from mpigossip.store.hdf5 import create, reading, sync, write_text

FORMAT = "mpigossip checkpoint 1"
MANIFEST = "checkpoint.h5"
HEADER = 512
"""Number of bytes of the manifest before its HDF5 part; they name its format and checksum."""
LARGEST = 1 << 26
"""Largest size of a manifest, in bytes. It contains about 120 bytes per node, besides the job."""
MOST = 1 << 53
"""Largest value of a counter. All integers up to it are exact as float64."""
FACTS = 1 << 10
"""Largest number of facts or counters in a checkpoint."""
Number = int | float | str


class Entry(NamedTuple):
    """Entry of the table of files, for the file of a node or of one of its slots."""

    node: int
    """Index of the node."""
    file: str
    """Name of the file."""
    bytes: int
    """Size of the file in bytes."""
    checksum: str
    """CRC-32 of all bytes of the file, as 8 hexadecimal digits."""
    parameters: int
    """Number of parameters in the file, which is P for a node, and less for the shard of a slot."""

    @property
    def slot(self) -> int | None:
        """Index of the slot that wrote the file; None: the file contains a complete node.

        In the folder of members, it is the index of the rank.
        """
        match = re.fullmatch(
            r"(?:node-\d+|\d{6}-[0-9a-f]{16})-(\d+)(?:\.kept)?\.h5", self.file, re.ASCII
        )
        return int(match[1]) if match else None


@dataclass(frozen=True)
class Manifest:
    """Manifest of a checkpoint, which is the content of its file `checkpoint.h5`."""

    step: int
    """Number of steps done."""
    n: int
    """Number of nodes."""
    job: str
    """Complete job, as TOML."""
    meta: dict[str, Number]
    """Further facts by name, which are numbers or strings."""
    entries: tuple[Entry, ...]
    """Entry for the file of each node, or of each slot, sorted by node and slot."""

    @property
    def each(self) -> int:
        """Number of files per node."""
        return len(self.entries) // self.n if self.n else 0

    def of(self, node: int) -> tuple[Entry, ...]:
        """Return the entries of the files of one node, in the order of its slots."""
        return self.entries[node * self.each : (node + 1) * self.each]


def name(node: int, slot: int | None = None) -> str:
    """Return the name of the file of a node, or of one of its slots.

    :param node: number of the node
    :param slot: index of the slot; None: the file contains the whole node
    """
    return f"node-{node:04d}.h5" if slot is None else f"node-{node:04d}-{slot:04d}.h5"


def check_table(entries: Sequence[Entry], n: int) -> None:
    """Check that the entries are the files of n nodes.

    All nodes must have the same number of files and of parameters.

    :raises ValueError: if this is not so
    """
    per_node = len(entries) // n if n else 0
    if not per_node or len(entries) != n * per_node:
        raise ValueError(f"n = {n}, but its table lists {len(entries)} files")
    for row, entry in enumerate(entries):
        node, slot = divmod(row, per_node)
        if (entry.node, entry.file) != (node, name(node, slot if per_node > 1 else None)):
            raise ValueError(
                f'row {row} of its table lists node {entry.node} and the file "{entry.file}", '
                "which belong to another row"
            )
        if entry.parameters != entries[slot].parameters:
            raise ValueError(f"nodes {node} and 0 have different numbers of parameters")


def write(path: Path, manifest: Manifest) -> None:
    """Write and fsync `checkpoint.h5`.

    The file contains the facts, the table of files and, unless P = 0, /parameters, a virtual
    dataset of shape (n, P) that refers to all files.

    :param path: path of `checkpoint.h5`
    :param manifest: content of the file
    :raises StoreError: if the HDF5 part cannot be written
    :raises OSError: if the checksum cannot be written, or fsync fails
    """
    names = max(len(entry.file) for entry in manifest.entries)
    kind = [("node", "<i8"), ("file", f"S{names}"), ("bytes", "<i8")]
    kind += [("checksum", "S8"), ("parameters", "<i8")]
    length = sum(entry.parameters for entry in manifest.of(0))
    with create(path, userblock_size=HEADER) as file:
        file.attrs["format"] = np.bytes_(FORMAT)
        file.attrs["step"], file.attrs["n"] = manifest.step, manifest.n
        write_text(file, "job", manifest.job)
        write_text(file, "meta", json.dumps(manifest.meta, default=lambda v: v.item()))
        rows = [
            (e.node, e.file.encode(), e.bytes, e.checksum.encode(), e.parameters)
            for e in manifest.entries
        ]
        file.create_dataset("nodes", data=np.array(rows, np.dtype(kind)))
        if length:
            joined = h5py.VirtualLayout((manifest.n, length), "<f4")
            for entry, columns in _parts(manifest.entries):
                source = h5py.VirtualSource(entry.file, "parameters", (entry.parameters,), "<f4")
                joined[entry.node, columns] = source
            file.create_virtual_dataset("parameters", joined, fillvalue=np.nan)
    with path.open("r+b") as raw:
        raw.seek(HEADER)
        header = _header(raw.read())
        raw.seek(0)
        raw.write(header)
    sync(path)


def _parts(entries: Iterable[Entry]) -> Iterator[tuple[Entry, slice]]:
    """Yield, for each file with parameters, its entry and its slice of the node's parameters."""
    node = -1
    start = 0
    for entry in entries:
        node, start = entry.node, start if entry.node == node else 0
        if entry.parameters:
            yield entry, slice(start, start + entry.parameters)
        start += entry.parameters


def _header(content: bytes) -> bytes:
    """Return the first bytes of a manifest, with the SHA-256 of ``content``, its HDF5 part."""
    text = f"{FORMAT}\nsha256 of all bytes after {HEADER}: {hashlib.sha256(content).hexdigest()}\n"
    return text.encode().ljust(HEADER, b"\0")


def read(path: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    :param path: folder of the checkpoint
    :raises StoreError: if the manifest is missing or damaged
    """
    path = Path(path) / MANIFEST
    try:
        with guard.regular(path, follow=False) as file:
            data = file.read(LARGEST + 1)
    except OSError as error:
        raise StoreError(
            f"{path} can't be read ({error.strerror}): name a folder RUN/checkpoints/step-… "
            f"that contains {MANIFEST}"
        ) from error
    if len(data) > LARGEST:
        raise StoreError(
            f"{path} has more than {LARGEST} bytes, too many for a manifest; use another copy of "
            "the checkpoint"
        )
    if data[:HEADER] != _header(data[HEADER:]):
        raise StoreError(
            f"{path} is damaged or not a manifest: its checksum differs; "
            "resume from an older checkpoint, or copy this file again"
        )
    opened = guard.opened(io.BytesIO(data), views=("parameters",))
    with reading(path), opened as (file, objects):
        return _content(file, objects)


def _content(file: h5py.File, objects: dict[str, Any]) -> Manifest:
    only(objects, {"job", "meta", "nodes"}, {"parameters"})
    facts = guard.attributes(file)
    if facts.keys() != {"format", "step", "n"}:
        raise ValueError(
            f"its attributes are {', '.join(facts)[:60]!r} instead of format, step and n, as in "
            "the manifest of a checkpoint"
        )
    if facts["format"] != FORMAT:
        raise ValueError(f"its format is {str(facts['format'])[:40]!r} instead of {FORMAT!r}")
    entries = tuple(Entry(*row) for row in guard.rows(objects, "nodes", "iSiSi"))
    n = counter(facts["n"], "n", MOST)
    check_table(entries, n)
    for entry in entries:
        if not re.fullmatch("[0-9a-f]{8}", entry.checksum):
            raise ValueError(f'"{entry.file}" has the invalid checksum {entry.checksum[:20]!r}')
        counter(entry.bytes, f"bytes of {entry.file}", MOST)
        counter(entry.parameters, "parameters", MOST)
    if "parameters" in objects:
        _check_view(objects["parameters"], n, entries)
    job = guard.text(objects, "job")
    meta = parse_facts(guard.text(objects, "meta"), "meta")
    return Manifest(counter(facts["step"], "step", MOST), n, job, meta, entries)


def only(objects: Mapping[str, Any], needed: set[str], further: Collection[str] = ()) -> None:
    """Check that a file has all names in ``needed``, and no other names except ``further``.

    Only the first component of each path in ``objects`` counts.

    :raises ValueError: if a name is missing or is not allowed
    """
    top = {path.partition("/")[0] for path in objects}
    if not needed <= top or not top <= needed.union(further):
        different = sorted((top ^ needed).difference(further))
        raise ValueError(
            f"these of its objects are missing or unknown: {', '.join(different)[:200]}"
        )


def counter(value: Any, name: str, limit: int) -> int:
    """Check that a value is an integer from 0 to ``limit``, and return it.

    :raises ValueError: if the value is anything else; the message contains ``name``
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= limit:
        raise ValueError(f"{name} = {str(value)[:40]}: must be a whole number from 0 to {limit}")
    return value


def parse_facts(text: str, name: str) -> dict[str, Number]:
    """Parse facts or counters from a JSON object of numbers, strings and nulls.

    :raises ValueError: if the text is not such an object; the message contains ``name``
    """
    facts = json.loads(text)
    if not isinstance(facts, dict) or len(facts) > FACTS:
        raise ValueError(f'"{name}" is not a table of at most {FACTS} numbers and texts')
    invalid = [k for k, v in facts.items() if not isinstance(v, int | float | str | None)]
    if invalid:
        raise ValueError(f'"{name}": {invalid[0][:40]!r} is not a number or text')
    return facts


def check_counters(numbers: dict[str, Number], step: int) -> dict[str, Number]:
    """Check that the counters of a node are possible after ``step`` steps, and return them.

    :raises ValueError: if a counter is negative, too large, or belongs to another step
    """
    for name in {"index", "born", "local_steps", "round", "bytes_sent", "samples"} & numbers.keys():
        counter(numbers[name], name, MOST if name in ("round", "bytes_sent", "samples") else step)
    if numbers.get("index", step) != step:
        raise ValueError(f"index = {numbers['index']}, but the checkpoint belongs to step {step}")
    shift = numbers.get("shift", 0)
    if not isinstance(shift, int) or abs(shift) > MOST:
        raise ValueError(f"shift = {str(shift)[:40]}: must be a whole number of steps")
    for name in [name for name in numbers if name == "seconds" or name.startswith("spent/")]:
        seconds = numbers[name]
        if not isinstance(seconds, int | float) or not 0 <= seconds < MOST:
            raise ValueError(
                f"{name[:40]} = {str(seconds)[:40]}: must be a number of seconds, at least 0 and "
                f"less than {MOST}"
            )
    return numbers


def _check_view(view: Any, n: int, entries: Sequence[Entry]) -> None:
    """Check that a virtual dataset has one row per node, which refers to the files of this node.

    :raises ValueError: if this is not so
    """
    length = sum(entry.parameters for entry in entries if entry.node == 0)
    is_view = isinstance(view, h5py.Dataset) and view.is_virtual
    if not is_view or view.shape != (n, length) or view.dtype != "<f4":
        raise ValueError(
            f'"parameters" must be a virtual dataset of {n} rows, one for each node, with {length} '
            "parameters each"
        )
    parts = list(_parts(entries))
    count = view.id.get_create_plist().get_virtual_count()
    if count != len(parts):
        raise ValueError(f'"parameters" refers to {count} files, not to {len(parts)}')
    for (entry, columns), shown in zip(parts, view.virtual_sources(), strict=True):
        bounds = (entry.node, columns.start), (entry.node, columns.stop - 1)
        source = shown.file_name, shown.dset_name, shown.vspace.get_select_bounds()
        if source != (entry.file, "parameters", bounds):
            raise ValueError(
                f'"parameters" refers to {source[0][:100]!r} for node {entry.node}, not to '
                f"its elements of {entry.file!r}"
            )

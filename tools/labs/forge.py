"""Test that forged checkpoints, logs and data sets are rejected, fast and with little memory.

    python tools/labs/forge.py [--count 1000] [--seed 0] [--keep DIR]

Each case is a copy of valid files of which one is changed at random, in one of three ways. Its
structure is changed (links, sizes, types, counts, names, kinds of files), and checksums are
adapted; bytes in a header of HDF5 are changed, and its checksum is adapted; or bits and bytes are
changed, and no checksum is adapted.

The files are read in a forked process. They must be rejected with a message, or give the original
values. Two exceptions are allowed: other values after a change of a header, and a log without the
column that was removed. The following results are wrong: a hang, a crash, a traceback, other values
than the original ones, more than 2 s or 200 MB, an import from outside of the standard library, and
a file opened outside of the folder. Python's audit hook reports what the forked process imports and
opens, and inotify of the kernel reports whether HDF5 opens the file to which forged links refer.

If any result is wrong, the exit code is 1. `--keep DIR` copies the wrong cases to DIR.
"""

import argparse
import ctypes
import hashlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

import h5py  # noqa: E402
import numpy as np  # noqa: E402
from PIL import Image  # noqa: E402

from mpigossip.store import StoreError, checkpoint  # noqa: E402
from mpigossip.store import manifest as manifests  # noqa: E402
from mpigossip.store.dataset import open_dataset, pack  # noqa: E402
from mpigossip.store.log import Column, LogWriter, read  # noqa: E402
from mpigossip.store.packing import checksum_of  # noqa: E402

SECONDS = 2.0
MEGABYTES = 200.0
"""Limits of the time and of the peak memory of a process that reads a forged file."""
KINDS = ("checkpoint", "log", "data set")
MAIN = {"checkpoint": "node-0000.h5", "log": "log.h5", "data set": "set.h5"}
"""Name of the HDF5 file that is forged, for each kind."""
TARGETS = {
    "checkpoint": ("parameters", "layout", "numbers"),
    "log": ("steps/step", "steps/node", "steps/loss", "evaluations/at_step"),
    "data set": ("classes", "train/labels", "train/bytes", "test/offsets", "test/checksums"),
}
"""Paths of the arrays that are replaced or removed, for each kind."""
WORDS = {
    "checkpoint": ("format", "node"),
    "log": ("format", "job", "environment"),
    "data set": ("format", "version", "kind", "channels", "mean", "std", "scale"),
}
"""Names of the attributes that are replaced or removed, for each kind."""
LATEST = ("v110", "v110")


# -- valid files, and their content ---------------------------------------------------------------


def originals(top: Path) -> None:
    """Create a subfolder with valid files for each kind: "checkpoint", "log", "data set".

    :param top: folder that does not exist yet
    """
    for kind in KINDS:
        (top / kind).mkdir(parents=True)
    temporary = checkpoint.begin(top, 3)
    entries = []
    for node in range(2):
        draw = np.random.default_rng(node)
        values, mean = draw.standard_normal((2, 500), np.float32)
        arrays = {"state/momentum": mean, "buffers/0/n": np.array(3)}
        numbers = {"index": 3, "born": 0, "round": 3, "shift": 0, "seconds": 0.1, "bytes_sent": 9}
        shapes = ((20, 20), (100,))
        state = checkpoint.NodeState(values, ("weight", "bias"), shapes, arrays, numbers)
        entries.append(checkpoint.write_node(temporary, node, state))
    job = '[model]\nname = "forged_module:factory"\n'
    path = checkpoint.commit(temporary, top, 3, entries, job, {"slots": 1, "steps_per_epoch": 9})
    shutil.copytree(path, top / "checkpoint", dirs_exist_ok=True)
    columns = {"loss": Column("nat", "loss"), "bytes_sent": Column("B", "sent", "int64")}
    about = {"nodes": 3, "job": job, "columns": columns, "environment": {"host": "a"}}
    out = LogWriter(top / "log/log.h5", **about)
    for _ in range(4):
        rows = {"loss": np.random.default_rng(5).random((50, 3))}
        out.append(rows | {"bytes_sent": np.arange(150).reshape(50, 3)})
    out.evaluation({"step": 200, "accuracy": 0.5})
    out.summary({"digest": "ab", "accuracy": 0.5})
    draw = np.random.default_rng(0)
    for place in (f"{split}/{name}" for split in ("train", "test") for name in ("ape", "bee")):
        (top / "images" / place).mkdir(parents=True)
        pixels = draw.integers(0, 256, (9, 9, 3), np.uint8)
        Image.fromarray(pixels).save(top / "images" / place / "0.png")
    pack(top / "images", top / "data set/set.h5")


def outside(top: Path) -> Path:
    """Create the folder ``top / "outside"``, whose file no forged file may cause to be opened."""
    (top / "outside").mkdir()
    with h5py.File(top / "outside/secret.h5", "w") as secret:
        secret["x"] = np.zeros(500, "<f4")
    return top / "outside"


def hashed(*things: Any) -> str:
    """Return the SHA-256 of values; a value may be an array, or a dictionary of values."""
    sha = hashlib.sha256()
    for thing in things:
        if isinstance(thing, dict):
            thing = hashed(*(part for key in sorted(thing) for part in (key, thing[key])))
        sha.update(thing.tobytes() if isinstance(thing, np.ndarray) else repr(thing).encode())
    return sha.hexdigest()


def content(kind: str, folder: Path, without: str = "") -> str:
    """Read files by the functions of the package; return a hash of all values.

    :param kind: kind of the files: "checkpoint", "log" or "data set"
    :param folder: folder with the files
    :param without: column of a log that is not hashed; "": all columns are hashed
    :raises StoreError: if the package rejects the files
    """
    if kind == "checkpoint":
        if problems := checkpoint.verify(folder):
            raise StoreError("; ".join(problems))
        manifest = checkpoint.read_manifest(folder)
        states = [vars(checkpoint.read_node(folder, node)) for node in range(manifest.n)]
        return hashed(manifest, *states, checkpoint.digest(folder))
    if kind == "log":
        log = read(folder / MAIN[kind])
        for table in (log.units, log.steps, log.evaluations):
            table.pop(without, None)
        return hashed(vars(log))
    with open_dataset(folder / MAIN[kind]) as data:
        facts = {k: v for k, v in vars(data).items() if k not in ("path", "train", "test")}
        halves = [vars(half) | {"file": half.array()} for half in (data.train, data.test)]
        return hashed(facts, *halves)


# -- forging --------------------------------------------------------------------------------------


class Forger:
    """Random changes of a copy of valid files.

    The methods `structure`, `manifest`, `place`, `journal`, `damage` and `header` make a change,
    and return its name.

    :param kind: kind of the files: "checkpoint", "log" or "data set"
    :param folder: folder with the copy
    :param outside: folder that forged links refer to
    :param draw: random numbers
    """

    def __init__(self, kind: str, folder: Path, outside: Path, draw: random.Random) -> None:
        self.kind = kind
        self.folder = folder
        self.outside = outside
        self.draw = draw
        self.path = folder / MAIN[kind]

    def structure(self) -> str:
        """Change an object or attribute of an HDF5 file, and adapt all checksums."""
        draw = self.draw
        with h5py.File(self.path, "r+", libver=LATEST) as file:
            change = draw.choice(
                (self._replace_object, self._replace_object, self._add_object, self._attribute)
            )
            name = change(file)
            for split in ("train", "test") if self.kind == "data set" else ():
                if summed := self._plain(file, split):
                    file[split].attrs["checksum"] = checksum_of(summed)
        self.sign()
        return name

    def _plain(self, file: h5py.File, split: str) -> dict[str, h5py.Dataset]:
        """Return those tables of a data set that are still ordinary arrays, by their name.

        :param file: the forged file
        :param split: "train" or "test"
        """
        datasets = {}
        for name in ("labels", "offsets", "sizes", "checksums"):
            path = f"{split}/{name}"
            hard = path in file and isinstance(file.get(path, getlink=True), h5py.HardLink)
            if hard and isinstance(file[path], h5py.Dataset) and file[path].size:
                data = file[path]
                if data.nbytes < 1 << 20 and not data.dtype.hasobject and not data.external:
                    datasets[name] = data
        return datasets

    def _replace_object(self, file: h5py.File) -> str:
        """Replace one of the arrays of a valid file by another object, or remove it.

        :return: description of the change
        """
        path = self.draw.choice(TARGETS[self.kind])
        old = file[path][()]
        if self.kind == "log" and path.startswith("steps/"):
            del file[path.removeprefix("steps/")]
        del file[path]
        big = 1 << self.draw.randrange(24, 48)
        secret = str(self.outside / "secret.h5")
        made = file.create_dataset
        view = h5py.VirtualLayout((500,), "<f4")
        view[:] = h5py.VirtualSource(secret, "x", (500,), "<f4")
        nested = np.dtype([("a", [("b", [("c", "<f8")])])])
        text = h5py.string_dtype("utf-8", self.draw.randrange(1 << 25, (1 << 31) - 1))
        ways = {
            "external link": lambda: file.__setitem__(path, h5py.ExternalLink(secret, "/x")),
            "soft link": lambda: file.__setitem__(path, h5py.SoftLink("/x")),
            "missing": lambda: None,
            "a group": lambda: file.create_group(path),
            "the root": lambda: file.__setitem__(path, file["/"]),
            "a type": lambda: file.__setitem__(path, np.dtype("<f4")),
            "external data": lambda: made(path, (500,), "<f4", external=[(secret, 0, 2000)]),
            "virtual": lambda: file.create_virtual_dataset(path, view),
            "huge": lambda: made(path, (big,), "<f4"),
            "huge in pieces": lambda: made(path, (big,), "<i8", chunks=(1 << 20,)),
            "huge pieces": lambda: made(path, (1 << 27,), "<i8", chunks=(1 << 27,)),
            "wide": lambda: made(path, (big, big), "u1", maxshape=(None, None), chunks=(16, 16)),
            "gzip": lambda: made(path, data=np.zeros(1 << 22), compression="gzip"),
            "shuffle": lambda: made(path, data=np.zeros(1 << 12), shuffle=True, chunks=True),
            "any length": lambda: made(path, data=["a", "b"], dtype=h5py.string_dtype()),
            "lists": lambda: made(path, (3,), h5py.vlen_dtype(np.int32)),
            "references": lambda: made(path, data=np.array([file.ref], h5py.ref_dtype)),
            "regions": lambda: made(path, (3,), h5py.regionref_dtype),
            "opaque": lambda: made(path, (3,), "V16"),
            "nested": lambda: made(path, (3,), nested),
            "long text": lambda: made(path, (), text),
            "nothing": lambda: file.__setitem__(path, h5py.Empty("<f4")),
            "of none": lambda: made(path, (0,), "<f8"),
            "many axes": lambda: made(path, (1,) * 30, "<i8"),
            "a number": lambda: file.__setitem__(path, 1.5),
            "longer": lambda: made(path, data=np.resize(old, (np.size(old) + 7,))),
        }
        name = self.draw.choice(list(ways))
        if name == "longer" and self.kind == "checkpoint" and path == "numbers":
            name = "missing"
        ways[name]()
        return name

    def _add_object(self, file: h5py.File) -> str:
        """Add an object that valid files do not contain."""
        top = {"checkpoint": "arrays/", "log": "steps/", "data set": "train/"}[self.kind]
        secret = str(self.outside / "secret.h5")
        first = TARGETS[self.kind][0]
        deep = file.require_group(top.strip("/"))
        ways = {
            "further link": lambda: file.__setitem__(top + "x", h5py.ExternalLink(secret, "/x")),
            "further soft": lambda: file.__setitem__(top + "x", h5py.SoftLink("/" + first)),
            "one twice": lambda: file.__setitem__(top + "x", file[first]),
            "a circle": lambda: file.__setitem__(top + "x", deep),
            "further huge": lambda: deep.create_dataset("x", (1 << 40,), "u1"),
            "control": lambda: deep.__setitem__("\x1b[2J", np.zeros(3)),
            "long name": lambda: deep.__setitem__("x" * 5000, np.zeros(3)),
            "many": lambda: [deep.create_group(str(k)) for k in range(1 << 16)],
            "further data": lambda: deep.create_dataset(
                "x", (5,), "u1", external=[(str(self.outside / "secret.h5"), 0, 5)]
            ),
        }
        name = self.draw.choice(list(ways))
        if name == "many" and self.draw.random() < 0.8:  # It takes seconds, so do it rarely.
            name = "a circle"
        ways[name]()
        return name

    def _attribute(self, file: h5py.File) -> str:
        """Remove an attribute, or replace it by a value of another kind."""
        name = self.draw.choice(WORDS[self.kind])
        values = [
            None,
            -5,
            1 << 62,
            np.zeros(1 << 12),
            np.zeros(1 << 20),
            h5py.Empty("f4"),
            file.ref,
            np.bytes_(b"\x1b]0;x"),
            np.full(3, np.nan),
            float("inf"),
            "x" * (1 << 20),
        ]
        value = self.draw.choice(values)
        del file.attrs[name]
        if value is not None:
            file.attrs[name] = value
        return f"attribute {name}"

    def sign(self) -> None:
        """Write the sizes and checksums of a checkpoint's files to its manifest.

        For a log or a data set, do nothing.
        """
        if self.kind != "checkpoint":
            return
        manifest = checkpoint.read_manifest(self.folder)
        entries = []
        for entry in manifest.entries:
            data = (self.folder / entry.file).read_bytes()
            checksum = f"{zlib.crc32(data):08x}"
            entries.append(entry._replace(bytes=len(data), checksum=checksum))
        changed = checkpoint.Manifest(3, 2, manifest.job, manifest.meta, tuple(entries))
        manifests.write(self.folder / checkpoint.MANIFEST, changed)

    def manifest(self) -> str:
        """Change a count, a name or the view in a checkpoint's manifest, and adapt the checksum."""
        draw = self.draw
        path = self.folder / checkpoint.MANIFEST
        with h5py.File(path, "r+", libver=LATEST) as file:
            table = file["nodes"][()]
            field = draw.choice((*table.dtype.names, "n", "step", "view"))
            if field == "view":
                del file["parameters"]
                view = h5py.VirtualLayout((2, 500), "<f4")
                secret = str(self.outside / "secret.h5")
                view[0] = h5py.VirtualSource(secret, "x", (500,), "<f4")
                file.create_virtual_dataset("parameters", view)
            elif field in ("n", "step"):
                file.attrs[field] = draw.choice([-5, 1 << 40, 1 << 62, 0 if field == "n" else -1])
            else:
                forged = {"file": b"../secret.h5", "checksum": b"zzzz"}
                numbers = [-5, 1 << 40, 1 << 62, 7]
                table[field][draw.randrange(2)] = forged.get(field, draw.choice(numbers))
                file["nodes"][...] = table
        data = path.read_bytes()[manifests.HEADER :]
        path.write_bytes(manifests._header(data) + data)
        return f"manifest {field}"

    def place(self) -> str:
        """Replace a file by something else, such as a pipe or a folder."""
        file = self.folder / self.draw.choice([p.name for p in self.folder.iterdir()])
        # A link is valid for a log or a data set, whose path the user gives, but not for a file of
        # a checkpoint.
        link = ["link"] if self.kind == "checkpoint" else []
        how = self.draw.choice(["pipe", "device", "folder", "empty", "sparse", *link])
        file.unlink()
        if how == "pipe":
            os.mkfifo(file)
        elif how in ("device", "link"):
            target = "/dev/zero" if how == "device" else self.outside / "secret.h5"
            file.symlink_to(target)
        elif how == "folder":
            file.mkdir()
        else:
            file.write_bytes(b"")
            os.truncate(file, 0 if how == "empty" else 1 << 33)
        return how

    def journal(self) -> str:
        """Add an invalid journal to a log: a pipe, or a journal with wrong sizes."""
        from mpigossip.store import journal

        path = journal.pending(self.path)
        if self.draw.random() < 0.3:
            os.mkfifo(path)
            return "journal pipe"
        page = self.draw.randrange(1 << 10, 1 << 40)
        pages = {0: bytes(4096), page: bytes(4096)}
        journal._write_journal(path, (page + 1) * 4096, pages)
        return "journal pages"

    def damage(self) -> str:
        """Flip bits, or cut off, zero, swap or duplicate bytes, without adapting a checksum."""
        draw = self.draw
        file = self.draw.choice(sorted(self.folder.iterdir()))
        data = bytearray(file.read_bytes())
        at, other = sorted(draw.sample(range(len(data)), 2))
        length = min(draw.choice([1, 8, 64, 512]), other - at)
        first = data[at : at + length]
        second = data[other : other + length]
        how = draw.choice(["flipped", "flipped", "flipped", "cut", "zeroed", "swapped", "doubled"])
        if how == "flipped":
            for _ in range(draw.choice([1, 1, 2, 8])):
                data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        elif how == "cut":
            del data[other:]
        elif how == "zeroed":
            data[at : at + length] = bytes(length)
        elif how == "swapped":
            data[at : at + len(second)], data[other : other + len(first)] = (
                second,
                first[: len(second)],
            )
        else:
            data[other:other] = first
        file.write_bytes(data)
        return how

    def header(self) -> str:
        """Change one or three bytes in a header of HDF5, and adapt the checksum of the header."""
        data = bytearray(self.path.read_bytes())
        start, end = self.draw.choice(list(headers(bytes(data))))
        for _ in range(self.draw.choice([1, 1, 1, 3])):
            data[self.draw.randrange(start + 4, end)] = self.draw.choice([0, 1, 127, 128, 255])
        data[end : end + 4] = lookup3(bytes(data[start:end])).to_bytes(4, "little")
        self.path.write_bytes(data)
        self.sign()
        return "header"


def headers(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield the offsets of the first byte and of the checksum of each header in an HDF5 file.

    Headers are the superblock and the headers of objects, B-trees, extensible arrays and fractal
    heaps.

    :param data: content of the file
    """
    ends = {b"BTHD": lambda at: at + 34, b"EAHD": lambda at: at + 68, b"FRHP": lambda at: at + 142}
    for name, end_of in ({b"OHDR": lambda at: _object_end(data, at)} | ends).items():
        for at in (match.start() for match in re.finditer(name, data)):
            end = end_of(at)
            if lookup3(data[at:end]) == int.from_bytes(data[end : end + 4], "little"):
                yield at, end
    if data[8] in (2, 3):
        yield 0, 44


def _object_end(data: bytes, at: int) -> int:
    """Return the offset of the checksum of the object header that begins at offset ``at``."""
    flags = data[at + 5]
    head = at + 6 + 16 * bool(flags & 32) + 4 * bool(flags & 16)
    width = 1 << (flags & 3)
    return head + width + int.from_bytes(data[head : head + width], "little")


MIX = tuple(zip((4, 6, 8, 16, 19, 4), ((0, 2, 1), (1, 0, 2), (2, 1, 0)) * 2, strict=True))
LAST = tuple(
    zip((14, 11, 25, 16, 4, 14, 24), ((2, 1), (0, 2), (1, 0)) * 2 + ((2, 1),), strict=True)
)


def lookup3(data: bytes) -> int:
    """Return Jenkins' lookup3 hash, the checksum of HDF5's metadata."""
    mask = 0xFFFFFFFF

    def turn(x: int, k: int) -> int:
        return ((x << k) | (x >> (32 - k))) & mask

    v = [(0xDEADBEEF + len(data)) & mask] * 3
    for at in range(0, len(data), 12):
        for k in range(3):
            word = int.from_bytes(data[at + 4 * k : at + 4 * k + 4], "little")
            v[k] = (v[k] + word) & mask
        if at + 12 < len(data):
            for k, (p, q, r) in MIX:
                v[p] = ((v[p] - v[q]) & mask) ^ turn(v[q], k)
                v[q] = (v[q] + v[r]) & mask
        else:
            for k, (p, q) in LAST:
                v[p] = ((v[p] ^ v[q]) - turn(v[q], k)) & mask
    return v[2]


# -- reading, in a fork ---------------------------------------------------------------------------


def forked(work: Callable[[], Any], limit: int) -> tuple[Any, float]:
    """Call a function in a forked process.

    :param work: function whose result can be written as JSON
    :param limit: time limit in seconds
    :return: result of the function, "hang" after the time limit, or "crash CODE" if the process
        ends without a result; and the peak memory of the process in MiB
    """
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        signal.alarm(limit)
        try:
            os.write(write, json.dumps(work()).encode())
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answer = pipe.read()
    _, status, usage = os.wait4(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    failure = "hang" if code == -signal.SIGALRM else f"crash {code}"
    return json.loads(answer) if answer else failure, usage.ru_maxrss / 1024


def read_watched(kind: str, folder: Path, inside: Path) -> tuple[str, float, list[str]]:
    """Read files, and record forbidden events; called in a forked process.

    :param kind: kind of the files: "checkpoint", "log" or "data set"
    :param folder: folder with the files
    :param inside: folder whose files may be opened
    :return: hash of the content, "refused", or "refused without words" if the message is short;
        seconds; up to three forbidden events: imports of modules outside of the standard library,
        files opened outside of ``inside``, started programs and network connections
    """
    strays: list[str] = []
    allowed = (str(inside), str(Path(os.__file__).parent / "encodings"), "/proc/self/")

    def hook(event: str, facts: tuple) -> None:
        if event == "open" and isinstance(facts[0], str | bytes):
            if not os.fsdecode(facts[0]).startswith(allowed):
                strays.append(f"open {os.fsdecode(facts[0])}")
        elif event == "import" and facts[0].partition(".")[0] not in sys.stdlib_module_names:
            strays.append(f"import {facts[0]}")
        elif event in ("os.system", "subprocess.Popen", "os.exec", "socket.connect"):
            strays.append(event)

    sys.addaudithook(hook)
    begin = time.monotonic()
    try:
        answer = content(kind, folder)
    except StoreError as error:
        answer = "refused" if len(str(error)) > 20 else "refused without words"
    return answer, time.monotonic() - begin, strays[:3]


class Watch:
    """Watch of a folder by inotify of the kernel, which reports files that any process opens.

    :raises OSError: if the kernel does not allow the watch
    """

    def __init__(self, folder: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor = libc.inotify_init1(os.O_NONBLOCK)
        if libc.inotify_add_watch(self.descriptor, os.fsencode(folder), 0x20 | 0x1) < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"inotify cannot watch a folder: {os.strerror(code)}", str(folder))

    def seen(self) -> bool:
        """Return whether a file in the folder was opened or read since the last call."""
        try:
            return bool(os.read(self.descriptor, 1 << 16))
        except BlockingIOError:
            return False


def main() -> int:
    """Forge and read files, print the number of cases by result, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="name of the only method of Forger to use, such as header")
    parser.add_argument("--keep", type=Path, help="folder for copies of the wrong cases")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    outcomes = Counter()
    wrong = 0
    slowest = largest = 0.0
    with tempfile.TemporaryDirectory(prefix="forge-") as folder:
        top = Path(folder)
        originals(top / "original")
        expected = {kind: content(kind, top / "original" / kind) for kind in KINDS}
        # A log that lacks a column is valid, because logs differ in their columns.
        expected["missing"] = content("log", top / "original/log", without="loss")
        watch = Watch(outside(top))
        for number in range(options.count):
            kind = KINDS[number % 3]
            case = top / "case" / f"{number}"
            shutil.copytree(top / "original" / kind, case)
            forger = Forger(kind, case, top / "outside", draw)
            ways = [forger.structure] * 7 + [
                forger.place,
                forger.damage,
                forger.damage,
                forger.header,
            ]
            ways += {"checkpoint": [forger.manifest] * 2, "log": [forger.journal]}.get(kind, [])
            way = getattr(forger, options.only) if options.only else draw.choice(ways)
            change = way()
            watch.seen()
            work = lambda: read_watched(kind, case, top / "case")  # noqa: B023, E731
            result, peak = forked(work, 30)
            answer, seconds, strays = (result, 30.0, []) if isinstance(result, str) else result
            opened = watch.seen()
            unchanged = answer == expected[kind]
            loads = unchanged and way in (forger.damage, forger.header, forger.journal)
            if (kind, change, answer) == ("log", "missing", expected["missing"]):
                answer = "loads without the column"
                loads = True
            if way == forger.header and len(answer) == len(expected[kind]) and not loads:
                answer = "loads with another value"
                loads = True
            good = (answer == "refused" or loads) and seconds < SECONDS and peak < MEGABYTES
            good = good and not strays and not opened
            outcome = "loads with the original values" if unchanged else answer[:80]
            outcomes[f"{way.__name__}: {outcome}"] += 1
            slowest = max(slowest, seconds)
            largest = max(largest, peak)
            if not good:
                wrong += 1
                what = "original values" if unchanged else answer
                print(
                    f"WRONG {number} {kind}, {change}: {what}, {seconds} s, {peak} MB, "
                    f"{strays or ('opened outside' if opened else '')}",
                    flush=True,
                )
                if options.keep:
                    options.keep.mkdir(parents=True, exist_ok=True)
                    shutil.copytree(case, options.keep / f"{number}", symlinks=True)
            shutil.rmtree(case)
    for line, count in sorted(outcomes.items()):
        print(f"{count:5}  {line}")
    print(f"{options.count} forged, {wrong} wrong; at most {slowest:.2f} s and {largest:.0f} MB")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

"""Small packed data sets, checkpoints and logs, and changes that make such files invalid."""

import json
import zlib
from pathlib import Path

import h5py
import numpy as np
from PIL import Image

from mpigossip.store import checkpoint
from mpigossip.store import manifest as manifests
from mpigossip.store.checkpoint import NodeState
from mpigossip.store.log import Column, LogWriter, read

JOB = '[run]\nname = "größe"\n'
COLUMNS = {
    "loss": Column("nat", "mean training loss"),
    "bytes_sent": Column("B", "bytes sent so far", "int64"),
    "kind": Column("1", "local, gossip or global", "int8"),
}


def folder_of_images(
    root: Path,
    test: str = "test",
    mode: str = "RGB",
    sides=(20, 30),
    count=6,
    suffix="png",
    classes=("ape", "bee", "cat"),
) -> Path:
    """Create ``count`` training images and ``count // 2`` test images of each class."""
    rng = np.random.default_rng(0)
    for split, images in (("train", count), (test, count // 2)):
        for name in classes:
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(images):
                height, width = rng.integers(*sides, 2, endpoint=True)
                shape = (height, width, 3) if mode == "RGB" else (height, width)
                pixels = rng.integers(0, 256, shape, dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.{suffix}")
    return root


def set_dataset(name, value):
    """Return a change of a file that gives a data set a new value; it may be new, or a link."""

    def change(file):
        if name in file:
            del file[name]
        file[name] = value

    return change


def node_state(node, step=0, size=1000):
    """Return a state of a node: an array of each type, with values that no other node has."""
    draw = np.random.default_rng([node, step])
    return NodeState(
        parameters=draw.standard_normal(size + 6, dtype=np.float32),
        names=("conv.weight", "größe", "scale"),
        shapes=((2, size // 2), (5,), ()),
        arrays={
            "state/momentum": draw.standard_normal(size + 6, dtype=np.float32),
            "state/weight": np.array([[0.5]]),
            "buffers/0/bn.running_mean": draw.standard_normal(4),
            "buffers/0/bn.count": np.array(7),
            "rng/philox": np.arange(4, dtype=np.uint64) + 2**63,
            "flags": np.array([True, False]),
            "half": np.ones(3, np.float16),
            "none": np.zeros((0, 3), np.int8),
        },
        numbers={"index": step, "seed": 2**127 + 1, "lr": 0.1, "nan": float("inf"), "kind": "é\n"},
    )


def write_checkpoint(run, step, n=3, size=1000, job=JOB):
    """Write the checkpoint of a step with ``n`` nodes, and return its folder."""
    temporary = checkpoint.begin(run, step)
    entries = [checkpoint.write_node(temporary, i, node_state(i, step, size)) for i in range(n)]
    return checkpoint.commit(
        temporary, run, step, entries[::-1], job, {"graph": "ring", "loss": 0.5}
    )


def flip_bit(file):
    """Change one bit of a file."""
    data = bytearray(file.read_bytes())
    data[600] ^= 1
    file.write_bytes(data)


def log_values(steps, nodes):
    """Return columns in which each entry identifies its step and node."""
    steps = np.asarray(steps)
    base = steps[:, None] * 1000.0 + np.arange(nodes)
    return {"loss": base + 0.5, "bytes_sent": base.astype(int), "kind": (base % 3).astype(np.int8)}


def log_writer(path, nodes=3, first_step=0, job="[run]\n", columns=COLUMNS):
    """Open a log with the columns ``COLUMNS``."""
    return LogWriter(
        path, nodes=nodes, job=job, columns=columns, environment={"a": "é"}, first_step=first_step
    )


def write_log(path, steps=20, nodes=3, evaluate=10, first_step=0):
    """Write a log of some steps, with an evaluation every ``evaluate`` steps, and read it."""
    out = log_writer(path, nodes, first_step)
    for start in range(first_step, steps, 5):
        out.append(log_values(range(start, min(start + 5, steps)), nodes))
        if (start + 5) % evaluate == 0:
            out.evaluation(evaluation(start + 5, nodes))
    return read(path)


def evaluation(step, nodes):
    """Return the entries of an evaluation after a step."""
    return {"step": step, "accuracy": step / 1000, "local_accuracy": np.full(nodes, step / 2000)}


def change_node_file(path, change, node=0):
    """Change a node's file, and write a manifest that agrees with it."""
    file = path / f"node-{node:04d}.h5"
    manifest = checkpoint.read_manifest(path)
    with h5py.File(file, "r+", libver=("v110", "v110")) as opened:
        change(opened)
    entries = list(manifest.entries)
    checksum = f"{zlib.crc32(file.read_bytes()):08x}"
    entries[node] = entries[node]._replace(bytes=file.stat().st_size, checksum=checksum)
    changed = checkpoint.Manifest(
        manifest.step, manifest.n, manifest.job, manifest.meta, tuple(entries)
    )
    manifests.write(path / "checkpoint.h5", changed)


def set_numbers(**changed):
    """Return a change of a node's file that gives some numbers of its state new values."""

    def change(file):
        values = json.loads(file["numbers"][()]) | changed
        del file["numbers"]
        file["numbers"] = np.bytes_(json.dumps(values))

    return change

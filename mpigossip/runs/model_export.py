"""Export of a model from a checkpoint: the exact average over nodes, or the model of one node.

The model of a round of members is exported in the same form.

The arrays have the names of the model's own ``state_dict()``. Parameters and the statistics of
normalization layers are averaged in float64, in the order of nodes. Evaluations compute the average
in the same way, so the exported parameters are bitwise identical to the parameters that were
evaluated at the same step.
"""

import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from glob import escape
from math import prod
from pathlib import Path

import numpy as np
import torch

from mpigossip import models
from mpigossip.config import JobError
from mpigossip.config.readable import pluralize
from mpigossip.data.sources import source
from mpigossip.members.records import RecordStore, Round, Unusable, parse
from mpigossip.runs.members.join import JOB, LOOP
from mpigossip.store import StoreError, checkpoint, node_state, tensor_files
from mpigossip.store.checkpoint import Manifest
from mpigossip.store.hdf5 import replacing
from mpigossip.store.manifest import Entry
from mpigossip.store.node_file import PIECE
from mpigossip.store.node_reader import NodeReader, open_node
from mpigossip.store.tensor_files import BFLOAT16, SUFFIX, Tensor, of_array
from mpigossip.training import assemble

SUFFIXES = (".safetensors", ".pt", ".pth")


def export(
    path: Path,
    out: Path,
    node: int | None = None,
    trust_model: bool = False,
    most: int | None = None,
) -> str:
    """Write the averaged model of a checkpoint, or the model of one node; return a report.

    Unless ``trust_model`` builds the model, a safetensors file is written tensor by tensor, so that
    the model may be larger than the memory.

    :param path: folder of the checkpoint
    :param out: file to write. Its suffix selects the format: ".safetensors", with step, nodes and
        job as metadata, or ".pt" or ".pth" for ``torch.load``
    :param node: number of the node; None: the average of all nodes
    :param trust_model: import the code of the model, and open the data, that the job of the
        checkpoint names. Leave it False for a checkpoint from somebody else, whose code could do
        anything. It has no effect on a checkpoint of a custom loop
    :param most: largest number of bytes of the tensors in a safetensors file; a larger model is
        written to several files with an index. None: one file
    :return: a text for the terminal: a description of the file, and lines of Python that load it
    :raises StoreError: if ``out`` has another suffix, if ``most`` is given for a file for
        ``torch.load``, if the node does not exist, if the checkpoint is damaged, if its nodes have
        different models, or if the model that ``trust_model`` builds lacks an array
    """
    _check_suffix(out)
    manifest = checkpoint.read_manifest(path)
    if node is not None and not 0 <= node < manifest.n:
        raise StoreError(
            f"--node {node}: {path} has nodes 0 to {manifest.n - 1}; omit --node for their average"
        )
    rebuild = trust_model and manifest.meta.get("door") != "loop"
    with _opened(path, manifest, node) as readers:
        tensors = _tensors_of(readers)
        if rebuild:
            values = {tensor.name: tensor.read() for tensor in tensors}
            state, note = _completed(manifest, values)
            tensors = [_of_torch(name, value) for name, value in state.items()]
        else:
            tensors, note = _as_saved(manifest.job, tensors)
        about = {"nodes": str(manifest.n), "node": "average" if node is None else str(node)}
        files = _write(tensors, out, manifest.job, manifest.step, about, most)
    who = f"node {node} of {manifest.n}" if node is not None else _averaged(path, manifest)
    return _report(out, files, tensors, f"{who} at step {manifest.step}", note)


def _averaged(path: Path, manifest: Manifest) -> str:
    """Return a description of the nodes that are averaged, for the report.

    :param path: folder of a checkpoint. If it belongs to a training of members, its nodes are the
        last models of places
    :param manifest: manifest of the checkpoint
    """
    places = path.absolute().parents[1] / "places"
    if not places.is_dir():
        return f"the average of {manifest.n} nodes"
    count = sum(1 for _ in places.iterdir())
    return f"the average of the last models of {manifest.n} of {pluralize(count, 'place')}"


def export_round(
    folder: Path, out: Path, place: int, number: int | None = None, most: int | None = None
) -> str:
    """Write the model of a round of a training of members, piece by piece; return a report.

    :param folder: folder of the training
    :param out: file to write, as for :func:`export`
    :param place: number of the place
    :param number: number of its round; None: the newest one whose model is stored
    :param most: largest number of bytes of the tensors in a safetensors file; None: one file
    :raises StoreError: if ``out`` has another suffix, if ``most`` is given for a file for
        ``torch.load``, if there is no such round, or if its model is missing or damaged
    """
    _check_suffix(out)
    disk = RecordStore(folder, shared=True)
    record = _round_of(disk, place, number)
    entries = [
        Entry(place, shard.file, shard.bytes, shard.checksum, shard.parameters)
        for shard in record.files
    ]
    content = next((text for name in (JOB, LOOP) if (text := disk.read(name))), b"")
    job = content.decode(errors="replace")
    with open_node(folder / "models", entries, record.step) as reader:
        tensors, note = _as_saved(job, _tensors_of([reader]))
        about = {"place": str(place), "round": str(record.round)}
        files = _write(tensors, out, job, record.step, about, most)
    return _report(out, files, tensors, f"round {record.round} of place {place}", note)


def _round_of(disk: RecordStore, place: int, number: int | None) -> Round:
    """Return the record of a round whose model is stored.

    :param disk: folder of the training
    :param place: number of the place
    :param number: number of the round; None: the newest round whose model is stored
    :raises StoreError: if there is no such round
    """
    records = []
    for name in disk.names(f"chain/{place:06d}"):
        with suppress(Unusable):
            content = disk.read(f"chain/{place:06d}/{name}")
            record = parse(content or b"", name, Round)
            if name == f"{record.round:06d}" and record.place == place:
                records.append(record)
    stored = {
        record.round: record
        for record in records
        if all(disk.exists(f"models/{shard.file}") for shard in record.files)
    }
    if record := stored.get(max(stored, default=0) if number is None else number):
        return record
    rounds = ", ".join(map(str, sorted(stored))) or "no round"
    raise StoreError(
        f"--place {place}{'' if number is None else f' --round {number}'}: {disk.root} stores the "
        f"models of {rounds} of this place; choose another --round, or begin a training with "
        "members.keep_every = 1, which stores the model of each round"
    )


def _check_suffix(out: Path) -> None:
    if out.suffix not in SUFFIXES:
        raise StoreError(f'--out "{out}": the name must end in .safetensors, .pt or .pth')


@contextmanager
def _opened(path: Path, manifest: Manifest, node: int | None) -> Iterator[list[NodeReader]]:
    """Return a context manager that opens the files of one node; None: of all nodes."""
    nodes = range(manifest.n) if node is None else [node]
    with ExitStack() as stack:
        opened = (open_node(path, manifest.of(index), manifest.step) for index in nodes)
        yield [stack.enter_context(reader) for reader in opened]


def _tensors_of(readers: Sequence[NodeReader]) -> list[Tensor]:
    """Return the parameters and buffers of nodes as tensors, averaged over the nodes.

    Buffers of integers can't be averaged; they are taken from the first node.

    :param readers: open files of the nodes
    :raises StoreError: if nodes have different models
    """
    first = readers[0]
    if any((reader.names, reader.shapes) != (first.names, first.shapes) for reader in readers):
        raise StoreError("nodes have different models; export one of them by --node")
    tensors = [
        Tensor(name, "F32", shape, partial(_mean_pieces, readers, index))
        for index, (name, shape) in enumerate(zip(first.names, first.shapes, strict=True))
    ]
    try:
        buffers = node_state.average(reader.buffers() for reader in readers)
    except ValueError as error:
        raise StoreError(f"{error}; export one of them by --node") from error
    kinds = first.buffer_dtypes()
    return tensors + [of_array(name, mean.astype(kinds[name])) for name, mean in buffers.items()]


def _mean_pieces(readers: Sequence[NodeReader], index: int) -> Iterator[np.ndarray]:
    """Iterate over the pieces of a parameter, averaged over nodes as `node_state.average` does."""
    size = prod(readers[0].shapes[index])
    for begin in range(0, size, PIECE):
        end = min(begin + PIECE, size)
        pieces = ({"": reader.read(index, begin, end)} for reader in readers)
        yield node_state.average(pieces)[""].astype(np.float32)


def averaged(path: Path, manifest: Manifest) -> dict[str, np.ndarray]:
    """Return parameters and buffers by name, averaged over the nodes of a checkpoint.

    Buffers of integers can't be averaged; they are taken from node 0.
    """
    with _opened(path, manifest, None) as readers:
        return {tensor.name: tensor.read() for tensor in _tensors_of(readers)}


def _as_saved(job_text: str, tensors: list[Tensor]) -> tuple[list[Tensor], str]:
    """Return the tensors to export, and a note on what is missing.

    Nothing that the job of the checkpoint names is imported. The note is "" if the model is
    complete.

    :param job_text: job of the checkpoint, as TOML
    :param tensors: all tensors of the checkpoint
    """
    try:
        job = tomllib.loads(job_text)
        name = str(job.get("model", {}).get("name", ""))  # a forged file may contain a list here
        loop = job.get("loop", {})
        left_out = loop.get("left_out")
        temporary = set(loop.get("temporary", ()))
    except (tomllib.TOMLDecodeError, AttributeError, TypeError):
        name = "?"
        left_out = None
    if left_out is not None:  # Only a custom loop writes this key.
        note = (
            "frozen parameters, and second names of tied ones, are left out: load with strict=False"
        )
        return [t for t in tensors if t.name not in temporary], note if left_out else ""
    note = (
        "frozen parameters, and second names of tied ones, are left out, because model.name = "
        f'"{name}" is custom code, which is not imported by default: pass --trust-model if you '
        "trust it"
    )
    return tensors, "" if name in models.BUILDERS else note


def _tensors(values: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.array(value)) for name, value in values.items()}


def _of_torch(name: str, value: torch.Tensor) -> Tensor:
    """Return the description of a contiguous torch tensor on the CPU."""
    if value.dtype == torch.bfloat16:
        return Tensor(name, BFLOAT16, tuple(value.shape), lambda: [value.view(torch.int16).numpy()])
    return of_array(name, value.numpy())


def _to_torch(tensor: Tensor) -> torch.Tensor:
    value = torch.from_numpy(np.array(tensor.read()))
    return value.view(torch.bfloat16) if tensor.dtype == BFLOAT16 else value


def _completed(
    manifest: Manifest, values: dict[str, np.ndarray]
) -> tuple[dict[str, torch.Tensor], str]:
    """Return the state_dict of the job's model with these values, and a note on missing arrays.

    A checkpoint contains neither frozen parameters nor the second names of tied parameters, so the
    model of the job is built again to get them. If this host lacks its data or its code, only the
    arrays of the checkpoint are returned. Otherwise, the note is "".

    :param manifest: manifest of the checkpoint
    :param values: arrays of the checkpoint by name
    :raises StoreError: if the model has no array of the same size for a name in the checkpoint
    """
    tensors = _tensors(values)
    try:
        job = assemble.load(manifest.job)
        data = source(job.data, job.run.seed)
        module = assemble.make_model(job, data)
        data.close()
    except (JobError, StoreError) as error:
        return tensors, (
            f"the model can't be built here ({error}): its frozen parameters, if it has any, and "
            "second names of tied ones are left out"
        )
    arrays = dict(module.named_parameters()) | dict(module.named_buffers())
    with torch.no_grad():
        for name, value in tensors.items():
            if name not in arrays or arrays[name].numel() != value.numel():
                raise StoreError(
                    f'"{name}" {tuple(value.shape)} of the checkpoint is not an array of the '
                    "present model: restore the code of the model, or omit --trust-model"
                )
            arrays[name].copy_(value.view(arrays[name].shape))
    # safetensors requires contiguous arrays, and does not store one array under two names, so tied
    # arrays are copied.
    contiguous = torch.contiguous_format
    state = module.state_dict().items()
    return {name: value.detach().clone(memory_format=contiguous) for name, value in state}, ""


def _write(
    tensors: Sequence[Tensor],
    out: Path,
    job: str,
    step: int,
    about: dict[str, str],
    most: int | None,
) -> list[Path]:
    """Write tensors to ``out``, or to several files and an index; return the paths.

    :param tensors: the tensors
    :param out: file that the user has named
    :param job: job as TOML, for the metadata
    :param step: step of the model, for the metadata
    :param about: further entries of the metadata
    :param most: largest number of bytes of the tensors in a file; None: one file
    :raises StoreError: if ``most`` is given for a file for ``torch.load``, or if writing fails
    """
    if out.suffix == SUFFIX:
        metadata = {"format": "pt", "job": job, "step": str(step), **about}
        return tensor_files.write(out, tensors, metadata, most)
    if most is not None:
        raise StoreError(
            f'--max-shard-size: "{out.name}" is one file; give --out a name that ends in {SUFFIX}'
        )
    with replacing(out) as temporary:
        torch.save({tensor.name: _to_torch(tensor) for tensor in tensors}, temporary)
    return [out]


def _report(
    out: Path, files: Sequence[Path], tensors: Sequence[Tensor], who: str, note: str
) -> str:
    """Return the text for the terminal.

    :param out: file that the user has named
    :param files: files that were written; the last one is the index if there are several
    :param tensors: tensors in the files
    :param who: description of the model
    :param note: note on missing tensors, or ""
    """
    count = sum(prod(tensor.shape) for tensor in tensors)
    several = f" in {len(files) - 1} files" if len(files) > 1 else ""
    summary = f"{files[-1]}: {who}; {len(tensors)} arrays, {count:,} numbers{several}"
    lines = [summary, *([f"note: {note}"] if note else []), ""]
    return "\n".join(lines + _three_lines(files, not note))


def _three_lines(files: Sequence[Path], strict: bool) -> list[str]:
    """Return lines of Python that load the exported model."""
    out = files[0]
    build = "model = …  # built as for training"
    more = "" if strict else ", strict=False"
    if len(files) > 1:
        stem = re.sub(rf"-00001-of-\d{{5}}{re.escape(SUFFIX)}$", "", out.name)
        pattern = f"{escape(str(out.parent / stem))}-*-of-*{SUFFIX}"
        paths = f"glob({_python_text(pattern)})"
        return [
            "from glob import glob; from safetensors.torch import load_file",
            build,
            f"state = {{k: v for file in {paths} for k, v in load_file(file).items()}}",
            f"model.load_state_dict(state{more})",
        ]
    if out.suffix == SUFFIX:
        first = "from safetensors.torch import load_file"
        call = f"load_file({_python_text(out)})"
    else:
        first = "import torch"
        call = f"torch.load({_python_text(out)}, weights_only=True)"
    return [first, build, f"model.load_state_dict({call}{more})"]


def _python_text(value: Path | str) -> str:
    """Return a path or pattern as a text of Python in double quotes."""
    return json.dumps(str(value), ensure_ascii=False)

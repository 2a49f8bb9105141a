"""Export of a model from a checkpoint: the exact average over nodes, or the model of one node.

The arrays have the names of the model's own ``state_dict()``. Parameters and the statistics of
normalization layers are averaged in float64, in the order of nodes. Evaluations compute the average
in the same way, so the exported values are bitwise identical to the values that were evaluated.
"""

import tomllib
from collections.abc import Mapping
from math import prod
from pathlib import Path

import numpy as np
import torch

from mpigossip import models
from mpigossip.config import JobError
from mpigossip.data.sources import source
from mpigossip.store import StoreError, checkpoint
from mpigossip.store.checkpoint import Manifest, NodeState
from mpigossip.store.hdf5 import replacing
from mpigossip.store.node_state import over_slots
from mpigossip.training import assemble

SUFFIXES = (".safetensors", ".pt", ".pth")


def export(path: Path, out: Path, node: int | None = None, trust_model: bool = False) -> str:
    """Write the averaged model of a checkpoint, or the model of one node; return a report.

    :param path: folder of the checkpoint
    :param out: file to write. Its suffix selects the format: ".safetensors", with step, nodes and
        job as metadata, or ".pt" or ".pth" for ``torch.load``
    :param node: number of the node; None: the average
    :param trust_model: import the code of the model, and open the data, that the job of the
        checkpoint names. Leave it False for a checkpoint from somebody else, whose code could do
        anything
    :return: a text for the terminal: a description of the file, and three lines of Python that load
        it
    :raises StoreError: if ``out`` has another suffix, if the node does not exist, or if the
        checkpoint is damaged
    """
    if out.suffix not in SUFFIXES:
        raise StoreError(f'--out "{out}": the name must end in .safetensors or .pt')
    manifest = checkpoint.read_manifest(path)
    if node is not None and not 0 <= node < manifest.n:
        raise StoreError(
            f"--node {node}: {path} has nodes 0 to {manifest.n - 1}; omit --node for their average"
        )
    values = averaged(path, manifest) if node is None else model_of(path, node)
    rebuild = trust_model and manifest.meta.get("door") != "loop"
    state, note = _completed(manifest, values) if rebuild else _as_saved(manifest, values)
    who = f"the average of {manifest.n} nodes" if node is None else f"node {node} of {manifest.n}"
    with replacing(out) as temporary:
        _write(state, temporary, manifest, "average" if node is None else str(node))
    count = sum(value.numel() for value in state.values())
    summary = f"{out}: {who} at step {manifest.step}; {len(state)} arrays, {count:,} numbers"
    return "\n".join(
        [summary, *([f"note: {note}"] if note else []), "", *_three_lines(out, not note)]
    )


def averaged(path: Path, manifest: Manifest) -> dict[str, np.ndarray]:
    """Return parameters and buffers by name, averaged over the nodes of a checkpoint.

    Buffers of integers can't be averaged; they are taken from node 0.
    """
    return _by_name(checkpoint.read_node(path, 0, manifest), checkpoint.average(path, manifest))


def model_of(path: Path, node: int) -> dict[str, np.ndarray]:
    """Return parameters and buffers of a node by name.

    Floating-point buffers are averaged over the slots of the node.
    """
    saved = checkpoint.read_node(path, node)
    return _by_name(saved, over_slots(saved))


def _by_name(saved: NodeState, mean: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return ``mean`` with the model's own names, and in the dtypes of the saved arrays.

    :param saved: state of a node, which gives the names, shapes and dtypes
    :param mean: averaged arrays by the names of the checkpoint
    """
    values = {}
    offset = 0
    for name, shape in zip(saved.names, saved.shapes, strict=True):
        values[name] = (
            mean["parameters"][offset : offset + prod(shape)].reshape(shape).astype(np.float32)
        )
        offset += prod(shape)
    for key, array in mean.items():
        kind, _, name = key.partition("/")
        if kind == "buffers":
            values[name] = array.astype(saved.arrays[f"buffers/0/{name}"].dtype)
    return values


def _as_saved(
    manifest: Manifest, values: dict[str, np.ndarray]
) -> tuple[dict[str, torch.Tensor], str]:
    """Return the arrays by the names in the checkpoint, and a note on missing arrays.

    Nothing that the job of the checkpoint names is imported. The note is "" if no array is missing.
    """
    try:
        job = tomllib.loads(manifest.job)
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
        values = {name: value for name, value in values.items() if name not in temporary}
        return _tensors(values), note if left_out else ""
    note = (
        "frozen parameters, and second names of tied ones, are left out, because model.name = "
        f'"{name}" is custom code, which is not imported by default: pass --trust-model if you '
        "trust it"
    )
    return _tensors(values), "" if name in models.BUILDERS else note


def _tensors(values: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.array(value)) for name, value in values.items()}


def _completed(
    manifest: Manifest, values: dict[str, np.ndarray]
) -> tuple[dict[str, torch.Tensor], str]:
    """Return the state_dict of the job's model with these values, and a note on missing arrays.

    A checkpoint contains neither frozen parameters nor the second names of tied parameters, so the
    model of the job is built again to get them. If this host lacks its data or its code, only the
    arrays of the checkpoint are returned. Otherwise, the note is "".
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


def _write(state: dict[str, torch.Tensor], path: Path, manifest: Manifest, node: str) -> None:
    if path.suffix == ".safetensors":
        from safetensors.torch import save

        about = {"step": str(manifest.step), "nodes": str(manifest.n), "node": node}
        # save_file() of safetensors would create a file that only its owner can read.
        path.write_bytes(save(state, {"format": "pt", "job": manifest.job, **about}))
    else:
        torch.save(state, path)


def _three_lines(out: Path, strict: bool) -> list[str]:
    if out.suffix == ".safetensors":
        first = "from safetensors.torch import load_file"
        call = f'load_file("{out}")'
    else:
        first = "import torch"
        call = f'torch.load("{out}", weights_only=True)'
    call = call if strict else f"{call}, strict=False"
    return [first, "model = …  # built as for training", f"model.load_state_dict({call})"]

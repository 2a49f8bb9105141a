"""Export of a model from a checkpoint: the exact average over nodes, or the model of one node.

Names are those of the model's own ``state_dict()``. Parameters and norm statistics are averaged in
float64 in the order of nodes, as in an evaluation, so the values are bitwise identical.
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
    :param out: file to write. Its suffix selects the format: .safetensors, with step, nodes and job
        as metadata, or .pt (.pth) for ``torch.load``
    :param node: number of the node; None: the average
    :param trust_model: import the model and open the data that the job of the checkpoint names.
        Leave it False for a checkpoint from somebody else
    :raises StoreError: if the suffix is another one, the node does not exist, or the checkpoint is
        damaged
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
    """Return parameters and buffers by name; floats are averaged over the nodes of a checkpoint."""
    return _by_name(checkpoint.read_node(path, 0, manifest), checkpoint.average(path, manifest))


def model_of(path: Path, node: int) -> dict[str, np.ndarray]:
    """Return parameters and buffers of a node by name; float buffers are averaged over slots."""
    saved = checkpoint.read_node(path, node)
    return _by_name(saved, over_slots(saved))


def _by_name(saved: NodeState, mean: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the averages by the model's own names, in the dtypes that were saved."""
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
    """Return the values by the names of the checkpoint, and a note; import nothing of its job."""
    try:
        job = tomllib.loads(manifest.job)
        name = str(job.get("model", {}).get("name", ""))  # a forged file may contain a list here
        loop = job.get("loop", {})
        left_out = loop.get("left_out")
        temporary = set(loop.get("temporary", ()))
    except (tomllib.TOMLDecodeError, AttributeError, TypeError):
        name = "?"
        left_out = None
    if left_out is not None:  # the checkpoint of a custom loop
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
    """Return the state_dict of the job's model with these values, and a note.

    The checkpoint has no frozen parameters and only one name of each tied parameter, so the model
    of the job is built again to get them. If its data or its factory are not on this host, the
    names of the checkpoint are used.
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
    # safetensors does not store one array under two names, so tied arrays are copied
    contiguous = torch.contiguous_format  # required by safetensors
    state = module.state_dict().items()
    return {name: value.detach().clone(memory_format=contiguous) for name, value in state}, ""


def _write(state: dict[str, torch.Tensor], path: Path, manifest: Manifest, node: str) -> None:
    if path.suffix == ".safetensors":
        from safetensors.torch import save

        about = {"step": str(manifest.step), "nodes": str(manifest.n), "node": node}
        # save_file would make files that only their owner can read
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

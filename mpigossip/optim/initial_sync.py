"""Initial synchronization of layouts, parameters and buffers across nodes."""

import hashlib
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import nn

from mpigossip import config
from mpigossip.cluster.world import World
from mpigossip.config import Job, JobError
from mpigossip.config.readable import print_note_once
from mpigossip.engine.overlapping_tensors import overwrite
from mpigossip.engine.sharded import is_sharded, local_shard
from mpigossip.engine.vector import ParameterLayout

CHUNK = 1 << 27
"""Number of bytes of rank 0 that are pickled at a time."""
ALIKE = ("algorithm", "graph", "cadence")
"""Sections of a job that must be equal on all nodes, besides some settings of other sections."""

Facts = Sequence[tuple[str, str]]
"""Pairs of a name and a description that must be equal on all ranks."""


def layout(model: nn.Module) -> Facts:
    """Describe parameters and buffers by name: shape, type, strides, frozen or sharded.

    :raises JobError: if a parameter or buffer is a sparse tensor
    """
    parameters = list(model.named_parameters())
    buffers = list(model.named_buffers())
    for kind, tensors in (("parameter", parameters), ("buffer", buffers)):
        for name, tensor in tensors:
            if tensor.layout != torch.strided:
                raise JobError(
                    f"the model's {kind} {name} is a sparse tensor ({tensor.layout}), and nodes "
                    f"copy dense ones only: make it dense by to_dense(), or, if it is constant, "
                    "keep it as an attribute of the module that is neither parameter nor buffer"
                )
    facts = [
        (f"parameter {n}", _describe(p) + ", frozen" * (not p.requires_grad)) for n, p in parameters
    ]
    return facts + [(f"buffer {n}", _describe(b)) for n, b in buffers]


def _describe(tensor: torch.Tensor) -> str:
    text = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    if is_sharded(tensor):
        mesh: Any = tensor.device_mesh
        return f"{text} in {mesh.size()} shards"
    dense = torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format)
    return text if dense.is_contiguous() else f"{text} with strides {dense.stride()}"


def settings_of(job: Job) -> Facts:
    """Return the settings of a job that must be equal on all nodes, by name."""
    sections = config.as_dict(job)
    periods = sections["algorithm"]["average_state"]
    sections["algorithm"]["average_state"] = dict(sorted(periods.items()))
    if job.node.mixer == "asynchronous" and job.cadence.name == "every":
        # Asynchronous nodes do not wait for each other, so their periods may differ.
        sections["cadence"].pop("period")
    facts = [(f"{s}.{key}", repr(value)) for s in ALIKE for key, value in sections[s].items()]
    more = [("run", "seed"), ("node", "wire"), ("node", "mixer")]
    return facts + [(f"{s}.{key}", repr(sections[s][key])) for s, key in more]


def check_equal(world: World, facts: Facts) -> None:
    """Raise JobError on all ranks if ``facts`` differ between ranks; collective.

    The message names the first difference and the ranks that have it.
    """
    digest = hashlib.sha256(repr(facts).encode()).digest()
    if not world.agree(int(world.broadcast(digest) != digest)):
        return
    first = world.broadcast(facts)
    with world.raise_together(JobError):
        for local, of_rank_0 in zip_longest(facts, first):
            if local != of_rank_0:
                raise JobError(_difference(local, of_rank_0))


def _difference(local: tuple[str, str] | None, first: tuple[str, str] | None) -> str:
    remedy = (
        "names, shapes, types and order must be equal on all ranks: build the model by the same "
        "code, and pass the same settings"
    )
    if local is None or first is None:
        owner = "rank 0" if local is None else "this rank"
        (name, description) = local or first or ("", "")
        return f"{name} ({description}) exists on {owner} only; {remedy}"
    if local[0] != first[0]:
        return (
            f"this rank has {local[0]} ({local[1]}) in the position where rank 0 has {first[0]} "
            f"({first[1]}); {remedy}"
        )
    return f"{local[0]} is {local[1]}, but on rank 0 it is {first[1]}; {remedy}"


def broadcast_model(world: World, model: nn.Module) -> None:
    """Copy node 0's parameters and buffers to all nodes, as DDP does; report differences once.

    Collective. The models must have passed :func:`check_equal`. A shard is copied from the rank of
    node 0 with the same local rank.
    """
    differ = False
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            ranks = world.nodes.inter_node if is_sharded(tensor) else world
            differ |= _from_rank_0(ranks, local_shard(tensor.detach()))
    if others := sum(world.gather(differ) or ()):
        print_note_once(
            f"the initial models of {others} other ranks differed from the model of rank 0; as in "
            "DDP, all nodes start with the model of rank 0: use one seed for the model, and "
            "another one on each rank for the data"
        )


def _from_rank_0(world: World, tensor: torch.Tensor) -> bool:
    """Copy the tensor of rank 0; return whether this changed any byte."""
    dense = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    before = dense.view(-1).view(torch.uint8).numpy()
    flat = before.copy()
    for start in range(0, flat.size, CHUNK):
        flat[start : start + CHUNK] = world.broadcast(flat[start : start + CHUNK])
    if differs := not np.array_equal(flat, before):
        overwrite(tensor, torch.from_numpy(flat).view(tensor.dtype).view(tensor.shape))
    return differs


def load_packed(model: nn.Module, flat: ParameterLayout, packed: torch.Tensor) -> None:
    """Write packed parameters into the model, or into this rank's shards of it.

    :param model: the model
    :param flat: layout of the parameters, or of the shards, in this process
    :param packed: the packed values, (count,)
    """
    row = torch.zeros(flat.size, dtype=torch.float32)
    flat.unpack(packed, row)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, view in zip(flat.names, flat.views(row), strict=True):
            local_shard(parameters[name].detach()).copy_(view)

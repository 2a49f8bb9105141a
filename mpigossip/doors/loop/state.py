"""The checkpoint of a user's own loop: this node's state as arrays and numbers, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpigossip.config import JobError
from mpigossip.doors.loop import optimizer as optimizer_state
from mpigossip.doors.loop import saved
from mpigossip.doors.loop.plain import packed, unpacked
from mpigossip.doors.node import Node
from mpigossip.runs.elastic import begin_at, same_method, same_model, same_rhythm
from mpigossip.store import StoreError, checkpoint
from mpigossip.store.average import over_nodes
from mpigossip.store.checkpoint import Manifest, NodeState, Number
from mpigossip.store.hdf5 import reading
from mpigossip.training import snapshot as snapshots

SECTIONS = ("run", "algorithm", "graph", "cadence", "node", "checkpoint", "log")
"""Of a job, that a loop has too."""


def check_door(path: Path) -> None:
    """JobError where a job wrote the checkpoint."""
    if checkpoint.read_manifest(path).meta.get("door") != "loop":
        raise JobError(
            [f'run: "{path.parents[1]}" holds the run of a job: go on with it by `mpigossip resume '
             f"{path.parents[1]}`, or name another folder"]
        )  # fmt: skip


def snapshot(node: Node, keeps: Mapping[str, Any], numbers: dict[str, Number]) -> NodeState:
    """Everything of this node, the torch optimizer's state and torch's random numbers included."""
    state = snapshots.snapshot(node.engine, node.slots.buffers(), 0, numbers)
    arrays = state.arrays
    numbers["torch"] = optimizer_state.written(node.inner, node.model, arrays)
    arrays["rng/torch"] = torch.get_rng_state().numpy()
    if gpus := _gpus(node):
        arrays["rng/cuda"] = np.stack([torch.cuda.get_rng_state(gpu).numpy() for gpu in gpus])
    own = {name: _state_of(thing) for name, thing in keeps.items()}
    numbers["own"] = json.dumps(packed(own, "own", arrays))
    return state


def restore(
    node: Node, path: Path, keeps: Mapping[str, Any]
) -> tuple[list[str], Mapping[str, Any]]:
    """Put the node to where the checkpoint stands: what to tell, and its numbers.

    Equal nodes, slots and state: exact to the bit. Otherwise from the exact average, and what the
    torch optimizer's state has in floats from its average. StoreError for another model.
    """
    manifest = checkpoint.read_manifest(path)
    slots = len(node.slots.models)
    fits = manifest.n == node.mixer.n and manifest.meta.get("slots") == slots
    first = checkpoint.read_node(path, node.mixer.rows[0] if fits else 0)
    same_model(first, node.vector.flat, path, "the model that was saved")
    lacking = {"torch", "own", "shift", "seconds", "bytes_sent", "round"} - first.numbers.keys()
    if lacking:
        raise StoreError(
            f"{path} lacks {', '.join(sorted(lacking))}, which a loop saves; use another"
        )
    with reading(path):
        if fits and same_method(first, node.engine):
            return _exactly(node, first, keeps), first.numbers
        return _from_average(node, path, manifest, first, keeps), first.numbers


def _exactly(node: Node, first: NodeState, keeps: Mapping[str, Any]) -> list[str]:
    snapshots.restore(node.engine, node.slots.buffers(), 0, first)
    node.mixer.bytes_sent[0] = int(first.numbers["bytes_sent"])
    _load_optimizer(node, first, first.arrays)
    torch.set_rng_state(torch.from_numpy(np.array(first.arrays["rng/torch"])))
    if "rng/cuda" in first.arrays:
        for gpu, state in zip(_gpus(node), np.atleast_2d(first.arrays["rng/cuda"]), strict=False):
            torch.cuda.set_rng_state(torch.from_numpy(np.array(state)), gpu)
    return _load_own(first, keeps, draws=True)


def _gpus(node: Node) -> list[torch.device]:
    """Of the slots, each of which draws its own random numbers."""
    devices = [next(model.parameters()).device for model in node.slots.models]
    return [device for device in devices if device.type == "cuda"]


def _from_average(
    node: Node, path: Path, manifest: Manifest, first: NodeState, keeps: Mapping[str, Any]
) -> list[str]:
    mean = over_nodes(path, manifest.n)
    node.engine.count_from(first.numbers)
    told = [f"from the exact average of {manifest.n} nodes x {manifest.meta['slots']} slots"]
    told += begin_at(node.engine, [node.slots.buffers()], mean)
    if node.engine.born < node.engine.index and same_rhythm(first, node.engine):
        node.engine.restore_rhythm(first.numbers)
    lacking = _load_optimizer(node, first, mean)
    kinds = sorted({name.rpartition("/")[2] for name in mean if name.startswith("torch/")})
    if kinds:
        told.append(f"of the optimizer averaged: {', '.join(kinds)}")
    if lacking:
        told.append(f"dropped: the optimizer's state of {', '.join(lacking[:4])}")
    told.append("dropped: random numbers")
    return told + _load_own(first, keeps, draws=False)


def _load_optimizer(node: Node, first: NodeState, arrays: Mapping[str, np.ndarray]) -> list[str]:
    """Into the torch optimizer; parameters that have no state among the arrays."""
    text = str(first.numbers["torch"])
    given, lacking = optimizer_state.read(node.inner, node.model, text, arrays)
    saved.load(given, None, node.inner, node.model, node.flat)
    return lacking


def _state_of(thing: Any) -> Any:
    return thing.state_dict() if hasattr(thing, "state_dict") else thing.get_state()


def _load_own(first: NodeState, keeps: Mapping[str, Any], draws: bool) -> list[str]:
    """Into what the program has kept; ``draws``: generators, too, which belong to one node."""
    own, anew = json.loads(str(first.numbers["own"])), []
    for name, thing in keeps.items():
        if name not in own or not (draws or hasattr(thing, "load_state_dict")):
            anew.append(name)
            continue
        state = unpacked(own[name], first.arrays)
        (thing.load_state_dict if hasattr(thing, "load_state_dict") else thing.set_state)(state)
    return [f"begun anew: {', '.join(anew)}"] if anew else []

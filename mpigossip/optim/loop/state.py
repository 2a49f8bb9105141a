"""The checkpoint of a user's own loop: this node's state as arrays and numbers, and back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from mpigossip.config import JobError
from mpigossip.config.readable import counted
from mpigossip.engine.state import split
from mpigossip.groups.base import held
from mpigossip.optim.loop import optimizer as optimizer_state
from mpigossip.optim.loop import saved
from mpigossip.optim.loop.optimizer import packed, unpacked
from mpigossip.optim.node import Node
from mpigossip.runs.elastic import begin_at, check_counters, same_method, same_model
from mpigossip.store import checkpoint
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


def snapshot(
    node: Node, keeps: Mapping[str, Any], numbers: dict[str, Number]
) -> tuple[NodeState | None, Own]:
    """Everything of this node but what its ranks have each, in the first of them; and that.

    The torch optimizer's state is included, which all of them have alike. Where each has a part of
    the model, nothing of that: :func:`of_node` gathers it.
    """
    arrays = {
        f"buffers/{slot}/{name}": snapshots.plain(buffer).copy()
        for slot, each in enumerate(node.buffers)
        for name, buffer in each.items()
    }
    arrays["rng/torch"] = torch.get_rng_state().numpy()
    if (gpu := next(node.model.parameters()).device).type == "cuda":
        arrays["rng/cuda"] = torch.cuda.get_rng_state(gpu).numpy()[None]
    kept = {name: packed(_state_of(one), f"own/{name}", arrays) for name, one in keeps.items()}
    own = Own(arrays, kept, int(numbers["bytes_sent"]))
    if not node.world.nodes.first or node.cut:
        return None, own
    return _whole(node, numbers), own


def _whole(node: Node, numbers: dict[str, Number]) -> NodeState | None:
    """Model, method and torch optimizer; collective where ranks have parts, None but in the first.

    There one parameter's state after the other is whole in every rank.
    """
    state = snapshots.snapshot(node.engine, (), 0, numbers)
    arrays = None if state is None else state.arrays
    numbers["torch"] = optimizer_state.written(node.inner, node.model, arrays)
    numbers["ranks"] = node.world.nodes.per_node
    return state


class Own(NamedTuple):
    """What each rank of a node has of its own."""

    arrays: dict[str, np.ndarray]
    """buffers by slot, random numbers, tensors of what the program keeps"""
    kept: dict[str, Any]
    """what the program keeps, as JSON has it"""
    sent: int
    """bytes so far"""

    def marks(self) -> dict[str, str]:
        """By what the program keeps, a digest of it."""
        return {name: self._mark(name) for name in self.kept}

    def _mark(self, name: str) -> str:
        sha = hashlib.sha256(json.dumps(self.kept[name]).encode())
        for path in sorted(self.arrays):
            if path == f"own/{name}" or path.startswith(f"own/{name}/"):
                sha.update(self.arrays[path].tobytes())
        return sha.hexdigest()

    def beside(self, first: Mapping[str, str]) -> Own:
        """Without what is kept as the node's first rank has it: what holds ``marks`` like these."""
        mine = self.marks()
        kept = {name: one for name, one in self.kept.items() if first.get(name) != mine[name]}
        held = {f"own/{name}" for name in self.kept.keys() - kept.keys()}
        arrays = {k: a for k, a in self.arrays.items() if "/".join(k.split("/")[:2]) not in held}
        return Own(arrays, kept, self.sent)


def of_node(
    state: NodeState | None, own: Own, node: Node, numbers: dict[str, Number]
) -> list[NodeState]:
    """The node's state with what all of its ranks have; in the first, nothing in the others.

    Collective over the node. Of the rank in place p: ``rng/#p``, ``own/#p``, slots after others'.
    """
    inside = node.world.nodes.inside
    if node.cut:
        with torch.no_grad():
            state = _whole(node, numbers)
    every: list[Own] | None = [own]
    if inside is not None:
        first = inside.broadcast(own.marks())
        every = inside.gather(own if state is not None else own.beside(first))
    if state is None or every is None:
        return []
    for place, one in enumerate(every):
        state.arrays.update({_of(place, k): a for k, a in one.arrays.items()})
        state.numbers["own" if not place else f"own/#{place}"] = json.dumps(one.kept)
    state.numbers["bytes_sent"] = sum(one.sent for one in every)
    return [state]


def _of(place: int, path: str) -> str:
    """The path in the node's file of what a rank calls by its own."""
    kind, _, rest = path.partition("/")
    if not place:
        return path
    if kind == "buffers":
        slot, _, name = rest.partition("/")
        return f"buffers/{place + int(slot)}/{name}"
    return f"{kind}/#{place}/{rest}"


def _of_rank(state: NodeState, node: Node) -> NodeState:
    """The node's state as the rank here has it: the inverse of :func:`of_node`."""
    place = node.world.nodes.place
    if not place:
        return state
    arrays: dict[str, np.ndarray] = {}
    mine: dict[str, np.ndarray] = {}
    for path, array in state.arrays.items():
        kind, head, rest = (path.split("/", 2) + ["", ""])[:3]
        if kind == "buffers":
            mine[f"buffers/{int(head) - place}/{rest}"] = array
        elif head == f"#{place}":
            mine[f"{kind}/{rest}"] = array
        elif kind != "rng":
            arrays[path] = array
    own = [json.loads(str(state.numbers.get(key, "{}"))) for key in ("own", f"own/#{place}")]
    numbers = state.numbers | {"own": json.dumps(own[0] | own[1]), "bytes_sent": 0}
    return replace(state, arrays=arrays | mine, numbers=numbers)


def restore(
    node: Node, path: Path, keeps: Mapping[str, Any]
) -> tuple[list[str], Mapping[str, Any]]:
    """Put the node to where the checkpoint stands: what to tell, and its numbers.

    Equal nodes, slots and state: exact to the bit; other slots, too, where they have no buffers.
    Otherwise from the exact average, and what the torch optimizer's state has in floats from its
    average. StoreError for another model.
    """
    manifest = checkpoint.read_manifest(path)
    fits = manifest.n == node.mixer.n
    first = checkpoint.read_node(path, node.mixer.rows[0] if fits else 0)
    alike = manifest.meta.get("slots") == node.world.nodes.per_node
    if fits and not alike and any(name.startswith("buffers/") for name in first.arrays):
        first, fits = checkpoint.read_node(path, 0), False
    same_model(first, node.vector.flat, path, "the model that was saved")
    check_counters(first, path, ("torch", "own"))
    with reading(path):
        if fits and same_method(first, node.engine):
            return _exactly(node, _of_rank(first, node), keeps), first.numbers
        return _from_average(node, path, manifest, first, keeps), first.numbers


def _exactly(node: Node, first: NodeState, keeps: Mapping[str, Any]) -> list[str]:
    vector, group = node.vector, node.engine.group
    split(first.parameters, vector.x, 0, vector.flat, held(group))
    node.engine.restore(first.arrays, first.numbers)
    snapshots.put_buffers(dict(enumerate(node.buffers)), first)
    node.mixer.bytes_sent[0] = int(first.numbers["bytes_sent"])
    _, told = _load_optimizer(node, first, first.arrays)
    if "rng/torch" in first.arrays:
        torch.set_rng_state(torch.from_numpy(np.array(first.arrays["rng/torch"])))
    gpu = next(node.model.parameters()).device
    if "rng/cuda" in first.arrays and gpu.type == "cuda":
        state, *_ = np.atleast_2d(first.arrays["rng/cuda"])
        torch.cuda.set_rng_state(torch.from_numpy(np.array(state)), gpu)
    were, now = int(first.numbers.get("ranks", 1)), node.world.nodes.per_node
    told += _load_own(first, keeps, draws=were == now or node.world.nodes.first)
    if were != now:
        told.append(f"from nodes of {counted(were, 'rank')}, now {now}: random numbers of all but "
                    "a node's first rank are dropped, or begin anew")  # fmt: skip
    return told


def _from_average(
    node: Node, path: Path, manifest: Manifest, first: NodeState, keeps: Mapping[str, Any]
) -> list[str]:
    mean = over_nodes(path, manifest.n)
    node.engine.count_from(first.numbers)
    told = [f"from the exact average of {manifest.n} nodes x {manifest.meta['slots']} slots"]
    told += begin_at(node.engine, [node.buffers], mean, first.numbers)
    lacking, settings = _load_optimizer(node, first, mean)
    kinds = sorted({name.rpartition("/")[2] for name in mean if name.startswith("torch/")})
    if kinds:
        told.append(f"of the optimizer averaged: {', '.join(kinds)}")
    if lacking:
        told.append(f"dropped: the optimizer's state of {', '.join(lacking[:4])}")
    told.append("dropped: random numbers")
    return told + settings + _load_own(first, keeps, draws=False)


def _load_optimizer(
    node: Node, first: NodeState, arrays: Mapping[str, np.ndarray]
) -> tuple[list[str], list[str]]:
    """Into the torch optimizer; parameters that have no state among the arrays, and reports."""
    text = str(first.numbers["torch"])
    given, lacking = optimizer_state.read(node.inner, node.model, text, arrays)
    return lacking, saved.load(given, None, node.inner, node.model, node.flat.own)


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

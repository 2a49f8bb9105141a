"""State of a node as named arrays and numbers: snapshots in memory, and restoring from checkpoints.

If the run has the same number of nodes and the same method as the checkpoint, and
`Node.resumes_exactly` is true, each node gets its saved state. Otherwise, all nodes begin with the
exact average of the saved nodes.
"""

import tomllib
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpigossip.algorithms.methods import same_state
from mpigossip.cluster.deadline import paused
from mpigossip.cluster.world import World
from mpigossip.config.errors import UserError
from mpigossip.config.readable import pluralize
from mpigossip.engine.overlapping_tensors import overwrite
from mpigossip.engine.step import Engine
from mpigossip.engine.vector import NodeLayout, ParameterLayout, is_per_row, join_row, scatter_row
from mpigossip.groups.base import local_shards
from mpigossip.runs.node import Node
from mpigossip.store import StoreError, checkpoint, direct
from mpigossip.store.checkpoint import Manifest, NodeState, Number
from mpigossip.store.hdf5 import reading
from mpigossip.store.manifest import MOST

COUNTERS = {"index", "born", "round", "shift", "seconds", "bytes_sent"}
"""Names of the counters that every checkpoint of a run contains."""
CADENCE = "cadence/"
"""Beginning of the names of numbers that are the state of the cadence."""
PIECE = 1 << 27
"""Number of bytes of an average that rank 0 broadcasts at a time."""
AVERAGED = {"momentum", "first", "second"}
"""Names of those arrays in the states of algorithms that are means of gradients or of their
squares. Only these can be averaged over nodes; all other arrays have to be reset."""

# -- from a node to arrays -------------------------------------------------------------------------


def snapshot(
    node: Node, numbers: Mapping[str, Number], spare: Sequence[NodeState] = ()
) -> list[NodeState]:
    """Return copies of parameters, algorithm's state, buffers and counters; collective over a node.

    :param node: the local nodes
    :param numbers: counters of the run, which the copies contain, too
    :param spare: an earlier snapshot that is no longer needed. Its memory is used again, because
        allocating new memory takes longer than the copy
    :return: in the first process of a node, one state for each local node, and none in its other
        processes. If nodes are large (see `checkpoint.one_file_gb`), each process returns one state
        for each of its local slots
    """
    engine = node.engine
    # If the parameter layout has changed since, the memory of the earlier snapshot does not fit.
    spare = [state for state in spare if state.names == engine.vector.flat.names]
    counters = engine.numbers() | {"shift": node.shift, **numbers}
    numbers_by_row = [
        counters | {"bytes_sent": sent, "local_steps": count}
        for sent, count in zip(_bytes_sent(node), engine.counts, strict=True)
    ]
    if _large(node):
        return _by_slot(engine, node.buffers(0), numbers_by_row[0], spare)
    states = [
        _of_node(node, row, row_numbers, reusable)
        for row, (row_numbers, reusable) in enumerate(
            zip_longest(numbers_by_row, spare[: len(numbers_by_row)])
        )
    ]
    return [state for state in states if state is not None]


def _bytes_sent(node: Node) -> list[int]:
    sent = torch.tensor(node.mixer.bytes_sent, dtype=torch.float64).unsqueeze(1)
    by_slot = [
        torch.zeros_like(sent) if slot else sent for slot in range(len(node.group.local_slots))
    ]
    return [int(total) for total in node.group.sum_scalars(by_slot)[:, 0]]


def _large(node: Node) -> bool:
    """Return whether a node is so large that each of its slots writes its own file."""
    engine = node.engine
    flat = engine.vector.flat
    state = [part for part, *_ in engine.parts().values()]
    bytes_per_element = 4 + sum(a.element_size() for a in state if not is_per_row(a, flat))
    several = node.world.nodes.per_node > 1 and engine.group.slots > 1
    # If the layout permutes a parameter, a slot that has only a part of it can't restore the order
    # of its elements.
    able = several and isinstance(flat, ParameterLayout) and flat.is_row_major
    return able and flat.count * bytes_per_element > 1e9 * node.job.checkpoint.one_file_gb


def _of_node(node: Node, row: int, numbers: dict, spare: NodeState | None) -> NodeState | None:
    engine = node.engine
    buffer_arrays = dict[str, np.ndarray]()
    buffers = node.buffers(row)
    for name in buffers[0] if buffers else ():
        by_slot = node.group.to_first([of_slot[name] for of_slot in buffers])
        for slot, buffer in enumerate(by_slot or ()):
            buffer_arrays[f"buffers/{slot}/{name}"] = plain(buffer).copy()
    if engine.group.slots == 1 and not node.world.nodes.is_leader:
        return None  # Each rank has all parameters, so a copy on the first rank is enough.
    arrays = engine.pack_state(row, spare.arrays if spare else None)
    x = engine.group.to_first([shard[row : row + 1] for shard in engine.vector.x])
    if x is None:
        return None
    flat = engine.vector.flat
    values = join_row(x, 0, flat, spare.parameters if spare else None)
    return NodeState(values, flat.names, flat.shapes, arrays | buffer_arrays, numbers)


def _by_slot(
    engine: Engine,
    buffers: Sequence[Mapping[str, torch.Tensor]],
    numbers: dict,
    spare: Sequence[NodeState],
) -> list[NodeState]:
    """Copy the local slots of a large node, without communication; return one state per slot.

    :param engine: engine of the only local node
    :param buffers: buffers of the model by name, one dict for each local slot
    :param numbers: counters, which each state contains
    :param spare: an earlier result whose memory is used again; empty: none
    """
    flat: Any = engine.vector.flat
    state = engine.parts()
    states = []
    for index, slot in enumerate(engine.group.local_slots):
        before = spare[index] if spare else None
        of_slot = buffers[index] if buffers else {}
        arrays = {
            f"buffers/{slot}/{name}": plain(buffer).copy() for name, buffer in of_slot.items()
        }
        pieces: dict[str, np.ndarray] = {}
        for name, parts in state.items():
            values = parts[index][0]
            if not is_per_row(parts[index], flat):
                again = before.pieces[name] if before else None
                pieces[name] = _packed(flat.inside(values, slot), again)
            elif slot == 0:  # Scalars are equal in all slots: the first one saves them.
                arrays[name] = values.cpu().numpy().copy()
        x = flat.inside(engine.vector.x[index][0], slot)
        parameters = _packed(x, before.parameters if before else None)
        states.append(
            NodeState(parameters, flat.names, flat.shapes, arrays, dict(numbers), slot, pieces)
        )
    return states


def _packed(parts: Sequence[torch.Tensor], into: np.ndarray | None) -> np.ndarray:
    """Concatenate the elements of ``parts`` in ``into``; if ``into`` is None, in new memory."""
    count = sum(part.numel() for part in parts)
    if into is None and count:
        pages = torch.from_numpy(direct.pages(count * parts[0].element_size()))
        into = pages.view(parts[0].dtype).numpy()
    if into is None:  # The slot contains only padding, so there are no values.
        return torch.cat(parts).numpy()
    torch.from_numpy(into).copy_(torch.cat(parts))
    return into


def plain(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor as a NumPy array; bfloat16, which NumPy lacks, is converted to float32."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


# -- from arrays to a node -------------------------------------------------------------------------


def read_manifest(path: Path, world: World) -> Manifest:
    """Read the manifest of a checkpoint on rank 0, and return it on all ranks; collective.

    It has an entry for each node. If n ranks read it, the file system would transfer n² entries.

    :param path: folder of the checkpoint
    :param world: ranks of the run
    :raises UserError: on all ranks, if rank 0 cannot read the manifest
    """
    manifest = None
    with world.raise_together(UserError):
        if world.rank == 0:
            manifest = checkpoint.read_manifest(path)
    return world.broadcast(manifest)


def restore(
    node: Node, path: Path, manifest: Manifest
) -> tuple[bool, list[str], Mapping[str, Number]]:
    """Restore the local nodes from a checkpoint; collective.

    If the run can't resume exactly, each node begins with the exact average of the saved nodes, by
    :func:`from_mean`. The caller has to call :meth:`Node.publish` afterwards.

    :param node: the local nodes
    :param path: folder of the checkpoint
    :param manifest: manifest of this checkpoint
    :return: whether the run resumes exactly, messages for the user, and the saved counters: of the
        first local node, or of node 0 if the number of nodes differs or `Node.resumes_exactly` is
        false
    :raises UserError: on all ranks, if the checkpoint is damaged or belongs to another model
    """
    world = node.world
    messages: list[str] = []
    with world.raise_together(UserError):
        first, fits = _first_state(node, path, manifest)
    exact = not world.agree(not fits)
    # `reading` converts errors about shapes to StoreError.
    if exact:
        with world.raise_together(UserError), reading(path):
            for row, number in enumerate(node.mixer.local_nodes):
                saved = checkpoint.read_node(path, number, manifest) if row else first
                _check_counters(saved, path)
                messages += _exactly(node, row, saved)
    else:
        mean = read_average(path, manifest, world)
        with world.raise_together(UserError), reading(path):
            nodes = pluralize(manifest.n, "node")
            slots = manifest.meta["slots"]
            noun = "slot" if slots == 1 else "slots"
            messages = [f"from the exact average of {nodes} x {slots} {noun}"]
            messages += from_mean(node, mean, first.numbers)
            messages += node.restore_extra_state(0, first, mean)
    return exact, messages, first.numbers


def _first_state(node: Node, path: Path, manifest: Manifest) -> tuple[NodeState, bool]:
    """Read the state whose counters this process continues, and restore these counters.

    :param node: the local nodes
    :param path: folder of the checkpoint
    :param manifest: manifest of this checkpoint
    :return: the state, and whether the local nodes can resume exactly; not collective
    :raises StoreError: if the checkpoint is damaged or belongs to another model
    """
    _check_facts(manifest, node.facts, path)
    node.check_saved(manifest, path)
    fits = manifest.n == node.mixer.n
    first = checkpoint.read_node(path, node.mixer.local_nodes[0] if fits else 0, manifest)
    # Nodes that do not take their own state take the counters of node 0. If only the method
    # differs, each node keeps its own counters, whose step is equal on all nodes.
    if fits and not node.resumes_exactly(manifest, first):
        first = checkpoint.read_node(path, 0, manifest)
        fits = False
    _check_model(first, node.engine.vector.flat, path)
    _check_counters(first, path)
    with reading(path):
        node.restore_counters(first.numbers, manifest.meta)
        now = node.job.algorithm.name
        same = _same_method(first, node.engine) and same_state(_algorithm(manifest) or now, now)
    return first, fits and same


def read_average(path: Path, manifest: Manifest, world: World) -> dict[str, np.ndarray]:
    """Return the average of a checkpoint over its nodes, by `checkpoint.average`; collective.

    Rank 0 reads the files, in the order of the nodes, and broadcasts the average. If n ranks read
    all files, the file system would transfer n² models. Rank 0 needs as long for n files as each
    rank would need on its own.

    :param path: folder of the checkpoint
    :param manifest: manifest of this checkpoint
    :param world: ranks of the run
    :raises UserError: on all ranks, if a file is damaged or cannot be read
    """
    mean: dict[str, np.ndarray] = {}
    error: UserError | None = None
    if world.rank == 0:
        with paused():
            try:
                mean = checkpoint.average(path, manifest)
            except UserError as raised:
                error = raised
    problem = world.broadcast(None if error is None else str(error))
    with world.raise_together(UserError):  # All ranks raise the error, so that it names no rank.
        if problem is not None:
            raise error or StoreError(problem)
    described = [(name, array.dtype, array.shape) for name, array in mean.items()]
    for name, dtype, shape in world.broadcast(described):
        own = mean.get(name)
        mean[name] = _from_rank_0(np.empty(shape, dtype) if own is None else own, world)
    return mean


def _from_rank_0(array: np.ndarray, world: World) -> np.ndarray:
    """Return rank 0's ``array``, of this dtype and shape, in this memory if it is contiguous."""
    array = np.ascontiguousarray(array).reshape(array.shape)  # It would make scalars 1-D.
    memory = array.reshape(-1).view(np.uint8)
    for begin in range(0, memory.size, PIECE):
        part = memory[begin : begin + PIECE]
        received = world.broadcast(part)
        if world.rank:
            part[:] = received
    return array


def _exactly(node: Node, row: int, saved: NodeState) -> list[str]:
    engine = node.engine
    group = node.group
    scatter_row(
        saved.parameters, engine.vector.x, row, engine.vector.flat, local_shards(engine.group)
    )
    engine.restore(saved.arrays, saved.numbers, row)
    put_buffers(dict(zip(group.local_slots, node.buffers(row), strict=True)), saved)
    node.mixer.bytes_sent[row] = _counted(node, saved.numbers["bytes_sent"])
    return node.restore_extra_state(row, saved, None)


def put_buffers(buffers: Mapping[int, Mapping[str, torch.Tensor]], saved: NodeState) -> None:
    """Copy saved buffers to the model's buffers.

    :param buffers: for the number of each local slot, the buffers of its model by name
    :param saved: state of a node from the checkpoint
    """
    for slot, of_slot in buffers.items():
        for name, buffer in of_slot.items():
            value = saved.arrays[f"buffers/{slot}/{name}"]
            overwrite(buffer, torch.from_numpy(np.array(value)).view(buffer.shape))


def from_mean(node: Node, mean: Mapping[str, Any], numbers: Mapping[str, Number]) -> list[str]:
    """Set each local node to the average of saved or surviving nodes; return messages for the user.

    If the state of the algorithm consists only of means of gradients (see `AVERAGED`) that ``mean``
    contains, it is set to its average; otherwise, it is reset, and so is the state of the cadence.
    In the former case, the saved state of the cadence is restored, if it has the same names and a
    step was made since it was initialized. The graph starts again at round 0. The messages name all
    that is averaged, dropped or reset.

    :param node: the local nodes
    :param mean: averaged arrays by name, and the numbers "bytes_sent" and, unless the checkpoint
        lacks it, "local_steps"
    :param numbers: saved counters and state of the cadence
    """
    engine = node.engine
    rows = range(len(node.mixer.local_nodes))
    state = engine.parts()
    x = engine.vector.x
    flat = engine.vector.flat
    local = local_shards(engine.group)
    names = [name.removeprefix("state/") for name in state]
    averaged = all(name.split("/")[-1] in AVERAGED and name in mean for name in state)
    for row in rows:
        scatter_row(mean["parameters"], x, row, flat, local)
        for of_slot in node.buffers(row):  # `mean` has node 0's integers.
            for name, buffer in of_slot.items():
                value = torch.as_tensor(np.array(mean[f"buffers/{name}"]))
                overwrite(buffer, value.view(buffer.shape))
        if averaged:
            for name, parts in state.items():
                scatter_row(mean[name], parts, row, flat, local)
    if "local_steps" in mean:
        engine.counts = [round(float(mean["local_steps"]))] * len(rows)
    messages: list[str] = []
    if averaged and names:
        messages.append(f"averaged: {', '.join(names)}")
    dropped = [n.removeprefix("state/") for n in mean if n.startswith("state/")]
    cadence = [name for name in numbers if name.startswith(CADENCE)]
    same_cadence = _same_cadence(numbers, engine)
    lost = [name for name in dropped if name not in names] + cadence * (not same_cadence)
    if averaged and lost:
        messages.append(f"dropped: {', '.join(lost)}")
    if not averaged:
        engine.restart()
        dropped += cadence
        names += [f"{CADENCE}{name}" for name in engine.cadence_state._fields]
        messages.append(f"dropped: {', '.join(dropped) or 'nothing'}, reset: {', '.join(names)}")
    # If the state was reset at this very step, the cadence has not advanced since: keep it initial.
    elif engine.state_start < engine.index and same_cadence:
        engine.restore_cadence(numbers)
    engine.round = 0
    engine.mixer.bytes_sent[:] = [_counted(node, mean["bytes_sent"])] * len(rows)
    return messages


def _counted(node: Node, sent: Any) -> int:
    """Return the number of bytes from which this process continues to count its node's traffic.

    The first process of the node continues from ``sent``, and its other processes start at 0.
    """
    return int(sent) if 0 in node.group.local_slots else 0


def _check_facts(manifest: Manifest, facts: Mapping[str, Any], path: Path) -> None:
    """Check that the manifest contains the numbers that every run saves.

    :param manifest: manifest of the checkpoint
    :param facts: `Node.facts` of the present run, whose integers have to be in the manifest
    :param path: folder of the checkpoint, for the message
    :raises StoreError: if a number is missing or not positive, because another program has written
        the checkpoint
    """
    for name in ("slots", *(name for name, value in facts.items() if isinstance(value, int))):
        value = manifest.meta.get(name)
        if not isinstance(value, int) or not 0 < value < MOST:
            raise StoreError(
                f"{path}: {name} = {str(value)[:40]}, must be an integer of at least 1; use "
                "another checkpoint"
            )


def _check_counters(saved: NodeState, path: Path) -> None:
    if lacking := COUNTERS - saved.numbers.keys():
        raise StoreError(
            f"{path} lacks {', '.join(sorted(lacking))}, which every run saves: resume from "
            "another checkpoint"
        )


def _check_model(saved: NodeState, flat: NodeLayout, path: Path) -> None:
    was = dict(zip(saved.names, saved.shapes, strict=True))
    now = dict(zip(flat.names, flat.shapes, strict=True))
    if was != now or saved.names != flat.names:
        differing = [name for name in {**was, **now} if was.get(name) != now.get(name)]
        example = f" ({differing[0]} differs)" if differing else " in another order"
        raise StoreError(
            f"{path} holds another model{example}: resume with the model that was saved "
            "(`mpigossip checkpoint show` prints its job)"
        )


def _algorithm(manifest: Manifest) -> str:
    """Return the name of the algorithm of a checkpoint; "" if its job does not name it."""
    try:
        section = tomllib.loads(manifest.job).get("algorithm", {})
    except tomllib.TOMLDecodeError:
        return ""
    return str(section.get("name", "")) if isinstance(section, dict) else ""


def _same_method(saved: NodeState, engine: Engine) -> bool:
    was = {name for name in saved.arrays if name.startswith("state/")}
    parts = engine.parts()
    flat = engine.vector.flat
    sizes = {
        name: part.shape[1] if is_per_row(part, flat) else flat.count
        for name, (part, *_) in parts.items()
    }
    return (
        was == set(parts)
        and all(saved.arrays[name].size == size for name, size in sizes.items())
        and _same_cadence(saved.numbers, engine)
    )


def _same_cadence(numbers: Mapping[str, Number], engine: Engine) -> bool:
    was = {name for name in numbers if name.startswith(CADENCE)}
    return was == {f"{CADENCE}{name}" for name in engine.cadence_state._fields}

"""The entry "gossip" of `state_dict()`: this node's model, its algorithm's state and counters."""

from typing import Any

import torch
from torch import nn

from mpigossip.algorithms.methods import BUILDERS, same_state
from mpigossip.cluster.world import World
from mpigossip.config import JobError
from mpigossip.config.readable import pluralize, print_note_once
from mpigossip.engine.module import LOW, ModuleParameters
from mpigossip.engine.sharded import ShardedParameters
from mpigossip.engine.step import Engine
from mpigossip.engine.vector import ParameterLayout, join_row, scatter_row, without_padding
from mpigossip.optim import initial_sync
from mpigossip.optim.inner import fill_missing
from mpigossip.store.manifest import MOST, counter

ORIGIN = ("node", "nodes", "local_rank")
"""Keys that identify the rank that saved a state; earlier versions did not write them."""


def state(engine: Engine, vector: ModuleParameters, world: World, algorithm: str) -> dict[str, Any]:
    """Return the entry as tensors and plain values, so that torch.save can write it.

    :param engine: engine with the algorithm's state and counters
    :param vector: flat parameters of the model
    :param world: all ranks
    :param algorithm: name of the algorithm
    """
    flat = vector.local_layout
    return origin(world) | {
        "algorithm": algorithm,
        "names": list(flat.names),
        "shapes": [list(shape) for shape in flat.shapes],
        "model": torch.from_numpy(join_row(vector.x, 0, flat)),
        "arrays": _arrays(engine, flat),
        "numbers": engine.numbers() | {"bytes_sent": engine.mixer.bytes_sent[0]},
    }


def origin(world: World) -> dict[str, int]:
    """Return this rank's node, the number of nodes, and the local rank."""
    nodes = world.nodes
    return {
        "node": nodes.node_of_rank[world.rank],
        "nodes": nodes.count,
        "local_rank": nodes.local_rank,
    }


def _arrays(engine: Engine, flat: ParameterLayout) -> dict[str, torch.Tensor]:
    return {
        name: torch.from_numpy(join_row(parts, 0, flat)) for name, parts in engine.parts().items()
    }


def load(
    inner_state: dict[str, Any],
    entry: dict[str, Any] | None,
    inner: torch.optim.Optimizer,
    model: nn.Module,
    flat: ParameterLayout,
) -> list[str]:
    """Load a state dict into the inner optimizer, and the model's parameters into the model.

    :param inner_state: state dict of the inner optimizer; missing settings are added to it
    :param entry: the entry "gossip", a :func:`state`; None: there is none
    :param inner: the inner optimizer
    :param model: the model
    :param flat: layout of the parameters in this process
    :returns: messages to report about settings
    :raises JobError: if the entry does not belong to this model
    :raises StoreError: if the state belongs to another optimizer
    :raises ValueError: as in torch, if the parameter groups have other sizes
    """
    if entry is not None:
        _check(entry, flat)
    saved = inner_state.pop("optimizer", None) if entry is None else entry.get("optimizer")
    groups = inner_state["param_groups"]
    inner_state["param_groups"], messages = fill_missing(inner, groups, str(saved or ""))
    low = [(p, p.data) for p in model.parameters() if p.dtype in LOW]
    try:
        # torch converts state to the type of its parameter, but the state of 16-bit parameters
        # belongs to their master weights, which are float32.
        for p, data in low:
            p.data = data.float()
        inner.load_state_dict(inner_state)
    finally:
        for p, data in low:
            p.data = data
    if entry is not None:
        initial_sync.load_packed(model, flat, entry["model"])
    return messages


def _check(state: Any, flat: ParameterLayout) -> None:
    """Raise JobError unless this is a :func:`state` of this model; files may contain anything."""
    try:
        names = state["names"]
        shapes = state["shapes"]
        model = state["model"]
        arrays = state["arrays"]
        numbers = state["numbers"]
        if list(names) != list(flat.names) or list(map(tuple, shapes)) != list(flat.shapes):
            raise JobError(
                "load_state_dict: the state belongs to a model with other parameters: "
                f"{', '.join(map(str, names[:3]))} …; load the state of this model"
            )
        _array("model", model, flat.count)
        for name, array in arrays.items():
            _array(name, array, array.numel(), array.dtype)
        if not isinstance(state.get("algorithm", ""), str):
            raise TypeError("algorithm is no text")
        for name in ("index", "born", "round", "bytes_sent"):
            counter(numbers[name], name, MOST)
        for name in ORIGIN:
            counter(state.get(name, 0), name, MOST)
    except JobError:
        raise
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise JobError(
            f"load_state_dict: this is not a state of Gossip: {reason}; pass the result of "
            "optimizer.state_dict()"
        ) from error


def _array(name: str, array: Any, size: int, kind: torch.dtype = torch.float32) -> None:
    if not torch.is_tensor(array) or array.dtype != kind or array.shape != (size,):
        is_tensor = torch.is_tensor(array)
        text = f"{array.dtype} {tuple(array.shape)}" if is_tensor else type(array).__name__
        raise ValueError(
            f"{name} is {text}: it must be a one-dimensional tensor of {size} elements of {kind}"
        )


def check_step(world: World, entry: dict[str, Any] | None) -> None:
    """Raise JobError on all nodes unless all have loaded states of the same step, or none.

    The "latest" checkpoints of frameworks differ if a job was killed between two ranks' saving.
    Collective.

    :param world: all ranks
    :param entry: :func:`state` that this rank has loaded; None: it has loaded none
    """
    steps = world.broadcast(world.gather(entry and int(entry["numbers"]["index"])))
    if len(set(steps)) > 1:
        starts = ["the start" if step is None else f"step {step}" for step in steps]
        other = next(rank for rank, step in enumerate(starts) if step != starts[0])
        raise JobError(
            f"load_state_dict: rank 0 continues from {starts[0]}, but rank {other} from "
            f"{starts[other]}: load the states of the same step on all nodes, the last step that "
            "each of them has"
        )


def check_method(
    world: World, state: dict[str, Any], engine: Engine, flat: ParameterLayout, algorithm: str
) -> None:
    """Raise JobError on all nodes if a state has another algorithm or cadence; collective.

    Algorithms such as "diloco" and "slowmo" have states with the same names and shapes, but with
    another meaning. The name in the state distinguishes them; earlier versions did not write it.

    :param world: all nodes
    :param state: a :func:`state`
    :param engine: engine of the algorithm and cadence that the state should have
    :param flat: layout of the parameters in this process
    :param algorithm: name of the engine's algorithm
    """
    with world.raise_together(JobError):
        saved = state.get("algorithm", algorithm)
        are_known = saved in BUILDERS and algorithm in BUILDERS
        if are_known and not same_state(saved, algorithm):
            raise JobError(
                f'load_state_dict: the state belongs to the algorithm "{saved}", and this Gossip '
                f'has algorithm = "{algorithm}": pass algorithm = "{saved}", or remove the entry '
                '"gossip" from the state, which resets the algorithm, and load the model itself'
            )
        packed = {name: without_padding(a, flat) for name, a in state["arrays"].items()}
        arrays = {name: (a.shape, a.dtype) for name, a in packed.items()}
        expected_arrays = _arrays(engine, flat)
        expected = {name: (a.shape, a.dtype) for name, a in expected_arrays.items()}
        if arrays != expected or engine.numbers().keys() != state["numbers"].keys() - {
            "bytes_sent"
        }:
            raise JobError(
                "load_state_dict: the state belongs to another algorithm or cadence: pass Gossip "
                "the algorithm and cadence that it was saved with"
            )


def check_origin(world: World, state: dict[str, Any], engine: Engine, algorithm: str) -> None:
    """Report once that ranks resume from the states of other ranks; collective.

    :param world: all ranks
    :param state: :func:`state` that this rank has loaded
    :param engine: engine of this rank
    :param algorithm: name of the algorithm
    :raises JobError: on all ranks, if the algorithm needs each node's own state, or if a rank has
        loaded another rank's shard
    """
    own = origin(world)
    saved = {key: int(state.get(key, value)) for key, value in own.items()}
    sharded = isinstance(engine.vector, ShardedParameters)
    origins = world.broadcast(world.gather((own, saved, sharded)))
    descriptions = [_describe(*of_rank) for of_rank in origins]
    others = [rank for rank, (local, loaded) in enumerate(descriptions) if local != loaded]
    if not others:
        return
    first, *more = others
    local, loaded = descriptions[first]
    also = f", and {pluralize(len(more), 'other rank')} likewise" if more else ""
    message = f"load_state_dict: rank {first} is {local}, and loaded the state of {loaded}{also}"
    remedy = 'save and load one file per rank, such as f"state-{world.rank}.pt"'
    wrong_shard = any(
        own["local_rank"] != saved["local_rank"] for own, saved, sharded in origins if sharded
    )
    if wrong_shard:
        raise JobError(f"{message}: each rank has its own shard; {remedy}")
    if engine.method.distinct_state:
        raise JobError(
            f'{message}: algorithm.name = "{algorithm}" needs the state of each node, because the '
            f"states of the nodes belong together; {remedy}, or remove the entry "
            '"gossip" from the state, which resets the algorithm'
        )
    if world.rank == 0:
        print_note_once(
            f"{message}: the model and the state of the algorithm that were loaded replace the "
            f"model and state of this node; {remedy}"
        )


def _describe(own: dict[str, int], saved: dict[str, int], sharded: bool) -> tuple[str, str]:
    """Describe the node of a rank, and the node whose state it has loaded, with their shards.

    :param own: :func:`origin` of the rank
    :param saved: :func:`origin` of the rank that saved the state
    :param sharded: whether each rank of a node has a shard of the model
    """
    local, loaded = (f"node {ids['node']} of {ids['nodes']}" for ids in (own, saved))
    if sharded:
        local, loaded = (
            f"local rank {ids['local_rank']} of {text}"
            for ids, text in ((own, local), (saved, loaded))
        )
    return local, loaded


def restore(state: dict[str, Any], engine: Engine, vector: ModuleParameters) -> None:
    """Restore the flat parameters, the states of algorithm and cadence, and the counters.

    :param state: a :func:`state` of the same model, algorithm and cadence
    :param engine: engine to restore
    :param vector: flat parameters to restore
    """
    flat = vector.local_layout
    numbers = state["numbers"]
    scatter_row(state["model"].cpu().numpy(), vector.x, 0, flat)
    for name, parts in engine.parts().items():
        scatter_row(state["arrays"][name].cpu().numpy(), parts, 0, flat)
    engine.restore_counters(numbers)
    engine.restore_cadence(numbers)
    engine.mixer.bytes_sent[0] = int(numbers["bytes_sent"])

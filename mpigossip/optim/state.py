"""State that only a custom loop's node saves: its torch optimizer, random numbers, kept objects.

    torch/PARAMETER/KEY, torch/#groups/…   the optimizer, equal on all ranks of a node
    rng/torch, rng/cuda, own/NAME…         the node's rank 0; rng/#P/… and own/#P/… for rank P

Nested state of numbers, strings, lists, dicts and tensors is saved as JSON and arrays, without
pickle.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from mpigossip.cluster.world import World
from mpigossip.config import JobError
from mpigossip.config.readable import pluralize
from mpigossip.engine.sharded import gather_full, part_like
from mpigossip.mixing.base import Mixer
from mpigossip.optim.inner import optimizer_name
from mpigossip.runs.state import plain
from mpigossip.store import StoreError
from mpigossip.store.checkpoint import NodeState, Number

Arrays = Mapping[str, np.ndarray]

# -- the torch optimizer ---------------------------------------------------------------------------


def write_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, arrays: dict[str, np.ndarray] | None
) -> str:
    """Return the optimizer's state as JSON, and put its tensors into ``arrays``.

    Collective over ranks between which parameters are sharded; all of them get the full state.

    :param optimizer: the torch optimizer
    :param model: its model, for the names of parameters
    :param arrays: dict that the tensors are added to; None: they are dropped
    """
    state = optimizer.state_dict()
    names = _names(optimizer, model)
    groups = [
        {key: names[k] if key == "params" else value for key, value in group.items()}
        for k, group in enumerate(state["param_groups"])
    ]
    flat = [name for group in names for name in group]
    of: dict[str, Any] = {}
    for k, one in state["state"].items():
        whole = {key: gather_full(value) for key, value in one.items()}
        of[flat[k]] = packed(whole, f"torch/{flat[k]}", {} if arrays is None else arrays)
    kept = packed(groups, "torch/#groups", {} if arrays is None else arrays)
    return json.dumps({"optimizer": optimizer_name(optimizer), "groups": kept, "state": of})


def read_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, text: str, arrays: Arrays
) -> tuple[dict[str, Any], list[str]]:
    """Return a ``state_dict`` for the optimizer, and parameters whose state ``arrays`` lacks.

    :param optimizer: the torch optimizer
    :param model: its model, for the names of parameters
    :param text: result of :func:`write_optimizer`
    :param arrays: tensors of that state
    :raises StoreError: if the parameter groups have other parameters
    """
    saved = json.loads(text)
    names = _names(optimizer, model)
    groups = unpacked(saved["groups"], arrays)
    was = [group["params"] for group in groups]
    if was != names:
        raise StoreError(
            f"the optimizer's groups have {_counts(names)} parameters, those that were saved "
            f"{_counts(was)}, or in another order: make it as it was"
        )
    index = {name: k for k, name in enumerate(name for group in names for name in group)}
    found = {}
    lacking = []
    own = dict(model.named_parameters())
    for name, one in saved["state"].items():
        try:
            whole = unpacked(one, arrays)
            found[index[name]] = {key: part_like(own[name], value) for key, value in whole.items()}
        except KeyError:
            lacking.append(name)
    now = optimizer.state_dict()["param_groups"]
    for group, present in zip(groups, now, strict=True):
        group["params"] = present["params"]
    of = {"optimizer": saved.get("optimizer")}
    return {"state": found, "param_groups": groups, **of}, lacking


def _names(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
    """Return the model's names of each group's parameters."""
    name = {id(p): n for n, p in model.named_parameters()}
    return [[name[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def _counts(names: list[list[str]]) -> str:
    return " + ".join(str(len(group)) for group in names)


# -- its copy in memory, for rank failures ---------------------------------------------------------

Inner = list[dict[str, Any]]
"""State of a torch optimizer, one dict for each parameter."""


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def copied(optimizer: torch.optim.Optimizer, spare: Inner) -> Inner:
    """Copy the optimizer's state to host memory, reusing memory of ``spare`` of the same shape."""
    found: Inner = []
    for at, p in enumerate(_parameters(optimizer)):
        before = spare[at] if at < len(spare) else {}
        now = optimizer.state.get(p, {})
        found.append({key: _copied(value, before.get(key)) for key, value in now.items()})
    return found


def _copied(value: Any, spare: Any) -> Any:
    if not torch.is_tensor(value):
        return copy.deepcopy(value)
    if torch.is_tensor(spare) and spare.shape == value.shape and spare.dtype == value.dtype:
        return spare.copy_(value)
    return value.detach().to("cpu", copy=True)


def put_back(optimizer: torch.optim.Optimizer, kept: Inner) -> None:
    """Restore the optimizer's state from a copy, and remove keys that were added since."""
    for p, values in zip(_parameters(optimizer), kept, strict=True):
        now = optimizer.state[p]
        for key in now.keys() - values.keys():
            del now[key]
        for key, value in values.items():
            if torch.is_tensor(value):
                now[key].copy_(value)
            else:
                now[key] = copy.deepcopy(value)
        if not now:
            del optimizer.state[p]


def average_state(world: World, mixer: Mixer, optimizer: torch.optim.Optimizer) -> list[str]:
    """Average the optimizer's state over nodes; collective.

    As for the momentum and moments of a job, this applies to tensors that have the shape of their
    parameter and that exist on all nodes.

    :returns: keys of the averaged tensors
    """
    mine = {
        (at, key): value
        for at, p in enumerate(_parameters(optimizer))
        for key, value in optimizer.state.get(p, {}).items()
        if torch.is_tensor(value) and value.is_floating_point() and value.shape == p.shape
    }
    gathered = world.gather(set(mine))
    names = world.broadcast(gathered and sorted(set.intersection(*gathered)))
    for name in names:
        value = mine[name]
        value.copy_(mixer.mean(value.reshape(1, -1).double()).view(value.shape))
    return sorted({key for _, key in names})


# -- random numbers, and what the program keeps ---------------------------------------------------


class RankState(NamedTuple):
    """State of a single rank of a node."""

    arrays: dict[str, np.ndarray]
    """Random numbers, and tensors of kept objects."""
    kept: dict[str, Any]
    """Kept objects as JSON."""

    def marks(self) -> dict[str, str]:
        """Return a digest of each kept object."""
        found = {}
        for name, one in self.kept.items():
            sha = hashlib.sha256(json.dumps(one).encode())
            for path in sorted(self.arrays):
                if path == f"own/{name}" or path.startswith(f"own/{name}/"):
                    sha.update(self.arrays[path].tobytes())
            found[name] = sha.hexdigest()
        return found

    def beside(self, first: Mapping[str, str]) -> RankState:
        """Return this state without kept objects that the node's rank 0 has, too.

        :param first: digests of the kept objects of rank 0
        """
        mine = self.marks()
        kept = {name: one for name, one in self.kept.items() if first.get(name) != mine[name]}
        same = {f"own/{name}" for name in self.kept.keys() - kept.keys()}
        arrays = {k: a for k, a in self.arrays.items() if "/".join(k.split("/")[:2]) not in same}
        return RankState(arrays, kept)


def of_rank(model: nn.Module, keeps: Mapping[str, Any]) -> RankState:
    """Return the state of this rank; JobError for kept objects that a checkpoint can't contain."""
    arrays = {"rng/torch": torch.get_rng_state().numpy()}
    if (gpu := next(model.parameters()).device).type == "cuda":
        arrays["rng/cuda"] = torch.cuda.get_rng_state(gpu).numpy()[None]
    kept = {
        name: packed(
            one.state_dict() if hasattr(one, "state_dict") else one.get_state(),
            f"own/{name}",
            arrays,
        )
        for name, one in keeps.items()
    }
    return RankState(arrays, kept)


def of_node(own: RankState, world: World) -> tuple[dict[str, np.ndarray], dict[str, Number]]:
    """Return the states of all ranks of the node on its rank 0; collective over the node."""
    every: list[RankState] | None = [own]
    if (inside := world.nodes.intra_node) is not None:
        first = inside.broadcast(own.marks())
        every = inside.gather(own.beside(first) if inside.rank else own)
    arrays: dict[str, np.ndarray] = {}
    numbers: dict[str, Number] = {}
    for rank, one in enumerate(every or ()):
        own_key = f"own/#{rank}" if rank else "own"
        numbers[own_key] = json.dumps(one.kept)
        for path, array in one.arrays.items():
            kind, _, rest = path.partition("/")
            arrays[f"{kind}/#{rank}/{rest}" if rank else path] = array
    return arrays, numbers


def load_random(saved: NodeState, rank: int, model: nn.Module) -> None:
    """Restore torch's generators of this local rank, if they were saved."""
    at = f"rng/#{rank}" if rank else "rng"
    if f"{at}/torch" in saved.arrays:
        torch.set_rng_state(torch.from_numpy(np.array(saved.arrays[f"{at}/torch"])))
    gpu = next(model.parameters()).device
    if f"{at}/cuda" in saved.arrays and gpu.type == "cuda":
        state, *_ = np.atleast_2d(saved.arrays[f"{at}/cuda"])
        torch.cuda.set_rng_state(torch.from_numpy(np.array(state)), gpu)


def load_kept(saved: NodeState, rank: int, keeps: Mapping[str, Any], draws: bool) -> list[str]:
    """Restore kept objects; return messages to report.

    A rank other than 0 of the node gets its own object if one was saved, otherwise rank 0's.

    :param saved: state of the node
    :param rank: local rank
    :param keeps: objects to restore, by name
    :param draws: True to restore generators, too, which belong to one rank
    """
    own = json.loads(str(saved.numbers["own"]))
    mine = dict[str, Any]()
    anew = []
    if rank:
        mine = json.loads(str(saved.numbers.get(f"own/#{rank}", "{}")))
    for name, thing in keeps.items():
        loads = hasattr(thing, "load_state_dict")
        if name not in own | mine or not (draws or loads):
            anew.append(name)
            continue
        arrays = saved.arrays
        at = f"own/#{rank}/"
        if name in mine:
            arrays = {f"own/{k[len(at) :]}": a for k, a in arrays.items() if k.startswith(at)}
        state = unpacked((own | mine)[name], arrays)
        (thing.load_state_dict if loads else thing.set_state)(state)
    return [f"begun anew: {', '.join(anew)}"] if anew else []


def dropped_ranks(saved: NodeState, now: int) -> list[str]:
    """Return a message on what is lost if the number of ranks per node has changed."""
    were = int(saved.numbers.get("ranks", 1))
    if were == now:
        return []
    return [
        f"from nodes of {pluralize(were, 'rank')}, now {now}: random numbers of all but "
        "a node's first rank are dropped, or begin anew"
    ]


# -- values as JSON and arrays ---------------------------------------------------------------------

TYPES = {
    str(getattr(torch, name)): getattr(torch, name)
    for name in (
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint8",
        "bool",
    )
}


def packed(value: Any, at: str, arrays: dict[str, np.ndarray]) -> Any:
    """Convert a value to JSON, and put its tensors into ``arrays``.

    :param value: nested dicts, lists and tuples of numbers, strings and tensors
    :param at: path of the value; its tensors get this path or paths below it
    :param arrays: dict that the tensors are added to
    :raises JobError: for any other type; the message names the path
    """
    if isinstance(value, torch.Tensor) and str(value.dtype) in TYPES:
        arrays[at] = plain(value).copy()
        return {"#tensor": at, "type": str(value.dtype)}
    if isinstance(value, Mapping):
        links = _links(value)
        items = [(key, packed(value[key], f"{at}/{links[key]}", arrays)) for key in value]
        if all(isinstance(key, str) and not key.startswith("#") for key in value):
            return dict(items)
        return {"#items": [[packed(key, at, arrays), one] for key, one in items]}
    if isinstance(value, list | tuple):
        items = [packed(one, f"{at}/{k}", arrays) for k, one in enumerate(value)]
        return items if isinstance(value, list) else {"#tuple": items}
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise JobError(
        f"save: {at} is a {type(value).__name__}; a checkpoint takes tensors, numbers, texts, "
        "lists and tables of these"
    )


def unpacked(saved: Any, arrays: Arrays) -> Any:
    """Return the value that :func:`packed` has converted; KeyError if a tensor is missing."""
    if isinstance(saved, list):
        return [unpacked(one, arrays) for one in saved]
    if not isinstance(saved, dict):
        return saved
    if "#tensor" in saved:
        return torch.from_numpy(np.array(arrays[saved["#tensor"]])).to(TYPES[saved["type"]])
    if "#items" in saved:
        return {unpacked(key, arrays): unpacked(one, arrays) for key, one in saved["#items"]}
    if "#tuple" in saved:
        return tuple(unpacked(one, arrays) for one in saved["#tuple"])
    return {key: unpacked(one, arrays) for key, one in saved.items()}


def _links(keys: Iterable[Any]) -> dict[Any, str]:
    """Return a different link name for each key.

    Keys such as ``1`` and ``"1"``, or ``"a/b"`` and ``"a|b"``, have the same :func:`_link`; the
    later one gets an apostrophe.
    """
    links: dict[Any, str] = {}
    taken = set[str]()
    for key in keys:
        name = _link(key)
        while name in taken:
            name += "'"
        taken.add(name)
        links[key] = name
    return links


def _link(key: Any) -> str:
    """Return a key as the name of an HDF5 link, which can't contain a slash or be only dots."""
    text = str(key).replace("/", "|")
    return text if text.strip(".") else f"_{text}"

"""State that only custom loops save: torch optimizer, random numbers, and objects of `keep()`.

    torch/PARAMETER/KEY, torch/#groups/…   the optimizer, equal on all ranks of a node
    rng/torch, rng/cuda, own/NAME…         the node's rank 0; rng/#P/… and own/#P/… for rank P
    frozen/PARAMETER                       parameters that are not trained, if the program edits one

Nested state of numbers, strings, lists, dicts and tensors is saved as JSON and arrays, without
pickle.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from mpigossip.cluster.world import World
from mpigossip.config import JobError
from mpigossip.config.readable import pluralize
from mpigossip.engine.sharded import gather_full, is_sharded, part_like
from mpigossip.mixing.base import Mixer
from mpigossip.optim.inner import optimizer_name
from mpigossip.runs.snapshot_and_restore import plain
from mpigossip.store import StoreError
from mpigossip.store.checkpoint import NodeState, Number

Arrays = Mapping[str, np.ndarray]

# -- the torch optimizer ---------------------------------------------------------------------------


def write_optimizer(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    arrays: dict[str, np.ndarray] | None,
    shards: dict[str, dict[str, Any]] | None = None,
) -> str:
    """Return the optimizer's state as JSON, and put its tensors into ``arrays``.

    The call is collective over the ranks between which parameters are sharded. All of them get the
    full state, except for tensors that are added to ``shards``.

    :param optimizer: the torch optimizer
    :param model: its model, for the names of parameters
    :param arrays: dict that the tensors are added to; None: they are dropped
    :param shards: dict that receives the tensors that are sharded in the same way as their trained
        parameters, without gathering them: ``shards[key][name]`` is the tensor ``key`` in the state
        of the parameter ``name``. None: these tensors are gathered, too
    :raises JobError: if a checkpoint can't contain a value of the state
    """
    state = optimizer.state_dict()
    names = _names(optimizer, model)
    groups = [
        {key: names[k] if key == "params" else value for key, value in group.items()}
        for k, group in enumerate(state["param_groups"])
    ]
    flat = [name for group in names for name in group]
    states: dict[str, Any] = {}
    # A file of shards has the elements of trained parameters only: states of parameters that were
    # frozen later are gathered.
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    parameters = trained if shards is not None else {}
    for k, values in state["state"].items():
        name = flat[k]
        sharded = {key for key, v in values.items() if is_sharded_like(v, parameters.get(name))}
        # An empty tensor stands for a shard, so that the text is the same as for a full tensor.
        full = {
            key: torch.empty(0, dtype=value.dtype) if key in sharded else gather_full(value)
            for key, value in values.items()
        }
        target = {} if arrays is None else arrays
        states[name] = packed(full, f"torch/{name}", target)
        for key in sharded if shards is not None else ():
            path = states[name][key]["#tensor"]
            del target[path]
            shards.setdefault(path.removeprefix(f"torch/{name}/"), {})[name] = values[key]
    saved = packed(groups, "torch/#groups", {} if arrays is None else arrays)
    return json.dumps({"optimizer": optimizer_name(optimizer), "groups": saved, "state": states})


def is_sharded_like(value: Any, parameter: Any) -> bool:
    """Return whether a tensor of an optimizer's state is sharded like its parameter."""
    return (
        is_sharded(parameter)
        and is_sharded(value)
        and value.shape == parameter.shape
        and tuple(value.placements) == tuple(parameter.placements)
    )


def read_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, text: str, arrays: Arrays
) -> tuple[dict[str, Any], list[str]]:
    """Return a ``state_dict`` for the optimizer, and parameters whose state ``arrays`` lacks.

    :param optimizer: the torch optimizer
    :param model: its model, for the names of parameters
    :param text: result of :func:`write_optimizer`
    :param arrays: tensors of that state; a DTensor is used as it is
    :raises StoreError: if the parameter groups have other parameters
    """
    saved = json.loads(text)
    names = _names(optimizer, model)
    groups = unpacked(saved["groups"], arrays)
    saved_names = [group["params"] for group in groups]
    if saved_names != names:
        raise StoreError(
            f"the optimizer's groups have {_counts(names)} parameters, but the saved groups have "
            f"{_counts(saved_names)}, or another order: create the optimizer as it was when it was "
            "saved"
        )
    index = {name: k for k, name in enumerate(name for group in names for name in group)}
    states = {}
    lacking = []
    parameters = dict(model.named_parameters())
    for name, values in saved["state"].items():
        try:
            full = unpacked(values, arrays)
            parameter = parameters[name]
            states[index[name]] = {key: part_like(parameter, v) for key, v in full.items()}
        except KeyError:
            lacking.append(name)
    now = optimizer.state_dict()["param_groups"]
    for group, present in zip(groups, now, strict=True):
        group["params"] = present["params"]
    kind = {"optimizer": saved.get("optimizer")}
    return {"state": states, "param_groups": groups, **kind}, lacking


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
    """Copy the optimizer's state to host memory.

    :param optimizer: the torch optimizer
    :param spare: result of an earlier call, whose arrays of equal shape and dtype are overwritten
    """
    copies: Inner = []
    for index, p in enumerate(_parameters(optimizer)):
        before = spare[index] if index < len(spare) else {}
        now = optimizer.state.get(p, {})
        copies.append({key: _copied(value, before.get(key)) for key, value in now.items()})
    return copies


def _copied(value: Any, spare: Any) -> Any:
    if not torch.is_tensor(value):
        return copy.deepcopy(value)
    if torch.is_tensor(spare) and spare.shape == value.shape and spare.dtype == value.dtype:
        return spare.copy_(value)
    return value.detach().to("cpu", copy=True)


def put_back(optimizer: torch.optim.Optimizer, copies: Inner) -> None:
    """Restore the optimizer's state from a copy, and remove keys that were added since."""
    for p, values in zip(_parameters(optimizer), copies, strict=True):
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
    """Average the optimizer's state over nodes, in place; collective.

    Only floating-point tensors that have the shape of their parameter, and that exist on all nodes,
    are averaged, as is the rule for the momentum and the moments of a job.

    :param world: all ranks
    :param mixer: mixer between the nodes
    :param optimizer: the torch optimizer
    :returns: keys of the averaged tensors
    """
    tensors = {
        (index, key): value
        for index, p in enumerate(_parameters(optimizer))
        for key, value in optimizer.state.get(p, {}).items()
        if torch.is_tensor(value) and value.is_floating_point() and value.shape == p.shape
    }
    gathered = world.gather(set(tensors))
    names = world.broadcast(gathered and sorted(set.intersection(*gathered)))
    for name in names:
        value = tensors[name]
        value.copy_(mixer.mean(value.reshape(1, -1).double()).view(value.shape))
    return sorted({key for _, key in names})


# -- frozen parameters -----------------------------------------------------------------------------

FROZEN = "frozen/"
"""Prefix of the arrays of frozen parameters."""


class FrozenParameters:
    """Frozen parameters that the program has changed, such as the parameters of a momentum encoder.

    Other frozen parameters are not saved, because the program initializes them. Programs often
    change a parameter through `.data`, which torch's version counters do not count. The values are
    therefore compared with checksums of the values at the first step. Sharded parameters are left
    out.
    """

    def __init__(self, model: nn.Module):
        """Compute checksums of all frozen parameters of ``model``."""
        self._model = model
        self._checksums = {name: _checksums(p) for name, p in self._frozen().items()}
        self._changed = set[str]()

    def write(self, trained: Collection[str], arrays: dict[str, np.ndarray]) -> None:
        """Put the frozen parameters that have changed since the first step into ``arrays``.

        :param trained: names of parameters that the checkpoint contains anyway
        :param arrays: dict that the parameters are added to
        :raises JobError: if a checkpoint can't contain the type of such a parameter
        """
        for name, p in self._frozen().items():
            if name in trained or name not in self._checksums:
                continue
            if name not in self._changed and _checksums(p).equal(self._checksums[name]):
                continue
            self._changed.add(name)
            packed(p.detach(), f"{FROZEN}{name}", arrays)

    def read(self, arrays: Arrays) -> list[str]:
        """Restore the frozen parameters that ``arrays`` contains; return their names.

        :param arrays: arrays of a node, or their averages over nodes
        :raises StoreError: if the model has no such frozen parameter of this shape
        """
        names = frozen_names(arrays)
        frozen = self._frozen()
        for name in names:
            values = torch.from_numpy(np.array(arrays[f"{FROZEN}{name}"]))
            p = frozen.get(name)
            if p is None or p.numel() != values.numel():
                now = "has no such frozen parameter" if p is None else f"has shape {tuple(p.shape)}"
                raise StoreError(
                    f"the checkpoint contains the frozen parameter {name}, which the program had "
                    f"changed, of shape {tuple(values.shape)}, but the model {now}: resume with "
                    "the model that was saved"
                )
            with torch.no_grad():
                p.copy_(values.view(p.shape))
        self._changed |= set(names)
        return names

    def _frozen(self) -> dict[str, torch.Tensor]:
        return {
            name: p
            for name, p in self._model.named_parameters()
            if type(p) is nn.Parameter
            and not p.requires_grad
            and p.layout == torch.strided
            and not p.is_meta
        }


def frozen_names(paths: Iterable[str]) -> list[str]:
    """Return the names of the frozen parameters among the paths of arrays, sorted."""
    return sorted(path.removeprefix(FROZEN) for path in paths if path.startswith(FROZEN))


def _checksums(tensor: torch.Tensor) -> torch.Tensor:
    """Return sums of every 64th 64-bit word of a tensor, with the words as integers, (64,)."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    count = dense.numel()
    # A copy begins at an address at which its bytes may be read as 64-bit words.
    padded = dense.new_zeros(count + -count % 512)
    padded[:count] = dense
    return padded.view(torch.int64).view(-1, 64).sum(0).cpu()


# -- random numbers and kept objects ---------------------------------------------------------------


class SavedRank(NamedTuple):
    """State of a single rank of a node."""

    arrays: dict[str, np.ndarray]
    """States of random number generators, and tensors of kept objects."""
    kept: dict[str, Any]
    """Kept objects, which the program has passed to `keep()`, as JSON by name."""

    def digests(self) -> dict[str, str]:
        """Return a digest of each kept object, by the name of the object."""
        digests = {}
        for name, saved in self.kept.items():
            sha = hashlib.sha256(json.dumps(saved).encode())
            for path in sorted(self.arrays):
                if path == f"own/{name}" or path.startswith(f"own/{name}/"):
                    sha.update(self.arrays[path].tobytes())
            digests[name] = sha.hexdigest()
        return digests

    def without_equal(self, first: Mapping[str, str]) -> SavedRank:
        """Return this state without kept objects that the node's rank 0 has, too.

        :param first: digests of the kept objects of rank 0
        """
        digests = self.digests()
        kept = {name: obj for name, obj in self.kept.items() if first.get(name) != digests[name]}
        same = {f"own/{name}" for name in self.kept.keys() - kept.keys()}
        arrays = {k: a for k, a in self.arrays.items() if "/".join(k.split("/")[:2]) not in same}
        return SavedRank(arrays, kept)


def of_rank(model: nn.Module, keeps: Mapping[str, Any]) -> SavedRank:
    """Return the state of this rank.

    :param model: the model, whose device has a random number generator
    :param keeps: kept objects by name
    :raises JobError: if a checkpoint can't contain the state of a kept object
    """
    arrays = {"rng/torch": torch.get_rng_state().numpy()}
    if (gpu := next(model.parameters()).device).type == "cuda":
        arrays["rng/cuda"] = torch.cuda.get_rng_state(gpu).numpy()[None]
    kept = {
        name: packed(
            thing.state_dict() if hasattr(thing, "state_dict") else thing.get_state(),
            f"own/{name}",
            arrays,
        )
        for name, thing in keeps.items()
    }
    return SavedRank(arrays, kept)


def of_node(state: SavedRank, world: World) -> tuple[dict[str, np.ndarray], dict[str, Number]]:
    """Return the states of all ranks of the node on its rank 0; collective over the node.

    On the other ranks, the result is empty. A kept object that is equal on rank 0 and another rank
    is included once.

    :param state: state of this rank
    :param world: all ranks
    :return: arrays by path, and kept objects of each rank as JSON by key
    """
    states: list[SavedRank] | None = [state]
    if (intra_node := world.nodes.intra_node) is not None:
        first = intra_node.broadcast(state.digests())
        states = intra_node.gather(state.without_equal(first) if intra_node.rank else state)
    arrays: dict[str, np.ndarray] = {}
    numbers: dict[str, Number] = {}
    for rank, rank_state in enumerate(states or ()):
        own_key = f"own/#{rank}" if rank else "own"
        numbers[own_key] = json.dumps(rank_state.kept)
        for path, array in rank_state.arrays.items():
            kind, _, name = path.partition("/")
            arrays[f"{kind}/#{rank}/{name}" if rank else path] = array
    return arrays, numbers


def load_random(saved: NodeState, rank: int, model: nn.Module) -> None:
    """Restore torch's generators of this local rank, if they were saved.

    :param saved: state of the node
    :param rank: local rank
    :param model: the model, whose device has a random number generator
    """
    path = f"rng/#{rank}" if rank else "rng"
    if f"{path}/torch" in saved.arrays:
        torch.set_rng_state(torch.from_numpy(np.array(saved.arrays[f"{path}/torch"])))
    gpu = next(model.parameters()).device
    if f"{path}/cuda" in saved.arrays and gpu.type == "cuda":
        state, *_ = np.atleast_2d(saved.arrays[f"{path}/cuda"])
        torch.cuda.set_rng_state(torch.from_numpy(np.array(state)), gpu)


def load_kept(saved: NodeState, rank: int, keeps: Mapping[str, Any], draws: bool) -> list[str]:
    """Restore kept objects; return messages to report.

    A rank other than 0 of the node gets its own object if one was saved, otherwise rank 0's.

    :param saved: state of the node
    :param rank: local rank
    :param keeps: objects to restore, by name
    :param draws: True to restore generators, too, which belong to one rank
    """
    of_rank_0 = json.loads(str(saved.numbers["own"]))
    of_this_rank = dict[str, Any]()
    reset = []
    if rank:
        of_this_rank = json.loads(str(saved.numbers.get(f"own/#{rank}", "{}")))
    for name, thing in keeps.items():
        loads = hasattr(thing, "load_state_dict")
        if name not in of_rank_0 | of_this_rank or not (draws or loads):
            reset.append(name)
            continue
        arrays = saved.arrays
        path = f"own/#{rank}/"
        if name in of_this_rank:
            arrays = {f"own/{k[len(path) :]}": a for k, a in arrays.items() if k.startswith(path)}
        state = unpacked((of_rank_0 | of_this_rank)[name], arrays)
        (thing.load_state_dict if loads else thing.set_state)(state)
    return [f"not restored: {', '.join(reset)}"] if reset else []


def dropped_ranks(saved: NodeState, now: int) -> list[str]:
    """Return a message about state that is lost if the number of ranks per node has changed.

    The list is empty if it has not.

    :param saved: state of the node
    :param now: present number of ranks per node
    """
    before = int(saved.numbers.get("ranks", 1))
    if before == now:
        return []
    return [
        f"nodes had {pluralize(before, 'rank')}, and now have {now}: random numbers are restored "
        "on the first rank of each node only"
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


def packed(value: Any, path: str, arrays: dict[str, np.ndarray]) -> Any:
    """Convert a value to JSON, and put its tensors into ``arrays``.

    :param value: nested dicts, lists and tuples of numbers, strings and tensors
    :param path: path of the value; its tensors get this path or paths below it
    :param arrays: dict that the tensors are added to
    :raises JobError: for any other type; the message names the path
    """
    if isinstance(value, torch.Tensor) and str(value.dtype) in TYPES:
        arrays[path] = plain(value).copy()
        return {"#tensor": path, "type": str(value.dtype)}
    if isinstance(value, Mapping):
        links = _links(value)
        items = [(key, packed(value[key], f"{path}/{links[key]}", arrays)) for key in value]
        is_counter = isinstance(value, Counter)  # such as the milestones of MultiStepLR
        if not is_counter and all(isinstance(k, str) and not k.startswith("#") for k in value):
            return dict(items)
        pairs = [[packed(key, path, arrays), item] for key, item in items]
        return {"#counter" if is_counter else "#items": pairs}
    if isinstance(value, list | tuple):
        items = [packed(item, f"{path}/{k}", arrays) for k, item in enumerate(value)]
        return items if isinstance(value, list) else {"#tuple": items}
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        raise JobError(
            f"save: {path} is a tensor of {value.dtype}, which a checkpoint can't contain; convert "
            f"it to one of {', '.join(TYPES)}"
        )
    raise JobError(
        f"save: {path} is a {type(value).__name__}: a checkpoint can contain tensors, numbers, "
        "strings, None, and lists, tuples and dicts of these; convert this value, or remove it "
        "from the state"
    )


def unpacked(saved: Any, arrays: Arrays) -> Any:
    """Return the value that :func:`packed` has converted; raise KeyError if a tensor is missing."""
    if isinstance(saved, list):
        return [unpacked(item, arrays) for item in saved]
    if not isinstance(saved, dict):
        return saved
    if "#tensor" in saved:
        value: Any = arrays[saved["#tensor"]]
        if isinstance(value, torch.Tensor):
            return value
        return torch.from_numpy(np.array(value)).to(TYPES[saved["type"]])
    if "#items" in saved:
        return {unpacked(key, arrays): unpacked(item, arrays) for key, item in saved["#items"]}
    if "#counter" in saved:
        return Counter(
            {unpacked(k, arrays): unpacked(count, arrays) for k, count in saved["#counter"]}
        )
    if "#tuple" in saved:
        return tuple(unpacked(item, arrays) for item in saved["#tuple"])
    return {key: unpacked(item, arrays) for key, item in saved.items()}


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

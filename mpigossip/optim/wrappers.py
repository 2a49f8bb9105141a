"""Wrappers of models and optimizers: supported ones are unwrapped, others are rejected."""

import gc
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from mpigossip.cluster.world import World
from mpigossip.config import JobError
from mpigossip.engine.sharded import fully_sharded, is_sharded, reshard
from mpigossip.optim.arguments import parameter_list

FRAMEWORKS = ("accelerate", "lightning", "pytorch_lightning")
SHARING = ("ZeroRedundancyOptimizer", "PostLocalSGDOptimizer")
"""Optimizers of torch.distributed that keep a part of the parameters, or average them."""


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside torch.compile, DDP and DataParallel.

    Parameters then have the same names with and without wrappers, and checkpoints are compatible.
    """
    return [*_layers(model)][-1]


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the wrappers from the outermost to the innermost, then the module inside."""
    inner: Any = model
    while isinstance(inner, nn.Module):
        yield inner
        wrapped = isinstance(inner, DataParallel | DistributedDataParallel)
        inner = inner.module if wrapped else getattr(inner, "_orig_mod", None)


def check(model: nn.Module, optimizer: torch.optim.Optimizer, world: World | None = None) -> None:
    """Check that model and optimizer do not join ranks in another way.

    :param model: the model of the program
    :param optimizer: its optimizer
    :param world: all ranks; if its nodes have several ranks, the model must be in DDP over the
        ranks of its node, or sharded between them by `fully_shard`; None: no nodes of several ranks
    :raises JobError: if the optimizer was wrapped by a framework, or joins ranks itself; if DDP or
        `fully_shard` joins the model over ranks of other nodes, or over only some or none of the
        ranks of its node; if the model is in FSDP1; or if only some of its trained parameters are
        sharded
    """
    kind = type(optimizer)
    home = kind.__module__.partition(".")[0]
    if home in FRAMEWORKS:
        raise JobError(
            f"the optimizer has been wrapped by {home} already ({kind.__name__}), which would "
            "skip steps that neighbours wait for: pass the torch optimizer to Gossip, and the "
            "Gossip optimizer to the framework"
        )
    if kind.__name__ in SHARING:
        raise JobError(
            f"the optimizer is a {kind.__name__}, which joins ranks by torch.distributed: pass "
            "Gossip the optimizer inside it"
        )
    shards = _sharded(model, world)
    wrappers = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    several = world.nodes.per_node if world and not shards else 1
    if several > 1 and not any(isinstance(m, DistributedDataParallel) for m in _layers(model)):
        raise JobError(
            f"ranks_per_node: a node has {several} ranks, whose gradients are not averaged: wrap "
            "the model as DistributedDataParallel(model, process_group=world.node_group()), or "
            "shard it by fully_shard(model, mesh=world.node_mesh()), before you pass it to Gossip"
        )
    _check_groups(wrappers, world)


def _node(world: World | None) -> list[int]:
    """Return the numbers of this node's ranks in torch.distributed; [] if it has one rank."""
    return [] if world is None or world.nodes.per_node == 1 else [*range(world.nodes.per_node)]


def check_late(model: nn.Module, world: World | None = None) -> None:
    """Check for DDP or FSDP that was applied after Gossip was created.

    If torch.distributed is initialized, this inspects all objects of the interpreter, so it is
    called only when the flat parameters are created.

    :param model: the model of the program, whose gathered parameters are freed
    :param world: as in :func:`check`
    :raises JobError: if DDP or `fully_shard` joins the model over ranks of other nodes, or over
        only some ranks of its node; if the model is in FSDP1; or if only some of its trained
        parameters are sharded
    """
    _sharded(model, world)
    if distributed.is_available() and distributed.is_initialized():
        in_model = {id(p) for p in model.parameters()}
        wrappers = (o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel))
        _check_groups((m for m in wrappers if in_model & {id(p) for p in m.parameters()}), world)


def _check_groups(wrappers: Iterable[DistributedDataParallel], world: World | None) -> None:
    """Raise JobError if DDP averages over other ranks than the ranks of this node."""
    for wrapper in wrappers:
        group = wrapper.process_group
        node = _node(world)
        message = "DistributedDataParallel around the model averages the gradients of "
        message += f"{group.size()} processes"
        if node and distributed.get_process_group_ranks(group) != node:
            remedy = "pass it process_group=world.node_group()"
            raise JobError(f"{message}, but this node has {len(node)} ranks: {remedy}")
        if not node and group.size() > 1:
            raise JobError(
                f"{message} in each step, but each of them is a node: remove it, because Gossip "
                "replaces it, or make them one node by mpigossip.world(ranks_per_node=…)"
            )


def _sharded(model: nn.Module, world: World | None) -> bool:
    """Return whether each rank of the node has a shard of the model; reject other shards.

    FSDP's classes are recognized by name, because importing them would load modules that few need.

    :param model: the model of the program, whose gathered parameters are freed
    :param world: as in :func:`check`
    :raises JobError: if the model is in FSDP1, if only some of its trained parameters are sharded,
        or if they are sharded over other ranks than the ranks of this node
    """
    if any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules()):
        raise JobError(
            "the model is in FullyShardedDataParallel, which replaces parameters by its own flat "
            "ones: remove it, or shard the model inside the node by "
            "fully_shard(model, mesh=world.node_mesh())"
        )
    modules = fully_sharded(model)
    reshard(modules)
    shards = [(n, p) for n, p in model.named_parameters() if is_sharded(p)]
    for name, parameter in shards:
        _check_mesh(name, parameter, world)
    others = [n for n, p in model.named_parameters() if p.requires_grad and not is_sharded(p)]
    if shards and others:
        raise JobError(
            f"{parameter_list(others)} aren't sharded, although other parameters are. The "
            "gradients of unsharded parameters would not be averaged inside the node: call "
            "fully_shard(model, mesh=world.node_mesh()) on the whole model, too, after its layers"
        )
    return bool(shards)


def _check_mesh(name: str, parameter: Any, world: World | None) -> None:
    """Raise JobError unless `fully_shard` has sharded the parameter over this node's ranks."""
    node = _node(world) or [0]
    mesh = parameter.device_mesh
    (first, *more) = parameter.placements
    mesh_ranks = mesh.mesh.flatten().tolist()
    if mesh_ranks != node:
        noun = "rank" if len(node) == 1 else "ranks"
        raise JobError(
            f"parameter {name} is sharded over the ranks {', '.join(map(str, mesh_ranks))}, but "
            f"this node has the {noun} {', '.join(map(str, node))}: call fully_shard(model, "
            "mesh=world.node_mesh()), which shards it inside the node, and choose the ranks of a "
            "node by mpigossip.world(ranks_per_node=…)"
        )
    if more or not first.is_shard() or type(first).__name__ != "Shard":
        raise JobError(
            f"parameter {name} is a DTensor with placements {parameter.placements}: only "
            "fully_shard is supported inside a node, but neither parallelize_module nor replicas "
            "(HSDP), which gossip replaces: call fully_shard(model, mesh=world.node_mesh()) only"
        )

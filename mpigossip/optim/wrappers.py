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
    :raises JobError: if the optimizer was wrapped by a framework or averages by itself, or if the
        model is joined over other ranks than those of its node
    """
    kind = type(optimizer)
    home = kind.__module__.partition(".")[0]
    if home in FRAMEWORKS:
        raise JobError(
            f"the optimizer has been wrapped by {home} already ({kind.__name__}), which would "
            "leave out steps that neighbours wait for: give Gossip the torch optimizer, and what "
            "comes back to the framework"
        )
    if kind.__name__ in SHARING:
        raise JobError(
            f"the optimizer is a {kind.__name__}, which joins ranks by torch.distributed: give "
            "Gossip the optimizer inside it"
        )
    shards = _sharded(model, world)
    wrappers = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    several = world.nodes.per_node if world and not shards else 1
    if several > 1 and not any(isinstance(m, DistributedDataParallel) for m in _layers(model)):
        raise JobError(
            f"ranks_per_node: a node has {several} ranks, whose gradients nobody averages: wrap "
            "the model as DistributedDataParallel(model, process_group=world.node_group()), or "
            "cut it by fully_shard(model, mesh=world.node_mesh()), before it is given to Gossip"
        )
    _check_groups(wrappers, world)


def _node(world: World | None) -> list[int]:
    """Return this node's ranks, which are all of torch.distributed; [] for a single rank."""
    return [] if world is None or world.nodes.per_node == 1 else [*range(world.nodes.per_node)]


def check_late(model: nn.Module, world: World | None = None) -> None:
    """Check for DDP that was applied after Gossip was created.

    This inspects all objects of the interpreter, so it is called once only.
    """
    _sharded(model, world)
    if distributed.is_available() and distributed.is_initialized():
        own = {id(p) for p in model.parameters()}
        every = (o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel))
        _check_groups((m for m in every if own & {id(p) for p in m.parameters()}), world)


def _check_groups(wrappers: Iterable[DistributedDataParallel], world: World | None) -> None:
    for wrapper in wrappers:
        group = wrapper.process_group
        node = _node(world)
        told = "DistributedDataParallel around the model sums the gradients of "
        told += f"{group.size()} processes"
        if node and distributed.get_process_group_ranks(group) != node:
            remedy = "give it process_group=world.node_group()"
            raise JobError(f"{told}, and this node has {len(node)} ranks: {remedy}")
        if not node and group.size() > 1:
            raise JobError(
                f"{told} at every step, and each of them is a node: leave it away, Gossip takes "
                "its place, or make them one by mpigossip.world(ranks_per_node=…)"
            )


def _sharded(model: nn.Module, world: World | None) -> bool:
    """Return whether each rank of the node has a shard of the model; reject other shards.

    FSDP's classes are recognized by name, because importing them would load modules that few need.
    """
    if any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules()):
        raise JobError(
            "the model is in FullyShardedDataParallel, whose flat parameters are its own: cut it "
            "by fully_shard(model, mesh=world.node_mesh()) inside the node, or leave it away"
        )
    modules = fully_sharded(model)
    reshard(modules)
    cut = [(n, p) for n, p in model.named_parameters() if is_sharded(p)]
    for name, parameter in cut:
        _of_node(name, parameter, world)
    whole = [n for n, p in model.named_parameters() if p.requires_grad and not is_sharded(p)]
    if cut and whole:
        raise JobError(
            f"{parameter_list(whole)} aren't sharded, where others are: nobody averages their "
            "gradients inside the node; call fully_shard(model, mesh=world.node_mesh()) on the "
            "whole model, too, after its layers"
        )
    return bool(cut)


def _of_node(name: str, parameter: Any, world: World | None) -> None:
    """Raise JobError unless `fully_shard` has sharded the parameter over this node's ranks."""
    node = _node(world) or [0]
    mesh = parameter.device_mesh
    (first, *more) = parameter.placements
    on = mesh.mesh.flatten().tolist()
    if on != node:
        they = "rank" if len(node) == 1 else "ranks"
        raise JobError(
            f"parameter {name} is cut between the ranks {', '.join(map(str, on))}, and this node "
            f"is the {they} {', '.join(map(str, node))}: fully_shard(model, "
            "mesh=world.node_mesh()) cuts it inside the node, whose ranks "
            "mpigossip.world(ranks_per_node=…) joins"
        )
    if more or not first.is_shard() or type(first).__name__ != "Shard":
        raise JobError(
            f"parameter {name} is a DTensor placed {parameter.placements}: inside the node "
            "fully_shard alone can cut it, not parallelize_module or replicas (HSDP), whose place "
            "gossip takes"
        )

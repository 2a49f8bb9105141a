"""What stands around a model or an optimizer: looked through, or refused in words."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator

import torch
from torch import distributed, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from mpigossip.cluster.world import World
from mpigossip.config import JobError

FRAMEWORKS = ("accelerate", "lightning", "pytorch_lightning")
SHARING = ("ZeroRedundancyOptimizer", "PostLocalSGDOptimizer")
"""Optimizers of torch.distributed that keep a part of the parameters, or average them."""


def bare(model: nn.Module) -> nn.Module:
    """The module inside those that torch.compile, DDP and DataParallel put around it.

    So parameters have the same names with and without them, and so have checkpoints.
    """
    while (inner := bare_once(model)) is not model:
        model = inner
    return model


def bare_once(model: nn.Module) -> nn.Module:
    """The module inside the outermost of them; itself where there is none."""
    compiled = getattr(model, "_orig_mod", None)
    if isinstance(model, DataParallel | DistributedDataParallel):
        return model.module
    return compiled if isinstance(compiled, nn.Module) else model


def check(model: nn.Module, optimizer: torch.optim.Optimizer, world: World | None = None) -> None:
    """JobError for what joins ranks by itself, and for optimizers that a framework has wrapped.

    ``world``: where its nodes have several ranks, the model must be in DDP over those of its node.
    """
    kind = type(optimizer)
    home = kind.__module__.partition(".")[0]
    if home in FRAMEWORKS:
        raise JobError(
            [f"the optimizer has been wrapped by {home} already ({kind.__name__}), which would "
             "leave out steps that neighbours wait for: give Gossip the torch optimizer, and what "
             "comes back to the framework"]
        )  # fmt: skip
    if kind.__name__ in SHARING:
        raise JobError(
            [f"the optimizer is a {kind.__name__}, which joins ranks by torch.distributed: give "
             "Gossip the optimizer inside it"]
        )  # fmt: skip
    _whole(model)
    wrappers = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    several = world.nodes.per_node if world else 1
    if several > 1 and not any(isinstance(m, DistributedDataParallel) for m in _layers(model)):
        raise JobError(
            [f"ranks_per_node: a node has {several} ranks, whose gradients nobody averages: wrap "
             "the model as DistributedDataParallel(model, process_group=world.node_group()) before "
             "it is given to Gossip"]
        )  # fmt: skip
    _apart(wrappers, world)


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """What stands around the bare module, one in the other."""
    while (inner := bare_once(model)) is not model:
        yield model
        model = inner


def _node(world: World | None) -> list[int]:
    """The world's ranks that are this one's node."""
    if world is None or world.nodes.per_node == 1:
        return []
    of = world.nodes.of
    return [rank for rank, node in enumerate(of) if node == of[world.rank]]


def check_late(model: nn.Module, world: World | None = None) -> None:
    """The same for what was put around the model after Gossip; looks at all objects, so once."""
    _whole(model)
    if distributed.is_available() and distributed.is_initialized():
        own = {id(p) for p in model.parameters()}
        every = (o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel))
        _apart((m for m in every if own & {id(p) for p in m.parameters()}), world)


def _apart(wrappers: Iterable[DistributedDataParallel], world: World | None) -> None:
    for wrapper in wrappers:
        several, group = wrapper.process_group.size(), wrapper.process_group
        node = _node(world)
        if node and distributed.get_process_group_ranks(group) != node:
            raise JobError(
                [f"DistributedDataParallel around the model sums the gradients of {several} "
                 f"processes, and this node is the ranks {', '.join(map(str, node))}: give it "
                 "process_group=world.node_group()"]
            )  # fmt: skip
        if not node and several > 1:
            raise JobError(
                [f"DistributedDataParallel around the model sums the gradients of {several} "
                 "processes at every step, and each of them is a node: leave it away, Gossip "
                 "takes its place, or make them one by mpigossip.world(ranks_per_node=…)"]
            )  # fmt: skip


def _whole(model: nn.Module) -> None:
    """FSDP's are known by name: importing its classes would load what few use."""
    names = (n for n, p in model.named_parameters() if type(p).__name__ == "DTensor")
    sharded = next(names, None)
    if sharded is not None:
        raise JobError(
            [f"parameter {sharded} is a DTensor (fully_shard, parallelize_module), of which this "
             "rank has a part: a rank is a node here and needs the whole model; leave it away"]
        )  # fmt: skip
    if any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules()):
        raise JobError(
            ["the model is in FullyShardedDataParallel, which cuts it between ranks: a rank is a "
             "node here and needs the whole model; leave it away"]
        )  # fmt: skip

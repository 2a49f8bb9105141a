"""Exact averages over nodes, and evaluations of the averaged model and of each node's own model."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from mpigossip.data.loader import Loader
from mpigossip.data.pytree import Nested
from mpigossip.engine.measurements import consensus_distance
from mpigossip.engine.overlapping_tensors import overwrite
from mpigossip.groups.base import Group, local_shards, shard_views
from mpigossip.mixing.base import Mixer
from mpigossip.training.replicas import Replicas
from mpigossip.training.task import Objective

PIECE = 1 << 18
"""Number of parameters that are averaged at a time. With n simulated nodes, averaging takes 8 n
bytes for each of these parameters.
"""


class Evaluation(NamedTuple):
    """Result of an evaluation: the loss and the metrics of the task, by name.

    A value is NaN if its count is 0.
    """

    averaged: dict[str, float]
    """Values of the averaged model on the whole test set."""
    mean_local: dict[str, float]
    """Values of the nodes' own models over the whole test set, of which each node evaluates a part.
    """
    local: dict[str, torch.Tensor]
    """Values of each local node's own model on its test samples, one tensor (rows,) per name."""
    share: dict[str, torch.Tensor]
    """Values of the averaged model on the test samples of each local node, like `local`."""
    consensus_distance: float
    """Consensus distance (1/n) Σ_i ‖x_i − x̄‖² / ‖x̄‖²."""

    @property
    def loss(self) -> float:
        """Loss of the averaged model."""
        return self.averaged["loss"]

    @property
    def accuracy(self) -> float:
        """Accuracy of the averaged model; KeyError if the task has no metric of this name."""
        return self.averaged["accuracy"]


def evaluate(
    replicas: Replicas,
    mixer: Mixer,
    loader: Loader,
    batches: Sequence[Sequence[Nested]] = (),
) -> Evaluation:
    """Evaluate the exact average of the nodes' models, and each node's own model.

    Node i evaluates both its own model and the averaged model on the test samples i, i + n, i + 2n,
    …, so that all nodes together use the whole test set; a node with a test stream of its own uses
    that stream. Slot 0 of a node computes. The time limit of the other ranks of the node starts
    again after each test batch. The memory of the gradients is overwritten. The call is collective
    over nodes and their slots.

    :param replicas: the local model copies
    :param mixer: communication between nodes
    :param loader: source of the test batches
    :param batches: training batches of some steps, for each local node and slot; if given, the
        BatchNorm statistics of the averaged model are computed from them
    """
    objective = replicas.objective
    group = replicas.group
    averaged = averaged_model(replicas, mixer)
    if batches and norms(averaged):
        recalibrate(averaged, replicas, mixer, batches)
    names = ("loss", *objective.metrics)
    # The dimensions are rows, averaged or own model, loss and metrics, and sum or count.
    rows = torch.zeros(len(mixer.local_nodes), 2, len(names), 2, dtype=torch.float64)
    for row, node in enumerate(mixer.local_nodes if 0 in group.local_slots else ()):
        for which, module in enumerate((averaged, replicas.modules[row][0])):
            rows[row, which] = measure(objective, module, loader, node, mixer.n, group.works)
    flat = rows.flatten(1)
    nothing = torch.zeros_like(rows.flatten(1))
    rows = group.sum_scalars([nothing if slot else flat for slot in group.local_slots]).view(
        rows.shape
    )
    total = mixer.mean_scalars(rows.flatten(1)).view(rows.shape[1:])
    means = total[..., 0] / total[..., 1]
    local_means = rows[..., 0] / rows[..., 1]
    return Evaluation(
        averaged=dict(zip(names, means[0].tolist(), strict=True)),
        mean_local=dict(zip(names, means[1].tolist(), strict=True)),
        local=dict(zip(names, local_means[:, 1].unbind(1), strict=True)),
        share=dict(zip(names, local_means[:, 0].unbind(1), strict=True)),
        consensus_distance=consensus_distance(replicas.x, mixer, group),
    )


def averaged_model(replicas: Replicas, mixer: Mixer) -> nn.Module:
    """Return a module with the exact average of the nodes' models.

    Its parameters overwrite the memory of a gradient. The average is computed in float64, in the
    order of slots and nodes, as in ``store.node_state``, so that this model is bitwise identical to
    an exported model, and to the model from which a run resumes. Each slot averages its shard.
    The call is collective over nodes and their slots.

    :param replicas: the local model copies
    :param mixer: communication between nodes
    """
    module = copy.deepcopy(replicas.modules[0][0])
    group = replicas.group
    rows = [grads[:1] for grads in replicas.grads]
    means = shard_views(rows, group.segments, local_shards(group))
    for mean, x in zip(means, replicas.x, strict=True):
        average_into(mixer, x, mean[0])
    group.all_gather(means, rows)
    replicas.flat.attach(module, rows[0][0], None)
    of_slots = zip(*(replicas.buffers(row) for row in range(replicas.rows)), strict=True)
    average_buffers(
        mixer, group, [[buffers.values() for buffers in slot] for slot in of_slots], module
    )
    return module


def average_into(mixer: Mixer, x: torch.Tensor, out: torch.Tensor) -> None:
    """Write the exact average of ``x``, (rows, p), over all nodes to ``out``, (p,); collective."""
    for start in range(0, x.shape[1], PIECE):
        out[start : start + PIECE].copy_(mixer.mean(x[:, start : start + PIECE].double()))


def average_buffers(
    mixer: Mixer,
    group: Group,
    buffers: Sequence[Sequence[Iterable[torch.Tensor]]],
    module: nn.Module,
) -> None:
    """Set the floating-point buffers of ``module`` to their exact average over slots and nodes.

    Other buffers, such as counters, keep their values.
    The call is collective over nodes and their slots.

    :param mixer: communication between nodes
    :param group: slots of this node
    :param buffers: buffers of each local slot (outer index) and local node (inner index), in the
        order of ``module.buffers()``
    :param module: module whose buffers are overwritten
    """
    targets = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
    if targets:
        sums = [torch.stack([_packed(row) for row in rows]) for rows in buffers]
        _unpack(mixer.mean(group.sum_scalars(sums) * (1 / group.slots)), targets)


def _packed(buffers: Iterable[torch.Tensor]) -> torch.Tensor:
    """Concatenate the floating-point buffers as float64 on the CPU."""
    floats = [buffer for buffer in buffers if buffer.is_floating_point()]
    return torch.cat([buffer.double().cpu().reshape(-1) for buffer in floats])


def _unpack(values: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    """Copy consecutive parts of ``values``, a flat array, to the tensors ``targets``."""
    with torch.no_grad():
        parts = values.split([target.numel() for target in targets])
        for target, part in zip(targets, parts, strict=True):
            overwrite(target, part.view(target.shape))


def norms(module: nn.Module) -> list[_BatchNorm]:
    """Return the BatchNorm layers that track running statistics."""
    layers = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
    return [layer for layer in layers if layer.track_running_stats]


@contextmanager
def recalibrating(module: nn.Module) -> Iterator[None]:
    """Return a context manager in which forward passes compute new BatchNorm statistics.

    These are means over the batches of all forward passes in the context. Only the BatchNorm layers
    are in training mode, so that there is no dropout.
    """
    modes = {layer: layer.training for layer in module.modules()}
    momenta = {layer: layer.momentum for layer in norms(module)}
    try:
        module.eval()
        for layer in momenta:
            layer.reset_running_stats()
            # With momentum = None, torch computes the mean over all batches.
            layer.momentum = None
            layer.train()
        yield
    finally:
        for layer, momentum in momenta.items():
            layer.momentum = momentum
        for part, training in modes.items():
            part.training = training


def recalibrate(
    module: nn.Module, replicas: Replicas, mixer: Mixer, batches: Sequence[Sequence[Nested]]
) -> None:
    """Compute the BatchNorm statistics of an averaged model from its own activations; collective.

    The mean of the nodes' statistics would be wrong, because these belong to models with other
    weights. Slot 0 of each node therefore runs the averaged model on its ``batches``, with only the
    BatchNorm layers in training mode. The result is the exact mean over the batches and nodes.

    :param module: averaged model, which is in evaluation mode afterwards
    :param replicas: the local model copies, whose task runs the model
    :param mixer: communication between nodes
    :param batches: for each step, one batch per local node and local slot, slots varying fastest
    """
    group = replicas.group
    slots = len(replicas.group.local_slots)
    statistics: list[Any] = [
        p for layer in norms(module) for p in (layer.running_mean, layer.running_var)
    ]
    sums = torch.zeros(replicas.rows, sum(p.numel() for p in statistics), dtype=torch.float64)
    for row in range(replicas.rows if 0 in group.local_slots else 0):
        with recalibrating(module), torch.no_grad():
            for step in batches:
                replicas.objective(module, step[row * slots])
        sums[row] = torch.cat(statistics)
    sums = group.sum_scalars(
        [torch.zeros_like(sums) if slot else sums for slot in group.local_slots]
    )
    _unpack(mixer.mean(sums), statistics)
    module.eval()


def measure(
    objective: Objective,
    module: nn.Module,
    loader: Loader,
    node: int,
    n: int,
    works: Callable[[], None] = lambda: None,
) -> torch.Tensor:
    """Return the sum and count of the loss and of each metric on a node's test samples.

    :param objective: the task
    :param module: model to evaluate
    :param loader: source of the test batches
    :param node: number of the node
    :param n: number of nodes
    :param works: function that is called after each batch
    :return: float64 tensor of shape (1 + metrics, 2) on the CPU
    """
    training = module.training
    sums = torch.zeros(1 + len(objective.metrics), 2, dtype=torch.float64)
    try:
        module.eval()
        with torch.no_grad():
            for batch in loader.share(node, n):
                sums += objective.tested(module, batch)
                works()
    finally:
        module.train(training)
    return sums

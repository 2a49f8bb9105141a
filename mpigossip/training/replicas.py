"""Replicas (copies) of a model for each local node and slot, with parameters in flat arrays."""

import copy
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap

from mpigossip.data.pytree import Nested, parts, stacked
from mpigossip.engine.buckets import (
    BackwardAverage,
    ForwardGather,
    make_parameter_buckets,
)
from mpigossip.engine.vector import ParameterLayout
from mpigossip.groups.base import Group, local_shards, shard_views
from mpigossip.training.capture import CannotCapture, Captured, Pass
from mpigossip.training.gradients import FlatGradients
from mpigossip.training.precision import Precision
from mpigossip.training.task import Objective

if TYPE_CHECKING:
    from mpigossip.groups.nccl_inside_node import TorchGroup


class Replicas:
    """Copies of a model, one for each local node and slot: ``modules[row][slot]``.

    A row is a local node. ``full`` and ``grads`` are lists with one tensor (rows, P) per slot,
    which hold the parameters and the gradients of the replicas. ``x`` and ``g`` are views of these
    tensors that contain the shard of each slot. Each replica has its own buffers, such as norm
    statistics.
    """

    def __init__(
        self,
        module: nn.Module,
        flat: ParameterLayout,
        rows: int,
        group: Group,
        *,
        vectorized: bool,
        graphs: str,
        objective: Objective,
        bucket_mb: float = 0.0,
        gather_later: bool = False,
    ):
        """Copy ``module``, with its parameters, for each local node and slot.

        :param module: the model
        :param flat: layout of its parameters
        :param rows: number of local nodes
        :param group: slots of a node
        :param vectorized: whether to compute the gradients of all rows by one `torch.func.vmap`
            instead of a loop. Results of both are close, but not always bitwise identical, because
            sums are computed in another order. vmap can't update norm statistics
        :param graphs: whether replicas on GPUs are captured as CUDA graphs: "always", "never", or
            "auto", which captures them if that is possible
        :param objective: task of the training
        :param bucket_mb: size, in MB, of the parameter buckets that are averaged over slots during
            the backward pass, if `assemble.allows_buckets` and ``group.starts_means``; 0: all
            gradients are averaged after the backward pass
        :param gather_later: whether the forward pass of the module may begin before all parameter
            buckets are gathered; see `assemble.allows_gather`
        """
        self.flat = flat
        self.group = group
        self.rows = rows
        self.vectorized = vectorized
        self.graphs = graphs
        self.objective = objective
        self._captured: Captured | None = None
        self._full = group.zeros(rows, flat.size)
        self.grads = group.zeros(rows, flat.size)
        self.x = shard_views(self._full, group.segments, local_shards(group))
        self.g = shard_views(self.grads, group.segments, local_shards(group))
        self._modules: list[list[nn.Module]] = []
        self._gradients: list[list[FlatGradients]] = []
        start = dict(module.named_parameters())
        for row in range(rows):
            self._modules.append([])
            self._gradients.append([])
            for slot, device in enumerate(group.devices):
                with torch.no_grad():
                    for name, view in zip(
                        flat.names, flat.views(self._full[slot][row]), strict=True
                    ):
                        view.copy_(start[name])
                replica = copy.deepcopy(module).to(device)
                flat.attach(replica, self._full[slot][row], self.grads[slot][row])
                self._modules[row].append(replica)
                gradients = FlatGradients(replica, flat, self.grads[slot][row])
                self._gradients[row].append(gradients)
        self._average: BackwardAverage | None = None
        """Average of gradients during the backward pass; None: after the backward pass."""
        self._gathering: ForwardGather | None = None
        """Gathering of parameters during the forward pass; None: before the forward pass."""
        if bucket_mb:
            node = cast("TorchGroup", group)
            replica = self._modules[0][0]
            buckets = make_parameter_buckets(replica, flat, 1e6 * bucket_mb)
            self._average = BackwardAverage(replica, flat, self.grads, node, buckets)
            if gather_later:
                self._gathering = ForwardGather(replica, flat, self._full, node, buckets)

    @property
    def full(self) -> list[torch.Tensor]:
        """Parameters of the replicas, a tensor (rows, P) for each slot."""
        self.wait_gathered()
        return self._full

    @property
    def modules(self) -> list[list[nn.Module]]:
        """Replicas, ``modules[row][slot]``; don't read their parameters after a later step."""
        self.wait_gathered()
        return self._modules

    def wait_gathered(self) -> None:
        """Wait until the model is gathered, before parameters are read or shards are written."""
        if self._gathering is not None:
            self._gathering.wait()

    def publish(self) -> None:
        """Copy the updated shards to all slots, now or while the next forward pass begins."""
        if self._gathering is not None:
            self._gathering.start()
        else:
            self.group.all_gather(self.x, self._full)

    @property
    def first(self) -> tuple[int, ...]:
        """Index of the first element of each local shard in the flat parameters."""
        width = self.flat.size // self.group.segments
        return tuple(width * segment for segment in local_shards(self.group))

    def gather(self) -> None:
        """Average the gradients over the slots of each node; ``g`` then holds the local shards."""
        self.wait_gathered()
        if self._average is not None:
            self.g = self._average.finish()
        else:
            self.g = self.group.reduce_scatter_mean(self.grads)

    def gradients(
        self,
        batches: Sequence[Nested],
        accumulate: int,
        precision: Precision,
        seeds: Sequence[int] = (),
        idle_rows: Sequence[int] = (),
    ) -> torch.Tensor:
        """Compute gradients of all replicas on their own batches, and write them to ``grads``.

        :param batches: for each row, one batch per slot
        :param accumulate: number of equal parts of a batch whose gradients are averaged
        :param precision: arithmetic of forward and backward
        :param seeds: random seed of each replica, for example for dropout; (): generators are not
            seeded. Replicas use them only if they are not to be captured; with vmap, a slot uses
            the seed of its first row
        :param idle_rows: rows that are idle; their results have no meaning
        :return: mean loss, and sum and count of each metric, over the slots of each row, float64
            (rows, 1 + 2 metrics)
        :raises CannotCapture: if ``graphs`` is "always" and a replica, or one of these batches,
            can't be used with CUDA graphs
        :raises TaskError: if the task fails
        """
        slots = len(self.group.local_slots)
        average = self._average

        # This function must not wait for a GPU, so that all GPUs compute at the same time.
        def compute(row: int, slot: int, batch: Nested) -> torch.Tensor:
            gradients = self._gradients[row][slot]
            device = self.grads[slot].device
            module = self._modules[row][slot]
            sums = torch.zeros(self.objective.width, dtype=torch.float64, device=device)
            if row in idle_rows:
                return sums
            # Seeding can't be captured in a CUDA graph.
            if seeds and self.graphs == "never":
                draw_from(device, seeds[row * slots + slot])
            gradients.begin()
            module.train()
            for index, part in enumerate(parts(batch, accumulate)):
                with precision.autocast():
                    loss, metrics = self.objective(module, part)
                if average is not None and index == accumulate - 1:
                    average.expect()
                precision.scaled(loss / accumulate, row, slot).backward()
                if not index:
                    gradients.complete()
                sums += self.objective.figures(loss, metrics, accumulate)
            if average is not None:
                average.complete()
            return sums

        def work(slot: int) -> torch.Tensor:
            if self.vectorized:
                if seeds:
                    draw_from(self.grads[slot].device, seeds[slot])
                cuts = [parts(batch, accumulate) for batch in batches[slot::slots]]
                return self._vectorized(slot, cuts, precision)
            results = [compute(row, slot, batches[row * slots + slot]) for row in range(self.rows)]
            return torch.stack(results).cpu()

        # Captured graphs compute all rows, so they can't be used if rows are idle.
        per_slot = None if idle_rows else self._replayed(compute, batches)
        try:
            per_slot = self.group.run(work) if per_slot is None else per_slot
            figures = self.group.sum_scalars(per_slot)
        except BaseException:
            if average is not None:
                average.fail()
            raise
        figures[:, 0] /= self.group.slots
        return figures

    def _replayed(self, compute: Pass, batches: Sequence[Nested]) -> list[torch.Tensor] | None:
        """Replay the CUDA graphs, which the first call captures; return loss and metrics per slot.

        The result is None if replicas can't be captured, or must not be; one thread per slot then
        has to compute the gradients. A batch with a shape other than the captured one has the same
        effect. A warning states the reason, and no later call tries again.

        :param compute: function that computes the gradients of one replica
        :param batches: for each row, one batch per slot
        :return: one tensor (rows, 1 + 2 metrics) per slot, float64
        :raises CannotCapture: instead of the warning, if `node.cuda_graphs` is "always"
        """
        if self.graphs == "never":
            return None
        try:
            self._captured = self._captured or Captured(compute, self.modules, batches)
            return list(self._captured.replay(batches).unbind(1))
        except CannotCapture as error:
            if self.graphs == "always":
                raise
            self.graphs = "never"
            self._captured = None
            warnings.warn(f"{error}; training continues with one thread per slot", stacklevel=2)
            return None

    def _vectorized(
        self, slot: int, cuts: Sequence[Sequence[Nested]], precision: Precision
    ) -> torch.Tensor:
        """Compute the gradients of a slot in all rows by one vmap.

        :param slot: index of the local slot
        :param cuts: for each row, the parts of its batch whose gradients are averaged
        :param precision: arithmetic of forward and backward
        :return: loss, and sum and count of each metric, of each row, float64 (rows, 1 + 2 metrics)
        """
        module = self.modules[0][slot]
        full = self.full[slot]
        grads = self.grads[slot].zero_()
        accumulate = len(cuts[0])
        sums = torch.zeros(len(full), self.objective.width, dtype=torch.float64)
        parameters = dict(zip(self.flat.names, self.flat.stacked(full), strict=True))
        targets = dict(zip(self.flat.names, self.flat.stacked(grads), strict=True))
        module.train()

        def loss_of(parameters, batch):
            def model(*args, **kwargs):
                return functional_call(module, parameters, args, kwargs)

            with precision.autocast():
                loss, metrics = self.objective(model, batch)
            return loss, self.objective.figures(loss, metrics, accumulate)

        work = vmap(grad_and_value(loss_of, has_aux=True), randomness="different")
        for batch in map(stacked, zip(*cuts, strict=True)):
            gradients, (_, figures) = work(parameters, batch)
            for name, target in targets.items():
                target.add_(gradients[name], alpha=1 / accumulate)
            sums += figures.cpu()
        return sums

    def buffers(self, row: int) -> list[dict[str, torch.Tensor]]:
        """Return, for each slot, the buffers of a row by name."""
        return [dict(module.named_buffers()) for module in self.modules[row]]


def draw_from(device: torch.device, seed: int) -> None:
    """Seed the default random number generator of a device."""
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)

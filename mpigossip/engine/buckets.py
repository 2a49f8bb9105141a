"""Parameter buckets: averages of gradients over the slots of a node, and gathered parameters.

A parameter bucket is a range of the flat parameters, as in DistributedDataParallel; the buckets of
lossy wires (`WIRE_BUCKET`) have 512 elements. A parameter bucket is averaged while the backward
pass continues, and gathered while the next forward pass begins. Groups that can do so have
``starts_means``; see :mod:`mpigossip.groups.nccl_inside_node`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mpigossip.engine.vector import ParameterLayout
from mpigossip.groups.base import GroupError
from mpigossip.mixing.wire import WIRE_BUCKET

if TYPE_CHECKING:  # loaded by jobs on GPUs only
    from mpigossip.groups.nccl_inside_node import TorchGroup

ELEMENT = 4
"""Bytes of an element, float32."""


@dataclass(frozen=True)
class ParameterBucket:
    """Range of the flat parameters that is averaged or gathered in one operation.

    Either its gradients are averaged over the slots of the node, or its elements are gathered from
    them.
    """

    columns: slice
    """Range of elements; its length is a multiple of the number of slots."""
    names: tuple[str, ...]
    """Names of the parameters that have elements in it."""


def make_parameter_buckets(
    module: nn.Module, layout: ParameterLayout, nbytes: float
) -> list[ParameterBucket]:
    """Divide the flat parameters into parameter buckets, in the order of the module's parameters.

    Parameters without weight decay, which follow all others in the layout, form their own buckets:
    they belong to all layers, so that a bucket with them is the last one in the backward pass.

    :param module: module with the parameters
    :param layout: layout of its parameters
    :param nbytes: size of a parameter bucket in bytes, which is rounded such that each slot gets an
        equal piece
    """
    # The layout is padded to a multiple of it, so that the last parameter bucket is divisible, too.
    unit = layout.slots * WIRE_BUCKET
    step = max(1, int(nbytes) // (ELEMENT * unit)) * unit
    boundary = layout.decayed // unit * unit
    begins = [*range(0, boundary, step), *range(boundary, layout.size, step)]
    buckets = []
    for begin, end in zip(begins, [*begins[1:], layout.size], strict=True):
        pairs = zip(layout.names, layout.column_ranges, strict=True)
        names = tuple(name for name, r in pairs if r.start < end and begin < r.stop)
        buckets.append(ParameterBucket(slice(begin, end), names))
    positions = {name: index for index, (name, _) in enumerate(module.named_parameters())}
    return sorted(buckets, key=lambda b: min(positions[name] for name in b.names))


class BackwardAverage:
    """Average of a replica's gradients over the slots of a node, during the last backward pass.

    Hooks notice when the gradients of a bucket are complete. Its average then starts, unless a
    later bucket is incomplete: the order of buckets is the reverse order of the module's
    parameters, and equal on all ranks. A bucket with a parameter that gets no gradient, and the
    buckets before it, start at the end of the backward pass. An element has the same terms in the
    same order as in `Group.reduce_scatter_mean`, so that the mean is bitwise identical. After an
    error in a backward pass, the ranks may have started different buckets, so the group can't be
    used any more.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: ParameterLayout,
        gradients: Sequence[torch.Tensor],
        group: TorchGroup,
        buckets: Sequence[ParameterBucket],
    ):
        """Register the hooks.

        :param module: replica whose gradients are views of ``gradients``; hooks that write them are
            registered before
        :param layout: layout of its parameters
        :param gradients: for the local slot, its gradients (1, P)
        :param group: slots of the node, of which one is local
        :param buckets: result of :func:`make_parameter_buckets`
        """
        self._group = group
        self._gradients = gradients
        self._buckets = buckets[::-1]
        self._started = 0
        self._expecting = False
        self._missing: list[set[str]] = [set() for _ in buckets]
        """For each bucket, the parameters whose gradients have not been computed."""
        lengths = [bucket.columns.stop - bucket.columns.start for bucket in buckets]
        # Memory that grew between two buckets could be used again while a sum still reads it.
        group.reserve(len(gradients[0]), max(lengths))
        parameters = dict(module.named_parameters())
        waited = {name for bucket in buckets for name in bucket.names}
        for name in layout.names:
            if name in waited:  # No bucket contains a parameter without elements.
                parameters[name].register_post_accumulate_grad_hook(self._hook(name))

    def _hook(self, name: str) -> Callable[[torch.Tensor], None]:
        """Return the hook of a parameter."""
        indices = [i for i, bucket in enumerate(self._buckets) if name in bucket.names]

        def note(_: torch.Tensor) -> None:
            if not self._expecting:
                return
            if indices[0] < self._started:
                raise GroupError(
                    f"the gradient of {name} was computed twice in one backward pass, after its "
                    "average over the slots had started, as by checkpoint(use_reentrant=True): set "
                    "node.bucket_mb = 0, which averages after the backward pass"
                )
            for index in indices:
                self._missing[index].discard(name)
            while self._started < len(self._buckets) and not self._missing[self._started]:
                self._start_next()

        return note

    def expect(self) -> None:
        """Prepare the last backward pass of a step."""
        self._missing = [set(bucket.names) for bucket in self._buckets]
        self._started = 0
        self._expecting = True

    def complete(self) -> None:
        """Start the averages that the backward pass has not started."""
        self._expecting = False
        while self._started < len(self._buckets):
            self._start_next()

    def fail(self) -> None:
        """Give up after an error in the backward pass."""
        self._expecting = False
        self._group.fail()

    def finish(self) -> list[torch.Tensor]:
        """Wait for all averages, and start those that have not started; return the local shards."""
        self.complete()
        self._started = 0
        return self._group.finish_means(self._gradients)

    def _start_next(self) -> None:
        bucket = self._buckets[self._started]
        self._started += 1
        self._group.start_mean(self._gradients, bucket.columns)


class ForwardGather:
    """Gathering of a replica's parameters over the slots of a node, during the next forward pass.

    Buckets are gathered in the order of the module's parameters. Before its forward pass, a module
    waits for the buckets of the parameters that it owns, also of those that it shares with other
    modules. Whoever reads parameters in another way calls :meth:`wait` first, and so does the
    update, which would otherwise overwrite a shard that is still sent.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: ParameterLayout,
        full: Sequence[torch.Tensor],
        group: TorchGroup,
        buckets: Sequence[ParameterBucket],
    ):
        """Register the hooks.

        :param module: replica whose parameters are views of ``full``
        :param layout: layout of its parameters
        :param full: for the local slot, its parameters (1, P)
        :param group: slots of the node, of which one is local
        :param buckets: result of `make_parameter_buckets`
        """
        self._group = group
        self._full = full
        self._ranges = [bucket.columns for bucket in buckets]
        self._in_flight: dict[int, Any] = {}
        """Transfers of each bucket for which no stream waits yet, by the index of the bucket."""
        named = dict(module.named_parameters())
        names = {id(named[name]): name for name in layout.names}
        for owner in module.modules():
            owned = {names[id(p)] for p in owner.parameters(recurse=False) if id(p) in names}
            indices = [i for i, bucket in enumerate(buckets) if owned.intersection(bucket.names)]
            if indices:
                owner.register_forward_pre_hook(self._hook(indices))

    def _hook(self, indices: Sequence[int]) -> Callable[[nn.Module, Any], None]:
        """Return the hook of a module whose parameters lie in some buckets."""

        # A copy of the module gets the same function, and not a copy of this object.
        def wait(module: nn.Module, inputs: Any) -> None:
            self.wait(indices)

        return wait

    def start(self) -> None:
        """Start to gather all buckets; collective over the node."""
        self.wait()
        transfers = self._group.start_gather(self._full, self._ranges)
        self._in_flight = dict(enumerate(transfers))

    def wait(self, indices: Iterable[int] | None = None) -> None:
        """Let the current stream wait for some buckets; ``indices`` = None: for all of them."""
        if not self._in_flight:
            return
        for index in [*self._in_flight] if indices is None else indices:
            if (works := self._in_flight.pop(index, None)) is not None:
                self._group.finish_gather(works)

"""Loader of batches for every slot at every step, on the devices of the slots.

In a run, a batch follows from the number of the step alone. Its samples come from the order of a
node, random augmentations follow from (seed, epoch, sample), and random numbers that a Dataset
draws follow from (seed, step, node, slot). Batches are therefore identical after a resume. A stream
is read again from its beginning to the step at which the run resumes.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from mpigossip.config.errors import Failure
from mpigossip.config.host import core_count
from mpigossip.config.user_code import describe_exception
from mpigossip.data.base import TEST, TRAIN, Batch, JobData, Request
from mpigossip.data.partition import Order, Share, draw_together
from mpigossip.data.pytree import Nested, map_tensors
from mpigossip.data.workers import (
    Refused,
    Requested,
    Stream,
    end,
    read_test_stream,
    same,
    start_loading,
    unwatch,
)

WORKERS = 2
"""Number of loading processes if `data.workers` is "auto": per node with CPU slots, otherwise per
GPU slot."""


class DataError(Failure):
    """Error of a data set, or of a loading process, during a run."""


class _Copy(NamedTuple):
    """Batch that is being copied to the device of a slot, and the event after its copy."""

    batch: Any
    copied: torch.cuda.Event | None


class DeviceCopier:
    """Copier of batches to one slot; on a GPU, it uses its own stream, so that copies overlap."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start_copy(self, batch: Nested, transform: Callable[[Nested], Any]) -> _Copy:
        """Start to copy a batch to the device, and to transform it there; don't wait for a GPU.

        :param batch: batch in host memory
        :param transform: function that converts the copied batch to the batch for the model
        """
        if self.stream is None:
            return _Copy(transform(map_tensors(lambda tensor: tensor.to(self.device), batch)), None)
        pinned = map_tensors(Tensor.pin_memory, batch)
        with torch.cuda.stream(self.stream):
            copied = map_tensors(lambda tensor: tensor.to(self.device, non_blocking=True), pinned)
            return _Copy(transform(copied), self.stream.record_event())

    def finish_copy(self, copy: _Copy) -> Any:
        """Return the batch; the default stream of the device waits for its copy and transform."""
        if copy.copied is not None:
            compute = torch.cuda.default_stream(self.device)
            compute.wait_event(copy.copied)
            # The memory was allocated in the copy stream, and is used in the compute stream.
            map_tensors(lambda tensor: tensor.record_stream(compute), copy.batch)
        return copy.batch


class Loader(contextlib.AbstractContextManager):
    """Loader of the batches of some nodes, each with L slots; a context manager.

    Samples in memory are assembled in this process when they are requested. All others are loaded
    by `DataLoader` of torch in ``workers`` processes, which use neither MPI nor CUDA. A stream is
    read by one process. The batches are bitwise identical for any number of processes.
    """

    def __init__(
        self,
        data: JobData,
        orders: Sequence[Order | Share],
        *,
        seed: int,
        devices: Sequence[torch.device | str] = ("cpu",),
        workers: int = 0,
        timeout_s: float = 300.0,
        slots: int | None = None,
        local_slots: range | None = None,
        joined: bool = False,
    ) -> None:
        """Prepare the loader; processes are started at the first batch.

        :param data: the source of samples
        :param orders: order of samples of each local node (one on a rank, n in a simulation)
        :param seed: seed of random augmentations
        :param devices: device of each local slot
        :param workers: number of loading processes; 0: this process loads the samples
        :param timeout_s: seconds that a process may take for a batch
        :param slots: number of slots of a node; None: the number of devices
        :param local_slots: indices of the local slots; None: all slots
        :param joined: whether batches may be views of one array if that is faster. Sums over such
            batches may be rounded differently
        """
        self.data: Any = data
        self.orders: Sequence[Any] = list(orders)  # Share for streams, otherwise Order
        self.seed = seed
        self.timeout_s = timeout_s
        self.copiers = [DeviceCopier(torch.device(device)) for device in devices]
        self.slots = slots or len(self.copiers)
        self.local_slots = local_slots or range(self.slots)
        self.workers = 0 if data.in_memory else min(workers, 1) if data.streams else workers
        self.early = any(copier.stream for copier in self.copiers)
        """True if the batches of the next step are copied to the devices before they are
        requested."""
        self._joins = joined and not self.early and data.independent
        self._batches: Iterator[Nested] | None = None
        self._next = 0
        self._copies: dict[int, list[_Copy]] = {}
        self._test: DataLoader | None = None
        self._test_requests: list[Request] = []

    def step(self, step: int) -> list[Any]:
        """Return the batches of a step on the devices: for each local node, one per slot.

        The samples of a node are split over its slots in order. Steps may be requested in any
        order. For GPUs, the batches of the next step are copied while the current step is computed.

        :param step: number of the step
        :raises DataError: if the data set failed, or a loading process died or hangs
        :raises JobError: if loading processes can't be started
        """
        if self._joins:
            return self._joined_step(step)
        copies = self._copies.pop(step, None) or self._start_copies(step)
        pairs = zip(self.copiers * len(self.orders), copies, strict=True)
        batches = [copier.finish_copy(copy) for copier, copy in pairs]
        self._copies.clear()
        if self.early:
            # An error is raised again when step + 1 is requested.
            with contextlib.suppress(DataError):
                self._copies[step + 1] = self._start_copies(step + 1)
        return batches

    def share(self, node: int, n: int) -> Iterator[Any]:
        """Yield the test samples ``node``, ``node + n``, … in batches, on the first device.

        If each node has its own test stream, yield the samples of the stream of ``node``, at most
        `data.test_samples`.

        :param node: index of a node; of a local node, if nodes have different data
        :param n: number of nodes among which the test samples are divided
        :raises DataError: if the data set failed, or a loading process died or hangs
        :raises JobError: if loading processes can't be started
        """
        row = next((row for row, order in enumerate(self.orders) if order.node == node), 0)
        if self.data.streams_test:
            batches = read_test_stream(self.data, node, row, n)
        else:
            batches = self._tests(np.arange(node, self.data.test_size, n), row)
        while (batch := self._next_batch(batches, "the test")) is not Refused:
            yield self.copiers[0].finish_copy(
                self.copiers[0].start_copy(batch, self.data.transform)
            )

    def note(self, step: int) -> list[str]:
        """Return messages for the user about the data of a run that continues at a step.

        The result is [] unless the training samples are a stream, and the step is not 0.
        """
        if not self.data.streams or not step:
            return []
        count = step * self.orders[0].batch
        return [f"the stream is read again from its beginning, {count:,} samples per node"]

    def close(self) -> None:
        """End the processes. A second call does nothing."""
        for iterator in (self._batches, self._test and self._test._iterator):
            end(iterator)
        self._batches = self._test = None
        self._copies.clear()

    def __exit__(self, *_) -> None:
        self.close()

    def _start_copies(self, step: int) -> list[_Copy]:
        """Wait for the batches of a step, and start to copy them to the devices."""
        if self._batches is None or step != self._next:
            end(self._batches)
            self._batches = self._begin(step)
        self._next = -1  # If a batch fails, the next call starts a new iterator.
        copies = [
            copier.start_copy(self._next_batch(self._batches, f"step {step}"), self.data.transform)
            for _ in self.orders
            for copier in self.copiers
        ]
        self._next = step + 1
        return copies

    def _joined_step(self, step: int) -> list[Batch]:
        """Load the samples of all nodes as one batch, and split it into the batches of the slots.

        If there are many small batches, loading each of them would cost more calls than work.
        """
        indices = [request.indices for request in self._requests(step)]
        key = self.seed, self.orders[0].epoch(step)
        sizes = [len(part_indices) for part_indices in indices]
        request = Request("train", np.concatenate(indices), key)
        arrays = self.data.transform(self.data.load(request))
        return [Batch(*pair) for pair in zip(*(part.split(sizes) for part in arrays), strict=True)]

    # -- requests, and the iterators over their batches --------------------------------------------

    def _begin(self, step: int) -> Iterator[Nested]:
        """Return an iterator over the training batches, beginning with a step."""
        if self.data.streams:
            stream: Any = Stream(self.data, self.orders, self.slots, self.local_slots, step)
            return start_loading(
                DataLoader(stream, batch_size=None, **self._loader_options()), self.data.name
            )
        requests = itertools.chain.from_iterable(map(self._requests, itertools.count(step)))
        if not self.workers:
            return map(Requested(self.data).__getitems__, requests)
        return start_loading(self._by_request(requests), self.data.name)

    def _requests(self, step: int) -> Iterator[Request]:
        epoch = self.orders[0].epoch(step)
        draw_together(self.orders, epoch)
        for order in self.orders:
            cuts = np.split(order.batch_indices(step), self.slots)
            for slot in self.local_slots:
                draws = TRAIN, step, order.node, slot
                yield Request("train", cuts[slot], (self.seed, epoch), draws)

    def _tests(self, indices: np.ndarray, row: int) -> Iterator[Nested]:
        """Return an iterator over test batches.

        :param indices: indices of the samples
        :param row: index of the node among the local nodes
        """
        size = self.data.test_batch
        cuts = [indices[start : start + size] for start in range(0, len(indices), size)]
        requests = [Request("test", cut, (), (TEST, int(cut[0])), row) for cut in cuts]
        if not self.workers:
            return map(Requested(self.data).__getitems__, requests)
        if self._test is None:
            self._test = self._by_request(self._test_requests, persistent_workers=True)
        self._test_requests[:] = requests
        return start_loading(self._test, self.data.name)

    def _by_request(self, requests: Any, **more: Any) -> DataLoader:
        return DataLoader(
            Requested(self.data),
            batch_sampler=requests,
            collate_fn=same,
            **self._loader_options(),
            **more,
        )

    def _loader_options(self) -> dict[str, Any]:
        """Return the arguments that all of torch's `DataLoader` objects get here.

        They include a separate generator, so that the random state of the program does not change.
        """
        options: dict[str, Any] = {"num_workers": self.workers, "generator": torch.Generator()}
        if self.workers:
            limit = min(self.timeout_s, 1e6)  # poll() takes milliseconds as a 32-bit integer
            options |= {"multiprocessing_context": "spawn", "timeout": limit}
        return options

    def _next_batch(self, batches: Iterator[Nested], what: str) -> Nested:
        """Return the next batch, or the class `Refused` at the end.

        :param batches: iterator over batches
        :param what: purpose of the batch for error messages, such as "step 3"
        :raises DataError: if the data set failed, or a process died or hangs
        """
        try:
            batch = next(batches, Refused)
        except (RuntimeError, EOFError, OSError) as error:  # a process has died or hangs
            unwatch(batches)  # the SIGCHLD handler of torch could raise an error, too
            raise DataError(
                f'data.source = "{self.data.name}": a loading process ended or sent nothing for '
                f"node.timeout_s = {self.timeout_s:g} s at {what} ({describe_exception(error)}); "
                "with data.workers = 0, the training process loads the samples itself"
            ) from error
        if isinstance(batch, Refused):
            raise DataError(f"{batch.text} ({what})")
        return batch


def processes(setting: int | str, devices: Sequence[str], per_node: int) -> int:
    """Return the number of loading processes of a rank.

    :param setting: value of `data.workers`, for a whole node
    :param devices: devices of the local slots
    :param per_node: number of ranks per node
    """
    if isinstance(setting, int):
        return -(-setting // per_node)
    if not devices[0].startswith("cuda"):
        return -(-WORKERS // per_node)
    # One core is left for the kernel launches of each slot, and one for the exchange.
    cores = core_count() // per_node - len(devices) - 1
    return max(WORKERS, min(WORKERS * len(devices), cores))

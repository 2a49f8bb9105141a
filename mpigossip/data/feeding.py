"""Batches that torch's `DataLoader` loads, here or in processes that know no launcher.

What is loaded follows from the step's number alone. Of a Dataset the samples are those of its
node's order, and random numbers that it draws are from (seed, step, node, slot): exact after a
resume. A stream is read again from its beginning, as far as the run had come.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import warnings
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data._utils import signal_handling

from mpigossip.config import JobError
from mpigossip.config.errors import Failure
from mpigossip.config.own_parts import raised
from mpigossip.data.datasets import Datasets, Draws, drawing
from mpigossip.data.loader import TEST_BATCH, Batch, Carrier
from mpigossip.data.partition import Order
from mpigossip.data.pytree import Nested
from mpigossip.data.sources import Source
from mpigossip.data.workers import TEST, TRAIN, Raw, Refused, Request, Samples, Share, Stream


class DataError(Failure):
    """A data set that fails in the middle of a run."""


class DatasetLoader:
    """The batches of some nodes, each with L slots, of a user's data sets; see `loader.Loader`.

    ``orders``: of the nodes that live here; ``slots``: of a node, and ``mine``, those that live
    here (unset: all). Data sets whose samples are tensors in memory are read here, all others by
    ``workers`` processes: started afresh, without MPI and CUDA. One process reads a stream.
    """

    def __init__(
        self,
        data: Datasets | Source,
        orders: Sequence[Order | Share],
        *,
        devices: Sequence[torch.device | str] = ("cpu",),
        workers: int = 0,
        timeout_s: float = 300.0,
        slots: int | None = None,
        mine: range | None = None,
    ) -> None:
        self.source: Any = data  # of the kind that the class is for
        self.orders, self.timeout_s = list(orders), timeout_s
        self.carriers = [Carrier(torch.device(device)) for device in devices]
        self.slots = slots or len(self.carriers)
        self.mine = mine or range(self.slots)
        self.workers = 0 if data.in_memory else min(workers, 1) if data.streams else workers
        self._batches: Iterator[Nested] | None = None
        self._next = 0
        self._there: dict[int, list] = {}
        self._test: DataLoader | None = None
        self._wanted: list[Request] = []

    def step(self, step: int) -> list[Nested]:
        """The batches of a step: node after node, slot after slot, on the slots' devices.

        To a GPU the next step's are copied while this one is computed.
        """
        there = self._there.pop(step, None) or self._bring(step)
        pairs = zip(self.carriers * len(self.orders), there, strict=True)
        batches = [carrier.hand_over(one) for carrier, one in pairs]
        self._there.clear()
        if any(carrier.stream for carrier in self.carriers):
            with contextlib.suppress(DataError):  # raised again when that step is asked for
                self._there[step + 1] = self._bring(step + 1)
        return batches

    def share(self, node: int, n: int) -> Iterator[Nested]:
        """The test samples ``node``, ``node + n``, …, in batches, on the first device."""
        if isinstance(self.source, Datasets) and isinstance(self.source.test, IterableDataset):
            size = self.source.section.batch
            batches: Iterator[Nested] = self._test_stream(node, n, size)
        else:
            batches = self._tests(self._test_requests(np.arange(node, self.source.test_size, n)))
        while (batch := self._received(batches, "the test")) is not Refused:
            yield self.carriers[0].hand_over(self.carriers[0].bring(batch, self._finish))

    def note(self, step: int) -> list[str]:
        """What to say of a run that goes on at a step."""
        if not self.source.streams or not step:
            return []
        count = step * self.orders[0].batch
        return [f"the stream is read again from its beginning, {count:,} samples a node"]

    def close(self) -> None:
        """End the processes. A second call does nothing."""
        for one in (self._batches, self._test and self._test._iterator):
            end(one)
        self._batches = self._test = None
        self._there.clear()

    def __enter__(self) -> DatasetLoader:
        """Return itself."""
        return self

    def __exit__(self, *_) -> None:
        """Close."""
        self.close()

    def _bring(self, step: int) -> list:
        """Wait for the batches of a step and begin to copy them to the devices."""
        if self._batches is None or step != self._next:
            end(self._batches)
            self._batches = self._begin(step)
        self._next = -1  # unless all of them come
        found = [
            carrier.bring(self._received(self._batches, f"step {step}"), self._finish)
            for _ in self.orders
            for carrier in self.carriers
        ]
        self._next = step + 1
        return found

    def _finish(self, batch: Nested) -> Nested:
        """What a model takes, of what was loaded and copied."""
        return batch

    def _begin(self, step: int) -> Iterator[Nested]:
        """The training batches from a step on."""
        if self.source.streams:
            shares: Any = self.orders
            data: Any = Stream(self.source, shares, self.slots, self.mine, step)
            return self._started(DataLoader(data, batch_size=None, **self._how()))
        return self._started(self._by_request(self._requests(step)))

    def _requests(self, step: int) -> Iterator[Request]:
        for index in itertools.count(step):
            order: Any  # an Order, as this is no stream
            for order in self.orders:
                cuts = np.split(order.batch_indices(index), self.slots)
                for slot in self.mine:
                    yield Request("train", self._key(order, index, slot), cuts[slot].tolist())

    def _key(self, order: Order, index: int, slot: int) -> tuple[int, ...]:
        """Where the random numbers of a batch begin."""
        return TRAIN, index, order.node, slot

    def _test_requests(self, indices: np.ndarray) -> list[Request]:
        size = self.source.section.batch
        cuts = [indices[at : at + size] for at in range(0, len(indices), size)]
        return [Request("test", (TEST, int(cut[0])), cut.tolist()) for cut in cuts]

    def _tests(self, requests: list[Request]) -> Iterator[Nested]:
        if self._test is None:
            self._test = self._by_request(self._wanted, persistent_workers=self.workers > 0)
        self._wanted[:] = requests
        return self._started(self._test)

    def _test_stream(self, node: int, n: int, size: int) -> Iterator[Nested]:
        """In this process: every n-th row of one stream for all, or all of a node's own."""
        data = self.source
        at = [order.node for order in self.orders].index(node) if not data.dealt else 0
        one = data.sets[at]["test"]
        turn, of = (node, n) if data.dealt else (0, 1)
        try:
            with drawing(Draws(data.seed, (TEST, node))):
                rows = itertools.islice(one, turn, data.section.test_samples, of)
                found = list(rows)
                batches = [data.collate(found[i : i + size]) for i in range(0, len(found), size)]
        except Exception as error:
            batches = [Refused(f'data.source = "{data.name}": the stream of "test": '
                               f"{raised(error)}")]  # fmt: skip
        return iter(batches)

    def _by_request(self, requests: Any, **more: Any) -> DataLoader:
        data = self._samples()
        return DataLoader(data, batch_sampler=requests, collate_fn=same, **self._how(), **more)

    def _samples(self) -> Dataset:
        return Samples(self.source)

    def _how(self) -> dict[str, Any]:
        """Settings of all loaders; their own generator leaves the program's numbers alone."""
        made: dict[str, Any] = {"num_workers": self.workers, "generator": torch.Generator()}
        if self.workers:
            made |= {"multiprocessing_context": "spawn", "timeout": self.timeout_s}
        return made

    def _started(self, loader: DataLoader) -> Iterator[Nested]:
        """Its iterator; JobError where the data can't be taken to other processes."""
        try:
            with no_program(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Got pickle error")  # said below
                return iter(loader)
        except Exception as error:
            if not self.workers:
                raise
            raise JobError([
                f'data.source = "{self.source.name}": what it returned can\'t be sent to the '
                f"{self.workers} loading processes ({raised(error)}); define its classes and "
                "functions at the top of a module, or load in the training process: "
                "data.workers = 0"
            ]) from error  # fmt: skip

    def _received(self, batches: Iterator[Nested], what: str) -> Nested:
        try:
            try:
                batch = next(batches, Refused)
            except (EOFError, OSError):  # it died; torch's handler of SIGCHLD may raise, too
                unwatch(batches)
                raise
        except (RuntimeError, EOFError, OSError) as error:  # a process that died or hangs
            raise DataError(
                f'data.source = "{self.source.name}": a loading process ended or gives nothing '
                f"for node.timeout_s = {self.timeout_s:g} s at {what} ({raised(error)}); with "
                "data.workers = 0 the training process loads by itself"
            ) from error
        if isinstance(batch, Refused):
            raise DataError(f"{batch.text} ({what})")
        return batch


class SourceLoader(DatasetLoader):
    """The batches of some nodes of a source whose samples `workers` processes decode.

    ``seed``: of the random changes. The bits of a batch don't depend on the processes.
    """

    def __init__(self, source: Source, orders: Sequence[Order], *, seed: int, **how: Any) -> None:
        super().__init__(source, orders, **how)
        self.seed = seed

    def _key(self, order: Order, index: int, slot: int) -> tuple[int, ...]:
        return self.seed, order.epoch(index)

    def _test_requests(self, indices: np.ndarray) -> list[Request]:
        cuts = [indices[at : at + TEST_BATCH] for at in range(0, len(indices), TEST_BATCH)]
        return [Request("test", (), cut.tolist()) for cut in cuts]

    def _samples(self) -> Dataset:
        return Raw(self.source)

    def _finish(self, batch: Nested) -> Batch:
        return Batch(*self.source.finish(*batch))


def end(batches: Any) -> None:
    """End the processes behind an iterator; nothing where there are none.

    That one aborts while it ends is no failure of the run, so torch stops watching them first.
    """
    unwatch(batches)
    if hasattr(batches, "_shutdown_workers"):
        batches._shutdown_workers()


def unwatch(batches: Any) -> None:
    """Let torch raise nothing more when a process behind an iterator ends."""
    if getattr(batches, "_worker_pids_set", False):
        signal_handling._remove_worker_pids(id(batches))
        batches._worker_pids_set = False


def same(batch: Nested) -> Nested:
    """A batch as it is: requests are answered with whole ones."""
    return batch


@contextlib.contextmanager
def no_program() -> Iterator[None]:
    """Hide the running program from processes that begin: they would import it, and MPI with it."""
    program = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = program

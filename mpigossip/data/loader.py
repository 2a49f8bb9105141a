"""Batches for every slot of every step, decoded ahead of their use."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from mpigossip.data.partition import Order, draw_together
from mpigossip.data.sources import ImageSource, Source, SyntheticSource, TextSource
from mpigossip.data.worker import Processes

TEST_BATCH = 256
AHEAD = 2
"""Steps that are decoded while one is trained."""
JOINED = (ImageSource, SyntheticSource, TextSource)
"""Sources whose samples don't depend on what else is in their batch."""


class Batch(NamedTuple):
    """What one slot trains on in one step."""

    inputs: Tensor
    targets: Tensor


class Pool(Protocol):
    """Who fills the pieces of a batch."""

    def submit(
        self, split: str, indices: np.ndarray, key: tuple[int, ...], out: np.ndarray
    ) -> Future:
        """Start filling `out` with the raw samples."""

    def close(self) -> None:
        """Stop. A second call does nothing."""


class DecodingThreads:
    """A pool of threads in this process."""

    def __init__(self, source: Source, count: int) -> None:
        self._source, self._threads = source, ThreadPoolExecutor(count, "decoding")

    def submit(
        self, split: str, indices: np.ndarray, key: tuple[int, ...], out: np.ndarray
    ) -> Future:
        """Start filling `out`."""
        return self._threads.submit(self._fill, split, indices, key, out)

    def close(self) -> None:
        """Wait for what runs, drop the rest. A second call does nothing."""
        self._threads.shutdown(cancel_futures=True)

    def _fill(self, split: str, indices: np.ndarray, key: tuple[int, ...], out: np.ndarray) -> None:
        out[:] = self._source.raw(split, indices, key)


class _Pending(NamedTuple):
    """A batch that is being filled."""

    raw: Tensor
    labels: Tensor
    pieces: list[Future]


class _There(NamedTuple):
    """A batch on its way to a slot's device, and the event behind its copy."""

    batch: Batch
    copied: torch.cuda.Event | None


class Carrier:
    """The way of batches to one slot: on a GPU a stream of its own, beside what is computed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def bring(self, pending: _Pending, finish: Callable) -> _There:
        """Begin to copy a decoded batch and to normalize it there; returns at once on a GPU."""
        with contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            raw = pending.raw.to(self.device, non_blocking=True)
            labels = pending.labels.to(self.device, non_blocking=True)
            batch = Batch(*finish(raw, labels))
        return _There(batch, None if self.stream is None else self.stream.record_event())

    def hand_over(self, there: _There) -> Batch:
        """The batch for the device's default stream, which waits for the copy."""
        if there.copied is not None:
            compute = torch.cuda.default_stream(self.device)
            compute.wait_event(there.copied)
            for tensor in there.batch:  # allocated on the other stream, needed on this one
                tensor.record_stream(compute)
        return there.batch


class Loader:
    """The batches of some nodes, each with L slots; a context manager.

    source: where samples come from; orders: of the nodes that live here (one on a rank, n in the
    simulator); seed: of the random changes; devices: one per slot that lives here; workers:
    decoding processes (threads for samples in memory), 0 for none; timeout_s: deadline for a
    batch; slots: of a node, and mine, those of them that live here (unset: all); together: batches
    may be parts of one array, where that is faster: sums over them may have other bits.

    Samples that are in memory, for slots on the CPU, are made when asked for: a batch takes less
    time than handing it to a thread. All others are made AHEAD steps before: in threads where
    they are in memory and go to a GPU, else in processes (decoding leaves the interpreter's lock,
    but what surrounds it doesn't: two threads decoded CIFAR four times slower than one). The bits
    of a batch depend on none of this. A worker that dies or hangs raises WorkerError, which names
    it.
    """

    def __init__(
        self,
        source: Source,
        orders: Sequence[Order],
        *,
        seed: int,
        devices: Sequence[torch.device | str] = ("cpu",),
        workers: int = 0,
        timeout_s: float = 300.0,
        slots: int | None = None,
        mine: range | None = None,
        together: bool = False,
    ) -> None:
        self.source, self.orders, self.seed = source, list(orders), seed
        self.devices = [torch.device(device) for device in devices]
        self._slots = slots or len(self.devices)
        self._mine = mine or range(self._slots)
        self.timeout_s = timeout_s
        self._pinned = any(device.type == "cuda" for device in self.devices)
        direct = workers == 0 or (source.in_memory and not self._pinned)
        self.ahead = 0 if direct else AHEAD
        self.pool: Pool | None = None
        if not direct and isinstance(source, ImageSource) and not source.in_memory:
            self.pool = Processes(source.images.recipe, workers, timeout_s)
        elif not direct:
            self.pool = DecodingThreads(source, workers)
        self.carriers = [Carrier(device) for device in self.devices]
        on_cpu = all(device.type == "cpu" for device in self.devices)
        self._joins = together and direct and on_cpu and type(source) in JOINED
        self.early = self._pinned
        """Whether the next step's batches are brought to the devices before they are asked for."""
        self._there: dict[int, list[_There]] = {}
        self._cuts = -(-workers // (len(self.orders) * len(self.devices)))
        self._steps: dict[int, list[_Pending]] = {}

    def _at_once(self, step: int) -> list[Batch]:
        """The batches of all nodes made as one and cut: of many small ones, calls are the time."""
        wanted = [cut for order in self.orders for cut in self._of_slots(order.batch_indices(step))]
        key = self.seed, self.orders[0].epoch(step)
        sizes = [len(one) for one in wanted]
        whole = self.source.train_batch(np.concatenate(wanted), key)
        return [Batch(*pair) for pair in zip(*(part.split(sizes) for part in whole), strict=True)]

    def step(self, step: int) -> list[Batch]:
        """Return the batches of a step: node after node, slot after slot, on the slots' devices.

        A node's samples of a step are cut over its slots in order. Steps may be asked for in any
        order; those that follow are begun. On a GPU the next step's are copied while this one is
        computed, if they are decoded by now.
        """
        draw_together(self.orders, step)
        if self._joins:
            return self._at_once(step)
        for wanted in range(step, step + 1 + self.ahead):
            if wanted not in self._steps and wanted not in self._there:
                self._steps[wanted] = self._begin(wanted)
        for other in [number for number in self._steps if not 0 <= number - step <= self.ahead]:
            _drop(self._steps.pop(other))
        there = self._there.pop(step, None) or self._bring(step)
        self._there = {k: batches for k, batches in self._there.items() if k == step + 1}
        pairs = zip(self.carriers * len(self.orders), there, strict=True)
        batches = [carrier.hand_over(one) for carrier, one in pairs]
        if self.early and all(map(_decoded, self._steps.get(step + 1, [None]))):
            self._there[step + 1] = self._bring(step + 1)
        return batches

    def test(self, indices: np.ndarray, batch: int, slot: int = 0) -> Iterator[Batch]:
        """Yield test samples in batches, the last one shorter, on the device of a slot."""
        cuts = [indices[begin : begin + batch] for begin in range(0, len(indices), batch)]
        begun: list[_Pending] = []
        try:
            for number in range(len(cuts)):
                while len(begun) <= self.ahead and number + len(begun) < len(cuts):
                    begun.append(self._fill("test", cuts[number + len(begun)], ()))
                pending, carrier = begun.pop(0), self.carriers[slot]
                self._await(pending, f"test batch {number}")
                yield carrier.hand_over(carrier.bring(pending, self.source.finish))
        finally:
            _drop(begun)

    def share(self, node: int, n: int) -> Iterator[Batch]:
        """The test samples ``node``, ``node + n``, …, in batches, on the first device."""
        return self.test(np.arange(node, self.source.test_size, n), TEST_BATCH)

    def note(self, step: int) -> list[str]:
        """What to say of a run that goes on at a step: nothing, as any step can be asked for."""
        return []

    def close(self) -> None:
        """Stop threads and processes. A second call does nothing."""
        for pending in self._steps.values():
            _drop(pending)
        self._steps.clear()
        self._there.clear()
        if self.pool is not None:
            self.pool.close()

    def __enter__(self) -> "Loader":
        """Return itself."""
        return self

    def __exit__(self, *_) -> None:
        """Close."""
        self.close()

    def _begin(self, step: int) -> list[_Pending]:
        return [
            self._fill("train", indices, (self.seed, order.epoch(step)))
            for order in self.orders
            for indices in self._of_slots(order.batch_indices(step))
        ]

    def _of_slots(self, indices: np.ndarray) -> list[np.ndarray]:
        """A node's samples cut over its slots in order: those of the slots here."""
        return np.split(indices, self._slots)[self._mine.start : self._mine.stop]

    def _fill(self, split: str, indices: np.ndarray, key: tuple[int, ...]) -> _Pending:
        """Begin to fill a batch, in as many pieces as keep all workers busy."""
        labels = torch.from_numpy(self.source.labels(split, indices))
        if self.pool is None:
            return _Pending(torch.from_numpy(self.source.raw(split, indices, key)), labels, [])
        numbers = torch.from_numpy(np.empty(0, self.source.raw_dtype)).dtype
        shape = (len(indices), *self.source.raw_shape)
        raw = torch.empty(shape, dtype=numbers, pin_memory=self._pinned)
        out, cuts = raw.numpy(), np.linspace(0, len(indices), self._cuts + 1).astype(int)
        pieces = [
            self.pool.submit(split, indices[begin:end], key, out[begin:end])
            for begin, end in zip(cuts, cuts[1:], strict=False)
            if end > begin
        ]
        return _Pending(raw, labels.pin_memory() if self._pinned else labels, pieces)

    def _bring(self, step: int) -> list[_There]:
        """Wait for the samples of a step and begin to bring them to the devices."""
        found = []
        for carrier, pending in zip(
            self.carriers * len(self.orders), self._steps.pop(step), strict=True
        ):
            self._await(pending, f"step {step}")
            found.append(carrier.bring(pending, self.source.finish))
        return found

    def _await(self, pending: _Pending, what: str) -> None:
        for piece in pending.pieces:
            try:
                # A worker's own deadline comes first: it names the worker.
                piece.result(2 * self.timeout_s)
            except TimeoutError as error:
                raise TimeoutError(
                    f"the samples of {what} are not decoded after {2 * self.timeout_s:g} s "
                    "(twice node.timeout_s); is the file system hanging?"
                ) from error


def _decoded(pending: _Pending | None) -> bool:
    """Whether all samples are there; what failed is raised when it is asked for."""
    return pending is not None and all(
        piece.done() and not piece.cancelled() and piece.exception() is None
        for piece in pending.pieces
    )


def _drop(pending: list[_Pending]) -> None:
    for batch in pending:
        for piece in batch.pieces:
            piece.cancel()

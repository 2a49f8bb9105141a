"""Batches for every slot of every step, of samples that this process makes when asked for them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mpigossip.data.partition import Order, draw_together
from mpigossip.data.pytree import Nested, mapped
from mpigossip.data.sources import ImageSource, Source, SyntheticSource, TextSource

TEST_BATCH = 256
JOINED = (ImageSource, SyntheticSource, TextSource)
"""Sources whose samples don't depend on what else is in their batch."""


class Batch(NamedTuple):
    """Training samples of one slot in one step."""

    inputs: Tensor
    targets: Tensor


class _There(NamedTuple):
    """A batch on its way to a slot's device, and the event behind its copy."""

    batch: Any
    copied: torch.cuda.Event | None


class Carrier:
    """The way of batches to one slot: on a GPU a stream of its own, beside what is computed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def bring(self, batch: Nested, finish: Callable[[Nested], Any]) -> _There:
        """Begin to copy a batch and to finish it there; returns at once on a GPU."""
        if self.stream is None:
            return _There(finish(mapped(lambda one: one.to(self.device), batch)), None)
        pinned = mapped(Tensor.pin_memory, batch)
        with torch.cuda.stream(self.stream):
            copied = mapped(lambda one: one.to(self.device, non_blocking=True), pinned)
            return _There(finish(copied), self.stream.record_event())

    def hand_over(self, there: _There) -> Any:
        """The batch for the device's default stream, which waits for the copy."""
        if there.copied is not None:
            compute = torch.cuda.default_stream(self.device)
            compute.wait_event(there.copied)
            # allocated on the other stream, needed on this one
            mapped(lambda one: one.record_stream(compute), there.batch)
        return there.batch


class Loader:
    """The batches of some nodes, each with L slots; a context manager.

    source: where samples come from; orders: of the nodes that live here (one on a rank, n in the
    simulator); seed: of the random changes; devices: one per slot that lives here; slots: of a
    node, and mine, those of them that live here (unset: all); together: batches may be parts of
    one array, where that is faster: sums over them may have other bits.
    """

    def __init__(
        self,
        source: Source,
        orders: Sequence[Order],
        *,
        seed: int,
        devices: Sequence[torch.device | str] = ("cpu",),
        slots: int | None = None,
        mine: range | None = None,
        together: bool = False,
    ) -> None:
        self.source, self.orders, self.seed = source, list(orders), seed
        self.carriers = [Carrier(torch.device(device)) for device in devices]
        self._slots = slots or len(self.carriers)
        self._mine = mine or range(self._slots)
        self.early = any(carrier.stream for carrier in self.carriers)
        """Whether the next step's batches are brought to the devices before they are asked for."""
        self._joins = together and not self.early and type(source) in JOINED
        self._there: dict[int, list[_There]] = {}

    def step(self, step: int) -> list[Batch]:
        """Return the batches of a step: node after node, slot after slot, on the slots' devices.

        A node's samples of a step are cut over its slots in order. Steps may be asked for in any
        order. To a GPU the next step's are copied while this one is computed.
        """
        draw_together(self.orders, step)
        if self._joins:
            return self._at_once(step)
        there = self._there.pop(step, None) or self._bring(step)
        pairs = zip(self.carriers * len(self.orders), there, strict=True)
        batches = [carrier.hand_over(one) for carrier, one in pairs]
        self._there = {step + 1: self._bring(step + 1)} if self.early else {}
        return batches

    def test(self, indices: np.ndarray, batch: int, slot: int = 0) -> Iterator[Batch]:
        """Yield test samples in batches, the last one shorter, on the device of a slot."""
        for begin in range(0, len(indices), batch):
            there = self._one(self.carriers[slot], "test", indices[begin : begin + batch], ())
            yield self.carriers[slot].hand_over(there)

    def share(self, node: int, n: int) -> Iterator[Batch]:
        """The test samples ``node``, ``node + n``, …, in batches, on the first device."""
        return self.test(np.arange(node, self.source.test_size, n), TEST_BATCH)

    def note(self, step: int) -> list[str]:
        """What to say of a run that goes on at a step: nothing, as any step can be asked for."""
        return []

    def close(self) -> None:
        """Forget what was brought early. A second call does nothing."""
        self._there.clear()

    def __enter__(self) -> "Loader":
        """Return itself."""
        return self

    def __exit__(self, *_) -> None:
        """Close."""
        self.close()

    def _at_once(self, step: int) -> list[Batch]:
        """The batches of all nodes made as one and cut: of many small ones, calls are the time."""
        wanted = [cut for order in self.orders for cut in self._of_slots(order.batch_indices(step))]
        key = self.seed, self.orders[0].epoch(step)
        sizes = [len(one) for one in wanted]
        whole = self.source.train_batch(np.concatenate(wanted), key)
        return [Batch(*pair) for pair in zip(*(part.split(sizes) for part in whole), strict=True)]

    def _of_slots(self, indices: np.ndarray) -> list[np.ndarray]:
        """A node's samples cut over its slots in order: those of the slots here."""
        return np.split(indices, self._slots)[self._mine.start : self._mine.stop]

    def _bring(self, step: int) -> list[_There]:
        return [
            self._one(carrier, "train", indices, (self.seed, order.epoch(step)))
            for order in self.orders
            for carrier, indices in zip(
                self.carriers, self._of_slots(order.batch_indices(step)), strict=True
            )
        ]

    def _one(
        self, carrier: Carrier, split: str, indices: np.ndarray, key: tuple[int, ...]
    ) -> _There:
        """Make a batch and begin to bring it to a device."""
        raw, labels = self.source.raw(split, indices, key), self.source.labels(split, indices)
        pair = torch.from_numpy(raw), torch.from_numpy(labels)
        return carrier.bring(pair, lambda pair: Batch(*self.source.finish(*pair)))

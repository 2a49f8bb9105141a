"""Runs that differ by their seed only, in step: the gradients of all nodes of all seeds at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpigossip.data.nested import parts
from mpigossip.engine.step import Record
from mpigossip.training.loop import NotFinite, Trainer
from mpigossip.training.replicas import draw_from

ROWS = 64
"""Models in a call, at most: larger ones no longer fit a cache, and take longer."""


class Together:
    """Trainers on one device each slot whose replicas' memory becomes one array of all seeds.

    What a seed does is what it does alone with `node.vmap`, but for rounding.
    """

    def __init__(self, trainers: Sequence[Trainer]):
        """Move the replicas; the trainers are stepped here only, from now on."""
        self.trainers = list(trainers)
        self.ended: list[NotFinite | None] = [None] * len(self.trainers)
        each = [trainer.replicas for trainer in self.trainers]
        self._rows = [one.rows for one in each]
        self._memory = []
        for kind in ("full", "grads"):
            slots = zip(*(getattr(one, kind) for one in each), strict=True)
            self._memory.append([torch.zeros_like(torch.cat(arrays)) for arrays in slots])
        full, grads = ([one.split(self._rows) for one in kind] for kind in self._memory)
        for at, one in enumerate(each):
            one.live_in([slot[at] for slot in full], [slot[at] for slot in grads])

    def step(self) -> list[Record | NotFinite]:
        """One step of every seed; what ended one, from then on, in place of its record."""
        for trainer, ended in zip(self.trainers, self.ended, strict=True):
            if ended is None:
                trainer.engine.ahead()
        found: list[Record | NotFinite] = []
        for at, figures in enumerate(self._gradients().split(self._rows)):
            if self.ended[at] is None:
                try:
                    self.trainers[at].check(figures)
                    found.append(self.trainers[at].take(figures))
                    continue
                except NotFinite as error:
                    self.ended[at] = error
            found.append(self.ended[at])
        return found

    def _gradients(self) -> torch.Tensor:
        """Of all rows; figures (rows, 1 + 2 metrics)."""
        first = self.trainers[0]
        replicas, settings, slots = first.replicas, first.settings, len(first.group.mine)
        index = max(trainer.index for trainer in self.trainers)
        batches = [
            batch for one in self.trainers for batch in one.settings.batches(index - one.shift)
        ]

        def work(slot: int) -> torch.Tensor:
            full, grads = (kind[slot] for kind in self._memory)
            draw_from(grads.device, first.seeds(index)[slot])
            cuts = [parts(batch, settings.accumulate) for batch in batches[slot::slots]]
            return torch.cat([
                replicas.vectorized(
                    replicas.modules[0][slot], full[at : at + ROWS], grads[at : at + ROWS],
                    cuts[at : at + ROWS], settings.precision,
                )
                for at in range(0, len(full), ROWS)
            ])  # fmt: skip

        figures = first.group.sum_scalars(first.group.run(work))
        figures[:, 0] /= first.group.slots
        return figures

"""Several devices of one node in a user's loop: a replica each, gradients averaged between them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from mpigossip.config import JobError
from mpigossip.groups.devices import make_group

T = TypeVar("T")


class Slots:
    """The model, and a copy of it on every further device."""

    def __init__(self, model: nn.Module, devices: Sequence[str] | None, timeout_s: float):
        """``devices``: one a slot, the model's own first; None: where the model is."""
        threads = torch.get_num_threads()
        self._group = make_group(tuple(devices), threads, True, timeout_s) if devices else None
        self.models = [model, *(copy.deepcopy(model).to(d) for d in (devices or ())[1:])]

    def run(self, work: Callable[[int, nn.Module], T]) -> list[T]:
        """``work(slot, replica)`` on every slot at once."""
        if self._group is None:
            return [work(0, self.models[0])]
        return self._group.run(lambda slot: work(slot, self.models[slot]))

    def average_gradients(self) -> None:
        """Mean over slots into the gradients of slot 0, summed in slot order.

        A slot without a gradient adds nothing; where no slot has one, there is none.
        """
        others = [dict(m.named_parameters()) for m in self.models[1:]]
        for name, parameter in self.models[0].named_parameters() if others else ():
            for grad in (replica[name].grad for replica in others):
                if grad is not None:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    parameter.grad.add_(grad.to(parameter.device))
            if parameter.grad is not None:
                parameter.grad.div_(len(self.models))

    @torch.no_grad()
    def follow(self) -> None:
        """The parameters of slot 0 into the other slots."""
        for model in self.models[1:]:
            for own, new in zip(model.parameters(), self.models[0].parameters(), strict=True):
                own.copy_(new)

    def spent(self) -> None:
        """A step has used the gradients: those of the other slots, which nobody sees, are zero."""
        for model in self.models[1:]:
            model.zero_grad()

    def buffers(self) -> list[dict[str, torch.Tensor]]:
        """The named buffers, slot by slot."""
        return [dict(model.named_buffers()) for model in self.models]

    def others(self) -> list[dict[str, torch.Tensor]]:
        """Copies of the buffers of the slots but the first, whose are the model's own."""
        every = self.buffers()[1:]
        return [{n: b.detach().clone().cpu() for n, b in of_slot.items()} for of_slot in every]

    @torch.no_grad()
    def put_others(self, saved: Any) -> None:
        """What :meth:`others` has given, of as many slots; with another number all stay.

        JobError for what it hasn't: files can be anything.
        """
        every = self.buffers()[1:]
        if not isinstance(saved, list) or len(saved) != len(every):
            return
        for slot, (of_slot, kept) in enumerate(zip(every, saved, strict=True), 1):
            for name, buffer in of_slot.items():
                value = kept.get(name) if isinstance(kept, dict) else None
                if not torch.is_tensor(value) or value.shape != buffer.shape:
                    raise JobError(
                        [f"load_state_dict: the state has no buffer {name} of slot {slot} with "
                         f"shape {tuple(buffer.shape)}; load the state of this model"]
                    )  # fmt: skip
                buffer.copy_(value)

    def close(self) -> None:
        """End the threads."""
        if self._group is not None:
            self._group.close()

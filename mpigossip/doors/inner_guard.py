"""The inner optimizer belongs to the door: a step of it that nobody asked for is refused."""

from __future__ import annotations

from typing import Any, Self

import torch

from mpigossip.config import JobError
from mpigossip.doors.inner import parts


def check_free(optimizer: torch.optim.Optimizer) -> None:
    """JobError where it is inside another Gossip."""
    for one in parts(optimizer):
        hooks = getattr(one, "_optimizer_step_pre_hooks", {}).values()  # not of a wrapper
        if any(isinstance(getattr(hook, "__self__", None), Held) for hook in hooks):
            raise JobError([f"the {type(one).__name__} is inside another Gossip; make a torch "
                            "optimizer for each, or close() the other Gossip first"])  # fmt: skip


class Held:
    """Inside, the optimizer may step; outside, its `step()` is refused until :meth:`release`."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        """Holds from now on; several that are one are held each."""
        self._inside = False
        self._hooks = [one.register_step_pre_hook(self._check) for one in parts(optimizer)]

    def __enter__(self) -> Self:
        self._inside = True
        return self

    def __exit__(self, *_: object) -> None:
        self._inside = False

    def _check(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._inside:
            raise JobError(
                [f"step() of the {type(optimizer).__name__} that is inside Gossip was called: its "
                 "step is part of Gossip's, and would be taken twice or never be exchanged; call "
                 "step() of what Gossip(…) returned, and give that to GradScaler.step()"]
            )  # fmt: skip

    def release(self) -> None:
        """The optimizer is the user's again."""
        for hook in self._hooks:
            hook.remove()

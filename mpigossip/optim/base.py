"""Base class of an optimizer that wraps another, as torch and frameworks expect it."""

import sys
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch

from mpigossip.config import JobError
from mpigossip.engine.sharded import local_shard

CALLS = ("step", "state_dict", "load_state_dict")
LIGHTNING = ("lightning", "lightning_fabric", "pytorch_lightning")
HOOKS = [f"{call}_{when}" for call in CALLS for when in ("pre", "post")]


class Wrapper(torch.optim.Optimizer):
    """A `torch.optim.Optimizer` whose groups, state and defaults are the wrapped one's."""

    def __init__(self, inner: torch.optim.Optimizer):
        """``inner``: stays the owner; torch's own __init__, not called, would make new groups."""
        for name in HOOKS:
            setattr(self, f"_optimizer_{name}_hooks", OrderedDict())
        self._patch_step_function()
        self._inner = inner

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Yes, so that GradScaler calls step() on an overflow too: neighbours wait for it.

        No to Lightning, which takes yes for "gradients can't be clipped", even without a scaler.
        Where it has unscaled them by itself, step() leaves them alone.
        """
        asking = sys._getframe(1).f_globals.get("__name__", "")
        return asking.partition(".")[0] not in LIGHTNING

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's."""
        return self._inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The inner optimizer's."""
        return self._inner.state

    @property
    def defaults(self) -> dict[str, Any]:
        """The inner optimizer's."""
        return self._inner.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; ``set_to_none`` as in torch."""
        self._inner.zero_grad(set_to_none)

    def unscale(self, parameters: Iterable[torch.Tensor]) -> torch.Tensor | None:
        """Divide gradients of ``parameters`` by GradScaler's scale, unless the user did that.

        Those of 16 bits, which would underflow, are left to who makes float32 of them.
        """
        scale = getattr(self, "grad_scale", None)
        if scale is None:
            return None
        inverse = scale.double().reciprocal().float()  # as GradScaler does it
        for p in parameters:
            if p.grad is not None and p.grad.dtype.itemsize > 2:
                local_shard(p.grad).mul_(inverse.to(p.grad.device))
        return inverse

    def __getstate__(self) -> dict[str, Any]:
        """JobError, for `copy` and `pickle`."""
        raise JobError("Gossip can't be copied or pickled; take optimizer.state_dict() instead")

    def _run_hooks(self, name: str, *arguments: Any) -> Any:
        value = None
        for hook in getattr(self, f"_optimizer_{name}_hooks").values():
            value = hook(self, *arguments) or value
        return value

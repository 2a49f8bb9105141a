"""Base class of an optimizer that wraps another one, with the interface that frameworks expect."""

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
    """A `torch.optim.Optimizer` with the groups, state and defaults of another optimizer."""

    def __init__(self, inner: torch.optim.Optimizer):
        """Wrap ``inner``; torch's own __init__, which would create new groups, is not called."""
        for name in HOOKS:
            setattr(self, f"_optimizer_{name}_hooks", OrderedDict())
        self._patch_step_function()
        self._inner = inner

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """True, which lets GradScaler call step() even if gradients overflowed.

        Without this call, the neighbours would wait for this node's message. For Lightning the
        value is False, because Lightning concludes from True that gradients can't be clipped, even
        without a scaler. It then divides the gradients by the scale itself, and step() does not
        divide them again.
        """
        asking = sys._getframe(1).f_globals.get("__name__", "")
        return asking.partition(".")[0] not in LIGHTNING

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of the inner optimizer."""
        return self._inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._inner.param_groups = groups

    @property
    def state(self) -> Any:
        """State of the inner optimizer."""
        return self._inner.state

    @property
    def defaults(self) -> dict[str, Any]:
        """Defaults of the inner optimizer."""
        return self._inner.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, with ``set_to_none`` as in torch."""
        self._inner.zero_grad(set_to_none)

    def unscale(self, parameters: Iterable[torch.Tensor]) -> torch.Tensor | None:
        """Divide the gradients of ``parameters`` by GradScaler's scale, unless the user did so.

        16-bit gradients are not divided, because they would underflow; the caller converts them to
        float32 first.

        :param parameters: parameters whose gradients are divided in place
        :returns: the inverse of the scale; None if the gradients are not scaled
        """
        scale = getattr(self, "grad_scale", None)
        if scale is None:
            return None
        inverse = scale.double().reciprocal().float()  # computed as GradScaler does
        for p in parameters:
            if p.grad is not None and p.grad.dtype.itemsize > 2:
                local_shard(p.grad).mul_(inverse.to(p.grad.device))
        return inverse

    def __getstate__(self) -> dict[str, Any]:
        """Raise JobError, because `copy` and `pickle` are not supported."""
        raise JobError("Gossip can't be copied or pickled: use optimizer.state_dict() instead")

    def _run_hooks(self, name: str, *arguments: Any) -> Any:
        value = None
        for hook in getattr(self, f"_optimizer_{name}_hooks").values():
            value = hook(self, *arguments) or value
        return value

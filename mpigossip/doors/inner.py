"""Any torch optimizer as a local step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from mpigossip.algorithms import takes_local
from mpigossip.algorithms.base import Empty, Step, no_state
from mpigossip.algorithms.local import Local
from mpigossip.config import JobError
from mpigossip.doors.wrapper import Wrapper
from mpigossip.engine.module import Parameters
from mpigossip.engine.step import Engine
from mpigossip.mixing.combine import duplicate

DIVIDES = {"slowmo", "qg-dmsgd", "decentlam"}
"""Methods that divide by the learning rate."""


def borrowed(
    vector: Parameters,
    optimizers: Sequence[torch.optim.Optimizer],
    held: AbstractContextManager | None = None,
) -> Local:
    """x½ by each row's own optimizer, to its own bits; its state stays in the optimizer.

    The optimizer steps while its parameters lie in ``out``: x is left alone, and what travels is
    written where it travels from. ``held``: inside of which they step.
    """
    held = held or nullcontext()

    def adapt(x, g, state: Empty, step: Step, out):
        out.unbind()  # not elementwise: a pass over GPU memory leaves all of this to torch
        if out is not x:
            duplicate(x, out)
        for row, optimizer in enumerate(optimizers):
            if row not in step.skipped:
                with held, vector.lent(row, out, g):
                    optimizer.step()
        return state

    return Local(no_state, adapt, raw=True)


def check(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The optimizer has to move the parameters of this very model, in a step of its own."""
    own = {id(p) for p in model.parameters()}
    moved = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not own & moved:
        raise JobError(
            ["the optimizer has none of the model's parameters; make it from "
             "model.parameters() of the model that is given to Gossip"]
        )  # fmt: skip
    if moved - own:
        raise JobError(
            [f"the optimizer has {len(moved - own)} parameters that are not the model's: they "
             "would not be exchanged; give Gossip a list of all modules that it trains"]
        )  # fmt: skip
    if isinstance(optimizer, torch.optim.LBFGS):
        raise JobError(
            ["LBFGS evaluates its closure several times a step, and nodes would exchange "
             "between them; use another optimizer"]
        )  # fmt: skip
    if isinstance(optimizer, Wrapper):
        raise JobError(["the optimizer is a Gossip already: give it the one inside"])


def check_group(model: nn.Module, group: dict[str, Any]) -> None:
    """Parameters that come later have to be the model's, too."""
    given = group["params"]
    own, given = {id(p) for p in model.parameters()}, [given] if torch.is_tensor(given) else given
    group["params"] = given = list(given)
    if foreign := sum(id(p) not in own for p in given):
        raise JobError(
            [f"add_param_group: {foreign} parameters that are not the model's would not be "
             "exchanged; give Gossip all that is to be trained at its making, as one module or a "
             "list, frozen (requires_grad = False) until then"]
        )  # fmt: skip


def check_plain_sgd(algorithm: str, optimizer: torch.optim.Optimizer) -> None:
    """Methods that never call the optimizer take rate and coupled decay from it, and no more."""
    has = None if type(optimizer) is torch.optim.SGD else f"is a {type(optimizer).__name__}"
    for group in optimizer.param_groups if has is None else ():
        for key in ("momentum", "dampening", "nesterov", "maximize"):
            has = f"has {key} = {group[key]}" if group[key] else has
    if has is not None:
        raise JobError(
            [f'algorithm.name = "{algorithm}" takes learning rate and weight decay of a plain '
             f"torch.optim.SGD and replaces its step; this optimizer {has}"]
        )  # fmt: skip


def decay(
    vector: Parameters,
    optimizer: torch.optim.Optimizer,
    row: int = 0,
    only: Sequence[int] | None = None,
) -> None:
    """Add SGD's weight decay to the row's gradients in the vector, of all or some parameters."""
    some = range(len(vector.rows[row])) if only is None else only
    place = {id(vector.rows[row][k]): k for k in some}
    x, g = vector.cut(vector.x[0][row]), vector.cut(vector.g[0][row])
    for group in optimizer.param_groups:
        for p in group["params"] if group["weight_decay"] else ():
            k = place.get(id(p))
            if k is not None and p.grad is not None:
                g[k].add_(x[k], alpha=group["weight_decay"])


def rate(optimizer: torch.optim.Optimizer) -> tuple[float, bool]:
    """The learning rate of the first group, and whether all groups have it."""
    rates = [float(group.get("lr", float("nan"))) for group in optimizer.param_groups]
    return rates[0], len(set(rates)) == 1


def one_rate(algorithm: str, optimizer: torch.optim.Optimizer, index: int) -> float:
    """The learning rate, where the method has one; JobError for what it can't do at step index."""
    lr, one = rate(optimizer)
    if not one and (algorithm in DIVIDES or not takes_local(algorithm)):
        raise JobError(
            [f'algorithm.name = "{algorithm}" has one learning rate for all parameters; the '
             "optimizer's groups have several: give them the same"]
        )  # fmt: skip
    if lr == 0 and algorithm in DIVIDES:
        raise JobError(
            [f'algorithm.name = "{algorithm}" divides by the learning rate, which is 0 at step '
             f"{index}: begin the warm-up above it"]
        )  # fmt: skip
    return lr


def unscaled(
    optimizer: Wrapper, engine: Engine, parameters: Sequence[nn.Parameter], sent: bool
) -> tuple[int, ...]:
    """Take GradScaler's scale out of the gradients; (0,) where they overflowed.

    ``sent``: layers have gone out during backward.
    """
    found = getattr(optimizer, "found_inf", None)
    if found is None:
        return ()
    if sent:
        raise JobError(
            ['a GradScaler has its gradients unscaled in step(), when overlap="layers" has '
             'sent them; use bf16 autocast without a scaler, or give Gossip overlap="auto"']
        )  # fmt: skip
    wrong = torch.as_tensor(float(found) > 0, dtype=torch.float64).reshape(1, 1)
    if engine.method.always_global:  # used by all or by none
        wrong = engine.mixer.mean_scalars(wrong)
    if float(wrong.reshape(-1)[0]) > 0:
        return (0,)
    optimizer.unscale(parameters)
    return ()

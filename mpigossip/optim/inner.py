"""Any torch optimizer, or several, as a local step; its own `step()` is refused from then on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch
from torch import nn

from mpigossip.algorithms import takes_local
from mpigossip.algorithms.base import Empty, Step, no_state
from mpigossip.algorithms.local import STILL, Local
from mpigossip.config import Job, JobError
from mpigossip.engine.module import Parameters
from mpigossip.engine.step import Engine
from mpigossip.mixing.combine import duplicate
from mpigossip.optim.wrapper import Wrapper
from mpigossip.store import StoreError
from mpigossip.training.assemble import make_bare

DIVIDES = {"slowmo", "qg-dmsgd", "decentlam"}
"""Methods that divide by the learning rate."""
BESIDE = {"params", "param_names", *(f"{name}_lr" for name in ("initial", "max", "min", "swa")),
          "base_momentum", "max_momentum"}  # fmt: skip
"""Keys of a group that are no settings of its optimizer: torch's schedulers add some."""


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
        if out is not x:
            duplicate(x, out)
        for row, optimizer in enumerate(optimizers):
            if row not in step.skipped:
                with held, vector.lent(row, out, g):
                    optimizer.step()
        return state

    return Local(no_state, adapt, raw=True)


class Together(torch.optim.Optimizer):
    """Several optimizers as one, such as Muon for matrices and AdamW for all else.

    Groups and state are those of the parts, in their order. JobError for a parameter that two have.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]):
        """``parts``: each with parameters of its own; from now on they share one state."""
        self._parts: Sequence[torch.optim.Optimizer] = ()
        counts = Counter(id(p) for one in parts for g in one.param_groups for p in g["params"])
        if twice := sum(count > 1 for count in counts.values()):
            raise JobError(
                [f"optimizer: {twice} parameters are in two of the {len(parts)} optimizers, and "
                 "would take two steps; give each parameter to one of them"]
            )  # fmt: skip
        super().__init__([group for one in parts for group in one.param_groups], {})
        for one in parts:
            self.state.update(one.state)
        self._parts, self._counts = parts, [len(one.param_groups) for one in parts]
        self._share()

    def _share(self) -> None:
        at = 0
        for one, count in zip(self._parts, self._counts, strict=True):
            one.__setstate__({"state": self.state, "param_groups": self.param_groups[at:][:count]})
            at += count

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what `load_state_dict` has read, in all parts."""
        super().__setstate__(state)
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: nothing says whose it is."""
        if self._parts:
            raise JobError(
                ["add_param_group: there are several optimizers, and nothing says which of them is "
                 "to have it; give Gossip optimizers that have all groups"]
            )  # fmt: skip
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The step of each part; ``closure`` is evaluated once."""
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        for one in self._parts:
            one.step()
        return value


def parts(optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer]:
    """The optimizers that it stands for: itself, or several."""
    return optimizer._parts if isinstance(optimizer, Together) else (optimizer,)


def title(optimizer: torch.optim.Optimizer) -> str:
    """What it is called in a message."""
    return " + ".join(type(one).__name__ for one in parts(optimizer))


def complete(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], saved: str
) -> tuple[list[dict[str, Any]], list[str]]:
    """Saved groups, with present values of settings that they lack; what to report.

    ``saved``: the :func:`title` of the optimizer that they are of, "" where an earlier version
    wrote them. StoreError for those of another one.
    """
    here, now = title(optimizer), optimizer.param_groups
    pairs = list(zip(groups, now, strict=False))  # torch refuses another number of groups
    unknown = sorted({key for old, new in pairs for key in old.keys() - new.keys() - BESIDE})
    lacking = {key: new[key] for old, new in pairs for key in new.keys() - old.keys() - BESIDE}
    if saved != here if saved else unknown and lacking:
        raise StoreError(
            f"the state is that of {saved or 'one with ' + ', '.join(unknown)}, and Gossip has "
            f"{here}: give it the one that was saved, or begin anew (a run: in another folder)"
        )
    told = [f"saved settings that {here} doesn't have: {', '.join(unknown)}"] if unknown else []
    if lacking:
        some = ", ".join(f"{key} = {value}" for key, value in sorted(lacking.items()))
        told.append(f"settings of {here} that were not saved are as given now: {some}")
    both = [{key: new[key] for key in new if key != "params"} | old for old, new in pairs]
    return both + groups[len(now) :], told


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
             "would not be exchanged; give Gossip torch.nn.ModuleList([…]) of all that it trains"]
        )  # fmt: skip
    if any(isinstance(one, torch.optim.LBFGS) for one in parts(optimizer)):
        raise JobError(
            ["LBFGS evaluates its closure several times a step, and averaging invalidates its "
             "curvature pairs: train with torch.optim.Adam on all nodes, export the average "
             "(optimizer.averaged() or `mpigossip checkpoint export`), and run LBFGS on that alone"]
        )  # fmt: skip
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise JobError(["differentiable = True: no gradient passes through an exchange, nor does "
                        "torch step leaf parameters so; make the optimizer without"])  # fmt: skip
    if any(isinstance(one, Wrapper) for one in parts(optimizer)):
        raise JobError(["the optimizer is a Gossip already: give it the one inside"])


def check_group(known: Container[int], group: dict[str, Any]) -> None:
    """JobError unless the model had all parameters when Gossip was made; ``known``: their ids."""
    given = group["params"]
    group["params"] = given = [given] if torch.is_tensor(given) else list(given)
    if foreign := sum(id(p[1] if isinstance(p, tuple) else p) not in known for p in given):
        raise JobError(
            [f"add_param_group: {foreign} parameters that are not the model's, or joined it later, "
             "would not be exchanged; build all that is to be trained before Gossip(…), as one "
             "module, frozen (requires_grad = False) until then"]
        )  # fmt: skip


def check_plain_sgd(algorithm: str, optimizer: torch.optim.Optimizer) -> None:
    """Methods that never call the optimizer take rate and coupled decay from it, and no more."""
    has = None if type(optimizer) is torch.optim.SGD else f"is a {title(optimizer)}"
    for group in optimizer.param_groups if has is None else ():
        for key in ("momentum", "dampening", "nesterov", "maximize"):
            has = f"has {key} = {group[key]}" if group[key] else has
    if has is not None:
        raise JobError(
            [f'algorithm.name = "{algorithm}" takes learning rate and weight decay of a plain '
             f"torch.optim.SGD and replaces its step; this optimizer {has}"]
        )  # fmt: skip


def check_method(job: Job, optimizer: torch.optim.Optimizer) -> None:
    """Reject an optimizer that the method can't use: SparseAdam takes no dense gradients."""
    if not takes_local(job.algorithm.name):
        check_plain_sgd(job.algorithm.name, optimizer)
    sparse = any(isinstance(one, torch.optim.SparseAdam) for one in parts(optimizer))
    if sparse and not make_bare(job, local=STILL._replace(raw=True)).raw:
        raise JobError(
            [f'algorithm.name = "{job.algorithm.name}" exchanges gradients as dense arrays, which '
             'SparseAdam does not take; use torch.optim.Adam, or algorithm="dsgd"']
        )  # fmt: skip


def decay(vector: Parameters, optimizer: torch.optim.Optimizer, row: int = 0) -> None:
    """Add SGD's weight decay to the row's gradients in the vector."""
    place = {id(p): k for k, p in enumerate(vector.rows[row])}
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
    optimizer: Wrapper, engine: Engine, parameters: Sequence[nn.Parameter]
) -> tuple[int, ...]:
    """Take GradScaler's scale out of the gradients; (0,) where they overflowed."""
    found = getattr(optimizer, "found_inf", None)
    if found is None:
        return ()
    wrong = torch.as_tensor(float(found) > 0, dtype=torch.float64).reshape(1, 1)
    if engine.method.always_global:  # used by all or by none
        wrong = engine.mixer.mean_scalars(wrong)
    if float(wrong.reshape(-1)[0]) > 0:
        return (0,)
    optimizer.unscale(parameters)
    return ()


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

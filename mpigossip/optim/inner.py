"""Torch optimizers as local steps: adapter, checks, rate, weight decay, stale gradients."""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any, Self

import torch
from torch import nn

from mpigossip.algorithms.base import NoState, Step, no_state
from mpigossip.algorithms.local import Local
from mpigossip.algorithms.methods import DIVIDES, takes_local
from mpigossip.config import JobError
from mpigossip.config.readable import print_note_once
from mpigossip.engine.module import ModuleParameters
from mpigossip.engine.sharded import is_sharded, local_shard
from mpigossip.engine.step import Engine
from mpigossip.mixing.combine import copy_into
from mpigossip.optim.base import Wrapper
from mpigossip.store import StoreError
from mpigossip.training.parts import JobParts

BESIDE = {
    "params",
    "param_names",
    *(f"{name}_lr" for name in ("initial", "max", "min", "swa")),
    "base_momentum",
    "max_momentum",
}
"""Keys of a group that are no settings of its optimizer: torch's schedulers add some."""


def local_step_from_optimizers(
    vector: ModuleParameters,
    optimizers: Sequence[torch.optim.Optimizer],
    guard: AbstractContextManager | None = None,
) -> Local:
    """Return a local step that calls each row's own optimizer, which keeps its state.

    It steps while its parameters lie in ``out``, the outbox, so that x stays as it was and nothing
    is copied. ``guard``: the context manager inside which optimizers may step.
    """
    guard = guard or nullcontext()

    def adapt(x, g, state: NoState, step: Step, out):
        if out is not x:
            copy_into(x, out)
        for row, optimizer in enumerate(optimizers):
            if row not in step.skipped:
                with guard, vector.bind_to(row, out, g):
                    optimizer.step()
        return state

    return Local(no_state, adapt, raw=True)


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers as one, such as Muon for matrices and AdamW for all else.

    Groups and state are those of the parts, in order. JobError for a parameter of two parts.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]):
        """``parts``: each with parameters of its own; from now on they share one state."""
        self._parts: Sequence[torch.optim.Optimizer] = ()
        counts = Counter(id(p) for one in parts for g in one.param_groups for p in g["params"])
        if twice := sum(count > 1 for count in counts.values()):
            raise JobError(
                f"optimizer: {twice} parameters are in two of the {len(parts)} optimizers, and "
                "would take two steps; give each parameter to one of them"
            )
        super().__init__([group for one in parts for group in one.param_groups], {})
        for one in parts:
            self.state.update(one.state)
        self._parts = parts
        self._counts = [len(one.param_groups) for one in parts]
        self._share()

    def _share(self) -> None:
        at = 0
        for one, count in zip(self._parts, self._counts, strict=True):
            one.__setstate__({"state": self.state, "param_groups": self.param_groups[at:][:count]})
            at += count

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Give all parts the state that `load_state_dict` has read."""
        super().__setstate__(state)
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Reject the group: nothing says which part is to have it."""
        if self._parts:
            raise JobError(
                "add_param_group: there are several optimizers, and nothing says which of them is "
                "to have it; give Gossip optimizers that have all groups"
            )
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        for one in self._parts:
            one.step()
        return value


def parts_of(optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer]:
    """Return the optimizer's parts, or itself as the only one."""
    return optimizer._parts if isinstance(optimizer, CombinedOptimizer) else (optimizer,)


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """Return its name for messages."""
    return " + ".join(type(one).__name__ for one in parts_of(optimizer))


def fill_missing(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], saved: str
) -> tuple[list[dict[str, Any]], list[str]]:
    """Add present values of settings that saved groups lack; return groups and what to report.

    ``saved``: the :func:`title` of their optimizer, "" if not known. StoreError where it differs.
    """
    here = optimizer_name(optimizer)
    now = optimizer.param_groups
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
    """JobError unless the optimizer moves the parameters of this model, in a step of its own."""
    own = {id(p) for p in model.parameters()}
    moved = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not own & moved:
        raise JobError(
            "the optimizer has none of the model's parameters; make it from "
            "model.parameters() of the model that is given to Gossip"
        )
    if moved - own:
        raise JobError(
            f"the optimizer has {len(moved - own)} parameters that are not the model's: they "
            "would not be exchanged; give Gossip torch.nn.ModuleList([…]) of all that it trains"
        )
    if any(isinstance(one, torch.optim.LBFGS) for one in parts_of(optimizer)):
        raise JobError(
            "LBFGS evaluates its closure several times a step, and averaging invalidates its "
            "curvature pairs: train with torch.optim.Adam on all nodes, export the average "
            "(optimizer.averaged() or `mpigossip checkpoint export`), and run LBFGS on that alone"
        )
    for one in parts_of(optimizer):
        if needs_closure(one):
            name = type(one).__name__
            raise JobError(
                f"{name} evaluates its closure, or computes gradients, several times a step, and "
                f"Gossip evaluates it once: make Gossip the base optimizer of {name}, and call "
                "step() of that (mpigossip/optim/README.md, Sharpness-aware minimization)"
            )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise JobError(
            "differentiable = True: no gradient passes through an exchange, nor does "
            "torch step leaf parameters so; make the optimizer without"
        )
    if any(isinstance(one, Wrapper) for one in parts_of(optimizer)):
        raise JobError("the optimizer is a Gossip already: pass the torch optimizer, not Gossip")


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``step()`` can't be called without a closure.

    SAM and its kin accept None and then raise an error, but are known by their two half steps.
    """
    if callable(getattr(optimizer, "first_step", None)):
        return True
    # A learning-rate scheduler replaces the attribute `step` of the instance by a plain function
    # whose signature has `self`. The class keeps the original.
    try:
        parameters = [*signature(type(optimizer).step).parameters.values()]
    except (ValueError, TypeError):  # it is compiled and has no signature
        return False
    return any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters[1:])


def check_group(known: Container[int], group: dict[str, Any]) -> None:
    """JobError unless the model had all parameters when Gossip was made; ``known``: their ids."""
    given = group["params"]
    group["params"] = given = [given] if torch.is_tensor(given) else list(given)
    if foreign := sum(id(p[1] if isinstance(p, tuple) else p) not in known for p in given):
        raise JobError(
            f"add_param_group: {foreign} parameters that are not the model's, or joined it later, "
            "would not be exchanged; build all that is to be trained before Gossip(…), as one "
            "module, frozen (requires_grad = False) until then"
        )


def check_plain_sgd(algorithm: str, optimizer: torch.optim.Optimizer) -> None:
    """JobError unless it is plain SGD, from which a method with own step takes rate and decay."""
    has = None if type(optimizer) is torch.optim.SGD else f"is a {optimizer_name(optimizer)}"
    for group in optimizer.param_groups if has is None else ():
        for key in ("momentum", "dampening", "nesterov", "maximize"):
            has = f"has {key} = {group[key]}" if group[key] else has
    if has is not None:
        raise JobError(
            f'algorithm.name = "{algorithm}" takes learning rate and weight decay of a plain '
            f"torch.optim.SGD and replaces its step; this optimizer {has}"
        )


def check_method(parts: JobParts, optimizer: torch.optim.Optimizer) -> None:
    """JobError for an optimizer that the method can't use; SparseAdam takes no dense gradients."""
    name = parts.job.algorithm.name
    if not takes_local(name):
        check_plain_sgd(name, optimizer)
    sparse = any(isinstance(one, torch.optim.SparseAdam) for one in parts_of(optimizer))
    if sparse and not parts.method.raw:
        raise JobError(
            f'algorithm.name = "{name}" exchanges gradients as dense arrays, which '
            'SparseAdam does not take; use torch.optim.Adam, or algorithm="dsgd"'
        )


def decay(vector: ModuleParameters, optimizer: torch.optim.Optimizer, row: int = 0) -> None:
    """Add SGD's weight decay to the row's gradients in the vector."""
    place = {id(p): k for k, p in enumerate(vector.rows[row])}
    x = vector.cut(vector.x[0][row])
    g = vector.cut(vector.g[0][row])
    for group in optimizer.param_groups:
        for p in group["params"] if group["weight_decay"] else ():
            k = place.get(id(p))
            if k is not None and p.grad is not None:
                g[k].add_(x[k], alpha=group["weight_decay"])


def first_rate(optimizer: torch.optim.Optimizer) -> tuple[float, bool]:
    """Return the learning rate of the first group, and whether all groups have it."""
    rates = [float(group.get("lr", float("nan"))) for group in optimizer.param_groups]
    return rates[0], len(set(rates)) == 1


def learning_rate(algorithm: str, optimizer: torch.optim.Optimizer, index: int) -> float:
    """Return the learning rate of step ``index``; JobError where the method can't use it."""
    lr, one = first_rate(optimizer)
    if not one and (algorithm in DIVIDES or not takes_local(algorithm)):
        raise JobError(
            f'algorithm.name = "{algorithm}" has one learning rate for all parameters; the '
            "optimizer's groups have several: give them the same"
        )
    if lr == 0 and algorithm in DIVIDES:
        raise JobError(
            f'algorithm.name = "{algorithm}" divides by the learning rate, which is 0 at step '
            f"{index}: begin the warm-up above it"
        )
    return lr


def unscaled(optimizer: Wrapper, engine: Engine, vector: ModuleParameters) -> tuple[int, ...]:
    """Divide the gradients by GradScaler's scale; return (0,) where they overflowed."""
    found = getattr(optimizer, "found_inf", None)
    vector.inverse = None
    if found is None:
        return ()
    wrong = torch.as_tensor(float(found) > 0, dtype=torch.float64).reshape(1, 1)
    if engine.method.always_global:  # used by all or by none
        wrong = engine.mixer.mean_scalars(wrong)
    if float(wrong.reshape(-1)[0]) > 0:
        return (0,)
    vector.inverse = optimizer.unscale(vector.rows[0])
    return ()


def check_free(optimizer: torch.optim.Optimizer) -> None:
    """JobError where it is inside another Gossip."""
    for one in parts_of(optimizer):
        hooks = getattr(one, "_optimizer_step_pre_hooks", {}).values()  # not of a wrapper
        if any(isinstance(getattr(hook, "__self__", None), StepGuard) for hook in hooks):
            raise JobError(
                f"the {type(one).__name__} is inside another Gossip; make a torch "
                "optimizer for each, or close() the other Gossip first"
            )


class StepGuard:
    """Context manager inside which the optimizer may step; elsewhere its step() is an error.

    Until :meth:`release`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._inside = False
        self._hooks = [one.register_step_pre_hook(self._check) for one in parts_of(optimizer)]

    def __enter__(self) -> Self:
        self._inside = True
        return self

    def __exit__(self, *_: object) -> None:
        self._inside = False

    def _check(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._inside:
            raise JobError(
                f"{type(optimizer).__name__}.step() was called directly, but Gossip calls it: "
                "call step() of the Gossip optimizer, and pass that to GradScaler.step()"
            )

    def release(self) -> None:
        """Give the optimizer back to the program."""
        for hook in self._hooks:
            hook.remove()


class StaleGradients:
    """Detection of steps on gradients that `zero_grad` did not clear, and of steps without any.

    One parameter's gradient is watched, by torch's count of in-place changes.
    """

    def __init__(self) -> None:
        self._parameter: torch.Tensor | None = None
        self._spent: tuple[torch.Tensor, int, int] | None = None
        self._added = False
        self._passes = 0
        self._hook: Any = None

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Choose the smallest of the optimizer's parameters that has a gradient, if one has."""
        self.release()
        having = [p for p in parameters if p.grad is not None and p.requires_grad]
        self._parameter = min(having, key=torch.Tensor.numel, default=None)
        if self._parameter is not None:
            self._hook = self._parameter.register_post_accumulate_grad_hook(self._accumulated)

    def release(self) -> None:
        """Remove the hook from the watched parameter, and drop its gradient."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = self._parameter = self._spent = None

    def mark_used(self) -> None:
        """Note that a step has used the gradients."""
        grad = None if self._parameter is None else self._parameter.grad
        self._spent = None if grad is None else (grad, grad._version, local_shard(grad)._version)
        self._passes = 0
        self._added = False

    def _accumulated(self, parameter: torch.Tensor) -> None:
        """Find out whether a backward pass after a step has added to gradients that the step used.

        torch increments the version of a gradient for an addition and for zeroing. If the version
        has grown by the backward passes alone, then the gradient was not zeroed before.
        """
        if self._spent is not None:
            grad, version, of_local = self._spent
            self._passes += 1  # some are another loss's, as of a GAN: what counts is the last one
            self._added = parameter.grad is grad and grad._version == version + self._passes
            if is_sharded(grad):  # torch adds to its local part, and counts zeroing apart
                same = parameter.grad is grad and grad._version == version
                self._added = same and local_shard(grad)._version > of_local

    def check(self, parameters: Iterable[torch.Tensor], rank: int) -> None:
        """JobError where backward added to gradients that were used; report if there are none."""
        if all(p.grad is None for p in parameters):  # a rank without data may mean it
            print_note_once(
                f"step() on rank {rank} without any gradient: only the exchange changes its "
                "model; call zero_grad() before backward(), and that on the model given to "
                "Gossip, not on a copy"
            )
        if self._added and self._parameter.grad is self._spent[0]:
            self._added = False
            raise JobError(
                "backward() accumulated into the previous step's gradients; call "
                "optimizer.zero_grad() first"
            )

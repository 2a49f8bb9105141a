"""Torch optimizers as local steps: adapter, checks, learning rate, weight decay, gradients."""

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
from mpigossip.store import StoreError
from mpigossip.training.parts import JobParts

NO_SETTINGS = {
    "params",
    "param_names",
    *(f"{name}_lr" for name in ("initial", "max", "min", "swa")),
    "base_momentum",
    "max_momentum",
}
"""Keys of a parameter group that are not settings of its optimizer; torch's schedulers add some."""

MAX_READ = 1 << 16
"""Largest number of elements of a gradient whose values :class:`StaleGradients` reads."""


def local_step_from_optimizers(
    vector: ModuleParameters,
    optimizers: Sequence[torch.optim.Optimizer],
    guard: AbstractContextManager | None = None,
) -> Local:
    """Return a local step that calls step() of a torch optimizer for each local node.

    Its ``adapt`` copies x to ``out``, which is the outbox or x itself. Then the optimizer steps
    while its parameters are views of ``out``, so that x is not changed and the result need not be
    copied to the outbox. For rows that the step skips, the result is x. The optimizer keeps its own
    state, such as momentum.

    The step is ``raw``: if the algorithm does not pass g, because no other function reads it, the
    optimizer takes the gradients from the ``.grad`` of the parameters.

    :param vector: flat parameters of the local nodes; each row of its arrays is one node
    :param optimizers: optimizer of each row
    :param guard: context manager inside which the optimizers may step; None: no guard
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


class OptimizerState:
    """Arrays of a torch optimizer's state by name, such as "exp_avg_sq", as flat arrays.

    An array belongs to it if it has the shape of its parameter. A parameter that has no such array
    sends zeros and keeps its state, for example because another part of a
    :class:`CombinedOptimizer` updates it, or because it has had no gradient so far.
    """

    def __init__(
        self, vector: ModuleParameters, optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        """Store the flat parameters, and the optimizer of each row."""
        self._vector = vector
        self._optimizers = optimizers

    def read(self, engine: Any, name: str, segment: int, out: torch.Tensor) -> None:
        out.zero_()
        for value, view in self._pairs(name, out):
            view.copy_(value)

    def write(self, engine: Any, name: str, segment: int, values: torch.Tensor) -> None:
        for value, view in self._pairs(name, values):
            value.copy_(view)

    def _pairs(self, name: str, flat: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return pairs for all parameters that have an array ``name``.

        A pair consists of the array, or its shard in this rank, and the parameter's part of
        ``flat``.

        :param name: key of the array in the optimizer's state
        :param flat: array (rows, P) with the layout of the flat parameters
        :raises JobError: if an optimizer keeps arrays, but none of this name, or if it keeps none
            although there are gradients
        """
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for row, optimizer in enumerate(self._optimizers):
            views = self._vector.cut(flat[row])
            names: set[str] = set()
            for p, view in zip(self._vector.rows[row], views, strict=True):
                arrays = {k: v for k, v in optimizer.state.get(p, {}).items() if _is_like(v, p)}
                names |= arrays.keys()
                if name in arrays:
                    pairs.append((local_shard(arrays[name]), view))
            has_gradients = any(p.grad is not None for p in self._vector.rows[row])
            if not names and has_gradients:
                raise JobError(
                    f"average_state = {{{name!r}: …}}: {optimizer_name(optimizer)} keeps no arrays "
                    "with these options: remove average_state, or choose another optimizer"
                )
            if names and name not in names:
                raise JobError(
                    f"average_state = {{{name!r}: …}}: the state of {optimizer_name(optimizer)} "
                    f"has no array of this name, but {', '.join(sorted(names))}: use one of these"
                )
        return pairs


def _is_like(value: Any, parameter: torch.Tensor) -> bool:
    is_array = torch.is_tensor(value) and value.is_floating_point()
    return is_array and value.shape == parameter.shape


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers as one, such as Muon for matrices and AdamW for all other parameters.

    It has the parameter groups and the state of its parts, in their order. A parameter that belongs
    to two parts raises JobError.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]):
        """Combine optimizers, which share one state from now on.

        :param parts: optimizers of different parameters
        :raises JobError: if a parameter belongs to two of them
        """
        self._parts: Sequence[torch.optim.Optimizer] = ()
        counts = Counter(id(p) for part in parts for g in part.param_groups for p in g["params"])
        if twice := sum(count > 1 for count in counts.values()):
            raise JobError(
                f"optimizer: {twice} parameters are in two of the {len(parts)} optimizers, and "
                "would make two steps: pass each parameter to one optimizer only"
            )
        super().__init__([group for part in parts for group in part.param_groups], {})
        for part in parts:
            self.state.update(part.state)
        self._parts = parts
        self._counts = [len(part.param_groups) for part in parts]
        self._share()

    def _share(self) -> None:
        start = 0
        for part, count in zip(self._parts, self._counts, strict=True):
            part.__setstate__(
                {"state": self.state, "param_groups": self.param_groups[start:][:count]}
            )
            start += count

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Share the state that `load_state_dict` has read with all parts."""
        super().__setstate__(state)
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise JobError after the creation, because it is unknown which part should get the group.

        The constructor of torch's class calls this method, too, and adds the groups of the parts.

        :param param_group: the group, as in torch
        :raises JobError: after the creation
        """
        if self._parts:
            raise JobError(
                "add_param_group: Gossip has several optimizers, and it is unknown which of them "
                "should get the group: add all groups to the optimizers before you pass them to "
                "Gossip"
            )
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        for part in self._parts:
            part.step()
        return value


def parts_of(optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer]:
    """Return the parts of a combined optimizer; for any other, the optimizer itself."""
    return optimizer._parts if isinstance(optimizer, CombinedOptimizer) else (optimizer,)


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of ``optimizer`` for messages."""
    return " + ".join(type(part).__name__ for part in parts_of(optimizer))


def fill_missing(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], saved: str
) -> tuple[list[dict[str, Any]], list[str]]:
    """Add the current values of settings that saved groups lack.

    :param optimizer: optimizer that the groups are loaded into
    :param groups: parameter groups of a saved state
    :param saved: :func:`optimizer_name` of the saved optimizer; "": not known
    :returns: the completed groups, and messages to report
    :raises StoreError: if the saved optimizer was another one
    """
    name = optimizer_name(optimizer)
    now = optimizer.param_groups
    pairs = list(zip(groups, now, strict=False))  # torch rejects a different number of groups
    unknown = sorted({key for old, new in pairs for key in old.keys() - new.keys() - NO_SETTINGS})
    lacking = {key: new[key] for old, new in pairs for key in new.keys() - old.keys() - NO_SETTINGS}
    if saved != name if saved else unknown and lacking:
        raise StoreError(
            f"the state belongs to {saved or 'an optimizer with ' + ', '.join(unknown)}, but "
            f"Gossip has {name}: pass the optimizer that was saved, or start from the beginning "
            "(a run: in another folder)"
        )
    messages = [f"saved settings that {name} lacks: {', '.join(unknown)}"] if unknown else []
    if lacking:
        values = ", ".join(f"{key} = {value}" for key, value in sorted(lacking.items()))
        messages.append(
            f"settings of {name} that were not saved keep their present values: {values}"
        )
    both = [{key: new[key] for key in new if key != "params"} | old for old, new in pairs]
    return both + groups[len(now) :], messages


def check(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Check that Gossip can use the optimizer as the local step of the model.

    :param model: model of the program
    :param optimizer: optimizer that Gossip shall call
    :raises JobError: if the optimizer has none of the model's parameters, or parameters that are
        not in the model; if it is LBFGS, needs a closure or is differentiable; or if it is a Gossip
        already
    """
    in_model = {id(p) for p in model.parameters()}
    moved = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not in_model & moved:
        raise JobError(
            "the optimizer has none of the model's parameters: create it from "
            "model.parameters() of the model that you pass to Gossip"
        )
    if moved - in_model:
        raise JobError(
            f"the optimizer has {len(moved - in_model)} parameters that are not in the model, and "
            "would not be exchanged: pass Gossip torch.nn.ModuleList([…]) of all modules that the "
            "optimizer trains"
        )
    if any(isinstance(part, torch.optim.LBFGS) for part in parts_of(optimizer)):
        raise JobError(
            "LBFGS evaluates its closure several times per step, and averaging invalidates its "
            "curvature pairs: train with torch.optim.Adam on all nodes, export the average "
            "(optimizer.averaged() or `mpigossip checkpoint export`), and run LBFGS on that, on "
            "one node"
        )
    for part in parts_of(optimizer):
        if needs_closure(part):
            name = type(part).__name__
            raise JobError(
                f"{name} evaluates its closure, or computes gradients, several times per step, but "
                f"Gossip evaluates it once: make Gossip the base optimizer of {name}, and call its "
                "step() (mpigossip/optim/README.md, Sharpness-aware minimization)"
            )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise JobError(
            "differentiable = True: gradients can't pass through an exchange, and torch does not "
            "step leaf parameters in this mode: create the optimizer without differentiable"
        )
    if any(is_gossip(part) for part in parts_of(optimizer)):
        raise JobError("the optimizer is a Gossip already: pass the torch optimizer, not Gossip")


def is_gossip(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is a `Gossip`, whose module imports this one."""
    return hasattr(type(optimizer), "consensus_distance")


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``step()`` can't be called without a closure.

    SAM and similar optimizers accept None and then raise an error, but are recognized by their two
    half steps.
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
    """Check a parameter group that is added after Gossip was created.

    :param known: ids of the parameters that the model had when Gossip was created
    :param group: the parameter group; its parameters become a list
    :raises JobError: if a parameter is not known
    """
    params = group["params"]
    group["params"] = params = [params] if torch.is_tensor(params) else list(params)
    if foreign := sum(id(p[1] if isinstance(p, tuple) else p) not in known for p in params):
        raise JobError(
            f"add_param_group: {foreign} parameters are not in the model, or were added to it "
            "later, and would not be exchanged: create all parameters before Gossip(…), in one "
            "module, and freeze them (requires_grad = False) until they are trained"
        )


def check_plain_sgd(algorithm: str, optimizer: torch.optim.Optimizer) -> None:
    """Raise JobError unless the optimizer is plain SGD.

    An algorithm that replaces the local step uses the learning rate and the weight decay only.
    """
    has = None if type(optimizer) is torch.optim.SGD else f"is a {optimizer_name(optimizer)}"
    for group in optimizer.param_groups if has is None else ():
        for key in ("momentum", "dampening", "nesterov", "maximize"):
            has = f"has {key} = {group[key]}" if group[key] else has
    if has is not None:
        raise JobError(
            f'algorithm.name = "{algorithm}" uses the learning rate and the weight decay of a '
            f"plain torch.optim.SGD and replaces its step, but this optimizer {has}: pass "
            "torch.optim.SGD(model.parameters(), lr=…)"
        )


def check_method(parts: JobParts, optimizer: torch.optim.Optimizer) -> None:
    """Raise JobError if the algorithm can't use the optimizer.

    Custom algorithms and those that replace the local step need plain SGD. SparseAdam does not
    support dense gradients, which some algorithms exchange.
    """
    name = parts.job.algorithm.name
    if not takes_local(name):
        check_plain_sgd(name, optimizer)
    sparse = any(isinstance(part, torch.optim.SparseAdam) for part in parts_of(optimizer))
    if sparse and not parts.method.raw:
        raise JobError(
            f'algorithm.name = "{name}" exchanges gradients as dense arrays, which '
            'SparseAdam does not accept: use torch.optim.Adam, or algorithm="dsgd"'
        )


def decay(vector: ModuleParameters, optimizer: torch.optim.Optimizer, row: int = 0) -> None:
    """Add SGD's weight decay, weight_decay · x, to the flat gradients of one local node.

    Parameters without a gradient get none, as in torch.

    :param vector: flat parameters x and gradients g
    :param optimizer: optimizer whose groups contain ``weight_decay``
    :param row: row of the node in x and g
    """
    index_of = {id(p): k for k, p in enumerate(vector.rows[row])}
    x = vector.cut(vector.x[0][row])
    g = vector.cut(vector.g[0][row])
    for group in optimizer.param_groups:
        for p in group["params"] if group["weight_decay"] else ():
            k = index_of.get(id(p))
            if k is not None and p.grad is not None:
                g[k].add_(x[k], alpha=group["weight_decay"])


def first_rate(optimizer: torch.optim.Optimizer) -> tuple[float, bool]:
    """Return the learning rate of the first group, and whether it is the same in all groups.

    A group without a learning rate counts as NaN.
    """
    rates = [float(group.get("lr", float("nan"))) for group in optimizer.param_groups]
    return rates[0], len(set(rates)) == 1


def learning_rate(algorithm: str, optimizer: torch.optim.Optimizer, index: int) -> float:
    """Return the learning rate of the optimizer's first group.

    :param algorithm: name of the algorithm
    :param optimizer: optimizer that Gossip calls
    :param index: number of the step, for the message
    :raises JobError: if the algorithm needs one learning rate and the groups have several, or if
        the algorithm divides by the learning rate and the learning rate is 0
    """
    lr, is_single = first_rate(optimizer)
    if not is_single and (algorithm in DIVIDES or not takes_local(algorithm)):
        raise JobError(
            f'algorithm.name = "{algorithm}" needs one learning rate for all parameters, but the '
            "optimizer's groups have several: use the same learning rate in all groups"
        )
    if lr == 0 and algorithm in DIVIDES:
        raise JobError(
            f'algorithm.name = "{algorithm}" divides by the learning rate, which is 0 at step '
            f"{index}: keep it above 0, also at the start of a warm-up and at the end of a decay"
        )
    return lr


def unscaled(
    optimizer: torch.optim.Optimizer, engine: Engine, vector: ModuleParameters
) -> tuple[int, ...]:
    """Divide the gradients by the scale of torch's GradScaler, unless they have overflowed.

    16-bit gradients are not divided here: ``vector.inverse`` becomes the inverse of the scale, and
    None if gradients are not scaled or have overflowed. If the algorithm averages gradients over
    all nodes, the call is collective, and all nodes return the same rows.

    GradScaler.step() sets two attributes of the optimizer before it calls step(): ``found_inf``, a
    tensor that is > 0 if any gradient is infinite or NaN, and ``grad_scale``, the scale (None if
    the program has already divided the gradients by it). Without a scaler, the attributes are
    missing.

    :param optimizer: the Gossip optimizer, on which GradScaler sets the attributes
    :param engine: engine of the node
    :param vector: flat parameters, whose gradients are divided
    :returns: the rows that skip the local step: (0,), the only node of a loop, if gradients have
        overflowed; otherwise ()
    """
    found_inf = getattr(optimizer, "found_inf", None)
    vector.inverse = None
    if found_inf is None:
        return ()
    overflow = torch.as_tensor(float(found_inf) > 0, dtype=torch.float64).reshape(1, 1)
    if engine.method.always_global:  # gradients are averaged over nodes: all skip the step, or none
        overflow = engine.mixer.mean_scalars(overflow)
    if float(overflow.reshape(-1)[0]) > 0:
        return (0,)
    scale = getattr(optimizer, "grad_scale", None)
    if scale is not None:
        vector.inverse = divide_by_scale(scale, vector.rows[0])
    return ()


def divide_by_scale(scale: torch.Tensor, parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """Divide the gradients of ``parameters`` in place by GradScaler's scale; return its inverse.

    16-bit gradients are not divided, because they would underflow; the caller converts them to
    float32 first.

    :param scale: scale of GradScaler, one element
    :param parameters: parameters whose gradients are divided
    """
    inverse = scale.double().reciprocal().float()  # computed as GradScaler does
    for p in parameters:
        if p.grad is not None and p.grad.dtype.itemsize > 2:
            local_shard(p.grad).mul_(inverse.to(p.grad.device))
    return inverse


def check_free(optimizer: torch.optim.Optimizer) -> None:
    """Raise JobError if the optimizer belongs to another Gossip."""
    for part in parts_of(optimizer):
        # Optimizers that a framework has wrapped may lack this attribute.
        hooks = getattr(part, "_optimizer_step_pre_hooks", {}).values()
        if any(isinstance(getattr(hook, "__self__", None), StepGuard) for hook in hooks):
            raise JobError(
                f"the {type(part).__name__} is inside another Gossip: create a torch "
                "optimizer for each Gossip, or call close() of the other one first"
            )


class StepGuard:
    """Context manager inside which an optimizer may step; outside, its step() raises JobError.

    After :meth:`release`, the optimizer may step anywhere.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._inside = False
        self._hooks = [part.register_step_pre_hook(self._check) for part in parts_of(optimizer)]

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
        """Remove the hooks, so that the program may call step() again."""
        for hook in self._hooks:
            hook.remove()


class StaleGradients:
    """Detector of steps without gradients, or with gradients that `zero_grad` did not clear.

    It watches the gradient of one parameter by torch's version counter of in-place changes, which
    does not count changes through `.data`. If nothing else has cleared the gradient before a
    backward pass, its values are therefore compared with zero, unless there are more than
    `MAX_READ`. A missing `zero_grad` is not noticed while all values are zero.
    """

    def __init__(self) -> None:
        self._parameter: torch.Tensor | None = None
        self._spent: tuple[torch.Tensor, int, int] | None = None
        self._added = False
        self._zeroed = False
        self._passes = 0
        self._hooks: list[Any] = []

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Choose the smallest of the parameters that have a gradient, if there is one."""
        self.release()
        having = [p for p in parameters if p.grad is not None and p.requires_grad]
        self._parameter = min(having, key=torch.Tensor.numel, default=None)
        if self._parameter is not None:
            self._hooks = [
                self._parameter.register_hook(self._accumulating),
                self._parameter.register_post_accumulate_grad_hook(self._accumulated),
            ]

    def release(self) -> None:
        """Remove the hooks from the watched parameter, if there is one, and stop watching it."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._parameter = self._spent = None

    def mark_used(self) -> None:
        """Note that a step has used the gradients."""
        grad = None if self._parameter is None else self._parameter.grad
        self._spent = None if grad is None else (grad, grad._version, local_shard(grad)._version)
        self._passes = 0
        self._added = False
        self._zeroed = False

    @torch.utils.hooks.unserializable_hook  # otherwise, sending the model to a process warns
    def _accumulating(self, _: torch.Tensor) -> None:
        """Record, before a backward pass adds to used gradients, whether they are zero.

        ``p.grad.data.zero_()`` clears gradients, too, but torch does not count this change. The
        values are read only if nothing else has cleared the gradients.
        """
        if self._spent is None or self._parameter is None:
            return
        grad, version, _of_local = self._spent
        is_unchanged = self._parameter.grad is grad and grad._version == version + self._passes
        is_readable = grad.layout == torch.strided and not is_sharded(grad)
        if is_unchanged and is_readable and grad.numel() <= MAX_READ:
            self._zeroed |= not bool(grad.any())

    def _accumulated(self, parameter: torch.Tensor) -> None:
        """Record, after a backward pass, whether it has added to gradients that a step has used.

        If zero_grad() was called before the pass, the version has increased by more than the pass.
        """
        if self._spent is not None:
            grad, version, of_local = self._spent
            # Several passes may belong to different losses, as in a GAN: the last one decides.
            self._passes += 1
            is_unchanged = grad._version == version + self._passes
            self._added = parameter.grad is grad and is_unchanged and not self._zeroed
            if is_sharded(grad):  # torch adds to its local shard, and counts zeroing separately
                same = parameter.grad is grad and grad._version == version
                self._added = same and local_shard(grad)._version > of_local

    def check(self, parameters: Iterable[torch.Tensor], rank: int) -> None:
        """Raise JobError if backward added to used gradients; report if there are no gradients.

        :param parameters: trained parameters of the model
        :param rank: rank of this process, for the report
        """
        if all(p.grad is None for p in parameters):  # this may be intended on a rank without data
            print_note_once(
                f"step() on rank {rank} without any gradient: only the exchange changes its "
                "model; call zero_grad() before backward(), and compute the loss with the model "
                "that you passed to Gossip, not with a copy"
            )
        if self._added and self._parameter.grad is self._spent[0]:
            self._added = False
            raise JobError(
                "backward() accumulated into the previous step's gradients: call "
                "optimizer.zero_grad() first"
            )

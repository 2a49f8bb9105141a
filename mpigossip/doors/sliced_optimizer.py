"""A torch optimizer on slices of its parameters: each value as by a step on all of them."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mpigossip.algorithms.base import Empty, Step, no_state
from mpigossip.algorithms.local import Local
from mpigossip.config import JobError
from mpigossip.doors.inner import title
from mpigossip.engine.module import Parameters

ELEMENTWISE = {
    torch.optim.SGD: {"momentum_buffer"},
    torch.optim.Adam: {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
    torch.optim.AdamW: {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
    torch.optim.NAdam: {"exp_avg", "exp_avg_sq"},
    torch.optim.RAdam: {"exp_avg", "exp_avg_sq"},
    torch.optim.Adamax: {"exp_avg", "exp_inf"},
    torch.optim.RMSprop: {"square_avg", "momentum_buffer", "grad_avg"},
    torch.optim.Adagrad: {"sum"},
    torch.optim.Adadelta: {"square_avg", "acc_delta"},
    torch.optim.Rprop: {"prev", "step_size"},
    torch.optim.ASGD: {"ax"},
}
"""Optimizers whose step of a value needs its own gradient and history only, and numbers of the
parameter and its group: which of a parameter's state are arrays of its shape.

Not Adafactor (means over rows, columns and the parameter), Muon (matrices), LBFGS, SparseAdam,
nor what isn't torch's own, of which nobody knows."""


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """JobError, with the reason, for an optimizer that slices would make another method."""
    if type(optimizer) not in ELEMENTWISE:
        names = ", ".join(sorted(known.__name__ for known in ELEMENTWISE))
        raise JobError(
            [f'overlap = "layers": {title(optimizer)} is not known to be elementwise, and '
             "blocks of layers begin and end inside parameters, where it would silently become "
             f'another method; give overlap="auto", or one of torch.optim\'s {names}']
        )  # fmt: skip


@dataclass
class Whole:
    """What a step's slices of one parameter add up to."""

    slices: int
    """blocks that the parameter reaches into"""
    done: int = 0
    state: dict[str, Any] = field(default_factory=dict)
    """values that the step made: the parameter's own when all slices are done"""


class Sliced:
    """Local steps, one a block of columns, that together are one step of the optimizer.

    They may come in any order. The state stays where the optimizer has it, by parameter.
    """

    def __init__(
        self, vector: Parameters, optimizer: torch.optim.Optimizer, blocks: Sequence[slice]
    ):
        """``optimizer``: one of `ELEMENTWISE`, of parameters in ``vector``, which has one row."""
        self._vector, self._inner, self._blocks = vector, optimizer, blocks
        (self._parameters,), flat = vector.rows, vector.flat
        place = {id(p): k for k, p in enumerate(self._parameters)}
        self._members: list[list[list[tuple[int, slice]]]] = []  # of each block, by group
        reached = [0] * len(self._parameters)
        for block in blocks:
            self._members.append([])
            for group in optimizer.param_groups:
                found = []
                for k in (place[id(p)] for p in group["params"] if id(p) in place):
                    begin, end = flat.offsets[k], flat.offsets[k] + self._parameters[k].numel()
                    part = slice(max(begin, block.start) - begin, min(end, block.stop) - begin)
                    if part.start < part.stop:
                        found.append((k, part))
                        reached[k] += 1
                self._members[-1].append(found)
        self._whole = [Whole(count) for count in reached]
        self._arrays = ELEMENTWISE[type(optimizer)]
        self._steppers = [copy.copy(optimizer) for _ in blocks]

    def local(self, block: int) -> Local:
        """The step of a block's columns: gradients are ``g``, or the parameters' own."""

        def adapt(x, g, state: Empty, step: Step, out):
            if out is not x:
                out.copy_(x)
            if not step.skipped:
                self._step(block, out[0], None if g is None else g[0])
            return state

        return Local(no_state, adapt, raw=True)

    def _step(self, block: int, out: torch.Tensor, g: torch.Tensor | None) -> None:
        """Step the block's slices where they lie in ``out``; ``g``: their gradients."""
        stepper, offsets = self._steppers[block], self._vector.flat.offsets
        stepper.state, stepper.param_groups = defaultdict(dict), []
        stepped = []
        for group, members in zip(self._inner.param_groups, self._members[block], strict=True):
            here = []
            for k, part in members:
                grad = self._parameters[k].grad
                if g is None and grad is None:
                    continue
                at = offsets[k] - self._blocks[block].start
                values = out[at + part.start : at + part.stop]
                if g is None:
                    values.grad = self._flat(k, grad)[part]
                else:
                    values.grad = g[at + part.start : at + part.stop]
                here.append(values)
                given = self._given(k, part)
                stepper.state[values].update(given)
                stepped.append((k, part, values, given))
            stepper.param_groups.append({**group, "params": here})
        stepper.step()
        for k, part, values, given in stepped:
            self._take(k, part, given, stepper.state[values])

    def _given(self, k: int, part: slice) -> dict[str, Any]:
        """The parameter's state before the step: a slice of its arrays, and its numbers."""
        p, given, alone = self._parameters[k], {}, self._whole[k].slices == 1
        state = self._inner.state.get(p, {})
        for key, value in state.items():
            if not isinstance(value, torch.Tensor):
                given[key] = value
            elif key in self._arrays:
                flat = self._flat(k, value)
                if flat.data_ptr() != value.data_ptr():  # laid out, or kept, in another way
                    state[key] = self._shaped(k, flat)
                given[key] = flat[part]
            else:  # the other slices begin with it, too
                given[key] = value if alone else value.clone()
        return given

    def _take(self, k: int, part: slice, given: dict[str, Any], after: dict[str, Any]) -> None:
        """Keep what the step of a slice made; the last one gives it to the parameter."""
        p, whole = self._parameters[k], self._whole[k]
        for key, value in after.items():
            if key not in self._arrays or not isinstance(value, torch.Tensor):
                whole.state[key] = value
            elif value is not given.get(key):
                if key not in whole.state:
                    empty = torch.empty(p.numel(), device=value.device)
                    whole.state[key] = self._shaped(k, empty)
                self._flat(k, whole.state[key])[part] = value
        whole.done += 1
        if whole.done == whole.slices:
            self._inner.state[p].update(whole.state)
            whole.done, whole.state = 0, {}

    def _flat(self, k: int, tensor: torch.Tensor) -> torch.Tensor:
        """Values of the parameter's shape as float32 (numel,), in the order of the vector."""
        if tensor.is_sparse:
            raise JobError(
                [f"parameter {self._vector.flat.names[k]} has a sparse gradient, which has no "
                 'slices; give its layer sparse=False, or Gossip overlap="auto"']
            )  # fmt: skip
        if tensor.stride() != self._vector.flat.strides[k] or tensor.dtype != torch.float32:
            empty = torch.empty(tensor.numel(), device=tensor.device)
            tensor = self._shaped(k, empty).copy_(tensor)
        return tensor.as_strided((tensor.numel(),), (1,))

    def _shaped(self, k: int, values: torch.Tensor) -> torch.Tensor:
        """The inverse: (numel,) in the parameter's shape."""
        return values.as_strided(self._parameters[k].shape, self._vector.flat.strides[k])

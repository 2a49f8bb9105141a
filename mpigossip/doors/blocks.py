"""Layers sent during a user's backward pass, and what a loop may not do meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from mpigossip.algorithms import Algorithm, takes_local
from mpigossip.algorithms.local import Local
from mpigossip.config import Job, JobError
from mpigossip.doors.equal_start import SIGNATURE
from mpigossip.doors.sliced_optimizer import Sliced, check_elementwise
from mpigossip.engine.module import Parameters
from mpigossip.engine.overlap import Blocks
from mpigossip.engine.step import Engine
from mpigossip.graphs import Graph
from mpigossip.mixing.base import ByBlocks
from mpigossip.training.assemble import make_cadence, make_method

INSTEAD = (
    "put all but the last backward pass of a step into `with optimizer.no_sync():`, or give "
    'Gossip overlap="auto"'
)


def check(job: Job, graph: Graph, optimizer: torch.optim.Optimizer, slots: int) -> None:
    """JobError where layers can't be sent before the whole gradient is there."""
    method, why = make_method(job, 0, graph, SIGNATURE), None
    if not make_cadence(job, method, graph).turns.plain:
        why = "fragments travel after the step (cadence.delay hides them behind the next ones)"
    elif not method.by_columns:
        why = f'algorithm.name = "{job.algorithm.name}" sends '
        why += "before there is a gradient" if method.ahead else "whole models only"
    elif job.node.mixer != "synchronous":
        why = f'node.mixer = "{job.node.mixer}" shows whole models only'
    elif job.run.survive:
        why = "run.survive = true: a loss in the middle of backward can't be taken back"
    elif slots > 1:
        why = f"gradients of {slots} devices are averaged after backward"
    if why is not None:
        raise JobError([f'overlap = "layers": {why}; give overlap="auto"'])
    if takes_local(job.algorithm.name):
        check_elementwise(optimizer)


class Used(NamedTuple):
    """A gradient as it was when its parameter was sent."""

    grad: torch.Tensor | None
    version: int
    value: str
    """one of its values: all-reduces write memory without telling torch"""
    parameter: tuple[int, int]
    """its memory, and how often it had been changed in place"""

    @classmethod
    def of(cls, p: torch.Tensor) -> Used:
        """As it is now."""
        parameter = p.data_ptr(), p._version
        if p.grad is None:
            return cls(None, 0, "", parameter)
        one = p.grad.coalesce().values() if p.grad.is_sparse else p.grad
        value = float(one[(0,) * one.dim()]) if one.numel() else 0.0
        return cls(p.grad, p.grad._version, value.hex(), parameter)

    def same(self, other: Used) -> bool:
        """Whether it is this very gradient, unchanged."""
        return self.grad is other.grad and self[1:3] == other[1:3]


class Layers:
    """The step that a backward pass begins: its blocks are sent as their gradients are final.

    x stays as it is until the step ends: what is sent is written into the outbox. Every backward
    pass outside :meth:`no_sync` is a step's last.
    """

    def __init__(
        self,
        model: nn.Module,
        vector: Parameters,
        optimizer: torch.optim.Optimizer,
        make: Callable[[Local], Algorithm],
        gather: Callable[[Sequence[int]], None],
        rate: Callable[[], float],
    ):
        """``make``: the method over a local step; ``rate``: the learning rate of now.

        ``gather``: brings gradients of parameters where the method reads them.
        """
        self._model, self._vector, self._inner = model, vector, optimizer
        self._make, self._gather, self._rate = make, gather, rate
        self._engine: Engine | None = None
        self._blocks: Blocks | None = None
        self._used: dict[int, Used] = {}
        self._numbers: list[dict[str, Any]] = []

    def cut(self, by: ByBlocks) -> Blocks:
        """The blocks of a mixer that sends some."""
        sliced = Sliced(self._vector, self._inner, by.blocks)
        methods = [self._make(sliced.local(block)) for block in range(len(by.blocks))]
        return Blocks(by, methods, self._vector.flat, self._model, INSTEAD)

    def begin(self, engine: Engine) -> None:
        """Let the next backward pass send, where the step is one that exchanges with neighbours."""
        engine.ahead()
        self._engine, self._blocks = engine, engine.sends_early()
        if self._blocks:
            self._blocks.watch(1, self._ready)

    def _ready(self, block: int) -> None:
        """Take the local step of a block and send it; the first time, remember by which numbers."""
        engine, blocks = self._engine, self._blocks
        assert engine is not None and blocks is not None
        if not self._used:
            self._vector.check()
            self._numbers = _numbers(self._inner)
        new = [k for k in blocks.within[block] if k not in self._used]
        self._used |= {k: Used.of(self._vector.rows[0][k]) for k in new}
        with torch.no_grad():
            self._gather(new)
            engine.early(block, self._rate())

    def end(self) -> bool:
        """Send what is left; whether a backward pass, or this, has sent the step's gradients.

        JobError where something changed after it was used.
        """
        if self._blocks is None:
            return False
        for k, used in self._used.items():
            name, now = self._vector.flat.names[k], Used.of(self._vector.rows[0][k])
            if now.parameter != used.parameter:
                raise _changed(f"parameter {name} was")
            if not now.same(used):
                raise _changed(f"the gradient of {name} was")
        if self._used and self._numbers != _numbers(self._inner):
            raise _changed("the optimizer's numbers (learning rate, decay, …) were")
        self._blocks.rest()
        self._blocks, self._used = None, {}
        return True

    def stop(self) -> None:
        """Send nothing more during backward until :meth:`begin`."""
        if self._blocks is not None:
            self._blocks.unwatch()
        self._blocks, self._used = None, {}

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward passes add up gradients, and nothing is sent."""
        with self._blocks.paused() if self._blocks is not None else nullcontext():
            yield

    def between(self, what: str) -> None:
        """JobError where a step has begun: part of the optimizer's state is that after it."""
        if self._used:
            raise JobError(
                [f'{what} between backward and step(): with overlap="layers" the step has begun '
                 "with backward; call it after step()"]
            )  # fmt: skip


def _numbers(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The groups' settings, as plain values."""
    return [
        {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in each.items()}
        for each in ({**group, "params": None} for group in optimizer.param_groups)
    ]


def _changed(what: str) -> JobError:
    return JobError(
        [f"{what} changed between backward and step(), after layers had been sent: clipping, a "
         "GradScaler, an all-reduce (DDP) and schedulers come too late there; change numbers "
         'before backward, or give Gossip overlap="auto"']
    )  # fmt: skip

"""Custom cadences, graphs, algorithms and models of these rows; importing adds the cadences."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from mpigossip import models
from mpigossip.algorithms import cadence, diloco, gossip
from mpigossip.algorithms.base import Algorithm, Decay, Step
from mpigossip.algorithms.cadence import Cadence, fixed_schedule
from mpigossip.cluster.launcher import launcher_ranks
from mpigossip.config import BuilderSpec
from mpigossip.config.limits import AboveZero, Count, NotNegative, OneOrMore, Positive, Share
from mpigossip.graphs import graph
from mpigossip.graphs.rounds import Round
from mpigossip.mixing.base import ExchangeKind


def exact_parts(*, first: Share = 0.0, last: Share = 0.0, total: Positive | None = None) -> Cadence:
    """Build a cadence: GLOBAL in the ``first`` and ``last`` fraction of steps, otherwise GOSSIP."""
    begin = first * (total or 0)
    end = (1 - last) * (total or 0)
    return fixed_schedule(
        lambda index: ExchangeKind.GOSSIP if begin <= index < end else ExchangeKind.GLOBAL,
        ExchangeKind.GOSSIP,
        ExchangeKind.GLOBAL,
    )


def warm_periodic(*, warm: Count = 0, period: Positive = 16) -> Cadence:
    """Build a cadence: GLOBAL for ``warm`` steps, then at every ``period``-th step."""
    return fixed_schedule(
        lambda index: (
            ExchangeKind.GLOBAL if index < warm or not (index + 1) % period else ExchangeKind.LOCAL
        ),
        ExchangeKind.GLOBAL,
        ExchangeKind.LOCAL,
    )


def static_first(n: int, seed: int, t: int, *, first: int = 0) -> Round:
    """Return the static exponential graph for ``first`` rounds, then the one-peer sequence."""
    return graph("exponential" if t < first else "one-peer-exponential", n).round(t)


class Smoothed(NamedTuple):
    """State of the inner algorithm, and the running mean of x."""

    inner: Any
    mean: torch.Tensor


def _ending_in_mean(method: Algorithm, decay: float, total: int) -> Algorithm:
    """Return the algorithm with x replaced by its exponential moving average at step ``total``.

    The average over nodes is linear, so the averaged model becomes the EMA of the average.
    """

    def init(x):
        return Smoothed(method.init(x), x.clone())

    def send(x, g, state, out, step: Step):
        return state._replace(inner=method.send(x, g, state.inner, out, step))

    def receive(x, g, state, sent, mixed, step: Step):
        inner = method.receive(x, g, state.inner, sent, mixed, step)
        state.mean.lerp_(x, 1 - decay)
        if step.index == total - 1:
            x.copy_(state.mean)
        return state._replace(inner=inner)

    return method._replace(
        init=init, send=send, receive=receive, local_update=None, takes_mixed=False
    )


def ema_dmsgd(local, *, decay: Decay = 0.99, total: Positive = 1) -> Algorithm:
    """Build DmSGD that ends with the EMA of its models."""
    return _ending_in_mean(gossip.dmsgd(local), decay, total)


def ema_parallel(local, *, decay: Decay = 0.99, total: Positive = 1) -> Algorithm:
    """Build parallel SGD that ends with the EMA of its models."""
    return _ending_in_mean(gossip.parallel(local), decay, total)


def warm_diloco(
    local, *, warm: Count = 0, outer_lr: AboveZero = 0.7, outer_beta: Decay = 0.9
) -> Algorithm:
    """Build DiLoCo after ``warm`` steps of plain averages of models; the inner state is kept."""
    cold = diloco.diloco(local, outer_lr=outer_lr, outer_beta=outer_beta)

    def receive(x, g, state, sent, mixed, step: Step):
        if step.index >= warm:
            return cold.receive(x, g, state, sent, mixed, step)
        x.copy_(mixed[0])
        state.anchor.copy_(x)
        return state

    return cold._replace(receive=receive)


def after_parallel(
    local,
    *,
    warm: Count = 0,
    outer_lr: AboveZero = 0.7,
    outer_beta: Decay = 0.9,
    drop: bool = False,
) -> Algorithm:
    """Build DiLoCo that continues parallel's first ``warm`` steps, bitwise identically.

    ``drop`` resets Adam's state at that point.
    """

    def adapt(x, g, state, step: Step, out):
        if drop and step.index >= warm:
            if step.index == warm:
                for array in state:
                    array.zero_()
            step = step._replace(index=step.index - warm)
        return local.adapt(x, g, state, step, out)

    inner = local._replace(adapt=adapt)
    before = gossip.parallel(local)
    cold = diloco.diloco(inner, outer_lr=outer_lr, outer_beta=outer_beta)

    def send(x, g, state, out, step: Step):
        if step.index >= warm:
            return cold.send(x, g, state, out, step)
        return state._replace(inner=before.send(x, g, state.inner, out, step))

    def receive(x, g, state, sent, mixed, step: Step):
        if step.index >= warm:
            return cold.receive(x, g, state, sent, mixed, step)
        made = before.receive(x, g, state.inner, sent, mixed, step)
        state.anchor.copy_(x)
        return state._replace(inner=made)

    return cold._replace(send=send, receive=receive, takes_mixed=False)


def paces(n: int, seed: int, slow: float, times: float) -> Iterator[np.ndarray]:
    """Yield each step's pace (n,): ``times`` with probability ``slow`` per node, otherwise 1."""
    random = np.random.default_rng(seed)
    while True:
        yield np.where(random.random(n) < slow, times, 1.0)


LAG = 20
"""Upper bound of the steps that a run takes after the step at which it is asked to stop."""


class Paced(torch.nn.Module):
    """Model whose steps take given times on ranks, by sleeping; without ranks it only computes."""

    def __init__(self, inner: torch.nn.Module, padding: int, seconds: Sequence[float]):
        super().__init__()
        self.inner = inner
        self.padding = torch.nn.Parameter(torch.zeros(padding))
        self._seconds = seconds
        self._step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self._seconds:
            time.sleep(self._seconds[self._step])
            self._step += 1
            if self._step == len(self._seconds) - LAG:
                signal.raise_signal(signal.SIGTERM)  # all ranks end after this step
        return self.inner(x) + 0.0 * self.padding[:1].sum()


def paced(
    shape: tuple[int, ...],
    classes: int,
    *,
    padding: Positive = 1,
    compute_s: NotNegative = 0.0,
    slow: Share = 0.0,
    times: OneOrMore = 1.0,
    draw: Count = 0,
    stop: Count = 0,
) -> torch.nn.Module:
    """Build the MLP with ``padding`` more elements per message; it ends the run at ``stop``."""
    seconds: list[float] = []
    if own := next(iter(launcher_ranks(os.environ)), None):
        rank, n, _ = own
        drawn = islice(paces(n, draw, slow, times), stop + LAG)
        seconds = [compute_s * pace[rank] for pace in drawn]
    return Paced(models.mlp(shape, classes), padding, seconds)


cadence.BUILDERS["warm-periodic"] = warm_periodic
cadence.BUILDERS["exact-parts"] = BuilderSpec(
    exact_parts, follows={"total": lambda known: known.total}
)

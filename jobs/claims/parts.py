"""Custom cadences, graphs, algorithms and models for the runs of `designs.py`.

Importing this module adds the cadences to the cadences of the package.
"""

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
from mpigossip.graphs.rounds import Circulant, Round
from mpigossip.mixing.base import ExchangeKind


def exact_parts(*, first: Share = 0.0, last: Share = 0.0, total: Positive | None = None) -> Cadence:
    """Build a cadence: GLOBAL in the ``first`` and ``last`` fraction of steps, otherwise GOSSIP.

    Without ``total``, the number of steps of the run, all steps are GLOBAL.
    """
    begin = first * (total or 0)
    end = (1 - last) * (total or 0)
    return fixed_schedule(
        lambda index: ExchangeKind.GOSSIP if begin <= index < end else ExchangeKind.GLOBAL,
        ExchangeKind.GOSSIP,
        ExchangeKind.GLOBAL,
    )


def warm_periodic(*, warm: Count = 0, period: Positive = 16) -> Cadence:
    """Build a cadence: GLOBAL for ``warm`` steps, then at each ``period``-th; otherwise LOCAL."""
    return fixed_schedule(
        lambda index: (
            ExchangeKind.GLOBAL if index < warm or not (index + 1) % period else ExchangeKind.LOCAL
        ),
        ExchangeKind.GLOBAL,
        ExchangeKind.LOCAL,
    )


def relative_qsr(
    *,
    period: Positive = 4,
    share: AboveZero = 2.0,
    peak: AboveZero = 0.1,
    total: Positive | None = None,
) -> Cadence:
    """Build the quadratic synchronization rule (QSR) with α = ``share`` · ``peak``.

    :param period: smallest period H₀ in steps
    :param share: α in units of ``peak``
    :param peak: largest learning rate of the run
    :param total: number of steps of the run
    """
    return cadence.qsr(period=period, alpha=share * peak, total=total)


def evenly(*, count: Positive = 4, total: Positive | None = None) -> Cadence:
    """Build a cadence: ``count`` GLOBAL steps at equal distances, otherwise LOCAL.

    The last step of the run is GLOBAL. If ``count`` does not divide ``total``, the distances differ
    by at most one step.

    :param count: number of GLOBAL steps
    :param total: number of steps of the run; None: equal to ``count``
    """
    steps = total or count
    return fixed_schedule(
        lambda index: (
            ExchangeKind.GLOBAL
            if (index + 1) * count // steps > index * count // steps
            else ExchangeKind.LOCAL
        ),
        ExchangeKind.GLOBAL,
        ExchangeKind.LOCAL,
    )


def two_rounds(n: int, seed: int, t: int) -> Circulant:
    """Return a round that has the effect of two rounds of the one-peer graph: W = W₂ₜ₊₁ W₂ₜ.

    In two rounds of the one-peer exponential graph, a node sends two messages. In this round, it
    sends up to three, which the logged bytes count.
    """
    one_peer = graph("one-peer-exponential", n)
    first, second = (one_peer.round(2 * t + k).row() for k in (0, 1))
    row = sum(weight * np.roll(first, k) for k, weight in enumerate(second))
    offsets = tuple(int(k) for k in np.flatnonzero(row) if k)
    return Circulant(n, float(row[0]), offsets, tuple(float(row[k]) for k in offsets))


def static_first(n: int, seed: int, t: int, *, first: int = 0) -> Round:
    """Return round ``t`` of a graph that is first static and then one-peer.

    The first ``first`` rounds are rounds of the static exponential graph, and the others are rounds
    of the one-peer exponential graph.
    """
    return graph("exponential" if t < first else "one-peer-exponential", n).round(t)


class Smoothed(NamedTuple):
    """State of an algorithm, and the exponential moving average of the models x."""

    inner: Any
    mean: torch.Tensor


def _ending_in_mean(method: Algorithm, decay: float, total: int) -> Algorithm:
    """Return an algorithm that replaces x by its exponential moving average (EMA) at the end.

    Averages over nodes are linear, so the averaged model at the end is the EMA of the averaged
    models.

    :param method: the inner algorithm
    :param decay: decay of the moving average
    :param total: step at which x is replaced, the last of the run
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
    """Build DmSGD whose result is the exponential moving average of its models.

    :param local: local step, as for `dmsgd`
    :param decay: decay of the moving average per step
    :param total: number of steps of the run, after which the average replaces the model
    """
    return _ending_in_mean(gossip.dmsgd(local), decay, total)


def ema_parallel(local, *, decay: Decay = 0.99, total: Positive = 1) -> Algorithm:
    """Build parallel SGD whose result is the exponential moving average of its models.

    The parameters are the parameters of :func:`ema_dmsgd`.
    """
    return _ending_in_mean(gossip.parallel(local), decay, total)


def warm_diloco(
    local, *, warm: Count = 0, outer_lr: AboveZero = 0.7, outer_beta: Decay = 0.9
) -> Algorithm:
    """Build DiLoCo with a warm start.

    In the first ``warm`` steps, the models are averaged, if the cadence is GLOBAL in each of them,
    as "warm-periodic" is. The state of the local step is kept when DiLoCo begins.

    :param local: local step
    :param warm: number of steps before DiLoCo begins
    :param outer_lr: outer learning rate
    :param outer_beta: outer momentum
    """
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
    """Build DiLoCo that continues a run of parallel SGD.

    The first ``warm`` steps are bitwise identical to parallel SGD, if the cadence is GLOBAL in each
    of them, as "warm-periodic" is.

    :param local: local step, such as AdamW
    :param warm: number of steps before DiLoCo begins
    :param outer_lr: outer learning rate
    :param outer_beta: outer momentum
    :param drop: whether the state of the local step is reset when DiLoCo begins
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
    """Yield for each step an array (n,) with the factors by which nodes are slower.

    :param n: number of nodes
    :param seed: seed of the random numbers
    :param slow: probability with which a node is slow in a step
    :param times: factor of a slow node; the factor of other nodes is 1
    """
    random = np.random.default_rng(seed)
    while True:
        yield np.where(random.random(n) < slow, times, 1.0)


LAG = 20
"""Largest number of steps that a run makes after a step at which it is asked to stop."""


class Paced(torch.nn.Module):
    """Model that sleeps in each training step, so that the step takes a given time.

    When only the last `LAG` entries of ``seconds`` are left, it sends SIGTERM to its own process,
    which ends the run.
    """

    def __init__(self, inner: torch.nn.Module, padding: int, seconds: Sequence[float]):
        """Wrap a model.

        :param inner: model that computes the outputs
        :param padding: number of additional parameters, which do not change the outputs
        :param seconds: seconds of sleep in each step; []: never sleep, as in the simulator
        """
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
    """Build the MLP with steps of a given duration and messages of a given size.

    :param shape: shape of an input
    :param classes: number of classes
    :param padding: number of additional parameters, which only lengthen messages
    :param compute_s: seconds of a step
    :param slow: probability with which a node is slow in a step
    :param times: factor by which a slow node is slower
    :param draw: seed of the slow steps
    :param stop: step at which a run on ranks is asked to stop; it must end within `LAG` further
        steps. In the simulator, no step sleeps, and the run is not asked to stop
    """
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
cadence.BUILDERS["relative-qsr"] = BuilderSpec(
    relative_qsr, follows={"total": lambda known: known.total}
)
cadence.BUILDERS["evenly"] = BuilderSpec(evenly, follows={"total": lambda known: known.total})

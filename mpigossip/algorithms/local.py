"""Local steps: from a gradient to a direction d, the step being x½ = x − lr · d."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from mpigossip.algorithms.base import Decay, Empty, Step, held, no_state
from mpigossip.config.limits import NotNegative, Positive

BLOCK = 1 << 15
"""Columns that a step with a temporary array handles at once on a CPU."""


class Local(NamedTuple):
    """A local optimizer: ``direction(x, g, state, step) -> (d, state)``.

    d may be the memory of g (used up) or of the state: read it before the next call.
    """

    init: Callable[..., Any]
    direction: Callable[..., Any]


def skipping(local: Local) -> Local:
    """The local step with d = 0 and an unchanged state in the rows that ``step.skipped`` names.

    Adam's count of steps goes on in them.
    """

    def direction(x, g, state, step: Step):
        if not step.skipped:
            return local.direction(x, g, state, step)
        with held(step, *state):
            d, after = local.direction(x, g, state, step)
            d = d.clone()  # it may be the state's memory
        d[list(step.skipped)] = 0
        return d, after

    return Local(local.init, direction)


class Momentum(NamedTuple):
    """The momentum buffer m, shaped like x."""

    momentum: torch.Tensor


class Moments(NamedTuple):
    """Adam's running means of g and g², shaped like x."""

    first: torch.Tensor
    second: torch.Tensor


def sgd(decayed: int) -> Local:
    """Plain gradient descent: d = g."""

    def direction(x, g, state: Empty, step: Step):
        return g, state

    return Local(no_state, direction)


def momentum(decayed: int, *, beta: Decay = 0.9) -> Local:
    """Heavy ball (Polyak 1964): m ← β m + g, d = m."""

    def direction(x, g, state: Momentum, step: Step):
        state.momentum.mul_(beta).add_(g)
        return state.momentum, state

    return Local(lambda x: Momentum(torch.zeros_like(x)), direction)


def nesterov(decayed: int, *, beta: Decay = 0.9) -> Local:
    """Nesterov's momentum in the form of torch.optim.SGD: m ← β m + g, d = g + β m."""

    def direction(x, g, state: Momentum, step: Step):
        state.momentum.mul_(beta).add_(g)
        return g.add_(state.momentum, alpha=beta), state

    return Local(lambda x: Momentum(torch.zeros_like(x)), direction)


def adamw(
    decayed: int,
    *,
    beta1: Decay = 0.9,
    beta2: Decay = 0.999,
    eps: NotNegative = 1e-8,
    decoupled_decay: NotNegative = 0.0,
) -> Local:
    """AdamW (Loshchilov & Hutter 2019), bias-corrected.

    m ← β₁m + (1−β₁)g, v ← β₂v + (1−β₂)g², d = m̂/(√v̂ + ε) + λx; the decay λ is applied to the
    first ``decayed`` columns, the parameters that are neither biases nor norms when those are
    to be left alone.
    """

    def direction(x, g, state: Moments, step: Step):
        t = step.index + 1
        state.first.lerp_(g, 1 - beta1)
        state.second.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        d = torch.div(state.second, 1 - beta2**t, out=g).sqrt_().add_(eps)
        torch.div(state.first, d, out=d).div_(1 - beta1**t)
        if decoupled_decay:
            d[:, :decayed].add_(x[:, :decayed], alpha=decoupled_decay)
        return d, state

    return Local(lambda x: Moments(torch.zeros_like(x), torch.zeros_like(x)), direction)


class Accumulated(NamedTuple):
    """Running means of g and g² and the mean gradient of the period so far, shaped like x."""

    first: torch.Tensor
    second: torch.Tensor
    gathered: torch.Tensor


def accumadam(
    decayed: int,
    *,
    period: Positive = 8,
    beta1: Decay = 0.9,
    beta2: Decay = 0.999,
    eps: NotNegative = 1e-8,
    decoupled_decay: NotNegative = 0.0,
) -> Local:
    """AccumAdamW (Wang et al., ICLR 2025): Adam whose moments see the mean of A = ``period`` g.

    s ← s + g/A;  m' = m + (1−β₁) g, v' = v + (1−β₂) g²;  d = m̂'/(√v̂' + ε) + λx, corrected for
    the bias of ⌈t/A⌉ steps. At every A-th step m ← β₁ (m + (1−β₁) s), v ← β₂ (v + (1−β₂) s²),
    s ← 0. A node's moments then look like those of A nodes together.
    """

    def direction(x, g, state: Accumulated, step: Step):
        m, v, s = state
        corrected = -(-(step.index + 1) // period)
        s.add_(g, alpha=1 / period)
        block = BLOCK if x.device.type == "cpu" else max(x.shape[1], 1)
        for at in range(0, x.shape[1], block):
            part = slice(at, at + block)
            below = torch.addcmul(v[:, part], g[:, part], g[:, part], value=1 - beta2)
            below.div_(1 - beta2**corrected).sqrt_().add_(eps)
            above = g[:, part].mul_((1 - beta1) / (1 - beta1**corrected))
            above.add_(m[:, part], alpha=1 / (1 - beta1**corrected)).div_(below)
        if decoupled_decay:
            g[:, :decayed].add_(x[:, :decayed], alpha=decoupled_decay)
        if (step.index + 1) % period == 0:
            m.add_(s, alpha=1 - beta1).mul_(beta1)
            v.addcmul_(s, s, value=1 - beta2).mul_(beta2)
            s.zero_()
        return g, state

    return Local(lambda x: Accumulated(*(torch.zeros_like(x) for _ in range(3))), direction)


LOCALS = {
    "sgd": sgd,
    "momentum": momentum,
    "nesterov": nesterov,
    "adamw": adamw,
    "accumadam": accumadam,
}

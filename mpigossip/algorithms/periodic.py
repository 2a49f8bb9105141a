"""Inner steps at each node and an outer step where models meet: SlowMo, DiLoCo, NoLoCo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from mpigossip.algorithms.base import Algorithm, Decay, Step
from mpigossip.algorithms.gossip import dsgd
from mpigossip.algorithms.local import Local
from mpigossip.config.limits import AboveZero
from mpigossip.mixing.base import Kind


class Outer(NamedTuple):
    """Where the last outer step ended and the outer momentum, shaped like x; the inner state."""

    anchor: torch.Tensor
    slow: torch.Tensor
    inner: Any


def _outer(local: Local, kind: Kind, update: Callable) -> Algorithm:
    """D-PSGD whose exchanges of one kind are followed by ``update(x, state, step)``."""
    base = dsgd(local)

    def init(x) -> Outer:
        return Outer(x.clone(), torch.zeros_like(x), base.init(x))

    def send(x, g, state: Outer, out, step: Step):
        return state._replace(inner=base.send(x, g, state.inner, out, step))

    def receive(x, g, state: Outer, sent, mixed, step: Step):
        state = state._replace(inner=base.receive(x, g, state.inner, sent, mixed, step))
        if step.kind is kind:
            update(x, state, step)
            state.anchor.copy_(x)
        return state

    def alone(x, g, state: Outer, step: Step):
        return state._replace(inner=base.alone(x, g, state.inner, step))

    return base._replace(init=init, send=send, receive=receive, alone=alone)


def slowmo(local: Local, *, slow_beta: Decay = 0.5, slow_lr: AboveZero = 1.0) -> Algorithm:
    """SlowMo (Wang et al., ICLR 2020) over local or gossip steps.

    At each GLOBAL step, x the average, x₀ where the last one ended: u ← β u + (x₀ − x)/lr;
    x ← x₀ − α lr u. The local step's state is kept. One vector travels. Guideline for β: 0.2 at
    4 nodes, 0.5 at 8, 0.6 at 16. Slow momentum multiplies the step by up to 1/(1 − β), on top of
    the local momentum's: β = 0.5 over momentum 0.9 diverged at a rate of 0.05 that momentum alone
    bore; take a smaller schedule.lr or β.
    """

    def update(x, state: Outer, step: Step) -> None:
        state.slow.mul_(slow_beta).add_(state.anchor, alpha=1 / step.lr)
        state.slow.add_(x, alpha=-1 / step.lr)
        torch.add(state.anchor, state.slow, alpha=-slow_lr * step.lr, out=x)

    return _outer(local, Kind.GLOBAL, update)


def diloco(local: Local, *, outer_lr: AboveZero = 0.7, outer_beta: Decay = 0.9) -> Algorithm:
    """DiLoCo (Douillard et al. 2023): many local steps, then Nesterov's step on what they did.

    At each GLOBAL step, x the average, x₀ where the last one ended: Δ = x₀ − x;
    u ← β u + Δ;  x ← x₀ − α (Δ + β u). The inner optimizer (AdamW) keeps its state. One vector
    travels in ``cadence.period`` steps.
    """

    def update(x, state: Outer, step: Step) -> None:
        state.slow.mul_(outer_beta).add_(state.anchor).sub_(x)
        # x₀ − α (x₀ − x) − α β u
        x.sub_(state.anchor).mul_(outer_lr).add_(state.anchor)
        x.add_(state.slow, alpha=-outer_lr * outer_beta)

    return _outer(local, Kind.GLOBAL, update)


def noloco(local: Local, *, outer_lr: AboveZero = 0.7, outer_beta: Decay = 0.5) -> Algorithm:
    """NoLoCo (Kolehmainen et al. 2025): DiLoCo's outer step with one neighbour, no collective.

    At each GOSSIP step, φ where the node's last one ended, a the rate: m ← μ m + a (x̃ − φ);
    φ ← φ + m;  x ← φ, x̃ the average of x with the neighbour's. (The paper's a · mean(x − φ) +
    a · (mean(φ) − φ_i) in one: one vector travels in place of two.) Needs cadence "every".
    """

    def update(x, state: Outer, step: Step) -> None:
        state.slow.mul_(outer_beta).add_(x, alpha=outer_lr).add_(state.anchor, alpha=-outer_lr)
        torch.add(state.anchor, state.slow, out=x)

    return _outer(local, Kind.GOSSIP, update)

"""DiLoCo and its kin: local steps, then an outer step where models meet (SlowMo, SparseLoCo, …)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from mpigossip.algorithms.base import Algorithm, Decay, Step, init_from, inner_update
from mpigossip.algorithms.gossip import AVERAGING
from mpigossip.algorithms.local import Local
from mpigossip.config.limits import AboveZero, Positive, Share
from mpigossip.mixing.base import ExchangeKind


class Outer(NamedTuple):
    """End of the last outer step and the outer momentum, shaped like x; the inner state."""

    anchor: torch.Tensor
    slow: torch.Tensor
    inner: Any


def _outer(local: Local, kind: ExchangeKind, update: Callable) -> Algorithm:
    """D-PSGD whose exchanges of one kind are followed by ``update(x, state, step)``."""

    def send(x, g, state: Outer, out, step: Step):
        return state._replace(inner=local.adapt(x, g, state.inner, step, out[0]))

    def receive(x, g, state: Outer, sent, mixed, step: Step):
        x.copy_(mixed[0])
        if step.kind is kind and not step.waits:
            update(x, state, step)
            state.anchor.copy_(x)
        return state

    init = init_from(Outer, torch.clone, torch.zeros_like, local.init)
    made = Algorithm(
        init, send, receive, inner_update(local.update), raw=local.raw, needs=AVERAGING
    )
    return made._replace(takes_mixed=True)


def slowmo(local: Local, *, slow_beta: Decay = 0.5, slow_lr: AboveZero = 1.0) -> Algorithm:
    """SlowMo (Wang et al., ICLR 2020) over local or gossip steps.

    At each GLOBAL step, x the average, x₀ where the last one ended: u ← β u + (x₀ − x)/lr;
    x ← x₀ − α lr u. The local step's state is kept. One vector is sent. Guideline for β: 0.2 at
    4 nodes, 0.5 at 8, 0.6 at 16. Slow momentum multiplies the step by up to 1/(1 − β), on top of
    the local momentum's: β = 0.5 over momentum 0.9 diverged at a rate of 0.05 that momentum alone
    bore; take a smaller schedule.lr or β.
    """

    def update(x, state: Outer, step: Step) -> None:
        state.slow.mul_(slow_beta).add_(state.anchor, alpha=1 / step.lr)
        state.slow.add_(x, alpha=-1 / step.lr)
        torch.add(state.anchor, state.slow, alpha=-slow_lr * step.lr, out=x)

    return _outer(local, ExchangeKind.GLOBAL, update)


def diloco(
    local: Local,
    *,
    outer_lr: AboveZero = 0.7,
    outer_beta: Decay = 0.9,
    eager: bool = False,
    nodes: Positive | None = None,
) -> Algorithm:
    """DiLoCo (Douillard et al. 2023): many local steps, then Nesterov's step on what they did.

    At each GLOBAL step, x the average, x₀ where the last one ended: Δ = x₀ − x;
    u ← β u + Δ;  x ← x₀ − α (Δ + β u). The inner optimizer (AdamW) keeps its state. One vector
    is sent in ``cadence.period`` steps. With ``eager`` (arXiv 2502.12996) Δ is :func:`_eager`'s,
    n = ``nodes``, those of the graph: no node waits for an average, ``cadence.delay`` steps may
    bring it.
    """
    if eager:
        return _eager(local, outer_lr, outer_beta, nodes or 1)

    def update(x, state: Outer, step: Step) -> None:
        state.slow.mul_(outer_beta).add_(state.anchor).sub_(x)
        # x₀ − α (x₀ − x) − α β u
        x.sub_(state.anchor).mul_(outer_lr).add_(state.anchor)
        x.add_(state.slow, alpha=-outer_lr * outer_beta)

    return _outer(local, ExchangeKind.GLOBAL, update)


class Eager(NamedTuple):
    """The node's own outer point and momentum, the others' share of Δ; the inner state."""

    anchor: torch.Tensor
    slow: torch.Tensor
    others: torch.Tensor
    inner: Any


def _eager(local: Local, outer_lr: float, outer_beta: float, nodes: int) -> Algorithm:
    """DiLoCo with eager updates: the own part of Δ is new, that of the others a period old.

    At each GLOBAL step, x after the local steps, x₀ where the node's last one ended:
    δ = x₀ − x is sent;  Δ = δ/n + o;  u ← β u + Δ;  x ← x₀ − α (Δ + β u), at once. What comes is
    for the next time: o ← (1/n) Σ_j δ_j − δ/n. o starts as 0.
    """

    def send(x, g, state: Eager, out, step: Step):
        inner = local.adapt(x, g, state.inner, step, out[0])
        if step.kind is ExchangeKind.GLOBAL:
            own = out[0].neg_().add_(state.anchor)
            torch.add(state.others, own, alpha=1 / nodes, out=x)
            state.slow.mul_(outer_beta).add_(x)
            state.anchor.add_(x, alpha=-outer_lr).add_(state.slow, alpha=-outer_lr * outer_beta)
            x.copy_(state.anchor)
        return state._replace(inner=inner)

    def receive(x, g, state: Eager, sent, mixed, step: Step):
        if step.kind is ExchangeKind.GLOBAL:
            torch.sub(mixed[0], sent[0], alpha=1 / nodes, out=state.others)
        else:
            x.copy_(mixed[0])
        return state

    init = init_from(Eager, torch.clone, torch.zeros_like, torch.zeros_like, local.init)
    needs = frozenset({"never-gossip", "keeps-x"})
    return Algorithm(init, send, receive, inner_update(local.update), raw=local.raw, needs=needs)


def noloco(local: Local, *, outer_lr: AboveZero = 0.7, outer_beta: Decay = 0.5) -> Algorithm:
    """NoLoCo (Kolehmainen et al. 2025): DiLoCo's outer step with one neighbour, no collective.

    At each GOSSIP step, φ where the node's last one ended, a the rate, ⟨·⟩ the average with the
    neighbour: m ← μ m + a ⟨x − φ⟩ + a (⟨φ⟩ − φ);  φ ← φ + m;  x ← φ. As ⟨x − φ⟩ + ⟨φ⟩ = ⟨x⟩,
    x alone is sent, where the paper sends two vectors. Needs cadence "every".
    """

    def update(x, state: Outer, step: Step) -> None:
        state.slow.mul_(outer_beta).add_(x, alpha=outer_lr).add_(state.anchor, alpha=-outer_lr)
        torch.add(state.anchor, state.slow, out=x)

    return _outer(local, ExchangeKind.GOSSIP, update)


def gasloc(
    local: Local, *, outer_lr: AboveZero = 0.7, outer_beta: Decay = 0.0, consensus_step: Share = 1.0
) -> Algorithm:
    """GASLoC (2026, arXiv 2606.11081): gossip, local steps and an outer momentum in one.

    At each exchange, θ where the node's last one ended, x after the local steps since:
    y = θ + η (x − θ);  θ ← y + α Σ_j W_ij (y_j − y) + γ (y − y'), y' the node's last y;  x ← θ.
    η = ``outer_lr``, γ = ``outer_beta`` (0: not accelerated; √ of the spectral gap counts instead
    of the gap with it), α = ``consensus_step``. On the complete graph the mean of the nodes does
    what DiLoCo's does. One vector is sent.
    """

    def send(x, g, state: Outer, out, step: Step):
        inner = local.adapt(x, g, state.inner, step, x)
        if step.waits:
            out[0].copy_(x)
        else:
            torch.sub(x, state.anchor, out=out[0]).mul_(outer_lr).add_(state.anchor)
        return state._replace(inner=inner)

    def receive(x, g, state: Outer, sent, mixed, step: Step):
        if step.kind is ExchangeKind.LOCAL:
            return state
        if step.waits:
            x.copy_(mixed[0])
            return state
        before = state.slow
        y = sent[0]
        torch.sub(mixed[0], y, out=x).mul_(consensus_step).add_(y)
        x.add_(y, alpha=outer_beta).sub_(before, alpha=outer_beta)
        before.copy_(y)
        state.anchor.copy_(x)
        return state

    init = init_from(Outer, torch.clone, torch.clone, local.init)
    return Algorithm(
        init, send, receive, inner_update(local.update), raw=local.raw, needs=AVERAGING
    )


class Sparse(NamedTuple):
    """End of the last outer step, the error of the wire so far; the inner state."""

    anchor: torch.Tensor
    error: torch.Tensor
    inner: Any


def sparseloco(local: Local, *, outer_lr: AboveZero = 1.0, memory: Share = 0.95) -> Algorithm:
    """SparseLoCo (2025, arXiv 2508.15706): steps along what a wire takes of nodes' ways.

    At each GLOBAL step, θ where the last one ended, equal on all nodes, x after the local steps
    since: e ← β e + θ − x;  q = C(e) is sent, C the wire;  e ← e − q;  θ ← θ − α (1/n) Σ_j q_j;
    x ← θ. β = ``memory``, in place of an outer momentum; α = ``outer_lr``. The paper's wire is
    "top-k-int2" with ``node.density`` from 0.01 to 0.03. Between neighbours only: ``choco``.
    """

    def send(x, g, state: Sparse, out, step: Step):
        inner = local.adapt(x, g, state.inner, step, out[0])
        if step.kind is ExchangeKind.GLOBAL:
            state.error.mul_(memory).add_(state.anchor).sub_(out[0])
            out[0].copy_(state.error)
        return state._replace(inner=inner)

    def receive(x, g, state: Sparse, sent, mixed, step: Step):
        if step.kind is ExchangeKind.GLOBAL:
            state.error.sub_(sent[0])
            x.copy_(state.anchor.sub_(mixed[0], alpha=outer_lr))
        else:
            x.copy_(mixed[0])
        return state

    init = init_from(Sparse, torch.clone, torch.zeros_like, local.init)
    needs = frozenset({"own-wire", "never-gossip"})
    return Algorithm(init, send, receive, inner_update(local.update), raw=local.raw, needs=needs)


def sparta(local: Local) -> Algorithm:
    """SPARTA (2025, as in exogym): each step averages a few of the parameters.

    x ← x − lr · d, then those values that the wire "shared-k" takes, the same on all nodes, become
    their average: over all nodes with cadence "global", over neighbours with "always".
    ``node.density``, their fraction, is 0.001 to 0.01 in the source. Any other wire that
    every node draws alike would do.
    """

    def send(x, g, state, out, step: Step):
        state = local.adapt(x, g, state, step, x)
        out[0].copy_(x)
        return state

    def receive(x, g, state, sent, mixed, step: Step):
        # x − sent is 0 where it was taken: mixed to the bit
        if step.kind is not ExchangeKind.LOCAL:
            x.sub_(sent[0]).add_(mixed[0])
        return state

    needs = frozenset({"own-wire", "shared-wire", "row-stochastic"})
    return Algorithm(local.init, send, receive, local.update, raw=local.raw, needs=needs)

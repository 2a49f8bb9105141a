"""DiLoCo and similar algorithms with an outer step after each exchange, and SPARTA without it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from mpigossip.algorithms.base import Algorithm, Decay, Step, init_from, inner_update
from mpigossip.algorithms.gossip import AVERAGING
from mpigossip.algorithms.local import Local
from mpigossip.algorithms.outer_optimizers import OuterOptimizer
from mpigossip.config import JobError
from mpigossip.config.limits import AboveZero, Positive, Share
from mpigossip.config.toml import show
from mpigossip.mixing.base import ExchangeKind

OUTER_LR = 0.7
OUTER_BETA = 0.9
"""Learning rate and momentum of DiLoCo's outer step in its paper."""


class Outer(NamedTuple):
    """State: model after the last outer step, outer momentum, and the local step's state."""

    anchor: torch.Tensor
    slow: torch.Tensor
    inner: Any


class ByOptimizer(NamedTuple):
    """State: model after the last outer step, and the states of outer optimizer and local step."""

    anchor: torch.Tensor
    outer: Any
    inner: Any


def _outer(
    local: Local,
    kind: ExchangeKind,
    update: Callable,
    state_type: type = Outer,
    init_outer: Callable = torch.zeros_like,
) -> Algorithm:
    """Return D-PSGD with an outer step ``update(x, state, step)`` after each exchange of ``kind``.

    The kind is GOSSIP or GLOBAL. Other exchanges average only.

    :param local: local step
    :param kind: kind of the exchanges that an outer step follows
    :param update: function that makes the outer step: x is the average when it is called, and the
        new model when it returns
    :param state_type: class of the state, with the fields anchor, state of the outer step, inner
    :param init_outer: function (x) -> state of the outer step
    """

    def send(x, g, state, out, step: Step):
        return state._replace(inner=local.adapt(x, g, state.inner, step, out[0]))

    def receive(x, g, state, sent, mixed, step: Step):
        x.copy_(mixed[0])
        if step.kind is kind and not step.waits:
            update(x, state, step)
            state.anchor.copy_(x)
        return state

    init = init_from(state_type, torch.clone, init_outer, local.init)
    algorithm = Algorithm(
        init, send, receive, inner_update(local.update), raw=local.raw, needs=AVERAGING
    )
    return algorithm._replace(takes_mixed=True)


def slowmo(local: Local, *, slow_beta: Decay = 0.5, slow_lr: AboveZero = 1.0) -> Algorithm:
    """Add a slow momentum to local or gossip steps.

    This is SlowMo (Wang et al., ICLR 2020). Each GLOBAL step is followed by an outer step. Let x be
    the global average, x₀ the model after the last outer step, and u the slow momentum, which
    starts as 0:

    u ← β u + (x₀ − x)/lr;  x ← x₀ − α lr u.

    The outer step does not change the state of the local step. One vector is sent.

    Guideline for β: 0.2 with 4 nodes, 0.5 with 8, 0.6 with 16. Slow momentum multiplies the
    effective step by up to 1/(1 − β), in addition to the local momentum. β = 0.5 with a local
    momentum of 0.9 diverged at a learning rate of 0.05, at which the local momentum alone
    converged. If a run diverges, use a smaller schedule.lr or β.

    :param local: local step
    :param slow_beta: β, factor of the slow momentum
    :param slow_lr: α, learning rate of the outer step
    """

    def update(x, state: Outer, step: Step) -> None:
        state.slow.mul_(slow_beta).add_(state.anchor, alpha=1 / step.lr)
        state.slow.add_(x, alpha=-1 / step.lr)
        torch.add(state.anchor, state.slow, alpha=-slow_lr * step.lr, out=x)

    return _outer(local, ExchangeKind.GLOBAL, update)


def diloco(
    local: Local,
    *,
    outer_lr: AboveZero = OUTER_LR,
    outer_beta: Decay = OUTER_BETA,
    eager: bool = False,
    outer: dict[str, Any] | None = None,
    nodes: Positive | None = None,
) -> Algorithm:
    """Take many local steps, then a Nesterov step along the change that they made.

    This is DiLoCo (Douillard et al. 2023). Each GLOBAL step is followed by an outer step. Let x be
    the global average, x₀ the model after the last outer step, and u the outer momentum, which
    starts as 0:

    Δ = x₀ − x;  u ← β u + Δ;  x ← x₀ − α (Δ + β u).

    The outer step does not change the state of the local step, which is AdamW by default. One
    vector is sent in ``cadence.period`` steps.

    On one node, x is the node's own model, nothing is sent, and this is SNOO (Kallusky et al. 2025,
    arXiv 2510.15830). To find out whether several nodes gain from their exchange, compare them with
    one node that trains on the same total batch: the outer step alone improves AdamW.

    :param local: local step
    :param outer_lr: α, learning rate of the outer step
    :param outer_beta: β, factor of the outer momentum
    :param eager: use eager updates (arXiv 2502.12996): a node takes its outer step at once, with
        the average of the other nodes from the period before. No node waits for the new average,
        which may arrive ``cadence.delay`` steps later
    :param outer: optimizer that makes the outer step with the gradient Δ, instead of Nesterov's
        momentum: ``{ name = "AdamW", lr = 0.1 }`` with a class of torch.optim, or "module:function"
        for another optimizer, and its options. It has to treat each element by itself. None:
        Nesterov's momentum with α and β. torchft's DiLoCo takes such an optimizer, too
    :param nodes: n, number of nodes, for ``eager``; None: the number of nodes of the graph, which
        the job inserts, or 1
    :raises JobError: if ``outer`` is combined with the options that it replaces, or can't be used
    """
    if outer is not None:
        if eager or (outer_lr, outer_beta) != (OUTER_LR, OUTER_BETA):
            raise JobError(
                f"algorithm.outer = {show(outer)}: replaces the outer step that eager, outer_lr "
                "and outer_beta describe: remove these options, and write lr in algorithm.outer"
            )
        return _by_optimizer(local, OuterOptimizer(outer))
    if eager:
        return _eager(local, outer_lr, outer_beta, nodes or 1)

    def update(x, state: Outer, step: Step) -> None:
        state.slow.mul_(outer_beta).add_(state.anchor).sub_(x)
        # The next two lines compute x₀ − α (x₀ − x) − α β u.
        x.sub_(state.anchor).mul_(outer_lr).add_(state.anchor)
        x.add_(state.slow, alpha=-outer_lr * outer_beta)

    return _outer(local, ExchangeKind.GLOBAL, update)


def _by_optimizer(local: Local, outer: OuterOptimizer) -> Algorithm:
    """Return DiLoCo whose outer step is a step of ``outer`` at x₀, with the gradient x₀ − x."""

    def update(x, state: ByOptimizer, step: Step) -> None:
        torch.sub(state.anchor, x, out=x)
        outer.step(state.anchor, x, state.outer)
        x.copy_(state.anchor)

    return _outer(local, ExchangeKind.GLOBAL, update, ByOptimizer, outer.init)


class Eager(NamedTuple):
    """State of :func:`_eager`: outer model x₀, outer momentum u, o, and the local step's state."""

    anchor: torch.Tensor
    slow: torch.Tensor
    others: torch.Tensor
    inner: Any


def _eager(local: Local, outer_lr: float, outer_beta: float, nodes: int) -> Algorithm:
    """Return DiLoCo with eager updates, in which no node waits for the average.

    In the change Δ of the outer step, the node's own part is new, and the part of the other nodes,
    o, is one period old.

    At each GLOBAL step, let x be the model after the local steps and x₀ the model after the node's
    last outer step. δ is sent, and the outer step is taken at once:

    δ = x₀ − x;  Δ = δ/n + o;  u ← β u + Δ;  x ← x₀ − α (Δ + β u).

    The received average (1/n) Σ_j δ_j is used in the next outer step: o starts as 0, and becomes

    o ← (1/n) Σ_j δ_j − δ/n.

    :param local: local step
    :param outer_lr: α
    :param outer_beta: β
    :param nodes: n
    """

    def send(x, g, state: Eager, out, step: Step):
        inner = local.adapt(x, g, state.inner, step, out[0])
        if step.kind is ExchangeKind.GLOBAL:
            delta = out[0].neg_().add_(state.anchor)
            torch.add(state.others, delta, alpha=1 / nodes, out=x)
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
    """Take DiLoCo's outer step with one neighbour, without a collective.

    This is NoLoCo (Kolehmainen et al. 2025). Each GOSSIP step is followed by an outer step. Let φ
    be the model after the node's last outer step, m the outer momentum, which starts as 0, a the
    outer learning rate, and ⟨·⟩ the average of the node and its neighbour:

    m ← μ m + a ⟨x − φ⟩ + a (⟨φ⟩ − φ);  φ ← φ + m;  x ← φ.

    Since ⟨x − φ⟩ + ⟨φ⟩ = ⟨x⟩, only x is sent, while the paper sends two vectors. There is one
    neighbour with the default graph, "random-matching", and there are local steps in between with
    the default cadence, "every". A cadence without GOSSIP steps makes no outer step.

    :param local: local step
    :param outer_lr: a, learning rate of the outer step
    :param outer_beta: μ, factor of the outer momentum
    """

    def update(x, state: Outer, step: Step) -> None:
        state.slow.mul_(outer_beta).add_(x, alpha=outer_lr).add_(state.anchor, alpha=-outer_lr)
        torch.add(state.anchor, state.slow, out=x)

    return _outer(local, ExchangeKind.GOSSIP, update)


def gasloc(
    local: Local, *, outer_lr: AboveZero = 0.7, outer_beta: Decay = 0.0, consensus_step: Share = 1.0
) -> Algorithm:
    """Combine gossip, local steps and an outer momentum.

    This is GASLoC (2026, arXiv 2606.11081). At each exchange, let θ be the model after the node's
    last exchange, x the model after the local steps since then, and y' the value of y at the node's
    last exchange, which starts as the first model:

    y = θ + η (x − θ);  θ ← y + α Σ_j W_ij (y_j − y) + γ (y − y');  x ← θ.

    With γ > 0, the rate of convergence depends on the square root of the spectral gap instead of
    the gap. On the complete graph, the mean of the nodes is updated as by DiLoCo. One vector is
    sent.

    :param local: local step
    :param outer_lr: η, learning rate of the outer step
    :param outer_beta: γ, factor of the outer momentum; 0: no acceleration
    :param consensus_step: α, factor of the step towards the models of the neighbours
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


class SparseState(NamedTuple):
    """State: model θ after the last outer step, error e, and the local step's state."""

    anchor: torch.Tensor
    error: torch.Tensor
    inner: Any


def sparseloco(local: Local, *, outer_lr: AboveZero = 1.0, memory: Share = 0.95) -> Algorithm:
    """Average compressed changes of the nodes' models.

    This is SparseLoCo (2025, arXiv 2508.15706). At each GLOBAL step, let θ be the model after the
    last outer step, equal on all nodes, x the model after the local steps since then, and C the
    wire:

    e ← β e + θ − x;  q = C(e) is sent;  e ← e − q;  θ ← θ − α (1/n) Σ_j q_j;  x ← θ.

    The paper uses the wire "top-k-int2" with ``node.density`` from 0.01 to 0.03. To exchange with
    neighbours only, use ``choco``.

    :param local: local step
    :param outer_lr: α, learning rate of the outer step
    :param memory: β, the fraction of the error e that is kept; it replaces an outer momentum
    """

    def send(x, g, state: SparseState, out, step: Step):
        inner = local.adapt(x, g, state.inner, step, out[0])
        if step.kind is ExchangeKind.GLOBAL:
            state.error.mul_(memory).add_(state.anchor).sub_(out[0])
            out[0].copy_(state.error)
        return state._replace(inner=inner)

    def receive(x, g, state: SparseState, sent, mixed, step: Step):
        if step.kind is ExchangeKind.GLOBAL:
            state.error.sub_(sent[0])
            x.copy_(state.anchor.sub_(mixed[0], alpha=outer_lr))
        else:
            x.copy_(mixed[0])
        return state

    init = init_from(SparseState, torch.clone, torch.zeros_like, local.init)
    needs = frozenset({"own-wire", "never-gossip"})
    return Algorithm(init, send, receive, inner_update(local.update), raw=local.raw, needs=needs)


def sparta(local: Local) -> Algorithm:
    """Average a small fraction of the parameters at each step.

    This is SPARTA, as in EXO Gym (2025). After x ← x − lr · d, the elements that the wire
    "shared-k" selects, which are the same on all nodes, are replaced by their average: over all
    nodes with the cadence "global", over neighbours with "always". ``node.density``, the fraction
    of the elements, is 0.001 to 0.01 in EXO Gym.

    :param local: local step
    """

    def send(x, g, state, out, step: Step):
        state = local.adapt(x, g, state, step, x)
        out[0].copy_(x)
        return state

    def receive(x, g, state, sent, mixed, step: Step):
        # x − sent is exactly 0 for the selected elements, so the sum below sets them to mixed.
        if step.kind is not ExchangeKind.LOCAL:
            x.sub_(sent[0]).add_(mixed[0])
        return state

    needs = frozenset({"own-wire", "shared-wire", "row-stochastic"})
    return Algorithm(local.init, send, receive, local.update, raw=local.raw, needs=needs)

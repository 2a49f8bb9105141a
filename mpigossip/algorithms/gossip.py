"""Algorithms that make a local step and average once: parallel SGD, D-PSGD, DmSGD and variants."""

from functools import partial
from typing import Literal

import torch

from mpigossip.algorithms.base import Algorithm, Decay, Step, preserved
from mpigossip.algorithms.local import Local, Momentum, zeros
from mpigossip.config.limits import Share

AVERAGING = frozenset({"row-stochastic"})
"""Conditions on the graph for plain averaging. If the columns of W do not also sum to one,
averaging is possible, but changes the mean of the nodes.
"""


def parallel(local: Local) -> Algorithm:
    """Average the gradients of all nodes, as training with all-reduce does.

    Parallel SGD: x ← x − lr · d(ḡ), ḡ = (1/n) Σ_j g_j, where d(ḡ) is the direction of the local
    step for the gradient ḡ. Every exchange is a global average of the gradients, so the models of
    all nodes are bitwise identical. ``local`` may be any local step; its state is the same on all
    nodes.
    """

    def send(x, g, state, out, step: Step):
        out[0].copy_(g)
        return state

    def receive(x, g, state, sent, mixed, step: Step):
        return local.adapt(x, g.copy_(mixed[0]), state, step, x)

    return Algorithm(local.init, send, receive, needs=frozenset({"always-global"}))


def dsgd(local: Local, *, style: Literal["atc", "awc"] = "atc") -> Algorithm:
    """Take a local step d and average with the neighbours: D-PSGD (Lian et al. 2017).

    The state of the local step is not exchanged. With the local step "momentum", m ← β m + g, d =
    m, this is "dmsgd-vanilla", which the code published with the paper on exponential graphs runs
    (Ying et al., NeurIPS 2021).

    :param local: any local step
    :param style: "atc", adapt-then-combine: x ← Σ_j W_ij (x_j − lr · d_j). "awc",
        adapt-while-combine: x ← Σ_j W_ij x_j − lr · d_i; this exchange overlaps with the forward
        and backward passes (``ahead``), and decoupled weight decay acts on the mixed model
    """

    def send_adapted(x, g, state, out, step: Step):
        return local.adapt(x, g, state, step, out[0])

    def receive_combined(x, g, state, sent, mixed, step: Step):
        x.copy_(mixed[0])
        return state

    def send_as_is(x, g, state, out, step: Step):
        out[0].copy_(x)
        return state

    def receive_then_adapt(x, g, state, sent, mixed, step: Step):
        return local.adapt(x.copy_(mixed[0]), g, state, step, x)

    algorithm = partial(Algorithm, local.init, takes_mixed=True, raw=local.raw)
    if style == "atc":
        return algorithm(send_adapted, receive_combined, local.update, needs=AVERAGING)
    needs = AVERAGING | {"never-global"}
    return algorithm(send_as_is, receive_then_adapt, ahead=True, needs=needs)


def dmsgd(
    local: Local, *, beta: Decay = 0.9, momentum: Literal["new", "delayed"] = "new"
) -> Algorithm:
    """Average both the momentum and the model: DmSGD, algorithm 1 of Ying et al. 2021.

    m½ = β m + g;  x ← Σ_j W_ij (x_j − lr · m½_j);  m ← Σ_j W_ij m½_j.

    m starts as 0.

    Two vectors are sent.

    :param local: not used, because the momentum is part of the algorithm
    :param beta: β, factor of the momentum
    :param momentum: "new": step along m½; "delayed": step along the old m, which is the other
        possible reading of the paper
    """

    def send(x, g, state: Momentum, out, step: Step):
        torch.mul(state.momentum, beta, out=out[1]).add_(g)
        along = out[1] if momentum == "new" else state.momentum
        torch.add(x, along, alpha=-step.lr, out=out[0])
        for row in step.skipped:
            out[0][row], out[1][row] = x[row], state.momentum[row]
        return state

    def receive(x, g, state: Momentum, sent, mixed, step: Step):
        x.copy_(mixed[0])
        state.momentum.copy_(mixed[1])
        return state

    return Algorithm(zeros(Momentum), send, receive, vectors=2, needs=AVERAGING)


def qg_dmsgd(local, *, beta: Decay = 0.9, mu: Share = 0.1, nesterov: bool = False) -> Algorithm:
    """Use a momentum of the change of the averaged model: QG-DmSGD (Lin et al., ICML 2021).

    m = β m̂ + g;  d = m;  x⁺ = Σ_j W_ij (x_j − lr · d_j);  m̂ ← (1 − μ) m̂ + μ (x − x⁺)/lr.

    m̂ is the momentum, which starts as 0. The displacement x − x⁺ includes the change that
    averaging with the neighbours makes. One vector is sent.

    :param local: not used, because the momentum is part of the algorithm
    :param beta: β, factor of the momentum
    :param mu: μ, weight of the newest displacement in the momentum
    :param nesterov: step along d = g + β m
    """

    def send(x, g, state: Momentum, out, step: Step):
        factor = beta * beta if nesterov else beta
        g.mul_(1 + beta if nesterov else 1.0).add_(state.momentum, alpha=factor)
        torch.add(x, g, alpha=-step.lr, out=out[0])
        for row in step.skipped:
            out[0][row] = x[row]
        return state

    def receive(x, g, state: Momentum, sent, mixed, step: Step):
        if not step.waits:  # the momentum would fade with each exchange of a node that waits
            state.momentum.mul_(1 - mu).add_(x.sub_(mixed[0]), alpha=mu / step.lr)
        x.copy_(mixed[0])
        return state

    return Algorithm(zeros(Momentum), send, receive, needs=AVERAGING)


def decentlam(local, *, beta: Decay = 0.9) -> Algorithm:
    """Remove the bias that momentum adds to DmSGD: DecentLaM (Yuan et al., ICCV 2021).

    g̃ = (x − Σ_j W_ij (x_j − lr · g_j))/lr;  m ← β m + g̃;  x ← x − lr · m.

    W has to be static and symmetric: in a test on a directed one-peer graph, the algorithm
    diverged. All steps have to be of one kind, because the momentum repeats the change that an
    average makes in later steps. One vector is sent.

    :param local: not used, because the momentum is part of the algorithm
    :param beta: β, factor of the momentum
    """

    def send(x, g, state: Momentum, out, step: Step):
        torch.add(x, g, alpha=-step.lr, out=out[0])
        return state

    def receive(x, g, state: Momentum, sent, mixed, step: Step):
        torch.sub(x, mixed[0], out=g)
        with preserved(step, state.momentum):
            state.momentum.mul_(beta).add_(g, alpha=1 / step.lr)
            x.add_(state.momentum, alpha=-step.lr)
        for row in step.skipped:
            x[row] = mixed[0][row]
        return state

    needs = frozenset({"static", "symmetric", "doubly", "unmixed"})
    return Algorithm(zeros(Momentum), send, receive, needs=needs)

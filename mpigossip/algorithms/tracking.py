"""Algorithms for nodes with different data: D², gradient tracking, DeTAG, DeFacto."""

from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from mpigossip.algorithms.base import Algorithm, Decay, Step, init_from, preserved
from mpigossip.algorithms.local import Local
from mpigossip.config.limits import Positive, Share
from mpigossip.mixing.base import ExchangeKind


class Adapted(NamedTuple):
    """State of D²: the last adapted model ψ, shaped like x, and the local step's state."""

    adapted: torch.Tensor
    inner: Any


def d2(local: Local, *, lazy: bool | None = None) -> Algorithm:
    """Repeat the last change of x at each step, which corrects for different data on nodes: D².

    D² (Tang et al. 2018) is also known as exact diffusion (Yuan et al., JMLR 24, 2023, algorithm
    1):

    ψ⁺ = x − lr · d;  φ = ψ⁺ + x − ψ;  x ← W̄ φ.

    ψ starts as x. d is the direction of the local step: the gradient, or a momentum, with which the
    algorithm is EDM. One vector is sent. The rule repeats also the change of x that averaging
    makes, so it diverges if some steps do not average: all steps have to be of one kind.

    :param local: local step
    :param lazy: True: W̄ = (I + W)/2, computed here as ½ (φ + Wφ); False: W̄ = W, which has to be
        static and symmetric with eigenvalues above −1/3; None: W if the graph is known and meets
        this, otherwise (I + W)/2
    """
    damped = lazy in (None, True)

    def send(x, g, state: Adapted, out, step: Step):
        torch.sub(x, state.adapted, out=out[0])
        inner = local.adapt(x, g, state.inner, step, state.adapted)
        out[0].add_(state.adapted)
        return state._replace(inner=inner)

    def receive(x, g, state: Adapted, sent, mixed, step: Step):
        if damped and step.kind is ExchangeKind.GOSSIP:
            torch.add(sent[0], mixed[0], out=x).mul_(0.5)
        else:
            x.copy_(mixed[0])
        return state

    init = init_from(Adapted, torch.clone, local.init)
    proven = set() if damped else {"static", "symmetric", "above -1/3"}
    needs = frozenset({"doubly", "unmixed"} | proven)
    return Algorithm(init, send, receive, raw=local.raw, distinct_state=True, needs=needs)


class Tracking(NamedTuple):
    """State: tracker y and tracked quantity u, both shaped like x, and the local step's state."""

    tracker: torch.Tensor
    tracked: torch.Tensor
    inner: Any


def _track(tracker: torch.Tensor, tracked: torch.Tensor, g: torch.Tensor, beta: float) -> None:
    """Update a tracker y and the quantity u that it tracks: y ← y + u⁺ − u, u ← u⁺ = β u + g.

    The mean of y over the nodes stays equal to the mean of u.
    """
    tracker.add_(g).add_(tracked, alpha=beta - 1)
    tracked.mul_(beta).add_(g)


def dsgt(local: Local, *, style: Literal["atc", "awc"] = "atc") -> Algorithm:
    """Track the mean gradient of all nodes: gradient tracking, DSGT (Pu & Nedić 2021).

    The style "atc" computes

    y½ = y + g − g⁻;  x ← Σ_j W_ij (x_j − lr · y½_j);  y ← Σ_j W_ij y½_j,

    and "awc" computes

    y ← Σ_j W_ij y_j + g − g⁻;  x ← Σ_j W_ij x_j − lr · y.

    The tracker y and the gradient g⁻ of the step before start as 0. If ``local`` has a momentum,
    each node applies it to y. Two vectors are sent. The adapt-then-combine form of the literature,
    y ← W (y + g⁺ − g) with g⁺ at the mixed x, needs two exchanges per step. The form above has the
    same limit and is more stable: it converges on a ring with λ_n = −0.8, on which the form of the
    literature diverges.

    :param local: local step
    :param style: "atc", adapt-then-combine, or "awc", adapt-while-combine, whose exchange overlaps
        with the forward and backward passes
    """
    return _tracking(local, 0.0, style)


def momentum_tracking(local: Local, *, beta: Decay = 0.9, style: Literal["atc", "awc"] = "awc"):
    """Track the mean momentum of all nodes (Takezawa et al., TMLR 2023).

    The style "awc" computes

    u⁺ = β u + g;  y ← Σ_j W_ij y_j + u⁺ − u;  x ← Σ_j W_ij x_j − lr · y.

    u is the momentum of the node, and y the tracker of the mean momentum; both start as 0. The
    correction c of the paper is u − y. Two vectors are sent.

    :param local: local step
    :param beta: β, factor of the momentum; with 0, the algorithm is :func:`dsgt`
    :param style: as in :func:`dsgt`
    """
    return _tracking(local, beta, style)


def _tracking(local: Local, beta: float, style: str) -> Algorithm:
    def send_adapted(x, g, state: Tracking, out, step: Step):
        with preserved(step, state.tracker, state.tracked):
            _track(state.tracker, state.tracked, g, beta)
        out[1].copy_(state.tracker)
        inner = local.adapt(x, g.copy_(state.tracker), state.inner, step, out[0])
        return state._replace(inner=inner)

    def receive_combined(x, g, state: Tracking, sent, mixed, step: Step):
        x.copy_(mixed[0])
        state.tracker.copy_(mixed[1])
        return state

    def send_as_is(x, g, state: Tracking, out, step: Step):
        out[0].copy_(x)
        out[1].copy_(state.tracker)
        return state

    def receive_then_adapt(x, g, state: Tracking, sent, mixed, step: Step):
        state.tracker.copy_(mixed[1])
        with preserved(step, state.tracker, state.tracked):
            _track(state.tracker, state.tracked, g, beta)
        x.copy_(mixed[0])
        inner = local.adapt(x, g.copy_(state.tracker), state.inner, step, x)
        return state._replace(inner=inner)

    init = init_from(Tracking, torch.zeros_like, torch.zeros_like, local.init)
    algorithm = partial(
        Algorithm, init, vectors=2, distinct_state=True, needs=frozenset({"doubly"})
    )
    if style == "atc":
        return algorithm(send_adapted, receive_combined)
    return algorithm(send_as_is, receive_then_adapt, ahead=True)


class Detag(NamedTuple):
    """State of DeTAG, as arrays shaped like x.

    These are the model x̃ and the tracker y, each with its value one step before. ``gathered`` is
    g^k, the sum of the phase's gradients so far, divided by R, and ``momentum`` is v^k.
    """

    model: torch.Tensor
    model_before: torch.Tensor
    tracker: torch.Tensor
    tracker_before: torch.Tensor
    gathered: torch.Tensor
    momentum: torch.Tensor


def _accelerated(z, before, mixed, eta: float, step: Step, first: bool):
    """Return (z_{r+1}, z_r) of accelerated gossip, z_{r+1} = (1 + η) W z_r − η z_{r−1}.

    In the first step of a phase, z_{r−1} is z_r. A LOCAL step leaves both as they are, and a GLOBAL
    step sets both to the average over all nodes.

    :param z: z_r, (rows, p)
    :param before: z_{r−1}, (rows, p), whose memory is overwritten
    :param mixed: W z_r, (rows, p)
    :param eta: η
    :param step: description of the step
    :param first: whether this is the first step of a phase
    """
    if first:
        before.copy_(z)
    if step.kind is ExchangeKind.LOCAL:
        return z, before
    if step.kind is ExchangeKind.GLOBAL:
        return z.copy_(mixed), before.copy_(mixed)
    return before.mul_(-eta).add_(mixed, alpha=1 + eta), z


def detag(local, *, phase: Positive = 2, eta: Share | None = None, beta: Decay = 0.0) -> Algorithm:
    """Track gradients with accelerated gossip, DeTAG (Lu & De Sa, JMLR 24, 2023, algorithm 2).

    Phase k consists of R = ``phase`` steps in which x does not change. In each step, the gradient
    at x is added to g^k with the factor 1/R, and the model x̃ and the tracker y take one step of
    accelerated gossip:

    z_{r+1} = (1 + η) W z_r − η z_{r−1}.

    The end of the phase then computes

    x̃ ← x̃ − lr · y;  y ← y + v^k − v^{k−1} with v^k = β v^{k−1} + g^k;  x ← x̃.

    y and v start as 0. Two vectors are sent, during the forward and backward passes. The paper
    recommends R = ½ max(log n, log(ς₀² T/(Δ L)))/√(1−λ), where T is the number of phases.

    With β > 0, this is DeTAGM (algorithm 4), except that y tracks the newer momentum. Taken
    literally, algorithm 4 uses v^{k+1} = β v^k + g^k one phase later, which is stable only up to
    half the learning rate. Because y is one phase late, momentum reduces the stable learning rate
    in any case: for a curvature L, it is lr · L < 1 − β instead of 2 (1 + β). With R = 1 and η = 0,
    the algorithm is :func:`dsgt` with gradients that are one step late.

    :param local: not used
    :param phase: R, number of steps of a phase
    :param eta: η, factor of the acceleration; None: (1 − √(1−λ²))/(1 + √(1−λ²)), λ = max(|λ_2|,
        |λ_n|), if the graph is static and symmetric, has at most 2048 nodes, and the phase is long
        enough to profit from it, otherwise 0
    :param beta: β, factor of the momentum
    """

    def send(x, g, state: Detag, out, step: Step):
        out[0].copy_(state.model)
        out[1].copy_(state.tracker)
        return state

    def receive(x, g, state: Detag, sent, mixed, step: Step):
        r = step.index % phase
        fast = eta or 0.0
        old = state
        model, before = _accelerated(old.model, old.model_before, mixed[0], fast, step, r == 0)
        y, y_before = _accelerated(old.tracker, old.tracker_before, mixed[1], fast, step, r == 0)
        old.gathered.add_(g, alpha=1 / phase)
        if r == phase - 1 and not step.waits:
            model.add_(y, alpha=-step.lr)
            _track(y, old.momentum, old.gathered, beta)
            old.gathered.zero_()
            x.copy_(model)
        return old._replace(model=model, model_before=before, tracker=y, tracker_before=y_before)

    init = init_from(Detag, torch.clone, torch.clone, *(4 * [torch.zeros_like]))
    needs = frozenset({"doubly", "static", "symmetric"} if eta else {"doubly"})
    return Algorithm(init, send, receive, vectors=2, ahead=True, distinct_state=True, needs=needs)


class Defacto(NamedTuple):
    """State of DeFacto: the model x̃ of the current phase, shaped like x."""

    model: torch.Tensor


def defacto(local, *, length: Positive | None = None) -> Algorithm:
    """Compute SGD on the joint batch exactly, by factors of the exact average.

    This is DeFacto (Lu & De Sa, JMLR 24, 2023, algorithm 1). A phase has 2R steps. In the first R
    steps, which are LOCAL, the gradients g at the unchanged x add up: x̃ ← x̃ − lr · g/R. In the
    next R steps, which are GOSSIP, the nodes compute the exact average by one period of the graph,
    W_{R−1} … W_0 = 11ᵀ/n: x̃ ← W_r x̃. At the end of the phase, x ← x̃.

    This is exactly SGD with a batch of n · R gradients. (The listing in the paper subtracts g after
    the factors, which would leave each node with a different x.) The gradients of the GOSSIP steps
    are not used, so the algorithm attains a theoretical bound rather than being practical. One
    vector is sent.

    :param local: not used
    :param length: R, number of LOCAL steps, and of GOSSIP steps, in a phase; None: the period of
        the graph, which the job inserts, or 1
    """
    rounds = length or 1

    def send(x, g, state: Defacto, out, step: Step):
        out[0].copy_(state.model)
        return state

    def receive(x, g, state: Defacto, sent, mixed, step: Step):
        if step.kind is ExchangeKind.LOCAL:
            state.model.add_(g, alpha=-step.lr / rounds)
            return state
        state.model.copy_(mixed[0])
        if step.round % rounds == rounds - 1:
            x.copy_(state.model)
        return state

    needs = frozenset({"phases", "exact-wire"})
    init = init_from(Defacto, torch.clone)
    return Algorithm(init, send, receive, ahead=True, needs=needs)

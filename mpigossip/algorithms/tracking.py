"""Methods that correct for nodes with different data: D², gradient tracking, DeTAG, DeFacto."""

from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from mpigossip.algorithms.base import Algorithm, Decay, Step, init_from, preserved
from mpigossip.algorithms.local import Local
from mpigossip.config.limits import Positive, Share
from mpigossip.mixing.base import ExchangeKind


class Adapted(NamedTuple):
    """The last adapted model ψ, shaped like x, and the local step's state."""

    adapted: torch.Tensor
    inner: Any


def d2(local: Local, *, lazy: bool | None = None) -> Algorithm:
    """D² (Tang et al. 2018), also exact diffusion (Yuan et al., JMLR 24, 2023, algorithm 1).

    ψ⁺ = x − lr · d;  φ = ψ⁺ + x − ψ;  x ← W̄ φ;  ψ starts as x. d is the gradient or, with
    ``local`` a momentum, EDM. W̄ = (I + W)/2 (``lazy``), formed here as ½ (φ + Wφ); W itself
    needs a static symmetric W with eigenvalues above −1/3. Unset: W where that is so, else W̄.
    One vector is sent. The rule repeats a step's change of x, that of the mixing included, so
    that steps without mixing in between let it diverge: one kind of step only.
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
    """The tracker y, what it tracks (u, shaped like x too), and the local step's state."""

    tracker: torch.Tensor
    tracked: torch.Tensor
    inner: Any


def _track(tracker: torch.Tensor, tracked: torch.Tensor, g: torch.Tensor, beta: float) -> None:
    """One update of a tracker: y ← y + u⁺ − u, u ← u⁺ = β u + g; y and u keep equal means."""
    tracker.add_(g).add_(tracked, alpha=beta - 1)
    tracked.mul_(beta).add_(g)


def dsgt(local: Local, *, style: Literal["atc", "awc"] = "atc") -> Algorithm:
    """Gradient tracking, DSGT (Pu & Nedić 2021): y follows the mean gradient of all nodes.

    ``"atc"``: y½ = y + g − g⁻;  x ← Σ_j W_ij (x_j − lr · y½_j);  y ← Σ_j W_ij y½_j.
    ``"awc"``: y ← Σ_j W_ij y_j + g − g⁻;  x ← Σ_j W_ij x_j − lr · y; the exchange overlaps with
    forward and backward. y and g⁻ start as 0. With ``local`` a momentum, it is applied to y at
    each node. Two vectors are sent. The textbook's adapt-then-combine, y ← W (y + g⁺ − g) with g⁺
    at the mixed x, needs two exchanges a step; this one has the same limit and bears more: it
    converges on a ring with λ_n = −.8 where the textbook's diverges.
    """
    return _tracking(local, 0.0, style)


def momentum_tracking(local: Local, *, beta: Decay = 0.9, style: Literal["atc", "awc"] = "awc"):
    """Momentum tracking (Takezawa et al., TMLR 2023): y follows the mean momentum.

    u⁺ = β u + g;  y ← Σ_j W_ij y_j + u⁺ − u;  x ← Σ_j W_ij x_j − lr · y (the paper's correction
    is c = u − y); ``style`` as in :func:`dsgt`, which is this with β = 0. Two vectors are sent.
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
    made = partial(Algorithm, init, vectors=2, distinct_state=True, needs=frozenset({"doubly"}))
    if style == "atc":
        return made(send_adapted, receive_combined)
    return made(send_as_is, receive_then_adapt, ahead=True)


class Detag(NamedTuple):
    """All shaped like x: gossiped model x̃ and tracker y with their values of a step before.

    ``gathered`` is the phase's mean gradient so far, ``momentum`` v.
    """

    model: torch.Tensor
    model_before: torch.Tensor
    tracker: torch.Tensor
    tracker_before: torch.Tensor
    gathered: torch.Tensor
    momentum: torch.Tensor


def _accelerated(z, before, mixed, eta: float, step: Step, first: bool):
    """z_{r+1} = (1 + η) W z_r − η z_{r−1}, memory afresh in each phase: (z_{r+1}, z_r)."""
    if first:
        before.copy_(z)
    if step.kind is ExchangeKind.LOCAL:
        return z, before
    if step.kind is ExchangeKind.GLOBAL:
        return z.copy_(mixed), before.copy_(mixed)
    return before.mul_(-eta).add_(mixed, alpha=1 + eta), z


def detag(local, *, phase: Positive = 2, eta: Share | None = None, beta: Decay = 0.0) -> Algorithm:
    """DeTAG (Lu & De Sa, JMLR 24, 2023, algorithm 2; with β > 0 algorithm 4, DeTAGM).

    A phase is R = ``phase`` steps with x frozen. In each step x̃ and y take a step of accelerated
    gossip, z_{r+1} = (1 + η) W z_r − η z_{r−1}, and the gradient at x adds to g^k / R. At the
    phase's end x̃ ← x̃ − lr · y;  y ← y + v^k − v^{k−1} with v^k = β v^{k−1} + g^k;  x ← x̃.
    y and v start as 0. Two vectors are sent, during forward and backward. ``local`` is not used.

    η unset: (1 − √(1−λ²))/(1 + √(1−λ²)), λ = max(|λ_2|, |λ_n|), where the phase is long enough
    for it to gain (computed from the graph), else 0. The paper's corollary has R =
    ½ max(log n, log(ς₀² T/(Δ L)))/√(1−λ), T the number of phases.

    With β > 0 y tracks the newer momentum; the letter of algorithm 4, v^{k+1} = β v^k + g^k a
    phase later, bears half the rate. As y is a phase late, momentum bears less in any case:
    lr · L < 1 − β on a curvature L, not 2 (1 + β). R = 1, η = 0 is :func:`dsgt` with gradients one
    step late.
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
    """The model x̃ of the present phase, shaped like x."""

    model: torch.Tensor


def defacto(local, *, length: Positive | None = None) -> Algorithm:
    """DeFacto (Lu & De Sa, JMLR 24, 2023, algorithm 1): SGD by factors of the exact average.

    A phase is 2R steps. In R LOCAL ones the gradients at the frozen x add up, x̃ ← x̃ − lr · g / R;
    R GOSSIP ones apply the factors W_{R−1} … W_0 = J, one period of the graph, x̃ ← W_r x̃; then
    x ← x̃: SGD on the joined batch of n · R gradients, exactly (the paper's listing subtracts g
    after the factors, which would leave each node with its own x). R = ``length``, unset: the
    graph's period. The gradients of the second half are not used: a bound rather than a method.
    One vector is sent. ``local`` is not used.
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

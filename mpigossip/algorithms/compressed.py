"""Algorithms and wrappers for lossy wires, which compress messages.

`difference`, `anchored` and `error_feedback` wrap another algorithm; `choco` is an algorithm.
"""

from typing import Any, NamedTuple

import torch

from mpigossip.algorithms.base import Algorithm, Step, init_from, inner_update, preserved
from mpigossip.algorithms.local import Local
from mpigossip.config.limits import Share
from mpigossip.mixing.base import ExchangeKind


def difference(base: Algorithm) -> Algorithm:
    """Return the algorithm ``base`` for a lossy wire, which keeps the node's own model exact.

    Let x½ be the vector that ``base`` sends, and q_j the vector of node j after the lossy wire.
    ``base`` receives, instead of the average Σ_j W_ij q_j:

    mixed = x½ + (Σ_j W_ij q_j − q_i).

    If W is doubly stochastic, the mean of x½ over all nodes stays exact. In a GLOBAL round, the
    average of the q_j is used unchanged, so that the models of all nodes are bitwise identical.

    x½ is copied when it is sent. If ``base`` is ahead, its ``send`` changes nothing and is called
    again instead of the copy. The copy is not part of the state, because no exchange is open when a
    state is saved.
    """
    buffers: list[tuple[torch.Tensor, ...]] = []

    def copies(out) -> tuple[tuple[torch.Tensor, ...], ...]:
        if not buffers or buffers[0][0].shape != out[0].shape:
            buffers[:] = [tuple(torch.empty_like(part) for part in out) for _ in range(2)]
        return buffers[0], buffers[1]

    def send(x, g, state, out, step: Step):
        state = base.send(x, g, state, out, step)
        if not base.ahead:
            for exact, part in zip(copies(out)[0], out, strict=True):
                exact.copy_(part)
        return state

    def receive(x, g, state, sent, mixed, step: Step):
        if step.kind is not ExchangeKind.GOSSIP:
            return base.receive(x, g, state, sent, mixed, step)
        exact, corrected = copies(sent)
        if base.ahead:
            base.send(x, None, state, exact, step)
        for k, target in enumerate(corrected):
            torch.sub(mixed[k], sent[k], out=target).add_(exact[k])
        return base.receive(x, g, state, exact, corrected, step)

    return base._replace(send=send, receive=receive)


class Anchored(NamedTuple):
    """State of :func:`anchored`: the last global average, and the state of the base algorithm."""

    anchor: torch.Tensor
    inner: Any


def anchored(base: Algorithm) -> Algorithm:
    """Return ``base`` such that its GLOBAL rounds send differences to the last global average.

    ``base`` is an algorithm that sends one vector, x½. Let a be the last global average (0 before
    the first), and C the wire. Node j sends q_j = C(x½_j − a). The average is a + (1/n) Σ_j q_j and
    becomes the new a. The wire thus rounds only the change since the last global average, as in
    cpsgd and diloco, and not the whole model.
    """

    def send(x, g, state: Anchored, out, step: Step):
        inner = base.send(x, g, state.inner, out, step)
        if step.kind is ExchangeKind.GLOBAL:
            out[0].sub_(state.anchor)
        return state._replace(inner=inner)

    def receive(x, g, state: Anchored, sent, mixed, step: Step):
        if step.kind is ExchangeKind.GLOBAL:
            sent = (sent[0] + state.anchor, *sent[1:])
            mixed = (state.anchor.add_(mixed[0]), *mixed[1:])
        inner = base.receive(x, g, state.inner, sent, mixed, step)
        return state._replace(inner=inner)

    init = init_from(Anchored, torch.zeros_like, base.init)
    update = base.local_update and inner_update(base.local_update)
    return base._replace(init=init, send=send, receive=receive, local_update=update)


class Feedback(NamedTuple):
    """State of :func:`error_feedback`: error of the wire so far, and the base algorithm's state."""

    error: torch.Tensor
    inner: Any


def error_feedback(base: Algorithm) -> Algorithm:
    """Return ``base``, an algorithm that sends gradients, with error feedback for a biased wire.

    This is EF-SGD (Karimireddy et al., ICML 2019). With C the wire, g the gradient, and e the
    accumulated error, which starts as 0:

    q = C(g + e) is sent;  e ← g + e − q is kept for the next step.
    """

    def send(x, g, state: Feedback, out, step: Step):
        inner = base.send(x, g, state.inner, out, step)
        out[0].add_(state.error)
        state.error.copy_(out[0])
        return state._replace(inner=inner)

    def receive(x, g, state: Feedback, sent, mixed, step: Step):
        # A skipped step is discarded, so its error has to be sent again.
        with preserved(step, state.error):
            state.error.sub_(sent[0])
        return state._replace(inner=base.receive(x, g, state.inner, sent, mixed, step))

    init = init_from(Feedback, torch.zeros_like, base.init)
    return base._replace(init=init, send=send, receive=receive, local_update=None)


class Choco(NamedTuple):
    """State of CHOCO-SGD: public copy x̂, memory s = Σ_j W_ij x̂_j, and the local step's state."""

    public: torch.Tensor
    memory: torch.Tensor
    inner: Any


def choco(local: Local, *, consensus_step: Share | None = None) -> Algorithm:
    """Gossip compressed differences, with a memory of the neighbours.

    This is CHOCO-SGD (Koloskova et al., ICML 2019). Each node i keeps a copy x̂ of its model as its
    neighbours know it, and s = Σ_j W_ij x̂_j. With C the wire, d the direction of the local step,
    and ζ = ``consensus_step``:

    x½ = x − lr · d;  q = C(x½ − x̂) is sent;  x̂ ← x̂ + q;  s ← s + Σ_j W_ij q_j;
    x ← x½ + ζ (s − x̂).

    x̂ and s start as 0. The memory s is correct only for a static W. One vector is sent, in the
    format of the wire. LOCAL steps exchange nothing.

    On a ring of 6 nodes without gradients, ζ = ½ converged with "sign", and with "top-k" at a
    density of 0.25. "top-k" needed 0.3 at a density of 0.1, 0.1 at 0.03 and 0.03 at 0.01;
    "shared-k" needed 0.1 at 0.1.

    :param local: local step
    :param consensus_step: ζ, factor of the step towards the neighbours; None: ½, or the density of
        the wire "random-k" if this is smaller
    """
    zeta = 0.5 if consensus_step is None else consensus_step

    def send(x, g, state: Choco, out, step: Step):
        inner = local.adapt(x, g, state.inner, step, x)
        torch.sub(x, state.public, out=out[0])
        return state._replace(inner=inner)

    def receive(x, g, state: Choco, sent, mixed, step: Step):
        if step.kind is ExchangeKind.GOSSIP:
            state.public.add_(sent[0])
            state.memory.add_(mixed[0])
            x.add_(state.memory, alpha=zeta).add_(state.public, alpha=-zeta)
        return state

    init = init_from(Choco, torch.zeros_like, torch.zeros_like, local.init)
    needs = frozenset({"static", "doubly", "never-global", "own-wire"})
    update = inner_update(local.update)
    return Algorithm(init, send, receive, update, raw=local.raw, distinct_state=True, needs=needs)

"""Algorithms for directed graphs: stochastic gradient push (SGP) and DSGD-CECA."""

from typing import Any, NamedTuple

import torch

from mpigossip.algorithms.base import Algorithm, Step, init_from
from mpigossip.algorithms.local import Local
from mpigossip.mixing.base import ExchangeKind


class PushSum(NamedTuple):
    """State of SGP: the weight w, of shape (rows, 1) in float64, and the local step's state."""

    weight: torch.Tensor
    inner: Any


def sgp(local: Local) -> Algorithm:
    """Average exactly on directed graphs by stochastic gradient push.

    SGP (Assran et al., ICML 2019) sends u½ and the weight w. P is the mixing matrix, and d the
    direction of the local step:

    u½ = w x − lr · d;  u ← Σ_j P_ij u½_j;  w ← Σ_j P_ij w_j;  x = u/w.

    x is the model: gradients are computed at x, and x is evaluated. The columns of P have to sum to
    one, so that Σ u and Σ w over the nodes are preserved. w starts as 1, and remains 1 if the rows
    of P sum to one, too. With x½ = x − lr · d, u½ is computed as x½ + (w − 1) x, which is bitwise
    identical to x½ if w = 1. One vector and one scalar are sent.
    """

    def init(x) -> PushSum:
        ones = torch.ones(len(x), 1, dtype=torch.float64, device=x.device)
        return PushSum(ones, local.init(x))

    def send(x, g, state: PushSum, out, step: Step):
        inner = local.adapt(x, g, state.inner, step, out[0])
        out[0].addcmul_(x, state.weight.to(x.dtype) - 1)
        out[1].copy_(state.weight)
        return state._replace(inner=inner)

    def receive(x, g, state: PushSum, sent, mixed, step: Step):
        state.weight.copy_(mixed[1])
        torch.div(mixed[0], state.weight.to(x.dtype), out=x)
        return state

    needs = frozenset({"column-stochastic"})
    return Algorithm(
        init, send, receive, scalars=1, raw=local.raw, distinct_state=True, needs=needs
    )


class Carriers(NamedTuple):
    """State of CECA: the second running average x̂, shaped like x, and the local step's state."""

    others: torch.Tensor
    inner: Any


def ceca(local: Local, *, nodes: int | None = None) -> Algorithm:
    """Average exactly in ⌈log2 n⌉ one-peer rounds, for any n.

    DSGD-CECA (Ding et al., ICML 2023) keeps two running averages: x is the average of the node's
    own model and the models of c other nodes, and x̂ the average of these c other models. The local
    step is added to both. The rounds follow the binary digits of n − 1 from the highest, and each
    uses one permutation of the graph "ceca". c starts as 0, and r is the received vector:

    * digit 1: x is sent;  x ← ½ x + ½ r,  x̂ ← c/(2c+1) x̂ + (c+1)/(2c+1) r,  c ← 2c + 1;
    * digit 0: x̂ is sent;  x ← (c+1)/(2c+1) x + c/(2c+1) r,  x̂ ← ½ x̂ + ½ r,  c ← 2c.

    One vector is sent.

    :param local: local step
    :param nodes: n, number of nodes; None: 2, a placeholder until the graph is known
    """
    digits = f"{max((nodes or 2) - 1, 1):b}"

    def digit(step: Step) -> tuple[str, int]:
        position = step.round % len(digits)
        return digits[position], int(digits[:position] or "0", 2)

    def send(x, g, state: Carriers, out, step: Step):
        inner = local.adapt(x, g, state.inner, step, out[0])
        # Both averages take the same local step, x½ − x.
        state.others.sub_(x.sub_(out[0]))
        x.copy_(out[0])
        if step.kind is ExchangeKind.GOSSIP and digit(step)[0] == "0":
            out[0].copy_(state.others)
        return state._replace(inner=inner)

    def receive(x, g, state: Carriers, sent, mixed, step: Step):
        if step.kind is ExchangeKind.GLOBAL:
            x.copy_(mixed[0])
            state.others.copy_(x)
        elif step.kind is ExchangeKind.GOSSIP:
            bit, c = digit(step)
            fraction = (c + (bit == "1")) / (2 * c + 1)
            sent_average, kept_average = (x, state.others) if bit == "1" else (state.others, x)
            sent_average.add_(mixed[0]).mul_(0.5)
            kept_average.mul_(1 - fraction).add_(mixed[0], alpha=fraction)
        return state

    init = init_from(Carriers, torch.clone, local.init)
    needs = frozenset({"graph:ceca", "exact-wire"})
    return Algorithm(init, send, receive, raw=local.raw, needs=needs)

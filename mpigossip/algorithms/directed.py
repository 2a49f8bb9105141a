"""Methods for directed graphs: push-sum (SGP) and two running averages (CECA)."""

from typing import Any, NamedTuple

import torch

from mpigossip.algorithms.base import Algorithm, Step, init_from
from mpigossip.algorithms.local import Local
from mpigossip.mixing.base import ExchangeKind


class PushSum(NamedTuple):
    """The weight w, float64 (rows, 1), and the local step's state."""

    weight: torch.Tensor
    inner: Any


def sgp(local: Local) -> Algorithm:
    """Stochastic gradient push (Assran et al., ICML 2019): true averages on directed graphs.

    u½ = w x − lr · d;  u ← Σ_j P_ij u½_j;  w ← Σ_j P_ij w_j;  x = u/w is where the gradient is
    taken and what is evaluated. P needs columns that sum to one; w starts as 1 and stays it where
    the rows do too. Σ u and Σ w are preserved. One vector and one scalar are sent. u½ is formed as
    x½ + (w − 1) x, which is x½ to the bit where w = 1.
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
    """The second carrier x̂, shaped like x, and the local step's state."""

    others: torch.Tensor
    inner: Any


def ceca(local: Local, *, nodes: int | None = None) -> Algorithm:
    """DSGD-CECA (Ding et al., ICML 2023): exact in ⌈log2 n⌉ one-peer rounds for any n.

    x is the mean of the own and c other models, x̂ that of the c others; −lr · d goes to both.
    By the binary digits of n − 1 from the top, c starting as 0, on the permutations of the graph
    "ceca" (r is what is received):
    digit 1: x is sent,  x ← ½ x + ½ r,  x̂ ← c/(2c+1) x̂ + (c+1)/(2c+1) r,  c ← 2c + 1;
    digit 0: x̂ is sent, x ← (c+1)/(2c+1) x + c/(2c+1) r,  x̂ ← ½ x̂ + ½ r,  c ← 2c.
    One vector is sent. ``nodes``: n, taken from the graph.
    """
    digits = f"{max((nodes or 2) - 1, 1):b}"

    def digit(step: Step) -> tuple[str, int]:
        at = step.round % len(digits)
        return digits[at], int(digits[:at] or "0", 2)

    def send(x, g, state: Carriers, out, step: Step):
        inner = local.adapt(x, g, state.inner, step, out[0])
        state.others.sub_(x.sub_(out[0]))  # the same step for both carriers: x½ − x
        x.copy_(out[0])
        if step.kind is ExchangeKind.GOSSIP and digit(step)[0] == "0":
            out[0].copy_(state.others)
        return state._replace(inner=inner)

    def receive(x, g, state: Carriers, sent, mixed, step: Step):
        if step.kind is ExchangeKind.GLOBAL:
            x.copy_(mixed[0])
            state.others.copy_(x)
        elif step.kind is ExchangeKind.GOSSIP:
            which, c = digit(step)
            part = (c + (which == "1")) / (2 * c + 1)
            one, other = (x, state.others) if which == "1" else (state.others, x)
            one.add_(mixed[0]).mul_(0.5)
            other.mul_(1 - part).add_(mixed[0], alpha=part)
        return state

    init = init_from(Carriers, torch.clone, local.init)
    needs = frozenset({"graph:ceca", "exact-wire"})
    return Algorithm(init, send, receive, raw=local.raw, needs=needs)

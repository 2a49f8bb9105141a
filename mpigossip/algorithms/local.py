"""Local steps, which compute the adapted model x½ = x − lr · d from a gradient."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from mpigossip.algorithms.adamw_step import AdamW, by_formula, by_kernel
from mpigossip.algorithms.base import Decay, NoState, Step, init_from, no_state
from mpigossip.config.limits import NotNegative, Positive

BLOCK = 1 << 15
"""Number of elements per row that `accumadam` processes at once on a CPU, to keep temporary arrays
small."""


class Local(NamedTuple):
    """Local optimizer, whose function ``adapt`` computes the model after a step.

    ``adapt(x, g, state, step, out) -> state`` writes the adapted model x½ to ``out``.

    ``out`` may be x; otherwise x is not changed. The function may overwrite g. For rows in
    ``step.skipped``, ``out`` becomes x and the state does not change. :func:`by_row` adds this to a
    function that handles no such rows, and takes ``step.index`` as the number of local steps of
    every row, for the bias correction of Adam.

    The result is x½ rather than the direction d = (x − x½)/lr, because x½ is exactly the model that
    a `torch.optim` optimizer computes. d would be rounded, and it is undefined at lr = 0, where
    warm-ups begin.
    """

    init: Callable[..., Any]
    """Function (x) -> state that makes the first state."""
    adapt: Callable[..., Any]
    raw: bool = False
    """True if ``adapt`` reads gradients from the ``.grad`` of the parameters; g is then None."""
    whole: bool = False
    """True if ``adapt`` needs whole parameters, so that x must not be a shard."""

    def update(self, x, g, state, step: Step):
        """Take a step in place, for algorithms whose state is the state of the local step."""
        return self.adapt(x, g, state, step, x)


def zeros(kind: type) -> Callable[..., Any]:
    """Return an ``init`` function that makes a state of class ``kind`` from zeros shaped like x."""
    return init_from(kind, *(torch.zeros_like for _ in kind._fields))  # type: ignore[attr-defined]


def by_row(local: Local) -> Local:
    """Return ``local`` with the number of steps of each row (``step.counts``) as ``step.index``.

    Rows in ``step.skipped`` keep their state and get x½ = x. If the numbers of steps differ, the
    local step is called for each row separately; the results of elementwise float32 operations are
    bitwise identical in both cases.
    """

    def adapt(x, g, state, step: Step, out):
        counts = step.counts or (step.index,) * len(x)
        rows = [row for row in range(len(x)) if row not in step.skipped]
        if len(rows) == len(x) and len(set(counts)) == 1:
            return local.adapt(x, g, state, step._replace(index=counts[0]), out)
        _stay(x, g, state, step, out)
        for row in rows:
            row_slice = slice(row, row + 1)
            row_step = step._replace(index=counts[row], skipped=(), counts=())
            row_out = out[row_slice]
            row_state = type(state)(*(part[row_slice] for part in state))
            after = local.adapt(row_out, g[row_slice], row_state, row_step, row_out)
            for part, value in zip(row_state, after, strict=True):
                # If the state was changed in place, this copy has no effect.
                part.copy_(value)
        return state

    return local._replace(adapt=adapt)


def _stay(x, g, state, step, out):
    if out is not x:
        out.copy_(x)
    return state


NO_LOCAL_STEP = Local(no_state, _stay)
"""Local step that changes nothing, x½ = x, for an algorithm that exchanges the model after the step
of another optimizer.
"""


class Momentum(NamedTuple):
    """Momentum buffer m, shaped like x."""

    momentum: torch.Tensor


class Moments(NamedTuple):
    """Adam's running means of g and g², shaped like x."""

    first: torch.Tensor
    second: torch.Tensor


def sgd(decayed: int) -> Local:
    """Step along the gradient: d = g.

    :param decayed: not used
    """

    def adapt(x, g, state: NoState, step: Step, out):
        torch.add(x, g, alpha=-step.lr, out=out)
        return state

    return Local(no_state, adapt)


def momentum(decayed: int, *, beta: Decay = 0.9) -> Local:
    """Step along the heavy-ball momentum (Polyak 1964): m ← β m + g, d = m.

    :param decayed: not used
    :param beta: β, factor of the momentum
    """

    def adapt(x, g, state: Momentum, step: Step, out):
        state.momentum.mul_(beta).add_(g)
        torch.add(x, state.momentum, alpha=-step.lr, out=out)
        return state

    return Local(zeros(Momentum), adapt)


def nesterov(decayed: int, *, beta: Decay = 0.9) -> Local:
    """Step by Nesterov's momentum as torch.optim.SGD does: m ← β m + g, d = g + β m.

    :param decayed: not used
    :param beta: β, factor of the momentum
    """

    def adapt(x, g, state: Momentum, step: Step, out):
        state.momentum.mul_(beta).add_(g)
        torch.add(x, g.add_(state.momentum, alpha=beta), alpha=-step.lr, out=out)
        return state

    return Local(zeros(Momentum), adapt)


def adamw(
    decayed: int,
    *,
    beta1: Decay = 0.9,
    beta2: Decay = 0.999,
    eps: NotNegative = 1e-8,
    decoupled_decay: NotNegative = 0.0,
    fused: bool | None = None,
) -> Local:
    """Step by AdamW (Loshchilov & Hutter 2019) with bias correction.

    g is the gradient, m and v are the moments, m̂ and v̂ the moments after bias correction, and d is
    the direction of the step:

    m ← β₁m + (1−β₁)g, v ← β₂v + (1−β₂)g², d = m̂/(√v̂ + ε) + λx.

    :param decayed: number of elements, counted from the first, that take the decay λ: all elements,
        or all but the biases and norms if these are excluded from weight decay
    :param beta1: β₁, decay rate of the running mean of gradients
    :param beta2: β₂, decay rate of the running mean of squared gradients
    :param eps: ε, constant that is added to the denominator
    :param decoupled_decay: λ, decoupled weight decay
    :param fused: whether GPUs use torch's fused kernel, which moves a third of the bytes. Its
        results are not bitwise identical to the formula, which CPUs always use. A job uses it only
        if all ranks can (`adamw_step.all_use_kernel`). None: the formula. Not tested on GPUs
    """
    parameters = AdamW(beta1, beta2, eps, decoupled_decay, decayed)

    def adapt(x, g, state: Moments, step: Step, out):
        make_step = by_kernel if fused and x.device.type == "cuda" else by_formula
        make_step(parameters, x, g, state.first, state.second, step.index, step.lr, out)
        return state

    return Local(zeros(Moments), adapt)


class Accumulated(NamedTuple):
    """Running means m of g and v of g², and the sum s of g/A in this period, all like x."""

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
    """Step by Adam whose moments are updated with the mean of A = ``period`` gradients.

    This is AccumAdamW (Wang et al., ICLR 2025). g is the gradient of step t, s the sum of g/A since
    the last update of the moments m and v, and d the direction of the step. m̂' and v̂' are m' and
    v' with the bias correction of ⌈t/A⌉ steps. Each step computes

    s ← s + g/A;  m' = m + (1−β₁) g, v' = v + (1−β₂) g²;  d = m̂'/(√v̂' + ε) + λx.

    Every A-th step then updates the moments:

    m ← β₁ (m + (1−β₁) s), v ← β₂ (v + (1−β₂) s²), s ← 0.

    The moments of a node therefore resemble the moments of A nodes that average their gradients.

    :param decayed: number of elements, counted from the first, that take the decay λ
    :param period: A, number of gradients per update of the moments
    :param beta1: β₁, decay rate of the running mean of gradients
    :param beta2: β₂, decay rate of the running mean of squared gradients
    :param eps: ε, constant that is added to the denominator
    :param decoupled_decay: λ, decoupled weight decay
    """

    def adapt(x, g, state: Accumulated, step: Step, out):
        m, v, s = state
        corrected = -(-(step.index + 1) // period)
        s.add_(g, alpha=1 / period)
        block = BLOCK if x.device.type == "cpu" else max(x.shape[1], 1)
        for start in range(0, x.shape[1], block):
            columns = slice(start, start + block)
            denominator = torch.addcmul(
                v[:, columns], g[:, columns], g[:, columns], value=1 - beta2
            )
            denominator.div_(1 - beta2**corrected).sqrt_().add_(eps)
            numerator = g[:, columns].mul_((1 - beta1) / (1 - beta1**corrected))
            numerator.add_(m[:, columns], alpha=1 / (1 - beta1**corrected)).div_(denominator)
        if decoupled_decay:
            g[:, :decayed].add_(x[:, :decayed], alpha=decoupled_decay)
        torch.add(x, g, alpha=-step.lr, out=out)
        if (step.index + 1) % period == 0:
            m.add_(s, alpha=1 - beta1).mul_(beta1)
            v.addcmul_(s, s, value=1 - beta2).mul_(beta2)
            s.zero_()
        return state

    return Local(zeros(Accumulated), adapt)

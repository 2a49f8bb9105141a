"""Claims on limits: 16 scalar quadratics with different minima, in float64.

f_i(x) = ½ (x − b_i)², b drawn once; the figure is the root mean square of x_i − b̄ where the
method settles. The algorithms are those of the package, between them the package's simulator.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from table import Row

from mpigossip import algorithms
from mpigossip.algorithms import Step
from mpigossip.graphs import from_matrices, graph
from mpigossip.mixing.base import Kind, Layout
from mpigossip.mixing.simulated import Simulated

N, LR, BETA, SEED = 16, 0.05, 0.9, 0
METHODS: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "DSGD ATC": ("dsgd", "sgd", {"style": "atc"}),
    "DSGD AWC": ("dsgd", "sgd", {"style": "awc"}),
    "local momentum": ("dmsgd-vanilla", "momentum", {"beta": BETA}),
    "averaged momentum": ("dmsgd", None, {"beta": BETA, "momentum": "delayed"}),
    "QG": ("qg-dmsgd", None, {"beta": BETA}),
    "DecentLaM": ("decentlam", None, {"beta": BETA}),
    "D² with W": ("d2", "sgd", {"lazy": False}),
    "D² with (I+W)/2": ("d2", "sgd", {"lazy": True}),
    "tracking AWC": ("dsgt", "sgd", {"style": "awc"}),
}
TEXTBOOK = "tracking ATC"
INF = np.inf
EXPECTED = {
    "ring 1/3": (5.6e-2, 6.9e-2, 2.0e-1, 1.1e-1, 5.6e-2, 5.6e-2, 0, 0, 0, 0),
    "ring .45": (4.4e-2, 5.5e-2, 1.9e-1, 8.2e-2, 4.4e-2, 4.4e-2, INF, 0, INF, INF),
    "one-peer": (2.7e-2, 4.6e-2, 1.8e-1, 1.7e-2, 2.5e-2, INF, INF, 0, 0, 0),
}
"""Limits by arithmetic apart from the package, ≤ 1e-10 written as 0, divergence as infinity.

Averaged momentum steps along the old momentum there, and tracking ATC is the textbook's: the
gradient is taken between two exchanges, where the package's `dsgt` has one exchange a step.
"""
ZERO, TIE = 1e-10, 0.1
"""A limit that counts as zero, and the relative difference below which two limits tie."""
STEPS, WINDOW = 20_000, 100
"""Steps at most, and after how many it is seen whether a limit is reached."""


def _graphs():
    ring = 0.1 * np.eye(N) + 0.45 * (np.roll(np.eye(N), 1, 0) + np.roll(np.eye(N), -1, 0))
    return {
        "ring 1/3": graph("ring", N),
        "ring .45": from_matrices([ring], "ring .45"),
        "one-peer": graph("one-peer-exponential", N),
    }


def minima() -> torch.Tensor:
    """The b_i: standard normal numbers, (n, 1) float64."""
    return torch.from_numpy(np.random.default_rng(SEED).standard_normal((N, 1)))


def settled(models: Iterable[torch.Tensor]) -> float:
    """Root mean square of x − b̄ over nodes and the last four steps; infinity if it grows away.

    Ends where the figure is below ZERO/100 or has changed by less than 1e-7 of it in WINDOW steps.
    """
    mean, squares = minima().mean(), []
    for t, x in enumerate(itertools.islice(models, STEPS)):
        squares.append(float(((x - mean) ** 2).mean()))
        if not squares[-1] < 1e6:
            return INF
        if t % WINDOW == WINDOW - 1 and t > WINDOW:
            now, before = (np.sqrt(np.mean(squares[at - 4 : at])) for at in (t + 1, t + 1 - WINDOW))
            if now < ZERO / 100 or abs(now / before - 1) < 1e-7:
                break
    return float(np.sqrt(np.mean(squares[-4:])))


def steps(method, made, x: torch.Tensor, gradient: Callable, rate: float = LR) -> Iterator:
    """The models x, (n, p) float64 and changed in place, after each step of one of our methods."""
    layout = Layout((x.shape[1],), method.vectors, method.scalars, dtype=x.dtype)
    mixer, state = Simulated(made, layout), method.init(x)
    for t in itertools.count():
        (out,), g, step = mixer.outbox(t), gradient(x), Step(t, t, Kind.GOSSIP, rate)
        if method.ahead:
            state = method.send(x, None, state, out, step._replace(lr=None))
        else:
            state = method.send(x, g, state, out, step)
        mixer.start(Kind.GOSSIP, t)
        (sent,), (mixed,) = mixer.finish()
        state = method.receive(x, g, state, sent, mixed, step)
        yield x


def after(method, made, x: torch.Tensor, rounds: int) -> torch.Tensor:
    """What x is after so many rounds without gradients."""
    models = steps(method, made, x.clone(), torch.zeros_like, 1e-300)
    return next(itertools.islice(models, rounds - 1, None))


def textbook_tracking(made) -> Iterator[torch.Tensor]:
    """Tracking with the gradient between two exchanges: x ← W (x − lr y); y ← W (y + g⁺ − g)."""
    b = minima()
    x, y = torch.zeros_like(b), -b
    for t in itertools.count():
        w = torch.from_numpy(made.matrix(t))
        before, x = x, w @ (x - LR * y)
        y = w @ (y + x - before)
        yield x


def _alike(found: dict[str, float], expected: dict[str, float]) -> list[str]:
    """What differs between two columns: zeros, divergences, order of the rest but for ties."""
    wrong = []
    for name in expected:
        kinds = [0 if v <= ZERO else 2 if v == INF else 1 for v in (found[name], expected[name])]
        if kinds[0] != kinds[1]:
            wrong.append(f"{name} is {found[name]:.1e}")
    between = [name for name, value in expected.items() if 0 < value < INF]
    for k, a in enumerate(between):
        for b in between[k + 1 :]:
            theirs, ours = (np.log(t[b] / t[a]) for t in (expected, found))
            if theirs * ours < 0 and min(abs(theirs), abs(ours)) > TIE:
                wrong.append(f"{a} against {b}")
    return wrong


def _limit(made, algorithm: str, local: str | None, settings: dict) -> float:
    """Where one of the package's methods settles."""
    b = minima()
    built = algorithms.build(algorithm, local, settings, 1)
    return settled(steps(built, made, torch.zeros_like(b), lambda x: x - b))


def toy_limits(options) -> Iterator[Row]:
    """Limits of ten methods on three graphs."""
    for name, made in _graphs().items():
        expected = dict(zip((*METHODS, TEXTBOOK), EXPECTED[name], strict=True))
        found = {method: _limit(made, *how) for method, how in METHODS.items()}
        found[TEXTBOOK] = settled(textbook_tracking(made))
        wrong = _alike(found, expected)
        ours = {"dmsgd with the new momentum": ("dmsgd", None, {"beta": BETA})}
        ours["dsgt ATC in one exchange"] = ("dsgt", "sgd", {"style": "atc"})
        also = {method: _limit(made, *how) for method, how in ours.items()}
        yield Row(
            f"limits on 16 quadratics, {name}, lr .05, β .9, float64, b normal (seed {SEED}): "
            "order, zeros, divergences", "own arithmetic (sizes depend on b)", _words(expected),
            f"{_words(found)}; also {_words(also)}"
            + (f"; differs: {', '.join(wrong)}" if wrong else ""), not wrong,
        )  # fmt: skip


def _words(column: dict[str, float]) -> str:
    def word(value: float) -> str:
        return "diverges" if value == INF else "0" if value == 0 else f"{value:.1e}"

    return ", ".join(f"{name} {word(value)}" for name, value in column.items())


def accelerated(options) -> Iterator[Row]:
    """DeTAG's accelerated gossip against plain gossip: disagreement after a phase."""
    found, ring = [], graph("ring", N)
    for phase in (20, 40):
        for eta in (0.0, None):
            settings = {"phase": phase, "eta": eta}
            found.append(_left(algorithms.build("detag", None, settings, 1, ring), phase))
    expected = (2.3e-1, 6.5e-3, 8.2e-2, 1.8e-5)
    yield Row(
        "ring 16: what R = 20, 40 steps of accelerated gossip leave, as a part of what plain "
        "gossip leaves (worst start)", "Lu & De Sa, JMLR 2023",
        ", ".join(f"{expected[k + 1] / expected[k]:.1e}" for k in (0, 2)),
        ", ".join(f"{found[k + 1] / found[k]:.1e}" for k in (0, 2))
        + f" (plain {found[0]:.2f}, {found[2]:.2f})",
        all(abs(found[k + 1] / found[k] * expected[k] / expected[k + 1] - 1) < 0.1 for k in (0, 2)),
    )  # fmt: skip


def _left(method, phase: int) -> float:
    """‖M − J‖_2 of the phase's linear map on x̃, by its columns as separate models."""
    mixed = after(method, graph("ring", N), torch.eye(N, dtype=torch.float64), phase)
    return float(torch.linalg.matrix_norm(mixed - 1 / N, 2))


CLAIMS = (toy_limits, accelerated)

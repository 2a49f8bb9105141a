"""Claims on the limits of methods, on 16 scalar quadratics with different minima, in float64.

Node i minimizes f_i(x) = ½ (x − b_i)², where b is drawn once. The limit of a method is the root
mean square of x_i − b̄ after very many steps. The algorithms of the package compute the steps, and
its simulator exchanges the messages.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from table import Row

from mpigossip import algorithms
from mpigossip.algorithms import Algorithm, Step
from mpigossip.graphs import Graph, from_matrices, graph
from mpigossip.mixing.base import ExchangeKind, MessageLayout
from mpigossip.mixing.simulated import Simulated
from mpigossip.mixing.wire import FP32, Wire

N = 16
LR = 0.05
BETA = 0.9
SEED = 0
INF = np.inf
METHODS: dict[str, tuple] = {
    "DSGD ATC": ("dsgd", "sgd", {"style": "atc"}, 5.6e-2, 4.4e-2, 2.7e-2),
    "DSGD AWC": ("dsgd", "sgd", {"style": "awc"}, 6.9e-2, 5.5e-2, 4.6e-2),
    "local momentum": ("dmsgd-vanilla", "momentum", {"beta": BETA}, 2.0e-1, 1.9e-1, 1.8e-1),
    "averaged momentum": (
        "dmsgd", None, {"beta": BETA, "momentum": "delayed"}, 1.1e-1, 8.2e-2, 1.7e-2,
    ),
    "QG": ("qg-dmsgd", None, {"beta": BETA}, 5.6e-2, 4.4e-2, 2.5e-2),
    "DecentLaM": ("decentlam", None, {"beta": BETA}, 5.6e-2, 4.4e-2, INF),
    "D² with W": ("d2", "sgd", {"lazy": False}, 0, INF, INF),
    "D² with (I+W)/2": ("d2", "sgd", {"lazy": True}, 0, 0, 0),
    "tracking AWC": ("dsgt", "sgd", {"style": "awc"}, 0, INF, 0),
    "tracking ATC": ("textbook", None, {}, 0, INF, 0),
    "dmsgd with the new momentum": ("dmsgd", None, {"beta": BETA}),
    "dsgt ATC in one exchange": ("dsgt", "sgd", {"style": "atc"}),
}  # fmt: skip
"""For each method: algorithm, local step and options; then its expected limits on three graphs.

The graphs are rings with weights 1/3 and .45, and the one-peer graph. The limits were computed
independently of the package. A limit ≤ 1e-10 is written as 0, divergence as infinity.

"averaged momentum" makes its step along the old momentum. "tracking ATC" is the method of the
textbook, which computes the gradient between two exchanges, while the package's `dsgt` makes one
exchange per step.
"""
ZERO = 1e-10
TIE = 0.1
"""Largest limit that counts as zero; largest relative difference of two limits that count as
equal."""
STEPS = 20_000
WINDOW = 100
"""Largest number of steps; number of steps between two tests of convergence."""


def minima() -> torch.Tensor:
    """Return the minima b_i of the nodes: standard normal numbers, (n, 1) float64."""
    return torch.from_numpy(np.random.default_rng(SEED).standard_normal((N, 1)))


def limit_of(models: Iterable[torch.Tensor]) -> float:
    """Return the limit of a method: the root mean square of x − b̄ over nodes and four last steps.

    The iteration ends when this value is below ZERO/100 or has changed by less than a fraction of
    1e-7 in WINDOW steps, but at the latest after STEPS steps. The result is infinity if the models
    diverge.

    :param models: models (n, 1) after each step
    """
    mean = minima().mean()
    squares = []
    for t, x in enumerate(itertools.islice(models, STEPS)):
        squares.append(float(((x - mean) ** 2).mean()))
        if not squares[-1] < 1e6:
            return INF
        if t % WINDOW == WINDOW - 1 and t > WINDOW:
            now, before = (
                np.sqrt(np.mean(squares[end - 4 : end])) for end in (t + 1, t + 1 - WINDOW)
            )
            if now < ZERO / 100 or abs(now / before - 1) < 1e-7:
                break
    return float(np.sqrt(np.mean(squares[-4:])))


def steps(
    method: Algorithm,
    gossip_graph: Graph,
    x: torch.Tensor,
    gradient: Callable,
    rate: float = LR,
    wire: Wire = FP32,
) -> Iterator[torch.Tensor]:
    """Yield the models (n, p) after each step of a method.

    :param method: the algorithm
    :param gossip_graph: graph of n nodes
    :param x: initial models (n, p), which are changed in place
    :param gradient: function that returns the gradients at given models
    :param rate: learning rate
    :param wire: format of messages
    """
    layout = MessageLayout((x.shape[1],), method.vectors, method.scalars, dtype=x.dtype, wire=wire)
    mixer = Simulated(gossip_graph, layout)
    state = method.init(x)
    for t in itertools.count():
        (out,), g, step = mixer.outbox(t), gradient(x), Step(t, t, ExchangeKind.GOSSIP, rate)
        if method.ahead:
            state = method.send(x, None, state, out, step._replace(lr=None))
        else:
            state = method.send(x, g, state, out, step)
        mixer.start(ExchangeKind.GOSSIP, t)
        (sent,), (mixed,) = mixer.finish()
        state = method.receive(x, g, state, sent, mixed, step)
        yield x


def model_after(models: Iterator[torch.Tensor], count: int) -> torch.Tensor:
    """Return the model after ``count`` steps."""
    return next(itertools.islice(models, count - 1, None))


def run_rounds(method: Algorithm, gossip_graph: Graph, rounds: int) -> torch.Tensor:
    """Return the matrix (n, n) by which some rounds of a method without gradients multiply models.

    Column j is the result for models that are 1 on node j, and 0 on all others.

    :param method: the algorithm
    :param gossip_graph: graph of n nodes
    :param rounds: number of rounds
    """
    x = torch.eye(gossip_graph.n, dtype=torch.float64)
    return model_after(steps(method, gossip_graph, x, torch.zeros_like, 1e-300), rounds)


def textbook_tracking(gossip_graph: Graph) -> Iterator[torch.Tensor]:
    """Yield the models of textbook tracking: x ← W (x − lr y), then y ← W (y + g⁺ − g)."""
    b = minima()
    x = torch.zeros_like(b)
    y = -b
    for t in itertools.count():
        w = torch.from_numpy(gossip_graph.matrix(t))
        before = x
        x = w @ (x - LR * y)
        y = w @ (y + x - before)
        yield x


def _limit(gossip_graph: Graph, method: str) -> float:
    """Return the measured limit of the method with this name on a graph."""
    b = minima()
    (name, local, options, *_) = METHODS[method]
    if name == "textbook":
        return limit_of(textbook_tracking(gossip_graph))
    built = algorithms.build(name, local, options, 1)
    return limit_of(steps(built, gossip_graph, torch.zeros_like(b), lambda x: x - b))


def _differences(measured: dict[str, float], expected: dict[str, float]) -> list[str]:
    """Describe how measured limits differ from the expected ones.

    A method has to reach zero, or diverge, exactly if this is expected. All other methods have to
    be in the expected order, except for values that differ by less than `TIE`.

    :param measured: limits by the name of the method
    :param expected: expected limits by the name of the method
    :return: a text for each difference
    """

    def kind(value: float) -> float:
        return value if value == INF else float(value > ZERO)

    differences = [
        f"{name} is {measured[name]:.1e}"
        for name in expected
        if kind(measured[name]) != kind(expected[name])
    ]
    positive = [name for name, value in expected.items() if kind(value) == 1]
    for a, b in itertools.combinations(positive, 2):
        first, second = (np.log(column[b] / column[a]) for column in (expected, measured))
        if first * second < 0 and min(abs(first), abs(second)) > TIE:
            differences.append(f"{a} against {b}")
    return differences


def toy_limits(options) -> Iterator[Row]:
    """Compare the limits of ten methods on three graphs with expected values.

    For two further methods there are no expected values, so their limits are only reported.
    """
    ring = 0.1 * np.eye(N) + 0.45 * (np.roll(np.eye(N), 1, 0) + np.roll(np.eye(N), -1, 0))
    graphs = graph("ring", N), from_matrices([ring]), graph("one-peer-exponential", N)
    names = "ring 1/3", "ring .45", "one-peer"
    for index, (name, gossip_graph) in enumerate(zip(names, graphs, strict=True)):
        expected = {method: row[3 + index] for method, row in METHODS.items() if len(row) > 3}
        measured = {method: _limit(gossip_graph, method) for method in METHODS}
        differences = _differences(measured, expected)
        yield Row(
            f"limits on 16 quadratics, {name}, lr .05, β .9, float64, b normal (seed {SEED}): "
            "order, zeros, divergences",
            "calculation for this project (sizes depend on b)",
            _format(expected),
            _format(measured) + (f"; differs: {', '.join(differences)}" if differences else ""),
            not differences,
        )


def _format(column: dict[str, float]) -> str:
    """Return limits by the name of the method as text."""
    words = {INF: "diverges", 0: "0"}
    return ", ".join(f"{name} {words.get(v, f'{v:.1e}')}" for name, v in column.items())


def accelerated(options) -> Iterator[Row]:
    """Compare accelerated with plain gossip by the distance ‖M − J‖ from the exact average.

    M is the linear map of some rounds.
    """
    ring = graph("ring", N)
    norms = []
    for eta, phase in itertools.product((0.0, None), (20, 40)):
        method = algorithms.build("detag", None, {"phase": phase, "eta": eta}, 1, ring)
        norms.append(float(torch.linalg.matrix_norm(run_rounds(method, ring, phase) - 1 / N, 2)))
    measured = [norms[2] / norms[0], norms[3] / norms[1]]
    expected = [6.5e-3 / 2.3e-1, 1.8e-5 / 8.2e-2]
    yield Row(
        "ring 16: distance from the mean after R = 20, 40 rounds of accelerated gossip, relative "
        "to plain gossip (worst start)",
        "Lu & De Sa, JMLR 2023",
        "{:.1e}, {:.1e}".format(*expected),
        "{:.1e}, {:.1e} (plain {:.2f}, {:.2f})".format(*measured, *norms[:2]),
        bool(np.allclose(measured, expected, rtol=0.1, atol=0)),
    )


CLAIMS = (toy_limits, accelerated)

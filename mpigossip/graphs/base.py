"""Graphs as values: the mixing matrix W(t) of each round t, and facts computed from its weights.

A graph is a *schedule* of rounds (`rounds.py`): a cycle of rounds, a few rounds in a random order,
or rounds that are drawn when they are needed.
"""

import hashlib
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np

from mpigossip.config.errors import UserError
from mpigossip.config.limits import LARGEST, SMALLEST
from mpigossip.graphs.rounds import (
    TOLERANCE,
    Round,
    SparseMatrix,
    exact_average,
    is_exact_average,
    weigh_nodes,
)

SAMPLED_ROUNDS = 8
"""Number of rounds from which the facts of a graph are computed if its rounds are drawn without
end. `Graph.round` checks the sums of the rows and columns of each later round.
"""


class GraphError(UserError):
    """User error about a graph; the message names the value, the limit and the remedy."""


def checked_seed(seed: object, what: str) -> int:
    """Return the seed as an integer ≥ 0.

    :raises GraphError: if the seed is no such integer; the message begins with ``what``
    """
    if isinstance(seed, bool) or not hasattr(seed, "__index__") or operator.index(seed) < 0:
        raise GraphError(
            f"{what}: the seed must be an integer ≥ 0, got {seed!r}; pass one, such as 0"
        )
    return operator.index(seed)


def random_words(key: tuple[int, ...], count: int) -> np.ndarray:
    """Return `count` random uint64 that depend on the key alone, such as (seed, t).

    They are equal on all nodes, and independent of the order in which keys are used. The words are
    raw Philox output, because numpy guarantees that this stream is the same in all versions.
    """
    return np.random.Philox(np.random.SeedSequence(key)).random_raw(count)


@dataclass(frozen=True)
class Cycle:
    """Rounds that repeat in a fixed order; the constructor shortens them to their least period."""

    rounds: tuple[Round, ...]

    def __post_init__(self) -> None:
        count = len(self.rounds)
        for period in range(1, count):
            if count % period == 0 and self.rounds == self.rounds[:period] * (count // period):
                object.__setattr__(self, "rounds", self.rounds[:period])
                return

    @property
    def period(self) -> int:
        return len(self.rounds)

    def at(self, t: int) -> Round:
        return self.rounds[t % len(self.rounds)]

    def mapped(self, change: Callable[[Round], Round]) -> "Cycle":
        """Return the schedule with ``change`` applied to each round."""
        return Cycle(tuple(change(r) for r in self.rounds))


@lru_cache(maxsize=256)
def _permutation(seed: int, block: int, count: int) -> tuple[int, ...]:
    return tuple(np.argsort(random_words((seed, block), count), kind="stable").tolist())


@lru_cache(maxsize=1024)
def _choice(seed: int, t: int, count: int) -> int:
    return int(random_words((seed, t), 1)[0] % count)


@dataclass(frozen=True)
class Shuffled:
    """A few rounds in random order.

    With ``replace``, each round is drawn independently. Otherwise, all rounds are used once in
    random order, and then again in a new order.
    """

    rounds: tuple[Round, ...]
    seed: int
    replace: bool
    period = None

    def at(self, t: int) -> Round:
        count = len(self.rounds)
        if self.replace:
            return self.rounds[_choice(self.seed, t, count)]
        block, k = divmod(t, count)
        return self.rounds[_permutation(self.seed, block, count)[k]]

    def mapped(self, change: Callable[[Round], Round]) -> "Shuffled":
        return replace(self, rounds=tuple(change(r) for r in self.rounds))


def _numbers(values: object) -> list[float] | None:
    """Return the elements of ``values`` as floats; None unless it is a sequence of numbers."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        return None
    items = list(values)
    try:
        return None if any(isinstance(v, str | bytes) for v in items) else list(map(float, items))
    except (TypeError, ValueError, RuntimeError):  # torch raises RuntimeError for rows of a matrix
        return None


@lru_cache(maxsize=64)
def _drawn(drawn: "Drawn", t: int) -> Round:
    return drawn.draw(drawn.n, drawn.seed, t).slack(drawn.kappa)


@dataclass(frozen=True)
class Drawn:
    """Endless sequence of rounds: round t is draw(n, seed, t), with the slack ``kappa``.

    `rounds` holds the first SAMPLED_ROUNDS rounds only.
    """

    draw: Callable[[int, int, int], Round]
    n: int
    seed: int
    kappa: float = 1.0
    period = None

    @property
    def rounds(self) -> tuple[Round, ...]:
        return tuple(self.at(t) for t in range(SAMPLED_ROUNDS))

    def at(self, t: int) -> Round:
        return _drawn(self, t)


@dataclass(frozen=True)
class WeightedDraw:
    """Function that draws the rounds of ``drawn`` and applies `weigh_nodes` to each of them."""

    drawn: Drawn
    node_weights: tuple[float, ...]

    def __call__(self, n: int, seed: int, t: int) -> Round:
        return weigh_nodes(self.drawn.at(t), self.node_weights)


Schedule = Cycle | Shuffled | Drawn


@dataclass(frozen=True, repr=False)
class Graph:
    """Sequence of mixing matrices W(t) of rounds t = 0, 1, 2, …; made by :func:`mpigossip.graph`.

    Two graphs are equal if their schedules, `times` and `node_weights` are equal, including the
    order of summation; names, options and `stated` do not count. Rounds ``t`` and nodes ``i``,
    ``j`` are counted from 0. The constructor raises GraphError if there is no round, if rounds have
    different numbers of nodes or more in-neighbours than stated, or if neither the rows nor the
    columns of a round sum to one.
    """

    schedule: Schedule
    name: str = field(default="graph", compare=False)
    options: tuple[tuple[str, object], ...] = field(default=(), compare=False)
    stated: int = field(default=0, compare=False)
    """Degree that a user states for a graph given as a function of t, because the package knows
    only its first rounds; 0: not stated.
    """
    times: int = 1
    """Number of times that each round is used before the next; round t uses W(⌊t / times⌋)."""
    node_weights: tuple[float, ...] = ()
    """Weight w_i of each node in averages over all nodes, Σ_i w_i x_i; the weights sum to one, and
    the rounds contain them already. Empty: all nodes have the weight 1/n."""

    def __post_init__(self) -> None:
        if not self.schedule.rounds:
            raise GraphError(f'graph "{self.name}" has no rounds; give it at least one')
        for t, r in enumerate(self.schedule.rounds):
            self._check(r, f"round {t}")

    def _check(self, r: Round, where: str, facts: Collection[str] = ()) -> None:
        if r.n != self.n:
            raise GraphError(
                f'graph "{self.name}": {where} has {r.n} nodes, but round 0 has {self.n}; '
                "give all rounds the same number of nodes"
            )
        rows, columns = (np.abs(s - 1.0).max() for s in (r.row_sums(), r.column_sums()))
        if 0 < self.stated < r.degree:
            raise GraphError(
                f'graph "{self.name}": a node of {where} has {r.degree} in-neighbours, more than '
                f"the stated degree = {self.stated}; state degree = {r.degree}"
            )
        sums = {"row-stochastic": rows, "column-stochastic": columns}
        needed = [sums[fact] for fact in sums.keys() & facts] or [min(rows, columns)]
        if not max(needed) <= TOLERANCE * max(self.n, 10):
            known = sorted(sums.keys() & facts)
            need = (
                f"the first rounds are {' and '.join(known)}, so this round must be, too"
                if known
                else "either the rows (averaging) or the columns (push-sum) must sum to one in all "
                "rounds"
            )
            raise GraphError(
                f'graph "{self.name}": in {where}, row sums differ from one by up to {rows:.3g} '
                f"and column sums by up to {columns:.3g}; {need}"
            )

    @property
    def n(self) -> int:
        """Number of nodes."""
        return self.schedule.rounds[0].n

    @property
    def period(self) -> int | None:
        """Number of rounds after which the graph repeats; None if rounds are drawn or shuffled."""
        period = self.schedule.period
        return period if period in (None, 1) else period * self.times

    @cached_property
    def degree(self) -> int:
        """Largest number of in-neighbours of a node in any round, for which inboxes have memory.

        For drawn rounds, it is `stated`; if that is 0, the largest number in the sampled rounds.
        """
        return self.stated or max(r.degree for r in self.schedule.rounds)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of neighbours, in the order of summation, and weights of the first 64 rounds.

        A graph with a shorter period has the SHA-256 of one period. The weights of nodes are
        included if there are any. It is in hexadecimal.
        """
        rounds = map(self.round, range(min(64, self.period or 64)))
        keys: list[object] = [r._key() if isinstance(r, SparseMatrix) else r for r in rounds]
        if self.node_weights:
            keys.append(self.node_weights)
        return hashlib.sha256(repr(keys).encode()).hexdigest()

    @cached_property
    def facts(self) -> frozenset[str]:
        """Facts about the graph, computed from its weights.

        Possible facts are "static", "symmetric", "row-stochastic" (rows sum to one),
        "column-stochastic" (columns sum to one), and "signed" (some weight of some round is
        negative). All facts except "signed" hold in every round. For drawn rounds, they are
        computed from the first SAMPLED_ROUNDS.
        """
        rounds = self.schedule.rounds
        limit = TOLERANCE * max(self.n, 10)
        holds_in_all = {
            "static": self.period == 1,
            "symmetric": all(r.symmetric() for r in rounds),
            "row-stochastic": all(np.abs(r.row_sums() - 1).max() <= limit for r in rounds),
            "column-stochastic": all(np.abs(r.column_sums() - 1).max() <= limit for r in rounds),
            "signed": any(r.smallest() < -TOLERANCE for r in rounds),
        }
        return frozenset(fact for fact, value in holds_in_all.items() if value)

    @property
    def doubly_stochastic(self) -> bool:
        """Return whether rows and columns sum to one in every round, which preserves the mean."""
        return {"row-stochastic", "column-stochastic"} <= self.facts

    @property
    def is_averaging(self) -> bool:
        """Return whether each node averages: rows sum to one, and no weight is negative."""
        return "row-stochastic" in self.facts and "signed" not in self.facts

    @property
    def average_weights(self) -> tuple[float, ...]:
        """Weight of each node in averages over all nodes: `node_weights`, or 1/n for each node."""
        return self.node_weights or (1 / self.n,) * self.n

    @cached_property
    def complete(self) -> bool:
        """Return whether every round is the exact average over all nodes; False for drawn rounds.

        The exact average is W = 11ᵀ/n, or, with weights of nodes, W = 1wᵀ.
        """
        if not isinstance(self.schedule, Cycle | Shuffled):
            return False
        if self.node_weights:
            return set(self.schedule.rounds) == {exact_average(self.node_weights)}
        return self.doubly_stochastic and all(map(is_exact_average, self.schedule.rounds))

    def round(self, t: int) -> Round:
        """Return round ``t`` as a `Circulant` or `SparseMatrix` value.

        :raises GraphError: if t < 0, or if a drawn round has another number of nodes, a larger
            degree than stated, or rows or columns that no longer sum to one; or if a function that
            defines the round fails
        """
        t = operator.index(t)
        if t < 0:
            raise GraphError(f'graph "{self.name}": round {t} doesn\'t exist; rounds count from 0')
        r = self.schedule.at(t // self.times)
        if isinstance(self.schedule, Drawn) and t >= SAMPLED_ROUNDS:
            self._check(r, f"round {t}", self.facts)
        return r

    def _node(self, i: int) -> int:
        i = operator.index(i)
        if not 0 <= i < self.n:
            raise GraphError(
                f'graph "{self.name}": node {i} doesn\'t exist; nodes are 0 … {self.n - 1}'
            )
        return i

    def neighbours(self, t: int, i: int) -> tuple[np.ndarray, np.ndarray, float]:
        """Return the in-neighbours of node ``i`` in round ``t``, their weights, and its own weight.

        The in-neighbours are in the order of summation: in the order of the offsets in circulant
        rounds, otherwise ascending.

        :raises GraphError: if there is no such node, or as in :meth:`round`
        """
        return self.round(t).neighbours(self._node(i))

    def receivers(self, t: int, j: int) -> np.ndarray:
        """Return the out-neighbours of node ``j`` in round ``t``."""
        return self.round(t).receivers(self._node(j))

    def matrix(self, t: int = 0) -> np.ndarray:
        """Return W(``t``), (n, n) float64; W[i, j] is the weight of j's message at node i."""
        return self.round(t).matrix()

    def slack(self, kappa: float) -> "Graph":
        """Return the graph of κW + (1−κ)I, for κ = ``kappa``.

        :param kappa: κ, from 1e-9 to 1
        :raises GraphError: if κ is outside this range
        """
        if not 1e-9 <= kappa <= 1.0:
            raise GraphError(
                f"slack = {kappa}: must be in [1e-9, 1]; use 1 to leave the weights unchanged"
            )
        if kappa == 1.0:
            return self
        schedule: Schedule
        if isinstance(self.schedule, Drawn):
            schedule = replace(self.schedule, kappa=kappa * self.schedule.kappa)
        else:
            schedule = self.schedule.mapped(lambda r: r.slack(kappa))
        earlier = dict(self.options).get("slack", 1.0)
        options = {**dict(self.options), "slack": kappa * float(earlier)}  # type: ignore[arg-type]
        return replace(self, schedule=schedule, options=tuple(options.items()))

    def lazy(self) -> "Graph":
        """Return the graph of (I + W)/2.

        If W is symmetric with weights ≥ 0, the eigenvalues of this graph are ≥ 0.
        """
        return self.slack(0.5)

    def weighted(self, weights: Sequence[float]) -> "Graph":
        """Return the graph in which nodes with larger weights count more in averages.

        Each node weights the terms of its average: W_ij becomes W_ij w_j / Σ_k W_ik w_k. An average
        over all nodes becomes the weighted mean Σ_i w_i x_i, where Σ_i w_i = 1. Rounds in which all
        nodes average in pairs preserve the weighted mean, and so does an average over all nodes.
        Other rounds change it, so that repeated averaging leads to another mean, in which nodes
        with larger weights count more, too.

        :param weights: n positive numbers, in proportion to the w_i; if all are equal, the graph is
            returned unchanged
        :raises GraphError: if there are not n numbers from 1e-15 to 1e15, if W has negative weights
            or rows that do not sum to one, if the nodes have weights already, or if links of the
            graph fail
        """
        values = _numbers(weights)
        if values is None:
            raise GraphError(
                f'graph "{self.name}": weights of nodes = {weights!r}: pass a list of {self.n} '
                "numbers"
            )
        if len(values) != self.n:
            raise GraphError(
                f'graph "{self.name}": got {len(values)} weights of nodes; pass one for each of '
                f"its {self.n} nodes"
            )
        if not all(SMALLEST <= value <= LARGEST for value in values):
            raise GraphError(
                f'graph "{self.name}": weights of nodes must be greater than 0 and finite, from '
                f"{SMALLEST:g} up to {LARGEST:g}, got {values}: multiply all of them "
                "by one factor, and leave out nodes without weight"
            )
        if len(set(values)) == 1:
            return self
        if self.node_weights:
            raise GraphError(
                f'graph "{self.name}": its nodes have weights already; weigh the nodes once'
            )
        if not self.is_averaging:
            raise GraphError(
                f'graph "{self.name}": its nodes can\'t have weights, because its matrices have '
                "negative weights, or rows that do not sum to one; use another graph, such as "
                "one-peer-exponential"
            )
        total = math.fsum(values)
        normalized = tuple(value / total for value in values)
        schedule: Schedule
        if isinstance(self.schedule, Drawn):
            drawn = self.schedule
            schedule = replace(drawn, draw=WeightedDraw(drawn, normalized), kappa=1.0)
        elif isinstance(self.schedule, Cycle | Shuffled):
            schedule = self.schedule.mapped(lambda r: weigh_nodes(r, normalized))
        else:
            raise GraphError(
                f'graph "{self.name}": links of this graph fail, so its nodes can\'t have weights; '
                "remove the faults"
            )
        return replace(self, schedule=schedule, node_weights=normalized)

    def slowed(self, times: int) -> "Graph":
        """Return the graph that uses each round ``times`` times before the next round."""
        return self if times == 1 else replace(self, times=times * self.times)

    def renamed(self, name: str, **options: object) -> "Graph":
        """Return the same graph with another ``name``, and with ``options`` to show in its repr."""
        return replace(self, name=name, options=tuple(options.items()))

    def summary(self) -> str:
        """Return a line with the number of nodes, degree, period and facts of the graph.

        If some weight is negative, the line contains SIGNED and the smallest weight.
        """
        words = [f"n = {self.n}", f"degree {self.degree}"]
        words.append("no period" if self.period is None else f"period {self.period}")
        words += sorted(self.facts & {"static", "symmetric"})
        if self.doubly_stochastic:
            words.append("doubly stochastic")
        else:
            words += sorted(self.facts & {"row-stochastic", "column-stochastic"})
        if self.node_weights:
            low, high = min(self.node_weights), max(self.node_weights)
            words.append(f"nodes weighted by {low:.3g} to {high:.3g}")
        if "signed" in self.facts:
            smallest = min(r.smallest() for r in self.schedule.rounds)
            words.append(f"SIGNED: the smallest weight is {smallest:.4g}")
        return ", ".join(words)

    def __repr__(self) -> str:
        """Return the name, options and summary, as in Graph(ring: n = 8, degree 2, …)."""
        options = "".join(f" {key}={value}" for key, value in self.options)
        return f"Graph({self.name}{options}: {self.summary()})"


def static(r: Round, name: str = "graph") -> Graph:
    """Return the graph in which all rounds are ``r``."""
    return Graph(Cycle((r,)), name)


def from_matrices(matrices: Sequence[np.ndarray] | np.ndarray, name: str = "matrices") -> Graph:
    """Return the graph that uses the given mixing matrices in turn, without end.

    :param matrices: matrices of shape (n, n); W[i, j] is the weight that node i gives to the
        message of node j
    :param name: name of the graph in messages
    :raises GraphError: if there is no matrix; or if a matrix is no array of numbers, is not square,
        is not finite, or has another shape than the first; or if neither its rows nor its columns
        sum to one
    """
    rounds = []
    for t, matrix in enumerate(matrices):
        try:
            matrix = np.asarray(matrix, np.float64)
        except (TypeError, ValueError) as error:
            raise GraphError(
                f"mixing matrix {t} is not an array of numbers: {error}; give an array (n, n)"
            ) from error
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
            raise GraphError(
                f"mixing matrix {t} has shape {matrix.shape}; it must be square (n, n); reshape it"
            )
        if not np.isfinite(matrix).all():
            raise GraphError(
                f"mixing matrix {t} contains values that are not finite; replace them by numbers"
            )
        rounds.append(SparseMatrix.from_matrix(matrix))
    return Graph(Cycle(tuple(rounds)), name)


def in_order(rounds: Sequence[Round], order: str, seed: int) -> Graph:
    """Return the graph of ``rounds`` in the order "cyclic", "permuted" or "uniform".

    :param rounds: rounds, at least one
    :param order: "cyclic": as given, as in `Cycle`; "permuted": all rounds in random order, then
        again in a new order; "uniform": each drawn independently, as in `Shuffled` with ``replace``
    :param seed: seed of a random order
    :raises GraphError: if there is no such order
    """
    if order not in ORDERS:
        raise GraphError(f'order "{order}" is unknown; choose one of {", ".join(ORDERS)}')
    if order == "cyclic" or len(rounds) == 1:
        return Graph(Cycle(tuple(rounds)))
    return Graph(Shuffled(tuple(rounds), seed, replace=order == "uniform"))


ORDERS = ("cyclic", "permuted", "uniform")

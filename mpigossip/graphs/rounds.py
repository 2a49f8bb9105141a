"""Rounds of averaging; each is a mixing matrix W, stored as a circulant or as sparse rows.

Both classes have the methods that graphs use. `neighbours(i)` and, after its first call,
`receivers(j)` take time proportional to the degree, and `apply(x)` takes time proportional to the
number of edges. W[i, j] is the weight that node i gives to the message of j.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

TOLERANCE = 1e-12
"""Tolerance with which weights are compared with each other. It is multiplied by max(n, 10) if a
sum of n weights is compared with one.
"""


def _frozen(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array


@dataclass(frozen=True)
class Circulant:
    """Circulant mixing matrix, which has the same offsets and weights in every row.

    W[i, (i + offset) mod n] = weight and W[i, i] = own for every node i.

    Offsets are distinct, lie in 1 … n−1 and point to the nodes that a node receives *from*. Their
    order is the order of summation. Circulant matrices commute, and the FFT of a row gives the
    eigenvalues.
    """

    n: int
    own: float
    offsets: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()

    @cached_property
    def _offsets(self) -> np.ndarray:
        return _frozen(np.array(self.offsets, dtype=np.int64))

    @cached_property
    def _weights(self) -> np.ndarray:
        return _frozen(np.array(self.weights, dtype=np.float64))

    @property
    def degree(self) -> int:
        return len(self.offsets)

    @property
    def edge_count(self) -> int:
        """Number of directed edges."""
        return self.n * len(self.offsets)

    def neighbours(self, i: int) -> tuple[np.ndarray, np.ndarray, float]:
        """Return the in-neighbours of node i by offset, their weights, and its own weight."""
        return (i + self._offsets) % self.n, self._weights, self.own

    def receivers(self, j: int) -> np.ndarray:
        """Return the nodes that receive from node j, in the order of offsets."""
        return (j - self._offsets) % self.n

    def slack(self, kappa: float) -> "Circulant":
        """Return the round of κW + (1−κ)I."""
        own = kappa * self.own + (1.0 - kappa)
        return Circulant(self.n, own, self.offsets, tuple(kappa * w for w in self.weights))

    @property
    def transposed(self) -> "Circulant":
        """Round with the transposed matrix Wᵀ."""
        return Circulant(self.n, self.own, tuple(self.n - o for o in self.offsets), self.weights)

    def row(self) -> np.ndarray:
        """Return row 0 of W, (n,)."""
        row = np.zeros(self.n)
        row[0], row[self._offsets] = self.own, self._weights
        return row

    def matrix(self) -> np.ndarray:
        """Return W as an (n, n) float64 array."""
        nodes = np.arange(self.n)
        return self.row()[(nodes[None, :] - nodes[:, None]) % self.n]

    def apply(self, x: np.ndarray) -> np.ndarray:
        """Return W x for x of shape (n,) or (n, k)."""
        total = self.own * x
        for offset, weight in zip(self.offsets, self.weights, strict=True):
            total += weight * np.roll(x, -offset, axis=0)
        return total

    def eigenvalues(self) -> np.ndarray:
        """Return all n eigenvalues, complex, by frequency; [0] belongs to the constant vector."""
        return np.fft.fft(self.row())

    def row_sums(self) -> np.ndarray:
        """Return the sums of the weights in each row, (n,), which equal the sums in each column."""
        return np.full(self.n, self.own + self._weights.sum())

    column_sums = row_sums

    def smallest(self) -> float:
        """Return the smallest weight of the round, including own weights."""
        return min(self.own, *self.weights) if self.weights else self.own

    def symmetric(self) -> bool:
        """Return whether W = Wᵀ."""
        by_offset = dict(zip(self.offsets, self.weights, strict=True))
        return all(
            abs(by_offset.get(self.n - o, np.inf) - w) <= TOLERANCE for o, w in by_offset.items()
        )


@dataclass(frozen=True, eq=False, repr=False)
class SparseMatrix:
    """Mixing matrix of any form, stored as compressed sparse rows and the diagonal.

    `indptr`, (n+1,), `indices`, (edges,), and `weights`, (edges,), are the rows without the
    diagonal, with ascending indices in each row. `own`, (n,), is the diagonal.
    """

    indptr: np.ndarray
    indices: np.ndarray
    weights: np.ndarray
    own: np.ndarray

    def __post_init__(self) -> None:
        for array in (self.indptr, self.indices, self.weights, self.own):
            _frozen(array)

    @classmethod
    def from_edges(
        cls,
        n: int,
        receivers: Sequence[int] | np.ndarray,
        senders: Sequence[int] | np.ndarray,
        weights: Sequence[float] | np.ndarray | float,
        own: np.ndarray | None = None,
    ) -> "SparseMatrix":
        """Return the round with W[receivers[e], senders[e]] = weights[e] and the diagonal `own`.

        If `own` is None, the diagonal makes each row sum to one. A number as `weights` is the
        weight of all edges. Each pair of a receiver and a sender may occur once, and no edge may
        lead from a node to itself; this is not checked.
        """
        to = np.asarray(receivers, np.int64)
        source = np.asarray(senders, np.int64)
        values = np.broadcast_to(np.asarray(weights, np.float64), to.shape)
        order = np.lexsort((source, to))
        to = to[order]
        source = source[order]
        values = values[order].copy()
        indptr = np.concatenate(([0], np.cumsum(np.bincount(to, minlength=n))))
        if own is None:
            own = 1.0 - np.bincount(to, weights=values, minlength=n)
        return cls(indptr.astype(np.int64), source, values, np.array(own, np.float64))

    @classmethod
    def from_matrix(cls, matrix: np.ndarray) -> "SparseMatrix":
        """Return the round of an (n, n) array; non-zero elements off the diagonal are the edges."""
        matrix = np.asarray(matrix, np.float64)
        off = matrix.copy()
        np.fill_diagonal(off, 0.0)
        to, source = np.nonzero(off)
        return cls.from_edges(len(matrix), to, source, matrix[to, source], matrix.diagonal())

    def _key(self) -> tuple[bytes, ...]:
        return tuple(a.tobytes() for a in (self.indptr, self.indices, self.weights, self.own))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SparseMatrix) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"SparseMatrix(n={self.n}, edges={len(self.indices)})"

    @property
    def n(self) -> int:
        return len(self.own)

    @property
    def degree(self) -> int:
        return int(np.diff(self.indptr).max())

    @property
    def edge_count(self) -> int:
        return len(self.indices)

    @cached_property
    def edge_receivers(self) -> np.ndarray:
        """Receiving node of each edge, (edges,); `indices` holds the sending nodes."""
        return _frozen(np.repeat(np.arange(self.n), np.diff(self.indptr)))

    @cached_property
    def transposed(self) -> "SparseMatrix":
        return SparseMatrix.from_edges(
            self.n, self.indices, self.edge_receivers, self.weights, self.own
        )

    def neighbours(self, i: int) -> tuple[np.ndarray, np.ndarray, float]:
        """Return the in-neighbours of node i, ascending, their weights, and its own weight."""
        row = slice(self.indptr[i], self.indptr[i + 1])
        return self.indices[row], self.weights[row], float(self.own[i])

    def receivers(self, j: int) -> np.ndarray:
        return self.transposed.neighbours(j)[0]

    def slack(self, kappa: float) -> "SparseMatrix":
        own = kappa * self.own + (1.0 - kappa)
        return SparseMatrix(self.indptr, self.indices, kappa * self.weights, own)

    def matrix(self) -> np.ndarray:
        matrix = np.diag(self.own)
        matrix[self.edge_receivers, self.indices] = self.weights
        return matrix

    def apply(self, x: np.ndarray) -> np.ndarray:
        column = (slice(None),) + (None,) * (x.ndim - 1)
        total = self.own[column] * x
        filled = np.flatnonzero(np.diff(self.indptr))
        if len(filled):
            parts = self.weights[column] * x[self.indices]
            total[filled] += np.add.reduceat(parts, self.indptr[filled], axis=0)
        return total

    def row_sums(self) -> np.ndarray:
        return self.own + np.bincount(self.edge_receivers, self.weights, self.n)

    def column_sums(self) -> np.ndarray:
        """Return the sum of the weights in each column, (n,)."""
        return self.own + np.bincount(self.indices, self.weights, self.n)

    def smallest(self) -> float:
        return float(min(self.own.min(), self.weights.min(initial=np.inf)))

    def symmetric(self) -> bool:
        other = self.transposed
        return (
            np.array_equal(self.indptr, other.indptr)
            and np.array_equal(self.indices, other.indices)
            and np.allclose(self.weights, other.weights, rtol=0.0, atol=TOLERANCE)
        )


Round = Circulant | SparseMatrix


def as_sparse(r: Round) -> SparseMatrix:
    """Return the same round as `SparseMatrix`."""
    if isinstance(r, SparseMatrix):
        return r
    to = np.repeat(np.arange(r.n), r.degree)
    source = (to.reshape(r.n, -1) + np.array(r.offsets, np.int64)).ravel() % r.n
    return SparseMatrix.from_edges(r.n, to, source, np.tile(r.weights, r.n), np.full(r.n, r.own))


@lru_cache(maxsize=4)
def exact_average(weights: tuple[float, ...]) -> SparseMatrix:
    """Return the round in which each node gets Σ_j ``weights[j]`` · x_j, W = 1wᵀ.

    :param weights: weight of each node; they sum to one
    """
    return SparseMatrix.from_matrix(np.tile(np.asarray(weights, np.float64), (len(weights), 1)))


def is_exact_average(r: Round) -> bool:
    """Return whether W = 11ᵀ/n, so that each node gets the mean of all nodes."""
    is_complete = r.edge_count == r.n * (r.n - 1)
    return is_complete and abs(r.smallest() - 1 / r.n) <= TOLERANCE


def weigh_nodes(r: Round, weights: tuple[float, ...]) -> SparseMatrix:
    """Return the round in which each node weights the terms of its average by w = ``weights``.

    It is W'_ij = W_ij w_j / Σ_k W_ik w_k, so that rows of W' sum to one. W = 11ᵀ/n becomes 1wᵀ, and
    two nodes that average with each other get (w_i x_i + w_j x_j)/(w_i + w_j). If all nodes do so,
    or the round is exact, Σ_i w_i x_i is preserved; in other rounds, it changes.

    :param r: round whose rows sum to one, without negative weights
    :param weights: weight w_i > 0 of each node; they sum to one
    """
    if is_exact_average(r):
        return exact_average(weights)
    edges = as_sparse(r)
    w = np.asarray(weights, np.float64)
    own = edges.own * w
    per_edge = edges.weights * w[edges.indices]
    totals = own + np.bincount(edges.edge_receivers, per_edge, r.n)
    per_edge = per_edge / totals[edges.edge_receivers]
    return SparseMatrix(edges.indptr, edges.indices, per_edge, own / totals)


class Xor(SparseMatrix):
    """Round that pairs nodes i and i xor k, with another formula for the own weight after slack.

    Slack κ gives the own weight 1 − κw, and not κ(1 − w) + (1 − κ) as in other rounds. The formulas
    differ in the last bit, and the digests of runs depend on it.
    """

    def slack(self, kappa: float) -> SparseMatrix:
        return paired(self.indices, kappa * self.weights[0])


def paired(partner: np.ndarray, weight: float = 0.5) -> SparseMatrix:
    """Return a matching: W[i, partner[i]] = weight, W[i, i] = 1 − weight.

    :param partner: partner of each node, (n,), with partner[partner[i]] = i; a node i with
        partner[i] = i is idle and has the own weight 1
    :param weight: weight that partners give each other
    """
    nodes = np.arange(len(partner))
    partner = np.asarray(partner, np.int64)
    busy = np.flatnonzero(partner != nodes)
    own = np.where(partner != nodes, 1.0 - weight, 1.0)
    is_xor = partner[0] > 0 and np.array_equal(partner, nodes ^ partner[0])
    kind = Xor if is_xor else SparseMatrix
    return kind.from_edges(len(partner), busy, partner[busy], weight, own)

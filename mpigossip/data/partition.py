"""Partition of samples over nodes, and the order in which each node takes its samples."""

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpigossip.config import Data, JobError
from mpigossip.config.readable import pluralize
from mpigossip.data.philox import ORDER, SPLIT, permutation, permutations


def partition(
    labels: np.ndarray,
    n: int,
    kind: str,
    seed: int = 0,
    shuffled_percent: float = 100.0,
    alpha: float = 0.1,
) -> list[np.ndarray]:
    """Split the samples over n nodes.

    The numbers of samples of two nodes differ by at most one. The kinds are

    * "shuffled": random order, split into n parts;
    * "sorted": sorted by label, with samples of a label in the given order, split into n parts;
    * "mixed": sorted by label; then the first shuffled_percent % of this order are shuffled, and
      the whole is split into n parts (De Sa and Lu, DeTAG). 100 shuffles all samples, and 0 is the
      same as "sorted";
    * "dirichlet": each class is distributed over nodes in proportions from Dirichlet(alpha) (Hsu,
      Qi, Brown 2019). A full node takes no more samples, and the remaining samples of a class go to
      the other nodes in their proportions, so that no node gets too many samples. The classes are
      distributed in random order. With a small alpha, each node has few classes; with a large
      alpha, all nodes have similar classes.

    :param labels: label of each sample
    :param n: number of nodes
    :param kind: kind of the partition
    :param seed: random seed
    :param shuffled_percent: percentage of "mixed"
    :param alpha: parameter of "dirichlet"
    :return: n disjoint int64 arrays of indices
    :raises JobError: if there are fewer samples than nodes
    """
    labels = np.asarray(labels)
    if n > len(labels):
        raise JobError(
            f"{n} nodes can't share {pluralize(len(labels), 'training sample')}: use at most "
            f"{pluralize(len(labels), 'node')}, or more data"
        )
    if kind == "dirichlet":
        return _dirichlet(labels, n, seed, alpha)
    if kind == "shuffled":
        order = permutation(len(labels), seed, SPLIT)
    else:
        order = np.argsort(labels, kind="stable")
        if kind == "mixed":
            mixed = round(len(labels) * shuffled_percent / 100)
            order[:mixed] = order[permutation(mixed, seed, SPLIT)]
    return np.array_split(order, n)


def _dirichlet(labels: np.ndarray, n: int, seed: int, alpha: float) -> list[np.ndarray]:
    """Distribute the samples of each class over the nodes, as `partition` describes "dirichlet"."""
    random = np.random.Generator(np.random.Philox(key=seed & (1 << 64) - 1))
    room = np.array([len(part) for part in np.array_split(np.arange(len(labels)), n)])
    taken: list[list[np.ndarray]] = [[] for _ in range(n)]
    for label in random.permutation(np.unique(labels)):
        members = random.permutation(np.flatnonzero(labels == label))
        counts = _fill(len(members), random.dirichlet(np.full(n, alpha)), room)
        room -= counts
        for node, piece in enumerate(np.split(members, np.cumsum(counts)[:-1])):
            taken[node].append(piece)
    return [np.sort(np.concatenate(pieces)) for pieces in taken]


def _fill(samples: int, proportions: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Return the number of samples of a class that each node gets, (n,).

    :param samples: number of samples of the class
    :param proportions: fraction of the class that each node gets if it has enough room, (n,)
    :param room: number of samples that each node may still get, (n,)
    """
    counts = np.zeros_like(room)
    while remaining := samples - int(counts.sum()):
        free = room - counts
        weights = np.where(free > 0, proportions, 0.0)
        # With a small alpha, proportions can underflow to 0. Then use the free room instead.
        weights = weights if weights.sum() > 0 else free.astype(float)
        quotas = remaining * weights / weights.sum()
        share = np.minimum(np.floor(quotas).astype(room.dtype), free)
        if not share.any():  # All quotas are below 1: give one sample to the largest of them.
            share[np.argmax(quotas)] = 1
        counts += share
    return counts


class Order:
    """Sample order of one node: a permutation per epoch that follows from (seed, epoch, node).

    The samples of a step follow from the number of the step, so that a resumed run continues with
    the right samples although checkpoints do not contain the order. An epoch has the same number of
    steps on every node. Samples of a node that are left over at the end of an epoch are not used in
    this epoch; which samples these are depends on the epoch.
    """

    def __init__(
        self, part: np.ndarray, node: int, seed: int, batch: int, steps_per_epoch: int
    ) -> None:
        """Create the order of a node.

        :param part: indices of the node's samples, int64
        :param node: index of the node
        :param seed: random seed
        :param batch: number of samples of the node per step, over all slots
        :param steps_per_epoch: number of steps per epoch
        """
        self.part = part
        self.node = node
        self.seed = seed
        self.batch = batch
        self.steps_per_epoch = steps_per_epoch
        self.latest = -1, part  # number of an epoch, and the samples in the order of that epoch

    def epoch(self, step: int) -> int:
        """Return the epoch of a step, counted from 0."""
        return step // self.steps_per_epoch

    def batch_indices(self, step: int) -> np.ndarray:
        """Return the indices of the samples of the node in a step, (``batch``,) int64."""
        epoch, position = divmod(step, self.steps_per_epoch)
        draw_together([self], epoch)
        return self.latest[1][position * self.batch : (position + 1) * self.batch]


def draw_together(orders: Sequence[Order], epoch: int) -> None:
    """Draw the permutations of several nodes for an epoch, and store them in the orders.

    One draw for all nodes is faster than a draw for each of them. An order that has the permutation
    of this epoch already is not changed.

    :param orders: orders with the same seed
    :param epoch: number of the epoch
    """
    if outdated := [order for order in orders if order.latest[0] != epoch]:
        lengths = [len(order.part) for order in outdated]
        nodes = [order.node for order in outdated]
        drawn = permutations(lengths, outdated[0].seed, ORDER, epoch, nodes)
        for order, indices in zip(outdated, drawn, strict=True):
            order.latest = epoch, order.part[indices]


class Share(NamedTuple):
    """Samples of a stream that a node uses: every n-th sample, or all samples of its own stream."""

    node: int
    n: int
    steps_per_epoch: int
    batch: int
    """Number of samples per step, over all slots."""


def make_orders(
    data: Any, section: Data, seed: int, n: int, per_step: int
) -> Sequence[Order | Share]:
    """Return the order of samples, or the share of a stream, of each node.

    :param data: data of the job
    :param section: section `[data]` of the job
    :param seed: random seed
    :param n: number of nodes
    :param per_step: samples of a node per step
    :raises JobError: if there are too few samples for a step of all nodes, or if the data lack the
        labels that the partition needs
    """
    if data.streams:
        steps = data.train_size // n // per_step
        if not steps:
            raise JobError(
                f"an epoch of {data.train_size} samples (data.samples, or the length of the "
                f"stream) is too short for a step of {n} nodes x {per_step} samples: make "
                "data.samples larger, or data.batch smaller"
            )
        return [Share(node, n, steps, per_step) for node in range(n)]
    fraction = section.shuffled_percent
    alpha = section.dirichlet_alpha
    parts = partition(data.train_labels, n, section.partition, seed, fraction, alpha)
    return orders(parts, seed, per_step)


def partition_digest(orders: Sequence[Order | Share]) -> str:
    """Return the SHA-256 of the nodes' samples, in node order; "" for streams."""
    sha = hashlib.sha256()
    for order in orders:
        if isinstance(order, Share):
            return ""
        sha.update(len(order.part).to_bytes(8, "little"))
        sha.update(np.ascontiguousarray(order.part, "<i8").tobytes())
    return sha.hexdigest()


def orders(parts: Sequence[np.ndarray], seed: int, batch: int) -> list[Order]:
    """Return the order of each node.

    :param parts: samples of each node
    :param seed: random seed
    :param batch: samples of a node per step, over all its slots
    :raises JobError: if a node has fewer than ``batch`` samples
    """
    smallest = min(len(part) for part in parts)
    if smallest < batch:
        raise JobError(
            f"a node has {pluralize(smallest, 'training sample')}, but uses {batch} per step "
            "(slots × data.batch × algorithm.accumulate): make data.batch smaller, or "
            "use fewer nodes or more data"
        )
    return [Order(part, node, seed, batch, smallest // batch) for node, part in enumerate(parts)]

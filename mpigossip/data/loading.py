"""Orders and loaders of whatever data a job has: sources, data sets of torch, streams."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from mpigossip.cluster.world import World
from mpigossip.config import Data, JobError
from mpigossip.data.datasets import Datasets
from mpigossip.data.feeding import DatasetLoader, SourceLoader
from mpigossip.data.loader import Loader
from mpigossip.data.partition import Order, orders, partition
from mpigossip.data.sources import Source
from mpigossip.data.workers import Share

AnyData = Source | Datasets
AnyLoader = Loader | DatasetLoader


def make_orders(
    data: AnyData, section: Data, seed: int, n: int, per_step: int
) -> Sequence[Order | Share]:
    """What each of n nodes takes, ``per_step`` samples a step. Raises JobError for too few."""
    if isinstance(data, Datasets) and data.streams:
        steps = data.train_size // n // per_step
        if not steps:
            raise JobError([
                f"an epoch of {data.train_size} samples (data.samples, or the stream's own length) "
                f"has no step of {n} nodes x {per_step}: make data.samples larger, or data.batch "
                "smaller"
            ])  # fmt: skip
        return [Share(node, n, steps, per_step) for node in range(n)]
    share, alpha = section.shuffled_percent, section.dirichlet_alpha
    parts = partition(data.train_labels, n, section.partition, seed, share, alpha)
    return orders(parts, seed, per_step)


def check_alike(name: str, data: AnyData, world: World) -> None:
    """JobError where ranks don't see the same data, by their numbers; collective."""
    mine = data.train_size, data.test_size
    told = world.gather(mine)
    with world.together(JobError):
        for rank, (train, test) in enumerate(told or ()):
            if (train, test) != mine:
                raise JobError([
                    f'data.source = "{name}": rank 0 on {world.hosts[0]} has {mine[0]:,} training '
                    f"and {mine[1]:,} test samples, rank {rank} on {world.hosts[rank]} has "
                    f"{train:,} and {test:,}; all ranks need the same data"
                ])  # fmt: skip


def open_loader(
    data: AnyData,
    here: Sequence[Any],
    *,
    seed: int,
    workers: int = 0,
    timeout_s: float = 300.0,
    together: bool = False,
    **how: Any,
) -> AnyLoader:
    """The loader of these data for the nodes that live here; ``how``: devices and slots.

    ``together``: batches may be parts of one array. What isn't in memory is decoded by ``workers``
    processes, each of which has ``timeout_s`` for a batch.
    """
    if isinstance(data, Datasets):
        return DatasetLoader(data, here, workers=workers, timeout_s=timeout_s, **how)
    if workers and not data.in_memory:
        return SourceLoader(data, here, seed=seed, workers=workers, timeout_s=timeout_s, **how)
    return Loader(data, here, seed=seed, together=together, **how)


WORKERS = 2
"""Of a node, on GPUs of each slot, where `data.workers` is "auto"."""


def processes(setting: int | str, devices: Sequence[str], per_node: int) -> int:
    """Decoding processes of a rank with these slots, one of ``per_node`` of its node."""
    if isinstance(setting, int):
        return -(-setting // per_node)
    if not devices[0].startswith("cuda"):
        return -(-WORKERS // per_node)
    # a core for each slot's launches and one for the exchange are left
    cores = len(os.sched_getaffinity(0)) // per_node - len(devices) - 1
    return max(WORKERS, min(WORKERS * len(devices), cores))

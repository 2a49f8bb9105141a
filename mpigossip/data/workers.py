"""Loading processes of `DataLoader` of torch: the data sets in them, their start and their end."""

import contextlib
import itertools
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data._utils import signal_handling

from mpigossip.config import JobError
from mpigossip.config.user_code import describe_exception
from mpigossip.data.datasets import TRAIN, Datasets, Draws, drawing
from mpigossip.data.partition import Share
from mpigossip.data.pytree import Nested
from mpigossip.data.sources import Source

LAUNCHER = ("PMI", "OMPI_", "PRTE_", "SLURM_", "PALS_", "HYDRA_", "HYDI_", "MPI_", "MPICH_")
"""Prefixes of environment variables that would make a program act as a rank of the job."""


class Request(NamedTuple):
    """Samples that form a batch, and the key of their random numbers."""

    split: str
    key: tuple[int, ...]
    indices: np.ndarray


class Refused(NamedTuple):
    """Error message in place of a batch, because exceptions would lose theirs between processes."""

    text: str


class Sent:
    """Base class of data that prepare a loading process before they are unpickled in it."""

    def __reduce__(self):
        return unpack, (type(self), bytes(ForkingPickler.dumps(vars(self))))


def unpack(kind: type, state: bytes) -> Any:
    """Unpickle in a loading process, after hiding launcher and GPUs from it.

    The variables of the launcher are removed, and no GPU is visible.
    """
    for name in [name for name in os.environ if name.startswith(LAUNCHER)]:
        del os.environ[name]
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    # The launcher sends stop signals to all processes of the job, but the parent process decides.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    instance: Any = object.__new__(kind)
    vars(instance).update(ForkingPickler.loads(state))
    return instance


class Samples(Sent, Dataset):
    """Batches of `Datasets` by request."""

    def __init__(self, data: Datasets):
        self.name = data.name
        self.seed = data.seed
        self.collate = data.collate
        self.sets = {"train": data.train, "test": data.test}
        if not data.dealt:  # each node has its own test set
            self.sets |= {f"test {index}": sets["test"] for index, sets in enumerate(data.sets)}

    def __getitems__(self, request: Request) -> Nested:  # noqa: PLW3201 (torch asks for it)
        """Return the batch of a request, or why there is none."""
        dataset = self.sets[request.split]
        current = None
        indices = request.indices.tolist()
        try:
            with drawing(Draws(self.seed, request.key)):
                if hasattr(dataset, "__getitems__"):
                    samples = dataset.__getitems__(indices)
                else:
                    samples = [dataset[current := index] for index in indices]
                current = None
                return self.collate(samples)
        except Exception as error:
            subject = (
                f"sample {current}"
                if current is not None
                else f"a batch of the samples {indices[0]}, …"
            )
            split = request.split.split()[0]
            return Refused(
                f'data.source = "{self.name}": {subject} of "{split}": {describe_exception(error)}'
            )


class Raw(Sent, Dataset):
    """Batches of a source by request, which the training process completes on the device."""

    def __init__(self, source: Source):
        self.source = source

    def __getitems__(self, request: Request) -> Nested:  # noqa: PLW3201 (torch asks for it)
        """Return arrays and labels of a request, or why there are none."""
        split, key, indices = request
        try:
            raw = torch.from_numpy(np.ascontiguousarray(self.source.raw(split, indices, key)))
            return raw, torch.from_numpy(self.source.labels(split, indices))
        except Exception as error:
            return Refused(
                f'data.source = "{self.source.name}": a batch of the samples '
                f'{indices[0]}, … of "{split}": {describe_exception(error)}'
            )


class Stream(Sent, IterableDataset):
    """Batches of the streams of some nodes: for each step and each node, one per slot."""

    def __init__(
        self,
        data: Datasets,
        shares: Sequence[Share],
        slots: int,
        local_slots: Sequence[int],
        step: int,
    ):
        """Prepare the streams.

        Samples of other slots, and of steps before the first one, are read and skipped.

        :param data: the data sets
        :param shares: part of the stream for each local node
        :param slots: number of slots of a node
        :param local_slots: numbers of the local slots
        :param step: the first step
        """
        self.name = data.name
        self.seed = data.seed
        self.collate = data.collate
        sets = data.sets if len(data.sets) == len(shares) else list(data.sets) * len(shares)
        self.streams = [mapping["train"] for mapping in sets]
        self.dealt = data.dealt
        self.shares = shares
        self.step = step
        self.slots = slots
        self.local_slots = local_slots

    def __iter__(self) -> Iterator[Nested]:
        readers: list[tuple[Iterator, list, Share]] = []
        try:
            for share, stream in zip(self.shares, self.streams, strict=True):
                rows = _endless(stream, *((share.node, share.n) if self.dealt else (0, 1)))
                state: list = [Draws(self.seed, (TRAIN, share.node))]
                with drawing(state):
                    skipped = self.step * share.batch
                    next(itertools.islice(rows, skipped, skipped), None)
                readers.append((rows, state, share))
            for index in itertools.count(self.step):
                for rows, state, share in readers:
                    for slot in range(self.slots):
                        with drawing(state):
                            samples = list(itertools.islice(rows, share.batch // self.slots))
                        if slot in self.local_slots:
                            # skipped samples are not collated, so collating must not use the random
                            # numbers of the stream
                            with drawing(Draws(self.seed, (TRAIN, index, share.node, slot))):
                                batch = self.collate(samples)
                            yield batch
        except Exception as error:
            yield Refused(
                f'data.source = "{self.name}": the stream of "train": {describe_exception(error)}'
            )


def _endless(stream: IterableDataset, first: int, stride: int) -> Iterator[Any]:
    """Yield every ``stride``-th sample from number ``first`` on; repeat the stream endlessly."""
    for number in itertools.count():
        if hasattr(stream, "set_epoch"):
            stream.set_epoch(number)
        rows = iter(stream)
        if rows is stream:
            raise ValueError(
                "__iter__ returns self, so the stream can't be read twice or by several nodes; "
                "write __iter__ as a generator"
            )
        has_samples = False
        for sample in itertools.islice(rows, first, None, stride):
            has_samples = True
            yield sample
        if not has_samples:
            raise ValueError(
                f"it returned no sample for node {first} of {stride} in a complete pass"
            )


def start_loading(loader: DataLoader, name: str) -> Iterator[Nested]:
    """Start the processes of a loader, and return its iterator.

    :param loader: the loader
    :param name: name of the data, for messages
    :raises JobError: if the data can't be sent to the processes
    """
    try:
        with _no_program(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Got pickle error")  # the error below says it
            return iter(loader)
    except Exception as error:
        if not loader.num_workers:
            raise
        raise JobError(
            f'data.source = "{name}": its result can\'t be sent to the {loader.num_workers} '
            f"loading processes ({describe_exception(error)}); define its classes and functions "
            "at the top level of a module, or load in the training process: data.workers = 0"
        ) from error


@contextlib.contextmanager
def _no_program() -> Iterator[None]:
    """Hide the main module from new processes: they would import it, and MPI with it."""
    program = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = program


def end(batches: Any) -> None:
    """End the processes behind an iterator; do nothing if there are none.

    Torch stops watching them first, because a process that aborts while it ends is not an error of
    the run.
    """
    unwatch(batches)
    if hasattr(batches, "_shutdown_workers"):
        batches._shutdown_workers()


def unwatch(batches: Any) -> None:
    """Prevent torch from raising errors when a process behind an iterator ends."""
    if getattr(batches, "_worker_pids_set", False):
        signal_handling._remove_worker_pids(id(batches))
        batches._worker_pids_set = False


def same(batch: Nested) -> Nested:
    """Return the batch unchanged; requests are answered with whole batches."""
    return batch

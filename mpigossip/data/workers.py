"""Loading processes of torch's `DataLoader`: the data sets in them, their start and their end."""

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

from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data._utils import signal_handling

from mpigossip.config import JobError
from mpigossip.config.user_code import describe_exception
from mpigossip.data.base import TEST, TRAIN, JobData, Request, SampleError
from mpigossip.data.datasets import Datasets, Draws, drawing
from mpigossip.data.partition import Share
from mpigossip.data.pytree import Nested

LAUNCHER = ("PMI", "OMPI_", "PRTE_", "SLURM_", "PALS_", "HYDRA_", "HYDI_", "MPI_", "MPICH_")
"""Prefixes of environment variables that would make a program act as a rank of the job."""


class Refused(NamedTuple):
    """Error message that takes the place of a batch, in this or in a loading process."""

    text: str


class SentToWorker:
    """Base class of objects that are sent to a loading process, and prepare it on arrival."""

    def __reduce__(self):
        return unpack, (type(self), bytes(ForkingPickler.dumps(vars(self))))


def unpack(kind: type, state: bytes) -> Any:
    """Restore an object in a loading process, after hiding the launcher and the GPUs from it.

    Environment variables of the launcher are removed, because MPI would otherwise be started as a
    rank of the job. No GPU is visible, because each CUDA process would take memory there. From now
    on, the process uses one OpenMP thread and ignores stop signals.

    :param kind: class of the object
    :param state: attributes of the object, pickled
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


class Requested(SentToWorker, Dataset):
    """Torch Dataset whose items are batches: its index is a `Request`."""

    def __init__(self, data: JobData):
        self.data = data

    def __getitems__(self, request: Request) -> Nested:  # noqa: PLW3201 (torch asks for it)
        """Return the batch of a request, or `Refused` if it cannot be loaded."""
        try:
            return self.data.load(request)
        except SampleError as error:
            subject = f"sample {error.index}"
            reason = describe_exception(error.__cause__ or error)
        except Exception as error:
            subject = f"a batch of the samples {request.indices[0]}, …"
            reason = describe_exception(error)
        return Refused(
            f'data.source = "{self.data.name}": {subject} of "{request.split}": {reason}'
        )


class Stream(SentToWorker, IterableDataset):
    """Torch IterableDataset of batches of streams, without an end.

    For each step and each local node, it yields one batch per local slot. If a stream raises an
    exception, it yields `Refused`, and ends.
    """

    def __init__(
        self,
        data: Datasets,
        shares: Sequence[Share],
        slots: int,
        local_slots: Sequence[int],
        step: int,
    ):
        """Store the streams.

        Samples of other slots, and of steps before the first one, are read and skipped later.

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
                            # Skipped samples are not collated. Collating therefore must not draw
                            # from the random numbers of the stream.
                            with drawing(Draws(self.seed, (TRAIN, index, share.node, slot))):
                                batch = self.collate(samples)
                            yield batch
        except Exception as error:
            yield Refused(
                f'data.source = "{self.name}": the stream of "train": {describe_exception(error)}'
            )


def read_test_stream(data: Datasets, node: int, row: int, n: int) -> Iterator[Nested]:
    """Read the test stream in this process, one batch at a time.

    If all nodes read one stream, the node takes every n-th of its first ``data.test_size`` samples;
    otherwise, it takes the first ``data.test_size`` samples of its own stream. After an exception,
    `Refused` is yielded, and nothing more.

    :param data: the data sets
    :param node: number of the node
    :param row: index of the node among the local nodes
    :param n: number of all nodes
    """
    stream = data.sets[0 if data.dealt else row]["test"]
    first, stride = (node, n) if data.dealt else (0, 1)
    state: list = [Draws(data.seed, (TEST, node))]
    try:
        with drawing(state):
            samples = itertools.islice(stream, first, data.test_size, stride)
        while True:
            # The caller evaluates the batch with the random state of the program.
            with drawing(state):
                chosen = list(itertools.islice(samples, data.test_batch))
                batch = data.collate(chosen) if chosen else None
            if not chosen:
                return
            yield batch
    except Exception as error:
        yield Refused(
            f'data.source = "{data.name}": the stream of "test": {describe_exception(error)}'
        )


def _endless(stream: IterableDataset, first: int, stride: int) -> Iterator[Any]:
    """Yield every ``stride``-th sample from number ``first`` on; repeat the stream endlessly.

    If the stream has a method `set_epoch`, each pass calls it first, with the number of the pass.

    :param stream: dataset of the program, which may be read more than once
    :param first: number of the first sample of each pass, from 0
    :param stride: difference between the numbers of successive samples
    :raises ValueError: if the stream can't be read twice, or if a pass yields no sample
    """
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
                f"a complete pass returned at most {first} samples: it must return at least "
                f"{stride}, one for each node that reads the stream"
            )


def start_loading(loader: DataLoader, name: str) -> Iterator[Nested]:
    """Start the processes of a loader, and return its iterator.

    :param loader: the loader; without processes, its exceptions are raised unchanged
    :param name: name of the data, for messages
    :raises JobError: if the processes can't be started, mostly because the data can't be sent to
        them
    """
    try:
        with _no_program(), warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "Got pickle error"
            )  # The JobError below contains the reason.
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
    """Return a context manager that hides the main module from new processes.

    Otherwise, they would import that module, and MPI with it.
    """
    program = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = program


def end(batches: Any) -> None:
    """End the loading processes of an iterator, if it has any.

    Torch stops watching them first, because a process that aborts while it ends is not an error of
    the run.
    """
    unwatch(batches)
    if hasattr(batches, "_shutdown_workers"):
        batches._shutdown_workers()


def unwatch(batches: Any) -> None:
    """Prevent torch from raising an error when a loading process of a data loader ends.

    :param batches: iterator of a `torch.utils.data.DataLoader`; nothing is done for other iterators
    """
    if getattr(batches, "_worker_pids_set", False):
        signal_handling._remove_worker_pids(id(batches))
        batches._worker_pids_set = False


def same(batch: Nested) -> Nested:
    """Return ``batch`` unchanged: torch needs a collate function, but batches are complete."""
    return batch

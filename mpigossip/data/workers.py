"""Loading processes of torch's `DataLoader`: what they hold, and how they begin and end."""

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
"""Beginnings of variables by which a program would take itself for a rank of the job."""


class Request(NamedTuple):
    """Samples that become a batch, and where their random numbers begin."""

    split: str
    key: tuple[int, ...]
    indices: np.ndarray


class Refused(NamedTuple):
    """The error message in place of a batch: exceptions would lose theirs between processes."""

    text: str


class Sent:
    """Data that are sent to a loading process, which prepares itself before it unpacks them."""

    def __reduce__(self):
        return unpacked, (type(self), bytes(ForkingPickler.dumps(vars(self))))


def unpacked(kind: type, state: bytes) -> Any:
    """Unpack in a loading process, which then has no variables of the launcher and no GPU."""
    for name in [name for name in os.environ if name.startswith(LAUNCHER)]:
        del os.environ[name]
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    # the launcher sends a stop signal to every process of the job; the parent decides
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    made: Any = object.__new__(kind)
    vars(made).update(ForkingPickler.loads(state))
    return made


class Samples(Sent, Dataset):
    """Batches of Datasets by request."""

    def __init__(self, data: Datasets):
        self.name = data.name
        self.seed = data.seed
        self.collate = data.collate
        self.sets = {"train": data.train, "test": data.test}
        if not data.dealt:  # each node's own
            self.sets |= {f"test {at}": one["test"] for at, one in enumerate(data.sets)}

    def __getitems__(self, request: Request) -> Nested:  # noqa: PLW3201 (torch asks for it)
        """The batch of a request, or why there is none."""
        one = self.sets[request.split]
        at = None
        indices = request.indices.tolist()
        try:
            with drawing(Draws(self.seed, request.key)):
                if hasattr(one, "__getitems__"):
                    found = one.__getitems__(indices)
                else:
                    found = [one[at := index] for index in indices]
                at = None
                return self.collate(found)
        except Exception as error:
            which = f"sample {at}" if at is not None else f"a batch of the samples {indices[0]}, …"
            split = request.split.split()[0]
            return Refused(
                f'data.source = "{self.name}": {which} of "{split}": {describe_exception(error)}'
            )


class Raw(Sent, Dataset):
    """Raw batches of a source by request: what the training process finishes on the device."""

    def __init__(self, source: Source):
        self.source = source

    def __getitems__(self, request: Request) -> Nested:  # noqa: PLW3201 (torch asks for it)
        """Arrays and labels of a request, or why there are none."""
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
    """Batches of the streams of some nodes: step after step, node after node, slot after slot."""

    def __init__(
        self, data: Datasets, shares: Sequence[Share], slots: int, mine: Sequence[int], step: int
    ):
        """``slots``: of a node, and ``mine``, those that live here; ``step``: the first.

        What other slots take, and all before that step, is read and left out.
        """
        self.name = data.name
        self.seed = data.seed
        self.collate = data.collate
        sets = data.sets if len(data.sets) == len(shares) else list(data.sets) * len(shares)
        self.streams = [each["train"] for each in sets]
        self.dealt = data.dealt
        self.shares = shares
        self.step = step
        self.slots = slots
        self.mine = mine

    def __iter__(self) -> Iterator[Nested]:
        readers: list[tuple[Iterator, list, Share]] = []
        try:
            for share, one in zip(self.shares, self.streams, strict=True):
                rows = _endless(one, *((share.node, share.n) if self.dealt else (0, 1)))
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
                        if slot in self.mine:
                            # what is skipped isn't collated: it may not draw from the stream's
                            with drawing(Draws(self.seed, (TRAIN, index, share.node, slot))):
                                batch = self.collate(samples)
                            yield batch
        except Exception as error:
            yield Refused(
                f'data.source = "{self.name}": the stream of "train": {describe_exception(error)}'
            )


def _endless(one: IterableDataset, turn: int, of: int) -> Iterator[Any]:
    """Every ``of``-th sample from the ``turn``-th on, pass after pass."""
    for number in itertools.count():
        if hasattr(one, "set_epoch"):
            one.set_epoch(number)
        rows = iter(one)
        if rows is one:
            raise ValueError(
                "iter() of it is itself, so it can't be read anew or by several "
                "nodes; let __iter__ be a generator"
            )
        seen = False
        for sample in itertools.islice(rows, turn, None, of):
            seen = True
            yield sample
        if not seen:
            raise ValueError(f"it gave no sample for node {turn} of {of} in a whole pass")


def started(loader: DataLoader, name: str) -> Iterator[Nested]:
    """Its iterator; JobError where the data of this name can't be sent to its processes."""
    try:
        with _no_program(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Got pickle error")  # said below
            return iter(loader)
    except Exception as error:
        if not loader.num_workers:
            raise
        raise JobError(
            f'data.source = "{name}": what it returned can\'t be sent to the '
            f"{loader.num_workers} loading processes ({describe_exception(error)}); define its "
            f"classes and "
            "functions at the top of a module, or load in the training process: data.workers = 0"
        ) from error


@contextlib.contextmanager
def _no_program() -> Iterator[None]:
    """Hide the running program from processes that begin: they would import it, and MPI with it."""
    program = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = program


def end(batches: Any) -> None:
    """End the processes behind an iterator; nothing where there are none.

    That one aborts while it ends is no failure of the run, so torch stops watching them first.
    """
    unwatch(batches)
    if hasattr(batches, "_shutdown_workers"):
        batches._shutdown_workers()


def unwatch(batches: Any) -> None:
    """Let torch raise nothing more when a process behind an iterator ends."""
    if getattr(batches, "_worker_pids_set", False):
        signal_handling._remove_worker_pids(id(batches))
        batches._worker_pids_set = False


def same(batch: Nested) -> Nested:
    """A batch as it is: requests are answered with whole ones."""
    return batch

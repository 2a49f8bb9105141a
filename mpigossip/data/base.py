"""Contract between the data of a job and the loader.

`JobData.load` makes a batch in host memory, in this or another process, and `JobData.transform`
completes it on the device of a slot. There are two kinds of data. A `Source` (module `sources`)
loads compact arrays, which its transform converts to inputs of the model. `Datasets` (module
`datasets`) are torch Datasets of a custom function, whose batches are complete.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mpigossip.data.pytree import Nested

TRAIN = 0
"""First number of `Request.draws` for training batches."""
TEST = 1
"""First number of `Request.draws` for test batches."""


class Batch(NamedTuple):
    """Samples of one slot for one step, with their targets."""

    inputs: Tensor
    targets: Tensor


class Request(NamedTuple):
    """Request for a batch: its samples, and the integers that determine its random numbers."""

    split: str
    """"train" or "test"."""
    indices: np.ndarray
    """Indices (B,) of the samples."""
    epoch: tuple[int, ...] = ()
    """(seed, epoch), from which the random augmentation of each sample follows; (): samples are
    not augmented, as in tests."""
    draws: tuple[int, ...] = ()
    """Key of the random numbers that a Dataset draws: (TRAIN, step, node, slot), or (TEST, first
    index)."""
    row: int = 0
    """Index of the node among the local nodes, for data that are different on each node."""


class SampleError(Exception):
    """Error that a dataset raised when it was asked for one sample; `__cause__` is its exception.

    :param index: index of the sample in the dataset
    """

    def __init__(self, index: int) -> None:
        self.index = index
        super().__init__(index)


class JobData(ABC):
    """Training and test samples of a job, which are loaded as batches."""

    name: str = ""
    """Value of `data.source`, for error messages."""
    classes: int
    """Number of classes; for text, number of tokens of the vocabulary."""
    shape: tuple[int, ...]
    """Shape of one sample as an input of the model, such as (C, H, W), or (T,) for T tokens."""
    dtype: torch.dtype | None
    """Type of the inputs: float32, or int64 for tokens; None: it is not known."""
    train_labels: np.ndarray
    """Label of each training sample, an int64 array (N,), for partitions."""
    test_batch: int
    """Number of samples of a test batch."""
    in_memory: bool
    """True if a batch takes microseconds, so that preparing it in advance saves no time."""
    independent: bool = False
    """True if samples do not depend on other samples of their batch, so that the batches of several
    nodes can be made as one array. It is not inherited: each subclass has to state it."""
    streams: bool = False
    """True if the training samples are a stream, which only `Datasets` can have."""
    streams_test: bool = False
    """True if the test samples are a stream, which only `Datasets` can have."""

    def __init_subclass__(cls, **options: object) -> None:
        """Set `independent` of a subclass to False, unless the subclass sets it itself."""
        super().__init_subclass__(**options)
        cls.independent = vars(cls).get("independent", False)

    @property
    @abstractmethod
    def train_size(self) -> int:
        """Number of training samples of an epoch, over all nodes."""

    @property
    @abstractmethod
    def test_size(self) -> int:
        """Number of test samples."""

    @abstractmethod
    def load(self, request: Request) -> Nested:
        """Load the batch of a request into host memory, in the form that is sent between processes.

        :param request: split and samples of the batch, and the integers that determine its random
            numbers
        :raises SampleError: if a dataset raises an exception when it is asked for one sample. Other
            exceptions are raised unchanged, for example if a dataset loads a whole batch
        """

    def transform(self, batch: Nested) -> Nested:
        """Convert a loaded batch, which was copied to a device, to the batch for the model."""
        return batch

    @abstractmethod
    def sample(self, split: str) -> Nested:
        """Return a batch of one sample of ``split``, with which a run tests its task and model."""

    @abstractmethod
    def content_digest(self) -> bytes:
        """Return a digest by which ranks compare their data, usually of a few samples per split."""

    def close(self) -> None:  # noqa: B027 (data without files have nothing to close)
        """Close all files; a second call has no effect."""

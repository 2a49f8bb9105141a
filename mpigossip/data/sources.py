"""Sources of samples: the built-in digits, synthetic samples, packed images and packed text.

`Source.raw` makes compact arrays, of pixels or tokens, on the CPU, in this or another process.
After they were copied to the device of a slot, `Source.finish` converts them there to inputs of the
model. For images, a quarter of the bytes is copied to a GPU, and the GPU does the normalization.
"""

import math
import operator
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor

from mpigossip import config
from mpigossip.config import JobError
from mpigossip.config.errors import Failure, UserError
from mpigossip.config.host import require_memory
from mpigossip.config.user_code import describe_exception, import_object, is_user_code
from mpigossip.data.base import Batch, JobData, Request
from mpigossip.data.datasets import (
    EXPECTED,
    SPLITS,
    Datasets,
    call,
    compared_indices,
    content_hash,
    data_error,
    same_content,
)
from mpigossip.data.images import Images, Recipe
from mpigossip.data.philox import NOISE, words
from mpigossip.data.problems import Problem, factorization, logistic, quadratics
from mpigossip.store.dataset import open_dataset

if TYPE_CHECKING:
    from mpigossip.cluster.world import World

DIGITS = Path(__file__).with_name("digits.h5")
"""Packed images of the built-in source "digits"."""


class Source(JobData):
    """Training and test samples as arrays; a subclass defines `raw` and `finish`."""

    dtype: torch.dtype = torch.float32
    test_labels: np.ndarray
    """Label of each test sample, an int64 array."""
    test_batch = 256
    in_memory: bool = True

    @property
    def train_size(self) -> int:
        """Number of training samples."""
        return len(self.train_labels)

    @property
    def test_size(self) -> int:
        """Number of test samples."""
        return len(self.test_labels)

    def load(self, request: Request) -> tuple[Tensor, Tensor]:
        """Return the result of :meth:`raw`, and the labels."""
        raw = np.ascontiguousarray(self.raw(request.split, request.indices, request.epoch))
        labels = self.labels(request.split, request.indices)
        return torch.from_numpy(raw), torch.from_numpy(labels)

    def transform(self, batch: tuple[Tensor, Tensor]) -> Batch:
        return Batch(*self.finish(*batch))

    def sample(self, split: str) -> tuple[Tensor, Tensor]:
        return self.make_batch(split, np.arange(1), (0, 0))

    @abstractmethod
    def raw(self, split: str, indices: np.ndarray, key: tuple[int, ...] = ()) -> np.ndarray:
        """Return samples in a compact form, in host memory.

        :param split: "train" or "test"
        :param indices: indices (B,) of the samples
        :param key: (seed, epoch), which determines random augmentation together with the index of a
            sample; (): no augmentation, as for tests
        :return: array whose first dimension is B
        """

    @abstractmethod
    def finish(self, raw: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Convert the result of :meth:`raw` to inputs and int64 targets, on the device of ``raw``.

        :param raw: compact samples, on any device
        :param labels: labels of these samples, int64 (B,), on the same device
        """

    def labels(self, split: str, indices: np.ndarray) -> np.ndarray:
        """Return the labels of samples as an int64 array (B,).

        :param split: "train" or "test"
        :param indices: indices (B,) of the samples
        """
        return (self.train_labels if split == "train" else self.test_labels)[indices]

    def content_digest(self) -> bytes:
        parts: list[Any] = []
        for split, size, key in (("train", self.train_size, (0, 0)), ("test", self.test_size, ())):
            if size:
                indices = compared_indices(size)
                parts += [self.labels(split, indices), self.raw(split, indices, key)]
        return content_hash(parts)

    def make_batch(self, split: str, indices: np.ndarray, key: tuple[int, ...] = ()) -> Batch:
        """Return inputs and targets on the CPU; the parameters are the same as for :meth:`raw`."""
        return self.transform(self.load(Request(split, indices, key)))


class ImageSource(Source):
    """Packed images, as float32 inputs (value − mean) / std with mean and std of each channel."""

    independent = True

    def __init__(self, recipe: Recipe) -> None:
        self.images = Images(recipe)
        self.name = recipe.path
        data = self.images.data
        self.classes = len(data.classes)
        self.in_memory = self.images.cached
        self.shape = self.images.shape
        self.train_labels = data.train.labels
        self.test_labels = data.test.labels
        pair = np.stack([1 / (data.scale * data.std), -data.mean / data.std])
        scaling = torch.tensor(pair, dtype=torch.float32)[:, :, None, None]
        self._scaling = {torch.device("cpu"): scaling}

    def raw(self, split: str, indices: np.ndarray, key: tuple[int, ...] = ()) -> np.ndarray:
        """Return decoded images, uint8 (B, C, H, W)."""
        return self.images.batch(split, indices, key)

    def finish(self, raw: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        # The factors are kept on each device, because copying them would wait for the GPU.
        if raw.device not in self._scaling:
            self._scaling[raw.device] = self._scaling[torch.device("cpu")].to(raw.device)
        factor, shift = self._scaling[raw.device]
        inputs = raw.to(torch.float32)
        inputs *= factor
        inputs += shift
        return inputs, labels

    def content_digest(self) -> bytes:
        # Compare the stored checksums of all samples, because the decoders of two hosts may give
        # slightly different pixels.
        splits = [self.images.data.split(split) for split in SPLITS]
        return content_hash([[split.labels, split.checksums] for split in splits])

    def __reduce__(self):  # a decoding process opens the file again
        return ImageSource, (self.images.recipe._replace(cache="never"),)

    def close(self) -> None:
        self.images.close()


class SyntheticSource(Source):
    """Random samples of any shape that a model can classify: a pattern of the class plus noise.

    Sample i has the label y_i = i mod classes and the values x_i = p[o(y_i) …] + z[q(i) …]. This is
    a window of the random vector p, plus a window of the random vector z. p consists of runs of 8
    equal values with a standard deviation of 0.5; the values of z are independent with a standard
    deviation of 1. The offsets o and q are random. A sample of any size therefore costs a copy, but
    no draw of random numbers.
    """

    name = "synthetic"
    independent = True
    OFFSETS = 1 << 16
    """Number of different offsets of a window."""

    def __init__(
        self, shape: tuple[int, ...], classes: int, samples: int, test_samples: int, seed: int
    ) -> None:
        self.classes = classes
        self.shape = shape
        self.seed = seed
        self._counts = samples, test_samples

    @property
    def train_size(self) -> int:
        return self._counts[0]

    @property
    def test_size(self) -> int:
        return self._counts[1]

    @cached_property
    def train_labels(self) -> np.ndarray:  # type: ignore[override]
        """Labels of the training samples, int64 (samples,); computed at the first use."""
        return self._labels(self.train_size)

    @cached_property
    def test_labels(self) -> np.ndarray:  # type: ignore[override]
        """Labels of the test samples, int64 (test_samples,); computed at the first use."""
        return self._labels(self.test_size)

    def _labels(self, samples: int) -> np.ndarray:
        require_memory(16 * samples, "data.samples or data.test_samples")
        return np.arange(samples, dtype=np.int64) % self.classes

    @cached_property
    def _windows(self) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
        """All windows of z and the offset of each sample; all windows of p and each class's offset.

        They are computed for the first sample, because estimating the costs of a job needs no
        samples.
        """
        samples = sum(self._counts)
        size = math.prod(self.shape)
        require_memory(16 * size, "data.shape")
        require_memory(40 * (samples + self.classes), "data.samples, data.classes")
        length = size + self.OFFSETS
        random = np.random.Generator(np.random.Philox(key=self.seed & (1 << 64) - 1))
        steps = random.standard_normal(-(-length // 8), np.float32) / np.float32(2)
        pattern = np.repeat(steps, 8)[:length]
        noise = random.standard_normal(length, np.float32)
        offsets, class_offsets = (
            (words(self.seed, NOISE, np.arange(count), block=block)[0] % self.OFFSETS).astype(
                np.int64
            )
            for block, count in enumerate((samples, self.classes))
        )
        return (
            (sliding_window_view(noise, size), offsets),
            (sliding_window_view(pattern, size), class_offsets),
        )

    def raw(self, split: str, indices: np.ndarray, key: tuple[int, ...] = ()) -> np.ndarray:
        """Return samples, float32 (B, …)."""
        numbers = indices if split == "train" else indices + self.train_size
        (noise, begins), (patterns, kinds) = self._windows
        x = patterns[kinds[self.labels(split, indices)]]
        x += noise[begins[numbers]]
        return x.reshape(len(indices), *self.shape)

    def finish(self, raw: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return raw, labels


class TextSource(Source):
    """Packed text in windows of tokens x: inputs x[0 … T − 1] and targets x[1 … T], both int64.

    T is ``context``. Adjacent windows share one token. They extend over the ends of documents or,
    if ``windows`` is "apart", each lies within one document, whose last tokens may be left out. For
    partitions, the label of a window is the index of the document in which it begins.
    """

    dtype = torch.int64
    independent = True

    def __init__(self, path: str, context: int, windows: str = "joined", every: int = 1) -> None:
        """Read the text and compute the windows.

        :param path: packed text
        :param context: number T of tokens of a sample
        :param windows: "joined" or "apart", as `data.windows` of a job
        :param every: stride over the training windows, as `data.every` of a job; 1: all of them
        :raises JobError: if the text of a split is shorter than one window
        :raises StoreError: if the file is not a packed text
        """
        self.shape = (context,)
        self.name = path
        self._text = {}
        self._begins = {}
        labels = {}
        with open_dataset(path) as data:
            self.tokenizer = data.tokenizer
            for name in ("train", "test"):
                split = data.split(name)
                self._text[name] = data.tokens(name)
                ends = split.offsets // data.tokenizer.width
                begins = _apart(ends, context) if windows == "apart" else _joined(ends, context)
                if not len(begins):
                    raise JobError(_short(name, path, ends, context, windows))
                begins = begins[:: every if name == "train" else 1]
                self._begins[name] = begins
                labels[name] = np.searchsorted(ends, begins, side="right") - 1
        self.classes = len(self.tokenizer.lengths)
        self.train_labels = labels["train"]
        self.test_labels = labels["test"]

    def raw(self, split: str, indices: np.ndarray, key: tuple[int, ...] = ()) -> np.ndarray:
        """Return windows of tokens, int32 (B, T + 1)."""
        positions = self._begins[split][indices][:, None] + np.arange(self.shape[0] + 1)
        return self._text[split][positions].astype(np.int32)

    def finish(self, raw: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens and the tokens that follow them, int64 (B, T) each."""
        tokens = raw.to(torch.int64)
        return tokens[:, :-1], tokens[:, 1:]


def _joined(ends: np.ndarray, context: int) -> np.ndarray:
    """Return the index of the first token of each window, with all documents joined.

    :param ends: offset of each document, followed by the number of all tokens, (documents + 1,)
    :param context: number of tokens of a sample
    """
    return np.arange(max(ends[-1] - 1, 0) // context) * context


def _apart(ends: np.ndarray, context: int) -> np.ndarray:
    """Return the index of the first token of each window, if windows lie within documents.

    The parameters are the same as for :func:`_joined`.
    """
    counts = np.maximum(np.diff(ends) - 1, 0) // context
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(ends[:-1], counts) + within * context


def _short(name: str, path: str, ends: np.ndarray, context: int, windows: str) -> str:
    """Return the error message for a text that is shorter than one window.

    :param name: name of its split, "train" or "test"
    :param path: path of the packed text
    :param ends: offset of each document in tokens, followed by the number of all tokens
    :param context: number of tokens of a sample
    :param windows: "joined" or "apart", as `data.windows` of a job
    """
    content = f"has {ends[-1]} tokens"
    remedy = ""
    if windows == "apart":
        content = f"has no document of more than {np.diff(ends).max()} tokens"
        remedy = ', use data.windows = "joined"'
    return (
        f"the {name} text of {path} {content}, less than one window of data.context + 1 = "
        f"{context + 1}: make data.context smaller{remedy} or pack more text"
    )


def _user_data(data: config.Data, seed: int, rows: Sequence[int], n: int) -> JobData:
    """Call the custom function of `data.source` for the local nodes ``rows``; return its data.

    :param data: section `[data]` of a job
    :param seed: seed of the function's random numbers
    :param rows: indices of the local nodes
    :param n: number of all nodes
    :raises JobError: if the function can't be imported, fails, or does not return data
    """
    form = "(seed, **options) that returns torch Datasets or a Source"
    samples = call(import_object("data.source", data.source, form), data, seed, rows, n)
    if not isinstance(samples, JobData):
        raise data_error(data.source, f"returned {type(samples).__name__}; {EXPECTED}")
    samples.name = samples.name or data.source
    return samples


def _synthetic(data: config.Data, seed: int) -> Source:
    _check_no_images(data, "synthetic samples need")
    return SyntheticSource(tuple(data.shape), data.classes, data.samples, data.test_samples, seed)


def _check_no_images(data: config.Data, need: str) -> None:
    """Check that no augmentation is set, because the data are not images.

    :param data: section `[data]` of a job
    :param need: subject and verb of the remedy, which the required setting follows
    :raises JobError: if `data.augment` is not "none"
    """
    if data.augment != "none":
        raise JobError(
            f'data.augment = "{data.augment}" is for images; {need} data.augment = "none"'
        )


SOURCES: dict[str, Callable[..., Any]] = {
    "digits": lambda data, seed: _packed(DIGITS, data),
    "synthetic": _synthetic,
    "quadratics": quadratics,
    "logistic": logistic,
    "factorization": factorization,
}
"""Functions of the built-in sources, by name.

They are called like custom functions, and return a `Source` or a `Problem`.
"""


def source(data: config.Data, seed: int, rows: Sequence[int] = (0,), n: int = 1) -> JobData:
    """Open the data that `data.source` names.

    :param data: section `[data]` of a job
    :param seed: seed of synthetic samples and of random numbers of custom datasets
    :param rows: indices of the local nodes, for custom functions with a parameter `node`
    :param n: number of all nodes
    :raises JobError: if settings contradict each other, if there is no such source, or if a custom
        function fails; a UserError, Failure or MemoryError of such a function is raised unchanged
    :raises StoreError: if a file is not a complete packed dataset
    """
    if data.source in SOURCES:
        result = call(SOURCES[data.source], data, seed, rows, n)
        if isinstance(result, Problem):
            return Datasets([result.samples()], data, seed, dealt=True)
        return result
    path = Path(data.source).expanduser()
    if path.exists():
        return _packed(path, data)
    if is_user_code(data.source):
        return _user_data(data, seed, rows, n)
    names = ", ".join(f'"{name}"' for name in SOURCES)
    raise JobError(
        f'data.source = "{data.source}" is neither {names}, nor a file on this host, nor custom '
        'code "package.module:function": correct it, or make a file with: mpigossip data pack '
        "FOLDER OUT.h5"
    )


def check_alike(name: str, data: JobData, world: "World", partition: str = "") -> None:
    """Compare the data of all ranks; collective.

    The ranks compare the numbers of samples, a digest of a few samples, and the digest of the
    partition.

    :param name: value of `data.source`
    :param data: data of this rank
    :param world: world of all ranks
    :param partition: digest of the partition; "" if there is none
    :raises JobError: on all ranks, if the data of two ranks differ
    :raises UserError: on all ranks, if a sample can't be read on some rank
    """
    local_sizes = data.train_size, data.test_size
    sizes = world.gather(local_sizes)
    with world.raise_together(JobError):
        for rank, (train, test) in enumerate(sizes or ()):
            if (train, test) != local_sizes:
                raise JobError(
                    f'data.source = "{name}": rank 0 on {world.hosts[0]} has {local_sizes[0]:,} '
                    f"training and {local_sizes[1]:,} test samples, rank {rank} on "
                    f"{world.hosts[rank]} has {train:,} and {test:,}; use the same data on all "
                    "ranks"
                )
    if world.size > 1:
        _check_contents(name, data, world)
        _check_equal(
            world,
            partition,
            f'data.source = "{name}": the partition of the samples on rank {{}} on {{}} differs '
            "from the partition on rank 0 on {}; all ranks need the same labels and the same "
            "version of NumPy",
        )


def _check_contents(name: str, data: JobData, world: "World") -> None:
    """Compare a few samples of all ranks; collective.

    If ranks differ, each rank reads the same samples again. If this gives other values than before
    on some rank, the samples are random, and nothing is compared.
    """
    with world.raise_together(UserError):
        content = _content(name, data)
    if not world.agree(int(not same_content(content, world.broadcast(content)))):
        return
    with world.raise_together(UserError):
        again = _content(name, data)
    if world.agree(int(not same_content(again, content))):
        return
    _check_equal(
        world,
        content,
        f'data.source = "{name}": samples on rank {{}} on {{}} differ from the samples with the '
        "same indices on rank 0 on {}; copy the same data to all hosts, or make the function "
        "that data.source names independent of the rank",
        same_content,
    )


def _content(name: str, data: JobData) -> bytes:
    """Return `JobData.content_digest` of the data.

    :param name: value of `data.source`, for the message
    :param data: data of this rank
    :raises JobError: if this raises an exception; a UserError, Failure or MemoryError is raised
        unchanged
    """
    try:
        return data.content_digest()
    except (UserError, Failure, MemoryError):
        raise
    except Exception as error:
        text = f"a sample can't be read to compare it between ranks: {describe_exception(error)}"
        raise data_error(name, text) from error


def _check_equal(
    world: "World", value: Any, text: str, same: Callable[[Any, Any], bool] = operator.eq
) -> None:
    """Check that all ranks have equal values; collective.

    :param world: world of all ranks
    :param value: value of this rank
    :param text: message with three placeholders: a rank, its host, and the host of rank 0
    :param same: function that returns whether two values count as equal
    :raises JobError: on all ranks, if the value of some rank differs from rank 0's
    """
    values = world.gather(value)
    with world.raise_together(JobError):
        for rank, other in enumerate(values or ()):
            if not same(other, value):
                raise JobError(text.format(rank, world.hosts[rank], world.hosts[0]))


def _packed(path: Path, data: config.Data) -> Source:
    """Open a packed data set of images or text.

    :param path: path of the file
    :param data: section `[data]` of a job
    :raises JobError: if settings of section `[data]` are incompatible with it
    :raises StoreError: if the file is not a complete packed dataset
    """
    with open_dataset(path) as opened:
        kind = opened.kind
    if kind != "text":
        return ImageSource(Recipe(str(path), data.augment, data.image_size, data.cache))
    _check_no_images(data, f"{path} holds text and needs")
    text = TextSource(str(path), data.context, data.windows, data.every)
    if data.tokenizer not in (None, text.tokenizer.name):
        raise JobError(
            f'data.tokenizer = "{data.tokenizer}": the tokens of {path} belong to tokenizer '
            f'"{text.tokenizer.name}" and mean other text; use the packed text that the '
            "model was trained on, or leave data.tokenizer out to train a new model"
        )
    return text

"""Sources of samples: the built-in digits, synthetic samples, packed images, packed text.

A source gives batches in two parts: `raw` makes compact arrays (bytes of pixels or of text) on
the CPU, here or in other processes; `finish` turns them, on whatever device they were moved
to, into what a model takes. So a GPU gets a quarter of the bytes and does the normalization.
"""

import math
import operator
from abc import ABC, abstractmethod
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
from mpigossip.config.memory import require_memory
from mpigossip.config.user_code import describe_exception, import_object, is_user_code
from mpigossip.data.datasets import (
    SPLITS,
    WANTED,
    Datasets,
    call,
    compared_indices,
    content_hash,
    mistake,
    same_content,
)
from mpigossip.data.images import Images, Recipe
from mpigossip.data.philox import NOISE, words
from mpigossip.data.problems import Problem, factorization, logistic, quadratics
from mpigossip.store.dataset import open_dataset

if TYPE_CHECKING:
    from mpigossip.cluster.world import World

DIGITS = Path(__file__).with_name("digits.h5")


class Source(ABC):
    """A data set as training sees it."""

    classes: int
    """Number of classes, or of tokens."""
    shape: tuple[int, ...]
    """Of one sample as a model takes it: (C, H, W), or (T,) tokens."""
    dtype: torch.dtype = torch.float32
    """Of the inputs: int64 for tokens."""
    train_labels: np.ndarray
    """(N,) int64: the label of every training sample, for partitions and checks."""
    test_labels: np.ndarray
    in_memory: bool = True
    """A batch is a matter of microseconds: nothing to gain from decoding ahead."""
    streams: bool = False
    name: str = ""
    """`data.source`, for messages."""

    @property
    def train_size(self) -> int:
        """Number of training samples."""
        return len(self.train_labels)

    @property
    def test_size(self) -> int:
        """Number of test samples."""
        return len(self.test_labels)

    def sample(self, split: str) -> tuple[Tensor, Tensor]:
        """A batch of one sample: what a task and a model are tried on."""
        return self.make_batch(split, np.arange(1), (0, 0))

    @abstractmethod
    def raw(self, split: str, indices: np.ndarray, key: tuple[int, ...] = ()) -> np.ndarray:
        """Return B samples of "train" or "test", compact; random changes follow from key and index.

        key: (seed, epoch), or () of a test.
        """

    @abstractmethod
    def finish(self, raw: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and int64 targets on the device of `raw`."""

    def labels(self, split: str, indices: np.ndarray) -> np.ndarray:
        """Return the labels of samples, int64."""
        return (self.train_labels if split == "train" else self.test_labels)[indices]

    def content_digest(self) -> bytes:
        """Return a hash of a few samples of each split, by which ranks compare their data."""
        parts: list[Any] = []
        for split, size, key in (("train", self.train_size, (0, 0)), ("test", self.test_size, ())):
            if size:
                indices = compared_indices(size)
                parts += [self.labels(split, indices), self.raw(split, indices, key)]
        return content_hash(parts)

    def make_batch(
        self, split: str, indices: np.ndarray, key: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, made here and now."""
        raw = torch.from_numpy(self.raw(split, indices, key))
        return self.finish(raw, torch.from_numpy(self.labels(split, indices)))

    def close(self) -> None:  # noqa: B027 (a source without files has nothing to close)
        """Close files. A second call does nothing."""


AnyData = Source | Datasets


class ImageSource(Source):
    """A packed data set of images: float32 inputs, per channel (value − mean) / std."""

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
        """Return (B, C, H, W) uint8."""
        return self.images.batch(split, indices, key)

    def finish(self, raw: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if raw.device not in self._scaling:  # a copy per batch would wait for the GPU
            self._scaling[raw.device] = self._scaling[torch.device("cpu")].to(raw.device)
        factor, shift = self._scaling[raw.device]
        inputs = raw.to(torch.float32)
        inputs *= factor
        inputs += shift
        return inputs, labels

    def content_digest(self) -> bytes:
        # All samples, by their stored checksums: decoders of two hosts may differ in a bit.
        splits = [self.images.data.split(split) for split in SPLITS]
        return content_hash([[split.labels, split.checksums] for split in splits])

    def __reduce__(self):  # what a decoding process gets opens the file itself
        return ImageSource, (self.images.recipe._replace(cache="never"),)

    def close(self) -> None:
        self.images.close()


class SyntheticSource(Source):
    """Samples of any shape that can be learned: a pattern per class plus noise, from a seed.

    Patterns and noise are windows of two fixed random vectors, so a sample of any size costs a
    copy, not a draw: x_i = p[o(label_i) …] + z[o(i) …], p in runs of 8 equal values with standard
    deviation 0.5, z with 1. Sample i has label i mod classes.
    """

    name = "synthetic"
    OFFSETS = 1 << 16

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
        """Labels of the training samples, (samples,) int64; made when they are first read."""
        return self._labels(self.train_size)

    @cached_property
    def test_labels(self) -> np.ndarray:  # type: ignore[override]
        """Labels of the test samples, (test_samples,) int64; made when they are first read."""
        return self._labels(self.test_size)

    def _labels(self, samples: int) -> np.ndarray:
        require_memory(16 * samples, "data.samples or data.test_samples")
        return np.arange(samples, dtype=np.int64) % self.classes

    @cached_property
    def _windows(self) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
        """Windows of the noise and where each sample's begins; the same of patterns and classes.

        They are made when a first sample is: who only counts a job's costs needs none.
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
        places, kinds = (
            (words(self.seed, NOISE, np.arange(count), block=block)[0] % self.OFFSETS).astype(
                np.int64
            )
            for block, count in enumerate((samples, self.classes))
        )
        return (
            (sliding_window_view(noise, size), places),
            (sliding_window_view(pattern, size), kinds),
        )

    def raw(self, split: str, indices: np.ndarray, key: tuple[int, ...] = ()) -> np.ndarray:
        """Return (B, *shape) float32."""
        numbers = indices if split == "train" else indices + self.train_size
        (noise, begins), (patterns, kinds) = self._windows
        x = patterns[kinds[self.labels(split, indices)]]
        x += noise[begins[numbers]]
        return x.reshape(len(indices), *self.shape)

    def finish(self, raw: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return raw, labels


class TextSource(Source):
    """Tokens of a packed text in windows of `context`: inputs x[t], targets x[t + 1], both int64.

    Windows don't overlap, but for one token. They run over the ends of documents, or ("apart") stay
    within one, whose last tokens are left out. The label of a window, for partitions, is the
    document that it begins in.
    """

    dtype = torch.int64

    def __init__(self, path: str, context: int, windows: str = "joined", every: int = 1) -> None:
        """``every``: of the training windows only each so many-th is there."""
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
        """Return (B, T + 1) int32."""
        places = self._begins[split][indices][:, None] + np.arange(self.shape[0] + 1)
        return self._text[split][places].astype(np.int32)

    def finish(self, raw: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens and the tokens after them, (B, T) int64 each."""
        tokens = raw.to(torch.int64)
        return tokens[:, :-1], tokens[:, 1:]


def _joined(ends: np.ndarray, context: int) -> np.ndarray:
    """Return begins of windows in all documents as one; ``ends``: (documents + 1,), from 0."""
    return np.arange(max(ends[-1] - 1, 0) // context) * context


def _apart(ends: np.ndarray, context: int) -> np.ndarray:
    """Return begins of windows, each within a document."""
    counts = np.maximum(np.diff(ends) - 1, 0) // context
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(ends[:-1], counts) + within * context


def _short(name: str, path: str, ends: np.ndarray, context: int, windows: str) -> str:
    has = f"has {ends[-1]} tokens"
    more = ""
    if windows == "apart":
        has = f"has no document of more than {np.diff(ends).max()} tokens"
        more = ', data.windows = "joined"'
    return (
        f"the {name} text of {path} {has}, less than one window of data.context + 1 = "
        f"{context + 1}: make data.context smaller{more} or pack more text"
    )


def _own(data: config.Data, seed: int, rows: Sequence[int], n: int) -> AnyData:
    """Call a user's function for the nodes `rows`; JobError where it returns no data."""
    form = "that returns torch Datasets or a Source"
    made = call(import_object("data.source", data.source, form), data, seed, rows, n)
    if not isinstance(made, Source | Datasets):
        raise mistake(data.source, f"returned {type(made).__name__}; {WANTED}")
    made.name = made.name or data.source
    return made


def _synthetic(data: config.Data, seed: int) -> Source:
    _check_no_images(data, "synthetic samples need")
    return SyntheticSource(tuple(data.shape), data.classes, data.samples, data.test_samples, seed)


def _check_no_images(data: config.Data, need: str) -> None:
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
"""Sources that are no file, by name: called as a user's own are; they may give a Problem, too."""


def source(data: config.Data, seed: int, rows: Sequence[int] = (0,), n: int = 1) -> AnyData:
    """Return the source that section `[data]` names; seed makes the synthetic samples.

    rows: the nodes that live here, of n, for one's own streams. Raises JobError for settings that
    don't go together or a source that doesn't exist, StoreError for a file that isn't a whole data
    set.
    """
    if data.source in SOURCES:
        found = call(SOURCES[data.source], data, seed, rows, n)
        if isinstance(found, Problem):
            return Datasets([found.samples()], data, seed, dealt=True)
        return found
    path = Path(data.source).expanduser()
    if path.exists():
        return _packed(path, data)
    if is_user_code(data.source):
        return _own(data, seed, rows, n)
    known = ", ".join(f'"{name}"' for name in SOURCES)
    raise JobError(
        f'data.source = "{data.source}" is neither {known} nor a file here; make one with: '
        "mpigossip data pack FOLDER OUT.h5"
    )


def check_alike(name: str, data: AnyData, world: "World", partition: str = "") -> None:
    """JobError where ranks don't see the same data; collective.

    Compared are numbers of samples, a hash of a few of them, and the digest of their partition.
    """
    mine = data.train_size, data.test_size
    told = world.gather(mine)
    with world.raise_together(JobError):
        for rank, (train, test) in enumerate(told or ()):
            if (train, test) != mine:
                raise JobError(
                    f'data.source = "{name}": rank 0 on {world.hosts[0]} has {mine[0]:,} training '
                    f"and {mine[1]:,} test samples, rank {rank} on {world.hosts[rank]} has "
                    f"{train:,} and {test:,}; all ranks need the same data"
                )
    if world.size > 1:
        _check_contents(name, data, world)
        _check_equal(
            world,
            partition,
            f'data.source = "{name}": the partition of the samples on rank {{}} on {{}} differs '
            "from that on rank 0 on {}; all ranks need the same labels and the same version of "
            "NumPy",
        )


def _check_contents(name: str, data: AnyData, world: "World") -> None:
    """Compare samples; collective. Those that two reads on one rank give differently don't count.

    The second read is made only if ranks differ.
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
        f'data.source = "{name}": samples on rank {{}} on {{}} differ from those of the same '
        "numbers on rank 0 on {}; copy the same data to all hosts, or make the function that "
        "data.source names independent of the rank",
        same_content,
    )


def _content(name: str, data: AnyData) -> bytes:
    try:
        return data.content_digest()
    except (UserError, Failure, MemoryError):
        raise
    except Exception as error:
        text = f"a sample can't be read to compare it between ranks: {describe_exception(error)}"
        raise mistake(name, text) from error


def _check_equal(
    world: "World", value: Any, text: str, same: Callable[[Any, Any], bool] = operator.eq
) -> None:
    """JobError unless all ranks have the same value; collective.

    :param text: message with three places: a rank, its host, and that of rank 0
    :param same: predicate of two values that are taken for equal
    """
    values = world.gather(value)
    with world.raise_together(JobError):
        for rank, other in enumerate(values or ()):
            if not same(other, value):
                raise JobError(text.format(rank, world.hosts[rank], world.hosts[0]))


def _packed(path: Path, data: config.Data) -> Source:
    with open_dataset(path) as opened:
        kind = opened.kind
    if kind != "text":
        return ImageSource(Recipe(str(path), data.augment, data.image_size, data.cache))
    _check_no_images(data, f"{path} holds text and needs")
    made = TextSource(str(path), data.context, data.windows, data.every)
    if data.tokenizer not in (None, made.tokenizer.name):
        raise JobError(
            f'data.tokenizer = "{data.tokenizer}": the tokens of {path} are those of '
            f'"{made.tokenizer.name}", which mean other text; name the pack that the model '
            "was trained on, or leave data.tokenizer out to begin anew"
        )
    return made

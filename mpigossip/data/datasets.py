"""Torch Datasets that a custom function in `data.source` returns, as the data of a job."""

import contextlib
import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from mpigossip.config import Data, JobError
from mpigossip.config.errors import Failure, UserError
from mpigossip.config.user_code import call_factory, describe_exception, parameters
from mpigossip.data.base import JobData, Request, SampleError
from mpigossip.data.philox import mixed
from mpigossip.data.pytree import Nested, leaves

SPLITS = ("train", "test")
EMPTY = 'its "{}" has no sample; it needs at least one'
EXPECTED = (
    'it must return a mpigossip.data.sources.Source, or {"train": …, "test": …} of torch '
    'Datasets (and optionally "collate", a function that makes a batch of samples that torch\'s '
    "default_collate does not support)"
)


def data_error(name: str, text: str) -> JobError:
    """Return a JobError about the function that `data.source` names, or about its result."""
    return JobError(f'data.source = "{name}": {text}')


class Datasets(JobData):
    """Training and test samples that a custom function returned as torch Datasets.

    If the function has a parameter `node`, each node has its own datasets, and "train" is a stream
    (an IterableDataset). Otherwise, all nodes share the same datasets.
    """

    dtype = None

    def __init__(self, sets: Sequence[Mapping[str, Any]], data: Data, seed: int, dealt: bool):
        """Read one training sample, to determine the shape of a sample.

        :param sets: mappings with the keys "train", "test" and optionally "collate": one for each
            local node, or a single one for all nodes
        :param data: section `[data]` of the job
        :param seed: seed of the random numbers that datasets draw
        :param dealt: whether all nodes read the same stream, so that its samples are assigned to
            the nodes in turn
        :raises JobError: if a dataset has no sample, if its first sample cannot be read, or if the
            nodes have test sets of different sizes
        """
        self.name = data.source
        self.section = data
        self.seed = seed
        self.dealt = dealt
        self.sets = sets
        self.train, self.test = (sets[0][split] for split in SPLITS)
        self.collate: Callable = sets[0].get("collate", default_collate)
        self.streams = isinstance(self.train, IterableDataset)
        self.streams_test = isinstance(self.test, IterableDataset)
        self.test_batch = data.batch
        self.in_memory = all(
            isinstance(dataset, TensorDataset) for dataset in (self.train, self.test)
        )
        for split, dataset in zip(SPLITS, (self.train, self.test), strict=True):
            if _length(dataset) == 0:
                raise data_error(self.name, EMPTY.format(split))
        test_sizes = [_length(mapping["test"]) for mapping in sets]
        if not self.streams_test and len(set(test_sizes)) > 1:
            raise data_error(
                self.name,
                f'the "test" of the nodes have {test_sizes} samples; return sets of equal size',
            )
        batch = self.sample("train")
        # A stream is not read again later, because it may not begin at the same sample. Its values
        # are not compared, because it may draw them with random numbers that have no fixed seed.
        self._stream_digest = content_hash(batch, values=False) if self.streams and dealt else b""
        first = next(leaves(batch), torch.empty(0))
        self.shape = tuple(first.shape[1:])
        self.classes = data.classes

    @property
    def train_size(self) -> int:
        """Number of training samples of an epoch, over all nodes.

        It is `data.samples` for a stream without a length and for streams of single nodes.
        """
        length = _length(self.train)
        return self.section.samples if length is None or not self.dealt else length

    @property
    def test_size(self) -> int:
        """Number of test samples.

        It is `data.test_samples`, as a maximum, for a stream without a length and for streams of
        single nodes.
        """
        length = _length(self.test)
        if not self.streams_test:
            return length or 0
        return self.section.test_samples if length is None or not self.dealt else length

    @property
    def train_labels(self) -> np.ndarray:  # type: ignore[override]
        """Labels of the training samples, which are read from the dataset's attribute `targets`.

        The datasets of torchvision have this attribute. If it is missing or does not have one value
        for each sample, the labels are zeros if `data.partition` is "shuffled"; any other partition
        raises JobError.
        """
        targets = getattr(self.train, "targets", None)
        if targets is not None and len(targets) == self.train_size:
            # Lists of different lengths are no array.
            with contextlib.suppress(ValueError):
                labels = np.asarray(targets)
                if labels.ndim == 1:
                    return labels
        if self.section.partition != "shuffled":
            raise data_error(
                self.name,
                f'data.partition = "{self.section.partition}" needs labels, and its "train" has '
                'no attribute `targets` with one number for each sample; add it, or use "shuffled"',
            )
        return np.zeros(self.train_size, np.int64)

    def load(self, request: Request) -> Nested:
        dataset = self.sets[0 if self.dealt else request.row][request.split]
        indices = request.indices.tolist()
        with drawing(Draws(self.seed, request.draws)):
            if hasattr(dataset, "__getitems__"):
                samples = dataset.__getitems__(indices)
            else:
                samples = [_item(dataset, index) for index in indices]
            return self.collate(samples)

    def sample(self, split: str) -> Nested:
        """Return a batch of one sample, on which a task and a model are tested.

        :param split: "train" or "test"
        :raises JobError: if the dataset has no sample, or if it raises an exception
        """
        dataset = self.train if split == "train" else self.test
        try:
            with drawing(Draws(self.seed)):
                samples = (
                    [*islice(dataset, 1)] if isinstance(dataset, IterableDataset) else [dataset[0]]
                )
                if not samples:
                    raise data_error(self.name, EMPTY.format(split))
                return self.collate(samples)
        except JobError:
            raise
        except Exception as error:
            raise data_error(
                self.name, f'the first sample of "{split}": {describe_exception(error)}'
            ) from error

    def content_digest(self) -> bytes:
        """Return a digest of a few samples, by which ranks compare their data.

        If the training samples are a stream, it depends only on the types and shapes in the first
        sample. If each node has its own stream, it is b"".
        """
        if self.streams:
            return self._stream_digest
        parts = []
        with drawing(Draws(self.seed)):
            for dataset in (self.train, self.test):
                if not isinstance(dataset, IterableDataset):
                    parts += [
                        dataset[index] for index in compared_indices(_length(dataset) or 0).tolist()
                    ]
        return content_hash(parts)


COMPARED = 8
"""Largest number of samples of each split that ranks compare."""
ROUNDING = 1e-2
"""Largest difference between projections, or norms, of the arrays of two ranks, relative to the
larger norm."""


def compared_indices(count: int) -> np.ndarray:
    """Return the indices of at most `COMPARED` samples, spread evenly over all ``count``."""
    return np.unique(np.linspace(0, count - 1, min(COMPARED, count)).astype(np.int64))


def content_hash(value: Any, values: bool = True) -> bytes:
    """Return a digest of tensors, arrays and numbers in nested containers, for `same_content`.

    It consists of a SHA-256, followed by a projection and the norm of each array of floating-point
    numbers. Strings and other objects contribute only their type: a string may be a path that
    differs between hosts, and the repr of an object may contain an address.

    :param value: tensor, array or number, or a mapping, tuple or list of such values
    :param values: whether the digest depends on the values; otherwise only on types and shapes
    """
    sha = hashlib.sha256()
    projections: list[float] = []
    _hash_into(sha, projections, value, values)
    return sha.digest() + np.asarray(projections, np.float64).tobytes()


def same_content(left: bytes, right: bytes) -> bool:
    """Return whether two digests of `content_hash` may describe the same samples.

    Floating-point numbers may differ by rounding, because the same transform may round differently
    on two kinds of CPU. The tolerance is `ROUNDING`.
    """
    size = hashlib.sha256().digest_size
    if left[:size] != right[:size] or len(left) != len(right):
        return False
    a, b = (np.frombuffer(digest[size:], np.float64).reshape(-1, 2) for digest in (left, right))
    scale = np.maximum(a[:, 1:], b[:, 1:])
    return bool((np.abs(a - b) <= ROUNDING * scale).all())


def _hash_into(sha: Any, projections: list[float], value: Any, values: bool) -> None:
    """Add a nested value to a SHA-256, except its floating-point numbers.

    For each array of these, a projection and the norm (see :func:`_project`) are appended to
    ``projections``, because they may differ by rounding.

    :param sha: object of hashlib that is updated
    :param projections: list of all projections and norms so far
    :param value: nested mappings, lists and tuples of tensors, arrays and numbers
    :param values: whether the values count; otherwise, only types and shapes are added
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            sha.update(f"{key!r}:".encode())
            _hash_into(sha, projections, item, values)
    elif isinstance(value, tuple | list):
        sha.update(f"[{len(value)}]".encode())
        for item in value:
            _hash_into(sha, projections, item, values)
    elif isinstance(value, torch.Tensor):
        sha.update(f"{value.dtype}{tuple(value.shape)}".encode())
        if values and value.layout == torch.strided:
            flat = value.detach().cpu().resolve_conj().resolve_neg().flatten()
            if flat.is_complex():
                flat = torch.view_as_real(flat).flatten()
            if flat.is_floating_point():
                projections += _project(flat.double().numpy())
            else:
                sha.update(flat.view(torch.uint8).numpy())
    elif hasattr(value, "__array_interface__"):  # arrays, NumPy scalars and PIL images
        array = np.ascontiguousarray(value)
        is_text = array.dtype.kind in "SU"
        name = array.dtype.kind if is_text else array.dtype.str
        sha.update(f"{name}{np.shape(value)}".encode())
        if not values or array.dtype.hasobject or is_text:
            return
        if array.dtype.kind in "fc":
            real = array.view(array.real.dtype)
            projections += _project(real.astype(np.float64).ravel())
        else:
            sha.update(array.tobytes())
    else:
        sha.update(type(value).__qualname__.encode())
        if values and isinstance(value, float | complex):
            projections += _project(np.asarray([value.real, value.imag], np.float64))
        elif values and isinstance(value, int):
            sha.update(f"{value!r};".encode())


def _project(values: np.ndarray) -> tuple[float, float]:
    """Return the scalar product Σ_i cos(i) v_i of finite values, and their Euclidean norm."""
    finite = np.where(np.isfinite(values), values, 0.0)
    product = float(finite @ np.cos(np.arange(len(finite))))
    return product, float(np.linalg.norm(finite))


def _item(dataset: Dataset, index: int) -> Any:
    """Return one sample of a dataset.

    :param dataset: the dataset
    :param index: index of the sample
    :raises SampleError: if the dataset raises an exception
    """
    try:
        return dataset[index]
    except Exception as error:
        raise SampleError(index) from error


def _length(dataset: Dataset) -> int | None:
    """Return the number of samples of a dataset, or None for a stream without a length."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def call(make: Callable, data: Data, seed: int, rows: Sequence[int], n: int) -> Any:
    """Call the custom function that `data.source` names; return its result, or `Datasets` of it.

    The function gets the arguments that its parameters name: `seed`, `node` and `nodes`, settings
    of section `[data]`, and the further keys of that section. If it has other parameters without a
    default, it is called as ``make(data, seed)``.

    :param make: the function. If it has a parameter `node`, it is called for each local node,
        otherwise once
    :param data: section `[data]` of the job
    :param seed: seed of the random numbers that the function draws, and its argument `seed`
    :param rows: indices of the local nodes
    :param n: number of all nodes
    :return: `Datasets` if the result is a mapping, otherwise the result itself
    :raises JobError: if the function raises an exception, or if its mapping has wrong entries or is
        incompatible with the settings; a UserError, Failure or MemoryError of the function is
        raised unchanged
    """
    arguments = {f.name: getattr(data, f.name) for f in fields(Data) if f.name != "options"}
    arguments |= {"seed": seed, "nodes": n}
    per_node = "node" in parameters(make)[0]

    def build(node: int) -> Any:
        with drawing(Draws(seed)):
            return call_factory(make, arguments | {"node": node}, data.options, (data, seed))

    try:
        results = [build(node) for node in (rows if per_node else rows[:1])]
    except TypeError as error:
        raise data_error(data.source, f"{error}; {EXPECTED}") from error
    except (UserError, Failure, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        raise data_error(data.source, describe_exception(error)) from error
    first = results[0]
    if not isinstance(first, Mapping):
        return first
    _check(first, data, per_node)
    return Datasets(results, data, seed, dealt=not per_node)


def _check(mapping: Mapping, data: Data, per_node: bool) -> None:
    """Check the mapping that a custom function has returned.

    :param mapping: mapping that the function has returned
    :param data: section `[data]` of the job
    :param per_node: whether the function has a parameter `node`
    :raises JobError: if the mapping has other keys than `SPLITS` and "collate", if a value has
        another type, or if section `[data]` excludes such a data set
    """
    error = partial(data_error, data.source)
    extra = mapping.keys() - {*SPLITS, "collate"}
    if extra or not mapping.keys() >= set(SPLITS):
        raise error(f"returned {{{', '.join(map(repr, mapping))}}}; {EXPECTED}")
    for split in SPLITS:
        if not isinstance(mapping[split], Dataset):
            raise error(
                f'"{split}" is {type(mapping[split]).__name__}, not a torch Dataset; {EXPECTED}'
            )
    if per_node and not isinstance(mapping["train"], IterableDataset):
        raise error(
            "the function has a parameter `node`, but returns a Dataset with a length: remove "
            "`node` and return the samples of all nodes, which data.partition distributes, or "
            "return an IterableDataset"
        )
    if isinstance(mapping["train"], IterableDataset) and data.partition != "shuffled":
        raise error(
            f'data.partition = "{data.partition}": a stream can\'t be sorted; use "shuffled", by '
            "which its samples go to the nodes in turn, unless the function has a parameter "
            "`node` and returns the samples of that node"
        )
    if data.augment != "none":
        raise error(
            f'data.augment = "{data.augment}" is for packed images; a Dataset augments its '
            'samples itself: use data.augment = "none"'
        )
    if not callable(mapping.get("collate", default_collate)):
        raise error(
            f'"collate" is {type(mapping["collate"]).__name__}, not a function; return a function '
            'that makes a batch of a list of samples, or leave "collate" out'
        )


class Draws(NamedTuple):
    """Seed of the random numbers of torch, NumPy and Python, which consists of a few integers."""

    seed: int
    """Seed of the job."""
    key: tuple[int, ...] = ()
    """Further numbers, such as `TRAIN` and a node, that distinguish random numbers of one seed."""


@contextlib.contextmanager
def drawing(draws: Draws | list) -> Iterator[None]:
    """Use separate random numbers in this block, and restore the program's generators after it.

    :param draws: seed of the random numbers; or a list that contains a seed. In the list, the seed
        is replaced by the state of the generators at the end of the block, so that the next block
        with this list continues from there
    """
    outside = _states()
    begin = draws[0] if isinstance(draws, list) else draws
    if isinstance(begin, Draws):
        seed = mixed(begin.seed, *begin.key)
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        random.seed(seed)
    else:
        _set(begin)
    try:
        yield
        if isinstance(draws, list):
            draws[0] = _states()
    finally:
        _set(outside)


def _states() -> tuple:
    """Return the states of the global random generators of torch, NumPy and Python."""
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _set(states: tuple) -> None:
    """Restore generator states that `_states` returned."""
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])

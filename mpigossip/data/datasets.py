"""Torch Datasets as a job's data, returned by a user's function in `data.source`."""

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
from mpigossip.data.philox import mixed
from mpigossip.data.pytree import Nested, leaves

SPLITS = ("train", "test")
TRAIN = 0
TEST = 1
"""Uses of random numbers: a batch of training, or of a test."""
EMPTY = 'its "{}" has no sample; nothing can be done with it'
WANTED = (
    'it should return a mpigossip.data.sources.Source, or {"train": …, "test": …} of torch '
    "Datasets (and \"collate\", a function that makes a batch of samples where torch's own doesn't)"
)


def mistake(name: str, text: str) -> JobError:
    """A mistake in the function that `data.source` names, or in what it returned."""
    return JobError(f'data.source = "{name}": {text}')


class Datasets:
    """The training and test samples of a user's function; what a Source is for its own.

    ``sets``: per node that lives here its "train" and "test"; one and the same for all nodes,
    unless the function asked for `node`: then these are streams, a node's own each.
    """

    def __init__(self, sets: Sequence[Mapping[str, Any]], data: Data, seed: int, dealt: bool):
        """``dealt``: a stream's rows go to the nodes in turn, as no node has a stream of its own.

        JobError for what isn't a data set, or has no sample.
        """
        self.name = data.source
        self.section = data
        self.seed = seed
        self.dealt = dealt
        self.sets = sets
        self.train, self.test = (sets[0][split] for split in SPLITS)
        self.collate: Callable = sets[0].get("collate", default_collate)
        self.streams = isinstance(self.train, IterableDataset)
        self.in_memory = all(isinstance(one, TensorDataset) for one in (self.train, self.test))
        for split, one in zip(SPLITS, (self.train, self.test), strict=True):
            if _length(one) == 0:
                raise mistake(self.name, EMPTY.format(split))
        tests = [_length(one["test"]) for one in sets]
        if not isinstance(self.test, IterableDataset) and len(set(tests)) > 1:
            raise mistake(self.name, f'the nodes\' "test" have {tests} samples; give all as many')
        batch = self.sample("train")
        # A stream is not read a second time, since it may not begin where it began before.
        # Its values don't count: a stream may draw its rows from an entropy of its own.
        self._stream_digest = content_hash(batch, values=False) if self.streams and dealt else b""
        first = next(leaves(batch), torch.empty(0))
        self.shape = tuple(first.shape[1:])
        self.classes = data.classes
        self.dtype = None

    @property
    def train_size(self) -> int:
        """Training samples of an epoch, over all nodes."""
        known = _length(self.train)
        return self.section.samples if known is None or not self.dealt else known

    @property
    def test_size(self) -> int:
        """Test samples; of a stream whose length isn't known at most so many."""
        known = _length(self.test)
        if not isinstance(self.test, IterableDataset):
            return known or 0
        return self.section.test_samples if known is None or not self.dealt else known

    @property
    def train_labels(self) -> np.ndarray:
        """The `targets` of the training samples, as data sets of torchvision have them, or zeros.

        JobError where a partition needs labels and there are none.
        """
        found = getattr(self.train, "targets", None)
        if found is not None and len(found) == self.train_size:
            return np.asarray(found)
        if self.section.partition != "shuffled":
            raise mistake(
                self.name,
                f'data.partition = "{self.section.partition}" goes by labels, and its "train" has '
                'no `targets` (one number for each sample); add them, or use "shuffled"',
            )
        return np.zeros(self.train_size, np.int64)

    def sample(self, split: str) -> Nested:
        """A batch of one sample, made here and now: what a task and a model are tried on."""
        one = self.train if split == "train" else self.test
        try:
            with drawing(Draws(self.seed)):
                found = [*islice(one, 1)] if isinstance(one, IterableDataset) else [one[0]]
                if not found:
                    raise mistake(self.name, EMPTY.format(split))
                return self.collate(found)
        except JobError:
            raise
        except Exception as error:
            raise mistake(
                self.name, f'a first sample of "{split}": {describe_exception(error)}'
            ) from error

    def content_digest(self) -> bytes:
        """Return a hash of a few samples, by which ranks compare their data.

        It is that of the types and shapes of a stream's first sample, and b"" for streams of one
        node each.
        """
        if self.streams:
            return self._stream_digest
        parts = []
        with drawing(Draws(self.seed)):
            for one in (self.train, self.test):
                if not isinstance(one, IterableDataset):
                    parts += [one[index] for index in compared_indices(_length(one) or 0).tolist()]
        return content_hash(parts)

    def close(self) -> None:
        """Nothing to close."""


COMPARED = 8
"""Samples of a split that ranks compare."""
ROUNDING = 1e-2
"""Largest difference between floating-point numbers of two ranks, relative to their norm."""


def compared_indices(count: int) -> np.ndarray:
    """Return the indices of samples that ranks compare, spread over ``count`` of them."""
    return np.unique(np.linspace(0, count - 1, min(COMPARED, count)).astype(np.int64))


def content_hash(value: Any, values: bool = True) -> bytes:
    """Return a digest of tensors, arrays and numbers in nested containers, for `same_content`.

    It is a SHA-256, followed by a projection and the norm of each group of floating-point numbers.
    Texts and other objects count by their type alone: a text may be a path that differs between
    hosts, and the repr of an object may contain an address.

    :param values: whether values count; otherwise only types and shapes do
    """
    sha = hashlib.sha256()
    projections: list[float] = []
    _hash_into(sha, projections, value, values)
    return sha.digest() + np.asarray(projections, np.float64).tobytes()


def same_content(left: bytes, right: bytes) -> bool:
    """Return whether two digests of `content_hash` may be of the same samples.

    Floating-point numbers may differ by rounding, as those of a transform do on two kinds of CPU.
    """
    size = hashlib.sha256().digest_size
    if left[:size] != right[:size] or len(left) != len(right):
        return False
    a, b = (np.frombuffer(one[size:], np.float64).reshape(-1, 2) for one in (left, right))
    scale = np.maximum(a[:, 1:], b[:, 1:])
    return bool((np.abs(a - b) <= ROUNDING * scale).all())


def _hash_into(sha: Any, projections: list[float], value: Any, values: bool) -> None:
    if isinstance(value, Mapping):
        for key, one in value.items():
            sha.update(f"{key!r}:".encode())
            _hash_into(sha, projections, one, values)
    elif isinstance(value, tuple | list):
        sha.update(f"[{len(value)}]".encode())
        for one in value:
            _hash_into(sha, projections, one, values)
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
    elif hasattr(value, "__array_interface__"):  # arrays, NumPy's numbers, and images
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
    """Return the scalar product of numbers with fixed weights, and their Euclidean norm."""
    finite = np.where(np.isfinite(values), values, 0.0)
    product = float(finite @ np.cos(np.arange(len(finite))))
    return product, float(np.linalg.norm(finite))


def _length(one: Dataset) -> int | None:
    """Samples of a data set; None for a stream without a length."""
    try:
        return len(one)
    except (TypeError, NotImplementedError):
        return None


def call(make: Callable, data: Data, seed: int, rows: Sequence[int], n: int) -> Any:
    """Call a user's function in `data.source`: Datasets, or anything else as it is.

    The function is given what it names: `seed`, `node` and `nodes`, settings of `[data]`, and the
    section's further keys; or (data, seed), where it has other parameters without a default.
    ``rows``: the nodes that live here, of ``n``. Raises JobError.
    """
    known = {f.name: getattr(data, f.name) for f in fields(Data) if f.name != "options"}
    known |= {"seed": seed, "nodes": n}
    own = "node" in parameters(make)[0]

    def made(node: int) -> Any:
        with drawing(Draws(seed)):
            return call_factory(make, known | {"node": node}, data.options, (data, seed))

    try:
        found = [made(node) for node in (rows if own else rows[:1])]
    except TypeError as error:
        raise mistake(data.source, f"{error}; {WANTED}") from error
    except (UserError, Failure, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        raise mistake(data.source, describe_exception(error)) from error
    first = found[0]
    if not isinstance(first, Mapping):
        return first
    _check(first, data, own)
    return Datasets(found, data, seed, dealt=not own)


def _check(found: Mapping, data: Data, own: bool) -> None:
    wrong = partial(mistake, data.source)
    extra = found.keys() - {*SPLITS, "collate"}
    if extra or not found.keys() >= set(SPLITS):
        raise wrong(f"returned {{{', '.join(map(repr, found))}}}; {WANTED}")
    for split in SPLITS:
        if not isinstance(found[split], Dataset):
            raise wrong(f'"{split}" is {type(found[split]).__name__}, no torch Dataset; {WANTED}')
    if own and not isinstance(found["train"], IterableDataset):
        raise wrong(
            "asks for `node` and returns a Dataset with a length: leave `node` out and return the "
            "samples of all nodes (data.partition shares them out), or return an IterableDataset"
        )
    if isinstance(found["train"], IterableDataset) and data.partition != "shuffled":
        raise wrong(
            f'data.partition = "{data.partition}": a stream can\'t be sorted; its function takes '
            "`node` and `nodes` and shares it out, or its rows go to the nodes in turn"
        )
    if data.augment != "none":
        raise wrong(
            f'data.augment = "{data.augment}" is for packed images; a Dataset changes its samples '
            'itself: use data.augment = "none"'
        )
    if not callable(found.get("collate", default_collate)):
        raise wrong(f'"collate" is {type(found["collate"]).__name__}, no function')


class Draws(NamedTuple):
    """A place in the random numbers of torch, NumPy and Python, by the numbers that it is from."""

    seed: int
    key: tuple[int, ...] = ()


@contextlib.contextmanager
def drawing(draws: Draws | list) -> Iterator[None]:
    """Let what runs inside draw its own random numbers, and leave the program's as they were.

    ``draws``: a place to begin at; or a list with one, which is left where the drawing stopped.
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
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _set(states: tuple) -> None:
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])

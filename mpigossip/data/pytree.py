"""Batches of any structure: tensors in nested tuples, lists and mappings."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from mpigossip.config.errors import Failure

Nested = Any
"""A tensor, or a tuple, list or mapping of such values. Other values in it are kept unchanged."""


class CutError(Failure, ValueError):
    """Error of a batch that can't be split into equal parts."""


def map_tensors(change: Callable[[torch.Tensor], Any], batch: Nested) -> Nested:
    """Return a copy of the batch with each tensor replaced by ``change(tensor)``.

    The structure stays the same, except that each mapping becomes a dict.
    """
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(change, value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(change, value) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(map_tensors(change, value) for value in batch)
    return batch


def leaves(batch: Nested) -> Iterator[torch.Tensor]:
    """Yield all tensors, in the order of :func:`map_tensors`."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping | tuple | list):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from leaves(value)


def size(batch: Nested) -> int:
    """Return the number of samples in a batch.

    It is the length of the first tensor that has a dimension, or 1 if there is none.
    """
    return next((len(tensor) for tensor in leaves(batch) if tensor.ndim), 1)


def parts(batch: Nested, count: int) -> list[Nested]:
    """Split the samples of a batch into ``count`` equal parts.

    Each part gets all tensors that have no dimension.

    :param batch: the batch; with ``count`` = 1, it is the only part, whatever it contains
    :param count: number of parts
    :raises CutError: if the tensors do not all have one row per sample, or can't be split equally
    """
    if count == 1:
        return [batch]
    lengths = {len(tensor) for tensor in leaves(batch) if tensor.ndim}
    if len(lengths) != 1 or lengths.pop() % count:
        raise CutError(
            f"algorithm.accumulate = {count}: a batch of {form(batch)} can't be split into this "
            "number of equal parts, or its tensors do not have one row per sample; use "
            "algorithm.accumulate = 1"
        )

    def part(number: int) -> Nested:
        return map_tensors(
            lambda tensor: tensor.chunk(count)[number] if tensor.ndim else tensor, batch
        )

    return [part(number) for number in range(count)]


def stacked(batches: Sequence[Nested]) -> Nested:
    """Stack batches of the same structure along a new first dimension."""
    columns = zip(*map(leaves, batches), strict=True)
    tensors = iter([torch.stack(column) for column in columns])
    return map_tensors(lambda _: next(tensors), batches[0])


def form(batch: Nested) -> str:
    """Return a text on the structure of a batch, such as `(float32 (8, 2), {"y": int64 (8,)})`."""
    if isinstance(batch, torch.Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} {tuple(batch.shape)}"
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f'"{key}": {form(value)}' for key, value in batch.items()) + "}"
    if isinstance(batch, tuple | list):
        return "(" + ", ".join(map(form, batch)) + ")"
    return type(batch).__name__

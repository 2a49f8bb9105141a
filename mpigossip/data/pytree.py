"""Batches of any form: tensors in nested tuples, lists and mappings."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from mpigossip.config.errors import Failure

Nested = Any
"""A tensor, or a tuple, list or mapping of such; whatever else is in it stays as it is."""


class CutError(Failure, ValueError):
    """A batch that has no equal parts; the message says which, and why."""


def map_tensors(change: Callable[[torch.Tensor], Any], batch: Nested) -> Nested:
    """The same form with every tensor changed; any mapping becomes a dict."""
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
    """Every tensor, in the order in which :func:`mapped` meets them."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping | tuple | list):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from leaves(value)


def size(batch: Nested) -> int:
    """Samples in a batch: the length of its first tensor that has one, or else 1."""
    return next((len(tensor) for tensor in leaves(batch) if tensor.ndim), 1)


def parts(batch: Nested, count: int) -> list[Nested]:
    """The samples in ``count`` equal parts; tensors without a dimension are in each of them.

    CutError where a tensor doesn't have a row for each sample.
    """
    if count == 1:
        return [batch]
    lengths = {len(tensor) for tensor in leaves(batch) if tensor.ndim}
    if len(lengths) != 1 or lengths.pop() % count:
        raise CutError(
            f"algorithm.accumulate = {count}: a batch of {form(batch)} can't be cut into so many "
            "equal parts, since its tensors don't have one row for each sample; use "
            "algorithm.accumulate = 1"
        )

    def part(number: int) -> Nested:
        return map_tensors(lambda one: one.chunk(count)[number] if one.ndim else one, batch)

    return [part(number) for number in range(count)]


def stacked(batches: Sequence[Nested]) -> Nested:
    """Batches of one form as one, with a new first dimension."""
    columns = zip(*map(leaves, batches), strict=True)
    tensors = iter([torch.stack(column) for column in columns])
    return map_tensors(lambda _: next(tensors), batches[0])


def form(batch: Nested) -> str:
    """The form in words: `(float32 (8, 2), {"y": int64 (8,)})`."""
    if isinstance(batch, torch.Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} {tuple(batch.shape)}"
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f'"{key}": {form(value)}' for key, value in batch.items()) + "}"
    if isinstance(batch, tuple | list):
        return "(" + ", ".join(map(form, batch)) + ")"
    return type(batch).__name__

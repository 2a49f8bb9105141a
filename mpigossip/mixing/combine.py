"""Weighted sum of arrays and of messages, in a fixed order.

Every synchronous mixer computes its sums by this module, whatever its transport, so that a
simulated run and a run under MPI are bitwise identical. The kernels that may replace the torch
operations of this module compute the same bits.
"""

from collections.abc import Sequence
from typing import TypeAlias

import torch

from mpigossip.mixing.base import MessageLayout
from mpigossip.mixing.kernels import gpu_sum, native
from mpigossip.mixing.wire import Field, decode

Source: TypeAlias = torch.Tensor | Sequence[torch.Tensor]
"""Message of a slot: either encoded, as one uint8 array, or decoded, as a sequence of its vectors
and scalars."""
BLOCK = 1 << 15
"""Number of elements that :func:`weighted_sum` sums at once: three arrays of this length fit into
the cache of a core."""


def weighted_sum(
    weights: Sequence[float],
    arrays: Sequence[torch.Tensor],
    out: torch.Tensor,
    *copies: torch.Tensor,
) -> torch.Tensor:
    """Compute ``out = Σ_k weights[k] · arrays[k]`` in the given order; return ``out``.

    Arrays have shape (rows, p). Equal weights are factored out: ``w · (a_0 + a_1 + …)``. Otherwise
    each product is rounded before it is added, and never fused with the addition, so that every
    transport, vector length and offset gives the same bits. ``out`` may share its memory with
    ``arrays[1]``. The result is also written to ``copies``, while it is in the cache.
    """
    if out.is_cuda:
        if not copies and gpu_sum.combine(weights, arrays, out):
            return out
        arrays = [array.to(out.dtype) for array in arrays]
    if not out.is_cuda and native.combine(weights, arrays, (out, *copies)):
        return out
    uniform = all(weight == weights[0] for weight in weights)
    rows, width = out.shape
    step = max(1, BLOCK // max(rows, 1)) if out.device.type == "cpu" else width
    scratch = None if uniform else torch.empty_like(out[:, :step])
    for begin in range(0, width, max(step, 1)):
        part = slice(begin, min(begin + step, width))
        pieces = [array[:, part] for array in arrays]
        if uniform:
            _sum_scaled(weights[0], pieces, out[:, part])
        else:
            _sum_weighted(weights, pieces, out[:, part], scratch[:, : part.stop - begin])
        for copy in copies:
            copy[:, part].copy_(out[:, part])
    return out


def copy_into(array: torch.Tensor, out: torch.Tensor) -> None:
    """Copy ``array`` to ``out``; with the native library, a large copy bypasses the cache.

    This is a weighted sum with the weight 1, and 1 · a is exactly a.
    """
    weighted_sum([1.0], [array], out)


def _sum_scaled(weight: float, pieces: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    if len(pieces) == 1:
        torch.mul(pieces[0], weight, out=out)
        return
    torch.add(pieces[0], pieces[1], out=out)
    for piece in pieces[2:]:
        out.add_(piece)
    out.mul_(weight)


def _sum_weighted(
    weights: Sequence[float],
    pieces: Sequence[torch.Tensor],
    out: torch.Tensor,
    scratch: torch.Tensor,
) -> None:
    # Scale pieces[1] first, because out may be its memory. The order of two terms does not matter.
    torch.mul(pieces[1], weights[1], out=out)
    torch.mul(pieces[0], weights[0], out=scratch)
    out.add_(scratch)
    for weight, piece in zip(weights[2:], pieces[2:], strict=True):
        torch.mul(piece, weight, out=scratch)
        out.add_(scratch)


def sum_messages(
    layout: MessageLayout,
    weights: Sequence[float],
    sources: Sequence[Source],
    out: Sequence[torch.Tensor],
    fields: Sequence[Field],
) -> None:
    """Compute the weighted sum of the messages of a slot, or of a part of them.

    On the CPU, encoded messages are decoded and summed in small blocks, so that decoded values stay
    in the cache.

    :param layout: layout of the messages
    :param weights: weight of each message
    :param sources: messages, each encoded or decoded
    :param out: vectors and scalars to which the sum is written
    :param fields: vectors, or ranges of their elements, and scalars to sum
    """
    encoded = any(isinstance(source, torch.Tensor) for source in sources)
    blocks = encoded and out[0].device.type == "cpu"
    for field, all_columns in fields:
        step = BLOCK if blocks else max(1, all_columns.stop - all_columns.start)
        for begin in range(all_columns.start, all_columns.stop, step):
            columns = slice(begin, min(begin + step, all_columns.stop))
            arrays = [
                decode(layout, source, field, columns)
                if isinstance(source, torch.Tensor)
                else _columns(source[field], columns)
                for source in sources
            ]
            weighted_sum(weights, arrays, _columns(out[field], columns))


def _columns(array: torch.Tensor, columns: slice) -> torch.Tensor:
    """Return a view of some columns of an array, or the array itself if these are all columns.

    The comparison is faster than making a view.
    """
    return array if columns.stop - columns.start == array.shape[1] else array[:, columns]

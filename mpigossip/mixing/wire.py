"""Format of a message: vectors in full, or encoded in fewer bits, bucket by bucket.

A code is a pure function of the values of a bucket (512 columns) and of a draw keyed by (seed,
exchange, node, vector, column), so that simulated and real messages have the same bits however
a node's columns are split into shards.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

ALIGN = 32
"""Elements (128 bytes) that every parameter's place is a multiple of; zeros fill up its end."""
BUCKET = 512
"""Columns that are encoded together; shards are multiples of it."""
CHUNK = 1 << 18
"""Columns that stand together in an encoded vector: chunk after chunk, so that it can be sent and
decoded by chunks; a multiple of 4096, so that a chunk's bytes are a multiple of eight."""


Field = tuple[int, slice]
"""Part of a slot's message: vector (or, from the number of vectors on, scalar), columns."""


class Wire(NamedTuple):
    """An encoding of float32 vectors of whole buckets.

    ``nbytes(width)``: bytes of an encoded vector. ``encode(buckets, words) -> codes`` quantizes
    buckets (b, 512) in place to what others decode and returns one uint8 array (b, …) or several;
    ``words(count)`` draws 32-bit numbers. ``decode(codes, out)`` is its inverse.
    """

    name: str
    sizes: tuple[int, ...]
    """bytes of each array of codes, a bucket"""
    encode: Callable
    decode: Callable
    seed: int = 0
    biased: bool = False
    """the error isn't zero on average: only for methods that send later what was left out"""
    shared: bool = False
    """all nodes draw the same numbers: what one leaves out, all do"""

    @property
    def exact(self) -> bool:
        return not self.sizes

    def nbytes(self, width: int) -> int:
        """Bytes of an encoded vector of ``width`` columns, a multiple of eight."""
        if width % BUCKET:
            raise ValueError(
                f'wire "{self.name}" encodes buckets of {BUCKET} columns; {width} columns are no '
                "whole number of them"
            )
        return -(-sum(self.sizes) * (width // BUCKET) // 8) * 8

    def pack(self, values: torch.Tensor, key: tuple[int, ...], first: int) -> list[torch.Tensor]:
        """Quantize values (width,), whose first column is ``first``, in place; its codes.

        ``key``: (exchange, node, vector). The codes are uint8 arrays, one after the other an
        encoded chunk.
        """
        exchange, node, vector = key
        seeds = self.seed, exchange, 0 if self.shared else node, vector
        buckets = values.view(-1, BUCKET)
        return self.encode(buckets, lambda count: draw(seeds, first, len(buckets), count))

    def write(
        self, values: torch.Tensor, key: tuple[int, ...], first: int, codes: torch.Tensor | None
    ) -> None:
        """:meth:`pack` chunk after chunk, the codes into ``codes`` if given, uint8."""
        at = 0
        for begin in range(0, values.numel(), CHUNK):
            for array in self.pack(values[begin : begin + CHUNK], key, first + begin):
                if codes is not None:
                    codes[at : at + array.numel()].copy_(array.reshape(-1))
                at += array.numel()

    def unpack(self, message: torch.Tensor, width: int, part: slice, out: torch.Tensor) -> None:
        """Decode columns ``part`` (whole buckets) of an encoded vector of ``width`` columns."""
        out = out.view(-1)
        for at in range(part.start // CHUNK * CHUNK, part.stop, CHUNK):
            low = max(at, part.start)
            high = min(at + CHUNK, part.stop)
            chunk = message[self.nbytes(at) :]
            values = out[low - part.start : high - part.start]
            self._unpack_chunk(chunk, min(CHUNK, width - at), slice(low - at, high - at), values)

    def _unpack_chunk(
        self, message: torch.Tensor, width: int, part: slice, out: torch.Tensor
    ) -> None:
        total = width // BUCKET
        codes = []
        at = 0
        begin = part.start // BUCKET
        end = part.stop // BUCKET
        for size in self.sizes:
            codes.append(message[at + begin * size : at + end * size].view(end - begin, size))
            at += total * size
        self.decode(codes, out.view(-1, BUCKET))


def draw(key: tuple[int, ...], first: int, buckets: int, count: int) -> np.ndarray:
    """``count`` 32-bit words a bucket from a counter-based generator: uint32 (buckets, count).

    Philox keyed by ``key``; ``first`` is the column of the vector where the first bucket begins,
    so that a shard draws what it would as part of the whole. ``count`` is a multiple of eight.
    """
    bits = np.random.Philox(np.random.SeedSequence(key))
    # a counter step gives four 64-bit words
    bits.advance(first // BUCKET * count // 8)
    return bits.random_raw(buckets * count // 2).view(np.uint32).reshape(buckets, count)


FP32 = Wire("fp32", (), lambda buckets, words: [], lambda codes, out: None)
"""Messages as they are."""


def encode(
    layout, segments, nodes, exchange: int, codes=None, fields: Sequence[Field] | None = None
) -> None:
    """Quantize the messages of ``nodes``, one a row of ``segments``, in place.

    ``codes``: where the encoded message of a single node goes, for each slot uint8; None where
    only the values are wanted. Scalars are sent as they are. ``fields`` (of whole chunks) limit
    it to a part of the message.
    """
    for slot, arrays in enumerate(segments):
        message = None if codes is None else codes[slot]
        encode_slot(layout, slot, arrays, nodes, exchange, message, fields)


def encode_slot(
    layout,
    slot: int,
    arrays,
    nodes,
    exchange: int,
    codes: torch.Tensor | None,
    fields: Sequence[Field] | None = None,
) -> None:
    """:func:`encode` of one slot."""
    for field, columns in layout.fields if fields is None else fields:
        at = layout.offset(field)
        if field < layout.vectors:
            room = None if codes is None else codes[at + layout.wire.nbytes(columns.start) :]
            first = layout.begin(slot) + columns.start
            for row, node in enumerate(nodes):
                values = arrays[field][row, columns]
                layout.wire.write(values, (exchange, node, field), first, room)
        elif codes is not None:
            codes[at : at + 8].view(torch.float64).copy_(arrays[field][0])


def decode(layout, codes: torch.Tensor, field: int, columns: slice) -> torch.Tensor:
    """Columns of a vector (``field`` < layout.vectors) or scalar of a slot's codes: (1, p).

    On GPUs bfloat16 stays what it is: the kernel of the sum converts it.
    """
    at = layout.offset(field)
    if field >= layout.vectors:
        return codes[at : at + 8].view(torch.float64).view(1, 1)
    if codes.is_cuda and layout.wire.name == "bf16":
        return codes[at + 2 * columns.start : at + 2 * columns.stop].view(torch.bfloat16)[None]
    out = torch.empty(1, columns.stop - columns.start, device=codes.device)
    layout.wire.unpack(codes[at:], layout.widths[0], columns, out)
    return out

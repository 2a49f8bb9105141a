"""Format of a message: vectors as they are, or encoded in fewer bits, bucket by bucket.

An encoded bucket is a pure function of its values (512 columns) and of random numbers keyed by
(seed, exchange, node, vector, column). Simulated and real messages are therefore bitwise identical,
however the columns of a node are split into shards.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

ALIGN = 32
"""Alignment of every parameter in the vector, in elements (128 bytes), with zeros as padding."""
BUCKET = 512
"""Columns that are encoded together; the width of a shard is a multiple of it."""
CHUNK = 1 << 18
"""Columns of which the codes are contiguous in an encoded vector, so that it can be sent and
decoded chunk by chunk; a multiple of 4096, so that the bytes of a chunk are a multiple of 8."""


Field = tuple[int, slice]
"""Part of a slot's message: the index of a vector, or from the number of vectors on of a scalar,
and its columns."""


class Wire(NamedTuple):
    """Encoding of float32 vectors that consist of whole buckets.

    ``encode(buckets, words) -> codes`` quantizes buckets (b, 512) in place to the values that
    receivers decode, and returns a list of uint8 arrays (b, …); ``words(count)`` draws 32-bit
    numbers. ``decode(codes, out)`` is its inverse.
    """

    name: str
    sizes: tuple[int, ...]
    """Bytes per bucket of each array of codes."""
    encode: Callable
    decode: Callable
    seed: int = 0
    biased: bool = False
    """True if the mean error is not zero; such a wire needs an algorithm that sends the error
    later."""
    shared: bool = False
    """True if all nodes draw the same random numbers, so that all omit the same values."""

    @property
    def exact(self) -> bool:
        return not self.sizes

    def nbytes(self, width: int) -> int:
        """Return the bytes of an encoded vector of ``width`` columns, a multiple of eight.

        :raises ValueError: if ``width`` is not a multiple of 512
        """
        if width % BUCKET:
            raise ValueError(
                f'wire "{self.name}" encodes buckets of {BUCKET} columns; {width} columns do not '
                "fill whole buckets"
            )
        return -(-sum(self.sizes) * (width // BUCKET) // 8) * 8

    def pack(self, values: torch.Tensor, key: tuple[int, ...], first: int) -> list[torch.Tensor]:
        """Quantize values (width,) in place, and return their codes.

        ``first`` is the column of the vector at which they begin, and ``key`` is (exchange, node,
        vector). The codes are uint8 arrays that, one after the other, are an encoded chunk.
        """
        exchange, node, vector = key
        seeds = self.seed, exchange, 0 if self.shared else node, vector
        buckets = values.view(-1, BUCKET)
        return self.encode(buckets, lambda count: draw(seeds, first, len(buckets), count))

    def write(
        self, values: torch.Tensor, key: tuple[int, ...], first: int, codes: torch.Tensor | None
    ) -> None:
        """Apply :meth:`pack` chunk after chunk; write the codes to ``codes``, uint8, if given."""
        offset = 0
        for begin in range(0, values.numel(), CHUNK):
            for array in self.pack(values[begin : begin + CHUNK], key, first + begin):
                if codes is not None:
                    codes[offset : offset + array.numel()].copy_(array.reshape(-1))
                offset += array.numel()

    def unpack(self, message: torch.Tensor, width: int, part: slice, out: torch.Tensor) -> None:
        """Decode columns ``part`` (whole buckets) of an encoded vector of ``width`` columns."""
        out = out.view(-1)
        for chunk_begin in range(part.start // CHUNK * CHUNK, part.stop, CHUNK):
            low = max(chunk_begin, part.start)
            high = min(chunk_begin + CHUNK, part.stop)
            chunk = message[self.nbytes(chunk_begin) :]
            values = out[low - part.start : high - part.start]
            self._unpack_chunk(
                chunk,
                min(CHUNK, width - chunk_begin),
                slice(low - chunk_begin, high - chunk_begin),
                values,
            )

    def _unpack_chunk(
        self, message: torch.Tensor, width: int, part: slice, out: torch.Tensor
    ) -> None:
        total = width // BUCKET
        codes = []
        offset = 0
        begin = part.start // BUCKET
        end = part.stop // BUCKET
        for size in self.sizes:
            codes.append(
                message[offset + begin * size : offset + end * size].view(end - begin, size)
            )
            offset += total * size
        self.decode(codes, out.view(-1, BUCKET))


def draw(key: tuple[int, ...], first: int, buckets: int, count: int) -> np.ndarray:
    """Draw ``count`` 32-bit words for each bucket by a counter-based generator.

    The result is an uint32 array (buckets, count). The generator is Philox, keyed by ``key``.
    ``first`` is the column of the vector at which the first bucket begins, so that a shard draws
    the same numbers as it would as part of the whole vector. ``count`` is a multiple of eight.
    """
    bits = np.random.Philox(np.random.SeedSequence(key))
    # each step of the counter yields four 64-bit words
    bits.advance(first // BUCKET * count // 8)
    return bits.random_raw(buckets * count // 2).view(np.uint32).reshape(buckets, count)


FP32 = Wire("fp32", (), lambda buckets, words: [], lambda codes, out: None)
"""Wire that sends messages as they are."""


def encode(
    layout, segments, nodes, exchange: int, codes=None, fields: Sequence[Field] | None = None
) -> None:
    """Quantize the messages of ``nodes``, which are the rows of ``segments``, in place.

    ``codes`` receives the encoded message of a single node, for each slot an uint8 array; None if
    only the quantized values are needed. Scalars are sent as they are. ``fields``, which must be
    whole chunks, restrict the call to a part of the message.
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
    """Encode the message of one slot, as :func:`encode` does."""
    for field, columns in layout.fields if fields is None else fields:
        offset = layout.offset(field)
        if field < layout.vectors:
            target = None if codes is None else codes[offset + layout.wire.nbytes(columns.start) :]
            first = layout.begin(slot) + columns.start
            for row, node in enumerate(nodes):
                values = arrays[field][row, columns]
                layout.wire.write(values, (exchange, node, field), first, target)
        elif codes is not None:
            codes[offset : offset + 8].view(torch.float64).copy_(arrays[field][0])


def decode(layout, codes: torch.Tensor, field: int, columns: slice) -> torch.Tensor:
    """Decode columns of a vector (``field`` < layout.vectors) or a scalar: (1, p).

    ``codes`` is the encoded message of a slot. On GPUs, bfloat16 values are returned as they are,
    because the kernel of the sum converts them.
    """
    offset = layout.offset(field)
    if field >= layout.vectors:
        return codes[offset : offset + 8].view(torch.float64).view(1, 1)
    if codes.is_cuda and layout.wire.name == "bf16":
        return codes[offset + 2 * columns.start : offset + 2 * columns.stop].view(torch.bfloat16)[
            None
        ]
    out = torch.empty(1, columns.stop - columns.start, device=codes.device)
    layout.wire.unpack(codes[offset:], layout.widths[0], columns, out)
    return out

"""Format of a message: its vectors are unchanged, or encoded in fewer bits, bucket by bucket.

The encoding of a bucket is determined by its 512 elements and by random numbers, which are
determined by the seed, the exchange, the node (unless all nodes share them), the vector, and the
position of the bucket in it. Simulated and real messages are therefore bitwise identical, however
the elements of a node are split into shards.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from mpigossip.mixing.kernels import gpu_random

ALIGN = 32
"""Alignment of every parameter in the vector, in elements (128 bytes), with zeros as padding."""
WIRE_BUCKET = 512
"""Number of elements that a lossy wire encodes together. Texts about wires call them a bucket; this
is not a `ParameterBucket`. The width of a shard is a multiple of it."""
CHUNK = 1 << 18
"""Number of elements whose encoded values are contiguous in an encoded vector, so that it can be
sent and decoded chunk by chunk. It is a multiple of 4096, so that the size of a chunk is a multiple
of 8 bytes."""
CHUNKS_ON_GPU = 16
"""Number of chunks that a GPU encodes or decodes at once. Each operation on them takes one launch;
the arrays of the operations take 16 MiB each."""


Field = tuple[int, slice]
"""Part of a slot's message: an index and a slice of elements. Vectors have the first indices,
and scalars have the next indices."""


class Wire(NamedTuple):
    """Encoding of float32 vectors that consist of whole buckets of 512 elements.

    ``encode(buckets, random)`` quantizes buckets (b, 512) in place to the values that receivers
    will decode, and returns the encoded buckets, a list of uint8 arrays (b, …). ``random`` draws
    random numbers for these buckets (:class:`BucketRandom`). ``decode(encoded, out)`` writes the
    quantized values to ``out`` (b, 512).
    """

    name: str
    sizes: tuple[int, ...]
    """Bytes per bucket of each array of an encoded bucket; empty: messages are not encoded."""
    encode: Callable
    decode: Callable
    seed: int = 0
    """Seed of the random numbers."""
    biased: bool = False
    """True if the mean of the quantization error is not zero. Such a wire needs an algorithm that
    adds the error of a message to a later one."""
    shared: bool = False
    """True if all nodes draw the same random numbers, so that all omit the same values."""
    cast: torch.dtype | None = None
    """Type of encoded values: a conversion to it encodes a vector of any length."""

    @property
    def exact(self) -> bool:
        return not self.sizes

    def nbytes(self, width: int) -> int:
        """Return the bytes of an encoded vector of ``width`` elements, a multiple of eight.

        :raises ValueError: if ``width`` is not a multiple of 512
        """
        if width % WIRE_BUCKET:
            raise ValueError(
                f'wire "{self.name}" encodes buckets of {WIRE_BUCKET} elements; {width} elements '
                "do not fill whole buckets: pad the vector with zeros"
            )
        return -(-sum(self.sizes) * (width // WIRE_BUCKET) // 8) * 8

    def pack(self, values: torch.Tensor, key: tuple[int, ...], first: int) -> list[torch.Tensor]:
        """Quantize a part of a vector in place, and return it encoded.

        :param values: elements to quantize, whole buckets, (width,)
        :param key: numbers of the exchange, the node and the vector, which determine the random
            numbers
        :param first: position of the first element in the vector
        :return: uint8 arrays, which are an encoded chunk if they are written one after the other
        """
        exchange, node, vector = key
        seeds = self.seed, exchange, 0 if self.shared else node, vector
        buckets = values.view(-1, WIRE_BUCKET)
        return self.encode(buckets, BucketRandom(seeds, first, len(buckets), values.device))

    def write(
        self, values: torch.Tensor, key: tuple[int, ...], first: int, encoded: torch.Tensor | None
    ) -> None:
        """Quantize a part of a vector in place, chunk by chunk, by :meth:`pack`.

        :param values: elements to quantize, (width,)
        :param key: as in :meth:`pack`
        :param first: position of the first element in the vector
        :param encoded: memory for the encoded part, uint8; None: only quantize
        """
        if self.cast is not None and values.is_cuda:
            # Two operations for the whole vector. On a CPU, chunks that fit its cache are faster.
            if encoded is None:
                target = torch.empty_like(values, dtype=self.cast)
            else:
                target = encoded[: self.nbytes(values.numel())].view(self.cast)
            target.copy_(values)
            values.copy_(target)
            return
        width = values.numel()
        end_of_blocks = 0
        if values.is_cuda:
            end_of_blocks = width // CHUNK * CHUNK
            self._write_blocks(values[:end_of_blocks], key, first, encoded)
        offset = self.nbytes(end_of_blocks)
        for begin in range(end_of_blocks, width, CHUNK):
            for array in self.pack(values[begin : begin + CHUNK], key, first + begin):
                if encoded is not None:
                    encoded[offset : offset + array.numel()].copy_(array.reshape(-1))
                offset += array.numel()

    def _write_blocks(
        self, values: torch.Tensor, key: tuple[int, ...], first: int, encoded: torch.Tensor | None
    ) -> None:
        """Quantize whole chunks in place, several at once, by the parameters of :meth:`write`."""
        block = CHUNKS_ON_GPU * CHUNK
        for begin in range(0, values.numel(), block):
            part = values[begin : begin + block]
            arrays = self.pack(part, key, first + begin)
            if encoded is None:
                continue
            chunks = self._chunks(encoded, begin, part.numel() // CHUNK)
            offset = 0
            for array in arrays:
                rows = array.reshape(len(chunks), -1)
                chunks[:, offset : offset + rows.shape[1]].copy_(rows)
                offset += rows.shape[1]

    def _chunks(self, message: torch.Tensor, begin: int, count: int) -> torch.Tensor:
        """Return ``count`` encoded chunks, one chunk per row, as a view of a message.

        ``begin`` is the first element of the first chunk.
        """
        offset = self.nbytes(begin)
        size = self.nbytes(CHUNK)
        return message[offset : offset + count * size].view(count, size)

    def unpack(self, message: torch.Tensor, width: int, part: slice, out: torch.Tensor) -> None:
        """Decode a part of an encoded vector.

        :param message: encoded vector, uint8
        :param width: number of elements of the whole vector
        :param part: range of elements to decode, whole buckets
        :param out: array for the decoded elements
        """
        out = out.view(-1)
        whole = slice(0, 0)
        if message.is_cuda:
            whole = slice(-(-part.start // CHUNK) * CHUNK, part.stop // CHUNK * CHUNK)
            self._unpack_blocks(message, whole, out[whole.start - part.start :])
        for chunk_begin in range(part.start // CHUNK * CHUNK, part.stop, CHUNK):
            if whole.start <= chunk_begin < whole.stop:
                continue
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

    def _unpack_blocks(self, message: torch.Tensor, part: slice, out: torch.Tensor) -> None:
        """Decode whole chunks of an encoded vector, several at once.

        :param message: encoded vector, uint8
        :param part: range of elements to decode; if it has no elements, nothing is done
        :param out: array that begins with the decoded elements
        """
        block = CHUNKS_ON_GPU * CHUNK
        for begin in range(part.start, part.stop, block):
            end = min(begin + block, part.stop)
            chunks = self._chunks(message, begin, (end - begin) // CHUNK)
            encoded = []
            offset = 0
            for size in self.sizes:
                of_chunk = size * CHUNK // WIRE_BUCKET
                encoded.append(chunks[:, offset : offset + of_chunk].reshape(-1, size))
                offset += of_chunk
            self.decode(encoded, out[begin - part.start : end - part.start].view(-1, WIRE_BUCKET))

    def _unpack_chunk(
        self, message: torch.Tensor, width: int, part: slice, out: torch.Tensor
    ) -> None:
        total = width // WIRE_BUCKET
        encoded = []
        offset = 0
        begin = part.start // WIRE_BUCKET
        end = part.stop // WIRE_BUCKET
        for size in self.sizes:
            encoded.append(
                message[offset + begin * size : offset + end * size].view(end - begin, size)
            )
            offset += total * size
        self.decode(encoded, out.view(-1, WIRE_BUCKET))


def draw(key: tuple[int, ...], first: int, buckets: int, count: int) -> np.ndarray:
    """Draw ``count`` 32-bit words for each bucket by a counter-based generator.

    The generator is Philox. A shard draws the numbers that it would draw as part of the whole
    vector.

    :param key: seed of the generator
    :param first: position in the vector of the first element of the first bucket
    :param buckets: number of buckets
    :param count: number of words for each bucket, a multiple of eight
    :return: uint32 array (buckets, count)
    """
    bits = np.random.Philox(np.random.SeedSequence(key))
    # each step of the counter yields four 64-bit words
    bits.advance(first // WIRE_BUCKET * count // 8)
    return bits.random_raw(buckets * count // 2).view(np.uint32).reshape(buckets, count)


class BucketRandom(NamedTuple):
    """Random numbers for the buckets of a part of a vector, drawn on the device of the part."""

    seed: tuple[int, ...]
    """Numbers that determine the random words of the whole vector."""
    first: int
    """Position in the vector of the first element of the first bucket."""
    buckets: int
    """Number of buckets, b."""
    device: torch.device

    @property
    def on_device(self) -> bool:
        """True if the device draws the words itself."""
        return self.device.type == "cuda"

    def uniform(self) -> torch.Tensor:
        """Draw uniform float32 numbers in [0, 1), one for each element: (b, 512)."""
        if self.on_device:
            words = self._words_on_device(WIRE_BUCKET)
            drawn = (words >> 8).bitwise_and_((1 << 24) - 1).to(torch.float32)
        else:
            drawn = torch.from_numpy((self._words(WIRE_BUCKET) >> 8).astype(np.float32))
        return drawn.mul_(2.0**-24)

    def positions(self) -> torch.Tensor:
        """Draw a position in each bucket, from 0 to 511: int32, (b, 1)."""
        if self.on_device:
            return self._words_on_device(8)[:, :1] & (WIRE_BUCKET - 1)
        return torch.from_numpy((self._words(8)[:, :1] % WIRE_BUCKET).astype(np.int32))

    def _words(self, count: int) -> np.ndarray:
        return draw(self.seed, self.first, self.buckets, count)

    def _words_on_device(self, count: int) -> torch.Tensor:
        step = self.first // WIRE_BUCKET * count // 8
        words = gpu_random.words(self.seed, step, self.buckets * count, self.device)
        return words.view(self.buckets, count)


FP32 = Wire("fp32", (), lambda buckets, words: [], lambda encoded, out: None)
"""Wire that sends messages without encoding them."""


def encode(
    layout, segments, nodes, exchange: int, encoded=None, fields: Sequence[Field] | None = None
) -> None:
    """Quantize messages in place and write the encoded messages; scalars are not changed.

    :param layout: layout of the messages
    :param segments: for each slot, the vectors and scalars, with one row for each node
    :param nodes: numbers of the nodes
    :param exchange: number of the exchange, which determines the random numbers
    :param encoded: memory for the encoded message of a single node, for each slot an uint8 array;
        None: only quantize
    :param fields: part of the message to encode, in whole chunks; None: all of it
    """
    for slot, arrays in enumerate(segments):
        message = None if encoded is None else encoded[slot]
        encode_slot(layout, slot, arrays, nodes, exchange, message, fields)


def encode_slot(
    layout,
    slot: int,
    arrays,
    nodes,
    exchange: int,
    encoded: torch.Tensor | None,
    fields: Sequence[Field] | None = None,
) -> None:
    """Encode the message of one slot; :func:`encode` describes the other parameters.

    :param slot: index of the slot
    :param arrays: vectors and scalars of the slot, with one row for each node
    :param encoded: memory for the encoded message of the slot, uint8; None: only quantize
    """
    for field, columns in layout.fields if fields is None else fields:
        offset = layout.offset(field)
        if field < layout.vectors:
            target = (
                None if encoded is None else encoded[offset + layout.wire.nbytes(columns.start) :]
            )
            first = layout.begin(slot) + columns.start
            for row, node in enumerate(nodes):
                values = arrays[field][row, columns]
                layout.wire.write(values, (exchange, node, field), first, target)
        elif encoded is not None:
            encoded[offset : offset + 8].view(torch.float64).copy_(arrays[field][0])


def decode(layout, encoded: torch.Tensor, field: int, columns: slice) -> torch.Tensor:
    """Return the decoded elements of a vector, or a scalar, as an array (1, p).

    On GPUs, the elements of the wire "bf16" are returned as bfloat16, because the kernel that sums
    them converts them to float32.

    :param layout: layout of the message
    :param encoded: encoded message of a slot, uint8
    :param field: index of the vector; scalars are counted after all vectors
    :param columns: range of elements of the vector, whole buckets
    """
    offset = layout.offset(field)
    if field >= layout.vectors:
        return encoded[offset : offset + 8].view(torch.float64).view(1, 1)
    if encoded.is_cuda and layout.wire.name == "bf16":
        return encoded[offset + 2 * columns.start : offset + 2 * columns.stop].view(torch.bfloat16)[
            None
        ]
    count = columns.stop - columns.start
    out = torch.empty(1, count, dtype=torch.float32, device=encoded.device)
    layout.wire.unpack(encoded[offset:], layout.widths[0], columns, out)
    return out

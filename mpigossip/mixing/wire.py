"""What goes on the wire: a vector in full, or encoded in fewer bits, bucket by bucket.

A code is a pure function of the values of a bucket (512 columns) and of a draw keyed by (seed,
exchange, node, vector, column), so that simulated and real messages have the same bits however
a node's columns are split into shards.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

BUCKET = 512
"""Columns that are encoded together; shards are multiples of it."""
CHUNK = 1 << 18
"""Columns that stand together in an encoded vector: chunk after chunk, so that it can be sent and
decoded by pieces; a multiple of 4096, so that a chunk's bytes are a multiple of eight."""
TINY = 1e-30
"""A bucket without a larger value is sent as zeros by wire "qsgd"."""


Stretch = tuple[int, int, slice]
"""Part of a message: slot, vector (or, from the number of vectors on, scalar), columns."""


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

    @property
    def exact(self) -> bool:
        """Whether messages travel as they are."""
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
        buckets, seeds = values.view(-1, BUCKET), (self.seed, *key)
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
            low, high = max(at, part.start), min(at + CHUNK, part.stop)
            chunk, values = message[self.nbytes(at) :], out[low - part.start : high - part.start]
            self._unpack_chunk(chunk, min(CHUNK, width - at), slice(low - at, high - at), values)

    def _unpack_chunk(
        self, message: torch.Tensor, width: int, part: slice, out: torch.Tensor
    ) -> None:
        total, codes, at = width // BUCKET, [], 0
        begin, end = part.start // BUCKET, part.stop // BUCKET
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


def bf16() -> Wire:
    """The upper 16 bits of each float32, rounded to nearest even: 2 bytes a value."""

    def encode(buckets: torch.Tensor, words) -> list[torch.Tensor]:
        codes = buckets.to(torch.bfloat16)
        buckets.copy_(codes)
        return [codes.view(torch.uint8)]

    def decode(codes, out: torch.Tensor) -> None:
        out.copy_(codes[0].view(torch.bfloat16))

    return Wire("bf16", (2 * BUCKET,), encode, decode)


def qsgd(levels: int, seed: int) -> Wire:
    """QSGD (Alistarh et al. 2017), unbiased: Q(v) = s · l/levels, l random in −levels … levels.

    s is the bucket's largest |v| (the paper's practical choice; no sum, so the same bits in any
    shape), l is |v| · levels/s rounded up with the probability of its fraction, with v's sign. A
    code takes 4 bits up to 7 levels, else 8, and a bucket 4 bytes more for s.
    """
    packed = levels <= 7

    def encode(buckets: torch.Tensor, words) -> list[torch.Tensor]:
        scale = buckets.abs().amax(dim=1, keepdim=True)
        scale.mul_(scale > TINY)  # so that levels / scale is finite
        uniform = torch.from_numpy((words(BUCKET) >> 8).astype(np.float32)).to(buckets.device)
        inverse = levels / scale.clamp(min=TINY)
        # floor(v levels/s + u), u uniform in [0, 1): up with the probability of the fraction
        level = buckets.mul(inverse).add_(uniform.mul_(2.0**-24)).floor_()
        level.clamp_(-levels, levels)
        torch.mul(level, scale / levels, out=buckets)
        codes = level.add_(levels).to(torch.uint8)
        if packed:
            codes = codes[:, ::2] + 16 * codes[:, 1::2]
        return [scale.view(torch.uint8), codes]

    def decode(codes, out: torch.Tensor) -> None:
        scale, level = codes[0].view(torch.float32), codes[1]
        if packed:
            out[:, ::2].copy_(level & 15)
            out[:, 1::2].copy_(level >> 4)
        else:
            out.copy_(level)
        out.sub_(levels).mul_(scale / levels)

    return Wire("qsgd", (4, BUCKET // 2 if packed else BUCKET), encode, decode, seed)


def sign() -> Wire:
    """Signs, one bit a value, times the bucket's mean |v|; zero counts as positive."""
    shifts = torch.arange(8, dtype=torch.uint8)

    def encode(buckets: torch.Tensor, words) -> list[torch.Tensor]:
        # summed by halves: the same bits in any shape
        total = buckets.abs()
        while total.shape[1] > 1:
            half = total.shape[1] // 2
            total = total[:, :half] + total[:, half:]
        scale = total / BUCKET
        positive = buckets >= 0
        torch.where(positive, scale, -scale, out=buckets)
        bits = positive.view(len(buckets), -1, 8).to(torch.uint8) << shifts.to(buckets.device)
        return [scale.view(torch.uint8), bits.sum(dim=2, dtype=torch.uint8)]

    def decode(codes, out: torch.Tensor) -> None:
        scale = codes[0].view(torch.float32)
        bits = codes[1].unsqueeze(2) >> shifts.to(out.device) & 1
        torch.where(bits.view(len(out), -1).bool(), scale, -scale, out=out)

    return Wire("sign", (4, BUCKET // 8), encode, decode, biased=True)


def top_k(kept: float) -> Wire:
    """The ⌈512 · kept⌉ values of largest modulus of each bucket and their places: 6 bytes each."""
    k = math.ceil(BUCKET * kept)

    def encode(buckets: torch.Tensor, words) -> list[torch.Tensor]:
        # stable, so that equal values are chosen alike everywhere
        order = buckets.abs().sort(dim=1, descending=True, stable=True).indices[:, :k]
        values = buckets.gather(1, order)
        buckets.zero_().scatter_(1, order, values)
        return [values.view(torch.uint8), order.to(torch.int16).view(torch.uint8)]

    def decode(codes, out: torch.Tensor) -> None:
        places = codes[1].view(torch.int16).long()
        out.zero_().scatter_(1, places, codes[0].view(torch.float32))

    return Wire("top-k", (4 * k, 2 * k), encode, decode, biased=True)


def random_k(kept: float, seed: int) -> Wire:
    """⌈512 · kept⌉ neighbouring values of each bucket from a random place on: 4 bytes each.

    The places run around the bucket's end, so that each value is as likely as any other; a run
    needs one number where independent places would need one each.
    """
    k = math.ceil(BUCKET * kept)

    def places(start: torch.Tensor) -> torch.Tensor:
        return (start.view(torch.int32).long() + torch.arange(k, device=start.device)) % BUCKET

    def encode(buckets: torch.Tensor, words) -> list[torch.Tensor]:
        first = torch.from_numpy((words(8)[:, :1] % BUCKET).astype(np.int32)).to(buckets.device)
        start = first.view(torch.uint8)
        chosen = places(start)
        values = buckets.gather(1, chosen)
        buckets.zero_().scatter_(1, chosen, values)
        return [values.view(torch.uint8), start]

    def decode(codes, out: torch.Tensor) -> None:
        out.zero_().scatter_(1, places(codes[1]), codes[0].view(torch.float32))

    return Wire("random-k", (4 * k, 4), encode, decode, seed, biased=True)


FP32 = Wire("fp32", (), lambda buckets, words: [], lambda codes, out: None)
"""Messages as they are."""


def encode(
    layout,
    segments,
    nodes,
    exchange: int,
    codes: torch.Tensor | None,
    stretches: Sequence[Stretch] | None = None,
) -> None:
    """Quantize the messages of ``nodes``, one a row of ``segments``, in place.

    ``codes``: where the encoded message of a single node goes, uint8 (layout.sent_bytes,); None
    where only the values are wanted. Scalars travel as they are. ``stretches`` (of whole chunks)
    limit it to a part of the message.
    """
    for slot, part, columns in layout.stretches if stretches is None else stretches:
        at = 0 if codes is None else layout.place(slot, part)
        if part < layout.vectors:
            room = None if codes is None else codes[at + layout.wire.nbytes(columns.start) :]
            first = layout.begin(slot) + columns.start
            for row, node in enumerate(nodes):
                values = segments[slot][part][row, columns]
                layout.wire.write(values, (exchange, node, part), first, room)
        elif codes is not None:
            codes[at : at + 8].view(torch.float64).copy_(segments[slot][part][0])


def decode(layout, codes: torch.Tensor, slot: int, part: int, columns: slice) -> torch.Tensor:
    """Columns of an encoded message's vector (``part`` < layout.vectors) or scalar: (1, p)."""
    at = layout.place(slot, part)
    if part >= layout.vectors:
        return codes[at : at + 8].view(torch.float64).view(1, 1)
    out = torch.empty(1, columns.stop - columns.start)
    layout.wire.unpack(codes[at:], layout.widths[slot], columns, out)
    return out


WIRES: dict[str, Callable[..., Wire]] = {
    "fp32": lambda: FP32,
    "bf16": bf16,
    "qsgd": qsgd,
    "sign": sign,
    "top-k": top_k,
    "random-k": random_k,
}
"""Every wire by the name that `node.wire` has for it; parameters are those of :func:`wire`."""


def wire(name: str = "fp32", levels: int = 127, kept: float = 0.01, seed: int = 0) -> Wire:
    """The encoding that a job names by `node.wire`, `node.levels` and `node.kept`."""
    given = {"levels": levels, "kept": kept, "seed": seed}
    takes = inspect.signature(WIRES[name]).parameters
    return WIRES[name](**{key: given[key] for key in takes})

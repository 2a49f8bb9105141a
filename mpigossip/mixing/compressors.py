"""Compressors by name: quantization and sparsification in buckets of 512 elements."""

import inspect
import math
from collections.abc import Callable

import numpy as np
import torch

from mpigossip.mixing.wire import ALIGN, BUCKET, FP32, Wire

TINY = 1e-30
"""A bucket without a larger value is sent as zeros by wires with a scale."""


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
    code takes 2 bits with 1 level, 4 up to 7, else 8, and a bucket 4 bytes more for s.
    """
    bits = 2 if levels == 1 else 4 if levels <= 7 else 8

    def encode(buckets: torch.Tensor, words) -> list[torch.Tensor]:
        scale, _ = _largest(buckets)
        inverse = levels / scale.clamp(min=TINY)
        # floor(v levels/s + u), u uniform in [0, 1): up with the probability of the fraction
        level = buckets.mul(inverse).add_(_uniform(words, buckets)).floor_()
        level.clamp_(-levels, levels)
        torch.mul(level, scale / levels, out=buckets)
        codes = level.add_(levels).to(torch.uint8)
        return [scale.view(torch.uint8), pack_bits(codes, bits)]

    def decode(codes, out: torch.Tensor) -> None:
        out.copy_(unpack_bits(codes[1], bits, BUCKET))
        out.sub_(levels).mul_(codes[0].view(torch.float32) / levels)

    return Wire("qsgd", (4, BUCKET * bits // 8), encode, decode, seed)


def pack_bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes (b, c) of so many bits, 8 // bits of them a byte, the first lowest: (b, c bits / 8)."""
    each = 8 // bits
    missing = -codes.shape[1] % each
    codes = torch.nn.functional.pad(codes, (0, missing)).view(len(codes), -1, each)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    return (codes << shifts).sum(dim=2, dtype=torch.uint8)


def unpack_bits(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The inverse of :func:`together`: (b, count)."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    codes = packed.unsqueeze(2) >> shifts & (1 << bits) - 1
    return codes.view(len(packed), -1)[:, :count]


def _uniform(words, like: torch.Tensor) -> torch.Tensor:
    """Numbers in [0, 1) of 24 bits, one a value of a bucket."""
    drawn = (words(BUCKET) >> 8).astype(np.float32)
    return torch.from_numpy(drawn).to(like.device).mul_(2.0**-24)


def _largest(buckets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each bucket's largest |v|, 0 where it is tiny, and 1 over it, which is finite."""
    scale = buckets.abs().amax(dim=1, keepdim=True)
    scale.mul_(scale > TINY)
    return scale, 1 / scale.clamp(min=TINY)


def fp4(seed: int) -> Wire:
    """Floats of a sign and three bits of exponent, unbiased: what Streaming DiLoCo sends.

    Q(v) = ± s · (0, 2⁻⁶, 2⁻⁵ … 1), s the bucket's largest |v|: the two values around |v|, the upper
    one with the probability that makes the mean v. 4 bits a value, a bucket 4 bytes more for s.
    """

    def level(codes: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        power = (codes & 7).to(torch.float32)
        torch.exp2(power - 7, out=out).mul_(power > 0)
        return out.mul_(1 - 2 * (codes >> 3).to(torch.float32))

    def encode(buckets: torch.Tensor, words) -> list[torch.Tensor]:
        scale, inverse = _largest(buckets)
        size = buckets.abs().mul_(inverse).clamp_(max=1)
        # 2^(power − 7) ≤ size, where that isn't 0; the exponent that frexp gives of 0 is 0
        power = torch.frexp(size)[1].add_(6).mul_(size >= 2.0**-6)
        # how far between the two values; below 1/64 the lower one is 0
        below = torch.ldexp(torch.ones_like(size), power - 7).mul_(power > 0)
        above = torch.ldexp(torch.ones_like(size), power - 6)
        up = _uniform(words, size).mul_(above - below) < size - below
        codes = (power + up).clamp_(max=7).to(torch.uint8) + 8 * (buckets < 0).to(torch.uint8)
        level(codes, buckets).mul_(scale)
        return [scale.view(torch.uint8), pack_bits(codes, 4)]

    def decode(codes, out: torch.Tensor) -> None:
        level(unpack_bits(codes[1], 4, BUCKET), out).mul_(codes[0].view(torch.float32))

    return Wire("fp4", (4, BUCKET // 2), encode, decode, seed)


def sign() -> Wire:
    """Signs, one bit a value, times the bucket's mean |v|; zero counts as positive.

    Zeros that end a run of 32 values, as the padding behind a parameter does, stay zero and don't
    enter the mean. Where there are some, the bit after the last other value is 1 and the rest of
    the run 0; one bit more for each run says that there are none. 70 bytes a bucket.
    """

    def spread(bits: torch.Tensor, used: torch.Tensor, scale: torch.Tensor, out) -> None:
        signs = (2 * bits.to(torch.int8) - 1).mul_(_ordinal(out) <= used)
        torch.mul(signs, scale.unsqueeze(2), out=out.view_as(signs))

    def encode(buckets: torch.Tensor, words) -> list[torch.Tensor]:
        runs = buckets.view(len(buckets), -1, ALIGN)
        ordinal = _ordinal(buckets)
        used = (ordinal * (runs != 0)).amax(dim=2, keepdim=True)
        # divided first, as a sum of large values overflows; by halves: the same bits in any shape
        scale = buckets.abs().div_(used.sum(dim=1).clamp(min=1))
        while scale.shape[1] > 1:
            half = scale.shape[1] // 2
            scale = scale[:, :half] + scale[:, half:]
        scale.clamp_(max=torch.finfo(scale.dtype).max)
        bits = torch.where(ordinal <= used, runs >= 0, ordinal == used + 1)
        spread(bits, used, scale, buckets)
        both = torch.cat([bits.flatten(1), (used == ALIGN).flatten(1)], dim=1)
        return [scale.view(torch.uint8), pack_bits(both.to(torch.uint8), 1)]

    def decode(codes, out: torch.Tensor) -> None:
        both = unpack_bits(codes[1], 1, BUCKET + BUCKET // ALIGN).bool()
        bits = both[:, :BUCKET].reshape(len(out), -1, ALIGN)
        full = both[:, BUCKET:].unsqueeze(2)
        last = (_ordinal(out) * bits).amax(dim=2, keepdim=True)
        spread(bits, torch.where(full, ALIGN, last - 1), codes[0].view(torch.float32), out)

    return Wire("sign", (4, (BUCKET + BUCKET // ALIGN) // 8), encode, decode, biased=True)


def _ordinal(like: torch.Tensor) -> torch.Tensor:
    """1, 2, … for the values of a run."""
    return torch.arange(1, ALIGN + 1, dtype=torch.uint8, device=like.device)


def _places(order: torch.Tensor) -> list[torch.Tensor]:
    """Places in a bucket, ascending, as bytes: how many lie in the first half, and where in theirs.

    k + 2 bytes for k places below 512.
    """
    first = (order < 256).sum(dim=1, keepdim=True).to(torch.int16)
    return [first.view(torch.uint8), (order & 255).to(torch.uint8)]


def _order(first: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`_places`."""
    place = torch.arange(low.shape[1], device=low.device)
    return low.long() + 256 * (place >= first.view(torch.int16).long())


def _chosen(buckets: torch.Tensor, k: int) -> torch.Tensor:
    """Places of the k values of largest modulus of each bucket, ascending.

    Where fewer aren't 0 the largest one's is repeated: what is 0 is never chosen, as codes without
    a zero would make something of it, also behind the last parameter.
    """
    # stable, so that equal values are chosen alike everywhere
    size, order = buckets.abs().sort(dim=1, descending=True, stable=True)
    return torch.where(size[:, :k] > 0, order[:, :k], order[:, :1]).sort(dim=1).values


def top_k(density: float) -> Wire:
    """The k = ⌈512 · density⌉ values of largest modulus of each bucket: 5 k + 2 bytes a bucket."""
    k = math.ceil(BUCKET * density)

    def encode(buckets: torch.Tensor, words) -> list[torch.Tensor]:
        order = _chosen(buckets, k)
        values = buckets.gather(1, order)
        buckets.zero_().scatter_(1, order, values)
        return [values.view(torch.uint8), *_places(order)]

    def decode(codes, out: torch.Tensor) -> None:
        out.zero_().scatter_(1, _order(*codes[1:]), codes[0].view(torch.float32))

    return Wire("top-k", (4 * k, 2, k), encode, decode, biased=True)


def top_k_int2(density: float) -> Wire:
    """The values of :func:`top_k` in two bits: what SparseLoCo sends. 1¼ k + 6 bytes a bucket.

    The nearest of s · (−1, −⅓, ⅓, 1), s the bucket's largest |v|. A contraction only up to k = 9:
    small values become ⅓ s, so that ‖Q(v) − v‖² may come near to (k − 1)/9 ‖v‖².
    """
    k = math.ceil(BUCKET * density)

    def spread(order: torch.Tensor, level: torch.Tensor, scale: torch.Tensor, out) -> None:
        values = level.to(torch.float32).mul_(2).sub_(3).mul_(scale / 3)
        out.zero_().scatter_(1, order, values)

    def encode(buckets: torch.Tensor, words) -> list[torch.Tensor]:
        scale, inverse = _largest(buckets)
        order = _chosen(buckets, k)
        level = buckets.gather(1, order).mul_(inverse).add_(1).mul_(1.5).add_(0.5).floor_()
        level = level.clamp_(0, 3).to(torch.uint8)
        spread(order, level, scale, buckets)
        first, low = _places(order)
        return [scale.view(torch.uint8), first, pack_bits(level, 2), low]

    def decode(codes, out: torch.Tensor) -> None:
        scale, first, level, low = codes
        spread(_order(first, low), unpack_bits(level, 2, k), scale.view(torch.float32), out)

    return Wire("top-k-int2", (4, 2, -(-k // 4), k), encode, decode, biased=True)


def random_k(density: float, seed: int) -> Wire:
    """⌈512 · density⌉ neighbouring values of each bucket from a random place on: 4 bytes each.

    The places run around the bucket's end, so that each value is as likely as any other; a run
    needs one number where independent places would need one each.
    """
    k = math.ceil(BUCKET * density)

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


def shared_k(density: float, seed: int) -> Wire:
    """The values of :func:`random_k` at places that are the same on all nodes (SPARTA)."""
    return random_k(density, seed)._replace(name="shared-k", shared=True)


WIRES: dict[str, Callable[..., Wire]] = {
    "fp32": lambda: FP32,
    "bf16": bf16,
    "qsgd": qsgd,
    "fp4": fp4,
    "sign": sign,
    "top-k": top_k,
    "top-k-int2": top_k_int2,
    "random-k": random_k,
    "shared-k": shared_k,
}
"""Every wire by the name that `node.wire` has for it; parameters are those of :func:`wire`."""


def wire(name: str = "fp32", levels: int = 127, density: float = 0.01, seed: int = 0) -> Wire:
    """The encoding that a job names by `node.wire`, `node.levels` and `node.density`."""
    given = {"levels": levels, "density": density, "seed": seed}
    takes = inspect.signature(WIRES[name]).parameters
    return WIRES[name](**{key: given[key] for key in takes})

"""Compressors by name: quantization and sparsification in buckets of 512 elements."""

import inspect
import math
from collections.abc import Callable

import torch

from mpigossip.mixing.wire import ALIGN, FP32, WIRE_BUCKET, BucketRandom, Wire

TINY = 1e-30
"""Wires that scale a bucket by its largest |v| send zeros if this is not greater than `TINY`."""


def bf16() -> Wire:
    """Return a wire that sends the upper 16 bits of each float32, rounded to nearest even.

    A value takes 2 bytes.
    """

    def encode(buckets: torch.Tensor, random: BucketRandom) -> list[torch.Tensor]:
        codes = buckets.to(torch.bfloat16)
        buckets.copy_(codes)
        return [codes.view(torch.uint8)]

    def decode(encoded, out: torch.Tensor) -> None:
        out.copy_(encoded[0].view(torch.bfloat16))

    return Wire("bf16", (2 * WIRE_BUCKET,), encode, decode, cast=torch.bfloat16)


def qsgd(levels: int, seed: int) -> Wire:
    """Return the wire of QSGD (Alistarh et al. 2017), which is unbiased.

    A value v is replaced by Q(v) = s · l/levels, where s is the largest |v| of the bucket, and l is
    a random integer from −levels to levels with the sign of v. |l| is |v| · levels/s, rounded up
    with the probability of its fraction, and otherwise down. The QSGD paper also permits a norm as
    s; the maximum is not a sum, and therefore has the same bits for arrays of any shape. A value
    takes 2 bits for 1 level, 4 bits for up to 7 levels, and otherwise 8 bits; s takes 4 bytes per
    bucket.

    :param levels: number of positive values of l, at most 127
    :param seed: seed of the random rounding
    """
    bits = 2 if levels == 1 else 4 if levels <= 7 else 8

    def encode(buckets: torch.Tensor, random: BucketRandom) -> list[torch.Tensor]:
        scale, _ = _largest(buckets)
        inverse = levels / scale.clamp(min=TINY)
        # floor(v levels/s + u), u uniform in [0, 1), rounds up with the probability of the fraction
        level = buckets.mul(inverse).add_(random.uniform()).floor_()
        level.clamp_(-levels, levels)
        torch.mul(level, scale / levels, out=buckets)
        codes = level.add_(levels).to(torch.uint8)
        return [scale.view(torch.uint8), pack_bits(codes, bits)]

    def decode(encoded, out: torch.Tensor) -> None:
        out.copy_(unpack_bits(encoded[1], bits, WIRE_BUCKET))
        out.sub_(levels).mul_(encoded[0].view(torch.float32) / levels)

    return Wire("qsgd", (4, WIRE_BUCKET * bits // 8), encode, decode, seed)


def pack_bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes of ``bits`` bits each, of shape (b, c), into bytes, of shape (b, ⌈c · bits / 8⌉).

    The first code takes the lowest bits of a byte.
    """
    per_byte = 8 // bits
    missing = -codes.shape[1] % per_byte
    codes = torch.nn.functional.pad(codes, (0, missing)).view(len(codes), -1, per_byte)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    return (codes << shifts).sum(dim=2, dtype=torch.uint8)


def unpack_bits(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Return the codes that :func:`pack_bits` has packed: ``count`` codes per row, (b, count)."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    codes = packed.unsqueeze(2) >> shifts & (1 << bits) - 1
    return codes.view(len(packed), -1)[:, :count]


def _largest(buckets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest |v| of each bucket and its inverse, which is always finite.

    If the largest |v| is at most `TINY`, it is returned as 0.
    """
    scale = buckets.abs().amax(dim=1, keepdim=True)
    scale.mul_(scale > TINY)
    return scale, 1 / scale.clamp(min=TINY)


def fp4(seed: int) -> Wire:
    """Return the wire of Streaming DiLoCo: floats of a sign and three bits of exponent.

    A value v is replaced by ± s · q, where s is the largest |v| of the bucket, and q is one of 0,
    2⁻⁶, 2⁻⁵ … 1. From the two numbers s · q around |v|, one is drawn at random, such that the mean
    is |v|: the wire is unbiased. A value takes 4 bits, and s takes 4 bytes per bucket.
    """

    def level(codes: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        power = (codes & 7).to(torch.float32)
        torch.exp2(power - 7, out=out).mul_(power > 0)
        return out.mul_(1 - 2 * (codes >> 3).to(torch.float32))

    def encode(buckets: torch.Tensor, random: BucketRandom) -> list[torch.Tensor]:
        scale, inverse = _largest(buckets)
        size = buckets.abs().mul_(inverse).clamp_(max=1)
        # 2^(power − 7) ≤ size unless power is 0; frexp returns the exponent 0 for 0
        power = torch.frexp(size)[1].add_(6).mul_(size >= 2.0**-6)
        # the two values around size; if size < 1/64, the lower one is 0
        below = torch.ldexp(torch.ones_like(size), power - 7).mul_(power > 0)
        above = torch.ldexp(torch.ones_like(size), power - 6)
        up = random.uniform().mul_(above - below) < size - below
        codes = (power + up).clamp_(max=7).to(torch.uint8) + 8 * (buckets < 0).to(torch.uint8)
        level(codes, buckets).mul_(scale)
        return [scale.view(torch.uint8), pack_bits(codes, 4)]

    def decode(encoded, out: torch.Tensor) -> None:
        level(unpack_bits(encoded[1], 4, WIRE_BUCKET), out).mul_(encoded[0].view(torch.float32))

    return Wire("fp4", (4, WIRE_BUCKET // 2), encode, decode, seed)


def sign() -> Wire:
    """Return a wire that sends one sign bit per value and the mean |v| of each bucket.

    Zero counts as positive, except for the zeros at the end of a run of 32 values, such as the
    padding after a parameter: they stay zero and are not part of the mean. If a run ends with
    zeros, the bit after its last other value is 1, and the remaining bits are 0; one more bit for
    each run is 1 if it has no such zeros. A bucket takes 70 bytes.
    """

    def spread(bits: torch.Tensor, used: torch.Tensor, scale: torch.Tensor, out) -> None:
        signs = (2 * bits.to(torch.int8) - 1).mul_(_ordinal(out) <= used)
        torch.mul(signs, scale.unsqueeze(2), out=out.view_as(signs))

    def encode(buckets: torch.Tensor, random: BucketRandom) -> list[torch.Tensor]:
        runs = buckets.view(len(buckets), -1, ALIGN)
        ordinal = _ordinal(buckets)
        used = (ordinal * (runs != 0)).amax(dim=2, keepdim=True)
        # Divide first, because a sum of large values overflows. Sum by halves, which has the same
        # bits for arrays of any shape.
        scale = buckets.abs().div_(used.sum(dim=1).clamp(min=1))
        while scale.shape[1] > 1:
            half = scale.shape[1] // 2
            scale = scale[:, :half] + scale[:, half:]
        scale.clamp_(max=torch.finfo(scale.dtype).max)
        bits = torch.where(ordinal <= used, runs >= 0, ordinal == used + 1)
        spread(bits, used, scale, buckets)
        both = torch.cat([bits.flatten(1), (used == ALIGN).flatten(1)], dim=1)
        return [scale.view(torch.uint8), pack_bits(both.to(torch.uint8), 1)]

    def decode(encoded, out: torch.Tensor) -> None:
        both = unpack_bits(encoded[1], 1, WIRE_BUCKET + WIRE_BUCKET // ALIGN).bool()
        bits = both[:, :WIRE_BUCKET].reshape(len(out), -1, ALIGN)
        full = both[:, WIRE_BUCKET:].unsqueeze(2)
        last = (_ordinal(out) * bits).amax(dim=2, keepdim=True)
        spread(bits, torch.where(full, ALIGN, last - 1), encoded[0].view(torch.float32), out)

    return Wire("sign", (4, (WIRE_BUCKET + WIRE_BUCKET // ALIGN) // 8), encode, decode, biased=True)


def _ordinal(like: torch.Tensor) -> torch.Tensor:
    """Return an array 1, 2 … 32 on the device of ``like``: the positions in a run of 32 values."""
    return torch.arange(1, ALIGN + 1, dtype=torch.uint8, device=like.device)


def _encode_positions(order: torch.Tensor) -> list[torch.Tensor]:
    """Encode k ascending positions (b, k) in each of b buckets as k + 2 bytes per bucket.

    Return two arrays: the number of positions in the first half of each bucket, as two bytes, and
    the position of each value within its half, as one byte.
    """
    first = (order < 256).sum(dim=1, keepdim=True).to(torch.int16)
    return [first.view(torch.uint8), (order & 255).to(torch.uint8)]


def _decode_positions(first: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Return the positions (b, k) that :func:`_encode_positions` has encoded."""
    index = torch.arange(low.shape[1], device=low.device)
    return low.long() + 256 * (index >= first.view(torch.int16).long())


def _largest_positions(buckets: torch.Tensor, k: int) -> torch.Tensor:
    """Return the positions (b, k) of the k values with the largest |v| of each bucket, ascending.

    If a bucket has fewer than k values other than 0, the position of the largest one is repeated. A
    zero is never chosen, not even in the padding, because codes without a zero would change it.
    """
    # a stable sort, so that all ranks choose the same among equal values
    size, order = buckets.abs().sort(dim=1, descending=True, stable=True)
    return torch.where(size[:, :k] > 0, order[:, :k], order[:, :1]).sort(dim=1).values


def top_k(density: float) -> Wire:
    """Return a wire that sends the k = ⌈512 · density⌉ values with the largest |v| of each bucket.

    A bucket takes 5 k + 2 bytes.

    :param density: fraction of the 512 values of a bucket that is sent, above 0 and at most 1
    """
    k = math.ceil(WIRE_BUCKET * density)

    def encode(buckets: torch.Tensor, random: BucketRandom) -> list[torch.Tensor]:
        order = _largest_positions(buckets, k)
        values = buckets.gather(1, order)
        buckets.zero_().scatter_(1, order, values)
        return [values.view(torch.uint8), *_encode_positions(order)]

    def decode(encoded, out: torch.Tensor) -> None:
        out.zero_().scatter_(1, _decode_positions(*encoded[1:]), encoded[0].view(torch.float32))

    return Wire("top-k", (4 * k, 2, k), encode, decode, biased=True)


def top_k_int2(density: float) -> Wire:
    """Return a wire that sends each value of :func:`top_k` in two bits, as SparseLoCo does.

    A value is replaced by the nearest of s · (−1, −⅓, ⅓, 1), where s is the largest |v| of the
    bucket. A bucket takes k + ⌈k/4⌉ + 6 bytes, where k is the number of its values that are sent.
    The wire is a contraction only up to k = 9: small values become ⅓ s, so that ‖Q(v) − v‖² can
    approach (k − 1)/9 ‖v‖².

    :param density: as in :func:`top_k`
    """
    k = math.ceil(WIRE_BUCKET * density)

    def spread(order: torch.Tensor, level: torch.Tensor, scale: torch.Tensor, out) -> None:
        values = level.to(torch.float32).mul_(2).sub_(3).mul_(scale / 3)
        out.zero_().scatter_(1, order, values)

    def encode(buckets: torch.Tensor, random: BucketRandom) -> list[torch.Tensor]:
        scale, inverse = _largest(buckets)
        order = _largest_positions(buckets, k)
        level = buckets.gather(1, order).mul_(inverse).add_(1).mul_(1.5).add_(0.5).floor_()
        level = level.clamp_(0, 3).to(torch.uint8)
        spread(order, level, scale, buckets)
        first, low = _encode_positions(order)
        return [scale.view(torch.uint8), first, pack_bits(level, 2), low]

    def decode(encoded, out: torch.Tensor) -> None:
        scale, first, level, low = encoded
        spread(
            _decode_positions(first, low), unpack_bits(level, 2, k), scale.view(torch.float32), out
        )

    return Wire("top-k-int2", (4, 2, -(-k // 4), k), encode, decode, biased=True)


def random_k(density: float, seed: int) -> Wire:
    """Return a wire that sends ⌈512 · density⌉ consecutive values of each bucket, 4 bytes each.

    They begin at a random position and wrap around at the end of the bucket, so that each value is
    sent with equal probability. Only the first position has to be sent, as 4 bytes; independent
    positions would have to be sent one by one.

    :param density: fraction of the 512 values of a bucket that is sent, above 0 and at most 1
    :param seed: seed of the random positions
    """
    k = math.ceil(WIRE_BUCKET * density)

    def positions(start: torch.Tensor) -> torch.Tensor:
        return (start.view(torch.int32).long() + torch.arange(k, device=start.device)) % WIRE_BUCKET

    def encode(buckets: torch.Tensor, random: BucketRandom) -> list[torch.Tensor]:
        start = random.positions().view(torch.uint8)
        chosen = positions(start)
        values = buckets.gather(1, chosen)
        buckets.zero_().scatter_(1, chosen, values)
        return [values.view(torch.uint8), start]

    def decode(encoded, out: torch.Tensor) -> None:
        out.zero_().scatter_(1, positions(encoded[1]), encoded[0].view(torch.float32))

    return Wire("random-k", (4 * k, 4), encode, decode, seed, biased=True)


def shared_k(density: float, seed: int) -> Wire:
    """Return the wire of :func:`random_k` with the same positions on all nodes, as in SPARTA.

    The parameters are described there.
    """
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
"""Functions that build a wire, by its name in `node.wire`; each has some of the parameters of
:func:`wire`."""


def wire(name: str = "fp32", levels: int = 127, density: float = 0.01, seed: int = 0) -> Wire:
    """Build the wire that a job names by `node.wire`; a wire ignores options that it lacks.

    :param name: name of the wire, as `node.wire`
    :param levels: number of positive values of "qsgd", as `node.levels`
    :param density: fraction of the values that is sent, as `node.density`
    :param seed: seed of random rounding and of random positions
    :raises KeyError: if there is no wire of this name
    """
    options = {"levels": levels, "density": density, "seed": seed}
    parameters = inspect.signature(WIRES[name]).parameters
    return WIRES[name](**{key: options[key] for key in parameters})

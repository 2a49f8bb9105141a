"""Random words drawn on the device, bitwise identical to the words of NumPy's Philox.

The generator is Philox4x64-10 of Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as
1, 2, 3" (SC 2011), in the variant of ``numpy.random.Philox``: step k of the counter yields the four
64-bit words of the counter k + 1. It uses integer arithmetic only.

With CuPy, one kernel draws all words in one pass. Without it, torch's integer operations draw the
same words by about 400 operations, whatever their number.
"""

from functools import cache
from typing import Any

import numpy as np
import torch

from mpigossip.mixing.kernels.gpu_sum import CupyStream, kernel_works

ROUNDS = 10
MULTIPLIERS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
WEYL = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
LOW = 0xFFFFFFFF
WORDS_PER_STEP = 8
"""Number of 32-bit words that one step of the counter yields."""
THREADS = 256
"""Number of threads of a CUDA block. Each thread computes one step of the counter."""
NAME = "mpigossip_random_words"
TRIALS = (((0, 0, 0, 0), 0), ((7, 2**40, 1023, 1), 2**33 - 3))
"""Seeds, and numbers of the first step, of the draws by which the kernel is tried."""


def words(seed: tuple[int, ...], first: int, count: int, device: torch.device) -> torch.Tensor:
    """Return ``count`` random words of 32 bits, an int32 array (count,) on ``device``.

    :param seed: numbers that determine the key of the generator, by ``numpy.random.SeedSequence``
    :param first: number of the first step of the counter
    :param count: number of words, a multiple of eight
    :param device: device that draws the words
    """
    out = torch.empty(count // WORDS_PER_STEP, 4, dtype=torch.int64, device=device)
    if usable(device):
        _launch(seed, first, out)
    elif out.numel():
        _draw_by_torch(seed, first, out)
    return out.view(torch.int32).view(-1)


def source() -> str:
    """Return the CUDA source code of the kernel."""
    return f"""
#if defined(__CUDA_ARCH__) || defined(__HIP_DEVICE_COMPILE__)
#define HIGH(a, b) __umul64hi(a, b)
#else
#define HIGH(a, b) (unsigned long long)(((unsigned __int128)(a) * (b)) >> 64)
#endif
extern "C" __global__ void {NAME}(long count, unsigned long long* y, long first, long key, long key2) {{
    const long k = (long)blockIdx.x * blockDim.x + threadIdx.x;
    if (k >= count) return;
    unsigned long long a = (unsigned long long)first + k + 1, b = 0, c = 0, d = 0;
    unsigned long long low = key, high = key2;
    for (int round = 0; round < {ROUNDS}; ++round) {{
        const unsigned long long left = HIGH({MULTIPLIERS[0]}ull, a), right = HIGH({MULTIPLIERS[1]}ull, c);
        const unsigned long long new_d = {MULTIPLIERS[0]}ull * a, new_b = {MULTIPLIERS[1]}ull * c;
        a = right ^ b ^ low;
        c = left ^ d ^ high;
        b = new_b;
        d = new_d;
        low += {WEYL[0]}ull;
        high += {WEYL[1]}ull;
    }}
    y[4 * k] = a;
    y[4 * k + 1] = b;
    y[4 * k + 2] = c;
    y[4 * k + 3] = d;
}}
"""  # noqa: E501 - the parameters are in one line, because the tests read them


def _key(seed: tuple[int, ...]) -> tuple[int, int]:
    """Return the two 64-bit words of the generator's key, as NumPy derives them from ``seed``."""
    low, high = np.random.SeedSequence(seed).generate_state(2, np.uint64).tolist()
    return low, high


def _signed(word: int) -> int:
    """Return the signed integer with the bits of a 64-bit word."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word


def _launch(seed: tuple[int, ...], first: int, out: torch.Tensor) -> None:
    """Launch the kernel on torch's current stream of the device of ``out``, (steps, 4)."""
    import cupy

    steps = len(out)
    if not steps:
        return
    blocks = -(-steps // THREADS)
    numbers = [np.int64(_signed(number)) for number in (first, *_key(seed))]
    stream = CupyStream(torch.cuda.current_stream(out.device))
    with torch.cuda.device(out.device), cupy.cuda.Stream.from_external(stream):
        _kernel()((blocks,), (THREADS,), (np.int64(steps), np.uint64(out.data_ptr()), *numbers))


@cache
def _kernel() -> Any:
    import cupy

    return cupy.RawKernel(source(), NAME)


def _draw_by_torch(seed: tuple[int, ...], first: int, out: torch.Tensor) -> None:
    """Compute the words of the steps from ``first`` on, by torch's operations, into ``out``."""
    steps = torch.arange(1, len(out) + 1, dtype=torch.int64, device=out.device)
    a = steps.add_(_signed(first))
    b, c, d = (torch.zeros_like(a) for _ in range(3))
    low, high = _key(seed)
    for _ in range(ROUNDS):
        left, new_d = _multiply(a, MULTIPLIERS[0])
        right, new_b = _multiply(c, MULTIPLIERS[1])
        a = right.bitwise_xor_(b).bitwise_xor_(_signed(low))
        c = left.bitwise_xor_(d).bitwise_xor_(_signed(high))
        b = new_b
        d = new_d
        low += WEYL[0]
        high += WEYL[1]
    torch.stack([a, b, c, d], dim=1, out=out)


def _multiply(words: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the high and the low 64 bits of the product of 64-bit words with a 64-bit factor.

    The words are the bits of an int64 array. Products of their halves, of 32 bits, wrap around, and
    shifts copy the sign; the masks remove the copies.
    """
    factor_low = factor & LOW
    factor_high = factor >> 32
    half_low = words & LOW
    half_high = (words >> 32).bitwise_and_(LOW)
    cross = half_high * factor_low
    other_cross = half_low * factor_high
    middle = (half_low.mul_(factor_low) >> 32).bitwise_and_(LOW)
    middle.add_(cross & LOW).add_(other_cross & LOW)
    high = half_high.mul_(factor_high).add_(middle >> 32)
    high.add_((cross >> 32).bitwise_and_(LOW)).add_((other_cross >> 32).bitwise_and_(LOW))
    return high, words * _signed(factor)


@cache
def usable(device: torch.device) -> bool:
    """Return whether the kernel works on this device.

    Some of its words are compared with the CPU's. If it does not work, a warning is issued with the
    reason and a remedy.
    """
    return kernel_works(
        draws_words_of_cpu, device, "draws random numbers", "by about 400 operations for each draw"
    )


def draws_words_of_cpu(device: torch.device) -> bool:
    """Return whether the kernel's words on ``device`` are bitwise identical to the CPU's."""
    for seed, first in TRIALS:
        bits = np.random.Philox(np.random.SeedSequence(seed))
        bits.advance(first)
        result = torch.empty(THREADS + 1, 4, dtype=torch.int64, device=device)
        _launch(seed, first, result)
        expected = torch.from_numpy(bits.random_raw(result.numel()).view(np.int64))
        if not torch.equal(result.cpu().view(-1), expected):
            return False
    return True

"""Counter-based random numbers, which are pure functions of a seed, a purpose and counters.

This is Philox4x32-10 of Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3"
(SC 2011), over arrays of counters. NumPy has this generator only as a stream: creating one object
per sample takes 20 µs, while this module takes 3 µs for a batch of 32. It uses integer arithmetic
only, so the numbers are bitwise identical on every machine and with every NumPy.
"""

import hashlib
import struct
from collections.abc import Sequence

import numpy as np

MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
WEYL = (0x9E3779B9, 0xBB67AE85)
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
"""Constants of Philox4x32 (MULTIPLIERS, WEYL), and mask (LOW) and length in bits (HALF) of a word.
"""

ORDER, CROP, NOISE, SPLIT = range(4)
"""Purposes of draws, which make two uses of one seed independent."""


def philox(counters: tuple, key: int) -> np.ndarray:
    """Return random words: (4, N) uint64 with 32 random bits each.

    :param counters: four ints or (N,) arrays below 2^32 that broadcast to one length
    :param key: 64 bits
    """
    shape = np.broadcast_shapes(*(np.shape(counter) for counter in counters)) or (1,)
    a, b, c, d = (np.broadcast_to(np.asarray(counter, np.uint64), shape) for counter in counters)
    low = key & 0xFFFFFFFF
    high = key >> 32 & 0xFFFFFFFF
    for _ in range(10):
        left = a * MULTIPLIERS[0]
        right = c * MULTIPLIERS[1]
        a = (right >> HALF) ^ b ^ np.uint64(low)
        b = right & LOW
        c = (left >> HALF) ^ d ^ np.uint64(high)
        d = left & LOW
        low = (low + WEYL[0]) & 0xFFFFFFFF
        high = (high + WEYL[1]) & 0xFFFFFFFF
    return np.stack([a, b, c, d])


def words(
    seed: int, purpose: int, indices: np.ndarray, epoch: int = 0, block: int | np.ndarray = 0
) -> np.ndarray:
    """Return (4, len(indices)) random 32-bit words for these indices in this epoch.

    :param seed: random seed
    :param purpose: one of the purposes of this module
    :param indices: numbers below 2^32, for example of samples
    :param epoch: number of the epoch
    :param block: number that distinguishes several draws for the same index, such as draws of
        several nodes or attempts
    """
    return philox((indices, epoch, block, purpose), seed)


def permutation(length: int, seed: int, purpose: int, epoch: int = 0, block: int = 0) -> np.ndarray:
    """Return a random permutation of 0 … length − 1 (int64): the order that sorts random numbers.

    :param length: number of elements
    :param seed: random seed
    :param purpose: one of the purposes of this module
    :param epoch: number of the epoch
    :param block: number that distinguishes several draws, such as the index of a node
    """
    return permutations([length], seed, purpose, epoch, [block])[0]


def permutations(
    lengths: Sequence[int], seed: int, purpose: int, epoch: int, blocks: Sequence[int]
) -> list[np.ndarray]:
    """Return a :func:`permutation` for each pair of a length and a block, in one draw."""
    indices = np.concatenate([np.arange(length, dtype=np.uint64) for length in lengths])
    block_of_index = np.repeat(np.asarray(blocks, np.uint64), lengths)
    drawn = words(seed, purpose, indices, epoch, block_of_index)
    values = np.split(drawn[0] << HALF | drawn[1], np.cumsum(lengths)[:-1])
    return [np.argsort(keys, kind="stable") for keys in values]


def mixed(*numbers: int) -> int:
    """Hash several integers, modulo 2^64, to one 63-bit integer that can seed a generator."""
    packed = struct.pack(f"<{len(numbers)}Q", *(number & (1 << 64) - 1 for number in numbers))
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1

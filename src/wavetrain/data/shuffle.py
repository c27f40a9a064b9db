"""Random numbers and permutations without a state: any one of them can be asked for, at no cost for those before.

A permutation of 0 … size-1 is a Feistel network over the next power of four, walked along its cycles until it falls below
``size`` (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). Its rounds, and all random numbers, come from the
mixing function of SplitMix64.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

UIntArray = NDArray[np.uint64]

_ROUNDS: Final = 6
_GOLDEN: Final = 0x9E3779B97F4A7C15


def mix(values: UIntArray) -> UIntArray:
    """SplitMix64's output function: a bijection of 64-bit numbers that looks random, elementwise."""
    x = values + np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def keys(seed: int, counters: UIntArray) -> UIntArray:
    """One key for each counter, (n,) → (n,)."""
    return mix(mix(np.full(1, seed, dtype=np.uint64)) ^ counters)


def permuted(indices: UIntArray, size: int, key: UIntArray) -> UIntArray:
    """Where each index goes in the permutation of 0 … size-1 that its key names, (n,), (n,) → (n,)."""
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    values = _feistel(indices, half, key)
    outside = np.flatnonzero(values >= size)
    while len(outside):
        values[outside] = _feistel(values[outside], half, key[outside])
        outside = outside[values[outside] >= size]
    return values


def _feistel(values: UIntArray, half: np.uint64, key: UIntArray) -> UIntArray:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for i in range(_ROUNDS):
        left, right = right, left ^ (mix(right ^ mix(key + np.uint64(i))) & mask)
    return (left << half) | right


def uniform(key: UIntArray, count: int, stream: int) -> NDArray[np.float64]:
    """``count`` numbers in [0, 1) for each key, (n,) → (n, count); another stream gives others."""
    columns = np.arange(count, dtype=np.uint64) + np.uint64(stream << 40)
    bits = mix(mix(columns)[None, :] ^ key[:, None])
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53

"""Random numbers as a pure function of a counter: `hash_u64(seed, step, row)` is always the same, in any order and on any rank.

The generator is SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014): its output number n
for seed k is `mix(k + n * GAMMA)`. Several counters are chained, each output being the seed of the next.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

U64 = NDArray[np.uint64]
GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MUL_1, _MUL_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def mix(z: U64) -> U64:
    """The finaliser of SplitMix64: a bijection of 64-bit words. `z` is overwritten."""
    z ^= z >> np.uint64(30)
    z *= _MUL_1
    z ^= z >> np.uint64(27)
    z *= _MUL_2
    z ^= z >> np.uint64(31)
    return z


def hash_u64(seed: int, *counters: ArrayLike) -> U64:
    """64 random bits for each combination of `counters` (integers or arrays that broadcast), uint64.

    Args:
        seed: any integer; taken modulo 2**64.
        counters: integers >= 0, such as the step and the row.
    """
    key = np.array([seed % 2**64], dtype=np.uint64)
    for counter in counters:
        key = mix(key + (np.atleast_1d(np.asarray(counter)).astype(np.uint64) + np.uint64(1)) * GAMMA)
    return key


def uniform(seed: int, *counters: ArrayLike, below: int) -> NDArray[np.int64]:
    """Integers in [0, below). The remainder of a 64-bit word: the bias is under below / 2**64."""
    return (hash_u64(seed, *counters) % np.uint64(below)).astype(np.int64)

"""Counter-based random numbers: no state, the same on every device and in any order.

Non-goals: no distributions but the uniform one.
"""

import hashlib

from torch import Tensor

_GOLDEN = -0x61C8864680B583EB  # 2^64 / golden ratio, odd, as int64: the step of splitmix64


def key_of(words: str) -> int:
    """A key, in int64, for what is named."""
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "big", signed=True)


def words(key: int | Tensor, counter: Tensor) -> Tensor:
    """64 bits for each key and counter, int64, by splitmix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    z = counter * _GOLDEN + key
    z.bitwise_xor_(_shift(z, 30)).mul_(-0x40A7B892E31B1A47)
    z.bitwise_xor_(_shift(z, 27)).mul_(-0x6B2FB644ECCEEE15)
    return z.bitwise_xor_(_shift(z, 31))


def uniform(key: int | Tensor, counter: Tensor) -> Tensor:
    """One number in (0, 1) for each counter, float64, of 53 bits."""
    return (_shift(words(key, counter), 11).double() + 0.5) * 2.0**-53


def happens(chance: float, key: int | Tensor, counter: Tensor) -> Tensor:
    """Whether what has this chance happens for each counter: a comparison of integers, alike on
    all devices.
    """
    return _shift(words(key, counter), 11) < round(chance * 2**53)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical shift right; torch's own keeps the sign."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)

"""The order of samples as functions of seed and number: a permutation of a set's windows, a
mixture of sets.
"""

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from math import gcd, lcm

_BITS = 64
_MASK = (1 << _BITS) - 1

LONGEST = 10_000
"""The most samples in which sets come in exactly their weights; weights are rounded to that
part of their sum.
"""


def hash_of(*parts: object) -> int:
    """A number of 64 bits, a hash of the parts."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:8], "big")


def permute(position: int, windows: int, key: int) -> int:
    """Where `position` < `windows` goes under the permutation of this key: a Feistel cipher that
    walks its cycles.

    (Black and Rogaway, CT-RSA 2002.)  No table is needed, whatever the number of windows.
    """
    half = max(1, ((windows - 1).bit_length() + 1) // 2)
    while True:
        position = _feistel(position, half, key)
        if position < windows:
            return position


def _feistel(value: int, half: int, key: int) -> int:
    """A permutation of the numbers of 2 · half bits."""
    left, right = value >> half, value & ((1 << half) - 1)
    for round_key in _round_keys(key):
        mixed = _mix(round_key ^ right) & ((1 << half) - 1)
        left, right = right, left ^ mixed
    return left << half | right


@lru_cache(maxsize=64)
def _round_keys(key: int) -> tuple[int, ...]:
    """The keys of the four rounds, which all windows of a pass share."""
    return tuple(_mix(key + round_) for round_ in range(4))


def _mix(z: int) -> int:
    """The finaliser of splitmix64 on a Python int."""
    z &= _MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
    return z ^ z >> 31


def whole_weights(weights: Sequence[float]) -> list[int]:
    """The weights as small integers of the same proportions, whose sum is at most `LONGEST`;
    rounded if need be.
    """
    exact = [Fraction(repr(weight)) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    whole = [weight // gcd(*whole) for weight in whole]
    if sum(whole) <= LONGEST:
        return whole
    return _round_weights(whole)


def _round_weights(weights: Sequence[int]) -> list[int]:
    """Integers that add up to `LONGEST`, none of them 0: by largest remainders."""
    free, total = LONGEST - len(weights), sum(weights)
    shares = [Fraction(free * weight, total) for weight in weights]
    rounded = [1 + int(share) for share in shares]
    nearest = sorted(range(len(weights)), key=lambda which: int(shares[which]) - shares[which])
    for which in nearest[: LONGEST - sum(rounded)]:
        rounded[which] += 1
    return rounded


def spread(weights: Sequence[int]) -> list[int]:
    """Which set each of sum(weights) samples is of: of the first n of them, a share within 1 of n
    times a set's weight.

    Among the sets that may come it is the one that must come soonest (Tijdeman, The chairman
    assignment problem, 1980).
    """
    total, parts = sum(weights), max(1, 2 * len(weights) - 2)
    counts, cycle = [0] * len(weights), list[int]()
    for number in range(1, total + 1):
        # how far each is from its due, in units of 1 / (total · parts) samples; it may come from 1
        # / parts on
        eligible = list[tuple[Fraction, int]]()
        for which, (weight, count) in enumerate(zip(weights, counts, strict=True)):
            due = parts * (weight * number - total * count)
            if due >= total:
                eligible.append((Fraction((parts - 1) * total - due, weight), which))
        _, chosen = min(eligible)
        counts[chosen] += 1
        cycle.append(chosen)
    return cycle


class Interleaving:
    """Turns of several sets, by seed and number of a sample alone.

    Each cycle of sum(weights) samples has every set exactly as often as its weight says.  It begins
    at a drawn place of `spread`, so that a row of a batch is not of the same set in each step.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        self._cycle = spread(weights)
        # by set, its places in the cycle
        self._places: list[list[int]] = [[] for _ in weights]
        for place, which in enumerate(self._cycle):
            self._places[which].append(place)

    def at(self, sample: int, seed: int) -> tuple[int, int]:
        """The set that a sample is of, and how many samples of that set come before it."""
        length = len(self._cycle)
        if length == 1:
            return self._cycle[0], sample
        cycle, place = divmod(sample, length)
        first = hash_of(seed, "cycle", cycle) % length
        position = (first + place) % length
        places = self._places[self._cycle[position]]
        before = bisect_left(places, position) - bisect_left(places, first)
        if position < first:
            before += len(places)
        return self._cycle[position], cycle * len(places) + before

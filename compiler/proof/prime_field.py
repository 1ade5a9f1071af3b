"""Arithmetic in the integers modulo a prime, where equal means equal.

The step's values without rounding.  A nonlinear function is a keyed hash, the same for both
programs, so that two programs agree only if they apply it to the same arguments; all trials are
hashed together, so that two arguments count as the same only if they are in every trial.  exp(x) is
w^s, s the hash of x in the exponents of w: its laws hold.  (Equality by evaluation in a field:
Schwartz 1980, Zippel 1979; exponents as w^s: Wu et al. 2025, Mirage.)
"""

from collections.abc import Sequence
from functools import cache
from hashlib import shake_256
from math import prod

import numpy as np
from attrs import define, field

from .matrices import matrices
from .tensors import RANDOM, Array, Back, Degree, Dims, Tensor, degree_of, subscripts

P = 2147483579
"""The modulus: a safe prime, P = 2Q + 1, just under 2^31, so that products fit 64 bits."""

Q = (P - 1) // 2
"""The order of the squares modulo P: exponents are integers modulo this prime."""

WINDOW = 15
"""Powers are looked up in two tables for as many bits each."""

EXACT = 4
"""The number of products of 62 bits whose sum fits in 64."""

FEW = 32
"""Up to this number of products they are summed a few at a time; more take less time in halves."""

UNBOUNDED = Degree(1 << 62)
"""Kinds that the bound does not cover."""

Word = np.uint64
_MODULUS = Word(P)
_HALF = Word(16)
_LOW = Word(0xFFFF)


@define
class Field:
    """Integers modulo P in `trials` independent trials on a mesh of `axes` axes; counts what
    the error bound needs.
    """

    trials: int
    axes: int
    seed: int = 0
    degree: Degree = RANDOM
    inverted: int = 0
    hashed: int = 0
    _keys: dict[tuple[object, ...], Array] = field(factory=dict[tuple[object, ...], Array])

    def random(self, shape: tuple[int, ...], name: str) -> Array:
        """Uniform numbers (to 2^-33) that depend on seed and name only: [trials, *shape]."""
        return _mod_p(random_words((self.seed, "random", name), (self.trials, *shape)))

    def constant(self, value: Array, dims: Dims = ()) -> Tensor:
        return Tensor(dims, (np.asarray(value) % P).astype(Word))

    def ratio(self, above: int, below: int) -> Tensor:
        return Tensor((), np.full((1,) * (1 + self.axes), above * pow(below, -1, P) % P, Word))

    def product(self, out: Dims, *factors: Tensor) -> Tensor:
        result, *rest = factors
        for i, factor in enumerate(rest[:-1]):
            later = {dim for other in rest[i + 1 :] for dim in other.dims}
            joint = tuple(dict.fromkeys(result.dims + factor.dims))
            keep = tuple(dim for dim in joint if dim in out or dim in later)
            result = self._pair(keep, result, factor)
        if not rest:
            return self._sum(out, result)
        return self._pair(out, result, rest[-1])

    def _pair(self, out: Dims, x: Tensor, y: Tensor) -> Tensor:
        degree = x.degree + y.degree
        self.degree |= degree
        if not {*x.dims, *y.dims} - {*out}:
            return Tensor(out, _mod_p(x.onto(out) * y.onto(out)), degree)
        x, y = self._without(x, out + y.dims), self._without(y, out + x.dims)
        pair = matrices(out, x, y)
        return Tensor(out, pair.tensor(_matmul_mod_p(pair.left, pair.right)), degree)

    def _without(self, x: Tensor, out: Dims) -> Tensor:
        """The sum over the dims that are not kept."""
        left = tuple(dim for dim in x.dims if dim in out)
        if left == x.dims:
            return x
        return self._sum(left, x)

    def _sum(self, out: Dims, x: Tensor) -> Tensor:
        return Tensor(out, _mod_p(np.einsum(subscripts(out, x.dims), x.array)), x.degree)

    def total(self, out: Dims, *terms: Tensor) -> Tensor:
        array = terms[0].onto(out)
        for term in terms[1:]:
            array = array + term.onto(out)
        return Tensor(out, _mod_p(array), degree_of(terms))

    def negative(self, x: Tensor) -> Tensor:
        return Tensor(x.dims, _mod_p(P - x.array), x.degree)

    def inverse(self, x: Tensor) -> Tensor:
        """x^(P-2), the inverse 1/x (Fermat); 0 stays 0.  Counted, and of degree one: see the bound.

        x must contain no inverse: where that is not known, use the function `reciprocal`.
        """
        self.inverted += x.array[0].size * x.degree.all
        self.degree |= UNBOUNDED if x.degree.inverses else RANDOM
        result, square = np.ones_like(x.array), x.array
        for bit in reversed(f"{P - 2:b}"):
            if bit == "1":
                result = _mod_p(result * square)
            square = _mod_p(square * square)
        return Tensor(x.dims, result, Degree(1, 1))

    def function(self, name: str, *operands: Tensor, constants: tuple[object, ...] = ()) -> Tensor:
        return Tensor(operands[0].dims, _mod_p(self._hash((name, *constants), *operands)), RANDOM)

    def exponential(self, x: Tensor, less: Tensor | None = None) -> Tensor:
        exponent, degree = self._hash(("exponent",), x) % Q, RANDOM
        if less is not None:
            degree = Degree(2)  # w^s of x, and w^-s of y
            self.degree |= degree
            down = Tensor(less.dims, self._hash(("exponent",), less) % Q).onto(x.dims)
            exponent = (exponent + (Q - down)) % Q
        low, high = _powers()
        mask = Word((1 << WINDOW) - 1)
        return Tensor(x.dims, low[exponent & mask] * high[exponent >> Word(WINDOW)] % P, degree)

    def softmax(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        """A hash of each element, its place and the whole of its row."""
        length = x.array.shape[-1]
        digest = self._digest(("softmax",), x) ^ self._key(("place", length), length)
        if seen is not None:
            digest = np.where(seen.onto(x.dims) > 0, digest, Word(0))
        digest = _mix_bits(digest + _mix_bits(digest.sum(axis=-1, keepdims=True, dtype=Word)))
        weights = _mod_p(self._of_each_trial(("softmax",), digest))
        if seen is not None:
            weights = weights * seen.onto(x.dims)
        return Tensor(x.dims, weights, RANDOM)

    def with_gradient(self, result: Tensor, operands: Sequence[Tensor], back: Back) -> Tensor:
        return result

    def angles(
        self, positions: Array, pairs: int, theta: float, scaling: tuple[object, ...]
    ) -> tuple[Tensor, Tensor]:
        place_and_pair = positions[..., None] * pairs + np.arange(pairs)
        index = Tensor(("position", "pair"), place_and_pair.astype(Word))
        cos = self._hash(("cos", theta, *scaling), index) % P
        sin = self._hash(("sin", theta, *scaling), index) % P
        return Tensor(index.dims, cos, RANDOM), Tensor(index.dims, sin, RANDOM)

    def rank(self, x: Tensor) -> Array:
        """An order for each trial: in a single one, 0 might be the least, and a maximum with
        zeros then a sum.
        """
        keys = self._key(("order",), self.trials).reshape(-1, *(1,) * (x.array.ndim - 1))
        return _mix_bits(x.array ^ keys)

    def unequal(self, x: Array, y: Array) -> Array:
        return x != y

    def _hash(self, name: tuple[object, ...], *operands: Tensor) -> Array:
        """64 bits for each trial, of all operands in all trials."""
        return self._of_each_trial(name, self._digest(name, *operands))

    def _of_each_trial(self, name: tuple[object, ...], digest: Array) -> Array:
        self.hashed += digest[0].size
        keys = self._key(("hash", *name), self.trials).reshape(-1, *(1,) * (digest.ndim - 1))
        return _mix_bits(digest[np.arange(self.trials) % 2] ^ keys)

    def _digest(self, name: tuple[object, ...], *operands: Tensor) -> Array:
        """Two independent 64-bit digests of the operands in all trials: [2, *mesh axes, *dims]."""
        digest: Array | None = None
        for place, operand in enumerate(operands):
            weights = self._key(("digest", place, *name), 2 * self.trials).reshape(2, self.trials)
            array = operand.array
            if len(array) != self.trials:
                array = np.broadcast_to(array, (self.trials, *array.shape[1:]))
            part = np.einsum("dt,t...->d...", weights, array)
            digest = part if digest is None else digest + part
        assert digest is not None, "verify: a function has operands"
        return _mix_bits(digest)

    def _key(self, name: tuple[object, ...], count: int) -> Array:
        """Words that depend on seed and name only."""
        if name not in self._keys:
            self._keys[name] = random_words((self.seed, *name), (count,))
        return self._keys[name]


def random_words(key: tuple[object, ...], shape: tuple[int, ...]) -> Array:
    """Words of 64 random bits that depend on the key only: a hash, since importing numpy.random
    takes long.
    """
    return np.frombuffer(shake_256(repr(key).encode()).digest(8 * prod(shape)), Word).reshape(shape)


def _mod_p(x: Array) -> Array:
    """x mod P; numpy divides by a constant several times as fast as it takes a remainder."""
    whole = x // _MODULUS
    whole *= _MODULUS
    return np.subtract(x, whole, out=whole)


def _matmul_mod_p(left: Array, right: Array) -> Array:
    """The product of matrices modulo P."""
    count = left.shape[-1]
    if count <= FEW:
        starts = range(0, count, EXACT)
        parts = [_mod_p(left[..., i : i + EXACT] @ right[..., i : i + EXACT, :]) for i in starts]
        if len(parts) == 1:
            return parts[0]
        return _mod_p(sum(parts[1:], parts[0]))
    # in halves of 16 bits: 2^16 products of 47 bits fit 64
    high = _mod_p((left >> _HALF) @ right)
    low = _mod_p((left & _LOW) @ right)
    return _mod_p((high << _HALF) + low)


def _mix_bits(x: Array) -> Array:
    """A bijection of 64-bit words that makes every bit depend on every bit (Steele et al. 2014,
    splitmix64).
    """
    x = x ^ (x >> Word(30))
    x *= Word(0xBF58476D1CE4E5B9)
    x ^= x >> Word(27)
    x *= Word(0x94D049BB133111EB)
    x ^= x >> Word(31)
    return x


@cache
def _powers() -> tuple[Array, Array]:
    """w^i and w^(i · 2^WINDOW) for all i of WINDOW bits; w = 4 generates the squares, whose
    number is prime.
    """
    return _table(4), _table(pow(4, 1 << WINDOW, P))


def _table(base: int) -> Array:
    table = np.ones(1, Word)
    for bit in range(WINDOW):
        table = np.concatenate([table, table * Word(pow(base, 1 << bit, P)) % P])
    return table

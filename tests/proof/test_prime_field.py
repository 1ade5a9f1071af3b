"""The field's arithmetic against Python's own integers, and what its functions must be for the
argument to hold.

Purpose: sums, products, inverses and exponents are exact; hashes give the same for the same and
tell the rest apart.  Non-goals: what is computed with it (`test_meanings`), the bound as stated by
a proof (`test_proof`).
"""

from collections.abc import Sequence
from math import isqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalec.compiler.proof.prime_field import Field, P, Q, Word
from scalec.compiler.proof.tensors import RANDOM, Array, Degree, Tensor

RESIDUES = st.sampled_from([0, 1, 2, 0xFFFF, 0x10000, 0x7FFEFFFF, P - 2, P - 1]) | st.integers(
    0, P - 1
)
FEW = settings(max_examples=50)

MOST = 2**17
"""How many products of two residues may be summed: halves of 16 bits times 31 bits leave 17 of
64.
"""


def field(trials: int = 1, seed: int = 0) -> Field:
    """On a single rank."""
    return Field(trials, 0, seed)


def vector(values: Sequence[int]) -> Tensor:
    """The same numbers in every trial."""
    return Tensor(("i",), np.array([values], Word), RANDOM)


def numbers(x: Tensor) -> list[int]:
    """Those of the first trial."""
    return [int(value) for value in x.array[0].reshape(-1)]


def table(rows: int, columns: int) -> st.SearchStrategy[list[list[int]]]:
    row = st.lists(RESIDUES, min_size=columns, max_size=columns)
    return st.lists(row, min_size=rows, max_size=rows)


def is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, isqrt(n) + 1))


# ---- arithmetic


def test_the_modulus_is_a_safe_prime_of_31_bits() -> None:
    assert P == 2 * Q + 1
    assert is_prime(P)
    assert is_prime(Q)
    assert 2**30 < P < 2**31


@FEW
@given(st.lists(st.tuples(RESIDUES, RESIDUES, RESIDUES), min_size=1, max_size=8))
def test_elementwise_arithmetic_is_that_of_integers(triples: list[tuple[int, int, int]]) -> None:
    n, (a, b, c) = field(), zip(*triples, strict=True)
    x, y, z = vector(a), vector(b), vector(c)
    assert numbers(n.product(("i",), x, y, z)) == [p * q * r % P for p, q, r in triples]
    assert numbers(n.total(("i",), x, y, z)) == [(p + q + r) % P for p, q, r in triples]
    assert numbers(n.negative(x)) == [-p % P for p in a]
    assert numbers(n.inverse(x)) == [pow(p, -1, P) if p else 0 for p in a]
    assert numbers(n.product((), x)) == [sum(a) % P]


@FEW
@given(table(3, 4), table(2, 4), st.lists(RESIDUES, min_size=4, max_size=4))
def test_products_of_named_dims_are_sums_of_products(
    a: list[list[int]], b: list[list[int]], c: list[int]
) -> None:
    n = field()
    x, y = (
        Tensor(("i", "k"), np.array([a], Word), RANDOM),
        Tensor(("j", "k"), np.array([b], Word), RANDOM),
    )
    found = n.product(("j", "i"), x, y, Tensor(("k",), np.array([c], Word), RANDOM))
    expected = [
        [sum(p * q * r for p, q, r in zip(row, other, c, strict=True)) % P for row in a]
        for other in b
    ]
    assert found.array[0].tolist() == expected
    assert found.degree == n.degree == Degree(3)


@pytest.mark.parametrize("count", [1, 4, 5, 8, 32, 33, 36])
def test_products_of_matrices_are_those_of_integers(count: int) -> None:
    """Largest numbers, in stacks of matrices; the sum is over two dims, and over one that a
    factor alone has.
    """
    n, stacks, rows, columns = field(), 2, 3, 2
    x = np.full((1, stacks, rows, count, 2, 2), P - 1, Word)
    y = np.full((1, 2, columns, stacks, count), P - 1, Word)
    x[0, 1, 2, 0], y[0, 1, 1, 0] = 5, 7
    left, right = (
        Tensor(("s", "i", "k", "l", "alone"), x, RANDOM),
        Tensor(("l", "j", "s", "k"), y, RANDOM),
    )
    found = n.product(("j", "s", "i"), left, right)
    for j, s, i in np.ndindex(columns, stacks, rows):
        terms = (
            (x[0, s, i, k, m, alone], y[0, m, j, s, k]) for k, m, alone in np.ndindex(count, 2, 2)
        )
        assert int(found.array[0, j, s, i]) == sum(int(p) * int(q) for p, q in terms) % P


def test_a_dim_of_size_one_is_as_long_as_the_other_factors() -> None:
    n = field()
    x, y = (
        Tensor(("i", "k"), np.array([[[2], [3]]], Word)),
        Tensor(("k",), np.array([[5, 6, 7]], Word)),
    )
    assert numbers(n.product(("i",), x, y)) == [2 * 18, 3 * 18]
    assert numbers(n.product(("i",), y, x)) == [2 * 18, 3 * 18]


def test_factors_whose_dims_have_other_sizes_have_no_product() -> None:
    """As many products would be summed, but of other elements."""
    x, y = (Tensor(("k", "l"), np.ones((1, *shape), Word)) for shape in ((2, 3), (3, 2)))
    with pytest.raises(ValueError, match="broadcast"):
        field().product((), x, y)


@FEW
@given(st.integers(-(2**40), 2**40), st.integers(1, 2**30))
def test_integers_and_fractions(above: int, below: int) -> None:
    n = field()
    assert numbers(n.constant(np.array([above]))) == [above % P]
    assert int(n.ratio(above, below).array[0]) * below % P == above % P


@pytest.mark.parametrize("x", [P - 1, 0x7FFEFFFF], ids=["largest", "largest low half"])
def test_the_largest_contraction_does_not_overflow(x: int) -> None:
    """At 2^17 terms in the worst case; one more low half of 16 ones would pass 2^64."""
    n = field()
    found = n.product((), vector([x] * MOST), vector([P - 1] * MOST))
    assert numbers(found) == [MOST * x * (P - 1) % P]
    assert MOST * 0xFFFF * (P - 1) < 2**64


def test_sums_of_many_residues_do_not_overflow() -> None:
    n = field()
    assert numbers(n.product((), vector([P - 1] * MOST))) == [MOST * (P - 1) % P]


# ---- exponents


@FEW
@given(st.tuples(RESIDUES, RESIDUES, RESIDUES))
def test_exponents_add(xyz: tuple[int, int, int]) -> None:
    n, (x, y, z) = field(), (vector([value]) for value in xyz)
    there = n.product(("i",), n.exponential(x, y), n.exponential(y, z))
    assert numbers(there) == numbers(n.exponential(x, z))
    assert numbers(n.product(("i",), n.exponential(x, y), n.exponential(y))) == numbers(
        n.exponential(x)
    )
    assert numbers(n.exponential(x, x)) == [1]


def test_exponentials_are_squares_of_the_full_order() -> None:
    """Powers of 4, whose order is Q; different arguments have different powers, none of them 1
    or 0.
    """
    n = field()
    found = numbers(n.exponential(vector(range(1000))))
    assert all(pow(value, Q, P) == 1 for value in found)
    assert len({*found, 0, 1}) == 1002
    assert pow(4, Q, P) == 1 != 4


# ---- hashes


COUNT = 100_000


def hashed(n: Field, what: str, values: Array) -> Array:
    """A function of every number: [trials, numbers]."""
    x = Tensor(("i",), values, RANDOM)
    return (n.exponential(x) if what == "exp" else n.function(what, x)).array


@pytest.mark.parametrize("what", ["silu", "exp"])
@pytest.mark.parametrize("spread", [1, 2**14], ids=["neighbours", "far apart"])
def test_different_arguments_collide_nowhere(what: str, spread: int) -> None:
    """Each argument differs from every other in all trials alike, by little or in high bits
    only.
    """
    found = hashed(field(4), what, (np.arange(COUNT, dtype=Word) * Word(spread) % Word(P))[None])
    assert len(np.unique(found, axis=1).T) == COUNT
    assert len(np.unique(found[:2], axis=1).T) == COUNT


@pytest.mark.parametrize("what", ["silu", "exp"])
def test_hashes_are_uniform(what: str) -> None:
    """A chi-square over 64 classes in each trial, of arguments in a row: within five deviations
    of its mean.
    """
    for row in hashed(field(3), what, np.arange(COUNT, dtype=Word)[None]):
        counts = np.bincount((row * Word(64) // Word(P)).astype(int), minlength=64)
        chi = ((counts - COUNT / 64) ** 2 / (COUNT / 64)).sum()
        assert abs(chi - 63) < 5 * (2 * 63) ** 0.5


@pytest.mark.parametrize("what", ["silu", "exp"])
def test_trials_are_hashed_together(what: str) -> None:
    """Arguments that are equal in all trials but one have other values in all trials: none
    agrees by itself.
    """
    n, x = field(4), np.arange(4 * 1000, dtype=Word).reshape(4, 1000)
    other = x.copy()
    other[2] += Word(1)
    assert (hashed(n, what, x) != hashed(n, what, other)).all()
    assert (hashed(n, what, x)[0] != hashed(n, what, x)[1]).all()


def test_the_same_arguments_give_the_same_wherever_they_stand() -> None:
    n, x = field(3), np.arange(3 * 6, dtype=Word).reshape(3, 6)
    flat = n.function("silu", Tensor(("i",), x, RANDOM)).array
    square = n.function("silu", Tensor(("j", "i"), x.reshape(3, 2, 3), RANDOM)).array
    assert (flat == square.reshape(3, 6)).all()
    assert (flat[:, ::-1] == n.function("silu", Tensor(("i",), x[:, ::-1], RANDOM)).array).all()
    once = np.full((1, 6), 7, Word)  # the same in every trial, written once or thrice
    assert (hashed(n, "silu", once) == hashed(n, "silu", np.broadcast_to(once, (3, 6)))).all()


def test_functions_differ_by_name_constants_order_and_seed() -> None:
    n, x, y = field(2), vector(range(100)), vector(range(100, 200))
    found = [
        n.function("silu", x),
        n.function("log", x),
        n.function("silu", y),
        n.function("clip", x, constants=(1.0,)),
        n.function("clip", x, constants=(2.0,)),
        n.function("update", x, y),
        n.function("update", y, x),
        field(2, seed=1).function("silu", x),
        *n.angles(np.arange(10)[None], 10, 1e4, ()),
        *n.angles(np.arange(10)[None], 10, 5e5, ()),
    ]
    rows = {tuple(row.reshape(-1).tolist()) for each in found for row in each.array}
    assert len(rows) == 2 * len(found)


def test_ranks_are_a_total_order_of_each_trial() -> None:
    """The same keys for the same numbers wherever they stand, no two numbers of one key, and 0
    not always the least.
    """
    n, x = field(3), np.arange(COUNT, dtype=Word)[None]
    keys = n.rank(Tensor(("i",), x, RANDOM))
    assert keys.shape == (3, COUNT)
    assert all(len(np.unique(row)) == COUNT for row in keys)
    assert (n.rank(Tensor(("i",), x[:, ::-1], RANDOM)) == keys[:, ::-1]).all()
    assert len({tuple(np.argsort(row[:20])) for row in keys}) == 3
    assert len({tuple(row[1:20] > row[0]) for row in keys}) == 3


# ---- what the bound rests on


def polynomial(n: Field, t: int) -> Tensor:
    """Ring operations on arguments that are linear in t."""
    line = [
        Tensor(("i",), (n.random((3,), f"a{i}") + n.random((3,), f"b{i}") * Word(t)) % P, RANDOM)
        for i in range(3)
    ]
    x = n.product(("i",), *line)
    y = n.total(("i",), x, n.negative(n.product(("i",), line[0], line[1])))
    return n.product((), y, x, n.ratio(1, 3))


def test_degrees_are_bounds() -> None:
    """In one variable of which all arguments are linear functions, the differences of that
    order vanish.
    """
    degree = polynomial(field(), 0).degree.all
    values = [int(polynomial(field(), t).array[0]) for t in range(degree + 2)]
    orders = [values]
    for _ in range(degree + 1):
        orders.append([(b - a) % P for a, b in zip(orders[-1], orders[-1][1:], strict=False)])
    assert degree == 6
    assert orders[-1] == [0]
    assert orders[-2][0] != 0


def test_what_the_bound_counts() -> None:
    n, x = field(2), vector(range(1, 6))
    n.inverse(n.product(("i",), x, x))
    assert (n.degree, n.inverted) == (Degree(2), 10)
    assert n.product(("i",), x, n.inverse(x)).degree == Degree(2, 1)
    n.inverted = 10
    n.inverse(n.inverse(x))  # of which the bound knows nothing
    assert n.degree.all > P
    n.function("silu", x)
    assert n.exponential(x, x).degree == Degree(2)  # with one exponent that is negative
    assert n.hashed == 15

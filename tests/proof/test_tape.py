"""Gradients by a tape: each operation of the arithmetic against autograd, and what a tape does with
several results, leaves and parts.  And saved results, which must be what the operands make.

Non-goals: the gradients of ops (`test_semantics`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from helpers.empty_programs import frame
from scalec.compiler.ir import Op, Type, Value
from scalec.compiler.ir.placements import dual_type
from scalec.compiler.proof.layout import (
    append_dim,
    join_last_dim,
    permute_positions,
    rename_dims,
    split_last_dim,
    take_slice,
)
from scalec.compiler.proof.prime_field import Field
from scalec.compiler.proof.semantics import MEANINGS, Call
from scalec.compiler.proof.simulated_mesh import SimulatedMesh
from scalec.compiler.proof.tape import Tape
from scalec.compiler.proof.tensors import Numbers, Tensor
from scalec.testing.float64 import Reals

SIZES = {"a": 3, "b": 4, "c": 2}

Formula = Callable[..., Any]
ORDER = np.array([2, 0, 3, 1])
SEEN = np.array([[1, 0, 1, 1], [1, 1, 1, 1], [0, 0, 1, 0]])


def seen_softmax(n: Numbers, x: Tensor) -> Tensor:
    return n.softmax(x, Tensor(("a", "b"), SEEN[None].astype(float)))


def split_and_swap(n: Numbers, x: Tensor) -> Tensor:
    first, last = split_last_dim(n, x, [1, 3], ("first", "last"))
    return join_last_dim(n, [last, first], ("a", "b"))


CASES: dict[str, tuple[str, Formula, Formula]] = {
    "product": ("ab b", lambda n, x, y: n.product(("a",), x, y), lambda x, y: x @ y),
    "outer product": (
        "a b",
        lambda n, x, y: n.product(("b", "a"), x, y),
        lambda x, y: (x[:, None] * y).T,
    ),
    "product with itself": ("ab", lambda n, x: n.product((), x, x, x), lambda x: (x**3).sum()),
    "sum by a product": ("ab", lambda n, x: n.product(("b",), x), lambda x: x.sum(0)),
    "sum of a factor": ("a b", lambda n, x, y: n.product(("b",), x, y), lambda x, y: x.sum() * y),
    "total": ("ab b", lambda n, x, y: n.total(("a", "b"), x, y, x), lambda x, y: 2 * x + y),
    "negative": ("a", lambda n, x: n.negative(x), lambda x: -x),
    "inverse": ("a", lambda n, x: n.inverse(x), lambda x: 1 / x),
    "silu": ("a", lambda n, x: n.function("silu", x), torch.nn.functional.silu),
    "softcap": (
        "a",
        lambda n, x: n.function("softcap", x, constants=(2.0,)),
        lambda x: 2 * torch.tanh(x / 2),
    ),
    "log": ("a", lambda n, x: n.function("log", n.product(("a",), x, x)), lambda x: (x * x).log()),
    "reciprocal": ("a", lambda n, x: n.function("reciprocal", x), lambda x: 1 / x),
    "exponential": ("ab", lambda n, x: n.exponential(x), torch.exp),
    "exponential less": (
        "ab a",
        lambda n, x, y: n.exponential(x, y),
        lambda x, y: torch.exp(x - y[:, None]),
    ),
    "softmax": ("ab", lambda n, x: n.softmax(x), lambda x: x.softmax(-1)),
    "softmax of what is seen": (
        "ab",
        seen_softmax,
        lambda x: x.masked_fill(torch.from_numpy(SEEN) == 0, -torch.inf).softmax(-1),
    ),
    "renamed": ("ab", lambda n, x: rename_dims(n, x, ("b", "a")), lambda x: x),
    "longer": ("ab", lambda n, x: append_dim(n, x, "c"), lambda x: x[..., None]),
    "split and joined": ("ab", split_and_swap, lambda x: torch.cat([x[:, 1:], x[:, :1]], -1)),
    "joined with one alike": (
        "ab c",
        lambda n, x, y: join_last_dim(n, [x, y], ("a", "d")),
        lambda x, y: torch.cat([x, y.expand(3, 2)], -1),
    ),
    "permuted": (
        "ab",
        lambda n, x: permute_positions(n, x, "b", ORDER),
        lambda x: x[:, torch.from_numpy(ORDER)],
    ),
    "a slice": ("ab", lambda n, x: take_slice(n, x, 1), lambda x: x[1]),
}
"""The dims of operands, an operation, and the same in torch."""


def draw(words: str) -> list[Tensor]:
    rng = np.random.default_rng(0)
    shapes = [tuple(SIZES[dim] for dim in word) for word in words.split()]
    return [
        Tensor(tuple(word), rng.normal(size=(1, *shape)))
        for word, shape in zip(words.split(), shapes, strict=True)
    ]


@pytest.mark.parametrize("name", CASES)
def test_each_operation_has_the_gradient_of_autograd(name: str) -> None:
    words, formula, definition = CASES[name]
    operands = draw(words)
    tape = Tape(Reals(0))
    leaves = [tape.make_leaf(x) for x in operands]
    result = formula(tape, *leaves)
    grad = Tensor(result.dims, np.random.default_rng(1).normal(size=result.array.shape))
    found = tape.gradients([(result, grad)], leaves)
    inputs = [torch.from_numpy(x.array[0]).requires_grad_(True) for x in operands]
    expected = torch.autograd.grad(definition(*inputs), inputs, torch.as_tensor(grad.array[0]))
    for gradient, operand, due in zip(found, operands, expected, strict=True):
        assert gradient
        assert gradient.dims == operand.dims
        np.testing.assert_allclose(gradient.array[0], due.numpy(), rtol=1e-12, atol=1e-12)


def test_a_tape_computes_as_its_arithmetic_does() -> None:
    x, y = draw("ab b")
    for n in (Reals(0), Tape(Reals(0))):
        total = n.total(("a", "b"), n.exponential(x), y)
        assert n.product((), total).array == pytest.approx(
            np.exp(x.array).sum() + 3 * y.array.sum()
        )


def test_gradients_of_several_results_add_up_and_unused_leaves_have_none() -> None:
    x, y, z = draw("a a a")
    tape = Tape(Reals(0))
    x, y, z = (tape.make_leaf(each) for each in (x, y, z))
    first, second = tape.product(("a",), x, y), tape.negative(x)
    ones = Tensor(("a",), np.ones((1, 3)))
    dx, dy, dz = tape.gradients([(first, ones), (second, ones), (x, ones)], [x, y, z])
    assert dx
    assert dy
    np.testing.assert_allclose(dx.array, y.array)  # y - 1 + 1
    np.testing.assert_allclose(dy.array, x.array)
    assert dz is None


def test_one_tensor_may_be_two_leaves() -> None:
    (x,) = draw("a")
    tape = Tape(Reals(0))
    left, right = tape.make_leaf(x), tape.make_leaf(x)
    result = tape.product((), left, right, right)
    dleft, dright = tape.gradients([(result, Tensor((), np.ones(1)))], [left, right])
    assert dleft
    assert dright
    np.testing.assert_allclose(dleft.array, x.array**2)
    np.testing.assert_allclose(dright.array, 2 * x.array**2)


def test_what_is_made_of_no_leaf_is_not_known() -> None:
    x, y = draw("a a")
    tape = Tape(Reals(0))
    leaf = tape.make_leaf(x)
    assert tape.knows(tape.negative(leaf))
    assert not tape.knows(tape.negative(y))
    assert not tape.knows(x)


# ---- saved results

DIMS = ("batch", "seq", "heads", "head_dim")
QUERIES = Type("f64", DIMS)


def attention_gradients(n: Numbers, change: Callable[[Any], Any]) -> Sequence[Tensor]:
    """The gradients of attention on two ranks, with its saved result changed."""
    program = frame({"tp": 2}, dict(zip(DIMS, (2, 3, 2, 2), strict=True)))
    types, names = [QUERIES] * 3, ("q", "k", "v")
    drawn = n.random((6, 2, 2, 3, 2, 2), "operands")  # another value on each rank
    q, k, v, grad = (Tensor(DIMS, drawn[:, i]) for i in range(4))
    forward = Op(
        "attention", names, (Value("o", QUERIES),), (("mask", "causal"),), span=program.region.span
    )
    world = SimulatedMesh.of_program(program)
    call = Call(program, world, n, forward, [q, k, v], types)
    (result,) = MEANINGS["attention"].value(call)
    saved = Tensor(DIMS, change(result.array.copy()), result.degree)
    attrs = (("of", "attention"), ("wrt", names), ("mask", "causal"))
    outputs = tuple(Value(f"d_{name}", dual_type(QUERIES)) for name in names)
    vjp = Op("vjp", ("dy", *names, "o"), outputs, attrs, span=program.region.span)
    call = evolve(call, op=vjp, args=[grad, q, k, v, saved], types=[QUERIES] * 5)
    return MEANINGS["vjp"].value(call)


def _another_element(array: Any) -> Any:
    array[:, 0, 0, 0, 0, 0] += 1
    return array


CHANGES: dict[str, Callable[[Any], Any]] = {
    "one element": _another_element,
    "positions exchanged": lambda array: np.flip(array, axis=3),
    "ranks exchanged": lambda array: np.flip(array, axis=1),
    "zero": np.zeros_like,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_wrong_saved_result_changes_every_element_of_every_gradient(name: str) -> None:
    """On the rank where it is wrong; so no later sum of gradients can hide it."""
    right = attention_gradients(Field(2, 1), lambda array: array)
    wrong = attention_gradients(Field(2, 1), CHANGES[name])
    for due, gradient in zip(right, wrong, strict=True):
        assert (gradient.array[:, 0] != due.array[:, 0]).all()


@pytest.mark.parametrize("name", CHANGES)
def test_differences_do_not_cancel_over_ranks_and_elements(name: str) -> None:
    right = attention_gradients(Field(2, 1), lambda array: array)
    wrong = attention_gradients(Field(2, 1), CHANGES[name])
    n = Field(2, 1)
    for due, gradient in zip(right, wrong, strict=True):
        sums = (
            n.total((), *(n.product((), Tensor(DIMS, x.array[:, rank])) for rank in range(2)))
            for x in (due, gradient)
        )
        first, second = (x.array for x in sums)
        assert (first != second).all()

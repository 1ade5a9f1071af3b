"""`vjp`: what it takes and gives, of any op, and what is refused; its values are those of
`test_semantics.py`.
"""

import re

import pytest

from helpers.empty_programs import frame
from scalec.compiler.ir import PARTIAL, REPLICATED, Attr, Op, Placement, Type, Value, sharded
from scalec.compiler.ir.placements import dual_type
from scalec.compiler.ops import OPS, VJPS, TypingError

PROGRAM = frame({"a": 2}, {"batch": 4, "seq": 6, "hidden": 8, "vocab": 6})
PART, WHOLE = sharded("seq"), REPLICATED


def type_(dims: str, place: Placement, dtype: str = "f64") -> Type:
    return Type(dtype, tuple(dims.split()), PROGRAM.places({"a": place}))


X, W, TOKENS = (
    type_("batch seq hidden", PART),
    type_("hidden", WHOLE),
    type_("batch seq", PART, "i64"),
)
DY, DW = X, type_("hidden", PARTIAL)


def vjp(
    of: str, wrt: str, *types: Type, like: tuple[Type, ...] = (), **attrs: Attr
) -> tuple[Op, list[Type]]:
    """The op, whose results should have the types of gradients of `like`, and the types that it
    has.
    """
    due = tuple(Value(f"d{i}", dual_type(type)) for i, type in enumerate(like))
    given: dict[str, Attr] = {"of": of, "wrt": tuple(wrt.split()), **attrs}
    op = Op(
        "vjp",
        tuple(f"x{i}" for i in range(len(types))),
        due,
        tuple(given.items()),
        span=PROGRAM.region.span,
    )
    return op, [*OPS["vjp"].infer(PROGRAM, types, op)]


def test_gradients_have_the_dual_types_of_operands() -> None:
    assert vjp("rmsnorm", "x", DY, X, W, like=(X,), eps=0.1)[1] == [X]
    assert vjp("layernorm", "weight bias", DY, X, W, like=(W, W), eps=0.1)[1] == [DW, DW]
    assert vjp("relu", "x", DY, X, like=(X,))[1] == [X]


def test_what_gradients_are_not_made_of_is_not_read() -> None:
    """The types of such operands are those of their gradients."""
    assert vjp("mean", "x", type_("batch seq", PART), like=(X,), over=("hidden",))[1] == [X]
    assert vjp("softmax", "x", DY, X, like=(X,), over=("hidden",))[1] == [X]
    assert vjp("silu_mul", "x y", DY, X, X, like=(X, X))[1] == [X, X]


def test_of_what_op_it_is_and_of_which_types() -> None:
    op, _ = vjp("rmsnorm", "weight", DY, X, W, like=(W,), eps=0.1)
    forward, types = VJPS.forward(op, [DY, X, W])
    assert (forward.kind, forward.attrs, types) == ("rmsnorm", (("eps", 0.1),), (X, W))
    assert VJPS.forward(forward, types) == (forward, types)


TABLE = type_("vocab hidden", WHOLE)
DELAYED = {
    "the table of an embedding": ("embedding", "table", (DY, TOKENS, TABLE), TABLE, {}),
    "the weight of a norm": ("rmsnorm", "weight", (DY, X, W), W, {"eps": 0.1}),
    "the input of a norm": ("rmsnorm", "x", (DY, X, W), X, {"eps": 0.1}),
}


@pytest.mark.parametrize("what", DELAYED)
def test_gradients_that_the_runtime_may_put_off(what: str) -> None:
    of, wrt, types, like, attrs = DELAYED[what]
    op, _ = vjp(of, wrt, *types, like=(like,), **attrs)
    assert VJPS.may_delay(op) == ("embedding" in what)


REFUSED: dict[str, tuple[str, str, tuple[Type, ...], dict[str, Attr], str]] = {
    "an op that nobody knows": ("norm", "x", (DY, X), {}, "norm is no op that has a vjp"),
    "an op without gradients": (
        "max_logit",
        "logits",
        (DY, X),
        {},
        "max_logit is no op that has a vjp",
    ),
    "an op that has an adjoint": ("add", "x", (DY, X), {}, "add is no op that has a vjp"),
    "an operand that it lacks": ("silu", "y", (DY, X), {}, "silu has no operand y"),
    "an operand behind the last": ("silu", "x.1", (DY, X), {}, "no operands of the vjp of silu"),
    "an operand without a gradient": (
        "embedding",
        "tokens",
        (DY, TOKENS, TABLE),
        {},
        "no gradient of embedding's",
    ),
    "an operand too few": (
        "rmsnorm",
        "x",
        (DY, X),
        {"eps": 0.1},
        "no operands of the vjp of rmsnorm",
    ),
    "an operand too many": ("silu", "x", (DY, X, X), {}, "no operands of the vjp of silu"),
    "no operand at all": ("silu", "x", (), {}, "vjp takes 1 operands, not 0"),
    "the gradient of another placement": (
        "silu",
        "x",
        (type_("batch seq hidden", WHOLE), X),
        {},
        "the vjp of silu takes f64[batch, seq@a, hidden], f64[batch, seq@a, hidden], not"
        " f64[batch, seq, hidden]{a: R}",
    ),
    "more gradients than results": (
        "silu",
        "x",
        (DY, DY, X),
        {"grads": 2},
        "the vjp of silu takes",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what: str) -> None:
    of, wrt, types, attrs, words = REFUSED[what]
    with pytest.raises(TypingError, match=re.escape(words)):
        vjp(of, wrt, *types, like=(X,), **attrs)

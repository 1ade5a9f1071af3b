"""Typing rules of losses in parts: which operands their ops take, and what else is refused, in
words.
"""

import re

import pytest

from helpers.empty_programs import frame
from scalec.compiler.ir import (
    INVARIANT,
    MAXIMUM,
    PARTIAL,
    REPLICATED,
    Attr,
    Op,
    Placement,
    Type,
    Value,
    sharded,
)
from scalec.compiler.ops import OPS, TypingError

PROGRAM = frame({"a": 2}, {"batch": 4, "hidden": 6, "vocab": 8, "share": 2, "ffn": 8})
SHARE: dict[str, Attr] = {"as": "share"}
INNER: dict[str, Attr] = {"inner": ("hidden",)}
OF_CLASSES, OF_TOKENS = sharded("vocab"), sharded("batch")


def type_(dims: str, place: Placement = INVARIANT, dtype: str = "f64") -> Type:
    return Type(dtype, tuple(dims.split()), PROGRAM.places({"a": place}))


X, W = type_("batch hidden", REPLICATED), type_("vocab hidden", OF_CLASSES)
LABELS, BIAS, LOGITS = (
    type_("batch", dtype="i64"),
    type_("vocab", OF_CLASSES),
    type_("batch vocab", OF_CLASSES),
)
M, Z, T = type_("batch", MAXIMUM), type_("batch share", sharded("share")), type_("batch", PARTIAL)
DZ, DT = Z, type_("batch", REPLICATED)


OF: dict[str, Attr] = {"of": "linear_softmax_stats", "grads": 2}
"""What a `vjp` says."""


def infer(kind: str, *types: Type, **attrs: Attr) -> list[Type]:
    results = (Value("y", type_("")),)
    return [
        *OPS[kind].infer(
            PROGRAM, types, Op(kind, (), results, tuple(attrs.items()), span=PROGRAM.region.span)
        )
    ]


def test_parts_of_a_product_are_those_of_its_logits() -> None:
    assert infer("logit_softmax_stats", LOGITS, LABELS, **SHARE) == [M, Z, T]
    assert infer("linear_softmax_stats", X, W, LABELS, **INNER, **SHARE) == [M, Z, T]
    assert infer("linear_softmax_stats", X, W, LABELS, BIAS, **INNER, **SHARE) == [M, Z, T]


def test_gradients_lie_as_those_of_the_ops_that_are_one() -> None:
    """They are made of those of z and t, the operands and m."""
    of_logits = OF | {"of": "logit_softmax_stats", "wrt": ("logits",)}
    assert infer("vjp", DZ, DT, LOGITS, LABELS, M, **of_logits, **SHARE) == [LOGITS]
    for operands in ((X, W, LABELS), (X, W, LABELS, BIAS)):
        gradients = [
            infer("vjp", DZ, DT, *operands, M, **OF, wrt=(of,), **INNER, **SHARE)
            for of in ("x", "w")
        ]
        assert gradients == [[type_("batch hidden", PARTIAL)], [W]]
    assert infer("vjp", DZ, DT, X, W, LABELS, BIAS, M, **OF, wrt=("bias",), **INNER, **SHARE) == [
        BIAS
    ]


def test_the_gradient_of_a_bias_is_a_sum_over_ranks_tokens() -> None:
    labels, scalar = type_("batch", OF_TOKENS, "i64"), type_("", PARTIAL)
    x, w, bias = (
        type_("batch hidden", OF_TOKENS),
        type_("vocab hidden", REPLICATED),
        type_("vocab", REPLICATED),
    )
    assert infer("linear_cross_entropy", x, w, labels, bias, **INNER) == [scalar]
    head: dict[str, Attr] = {"of": "linear_cross_entropy", "wrt": ("bias",)}
    found = infer("vjp", type_("", REPLICATED), x, w, labels, bias, **head, **INNER)
    assert found == [type_("vocab", PARTIAL)]


def halves(dims: str) -> Type:
    """Of a product whose contracted dim is shared out."""
    return type_(dims, sharded("hidden"))


REFUSED: dict[str, tuple[str, tuple[Type, ...], str]] = {
    "logits that are a sum still to be done": (
        "logit_softmax_stats",
        (type_("batch vocab", PARTIAL), LABELS),
        "is not linear in what is partial",
    ),
    "a product that is one": (
        "linear_softmax_stats",
        (halves("batch hidden"), halves("vocab hidden"), LABELS),
        "is not linear in what is partial",
    ),
    "a product that is one, with a bias": (
        "linear_softmax_stats",
        (halves("batch hidden"), halves("vocab hidden"), LABELS, type_("vocab", REPLICATED)),
        "is not linear in what is partial",
    ),
    "logits that each rank has": (
        "logit_softmax_stats",
        (type_("batch vocab"), LABELS),
        "one share for each rank over which",
    ),
    "labels of all tokens": (
        "logit_softmax_stats",
        (type_("batch vocab", OF_TOKENS), LABELS),
        "takes the labels of the tokens that a rank has",
    ),
    "labels of other tokens": (
        "logit_softmax_stats",
        (LOGITS, type_("", dtype="i64")),
        "takes logits of dims [, classes]",
    ),
    "a bias of all classes": (
        "linear_softmax_stats",
        (X, W, LABELS, type_("vocab", REPLICATED)),
        "needs its operands sharded alike",
    ),
    "a bias of other dims": (
        "linear_softmax_stats",
        (X, W, LABELS, type_("ffn", sharded("ffn"))),
        "takes a bias of [vocab]",
    ),
    "a bias of fewer bits": (
        "linear_softmax_stats",
        (X, W, LABELS, type_("vocab", OF_CLASSES, "bf16")),
        "takes a bias of [vocab]",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_other_operands_are_refused(what: str) -> None:
    kind, types, words = REFUSED[what]
    inner = INNER if kind.startswith("linear") else {}
    with pytest.raises(TypingError, match=re.escape(words)):
        infer(kind, *types, **inner, **SHARE)


def test_a_share_for_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(TypingError, match="one share for each rank over which vocab lies"):
        infer("logit_softmax_stats", LOGITS, LABELS, **{"as": "ffn"})

"""Every op with the generic typing rule: what the rule allows is true on all ranks, forward and
backward.

Purpose: `infer` against the meanings of ops, on all placements on one axis and on drawn ones on
two; adjoints against the gradients that the meanings state.  All in the verifier's field, where
equal means equal.  Non-goals: what the meanings are (`tests/proof/test_semantics.py`); ops of the
step with typing rules of their own.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import product

import numpy as np
import pytest
from attrs import evolve, field, frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.empty_programs import frame
from helpers.field_values import TRIALS, drawn, is_spread, spread
from helpers.unary_ops import UNARY, cases
from scalec.compiler.ir import (
    INVARIANT,
    PARTIAL,
    REPLICATED,
    Attr,
    Op,
    Placement,
    Program,
    Type,
    Value,
    sharded,
)
from scalec.compiler.ir.placements import dual_type
from scalec.compiler.ops import OPS, TypingError
from scalec.compiler.ops import gradients as op_gradients
from scalec.compiler.proof.inputs import everywhere
from scalec.compiler.proof.prime_field import Field
from scalec.compiler.proof.semantics import MEANINGS, Call
from scalec.compiler.proof.simulated_mesh import SimulatedMesh
from scalec.compiler.proof.tape import Tape as GradientTape
from scalec.compiler.proof.tensors import Array, Tensor

DIMS = {
    "batch": 6,
    "seq": 6,
    "hidden": 6,
    "ffn": 6,
    "vocab": 6,
    "heads": 12,
    "kv_heads": 6,
    "head_dim": 6,
}
# each token chooses every expert, in an order of its own
DIMS |= {"experts": 6, "scored": 6, "chosen": 6}
X, TOKENS, SAMPLES, LOGITS = "batch seq hidden", "int batch seq", "int batch", "seq batch vocab"
PARTS = LOGITS, "seq batch", "int seq batch"
Q, K, HD = "batch seq heads head_dim", "batch seq kv_heads head_dim", "heads head_dim"

IDS, ORDER, ROWS = (
    "int batch seq chosen",
    "int experts batch seq chosen",
    "experts batch seq hidden",
)


def _with_experts(program: Program) -> Program:
    return evolve(
        program,
        dims=tuple(evolve(d, chosen="chosen" * (d.name == "experts")) for d in program.dims),
    )


ONE_AXIS, TWO_AXES, NO_AXIS = (
    _with_experts(frame(axes, DIMS)) for axes in ({"a": 2}, {"a": 2, "b": 3}, {})
)


@frozen
class Form:
    """Operands an op takes: dims in words, `int` first for token ids."""

    operands: tuple[str, ...]
    attrs: tuple[tuple[str, Attr], ...] = ()

    @property
    def types(self) -> list[Type]:
        """The operands' types without placements."""
        words = [word.split() for word in self.operands]
        return [
            Type("i64" if "int" in word else "f64", tuple(dim for dim in word if dim != "int"))
            for word in words
        ]


def form(*operands: str, **attrs: Attr) -> Form:
    return Form(operands, tuple(attrs.items()))


OWN: dict[str, Attr] = {"function": "my_ops:own", "gives": (".. hidden",), "constants": ("0.5",)}
BY_ELEMENT = OWN | {
    "takes": (".. hidden",) * 2,
    "along": ("batch", "seq", "hidden"),
    "linear": ("1",),
}
BY_ROW = OWN | {"takes": (".. hidden", "ffn hidden"), "along": ("batch", "seq"), "linear": ("0",)}
TWO = BY_ROW | {"gives": ("..", ".. hidden")}
MIXED = OWN | {"takes": (".. hidden", "seq"), "along": ("batch", "hidden"), "linear": ()}
"""What plans say of a function of the user's own."""

DROPS: dict[str, Attr] = {"dropout": 0.25, "site": 1}
"""Of attention that drops weights."""

NORMS: dict[str, Attr] = {"eps": 0.1}
HEAD: dict[str, Attr] = {"inner": ("hidden",)}
PRODUCT = "seq batch hidden", "vocab hidden", "int seq batch"
TWO_WEIGHTS = ("ffn hidden", "kv_heads head_dim hidden")

FUSED = {
    "add_layernorm": [form(X, X, "hidden", "hidden", **NORMS), form(Q, Q, HD, **NORMS)],
    "add_rmsnorm": [form(X, X, "hidden", **NORMS), form(Q, Q, HD, **NORMS)],
    "contracts": [form(X, *TWO_WEIGHTS, over=("hidden",))],
    "gelu_mul": [form(X, X, approximate="tanh")],
    "linear_cross_entropy": [form(*PRODUCT, **HEAD), form(*PRODUCT, "vocab", **HEAD)],
    "rope_pair": [form(Q, K, theta=100.0)],
    "silu_mul": [form(X, X)],
}
"""Those that do the work of several."""

FORMS = {
    **FUSED,
    "add": [form(X, X, X), form("hidden", X, "seq hidden"), form("", "")],
    "attention": [
        form(Q, K, K, mask="causal"),
        form(*["seq heads head_dim"] * 3, mask="causal"),
        form(Q, K, "batch seq kv_heads ffn", mask="causal"),
        form(Q, K, K, TOKENS, mask="full"),
        form(Q, K, K, SAMPLES, mask="causal", **DROPS),
        form(Q, K, K, TOKENS, SAMPLES, mask="causal", **DROPS),
    ],
    "aux_loss": [form("batch scored", "batch scored", by=0.25, rows=12, sequences=1)],
    "balance": [
        form("batch seq scored", IDS, by=0.25),
        form("seq batch scored", "int seq batch chosen", by=0.25, score="sigmoid"),
    ],
    "call": [
        form(X, X, **BY_ELEMENT),
        form(X, "ffn hidden", **BY_ROW),
        form(X, "seq", **MIXED),
        form(X, "ffn hidden", **TWO),
    ],
    "clip_scale": [form("", max=0.5), form("", max=0.0)],
    "combine": [form(ROWS, "batch seq chosen", ORDER)],
    "concat": [
        form("batch seq head_dim", "batch seq kv_heads", **{"as": "heads"}),
        form("seq batch ffn", "seq batch ffn", **{"as": "heads"}),
        form("batch seq hidden head_dim", "seq kv_heads", **{"as": "heads"}),
    ],
    "contract": [
        form(X, "ffn hidden", over=("hidden",)),
        form("seq batch heads head_dim", "hidden heads head_dim", over=("heads", "head_dim")),
        form("seq batch ffn", X, over=("seq", "batch")),
    ],
    "count_valid": [form(TOKENS)],
    "cross_entropy": [
        form(LOGITS, "int seq batch"),
        form("batch seq vocab", TOKENS),
        form(LOGITS, "int seq batch", smoothing=0.1, z=0.25),
    ],
    "dropout": [
        form(X, SAMPLES, p=0.25, site=1),
        form("seq batch heads head_dim", SAMPLES, p=0.25, site=2),
        form("batch", SAMPLES, p=0.25, site=1),
    ],
    "dispatch": [form(X, ORDER), form("seq batch ffn", "int experts seq batch chosen")],
    "div": [form(X, X), form(X, "hidden"), form("seq hidden", X)],
    "embedding": [form(TOKENS, "vocab hidden"), form("int seq batch", "vocab hidden")],
    "fork": [form(SAMPLES, repeat="hidden")],
    "grad_norm": [form("", "")],
    "grouped_bias": [form(ROWS, "experts hidden", ORDER)],
    "grouped_contract": [
        form(ROWS, "experts ffn hidden", ORDER, over=("hidden",)),
        form("experts batch seq ffn", ROWS, ORDER, over=("batch", "seq")),
    ],
    "exchange": [form(ROWS, ORDER, to=("{}:experts",))],
    "exchange_back": [form(ROWS, ORDER, to=("{}:batch",)), form(ROWS, ORDER, to=("{}:seq",))],
    "exchange_counts": [form(ORDER, to=("{}:experts",))],
    "layernorm": [
        form(X, "hidden", "hidden", eps=0.1),
        form(X, "hidden", eps=0.1),
        form(Q, HD, HD, eps=0.1),
    ],
    "limit_capacity": [
        form(IDS, capacity=0.5, experts="experts"),
        form("int seq batch chosen", capacity=0.25, experts="experts"),
    ],
    "max_logit": [form(LOGITS)],
    "mean": [form(X, over=("batch", "seq")), form(X, over=("hidden",))],
    "mean_square": [form(X, over=("hidden",)), form(Q, over=("heads", "head_dim"))],
    "mul": [form(X, X), form(X, "hidden"), form("seq hidden", X)],
    "no_loss": [form(X)],
    "rmsnorm": [
        form(X, "hidden", eps=0.1),
        form("seq batch heads head_dim", "heads head_dim", eps=0.1),
    ],
    "rms_scaled": [form(X, "hidden", "batch seq", eps=0.1), form(Q, HD, "batch seq", eps=0.1)],
    "rope": [form(Q, theta=100.0), form("seq batch kv_heads head_dim", theta=100.0)],
    "router_z": [form("batch seq scored", by=0.25)],
    "scale": [form(X, by=-0.75)],
    "shift": [form(X, by=-0.75)],
    "local_softmax_stats": [form(*PARTS), form(*PARTS, smoothing=0.1)],
    "sort_by_expert": [form(IDS, to="experts"), form(IDS, to="experts", own=("{}",))],
    "sum_scores": [form("batch seq scored"), form("seq batch scored", score="sigmoid")],
    "split": [form("batch seq heads", parts=("head_dim", "kv_heads"))],
    "sum": [form(X, over=("batch", "seq")), form(X, over=("hidden",))],
    "token_loss": [
        form("seq batch", "seq batch", "int seq batch"),
        form("seq batch", "seq batch", "int seq batch", "seq batch", z_loss=0.25),
    ],
    "top": [
        form("batch seq scored", to="chosen", **how)
        for how in (
            {},
            {"normalise": "on", "scale": 2.5},
            {"score": "sigmoid"},
            {"groups": 3, "from": 2},
        )
    ],
    "unscaled": [form("", "")],
    "unscaled_norm": [form("", "", "")],
    **{name: [form(X, **attrs) for _, attrs in cases(name, X.split())] for name in UNARY},
}
OF_BOTH_AXES = {"attention"}
"""Their axes are not independent: key/value heads lie over the outer of the axes of query heads."""

BACKWARD_ONLY = {"contract 2", "grouped_contract 1"}
"""Forms that only gradients have, and which therefore need none."""

CASES = [
    pytest.param(kind, form, id=f"{kind} {i}")
    for kind, forms in FORMS.items()
    for i, form in enumerate(forms)
]
WITH_ADJOINT = [
    case
    for case in CASES
    if OPS[str(case.values[0])].differentiable and case.id not in BACKWARD_ONLY
]


def test_every_op_with_the_generic_rule_is_here() -> None:
    """And those of several results that are typed one by one."""
    one_by_one = {"contracts", "rope_pair"}
    one_by_one |= {
        "sort_by_expert",
        "limit_capacity",
        "exchange_counts",
        "exchange",
        "exchange_back",
    }
    assert set(FORMS) == {kind for kind, entry in OPS.items() if not entry.typing} | one_by_one


# ---- placements

Choice = tuple[Placement, ...]
"""A placement for each operand on one axis."""


def choices(form: Form) -> Iterator[Choice]:
    """Every way to place the operands on one axis; integers are never partial."""
    of = [
        [
            INVARIANT,
            REPLICATED,
            *map(sharded, type.dims),
            *([] if type.dtype == "i64" else [PARTIAL]),
        ]
        for type in form.types
    ]
    yield from product(*of)


def placed(program: Program, form: Form, on: Sequence[Choice]) -> list[Type]:
    """The operands' types, with one choice for each axis."""
    at = [
        {a.name: choice[i] for a, choice in zip(program.axes, on, strict=True)}
        for i in range(len(form.operands))
    ]
    return [
        evolve(type, places=program.places(places))
        for type, places in zip(form.types, at, strict=True)
    ]


def typed(program: Program, kind: str, form: Form, types: Sequence[Type]) -> Op:
    """The op with its results' types.  Raises TypingError."""
    attrs = tuple((key, _of_each_axis(program, value)) for key, value in form.attrs)
    op = Op(kind, tuple(f"x{i}" for i in range(len(types))), (), attrs, span=program.region.span)
    results = OPS[kind].infer(program, types, op)
    return evolve(op, outputs=tuple(Value(f"y{i}", type) for i, type in enumerate(results)))


def _of_each_axis(program: Program, value: Attr) -> Attr:
    """An attribute that says of each axis what a form says of `{}`."""
    if not isinstance(value, tuple) or not any("{}" in item for item in value):
        return value
    return tuple(item.format(axis.name) for axis in program.axes for item in value)


@cache
def allowed(kind: str, form: Form) -> list[Choice]:
    """The choices that `infer` allows on an axis of size 2."""
    found: list[Choice] = []
    for choice in choices(form):
        with suppress(TypingError):
            typed(ONE_AXIS, kind, form, placed(ONE_AXIS, form, [choice]))
            found.append(choice)
    return found


@st.composite
def pairs(draw: st.DrawFn, kind: str, form: Form) -> list[Choice]:
    """Two choices, each allowed on one axis, and so on both together."""
    on = [draw(st.sampled_from(allowed(kind, form))) for _ in range(2)]
    outer = [any(place == sharded("kv_heads") for place in choice) for choice in on]
    if kind in OF_BOTH_AXES and outer == [False, True]:
        on.reverse()
    return on


# ---- evaluating


@frozen
class Ranks:
    """The ranks of a mesh, and what is evaluated on them."""

    program: Program
    world: SimulatedMesh
    numbers: Field

    @classmethod
    def of(cls, program: Program) -> "Ranks":
        """Those of a program's axes."""
        return cls(program, SimulatedMesh.of_program(program), Field(TRIALS, len(program.axes)))

    def call(self, op: Op, args: Sequence[Tensor], types: Sequence[Type]) -> Call:
        return Call(self.program, self.world, self.numbers, op, args, types)

    def whole(self, type: Type, name: str) -> Tensor:
        """A global operand; some ids are below zero, as labels are."""
        if type.dtype != "i64":
            return drawn(self.world, type.dims, name)
        if "chosen" in type.dims:
            return everywhere(Tensor(type.dims, _chosen(type)), self.world)
        ids = np.random.default_rng(0).integers(
            -2, DIMS["vocab"], (1, *(DIMS[dim] for dim in type.dims))
        )
        return everywhere(Tensor(type.dims, ids), self.world)

    def held(self, types: Sequence[Type], letter: str) -> list[Tensor]:
        """What ranks hold of global values that are called by a letter and their place."""
        named = [(type, f"{letter}{i}") for i, type in enumerate(types)]
        return [
            spread(self.world, self.numbers, self.whole(type, name), type, name)
            for type, name in named
        ]

    def agree(
        self, found: Sequence[Tensor], types: Sequence[Type], wholes: Sequence[Tensor]
    ) -> bool:
        """Whether ranks hold global values, computed on a single one, as `types` say."""
        triples = zip(found, types, wholes, strict=True)
        return all(
            is_spread(self.world, self.numbers, f, t, everywhere(w, self.world))
            for f, t, w in triples
        )


def _chosen(type: Type) -> Array:
    """Of each token the experts in the order of its choices; of an `order`, one where a choice
    is the expert.
    """
    each, *_ = type.dims
    tokens = [DIMS[dim] for dim in type.dims[:-1] if dim != "experts"]
    ids = np.random.default_rng(0).permuted(np.broadcast_to(np.arange(6), (*tokens, 6)), axis=-1)
    order = np.arange(6).reshape(-1, *(1,) * ids.ndim) == ids
    return (order.astype(int) if each == "experts" else ids)[None]


ALONE = Ranks.of(NO_AXIS)


@cache
def results(kind: str, form: Form) -> list[Tensor]:
    """What the op makes of global operands."""
    op = typed(NO_AXIS, kind, form, form.types)
    return MEANINGS[kind].value(ALONE.call(op, ALONE.held(form.types, "x"), form.types))


def is_true(program: Program, kind: str, form: Form, on: Sequence[Choice]) -> bool:
    """Whether the op on each rank's parts gives the parts of the global results."""
    ranks, types = Ranks.of(program), placed(program, form, on)
    op = typed(program, kind, form, types)
    try:
        found = MEANINGS[kind].value(ranks.call(op, ranks.held(types, "x"), types))
    except ValueError:  # numpy's, of shapes that do not fit
        return False
    return ranks.agree(found, [value.type for value in op.outputs], results(kind, form))


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_what_is_allowed_is_true(kind: str, form: Form) -> None:
    wrong = [
        choice for choice in allowed(kind, form) if not is_true(ONE_AXIS, kind, form, [choice])
    ]
    assert [" ".join(map(str, choice)) for choice in wrong] == []


@pytest.mark.sample(57)
@pytest.mark.parametrize(("kind", "form"), CASES)
@settings(max_examples=15)
@given(data=st.data())
def test_what_is_allowed_on_each_of_two_axes_is_true_on_both(
    kind: str, form: Form, data: st.DataObject
) -> None:
    assert is_true(TWO_AXES, kind, form, data.draw(pairs(kind, form)))


@pytest.mark.parametrize("kind", sorted(OF_BOTH_AXES))
def test_key_value_heads_lie_over_the_outer_axes_of_query_heads(kind: str) -> None:
    """Else a rank would hold other heads than its queries use."""
    (form, *_), heads, few = FORMS[kind], sharded("heads"), sharded("kv_heads")
    whole, split = (
        tuple(heads if "kv_heads" not in type.dims else on for type in form.types)
        for on in (REPLICATED, few)
    )
    assert is_true(TWO_AXES, kind, form, [split, whole])
    with pytest.raises(TypingError):
        typed(TWO_AXES, kind, form, placed(TWO_AXES, form, [whole, split]))


# ---- adjoints


@frozen
class Tape:
    """Evaluates what an adjoint writes: the `Builder` of the op protocol."""

    ranks: Ranks
    types: dict[str, Type]
    held: dict[str, Tensor]
    names: Iterator[int] = field(factory=lambda: iter(range(100)))

    def emit(
        self, kind: str, inputs: Sequence[str], like: Sequence[str], **attrs: Attr
    ) -> tuple[str, ...]:
        args, types = [self.held[name] for name in inputs], [self.types[name] for name in inputs]
        due = tuple(Value(name, dual_type(self.types[name])) for name in like)
        op = Op(kind, tuple(inputs), due, tuple(attrs.items()), span=self.ranks.program.region.span)
        made = OPS[kind].infer(self.ranks.program, types, op)
        names = tuple(f"{name} {next(self.names)}" for name in like)
        op = evolve(op, outputs=tuple(map(Value, names, made)))
        self.types.update(zip(names, made, strict=True))
        self.held.update(
            zip(names, MEANINGS[kind].value(self.ranks.call(op, args, types)), strict=True)
        )
        return names

    def save(self, name: str) -> str:
        return name

    def type(self, name: str) -> Type:
        return self.types[name]

    def is_wanted(self, name: str) -> bool:
        return self.types[name].dtype != "i64"

    def maker(self, name: str) -> Op:
        raise AssertionError(f"{name} is an operand")


@cache
def gradients(kind: str, form: Form) -> list[Tensor | None]:
    """What follows from the meaning for the global operands that the vjp, if any, may be wrt."""
    op, vjp = typed(NO_AXIS, kind, form, form.types), OPS[kind].vjp
    call = ALONE.call(op, ALONE.held(form.types, "x"), form.types)
    arithmetic, args = GradientTape(call.numbers), [*call.args]
    wrt = [i for i, type in enumerate(form.types) if type.differentiable]
    if vjp and vjp.wrt:
        wrt = [i for i in wrt if i in vjp.wrt]
    for i in wrt:
        args[i] = arithmetic.make_leaf(args[i])
    results = MEANINGS[kind].value(evolve(call, numbers=arithmetic, args=args))
    pairs = zip(results, ALONE.held([value.type for value in op.outputs], "dy"), strict=True)
    found = dict(zip(wrt, arithmetic.gradients(pairs, [args[i] for i in wrt]), strict=True))
    return [found.get(i) for i in range(len(args))]


def written(ranks: Ranks, op: Op, types: Sequence[Type]) -> list[tuple[Type, Tensor] | None]:
    """What the op's adjoint makes of its operands and the gradients of its results.

    Raises TypingError.
    """
    made = [value.type for value in op.outputs]
    args, duals = ranks.held(types, "x"), [dual_type(type) for type in made]
    outputs = MEANINGS[op.kind].value(ranks.call(op, args, types))
    grads = [f"dy{i}" if type.dtype != "i64" else "" for i, type in enumerate(duals)]
    names = [*op.inputs, *(value.name for value in op.outputs), *grads]
    all_types = dict(zip(names, [*types, *made, *duals], strict=True))
    held = dict(zip(names, [*args, *outputs, *ranks.held(duals, "dy")], strict=True))
    tape = Tape(ranks, all_types, held)
    written = op_gradients(OPS[op.kind], op, grads, tape)
    return [(tape.types[name], tape.held[name]) if name else None for name in written]


def mistake(program: Program, kind: str, form: Form, on: Sequence[Choice]) -> str:
    """What is wrong with the adjoint of an op that is allowed: it has no rule, or gives other
    types or values.
    """
    ranks, types = Ranks.of(program), placed(program, form, on)
    try:
        found = written(ranks, typed(program, kind, form, types), types)
    except TypingError as error:
        return str(error)
    for type, grad, stated in zip(types, found, gradients(kind, form), strict=True):
        if bool(grad) != bool(stated):
            return f"the gradient of {type} is {'' if grad else 'not '}there"
        if grad and grad[0] != dual_type(type):
            return f"the gradient of {type} is {grad[0]}"
        if grad and stated and not ranks.agree([grad[1]], [grad[0]], [stated]):
            return f"the gradient of {type} is wrong"
    return ""


@pytest.mark.parametrize(("kind", "form"), WITH_ADJOINT)
def test_gradients_are_dual_and_equal(kind: str, form: Form) -> None:
    """Wherever the op is allowed, so are the ops of its adjoint, and they give parts of the
    global gradients.
    """
    found = {" ".join(map(str, c)): mistake(ONE_AXIS, kind, form, [c]) for c in allowed(kind, form)}
    assert {choice: what for choice, what in found.items() if what} == {}


@pytest.mark.sample(26)
@pytest.mark.parametrize(("kind", "form"), WITH_ADJOINT)
@settings(max_examples=15)
@given(data=st.data())
def test_gradients_on_two_axes(kind: str, form: Form, data: st.DataObject) -> None:
    assert mistake(TWO_AXES, kind, form, data.draw(pairs(kind, form))) == ""

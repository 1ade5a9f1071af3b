"""Every op with the generic typing rule: what the rule allows is true on all ranks, forward and backward.

Purpose: `infer` against `meanings`, on all placements on one axis and on drawn ones on two; adjoints against the
derivative of the op they belong to.
Non-goals: ops of the step with rules of their own, which `test_steps` runs.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import product

import numpy as np
import pytest
from attrs import evolve, frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from ir.frames import frame
from ir.meanings import MEANINGS
from ir.placing import Array, Held, Mesh
from scalec.compiler.ir import INVARIANT, PARTIAL, REPLICATED, Attr, Op, Placement, Program, Type, Value, sharded
from scalec.compiler.ops import OPS, TypingError
from scalec.compiler.placements import dual_type

DIMS = {"batch": 6, "seq": 6, "hidden": 6, "ffn": 6, "vocab": 6, "heads": 12, "kv_heads": 6, "head_dim": 6}
X, TOKENS, LOGITS = "batch seq hidden", "int batch seq", "seq batch vocab"
Q, K = "batch seq heads head_dim", "batch seq kv_heads head_dim"


ONE_AXIS, TWO_AXES, NO_AXIS = (frame(axes, DIMS) for axes in ({"a": 2}, {"a": 2, "b": 3}, {}))
ALONE = Mesh({}, DIMS)


@frozen
class Form:
    """Operands an op takes: dims in words, `int` first for token ids, `positive` for positive numbers."""

    operands: tuple[str, ...]
    attrs: tuple[tuple[str, Attr], ...] = ()
    exact: bool = False
    """Whether whole numbers give whole numbers."""


def form(*operands: str, exact: bool = False, **attrs: Attr) -> Form:
    return Form(operands, tuple(attrs.items()), exact)


FORMS = {
    "add": [form(X, X, X, exact=True), form("hidden", X, "seq hidden", exact=True), form("", "", exact=True)],
    "attention": [form(Q, K, K, mask="causal"), form(*["seq heads head_dim"] * 3, mask="causal")],
    "attention_dx": [form(Q, Q, K, K, Q, mask="causal")],
    "clip_scale": [form("positive", max=0.5), form("positive", max=0.0)],
    "contract": [
        form(X, "ffn hidden", over=("hidden",), exact=True),
        form("seq batch heads head_dim", "hidden heads head_dim", over=("heads", "head_dim"), exact=True),
        form("seq batch ffn", X, over=("seq", "batch"), exact=True),
    ],
    "count_valid": [form(TOKENS, exact=True)],
    "cross_entropy": [form(LOGITS, "int seq batch"), form("batch seq vocab", TOKENS)],
    "cross_entropy_dx": [form("", LOGITS, "int seq batch")],
    "embedding": [form(TOKENS, "vocab hidden", exact=True), form("int seq batch", "vocab hidden", exact=True)],
    "embedding_dw": [form(X, TOKENS, "vocab hidden", exact=True)],
    "grad_norm": [form("positive", "positive")],
    "max_logit": [form(LOGITS, exact=True)],
    "mul": [form(X, X, exact=True), form(X, "hidden", exact=True), form("seq hidden", X, exact=True)],
    "rmsnorm": [form(X, "hidden", eps=0.1), form("seq batch heads head_dim", "heads head_dim", eps=0.1)],
    "rmsnorm_dw": [form(X, "hidden", X, eps=0.1)],
    "rmsnorm_dx": [form(X, "hidden", X, eps=0.1)],
    "rope": [form(Q, theta=100.0), form("seq batch kv_heads head_dim", theta=100.0)],
    "rope_dx": [form(Q, theta=100.0)],
    "silu": [form(X)],
    "silu_dx": [form(X, X)],
    "softmax_parts": [form(LOGITS, "seq batch", "int seq batch")],
    "softmax_parts_dx": [form("seq batch", "seq batch", LOGITS, "seq batch", "int seq batch")],
    "sum": [form(X, over=("batch", "seq"), exact=True), form(X, over=("hidden",), exact=True)],
    "sum_squares": [form(X, "ffn hidden", exact=True)],
    "token_loss": [form("positive seq batch", "seq batch", "int seq batch")],
    "token_loss_dx": [form("", "positive seq batch", "int seq batch")],
}
BACKWARD_ONLY = {"contract 2"}
"""Forms that only gradients have, and which therefore need none."""

CASES = [pytest.param(kind, form, id=f"{kind} {i}") for kind, forms in FORMS.items() for i, form in enumerate(forms)]
WITH_ADJOINT = [case for case in CASES if OPS[str(case.values[0])].adjoint and case.id not in BACKWARD_ONLY]


def test_every_op_with_the_generic_rule_is_here() -> None:
    assert set(FORMS) == {kind for kind, entry in OPS.items() if not entry.typing}


# ---- drawing


def plain(word: str) -> Type:
    """The type of an operand without placements."""
    dims = tuple(dim for dim in word.split() if dim not in ("int", "positive"))
    return Type("i64" if word.startswith("int") else "f64", dims)


Choice = tuple[Placement, ...]
"""A placement for each operand on one axis."""


def choices(form: Form) -> Iterator[Choice]:
    """Every way to place the operands on one axis; integers are never partial."""
    operands = [plain(word) for word in form.operands]
    common = [INVARIANT, REPLICATED]
    of = [[*common, *map(sharded, t.dims), *([] if t.dtype == "i64" else [PARTIAL])] for t in operands]
    yield from product(*of)


def placed(program: Program, form: Form, on: Sequence[Choice]) -> list[Type]:
    """The operands' types, with one choice for each axis."""
    operands = [plain(word) for word in form.operands]
    at = [{a.name: choice[i] for a, choice in zip(program.axes, on, strict=True)} for i in range(len(operands))]
    return [evolve(t, places=program.places(places)) for t, places in zip(operands, at, strict=True)]


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
    """Two choices, each allowed on one axis."""
    return [draw(st.sampled_from(allowed(kind, form))) for _ in range(2)]


def numbers(form: Form, rng: np.random.Generator) -> list[Array]:
    """Global operands; token ids include some below zero."""
    found: list[Array] = []
    for word in form.operands:
        shape = [DIMS[dim] for dim in plain(word).dims]
        value = rng.integers(-9, 10, shape) if form.exact else rng.normal(size=shape)
        value = rng.integers(-2, DIMS["vocab"], shape) if word.startswith("int") else value
        found.append(np.exp(value) if word.startswith("positive") else np.asarray(value))
    return found


# ---- running


def typed(program: Program, kind: str, form: Form, types: Sequence[Type]) -> Op:
    """The op with its results' types.  Raises TypingError."""
    names = tuple(f"x{i}" for i in range(len(types)))
    op = Op(kind, names, (), form.attrs, span=program.region.span)
    results = OPS[kind].infer(program, types, op)
    return evolve(op, outputs=tuple(Value(f"y{i}", type) for i, type in enumerate(results)))


def run(mesh: Mesh, op: Op, args: list[Held]) -> list[Held]:
    """The results, held against their types."""
    parts = MEANINGS[op.kind](mesh, op, args)
    results = [Held(value.type, part) for value, part in zip(op.outputs, parts, strict=True)]
    for held in results:
        mesh.check(held)
    return results


def close(found: Array, want: Array, exact: bool) -> bool:
    return found.shape == want.shape and np.abs(found - want).max(initial=0) <= (0 if exact else 1e-12) * (
        1 + np.abs(want).max(initial=0)
    )


def singles(form: Form, whole: Sequence[Array]) -> list[Held]:
    return [Held(plain(word), x) for word, x in zip(form.operands, whole, strict=True)]


def is_true(program: Program, kind: str, form: Form, on: Sequence[Choice]) -> bool:
    """Whether the op on each rank's shares gives the shares of the global result."""
    rng, mesh = np.random.default_rng(0), Mesh.of(program)
    whole, types = numbers(form, rng), placed(program, form, on)
    op, single = typed(program, kind, form, types), typed(NO_AXIS, kind, form, placed(NO_AXIS, form, []))
    wanted = run(ALONE, single, singles(form, whole))
    try:
        found = run(mesh, op, [mesh.spread(x, type, rng) for x, type in zip(whole, types, strict=True)])
        return all(close(mesh.whole(f), w.parts, form.exact) for f, w in zip(found, wanted, strict=True))
    except (AssertionError, ValueError):  # shapes that do not fit, copies that differ
        return False


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_what_is_allowed_is_true(kind: str, form: Form) -> None:
    wrong = [choice for choice in allowed(kind, form) if not is_true(ONE_AXIS, kind, form, [choice])]
    assert [" ".join(map(str, choice)) for choice in wrong] == []


@pytest.mark.parametrize(("kind", "form"), CASES)
@settings(derandomize=True, max_examples=15, deadline=None)
@given(data=st.data())
def test_axes_are_independent(kind: str, form: Form, data: st.DataObject) -> None:
    """What is allowed on each of two axes is allowed on both together, and true where it is on each."""
    on = data.draw(pairs(kind, form))
    typed(TWO_AXES, kind, form, placed(TWO_AXES, form, on))
    if all(is_true(ONE_AXIS, kind, form, [choice]) for choice in on):
        assert is_true(TWO_AXES, kind, form, on)


# ---- adjoints


class Tape:
    """Runs what an adjoint writes: the `Builder` of the op protocol."""

    def __init__(self, program: Program, held: dict[str, Held]) -> None:
        self.program, self.mesh, self.held = program, Mesh.of(program), held

    def emit(self, kind: str, inputs: Sequence[str], like: Sequence[str], **attrs: Attr) -> tuple[str, ...]:
        args = [self.held[name] for name in inputs]
        op = Op(kind, tuple(inputs), (), tuple(attrs.items()), span=self.program.region.span)
        types = OPS[kind].infer(self.program, [arg.type for arg in args], op)
        names = tuple(f"{name}_{len(self.held)}" for name in like)
        op = evolve(op, outputs=tuple(map(Value, names, types)))
        self.held |= dict(zip(names, run(self.mesh, op, args), strict=True))
        return names

    def saved(self, name: str) -> str:
        return name

    def type(self, name: str) -> Type:
        return self.held[name].type

    def wanted(self, name: str) -> bool:
        return self.type(name).dtype != "i64"


def gradients(program: Program, op: Op, args: list[Held], dys: list[Held]) -> list[Held | None]:
    """What the op's adjoint makes of the gradients of its results."""
    mesh = Mesh.of(program)
    results = run(mesh, op, args)
    names = [f"dy{i}" for i in range(len(dys))]
    held = dict(zip(op.inputs, args, strict=True)) | dict(zip(names, dys, strict=True))
    held |= {value.name: result for value, result in zip(op.outputs, results, strict=True)}
    tape, adjoint = Tape(program, held), OPS[op.kind].adjoint
    assert adjoint
    return [tape.held[grad] if grad else None for grad in adjoint(op, names, tape)]


def mistake(program: Program, kind: str, form: Form, on: Sequence[Choice]) -> str:
    """What is wrong with the adjoint of an op that is allowed: it has no rule, or gives other types or values."""
    rng, mesh = np.random.default_rng(0), Mesh.of(program)
    whole, types = numbers(form, rng), placed(program, form, on)
    op, single = typed(program, kind, form, types), typed(NO_AXIS, kind, form, placed(NO_AXIS, form, []))
    dys = [cotangent(form, value.type, rng) for value in single.outputs]
    args = [mesh.spread(x, type, rng) for x, type in zip(whole, types, strict=True)]
    grads = [mesh.spread(dy, dual_type(value.type), rng) for dy, value in zip(dys, op.outputs, strict=True)]
    wanted = gradients(NO_AXIS, single, singles(form, whole), list(map(Held, (v.type for v in single.outputs), dys)))
    try:
        found = gradients(program, op, args, grads)
    except TypingError as error:
        return str(error)
    for type, grad, want in zip(types, found, wanted, strict=True):
        if grad and want and grad.type != dual_type(type):
            return f"the gradient of {type} is {grad.type}"
        if grad and want and not close(mesh.whole(grad), want.parts, exact=False):
            return f"the gradient of {type} is wrong"
    return ""


@pytest.mark.parametrize(("kind", "form"), WITH_ADJOINT)
def test_gradients_are_dual_and_equal(kind: str, form: Form) -> None:
    """Wherever the op is allowed, so are the ops of its adjoint, and they give shares of the global gradients."""
    right = [choice for choice in allowed(kind, form) if is_true(ONE_AXIS, kind, form, [choice])]
    found = {" ".join(map(str, choice)): mistake(ONE_AXIS, kind, form, [choice]) for choice in right}
    assert {choice: what for choice, what in found.items() if what} == {}


@pytest.mark.parametrize(("kind", "form"), WITH_ADJOINT)
@settings(derandomize=True, max_examples=15, deadline=None)
@given(data=st.data())
def test_gradients_on_two_axes(kind: str, form: Form, data: st.DataObject) -> None:
    on = data.draw(pairs(kind, form))
    if all(is_true(ONE_AXIS, kind, form, [choice]) and not mistake(ONE_AXIS, kind, form, [choice]) for choice in on):
        assert mistake(TWO_AXES, kind, form, on) == ""


def cotangent(form: Form, type: Type, rng: np.random.Generator) -> Array:
    shape = [DIMS[dim] for dim in type.dims]
    return rng.integers(-9, 10, shape) if form.exact else rng.normal(size=shape)


@pytest.mark.parametrize(("kind", "form"), WITH_ADJOINT)
def test_adjoints_are_derivatives(kind: str, form: Form) -> None:
    """⟨dy, f'(x) v⟩ = ⟨adjoint, v⟩, the left side by a complex step."""
    rng = np.random.default_rng(0)
    whole = numbers(form, rng)
    types = [plain(word) for word in form.operands]
    op = typed(NO_AXIS, kind, form, types)
    dys = [rng.normal(size=[DIMS[dim] for dim in value.type.dims]) for value in op.outputs]
    grads = gradients(NO_AXIS, op, list(map(Held, types, whole)), list(map(Held, (v.type for v in op.outputs), dys)))
    for i, grad in enumerate(grads):
        if grad is None:
            continue
        v = rng.normal(size=whole[i].shape)
        nudged = [x + 1e-30j * v if j == i else x for j, x in enumerate(whole)]
        results = run(ALONE, op, list(map(Held, types, nudged)))
        slope = sum(float((dy * np.imag(result.parts)).sum()) for dy, result in zip(dys, results, strict=True)) / 1e-30
        assert float((grad.parts * v).sum()) == pytest.approx(slope, rel=1e-10), f"of operand {i}"

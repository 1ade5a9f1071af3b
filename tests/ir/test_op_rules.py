"""Every op with the generic typing rule: what the rule allows is true on all ranks, forward and backward.

Purpose: `infer` against `meanings`, on drawn placements; adjoints against the derivative of the op they belong to.
Non-goals: ops of the step with rules of their own, which `test_steps` runs.
"""

from collections.abc import Sequence

import numpy as np
import pytest
from attrs import evolve, field, frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from ir.frames import frame
from ir.meanings import MEANINGS
from ir.placing import Array, Held, Mesh
from scalec.compiler.ir import INVARIANT, PARTIAL, REPLICATED, Attr, Op, Placement, Program, Type, Value, sharded
from scalec.compiler.ops import OPS, TypingError
from scalec.compiler.placements import dual_type

DIMS = {"batch": 6, "seq": 6, "hidden": 6, "ffn": 6, "vocab": 6, "heads": 12, "kv_heads": 6, "head_dim": 2}
X, TOKENS, LOGITS = "batch seq hidden", "int batch seq", "seq batch vocab"
Q, K = "batch seq heads head_dim", "batch seq kv_heads head_dim"


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
    "attention": [form(Q, K, K, mask="causal"), form("seq heads head_dim", "seq heads head_dim", "seq heads head_dim")],
    "attention_dx": [form(Q, Q, K, K, Q, mask="causal")],
    "clip_scale": [form("positive", max=0.5), form("positive", max=0.0)],
    "contract": [
        form(X, "ffn hidden", over=("hidden",), exact=True),
        form("seq batch heads head_dim", "hidden heads head_dim", over=("heads", "head_dim"), exact=True),
        form("seq batch ffn", X, over=("seq", "batch"), exact=True),
    ],
    "count_valid": [form(TOKENS, exact=True)],
    "cross_entropy": [form(LOGITS, "int seq batch"), form(LOGITS, TOKENS)],
    "cross_entropy_dx": [form("", LOGITS, "int seq batch")],
    "embedding": [form(TOKENS, "vocab hidden", exact=True), form("int seq batch", "vocab heads head_dim", exact=True)],
    "embedding_dw": [form(X, TOKENS, "vocab hidden", exact=True)],
    "grad_norm": [form("positive", "positive")],
    "max_logit": [form(LOGITS, exact=True)],
    "mul": [form(X, X, exact=True), form(X, "hidden", exact=True), form("seq", X, exact=True)],
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
CASES = [pytest.param(kind, form, id=f"{kind} {i}") for kind, forms in FORMS.items() for i, form in enumerate(forms)]
WITH_ADJOINT = [case for case in CASES if OPS[str(case.values[0])].adjoint]


def test_every_op_with_the_generic_rule_is_here() -> None:
    assert set(FORMS) == {kind for kind, entry in OPS.items() if not entry.typing}


# ---- drawing


def plain(word: str) -> Type:
    """The type of an operand without placements."""
    dims = tuple(dim for dim in word.split() if dim not in ("int", "positive"))
    return Type("i64" if word.startswith("int") else "f64", dims)


@frozen
class Case:
    """Operands' placements on a mesh."""

    program: Program = field(repr=False)
    types: tuple[Type, ...]
    seed: int


@st.composite
def cases(draw: st.DrawFn, form: Form) -> Case:
    """Placements of all operands, per axis of one of the ways that may be allowed, and at times with one changed."""
    program = frame(dict(list({"a": 2, "b": 3}.items())[: draw(st.integers(1, 2))]), DIMS)
    operands = [plain(word) for word in form.operands]
    at: list[dict[str, Placement]] = [{} for _ in operands]
    for axis in program.axes:
        for places, place in zip(at, draw(on_one_axis(operands)), strict=True):
            places[axis.name] = place
    types = tuple(evolve(t, places=program.places(p)) for t, p in zip(operands, at, strict=True))
    return Case(program, types, draw(st.integers(0, 99)))


@st.composite
def on_one_axis(draw: st.DrawFn, operands: Sequence[Type]) -> list[Placement]:
    dims = sorted({dim for type in operands for dim in type.dims})
    work = draw(st.sets(st.sampled_from(dims), max_size=2)) if dims else set[str]()
    rest = REPLICATED if work else draw(st.sampled_from([INVARIANT, REPLICATED]))
    found = [next((sharded(dim) for dim in type.dims if dim in work), rest) for type in operands]
    if draw(st.booleans()):
        pending = draw(st.sets(st.integers(0, len(operands) - 1), max_size=2))
        found = [PARTIAL if i in pending else place for i, place in enumerate(found)]
    if draw(st.integers(0, 3)) == 0:
        odd = draw(st.integers(0, len(operands) - 1))
        found[odd] = draw(st.sampled_from([INVARIANT, REPLICATED, PARTIAL, *map(sharded, operands[odd].dims)]))
    return [INVARIANT if p == PARTIAL and t.dtype == "i64" else p for p, t in zip(found, operands, strict=True)]


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


ALONE = Mesh({}, DIMS)


@pytest.mark.parametrize(("kind", "form"), CASES)
@settings(derandomize=True, max_examples=60, deadline=None)
@given(data=st.data())
def test_what_is_allowed_is_true(kind: str, form: Form, data: st.DataObject) -> None:
    """On each rank's shares the op gives the shares of the global result."""
    case = data.draw(cases(form))
    try:
        op = typed(case.program, kind, form, case.types)
    except TypingError:
        return
    mesh, rng = Mesh.of(case.program), np.random.default_rng(case.seed)
    whole = numbers(form, rng)
    found = run(mesh, op, [mesh.spread(x, type, rng) for x, type in zip(whole, case.types, strict=True)])
    single = typed(frame({}, DIMS), kind, form, [plain(word) for word in form.operands])
    wanted = run(ALONE, single, [Held(plain(word), x) for word, x in zip(form.operands, whole, strict=True)])
    for result, want in zip(found, wanted, strict=True):
        assert close(mesh.whole(result), want.parts, form.exact), f"{result.type}"


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


@pytest.mark.parametrize(("kind", "form"), WITH_ADJOINT)
@settings(derandomize=True, max_examples=60, deadline=None)
@given(data=st.data())
def test_gradients_are_dual_and_equal(kind: str, form: Form, data: st.DataObject) -> None:
    """Wherever the op is allowed, so are the ops of its adjoint, and give shares of the global gradients."""
    case = data.draw(cases(form))
    try:
        op = typed(case.program, kind, form, case.types)
    except TypingError:
        return
    rng, mesh, alone = np.random.default_rng(case.seed), Mesh.of(case.program), frame({}, DIMS)
    whole = numbers(form, rng)
    single = typed(alone, kind, form, [plain(word) for word in form.operands])
    dys = [cotangent(form, value.type, rng) for value in single.outputs]
    args = [mesh.spread(x, type, rng) for x, type in zip(whole, case.types, strict=True)]
    grads = [mesh.spread(dy, dual_type(value.type), rng) for dy, value in zip(dys, op.outputs, strict=True)]
    singles = [Held(plain(word), x) for word, x in zip(form.operands, whole, strict=True)]
    wanted = gradients(alone, single, singles, list(map(Held, (v.type for v in single.outputs), dys)))
    for type, found, want in zip(case.types, gradients(case.program, op, args, grads), wanted, strict=True):
        assert (found is None) == (want is None)
        if found and want:
            assert evolve(found.type, dims=type.dims) == dual_type(type)
            assert named(mesh.whole(found), found.type, type) == pytest.approx(named(want.parts, want.type, type), rel=1e-10)


def cotangent(form: Form, type: Type, rng: np.random.Generator) -> Array:
    shape = [DIMS[dim] for dim in type.dims]
    return rng.integers(-9, 10, shape) if form.exact else rng.normal(size=shape)


def named(value: Array, own: Type, like: Type) -> Array:
    """The value with its dims as those of `like`; a gradient has no other dims than its value."""
    assert own.dims == like.dims, f"the gradient of [{', '.join(like.dims)}] is [{', '.join(own.dims)}]"
    return value


@pytest.mark.parametrize(("kind", "form"), WITH_ADJOINT)
def test_adjoints_are_derivatives(kind: str, form: Form) -> None:
    """⟨dy, f'(x) v⟩ = ⟨adjoint, v⟩, the left side by a complex step."""
    rng, alone = np.random.default_rng(0), frame({}, DIMS)
    whole = [value if word.startswith("int") else value * 0.5 for word, value in zip(form.operands, numbers(form, rng))]
    types = [plain(word) for word in form.operands]
    op = typed(alone, kind, form, types)
    dys = [rng.normal(size=[DIMS[dim] for dim in value.type.dims]) for value in op.outputs]
    grads = gradients(alone, op, list(map(Held, types, whole)), list(map(Held, (v.type for v in op.outputs), dys)))
    for i, grad in enumerate(grads):
        if grad is None:
            continue
        v = rng.normal(size=whole[i].shape)
        nudged = [x + 1e-30j * v if j == i else x for j, x in enumerate(whole)]
        results = run(ALONE, op, list(map(Held, types, nudged)))
        slope = sum(float((dy * result.parts.imag).sum()) for dy, result in zip(dys, results, strict=True)) / 1e-30
        assert float((grad.parts * v).sum()) == pytest.approx(slope, rel=1e-10), f"of operand {i}"

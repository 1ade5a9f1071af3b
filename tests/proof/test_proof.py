"""Every plan proves equal to its single-device step; a program with one planted error does not.

Purpose: `proof` on the table of plans and on those that ship: equality, the bound, the reduced
program; then the evaluator's teeth, on errors planted by hand in the IR.  Non-goals: all mutants
(`scalec verify --audit`), what the user is told (`locate`), random plans (`test_properties`).
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve

from helpers.plan_table import PLANS
from helpers.small_plans import DIMS, HEAD, LLAMA, START, Plan
from scalec.compiler.analysis.certificate import Proof
from scalec.compiler.ir import Op, Program, Region, Stmt
from scalec.compiler.ir.placements import coercion_of
from scalec.compiler.proof.interpreter import Interpreter
from scalec.compiler.proof.prime_field import Field
from scalec.compiler.proof.proof import BOUND, Case, UnequalError, anew, case_of, prove, unequal
from scalec.compiler.proof.simulated_mesh import SimulatedMesh
from scalec.compiler.proof.small_sizes import meshes
from scalec.compiler.proof.tensors import Tensor
from scalec.compiler.syntax.diagnostics import PlanError
from scalec.compiler.syntax.limits import load
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import PASS_NAMES, compile_plan, lower
from scalec.testing.float64 import Reals

ROOT = Path(__file__).parents[2]
SOURCES = {name: Source("tiny.scale", plan.text()) for name, plan in PLANS.items()}
SOURCES |= {path.stem: load(path) for path in sorted((ROOT / "plans").glob("*.scale"))}

DP_TP = "data, tensor, sequence"


@cache
def compiled(name: str) -> tuple[Program, Program]:
    """The program of a plan after the last pass, and its model."""
    model = compile_plan(SOURCES[name], "resolve")
    return lower(model), model


def case(name: str, mesh: int = 0) -> Case:
    program, model = compiled(name)
    return case_of(program, model, meshes(program)[mesh])


# ---- what is right


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", SOURCES)
def test_plans_prove_equal(name: str) -> None:
    proof = prove(*compiled(name))
    assert proof.bound <= BOUND == -50
    assert proof.gradients == proof.parameters == len(compiled(name)[0].params)


REDUCED = (
    "three axes",
    "two key/value heads on eight ranks",
    "one key/value head",
    "nested repeats",
    "tied embedding",
)


@pytest.mark.parametrize("name", [*REDUCED, DP_TP, "llama3_405b"])
def test_the_reduced_program_is_that_of_the_reduced_plan(name: str) -> None:
    for i, axes in enumerate(meshes(compiled(name)[0])):
        small = case(name, i)
        again = anew(small)
        assert again == evolve(small.program, after=again.after), f"on {axes}"
        if not any(bucket.layers for bucket in again.buckets):
            assert lower(small.model) == evolve(again, after=PASS_NAMES[-1]), f"on {axes}"


def test_a_right_step_is_refused_that_the_plan_does_not_compile_to() -> None:
    """Two gathers exchanged: equal in value, but not what the compiler writes at small sizes."""
    program, model = compiled("shared parameters")
    body = list(program.region.body)
    first, second = [i for i, stmt in enumerate(body) if stmt.kind == "pack"][:2]
    body.insert(first, body.pop(second))
    turned = evolve(program.region, body=tuple(body))
    with pytest.raises(AssertionError, match="does not compile to the same IR"):
        prove(evolve(program, region=turned), model)


@pytest.mark.parametrize("name", [*REDUCED, DP_TP, "one device", "axes of size 1", "llama3_405b"])
def test_every_axis_is_evaluated_at_two_and_at_three(name: str) -> None:
    program = compiled(name)[0]
    for axis in program.axes:
        assert {mesh[axis.name] for mesh in meshes(program)} == ({2, 3} if axis.size > 1 else {1})


@pytest.mark.parametrize("name", [DP_TP, "one device", "clipped", "three axes", "llama3_405b"])
def test_steps_agree_in_float64_too(name: str) -> None:
    small = case(name)
    assert unequal(small, Reals(len(small.program.axes))) == []


@pytest.mark.parametrize("name", [*REDUCED, DP_TP, "one device", "sequence alone", "tiny_llama"])
def test_what_a_step_begins_with_tells_mistakes(name: str) -> None:
    """Every microbatch has labels, the first of them more; there are several in all; no token
    follows itself.
    """
    for i in range(len(meshes(compiled(name)[0]))):
        small = case(name, i)
        inputs = small.scene(Field(1, len(small.program.axes))).inputs
        tokens, labels = inputs["tokens"].array[0], inputs["labels"].array[0]
        assert (tokens[..., 1:] != tokens[..., :-1]).all()
        counts = (labels >= 0).sum(axis=(1, 2))
        assert 2 <= counts.sum() < labels.size
        assert counts.all()
        assert (counts[1:] < counts[0]).all()


@pytest.mark.parametrize("name", [DP_TP, "one device", "clipped", "tiny_llama"])
def test_a_step_without_labels_updates_nothing(name: str) -> None:
    small = case(name)
    program, numbers, world = (
        small.program,
        Field(2, len(small.program.axes)),
        SimulatedMesh.of_program(small.program),
    )
    start = small.scene(numbers)
    labels = start.inputs["labels"]
    start.inputs["labels"] = Tensor(labels.dims, np.full_like(labels.array, -1))
    held = start.on(program, world, numbers)
    outcome = Interpreter(program, world, numbers).run(held)
    assert not outcome.metrics["count"].array.any()
    assert not outcome.metrics["loss"].array.any()
    for name, value in outcome.parameters.items():
        assert (value.array == held[name].array).all(), name


# ---- sizes


def proved(plan: Plan) -> Proof:
    model = compile_plan(Source("plan.scale", plan.text()), "resolve")
    return prove(lower(model), model)


def test_rope_may_turn_many_of_the_last_dim() -> None:
    """The small size leaves as many, and one pair more."""
    few = LLAMA.replace(", theta)", ", theta, dims=16)")
    proved(Plan(few, dims=DIMS.replace("head_dim = 2", "head_dim = 32")))


def test_an_axis_may_be_named_as_if_it_were_a_factor() -> None:
    proof = proved(
        Plan(
            mesh="tp_2 = 2  tp = 4",
            shard="batch over tp_2  heads, kv_heads, ffn over tp",
            ranks=2,
            microbatches=1,
        )
    )
    assert [*proof.meshes[0]] == ["tp_2", "tp_0", "tp_1"]


TWO_REPEATS = f"{START} repeat layers {{ x = x * 0.5 }} repeat blocks {{ x = x * 3.0 }} {HEAD}"


def test_a_repeat_does_not_turn_as_often_as_another() -> None:
    """Every repeat over the other's dim, which types do not see: no value in them has it."""
    model = compile_plan(
        Source("plan.scale", Plan(TWO_REPEATS, "tp = 2", "vocab over tp").text()), "resolve"
    )
    program = lower(model)
    other = {"layers": "blocks", "blocks": "layers"}

    def swapped(region: Region) -> Region:
        body = tuple(swapped(stmt) if isinstance(stmt, Region) else stmt for stmt in region.body)
        return evolve(region, body=body, dim=other.get(region.dim, region.dim))

    with pytest.raises(UnequalError):
        prove(evolve(program, region=swapped(program.region)), model)


@pytest.mark.parametrize("what", ["dims", "axes", "train"])
def test_the_program_has_the_sizes_and_settings_of_the_plan(what: str) -> None:
    program, model = compiled(DP_TP)
    wrong = {
        "dims": evolve(program, dims=tuple(evolve(d, size=2 * d.size) for d in program.dims)),
        "axes": evolve(program, axes=tuple(evolve(a, size=2 * a.size) for a in program.axes)),
        "train": evolve(program, train=evolve(program.train, seed=program.train.seed + 1)),
    }
    with pytest.raises(AssertionError, match="sizes or settings"):
        prove(wrong[what], model)


def test_a_step_of_too_high_a_degree_is_refused() -> None:
    squares = " ".join(["x = x * x"] * 40)
    with pytest.raises(PlanError) as caught:
        proved(Plan(f"{START}\n{squares.replace(' x =', chr(10) + 'x =')}\n{HEAD}"))
    assert caught.value.diagnostics[0].code == "E0705"


# ---- what is wrong

Change = Callable[[Op], Op]


def edited(program: Program, change: Change) -> Program:
    """The program with every op replaced by what `change` makes of it."""

    def body(stmts: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        return tuple(
            evolve(s, body=body(s.body)) if isinstance(s, Region) else change(s) for s in stmts
        )

    return evolve(program, region=evolve(program.region, body=body(program.region.body)))


def is_caught(small: Case, program: Program) -> bool:
    return bool(unequal(evolve(small, program=program), Field(8, len(program.axes))))


def identity(op: Op) -> Op:
    """An op that hands its operand on, by whatever name."""
    return evolve(op, kind="leaf", inputs=op.inputs[:1], attrs=())


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name",
    [DP_TP, "data, tensor", "two key/value heads on four ranks", "tied embedding", "three axes"],
)
def test_every_collective_is_needed(name: str) -> None:
    small = case(name)
    made = [op.outputs[0].name for op in small.program.ops if op.kind == "coerce" if moves(op)]

    def without(value: str) -> Program:
        return edited(small.program, lambda op: identity(op) if op.outputs[0].name == value else op)

    assert made
    assert [value for value in made if not is_caught(small, without(value))] == []


def moves(op: Op) -> bool:
    return coercion_of(op).collective != ""


def on(kind: str, change: Change) -> Change:
    """A change of ops of one kind."""
    return lambda op: change(op) if op.kind == kind else op


def of(kind: str, wrt: str, change: Change) -> Change:
    """A change of ops that make the gradient of an operand, and perhaps of others, of ops of
    one kind.
    """
    return on(
        "vjp", lambda op: change(op) if op.get("of") == kind and wrt in op.names("wrt") else op
    )


def named(value: str, change: Change) -> Change:
    """A change of the op that makes a value."""
    return lambda op: change(op) if op.outputs[0].name == value else op


def less_one(op: Op) -> Op:
    return evolve(op, inputs=op.inputs[:-1])


def swapped(op: Op, i: int, j: int) -> Op:
    inputs = [*op.inputs]
    inputs[i], inputs[j] = inputs[j], inputs[i]
    return evolve(op, inputs=tuple(inputs))


PLANTED: dict[str, Change] = {
    "residual branch dropped forward": named("x.2", less_one),
    "residual branch dropped backward": named("d_x.3", less_one),
    "one of three gradients dropped": named("d_a.3", less_one),
    "rotated forward in backward": of(
        "rope", "x", lambda op: evolve(op, kind="rope", attrs=op.attrs[2:])
    ),
    "a bucket left out of the norm": on("grad_norm", less_one),
    "loss not divided by the count": named("loss.3", identity),
    "gradients not divided by the count": named(
        "inv_num_tokens.1", lambda op: evolve(op, kind="zeros")
    ),
    "two gradients exchanged in their bucket": named("g_matrices", lambda op: swapped(op, 5, 6)),
    "two parameters exchanged in the update": named("norm1.4", lambda op: swapped(op, 3, 4)),
    "another eps in backward": of(
        "rmsnorm", "x", lambda op: evolve(op, attrs=(*op.attrs[:2], ("eps", 1e-6)))
    ),
    "another theta": named("q", lambda op: evolve(op, attrs=(("theta", 1e5),))),
    "gradients of z and t exchanged": of(
        "local_softmax_stats", "logits", lambda op: swapped(op, 0, 1)
    ),
    "queries for keys in backward": of("attention", "q", lambda op: swapped(op, 1, 4)),
    "clipped to another norm": on("clip_scale", lambda op: evolve(op, attrs=(("max", 1.0),))),
    "labels for tokens": of(
        "embedding", "table", lambda op: evolve(op, inputs=(op.inputs[0], "labels", op.inputs[2]))
    ),
    "weight of the other projection": named(
        "d_m", lambda op: evolve(op, inputs=(op.inputs[0], "w_gate.3"))
    ),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_error_is_caught(what: str) -> None:
    small = case(DP_TP)
    wrong = edited(small.program, PLANTED[what])
    assert wrong != small.program
    assert is_caught(small, wrong)


def test_a_program_is_held_against_its_own_forward() -> None:
    """Where there is no model, as for IR text edited by hand: an error in backward or in the
    step is an error.
    """
    program = compiled(DP_TP)[0]
    assert prove(program, program).bound <= BOUND
    wrong = edited(program, PLANTED["one of three gradients dropped"])
    with pytest.raises(UnequalError) as caught:
        prove(wrong, wrong)
    assert "gradient of norm1" in caught.value.results
    with pytest.raises(UnequalError):
        prove(wrong, compiled(DP_TP)[1])
    assert "loss" not in caught.value.results


def test_what_is_chosen_for_attention_at_the_plans_sizes_is_kept_at_others() -> None:
    """On three ranks of cp, whose heads are divisible, `auto` by itself would choose another
    strategy.
    """
    plan = Plan(mesh="dp = 2  cp = 2", shard="batch over dp  seq over cp via auto", ranks=2)
    model = compile_plan(Source("plan.scale", plan.text()), "resolve")
    program = lower(model)
    assert prove(program, model).bound <= BOUND
    chosen = {claim.via for claim in program.claims}
    for axes in meshes(program):
        assert {claim.via for claim in case_of(program, model, axes).model.claims} == chosen

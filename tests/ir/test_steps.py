"""Whole steps: the sharded program on all ranks equals the plan on one device, and that equals calculus.

Non-goals: single ops and coercions (`test_op_rules`, `test_coercions`), the emitted program.
"""

from functools import cache

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings

from ir.meanings import RATE
from ir.placing import Array
from ir.plan_table import DP_TP, NO_DP, PLANS
from ir.plans import ALL_OVER_TP, DIMS, HEAD, PARALLEL_BLOCK, START, WITH_SEQ, Plan, batch, microbatch, parameters
from ir.random_plans import plans
from ir.simulate import Outcome, evaluate, run_step
from scalec.compiler.diagnostics import PlanError
from scalec.compiler.ir import Program, Region, Type, Value, base, walk
from scalec.compiler.placements import dual_type


def reference(plan: Plan) -> Plan:
    """The same plan on one device."""
    return evolve(plan, mesh="", shard="", ranks=1)


@cache
def compiled(plan: Plan) -> Program:
    """The step of a plan."""
    return plan.program()


def uneven(plan: Plan) -> dict[str, Array]:
    """Tokens and labels; the first sequences of all microbatches, and the whole last of several, have no label."""
    inputs = batch(plan, np.random.default_rng(1))
    inputs["labels"][:, : plan.microbatch // plan.ranks if plan.ranks > 1 else 0] = -100
    inputs["labels"][1:][-1:] = -100
    return inputs


def assert_same(found: Outcome, wanted: Outcome) -> None:
    """Equal to 1e-10, relative to the largest number of each array."""
    pairs = {"loss": (found.loss, wanted.loss), "norm": (found.norm, wanted.norm), "count": (found.count, wanted.count)}
    pairs |= {name: (value, wanted.params[name]) for name, value in found.params.items()}
    for name, (value, want) in pairs.items():
        assert np.abs(value - want).max() <= 1e-10 * (1 + np.abs(want).max()), f"{name} differs"


def check_equals_reference(plan: Plan) -> None:
    single, program = compiled(reference(plan)), compiled(plan)
    params, inputs = parameters(single, np.random.default_rng(0)), uneven(plan)
    assert_same(run_step(program, params, inputs), run_step(single, params, inputs))


@pytest.mark.parametrize("name", PLANS)
def test_equals_one_device(name: str) -> None:
    check_equals_reference(PLANS[name])


@pytest.mark.parametrize("name", {plan.body: name for name, plan in reversed(PLANS.items())}.values())
def test_one_device_equals_calculus(name: str) -> None:
    """Loss and norm are what they should be, and gradients agree with the forward program's derivative."""
    plan = Plan(PLANS[name].body)
    program, forward = compiled(plan), plan.program("resolve")
    rng = np.random.default_rng(2)
    params, inputs = parameters(program, rng), batch(plan, rng)
    outcome = run_step(program, params, inputs)
    grads = {name: (value - outcome.params[name]) / RATE for name, value in params.items()}
    direction = {name: rng.normal(size=value.shape) for name, value in params.items()}
    slope = sum(float((grads[name] * direction[name]).sum()) for name in params)
    count = (inputs["labels"] >= 0).sum()
    nudged = {name: value + 1e-30j * direction[name] for name, value in params.items()}
    losses = [evaluate(forward, nudged, microbatch(inputs, i))[0] for i in range(plan.microbatches)]
    assert outcome.count == count
    assert outcome.loss == pytest.approx(np.real(sum(losses)) / count, rel=1e-12)
    assert slope == pytest.approx(np.imag(sum(losses)) / 1e-30 / count, rel=1e-10)
    assert outcome.norm == pytest.approx(np.sqrt(sum((grad**2).sum() for grad in grads.values())), rel=1e-12)


@pytest.mark.parametrize("stage", ["differentiate", "place_state"])
@pytest.mark.parametrize("name", ["data, tensor, sequence", "two key/value heads on four ranks", "tied embedding"])
def test_every_stage_is_the_same_step(name: str, stage: str) -> None:
    plan = PLANS[name]
    params, inputs = parameters(compiled(plan), np.random.default_rng(0)), uneven(plan)
    assert_same(run_step(plan.program(stage), params, inputs), run_step(compiled(plan), params, inputs))


@pytest.mark.parametrize("name", ["one device", "data, tensor, sequence"])
def test_a_step_without_labels_changes_nothing(name: str) -> None:
    plan = PLANS[name]
    params = parameters(compiled(plan), np.random.default_rng(0))
    outcome = run_step(compiled(plan), params, batch(plan, np.random.default_rng(1), ignored=1.0))
    assert outcome.count == outcome.loss == outcome.norm == 0
    assert all((outcome.params[name] == value).all() for name, value in params.items())


def test_clipping_bounds_the_step() -> None:
    plan = PLANS["clipped"]
    params = parameters(compiled(plan), np.random.default_rng(0))
    outcome = run_step(compiled(plan), params, uneven(plan))
    moved = np.sqrt(sum(((value - outcome.params[name]) ** 2).sum() for name, value in params.items()))
    assert outcome.norm > 0.1
    assert moved == pytest.approx(RATE * 0.1, rel=1e-12)


DOUBTFUL = {
    "key/value heads alone": evolve(DP_TP, shard="batch over dp  kv_heads over tp"),
    "heads alone": evolve(DP_TP, shard="batch over dp  vocab, heads, ffn over tp"),
    "sequence before vocabulary": evolve(
        DP_TP, shard="batch over dp  heads, kv_heads, ffn over tp  seq over tp  vocab over tp"
    ),
    "key/value heads before heads": evolve(DP_TP, shard="batch over dp  kv_heads over tp  heads over tp"),
    "head dim": evolve(DP_TP, shard="batch over dp  head_dim over tp"),
    "hidden": evolve(DP_TP, shard="batch over dp  hidden over tp"),
    "sequence in attention": Plan(mesh="cp = 2", shard="seq over cp"),
    "a carried value replaced": evolve(
        DP_TP, body=f"{START} y = silu(x) repeat layers {{ y = silu(x * c[hidden])  x = x + y }} x = x + y {HEAD}"
    ),
    "matrices of other dims": evolve(
        DP_TP, body=f"{START} x = x + silu(x @ w[hidden -> ffn]) @ (u[ffn -> hidden] * s[ffn, hidden]) {HEAD}"
    ),
    "a parameter without gradient": Plan(f"{START} y = x @ w[hidden -> ffn] {HEAD}"),
}


@pytest.mark.parametrize("name", DOUBTFUL)
def test_refused_or_right(name: str) -> None:
    """A diagnostic or the right numbers, and never a broken program."""
    check_refused_or_right(DOUBTFUL[name])


@settings(derandomize=True, max_examples=60, deadline=None)
@given(plans())
def test_random_plans_equal_one_device(plan: Plan) -> None:
    check_refused_or_right(plan)


def check_refused_or_right(plan: Plan) -> None:
    try:
        compiled(plan)
    except PlanError:
        return
    check_equals_reference(plan)


# ---- types


@pytest.mark.parametrize("name", PLANS)
def test_gradients_are_placed_by_the_dual(name: str) -> None:
    """Every `d_x` has the type that is dual to one that a value named `x` has."""
    program = compiled(PLANS[name])
    forward: dict[str, set[Type]] = {}
    for value in values(program.region):
        forward.setdefault(base(value.name), set()).add(evolve(value.type, dtype=""))
    forward = {name: types | {p.type for p in program.params if p.name == name} for name, types in forward.items()}
    for value in values(program.region):
        known = forward.get(base(value.name).removeprefix("d_"), set()) if value.name.startswith("d_") else set()
        alike = {type for type in known if type.dims == value.type.dims}
        duals = {dual_type(type) for type in alike}
        assert not alike or evolve(value.type, dtype="") in duals, f"{value.name} is {value.type}"


def values(region: Region) -> list[Value]:
    """All values bound in a region."""
    found = [arg.value for arg in region.args] + list(region.results)
    for stmt in region.body:
        found += values(stmt) if isinstance(stmt, Region) else stmt.outputs
    return found


def test_key_value_heads_are_split_as_far_as_they_go() -> None:
    """Two of them over eight ranks: each rank holds one, and one of eight query heads."""
    program = compiled(PLANS["two key/value heads on eight ranks"])
    stored = {p.name: program.local_shape(p.type) for p in program.params}
    assert (stored["wq"][1], stored["wk"][1], stored["wv"][1]) == (1, 1, 1)


# ---- counts


COLLECTIVES = {
    "P I": "reduce",
    "M R": "reduce",
    "M I": "reduce",
    "S R": "gather",
    "S I": "gather",
    "P S": "scatter",
    "S S": "exchange",
}


def counted(ops: tuple[object, ...] | list[object], axis: str = "tp") -> str:
    """For instance `gather 2, scatter 2`: the collectives over an axis (or its factors)."""
    found: dict[str, int] = {}
    for op in walk(tuple(ops)):  # pyright: ignore[reportArgumentType]
        if op.kind == "coerce" and any(name.split("_")[0] == axis for name in op.names("axes")):
            word = COLLECTIVES.get(f"{str(op.get('from'))[0]} {str(op.get('to'))[0]}")
            found |= {word: found.get(word, 0) + 1} if word else {}
    return ", ".join(f"{word} {count}" for word, count in sorted(found.items()))


def blocks(plan: Plan) -> tuple[Region, Region]:
    """The forward and backward blocks of a microbatch."""
    (region,) = (stmt for stmt in compiled(plan).region.body if isinstance(stmt, Region))
    forward, backward = region.body
    assert isinstance(forward, Region)
    assert isinstance(backward, Region)
    return forward, backward


def split(block: Region) -> tuple[list[object], list[object]]:
    """The statements of a block outside of repeats, and those of its one repeat."""
    (repeat,) = (stmt for stmt in block.body if isinstance(stmt, Region))
    return [stmt for stmt in block.body if stmt is not repeat], list(repeat.body)


KV = DIMS.replace("kv_heads = 2", "kv_heads = 1")
LAYERS = {
    "tp": (Plan(mesh="tp = 2", shard=NO_DP), "reduce 2", "reduce 2"),
    "tp with few key/value heads": (Plan(mesh="tp = 2", shard=NO_DP, dims=KV), "reduce 2", "reduce 2"),
    "dp, tp": (Plan(mesh="dp = 2  tp = 2", shard=ALL_OVER_TP, ranks=2), "reduce 2", "reduce 2"),
    "tp, sequence": (DP_TP, "gather 2, scatter 2", "gather 2, scatter 2"),
    "tp, sequence with few key/value heads": (evolve(DP_TP, dims=KV), "gather 2, scatter 2", "gather 2, scatter 2"),
    "tp, regather": (evolve(DP_TP, train="gathered = regather"), "gather 2, scatter 2", "gather 4, scatter 2"),
    "tp, parallel block": (evolve(DP_TP, body=PARALLEL_BLOCK, shard=ALL_OVER_TP), "reduce 1", "reduce 1"),
    "tp, sequence, parallel block": (evolve(DP_TP, body=PARALLEL_BLOCK), "gather 1, scatter 1", "gather 1, scatter 1"),
    "dp": (Plan(mesh="dp = 2", shard="batch over dp", ranks=2), "", ""),
}


@pytest.mark.parametrize("name", LAYERS)
def test_collectives_of_a_layer(name: str) -> None:
    plan, forward, backward = LAYERS[name]
    assert tuple(counted(split(block)[1]) for block in blocks(plan)) == (forward, backward)
    assert [counted(block.body, "dp") for block in blocks(plan)] == ["", ""]


def test_collectives_of_embedding_and_loss() -> None:
    """One maximum and two small sums for the loss, one sum for the embedding; backward only `f` before the head."""
    forward, backward = blocks(Plan(mesh="tp = 2", shard=NO_DP))
    assert counted(split(forward)[0]) == "reduce 4"
    assert counted(split(backward)[0]) == "reduce 1"
    sequence = blocks(PLANS["tensor, sequence"])
    assert counted(split(sequence[0])[0]) == "gather 1, reduce 3, scatter 1"
    assert counted(split(sequence[1])[0]) == "gather 1, scatter 1"


def test_no_rank_holds_all_logits() -> None:
    forward, backward = blocks(DP_TP)
    logits = [v.type for v in (*values(forward), *values(backward)) if "vocab" in v.type.dims and "seq" in v.type.dims]
    assert logits
    assert all(type.axes_of("vocab") == ("tp",) for type in logits)


@pytest.mark.parametrize(
    ("shard", "want"),
    [(ALL_OVER_TP, {("dp",): 2}), (WITH_SEQ, {("dp",): 1, ("dp", "tp"): 1})],
    ids=["tp", "tp, sequence"],
)
def test_one_reduction_of_gradients_per_step_and_placement(shard: str, want: dict[tuple[str, ...], int]) -> None:
    """One bucket per placement; over tp only under sequence parallelism, and then only the norms'."""
    program = compiled(evolve(DP_TP, shard=shard))
    made = {value.name: op for op in walk(program.region.body) for value in op.outputs}
    reduced = [
        op.names("axes")
        for op in made.values()
        if op.kind == "coerce" and made.get(op.inputs[0]) and made[op.inputs[0]].kind == "pack"
    ]
    assert {axes: reduced.count(axes) for axes in reduced} == want
    assert len(program.buckets) == sum(want.values())

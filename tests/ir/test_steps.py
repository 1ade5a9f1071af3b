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
from ir.plans import (
    ALL_OVER_TP,
    ATTENTION,
    DIMS,
    HEAD,
    LLAMA,
    MLP,
    PARALLEL_BLOCK,
    START,
    WITH_SEQ,
    Plan,
    batch,
    microbatch,
    parameters,
)
from ir.random_plans import plans
from ir.simulate import Outcome, evaluate, run_step
from scalec.compiler.diagnostics import PlanError
from scalec.compiler.ir import Program, Region, Type, Value, base, walk
from scalec.compiler.placements import dual_type

DP_TP = Plan(mesh="dp = 2  tp = 2", shard=WITH_SEQ, ranks=2)
NO_DP = "vocab, heads, kv_heads, ffn over tp"
SMALL_MLP = "silu(x @ w_in[hidden -> ffn]) @ w_out[ffn -> hidden]"

PLANS = {
    "one device": Plan(),
    "data": Plan(mesh="dp = 4", shard="batch over dp", ranks=4),
    "tensor": Plan(mesh="tp = 2", shard=NO_DP),
    "tensor, sequence": Plan(mesh="tp = 2", shard=f"{NO_DP}  seq over tp"),
    "data, tensor": Plan(mesh="dp = 2  tp = 2", shard=ALL_OVER_TP, ranks=2),
    "data, tensor, sequence": DP_TP,
    "tensor outside of data": Plan(mesh="tp = 2  dp = 2", shard=WITH_SEQ, ranks=2),
    "axes of size 1": Plan(mesh="dp = 1  tp = 1", shard=WITH_SEQ),
    "three axes": Plan(
        mesh="replica = 2  dp = 2  tp = 2", shard=WITH_SEQ.replace("over dp", "over replica, dp"), ranks=4
    ),
    "unused tensor axis of size 1": Plan(mesh="dp = 2  tp = 1", shard="batch over dp", ranks=2),
    "regather": evolve(DP_TP, train="precision = fp64  gathered = regather"),
    "bf16": evolve(DP_TP, train="precision = bf16"),
    "one microbatch": evolve(DP_TP, microbatches=1),
    "three microbatches": evolve(DP_TP, microbatches=3),
    "two key/value heads on four ranks": Plan(mesh="tp = 4", shard=f"{NO_DP}  seq over tp"),
    "two key/value heads on four ranks, no sequence": Plan(mesh="dp = 2  tp = 4", shard=ALL_OVER_TP, ranks=2),
    "one key/value head": evolve(DP_TP, dims=DIMS.replace("kv_heads = 2", "kv_heads = 1")),
    "key/value heads of the query's number": evolve(DP_TP, dims=DIMS.replace("kv_heads = 2", "kv_heads = 4")),
    "heads over tp, key/value heads in a later rule": evolve(
        DP_TP, shard="batch over dp  vocab, heads, ffn over tp  kv_heads over tp  seq over tp"
    ),
    "heads over tp, key/value heads whole": evolve(DP_TP, shard="batch over dp  vocab, heads, ffn over tp"),
    "vocabulary whole": evolve(DP_TP, shard="batch over dp  heads, kv_heads, ffn over tp  seq over tp"),
    "vocabulary alone": evolve(DP_TP, shard="batch over dp  vocab over tp"),
    "sequence before vocabulary": evolve(
        DP_TP, shard="batch over dp  heads, kv_heads, ffn over tp  seq over tp  vocab over tp"
    ),
    "ffn alone": Plan(mesh="dp = 2  tp = 2", shard="batch over dp  ffn over tp", ranks=2),
    "sequence alone": Plan(f"{START} repeat layers {{ {MLP} }} {HEAD}", "tp = 2", "seq over tp"),
    "batch and sequence": Plan(
        f"{START} repeat layers {{ {MLP} }} {HEAD}", "dp = 2  cp = 2", "batch over dp  seq over cp", ranks=2
    ),
    "batch over the tensor axis too": Plan(mesh="dp = 2  tp = 2", shard=f"{NO_DP}  batch over dp, tp", ranks=4),
    "two tensor axes": Plan(mesh="tp = 2  ep = 2", shard="vocab, heads, kv_heads over tp  ffn over ep  seq over tp"),
    "parallel block": evolve(DP_TP, body=PARALLEL_BLOCK, shard=ALL_OVER_TP),
    "parallel block, sequence": evolve(DP_TP, body=PARALLEL_BLOCK),
    "tied embedding": evolve(DP_TP, body=LLAMA.replace("@ head[hidden -> vocab]", "@ wte")),
    "tied embedding, vocabulary whole": evolve(
        DP_TP,
        body=LLAMA.replace("@ head[hidden -> vocab]", "@ wte"),
        shard="batch over dp  heads, kv_heads, ffn over tp  seq over tp",
    ),
    "captured value": evolve(
        DP_TP, body=f"{START} c = rmsnorm(x, norm0[hidden], eps) repeat layers {{ x = x + c * silu(x) {MLP} }} {HEAD}"
    ),
    "captured value alone": evolve(
        DP_TP, body=f"{START} repeat layers {{ y = {SMALL_MLP} }} {HEAD}".replace("y =", "x = x +")
    ),
    "captured parameter": evolve(
        DP_TP,
        body=f"{START} x = rmsnorm(x, g[hidden], eps) repeat layers {{ x = x + rmsnorm(x, g, eps) {MLP} }} {HEAD}",
    ),
    "captured matrix": evolve(
        DP_TP,
        body=f"{START} y = x @ w[hidden -> ffn] repeat layers {{ x = x + silu(x @ w) @ w_out[ffn -> hidden] }} {HEAD}",
    ),
    "captured sharded value": evolve(
        DP_TP,
        body=f"{START} y = x @ w[hidden -> ffn] repeat layers {{ x = x + silu(y) @ w_out[ffn -> hidden] }} {HEAD}",
    ),
    "carried sharded value": evolve(
        DP_TP,
        body=f"{START} y = x @ w[hidden -> ffn] repeat layers {{ y = y + silu(y) x = x + y @ w_out[ffn -> hidden] }} {HEAD}",
    ),
    "nested repeats": evolve(DP_TP, body=f"{START} repeat blocks {{ repeat layers {{ {MLP} }} {ATTENTION} }} {HEAD}"),
    "nested repeats, captured": evolve(
        DP_TP,
        body=f"""{START} c = rmsnorm(x, norm0[hidden], eps)
        repeat blocks {{ d = c * s[hidden]  repeat layers {{ x = x + silu(x * d) * t[hidden] }} {MLP} }} {HEAD}""",
    ),
    "several repeats": evolve(DP_TP, body=f"{START} repeat layers {{ {ATTENTION} }} repeat blocks {{ {MLP} }} {HEAD}"),
    "a repeat of one": evolve(DP_TP, dims=DIMS.replace("layers = 2", "layers = 1")),
    "no repeat": evolve(DP_TP, body=f"{START} {ATTENTION} {MLP} {HEAD}"),
    "parameter used twice": evolve(
        DP_TP,
        body=f"{START} repeat layers {{ m = x @ w[hidden -> ffn]  x = x + silu(m + silu(x) @ w) @ u[ffn -> hidden] }} {HEAD}",
    ),
    "arithmetic on parameters": evolve(
        DP_TP, body=f"{START} repeat layers {{ {MLP} + silu(b[hidden] * c[hidden]) * d[hidden] }} {HEAD}"
    ),
    "parameter matrix made of others": evolve(
        DP_TP, body=f"{START} x = x + silu(x @ w[hidden -> ffn]) @ (u[ffn -> hidden] * s[ffn, hidden]) {HEAD}"
    ),
    "bias of a column": evolve(
        DP_TP, body=f"{START} x = x + silu(x @ w[hidden -> ffn] + b[ffn]) @ u[ffn -> hidden] {HEAD}"
    ),
    "bias of a row": evolve(
        DP_TP, body=f"{START} x = x + silu(x @ w[hidden -> ffn]) @ u[ffn -> hidden] + b[hidden] {HEAD}"
    ),
    "scale of a row": evolve(
        DP_TP, body=f"{START} x = x + silu(x @ w[hidden -> ffn]) @ u[ffn -> hidden] * b[hidden] {HEAD}"
    ),
    "pending sum used twice": evolve(
        DP_TP, body=f"{START} y = silu(x @ w[hidden -> ffn]) @ u[ffn -> hidden]  x = x + y + silu(y) {HEAD}"
    ),
    "pending sum added to itself": evolve(
        DP_TP, body=f"{START} y = silu(x @ w[hidden -> ffn]) @ u[ffn -> hidden]  x = y + y {HEAD}"
    ),
    "square": evolve(DP_TP, body=f"{START} y = x * x  x = y * y + x {HEAD}"),
    "positions learned": evolve(
        DP_TP, body=f"x = embedding(tokens, wte[vocab, hidden]) + wpe[seq, hidden] {MLP} {HEAD}"
    ),
    "clipped": evolve(DP_TP, clip=0.1),
    "not clipped": evolve(DP_TP, clip=100.0),
}
"""What compiles; what the compiler refuses is tested with its diagnostics."""


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


@pytest.mark.parametrize("body", dict.fromkeys(plan.body for plan in PLANS.values()))
def test_one_device_equals_calculus(body: str) -> None:
    """Loss and norm are what they should be, and gradients agree with the forward program's derivative."""
    plan = Plan(body)
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
    assert outcome.loss == pytest.approx(sum(losses).real / count, rel=1e-12)
    assert slope == pytest.approx(sum(losses).imag / 1e-30 / count, rel=1e-10)
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


@settings(derandomize=True, max_examples=60, deadline=None)
@given(plans())
def test_random_plans_equal_one_device(plan: Plan) -> None:
    """Either the compiler refuses the sharding, or it is right."""
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
    """One maximum and two small sums for the loss, one sum for the embedding; backward only `f` in front of the head."""
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

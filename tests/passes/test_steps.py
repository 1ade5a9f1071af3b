"""Whole steps: what no proof says of them: calculus, stages on the way, types of gradients, counts
of collectives.

Non-goals: that sharded steps equal the single device's (`tests/proof/test_proof.py`, which has the
same plans); single ops and coercions (`test_op_rules`, `test_coercions`); the emitted program.
"""

import numpy as np
import pytest
from attrs import evolve

from helpers.plan_table import DP_TP, NO_DP, PLANS
from helpers.small_plans import (
    ALL_OVER_TP,
    ATTENTION,
    DIMS,
    HEAD,
    MLP,
    PARALLEL_BLOCK,
    START,
    WITH_SEQ,
    Plan,
)
from scalec.compiler.ir import Leave, Region, Type, Value, base, walk
from scalec.compiler.ir.placements import dual_type
from scalec.compiler.proof.inputs import Inputs, scene
from scalec.compiler.proof.interpreter import Outcome
from scalec.compiler.proof.prime_field import Field
from scalec.compiler.proof.proof import case_of, unequal
from scalec.compiler.proof.reference import Reference
from scalec.compiler.proof.small_sizes import meshes
from scalec.compiler.proof.tensors import Tensor
from scalec.testing import assert_equal_step, compiles
from scalec.testing.float64 import Reals

# ---- the single-device step, which all others are held against


def single(plan: Plan, nudge: float = 0.0) -> tuple[Inputs, Outcome]:
    """The step of a model in float64; `nudge` is how far its parameters go in an imaginary
    direction.
    """
    model, numbers = plan.program("resolve"), Reals(0)
    start = scene(model, numbers)
    params = {
        name: _along(value, name, nudge) if nudge else value for name, value in start.params.items()
    }
    start = evolve(start, params=params)
    return start, Reference(model, numbers).run(start)


def _along(value: Tensor, name: str, far: float) -> Tensor:
    return Tensor(value.dims, value.array + far * 1j * direction(name, value.array.shape))


def _slope(value: Tensor, name: str, grad: Tensor) -> float:
    """⟨grad, v⟩, with the dims of both in one order."""
    along = Tensor(value.dims, direction(name, value.array.shape))
    return float((grad.array * along.onto(grad.dims)).sum())


def direction(
    name: str, shape: tuple[int, ...]
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Random numbers of a name."""
    return np.random.default_rng([*name.encode()]).normal(size=shape)


def square(x: Tensor) -> float:
    return float((x.array**2).sum())


@pytest.mark.parametrize(
    "name", {plan.body: name for name, plan in reversed(PLANS.items())}.values()
)
def test_the_single_device_step_is_calculus(name: str) -> None:
    """⟨gradients, v⟩ is the loss' derivative along v, by a complex step (Squire and Trapp 1998)."""
    of, tiny = PLANS[name], 1e-30
    plan = Plan(of.body, inputs=of.inputs, data=of.data)
    (start, outcome), (_, nudged) = single(plan), single(plan, tiny)
    slope = sum(_slope(start.params[name], name, grad) for name, grad in outcome.gradients.items())
    assert slope == pytest.approx(np.imag(nudged.metrics["loss"].array.item()) / tiny, rel=1e-10)
    assert outcome.metrics["count"].array.item() == (start.inputs["labels"].array >= 0).sum()
    assert outcome.metrics["norm"].array.item() ** 2 == pytest.approx(
        sum(map(square, outcome.gradients.values()))
    )


def test_clipping_bounds_the_step() -> None:
    start, outcome = single(PLANS["clipped"])
    ends = {name: value.onto(start.params[name].dims) for name, value in outcome.parameters.items()}
    moves = [Tensor(value.dims, value.array - ends[name]) for name, value in start.params.items()]
    assert outcome.metrics["norm"].array.item() > 0.1
    rate = 0.5  # of the descent that an update is in float64
    assert sum(map(square, moves)) ** 0.5 == pytest.approx(rate * 0.1, rel=1e-12)


# ---- steps that no table of right plans has


@pytest.mark.parametrize(
    "name", ["data, tensor, sequence", "two key/value heads on four ranks", "tied embedding"]
)
def test_steps_are_right_before_their_buckets_are_fused(name: str) -> None:
    program, model = PLANS[name].program("place_state"), PLANS[name].program("resolve")
    for axes in meshes(program):
        assert unequal(case_of(program, model, axes), Field(2, len(axes))) == []


DOUBTFUL = {
    "key/value heads alone": evolve(DP_TP, shard="batch over dp  kv_heads over tp"),
    "heads alone": evolve(DP_TP, shard="batch over dp  vocab, heads, ffn over tp"),
    "sequence before vocabulary": evolve(
        DP_TP, shard="batch over dp  heads, kv_heads, ffn over tp  seq over tp  vocab over tp"
    ),
    "key/value heads before heads": evolve(
        DP_TP, shard="batch over dp  kv_heads over tp  heads over tp"
    ),
    "head dim": evolve(DP_TP, shard="batch over dp  head_dim over tp"),
    "hidden": evolve(DP_TP, shard="batch over dp  hidden over tp"),
    "sequence in attention": Plan(mesh="cp = 2", shard="seq over cp"),
    "key/value heads over the inner axis": Plan(
        mesh="a = 2  b = 2", shard="heads over a, b  kv_heads over b"
    ),
    "key/value heads over the outer axis": Plan(
        mesh="a = 2  b = 2", shard="heads over a, b  kv_heads over a"
    ),
    "a carried value replaced": evolve(
        DP_TP,
        body=f"{START} y = silu(x) repeat layers {{ y = silu(x * c[hidden])  x = x + y }} x = x"
        f" + y {HEAD}",
    ),
    "matrices of other dims": evolve(
        DP_TP,
        body=f"{START} x = x + silu(x @ w[hidden -> ffn]) @ (u[ffn -> hidden] * s[ffn, hidden])"
        f" {HEAD}",
    ),
    "a parameter without gradient": Plan(f"{START} y = x @ w[hidden -> ffn] {HEAD}"),
}


@pytest.mark.parametrize("name", DOUBTFUL)
def test_refused_or_right(name: str) -> None:
    """A diagnostic or the right numbers, and never a broken program."""
    text = DOUBTFUL[name].text()
    if compiles(text):
        assert_equal_step(text)


# ---- types


@pytest.mark.sample(37)
@pytest.mark.parametrize("name", PLANS)
def test_gradients_are_placed_by_the_dual(name: str) -> None:
    """Every `d_x` has the type that is dual to one that a value named `x` has; that of a stack
    may be its slices'.
    """
    program = PLANS[name].program()
    forward: dict[str, set[Type]] = {}
    for value in values(program.region):
        forward.setdefault(base(value.name), set()).add(evolve(value.type, dtype=""))
    forward = {
        name: types | {p.type for p in program.params if p.name == name}
        for name, types in forward.items()
    }
    for value in values(program.region):
        known = (
            forward.get(base(value.name).removeprefix("d_"), set())
            if value.name.startswith("d_")
            else set()
        )
        dims, places = value.type.dims, value.type.places
        alike = {type for type in known if type.dims == dims}
        slices = {type for type in known if type.dims == dims[1:]}
        duals = {dual_type(type).places for type in alike | slices}
        assert not alike or places in duals, f"{value.name} is {value.type}"


def values(region: Region) -> list[Value]:
    """All values bound in a region."""
    found = [arg.value for arg in region.args] + list(region.results)
    for stmt in region.body:
        found += values(stmt) if isinstance(stmt, Region) else stmt.outputs
    return found


def test_key_value_heads_are_split_as_far_as_they_go() -> None:
    """Two of them over eight ranks: each rank holds one, and one of eight query heads."""
    program = PLANS["two key/value heads on eight ranks"].program()
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
    for op in walk(ops):  # pyright: ignore[reportArgumentType]
        if op.kind == "coerce" and any(name.split("_")[0] == axis for name in op.names("axes")):
            word = COLLECTIVES.get(f"{str(op.get('from'))[0]} {str(op.get('to'))[0]}")
            found |= {word: found.get(word, 0) + 1} if word else {}
    return ", ".join(f"{word} {count}" for word, count in sorted(found.items()))


def blocks(plan: Plan) -> tuple[Region, Region]:
    """The forward and backward blocks of a microbatch."""
    program = plan.program()
    return program.forward, program.backward


def split(block: Region) -> tuple[list[object], list[object]]:
    """The statements of a block outside of repeats, and those of its one repeat."""
    (repeat,) = (stmt for stmt in block.body if isinstance(stmt, Region))
    return [stmt for stmt in block.body if stmt is not repeat], list(repeat.body)


KV = DIMS.replace("kv_heads = 2", "kv_heads = 1")
MEAN = f"{START} repeat layers {{ {ATTENTION} {MLP} x = x - mean(x, over=[hidden]) }} {HEAD}"
"""Of a mean's operand backward needs the shape alone, for which nothing is done again."""

LAYERS = {
    "tp": (Plan(mesh="tp = 2", shard=NO_DP), "reduce 2", "reduce 2"),
    "tp with few key/value heads": (
        Plan(mesh="tp = 2", shard=NO_DP, dims=KV),
        "reduce 2",
        "reduce 2",
    ),
    "dp, tp": (Plan(mesh="dp = 2  tp = 2", shard=ALL_OVER_TP, ranks=2), "reduce 2", "reduce 2"),
    "tp, sequence": (DP_TP, "gather 2, scatter 2", "gather 2, scatter 2"),
    "tp, sequence with few key/value heads": (
        evolve(DP_TP, dims=KV),
        "gather 2, scatter 2",
        "gather 2, scatter 2",
    ),
    "tp, recompute": (
        evolve(DP_TP, train="recompute = full"),
        "gather 2, scatter 2",
        "gather 4, scatter 3",
    ),
    "tp, recompute up to a mean": (
        evolve(DP_TP, body=MEAN, train="recompute = full"),
        "gather 2, scatter 2",
        "gather 4, scatter 3",
    ),
    "tp, regather": (
        evolve(DP_TP, train="gathered = regather"),
        "gather 2, scatter 2",
        "gather 4, scatter 2",
    ),
    "tp, parallel block": (
        evolve(DP_TP, body=PARALLEL_BLOCK, shard=ALL_OVER_TP),
        "reduce 1",
        "reduce 1",
    ),
    "tp, sequence, parallel block": (
        evolve(DP_TP, body=PARALLEL_BLOCK),
        "gather 1, scatter 1",
        "gather 1, scatter 1",
    ),
    "dp": (Plan(mesh="dp = 2", shard="batch over dp", ranks=2), "", ""),
}


@pytest.mark.parametrize("name", LAYERS)
def test_collectives_of_a_layer(name: str) -> None:
    plan, forward, backward = LAYERS[name]
    assert tuple(counted(split(block)[1]) for block in blocks(plan)) == (forward, backward)
    assert [counted(block.body, "dp") for block in blocks(plan)] == ["", ""]


def test_collectives_of_embedding_and_loss() -> None:
    """One maximum and two small sums for the loss, one sum for the embedding; backward only `f`
    before the head.
    """
    forward, backward = blocks(Plan(mesh="tp = 2", shard=NO_DP))
    assert counted(split(forward)[0]) == "reduce 4"
    assert counted(split(backward)[0]) == "reduce 1"
    sequence = blocks(PLANS["tensor, sequence"])
    assert counted(split(sequence[0])[0]) == "gather 1, reduce 3, scatter 1"
    assert counted(split(sequence[1])[0]) == "gather 1, scatter 1"


def test_smoothing_and_a_z_loss_need_no_more_collectives() -> None:
    smoothed, plain = (
        [counted(split(block)[0]) for block in blocks(plan)]
        for plan in (PLANS["smoothing and z-loss"], DP_TP)
    )
    assert smoothed == plain == ["gather 1, reduce 3, scatter 1", "gather 1, scatter 1"]


def test_no_rank_holds_all_logits() -> None:
    forward, backward = blocks(DP_TP)
    logits = [
        v.type
        for v in (*values(forward), *values(backward))
        if "vocab" in v.type.dims and "seq" in v.type.dims
    ]
    assert logits
    assert all(type.axes_of("vocab") == ("tp",) for type in logits)


@pytest.mark.parametrize(
    ("shard", "want"),
    [(ALL_OVER_TP, {("dp",): 2}), (WITH_SEQ, {("dp",): 1, ("dp", "tp"): 1})],
    ids=["tp", "tp, sequence"],
)
def test_one_reduction_of_gradients_per_step_and_placement(
    shard: str, want: dict[tuple[str, ...], int]
) -> None:
    """One bucket per placement; over tp only under sequence parallelism, and then only the
    norms'.
    """
    program = evolve(DP_TP, shard=shard).program()
    made = {value.name: op for op in program.ops for value in op.outputs}
    reduced = [
        op.names("axes")
        for op in made.values()
        if op.kind == "coerce" and made.get(op.inputs[0]) and made[op.inputs[0]].kind == "pack"
    ]
    assert {axes: reduced.count(axes) for axes in reduced} == want
    assert len(program.buckets) == sum(want.values())


def test_a_turn_that_is_done_again_keeps_what_enters_it() -> None:
    """Forward hands backward a stack of what each layer began with, and of nothing else."""
    plain, again = (_stacks(evolve(DP_TP, train=f"recompute = {how}")) for how in ("none", "full"))
    assert len(plain) > 10
    assert again == ["x"]


def test_an_op_that_is_done_again_keeps_its_operands() -> None:
    plain, again = (
        _stacks(evolve(DP_TP, train=f"recompute = {how}"))
        for how in ("none", "selective(attention)")
    )
    plain.remove("_o")
    assert again == plain
    assert {"q", "k", "v"} <= {*again}


def _stacks(plan: Plan) -> list[str]:
    forward, _ = blocks(plan)
    (repeat,) = (stmt for stmt in forward.body if isinstance(stmt, Region))
    return [base(end.name) for end in repeat.yields if end.leave is Leave.STACK]

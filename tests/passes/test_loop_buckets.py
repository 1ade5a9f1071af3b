"""Buckets of which each layer of a repeat has a buffer of its own: what stands where, and what is
no legal program.

Non-goals: that such steps are right (`tests/proof`), texts of them (`test_text`, of all plans).
"""

from collections import Counter
from collections.abc import Callable

import pytest
from attrs import evolve

from helpers.plan_table import DP_TP, PLANS
from helpers.small_plans import Plan
from scalec.compiler.analysis.verifier import check
from scalec.compiler.ir import Op, Program, Region, Stmt, Type, Value, sharded

APART = "bucket = 300B"


def inside(region: Region, where: str = "step") -> list[tuple[str, Op]]:
    """Every op, and where it stands: in the step, or in a layer of forward or backward."""
    found: list[tuple[str, Op]] = []
    for stmt in region.body:
        if isinstance(stmt, Op):
            found.append((where, stmt))
        else:
            found += inside(stmt, f"{where} layer" if stmt.kind == "repeat" else stmt.kind)
    return found


# ---- what stands where


MOVED = {
    "zero 0 over dp": "layers: begin in backward layer, P→I in step; others: P→I in step",
    "zero 1 over dp": "layers: I→S in step, S→R in step, begin in backward layer, P→S in step; "
    "others: I→S in step, S→R in step, P→S in step",
    "zero 2 over dp": "layers: I→S in step, S→R in step, P→S in backward layer; "
    "others: I→S in step, S→R in step, P→S in step",
    "zero 3 over dp": (
        "layers: I→S in step, S→R in forward layer, S→R in backward layer, P→S in backward"
        " layer; "
        "others: I→S in step, S→R in step, P→S in step"
    ),
    "parameters, optimizer over dp": (
        "layers: I→S in step, S→R in forward layer, S→R in backward layer, "
        "begin in backward layer, P→S in step; others: I→S in step, S→R in step, P→S in step"
    ),
}


@pytest.mark.parametrize("state", MOVED)
def test_each_stage_gathers_and_reduces_in_its_place(state: str) -> None:
    """Over dp, and each once for each of its buckets."""
    program = evolve(DP_TP, state=f"{state}  {APART}").program()
    known = program.types
    words: dict[str, dict[str, Counter[str]]] = {"layers": {}, "others": {}}
    for bucket in program.buckets:
        kind = words["layers" if bucket.layers else "others"]
        for where, op in inside(program.region):
            if op.kind == "begin" and op.get("bucket") == bucket.name:
                kind.setdefault(f"begin in {where}", Counter())[bucket.name] += 1
            elif (
                op.kind == "coerce"
                and bucket.dim in known[op.inputs[0]].dims
                and "dp" in op.names("axes")
            ):
                way = f"{str(op.get('from'))[0]}→{str(op.get('to'))[0]} in {where}"
                kind.setdefault(way, Counter())[bucket.name] += 1
    assert "; ".join(f"{kind}: {', '.join(ways)}" for kind, ways in words.items()) == MOVED[state]
    for kind, ways in words.items():
        own = {
            bucket.name for bucket in program.buckets if bool(bucket.layers) == (kind == "layers")
        }
        assert len(own) > 1
        assert all(count == dict.fromkeys(own, 1) for count in ways.values()), ways


def test_a_small_stack_is_reduced_with_what_stands_outside() -> None:
    program = evolve(DP_TP, state="zero 0 over dp").program()
    assert [bucket.layers for bucket in program.buckets] == [()] * 2
    assert not [op for _, op in inside(program.region) if op.kind == "begin"]


def test_turns_in_turns_have_a_buffer_each() -> None:
    program = PLANS["shared parameters, nested repeats"].program()
    layers = {param: bucket.layers for bucket in program.buckets for param in bucket.params}
    assert layers["w_up"] == ("blocks", "layers")
    assert layers["wq"] == ("blocks",)
    assert layers["head"] == ()


# ---- what is not legal


def changed(
    program: Program, change: Callable[[Op], tuple[Op, ...]], of: Callable[[Op], bool]
) -> Program:
    """The program with the first op of which `of` is true replaced."""
    done: list[Op] = []

    def body(stmts: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        found: list[Stmt] = []
        for stmt in stmts:
            if isinstance(stmt, Region):
                found.append(evolve(stmt, body=body(stmt.body)))
            elif not done and of(stmt):
                done.append(stmt)
                found.extend(change(stmt))
            else:
                found.append(stmt)
        return tuple(found)

    program = evolve(program, region=evolve(program.region, body=body(program.region.body)))
    assert done
    return program


def is_begin(op: Op) -> bool:
    return op.kind == "begin"


def is_turns_unpack(op: Op) -> bool:
    return op.kind == "unpack" and str(op.get("bucket")).startswith("layers")


def is_gather(op: Op) -> bool:
    return (
        op.kind == "coerce"
        and op.inputs[0].startswith("w_layers")
        and str(op.get("from")).startswith("S")
    )


def is_turns_reduction(op: Op) -> bool:
    return (
        op.kind == "coerce" and op.inputs[0].startswith("g_layers") and str(op.get("from")) == "P"
    )


def stacked(op: Op) -> tuple[Op]:
    """What gives the parameters of all layers."""
    return (
        evolve(op, outputs=tuple(Value(v.name, v.type.stack_along("layers")) for v in op.outputs)),
    )


def other_bucket(op: Op) -> tuple[Op]:
    return (evolve(op, attrs=(("bucket", "layers.matrices_2"),)),)


def renamed(op: Op, source: str) -> Op:
    return evolve(
        op, inputs=(source,), outputs=(Value(f"{op.outputs[0].name}.9", op.outputs[0].type),)
    )


WHOLE, TURN = "zero 1 over dp", "zero 3 over dp"
WRONG: dict[str, tuple[str, Callable[[Op], tuple[Op, ...]], Callable[[Op], bool]]] = {
    "begun in another order": (WHOLE, lambda op: (evolve(op, inputs=op.inputs[::-1]),), is_begin),
    "begun in part": (WHOLE, lambda op: (evolve(op, inputs=op.inputs[:-1]),), is_begin),
    "begun for another bucket": (WHOLE, other_bucket, is_begin),
    "begun for a bucket that is not there": (
        WHOLE,
        lambda op: (evolve(op, attrs=(("bucket", "dq"),)),),
        is_begin,
    ),
    "begun twice": (WHOLE, lambda op: (op, op), is_begin),
    "begun with a result": (
        WHOLE,
        lambda op: (evolve(op, outputs=(Value("b", Type("f64", ())),)),),
        is_begin,
    ),
    "parameters of all layers out of one layer's buffer": (TURN, stacked, is_turns_unpack),
    "parameters of another bucket": (TURN, other_bucket, is_turns_unpack),
    "parameters exchanged": (
        TURN,
        lambda op: (evolve(op, outputs=op.outputs[::-1]),),
        is_turns_unpack,
    ),
    "a gather left out": (TURN, lambda op: (), is_gather),
    "gathered twice": (TURN, lambda op: (op, renamed(op, op.outputs[0].name)), is_gather),
    "a reduction left out": (TURN, lambda op: (), is_turns_reduction),
    "reduced twice": (TURN, lambda op: (op, renamed(op, op.outputs[0].name)), is_turns_reduction),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_turns_are_refused(what: str) -> None:
    state, change, of = WRONG[what]
    program = evolve(DP_TP, state=f"{state}  {APART}").program()
    check(program)
    with pytest.raises(AssertionError, match="schedule_pipeline"):
        check(changed(program, change, of))


def test_what_begins_in_a_turn_begins_once_in_it() -> None:
    """Not in each layer of a repeat inside of it, where its gradient is known too."""
    program = evolve(
        PLANS["shared parameters, nested repeats"], state=f"zero 1 over dp  {APART}"
    ).program()
    (begin,) = [
        op for _, op in inside(program.region) if op.kind == "begin" and "d_wq" in op.inputs
    ]
    without = changed(program, lambda op: (), lambda op: op is begin)
    with pytest.raises(AssertionError, match="not of what the step packs"):
        check(
            changed(
                without,
                lambda op: (op, begin),
                lambda op: [v.name for v in op.outputs] == ["d_w_down"],
            )
        )


def test_a_buffer_of_all_turns_has_the_size_of_its_turns() -> None:
    program = evolve(DP_TP, state=f"{TURN}  {APART}").program()
    (first, *others) = program.buckets
    flat = evolve(first, type=Type(first.type.dtype, (first.dim,), (("dp", sharded(first.dim)),)))
    with pytest.raises(AssertionError, match="schedule_pipeline"):
        check(evolve(program, buckets=(flat, *others)))


def test_a_plan_without_shared_state_has_no_turns() -> None:
    assert not [bucket for bucket in Plan().program().buckets if bucket.layers]

"""The IR's text reads back as the same program at every stage, and `wellformed` refuses corrupted
programs.

Non-goals: what programs compute (`tests/proof`).
"""

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.plan_table import DP_TP, PLANS
from helpers.small_plans import HEAD, MLP, START, Plan
from scalec.compiler.analysis.verifier import check
from scalec.compiler.ir import Op, Program, Region, Stmt, Value
from scalec.compiler.ir.parser import read_ir
from scalec.compiler.ir.printer import print_ir
from scalec.compiler.ops import OPS
from scalec.compiler.syntax.diagnostics import PlanError
from scalec.compiler.syntax.source import Source, is_ir
from scalec.compiler.tuning.lowering import PASS_NAMES, compile_plan, lower
from scalec.testing import plans

AT_ALL_STAGES = [
    "one device",
    "data, tensor, sequence",
    "two key/value heads on four ranks",
    "regather",
    "bf16",
    "nested repeats, captured",
    "tied embedding",
    "clipped",
]


def again(program: Program) -> Program:
    """The program read from its text."""
    return read_ir(Source("tiny.ir", print_ir(program)))


def stages(plan: Plan) -> Iterator[Program]:
    """The program after each pass."""
    program = plan.program(PASS_NAMES[0])
    for stage in PASS_NAMES:
        program = lower(program, stage)
        yield program


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", AT_ALL_STAGES)
def test_reads_back_at_every_stage(name: str) -> None:
    for program in stages(PLANS[name]):
        assert again(program) == program, program.after


@pytest.mark.sample(30)
@pytest.mark.parametrize("name", [name for name in PLANS if name not in AT_ALL_STAGES])
def test_reads_back(name: str) -> None:
    program = PLANS[name].program()
    assert again(program) == program


@settings(max_examples=15)
@given(plans())
def test_random_programs_read_back(plan: str) -> None:
    program = compile_plan(Source("random.scale", plan))
    assert again(program) == program


@pytest.mark.sample(14)
@pytest.mark.parametrize("stage", PASS_NAMES)
@pytest.mark.parametrize("name", ["data, tensor, sequence", "two key/value heads on four ranks"])
def test_lowering_goes_on_from_text(name: str, stage: str) -> None:
    assert lower(again(PLANS[name].program(stage))) == PLANS[name].program()


def test_a_plan_with_a_colon_in_its_name_reads_back() -> None:
    text = print_ir(PLANS["tied embedding"].program())
    path = text[text.index("!") + 1 :].partition(":")[0]
    renamed = text.replace(f"!{path}:", "!a: 12:b.scale:")
    assert print_ir(read_ir(Source("tiny.ir", renamed))) == renamed


def test_text_is_known_from_plans() -> None:
    assert is_ir(print_ir(DP_TP.program()))
    assert not is_ir(DP_TP.text())


def test_text_is_the_same_each_time() -> None:
    assert print_ir(DP_TP.program()) == print_ir(DP_TP.program())


@pytest.mark.parametrize("line", ["program tiny after resolve", "", "}"])
def test_what_is_not_ir_is_a_diagnostic(line: str) -> None:
    text = print_ir(DP_TP.program("resolve")).replace("model (", f"{line}\nbroken (")
    with pytest.raises(PlanError) as caught:
        read_ir(Source("tiny.ir", text))
    assert "E0190" in str(caught.value)


# ---- text edited by hand

TOKEN = re.compile(r"\w+|[^\s\w]")
ODD = ["", "0", "-1", "0.5", "9" * 5000, "1e999", "exit(1)", "x.1", "nowhere", "I", "S"]


SHORT = evolve(DP_TP, body=f"{START} repeat layers {{ {MLP} }} {HEAD}")


@cache
def printed(stage: str, plan: Plan = DP_TP) -> str:
    return print_ir(plan.program(stage))


@st.composite
def edits(draw: st.DrawFn) -> str:
    """Printed IR with one token replaced by another of the text or by something odd."""
    text = printed(draw(st.sampled_from(["propagate", "fuse_buckets"])), SHORT)
    tokens = list(TOKEN.finditer(text, text.index("\nprogram ")))
    old = draw(st.sampled_from(tokens))
    new = draw(st.sampled_from(ODD) | st.sampled_from(tokens).map(lambda token: token[0]))
    return text[: old.start()] + new + text[old.end() :]


@settings(max_examples=50)
@given(edits())
def test_edited_text_is_refused_or_compiles(text: str) -> None:
    try:
        program = read_ir(Source("tiny.ir", text))
    except PlanError:
        return
    if program.after in PASS_NAMES and legal(program):
        with suppress(PlanError):
            lower(program)


def legal(program: Program) -> bool:
    try:
        check(program)
    except AssertionError:
        return False
    return True


WRONG_LINES = {
    "an axis left out": ("propagate", "axis dp = 2 of dp", "#"),
    "work on no axis": ("propagate", '"dp:batch"', '"d,:batch"'),
    "code for an initial value": ("resolve", "~ normal(0.02)", "~ exit(1)"),
    "an unknown axis in a type": ("fuse_buckets", "batch@dp", "batch@nowhere"),
    "digits without end": ("resolve", "dim hidden = 4", "dim hidden = " + "4" * 5000),
    "dims that the settings contradict": ("resolve", "dim seq = 4", "dim seq = 8"),
    "clipping that the settings contradict": ("fuse_buckets", "<max=0.0>", "<max=1.0>"),
    "more contracted dims than there are": ("resolve", "inner 1", "inner 8"),
    "a coercion without an end": ("fuse_buckets", ", to=R>", ">"),
    "a dim twice": ("resolve", "dim seq = 4", "dim seq = 4 !tiny.scale:1 dim seq = 4"),
    "a name of a rebinding": ("resolve", "program tiny", "program tiny.1"),
    "a model without a loss": ("resolve", "  yield last loss\n", ""),
    "regions without end": (
        "resolve",
        "  yield last loss\n",
        "repeat layers () !x:1 { " * 500 + "}" * 500 + "  yield last loss\n",
    ),
}


@pytest.mark.parametrize("mistake", WRONG_LINES)
def test_wrong_text_is_refused(mistake: str) -> None:
    stage, old, new = WRONG_LINES[mistake]
    assert old in printed(stage)
    with pytest.raises((PlanError, AssertionError), match=f"E0190|^{stage}: "):
        check(read_ir(Source("tiny.ir", printed(stage).replace(old, new, 1))))


def test_every_op_says_what_it_takes() -> None:
    assert [name for name, entry in OPS.items() if not entry.operands] == [
        "one",
        "zeros",
        "loss_scale",
        "loss_limit",
    ]


# ---- corrupted programs


Rewrite = Callable[[Op], Op | None]


def rewritten(program: Program, rewrite: Rewrite) -> Program:
    """The program with the first op rewritten (or left out) that `rewrite` does not return as
    it is.
    """
    done: list[Op] = []

    def body(stmts: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        found: list[Stmt] = []
        for stmt in stmts:
            if isinstance(stmt, Region):
                found.append(evolve(stmt, body=body(stmt.body)))
                continue
            new = stmt if done else rewrite(stmt)
            done.extend([stmt] if new is not stmt else [])
            found.extend([new] if new else [])
        return tuple(found)

    program = evolve(program, region=evolve(program.region, body=body(program.region.body)))
    assert done, "nothing was rewritten"
    return program


def drop_coercion(op: Op) -> Op | None:
    return None if op.kind == "coerce" else op


def bypass_coercion(kind: str) -> Callable[[Program], Program]:
    """The first op of a kind takes an operand as it was before its coercion."""

    def corrupt(program: Program) -> Program:
        before: dict[str, str] = {}

        def rewrite(op: Op) -> Op:
            if op.kind == "coerce":
                before[op.outputs[0].name] = op.inputs[0]
            if op.kind == kind and any(name in before for name in op.inputs):
                return evolve(op, inputs=tuple(before.get(name, name) for name in op.inputs))
            return op

        return rewritten(program, rewrite)

    return corrupt


def swap_axes(op: Op) -> Op:
    """The coercion of another axis."""
    if op.kind != "coerce" or op.names("axes") not in (("dp",), ("tp",)):
        return op
    other = ("tp",) if op.names("axes") == ("dp",) else ("dp",)
    return evolve(op, attrs=(("axes", other), *op.attrs[1:]))


def rename_result(op: Op) -> Op:
    return evolve(op, outputs=(Value("renamed", op.outputs[0].type),)) if op.kind == "silu" else op


def bind_twice(op: Op) -> Op:
    return (
        evolve(op, outputs=(Value(op.inputs[0], op.outputs[0].type),)) if op.kind == "silu" else op
    )


def forget_placements(op: Op) -> Op:
    first = op.outputs[0]
    return (
        evolve(op, outputs=(Value(first.name, evolve(first.type, places=())),))
        if op.kind == "silu"
        else op
    )


def swap_dims(op: Op) -> Op:
    first = op.outputs[0]
    reversed_ = evolve(first.type, dims=first.type.dims[::-1])
    return evolve(op, outputs=(Value(first.name, reversed_),)) if op.kind == "silu" else op


def other_ends(op: Op) -> Op:
    """A coercion the other way round."""
    if op.kind != "coerce":
        return op
    return evolve(op, attrs=(op.attrs[0], ("from", op.get("to")), ("to", op.get("from"))))


def fewer_operands(op: Op) -> Op:
    return evolve(op, inputs=op.inputs[:1]) if op.kind == "mul" else op


def first_op(rewrite: Rewrite) -> Callable[[Program], Program]:
    return lambda program: rewritten(program, rewrite)


def in_first_loop(change: Callable[[Region], Region]) -> Callable[[Program], Program]:
    def body(stmts: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        return tuple(changed(stmt) if isinstance(stmt, Region) else stmt for stmt in stmts)

    def changed(region: Region) -> Region:
        return change(region) if region.kind == "repeat" else evolve(region, body=body(region.body))

    return lambda program: evolve(
        program, region=evolve(program.region, body=body(program.region.body))
    )


CORRUPTIONS = {
    "a coercion dropped": first_op(drop_coercion),
    "a coercion in front of a product bypassed": bypass_coercion("contract"),
    "a coercion in front of a norm bypassed": bypass_coercion("rmsnorm"),
    "a coercion in front of the loss bypassed": bypass_coercion("token_loss"),
    "a coercion in front of an update bypassed": bypass_coercion("update"),
    "a coercion over another axis": first_op(swap_axes),
    "a coercion the other way round": first_op(other_ends),
    "a name that is not bound": first_op(rename_result),
    "a name bound twice": first_op(bind_twice),
    "placements forgotten": first_op(forget_placements),
    "dims in another order": first_op(swap_dims),
    "an operand left out": first_op(fewer_operands),
    "a carried value left out": in_first_loop(
        lambda region: evolve(region, yields=region.yields[1:])
    ),
    "a slice taken of another dim": in_first_loop(lambda region: evolve(region, dim="seq")),
    "a result left out": in_first_loop(lambda region: evolve(region, results=region.results[:-1])),
    "an argument from nowhere": in_first_loop(
        lambda region: evolve(
            region, args=(evolve(region.args[0], source="nowhere"), *region.args[1:])
        )
    ),
}


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_corrupted_programs_are_refused(corruption: str) -> None:
    program = DP_TP.program()
    check(program)
    with pytest.raises(AssertionError, match="schedule_pipeline"):
        check(CORRUPTIONS[corruption](program))

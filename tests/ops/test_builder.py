"""Ops that are written have fresh names and the types that their entries infer."""

import pytest

from helpers.plan_table import PLANS
from scalec.compiler.ir import INVARIANT, PARTIAL, REPLICATED, Op, Program, Value
from scalec.compiler.ir.placements import Step
from scalec.compiler.ops import TypingError
from scalec.compiler.ops.builder import OpBuilder


@pytest.fixture
def program() -> Program:
    """A step of data and tensor parallelism."""
    return PLANS["data, tensor"].program("differentiate")


def value(program: Program) -> str:
    """A matrix that is the same on all ranks."""
    return next(
        name for name, type in program.types.items() if not type.places and len(type.dims) == 2
    )


def test_names_are_fresh_also_among_bodies(program: Program) -> None:
    builder, name = OpBuilder(program), value(program)
    inner = builder.inner()
    made = [each.write("add", [name, name], name) for each in (builder, inner, builder)]
    assert len({*made, *program.types}) == len(program.types) + 3
    assert [len(builder.body), len(inner.body)] == [2, 1]
    assert builder.types[made[1]] == program.types[name]


def test_free_names_are_taken(program: Program) -> None:
    loss = program.region.yields[0].name
    assert OpBuilder(program).value(loss, program.types[loss]).name != loss
    assert OpBuilder(
        program, free=[name for name in program.types if name.split(".")[0] == "loss"]
    ).value("loss", program.types[loss]) == Value("loss", program.types[loss])


def test_a_coercion_over_no_axis_and_a_cast_to_the_same_are_none(program: Program) -> None:
    builder, name = OpBuilder(program), value(program)
    dtype = program.types[name].dtype
    assert (
        builder.coerce(name, Step((), INVARIANT, REPLICATED)) == name == builder.cast(name, dtype)
    )
    assert not builder.body
    assert builder.types[builder.cast(name, "f64")].dtype == "f64"


def test_pending_sums_are_done(program: Program) -> None:
    builder, name = OpBuilder(program), value(program)
    pending = builder.coerce(name, Step(("dp",), INVARIANT, PARTIAL))
    assert builder.types[pending].placement_on("dp") == PARTIAL
    assert builder.types[builder.reduce(pending)].placement_on("dp") == INVARIANT


def test_operands_that_do_not_fit_are_told(program: Program) -> None:
    builder, name = OpBuilder(program), value(program)
    pending = builder.coerce(name, Step(("dp",), INVARIANT, PARTIAL))
    with pytest.raises(TypingError, match=r"mixes partial and not|linear"):
        builder.append_typed(
            Op(
                "add",
                (name, pending),
                (Value("sum", program.types[name]),),
                span=program.region.span,
            )
        )

"""Messages on a step that is not the single device's: the first wrong value, and the coercion
that it lacks.
"""

from collections.abc import Mapping

import pytest
from attrs import evolve

from helpers.plan_table import PLANS
from scalec.compiler.ir import Op, Program, Region, Stmt
from scalec.compiler.ir.placements import coercion, coercion_of, ends
from scalec.compiler.proof import verify
from scalec.compiler.syntax.diagnostics import Diagnostic, PlanError
from scalec.compiler.tuning.lowering import PASS_NAMES, lower

TP = "data, tensor"
SP = "data, tensor, sequence"


def programs(name: str) -> tuple[Program, Program]:
    """A plan's program before any placement, and after the last pass."""
    model = PLANS[name].program(PASS_NAMES[0])
    return model, lower(model)


def without(program: Program, op: Op) -> Program:
    """The program without a coercion; what read its result reads its operand."""
    return evolve(program, region=_without(program.region, op, {op.outputs[0].name: op.inputs[0]}))


def _without(region: Region, op: Op, names: Mapping[str, str]) -> Region:
    body = tuple(_reading(stmt, op, names) for stmt in region.body if stmt != op)
    args = tuple(evolve(arg, source=names.get(arg.source, arg.source)) for arg in region.args)
    yields = tuple(evolve(end, name=names.get(end.name, end.name)) for end in region.yields)
    return evolve(region, body=body, args=args, yields=yields)


def _reading(stmt: Stmt, op: Op, names: Mapping[str, str]) -> Stmt:
    if isinstance(stmt, Region):
        return _without(stmt, op, names)
    return evolve(stmt, inputs=tuple(names.get(name, name) for name in stmt.inputs))


def coercions(program: Program) -> list[Op]:
    """All that do something to numbers."""
    same = ("replicate", "invariant")
    return [
        op for op in program.ops if op.kind == "coerce" and coercion_of(op).function not in same
    ]


def get_diagnostic(program: Program, model: Program) -> Diagnostic:
    with pytest.raises(PlanError) as caught:
        verify(program, model)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "E0701"
    return diagnostic


@pytest.mark.long
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", [SP, "two key/value heads on four ranks"])
def test_each_coercion_that_is_left_out_is_the_one_that_is_missed(name: str) -> None:
    """With its operand or what it came from, its placements and its axes: or at least the value
    that goes wrong.
    """
    model, program = programs(name)
    named = 0
    for op in coercions(program):
        diagnostic = get_diagnostic(without(program, op), model)
        source, target = ends(op)
        missing = f"missing or misplaced: {source}→{target} ({coercion(source, target).function})"
        notes = " ".join(note.text for note in diagnostic.notes)
        named += missing in notes
        assert "the first wrong value is" in notes
        assert diagnostic.span.line
    assert named >= 0.9 * len(coercions(program))


@pytest.mark.parametrize(
    ("value", "mesh", "label", "notes"),
    [
        (
            "sum_exp.1",
            "on tp 2 the step is not",
            "`token_loss` cannot take `sum_exp` as P on tp",
            [
                "the first wrong value is `loss`, in forward, microbatches 0",
                "a coercion is missing or misplaced: P→I (all_reduce) of `sum_exp` over tp",
            ],
        ),
        (
            "num_tokens.1",
            "on dp 2 the step is not",
            "`reciprocal` cannot take `num_tokens` as P on dp",
            [
                "the first wrong value is `inv_num_tokens`, in step",
                "a coercion is missing or misplaced: P→I (all_reduce) of `num_tokens` over dp",
            ],
        ),
    ],
)
def test_what_is_said(value: str, mesh: str, label: str, notes: list[str]) -> None:
    model, program = programs(TP)
    op = next(op for op in coercions(program) if op.outputs[0].name == value)
    diagnostic = get_diagnostic(without(program, op), model)
    assert diagnostic.message.startswith(mesh)
    assert diagnostic.label == label
    assert [note.text for note in diagnostic.notes][: len(notes)] == notes


def test_a_gradient_that_is_not_reduced_is_wrong_only_in_the_gradient() -> None:
    model, program = programs(TP)
    buckets = [op for op in coercions(program) if op.outputs[0].name.startswith("g_")]
    assert buckets
    for op in buckets:
        notes = [note.text for note in get_diagnostic(without(program, op), model).notes]
        assert "wrong only in the gradient: forward and loss are those of a single device" in notes


def test_the_smallest_mesh_is_shown() -> None:
    """Three axes, and one of them suffices."""
    model, program = programs("three axes")
    op = next(op for op in coercions(program) if op.outputs[0].name == "sum_exp.1")
    assert (
        get_diagnostic(without(program, op), model).message
        == "on tp 2 the step is not that of a single device"
    )
    op = next(op for op in coercions(program) if op.outputs[0].name == "num_tokens.1")
    assert (
        get_diagnostic(without(program, op), model).message
        == "on replica 2 the step is not that of a single device"
    )


def test_a_step_that_is_wrong_without_ranks() -> None:
    """The backward of silu lost: on one rank too."""
    model, program = programs(SP)
    (slope,) = (op for op in program.ops if dict(op.attrs).get("of") == "silu")
    diagnostic = get_diagnostic(without(program, slope), model)
    assert diagnostic.message == "even on one rank the step is not that of the model"
    assert diagnostic.notes[0].text == "wrong only after the forward"


def test_a_forward_that_is_wrong_without_ranks() -> None:
    model, program = programs(SP)
    (silu,) = (op for op in program.ops if op.kind == "silu")
    diagnostic = get_diagnostic(without(program, silu), model)
    assert diagnostic.message == "even on one rank the step is not that of the model"
    assert diagnostic.notes[0].text.startswith("the first wrong value is `_g.1`, layers 0")

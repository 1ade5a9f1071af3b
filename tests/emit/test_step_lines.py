"""The read-back does not take the word of an entry for how an op of the step is written: a formula
that does something else than the op is refused, though the text and what is expected of it agree.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from attrs import evolve

from helpers.readback_plans import SMALL
from scalec.compiler.emit.readback import check
from scalec.compiler.emit.train_py import train_py
from scalec.compiler.ir import Op, Program, ops_in
from scalec.compiler.ops import OPS
from scalec.compiler.ops.line import Formula, Line
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan

KINDS = {
    "zero 1": {
        "mul",
        "count_valid",
        "reciprocal",
        "clip_scale",
        "grad_norm",
        "if_finite",
        "update",
    },
    "spikes": {"loss_limit", "if_below"},
    "spikes, fp16": {"loss_scale", "unscaled", "unscaled_norm", "if_finite", "if_below", "update"},
    "experts with biases": {"one", "balanced"},
}
"""Plans, and the ops of the step that each is to show."""

PLANS = {
    **SMALL,
    "experts with biases": SMALL["experts"].replace(
        "score=sigmoid, ", "score=sigmoid, bias=r_bias[experts], rate=0.25, "
    ),
}

CHANGES = {
    "&": ["|"],
    "~": [""],
    "*": ["+", "/"],
    " / ": [" * "],
    "<=": ["<", ">=", "=="],
    "== 0": ["== 1", "!= 0", "<= 1"],
    "isfinite": ["isnan", "sqrt"],
    ".clamp(min=1)": ["", ".clamp(min=2)"],
    ".to({dtype})": ["", ".to(torch.float64)", ".to(torch.bfloat16)"],
    ".reciprocal()": [""],
    ".sqrt()": ["", ".reciprocal()"],
    "1.0": ["2.0"],
    "{loss}": ["{count}"],
    "{norm}": ["2 * {norm}", "{norm}, {norm}"],
    "{squares}": ["2 * {squares}"],
    "{loss_scale}": ["{loss_scale} / 2"],
    "count_valid": ["clip_scale"],
    "clip_scale": ["count_valid"],
    "state.loss_scale()": ["state.loss_limit()", "state.loss_scale(1.0)"],
    "{max}": ["2 * {max}"],
    "{deviations}": ["9.0"],
    "scale={scale}": ["{scale}", "scale={count}"],
    "{bias}, {load}": ["{load}, {bias}"],
    "state.update": ["state.balance"],
    "rate={rate}": ["rate=2 * {rate}", "speed={rate}"],
    ", {conditions}": ["", ", {conditions}".replace("conditions", "count")],
}
"""Parts of formulas, and what else they might be."""


def mutants(formula: Formula) -> Iterator[Formula]:
    """The formula with a part that is another."""
    for part, others in CHANGES.items():
        for other in others:
            if part in formula.text:
                yield evolve(formula, text=formula.text.replace(part, other, 1))


def mutants_of_line(line: Line) -> Iterator[Line]:
    """The line with a formula that is another."""
    for formula in mutants(line.formula):
        yield evolve(line, formula=formula)
    for keyword, condition in line.conditions.items():
        for formula in mutants(condition):
            yield evolve(line, conditions={**line.conditions, keyword: formula})


def line_of(line: Line) -> Callable[[Program, Op], Line]:
    """An entry's line that is always this one."""
    return lambda program, op: line


@pytest.fixture(scope="module", params=KINDS)
def plan(request: pytest.FixtureRequest) -> tuple[str, Program, Source]:
    source = Source("plan.scale", PLANS[request.param])
    return request.param, compile_plan(source), source


def test_a_formula_that_is_not_the_op_is_refused(
    plan: tuple[str, Program, Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, program, source = plan
    tried = set[str]()
    for op in ops_in(program.region.body):
        line_of_op: Any = OPS[op.kind].line
        if op.kind in tried or not line_of_op:
            continue
        for line in mutants_of_line(line_of_op(program, op)):
            with monkeypatch.context() as planted:
                planted.setitem(OPS, op.kind, evolve(OPS[op.kind], line=line_of(line)))
                with pytest.raises((AssertionError, SyntaxError)) as refused:
                    assert check(train_py(program, source), program) < 0, f"{line} of {op.kind}"
            is_python = not isinstance(refused.value, SyntaxError)
            assert not is_python or str(refused.value).startswith("emit: ")
            tried.add(op.kind)
    assert KINDS[name] <= tried


def test_every_op_that_a_step_writes_is_tried() -> None:
    lines = {kind for kind, entry in OPS.items() if entry.line}
    assert set[str]().union(*KINDS.values()) == lines

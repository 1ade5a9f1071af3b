"""Arithmetic between tensors and numbers: what it means, how it is emitted, and what of it is
refused.

Purpose: one plan of many expressions; its step is proved, each is emitted as a person would write
it, and the read-back refuses every change of a sign, a number or a side.  Non-goals: arithmetic on
dims and constants alone (`tests/frontend`).
"""

import ast
import re
from collections.abc import Iterator

import pytest
from attrs import evolve

from helpers.plan_table import DP_TP
from helpers.programs import get_train_py
from helpers.small_plans import ALL_OVER_TP, HEAD, START, Plan
from scalec.compiler.emit.readback import check
from scalec.compiler.ir import Kind, walk
from scalec.compiler.ir.placements import ends
from scalec.compiler.syntax.diagnostics import PlanError
from scalec.testing import assert_equal_step

EMITTED = {
    # between tensors
    "x - y": "x - y",
    "x / y": "x / y",
    "-x": "-x",
    "x - y - z": "x - y - z",
    "x - (y - z)": "x - (y - z)",
    "x - (y + z)": "x - (y + z)",
    "x + y - z": "x + y - z",
    "x + (y - z)": "x + y - z",  # one sum
    "x / y / z": "x / y / z",
    "x / (y * z)": "x / (y * z)",
    "x * y / z": "x * y / z",
    "-(x + y)": "-(x + y)",
    "-x + y": "-x + y",
    "-x - y": "-x - y",
    "-x * y": "-x * y",
    "x * -y": "x * (-y)",
    "x - -y": "x - -y",
    "-(-x)": "-(-x)",
    "y + -x * z": "y + -x * z",
    "y + -x / z": "y + -x / z",
    # with a number
    "2 * x": "x * 2.0",
    "x * 2": "x * 2.0",
    "x / 4": "x * 0.25",
    "x / 3": "x * 0.3333333333333333",
    "x + 1": "x + 1.0",
    "1 + x": "x + 1.0",
    "x - 1": "x - 1.0",
    "1 - x": "-x + 1.0",
    "x * -2": "x * -2.0",
    "x + -2": "x - 2.0",
    "-x / 2": "-x * 0.5",
    "-(x / 2)": "-(x * 0.5)",
    "1 - (1 - x)": "-(-x + 1.0) + 1.0",
    # both, and precedence
    "x + 2 * y": "x + y * 2.0",
    "x - 2 * y": "x - y * 2.0",
    "(x + 1) * (y - 1)": "(x + 1.0) * (y - 1.0)",
    "(x + y) / 2": "(x + y) * 0.5",
    "x / 2 + y / 2": "x * 0.5 + y * 0.5",
    "x + 1 + y": "x + 1.0 + y",
    "x - 1 - y": "x - 1.0 - y",
    "x + (y + 1)": "x + (y + 1.0)",
    "x - (1 - y)": "x - (-y + 1.0)",
    "y / (x + 1)": "y / (x + 1.0)",
    "y + -x * 0.5": "y + -x * 0.5",
    "x * 2 * 3": "x * 2.0 * 3.0",
    "silu(x - 1) * -0.5": "silu(x - 1.0) * -0.5",
    "gelu(x)": "gelu(x)",
    "gelu(x, approximate=tanh)": 'gelu(x, approximate="tanh")',
    "softcap(x, 3)": "softcap(x, cap=3.0)",
    # numbers alone, dims and constants
    "2 * 3 * x": "x * 6.0",
    "x * (2 * 3)": "x * 6.0",
    "1 + 2 - x": "-x + 3.0",
    "x * (1 / 3)": "x * 0.3333333333333333",
    "x / hidden": "x * 0.25",
    "x * sqrt(hidden)": "x * 2.0",
    "x / (layers * head_dim)": "x * 0.25",
    "x + eps": "x + 1e-5",
    "theta / hidden * x - y": "x * 2500.0 - y",
    # with a parameter, which is broadcast
    "x - b": "x - self.b",
    "b - x": "self.b - x",
    "x / b": "x / self.b",
    "b / x": "self.b / x",
    "x - 2 * b": "x - self.b * 2.0",
    "h * (-s - 1)": "h * (-self.s - 1.0).unsqueeze(1)",  # s[heads], h[…, heads, head_dim]
    "h - s": "h - self.s.unsqueeze(1)",
    "s / 2 - h": "(self.s * 0.5).unsqueeze(1) - h",
}
"""What a plan says of tensors x, y, z, h and parameters b, s; and the program."""


def many() -> Plan:
    """All of them, each a value of its own."""
    lines = "  ".join(f"t{i} = {expression}" for i, expression in enumerate(EMITTED))
    back = [
        f" @ o{i}[heads, head_dim -> hidden]" if "h" in expression.split() else ""
        for i, expression in enumerate(EMITTED)
    ]
    added = " + ".join(f"silu(t{i}){product}" for i, product in enumerate(back))
    heads = "h = x @ w[hidden -> heads, head_dim] * s[heads]"
    body = f"{START}  x = x + b[hidden]  y = silu(x)  z = tanh(x)  {heads}  {lines}  x = {added}"
    return evolve(DP_TP, body=f"{body} {HEAD}")


# ---- what it means


@pytest.mark.parametrize("shard", [DP_TP.shard, ALL_OVER_TP], ids=["sequence", "no sequence"])
def test_steps_with_arithmetic_are_those_of_a_single_device(shard: str) -> None:
    assert_equal_step(evolve(many(), shard=shard).text())


PENDING = "silu(x @ w[hidden -> ffn]) @ u[ffn -> hidden]"

OF_PENDING = [
    f"x - {PENDING}",
    f"x + ({PENDING}) / 2",
    f"x + 2 * ({PENDING}) * 3",
    f"x - (1 - ({PENDING}))",
    f"x + ({PENDING}) / y",
    f"x + y / ({PENDING})",
    f"x + (({PENDING}) + 1) * 2",
]


@pytest.mark.parametrize("expression", OF_PENDING)
def test_a_pending_sum_is_reduced_once_before_it_meets_a_number(expression: str) -> None:
    plan = evolve(DP_TP, body=f"{START}  y = silu(x)  x = {expression} + y {HEAD}")
    ops = list(walk(plan.program().region.body))
    made = {value.name: op.kind for op in ops for value in op.outputs}
    scattered = [
        op
        for op in ops
        if op.kind == "coerce" and [end.kind for end in ends(op)] == [Kind.PARTIAL, Kind.SHARDED]
    ]
    forward = [made[op.inputs[0]] for op in scattered if not op.inputs[0].startswith("d_")]
    assert forward == ["embedding", "contract"]
    assert_equal_step(plan.text())


# ---- how it is emitted


@pytest.mark.parametrize("expression", EMITTED)
def test_expressions_read_as_a_person_would_write_them(expression: str) -> None:
    text, _ = get_train_py(many().text())
    name = f"t{[*EMITTED].index(expression)}"
    assert re.findall(rf"^ *{name} = (.*?)(?: +#.*)?$", text, re.MULTILINE) == [EMITTED[expression]]


def test_the_read_back_takes_what_is_emitted() -> None:
    text, program = get_train_py(many().text())
    check(text, program)


def changed(expression: str) -> Iterator[str]:
    """The expression with one sign, number or side changed."""
    tree = ast.parse(expression, mode="eval")
    for node in ast.walk(tree):
        match node:
            case ast.BinOp():
                op, (left, right) = node.op, (node.left, node.right)
                for node.op in [
                    ast.Sub() if isinstance(op, ast.Add) else ast.Add(),
                    ast.Mult(),
                    ast.Div(),
                ]:
                    yield ast.unparse(tree)
                node.op, node.left, node.right = op, right, left
                yield ast.unparse(tree)
                node.left, node.right = left, right
            case ast.UnaryOp():
                node.op = ast.UAdd()
                yield ast.unparse(tree)
                node.op = ast.USub()
            case ast.Constant(value=float() as value):
                for node.value in (value + 1, 0.0, 1 / value):
                    yield ast.unparse(tree)
                node.value = value
            case _:
                pass


@pytest.mark.sample(5)
@pytest.mark.parametrize("expression", EMITTED)
def test_the_read_back_refuses_another_sign_number_or_side(expression: str) -> None:
    text, program = get_train_py(many().text())
    own, line = EMITTED[expression], f" t{[*EMITTED].index(expression)} = "
    for other in {*changed(own)} - {ast.unparse(ast.parse(own))}:
        assert line + own in text
        with pytest.raises(AssertionError, match=r"emit: line \d+: "):
            check(text.replace(line + own, line + other), program)


# ---- what is refused

REFUSED = {
    "2 / x": ("E0604", "2 / x"),
    "x / 0": ("E0604", "x / 0"),
    "x / (1 - 1)": ("E0604", "x / (1 - 1)"),
    "x @ 2": ("E0604", "x @ 2"),
    "2 @ x": ("E0604", "2 @ x"),
    "x * (hidden / 0)": ("E0302", "0"),
    "x + sqrt(1 - 2)": ("E0302", "sqrt(1 - 2)"),
    "2 + 3": ("E0603", "2 + 3"),
    "-2": ("E0603", "-2"),
    "x * nothing": ("E0201", "nothing"),
    "x - tokens": ("E0307", "x - tokens"),
}
"""Code and place of what is said."""


@pytest.mark.parametrize("expression", REFUSED)
def test_what_has_no_meaning_is_refused_at_its_place(expression: str) -> None:
    plan = evolve(DP_TP, body=f"{START}  x = {expression} {HEAD}")
    with pytest.raises(PlanError) as caught:
        plan.program()
    (found,) = caught.value.diagnostics
    line = plan.text().splitlines()[found.span.line - 1]
    assert (found.code, line[found.span.column - 1 : found.span.end_column - 1]) == REFUSED[
        expression
    ]

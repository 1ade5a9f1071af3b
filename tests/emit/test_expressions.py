"""Expressions of emitted programs: the parentheses that Python needs and no others, and every attribute of an op."""

from typing import Any, cast

import pytest

from helpers.empty_programs import frame
from scalec.compiler.emit import emit
from scalec.compiler.emit.expressions import ATOM, WRITERS, Expr, express
from scalec.compiler.ir import Op
from scalec.compiler.ops import OPS
from scalec.compiler.passes import compile_plan
from scalec.compiler.syntax.source import Source

PLAN = """
model t(tokens[batch, seq], labels[batch, seq]) {{
  dims {{ vocab = 16  hidden = 4 }}
  init ~ normal(0.02)
  x = embedding(tokens, wte[vocab, hidden])
  y = silu(x)
  z = tanh({expression})
  loss = cross_entropy(z @ head[hidden -> vocab], labels)
}}
train {{
  seq = 8  global_batch = 8  microbatch = 2  steps = 1
  optimizer sgd {{ lr = 0.1 }}
  data text {{ files = [python_stdlib] }}
}}
"""


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("x - 2 * y", "x - y * 2.0"),
        ("x - y * y", "x - y * y"),
        ("x - y / x", "x - y / x"),
        ("x - 2 * (x + y)", "x - (x + y) * 2.0"),
        ("x - (y + x)", "x - (y + x)"),
        ("x * (y - 2 * x)", "x * (y - x * 2.0)"),
        ("x * (2 * y)", "x * (y * 2.0)"),
        ("x / (2 * y)", "x / (y * 2.0)"),
        ("-(x * y)", "-(x * y)"),
        ("x * (-y)", "x * (-y)"),
        ("1 - y", "-y + 1.0"),
    ],
)
def test_parentheses_stand_where_they_are_needed(expression: str, text: str) -> None:
    plan = Source("plan.scale", PLAN.format(expression=expression))
    assert f"z = tanh({text})  #" in emit(compile_plan(plan), plan)["train.py"]


BY_DEFAULT = [kind for kind, entry in OPS.items() if entry.function and entry.attributes and kind not in WRITERS]


@pytest.mark.parametrize("kind", BY_DEFAULT)
def test_a_call_has_every_attribute_of_its_op(kind: str) -> None:
    names = [attribute.name for attribute in OPS[kind].attributes]
    op = Op(kind, ("x",), (), tuple((name, 0.5) for name in names), span=frame({}, {}).region.span)
    text = express(op, [Expr("x", ATOM, ("x",))], cast(Any, None)).text
    assert text == f"{OPS[kind].function}({', '.join(['x', *(f'{name}=0.5' for name in names)])})"

"""Expressions of emitted programs: the parentheses that Python needs and no others, and every
attribute of an op.
"""

from collections.abc import Sequence
from contextlib import suppress

import pytest
from attrs import evolve

from helpers.empty_programs import frame
from helpers.plan_table import PLANS
from scalec.compiler.emit import emit
from scalec.compiler.emit.expressions import ATOM, WRITERS, Context, Expr, express
from scalec.compiler.ir import (
    INVARIANT,
    MAXIMUM,
    PARTIAL,
    REPLICATED,
    Attr,
    Op,
    Placement,
    Program,
    Region,
    Type,
    sharded,
    walk,
)
from scalec.compiler.ir.placements import COERCIONS
from scalec.compiler.ops import OPS, OpDef
from scalec.compiler.ops.call import with_attributes
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan

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


def is_default(entry: OpDef) -> bool:
    """Whether a call says its attributes and nothing else."""
    return entry.call is with_attributes and entry.name not in WRITERS


BY_DEFAULT = [
    kind for kind, entry in OPS.items() if entry.function and entry.attributes and is_default(entry)
]


@pytest.mark.parametrize("kind", BY_DEFAULT)
def test_a_call_has_every_attribute_of_its_op(kind: str) -> None:
    names = [attribute.name for attribute in OPS[kind].attributes]
    program = frame({}, {})
    op = Op(kind, ("x",), (), tuple((name, 0.5) for name in names), span=program.region.span)
    context = Context(
        program,
        lambda name: Type("f32", ()),
        "_".join,
        lambda *at: repr(at),
        str,
        lambda _: False,
        {},
    )
    text = express(op, [Expr("x", ATOM, ("x",))], context).text
    assert text == f"{OPS[kind].function}({', '.join(['x', *(f'{name}=0.5' for name in names)])})"


PLACES = (INVARIANT, REPLICATED, PARTIAL, MAXIMUM)


def others(program: Program, op: Op, key: str, value: Attr, operands: Sequence[Type]) -> list[Attr]:
    """Other values that an attribute of an op could have."""
    attribute = next((each for each in OPS[op.kind].attributes if each.name == key), None)
    shared = (
        [dim for dim in operands[0].dims if all(dim in type.dims for type in operands)]
        if operands
        else []
    )
    match value:
        case Placement():
            every = [*PLACES, *(sharded(dim) for dim in operands[0].dims)]
            ends = [
                (place, op.get("to")) if key == "from" else (op.get("from"), place)
                for place in every
            ]
            return [
                place
                for place, (a, b) in zip(every, ends, strict=True)
                if place != value and is_coercion(a, b)
            ]
        case _ if attribute and attribute.choices:
            return [choice for choice in attribute.choices if choice != value]
        case tuple() if key == "axes":
            return [(axis.name,) for axis in program.axes if (axis.name,) != value]
        case tuple():
            return [(dim,) for dim in shared if dim not in value]
        case int() | float():
            return [value + 1, value / 2 + 0.25]
        case _:
            return [dim for dim in shared if dim != value and value in shared]


def is_coercion(source: Attr, target: Attr) -> bool:
    """Whether there is a coercion between two placements."""
    assert isinstance(source, Placement)
    assert isinstance(target, Placement)
    return (
        source != MAXIMUM and (source.kind, target.kind) in COERCIONS
    )  # a maximum has no gradient, whatever it is then


@pytest.mark.sample(50)
@pytest.mark.parametrize("name", PLANS)
def test_ops_that_differ_in_an_attribute_are_written_otherwise(name: str) -> None:
    """An attribute that an expression drops would leave it as it is."""
    program = PLANS[name].program()
    known = program.types
    given = Context(
        program,
        known.__getitem__,
        "_".join,
        lambda *at: repr(at),
        lambda op: repr(op.attrs),
        lambda _: False,
        {},
    )
    step = next(stmt for stmt in program.region.body if isinstance(stmt, Region))
    forward = next(stmt for stmt in step.body if isinstance(stmt, Region))
    for op in walk(forward.body):
        operands = [Expr(f"a{i}", ATOM, ()) for i in range(len(op.inputs))]
        for key, value in op.attrs if op.kind not in ("pack", "unpack") else ():
            for other in others(program, op, key, value, [known[name] for name in op.inputs]):
                changed = evolve(
                    op, attrs=tuple((k, other if k == key else v) for k, v in op.attrs)
                )
                with suppress(AssertionError, KeyError, StopIteration, ValueError, IndexError):
                    text = express(changed, operands, given).text
                    assert_other(
                        text, express(op, operands, given).text, f"{op.kind} {key}={other}"
                    )


def assert_other(text: str, before: str, what: str) -> None:
    """Fails unless two texts differ."""
    if text == before:
        pytest.fail(f"{what} is written as before: {text}")

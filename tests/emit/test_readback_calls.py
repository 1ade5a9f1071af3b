"""The read-back does not take the emitter's word for how an op is called: another dim, axis, size
or number is refused.

Each op is emitted otherwise than its expression says, in the text and in what the read-back expects
of it alike.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest
from attrs import evolve

from helpers.random_models import own_ops
from helpers.readback_plans import DIMS, KERNELS, LLAMA, LOSS, SMALL, START, TWO_LOSSES, plan
from helpers.unary_ops import UNARY, make_call
from scalec.compiler.emit.expressions import ATOM, Context, Expr, express
from scalec.compiler.emit.readback import check
from scalec.compiler.emit.train_py import train_py
from scalec.compiler.ir import SEQUENCE, Op, Program
from scalec.compiler.ops import OPS, step
from scalec.compiler.ops.call import Experts, Layout, PositionIds, Positions
from scalec.compiler.ops.protocol import OpDef
from scalec.compiler.syntax.limits import load
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan

ROOT = Path(__file__).parents[2]

MANY = f"""{START}
  repeat layers {{
    g = softmax(x @ w_gate[hidden -> ffn])
    u, v = split(gelu(x, approximate=tanh) @ w_both[hidden -> wide], [ffn, heads])
    c = concat(g, v, as=wide) @ w_cat[wide -> hidden]
    y = softcap(x - 2 * c, 20) / (x * x + 1)
    x = dropout(layernorm(x + leaky_relu(y, 0.1), w_ln[hidden], b_ln[hidden], 1e-5), 0.1)
    x = x + sum(u, over=ffn) * mean(x * x, over=hidden) + roll(x, 3, over=hidden)
  }} {LOSS}"""

ROUTED = f"""{START}
  repeat layers {{
    y = x
    route y to experts by top(y @ router[hidden -> experts], 2, score=sigmoid, scale=2.5, groups=4, from=2,
                              capacity=1.5, balance=0.1, z=0.01, aux_loss=0.1) {{
      y = silu(y @ e_up[hidden -> ffn] + e_bias[ffn]) @ e_down[ffn -> hidden]
    }}
    x = x + y
  }} {LOSS}"""

FUNCTIONS = "\n    ".join(f"x = x + {make_call(name, 'x', over='hidden')}" for name in UNARY)

PLANS = {
    "functions": plan(
        f"{START}\n  repeat layers {{\n    {FUNCTIONS}\n  }} {LOSS}", shard="batch over dp  vocab over tp  seq over tp"
    ),
    "many": plan(MANY, mesh="dp = 2  tp = 2", shard="batch over dp  vocab over tp  seq over tp").replace(
        DIMS, f"{DIMS}  wide = 68"
    ),
    "sharded norm": plan(
        TWO_LOSSES, mesh="dp = 2  ep = 2", shard="batch over dp  hidden over ep"
    ),
    "masked": SMALL["masked"].replace("mask=full", "mask=full, window=4, softcap=30, scale=0.5, dropout=0.1"),
    "padded": plan(options="").replace("vocab = 64", "vocab = 61 pad 4").replace(
        ", labels)", ", labels, smoothing=0.1, z=0.01)"
    ),
    "whole vocabulary": plan(mesh="dp = 4", shard="batch over dp").replace("vocab = 64", "vocab = 61 pad 4"),
    "scaled rope": plan().replace("10000)", "10000, dims=4, scaling=linear, factor=2)"),
    **{name: SMALL[name] for name in SMALL if name.startswith("fused")},
    "gather": plan(mesh="dp = 2  cp = 2", shard="batch over dp  seq over cp as zigzag"),
    "routed": plan(
        ROUTED, "dp = 2  cp = 2", "experts over cp  batch over dp  seq over cp as zigzag", "precision = bf16"
    ).replace(DIMS, f"{DIMS}  experts = 8"),
    "padded rows": plan(
        ROUTED,
        "dp = 2  tp = 2",
        "experts over dp  batch over dp  ffn over tp  seq over tp",
        "experts = padded",
    ).replace(DIMS, f"{DIMS}  experts = 8"),
    "ring": plan(mesh="dp = 2  cp = 2", shard="batch over dp  seq over cp as zigzag via ring"),
    "positions": plan(
        f"{START}  x = placed(x)\n{LOSS}", mesh="dp = 2  cp = 2", shard="batch over dp  seq over cp as zigzag"
    ).replace("model ", 'op placed(x[.., s, d], at=s) -> [.., s, d] over .., s from "own_ops:placed"\nmodel ', 1),
    "kernels": plan(
        LLAMA.replace("rmsnorm(x, norm2[hidden]", "layernorm(x, norm2[hidden], bias[hidden]"), options=KERNELS
    ),
}  # fmt: skip

USER_OP = "user op"
"""The name of the plan whose op is an example's."""

OF_STEP = {entry.name for entry in vars(step).values() if isinstance(entry, OpDef)}
KINDS = sorted({*OPS} - OF_STEP - {"vjp"} | {"cast", "coerce"})
"""Every op that a forward may have."""

Change = Callable[[Op, str], str]


@cache
def program_of(name: str) -> tuple[Program, Source]:
    """A plan's program; the one with a user op is an example."""
    if name == USER_OP:
        source = load(ROOT / "examples" / "05_user_op.scale")
    else:
        folder = Path(own_ops.__file__).parent  # where user ops are
        source = Source(str(folder / "p.scale"), PLANS[name])
    return compile_plan(source), source


def mutants(text: str) -> Iterator[str]:
    """The expression with another number or group, without a keyword, with operands swapped,
    with another operator.
    """
    tree = ast.parse(text, mode="eval")
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=bool(value)):
                yield from changed(tree, node, "value", not value)
            case ast.Constant(value=int(value) | float(value)):
                yield from changed(tree, node, "value", value + 1)
            case ast.Name(id=name) if name.startswith("group"):
                yield from changed(tree, node, "id", "other")
            case ast.Name(id="held"):
                yield from changed(tree, node, "id", "elsewhere")
            case ast.Name(id="positions"):
                yield from changed(tree, node, "id", "other_positions")
            case ast.BinOp(op=ast.Div() | ast.Sub()):
                yield from changed(tree, node, "op", ast.Mult())
            case ast.BinOp(op=ast.Mult() | ast.Add()):
                yield from changed(tree, node, "op", ast.Div())
            case ast.Call(args=args, keywords=keywords):
                for i in range(len(keywords)):
                    yield from changed(tree, node, "keywords", [*keywords[:i], *keywords[i + 1 :]])
                if (
                    args
                    and isinstance(args[-1], ast.Name | ast.Constant)
                    and not ast.unparse(args[-1]).startswith("a")
                ):
                    yield from changed(tree, node, "args", args[:-1])
                if [*map(ast.unparse, args[:2])] == ["a0", "a1"]:
                    yield from changed(tree, node, "args", [args[1], args[0], *args[2:]])
            case _:
                pass


def changed(tree: ast.Expression, node: ast.AST, field: str, value: object) -> Iterator[str]:
    """The expression with one field of one node set to another value."""
    before = getattr(node, field)
    setattr(node, field, value)
    yield ast.unparse(tree)
    setattr(node, field, before)


class Emitter:
    """An emitter that writes ops of one kind otherwise, or of every kind where `kind` is empty.

    `change` gets the op and its expression of operands `a0`, `a1`, …
    """

    def __init__(self, kind: str, program: Program, change: Change) -> None:
        self.kind, self.axes = kind, [axis.name for axis in program.axes]
        self.change = change

    def express(self, op: Op, operands: Sequence[Expr], context: Context) -> Expr:
        """What `express` gives, of a changed expression."""
        made = express(op, operands, context)
        if self.kind not in ("", op.kind):
            return made
        groups: list[tuple[str, ...]] = []
        layouts: dict[str, Layout] = {}
        text = self.change(op, own_text(op, len(operands), context, groups, layouts))
        names = {name: context.layout(each) for name, each in layouts.items()}
        names |= {f"a{i}": operand.text for i, operand in enumerate(operands)}
        names |= {f"group{i}": context.axis(axes) for i, axes in enumerate(groups)}
        if "other" in text:
            names["other"] = context.axis(
                next((axis,) for axis in self.axes if (axis,) not in groups)
            )
        if "table" in text:
            names["table"] = context.rotary(op)
        if "held" in layouts:
            names["elsewhere"] = context.layout(Positions(SEQUENCE, ("dp",)))
        if "positions" in layouts:
            names["other_positions"] = context.layout(PositionIds(SEQUENCE, ("dp",)))
        for name, said in names.items():
            text = re.sub(rf"\b{name}\b", f"({said})", text)
        return evolve(made, text=ast.unparse(ast.parse(text)), binds=0)


def own_text(
    op: Op, count: int, context: Context, groups: list[tuple[str, ...]], layouts: dict[str, Layout]
) -> str:
    """An op's own expression of operands by number; the groups in it are by number too."""

    def group(axes: tuple[str, ...]) -> str:
        groups.append(axes)
        return f"group{len(groups) - 1}"

    def layout(each: Layout) -> str:
        name = {Positions: "held", PositionIds: "positions", Experts: "experts"}[type(each)]
        layouts[name] = each
        return name

    named = evolve(context, axis=group, layout=layout, rotary=lambda op: "table", sizes={})
    return express(op, [Expr(f"a{i}", ATOM, ()) for i in range(count)], named).text


def check_program_by(emitter: Emitter, program: Program, source: Source) -> int:
    """Checks the program that this emitter writes, with the read-back expecting the same."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("forward", "readback.forward"):
            patch.setattr(f"scalec.compiler.emit.{module}.express", emitter.express)
        return check(train_py(program, source), program)


@cache
def expressions() -> Mapping[str, Mapping[str, str]]:
    """By kind of op its expressions in all plans, each with the name of a plan that has it."""
    plan_by_expression: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for name in (*PLANS, USER_OP):

        def record(op: Op, text: str, name: str = name) -> str:
            plan_by_expression[op.kind].setdefault(text, name)
            return text

        program, source = program_of(name)
        check_program_by(Emitter("", program, record), program, source)
    return plan_by_expression


OF_ONE_OPERAND = re.compile(r"[\w.]+\(a0\)|a0\.\w+\(\)|-a0")
"""Expressions without anything that could be another."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_has_every_op_of_a_forward(kind: str) -> None:
    assert expressions()[kind]
    for text in expressions()[kind]:
        assert any(mutants(text)) or OF_ONE_OPERAND.fullmatch(text)


@pytest.mark.sample(7)
@pytest.mark.parametrize("kind", KINDS)
def test_an_op_that_is_called_otherwise_is_refused_at_its_line(kind: str) -> None:
    for text, name in expressions()[kind].items():
        program, source = program_of(name)
        for mutant in mutants(text):

            def change(op: Op, each: str, text: str = text, mutant: str = mutant) -> str:
                return mutant if each == text else each

            emitter = Emitter(kind, program, change)
            with pytest.raises(AssertionError, match=r"^emit: line [1-9]\d*: "):
                assert check_program_by(emitter, program, source) < 0, (
                    f"{mutant} is taken for {text}"
                )

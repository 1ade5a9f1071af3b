"""The read-back does not take the emitter's word for how an op is called: another dim, axis, size
or number is refused.

Each op is emitted otherwise than its expression says, in the text and in what the read-back expects
of it alike.
"""

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from attrs import evolve

from helpers.random_models import own_ops
from helpers.readback_plans import DIMS, KERNELS, LLAMA, LOSS, SMALL, START, plan
from helpers.unary_ops import UNARY, written
from scalec.compiler.emit.expressions import ATOM, Context, Expr, express
from scalec.compiler.emit.readback import check
from scalec.compiler.emit.train_py import train_py
from scalec.compiler.ir import SEQUENCE, Op, Program, Region, walk
from scalec.compiler.ops import OPS
from scalec.compiler.ops.call import Experts, Layout, PositionIds, Positions
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

WITH_ATTRIBUTES = tuple(name for name in UNARY if OPS[name].attributes)
FUNCTIONS = "\n    ".join(
    f"x = x + {written(name, 'x', over='hidden')}" for name in WITH_ATTRIBUTES
)

PLANS = {
    "functions": plan(
        f"{START}\n  repeat layers {{\n    {FUNCTIONS}\n  }} {LOSS}", shard="batch over dp  vocab over tp  seq over tp"
    ),
    "many": plan(MANY, mesh="dp = 2  tp = 2", shard="batch over dp  vocab over tp  seq over tp").replace(
        DIMS, f"{DIMS}  wide = 68"
    ),
    "sharded norm": SMALL["two losses"],
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

KINDS = {
    # whose call is bare here; `many` has tanh
    "functions": tuple(name for name in WITH_ATTRIBUTES if name != "gelu"),
    "many": (
        *(
            "add",
            "concat",
            "contract",
            "div",
            "dropout",
            "fork",
            "gelu",
            "layernorm",
            "leaky_relu",
            "mean",
            "mul",
        ),
        *("roll", "scale", "shift", "softcap", "softmax", "split", "sum"),
    ),
    "sharded norm": ("mean_square", "rms_scaled"),
    "masked": ("attention",),
    "gather": ("attention", "coerce"),
    "routed": (
        *(
            "top",
            "balance",
            "router_z",
            "limit_capacity",
            "sort_by_expert",
            "dispatch",
            "exchange",
            "exchange_back",
        ),
        *("grouped_contract", "grouped_bias", "combine", "no_load", "add_load"),
        *("no_scores", "no_choices", "sum_scores", "add_choices", "aux_loss"),
    ),
    "padded rows": (
        "coerce",
        "exchange_padded",
        "grouped_bias",
        "grouped_contract",
        "sort_by_expert",
    ),
    "ring": ("ring_attention",),
    "padded": ("coerce", "embedding", "local_softmax_stats", "max_logit", "rmsnorm", "token_loss"),
    "whole vocabulary": ("cross_entropy",),
    "scaled rope": ("rope",),
    "fused": (
        "add_rmsnorm",
        "contracts",
        "gelu_mul",
        "linear_softmax_stats",
        "rescale_to_global_max",
        "rope_pair",
    ),
    "fused, vocabulary whole": ("linear_cross_entropy",),
    "fused, two losses": ("logit_softmax_stats",),
    "kernels": ("add_layernorm", "silu_mul"),
    "user op": ("call",),
    "positions": ("call",),
}
"""The kinds of ops that each plan has, one of each kind to be called otherwise."""

WITHOUT = {"exchange_counts", "no_loss", "wait", *UNARY} - {*WITH_ATTRIBUTES}
"""Functions of one operand, without anything that could be another."""


Change = Callable[[str], str]


def program_of(name: str) -> tuple[Program, Source]:
    """A plan's program; the one with a user op is an example."""
    folder = Path(own_ops.__file__).parent  # where user ops are
    source = load(ROOT / "examples" / "05_user_op.scale") if name == "user op" else None
    source = source or Source(str(folder / "p.scale"), PLANS[name])
    return compile_plan(source), source


def forward_ops(program: Program) -> Iterator[Op]:
    """The ops of the forward."""
    step = next(stmt for stmt in program.region.body if isinstance(stmt, Region))
    forward = next(stmt for stmt in step.body if isinstance(stmt, Region))
    return walk(forward.body)


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
    """An emitter that writes ops of one kind otherwise; `change` is given the expression of
    operands `a0`, `a1`, …
    """

    def __init__(self, kind: str, program: Program) -> None:
        self.kind, self.axes = kind, [axis.name for axis in program.axes]
        self.change: Change = str

    def express(self, op: Op, operands: Sequence[Expr], context: Context) -> Expr:
        """What `express` gives, of a changed expression."""
        made = express(op, operands, context)
        if op.kind != self.kind:
            return made
        groups: list[tuple[str, ...]] = []
        layouts: dict[str, Layout] = {}
        text = self.change(own_text(op, len(operands), context, groups, layouts))
        names = {
            name: context.layout(each)
            for name, each in layouts.items()
            if isinstance(each, Experts)
        }
        names |= {f"a{i}": operand.text for i, operand in enumerate(operands)}
        names |= {f"group{i}": context.axis(axes) for i, axes in enumerate(groups)}
        if "other" in text:
            names["other"] = context.axis(
                next((axis,) for axis in self.axes if (axis,) not in groups)
            )
        if "table" in text:
            names["table"] = context.rotary(op)
        if "held" in text or "elsewhere" in text:
            held, elsewhere = (
                context.layout(Positions(SEQUENCE, (axis,))) for axis in ("cp", "dp")
            )
            names |= {"held": held, "elsewhere": elsewhere}
        if "positions" in layouts:
            names["positions"] = context.layout(layouts["positions"])
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


@pytest.mark.sample(7)
@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name, kinds in KINDS.items() for kind in kinds]
)
def test_an_op_that_is_called_otherwise_is_refused_at_its_line(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, source = program_of(name)
    emitter = Emitter(kind, program)
    for module in ("forward", "readback.forward"):
        monkeypatch.setattr(f"scalec.compiler.emit.{module}.express", emitter.express)
    seen: dict[str, None] = {}
    emitter.change = lambda text: seen.setdefault(text) or text
    check(train_py(program, source), program)
    tried = 0
    for text in seen:
        for mutant in mutants(text):
            emitter.change = lambda each, text=text, mutant=mutant: mutant if each == text else each
            written = train_py(program, source)
            with pytest.raises(AssertionError, match=r"^emit: line [1-9]\d*: "):
                assert check(written, program) < 0, f"{mutant} is taken for {text}"
            tried += 1
    assert tried


def test_every_op_that_has_a_number_a_dim_or_a_group_is_called_otherwise() -> None:
    """`WITHOUT` aside: a new op needs a plan here."""
    tried = {kind for kinds in KINDS.values() for kind in kinds}
    written = {kind for kind, entry in OPS.items() if entry.function}
    assert written - tried - WITHOUT == {"clip_scale", "count_valid", "sum_squares"}

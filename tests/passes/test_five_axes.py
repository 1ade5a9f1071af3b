"""Gradients where all axes are in one plan: over which of them each is summed and lies; the proof
of it.

The tables are written by hand, of Megatron's rules (MoE parallel folding, arXiv:2504.14960) and of
data parallelism's.  Non-goals: numbers, and what a run sends (`end_to_end/test_five_axes.py`).
"""

from math import prod
from pathlib import Path
from textwrap import dedent

import pytest

from scalec.compiler.ir import Kind, Op, Program, Type
from scalec.compiler.proof import verify
from scalec.compiler.proof.small_sizes import meshes
from scalec.compiler.syntax.limits import load
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan, lower

PLANS = Path(__file__).parents[2] / "plans"
OWN_AXIS = dedent("""
    use "tiny_five.scale"
    mesh { pp = 2  dp = 2  ep = 2  cp = 2  tp = 2 }
    shard {
      experts                     over ep, tp
      batch                       over dp, ep
      seq                         over cp as zigzag via ring
      vocab, heads, kv_heads, ffn over tp
      seq                         over tp
      layers                      over pp
    }
    state { zero 1 over dp, ep, cp }
""")
"""Five axes in the mesh: the experts have one of their own, which also shards the batch, and
leave cp alone.
"""

SPLIT = ("wte", "wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down", "head")
"""Matrices that Megatron splits over tp: vocabulary, heads, and the width of the expert that
all tokens share.
"""
WHOLE = ("norm1", "norm2", "norm", "router")
EXPERTS = ("e_gate", "e_up", "e_down")

Axes = tuple[str, ...]
SUMS: dict[str, dict[Axes, tuple[Axes, Axes]]] = {  # of these parameters: summed over, lying over
    "tiny_five": {
        SPLIT: (("dp", "cp"), ("tp",)),
        WHOLE: (("dp", "cp", "tp"), ()),
        EXPERTS: ((), ("dp", "cp", "tp")),
    },
    "tiny_hybrid": {
        SPLIT: (("replica", "cp"), ("tp",)),
        WHOLE: (("replica", "cp", "tp"), ()),
        EXPERTS: (("replica",), ("cp", "tp")),
    },
    "an axis of experts": {
        SPLIT: (("dp", "ep", "cp"), ("tp",)),
        WHOLE: (("dp", "ep", "cp", "tp"), ()),
        EXPERTS: (("dp", "cp"), ("ep", "tp")),
    },
}


def source(name: str) -> Source:
    return (
        load(path)
        if (path := PLANS / f"{name}.scale").exists()
        else Source(str(PLANS / "own.scale"), OWN_AXIS)
    )


@pytest.mark.parametrize("name", SUMS)
def test_the_axes_of_each_gradient(name: str) -> None:
    """Over which it is pending and lies when it is packed, and over which the step then reduces
    it.
    """
    program = compile_plan(source(name))
    expected = {param: axes for params, axes in SUMS[name].items() for param in params}
    found = {param: _gradient(program, param) for param in expected}
    assert {
        param: (type.axes_in(Kind.PARTIAL), type.axes_in(Kind.SHARDED))
        for param, (type, _) in found.items()
    } == expected
    assert {param: reduced for param, (_, reduced) in found.items()} == {
        p: {*sums} for p, (sums, _) in expected.items()
    }
    assert {param.name: param.type.axes_in(Kind.SHARDED) for param in program.params} == {
        param: lies for param, (_, lies) in expected.items()
    }


def _gradient(program: Program, param: str) -> tuple[Type, set[str]]:
    """The type of a parameter's gradient as it is packed, and the axes of the coercions between
    that and its update.
    """
    place = {name: at for bucket in program.buckets for at, name in enumerate(bucket.params)}[param]
    (bucket,) = (bucket.name for bucket in program.buckets if param in bucket.params)
    packs = (op for op in program.ops if op.kind == "pack" and op.get("bucket") == bucket)
    pack = next(op for op in packs if not {*op.inputs} & {each.name for each in program.params})
    value, reduced = pack.outputs[0].name, set[str]()
    while (op := _reader(program, value)).kind == "coerce":
        value, reduced = op.outputs[0].name, reduced | {*op.names("axes")}
    assert op.kind == "update"
    return program.types[pack.inputs[place]], reduced


def _reader(program: Program, value: str) -> Op:
    """The op that reads a value, besides the norm."""
    (op,) = (op for op in program.ops if value in op.inputs and op.kind != "sum_squares")
    return op


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "ranks"), [("tiny_five", (36, 36)), ("an axis of experts", (72, 108))]
)
def test_the_step_is_that_of_one_device(name: str, ranks: tuple[int, ...]) -> None:
    """For every rank of two meshes in which each axis is once 2 and once 3."""
    model = compile_plan(source(name), "resolve")
    program = lower(model)
    assert tuple(prod(mesh.values()) for mesh in meshes(program)) == ranks
    verify(program, model)

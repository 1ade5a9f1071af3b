"""Ops and values found and renamed in regions, at any depth."""

from attrs import evolve

from scalec.compiler.ir import (
    Op,
    Program,
    Region,
    ancestors,
    blocks,
    defs,
    map_ops,
    regions_in,
    rename,
    results,
    slices,
    uses,
    walk,
    walk_regions,
)
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan

PLAN = """model tiny(tokens[batch, seq], labels[batch, seq]) {
  dims { vocab = 8  hidden = 4  blocks = 2  layers = 3 }
  init ~ normal(0.02)
  x = embedding(tokens, wte[vocab, hidden])
  repeat blocks {
    repeat layers { x = silu(x * w[hidden]) }
    x = x * v[hidden]
  }
  loss = cross_entropy(x @ head[hidden -> vocab], labels)
}
mesh { dp = 1 }
train { seq = 4  global_batch = 2  microbatch = 1  steps = 1  optimizer sgd { lr = 0.1 }  data text { files = ["a"] } }
"""


def program(until: str = "resolve") -> Program:
    """The plan after a pass."""
    return compile_plan(Source("tiny.scale", PLAN), until)


def test_ops_and_regions_at_any_depth_are_in_order() -> None:
    model = program()
    assert [region.dim for region in walk_regions(model.region.body)] == ["blocks", "layers"]
    assert [region.dim for region in regions_in(model.region.body)] == ["blocks"]
    kinds = [op.kind for op in model.ops if op.kind != "leaf"]
    assert kinds == ["embedding", "mul", "silu", "mul", "contract", "cross_entropy"]
    assert [*walk(model.region.body)] == [*model.ops]


def test_the_types_of_all_values_are_found_once() -> None:
    model = program()
    assert model.types is model.types
    assert model.types["w"].dims == ("blocks", "layers", "hidden")
    op = next(op for op in model.ops if op.kind == "silu")
    assert model.operands(op) == (model.types[op.inputs[0]],)
    other = evolve(model, params=())
    assert "w" not in other.types


def test_a_slice_of_a_slice_is_of_the_whole() -> None:
    model = program()
    leaves = defs(model.region.body)
    inner = next(op for op in model.ops if op.kind == "mul").inputs[1]
    assert leaves[slices(model.region)[inner]].inputs == ("w",)


def test_uses_are_counted_at_any_depth() -> None:
    model = program()
    (repeat,) = regions_in(model.region.body)
    assert uses(repeat) == uses(*repeat.body) + uses(evolve(repeat, body=()))
    assert uses(*model.region.body)["tokens"] == 1


def test_ancestors_are_all_that_a_value_is_made_of() -> None:
    model = program()
    embedding = next(op for op in model.ops if op.kind == "embedding")
    found = ancestors(model.region.body, [embedding.outputs[0].name])
    assert found == {embedding.outputs[0].name, *embedding.inputs, "wte"}
    (repeat,) = regions_in(model.region.body)
    assert {"w", "v", "tokens"} <= ancestors(model.region.body, [results(repeat)[0].name])


def test_what_is_read_is_renamed_at_any_depth_and_what_is_bound_is_not() -> None:
    model = program()
    (repeat,) = regions_in(model.region.body)
    read = uses(repeat).keys()
    made = {value.name for op in walk(repeat.body) for value in op.outputs}
    renamed = rename(repeat, {name: f"{name}'" for name in read})
    assert uses(renamed).keys() == {f"{name}'" for name in read}
    assert {value.name for op in walk(renamed.body) for value in op.outputs} == made


def test_every_op_is_replaced_where_it_stands() -> None:
    model = program()

    def marked(op: Op) -> Op:
        return evolve(op, attrs=(*op.attrs, ("marked", 1)))

    changed = map_ops(model.region, marked)
    assert [op.get("marked") for op in walk(changed.body)] == [1] * len(model.ops)
    assert [region.dim for region in walk_regions(changed.body)] == ["blocks", "layers"]


def test_a_step_has_its_blocks() -> None:
    step = program("differentiate")
    forward, backward = blocks(step.microbatches)
    assert (forward.kind, backward.kind) == ("forward", "backward")
    assert (forward, backward) == (step.forward, step.backward)
    assert isinstance(step.microbatches, Region)

"""Which parameters share a bucket, what the ranks keep of it, and where in the step it is gathered
and reduced.

Non-goals: that the step is the single device's (`tests/proof`), and what the buckets' memory holds
(`tests/runtime`).
"""

from math import prod

import pytest
from attrs import evolve
from hypothesis import example, given, settings
from hypothesis import strategies as st

from helpers.oracle.plans import Case, plan_text
from helpers.plan_table import FUSED
from helpers.small_plans import HEAD, LLAMA, MLP, START, Plan
from scalec.compiler.analysis.param_uses import products
from scalec.compiler.analysis.verifier.buckets import Buckets
from scalec.compiler.ir import Kind, Program, Region, walk
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan

NESTED = f"""{START}
  repeat blocks {{ repeat layers {{ {MLP} }} x = rmsnorm(x, inner[hidden], eps) }}
  loss = cross_entropy(x @ head[hidden -> vocab], labels)"""


def plan(state: str, body: str = LLAMA) -> Program:
    shard = "batch over replica, dp  vocab, heads, kv_heads, ffn over tp"
    return Plan(
        body, "replica = 2  dp = 2  tp = 2", shard, ranks=4, state=state, train="precision = bf16"
    ).program()


def where(program: Program, bucket: str) -> str:
    """The route of a bucket, in short."""
    it = program.bucket(bucket)
    shards, reduced = "*".join(it.shard_axes), "*".join(it.reduce_axes)
    gather = (
        f"gather {shards} {'layer' if it.reshard_after_forward else 'step'}, " if shards else ""
    )
    reduce = " then ".join(filter(None, (shards and f"scatter {shards}", reduced)))
    return f"{gather}{reduce} {'layer' if it.shard_gradients else 'step'}"


@pytest.mark.parametrize(
    ("state", "route"),
    [
        ("bucket = 1B", "replica*dp step"),
        ("zero 1 over dp  bucket = 1B", "gather dp step, scatter dp then replica step"),
        ("zero 2 over dp", "gather dp step, scatter dp then replica layer"),
        ("zero 3 over dp", "gather dp layer, scatter dp then replica layer"),
        ("zero 3 over replica, dp", "gather replica*dp layer, scatter replica*dp layer"),
        ("parameters, optimizer over dp", "gather dp layer, scatter dp then replica step"),
    ],
)
def test_stages_differ_in_scopes_alone(state: str, route: str) -> None:
    program = plan(state)
    layers = [bucket for bucket in program.buckets if bucket.layers]
    assert {name for bucket in layers for name in bucket.params} == {
        p.name for p in program.params if p.stacked
    }
    assert {where(program, bucket.name) for bucket in layers} == {route}
    begun = {str(op.get("bucket")) for op in program.ops if op.kind == "begin"}
    assert begun == ({bucket.name for bucket in layers} if route.endswith("step") else set())


def test_what_stands_outside_of_repeats_is_moved_once_a_step() -> None:
    program = plan("zero 3 over dp")
    rest = [bucket for bucket in program.buckets if not bucket.layers]
    assert sorted(name for bucket in rest for name in bucket.params) == ["head", "norm", "wte"]
    assert {where(program, bucket.name) for bucket in rest} == {
        "gather dp step, scatter dp then replica step"
    }


def test_biases_are_moved_after_all_updates() -> None:
    """What looks at the state before an update sees biases as the step had them."""
    program = compile_plan(
        Source("plan.scale", plan_text(Case(dp=2, model="biased", state="zero 1 over dp")))
    )
    assert [op.kind for op in program.ops][-2:] == ["update", "balanced"]


def test_turns_of_repeats_in_repeats() -> None:
    program = plan("zero 3 over dp", NESTED)
    layers = {name: bucket.layers for bucket in program.buckets for name in bucket.params}
    assert layers["norm2"] == layers["w_up"] == ("blocks", "layers")
    assert layers["inner"] == ("blocks",)
    assert layers["head"] == layers["wte"] == ()
    assert {where(program, bucket.name) for bucket in program.buckets if bucket.layers} == {
        "gather dp layer, scatter dp then replica layer"
    }


def test_groups_go_by_their_own_rules() -> None:
    program = plan('zero 3 over dp  group small { params = ["norm*"]  zero 1 over dp }')
    held = {name: bucket for bucket in program.buckets for name in bucket.params}
    assert not held["norm1"].layers
    assert where(program, held["norm1"].name) == "gather dp step, scatter dp then replica step"
    assert where(program, held["wq"].name) == "gather dp layer, scatter dp then replica layer"


def test_a_group_means_all_parts_of_a_divided_parameter() -> None:
    divided = f"""{START}
  repeat layers as i {{
    if i < 1 {{ x = x + silu(x @ up[hidden -> ffn]) @ down[ffn -> hidden] }}
    x = x * scale[hidden]
  }}
  loss = cross_entropy(x @ head[hidden -> vocab], labels)"""
    program = plan('group scales { params = ["scale"]  zero 3 over dp }', divided)
    shared = [sorted(bucket.params) for bucket in program.buckets if bucket.layers]
    assert sorted(shared) == [["scale_0"], ["scale_1"]]


@settings(max_examples=20)
@given(st.integers(0, 3), st.integers(1, 2000))
@example(0, 1)
def test_a_bucket_ends_at_the_cap(stage: int, cap: int) -> None:
    program = plan(f"zero {stage} over dp  bucket = {cap}B")
    assert sorted(name for bucket in program.buckets for name in bucket.params) == sorted(
        p.name for p in program.params
    )
    types = {param.name: param.type for param in program.params}
    for bucket in program.buckets:
        sizes = [
            4 * _layer(program, bucket.layers, types[name].dims, name) for name in bucket.params
        ]
        assert sum(sizes) <= cap or len(sizes) == 1
    order = [
        name for bucket in program.buckets if not bucket.layers for name in reversed(bucket.params)
    ]
    # as backward completes them
    assert [name for name in order if name in ("wte", "head")] == ["head", "wte"]


def test_a_bucket_of_just_the_cap_is_one() -> None:
    whole = plan("zero 2 over dp")
    types = {param.name: param.type for param in whole.params}
    sizes = [
        sum(4 * _layer(whole, it.layers, types[name].dims, name) for name in it.params)
        for it in whole.buckets
    ]
    for cap, same in ((max(sizes), True), (max(sizes) - 1, False)):
        assert (plan(f"zero 2 over dp  bucket = {cap}B").buckets == whole.buckets) == same


def _layer(program: Program, layers: tuple[str, ...], dims: tuple[str, ...], name: str) -> int:
    """The elements of a parameter that a rank has in one layer."""
    type = next(param.type for param in program.params if param.name == name)
    return program.elements(type) // prod(program.size(dim) for dim in dims[: len(layers)])


def test_no_gradient_is_reduced_before_it_is_whole() -> None:
    """`begin` reads what the step reduces: each bucket's slices, in the order of its parameters."""
    program = plan("zero 0 over dp  bucket = 1B")
    packs = {str(op.get("bucket")): op for op in program.ops if op.kind == "pack"}
    (microbatches,) = (stmt for stmt in program.region.body if isinstance(stmt, Region))
    backward = microbatches.body[1]
    assert isinstance(backward, Region)
    for op in (op for op in program.ops if op.kind == "begin"):
        (repeat,) = (stmt for stmt in backward.body if isinstance(stmt, Region) and op in stmt.body)
        stacks = {
            end.name: result.name for end, result in zip(repeat.yields, repeat.results, strict=True)
        }
        casts = {o.inputs[0]: o.outputs[0].name for o in walk(backward.body) if o.kind == "cast"}
        sums = {
            e.name: r.name for e, r in zip(microbatches.yields, microbatches.results, strict=True)
        }
        assert (
            tuple(sums[casts[stacks[name]]] for name in op.inputs)
            == packs[str(op.get("bucket"))].inputs
        )
        assert all(kind in (Kind.PARTIAL, Kind.SHARDED) for kind in _kinds(program, op.inputs))


def _kinds(program: Program, names: tuple[str, ...]) -> list[Kind]:
    made = {value.name: value.type for op in program.ops for value in op.outputs}
    return [place.kind for name in names for _, place in made[name].places]


BIASES = f"""{START} repeat layers {{
    q = x @ wq[hidden -> ffn] + bq[ffn]
    k = x @ wk[hidden -> ffn] + bk[ffn]
    x = x + (silu(q) * tanh(k)) @ w_down[ffn -> hidden]
}} {HEAD}"""
OUTSIDE = BIASES.replace(
    START, f"{START} x = x + (x @ wk[hidden -> ffn]) @ back[ffn -> hidden]"
).replace("wk[hidden -> ffn] + bk", "wk + bk")
GROUPS = 'group keys { params = ["wk"]  weight_decay = 0.5 }'
STATES = [
    "",
    "bucket = 1B",
    "zero 1 over dp",
    "zero 2 over dp",
    "zero 3 over dp",
    "zero 3 over dp  bucket = 1B",
]


def _fused(body: str, state: str = "", group: str = "") -> Program:
    text = Plan(body, "dp = 2", "batch over dp", 2, state=state, train=FUSED).text()
    return compile_plan(Source("tiny.scale", text.replace("clip = 0.0", f"clip = 0.0  {group}")))


@pytest.mark.parametrize("state", STATES)
def test_weights_of_one_product_lie_side_by_side_whatever_the_cap(state: str) -> None:
    """Biases that the plan has between them come behind."""
    program = _fused(BIASES, state)
    assert products(program) == [("wq", "wk")]
    (own,) = (bucket.params for bucket in program.buckets if "wq" in bucket.params)
    at = own.index("wq")
    assert own[at : at + 2] == ("wq", "wk")


def test_buckets_that_part_the_weights_of_one_product_are_no_program() -> None:
    program = _fused(BIASES, "bucket = 1B")
    (bucket,) = (bucket for bucket in program.buckets if "wq" in bucket.params)
    apart = tuple(evolve(b, params=b.params[::-1]) if b is bucket else b for b in program.buckets)
    with pytest.raises(AssertionError, match="wq, wk of one product lie as wq"):
        Buckets(evolve(program, buckets=apart)).check()


@pytest.mark.parametrize(
    ("body", "state", "group"),
    [
        (BIASES, "", GROUPS),
        (BIASES, 'zero 1 over dp  group keys { params = ["wk"]  zero 3 over dp }', ""),
        (BIASES.replace("tanh(k)", "tanh(k) * sum(wk, over=hidden)"), "", ""),
        (OUTSIDE, "", ""),
    ],
    ids=["other settings", "other state", "read twice", "read outside"],
)
def test_weights_that_cannot_lie_side_by_side_are_products_of_their_own(
    body: str, state: str, group: str
) -> None:
    assert products(_fused(body, state, group)) == []

"""Messages of attention over a sharded sequence: the counts and bytes of each strategy, by hand."""

from collections import Counter

import pytest

from helpers.small_plans import DIMS, Plan
from scalec.compiler.analysis import link_traffic
from scalec.compiler.analysis.communication import collectives
from scalec.compiler.analysis.context_parallel import costs, sequence_axes, strategy
from scalec.compiler.analysis.memory import account
from scalec.compiler.ir import Program
from scalec.compiler.ops import OPS, messages
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan

SEQ, WIDTH, LAYERS = 16, 2, 2
"""Tokens of a sequence, elements of a head, layers; the plans have 4 sequences, and 8 bytes an
element.
"""


def program(
    rule: str, mesh: str = "cp = 4", mask: str = "causal", ranks: int = 1, train: str = ""
) -> Program:
    plan = Plan(
        mesh=mesh,
        shard=rule,
        seq=SEQ,
        microbatches=1,
        ranks=ranks,
        train=f"precision = fp64  {train}",
    )
    return compile_plan(Source("plan.scale", plan.text().replace("mask=causal", f"mask={mask}")))


def sent(of: Program) -> Counter[tuple[str, str, str]]:
    """Calls a layer, by op, axes and place; state and totals left out."""
    found = Counter[tuple[str, str, str]]()
    for each in collectives(of):
        if each.use == "activations" and each.where != "step":
            found[each.op, ", ".join(each.axes), each.where] += each.count // LAYERS
    return found


def keys_and_values(ranks: int, kv_heads: int = 2) -> int:
    """The bytes of a rank's part of both."""
    return 2 * 4 * SEQ // ranks * kv_heads * WIDTH * 8


@pytest.mark.parametrize("layout", ["", " as zigzag"])
def test_gather(layout: str) -> None:
    found = program(f"seq over cp{layout}")
    assert sent(found) == {
        ("all_gather", "cp", "forward"): 2,
        ("reduce_scatter", "cp", "backward"): 2,
    }
    gathers = [each for each in collectives(found) if each.op == "all_gather"]
    assert sum(each.bytes for each in gathers) == keys_and_values(4)


@pytest.mark.parametrize("layout", ["", " as zigzag"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ring(layout: str, ranks: int) -> None:
    found = program(f"seq over cp{layout} via ring", mesh=f"cp = {ranks}")
    assert sent(found) == {
        ("rotate", "cp", "forward"): ranks - 1,
        ("rotate", "cp", "backward"): 2 * ranks - 1,
    }
    assert {each.bytes for each in collectives(found) if each.op == "rotate"} == {
        keys_and_values(ranks)
    }


@pytest.mark.parametrize(
    ("window", "hops"), [(1, 0), (2, 1), (5, 1), (6, 2), (9, 2), (10, 3), (16, 3)]
)
def test_a_window_shortens_a_ring(window: int, hops: int) -> None:
    """Of parts of 4 positions, one sees `window` - 1 positions before it; gradients go home by
    the short way.
    """
    found = program("seq over cp via ring", mask=f"causal, window={window}")
    back = 2 * hops + 1 if hops else 0
    assert (
        sent(found)
        == Counter({("rotate", "cp", "forward"): hops, ("rotate", "cp", "backward"): back})
        - Counter()
    )
    (op,) = (op for op in found.ops if op.kind == "vjp" and op.get("of") == "ring_attention")
    home = [each.by for each in messages(found, op, found.types)][-1:]
    assert home == ([] if not hops else [1 if hops == 3 else -hops])


def test_an_exchange() -> None:
    found = program("seq over uly via ulysses", mesh="uly = 2")
    assert sent(found) == {
        ("all_to_all", "uly", "forward"): 4,
        ("all_to_all", "uly", "backward"): 4,
    }


def test_shapes_are_those_that_are_sent() -> None:
    """An exchange in as many pieces as there are ranks, a gather with its dim first: as a
    record has them.
    """
    found = [
        each
        for each in collectives(program("seq over uly via ulysses", mesh="uly = 4"))
        if each.where == "forward"
    ]
    shapes = {(each.op, each.axes): each.shape for each in found if each.use == "activations"}
    # of keys, gathered over the inner factor before they are exchanged over the outer
    part, few = SEQ // 4, SEQ // 2
    assert shapes["all_gather", ("uly_1",)] == (part, 4, 2, WIDTH)
    assert shapes["all_to_all", ("uly_0",)] == (2, 4, few, 1, WIDTH)


def test_few_heads_of_keys_are_gathered_first() -> None:
    """Of 2 for 4 ranks, by the factor that they leave; then exchanged."""
    found = sent(program("seq over uly via ulysses", mesh="uly = 4"))
    assert (
        found["all_gather", "uly_1", "forward"] == found["reduce_scatter", "uly_1", "backward"] == 2
    )
    assert found["all_to_all", "uly_0", "forward"] == found["all_to_all", "uly_0", "backward"] == 2
    assert (
        found["all_to_all", "uly_0, uly_1", "forward"]
        == found["all_to_all", "uly_0, uly_1", "backward"]
        == 2
    )


def test_sequence_parallelism_within() -> None:
    rule = "seq over cp as zigzag  vocab, heads, kv_heads, ffn over tp  seq over tp"
    found = sent(program(rule, mesh="cp = 2  tp = 2"))
    assert found["all_gather", "cp", "forward"] == found["reduce_scatter", "cp", "backward"] == 2
    assert not any(axes not in ("cp", "tp") for _, axes, _ in found)


@pytest.mark.parametrize(
    "how", ["", "as zigzag", "via gather", "via ring", "via ulysses", "via auto"]
)
def test_where_heads_lie_over_the_axis_a_strategy_says_nothing(how: str) -> None:
    rule = "vocab, heads, kv_heads, ffn over tp  seq over tp"
    assert sent(program(f"{rule} {how}", mesh="tp = 2")) == sent(program(rule, mesh="tp = 2"))


def test_parameters_are_reduced_over_it_as_over_data() -> None:
    found = collectives(
        program("batch over dp  seq over cp as zigzag via ring", mesh="dp = 2  cp = 2", ranks=2)
    )
    assert {each.axes for each in found if each.use == "gradients"} == {("dp", "cp")}


@pytest.mark.sample(24)
@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize(
    "again", ["", "recompute = full", "gathered = regather", "recompute = selective(attention)"]
)
@pytest.mark.parametrize(
    ("rule", "mesh"),
    [
        ("seq over cp as zigzag", "cp = 4"),
        ("seq over cp as zigzag via ring", "cp = 4"),
        ("seq over cp via ring", "cp = 2"),
        ("seq over cp via ulysses", "cp = 2"),
        ("seq over cp via ulysses", "cp = 4"),
        ("seq over a as zigzag via ring  seq over cp via ulysses", "a = 2  cp = 2"),
        (
            "seq over cp as zigzag via ring  vocab, heads, kv_heads, ffn over tp  seq over tp",
            "cp = 2  tp = 2",
        ),
    ],
)
def test_what_a_strategy_costs_is_what_the_step_sends(
    rule: str, mesh: str, again: str, kernels: str
) -> None:
    found = program(rule, mesh=mesh, train=f"{again}  kernels = {kernels}")
    op = next(op for op in found.ops if sequence_axes(found, op))
    listed = [
        each for each in collectives(found) if each.use == "activations" and each.where != "step"
    ]
    for axis in sequence_axes(found, op):
        own = next(
            each for each in costs(found, op, axis) if each.strategy == strategy(found, op, axis)
        )
        for where, (calls, size) in (("forward", own.forward), ("backward", own.backward)):
            here = [
                each
                for each in listed
                if each.where == where and found.axis(each.axes[0]).parent == axis
            ]
            assert (
                sum(each.count for each in here),
                sum(map(link_traffic.get_sent_bytes, here)),
            ) == (
                LAYERS * calls,
                LAYERS * size,
            )


@pytest.mark.parametrize(
    ("rule", "kv_heads", "chosen"),
    [
        ("seq over cp as zigzag via auto", 2, ["gather"]),
        ("seq over cp via auto", 2, ["gather"]),  # few keys
        ("seq over cp via auto", 4, ["ulysses"]),
        ("seq over a via auto  seq over cp via auto", 4, ["gather", "ulysses"]),
    ],
)
def test_auto_takes_what_sends_least(rule: str, kv_heads: int, chosen: list[str]) -> None:
    """Both are tried in all ways, but for a ring beside a gather."""
    mesh = "a = 2  cp = 4" if " a " in rule else "cp = 4"
    text = Plan(
        mesh=mesh, shard=rule, seq=SEQ, dims=DIMS.replace("kv_heads = 2", f"kv_heads = {kv_heads}")
    ).text()
    program = compile_plan(Source("plan.scale", text), "choose_strategies")
    assert [claim.via for claim in program.claims if claim.via] == chosen


def test_auto_takes_a_ring_where_whole_keys_do_not_fit() -> None:
    """By the account: with so little memory that gathered keys of all layers are too much."""
    shard, train = "seq over cp as zigzag via auto", "precision = bf16"
    plan = Plan(mesh="cp = 4", shard=shard, seq=64, microbatches=1, train=train).text()

    def compiled(way: str, memory: int) -> Program:
        cluster = f"cluster {{ gpu = any  memory = {memory}B }}"
        return compile_plan(Source("plan.scale", f"{cluster}\n{plan.replace('auto', way)}"))

    needs = {way: account(compiled(way, 2**40)).total for way in ("gather", "ring")}
    assert needs["ring"] < needs["gather"]
    for memory, chosen in ((needs["gather"], "gather"), (needs["gather"] - 1, "ring")):
        assert [claim.via for claim in compiled("auto", memory).claims] == [chosen]


def test_the_op_of_a_ring_is_one_to_a_plan() -> None:
    """It is selected, and refused, by the name that a plan has for it."""
    assert OPS["ring_attention"].plan_name == "attention"

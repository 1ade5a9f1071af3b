"""The account against what ops say that they communicate, and an op of its own kind that sends
around a ring.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from math import prod
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from helpers import zero_plans
from helpers.zero_plans import HIDDEN
from scalec.compiler.analysis.collective import Collective
from scalec.compiler.analysis.communication import collectives, evaluation
from scalec.compiler.analysis.link_traffic import get_sent_bytes
from scalec.compiler.analysis.memory.reserve import communicators
from scalec.compiler.config.units import amount
from scalec.compiler.emit import emit
from scalec.compiler.emit.plan_json import plan_json
from scalec.compiler.emit.readback import check
from scalec.compiler.ir import Op, Program, Region, base, walk
from scalec.compiler.ops import OPS, Message, messages
from scalec.compiler.ops.protocol import Vjp
from scalec.compiler.ops.saved_tensors import Local
from scalec.compiler.proof.recorded.files import Call
from scalec.compiler.proof.recorded.plan import get_expected_calls
from scalec.compiler.reports.explain import explain_collectives
from scalec.compiler.syntax.limits import load
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan

PLANS = Path(__file__).parents[2] / "plans"


def ops(
    region: Region, program: Program, outer: int = 1, layers: int = 1
) -> Iterator[tuple[Op, int]]:
    """Every op, and how often it is done in a step: `outer` times the `layers` of the innermost
    loop around it.
    """
    for stmt in region.body:
        if isinstance(stmt, Region):
            inside = (outer * layers, program.size(stmt.dim)) if stmt.dim else (outer, layers)
            yield from ops(stmt, program, *inside)
        else:
            yield stmt, outer * -(-layers // int(str(dict(stmt.attrs).get("every", 1))))


def counted(program: Program) -> Counter[tuple[object, ...]]:
    """The elements of all messages, by operation, axes and element type, of one rank without a
    pipeline.
    """
    known, found = program.types, Counter[tuple[object, ...]]()
    for op, times in ops(program.region, program):
        for it in messages(program, op, known):
            found[it.op, it.axes, it.dtype, it.maximum, it.among] += times * prod(it.shape)
    return found


@pytest.mark.sample(10)
@pytest.mark.parametrize("path", sorted(PLANS.glob("*.scale")), ids=lambda path: path.stem)
def test_the_account_is_the_sum_of_what_ops_say(path: Path) -> None:
    program = compile_plan(load(path))
    # the IR has all stages at once, and the account a rank's: messages between them are its own
    if program.pipeline:
        said = {(op, axes, dtype) for op, axes, dtype, *_ in counted(program)}
        ranks = range(program.axis(program.pipeline.axis).size)
        listed = [it for rank in ranks for it in collectives(program, rank) if it.peer is None]
        assert said == {(it.op, it.axes, it.dtype) for it in listed}
        return
    found = Counter[tuple[object, ...]]()
    for it in collectives(program):
        found[it.op, it.axes, it.dtype, it.maximum, it.among] += it.count * it.elements
    assert found == counted(program)


# ---- an op that no product code knows: two values go around a ring in turn, and one goes two ranks
# further at the end ---- in backward the operand and its gradient go around together, the other way


def around(it: Local) -> tuple[Message, ...]:
    """Of [batch, seq, ffn]: what travels has a result's name."""
    shape, value = it.program.local_shape(it.types[0]), it.op.outputs[0].name
    hop = Message("rotate", value, ("cp",), "f32", shape, hops=3)
    return hop, evolve(hop, dtype="f64"), evolve(hop, hops=0, by=2)


def back(it: Local) -> tuple[Message, ...]:
    """The operand by its name, and the gradient by that of the result."""
    shape, (gradient,), (operand,) = (
        it.program.local_shape(it.types[0]),
        it.op.outputs,
        it.op.inputs,
    )
    assert it.wanted == (True,)
    hop = Message("rotate", operand, ("cp",), "f32", shape, hops=3, by=3)
    return hop, evolve(hop, what=gradient.name, dtype="f64")


def with_rings(region: Region, every: int) -> Region:
    """`silu` as a ring, which is done in the first of every so many layers, and its gradient as
    that of a ring.
    """
    body = (
        with_rings(stmt, every) if isinstance(stmt, Region) else as_ring(stmt, every)
        for stmt in region.body
    )
    return evolve(region, body=tuple(body))


def as_ring(op: Op, every: int) -> Op:
    attrs = dict(op.attrs)
    if "silu" not in (op.kind, attrs.get("of")):
        return op
    attrs |= {"of": "ring"} if op.kind == "vjp" else {}
    attrs |= {"every": every} if every else {}
    return evolve(op, kind="ring" if op.kind == "silu" else op.kind, attrs=tuple(attrs.items()))


@pytest.fixture(params=[1, 2])
def every(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def ringed(monkeypatch: pytest.MonkeyPatch, every: int) -> Program:
    """3 microbatches of 5 layers, on 2 × 4 ranks."""
    monkeypatch.setitem(
        OPS,
        "ring",
        evolve(OPS["silu"], name="ring", communicates=around, vjp=Vjp(communicates=back)),
    )
    program = plain()
    return evolve(program, region=with_rings(program.region, every))


def plain() -> Program:
    return zero_plans.program("", 3, "dp = 2 cp = 4")


def rotations(program: Program, where: str = "forward") -> list[Collective]:
    return [it for it in collectives(program) if it.op == "rotate" and it.where == where]


BYTES = 4 * 1 * HIDDEN * 4  # of f32[batch, seq, ffn]


def test_a_ring_is_in_the_account(ringed: Program, every: int) -> None:
    times = 3 * (5 if every == 1 else 3)
    found = [
        (it.hops, it.by, it.dtype, it.count, it.bytes, it.loops, it.use, it.where)
        for it in rotations(ringed)
    ]
    around = (("microbatches", "layers"), "activations", "forward")
    assert found == [
        ("hops", 1, "f32", 3 * times, BYTES, *around),
        ("hops", 1, "f64", 3 * times, 2 * BYTES, *around),
        ("", 2, "f32", times, BYTES, *around),
    ]
    others = [it for it in collectives(ringed) if it.op != "rotate"]
    assert others == list(collectives(plain()))


def test_the_gradient_of_a_ring_is_in_the_account(ringed: Program, every: int) -> None:
    operand, gradient = rotations(ringed, "backward")
    times = 3 * (5 if every == 1 else 3)
    around = (("microbatches", "layers.1"), 3 * times, "hops", 3, "activations")
    assert [(it.loops, it.count, base(it.hops), it.by, it.use) for it in (operand, gradient)] == [
        around
    ] * 2
    assert operand.hops == gradient.hops != rotations(ringed)[0].hops
    assert (operand.dtype, gradient.dtype) == ("f32", "f64")
    read = {
        name
        for op in walk(ringed.region.body)
        if dict(op.attrs).get("of") == "ring"
        for name in op.inputs[1:]
    }
    assert (operand.value in read, gradient.value.startswith("d_")) == (True, True)
    assert all(it not in evaluation(ringed) for it in (operand, gradient))


def test_gradients_of_weights_send_nothing(ringed: Program, every: int) -> None:
    """They may be put off to an action that no rank waits in."""
    known = ringed.types
    (op,) = (op for op in walk(ringed.region.body) if dict(op.attrs).get("of") == "ring")
    weight = tuple(evolve(value, type=evolve(value.type, dims=("hidden",))) for value in op.outputs)
    assert messages(ringed, op, known)
    assert not messages(ringed, evolve(op, outputs=weight), known)


def test_a_ring_sends_all_that_goes_in(ringed: Program, every: int) -> None:
    times = 3 * (5 if every == 1 else 3)
    assert sum(map(get_sent_bytes, rotations(ringed))) == times * (3 + 6 + 1) * BYTES
    assert sum(map(get_sent_bytes, rotations(ringed, "backward"))) == times * (3 + 6) * BYTES
    assert communicators(ringed) == communicators(plain()) + 1
    (line,) = (
        line
        for line in explain_collectives(ringed).splitlines()
        if "f64" in line and "forward" in line
    )
    (other,) = (
        line
        for line in explain_collectives(ringed).splitlines()
        if "f64" in line and "backward" in line
    )
    calls = 9 * (5 if every == 1 else 3)
    assert re.sub(" {2,}", " | ", line) == (
        "rotate over cp, 4 ranks | forward, 3 microbatches x 5 layers x 3 hops | "
        f"{calls} | 32 x f64 | {amount(calls * 2 * BYTES)} | within a node"
    )
    assert other.split()[-6:] == line.split()[-6:]


def test_a_ring_is_in_the_plan_of_a_record(ringed: Program, every: int) -> None:
    source = Source("tiny.scale", zero_plans.plan_text("", 3, "dp = 2 cp = 4"))
    calls = get_expected_calls(json.loads(plan_json(ringed, source, ringed, None, 0, {})), rank=5)
    found = [each.call for each in calls["train"] if each.call.op == "all_to_all"]

    def rotate(dtype: str, to: int, source: int) -> Call:
        """By rank 1 of 4, all to one and all from one, by their places."""
        splits = tuple(tuple(4 * HIDDEN * (i == place) for i in range(4)) for place in (to, source))
        return Call("all_to_all", "", (4, 5, 6, 7), (1, 4, HIDDEN), dtype, splits=splits)

    (one, other), last = (rotate(dtype, 2, 0) for dtype in ("f32", "f64")), rotate("f32", 3, 3)
    back = [rotate(dtype, 0, 2) for dtype in ("f32", "f64")]
    layers = 5 if every == 1 else 3
    forward, backward = [*[one, other] * 3, last] * layers, back * 3 * layers
    assert found == [*forward, *backward] * 3
    assert [each.call for each in calls["evaluate"] if each.call.op == "all_to_all"] == forward * 3


@pytest.mark.parametrize(
    "entry",
    [{"communicates": around}, {"vjp": Vjp(communicates=back)}, {}],
    ids=["forward", "backward", "neither"],
)
def test_programs_keep_the_order_of_what_communicates(
    entry: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward or backward; other ops of the forward may be in any order."""
    monkeypatch.setitem(OPS, "ring", evolve(OPS["silu"], name="ring", **entry))
    lines = "g = silu(x @ up[hidden -> ffn])  h = silu(x @ gate[hidden -> ffn])  x = x + (g * h) @"
    source = Source(
        "tiny.scale",
        zero_plans.plan_text("").replace("x = x + silu(x @ up[hidden -> ffn]) @", lines),
    )
    program = compile_plan(source)
    text = emit(program, source)["train.py"]
    ringed = evolve(program, region=with_rings(program.region, 0))
    assert check(text, ringed)
    first, second = re.findall(r" +[gh] = silu.*\n", text)
    swapped = text.replace(first + second, second + first)
    with (
        pytest.raises(AssertionError, match="comes before what the IR communicates")
        if entry
        else nullcontext()
    ):
        check(swapped, ringed)

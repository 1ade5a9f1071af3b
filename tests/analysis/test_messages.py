"""The account against what ops say that they communicate, and an op of its own kind that sends around a ring."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from math import prod
from pathlib import Path

import pytest
from attrs import evolve

from helpers import zero_plans
from helpers.zero_plans import HIDDEN
from scalec.compiler.analysis.collective import Collective
from scalec.compiler.analysis.communication import collectives
from scalec.compiler.analysis.link_traffic import sent
from scalec.compiler.analysis.memory.reserve import communicators
from scalec.compiler.config.units import amount
from scalec.compiler.emit.plan_json import plan_json
from scalec.compiler.ir import Dim, Op, Program, Region
from scalec.compiler.ops import OPS, Message, messages
from scalec.compiler.ops.saved_tensors import Local
from scalec.compiler.passes import compile_plan
from scalec.compiler.proof.recorded.files import Call
from scalec.compiler.proof.recorded.plan import expected
from scalec.compiler.reports.explain import explain_collectives
from scalec.compiler.syntax.limits import load
from scalec.compiler.syntax.source import Source

PLANS = Path(__file__).parents[2] / "plans"


def ops(region: Region, program: Program, outer: int = 1, layers: int = 1) -> Iterator[tuple[Op, int]]:
    """Every op, and how often it is done in a step: `outer` times the `layers` of the innermost loop around it."""
    for stmt in region.body:
        if isinstance(stmt, Region):
            inside = (outer * layers, program.size(stmt.dim)) if stmt.dim else (outer, layers)
            yield from ops(stmt, program, *inside)
        else:
            yield stmt, outer * -(-layers // int(str(dict(stmt.attrs).get("every", 1))))


def counted(program: Program) -> Counter[tuple[object, ...]]:
    """The elements of all messages, by operation, axes and element type, of one rank without a pipeline."""
    known, found = program.types, Counter[tuple[object, ...]]()
    for op, times in ops(program.region, program):
        for it in messages(program, op, known):
            found[it.op, it.axes, it.dtype, it.maximum, it.among] += times * prod(it.shape)
    return found


@pytest.mark.parametrize("path", sorted(PLANS.glob("*.scale")), ids=lambda path: path.stem)
def test_the_account_is_the_sum_of_what_ops_say(path: Path) -> None:
    program = compile_plan(load(path))
    if program.pipeline:  # the IR has all stages at once, and the account a rank's: messages between them are its own
        said = {(op, axes, dtype) for op, axes, dtype, *_ in counted(program)}
        ranks = range(program.axis(program.pipeline.axis).size)
        listed = [it for rank in ranks for it in collectives(program, rank) if it.peer is None]
        assert said == {(it.op, it.axes, it.dtype) for it in listed}
        return
    found = Counter[tuple[object, ...]]()
    for it in collectives(program):
        found[it.op, it.axes, it.dtype, it.maximum, it.among] += it.count * it.elements
    assert found == counted(program)


# ---- an op that no product code knows: two values go around a ring in turn, and one goes two ranks further at the end


def around(it: Local) -> tuple[Message, ...]:
    """Of [batch, seq, ffn]: what travels has a result's name."""
    shape, value = it.program.local_shape(it.types[0]), it.op.outputs[0].name
    hop = Message("rotate", value, ("cp",), "f32", shape, hops="hops_cp")
    return hop, evolve(hop, dtype="f64"), evolve(hop, hops="", by=2)


def with_rings(region: Region, every: int) -> Region:
    """`silu` as a ring, which is done in the first of every so many layers."""
    body = (
        with_rings(stmt, every)
        if isinstance(stmt, Region)
        else evolve(stmt, kind="ring", attrs=(*stmt.attrs, ("every", every)))
        if stmt.kind == "silu"
        else stmt
        for stmt in region.body
    )
    return evolve(region, body=tuple(body))


@pytest.fixture(params=[1, 2])
def every(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def ringed(monkeypatch: pytest.MonkeyPatch, every: int) -> Program:
    """3 microbatches of 5 layers, on 2 × 4 ranks."""
    monkeypatch.setitem(OPS, "ring", evolve(OPS["silu"], name="ring", communicates=around))
    program = plain()
    return evolve(
        program,
        dims=(*program.dims, Dim("hops_cp", 3, span=program.dims[0].span)),
        region=with_rings(program.region, every),
    )


def plain() -> Program:
    return zero_plans.program("", 3, "dp = 2 cp = 4")


def rotations(program: Program) -> list[Collective]:
    return [it for it in collectives(program) if it.op == "rotate"]


BYTES = 4 * 1 * HIDDEN * 4  # of f32[batch, seq, ffn]


def test_a_ring_is_in_the_account(ringed: Program, every: int) -> None:
    times = 3 * (5 if every == 1 else 3)
    found = [(it.hops, it.by, it.dtype, it.count, it.bytes, it.loops, it.use, it.where) for it in rotations(ringed)]
    around = (("microbatches", "layers"), "activations", "forward")
    assert found == [
        ("hops_cp", 1, "f32", 3 * times, BYTES, *around),
        ("hops_cp", 1, "f64", 3 * times, 2 * BYTES, *around),
        ("", 2, "f32", times, BYTES, *around),
    ]
    others = [it for it in collectives(ringed) if it.op != "rotate"]
    assert others == list(collectives(plain()))


def test_a_ring_sends_all_that_goes_in(ringed: Program, every: int) -> None:
    assert sum(map(sent, rotations(ringed))) == 3 * (5 if every == 1 else 3) * (3 + 6 + 1) * BYTES
    assert communicators(ringed) == communicators(plain()) + 1
    (line,) = (line for line in explain_collectives(ringed).splitlines() if "f64" in line)
    calls = 9 * (5 if every == 1 else 3)
    assert re.sub(" {2,}", " | ", line) == (
        "rotate over cp, 4 ranks | forward, 3 microbatches x 5 layers x 3 hops_cp | "
        f"{calls} | 32 x f64 | {amount(calls * 2 * BYTES)} | within a node"
    )


def test_a_ring_is_in_the_plan_of_a_record(ringed: Program, every: int) -> None:
    source = Source("tiny.scale", zero_plans.plan_text("", 3, "dp = 2 cp = 4"))
    calls = expected(json.loads(plan_json(ringed, source, ringed, None, 0, {})), rank=5)
    found = [each.call for each in calls["train"] if each.call.op == "rotate"]
    one, other = (Call("rotate", "", (4, 5, 6, 7), (1, 4, HIDDEN), dtype) for dtype in ("f32", "f64"))
    assert found == [*[one, other] * 3, one] * (3 * (5 if every == 1 else 3))
    assert [each.call for each in calls["evaluate"] if each.call.op == "rotate"] == found

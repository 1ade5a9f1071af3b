"""The time of a step: the operations that it does, and laws of its timeline."""

from collections import Counter
from collections.abc import Iterator
from math import inf, prod
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from helpers.timed_plans import (
    BATCH,
    EXPERTS,
    FFN,
    HARDWARE,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    MODEL,
    PROGRAMS,
    SEQ,
    VOCAB,
    compiled,
    several,
)
from helpers.zero_plans import program as zero
from scalec.compiler import cli
from scalec.compiler.analysis.expert_loads import with_load
from scalec.compiler.analysis.hardware import Hardware
from scalec.compiler.analysis.time.clocks import BUBBLE, HOST, StepTime
from scalec.compiler.analysis.time.op_rows import op_rows
from scalec.compiler.analysis.time.prices import EXPOSED
from scalec.compiler.analysis.time.step import step_time, times_by_load
from scalec.compiler.ir import Program, Region, Stmt
from scalec.compiler.ops import OPS
from scalec.compiler.ops.saved_tensors import Local
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan

PLANS = Path(__file__).parents[3] / "plans"


def operations(program: Program) -> int:
    """Those of a step of one rank."""

    def of(body: tuple[Stmt, ...]) -> Iterator[int]:
        for stmt in body:
            if isinstance(stmt, Region):
                yield sum(of(stmt.body)) * (program.size(stmt.dim) if stmt.dim else 1)
            else:
                types = tuple(program.types[name] for name in stmt.inputs)
                yield (
                    OPS[stmt.kind]
                    .work(Local(program, stmt, types, (True,) * len(types)))
                    .operations
                )

    return sum(of(program.region.body))


TOKENS = SEQ * BATCH
MATRICES = LAYERS * (HIDDEN * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS) + 2 * HIDDEN * FFN)
HEAD = HIDDEN * VOCAB
SEEN = LAYERS * BATCH * HEADS * SEQ * (SEQ + 1) // 2 * HEAD_DIM
"""Multiplications of queries with keys."""


@pytest.mark.parametrize(
    ("mesh", "shard", "ranks"),
    [
        ("", "", 1),
        ("dp = 2", "batch over dp", 2),
        ("dp = 2  tp = 2", "batch over dp\nvocab, heads, kv_heads, ffn over tp\nseq over tp", 4),
        ("cp = 2", "seq over cp as zigzag via gather", 2),
        ("cp = 2", "seq over cp as zigzag via ring", 2),
    ],
)
def test_operations_are_those_of_the_formulas(mesh: str, shard: str, ranks: int) -> None:
    """6 for each token and number of a matrix; of attention 2 products forward, and 5 backward."""
    products = 6 * TOKENS * (MATRICES + HEAD)
    attention = (2 + 5) * 2 * SEEN
    assert (
        operations(compiled(mesh, shard, train="kernels = torch")) * ranks == products + attention
    )


def test_a_rank_with_the_last_part_of_the_sequence_sees_most() -> None:
    """Of two parts that are not balanced: 3/4 of the pairs, and half of those of both."""
    whole, half = SEQ * (SEQ + 1) // 2, SEQ // 2 * (SEQ // 2 + 1) // 2
    found = operations(compiled("cp = 2", "seq over cp via gather", train="kernels = torch"))
    balanced = operations(
        compiled("cp = 2", "seq over cp as zigzag via gather", train="kernels = torch")
    )
    per_pair = 7 * 2 * LAYERS * BATCH * HEADS * HEAD_DIM
    assert found - balanced == per_pair * (whole - half) - per_pair * whole // 2


def test_what_is_recomputed_is_done_twice() -> None:
    """But for each layer's last product, whose result backward does not need."""
    again = operations(compiled(train="recompute = full")) - operations(compiled())
    assert again == 2 * TOKENS * (MATRICES - LAYERS * HIDDEN * FFN) + 2 * 2 * SEEN


@pytest.mark.parametrize("capacity", [0, 2])
def test_experts_do_what_their_rows_ask_for(capacity: int) -> None:
    """Those that tokens chose, or as many as a capacity of twice the equal share leaves room
    for.
    """
    text = (
        EXPERTS.replace("hidden -> experts], 2)", f"hidden -> experts], 2, capacity={capacity})")
        if capacity
        else EXPERTS
    )
    text = text.replace("steps = 1", "steps = 1  experts = padded") if capacity else text
    found = operations(compile_plan(Source("tiny.scale", text))) * 4
    assert found == 6 * SEQ * BATCH * (2 * (2 * 2 * 64 * 32 * (capacity or 1) + 64 * 8) + 64 * 128)


@pytest.mark.parametrize("capacity", [1, 2])
def test_experts_do_what_they_are_padded_to(capacity: int) -> None:
    """So many shares of an equal load: 8 positions of 32, of which each chooses 2 of 8 experts."""
    text = EXPERTS.replace(", 2)", f", 2, capacity={capacity})").replace(
        "steps = 1", "steps = 1  experts = padded"
    )
    found = operations(compile_plan(Source("tiny.scale", text))) * 4
    assert found == 6 * SEQ * BATCH * (2 * (2 * 2 * capacity * 64 * 32 + 64 * 8) + 64 * 128)


# ---- the host

ALONE = EXPERTS.replace("mesh { ep = 4 }\nshard {\n  experts over ep\n  batch over ep\n}\n", "")
PADDED = EXPERTS.replace(", 2)", ", 2, capacity=2)").replace(
    "steps = 1", "steps = 1  experts = padded"
)


@pytest.mark.parametrize(("text", "microbatches"), [(EXPERTS, 2), (ALONE, 8), (PADDED, 0)])
def test_the_host_waits_for_the_counts_of_experts_rows_once_a_layer_and_microbatch(
    text: str, microbatches: int
) -> None:
    """It then works for six ops while the GPU has nothing to do; elsewhere it is far ahead of
    kernels of 1 ms.
    """
    layers, op = 2, 1e-5
    on = evolve(HARDWARE, kernel=1e-3, collective=0.0)
    program = compile_plan(Source("tiny.scale", text))
    instant, slower = (step_time(program, evolve(on, op=seconds)) for seconds in (0.0, op))
    assert slower.seconds - instant.seconds == pytest.approx(
        6 * op * layers * microbatches, abs=2 * op
    )
    assert slower.kinds.get(HOST, 0.0) == pytest.approx(slower.seconds - instant.seconds)


# ---- laws


def test_an_uneven_load_of_experts_makes_products_and_exchanges_longer() -> None:
    """All tokens choose two of a rank's two experts: 4 equal shares of rows, come and gone, in
    4 times as long.
    """
    on = evolve(HARDWARE, op=0.0, collective=0.0, link_latency=0.0, link=1e6, kernel=0.0)
    found = times_by_load(PROGRAMS["experts"], on)
    assert [*found] == ["balanced", "room = 1.25", "worst"]
    assert found["balanced"].seconds == pytest.approx(
        step_time(PROGRAMS["experts"], on).seconds, rel=1e-9
    )
    assert found["worst"].seconds == pytest.approx(
        step_time(with_load(PROGRAMS["experts"], inf), on).seconds, rel=1e-9
    )
    sent = {name: it.sent["ep",] for name, it in found.items()}
    # exchanges, layers, microbatches, rows, width, bytes
    rows = 4 * 2 * BATCH // 4 * SEQ * 2 * 64 * 4 * 3 / 4 / 1e6
    assert sent["room = 1.25"] - sent["balanced"] == pytest.approx(0.25 * rows, rel=1e-6)
    assert sent["worst"] - sent["balanced"] == pytest.approx(3 * rows, rel=1e-6)


def test_a_gpu_computes_more_slowly_while_it_communicates() -> None:
    """By as much as hardware says, and only then."""
    alone, program = PROGRAMS["one rank"], PROGRAMS["zero 3, far ahead"]
    half = evolve(HARDWARE, contention=0.5)
    assert step_time(alone, half).seconds == step_time(alone, HARDWARE).seconds
    slow = evolve(HARDWARE, link=1e3)  # all but nothing is computed beside what is sent
    kept, lost = (step_time(program, evolve(slow, contention=part)).kinds for part in (0.0, 0.5))
    assert lost["products"] > 1.5 * kept["products"]
    assert all(
        lost[kind] <= 2 * kept[kind] * (1 + 1e-9)
        for kind in ("products", "attention", "memory-bound")
    )


RATES = ("memory", "link", "network", "held", "peak", "attention")
LATENCIES = ("link_latency", "network_latency", "kernel", "op", "collective")


@several
def test_kinds_add_up_to_the_step(name: str) -> None:
    found = step_time(PROGRAMS[name], HARDWARE)
    assert sum(found.spent.values()) == pytest.approx(found.seconds, rel=1e-9)
    assert all(seconds >= 0 for seconds in found.spent.values())


@several
def test_ops_add_up_to_what_the_gpu_computes_and_links_send(name: str) -> None:
    """Counted by the loops around each op, not walked; the rest of the step is waiting."""
    found = step_time(PROGRAMS[name], HARDWARE)
    rows = op_rows(PROGRAMS[name], HARDWARE, found.rank)
    computed, sent = Counter[str](), Counter[tuple[str, ...]]()
    for row in rows:
        computed.update(row.computes)
        sent.update(row.sends)
    assert sent == pytest.approx(dict(found.sent))
    waiting = {kind for kind in found.kinds if kind.startswith(EXPOSED)} | {BUBBLE, HOST}
    assert computed == pytest.approx(
        {kind: s for kind, s in found.kinds.items() if kind not in waiting}
    )


@pytest.mark.long
@given(st.sampled_from(sorted(PROGRAMS)), st.sampled_from(LATENCIES), st.floats(0.0, 1.0))
def test_no_step_gets_slower_by_less_latency(name: str, latency: str, times: float) -> None:
    less = evolve(HARDWARE, **{latency: getattr(HARDWARE, latency) * times})
    assert seconds(name, less) <= seconds(name, HARDWARE) * (1 + 1e-9)


def seconds(name: str, on: Hardware) -> float:
    return step_time(PROGRAMS[name], on).seconds


@several
def test_only_pipelines_have_bubbles_and_only_axes_with_ranks_are_waited_for(name: str) -> None:
    program, found = PROGRAMS[name], step_time(PROGRAMS[name], HARDWARE)
    assert (found.kinds.get(BUBBLE, 0) > 0) == bool(program.pipeline)
    waited = [kind.removeprefix(EXPOSED) for kind in found.kinds if kind.startswith(EXPOSED)]
    axes = {axis.name for axis in program.axes if axis.size > 1}
    assert {axis for kind in waited for axis in kind.split(" × ")} <= axes
    assert bool(waited) == (prod(axis.size for axis in program.axes) > 1)


def test_reductions_and_gathers_ahead_take_the_time_of_what_they_run_beside() -> None:
    """With a link that is slow enough to be busy all the time, and fast enough to be done in
    time, little is seen.
    """
    program = zero("zero 3 over dp", microbatches=3)
    free = evolve(HARDWARE, op=0.0, collective=0.0, link_latency=0.0)
    alone, beside = (step_time(program, evolve(free, link=link)) for link in (1e30, 3e7))
    sent = sum(beside.sent.values())
    assert sent > 0.01 * beside.seconds
    assert beside.seconds < alone.seconds + 0.7 * sent
    at_once = zero("zero 3 over dp  prefetch = 0", microbatches=3)
    assert step_time(at_once, evolve(free, link=3e7)).seconds > beside.seconds


RING = next(
    f"tiny.scale:{at}" for at, line in enumerate(MODEL.splitlines(), 1) if "attention(" in line
)
FREE = evolve(HARDWARE, op=0.0, collective=0.0, link_latency=0.0)
KEYS = 2 * SEQ // 4 * KV_HEADS * HEAD_DIM
"""The elements of a rank's keys and values, of 4 ranks."""


def exposed_at(found: StepTime, line: str) -> float:
    return sum(
        time for (kind, at), time in found.spent.items() if kind.startswith(EXPOSED) and at == line
    )


@given(st.floats(9.0, 13.0))
def test_of_a_fast_ring_only_the_last_hop_of_gradients_is_waited_for(link: float) -> None:
    """A block takes 3 µs at least, a hop of gradients, in float32, up to 2 µs."""
    found = exposed_at(step_time(PROGRAMS["ring"], evolve(FREE, link=10**link)), RING)
    assert found == pytest.approx(LAYERS * BATCH * KEYS * 4 / 10**link, rel=1e-6, abs=1e-12)


@given(st.floats(2.0, 5.0))
def test_of_a_slow_ring_all_is_waited_for_but_what_blocks_take(link: float) -> None:
    """Three hops of keys forward; backward as many, four of their gradients, and a block beside
    each but the last.
    """
    found, on = step_time(PROGRAMS["ring"], evolve(FREE, link=10**link)), 10**link
    sent = LAYERS * BATCH * KEYS * (6 * 2 + 4 * 4) / on
    computed = sum(
        time
        for (kind, at), time in found.spent.items()
        if not kind.startswith(EXPOSED) and at == RING
    )
    assert sent - computed < exposed_at(found, RING) < sent


def test_exchanges_take_the_time_of_what_runs_before_their_wait() -> None:
    """A shared expert, written behind the route, makes the step longer by less than it takes
    alone.
    """
    shared = EXPERTS.replace(
        "    x = x + y\n", "    x = x + y + silu(x @ wide[hidden -> f]) @ narrow[f -> hidden]\n"
    )
    shared = shared.replace("layers = 2", "layers = 2  f = 1024")
    slow = evolve(HARDWARE, link=2e8, op=0.0, collective=0.0)
    route = {
        f"tiny.scale:{at}"
        for at, line in enumerate(EXPERTS.splitlines(), 1)
        if "route" in line or "down[" in line
    }

    def exposed(text: str) -> float:
        spent = step_time(compile_plan(Source("tiny.scale", text)), slow).spent
        return sum(
            time for (kind, line), time in spent.items() if kind == f"{EXPOSED}ep" and line in route
        )

    assert 0 < exposed(shared) < 0.7 * exposed(EXPERTS)


def test_a_person_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "time", str(PLANS / "llama3_70b.scale")]) == 0
    out = capsys.readouterr().out
    assert "on 512 × h100_sxm, by data sheets" in out
    assert "tokens/s/GPU, MFU" in out
    assert "products" in out
    assert cli.main(["explain", "time", str(PLANS / "tiny_llama.scale")]) == 2
    assert "gpu = …" in capsys.readouterr().err


def test_model_flops_are_those_of_the_convention(capsys: pytest.CaptureFixture[str]) -> None:
    """6 · 69.5e9 · tokens + 3 · 2 products of the pairs of a causal mask, over the peak of 512
    GPUs.
    """
    cli.main(["explain", "time", str(PLANS / "llama3_70b.scale")])
    line = capsys.readouterr().out.splitlines()[3]
    step, mfu = float(line.split()[0]), float(line.split("MFU ")[1].split("%")[0]) / 100
    tokens, table = 2048 * 8192, 128256 * 8192
    needed = (
        6 * tokens * (70_553_706_496 - table) + 3 * 2 * 2 * 80 * 2048 * 64 * 128 * 8192 * 8193 // 2
    )
    assert mfu == pytest.approx(needed / (512 * 989e12 * step), rel=2e-3)

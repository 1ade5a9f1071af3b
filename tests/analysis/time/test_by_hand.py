"""Steps of a tensor-parallel plan and of one of ZeRO 3, by formulas of their own."""

from math import inf

import pytest
from attrs import evolve

from helpers.timed_plans import (
    BATCH,
    FFN,
    HARDWARE,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    PROGRAMS,
    SEQ,
    VOCAB,
    compiled,
)
from scalec.compiler.analysis.hardware import (
    Attention,
    Collective,
    Hardware,
    Measured,
    find_shipped_gpu,
)
from scalec.compiler.analysis.time.op_rows import OpRow, op_rows
from scalec.compiler.analysis.time.seconds import get_message_seconds, get_work_seconds
from scalec.compiler.analysis.time.step import step_time
from scalec.compiler.ir import Program
from scalec.compiler.ops import Message
from scalec.compiler.ops.work import Scores, Work

RANKS = 2
MATRICES, NORMS = (
    LAYERS * (HIDDEN * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS) + 2 * HIDDEN * FFN),
    LAYERS * HIDDEN,
)
TABLES = 2 * VOCAB * HIDDEN

INSTANT = evolve(
    HARDWARE,
    peak={"bf16": inf},
    memory=inf,
    kernel=0.0,
    op=0.0,
    collective=0.0,
    link_latency=0.0,
    network_latency=0.0,
)


def rows(program: Program, *kinds: str) -> list[OpRow]:
    return [row for row in op_rows(program, HARDWARE) if row.kind in kinds]


def test_tensor_parallel_steps_wait_for_all_reduces() -> None:
    """Of x after the embedding, and twice in a layer, forward and backward; backward of the
    head, too.
    """
    program = compiled(f"tp = {RANKS}", "vocab, heads, kv_heads, ffn over tp")
    # the largest logit, the sum of exponentials, the label's logit
    x, of_tokens = SEQ * HIDDEN * 2, 3 * SEQ * 4
    sent = BATCH * (x * (1 + 4 * LAYERS + 1) + of_tokens) * 2 * (RANKS - 1) / RANKS
    found = step_time(program, INSTANT)
    assert found.seconds == pytest.approx(sent / INSTANT.link, rel=1e-3)  # and the norm, a number
    assert found.kinds == pytest.approx({"exposed: tp": found.seconds})


def test_tensor_parallel_steps_move_each_gradient_as_often_as_they_run() -> None:
    """A microbatch adds gradients of 2 bytes to sums of 4; a step clears these, updates, and
    casts parameters.
    """
    program = compiled(f"tp = {RANKS}", "vocab, heads, kv_heads, ffn over tp")
    own = (MATRICES + TABLES) // RANKS + NORMS
    assert not [row for row in rows(program, "cast") if row.where == "backward"]
    assert sum(row.bytes for row in rows(program, "pack")) == 4 * own
    assert sum(row.bytes for row in rows(program, "update")) == own * 4 * 7
    assert sum(row.bytes for row in rows(program, "cast")) == own * (4 + 2)
    sums = step_time(program, evolve(INSTANT, memory=HARDWARE.memory)).kinds["memory-bound"]
    without = sum(
        row.bytes
        for row in op_rows(program, HARDWARE)
        if row.where != "step" and not row.operations
    )
    assert sums * HARDWARE.memory_rate == pytest.approx(
        without + BATCH * own * (2 + 4 + 4), rel=1e-9
    )


def test_steps_of_zero_3_gather_twice_and_reduce_once_a_microbatch() -> None:
    """Over nodes of two, whose adapters carry a group's data once; layers in turn, all else
    once a step.
    """
    program = compiled("dp = 4", "batch over dp", "state { zero 3 over dp }")
    on, counts = evolve(INSTANT, ranks_per_node=2, network=HARDWARE.link / 3), BATCH // 4
    layers = MATRICES + NORMS
    # gathers in bf16, sums in f32
    sent = (counts * layers * (2 + 2 + 4) + TABLES * (2 + 4)) * 3 / 4
    found = step_time(program, on)
    cleared, updated = (
        sum(row.bytes for row in rows(program, kind)) for kind in ("pack", "update")
    )
    padded = 0.03  # at most, of flat buffers
    assert found.seconds == pytest.approx(sent / on.network, rel=padded)
    assert cleared == pytest.approx(4 * (counts * layers + TABLES), rel=padded)
    assert updated == pytest.approx((layers + TABLES) * 7, rel=padded)


@pytest.mark.parametrize(
    ("optimizer", "moved"), [("sgd { lr = 0.1 }", 3), ("sgd { lr = 0.1  momentum = 0.9 }", 5)]
)
def test_an_update_moves_what_its_optimizer_keeps(optimizer: str, moved: int) -> None:
    found = rows(compiled(optimizer=optimizer), "update")
    assert sum(row.bytes for row in found) == (MATRICES + NORMS + TABLES) * 4 * moved


@pytest.mark.parametrize(("ranks_per_node", "seconds"), [(4, 1e-3), (2, 5e-3)])
def test_messages_take_what_was_measured_of_two_ranks(ranks_per_node: int, seconds: float) -> None:
    """Of the same node, or of two where a hop of the ring crosses nodes."""
    sends = (Collective("send", 2, 1, 4096, 1e-3), Collective("send", 2, 2, 4096, 5e-3))
    on = evolve(HARDWARE, ranks_per_node=ranks_per_node, measured=Measured(collectives=sends))
    hops = Message("rotate", "keys", ("cp",), "bf16", (2048,), hops=3)
    assert get_message_seconds(PROGRAMS["ring"], hops, on, 2048) == pytest.approx(3 * seconds)


# ---- attention by the kernel that serves it


def attention_seconds(on: Hardware, dtype: str = "bf16", *, torch_picks: bool) -> float:
    """Seconds of 32 heads of width 128 over 8,192 positions, all pairs of a causal mask."""
    scores = Scores(32, 8192, 8192 * 8193 // 2, 128, 128, torch_picks=torch_picks)
    return get_work_seconds("attention", Work(dtype, scores=scores), on)["attention"]


@pytest.mark.parametrize(
    ("gpu", "picked"), [("h100_sxm", 529e12), ("h200", 529e12), ("a100_80gb", 198e12)]
)
def test_attention_has_the_rate_of_the_kernel_that_serves_it(gpu: str, picked: float) -> None:
    """Of cuDNN on an H100, where torch picks the kernel; of FlashAttention-2 elsewhere, and on
    an A100.
    """
    on = find_shipped_gpu(gpu)
    assert on
    operations = 4 * 32 * (8192 * 8193 // 2) * 128
    flash = {"a100_80gb": 198e12}.get(gpu, 333e12)
    assert attention_seconds(on, torch_picks=True) == pytest.approx(operations / picked)
    assert attention_seconds(on, torch_picks=False) == pytest.approx(operations / flash)


def test_what_was_measured_is_before_what_is_published() -> None:
    on = find_shipped_gpu("h100_sxm")
    assert on
    own = Attention("attention", 128, 8192, 400e12, 300e12)
    on = evolve(on, measured=evolve(on.measured, attention=(*on.measured.attention, own)))
    assert attention_seconds(on, torch_picks=True) == pytest.approx(
        attention_seconds(on, torch_picks=False)
    )


def test_published_rates_are_of_two_bytes() -> None:
    """A GPU computes float32 slower by its own peak."""
    on = find_shipped_gpu("h100_sxm")
    assert on
    assert attention_seconds(on, "f32", torch_picks=True) > 2 * attention_seconds(
        on, torch_picks=True
    )

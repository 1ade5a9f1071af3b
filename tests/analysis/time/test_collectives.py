"""Seconds of collectives by counting the hops of rings and trees by hand."""

from math import inf
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve

from scalec.compiler.analysis.hardware import find_shipped_gpu
from scalec.compiler.analysis.time.collectives import Group, get_collective_seconds
from scalec.compiler.analysis.time.step import step_time
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan

PLANS = Path(__file__).parents[3] / "plans"

NEAR, FAR = 5e-6, 17e-6
"""Seconds of a step within a node, and between nodes."""

INSTANT = Group(ranks=64, near=8, link=inf, network=inf, link_latency=NEAR, network_latency=FAR)
"""Eight nodes of eight ranks whose links take no time for bytes."""


def ring_steps(ranks: int, near: int) -> float:
    """Seconds of the hops from rank 0 once around a ring, in which a node's ranks follow each
    other.
    """
    crossed = [(rank + 1) // near != rank // near for rank in range(ranks - 1)]
    return sum(FAR if is_crossing else NEAR for is_crossing in crossed)


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize(("ranks", "near"), [(8, 8), (16, 8), (64, 8), (512, 8), (64, 2)])
def test_gathers_and_scatters_pass_once_around_a_ring(op: str, ranks: int, near: int) -> None:
    group = evolve(INSTANT, ranks=ranks, near=near)
    assert get_collective_seconds(op, 1.0, group) == pytest.approx(ring_steps(ranks, near))


@pytest.mark.parametrize(("ranks", "steps"), [(64, 3), (512, 6), (1024, 7)])
def test_all_reduces_between_many_nodes_go_up_and_down_a_tree(ranks: int, steps: int) -> None:
    """Along seven ranks of each node, then over the levels of a tree of nodes."""
    seconds = get_collective_seconds("all_reduce", 1.0, evolve(INSTANT, ranks=ranks))
    assert seconds == pytest.approx(2 * (7 * NEAR + steps * FAR))


def test_a_large_all_reduce_takes_the_ring_which_holds_the_whole_bandwidth() -> None:
    """2 · 7/8 of 80 GB at 100 GB/s; a tree holds 92% of that."""
    group = evolve(INSTANT, ranks=8, link=100e9)
    assert get_collective_seconds("all_reduce", 80e9, group) == pytest.approx(1.4 + 14 * NEAR)


def test_between_nodes_the_bytes_decide_between_tree_and_ring() -> None:
    """A tree holds 92% of the adapters' 400 GB/s; steps of a ring's all-reduce take 1.4 times a
    gather's.
    """
    many = evolve(INSTANT, ranks=512, network=50e9)
    small = 64e6 * 511 / 512 / 400e9
    assert get_collective_seconds("all_reduce", 64e6, many) == pytest.approx(
        2 * (small / 0.92 + 7 * NEAR + 6 * FAR)
    )
    two = evolve(many, ranks=16)
    large = 1e9 * 15 / 16 / 400e9
    steps = 1.4 * ring_steps(16, 8)
    assert get_collective_seconds("all_reduce", 1e9, two) == pytest.approx(2 * (large + steps))


def test_a_node_with_one_rank_gathers_by_levels_where_that_is_faster() -> None:
    """PAT: log2 of the nodes of 2/7 of a network's step each, and 2.8 us a rank."""
    alone = evolve(INSTANT, ranks=256, near=1)
    assert get_collective_seconds("all_gather", 1.0, alone) == pytest.approx(
        8 * FAR / 3.5 + 256 * 2.8e-6
    )
    slow = evolve(alone, network=1e9)  # PAT holds three quarters of a ring's bandwidth
    assert get_collective_seconds("all_gather", 256e9, slow) == pytest.approx(255 + 255 * FAR)


def test_many_groups_at_once_take_what_each_takes() -> None:
    sizes = [(8, 8), (64, 8), (256, 1), (2, 1), (4096, 8)]
    ranks, near = (np.array(column) for column in zip(*sizes, strict=True))
    groups = evolve(INSTANT, ranks=ranks, near=near, link=1e11, network=1e10)
    for op in ("all_reduce", "all_gather", "reduce_scatter"):
        each = [get_collective_seconds(op, 1e8, evolve(groups, ranks=n, near=k)) for n, k in sizes]
        assert get_collective_seconds(op, 1e8, groups) == pytest.approx(each)


PLAN = """
use "PLANS/models/llama.scale"
cluster {{ gpu = h100_sxm  gpus_per_node = 8  nodes = {nodes} }}
mesh {{ dp = {ranks} }}
shard {{ batch over dp }}
state {{ zero 3 over dp }}
train {{
  seq = 8192  global_batch = {ranks}  microbatch = 1  steps = 1  precision = bf16
  optimizer adamw {{ lr = 3e-4 }}
  data tokens {{ files = ["a"]  dtype = uint32 }}
}}
"""


def seconds_of_8b(ranks: int) -> float:
    text = PLAN.format(nodes=ranks // 8, ranks=ranks).replace("PLANS", str(PLANS))
    hardware = find_shipped_gpu("h100_sxm")
    assert hardware
    program = compile_plan(Source("plan.scale", text))
    return step_time(program, evolve(hardware, ranks_per_node=8)).seconds


def test_sharded_parameters_cost_more_the_more_ranks_they_are_gathered_from() -> None:
    """8B, a sequence of 8,192 tokens a GPU: rings of 256 hide behind a layer, rings of 4,096 take
    three times as long.

    A ring of 4,096 ranks on 512 nodes takes 3,584 · 5 + 511 · 17 us = 26.6 ms, of which there are
    three a layer.
    """
    few, many = (seconds_of_8b(ranks) for ranks in (256, 4096))
    layers = 32
    assert few < 0.95
    assert many == pytest.approx(3 * layers * 26.6e-3, rel=0.15)

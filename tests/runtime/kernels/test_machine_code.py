"""The reads and writes of kernels, and what is read off their code.  No GPU is needed.

`test_plans` holds the launches of all plans to the same laws.
"""

import pytest
import torch

from helpers.kernels.compiled import compile_for, recorded
from helpers.kernels.machine_code import CHIPS, read
from helpers.kernels.traffic import traffic
from scalec.runtime.kernels import Accumulate

CACHED = {
    "weight",
    "bias",
    "table",
    "step",
    "skip",
    "scale",
    "labels",
    "m",
    "g_z",
    "g_t",
    "places",
    "gates",
    "of_gates",
}
"""What is small, and stays in caches between the programs that read it."""
TWICE = {("norm_kernels.norm_backward", "s"), ("norm_kernels.norm_backward", "da")}
"""What a program may read again right after, while its L1 cache has it."""


@pytest.mark.long
def test_kernels_move_each_operand_and_result_once() -> None:
    large = [
        (kernel, name, each)
        for kernel, times in traffic()
        for name, each in times.items()
        if name not in CACHED
    ]
    assert {kernel.partition(".")[0] for kernel, *_ in large} == {
        *("accumulate", "adamw", "gates", "logit_kernels", "norm_kernels", "rope", "rows")
    }
    again = {(kernel, name) for kernel, name, (loaded, _) in large if loaded == 2}
    assert again == TWICE
    once = {(1, 0), (0, 1), (1, 1)}  # the last in place
    odd = [
        it for it in large if (round(it[2][0], 1), it[2][1]) not in once and (*it[:2],) not in again
    ]
    assert not odd


def test_sizes_that_16_does_not_divide_are_read_wide_but_for_the_rest() -> None:
    total, x = (
        torch.empty(10**6 + 4, device="meta"),
        torch.empty(10**6 + 4, device="meta", dtype=torch.bfloat16),
    )
    with recorded() as launches:
        Accumulate()(total, x)
    wide = [read(launch, compile_for(launch, 90), CHIPS[90]).wide for launch in launches]
    assert wide[0] == 1
    assert wide[1:] == [0]
    assert [launch.args[2] for launch in launches] == [10**6, 4]


@pytest.mark.parametrize(("chip", "kib"), [(80, 13), (90, 13), (100, 27)])
def test_what_a_multiprocessor_must_ask_for(chip: int, kib: int) -> None:
    assert round(CHIPS[chip].demand / 1024) == kib

"""Every row of the catalogue of silent failures has a test here that plants it, or waits for a feature that no plan can
ask for yet.

The catalogue: 61 ways in which frameworks that many use trained on, and were wrong.
"""

import re
from pathlib import Path

import pytest

from helpers.planted_defects import TEXTS, edited, refusal

ROWS = range(1, 62)
WAITS = {
    19: "biases of routers",
    41: "row 31 has it",
    42: "the ring's own tests, in bfloat16",
    46: "attention sinks",
    47: "padding within a sequence",
    48: "sends and receives of a ring: rotations are collectives",
    51: "rows 7 to 9 have it",
    53: "end_to_end/test_experts: ranks and experts without rows",
    54: "buffers have the exact number of rows",
    57: "biases of routers",
    58: "runtime/ops/test_routing: decisions are kept",
    59: "biases of routers",
}
"""Rows of which nothing can be expressed today.  Of others a part waits, as their tests say."""

PLAN = TEXTS["llama"]
LATER = {
    "biases of routers": (edited(TEXTS["experts"], {"normalise=on": "bias=b[experts]"}), "E0606"),
    "attention sinks": (edited(PLAN, {"mask=causal": "mask=causal, sinks=4"}), "E0606"),
    "offload": (edited(PLAN, {"precision = fp64": "precision = fp64  offload = cpu"}), "E0401"),
}
"""Features that rows wait for, a plan that asks for each, and what it is told.  One that compiles needs its rows."""


def test_every_row_is_planted_or_waits() -> None:
    tests = "\n".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    planted = {int(row) for row in re.findall(r"(?m)^def test_row_(\d\d)_", tests)}
    assert planted | {*WAITS} == {*ROWS}
    assert not planted & {*WAITS}


@pytest.mark.parametrize("feature", LATER)
def test_what_waits_cannot_be_written(feature: str) -> None:
    plan, code = LATER[feature]
    assert refusal(plan) == code

""".venv/bin/pytest examples/test_my_ops.py

How to hold your own ops to what a plan says of them: slices, linearity, and gradients against
finite differences.
"""

from pathlib import Path

from scalec.testing import assert_equal_step, assert_op

PLAN = Path(__file__).with_name("05_user_op.scale")


def test_swiglu() -> None:
    assert_op(PLAN, "swiglu")


def test_unit() -> None:
    assert_op(PLAN, "unit", 1e-6)


def test_the_step() -> None:
    """Whatever the functions compute, the step is that of one device, if they work along the
    dims that are said.
    """
    assert_equal_step(PLAN)

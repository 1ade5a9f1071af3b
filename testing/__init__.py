"""Tests of one's own plans against the single-device step, under pytest.

Purpose: `assert_equal_step` and `assert_mutants_caught` for a plan of one's own, `assert_op` for an op of one's own;
`plans`, random ones for hypothesis.
Non-goals: the numbers of a training run; emitted programs, which each compile reads back.

`plans` is imported when it is asked for: nothing else here needs hypothesis, and `scalec verify --audit` does without.
"""

from typing import TYPE_CHECKING

from .checks import assert_equal_step, assert_mutants_caught, compiles
from .user_ops import assert_op

if TYPE_CHECKING:
    from .random_plans import plans

__all__ = ["assert_equal_step", "assert_mutants_caught", "assert_op", "compiles", "plans"]


def __getattr__(name: str) -> object:
    if name != "plans":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .random_plans import plans

    return plans

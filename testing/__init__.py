"""What a project needs to hold its own plans to the single-device step, under pytest.

Purpose: `assert_equal_step` and `assert_mutants_caught` for a plan of one's own, `assert_op` for an op of one's own;
`plans`, random ones for hypothesis.
Non-goals: the numbers of a training run; emitted programs, which each compile reads back.
"""

from .checks import assert_equal_step, assert_mutants_caught, compiles
from .random_plans import plans
from .user_ops import assert_op

__all__ = ["assert_equal_step", "assert_mutants_caught", "assert_op", "compiles", "plans"]

"""Tests of one's own plans against the single-device step, under pytest.

Purpose: `assert_equal_step` and `assert_mutants_caught` for a plan of one's own, `assert_op` for an
op of one's own; `plans`, random ones for hypothesis.  Non-goals: the numbers of a training run;
emitted programs, which each compile reads back.

Each is imported when it is asked for: nothing but `plans` needs hypothesis, and the process that
tries a plan's functions needs none of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .checks import assert_equal_step, assert_mutants_caught, compiles
    from .random_plans import plans
    from .user_ops import assert_op

__all__ = ["assert_equal_step", "assert_mutants_caught", "assert_op", "compiles", "plans"]

_MODULES = {
    "assert_equal_step": "checks",
    "assert_mutants_caught": "checks",
    "assert_op": "user_ops",
    "compiles": "checks",
    "plans": "random_plans",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)

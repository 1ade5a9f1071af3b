"""Says which programs are legal: run before the first pass and after each.

Purpose: declarations that agree with each other; every name bound once and before its use, every op
typed as its entry infers, every region's ends matched.  Non-goals: the user's mistakes
(`frontend.validate`); whatever fails here is a defect of the pass that is named, or of IR text
edited by hand.
"""

from collections.abc import Generator
from contextlib import contextmanager

from ...ir import Program
from ...ops.routers import with_padding
from ..determinism import drifting
from .buckets import Buckets
from .checker import STEP_PASSES
from .declarations import Declarations, Stages
from .regions import Regions

PLACED = ("insert_collectives", "fuse_ops", "overlap_exchanges", "choose_recomputed", *STEP_PASSES)
"""After these passes values have their placements."""


def check(program: Program) -> None:
    """Asserts that `program` is legal; a failure names the pass that made it."""
    with _name_pass(program):
        Declarations(program).check()
        Stages(program).check()
        Regions(program).outermost()
        Buckets(program).check()
        if program.after in PLACED:
            for op, _ in drifting(program):
                raise AssertionError(f"{op.outputs[0].name}: its copies would drift")
        assert program.dims == with_padding(program).dims, (
            "experts are not padded to their capacity"
        )


@contextmanager
def _name_pass(program: Program) -> Generator[None]:
    """Adds the pass to what fails inside."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{program.after}: {error}") from error

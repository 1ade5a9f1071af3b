"""The passes, in order, and what runs between them.

Purpose: each pass is a function Program → Program; between two, the program is checked and, on request, dumped.
`SCALEC_DUMP=<pass>|all` writes the program after that pass (or each) to standard error.
"""

import os
import sys
from collections.abc import Callable

from attrs import evolve

from ..ir import Program
from ..printer import print_ir
from ..source import Source
from ..wellformed import check
from .choose_layout import choose_layout
from .differentiate import differentiate
from .factor_axes import factor_axes
from .flatten_sums import flatten_sums
from .fuse_buckets import fuse_buckets
from .insert_collectives import insert_collectives
from .place_state import place_state
from .propagate import propagate
from .resolve import resolve
from .validate import validate

Pass = Callable[[Program], Program]

PASSES: tuple[Pass, ...] = (
    validate,
    factor_axes,
    flatten_sums,
    propagate,
    choose_layout,
    insert_collectives,
    differentiate,
    place_state,
    fuse_buckets,
)

STAGES = ("resolve", *(step.__name__ for step in PASSES))


def lower(program: Program, until: str = STAGES[-1]) -> Program:
    """Runs the passes that `program` has not been through, up to `until`.  Raises PlanError."""
    wanted = os.environ.get("SCALEC_DUMP", "")
    if wanted not in ("", "all", *STAGES):
        sys.stderr.write(f"SCALEC_DUMP: there is no pass `{wanted}`; say all, {', '.join(STAGES)}\n")
    _between(program)
    for step in PASSES[STAGES.index(program.stage) : STAGES.index(until)]:
        program = evolve(step(program), stage=step.__name__)
        _between(program)
    return program


def compile_plan(source: Source, until: str = STAGES[-1]) -> Program:
    """The program of a plan's text after the pass `until`.  Raises PlanError."""
    return lower(resolve(source), until)


def _between(program: Program) -> None:
    check(program)
    if os.environ.get("SCALEC_DUMP") in ("all", program.stage):
        sys.stderr.write(f"# after {program.stage}\n{print_ir(program)}\n")

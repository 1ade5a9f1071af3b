"""Seconds of a step, before it runs.  A plan that names no GPU loads nothing of it."""

from typing import TYPE_CHECKING

from ...ir import Program, once

if TYPE_CHECKING:
    from .report import Report


@once
def get_expected_report(program: Program) -> "Report | None":
    """The time of a program after the last pass, None where the speed of its GPUs is not known."""
    if not (program.cluster.gpu or program.cluster.hardware):
        return None
    from ..hardware import hardware
    from .report import report

    on = hardware(program)
    if not on:
        return None
    return report(program, on, by_load=False)

"""Results of `scalec verify` on a plan, as assertions."""

from pathlib import Path

from ..compiler.ir import Program
from ..compiler.proof import verify
from ..compiler.syntax.diagnostics import PlanError, render
from ..compiler.syntax.limits import load
from ..compiler.syntax.source import Source
from ..compiler.tuning.lowering import compile_plan, lower
from .audit import audit


def assert_equal_step(plan: str | Path) -> None:
    """Compiles a plan and proves its step, forward, backward and update, equal to that of a single
    device.

    `plan` is a file, or a plan's text, from which `use` looks in the working directory.  Raises
    AssertionError with what `scalec` says: what is wrong with the plan, or where its step parts
    from the single device's.
    """
    try:
        verify(*_compiled(plan))
    except PlanError as error:
        raise AssertionError(_said(error)) from None


def assert_mutants_caught(plan: str | Path) -> None:
    """Makes every mistake of `scalec verify --audit` in a plan's step; the proof must refuse them
    all.

    Takes seconds.  Raises AssertionError with the audit's table, or with what is wrong with the
    plan.
    """
    try:
        found = audit(*_compiled(plan))
    except PlanError as error:
        raise AssertionError(_said(error)) from None
    assert found.passed, "\n".join(["", *found.lines()])


def compiles(plan: str | Path) -> bool:
    """Whether the compiler takes a plan."""
    try:
        _compiled(plan)
    except PlanError:
        return False
    return True


def _compiled(plan: str | Path) -> tuple[Program, Program]:
    """The program of a plan after the last pass, and its model before the first."""
    source = load(plan) if isinstance(plan, Path) else Source("plan.scale", plan)
    model = compile_plan(source, "resolve")
    return lower(model), model


def _said(error: PlanError) -> str:
    return "\n\n".join(["", *(render(each) for each in error.diagnostics)])

"""A program with settings of its own: what the passes make of it, and the memory and the time that
this takes.

Purpose: one way to lower a program with other settings, and one way to measure it.  Both are done
when somebody asks, and once.  Non-goals: the order of the passes (`lowering`); which variants are
worth a try.
"""

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from ..analysis.elastic import smallest
from ..analysis.memory import Account, account, fits
from ..ir import Program
from ..syntax.diagnostics import PlanError

if TYPE_CHECKING:
    from ..analysis.hardware import Hardware
    from ..analysis.time.clocks import StepTime

Pass = Callable[[Program], Program]


@frozen
class Decision:
    """A step between passes that decides a setting which a plan leaves open.

    name    the name under which programs after it are known, as the name of a pass
    choose  gets the variant in which nothing is decided, and returns it or one with another program
    """

    name: str
    choose: "Callable[[Variant], Variant]"


@frozen
class Change:
    """A section of a plan's text with other settings; `summary` is shorter, where they are long."""

    section: str
    content: str
    summary: str = ""

    def __str__(self) -> str:
        return self.summary or f"{self.section} {{ {self.content} }}"


@frozen(eq=False)
class Variant:
    """A program, and the passes and decisions that it has not been through.

    A property that needs the next passes raises PlanError where they do.

    changes  of the plan's text; none where only the program differs from the plan's
    """

    program: Program
    passes: tuple[Pass | Decision, ...]
    changes: tuple[Change, ...] = ()

    def with_program(self, program: Program) -> "Variant":
        """A variant at the same place between the passes."""
        return evolve(self, program=program)

    # ---- lowered

    @cached_property
    def next(self) -> "Variant":
        """The variant after its next pass, or the variant that its next decision takes."""
        step, rest = self.passes[0], self.passes[1:]
        if isinstance(step, Decision):
            undecided = evolve(self.program, after=step.name)
            return step.choose(evolve(self, program=undecided, passes=rest))
        program = evolve(step(self.program), after=step.__name__)
        return evolve(self, program=program, passes=rest)

    def get_program_after(self, name: str) -> Program:
        """The program after a later pass or decision."""
        if self.program.after == name:
            return self.program
        return self.next.get_program_after(name)

    @cached_property
    def last(self) -> Program:
        """The program after the last pass."""
        return self.next.last if self.passes else self.program

    @property
    def is_plan(self) -> bool:
        """Whether all passes take it."""
        try:
            _ = self.last
        except PlanError:
            return False
        return True

    # ---- measured

    @property
    def least(self) -> Program:
        """The last program at the least size of an elastic axis, where a rank needs most."""
        return smallest(self.last)

    @property
    def memory(self) -> Account:
        """The bytes of the rank that needs most."""
        return account(self.least)

    @property
    def fits(self) -> bool | None:
        """Whether a rank's GPU holds them; None where it is not known how much it has."""
        return fits(self.least, self.memory)

    def get_step_time(self, gpu: "Hardware") -> "StepTime":
        """The time of a step on a GPU."""
        from ..analysis.time.step import step_time  # most plans are compiled without times

        return step_time(self.last, gpu)

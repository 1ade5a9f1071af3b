"""A choice compiled: its seconds by the timeline, its bytes by the memory account, and perhaps its proof."""

from collections.abc import Mapping, Sequence
from math import inf

from attrs import evolve, field, frozen

from ...analysis.memory import account, capacity
from ...analysis.time import operations
from ...analysis.time.clocks import BUBBLE
from ...analysis.time.prices import EXPOSED
from ...analysis.time.report import FULL
from ...analysis.time.step import step_time
from ...frontend import resolve
from ...ir import PRECISIONS, Program
from ...passes import lower, passed
from ...proof import Case, verify_alike
from ...syntax.diagnostics import PlanError
from .choice import Choice
from .facts import Facts, Goal
from .plan_text import ModelFile, plan


@frozen
class Priced:
    """A choice with what its program takes; where a GPU cannot hold it, no time: it is infinite.

    kinds     seconds of a step by kind
    tokens    a second and GPU
    needs     bytes of the rank that needs most; capacity: bytes of a GPU, None where that is not known
    proved    whether its step is shown to be the single-device step
    """

    choice: Choice
    seconds: float
    kinds: Mapping[str, float] = field(eq=False)
    tokens: float
    mfu: float
    needs: int
    capacity: int | None
    proved: bool = False

    @property
    def full(self) -> float:
        """The part of a GPU's memory that is needed; 0 where that is not known."""
        return self.needs / self.capacity if self.capacity else 0.0

    @property
    def fits(self) -> bool:
        """Whether it fits with room to spare: close to full, time cannot be told."""
        return self.full <= FULL

    @property
    def exposed(self) -> float:
        """The share of a step in which GPUs wait for collectives."""
        return sum(seconds for kind, seconds in self.kinds.items() if kind.startswith(EXPOSED)) / self.seconds

    @property
    def bubble(self) -> float:
        """The share of a step in which a rank of a pipeline waits for others."""
        return self.kinds.get(BUBBLE, 0.0) / self.seconds


@frozen
class Unpriced:
    """A choice that makes no plan, and why."""

    choice: Choice
    why: str


def price(file: ModelFile, facts: Facts, goal: Goal, choice: Choice) -> Priced | Unpriced:
    """A choice compiled, unchecked."""
    try:
        *_, program = passed(resolve(plan(file, facts, goal, choice)))
    except PlanError as error:
        return _failed(choice, error)
    return _priced(goal, choice, program)


def prove(file: ModelFile, facts: Facts, goal: Goal, priced: Sequence[Priced]) -> list[Priced | Unpriced]:
    """Choices compiled with all checks, and proved; equal small cases of them are evaluated once."""
    found, known = list[Priced | Unpriced](), list[list[Case]]()
    for it in priced:
        try:
            model = resolve(plan(file, facts, goal, it.choice))
            verify_alike(lower(model), model, known)
            found.append(evolve(it, proved=True))
        except PlanError as error:
            found.append(_failed(it.choice, error))
    return found


def _failed(choice: Choice, error: PlanError) -> Unpriced:
    return Unpriced(choice, f"{error.diagnostics[0].code}: {error.diagnostics[0].message}")


def _priced(goal: Goal, choice: Choice, program: Program) -> Priced:
    needs, room, train = account(program).needs, capacity(program), program.train
    if room is not None and needs > room:
        return Priced(choice, inf, {}, 0.0, 0.0, needs, room)
    step = step_time(program, goal.hardware)
    peak = goal.hardware.peak_rate(PRECISIONS[train.precision]) * goal.gpus * step.seconds
    return Priced(
        choice,
        step.seconds,
        step.kinds,
        goal.tokens / goal.gpus / step.seconds,
        operations.needed(program) / peak,
        needs,
        room,
    )

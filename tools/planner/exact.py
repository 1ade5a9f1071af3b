"""A compiled choice: its seconds by the timeline, its bytes by the memory account, and perhaps its
proof.
"""

from collections.abc import Mapping, Sequence
from math import inf

from attrs import evolve, field, frozen

from ...compiler.analysis.memory import capacity, need_range
from ...compiler.analysis.time import operations
from ...compiler.analysis.time.clocks import BUBBLE
from ...compiler.analysis.time.prices import EXPOSED
from ...compiler.analysis.time.report import FULL
from ...compiler.ir import PRECISIONS
from ...compiler.proof import Case, verify_alike
from ...compiler.syntax.diagnostics import PlanError
from ...compiler.tuning.lowering import lower
from ...compiler.tuning.variant import Variant
from .choice import Choice
from .facts import Facts, Goal
from .plan_text import ModelFile, make_plan_variant


@frozen
class Priced:
    """A choice, and the time and memory of its program.

    The time is infinite where a GPU surely cannot hold the program.

    kinds     seconds of a step by kind
    tokens    a second and GPU
    needs     bytes of the rank that needs most
    capacity  bytes of a GPU; None where that is not known
    proved    whether its step is shown to be the single-device step
    ends      the ends of the range of `needs`; None where it has none
    """

    choice: Choice
    seconds: float
    kinds: Mapping[str, float] = field(eq=False)
    tokens: float
    mfu: float
    needs: int
    capacity: int | None
    proved: bool = False
    ends: tuple[int, int] | None = None

    @property
    def low(self) -> int:
        """The least that the rank may need."""
        return self.ends[0] if self.ends else self.needs

    @property
    def high(self) -> int:
        """The most that it may need."""
        return self.ends[1] if self.ends else self.needs

    @property
    def full(self) -> float:
        """The part of a GPU's memory that is needed; 0 where that is not known."""
        return self.needs / self.capacity if self.capacity else 0.0

    @property
    def fits(self) -> bool:
        """Whether it fits with room to spare: close to full, its time cannot be told."""
        return self.full <= FULL and (self.capacity is None or self.high <= self.capacity)

    @property
    def may_fit(self) -> bool:
        """Whether it is close to full, or only a part of the range of its memory fits."""
        return not self.fits and self.capacity is not None and self.low <= self.capacity

    @property
    def exposed_share(self) -> float:
        """The share of a step's time when GPUs wait for collectives."""
        waits = [time for kind, time in self.kinds.items() if kind.startswith(EXPOSED)]
        return sum(waits) / self.seconds

    @property
    def bubble_share(self) -> float:
        """The share of a step's time when a rank of a pipeline waits for others."""
        return self.kinds.get(BUBBLE, 0.0) / self.seconds


@frozen
class Unpriced:
    """A choice that makes no plan, and why."""

    choice: Choice
    why: str


def price(file: ModelFile, facts: Facts, goal: Goal, choice: Choice) -> Priced | Unpriced:
    """A choice compiled, unchecked."""
    try:
        return _to_priced(goal, choice, make_plan_variant(file, facts, goal, choice))
    except PlanError as error:
        return _to_unpriced(choice, error)


def prove(
    file: ModelFile, facts: Facts, goal: Goal, priced: Sequence[Priced]
) -> list[Priced | Unpriced]:
    """Choices compiled with all checks, and proved; small cases that several share are evaluated
    once.
    """
    results, cases = list[Priced | Unpriced](), list[list[Case]]()
    for candidate in priced:
        try:
            model = make_plan_variant(file, facts, goal, candidate.choice).program
            verify_alike(lower(model), model, cases)
            results.append(evolve(candidate, proved=True))
        except PlanError as error:
            results.append(_to_unpriced(candidate.choice, error))
    return results


def _to_unpriced(choice: Choice, error: PlanError) -> Unpriced:
    first = error.diagnostics[0]
    return Unpriced(choice, f"{first.code}: {first.message}")


def _to_priced(goal: Goal, choice: Choice, variant: Variant) -> Priced:
    program, memory = variant.last, variant.memory
    room, train = capacity(program), program.train
    needs, need = memory.needs, need_range(program, memory)
    if need.lacks(room):
        return Priced(choice, inf, {}, 0.0, 0.0, needs, room, ends=(need.low, need.high))
    step = variant.get_step_time(goal.hardware)
    peak = goal.hardware.peak_rate(PRECISIONS[train.precision]) * goal.gpus * step.seconds
    return Priced(
        choice,
        step.seconds,
        step.kinds,
        goal.tokens / goal.gpus / step.seconds,
        operations.needed(program) / peak,
        needs,
        room,
        ends=(need.low, need.high),
    )

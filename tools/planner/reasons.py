"""Why a plan is as it is, in the three steps that practitioners take: fit, batch, throughput.

Each reason compares the best plan with one that differs in one respect, both compiled and priced.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf

from attrs import evolve, field, frozen

from ...compiler.analysis.context_parallel import STRATEGIES
from ...compiler.config.gpus import GIB
from ...compiler.reports.time import seconds
from .choice import CHUNKED, NONE, RECOMPUTE, Choice
from .exact import Priced, Unpriced
from .two_processes import in_two

FIT, BATCH, THROUGHPUT = "fit", "batch", "throughput"

SECTIONS = {
    "mesh": ("pp", "dp", "cp", "ep", "tp"),
    "shard": ("sp", "via", "fold"),
    "state": ("zero", "prefetch"),
    "pipeline": ("schedule", "chunks"),
    "train": ("microbatch", "recompute"),
}
"""By section of a plan, the fields of a choice that it sets; a reason's comment is in the first
section that differs.
"""


@frozen
class Reason:
    """Another plan beside the best one, in one of the steps.

    kept    the values that the plan was asked to have
    """

    step: str
    best: Priced
    other: Priced
    kept: Mapping[str, object] = field(factory=dict[str, object], eq=False)

    @property
    def what(self) -> str:
        """How the other differs, for instance `dp 512 × tp 4`."""
        return _difference_text(self.best.choice, self.other.choice)

    @property
    def section(self) -> str:
        """The first section of the plan that differs."""
        differences = self.best.choice.differs(self.other.choice)
        return next(
            section
            for section, names in SECTIONS.items()
            if not differences.keys().isdisjoint(names)
        )

    def __str__(self) -> str:
        return f"{self._comparison_text()}{self._kept_values_text()}"

    def _kept_values_text(self) -> str:
        """For instance ` (kept: schedule 1f1b)`, where the other plan has a value that the user
        did not ask for.
        """
        best = self.best.choice
        names = [name for name in best.differs(self.other.choice) if name in self.kept]
        values = [f"{name} {best.settings.get(name, getattr(best, name))}" for name in names]
        return f" (kept: {', '.join(values)})" if names else ""

    def _comparison_text(self) -> str:
        if self.step == FIT or self.other.seconds == inf:
            needs, best_needs = self.other.needs / GIB, self.best.needs / GIB
            room = _room(self.other)
            return f"{self.what} needs {needs:,.1f} GiB in place of {best_needs:,.1f}: {room}"
        change = self.other.seconds / self.best.seconds - 1
        room = "" if self.other.fits else f", but {_room(self.other)}"
        times = f"{seconds(self.other.seconds)} in place of {seconds(self.best.seconds)}"
        return f"{self.what} takes {times}, {change:+z.1%}{room}"


def _room(plan: Priced) -> str:
    if plan.fits:
        return "it fits too"
    if not plan.may_fit:
        return f"it does not fit {(plan.capacity or 0) / GIB:,.0f} GiB"
    return f"it {may_not_fit(plan)}"


def may_not_fit(plan: Priced) -> str:
    """The memory of a plan that may fit, as a range: `may not fit: 76.1 to 84.0 GiB of 80`."""
    capacity = plan.capacity or 0
    verdict = "may not fit" if plan.high > capacity else "is close to full"
    low, high = plan.low / GIB, plan.high / GIB
    return f"{verdict}: {low:,.1f} to {high:,.1f} GiB of {capacity / GIB:,.0f}"


def _difference_text(best: Choice, other: Choice) -> str:
    differences = best.differs(other)
    if not differences.keys().isdisjoint(SECTIONS["mesh"]):
        axes = [axis for axis in SECTIONS["mesh"] if axis in differences]
        return " × ".join(f"{axis} {getattr(other, axis)}" for axis in axes)
    # The words for a schedule say its chunks too.
    names = dict.fromkeys("schedule" if name == "chunks" else name for name in differences)
    return ", ".join(f"{name} {other.settings.get(name, getattr(other, name))}" for name in names)


def reasons(
    best: Priced,
    compiled: Sequence[Priced],
    price: Callable[[Choice], Priced | Unpriced],
    kept: Mapping[str, object],
) -> tuple[Reason, ...]:
    """Reasons for a plan, as far as its neighbours are plans, also neighbours without the values
    of `kept`; the search has `compiled` some of them before.
    """
    candidates = [*neighbours(best.choice)]
    priced: dict[Choice, Priced | Unpriced] = {plan.choice: plan for plan in compiled}
    new = [choice for _, choice in candidates if choice not in priced]
    priced |= dict(zip(new, in_two(price, new), strict=True))
    tight, loose, others = list[Reason](), list[Reason](), list[Reason]()
    for step, choice in candidates:
        plan = priced[choice]
        if not isinstance(plan, Priced):
            continue
        reason = Reason(step, best, plan, kept)
        if step == FIT and not plan.fits:
            tight.append(reason)
        elif step == FIT and plan.seconds < inf:
            # What fits as well is a question of throughput.
            loose.append(evolve(reason, step=THROUGHPUT))
        elif step == BATCH or (step == THROUGHPUT and plan.seconds < inf):
            others.append(reason)
    return (*tight, *loose, *others)


def neighbours(choice: Choice) -> Iterator[tuple[str, Choice]]:
    """Choices that differ in one respect, each with the step where it matters first.  With less
    sharding, the question is whether the plan fits at all.
    """
    for step, neighbour in _all_neighbours(choice):
        if neighbour != choice:
            yield step, neighbour


def _all_neighbours(choice: Choice) -> Iterator[tuple[str, Choice]]:
    yield from ((FIT, neighbour) for neighbour in _with_less_sharding(choice))
    yield BATCH, choice.on(microbatch=choice.microbatch * 2)
    if choice.microbatch % 2 == 0:
        yield BATCH, choice.on(microbatch=choice.microbatch // 2)
    yield from ((THROUGHPUT, neighbour) for neighbour in _with_other_degrees(choice))
    yield from ((THROUGHPUT, neighbour) for neighbour in _orders(choice))


def _with_less_sharding(choice: Choice) -> Iterator[Choice]:
    """Choices that need more memory."""
    for axis in ("tp", "pp", "cp", "ep"):
        degree = getattr(choice, axis)
        if degree % 2 == 0:
            yield _tidy(choice.on(**{axis: degree // 2, "dp": choice.dp * 2}))
    if choice.zero:
        lower = choice.zero - 1 if choice.pp == 1 else 0
        yield choice.on(zero=lower, prefetch=1)
    if choice.recompute != NONE:
        milder = RECOMPUTE[: RECOMPUTE.index(choice.recompute)]
        yield from (choice.on(recompute=word) for word in reversed(milder))


def _with_other_degrees(choice: Choice) -> Iterator[Choice]:
    """Choices with less data parallelism."""
    if choice.dp % 2:
        return
    dp = choice.dp // 2
    yield choice.on(tp=choice.tp * 2, dp=dp, sp=True)
    yield choice.on(
        pp=choice.pp * 2,
        dp=dp,
        zero=min(choice.zero, 1),
        schedule=choice.schedule or "1f1b",
        prefetch=1,
    )
    if choice.cp > 1:
        yield choice.on(cp=choice.cp * 2, dp=dp)


def _orders(choice: Choice) -> Iterator[Choice]:
    """Other orders of the same work, and other ways to share it."""
    if choice.pp > 1:
        yield choice.on(schedule="1f1b", chunks=1)
        yield choice.on(schedule="zb_h1", chunks=1)
        if choice.schedule in CHUNKED and choice.chunks > 2:
            yield choice.on(chunks=choice.chunks // 2)
    if choice.tp > 1:
        yield choice.on(sp=not choice.sp)
    if choice.pp == 1 and 0 < choice.zero < 3:
        yield choice.on(zero=choice.zero + 1)
    if choice.cp > 1:
        for via in STRATEGIES:
            if via != choice.via:
                yield choice.on(via=via)


def _tidy(choice: Choice) -> Choice:
    """The choice without settings of axes of one rank."""
    if choice.tp == 1:
        choice = choice.on(sp=False, fold=False)
    if choice.pp == 1:
        choice = choice.on(schedule="", chunks=1)
    if choice.cp == 1:
        choice = choice.on(via="")
    return choice if choice.ep > 1 else choice.on(fold=False)

"""Why a plan is as it is, in the three steps that practitioners take: fit, batch, throughput.

Each reason compares the best plan with one that differs in one respect, both compiled and priced.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf

from attrs import evolve, field, frozen

from ...analysis.context_parallel import STRATEGIES
from ...config.gpus import GIB
from ...reports.time import seconds
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
"""By section of a plan, the values of a choice that it says; the first section that differs has
a reason's comment.
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
        return _said(self.best.choice, self.other.choice)

    @property
    def section(self) -> str:
        """The section of the plan that says it."""
        names = self.best.choice.differs(self.other.choice)
        return next(section for section, own in SECTIONS.items() if {*own} & {*names})

    def __str__(self) -> str:
        return f"{self._compared()}{self._excluded()}"

    def _excluded(self) -> str:
        """For instance ` (kept: schedule 1f1b)`, of a plan that has another value than was
        asked for.
        """
        names = [name for name in self.best.choice.differs(self.other.choice) if name in self.kept]
        own = self.best.choice.settings
        values = (f"{name} {own.get(name, getattr(self.best.choice, name))}" for name in names)
        return f" (kept: {', '.join(values)})" if names else ""

    def _compared(self) -> str:
        needs, own = self.other.needs / GIB, self.best.needs / GIB
        if self.step == FIT or self.other.seconds == inf:
            return f"{self.what} needs {needs:,.1f} GiB in place of {own:,.1f}: {_room(self.other)}"
        change = self.other.seconds / self.best.seconds - 1
        room = "" if self.other.fits else f", but {_room(self.other)}"
        times = f"{seconds(self.other.seconds)} in place of {seconds(self.best.seconds)}"
        return f"{self.what} takes {times}, {change:+z.1%}{room}"


def _room(it: Priced) -> str:
    if it.fits:
        return "it fits too"
    if not it.may_fit:
        return f"it does not fit {(it.capacity or 0) / GIB:,.0f} GiB"
    return f"it {may_not_fit(it)}"


def may_not_fit(it: Priced) -> str:
    """The range of memory of a plan that may fit, for instance `may not fit: 76.1 to 84.0 GiB
    of 80`.
    """
    room = (it.capacity or 0) / GIB
    said = "may not fit" if it.high > (it.capacity or 0) else "is close to full"
    return f"{said}: {it.low / GIB:,.1f} to {it.high / GIB:,.1f} GiB of {room:,.0f}"


def _said(best: Choice, other: Choice) -> str:
    names = best.differs(other)
    if {*names} & {*SECTIONS["mesh"]}:
        axes = [f"{axis} {getattr(other, axis)}" for axis in SECTIONS["mesh"] if axis in names]
        return " × ".join(axes)
    said = dict.fromkeys("schedule" if name == "chunks" else name for name in names)
    return ", ".join(f"{name} {other.settings.get(name, getattr(other, name))}" for name in said)


def reasons(
    best: Priced,
    known: Sequence[Priced],
    price: Callable[[Choice], Priced | Unpriced],
    kept: Mapping[str, object],
) -> tuple[Reason, ...]:
    """Reasons for a plan, as far as its neighbours are plans, even without the values of
    `kept`; some are `known`.
    """
    tried = [*neighbours(best.choice)]
    priced: dict[Choice, Priced | Unpriced] = {it.choice: it for it in known}
    new = [choice for _, choice in tried if choice not in priced]
    priced |= dict(zip(new, in_two(price, new), strict=True))
    found = [
        Reason(step, best, it, kept)
        for step, choice in tried
        if isinstance(it := priced[choice], Priced)
    ]
    tight = [it for it in found if it.step == FIT and not it.other.fits]
    loose = [evolve(it, step=THROUGHPUT) for it in found if it.step == FIT and it.other.fits]
    return (
        *tight,
        *(
            it
            for it in (*loose, *found)
            if it.step == BATCH or (it.step == THROUGHPUT and it.other.seconds < inf)
        ),
    )


def neighbours(of: Choice) -> Iterator[tuple[str, Choice]]:
    """Choices that differ in one respect, by the step in which it matters first: with less
    sharding to fit at all.
    """
    yield from ((step, it) for step, it in _changed(of) if it != of)


def _changed(of: Choice) -> Iterator[tuple[str, Choice]]:
    for axis in ("tp", "pp", "cp", "ep"):
        if getattr(of, axis) % 2 == 0:
            yield FIT, _tidy(of.on(**{axis: getattr(of, axis) // 2, "dp": of.dp * 2}))
    if of.zero:
        yield FIT, of.on(zero=of.zero - 1 if of.pp == 1 else 0, prefetch=1)
    if of.recompute != NONE:
        milder = RECOMPUTE[: RECOMPUTE.index(of.recompute)]
        yield from ((FIT, of.on(recompute=word)) for word in milder[::-1])
    yield BATCH, of.on(microbatch=of.microbatch * 2)
    if of.microbatch % 2 == 0:
        yield BATCH, of.on(microbatch=of.microbatch // 2)
    if of.dp % 2 == 0:
        yield THROUGHPUT, of.on(tp=of.tp * 2, dp=of.dp // 2, sp=True)
        yield (
            THROUGHPUT,
            of.on(
                pp=of.pp * 2,
                dp=of.dp // 2,
                zero=min(of.zero, 1),
                schedule=of.schedule or "1f1b",
                prefetch=1,
            ),
        )
    if of.dp % 2 == 0 and of.cp > 1:
        yield THROUGHPUT, of.on(cp=of.cp * 2, dp=of.dp // 2)
    yield from ((THROUGHPUT, it) for it in _orders(of))


def _orders(of: Choice) -> Iterator[Choice]:
    """Other orders of the same work, and other ways to share it."""
    if of.pp > 1:
        yield of.on(schedule="1f1b", chunks=1)
        yield of.on(schedule="zb_h1", chunks=1)
        if of.schedule in CHUNKED and of.chunks > 2:
            yield of.on(chunks=of.chunks // 2)
    if of.tp > 1:
        yield of.on(sp=not of.sp)
    if of.pp == 1 and 0 < of.zero < 3:
        yield of.on(zero=of.zero + 1)
    if of.cp > 1:
        yield from (of.on(via=via) for via in STRATEGIES if via != of.via)


def _tidy(of: Choice) -> Choice:
    """Without what an axis of one rank has no use for."""
    found = of
    if of.tp == 1:
        found = found.on(sp=False, fold=False)
    if of.pp == 1:
        found = found.on(schedule="", chunks=1)
    if of.cp == 1:
        found = found.on(via="")
    return found if of.ep > 1 else found.on(fold=False)

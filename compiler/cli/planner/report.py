"""The text of `scalec plan`: how the space was thinned, a table of the best plans, reasons, the
plan's text.
"""

from collections.abc import Iterator
from math import inf
from typing import Any

from attrs import asdict, frozen

from ...config.gpus import GIB
from ...config.units import counted
from ...reports.published import get_warning
from ...reports.summary import parameters, table
from ...reports.time import expected, seconds
from .choice import Choice
from .exact import Priced
from .facts import Goal
from .reasons import BATCH, FIT, THROUGHPUT, Reason, may_not_fit
from .search import ALIKE, Found

MOST = 4
"""How many kinds of time are named."""

AS_FAST = "as fast"
COLUMNS = ("tokens/s/GPU", "MFU", "memory", "bubble", "exposed", "plan")

NUMBERS = ("no", "this one", "these two", "these three", "these four", "these five")


@frozen
class Planned:
    """The result of a search, why the best is so, and its text; without a plan that fits, no
    reasons and no text.
    """

    found: Found
    top: int
    reasons: tuple[Reason, ...] = ()
    text: str = ""

    @property
    def shown(self) -> tuple[Priced, ...]:
        """The plans of the table: those that fit or may, or else those that need least."""
        return self.found.first_plans(self.top) or self.found.nearest[: self.top]

    @property
    def best(self) -> Priced:
        """The plan that is proposed: the fastest that fits, or else the first of the table."""
        return self.found.fitting[0] if self.found.fitting else self.shown[0]


def print_plans(it: Planned) -> str:
    """For people."""
    found, goal = it.found, it.found.goal
    model = f"{found.facts.program.name}: {parameters(found.facts.program)}"
    on = (
        f"on {goal.gpus:,} × {goal.hardware.name}, {goal.global_batch:,} sequences of"
        f" {goal.seq:,} tokens a step"
    )
    parts = [
        f"{model}\n{on}, {expected(goal.hardware)}",
        "\n".join(_thinned(found)),
        "\n".join(_table(it)),
    ]
    parts += ["\n".join(_said(it)), *_steps(it), it.text.rstrip()]
    return "\n\n".join(filter(None, parts))


def _thinned(found: Found) -> Iterator[str]:
    for step, count in found.left:
        yield f"{count:>11,}  {step}"
    if found.priced:
        fitting = f"{len(found.fitting):,} fit" if found.fitting else "none fits"
        if unsure := len(found.by_time) - len(found.fitting):
            fitting += f", {unsure:,} may fit"
        yield (
            f"{len(found.priced):>11,}  compiled: {fitting},"
            f" {sum(each.proved for each in found.priced):,} proved"
        )


def _table(it: Planned) -> Iterator[str]:
    if not it.shown:
        return
    alike = _alike(it)
    rows: list[tuple[str, ...]] = [("", "step", *[AS_FAST] * (len(alike) > 1), *COLUMNS)]
    for number, each in enumerate(it.shown, 1):
        step, *others = _row(each)
        rows.append((str(number), step, *["yes" * (each in alike)] * (len(alike) > 1), *others))
    yield from table(rows, "r" * (len(rows[0]) - 1) + "l")


def _alike(it: Planned) -> tuple[Priced, ...]:
    """The plans of the table that are as fast as the first."""
    return tuple(each for each in it.shown if each in it.found.alike)[: len(NUMBERS) - 1]


def _row(it: Priced) -> tuple[str, ...]:
    memory = f"{it.needs / GIB:,.1f} GiB"
    if it.seconds == inf:
        return "", "", "", memory, "", "", str(it.choice)
    share = [f"{value:.1%}" for value in (it.bubble, it.exposed)]
    return seconds(it.seconds), f"{it.tokens:,.0f}", f"{it.mfu:.1%}", memory, *share, str(it.choice)


def _said(it: Planned) -> Iterator[str]:
    """Lines that say how to read the table."""
    yield from _unsure(it)
    if not it.found.fitting:
        least = it.found.nearest[0]
        room = (least.capacity or 0) / GIB
        full = (
            "close to full, so that its time cannot be told"
            if least.full <= 1
            else f"more than the {room:,.0f} GiB of a GPU"
        )
        yield f"nothing fits: the least that was found needs {least.needs / GIB:,.1f} GiB, {full}"
        yield "try more GPUs, a shorter sequence, or a GPU with more memory"
        return
    alike = len(_alike(it))
    if alike > 1:
        yield (
            f"{AS_FAST}: within {ALIKE:.0%} of the first, less than the model can tell:"
            f" measure {NUMBERS[alike]}"
        )
    first = it.shown[0]
    yield from get_warning(
        it.found.facts.program, it.found.goal.hardware.name, first.mfu, first.tokens
    )


def _unsure(it: Planned) -> Iterator[str]:
    """The plans of the table that may fit, with the range of their memory, and which one is
    proposed then.
    """
    unsure = [(at, each) for at, each in enumerate(it.shown, 1) if each.may_fit]
    yield from (f"{at} {may_not_fit(each)}; its time cannot be told" for at, each in unsure)
    if unsure and it.found.fitting:
        yield f"{it.shown.index(it.best) + 1} is the fastest that fits: the plan below"


def _steps(it: Planned) -> Iterator[str]:
    """The reasons, step by step, each after what the best plan does there."""
    if not it.reasons:
        return
    best = it.best
    facts = {FIT: _room(best), BATCH: _batch(it.found.goal, best.choice), THROUGHPUT: _spent(best)}
    for step, fact in facts.items():
        yield "\n  ".join(
            (f"{step}: {fact}", *(str(reason) for reason in it.reasons if reason.step == step))
        )


def _room(it: Priced) -> str:
    return f"needs {it.needs / GIB:,.1f} of {(it.capacity or 0) / GIB:,.0f} GiB"


def _batch(goal: Goal, of: Choice) -> str:
    """For instance `2,048 sequences are 256 × microbatch 1 × 8 microbatches`."""
    count = goal.global_batch // (of.microbatch * of.replicas)
    ranks = counted(of.replicas, "replica")
    return (
        f"{goal.global_batch:,} sequences are {ranks} × {counted(count, 'microbatch')} of"
        f" {of.microbatch}"
    )


def _spent(it: Priced) -> str:
    """The kinds of time that take most, with their shares."""
    most = sorted(it.kinds.items(), key=lambda pair: -pair[1])[:MOST]
    return "spent on " + ", ".join(f"{kind} {spent / it.seconds:.0%}" for kind, spent in most)


def as_json(it: Planned) -> dict[str, Any]:
    """The same as plain values."""
    goal = it.found.goal
    return {
        "model": it.found.facts.program.name,
        "gpus": goal.gpus,
        "gpu": goal.hardware.name,
        "global_batch": goal.global_batch,
        "seq": goal.seq,
        "source": goal.hardware.source,
        "fits": bool(it.found.fitting),
        "space": [{"step": step, "left": count} for step, count in it.found.left],
        "plans": [plan_json(each, alike=each in it.found.alike) for each in it.shown],
        "reasons": [
            {
                "step": reason.step,
                "change": reason.what,
                "says": str(reason),
                "plan": plan_json(reason.other),
            }
            for reason in it.reasons
        ],
        "plan": it.text,
    }


def plan_json(it: Priced, *, alike: bool = False) -> dict[str, Any]:
    """One plan."""
    return {
        "choice": asdict(it.choice),
        "seconds": it.seconds if it.seconds < inf else None,
        "tokens_per_second_per_gpu": it.tokens,
        "mfu": it.mfu,
        "needs": it.needs,
        "capacity": it.capacity,
        "low": it.low,
        "high": it.high,
        "fits": it.fits,
        "may_fit": it.may_fit,
        "bubble": it.bubble,
        "exposed": it.exposed,
        "kinds": dict(it.kinds),
        "proved": it.proved,
        "alike": alike,
    }

"""The text of `scalec plan`: how the space was thinned, a table of the best plans, reasons, the
plan's text.
"""

from collections.abc import Iterator
from math import inf
from typing import Any

from attrs import asdict, frozen

from ...compiler.config.gpus import GIB
from ...compiler.config.units import count_words
from ...compiler.reports.published import get_warning
from ...compiler.reports.summary import parameters, table
from ...compiler.reports.time import accuracy_words, seconds
from .choice import Choice
from .exact import Priced
from .facts import Goal
from .reasons import BATCH, FIT, THROUGHPUT, Reason, may_not_fit
from .search import ALIKE, SearchResult

MOST = 4
"""How many kinds of time are named."""

AS_FAST = "as fast"
COLUMNS = ("tokens/s/GPU", "MFU", "memory", "bubble", "exposed", "plan")

NUMBERS = ("no", "this one", "these two", "these three", "these four", "these five")


@frozen
class Planned:
    """The result of a search, the reasons for the best plan, and the text of that plan.

    There are no reasons and no text where no plan fits.
    """

    result: SearchResult
    top: int
    reasons: tuple[Reason, ...] = ()
    text: str = ""

    @property
    def table_plans(self) -> tuple[Priced, ...]:
        """The plans of the table: plans that fit or may fit, or else the plans that need least."""
        return self.result.first_plans(self.top) or self.result.nearest[: self.top]

    @property
    def best(self) -> Priced:
        """The plan that is proposed: the fastest that fits, or else the first of the table."""
        plans = self.result.fitting or self.table_plans
        return plans[0]


def print_plans(planned: Planned) -> str:
    """The result for people."""
    result, goal = planned.result, planned.result.goal
    program = result.facts.program
    sequences = f"{goal.global_batch:,} sequences of {goal.seq:,} tokens a step"
    gpus = f"{goal.gpus:,} × {goal.hardware.name}"
    parts = [
        f"{program.name}: {parameters(program)}\n"
        f"on {gpus}, {sequences}, {accuracy_words(goal.hardware)}",
        "\n".join(_thinning_lines(result)),
        "\n".join(_table(planned)),
        "\n".join(_table_notes(planned)),
        *_steps(planned),
        planned.text.rstrip(),
    ]
    return "\n\n".join(filter(None, parts))


def _thinning_lines(result: SearchResult) -> Iterator[str]:
    for step, count in result.left:
        yield f"{count:>11,}  {step}"
    if result.priced:
        fitting = f"{len(result.fitting):,} fit" if result.fitting else "none fits"
        if unsure := len(result.by_time) - len(result.fitting):
            fitting += f", {unsure:,} may fit"
        proved = sum(plan.proved for plan in result.priced)
        yield f"{len(result.priced):>11,}  compiled: {fitting}, {proved:,} proved"


def _table(planned: Planned) -> Iterator[str]:
    if not planned.table_plans:
        return
    alike = _alike(planned)
    has_alike = len(alike) > 1
    rows: list[tuple[str, ...]] = [("", "step", *[AS_FAST] * has_alike, *COLUMNS)]
    for number, plan in enumerate(planned.table_plans, 1):
        step, *others = _row(plan)
        mark = "yes" if plan in alike else ""
        rows.append((str(number), step, *[mark] * has_alike, *others))
    yield from table(rows, "r" * (len(rows[0]) - 1) + "l")


def _alike(planned: Planned) -> tuple[Priced, ...]:
    """The plans of the table that are as fast as the first."""
    alike = [plan for plan in planned.table_plans if plan in planned.result.alike]
    return tuple(alike[: len(NUMBERS) - 1])


def _row(plan: Priced) -> tuple[str, ...]:
    memory = f"{plan.needs / GIB:,.1f} GiB"
    if plan.seconds == inf:
        return "", "", "", memory, "", "", str(plan.choice)
    return (
        seconds(plan.seconds),
        f"{plan.tokens:,.0f}",
        f"{plan.mfu:.1%}",
        memory,
        f"{plan.bubble_share:.1%}",
        f"{plan.exposed_share:.1%}",
        str(plan.choice),
    )


def _table_notes(planned: Planned) -> Iterator[str]:
    """Lines that say how to read the table."""
    result = planned.result
    yield from _unsure(planned)
    if not result.fitting:
        least = result.nearest[0]
        room = (least.capacity or 0) / GIB
        full = f"more than the {room:,.0f} GiB of a GPU"
        if least.full <= 1:
            full = "close to full, so that its time cannot be told"
        yield f"nothing fits: the least that was found needs {least.needs / GIB:,.1f} GiB, {full}"
        yield "try more GPUs, a shorter sequence, or a GPU with more memory"
        return
    alike = len(_alike(planned))
    if alike > 1:
        yield (
            f"{AS_FAST}: within {ALIKE:.0%} of the first, less than the model can tell:"
            f" measure {NUMBERS[alike]}"
        )
    first = planned.table_plans[0]
    yield from get_warning(result.facts.program, result.goal.hardware.name, first.mfu, first.tokens)


def _unsure(planned: Planned) -> Iterator[str]:
    """The plans of the table that may fit, with the range of their memory, and the plan that is
    proposed then.
    """
    is_unsure = False
    for number, plan in enumerate(planned.table_plans, 1):
        if plan.may_fit:
            is_unsure = True
            yield f"{number} {may_not_fit(plan)}; its time cannot be told"
    if is_unsure and planned.result.fitting:
        number = planned.table_plans.index(planned.best) + 1
        yield f"{number} is the fastest that fits: the plan below"


def _steps(planned: Planned) -> Iterator[str]:
    """The reasons, step by step, each after the figures of the best plan in this step."""
    if not planned.reasons:
        return
    best = planned.best
    facts = {
        FIT: _room(best),
        BATCH: _batch(planned.result.goal, best.choice),
        THROUGHPUT: _spent(best),
    }
    for step, fact in facts.items():
        reasons = [str(reason) for reason in planned.reasons if reason.step == step]
        yield "\n  ".join((f"{step}: {fact}", *reasons))


def _room(plan: Priced) -> str:
    return f"needs {plan.needs / GIB:,.1f} of {(plan.capacity or 0) / GIB:,.0f} GiB"


def _batch(goal: Goal, choice: Choice) -> str:
    """For instance `2,048 sequences are 256 × microbatch 1 × 8 microbatches`."""
    count = goal.global_batch // (choice.microbatch * choice.replicas)
    ranks = count_words(choice.replicas, "replica")
    return (
        f"{goal.global_batch:,} sequences are {ranks} × {count_words(count, 'microbatch')} of"
        f" {choice.microbatch}"
    )


def _spent(plan: Priced) -> str:
    """The kinds of time that take most, with their shares."""
    most = sorted(plan.kinds.items(), key=lambda pair: -pair[1])[:MOST]
    return "spent on " + ", ".join(f"{kind} {spent / plan.seconds:.0%}" for kind, spent in most)


def as_json(planned: Planned) -> dict[str, Any]:
    """The result as plain values."""
    result, goal = planned.result, planned.result.goal
    reasons = list[dict[str, Any]]()
    for reason in planned.reasons:
        reasons.append(
            {
                "step": reason.step,
                "change": reason.what,
                "says": str(reason),
                "plan": plan_json(reason.other),
            }
        )
    return {
        "model": result.facts.program.name,
        "gpus": goal.gpus,
        "gpu": goal.hardware.name,
        "global_batch": goal.global_batch,
        "seq": goal.seq,
        "source": goal.hardware.source,
        "fits": bool(result.fitting),
        "space": [{"step": step, "left": count} for step, count in result.left],
        "plans": [plan_json(plan, alike=plan in result.alike) for plan in planned.table_plans],
        "reasons": reasons,
        "plan": planned.text,
    }


def plan_json(plan: Priced, *, alike: bool = False) -> dict[str, Any]:
    """One plan."""
    return {
        "choice": asdict(plan.choice),
        "seconds": plan.seconds if plan.seconds < inf else None,
        "tokens_per_second_per_gpu": plan.tokens,
        "mfu": plan.mfu,
        "needs": plan.needs,
        "capacity": plan.capacity,
        "low": plan.low,
        "high": plan.high,
        "fits": plan.fits,
        "may_fit": plan.may_fit,
        "bubble": plan.bubble_share,
        "exposed": plan.exposed_share,
        "kinds": dict(plan.kinds),
        "proved": plan.proved,
        "alike": alike,
    }

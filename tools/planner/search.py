"""The search: a space thinned and ranked, its best choices compiled, the first of them proved."""

import gc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf, prod

import numpy as np
from attrs import frozen

from ...compiler.analysis.communication import active_count
from ...compiler.analysis.time.report import FULL as NEARLY
from ...compiler.config.units import count_words
from ...compiler.ir import PRECISIONS
from .cells import Cells, cell_columns
from .choice import AXES, FULL, HALF, RECOMPUTE, Choice
from .estimate import Estimate, estimate, fill, state
from .exact import Priced, Unpriced, price, prove
from .facts import Facts, Goal
from .plan_text import ModelFile
from .reasons import neighbours
from .space import Column, Space, space
from .two_processes import in_two

SLACK = 1.1, 1.0
"""Estimates of memory up to this part of the usable memory are taken to fit: at first, and
corrected.
"""

ROUNDS, BEST, OTHERS = 2, 6, 6
"""Rounds in which choices are compiled: the best by estimates, corrected by choices that were
compiled before, and the best of meshes that were not tried."""

TIGHT, TIGHTEST = 3, 1.1
"""How many choices that may fit are compiled, because they may be faster than all that fit; and the
most memory that they have, by corrected estimates, as a part of a GPU's: the lower end of a range
is up to a tenth below the likely value."""

MANY = 2000
"""Choices among which the search looks for other meshes."""

LEAST = 6
"""Choices that are compiled where none fits: the ones that need least."""

ALIKE = 0.05
"""Plans that differ by less cannot be told apart; most of a prediction's error is common to all
plans of a model.
"""


@frozen
class SearchResult:
    """The result of a search: all choices that were compiled.

    left    as in `Space`
    priced  choices that are plans, with their time and memory
    failed  choices that are none
    """

    facts: Facts
    goal: Goal
    left: tuple[tuple[str, int], ...]
    priced: tuple[Priced, ...]
    failed: tuple[Unpriced, ...]

    @property
    def fitting(self) -> tuple[Priced, ...]:
        """Plans that fit, the fastest first."""
        return tuple(sorted((plan for plan in self.priced if plan.fits), key=_rank))

    @property
    def by_time(self) -> tuple[Priced, ...]:
        """Plans that fit and plans that may, the fastest first."""
        plans = [plan for plan in self.priced if plan.fits or plan.may_fit]
        return tuple(sorted(plans, key=_rank))

    def first_plans(self, top: int) -> tuple[Priced, ...]:
        """The fastest `top` of these, the best that fits among them."""
        fastest, best = self.by_time[:top], self.fitting[:1]
        if {*best} <= {*fastest}:
            return fastest
        return (*fastest[: top - 1], *best)

    @property
    def nearest(self) -> tuple[Priced, ...]:
        """All plans; the plan that needs least memory comes first."""
        return tuple(sorted(self.priced, key=lambda plan: plan.needs))

    @property
    def alike(self) -> tuple[Priced, ...]:
        """Plans that the model cannot tell from the best."""
        fitting = self.fitting
        if not fitting:
            return ()
        slowest = fitting[0].seconds * (1 + ALIKE)
        return tuple(plan for plan in fitting if plan.seconds <= slowest)


def _rank(plan: Priced) -> tuple[float, int, int]:
    """The fastest first; of plans that take as long, the plan with fewer settings, then the plan
    that needs least memory.
    """
    return float(f"{plan.seconds:.6g}"), plan.choice.prefetch, plan.needs


Tell = Callable[[str], object]
"""Takes a line about the next step of a search."""


def silent(line: str) -> None:
    """Says nothing."""


def search(
    file: ModelFile,
    facts: Facts,
    goal: Goal,
    kept: Mapping[str, object],
    proved: int = 5,
    cells: Cells | None = None,
    tell: Tell = silent,
) -> SearchResult:
    """The best plans of a model for a goal, among plans with the values of `kept`; the first
    `proved` plans are proved.

    `cells` of an earlier search, of the same model, sequence and GPU, are not compiled once more.
    The search calls `tell` with a line before each of its steps.
    """
    return _Search(file, facts, goal, kept, tell).run(proved, {} if cells is None else cells)


class _Search:
    def __init__(
        self, file: ModelFile, facts: Facts, goal: Goal, kept: Mapping[str, object], tell: Tell
    ) -> None:
        self._file, self._facts, self._goal, self._tell = file, facts, goal, tell
        self._price = partial(price, file, facts, goal)
        self._space = self._drop_too_large(space(facts, goal, kept))
        self._priced = dict[int, Priced]()
        self._failed = list[Unpriced]()
        self._tried = set[int]()
        self._kept = kept
        self._beside = dict[Choice, Priced]()

    def _drop_too_large(self, all: Space) -> Space:
        """Candidates whose state fits a GPU; if none does, the ones with least state."""
        if not len(all):
            return all
        bytes, room = state(self._facts, all.columns).bytes, self._goal.capacity
        thinned = all.where(bytes <= (room or np.inf), "whose state fits a GPU")
        if len(thinned):
            return thinned
        least = np.sort(bytes)[:LEAST][-1]
        return Space(all.where(bytes <= least).columns, thinned.left)

    def run(self, proved: int, cells: Cells) -> SearchResult:
        if not len(self._space):
            return SearchResult(self._facts, self._goal, self._space.left, (), ())
        choices = count_words(len(self._space), "choice")
        self._tell(f"estimating {choices} for {count_words(self._goal.gpus, 'GPU')}")
        columns = cell_columns(self._file, self._facts, self._goal, self._space, cells)
        estimates = estimate(self._facts, self._goal, self._space, columns)
        left = self._space.left
        if left[-1][1]:
            left = (*left, ("that can be faster than the best", self._count_faster(estimates)))
        for _ in range(ROUNDS):
            self._compile(self._next(estimates))
        if not any(plan.fits for plan in self._priced.values()):
            self._compile(self._least(estimates))
        self._climb()
        self._compile(self._tight(estimates))
        return self._with_proofs(left, proved)

    def _with_proofs(self, left: tuple[tuple[str, int], ...], proved: int) -> SearchResult:
        """All that was compiled, after proofs of the first plans."""
        plans: dict[Choice, Priced | Unpriced] = {plan.choice: plan for plan in self._all}
        gc.collect()
        compiled = tuple(plan for plan in plans.values() if isinstance(plan, Priced))
        best = SearchResult(self._facts, self._goal, left, compiled, ()).first_plans(proved)
        by_schedule = dict[object, list[Priced]]()  # plans of one schedule may have equal cases
        for plan in best:
            has_empty_stages = plan.choice.pp * plan.choice.chunks > self._facts.layers
            key = (plan.choice.schedule, has_empty_stages)
            by_schedule.setdefault(key, []).append(plan)
        self._tell(f"proving {count_words(len(best), 'plan')}")
        prove_all = partial(prove, self._file, self._facts, self._goal)
        for results in in_two(prove_all, [*by_schedule.values()], worth=2):
            plans |= {result.choice: result for result in results}
        priced, failed = list[Priced](), [*self._failed]
        for plan in plans.values():
            if isinstance(plan, Priced):
                priced.append(plan)
            else:
                failed.append(plan)
        return SearchResult(self._facts, self._goal, left, tuple(priced), tuple(failed))

    def _climb(self) -> None:
        """Compiles choices that differ from the best in one respect, until none is better."""
        while True:
            plans = self._all
            best = min((plan for plan in plans if plan.fits), key=_rank, default=None)
            if best is None:
                return
            tried = {plan.choice for plan in (*plans, *self._failed)}
            untried = dict[Choice, None]()
            for _, choice in neighbours(best.choice):
                if choice.matches(self._kept) and choice not in tried:
                    untried[choice] = None
            self._tell(f"compiling {count_words(len(untried), 'plan')} next to the best so far")
            for result in in_two(self._price, [*untried]):
                if isinstance(result, Priced):
                    self._beside[result.choice] = result
                else:
                    self._failed.append(result)
            if not any(plan.fits and _rank(plan) < _rank(best) for plan in self._beside.values()):
                return

    def _count_faster(self, estimates: Estimate) -> int:
        """How many choices are faster than the best estimate, if products ran as fast as any and
        only bubbles were added.
        """
        goal, columns = self._goal, self._space.columns
        train, gpu = self._facts.program.train, goal.hardware
        rate = gpu.product_rate(PRECISIONS[train.precision])
        products = 6 * goal.tokens * _count_multiplying_params(self._facts) / goal.gpus / rate
        factors = {FULL: 8 / 6, HALF: 7 / 6}  # forward, done once more, is 2 of 6 products
        times = np.array([factors.get(word, 1.0) for word in RECOMPUTE])[columns["recompute"]]
        fit = estimates.bytes <= (goal.capacity or np.inf)
        best = np.min(estimates.seconds[fit], initial=np.inf)
        return int(np.sum(products * times * fill(goal, columns) <= best))

    def _next(self, estimates: Estimate) -> list[int]:
        """The best by corrected estimates, and the best of other meshes."""
        seconds, bytes = self._get_corrected_estimates(estimates)
        fit = bytes <= (self._goal.capacity or np.inf) * NEARLY * SLACK[bool(self._priced)]
        fit[[*self._tried]] = False
        by_time = np.argsort(np.where(fit, seconds, np.inf), kind="stable")
        order = [int(number) for number in by_time[: min(MANY, np.sum(fit))]]
        first = order[:BEST]
        meshes = {self._mesh(number) for number in (*first, *self._priced)}
        for number in order:
            if len(first) < BEST + OTHERS and self._mesh(number) not in meshes:
                meshes.add(self._mesh(number))
                first.append(number)
        return first

    def _tight(self, estimates: Estimate) -> list[int]:
        """Choices that may fit, and are faster by corrected estimates than the best that fits."""
        room = self._goal.capacity
        if room is None or not self._priced:
            return []
        seconds, bytes = self._get_corrected_estimates(estimates)
        best = min((plan.seconds for plan in self._all if plan.fits), default=inf)
        may = (bytes > NEARLY * room) & (bytes <= TIGHTEST * room) & (seconds < best)
        may[[*self._tried]] = False
        by_time = np.argsort(np.where(may, seconds, np.inf), kind="stable")
        compiled = {plan.choice for plan in self._all}
        numbers = list[int]()
        for number in map(int, by_time[: min(TIGHT, int(np.sum(may)))]):
            if self._space.choice(number) not in compiled:
                numbers.append(number)
        return numbers

    @property
    def _all(self) -> tuple[Priced, ...]:
        return (*self._priced.values(), *self._beside.values())

    def _least(self, estimates: Estimate) -> list[int]:
        _, bytes = self._get_corrected_estimates(estimates)
        order = map(int, np.argsort(bytes, kind="stable"))
        return [number for number in order if number not in self._tried][:LEAST]

    def _mesh(self, number: int) -> tuple[int, ...]:
        return tuple(int(self._space.columns[axis][number]) for axis in AXES)

    def _compile(self, numbers: Sequence[int]) -> None:
        self._tried |= {*numbers}
        self._tell(f"compiling {count_words(len(numbers), 'plan')} of the best by estimates")
        gc.collect()  # programs are in circles, and a proof needs memory of its own
        results = in_two(self._price, [self._space.choice(number) for number in numbers])
        for number, result in zip(numbers, results, strict=True):
            if isinstance(result, Priced):
                self._priced[number] = result
            else:
                self._failed.append(result)

    def _get_corrected_estimates(self, estimates: Estimate) -> tuple[Column, Column]:
        """Seconds and bytes: estimates times the error of compiled choices of their kind; for
        kinds without compiled choices, times the mean error.
        """
        if not self._priced:
            return estimates.seconds, estimates.bytes
        kinds = np.stack([self._space.columns[name] for name in KIND], axis=1)
        exact_seconds, exact_bytes = dict[int, float](), dict[int, float]()
        for number, plan in self._priced.items():
            exact_bytes[number] = plan.needs
            if plan.seconds < inf:
                exact_seconds[number] = plan.seconds
        return (
            estimates.seconds * _error_factors(kinds, estimates.seconds, exact_seconds),
            estimates.bytes * _error_factors(kinds, estimates.bytes, exact_bytes),
        )


def _error_factors(kinds: Column, estimates: Column, exact: Mapping[int, float]) -> Column:
    """By how much estimates of each kind are off, the geometric mean.

    For a kind without compiled choices, the mean of all compiled choices.
    """
    numbers = np.array([*exact], int)
    off = np.log(np.array([*exact.values()]) / estimates[numbers])
    factors = np.full(len(kinds), np.mean(off) if len(off) else 0.0)
    compiled_kinds = kinds[numbers]
    for kind in np.unique(compiled_kinds, axis=0):
        errors = off[np.all(compiled_kinds == kind, axis=1)]
        factors[np.all(kinds == kind, axis=1)] = np.mean(errors)
    return np.exp(factors)


KIND = ("schedule", "zero", "recompute")
"""Values of a choice: choices with the same ones have estimates with the same error."""


def _count_multiplying_params(facts: Facts) -> int:
    """Parameters that multiply each token: all active ones except the largest table."""
    program = facts.program
    tables = [
        prod(map(program.size, param.type.dims)) for param in program.params if not param.stacked
    ]
    return active_count(program) - max(tables, default=0)

"""The search: a space thinned and ranked, its best choices compiled, the first of them proved."""

import gc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf, prod

import numpy as np
from attrs import frozen

from ...analysis.communication import active_count
from ...analysis.time.report import FULL as NEARLY
from ...config.units import counted
from ...ir import PRECISIONS
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
"""Estimates of memory up to this part of what may be used are taken to fit: at first, and
corrected.
"""

ROUNDS, BEST, OTHERS = 2, 6, 6
"""Rounds in which choices are compiled: the best by estimates, corrected by what was compiled
before, and the best of meshes that were not tried."""

TIGHT, TIGHTEST = 3, 1.1
"""Choices that may fit and are compiled because they may be faster than all that fit; their memory
by corrected estimates, as a part of a GPU's, at most: the lower end of a range is up to a tenth
below what is likely."""

MANY = 2000
"""Choices among which those of other meshes are looked for."""

LEAST = 6
"""Choices that are compiled where none fits: those that need least."""

ALIKE = 0.05
"""Plans that differ by less cannot be told apart; most of a prediction's error is that of all
plans of a model.
"""


@frozen
class Found:
    """Plans that a search has found: the best first, of all that was compiled; `left` as in
    `Space`.
    """

    facts: Facts
    goal: Goal
    left: tuple[tuple[str, int], ...]
    priced: tuple[Priced, ...]
    failed: tuple[Unpriced, ...]

    @property
    def fitting(self) -> tuple[Priced, ...]:
        """Plans that fit, the fastest first."""
        return tuple(sorted((it for it in self.priced if it.fits), key=_rank))

    @property
    def by_time(self) -> tuple[Priced, ...]:
        """Plans that fit and plans that may, the fastest first."""
        return tuple(sorted((it for it in self.priced if it.fits or it.may_fit), key=_rank))

    def first_plans(self, top: int) -> tuple[Priced, ...]:
        """The fastest `top` of these, the best that fits among them."""
        fastest, best = self.by_time[:top], self.fitting[:1]
        if {*best} <= {*fastest}:
            return fastest
        return (*fastest[: top - 1], *best)

    @property
    def nearest(self) -> tuple[Priced, ...]:
        """All, those that need least first."""
        return tuple(sorted(self.priced, key=lambda it: it.needs))

    @property
    def alike(self) -> tuple[Priced, ...]:
        """Plans that the model cannot tell from the best."""
        best = self.fitting[:1]
        return (
            tuple(it for it in self.fitting if it.seconds <= best[0].seconds * (1 + ALIKE))
            if best
            else ()
        )


def _rank(it: Priced) -> tuple[float, int, int]:
    """The fastest first; of those that take as long, that which says least, then that which
    needs least.
    """
    return float(f"{it.seconds:.6g}"), it.choice.prefetch, it.needs


Tell = Callable[[str], object]
"""Takes a line about what a search does next."""


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
) -> Found:
    """The best plans of a model for a goal, of all that have the values of `kept`; the first ones
    are proved.

    `cells` of an earlier search, of the same model, sequence and GPU, are not compiled once more.
    The search says to `tell` what it begins to do.
    """
    return _Search(file, facts, goal, kept, tell).found(proved, {} if cells is None else cells)


class _Search:
    def __init__(
        self, file: ModelFile, facts: Facts, goal: Goal, kept: Mapping[str, object], tell: Tell
    ) -> None:
        self._file, self._facts, self._goal, self._tell = file, facts, goal, tell
        self._price = partial(price, file, facts, goal)
        self._space = self._thinned(space(facts, goal, kept))
        self._priced = dict[int, Priced]()
        self._failed = list[Unpriced]()
        self._tried = set[int]()
        self._kept = kept
        self._beside = dict[Choice, Priced]()

    def _thinned(self, all: Space) -> Space:
        """Candidates whose state fits a GPU; if none does, those with least."""
        if not len(all):
            return all
        bytes, room = state(self._facts, all.columns).bytes, self._goal.capacity
        mask = bytes <= (room or np.inf)
        found = all.where(mask, "whose state fits a GPU")
        return (
            found
            if len(found)
            else Space(all.where(bytes <= np.sort(bytes)[:LEAST][-1]).columns, found.left)
        )

    def found(self, proved: int, cells: Cells) -> Found:
        if not len(self._space):
            return Found(self._facts, self._goal, self._space.left, (), ())
        self._tell(
            f"estimating {counted(len(self._space), 'choice')} for"
            f" {counted(self._goal.gpus, 'GPU')}"
        )
        columns = cell_columns(self._file, self._facts, self._goal, self._space, cells)
        estimates = estimate(self._facts, self._goal, self._space, columns)
        left = self._space.left
        if left[-1][1]:
            left = (*left, ("that can be faster than the best", self._bounded(estimates)))
        for _ in range(ROUNDS):
            self._compile(self._next(estimates))
        if not any(it.fits for it in self._priced.values()):
            self._compile(self._least(estimates))
        self._climb()
        self._compile(self._tight(estimates))
        known = {it.choice: it for it in self._all}
        gc.collect()
        best = Found(self._facts, self._goal, left, tuple(known.values()), ()).first_plans(proved)
        alike = dict[object, list[Priced]]()  # those of one schedule may have equal cases
        for it in best:
            empty = it.choice.pp * it.choice.chunks > self._facts.layers
            alike.setdefault((it.choice.schedule, empty), []).append(it)
        self._tell(f"proving {counted(len(best), 'plan')}")
        shown = in_two(
            partial(prove, self._file, self._facts, self._goal), [*alike.values()], worth=2
        )
        all = (known | {it.choice: it for each in shown for it in each}).values()
        failed = (*self._failed, *(it for it in all if isinstance(it, Unpriced)))
        return Found(
            self._facts, self._goal, left, tuple(it for it in all if isinstance(it, Priced)), failed
        )

    def _climb(self) -> None:
        """Compiles what differs from the best in one respect, as long as that finds a better
        one.
        """
        while True:
            known = self._all
            best = min((it for it in known if it.fits), key=_rank, default=None)
            if best is None:
                return
            tried = {it.choice for it in known} | {it.choice for it in self._failed}
            near = dict.fromkeys(
                choice for _, choice in neighbours(best.choice) if choice.matches(self._kept)
            )
            untried = [choice for choice in near if choice not in tried]
            self._tell(f"compiling {counted(len(untried), 'plan')} next to the best so far")
            made = in_two(self._price, untried)
            self._beside |= {it.choice: it for it in made if isinstance(it, Priced)}
            self._failed += [it for it in made if isinstance(it, Unpriced)]
            if not any(it.fits and _rank(it) < _rank(best) for it in self._beside.values()):
                return

    def _bounded(self, of: Estimate) -> int:
        """How many are faster than the best estimate if products run as fast as any and only
        bubbles are added.
        """
        goal, columns = self._goal, self._space.columns
        train, on = self._facts.program.train, goal.hardware
        rate = on.product_rate(PRECISIONS[train.precision])
        products = 6 * goal.tokens * _multiplied(self._facts) / goal.gpus / rate
        again = {FULL: 8 / 6, HALF: 7 / 6}
        times = np.array([again.get(word, 1.0) for word in RECOMPUTE])[columns["recompute"]]
        best = np.min(of.seconds[of.bytes <= (goal.capacity or np.inf)], initial=np.inf)
        return int(np.sum(products * times * fill(goal, columns) <= best))

    def _next(self, of: Estimate) -> list[int]:
        """The best by corrected estimates, and the best of other meshes."""
        seconds, bytes = self._corrected(of)
        fit = bytes <= (self._goal.capacity or np.inf) * NEARLY * SLACK[bool(self._priced)]
        fit[[*self._tried]] = False
        order = [
            int(at)
            for at in np.argsort(np.where(fit, seconds, np.inf), kind="stable")[
                : min(MANY, np.sum(fit))
            ]
        ]
        first = order[:BEST]
        meshes = {self._mesh(at) for at in (*first, *self._priced)}
        for at in order:
            if len(first) < BEST + OTHERS and self._mesh(at) not in meshes:
                meshes.add(self._mesh(at))
                first.append(at)
        return first

    def _tight(self, of: Estimate) -> list[int]:
        """Choices that may fit, and are faster by corrected estimates than the best that fits."""
        room = self._goal.capacity
        if room is None or not self._priced:
            return []
        seconds, bytes = self._corrected(of)
        best = min((it.seconds for it in self._all if it.fits), default=inf)
        may = (bytes > NEARLY * room) & (bytes <= TIGHTEST * room) & (seconds < best)
        may[[*self._tried]] = False
        order = np.argsort(np.where(may, seconds, np.inf), kind="stable")[
            : min(TIGHT, int(np.sum(may)))
        ]
        known = {it.choice for it in self._all}
        return [int(at) for at in order if self._space.choice(int(at)) not in known]

    @property
    def _all(self) -> tuple[Priced, ...]:
        return (*self._priced.values(), *self._beside.values())

    def _least(self, of: Estimate) -> list[int]:
        order = (int(at) for at in np.argsort(self._corrected(of)[1], kind="stable"))
        return [at for at in order if at not in self._tried][:LEAST]

    def _mesh(self, at: int) -> tuple[int, ...]:
        return tuple(int(self._space.columns[axis][at]) for axis in AXES)

    def _compile(self, places: Sequence[int]) -> None:
        self._tried |= {*places}
        self._tell(f"compiling {counted(len(places), 'plan')} of the best by estimates")
        gc.collect()  # programs are in circles, and a proof needs memory of its own
        made = in_two(self._price, [self._space.choice(at) for at in places])
        for at, it in zip(places, made, strict=True):
            if isinstance(it, Priced):
                self._priced[at] = it
            else:
                self._failed.append(it)

    def _corrected(self, of: Estimate) -> tuple[Column, Column]:
        """Estimates times how far compiled choices of their kind were off; of kinds that were
        not, times the mean.
        """
        if not self._priced:
            return of.seconds, of.bytes
        kinds = np.stack([self._space.columns[name] for name in KIND], axis=1)
        exact = {at: (it.seconds, it.needs) for at, it in self._priced.items()}
        return (
            of.seconds
            * _off(
                kinds,
                of.seconds,
                {at: seconds for at, (seconds, _) in exact.items() if seconds < inf},
            ),
            of.bytes * _off(kinds, of.bytes, {at: needs for at, (_, needs) in exact.items()}),
        )


def _off(kinds: Column, estimates: Column, exact: Mapping[int, float]) -> Column:
    """By how much estimates of each kind are off, the geometric mean; of kinds that were not
    compiled, that of all.
    """
    at = np.array([*exact], int)
    off = np.log(np.array([*exact.values()]) / estimates[at])
    factors = np.full(len(kinds), np.mean(off) if len(off) else 0.0)
    for kind in np.unique(kinds[at], axis=0):
        factors[np.all(kinds == kind, axis=1)] = np.mean(off[np.all(kinds[at] == kind, axis=1)])
    return np.exp(factors)


KIND = ("schedule", "zero", "recompute")
"""Values by which estimates are off alike."""


def _multiplied(facts: Facts) -> int:
    """Parameters that multiply each token: all active ones but those of the largest table."""
    outside = [
        prod(map(facts.program.size, it.type.dims)) for it in facts.program.params if not it.stacked
    ]
    return active_count(facts.program) - max(outside, default=0)

"""Chooses which values backward recomputes under `recompute = auto(…)`, by the memory account of
the whole step.

Purpose: of the cuts of least time (`analysis.recompute_cut`) the first with which a rank fits, made
finer between it and the one before; whole layers, as `recompute = full`, where no cut is enough.
Before: `differentiate`.  Non-goals: `gathered = regather`, whose gathers a cut leaves as the plan
has them.
"""

from bisect import bisect_left
from collections.abc import Iterable

from attrs import evolve

from ...analysis.memory import SAID, capacity, why_unknown
from ...analysis.recompute_cut import Choices, Cut, choices, frontier, least, times
from ...config.settings import AUTO
from ...config.units import amount
from ...ir import Op, Program, ops_in, regions_in, walk_regions
from ...syntax.diagnostics import wrong
from ..variant import Variant

MOST_NESTED = 16
"""The most ops of a body that are recomputed by themselves: each is a block of Python, which
nests 20.
"""

FINER = 4
"""How often a finer cut is looked for between two of which one fits."""


def choose_recompute(plan: Variant) -> Variant:
    """The variant with its recomputed values.  Raises PlanError."""
    if plan.program.train.recompute.word != AUTO or plan.program.recomputed:
        return plan
    search = _Search(plan, *bound(plan.program))
    if search.fits(plan):
        return plan
    return search.cut() or search.whole_layers()


def bound(program: Program) -> tuple[int, bool]:
    """The most bytes, and whether they are for a rank's tensors alone.

    Raises PlanError where there is no bound.
    """
    memory, room = program.train.recompute.memory, capacity(program)
    if memory is not None:
        return memory, True
    if room is None:
        span = program.train.spans["recompute"]
        instead = "name a GPU in `cluster`"
        if program.cluster.gpu:
            instead = f"`{SAID}` in `cluster`"
        message = f"nothing says how much memory a rank has: {why_unknown(program)}"
        raise wrong(
            "E0419", message, span, help=f"write `recompute = auto(memory = 60GiB)`, or {instead}"
        )
    return room, False


class _Search:
    """Looks for the cut of least time with which a rank needs `most` bytes or less.

    plan     the variant that recomputes nothing
    tensors  whether the bytes are for a rank's tensors alone
    """

    def __init__(self, plan: Variant, most: int, tensors: bool) -> None:
        self._plan, self._program, self._most, self._tensors = plan, plan.program, most, tensors
        self._known: dict[frozenset[str], Variant] = {}

    def fits(self, variant: Variant) -> bool:
        """Whether a rank's memory is enough."""
        return self._needs(variant) <= self._most

    def _needs(self, variant: Variant) -> int:
        return variant.memory.total if self._tensors else variant.memory.needs

    def _with_recomputed(self, names: Iterable[str]) -> Variant:
        return self._plan.with_program(evolve(self._program, recomputed=tuple(names)))

    def _of(self, cut: Cut) -> Variant:
        if cut.names not in self._known:
            names = list[str]()
            for op in self._program.ops:
                if op.outputs and op.outputs[0].name in cut.names:
                    names.append(op.outputs[0].name)
            self._known[cut.names] = self._with_recomputed(names)
        return self._known[cut.names]

    def cut(self) -> Variant | None:
        """The variant with the cut of least time that fits; None where none does."""
        values = choices(self._plan.least, times(self._plan.least))
        cuts = [cut for cut in frontier(values) if self._nests(cut)]
        index = bisect_left(cuts, True, key=lambda cut: self.fits(self._of(cut)))
        if index == len(cuts):
            return None
        return self._of(self._finer(values, cuts, index))

    def _finer(self, values: Choices, cuts: list[Cut], index: int) -> Cut:
        """A cut between one that fits and the one before: bytes that are kept weigh as they do
        between these two.
        """
        best, before = cuts[index], cuts[index - 1]
        best_needs, needs_before = self._needs(self._of(best)), self._needs(self._of(before))
        spare, more = self._most - best_needs, needs_before - best_needs
        most = best.bytes + spare * (before.bytes - best.bytes) / more
        for _ in range(FINER):
            finer = least(values, most, cuts)
            if finer is None or finer.time >= best.time:
                break
            if self._nests(finer) and self.fits(self._of(finer)):
                return finer
            most = min((most + best.bytes) / 2, finer.bytes - 1)
        return best

    def _nests(self, cut: Cut) -> bool:
        """Whether few enough ops of each body are recomputed by themselves."""
        region = self._program.region
        for inner in (region, *walk_regions(region.body)):
            count = sum(_names(op) in cut.names for op in ops_in(inner.body))
            if count > MOST_NESTED:
                return False
        return True

    def whole_layers(self) -> Variant:
        """The variant whose layers are recomputed.  Raises PlanError where that is not enough."""
        repeats = walk_regions(self._program.region.body)
        innermost = dict.fromkeys(region.dim for region in repeats if not regions_in(region.body))
        whole = self._with_recomputed(innermost)
        if self.fits(whole):
            return whole
        lowest = min(map(self._needs, (whole, self._plan, *self._known.values())))
        message = (
            f"a rank needs {amount(lowest)} whatever is recomputed, and has {amount(self._most)}"
        )
        help = "take smaller microbatches, or shard parameters and state over more ranks"
        raise wrong("E0419", message, self._program.train.spans["recompute"], help=help)


def _names(op: Op) -> str:
    return op.outputs[0].name if op.outputs else ""

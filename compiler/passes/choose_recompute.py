"""Chooses which values backward recomputes under `recompute = auto(…)`, by the memory account of
the whole step.

Purpose: of the cuts of least time (`analysis.recompute_cut`) the first with which a rank fits, made
finer between it and the one before; whole layers, as `recompute = full`, where no cut is enough.
Before: `differentiate`.  Non-goals: `gathered = regather`, whose gathers a cut leaves as the plan
has them.
"""

from bisect import bisect_left
from collections.abc import Callable

from attrs import evolve, frozen

from ..analysis.memory import SAID, account, capacity, why_unknown
from ..analysis.recompute_cut import Choices, Cut, choices, frontier, least, times
from ..config.settings import AUTO
from ..config.units import amount
from ..ir import Op, Program, ops_in, regions_in, walk_regions
from ..syntax.diagnostics import wrong

MOST_NESTED = 16
"""The most ops of a body that are recomputed by themselves: each is a block of Python, which
nests 20.
"""

FINER = 4
"""How often a finer cut is looked for between two of which one fits."""

Lowered = Callable[[Program], Program]


def choose_recompute(program: Program, lowered: Lowered) -> Program:
    """The program with its recomputed values; `lowered` gives that after the last pass.

    Raises PlanError.
    """
    if program.train.recompute.word != AUTO or program.recomputed:
        return program
    search = _Search(program, lowered, *bound(program))
    if search.fits(search.nothing):
        return program
    return search.cut() or search.whole_layers()


def bound(program: Program) -> tuple[int, bool]:
    """The most bytes, and whether they are for a rank's tensors alone.

    Raises PlanError where there is no bound.
    """
    given, room = program.train.recompute.memory, capacity(program)
    if given is not None:
        return given, True
    if room is None:
        span = program.train.spans["recompute"]
        instead = f"`{SAID}` in `cluster`" if program.cluster.gpu else "name a GPU in `cluster`"
        message = f"nothing says how much memory a rank has: {why_unknown(program)}"
        raise wrong(
            "E0419", message, span, help=f"write `recompute = auto(memory = 60GiB)`, or {instead}"
        )
    return room, False


@frozen
class _Lowered:
    """A program before and after the last passes, and the bytes that a rank of it needs."""

    program: Program
    last: Program
    needs: int


class _Search:
    """Looks for the cut of least time with which a rank needs `most` bytes or less."""

    def __init__(self, program: Program, lowered: Lowered, most: int, tensors: bool) -> None:
        self._program, self._lowered, self._most, self._tensors = program, lowered, most, tensors
        self._known: dict[frozenset[str], _Lowered] = {}
        self.nothing = self._with(program)

    def fits(self, it: _Lowered) -> bool:
        """Whether a rank's memory is enough."""
        return it.needs <= self._most

    def _with(self, program: Program) -> _Lowered:
        last = self._lowered(program)
        found = account(last)
        return _Lowered(program, last, found.total if self._tensors else found.needs)

    def _of(self, cut: Cut) -> _Lowered:
        if cut.names not in self._known:
            ordered = (op.outputs[0].name for op in self._program.ops if op.outputs)
            names = tuple(name for name in ordered if name in cut.names)
            self._known[cut.names] = self._with(evolve(self._program, recomputed=names))
        return self._known[cut.names]

    def cut(self) -> Program | None:
        """The program with the cut of least time that fits; None where none does."""
        known = choices(self.nothing.last, times(self.nothing.last))
        cuts = [cut for cut in frontier(known) if self._nests(cut)]
        at = bisect_left(cuts, True, key=lambda cut: self.fits(self._of(cut)))
        if at == len(cuts):
            return None
        return self._of(self._finer(known, cuts, at)).program

    def _finer(self, known: Choices, cuts: list[Cut], at: int) -> Cut:
        """A cut between one that fits and the one before: bytes that are kept weigh as they do
        between these two.
        """
        best, before = cuts[at], cuts[at - 1]
        spare = self._most - self._of(best).needs
        most = best.bytes + spare * (before.bytes - best.bytes) / (
            self._of(before).needs - self._of(best).needs
        )
        for _ in range(FINER):
            found = least(known, most, cuts)
            if found is None or found.time >= best.time:
                break
            if self._nests(found) and self.fits(self._of(found)):
                return found
            most = min((most + best.bytes) / 2, found.bytes - 1)
        return best

    def _nests(self, cut: Cut) -> bool:
        bodies = [self._program.region, *walk_regions(self._program.region.body)]
        return all(
            sum(_names(op) in cut.names for op in ops_in(body.body)) <= MOST_NESTED
            for body in bodies
        )

    def whole_layers(self) -> Program:
        """The program whose layers are recomputed.  Raises PlanError where that is not enough."""
        repeats = walk_regions(self._program.region.body)
        innermost = dict.fromkeys(region.dim for region in repeats if not regions_in(region.body))
        found = self._with(evolve(self._program, recomputed=(*innermost,)))
        if self.fits(found):
            return found.program
        lowest = min([found, self.nothing, *self._known.values()], key=lambda it: it.needs)
        message = (
            f"a rank needs {amount(lowest.needs)} whatever is recomputed, and has"
            f" {amount(self._most)}"
        )
        help = "take smaller microbatches, or shard parameters and state over more ranks"
        raise wrong("E0419", message, self._program.train.spans["recompute"], help=help)


def _names(op: Op) -> str:
    return op.outputs[0].name if op.outputs else ""

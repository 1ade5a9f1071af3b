"""Backward in two parts: the ops needed for the gradient that is handed on, and the ops for
gradients of weights alone.

The runtime delays weights' gradients of matrix products and embeddings.  These ops, and all that
follows from them, are moved into statements of their own; repeats save the values that these read.
"""

from collections.abc import Iterable, Mapping, Sequence

from attrs import evolve, field, frozen

from ...analysis.stage_program import StageBlock
from ...ir import Arg, Enter, Leave, Region, Stmt, Type, Value, Yield, ancestors, results, uses
from ...ops import VJPS
from ...ops.experts import GROUPED


@frozen
class Halves:
    """The input part, and the weight part, which goes on with the values of the input part."""

    input: StageBlock
    weight: StageBlock


def halves(part: StageBlock, types: Mapping[str, Type]) -> Halves:
    """Both parts of a stage's backward."""
    split = _Split(dict(types)).split_body(part.body, {*part.outputs, *part.carried}, set())
    return Halves(evolve(part, body=tuple(split.now)), StageBlock(body=tuple(split.then)))


@frozen
class _Parts:
    """Statements now, statements later, and the names that later ones define."""

    now: list[Stmt] = field(factory=list[Stmt])
    then: list[Stmt] = field(factory=list[Stmt])
    late: set[str] = field(factory=set[str])


@frozen
class _Split:
    """Splits bodies; `types` grows by what repeats are made to keep."""

    types: dict[str, Type]

    def split_body(
        self, body: Sequence[Stmt], wanted: Iterable[str], late: Iterable[str]
    ) -> _Parts:
        """The parts of a body that hands on `wanted` and has `late` only in its second part."""
        needed = ancestors(body, wanted)
        parts = _Parts(late={*late})
        for stmt in body:
            if isinstance(stmt, Region):
                self._region(stmt, needed, parts)
                continue
            delayed = stmt.kind in ("contract", GROUPED.name) or VJPS.may_delay(stmt)
            if parts.late & {*stmt.inputs} or (delayed and not needed & {*_result_names(stmt)}):
                parts.then.append(stmt)
                parts.late.update(_result_names(stmt))
            else:
                parts.now.append(stmt)
        return parts

    def _region(self, region: Region, needed: set[str], outer: _Parts) -> None:
        inner = self._inside(region, needed, outer.late)
        if not inner.then:
            outer.now.append(region)
            return
        saved = self._stacks_to_save(region, inner)
        now, then = list[tuple[Yield, Value]](), list[tuple[Yield, Value]]()
        for end, value in zip(region.yields, region.results, strict=True):
            (then if end.name in inner.late else now).append((end, value))
        for name, value in saved.items():
            now.append((Yield(name, Leave.STACK), value))
        args = [arg for arg in region.args if arg.value.name not in inner.late]
        outer.now.append(_with(region, args, inner.now, now))
        args = list[Arg]()
        for arg in region.args:
            if arg.value.name in inner.late or arg.enter is Enter.EACH:
                args.append(arg)
        for name, value in saved.items():
            args.append(Arg(Value(name, self.types[name]), value.name, Enter.EACH))
        outer.then.append(_with(region, args, inner.then, then))
        outer.late.update(value.name for _, value in then)

    def _inside(self, region: Region, needed: set[str], late: set[str]) -> _Parts:
        """The parts of a repeat's body; a carried value is late if any iteration makes it late."""
        wanted = set[str]()
        for value, end in zip(region.results, region.yields, strict=True):
            if value.name in needed:
                wanted.add(end.name)
        carries = [arg.value.name for arg in region.args if arg.enter is Enter.CARRY]
        lasts = [end.name for end in region.yields if end.leave is Leave.LAST]
        slow = {arg.value.name for arg in region.args if arg.source in late}
        while True:
            inner = self.split_body(region.body, wanted, slow)
            read = ancestors(region.body, wanted)
            more, slower = set[str](), set[str]()
            for name, end in zip(carries, lasts, strict=True):
                if name in read:
                    more.add(end)
                if end in inner.late:
                    slower.add(name)
            if more <= wanted and slower <= slow:
                return inner
            wanted, slow = wanted | more, slow | slower

    def _stacks_to_save(self, region: Region, inner: _Parts) -> dict[str, Value]:
        """The stacks of what the weight part of a repeat's body reads of the input part."""
        available = set[str]()
        for stmt in inner.now:
            available.update(_result_names(stmt))
        for arg in region.args:
            if arg.enter is Enter.CARRY and arg.value.name not in inner.late:
                available.add(arg.value.name)
        saved = dict[str, Value]()
        for name in uses(*inner.then):
            if name in available:
                saved[name] = Value(f"{name} saved", self.types[name].stack_along(region.dim))
        self.types.update((value.name, value.type) for value in saved.values())
        return saved


def _with(
    region: Region, args: Sequence[Arg], body: Sequence[Stmt], ends: Sequence[tuple[Yield, Value]]
) -> Region:
    yields, results = tuple(end for end, _ in ends), tuple(value for _, value in ends)
    return evolve(region, args=tuple(args), body=tuple(body), yields=yields, results=results)


def _result_names(stmt: Stmt) -> list[str]:
    return [value.name for value in results(stmt)]
